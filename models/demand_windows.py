"""Troughs of a demand as windows in which units can be lent out: when, how many, and how often such a promise held.

For queues whose demand rises and falls with the day, as that of inference services does. Pure; which queues are named
as such stands in the settings, the forecast behind it in `models/demand.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from features.demand import HOUR
from features.vocabulary import QUANTILES
from models.demand import MIN_HOURS, DemandError, bands, ladder
from models.demand_experts import DAY_H, WEEK_H

Floats = NDArray[np.float64]

_HIGH = QUANTILES.index(0.90)
_EXPLAINED, _DEPTH = 0.5, 0.3
_PAST_H = 4 * WEEK_H  # past origins that a confidence is taken from


@dataclass(frozen=True, slots=True)
class Ahead:
    """The upper edge of demand, hour by hour.

    Attributes:
        q90: 90 % quantile of demand at the end of each coming hour, shape (hours,).
        excess: By how much demand passed the 90 % quantile of past forecasts at that lead, in units, negative where it
            stayed under it, shape (past origins, hours).
    """

    q90: Floats
    excess: Floats


@dataclass(frozen=True, slots=True)
class ReclaimableWindow:
    """A stretch of hours in which units of a queue will hardly be asked for.

    Attributes:
        start: Its start, UTC.
        end: Its end, UTC.
        units: Units free throughout: capacity less the highest 90 % quantile, rounded down.
        confidence: Share of past origins whose demand, had it missed the forecast by as much as it did then, would have
            left the units free in every hour of the window.
        capacity: Units that the queue holds, as it was taken.
    """

    start: datetime
    end: datetime
    units: int
    confidence: float
    capacity: float


def shows_trough(values: Floats, min_units: int = 1) -> bool:
    """Whether a demand falls at the same hours of each day, deep enough to be worth lending out.

    The hour of the day explains at least half of the variance of the last four weeks, and its lowest median lies under
    its highest by three tenths of that and by `min_units`. Under a week of history nothing shows.

    Args:
        values: Units in demand at the end of each hour, oldest first, shape (hours,).
        min_units: Units that a window would leave free at least.
    """
    if len(values) < WEEK_H:
        return False
    days = min(len(values), _PAST_H) // DAY_H
    by_day = values[-days * DAY_H :].reshape(days, DAY_H)
    usual = np.median(by_day, axis=0)
    whole, left = float(np.var(by_day)), float(np.mean(np.square(by_day - usual)))
    depth = float(usual.max() - usual.min())
    return whole > 0 and left <= (1 - _EXPLAINED) * whole and depth >= max(_DEPTH * usual.max(), min_units)


def look_ahead(values: Floats, hours: int = 72) -> Ahead:
    """Forecast the upper edge of demand for each of the coming hours.

    Args:
        values: Units in demand at the end of each hour, oldest first, shape (hours,).
        hours: How far.

    Raises:
        DemandError: There is too little history to judge forecasts that far ahead.
    """
    count = len(values)
    last = count - hours  # the newest origin of which every hour ahead is known
    first = max(MIN_HOURS + hours, last + 1 - _PAST_H)
    if last + 1 - first < MIN_HOURS:
        needed = 2 * (hours + MIN_HOURS) - 1
        raise DemandError(f"{count} h of history; {needed} h at least are needed to look {hours} h ahead")
    q90 = np.empty(hours)
    excess = np.empty((last + 1 - first, hours))
    past = np.arange(first, last + 1)
    for rung in ladder(values, range(1, hours + 1)):
        hour, point = rung.horizon_h, rung.hedged.point
        q90[hour - 1] = bands(point, rung.came, hour, np.array([count]))[0, _HIGH]
        excess[:, hour - 1] = rung.came[past] - bands(point, rung.came, hour, past, step_h=3 * DAY_H)[:, _HIGH]
    return Ahead(q90, excess)


def reclaimable_windows(
    ahead: Ahead, now: datetime, capacity: float, *, min_units: int = 1, min_confidence: float = 0.5
) -> list[ReclaimableWindow]:
    """Cut the coming hours into windows in which the 90 % quantile leaves units free.

    Args:
        ahead: Upper edge of demand.
        now: End of the last known hour, UTC.
        capacity: Units that the queue holds.
        min_units: Units that must stay free throughout.
        min_confidence: A window ends before its confidence would fall below this.

    Returns:
        Windows by time; they do not overlap.
    """
    free = capacity - ahead.q90
    found: list[ReclaimableWindow] = []
    first = 0
    while first < len(free):
        best = None
        for last in range(first + 1, len(free) + 1):
            units = int(np.floor(free[first:last].min() + 1e-9))
            if units < min_units:
                break
            slack = free[first:last] - units  # of each hour, beside the units that are promised
            confidence = float(np.all(ahead.excess[:, first:last] <= slack + 1e-9, axis=1).mean())
            if confidence < min_confidence:
                break
            best = ReclaimableWindow(now + first * HOUR, now + last * HOUR, units, confidence, capacity)
        if best is None:
            first += 1
            continue
        found.append(best)
        first = int((best.end - now) / HOUR)
    return found

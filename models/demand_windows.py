"""Troughs of a demand as windows in which units can be lent out: when, how many, and how often such a promise held.

For queues that hold inference services, whose demand rises and falls with the day. Pure; which queues those are stands
in the settings, the forecast behind it in `models/demand.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from features.demand import HOUR
from features.vocabulary import QUANTILES
from models.demand import MIN_HOURS, WINDOW_H, DemandError, choose_at
from models.demand_experts import Levels, actuals, experts

Floats = NDArray[np.float64]

_HIGH = QUANTILES.index(0.90)


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
    """

    start: datetime
    end: datetime
    units: int
    confidence: float


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
    first = max(1, last + 1 - WINDOW_H)
    if last + 1 - first < MIN_HOURS:
        raise DemandError(f"{count} h of history; {hours + MIN_HOURS} h at least are needed to look {hours} h ahead")
    levels = Levels(values)
    q90 = np.empty(hours)
    excess = np.empty((last + 1 - first, hours))
    for hour in range(1, hours + 1):
        said, came = experts(levels, hour), actuals(values, hour)
        choice = choose_at(said, came, count, hour)
        assert choice is not None  # as many outcomes are known as were asked for above
        q90[hour - 1] = choice.quantiles(said[-1:])[0, _HIGH]
        excess[:, hour - 1] = came[first : last + 1] - choice.quantiles(said[first : last + 1])[:, _HIGH]
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
            best = ReclaimableWindow(now + first * HOUR, now + last * HOUR, units, confidence)
        if best is None:
            first += 1
            continue
        found.append(best)
        first = int((best.end - now) / HOUR)
    return found

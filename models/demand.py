"""Forecasts of hourly demand as quantiles that never cross: an expert chosen on released hours, with its past errors.

Here belongs the choice of expert for one series and horizon and the distribution around it; what experts say stands in
`models/demand_experts.py`, the walk over a recording in `models/demand_backtest.py`. A fit takes milliseconds, so it
is made anew with each forecast and nothing is kept in the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.vocabulary import QUANTILES
from models.demand_experts import BASELINES, EXPERTS, WEEK_H, Levels, actuals, experts

Floats = NDArray[np.float64]

VERSION = "demand-experts-1"
HORIZONS_H = (1, 3, 6, 12, 24, 48, 72, 168, 336)
WINDOW_H = 8 * WEEK_H  # released hours that a choice rests on
MIN_HOURS = 24  # fewer errors say nothing: the spread of the series itself is taken
_EARNED_RATIO = 0.99  # loss ÷ best baseline's under which anything but a baseline is believed
_SHARPNESS = (0.0, 2.0, 8.0)  # pools: experts weighed by (best loss ÷ loss) to this power
_TOP = 5
_MEDIAN = QUANTILES.index(0.50)
_SCALES: dict[str, tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]] = {
    "plain": (lambda x: x, lambda x: x),
    "root": (np.sqrt, lambda x: np.square(np.maximum(x, 0.0))),
    "log": (np.log1p, np.expm1),
}


class DemandError(ValueError):
    """There is too little history to forecast from; the message says how much there is."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is believed for one horizon.

    Attributes:
        name: An expert of `EXPERTS`, or `pool`.
        weights: Weight of each expert, shape (experts,), sum 1.
        scale: Name of the scale in which errors are added.
        errors: Quantiles of the errors on that scale, shape (quantiles,), 0 at the median.
        ratio: Its mean absolute error ÷ the best baseline's, both on the released hours it was chosen on.
        hours: Number of those hours.
    """

    name: str
    weights: Floats
    scale: str
    errors: Floats
    ratio: float
    hours: int

    def point(self, said: Floats) -> Floats:
        """Forecast from what the experts say, shape (rows, experts) to (rows,)."""
        return said @ self.weights

    def quantiles(self, said: Floats) -> Floats:
        """Quantiles at the levels of `QUANTILES`, shape (rows, quantiles), rising, never negative."""
        there, back = _SCALES[self.scale]
        point = np.maximum(self.point(said), 0.0)
        out = np.maximum(back(there(point)[:, None] + self.errors), 0.0)
        out[:, _MEDIAN] = point
        return np.maximum.accumulate(out, axis=1)


def choose(said: Floats, came: Floats, *, allowed: Sequence[str] = EXPERTS) -> Choice:
    """Choose an expert, or a pool of them, by mean absolute error on released hours.

    A baseline stays in charge unless another is better by one per cent: on the hours it is chosen on, the choice is
    never worse than the best baseline.

    Args:
        said: What the experts said, shape (rows, experts).
        came: What came of it, shape (rows,), without NaN.
        allowed: Names that may be chosen; pools only when all experts may.

    Raises:
        DemandError: There is no row.
    """
    if not len(came):
        raise DemandError("no hour is known that a forecast could be judged by")
    loss = np.mean(np.abs(said - came[:, None]), axis=0)
    columns = [EXPERTS.index(name) for name in allowed]
    base = min((EXPERTS.index(name) for name in BASELINES if name in allowed), key=lambda c: loss[c], default=None)
    one = np.eye(len(EXPERTS))
    options = [(EXPERTS[c], one[c], float(loss[c])) for c in columns]
    if len(columns) == len(EXPERTS) and len(came) >= WEEK_H:
        for weights in _pools(loss):
            options.append(("pool", weights, float(np.mean(np.abs(said @ weights - came)))))
    name, weights, found = min(options, key=lambda option: option[2])
    best = float(loss[base]) if base is not None else found
    if base is not None and found > _EARNED_RATIO * best:
        name, weights, found = EXPERTS[base], one[base], best
    scale, errors = _errors(np.maximum(said @ weights, 0.0), came)
    return Choice(name, weights, scale, errors, found / best if best > 0 else 1.0, len(came))


def _pools(loss: Floats) -> list[Floats]:
    """Weights of pools of the best experts, from even to sharp."""
    top = np.argsort(loss, kind="stable")[:_TOP]
    found = []
    for power in _SHARPNESS:
        weights = np.zeros(len(loss))
        weights[top] = (max(float(loss[top[0]]), 1e-12) / np.maximum(loss[top], 1e-12)) ** power
        found.append(weights / weights.sum())
    return found


def _errors(point: Floats, came: Floats) -> tuple[str, Floats]:
    """The scale on which past errors make the sharpest quantiles, and those errors' quantiles."""
    levels = np.asarray(QUANTILES)
    best: tuple[float, str, Floats] | None = None
    for name, (there, back) in _SCALES.items():
        gap = there(came) - there(point)
        # Finite-sample levels, as of split conformal intervals: a little wider than the sample's own.
        outer = np.clip(0.5 + (levels - 0.5) * (1 + 1 / len(came)), 0, 1)
        errors = np.quantile(gap, outer)
        errors = np.where(levels < 0.5, np.minimum(errors, 0), np.maximum(errors, 0))
        errors[_MEDIAN] = 0.0
        loss = float(np.mean(pinball(np.maximum(back(there(point)[:, None] + errors), 0.0), came)))
        if best is None or loss < best[0] * 0.999:
            best = (loss, name, errors)
    assert best is not None
    return best[1], best[2]


def pinball(quantiles: Floats, came: Floats) -> Floats:
    """Mean over the levels of `QUANTILES` of the pinball loss, in the unit of the series, per row."""
    gap = came[:, None] - quantiles
    levels = np.asarray(QUANTILES)
    return np.mean(np.maximum(levels * gap, (levels - 1) * gap), axis=1)


@dataclass(frozen=True, slots=True)
class HorizonForecast:
    """Forecast of one series at one horizon.

    Attributes:
        horizon_h: Hours ahead.
        quantiles: At the levels of `QUANTILES`, rising, shape (quantiles,).
        chosen: Name of the expert in charge; `spread` where no past forecast could be judged yet.
        baselines: What the baselines say, by name.
        hours: Released hours that the choice rests on.
    """

    horizon_h: int
    quantiles: Floats
    chosen: str
    baselines: dict[str, float]
    hours: int


def forecast(values: Floats, horizons_h: Sequence[int] = HORIZONS_H) -> list[HorizonForecast]:
    """Forecast the hours after a series, fitted on the series itself.

    Args:
        values: Hourly series, oldest first, without gaps, shape (hours,).
        horizons_h: Hours from the end of the series to the end of the hour asked for.

    Returns:
        One forecast for each horizon. Where too little of the past can be judged at a horizon, quantiles are those of
        the series itself (`chosen` is `spread`).

    Raises:
        DemandError: The series is shorter than a day.
    """
    if len(values) < MIN_HOURS:
        raise DemandError(f"{len(values)} h of history; {MIN_HOURS} h at least are needed for a forecast of demand")
    levels = Levels(values)
    found = []
    for horizon_h in horizons_h:
        said = experts(levels, horizon_h)
        choice = choose_at(said, actuals(values, horizon_h), len(values), horizon_h)
        now = said[-1:]
        baselines = {name: float(now[0, EXPERTS.index(name)]) for name in BASELINES}
        if choice is None:
            found.append(HorizonForecast(horizon_h, spread(values), "spread", baselines, 0))
        else:
            found.append(HorizonForecast(horizon_h, choice.quantiles(now)[0], choice.name, baselines, choice.hours))
    return found


def choose_at(
    said: Floats, came: Floats, origin: int, horizon_h: int, *, allowed: Sequence[str] = EXPERTS
) -> Choice | None:
    """The choice at an origin from the newest forecasts whose outcome is known there.

    Args:
        said: What the experts said at every origin, shape (hours + 1, experts).
        came: What came of it, shape (hours + 1,).
        origin: Number of hours known at the moment of the choice.
        horizon_h: Hours ahead.
        allowed: As of `choose`.

    Returns:
        The choice; None where fewer than `MIN_HOURS` outcomes are known.
    """
    last = origin - horizon_h  # newest origin whose outcome is known
    first = max(1, last + 1 - WINDOW_H)
    if last + 1 - first < MIN_HOURS:
        return None
    return choose(said[first : last + 1], came[first : last + 1], allowed=allowed)


def spread(values: Floats) -> Floats:
    """Quantiles of a series over its newest weeks: what is said where no forecast can be judged yet."""
    return np.quantile(values[-4 * WEEK_H :], QUANTILES)

"""Forecasts of hourly demand as quantiles that never cross: experts hedged by released losses, with past errors around.

Here belong the weights of experts for one series and horizon and the distribution around their mean; what experts say
stands in `models/demand_experts.py`, the walk over a recording in `models/demand_backtest.py`. All of it is made anew
with each forecast, in milliseconds, so nothing is kept in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.vocabulary import QUANTILES
from models.demand_experts import BASELINES, DAY_H, EXPERTS, FLOW_EXPERTS, WEEK_H, Levels, actuals, experts

Floats = NDArray[np.float64]

VERSION = "demand-experts-2"
HORIZONS_H = (1, 3, 6, 12, 24, 48, 72, 168, 336)
WINDOW_H = 8 * WEEK_H  # newest released hours whose errors are looked at
MIN_HOURS = 24  # fewer errors say nothing: the spread of the series itself is taken
POOLS = ("pool_even", "pool", "pool_sharp")
_SHARPNESS = (0.0, 2.0, 8.0)  # pools: experts weighed by (best loss ÷ loss) to this power
_TOP = 5  # experts in a pool
_POOL_HALF_LIFE_H, _HEDGE_HALF_LIFE_H = 4 * WEEK_H, 8 * WEEK_H
_ETA = 8.0  # weights fall with (loss ÷ best baseline's) to the power of this × independent blocks of evidence
_BORROWED = 0.4  # share of the evidence of the next shorter horizon that counts too
_BASELINE_PRIOR = 0.3  # weight of the baselines together before anything is released
_WIDER = 0.5  # levels move out by this × (1 + weeks ahead) ÷ days of evidence
_MEDIAN = QUANTILES.index(0.50)
_LEVELS = np.asarray(QUANTILES)


class DemandError(ValueError):
    """There is too little history to forecast from; the message says how much there is."""


@dataclass(frozen=True, slots=True)
class Hedged:
    """What is believed at every origin of one series and horizon.

    Attributes:
        names: Experts, then pools of them.
        weights: Weight of each, shape (hours + 1, names), sum 1.
        evidence: Logarithm of what past losses made of their priors, shape (hours + 1, names).
        point: Their weighted mean, shape (hours + 1,); NaN in the first row, which knows nothing.
    """

    names: tuple[str, ...]
    weights: Floats
    evidence: Floats
    point: Floats

    def leader(self, origin: int) -> str:
        """The name with the most weight at an origin."""
        return self.names[int(np.argmax(self.weights[origin]))]


def hedge(said: Floats, came: Floats, horizon_h: int, shorter: Hedged | None = None) -> Hedged:
    """Weigh experts at every origin by their losses on hours that were released by then.

    An exponentially weighted average: the weight of an expert is its prior times (its loss ÷ that of the best baseline)
    to a negative power that grows with the evidence. Evidence counts in blocks of a day or of the horizon, whichever
    is longer, since errors of neighbouring hours are not independent; until there are some, all speak. A part of the
    evidence of the next shorter horizon counts too: a week or two ahead few blocks are ever released. Pools of the best
    experts so far are weighed beside the experts they are of, by what they said at the time.

    Args:
        said: What the experts said at every origin, shape (hours + 1, experts).
        came: What came of it, shape (hours + 1,), NaN where it is not known yet.
        horizon_h: Hours ahead: an outcome is known this much after its origin.
        shorter: The same of the next shorter horizon; None: there is none.
    """
    names = (*EXPERTS, *FLOW_EXPERTS)[: said.shape[1]] + POOLS
    blank = np.nan_to_num(said)
    loss, _ = _released(np.abs(said - came[:, None]), horizon_h, _POOL_HALF_LIFE_H)
    every = np.concatenate([blank, _pools(blank, loss)], axis=1)
    loss, hours = _released(np.abs(every - came[:, None]), horizon_h, _HEDGE_HALF_LIFE_H)
    count, of = every.shape[1], len(BASELINES)
    prior = np.full(count, (1 - _BASELINE_PRIOR) / (count - of))
    prior[:of] = _BASELINE_PRIOR / of
    best = np.maximum(loss[:, :of].min(axis=1, keepdims=True), 1e-9)
    blocks = (hours / max(DAY_H, horizon_h))[:, None]
    evidence = -_ETA * blocks * np.log(np.maximum(loss / best, 1e-6))
    if shorter is not None:
        for column, name in enumerate(names):
            if name in shorter.names:
                evidence[:, column] += _BORROWED * shorter.evidence[:, shorter.names.index(name)]
    log_weights = np.log(prior) + evidence
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    point = (every * weights).sum(axis=1)
    point[np.isnan(said).any(axis=1)] = np.nan
    return Hedged(names, weights, evidence, point)


@dataclass(frozen=True, slots=True)
class Rung:
    """One horizon of a ladder: what experts said at every origin, what came, and what is believed."""

    horizon_h: int
    said: Floats
    came: Floats
    hedged: Hedged


def ladder(values: Floats, horizons_h: Iterable[int], flows: Mapping[int, Floats] | None = None) -> Iterator[Rung]:
    """Hedge every horizon, each leaning on the one before.

    Args:
        values: Hourly series, oldest first, without gaps, shape (hours,).
        horizons_h: Hours ahead, rising.
        flows: Horizon → what the jobs at each origin say, as of `demand_experts.experts`.
    """
    levels, shorter = Levels(values), None
    for horizon_h in horizons_h:
        said = experts(levels, horizon_h, (flows or {}).get(horizon_h))
        came = actuals(values, horizon_h)
        shorter = hedge(said, came, horizon_h, shorter)
        yield Rung(horizon_h, said, came, shorter)


def _released(losses: Floats, horizon_h: int, half_life_h: int) -> tuple[Floats, Floats]:
    """Mean loss of each column over the hours released at each origin, newer ones counting more, and their number."""
    from scipy.signal import lfilter

    is_known = np.all(np.isfinite(losses), axis=1)
    fade = 0.5 ** (1 / half_life_h)
    total = lfilter([1.0], [1.0, -fade], np.where(is_known.reshape(-1, 1), losses, 0.0), axis=0)
    hours = lfilter([1.0], [1.0, -fade], is_known.astype(np.float64))
    known_total, known_hours = np.zeros_like(losses), np.zeros(len(losses))
    known_total[horizon_h:], known_hours[horizon_h:] = total[:-horizon_h], hours[:-horizon_h]
    return known_total / np.maximum(known_hours, 1e-9)[:, None], known_hours


def _pools(said: Floats, loss: Floats) -> Floats:
    """What pools of the best experts say at every origin, from even to sharp, shape (hours + 1, pools)."""
    ratio = (loss.min(axis=1, keepdims=True) + 1e-12) / (loss + 1e-12)
    is_top = ratio >= -np.sort(-ratio, axis=1)[:, _TOP - 1 : _TOP]
    found = []
    for power in _SHARPNESS:
        weights = np.where(is_top, ratio**power, 0.0)
        found.append((said * weights).sum(axis=1) / weights.sum(axis=1))
    return np.stack(found, axis=1)


def bands(point: Floats, came: Floats, horizon_h: int, origins: NDArray[np.int64], *, step_h: int = DAY_H) -> Floats:
    """Quantiles around a forecast from its own errors as they were released, the newest counting most.

    Errors are of forecasts as they were made, never of a fit to the hours they are taken from. They are added on the
    scale of the square root; levels move out a little where there are few days of errors.

    Args:
        point: Forecast at every origin, shape (hours + 1,).
        came: What came of it, shape (hours + 1,).
        horizon_h: Hours ahead.
        origins: Neighbouring origins, rising, each with `MIN_HOURS` released hours at least.
        step_h: Quantiles of the errors are taken anew after so many origins.

    Returns:
        Shape (origins, quantiles), at the levels of `QUANTILES`, rising, never negative, the point at the median.
    """
    root = np.sqrt(np.maximum(point, 0.0))
    gap = np.sqrt(came) - root
    out = np.empty((len(origins), len(QUANTILES)))
    half_life_h, wider = WEEK_H + horizon_h, _WIDER * (1 + horizon_h / WEEK_H)
    for first in range(0, len(origins), step_h):
        part = origins[first : first + step_h]
        last = int(part[0]) - horizon_h + 1
        errors = gap[max(1, last - WINDOW_H) : last]
        weights = 0.5 ** (np.arange(len(errors))[::-1] / half_life_h)
        days = weights.sum() ** 2 / np.square(weights).sum() / DAY_H
        levels = np.clip(0.5 + (_LEVELS - 0.5) * (1 + wider / max(days, 1.0)), 0.0, 1.0)
        around = _weighted_quantiles(errors, weights, levels)
        around = np.where(_LEVELS < 0.5, np.minimum(around, 0.0), np.maximum(around, 0.0))
        quantiles = np.square(np.maximum(root[part][:, None] + around, 0.0))
        quantiles[:, _MEDIAN] = np.maximum(point[part], 0.0)
        out[first : first + step_h] = np.maximum.accumulate(quantiles, axis=1)
    return out


def _weighted_quantiles(values: Floats, weights: Floats, levels: Floats) -> Floats:
    order = np.argsort(values, kind="stable")
    weights = weights[order]
    reached = np.cumsum(weights) - 0.5 * weights
    return np.interp(levels, reached / weights.sum(), values[order])


def pinball(quantiles: Floats, came: Floats) -> Floats:
    """Mean over the levels of `QUANTILES` of the pinball loss, in the unit of the series, per row."""
    gap = came[:, None] - quantiles
    return np.mean(np.maximum(_LEVELS * gap, (_LEVELS - 1) * gap), axis=1)


@dataclass(frozen=True, slots=True)
class HorizonForecast:
    """Forecast of one series at one horizon.

    Attributes:
        horizon_h: Hours ahead.
        quantiles: At the levels of `QUANTILES`, rising, shape (quantiles,).
        chosen: Name of the expert or pool with the most weight; `spread` where no past forecast could be judged yet.
        baselines: What the baselines say, by name.
        hours: Released hours that it rests on.
    """

    horizon_h: int
    quantiles: Floats
    chosen: str
    baselines: dict[str, float]
    hours: int


def forecast(
    values: Floats, horizons_h: Sequence[int] = HORIZONS_H, flows: Mapping[int, Floats] | None = None
) -> list[HorizonForecast]:
    """Forecast the hours after a series, fitted on the series itself.

    Args:
        values: Hourly series, oldest first, without gaps, shape (hours,).
        horizons_h: Hours from the end of the series to the end of the hour asked for, rising.
        flows: As of `ladder`.

    Returns:
        One forecast for each horizon. Where too little of the past can be judged at a horizon, quantiles are those of
        the series itself (`chosen` is `spread`).

    Raises:
        DemandError: The series is shorter than a day.
    """
    if len(values) < MIN_HOURS:
        raise DemandError(f"{len(values)} h of history; {MIN_HOURS} h at least are needed for a forecast of demand")
    found = []
    for rung in ladder(values, horizons_h, flows):
        horizon_h, hours = rung.horizon_h, released_hours(len(values), rung.horizon_h)
        baselines = {name: float(rung.said[-1, EXPERTS.index(name)]) for name in BASELINES}
        if hours < MIN_HOURS:
            found.append(HorizonForecast(horizon_h, spread(values), "spread", baselines, 0))
            continue
        quantiles = bands(rung.hedged.point, rung.came, horizon_h, np.array([len(values)]))[0]
        found.append(HorizonForecast(horizon_h, quantiles, rung.hedged.leader(-1), baselines, hours))
    return found


def released_hours(origin: int, horizon_h: int) -> int:
    """Number of forecasts whose outcome is known at an origin, at most those of `WINDOW_H`."""
    return max(0, min(origin - horizon_h, WINDOW_H))


def spread(values: Floats) -> Floats:
    """Quantiles of a series over its newest weeks: what is said where no forecast can be judged yet."""
    return np.quantile(values[-4 * WEEK_H :], QUANTILES)

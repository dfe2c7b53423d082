"""P(a rank is slow within the next steps): a predictive distribution of its compute time against its gang.

Nothing is learned beforehand. The log ratio of a rank is followed by a robust EWMA with its spread; the chance that
some 3 consecutive steps of the next 10 are all over the rule's 1.3 × follows from where the level may be and how
much single steps scatter. A rank that is slow from its first step on is seen as one that slowed down on the way, for it
is measured against its gang and not against its own past. Here belong the forecaster and its baselines; the label
stands in `features/straggler.py`, the backtest in `models/onset_backtest.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.straggler import CONSECUTIVE, SLOW_RATIO, StepTimes

Floats = NDArray[np.float64]

HORIZON_STEPS = 10
BASELINES = ("ewma_z_score", "last_step_over_gang", "slow_share_so_far")
ALPHA = 0.4  # weight of the newest step in the level
SPREAD_ALPHA = 0.1
# Before a rank has a past: the scatter of compute times of healthy ranks of one stage is a few per cent.
FIRST_SPREAD = 0.03
FEWEST_SPREAD = 0.01  # nothing is known more exactly
CLIP = 4.0  # spreads that one step moves the level by at most, unless the next one says the same
FIRST_VARIANCE = 0.05**2  # of the level before the first step
# A clear rank turns slow within the next steps, whatever it showed: clusters see stragglers in a few per cent of
# hours; per 10 steps that is rare.
TURNS = 2e-4
# And one that is slow may be repaired or get a fast batch.
RECOVERS = 2e-3
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(21)


def forecast(times: StepTimes) -> Floats:
    """P(slow within the next `HORIZON_STEPS` recorded steps) after each step, shape (steps, ranks).

    NaN before a rank's first known step; a step that is not known leaves the forecast where it was.
    """
    steps, ranks = times.log_ratio.shape
    out = np.full((steps, ranks), np.nan)
    level = np.zeros(ranks)
    variance = np.full(ranks, FIRST_VARIANCE)
    spread = np.full(ranks, FIRST_SPREAD)
    pushed = np.zeros(ranks)  # sign of a step that stood too far off to be believed at once
    seen = np.zeros(ranks, dtype=np.int64)
    for i in range(steps):
        x = times.log_ratio[i]
        known = ~np.isnan(x)
        off = np.where(known, x - level, 0.0)
        bound = CLIP * np.maximum(spread, np.sqrt(variance))
        far = np.where(np.abs(off) > bound, np.sign(off), 0.0)
        # Twice in a row to the same side is a new level, not an accident.
        moves = (far != 0) & (far == pushed)
        innovation = np.where(moves, off, np.clip(off, -bound, bound))
        gain = np.where(moves, 0.9, np.maximum(ALPHA, 1 / (seen + 1.0)))
        level = np.where(known, level + gain * innovation, level)
        settled = np.where(moves, spread, np.minimum(np.abs(innovation) * 1.2533, 3 * spread))
        spread = np.where(
            known, np.maximum((1 - SPREAD_ALPHA) * spread + SPREAD_ALPHA * settled, FEWEST_SPREAD), spread
        )
        variance = np.where(known, spread**2 * ALPHA / (2 - ALPHA) + (FIRST_VARIANCE / (seen + 1.0) ** 2), variance)
        pushed = np.where(known, far, pushed)
        seen = seen + known
        has = seen > 0
        out[i, has] = _chance(level[has], np.sqrt(variance[has]), spread[has])
    return out


def _chance(level: Floats, level_spread: Floats, spread: Floats) -> Floats:
    """P(`CONSECUTIVE` of the next steps in a row over the rule), averaged over where the level may be."""
    levels = level[:, None] + level_spread[:, None] * _NODES
    z = (levels - np.log(SLOW_RATIO)) / spread[:, None]
    slow = 1 / (1 + np.exp(-np.clip(1.702 * z, -40, 40)))  # logistic: single steps scatter with heavier tails
    p = (_run_chance(slow) * (_WEIGHTS / _WEIGHTS.sum())).sum(axis=1)
    return TURNS + (1 - TURNS - RECOVERS) * p


def _run_chance(slow: Floats) -> Floats:
    """P(a run of `CONSECUTIVE` slow steps among `HORIZON_STEPS`), each step slow with the same chance."""
    run = [np.ones_like(slow), *(np.zeros_like(slow) for _ in range(CONSECUTIVE - 1))]  # P(present run is so long)
    done = np.zeros_like(slow)
    for _ in range(HORIZON_STEPS):
        done = done + run[-1] * slow
        run = [sum(run) * (1 - slow), *(length * slow for length in run[:-1])]
    return done


def baseline(name: str, times: StepTimes) -> Floats:
    """What a baseline ranks rank-steps by, shape (steps, ranks); NaN where it has nothing to say.

    `ewma_z_score`: how far the rank's compute ratio stands over its own EWMA, in its own spread, before the step;
    `last_step_over_gang`: the newest log ratio; `slow_share_so_far`: share of its steps over the rule.

    Raises:
        ValueError: There is no such baseline.
    """
    x = times.log_ratio
    if name == "last_step_over_gang":
        return x
    if name == "slow_share_so_far":
        known = ~np.isnan(x)
        with np.errstate(invalid="ignore"):
            slow = np.where(known, x > np.log(SLOW_RATIO), False)
        return np.cumsum(slow, axis=0) / np.maximum(np.cumsum(known, axis=0), 1)
    if name != "ewma_z_score":
        raise ValueError(f"no baseline {name!r}; baselines: {', '.join(BASELINES)}")
    out = np.full(x.shape, np.nan)
    mean = np.full(x.shape[1], np.nan)
    variance = np.full(x.shape[1], FIRST_SPREAD**2)
    for i, row in enumerate(x):
        known = ~np.isnan(row)
        fresh = known & np.isnan(mean)
        off = np.where(known & ~fresh, row - mean, 0.0)
        out[i, known] = (off / np.sqrt(variance))[known]
        mean = np.where(fresh, row, np.where(known, mean + 0.3 * off, mean))
        variance = np.where(known & ~fresh, 0.7 * (variance + 0.3 * off**2), variance)
        variance = np.maximum(variance, FEWEST_SPREAD**2)
    return out


def outcomes(times: StepTimes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether a rank is set by the label at one of the next `HORIZON_STEPS` steps, and whether that is known.

    Returns:
        Two arrays of shape (steps, ranks).
    """
    steps = len(times.steps)
    came = np.zeros(times.state.shape, dtype=bool)
    known = np.zeros(times.state.shape, dtype=bool)
    for i in range(steps):
        ahead = times.state[i + 1 : i + 1 + HORIZON_STEPS]
        came[i] = (ahead == 1).any(axis=0)
        known[i] = came[i] | ((len(ahead) == HORIZON_STEPS) & (ahead != -1).all(axis=0))
    return came, known

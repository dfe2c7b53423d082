"""What the runtime forecaster decides on released jobs: who speaks for a stratum, and whether medians snap to repeats.

Here belong these choices; not the weights of the mixture (`models/mixture.py`) and not the forecaster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.jobs import FEATURES
from models.curves import CENTRE_GAINS, MEDIAN, Pooled, centred
from models.recency import STRATA, KeyedRecency, baseline_log, stratum

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

STRATUM_ROWS = 100  # fewer released jobs of a stratum: the choice made over all of them holds
REPEATED = tuple(FEATURES.index(name) for name in ("key_last1", "kernel_q45", "key_median", "user_last1"))
CENTRE_COST = 1.002  # ratio of MALE up to which more jobs within a factor of two are worth it
_SNAP = 0.3  # a median this near, in ln, to a past runtime is taken to be a repeat of it


def day_blocks(user: NDArray[np.uint64], submit: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Block of each job, user × day of its submit: jobs of one block are not taken to be independent."""
    return user ^ ((submit // 86_400_000_000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def snapped_curves(curves: Floats, X: Matrix) -> Floats:
    """Curves whose median is moved onto the nearest repeated runtime within `_SNAP`; the rest makes way."""
    _, gap = nearest_repeat(curves[:, MEDIAN], X)
    return centred(curves, curves[:, MEDIAN] + np.where(np.abs(gap) < _SNAP, gap, 0.0))


def nearest_repeat(median: Floats, X: Matrix) -> tuple[NDArray[np.int64], Floats]:
    """Feature, of `REPEATED`, whose runtime lies nearest to each median, and how far above it, ln; ∞: none is known."""
    gaps = X[:, REPEATED].astype(np.float64) - median[:, None]
    gaps = np.where(np.isnan(gaps), np.inf, gaps)
    at = np.argmin(np.abs(gaps), axis=1)
    return np.asarray(REPEATED)[at], gaps[np.arange(len(median)), at]


def choose_centre(pooled: Pooled, y: Floats) -> int:
    """Which of `CENTRE_GAINS` draws the middle of forecasts: the largest that costs next to no MALE; −1: none."""
    most = CENTRE_COST * median_loss(pooled.curves, y)
    fitting = [k for k in range(len(CENTRE_GAINS)) if np.abs(pooled.centres[:, k] - y).mean() <= most]
    return max(fitting, default=-1)


def median_loss(curves: Floats, y: Floats) -> float:
    return float(np.abs(curves[:, MEDIAN] - y).mean())


def choose_expert(
    curves: Floats, recency: KeyedRecency, X: Matrix, y: Floats
) -> tuple[NDArray[np.bool_], dict[str, Any]]:
    """Whether keyed recency speaks, by stratum, by MALE on the held-out jobs."""
    model = np.abs(curves[:, MEDIAN] - y)
    keyed = np.abs(baseline_log(recency.name, X) - y)
    overall = bool(keyed.mean() < model.mean())
    rows = stratum(X)
    chosen = np.full(len(STRATA), overall)
    for k in range(len(STRATA)):
        here = rows == k
        if here.sum() >= STRATUM_ROWS:
            chosen[k] = keyed[here].mean() < model[here].mean()
    named = {name: recency.name if chosen[k] else "model" for k, name in enumerate(STRATA)}
    return chosen, named

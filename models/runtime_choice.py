"""What the runtime forecaster decides on released jobs: who speaks for a stratum, and whether medians snap to repeats.

Here belong these choices; not the weights of the mixture (`models/mixture.py`) and not the forecaster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.job_table import JobTable
from features.jobs import FEATURES
from models.curves import CENTRE_GAINS, MEDIAN, Pooled, centred
from models.recency import SPEAKERS, STRATA, KeyedRecency, spoken_log, stratum

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

LONG_RUN = 0.95  # quantile of runtimes that a long job has
SPAN_RUNS = 5.0  # of jobs that long, started evenly over the history, four in five have ended
LOOKED_AT = 100_000  # jobs that tell how long long jobs run, evenly over the history
OLDEST_SHARE = 0.01  # of ends that do not count, as one stray job of another year would make any history old
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


def is_young(table: JobTable, moment: int) -> bool:
    """Whether ends have been seen for less than `SPAN_RUNS` times as long as long jobs run.

    Till then what has ended is what was short, and the newest of it, that forecasts are judged by, all the more. How
    long long jobs run is the Kaplan–Meier quantile of all that started, those still running counted as censored; as
    long as it is not reached at all, the history is young.

    Args:
        table: Jobs of the cluster; what happened after the moment changes nothing.
        moment: µs UTC.
    """
    from scipy.stats import CensoredData, ecdf

    started = np.flatnonzero((table.submit < moment) & (table.start < moment))
    started = started[:: 1 + len(started) // LOOKED_AT]
    ended = started[table.has_run[started] & (table.end[started] < moment)]
    if not len(ended):
        return True
    elapsed_s = (moment - table.start[started[table.end[started] >= moment]]) / 1e6
    survival = ecdf(CensoredData(uncensored=table.runtime_s[ended], right=elapsed_s)).sf
    reached = np.flatnonzero(survival.probabilities <= 1 - LONG_RUN + 1e-12)
    first_end = np.quantile(table.end[ended], OLDEST_SHARE)
    span_s = (moment - first_end) / 1e6
    return bool(not len(reached) or span_s < SPAN_RUNS * survival.quantiles[reached[0]])


def choose_expert(
    curves: Floats, recency: KeyedRecency, X: Matrix, y: Floats, is_young: bool = False
) -> tuple[NDArray[np.bool_], dict[str, Any]]:
    """Whether keyed recency speaks, by stratum: the model must not lose to any baseline on the held-out jobs.

    Args:
        curves: Of the model on held-out jobs, shape (n, levels).
        recency: Who speaks instead.
        X: Their features, shape (n, f).
        y: ln(runtime), shape (n,).
        is_young: The held-out jobs say nothing yet: keyed recency speaks for all.

    Returns:
        By stratum, and the names of who speaks.
    """
    model = np.abs(curves[:, MEDIAN] - y)
    spoken = np.abs(np.stack([spoken_log(name, X) for name in SPEAKERS]) - y)
    rows = stratum(X)

    def is_better(here: NDArray[np.bool_]) -> bool:
        return bool(spoken[:, here].mean(axis=1).min() < model[here].mean())

    chosen = np.full(len(STRATA), is_young or is_better(np.ones(len(y), dtype=bool)))
    for k in range(len(STRATA)):
        here = rows == k
        if here.sum() >= STRATUM_ROWS and not is_young:
            chosen[k] = is_better(here)
    named = {name: recency.name if chosen[k] else "model" for k, name in enumerate(STRATA)}
    return chosen, named

"""Time left of running jobs: the distribution of the whole runtime given what has elapsed, and like jobs that lasted.

The curves are those of the runtime forecaster, asked at the moment and not at the submit: siblings that ended since
count. Here belongs that mixture; not the curves (`models/runtime.py`) and not the like jobs
(`features/job_survivors.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_survivors import survivors
from features.vocabulary import QUANTILES
from models.curves import cap, pool, quantile_frame, read_levels, remaining_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

LIKE_SHARE = 0.2  # weight of the like jobs where there are any
FULL_S = 60.0  # time since the start up to which that weight grows: at the start the runtime forecast has them already
_CUTS = tuple(float(level) for level in (np.arange(50) + 0.5) / 50)  # levels at which the conditional curve is sampled


def time_left_s(
    curves: Floats, like: Floats, elapsed_s: Floats, limit_s: Floats, levels: Sequence[float] = QUANTILES
) -> Floats:
    """Quantiles of the time left.

    Args:
        curves: Of the whole runtime, ln(seconds), shape (n, len(LEVELS)).
        like: Time left of like jobs after as long a run, ln(seconds), NaN is none, shape (n, k).
        elapsed_s: Shape (n,), ≥ 0.
        limit_s: Shape (n,), NaN: none.
        levels: Levels asked for.

    Returns:
        Seconds, shape (n, len(levels)); never falling along a row, within [0, limit − elapsed] where that is positive.
    """
    out = remaining_s(curves, elapsed_s, limit_s, levels)
    both = np.flatnonzero(~np.isnan(like).all(axis=1) & (elapsed_s > 0))
    if not len(both):
        return out
    sampled = np.log(np.maximum(remaining_s(curves[both], elapsed_s[both], limit_s[both], _CUTS), 1.0))
    share = LIKE_SHARE * np.minimum(elapsed_s[both] / FULL_S, 1.0)
    ends = limit_s[both] - elapsed_s[both]
    out[both] = np.exp(
        read_levels(cap(pool([sampled, like[both]], [1 - share, share]), np.where(ends > 0, ends, np.nan)), levels)
    )
    return np.where((limit_s > elapsed_s)[:, None], np.minimum(out, (limit_s - elapsed_s)[:, None]), out)


def remaining_frame(curves: Floats, X: Matrix, table: JobTable, history: JobHistory, moment: int) -> pl.DataFrame:
    """Quantiles of the time left at a moment.

    Args:
        curves: Of the whole runtime as foreseen at the moment, shape (n, len(LEVELS)).
        X: Features at the moment, shape (n, len(FEATURES)).
        table: The jobs, n rows.
        history: Jobs of the cluster.
        moment: µs UTC.

    Returns:
        Columns `QUANTILE_COLUMNS`, seconds; null for a job that has not started by then.
    """
    rows = np.flatnonzero(table.start <= moment)
    seconds = np.full((table.count, len(QUANTILES)), np.nan)
    if len(rows):
        running = table if len(rows) == table.count else JobTable(table.frame[rows])
        elapsed_s = (moment - running.start) / 1e6
        like = survivors(running, history, np.full(len(rows), moment), elapsed_s, X[rows])
        seconds[rows] = time_left_s(curves[rows], like, elapsed_s, running.limit_s)
    return quantile_frame(seconds)

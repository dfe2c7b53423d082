"""How the time left of running jobs is judged: after set times since the start, with what was known at that moment.

Model and baselines see the same: features of the job as of the landmark, when others have ended since its submit. Here
belong these moments, and the baselines and medians at them; not the forecast itself (`models/time_left.py`) and not the
losses (`models/remaining_task.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_recency import row_quantiles
from features.jobs import feature_matrix
from models import recency
from models.runtime import RuntimeForecaster

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ELAPSED_S = (60.0, 600.0, 3600.0)  # after these the time left is judged wherever runtimes are
DOUBLINGS_S = (*ELAPSED_S, *(3_600.0 * 2**k for k in range(1, 7)))  # up to 64 h, where it is judged by itself
CORRECTIONS_S = tuple(60.0 * m for m in (1, 5, 15, 30, 60, 120, 300, 600, 1_200, 3_000, 6_000))  # to a passed forecast
LOOKED_AT = 100  # newest runs of a group among which those that lasted as long are looked for


@dataclass(frozen=True, slots=True)
class Landmark:
    """Jobs still running so long after their start.

    Attributes:
        elapsed_s: How long after.
        lasts: Which of the rows asked about they are, shape (n,).
        table: These k jobs.
        moments: When each was there, µs UTC, shape (k,).
        X: Features as known then, shape (k, len(FEATURES)).
    """

    elapsed_s: float
    lasts: NDArray[np.bool_]
    table: JobTable
    moments: Ints
    X: NDArray[np.float32]

    @classmethod
    def of(cls, history: JobHistory, rows: Ints, elapsed_s: float) -> Landmark:
        """Of rows of a history, all of jobs that ended."""
        table = history.table
        # A scheduler that leaves out suspensions can count less than the clock: both must have gone so far.
        lasts = (table.runtime_s[rows] > elapsed_s) & (table.end[rows] - table.start[rows] > elapsed_s * 1e6)
        there = JobTable(table.frame[rows[lasts]])
        moments = there.start + np.int64(elapsed_s * 1e6)
        return cls(elapsed_s, lasts, there, moments, feature_matrix(there, history, moments))


def medians(forecaster: RuntimeForecaster, history: JobHistory, rows: Ints) -> dict[float, Floats]:
    """Median time left after each of `ELAPSED_S`, seconds, NaN for jobs that had ended by then; each of shape (n,)."""
    left = {}
    for elapsed_s in ELAPSED_S:
        at = Landmark.of(history, rows, elapsed_s)
        left[elapsed_s] = np.full(len(rows), np.nan)
        left[elapsed_s][at.lasts] = forecaster.left_s(at.X, at.table, history, at.moments, (0.5,))[:, 0]
    return left


def baselines(history: JobHistory, rows: Ints) -> dict[str, dict[float, Floats]]:
    """`medians` of each baseline."""
    left = {name: {e: np.full(len(rows), np.nan) for e in ELAPSED_S} for name in recency.BASELINES}
    for elapsed_s in ELAPSED_S:
        at = Landmark.of(history, rows, elapsed_s)
        for name, seconds in recency_left(at).items():
            left[name][elapsed_s][at.lasts] = seconds
    return left


def recency_left(at: Landmark) -> dict[str, Floats]:
    """Time left by each keyed baseline asked anew at the moment, seconds, shape (k,)."""
    left = {}
    for name in recency.BASELINES:
        point = np.exp(recency.baseline_log(name, at.X))
        # A point that has passed is doubled until the limit, as schedulers correct their predictions.
        point = np.fmin(np.where(point > at.elapsed_s, point, 2 * at.elapsed_s), at.table.limit_s)
        left[name] = point - at.elapsed_s
    return left


def corrected_left(point_s: Floats, at: Landmark) -> Floats:
    """Time left by a forecast of the submit that is raised each time it runs out (Tsafrir, Etsion, Feitelson 2007).

    Args:
        point_s: Runtimes foreseen at the submit, shape (k,).
        at: The moment.

    Returns:
        Seconds to the first rung of the ladder that has not passed, else as much again as has elapsed; never beyond the
        limit; shape (k,).
    """
    rungs = np.cumsum([0.0, *CORRECTIONS_S])
    raised = point_s[:, None] + rungs
    ahead = np.where(raised > at.elapsed_s, raised, np.inf).min(axis=1)
    ahead = np.where(np.isfinite(ahead), ahead, 2 * at.elapsed_s)
    return np.fmin(ahead, at.table.limit_s) - at.elapsed_s


def lindy_left(at: Landmark) -> Floats:
    """As much again as has elapsed, up to the limit; seconds, shape (k,)."""
    return np.fmin(np.full(at.table.count, 2 * at.elapsed_s), at.table.limit_s) - at.elapsed_s


def conditional_left(at: Landmark, history: JobHistory, narrowest: str = "user") -> Floats:
    """Quantiles of what the newest runs had left that lasted as long, of the key's, else the user's, else all.

    Args:
        at: The moment.
        history: Jobs of the cluster; what ended at the moment or later changes nothing.
        narrowest: `key` or `user`.

    Returns:
        Seconds at `recency.SPREAD_LEVELS`, up to the limit; as much again as has elapsed where nothing lasted as long;
        shape (k, 3).
    """
    left = np.full((at.table.count, len(recency.SPREAD_LEVELS)), np.nan)
    for group in ("key", "user", "all") if narrowest == "key" else ("user", "all"):
        rows = np.flatnonzero(np.isnan(left[:, 0]))
        slots = history.newest(group, "run", at.table.group(group)[rows], at.moments[rows], LOOKED_AT)
        runs = np.where(slots.is_filled, history.table.runtime_s[slots.rows], np.nan)
        runs = np.where(runs > at.elapsed_s, runs - at.elapsed_s, np.nan)
        some = ~np.isnan(runs).all(axis=1)
        if some.any():
            left[rows[some]] = np.stack(row_quantiles(runs[some], recency.SPREAD_LEVELS), axis=1)
    left = np.where(np.isnan(left), at.elapsed_s, left)
    return np.fmin(left, (at.table.limit_s - at.elapsed_s)[:, None])

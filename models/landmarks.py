"""How the time left of running jobs is judged: after set times since the start, with what was known at that moment.

Model and baselines see the same: features of the job as of the landmark, when others have ended since its submit. Here
belong these moments and the forecasts at them; not the forecast itself (`models/time_left.py`) and not the losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.jobs import feature_matrix
from models import recency
from models.curves import quantile_frame
from models.judging import named_rows
from models.runtime import RuntimeForecaster

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ELAPSED_S = (60.0, 600.0, 3600.0)  # the time left is judged after these


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
        for name in recency.BASELINES:
            point = np.exp(recency.baseline_log(name, at.X))
            # A point that has passed is doubled until the limit, as schedulers correct their predictions.
            point = np.fmin(np.where(point > elapsed_s, point, 2 * elapsed_s), at.table.limit_s)
            left[name][elapsed_s][at.lasts] = point - elapsed_s
    return left


def predictions(forecaster: RuntimeForecaster, history: JobHistory, rows: Ints) -> pl.DataFrame:
    """One row per job and elapsed time that it reached, with the quantiles of the time left."""
    parts = []
    for elapsed_s in ELAPSED_S:
        at = Landmark.of(history, rows, elapsed_s)
        frame = quantile_frame(forecaster.left_s(at.X, at.table, history, at.moments))
        said = frame.select(pl.lit(elapsed_s).alias("elapsed_s"), pl.col("q50_s").alias("point_s"))
        parts.append(pl.concat([named_rows(history.table, rows[at.lasts]), said, frame], how="horizontal"))
    return pl.concat(parts)

"""Time left of running jobs as a backtest of its own: judged at landmarks of each run, with what was known by then.

Here belong its losses and what stands beside it; not the moments and baselines (`models/landmarks.py`), and not the
forecast (`models/time_left.py`), which is trained and kept with the runtime's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.vocabulary import QUANTILES
from models import landmarks, recency
from models.calibration import level_table
from models.curves import quantile_frame, read_levels
from models.forest import ForestSize
from models.judging import Judged, Outcome, duration_losses, named_rows, spread_losses, widths
from models.landmarks import Landmark
from models.runtime import RuntimeForecaster
from models.scoring import duration_scores, log_pinball
from models.tasks import RuntimeTask

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

_SPREAD = [QUANTILES.index(level) for level in recency.SPREAD_LEVELS]
_MEDIAN = recency.SPREAD_LEVELS.index(0.5)


@dataclass(frozen=True, slots=True)
class RemainingTask:
    """Time left after each of `landmarks.DOUBLINGS_S`; one outcome per job and landmark that it reached.

    Attributes:
        size: Size of the forests.
    """

    name: ClassVar[str] = "remaining"
    primary: ClassVar[str] = "male"
    coverage: ClassVar[str | None] = "coverage_80"
    size: ForestSize = field(default_factory=ForestSize)

    def matrix(self, history: JobHistory, rows: Ints | None = None) -> Matrix:
        return RuntimeTask(self.size).matrix(history, rows)

    def released(self, table: JobTable) -> Ints:
        return RuntimeTask(self.size).released(table)

    def fit(
        self, history: JobHistory, at: int, features: Matrix | None, *, seed: int, threads: int, max_labels: int
    ) -> RuntimeForecaster:
        return RuntimeTask(self.size).fit(history, at, features, seed=seed, threads=threads, max_labels=max_labels)

    def outcome(self, forecaster: RuntimeForecaster, X: Matrix, history: JobHistory, rows: Ints) -> Outcome:
        """Of the jobs' whole runs.

        Args:
            forecaster: The runtime forecaster in charge at their submits.
            X: Features at their submits, shape (n, len(FEATURES)).
            history: Jobs of the cluster.
            rows: Rows of it, shape (n,).
        """
        table = history.table
        at_submit = np.exp(read_levels(forecaster.curves(X, table.limit_s[rows]), (0.5,))[:, 0])
        last2 = np.exp(recency.baseline_log("last2_user", X))
        models, others, calibration, said = [], [], [], []
        for elapsed_s in landmarks.DOUBLINGS_S:
            at = Landmark.of(history, rows, elapsed_s)
            asked = rows[at.lasts]
            actual = np.maximum(table.runtime_s[asked] - elapsed_s, 1.0)
            quantiles = forecaster.left_s(at.X, at.table, history, at.moments)
            models.append(_judged(quantiles, actual, asked, elapsed_s))
            points = landmarks.recency_left(at) | {
                "submit_forecast": landmarks.corrected_left(at_submit[at.lasts], at),
                "tsafrir": landmarks.corrected_left(last2[at.lasts], at),
                "lindy": landmarks.lindy_left(at),
            }
            found = {name: Judged(duration_scores(point, actual)) for name, point in points.items()}
            for group in ("user", "key"):
                spread = landmarks.conditional_left(at, history, group)
                losses, medians = spread_losses(spread, actual)
                point = duration_scores(spread[:, _MEDIAN], actual)
                found[f"conditional_{group}"] = Judged(point | losses, medians=medians)
            others.append(found)
            if len(asked):
                table_of = level_table(quantiles, actual, QUANTILES)
                calibration += [row | {"elapsed_s": elapsed_s} for row in table_of]
            frame = quantile_frame(quantiles)
            point = frame.select(pl.lit(elapsed_s).alias("elapsed_s"), pl.col("q50_s").alias("point_s"))
            said.append(pl.concat([named_rows(table, asked), point, frame], how="horizontal"))
        baselines = {name: Judged.joined([found[name] for found in others]) for name in others[0]}
        return Outcome(Judged.joined(models), baselines, calibration, pl.concat(said))


def _judged(quantiles: Floats, actual: Floats, asked: Ints, elapsed_s: float) -> Judged:
    pinball = log_pinball(quantiles[:, _SPREAD], actual, recency.SPREAD_LEVELS)
    return Judged(
        duration_losses(quantiles, actual) | {"pinball_10_50_90": pinball}, medians=widths(quantiles), rows=asked,
        elapsed_s=np.full(len(asked), elapsed_s),
    )  # fmt: skip

"""Job failure as a task: how the odds of bad ends are fitted, judged and set beside the rolling rates.

Here belong its losses and baselines; not the odds (`models/failure.py`), their kinds (`models/failure_kinds.py`) or
those of running jobs (`models/failure_running.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory, JobTable
from features.job_outcomes import FAILURE_FEATURES, failure_matrix
from models import failure, failure_kinds, recency
from models.calibration import reliability
from models.failure import FailureForecaster
from models.failure_landmarks import landmark_columns
from models.judging import Judged, Outcome, matrix_of, named_rows
from models.scoring import brier

Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

_NEW = recency.STRATA.index("new")


@dataclass(frozen=True, slots=True)
class FailureTask:
    """Bad end of a job that started."""

    name: ClassVar[str] = "job_failure"
    primary: ClassVar[str] = "brier"
    coverage: ClassVar[str | None] = None
    held: ClassVar[Mapping[str, str]] = {}
    rounds: int = failure.ROUNDS

    def matrix(self, history: JobHistory, rows: Ints | None = None) -> Matrix:
        return matrix_of(failure_matrix, history, rows)

    def released(self, table: JobTable) -> Ints:
        return np.where(failure.labelled(table), table.end, NEVER)

    def configuration(self) -> dict[str, Any]:
        return {"model": "lightgbm+rate", "rounds": self.rounds, "features": list(FAILURE_FEATURES)}

    def fit(
        self, history: JobHistory, at: int, features: Matrix | None, *, seed: int, threads: int, max_labels: int
    ) -> FailureForecaster:
        most = min(max_labels, failure.MAX_LABELS)
        return FailureForecaster.fit(
            history, at, features=features, seed=seed, threads=threads, rounds=self.rounds, max_labels=most
        )

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    def from_files(self, files: Mapping[str, bytes]) -> FailureForecaster:
        return FailureForecaster.from_files(files)

    def judge(self, forecaster: FailureForecaster, X: Matrix, history: JobHistory, rows: Ints) -> Judged:
        table = history.table
        probability = forecaster.probability(X)
        kinds = forecaster.kind_probabilities(X, probability)
        metrics = {"brier": brier(probability, table.is_bad[rows])} | failure_kinds.kind_losses(kinds, table, rows)
        return Judged(metrics, probability, is_new=recency.stratum(X) == _NEW)

    def baselines(self, X: Matrix, history: JobHistory, rows: Ints) -> dict[str, Judged]:
        table = history.table
        bad = table.is_bad[rows]
        rate = failure.rolling_rate(X)
        user = failure.rolling_rate(X, narrowest="user")
        new = recency.stratum(X) == _NEW
        kinds = rate[:, None] * failure_kinds.rolling_shares(X)
        return {
            "rolling_rate": Judged(
                {"brier": brier(rate, bad)} | failure_kinds.kind_losses(kinds, table, rows), rate, is_new=new
            ),
            "user_rate": Judged({"brier": brier(user, bad)}, user, is_new=new),
        }

    def calibration(
        self, forecaster: FailureForecaster, X: Matrix, table: JobTable, rows: Ints
    ) -> list[dict[str, float]]:
        return reliability(forecaster.probability(X), table.is_bad[rows])

    def outcome(self, forecaster: FailureForecaster, X: Matrix, history: JobHistory, rows: Ints) -> Outcome:
        later = landmark_columns(forecaster.running, X, history, rows)
        return Outcome(
            self.judge(forecaster, X, history, rows), self.baselines(X, history, rows),
            self.calibration(forecaster, X, history.table, rows),
            pl.concat([named_rows(history.table, rows), forecaster.frame(X), later], how="horizontal"),
        )  # fmt: skip

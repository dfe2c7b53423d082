"""What the three job forecasts have in common: how each is fitted, judged and set beside its baselines.

Backtests (`models/backtest.py`) and nightly training (`models/training.py`) speak to each through the protocol of
`models/judging.py`. Here belong the losses and baselines of each task; not the walk-forward, not the promotion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory, JobTable
from features.job_outcomes import FAILURE_FEATURES, failure_matrix
from features.job_queue import WAIT_FEATURES, wait_matrix
from features.jobs import FEATURES, feature_matrix
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES
from models import failure, failure_kinds, landmarks, recency, wait
from models.calibration import level_table, reliability
from models.curves import quantile_frame, read_levels, read_seconds
from models.failure import FailureForecaster
from models.failure_landmarks import landmark_columns
from models.forest import ForestSize
from models.judging import Judged, Task, duration_losses, matrix_of, named_rows, remaining_losses
from models.runtime import RuntimeForecaster
from models.scoring import brier, duration_scores, is_covered, is_within, log_pinball
from models.wait import SOON_S, WaitForecaster
from models.wait_points import WITHIN_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

_NEW = recency.STRATA.index("new")


@dataclass(frozen=True, slots=True)
class RuntimeTask:
    """Runtime at submit. Jobs that ran for zero time are not judged.

    Attributes:
        size: Size of the forests.
        is_remaining: Predictions are of the time left after each of `landmarks.ELAPSED_S`.
    """

    name: ClassVar[str] = "runtime"
    primary: ClassVar[str] = "male"
    coverage: ClassVar[str | None] = "covered_share_80"
    held: ClassVar[Mapping[str, str]] = {"time left": "remaining_male_"}
    size: ForestSize = field(default_factory=ForestSize)
    is_remaining: bool = False

    def matrix(self, history: JobHistory, rows: Ints | None = None) -> Matrix:
        return matrix_of(feature_matrix, history, rows)

    def released(self, table: JobTable) -> Ints:
        return np.where(table.has_run, table.end, NEVER)

    def configuration(self) -> dict[str, Any]:
        return {"model": "forests+kernel+siblings", "size": asdict(self.size), "features": list(FEATURES)}

    def fit(
        self, history: JobHistory, at: int, features: Matrix | None, *, seed: int, threads: int, max_labels: int
    ) -> RuntimeForecaster:
        return RuntimeForecaster.fit(
            history, at, features=features, seed=seed, threads=threads, size=self.size, max_labels=max_labels
        )

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    def from_files(self, files: Mapping[str, bytes]) -> RuntimeForecaster:
        return RuntimeForecaster.from_files(files)

    def judge(self, forecaster: RuntimeForecaster, X: Matrix, history: JobHistory, rows: Ints) -> Judged:
        limit_s, actual = history.table.limit_s[rows], history.table.runtime_s[rows]
        curves, modes = forecaster.distribution(X, limit_s)
        quantiles = read_seconds(curves, QUANTILES, limit_s)
        others = {
            "mode_within_25pct": is_within(np.exp(modes), actual, 0.25).astype(np.float64),
            "pinball_10_50_90": log_pinball(
                np.exp(read_levels(curves, recency.SPREAD_LEVELS)), actual, recency.SPREAD_LEVELS
            ),
        }
        left = landmarks.medians(forecaster, history, rows)
        return Judged(duration_losses(quantiles, actual) | others | remaining_losses(left, actual))

    def baselines(self, X: Matrix, history: JobHistory, rows: Ints) -> dict[str, Judged]:
        actual, left = history.table.runtime_s[rows], landmarks.baselines(history, rows)
        found = {}
        for name in recency.BASELINES:
            point = np.exp(recency.baseline_log(name, X))
            found[name] = Judged(duration_scores(point, actual) | remaining_losses(left[name], actual))
        empirical = np.exp(recency.empirical_log(X))
        found["median_key"].metrics["pinball_10_50_90"] = log_pinball(empirical, actual, recency.SPREAD_LEVELS)
        return found

    def calibration(
        self, forecaster: RuntimeForecaster, X: Matrix, table: JobTable, rows: Ints
    ) -> list[dict[str, float]]:
        return level_table(forecaster.quantiles(X, table.limit_s[rows]).to_numpy(), table.runtime_s[rows], QUANTILES)

    def predictions(self, forecaster: RuntimeForecaster, X: Matrix, history: JobHistory, rows: Ints) -> pl.DataFrame:
        if self.is_remaining:
            return landmarks.predictions(forecaster, history, rows)
        table = history.table
        limit_s = table.limit_s[rows]
        curves, modes = forecaster.distribution(X, limit_s)
        frame = quantile_frame(read_seconds(curves, QUANTILES, limit_s))
        mode = pl.Series("mode_s", np.fmin(np.exp(modes), limit_s))
        points = frame.select(pl.col("q50_s").alias("point_s"), mode)
        return pl.concat([named_rows(table, rows), points, frame], how="horizontal")


@dataclass(frozen=True, slots=True)
class WaitTask:
    """Wait from submit until the start."""

    name: ClassVar[str] = "wait"
    primary: ClassVar[str] = "male"
    coverage: ClassVar[str | None] = "covered_share_80"
    held: ClassVar[Mapping[str, str]] = {"odds of a start": "brier_"}
    size: ForestSize = wait.SIZE

    def matrix(self, history: JobHistory, rows: Ints | None = None) -> Matrix:
        return matrix_of(wait_matrix, history, rows)

    def released(self, table: JobTable) -> Ints:
        return table.start

    def configuration(self) -> dict[str, Any]:
        return {"model": "forest", "size": asdict(self.size), "features": list(WAIT_FEATURES)}

    def fit(
        self, history: JobHistory, at: int, features: Matrix | None, *, seed: int, threads: int, max_labels: int
    ) -> WaitForecaster:
        most = min(max_labels, wait.MAX_LABELS)
        return WaitForecaster.fit(
            history, at, features=features, seed=seed, threads=threads, size=self.size, max_labels=most
        )

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    def from_files(self, files: Mapping[str, bytes]) -> WaitForecaster:
        return WaitForecaster.from_files(files)

    def judge(self, forecaster: WaitForecaster, X: Matrix, history: JobHistory, rows: Ints) -> Judged:
        table = history.table
        frame = forecaster.frame(X)
        actual = table.wait_s[rows]
        odds = {
            f"brier_{seconds}s": brier(frame[column].to_numpy(), actual <= seconds)
            for seconds, column in zip(wait.SOON_S, wait.SOON_COLUMNS, strict=True)
        }
        quantiles = frame.select(QUANTILE_COLUMNS).to_numpy()
        bound = is_covered(np.zeros(len(rows)), quantiles[:, QUANTILES.index(0.95)], actual)
        metrics = duration_losses(quantiles, actual) | odds | {"below_q95": bound.astype(np.float64)}
        points = _wait_points(frame["likeliest_s"].to_numpy(), quantiles[:, QUANTILES.index(0.5)], actual)
        return Judged(metrics | points, 1.0 - frame["p_start_60s"].to_numpy(), actual > SOON_S[0])

    def baselines(self, X: Matrix, history: JobHistory, rows: Ints) -> dict[str, Judged]:
        table = history.table
        actual = table.wait_s[rows]
        found = {}
        for name in wait.BASELINES:
            forecast = wait.baseline_s(name, X)
            odds = {
                f"brier_{seconds}s": brier((forecast <= seconds).astype(np.float64), actual <= seconds)
                for seconds in wait.SOON_S
            }
            points = _wait_points(forecast, forecast, actual)
            found[name] = Judged(duration_scores(forecast, actual) | odds | points, forecast, actual > SOON_S[0])
        recent = self.judge(WaitForecaster.recent(), X, history, rows)
        return found | {"recent_waits": recent}

    def calibration(self, forecaster: WaitForecaster, X: Matrix, table: JobTable, rows: Ints) -> list[dict[str, float]]:
        quantiles = forecaster.frame(X).select(QUANTILE_COLUMNS).to_numpy()
        return level_table(quantiles, table.wait_s[rows], QUANTILES)

    def predictions(self, forecaster: WaitForecaster, X: Matrix, history: JobHistory, rows: Ints) -> pl.DataFrame:
        table = history.table
        frame = forecaster.frame(X).select(
            pl.col("q50_s").alias("point_s"), pl.col("likeliest_s").alias("mode_s"), *QUANTILE_COLUMNS,
            *wait.SOON_COLUMNS,
        )  # fmt: skip
        return pl.concat([named_rows(table, rows), frame], how="horizontal")


def _wait_points(nearest_s: Floats, median_s: Floats, actual_s: Floats) -> dict[str, Floats]:
    """Within a minute of the truth, of the point made for it; and |ln(1 + forecast) − ln(1 + actual)| of the median."""
    return {
        "within_60s": (np.abs(nearest_s - actual_s) <= WITHIN_S + 0.5).astype(np.float64),
        "mae_log1p": np.abs(np.log1p(median_s) - np.log1p(actual_s)),
    }


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
        metrics = {"brier": brier(probability, table.is_bad[rows])} | _kind_losses(kinds, table, rows)
        return Judged(metrics, probability, is_new=recency.stratum(X) == _NEW)

    def baselines(self, X: Matrix, history: JobHistory, rows: Ints) -> dict[str, Judged]:
        table = history.table
        bad = table.is_bad[rows]
        rate = failure.rolling_rate(X)
        user = failure.rolling_rate(X, narrowest="user")
        new = recency.stratum(X) == _NEW
        kinds = rate[:, None] * failure_kinds.rolling_shares(X)
        return {
            "rolling_rate": Judged({"brier": brier(rate, bad)} | _kind_losses(kinds, table, rows), rate, is_new=new),
            "user_rate": Judged({"brier": brier(user, bad)}, user, is_new=new),
        }

    def calibration(
        self, forecaster: FailureForecaster, X: Matrix, table: JobTable, rows: Ints
    ) -> list[dict[str, float]]:
        return reliability(forecaster.probability(X), table.is_bad[rows])

    def predictions(self, forecaster: FailureForecaster, X: Matrix, history: JobHistory, rows: Ints) -> pl.DataFrame:
        later = landmark_columns(forecaster.running, X, history, rows)
        return pl.concat([named_rows(history.table, rows), forecaster.frame(X), later], how="horizontal")


def _kind_losses(kinds: Floats, table: JobTable, rows: Ints) -> dict[str, Floats]:
    """Brier of each kind of bad end that came at all; kinds of shape (n, len(KIND_NAMES))."""
    happened = np.where(table.is_bad[rows], failure_kinds.kind_of(table)[rows], -1)
    return {
        f"brier_{name}": brier(kinds[:, number], happened == number)
        for number, name in enumerate(failure_kinds.KIND_NAMES)
        if number < kinds.shape[1]
    }


TASKS: dict[str, type[RuntimeTask | WaitTask | FailureTask]] = {
    task.name: task for task in (RuntimeTask, WaitTask, FailureTask)
}


def make_task(name: str, parameters: Mapping[str, Any] | None = None) -> Task:
    """A task of the default configuration, or with the `parameters` that a card recorded.

    Raises:
        ValueError: There is no such task; the message lists them.
    """
    if name not in TASKS:
        raise ValueError(f"no job forecast {name!r}; there are: {', '.join(TASKS)}")
    given = dict(parameters or {})
    if "size" in given:
        given["size"] = ForestSize(**given["size"])
    return TASKS[name](**given)

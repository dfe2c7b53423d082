"""The job forecasts as tasks: how each is fitted, judged and set beside its baselines.

Backtests (`models/backtest.py`) and nightly training (`models/training.py`) speak to each through the protocol of
`models/judging.py`. Here belong the losses and baselines of runtimes and waits, and the tasks by name; not failures
(`models/failure_task.py`), time left (`models/remaining_task.py`), the walk-forward or the promotion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory, JobTable
from features.job_queue import WAIT_FEATURES, wait_matrix
from features.jobs import FEATURES, feature_matrix
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES
from models import landmarks, recency, wait
from models.calibration import level_table
from models.curves import quantile_frame, read_seconds
from models.failure_task import FailureTask
from models.forest import ForestSize
from models.judging import (
    Judged,
    Outcome,
    Task,
    duration_losses,
    matrix_of,
    named_rows,
    remaining_losses,
    spread_losses,
    widths,
)
from models.runtime import RuntimeForecaster
from models.scoring import brier, duration_scores, is_covered, is_within, log_pinball
from models.wait import SOON_S, WaitForecaster
from models.wait_looks import look_losses
from models.wait_points import WITHIN_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RuntimeTask:
    """Runtime at submit. Jobs that ran for zero time are not judged.

    Attributes:
        size: Size of the forests.
    """

    name: ClassVar[str] = "runtime"
    primary: ClassVar[str] = "male"
    coverage: ClassVar[str | None] = "covered_share_80"
    held: ClassVar[Mapping[str, str]] = {"time left": "remaining_male_"}
    size: ForestSize = field(default_factory=ForestSize)

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
        return self._judged(*_told(forecaster, X, history.table.limit_s[rows]), forecaster, history, rows)

    def _judged(
        self, quantiles: Floats, modes: Floats, forecaster: RuntimeForecaster, history: JobHistory, rows: Ints
    ) -> Judged:
        actual = history.table.runtime_s[rows]
        spread = quantiles[:, [QUANTILES.index(level) for level in recency.SPREAD_LEVELS]]
        others = {
            "mode_within_25pct": is_within(modes, actual, 0.25).astype(np.float64),
            "pinball_10_50_90": log_pinball(spread, actual, recency.SPREAD_LEVELS),
        }
        left = landmarks.medians(forecaster, history, rows)
        metrics = duration_losses(quantiles, actual) | others | remaining_losses(left, actual)
        return Judged(metrics, medians=widths(quantiles))

    def baselines(self, X: Matrix, history: JobHistory, rows: Ints) -> dict[str, Judged]:
        actual, left = history.table.runtime_s[rows], landmarks.baselines(history, rows)
        found = {}
        for name in recency.BASELINES:
            point = np.exp(recency.baseline_log(name, X))
            found[name] = Judged(duration_scores(point, actual) | remaining_losses(left[name], actual))
        losses, medians = spread_losses(np.exp(recency.empirical_log(X)), actual)
        return found | {"quantiles_key": Judged(losses, medians=medians)}

    def calibration(
        self, forecaster: RuntimeForecaster, X: Matrix, table: JobTable, rows: Ints
    ) -> list[dict[str, float]]:
        return level_table(forecaster.quantiles(X, table.limit_s[rows]).to_numpy(), table.runtime_s[rows], QUANTILES)

    def outcome(self, forecaster: RuntimeForecaster, X: Matrix, history: JobHistory, rows: Ints) -> Outcome:
        table = history.table
        quantiles, modes = _told(forecaster, X, table.limit_s[rows])
        frame = quantile_frame(quantiles)
        points = frame.select(pl.col("q50_s").alias("point_s"), pl.Series("mode_s", modes))
        return Outcome(
            self._judged(quantiles, modes, forecaster, history, rows), self.baselines(X, history, rows),
            level_table(quantiles, table.runtime_s[rows], QUANTILES),
            pl.concat([named_rows(table, rows), points, frame], how="horizontal"),
        )  # fmt: skip


def _told(forecaster: RuntimeForecaster, X: Matrix, limit_s: Floats) -> tuple[Floats, Floats]:
    """Quantiles of shape (n, len(QUANTILES)) and modes of shape (n,), seconds."""
    curves, modes = forecaster.distribution(X, limit_s)
    return read_seconds(curves, QUANTILES, limit_s), np.fmin(np.exp(modes), limit_s)


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
        return self._judged(forecaster, forecaster.frame(X), history, rows)

    def _judged(self, forecaster: WaitForecaster, frame: pl.DataFrame, history: JobHistory, rows: Ints) -> Judged:
        actual = history.table.wait_s[rows]
        odds = {
            f"brier_{seconds}s": brier(frame[column].to_numpy(), actual <= seconds)
            for seconds, column in zip(wait.SOON_S, wait.SOON_COLUMNS, strict=True)
        }
        quantiles = frame.select(QUANTILE_COLUMNS).to_numpy()
        bound = is_covered(np.zeros(len(rows)), quantiles[:, QUANTILES.index(0.95)], actual)
        metrics = duration_losses(quantiles, actual) | odds | {"below_q95": bound.astype(np.float64)}
        points = _wait_points(frame["likeliest_s"].to_numpy(), quantiles[:, QUANTILES.index(0.5)], actual)
        later = look_losses(forecaster, history, rows)
        return Judged(metrics | points | later, 1.0 - frame["p_start_60s"].to_numpy(), actual > SOON_S[0])

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
            losses = duration_scores(forecast, actual) | odds | points | look_losses(name, history, rows)
            found[name] = Judged(losses, forecast, actual > SOON_S[0])
        recent = self.judge(WaitForecaster.recent(), X, history, rows)
        return found | {"recent_waits": recent}

    def calibration(self, forecaster: WaitForecaster, X: Matrix, table: JobTable, rows: Ints) -> list[dict[str, float]]:
        quantiles = forecaster.frame(X).select(QUANTILE_COLUMNS).to_numpy()
        return level_table(quantiles, table.wait_s[rows], QUANTILES)

    def outcome(self, forecaster: WaitForecaster, X: Matrix, history: JobHistory, rows: Ints) -> Outcome:
        table, frame = history.table, forecaster.frame(X)
        said = frame.select(
            pl.col("q50_s").alias("point_s"), pl.col("likeliest_s").alias("mode_s"), *QUANTILE_COLUMNS,
            *wait.SOON_COLUMNS,
        )  # fmt: skip
        return Outcome(
            self._judged(forecaster, frame, history, rows), self.baselines(X, history, rows),
            level_table(frame.select(QUANTILE_COLUMNS).to_numpy(), table.wait_s[rows], QUANTILES),
            pl.concat([named_rows(table, rows), said], how="horizontal"),
        )  # fmt: skip


def _wait_points(nearest_s: Floats, median_s: Floats, actual_s: Floats) -> dict[str, Floats]:
    """Within a minute of the truth, of the point made for it; and |ln(1 + forecast) − ln(1 + actual)| of the median."""
    return {
        "within_60s": (np.abs(nearest_s - actual_s) <= WITHIN_S + 0.5).astype(np.float64),
        "mae_log1p": np.abs(np.log1p(median_s) - np.log1p(actual_s)),
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
    given.pop("is_remaining", None)  # cards of runtimes from before time left was a task of its own
    if "size" in given:
        given["size"] = ForestSize(**given["size"])
    return TASKS[name](**given)

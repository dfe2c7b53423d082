"""The shape that every job forecast is fitted and judged through, and the losses per row they share.

Here belong the protocol of a task, what it returns, and helpers of those in `models/tasks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES
from models.recency import SPREAD_LEVELS
from models.runtime_choice import day_blocks
from models.scoring import covered_share, duration_scores, is_covered, log_error, log_pinball

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

_Q10, _Q90 = QUANTILE_COLUMNS.index("q10_s"), QUANTILE_COLUMNS.index("q90_s")


@dataclass(frozen=True, slots=True)
class Judged:
    """A forecaster or baseline on a set of outcomes.

    Attributes:
        metrics: Name to one value per row, whose mean is the metric; the task's primary loss is among them.
        score: What ranks the rows, for AUROC; a probability where it lies in [0, 1].
        happened: What `score` is of, shape (n,); None: a bad end.
        is_new: Rows of users without any history, shape (n,).
        medians: Name to one value per row, whose median is the figure.
        rows: Row of the history that each outcome is of, shape (n,); None: those that were asked about, in order.
        elapsed_s: How long that job had run when it was asked about, shape (n,); None: asked at the submit.
    """

    metrics: dict[str, Floats]
    score: Floats | None = None
    happened: NDArray[np.bool_] | None = None
    is_new: NDArray[np.bool_] | None = None
    medians: dict[str, Floats] = field(default_factory=dict)
    rows: Ints | None = None
    elapsed_s: Floats | None = None

    def of(self, here: NDArray[np.bool_]) -> Judged:
        """The same of some of the rows, shape (n,)."""
        return Judged(
            {name: values[here] for name, values in self.metrics.items()},
            None if self.score is None else self.score[here],
            None if self.happened is None else self.happened[here],
            None if self.is_new is None else self.is_new[here],
            {name: values[here] for name, values in self.medians.items()},
            None if self.rows is None else self.rows[here],
            None if self.elapsed_s is None else self.elapsed_s[here],
        )

    @classmethod
    def joined(cls, parts: Sequence[Judged]) -> Judged:
        """Of several stretches one after the other."""

        def whole(name: str) -> Any:
            there = [getattr(part, name) for part in parts if getattr(part, name) is not None]
            return np.concatenate(there) if there else None

        metrics, medians = (
            {k: np.concatenate([getattr(part, name)[k] for part in parts]) for k in getattr(parts[0], name)}
            for name in ("metrics", "medians")
        )
        return cls(
            metrics, whole("score"), whole("happened"), whole("is_new"), medians, whole("rows"), whole("elapsed_s")
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a forecaster and its baselines said of a stretch of jobs, and how good it was.

    Attributes:
        model: The forecaster.
        baselines: By name, on the same rows.
        calibration: Nominal level or probability, observed share, rows; `elapsed_s` where asked while running.
        predictions: What was forecast.
    """

    model: Judged
    baselines: dict[str, Judged]
    calibration: list[dict[str, float]]
    predictions: pl.DataFrame


class Walked(Protocol):
    """A job forecast that can be backtested.

    Attributes:
        name: Name.
        primary: Loss that decides.
        coverage: Metric whose mean should be .80; None where there is no interval.
    """

    name: ClassVar[str]
    primary: ClassVar[str]
    coverage: ClassVar[str | None]

    def matrix(self, history: JobHistory, rows: Ints | None = None) -> Matrix: ...
    def released(self, table: JobTable) -> Ints: ...
    def fit(
        self, history: JobHistory, at: int, features: Matrix | None, *, seed: int, threads: int, max_labels: int
    ) -> Any: ...
    def outcome(self, forecaster: Any, X: Matrix, history: JobHistory, rows: Ints) -> Outcome: ...


class Task(Walked, Protocol):
    """A job forecast that is also trained, kept and promoted by itself.

    Attributes:
        held: What a challenger must hold besides: in words → how the names of these losses begin.
    """

    held: ClassVar[Mapping[str, str]]

    def configuration(self) -> dict[str, Any]: ...
    def parameters(self) -> dict[str, Any]: ...
    def from_files(self, files: Mapping[str, bytes]) -> Any: ...
    def judge(self, forecaster: Any, X: Matrix, history: JobHistory, rows: Ints) -> Judged: ...
    def baselines(self, X: Matrix, history: JobHistory, rows: Ints) -> dict[str, Judged]: ...
    def calibration(self, forecaster: Any, X: Matrix, table: JobTable, rows: Ints) -> list[dict[str, float]]: ...


def blocks_of(table: JobTable, rows: Ints) -> NDArray[np.uint64]:
    """Block of each row for the bootstrap: user × day of submit."""
    return day_blocks(table.group("user")[rows], table.submit[rows])


def named_rows(table: JobTable, rows: Ints) -> pl.DataFrame:
    return table.frame[rows].select("job_id", "submit_time")


def matrix_of(make: Any, history: JobHistory, rows: Ints | None) -> Matrix:
    """Features of history rows (all when None) at their own submits."""
    table = history.table
    if rows is None:
        return make(table, history, table.submit)
    part = JobTable(table.frame[rows])
    return make(part, history, part.submit)


def remaining_losses(left_s: Mapping[float, Floats], actual_s: Floats) -> dict[str, Floats]:
    """|ln| error of the time left at each elapsed time, NaN for jobs that had ended by then."""
    return {
        f"remaining_male_{elapsed:.0f}s": np.where(
            actual_s > elapsed, log_error(left, np.maximum(actual_s - elapsed, 1.0)), np.nan
        )
        for elapsed, left in left_s.items()
    }


def duration_losses(quantiles_s: Floats, actual_s: Floats) -> dict[str, Floats]:
    median = quantiles_s[:, QUANTILES.index(0.5)]
    covered = is_covered(quantiles_s[:, _Q10], quantiles_s[:, _Q90], actual_s)
    scores = duration_scores(median, actual_s)
    scores["male"] = log_error(median, actual_s)
    scores["coverage_80"] = covered.astype(np.float64)
    scores["covered_share_80"] = covered_share(quantiles_s, actual_s)
    scores["pinball"] = log_pinball(quantiles_s, actual_s)
    return scores


def widths(quantiles_s: Floats) -> dict[str, Floats]:
    """q90 ÷ q10 of forecasts at `QUANTILES`, both at least a second; its median is the figure."""
    low, high = np.maximum(quantiles_s[:, _Q10], 1.0), np.maximum(quantiles_s[:, _Q90], 1.0)
    return {"q90_over_q10": high / low}


def spread_losses(quantiles_s: Floats, actual_s: Floats) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Losses, and widths, of a forecast that has quantiles at `SPREAD_LEVELS` alone; shape (n, 3)."""
    low, high = quantiles_s[:, 0], quantiles_s[:, -1]
    losses = {
        "coverage_80": is_covered(low, high, actual_s).astype(np.float64),
        "pinball_10_50_90": log_pinball(quantiles_s, actual_s, SPREAD_LEVELS),
    }
    return losses, {"q90_over_q10": np.maximum(high, 1.0) / np.maximum(low, 1.0)}

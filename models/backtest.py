"""Walk-forward backtests: what a forecaster would have said at each past submit, beside its baselines, with intervals.

Jobs are ordered by submit; the first 1 % are warm-up and the last 30 % the test. The forecaster is fitted anew every
week on outcomes released by then, and sees the history of each job as of its submit. Here belong the protocol and the
walk; not the losses (`models/tasks.py`, `models/remaining_task.py`), the figures (`models/backtest_figures.py`) or the
report's forms (`models/backtest_report.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory, JobTable
from features.job_table import check_columns
from models.backtest_figures import Figures, bare
from models.backtest_report import NO_BAD_END, BacktestReport, Score, figure
from models.calibration import MIN_ROWS
from models.failure_kinds import KIND_NAMES, kind_of
from models.failure_landmarks import landmark_scores
from models.judging import Judged, Outcome, Walked, blocks_of
from models.promotion import DRAWS
from models.runtime import MAX_LABELS
from models.tasks import make_task
from models.wait import WaitForecaster
from models.wait_points import recorded_publications, start_churn

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_Published = dict[str, list[pl.DataFrame]]  # what would have been published, by baseline; "" is the model

TEST_SHARE = 0.30
WARMUP_SHARE = 0.01
REFIT_DAYS = 7.0
_CHURN_JOBS = 30  # waiting jobs of each fit that are looked at every ten minutes
_DAY_US = 86_400_000_000
_YEARS_US = (-62_135_596_800_000_000, 253_402_300_800_000_000)  # years 1 to 9999: what a calendar can name


class BacktestError(ValueError):
    """There is nothing to backtest; the message says what is missing."""


def backtest(
    task: str | Walked, jobs: pl.DataFrame, *, test_share: float = TEST_SHARE, warmup_share: float = WARMUP_SHARE,
    refit_days: float = REFIT_DAYS, max_labels: int = MAX_LABELS, seed: int = 1, threads: int = 1, draws: int = DRAWS,
    progress: Callable[[int, int], None] | None = None,
) -> BacktestReport:  # fmt: skip
    """Walk forward over recorded jobs.

    Args:
        task: `runtime`, `wait`, `job_failure`, or a task with a configuration of its own, as `RemainingTask()`.
        jobs: Canonical jobs of one cluster.
        test_share: Share of the jobs, newest by submit, that is judged.
        warmup_share: Share of the oldest that is left out.
        refit_days: Days between fits.
        max_labels: Outcomes a fit learns from at most.
        seed: Seed of fits and draws.
        threads: Threads of a fit.
        draws: Bootstrap draws.
        progress: Told after each fit how many of the jobs are judged, and of how many.

    Raises:
        BacktestError: Too few jobs have an outcome to learn from or to be judged by, or one was submitted in no year
            that a calendar can name.
        features.job_history.JobsError: A needed column is absent or null.
    """
    task = make_task(task) if isinstance(task, str) else task
    check_columns(jobs)
    history = JobHistory(jobs.sort("submit_time", "job_id", maintain_order=True))
    table = history.table
    odd = int(np.count_nonzero((table.submit < _YEARS_US[0]) | (table.submit >= _YEARS_US[1])))
    if odd:
        raise BacktestError(f"submit_time of {odd} of {table.count} jobs lies outside the years 1 to 9999")
    released = task.released(table)
    known = np.flatnonzero(released != NEVER)
    known = known[int(warmup_share * len(known)) :]
    test = known[int((1 - test_share) * len(known)) :]
    if len(test) < MIN_ROWS:
        absent = [name for name in ("start_time", "end_time", "state") if name not in jobs.columns]
        why = f"; the jobs have no column {', '.join(absent)}, only: {', '.join(jobs.columns)}" if absent else ""
        raise BacktestError(
            f"{task.name}: {len(known)} jobs with a known outcome give a test of {len(test)}; {MIN_ROWS} needed{why}"
        )
    walked, refits, published = _walk(task, history, released, test, refit_days, max_labels, seed, threads, progress)
    model, baselines, notes = walked.model, walked.baselines, []
    if task.name == "job_failure" and (absent := _absent_kinds(table, test)):
        model, *others = (_without(judged, absent) for judged in (model, *baselines.values()))
        baselines = dict(zip(baselines, others, strict=True))
        named = ", ".join(name.replace("_", " ") for name in absent)
        notes.append(f"no job of the test is recorded to have ended by {named}: forecast, but not judged")
        if not np.any(table.is_bad[test]):
            notes.append(NO_BAD_END)
    rows = test if model.rows is None else model.rows
    judge = Figures(task, history, model, baselines, rows, blocks_of(table, rows), draws, seed)
    scores, best = judge.whole() if len(rows) else ([], "")
    strata, best_after = judge.parts(best) if len(rows) else ([], {})
    for elapsed_s in best_after:
        scores += judge.compare(judge.after(elapsed_s), elapsed_s=elapsed_s)[0]
    if task.name == "job_failure":
        scores += landmark_scores(walked.predictions, history, test, judge.blocks, draws=draws, seed=seed)
    if task.name == "runtime":
        strata += judge.siblings(best)
    scores += _churn(published)
    if task.name == "wait" and not np.any(table.wait_s[test] > 0):
        notes.append("every wait is zero: this source did not record waits, the figures say nothing")
    if not len(rows):
        notes.append("no job of the test lasted for a minute: there is no time left to judge")
    submit = table.submit[test]
    return BacktestReport(
        task.name, _datetime(submit[0]), _datetime(submit[-1]), len(test), refits, best, scores, walked.calibration,
        notes, strata, walked.predictions, primary=task.primary, best_after=best_after,
    )  # fmt: skip


def _walk(
    task: Walked, history: JobHistory, released: Ints, test: Ints, refit_days: float, max_labels: int, seed: int,
    threads: int, progress: Callable[[int, int], None] | None,
) -> tuple[Outcome, int, _Published]:  # fmt: skip
    table = history.table
    X = task.matrix(history)
    submit = table.submit[test]
    outcomes: list[Outcome] = []
    published: _Published = {"": [], "recent_waits": []}
    for moment, until in spans(submit, int(refit_days * _DAY_US)):
        rows = test[(submit >= moment) & (submit < until)]
        have = released < moment
        if have.sum() < MIN_ROWS:
            raise BacktestError(f"{task.name}: {have.sum()} outcomes before the test; {MIN_ROWS} needed")
        forecaster = task.fit(history, moment, X, seed=seed, threads=threads, max_labels=max_labels)
        outcomes.append(task.outcome(forecaster, X[rows], history, rows))
        if isinstance(forecaster, WaitForecaster):
            for name, parts in published.items():
                asked = WaitForecaster.recent() if name else forecaster
                parts.append(recorded_publications(asked, history, rows, most=_CHURN_JOBS, seed=seed))
        if progress is not None:
            progress(int((submit < until).sum()), len(test))
    joined = Outcome(
        Judged.joined([part.model for part in outcomes]),
        {name: Judged.joined([part.baselines[name] for part in outcomes]) for name in outcomes[0].baselines},
        _join_tables([part.calibration for part in outcomes], 10 if task.coverage is None else 20),
        pl.concat([part.predictions for part in outcomes]),
    )
    return joined, len(outcomes), published


def spans(submit: Ints, step: int) -> Iterator[tuple[int, int]]:
    """Spans of one length, laid end to end from the first submit: those in which a job was submitted.

    Args:
        submit: µs, rising, shape (n,).
        step: Length, µs.
    """
    row = 0
    while row < len(submit):
        moment = int(submit[0]) + (int(submit[row]) - int(submit[0])) // step * step
        yield moment, moment + step
        row = int(np.searchsorted(submit, moment + step))


def _absent_kinds(table: JobTable, test: Ints) -> list[str]:
    """Kinds of bad ends that no job of the test had: their odds are near zero, and so would be any loss of them."""
    ends = kind_of(table)[test][table.is_bad[test]]
    return [name for number, name in enumerate(KIND_NAMES) if not np.any(ends == number)]


def _without(judged: Judged, kinds: list[str]) -> Judged:
    losses = {name: loss for name, loss in judged.metrics.items() if name.removeprefix("brier_") not in kinds}
    return replace(judged, metrics=losses)


def _churn(published: _Published) -> list[Score]:
    """How far forecast starts of waiting jobs moved from one look to the next."""
    scores = []
    for name, parts in published.items():
        moved = start_churn(pl.concat(parts)) if parts else pl.DataFrame()
        if not moved.height:
            continue
        figures = {
            "churn_move_s": moved["move_s"].median(), "churn_over_10min": moved["moved_share"].mean(),
            "churn_drift_s": moved["drift_s"].median(),
        }  # fmt: skip
        scores += [
            figure(metric, name, bare(cast(float, value), moved.height), moved.height)
            for metric, value in figures.items()
        ]
    return scores


def _join_tables(tables: list[list[dict[str, float]]], parts: int) -> list[dict[str, float]]:
    """Calibration tables of several fits as one; rows in the same part of the range of forecasts are put together."""
    bins: dict[tuple[float, int], list[dict[str, float]]] = {}
    for row in (row for table in tables for row in table):
        bins.setdefault((row.get("elapsed_s", -1.0), int(row["forecast"] * parts + 1e-9)), []).append(row)
    joined = []
    for (elapsed_s, _), rows in sorted(bins.items()):
        count = sum(row["count"] for row in rows)
        means = {name: sum(row[name] * row["count"] for row in rows) / count for name in ("forecast", "observed")}
        after = {} if elapsed_s < 0 else {"elapsed_s": elapsed_s}
        joined.append({name: round(mean, 4) for name, mean in means.items()} | {"count": count} | after)
    return joined


def _datetime(moment_us: int) -> datetime:
    return datetime.fromtimestamp(moment_us / 1e6, UTC)

"""Walk-forward backtests: what a forecaster would have said at each past submit, beside its baselines, with intervals.

Jobs are ordered by submit; the first 1 % are warm-up and the last 30 % the test. The forecaster is fitted anew every
week on outcomes released by then, and sees the history of each job as of its submit. Here belong the protocol and the
walk; not the losses (`models/tasks.py`), the intervals (`models/promotion.py`) or the report's forms
(`models/backtest_report.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory, JobTable
from features.job_table import check_columns
from models.backtest_report import BacktestReport, Score
from models.calibration import MIN_ROWS
from models.failure_landmarks import landmark_scores
from models.judging import Judged, Task, blocks_of
from models.promotion import DRAWS, Interval, mean_interval, ratio_interval
from models.ranking import ranked
from models.recency import STRATA, stratum
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
_LENGTHS = ((0, 600, "under_10m"), (600, 3_600, "under_1h"), (3_600, 43_200, "under_12h"), (43_200, np.inf, "over_12h"))


class BacktestError(ValueError):
    """There is nothing to backtest; the message says what is missing."""


def backtest(
    task: str | Task, jobs: pl.DataFrame, *, test_share: float = TEST_SHARE, warmup_share: float = WARMUP_SHARE,
    refit_days: float = REFIT_DAYS, max_labels: int = MAX_LABELS, seed: int = 1, threads: int = 1, draws: int = DRAWS,
    progress: Callable[[int, int], None] | None = None,
) -> BacktestReport:  # fmt: skip
    """Walk forward over recorded jobs.

    Args:
        task: `runtime`, `wait`, `job_failure`, or a task with a configuration of its own.
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
        BacktestError: Too few jobs have an outcome to learn from or to be judged by.
        features.job_history.JobsError: A needed column is absent or null.
    """
    task = make_task(task) if isinstance(task, str) else task
    check_columns(jobs)
    history = JobHistory(jobs.sort("submit_time", "job_id", maintain_order=True))
    table = history.table
    released = task.released(table)
    known = np.flatnonzero(released != NEVER)
    known = known[int(warmup_share * len(known)) :]
    test = known[int((1 - test_share) * len(known)) :]
    if len(test) < MIN_ROWS:
        raise BacktestError(
            f"{task.name}: {len(known)} jobs with a known outcome give a test of {len(test)}; {MIN_ROWS} needed"
        )
    X = task.matrix(history)
    walked = _walk(task, history, X, released, test, refit_days, max_labels, seed, threads, progress)
    model, baselines, calibration, predictions, refits, published = walked
    blocks = blocks_of(table, test)
    scores, best = compare(task, model, baselines, blocks, table.is_bad[test], draws=draws, seed=seed)
    if task.name == "runtime":
        scores += _by_stratum(X[test], model, baselines[best], best, blocks, draws, seed)
    if task.name == "job_failure":
        scores += landmark_scores(predictions, history, test, blocks, draws=draws, seed=seed)
    scores += _churn(published)
    strata = _parts(table, test, model, baselines[best], best, blocks, draws, seed)
    notes = []
    if task.name == "wait" and not np.any(table.wait_s[test] > 0):
        notes.append("every wait is zero: this source did not record waits, the figures say nothing")
    submit = table.submit[test]
    return BacktestReport(
        task.name, _datetime(submit[0]), _datetime(submit[-1]), len(test), refits, best, scores, calibration, notes,
        strata, predictions,
    )  # fmt: skip


def compare(
    task: Task, model: Judged, baselines: dict[str, Judged], blocks: NDArray[Any], bad: NDArray[np.bool_], *,
    draws: int = DRAWS, seed: int = 1,
) -> tuple[list[Score], str]:  # fmt: skip
    """Figures of a model and its baselines on the same rows, and the name of the best baseline by primary loss."""
    scores = []
    for name, judged in (("", model), *baselines.items()):
        for metric, values in judged.metrics.items():
            known = int((~np.isnan(values)).sum())
            if known:
                scores.append(Score(metric, name, mean_interval(values, blocks, draws=draws, seed=seed), known))
        for metric, interval, rows in ranked(judged, bad, blocks, draws=draws, seed=seed):
            scores.append(Score(metric, name, interval, rows))
    losses = {name: judged.metrics[task.primary] for name, judged in baselines.items()}
    best = min(losses, key=lambda name: float(losses[name].mean()))
    for name, values in losses.items():
        ratio = ratio_interval(model.metrics[task.primary], values, blocks, draws=draws, seed=seed)
        scores.append(Score(f"{task.primary}_ratio", name, ratio, len(values)))
    return scores, best


def _walk(
    task: Task, history: JobHistory, X: NDArray[np.float32], released: Ints, test: Ints, refit_days: float,
    max_labels: int, seed: int, threads: int, progress: Callable[[int, int], None] | None,
) -> tuple[Judged, dict[str, Judged], list[dict[str, float]], pl.DataFrame, int, _Published]:  # fmt: skip
    table = history.table
    submit = table.submit[test]
    models: list[Judged] = []
    baselines: list[dict[str, Judged]] = []
    calibrations: list[list[dict[str, float]]] = []
    predictions: list[pl.DataFrame] = []
    published: _Published = {"": [], "recent_waits": []}
    moment = int(submit[0])
    while moment <= submit[-1]:
        until = moment + int(refit_days * _DAY_US)
        rows = test[(submit >= moment) & (submit < until)]
        if len(rows):
            have = released < moment
            if have.sum() < MIN_ROWS:
                raise BacktestError(f"{task.name}: {have.sum()} outcomes before the test; {MIN_ROWS} needed")
            forecaster = task.fit(history, moment, X, seed=seed, threads=threads, max_labels=max_labels)
            models.append(task.judge(forecaster, X[rows], history, rows))
            baselines.append(task.baselines(X[rows], history, rows))
            calibrations.append(task.calibration(forecaster, X[rows], table, rows))
            predictions.append(task.predictions(forecaster, X[rows], history, rows))
            if isinstance(forecaster, WaitForecaster):
                for name, parts in published.items():
                    asked = WaitForecaster.recent() if name else forecaster
                    parts.append(recorded_publications(asked, history, rows, most=_CHURN_JOBS, seed=seed))
            if progress is not None:
                progress(int((submit < until).sum()), len(test))
        moment = until
    joined = {name: _join([part[name] for part in baselines]) for name in baselines[0]}
    tables = _join_tables(calibrations, 10 if task.coverage is None else 20)
    return _join(models), joined, tables, pl.concat(predictions), len(models), published


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
            Score(metric, name, Interval(float(cast(float, value)), None, None, moved.height), moved.height)
            for metric, value in figures.items()
        ]
    return scores


def _join(parts: list[Judged]) -> Judged:
    metrics = {name: np.concatenate([part.metrics[name] for part in parts]) for name in parts[0].metrics}
    return Judged(
        metrics, *(_whole([getattr(part, name) for part in parts]) for name in ("score", "happened", "is_new"))
    )


def _whole(parts: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


def _join_tables(tables: list[list[dict[str, float]]], parts: int) -> list[dict[str, float]]:
    """Calibration tables of several fits as one; rows in the same part of the range of forecasts are put together."""
    bins: dict[int, list[dict[str, float]]] = {}
    for row in (row for table in tables for row in table):
        bins.setdefault(int(row["forecast"] * parts + 1e-9), []).append(row)
    joined = []
    for _, rows in sorted(bins.items()):
        count = sum(row["count"] for row in rows)
        means = {name: sum(row[name] * row["count"] for row in rows) / count for name in ("forecast", "observed")}
        joined.append({name: round(mean, 4) for name, mean in means.items()} | {"count": count})
    return joined


def _by_stratum(
    X: NDArray[np.float32], model: Judged, baseline: Judged, name: str, blocks: NDArray[Any], draws: int, seed: int
) -> list[Score]:
    """MALE of jobs whose key has history, whose user alone has, and of new users: cold starts are always shown."""
    rows = stratum(X)
    scores = []
    for k, label in enumerate(STRATA):
        here = rows == k
        if not here.any():
            continue
        for who, judged in (("", model), (name, baseline)):
            interval = mean_interval(judged.metrics["male"][here], blocks[here], draws=draws, seed=seed)
            scores.append(Score(f"male_{label}", who, interval, int(here.sum())))
    return scores


def _parts(
    table: JobTable, test: Ints, model: Judged, baseline: Judged, name: str, blocks: NDArray[Any], draws: int, seed: int
) -> list[Score]:
    """Figures of GPU jobs, of jobs by their length, and of each week; parts under `MIN_ROWS` jobs are left out."""
    run_s = table.runtime_s[test]
    parts = {"gpu": table.gpus[test] > 0}
    for low, high, label in _LENGTHS:
        parts[label] = (run_s >= low) & (run_s < high)
    week = (table.submit[test] // _DAY_US + 3) // 7  # from Monday
    for number in np.unique(week):
        parts[f"week_{_datetime((number * 7 - 3) * _DAY_US):%Y-%m-%d}"] = week == number
    scores = []
    for label, here in parts.items():
        if here.sum() < MIN_ROWS:
            continue
        for metric in ("male", "coverage_80", "brier"):
            for who, judged in (("", model), (name, baseline)):
                if metric in judged.metrics:
                    interval = mean_interval(judged.metrics[metric][here], blocks[here], draws=draws, seed=seed)
                    scores.append(Score(f"{metric}_{label}", who, interval, int(here.sum())))
    return scores


def _datetime(moment_us: int) -> datetime:
    return datetime.fromtimestamp(moment_us / 1e6, UTC)

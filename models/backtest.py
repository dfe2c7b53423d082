"""Walk-forward backtests: what a forecaster would have said at each past submit, beside its baselines, with intervals.

Jobs are ordered by submit; the first 1 % are warm-up and the last 30 % the test. The forecaster is fitted anew every
week on outcomes released by then, and sees the history of each job as of its submit. Here belong the protocol and the
report; not the losses (`models/tasks.py`) and not the intervals (`models/promotion.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory
from features.vocabulary import conform
from models.calibration import MIN_ROWS
from models.promotion import DRAWS, Interval, mean_interval, ratio_interval
from models.recency import STRATA, stratum
from models.runtime import MAX_LABELS
from models.scoring import auroc
from models.tasks import Judged, Task, blocks_of, make_task

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TEST_SHARE = 0.30
WARMUP_SHARE = 0.01
REFIT_DAYS = 7.0
_DAY_US = 86_400_000_000


class BacktestError(ValueError):
    """There is nothing to backtest; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Score:
    """One figure of a report: a metric of the model (`baseline` empty) or of a baseline."""

    metric: str
    baseline: str
    interval: Interval
    count: int


@dataclass(frozen=True, slots=True)
class BacktestReport:
    """Outcome of a backtest.

    Attributes:
        task: Task that was backtested.
        start: First submit of the test.
        end: Last submit of the test.
        jobs: Jobs judged.
        refits: Fits made on the way.
        best_baseline: Baseline with the lowest primary loss.
        scores: All figures; `<metric>_ratio` is model ÷ baseline.
        calibration: Nominal level or probability, observed share, rows.
        notes: What a reader must know of these figures.
    """

    task: str
    start: datetime
    end: datetime
    jobs: int
    refits: int
    best_baseline: str
    scores: list[Score]
    calibration: list[dict[str, float]]
    notes: list[str] = field(default_factory=list)

    def value(self, metric: str, baseline: str = "") -> float:
        """A figure by name.

        Raises:
            KeyError: There is none of that name.
        """
        for score in self.scores:
            if (score.metric, score.baseline) == (metric, baseline):
                return score.interval.value
        of = f"baseline {baseline!r}" if baseline else "the model"
        raise KeyError(f"no {metric!r} of {of}; metrics: {', '.join(sorted(self.metrics()))}")

    def metrics(self) -> set[str]:
        return {score.metric for score in self.scores}

    def rows(self, cluster: str, ts: datetime, model_version: str) -> pl.DataFrame:
        """The figures as rows of `out_scores`."""
        return score_rows(self.scores, cluster, ts, self.task, model_version)

    def text(self) -> str:
        """The report as a table for people."""
        names = ["", *dict.fromkeys(score.baseline for score in self.scores if score.baseline)]
        metrics = list(dict.fromkeys(score.metric for score in self.scores if not score.metric.endswith("_ratio")))
        found = {(score.metric, score.baseline): score.interval for score in self.scores}
        width = max(len(metric) for metric in metrics) + 2
        lines = [
            f"{self.task}: {self.jobs} jobs submitted {self.start:%Y-%m-%d}–{self.end:%Y-%m-%d}, {self.refits} fits",
            " " * width + "".join(f"{name or 'model':>16}" for name in names),
        ]
        for metric in metrics:
            cells = [found.get((metric, name)) for name in names]
            lines.append(f"{metric:<{width}}" + "".join(f"{_short(cell):>16}" for cell in cells))
        lines += [
            f"{score.metric} to {score.baseline}: {score.interval}"
            for score in self.scores
            if score.metric.endswith("_ratio")
        ]
        return "\n".join([*lines, *self.notes])


def backtest(
    task: str | Task, jobs: pl.DataFrame, *, test_share: float = TEST_SHARE, warmup_share: float = WARMUP_SHARE,
    refit_days: float = REFIT_DAYS, max_labels: int = MAX_LABELS, seed: int = 1, threads: int = 1, draws: int = DRAWS,
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

    Raises:
        BacktestError: Too few jobs have an outcome to learn from or to be judged by.
        features.job_history.JobsError: A needed column is absent or null.
    """
    task = make_task(task) if isinstance(task, str) else task
    jobs = jobs.sort("submit_time", "job_id", maintain_order=True)
    if task.name == "runtime":  # runs of zero time are neither judged nor shown to anyone
        jobs = jobs.filter((pl.col("end_time") > pl.col("start_time")) | pl.col("end_time").is_null())
    history = JobHistory(jobs)
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
    steps = _walk(task, history, X, released, test, refit_days, max_labels, seed, threads)
    model, baselines, calibration, refits = steps
    blocks = blocks_of(table, test)
    scores, best = compare(task, model, baselines, blocks, table.is_bad[test], draws=draws, seed=seed)
    if task.name == "runtime":
        scores += _by_stratum(X[test], model, baselines[best], best, blocks, draws, seed)
    notes = []
    if task.name == "wait" and not np.any(table.wait_s[test] > 0):
        notes.append("every wait is zero: this source did not record waits, the figures say nothing")
    submit = table.submit[test]
    return BacktestReport(
        task.name, _datetime(submit[0]), _datetime(submit[-1]), len(test), refits, best, scores, calibration, notes
    )


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
        if judged.score is not None:
            area = auroc(judged.score, bad)
            if area is not None:
                scores.append(Score("auroc", name, Interval(area, None, None, 0), len(bad)))
    losses = {name: judged.metrics[task.primary] for name, judged in baselines.items()}
    best = min(losses, key=lambda name: float(losses[name].mean()))
    for name, values in losses.items():
        ratio = ratio_interval(model.metrics[task.primary], values, blocks, draws=draws, seed=seed)
        scores.append(Score(f"{task.primary}_ratio", name, ratio, len(values)))
    return scores, best


def score_rows(scores: list[Score], cluster: str, ts: datetime, task: str, model_version: str) -> pl.DataFrame:
    """Figures as rows of `out_scores`; figures that are not finite are left out."""
    frame = pl.DataFrame(
        [
            {
                "ts": ts, "cluster": cluster, "task": task, "model_version": model_version, "baseline": score.baseline,
                "metric": score.metric, "value": score.interval.value, "low": score.interval.low,
                "high": score.interval.high, "count": score.count,
            }
            for score in scores
            if np.isfinite(score.interval.value)
        ],
        schema_overrides={"low": pl.Float64, "high": pl.Float64},
    )  # fmt: skip
    return conform(frame, "out_scores")


def _walk(
    task: Task, history: JobHistory, X: NDArray[np.float32], released: Ints, test: Ints, refit_days: float,
    max_labels: int, seed: int, threads: int,
) -> tuple[Judged, dict[str, Judged], list[dict[str, float]], int]:  # fmt: skip
    table = history.table
    submit = table.submit[test]
    models: list[Judged] = []
    baselines: list[dict[str, Judged]] = []
    calibrations: list[list[dict[str, float]]] = []
    moment = int(submit[0])
    while moment <= submit[-1]:
        until = moment + int(refit_days * _DAY_US)
        rows = test[(submit >= moment) & (submit < until)]
        if len(rows):
            have = released < moment
            if have.sum() < MIN_ROWS:
                raise BacktestError(f"{task.name}: {have.sum()} outcomes before the test; {MIN_ROWS} needed")
            forecaster = task.fit(history, moment, X, seed=seed, threads=threads, max_labels=max_labels)
            models.append(task.judge(forecaster, X[rows], table, rows))
            baselines.append(task.baselines(X[rows], table, rows))
            calibrations.append(task.calibration(forecaster, X[rows], table, rows))
        moment = until
    joined = {name: _join([part[name] for part in baselines]) for name in baselines[0]}
    return _join(models), joined, _join_tables(calibrations, 10 if task.coverage is None else 20), len(models)


def _join(parts: list[Judged]) -> Judged:
    metrics = {name: np.concatenate([part.metrics[name] for part in parts]) for name in parts[0].metrics}
    ranked = [part.score for part in parts if part.score is not None]
    return Judged(metrics, np.concatenate(ranked) if ranked else None)


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


def _short(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    if interval.low is None or interval.high is None:
        return f"{interval.value:.3f}"
    half = (interval.high - interval.low) / 2
    return f"{interval.value:,.0f}±{half:,.0f}" if interval.value >= 100 else f"{interval.value:.3f}±{half:.3f}"


def _datetime(moment_us: int) -> datetime:
    return datetime.fromtimestamp(moment_us / 1e6, UTC)

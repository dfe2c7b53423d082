"""Nightly training of the job forecasters: challenger against champion on the newest days, then save, promote or stay.

The newest fifth of the released jobs is held out: a challenger fitted at its first submit is judged on it, beside the
champion and every baseline (`models/job_judgement.py`). What is saved is fitted anew on everything released. Here
belongs that sequence; not the rule (`models/promotion.py`), not the losses (`models/tasks.py`), and no scheduling.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, normalise
from features.jobs import microseconds
from features.vocabulary import schema
from models.backtest_report import score_rows
from models.calibration import MIN_ROWS
from models.job_judgement import Judgement, judge
from models.judging import Task
from models.registry import ChampionChangedError, Registry
from models.runtime import MAX_LABELS
from models.tasks import make_task
from models.versions import configuration_id, full_configuration

Ints = NDArray[np.int64]

TABLE = "training.parquet"


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What a training did.

    Attributes:
        task: Task trained.
        version: Version saved, None when there was too little to train on.
        promoted: It is the champion now.
        reason: Why, in words.
        scores: Rows of `out_scores`: challenger, champion and baselines on the held-out jobs.
        facts: What the fit saw and chose.
        is_judged: There was enough to judge it by; else the one in charge stays for want of evidence.
    """

    task: str
    version: str | None
    promoted: bool
    reason: str
    scores: pl.DataFrame
    facts: dict[str, Any] = field(default_factory=dict)
    is_judged: bool = False


def train_runtime(jobs: pl.DataFrame, registry: Registry, at: datetime, **options: Any) -> TrainingReport:
    """`train` for runtimes."""
    return train("runtime", jobs, registry, at, **options)


def train_wait(jobs: pl.DataFrame, registry: Registry, at: datetime, **options: Any) -> TrainingReport:
    """`train` for queue waits."""
    return train("wait", jobs, registry, at, **options)


def train_job_failure(jobs: pl.DataFrame, registry: Registry, at: datetime, **options: Any) -> TrainingReport:
    """`train` for job failures."""
    return train("job_failure", jobs, registry, at, **options)


def train(
    task: str | Task, jobs: pl.DataFrame, registry: Registry, at: datetime, *, cluster: str = "", seed: int = 1,
    threads: int = 1, min_jobs: int = 200, snapshot_id: int | None = None, max_labels: int = MAX_LABELS,
) -> TrainingReport:  # fmt: skip
    """Train a challenger, judge it, keep it, and promote it when it has earned that.

    Args:
        task: `runtime`, `wait`, `job_failure`, or a task with a configuration of its own.
        jobs: Canonical jobs of the cluster in their newest known state.
        registry: The cluster's registry.
        at: The moment of training; what happened later changes nothing.
        cluster: Name for the score rows; by default that of the jobs.
        seed: Seed of every random choice.
        threads: Threads of the fits.
        min_jobs: Fewer released outcomes: no model, the baseline stays.
        snapshot_id: Snapshot of the store that the jobs were read from, for the card.
        max_labels: Outcomes the kept fit learns from at most.

    Raises:
        features.job_history.JobsError: A needed column is absent or null.
        OSError: The registry's disk refused; nothing half-made is left.
    """
    task = make_task(task) if isinstance(task, str) else task
    moment = microseconds(at)
    seen = as_of(jobs, at)
    cluster = cluster or _only_cluster(jobs)
    history = JobHistory(seen)
    table = history.table
    released = task.released(table)
    rows = np.flatnonzero(released < moment)
    if len(rows) < max(min_jobs, MIN_ROWS):
        reason = f"baseline stays: {len(rows)} released jobs, {max(min_jobs, MIN_ROWS)} are needed before a model"
        return TrainingReport(task.name, None, False, reason, _no_scores())

    expected = registry.present(task.name)
    judgement = judge(task, history, released, rows, registry, moment, seed, threads)
    forecaster = task.fit(history, moment, None, seed=seed, threads=threads, max_labels=max_labels)
    span = [_text(table.submit[rows].min()), _text(released[rows].max())]
    card = {
        "trained_at": at, "cluster": cluster, "features": task.configuration()["features"],
        "configuration": configuration_id(task.name, task.configuration()),
        "configuration_parts": full_configuration(task.name, task.configuration()), "parameters": task.parameters(),
        "seed": seed, "max_labels": max_labels, "snapshot_id": snapshot_id,
        "span": span, "jobs": len(rows), "facts": forecaster.facts, "metrics": judgement.metrics,
        "calibration": judgement.calibration, "decision": judgement.reason,
        "judged_against": judgement.champion or None, "held": judgement.held,
        "summary": _summary(task, len(rows), judgement),
    }  # fmt: skip
    version = registry.save(task.name, {**forecaster.to_files(), TABLE: _parquet(seen)}, card)
    promoted, reason = act(registry, task.name, version, judgement, expected, at)
    rows_out = score_rows(judgement.scores, cluster, at, task.name, version)
    if judgement.champion_scores:
        rows_out = rows_out.vstack(score_rows(judgement.champion_scores, cluster, at, task.name, judgement.champion))
    return TrainingReport(task.name, version, promoted, reason, rows_out, forecaster.facts, judgement.is_judged)


class Verdict(Protocol):
    """What was decided of a challenger."""

    @property
    def promote(self) -> bool: ...
    @property
    def withdraw(self) -> bool: ...
    @property
    def reason(self) -> str: ...


def act(
    registry: Registry, task: str, version: str, verdict: Verdict, expected: str | None, at: datetime
) -> tuple[bool, str]:
    """Promote a kept challenger or withdraw the champion, as decided, unless the champion has changed meanwhile.

    Args:
        registry: The cluster's registry.
        task: Name of the task.
        version: The challenger; empty: none was kept.
        verdict: What was decided.
        expected: Champion at the time of judging, None for a baseline.
        at: The moment of training.

    Returns:
        Whether it is champion now, and why. Another training, or an operator, that was first has the last word: the
        challenger stays in the registry, and the next training is judged against the new champion.
    """
    try:
        if verdict.promote and version:
            registry.promote(task, version, verdict.reason, at=at, expected=expected)
            return True, verdict.reason
        if verdict.withdraw:
            registry.withdraw(task, verdict.reason, actor="training", at=at, expected=expected)
    except ChampionChangedError as error:
        return False, f"{error}; the next training is judged against it (decided before: {verdict.reason})"
    return False, verdict.reason


def train_again(registry: Registry, task_name: str, version: str, *, threads: int = 1) -> Any:
    """Fit a kept version anew from its own training table, seed and configuration.

    Returns:
        The forecaster; on the same library versions its forecasts are those of the kept one.

    Raises:
        models.registry.RegistryError: The version or its table is missing or damaged.
    """
    loaded = registry.load(task_name, version, with_tables=True)
    task = make_task(task_name, loaded.card["parameters"])
    jobs = pl.read_parquet(io.BytesIO(loaded.files[TABLE]))
    moment = microseconds(datetime.fromisoformat(loaded.card["trained_at"]))
    card = loaded.card
    return task.fit(JobHistory(jobs), moment, None, seed=card["seed"], threads=threads, max_labels=card["max_labels"])


def as_of(jobs: pl.DataFrame, at: datetime) -> pl.DataFrame:
    """Jobs as they were known at a moment: later submits left out, later starts and ends taken back.

    What happened at the very moment counts as known.

    Args:
        jobs: Canonical jobs in any later state.
        at: The moment.

    Returns:
        The columns that features read, sorted by submit and id.
    """
    at_us = pl.lit(at).cast(pl.Datetime("us", "UTC"))
    ended = pl.col("end_time") <= at_us
    started = pl.col("start_time") <= at_us
    return (
        normalise(jobs)
        .filter(pl.col("submit_time") <= at_us)
        .with_columns(
            end_time=pl.when(ended).then("end_time"),
            start_time=pl.when(started).then("start_time"),
            state=pl.when(ended).then("state").when(started).then(pl.lit("RUNNING")).otherwise(pl.lit("PENDING")),
        )
        .sort("submit_time", "job_id", maintain_order=True)
    )


def _parquet(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


def _only_cluster(jobs: pl.DataFrame) -> str:
    names = jobs["cluster"].drop_nulls().unique().to_list() if "cluster" in jobs.columns else []
    if len(names) > 1:
        raise ValueError(f"jobs of several clusters ({', '.join(sorted(names)[:5])}): train each by itself")
    return names[0] if names else ""


def _summary(task: Task, jobs: int, judgement: Judgement) -> str:
    """One line for lists of versions."""
    found = {(item["metric"], item["baseline"]): item["value"] for item in judgement.metrics}
    losses = {name: value for (metric, name), value in found.items() if metric == task.primary and value is not None}
    if "" not in losses:
        return f"{jobs} jobs, not judged"
    own = losses.pop("")
    best = min(losses, key=lambda name: losses[name])
    return f"{jobs} jobs, {task.primary} {own:.3f} ({best} {losses[best]:.3f})"


def _no_scores() -> pl.DataFrame:
    return pl.DataFrame(schema=schema("out_scores"))


def _text(moment_us: int) -> str:
    return datetime.fromtimestamp(int(moment_us) / 1e6, tz=UTC).isoformat()

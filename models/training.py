"""Nightly training of the job forecasters: challenger against champion on the newest days, then save, promote or stay.

The newest fifth of the released jobs is held out: a challenger fitted at its first submit is judged on it, beside the
champion and every baseline. What is saved is fitted anew on everything released. Here belongs that sequence; not the
rule (`models/promotion.py`), not the losses (`models/tasks.py`), and no scheduling.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, normalise
from features.jobs import microseconds
from features.vocabulary import schema
from models.backtest import compare
from models.backtest_report import Score, score_rows
from models.calibration import MIN_ROWS
from models.judging import Judged, Task, blocks_of
from models.promotion import Decision, decide
from models.registry import Registry, RegistryError
from models.runtime import MAX_LABELS
from models.tasks import make_task

Ints = NDArray[np.int64]

TEST_SHARE = 0.20
MAX_JUDGED = 20_000  # held-out jobs that are judged at most, drawn at random
JUDGE_LABELS = 60_000  # outcomes that the judged fits learn from at most
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
    """

    task: str
    version: str | None
    promoted: bool
    reason: str
    scores: pl.DataFrame
    facts: dict[str, Any] = field(default_factory=dict)


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

    judgement = _judge(task, history, released, rows, registry, moment, seed, threads)
    forecaster = task.fit(history, moment, None, seed=seed, threads=threads, max_labels=max_labels)
    span = [_text(table.submit[rows].min()), _text(released[rows].max())]
    card = {
        "trained_at": at, "cluster": cluster, "features": task.configuration()["features"],
        "configuration": configuration_id(task), "parameters": task.parameters(),
        "seed": seed, "max_labels": max_labels, "snapshot_id": snapshot_id,
        "span": span, "jobs": len(rows), "facts": forecaster.facts, "metrics": judgement.metrics,
        "calibration": judgement.calibration, "decision": judgement.reason,
        "summary": _summary(task, len(rows), judgement),
    }  # fmt: skip
    version = registry.save(task.name, {**forecaster.to_files(), TABLE: _parquet(seen)}, card)
    if judgement.promote:
        registry.promote(task.name, version, judgement.reason, at=at)
    elif judgement.withdraw:
        registry.withdraw(task.name, judgement.reason, actor="training", at=at)
    rows_out = score_rows(judgement.scores, cluster, at, task.name, version)
    if judgement.champion_scores:
        rows_out = rows_out.vstack(score_rows(judgement.champion_scores, cluster, at, task.name, judgement.champion))
    return TrainingReport(task.name, version, judgement.promote, judgement.reason, rows_out, forecaster.facts)


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


def configuration_id(task: Task) -> str:
    """A short hash of a task's configuration: equal for a refit, different for a change."""
    text = json.dumps(task.configuration(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class _Judgement:
    promote: bool
    withdraw: bool
    reason: str
    scores: list[Score]
    champion: str
    champion_scores: list[Score]
    metrics: list[dict[str, Any]]
    calibration: list[dict[str, float]]


def _judge(
    task: Task, history: JobHistory, released: Ints, rows: Ints, registry: Registry, moment: int, seed: int,
    threads: int,
) -> _Judgement:  # fmt: skip
    """Challenger, champion and baselines on the newest released jobs, and what follows."""
    table = history.table
    rows = rows[np.argsort(table.submit[rows], kind="stable")]
    test = rows[int((1 - TEST_SHARE) * len(rows)) :]
    cut = int(table.submit[test[0]])
    if len(test) > MAX_JUDGED:
        test = np.sort(np.random.default_rng(seed).choice(test, MAX_JUDGED, replace=False))
    if (released < cut).sum() < MIN_ROWS:
        reason = (
            f"baseline stays: {(released < cut).sum()} jobs were released before the held-out ones, {MIN_ROWS} needed"
        )
        return _Judgement(False, False, reason, [], "", [], [], [])
    X = task.matrix(history, test)
    challenger = task.fit(history, cut, None, seed=seed, threads=threads, max_labels=JUDGE_LABELS)
    judged = task.judge(challenger, X, history, test)
    baselines = task.baselines(X, history, test)
    blocks = blocks_of(table, test)
    scores, best = compare(task, judged, baselines, blocks, table.is_bad[test], seed=seed)
    to_baseline = decide(
        baselines[best].metrics[task.primary], judged.metrics[task.primary], blocks, same_configuration=False,
        coverage=_coverage(task, judged), champion_name=f"baseline {best}", seed=seed,
    )  # fmt: skip
    name, champion, is_same = _champion(task, registry, history, cut, moment, seed, threads)
    champion_scores: list[Score] = []
    promote, withdraw, reason = to_baseline.promote, False, to_baseline.reason
    if champion is not None:
        rival = task.judge(champion, X, history, test)
        champion_scores = _only_model(compare(task, rival, baselines, blocks, table.is_bad[test], seed=seed)[0])
        decision = decide(
            rival.metrics[task.primary], judged.metrics[task.primary], blocks, same_configuration=is_same,
            coverage=_coverage(task, judged), champion_coverage=_coverage(task, rival),
            champion_name=f"champion {name}", seed=seed,
        )  # fmt: skip
        promote, withdraw, reason = _with_champion(
            decision, to_baseline, rival, baselines[best], best, task, blocks, seed
        )
    metrics = [
        {
            "metric": score.metric, "baseline": score.baseline, "value": _plain(score.interval.value),
            "low": score.interval.low, "high": score.interval.high, "count": score.count,
        }
        for score in scores
    ]  # fmt: skip
    calibration = task.calibration(challenger, X, table, test)
    return _Judgement(promote, withdraw, reason, scores, name, champion_scores, metrics, calibration)


def _with_champion(
    decision: Decision, to_baseline: Decision, rival: Judged, baseline: Judged, best: str, task: Task,
    blocks: NDArray[Any], seed: int,
) -> tuple[bool, bool, str]:  # fmt: skip
    """Promote, withdraw, reason: no challenger that loses to the best baseline; a champion that clearly does, goes."""
    if decision.promote and to_baseline.ratio.value <= 1.0:
        return True, False, decision.reason
    handed_back = decide(
        rival.metrics[task.primary], baseline.metrics[task.primary], blocks, same_configuration=False, seed=seed
    )
    if handed_back.promote and to_baseline.ratio.value > 1.0:
        return False, True, f"baseline {best} takes over from the champion: {handed_back.reason}"
    if decision.promote:
        return False, False, f"champion stays: challenger loses to baseline {best}: {to_baseline.reason}"
    return False, False, decision.reason


def _champion(
    task: Task, registry: Registry, history: JobHistory, cut: int, moment: int, seed: int, threads: int
) -> tuple[str, Any, bool]:
    """The champion's name, a forecaster that stands for it, and whether the challenger has its configuration.

    A champion that was trained after the cut has seen the held-out jobs. One of the challenger's configuration is
    then stood for by a fit as much older than the cut as the champion is older than now; one of another configuration
    is judged as it is, which favours it.
    """
    try:
        loaded = registry.load(task.name, fallback=True, read=task.from_files)
    except RegistryError:
        return "", None, False
    champion = loaded.model
    is_same = loaded.card.get("configuration") == configuration_id(task)
    trained = microseconds(datetime.fromisoformat(loaded.card["trained_at"]))
    if trained <= cut or not is_same:
        return loaded.version, champion, is_same
    stale = cut - (moment - trained)
    try:
        champion = task.fit(history, stale, None, seed=seed, threads=threads, max_labels=JUDGE_LABELS)
    except ValueError:
        return "", None, False
    return loaded.version, champion, True


def _only_model(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if not score.baseline]


def _coverage(task: Task, judged: Judged) -> float | None:
    return None if task.coverage is None else float(judged.metrics[task.coverage].mean())


def _plain(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _parquet(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


def _only_cluster(jobs: pl.DataFrame) -> str:
    names = jobs["cluster"].drop_nulls().unique().to_list() if "cluster" in jobs.columns else []
    if len(names) > 1:
        raise ValueError(f"jobs of several clusters ({', '.join(sorted(names)[:5])}): train each by itself")
    return names[0] if names else ""


def _summary(task: Task, jobs: int, judgement: _Judgement) -> str:
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

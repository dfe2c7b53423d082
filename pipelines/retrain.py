"""Nightly retraining: reads what a task learns from at one snapshot, trains it, and keeps the scores.

How a model is fitted, judged and promoted stands in `models/training*.py`; this module only feeds them and writes down
what they say. One task of one cluster at a time: what is read for one is let go before the next.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import polars as pl

from features.conditions import INPUTS
from features.unit_conditions import LOADS, RATES
from features.vocabulary import GPU_KEYS, GPU_QUANTITIES, PORT_KEYS
from models.registry import Registry
from pipelines.exclusions import read_exclusions
from pipelines.job_history import read_jobs, read_nodes
from pipelines.settings import Settings
from pipelines.signs import read_signs_of
from pipelines.store import Reader, Store

log = logging.getLogger(__name__)

TASKS = ("runtime", "wait", "job_failure", "node_failure", "bottleneck", "level")
JOB_DAYS = 365.0
FAULT_DAYS = 730.0


@dataclass
class Retrained:
    """What became of one task of one cluster.

    Attributes:
        version: The challenger, None when none was trained.
        promoted: It took over.
        reason: Why, or why not, in words.
        scores: Rows of `out_scores` that were kept.
        snapshot_id: Snapshot of the store that it learnt from.
        is_judged: There was enough to judge a challenger by.
    """

    cluster: str
    task: str
    version: str | None = None
    promoted: bool = False
    reason: str = ""
    scores: int = 0
    snapshot_id: int | None = None
    error: str | None = None
    is_judged: bool = False


def retrain_task(store: Store, settings: Settings, cluster: str, task: str, now: datetime) -> Retrained:
    """Train one task of one cluster, let it be judged, and keep its scores.

    Args:
        store: The store.
        settings: Seed, threads and how much history.
        cluster: Name of the cluster.
        task: One of `TASKS`.
        now: Present time, UTC: nothing that ended later is learnt from.

    Returns:
        What became of it. A training that fails stands in `error`: the champion stays in charge.

    Raises:
        KeyError: There is no such task; the message lists those there are.
        StoreError: The store cannot be read or written.
    """
    if task not in TASKS:
        raise KeyError(f"no task {task!r}; tasks: {', '.join(TASKS)}")
    report = Retrained(cluster, task)
    with store.reader() as reader:
        report.snapshot_id = store_snapshot(reader)
        frames = _READ[task](reader, settings, cluster, now)
    try:
        outcome = _train(task, frames, settings, cluster, now, report.snapshot_id)
    except Exception as error:  # one task's trouble must not keep the others from learning
        log.exception("%s: training of %s failed", cluster, task)
        report.error = f"{type(error).__name__}: {error}"
        return report
    report.version, report.promoted, report.reason = outcome.version, outcome.promoted, outcome.reason
    report.is_judged = outcome.is_judged
    scores = outcome.scores
    if scores is not None and not scores.is_empty():
        scores = scores.with_columns(pl.lit(cluster).alias("cluster"))
        report.scores = store.transact(lambda w: w.upsert("out_scores", scores), purpose=f"scores of {task}")
    return report


def _train(
    task: str, frames: dict[str, Any], settings: Settings, cluster: str, now: datetime, snapshot_id: int | None
) -> Any:
    module, function = _TRAINERS[task]
    train = getattr(importlib.import_module(module), function)
    chosen = settings.training
    options: dict[str, Any] = {
        "registry": Registry(settings.registry / cluster), "at": now, "cluster": cluster, "snapshot_id": snapshot_id,
        "seed": chosen.seed, "threads": chosen.threads,
    }  # fmt: skip
    if _READ[task] is _jobs:
        options["min_jobs"] = chosen.min_jobs
    return train(**frames, **options)


def store_snapshot(reader: Reader) -> int:
    """Number of the snapshot that a reader sees."""
    return reader.query("SELECT id FROM ducklake_current_snapshot('wg')")["id"][0]


def _jobs(reader: Reader, _: Settings, cluster: str, now: datetime) -> dict[str, Any]:
    return {"jobs": read_jobs(reader, cluster, now - timedelta(days=JOB_DAYS))}


def _faults(reader: Reader, _: Settings, cluster: str, now: datetime) -> dict[str, Any]:
    faults = reader.query(
        'SELECT * FROM core_faults WHERE "cluster" = ? AND start_time >= ? AND start_time < ? ORDER BY start_time',
        [cluster, now - timedelta(days=FAULT_DAYS), now],
    )
    signs = read_signs_of(reader, cluster, now - timedelta(days=FAULT_DAYS), now)
    return {"faults": faults, "nodes": read_nodes(reader, cluster), "signs": signs}


def _samples(reader: Reader, settings: Settings, cluster: str, now: datetime) -> dict[str, Any]:
    from models.unit_training import QUEUE_DAYS

    since, nodes, frames = _telemetry(reader, settings, cluster, now)
    return {
        **frames,
        "port_samples": _port_samples(reader, cluster, since, now, nodes, settings.training.seed),
        "jobs": read_jobs(reader, cluster, min(since, now - timedelta(days=QUEUE_DAYS))),
        "excluded": read_exclusions(reader, cluster, since, now, drained_since=now - timedelta(hours=1)),
    }


def _levels(reader: Reader, settings: Settings, cluster: str, now: datetime) -> dict[str, Any]:
    return _telemetry(reader, settings, cluster, now)[2]


def _telemetry(
    reader: Reader, settings: Settings, cluster: str, now: datetime
) -> tuple[datetime, list[str] | None, dict[str, Any]]:
    """Since when, of which nodes (None: all), and what windows of GPUs are made of."""
    from models.training_scores import MAX_SAMPLES

    since = now - timedelta(hours=settings.training.telemetry_hours)
    nodes = sampled_nodes(reader, cluster, since, now, MAX_SAMPLES, settings.training.seed)
    chosen = "" if nodes is None else " AND node = ANY(?)"
    parameters = [cluster, since, now, *([] if nodes is None else [nodes])]
    where = f'WHERE "cluster" = ? AND ts >= ? AND ts < ?{chosen}'
    names = ", ".join((*GPU_KEYS, *(name for name in INPUTS if name in GPU_QUANTITIES)))
    interval_s = settings.cluster(cluster).exporter_interval_s
    frames = {
        "samples": reader.query(f"SELECT {names} FROM core_gpu_samples {where} ORDER BY gpu_uuid, ts", parameters),
        "node_samples": reader.query(f"SELECT * FROM core_node_samples {where} ORDER BY node, ts", parameters),
        "nodes": read_nodes(reader, cluster),
        "stale_s": 2 * interval_s + 5.0,  # as the nowcast sees peers
        "limits": settings.ingest.limits,
    }
    return since, nodes, frames


def _port_samples(
    reader: Reader, cluster: str, begin: datetime, end: datetime, nodes: list[str] | None, seed: int
) -> pl.DataFrame:
    """Ports of the nodes whose GPUs are learned from, of fewer of them where those are too many rows."""
    from models.unit_training import MAX_PORT_SAMPLES

    drawn = sampled_nodes(reader, cluster, begin, end, MAX_PORT_SAMPLES, seed, table="core_port_samples")
    wanted = nodes if drawn is None else drawn if nodes is None else sorted(set(nodes) & set(drawn))
    chosen = "" if wanted is None else " AND node = ANY(?)"
    names = ", ".join((*PORT_KEYS, *LOADS, *RATES, "speed_bytes_per_s"))
    return reader.query(
        f'SELECT {names} FROM core_port_samples WHERE "cluster" = ? AND ts >= ? AND ts < ?{chosen} '
        "ORDER BY node, device, port, ts",
        [cluster, begin, end, *([] if wanted is None else [wanted])],
    )


def sampled_nodes(
    reader: Reader, cluster: str, begin: datetime, end: datetime, most: int, seed: int,
    *, table: str = "core_gpu_samples",
) -> list[str] | None:  # fmt: skip
    """Nodes to learn from, drawn at random when all samples would be more than `most` rows; None: all of them."""
    counts = reader.query(
        f'SELECT node, count(*) AS n FROM {table} WHERE "cluster" = ? AND ts >= ? AND ts < ? '
        "GROUP BY node ORDER BY node",
        [cluster, begin, end],
    )
    if counts.is_empty() or counts["n"].sum() <= most:
        return None
    drawn = counts.sample(fraction=1.0, shuffle=True, seed=seed)
    return drawn.filter(pl.col("n").cum_sum() <= most)["node"].to_list()


# Imported when a task is trained: each brings its libraries, and a night trains one after another.
_TRAINERS = {
    "runtime": ("models.training", "train_runtime"),
    "wait": ("models.training", "train_wait"),
    "job_failure": ("models.training", "train_job_failure"),
    "node_failure": ("models.training_hardware", "train_node_failure"),
    "bottleneck": ("models.training_hardware", "train_bottleneck"),
    "level": ("models.training_levels", "train_level"),
}
_READ: dict[str, Callable[[Reader, Settings, str, datetime], dict[str, Any]]] = {
    "runtime": _jobs,
    "wait": _jobs,
    "job_failure": _jobs,
    "node_failure": _faults,
    "bottleneck": _samples,
    "level": _levels,
}

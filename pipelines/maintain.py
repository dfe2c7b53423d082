"""Maintenance: the store is compacted, expired and pruned; the spool, the registry and Dagster's own runs are cut back.

Each step is tried by itself, so that one failure does not keep the others from making room on a full disk.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pipelines.settings import Settings
from pipelines.spans import TELEMETRY_MARK
from pipelines.store import Store

if TYPE_CHECKING:
    from dagster import DagsterInstance

log = logging.getLogger(__name__)

KEEP_VERSIONS = 14  # of a model; the champion and the one before it always stay
_SPOOL_MARGIN = timedelta(hours=1)  # the spool warms the nowcast after a restart, and late readers want it
_SPOOL_MOST = timedelta(days=2)  # what ingest has not taken by then would fill the disk
_RUNS_PER_PASS = 200


@dataclass
class Maintained:
    """What was done, by step, and what failed."""

    done: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def step(self, name: str, work: Callable[[], Any]) -> None:
        """Do one step; its failure is noted, not raised."""
        try:
            self.done[name] = work()
        except Exception as error:
            log.exception("maintenance: %s failed", name)
            self.failed[name] = f"{type(error).__name__}: {error}"


def compact_store(store: Store, settings: Settings, now: datetime) -> Maintained:
    """Hourly: small files become large ones, and spooled samples that are in the store go."""
    report = Maintained()
    report.step("compact", lambda: store.compact(now))
    report.step("spool", lambda: prune_spool(store, settings, now))
    return report


def clean_up(store: Store, settings: Settings, now: datetime, instance: DagsterInstance | None = None) -> Maintained:
    """Daily: retention, expired snapshots, unreferenced files, old models, old runs.

    Args:
        store: The store.
        settings: Retention and folders come from here.
        now: Present time, UTC.
        instance: Dagster's; None: its runs are left alone.
    """
    report = Maintained()
    report.step("retain", lambda: store.retain(now, retention_days(settings)))
    report.step("expire", lambda: store.expire(now, settings.store.snapshot_days))
    report.step("models", lambda: prune_models(settings))
    if instance is not None:
        report.step("runs", lambda: prune_runs(instance, now, settings.dagster.keep_runs_days))
    return report


def retention_days(settings: Settings) -> dict[str, float]:
    """Retention settings by name, days."""
    values = settings.store.model_dump()
    return {name: float(value) for name, value in values.items() if name.endswith("_days") and name != "snapshot_days"}


def prune_spool(store: Store, settings: Settings, now: datetime) -> int:
    """Remove spooled samples that are in the store for an hour, and any that are two days old; how many files."""
    from pipelines.sources.spool import Spool

    removed = 0
    for cluster in settings.clusters:
        folder = settings.state / "spool" / cluster
        if not folder.is_dir():
            continue
        mark = store.mark(cluster, TELEMETRY_MARK)
        taken = mark - timedelta(seconds=settings.ingest.overlap_s) - _SPOOL_MARGIN if mark else now - _SPOOL_MOST
        removed += Spool(folder).prune(max(taken, now - _SPOOL_MOST))
    return removed


def prune_models(settings: Settings) -> int:
    """Delete all but the newest versions of each model; how many."""
    from models.registry import Registry

    removed = 0
    for cluster in settings.clusters:
        root = settings.registry / cluster
        tasks = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        removed += sum(len(Registry(root).prune(task, KEEP_VERSIONS)) for task in tasks)
    return removed


def prune_runs(instance: DagsterInstance, now: datetime, keep_days: float) -> int:
    """Delete finished runs and their event logs that are older than `keep_days`; Dagster itself never does.

    Returns:
        Runs deleted.
    """
    from dagster import DagsterRunStatus, RunsFilter

    before = now.astimezone(UTC) - timedelta(days=keep_days)
    finished = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
    removed = 0
    while True:
        records = instance.get_run_records(RunsFilter(statuses=finished, created_before=before), limit=_RUNS_PER_PASS)
        for record in records:
            instance.delete_run(record.dagster_run.run_id)
        removed += len(records)
        if len(records) < _RUNS_PER_PASS:
            break
    _remove_reports(instance, before)
    _remove_files(instance, before)
    return removed


def _remove_reports(instance: DagsterInstance, before: datetime) -> None:
    """Reports of the nowcast, one a minute, belong to no run: they go by their age."""
    from dagster._core.storage.event_log import SqliteEventLogStorage
    from dagster._core.storage.event_log.schema import SqlEventLogStorageTable as Events

    storage = instance.event_log_storage
    if isinstance(storage, SqliteEventLogStorage):
        with storage.index_connection() as connection:
            connection.execute(
                Events.delete().where(Events.c.run_id == "").where(Events.c.timestamp < before.replace(tzinfo=None))
            )


def _remove_files(instance: DagsterInstance, before: datetime) -> None:
    """What runs that are gone leave on disk: an event log each, and a folder of captured output."""
    storage = Path(instance.storage_directory())
    logs = storage.parent / "history" / "runs"
    for path in (*storage.glob("*"), *logs.glob("*.db*")):
        name = path.name.split(".")[0]
        try:
            UUID(name)
            is_old = path.stat().st_mtime < before.timestamp()
        except (ValueError, FileNotFoundError):
            continue
        if is_old and instance.get_run_by_id(name) is None:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

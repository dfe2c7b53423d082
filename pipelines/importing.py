"""The import of files: what readers yield is put in order, cleaned, and delivered to the store or to a Parquet file.

Readers of the kinds stand in `pipelines/imports/`, cleaning in `features/`. Rows are upserted by their keys: importing
a file twice leaves what importing it once leaves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from zoneinfo import ZoneInfo

import polars as pl

from features.metrics import DEFAULT, MetricTable
from features.vocabulary import TABLES
from pipelines.imports import ImportingError, Task, reader_of
from pipelines.imports.report import Report
from pipelines.imports.settling import CORE, settled
from pipelines.imports.staging import Staging

_PATTERNS = {"exposition": "*", "prometheus-json": "*.json*"}


class Target(Protocol):
    """Where rows go."""

    def write(self, raw_table: str, raw: pl.DataFrame, core_table: str, core: pl.DataFrame) -> None:
        """Take some rows, later in time than those before: as received, and cleaned."""
        ...

    def finish(self, report: Report) -> None:
        """All rows are there. Nothing is visible before, where the target can help it."""
        ...


def files_of(kind: str, path: Path) -> tuple[Path, ...]:
    """The files of a path: itself, or what stands in a folder, by name.

    Raises:
        ImportingError: It is not there, a folder of a kind that wants one file, or an empty folder.
    """
    if path.is_dir():
        if kind not in _PATTERNS:
            raise ImportingError(f"{path}: a folder; {kind} wants one file")
        files = sorted(file for file in path.glob(_PATTERNS[kind]) if file.is_file() and not file.name.startswith("."))
        if not files:
            raise ImportingError(f"{path}: no files in the folder")
        return tuple(files)
    if not path.exists():
        raise ImportingError(f"{path}: no such file or folder")
    return (path,)


def import_files(
    kind: str,
    path: Path,
    cluster: str,
    target: Target,
    scratch: Path,
    *,
    now: datetime | None = None,
    at: datetime | None = None,
    zone: str = "UTC",
    node: str = "",
    vocabulary: MetricTable = DEFAULT,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Read files of one kind and deliver their rows.

    Args:
        kind: One of `imports.KINDS`.
        path: A file, or a folder of scrapes or answers.
        cluster: Name that all rows get.
        target: Where rows go.
        scratch: Folder for parts on disk while the import runs; they take about what the rows take in Parquet.
        now: Present time, UTC; None: the clock's.
        at: Time of scrapes whose names and lines tell none.
        zone: Time zone of times that are written without one.
        node: Node of exporter pages whose labels do not name it.
        vocabulary: Metrics of exporters, a user's own mappings among them.
        progress: Called with the bytes read since the last call.

    Returns:
        The report; `rows` is 0 when nothing could be used.

    Raises:
        ImportingError: The files cannot be read at all, or are of another kind.
        StoreError: The store cannot be written.
        OSError: The disk is full or a file cannot be read.
    """
    report = Report(path.name, kind, cluster)
    task = Task(
        kind,
        files_of(kind, path),
        cluster,
        now or datetime.now(UTC),
        report,
        at,
        ZoneInfo(zone),
        node,
        vocabulary,
        progress,
    )
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=scratch) as folder:
        staging = Staging(Path(folder))
        try:
            for piece in reader_of(kind)(task):
                staging.add(piece)
            for table in sorted(staging.tables, key=list(CORE).index):  # jobs first: samples are given to them
                for raw, core in settled(staging, table, task):
                    target.write(table, raw, CORE[table], core)
                    _count(report, CORE[table], core)
            _look(staging, report)
            target.finish(report)
        finally:
            staging.close()
    return report


def _count(report: Report, table: str, core: pl.DataFrame) -> None:
    """Rows, values that are there, and the span of their times."""
    report.kept[table] = report.kept.get(table, 0) + len(core)
    if core.is_empty():
        return
    filled, time = report.filled.setdefault(table, {}), TABLES[table].time
    for name in core.columns:
        filled[name] = filled.get(name, 0) + len(core) - core[name].null_count()
    first, last = core[time].min(), core[time].max()
    assert isinstance(first, datetime)
    assert isinstance(last, datetime)
    report.first = first if report.first is None else min(first, report.first)
    report.last = last if report.last is None else max(last, report.last)


def _look(staging: Staging, report: Report) -> None:
    """What the rows are about, and how long their entities were silent."""
    nouns = {
        "raw_jobs": (("jobs", "job_id"), ("users", "user")),
        "raw_gpu_samples": (("GPUs", "gpu_uuid"), ("nodes", "node")),
        "core_node_samples": (("nodes", "node"),),
    }
    for table in staging.tables:
        for noun, column in nouns.get(table, ()):
            report.seen[noun] = max(report.seen.get(noun, 0), staging.distinct(table, column))
    for table, keys, noun in (
        ("raw_gpu_samples", ("node", "gpu_uuid"), "GPU"),
        ("core_node_samples", ("node",), "node"),
    ):
        found = staging.silences(table, keys) if table in staging.tables else None
        if found is None:
            continue
        usual = f"one sample of a {noun} every {found.interval_s:g} s"
        if found.count and found.start is not None:
            length = timedelta(seconds=round(found.longest_s))
            report.note(
                f"{usual}; {found.count:,} silences longer than {found.limit_s:g} s on {found.entities:,} {noun}s, the "
                f"longest {length} on {found.entity} from {found.start:%Y-%m-%d %H:%M:%S} UTC"
            )
        else:
            report.note(f"{usual}; no silence longer than {found.limit_s:g} s")

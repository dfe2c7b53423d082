"""The import of files: what readers yield is put in order, cleaned, and delivered to the store or to a Parquet file.

Readers of the kinds stand in `pipelines/imports/`, cleaning in `features/`. Rows are upserted by their keys: importing
a file twice leaves what importing it once leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from zoneinfo import ZoneInfo

import polars as pl

from features.metrics import DEFAULT, MetricTable
from pipelines.imports import ImportingError, Task, check_options, reader_of
from pipelines.imports.looks import Looks
from pipelines.imports.report import Report
from pipelines.imports.scratch import clear_leftovers, scratch_folder
from pipelines.imports.settling import CORE, Settled, settled
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
    if not path.is_file():
        raise ImportingError(f"{path}: a pipe or a device; save what it gives to a file first")
    if not path.stat().st_size:
        raise ImportingError(f"{path}: the file is empty")
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
        ImportingError: The files cannot be read at all, or are of another kind; or the disk is full.
        OptionError: The kind does not use an option that was given.
        StoreError: The store cannot be written.
        OSError: A file cannot be read.
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
    read = reader_of(kind)
    check_options(kind, at=at is not None, node=bool(node), zone=zone != "UTC")
    clear_leftovers(scratch)
    before = _state_of(task.files)
    with scratch_folder(scratch) as folder, contextlib.ExitStack() as stack:
        staging, looks = Staging(folder), Looks(folder)
        stack.callback(staging.close)
        stack.callback(looks.close)
        for piece in read(task):
            staging.add(piece)
        _tell_changes(task.files, before, report)
        for table in sorted(staging.tables, key=list(CORE).index):  # jobs first: samples are given to them
            for rows in settled(staging, table, task):
                target.write(table, rows.raw, CORE[table], rows.core)
                looks.keep(CORE[table], rows.core)
                _count(report, CORE[table], rows)
        looks.tell(report)
        target.finish(report)
    return report


def _count(report: Report, table: str, rows: Settled) -> None:
    """Rows, values that are there, and the span of their times."""
    core = rows.core
    report.kept[table] = report.kept.get(table, 0) + len(core)
    filled = report.filled.setdefault(table, {}) if len(core) else {}
    for name in core.columns if len(core) else ():
        filled[name] = filled.get(name, 0) + len(core) - core[name].null_count()
    if rows.first is not None and rows.last is not None:
        report.first = rows.first if report.first is None else min(rows.first, report.first)
        report.last = rows.last if report.last is None else max(rows.last, report.last)


def _state_of(files: tuple[Path, ...]) -> list[tuple[int, int]]:
    return [(found.st_size, found.st_mtime_ns) for found in (file.stat() for file in files)]


def _tell_changes(files: tuple[Path, ...], before: list[tuple[int, int]], report: Report) -> None:
    """A file that was written while it was read may have been read in part."""
    for file, known in zip(files, before, strict=True):
        now = _state_of((file,))[0] if file.exists() else None
        if now != known:
            report.note(f"{file.name} changed while it was read: import it again when it is whole")

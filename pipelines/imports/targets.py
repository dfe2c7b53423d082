"""Where imported rows go: the store, or a Parquet file that is written as one.

What rows are and how they were cleaned stands in `pipelines/importing.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl

from features.vocabulary import TABLES, conform
from pipelines.derive import remake
from pipelines.imports import ImportingError
from pipelines.imports.report import Report
from pipelines.imports.scratch import scratch_folder, writing
from pipelines.imports.settling import CORE
from pipelines.job_history import attribute_whole_nodes, running_jobs, upsert_changed
from pipelines.spans import DERIVED_MARKS
from pipelines.store import Store, Writer

_FURTHEST_BACK = timedelta(days=30)  # that faults and labels are made anew


def check_output(path: Path, files: Sequence[Path]) -> None:
    """See that it can be written, and that nothing but an earlier output is written over.

    Args:
        path: The file to write.
        files: The files that are read.

    Raises:
        ImportingError: It, or a file that may come to stand beside it, is one of the files that are read, no regular
            file or no Parquet; or its folder is not there or cannot be written.
    """
    if not path.name or path.is_dir():
        raise ImportingError(f"--out {str(path)!r}: it must be a file, as jobs.parquet")
    if not path.parent.is_dir():
        raise ImportingError(f"--out {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ImportingError(f"--out {path}: the folder {path.parent.absolute()} cannot be written by you")
    for place in (path, *_beside(path)):
        if place.exists():
            _check_place(place, files)


def _check_place(path: Path, files: Sequence[Path]) -> None:
    if any(path.samefile(file) for file in files):
        raise ImportingError(f"--out {path}: this file is what is read; write to another one")
    if not path.is_file():
        raise ImportingError(f"--out {path}: not a regular file; write to another one")
    try:
        with path.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise ImportingError(f"--out {path}: there is a file that cannot be read: {error.strerror}") from None
    if magic not in (b"", b"PAR1"):
        raise ImportingError(f"--out {path}: there is a file that is no Parquet; remove it or write to another one")


def _beside(path: Path) -> Iterator[Path]:
    """Where further tables would stand."""
    for table in CORE.values():
        yield path.with_suffix(f".{table}.parquet")


class ParquetTarget:
    """A Parquet file of the cleaned rows; further tables stand beside it, named after it and the table.

    Args:
        path: The file. It is replaced at the end, as one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        self._folder: Path | None = None
        self._parts: dict[str, list[Path]] = {}

    def write(self, raw_table: str, raw: pl.DataFrame, core_table: str, core: pl.DataFrame) -> None:  # noqa: ARG002
        """Take some rows.

        Raises:
            ImportingError: The disk is full.
        """
        if core.is_empty():
            return
        if self._folder is None:
            self._folder = self._stack.enter_context(scratch_folder(self.path.parent))
        parts = self._parts.setdefault(core_table, [])
        part = self._folder / f"{core_table}-{len(parts):06d}.parquet"
        rows = conform(core, core_table).sort(TABLES[core_table].time, maintain_order=True)
        with writing(self.path.parent):
            rows.write_parquet(part, compression="lz4")
        parts.append(part)

    def finish(self, report: Report) -> None:
        """Put the files in place, when all of them are whole.

        Raises:
            ImportingError: The disk is full; nothing is replaced then.
        """
        places: list[tuple[Path, Path, str]] = []
        for i, (table, parts) in enumerate(self._parts.items()):
            assert self._folder is not None
            path = self.path if i == 0 else self.path.with_suffix(f".{table}.parquet")
            whole = self._folder / f"{table}.parquet"
            with writing(self.path.parent):
                pl.scan_parquet(parts).sink_parquet(whole, compression="zstd")
            places.append((whole, path, table))
        for whole, path, _ in places:
            with writing(self.path.parent):
                whole.replace(path)
        report.written = ", ".join(f"{path.name} ({table})" for _, path, table in places)
        written = {path for _, path, _ in places}
        for path in _beside(self.path):
            if places and path.exists() and path not in written:
                report.note(f"{path.name} beside it is of an earlier import and was left as it is")

    def close(self) -> None:
        """Remove what is left of an import that broke off."""
        self._stack.close()
        self._folder = None


class StoreTarget:
    """The store: raw and cleaned tables, minutes and hours made of them, and findings.

    Args:
        store: The store.
        cluster: Name of the cluster.
        source: Name of the import in `core_data_quality`.
    """

    def __init__(self, store: Store, cluster: str, source: str) -> None:
        self._store = store
        self._cluster = cluster
        self._source = f"import {source}"
        self._samples: tuple[datetime, datetime] | None = None

    def write(self, raw_table: str, raw: pl.DataFrame, core_table: str, core: pl.DataFrame) -> None:
        """Upsert some rows; a slice is a transaction."""
        if raw.is_empty() and core.is_empty():
            return

        def work(writer: Writer) -> None:
            if core_table == "core_jobs":
                upsert_changed(writer, raw_table, raw)
                upsert_changed(writer, core_table, core)
                return
            if raw_table != core_table:
                writer.upsert(raw_table, raw)
            rows = core
            if core_table == "core_gpu_samples" and not core.is_empty():
                first, last = _ends(core)
                jobs = running_jobs(writer, self._cluster, first, last + timedelta(seconds=1))
                rows = attribute_whole_nodes(core, jobs)
            writer.upsert(core_table, rows)

        self._store.transact(work, purpose="import")
        if core_table == "core_gpu_samples" and not core.is_empty():
            first, last = _ends(core)
            known = self._samples
            self._samples = (first, last) if known is None else (min(first, known[0]), max(last, known[1]))

    def finish(self, report: Report) -> None:
        """Make what is derived of the samples, and write the findings."""
        if not report.rows or report.first is None or report.last is None:
            return
        if self._samples is not None:
            remake(self._store, self._cluster, *self._samples)
            self._set_back(self._samples[0], report)
        quality = self._quality(report, report.first, report.last)
        if not quality.is_empty():
            self._store.transact(lambda w: w.upsert("core_data_quality", quality), purpose="import")
        report.written = "the store"

    def close(self) -> None:
        """The store is the caller's to close."""

    def _set_back(self, begin: datetime, report: Report) -> None:
        """Faults and labels are made again from the first imported sample on, by the next ingest."""

        def work(writer: Writer) -> bool:
            is_far = False
            for name in DERIVED_MARKS:
                mark = writer.mark(self._cluster, name)
                if mark is None or mark <= begin or name.startswith("core_gpu_"):
                    continue
                is_far |= mark - begin > _FURTHEST_BACK
                writer.set_mark(self._cluster, name, max(begin, mark - _FURTHEST_BACK))
            return is_far

        if self._store.transact(work, purpose="import"):
            days = _FURTHEST_BACK.days
            report.note(f"faults and labels are made of the last {days} days before what they were made of already")

    def _quality(self, report: Report, first: datetime, last: datetime) -> pl.DataFrame:
        rows = [
            (column, reason, tally.count, tally.example or None) for (column, reason), tally in report.nulled.items()
        ]
        rows += [("", f"dropped: {reason}", tally.count, tally.example) for reason, tally in report.dropped.items()]
        table = next(iter(report.kept))
        return pl.DataFrame(
            [
                (first, last + timedelta(microseconds=1), self._cluster, self._source, table, *row)
                for row in rows
            ],
            schema={
                "window_start": pl.Datetime("us", "UTC"), "window_end": pl.Datetime("us", "UTC"),
                "cluster": pl.String, "source": pl.String, "table_name": pl.String, "column_name": pl.String,
                "reason": pl.String, "count": pl.Int64, "example": pl.String,
            },
            orient="row",
        )  # fmt: skip


def _ends(core: pl.DataFrame) -> tuple[datetime, datetime]:
    first, last = core["ts"].min(), core["ts"].max()
    assert isinstance(first, datetime)
    assert isinstance(last, datetime)
    return first, last

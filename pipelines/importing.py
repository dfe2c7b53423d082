"""The import of files: what readers yield is put in order, cleaned, and delivered to the store or to a Parquet file.

Readers of the kinds stand in `pipelines/imports/`, cleaning in `features/`. Rows are upserted by their keys: importing
a file twice leaves what importing it once leaves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from zoneinfo import ZoneInfo

import polars as pl

from features.cleaning import QUALITY_SCHEMA, REASONS, clean_gpu_samples, clean_node_samples
from features.vocabulary import TABLES, conform
from pipelines.imports import ImportingError, Task, reader_of
from pipelines.imports.report import Report
from pipelines.imports.staging import ORDER, Staging
from pipelines.job_history import consistent_jobs

# What readers yield, and the cleaned table that is made of it.
CORE = {
    "raw_jobs": "core_jobs", "raw_gpu_samples": "core_gpu_samples", "core_node_samples": "core_node_samples",
    "core_gpu_health": "core_gpu_health", "core_link_samples": "core_link_samples",
    "raw_port_samples": "core_port_samples", "core_queue_samples": "core_queue_samples",
}  # fmt: skip
# Reasons of cleaning for which rows go, not values.
_DROPPING = ("no_key", "bad_time", "duplicate")
_AHEAD = timedelta(minutes=5)
_HISTORY = timedelta(minutes=10)  # that cleaning looks back to
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
        kind, files_of(kind, path), cluster, now or datetime.now(UTC), report, at, ZoneInfo(zone), node, progress
    )
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=scratch) as folder:
        staging = Staging(Path(folder))
        try:
            for piece in reader_of(kind)(task):
                staging.add(piece)
            for table in sorted(staging.tables, key=list(CORE).index):  # jobs first: samples are given to them
                for raw, core in _settled(staging, table, task):
                    target.write(table, raw, CORE[table], core)
                    _count(report, CORE[table], core)
            _look(staging, report)
            target.finish(report)
        finally:
            staging.close()
    return report


def _settled(staging: Staging, table: str, task: Task) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
    """Slices of a table as received, a row a key, and cleaned."""
    history: pl.DataFrame | None = None
    for rows in staging.slices(table):
        if table == "raw_jobs":
            raw = _newest(rows, task.report)
            core, counts = consistent_jobs(raw)
            for reason, count in counts.items():
                task.report.null("start_time or end_time", reason, count)
        else:
            raw = _joined(rows.drop(ORDER), TABLES[table].key)
            core, findings = _cleaned(table, raw, history, task.now)
            for column, reason, count, example in findings.iter_rows():
                if reason in _DROPPING:
                    task.report.drop(f"{reason} ({REASONS[reason]})", count, example=example)
                else:
                    task.report.null(column, reason, count, example=example)
            raw = raw.unique(TABLES[table].key, keep="last", maintain_order=True)
            history = raw.filter(pl.col("ts") >= pl.col("ts").max() - _HISTORY) if "ts" in raw.columns else None
        yield raw, core


def _newest(rows: pl.DataFrame, report: Report) -> pl.DataFrame:
    """One row a job: the one that was observed last, else the last of the file."""
    ordered = rows.sort("observed_at", ORDER, nulls_last=False, maintain_order=True)
    jobs = ordered.unique(TABLES["raw_jobs"].key, keep="last", maintain_order=True).sort(ORDER).drop(ORDER)
    if len(jobs) < len(rows):
        report.skip("records that a later record of the same job replaces", len(rows) - len(jobs))
    return jobs


def _joined(rows: pl.DataFrame, key: tuple[str, ...]) -> pl.DataFrame:
    """Rows of one key that complete each other made one; those that contradict each other are left to cleaning."""
    keys = list(key)
    doubled = rows.select(pl.struct(keys).is_duplicated()).to_series()
    if not doubled.any():
        return rows
    others = [name for name in rows.columns if name not in keys]
    groups = rows.filter(doubled).group_by(keys, maintain_order=True)
    agree = groups.agg(
        pl.all_horizontal(pl.col(name).drop_nulls().n_unique() <= 1 for name in others).alias("_agree"),
        *(pl.col(name).drop_nulls().first() for name in others),
    )
    good = agree.filter("_agree").select(rows.columns)
    apart = rows.filter(doubled).join(
        agree.filter(~pl.col("_agree")).select(keys), on=keys, how="semi", nulls_equal=True
    )
    time = next(name for name in keys if rows[name].dtype.is_temporal())
    return pl.concat([rows.filter(~doubled), good, apart]).sort(time, maintain_order=True)


def _cleaned(
    table: str, raw: pl.DataFrame, history: pl.DataFrame | None, now: datetime
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Cleaned rows, and findings in QUALITY_SCHEMA."""
    if table not in ("raw_gpu_samples", "core_node_samples"):
        return conform(raw, CORE[table]), pl.DataFrame(schema=QUALITY_SCHEMA)
    ahead = raw.select((pl.col("ts") > now + _AHEAD).fill_null(False)).to_series()
    if table == "raw_gpu_samples":
        core, findings = clean_gpu_samples(raw.filter(~ahead), history=history)
    else:
        core, findings = clean_node_samples(raw.filter(~ahead))
    if ahead.any():
        first = raw.filter(ahead).row(0, named=True)
        row = ("ts", "bad_time", int(ahead.sum()), f"{first['node']} at {first['ts']:%Y-%m-%d %H:%M:%S} UTC")
        findings = pl.concat([findings, pl.DataFrame([row], schema=QUALITY_SCHEMA, orient="row")])
    return core, findings


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

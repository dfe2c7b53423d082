"""Standard Workload Format of the Parallel Workloads Archive: one job a line, 18 numbers, −1 for unknown."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import polars as pl

from features.vocabulary import COLUMNS, TIME
from pipelines.sources.sacct import jobs_schema

_FIELDS = (
    "job", "submit", "wait", "run", "procs", "cpu_s", "memory_kb", "req_procs", "req_s", "req_memory_kb", "status",
    "user", "group", "executable", "queue", "partition", "preceding", "think_s",
)  # fmt: skip
_STATES = {0: "FAILED", 1: "COMPLETED", 5: "CANCELLED"}
# Lines of status 2–4 repeat parts of jobs that were checkpointed.
_PARTS = (2.0, 3.0, 4.0)
_START = re.compile(r"^;\s*UnixStartTime:\s*(\d{1,11})\b")
_LAST_S = 7_258_118_400  # 2200: what is later is no time
_LARGEST = 2**53  # numbers up to here are exact
# Registry column → fields that feed it.
_FEEDS = {
    "start_time": ("wait",), "cpus": ("req_procs", "procs"), "memory_mib": ("req_memory_kb", "memory_kb"),
    "time_limit_s": ("req_s",),
}  # fmt: skip
FEW_FIELDS = f"fewer than {len(_FIELDS)} numbers"
NO_JOB = "job number or submission time is no number that can be true"
PART = "parts of jobs that were checkpointed"


class SwfError(ValueError):
    """A file that is no Standard Workload Format. The message names it."""


class SwfJobs(NamedTuple):
    """Jobs of some lines.

    Attributes:
        jobs: JOB_COLUMNS, one row a line that gave a job, in the order of the lines.
        unused: What gave no job: number of the line, why, and the line.
        nulled: Column → values that were no numbers or cannot be true.
    """

    jobs: pl.DataFrame
    unused: list[tuple[int, str, str]]
    nulled: dict[str, int]


def start_time(line: str) -> int | None:
    """Seconds since the epoch that times of the file count from, when this line of its header tells them."""
    found = _START.match(line)
    return int(found[1]) if found else None


def parse_swf(lines: Iterable[tuple[int, str]], cluster: str, origin_s: int, written: datetime) -> SwfJobs:
    """Jobs of lines of an SWF file.

    Args:
        lines: Number and text of each; comments are passed over.
        cluster: Name of the cluster.
        origin_s: What times count from, seconds since the epoch.
        written: When the file was written.

    Returns:
        Jobs, and what was of no use. Users, groups, queues and executables go by their numbers. `nodes` is null: the
        format counts processors, which stand in `cpus`.
    """
    rows: list[list[str]] = []
    places: list[tuple[int, str]] = []
    unused: list[tuple[int, str, str]] = []
    for number, line in lines:
        fields = line.split(None, len(_FIELDS))
        if not fields or fields[0].startswith(";"):
            continue
        if len(fields) < len(_FIELDS):
            unused.append((number, FEW_FIELDS, line))
            continue
        rows.append(fields[: len(_FIELDS)])
        places.append((number, line))
    text = pl.DataFrame(rows, schema=dict.fromkeys(_FIELDS, pl.String), orient="row")
    frame = text.select(_number(name) for name in _FIELDS)
    has_key = pl.col("submit").is_between(max(-origin_s, -_LAST_S), _LAST_S - origin_s) & pl.col("job").is_between(
        0, _LARGEST
    )
    good = frame.select(has_key.fill_null(False)).to_series()
    part = frame.select(pl.col("status").is_in(_PARTS).fill_null(False)).to_series()
    for (number, line), is_good, is_part in zip(places, good, part, strict=True):
        if not is_good or is_part:
            unused.append((number, NO_JOB if not is_good else PART, line))
    frame = frame.filter(good & ~part)
    jobs = frame.select(_columns(cluster, origin_s, written))
    nulled: dict[str, int] = {}
    for column, names in _FEEDS.items():
        told = pl.any_horizontal(pl.col(name).is_null() | (pl.col(name) >= 0) for name in names)
        count = int(frame.select(told.sum()).item() or 0) - (len(jobs) - jobs[column].null_count())
        if count > 0:
            nulled[column] = count
    return SwfJobs(jobs, sorted(unused), nulled)


def _number(name: str) -> pl.Expr:
    value = pl.col(name).cast(pl.Float64, strict=False)
    return pl.when(value.is_finite()).then(value).alias(name)


def _columns(cluster: str, origin_s: int, written: datetime) -> list[pl.Expr]:
    types = jobs_schema()

    def known(name: str) -> pl.Expr:
        return pl.when(pl.col(name).is_between(0, _LARGEST)).then(pl.col(name))

    def number(name: str) -> pl.Expr:
        return known(name).cast(pl.Int64)

    def moment(seconds: pl.Expr) -> pl.Expr:
        since_epoch = seconds + origin_s
        told = pl.when(since_epoch.is_between(0, _LAST_S)).then(since_epoch)
        return (told * 1_000_000).cast(pl.Int64).cast(TIME)

    def fitting(name: str, value: pl.Expr) -> pl.Expr:
        high = COLUMNS[name].high
        return value if high is None else pl.when(value <= high).then(value)

    start = pl.col("submit") + known("wait")
    procs = fitting("cpus", pl.coalesce(number("req_procs"), number("procs")))
    memory = pl.coalesce(known("req_memory_kb"), known("memory_kb")) * procs / 1024
    ran = pl.col("run") >= 0
    columns = {
        "cluster": pl.lit(cluster),
        "job_id": number("job").cast(pl.String),
        "user": number("user").cast(pl.String),
        "account": number("group").cast(pl.String),
        "queue": number("queue").cast(pl.String),
        "name": number("executable").cast(pl.String),
        "submit_time": moment(pl.col("submit")),
        "eligible_time": moment(pl.col("submit")),
        "start_time": pl.when(ran).then(moment(start)),
        "end_time": moment(start + known("run").fill_null(0)),
        "cpus": procs,
        "memory_mib": pl.when(memory <= _LARGEST).then(memory.round()),
        "time_limit_s": number("req_s"),
        "state": number("status").replace_strict(_STATES, default="UNKNOWN", return_dtype=pl.String),
        "observed_at": pl.lit(written),
    }
    return [columns.get(name, pl.lit(None)).cast(dtype).alias(name) for name, dtype in types.items()]


def read_swf(path: Path, cluster: str) -> pl.DataFrame:
    """Jobs of an SWF file, plain or gzip.

    Args:
        path: The file. `UnixStartTime` of its header gives the absolute time; without it, times count from 1970.
        cluster: Name of the cluster.

    Returns:
        JOB_COLUMNS, as of `parse_swf`; of lines of the same job and submission the last.

    Raises:
        SwfError: The file cannot be read or holds no jobs.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error) as error:
        raise SwfError(f"{path}: cannot be read: {error}") from None
    lines = text.splitlines()
    origin = next((at for line in lines if line.startswith(";") and (at := start_time(line)) is not None), 0)
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    found = parse_swf(enumerate(lines, 1), cluster, origin, written)
    if found.jobs.is_empty() and all(why == FEW_FIELDS for _, why, _ in found.unused):
        raise SwfError(f"{path}: no lines of {len(_FIELDS)} numbers")
    return found.jobs.unique(["job_id", "submit_time"], keep="last", maintain_order=True)

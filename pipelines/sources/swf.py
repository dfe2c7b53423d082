"""Standard Workload Format of the Parallel Workloads Archive: one job a line, 18 numbers, −1 for unknown."""

from __future__ import annotations

import gzip
import re
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from features.vocabulary import TIME
from pipelines.sources.sacct import jobs_schema

_FIELDS = (
    "job", "submit", "wait", "run", "procs", "cpu_s", "memory_kb", "req_procs", "req_s", "req_memory_kb", "status",
    "user", "group", "executable", "queue", "partition", "preceding", "think_s",
)  # fmt: skip
_STATES = {0: "FAILED", 1: "COMPLETED", 5: "CANCELLED"}
# Lines of status 2–4 repeat parts of jobs that were checkpointed.
_PARTS = (2.0, 3.0, 4.0)


class SwfError(ValueError):
    """A file that is no Standard Workload Format. The message names it."""


def read_swf(path: Path, cluster: str) -> pl.DataFrame:
    """Jobs of an SWF file, plain or gzip.

    Args:
        path: The file. `UnixStartTime` of its header gives the absolute time; without it, times count from 1970.
        cluster: Name of the cluster.

    Returns:
        JOB_COLUMNS; users, groups, queues and executables by their numbers. `nodes` is null: the format counts
        processors, which stand in `cpus`.

    Raises:
        SwfError: The file cannot be read or holds no jobs.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8", "replace")
    except (OSError, EOFError) as error:
        raise SwfError(f"{path}: cannot be read: {error}") from None
    header = re.search(r"^;\s*UnixStartTime:\s*(\d+)", text, re.MULTILINE)
    origin = int(header.group(1)) if header else 0
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(";")]
    rows = [fields[: len(_FIELDS)] for fields in lines if len(fields) >= len(_FIELDS)]
    if not rows:
        raise SwfError(f"{path}: no lines of {len(_FIELDS)} numbers")
    frame = pl.DataFrame(rows, schema=dict.fromkeys(_FIELDS, pl.String), orient="row")
    frame = frame.select(pl.col(name).cast(pl.Float64, strict=False).alias(name) for name in _FIELDS)
    frame = frame.filter(pl.col("submit").is_not_null() & ~pl.col("status").is_in(_PARTS))

    def known(name: str) -> pl.Expr:
        return pl.when(pl.col(name) >= 0).then(pl.col(name))

    def number(name: str) -> pl.Expr:
        return known(name).cast(pl.Int64)

    def moment(seconds: pl.Expr) -> pl.Expr:
        return ((seconds + origin) * 1_000_000).cast(pl.Int64).cast(TIME)

    start = pl.col("submit") + known("wait")
    procs = pl.coalesce(number("req_procs"), number("procs"))
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
        "memory_mib": memory.round(),
        "time_limit_s": number("req_s"),
        "state": pl.col("status").cast(pl.Int64).replace_strict(_STATES, default="UNKNOWN", return_dtype=pl.String),
        "observed_at": pl.lit(datetime.fromtimestamp(path.stat().st_mtime, UTC)),
    }
    types = jobs_schema()
    jobs = frame.select(columns.get(name, pl.lit(None)).cast(dtype).alias(name) for name, dtype in types.items())
    return jobs.unique(["job_id", "submit_time"], keep="last", maintain_order=True)

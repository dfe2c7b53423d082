"""Nodes of a cluster: a CSV file for what no machine knows, laid over what scheduler, exporters and labels say.

The file has a header with `node` and any of `rack`, `pod`, `power_domain`, `nvlink_domain`, `gpu_model`, `gpus`,
`driver_version`, `state`, `reason`; `node` may be a host list (`n[1-8]`). It completes what the scheduler says, or
stands alone with `NoJobs`, the job source of a cluster without a scheduler. How Slurm and Kubernetes write places
stands in `places.py`.
"""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from features.vocabulary import TIME, schema
from pipelines.separators import other_separator
from pipelines.sources import Finding, LiveJobs, SourceError
from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.sacct import empty_jobs
from pipelines.words import counted

# What a scheduler tells of a node.
NODES_SCHEMA = {
    "node": pl.String, "rack": pl.String, "pod": pl.String, "gpu_model": pl.String, "gpus": pl.Int32,
    "state": pl.String, "reason": pl.String,
}  # fmt: skip
PLACES = ("rack", "pod", "power_domain", "nvlink_domain")
# What the file may tell.
INVENTORY_SCHEMA = {
    **NODES_SCHEMA, "power_domain": pl.String, "nvlink_domain": pl.String, "driver_version": pl.String,
}  # fmt: skip
_TOLD = (*PLACES, "gpu_model", "gpus", "driver_version")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")
_MOST_GPUS = 1024
_MOST_BYTES = 64 << 20
_SHOWN = 5


def read_inventory(path: str) -> pl.DataFrame:
    """Nodes of a CSV file; no path: none.

    Returns:
        Columns of `INVENTORY_SCHEMA`; null where the file says nothing.

    Raises:
        SourceError: The file cannot be read, or has an unknown column, a broken host list, a blank or odd name, a
            number that is none, or a node twice. The message gives the first few lines that are wrong.
    """
    if not path:
        return pl.DataFrame(schema=INVENTORY_SCHEMA)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise SourceError(f"inventory {path}: larger than {_MOST_BYTES >> 20} MiB")
        return _rows(path, raw.decode("utf-8-sig"))
    except FileNotFoundError:
        raise SourceError(f"inventory {path}: no such file") from None
    except UnicodeDecodeError as error:
        raise SourceError(f"inventory {path}: not UTF-8 at byte {error.start}") from None
    except (OSError, csv.Error) as error:
        raise SourceError(f"inventory {path}: cannot be read: {error}") from None


def _rows(path: str, text: str) -> pl.DataFrame:
    if wrong_separator := other_separator(text.split("\n", 1)[0]):
        raise SourceError(f"inventory {path}: {wrong_separator}")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [name.strip().lower() for name in next(reader, [])]
    wrong = [name for name in header if name not in INVENTORY_SCHEMA]
    if wrong or "node" not in header or len(set(header)) < len(header):
        raise SourceError(
            f"inventory {path}: columns are {', '.join(INVENTORY_SCHEMA)}, each at most once, node always; "
            f"found {', '.join(header) or 'none'}"
        )
    columns: dict[str, list[str | int | None]] = {name: [] for name in INVENTORY_SCHEMA}
    lines: dict[str, int] = {}
    faults: list[str] = []
    for fields in reader:
        line = reader.line_num
        if not any(field.strip() for field in fields):
            continue
        try:
            if len(fields) > len(header):
                hint = ": put the host list in quotes" if any("[" in field for field in fields) else ""
                raise ValueError(f"{len(fields)} fields under {len(header)} columns{hint}")
            row = {name: field.strip() or None for name, field in zip(header, fields, strict=False)}
            gpus = _whole(row.get("gpus"))
            names = _names(row["node"])
            _refuse_twice(names, lines)
        except ValueError as error:
            faults.append(f"line {line}: {error}")
            continue
        lines |= dict.fromkeys(names, line)
        for name in INVENTORY_SCHEMA:
            columns[name] += names if name == "node" else [gpus if name == "gpus" else row.get(name)] * len(names)
    if faults:
        more = f"; and {counted(len(faults) - _SHOWN, 'more line')}" if len(faults) > _SHOWN else ""
        raise SourceError(f"inventory {path}: {'; '.join(faults[:_SHOWN])}{more}")
    return pl.DataFrame(columns, schema=INVENTORY_SCHEMA)


def _whole(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text[:9]) <= _MOST_GPUS and len(text) <= 9):
        raise ValueError(f"gpus = {text[:40]!r}: a whole number from 0 to {_MOST_GPUS}")
    return int(text)


def _refuse_twice(names: tuple[str, ...], lines: dict[str, int]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in lines:
            raise ValueError(f"more than one row for {name}: line {lines[name]} has it")
        if name in seen:
            raise ValueError(f"more than one row for {name}: this line names it twice")
        seen.add(name)


def _names(text: str | None) -> tuple[str, ...]:
    if text is None:
        raise ValueError("no node name")
    try:
        names = expand_hostlist(text)
    except HostlistError as error:
        raise ValueError(str(error)) from None
    odd = next((name for name in names or (text,) if not names or not _NAME.fullmatch(name)), None)
    if odd is not None:
        raise ValueError(f"node = {odd[:60]!r}: no name of a host")
    return names


def nodes_frame(nodes: pl.DataFrame, cluster: str, at: datetime) -> pl.DataFrame:
    """Columns of `core_nodes` from those of `read_inventory`."""
    frame = nodes.with_columns(
        pl.lit(cluster).alias("cluster"),
        pl.lit(at, dtype=TIME).alias("observed_at"),
        pl.col("state").fill_null("UNKNOWN"),
    )
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in schema("core_nodes").items()
    )


def complete(nodes: pl.DataFrame, inventory: pl.DataFrame) -> pl.DataFrame:
    """Nodes as the scheduler gives them, with the inventory's word where it has one on place, model, GPUs or driver.

    Nodes that only the inventory knows are added. State and reason stay the scheduler's where it gives them.

    Args:
        nodes: `node` and any columns of `INVENTORY_SCHEMA`.
        inventory: As given by `read_inventory`.

    Returns:
        Columns of `INVENTORY_SCHEMA`.
    """
    nodes, inventory = _whole_columns(nodes), _whole_columns(inventory)
    joined = nodes.join(inventory, on="node", how="full", coalesce=True, suffix="_told")
    return joined.select(
        pl.coalesce(f"{name}_told", name).alias(name) if name in _TOLD
        else pl.coalesce(name, f"{name}_told").alias(name) if name != "node"
        else pl.col("node")
        for name in INVENTORY_SCHEMA
    )  # fmt: skip


def complete_places(nodes: pl.DataFrame, told: pl.DataFrame) -> pl.DataFrame:
    """Nodes with what others tell where their own columns are null; no node is added.

    Args:
        nodes: `node` and any columns of `INVENTORY_SCHEMA`, or `core_nodes`.
        told: `node` and any of the columns that the inventory may tell; one row a node. A model that an exporter
            names in full replaces the scheduler's short word for it (`h100` by `NVIDIA H100 80GB HBM3`).

    Returns:
        The nodes, in the same order, with the columns of both.
    """
    told = told.unique("node", keep="last", maintain_order=True)
    names = [name for name in told.columns if name in _TOLD]
    known = nodes.with_columns(
        pl.lit(None, dtype=INVENTORY_SCHEMA[name]).alias(name) for name in names if name not in nodes.columns
    )
    joined = known.join(told.select("node", *names), on="node", how="left", suffix="_told", maintain_order="left")

    def word(name: str) -> pl.Expr:
        own, other = pl.col(name), pl.col(f"{name}_told")
        if name != "gpu_model":
            return pl.coalesce(own, other)
        is_short = other.str.to_lowercase().str.contains(own.str.to_lowercase(), literal=True)
        return pl.when(own.is_null() | is_short.fill_null(False)).then(pl.coalesce(other, own)).otherwise(own)

    return joined.with_columns(word(name).alias(name) for name in names).select(known.columns)


def exporter_words(slots: pl.DataFrame) -> pl.DataFrame:
    """Model, driver and number of GPUs of each node, as exporters' labels tell.

    Args:
        slots: Rows of `core_slots`; those that ended are passed over.

    Returns:
        `node`, `gpu_model`, `gpus`, `driver_version`; the newest word where boards differ.
    """
    return (
        slots.filter(pl.col("end_time").is_null())
        .sort("start_time")
        .group_by("node", maintain_order=True)
        .agg(
            pl.col("gpu_model").drop_nulls().last(),
            pl.col("gpu_uuid").n_unique().cast(pl.Int32).alias("gpus"),
            pl.col("driver_version").drop_nulls().last(),
        )
        .sort("node")
    )


def _whole_columns(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in INVENTORY_SCHEMA.items()
    )


def occupied(nodes: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Nodes with the state that jobs imply where none is known: ALLOCATED under a running job, else IDLE.

    Nodes that only appear in jobs are added.
    """
    holds = jobs.filter(pl.col("state").is_in(["RUNNING", "SUSPENDED"]) & pl.col("node_list").is_not_null())
    busy = holds.select(pl.col("node_list").str.split(",").alias("node")).explode("node").unique()
    seen = nodes.join(busy, on="node", how="full", coalesce=True).select(nodes.columns)
    is_busy = pl.col("node").is_in(busy["node"].implode())
    implied = pl.when(is_busy).then(pl.lit("ALLOCATED")).otherwise(pl.lit("IDLE"))
    return seen.with_columns(pl.coalesce(pl.col("state"), implied).alias("state")).sort("node")


class NoJobs:
    """Job source of a cluster without a scheduler: no jobs, and the nodes of the inventory."""

    def __init__(self, name: str, inventory: str) -> None:
        self.name = name
        self._nodes = read_inventory(inventory)

    def fetch_jobs(self, start: datetime, end: datetime) -> pl.DataFrame:  # noqa: ARG002
        """No jobs."""
        return empty_jobs()

    def live(self) -> LiveJobs:
        """No jobs, and the inventory."""
        return LiveJobs(empty_jobs(), nodes_frame(self._nodes, self.name, datetime.now(UTC)))

    def check(self) -> list[Finding]:
        """Nothing can be wrong."""
        return [("jobs", True, f"no scheduler; {counted(len(self._nodes), 'node')} in the inventory")]

    def close(self) -> None:
        """Nothing is open."""


def exists(path: str) -> Finding:
    """Finding on a file that a source reads."""
    file = Path(path)
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except FileNotFoundError:
        return ("readable", False, f"{path}: no such file")
    except OSError as error:
        return ("readable", False, f"{path}: {error.strerror}: give this user the right to read it")
    return ("readable", True, f"{path} can be read")

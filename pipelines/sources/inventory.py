"""Nodes of a cluster from a CSV file, and the job source of a cluster without a scheduler.

The file has a header with `node` and any of `rack`, `pod`, `gpu_model`, `gpus`, `state`, `reason`; `node` may be a host
list (`n[1-8]`). It completes what the scheduler says, or stands alone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from features.vocabulary import TIME, schema
from pipelines.sources import Finding, LiveJobs, SourceError
from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.sacct import empty_jobs

_OPTIONAL = {
    "rack": pl.String, "pod": pl.String, "gpu_model": pl.String, "gpus": pl.Int32, "state": pl.String,
    "reason": pl.String,
}  # fmt: skip
NODES_SCHEMA = {"node": pl.String, **_OPTIONAL}


def read_inventory(path: str) -> pl.DataFrame:
    """Nodes of a CSV file; no path: none.

    Returns:
        `node`, `rack`, `pod`, `gpu_model`, `gpus`, `state`, `reason`; null where the file says nothing.

    Raises:
        SourceError: The file cannot be read, has an unknown column, a broken host list, or a node twice.
    """
    if not path:
        return pl.DataFrame(schema=NODES_SCHEMA)
    try:
        frame = pl.read_csv(path, infer_schema=False)
    except FileNotFoundError:
        raise SourceError(f"inventory {path}: no such file") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        raise SourceError(f"inventory {path}: cannot be read: {error}") from None
    frame = frame.rename({name: name.strip().lower() for name in frame.columns})
    wrong = [name for name in frame.columns if name not in NODES_SCHEMA]
    if wrong or "node" not in frame.columns:
        raise SourceError(f"inventory {path}: columns are {', '.join(NODES_SCHEMA)}; found {', '.join(frame.columns)}")
    try:
        lists = [list(expand_hostlist(text)) for text in frame["node"].fill_null("")]
    except HostlistError as error:
        raise SourceError(f"inventory {path}: {error}") from None
    frame = frame.with_columns(pl.Series("node", lists, dtype=pl.List(pl.String))).explode("node").drop_nulls("node")
    twice = frame.filter(pl.col("node").is_duplicated())["node"].unique().sort().to_list()
    if twice:
        raise SourceError(f"inventory {path}: more than one row for {', '.join(twice[:5])}")
    columns = [
        pl.col(name).str.strip_chars().replace("", None).cast(dtype).alias(name)
        if name in frame.columns
        else pl.lit(None, dtype=dtype).alias(name)
        for name, dtype in NODES_SCHEMA.items()
    ]
    try:
        return frame.select(columns)
    except pl.exceptions.PolarsError as error:
        raise SourceError(f"inventory {path}: gpus is a whole number: {error}") from None


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
    """Nodes as the scheduler gives them, with the inventory's word where it has one on rack, pod, model and GPUs.

    Nodes that only the inventory knows are added.
    """
    if inventory.is_empty():
        return nodes
    joined = nodes.join(inventory, on="node", how="full", coalesce=True, suffix="_told")
    told = ("rack", "pod", "gpu_model", "gpus")
    return joined.select(
        "node",
        *(pl.coalesce(f"{name}_told", name).alias(name) for name in told),
        *(pl.coalesce(name, f"{name}_told").alias(name) for name in ("state", "reason")),
    )


def occupied(nodes: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Nodes with the state that jobs imply where none is known: ALLOCATED under a running job, else IDLE.

    Nodes that only appear in jobs are added.
    """
    holds = jobs.filter(pl.col("state").is_in(["RUNNING", "SUSPENDED"]) & pl.col("node_list").is_not_null())
    busy = holds.select(pl.col("node_list").str.split(",").alias("node")).explode("node").unique()
    seen = nodes.join(busy, on="node", how="full", coalesce=True).select(*NODES_SCHEMA)
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
        return [("jobs", True, f"no scheduler; {len(self._nodes)} nodes in the inventory")]


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

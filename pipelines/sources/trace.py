"""Recorded traces: canonical telemetry and jobs Parquet, and jobs in Standard Workload Format.

For import, backtests and demonstrations. Files are read lazily, so that a window costs what it holds.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

import polars as pl

from features.vocabulary import GPU_QUANTITIES, NODE_QUANTITIES, TIME, schema
from pipelines.sources import FIRST_JOBS_DAYS, Fetched, Finding, LiveJobs, SourceError, gpu_frame, node_frame
from pipelines.sources.inventory import exists, nodes_frame, occupied, read_inventory
from pipelines.sources.sacct import LIVE_STATES, jobs_schema
from pipelines.sources.sacct_file import all_before, overlapping
from pipelines.sources.swf import SwfError, read_swf
from pipelines.words import counted, lacking


def _scan(source: str, setting: str, path: Path, needed: tuple[str, ...]) -> pl.LazyFrame:
    """A Parquet file with UTC times in microseconds.

    Raises:
        SourceError: It cannot be read or lacks columns.
    """
    try:
        frame = pl.scan_parquet(path)
        types = frame.collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise SourceError(f"{source}: {setting} {path}: no Parquet file that can be read: {error}") from None
    missing = [name for name in needed if name not in types]
    if missing:
        raise SourceError(f"{source}: {setting} {path}: {lacking(missing)}")
    zones = {name: dtype.time_zone for name, dtype in types.items() if isinstance(dtype, pl.Datetime)}
    naive = [name for name, zone in zones.items() if zone is None]
    return frame.with_columns(pl.col(naive).dt.replace_time_zone("UTC")).with_columns(pl.col(list(zones)).cast(TIME))


class TelemetryTrace:
    """Recorded samples of GPUs and of nodes.

    Args:
        name: Name of the cluster, whatever the file says.
        path: Parquet in the columns of `core_gpu_samples`, any subset that has `ts`, `node` and `gpu_uuid`; columns of
            `core_node_samples` may stand in it too.
    """

    watermark_lag_s = 0.0

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = Path(path)

    @cached_property
    def _samples(self) -> pl.LazyFrame:
        return _scan(self.name, "telemetry_path", self.path, ("ts", "node", "gpu_uuid")).with_columns(
            pl.lit(self.name).alias("cluster")
        )

    def fetch(self, start: datetime, end: datetime) -> Fetched:
        """Samples with start ≤ ts < end.

        Raises:
            SourceError: The file cannot be read.
        """
        return self._fetched(self._samples.filter(pl.col("ts").is_between(start, end, closed="left")))

    def latest(self) -> Fetched:
        """The last sample of each GPU in the file.

        Raises:
            SourceError: The file cannot be read.
        """
        last = pl.col("ts") == pl.col("ts").max().over("node", "gpu_uuid")
        return self._fetched(self._samples.filter(last))

    def _fetched(self, rows: pl.LazyFrame) -> Fetched:
        try:
            frame = rows.collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise SourceError(f"{self.name}: telemetry_path {self.path}: {error}") from None
        types = schema("raw_gpu_samples")
        gpu = gpu_frame(frame.select(name for name in frame.columns if name in types))
        sensors = [name for name in NODE_QUANTITIES if name in frame.columns]
        node = node_frame()
        if sensors:
            node = node_frame(frame.group_by("ts", "cluster", "node").agg(pl.col(sensors).drop_nulls().first()))
        return Fetched(gpu, node)

    def check(self) -> list[Finding]:
        """Readable, its columns, its span."""
        found = exists(str(self.path))
        if not found[1]:
            return [found]
        try:
            names = [name for name in self._samples.collect_schema() if name in GPU_QUANTITIES]
            span = self._samples.select(pl.col("ts").min().alias("first"), pl.col("ts").max().alias("last")).collect()
        except SourceError as error:
            return [found, ("format", False, str(error))]
        text = f"{counted(len(names), 'quantity', 'quantities')}, {span['first'][0]} to {span['last'][0]}"
        return [found, ("format", bool(names), text)]

    def close(self) -> None:
        """Nothing is open."""


class JobsTrace:
    """Recorded jobs.

    Args:
        name: Name of the cluster, whatever the file says.
        path: Canonical jobs Parquet, or Standard Workload Format (`.swf`, `.swf.gz`).
        inventory: CSV of nodes, empty: the nodes that jobs name.
    """

    def __init__(self, name: str, path: str, inventory: str = "") -> None:
        self.name = name
        self.path = Path(path)
        self._inventory_path = inventory

    @cached_property
    def _jobs(self) -> pl.DataFrame:
        if ".swf" in self.path.suffixes:
            try:
                return read_swf(self.path, self.name)
            except SwfError as error:
                raise SourceError(f"{self.name}: jobs_path {error}") from error
        frame = _scan(self.name, "jobs_path", self.path, ("job_id", "submit_time")).collect()
        written = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        defaults = {"cluster": self.name, "observed_at": written}
        return frame.select(
            (pl.lit(defaults[name]) if name in defaults else pl.col(name) if name in frame.columns else pl.lit(None))
            .cast(dtype)
            .alias(name)
            for name, dtype in jobs_schema().items()
        )

    def fetch_jobs(self, start: datetime, end: datetime) -> pl.DataFrame:
        """JOB_COLUMNS of the jobs that were submitted, ran or ended in [start, end).

        Raises:
            SourceError: The file cannot be read.
        """
        return overlapping(self._jobs, start, end)

    def nothing_since(self, start: datetime) -> str | None:
        """Why no job of the file is read from `start` on, in words; None: some are."""
        kind = "swf" if ".swf" in self.path.suffixes else "jobs"
        return all_before(self._jobs, start, kind, self.path, self.name)

    def live(self) -> LiveJobs:
        """Jobs that pend or run in the file, and the nodes.

        Raises:
            SourceError: The file cannot be read.
        """
        jobs = self._jobs.filter(pl.col("state").is_in(LIVE_STATES))
        nodes = occupied(read_inventory(self._inventory_path), jobs)
        return LiveJobs(jobs, nodes_frame(nodes, self.name, datetime.now(UTC)))

    def check(self) -> list[Finding]:
        """Readable, its jobs."""
        found = exists(str(self.path))
        if not found[1]:
            return [found]
        try:
            form = ("format", True, f"{counted(len(self._jobs), 'job')}, to {self._jobs['submit_time'].max()}")
            old = self.nothing_since(datetime.now(UTC) - timedelta(days=FIRST_JOBS_DAYS))
        except SourceError as error:
            return [found, ("format", False, str(error))]
        return [found, form, *([("recent", None, old)] if old else [])]

    def close(self) -> None:
        """Nothing is open."""

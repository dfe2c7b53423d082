"""Jobs from a file of sacct text that something else keeps up to date: the simulator, or a cron job on the controller.

The file is read again when it has changed. Parsing stands in `sacct.py`.
"""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from pipelines.sources import Finding, LiveJobs, SourceError
from pipelines.sources.inventory import exists, nodes_frame, occupied, read_inventory
from pipelines.sources.sacct import LIVE_STATES, SacctError, parse_sacct


def overlapping(jobs: pl.DataFrame, start: datetime, end: datetime) -> pl.DataFrame:
    """Jobs that were submitted, waited, ran or ended in [start, end)."""
    return jobs.filter((pl.col("submit_time") < end) & (pl.col("end_time").is_null() | (pl.col("end_time") >= start)))


class SacctFile:
    """Jobs of one cluster from a file.

    Args:
        name: Name of the cluster.
        path: sacct text with a header; the whole state, replaced as one.
        inventory: CSV of nodes, empty: the nodes that jobs name.
    """

    def __init__(self, name: str, path: str, inventory: str = "") -> None:
        self.name = name
        self.path = Path(path)
        self._inventory_path = inventory
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._jobs = pl.DataFrame()
        self.warnings: list[str] = []

    def fetch_jobs(self, start: datetime, end: datetime) -> pl.DataFrame:
        """JOB_COLUMNS of the jobs that were submitted, ran or ended in [start, end).

        Raises:
            SourceError: The file is missing or no sacct text.
        """
        return overlapping(self._read(), start, end)

    def live(self) -> LiveJobs:
        """Pending and running jobs of the file, and the nodes.

        Raises:
            SourceError: The file is missing or no sacct text.
        """
        jobs = self._read().filter(pl.col("state").is_in(LIVE_STATES))
        at = datetime.fromtimestamp((self._stamp or (0,))[0] / 1e9, UTC)
        nodes = occupied(read_inventory(self._inventory_path), jobs)
        return LiveJobs(jobs, nodes_frame(nodes, self.name, at))

    def _read(self) -> pl.DataFrame:
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                    if stamp == self._stamp:
                        return self._jobs
                    text = file.read().decode("utf-8", "replace")
            except OSError as error:
                raise SourceError(f"{self.name}: jobs_path {self.path}: {error.strerror}") from error
            try:
                jobs, self.warnings = parse_sacct(text, self.name, datetime.fromtimestamp(stamp[0] / 1e9, UTC))
            except SacctError as error:
                raise SourceError(f"{self.name}: jobs_path {self.path}: {error}") from error
            self._jobs, self._stamp = jobs, stamp
            return jobs

    def check(self) -> list[Finding]:
        """Readable, parses, age."""
        found = exists(str(self.path))
        if not found[1]:
            return [found]
        try:
            jobs = self._read()
            nodes = read_inventory(self._inventory_path)
        except SourceError as error:
            return [found, ("format", False, str(error))]
        age_s = datetime.now(UTC).timestamp() - (self._stamp or (0,))[0] / 1e9
        note = "; ".join([f"{len(jobs)} jobs, written {age_s:.0f} s ago", *self.warnings])
        return [found, ("format", not self.warnings, note), ("nodes", True, f"{len(nodes)} nodes in the inventory")]

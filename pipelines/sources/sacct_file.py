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
from pipelines.sources.sacct import DELIMITERS, LIVE_STATES, SacctError, empty_jobs, parse_sacct
from pipelines.sources.sacct_attempts import count_restarts, settle_attempts
from pipelines.words import counted

_SETTLE = 64_000  # characters that stood still before they are set aside
_MOST_LINES_BACK = 1000  # that are looked at for the beginning of a job's record


def overlapping(jobs: pl.DataFrame, start: datetime, end: datetime) -> pl.DataFrame:
    """Jobs that were submitted, waited, ran or ended in [start, end)."""
    return jobs.filter((pl.col("submit_time") < end) & (pl.col("end_time").is_null() | (pl.col("end_time") >= start)))


def all_before(jobs: pl.DataFrame, start: datetime, kind: str, path: Path, name: str) -> str | None:
    """That a file holds jobs, but none since `start`, and how they are read all the same; None: it is not so.

    Args:
        jobs: All jobs of the file.
        start: Where reading begins.
        kind: Kind of import for such a file.
        path: The file.
        name: Name of the cluster.
    """
    if jobs.is_empty() or not overlapping(jobs, start, datetime.max.replace(tzinfo=UTC)).is_empty():
        return None
    newest = jobs.select(pl.max_horizontal("submit_time", "start_time", "end_time").max()).item()
    return (
        f"the newest of {counted(len(jobs), 'job')} in {path} is of {newest:%Y-%m-%d}, and jobs are read from "
        f"{start:%Y-%m-%d %H:%M} UTC on: `weatherglass import {kind} {path} --cluster {name}` reads all"
    )


def _common_prefix(old: str, new: str) -> int:
    """Length of the text that both begin with."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _record_start(text: str, before: int, header: str) -> int:
    """The last place at or before `before` where a whole record of a job begins, as its steps stand behind it.

    Names may hold newlines.
    """
    delimiter = max(DELIMITERS, key=header.count)
    names = [name.strip().lower() for name in header.split(delimiter)]
    id_at = names.index("jobidraw" if "jobidraw" in names else "jobid")
    at = text.rfind("\n", 0, before) + 1
    for _ in range(_MOST_LINES_BACK):
        fields = text[at : text.find("\n", at)].split(delimiter)
        if at <= len(header) or (len(fields) >= len(names) and "." not in fields[id_at]):
            return at
        at = text.rfind("\n", 0, at - 1) + 1
    return 0


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
        self._text = ""
        self._jobs = empty_jobs()
        # Ended jobs do not change: what stood at the beginning of the file and still stands there is parsed once.
        self._settled, self._settled_jobs = 0, empty_jobs()
        self._settled_warnings: list[str] = []
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
        return LiveJobs(jobs, nodes_frame(nodes, self.name, at), warnings=list(self.warnings))

    def nothing_since(self, start: datetime) -> str | None:
        """Why no job of the file is read from `start` on, in words; None: some are."""
        return all_before(self._read(), start, "sacct", self.path, self.name)

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
                self._jobs = self._parse(text, datetime.fromtimestamp(stamp[0] / 1e9, UTC))
            except SacctError as error:
                raise SourceError(f"{self.name}: jobs_path {self.path}: {error}") from error
            self._stamp = stamp
            return self._jobs

    def _parse(self, text: str, at: datetime) -> pl.DataFrame:
        now = max(at, datetime.now(UTC))  # a copied file may bear an old time
        header = text[: text.find("\n") + 1]
        same = _common_prefix(self._text, text)
        if same < self._settled:
            self._settled, self._settled_jobs, self._settled_warnings = 0, empty_jobs(), []
        elif same - self._settled > _SETTLE:
            cut = _record_start(text, same, header)
            if cut > self._settled:
                piece = header + text[max(self._settled, len(header)) : cut]
                more, said = parse_sacct(piece, self.name, at, now=now)
                self._settled_warnings += said
                self._settled_jobs = pl.concat([self._settled_jobs, more])
                self._settled = cut
        rest, said = parse_sacct(header + text[max(self._settled, len(header)) :], self.name, at, now=now)
        self.warnings = [*self._settled_warnings, *said]
        self._text = text
        jobs = pl.concat([self._settled_jobs, rest]) if self._settled else rest
        return count_restarts(settle_attempts(jobs))

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
        note = "; ".join([f"{counted(len(jobs), 'job')}, written {age_s:.0f} s ago", *self.warnings])
        known = f"{counted(len(nodes), 'node')} in the inventory"
        return [found, ("format", not self.warnings, note), ("nodes", True, known)]

    def close(self) -> None:
        """Nothing is open."""

"""Asks a Slurm through its client commands: history by sacct, the queue by squeue, nodes by scontrol.

Here belong the questions and which fields they ask for; programs are run by `slurm_commands.py`, output is read by
`sacct.py` and `slurm_text.py`. `Reader` is what `slurm.py` needs of any way to ask; `slurmrestd.py` is another.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Protocol

import polars as pl

from pipelines.sources import SourceError
from pipelines.sources.inventory import complete_places
from pipelines.sources.places import topology_places
from pipelines.sources.sacct import SACCT_FIELDS, SacctError, jobs_frame, parse_sacct
from pipelines.sources.sacct_attempts import count_restarts, settle_attempts
from pipelines.sources.slurm_commands import Commands
from pipelines.sources.slurm_text import parse_nodes, parse_topology

_FIELD, _RECORD = "\x1f", "\x1e"
# squeue's name of a field → sacct's; an empty size after the colon means that nothing is cut off.
_QUEUE_FIELDS = {
    "JobID": "JobIDRaw", "JobArrayID": "JobID", "UserName": "User", "Account": "Account", "Partition": "Partition",
    "SubmitTime": "Submit", "EligibleTime": "Eligible", "StartTime": "Start", "EndTime": "End", "State": "State",
    "exit_code": "ExitStatus", "RestartCnt": "RestartCnt", "PriorityLong": "Priority", "NumNodes": "NNodes",
    "NumCPUs": "NCPUS", "tres-alloc": "AllocTRES", "tres-per-node": "TresPerNode", "tres-per-job": "TresPerJob",
    "feature": "Constraints",
    "TimeLimit": "Timelimit", "NodeList": "NodeList", "Reason": "Reason", "Name": "JobName",
}  # fmt: skip
_REFUSED = re.compile(r"Invalid job format specification: ([\w-]+)")
_LONGEST_RANGE = timedelta(days=7)  # slurmdbd may refuse wide ranges
_SHORTEST_RANGE = timedelta(hours=1)
_TOO_WIDE = "too wide of a date range"
_ARRAY_OPTION = (23, 2)  # the first release whose sacct knows --array
_TOPOLOGY_S = 600.0


class Reader(Protocol):
    """Asks a Slurm, in whatever way."""

    warnings: list[str]

    def about(self) -> str:
        """What answers, in a word or two."""
        ...

    def history(self, start: datetime, end: datetime) -> pl.DataFrame:
        """Columns of `raw_jobs`: what the accounting knows of [start, end), every attempt."""
        ...

    def queue(self) -> pl.DataFrame:
        """Columns of `raw_jobs` and `priority`: every job that the controller remembers."""
        ...

    def nodes(self) -> pl.DataFrame:
        """Columns of `NODES_SCHEMA`."""
        ...


class CommandReader:
    """Asks through Slurm's client commands.

    Args:
        name: Name of the cluster.
        commands: The commands.
    """

    def __init__(self, name: str, commands: Commands) -> None:
        self.name, self.commands = name, commands
        self.warnings: list[str] = []
        self._longest = _LONGEST_RANGE
        self._fields = dict(_QUEUE_FIELDS)
        self._topology: dict[str, tuple[str, str]] = {}
        self._places = topology_places("")
        self._topology_at = -_TOPOLOGY_S

    def about(self) -> str:
        """Release of the commands.

        Raises:
            SourceError: They are not there.
        """
        return "Slurm {}.{:02d}".format(*self.commands.version())

    def history(self, start: datetime, end: datetime) -> pl.DataFrame:
        """What sacct tells of [start, end), every attempt; asked in pieces where the database refuses wide ranges.

        Raises:
            SourceError: sacct failed.
        """
        parts: list[pl.DataFrame] = []
        while True:
            last = min(end, start + self._longest)
            try:
                parts.append(self._sacct(start, last))
            except SourceError as error:
                if _TOO_WIDE not in str(error).lower() or self._longest <= _SHORTEST_RANGE:
                    raise
                self._longest = timedelta(days=1) if self._longest > timedelta(days=1) else self._longest / 2
                continue
            start = last
            if start >= end:
                # A job that changed meanwhile: the later answer counts.
                return count_restarts(settle_attempts(pl.concat(parts)))

    def _sacct(self, start: datetime, end: datetime) -> pl.DataFrame:
        first = start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        last = (end.astimezone(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%S")
        array = ("--array",) if self.commands.version() >= _ARRAY_OPTION else ()
        more = (*(("Restarts",) if array else ()), "Constraints")
        fields = (*(name for name in more if self.commands.has_field(name)), *SACCT_FIELDS)
        # --parsable ends each record with the delimiter: names may hold newlines.
        text, at = self.commands.ask(
            "sacct", "--allusers", "--duplicates", *array, "--parsable", f"--delimiter={_FIELD}",
            "--noconvert", f"--starttime={first}", f"--endtime={last}", f"--format={','.join(fields)}",
        )  # fmt: skip
        try:
            jobs, warnings = parse_sacct(text, self.name, at, _FIELD, since=start)
        except SacctError as error:
            raise SourceError(f"{self.name}: sacct: {error}") from error
        self.warnings += warnings
        return jobs

    def queue(self) -> pl.DataFrame:
        """What squeue tells of every job that the controller remembers, with its `priority`.

        Raises:
            SourceError: squeue failed or its answer is not whole.
        """
        text, at = self._asked_queue()
        rows = [record.removeprefix("\n").split(_FIELD) for record in text.split(_RECORD)]
        whole = [row for row in rows if len(row) == len(self._fields)]
        if len(whole) < sum(len(row) > 1 for row in rows):
            raise SourceError(f"{self.name}: squeue gave fields of another number than were asked for: {rows[0][:3]}")
        jobs, warnings = jobs_frame(list(self._fields.values()), whole, self.name, at)
        self.warnings += warnings
        names = list(self._fields.values())
        ids = [row[names.index("JobIDRaw")] for row in whole]
        priorities = [row[names.index("Priority")] for row in whole] if "Priority" in names else [""] * len(ids)
        return with_priorities(jobs, zip(ids, priorities, strict=True))

    def _asked_queue(self) -> tuple[str, datetime]:
        """Squeue's text and when it was asked; fields that this release does not know are left out from then on."""
        while True:
            ends = dict.fromkeys(self._fields, _FIELD) | {"Name": _RECORD}
            try:
                # One question for all purposes, so that its answer can be shared.
                return self.commands.ask(
                    "squeue", "--all", "--noheader", "--noconvert", "--states=all", "--Format",
                    ",".join(f"{k}:{end}" for k, end in ends.items()),
                )  # fmt: skip
            except SourceError as error:
                refused = _REFUSED.search(str(error))
                if refused is None or refused[1] not in self._fields or refused[1] in ("JobID", "Name"):
                    raise
                self._fields.pop(refused[1])

    def nodes(self) -> pl.DataFrame:
        """Columns of `NODES_SCHEMA`, and the NVLink domain; the topology is asked for now and then.

        Raises:
            SourceError: scontrol failed.
        """
        text = self.commands.run("scontrol", "--oneliner", "show", "node")
        if time.monotonic() - self._topology_at >= _TOPOLOGY_S:
            try:
                topology = self.commands.run("scontrol", "--oneliner", "show", "topology")
                self._topology, self._places = parse_topology(topology), topology_places(topology)
            except SourceError as error:  # "no topology information available"
                self.warnings.append(str(error))
            self._topology_at = time.monotonic()
        return complete_places(parse_nodes(text, self._topology), self._places.select("node", "nvlink_domain"))


def with_priorities(jobs: pl.DataFrame, priorities: Iterable[tuple[str, str]]) -> pl.DataFrame:
    """Jobs with `priority`, by id; null where it is no number."""
    told = pl.DataFrame(list(priorities), schema={"job_id": pl.String, "priority": pl.String}, orient="row")
    told = told.with_columns(pl.col("priority").cast(pl.Float64, strict=False)).unique("job_id", keep="last")
    return jobs.join(told, on="job_id", how="left", maintain_order="left")

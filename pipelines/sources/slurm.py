"""Jobs and nodes from a real Slurm through its commands: sacct, squeue, scontrol.

Text output only: `--json` is not built into every Slurm. Each command is one request to the controller or its
database, and a call makes few: `live` two (three each ten minutes, for the topology), `fetch_jobs` one for each seven
days and one for the queue. Where accounting is off, jobs come from the controller's memory and the job completion file.
What the output means stands in `sacct.py` and `slurm_text.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from pipelines.sources import Finding, LiveJobs, SourceError
from pipelines.sources.inventory import complete, nodes_frame, read_inventory
from pipelines.sources.sacct import LIVE_STATES, SACCT_FIELDS, SacctError, empty_jobs, jobs_frame, parse_sacct
from pipelines.sources.sacct_file import overlapping
from pipelines.sources.slurm_text import parse_jobcomp, parse_nodes, parse_topology

_FIELD, _RECORD = "\x1f", "\x1e"
# squeue's name of a field → sacct's; an empty size after the colon means that nothing is cut off.
_QUEUE_FIELDS = {
    "JobID": "JobIDRaw", "JobArrayID": "JobID", "UserName": "User", "Account": "Account", "Partition": "Partition",
    "SubmitTime": "Submit", "EligibleTime": "Eligible", "StartTime": "Start", "EndTime": "End", "State": "State",
    "NumNodes": "NNodes", "NumCPUs": "NCPUS", "tres-alloc": "AllocTRES", "tres-per-node": "TresPerNode",
    "tres-per-job": "TresPerJob", "TimeLimit": "Timelimit",
    "NodeList": "NodeList", "Reason": "Reason", "Name": "JobName",
}  # fmt: skip
_LONGEST_RANGE = timedelta(days=7)  # slurmdbd refuses ranges that are too wide
_TOPOLOGY_S = 600.0
_NO_ACCOUNTING = "accounting storage is disabled"
_MAX_SKEW_S = 5.0


class Commands:
    """Slurm's client commands.

    Args:
        source: Name for messages.
        conf: SLURM_CONF; empty: the commands' own default.
        folder: Where the commands are; empty: on PATH.
        timeout_s: Time-out of one command, s.
    """

    def __init__(self, source: str, conf: str = "", folder: str = "", timeout_s: float = 30) -> None:
        self.source, self.timeout_s = source, timeout_s
        self._folder = folder
        # Times of the output as seconds since the epoch, those of the options in UTC.
        self._env = {**os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "%s", **({"SLURM_CONF": conf} if conf else {})}
        self.calls = 0

    def run(self, program: str, *arguments: str) -> str:
        """Standard output of a command.

        Raises:
            SourceError: It is not there, failed, or did not end in time; the message holds what it said.
        """
        path = shutil.which(program, path=self._folder or None)
        if path is None:
            raise SourceError(
                f"{self.source}: {program} is not in {self._folder or 'PATH'}: install Slurm's client commands or set "
                "slurm_bin"
            )
        self.calls += 1
        try:
            done = subprocess.run(
                [path, *arguments], capture_output=True, stdin=subprocess.DEVNULL, timeout=self.timeout_s, env=self._env
            )
        except subprocess.TimeoutExpired:
            raise SourceError(
                f"{self.source}: {program} did not end within {self.timeout_s:g} s: is the controller reachable? "
                "(scontrol ping; slurm_timeout_s)"
            ) from None
        except OSError as error:
            raise SourceError(f"{self.source}: {path}: {error.strerror}") from error
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).decode("utf-8", "replace").split())
            raise SourceError(
                f"{self.source}: {program} failed (exit {done.returncode}): {said[-400:] or 'no message'}"
            )
        return done.stdout.decode("utf-8", "replace")


class SlurmSource:
    """Jobs and nodes of one Slurm cluster.

    Args:
        name: Name of the cluster.
        conf: SLURM_CONF; empty: the commands' own default.
        folder: Where the commands are; empty: on PATH.
        timeout_s: Time-out of one command, s.
        inventory: CSV of nodes that completes what Slurm says; empty: none.
        jobcomp: Job completion file (`jobcomp/filetxt`), read when accounting is off; empty: none.
    """

    def __init__(
        self,
        name: str,
        *,
        conf: str = "",
        folder: str = "",
        timeout_s: float = 30,
        inventory: str = "",
        jobcomp: str = "",
    ) -> None:
        self.name = name
        self.commands = Commands(name, conf, folder, timeout_s)
        self.warnings: list[str] = []
        self._inventory = read_inventory(inventory)
        self._jobcomp = jobcomp
        self._topology: dict[str, tuple[str, str]] = {}
        self._topology_at = -_TOPOLOGY_S
        self._lock = threading.Lock()

    def fetch_jobs(self, start: datetime, end: datetime) -> pl.DataFrame:
        """JOB_COLUMNS of the jobs that were submitted, ran or ended in [start, end).

        The queue's word is laid over the database's, which lags: reasons, planned starts, jobs that are not yet
        eligible. What a job asked for stays the database's.

        Raises:
            SourceError: A command failed.
        """
        with self._lock:
            self.warnings = []
            try:
                parts = [self._sacct(first, last) for first, last in _ranges(start, end)]
                # A job that changed meanwhile: the later answer counts.
                known = pl.concat(parts).unique(["job_id", "submit_time"], keep="last", maintain_order=True)
            except SourceError as error:
                if _NO_ACCOUNTING not in str(error).lower():
                    raise
                known = self._completed()
            # In this order: what the queue says is newer than what the database said.
            queue = self._squeue("--states=all")
        return overlapping(_laid_over(known, queue), start, end)

    def live(self) -> LiveJobs:
        """Pending and running jobs, and the nodes.

        Raises:
            SourceError: A command failed.
        """
        with self._lock:
            jobs = self._squeue().filter(pl.col("state").is_in(LIVE_STATES))
            nodes = complete(self._nodes(), self._inventory).sort("node")
            return LiveJobs(jobs, nodes_frame(nodes, self.name, datetime.now(UTC)))

    def _sacct(self, start: datetime, end: datetime) -> pl.DataFrame:
        first = start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        last = (end.astimezone(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%S")
        # --parsable ends each record with the delimiter: names may hold newlines.
        text = self.commands.run(
            "sacct", "--allusers", "--allocations", "--parsable", f"--delimiter={_FIELD}", "--noconvert",
            f"--starttime={first}", f"--endtime={last}", f"--format={','.join(SACCT_FIELDS)}",
        )  # fmt: skip
        try:
            jobs, warnings = parse_sacct(text, self.name, datetime.now(UTC), _FIELD)
        except SacctError as error:
            raise SourceError(f"{self.name}: sacct: {error}") from error
        self.warnings += warnings
        return jobs

    def _squeue(self, *options: str) -> pl.DataFrame:
        ends = dict.fromkeys(_QUEUE_FIELDS, _FIELD) | {"Name": _RECORD}
        text = self.commands.run(
            "squeue", "--all", "--noheader", *options, "--Format", ",".join(f"{k}:{end}" for k, end in ends.items())
        )
        rows = [record.removeprefix("\n").split(_FIELD) for record in text.split(_RECORD)]
        whole = [row for row in rows if len(row) == len(_QUEUE_FIELDS)]
        if len(whole) < sum(len(row) > 1 for row in rows):
            raise SourceError(f"{self.name}: squeue gave fields of another number than were asked for: {rows[0][:3]}")
        jobs, warnings = jobs_frame(list(_QUEUE_FIELDS.values()), whole, self.name, datetime.now(UTC))
        self.warnings += warnings
        return jobs

    def _completed(self) -> pl.DataFrame:
        if not self._jobcomp:
            self.warnings.append(
                f"{self.name}: accounting is off: jobs are known only while the controller remembers them (MinJobAge); "
                f"set clusters.{self.name}.jobs_path to the job completion file"
            )
            return empty_jobs()
        try:
            text = Path(self._jobcomp).read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise SourceError(f"{self.name}: jobs_path {self._jobcomp}: {error.strerror}") from error
        return parse_jobcomp(text, self.name, datetime.now(UTC))

    def _nodes(self) -> pl.DataFrame:
        text = self.commands.run("scontrol", "--oneliner", "show", "node")
        if time.monotonic() - self._topology_at >= _TOPOLOGY_S:
            self._topology_at = time.monotonic()
            try:
                self._topology = parse_topology(self.commands.run("scontrol", "--oneliner", "show", "topology"))
            except SourceError as error:  # "no topology information available"
                self.warnings.append(str(error))
        return parse_nodes(text, self._topology)

    def check(self) -> list[Finding]:
        """Commands, controller, accounting, GPUs, clocks."""
        try:
            config = self.commands.run("scontrol", "show", "config")
            at = datetime.now(UTC).timestamp()
            nodes = self._nodes()
        except SourceError as error:
            return [("reachable", False, str(error))]
        settings = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", config, re.MULTILINE))
        findings: list[Finding] = [
            ("reachable", True, f"Slurm {settings.get('SLURM_VERSION', '?')}, {len(nodes)} nodes")
        ]
        stamp = re.search(r"as of (\d+)", config)
        if stamp:
            skew = abs(at - int(stamp[1]))
            fine = skew <= _MAX_SKEW_S
            findings.append(
                ("clock", fine, f"the controller's clock differs by {skew:.0f} s" + ("" if fine else ": run NTP"))
            )
        gpus = int(nodes["gpus"].sum())
        findings.append(
            ("gpus", gpus > 0, f"{gpus} GPUs" if gpus else "no node has Gres=gpu: set it, or give an inventory")
        )
        findings += self._accounting(settings)
        return findings

    def _accounting(self, settings: dict[str, str]) -> Iterable[Finding]:
        if not settings.get("AccountingStorageType", "").endswith("slurmdbd"):
            told = f"job history comes from {self._jobcomp}" if self._jobcomp else "set jobs_path to the jobcomp file"
            yield ("accounting", bool(self._jobcomp), f"accounting is off: {told}")
            return
        now = datetime.now(UTC)
        try:
            jobs = self._sacct(now - timedelta(days=1), now)
        except SourceError as error:
            yield ("accounting", False, f"{error}: has this user the right to see all jobs?")
            return
        yield ("accounting", True, f"{len(jobs)} jobs within a day")
        counted = "gres/gpu" in settings.get("AccountingStorageTRES", "")
        advice = (
            "GPUs are counted" if counted else "add gres/gpu to AccountingStorageTRES: jobs show no GPUs without it"
        )
        yield ("tres", counted, advice)


def _ranges(start: datetime, end: datetime) -> list[tuple[datetime, datetime]]:
    ranges = []
    while start < end:
        ranges.append((start, min(end, start + _LONGEST_RANGE)))
        start = ranges[-1][1]
    return ranges or [(start, end)]


def _laid_over(known: pl.DataFrame, queue: pl.DataFrame) -> pl.DataFrame:
    key = ["job_id", "submit_time"]
    asked = ("cpus", "gpus", "memory_mib", "nodes", "time_limit_s", "name", "user", "account")
    told = known.select(*key, *asked).with_columns(
        pl.when(pl.col("gpus") > 0).then(pl.col("gpus"))  # GPUs need not be counted by the database
    )
    newer = queue.join(told, on=key, how="left", suffix="_asked").with_columns(
        pl.coalesce(f"{name}_asked", name).alias(name) for name in asked
    )
    rest = known.join(queue, on=key, how="anti")
    return pl.concat([rest, newer.select(known.columns)]).sort("submit_time", "job_id")

"""Jobs and nodes from a real Slurm: through its commands (sacct, squeue, scontrol), or through slurmrestd.

Here belongs what is asked for what. The commands stand in `slurm_reader.py`, the REST interface in `slurmrestd.py`,
what the output means in `sacct.py` and `slurm_text.py`, how the queue's word is laid over the database's in
`slurm_overlay.py`, limits and policies in `slurm_policy.py`. Text output only: `--json` is not built into every Slurm.
Where accounting is off, jobs come from the controller's memory and the job completion file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipelines.sources import Finding, LiveJobs, SourceError
from pipelines.sources.inventory import complete, nodes_frame, read_inventory
from pipelines.sources.job_states import changed_states, job_states, no_states
from pipelines.sources.sacct import LIVE_STATES, empty_jobs
from pipelines.sources.sacct_attempts import count_restarts
from pipelines.sources.sacct_file import overlapping
from pipelines.sources.slurm_budget import Budget
from pipelines.sources.slurm_commands import Commands
from pipelines.sources.slurm_log import PreemptionLog, with_preemptors
from pipelines.sources.slurm_overlay import laid_over
from pipelines.sources.slurm_reader import CommandReader, Reader
from pipelines.sources.slurm_text import parse_jobcomp
from pipelines.words import counted

if TYPE_CHECKING:
    from pipelines.settings import Cluster

__all__ = ["Commands", "SlurmSource", "build_slurm", "slurm_budget"]

_NO_ACCOUNTING = "accounting storage is disabled"
_MAX_SKEW_S = 5.0


class SlurmSource:
    """Jobs and nodes of one Slurm cluster.

    Args:
        name: Name of the cluster.
        commands: Its client commands.
        reader: Asks instead of the commands, as slurmrestd's; None: the commands.
        inventory: CSV of nodes that completes what Slurm says; empty: none.
        jobcomp: Job completion file (`jobcomp/filetxt`), read when accounting is off; empty: none.
        ctld_log: slurmctld's log, which tells who preempted whom; empty: that stays unknown.
    """

    def __init__(
        self,
        name: str,
        commands: Commands,
        reader: Reader | None = None,
        *,
        inventory: str = "",
        jobcomp: str = "",
        ctld_log: str = "",
    ) -> None:
        self.name, self.commands = name, commands
        self.reader: Reader = reader or CommandReader(name, commands)
        self.warnings: list[str] = []
        self._inventory = read_inventory(inventory)
        self._jobcomp = jobcomp
        self._log = PreemptionLog(name, ctld_log) if ctld_log else None
        self._states = no_states()
        self._lock = threading.Lock()

    def fetch_jobs(self, start: datetime, end: datetime) -> pl.DataFrame:
        """Columns of `raw_jobs` of the jobs that were submitted, ran or ended in [start, end), every attempt a row.

        The queue's word is laid over the database's, which lags: reasons, planned starts, jobs that are not yet
        eligible. What a job asked for stays the database's.

        Raises:
            SourceError: Slurm did not answer.
        """
        with self._lock:
            self._begin()
            try:
                known = self.reader.history(start, end)
            except SourceError as error:
                if _NO_ACCOUNTING not in str(error).lower():
                    raise
                known = self._completed()
            # In this order: what the queue says is newer than what the database said.
            queue = self.reader.queue().drop("priority")
            jobs = self._with_preemptors(count_restarts(laid_over(known, queue)))
            self._end()
        return overlapping(jobs, start, end)

    def live(self) -> LiveJobs:
        """Pending and running jobs, what changed of their states since the last call, and the nodes.

        Raises:
            SourceError: Slurm did not answer.
        """
        with self._lock:
            self._begin()
            queue = self.reader.queue().filter(pl.col("state").is_in(LIVE_STATES))
            nodes = complete(self.reader.nodes(), self._inventory).sort("node")
            seen = job_states(queue)
            changed = changed_states(self._states, seen)
            # Of jobs that still wait or run the last told state is kept, of the others none.
            told = pl.concat([self._states, changed]).unique("job_id", keep="last", maintain_order=True)
            self._states = told.join(seen, on="job_id", how="semi")
            self._end()
            live = nodes_frame(nodes, self.name, datetime.now(UTC))
            return LiveJobs(queue.drop("priority"), live, states=changed, warnings=list(self.warnings))

    def _begin(self) -> None:
        self.warnings, self.reader.warnings, self.commands.warnings = [], [], []

    def _end(self) -> None:
        self.warnings = list(dict.fromkeys([*self.warnings, *self.reader.warnings, *self.commands.warnings]))

    def _with_preemptors(self, jobs: pl.DataFrame) -> pl.DataFrame:
        if self._log is None:
            return jobs
        try:
            return with_preemptors(jobs, self._log.read())
        except SourceError as error:  # the log is an extra
            self.warnings.append(str(error))
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
        jobs, warnings = parse_jobcomp(text, self.name, datetime.now(UTC))
        self.warnings += warnings
        return jobs

    def check(self) -> list[Finding]:
        """Commands, controller, accounting, GPUs, clocks, log."""
        text, asked_at, settings = "", datetime.now(UTC), None
        try:
            if isinstance(self.reader, CommandReader):
                text, asked_at = self.commands.ask("scontrol", "show", "config")
                settings = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
            nodes = self.reader.nodes()
            about = f"Slurm {settings.get('SLURM_VERSION', '?')}" if settings else self.reader.about()
        except SourceError as error:
            return [("reachable", False, str(error))]
        findings: list[Finding] = [("reachable", True, f"{about}, {counted(len(nodes), 'node')}")]
        stamp = re.search(r"as of (\d+)", text)
        if stamp:
            skew = abs(asked_at.timestamp() - int(stamp[1]))
            fine = skew <= _MAX_SKEW_S
            findings.append(
                ("clock", fine, f"the controller's clock differs by {skew:.0f} s" + ("" if fine else ": run NTP"))
            )
        gpus = int(nodes["gpus"].sum())
        findings.append(
            ("gpus", gpus > 0, counted(gpus, "GPU") if gpus else "no node has Gres=gpu: set it, or give an inventory")
        )
        findings += self._accounting(settings)
        if self._log is not None:
            try:
                findings.append(("preemptions", True, f"{len(self._log.read())} in {self._log.path}"))
            except SourceError as error:
                findings.append(("preemptions", False, str(error)))
        return findings

    def close(self) -> None:
        """Nothing is open between questions."""

    def _accounting(self, settings: dict[str, str] | None) -> Iterable[Finding]:
        if settings is not None and not settings.get("AccountingStorageType", "").endswith("slurmdbd"):
            told = f"job history comes from {self._jobcomp}" if self._jobcomp else "set jobs_path to the jobcomp file"
            yield ("accounting", bool(self._jobcomp), f"accounting is off: {told}")
            return
        now = datetime.now(UTC)
        try:
            jobs = self.reader.history(now - timedelta(days=1), now)
        except SourceError as error:
            yield ("accounting", False, f"{error}: has this user the right to see all jobs?")
            return
        yield ("accounting", True, f"{counted(len(jobs), 'job')} within a day")
        if settings is None:  # slurmrestd does not tell
            return
        has_gpus = "gres/gpu" in settings.get("AccountingStorageTRES", "")
        advice = (
            "GPUs are counted" if has_gpus else "add gres/gpu to AccountingStorageTRES: jobs show no GPUs without it"
        )
        yield ("tres", has_gpus, advice)


def build_slurm(name: str, cluster: Cluster, state: Path) -> SlurmSource:
    """The source that a cluster's settings ask for.

    Args:
        name: Name of the cluster.
        cluster: Its settings.
        state: State folder: ledger and shared answers lie in it.

    Raises:
        SourceError: The inventory cannot be read, or the address of slurmrestd is none.
    """
    budget = slurm_budget(name, cluster, state)
    commands = Commands(name, cluster.slurm_conf, cluster.slurm_bin, cluster.slurm_timeout_s, budget)
    reader = None
    if cluster.slurm_rest_url:
        from pipelines.sources.slurmrestd import RestReader

        reader = RestReader(
            name,
            cluster.slurm_rest_url,
            user=cluster.slurm_rest_user,
            token_file=cluster.slurm_rest_token_file,
            timeout_s=cluster.slurm_timeout_s,
            budget=budget,
        )
    return SlurmSource(
        name,
        commands,
        reader,
        inventory=cluster.inventory,
        jobcomp=cluster.jobs_path,
        ctld_log=cluster.slurm_ctld_log,
    )


def slurm_budget(name: str, cluster: Cluster, state: Path) -> Budget:
    """The budget that all processes which read this cluster share; a question waits its turn for two time-outs."""
    return Budget(name, state / "slurm" / name, cluster.slurm_rpcs_per_minute, 2 * cluster.slurm_timeout_s)

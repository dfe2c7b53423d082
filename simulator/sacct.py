"""The text that `sacct -P` would print of the simulated cluster's jobs (with SLURM_TIME_FORMAT=%s).

One row per job, a header line, `|` between fields. Reading such text is the business of `pipelines/sources`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.jobs import Job

if TYPE_CHECKING:
    from simulator.cluster import SimulatedCluster

FIELDS = (
    "JobID", "JobIDRaw", "Cluster", "User", "Account", "Partition", "Submit", "Eligible", "Start", "End",
    "ElapsedRaw", "State", "ExitCode", "NNodes", "NCPUS", "ReqCPUS", "ReqMem", "ReqTRES", "AllocTRES", "TimelimitRaw",
    "NodeList", "Reason", "Planned", "PlannedStart", "JobName",
)  # fmt: skip
HEADER = "|".join(FIELDS) + "\n"
_EXIT = {"FAILED": "1:0", "OUT_OF_MEMORY": "0:125", "TIMEOUT": "0:0", "CANCELLED": "0:15", "NODE_FAIL": "1:0"}


def compress_hostlist(numbers: tuple[int, ...]) -> str:
    """Node numbers (from 0) as Slurm prints them: n3, n[1-3,5]."""
    if not numbers:
        return "None assigned"
    ranges: list[list[int]] = []
    for number in sorted(n + 1 for n in numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f"n{ranges[0][0]}"
    return "n[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges) + "]"


def _time(value: float | None, missing: str) -> str:
    return missing if value is None else str(int(value))


def line(cluster: SimulatedCluster, job: Job) -> str:
    """One row of the text."""
    is_pending = job.state == "PENDING"
    tres = f"billing={job.cpus},cpu={job.cpus},gres/gpu={job.gpus},mem={job.memory_mib}M,node={job.nodes}"
    if job.end is not None:
        elapsed = int(job.end - job.start) if job.start is not None else 0
    else:
        elapsed = int(cluster.time - job.start) if job.start is not None else 0
    state = "CANCELLED by 1000" if job.state == "CANCELLED" else job.state
    job_id = f"{job.array_id}_{job.array_task}" if job.array_id is not None else job.job_id
    waited = (job.start if job.start is not None else job.end or cluster.time) - (job.eligible or job.submit)
    return "|".join(
        (
            job_id,
            job.job_id,
            cluster.name,
            job.user,
            job.account,
            job.queue,
            _time(job.submit, "Unknown"),
            _time(job.eligible, "Unknown"),
            _time(job.start, "None" if job.end is not None else "Unknown"),
            _time(job.end, "Unknown"),
            str(elapsed),
            state,
            _EXIT.get(job.state, "0:0"),
            str(job.nodes),
            str(job.cpus),
            str(job.cpus),
            f"{job.memory_mib}M",
            tres,
            "" if job.start is None else tres,
            "UNLIMITED" if job.limit_s is None else str(int(job.limit_s // 60)),
            compress_hostlist(job.nodes_held),
            job.reason if is_pending else "None",
            str(max(0, int(waited))),
            _time(job.planned_start if is_pending else None, "Unknown"),
            job.name.replace("|", "_").replace("\n", " "),
        )
    )


class SacctText:
    """The whole text, made anew on each call; rows of ended jobs are made once.

    Args:
        cluster: Whose jobs.
        rows_max: About so many ended jobs are kept, the newest.
    """

    def __init__(self, cluster: SimulatedCluster, rows_max: int = 200_000) -> None:
        self.cluster = cluster
        self._chunk_rows = max(1, rows_max // 10)
        self._chunks: list[bytearray] = [bytearray()]
        self._rows = 0
        self._booked = 0

    def text(self) -> bytes:
        """Header, ended jobs in order of their end, then running and pending ones with planned starts."""
        cluster = self.cluster
        for job in cluster.ended[self._booked :]:
            if self._rows == self._chunk_rows:
                self._chunks = [*self._chunks[-9:], bytearray()]
                self._rows = 0
            self._chunks[-1] += line(cluster, job).encode() + b"\n"
            self._rows += 1
        self._booked = len(cluster.ended)
        cluster.scheduler.plan(cluster.time)
        live = "".join(line(cluster, job) + "\n" for job in cluster.jobs.values())
        return b"".join((HEADER.encode(), *self._chunks, live.encode()))

"""Which GPUs each running job holds, as `scontrol -d show job` tells: node and index, while it runs.

Users choose the text of names and comments, and Slurm prints it as it is: a record in which a field of Slurm's own
stands twice, or is missing, is left out, for nobody can tell which is true.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import polars as pl

from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.slurm_policy import Runs

HELD_SCHEMA = {
    "node": pl.String, "gpu_index": pl.Int32, "job_id": pl.String, "start_time": pl.Datetime("us", "UTC"),
    "is_shared": pl.Boolean,
}  # fmt: skip
_RECORD = re.compile(r"^(?=JobId=\d+ )", re.MULTILINE)
# Fields that stand once in every record, and between which the nodes are listed.
_ONCE = (" JobState=", " StartTime=", " NodeList=", " CoreSpec=", " MinCPUsNode=", " OverSubscribe=")
_BODY = re.compile(r" CoreSpec=\S* (.*?) MinCPUsNode=", re.DOTALL)
_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S*(?: GRES(?:_IDX)?=(\S*))?")
_GPU = re.compile(r"\bgpu(?::[^:(),]+)?(?::\d+)?\(IDX:([\d,-]*)\)")
_PARTIAL = re.compile(r"\b(?:shard|mps)(?::[^(),]*)?\(([^)]*)\)")
_HELD = ("RUNNING", "SUSPENDED", "COMPLETING")
_MOST_INDEX = 127


def held_gpus(commands: Runs, cluster: str) -> tuple[pl.DataFrame, list[str]]:
    """GPUs that running jobs hold at this moment; one call.

    Args:
        commands: Slurm's client commands.
        cluster: Name of the cluster, for messages.

    Returns:
        Columns of `HELD_SCHEMA`, one row a GPU; and what was left out.

    Raises:
        SourceError: The command failed.
    """
    return parse_held(commands.run("scontrol", "--oneliner", "--details", "--all", "show", "job"), cluster)


def parse_held(text: str, cluster: str = "") -> tuple[pl.DataFrame, list[str]]:
    """GPUs of the jobs in `scontrol --oneliner --details show job`.

    Args:
        text: Output of the command, on one line a job; times as seconds since the epoch, or in UTC.
        cluster: Name of the cluster, for messages.

    Returns:
        As `held_gpus`.
    """
    rows: list[tuple[str, int, str, datetime, bool]] = []
    warnings: list[str] = []
    torn = False
    for record in _RECORD.split(text):
        job = re.match(r"JobId=(\d+) ", record)
        if job is None:
            continue
        counts = [record.count(name) for name in _ONCE]
        was_torn, torn = torn, min(counts) == 0
        if max(counts) > 1 or torn or was_torn:
            if " JobState=PENDING " not in record or torn:
                warnings.append(
                    f"{cluster}: job {job[1]}: text of its user looks like Slurm's own; its GPUs are left out"
                )
            continue
        state, start = _field(record, "JobState"), _time(_field(record, "StartTime"))
        if state not in _HELD or start is None:
            continue
        body = _BODY.search(record)
        for nodes, gres in _NODES.findall(body[1] if body else ""):
            is_shared = bool(_PARTIAL.search(gres))
            try:
                rows += [
                    (node, index, job[1], start, is_shared)
                    for node in expand_hostlist(nodes)
                    for index in _indices(gres)
                ]
            except (HostlistError, ValueError):
                warnings.append(f"{cluster}: job {job[1]}: {nodes[:60]} {gres[:60]} cannot be read")
    return pl.DataFrame(rows, schema=HELD_SCHEMA, orient="row").unique(maintain_order=True), warnings


def _field(record: str, name: str) -> str:
    found = re.search(rf" {name}=(\S*)", record)
    return found[1] if found else ""


def _indices(gres: str) -> list[int]:
    """`gpu:h100:4(IDX:0-1,5,7)`; of a shard or MPS share: `shard:2(0/8,2/8)` has index 1."""
    found: list[int] = []
    for body in _GPU.findall(gres):
        for part in filter(None, body.split(",")):
            low, _, high = part.partition("-")
            first, last = int(low), int(high or low)
            if not 0 <= first <= last <= _MOST_INDEX:
                raise ValueError(part)
            found += range(first, last + 1)
    for body in _PARTIAL.findall(gres):
        shares = body.split(",")
        found += [i for i, share in enumerate(shares[: _MOST_INDEX + 1]) if re.match(r"[1-9]\d*/", share)]
    return found


def _time(text: str) -> datetime | None:
    try:
        if text.isascii() and text.isdigit():
            return datetime.fromtimestamp(int(text), UTC)
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        return None

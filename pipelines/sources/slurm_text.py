"""Reads what Slurm prints about nodes and topology, and its job completion file.

Text in, frames out; running the commands stands in `slurm.py`, job fields in `sacct.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

import polars as pl

from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.inventory import NODES_SCHEMA
from pipelines.sources.sacct import jobs_frame

_JOBCOMP = re.compile(
    r"^JobId=(?P<JobIDRaw>\S+) UserId=(?P<User>.*?)\(\d+\) .*?Name=(?P<JobName>.*) JobState=(?P<State>\S+)"
    r" Partition=(?P<Partition>\S*) TimeLimit=(?P<Timelimit>\S+) StartTime=(?P<Start>\S+) EndTime=(?P<End>\S+)"
    r" NodeList=(?P<NodeList>\S*) NodeCnt=(?P<NNodes>\d+) ProcCnt=(?P<NCPUS>\d+) .*?"
    r"(?: Tres=(?P<AllocTRES>\S*))?(?: Account=(?P<Account>\S*))?(?: QOS=.*?)?"
    r" SubmitTime=(?P<Submit>\S+) EligibleTime=(?P<Eligible>\S+)(?:[^\n]* ExitCode=(?P<ExitCode>\d+:\d+))?",
    re.MULTILINE,
)
_NODE = {
    "node": re.compile(r"\bNodeName=(\S+)"),
    "state": re.compile(r"\bState=(\S+)"),
    "gres": re.compile(r"\bGres=(\S+)"),
    "tres": re.compile(r"\bCfgTRES=(\S+)"),
    "reason": re.compile(r"\bReason=(.*?)(?: \[[^\]]*@[^\]]*\])?\s*(?:Comment=.*)?$"),
}


def parse_jobcomp(text: str, cluster: str, observed_at: datetime) -> tuple[pl.DataFrame, list[str]]:
    """Jobs of a `jobcomp/filetxt` file, whose times are in this host's time zone.

    Args:
        text: The file.
        cluster: Name of the cluster.
        observed_at: When it was read.

    Returns:
        Columns of `raw_jobs`; `gpus` is null where the file names none. And what was passed over.
    """
    rows = [match.groupdict() for match in _JOBCOMP.finditer(text)]
    columns = list(_JOBCOMP.groupindex)
    for row in rows:
        for name in ("Start", "End", "Submit", "Eligible"):
            try:
                row[name] = str(int(datetime.fromisoformat(row[name]).timestamp()))  # naive: local
            except ValueError:
                row[name] = "Unknown"
    jobs, warnings = jobs_frame(columns, [[row[name] or "" for name in columns] for row in rows], cluster, observed_at)
    # Without accounting GPUs are no TRES: that none is named does not mean that there was none.
    jobs = jobs.with_columns(pl.when(pl.col("gpus") > 0).then(pl.col("gpus")))
    lost = text.count("\nJobId=") + text.startswith("JobId=") - len(rows)
    if lost > 0:
        warnings.append(f"{lost} records of the job completion file cannot be read")
    return jobs, warnings


def parse_nodes(text: str, topology: dict[str, tuple[str, str]]) -> pl.DataFrame:
    """Nodes of `scontrol --oneliner show node`.

    Args:
        text: Its output.
        topology: Rack and pod of each node; empty text where there is none.

    Returns:
        `node`, `rack`, `pod`, `gpu_model`, `gpus`, `state`, `reason`. States are Slurm's words, flags after `+`, as
        `IDLE+DRAIN`; a node that does not answer has `+NOT_RESPONDING`.
    """
    rows = []
    for line in text.splitlines():
        found = {name: match[1] for name, pattern in _NODE.items() if (match := pattern.search(line))}
        if "node" not in found:
            continue
        rows.append(node_row(found, topology))
    return pl.DataFrame(rows, schema=NODES_SCHEMA, orient="row")


def node_row(found: Mapping[str, str], topology: Mapping[str, tuple[str, str]]) -> tuple:
    """A row of `NODES_SCHEMA`.

    Args:
        found: `node`, and `state`, `gres`, `tres` and `reason` where they are told.
        topology: As for `parse_nodes`.
    """
    model, gpus = _gpus(found.get("gres", ""), found.get("tres", ""))
    state = found.get("state", "UNKNOWN")
    if "*" in state:
        state = state.replace("*", "") + "+NOT_RESPONDING"
    rack, pod = topology.get(found["node"], ("", ""))
    state = re.sub(r"[~#!%$@^-]", "", state)
    return found["node"], rack or None, pod or None, model, gpus, state, found.get("reason")


def _gpus(gres: str, tres: str) -> tuple[str | None, int]:
    """Model and number: `gpu:h100:8(S:0-1)`, `gpu:8`; the typed count of TRES where Gres says nothing."""
    parts = re.findall(r"\bgpu(?::([A-Za-z][^:,()]*))?(?::(\d+))?", gres)
    if parts:
        return next((name for name, _ in parts if name), None), sum(int(count or 1) for _, count in parts)
    typed = re.findall(r"gres/gpu(?::([^=,]+))?=(\d+)", tres)
    model = next((name for name, _ in typed if name), None)
    untyped = [int(count) for name, count in typed if not name]
    return model, untyped[0] if untyped else sum(int(count) for _, count in typed)


def parse_topology(text: str) -> dict[str, tuple[str, str]]:
    """Rack and pod of each node from `scontrol --oneliner show topology`.

    A rack is a switch of the lowest level or a block, its pod the switch of the next level above it.
    """
    racks: dict[str, str] = {}
    pods: dict[str, str] = {}
    for line in text.splitlines():
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        name = fields.get("SwitchName") or fields.get("BlockName")
        level = fields.get("Level", "0") if "SwitchName" in fields else "0"
        if not name or level not in ("0", "1"):
            continue
        try:
            nodes = expand_hostlist(fields.get("Nodes", ""))
        except HostlistError:
            continue
        (racks if level == "0" else pods).update(dict.fromkeys(nodes, name))
    return {node: (racks.get(node, ""), pods.get(node, "")) for node in {**racks, **pods}}

"""Reads what Slurm prints about limits: partitions, QOS, associations.

Text in, rows of `core_policies` out: kind, name, metric, value, detail. A limit that is not set has no row. Metrics are
named by scope and quantity, as `max_gpus_per_user`, `grp_nodes`, `max_time_s`; a typed GPU follows a colon, as
`grp_gpus:h100`. Running the commands stands in `slurm_policy.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# Asked of sacctmgr, which knows no delimiter but '|': the two that hold free names come last.
QOS_FIELDS = (
    "Priority", "GraceTime", "PreemptMode", "Flags", "UsageFactor", "GrpTRES", "GrpJobs", "GrpSubmit", "GrpWall",
    "MaxTRES", "MaxTRESPerNode", "MaxWall", "MaxTRESPU", "MaxJobsPU", "MaxSubmitPU", "MaxTRESPA", "MaxJobsPA",
    "MaxSubmitPA", "MinTRES", "Preempt", "Name",
)  # fmt: skip
_QUANTITIES = {"cpu": "cpus", "mem": "memory_mib", "node": "nodes", "gres/gpu": "gpus"}
_UNITS_MIB = {"": 1.0, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
_UNSET = {"", "n", "n/a", "(null)", "none", "unlimited", "infinite", "no", "all", "not_set", "partition_limit"}
_DURATION = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")
_MOST = 2.0**53
# Field → (prefix, suffix) of the metrics of its TRES.
_TRES = {
    "GrpTRES": ("grp_", ""), "MaxTRES": ("max_", "_per_job"), "MaxTRESPJ": ("max_", "_per_job"),
    "MaxTRESPerNode": ("max_", "_per_node"), "MaxTRESPN": ("max_", "_per_node"), "MaxTRESPU": ("max_", "_per_user"),
    "MaxTRESPA": ("max_", "_per_account"), "MinTRES": ("min_", "_per_job"), "MinTRESPJ": ("min_", "_per_job"),
}  # fmt: skip
_COUNTS = {
    "Priority": "priority", "UsageFactor": "usage_factor", "GrpJobs": "grp_jobs", "GrpSubmit": "grp_submit_jobs",
    "GrpSubmitJobs": "grp_submit_jobs", "MaxJobs": "max_jobs", "MaxSubmitJobs": "max_submit_jobs",
    "MaxJobsPU": "max_jobs_per_user", "MaxSubmitPU": "max_submit_jobs_per_user",
    "MaxSubmitJobsPU": "max_submit_jobs_per_user", "MaxJobsPA": "max_jobs_per_account",
    "MaxSubmitPA": "max_submit_jobs_per_account", "MaxSubmitJobsPA": "max_submit_jobs_per_account",
    "MinPrioThresh": "min_priority",
}  # fmt: skip
_PARTITION_COUNTS = {
    "MaxNodes": "max_nodes", "MinNodes": "min_nodes", "MaxCPUsPerNode": "max_cpus_per_node",
    "PriorityTier": "priority_tier", "PriorityJobFactor": "priority_job_factor", "GraceTime": "grace_time_s",
    "TotalNodes": "total_nodes", "TotalCPUs": "total_cpus",
}  # fmt: skip
_PARTITION_TEXTS = {
    "AllowAccounts": "allow_accounts", "DenyAccounts": "deny_accounts", "AllowQos": "allow_qos", "DenyQos": "deny_qos",
    "AllowGroups": "allow_groups", "QoS": "qos", "OverSubscribe": "oversubscribe", "Nodes": "nodes",
}  # fmt: skip
_PARTITION_FLAGS = {"Default": "is_default", "RootOnly": "is_root_only", "ReqResv": "is_reservation_only"}
_ASSOCIATION = re.compile(
    r"ClusterName=(?P<cluster>\S*) Account=(?P<account>.*?) UserName=(?P<user>.*?)(?:\(\d+\))? "
    r"Partition=(?P<partition>\S*) Priority=(?P<priority>\d+) ID=\d+ (?P<rest>.*)"
)
_QOS = re.compile(r"QOS=(?P<name>.*?)\(\d+\) UsageRaw=\S* (?P<rest>.*)")
_SHARES = re.compile(r"SharesRaw/Norm/Level/Factor=(\d+)/([\d.]+)/\d+/([\d.]+)")
_PER = re.compile(r"\b(Max(?:TRES|Jobs|SubmitJobs)P[AU])=([^\s}]*)")


class Policy(NamedTuple):
    """One setting: a number, or a text in `detail`."""

    kind: str
    name: str
    metric: str
    value: float | None = None
    detail: str | None = None


def fields_of(record: str) -> dict[str, str]:
    """`Key=value` parts of a record; the first of a key counts, for free text comes last."""
    found: dict[str, str] = {}
    for part in record.split():
        key, equals, value = part.partition("=")
        if equals:
            found.setdefault(key, value)
    return found


def text_of(value: str | None) -> str | None:
    """The value, unless it says that there is none."""
    return None if value is None or value.lower() in _UNSET else value


def number(text: str | None) -> float | None:
    """A limit: `16`, `16(3)` with what is in use; None for `N(0)`, UNLIMITED, blanks and what is no number."""
    head = (text or "").partition("(")[0].strip()
    if not re.fullmatch(r"\d{1,18}(?:\.\d{1,9})?", head):
        return None
    value = float(head)
    return value if value < _MOST and value not in (2.0**32 - 1, 2.0**32 - 2) else None


def duration_s(text: str | None) -> float | None:
    """`[D-]HH:MM:SS`, `D-HH`, `MM:SS` or whole minutes, in seconds; None when unlimited or unset."""
    found = _DURATION.fullmatch((text or "").partition("(")[0].partition(".")[0].strip())
    if not found:
        return None
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        seconds = days * 86_400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        seconds = (first or 0) * 3600 + (second or 0) * 60 + third
    else:
        seconds = (first or 0) * 60 + (second or 0)
    return float(seconds)


def tres(text: str | None) -> Iterator[tuple[str, float]]:
    """Quantity and limit of each TRES that has one: `cpu=4,mem=10G,gres/gpu:h100=8(2)`."""
    for part in (text or "").split(","):
        key, _, value = part.partition("=")
        base, colon, kind = key.strip().partition(":")
        head = value.partition("(")[0].strip()
        unit = head[-1:].upper() if key.startswith("mem") and head[-1:].isalpha() else ""
        limit = number(head[:-1] if unit else head)
        if limit is not None and base and unit in _UNITS_MIB:
            yield _QUANTITIES.get(base, base.replace("/", "_")) + colon + kind, limit * _UNITS_MIB[unit]


def partitions(text: str) -> list[Policy]:
    """Policies of `scontrol --oneliner show partition`."""
    rows: list[Policy] = []
    for line in text.splitlines():
        fields = fields_of(line)
        name = fields.get("PartitionName")
        if not name or not line.startswith("PartitionName="):
            continue

        def add(metric: str, value: float | None = None, detail: str | None = None, name: str = name) -> None:
            if value is not None or detail is not None:
                rows.append(Policy("partition", name, metric, value, detail))

        add("max_time_s", duration_s(fields.get("MaxTime")))
        add("default_time_s", duration_s(fields.get("DefaultTime")))
        for field, metric in _PARTITION_COUNTS.items():
            add(metric, number(fields.get(field)))
        for field, metric in _PARTITION_TEXTS.items():
            add(metric, detail=text_of(fields.get(field)))
        for field, metric in _PARTITION_FLAGS.items():
            if field in fields:
                add(metric, float(fields[field] == "YES"))
        for quantity, limit in tres(fields.get("TRES")):
            if quantity.startswith("gpus"):
                add(quantity, limit)
        add("preempt_mode", detail=fields.get("PreemptMode"))
        if "State" in fields:
            add("is_up", float(fields["State"] == "UP"), fields["State"])
    return rows


def qos(text: str) -> tuple[list[Policy], int]:
    """Policies of `sacctmgr --parsable2 --noheader show qos` with `QOS_FIELDS`, and how many lines were none."""
    rows: list[Policy] = []
    odd = 0
    for line in text.splitlines():
        values = line.split("|", len(QOS_FIELDS) - 1)
        if len(values) < len(QOS_FIELDS) or not values[-1]:
            odd += bool(line.strip())
            continue
        fields = dict(zip(QOS_FIELDS, values, strict=True))
        name = fields.pop("Name")
        rows += _limits("qos", name, fields)
        grace = duration_s(fields["GraceTime"])
        texts = {"preempt": fields["Preempt"], "flags": fields["Flags"], "preempt_mode": fields["PreemptMode"].upper()}
        if grace:
            rows.append(Policy("qos", name, "grace_time_s", grace))
        rows += [Policy("qos", name, metric, None, told) for metric, told in texts.items() if text_of(told)]
    return rows, odd


def assoc_mgr(text: str) -> list[Policy]:
    """Policies of associations and QOS from `scontrol --oneliner show assoc_mgr`.

    An association is named `account`, `account/user` or `account/user/partition`. Limits of a QOS on each user or
    account are known only while one is in use; `sacctmgr` knows them always.
    """
    rows: list[Policy] = []
    for line in text.splitlines():
        if found := _ASSOCIATION.match(line):
            parts = [found["account"], found["user"], found["partition"]]
            while parts and not parts[-1]:
                parts.pop()
            name = "/".join(parts)
            rows += _limits("association", name, {"Priority": found["priority"], **fields_of(found["rest"])})
            if shares := _SHARES.search(found["rest"]):
                told = zip(("shares_raw", "shares_norm", "fairshare"), shares.groups(), strict=True)
                rows += [Policy("association", name, metric, value) for metric, text_ in told
                         if (value := number(text_)) is not None]  # fmt: skip
        elif found := _QOS.match(line):
            own, _, each = found["rest"].partition(" Account Limits=")
            fields = fields_of(own)
            for key, value in _PER.findall(each):
                fields.setdefault(key, value)
            rows += _limits("qos", found["name"], fields)
            if mode := text_of(fields.get("PreemptMode")):
                rows.append(Policy("qos", found["name"], "preempt_mode", None, mode.upper()))
    return rows


def _limits(kind: str, name: str, fields: dict[str, str]) -> Iterator[Policy]:
    """Counts, TRES and times of a record, under whichever of their names it has."""
    for field, metric in _COUNTS.items():
        if (value := number(fields.get(field))) is not None:
            yield Policy(kind, name, metric, value)
    for field, (prefix, suffix) in _TRES.items():
        for quantity, limit in tres(fields.get(field)):
            base, colon, typed = quantity.partition(":")
            yield Policy(kind, name, f"{prefix}{base}{suffix}{colon}{typed}", limit)
    for field, metric in (("MaxWall", "max_time_s"), ("MaxWallPJ", "max_time_s"), ("GrpWall", "grp_wall_s")):
        if (seconds := duration_s(fields.get(field))) is not None:
            yield Policy(kind, name, metric, seconds)

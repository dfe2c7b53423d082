"""What a Slurm allows and plans: reservations, limits, priorities, topology, in six commands.

`scontrol show partition` and `show reservation` must answer; what this user may not see, or what the site does not
run (accounting, multifactor priorities, topology), is left out with a warning. Slurm's texts about limits are read in
`slurm_limits.py`, about topology in `places.py`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import polars as pl

from features.vocabulary import schema
from pipelines.sources import SourceError, empty_frame
from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.places import topology_places
from pipelines.sources.slurm_limits import QOS_FIELDS, Policy, assoc_mgr, fields_of, partitions, qos, text_of
from pipelines.words import counted

# Letter of sprio's format → column; all are numbers but TRES, which comes last.
_SPRIO = {
    "i": "job_id", "Y": "priority", "A": "age", "B": "association", "F": "fairshare", "J": "job_size",
    "P": "partition", "Q": "qos", "S": "site", "N": "nice", "T": "tres",
}  # fmt: skip
# Headings of `sprio -l` → column. PARTITION stands there twice: the name first, then the weight.
_LONG = {
    "PRIORITY": "priority", "SITE": "site", "AGE": "age", "ASSOC": "association", "FAIRSHARE": "fairshare",
    "JOBSIZE": "job_size", "QOS": "qos", "NICE": "nice",
}  # fmt: skip
_RESERVATION = re.compile(r"ReservationName=(?P<name>.*?) StartTime=(?P<start>\S+) EndTime=(?P<end>\S+)(?P<rest> .*|$)")
_FIRST, _LAST = datetime(1990, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
# What commands say when a site does not run a thing: nothing to warn of.
_NOT_RUN = ("priority plugin", "priority/multifactor", "no topology information", "accounting storage is disabled",
            "accounting_storage/none", "not running a database")  # fmt: skip
PRIORITY_SCHEMA = {name: pl.String if name in ("job_id", "tres") else pl.Float64 for name in _SPRIO.values()}


class Runs(Protocol):
    """Slurm's commands, as `slurm.Commands`."""

    def run(self, program: str, *arguments: str) -> str: ...


class SlurmPolicy(NamedTuple):
    """What was read.

    Attributes:
        reservations: Rows of `core_reservations`.
        policies: Rows of `core_policies`.
        priorities: `job_id`, `priority` and its parts, of pending jobs.
        places: `node`, `rack`, `pod`, `nvlink_domain`.
        whole: Kinds of policy that were read whole: what is missing of them is no longer set.
        warnings: What was left out, and why.
    """

    reservations: pl.DataFrame
    policies: pl.DataFrame
    priorities: pl.DataFrame
    places: pl.DataFrame
    whole: frozenset[str]
    warnings: list[str]


def read_policy(commands: Runs, cluster: str, at: datetime) -> SlurmPolicy:
    """Ask a Slurm for its reservations, limits, priorities and topology.

    Args:
        commands: Slurm's client commands; six calls.
        cluster: Name of the cluster.
        at: Present time, UTC.

    Raises:
        SourceError: Partitions or reservations cannot be read.
    """
    warnings: list[str] = []

    def tried(program: str, *arguments: str) -> str:
        try:
            return commands.run(program, *arguments)
        except SourceError as error:
            if not any(words in str(error).lower() for words in _NOT_RUN):
                warnings.append(f"{error}; left out")
            return ""

    reservations, odd = parse_reservations(
        commands.run("scontrol", "--oneliner", "--all", "show", "reservation"), cluster, at
    )
    rows = partitions(commands.run("scontrol", "--oneliner", "--all", "show", "partition"))
    limits = tried("scontrol", "--oneliner", "show", "assoc_mgr", "flags=assoc,qos")
    rows += assoc_mgr(limits)
    told = tried("sacctmgr", "--parsable2", "--noheader", "show", "qos", f"format={','.join(QOS_FIELDS)}")
    known, unread = qos(told)
    if unread:
        warnings.append(f"{cluster}: {counted(unread, 'line')} of sacctmgr show qos with another number of fields")
    priorities = parse_sprio(tried("sprio", "--noheader", "--format", "|".join(f"%{key}" for key in _SPRIO)))
    places = topology_places(tried("scontrol", "--oneliner", "show", "topology"))
    whole = {"partition"} | {kind for kind, text in (("association", limits), ("qos", told)) if text.strip()}
    return SlurmPolicy(
        reservations, _policies([*rows, *known], cluster, at), priorities, places, frozenset(whole), warnings + odd
    )


def _policies(rows: list[Policy], cluster: str, at: datetime) -> pl.DataFrame:
    types = schema("core_policies")
    frame = pl.DataFrame(rows, schema={name: types[name] for name in Policy._fields}, orient="row")
    return (
        frame.unique(["kind", "name", "metric"], keep="last", maintain_order=True)
        .with_columns(pl.lit(cluster).alias("cluster"), pl.lit(at).cast(types["observed_at"]).alias("observed_at"))
        .select(*types)
    )


def parse_reservations(text: str, cluster: str, at: datetime) -> tuple[pl.DataFrame, list[str]]:
    """Rows of `core_reservations` from `scontrol --oneliner show reservation`.

    A reservation whose flags have MAINT is a `maintenance`, any other a `reservation`.

    Args:
        text: Output of the command; times as seconds since the epoch, or in UTC.
        cluster: Name of the cluster.
        at: When it was read, UTC.

    Returns:
        The rows, and what was passed over.
    """
    rows, warnings = [], []
    for line in text.splitlines():
        if not (found := _RESERVATION.match(line)):
            continue
        name, fields = found["name"], fields_of(found["rest"])
        start = _time(found["start"])
        if start is None:
            warnings.append(f"{cluster}: reservation {name[:60]!r} has no start time and is left out")
            continue
        try:
            nodes = ",".join(expand_hostlist(fields.get("Nodes", ""))) or None
        except HostlistError as error:
            warnings.append(f"{cluster}: reservation {name[:60]!r}: {error}")
            nodes = None
        flags = text_of(fields.get("Flags"))
        is_maintenance = "MAINT" in (flags or "").split(",")
        rows.append({
            "observed_at": at, "cluster": cluster, "name": name, "start_time": start, "end_time": _time(found["end"]),
            "kind": "maintenance" if is_maintenance else "reservation", "node_list": nodes, "flags": flags,
            "users": text_of(fields.get("Users")), "accounts": text_of(fields.get("Accounts")),
        })  # fmt: skip
    if not rows:
        return empty_frame("core_reservations"), warnings
    types = schema("core_reservations")
    return pl.DataFrame(rows, schema={name: types[name] for name in rows[0]}).select(*types), warnings


def parse_sprio(text: str) -> pl.DataFrame:
    """Priorities of pending jobs: the fields that `read_policy` asks for, or the table of `sprio --long`.

    Returns:
        `job_id`, `priority` and its weighted parts; null where the text has none. A job in several partitions has its
        highest priority.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    heading = lines[0].split() if lines and "JOBID" in lines[0] else []
    rows = []
    for line in lines[1:] if heading else lines:
        values = _long_row(heading, line.split()) if heading else _row(line)
        if values and re.fullmatch(r"\d+(?:_\S+)?", values.get("job_id", "")):
            rows.append({name: values.get(name) for name in PRIORITY_SCHEMA})
    frame = pl.DataFrame(rows, schema=dict.fromkeys(PRIORITY_SCHEMA, pl.String), orient="row")
    frame = frame.with_columns(
        pl.col(name).cast(dtype, strict=False) for name, dtype in PRIORITY_SCHEMA.items() if dtype == pl.Float64
    ).filter(pl.col("priority").is_not_null())
    return frame.sort("priority", maintain_order=True).unique("job_id", keep="last", maintain_order=True)


def _row(line: str) -> dict[str, str]:
    values = [value.strip() for value in line.split("|", len(_SPRIO) - 1)]
    return dict(zip(_SPRIO.values(), values, strict=True)) if len(values) == len(_SPRIO) else {}


def _long_row(heading: list[str], values: list[str]) -> dict[str, str]:
    # Names of partitions, users and accounts have no blanks; TRES may be missing at the end.
    if len(values) not in (len(heading), len(heading) - 1):
        return {}
    row = {"job_id": values[0]}
    for i, (name, value) in enumerate(zip(heading, values, strict=False)):
        if name == "PARTITION":
            row["partition"] = value if i > 1 else ""
        elif name == "QOSNAME":
            continue
        elif name in _LONG:
            row[_LONG[name]] = value
        elif name == "TRES":
            row["tres"] = value
    return row


def _time(text: str) -> datetime | None:
    try:
        at = (
            datetime.fromtimestamp(int(text), UTC)
            if text.isascii() and text.isdigit()
            else datetime.fromisoformat(text).replace(tzinfo=UTC)
        )
    except (ValueError, OverflowError, OSError):
        return None
    return at if _FIRST <= at <= _LAST else None

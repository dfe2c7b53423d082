"""Reads what Slurm prints about jobs: `sacct -P` text, and rows of `squeue` under the same field names.

Fields are found by the header, in any order and case; units, unset values, TRES spellings and states become registry
columns. What cannot be read becomes null. Running the commands stands in `slurm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import polars as pl

from features.vocabulary import JOB_COLUMNS, TIME, schema
from pipelines.sources.hostlist import HostlistError, expand_hostlist

# Asked of sacct; the free text comes last.
SACCT_FIELDS = (
    "JobIDRaw", "JobID", "User", "Account", "Partition", "Submit", "Eligible", "Start", "End", "State", "NNodes",
    "ReqCPUS", "NCPUS", "ReqMem", "ReqTRES", "AllocTRES", "TimelimitRaw", "Timelimit", "NodeList", "Reason", "JobName",
)  # fmt: skip
_FREE_TEXT = ("jobname", "name", "comment", "submitline", "workdir")
DELIMITERS = ("\x1f", "|", "^", "\t", ";", ",")

PENDING, RUNNING = "PENDING", "RUNNING"
STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", PENDING, "PREEMPTED",
    RUNNING, "REVOKED", "SUSPENDED", "TIMEOUT", "UNKNOWN",
)  # fmt: skip
# States that a job passes through, and what they mean for its nodes.
_STATE_OF = {
    "COMPLETING": RUNNING, "CONFIGURING": RUNNING, "RESIZING": RUNNING, "SIGNALING": RUNNING, "STAGE_OUT": RUNNING,
    "STOPPED": "SUSPENDED", "REQUEUED": PENDING, "REQUEUE_FED": PENDING, "REQUEUE_HOLD": PENDING,
    "RESV_DEL_HOLD": PENDING, "SPECIAL_EXIT": PENDING,
}  # fmt: skip
# Jobs that hold or wait for nodes.
LIVE_STATES = (PENDING, RUNNING, "SUSPENDED")

# Texts of GRES that count GPUs of one node: old sacct's, and squeue's where GPUs are no TRES (no accounting).
_PER_NODE = ("reqgres", "allocgres", "gres", "trespernode")
_UNSET = ("", "unknown", "none", "n/a", "(null)", "none assigned", "invalid", "(none)")
# A year outside of these is a unit misread or a field overflown.
_FIRST_TIME, _LAST_TIME = datetime(1990, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
_LAST_EPOCH_S = int(_LAST_TIME.timestamp())
_MAX_LIMIT_MIN = 2**32  # what Slurm can hold
_AHEAD = timedelta(days=1)
_UNITS_MIB = {"K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
# Memory per CPU is kept with the top bit set; some versions print it so.
_PER_CPU_32, _PER_CPU_64 = 2**31, 2**63


class SacctError(ValueError):
    """Text that is no sacct output. The message says what is missing."""


def jobs_schema() -> dict[str, pl.DataType | type[pl.DataType]]:
    """JOB_COLUMNS with their dtypes."""
    types = schema("raw_jobs")
    return {name: types[name] for name in JOB_COLUMNS}


def empty_jobs() -> pl.DataFrame:
    """A frame of no jobs."""
    return pl.DataFrame(schema=jobs_schema())


def parse_sacct(
    text: str, cluster: str, observed_at: datetime, delimiter: str | None = None, *, now: datetime | None = None
) -> tuple[pl.DataFrame, list[str]]:
    """Jobs of `sacct --parsable` or `--parsable2` text with a header.

    Args:
        text: The text; times in UTC or as seconds since the epoch (SLURM_TIME_FORMAT=%s).
        cluster: Name of the cluster, whatever the text says.
        observed_at: When the text was made.
        delimiter: Between fields; None: seen from the header.
        now: Jobs submitted more than a day after it are left out; None: `observed_at`.

    Returns:
        JOB_COLUMNS, one row a job and submission, steps left out; and what was passed over.

    Raises:
        SacctError: The first line is no header with JobID or JobIDRaw, State and Submit.
    """
    header, newline, body = text.lstrip("\ufeff").partition("\n")
    header = header.rstrip("\r")
    if delimiter is None:
        delimiter = max(DELIMITERS, key=header.count)
    ended = header.endswith(delimiter)  # --parsable: each record ends with the delimiter, so names may hold newlines
    columns = [name.strip() for name in header.removesuffix(delimiter).split(delimiter)]
    known = {name.lower() for name in columns}
    if not newline or not known & {"jobid", "jobidraw"} or not {"state", "submit"} <= known:
        raise SacctError(
            "no header of sacct with JobID, State and Submit in the first line: "
            f"{header[:120]!r}; make the text with sacct -P -X -o {','.join(SACCT_FIELDS)}"
        )
    lines = body.split(f"{delimiter}\n") if ended else body.split("\n")
    rows, skipped = _rows(lines, len(columns), delimiter, [name.lower() for name in columns])
    frame, unread = jobs_frame(columns, rows, cluster, observed_at, now=now)
    warnings = [f"{skipped} lines have another number of fields than the header"] if skipped else []
    return frame, warnings + unread


def _rows(lines: list[str], width: int, delimiter: str, names: list[str]) -> tuple[list[list[str]], int]:
    """Fields of each record: free text may hold the delimiter or a newline, nothing else can."""
    free = next((i for i in range(width - 1, -1, -1) if names[i] in _FREE_TEXT), None)
    rows: list[list[str]] = []
    skipped = 0
    for line in lines:
        fields = line.rstrip("\r").split(delimiter)
        surplus = len(fields) - width
        if surplus > 0 and fields[-1] == "" and free != width - 1:
            fields, surplus = fields[:-1], surplus - 1
        if surplus == 0:
            rows.append(fields)
        elif surplus > 0 and free is not None:
            rows.append(
                [*fields[:free], delimiter.join(fields[free : free + surplus + 1]), *fields[free + surplus + 1 :]]
            )
        elif len(fields) == 1 and free == width - 1 and rows and line.strip():
            rows[-1][-1] += "\n" + line  # the rest of a name with a newline
        elif line.strip():
            skipped += 1
    return rows, skipped


def jobs_frame(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    cluster: str,
    observed_at: datetime,
    *,
    now: datetime | None = None,
) -> tuple[pl.DataFrame, list[str]]:
    """Jobs from fields under sacct's names.

    Args:
        columns: Field names, in any case. Beside sacct's: `PlannedStart`.
        rows: Fields of each record.
        cluster: Name of the cluster.
        observed_at: When they were read.
        now: Jobs submitted more than a day after it are left out; None: `observed_at`.

    Returns:
        JOB_COLUMNS, sorted by submission; and what was passed over.
    """
    names = [name.lower().split("%")[0] for name in columns]
    text = pl.DataFrame(
        {name: [row[i] for row in rows] for i, name in enumerate(names)}, schema=dict.fromkeys(names, pl.String)
    )
    field = _Fields(names)
    job_id = field.first("jobidraw", "jobid")
    text = text.filter(~job_id.str.contains(".", literal=True))  # steps
    frame = text.select(
        pl.lit(cluster).alias("cluster"),
        job_id.alias("job_id"),
        field.text("user").alias("user"),
        field.text("account").alias("account"),
        field.first("partition", "queue").alias("queue"),
        field.first("jobname", "name").alias("name"),
        field.time("submit").alias("submit_time"),
        field.time("eligible").alias("eligible_time"),
        field.time("start").alias("start_time"),
        field.time("end").alias("end_time"),
        pl.coalesce(
            field.count("nnodes", "reqnodes", "allocnodes"), field.tres("node"), pl.lit(None, dtype=pl.Int64)
        ).alias("nodes"),
        pl.coalesce(field.count("reqcpus", "ncpus", "alloccpus"), field.tres("cpu")).alias("cpus"),
        field.gpus().alias("_gpus"),
        field.no_gpus().alias("_no_gpus"),
        field.gres_gpus("tresperjob").alias("_gpus_per_job"),
        field.gres_gpus(*_PER_NODE).alias("_gpus_per_node"),
        field.tres_memory().alias("_tres_mib"),
        *field.req_memory(),
        field.limit().alias("time_limit_s"),
        field.state().alias("state"),
        field.text("nodelist").alias("node_list"),
        field.text("reason").alias("reason"),
        field.time("plannedstart").alias("planned_start_time"),
        pl.lit(observed_at, dtype=TIME).alias("observed_at"),
    )
    return _settled(frame, (now or observed_at) + _AHEAD)


def _settled(frame: pl.DataFrame, last_submit: datetime) -> tuple[pl.DataFrame, list[str]]:
    warnings = []
    has_memory = pl.col("_req_mib").is_not_null() & (pl.col("_req_mib") > 0)
    factor = (
        pl.when(pl.col("_req_per") == "n").then(pl.col("nodes"))
        .when(pl.col("_req_per") == "c").then(pl.col("cpus"))
        .otherwise(1)
    )  # fmt: skip
    never_ran = (
        (pl.col("state") == "CANCELLED") & pl.col("node_list").is_null() & (pl.col("start_time") >= pl.col("end_time"))
    )
    waits = pl.col("state") == PENDING
    frame = frame.with_columns(
        pl.coalesce("_gpus", "_gpus_per_job", pl.col("_gpus_per_node") * pl.col("nodes"), "_no_gpus").alias("gpus"),
        pl.coalesce(pl.col("_tres_mib"), pl.when(has_memory).then(pl.col("_req_mib") * factor))
        .round()
        .cast(pl.Int64)
        .alias("memory_mib"),
        # A pending job's start is a plan, a running job's end a limit.
        pl.when(waits).then(pl.coalesce("planned_start_time", "start_time")).alias("planned_start_time"),
        pl.when(~waits & ~never_ran).then(pl.col("start_time")).alias("start_time"),
        pl.when(~pl.col("state").is_in(LIVE_STATES)).then(pl.col("end_time")).alias("end_time"),
        pl.when(waits).then(pl.col("reason")).alias("reason"),
        _expanded(frame["node_list"]).alias("node_list"),
    )
    lost = frame.filter(pl.col("submit_time").is_null() | pl.col("job_id").is_null())
    if len(lost):
        warnings.append(f"{len(lost)} jobs have no submission time and are left out, as {lost['job_id'][0]}")
        frame = frame.filter(pl.col("submit_time").is_not_null() & pl.col("job_id").is_not_null())
    ahead = frame.filter(pl.col("submit_time") > last_submit)
    if len(ahead):
        warnings.append(
            f"{len(ahead)} jobs were submitted more than a day ahead of this reading and are left out, "
            f"as {ahead['job_id'][0]} at {ahead['submit_time'][0]}: is the clock right?"
        )
        frame = frame.filter(pl.col("submit_time") <= last_submit)
    frame = frame.sort("submit_time", "job_id", "start_time", "end_time", nulls_last=False, maintain_order=True)
    frame = frame.unique(["job_id", "submit_time"], keep="last", maintain_order=True)
    return frame.select(pl.col(name).cast(dtype) for name, dtype in jobs_schema().items()), warnings


def _expanded(lists: pl.Series) -> pl.Series:
    def names(text: str) -> str | None:
        try:
            return ",".join(expand_hostlist(text)) or None
        except HostlistError:
            return None

    known = {text: names(text) for text in lists.drop_nulls().unique()}
    return lists.replace_strict(list(known), list(known.values()), return_dtype=pl.String) if known else lists


class _Fields:
    """Expressions over the text columns that are there; null for those that are not."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def text(self, name: str) -> pl.Expr:
        if name not in self.names:
            return pl.lit(None, dtype=pl.String)
        value = pl.col(name).str.strip_chars()
        return pl.when(~value.str.to_lowercase().is_in(_UNSET)).then(value)

    def first(self, *names: str) -> pl.Expr:
        return pl.coalesce([self.text(name) for name in names])

    def time(self, name: str) -> pl.Expr:
        value = self.text(name)
        epoch = value.cast(pl.Int64, strict=False)
        written = (
            value.str.strip_suffix("Z")
            .str.replace(" ", "T")
            .str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False)
        )
        from_epoch = pl.when(epoch.is_between(1, _LAST_EPOCH_S)).then(epoch * 1_000_000).cast(TIME)
        told = pl.coalesce(from_epoch, written.dt.replace_time_zone("UTC"))
        return pl.when(told.is_between(_FIRST_TIME, _LAST_TIME)).then(told)

    def count(self, *names: str) -> pl.Expr:
        return pl.coalesce([_not_negative(self.text(name).cast(pl.Int64, strict=False)) for name in names])

    def _tres_texts(self) -> list[pl.Expr]:
        """What was asked for before what was given."""
        return [self.text(name) for name in ("reqtres", "alloctres", "tres")]

    def tres(self, key: str) -> pl.Expr:
        return pl.coalesce(
            [t.str.extract(rf"(?:^|,){key}=(\d+)").cast(pl.Int64, strict=False) for t in self._tres_texts()]
        )

    def gpus(self) -> pl.Expr:
        """The untyped count where there is one, else the sum over types; null where TRES name no GPU."""
        counts = []
        for tres in self._tres_texts():
            untyped = tres.str.extract(r"(?:^|,)gres/gpu=(\d+)").cast(pl.Int64, strict=False)
            typed = tres.str.extract_all(r"(?:^|,)gres/gpu:[^=,]+=\d+")
            total = typed.list.eval(pl.element().str.extract(r"=(\d+)$").cast(pl.Int64)).list.sum()
            counts += [untyped, pl.when(typed.list.len() > 0).then(total)]
        return pl.coalesce(counts)

    def no_gpus(self) -> pl.Expr:
        """0 where TRES are told: what they do not name, the job has not."""
        return pl.when(pl.coalesce(self._tres_texts()).is_not_null()).then(0)

    def gres_gpus(self, *names: str) -> pl.Expr:
        """Of GRES texts: `gpu:4`, `gpu:a100:4`, `gres:gpu:8`."""
        parts = self.first(*names).str.extract_all(r"gpu(?::[A-Za-z][^:,()]*)?(?::\d+)?")
        each = pl.element().str.extract(r":(\d+)$").cast(pl.Int64).fill_null(1)
        return pl.when(parts.list.len() > 0).then(parts.list.eval(each).list.sum())

    def tres_memory(self) -> pl.Expr:
        return pl.coalesce([_mib(t.str.extract(r"(?:^|,)mem=([0-9.]+[KMGTP]?)")) for t in self._tres_texts()])

    def req_memory(self) -> list[pl.Expr]:
        """ReqMem in MiB and what it is for: `n` a node, `c` a CPU, null the job."""
        value = self.text("reqmem")
        size = _mib(value.str.extract(r"^([0-9.]+[KMGTP]?)"))
        per = value.str.extract(r"([nc])$")
        flagged = (
            pl.when(size >= _PER_CPU_64).then(size - _PER_CPU_64).when(size >= _PER_CPU_32).then(size - _PER_CPU_32)
        )
        return [
            pl.coalesce(flagged, size).alias("_req_mib"),
            pl.when(flagged.is_not_null()).then(pl.lit("c")).otherwise(per).alias("_req_per"),
        ]

    def limit(self) -> pl.Expr:
        """Seconds; null for UNLIMITED, Partition_Limit and blanks."""
        raw = self.text("timelimitraw").cast(pl.Int64, strict=False)
        minutes = pl.when(raw.is_between(0, _MAX_LIMIT_MIN)).then(raw * 60)
        return pl.coalesce(minutes, _seconds(self.text("timelimit")))

    def state(self) -> pl.Expr:
        word = self.text("state").str.extract(r"^([A-Za-z_]+)").str.to_uppercase()
        word = word.replace(_STATE_OF)
        return pl.when(word.is_in(STATES)).then(word).otherwise(pl.lit("UNKNOWN"))


def _not_negative(value: pl.Expr) -> pl.Expr:
    return pl.when(value >= 0).then(value)


def _mib(text: pl.Expr) -> pl.Expr:
    number = text.str.extract(r"^([0-9.]+)").cast(pl.Float64, strict=False)
    unit = text.str.extract(r"([KMGTP])$")
    return number * unit.replace_strict(
        list(_UNITS_MIB), list(_UNITS_MIB.values()), default=1.0, return_dtype=pl.Float64
    )


def _seconds(text: pl.Expr) -> pl.Expr:
    """`[D-]HH:MM:SS`, `MM:SS` or whole minutes."""
    pattern = r"^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?$"
    parts = [text.str.extract(pattern, i).cast(pl.Int64, strict=False) for i in range(1, 5)]
    days, first, second, third = parts
    clock = pl.when(third.is_not_null()).then(first * 3600 + second * 60 + third)
    short = pl.when(days.is_not_null()).then(first * 3600 + second.fill_null(0) * 60)  # D-HH, D-HH:MM
    brief = first * 60 + second.fill_null(0)  # MM, MM:SS
    return days.fill_null(0) * 86_400 + pl.coalesce(clock, short, brief)

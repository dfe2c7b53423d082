"""Reads what Slurm prints about jobs: `sacct -P` text, and rows of `squeue` under the same field names.

Fields are found by the header, in any order and case; units, unset values, TRES spellings and states become registry
columns. What cannot be read becomes null. Running the commands stands in `slurm.py`, single fields in `job_fields.py`,
steps in `sacct_steps.py`.

A job that is requeued is several attempts. Slurm gives each a submission time of its own, the moment of the requeue;
where two attempts of one id bear the same (a requeue within the second of the submission), the newest keeps it and the
earlier ones are keyed by their start, so that none overwrites another (`sacct_attempts.py`).

A job that changes its size while it runs is several parts. The record of a later part bears the moment of the change as
its submission, but the start of the whole job: its part starts with the change, and holds what was then given to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import polars as pl

from features.vocabulary import COLUMNS, TIME, schema
from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.job_fields import LIVE_STATES, PENDING, Fields
from pipelines.sources.sacct_attempts import count_restarts, settle_attempts
from pipelines.sources.sacct_steps import with_steps
from pipelines.sources.sacct_zone import ZoneTimes
from pipelines.words import counted

# Asked of sacct; the free text comes last.
SACCT_FIELDS = (
    "JobIDRaw", "JobID", "User", "Account", "Partition", "Submit", "Eligible", "Start", "End", "State", "ExitCode",
    "ElapsedRaw", "Suspended", "NNodes", "ReqCPUS", "NCPUS", "ReqMem", "ReqTRES", "AllocTRES", "TimelimitRaw",
    "Timelimit", "NodeList", "MaxRSS", "Reason", "JobName",
)  # fmt: skip
_FREE_TEXT = ("jobname", "name", "comment", "submitline", "workdir")
DELIMITERS = ("\x1f", "|", "^", "\t", ";", ",")

# Texts of GRES that count GPUs of one node: old sacct's, and squeue's where GPUs are no TRES (no accounting).
_PER_NODE = ("reqgres", "allocgres", "gres", "trespernode")
_AHEAD = timedelta(days=1)
_MOST_MIB = 2**53  # larger sizes are overflown, and no whole number of this precision


class SacctError(ValueError):
    """Text that is no sacct output. The message says what is missing."""


def jobs_schema() -> dict[str, pl.DataType | type[pl.DataType]]:
    """JOB_COLUMNS and JOB_EXTRAS with their dtypes."""
    return schema("raw_jobs")


def empty_jobs() -> pl.DataFrame:
    """A frame of no jobs."""
    return pl.DataFrame(schema=jobs_schema())


def parse_sacct(
    text: str,
    cluster: str,
    observed_at: datetime,
    delimiter: str | None = None,
    *,
    now: datetime | None = None,
    since: datetime | None = None,
    zone: ZoneTimes | None = None,
) -> tuple[pl.DataFrame, list[str]]:
    """Jobs of `sacct --parsable` or `--parsable2` text with a header.

    Args:
        text: The text; times in UTC or as seconds since the epoch (SLURM_TIME_FORMAT=%s).
        cluster: Name of the cluster, whatever the text says.
        observed_at: When the text was made.
        delimiter: Between fields; None: seen from the header.
        now: Jobs submitted more than a day after it are left out; None: `observed_at`.
        since: The text holds every attempt that ended since then (`--duplicates`): `restarts` is known for jobs
            submitted later. None: it is known where the text shows several attempts.
        zone: Where the times were written in no UTC; what its clocks never showed is noted in it.

    Returns:
        Columns of `raw_jobs`, one row an attempt, with what its steps say; and what was passed over.

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
            f"{header[:120]!r}; make the text with sacct -P -o {','.join(SACCT_FIELDS)}"
        )
    lines = body.split(f"{delimiter}\n") if ended else body.split("\n")
    rows, skipped = _rows(lines, len(columns), delimiter, [name.lower() for name in columns])
    frame, unread = jobs_frame(columns, rows, cluster, observed_at, now=now, since=since, zone=zone)
    warnings = (
        [f"{counted(skipped, 'line')} left out, with another number of fields than the header"] if skipped else []
    )
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
    since: datetime | None = None,
    zone: ZoneTimes | None = None,
) -> tuple[pl.DataFrame, list[str]]:
    """Jobs from fields under sacct's names.

    Args:
        columns: Field names, in any case. Beside sacct's: `PlannedStart`, `ArrayJobID`, `HetJobID`, `RestartCnt`,
            `ExitStatus`, the status of wait(2), and `SuspendedRaw`, whole seconds.
        rows: Fields of each record.
        cluster: Name of the cluster.
        observed_at: When they were read.
        now: Jobs submitted more than a day after it are left out; None: `observed_at`.
        since: As for `parse_sacct`.
        zone: As for `parse_sacct`.

    Returns:
        Columns of `raw_jobs`, sorted by submission; and what was passed over.
    """
    names = [name.lower().split("%")[0] for name in columns]
    text = pl.DataFrame(
        {name: [row[i] for row in rows] for i, name in enumerate(names)}, schema=dict.fromkeys(names, pl.String)
    )
    field = Fields(names)
    job_id = field.job_id()
    text, steps = with_steps(text, field)
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
        field.gpus("alloctres").alias("_gpus_given"),
        field.tres("cpu", "alloctres").alias("_cpus_given"),
        field.tres("node", "alloctres").alias("_nodes_given"),
        field.duration("elapsedraw", "elapsed").alias("elapsed_s"),
        field.duration("suspendedraw", "suspended").alias("_suspended_s"),
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
        field.exit_code().alias("exit_code"),
        field.count("restarts", "restartcnt").alias("restarts"),
        field.array_job_id().alias("array_job_id"),
        field.array_task().alias("array_task"),
        field.array_tasks().alias("array_tasks"),
        field.gpu_type().alias("gpu_type"),
        field.first("constraints", "feature").alias("node_features"),
        pl.lit(None, dtype=pl.String).alias("preempted_by"),
    )
    frame = frame.hstack(steps)
    frame = zone.placed(frame) if zone else frame
    return _settled(frame, (now or observed_at) + _AHEAD, since)


def _settled(frame: pl.DataFrame, last_submit: datetime, since: datetime | None) -> tuple[pl.DataFrame, list[str]]:
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
    frame = _parts_of_resized(frame).with_columns(
        pl.coalesce("_gpus", "_gpus_per_job", pl.col("_gpus_per_node") * pl.col("nodes"), "_no_gpus").alias("gpus"),
        pl.coalesce(_sane(pl.col("_tres_mib")), _sane(pl.when(has_memory).then(pl.col("_req_mib") * factor)))
        .round()
        .cast(pl.Int64)
        .alias("memory_mib"),
        # A pending job's start is a plan, a running job's end a limit.
        pl.when(waits).then(pl.coalesce("planned_start_time", "start_time")).alias("planned_start_time"),
        pl.when(~waits & ~never_ran).then(pl.col("start_time")).alias("start_time"),
        pl.when(~pl.col("state").is_in(LIVE_STATES)).then(pl.col("end_time")).alias("end_time"),
        pl.when(waits).then(pl.col("reason")).alias("reason"),
        pl.when(~pl.col("state").is_in(LIVE_STATES)).then(pl.col("exit_code")).alias("exit_code"),
        _expanded(frame["node_list"]).alias("node_list"),
        pl.when(~pl.col("state").is_in(LIVE_STATES) & ~never_ran & pl.col("start_time").is_not_null())
        .then("elapsed_s")
        .alias("elapsed_s"),
    )
    lost = frame.filter(pl.col("submit_time").is_null() | pl.col("job_id").is_null())
    if len(lost):
        warnings.append(f"{counted(len(lost), 'job')} without a submission time left out, as {lost['job_id'][0]}")
        frame = frame.filter(pl.col("submit_time").is_not_null() & pl.col("job_id").is_not_null())
    ahead = frame.filter(pl.col("submit_time") > last_submit)
    if len(ahead):
        warnings.append(
            f"{counted(len(ahead), 'job')} left out, submitted more than a day ahead of this reading, "
            f"as {ahead['job_id'][0]} at {ahead['submit_time'][0]}: is the clock right?"
        )
        frame = frame.filter(pl.col("submit_time") <= last_submit)
    frame = settle_attempts(frame).sort("submit_time", "job_id")
    frame = count_restarts(frame, since)
    return frame.select(_possible(name).cast(dtype) for name, dtype in jobs_schema().items()), warnings


def _parts_of_resized(frame: pl.DataFrame) -> pl.DataFrame:
    """Of jobs that changed their size the later parts: from the change on, with what they were given then."""
    changed = (
        (pl.col("submit_time") > pl.col("start_time"))
        & (pl.col("state") != PENDING)
        & (pl.col("end_time").is_null() | (pl.col("end_time") >= pl.col("submit_time")))
    )
    before_s = (pl.col("submit_time") - pl.col("start_time")).dt.total_seconds()
    whole_s = (pl.col("end_time") - pl.col("start_time")).dt.total_seconds() - pl.col("_suspended_s")
    ran_s = pl.coalesce("elapsed_s", pl.when(whole_s >= 0).then(whole_s))
    frame = frame.with_columns(ran_s.alias("elapsed_s"), changed.fill_null(False).alias("_is_part"))
    part = pl.col("_is_part")
    return frame.with_columns(
        pl.when(part).then("submit_time").otherwise("start_time").alias("start_time"),
        # The part's elapsed time is told from the job's start on.
        pl.when(part).then((ran_s - before_s).clip(lower_bound=0)).otherwise(ran_s).alias("elapsed_s"),
        pl.when(part & (pl.col("_gpus") > 0))
        .then(pl.coalesce("_gpus_given", "_gpus"))
        .otherwise("_gpus")
        .alias("_gpus"),
        pl.when(part).then(pl.coalesce("_cpus_given", "cpus")).otherwise("cpus").alias("cpus"),
        pl.when(part).then(pl.coalesce("_nodes_given", "nodes")).otherwise("nodes").alias("nodes"),
    )


def _possible(name: str) -> pl.Expr:
    """A count, or null where there cannot be so many."""
    high = COLUMNS[name].high
    return pl.col(name) if high is None else pl.when(pl.col(name).is_between(0, high)).then(pl.col(name)).alias(name)


def _sane(mib: pl.Expr) -> pl.Expr:
    return pl.when(mib.is_between(0, _MOST_MIB)).then(mib)


def _expanded(lists: pl.Series) -> pl.Series:
    def names(text: str) -> str | None:
        try:
            return ",".join(expand_hostlist(text)) or None
        except HostlistError:
            return None

    known = {text: names(text) for text in lists.drop_nulls().unique()}
    return lists.replace_strict(list(known), list(known.values()), return_dtype=pl.String) if known else lists

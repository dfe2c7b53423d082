"""Reads what Slurm prints about jobs: `sacct -P` text, and rows of `squeue` under the same field names.

Fields are found by the header, in any order and case; units, unset values, TRES spellings and states become registry
columns. What cannot be read becomes null. Running the commands stands in `slurm.py`, single fields in `job_fields.py`.

A job that is requeued is several attempts. Slurm gives each a submission time of its own, the moment of the requeue;
where two attempts of one id bear the same (a requeue within the second of the submission), the newest keeps it and the
earlier ones are keyed by their start, so that none overwrites another.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import polars as pl

from features.vocabulary import COLUMNS, TIME, schema
from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.job_fields import LIVE_STATES, PENDING, Fields
from pipelines.words import counted

# Asked of sacct; the free text comes last.
SACCT_FIELDS = (
    "JobIDRaw", "JobID", "User", "Account", "Partition", "Submit", "Eligible", "Start", "End", "State", "ExitCode",
    "NNodes", "ReqCPUS", "NCPUS", "ReqMem", "ReqTRES", "AllocTRES", "TimelimitRaw", "Timelimit", "NodeList", "Reason",
    "JobName",
)  # fmt: skip
_FREE_TEXT = ("jobname", "name", "comment", "submitline", "workdir")
DELIMITERS = ("\x1f", "|", "^", "\t", ";", ",")

# Texts of GRES that count GPUs of one node: old sacct's, and squeue's where GPUs are no TRES (no accounting).
_PER_NODE = ("reqgres", "allocgres", "gres", "trespernode")
_AHEAD = timedelta(days=1)
_MOST_MIB = 2**53  # larger sizes are overflown, and no whole number of this precision
_NEVER = datetime(2200, 1, 1, tzinfo=UTC)
_SAME_MOMENT = timedelta(seconds=2)  # between the end of an attempt and the submission of the next


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

    Returns:
        Columns of `raw_jobs`, one row an attempt, steps left out; and what was passed over.

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
    frame, unread = jobs_frame(columns, rows, cluster, observed_at, now=now, since=since)
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
) -> tuple[pl.DataFrame, list[str]]:
    """Jobs from fields under sacct's names.

    Args:
        columns: Field names, in any case. Beside sacct's: `PlannedStart`, `ArrayJobID`, `HetJobID`, `RestartCnt` and
            `ExitStatus`, the status of wait(2).
        rows: Fields of each record.
        cluster: Name of the cluster.
        observed_at: When they were read.
        now: Jobs submitted more than a day after it are left out; None: `observed_at`.
        since: As for `parse_sacct`.

    Returns:
        Columns of `raw_jobs`, sorted by submission; and what was passed over.
    """
    names = [name.lower().split("%")[0] for name in columns]
    text = pl.DataFrame(
        {name: [row[i] for row in rows] for i, name in enumerate(names)}, schema=dict.fromkeys(names, pl.String)
    )
    field = Fields(names)
    job_id = field.job_id()
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
        field.exit_code().alias("exit_code"),
        field.count("restarts", "restartcnt").alias("restarts"),
        field.array_job_id().alias("array_job_id"),
        field.array_tasks().alias("array_tasks"),
        pl.lit(None, dtype=pl.String).alias("preempted_by"),
    )
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
    frame = frame.with_columns(
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


def settle_attempts(jobs: pl.DataFrame) -> pl.DataFrame:
    """One row for each attempt of a job: the newest reading of it, under a submission time of its own.

    Args:
        jobs: Columns of `raw_jobs`; an attempt may come several times, read at different moments.
    """
    key = ["job_id", "submit_time"]
    if jobs.is_empty():
        return jobs
    several = jobs.select(pl.struct(key).is_duplicated()).to_series()
    if not several.any():
        return jobs
    rows: list[dict[str, object]] = []
    for group in jobs.filter(several).partition_by(key, maintain_order=True):
        rows += _attempts(group.sort("observed_at", maintain_order=True).to_dicts())
    return pl.concat([jobs.filter(~several), pl.DataFrame(rows, schema=jobs.schema)])


def _attempts(rows: list[dict]) -> list[dict]:
    """Attempts of one id and submission, oldest first."""
    newest: dict[datetime | None, dict] = {}
    for row in rows:
        newest[row["start_time"]] = row
    waits = newest.pop(None, None)
    attempts = sorted(newest.values(), key=lambda row: row["start_time"])
    if waits is not None and (not attempts or _follows(waits, attempts[-1])):
        attempts.append(waits)
    for number, row in enumerate(attempts[:-1], 1):
        submitted = row["submit_time"] + timedelta(microseconds=number)  # began in the second of its submission
        row["submit_time"] = max(row["start_time"], submitted)
    return attempts


def _follows(waiting: dict, before: dict) -> bool:
    """A record without a start is the next attempt, not an older reading of this one."""
    ended = before["state"] not in LIVE_STATES and waiting["observed_at"] >= before["observed_at"]
    return ended and (waiting["end_time"] is None or waiting["end_time"] >= (before["end_time"] or waiting["end_time"]))


def count_restarts(jobs: pl.DataFrame, since: datetime | None = None) -> pl.DataFrame:
    """`restarts` of each attempt: what is told, or how many of the same job came before it if these are more.

    An id that was given out again begins anew.

    Args:
        jobs: Columns of `raw_jobs`, one row an attempt.
        since: As for `parse_sacct`.

    Returns:
        The jobs in the same order.
    """
    by_start = pl.coalesce("start_time", "end_time", pl.lit(_NEVER, dtype=TIME))
    by_job = jobs.with_row_index("_at").sort("job_id", by_start, maintain_order=True)
    before = {name: pl.col(name).shift(1) for name in ("job_id", "user", "end_time", "submit_time")}
    at_its_end = (pl.col("submit_time") - before["end_time"]).abs() <= _SAME_MOMENT
    within_it = pl.col("submit_time") <= before["submit_time"]  # the earlier one was keyed by its start
    goes_on = (
        (before["job_id"] == pl.col("job_id")) & before["user"].eq_missing(pl.col("user")) & (at_its_end | within_it)
    ).fill_null(False)
    by_job = by_job.with_columns((~goes_on).cum_sum().alias("_chain")).with_columns(
        (pl.col("_at").cum_count().over("_chain") - 1).cast(pl.Int64).alias("_counted"),
        pl.col("submit_time").min().over("_chain").alias("_first"),
    )
    whole = pl.lit(False) if since is None else pl.col("_first") >= since
    counted = pl.when(whole | (pl.col("_counted") > 0)).then("_counted")
    restarts = by_job.select("_at", pl.max_horizontal("restarts", counted).alias("restarts")).sort("_at")["restarts"]
    return jobs.with_columns(restarts.cast(pl.Int32))


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

"""Attempts of one job and parts of a job that changed its size: one row each, none over another, and how many restarts.

Frames with the columns of `raw_jobs` alone; what the fields of a record mean stands in `sacct.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl

from features.vocabulary import TIME
from pipelines.sources.job_fields import LIVE_STATES

_NEVER = datetime(2200, 1, 1, tzinfo=UTC)
_SAME_MOMENT = timedelta(seconds=2)  # between the end of an attempt and the submission of the next


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

    An id that was given out again begins anew; a part before a change of size was no attempt.

    Args:
        jobs: Columns of `raw_jobs`, one row an attempt.
        since: As for `parse_sacct`.

    Returns:
        The jobs in the same order.
    """
    by_start = pl.coalesce("start_time", "end_time", pl.lit(_NEVER, dtype=TIME))
    requeued = (pl.col("state") != "RESIZING").cast(pl.Int64).alias("_requeued")
    by_job = jobs.with_row_index("_at").with_columns(requeued).sort("job_id", by_start, maintain_order=True)
    before = {name: pl.col(name).shift(1) for name in ("job_id", "user", "end_time", "submit_time")}
    at_its_end = (pl.col("submit_time") - before["end_time"]).abs() <= _SAME_MOMENT
    within_it = pl.col("submit_time") <= before["submit_time"]  # the earlier one was keyed by its start
    goes_on = (
        (before["job_id"] == pl.col("job_id")) & before["user"].eq_missing(pl.col("user")) & (at_its_end | within_it)
    ).fill_null(False)
    by_job = by_job.with_columns((~goes_on).cum_sum().alias("_chain")).with_columns(
        (pl.col("_requeued").cum_sum().over("_chain") - pl.col("_requeued")).alias("_counted"),
        pl.col("submit_time").min().over("_chain").alias("_first"),
    )
    whole = pl.lit(False) if since is None else pl.col("_first") >= since
    counted = pl.when(whole | (pl.col("_counted") > 0)).then("_counted")
    restarts = by_job.select("_at", pl.max_horizontal("restarts", counted).alias("restarts")).sort("_at")["restarts"]
    return jobs.with_columns(restarts.cast(pl.Int32))

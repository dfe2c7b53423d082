"""State, reason, priority and planned start of waiting and running jobs over time: only what changed.

Pure: reading the queue stands with its source, writing with the ingest of jobs.
"""

from __future__ import annotations

from datetime import timedelta

import polars as pl

from features.vocabulary import schema

_MOVED = timedelta(minutes=1)  # a planned start that moves by less has not changed: backfill plans in whole minutes


def no_states() -> pl.DataFrame:
    """No rows of `core_job_states`."""
    return pl.DataFrame(schema=schema("core_job_states"))


def job_states(queue: pl.DataFrame) -> pl.DataFrame:
    """Rows of `core_job_states` from columns of `raw_jobs` and `priority`; the priority only of jobs that wait."""
    waits = pl.col("state") == "PENDING"
    told = queue.with_columns(pl.when(waits).then("priority").alias("priority"))
    return told.select(pl.col(name).cast(dtype) for name, dtype in schema("core_job_states").items())


def changed_states(known: pl.DataFrame, seen: pl.DataFrame) -> pl.DataFrame:
    """States that say something new: of a job not known, or another state, reason, priority or planned start.

    Args:
        known: Rows of `core_job_states`; of each job the newest counts.
        seen: Rows of `core_job_states`, one a job.

    Returns:
        The rows of `seen` that changed. A planned start that moved by less than a minute has not.
    """
    newest = known.sort("observed_at").unique("job_id", keep="last")
    told = ("state", "reason", "priority", "planned_start_time")
    both = seen.join(newest.select("job_id", *told), on="job_id", how="left", suffix="_known", maintain_order="left")
    new = pl.any_horizontal(
        pl.col("state_known").is_null(),
        *(pl.col(name).ne_missing(pl.col(f"{name}_known")) for name in told[:3]),
        pl.col("planned_start_time").is_null() != pl.col("planned_start_time_known").is_null(),
        (pl.col("planned_start_time") - pl.col("planned_start_time_known")).abs() >= _MOVED,
    )
    return both.filter(new).select(seen.columns)

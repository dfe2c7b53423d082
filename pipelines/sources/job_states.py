"""State, reason, priority with its parts, and planned start of jobs over time: only what changed.

Pure: reading the queue stands with its source, writing with the ingest of jobs.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.vocabulary import conform, schema

_PARTS = [name for name in schema("core_job_priorities") if name.startswith("priority")]
_PART_MOVED = 0.01  # of the priority: age grows all the time
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


def job_priorities(told: pl.DataFrame, cluster: str, at: datetime) -> pl.DataFrame:
    """Rows of `core_job_priorities`.

    Args:
        told: `job_id`, `priority` and its parts, as `slurm_policy.parse_sprio` gives them; `tres` as `cpu=6,mem=3`.
        cluster: Name of the cluster.
        at: When they were read, UTC.

    Returns:
        One row a job. Parts that are no finite number are null; the parts of TRES are added up.
    """
    parts = {f"priority_{name}": pl.col(name) for name in told.columns if name not in ("job_id", "priority", "tres")}
    # A text without a number in it gives no part, not one of zero.
    each = (
        pl.col("tres")
        .str.extract_all(r"=-?[0-9]+(?:\.[0-9]+)?")
        .list.eval(pl.element().str.strip_prefix("=").cast(pl.Float64, strict=False))
    )
    parts["priority_tres"] = pl.when(each.list.len() > 0).then(each.list.sum())
    rows = told.select("job_id", "priority", **parts).with_columns(
        pl.lit(cluster).alias("cluster"), pl.lit(at).alias("observed_at")
    )
    finite = [
        pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name) for name in _PARTS if name in rows.columns
    ]
    rows = rows.with_columns(finite).filter(pl.col("priority").is_not_null())
    return conform(rows.unique("job_id", keep="last", maintain_order=True), "core_job_priorities")


def changed_priorities(known: pl.DataFrame, seen: pl.DataFrame) -> pl.DataFrame:
    """Priorities of jobs not known, or of which a part moved by a hundredth of the priority, or to or from null.

    Args:
        known: Rows of `core_job_priorities`; of each job the newest counts.
        seen: Rows of `core_job_priorities`, one a job.
    """
    newest = known.sort("observed_at").unique("job_id", keep="last").with_columns(pl.lit(True).alias("is_known"))
    both = seen.join(
        newest.select("job_id", "is_known", *_PARTS), on="job_id", how="left", suffix="_known", maintain_order="left"
    )
    step = (pl.col("priority").abs() * _PART_MOVED).clip(lower_bound=1e-9)
    new = pl.any_horizontal(
        pl.col("is_known").is_null(),
        *(pl.col(name).is_null() != pl.col(f"{name}_known").is_null() for name in _PARTS),
        *((pl.col(name) - pl.col(f"{name}_known")).abs() >= step for name in _PARTS),
    )
    return both.filter(new).select(seen.columns)

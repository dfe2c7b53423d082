"""What a scheduler allows and plans, in the store: reservations, and limits and parts of priorities when they changed.

A row is written only when it says something new. What is no longer there gets its end: a reservation that vanished
ended now, or never began; a limit that vanished is null from now on. How a scheduler is asked stands with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import polars as pl

from features.vocabulary import conform, schema
from pipelines.sources import SourceError
from pipelines.sources.job_states import changed_priorities, job_priorities
from pipelines.sources.slurm_policy import Runs, SlurmPolicy, read_policy
from pipelines.store import Store, Writer

_PRIORITIES_LOOKED_BACK = timedelta(days=2)  # one that does not move is written again after that
_SETTING = ["kind", "name", "metric"]


@dataclass
class PolicyIngested:
    """What one reading of a scheduler's policy changed.

    Attributes:
        cluster: Whose policy.
        reservation_rows: Reservations that are new, changed or gone.
        policy_rows: Limits that are new, changed or gone.
        priority_rows: Pending jobs of whose priority a part is new or moved.
        warnings: What could not be read.
        error: Why nothing was read; None when it was.
        read: What was read, with priorities and places; None after an error.
    """

    cluster: str
    reservation_rows: int = 0
    policy_rows: int = 0
    priority_rows: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    read: SlurmPolicy | None = None


def ingest_policy(store: Store, commands: Runs, cluster: str, now: datetime) -> PolicyIngested:
    """Bring reservations, limits and parts of priorities of one Slurm cluster up to date.

    Args:
        store: The store.
        commands: Slurm's client commands; six calls.
        cluster: Name of the cluster.
        now: Present time, UTC.

    Returns:
        What was done; an outage of the scheduler stands in `error`, and the store stays as it is.

    Raises:
        StoreError: The store cannot be written.
    """
    report = PolicyIngested(cluster)
    try:
        report.read = policy = read_policy(commands, cluster, now)
    except SourceError as error:
        report.error = str(error)
        return report
    report.warnings = policy.warnings

    def work(writer: Writer) -> tuple[int, int, int]:
        return (
            _write_reservations(writer, policy.reservations, cluster, now),
            _write_policies(writer, policy, cluster, now),
            _write_priorities(writer, policy.priorities, cluster, now),
        )

    report.reservation_rows, report.policy_rows, report.priority_rows = store.transact(work, purpose="ingest of policy")
    return report


def _write_reservations(writer: Writer, found: pl.DataFrame, cluster: str, now: datetime) -> int:
    found = conform(found, "core_reservations").unique(["cluster", "name", "start_time"], keep="last")
    oldest = found["start_time"].min() or now
    known = writer.query(
        'SELECT * FROM core_reservations WHERE "cluster" = ? AND (end_time IS NULL OR end_time > ? OR start_time >= ?)',
        [cluster, now, oldest],
    )
    lasting = known.filter(pl.col("end_time").is_null() | (pl.col("end_time") > now))
    ended = lasting.join(found, on=["name", "start_time"], how="anti").with_columns(
        pl.max_horizontal("start_time", pl.lit(now)).alias("end_time"), pl.lit(now).alias("observed_at")
    )
    # One that had not begun never did.
    ended = ended.with_columns(
        pl.when(pl.col("start_time") > now).then("start_time").otherwise("end_time").alias("end_time")
    )
    told = [name for name in schema("core_reservations") if name != "observed_at"]
    rows = pl.concat([found, conform(ended, "core_reservations")])
    return writer.upsert("core_reservations", rows.join(known.select(told), on=told, how="anti", nulls_equal=True))


def _write_policies(writer: Writer, policy: SlurmPolicy, cluster: str, now: datetime) -> int:
    known = writer.query(
        'SELECT * FROM core_policies WHERE "cluster" = ? '
        "QUALIFY row_number() OVER (PARTITION BY kind, name, metric ORDER BY observed_at DESC) = 1",
        [cluster],
    )
    in_force = known.filter(
        (pl.col("value").is_not_null() | pl.col("detail").is_not_null()) & pl.col("kind").is_in(list(policy.whole))
    )
    gone = in_force.join(policy.policies, on=_SETTING, how="anti").with_columns(
        pl.lit(None, dtype=pl.Float64).alias("value"),
        pl.lit(None, dtype=pl.String).alias("detail"),
        pl.lit(now).alias("observed_at"),
    )
    told = [*_SETTING, "value", "detail"]
    changed = policy.policies.join(known.select(told), on=told, how="anti", nulls_equal=True)
    return writer.upsert("core_policies", pl.concat([changed, conform(gone, "core_policies")]))


def _write_priorities(writer: Writer, told: pl.DataFrame, cluster: str, now: datetime) -> int:
    seen = job_priorities(told, cluster, now)
    if seen.is_empty():
        return 0
    known = writer.query(
        'SELECT * FROM core_job_priorities WHERE "cluster" = ? AND observed_at >= ? AND observed_at <= ? '
        "AND job_id IN (SELECT unnest(?::VARCHAR[]))",
        [cluster, now - _PRIORITIES_LOOKED_BACK, now, seen["job_id"].to_list()],
    )
    return writer.upsert("core_job_priorities", changed_priorities(known, seen))

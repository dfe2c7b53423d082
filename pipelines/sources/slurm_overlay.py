"""The queue's word on jobs laid over the database's, which lags; frames of `raw_jobs` alone, no questions to Slurm."""

from __future__ import annotations

import polars as pl

from pipelines.sources.job_fields import LIVE_STATES
from pipelines.sources.sacct_steps import STEP_COLUMNS


def laid_over(known: pl.DataFrame, queue: pl.DataFrame) -> pl.DataFrame:
    """The queue's rows over the database's.

    The database lags behind the queue, but an answer of the queue that is shared may be the older one: where the
    database was read later and tells of a later stage of the same attempt, its row stays.
    """
    key = ["job_id", "submit_time"]
    queue = _on_their_parts(known, queue)
    stage = pl.when(pl.col("state") == "PENDING").then(0).when(pl.col("state").is_in(LIVE_STATES)).then(1).otherwise(2)
    both = queue.select(*key, "observed_at", stage.alias("_stage")).join(
        known.select(*key, pl.col("observed_at").alias("_known_at"), stage.alias("_known_stage")), on=key
    )
    outdated = both.filter((pl.col("_known_stage") > pl.col("_stage")) & (pl.col("_known_at") > pl.col("observed_at")))
    queue = queue.join(outdated, on=key, how="anti")
    asked = (
        "cpus",
        "gpus",
        "memory_mib",
        "nodes",
        "time_limit_s",
        "name",
        "user",
        "account",
        "elapsed_s",
        "gpu_type",
        "node_features",
        *STEP_COLUMNS,
    )
    told = known.select(*key, *asked).with_columns(
        pl.when(pl.col("gpus") > 0).then(pl.col("gpus"))  # GPUs need not be counted by the database
    )
    newer = queue.join(told, on=key, how="left", suffix="_asked").with_columns(
        pl.coalesce(f"{name}_asked", name).alias(name) for name in asked
    )
    rest = known.join(queue, on=key, how="anti")
    return pl.concat([rest, newer.select(known.columns)]).sort("submit_time", "job_id")


def _on_their_parts(known: pl.DataFrame, queue: pl.DataFrame) -> pl.DataFrame:
    """The queue's rows of jobs that changed their size, as rows of the newest part that the database knows.

    The queue tells them under the submission and the start of the whole job. Where the database knows no part after the
    change yet, the queue's row is left out.
    """
    cut_off = pl.col("state") == "RESIZING"
    parts = known.filter((pl.col("start_time") == pl.col("submit_time")) | cut_off)
    if parts.is_empty():
        return queue
    newest = parts.sort("submit_time").unique("job_id", keep="last", maintain_order=True)
    # The moment of the change: an end of what came before it, or the start of what came after it.
    newest = newest.select(
        "job_id",
        "user",
        pl.col("submit_time").alias("_from"),
        pl.when(cut_off).then("end_time").otherwise("submit_time").alias("_change"),
        cut_off.alias("_is_before"),
    )
    both = queue.join(newest, on=["job_id", "user"], how="left", nulls_equal=True, maintain_order="left")
    spans_it = (
        (pl.col("start_time") < pl.col("_change"))
        & (pl.col("end_time").is_null() | (pl.col("end_time") >= pl.col("_change")))
        & (pl.col("submit_time") <= pl.col("_from"))
    ).fill_null(False)
    both = both.filter(~(spans_it & pl.col("_is_before")))
    return both.with_columns(
        pl.when(spans_it).then("_from").otherwise(name).alias(name) for name in ("submit_time", "start_time")
    ).select(queue.columns)

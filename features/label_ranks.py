"""Ranks that are slow beside their gang while the job runs: step times as the ranks of a job report them.

Here belongs the rule of `straggler` on reports of ranks; what GPUs show of it is a distance of
`features/conditions.py`, the rule itself and its reading of a recorded timeline of operations stand in
`features/straggler.py`. A gang needs three members with step times of their own; a job that reports
one step time for all says nothing about its ranks, and no rank of it is ever set.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.label_spans import Series
from features.straggler import MIN_GANG, slow_states


def rank_series(progress: pl.DataFrame) -> tuple[Series, NDArray[np.int8]]:
    """Ranks of jobs by their own reports.

    Args:
        progress: Rows of `core_job_progress`; those without rank or step time say nothing here.

    Returns:
        Samples by rank (`job/rank`), one a step, and the state of `straggler` at each.
    """
    needed = {"job_id", "rank", "ts", "step_time_s"}
    if not needed <= set(progress.columns):
        return _judged(pl.DataFrame(schema=_SCHEMA))
    node = pl.col("node") if "node" in progress.columns else pl.lit(None, dtype=pl.String)
    cluster = pl.col("cluster") if "cluster" in progress.columns else pl.lit("")
    step = pl.col("step") if "step" in progress.columns else pl.lit(None, dtype=pl.Int64)
    rows = progress.drop_nulls(["job_id", "rank", "ts", "step_time_s"]).select(
        pl.format("{}/{}", "job_id", "rank").alias("scope_id"), pl.col("ts"), node.alias("node"), pl.col("job_id"),
        cluster.alias("cluster"), pl.col("step_time_s").cast(pl.Float64).alias("seconds"), step.alias("step"),
    ).sort("scope_id", "ts")  # fmt: skip
    # A report that repeats a step is no further step.
    again = (pl.col("step") == pl.col("step").shift(1)).over("scope_id").fill_null(False)
    return _judged(rows.filter(~again).drop("step"))


_SCHEMA = {
    "scope_id": pl.String, "ts": pl.Datetime("us", "UTC"), "node": pl.String, "job_id": pl.String,
    "cluster": pl.String, "seconds": pl.Float64,
}  # fmt: skip


def _judged(rows: pl.DataFrame) -> tuple[Series, NDArray[np.int8]]:
    """Step times against the median of the job at the same time, and the rule over each member's steps."""
    series = Series.of(rows)
    if not rows.height:
        return series, np.zeros(0, dtype=np.int8)
    bin_s = max(series.interval_s, 1.0)
    at = (pl.col("ts").dt.epoch("us") / 1e6 / bin_s).floor().cast(pl.Int64)
    gang = ["job_id", "_bin"]
    ratio = rows.with_columns(at.alias("_bin")).select(
        pl.when(pl.col("scope_id").n_unique().over(gang) >= MIN_GANG)
        .then((pl.col("seconds") / pl.col("seconds").median().over(gang)).log())
        .cast(pl.Float64)
    ).to_series().fill_null(np.nan).to_numpy()  # fmt: skip
    # One column per member and job: a run of slow steps does not go on into the next job.
    member = pl.struct("scope_id", "job_id").rank("dense").cast(pl.Int64) - 1
    of = rows.select(member).to_series().to_numpy()
    place = rows.select(pl.int_range(pl.len()).over("scope_id", "job_id")).to_series().to_numpy()
    table = np.full((int(place.max()) + 1, int(of.max()) + 1), np.nan)
    table[place, of] = ratio
    return series, slow_states(table)[place, of].astype(np.int8)

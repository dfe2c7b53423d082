"""Ranks that are slow beside their gang while the job runs: step times as the job or its GPUs report them.

Here belongs the rule of `straggler` on what is sampled; the rule itself and its reading of a recorded timeline of
operations stand in `features/straggler.py`. A gang needs three members with step times of their own; a job that reports
one step time for all says nothing about its ranks, and no rank of it is ever set.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.history import SampleHistory
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


def gpu_series(history: SampleHistory) -> tuple[Series, NDArray[np.int8]]:
    """GPUs of jobs by the step time that each of them reports.

    Args:
        history: Samples of GPUs.

    Returns:
        Samples by GPU, one a step that was seen, and the state of `straggler` at each.
    """
    seconds = history.flags["step_time_s"].astype(np.float64)
    keep = (seconds > 0) & (history.job >= 0)
    rows = np.flatnonzero(keep)
    if len(rows):
        # The same step is seen again until its successor ends: at the earliest one step time later.
        ts, gpu, value = history.ts[rows], history.gpu[rows], seconds[rows]
        repeats = np.zeros(len(rows), dtype=bool)
        repeats[1:] = (np.diff(gpu) == 0) & (np.diff(value) == 0) & (np.diff(ts) < value[1:])
        rows = rows[~repeats]
    jobs, nodes = np.array([*history.job_ids, None], dtype=object), np.array([*history.node_names, None], dtype=object)
    frame = pl.DataFrame(
        {
            "scope_id": [history.uuids[i] for i in history.gpu[rows]],
            "ts": pl.Series((history.ts[rows] * 1e6).round().astype(np.int64)).cast(pl.Datetime("us", "UTC")),
            "node": nodes[history.node[rows]].tolist(), "job_id": jobs[history.job[rows]].tolist(),
            "cluster": [history.cluster] * len(rows), "seconds": seconds[rows],
        },
        schema=_SCHEMA,
    )  # fmt: skip
    return _judged(frame)


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

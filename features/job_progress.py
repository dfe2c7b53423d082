"""How far jobs are at a moment, made of their own reports: steps done and to do, the pace, what comes on top of it.

Only reports that were made and known by the moment are looked at. Of an application whose processes each report, the
lowest rank speaks (the job as a whole before all). Where the counter of steps falls, the job began again from an
earlier step: only what came since counts. Here belongs the reading of reports; what follows for the time left stands in
`models/reported_progress.py`. No I/O.
"""

from __future__ import annotations

from datetime import timedelta

import polars as pl

LOOK_BACK = timedelta(hours=12)  # older reports say nothing of the pace of now
RECENT = 20  # newest steps of the counter that the pace of late is of

FACTS: dict[str, pl.DataType | type[pl.DataType]] = {
    "step": pl.Int64, "max_steps": pl.Int64, "step_time_s": pl.Float64, "phase": pl.String,
    "reported_at": pl.Datetime("us", "UTC"), "gap_s": pl.Float64, "pace_s": pl.Float64, "slowdown_ratio": pl.Float64,
    "overhead_ratio": pl.Float64, "trained_s": pl.Float64, "still_s": pl.Float64, "longest_s": pl.Float64,
    "restarts": pl.Int64, "silent_s": pl.Float64, "checkpoint_at": pl.Datetime("us", "UTC"),
}  # fmt: skip


def progress_at(asked: pl.DataFrame, reports: pl.DataFrame) -> pl.DataFrame:
    """What reports tell of jobs at moments.

    Args:
        asked: `job_id`, `start_time`, `moment`; a row for each job and moment. `known_at`, where there, lets reports of
            up to `moment` count that became known until then.
        reports: Rows of `core_job_progress` of one cluster.

    Returns:
        Columns of `FACTS`, one row for each of `asked` in order, null where nothing tells:

        - `step`, `max_steps`, `phase`: the newest; `reported_at`: time of the newest report of any kind.
        - `gap_s`: usual time between reports, s.
        - `step_time_s`: median of the newest reported durations of a step, else of the newest measured ones.
        - `pace_s`: median seconds a step over the attempt, by the clock (a single report: as it says itself).
        - `slowdown_ratio`: pace of late ÷ pace of the attempt.
        - `overhead_ratio`: time of checkpoints, evaluation and other pauses ÷ time of steps, over the attempt.
        - `trained_s`: what of the attempt these are measured over; `still_s`: since the counter last moved;
          `longest_s`: the longest it stood still before.
        - `restarts`: how often the counter fell. `silent_s`: since the newest report of any kind.
        - `checkpoint_at`: time of the newest report of the phase `checkpoint`.
    """
    known_at = pl.col("known_at" if "known_at" in asked.columns else "moment").alias("known_at")
    keyed = asked.select("job_id", "start_time", "moment", known_at).with_row_index("row")
    told = keyed.join(
        reports.select("job_id", "ts", "rank", "step", "max_steps", "step_time_s", "phase", "observed_at"), on="job_id"
    )
    told = told.filter(
        (pl.col("ts") >= pl.col("start_time")) & (pl.col("ts") <= pl.col("moment"))
        & (pl.col("ts") > pl.col("moment") - LOOK_BACK)
        & (pl.col("observed_at").fill_null(pl.col("ts")) <= pl.col("known_at"))
    )  # fmt: skip
    told = told.with_columns(pl.col("rank").fill_null(-1)).sort("row", "ts", pl.col("rank") * -1)
    newest = told.group_by("row").agg(
        _seconds(pl.col("moment").last() - pl.col("ts").last()).alias("silent_s"),
        pl.col("max_steps").drop_nulls().last(), pl.col("phase").drop_nulls().last(),
        pl.col("ts").filter(pl.col("phase") == "checkpoint").last().alias("checkpoint_at"),
        pl.col("ts").last().alias("reported_at"), _seconds(pl.col("ts").unique().sort().diff()).median().alias("gap_s"),
    )  # fmt: skip
    found = keyed.select("row").join(newest, on="row", how="left").join(_pace(told), on="row", how="left")
    return found.sort("row").select(pl.col(name).cast(dtype) for name, dtype in FACTS.items())


def _pace(told: pl.DataFrame) -> pl.DataFrame:
    """What the counter of steps tells: one row for each `row` that has one."""
    steps = told.filter(pl.col("step").is_not_null())
    steps = steps.filter(pl.col("rank") == pl.col("rank").min().over("row"))
    before = pl.col("step").shift().over("row")
    steps = steps.with_columns(
        attempt=(pl.col("step") < before).fill_null(False).cast(pl.Int64).cum_sum().over("row"),
        is_moved=(pl.col("step") != before).fill_null(True),
    )
    last = steps.filter(pl.col("attempt") == pl.col("attempt").max().over("row"))
    said = last.group_by("row").agg(
        pl.col("step_time_s").drop_nulls().tail(RECENT).median().alias("said_recent_s"),
        pl.col("step_time_s").median().alias("said_s"), pl.col("step_time_s").count().alias("said"),
    )  # fmt: skip
    moved = last.filter("is_moved").with_columns(
        count=pl.col("step").diff().over("row"), spent_s=_seconds(pl.col("ts").diff().over("row"))
    )
    each = pl.col("spent_s") / pl.col("count")
    around = each.rolling_median(2 * RECENT + 1, min_samples=1, center=True).over("row")  # slow steps are no pauses
    moved = moved.with_columns(steps_s=pl.col("count") * around)
    measured = moved.group_by("row").agg(
        pl.col("step").last(), pl.col("attempt").last().alias("restarts"),
        each.median().alias("measured_s"), each.drop_nulls().tail(RECENT).median().alias("measured_recent_s"),
        pl.col("spent_s").sum().alias("trained_s"),
        (pl.col("spent_s").sum() / pl.col("steps_s").sum() - 1).fill_nan(None).alias("overhead_ratio"),
        pl.col("spent_s").max().alias("longest_s"),
        _seconds(pl.col("moment").last() - pl.col("ts").last()).alias("still_s"),
    )  # fmt: skip
    is_said = pl.col("said") >= 3
    late = pl.when(is_said).then(pl.col("said_recent_s") / pl.col("said_s"))
    late = late.otherwise(pl.col("measured_recent_s") / pl.col("measured_s"))
    return measured.join(said, on="row", how="left").select(
        "row", "step", "restarts", "trained_s", "longest_s", "still_s",
        pl.coalesce("said_recent_s", "measured_recent_s").alias("step_time_s"),
        pl.coalesce("measured_s", "said_s").alias("pace_s"),
        pl.when(late.is_finite()).then(late).alias("slowdown_ratio"),
        "overhead_ratio",
    )  # fmt: skip


def _seconds(span: pl.Expr) -> pl.Expr:
    return span.dt.total_microseconds() / 1e6

"""Slow ranks of a training job: compute time of each step against the gang, from an operation timeline.

Here belong the rule of `straggler` and what it rests on; no model. A gang is the ranks of one pipeline stage, which do
the same work; where no stage is recorded, all ranks. A rank is slow while its compute time of a step is over 1.3 ×
the gang's median for 3 consecutive recorded steps. Recorders sample steps: consecutive means one after the other in the
record. Where a rank or its gang has no time for a step, nothing is known of that step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.label_spans import CLEAR, SET, UNKNOWN

Floats = NDArray[np.float64]

SLOW_RATIO = 1.3
CONSECUTIVE = 3
MIN_GANG = 3  # of two ranks the median cannot say which one is slow
NEEDED = ("rank", "step", "optype", "start_ts", "duration")


class TimelineError(ValueError):
    """An operation timeline cannot be used; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Compute times of ranks by step.

    Attributes:
        ranks, stages: Of each column, shape (ranks,).
        steps: Number of each recorded step, rising, shape (steps,).
        at_s: When each step had ended, seconds, shape (steps,).
        log_ratio: log(compute time ÷ gang's median), NaN where not known, shape (steps, ranks).
        state: `SET`, `CLEAR` or `UNKNOWN` by the label rule, same shape.
        is_clock: Times are of one clock; False: they begin anew at each step, and `at_s` adds up recorded steps.
    """

    ranks: NDArray[np.int64]
    stages: NDArray[np.int64]
    steps: NDArray[np.int64]
    at_s: Floats
    log_ratio: Floats
    state: NDArray[np.int8]
    is_clock: bool


def step_times(timeline: pl.DataFrame) -> StepTimes:
    """Compute times of each rank and step against its gang.

    Args:
        timeline: Operations with `rank`, `step`, `optype`, `start_ts` and `duration` (seconds; `start_ts` a number or
            a time), and `stage` where known. Compute operations are those whose `optype` names compute; where none
            does, every operation that names no communication.

    Raises:
        TimelineError: A column is missing, or no compute operation or no gang is left.
    """
    missing = [name for name in NEEDED if name not in timeline.columns]
    if missing:
        raise TimelineError(f"the timeline lacks {', '.join(missing)}; it has {', '.join(timeline.columns)}")
    start = pl.col("start_ts")
    if timeline["start_ts"].dtype.is_temporal():
        start = start.dt.epoch("us") / 1e6
    stage = pl.col("stage").cast(pl.Int64) if "stage" in timeline.columns else pl.lit(0, dtype=pl.Int64)
    frame = timeline.select(
        pl.col("rank").cast(pl.Int64), pl.col("step").cast(pl.Int64), stage.alias("stage"),
        pl.col("optype").cast(pl.String).str.to_lowercase().alias("optype"), start.cast(pl.Float64).alias("start_s"),
        pl.col("duration").cast(pl.Float64),
    ).drop_nulls(["rank", "step"])  # fmt: skip
    work = frame.filter(_is_compute(frame) & (pl.col("duration") >= 0) & pl.col("duration").is_finite())
    if not work.height:
        names = ", ".join(sorted(frame["optype"].drop_nulls().unique().to_list())[:12])
        raise TimelineError(f"the timeline holds no compute operations; it has: {names}")
    ranks = frame.group_by("rank").agg(pl.col("stage").mode().min()).sort("rank")
    steps = np.sort(frame["step"].unique().to_numpy())
    rank_code = np.searchsorted(ranks["rank"].to_numpy(), work["rank"].to_numpy())
    step_code = np.searchsorted(steps, work["step"].to_numpy())
    shape = (len(steps), ranks.height)
    seconds = np.zeros(shape)
    np.add.at(seconds, (step_code, rank_code), work["duration"].to_numpy())
    seconds[seconds <= 0] = np.nan
    stages = ranks["stage"].fill_null(0).to_numpy()
    log_ratio = np.full(shape, np.nan)
    for one in np.unique(stages):
        gang = stages == one
        part = seconds[:, gang]
        enough = (~np.isnan(part)).sum(axis=1) >= MIN_GANG
        if enough.any():
            log_ratio[np.ix_(enough, gang)] = np.log(part[enough] / np.nanmedian(part[enough], axis=1, keepdims=True))
    if np.isnan(log_ratio).all():
        raise TimelineError(
            f"no stage has {MIN_GANG} ranks with compute times in one step: there is no gang to compare"
        )
    at_s, is_clock = _ends(frame, steps)
    return StepTimes(ranks["rank"].to_numpy(), stages, steps, at_s, log_ratio, slow_states(log_ratio), is_clock)


def slow_states(log_ratio: Floats) -> NDArray[np.int8]:
    """The label rule: slow for `CONSECUTIVE` steps sets it from the last of them on, one fast step clears it.

    Args:
        log_ratio: Shape (steps, ranks), NaN where not known.
    """
    out = np.full(log_ratio.shape, UNKNOWN)
    run = np.zeros(log_ratio.shape[1], dtype=np.int64)
    for i, row in enumerate(log_ratio):
        known = ~np.isnan(row)
        with np.errstate(invalid="ignore"):
            slow = row > np.log(SLOW_RATIO)
        run = np.where(known & slow, run + 1, 0)
        out[i, known] = np.where(run[known] >= CONSECUTIVE, SET, CLEAR)
    return out


def _is_compute(frame: pl.DataFrame) -> pl.Expr:
    compute = pl.col("optype").str.contains("compute")
    if frame.select(compute.any()).item():
        return compute
    return ~pl.col("optype").str.contains("send|recv|reduce|gather|scatter|broadcast|all-to-all|nccl|comm|barrier|wait")


def _ends(frame: pl.DataFrame, steps: NDArray[np.int64]) -> tuple[Floats, bool]:
    """When each step had ended, and whether by one clock."""
    spans = (
        frame.drop_nulls("start_s")
        .group_by("step")
        .agg(pl.col("start_s").min().alias("first"), (pl.col("start_s") + pl.col("duration")).max().alias("last"))
        .sort("step")
    )
    if spans.height != len(steps):
        return np.arange(1.0, len(steps) + 1), False
    first, last = spans["first"].to_numpy(), spans["last"].to_numpy()
    if len(first) < 2 or (np.diff(first) > 0).all():
        return last, True
    return np.cumsum(last - np.minimum(first, 0.0)), False

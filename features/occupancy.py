"""How many GPUs each queue asks for and how many are idle, over time, from jobs and nodes.

Here belongs the reconstruction of occupancy where no one recorded it, and the state of `shortage` on it; what is
forecast from recorded occupancy stands in `features/shortage.py`. Which nodes serve which queue is not known here: idle
GPUs are those of the cluster, so that a queue that is short by this measure is short by any.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.label_spans import CLEAR, SET, UNKNOWN, Series
from features.unit_conditions import queue_distance
from features.vocabulary import TIME

EVERY = timedelta(seconds=30)
OUT_OF_SERVICE = ("DOWN", "DRAIN", "FAIL", "MAINT", "FUTURE", "POWERED_DOWN", "POWER_DOWN", "REBOOT", "NOT_RESPONDING")


def usable_gpus(nodes: pl.DataFrame) -> int | None:
    """GPUs of nodes in service; None where the inventory counts none.

    Args:
        nodes: Rows of `core_nodes`.
    """
    if "gpus" not in nodes.columns or nodes["gpus"].drop_nulls().is_empty():
        return None
    if "state" in nodes.columns:
        state = pl.col("state").fill_null("").str.to_uppercase()
        out = pl.any_horizontal(state.str.contains(word, literal=True) for word in OUT_OF_SERVICE)
        nodes = nodes.filter(~out)
    return int(nodes["gpus"].fill_null(0).sum())


def queue_occupancy(
    jobs: pl.DataFrame, total_gpus: int, begin: datetime, end: datetime, every: timedelta = EVERY
) -> pl.DataFrame:
    """Pending and idle GPUs of each queue on a grid of time.

    A job is pending from when it could have started until it starts or ends; one that is held or waits for another is
    not: no GPU would help it.

    Args:
        jobs: Rows of `core_jobs` that wait or run at any time of the span.
        total_gpus: GPUs in service.
        begin: First moment, UTC.
        end: Moments lie before this.
        every: Between moments.

    Returns:
        `ts`, `queue`, `pending_gpu_num`, `running_gpu_num`, `idle_gpu_num` (the cluster's).
    """
    grid = pl.datetime_range(begin, end, every, closed="left", time_unit="us", time_zone="UTC", eager=True)
    known = jobs.filter(pl.col("gpus") > 0).with_columns(pl.col("queue").fill_null(""))
    queues = sorted(known["queue"].unique().to_list())
    schema = {"ts": TIME, "queue": pl.String} | dict.fromkeys(
        ("pending_gpu_num", "running_gpu_num", "idle_gpu_num"), pl.Int64
    )
    if not queues or not len(grid):
        return pl.DataFrame(schema=schema)
    reason = pl.col("reason") if "reason" in known.columns else pl.lit(None, dtype=pl.String)
    held = reason.fill_null("").str.contains("(?i)held|dependency|begintime") & pl.col("start_time").is_null()
    ready = pl.coalesce("eligible_time", "submit_time")
    known = known.with_columns(
        pl.when(held).then(None).otherwise(ready).alias("_ready"),
        pl.coalesce("start_time", "end_time").alias("_left"),
    )
    at = grid.dt.epoch("us").to_numpy()
    parts, running = [], np.zeros(len(at), dtype=np.int64)
    for queue in queues:
        own = known.filter(pl.col("queue") == queue)
        pending = _level(own, "_ready", "_left", at)
        runs = _level(own.filter(pl.col("start_time").is_not_null()), "start_time", "end_time", at)
        running += runs
        parts.append((queue, pending, runs))
    idle = np.maximum(total_gpus - running, 0)
    return pl.concat(
        pl.DataFrame(
            {"ts": grid, "queue": [queue] * len(at), "pending_gpu_num": pending, "running_gpu_num": runs,
             "idle_gpu_num": idle},
            schema=schema,
        )
        for queue, pending, runs in parts
    )  # fmt: skip


def _level(jobs: pl.DataFrame, start: str, end: str, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """GPUs of jobs that are between two of their times at each moment."""
    jobs = jobs.drop_nulls(start)
    total = np.zeros(len(at), dtype=np.int64)
    for name, sign in ((start, 1), (end, -1)):
        some = jobs.drop_nulls(name).sort(name)
        sums = np.concatenate(([0], np.cumsum(some["gpus"].cast(pl.Int64).to_numpy())))
        total += sign * sums[np.searchsorted(some[name].dt.epoch("us").to_numpy(), at, side="right")]
    return np.maximum(total, 0)


def shortage_states(occupancy: pl.DataFrame) -> tuple[Series, NDArray[np.int8]]:
    """State of `shortage` at every sample of every queue: pending GPUs above idle ones.

    Args:
        occupancy: Rows with `ts`, `queue`, `pending_gpu_num`, `idle_gpu_num`.

    Returns:
        The samples, and shape (samples,); a count that is absent or below zero is unknown.
    """
    frame = (
        occupancy.drop_nulls(["ts", "queue"])
        .with_columns(pl.col("queue").alias("scope_id"))
        .unique(["scope_id", "ts"], keep="last")
        .sort("scope_id", "ts")
    )
    counts = (frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in ("pending_gpu_num", "idle_gpu_num"))
    distance = queue_distance(*counts)
    state = np.where(np.isnan(distance), UNKNOWN, np.where(distance <= 0, SET, CLEAR))
    return Series.of(frame), state.astype(np.int8)

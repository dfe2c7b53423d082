"""Recorded jobs as a replay takes them: whole seconds, processors, limits, and codes of users and keys.

Here belongs what is dropped and what is clipped, and that it is counted; the event loop stands in `engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints = NDArray[np.int64]
UNITS = ("gpus", "nodes", "cpus")
UNIT_WORDS = {"gpus": "GPUs", "nodes": "nodes", "cpus": "CPUs"}
NEEDED = ("submit_time", "start_time", "end_time")


class ReplayError(ValueError):
    """These jobs cannot be replayed like this; the message names what is wrong and what is valid."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of submission; arrays of shape (jobs,).

    Attributes:
        job_id: Names.
        submit: Seconds since the first submission.
        procs, run, limit: Processors, runtime and limit, s; `run` ≤ `limit`.
        user: Code of the user.
        key: Code of user, size and limit together: what keyed recency goes by.
        origin_s: First submission, seconds since 1970.
        unit: What a processor is: gpus, nodes or cpus.
        dropped: What was left out or changed, in words, with how many jobs.
    """

    job_id: list[str]
    submit: Ints
    procs: Ints
    run: Ints
    limit: Ints
    user: Ints
    key: Ints
    origin_s: int
    unit: str
    dropped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.submit)

    def take(self, rows: Ints, submit: Ints | None = None) -> Workload:
        """Some of the jobs, perhaps submitted at other times; ordered again."""
        at = self.submit[rows] if submit is None else submit
        rows = rows[(order := np.argsort(at, kind="stable"))]
        return Workload(
            [self.job_id[row] for row in rows], at[order], self.procs[rows], self.run[rows], self.limit[rows],
            self.user[rows], self.key[rows], self.origin_s, self.unit, self.dropped,
        )  # fmt: skip


def workload_of(jobs: pl.DataFrame, total: int, unit: str | None = None) -> Workload:
    """Jobs of a canonical file that ran, as a replay takes them.

    Args:
        jobs: `job_id`, `submit_time`, `start_time`, `end_time`, `user`, `time_limit_s`, and one or more of `gpus`,
            `nodes`, `cpus`.
        total: Processors of the cluster.
        unit: Which of these is a processor; None: GPUs where any job has some, else nodes where all jobs tell them,
            else CPUs.

    Raises:
        ReplayError: A column is missing, no job is left, or one is wider than the cluster.
    """
    missing = [name for name in NEEDED if name not in jobs.columns]
    if missing:
        raise ReplayError(f"the jobs lack {', '.join(missing)}; a replay needs {', '.join(NEEDED)}")
    unit = unit or _unit_of(jobs)
    if unit not in UNITS or unit not in jobs.columns:
        there = [name for name in UNITS if name in jobs.columns]
        raise ReplayError(f"--unit {unit}: the jobs have {', '.join(there) or 'none of ' + ', '.join(UNITS)}")
    frame = jobs.select(
        pl.col("job_id").cast(pl.String) if "job_id" in jobs.columns else pl.lit("").alias("job_id"),
        pl.col("submit_time").dt.epoch("s").alias("submit"),
        (pl.col("end_time") - pl.col("start_time")).dt.total_seconds().alias("run"),
        pl.col(unit).cast(pl.Int64).alias("procs"),
        (pl.col("time_limit_s") if "time_limit_s" in jobs.columns else pl.lit(None)).cast(pl.Int64).alias("limit"),
        (pl.col("user") if "user" in jobs.columns else pl.lit(None)).cast(pl.String).fill_null("").alias("user"),
    )
    dropped = []

    def keep(condition: pl.Expr, words: str) -> None:
        nonlocal frame
        left = frame.filter(condition)
        if left.height < frame.height:
            dropped.append(f"{frame.height - left.height:,} jobs {words}: left out")
        frame = left

    keep(pl.col("submit").is_not_null() & pl.col("run").is_not_null(), "without submission, start or end")
    keep(pl.col("procs").fill_null(0) > 0, f"without {unit}")
    keep(pl.col("run") > 0, "that ran for no time")
    if frame.is_empty():
        raise ReplayError(f"no job is left: {'; '.join(dropped) or 'the file is empty'}")
    widest = int(frame["procs"].cast(pl.Int64).to_numpy().max())
    if widest > total:
        wide = int((frame["procs"] > total).sum())
        raise ReplayError(f"--nodes {total}: {wide:,} jobs ask for more {unit}, the widest for {widest:,}")
    unlimited = frame["limit"].fill_null(0) <= 0
    if unlimited.any():
        longest = int(frame["run"].cast(pl.Int64).to_numpy().max())
        dropped.append(f"{int(unlimited.sum()):,} jobs without limit: given {longest:,} s, the longest that one ran")
        frame = frame.with_columns(pl.when(unlimited).then(longest).otherwise("limit").alias("limit"))
    over = int((frame["run"] > frame["limit"]).sum())
    if over:
        dropped.append(f"{over:,} jobs ran beyond their limit: ended at it")
    frame = frame.with_columns(pl.min_horizontal("run", "limit").alias("run")).sort("submit", maintain_order=True)
    key = frame.select(pl.struct("user", "procs", "limit").rank("dense") - 1).to_series()
    submit = frame["submit"].to_numpy().astype(np.int64)
    return Workload(
        frame["job_id"].to_list(),
        submit - submit[0],
        *(frame[name].to_numpy().astype(np.int64) for name in ("procs", "run", "limit")),
        (frame["user"].rank("dense") - 1).to_numpy().astype(np.int64),
        key.to_numpy().astype(np.int64),
        int(submit[0]),
        unit,
        tuple(dropped),
    )


def _unit_of(jobs: pl.DataFrame) -> str:
    if "gpus" in jobs.columns and (jobs["gpus"].fill_null(0) > 0).any():
        return "gpus"
    if "nodes" in jobs.columns and jobs["nodes"].null_count() == 0:
        return "nodes"
    return "cpus"

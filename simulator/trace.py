"""Recorded jobs to replay in place of simulated users: a canonical jobs file.

Jobs that never ran, ask for no GPU or for more than there are, are left out. Who else submits: `workload.py`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from simulator.hardware import GPUS_PER_NODE, SimulatorError
from simulator.jobs import Job
from simulator.workload import DAY_S


class Trace:
    """Jobs of a canonical jobs file, moved in time so that the first is submitted at `start`."""

    def __init__(self, path: Path, start: float, cluster_gpus: int, seed: int) -> None:
        """Read the file.

        Raises:
            SimulatorError: The file is missing, not Parquet, or holds no GPU job that fits the cluster.
        """
        try:
            frame = pl.read_parquet(path)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise SimulatorError(f"{path}: not a readable Parquet file: {error}") from None
        needed = {"submit_time", "start_time", "end_time", "gpus"}
        if missing := needed - set(frame.columns):
            raise SimulatorError(f"{path}: not a canonical jobs file; missing: {', '.join(sorted(missing))}")
        frame = frame.filter(
            pl.col("gpus").is_between(1, cluster_gpus), pl.col("end_time") > pl.col("start_time")
        ).sort("submit_time")
        if frame.is_empty():
            raise SimulatorError(f"{path}: no ended GPU job of 1 to {cluster_gpus} GPUs in it")
        self.jobs = list(self._read(frame, start, seed))

    @staticmethod
    def _read(frame: pl.DataFrame, start: float, seed: int) -> Iterator[Job]:
        seconds = frame.with_columns(
            (pl.col(c).dt.epoch("us") / 1e6).alias(c) for c in ("submit_time", "start_time", "end_time")
        )
        shift = start - seconds["submit_time"][0]
        for number, row in enumerate(seconds.iter_rows(named=True)):
            gpus = int(row["gpus"])
            nodes = -(-gpus // GPUS_PER_NODE)
            per_node = gpus if nodes == 1 else GPUS_PER_NODE
            state = row.get("state") or "UNKNOWN"
            habit = zlib.crc32(f"{seed}/{row.get('user')}/{gpus}/{row.get('time_limit_s')}".encode()) % 2**31
            yield Job(
                id=0,
                user=str(row.get("user") or "unknown"),
                account=str(row.get("account") or "unknown"),
                queue=str(row.get("queue") or "batch"),
                name=str(row.get("name") or "job"),
                submit=math.floor(row["submit_time"] + shift),
                nodes=nodes,
                per_node=per_node,
                limit_s=float(row["time_limit_s"]) if row.get("time_limit_s") else None,
                runtime_s=max(1.0, row["end_time"] - row["start_time"]),
                outcome=state if state in ("COMPLETED", "FAILED", "CANCELLED", "OUT_OF_MEMORY") else "COMPLETED",
                cpus=int(row.get("cpus") or gpus * 4),
                memory_mib=int(row.get("memory_mib") or gpus * 65_536),
                habit=("train", gpus, habit, number + seed),
            )

    def submissions(self, day: int) -> list[Job]:
        """Jobs submitted on day `day` since the epoch, in order."""
        return [job for job in self.jobs if job.submit // DAY_S == day]

    def resubmission(self, job: Job, at: float) -> Job | None:  # noqa: ARG002 - a recording holds its own retries
        return None

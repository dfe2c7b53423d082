"""A piece of a recorded trace, replayed on a real Slurm whose clock runs fast, and what its reader saw meanwhile.

Limits, sizes and gaps between submissions stay as recorded, in the time of the fast clock; a job is a `sleep` of its
runtime ÷ speed real seconds. Here belongs the replay; not what is made of it (`benchmarks/slurm_start.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipelines.settings import Cluster
from pipelines.sources import SourceError
from pipelines.sources.slurm import SlurmSource, build_slurm

if TYPE_CHECKING:
    from tests.services import FastClock, Slurm

NODES, CPUS = 5, 20  # stand for the 100 nodes of the recorded machine: any free ones will do for a job
_START_UP_S = 30.0  # real seconds in which Slurm comes up
_MOST_RPCS = 60_000.0
SCHEDULER = "bf_interval=30,bf_window=10080,bf_resolution=60,bf_max_job_test=1000,bf_continue,batch_sched_delay=0"
_YEAR_S = 31_536_000
_OF_THE_RECORD = ("user", "account", "queue", "name", "nodes", "cpus", "gpus", "memory_mib")


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay, in times of the fast clock.

    Attributes:
        jobs: Canonical jobs, with the users and names of the record; `trace_id` is the id there.
        states: Rows of `core_job_states` as the reader told them: what changed.
        looks: Moments of the reader's polls.
        until: The last of them.
    """

    jobs: pl.DataFrame
    states: pl.DataFrame
    looks: list[datetime]
    until: datetime


@contextmanager
def fast_slurm(
    folder: Path, start: datetime, speed: float, *, nodes: int = NODES, cpus: int = CPUS, accounting: bool = True
) -> Generator[tuple[Slurm, FastClock]]:
    """A real Slurm on a fast clock that shows `start` some time after it has come up.

    Args:
        folder: State folder; keep its path short.
        start: First moment of the replay, UTC.
        speed: Seconds of the clock in one real second.
        nodes: Number of nodes.
        cpus: CPUs of each.
        accounting: With slurmdbd, else with the job completion file.

    Raises:
        tests.services.ServiceError: It did not come up.
    """
    from tests.services import FastClock, Slurm

    clock = FastClock(start - timedelta(seconds=speed * (_START_UP_S if accounting else _START_UP_S / 10)), speed)
    try:
        slurm = Slurm(
            folder, nodes, accounting=accounting, cpus=cpus, clock=clock.env,
            parameters={
                "SchedulerParameters": SCHEDULER,
                # Waits for messages are counted on the fast clock too, and so is the life of a credential.
                "MessageTimeout": f"{100 * speed:.0f}", "TCPTimeout": f"{20 * speed:.0f}",
                "AuthInfo": f"socket={folder}/munge.sock,cred_expire={_YEAR_S}", "BatchStartTimeout": "36000",
                "SlurmdTimeout": "0", "InactiveLimit": "0", "MinJobAge": f"{_YEAR_S}",
            },
        )  # fmt: skip
        try:
            yield slurm, clock
        finally:
            slurm.stop()
    finally:
        clock.stop()


def replay(slurm: Slurm, clock: FastClock, jobs: pl.DataFrame, until: datetime, *, poll_s: float = 0.4) -> Replayed:
    """Submit recorded jobs when their time comes and read the queue meanwhile, as the Slurm source reads it.

    Args:
        slurm: The Slurm.
        clock: Its clock.
        jobs: As of `piece`, ordered by `at`, the moment of submission.
        until: When to stop, jobs or no jobs.
        poll_s: Real seconds between polls at least.

    Raises:
        SourceError: Slurm did not answer.
    """
    cluster = Cluster(
        jobs="slurm", slurm_conf=str(slurm.conf), slurm_rpcs_per_minute=_MOST_RPCS,
        jobs_path="" if slurm.accounting else str(slurm.jobcomp),
    )  # fmt: skip
    source = build_slurm(slurm.cluster, cluster, slurm.folder / "reader")
    waiting, ids = list(jobs.iter_rows(named=True)), {}
    states, looks = [], []
    begun = clock.now()
    try:
        while (now := clock.now()) < until:
            began = time.monotonic()
            while waiting and waiting[0]["at"] <= now:
                row = waiting.pop(0)
                ids[str(_submit(slurm, clock, row))] = row["trace_id"]
            live = source.live()
            states.append(live.states.with_columns(pl.lit(clock.now()).alias("observed_at")))
            looks.append(clock.now())
            if not waiting and live.jobs.is_empty():
                break
            time.sleep(max(0.0, poll_s - (time.monotonic() - began)))
        ended = clock.now()
        found = _recorded(source, begun, ended, ids)
    finally:
        source.close()
    known = pl.DataFrame({"job_id": list(ids), "trace_id": list(ids.values())}, schema_overrides={"job_id": pl.String})
    who = jobs.select("trace_id", *_OF_THE_RECORD, time_limit_s="limit_s")
    told = found.drop(*_OF_THE_RECORD, "time_limit_s").join(known, on="job_id").join(who, on="trace_id")
    return Replayed(told.sort("submit_time", "job_id"), pl.concat(states), looks, ended)


def _submit(slurm: Slurm, clock: FastClock, row: dict) -> int:
    sleep_s = row["run_s"] / clock.speed
    limit = max(1, math.ceil(row["limit_s"] / 60))
    return slurm.submit(f"--ntasks={row['cpus']}", f"--time={limit}", script=f"sleep {sleep_s:.3f}")


def _recorded(source: SlurmSource, begun: datetime, ended: datetime, ids: dict[str, str]) -> pl.DataFrame:
    """Jobs as the scheduler has recorded them; its database hears of a change a moment later."""
    margin = timedelta(days=1)
    for _ in range(20):
        try:
            found = source.fetch_jobs(begun - margin, ended + margin)
            if len(set(found["job_id"]) & set(ids)) == len(ids):
                return found
        except SourceError:
            pass
        time.sleep(0.5)
    return source.fetch_jobs(begun - margin, ended + margin)


def piece(trace: pl.DataFrame, start: datetime, hours: float, most: int) -> pl.DataFrame:
    """The jobs of a recorded trace that a replay from `start` on submits; what `replay` takes.

    Those that ran or waited at `start` come first, with what was left of them, and are marked `is_warm`.

    Args:
        trace: Canonical jobs.
        start: First moment.
        hours: Length of the piece.
        most: Jobs of the piece at most, those that only fill the machine not counted.
    """
    until = start + timedelta(hours=hours)
    run_s = (pl.col("end_time") - pl.col("start_time")).dt.total_seconds()
    jobs = trace.filter(pl.col("start_time").is_not_null() & pl.col("end_time").is_not_null())
    gone_s = (start - pl.col("start_time")).dt.total_seconds().clip(lower_bound=0)
    warm = jobs.filter((pl.col("submit_time") < start) & (pl.col("end_time") > start)).sort("start_time")
    warm = warm.with_columns(
        at=pl.lit(start), is_warm=pl.lit(True), run_s=run_s - gone_s,
        limit_s=(pl.col("time_limit_s") - gone_s).clip(lower_bound=60),
    )  # fmt: skip
    new = jobs.filter((pl.col("submit_time") >= start) & (pl.col("submit_time") < until)).sort("submit_time", "job_id")
    new = new.head(most).with_columns(
        at=pl.col("submit_time"), is_warm=pl.lit(False), run_s=run_s, limit_s=pl.col("time_limit_s")
    )
    return pl.concat([warm, new]).rename({"job_id": "trace_id"})

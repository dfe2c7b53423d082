"""Hourly demand of a cluster and its queues as known at a moment: arrivals, hours asked for, units in demand.

Here belongs counting canonical jobs into hours, pure; no forecast (`models/demand.py`). Nothing later than the moment
enters: a start or an end after it is as if unknown, so the series of an earlier moment is the head of a later one's.
The unit is the GPU; where no job asks for any, it is the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Unit = Literal["gpus", "cpus"]
Quantity = Literal["arrivals", "asked_hours", "in_demand"]
QUANTITIES: tuple[Quantity, ...] = ("arrivals", "asked_hours", "in_demand")

HOUR = timedelta(hours=1)
NEVER = np.iinfo(np.int64).max  # a time that is not known yet, µs
_HOUR_US = 3_600_000_000
_MIN_LIMITED_RATIO = 0.9  # hours asked for mean nothing where most jobs name no limit
_NEEDED = ("submit_time", "start_time", "end_time", "gpus", "cpus", "time_limit_s", "queue")
_OPEN_STATES = ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "COMPLETING", "PREEMPTED")


@dataclass(frozen=True, slots=True)
class HourlyDemand:
    """Demand by full hour; hour j begins at `begin` + j hours. All arrays have shape (hours,).

    Attributes:
        queue: Name of the queue; None: all queues together.
        unit: What demand is counted in.
        begin: Start of the first hour, UTC.
        arrivals: Jobs submitted within the hour, jobs/h.
        asked_hours: Unit-hours submitted within the hour, as units × time limit; None where limits are mostly unknown.
        in_use: Units of the jobs that run at the end of the hour.
        in_demand: Units of the jobs that run or pend at the end of the hour.
        unsized: Jobs that name no size: they arrive, and count for nothing in demand.
        undated: Jobs left out: without a submit time, ended before it, or ended at an unknown time.
    """

    queue: str | None
    unit: Unit
    begin: datetime
    arrivals: Floats
    asked_hours: Floats | None
    in_use: Floats
    in_demand: Floats
    unsized: int
    undated: int

    @property
    def hours(self) -> int:
        """Number of full hours."""
        return len(self.arrivals)

    @property
    def end(self) -> datetime:
        """End of the last full hour: the moment that `in_use` and `in_demand` last speak of."""
        return self.begin + self.hours * HOUR

    def values(self, quantity: Quantity) -> Floats | None:
        """One series by name; None where it is not known.

        Raises:
            ValueError: There is no such quantity; the message lists those there are.
        """
        if quantity not in QUANTITIES:
            raise ValueError(f"no quantity {quantity!r}; quantities: {', '.join(QUANTITIES)}")
        return getattr(self, quantity)


def unit_of(jobs: pl.DataFrame) -> Unit:
    """GPUs where any job asks for one, else CPUs."""
    return "gpus" if (jobs["gpus"].cast(pl.Int64).sum() or 0) > 0 else "cpus"


def hourly_demand(
    jobs: pl.DataFrame, now: datetime, *, queue: str | None = None, since: datetime | None = None,
    unit: Unit | None = None,
) -> HourlyDemand:  # fmt: skip
    """Count jobs into the full hours before a moment.

    Args:
        jobs: Canonical jobs of one cluster, in any order; those submitted after `now` are passed over.
        now: The moment, UTC; the hour that it lies in has not ended and is left out.
        queue: Only jobs of this queue; None: all.
        since: Start of the first hour; None: the hour of the first submission. Jobs from before it count in demand.
        unit: What to count in; None: as `unit_of` says of all jobs.

    Raises:
        ValueError: `now` has no time zone, or a needed column is absent.
    """
    if now.tzinfo is None:
        raise ValueError(f"now = {now.isoformat()} has no time zone; demand is counted in UTC")
    missing = [name for name in _NEEDED if name not in jobs.columns]
    if missing:
        raise ValueError(f"jobs lack {', '.join(missing)}; they have {', '.join(jobs.columns)}")
    unit = unit or unit_of(jobs)
    chosen = jobs if queue is None else jobs.filter(pl.col("queue") == queue)
    known, undated = known_jobs(chosen, now)
    last_us = int(now.timestamp()) // 3600 * _HOUR_US
    first_us = int(since.timestamp()) // 3600 * _HOUR_US if since else _first_hour(known, last_us)
    hours = max(0, (last_us - first_us) // _HOUR_US)
    submit, start, end = (known[name].to_numpy() for name in ("submit", "start", "end"))
    size = known[unit].cast(pl.Float64).fill_null(0.0).clip(0.0).to_numpy()
    arrived = _hour(submit, first_us)
    inside = (arrived >= 0) & (arrived < hours)
    limit_h = known["time_limit_s"].cast(pl.Float64).to_numpy() / 3600.0
    is_limited = np.isfinite(limit_h) & (limit_h >= 0)
    asked = None
    if inside.any() and is_limited[inside].mean() >= _MIN_LIMITED_RATIO:
        asked = _sums(arrived, np.where(is_limited, size * np.nan_to_num(limit_h), 0.0), inside, hours)
    return HourlyDemand(
        queue=queue,
        unit=unit,
        begin=datetime.fromtimestamp(first_us / 1e6, UTC),
        arrivals=_sums(arrived, np.ones(len(submit)), inside, hours),
        asked_hours=asked,
        in_use=hours_standing(start, end, size, first_us, hours),
        in_demand=hours_standing(submit, end, size, first_us, hours),
        unsized=int(known[unit].null_count()),
        undated=undated,
    )


def known_jobs(jobs: pl.DataFrame, now: datetime) -> tuple[pl.DataFrame, int]:
    """Jobs with times in µs as known at a moment (unknown: `NEVER`), and how many make no sense."""
    state = pl.col("state") if "state" in jobs.columns else pl.lit(None, dtype=pl.String)
    came = jobs.filter(pl.col("submit_time").is_null() | (pl.col("submit_time") <= now))
    is_lost = pl.col("end_time").is_null() & ~state.fill_null("RUNNING").is_in(_OPEN_STATES)
    is_odd = pl.col("submit_time").is_null() | (pl.col("end_time") < pl.col("submit_time")).fill_null(False) | is_lost
    sound = came.filter(~is_odd)

    def until(name: str) -> pl.Expr:
        return pl.when(pl.col(name) <= now).then(pl.col(name).dt.epoch("us")).otherwise(NEVER).fill_null(NEVER)

    times = sound.with_columns(
        pl.col("submit_time").dt.epoch("us").alias("submit"),
        until("start_time").alias("start"),
        until("end_time").alias("end"),
    )
    return times, came.height - sound.height


def _first_hour(known: pl.DataFrame, last_us: int) -> int:
    first = known["submit"].min()
    return first // _HOUR_US * _HOUR_US if isinstance(first, int) else last_us


def _hour(at_us: NDArray[np.int64], first_us: int) -> NDArray[np.int64]:
    """Index of the hour that a moment lies in."""
    return (at_us - first_us) // _HOUR_US


def _sums(index: NDArray[np.int64], weights: Floats, inside: NDArray[np.bool_], hours: int) -> Floats:
    return np.bincount(index[inside], weights=weights[inside], minlength=hours).astype(np.float64)[:hours]


def hours_standing(
    begin_us: NDArray[np.int64], end_us: NDArray[np.int64], size: Floats, first_us: int, hours: int
) -> Floats:
    """Units of what has begun and not ended at the end of each hour, shape (hours,); the first begins at `first_us`."""
    change = np.zeros(hours + 1)
    # The first end of an hour at or after the moment.
    enter = np.clip(-((first_us - begin_us) // _HOUR_US) - 1, 0, hours)
    leave = np.clip(-((first_us - end_us) // _HOUR_US) - 1, 0, hours)
    np.add.at(change, enter, size)
    np.add.at(change, np.maximum(leave, enter), -size)
    return np.maximum(np.cumsum(change)[:hours], 0.0)

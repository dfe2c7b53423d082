"""What stands now and what of it will be gone: demand some hours ahead from the jobs that run or wait at a moment.

Each job's chance to end within the horizon comes from jobs that ended before: the newest of the same user, limit and
size, of the user, and of all, given for how long it has run (or waited) and capped by its limit. What comes anew is
drawn from what came at the same hour of the days before. The forecast is the median of both drawn together. It is one
expert among those of `models/demand_experts.py`, for up to half a day ahead; which one is believed is not said here.
Nothing later than an origin enters its forecast: draws hang on a job's submit time and the hour, not on other jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.demand import NEVER, Unit, hours_standing, known_jobs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FLOW_HORIZONS_H = (1, 3, 6, 12)
MAX_PAIRS = 4_000_000  # jobs × hours that are looked at; older hours have no such forecast
_DRAWS = 16
_DAYS = 28  # days that newcomers are drawn from
_MIN_DAYS = 7
_SAME_KEY, _SAME_USER, _ANYONE, _STRIDE = 10, 10, 20, 10
_WEIGHTS = np.repeat(np.array([1.0, 0.3, 0.05], dtype=np.float32), [_SAME_KEY, _SAME_USER, _ANYONE])
_PRIOR = 0.3  # weight of a chance that falls with the time passed: what is said where no like job is known
_AT_LIMIT = 0.98  # few jobs outlive their limit
_HOUR_US = 3_600_000_000
_CHUNK = 200_000


class Flow:
    """Jobs that stood at each full hour, with their chances to end, made once for all queues of a cluster.

    Args:
        jobs: Canonical jobs, as of `features.demand.hourly_demand`.
        now: The moment, UTC.
        begin: Start of the first hour, UTC.
        hours: Number of hours.
        unit: What demand is counted in.
        queues: Queues that will be asked for; the others count in the whole only.
    """

    def __init__(
        self, jobs: pl.DataFrame, now: datetime, begin: datetime, hours: int, unit: Unit, queues: Sequence[str] = ()
    ) -> None:
        known, _ = known_jobs(jobs, now)
        self.hours, self._codes = hours, {name: code for code, name in enumerate(queues)}
        first_us = int(begin.timestamp()) * 1_000_000
        submit, start, end = (known[name].to_numpy() for name in ("submit", "start", "end"))
        start = np.minimum(start, end)
        limit_s = known["time_limit_s"].cast(pl.Float64).fill_null(np.inf).to_numpy()
        limit_s = np.where(limit_s > 0, limit_s, np.inf)
        size = known[unit].cast(pl.Float64).fill_null(0.0).clip(0.0).to_numpy()
        oldest = _oldest_hour(submit, np.where(size > 0, end, submit), first_us, hours)
        user, key = _groups(known, unit)
        runs = _Past(user, key, start, end)
        stays = _Past(user, key, submit, end)
        parts = [
            (job, hour, past, limit)
            for since, until, past, limit in (
                (start, end, runs, limit_s),
                (submit, start, stays, np.full(len(limit_s), np.inf)),
            )
            for job, hour in [_pairs(since, until, size, first_us, oldest, hours)]
        ]
        job, self._hour = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
        self._size = size[job]
        queue = known["queue"].fill_null("").replace_strict(self._codes, default=len(queues), return_dtype=pl.Int64)
        self._cell = queue.to_numpy()[job] * hours + self._hour
        self._end_hour = np.clip(-((first_us - end) // _HOUR_US) - 1, 0, np.iinfo(np.int64).max)[job]
        self._oldest = oldest
        chances = [past.chances(standing, at, first_us, limit) for standing, at, past, limit in parts]
        self._ends = dict(zip(FLOW_HORIZONS_H, np.concatenate(chances, axis=1), strict=True))
        self._seed = _seeds(submit)[job] ^ _mixed(self._hour.astype(np.uint64) + np.uint64(first_us // _HOUR_US))
        self._drawn = self._draw((len(queues) + 1) * hours)

    def forecast(self, in_demand: Floats, queue: str | None = None) -> dict[int, Floats]:
        """Units in demand by horizon at every origin; row i knows the first i hours.

        Args:
            in_demand: Units in demand at the end of each hour, shape (hours,).
            queue: One of those named at the start; None: all together.

        Returns:
            Horizon, h → shape (hours + 1,), NaN where too little is known.
        """
        found = {}
        for horizon_h in FLOW_HORIZONS_H:
            stands = self._of(self._drawn[horizon_h], queue)  # (draws, hours)
            is_left = self._end_hour > self._hour + horizon_h
            left = self._of(self._sum(np.where(is_left, self._size, 0.0))[None], queue)[0]
            fresh = np.full(self.hours, np.nan)
            known = max(0, self.hours - horizon_h)
            fresh[:known] = in_demand[horizon_h:] - left[:known]
            fresh[: self._oldest] = np.nan
            found[horizon_h] = np.concatenate([[np.nan], _medians(stands, fresh)])
        return found

    def _draw(self, cells: int) -> dict[int, NDArray[np.float32]]:
        drawn = {horizon_h: np.empty((_DRAWS, cells), dtype=np.float32) for horizon_h in FLOW_HORIZONS_H}
        for draw in range(_DRAWS):
            even = (_mixed(self._seed + np.uint64(draw)) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
            for horizon_h, chance in self._ends.items():
                drawn[horizon_h][draw] = self._sum(np.where(even >= chance, self._size, 0.0), cells)
        return drawn

    def _sum(self, size: Floats, cells: int | None = None) -> Floats:
        cells = cells or (len(self._codes) + 1) * self.hours
        return np.bincount(self._cell, weights=size, minlength=cells).astype(np.float64, copy=False)

    def _of(self, sums: NDArray, queue: str | None) -> NDArray:
        by_queue = sums.reshape(len(sums), -1, self.hours)
        return by_queue.sum(axis=1) if queue is None else by_queue[:, self._codes[queue]]


class _Past:
    """How long like jobs took that had ended when a job began, of each job: shape (jobs, samples), seconds."""

    def __init__(self, user: Ints, key: Ints, since: Ints, end: Ints) -> None:
        took = np.where((end < NEVER) & (since < end), (end - since) / 1e6, np.nan)
        released = np.where(np.isfinite(took), end, NEVER)
        self._since = since
        whole = np.zeros(len(user), dtype=np.int64)
        self._took = np.concatenate(
            [
                _newest(key, released, took, since, _SAME_KEY),
                _newest(user, released, took, since, _SAME_USER),
                _newest(whole, released, took, since, _ANYONE, _STRIDE),
            ],
            axis=1,
        )

    def chances(self, job: Ints, hour: Ints, first_us: int, limit_s: Floats) -> NDArray[np.float32]:
        """Chance of each job, standing at the end of an hour, to end within each horizon, shape (horizons, pairs)."""
        chance = np.empty((len(FLOW_HORIZONS_H), len(job)), dtype=np.float32)
        for first in range(0, len(job), _CHUNK):
            part = slice(first, first + _CHUNK)
            which = job[part]
            past_s = (first_us + (hour[part] + 1) * _HOUR_US - self._since[which]) / 1e6
            limit = limit_s[which]
            took = np.minimum(self._took[which], limit.astype(np.float32)[:, None])
            weights = np.where(took > past_s.astype(np.float32)[:, None], _WEIGHTS, np.float32(0))  # none where NaN
            whole = weights.sum(axis=1) + _PRIOR
            for row, horizon_h in enumerate(FLOW_HORIZONS_H):
                until_s = past_s + horizon_h * 3600.0
                ended = np.where(took <= until_s.astype(np.float32)[:, None], weights, np.float32(0)).sum(axis=1)
                blank = 1 - (past_s + 3600.0) / (until_s + 3600.0)
                found = (ended + _PRIOR * blank) / whole
                at_limit = (limit > past_s) & (until_s >= limit)
                chance[row, part] = np.where(at_limit, np.maximum(found, _AT_LIMIT), found)
        return chance


def _groups(known: pl.DataFrame, unit: Unit) -> tuple[Ints, Ints]:
    """Codes of the users, and of user, limit and size together."""
    user = pl.col("user").fill_null("") if "user" in known.columns else pl.lit("")
    codes = known.select(
        user.rank("dense").cast(pl.Int64).alias("user"),
        pl.struct(user.alias("user"), "time_limit_s", unit).rank("dense").cast(pl.Int64).alias("key"),
    )
    return codes["user"].to_numpy(), codes["key"].to_numpy()


def _newest(
    group: Ints, released: Ints, took: Floats, at: Ints, count: int, stride: int = 1
) -> NDArray[np.float32]:  # fmt: skip
    """The newest values of a group that were released at or before a moment, every `stride`-th, NaN where none is."""
    ended = np.flatnonzero(released < NEVER)
    ended = ended[np.lexsort((released[ended], group[ended]))]
    found = np.full((len(group), count), np.nan, dtype=np.float32)
    if not len(ended):
        return found
    _, rank = np.unique(np.concatenate([released[ended], at]), return_inverse=True)
    span = int(rank.max()) + 1
    behind = np.searchsorted(group[ended] * span + rank[: len(ended)], group * span + rank[len(ended) :], side="right")
    begin = np.searchsorted(group[ended], group, side="left")
    for k in range(count):
        index = behind - 1 - k * stride
        there = index >= begin
        found[there, k] = took[ended[index[there]]]
    return found


def _oldest_hour(submit: Ints, end: Ints, first_us: int, hours: int) -> int:
    """The first hour from which on all pairs fit under `MAX_PAIRS`."""
    standing = hours_standing(submit, end, np.ones(len(submit)), first_us, hours)
    newest_first = np.cumsum(standing[::-1])
    return hours - int(np.searchsorted(newest_first, MAX_PAIRS, side="right"))


def _pairs(since: Ints, until: Ints, size: Floats, first_us: int, oldest: int, hours: int) -> tuple[Ints, Ints]:
    """Index of a job and of the hour, for each hour at whose end a job that has a size stood."""
    enter = np.clip(-((first_us - since) // _HOUR_US) - 1, oldest, hours)
    leave = np.clip(-((first_us - until) // _HOUR_US) - 1, oldest, hours)
    count = np.where(size > 0, np.maximum(leave - enter, 0), 0)
    job = np.repeat(np.arange(len(since)), count)
    return job, np.arange(len(job)) - np.repeat(np.cumsum(count) - count - enter, count)


def _medians(stands: NDArray[np.float32], fresh: Floats) -> Floats:
    """Median over draws of what stays, with newcomers of the same hour of the days before, shape (hours,)."""
    hours = stands.shape[1]
    found = np.full(hours, np.nan)
    for first in range(0, hours, 1000):
        origin = np.arange(first, min(first + 1000, hours))
        index = origin[:, None] - 24 * np.arange(1, _DAYS + 1)  # no horizon is longer than a day
        newcomers = np.where(index >= 0, fresh[np.maximum(index, 0)], np.nan)
        both = stands[:, origin].T[:, :, None] + newcomers[:, None, :]
        ordered = np.sort(both.reshape(len(origin), -1), axis=1)  # NaN last
        known = (~np.isnan(newcomers)).sum(axis=1)
        enough = known >= _MIN_DAYS
        middle = np.maximum(known * len(stands) // 2, 0)
        found[origin[enough]] = ordered[enough, middle[enough]]
    return found


def _seeds(submit: Ints) -> NDArray[np.uint64]:
    """A number of each job that hangs on its submit time, and on its place among those of the same microsecond."""
    order = np.argsort(submit, kind="stable")
    is_new = np.diff(submit[order], prepend=-1) != 0
    place = np.arange(len(order)) - np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    among = np.empty(len(order), dtype=np.uint64)
    among[order] = place
    return _mixed(submit.astype(np.uint64) ^ _mixed(among))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: even bits from any numbers."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))

"""What is known of a job when it is submitted, as numbers: the features of the runtime and failure forecasters.

One function serves training, backtest and live: `job_features(jobs, history, at)`. Nothing here looks past the
moment: an end counts only after it happened, a running sibling counts with its elapsed time alone. Here belong features
known at submit; not the queue's state (`features/job_queue.py`) and not the lookups (`features/job_history.py`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_likeness import Likeness, like_jobs
from features.job_memberships import MEMBER_FEATURES, member_columns, member_groups, prepare
from features.job_recency import NEWEST_RUNS, STARTED_RUNS, newest_runs, row_mean, started_runs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RECENT = 20  # entries that recency looks back on
STARTED = 24  # newest started siblings for Kaplan–Meier
_CHUNK = 20_000  # rows at a time: bounds memory at some 50 MB a thread
_HOUR_US = 3_600_000_000
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)

_RECENCY = ("last1", "last2", "median", "mean", "spread", "low", "high", "count", "age", "bad", "same")
_RECENCY_GROUPS = ("user", "user_limit", "key", "family", "spec", "shape", "queue", "all")
_SURVIVAL_GROUPS = ("user", "key", "spec")
KERNEL_LEVELS = tuple((2 * k + 1) / 20 for k in range(10))
_KERNEL = (*(f"q{round(100 * level):02d}" for level in KERNEL_LEVELS), "mean", "distance", "bad", "mass")
_CHAIN = (
    "submits_1m", "submits_1h", "submits_1d", "gap", "is_same_key", "same_key_1h", "gap_key", "since_bad", "bad_run",
    "gap_after_end", "last_ran",
)  # fmt: skip
_ASKED = (
    "limit", "width", "nodes", "cpus", "gpus", "memory", "cpus_per_node", "memory_per_cpu", "limit_h", "hour",
    "weekday", "is_round_hour",
)  # fmt: skip

FEATURES: tuple[str, ...] = (
    *(f"asked_{name}" for name in _ASKED),
    *(f"{group}_{name}" for group in _RECENCY_GROUPS for name in _RECENCY),
    *(f"started_{group}_{name}" for group in _SURVIVAL_GROUPS for name in STARTED_RUNS),
    *(f"kernel_{name}" for name in _KERNEL),
    *(f"chain_{name}" for name in _CHAIN),
    *MEMBER_FEATURES,
)
OPTIONAL = slice(len(FEATURES) - len(MEMBER_FEATURES), len(FEATURES))  # a fit leaves out those that say nothing


def microseconds(moment: datetime | int) -> int:
    """A moment as microseconds UTC; an integer is taken for that already.

    Raises:
        ValueError: The moment has no time zone.
    """
    if not isinstance(moment, datetime):
        return int(moment)
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone; state times in UTC")
    return (moment - _EPOCH) // _MICROSECOND


def job_features(
    jobs: pl.DataFrame | JobTable,
    history: pl.DataFrame | JobHistory,
    at: datetime | int | Ints | None = None,
) -> pl.DataFrame:
    """Features of jobs as known at a moment.

    Args:
        jobs: Jobs asked about: canonical columns, of which only those known at submit are read.
        history: Jobs of the same cluster in their newest known state; may hold the jobs asked about, and rows from
            after the moment, which change nothing.
        at: The moment: one for all, one per job (µs, int64), or None for each job's own submit time.

    Returns:
        One row per job in the same order, columns `FEATURES`, Float32; durations are natural logarithms of seconds.
        Unknown is NaN.

    Raises:
        features.job_history.JobsError: A needed column is absent or null.
    """
    table = jobs if isinstance(jobs, JobTable) else JobTable(jobs)
    prepared = JobHistory.of(history)
    matrix = feature_matrix(table, prepared, moments_of(table, at))
    return pl.from_numpy(matrix, schema=dict.fromkeys(FEATURES, pl.Float32))


def moments_of(table: JobTable, at: datetime | int | Ints | None) -> Ints:
    """Moment of each job as int64 microseconds, shape (n,)."""
    if at is None:
        return table.submit
    if isinstance(at, (datetime, int)):
        return np.full(table.count, microseconds(at))
    return np.asarray(at, dtype=np.int64)


def feature_matrix(table: JobTable, history: JobHistory, moments: Ints, threads: int = 1) -> NDArray[np.float32]:
    """`job_features` as a matrix of shape (n, len(FEATURES)); the threads change nothing but the time."""
    matrix = np.empty((table.count, len(FEATURES)), dtype=np.float32)
    members = member_groups(table)
    prepare(history, members)
    groups = {name: table.group(name) for name in {*_RECENCY_GROUPS, *_SURVIVAL_GROUPS, *members}}
    own = history.own_rows(table)

    def fill(first: int) -> None:
        part = slice(first, first + _CHUNK)
        codes = {name: hashes[part] for name, hashes in groups.items()}
        columns = _Asker(table, history, codes, moments[part], own[part], part).all()
        columns |= member_columns(table, part, history, codes, moments[part], own[part])
        for k, name in enumerate(FEATURES):
            matrix[part, k] = columns[name]

    chunks = range(0, table.count, _CHUNK)
    for first in chunks[:1]:  # makes the indexes that the others share
        fill(first)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, chunks[1:]))
    return matrix


class _Asker:
    """Features of one chunk of jobs."""

    def __init__(
        self, table: JobTable, history: JobHistory, groups: dict[str, NDArray[np.uint64]], moments: Ints, own: Ints,
        part: slice,
    ) -> None:  # fmt: skip
        self.history = history
        self.past = history.table
        self.groups = groups
        self.moments = moments
        self.own = own
        self.submit = table.submit[part]
        self.limit_s, self.width = table.limit_s[part], table.width[part]
        self.nodes, self.cpus, self.gpus = table.nodes[part], table.cpus[part], table.gpus[part]
        self.memory_mib = table.memory_mib[part]
        self.has_name = table.has_name[part]
        self.out: dict[str, Floats] = {}

    def all(self) -> dict[str, Floats]:
        self.asked()
        for group in _RECENCY_GROUPS:
            self.recency(group)
        for group in _SURVIVAL_GROUPS:
            self.survival(group)
        self.kernel()
        self.chain()
        return self.out

    def _put(self, prefix: str, **columns: Floats) -> None:
        for name, values in columns.items():
            self.out[f"{prefix}_{name}"] = values

    def asked(self) -> None:
        hours = self.submit // _HOUR_US
        hour = (self.submit % (24 * _HOUR_US)) / _HOUR_US
        limit_h = self.limit_s / 3600
        with np.errstate(divide="ignore", invalid="ignore"):
            self._put(
                "asked",
                limit=np.log(self.limit_s), width=np.log(self.width), nodes=_log1p(self.nodes), cpus=_log1p(self.cpus),
                gpus=_log1p(self.gpus), memory=_log1p(self.memory_mib),
                cpus_per_node=_log1p(self.cpus / np.where(self.nodes > 0, self.nodes, 1)),
                memory_per_cpu=_log1p(self.memory_mib / np.where(self.cpus > 0, self.cpus, 1)),
                limit_h=limit_h % 24, hour=hour, weekday=((hours // 24) + 3) % 7 * 1.0,
                is_round_hour=(self.limit_s % 3600 == 0) * 1.0,
            )  # fmt: skip

    def recency(self, group: str) -> None:
        """Of the group's newest ended jobs."""
        index = self.history.index(group, "run")
        first, last = index.before(self.groups[group], self.moments)
        runs, newest = newest_runs(
            index.rows, first, last, self.history.log_runtime, self.past.is_bad, RECENT
        )  # fmt: skip
        of = dict(zip(NEWEST_RUNS, runs.T, strict=True))
        columns = {
            "last1": of["last"],
            "last2": np.log(row_mean(np.exp(runs[:, :2]))),
            **{name: of[name] for name in ("median", "mean", "spread", "low", "high", "bad", "same")},
            "count": np.log1p(last - first),
            "age": np.where(last > first, _log1p((self.moments - self.past.end[newest]) / 1e6), np.nan),
        }
        if group == "family":  # without a name it repeats user
            columns = {name: np.where(self.has_name, values, np.nan) for name, values in columns.items()}
        self._put(group, **columns)

    def survival(self, group: str) -> None:
        """Of the group's newest started jobs, those still running with their elapsed time."""
        index = self.history.index(group, "start")
        first, last = index.before(self.groups[group], self.moments)
        found = started_runs(
            index.rows, first, last, self.own, self.moments, self.past.start, self.past.end, STARTED
        )  # fmt: skip
        self._put(f"started_{group}", **dict(zip(STARTED_RUNS, found.T, strict=True)))

    def kernel(self) -> None:
        """Of the user's own newest jobs, weighted by likeness of request, situation and time."""
        history = self.history
        gaps = np.stack(
            [np.log(self.limit_s), np.log(self.width), _log1p(self.memory_mib), self.out["user_last1"],
             self.out["key_last1"]], axis=1,
        )  # fmt: skip
        labels = np.stack([self.groups["family"], self.groups["queue"]], axis=1)
        index = history.index("user", "run")
        first, last = index.before(self.groups["user"], self.moments)
        found = like_jobs(
            Likeness(gaps, labels, self.submit), history.likeness, index.rows, first, last, history.log_runtime,
            self.past.is_bad, KERNEL_LEVELS,
        )  # fmt: skip
        self._put("kernel", **{name: found[:, k] for k, name in enumerate(_KERNEL)})

    def chain(self) -> None:
        """The user's own submissions before this one, and how the newest of them went."""
        user, key = self.groups["user"], self.groups["key"]
        slots = self.history.newest("user", "submit", user, self.submit, 1)
        keyed = self.history.newest("key", "submit", key, self.submit, 1)
        past_key = self.history.group("key")
        before = {}
        for name, seconds in (("1m", 60), ("1h", 3600), ("1d", 86_400)):
            earlier = self.history.newest("user", "submit", user, self.submit - seconds * 1_000_000, 1)
            before[f"submits_{name}"] = np.log1p(slots.count - earlier.count)
        keyed_earlier = self.history.newest("key", "submit", key, self.submit - 3600 * 1_000_000, 1)
        last, is_known = slots.rows[:, 0], slots.is_filled[:, 0]
        ended = self.history.newest("user", "end", user, self.moments, 8)
        bad = ended.is_filled & self.past.is_bad[ended.rows]
        bad_run = np.where(bad.all(axis=1), bad.shape[1], np.argmin(bad, axis=1)) * 1.0
        first_bad = np.argmax(bad, axis=1)
        bad_end = self.past.end[np.take_along_axis(ended.rows, first_bad[:, None], axis=1)[:, 0]]
        newest_end = self.past.end[ended.rows[:, 0]]
        newest_log = np.where(ended.is_filled[:, 0], self.history.log_runtime[ended.rows[:, 0]], np.nan)
        self._put(
            "chain", **before,
            gap=np.where(is_known, _log1p((self.submit - self.past.submit[last]) / 1e6), np.nan),
            is_same_key=np.where(is_known, past_key[last] == key, np.nan),
            same_key_1h=np.log1p(keyed.count - keyed_earlier.count),
            gap_key=np.where(
                keyed.is_filled[:, 0], _log1p((self.submit - self.past.submit[keyed.rows[:, 0]]) / 1e6), np.nan
            ),
            since_bad=np.where(bad.any(axis=1), _log1p((self.moments - bad_end) / 1e6), np.nan),
            bad_run=bad_run,
            gap_after_end=np.where(ended.is_filled[:, 0], _log1p((self.submit - newest_end) / 1e6), np.nan),
            last_ran=newest_log,
        )  # fmt: skip


def _log1p(values: Floats) -> Floats:
    """ln(1 + x) of the non-negative part."""
    return np.log1p(np.maximum(values, 0.0))

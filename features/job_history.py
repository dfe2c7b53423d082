"""Job history prepared for questions of the form "what was known of this group at that moment".

Here belong the arrays, the groups (user, key, name family, …) and the lookups by time; not the features made
of them (`features/jobs.py`, `features/job_queue.py`). A lookup at moment m sees an end only when `end_time < m` and a
start only when `start_time < m`; a job never sees itself. Times inside are int64 microseconds UTC, `NEVER` where
unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_index import EventIndex, Numbers
from features.job_likeness import Likeness

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]

NEVER = np.int64(2**62)
BAD_STATES = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
MIN_RUNTIME_S = 1.0  # whole-second clocks show a short run as zero

_INPUTS: dict[str, Any] = {
    "job_id": pl.String, "user": pl.String, "account": pl.String, "queue": pl.String, "name": pl.String,
    "submit_time": pl.Datetime("us", "UTC"), "start_time": pl.Datetime("us", "UTC"),
    "end_time": pl.Datetime("us", "UTC"), "nodes": pl.Int32, "cpus": pl.Int32, "gpus": pl.Int32,
    "memory_mib": pl.Int64, "time_limit_s": pl.Int64, "state": pl.String, "elapsed_s": pl.Int64,
}  # fmt: skip
_SIZE = ("nodes", "cpus", "gpus")
_FAMILY = pl.col("name").str.to_lowercase().str.replace_all(r"[0-9]+", "#")

# A group is the rows that agree in these; "family" is the job name without its digits.
GROUPS: dict[str, tuple[str, ...]] = {
    "all": (),
    "user": ("user",),
    "user_limit": ("user", "time_limit_s"),
    "key": ("user", *_SIZE, "time_limit_s"),
    "family": ("user", "family"),
    "spec": ("user", "family", "queue", *_SIZE, "memory_mib", "time_limit_s"),
    "shape": ("queue", *_SIZE, "time_limit_s"),
    "queue": ("queue",),
    "size": _SIZE,
}


class JobsError(ValueError):
    """A jobs frame cannot be used; the message names the column and what is needed."""


def normalise(jobs: pl.DataFrame) -> pl.DataFrame:
    """The columns that features need, in order and dtype; absent ones become null.

    Raises:
        JobsError: `job_id` or `submit_time` is absent or null somewhere.
    """
    for name in ("job_id", "submit_time"):
        if name not in jobs.columns:
            raise JobsError(f"jobs have no column {name!r}; columns: {', '.join(jobs.columns)}")
        if jobs[name].null_count():
            raise JobsError(f"{jobs[name].null_count()} of {jobs.height} jobs have no {name}")
    return jobs.select(
        (pl.col(name) if name in jobs.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in _INPUTS.items()
    )


def _microseconds(frame: pl.DataFrame, name: str) -> Ints:
    return frame[name].to_physical().fill_null(int(NEVER)).to_numpy().astype(np.int64)


def _nobody() -> pl.DataFrame:
    far = pl.Series([datetime(9999, 1, 1, tzinfo=UTC)], dtype=_INPUTS["submit_time"])
    return normalise(pl.DataFrame({"job_id": [""], "submit_time": far}))


class JobTable:
    """Columns of a jobs frame as arrays, each of shape (n,).

    Args:
        jobs: Any subset of the canonical job columns; `job_id` and `submit_time` at least.

    Raises:
        JobsError: A needed column is absent or null.
    """

    def __init__(self, jobs: pl.DataFrame) -> None:
        frame = normalise(jobs)
        self.frame = frame
        self._groups: dict[str, Hashes] = {}
        self._states: dict[tuple[str, ...], Bools] = {}
        self.count = frame.height
        self.submit = _microseconds(frame, "submit_time")
        self.start = _microseconds(frame, "start_time")
        self.end = _microseconds(frame, "end_time")
        backwards = self.end < np.where(self.start == NEVER, self.submit, self.start)
        self.end[backwards] = NEVER
        sizes = {
            name: frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy().copy()
            for name in (*_SIZE, "memory_mib", "time_limit_s")
        }
        self.nodes, self.cpus, self.gpus, self.memory_mib, self.limit_s = sizes.values()
        self.limit_s[~(self.limit_s > 0)] = np.nan
        # Width in the unit the cluster allocates by: GPUs where asked for, else CPUs, else nodes.
        width = np.where(self.gpus > 0, self.gpus, np.where(self.cpus > 0, self.cpus, self.nodes))
        self.width = np.where(width > 0, width, 1.0)
        self.has_name = frame["name"].is_not_null().to_numpy()
        self.is_bad = self.is_state(BAD_STATES)

    @cached_property
    def has_run(self) -> Bools:
        """It started and ended, and not within the same tick of the clock."""
        return (self.start != NEVER) & (self.end != NEVER) & (self.end > self.start)

    @cached_property
    def runtime_s(self) -> Floats:
        """Time it ran, at least `MIN_RUNTIME_S`: what the scheduler counted, without suspensions, else end − start.

        NaN where start or end is unknown.
        """
        known = (self.start != NEVER) & (self.end != NEVER)
        counted = self.frame["elapsed_s"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        between = np.where(known, self.end - self.start, 0) / 1e6
        seconds = np.where((counted >= 0) & (counted < between), counted, between)
        return np.where(known, np.maximum(seconds, MIN_RUNTIME_S), np.nan)

    @cached_property
    def wait_s(self) -> Floats:
        """Start − submit; NaN where it has not started."""
        known = self.start != NEVER
        return np.where(known, np.maximum(np.where(known, self.start - self.submit, 0), 0) / 1e6, np.nan)

    @cached_property
    def identity(self) -> Hashes:
        """A hash that names the job: id and submit time."""
        return self.frame.select(pl.struct("job_id", "submit_time").hash(11)).to_series().to_numpy()

    def is_state(self, states: tuple[str, ...]) -> Bools:
        """The row's state is one of these; kept once made."""
        if states not in self._states:
            self._states[states] = self.frame["state"].is_in(states).fill_null(False).to_numpy()
        return self._states[states]

    def group(self, name: str) -> Hashes:
        """Hash of the row's group, kept once made, shape (n,); only equality means anything."""
        if name not in self._groups:
            self._groups[name] = self._hashed(name)
        return self._groups[name]

    def _hashed(self, name: str) -> Hashes:
        parts = [_FAMILY if part == "family" else pl.col(part) for part in GROUPS[name]]
        if not parts:
            return np.zeros(self.count, dtype=np.uint64)
        text = pl.concat_str([p.cast(pl.String).fill_null("\x00") for p in parts], separator="\x1f")
        return self.frame.select(text.hash(7)).to_series().to_numpy()


@dataclass(frozen=True, slots=True)
class Slots:
    """Newest visible entries of each query's group.

    Attributes:
        rows: Row in the history per slot, newest first, shape (q, k); arbitrary where not `is_filled`.
        is_filled: The slot holds an entry, shape (q, k).
        count: Entries of the group visible at the moment in all, shape (q,).
    """

    rows: Ints
    is_filled: Bools
    count: Ints


class JobHistory:
    """History of one cluster, prepared once and asked many times. Not for writing.

    Args:
        jobs: Canonical jobs in their newest known state. Rows later than a moment do not hurt a lookup at it.

    Raises:
        JobsError: A needed column is absent or null.
    """

    def __init__(self, jobs: pl.DataFrame) -> None:
        # An empty history holds one job that nobody ever sees, so that lookups need not ask.
        self.table = JobTable(jobs if jobs.height else _nobody())
        self._indexes: dict[tuple[str, str], EventIndex] = {}
        self._numbers: dict[str, tuple[Numbers, Ints]] = {}  # of the groups, and that of each row
        self._orders: dict[str, tuple[Ints, Ints]] = {}  # rows and times of an event in order of time
        self.queue_state: object | None = None  # of features/job_queue.py, made on first use

    @classmethod
    def of(cls, history: JobHistory | pl.DataFrame) -> JobHistory:
        return history if isinstance(history, JobHistory) else cls(history)

    @cached_property
    def log_runtime(self) -> Floats:
        return np.log(self.table.runtime_s)

    def group(self, name: str) -> Hashes:
        """Group hash of each history row, kept once made."""
        return self.table.group(name)

    def index(self, group: str, event: str) -> EventIndex:
        """Index by one group and one event.

        Events: `submit`; `start`; `end` of those that started; `run`, the end of those that ran for more than zero
        time; `cancel`, the end of those that never started.
        """
        if (group, event) not in self._indexes:
            rows, times = self._in_time(event)
            numbers, number = self._numbered(group)
            self._indexes[group, event] = EventIndex(numbers, number[rows], times, rows)
        return self._indexes[group, event]

    def _in_time(self, event: str) -> tuple[Ints, Ints]:
        """Rows that had an event and when, in order of time."""
        if event not in self._orders:
            times, keep = _times_of(self.table, event)
            rows = np.flatnonzero(keep)
            order = np.argsort(times[rows], kind="stable")
            self._orders[event] = rows[order], times[rows[order]]
        return self._orders[event]

    def _numbered(self, group: str) -> tuple[Numbers, Ints]:
        if group not in self._numbers:
            numbers = Numbers()
            self._numbers[group] = numbers, numbers.add(self.group(group))
        return self._numbers[group]

    def newest(self, group: str, event: str, groups: Hashes, moments: Ints, k: int) -> Slots:
        """The newest `k` entries of each query's group whose event came before its moment."""
        return Slots(*self.index(group, event).newest(groups, moments, k))

    def count(self, group: str, event: str, groups: Hashes, moments: Ints) -> Ints:
        """How many events of the group came at or before each moment, shape (q,)."""
        first, last = self.index(group, event).before(groups, moments, or_at=True)
        return last - first

    @cached_property
    def likeness(self) -> Likeness:
        """What likeness of each row to later ones is judged by, as known at its own submit."""
        table = self.table
        last_runs = []
        for group in ("user", "key"):
            slots = self.newest(group, "run", self.group(group), table.submit, 1)
            last_runs.append(np.where(slots.is_filled[:, 0], self.log_runtime[slots.rows[:, 0]], np.nan))
        asked = [np.log(table.limit_s), np.log(table.width), np.log1p(np.maximum(table.memory_mib, 0.0))]
        gaps = np.stack([*asked, *last_runs], axis=1)
        return Likeness(gaps, np.stack([self.group("family"), self.group("queue")], axis=1), table.submit)

    def own_rows(self, jobs: JobTable) -> Ints:
        """Row of each query job in this history, −1 where it is not in it, shape (q,)."""
        if jobs is self.table:
            return np.arange(jobs.count)
        numbers, rows = self._rows_by_identity
        found = numbers.find(jobs.identity)
        return np.where(found >= 0, rows[np.maximum(found, 0)], -1)

    @cached_property
    def _rows_by_identity(self) -> tuple[Numbers, Ints]:
        """Numbers of the jobs' identities, and the first row of each."""
        numbers = Numbers()
        number = numbers.add(self.table.identity)
        rows = np.empty(numbers.count, dtype=np.int64)
        rows[number[::-1]] = np.arange(len(number))[::-1]
        return numbers, rows


def _times_of(table: JobTable, event: str) -> tuple[Ints, Bools]:
    """Time of an event of each row, and whether it had one."""
    started, ended = table.start != NEVER, table.end != NEVER
    if event == "submit":
        return table.submit, np.ones(table.count, dtype=bool)
    if event == "start":
        return table.start, started
    return table.end, {"end": started & ended, "run": table.has_run, "cancel": ~started & ended}[event]

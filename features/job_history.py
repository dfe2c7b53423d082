"""Job history prepared for questions of the form "what was known of this group at that moment".

Here belong the arrays, the groups (user, key, name family, …) and the lookups by time; not the features made
of them (`features/jobs.py`, `features/job_queue.py`). A lookup at moment m sees an end only when `end_time < m` and a
start only when `start_time < m`; a job never sees itself. Times inside are int64 microseconds UTC, `NEVER` where
unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_index import EventIndex, Numbers
from features.job_likeness import Likeness
from features.job_table import BAD_STATES, GROUPS, MIN_RUNTIME_S, NEVER, JobsError, JobTable, nobody, normalise

__all__ = [
    "BAD_STATES", "GROUPS", "MIN_RUNTIME_S", "NEVER", "JobHistory", "JobTable", "JobsError", "Slots", "normalise",
]  # fmt: skip

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]


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
    """History of one cluster, prepared once, asked many times, and kept up to date with `update`.

    Args:
        jobs: Canonical jobs in their newest known state. Rows later than a moment do not hurt a lookup at it.

    Raises:
        JobsError: A needed column is absent or null.
    """

    def __init__(self, jobs: pl.DataFrame) -> None:
        # An empty history holds one job that nobody ever sees, so that lookups need not ask.
        self._is_empty = not jobs.height
        self.table = JobTable(nobody() if self._is_empty else jobs)
        self.indexes: dict[tuple[str, str], EventIndex] = {}
        self.numbers: dict[str, tuple[Numbers, Ints]] = {}  # of the groups, and that of each row
        self.orders: dict[str, tuple[Ints, Ints]] = {}  # rows and times of an event in order of time
        self.room: dict[Any, NDArray[Any]] = {}  # arrays with spare room behind those that have grown
        self.queue_state: Any = None  # of features/job_queue.py, made on first use

    @classmethod
    def of(cls, history: JobHistory | pl.DataFrame) -> JobHistory:
        return history if isinstance(history, JobHistory) else cls(history)

    def update(self, jobs: pl.DataFrame) -> None:
        """Take in jobs that are new or say something new: afterwards all is as if made of all jobs anew.

        A known job, by id and submit time, keeps its row, others come behind in their order. The cost grows with the
        jobs that come, not with the history. No lookup may go on meanwhile, and what was looked up is out of date.

        Raises:
            JobsError: A needed column is absent or null.
        """
        from features.job_updates import take_in

        newer = JobTable(jobs.unique(["job_id", "submit_time"], keep="last", maintain_order=True))
        if self._is_empty and newer.count:
            self.__init__(newer.frame)
        elif newer.count:
            take_in(self, newer)

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
        if (group, event) not in self.indexes:
            rows, times = self._in_time(event)
            numbers, number = self._numbered(group)
            self.indexes[group, event] = EventIndex(numbers, number[rows], times, rows)
        return self.indexes[group, event]

    def _in_time(self, event: str) -> tuple[Ints, Ints]:
        """Rows that had an event and when, in order of time."""
        if event not in self.orders:
            times, keep = event_times(event, self.table.submit, self.table.start, self.table.end)
            rows = np.flatnonzero(keep)
            order = np.argsort(times[rows], kind="stable")
            self.orders[event] = rows[order], times[rows[order]]
        return self.orders[event]

    def _numbered(self, group: str) -> tuple[Numbers, Ints]:
        if group not in self.numbers:
            numbers = Numbers()
            self.numbers[group] = numbers, numbers.add(self.group(group))
        return self.numbers[group]

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
        labels = np.stack([self.group("family"), self.group("queue")], axis=1)
        return Likeness(self.gaps(np.arange(self.table.count)), labels, self.table.submit)

    def gaps(self, rows: Ints) -> Floats:
        """Of `Likeness`, for some rows."""
        table = self.table
        last_runs = []
        for group in ("user", "key"):
            slots = self.newest(group, "run", self.group(group)[rows], table.submit[rows], 1)
            last_runs.append(np.where(slots.is_filled[:, 0], self.log_runtime[slots.rows[:, 0]], np.nan))
        memory = np.log1p(np.maximum(table.memory_mib[rows], 0.0))
        return np.stack([np.log(table.limit_s[rows]), np.log(table.width[rows]), memory, *last_runs], axis=1)

    def own_rows(self, jobs: JobTable) -> Ints:
        """Row of each query job in this history, −1 where it is not in it, shape (q,)."""
        if jobs is self.table:
            return np.arange(jobs.count)
        numbers, rows = self.rows_by_identity
        found = numbers.find(jobs.identity)
        return np.where(found >= 0, rows[np.maximum(found, 0)], -1)

    @cached_property
    def rows_by_identity(self) -> tuple[Numbers, Ints]:
        """Numbers of the jobs' identities, and the first row of each."""
        numbers = Numbers()
        number = numbers.add(self.table.identity)
        rows = np.empty(numbers.count, dtype=np.int64)
        rows[number[::-1]] = np.arange(len(number))[::-1]
        return numbers, rows


def event_times(event: str, submit: Ints, start: Ints, end: Ints) -> tuple[Ints, Bools]:
    """Time of an event of each row, and whether it had one."""
    started, ended = start != NEVER, end != NEVER
    if event == "submit":
        return submit, np.ones(len(submit), dtype=bool)
    if event == "start":
        return start, started
    keep = {"end": started & ended, "run": started & ended & (end > start), "cancel": ~started & ended}
    return end, keep[event]

"""What waited and ran on the cluster at any moment: sums over events, the most that ever ran, and when room comes free.

Here belongs the state of the whole queue; not the features of one waiting job made of it (`features/job_queue.py`).
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory
from features.job_recency import row_mean
from features.job_table import grown

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_LIMIT_S = 7 * 86_400.0  # stands for a missing limit when work is added up


class QueueState:
    """What waited and ran at any moment, from cumulated events.

    Args:
        history: Prepared history.
    """

    def __init__(self, history: JobHistory) -> None:
        self.history = history
        self._room: dict[str, NDArray[Any]] = {}
        self.limit_s, self.work, self.limit_end = self._weights(slice(None))
        self._whole = {
            "width": history.table.width.astype(np.int64), "work": self.work.astype(np.int64),
            "limit_end": self.limit_end.astype(np.int64),
        }  # fmt: skip
        self._busy_times, self._busy, self._peak = np.empty(0, dtype=np.int64), np.empty(0), np.empty(0)
        self._count_busy(-int(NEVER))

    def _weights(self, rows: Any) -> tuple[Floats, Floats, Floats]:
        """Limit, width × limit, and width × end by limit (s since 2000), of some rows."""
        table = self.history.table
        width, start = table.width[rows], table.start[rows]
        limit_s = np.where(np.isnan(table.limit_s[rows]), NO_LIMIT_S, table.limit_s[rows])
        return limit_s, np.round(width * limit_s), np.floor(width * (since_2000(start) + limit_s))

    def update(self, rows: Ints, old_start: Ints, old_end: Ints) -> None:
        """Take in what the history's table says of these rows now.

        Args:
            rows: Rows that are new or have changed.
            old_start: Starts of those that have changed, as they were.
            old_end: Their ends.
        """
        table, grow = self.history.table, self._grown
        limit_s, work, limit_end = self._weights(rows)
        whole = {"width": table.width[rows], "work": work, "limit_end": limit_end}
        self.limit_s = grow("limit_s", self.limit_s, rows, limit_s)
        self.work, self.limit_end = grow("work", self.work, rows, work), grow("ends", self.limit_end, rows, limit_end)
        for name, values in whole.items():
            self._whole[name] = grow(f"whole {name}", self._whole[name], rows, values.astype(np.int64))
        self._count_busy(min(int(part.min(initial=NEVER)) for part in (old_start, old_end, table.start[rows])))

    def _grown(self, name: str, present: NDArray[Any], rows: Ints, values: NDArray[Any]) -> NDArray[Any]:
        return grown(self._room, name, present, rows, values)

    def _count_busy(self, since: int) -> None:
        """What ran at once and the most that ever did, anew from a moment on."""
        table = self.history.table
        started = (table.start != NEVER) & ((table.start >= since) | (table.end >= since))
        rows = np.flatnonzero(started)
        starts = rows[table.start[rows] >= since]
        ends = rows[(table.end[rows] != NEVER) & (table.end[rows] >= since)]
        times = np.concatenate([table.start[starts], table.end[ends]])
        steps = np.concatenate([table.width[starts], -table.width[ends]])
        order = np.lexsort((steps, times))  # at equal times what ends goes first
        first = int(np.searchsorted(self._busy_times, since, side="left"))
        at = first + np.arange(len(order))
        busy = np.cumsum(np.concatenate([self._busy[first - 1 : first] if first else [0.0], steps[order]]))[1:]
        peak = np.maximum(np.maximum.accumulate(np.maximum(busy, 0.0)), self._peak[first - 1] if first else 0.0)
        for name, values in (("_busy_times", times[order]), ("_busy", busy), ("_peak", peak)):
            setattr(self, name, self._grown(name, getattr(self, name)[:first], at, values))

    @classmethod
    def of(cls, history: JobHistory) -> QueueState:
        """The state of this history, made once."""
        if history.queue_state is None:
            history.queue_state = cls(history)
        state = history.queue_state
        assert isinstance(state, cls)
        return state

    def capacity(self, moments: Ints) -> Floats:
        """Widest that had run at once before each moment."""
        if not len(self._peak):
            return np.zeros(len(moments))
        at = np.searchsorted(self._busy_times, moments, side="left") - 1
        return np.where(at >= 0, self._peak[np.maximum(at, 0)], 0.0)

    def total(self, group: str, event: str, weight: str, hashes: NDArray[np.uint64], moments: Ints) -> Floats:
        """Sum of a weight over the group's events at or before each moment.

        Weights: `one`, `width`, `work` (width × limit), `limit_end` (width × end by limit, s since 2000). Sums are
        of integers, which wrap without loss: what other groups or later events add never changes a difference.
        """
        index = self.history.index(group, event)
        first, last = index.before(hashes, moments, or_at=True)
        if weight == "one":
            return (last - first).astype(np.float64)
        return index.total(weight, self._whole[weight], first, last).astype(np.float64)

    def keyed_s(self, rows: Ints) -> Floats:
        """Keyed recency of history rows at their own submits: last two by key, else by user, else the limit."""
        table, history = self.history.table, self.history
        found = np.full(len(rows), np.nan)
        for group in ("key", "user"):
            slots = history.newest(group, "run", history.group(group)[rows], table.submit[rows], 2)
            runs = np.where(slots.is_filled, table.runtime_s[slots.rows], np.nan)
            found = np.where(np.isnan(found), row_mean(runs), found)
        return np.fmin(np.where(np.isnan(found), self.limit_s[rows], found), self.limit_s[rows])

    def shadows(self, width: Floats, moments: Ints, own: Ints) -> dict[str, Floats]:
        """Time until the running jobs leave room for this width, ln(1 + s): by limits and by keyed recency.

        Other waiting jobs are left out. NaN when more is asked than has ever run at once.
        """
        n = len(moments)
        names = ("shadow_limit", "shadow_keyed")
        out = {name: np.full(n, np.nan) for name in names}
        table = self.history.table
        if not n:
            return out
        rows = np.flatnonzero((table.start <= moments.max()) & (table.end >= moments.min()))
        start_s = since_2000(table.start[rows])
        ends = {"shadow_limit": start_s + self.limit_s[rows], "shadow_keyed": start_s + self.keyed_s(rows)}
        capacity = self.capacity(moments)
        order = np.argsort(moments, kind="stable")
        for name in names:
            out[name] = self._sweep(rows, ends[name], start_s, width, moments, own, capacity, order)
        return out

    def _sweep(
        self, rows: Ints, expected: Floats, start_s: Floats, width: Floats, moments: Ints, own: Ints, capacity: Floats,
        order: Ints,
    ) -> Floats:  # fmt: skip
        table = self.history.table
        starts, ends, widths = table.start[rows].tolist(), table.end[rows].tolist(), table.width[rows].tolist()
        when = expected.tolist()
        by_start = np.argsort(table.start[rows], kind="stable").tolist()
        by_end = np.argsort(table.end[rows], kind="stable").tolist()
        running: list[tuple[float, int]] = []  # (expected end, position in rows), sorted
        position = {int(row): k for k, row in enumerate(rows)}
        is_in = [False] * len(rows)
        busy = 0.0
        came = went = 0
        known: dict[tuple[float, int], float] = {}  # width and own place → answer, while nothing starts or ends
        known_at = None
        result = np.full(len(moments), np.nan)
        for query in order.tolist():
            moment = int(moments[query])
            while came < len(by_start) and starts[by_start[came]] <= moment:
                k = by_start[came]
                came += 1
                bisect.insort(running, (when[k], k))
                is_in[k] = True
                busy += widths[k]
            while went < len(by_end) and ends[by_end[went]] <= moment:
                k = by_end[went]
                went += 1
                if is_in[k]:
                    del running[bisect.bisect_left(running, (when[k], k))]
                    is_in[k] = False
                    busy -= widths[k]
            mine = position.get(int(own[query]), -1)
            others = busy - (widths[mine] if mine >= 0 and is_in[mine] else 0.0)
            needed = width[query] - (capacity[query] - others)
            if width[query] > capacity[query]:
                continue
            if moment != known_at:
                known, known_at = {}, moment
                now_s = float(since_2000(moments[query : query + 1])[0])
            asked = (float(width[query]), mine if mine >= 0 and is_in[mine] else -1)
            if asked in known:
                result[query] = known[asked]
                continue
            until = now_s
            for end_s, k in running:
                if needed <= 0:
                    break
                if k == mine:
                    continue
                needed -= widths[k]
                # Past its expected end it is thought to go on for half as long as it has run.
                until = max(until, end_s if end_s > now_s else now_s + 0.5 * (now_s - start_s[k]))
            result[query] = known[asked] = np.log1p(until - now_s)
        return result


def since_2000(times: Ints) -> Floats:
    """Seconds since 2000: small enough that sums of many keep their seconds."""
    return np.where(times == NEVER, 0, times - 946_684_800_000_000) / 1e6

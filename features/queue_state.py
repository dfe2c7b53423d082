"""What waited and ran on the cluster at any moment: sums over events, the most that ever ran, and when room comes free.

Here belongs the state of the whole queue; not the features of one waiting job made of it (`features/job_queue.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled
from features.job_history import NEVER, JobHistory
from features.job_recency import row_mean
from features.job_table import grown

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_LIMIT_S = 7 * 86_400.0  # stands for a missing limit when work is added up
LONGEST_LIMIT_S = 1e9  # some 32 years: longer limits count as this, so that sums of width × limit stay whole numbers
_KNOWN = 16  # widths that the answer of a moment is kept for


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
        self._keyed_s: Floats | None = None  # of the rows that were asked about, until the history changes

    def _weights(self, rows: Any) -> tuple[Floats, Floats, Floats]:
        """Limit, width × limit, and width × end by limit (s since 2000), of some rows."""
        table = self.history.table
        width, start = table.width[rows], table.start[rows]
        limit_s = np.minimum(np.where(np.isnan(table.limit_s[rows]), NO_LIMIT_S, table.limit_s[rows]), LONGEST_LIMIT_S)
        return limit_s, np.round(width * limit_s), np.floor(width * (since_2000(start) + limit_s))

    def update(self, rows: Ints, old_start: Ints, old_end: Ints) -> None:
        """Take in what the history's table says of these rows now.

        Args:
            rows: Rows that are new or have changed.
            old_start: Starts of those that have changed, as they were.
            old_end: Their ends.
        """
        table, grow, self._keyed_s = self.history.table, self._grown, None
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
        held = self._keyed_s
        if held is None:
            held = self._keyed_s = np.full(self.history.table.count, np.nan)
        unknown = rows[np.isnan(held[rows])]
        if len(unknown):
            held[unknown] = self._keyed(unknown)
        return held[rows]

    def _keyed(self, rows: Ints) -> Floats:
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
        start_s, place = since_2000(table.start[rows]), np.full(table.count + 1, -1)
        place[rows] = np.arange(len(rows))
        expected = {"shadow_limit": start_s + self.limit_s[rows], "shadow_keyed": start_s + self.keyed_s(rows)}
        by_start, by_end = (np.argsort(times[rows], kind="stable") for times in (table.start, table.end))
        for name in names:
            until = np.full(n, np.nan)
            _sweep(
                table.start[rows], table.end[rows], table.width[rows], start_s, expected[name], by_start, by_end,
                np.argsort(moments, kind="stable"), moments, since_2000(moments), width, place[own],
                self.capacity(moments), until,
            )  # fmt: skip
            out[name] = np.log1p(until)
        return out


@compiled
def _sweep(
    starts: Ints, ends: Ints, widths: Floats, start_s: Floats, expected: Floats, by_start: Ints, by_end: Ints,
    order: Ints, moments: Ints, moments_s: Floats, asked: Floats, own: Ints, capacity: Floats, out: Floats,
) -> None:  # fmt: skip
    """Seconds until the running leave room for what is asked, themselves left out; questions in order of time."""
    n, came, went, runs, busy = len(starts), 0, 0, 0, 0.0
    running, is_in = np.empty(n + 1, np.int64), np.zeros(n + 1, np.bool_)  # in order of their expected ends
    told_width, told, known, known_at = np.empty(_KNOWN), np.empty(_KNOWN), 0, np.int64(0)  # of the same moment
    for question in order:
        moment, now_s = moments[question], moments_s[question]
        if moment != known_at:
            known, known_at = 0, moment
        while came < n and starts[by_start[came]] <= moment:
            k = by_start[came]
            came += 1
            at = runs
            while at > 0 and (
                expected[running[at - 1]] > expected[k]
                or (expected[running[at - 1]] == expected[k] and running[at - 1] > k)
            ):
                running[at] = running[at - 1]
                at -= 1
            running[at], is_in[k] = k, True
            runs += 1
            busy += widths[k]
        while went < n and ends[by_end[went]] <= moment:
            k = by_end[went]
            went += 1
            if is_in[k]:
                runs -= 1
                at = 0
                while running[at] != k:
                    at += 1
                for i in range(at, runs):
                    running[i] = running[i + 1]
                is_in[k] = False
                busy -= widths[k]
        mine = own[question] if own[question] >= 0 and is_in[own[question]] else -1
        if asked[question] > capacity[question]:
            continue
        at = 0
        while at < known and told_width[at] != asked[question]:
            at += 1
        if mine < 0 and at < known:
            out[question] = told[at]
            continue
        needed = asked[question] - (capacity[question] - (busy - (widths[mine] if mine >= 0 else 0.0)))
        until = now_s
        for i in range(runs):
            if needed <= 0:
                break
            k = running[i]
            if k == mine:
                continue
            needed -= widths[k]
            # Past its expected end it is thought to go on for half as long as it has run.
            until = max(until, expected[k] if expected[k] > now_s else now_s + 0.5 * (now_s - start_s[k]))
        out[question] = until - now_s
        if mine < 0 and known < _KNOWN:
            told_width[known], told[known] = asked[question], out[question]
            known += 1


def since_2000(times: Ints) -> Floats:
    """Seconds since 2000: small enough that sums of many keep their seconds."""
    return np.where(times == NEVER, 0, times - 946_684_800_000_000) / 1e6

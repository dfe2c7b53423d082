"""Rows of a history by group and time, for lookups of what a group held before a moment.

Groups are numbered by a table of their hashes, rows lie group by group in order of time; both are made by counting and
both grow in place, so that a few new rows cost no new sorting. Here belong these two structures; not what groups and
events are (`features/job_history.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]

_ROOM = 1_024  # slots of an empty table; at most half of them are ever taken
_CHUNK = 65_536
_SPARE = 1.25  # what grows gets so much more room than it needs


class Numbers:
    """A number for each hash, counted up from 0 in order of first appearance."""

    def __init__(self) -> None:
        self.count = 0
        self._keys = np.zeros(_ROOM, dtype=np.uint64)
        self._numbers = np.full(_ROOM, -1, dtype=np.int64)

    def add(self, hashes: Hashes) -> Ints:
        """Number of each hash, a new one where it is not known, shape (n,)."""
        out = np.empty(len(hashes), dtype=np.int64)
        for first in range(0, len(hashes), _CHUNK):
            part = hashes[first : first + _CHUNK]
            room = len(self._keys)
            while 2 * (self.count + len(part)) > room:
                room *= 2
            if room > len(self._keys):
                keys, numbers = np.zeros(room, dtype=np.uint64), np.full(room, -1, dtype=np.int64)
                _rehash(self._keys, self._numbers, keys, numbers)
                self._keys, self._numbers = keys, numbers
            self.count = _number(self._keys, self._numbers, part, self.count, out[first : first + _CHUNK])
        return out

    def find(self, hashes: Hashes) -> Ints:
        """Number of each hash, −1 where it is not known, shape (n,)."""
        out = np.empty(len(hashes), dtype=np.int64)
        _find(self._keys, self._numbers, hashes, out)
        return out


class EventIndex:
    """Rows of one event, group by group in order of time, equal times in order of rows.

    Args:
        numbers: Numbers of the groups.
        group: Number of the group of each entry, shape (n,).
        times: Time of each entry, rising, shape (n,).
        rows: Row of each entry in the history, rising where times are equal, shape (n,).
    """

    def __init__(self, numbers: Numbers, group: Ints, times: Ints, rows: Ints) -> None:
        self._numbers = numbers
        self._size = np.bincount(group, minlength=numbers.count).astype(np.int64)
        self._room = self._size.copy()
        self._first = np.cumsum(self._size) - self._size
        self._taken = len(rows)  # entries of `rows` that belong to a group
        self._sums: dict[str, Ints] = {}
        self._stale: dict[str, dict[int, int]] = {}  # of each sum: group → its first entry that has changed since
        self.rows = np.zeros(len(rows), dtype=np.int64)
        self.times = np.zeros(len(rows), dtype=np.int64)
        _lay(group, times, rows, self._first.copy(), self.rows, self.times)

    def before(self, groups: Hashes, moments: Ints, *, or_at: bool = False) -> tuple[Ints, Ints]:
        """Range [first, last) of each query's group in `rows`: entries earlier than the moment, or at it."""
        first, last = np.zeros(len(groups), dtype=np.int64), np.zeros(len(groups), dtype=np.int64)
        _before(self._numbers.find(groups), moments, or_at, self._first, self._size, self.times, first, last)
        return first, last

    def newest(self, groups: Hashes, moments: Ints, k: int) -> tuple[Ints, Bools, Ints]:
        """Rows of the newest `k` entries before each moment, which of them there are, and how many there are in all."""
        first, last = self.before(groups, moments)
        rows, is_filled = np.empty((len(groups), k), dtype=np.int64), np.empty((len(groups), k), dtype=np.bool_)
        _newest(self.rows, first, last, rows, is_filled)
        return rows, is_filled, last - first

    def total(self, name: str, values: Ints, first: Ints, last: Ints) -> Ints:
        """Sum over the entries [first, last) of each query; `first` is where its group begins.

        Args:
            name: Names the values: their sums are kept.
            values: Value of each row of the history.
            first: As of `before`, shape (q,).
            last: As of `before`, shape (q,).
        """
        if name not in self._sums:
            self._sums[name], self._stale[name] = np.zeros(len(self.rows), dtype=np.int64), {}
            _add_up(self.rows, values, self._first, self._first, self._size, self._sums[name])
        elif stale := self._stale[name]:
            groups = np.fromiter(stale, np.int64, len(stale))
            begin, size = self._first[groups], self._size[groups]
            since = begin + np.minimum(np.fromiter(stale.values(), np.int64, len(stale)), size)
            _add_up(self.rows, values, begin, since, size, self._sums[name])
            stale.clear()
        sums = self._sums[name]
        return np.where(last > first, sums[np.maximum(last - 1, 0)], 0) if len(sums) else np.zeros_like(first)

    def later(self, groups: Ints, times: Ints) -> Ints:
        """Rows of the groups of these numbers whose event came later than the time beside its group; in any order."""
        found = [np.empty(0, dtype=np.int64)]
        for group in np.unique(groups).tolist():
            if group < len(self._size):
                begin, end = self._first[group], self._first[group] + self._size[group]
                place = np.searchsorted(self.times[begin:end], times[groups == group].min(), side="right")
                found.append(self.rows[begin + place : end])
        return np.concatenate(found)

    def change(self, removed: tuple[Ints, Ints, Ints], added: tuple[Ints, Ints, Ints]) -> None:
        """Take entries out and put entries in; what it costs grows with them, not with the history.

        Args:
            removed: Group's number, time and row of each entry that goes.
            added: The same of each that comes.
        """
        more = self._numbers.count - len(self._size)
        if more > 0:
            none = np.zeros(more, dtype=np.int64)
            self._size, self._room = np.concatenate([self._size, none]), np.concatenate([self._room, none])
            self._first = np.concatenate([self._first, none])
        touched: dict[int, int] = {}
        for group, time, row in zip(*(part.tolist() for part in removed), strict=True):
            place = _take_out(self.rows, self.times, self._first, self._size, group, time, row)
            touched[group] = min(touched.get(group, place), place)
        self._make_room(added[0])
        for group, time, row in zip(*(part.tolist() for part in added), strict=True):
            place = _put_in(self.rows, self.times, self._first, self._size, group, time, row)
            touched[group] = min(touched.get(group, place), place)
        for stale in self._stale.values():
            for group, place in touched.items():
                stale[group] = min(stale.get(group, place), place)

    def _make_room(self, groups: Ints) -> None:
        """Room for one more entry of each of these groups: those without move behind the others."""
        found, counts = np.unique(groups, return_counts=True)
        wanted = self._size[found] + counts
        lacks = wanted > self._room[found]
        if not lacks.any():
            return
        rooms = (wanted[lacks] * _SPARE).astype(np.int64) + 4
        if self._taken + rooms.sum() > len(self.rows):
            room = self._size.copy()
            room[found] = np.maximum(self._room[found], (wanted * _SPARE).astype(np.int64) + 4)
            first = np.cumsum(room) - room
            taken = int(room.sum())
            rows, times = (np.zeros(int(taken * _SPARE), dtype=np.int64) for _ in range(2))
            _move(self.rows, self.times, self._first, self._size, first, rows, times)
            self.rows, self.times, self._first, self._room, self._taken = rows, times, first, room, taken
            self._sums, self._stale = {}, {}
            return
        for group, room in zip(found[lacks].tolist(), rooms.tolist(), strict=True):
            begin, end = self._first[group], self._first[group] + self._size[group]
            for laid in (self.rows, self.times, *self._sums.values()):
                laid[self._taken : self._taken + end - begin] = laid[begin:end]
            self._first[group], self._room[group] = self._taken, room
            self._taken += room


@compiled
def _add_up(rows: Ints, values: Ints, first: Ints, since: Ints, size: Ints, sums: Ints) -> None:
    """Sums from each group's first entry up to each of its entries, from `since` on; they wrap without loss."""
    for g in range(len(first)):
        total = np.int64(0) if since[g] == first[g] else sums[since[g] - 1]
        for place in range(since[g], first[g] + size[g]):
            total += values[rows[place]]
            sums[place] = total


@compiled
def _move(rows: Ints, times: Ints, first: Ints, size: Ints, new_first: Ints, new_rows: Ints, new_times: Ints) -> None:
    for g in range(len(first)):
        for k in range(size[g]):
            new_rows[new_first[g] + k], new_times[new_first[g] + k] = rows[first[g] + k], times[first[g] + k]


@compiled
def _place(rows: Ints, times: Ints, low: int, high: int, time: int, row: int) -> int:
    """The first entry that is not before this time and row."""
    while low < high:
        middle = (low + high) >> 1
        if times[middle] < time or (times[middle] == time and rows[middle] < row):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _take_out(rows: Ints, times: Ints, first: Ints, size: Ints, group: int, time: int, row: int) -> int:
    """Where the entry stood, counted from its group's first."""
    end = first[group] + size[group]
    place = _place(rows, times, first[group], end, time, row)
    for k in range(place, end - 1):
        rows[k], times[k] = rows[k + 1], times[k + 1]
    size[group] -= 1
    return place - first[group]


@compiled
def _put_in(rows: Ints, times: Ints, first: Ints, size: Ints, group: int, time: int, row: int) -> int:
    """Where the entry stands now, counted from its group's first."""
    end = first[group] + size[group]
    place = _place(rows, times, first[group], end, time, row)
    for k in range(end, place, -1):
        rows[k], times[k] = rows[k - 1], times[k - 1]
    rows[place], times[place] = row, time
    size[group] += 1
    return place - first[group]


@compiled
def _slot(hash_: np.uint64, mask: np.uint64) -> np.uint64:
    return ((hash_ ^ (hash_ >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(20)) & mask


@compiled
def _number(keys: Hashes, numbers: Ints, hashes: Hashes, count: int, out: Ints) -> int:
    mask = np.uint64(len(keys) - 1)
    for i in range(len(hashes)):
        slot = _slot(hashes[i], mask)
        while numbers[slot] >= 0 and keys[slot] != hashes[i]:
            slot = (slot + np.uint64(1)) & mask
        if numbers[slot] < 0:
            keys[slot], numbers[slot] = hashes[i], count
            count += 1
        out[i] = numbers[slot]
    return count


@compiled
def _rehash(old_keys: Hashes, old_numbers: Ints, keys: Hashes, numbers: Ints) -> None:
    mask = np.uint64(len(keys) - 1)
    for i in range(len(old_keys)):
        if old_numbers[i] >= 0:
            slot = _slot(old_keys[i], mask)
            while numbers[slot] >= 0:
                slot = (slot + np.uint64(1)) & mask
            keys[slot], numbers[slot] = old_keys[i], old_numbers[i]


@compiled
def _find(keys: Hashes, numbers: Ints, hashes: Hashes, out: Ints) -> None:
    mask = np.uint64(len(keys) - 1)
    for i in range(len(hashes)):
        slot = _slot(hashes[i], mask)
        while numbers[slot] >= 0 and keys[slot] != hashes[i]:
            slot = (slot + np.uint64(1)) & mask
        out[i] = numbers[slot]


@compiled
def _lay(group: Ints, times: Ints, rows: Ints, at: Ints, laid_rows: Ints, laid_times: Ints) -> None:
    for i in range(len(rows)):
        place = at[group[i]]
        laid_rows[place], laid_times[place] = rows[i], times[i]
        at[group[i]] = place + 1


@compiled
def _before(
    group: Ints, moments: Ints, or_at: bool, first: Ints, size: Ints, times: Ints, out_first: Ints, out_last: Ints
) -> None:
    for i in range(len(group)):
        if group[i] < 0 or group[i] >= len(size):
            continue
        low = first[group[i]]
        high = low + size[group[i]]
        out_first[i] = low
        while low < high:
            middle = (low + high) >> 1
            if times[middle] < moments[i] or (or_at and times[middle] == moments[i]):
                low = middle + 1
            else:
                high = middle
        out_last[i] = low


@compiled
def _newest(laid: Ints, first: Ints, last: Ints, rows: Ints, is_filled: Bools) -> None:
    for i in range(len(first)):
        for k in range(rows.shape[1]):
            place = last[i] - 1 - k
            is_filled[i, k] = place >= first[i]
            rows[i, k] = laid[place] if place >= first[i] else 0

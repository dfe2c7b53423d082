"""The newest samples of series that arrive: what a tick is given, and how far everything has come.

Arrays by number of series, updated a request at a time. Nothing is decoded, resolved or stored here.
"""

from __future__ import annotations

import numpy as np

from pipelines.sources.remote_write_series import Series
from pipelines.sources.remote_write_wire import STALE_BITS
from pipelines.sources.replicas import OneReplica
from pipelines.sources.series import Samples

_NEVER = -(1 << 62)
_ALIVE_MS = 120_000  # a series that brought nothing for that long while its sender spoke has ended


class Grown:
    """An array that grows; `view` are the elements in use."""

    def __init__(self, dtype: type, fill: float = 0) -> None:
        self._array = np.full(1024, fill, dtype)
        self._fill = fill
        self.size = 0

    @property
    def view(self) -> np.ndarray:
        return self._array[: self.size]

    def resize(self, size: int) -> None:
        """At least that long from now on; new elements hold the fill value."""
        if size > len(self._array):
            more = np.full(max(size, len(self._array) * 3 // 2) - len(self._array), self._fill, self._array.dtype)
            self._array = np.concatenate([self._array, more])
        self.size = max(self.size, size)


class Newest:
    """The last two samples of each series, when they arrived and who sent them."""

    def __init__(self) -> None:
        self._ts, self._before_ts = Grown(np.int64, _NEVER), Grown(np.int64, _NEVER)
        self._value, self._before = Grown(np.float64), Grown(np.float64)
        self._arrived, self._sender = Grown(np.int64, _NEVER), Grown(np.int16, -1)
        self._row = Grown(np.int32)
        self._chooser: OneReplica | None = None

    def put(self, number: np.ndarray, ts_ms: np.ndarray, values: np.ndarray, sender: int, now_ms: int) -> int:
        """Take in samples in whatever order; an old one changes nothing, one of a known time replaces its value.

        Args:
            number: Series of each sample.
            ts_ms: Time of each, ms since the epoch.
            values: Value of each; a stale marker ends its series.
            sender: Number of who sent them.
            now_ms: Present time.

        Returns:
            How many were no newer than what was known of their series.
        """
        if not len(number):
            return 0
        size = int(number.max()) + 1
        for column in (self._ts, self._before_ts, self._value, self._before, self._arrived, self._sender, self._row):
            column.resize(size)
        self._arrived.view[number], self._sender.view[number] = now_ms, sender
        rows = np.arange(len(number), dtype=np.int32)
        self._row.view[number] = rows
        if (self._row.view[number] == rows).all() and (ts_ms > self._ts.view[number]).all():
            self._before_ts.view[number], self._before.view[number] = self._ts.view[number], self._value.view[number]
            self._ts.view[number], self._value.view[number] = ts_ms, values
            return 0
        late = int((ts_ms <= self._ts.view[number]).sum())
        # Several of one series, or not the newest: the last two times of what is known and what came.
        own = np.unique(number)
        series = np.concatenate([own, own, number])
        time = np.concatenate([self._before_ts.view[own], self._ts.view[own], ts_ms])
        value = np.concatenate([self._before.view[own], self._value.view[own], values])
        order = np.lexsort((time, series))  # stable: of equal times the one that came last is last
        series, time, value = series[order], time[order], value[order]
        keep = np.append((series[1:] != series[:-1]) | (time[1:] != time[:-1]), True)
        series, time, value = series[keep], time[keep], value[keep]
        last = np.flatnonzero(np.append(series[1:] != series[:-1], True))
        before = last - 1
        has = (before >= 0) & (series[before] == series[last])
        self._before_ts.view[own] = np.where(has, time[before], _NEVER)
        self._before.view[own] = np.where(has, value[before], 0.0)
        self._ts.view[own], self._value.view[own] = time[last], value[last]
        return late

    def _live(self) -> np.ndarray:
        return (self._ts.view != _NEVER) & (self._value.view.view(np.uint64) != STALE_BITS)

    def alive(self) -> int:
        """How many series have not ended by a marker."""
        return int(self._live().sum())

    def samples(self, series: Series, now_ms: int, interval_ms: float) -> Samples:
        """One sample of each series that is alive: of the newest time that all series of its GPU or node have reached.

        A scrape may come in several requests, and not all of it at once: rows are not torn by that. Where one series is
        more than two intervals behind, the others do not wait for it.

        Args:
            series: Names and entities.
            now_ms: Present time.
            interval_ms: Interval of scrapes, ms; what did not arrive for two of them, and a minute, is not given.
        """
        size = self._ts.size
        name, entity = series.name[:size], series.entity[:size]
        alive = self._live() & (entity >= 0) & (self._arrived.view >= now_ms - max(2 * interval_ms, 60_000.0))
        use = np.flatnonzero(alive)
        if series.index.has_replicas:
            use = self._of_one_replica(use, series, interval_ms)
        ts, owner = self._ts.view[use], entity[use]
        common = np.full(len(series.index.entities), np.iinfo(np.int64).max)
        newest = np.full(len(series.index.entities), _NEVER)
        np.minimum.at(common, owner, ts)
        np.maximum.at(newest, owner, ts)
        common = np.where(common >= newest - 2 * interval_ms, common, newest)[owner]
        is_before = (ts > common) & (self._before_ts.view[use] == common)
        values = np.where(is_before, self._before.view[use], self._value.view[use])
        given = np.flatnonzero((ts == common) | is_before)
        use = use[given]
        return Samples(
            name[use].astype(np.int64),
            entity[use].astype(np.int64),
            np.ones(len(use), np.int64),
            common[given],
            values[given],
        )

    def _of_one_replica(self, use: np.ndarray, series: Series, interval_ms: float) -> np.ndarray:
        """Of these series those of one replica each; of one that was left the last samples are not asked for."""
        self._chooser = self._chooser or OneReplica(interval_ms)
        name, entity, each = series.name[use], series.entity[use], np.ones(len(use), np.int64)
        samples = Samples(name.astype(np.int64), entity.astype(np.int64), each, self._ts.view[use], each * 0.0)
        kept = self._chooser.keep(samples, series.replica[use].astype(np.int64))
        return use if kept is None else use[kept]

    def complete_ms(self, sender: int, heard_ms: int) -> int | None:
        """Everything of that sender before this time has arrived; None when nothing of it is alive.

        The shards of a Prometheus send each for itself, and after an outage one may be minutes ahead of another: it is
        the series furthest behind that counts, of those that still bring samples.
        """
        mine = self._live() & (self._sender.view == sender) & (self._arrived.view >= heard_ms - _ALIVE_MS)
        return int(self._ts.view[mine].min()) if mine.any() else None

    def covered_ratio(self, series: Series, sender: int, others: list[int]) -> float:
        """Share of that sender's series whose metric and GPU or node other senders bring too, 0 to 1."""
        size = self._ts.size
        keys = series.name[:size].astype(np.int64) << 32 | series.entity[:size].astype(np.int64)
        live = self._live() & (series.entity[:size] >= 0)
        mine = keys[live & (self._sender.view == sender)]
        if not len(mine):
            return 1.0
        return float(np.isin(mine, keys[live & np.isin(self._sender.view, others)]).mean())

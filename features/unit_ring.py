"""The newest ten minutes of every node, port or queue of a cluster, in memory: what the nowcast reads of them.

Here belongs what `features/telemetry.py` and `features/intake.py` are for GPUs, for things with few quantities: taking
samples in, which things deserve a close look, and their windows. The same over history stands in
`features/unit_history.py`. No input or output.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.intake import AHEAD_S
from features.places import FORGET_S
from features.queue_memory import QueueMemory
from features.ring import Ring
from features.thresholds import ThresholdBook
from features.unit_conditions import KINDS, UnitState, unit_inputs, unit_quantities
from features.unit_windows import UNIT_FEATURES, unit_block, unit_features, unit_screen
from features.windows import WINDOW_S, FeatureBlock

Ints = NDArray[np.int64]
Times = NDArray[np.float64]

_MIN_CAPACITY = 256
_CHUNK = 8_192


class UnitRing:
    """Ten minutes of samples of every thing of one kind, and the class that befalls it.

    Args:
        bottleneck_class: One of `UNIT_CLASSES`.
        book: Limits of the nodes.
        stale_s: A thing whose newest sample is older than this counts nowhere.

    Attributes:
        count: Things there are; their indices are 0 … count - 1.
        names: As `scope_id` has them: node, node/device/port, queue.
        nodes: Node of each, None where it has none.
        last_ts: Time of the newest sample of each, NaN where there is none.
        latest: Quantities of that sample, shape (quantities, places).
        memory: What is remembered of queues; of other kinds nothing.
    """

    def __init__(self, bottleneck_class: str, book: ThresholdBook, *, stale_s: float = 45.0) -> None:
        self.bottleneck_class, self.kind, self.book, self.stale_s = (
            bottleneck_class,
            KINDS[bottleneck_class],
            book,
            stale_s,
        )
        self.count = 0
        self.names: list[str] = []
        self.nodes: list[str | None] = []
        self.last_ts = np.zeros(0)
        self.latest = np.zeros((len(self.kind.quantities), 0), dtype=np.float32)
        self.memory = QueueMemory()
        self._before = np.zeros(0, dtype=np.float32)  # distance of the sample before the newest
        self._limits = book.arrays([])
        self._state = UnitState(self.kind.usuals)
        self._ring = Ring(has_util=False, quantities=len(self.kind.quantities))
        self._index: dict[str, int] = {}
        self._seen: tuple[list[pl.Series], Ints] | None = None

    # --- taking in ------------------------------------------------------------------------------------------

    def observe(self, frame: pl.DataFrame, *, now_s: float | None = None) -> int:
        """Take in samples.

        Args:
            frame: Rows with `ts`, the keys and any of the inputs of the kind, any number per thing, in any order.
            now_s: The moment of the reading; samples later than it by more than 5 s are dropped, and what is there from
                a later moment (the clock was set back) does not count. None: history.

        Returns:
            Number of samples that had not been there.

        Raises:
            ValueError: A key column is absent.
        """
        keys = [name for name in self.kind.keys if name in frame.columns]
        if "ts" not in frame.columns or self.kind.keys[0] not in keys:
            raise ValueError(f"samples of {self.kind.scope}s lack ts or {self.kind.keys[0]}; they have {frame.columns}")
        if now_s is not None:
            frame = frame.filter(pl.col("ts").dt.epoch("us") <= (now_s + AHEAD_S) * 1e6)
            self._set_back(now_s)
        frame = frame.drop_nulls(["ts", self.kind.keys[0]])
        if not frame.height:
            return 0
        unit = self._places(frame.select(keys))
        if len(np.unique(unit)) == len(unit):
            return self._take(unit, frame)
        frame = frame.with_columns(pl.Series("_unit", unit)).sort("ts")
        frame = frame.with_columns(pl.int_range(pl.len()).over("_unit").alias("_rank"))
        parts = frame.partition_by("_rank", maintain_order=True, include_key=False)
        return sum(self._take(part["_unit"].to_numpy(), part) for part in parts)

    def _set_back(self, now_s: float) -> None:
        """Take things with samples from later than a moment for never seen; what queues were like is kept."""
        ahead = np.flatnonzero(self.last_ts[: self.count] > now_s + AHEAD_S)
        if len(ahead):
            self._ring.clear(ahead)
            self.last_ts[ahead], self._before[ahead] = np.nan, np.nan
            self.latest[:, ahead] = np.nan
            self._state.seen_s[ahead] = np.fmin(self._state.seen_s[ahead], now_s)
        if self.kind.scope == "queue":
            self.memory.set_back(now_s + AHEAD_S)

    def _places(self, keys: pl.DataFrame) -> Ints:
        columns = keys.get_columns()
        seen = self._seen
        if seen is not None and len(seen[0]) == len(columns) and all(map(pl.Series.equals, seen[0], columns)):
            return seen[1]
        parts = [pl.col(name).cast(pl.String).fill_null("") for name in keys.columns]
        names = keys.select(pl.concat_str(parts, separator="/")).to_series().to_list()
        fresh = {
            name: node
            for name, node in zip(names, keys[keys.columns[0]].to_list(), strict=True)
            if name not in self._index
        }
        for name, node in fresh.items():
            self._index[name] = len(self.names)
            self.names.append(name)
            self.nodes.append(node if self.kind.scope != "queue" else None)
        self._grow()
        unit = np.fromiter((self._index[name] for name in names), dtype=np.int64, count=len(names))
        self._seen = (columns, unit)
        return unit

    def _grow(self) -> None:
        old, self.count = self.count, len(self.names)
        if self.count > len(self.last_ts):
            size = max(_MIN_CAPACITY, self.count + self.count // 8)
            self.last_ts, self._before = _wider(self.last_ts, size), _wider(self._before, size)
            self.latest = _wider(self.latest.T, size).T.copy()
            self._limits = {name: _wider(values, size) for name, values in self._limits.items()}
            self._ring.grow(size)
            self._state.grow(size)
            if self.kind.scope == "queue":
                self.memory.grow(size)
        if self.count > old:
            for name, values in self.book.arrays([node or "" for node in self.nodes[old:]]).items():
                self._limits[name][old : self.count] = values

    def _take(self, unit: Ints, frame: pl.DataFrame) -> int:
        ts = frame["ts"].dt.epoch("us").to_numpy() / 1e6
        columns = unit_inputs(self.bottleneck_class, frame)
        newer = ~(ts <= self.last_ts[unit])  # NaN: never seen
        if newer.all():
            return self._newer(unit, ts, columns)
        with np.errstate(invalid="ignore"):
            late = ~newer & (ts < self.last_ts[unit]) & (ts > self.last_ts[unit] - WINDOW_S)
        taken = self._newer(unit[newer], ts[newer], _where(columns, newer)) if newer.any() else 0
        return taken + (self._late(unit[late], ts[late], _where(columns, late)) if late.any() else 0)

    def _newer(self, unit: Ints, ts: Times, columns: dict[str, NDArray[np.float64]]) -> int:
        values = self._quantities(columns, self._state, unit, unit, ts)
        if self.kind.scope == "queue":
            pending, idle, running = columns.values()
            self.memory.update(unit, ts, pending, idle, running)
        self._ring.put(unit, ts, values, values[0])
        self._before[unit] = self.latest[0, unit]
        self.latest[:, unit] = values
        self.last_ts[unit] = ts
        return len(unit)

    def _late(self, unit: Ints, ts: Times, columns: dict[str, NDArray[np.float64]]) -> int:
        """Samples older than the newest of their things go to their places, and leave what is remembered as it is."""
        values = self._quantities(columns, self._state.of(unit), unit, np.arange(len(unit)), ts)
        return int(self._ring.put(unit, ts, values, values[0]).sum())

    def _quantities(
        self, columns: dict[str, NDArray[np.float64]], state: UnitState, unit: Ints, place: Ints, ts: Times
    ) -> NDArray[np.float32]:
        limits = {name: values[unit] for name, values in self._limits.items()}
        return unit_quantities(self.bottleneck_class, columns, limits, state, place, ts)

    # --- reading --------------------------------------------------------------------------------------------

    def is_fresh(self, now_s: float) -> NDArray[np.bool_]:
        """Which things have a sample that is neither stale nor from the future, shape (count,)."""
        with np.errstate(invalid="ignore"):
            return np.abs(now_s - self.last_ts[: self.count]) <= self.stale_s

    def is_set(self) -> NDArray[np.bool_]:
        """Where the condition held in the newest two samples of a thing, shape (count,)."""
        with np.errstate(invalid="ignore"):
            return (self._before[: self.count] <= 0) & (self.latest[0, : self.count] <= 0)

    def screened(self, now_s: float) -> Ints:
        """Indices of fresh things that deserve a close look."""
        n = self.count
        slot, ts = self._ring.minute_ago(self.last_ts[:n])
        earlier = np.where(np.isnan(ts), np.float32(np.nan), self._ring.far_value(slot, 0))
        picked = unit_screen(self.bottleneck_class, self.latest[0, :n], earlier, self.last_ts[:n] - ts)
        return np.flatnonzero(picked & self.is_fresh(now_s))

    def features(self, units: Ints, now_s: float) -> FeatureBlock:
        """Features of some things at a moment.

        Args:
            units: Indices of things.
            now_s: The moment, seconds since 1970.
        """
        parts = [np.zeros((0, len(UNIT_FEATURES[self.bottleneck_class])), dtype=np.float32)]
        for first in range(0, len(units), _CHUNK):
            rows = units[first : first + _CHUNK]
            values, ts, is_even = self._ring.gather(rows, self.last_ts[rows])
            ages = (now_s - ts).astype(np.float32)
            ages = np.where((ages < 0) & (ages >= -AHEAD_S), np.float32(0), ages)
            memory = None
            if self.kind.scope == "queue":
                pending, idle = self.latest[1:3, rows].astype(np.float64)
                memory = self.memory.features(rows, self.last_ts[rows], pending, idle)
            parts.append(unit_features(self.bottleneck_class, values, ages, is_even, memory))
        return unit_block(self.bottleneck_class, units, np.full(len(units), now_s), np.concatenate(parts))

    # --- keeping house --------------------------------------------------------------------------------------

    def set_book(self, book: ThresholdBook) -> None:
        """Take new limits, as when the inventory has changed."""
        self.book = book
        for name, values in book.arrays([node or "" for node in self.nodes]).items():
            self._limits[name][: self.count] = values

    def recall(self, names: list[str], memory: QueueMemory) -> None:
        """Take up queues as a former process remembered them; nothing is there yet of their last minutes.

        Args:
            names: Queues; those that have been seen already stay as they are.
            memory: What is remembered of each.
        """
        if self.count or not names:
            return
        self._places(pl.DataFrame({self.kind.keys[0]: names}))
        for name, values in vars(self.memory).items():
            values[: len(names)] = getattr(memory, name)

    def forget(self, now_s: float, after_s: float = FORGET_S) -> int:
        """Give up things that have been silent; indices change, none taken before is valid after a return above 0.

        Queues that a former process remembered count from then.
        """
        heard = self.last_ts[: self.count]
        if self.kind.scope == "queue":
            heard = np.fmax(heard, self.memory.ts[: self.count])
        keep = np.flatnonzero(now_s - heard <= after_s)
        gone = self.count - len(keep)
        if gone:
            old, old_names, old_nodes = self.count, self.names, self.nodes
            self.names, self.nodes = [old_names[i] for i in keep], [old_nodes[i] for i in keep]
            self.count, self._seen = len(keep), None
            self._index = {name: i for i, name in enumerate(self.names)}
            self._ring.keep(keep)
            free = np.arange(len(keep), old)
            self._ring.clear(free)
            for array in (self.last_ts, self._before, *self._limits.values()):
                array[: len(keep)], array[free] = array[keep], np.nan
            self.latest[:, : len(keep)], self.latest[:, free] = self.latest[:, keep], np.nan
            size = len(self.last_ts)
            self._state.keep(keep)
            self._state.grow(size)
            if self.kind.scope == "queue":
                self.memory.keep(keep)
                self.memory.grow(size)
        return gone

    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return (
            self._ring.nbytes()
            + self.latest.nbytes
            + sum(a.nbytes for a in (*self._limits.values(), *vars(self._state).values()))
        )


def _where(columns: dict[str, NDArray[np.float64]], rows: NDArray[np.bool_]) -> dict[str, NDArray[np.float64]]:
    return {name: values[rows] for name, values in columns.items()}


def _wider(array: NDArray, size: int) -> NDArray:
    out = np.full((size, *array.shape[1:]), np.nan, dtype=array.dtype)
    out[: len(array)] = array
    return out

"""Where the newest ten minutes of every GPU are kept: cells of time, not the last so many rows.

Here belong the cells and the arrays of a live ring; taking samples in stands in `features/intake.py`, the same
choice of samples over history in `features/history.py`, arithmetic on windows in `features/windows.py`.

Time is cut into cells of 12 s and, for the near past, of 4 s, by the clock and alike for all GPUs. Of each cell the
newest sample is kept. So a window reaches back ten minutes at any sampling in the same memory, what is kept depends on
the samples alone and not on the order in which they come, and a late sample goes to its own cell. Cells nest: the
newest sample of a cell of 12 s is the newest of its cell of 4 s too. A source that samples every 4 s or less often
loses nothing of the near past, one of every 12 s or less often nothing at all.

Many quantities are told in steps that are finer than exporters tell them, and kept as numbers of steps, which takes
half the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from features.conditions import MOST_STEPS, QUANTITIES

Floats = NDArray[np.float32]
Times = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NEAR_CELL_S = 4.0
NEAR_CELLS = 24  # 92 s and more: the near past that trends are read from
FAR_CELL_S = 12.0  # a multiple of the near cell
FAR_CELLS = 51  # 600 s and more: the cell of now has only begun
SLOTS = NEAR_CELLS + FAR_CELLS
# Cells of 12 s back at which the value of a minute ago is looked for, best first; nearer ones say nothing of a pace.
PACE_CELLS = (5, 6, 4, 7, 3, 8, 9)
_MOVED = 4_096  # rows moved at a time
_NONE = np.int16(-MOST_STEPS - 1)  # not measured
_UTIL_STEP = np.float32(1 / 16384)


class Windows(NamedTuple):
    """Gathered windows, oldest sample first.

    Attributes:
        values: Shape (len(QUANTITIES), rows, slots), NaN where there is no sample.
        ts: Times, seconds since 1970, shape (rows, slots), NaN where there is no sample.
        is_even: The newest samples of their 12 s, which stand for equal times; shape (rows, slots).
    """

    values: Floats
    ts: Times
    is_even: Flags


def near_cell(ts: Times) -> Ints:
    """Number of the cell of 4 s that a moment lies in."""
    return np.floor_divide(ts, NEAR_CELL_S).astype(np.int64)


def far_cell(ts: Times) -> Ints:
    """Number of the cell of 12 s that a moment lies in."""
    return np.floor_divide(ts, FAR_CELL_S).astype(np.int64)


def _in_steps(values: Floats, step: Floats | np.float32) -> NDArray[np.int16]:
    """Values as numbers of steps."""
    steps = np.clip(np.rint(values / step), -MOST_STEPS, MOST_STEPS)
    return np.where(np.isnan(steps), _NONE, steps).astype(np.int16)


def _measured(steps: NDArray[np.int16], step: Floats | np.float32) -> Floats:
    """What was kept in steps, NaN where it was not measured."""
    return np.where(steps == _NONE, np.float32(np.nan), steps * step)


class _Tier:
    """Samples by cells of one length: the sample of cell c stands in slot c mod cells.

    A time that is NaN, or that of no cell at present, is none: its values mean nothing.
    """

    def __init__(
        self, cell_s: float, cells: int, quantities: int, *, has_util: bool, coarse: Mapping[int, float] | None = None
    ) -> None:
        self.cell_s, self.cells = cell_s, cells
        steps = coarse or {}
        self.fine = np.array([q for q in range(quantities) if q not in steps], dtype=np.int64)
        self.coarse = np.array(list(steps), dtype=np.int64)
        self.step = np.array(list(steps.values()), dtype=np.float32)
        self.place = np.empty(quantities, dtype=np.int64)
        self.place[self.fine], self.place[self.coarse] = np.arange(len(self.fine)), np.arange(len(self.coarse))
        self.values = np.zeros((0, cells, len(self.fine)), dtype=np.float32)
        self.steps = np.zeros((0, cells, len(self.coarse)), dtype=np.int16)
        self.ts = np.zeros((0, cells))
        self.util = np.zeros((0, cells if has_util else 0), dtype=np.int16)

    def arrays(self) -> tuple[NDArray, ...]:
        return self.values, self.steps, self.ts, self.util

    def column(self, gpu: Ints, slot: Ints, quantity: int) -> Floats:
        """One quantity of samples, shape (rows,)."""
        if quantity not in self.coarse:
            return self.values[gpu, slot, self.place[quantity]]
        place = self.place[quantity]
        return _measured(self.steps[gpu, slot, place], self.step[place])

    def give(self, gpu: Ints, slot: Ints, quantity: int, told: Floats) -> None:
        """Replace a quantity of samples."""
        place = self.place[quantity]
        if quantity in self.coarse:
            self.steps[gpu, slot, place] = _in_steps(told, self.step[place])
        else:
            self.values[gpu, slot, place] = told

    def forget(self, gpu: Ints, slot: Ints, quantity: int) -> None:
        """Take a quantity of samples for not measured."""
        array, none = (self.steps, _NONE) if quantity in self.coarse else (self.values, np.nan)
        array[gpu, slot, self.place[quantity]] = none

    def take(self, gpu: Ints, slot: Ints) -> Floats:
        """Values of samples, shape (…, quantities)."""
        if not len(self.coarse):
            return self.values[gpu, slot]
        values = self.values[gpu, slot]
        out = np.empty((*values.shape[:-1], len(self.place)), dtype=np.float32)
        out[..., self.fine] = values
        out[..., self.coarse] = _measured(self.steps[gpu, slot], self.step)
        return out

    def put(self, gpu: Ints, ts: Times, values: Floats, util: Floats) -> Flags:
        """Keep samples that are the newest of their cells; shape (rows,): which those are."""
        slot = np.floor_divide(ts, self.cell_s).astype(np.int64) % self.cells
        newer = ~(ts <= self.ts[gpu, slot])  # NaN: an empty slot
        if not newer.all():
            gpu, slot, ts, values, util = gpu[newer], slot[newer], ts[newer], values[newer], util[newer]
        if len(self.coarse):
            self.values[gpu, slot] = values[:, self.fine]
            self.steps[gpu, slot] = _in_steps(values[:, self.coarse], self.step)
        else:
            self.values[gpu, slot] = values
        self.ts[gpu, slot] = ts
        if self.util.shape[1]:
            self.util[gpu, slot] = _in_steps(util, _UTIL_STEP)
        return newer

    def slots(self, newest: Ints) -> Ints:
        """Slots from the oldest cell to the newest, shape (rows, cells)."""
        return (newest[:, None] + np.arange(1 - self.cells, 1)) % self.cells


class Ring:
    """Ten minutes of samples of every GPU, in two lengths of cells.

    Args:
        has_util: Whether utilisation is kept beside the quantities, for `use_util`.
        quantities: How many quantities a sample has: of GPUs, or fewer of nodes, ports and queues.
        coarse: Quantities that are kept in steps, by number, and these; they are told in them too.
    """

    def __init__(
        self, *, has_util: bool, quantities: int = len(QUANTITIES), coarse: Mapping[int, float] | None = None
    ) -> None:
        self.near = _Tier(NEAR_CELL_S, NEAR_CELLS, quantities, has_util=has_util, coarse=coarse)
        self.far = _Tier(FAR_CELL_S, FAR_CELLS, quantities, has_util=has_util, coarse=coarse)

    def put(self, gpu: Ints, ts: Times, values: Floats, util: Floats) -> Flags:
        """Keep one sample of each of some GPUs.

        Args:
            gpu: Indices of GPUs, each once.
            ts: Times, seconds since 1970; none older than ten minutes before its GPU's newest.
            values: Shape (len(QUANTITIES), rows).
            util: Utilisation, shape (rows,).

        Returns:
            Which were not there already nor outdone by a newer one of their cell, shape (rows,).
        """
        by_row = np.ascontiguousarray(values.T)
        return self.near.put(gpu, ts, by_row, util) | self.far.put(gpu, ts, by_row, util)

    def clear(self, gpu: Ints) -> None:
        """Take GPUs for never seen."""
        for tier in (self.near, self.far):
            tier.ts[gpu] = np.nan

    def take_back(self, gpu: Ints, since_s: Times, until_s: Times, quantities: list[int]) -> None:
        """Make some quantities of samples within spans, both ends included, as if they had not been measured."""
        for tier in (self.near, self.far):
            row, slot = self._within(tier, gpu, since_s, until_s)
            for quantity in quantities:
                tier.forget(gpu[row], slot, quantity)

    def use_util(self, gpu: Ints, since_s: Times, until_s: Times, quantity: int) -> None:
        """Give utilisation for a quantity that stands at 0 within spans."""
        for tier in (self.near, self.far):
            row, slot = self._within(tier, gpu, since_s, until_s)
            row = gpu[row]
            idle = tier.column(row, slot, quantity) == 0
            row, slot = row[idle], slot[idle]
            tier.give(row, slot, quantity, _measured(tier.util[row, slot], _UTIL_STEP))

    @staticmethod
    def _within(tier: _Tier, gpu: Ints, since_s: Times, until_s: Times) -> tuple[Ints, Ints]:
        ts = tier.ts[gpu]
        row, slot = np.nonzero((ts >= since_s[:, None]) & (ts <= until_s[:, None]))
        return row, slot

    def grow(self, gpus: int) -> None:
        """Make room for more GPUs; those there keep their samples."""
        for tier in (self.near, self.far):
            for name in ("values", "steps", "ts", "util"):
                old = getattr(tier, name)
                fresh = np.zeros((gpus, *old.shape[1:]), dtype=old.dtype)  # costs nothing until something is put there
                fresh[: len(old)] = old
                setattr(tier, name, fresh)

    def keep(self, gpus: Ints) -> None:
        """Move some GPUs, ascending, to the front; what is behind them is left as it was."""
        for tier in (self.near, self.far):
            for array in tier.arrays():
                for first in range(0, len(gpus), _MOVED):  # rings of a large cluster do not fit twice
                    part = gpus[first : first + _MOVED]
                    array[first : first + len(part)] = array[part]

    def gather(self, gpu: Ints, newest_s: Times) -> Windows:
        """Windows of some GPUs.

        Args:
            gpu: Indices of GPUs.
            newest_s: Time of each one's newest sample, seconds since 1970, NaN where there is none.
        """
        newest_s = np.where(np.isnan(newest_s), 0.0, newest_s)
        newest = near_cell(newest_s)
        rows, near, far = gpu[:, None], self.near.slots(newest), self.far.slots(far_cell(newest_s))
        near_ts, far_ts = self.near.ts[rows, near], self.far.ts[rows, far]
        first_s = ((newest - (NEAR_CELLS - 1)) * NEAR_CELL_S)[:, None]
        oldest_s = ((far_cell(newest_s) - (FAR_CELLS - 1)) * FAR_CELL_S)[:, None]
        near_ts[~(near_ts >= first_s)] = np.nan
        far_ts[~((far_ts < first_s) & (far_ts >= oldest_s))] = np.nan  # later ones are in the near cells too
        known = np.where(np.isnan(near_ts), 0.0, near_ts)
        is_even = self.far.ts[rows, far_cell(known) % FAR_CELLS] == near_ts
        values = np.concatenate((self.far.take(rows, far), self.near.take(rows, near)), axis=1)
        ts = np.concatenate((far_ts, near_ts), axis=1)
        values[np.isnan(ts)] = np.nan
        return Windows(
            np.ascontiguousarray(np.moveaxis(values, 2, 0)), ts, np.concatenate((~np.isnan(far_ts), is_even), axis=1)
        )

    def minute_ago(self, newest_s: Times) -> tuple[Ints, Times]:
        """Where the sample of about a minute before each GPU's newest stands in the far cells.

        Args:
            newest_s: Time of the newest sample of the first so many GPUs.

        Returns:
            Its slot and its time, NaN where there is none, each of shape (gpus,).
        """
        n = len(newest_s)
        cell = far_cell(np.where(np.isnan(newest_s), 0.0, newest_s))
        slot, ts = np.zeros(n, dtype=np.int64), np.full(n, np.nan)
        rows = np.arange(n)
        for back in PACE_CELLS:
            at = (cell[rows] - back) % FAR_CELLS
            found = self.far.ts[rows, at]
            begin = (cell[rows] - back) * FAR_CELL_S
            hit = (found >= begin) & (found < begin + FAR_CELL_S)
            slot[rows[hit]], ts[rows[hit]] = at[hit], found[hit]
            rows = rows[~hit]
            if not len(rows):
                break
        return slot, ts

    def far_value(self, slot: Ints, quantity: int) -> Floats:
        """A quantity of the first so many GPUs in given slots of the far cells, shape (gpus,)."""
        return self.far.column(np.arange(len(slot)), slot, quantity)

    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for tier in (self.near, self.far) for array in tier.arrays())

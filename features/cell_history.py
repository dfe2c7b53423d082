"""Which samples of a sorted record a window holds: those that a live ring would hold at past moments.

Here belongs gathering by the cells of time of `features/ring.py`, for GPUs and for anything else that is sampled; what
the samples mean stands with each history. Nothing later than the asked moment enters a window.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from features.ring import FAR_CELLS, NEAR_CELLS, PACE_CELLS, Windows, far_cell, near_cell

Ints = NDArray[np.int64]


class CellHistory:
    """Samples sorted by thing and time.

    Attributes:
        uuids: Thing of each code.
        gpu: Code of each sample's thing, shape (samples,), ascending.
        ts: Times, seconds, ascending within a thing.
        values: Shape (quantities, samples).
        starts: First sample of each thing, and the number of samples.
        interval_s: Median time between samples of a thing.
    """

    uuids: list[str]
    gpu: Ints
    ts: NDArray[np.float64]
    values: NDArray[np.float32]

    def _index(self, interval_s: float = 15.0) -> None:
        """Make what gathering goes by; `uuids`, `gpu` and `ts` stand by then."""
        self.starts = np.searchsorted(self.gpu, np.arange(len(self.uuids) + 1))
        gaps = np.diff(self.ts)[np.diff(self.gpu) == 0] if len(self.ts) > 1 else np.zeros(0)
        self.interval_s = float(np.median(gaps)) if len(gaps) else interval_s
        self._base = float(self.ts.min()) if len(self.ts) else 0.0
        self._span = (float(self.ts.max()) - self._base + 1.0) * 2 if len(self.ts) else 1.0
        self._keys = self.gpu * self._span + (self.ts - self._base)
        self._near = _Cells(self.gpu, near_cell(self.ts))
        self._far = _Cells(self.gpu, far_cell(self.ts))

    def last_at(self, gpu: NDArray[np.int64], at_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Row of the newest sample of a GPU at or before a moment, -1 where there is none."""
        clipped = np.clip(at_s - self._base, -1.0, self._span / 2)
        row = np.searchsorted(self._keys, gpu * self._span + clipped, side="right") - 1
        return np.where(row >= self.starts[gpu], row, -1)

    @cached_property
    def minute_ago(self) -> Ints:
        """Row of the sample of about a minute before each, -1 where there is none; as `Ring.minute_ago`."""
        cells = self._far
        rank = np.full(max(PACE_CELLS) + 2, len(PACE_CELLS))
        rank[list(PACE_CELLS)] = np.arange(len(PACE_CELLS))
        out, best = np.full(len(self.ts), -1), np.full(len(self.ts), len(PACE_CELLS))
        for back in range(1, max(PACE_CELLS) + 1):
            row = cells.row_before(cells.before, back)
            gap = np.where((row >= 0) & (self.gpu[row] == self.gpu), cells.cell - cells.cell[row], len(rank))
            found = rank[np.minimum(gap, len(rank) - 1)]
            better = found < best
            out[better], best[better] = row[better], found[better]
        return out

    def windows(self, gpu: Ints, last: Ints) -> Windows:
        """Windows that end with given samples: those that a ring holds when they are the newest.

        Args:
            gpu: GPU codes, shape (rows,).
            last: Row of each one's newest sample, -1 for none.
        """
        newest = np.maximum(last, 0)
        near, far = self._near, self._far
        far_rows = far.row_before(far.before[newest, None], np.arange(FAR_CELLS - 1, 0, -1))
        near_rows = near.row_before(near.before[newest, None], np.arange(NEAR_CELLS - 1, 0, -1))
        begin = near.cell[newest, None] - NEAR_CELLS
        in_far = (near.cell[far_rows] <= begin) & (far.cell[far_rows] > far.cell[newest, None] - FAR_CELLS)
        in_near = near.cell[near_rows] > begin
        rows = np.concatenate((far_rows, near_rows, newest[:, None]), axis=1)
        inside = np.concatenate((in_far, in_near, np.ones((len(last), 1), dtype=bool)), axis=1)
        inside &= (rows >= self.starts[gpu, None]) & (last >= 0)[:, None]
        rows = np.where(inside, rows, 0)
        is_even = inside & far.is_end[rows]
        is_even[:, -1] = inside[:, -1]
        values = np.where(inside, self.values[:, rows], np.float32(np.nan))
        return Windows(values, np.where(inside, self.ts[rows], np.nan), is_even)


class _Cells:
    """Samples by cells of time.

    Attributes:
        cell: Number of each sample's cell.
        is_end: Samples that are the newest of their cell and GPU.
        before: How many such there are before each sample.
    """

    def __init__(self, gpu: Ints, cell: Ints) -> None:
        self.cell = cell
        self.is_end = np.ones(len(cell), dtype=bool)
        if len(cell):
            self.is_end[:-1] = (np.diff(gpu) != 0) | (np.diff(cell) != 0)
        self._ends = np.flatnonzero(self.is_end)
        self.before = np.cumsum(self.is_end) - self.is_end

    def row_before(self, before: Ints, back: Ints | int) -> Ints:
        """Row of the newest sample of the cell so many filled cells back, -1 before the first of all."""
        place = before - back
        return np.where(place >= 0, self._ends[np.maximum(place, 0)], -1)

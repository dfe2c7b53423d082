"""What the ranks of a job need for a step, at the same time: the gang that a slow rank is told from.

Here belongs the median of a gang as samples come; how a rank stands to it is told in `features/conditions.py`.

In a synchronous job every rank shows the same time from step to step, for each waits for the slowest. Only the time
that a rank needed itself, before the barrier, tells who that is (`own_step_time_s`). Where ranks do not report it, the
step time stands in: a gang that shares one is all alike, and nobody of it is ever slow. The two are never compared.

A gang is compared second by second, by the clock: samples of one second count as taken together, whatever the order
in which they come, and a rank's newest step counts for a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from features.straggler import MIN_GANG

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Times = NDArray[np.float64]

FRESH_S = 60.0  # a rank that has shown no step for longer than this is no measure of the others


def rank_steps(columns: Mapping[str, Floats], job: Ints) -> tuple[Floats, Ints]:
    """Each row's own step time and its gang.

    Args:
        columns: As of `features.conditions.inputs`.
        job: Job codes, -1 for none.

    Returns:
        Seconds, NaN where not known; code of the gang, -1 where there is no job or no step. Each of shape (rows,).
    """
    own, shared = columns["own_step_time_s"], columns["step_time_s"]
    with np.errstate(invalid="ignore"):
        has_own = own > 0
        step = np.where(has_own, own, np.where(shared > 0, shared, np.float32(np.nan)))
    return step, np.where((job >= 0) & ~np.isnan(step), job * 2 + has_own, -1)


class Gangs:
    """The newest step of every GPU, and whose gang it is of."""

    def __init__(self, gpus: int = 0) -> None:
        self.step = np.full(gpus, np.nan, dtype=np.float32)
        self.at = np.full(gpus, np.nan)
        self.gang = np.full(gpus, -1, dtype=np.int64)

    def arrays(self) -> list[NDArray]:
        """All that is kept per GPU along the first axis."""
        return [self.step, self.at, self.gang]

    def grow(self, gpus: int) -> None:
        """Make room for more GPUs; those there keep their steps."""
        fresh = Gangs(gpus)
        for name, value in vars(self).items():
            getattr(fresh, name)[: len(value)] = value
            setattr(self, name, getattr(fresh, name))

    def clear(self, gpu: Ints) -> None:
        """Take GPUs for never seen."""
        self.step[gpu], self.at[gpu], self.gang[gpu] = np.nan, np.nan, -1

    def rename(self, gpus: int, jobs: Ints) -> None:
        """Take new codes of jobs for the first so many GPUs.

        Args:
            gpus: How many.
            jobs: Old code of each new one, ascending; others are forgotten.
        """
        gang = self.gang[:gpus]
        place = np.searchsorted(jobs, gang >> 1)
        known = (gang >= 0) & (place < len(jobs))
        known[known] = jobs[place[known]] == gang[known] >> 1
        self.gang[:gpus] = np.where(known, place * 2 + (gang & 1), -1)

    def medians(self, gpu: Ints, ts: Times, gang: Ints, step: Floats) -> Floats:
        """Take steps, and give the median of each one's gang at its second.

        Args:
            gpu: Indices of GPUs; rows of one GPU stand together, oldest first.
            ts: Times, seconds since 1970; none earlier than what is there of its GPU.
            gang: As of `rank_steps`.
            step: As of `rank_steps`.

        Returns:
            Shape (rows,); NaN without a step, or with fewer than `MIN_GANG` ranks.
        """
        out = np.full(len(gpu), np.nan, dtype=np.float32)
        rows = np.flatnonzero(gang >= 0)
        if not len(rows):
            return out
        second, of = np.floor(ts[rows]), gpu[rows]
        begins = np.ones(len(rows), dtype=bool)
        begins[1:] = (np.diff(of) != 0) | (np.diff(second) != 0)
        number = np.arange(len(rows))
        turn = number - np.maximum.accumulate(np.where(begins, number, 0))  # a second may hold several samples of one
        order = np.lexsort((turn, second))
        cuts = np.flatnonzero((np.diff(second[order]) != 0) | (np.diff(turn[order]) != 0)) + 1
        for first, last in pairwise([0, *cuts.tolist(), len(rows)]):
            part = rows[order[first:last]]
            self.step[gpu[part]], self.at[gpu[part]], self.gang[gpu[part]] = step[part], ts[part], gang[part]
            out[part] = self.median_of(gang[part], float(second[order[first]]))
        return out

    def median_of(self, gang: Ints, second: float) -> Floats:
        """Median of the newest steps of gangs, without those that are a minute older than a moment.

        Args:
            gang: Codes of gangs, shape (rows,).
            second: The moment, seconds since 1970.

        Returns:
            Shape (rows,); NaN where fewer than `MIN_GANG` ranks count or the code is -1.
        """
        wanted = np.zeros(max(int(self.gang.max(initial=-1)), int(gang.max(initial=-1))) + 2, dtype=bool)
        wanted[gang] = True
        wanted[-1] = False  # the place of code -1
        with np.errstate(invalid="ignore"):
            counts = np.flatnonzero(wanted[self.gang] & (self.at > second - FRESH_S))
        # Positive floats stand in the order of their bits: one sort does for all gangs.
        keys = np.sort((self.gang[counts] << 32) | self.step[counts].view(np.int32).astype(np.int64))
        codes, first, n = np.unique(keys >> 32, return_index=True, return_counts=True)
        if not len(codes):
            return np.full(len(gang), np.nan, dtype=np.float32)
        values = (keys & 0xFFFFFFFF).astype(np.int32).view(np.float32)
        median = (values[first + (n - 1) // 2] + values[first + n // 2]) / np.float32(2)
        median[n < MIN_GANG] = np.nan
        place = np.minimum(np.searchsorted(codes, gang), len(codes) - 1)
        return np.where(codes[place] == gang, median[place], np.float32(np.nan))

"""How far runs go past their time limit: the scheduler kills with a delay, or does not kill at all.

Here belongs what released jobs tell of the time between the limit and the end, and what it does to a distribution that
reaches the limit; not how likely a job is to reach it (`models/runtime.py`), and not the time left before that
(`models/time_left.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.curves import LEVELS, MEDIAN, cap

Floats = NDArray[np.float64]

MIN_ROWS = 20  # fewer released jobs that reached their limit tell nothing
NEWEST = 500  # of those, as kill waits are changed by whoever runs the cluster


@dataclass(frozen=True, slots=True)
class Grace:
    """Time past the limit of jobs that reached it.

    Attributes:
        overruns_s: Runtime − limit, s, rising, shape (k,); empty where too few jobs reached their limit.
    """

    overruns_s: Floats

    @classmethod
    def none(cls) -> Grace:
        """Nothing known: the limit bounds what has not passed it."""
        return cls(np.empty(0))

    @classmethod
    def fit(cls, runtime_s: Floats, limit_s: Floats, end: NDArray[np.int64]) -> Grace:
        """Learn from released jobs.

        Args:
            runtime_s: Shape (n,).
            limit_s: Shape (n,), NaN: none.
            end: When each ended, µs UTC, shape (n,).
        """
        reached = np.flatnonzero(runtime_s >= limit_s)
        if len(reached) < MIN_ROWS:
            return cls.none()
        newest = reached[np.argsort(end[reached], kind="stable")[-NEWEST:]]
        return cls(np.sort(runtime_s[newest] - limit_s[newest]))

    @property
    def is_known(self) -> bool:
        return len(self.overruns_s) > 0

    def quantile_s(self, level: Floats) -> Floats:
        """Time past the limit at levels, s; any shape."""
        at = (np.arange(len(self.overruns_s)) + 0.5) / len(self.overruns_s)
        return np.interp(level, at, self.overruns_s)

    def past_limit(self, curves: Floats, limit_s: Floats, first: int = MEDIAN + 1) -> Floats:
        """Curves whose levels from `first` on go past the limit where they reach it, as far as runs did.

        The levels at the limit are those of jobs that reach it: their share of the overruns is spread over them. The
        lower levels stop at the limit.

        Args:
            curves: ln(seconds), shape (n, len(LEVELS)).
            limit_s: Shape (n,), NaN: none.
            first: Index into LEVELS.

        Returns:
            Shape (n, len(LEVELS)); never falling along a row.
        """
        out = cap(curves, limit_s)
        if not self.is_known:
            return out
        top = np.log(np.maximum(limit_s, 1.0))
        rows = np.flatnonzero(out[:, -1] >= top - 1e-9)
        below = (out[rows] < top[rows, None] - 1e-9).sum(axis=1)
        edges = np.concatenate([[0.0], LEVELS])
        reached = (edges[below] + LEVELS[below]) / 2  # the level lies between the last below and the first at the limit
        share = (LEVELS - reached[:, None]) / (1 - reached[:, None])
        over = np.log(np.exp(top[rows])[:, None] + self.quantile_s(share))
        is_over = np.arange(len(LEVELS)) >= np.maximum(below, first)[:, None]
        out[rows] = np.where(is_over, over, out[rows])
        return out

    def left_s(self, over_s: Floats, levels: Sequence[float]) -> Floats:
        """Time left of jobs past their limit.

        Args:
            over_s: How long past it, shape (n,).
            levels: Levels asked for.

        Returns:
            Seconds, shape (n, len(levels)): of the overruns that were longer. Past every one of them, as long again in
            the median, as of whatever has outlasted all that is known of it.
        """
        at = (np.arange(len(self.overruns_s)) + 0.5) / len(self.overruns_s)
        asked = np.asarray(levels, dtype=np.float64)
        passed = np.interp(over_s, self.overruns_s, at, left=0.0)[:, None]
        left = self.quantile_s(passed + asked * (1 - passed)) - over_s[:, None]
        outlasted = np.maximum(over_s, 1.0)[:, None] * (asked / np.maximum(1 - asked, 1e-3))
        return np.maximum(np.where((over_s >= self.overruns_s[-1])[:, None], outlasted, left), 0.0)

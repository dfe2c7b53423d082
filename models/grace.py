"""How far runs go past their time limit: the scheduler kills with a delay, or does not kill at all.

Here belongs what released jobs tell of the time between the limit and the end, and what it does to a distribution that
reaches the limit; not how likely a job is to reach it (`models/runtime.py`), and not the time left before that
(`models/time_left.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.curves import LEVELS, MEDIAN, cap

Floats = NDArray[np.float64]

MIN_ROWS = 20  # fewer released jobs that reached their limit tell nothing
NEWEST = 500  # of those, as kill waits are changed by whoever runs the cluster
# A kill takes less: a run that goes on beyond was let run on, of which a short request says less than a long one.
KILLED_S = 120.0


@dataclass(frozen=True, slots=True)
class Grace:
    """Time past the limit of jobs that reached it.

    Attributes:
        overruns_s: Runtime − limit, s, rising, shape (k,); empty where too few jobs reached their limit.
        shares: (Runtime − limit) ÷ limit, rising, shape (k,); empty: not kept.
    """

    overruns_s: Floats
    shares: Floats = field(default_factory=lambda: np.empty(0))

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
        overruns_s = runtime_s[newest] - limit_s[newest]
        return cls(np.sort(overruns_s), np.sort(overruns_s / np.maximum(limit_s[newest], 1.0)))

    @property
    def is_known(self) -> bool:
        return len(self.overruns_s) > 0

    def quantile_s(self, level: Floats, limit_s: Floats | None = None) -> Floats:
        """Time past the limit at levels, s.

        Args:
            level: Any shape.
            limit_s: Of a shape that goes with it: beyond `KILLED_S`, no farther than the same level of the overruns as
                shares of their limits. None: seconds alone count.
        """
        at = (np.arange(len(self.overruns_s)) + 0.5) / len(self.overruns_s)
        over_s = np.interp(level, at, self.overruns_s)
        if limit_s is None or not len(self.shares):
            return over_s
        return np.minimum(over_s, np.maximum(np.interp(level, at, self.shares) * limit_s, KILLED_S))

    def past_limit(
        self, curves: Floats, limit_s: Floats, first: int = MEDIAN + 1, whole_s: Floats | None = None
    ) -> Floats:
        """Curves whose levels from `first` on go past the limit where they reach it, as far as runs did.

        The levels at the limit are those of jobs that reach it: their share of the overruns is spread over them. The
        lower levels stop at the limit.

        Args:
            curves: ln(seconds), shape (n, len(LEVELS)).
            limit_s: Shape (n,), NaN: none.
            first: Index into LEVELS.
            whole_s: The limits of the whole runs where `limit_s` is what is left of them, shape (n,).

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
        of_s = (limit_s if whole_s is None else whole_s)[rows, None]
        over = np.log(np.exp(top[rows])[:, None] + self.quantile_s(share, of_s))
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

"""The newest outcomes in each leaf of a wait forest: how long those jobs waited, at what time of day they started.

A forest says which moments of the past were like this one; of those the newest count most, as schedulers change. A
switch at a fixed time of day (night queues, reservations) shows in when like jobs started, not in how long they waited:
one sees it in the clock. Here belong these outcomes and the curves and points read from them; not the forest
(`models/forest.py`), and not what a forecaster makes of them (`models/wait.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled
from models.curves import LEVELS
from models.forest import Forest
from models.wait_odds import EDGES, NEAR

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

KEPT = 8  # outcomes of a leaf
HALF_LIFE_DAYS = 30.0
WITHIN_S = 60.0
CLOCK_FROM_S = 1_200.0  # shorter waits have nothing to do with the time of day
CLOCK_MOVE_S = 12 * 3_600.0
SOON_TRUST = 0.85  # the share that seems soon where little does is too large: leaves mix in some that were soon
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """Outcomes of like moments, per row.

    Attributes:
        waits: ln(seconds), at least 0, NaN where there is none; shape (n, k).
        weights: What each counts, shape (n, k).
        clocks: Time of day at which they started, seconds; shape (n, k).
    """

    waits: Matrix
    weights: Matrix
    clocks: Matrix

    def curves(self) -> Floats:
        """Quantile curves, ln(seconds), shape (n, len(LEVELS))."""
        out = np.full((len(self.waits), len(LEVELS)), np.nan)
        _levels(_in_order(self.waits), self.waits, self.weights, LEVELS, out)
        return out

    def weighed(self, shares: Floats, trust: float) -> Drawn:
        """The same outcomes, weighed so that the classes of `models/wait_odds.py` get their probability.

        Args:
            shares: Probability of each class, shape (n, classes).
            trust: How far the weight of each class moves towards it, between 0 and 1.
        """
        weights = self.weights.copy()
        _weigh(self.waits, EDGES + NEAR, np.asarray(shares, dtype=np.float64), trust, weights)
        return replace(self, weights=weights)

    def likeliest_s(self, moments_s: Floats | None = None) -> Floats:
        """The point that most outcomes lie around within a minute, seconds, shape (n,).

        Args:
            moments_s: Time of day of each moment: long waits then count as starts at the same time of day.
        """
        out = np.empty(len(self.waits))
        _densest(self.waits, self.weights, self.clocks, np.empty(0) if moments_s is None else moments_s, out)
        return out


@dataclass(frozen=True, slots=True)
class Leaves:
    """Outcomes kept for each leaf of a forest, newest first; each array of shape (leaves, `KEPT`), float32.

    Attributes:
        waits: ln(seconds), NaN where a leaf has fewer.
        weights: Halves with every `HALF_LIFE_DAYS` between the start and the fit.
        clocks: Time of day of the start, seconds.
    """

    waits: Matrix
    weights: Matrix
    clocks: Matrix

    @classmethod
    def fit(cls, forest: Forest, X: Matrix, waits: Floats, start: Ints, at: int) -> Leaves:
        """Fill the leaves.

        Args:
            forest: A fitted forest.
            X: Features of the outcomes, shape (n, f).
            waits: ln(seconds), shape (n,).
            start: When each started, µs, shape (n,).
            at: Moment of the fit, µs.
        """
        order = np.argsort(-start, kind="stable")
        filled = np.full((3, len(forest.samples), KEPT), np.nan, dtype=np.float32)
        weights = 0.5 ** ((at - start[order]) / (_DAY_S * 1e6) / HALF_LIFE_DAYS)
        clocks = (start[order] / 1e6) % _DAY_S
        _fill(forest.leaves(X[order]), waits[order], weights, clocks, filled[0], filled[1], filled[2])
        filled[1:] = np.nan_to_num(filled[1:])
        return cls(*filled)

    def draw(self, forest: Forest, X: Matrix) -> Drawn:
        """Outcomes of the leaves that each row falls into, `KEPT` of each tree."""
        leaf, n = forest.leaves(X), len(X)
        return Drawn(*(kept[leaf].reshape(n, -1) for kept in (self.waits, self.weights, self.clocks)))

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        return {f"{prefix}{name}": getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Leaves:
        return cls(*(arrays[f"{prefix}{name}"] for name in cls.__slots__))


@compiled
def _fill(
    leaves: NDArray[np.int32], values: Floats, weights: Floats, clocks: Floats, waits: Matrix, kept: Matrix,
    times: Matrix,
) -> None:  # fmt: skip
    n, trees = leaves.shape
    filled = np.zeros(len(waits), np.int64)
    for i in range(n):
        for tree in range(trees):
            leaf = leaves[i, tree]
            at = filled[leaf]
            if at < waits.shape[1]:
                waits[leaf, at], kept[leaf, at], times[leaf, at] = values[i], weights[i], clocks[i]
                filled[leaf] = at + 1


def _in_order(waits: Matrix) -> NDArray[np.uint64]:
    """Each row's slots, in the lower half of each number, in order of their waits; those that hold none go last.

    Bits of numbers that are not negative are in order as the numbers are, and NumPy sorts whole numbers fastest.
    """
    keys = np.ascontiguousarray(waits).view(np.uint32).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(waits.shape[1], dtype=np.uint64)
    keys.sort(axis=1)
    return keys


@compiled
def _weigh(waits: Matrix, edges: Floats, shares: Floats, trust: float, weights: Matrix) -> None:
    held = np.empty(len(edges) + 1)
    for i in range(len(waits)):
        number = np.searchsorted(edges, waits[i].astype(np.float64))
        held[:] = 0.0
        total, reached = 0.0, 0.0
        for k in range(waits.shape[1]):
            if not np.isnan(waits[i, k]):
                held[number[k]] += weights[i, k]
                total += weights[i, k]
        for c in range(len(held)):
            if held[c] > 0:
                reached += shares[i, c]
        if reached <= 1e-9:  # nothing like what the odds speak of
            continue
        for k in range(waits.shape[1]):
            if not np.isnan(waits[i, k]):
                weights[i, k] *= 1 - trust + trust * shares[i, number[k]] * total / held[number[k]]


@compiled
def _levels(
    order: NDArray[np.uint64], waits: Matrix, weights: Matrix, levels: Floats, curves: Floats
) -> None:  # fmt: skip
    """The smallest outcome at which the weight reaches each level."""
    n, width = waits.shape
    for i in range(n):
        total, count = 0.0, 0
        while count < width and not np.isnan(waits[i, order[i, count] & np.uint64(0xFFFFFFFF)]):
            total += weights[i, order[i, count] & np.uint64(0xFFFFFFFF)]
            count += 1
        mass, level = 0.0, 0
        for place in range(count):
            k = order[i, place] & np.uint64(0xFFFFFFFF)
            mass += weights[i, k]
            while level < len(levels) and mass >= levels[level] * total - 1e-9 * total:
                curves[i, level] = waits[i, k]
                level += 1


@compiled
def _densest(waits: Matrix, weights: Matrix, clocks: Matrix, moments_s: Floats, points: Floats) -> None:
    n, width = waits.shape
    for i in range(n):
        seconds, held = np.full(width, np.inf), np.zeros(width)
        for k in range(width):
            if np.isnan(waits[i, k]):
                continue
            held[k] = weights[i, k]
            wait = np.exp(np.float64(waits[i, k]))
            if wait <= 1.0 + 1e-6:
                wait = 0.0
            if len(moments_s) and wait >= CLOCK_FROM_S:
                moved = wait + (clocks[i, k] - moments_s[i] - wait + _DAY_S / 2) % _DAY_S - _DAY_S / 2
                if moved > WITHIN_S and abs(moved - wait) <= CLOCK_MOVE_S:
                    wait = moved
            seconds[k] = wait
        order = np.argsort(seconds)
        best, inside, last = -1.0, 0.0, 0
        points[i] = 0.0
        for k in range(width):
            first_s = seconds[order[k]]
            if np.isinf(first_s):
                break
            while last < width and seconds[order[last]] <= first_s + 2 * WITHIN_S + 1.0:
                inside += held[order[last]]
                last += 1
            counted = inside * SOON_TRUST if first_s <= WITHIN_S else inside
            if counted > best + 1e-12:
                best = counted
                points[i] = (first_s + seconds[order[last - 1]]) / 2
                if first_s <= WITHIN_S:  # no wait is just inside, and as much after it as can be
                    points[i] = max(points[i], WITHIN_S)
            inside -= held[order[k]]

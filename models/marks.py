"""Marks: what happened to units and when, with how much of it is still felt at a moment.

A mark fades by half-forgotten exponentials: its level at a moment is the sum of exp(−age ÷ τ) over the unit's marks so
far. Here belong those sums and their integrals; what marks stand for and what follows from them stands in
`models/recurrence.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_AHEAD_S = 1e10  # moments this far beyond the last mark keep their unit


class Marks:
    """Marks of a fixed number of units.

    Args:
        unit: Code of the unit of each mark, in [0, units).
        at_s: Moment of each mark, seconds.
        units: How many units there are.
        taus_s: Times in which a mark fades to 1/e, seconds.

    Attributes:
        unit: Codes, ascending; `at_s` ascending within a unit.
    """

    def __init__(self, unit: Ints, at_s: Floats, units: int, taus_s: tuple[float, ...]) -> None:
        order = np.lexsort((at_s, unit))
        self.order = order
        self.unit, self.at_s, self.taus_s = unit[order].astype(np.int64), at_s[order].astype(np.float64), taus_s
        self.first = np.searchsorted(self.unit, np.arange(units + 1))
        self._begin = float(self.at_s.min(initial=0.0)) if len(self.at_s) == 0 else float(self.at_s.min())
        last = float(self.at_s.max()) if len(self.at_s) else 0.0
        self._span = last - self._begin + 2 * _AHEAD_S
        self._key = self.unit * self._span + (self.at_s - self._begin)
        self._level = np.zeros((len(taus_s), len(self.at_s)))  # just after each mark
        units_, times = self.unit.tolist(), self.at_s.tolist()
        for j, tau in enumerate(taus_s):
            total, of, then = 0.0, -1, 0.0
            for i, (code, at) in enumerate(zip(units_, times, strict=True)):
                total = 1.0 + (total * math.exp(-(at - then) / tau) if code == of else 0.0)
                self._level[j, i] = total
                of, then = code, at

    def past(self, unit: Ints, at_s: Floats) -> Ints:
        """Index just past the unit's last mark up to a moment (included), per row."""
        key = unit * self._span + np.clip(np.asarray(at_s) - self._begin, -1.0, self._span - _AHEAD_S)
        return np.maximum(np.searchsorted(self._key, key, side="right"), self.first[unit])

    def count(self, unit: Ints, at_s: Floats, within_s: float = np.inf) -> Ints:
        """Marks of the unit in the span (at − within, at]."""
        since = self.first[unit] if math.isinf(within_s) else self.past(unit, np.asarray(at_s) - within_s)
        return self.past(unit, at_s) - since

    def level(self, unit: Ints, at_s: Floats) -> Floats:
        """Sum of exp(−age ÷ τ) over the unit's marks so far, shape (rows, taus)."""
        out = np.zeros((len(unit), len(self.taus_s)))
        if not len(self.at_s):
            return out
        past = self.past(unit, at_s)
        rows = np.flatnonzero(past > self.first[unit])
        last = past[rows] - 1
        age = np.maximum(np.asarray(at_s)[rows] - self.at_s[last], 0.0)
        for j, tau in enumerate(self.taus_s):
            out[rows, j] = self._level[j, last] * np.exp(-age / tau)
        return out

    def spent(self, unit: Ints, begin_s: Floats, end_s: Floats) -> Floats:
        """Integral of the density exp(−age ÷ τ) ÷ τ of all marks over spans, shape (rows, taus)."""
        grown = (self.past(unit, end_s) - self.past(unit, begin_s))[:, None]
        return grown - self.level(unit, end_s) + self.level(unit, begin_s)

"""Calibration on released outcomes: conformal correction of curves, isotonic maps of probabilities, and their tables.

Here belong corrections learnt from outcomes that are known, and how well they hold; not the forecasts themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.curves import LEVELS, MEDIAN, level_of, read_levels, rising

Floats = NDArray[np.float64]
MIN_ROWS = 50  # fewer outcomes correct nothing
_LEAST_S = 0.5  # of an outcome less the tick
PRIOR_OUTCOMES = 50  # independent outcomes that the uncorrected curves are worth, where blocks are given


def effective_count(blocks: NDArray[Any]) -> float:
    """Independent outcomes that rows are worth when those of one block all go the same way (Kish)."""
    counts = np.unique(blocks, return_counts=True)[1].astype(np.float64)
    return float(counts.sum() ** 2 / (counts**2).sum())


@dataclass(frozen=True, slots=True)
class Conformal:
    """Correction of curves so that each level holds as often as it says, on outcomes released so far.

    First the level is exchanged for the one that held at its rate, then what is left is added. The median stays.

    Attributes:
        levels: Raw level read for each nominal one, shape (len(LEVELS),).
        offsets: Added in ln(seconds), shape (len(LEVELS),).
        rows: Outcomes it was learnt from.
    """

    levels: Floats
    offsets: Floats
    rows: int

    @classmethod
    def identity(cls) -> Conformal:
        return cls(LEVELS.copy(), np.zeros(len(LEVELS)), 0)

    @classmethod
    def fit(
        cls, curves: Floats, actual_log: Floats, blocks: NDArray[Any] | None = None, *, tick_s: float = 0.0
    ) -> Conformal:  # fmt: skip
        """Learn from curves and outcomes.

        Args:
            curves: ln(seconds), shape (n, len(LEVELS)).
            actual_log: ln(seconds), shape (n,).
            blocks: Rows of the same block are not independent, shape (n,); the correction is shrunk to what so few
                outcomes can tell. None: all are independent, the correction is whole.
            tick_s: Up to this far from an outcome is as good as on it, s. Where many outcomes are alike, an interval
                holds all that lie on its ends: with a tick they count as inside when the levels are learnt; without,
                half of them do.
        """
        if len(actual_log) < MIN_ROWS:
            return cls.identity()
        actual_s = np.exp(actual_log)
        at_least = np.quantile(level_of(curves, np.log(actual_s + tick_s)), LEVELS)
        at_most = np.quantile(level_of(curves, np.log(np.maximum(actual_s - tick_s, _LEAST_S))), LEVELS)
        levels = np.where(np.arange(len(LEVELS)) < MEDIAN, at_least, at_most)
        levels[MEDIAN] = LEVELS[MEDIAN]
        levels = np.maximum.accumulate(levels[: MEDIAN + 1]).clip(max=0.5).tolist() + (
            np.maximum.accumulate(levels[MEDIAN + 1 :]).clip(min=0.5).tolist()
        )
        levels = np.asarray(levels)
        gaps = actual_log[:, None] - read_levels(curves, levels)
        offsets = np.array([np.quantile(gaps[:, k], level) for k, level in enumerate(LEVELS)])
        offsets[MEDIAN] = 0.0
        # Outcomes that repeat make the gap a lump at zero; only the tails need what the levels cannot give.
        offsets[:MEDIAN] = np.minimum(offsets[:MEDIAN], 0.0)
        offsets[MEDIAN + 1 :] = np.maximum(offsets[MEDIAN + 1 :], 0.0)
        if blocks is not None:
            count = effective_count(blocks)
            share = count / (count + PRIOR_OUTCOMES)
            levels, offsets = LEVELS + share * (levels - LEVELS), share * offsets
        return cls(levels, offsets, len(actual_log))

    def apply(self, curves: Floats) -> Floats:
        """Corrected curves; they never fall along a row."""
        moved = read_levels(curves, self.levels) + self.offsets
        low = np.minimum.accumulate(moved[:, MEDIAN::-1], axis=1)[:, ::-1]
        return np.concatenate([low, rising(moved[:, MEDIAN:])[:, 1:]], axis=1)

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        return {f"{prefix}levels": self.levels, f"{prefix}offsets": self.offsets, f"{prefix}rows": np.array(self.rows)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Conformal:
        return cls(arrays[f"{prefix}levels"], arrays[f"{prefix}offsets"], int(arrays[f"{prefix}rows"]))


@dataclass(frozen=True, slots=True)
class Isotonic:
    """A rising map from raw to calibrated probability.

    Attributes:
        raw: Rising raw values, shape (k,).
        calibrated: Probability at each, shape (k,).
    """

    raw: Floats
    calibrated: Floats

    @classmethod
    def identity(cls) -> Isotonic:
        return cls(np.array([0.0, 1.0]), np.array([0.0, 1.0]))

    @classmethod
    def fit(cls, raw: Floats, happened: NDArray[Any]) -> Isotonic:
        """Least squares among rising maps; its steps are kept off 0 and 1 by two imagined outcomes of the base rate."""
        from sklearn.isotonic import isotonic_regression

        if len(raw) < MIN_ROWS:
            return cls.identity()
        values, number = np.unique(raw, return_inverse=True)
        counts = np.bincount(number).astype(np.float64)
        hits = np.bincount(number, weights=np.asarray(happened, dtype=np.float64))
        level = isotonic_regression(hits / counts, sample_weight=counts)
        first = np.flatnonzero(np.diff(level, prepend=-1.0) > 1e-9)  # of each step
        rows, step_hits = np.add.reduceat(counts, first), np.add.reduceat(hits, first)
        at = np.add.reduceat(values * counts, first) / rows
        share = (step_hits + 2 * hits.sum() / len(raw)) / (rows + 2)
        return cls(at, np.maximum.accumulate(share))

    def apply(self, raw: Floats) -> Floats:
        return np.interp(raw, self.raw, self.calibrated)

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        return {f"{prefix}raw": self.raw, f"{prefix}calibrated": self.calibrated}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Isotonic:
        return cls(arrays[f"{prefix}raw"], arrays[f"{prefix}calibrated"])


def reliability(probability: Floats, happened: NDArray[Any], bins: int = 10) -> list[dict[str, float]]:
    """Calibration table: per tenth of probability the mean forecast, the observed rate and the rows."""
    happened = np.asarray(happened, dtype=np.float64)
    number = np.minimum((probability * bins).astype(np.int64), bins - 1)
    return [
        {
            "forecast": round(float(probability[number == k].mean()), 4),
            "observed": round(float(happened[number == k].mean()), 4),
            "count": int((number == k).sum()),
        }
        for k in range(bins)
        if (number == k).any()
    ]


def level_table(quantiles_s: Floats, actual_s: Floats, levels: tuple[float, ...]) -> list[dict[str, float]]:
    """Calibration table of quantiles: how often the outcome was at or below each."""
    return [
        {
            "forecast": level,
            "observed": round(float((actual_s <= quantiles_s[:, k] + 0.5).mean()), 4),
            "count": len(actual_s),
        }
        for k, level in enumerate(levels)
    ]

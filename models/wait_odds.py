"""Odds of a start by certain times: from boosted trees, and read off wait curves.

A forest tells the shape of a wait well and its odds of soon less so; boosted trees over classes of waits tell those
better. What they say is laid on the forest's outcomes by weighing them anew, so that curve, odds and likeliest point
are of one distribution. Here belong these classes, the odds of curves, and what jobs that still wait tell; not the
outcomes (`models/wait_leaves.py`), and not the choice between the two (`models/wait.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.boosting import booster_of, grow
from models.curves import LEVELS, read_levels

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

EDGES_S = (1, 60, 120, 180, 240, 300, 420, 600, 1_200, 3_600, 14_400, 43_200)  # upper ends of classes but the last
EDGES = np.log(np.array(EDGES_S, dtype=np.float64))
MAX_ROWS = 30_000
HALF_LIFE_DAYS = 60.0
_ROUNDS = 60
_PARAMETERS = {"objective": "multiclass", "learning_rate": 0.08, "feature_fraction": 0.3, "min_data_in_leaf": 30}
NEAR = 1e-5  # ln(seconds) are kept in single precision


@dataclass(frozen=True, slots=True)
class StartOdds:
    """Boosted odds of the classes of waits between `EDGES_S`.

    Attributes:
        text: The trees as LightGBM writes them; empty where all waits were of one class.
        classes: Classes that the trees know, rising.
    """

    text: str
    classes: tuple[int, ...]

    def check(self) -> None:
        """Parse the trees, so that text of another release is found when it is read and not at the first forecast.

        Raises:
            lightgbm.basic.LightGBMError: LightGBM cannot read it.
        """
        if self.text:
            booster_of(self.text)

    @classmethod
    def fit(cls, X: Matrix, waits: Floats, ages_days: Floats, *, seed: int) -> StartOdds:
        """Learn from outcomes.

        Args:
            X: Features, shape (n, f); the newest `MAX_ROWS` rows by age are learnt from.
            waits: ln(seconds), shape (n,).
            ages_days: Age of each outcome; it counts half after `HALF_LIFE_DAYS`.
            seed: Seed of every random choice.

        One thread grows them: trees are many and small, so that threads would wait for each other most of the time.
        """
        newest = np.sort(np.argsort(ages_days, kind="stable")[:MAX_ROWS])
        classes, labels = np.unique(class_of(waits[newest]), return_inverse=True)
        if len(classes) == 1:
            return cls("", (int(classes[0]),))
        booster = grow(
            X[newest], labels, _PARAMETERS | {"num_class": len(classes)}, rounds=_ROUNDS, seed=seed, threads=1,
            weights=0.5 ** (ages_days[newest] / HALF_LIFE_DAYS),
        )  # fmt: skip
        return cls(booster.model_to_string(), tuple(classes.tolist()))

    def shares(self, X: Matrix) -> Floats:
        """Probability of each class, shape (n, len(EDGES_S) + 1)."""
        shares = np.zeros((len(X), len(EDGES_S) + 1))
        if len(X):
            shares[:, list(self.classes)] = booster_of(self.text).predict(X, num_threads=1) if self.text else 1.0
        return shares


def class_of(waits: NDArray[np.floating]) -> NDArray[np.int64]:
    """Class of each wait in ln(seconds): 0 up to the first of `EDGES_S`, and so on."""
    return np.searchsorted(EDGES + NEAR, waits)


def odds_upto(curves: Floats, ends: Floats) -> Floats:
    """P(wait ≤ end) of each curve, shape (n, len(ends)): the highest level at or below it.

    On a flat stretch all of it is counted, as waits are recorded in whole seconds or minutes. Beyond the outermost
    levels half of what is left is.

    Args:
        curves: ln(seconds), shape (n, len(LEVELS)), not falling along a row.
        ends: ln(seconds), rising.
    """
    odds = np.empty((len(curves), len(ends)))
    rows = np.arange(len(curves))
    for k, end in enumerate(ends.tolist()):
        upto = (curves <= end + NEAR).sum(axis=1)
        left, right = np.maximum(upto - 1, 0), np.minimum(upto, len(LEVELS) - 1)
        width = curves[rows, right] - curves[rows, left]
        share = np.where(width > 0, (end - curves[rows, left]) / np.where(width > 0, width, 1.0), 0.0)
        between = LEVELS[left] + share.clip(0.0, 1.0) * (LEVELS[right] - LEVELS[left])
        outside = np.where(upto == 0, LEVELS[0] / 2, (1 + LEVELS[-1]) / 2)
        odds[:, k] = np.where((upto == 0) | (upto == len(LEVELS)), outside, between)
    return odds


def with_waiting(
    levels: Floats, waited: Floats, curves: Floats, elapsed: Floats, generator: np.random.Generator
) -> Floats:
    """What jobs that still wait may come to wait, ln(seconds), shape (m,): calibration must not leave them out.

    The jobs that wait at the moment of a fit are the long ones. Each is given the level of one of those that started
    and lay above its own: censored observations are handed on to the right, as by the product-limit estimate, though
    each by itself and only to what was observed.

    Args:
        levels: Level of its curve at which each job that started did, shape (n,).
        waited: Level of its curve that each waiting job has come to, shape (m,).
        curves: ln(seconds) of the waiting jobs, shape (m, len(LEVELS)).
        elapsed: ln(seconds) that they have waited, shape (m,).
        generator: Of the draws.
    """
    ordered = np.sort(levels)
    out = np.empty(len(waited))
    for row in np.argsort(waited, kind="stable"):  # the draws do not depend on the order of rows
        first = int(np.searchsorted(ordered, waited[row], side="right"))
        level = ordered[generator.integers(first, len(ordered))] if first < len(ordered) else (1 + waited[row]) / 2
        out[row] = max(read_levels(curves[row : row + 1], [level])[0, 0], elapsed[row])
    return out

"""How the components of a runtime's distribution are weighed: two forests, like jobs, and jobs of the same key.

Here belong the weights per row and their choice on released jobs; not the forests (`models/forest.py`), and not the
forecaster that uses them (`models/runtime.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.jobs import FEATURES, KERNEL_LEVELS
from models.curves import CENTRE_GAINS, Pooled, cap, pool_points

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

TRUST = 2.0  # a value of a weight that did worse by one standard error weighs e^−TRUST as much as the best
_CHOICES = {
    "ratio": (0.0, 0.25, 0.5, 0.75, 1.0), "repeat": (0.0, 0.15, 0.25), "kernel": (0.0, 0.15, 0.3, 0.5),
    "siblings": (0.0, 0.1, 0.2, 0.35),
}  # fmt: skip
MODE_RATIO = 0.5  # the mode needs the density, which both forests together give best
_KERNEL = [FEATURES.index(f"kernel_q{round(100 * level):02d}") for level in KERNEL_LEVELS]
_DISTANCE = FEATURES.index("kernel_distance")
_SIBLINGS = [FEATURES.index(f"started_key_{name}") for name in ("q25", "q50", "q75")]
_LAST1, _LAST2 = FEATURES.index("key_last1"), FEATURES.index("key_last2")
_NEAR, _FAR = 3.0, 5.0  # distance of the most alike job up to which, and from which on, the kernel counts fully, not


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of the components.

    Attributes:
        ratio: Share of the forest relative to the limit, of the two forests.
        kernel: Share of the user's like jobs, where the most alike is near.
        repeat: Share of the newest two jobs of the same key, where there are any.
        siblings: Share of the started jobs of the same key, those still running counted as censored (Kaplan–Meier).
    """

    ratio: float = 0.5
    kernel: float = 0.3
    repeat: float = 0.15
    siblings: float = 0.0


def past_samples(X: Matrix) -> list[Matrix]:
    """Samples of ln(runtime) from the past: of like jobs (n, 10), the newest two of the key (n, 2), siblings (n, 3)."""
    last1, mean = X[:, _LAST1].astype(np.float64), X[:, _LAST2].astype(np.float64)
    before = np.log(np.maximum(2 * np.exp(mean) - np.exp(last1), 1.0))
    return [X[:, _KERNEL], np.stack([last1, before], axis=1).astype(np.float32), X[:, _SIBLINGS]]


def weights(X: Matrix, mix: Mix, samples: list[NDArray[Any]]) -> list[Floats]:
    """Weight of each component per row: run forest, ratio forest, like jobs, newest of the key, siblings."""
    nearness = np.clip((_FAR - X[:, _DISTANCE].astype(np.float64)) / (_FAR - _NEAR), 0.0, 1.0)
    kernel = mix.kernel * np.nan_to_num(nearness, nan=0.0)
    repeat = np.where(np.isnan(X[:, _LAST1]), 0.0, mix.repeat)
    siblings = np.where(np.isnan(X[:, _SIBLINGS[0]]), 0.0, mix.siblings)
    ratio = 0.0 if np.isnan(samples[1]).all() else 1.0 if np.isnan(samples[0]).all() else mix.ratio
    forests = (1 - kernel) * (1 - repeat)
    parts = [(1 - ratio) * forests, ratio * forests, kernel * (1 - repeat), repeat]
    return [*(part * (1 - siblings) for part in parts), siblings]


def pooled(
    samples: list[NDArray[Any]], X: Matrix, mix: Mix, limit_s: Floats, gains: Sequence[float] = CENTRE_GAINS
) -> Pooled:
    """The mixture, ln(seconds), capped at the limit; without `gains` no centres are looked for."""
    top = np.where(np.isnan(limit_s), np.inf, np.log(np.maximum(limit_s, 1.0)))
    both = replace(mix, ratio=MODE_RATIO)
    made = pool_points(samples, weights(X, mix, samples), top, weights(X, both, samples), gains)
    return Pooled(cap(made.curves, limit_s), np.clip(made.modes, 0.0, top), np.maximum(made.centres, 0.0))


def choose_mix(
    samples: list[NDArray[Any]], X: Matrix, y: Floats, limit_s: Floats, blocks: NDArray[Any]
) -> tuple[Mix, dict[str, float]]:
    """Weights with a low MALE on held-out jobs, one after another from the defaults.

    Each becomes the mean of the values tried, those that did worse by more standard errors (over blocks) weighing less:
    where few blocks tell the values apart, no value is taken for the best.

    Args:
        samples: Samples of each component, as `weights` orders them.
        X: Features, shape (n, f).
        y: ln(runtime), shape (n,).
        limit_s: Limits, NaN: none, shape (n,).
        blocks: Rows of the same block are not independent, shape (n,).

    Returns:
        The mix, and the losses of the default and of the chosen one.
    """
    medians = _Medians(samples, X, y, limit_s)
    _, codes = np.unique(blocks, return_inverse=True)
    chosen = Mix()
    default = float(medians.losses(chosen).mean())
    for name, values in _CHOICES.items():
        if name == "ratio" and np.isnan(samples[1]).all():
            continue
        tried = np.stack([medians.losses(replace(chosen, **{name: value})) for value in values])
        gaps = tried - tried[np.argmin(tried.mean(axis=1))]
        errors = np.array([np.sqrt((np.bincount(codes, weights=gap) ** 2).sum()) for gap in gaps])
        worse = np.divide(gaps.sum(axis=1), errors, out=np.zeros(len(values)), where=errors > 0)
        trust = np.exp(-TRUST * worse)
        chosen = replace(chosen, **{name: float(np.dot(trust, values) / trust.sum())})
    return chosen, {"default": default, "chosen": float(medians.losses(chosen).mean())}


class _Medians:
    """Medians of mixtures of the same samples: sorted once, weighed many times."""

    def __init__(self, samples: list[NDArray[Any]], X: Matrix, y: Floats, limit_s: Floats) -> None:
        self._samples, self._X, self._y = samples, X, y
        self._top = np.where(np.isnan(limit_s), np.inf, np.log(np.maximum(limit_s, 1.0)))
        values = np.concatenate(samples, axis=1)
        self._order = np.argsort(values, axis=1)
        self._values = np.take_along_axis(values, self._order, axis=1)
        self._component = np.repeat(np.arange(len(samples)), [part.shape[1] for part in samples])[self._order]
        self._component[np.isnan(self._values)] = len(samples)  # an empty slot weighs nothing
        self._counts = [np.maximum((~np.isnan(part)).sum(axis=1), 1) for part in samples]

    def losses(self, mix: Mix) -> Floats:
        shares = [w / n for w, n in zip(weights(self._X, mix, self._samples), self._counts, strict=True)]
        table = np.stack([*shares, np.zeros(len(self._y))], axis=1)
        mass: Floats = np.cumsum(np.take_along_axis(table, self._component, axis=1), axis=1)
        at = np.argmax(mass >= 0.5 * mass[:, -1:] - 1e-12, axis=1)
        median = np.clip(self._values[np.arange(len(at)), at], 0.0, self._top)
        return np.abs(median - self._y)

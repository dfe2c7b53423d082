"""What makes the median of a runtime forecast: what is usual on the cluster, and how each group of facts moves it.

Everything is additive in ln(seconds), exactly: `usual + parts = median`. A forest's share follows the paths of its
trees, each split's move of the mean rank being that of the split feature's group; the mixture's other components pull
by their weight; what is left is named as what it is: that the median of a mixture is not the mean of its components'
medians (`middle`), and the correction learnt from ended jobs. Here belongs that arithmetic; not the words
(`models/contribution_words.py`) and not the forecaster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.job_recency import row_quantile
from features.jobs import FEATURES
from models.forest import Forest
from models.recency import BASELINES, MIDDLE, MIDDLE_OF, KeyedRecency, middle_pair
from models.runtime_choice import nearest_repeat

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

GROUPS = (
    "request", "same", "user", "alike", "siblings", "array", "kind", "account", "others", "chain", "calendar", "middle",
    "correction",
)  # fmt: skip
_BY_PREFIX = {
    "asked": "request", "key": "same", "family": "same", "spec": "same", "user": "user", "kernel": "alike",
    "started": "siblings", "shape": "others", "queue": "others", "all": "others", "chain": "chain",
    "account": "account", "own": "account", "kind": "kind", "array": "array",
}  # fmt: skip
_BY_NAME = {"asked_hour": "calendar", "asked_weekday": "calendar", "chain_last_ran": "user"}
_AT = {name: k for k, name in enumerate(GROUPS)}
_DEFAULT_LOG = float(np.log(3600.0))  # as recency has it where nothing is known
_ALL_MEDIAN, _LIMIT = FEATURES.index("all_median"), FEATURES.index("asked_limit")


def group_of(feature: str) -> str:
    """Group, of `GROUPS`, that a feature of `FEATURES` belongs to; shares of bad ends belong to the chain."""
    if feature.endswith("_bad"):
        return "chain"
    return _BY_NAME.get(feature) or _BY_PREFIX[feature.split("_", 1)[0]]


FEATURE_GROUP: NDArray[np.int64] = np.array([_AT[group_of(name)] for name in FEATURES])


@dataclass(frozen=True, slots=True)
class Contributions:
    """What makes the medians of n jobs; all ln(seconds), so that e to a part is a factor.

    Attributes:
        usual_log: Where each row starts: the median of all jobs trained on, shape (n,).
        parts: What each of `GROUPS` adds, shape (n, len(GROUPS)).
    """

    usual_log: Floats
    parts: Floats

    @property
    def median_log(self) -> Floats:
        """The median, shape (n,)."""
        return self.usual_log + self.parts.sum(axis=1)

    def where(self, is_mine: NDArray[np.bool_], other: Contributions) -> Contributions:
        """These rows where true, else those of another."""
        return Contributions(
            np.where(is_mine, self.usual_log, other.usual_log), np.where(is_mine[:, None], self.parts, other.parts)
        )

    def ending_at(self, median_log: Floats) -> Contributions:
        """These, with what a limit (or the least runtime of a second) still cuts off laid to the request."""
        parts = self.parts.copy()
        parts[:, _AT["request"]] += median_log - self.median_log
        return replace(self, parts=parts)


@dataclass(frozen=True, slots=True)
class ForestParts:
    """What is typical by a forest: `base`, the median of its targets, and what each group adds, (n, len(GROUPS))."""

    base: float
    parts: Floats

    def with_limit(self, limit_log: Floats, usual_limit_log: float) -> ForestParts:
        """Of a forest of ln(runtime ÷ limit): of the runtime, the limit's part being the request's."""
        parts = self.parts.copy()
        parts[:, _AT["request"]] += np.nan_to_num(limit_log - usual_limit_log, nan=0.0)
        return ForestParts(self.base + usual_limit_log, parts)


@dataclass(frozen=True, slots=True)
class Steps:
    """The way of the medians to what is forecast, ln(seconds), each of shape (n,).

    Attributes:
        pooled: Of the mixture.
        corrected: After the correction learnt from ended jobs.
        snapped: After the move onto a repeated runtime.
        is_keyed: Keyed recency speaks instead.
        curves: What is forecast, shape (n, levels).
        modes: Points that most weight of the mixture lies near.
    """

    pooled: Floats
    corrected: Floats
    snapped: Floats
    is_keyed: NDArray[np.bool_]
    curves: Floats
    modes: Floats


def explain_forest(forest: Forest | None, X: Matrix) -> tuple[Matrix | None, ForestParts]:
    """Samples of a forest, None where there is none, and how what is typical comes about."""
    if forest is None:
        return None, ForestParts(0.0, np.zeros((len(X), len(GROUPS))))
    samples, base, parts = forest.explained(X, FEATURE_GROUP, len(GROUPS))
    return samples, ForestParts(base, parts)


def of_mixture(
    samples: Sequence[NDArray[Any]], weights: Sequence[Floats], forests: tuple[ForestParts, ForestParts], steps: Steps,
    X: Matrix, limit_s: Floats, usual_log: Floats,
) -> Contributions:  # fmt: skip
    """What makes the median of a mixture, up to its last step before the cap of the curves.

    Args:
        samples: Of each component, as `mixture.weights` orders them, ln(seconds).
        weights: Of each component, each of shape (n,).
        forests: Of the forest of runtimes and of that relative to the limit.
        steps: The way of the medians.
        X: Features.
        limit_s: Limits, NaN: none.
        usual_log: Where to start; NaN: at the median of everyone's newest jobs.
    """
    usual_log = _known(usual_log, X)
    typical, parts = [], np.zeros((len(X), len(GROUPS)))
    shares = np.stack(weights, axis=1)
    shares = shares / shares.sum(axis=1, keepdims=True)
    for component, made in enumerate(forests):
        own = made.parts.copy()
        own[:, _AT["request" if component else "middle"]] += made.base - usual_log
        typical.append(usual_log + own.sum(axis=1))
        parts += shares[:, [component]] * own
    for component, group in ((2, "alike"), (3, "same"), (4, "siblings")):
        middle = row_quantile(samples[component].astype(np.float64), 0.5)
        typical.append(np.where(np.isnan(middle), usual_log, middle))
        parts[:, _AT[group]] += shares[:, component] * (typical[-1] - usual_log)
    top = np.where(np.isnan(limit_s), np.inf, np.log(np.maximum(limit_s, 1.0)))
    each = np.stack(typical, axis=1)
    capped = (shares * np.minimum(each, top[:, None])).sum(axis=1)
    parts[:, _AT["request"]] += capped - (shares * each).sum(axis=1)
    parts[:, _AT["middle"]] += steps.pooled - capped
    parts[:, _AT["correction"]] += steps.corrected - steps.pooled
    feature, _ = nearest_repeat(steps.corrected, X)
    parts[np.arange(len(X)), FEATURE_GROUP[feature]] += steps.snapped - steps.corrected
    return Contributions(usual_log, parts)


def of_recency(recency: KeyedRecency, X: Matrix, usual_log: Floats | None = None) -> Contributions:
    """What makes the median of keyed recency: the runtimes it repeats, and the limit.

    Args:
        recency: The baseline.
        X: Features.
        usual_log: Where to start, shape (n,); NaN or None: at the median of everyone's newest jobs.
    """
    start = _known(np.full(len(X), np.nan) if usual_log is None else usual_log, X)
    if recency.name != MIDDLE:
        return Contributions(start, _parts_of_baseline(recency.name, X, start))
    every, rows = np.stack([_parts_of_baseline(name, X, start) for name in MIDDLE_OF]), np.arange(len(X))
    return Contributions(start, np.mean([every[place, rows] for place in middle_pair(X)], axis=0))


def _parts_of_baseline(name: str, X: Matrix, start: Floats) -> Floats:
    value, group = np.full(len(X), np.nan), np.full(len(X), _AT["middle"])
    for column_name in BASELINES[name]:
        column = X[:, FEATURES.index(column_name)].astype(np.float64)
        is_first = np.isnan(value) & ~np.isnan(column)
        value = np.where(is_first, column, value)
        group = np.where(is_first, _AT[group_of(column_name)], group)
    value = np.nan_to_num(value, nan=_DEFAULT_LOG)
    parts = np.zeros((len(X), len(GROUPS)))
    parts[np.arange(len(X)), group] = value - start
    parts[:, _AT["request"]] += np.maximum(np.fmin(value, X[:, _LIMIT].astype(np.float64)), 0.0) - value
    return parts


def _known(usual_log: Floats, X: Matrix) -> Floats:
    found = np.where(np.isnan(usual_log), X[:, _ALL_MEDIAN].astype(np.float64), usual_log)
    return np.nan_to_num(found, nan=_DEFAULT_LOG)

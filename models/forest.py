"""An extra-trees forest whose leaves keep samples of their training targets: a whole distribution per row.

Fitting uses scikit-learn; what is kept and asked afterwards are plain arrays, so that a forecast needs NumPy alone and
a file holds no code. Here belongs the forest; not what its samples mean or how they are calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

LEAF_SAMPLES = 2
_MISSING = np.float32(-9.0)  # below every logarithm of seconds or counts
_PAIRS = 400_000  # (row, tree) pairs walked at a time


@dataclass(frozen=True, slots=True)
class ForestSize:
    """How large a forest grows.

    Attributes:
        trees: Number of trees.
        min_leaf: Fewest training rows of a leaf.
        feature_share: Share of the features tried at each split.
        rows_per_tree: Training rows drawn for a tree when there are more (with replacement); all when fewer.
    """

    trees: int = 100
    min_leaf: int = 5
    feature_share: float = 0.2
    rows_per_tree: int = 50_000


@dataclass(frozen=True, slots=True)
class Forest:
    """A fitted forest. Nodes of a tree lie in preorder: the left child of node i is i + 1.

    Attributes:
        feature: Feature a node splits on, −1 in a leaf; int16, shape (nodes,).
        threshold: Rows with a value ≤ it go left; float32, shape (nodes,).
        right: Right child, or in a leaf its row in `samples`; int32, shape (nodes,).
        roots: First node of each tree, int64, shape (trees,).
        samples: Training targets kept per leaf, float32, shape (leaves, LEAF_SAMPLES).
    """

    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    right: NDArray[np.int32]
    roots: NDArray[np.int64]
    samples: NDArray[np.float32]

    @classmethod
    def fit(cls, X: Matrix, y: NDArray[Any], size: ForestSize, *, seed: int, threads: int) -> Forest:
        """Grow a forest. The same input and seed give the same forest, whatever the threads.

        Args:
            X: Features, shape (n, f); NaN is missing.
            y: Targets, shape (n,).
            size: How large it grows.
            seed: Seed of every random choice.
            threads: Threads of the fit.

        Raises:
            ValueError: No rows, or shapes do not match.
        """
        from sklearn.ensemble import ExtraTreesRegressor

        if not len(y) or len(X) != len(y):
            raise ValueError(f"a forest of {len(X)} rows of features and {len(y)} targets")
        filled = _fill(X)
        draw = size.rows_per_tree if len(y) > size.rows_per_tree else None
        grown = ExtraTreesRegressor(
            size.trees, min_samples_leaf=min(size.min_leaf, max(1, len(y) // 4)), max_features=size.feature_share,
            bootstrap=draw is not None, max_samples=draw, random_state=seed, n_jobs=threads,
        ).fit(filled, y)  # fmt: skip
        generator = np.random.default_rng(seed)
        parts: list[tuple[Any, ...]] = []
        leaves = 0
        everyone = np.arange(len(y))
        drawn = grown.estimators_samples_ if draw is not None else [everyone] * size.trees
        for estimator, rows in zip(grown.estimators_, drawn, strict=True):
            part = _Tree.of(estimator.tree_, filled[rows], y[rows], generator, leaves)
            leaves += len(part[3])
            parts.append(part)
        feature, threshold, right, samples = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        roots = np.cumsum([0, *(len(part[0]) for part in parts[:-1])])
        return cls(feature, threshold, right, roots.astype(np.int64), samples)

    def draw(self, X: Matrix) -> Matrix:
        """Samples of the target's distribution for each row, shape (n, trees × LEAF_SAMPLES), unordered."""
        filled = _fill(X)
        out = np.empty((len(X), len(self.roots) * LEAF_SAMPLES), dtype=np.float32)
        step = max(1, _PAIRS // len(self.roots))
        for first in range(0, len(X), step):
            part = filled[first : first + step]
            leaves = self._walk(part)
            out[first : first + step] = self.samples[self.right[leaves]].reshape(len(part), -1)
        return out

    def _walk(self, X: Matrix) -> NDArray[np.int64]:
        """Leaf of each (row, tree), shape (n, trees)."""
        n, width = X.shape
        flat = X.ravel()
        nodes = np.tile(self.roots, n)
        base = np.repeat(np.arange(n, dtype=np.int64) * width, len(self.roots))
        tree_root = np.zeros_like(nodes) + nodes
        active = np.arange(len(nodes))
        while len(active):
            here = nodes[active]
            feature = self.feature[here]
            inner = feature >= 0
            if not inner.all():
                active, here, feature = active[inner], here[inner], feature[inner]
            goes_left = flat[base[active] + feature] <= self.threshold[here]
            nodes[active] = np.where(goes_left, here + 1, tree_root[active] + self.right[here])
        return nodes.reshape(n, -1)

    def to_arrays(self, prefix: str = "") -> dict[str, NDArray[Any]]:
        return {f"{prefix}{name}": getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Forest:
        return cls(*(arrays[f"{prefix}{name}"] for name in cls.__slots__))


class _Tree:
    """One scikit-learn tree as arrays."""

    @staticmethod
    def of(
        tree: Any, X: Matrix, y: NDArray[Any], generator: np.random.Generator, leaves_before: int
    ) -> tuple[Any, ...]:
        is_leaf = tree.children_left < 0
        inner = np.flatnonzero(~is_leaf)
        if not np.array_equal(tree.children_left[inner], inner + 1):
            raise RuntimeError("scikit-learn no longer grows trees in preorder: pin the version of requirements.lock")
        feature = np.where(is_leaf, -1, tree.feature).astype(np.int16)
        # The greatest float32 not above the threshold splits float32 values the same way.
        threshold = tree.threshold.astype(np.float32)
        too_high = threshold.astype(np.float64) > tree.threshold
        threshold[too_high] = np.nextafter(threshold[too_high], np.float32(-np.inf))
        number = np.cumsum(is_leaf) - 1
        right = np.where(is_leaf, number + leaves_before, tree.children_right).astype(np.int32)
        return feature, threshold, right, _leaf_samples(tree, number, int(is_leaf.sum()), X, y, generator)


def _leaf_samples(
    tree: Any, number: NDArray[Any], leaves: int, X: Matrix, y: NDArray[Any], generator: np.random.Generator
) -> NDArray[np.float32]:
    """Targets drawn without replacement from the training rows of each leaf, shape (leaves, LEAF_SAMPLES)."""
    leaf = number[tree.apply(X)]
    shuffled = generator.permutation(len(y))
    order = shuffled[np.argsort(leaf[shuffled], kind="stable")]
    first = np.searchsorted(leaf[order], np.arange(leaves))
    count = np.bincount(leaf, minlength=leaves)
    # No leaf is empty: X holds every row that the tree was grown on.
    slots = first[:, None] + np.arange(LEAF_SAMPLES) % np.maximum(count, 1)[:, None]
    return y[order[np.minimum(slots, len(y) - 1)]].astype(np.float32)


def _fill(X: Matrix) -> Matrix:
    return np.where(np.isnan(X), _MISSING, X).astype(np.float32)

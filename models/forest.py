"""An extra-trees forest whose leaves keep samples of their training targets: a whole distribution per row.

What is kept are plain arrays, so that a file holds no code. Here belongs the forest; not the loops that grow it
(`models/trees.py`), and not what its samples mean or how they are calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.compiled import in_threads

Matrix = NDArray[np.float32]

LEAF_SAMPLES = 4
BINS = 4_096  # of the targets' range, for ranks
STRETCH = 3.0
NO_COLUMNS = slice(0, 0)
NEAR = 0.01  # a rank this near to the middle moves by the slope at the middle
_MISSING = np.float32(-9.0)  # below every logarithm of seconds or counts
_ARRAYS = ("feature", "threshold", "right", "roots", "samples", "leaf_rows")


@dataclass(frozen=True, slots=True)
class ForestSize:
    """How large a forest grows.

    Attributes:
        trees: Number of trees.
        min_leaf: Fewest training rows of a leaf.
        feature_share: Share of the features tried at each split.
        rows_per_tree: Training rows drawn for a tree, without replacement; all when there are fewer.
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
        samples: Training targets kept per leaf, float32, shape (leaves, samples per leaf).
        leaf_rows: Training rows of each leaf, int32, shape (leaves,).
        ranks: What `explained` works out once of these: bounds of ranks, and mean rank of each node.
    """

    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    right: NDArray[np.int32]
    roots: NDArray[np.int64]
    samples: NDArray[np.float32]
    leaf_rows: NDArray[np.int32]
    ranks: list[tuple[float, float, NDArray[np.float64], NDArray[np.float32]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @classmethod
    def fit(
        cls, X: Matrix, y: NDArray[Any], size: ForestSize, *, seed: int, threads: int, optional: slice = NO_COLUMNS
    ) -> Forest:  # fmt: skip
        """Grow a forest. The same input and seed give the same forest, whatever the threads.

        Args:
            X: Features, shape (n, f); NaN is missing.
            y: Targets, shape (n,).
            size: How large it grows.
            seed: Seed of every random choice.
            threads: Threads of the fit.
            optional: Columns that are left out where they are the same in all rows: they would only take turns from
                the others, and the forest is then the one that it would be without them.

        Raises:
            ValueError: No rows, or shapes do not match.
        """
        from models.trees import grow

        if not len(y) or len(X) != len(y):
            raise ValueError(f"a forest of {len(X)} rows of features and {len(y)} targets")
        filled, target = _fill(X), np.ascontiguousarray(y, dtype=np.float64)
        told = _telling(filled, optional)
        filled = filled if len(told) == X.shape[1] else np.ascontiguousarray(filled[:, told])
        rows, tried = min(size.rows_per_tree, len(y)), max(1, int(size.feature_share * len(told)))
        min_leaf = min(size.min_leaf, max(1, len(y) // 4))
        seeds = np.random.default_rng(seed).integers(0, 2**62, size.trees).tolist()
        with ThreadPoolExecutor(threads) as pool:
            trees = list(pool.map(lambda own: grow(filled, target, own, rows, min_leaf, tried, LEAF_SAMPLES), seeds))
        leaves = 0
        for feature, _, right, samples, _ in trees:
            right[feature < 0] += leaves
            leaves += len(samples)
        feature, threshold, right, samples, leaf_rows = (np.concatenate(parts) for parts in zip(*trees, strict=True))
        feature = np.where(feature < 0, feature, told[feature]).astype(np.int16)
        roots = np.cumsum([0, *(len(tree[0]) for tree in trees[:-1])])
        return cls(feature, threshold, right, roots.astype(np.int64), samples, leaf_rows)

    def draw(self, X: Matrix) -> Matrix:
        """Samples of the target's distribution for each row, shape (n, trees × samples per leaf), unordered."""
        return self.samples[self.leaves(X)].reshape(len(X), len(self.roots) * self.samples.shape[1])

    def leaves(self, X: Matrix) -> NDArray[np.int32]:
        """Number of the leaf, a row of `samples`, that each row falls into in each tree; shape (n, trees)."""
        from models.trees import walk

        leaf = np.empty((len(X), len(self.roots)), dtype=np.int32)
        filled = _fill(X)
        in_threads(
            lambda rows: walk(filled[rows], self.feature, self.threshold, self.right, self.roots, leaf[rows]), len(X)
        )
        return leaf

    def explained(self, X: Matrix, group: NDArray[np.int64], groups: int) -> tuple[Matrix, float, NDArray[np.float64]]:
        """`draw`, and how the features' groups move each row from the median of all targets to what is typical of it.

        Along a row's path each split moves the mean rank of the training targets; the move is the split feature's.
        Moves of rank become moves of the target at one rate per row: that which leads to the median of its samples, so
        far as it is within a factor of `STRETCH` of the rate at which the target rises with its rank.

        Args:
            X: Features, shape (n, f).
            group: Group of each feature, shape (f,).
            groups: Number of groups.

        Returns:
            Samples as of `draw`; the median of all targets; parts, shape (n, groups), which add up to what is typical.
        """
        from models.trees import trace

        low, width, rank, mean = self._mean_ranks()
        leaf = np.empty((len(X), len(self.roots)), dtype=np.int32)
        parts, filled = np.zeros((len(X), groups)), _fill(X)
        drawn = np.empty((len(X), len(self.roots), self.samples.shape[1]), dtype=np.float32)
        middle = np.empty(len(X), dtype=np.float32)

        def work(rows: slice) -> None:
            nodes = (self.feature, self.threshold, self.right, self.roots, mean)
            trace(filled[rows], *nodes, group, leaf[rows], parts[rows])
            drawn[rows] = self.samples[leaf[rows]]
            ordered = np.sort(drawn[rows].reshape(len(leaf[rows]), -1), axis=1)  # ten times as fast as np.median
            count = ordered.shape[1]
            middle[rows] = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / np.float32(2)

        in_threads(work, len(X))
        parts /= len(self.roots)
        centres = low + width * (np.arange(BINS) + 0.5)
        moved = parts.sum(axis=1)
        near, base = np.where(np.abs(moved) < NEAR, NEAR, moved), float(np.interp(0.5, rank, centres))
        slope = np.maximum((np.interp(0.5 + near, rank, centres) - base) / near, width / NEAR)
        wanted = (middle - base) / np.where(moved == 0, NEAR, moved)
        return drawn.reshape(len(X), -1), base, parts * np.clip(wanted, slope / STRETCH, slope * STRETCH)[:, None]

    def _mean_ranks(self) -> tuple[float, float, NDArray[np.float64], NDArray[np.float32]]:
        """Least target, width of a bin, rank of each bin, mean rank of each node: they change with the forest alone."""
        from models.trees import average

        if not self.ranks:
            low, high = float(self.samples.min()), float(self.samples.max())
            width = max(high - low, 1e-6) / BINS
            rank, mean = np.zeros(BINS), np.empty(len(self.feature), dtype=np.float32)
            average(self.feature, self.right, self.roots, self.samples, self.leaf_rows, low, width, rank, mean)
            self.ranks.append((low, width, rank, mean))
        return self.ranks[0]

    def to_arrays(self, prefix: str = "") -> dict[str, NDArray[Any]]:
        return {f"{prefix}{name}": getattr(self, name) for name in _ARRAYS}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Forest:
        held = {name: arrays[f"{prefix}{name}"] for name in _ARRAYS if f"{prefix}{name}" in arrays}
        held.setdefault("leaf_rows", np.ones(len(held["samples"]), dtype=np.int32))  # of models kept before it was
        return cls(*(held[name] for name in _ARRAYS))


def _telling(X: Matrix, optional: slice) -> NDArray[np.int64]:
    """Columns that take part: all but the optional ones that are the same in all rows."""
    takes_part = np.ones(X.shape[1], dtype=bool)
    takes_part[optional] = X[:, optional].max(axis=0) > X[:, optional].min(axis=0)
    return np.flatnonzero(takes_part)


def _fill(X: Matrix) -> Matrix:
    return np.ascontiguousarray(np.where(np.isnan(X), _MISSING, X), dtype=np.float32)

"""Extra-trees, grown and walked by compiled loops: what `models/forest.py` is made of.

A node tries some features drawn at random, at one cut each, drawn evenly between the least and the greatest value, and
keeps the split that leaves the least squares. Large nodes judge by a sample of their rows. Here belong these loops; not
what a forest is for. Nodes lie in preorder: the left child of node i is i + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled

JUDGES = 1_000  # rows that a split is chosen by at most


@compiled
def _draw(state: Any, below: int) -> Any:
    """A whole number in [0, below): splitmix64, so that a seed means the same in every version of NumPy."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.int64((z >> np.uint64(1)) % np.uint64(below))


@compiled
def grow(
    X: NDArray[np.float32], y: NDArray[np.float64], seed: int, rows: int, min_leaf: int, tried: int, keep: int,
) -> tuple[
    NDArray[np.int16], NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]
]:  # fmt: skip
    """One tree.

    Args:
        X: Features without NaN, C order, shape (n, f).
        y: Targets, shape (n,).
        seed: Seed of every random choice.
        rows: Rows drawn without replacement, ≤ n.
        min_leaf: Fewest rows of a leaf.
        tried: Features tried at each split; more where none of them splits.
        keep: Targets kept per leaf.

    Returns:
        Feature of each node (−1: leaf); threshold; right child, or in a leaf its number; targets by leaf number;
        training rows by leaf number.
    """
    n, f = X.shape
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(seed)
    shuffled = np.arange(n).astype(np.int32)
    for i in range(rows):
        j = i + _draw(state, n - i)
        shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
    at = shuffled[:rows].copy()
    target = np.empty(rows, np.float64)
    for i in range(rows):
        target[i] = y[at[i]]
    most = 2 * (rows // min_leaf) + 3  # no leaf is smaller than `min_leaf`: the judges are of its rows
    feature = np.empty(most, np.int16)
    threshold = np.empty(most, np.float32)
    right = np.empty(most, np.int32)
    samples = np.empty((most // 2 + 2, keep), np.float32)
    sizes = np.empty(most // 2 + 2, np.int32)
    values = np.empty(rows, np.float32)
    spare_at, spare_target = np.empty(rows, np.int32), np.empty(rows, np.float64)
    columns = np.arange(f)
    stack = np.empty((rows + 2, 3), np.int64)  # first row, last row, node that this is the right child of
    stack[0, 0], stack[0, 1], stack[0, 2] = 0, rows, -1
    top, nodes, leaves = 1, 0, 0
    while top > 0:
        top -= 1
        first, last, parent = stack[top, 0], stack[top, 1], stack[top, 2]
        node = nodes
        nodes += 1
        if parent >= 0:
            right[parent] = node
        count = last - first
        best, best_gain, best_cut = -1, -1.0, np.float32(0)
        is_mixed = False
        for i in range(first + 1, last):
            if target[i] != target[first]:
                is_mixed = True
                break
        if is_mixed and count >= 2 * min_leaf:
            judges = min(count, JUDGES)
            total = 0.0
            for i in range(first, first + judges):
                total += target[i]
            for k in range(f):
                if k >= tried and best >= 0:
                    break
                j = k + _draw(state, f - k)
                columns[k], columns[j] = columns[j], columns[k]
                column = columns[k]
                low = X[at[first], column]
                high = low
                for i in range(judges):
                    value = X[at[first + i], column]
                    values[i] = value
                    low, high = min(low, value), max(high, value)
                if not high > low:
                    continue
                cut = np.float32(low + (high - low) * (_draw(state, 1 << 30) / np.float64(1 << 30)))
                if cut >= high:
                    cut = low
                left_total, left = 0.0, 0
                for i in range(judges):
                    if values[i] <= cut:
                        left_total += target[first + i]
                        left += 1
                if left < min_leaf or judges - left < min_leaf:
                    continue
                rest = total - left_total
                gain = left_total * left_total / left + rest * rest / (judges - left)
                if best < 0 or gain > best_gain:
                    best, best_gain, best_cut = column, gain, cut
        middle = first
        if best >= 0:
            over = 0
            for i in range(first, last):
                if X[at[i], best] <= best_cut:
                    at[middle], target[middle] = at[i], target[i]
                    middle += 1
                else:
                    spare_at[over], spare_target[over] = at[i], target[i]
                    over += 1
            for i in range(over):
                at[middle + i], target[middle + i] = spare_at[i], spare_target[i]
        if best < 0:
            feature[node], threshold[node], right[node] = -1, 0, leaves
            for k in range(keep):  # rows are in random order
                samples[leaves, k] = target[first + k % count]
            sizes[leaves] = count
            leaves += 1
        else:
            feature[node], threshold[node] = best, best_cut
            stack[top, 0], stack[top, 1], stack[top, 2] = middle, last, node
            stack[top + 1, 0], stack[top + 1, 1], stack[top + 1, 2] = first, middle, -1
            top += 2
    return (
        feature[:nodes].copy(), threshold[:nodes].copy(), right[:nodes].copy(), samples[:leaves].copy(),
        sizes[:leaves].copy(),
    )  # fmt: skip


@compiled
def walk(
    X: NDArray[np.float32], feature: NDArray[np.int16], threshold: NDArray[np.float32], right: NDArray[np.int32],
    roots: NDArray[np.int64], leaf: NDArray[np.int32],
) -> None:  # fmt: skip
    """Write the leaf's number of each row in each tree to `leaf`, shape (n, trees)."""
    for k in range(len(roots)):  # tree by tree: one at a time stays in the cache
        for i in range(len(X)):
            node = roots[k]
            while feature[node] >= 0:
                node = node + 1 if X[i, feature[node]] <= threshold[node] else roots[k] + right[node]
            leaf[i, k] = right[node]


@compiled
def average(
    feature: NDArray[np.int16], right: NDArray[np.int32], roots: NDArray[np.int64], samples: NDArray[np.float32],
    leaf_rows: NDArray[np.int32], low: float, width: float, rank: NDArray[np.float64], mean: NDArray[np.float32],
) -> None:  # fmt: skip
    """Give `rank` the rank of each bin among all targets, and `mean` each node's mean rank; rows weigh alike.

    Bins are `width` wide from the least target, `low`, on; `rank`, shape (bins,), starts at 0 and rises within (0, 1).
    """
    leaves, keep = samples.shape
    for leaf in range(leaves):
        for k in range(keep):
            rank[min(len(rank) - 1, int((samples[leaf, k] - low) / width))] += leaf_rows[leaf]
    total = rank.sum()
    below = 0.0
    for i in range(len(rank)):
        here = rank[i]
        rank[i] = (below + here / 2) / total
        below += here
    weight = np.empty(len(feature), np.float64)
    last = len(feature)
    for tree in range(len(roots) - 1, -1, -1):
        root = roots[tree]
        for node in range(last - 1, root - 1, -1):  # children come after their parents
            if feature[node] < 0:
                leaf = right[node]
                value = 0.0
                for k in range(keep):
                    value += rank[min(len(rank) - 1, int((samples[leaf, k] - low) / width))]
                weight[node], mean[node] = leaf_rows[leaf], value / keep
            else:
                left, other = node + 1, root + right[node]
                weight[node] = weight[left] + weight[other]
                mean[node] = (weight[left] * mean[left] + weight[other] * mean[other]) / weight[node]
        last = root


@compiled
def trace(
    X: NDArray[np.float32], feature: NDArray[np.int16], threshold: NDArray[np.float32], right: NDArray[np.int32],
    roots: NDArray[np.int64], mean: NDArray[np.float32], group: NDArray[np.int64], leaf: NDArray[np.int32],
    parts: NDArray[np.float64],
) -> None:  # fmt: skip
    """`walk` that also adds what each step of the path changes in the mean rank to the split feature's group.

    `mean` is of `average`, `group` of shape (f,); added to is `parts`, shape (n, groups), the sum over all trees.
    """
    for k in range(len(roots)):
        for i in range(len(X)):
            node = roots[k]
            while feature[node] >= 0:
                column = feature[node]
                child = node + 1 if X[i, column] <= threshold[node] else roots[k] + right[node]
                parts[i, group[column]] += np.float64(mean[child]) - np.float64(mean[node])
                node = child
            leaf[i, k] = right[node]

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
_AT_ONCE = 4  # features cut at once: their sums do not wait for each other


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
def _differs(X: NDArray[np.float32], at: NDArray[np.int32], column: int) -> bool:
    """Whether the rows differ in the feature."""
    value = X[at[0], column]
    i = 1
    while i < len(at) and X[at[i], column] == value:
        i += 1
    return i < len(at)


@compiled
def _cut(low: Any, high: Any, draw: int) -> Any:
    """The cut so far of the way from the least value to the greatest, below the greatest."""
    cut = np.float32(low + (high - low) * (draw / np.float64(1 << 30)))
    return low if cut >= high else cut


@compiled
def _cut_at_once(
    X: NDArray[np.float32], at: NDArray[np.int32], target: NDArray[np.float64], asked: NDArray[np.int64],
    draws: NDArray[np.int64], values: NDArray[np.float32], cuts: NDArray[np.float32], totals: NDArray[np.float64],
    lefts: NDArray[np.int64],
) -> None:  # fmt: skip
    """Of four features: where each is cut, the sum of the targets on its left, and how many those are."""
    a, b, c, d = asked[0], asked[1], asked[2], asked[3]
    low_a, low_b, low_c, low_d = X[at[0], a], X[at[0], b], X[at[0], c], X[at[0], d]
    high_a, high_b, high_c, high_d = low_a, low_b, low_c, low_d
    for i in range(len(at)):
        row = at[i]
        of_a, of_b, of_c, of_d = X[row, a], X[row, b], X[row, c], X[row, d]
        values[i, 0], values[i, 1], values[i, 2], values[i, 3] = of_a, of_b, of_c, of_d
        low_a = of_a if of_a < low_a else low_a
        low_b = of_b if of_b < low_b else low_b
        low_c = of_c if of_c < low_c else low_c
        low_d = of_d if of_d < low_d else low_d
        high_a = of_a if of_a > high_a else high_a
        high_b = of_b if of_b > high_b else high_b
        high_c = of_c if of_c > high_c else high_c
        high_d = of_d if of_d > high_d else high_d
    cuts[0], cuts[1] = _cut(low_a, high_a, draws[0]), _cut(low_b, high_b, draws[1])
    cuts[2], cuts[3] = _cut(low_c, high_c, draws[2]), _cut(low_d, high_d, draws[3])
    cut_a, cut_b, cut_c, cut_d = cuts[0], cuts[1], cuts[2], cuts[3]
    total_a = total_b = total_c = total_d = 0.0
    left_a = left_b = left_c = left_d = 0
    for i in range(len(at)):
        aim = target[i]
        is_a, is_b = values[i, 0] <= cut_a, values[i, 1] <= cut_b
        is_c, is_d = values[i, 2] <= cut_c, values[i, 3] <= cut_d
        total_a += aim if is_a else 0.0
        total_b += aim if is_b else 0.0
        total_c += aim if is_c else 0.0
        total_d += aim if is_d else 0.0
        left_a += is_a
        left_b += is_b
        left_c += is_c
        left_d += is_d
    totals[0], totals[1], totals[2], totals[3] = total_a, total_b, total_c, total_d
    lefts[0], lefts[1], lefts[2], lefts[3] = left_a, left_b, left_c, left_d


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
    values = np.empty((JUDGES, _AT_ONCE), np.float32)
    asked, draws = np.zeros(_AT_ONCE, np.int64), np.zeros(_AT_ONCE, np.int64)
    cuts, left_totals = np.empty(_AT_ONCE, np.float32), np.empty(_AT_ONCE, np.float64)
    lefts = np.empty(_AT_ONCE, np.int64)
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
            mine, aims = at[first : first + judges], target[first : first + judges]
            k = 0
            while k < f and not (k >= tried and best >= 0):
                held = 0
                upto = tried if k < tried else k + 1
                while k < upto and held < _AT_ONCE:
                    j = k + _draw(state, f - k)
                    columns[k], columns[j] = columns[j], columns[k]
                    if _differs(X, mine, columns[k]):
                        asked[held], draws[held] = columns[k], _draw(state, 1 << 30)
                        held += 1
                    k += 1
                if held == 0:
                    continue
                _cut_at_once(X, mine, aims, asked, draws, values, cuts, left_totals, lefts)
                for h in range(held):
                    if lefts[h] < min_leaf or judges - lefts[h] < min_leaf:
                        continue
                    rest = total - left_totals[h]
                    gain = left_totals[h] * left_totals[h] / lefts[h] + rest * rest / (judges - lefts[h])
                    if best < 0 or gain > best_gain:
                        best, best_gain, best_cut = asked[h], gain, cuts[h]
        middle = first
        if best >= 0:
            over = 0
            for i in range(first, last):
                row, aim = at[i], target[i]
                is_left = X[row, best] <= best_cut
                at[middle], target[middle] = row, aim  # without a branch, which would be guessed wrong half the time
                spare_at[over], spare_target[over] = row, aim
                middle += is_left
                over += not is_left
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

"""Trees grown by compiled loops, several features at a time, are those of a plain reading of the rule."""

import numpy as np
import pytest

from models import trees

_MASK = 2**64 - 1


class _Dice:
    """splitmix64."""

    def __init__(self, seed):
        self.state = seed

    def below(self, most):
        self.state = (self.state + 0x9E3779B97F4A7C15) & _MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) >> 1) % most


def _plain(X, y, seed, rows, min_leaf, tried):
    """Feature and threshold of each node, and the rows of each leaf in their order."""
    dice, features = _Dice(seed), X.shape[1]
    shuffled = list(range(len(y)))
    for i in range(rows):
        j = i + dice.below(len(y) - i)
        shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
    columns, nodes, leaves = list(range(features)), [], []

    def split(at):
        judges = at[: trees.JUDGES]
        best = None
        for k in range(features):
            if k >= tried and best:
                break
            j = k + dice.below(features - k)
            columns[k], columns[j] = columns[j], columns[k]
            values = X[judges, columns[k]]
            low, high = values.min(), values.max()
            if low == high:
                continue
            cut = np.float32(low + np.float64(high - low) * (dice.below(1 << 30) / (1 << 30)))
            cut = low if cut >= high else cut
            on_left = values <= cut
            left = int(on_left.sum())
            if min(left, len(judges) - left) < min_leaf:
                continue
            of_left, total = sum(y[judges][on_left].tolist()), sum(y[judges].tolist())
            gain = of_left * of_left / left + (total - of_left) * (total - of_left) / (len(judges) - left)
            if best is None or gain > best[0]:
                best = gain, columns[k], cut
        return best

    stack = [shuffled[:rows]]
    while stack:
        at = np.array(stack.pop())
        best = split(at) if len(at) >= 2 * min_leaf and len(set(y[at].tolist())) > 1 else None
        nodes.append((best[1], float(best[2])) if best else (-1, 0.0))
        if best is None:
            leaves.append(at.tolist())
            continue
        goes_left = X[at, best[1]] <= best[2]
        stack += [at[~goes_left].tolist(), at[goes_left].tolist()]
    return nodes, leaves


@pytest.mark.parametrize(("rows", "features", "tried"), [(1_700, 9, 6), (300, 3, 1), (40, 7, 7), (12, 1, 1)])
def test_trees_are_those_of_one_feature_at_a_time(rows, features, tried):
    for seed in range(3):
        pick = np.random.default_rng([rows, seed])
        X = np.round(pick.normal(0, 2, (rows, features)), seed % 2).astype(np.float32)
        X[:, 0] = X[:, 0] > 3  # hardly anyone, and in small nodes nobody
        y = np.round(X[:, -1] + pick.normal(0, 1, rows), 2)
        nodes, leaves = _plain(X, y, seed, rows - seed, 3, tried)
        feature, threshold, _, samples, sizes = trees.grow(X, y, seed, rows - seed, 3, tried, 4)
        assert list(zip(feature.tolist(), threshold.tolist(), strict=True)) == nodes
        assert sizes.tolist() == [len(leaf) for leaf in leaves]
        kept = [[y[leaf[k % len(leaf)]] for k in range(4)] for leaf in leaves]
        np.testing.assert_array_equal(samples, np.array(kept, dtype=np.float32))

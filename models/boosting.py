"""Gradient-boosted trees of LightGBM as the job forecasters use them: one set of defaults, models kept as text.

Here belong growing and parsing; not what the trees are grown on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
_LEAF_SHARE, _LEAF_ROWS = 0.01, (20, 200)  # fewest rows of a leaf of odds: a share of all, within these
_ODDS: dict[str, Any] = {"objective": "binary", "lambda_l2": 50.0}
_KEPT = 8  # parsed models, the newest; parsing takes longer than a forecast
_DEFAULTS: dict[str, Any] = {
    "learning_rate": 0.1, "num_leaves": 15, "min_data_in_leaf": 40, "feature_fraction": 0.2, "bagging_fraction": 0.7,
    "bagging_freq": 1, "lambda_l2": 5.0, "max_bin": 63, "verbosity": -1, "deterministic": True,
    "force_row_wise": True,
}  # fmt: skip
_parsed: dict[str, Any] = {}


def grow(
    X: Matrix, labels: NDArray[Any], parameters: Mapping[str, Any], *, rounds: int, seed: int, threads: int,
    weights: NDArray[Any] | None = None,
) -> Any:  # fmt: skip
    """A booster on features of shape (n, f) and labels of shape (n,); the threads change nothing but the time."""
    import lightgbm

    whole = _DEFAULTS | dict(parameters) | {"seed": seed, "num_threads": threads}
    data = lightgbm.Dataset(
        X, label=np.asarray(labels, dtype=np.float64), weight=weights,
        params={"max_bin": whole["max_bin"], "verbosity": -1},
    )  # fmt: skip
    return lightgbm.train(whole, data, num_boost_round=rounds)


def grow_odds(
    X: Matrix, happened: NDArray[np.bool_], blocks: NDArray[Any], *, rounds: int, seed: int, threads: int
) -> tuple[Any, Any]:
    """Heavily regularised boosters of a probability: to one every row counts alike, to the other every block."""
    _, block, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    by_block = 1.0 / counts[block]
    parameters = _ODDS | {"min_data_in_leaf": int(np.clip(_LEAF_SHARE * len(X), *_LEAF_ROWS))}
    alike, by = (
        grow(X, happened, parameters, rounds=rounds, seed=seed, threads=threads, weights=weights)
        for weights in (None, by_block / by_block.mean())
    )
    return alike, by


def mean_odds(texts: tuple[str, ...], X: Matrix) -> NDArray[np.float64]:
    """Mean probability that boosters of these texts tell, shape (n,)."""
    return np.mean([booster_of(text).predict(X, num_threads=1) for text in texts], axis=0)


def booster_of(text: str) -> Any:
    """A parsed model."""
    if text not in _parsed:
        import lightgbm

        while len(_parsed) >= _KEPT:
            _parsed.pop(next(iter(_parsed)))
        _parsed[text] = lightgbm.Booster(model_str=text)
    return _parsed[text]

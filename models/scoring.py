"""Losses and scores of forecasts, as arrays per row or single figures; no intervals and no decisions.

Durations are scored in ln(forecast ÷ actual), so that a minute wrong on two counts more than an hour wrong on a week.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.vocabulary import QUANTILES

Floats = NDArray[np.float64]


def log_error(forecast_s: Floats, actual_s: Floats) -> Floats:
    """|ln(forecast ÷ actual)| per row; both are taken as one second at least."""
    return np.abs(np.log(np.maximum(forecast_s, 1.0)) - np.log(np.maximum(actual_s, 1.0)))


def is_within(forecast_s: Floats, actual_s: Floats, ratio: float) -> NDArray[np.bool_]:
    """|forecast ÷ actual − 1| ≤ ratio, per row."""
    return np.abs(forecast_s - actual_s) <= ratio * actual_s + 1e-9


def is_within_factor(forecast_s: Floats, actual_s: Floats, factor: float) -> NDArray[np.bool_]:
    """Forecast and actual differ by at most this factor, per row."""
    return log_error(forecast_s, actual_s) <= np.log(factor) + 1e-9


def log_pinball(quantiles_s: Floats, actual_s: Floats, levels: Sequence[float] | Floats = QUANTILES) -> Floats:
    """Mean over levels of the pinball loss in ln(seconds), per row; quantiles of shape (n, levels)."""
    gap = np.log(np.maximum(actual_s, 1.0))[:, None] - np.log(np.maximum(quantiles_s, 1.0))
    at = np.asarray(levels)
    return np.mean(np.maximum(at * gap, (at - 1) * gap), axis=1)


def is_covered(low_s: Floats, high_s: Floats, actual_s: Floats) -> NDArray[np.bool_]:
    """The outcome lies inside the interval, with half a second of slack for whole-second clocks, per row."""
    return (actual_s >= low_s - 0.5) & (actual_s <= high_s + 0.5)


def covered_share(
    quantiles_s: Floats, actual_s: Floats, low: float = 0.1, high: float = 0.9, levels: Sequence[float] = QUANTILES
) -> Floats:
    """Share of an outcome that an interval is credited with, per row: 1 inside, 0 outside, a part on its end.

    Where outcomes fall together (waits of zero, runs to the limit) several levels have the same quantile, and an
    interval that reaches it holds more than its nominal share however right the forecast is. As with a randomised
    probability integral transform, the outcome counts as spread evenly over the levels that end there, so that right
    odds cover their nominal share (Czado, Gneiting, Held 2009, for counts).

    Args:
        quantiles_s: Quantiles, shape (n, levels).
        actual_s: Outcomes, shape (n,); half a second from a quantile is on it.
        low: Level of the lower end, one of `levels`.
        high: Level of the upper end, one of `levels`.
        levels: Rising levels within (0, 1).
    """
    at = np.concatenate([[0.0], levels, [1.0]])
    edge = (at[:-1] + at[1:]) / 2  # of mass that lies on a quantile, halfway to the next level; all of it at the ends
    edge[0], edge[-1] = 0.0, 1.0
    below = (quantiles_s < actual_s[:, None] - 0.5).sum(axis=1)
    upto = (quantiles_s <= actual_s[:, None] + 0.5).sum(axis=1)
    is_on = upto > below
    first, last = np.where(is_on, edge[below], at[below]), np.where(is_on, edge[upto], at[below + 1])
    return np.clip(np.minimum(last, high) - np.maximum(first, low), 0.0, None) / (last - first)


def duration_scores(forecast_s: Floats, actual_s: Floats) -> dict[str, Floats]:
    """Per-row values whose means are MALE, ≤ 25 %, ≤ 2× and MAE."""
    return {
        "male": log_error(forecast_s, actual_s),
        "within_25pct": is_within(forecast_s, actual_s, 0.25).astype(np.float64),
        "within_2x": is_within_factor(forecast_s, actual_s, 2.0).astype(np.float64),
        "mae_s": np.abs(forecast_s - actual_s),
    }


def brier(probability: Floats, happened: NDArray[Any]) -> Floats:
    """Squared error of a probability, per row."""
    return (probability - np.asarray(happened, dtype=np.float64)) ** 2


def auroc(score: Floats, happened: NDArray[Any]) -> float | None:
    """Area under the ROC curve, ties counted half; None when only one class is there."""
    happened = np.asarray(happened, dtype=bool)
    if happened.all() or not happened.any():
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(happened, score))

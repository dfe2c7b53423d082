"""Probabilities for rules that only rank: how often each level of a score was followed by an onset on past rows.

Here belongs the step from a score to a probability, so that baselines are judged by Brier score like grown-ups; no
rule and no model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def probabilities(past_score: Floats, past_came: NDArray[np.bool_], score: Floats) -> Floats:
    """Chance of an onset at each score, rising with it, from past rows (isotonic regression).

    Args:
        past_score: Scores of past rows, shape (past,).
        past_came: Whether an onset followed them, shape (past,).
        score: Scores to be read, shape (rows,).

    Returns:
        Shape (rows,); the share of all past rows where scores do not differ, 0 without past rows.
    """
    if not len(past_came):
        return np.zeros(len(score))
    rate = float(np.mean(past_came))
    if past_score.min() == past_score.max() or rate in (0.0, 1.0):
        return np.full(len(score), rate)
    from sklearn.isotonic import IsotonicRegression

    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    model.fit(past_score, past_came.astype(np.float64))
    return np.asarray(model.predict(score), dtype=np.float64)

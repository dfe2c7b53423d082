"""Baselines of bottleneck forecasts, calibrated like grown-ups: each turns one naive rule into probabilities.

Persistence (nothing changes), the recent rate of onsets, `predict_linear` to the limit, and a threshold on the level.
The rule is theirs; how often it was right is learned on the training rows, so that skill against them is skill and not
a matter of scale. Here belong baselines alone; the built-in trend stands in `models/trend.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.windows import FeatureBlock
from models.onsets import Rows
from models.trend import HORIZONS_S

NAMES = ("persistence", "recent_rate", "predict_linear", "level_threshold")


def predict_linear(block: FeatureBlock, horizon_s: float) -> NDArray[np.bool_]:
    """Whether a straight line through the last 5 minutes is over the limit at the horizon, as a PromQL rule would."""
    with np.errstate(invalid="ignore"):
        ahead = np.nan_to_num(block.column("data_age_s")) + horizon_s
        return block.column("last") + block.column("slope_mid") * ahead <= 0


class NaiveOnsets:
    """Baselines of one class, fitted on training rows."""

    def __init__(self, train: Rows) -> None:
        self.rate: list[float] = []
        self.linear: list[tuple[float, float]] = []
        self.level: list[tuple[float, float, float]] = []
        last = train.block.column("last")
        finite = last[np.isfinite(last)]
        cuts = np.unique(np.quantile(finite, np.linspace(0.005, 0.9, 40))) if len(finite) else np.zeros(1)
        for horizon_s in HORIZONS_S:
            came, known = train.outcome(horizon_s)
            came, weight = came[known], train.weight[known]
            self.rate.append(_share(came, weight))
            flag = predict_linear(train.block, horizon_s)[known]
            self.linear.append((_share(came[~flag], weight[~flag]), _share(came[flag], weight[flag])))
            best = (np.inf, 0.0, 0.0, 0.0)
            for cut in cuts:
                below = last[known] <= cut
                low, high = _share(came[~below], weight[~below]), _share(came[below], weight[below])
                loss = float((weight * (np.where(below, high, low) - came) ** 2).sum())
                best = min(best, (loss, float(cut), low, high))
            self.level.append(best[1:])

    def forecast(self, name: str, block: FeatureBlock) -> NDArray[np.float64]:
        """Probabilities of one baseline, shape (rows, len(HORIZONS_S)).

        Raises:
            ValueError: There is no such baseline.
        """
        if name not in NAMES:
            raise ValueError(f"no baseline {name!r}; baselines: {', '.join(NAMES)}")
        out = np.zeros((len(block.matrix), len(HORIZONS_S)))
        for i, horizon_s in enumerate(HORIZONS_S):
            if name == "recent_rate":
                out[:, i] = self.rate[i]
            elif name == "predict_linear":
                quiet, flagged = self.linear[i]
                out[:, i] = np.where(predict_linear(block, horizon_s), flagged, quiet)
            elif name == "level_threshold":
                cut, quiet, flagged = self.level[i]
                out[:, i] = np.where(block.column("last") <= cut, flagged, quiet)
        return np.maximum.accumulate(out, axis=1)


def _share(came: NDArray[np.float64], weight: NDArray[np.float64]) -> float:
    return float((came * weight).sum() / weight.sum()) if len(came) and weight.sum() > 0 else 0.0

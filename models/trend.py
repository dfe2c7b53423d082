"""The built-in bottleneck forecaster: a straight trend with its uncertainty, until a model has earned the place.

Here belongs the forecast that needs no training and the protocol that every bottleneck forecaster follows; learned
models stand in `models/bottleneck.py`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from features.conditions import CLASSES
from features.windows import SCREEN_GROWTH_GIB, FeatureBlock

HORIZONS_S = (30, 60, 90, 120)
TREND_VERSION = "baseline:trend"
# Spread of one sample around its own trend, at least: °C (whole degrees are reported), ratio, GiB.
NOISE = {"thermal_throttle": 1.0, "nvlink_saturation": 0.04, "memory_exhaustion": 0.3}
FLOOR = 1e-4  # nothing is impossible
CEILING = 0.97  # and a straight line is never certain


class BottleneckForecaster(Protocol):
    """Gives P(onset within each horizon) for GPUs that are not in the condition yet."""

    @property
    def version(self) -> str:
        """Name in the registry, or of the baseline."""
        ...

    def forecast(self, block: FeatureBlock) -> NDArray[np.float64]:
        """Probabilities, shape (rows, len(HORIZONS_S)); they never fall with the horizon."""
        ...


def normal_cdf(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Φ(z), to within 1e-4 (Abramowitz and Stegun 26.2.17), without a heavy library."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-z * z / 2) / np.sqrt(2 * np.pi) * poly
    return np.where(z >= 0, 1 - upper, upper)


class TrendForecaster:
    """Straight trend of the distance over the last 90 s, with the spread around it carried ahead."""

    version = TREND_VERSION

    def forecast(self, block: FeatureBlock) -> NDArray[np.float64]:
        """Probabilities, shape (rows, len(HORIZONS_S)).

        Raises:
            ValueError: The class of the block is unknown.
        """
        if block.bottleneck_class not in CLASSES:
            raise ValueError(f"no bottleneck class {block.bottleneck_class!r}; classes: {', '.join(CLASSES)}")
        last = block.column("last").astype(np.float64)
        short, mid = block.column("slope_short"), block.column("slope_mid")
        slope = np.nan_to_num(np.where(np.isnan(short), mid, short)).astype(np.float64)
        noise = NOISE[block.bottleneck_class]
        residual = np.maximum(np.nan_to_num(block.column("residual_short")), noise).astype(np.float64)
        age = np.nan_to_num(block.column("data_age_s")).astype(np.float64)
        out = np.empty((len(last), len(HORIZONS_S)))
        for i, horizon_s in enumerate(HORIZONS_S):
            ahead = age + horizon_s
            # A slope over 90 s is known to about residual ÷ 45 s when it rests on a handful of samples.
            sigma = np.hypot(residual, residual / 45 * ahead / 2)
            out[:, i] = normal_cdf(-(last + slope * ahead) / sigma)
        if block.bottleneck_class == "memory_exhaustion":
            # Full but steady memory is a cache; it runs out only where it has left its plateau.
            with np.errstate(invalid="ignore"):
                grown = block.column("over_plateau_gib_last") >= SCREEN_GROWTH_GIB
            out[~grown] = FLOOR
        out = np.where(np.isnan(last)[:, None], FLOOR, out)
        return np.clip(np.maximum.accumulate(out, axis=1), FLOOR, CEILING)

"""The level of a quantity of a GPU some seconds ahead, with quantiles: a forest of what followed similar windows.

Windows are put in units of their own spread, so that a busy GPU and an idle one teach the same forest, and a GPU not
seen before can be forecast. The forest keeps samples of what followed; their median is the point, mixed with the
best baseline as the newest part of the training time says, and their quantiles are widened to cover what they claim
there. Here belong the forecaster and its baselines; rows stand in `features/levels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from features.levels import LevelRows
from models.forest import Forest, ForestSize

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

QUANTILES = (0.1, 0.5, 0.9)
BASELINES = ("persistence", "recent_mean", "ewma", "predict_linear")
SIZE = ForestSize(trees=60, min_leaf=15, feature_share=0.3, rows_per_tree=20_000)
MAX_ROWS = 100_000
HELD_SHARE = 0.3  # newest part of the training rows: judges pulls and widths
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Few looks choose a weight badly, and half and half is hard to beat: the choice counts for as many looks as GPUs at
# work had horizons in the held part, half and half for this many.
EVEN_LOOKS = 30.0
LEAST_SCALE = 0.005  # of the level: smaller movements are the sensor's
BOUND = 8.0
MIN_ROWS = 100
MIN_MOVING = 50
MOVING_SHARE = 0.05  # of its mean: a window that varies by more is of a GPU at work


class LevelModelError(ValueError):
    """The forecaster cannot be fitted; the message says what is missing."""


class LevelForecaster:
    """Forests by horizon.

    Args:
        forests: One per horizon.
        weight: Weight of the forest's median in the point, by horizon; the rest is the baseline's.
        best: Baseline that the point is pulled towards, by horizon.
        widen: What the low and high quantiles are moved out by, in spreads, by horizon.
    """

    def __init__(
        self, forests: Sequence[Forest], weight: Sequence[float], best: Sequence[str], widen: Sequence[float]
    ) -> None:
        self.forests, self.weight, self.best, self.widen = list(forests), list(weight), list(best), list(widen)

    @classmethod
    def fit(
        cls, rows: LevelRows, train: Sequence[Ints], horizons_s: Sequence[float], *, seed: int = 1, threads: int = 1
    ) -> LevelForecaster:
        """Learn from some rows.

        Args:
            rows: Samples with their past and future.
            train: Numbers of the rows to learn from, by horizon.
            horizons_s: Of `rows.came`.
            seed: Seed of sampling and forests.
            threads: Threads of a fit.

        Raises:
            LevelModelError: A horizon has fewer than `MIN_ROWS` rows whose outcome is known.
        """
        rng = np.random.default_rng(seed)
        X, scale = design(rows)
        forests, weight, best, widen = [], [], [], []
        for k, horizon_s in enumerate(horizons_s):
            mine = train[k][~np.isnan(rows.came[train[k], k])]
            if len(mine) < MIN_ROWS:
                raise LevelModelError(
                    f"{len(mine)} rows to learn {horizon_s:g} s ahead from, {MIN_ROWS} are needed: give a longer record"
                )
            if len(mine) > MAX_ROWS:
                mine = np.sort(rng.choice(mine, MAX_ROWS, replace=False))
            y = (rows.came[mine, k] - rows.last[mine]) / scale[mine]
            cut = np.quantile(rows.at_s[mine], 1 - HELD_SHARE)
            early, late = rows.at_s[mine] < cut - horizon_s, rows.at_s[mine] >= cut
            trial = Forest.fit(X[mine[early]], _bounded(y[early]), SIZE, seed=seed, threads=threads)
            drawn = np.quantile(trial.draw(X[mine[late]]), QUANTILES, axis=1)
            came, held = y[late], mine[late]
            # GPUs at work are what the forecast is for: where there are some, they alone choose.
            moving = scale[held] > MOVING_SHARE * np.abs(rows.column("mean_300s")[held])
            if moving.sum() >= MIN_MOVING:
                held, came, drawn = held[moving], came[moving], drawn[:, moving]
            naive = {
                name: (baseline(name, rows, held, horizon_s) - rows.last[held]) / scale[held] for name in BASELINES
            }
            best.append(min(naive, key=lambda name: float(np.abs(naive[name] - came).mean())))
            losses = [np.abs(w * drawn[1] + (1 - w) * naive[best[-1]] - came).mean() for w in WEIGHTS]
            looks = len(np.unique(rows.unit[held])) * (rows.at_s[held].max() - cut) / horizon_s
            share = looks / (looks + EVEN_LOOKS)
            weight.append(float(share * WEIGHTS[int(np.argmin(losses))] + (1 - share) * 0.5))
            outside = np.maximum(drawn[0] - came, came - drawn[2])
            widen.append(float(np.clip(np.quantile(outside, QUANTILES[2] - QUANTILES[0]), 0.0, 2.0)))
            forests.append(Forest.fit(X[mine], _bounded(y), SIZE, seed=seed, threads=threads))
        return cls(forests, weight, best, widen)

    def forecast(self, rows: LevelRows, of: Ints, horizons_s: Sequence[float]) -> tuple[Floats, Floats]:
        """Points and quantiles of some rows.

        Returns:
            Points of shape (rows, horizons), quantiles of shape (rows, horizons, len(QUANTILES)), never crossing.
        """
        X, scale = design(rows)
        last = rows.last[of]
        point = np.empty((len(of), len(horizons_s)))
        bands = np.empty((len(of), len(horizons_s), len(QUANTILES)))
        for k, horizon_s in enumerate(horizons_s):
            low, middle, high = np.quantile(self.forests[k].draw(X[of]), QUANTILES, axis=1) * scale[of]
            naive = baseline(self.best[k], rows, of, horizon_s) - last
            point[:, k] = last + self.weight[k] * middle + (1 - self.weight[k]) * naive
            out = self.widen[k] * scale[of]
            bands[:, k] = last[:, None] + np.column_stack((low - out, point[:, k] - last, high + out))
        return point, np.sort(bands, axis=2)


def design(rows: LevelRows) -> tuple[NDArray[np.float32], Floats]:
    """Features in units of each window's own spread, and that spread in the quantity's unit, shape (rows,)."""
    scale = np.maximum(rows.column("spread_300s"), LEAST_SCALE * np.abs(rows.column("mean_300s")))
    scale = np.where(scale > 0, scale, 1.0)
    out = []
    for i, name in enumerate(rows.names):
        value = rows.matrix[:, i]
        if name == "last":
            # How restless the GPU is, which is all that the level itself says of others.
            value = np.log10(scale / np.maximum(np.abs(rows.column("mean_300s")), 1e-9))
        elif name.startswith("beside_"):
            pass  # in its own spread already
        elif name == "steady_s":
            value = np.log1p(value) - 3.0
        elif name.startswith("slope_"):
            value = value * 60.0 / scale
        elif name.startswith(("change_", "spread_")):
            value = value / scale
        else:
            value = (value - rows.last) / scale
        out.append(np.clip(value, -BOUND, BOUND))
    return np.column_stack(out).astype(np.float32), scale


def baseline(name: str, rows: LevelRows, of: Ints, horizon_s: float) -> Floats:
    """Point forecast of a baseline for some rows, shape (rows,).

    Raises:
        ValueError: There is no such baseline.
    """
    last = rows.last[of]
    if name == "persistence":
        return last
    if name == "recent_mean":
        return rows.column("mean_60s")[of]
    if name == "ewma":
        return rows.column("decayed_60s")[of]
    if name == "predict_linear":
        line = rows.column("line_180s")[of] + rows.column("slope_180s")[of] * horizon_s
        return np.where(np.isnan(line), last, line)
    raise ValueError(f"no baseline {name!r}; baselines: {', '.join(BASELINES)}")


def _bounded(y: Floats) -> Floats:
    return np.clip(y, -4 * BOUND, 4 * BOUND)

"""Walk-forward backtest of demand forecasts: weights at every hour from released ones, judged beside the baselines.

Here belong the walk and the scores; not the forecaster (`models/demand.py`) nor the drawing of intervals
(`models/promotion.py`). Baselines get their quantiles as the model does. Blocks of the bootstrap are days.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.vocabulary import QUANTILES
from models.demand import HORIZONS_H, MIN_HOURS, VERSION, bands, ladder, pinball, released_hours
from models.demand_experts import BASELINES, DAY_H, EXPERTS
from models.promotion import Interval, block_bootstrap, mean_interval

Floats = NDArray[np.float64]

TEST_SHARE = 0.30
_SHOWN_WEIGHT = 0.005
_LOW, _HIGH = QUANTILES.index(0.10), QUANTILES.index(0.90)


@dataclass(frozen=True, slots=True)
class Judged:
    """Every test hour of one horizon, of the model and the baselines.

    Attributes:
        horizon_h: Hours ahead.
        came: What came, shape (rows,).
        point: Name → forecast, shape (rows,); the model's name is `VERSION`.
        quantiles: Name → quantiles, shape (rows, quantiles).
        day: Day of each row, for blocks.
        chosen: Expert or pool → its mean weight, where that is not tiny.
    """

    horizon_h: int
    came: Floats
    point: dict[str, Floats]
    quantiles: dict[str, Floats]
    day: NDArray[np.int64]
    chosen: dict[str, float]


def walk(
    values: Floats,
    horizons_h: Sequence[int] = HORIZONS_H,
    *,
    test_share: float = TEST_SHARE,
    first_hour: int = 0,
    flows: Mapping[int, Floats] | None = None,
) -> dict[int, Judged]:
    """Forecast every test hour of a series from what was known at each horizon before.

    Args:
        values: Hourly series, shape (hours,).
        horizons_h: Hours ahead, rising.
        test_share: Share of the hours, the newest, that is judged.
        first_hour: Number of the first hour since some midnight, for blocks of days.
        flows: What the jobs at each origin said, as of `demand.ladder`.

    Returns:
        Horizon → the judged rows, without horizons that do not fit into the test hours or of which no forecast could be
        judged before.
    """
    begin = int(len(values) * (1 - test_share))
    found = {}
    for rung in ladder(values, horizons_h, flows):
        horizon_h, hedged = rung.horizon_h, rung.hedged
        origins = np.arange(begin, len(values) + 1 - horizon_h)
        if not len(origins) or released_hours(begin, horizon_h) < MIN_HOURS:
            continue
        points = {VERSION: hedged.point} | {name: rung.said[:, EXPERTS.index(name)] for name in BASELINES}
        share = hedged.weights[origins].mean(axis=0)
        found[horizon_h] = Judged(
            horizon_h,
            rung.came[origins],
            {name: point[origins] for name, point in points.items()},
            {name: bands(point, rung.came, horizon_h, origins) for name, point in points.items()},
            (origins - 1 + horizon_h + first_hour) // DAY_H,
            {name: float(weight) for name, weight in zip(hedged.names, share, strict=True) if weight >= _SHOWN_WEIGHT},
        )
    return found


@dataclass(frozen=True, slots=True)
class DemandScore:
    """Figures of one forecaster at one horizon, over one or several series.

    Attributes:
        horizon_h: Hours ahead.
        who: `VERSION` or a baseline.
        mae: Mean absolute error, with its interval.
        smape: Mean of 2·|forecast − actual| ÷ (forecast + actual); hours of zero and zero count as no error.
        pinball: Mean pinball loss of the quantiles, with its interval.
        coverage_80: Share of hours inside the 10–90 % interval.
        rows: Hours judged.
    """

    horizon_h: int
    who: str
    mae: Interval
    smape: float
    pinball: Interval
    coverage_80: float
    rows: int


def scores(parts: Sequence[Judged], *, draws: int = 1_000, seed: int = 1) -> list[DemandScore]:
    """Scores of the model and each baseline over the series together."""
    day = np.concatenate([part.day for part in parts])
    came = np.concatenate([part.came for part in parts])
    found = []
    for who in (VERSION, *BASELINES):
        point = np.concatenate([part.point[who] for part in parts])
        bands = np.concatenate([part.quantiles[who] for part in parts])
        error, total = np.abs(point - came), point + came
        inside = (came >= bands[:, _LOW] - 1e-9) & (came <= bands[:, _HIGH] + 1e-9)
        found.append(
            DemandScore(
                parts[0].horizon_h,
                who,
                mean_interval(error, day, draws=draws, seed=seed),
                float(np.mean(np.where(total > 0, 2 * error / np.where(total > 0, total, 1.0), 0.0))),
                mean_interval(pinball(bands, came), day, draws=draws, seed=seed),
                float(inside.mean()),
                len(came),
            )
        )
    return found


def ratio(parts: Sequence[Judged], *, loss: str = "mae", draws: int = 1_000, seed: int = 1) -> tuple[str, Interval]:
    """The model's loss ÷ that of the best baseline on the same hours, with its interval.

    Args:
        parts: Judged series of one horizon.
        loss: `mae` or `pinball`.
        draws: Bootstrap draws.
        seed: Seed of the draws.

    Returns:
        Name of the baseline that turned out best, and the ratio.
    """
    came = np.concatenate([part.came for part in parts])

    def of(who: str) -> Floats:
        if loss == "mae":
            return np.abs(np.concatenate([part.point[who] for part in parts]) - came)
        return pinball(np.concatenate([part.quantiles[who] for part in parts]), came)

    best = min(BASELINES, key=lambda who: of(who).mean())
    day = np.concatenate([part.day for part in parts])
    return best, block_bootstrap([of(VERSION), of(best)], day, lambda a, b: a / b, draws=draws, seed=seed)

"""Walk-forward backtest of demand forecasts: one choice a week on released hours, judged beside the baselines.

Here belong the walk and the scores; not the forecaster (`models/demand.py`) nor the drawing of intervals
(`models/promotion.py`). Blocks of the bootstrap are days.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.vocabulary import QUANTILES
from models.demand import MIN_HOURS, VERSION, choose_at, pinball, spread
from models.demand_experts import BASELINES, DAY_H, EXPERTS, WEEK_H, Levels, actuals, experts
from models.promotion import Interval, block_bootstrap, mean_interval

Floats = NDArray[np.float64]

TEST_SHARE = 0.30
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
        chosen: Expert in charge → share of the rows.
    """

    horizon_h: int
    came: Floats
    point: dict[str, Floats]
    quantiles: dict[str, Floats]
    day: NDArray[np.int64]
    chosen: dict[str, float]


def walk(values: Floats, horizon_h: int, *, test_share: float = TEST_SHARE, first_hour: int = 0) -> Judged | None:
    """Forecast every test hour of a series from what was known `horizon_h` hours before.

    Args:
        values: Hourly series, shape (hours,).
        horizon_h: Hours ahead.
        test_share: Share of the hours, the newest, that is judged.
        first_hour: Number of the first hour since some midnight, for blocks of days.

    Returns:
        The judged rows; None where the horizon does not fit into the test hours, or no forecast could be judged before.
    """
    levels = Levels(values)
    said, came = experts(levels, horizon_h), actuals(values, horizon_h)
    begin = int(len(values) * (1 - test_share))
    origins = np.arange(begin, len(values) + 1 - horizon_h)
    if not len(origins) or begin - horizon_h < MIN_HOURS:
        return None
    names = (VERSION, *BASELINES)
    point: dict[str, list[Floats]] = {name: [] for name in names}
    quantiles: dict[str, list[Floats]] = {name: [] for name in names}
    chosen: dict[str, float] = {}
    for first in range(int(origins[0]), int(origins[-1]) + 1, WEEK_H):
        rows = said[first : min(first + WEEK_H, int(origins[-1]) + 1)]
        for name in names:
            allowed: Sequence[str] = EXPERTS if name == VERSION else (name,)
            choice = choose_at(said, came, first, horizon_h, allowed=allowed)
            if choice is None:
                band = np.tile(spread(values[:first]), (len(rows), 1))
                point[name].append(rows[:, EXPERTS.index(BASELINES[0] if name == VERSION else name)])
                quantiles[name].append(band)
                continue
            point[name].append(choice.point(rows))
            quantiles[name].append(choice.quantiles(rows))
            if name == VERSION:
                chosen[choice.name] = chosen.get(choice.name, 0.0) + len(rows) / len(origins)
    target = origins - 1 + horizon_h
    return Judged(
        horizon_h,
        came[origins],
        {name: np.concatenate(parts) for name, parts in point.items()},
        {name: np.concatenate(parts) for name, parts in quantiles.items()},
        (target + first_hour) // DAY_H,
        chosen,
    )


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

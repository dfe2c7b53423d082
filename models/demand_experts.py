"""Simple forecasts of an hourly series, all origins at once: the baselines of demand and what is mixed with them.

Here belongs what one expert says; which one is believed stands in `models/demand.py`. An expert at origin i sees the
first i values only.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DAY_H = 24
WEEK_H = 168
BASELINES = ("last_value", "same_hour_last_week", "same_slot_median")
EXPERTS = (
    *BASELINES, "same_hour_last_day", "same_hour_median", "mean_day", "mean_week", "median_week", "median_month",
    "last_shifted_by_week", "last_shifted_by_day", "day_shifted_by_week", "half_last_week", "half_day_slot",
)  # fmt: skip
FLOW_EXPERTS = ("flow", "half_flow")  # only where jobs tell what of demand will have gone
_SLOTS = 4  # weeks that the same-slot median is of
_DAYS = 7  # days that the same-hour median is of


class Levels:
    """Rolling levels of a series, made once and shared by all horizons; row i knows the first i values.

    Args:
        values: Series by hour, shape (hours,), without gaps.
    """

    def __init__(self, values: Floats) -> None:
        self.values = np.asarray(values, dtype=np.float64)
        series = pl.Series(self.values)

        def after(rolled: pl.Series) -> Floats:
            return np.concatenate([[np.nan], rolled.to_numpy()])

        self.last = np.concatenate([[np.nan], self.values])
        self.mean_day = after(series.rolling_mean(DAY_H, min_samples=1))
        self.mean_week = after(series.rolling_mean(WEEK_H, min_samples=1))
        self.median_week = after(series.rolling_median(WEEK_H, min_samples=1))
        self.median_month = after(series.rolling_median(4 * WEEK_H, min_samples=1))
        slot_now, hour_now = _same(self.values, 0, WEEK_H, _SLOTS), _same(self.values, 0, DAY_H, _DAYS)
        self.slot_now, self.hour_now = _or(slot_now, self.last), _or(hour_now, self.last)
        slot_day = np.concatenate([[np.nan], pl.Series(self.slot_now[1:]).rolling_mean(DAY_H, min_samples=1)])
        self.slot_day = _or(slot_day, self.mean_day)


def experts(levels: Levels, horizon_h: int, flow: Floats | None = None) -> Floats:
    """What every expert says at every origin of the value `horizon_h` hours ahead.

    Args:
        levels: The series with its levels.
        horizon_h: Hours from the end of the last known hour to the end of the hour asked for, 1 or more.
        flow: What the jobs at each origin say (`models/demand_flow.py`), shape (hours + 1,), NaN where unknown.

    Returns:
        Shape (hours + 1, experts), in the order of `EXPERTS`, with a flow those of `FLOW_EXPERTS` behind them; never
        negative; the first row, which knows nothing, is NaN. An expert whose past is too short says the last value.

    Raises:
        ValueError: The horizon is under one hour.
    """
    if horizon_h < 1:
        raise ValueError(f"horizon of {horizon_h} h; one hour at least")
    y, last = levels.values, levels.last
    week = _or(_same(y, horizon_h, WEEK_H, 1), last)
    slot = _or(_same(y, horizon_h, WEEK_H, _SLOTS), last)
    day = _or(_same(y, horizon_h, DAY_H, 1), last)
    hour = _or(_same(y, horizon_h, DAY_H, _DAYS), last)
    rows = [
        last, week, slot, day, hour, levels.mean_day, levels.mean_week, levels.median_week, levels.median_month,
        last + slot - levels.slot_now, last + hour - levels.hour_now, levels.mean_day + slot - levels.slot_day,
        (last + levels.median_week) / 2, (levels.mean_day + slot) / 2,
    ]  # fmt: skip
    if flow is not None:
        known = _or(flow, last)
        rows += [known, (known + last) / 2]
    return np.maximum(np.stack(rows, axis=1), 0.0)


def actuals(values: Floats, horizon_h: int) -> Floats:
    """The value that each origin's forecast is judged by, NaN where it is not known yet, shape (hours + 1,)."""
    out = np.full(len(values) + 1, np.nan)
    if horizon_h <= len(values):
        out[: len(values) + 1 - horizon_h] = values[horizon_h - 1 :]
    return out


def _same(values: Floats, horizon_h: int, period_h: int, count: int) -> Floats:
    """Median of the newest `count` known values a whole number of periods before the target, NaN where none is."""
    skip = max(1, -(-horizon_h // period_h))
    origins = np.arange(len(values) + 1)
    columns = []
    for k in range(skip, skip + count):
        index = origins - 1 + horizon_h - k * period_h
        columns.append(np.where(index >= 0, values[np.maximum(index, 0)] if len(values) else np.nan, np.nan))
    stacked = np.sort(np.stack(columns), axis=0)  # NaN last
    known = (~np.isnan(stacked)).sum(axis=0)
    low, high = np.maximum(known - 1, 0) // 2, known // 2
    high = np.minimum(high, np.maximum(known - 1, 0))
    rows = np.arange(stacked.shape[1])
    return (stacked[low, rows] + stacked[high, rows]) / 2


def _or(values: Floats, other: Floats) -> Floats:
    return np.where(np.isnan(values), other, values)

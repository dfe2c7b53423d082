"""What a gathered window of a GPU says about the level of one quantity some seconds ahead.

Here belongs the arithmetic on windows that live rings (`features/ring.py`) and history (`features/history.py`) gather
alike; no model. Levels are told as changes from the newest value in a unit that GPUs of any model share (°C; share of
the full power that the window has seen; share of the NVLink rate; GiB). Physics stands beside: heat as a lagged
response to power and air (`features/heat.py`), memory's own growth, the beat of the job (`features/phase.py`). What a
cluster does not measure is NaN and not 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.conditions import INDEX
from features.heat import Heat, heat_of
from features.phase import PHASE, phase_features
from features.ring import Windows

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

HORIZONS_S = (30, 60, 90, 120)


@dataclass(frozen=True, slots=True)
class Level:
    """A quantity whose course is foreseen.

    Attributes:
        column: Of `features.conditions.QUANTITIES`.
        unit: Of the values.
        step: What one step of its exporter is worth, in that unit: finer differences are not seen.
        noise: Differences smaller than this are no change.
    """

    column: str
    unit: str
    step: float
    noise: float


LEVELS = {
    "gpu_temp_c": Level("gpu_temp_c", "°C", 1.0, 1.0),
    "gpu_power_w": Level("gpu_power_w", "W", 0.5, 10.0),
    "nvlink_fill_ratio": Level("nvlink_fill_ratio", "ratio", 0.001, 0.03),
    "memory_distance_gib": Level("memory_distance_gib", "GiB", 0.001, 0.1),
}
# The quantity that tells how a class comes about.
OF_CLASS = {
    "thermal_throttle": "gpu_temp_c", "power_throttle": "gpu_power_w", "nvlink_saturation": "nvlink_fill_ratio",
    "memory_exhaustion": "memory_distance_gib",
}  # fmt: skip
LAGS_S = (15.0, 30.0, 60.0, 120.0, 240.0)
MEANS_S = (30.0, 60.0, 180.0, 300.0)
CHANGE_SHARE = 0.06  # of the full power: a step of the load
# Distance to the limit, and from where on it says nothing of the next two minutes.
_MARGIN = {"gpu_temp_c": "thermal_distance_c", "memory_distance_gib": "memory_distance_gib"}
NEAR = {"gpu_temp_c": 10.0, "memory_distance_gib": 10.0}
HALF_LIFE_S = 60.0
STEADY_S = 180.0  # a level that has stood for longer is steady: how much longer tells only jobs of the past apart
TRENDS_S = (90.0, 300.0)
HEAT_S = 60.0  # how far ahead heat is told


@dataclass(frozen=True, slots=True)
class LevelBlock:
    """Windows of one quantity, as features.

    Attributes:
        quantity: Of `LEVELS`.
        names: Feature names, the columns of `matrix`.
        matrix: Shape (rows, features), float32, NaN where not known.
        last: Newest value, shape (rows,), NaN where there is none.
        unit: What changes are told in, in the quantity's unit, shape (rows,).
        naive: Baseline to its points, shape (rows, len(HORIZONS_S)).
        roughness: Root mean square of changes over each horizon within the window, shape (rows, len(HORIZONS_S)).
    """

    quantity: str
    names: tuple[str, ...]
    matrix: NDArray[np.float32]
    last: Floats
    unit: Floats
    naive: dict[str, Floats]
    roughness: Floats

    def where(self, rows: NDArray) -> LevelBlock:
        """Some of the rows."""
        naive = {name: value[rows] for name, value in self.naive.items()}
        return LevelBlock(
            self.quantity, self.names, self.matrix[rows], self.last[rows], self.unit[rows], naive, self.roughness[rows]
        )


def level_block(quantity: str, windows: Windows, at_s: NDArray[np.float64]) -> LevelBlock:
    """Features of gathered windows.

    Args:
        quantity: One of `LEVELS`.
        windows: Of `Ring.gather` or `SampleHistory.windows`.
        at_s: Moment of each row, seconds since 1970, shape (rows,).

    Raises:
        ValueError: There is no such quantity.
    """
    if quantity not in LEVELS:
        raise ValueError(f"no level {quantity!r}; levels: {', '.join(LEVELS)}")
    level = LEVELS[quantity]
    t = np.minimum(windows.ts - at_s[:, None], 0.0)
    x, power, inlet, temp, activity = (
        windows.values[INDEX[name]].astype(np.float64)
        for name in (level.column, "gpu_power_w", "inlet_temp_c", "gpu_temp_c", "activity_ratio")
    )
    mask = ~np.isnan(x)
    last, age = _at_last(x, mask), -_at_last(t, mask)
    full = np.where(np.isnan(power), 0, power).max(axis=1, initial=0.0)
    full = np.where(full > 0, full, 1.0)
    unit = full if quantity == "gpu_power_w" else np.ones(len(x))
    naive = _naive(x, t, mask, last, age)
    out: dict[str, Floats] = {}
    for window_s in MEANS_S:
        out[f"mean_{window_s:.0f}s"] = (_mean(x, mask & (t >= -window_s)) - last) / unit
    for lag_s in LAGS_S:
        out[f"change_{lag_s:.0f}s"] = (last - _at_last(x, mask & (t <= 1.0 - lag_s))) / unit
    some = mask.any(axis=1)
    ordered = np.sort(np.where(mask, x, np.inf), axis=1)
    count = np.maximum(mask.sum(axis=1), 1)
    rows = np.arange(len(x))
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        picked = ordered[rows, np.floor(share * (count - 1)).astype(np.int64)]
        out[f"q{100 * share:.0f}"] = np.where(some, (picked - last) / unit, np.nan)
    for window_s in TRENDS_S:
        out[f"slope_{window_s:.0f}s"] = _slope(x, t, mask & (t >= -window_s)) * 60.0 / unit
    out["since_change_s"], out["before_change"] = _since(x, t, mask, np.full(len(x), level.noise), last, unit)
    if quantity in _MARGIN:  # farther off it would only tell clusters apart
        margin = windows.values[INDEX[_MARGIN[quantity]]].astype(np.float64)
        out["margin"] = np.minimum(_at_last(margin, ~np.isnan(margin)), NEAR[quantity])
    if quantity == "nvlink_fill_ratio":
        out["level"] = last
    out["activity"] = _at_last(activity, ~np.isnan(activity))
    if quantity != "gpu_power_w":
        of_power = ~np.isnan(power)
        power_now = _at_last(power, of_power)
        out["power"] = power_now / full
        out["power_median"] = (_median(power, of_power) - power_now) / full
        since = _since(power, t, of_power, CHANGE_SHARE * full, power_now, full)
        out["power_since_change_s"], out["power_before_change"] = since
        low = np.where(of_power, power < 0.75 * full[:, None], False).sum(axis=1)
        out["power_low_share"] = np.where(of_power.any(axis=1), low / np.maximum(of_power.sum(axis=1), 1), np.nan)
    if quantity == "gpu_temp_c":
        out |= _by_heat(heat_of(temp, power, inlet, t), power_now, out["power_before_change"] * full, last, age)
    beat = phase_features(activity.astype(np.float32), t.astype(np.float32), ~np.isnan(activity), windows.is_even)
    out |= {name: beat[:, k].astype(np.float64) for k, name in enumerate(PHASE)}
    out["data_age_s"] = age
    matrix = np.column_stack(list(out.values())).astype(np.float32)
    return LevelBlock(quantity, tuple(out), matrix, last, unit, naive, _roughness(x, t, mask, last))


def _by_heat(heat: Heat, power: Floats, step_w: Floats, last: Floats, age: Floats) -> dict[str, Floats]:
    """Where heat goes if power stays, and if it goes back to what it was before its last step."""
    back = power + np.nan_to_num(step_w)
    ahead_s = age + HEAT_S
    return {
        "heat_stays": heat.ahead(power, ahead_s) - last, "heat_returns": heat.ahead(back, ahead_s) - last,
        "heat_error": heat.error_k,
    }  # fmt: skip


def _naive(x: Floats, t: Floats, mask: Flags, last: Floats, age: Floats) -> dict[str, Floats]:
    count = len(HORIZONS_S)
    weight = np.where(mask, 0.5 ** (-np.where(mask, t, 0.0) / HALF_LIFE_S), 0.0)
    total = np.where(mask.any(axis=1), np.maximum(weight.sum(axis=1), 1e-12), np.nan)
    decayed = (weight * np.where(mask, x, 0.0)).sum(axis=1) / total
    slope = np.nan_to_num(_slope(x, t, mask & (t >= -180.0)))
    ahead = np.array(HORIZONS_S) + age[:, None]
    return {
        "persistence": np.repeat(last[:, None], count, axis=1),
        "recent_mean": np.repeat(_mean(x, mask & (t >= -60.0 - age[:, None]))[:, None], count, axis=1),
        "ewma": np.repeat(decayed[:, None], count, axis=1),
        "predict_linear": last[:, None] + slope[:, None] * ahead,
    }


def _mean(x: Floats, mask: Flags) -> Floats:
    n = mask.sum(axis=1)
    return np.where(n > 0, np.where(mask, x, 0).sum(axis=1) / np.maximum(n, 1), np.nan)


def _median(x: Floats, mask: Flags) -> Floats:
    ordered = np.sort(np.where(mask, x, np.inf), axis=1)
    n = mask.sum(axis=1)
    return np.where(n > 0, ordered[np.arange(len(x)), np.maximum(n - 1, 0) // 2], np.nan)


def _at_last(x: Floats, mask: Flags) -> Floats:
    slot = x.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    return np.where(mask.any(axis=1), x[np.arange(len(x)), slot], np.nan)


def _slope(x: Floats, t: Floats, mask: Flags) -> Floats:
    """Least squares, per second; NaN under 3 samples."""
    n = mask.sum(axis=1)
    safe = np.maximum(n, 1)
    dt = np.where(mask, t - (np.where(mask, t, 0).sum(axis=1) / safe)[:, None], 0)
    dx = np.where(mask, x - (np.where(mask, x, 0).sum(axis=1) / safe)[:, None], 0)
    spread = (dt * dt).sum(axis=1)
    ok = (n >= 3) & (spread > 0)
    return np.where(ok, (dt * dx).sum(axis=1) / np.where(ok, spread, 1), np.nan)


def _since(
    x: Floats, t: Floats, mask: Flags, least: Floats, last: Floats, unit: Floats
) -> tuple[Floats, Floats]:  # fmt: skip
    """Seconds that a value has stood where it is, and how far from it the value before stood; NaN where unknown."""
    differs = mask & (np.abs(np.where(mask, x, 0) - last[:, None]) > least[:, None])
    later = mask & ~(np.cumsum(differs[:, ::-1], axis=1)[:, ::-1] > 0)
    first = np.argmax(later, axis=1)
    rows = np.arange(len(x))
    known = later.any(axis=1)
    since = np.where(known, np.minimum(-t[rows, first], STEADY_S), np.nan)
    return since, (_at_last(x, differs) - last) / unit


def _roughness(x: Floats, t: Floats, mask: Flags, last: Floats) -> Floats:
    """Root mean square of changes over each horizon, seen on the newest value against those about as long ago."""
    out = np.full((len(x), len(HORIZONS_S)), np.nan)
    grid = -np.arange(0.0, 480.0, 15.0)
    rows = np.arange(len(x))
    # Value at each point of an even grid: the newest sample at or before it.
    slot = np.stack([np.where(mask & (t <= g + 1.0), np.arange(x.shape[1]), -1).max(axis=1) for g in grid], axis=1)
    known = slot >= 0
    value = np.where(known, x[rows[:, None], np.maximum(slot, 0)], np.nan)
    value[:, 0] = last
    for k, horizon_s in enumerate(HORIZONS_S):
        step = round(horizon_s / 15.0)
        change = value[:, :-step] - value[:, step:]
        seen = ~np.isnan(change)
        n = seen.sum(axis=1)
        out[:, k] = np.where(
            n > 0, np.sqrt(np.where(seen, change, 0) ** 2 @ np.ones(change.shape[1]) / np.maximum(n, 1)), np.nan
        )
    return out

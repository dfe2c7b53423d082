"""How a distance moves: its newest pace, what is kept of it, how far it has come, and what the physics behind it says.

Here belong features that tell a course that goes on from one that has stopped, at any sampling; levels and plain
trends stand in `features/windows.py`. Temperature answers to power and air with a lag: what a GPU would reach at the
highest power of its window follows from its own resistance, whether it works just now or writes a checkpoint.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

MOTION = (
    "slope_new", "time_to_limit_new_s", "pace_kept", "stall", "way_gone", "spacing_s",
    "over_plateau_share", "step_ratio_time_to_slow_s",
    "full_load_distance", "full_load_change", "full_load_slope", "full_load_time_to_limit_s", "resistance_growth",
)  # fmt: skip
NEW_S = 40.0  # the newest pace: of so many seconds, of three samples at least
NEW_SAMPLES = 3
MID_S = 300.0
SHORT_S = 90.0
FAR_S = 3600.0
STEP_SLOW_RATIO = 1.15
LAG_S = 30.0  # of core temperature behind power; GPUs differ
MIN_POWER_RATIO = 0.4  # of the window's highest: below it, resistance cannot be told
# What a distance moves in: whole degrees as exporters round them; hundredths of the link, of a GiB.
GRAIN = {
    "thermal_throttle": 1.0, "power_throttle": 0.02, "nvlink_saturation": 0.02, "memory_exhaustion": 0.05,
    "straggler": 0.02,
}  # fmt: skip


def line(x: Floats, t: Floats, mask: Flags) -> tuple[Floats, Floats]:
    """Least squares per row: slope, and value of the line at the newest masked sample; NaN under 2 points."""
    n = mask.sum(axis=1)
    safe = np.maximum(n, 1)
    x, t = x.astype(np.float64), t.astype(np.float64)
    t_mean, x_mean = np.where(mask, t, 0).sum(axis=1) / safe, np.where(mask, x, 0).sum(axis=1) / safe
    dt, dx = np.where(mask, t - t_mean[:, None], 0), np.where(mask, x - x_mean[:, None], 0)
    sxx = (dt * dt).sum(axis=1)
    ok = (n >= 2) & (sxx > 0)
    slope = np.where(ok, (dt * dx).sum(axis=1) / np.where(ok, sxx, 1), np.nan)
    newest = np.where(mask, t, -np.inf).max(axis=1)
    at = x_mean + slope * (np.where(np.isfinite(newest), newest, 0) - t_mean)
    return slope.astype(np.float32), at.astype(np.float32)


def newest_samples(t: Floats, mask: Flags, seconds: float, count: int) -> Flags:
    """The samples of the last seconds of a row, and its newest few."""
    rank = np.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
    newest = np.where(mask, t, -np.inf).max(axis=1)
    return mask & ((rank <= count) | (t >= newest[:, None] - seconds))


def reach_s(distance: Floats, slope: Floats) -> Floats:
    """Seconds until a straight course is at 0, `FAR_S` when it never is."""
    with np.errstate(invalid="ignore", divide="ignore"):
        out = np.where(slope < 0, distance / -slope, FAR_S)
    return np.clip(np.where(np.isnan(distance) | np.isnan(slope), np.nan, out), 0, FAR_S).astype(np.float32)


def motion_features(
    bottleneck_class: str,
    x: Floats,
    t: Floats,
    seen: Flags,
    since_change_s: Floats,
    over_plateau: Floats,
    step_ratio: Floats,
    temp: Floats,
    power: Floats,
    inlet: Floats,
) -> Floats:
    """Features of gathered windows.

    Args:
        bottleneck_class: The class.
        x: Distance, shape (rows, slots), oldest first.
        t: Time of each sample before the row's moment, ≤ 0, seconds.
        seen: Samples of `x` that count.
        since_change_s: How long the distance has stood where it is, shape (rows,).
        over_plateau: Memory over the job's plateau, GiB, shape (rows, slots).
        step_ratio: Step time against the job's own, shape (rows, slots).
        temp: Core temperature, °C, shape (rows, slots).
        power: W, shape (rows, slots).
        inlet: Temperature of the air, °C, shape (rows, slots).

    Returns:
        Shape (rows, len(MOTION)), NaN where not known.
    """
    out = np.full((len(t), len(MOTION)), np.nan, dtype=np.float32)
    if not len(t):
        return out
    newest = newest_samples(t, seen, NEW_S, NEW_SAMPLES)
    slope, last = line(x, t, newest)
    middle, _ = line(x, t, seen & (t >= -MID_S))
    high = np.where(seen, x, -np.inf).max(axis=1)
    low = _last(x, seen)
    with np.errstate(invalid="ignore", divide="ignore"):
        out[:, 0] = slope
        out[:, 1] = reach_s(np.fmin(last, low), slope)
        out[:, 2] = np.clip(np.where(middle < 0, slope / middle, np.nan), -2, 4)
        out[:, 3] = np.clip(since_change_s * -middle / GRAIN[bottleneck_class], 0, 50)
        out[:, 4] = np.where(np.isfinite(high) & (high > 0), 1 - low / high, np.nan)
        spans = seen & (t >= -SHORT_S)
        n = spans.sum(axis=1)
        oldest = np.where(spans, t, np.inf).min(axis=1)
        out[:, 5] = np.where(n >= 2, (np.where(spans, t, -np.inf).max(axis=1) - oldest) / np.maximum(n - 1, 1), np.nan)
        over = _last(over_plateau, seen & ~np.isnan(over_plateau))
        if bottleneck_class == "memory_exhaustion":
            out[:, 6] = np.where(over > 0, over / (over + np.maximum(low, 0)), 0)
    if bottleneck_class == "nvlink_saturation":
        stepping = newest_samples(t, ~np.isnan(step_ratio), SHORT_S, NEW_SAMPLES)
        pace, ratio = line(step_ratio, t, stepping)
        out[:, 7] = reach_s(STEP_SLOW_RATIO - ratio, -pace)
    if bottleneck_class == "thermal_throttle":
        out[:, 8:] = _full_load(x, t, seen, temp, power, inlet)
    return out


def _full_load(x: Floats, t: Floats, seen: Flags, temp: Floats, power: Floats, inlet: Floats) -> Floats:
    """Distance at the window's highest power: newest, change and slope of the near past, time to the limit, growth."""
    known = seen & ~np.isnan(temp) & ~np.isnan(power)
    # Power as the core feels it: a first-order lag behind the samples.
    felt = np.full(t.shape, np.nan, dtype=np.float32)
    level, when = np.full(len(t), np.nan), np.full(len(t), np.nan)
    for slot in range(t.shape[1]):
        here = known[:, slot]
        p, now = power[:, slot], t[:, slot]
        gain = np.where(np.isnan(when), 1.0, -np.expm1(-np.maximum(np.nan_to_num(now - when), 0) / LAG_S))
        level = np.where(here, np.where(np.isnan(level), p, level + gain * (p - level)), level)
        when = np.where(here, now, when)
        felt[:, slot] = np.where(here, level, np.nan)
    full = np.nanmax(np.where(known, felt, 0), axis=1)
    air = np.where(known & ~np.isnan(inlet), inlet, np.nan)
    has_air = ~np.isnan(air)
    mean_air = np.where(
        has_air.any(axis=1), np.where(has_air, air, 0).sum(axis=1) / np.maximum(has_air.sum(axis=1), 1), 25
    )
    air = np.where(has_air, air, mean_air[:, None])
    usable = known & (felt >= MIN_POWER_RATIO * full[:, None])
    with np.errstate(invalid="ignore", divide="ignore"):
        resistance = (temp - air) / felt
        distance = (x + temp - air - resistance * full[:, None]).astype(np.float32)
    near = usable & (t >= -SHORT_S)
    slope, at = line(distance, t, newest_samples(t, usable, SHORT_S / 2, NEW_SAMPLES))
    long_slope, _ = line(distance, t, usable & (t >= -MID_S / 2))
    first, last = _first(resistance, usable), _last(resistance, usable)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.stack(
            (at, at - _first(distance, near), long_slope, reach_s(np.maximum(at, 0.1), slope), last / first), axis=1
        ).astype(np.float32)


def _last(x: Floats, mask: Flags) -> Floats:
    slot = x.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    return np.where(mask.any(axis=1), x[np.arange(len(x)), slot], np.nan).astype(np.float32)


def _first(x: Floats, mask: Flags) -> Floats:
    slot = np.argmax(mask, axis=1)
    return np.where(mask.any(axis=1), x[np.arange(len(x)), slot], np.nan).astype(np.float32)

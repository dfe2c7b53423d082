"""What the last minutes of one GPU say, as numbers: the kernel that live rings and history share.

Here belongs the arithmetic on windows that are already gathered, and the cheap screen in front of it; not where the
samples come from (`features/telemetry.py`, `features/history.py`). Everything goes by real time, never by row count:
samples may be irregular, late or missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from features.conditions import CLASSES, DISTANCE, INDEX
from features.motion import MOTION, motion_features
from features.peers import NEAR, PEERS
from features.phase import PHASE, phase_features
from features.ports import PORTS

Floats = NDArray[np.float32]

WINDOW_S = 600.0  # how far a window reaches back
SHORT_S = 90.0  # the near past that trends are read from: 3 samples at the slowest usual exporter
MID_S = 300.0
FAR_S = 3600.0  # a time to the limit beyond this is as good as never
# The screen: a GPU is looked at closely when it is this near, or would be at its limit within SCREEN_S at the pace of
# the last minute. Healthy GPUs at full speed stay 10 °C, a quarter of the link and a tenth of their clock away, on
# their memory plateau and near their gang.
SCREEN = {
    "thermal_throttle": 8.0, "power_throttle": 0.12, "nvlink_saturation": 0.25, "memory_exhaustion": 4.0,
    "straggler": 0.2,
}  # fmt: skip
SCREEN_S = 240.0
SCREEN_GROWTH_GIB = 0.25
SCREEN_STEP_RATIO = 1.10
# Changes smaller than these are noise, in the unit of the class's distance.
TOLERANCE = {
    "thermal_throttle": 0.5, "power_throttle": 0.02, "nvlink_saturation": 0.02, "memory_exhaustion": 0.05,
    "straggler": 0.02,
}  # fmt: skip
JOB_WINDOW = {name: name != "thermal_throttle" for name in CLASSES}  # of heat what was before the job counts too

PRIMARY = (
    "last", "mean", "spread", "max", "min", "slope_short", "slope_mid", "slope_all", "residual_short",
    "acceleration", "time_to_limit_short_s", "time_to_limit_mid_s", "since_change_s", "near_ratio",
    "set_ratio", "rise_30s", "new_low",
)  # fmt: skip
_SECONDARY = (
    "gpu_temp_c", "mem_temp_c", "gpu_power_w", "power_ratio", "sm_clock_hz", "activity_ratio", "nvlink_fill_ratio",
    "over_plateau_gib", "step_ratio", "inlet_temp_c",
)  # fmt: skip
STATS = ("last", "change", "slope")
AROUND = (*PEERS, *PORTS)
FEATURES = (
    *PRIMARY,
    *(f"{name}_{stat}" for name in _SECONDARY for stat in STATS),
    *AROUND,
    *PHASE,
    *MOTION,
    "data_age_s",
    "samples",
    "job_age_s",
)
FEATURE_INDEX = {name: i for i, name in enumerate(FEATURES)}


@dataclass(frozen=True, slots=True)
class FeatureBlock:
    """Features of some GPUs for one class.

    Attributes:
        bottleneck_class: The class whose distance is the primary quantity.
        gpus: Index of each row's GPU.
        at_s: Moment of each row, seconds.
        matrix: Shape (rows, features), float32, NaN where not known.
        index: Column of each feature; that of GPUs, or of a class of nodes, ports or queues.
    """

    bottleneck_class: str
    gpus: NDArray[np.int64]
    at_s: NDArray[np.float64]
    matrix: Floats
    index: Mapping[str, int] = field(default_factory=lambda: FEATURE_INDEX)

    def column(self, name: str) -> Floats:
        """One feature, shape (rows,)."""
        return self.matrix[:, self.index[name]]


def slope_of(x: Floats, t: Floats, mask: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Least squares per row: slope, residual spread, number of points; NaN under 3 points."""
    n = mask.sum(axis=1, dtype=np.float32)
    safe = np.maximum(n, 1)
    tz, xz = np.where(mask, t, 0), np.where(mask, x, 0)
    t_mean, x_mean = tz.sum(axis=1) / safe, xz.sum(axis=1) / safe
    dt = np.where(mask, t - t_mean[:, None], 0)
    dx = np.where(mask, x - x_mean[:, None], 0)
    sxx, sxy, syy = (dt * dt).sum(axis=1), (dt * dx).sum(axis=1), (dx * dx).sum(axis=1)
    ok = (n >= 3) & (sxx > 0)
    slope = np.where(ok, sxy / np.where(ok, sxx, 1), np.nan).astype(np.float32)
    rest = np.maximum(syy - np.where(ok, slope, 0) * sxy, 0) / np.maximum(n - 2, 1)
    return slope, np.where(ok, np.sqrt(rest), np.nan).astype(np.float32), n


def newest_of(x: Floats, mask: NDArray[np.bool_]) -> Floats:
    """Newest masked value per row (slots run oldest to newest), NaN without one."""
    slot = x.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    return np.where(mask.any(axis=1), x[np.arange(len(x)), slot], np.nan)


def oldest_of(x: Floats, mask: NDArray[np.bool_]) -> Floats:
    """Oldest masked value per row, NaN without one."""
    slot = np.argmax(mask, axis=1)
    return np.where(mask.any(axis=1), x[np.arange(len(x)), slot], np.nan)


def time_to_limit_s(last: Floats, slope: Floats) -> Floats:
    """Seconds until a straight trend reaches distance 0; `FAR_S` when it never does."""
    with np.errstate(invalid="ignore", divide="ignore"):
        seconds = np.where(slope < 0, last / -slope, FAR_S)
    return np.clip(np.where(np.isnan(last), np.nan, seconds), 0, FAR_S).astype(np.float32)


def window_features(
    bottleneck_class: str,
    values: Floats,
    ages: Floats,
    is_even: NDArray[np.bool_],
    job_age_s: NDArray[np.float64],
    around: Floats,
) -> Floats:
    """Features of gathered windows.

    Args:
        bottleneck_class: One of `features.conditions.CLASSES`.
        values: Shape (len(QUANTITIES), rows, slots), oldest first, NaN where there is no sample.
        ages: Seconds between each sample and the row's moment, shape (rows, slots), NaN where there is no sample.
        is_even: Samples that stand for equal times, shape (rows, slots): means, shares and long trends are theirs, so
            that the dense samples of the near past do not outweigh the rest.
        job_age_s: Seconds since the job was first seen on the GPU, shape (rows,), NaN when unknown.
        around: Peers, neighbours and ports at the row's moment, shape (rows, len(AROUND)).

    Returns:
        Shape (rows, len(FEATURES)), float32.
    """
    rows = ages.shape[0]
    out = np.full((rows, len(FEATURES)), np.nan, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        alive = (ages >= 0) & (ages <= WINDOW_S)
        of_job = alive & ~(ages > job_age_s[:, None])  # where the job's age is unknown, all of the window counts
    t = -ages
    x = values[INDEX[DISTANCE[bottleneck_class]]]
    seen = (of_job if JOB_WINDOW[bottleneck_class] else alive) & ~np.isnan(x)
    course_stats(out, x, t, seen, is_even, tolerance=TOLERANCE[bottleneck_class], near=NEAR[bottleneck_class])
    column = len(PRIMARY)
    for name in _SECONDARY:
        v = values[INDEX[name]]
        mask = alive & ~np.isnan(v)
        short = mask & (t >= -SHORT_S)
        last = newest_of(v, mask)
        out[:, column] = last
        out[:, column + 1] = last - oldest_of(v, short)
        out[:, column + 2] = slope_of(v, t, short)[0]
        column += len(STATS)
    out[:, column : column + len(AROUND)] = around
    column += len(AROUND)
    activity = values[INDEX["activity_ratio"]]
    phase = phase_features(activity, t, alive & ~np.isnan(activity), is_even)
    out[:, column : column + len(PHASE)] = phase
    column += len(PHASE)
    quantity = (values[INDEX[name]] for name in ("over_plateau_gib", "step_ratio", "gpu_temp_c", "gpu_power_w",
                                                 "inlet_temp_c"))  # fmt: skip
    since = out[:, FEATURE_INDEX["since_change_s"]]
    out[:, column : column + len(MOTION)] = motion_features(bottleneck_class, x, t, seen, since, *quantity)
    column += len(MOTION)
    out[:, column] = newest_of(ages, alive)
    out[:, column + 1] = alive.sum(axis=1)
    out[:, column + 2] = np.minimum(job_age_s, FAR_S)
    return out


def course_stats(
    out: Floats, x: Floats, t: Floats, seen: NDArray[np.bool_], is_even: NDArray[np.bool_], *, tolerance: float,
    near: float,
) -> None:  # fmt: skip
    """Write the statistics `PRIMARY` of a distance over its window into the first columns of `out`.

    Args:
        out: Shape (rows, at least len(PRIMARY)).
        x: Distances, shape (rows, slots), oldest first.
        t: Time of each before the row's moment, ≤ 0, seconds.
        seen: Samples that count.
        is_even: Samples that stand for equal times.
        tolerance: Changes smaller than this are noise.
        near: Distance from which a sample counts as near its limit.
    """
    some = seen.any(axis=1)
    last = newest_of(x, seen)
    even = seen & is_even
    n = even.sum(axis=1, dtype=np.float32)
    safe = np.where(n > 0, n, np.nan)
    mean = np.where(even, x, 0).sum(axis=1) / safe
    deviation = np.where(even, x - mean[:, None], 0)
    spread = np.sqrt((deviation * deviation).sum(axis=1) / safe)
    high = np.where(seen, x, -np.inf).max(axis=1, initial=-np.inf)
    low = np.where(seen, x, np.inf).min(axis=1, initial=np.inf)
    slope_short, residual, _ = slope_of(x, t, seen & (t >= -SHORT_S))
    slope_mid = slope_of(x, t, even & (t >= -MID_S))[0]
    slope_all = slope_of(x, t, even)[0]
    # How long the value has stood where it is: age of the oldest sample after the last one that differed.
    differs = seen & (np.abs(x - last[:, None]) > tolerance)
    later = seen & ~(np.cumsum(differs[:, ::-1], axis=1)[:, ::-1] > 0)
    since = -oldest_of(t, later)
    # Against the lowest distance before the near past: negative where this window has not been before. A level that
    # only comes back after a checkpoint or a start is not on its way to the limit.
    old = seen & (t < -SHORT_S)
    earlier = np.where(old.any(axis=1), np.where(old, x, np.inf).min(axis=1, initial=np.inf), np.nan)
    stats = (
        last, mean, spread, high, low, slope_short, slope_mid, slope_all, residual, slope_short - slope_mid,
        time_to_limit_s(last, slope_short), time_to_limit_s(last, slope_mid), since,
        (even & (x <= near)).sum(axis=1) / safe, (even & (x <= 0)).sum(axis=1) / safe,
        last - newest_of(x, seen & (t <= newest_of(t, seen)[:, None] - 30)), last - earlier,
    )  # fmt: skip
    for i, stat in enumerate(stats):
        out[:, i] = np.where(some, stat, np.nan)


def screen(
    bottleneck_class: str,
    distance: Floats,
    earlier: Floats,
    elapsed_s: NDArray[np.float64],
    over_plateau_gib: Floats,
    step_ratio: Floats,
) -> NDArray[np.bool_]:
    """Which GPUs deserve a close look.

    Args:
        bottleneck_class: The class.
        distance: Newest distance, shape (gpus,).
        earlier: Distance about a minute before, NaN where there is none.
        elapsed_s: Seconds between the two.
        over_plateau_gib: Newest memory over the job's plateau, GiB.
        step_ratio: Newest step time against the job's own.

    Returns:
        True where the GPU is near its limit or would reach it within `SCREEN_S` at its present pace.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        pace = (distance - earlier) / elapsed_s
        near = distance <= SCREEN[bottleneck_class]
        if bottleneck_class == "memory_exhaustion":
            near &= over_plateau_gib >= SCREEN_GROWTH_GIB
        soon = distance + pace * SCREEN_S <= 0
        picked = near | soon
        if bottleneck_class == "nvlink_saturation":
            picked |= step_ratio >= SCREEN_STEP_RATIO
    return picked & ~np.isnan(distance)

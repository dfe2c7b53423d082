"""How far each GPU is from each limit, one sample at a time.

Here belong the classes of single GPUs and the quantities that windows and labels are made of: the distance to the limit
of each class, and what else its course is told by. What has to be remembered of a job for that stands in
`features/job_state.py`, what of its gang in `features/gangs.py`. A class is set exactly where its distance is ≤ 0.
Live rings and history both pass through `quantities`, so that their numbers agree; windows stand in
`features/windows.py`, onsets of these and all other classes in `features/labels.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.classes import CLASSES
from features.gangs import rank_steps
from features.job_state import JobState
from features.straggler import CONSECUTIVE, SLOW_RATIO
from features.thresholds import GIB

Floats = NDArray[np.float32]

__all__ = ["CLASSES", "COARSE", "DISTANCE", "INDEX", "INPUTS", "QUANTITIES", "inputs", "quantities"]
# Distance to the limit, in the unit of its class: °C, share of the job's own clock, share of the achievable rate, GiB,
# share of the gang's step time. Set where it is ≤ 0.
DISTANCE: dict[str, str] = {
    "thermal_throttle": "thermal_distance_c",
    "power_throttle": "power_distance_ratio",
    "nvlink_saturation": "nvlink_distance_ratio",
    "memory_exhaustion": "memory_distance_gib",
    "straggler": "straggler_distance_ratio",
}
QUANTITIES = (
    *DISTANCE.values(), "gpu_temp_c", "mem_temp_c", "gpu_power_w", "power_ratio", "sm_clock_hz", "activity_ratio",
    "nvlink_fill_ratio", "over_plateau_gib", "step_ratio", "inlet_temp_c",
)  # fmt: skip
INDEX = {name: i for i, name in enumerate(QUANTITIES)}
# Steps that some are told in, finer than exporters tell them: rings keep their numbers, to 32,767 either way.
COARSE = {
    "power_distance_ratio": 1 / 4096, "straggler_distance_ratio": 1 / 4096, "gpu_temp_c": 1 / 128,
    "mem_temp_c": 1 / 128, "power_ratio": 1 / 4096, "sm_clock_hz": 125e3, "activity_ratio": 1 / 16384,
    "nvlink_fill_ratio": 1e-4, "step_ratio": 1 / 2048, "inlet_temp_c": 1 / 128,
}  # fmt: skip
MOST_STEPS = 32_767
_STEPS = np.array([[step] for step in COARSE.values()], dtype=np.float32)
_COARSE = [INDEX[name] for name in COARSE]
INPUTS = (
    "gpu_util_ratio", "engine_active_ratio", "sm_active_ratio", "fb_used_bytes", "fb_reserved_bytes",
    "fb_total_bytes", "gpu_power_w", "power_limit_w", "gpu_temp_c", "mem_temp_c", "gpu_temp_margin_c", "sm_clock_hz",
    "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "is_thermal_slowdown", "is_power_brake", "is_power_capped",
    "step_time_s", "own_step_time_s", "inlet_temp_c",
)  # fmt: skip

JUST_CLEAR = np.float32(1e-3)  # a level beyond its limit that the class's second condition keeps clear


def inputs(frame: pl.DataFrame) -> dict[str, Floats]:
    """Input columns of a frame as float32, NaN where null or where the column is absent; flags are 0 and 1.

    Args:
        frame: Rows with any of the columns of `core_gpu_samples` (and `inlet_temp_c` of the node).

    Returns:
        Name to array of shape (rows,).
    """
    absent = np.full(frame.height, np.nan, dtype=np.float32)
    return {
        name: frame[name].cast(pl.Float32).to_numpy(writable=False) if name in frame.columns else absent
        for name in INPUTS
    }


def quantities(
    columns: Mapping[str, Floats],
    limits: Mapping[str, Floats],
    state: JobState,
    gpu: NDArray[np.int64],
    ts: NDArray[np.float64],
    job: NDArray[np.int64],
    gang_step: Floats,
) -> tuple[Floats, NDArray[np.float64]]:
    """Quantities of one sample of each of some GPUs.

    Args:
        columns: As of `inputs`.
        limits: Limits of each row's GPU, as of `ThresholdBook.arrays`.
        state: What is remembered of jobs; updated.
        gpu: Index of each row's GPU in `state`, each once.
        ts: Times, seconds.
        job: Job codes, -1 for none.
        gang_step: Median step time of each row's gang at the same time, as of `Gangs.medians`.

    Returns:
        Array of shape (len(QUANTITIES), rows), NaN where not known, and since when each job has been seen, seconds.
    """
    out = np.full((len(QUANTITIES), len(gpu)), np.nan, dtype=np.float32)
    activity = columns["sm_active_ratio"]
    for name in ("engine_active_ratio", "gpu_util_ratio"):
        activity = np.where(np.isnan(activity), columns[name], activity)
    over, step_ratio, since = state.update(
        gpu, ts, job, columns["fb_used_bytes"], columns["fb_total_bytes"], activity, columns["step_time_s"]
    )
    for name in ("gpu_temp_c", "mem_temp_c", "gpu_power_w", "sm_clock_hz", "inlet_temp_c"):
        out[INDEX[name]] = columns[name]
    out[INDEX["activity_ratio"]] = activity
    out[INDEX["over_plateau_gib"]] = over / np.float32(GIB)
    out[INDEX["step_ratio"]] = step_ratio
    with np.errstate(invalid="ignore"):
        out[INDEX["thermal_distance_c"]] = _thermal(columns, limits)
        fill = np.fmax(columns["nvlink_tx_bytes_per_s"], columns["nvlink_rx_bytes_per_s"])
        fill = fill / limits["nvlink_one_way_bytes_per_s"]
        out[INDEX["nvlink_fill_ratio"]] = fill
        nvlink = limits["nvlink_full_ratio"] - fill
        # Full links that cost no step time are a job at full speed.
        harmless = step_ratio <= limits["step_slow_ratio"]
        out[INDEX["nvlink_distance_ratio"]] = np.where(harmless, np.maximum(nvlink, JUST_CLEAR), nvlink)
        out[INDEX["memory_distance_gib"]] = _memory(columns, limits, over)
        limit = columns["power_limit_w"]
        out[INDEX["power_ratio"]] = columns["gpu_power_w"] / np.where(limit > 0, limit, np.float32(np.nan))
    clock = columns["sm_clock_hz"]
    power = _power(columns, limits, state.clock_ratio(gpu, clock), job >= 0)
    with np.errstate(invalid="ignore"):
        state.learn_clock(gpu, ts, clock, activity, power <= 0)
    out[INDEX["power_distance_ratio"]] = power
    out[INDEX["straggler_distance_ratio"]] = _straggler(columns, state, gpu, ts, job, gang_step)
    # What rings keep in steps, history must not know better.
    out[_COARSE] = np.clip(np.rint(out[_COARSE] / _STEPS), -MOST_STEPS, MOST_STEPS) * _STEPS
    return out, since


def _power(
    columns: Mapping[str, Floats], limits: Mapping[str, Floats], clock_ratio: Floats, has_job: NDArray[np.bool_]
) -> Floats:
    """How far the clock of a capped GPU is above what counts as held back; without a cap all of the clock is there."""
    brake, capped, low = columns["is_power_brake"], columns["is_power_capped"], limits["clock_low_ratio"]
    share, whole = clock_ratio - low, 1 - low
    is_free = (capped == 0) | (np.isnan(capped) & (brake == 0)) | ((capped == 1) & ~has_job)
    distance = np.where(is_free, np.fmax(share, whole), np.where(capped == 1, share, np.float32(np.nan)))
    return np.where(brake == 1, np.fmin(distance, 0), distance).astype(np.float32)


def _straggler(
    columns: Mapping[str, Floats],
    state: JobState,
    gpu: NDArray[np.int64],
    ts: NDArray[np.float64],
    job: NDArray[np.int64],
    gang_step: Floats,
) -> Floats:
    """How much longer its own step could take before a rank counts as slow; slow only from the third such step on."""
    step, _ = rank_steps(columns, job)
    if np.isnan(step).all():
        return np.full(len(gpu), np.nan, dtype=np.float32)
    distance = np.float32(SLOW_RATIO) - step / gang_step
    with np.errstate(invalid="ignore"):
        is_slow = distance < 0
    is_set = state.slow_in_a_row(gpu, ts, step, is_slow) >= CONSECUTIVE
    return np.where(is_set, distance, np.maximum(distance, JUST_CLEAR)).astype(np.float32)


def _thermal(columns: Mapping[str, Floats], limits: Mapping[str, Floats]) -> Floats:
    flag, margin = columns["is_thermal_slowdown"], columns["gpu_temp_margin_c"]
    by_table = limits["slowdown_temp_c"] - columns["gpu_temp_c"]
    # A fixed temperature is only a stand-in: where the GPU itself says it is not slowing down, it is not.
    by_table = np.where(flag == 0, np.maximum(by_table, JUST_CLEAR), by_table)
    distance = np.where(np.isnan(margin), by_table, margin)
    distance = np.where(flag == 1, np.fmin(distance, np.float32(0)), distance)
    return distance.astype(np.float32)


def _memory(columns: Mapping[str, Floats], limits: Mapping[str, Floats], over: Floats) -> Floats:
    used, total = columns["fb_used_bytes"], columns["fb_total_bytes"]
    reserved = np.nan_to_num(columns["fb_reserved_bytes"])  # many exporters count it as used already
    distance = (total - reserved - used - limits["memory_floor_bytes"]) / np.float32(GIB)
    grown = over >= limits["plateau_growth_ratio"] * total
    return np.where(grown, distance, np.maximum(distance, JUST_CLEAR)).astype(np.float32)

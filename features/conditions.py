"""How far each GPU is from each limit, one sample at a time, and what has to be remembered of its job for that.

Here belong the quantities that windows and labels are made of: the distance to the limit of each bottleneck class,
and the two running facts about a job that levels cannot tell: the plateau its memory settled on and its own step time.
A class is set exactly where its distance is ≤ 0. Live rings and history both pass through `quantities`, so that their
numbers agree; windows stand in `features/windows.py`, onsets of these and all other classes in `features/labels.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.thresholds import GIB

Floats = NDArray[np.float32]

# Classes with a distance in a GPU's own samples: those that windows and forecasters know. Labels know more.
CLASSES = ("thermal_throttle", "nvlink_saturation", "memory_exhaustion")
# Distance to the limit, in the unit of its class: °C, share of the achievable rate, GiB. Set where it is ≤ 0.
DISTANCE = {
    "thermal_throttle": "thermal_distance_c",
    "nvlink_saturation": "nvlink_distance_ratio",
    "memory_exhaustion": "memory_distance_gib",
}
QUANTITIES = (
    "thermal_distance_c", "nvlink_distance_ratio", "memory_distance_gib", "gpu_temp_c", "mem_temp_c", "gpu_power_w",
    "sm_clock_hz", "activity_ratio", "nvlink_fill_ratio", "over_plateau_gib", "step_ratio", "inlet_temp_c",
)  # fmt: skip
INDEX = {name: i for i, name in enumerate(QUANTITIES)}
INPUTS = (
    "gpu_util_ratio", "engine_active_ratio", "sm_active_ratio", "fb_used_bytes", "fb_reserved_bytes",
    "fb_total_bytes", "gpu_power_w", "gpu_temp_c", "mem_temp_c", "gpu_temp_margin_c", "sm_clock_hz",
    "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "is_thermal_slowdown", "step_time_s", "inlet_temp_c",
)  # fmt: skip
# What labels need besides: read from history, not kept in rings.
LABEL_FLAGS = ("is_power_brake", "is_power_capped", "step_time_s")
LABEL_INPUTS = tuple(dict.fromkeys((*INPUTS, *LABEL_FLAGS)))

JUST_CLEAR = np.float32(1e-3)  # a level beyond its limit that the class's second condition keeps clear
SETTLED_S = 120.0  # memory that stays this long within SETTLED_RATIO of the device's is a plateau
SETTLED_RATIO = 0.01
FOLLOW_S = 600.0  # how long a plateau may still creep up (allocators fill their cache) once it is found
PLATEAU_LEVEL_RATIO = 0.10  # less than this of the device's memory is a job that has not loaded yet
PLATEAU_ACTIVITY = 0.05  # and a GPU that never worked meanwhile is still loading
RELEASED_RATIO = 0.25  # memory under this share of the plateau: another process begins
STEP_WARMUP = 5  # steps before a job's own step time is known
STEP_GAIN = 0.005  # weight of one more step in the job's own step time
STEP_CLIP = 0.10  # and how much one step can say, in log


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


class JobState:
    """What is remembered of the job on each GPU: since when, its memory plateau, its own step time.

    Plateau: the first level that held for `SETTLED_S` within `SETTLED_RATIO` of device memory while the GPU worked,
    followed upwards while it still settles, for `FOLLOW_S` at most. Then it stays for the job's life, so that neither
    a slow leak nor a full but steady cache moves it.
    Step time: a running median-like mean of log step times in which no single step weighs much.
    """

    _FLOATS = ("plateau", "low", "high", "worked", "log_step")
    _TIMES = ("since", "settling_since", "found")

    def __init__(self, gpus: int = 0) -> None:
        self.job = np.full(gpus, -2, dtype=np.int64)  # -2: never seen, -1: no job known
        self.since = np.full(gpus, np.nan)
        self.settling_since = np.full(gpus, np.nan)
        self.found = np.full(gpus, np.nan)
        self.steps = np.zeros(gpus, dtype=np.int32)
        for name in self._FLOATS:
            setattr(self, name, np.full(gpus, np.nan, dtype=np.float32))
        self.plateau: Floats
        self.low: Floats
        self.high: Floats
        self.worked: Floats
        self.log_step: Floats

    def grow(self, gpus: int) -> None:
        """Make room for more GPUs; those there keep their state."""
        fresh = JobState(gpus)
        old = len(self.job)
        for name in ("job", "steps", *self._TIMES, *self._FLOATS):
            getattr(fresh, name)[:old] = getattr(self, name)
            setattr(self, name, getattr(fresh, name))

    def update(
        self,
        gpu: NDArray[np.int64],
        ts: NDArray[np.float64],
        job: NDArray[np.int64],
        used: Floats,
        total: Floats,
        activity: Floats,
        step_time: Floats,
    ) -> tuple[Floats, Floats, NDArray[np.float64]]:
        """Take one sample of each of some GPUs.

        Args:
            gpu: Indices of GPUs, each once.
            ts: Times of the samples, seconds.
            job: Codes of the jobs, -1 where there is none.
            used: Device memory in use, bytes.
            total: Device memory in all, bytes.
            activity: Activity ratio, NaN where not known.
            step_time: Duration of the last step, seconds, NaN where not known.

        Returns:
            Memory over the plateau in bytes (NaN until there is one), step time ÷ the job's own (NaN until known), and
            since when the job has been seen on the GPU, seconds. Each of shape (len(gpu),).
        """
        plateau = self.plateau[gpu]
        changed = self.job[gpu] != job
        with np.errstate(invalid="ignore"):
            released = used < RELEASED_RATIO * plateau
        begins = changed | released
        if begins.any():
            fresh = gpu[begins]
            self.job[fresh] = job[begins]
            self.since[fresh] = ts[begins]
            self.settling_since[fresh] = self.found[fresh] = np.nan
            self.plateau[fresh] = self.low[fresh] = self.high[fresh] = self.worked[fresh] = np.nan
            self.log_step[fresh] = np.nan
            self.steps[fresh] = 0
            plateau = self.plateau[gpu]
        self._settle(gpu, ts, plateau, used, total, activity)
        ratio = self._step(gpu, step_time)
        over = used - self.plateau[gpu]
        return over, ratio, self.since[gpu]

    def _settle(
        self,
        gpu: NDArray[np.int64],
        ts: NDArray[np.float64],
        plateau: Floats,
        used: Floats,
        total: Floats,
        activity: Floats,
    ) -> None:
        with np.errstate(invalid="ignore"):
            young = np.isnan(plateau) | (ts - self.found[gpu] <= FOLLOW_S)
            seeking = young & (used >= PLATEAU_LEVEL_RATIO * total)
        if not seeking.any():
            return
        g, t, u, limit = gpu[seeking], ts[seeking], used[seeking], SETTLED_RATIO * total[seeking]
        low, high = np.fmin(self.low[g], u), np.fmax(self.high[g], u)
        # An absent activity column must not keep a plateau from being found.
        act = np.where(np.isnan(activity[seeking]), np.float32(1), activity[seeking])
        worked = np.fmax(self.worked[g], act)
        restart = (high - low > limit) | np.isnan(self.settling_since[g])
        low, high, worked = np.where(restart, u, low), np.where(restart, u, high), np.where(restart, act, worked)
        started = np.where(restart, t, self.settling_since[g])
        self.low[g], self.high[g], self.worked[g], self.settling_since[g] = low, high, worked, started
        settled = (t - started >= SETTLED_S) & (worked >= PLATEAU_ACTIVITY)
        self.plateau[g[settled]] = np.fmax(self.plateau[g], (low + high) / 2)[settled]
        self.found[g[settled]] = np.fmin(self.found[g], t)[settled]

    def _step(self, gpu: NDArray[np.int64], step_time: Floats) -> Floats:
        ratio = np.full(len(gpu), np.nan, dtype=np.float32)
        with np.errstate(invalid="ignore"):
            known = step_time > 0
        if not known.any():
            return ratio
        g = gpu[known]
        log_x, base, n = np.log(step_time[known]), self.log_step[g], self.steps[g]
        base = np.where(np.isnan(base), log_x, base)
        ratio[known] = np.where(n >= STEP_WARMUP, np.exp(log_x - base), np.nan)
        gain = np.maximum(1.0 / (n + 1), STEP_GAIN).astype(np.float32)
        early = n < STEP_WARMUP
        delta = np.where(early, log_x - base, np.clip(log_x - base, -STEP_CLIP, STEP_CLIP))
        self.log_step[g] = base + gain * delta
        self.steps[g] = n + 1
        return ratio


def quantities(
    columns: Mapping[str, Floats],
    limits: Mapping[str, Floats],
    state: JobState,
    gpu: NDArray[np.int64],
    ts: NDArray[np.float64],
    job: NDArray[np.int64],
) -> tuple[Floats, NDArray[np.float64]]:
    """Quantities of one sample of each of some GPUs.

    Args:
        columns: As of `inputs`.
        limits: Limits of each row's GPU, as of `ThresholdBook.arrays`.
        state: What is remembered of jobs; updated.
        gpu: Index of each row's GPU in `state`, each once.
        ts: Times, seconds.
        job: Job codes, -1 for none.

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
    return out, since


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

"""What is remembered of the job on each GPU: since when, its memory plateau, its own step time and clock, slow steps.

Here belong the running facts that no single sample tells. Distances to limits, which lean on them, stand in
`features/conditions.py`; what is known of a whole gang in `features/gangs.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SETTLED_S = 120.0  # memory that stays this long within SETTLED_RATIO of the device's is a plateau
SETTLED_RATIO = 0.01
FOLLOW_S = 600.0  # how long a plateau may still creep up (allocators fill their cache) once it is found
PLATEAU_LEVEL_RATIO = 0.10  # less than this of the device's memory is a job that has not loaded yet
PLATEAU_ACTIVITY = 0.05  # and a GPU that never worked meanwhile is still loading
RELEASED_RATIO = 0.25  # memory under this share of the plateau: another process begins
STEP_WARMUP = 5  # steps before a job's own step time is known
STEP_MEMORY_S = 3000.0  # how long the job's own step time remembers, at any sampling
STEP_CLIP = 0.10  # and how much one step can say, in log
CLOCK_WARMUP_S = 120.0  # of work, before a job's own clock is believed
CLOCK_MEMORY_S = 3_600.0  # of work: how far back the job's own clock reaches
CLOCK_CLIP = 0.10  # how much one sample can say of it, in log
CLOCK_HELD_WEIGHT = 0.1  # of a sample that power holds back
CLOCK_GAP_S = 60.0  # a sample stands for this long at most
CLOCK_ACTIVITY = 0.05  # clocks of a GPU that does not work say nothing of what the job is used to
MANY_STEPS = 1_000_000


class JobState:
    """What is remembered of the job on each GPU, as arrays over GPUs.

    Plateau: the first level that held for `SETTLED_S` within `SETTLED_RATIO` of device memory while the GPU worked,
    followed upwards while it still settles, for `FOLLOW_S` at most. Then it stays for the job's life, so that neither
    a slow leak nor a full but steady cache moves it.
    Step time: a running median-like mean of log step times in which no single step weighs much.
    Clock: the same over the time the GPU works; what power holds back moves it next to nothing.
    Slow steps: how many steps in a row have been slow beside the gang; a step that is told again is no further one.
    """

    _FLOATS = ("plateau", "low", "high", "worked", "log_step", "log_clock", "worked_s", "newest_step")
    _TIMES = ("since", "settling_since", "found", "clock_at", "step_at", "stepped")
    _COUNTS = ("steps", "slow_steps")

    def __init__(self, gpus: int = 0) -> None:
        self.job = np.full(gpus, -2, dtype=np.int64)  # -2: never seen, -1: no job known
        self.since = np.full(gpus, np.nan)
        self.settling_since = np.full(gpus, np.nan)
        self.found = np.full(gpus, np.nan)
        self.clock_at = np.full(gpus, np.nan)
        self.step_at = np.full(gpus, np.nan)
        self.stepped = np.full(gpus, np.nan)
        self.steps = np.zeros(gpus, dtype=np.int32)
        self.slow_steps = np.zeros(gpus, dtype=np.int32)
        for name in self._FLOATS:
            setattr(self, name, np.full(gpus, np.nan, dtype=np.float32))
        self.plateau: Floats
        self.low: Floats
        self.high: Floats
        self.worked: Floats
        self.log_step: Floats
        self.log_clock: Floats
        self.worked_s: Floats
        self.newest_step: Floats

    def grow(self, gpus: int) -> None:
        """Make room for more GPUs; those there keep their state."""
        fresh = JobState(gpus)
        old = len(self.job)
        for name in ("job", *self._COUNTS, *self._TIMES, *self._FLOATS):
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
            for name in (*self._TIMES, *self._FLOATS):
                if name != "since":
                    getattr(self, name)[fresh] = np.nan
            for name in self._COUNTS:
                getattr(self, name)[fresh] = 0
            plateau = self.plateau[gpu]
        self._settle(gpu, ts, plateau, used, total, activity)
        ratio = self._step(gpu, ts, step_time)
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

    def _step(self, gpu: NDArray[np.int64], ts: NDArray[np.float64], step_time: Floats) -> Floats:
        ratio = np.full(len(gpu), np.nan, dtype=np.float32)
        with np.errstate(invalid="ignore"):
            known = step_time > 0
        if not known.any():
            return ratio
        g = gpu[known]
        log_x, base, n = np.log(step_time[known]), self.log_step[g], self.steps[g]
        base = np.where(np.isnan(base), log_x, base)
        ratio[known] = np.where(n >= STEP_WARMUP, np.exp(log_x - base), np.nan)
        elapsed = np.maximum(np.nan_to_num(ts[known] - self.stepped[g]), 0)
        gain = np.maximum(1.0 / (n + 1), -np.expm1(-elapsed / STEP_MEMORY_S)).astype(np.float32)
        early = n < STEP_WARMUP
        delta = np.where(early, log_x - base, np.clip(log_x - base, -STEP_CLIP, STEP_CLIP))
        self.log_step[g] = base + gain * delta
        self.steps[g], self.stepped[g] = n + 1, ts[known]
        return ratio

    def clock_ratio(self, gpu: NDArray[np.int64], clock: Floats) -> Floats:
        """Clock ÷ what the job is used to on that GPU, after `update` has taken the same sample.

        Args:
            gpu: Indices of GPUs, each once.
            clock: Clocks, Hz, NaN where not known.

        Returns:
            Shape (len(gpu),); NaN without a job or a clock. A job that has worked for less than `CLOCK_WARMUP_S` is
            used to nothing yet: its ratio is never under 1.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.exp(np.log(clock) - self.log_clock[gpu])
            ratio = np.where(self.worked_s[gpu] >= CLOCK_WARMUP_S, ratio, np.fmax(ratio, np.float32(1)))
            known = (clock > 0) & (self.job[gpu] >= 0)
        return np.where(known, ratio, np.float32(np.nan)).astype(np.float32)

    def learn_clock(
        self, gpu: NDArray[np.int64], ts: NDArray[np.float64], clock: Floats, activity: Floats, is_held: NDArray
    ) -> None:
        """Take a sample's clock into what the job is used to.

        Args:
            gpu: Indices of GPUs, each once.
            ts: Times of the samples, seconds.
            clock: Clocks, Hz, NaN where not known.
            activity: Activity ratio, NaN where not known: then the GPU counts as working.
            is_held: Held back by power: such a clock is hardly what the job is used to.
        """
        with np.errstate(invalid="ignore"):
            known = (clock > 0) & (self.job[gpu] >= 0)
        if not known.any():
            return
        lasts = np.nan_to_num(np.clip(ts - self.clock_at[gpu], 0, CLOCK_GAP_S))
        self.clock_at[gpu[known]] = ts[known]
        with np.errstate(invalid="ignore"):
            works = known & ~(activity < CLOCK_ACTIVITY)
        g, log_x = gpu[works], np.log(clock[works])
        lasts = (lasts * np.where(is_held, CLOCK_HELD_WEIGHT, 1.0))[works].astype(np.float32)
        usual, worked = self.log_clock[g], np.nan_to_num(self.worked_s[g])
        usual = np.where(np.isnan(usual), log_x, usual)
        delta = log_x - usual
        delta = np.where(worked < CLOCK_WARMUP_S, delta, np.clip(delta, -CLOCK_CLIP, CLOCK_CLIP))
        self.worked_s[g] = worked + lasts
        self.log_clock[g] = usual + delta * lasts / np.clip(worked + lasts, 1.0, CLOCK_MEMORY_S)

    def slow_in_a_row(
        self, gpu: NDArray[np.int64], ts: NDArray[np.float64], step_time: Floats, is_slow: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """How many steps running have been slow beside the gang, after `update` has taken the same sample.

        Args:
            gpu: Indices of GPUs, each once.
            ts: Times of the samples, seconds.
            step_time: Duration of the GPU's own last step, seconds, NaN where not known.
            is_slow: Whether it was slow beside the gang; False where that is not known.

        Returns:
            Shape (len(gpu),).
        """
        with np.errstate(invalid="ignore"):
            # The same step is seen again until its successor ends: at the earliest one step time later.
            again = (step_time == self.newest_step[gpu]) & (ts - self.step_at[gpu] < step_time)
            new = (step_time > 0) & ~again
        g = gpu[new]
        self.newest_step[g], self.step_at[g] = step_time[new], ts[new]
        self.slow_steps[g] = np.where(is_slow[new], np.minimum(self.slow_steps[g] + 1, MANY_STEPS), 0)
        stopped = gpu[~is_slow]
        self.slow_steps[stopped] = 0
        return self.slow_steps[gpu]

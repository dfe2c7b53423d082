"""What jobs do on their GPUs: steps, checkpoints, evaluations, collectives, and the pace of a gang.

Periodic work is integrated in closed form, so the size of a span hardly matters. What disturbances change is set from
outside; what work costs in power, heat and memory is in `physics.py`. Nothing here is random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.hardware import GPUS_PER_NODE, MIB, Topology
from simulator.jobs import Job

NEVER = 1e12
NVLINK_SATURATED_RATIO = 0.9
STEP_SLOW_RATIO = 1.15


@dataclass(slots=True)
class Shares:
    """How each GPU spent a span, as shares of it (arrays over GPUs)."""

    warmup: np.ndarray
    pause: np.ndarray
    evaluation: np.ndarray
    burst: np.ndarray
    train: np.ndarray
    exposed: np.ndarray
    compute: np.ndarray


def _cycle(x: np.ndarray, period: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Time spent in the first `length` of each `period` within [0, x]."""
    n = np.floor(x / period)
    return n * length + np.minimum(x - n * period, length)


class Work:
    """Jobs, steps and traffic of every GPU. Times are seconds since the epoch.

    Attributes:
        link_factor, link_share: Longer link time of a step, and traffic that stays on the links, as disturbances set.
        power_clock, compute_factor, fabric_wait_s: Clock that power leaves, slower computing and time lost to the
            fabric in each step, as `strains.py` sets them.
        thermal_clock: Clock ÷ highest clock, as the thermal control set it.
        step0, step: Duration of an undisturbed step and of the present one, s.
        steps: Steps done, with the fraction of the current one.
    """

    def __init__(self, topology: Topology, start: float) -> None:
        self.topology, self.model, self.time = topology, topology.model, start
        n = topology.gpus
        self.node_of = np.arange(n) // GPUS_PER_NODE
        self.thermal_clock = np.ones(n)
        self.link_factor = np.ones(n)
        self.link_share = np.ones(n)
        self.power_clock = np.ones(n)
        self.compute_factor = np.ones(n)
        self.fabric_wait_s = np.zeros(n)
        self.is_strained = np.zeros(n, bool)
        self.extra_memory = np.zeros(n)
        # --- what the job on each GPU set
        self.jobs: list[Job | None] = [None] * n
        self.members: dict[int, np.ndarray] = {}
        self.job_code = np.full(n, -1, np.int64)
        self.rank = np.zeros(n, np.int64)  # in the job
        zeros = {
            name: np.zeros(n)
            for name in (
                "busy", "compute_s", "link_s", "exposed_ratio", "efficiency", "power_ratio", "sm", "tensor", "dram",
                "plateau", "warmup_s", "pause_s", "eval_s", "burst_s", "step0", "is_serving", "start",
            )
        }  # fmt: skip
        for name, array in zeros.items():
            setattr(self, name, array)
        self.pause_every = np.full(n, NEVER)
        self.eval_every = np.full(n, NEVER)
        self.pause_origin = np.zeros(n)
        self.eval_origin = np.zeros(n)
        self.reports = np.zeros(n, bool)
        self.steps = np.zeros(n)  # steps done, with the fraction of the current one
        self.step = np.ones(n)
        self.exposed_s = np.zeros(n)
        self.lost_s = np.zeros(n)
        # --- means over the current tick
        self.sums: dict[str, np.ndarray] = {}
        self.sum_s = 0.0
        self.begin_tick()

    # declared for readers and checkers; filled in __init__
    busy: np.ndarray
    compute_s: np.ndarray
    link_s: np.ndarray
    exposed_ratio: np.ndarray
    efficiency: np.ndarray
    power_ratio: np.ndarray
    sm: np.ndarray
    tensor: np.ndarray
    dram: np.ndarray
    plateau: np.ndarray
    warmup_s: np.ndarray
    pause_s: np.ndarray
    eval_s: np.ndarray
    burst_s: np.ndarray
    step0: np.ndarray
    is_serving: np.ndarray
    start: np.ndarray

    # --- jobs come and go ----------------------------------------------------------------------------------
    def occupy(self, job: Job) -> None:
        """Note whose the GPUs are, without any physics."""
        for gpu in job.gpus_held:
            self.jobs[gpu] = job

    def attach(self, job: Job, when: float) -> None:
        """Put a running job, whose profile is drawn, on its GPUs at time `when`."""
        g, p, start = np.array(job.gpus_held), job.profile, float(job.start or 0.0)
        assert p is not None
        self.time = when
        self.occupy(job)
        self.members[job.id] = g
        self.job_code[g], self.rank[g] = job.id, np.arange(len(g))
        self.busy[g], self.start[g] = 1.0, start
        self.compute_s[g], self.link_s[g] = p.compute_s, p.link_s
        self.exposed_ratio[g], self.efficiency[g] = p.exposed_ratio, p.link_efficiency
        self.power_ratio[g], self.sm[g], self.tensor[g], self.dram[g] = (
            p.power_ratio, p.sm_ratio, p.tensor_ratio, p.dram_ratio,
        )  # fmt: skip
        # Ranks do not hold exactly the same; a third of a percent apart.
        spread = 0.003 * np.sin(g * 12.9898 + job.id)
        total = (self.model.memory_total_mib - self.model.memory_reserved_mib) * MIB
        self.plateau[g] = np.minimum(p.memory_ratio + spread, 0.965) * total
        self.warmup_s[g], self.pause_s[g], self.eval_s[g], self.burst_s[g] = p.warmup_s, p.pause_s, p.eval_s, p.burst_s
        self.pause_every[g], self.eval_every[g] = p.pause_every_s, p.eval_every_s
        self.pause_origin[g] = p.pause_s + p.phase * (p.pause_every_s - p.pause_s)
        self.eval_origin[g] = p.eval_s + (p.phase * 7.31 % 1) * (p.eval_every_s - p.eval_s)
        self.is_serving[g] = float(p.kind == "serve")
        self.reports[g] = p.reports_steps
        self.step0[g] = self.step[g] = p.step_s
        self.exposed_s[g] = max(p.exposed_ratio * p.link_s, p.link_s - p.compute_s)
        self.steps[g] = max(0.0, self.time - start - p.warmup_s) / p.step_s
        self.lost_s[g] = 0.0
        self.extra_memory[g] = 0.0

    def detach(self, job: Job) -> None:
        """Take a job that ended off its GPUs."""
        for gpu in job.gpus_held:
            self.jobs[gpu] = None
        g = self.members.pop(job.id, None)
        if g is None:
            return
        job.lost_s = float(self.lost_s[g].max())
        self.job_code[g] = -1
        for array in (
            self.busy, self.compute_s, self.link_s, self.power_ratio, self.sm, self.tensor, self.dram, self.plateau,
            self.warmup_s, self.pause_s, self.eval_s, self.burst_s, self.step0, self.is_serving, self.steps,
            self.exposed_s, self.extra_memory,
        ):  # fmt: skip
            array[g] = 0.0
        self.pause_every[g] = self.eval_every[g] = NEVER
        self.step[g] = 1.0
        self.reports[g] = False

    def hold_cycles(self, job: Job, until: float) -> None:
        """Put off the checkpoints and evaluations of a job that are on or would begin before `until`.

        A job that still warms up begins its steps now.
        """
        g = self.members[job.id]
        self.warmup_s[g] = np.minimum(self.warmup_s[g], np.maximum(self.time - self.start[g], 1.0))
        age = self.time - self.start[g] - self.warmup_s[g]
        ahead = until - self.time
        for origin, every, length in (
            (self.pause_origin, self.pause_every, self.pause_s),
            (self.eval_origin, self.eval_every, self.eval_s),
        ):
            position = (age + origin[g]) % every[g]
            is_near = (position < length[g]) | (position + ahead > every[g])
            origin[g] += np.where(is_near, np.maximum(length[g], every[g] - ahead) - position, 0.0)

    # --- time passes ---------------------------------------------------------------------------------------
    def begin_tick(self) -> None:
        """Start new means: exporters report activity as a mean since their last sample."""
        names = ("warmup", "pause", "evaluation", "train", "compute", "exposed", "nvlink")
        self.sums = {name: np.zeros(self.topology.gpus) for name in names}
        self.sum_s = 0.0

    def shares(self, begin: float, end: float, steps0: np.ndarray | None = None) -> Shares:
        """How each GPU spends [begin, end); `steps0`: steps done at `begin`, else the present ones."""
        span = end - begin
        a = np.maximum(begin - self.start, 0.0)
        b = np.maximum(end - self.start, 0.0)
        w0, w1 = np.minimum(a, self.warmup_s), np.minimum(b, self.warmup_s)
        scale = self.busy / span
        warmup = (w1 - w0) * scale
        a, b = a - w0, b - w1
        pause = (
            _cycle(b + self.pause_origin, self.pause_every, self.pause_s)
            - _cycle(a + self.pause_origin, self.pause_every, self.pause_s)
        ) * scale
        ea, eb = a + self.eval_origin, b + self.eval_origin
        evaluation = (_cycle(eb, self.eval_every, self.eval_s) - _cycle(ea, self.eval_every, self.eval_s)) * scale
        burst = (_cycle(eb, self.eval_every, self.burst_s) - _cycle(ea, self.eval_every, self.burst_s)) * scale
        total = self.busy * np.minimum((end - self.start) / span, 1.0)
        train = np.clip(total - warmup - pause - evaluation, 0.0, 1.0)
        p0 = self.steps if steps0 is None else steps0
        p1 = p0 + train * span / self.step
        x = np.minimum(self.exposed_s / self.step, 1.0)
        edge = 1 - x
        n0, n1 = np.floor(p0), np.floor(p1)
        inside = (n1 - n0) * x + np.maximum(p1 - n1 - edge, 0) - np.maximum(p0 - n0 - edge, 0)
        done = p1 - p0
        exposed = np.divide(inside * train, done, out=np.zeros_like(done), where=done > 1e-9)
        return Shares(warmup, pause, evaluation, burst, train, exposed, train - exposed)

    def _pace(self) -> None:
        """Step time of each job: its slowest GPU's."""
        is_slow = (self.thermal_clock < 1) | (self.link_factor != 1) | self.is_strained
        slow = np.flatnonzero(is_slow & (self.step0 > 0))
        if len(slow) == 0:
            if self._was_slow:
                self.step = np.where(self.step0 > 0, self.step0, 1.0)
                self.exposed_s = np.maximum(self.exposed_ratio * self.link_s, self.link_s - self.compute_s)
                self.exposed_s *= self.busy
            self._was_slow = False
            return
        self._was_slow = True
        compute = self.compute_s / self.clock * self.compute_factor
        link = self.link_s * self.link_factor
        self.exposed_s = (np.maximum(self.exposed_ratio * link, link - compute) + self.fabric_wait_s) * self.busy
        own = compute + self.exposed_s
        self.step = np.where(self.step0 > 0, self.step0, 1.0)
        for code in np.unique(self.job_code[slow]):
            members = self.members[int(code)]
            self.step[members] = max(float(own[members].max()), float(self.step0[members[0]]))

    _was_slow = True

    @property
    def clock(self) -> np.ndarray:
        """Clock ÷ highest clock that heat and power leave, before the power limit holds it down."""
        return np.minimum(self.thermal_clock, self.power_clock)

    def own_step_s(self) -> np.ndarray:
        """Step time that each GPU would need alone, without waiting for its gang, s; 0 without steps."""
        compute = self.compute_s / self.clock * self.compute_factor
        link = self.link_s * self.link_factor
        exposed = np.maximum(self.exposed_ratio * link, link - compute) + self.fabric_wait_s
        return np.where(self.step0 > 0, (compute + exposed) * self.busy, 0.0)

    def nvlink_mean(self) -> np.ndarray:
        """NVLink traffic of one direction while training, mean over a step, bytes/s."""
        rate = self.efficiency * self.model.nvlink_achievable_bytes_per_s
        return rate * np.minimum(self.link_s * self.link_factor / self.step, 1.0)

    def _accumulate(self, shares: Shares, span: float) -> None:
        peak = self.efficiency * self.model.nvlink_achievable_bytes_per_s
        link = np.minimum(self.link_s * self.link_factor, self.step)
        hidden = np.maximum(link - self.exposed_s, 0) / np.maximum(self.step - self.exposed_s, 1e-9)
        linked = (self.link_s > 0) * self.model.nvlink_achievable_bytes_per_s
        nvlink = peak * (shares.exposed + shares.compute * hidden)
        nvlink += linked * (0.15 * (shares.evaluation - shares.burst) + 0.95 * shares.burst)
        sums = self.sums
        for name in ("warmup", "pause", "evaluation", "train", "compute", "exposed"):
            sums[name] += getattr(shares, name) * span
        sums["nvlink"] += nvlink * self.link_share * span
        self.sum_s += span
        if self._was_slow:
            slow = np.divide(self.step0, self.step, out=np.ones_like(self.step), where=self.step0 > 0)
            self.lost_s += shares.train * span * (1 - slow)

    def is_saturated(self) -> np.ndarray:
        """GPUs whose NVLink is full, or that lost lanes, while their job's steps are slow because of it.

        Where a job tells nobody its step time, full links are all that can be known.
        """
        full = self.nvlink_mean() >= NVLINK_SATURATED_RATIO * self.model.nvlink_achievable_bytes_per_s
        lame = self.link_share < 0.7
        slow = self.step > STEP_SLOW_RATIO * self.step0
        return ((full & (slow | ~self.reports)) | (lame & slow)) & (self.link_s > 0)

"""What work does to GPUs: power follows work, temperature follows power and air, throttling follows temperature.

State of all GPUs as flat NumPy arrays (GPU k of node i is 8·i + k), advanced by sub-steps of at most `SUBSTEP_S`:
first-order lags are exact exponentials and periodic work is integrated in closed form, so the size of a tick hardly
matters. Which jobs run and which disturbances act is told from outside; nothing here is random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from simulator.hardware import GIB, GPUS_PER_NODE, MIB, Topology
from simulator.jobs import Job
from simulator.streams import Stream, generator

SUBSTEP_S = 5.0
NEVER = 1e12
POWER_EXPONENT = 2.2  # dynamic power ~ clock × voltage², with voltage following the clock part of the way
AIR_LAG_S = 180.0  # air in a node follows its room in minutes
MEMORY_LAG_S = 20.0
WAIT_POWER_RATIO = 0.5  # power while a kernel of a collective spins ÷ power while computing
EVAL_POWER_RATIO = 0.7
WARMUP_POWER_RATIO = 0.25
NODE_BASE_POWER_W = 900.0
RECIRCULATION_K_PER_KW = 0.25
MEMORY_FREE_MIN_BYTES = GIB
NVLINK_SATURATED_RATIO = 0.9
STEP_SLOW_RATIO = 1.15
BRAKE_CLOCK = 0.5  # the external power brake halves clocks at least (NVML, HwSlowdown)
HARD_SLOWDOWN_K = 2.0  # hardware slowdown comes this far above the limit


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


class Physics:
    """Temperatures, clocks, work and memory of every GPU. Times are seconds since the epoch."""

    def __init__(self, topology: Topology, seed: int, start: float) -> None:
        self.topology, self.model = topology, topology.model
        n, m = topology.gpus, topology.nodes
        rng = generator(seed, Stream.HARDWARE)
        model = self.model
        self.node_of = np.arange(n) // GPUS_PER_NODE
        # No two GPUs cool alike; those behind others in the air stream get air warmed by them.
        self.resistance = model.resistance_k_per_w * rng.normal(1, 0.04, n).clip(0.88, 1.12)
        self.air_rise = np.tile(np.array([0, 1, 0.5, 1.5, 3, 4, 3.5, 4.5]), m) + rng.normal(0, 0.4, n)
        self.lag_s = rng.uniform(22, 40, n)
        self.wobble_period = rng.uniform(400, 1900, n)
        self.wobble_phase = rng.uniform(0, 2 * math.pi, n)
        self.rack_of = topology.rack_of
        racks = int(self.rack_of.max()) + 1
        self.rack_offset = rng.normal(0, 0.8, racks).clip(-2, 2)
        self.rack_phase = rng.uniform(0, 2 * math.pi, racks)
        # --- state
        self.time = start
        self.inlet = 22 + self.rack_offset[self.rack_of]
        self.temp = self.inlet[self.node_of] + self.air_rise + self.resistance * model.power_idle_w
        self.mem_temp = self.temp + 4
        self.thermal_clock = np.ones(n)  # clock ÷ highest clock, as the thermal control set it
        self.power = np.full(n, model.power_idle_w)
        self.energy_mj = rng.uniform(1e11, 9e11, n)
        self.ecc = np.zeros(n)
        self.remapped = np.zeros(n)
        self.nvlink_errors = np.zeros(n)
        self.xid = np.zeros(n, np.int32)
        self.is_lost = np.zeros(n, bool)  # fallen off the bus
        self.is_reachable = np.ones(m, bool)
        # --- what disturbances set, each sub-step
        self.resistance_factor = np.ones(n)
        self.link_factor = np.ones(n)
        self.link_share = np.ones(n)
        self.is_hard_slowdown = np.zeros(n, bool)
        self.supply_extra = np.zeros(racks)
        # Of `strains.py`: clock that power leaves, slower computing, time lost to the fabric in each step.
        self.power_clock = np.ones(n)
        self.compute_factor = np.ones(n)
        self.fabric_wait_s = np.zeros(n)
        self.is_strained = np.zeros(n, bool)
        self.extra_memory = np.zeros(n)
        # --- what the job on each GPU set
        self.jobs: list[Job | None] = [None] * n
        self.members: dict[int, np.ndarray] = {}
        self.job_code = np.full(n, -1, np.int64)
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
        self.job_code[g] = job.id
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

    def settle(self, when: float) -> None:
        """Bring temperatures to where the present work keeps them, at time `when`."""
        self.time = when
        for g in self.members.values():
            age = max(0.0, when - float(self.start[g[0]]) - float(self.warmup_s[g[0]]))
            self.steps[g] = age / self.step0[g[0]]
        for _ in range(3):
            self._lag(when, NEVER, self.mean_power())
        self.power = self.mean_power()

    def mean_power(self) -> np.ndarray:
        """Power of undisturbed work in its main phase, W per GPU."""
        exposed = np.divide(self.exposed_s, self.step0, out=np.zeros_like(self.step0), where=self.step0 > 0)
        activity = self.power_ratio * (1 - exposed * (1 - WAIT_POWER_RATIO)) * (1 - 0.2 * self.is_serving)
        model = self.model
        power = model.power_idle_w + self.busy * 30 + (model.power_limit_w - model.power_idle_w) * activity
        return np.minimum(power, model.power_limit_w)

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

    def activity(self, shares: Shares, when: float) -> np.ndarray:
        """Demand on the power limit, as a ratio, before clocks are held down."""
        compute_s = self.compute_s / self.clock
        rest = np.maximum(self.step - self.exposed_s, 1e-9)
        working = np.minimum(compute_s / rest, 1.0)
        level = self.power_ratio * (1 + 0.02 * np.sin(when / self.wobble_period * (2 * math.pi) + self.wobble_phase))
        level = level * (1 - self.is_serving * 0.4 * (1 + np.sin(when / 2400 + self.wobble_phase)) / 2)
        return (
            shares.compute * (WAIT_POWER_RATIO + (1 - WAIT_POWER_RATIO) * working)
            + shares.exposed * WAIT_POWER_RATIO
            + shares.evaluation * EVAL_POWER_RATIO
            + shares.warmup * WARMUP_POWER_RATIO
            + shares.pause * 0.1
        ) * level

    def demand(self, activity: np.ndarray) -> np.ndarray:
        """Power that work of this activity would draw at the thermal control's clocks, W."""
        model = self.model
        swing = (model.power_limit_w - model.power_idle_w) * activity
        return model.power_idle_w + 30 * self.busy + swing * self.clock**POWER_EXPONENT

    def advance(self, end: float) -> None:
        """One sub-step to `end`, at most SUBSTEP_S ahead; disturbances stay as they were set."""
        begin, span = self.time, end - self.time
        self._pace()
        shares = self.shares(begin, end)
        self.power = np.minimum(self.demand(self.activity(shares, end)), self.model.power_limit_w)
        self.steps += shares.train * span / self.step
        self.energy_mj += self.power * (span * 1e3)
        self._accumulate(shares, span)
        self._lag(end, span, self.power)
        self._throttle(span)
        self.time = end

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

    def supply(self, when: float) -> np.ndarray:
        """Temperature of the air that the room gives each rack, °C: a day's wave, a slow one, and what fails."""
        day = 1.2 * math.sin(2 * math.pi * (when % 86_400) / 86_400 - 2.2)
        slow = 0.5 * np.sin(2 * math.pi * when / 5400 + self.rack_phase)
        return 22 + self.rack_offset + day + slow + self.supply_extra

    def _lag(self, when: float, span: float, power: np.ndarray) -> None:
        node_power = self.node_power(power)
        air = self.supply(when)[self.rack_of] + RECIRCULATION_K_PER_KW * node_power / 1e3
        self.inlet += (air - self.inlet) * -math.expm1(-span / AIR_LAG_S)
        target = self.inlet[self.node_of] + self.air_rise + self.resistance * self.resistance_factor * power
        self.temp += (target - self.temp) * -np.expm1(-span / self.lag_s)
        hot = self.temp + 3 + 11 * self.dram * self.busy
        self.mem_temp += (hot - self.mem_temp) * -math.expm1(-span / MEMORY_LAG_S)

    def _throttle(self, span: float) -> None:
        """Thermal control: clocks go down while at the limit, come back slowly below it."""
        limit = self.model.temp_limit_c
        clock = self.thermal_clock
        if self.temp.max() >= limit or clock.min() < 1 or self.is_hard_slowdown.any():
            over = self.temp - limit
            down = (0.012 + 0.01 * np.maximum(over, 0)) * span
            up = 0.006 * span
            clock = np.where(over >= 0, clock - down, np.where(over < -2.0, clock + up, clock))
            clock = np.where(self.is_hard_slowdown, np.minimum(clock, 0.5), clock)
            self.thermal_clock = np.clip(clock, 0.3, 1.0)

    # --- what is true now ----------------------------------------------------------------------------------
    def node_power(self, power: np.ndarray) -> np.ndarray:
        """Power of each node, W: its GPUs, and boards and fans that follow them."""
        return NODE_BASE_POWER_W + 1.12 * power.reshape(-1, GPUS_PER_NODE).sum(axis=1)

    def is_thermal(self) -> np.ndarray:
        """GPUs held down by heat."""
        return (self.thermal_clock < 1) | (self.temp >= self.model.temp_limit_c) | self.is_hard_slowdown

    def is_saturated(self) -> np.ndarray:
        """GPUs whose NVLink is full, or that lost lanes, while their job's steps are slow because of it.

        Where a job tells nobody its step time, full links are all that can be known.
        """
        full = self.nvlink_mean() >= NVLINK_SATURATED_RATIO * self.model.nvlink_achievable_bytes_per_s
        lame = self.link_share < 0.7
        slow = self.step > STEP_SLOW_RATIO * self.step0
        return ((full & (slow | ~self.reports)) | (lame & slow)) & (self.link_s > 0)

    def memory_used(self, when: float) -> np.ndarray:
        """Device memory in use, bytes."""
        age = np.maximum(when - self.start, 0.0)
        fill = -np.expm1(-age * 3 / np.maximum(self.warmup_s, 1.0))
        room = (self.model.memory_total_mib - self.model.memory_reserved_mib) * MIB
        used = 4 * MIB + self.busy * (500 * MIB + np.maximum(self.plateau - 500 * MIB, 0) * fill) + self.extra_memory
        return np.minimum(used, room - 8 * MIB)

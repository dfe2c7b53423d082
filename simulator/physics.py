"""What work does to GPUs: power follows work, temperature follows power and air, throttling follows temperature.

State of all GPUs as flat NumPy arrays (GPU k of node i is 8·i + k), advanced by sub-steps of at most `SUBSTEP_S`:
first-order lags are exact exponentials, so the size of a tick hardly matters. What jobs do is in `work.py`; which
disturbances act is told from outside; nothing here is random once the GPUs are made.
"""

from __future__ import annotations

import math

import numpy as np

from simulator.hardware import GIB, GPUS_PER_NODE, MIB, Topology
from simulator.streams import Stream, generator
from simulator.work import NEVER, Shares, Work

SUBSTEP_S = 5.0
POWER_EXPONENT = 2.2  # dynamic power ~ clock × voltage², with voltage following the clock part of the way
AIR_LAG_S = 180.0  # air in a node follows its room in minutes
MEMORY_LAG_S = 20.0
WAIT_POWER_RATIO = 0.5  # power while a kernel of a collective spins ÷ power while computing
EVAL_POWER_RATIO = 0.7
WARMUP_POWER_RATIO = 0.25
NODE_BASE_POWER_W = 900.0
RECIRCULATION_K_PER_KW = 0.25
MEMORY_FREE_MIN_BYTES = GIB
BRAKE_CLOCK = 0.5  # the external power brake halves clocks at least (NVML, HwSlowdown)
HARD_SLOWDOWN_K = 2.0  # hardware slowdown comes this far above the limit


class Physics(Work):
    """Temperatures, clocks, work and memory of every GPU. Times are seconds since the epoch."""

    def __init__(self, topology: Topology, seed: int, start: float) -> None:
        super().__init__(topology, start)
        n, m = topology.gpus, topology.nodes
        rng = generator(seed, Stream.HARDWARE)
        model = self.model
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
        self.inlet = 22 + self.rack_offset[self.rack_of]
        self.temp = self.inlet[self.node_of] + self.air_rise + self.resistance * model.power_idle_w
        self.mem_temp = self.temp + 4
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
        self.is_hard_slowdown = np.zeros(n, bool)
        self.supply_extra = np.zeros(racks)

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

    def memory_used(self, when: float) -> np.ndarray:
        """Device memory in use, bytes."""
        age = np.maximum(when - self.start, 0.0)
        fill = -np.expm1(-age * 3 / np.maximum(self.warmup_s, 1.0))
        room = (self.model.memory_total_mib - self.model.memory_reserved_mib) * MIB
        used = 4 * MIB + self.busy * (500 * MIB + np.maximum(self.plateau - 500 * MIB, 0) * fill) + self.extra_memory
        return np.minimum(used, room - 8 * MIB)

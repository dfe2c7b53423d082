"""How large and how long a disturbance gets: ramps that reach their condition on time, look-alikes that stop short.

Arithmetic on the state of the GPU it is aimed at; what an event then does, second by second, is in `events.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from simulator.hardware import GIB, GPUS_PER_NODE, MIB
from simulator.physics import MEMORY_FREE_MIN_BYTES, RECIRCULATION_K_PER_KW, Physics
from simulator.work import NVLINK_SATURATED_RATIO, STEP_SLOW_RATIO

if TYPE_CHECKING:
    from simulator.events import Event


def shape(physics: Physics, event: Event, gpu: int, ramp: float, rng: np.random.Generator, mode: str | None) -> None:
    """Fill in size, mode and times of an event.

    Args:
        physics: What it will act on.
        event: Its class, GPUs, start and planned onset are set.
        gpu: Flat number of the GPU it is aimed at.
        ramp: Seconds from its start to the planned onset, 1 at least.
        rng: Where its length and size are drawn.
        mode: The mode asked for; None: drawn.
    """
    of_class = {"thermal_throttle": _thermal, "nvlink_saturation": _nvlink}.get(event.class_, _memory)
    of_class(physics, event, gpu, ramp, rng, mode)


def _thermal(physics: Physics, event: Event, gpu: int, ramp: float, rng: np.random.Generator, mode: str | None) -> None:
    limit = physics.model.temp_limit_c
    if (event.is_step and mode is None) or mode == "voltage_regulator":
        event.mode = "voltage_regulator"  # its own sensor trips: the core shows nothing beforehand
        event.is_step = True
        event.hold_until = event.end_at = event.onset_at + float(rng.uniform(90, 600))
        return
    power = float(physics.mean_power()[gpu])
    node_kw = float(physics.node_power(physics.power)[gpu // GPUS_PER_NODE]) / 1e3
    room = float(physics.supply(event.ramp_at)[physics.rack_of[gpu // GPUS_PER_NODE]])
    air = room + RECIRCULATION_K_PER_KW * node_kw + float(physics.air_rise[gpu])
    now, lag = float(physics.temp[gpu]), float(physics.lag_s[gpu])
    rise = float(physics.resistance[gpu]) * power
    if event.is_lookalike:
        event.size = max(0.0, (limit - float(rng.uniform(3, 8)) - air) / rise - 1) / ramp
        event.peak_at = event.onset_at
    else:
        # Ramp of the resistance for which a first-order lag reaches the limit after `ramp` seconds.
        start = air + rise
        gap = limit - start - (now - start) * math.exp(-ramp / lag)
        event.size = max(gap, 1.0) / (ramp - lag * -math.expm1(-ramp / lag)) / rise
        event.peak_at = event.onset_at + float(rng.uniform(0.1, 0.35)) * ramp
    event.hold_until = event.peak_at + float(rng.uniform(180, 900))
    event.end_at = event.hold_until + float(rng.uniform(60, 120))


def _nvlink(physics: Physics, event: Event, gpu: int, ramp: float, rng: np.random.Generator, mode: str | None) -> None:
    job = event.job
    assert job is not None
    assert job.profile is not None
    members = physics.members[job.id]
    p = job.profile
    heavy = p.link_s > 0.5 * p.compute_s
    if mode == "lane_loss" or (mode is None and event.is_step and heavy and rng.random() < 0.6):
        event.mode, event.is_step = "lane_loss", True
        event.gpus = np.array([gpu])
        event.size = 2.0
        need = (STEP_SLOW_RATIO * 1.05 * p.step_s) / p.link_s
        event.size = max(event.size, need)
    else:
        event.gpus = members
        c, e, k = p.compute_s, p.exposed_ratio, p.link_s
        slow = (STEP_SLOW_RATIO + 0.005) * p.step_s
        by_step = (slow - c) / e if (1 - e) * (slow - c) / e <= c else slow
        full = NVLINK_SATURATED_RATIO * 1.002
        # Traffic while steps still hide some of it: efficiency·K ÷ (C + e·K).
        by_rate = full * c / (p.link_efficiency - full * e)
        by_rate = by_rate if (1 - e) * by_rate <= c else c / (1 - e)
        onset = (max(by_step, by_rate) if p.reports_steps else by_rate) / k
        if event.is_lookalike:
            event.size = 1 + (by_rate / k * float(rng.uniform(0.6, 0.82)) - 1)
            event.size = max(event.size, 1.0)
        else:
            event.size = onset
    ramp_until = event.onset_at
    event.peak_at = ramp_until if event.is_lookalike or event.is_step else ramp_until + 0.3 * ramp
    event.hold_until = event.peak_at + float(rng.uniform(60, 600))
    event.end_at = event.hold_until + (0.0 if event.is_step else float(rng.uniform(20, 90)))


def _memory(physics: Physics, event: Event, gpu: int, ramp: float, rng: np.random.Generator, mode: str | None) -> None:  # noqa: ARG001
    job = event.job
    assert job is not None
    if rng.random() < 0.25 and not event.is_injected:
        members = physics.members[job.id]
        event.gpus = members[members // GPUS_PER_NODE == gpu // GPUS_PER_NODE]
    room = (physics.model.memory_total_mib - physics.model.memory_reserved_mib) * MIB
    event.base_bytes = room - physics.plateau[event.gpus] - 4 * MIB
    event.decay_s = float(rng.uniform(9, 22))
    if event.is_lookalike:
        event.size = float(rng.uniform(1.5, 2.4)) * GIB
        event.hold_until = event.peak_at + float(rng.uniform(120, 1200))
        event.end_at = event.hold_until + 30
        return
    event.size = MEMORY_FREE_MIN_BYTES
    event.oom_at = event.onset_at + (float(rng.uniform(8, 60)) if event.is_step else 2.3 * event.decay_s)
    event.hold_until = event.end_at = event.oom_at + 60

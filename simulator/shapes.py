"""What a disturbance of GPUs needs to set its condition when its ramp ends: sizes, lengths, and which GPUs it meets.

Here belongs the arithmetic that turns the state of a GPU and its job into the size of an event; how events act stands
in `events.py`, how they grow in `ramps.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from simulator.hardware import GPUS_PER_NODE, MIB
from simulator.physics import MEMORY_FREE_MIN_BYTES, RECIRCULATION_K_PER_KW, Physics
from simulator.ramps import OVERSHOOT_S
from simulator.work import NVLINK_SATURATED_RATIO, STEP_SLOW_RATIO

if TYPE_CHECKING:
    from simulator.events import Event


def shape_event(physics: Physics, event: Event, gpu: int, rng: np.random.Generator, mode: str | None) -> None:
    """Give an event its size, its GPUs and its end.

    Args:
        physics: What it will act on.
        event: The event, with its ramp; changed.
        gpu: Flat number of the GPU it is aimed at.
        rng: Where lengths are drawn.
        mode: The mode that was asked for; None: any.
    """
    shape = {"thermal_throttle": _thermal, "nvlink_saturation": _nvlink}.get(event.class_, _memory)
    shape(physics, event, gpu, rng, mode)


def _thermal(physics: Physics, event: Event, gpu: int, rng: np.random.Generator, mode: str | None) -> None:
    ramp, limit = event.ramp, physics.model.temp_limit_c
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
    # Size of the ramp of the resistance for which a first-order lag reaches the limit when the ramp ends.
    length = max(ramp.length_s, 1.0)
    start = air + rise
    gap = limit - start - (now - start) * math.exp(-length / lag)
    event.size = max(gap, 1.0) / (rise * max(ramp.lagged(lag), 1e-6))
    beyond = float(rng.uniform(0.1, 0.35)) * min(length, OVERSHOOT_S)
    event.peak_at = event.ramp_at + ramp.stops_s if event.is_lookalike else event.onset_at + beyond
    event.hold_until = event.peak_at + float(rng.uniform(180, 900))
    event.end_at = event.hold_until + float(rng.uniform(60, 120))


def _nvlink(physics: Physics, event: Event, gpu: int, rng: np.random.Generator, mode: str | None) -> None:
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
        event.size = (max(by_step, by_rate) if p.reports_steps else by_rate) / k
    if event.is_lookalike:
        event.peak_at = event.ramp_at + event.ramp.stops_s
    elif not event.is_step:
        event.peak_at = event.onset_at + 0.3 * min(event.ramp.length_s, OVERSHOOT_S)
    event.hold_until = event.peak_at + float(rng.uniform(60, 600))
    event.end_at = event.hold_until + (0.0 if event.is_step else float(rng.uniform(20, 90)))


def _memory(physics: Physics, event: Event, gpu: int, rng: np.random.Generator, mode: str | None) -> None:  # noqa: ARG001
    job = event.job
    assert job is not None
    if rng.random() < 0.25 and not event.is_injected:
        members = physics.members[job.id]
        event.gpus = members[members // GPUS_PER_NODE == gpu // GPUS_PER_NODE]
    room = (physics.model.memory_total_mib - physics.model.memory_reserved_mib) * MIB
    event.base_bytes = room - physics.plateau[event.gpus] - 4 * MIB
    event.decay_s = float(rng.uniform(9, 22))
    event.size = MEMORY_FREE_MIN_BYTES
    if event.is_lookalike:
        event.peak_at = event.ramp_at + event.ramp.stops_s
        event.hold_until = event.peak_at + float(rng.uniform(120, 1200))
        event.end_at = event.hold_until + 30
        return
    event.oom_at = event.onset_at + (float(rng.uniform(8, 60)) if event.is_step else 2.3 * event.decay_s)
    event.hold_until = event.end_at = event.oom_at + 60

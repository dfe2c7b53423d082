"""Disturbances: cooling faults, hot aisles, NVLink saturation, memory leaks, look-alikes.

An event is drawn from the seed at a stated base rate, ramps towards its onset (or is a step), holds, and clears. This
module shapes what it does to the physics over time; whether the GPU gets that hot is up to `physics.py`, and when the
condition truly became set is booked in `truth.py`. Hardware that breaks is in `faults.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulator.hardware import GIB, GPUS_PER_NODE, MIB, SimulatorError
from simulator.jobs import Job
from simulator.physics import (
    MEMORY_FREE_MIN_BYTES,
    NVLINK_SATURATED_RATIO,
    RECIRCULATION_K_PER_KW,
    STEP_SLOW_RATIO,
    Physics,
)
from simulator.truth import CLASSES, TruthBook

MODES = {
    "thermal_throttle": ("cooling", "voltage_regulator", "hot_aisle"),
    "nvlink_saturation": ("collective", "lane_loss"),
    "memory_exhaustion": ("leak",),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Base rates. No published rate of these onsets is known; these are assumptions, to be scaled by `fault_scale`.

    Attributes:
        thermal, nvlink, memory: Candidates per GPU-hour; one that meets an idle GPU comes to nothing. An NVLink
            onset sets every GPU of its job on the node.
        lookalike_ratio: Harmless ramps per onset.
        step_ratio: Share of onsets that are steps without any precursor.
        hot_aisle: Events per rack-hour.
        power, straggler, fabric, host_memory: As `thermal`, of the classes of `strains.py`; 0 leaves a class out.
        has_shortage: Queues that run short are written to the ground truth.
    """

    thermal: float = 0.4e-3
    nvlink: float = 0.3e-3
    memory: float = 0.5e-3
    lookalike_ratio: float = 1.0
    step_ratio: float = 0.4
    hot_aisle: float = 0.02e-3
    power: float = 0.0
    straggler: float = 0.0
    fabric: float = 0.0
    host_memory: float = 0.0
    has_shortage: bool = False

    @classmethod
    def of_every_class(cls) -> Rates:
        """Rates at which every class happens."""
        return cls(power=0.2e-3, straggler=0.3e-3, fabric=0.2e-3, host_memory=0.1e-3, has_shortage=True)

    @property
    def of_strains(self) -> dict[str, float]:
        """Rates of the classes of `strains.py`, by class."""
        return {
            "power_throttle": self.power, "straggler": self.straggler, "fabric_congestion": self.fabric,
            "host_memory": self.host_memory,
        }  # fmt: skip

    def of(self, class_: str) -> float:
        return {"thermal_throttle": self.thermal, "nvlink_saturation": self.nvlink}.get(class_, self.memory)


@dataclass(slots=True, eq=False)
class Event:
    """One disturbance. Times are seconds since the epoch.

    Attributes:
        gpus: Flat numbers of the GPUs it acts on.
        ramp_at, onset_at: Start of the ramp; when the condition is planned to set.
        peak_at, hold_until, end_at: End of the growth; start and end of the recovery.
        size: Growth per second of the ramp (cooling), final factor (NVLink), K at the peak (hot aisle).
        truth: Ground-truth row by GPU.
    """

    id: str
    class_: str
    mode: str
    gpus: np.ndarray
    job: Job | None
    ramp_at: float
    onset_at: float
    peak_at: float
    hold_until: float
    end_at: float
    is_step: bool
    is_lookalike: bool
    is_injected: bool
    size: float = 0.0
    rack: int = -1
    base_bytes: np.ndarray | None = None
    oom_at: float = float("inf")
    decay_s: float = 15.0
    truth: dict[int, dict[str, Any]] = field(default_factory=dict)

    def level(self, when: float) -> float:
        """Progress of the disturbance: 0 before, 1 at its planned onset, more until `peak_at`, 0 after `end_at`."""
        if when < self.ramp_at or when >= self.end_at:
            return 0.0
        if self.is_step:
            return 1.0 if when >= self.onset_at else 0.0
        length = max(self.onset_at - self.ramp_at, 1e-6)
        top = (self.peak_at - self.ramp_at) / length
        if when >= self.hold_until:
            return top * (self.end_at - when) / max(self.end_at - self.hold_until, 1e-6)
        return min((when - self.ramp_at) / length, top)


class Events:
    """Disturbances that act now. `book` holds the ground truth."""

    def __init__(self, physics: Physics) -> None:
        self.physics = physics
        self.active: list[Event] = []
        self.book = TruthBook(physics)
        self._is_quiet = True

    # --- drawing -------------------------------------------------------------------------------------------
    def refusal(self, class_: str, gpu: int, when: float) -> str:
        """Why an onset of a class cannot be started on a GPU now; empty when it can."""
        physics = self.physics
        job = physics.jobs[gpu]
        if not physics.is_reachable[gpu // GPUS_PER_NODE] or physics.is_lost[gpu]:
            return "its node is down"
        if job is None:
            return "no job runs on it"
        if any(event.class_ == class_ and gpu in event.gpus for event in self.active):
            return f"a {class_} event is already under way on it"
        if class_ == "thermal_throttle" and physics.mean_power()[gpu] < 0.55 * physics.model.power_limit_w:
            return "its job draws too little power to overheat it"
        if class_ == "nvlink_saturation" and physics.link_s[gpu] == 0:
            return "its job has no collectives"
        if when < float(job.start or 0.0):
            return "its job has not started"
        return ""

    def is_ripe(self, class_: str, gpu: int, when: float) -> bool:
        """A job past its warm-up, with a median of its own: random events leave younger ones alone."""
        job = self.physics.jobs[gpu]
        if job is None or job.profile is None or self.refusal(class_, gpu, when):
            return False
        age = when - float(job.start or 0.0)
        if class_ == "memory_exhaustion" and job.profile.kind != "train":
            return False
        return age > 2 * job.profile.warmup_s + {"thermal_throttle": 60, "nvlink_saturation": 240}.get(class_, 120)

    def begin(
        self,
        id_: str,
        class_: str,
        gpu: int,
        ramp_at: float,
        rng: np.random.Generator,
        *,
        mode: str | None = None,
        is_step: bool = False,
        is_lookalike: bool = False,
        onset_in_s: float | None = None,
        is_injected: bool = False,
    ) -> Event:
        """Shape an event on a GPU and let it act.

        Args:
            id_: Id of the event.
            class_: One of `CLASSES`.
            gpu: Flat number of the GPU it is aimed at.
            ramp_at: When it begins.
            rng: Where its length and size are drawn.
            mode: One of the class's `MODES`; chosen when None.
            is_step: Without any precursor.
            is_lookalike: Stops short of its condition.
            onset_in_s: Seconds from `ramp_at` to the planned onset; drawn when None.
            is_injected: Asked for from outside.

        Raises:
            SimulatorError: The class or mode is not known, or the state of the GPU rules it out.
        """
        if class_ not in CLASSES:
            raise SimulatorError(f"no bottleneck class {class_!r} here; classes: {', '.join(CLASSES)}")
        if mode is not None and mode not in MODES[class_]:
            raise SimulatorError(f"no mode {mode!r} of {class_}; modes: {', '.join(MODES[class_])}")
        if onset_in_s is not None and not 0 <= onset_in_s <= 86_400:
            raise SimulatorError(f"onset_in_s = {onset_in_s}: must be 0 to 86400 seconds")
        if reason := self.refusal(class_, gpu, ramp_at):
            node = self.physics.topology.node_names[gpu // GPUS_PER_NODE]
            busy = [i for i in range(self.physics.topology.gpus) if not self.refusal(class_, i, ramp_at)][:8]
            names = [f"{self.physics.topology.node_names[i // GPUS_PER_NODE]}/{i % GPUS_PER_NODE}" for i in busy]
            raise SimulatorError(
                f"no {class_} can be injected on {node}/{gpu % GPUS_PER_NODE}: {reason}; "
                f"possible now: {', '.join(names) or 'nowhere'}"
            )
        shape = {"thermal_throttle": self._thermal, "nvlink_saturation": self._nvlink}.get(class_, self._memory)
        ramp = float(onset_in_s) if onset_in_s is not None else float(rng.uniform(60, 240))
        if is_step and onset_in_s is None:
            ramp = 0.0
        event = Event(
            id_, class_, mode or MODES[class_][0], np.array([gpu]), self.physics.jobs[gpu], ramp_at, ramp_at + ramp,
            ramp_at + ramp, ramp_at + ramp, ramp_at + ramp, is_step, is_lookalike, is_injected,
        )  # fmt: skip
        shape(event, gpu, max(ramp, 1.0), rng, mode)
        self.book.record(event)
        self.active.append(event)
        self._is_quiet = False
        return event

    def begin_hot_aisle(self, id_: str, rack: int, ramp_at: float, rng: np.random.Generator, is_injected: bool = False,
                        onset_in_s: float | None = None) -> Event:  # fmt: skip
        """A rack's supply air warms by 18-26 K over 4-10 minutes and stays so for a while."""
        physics = self.physics
        nodes = np.flatnonzero(physics.rack_of == rack)
        gpus = (nodes[:, None] * GPUS_PER_NODE + np.arange(GPUS_PER_NODE)).ravel()
        ramp = onset_in_s if onset_in_s is not None else float(rng.uniform(240, 600))
        peak = ramp_at + ramp
        hold = peak + float(rng.uniform(300, 1200))
        event = Event(
            id_, "thermal_throttle", "hot_aisle", gpus, None, ramp_at, peak, peak, hold, hold + 600, False, False,
            is_injected, size=float(rng.uniform(18, 26)), rack=rack,
        )  # fmt: skip
        self.book.record(event)
        self.active.append(event)
        self._is_quiet = False
        return event

    def _thermal(self, event: Event, gpu: int, ramp: float, rng: np.random.Generator, mode: str | None) -> None:
        physics, limit = self.physics, self.physics.model.temp_limit_c
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

    def _nvlink(self, event: Event, gpu: int, ramp: float, rng: np.random.Generator, mode: str | None) -> None:
        physics = self.physics
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

    def _memory(self, event: Event, gpu: int, ramp: float, rng: np.random.Generator, mode: str | None) -> None:  # noqa: ARG002
        physics = self.physics
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

    # --- acting --------------------------------------------------------------------------------------------
    def act(self, when: float) -> None:
        """Set the disturbances of the physics as they are at `when`."""
        physics = self.physics
        if self._is_quiet:
            return
        physics.resistance_factor.fill(1.0)
        physics.link_factor.fill(1.0)
        physics.link_share.fill(1.0)
        physics.is_hard_slowdown.fill(False)
        physics.supply_extra.fill(0.0)
        for event in self.active:
            level, g = event.level(when), event.gpus
            if event.mode == "cooling":
                physics.resistance_factor[g] = 1 + event.size * level * max(event.onset_at - event.ramp_at, 1.0)
            elif event.mode == "voltage_regulator":
                physics.is_hard_slowdown[g] |= level > 0
            elif event.mode == "hot_aisle":
                physics.supply_extra[event.rack] += event.size * level
            elif event.mode == "collective":
                factor = 1 + (event.size - 1) * level if not event.is_step else 1 + (event.size * 1.12 - 1) * level
                physics.link_factor[g] = max(factor, 1.0)
            elif event.mode == "lane_loss" and level > 0:
                physics.link_factor[g] = event.size
                # As many bytes a step in more time, and rings that were moved to the peers' healthy links.
                physics.link_share[g] = 0.6 / event.size

    def fill_memory(self, when: float) -> None:
        """Set the device memory that leaks hold at `when`."""
        physics = self.physics
        for event in self.active:
            if event.mode != "leak" or event.base_bytes is None or when >= event.end_at:
                continue
            free = event.base_bytes
            if event.is_lookalike:
                left = free - (free - event.size) * min(event.level(when), 1.0)
            elif when >= event.onset_at:
                past = 0.7 if event.is_step else math.exp(-(when - event.onset_at) / event.decay_s)
                left = np.minimum(free, event.size * past)
            else:
                left = free - (free - event.size) * event.level(when)
            physics.extra_memory[event.gpus] = np.maximum(free - left, 0.0)

    # --- ending --------------------------------------------------------------------------------------------
    def observe(self, begin: float, end: float, temp_before: np.ndarray) -> None:
        """Book conditions that became set or clear within (begin, end]; called after each sub-step."""
        physics = self.physics
        if self._is_quiet and physics.temp.max() < physics.model.temp_limit_c and not self.book.has_open():
            return
        self.book.observe(self.active, begin, end, temp_before)

    def end_job(self, job: Job, when: float) -> None:
        """The job ended: what it caused itself is over; broken cooling stays."""
        for event in self.active:
            if event.job is job and event.class_ != "thermal_throttle":
                event.hold_until = event.end_at = min(event.end_at, when)
        self.book.end_job(job, when)

    def retire(self, when: float) -> None:
        """Forget events that are over; the physics is left undisturbed when none is left."""
        if self._is_quiet:
            return
        for event in self.active:
            if event.end_at <= when and event.mode == "leak":
                self.physics.extra_memory[event.gpus] = 0.0
        self.active = [event for event in self.active if event.end_at > when]
        if not self.active:
            self.act(when)
            self._is_quiet = True

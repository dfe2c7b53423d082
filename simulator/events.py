"""Disturbances: cooling faults, hot aisles, NVLink saturation, memory leaks, look-alikes.

An event is drawn from the seed at a base rate (`rates.py`), ramps towards its onset (or is a step), holds, and clears.
Here belongs what acts now; growth stands in `ramps.py`, sizes in `shapes.py`, what comes of it in `physics.py`, what
truly set in `truth.py`, hardware that breaks in `faults.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulator.hardware import GPUS_PER_NODE, SimulatorError
from simulator.jobs import Job
from simulator.physics import Physics
from simulator.ramps import Ramp, draw_ramp
from simulator.rates import Rates as Rates
from simulator.shapes import shape_event
from simulator.truth import CLASSES, TruthBook

MODES = {
    "thermal_throttle": ("cooling", "voltage_regulator", "hot_aisle"),
    "nvlink_saturation": ("collective", "lane_loss"),
    "memory_exhaustion": ("leak",),
}
HOT_AISLE_MIN_S = 120.0  # no room heats faster than its air is turned over


@dataclass(slots=True, eq=False)
class Event:
    """One disturbance. Times are seconds since the epoch.

    Attributes:
        gpus: Flat numbers of the GPUs it acts on.
        ramp_at, onset_at: Start of the ramp; when the condition is planned to set.
        peak_at, hold_until, end_at: End of the growth; start and end of the recovery.
        ramp: Course of the growth.
        size: What level 1 is: share of the resistance (cooling), factor (NVLink), K (hot aisle), bytes left (leak).
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
    ramp: Ramp = field(default_factory=lambda: Ramp(0.0))
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
        top = self.ramp.level(self.peak_at - self.ramp_at)
        if when >= self.hold_until:
            return top * (self.end_at - when) / max(self.end_at - self.hold_until, 1e-6)
        return min(self.ramp.level(when - self.ramp_at), top)


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
            onset_in_s: Seconds from `ramp_at` to the planned onset; None: any.
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
        length = 0.0 if is_step and onset_in_s is None else onset_in_s
        ramp = draw_ramp(rng, is_lookalike=is_lookalike, length_s=length)
        onset = ramp_at + ramp.length_s
        event = Event(
            id_, class_, mode or MODES[class_][0], np.array([gpu]), self.physics.jobs[gpu], ramp_at, onset, onset,
            onset, onset, is_step, is_lookalike, is_injected, ramp,
        )  # fmt: skip
        shape_event(self.physics, event, gpu, rng, mode)
        self.book.record(event)
        self.active.append(event)
        self._is_quiet = False
        return event

    def begin_hot_aisle(self, id_: str, rack: int, ramp_at: float, rng: np.random.Generator, is_injected: bool = False,
                        onset_in_s: float | None = None) -> Event:  # fmt: skip
        """A rack's supply air warms by 18-26 K over some minutes and stays so for a while."""
        physics = self.physics
        nodes = np.flatnonzero(physics.rack_of == rack)
        gpus = (nodes[:, None] * GPUS_PER_NODE + np.arange(GPUS_PER_NODE)).ravel()
        ramp = draw_ramp(rng, length_s=onset_in_s, min_s=HOT_AISLE_MIN_S)
        peak = ramp_at + ramp.length_s
        hold = peak + float(rng.uniform(300, 1200))
        event = Event(
            id_, "thermal_throttle", "hot_aisle", gpus, None, ramp_at, peak, peak, hold, hold + 600, False, False,
            is_injected, ramp, size=float(rng.uniform(18, 26)), rack=rack,
        )  # fmt: skip
        self.book.record(event)
        self.active.append(event)
        self._is_quiet = False
        return event

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
                physics.resistance_factor[g] = 1 + event.size * level
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
            if when >= event.onset_at and not event.is_lookalike:
                past = 0.7 if event.is_step else math.exp(-(when - event.onset_at) / event.decay_s)
                left = np.minimum(free, event.size * past)
            else:
                left = free - (free - event.size) * min(event.level(when), 1.0)
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

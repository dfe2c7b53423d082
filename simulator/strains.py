"""Strains: power that is cut, ranks that lag, a congested fabric, host memory that leaks.

Drawn and acted like the disturbances of `events.py`, each class with a rate of its own that switches it off at 0. What
they do to GPUs is up to `physics.py`; what ports and hosts show is in `hosts.py`, when they came true in
`strain_truth.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulator.hardware import GPUS_PER_NODE, SimulatorError
from simulator.jobs import Job
from simulator.physics import BRAKE_CLOCK, POWER_EXPONENT, Physics
from simulator.ramps import Ramp, draw_ramp
from simulator.strain_truth import SLOW_RATIO, StrainBook
from simulator.streams import Stream, generator
from simulator.work import STEP_SLOW_RATIO

CLASSES = ("power_throttle", "straggler", "fabric_congestion", "host_memory")
# The mode that ramps, and the one that is a step without any precursor.
MODES = {
    "power_throttle": ("cap", "brake"), "straggler": ("slow_rank", "stalled_rank"),
    "fabric_congestion": ("incast", "lossy_link"), "host_memory": ("host_leak", "host_allocation"),
}  # fmt: skip
CLOCK_LOW_RATIO = 0.8
HOST_FLOOR_RATIO = 0.02
HOUR_S = 3600.0
_HORIZON = {"power_throttle": 60.0, "straggler": 60.0, "fabric_congestion": 60.0, "host_memory": 60.0}


@dataclass(slots=True, eq=False)
class Strain:
    """One strain. Times are seconds since the epoch.

    Attributes:
        gpus: Flat numbers of the GPUs it acts on; nodes: of the nodes.
        size: What level 1 means for its mode.
        rows: Ground truth by thing.
    """

    id: str
    class_: str
    mode: str
    gpus: np.ndarray
    nodes: np.ndarray
    job: Job
    ramp_at: float
    onset_at: float
    hold_until: float
    end_at: float
    is_step: bool
    is_lookalike: bool
    is_injected: bool
    ramp: Ramp
    size: float = 0.0
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def level(self, when: float) -> float:
        """0 before, 1 at the planned onset, up to 1.3 after it; a look-alike stops on the way."""
        if when < self.ramp_at or when >= self.end_at:
            return 0.0
        if self.is_step:
            return 1.3 if when >= self.onset_at else 0.0
        top = min(self.ramp.stop, 1.3)
        if when >= self.hold_until:
            return top * (self.end_at - when) / max(self.end_at - self.hold_until, 1e-6)
        return min(self.ramp.level(when - self.ramp_at), top)


class Strains:
    """Strains that act now. `book` holds their ground truth.

    Args:
        physics: What they act on.
        seed: Seed of the cluster.
        rates: Candidates per GPU-hour of each class; absent or 0: off.
        step_ratio: Share of onsets without any precursor.
    """

    def __init__(self, physics: Physics, seed: int, rates: Mapping[str, float], step_ratio: float) -> None:
        unknown = sorted(set(rates) - set(CLASSES))
        if unknown:
            raise SimulatorError(f"no class {unknown[0]!r} of strains; classes: {', '.join(CLASSES)}")
        self.physics, self.seed, self.rates, self.step_ratio = physics, seed, dict(rates), step_ratio
        self.active: list[Strain] = []
        self.book = StrainBook(physics)

    def draw(self, hour_at: float, scale: float) -> list[tuple[float, str, int, bool, bool, int]]:
        """Candidates of an hour: time, class, GPU, step, look-alike and a number of its own."""
        found = []
        hour = int(hour_at // HOUR_S)
        for index, class_ in enumerate(CLASSES):
            rate = self.rates.get(class_, 0.0)
            if not rate:
                continue
            rng = generator(self.seed, Stream.STRAINS, hour, index)
            for i in range(2 * int(rng.poisson(rate * self.physics.topology.gpus * scale))):
                at, gpu = hour_at + HOUR_S * rng.random(), int(rng.integers(self.physics.topology.gpus))
                is_step = bool(rng.random() < self.step_ratio)
                is_lookalike = i % 2 == 1
                found.append((at, class_, gpu, is_step and not is_lookalike, is_lookalike, i * 8 + index))
        return found

    def refusal(self, class_: str, gpu: int, when: float) -> str:
        """Why a strain cannot begin on a GPU now; empty when it can."""
        physics = self.physics
        job = physics.jobs[gpu]
        if job is None or job.id not in physics.members:
            return "no job runs on it"
        if not physics.is_reachable[gpu // GPUS_PER_NODE]:
            return "its node is down"
        if any(s.class_ == class_ and s.job is job for s in self.active):
            return f"a {class_} is already under way on its job"
        members = physics.members[job.id]
        if class_ in ("straggler", "fabric_congestion") and physics.step0[gpu] <= 0:
            return "its job makes no steps"
        if class_ == "straggler" and len(members) < 3:
            return "its job has fewer than 3 GPUs"
        if class_ == "fabric_congestion" and len(np.unique(physics.node_of[members])) < 2:
            return "its job has one node alone"
        if class_ == "power_throttle" and physics.power_ratio[gpu] < 0.5:
            return "its job draws little power"
        if when < physics.start[gpu] + physics.warmup_s[gpu] + _HORIZON[class_]:
            return "its job is too young"
        return ""

    def begin(
        self, id_: str, class_: str, gpu: int, ramp_at: float, rng: np.random.Generator, *, is_step: bool = False,
        is_lookalike: bool = False, onset_in_s: float | None = None, is_injected: bool = False,
        mode: str | None = None,
    ) -> Strain:  # fmt: skip
        """Shape a strain and let it act; arguments as of `Events.begin`, and the second mode of a class is its step.

        Raises:
            SimulatorError: The class or mode is not known, or the state of the GPU rules it out.
        """
        if class_ not in CLASSES:
            raise SimulatorError(f"no class {class_!r} of strains; classes: {', '.join(CLASSES)}")
        if mode is not None and mode not in MODES[class_]:
            raise SimulatorError(f"no mode {mode!r} of {class_}; modes: {', '.join(MODES[class_])}")
        is_step = is_step if mode is None else mode == MODES[class_][1]
        if reason := self.refusal(class_, gpu, ramp_at):
            raise SimulatorError(f"no {class_} can begin on GPU {gpu}: {reason}")
        physics = self.physics
        job = physics.jobs[gpu]
        assert job is not None
        node = gpu // GPUS_PER_NODE
        on_node = np.arange(node * GPUS_PER_NODE, (node + 1) * GPUS_PER_NODE)
        members = physics.members[job.id]
        gpus = {"power_throttle": on_node, "straggler": np.array([gpu]), "fabric_congestion": members}
        length = 0.0 if is_step and onset_in_s is None else onset_in_s
        ramp = draw_ramp(rng, is_lookalike=is_lookalike, length_s=length)
        onset = ramp_at + ramp.length_s
        top_at = ramp_at + ramp.stops_s if is_lookalike else onset + max(0.35 * ramp.length_s, 5.0)
        hold = top_at + float(rng.uniform(120, 600))
        end = hold + (0.0 if is_step else float(rng.uniform(20, 90)))
        strain = Strain(
            id_, class_, MODES[class_][int(is_step)], gpus.get(class_, np.zeros(0, np.int64)), np.array([node]), job,
            ramp_at, onset, hold, end, is_step, is_lookalike, is_injected, ramp,
        )  # fmt: skip
        if class_ == "power_throttle":
            # Level 1 takes the clock to CLOCK_LOW_RATIO of what the power limit leaves it anyway.
            model = physics.model
            swing = model.power_limit_w - model.power_idle_w
            usual = min(1.0, swing / max(swing * float(physics.power_ratio[gpu]) + 30, 1.0)) ** (1 / POWER_EXPONENT)
            strain.size = 1 - CLOCK_LOW_RATIO * usual
        elif class_ == "straggler":
            own = physics.own_step_s()
            waits = float(own[gpu] - physics.compute_s[gpu])
            needed = SLOW_RATIO * 1.01 * float(np.median(own[members])) - waits
            strain.size = needed / float(physics.compute_s[gpu]) - 1
        elif class_ == "fabric_congestion":
            strain.size = (STEP_SLOW_RATIO * 1.005 - 1) * float(physics.step0[gpu])
        self.book.record(strain)
        self.active.append(strain)
        return strain

    # --- acting --------------------------------------------------------------------------------------------
    def act(self, when: float) -> None:
        """Set what the strains do to GPUs at `when`."""
        physics = self.physics
        if not self.active and not physics.is_strained.any():
            return
        physics.power_clock.fill(1.0)
        physics.compute_factor.fill(1.0)
        physics.fabric_wait_s.fill(0.0)
        physics.is_strained.fill(False)
        for strain in self.active:
            level, g = strain.level(when), strain.gpus
            if level <= 0 or not len(g):
                continue
            physics.is_strained[g] = True
            if strain.mode == "brake":
                physics.power_clock[g] = BRAKE_CLOCK
            elif strain.mode == "cap":
                clock = max(1 - strain.size * level, BRAKE_CLOCK + 0.01)
                physics.power_clock[g] = np.minimum(physics.power_clock[g], clock)
            elif strain.class_ == "straggler":
                physics.compute_factor[g] = 1 + strain.size * level
            elif strain.class_ == "fabric_congestion":
                physics.fabric_wait_s[g] += strain.size * level

    def retire(self, when: float) -> None:
        """Forget what is over, or whose job has ended."""
        for strain in self.active:
            if strain.job.state != "RUNNING":
                strain.end_at = min(strain.end_at, when)
        self.active = [strain for strain in self.active if strain.end_at > when]

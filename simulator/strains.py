"""Strains: power that is cut, ranks that lag, a congested fabric, host memory that leaks; queues that run short.

Drawn and acted like the disturbances of `events.py`, each class with a rate of its own that switches it off at 0, each
with ground truth in the same form. What they do to GPUs is up to `physics.py`; what ports and hosts show follows from
the jobs and from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulator.hardware import GIB, GPUS_PER_NODE, SimulatorError
from simulator.jobs import Job
from simulator.physics import BRAKE_CLOCK, POWER_EXPONENT, STEP_SLOW_RATIO, Physics
from simulator.streams import Stream, generator
from simulator.truth import iso

CLASSES = ("power_throttle", "straggler", "fabric_congestion", "host_memory")
# The mode that ramps, and the one that is a step without any precursor.
MODES = {
    "power_throttle": ("cap", "brake"), "straggler": ("slow_rank", "stalled_rank"),
    "fabric_congestion": ("incast", "lossy_link"), "host_memory": ("host_leak", "host_allocation"),
}  # fmt: skip
CLOCK_LOW_RATIO = 0.8
SLOW_RATIO = 1.3
PORT_BYTES_PER_S = 50e9  # NDR, one port a node
HOST_BYTES = 2048 * GIB
HOST_BUSY_RATIO, HOST_IDLE_RATIO = 0.45, 0.05  # host memory of a full node, and of one without jobs
HOST_FLOOR_RATIO = 0.02
MARKS_PER_S, NOTICES_PER_S, WAITS_PER_S = 400.0, 300.0, 2e5  # of a port at its usual load
CLEAR_S = 10.0
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
    size: float = 0.0
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def level(self, when: float) -> float:
        """0 before, 1 at the planned onset, up to 1.3 after it; a look-alike stops at 0.6."""
        if when < self.ramp_at or when >= self.end_at:
            return 0.0
        if self.is_step:
            return 1.3 if when >= self.onset_at else 0.0
        top = 0.6 if self.is_lookalike else 1.3
        if when >= self.hold_until:
            return top * (self.end_at - when) / max(self.end_at - self.hold_until, 1e-6)
        return min((when - self.ramp_at) / max(self.onset_at - self.ramp_at, 1e-6), top)


class Strains:
    """Strains that act now, and their ground truth.

    Args:
        physics: What they act on.
        seed: Seed of the cluster.
        rates: Candidates per GPU-hour of each class; absent or 0: off.
        step_ratio: Share of onsets without any precursor.

    Attributes:
        rows: Ground truth, in the form of `TruthBook.rows` with `scope` and `scope_id` as labels have them.
        changes: Rises with every change of a row.
    """

    def __init__(self, physics: Physics, seed: int, rates: Mapping[str, float], step_ratio: float) -> None:
        unknown = sorted(set(rates) - set(CLASSES))
        if unknown:
            raise SimulatorError(f"no class {unknown[0]!r} of strains; classes: {', '.join(CLASSES)}")
        self.physics, self.seed, self.rates, self.step_ratio = physics, seed, dict(rates), step_ratio
        self.active: list[Strain] = []
        self.rows: list[dict[str, Any]] = []
        self.lookalikes: list[dict[str, Any]] = []
        self.changes = 0
        self._last_set: dict[str, float] = {}
        self._open: dict[str, dict[str, Any]] = {}

    def has_open(self) -> bool:
        """Some condition is set now."""
        return bool(self._open)

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
    ) -> Strain:  # fmt: skip
        """Shape a strain and let it act; arguments as of `Events.begin`.

        Raises:
            SimulatorError: The class is not known, or the state of the GPU rules it out.
        """
        if class_ not in CLASSES:
            raise SimulatorError(f"no class {class_!r} of strains; classes: {', '.join(CLASSES)}")
        if reason := self.refusal(class_, gpu, ramp_at):
            raise SimulatorError(f"no {class_} can begin on GPU {gpu}: {reason}")
        physics = self.physics
        job = physics.jobs[gpu]
        assert job is not None
        node = gpu // GPUS_PER_NODE
        on_node = np.arange(node * GPUS_PER_NODE, (node + 1) * GPUS_PER_NODE)
        members = physics.members[job.id]
        gpus = {"power_throttle": on_node, "straggler": np.array([gpu]), "fabric_congestion": members}
        ramp = float(onset_in_s) if onset_in_s is not None else 0.0 if is_step else float(rng.uniform(60, 240))
        onset = ramp_at + ramp
        hold = onset + max(0.35 * ramp, 5.0) + float(rng.uniform(120, 600))
        end = hold + (0.0 if is_step else float(rng.uniform(20, 90)))
        strain = Strain(
            id_, class_, MODES[class_][int(is_step)], gpus.get(class_, np.zeros(0, np.int64)), np.array([node]), job,
            ramp_at, onset, hold, end, is_step, is_lookalike, is_injected,
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
        self._record(strain)
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

    # --- what ports and hosts show -------------------------------------------------------------------------
    def ports(self, when: float, noise: np.ndarray) -> dict[str, np.ndarray]:
        """Rates of the one port of each node, in columns of `core_port_samples`.

        Ports carry the traffic of jobs on several nodes: 45-70 % of the speed while they train.
        """
        physics = self.physics
        n = physics.topology.nodes
        load = np.zeros(n)
        for id_, members in physics.members.items():
            nodes = np.unique(physics.node_of[members])
            if len(nodes) > 1 and physics.step0[members[0]] > 0:
                load[nodes] = 0.45 + 0.25 * (id_ * 0.618 % 1)
        sway = 1 + 0.05 * noise
        marks, waits, lost = load * MARKS_PER_S * sway, load * WAITS_PER_S * sway, np.zeros(n)
        for strain in self.active:
            level = strain.level(when)
            if strain.class_ != "fabric_congestion" or level <= 0:
                continue
            k = strain.nodes
            if strain.mode == "incast":
                load[k] = np.minimum(load[k] + 0.2 * level, 0.96)
                marks[k] *= 1 + 60 * level
                waits[k] *= 1 + 40 * level
            else:
                lost[k] += 200 * level
        rate = load * PORT_BYTES_PER_S * (1 + 0.01 * noise)
        return {
            "tx_bytes_per_s": rate, "rx_bytes_per_s": rate * 0.99, "speed_bytes_per_s": np.full(n, PORT_BYTES_PER_S),
            "transmit_wait_per_s": waits, "ecn_marked_per_s": marks, "cnp_per_s": marks * NOTICES_PER_S / MARKS_PER_S,
            "retransmits_per_s": lost,
        }  # fmt: skip

    def host_available_bytes(self, when: float) -> np.ndarray:
        """Host memory that is available on each node, bytes."""
        physics = self.physics
        busy = physics.busy.reshape(-1, GPUS_PER_NODE).mean(axis=1)
        used = HOST_IDLE_RATIO + HOST_BUSY_RATIO * busy
        for strain in self.active:
            if strain.class_ == "host_memory":
                # Level 1 leaves HOST_FLOOR_RATIO.
                k, level = strain.nodes, strain.level(when)
                room = 1 - HOST_FLOOR_RATIO * 0.999 - used[k]
                used[k] = np.minimum(used[k] + room * level, 0.997)
        return (1 - used) * HOST_BYTES

    # --- ground truth --------------------------------------------------------------------------------------
    def observe(self, end: float, pending: Mapping[str, int], idle_gpus: int) -> None:
        """Note what became set or clear by `end`.

        Args:
            end: The moment.
            pending: GPUs that each queue's eligible jobs wait for.
            idle_gpus: GPUs that no job holds, on nodes in service.
        """
        now: dict[str, dict[str, Any]] = {}
        for strain in self.active:
            for key in self._true(strain, end):
                now[key] = strain.rows[key]
        for queue, gpus in pending.items():
            if gpus > idle_gpus:
                now[f"queue {queue}"] = {}
        for key, row in now.items():
            self._last_set[key] = end
            if key not in self._open:
                row = row or self._queue_row(key.removeprefix("queue "), end)
                if row["onset"] is not None:
                    row = dict(row) | {"id": f"{row['id']}-{self.changes}", "clear": None}
                row["onset"] = iso(end)
                self._open[key] = row
                if row not in self.rows:
                    self.rows.append(row)
                self.changes += 1
        for key, row in list(self._open.items()):
            if key not in now and end - self._last_set[key] >= CLEAR_S:
                row["clear"] = iso(self._last_set[key])
                del self._open[key]
                self.changes += 1

    def _true(self, strain: Strain, when: float) -> list[str]:
        """Things of a strain whose condition is set."""
        physics = self.physics
        level = strain.level(when)
        if strain.is_lookalike or level <= 0 or strain.job.state != "RUNNING":
            return []
        if strain.class_ == "fabric_congestion":
            slow = physics.step[strain.gpus[0]] > STEP_SLOW_RATIO * physics.step0[strain.gpus[0]] > 0
            return list(strain.rows) if slow else []
        if strain.class_ == "straggler":
            own = physics.own_step_s()
            slow = own[strain.gpus[0]] > SLOW_RATIO * float(np.median(own[physics.members[strain.job.id]]))
            return list(strain.rows) if slow else []
        return list(strain.rows) if level >= 1 else []

    def _record(self, strain: Strain) -> None:
        physics = self.physics
        names, uuids = physics.topology.node_names, physics.topology.uuids
        node = names[int(strain.nodes[0])]
        things: list[tuple[str, str, int | None]]
        if strain.class_ == "power_throttle":
            things = [("gpu", uuids[g], int(g)) for g in strain.gpus]
        elif strain.class_ == "straggler":
            g = int(strain.gpus[0])
            rank = int(np.searchsorted(physics.members[strain.job.id], g))
            things = [("rank", f"{strain.job.job_id}/{rank}", g)]
        elif strain.class_ == "fabric_congestion":
            things = [("port", f"{node}/mlx5_0/1", None)]
        else:
            things = [("node", node, None)]
        for scope, scope_id, gpu in things:
            strain.rows[f"{strain.class_} {scope_id}"] = {
                "id": f"{strain.id}-{scope_id}", "event": strain.id, "class": strain.class_, "mode": strain.mode,
                "scope": scope, "scope_id": scope_id, "node": node,
                "gpu_index": None if gpu is None else gpu % GPUS_PER_NODE,
                "gpu_uuid": None if gpu is None else uuids[gpu], "job_id": strain.job.job_id,
                "ramp_start": iso(strain.ramp_at), "planned_onset": iso(strain.onset_at), "onset": None, "clear": None,
                "is_step": strain.is_step, "is_injected": strain.is_injected,
            }  # fmt: skip
        if strain.is_lookalike:
            self.lookalikes += strain.rows.values()

    def _queue_row(self, queue: str, at: float) -> dict[str, Any]:
        none = dict.fromkeys(("node", "gpu_index", "gpu_uuid", "job_id", "ramp_start", "planned_onset", "onset",
                              "clear"))  # fmt: skip
        return {
            "id": f"shortage-{queue}-{math.floor(at)}", "event": "queue", "class": "shortage", "mode": "queue",
            "scope": "queue", "scope_id": queue, **none, "is_step": False, "is_injected": False,
        }  # fmt: skip

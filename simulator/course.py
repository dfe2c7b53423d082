"""What happens in a simulated cluster, in order: jobs come and go, nodes fault and come back, disturbances begin.

`Course` acts on what `job_course.py` has; a scheduling pass follows whatever changed. It is driven on a grid of five
seconds by `cluster.py`; what is asked from outside is in `control.py`.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

from simulator.events import Event
from simulator.faults import Fault, Hazards
from simulator.hardware import GPUS_PER_NODE, Topology
from simulator.job_course import (
    ARRIVE,
    DAY,
    END,
    FAULT,
    GIVE_UP,
    HOUR,
    ONSET,
    OOM,
    REPAIR,
    SILENT,
    STRAIN,
    WARN,
    JobCourse,
)
from simulator.jobs import Job
from simulator.rates import Rates
from simulator.strains import Strains
from simulator.streams import Stream, generator
from simulator.trace import Trace
from simulator.truth import CLASSES, iso
from simulator.workload import Population

HOUR_S = 3600


class Course(JobCourse):
    """Jobs, faults and disturbances of one cluster. Times are seconds since the epoch.

    Attributes:
        faults: Hardware faults so far, rows of `core_faults`; an end may lie ahead.
        node_state, node_reason: "up" or "down" and why, by node number.
        node_changes: How often any node changed its state.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        time: float,
        topology: Topology,
        workload: Population | Trace | None,
        fault_scale: float,
        rates: Rates,
    ) -> None:
        super().__init__(name, seed, time, topology, workload)
        nodes = topology.nodes
        self.fault_scale, self.rates = fault_scale, rates
        self.strains = Strains(self.physics, seed, rates.of_strains, rates.step_ratio)
        self.hazards = Hazards(nodes, seed, fault_scale * rates.node_fault_ratio)
        self.faults: list[dict[str, Any]] = []
        self.node_state: list[str] = ["up"] * nodes
        self.node_reason: list[str | None] = [None] * nodes
        self.node_changes = 0
        self._push(math.floor(time / HOUR_S) * HOUR_S, HOUR, None)
        for node in range(nodes):
            self._push_fault(node, 0, time)

    def happen(self, now: float) -> None:
        """Everything due by `now`, then a scheduling pass if anything changed."""
        self.time = now
        heap = self._heap
        while heap and heap[0][0] <= now + 1e-6:
            at, kind, _, what = heapq.heappop(heap)
            if kind == END:
                self._due(what[0], what[1], at)
            elif kind == OOM:
                self._exhaust(what, at)
            elif kind == FAULT:
                self._fault(what)
            elif kind == SILENT:
                self._silence(what)
            elif kind == REPAIR:
                self._repair(what, at)
            elif kind == WARN:
                self._warn(*what)
            elif kind == ARRIVE:
                self._arrive(what, at)
            elif kind == GIVE_UP:
                if what.state == "PENDING":
                    self._cancel_pending(what, at)
            elif kind == ONSET:
                self._begin_onset(at, *what)
            elif kind == STRAIN:
                self._begin_strain(at, *what)
            elif kind == HOUR:
                self._draw_hour(at)
            elif kind == DAY:
                self._draw_day(what)
        if self.scheduler.is_dirty:
            for job in self.scheduler.run(now):
                self._started(job)

    # --- disturbances --------------------------------------------------------------------------------------
    def _draw_hour(self, hour_at: float) -> None:
        """Candidates of the coming hour; whether one meets a busy GPU is seen when its time comes."""
        self._push(hour_at + HOUR_S, HOUR, None)
        hour = int(hour_at // HOUR_S)
        rng = generator(self.seed, Stream.ONSETS, hour)
        for class_ in CLASSES:
            for is_lookalike, ratio in ((False, 1.0), (True, self.rates.lookalike_ratio)):
                mean = self.rates.of(class_) * self.topology.gpus * self.fault_scale * ratio
                for i in range(int(rng.poisson(mean))):
                    at, gpu = hour_at + HOUR_S * rng.random(), int(rng.integers(self.topology.gpus))
                    is_step = bool(rng.random() < self.rates.step_ratio) and not is_lookalike
                    number = i + 4096 * (CLASSES.index(class_) * 2 + is_lookalike)
                    if at >= self.time:
                        self._push(at, ONSET, (class_, gpu, is_step, is_lookalike, hour, number))
        for at, *what in self.strains.draw(hour_at, self.fault_scale):
            if at >= self.time:
                self._push(at, STRAIN, what)
        racks = len(self.physics.supply_extra)
        for i in range(int(rng.poisson(self.rates.hot_aisle * racks * self.fault_scale))):
            at, rack = hour_at + HOUR_S * rng.random(), int(rng.integers(racks))
            if at >= self.time:
                self._push(at, ONSET, ("hot_aisle", rack, False, False, hour, 4096 * 7 + i))

    def _begin_strain(self, at: float, class_: str, gpu: int, is_step: bool, is_lookalike: bool, number: int) -> None:
        if not self._with_physics or self.strains.refusal(class_, gpu, at):
            return
        hour = int(at // HOUR_S)
        rng = generator(self.seed, Stream.STRAINS, hour, 64 + number)
        self.strains.begin(f"s{hour}-{number}", class_, gpu, at, rng, is_step=is_step, is_lookalike=is_lookalike)

    def _begin_onset(
        self, at: float, class_: str, place: int, is_step: bool, is_lookalike: bool, hour: int, number: int
    ) -> None:
        rng = generator(self.seed, Stream.EVENT, hour, number)
        id_ = f"e{hour}-{number}"
        if class_ == "hot_aisle":
            if self._with_physics:
                self.events.begin_hot_aisle(id_, place, at, rng)
            return
        if not self._with_physics:
            job = self.physics.jobs[place]
            is_leak = class_ == "memory_exhaustion" and not is_lookalike
            if is_leak and job is not None and job.habit[0] == "train" and self.time - (job.start or 0.0) > 400:
                self._push(at + float(rng.uniform(5, 300)), OOM, job)
            return
        if not self.events.is_ripe(class_, place, self.time):
            return
        event = self.events.begin(id_, class_, place, at, rng, is_step=is_step, is_lookalike=is_lookalike)
        self._plan_exhaustion(event)

    def _plan_exhaustion(self, event: Event) -> None:
        if event.oom_at < math.inf:
            self._push(event.oom_at, OOM, event)

    def _exhaust(self, what: Event | Job, at: float) -> None:
        job = what.job if isinstance(what, Event) else what
        if job is None or job.state != "RUNNING":
            return
        if isinstance(what, Event):
            if what not in self.events.active:
                return
            self.events.book.note_exhausted(what, at)
        self._finish(job, at, "OUT_OF_MEMORY")

    # --- hardware faults -----------------------------------------------------------------------------------
    def _push_fault(self, node: int, number: int, after: float) -> None:
        fault = self.hazards.next(node, number, after)
        if fault is not None:
            self._push(fault.at, FAULT, fault)
            for at, what, errors in fault.warnings:
                self._push(at, WARN, (fault.gpu, what, errors))

    def _warn(self, gpu: int, what: str, errors: int) -> None:
        physics = self.physics
        if what == "ecc":
            physics.remapped[gpu] += errors
            physics.xid[gpu] = 63
        else:
            physics.nvlink_errors[gpu] += errors

    def _fault(self, fault: Fault) -> None:
        physics, node = self.physics, fault.node
        self.scheduler.set_usable(node, False)
        self.node_state[node], self.node_reason[node] = "down", fault.kind
        self.node_changes += 1
        if fault.gpu >= 0:
            physics.xid[fault.gpu] = fault.xid or 0
            physics.is_lost[fault.gpu] = fault.xid == 79
            physics.ecc[fault.gpu] += 1.0 * (fault.xid in (48, 95))
            physics.nvlink_errors[fault.gpu] += 500.0 * (fault.xid == 74)
        held = physics.jobs[node * GPUS_PER_NODE : (node + 1) * GPUS_PER_NODE]
        for job in {job.id: job for job in held if job is not None}.values():
            self._finish(job, fault.at, "NODE_FAIL")
        self._push(fault.unreachable_at, SILENT, node)
        self._push(fault.repaired_at, REPAIR, fault)
        self.faults.append(
            {
                "cluster": self.name,
                "node": self.topology.node_names[node],
                "gpu_uuid": self.topology.uuids[fault.gpu] if fault.gpu >= 0 else "",
                "kind": fault.kind,
                "xid": fault.xid,
                "start_time": iso(fault.at),
                "end_time": iso(fault.repaired_at),
            }
        )

    def _silence(self, node: int) -> None:
        self.physics.is_reachable[node] = False

    def _repair(self, fault: Fault, at: float) -> None:
        physics, node = self.physics, fault.node
        g = slice(node * GPUS_PER_NODE, (node + 1) * GPUS_PER_NODE)
        physics.is_reachable[node] = True
        physics.is_lost[g] = False
        # The driver was loaded anew: the last XID and volatile counts start over; remapped rows stay.
        physics.xid[g] = 0
        physics.ecc[g] = physics.nvlink_errors[g] = 0.0
        self.node_state[node], self.node_reason[node] = "up", None
        self.node_changes += 1
        self.scheduler.set_usable(node, True)
        self._push_fault(node, fault.number + 1, at)

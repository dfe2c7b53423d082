"""What happens in a simulated cluster, in order: jobs arrive and end, nodes fault and come back, disturbances begin.

`Course` owns the calendar and the parts it acts upon; a scheduling pass follows whatever changed. It is driven on a
grid of five seconds by `cluster.py`, which also holds everything that is asked from outside.
"""

from __future__ import annotations

import heapq
import math
from itertools import count
from typing import Any

from simulator.events import Event, Events, Rates
from simulator.faults import Fault, Hazards
from simulator.hardware import GPUS_PER_NODE, Topology
from simulator.jobs import ENDED, Job
from simulator.physics import Physics
from simulator.scheduler import Scheduler
from simulator.strains import Strains
from simulator.streams import Stream, generator
from simulator.trace import Trace
from simulator.truth import CLASSES, iso
from simulator.workload import DAY_S, Population, draw_profile

HOUR_S = 3600
# Order of events that fall together: an end frees GPUs before a fault or an arrival looks at them.
_END, _OOM, _FAULT, _SILENT, _REPAIR, _WARN, _ARRIVE, _GIVE_UP, _ONSET, _HOUR, _DAY, _STRAIN = range(12)


class Course:
    """Calendar, jobs and state of one cluster. Times are seconds since the epoch.

    Attributes:
        time: The present.
        jobs: Jobs that wait or run, by internal id.
        ended: Jobs that ended, in order.
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
        nodes = topology.nodes
        self.name, self.seed, self.time, self.topology = name, seed, time, topology
        self.workload, self.fault_scale, self.rates = workload, fault_scale, rates
        self.physics = Physics(topology, seed, time)
        self.events = Events(self.physics)
        self.strains = Strains(self.physics, seed, rates.of_strains, rates.step_ratio)
        self.hazards = Hazards(nodes, seed, fault_scale)
        self.scheduler = Scheduler(nodes, topology.pod_of, max(GPUS_PER_NODE, topology.gpus // 2))
        self.jobs: dict[int, Job] = {}
        self.ended: list[Job] = []
        self.faults: list[dict[str, Any]] = []
        self.node_state: list[str] = ["up"] * nodes
        self.node_reason: list[str | None] = [None] * nodes
        self.node_changes = 0
        self._with_physics = True
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = count()
        self._ids = count(1001)
        self._blocked: dict[int, list[Job]] = {}
        self._arrays: dict[tuple[int, int], int] = {}
        self._day = int(time // DAY_S)
        self._push(time, _DAY, self._day)
        self._push(math.floor(time / HOUR_S) * HOUR_S, _HOUR, None)
        for node in range(nodes):
            self._push_fault(node, 0, time)

    def due_at(self) -> float:
        """When the next thing happens."""
        return self._heap[0][0] if self._heap else math.inf

    def with_physics(self, is_on: bool) -> None:
        """Turn physics off to advance jobs alone, or on again: running jobs are then put on their GPUs."""
        self._with_physics = is_on
        if not is_on:
            return
        self._heap = [item for item in self._heap if item[1] != _OOM]  # leaks that had no ramp
        heapq.heapify(self._heap)
        for job in self.running():
            self._put_on_gpus(job)
        self.physics.settle(self.time)

    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "RUNNING"]

    def pending(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "PENDING"]

    # --- things that happen --------------------------------------------------------------------------------
    def _push(self, at: float, kind: int, what: Any) -> None:
        heapq.heappush(self._heap, (at, kind, next(self._order), what))

    def happen(self, now: float) -> None:
        """Everything due by `now`, then a scheduling pass if anything changed."""
        self.time = now
        heap = self._heap
        while heap and heap[0][0] <= now + 1e-6:
            at, kind, _, what = heapq.heappop(heap)
            if kind == _END:
                self._due(what[0], what[1], at)
            elif kind == _OOM:
                self._exhaust(what, at)
            elif kind == _FAULT:
                self._fault(what)
            elif kind == _SILENT:
                self._silence(what)
            elif kind == _REPAIR:
                self._repair(what, at)
            elif kind == _WARN:
                self._warn(*what)
            elif kind == _ARRIVE:
                self._arrive(what, at)
            elif kind == _GIVE_UP:
                if what.state == "PENDING":
                    self._cancel_pending(what, at)
            elif kind == _ONSET:
                self._begin_onset(at, *what)
            elif kind == _STRAIN:
                self._begin_strain(at, *what)
            elif kind == _HOUR:
                self._draw_hour(at)
            elif kind == _DAY:
                self._draw_day(what)
        if self.scheduler.is_dirty:
            for job in self.scheduler.run(now):
                self._started(job)

    # --- jobs ----------------------------------------------------------------------------------------------
    def _draw_day(self, day: int) -> None:
        self._push((day + 1) * DAY_S, _DAY, day + 1)
        if self.workload is not None:
            for job in self.workload.submissions(day):
                if job.submit >= self.time or day > self._day:
                    self._push(job.submit, _ARRIVE, job)

    def _arrive(self, job: Job, at: float) -> None:
        if job.id == 0:
            job.id = next(self._ids)
            if self._is_discouraged(job):
                job.state, job.end = "CANCELLED", at
                return
            self.jobs[job.id] = job
            if job.array_id is not None:
                job.array_id = self._arrays.setdefault((int(job.submit // DAY_S), job.array_id), job.id)
        if job.nodes > self.topology.nodes:
            job.outcome = "CANCELLED"
            job.gives_up_at = at
        if job.after is not None and job.after.state not in ENDED:
            job.reason = "Dependency"
            self._blocked.setdefault(job.after.id, []).append(job)
            return
        if job.state != "PENDING":
            return
        job.eligible = max(job.submit, job.after.end or 0.0) if job.after is not None else job.submit
        self.scheduler.submit(job)
        if job.gives_up_at is not None:
            self._push(max(job.gives_up_at, at), _GIVE_UP, job)

    def _is_discouraged(self, job: Job) -> bool:
        """People look at the queue: the longer it is, the fewer go on submitting."""
        if isinstance(self.workload, Trace):
            return False
        backlog = self.scheduler.pending_gpus / self.topology.gpus
        return backlog > 1 and generator(self.seed, Stream.JOB, job.id, 2).random() < 1 - math.exp(1 - backlog)

    def _started(self, job: Job) -> None:
        assert job.start is not None
        length = job.runtime_s if job.limit_s is None else min(job.runtime_s, job.limit_s)
        self._push_end(job, job.start + length)
        if self._with_physics:
            self._put_on_gpus(job)
        else:
            self.physics.occupy(job)

    def _put_on_gpus(self, job: Job) -> None:
        if job.profile is None:
            job.profile = draw_profile(*job.habit)
        self.physics.attach(job, self.time)

    def _push_end(self, job: Job, at: float) -> None:
        job.end_event += 1
        self._push(at, _END, (job, job.end_event))

    def _due(self, job: Job, event: int, at: float) -> None:
        """A job reaches its end, unless slow steps have cost it time that it still needs."""
        if job.state != "RUNNING" or event != job.end_event or job.start is None:
            return
        members = self.physics.members.get(job.id)
        lost = float(self.physics.lost_s[members].max()) if members is not None and job.key >= 0 else 0.0
        needed = job.start + job.runtime_s + math.floor(lost)
        if at < min(needed, job.limit_end) - 0.5:
            self._push_end(job, min(needed, job.limit_end))
            return
        is_timeout = job.limit_s is not None and job.runtime_s + lost > job.limit_s
        self._finish(job, at, "TIMEOUT" if is_timeout else job.outcome)

    def _finish(self, job: Job, at: float, state: str) -> None:
        job.end, job.state = max(at, job.start or at), state
        self.scheduler.release(job)
        self.physics.detach(job)
        self.events.end_job(job, at)
        self._close(job, at)
        if state == "FAILED" and self._with_physics:
            rng = generator(self.seed, Stream.JOB, job.id, 1)
            if rng.random() < 0.15:  # the application's own faults leave an XID of their kind behind
                self.physics.xid[job.gpus_held[int(rng.integers(len(job.gpus_held)))]] = int(rng.choice([13, 31, 43]))
        if state in ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY") and self.workload is not None:
            again = self.workload.resubmission(job, at)
            if again is not None:
                self._push(again.submit, _ARRIVE, again)

    def _close(self, job: Job, at: float) -> None:
        """Book an ended job and let those that waited for it go on."""
        job.reason = "None"
        self.ended.append(job)
        del self.jobs[job.id]
        for waiting in self._blocked.pop(job.id, []):
            waiting.reason = "Priority"
            self._arrive(waiting, at)

    def _cancel_pending(self, job: Job, at: float) -> None:
        self.scheduler.withdraw(job)
        job.state, job.end = "CANCELLED", at
        self._close(job, at)

    # --- disturbances --------------------------------------------------------------------------------------
    def _draw_hour(self, hour_at: float) -> None:
        """Candidates of the coming hour; whether one meets a busy GPU is seen when its time comes."""
        self._push(hour_at + HOUR_S, _HOUR, None)
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
                        self._push(at, _ONSET, (class_, gpu, is_step, is_lookalike, hour, number))
        for at, *what in self.strains.draw(hour_at, self.fault_scale):
            if at >= self.time:
                self._push(at, _STRAIN, what)
        racks = len(self.physics.supply_extra)
        for i in range(int(rng.poisson(self.rates.hot_aisle * racks * self.fault_scale))):
            at, rack = hour_at + HOUR_S * rng.random(), int(rng.integers(racks))
            if at >= self.time:
                self._push(at, _ONSET, ("hot_aisle", rack, False, False, hour, 4096 * 7 + i))

    def _begin_strain(self, at: float, class_: str, gpu: int, is_step: bool, is_lookalike: bool, number: int) -> None:
        if not self._with_physics or self.strains.refusal(class_, gpu, at):
            return
        hour = int(at // HOUR_S)
        rng = generator(self.seed, Stream.STRAINS, hour, 64 + number)
        self.strains.begin(f"s{hour}-{number}", class_, gpu, at, rng, is_step=is_step, is_lookalike=is_lookalike)

    def pending_by_queue(self) -> dict[str, int]:
        """GPUs that eligible jobs of each queue wait for."""
        found: dict[str, int] = {}
        for _, job in self.scheduler.pending:
            found[job.queue] = found.get(job.queue, 0) + job.gpus
        return found

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
                self._push(at + float(rng.uniform(5, 300)), _OOM, job)
            return
        if not self.events.is_ripe(class_, place, self.time):
            return
        event = self.events.begin(id_, class_, place, at, rng, is_step=is_step, is_lookalike=is_lookalike)
        self._plan_exhaustion(event)

    def _plan_exhaustion(self, event: Event) -> None:
        if event.oom_at < math.inf:
            self._push(event.oom_at, _OOM, event)

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
            self._push(fault.at, _FAULT, fault)
            for at, what, errors in fault.warnings:
                self._push(at, _WARN, (fault.gpu, what, errors))

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
        self._push(fault.unreachable_at, _SILENT, node)
        self._push(fault.repaired_at, _REPAIR, fault)
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

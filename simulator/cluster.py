"""The simulated cluster: jobs, scheduler, physics, disturbances and faults on one clock.

`SimulatedCluster` is the one class others use. It owns the order of things: on a grid of five seconds jobs arrive and
end, nodes fault and come back, the scheduler passes; between grid points physics runs. Frames of its state are made
in `frames.py`, files in `history.py`, HTTP in `exporter.py`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl

from simulator import frames
from simulator.events import CLASSES, Event, Events, Rates, iso
from simulator.faults import Fault, Hazards
from simulator.hardware import GPUS_PER_NODE, SimulatorError, Topology
from simulator.hardware import gpu_model as model_of
from simulator.jobs import ENDED, Job, Profile
from simulator.physics import SUBSTEP_S, Physics
from simulator.scheduler import Scheduler
from simulator.streams import Stream, generator
from simulator.workload import DAY_S, Population, Trace, draw_profile

HOUR_S = 3600
GRID_S = SUBSTEP_S
# Order of events that fall together: an end frees GPUs before a fault or an arrival looks at them.
_END, _OOM, _FAULT, _SILENT, _REPAIR, _WARN, _ARRIVE, _GIVE_UP, _ONSET, _HOUR, _DAY = range(11)


class SimulatedCluster:
    """A GPU cluster that is not there.

    All of it follows from the arguments: the same arguments give the same history, whatever the size of ticks.

    Args:
        nodes: Nodes of 8 GPUs.
        seed: Seed of hardware, users, jobs, disturbances and faults.
        start: Time at which it stands, with a time zone.
        tick_s: Exporters take a sample this often, s; `step()` advances by this.
        gpu_model: Model of every GPU, a name in `hardware.GPU_MODELS`.
        job_trace: Canonical jobs file to replay, moved to begin at `start`; None: users of its own.
        fault_scale: Multiplies the base rates of disturbances and node faults (and divides repair times).
        load: GPU time that users ask for ÷ GPU time there is.
        cluster: Name of the cluster.
        own_jobs: False: nobody submits; jobs come through `place_job` alone.
        rates: Base rates of disturbances.

    Raises:
        SimulatorError: An argument is out of range; the message names it and the valid choices.
    """

    def __init__(
        self,
        nodes: int = 32,
        seed: int = 7,
        start: datetime | None = None,
        tick_s: float = 5.0,
        gpu_model: str = "NVIDIA H100 80GB HBM3",
        job_trace: str | Path | None = None,
        fault_scale: float = 1.0,
        load: float = 0.9,
        *,
        cluster: str = "sim",
        own_jobs: bool = True,
        rates: Rates | None = None,
        nodes_per_rack: int = 4,
        racks_per_pod: int = 8,
    ) -> None:
        if start is None or start.tzinfo is None:
            raise SimulatorError(f"start = {start}: a time with a time zone is needed")
        for name, value, low, high in (
            ("tick_s", tick_s, 0.1, 3600), ("fault_scale", fault_scale, 0, 1e4), ("load", load, 0, 10),
        ):  # fmt: skip
            if not low <= value <= high:
                raise SimulatorError(f"{name} = {value}: must be {low} to {high:g}")
        self.name, self.seed, self.tick_s, self.fault_scale = cluster, seed, float(tick_s), fault_scale
        self.time = start.timestamp()
        self.topology = Topology.build(nodes, seed, model_of(gpu_model), cluster, nodes_per_rack, racks_per_pod)
        self.rates = rates or Rates()
        self.physics = Physics(self.topology, seed, self.time)
        self.events = Events(self.physics)
        self.hazards = Hazards(nodes, seed, fault_scale)
        self.workload: Population | Trace | None = None
        if job_trace is not None:
            self.workload = Trace(Path(job_trace), self.time, self.topology.gpus, seed)
        elif own_jobs and load > 0:
            self.workload = Population(seed, self.topology.gpus, load)
        self.scheduler = Scheduler(nodes, self.topology.pod_of, max(GPUS_PER_NODE, self.topology.gpus // 2))
        self.jobs: dict[int, Job] = {}
        self.ended: list[Job] = []
        self.faults: list[dict[str, Any]] = []
        self.node_state: list[str] = ["up"] * nodes
        self.node_reason: list[str | None] = [None] * nodes
        self.newest: frames.Sample | None = None
        self._with_physics = True
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = count()
        self._ids = count(1001)
        self._injected = count(1)
        self._blocked: dict[int, list[Job]] = {}
        self._arrays: dict[tuple[int, int], int] = {}
        self._day = int(self.time // DAY_S)
        self._push(self.time, _DAY, self._day)
        self._push(math.floor(self.time / HOUR_S) * HOUR_S, _HOUR, None)
        for node in range(nodes):
            self._push_fault(node, 0, self.time)

    # --- clock ---------------------------------------------------------------------------------------------
    @property
    def now(self) -> datetime:
        """Present time of the cluster, UTC."""
        at = iso(self.time)
        assert at is not None
        return at

    def step(self) -> None:
        """Advance by one tick."""
        self._tick(self.time + self.tick_s)

    def advance(self, to: datetime) -> None:
        """Advance to a time, tick by tick; the last tick may be shorter.

        Raises:
            SimulatorError: `to` has no time zone or lies in the past.
        """
        target = self._seconds(to)
        while self.time < target - 1e-6:
            self._tick(min(self.time + self.tick_s, target))

    def advance_jobs(self, to: datetime) -> None:
        """Advance jobs, scheduler and node faults alone, fast; afterwards temperatures stand where work keeps them.

        No bottleneck onset is written to `truth` meanwhile; leaks end their jobs all the same.
        """
        target = self._seconds(to)
        if not self._with_physics:
            raise SimulatorError("advance_jobs cannot run within itself")
        self._with_physics = False
        while self._heap and self._heap[0][0] <= target:
            grid = min(math.ceil(self._heap[0][0] / GRID_S) * GRID_S, target)
            self._happen(grid)
            self.time = grid
        self._with_physics = True
        self.time = target
        for job in self.running():
            self._put_on_gpus(job)
        self._heap = [item for item in self._heap if item[1] != _OOM]
        heapq.heapify(self._heap)
        self.physics.settle(target)

    def _seconds(self, to: datetime) -> float:
        if to.tzinfo is None:
            raise SimulatorError(f"{to}: a time with a time zone is needed")
        target = to.timestamp()
        if target < self.time - 1e-6:
            raise SimulatorError(f"{to}: lies before the cluster's present, {self.now}")
        return target

    def _tick(self, end: float) -> None:
        physics, events = self.physics, self.events
        physics.begin_tick()
        time = self.time
        while time < end - 1e-6:
            grid = math.floor(time / GRID_S + 1e-9) * GRID_S
            if time - grid < 1e-6:
                self._happen(time)
            until = min(grid + GRID_S, end)
            events.act((time + until) / 2)
            before = physics.temp.copy()
            physics.time = time
            physics.advance(until)
            events.observe(time, until, before)
            events.retire(until)
            time = self.time = until
        events.fill_memory(end)

    # --- things that happen --------------------------------------------------------------------------------
    def _push(self, at: float, kind: int, what: Any) -> None:
        heapq.heappush(self._heap, (at, kind, next(self._order), what))

    def _happen(self, now: float) -> None:
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
        racks = len(self.physics.supply_extra)
        for i in range(int(rng.poisson(self.rates.hot_aisle * racks * self.fault_scale))):
            at, rack = hour_at + HOUR_S * rng.random(), int(rng.integers(racks))
            if at >= self.time:
                self._push(at, _ONSET, ("hot_aisle", rack, False, False, hour, 4096 * 7 + i))

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
            self.events.note_exhausted(what, at)
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
        self.scheduler.set_usable(node, True)
        self._push_fault(node, fault.number + 1, at)

    # --- asked from outside --------------------------------------------------------------------------------
    def inject(
        self,
        class_: str,
        node: str,
        gpu_index: int,
        onset_in_s: float = 90.0,
        is_step: bool = False,
        mode: str | None = None,
    ) -> dict[str, Any]:
        """Start a disturbance that is planned to set its condition `onset_in_s` from now.

        Checkpoints and evaluations of the job are put off until past the onset, so that it comes on time.

        Args:
            class_: A class of `events.CLASSES`.
            node: Name of the node.
            gpu_index: GPU on it, 0-7.
            onset_in_s: Seconds until the planned onset.
            is_step: Without any precursor.
            mode: One of the class's `events.MODES`; `hot_aisle` warms the whole rack of the node.

        Returns:
            The ground-truth row; `onset` is filled in when the physics gets there.

        Raises:
            SimulatorError: The class, mode, node or GPU is unknown, or its state rules the onset out.
        """
        number = self.topology.node_number(node)
        if not 0 <= gpu_index < GPUS_PER_NODE:
            raise SimulatorError(f"gpu_index = {gpu_index}: must be 0 to {GPUS_PER_NODE - 1}")
        gpu = number * GPUS_PER_NODE + gpu_index
        n = next(self._injected)
        rng = generator(self.seed, Stream.INJECTED, n)
        if mode == "hot_aisle":
            rack = int(self.topology.rack_of[number])
            return self.events.begin_hot_aisle(f"i{n}", rack, self.time, rng, True, onset_in_s).truth[gpu]
        event = self.events.begin(
            f"i{n}", class_, gpu, self.time, rng, mode=mode, is_step=is_step, onset_in_s=onset_in_s, is_injected=True
        )
        if event.job is not None:
            self.physics.hold_cycles(event.job, max(event.hold_until, event.onset_at + 60))
        self._plan_exhaustion(event)
        return event.truth[gpu]

    def place_job(
        self,
        job_id: str,
        user: str,
        node_list: Sequence[str] | str,
        *,
        gpus_per_node: int = GPUS_PER_NODE,
        time_limit_s: float | None = None,
        runtime_s: float | None = None,
        account: str = "default",
        queue: str = "batch",
        name: str = "job",
        kind: str = "train",
        profile: Profile | None = None,
    ) -> dict[str, Any]:
        """Run a job that an outside scheduler placed; it stays until `end_job` unless `runtime_s` is given.

        Raises:
            SimulatorError: A node is unknown, down or too full, the id is in use, or the kind is not known.
        """
        names = [part for part in node_list.split(",") if part] if isinstance(node_list, str) else list(node_list)
        if not names:
            raise SimulatorError("node_list is empty: name at least one node")
        nodes = [self.topology.node_number(name) for name in names]
        if not 1 <= gpus_per_node <= GPUS_PER_NODE:
            raise SimulatorError(f"gpus_per_node = {gpus_per_node}: must be 1 to {GPUS_PER_NODE}")
        if kind not in ("train", "serve", "notebook"):
            raise SimulatorError(f"no kind {kind!r}; kinds: train, serve, notebook")
        if any(job.job_id == job_id for job in self.jobs.values()):
            raise SimulatorError(f"job {job_id} is known already")
        counts = self.scheduler.counts()
        for number, label in zip(nodes, names, strict=True):
            if counts[number] < gpus_per_node:
                raise SimulatorError(f"node {label} has {counts[number]} free GPUs, {gpus_per_node} are asked for")
        id_ = next(self._ids)
        gpus = gpus_per_node * len(nodes)
        if profile is None:
            profile = draw_profile(kind, gpus, self.seed, id_)
            profile.warmup_s, profile.reports_steps = 15.0, kind == "train"
            if kind == "train":
                profile.power_ratio = max(profile.power_ratio, 0.9)
        job = Job(
            id=id_, user=user, account=account, queue=queue, name=name, submit=self.time, nodes=len(nodes),
            per_node=gpus_per_node, limit_s=time_limit_s, runtime_s=runtime_s if runtime_s is not None else math.inf,
            cpus=12 * gpus, memory_mib=131_072 * gpus, profile=profile, external_id=job_id, eligible=self.time,
        )  # fmt: skip
        self.jobs[id_] = job
        self.scheduler.place(job, nodes, self.time)
        self._put_on_gpus(job)
        if runtime_s is not None or time_limit_s is not None:
            self._push_end(job, self.time + min(runtime_s or math.inf, time_limit_s or math.inf))
        return frames.job_row(self, job)

    def end_job(self, job_id: str, state: str = "COMPLETED") -> dict[str, Any]:
        """End a running or pending job now.

        Raises:
            SimulatorError: No such job is known or the state is not one that jobs end in.
        """
        if state not in ENDED:
            raise SimulatorError(f"no state {state!r} that a job ends in; states: {', '.join(ENDED)}")
        job = next((job for job in self.jobs.values() if job.job_id == job_id), None)
        if job is None:
            raise SimulatorError(f"no job {job_id!r} runs or waits")
        if job.state == "PENDING":
            self._cancel_pending(job, self.time)
        else:
            self._finish(job, self.time, state)
        return frames.job_row(self, job)

    # --- what can be seen ----------------------------------------------------------------------------------
    @property
    def truth(self) -> list[dict[str, Any]]:
        """Ground truth, one row per GPU and onset; `onset` is null while an injected one is still to come."""
        return self.events.truth

    @property
    def lookalikes(self) -> list[dict[str, Any]]:
        """Harmless ramps, one row per GPU."""
        return self.events.lookalikes

    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "RUNNING"]

    def pending(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "PENDING"]

    def gpu_frame(self) -> pl.DataFrame:
        """The newest sample of each GPU that answers, in the columns and units of `raw_gpu_samples`."""
        return frames.gpu_frame(self)

    def node_frame(self) -> pl.DataFrame:
        """The newest sample of each node, in the columns of `core_node_samples`."""
        return frames.node_frame(self)

    def jobs_frame(self, jobs: Iterable[Job] | None = None) -> pl.DataFrame:
        """Jobs in the canonical columns: those that ended, run and wait (or those given), planned starts included."""
        return frames.jobs_frame(self, jobs)

    def faults_frame(self) -> pl.DataFrame:
        """Hardware faults so far, in the columns of `core_faults`."""
        return frames.faults_frame(self)

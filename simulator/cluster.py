"""The simulated cluster: `SimulatedCluster` is the one class others use.

It drives the clock: on a grid of five seconds things happen (`course.py`), between grid points physics runs. Here
belong what is asked of it from outside and what can be seen; frames are made in `frames.py`, files in `history.py`,
HTTP in `exporter.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl

from simulator import frames
from simulator.course import Course
from simulator.events import Rates
from simulator.hardware import GPUS_PER_NODE, SimulatorError, Topology
from simulator.hardware import gpu_model as model_of
from simulator.jobs import ENDED, Job, Profile
from simulator.physics import SUBSTEP_S
from simulator.strains import CLASSES as STRAINS
from simulator.streams import Stream, generator
from simulator.trace import Trace
from simulator.truth import iso
from simulator.workload import Population, draw_profile

GRID_S = SUBSTEP_S


class SimulatedCluster(Course):
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
        topology = Topology.build(nodes, seed, model_of(gpu_model), cluster, nodes_per_rack, racks_per_pod)
        time = start.timestamp()
        workload: Population | Trace | None = None
        if job_trace is not None:
            workload = Trace(Path(job_trace), time, topology.gpus, seed)
        elif own_jobs and load > 0:
            workload = Population(seed, topology.gpus, load)
        super().__init__(cluster, seed, time, topology, workload, fault_scale, rates or Rates())
        self.tick_s = float(tick_s)
        self.newest: frames.Sample | None = None
        self._injected = count(1)

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
        self.with_physics(False)
        while self.due_at() <= target:
            grid = min(math.ceil(self.due_at() / GRID_S) * GRID_S, target)
            self.happen(grid)
        self.time = target
        self.with_physics(True)

    def _seconds(self, to: datetime) -> float:
        if to.tzinfo is None:
            raise SimulatorError(f"{to}: a time with a time zone is needed")
        target = to.timestamp()
        if target < self.time - 1e-6:
            raise SimulatorError(f"{to}: lies before the cluster's present, {self.now}")
        return target

    def _tick(self, end: float) -> None:
        physics, events, strains = self.physics, self.events, self.strains
        physics.begin_tick()
        time = self.time
        while time < end - 1e-6:
            grid = math.floor(time / GRID_S + 1e-9) * GRID_S
            if time - grid < 1e-6:
                self.happen(time)
            until = min(grid + GRID_S, end)
            events.act((time + until) / 2)
            strains.act((time + until) / 2)
            before = physics.temp.copy()
            physics.time = time
            physics.advance(until)
            events.observe(time, until, before)
            events.retire(until)
            if strains.active or strains.has_open() or self.rates.has_shortage:
                pending = self.pending_by_queue() if self.rates.has_shortage else {}
                strains.observe(until, pending, int(sum(self.scheduler.counts())))
                strains.retire(until)
            time = self.time = until
        events.fill_memory(end)

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
            class_: A class of `truth.CLASSES` or of `strains.CLASSES`.
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
        if class_ in STRAINS:
            strain = self.strains.begin(
                f"i{n}", class_, gpu, self.time, rng, is_step=is_step, onset_in_s=onset_in_s, is_injected=True
            )
            self.physics.hold_cycles(strain.job, strain.hold_until)
            self.strains.rows += strain.rows.values()
            self.strains.changes += 1
            return next(row for row in strain.rows.values() if row["gpu_index"] in (None, gpu_index))
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
        profile: Profile | Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run a job that an outside scheduler placed; it stays until `end_job` unless `runtime_s` is given.

        Args:
            job_id: Id as that scheduler prints it.
            user: Its owner.
            node_list: Names of its nodes, or one string with commas.
            gpus_per_node: GPUs it holds on each.
            time_limit_s: Ends it as TIMEOUT, s.
            runtime_s: Ends it as COMPLETED, s.
            account: As the scheduler says.
            queue: As the scheduler says.
            name: As the scheduler says.
            kind: train, serve or notebook.
            profile: How it works on its GPUs, or fields of `Profile` that differ from the drawn one.

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
        if not isinstance(profile, Profile):
            profile = self._profile(kind, gpus, id_, profile or {})
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

    def _profile(self, kind: str, gpus: int, id_: int, changes: Mapping[str, Any]) -> Profile:
        """Drawn for a job placed from outside: quick to warm up, fit to show every class."""
        drawn = draw_profile(kind, gpus, self.seed, id_)
        drawn.warmup_s, drawn.reports_steps = 15.0, kind == "train"
        if kind == "train":
            drawn.power_ratio = max(drawn.power_ratio, 0.9)
        known = [field.name for field in fields(Profile) if field.name != "kind"]
        for name, value in changes.items():
            if name not in known:
                raise SimulatorError(f"no field {name!r} in a profile; fields: {', '.join(known)}")
            if not isinstance(value, (int, float)) or value < 0:
                raise SimulatorError(f"profile: {name} = {value!r}: must be a number, not negative")
            setattr(drawn, name, type(getattr(drawn, name))(value))
        return drawn

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
        return [*self.events.book.rows, *self.strains.rows]

    @property
    def lookalikes(self) -> list[dict[str, Any]]:
        """Harmless ramps, one row per GPU."""
        return [*self.events.book.lookalikes, *self.strains.lookalikes]

    def gpu_frame(self) -> pl.DataFrame:
        """The newest sample of each GPU that answers, in the columns and units of `raw_gpu_samples`."""
        return frames.gpu_frame(self)

    def node_frame(self) -> pl.DataFrame:
        """The newest sample of each node, in the columns of `core_node_samples`."""
        return frames.node_frame(self)

    def port_frame(self) -> pl.DataFrame:
        """The newest rates of each node's port, in the columns of `core_port_samples`."""
        return frames.port_frame(self)

    def rank_frame(self) -> pl.DataFrame:
        """Step times of ranks of their own, for jobs that report steps, in the columns of `core_job_progress`."""
        return frames.rank_frame(self)

    def jobs_frame(self, jobs: Iterable[Job] | None = None) -> pl.DataFrame:
        """Jobs in the canonical columns: those that ended, run and wait (or those given), planned starts included."""
        return frames.jobs_frame(self, jobs)

    def faults_frame(self) -> pl.DataFrame:
        """Hardware faults so far, in the columns of `core_faults`."""
        return frames.faults_frame(self)

    def inventory_csv(self) -> str:
        """Inventory text: node, rack, pod, gpu_model, gpus, and state and reason of nodes that are down."""
        topology = self.topology
        lines = ["node,rack,pod,gpu_model,gpus,state,reason"]
        for i, name in enumerate(topology.node_names):
            state, reason = ("DOWN", self.node_reason[i]) if self.node_state[i] == "down" else ("", "")
            place = f"{topology.rack_name(i)},{topology.pod_name(i)}"
            lines.append(f"{name},{place},{topology.model.name},{GPUS_PER_NODE},{state},{reason}")
        return "\n".join(lines) + "\n"

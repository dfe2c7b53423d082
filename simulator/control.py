"""What is asked of a simulated cluster from outside: disturbances now, jobs of an outside scheduler.

Requests over HTTP come through `exporter.py`; what happens by itself is in `course.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import count
from typing import Any

from simulator import frames
from simulator.course import Course
from simulator.events import CLASSES as EVENTS
from simulator.hardware import GPUS_PER_NODE, SimulatorError
from simulator.job_course import ARRIVE
from simulator.jobs import ENDED, Job, Profile
from simulator.strains import CLASSES as STRAINS
from simulator.streams import Stream, generator
from simulator.workload import draw_profile

SHORT_S = 600.0  # an injected job that nobody can start waits this long


class Control(Course):
    """A cluster that takes requests."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._injected = count(1)
        self._short_until = -math.inf

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
            class_: A class of `truth.CLASSES` or of `strains.CLASSES`, or `shortage`: a job that waits for every GPU.
            node: Name of the node.
            gpu_index: GPU on it, 0-7.
            onset_in_s: Seconds until the planned onset.
            is_step: Without any precursor.
            mode: One of the class's modes (`events.MODES`, `strains.MODES`); `hot_aisle` warms the whole rack of the
                node. The second mode of a strain is its step.

        Returns:
            The ground-truth row; `onset` is filled in when the physics gets there.

        Raises:
            SimulatorError: The class, mode, node or GPU is unknown, or its state rules the onset out.
        """
        if class_ == "shortage":
            return self._run_short(onset_in_s, mode)
        if class_ not in (*EVENTS, *STRAINS):
            valid = ", ".join((*EVENTS, *STRAINS, "shortage"))
            raise SimulatorError(f"no bottleneck class {class_!r} here; classes: {valid}")
        number = self.topology.node_number(node)
        if not 0 <= gpu_index < GPUS_PER_NODE:
            raise SimulatorError(f"gpu_index = {gpu_index}: must be 0 to {GPUS_PER_NODE - 1}")
        gpu = number * GPUS_PER_NODE + gpu_index
        n = next(self._injected)
        rng = generator(self.seed, Stream.INJECTED, n)
        if class_ in STRAINS:
            strain = self.strains.begin(
                f"i{n}", class_, gpu, self.time, rng, mode=mode, is_step=is_step, onset_in_s=onset_in_s,
                is_injected=True,
            )  # fmt: skip
            self.physics.hold_cycles(strain.job, strain.hold_until)
            self.strains.book.publish(strain)
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

    def _run_short(self, onset_in_s: float, mode: str | None) -> dict[str, Any]:
        """A job for all nodes of the cluster is submitted after a while and gives up ten minutes later."""
        if mode not in (None, "queue"):
            raise SimulatorError(f"no mode {mode!r} of shortage; modes: queue")
        if not 0 <= onset_in_s <= 86_400:
            raise SimulatorError(f"onset_in_s = {onset_in_s}: must be 0 to 86400 seconds")
        if not self.running():
            raise SimulatorError("no shortage can be injected: no job runs, so all that is asked for is free")
        at, topology = self.time + onset_in_s, self.topology
        job = Job(
            id=0, user="root", account="default", queue="batch", name="asks-for-all", submit=at,
            nodes=topology.nodes, per_node=GPUS_PER_NODE, limit_s=600.0, runtime_s=300.0, cpus=96 * topology.nodes,
            memory_mib=1_048_576 * topology.nodes, gives_up_at=at + SHORT_S, habit=("train", topology.gpus, 0, 0),
        )  # fmt: skip
        self._push(at, ARRIVE, job)
        self._short_until = max(self._short_until, at + SHORT_S + 60)
        return self.strains.book.queue_row(job.queue, at, is_injected=True)

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

"""The simulated cluster: `SimulatedCluster` is the one class others use.

It drives the clock: on a grid of five seconds things happen (`course.py`), between grid points physics runs. What is
asked of it from outside is in `control.py`; frames are made in `frames.py`, files in `history.py`, HTTP in
`exporter.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from simulator import frames
from simulator.control import Control
from simulator.events import Rates
from simulator.hardware import GPUS_PER_NODE, SimulatorError, Topology
from simulator.hardware import gpu_model as model_of
from simulator.hosts import PortCounters
from simulator.jobs import Job
from simulator.physics import SUBSTEP_S
from simulator.trace import Trace
from simulator.truth import iso
from simulator.workload import Population

GRID_S = SUBSTEP_S


class SimulatedCluster(Control):
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
        self.counters = PortCounters(topology.nodes, seed, time)

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
            sees_queues = self.rates.has_shortage or until <= self._short_until
            if strains.active or strains.book.has_open() or sees_queues:
                pending = self.pending_by_queue() if sees_queues else {}
                strains.book.observe(strains.active, until, pending, int(sum(self.scheduler.counts())))
                strains.retire(until)
            time = self.time = until
        events.fill_memory(end)

    # --- what can be seen ----------------------------------------------------------------------------------
    @property
    def truth(self) -> list[dict[str, Any]]:
        """Ground truth, one row per GPU and onset; `onset` is null while an injected one is still to come."""
        return [*self.events.book.rows, *self.strains.book.rows]

    @property
    def lookalikes(self) -> list[dict[str, Any]]:
        """Harmless ramps, one row per GPU."""
        return [*self.events.book.lookalikes, *self.strains.book.lookalikes]

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

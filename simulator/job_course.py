"""Jobs of a simulated cluster in order of time: they arrive, wait, start, end, come again.

`JobCourse` owns the calendar and the jobs; what disturbs them is in `course.py`, who goes first in `scheduler.py`.
"""

from __future__ import annotations

import heapq
import math
from itertools import count
from typing import Any

from simulator.events import Events
from simulator.hardware import GPUS_PER_NODE, Topology
from simulator.jobs import ENDED, Job
from simulator.physics import Physics
from simulator.scheduler import Scheduler
from simulator.streams import Stream, generator
from simulator.trace import Trace
from simulator.workload import DAY_S, Population, draw_profile

# Order of what falls together: an end frees GPUs before a fault or an arrival looks at them.
END, OOM, FAULT, SILENT, REPAIR, WARN, ARRIVE, GIVE_UP, ONSET, HOUR, DAY, STRAIN = range(12)


class JobCourse:
    """Calendar and jobs of one cluster. Times are seconds since the epoch.

    Attributes:
        time: The present.
        jobs: Jobs that wait or run, by internal id.
        ended: Jobs that ended, in order.
    """

    def __init__(
        self, name: str, seed: int, time: float, topology: Topology, workload: Population | Trace | None
    ) -> None:
        self.name, self.seed, self.time, self.topology, self.workload = name, seed, time, topology, workload
        self.physics = Physics(topology, seed, time)
        self.events = Events(self.physics)
        self.scheduler = Scheduler(topology.nodes, topology.pod_of, max(GPUS_PER_NODE, topology.gpus // 2))
        self.jobs: dict[int, Job] = {}
        self.ended: list[Job] = []
        self._with_physics = True
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = count()
        self._ids = count(1001)
        self._blocked: dict[int, list[Job]] = {}
        self._arrays: dict[tuple[int, int], int] = {}
        self._day = int(time // DAY_S)
        self._push(time, DAY, self._day)

    def due_at(self) -> float:
        """When the next thing happens."""
        return self._heap[0][0] if self._heap else math.inf

    def with_physics(self, is_on: bool) -> None:
        """Turn physics off to advance jobs alone, or on again: running jobs are then put on their GPUs."""
        self._with_physics = is_on
        if not is_on:
            return
        self._heap = [item for item in self._heap if item[1] != OOM]  # leaks that had no ramp
        heapq.heapify(self._heap)
        for job in self.running():
            self._put_on_gpus(job)
        self.physics.settle(self.time)

    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "RUNNING"]

    def pending(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "PENDING"]

    def _push(self, at: float, kind: int, what: Any) -> None:
        heapq.heappush(self._heap, (at, kind, next(self._order), what))

    # --- jobs ----------------------------------------------------------------------------------------------
    def _draw_day(self, day: int) -> None:
        self._push((day + 1) * DAY_S, DAY, day + 1)
        if self.workload is not None:
            for job in self.workload.submissions(day):
                if job.submit >= self.time or day > self._day:
                    self._push(job.submit, ARRIVE, job)

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
            self._push(max(job.gives_up_at, at), GIVE_UP, job)

    def _is_discouraged(self, job: Job) -> bool:
        """People look at the queue: the longer it is, the fewer go on submitting."""
        if isinstance(self.workload, Trace) or job.key < 0:  # not of a user
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
        self._push(at, END, (job, job.end_event))

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
                self._push(again.submit, ARRIVE, again)

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

    def pending_by_queue(self) -> dict[str, int]:
        """GPUs that eligible jobs of each queue wait for."""
        found: dict[str, int] = {}
        for _, job in self.scheduler.pending:
            found[job.queue] = found.get(job.queue, 0) + job.gpus
        return found

"""`GET /v1/preemptions`: which running jobs to stop so that N GPUs are free in time, and what that loses.

Here belong the route, its parameters and its answer, made from the newest published job forecasts; the choice stands in
`models/preemption.py`. Nothing is stopped by this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from models.preemption import Candidate, Leaving, Preemption, plan_preemption, time_to_free_s
from scheduler_hints.dispatch import Gate
from scheduler_hints.errors import UnavailableError
from scheduler_hints.queries import CLUSTER, Parameter, parse_query
from scheduler_hints.schema import JobForecast

GPUS = 8  # wanted, where the query does not say: a whole node
WITHIN_S = 300.0
MOST_GPUS = 1_000_000
PARAMETERS = (
    CLUSTER,
    Parameter("gpus", "integer", f"How many GPUs are wanted; {GPUS} when left out.", "64", low=1, high=MOST_GPUS),
    Parameter(
        "within_s", "number", f"They must be free within this time, s; {WITHIN_S:.0f} when left out.", "300", low=0
    ),
    Parameter(
        "queue", "string", "Only jobs of this queue are stopped, as the one of preemptible work. Without it: any job.",
        "preemptible",
    ),
    Parameter(
        "checkpoint_s", "number",
        "Time in which a job that reports checkpoints writes one when told to, s. Without it: none does.", "60", low=0,
    ),
    Parameter("restart_s", "number", "Time until a stopped job works again once it runs, s.", "120", low=0),
)  # fmt: skip


class VictimJob(msgspec.Struct, frozen=True):
    """A job that leaves: by itself (`ends`), after a checkpoint (`checkpoint`), or at once (`stop`).

    `free_in_s`: when its GPUs are free. `lost_gpu_hours`: work done and lost, with the checkpoint's time and its
    return. `is_loss_known` is false where it has not reported a checkpoint: all since its start counts.
    """

    job_id: str
    user: str | None
    queue: str | None
    gpus: int
    way: Literal["ends", "checkpoint", "stop"]
    free_in_s: float
    lost_gpu_hours: float
    is_loss_known: bool


class ClusterPreemption(msgspec.Struct, frozen=True):
    """What to stop on a cluster so that GPUs are free in time: `leaving`, those that lose least per GPU first.

    Gangs go whole. `short_gpus`: what lacks although every job that may leave does. `least_gpu_hours`: no choice can
    lose less. `is_exact`: no other choice loses less. `graceful_in_s`: how soon so many GPUs can be free where every
    job that leaves ends by itself or writes a checkpoint first; null: they never are. A job counts as ending by itself
    where it does so with 90 %. Idle GPUs are not counted.
    """

    cluster: str
    gpus: int
    within_s: float
    leaving: list[VictimJob]
    freed_gpus: int
    short_gpus: int
    free_in_s: float
    lost_gpu_hours: float
    least_gpu_hours: float
    is_exact: bool
    graceful_in_s: float | None
    generated_at: datetime


class PreemptionAnswer(msgspec.Struct, frozen=True):
    """One choice for each cluster asked for; `stale_shards` names those without fresh job forecasts.

    Not to be used for longer than `expires_in_s`, counted on a monotonic clock.
    """

    items: list[ClusterPreemption]
    stale_shards: list[str]
    expires_in_s: float


def candidates_of(
    jobs: Iterable[JobForecast],
    now: datetime,
    *,
    queue: str | None = None,
    checkpoint_s: float | None = None,
    restart_s: float = 0.0,
) -> list[Candidate]:
    """Running jobs with GPUs as candidates.

    Args:
        jobs: Published forecasts.
        now: The moment, UTC.
        queue: Only jobs of it may be stopped; None: any.
        checkpoint_s: Time in which a job that has reported a checkpoint writes one; None: none does.
        restart_s: Time until a job works again once it runs.
    """
    found = []
    for job in jobs:
        if job.state != "RUNNING" or not job.gpus or job.start_time is None:
            continue
        saved = _checkpoint(job)
        ends_s = None
        if job.remaining is not None:
            ends_s = max(0.0, job.remaining.q90_s - (now - job.generated_at).total_seconds())
        found.append(
            Candidate(
                job.job_id,
                job.gpus,
                max(0.0, (now - job.start_time).total_seconds()),
                None if saved is None else max(0.0, (now - saved).total_seconds()),
                None if saved is None else checkpoint_s,
                ends_s,
                restart_s,
                is_preemptible=queue is None or job.queue == queue,
            )
        )
    return found


def _checkpoint(job: JobForecast) -> datetime | None:
    return None if job.progress is None else job.progress.checkpoint_at


class PreemptionRoutes:
    """The endpoint.

    Args:
        gate: Who may ask.
        answer: Makes a response of a struct.
    """

    def __init__(self, gate: Gate, answer: Callable[[Any], Response]) -> None:
        self._gate, self._answer = gate, answer

    def routes(self) -> list[Route]:
        return [Route("/v1/preemptions", self.preemptions, methods=["GET"])]

    async def preemptions(self, request: Request) -> Response:
        header = request.headers.get("authorization")
        principal, visible = self._gate.admit(None if header is None else header.encode("latin-1"))
        values = parse_query(request.scope["query_string"], PARAMETERS)
        wanted = values.get("cluster")
        clusters = visible if wanted is None else (self._gate.one(principal, visible, str(wanted)),)
        store = self._gate.store
        state, now_s = store.state, store.clock()
        fresh = {name: shard for name in clusters if (shard := state.fresh(name, "jobs", now_s)) is not None}
        stale = {name: state.why_stale(name, "jobs", now_s) for name in clusters if name not in fresh}
        if not fresh:
            words = ", ".join(f"{name}: {why}" for name, why in stale.items()) or "no cluster is configured"
            raise UnavailableError("stale", f"no fresh jobs; {words}", {"stale_shards": list(stale), "reasons": stale})
        rows = {name: [row for row in shard.rows if row.deadline_s > now_s] for name, shard in fresh.items()}
        ends_s = [shard.deadline_s for shard in fresh.values()]
        ends_s += [row.deadline_s for found in rows.values() for row in found]
        now = datetime.now(UTC)

        def choose() -> list[ClusterPreemption]:
            return [choice_of([row.item for row in found], name, values, now) for name, found in rows.items()]

        chosen = await run_in_threadpool(choose)
        return self._answer(PreemptionAnswer(chosen, list(stale), max(min(ends_s) - now_s, 0.0)))


def choice_of(jobs: list[JobForecast], cluster: str, values: dict[str, Any], now: datetime) -> ClusterPreemption:
    """The choice on one cluster.

    Args:
        jobs: Published forecasts of the cluster.
        cluster: Its name.
        values: Checked parameters.
        now: The moment, UTC.
    """
    checkpoint_s, queue = values.get("checkpoint_s"), values.get("queue")
    found = candidates_of(
        jobs, now, queue=queue, checkpoint_s=checkpoint_s, restart_s=float(values.get("restart_s", 0.0))
    )
    gpus, within_s = int(values.get("gpus", GPUS)), float(values.get("within_s", WITHIN_S))
    plan: Preemption = plan_preemption(found, gpus, within_s)
    of = {job.job_id: job for job in jobs}
    return ClusterPreemption(
        cluster, gpus, within_s, [_victim(of[way.job_id], way) for way in plan.leaving], plan.freed_gpus,
        plan.short_gpus, plan.free_in_s, plan.lost_gpu_hours, plan.least_gpu_hours, plan.is_exact,
        time_to_free_s(found, gpus), now,
    )  # fmt: skip


def _victim(job: JobForecast, way: Leaving) -> VictimJob:
    is_known = way.way != "stop" or _checkpoint(job) is not None
    return VictimJob(job.job_id, job.user, job.queue, way.gpus, way.way, way.free_in_s, way.lost_gpu_hours, is_known)

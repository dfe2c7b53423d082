"""Jobs out of pods: pods of one owner are one job, a pod without an owner that is a job is one by itself.

A job is known by its owner's uid where a label tells it, else by namespace and name; names come again, so the time of
creation tells one from the next. Only jobs that ask for GPUs are given. Nothing here asks anyone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pipelines.sources.kubernetes_pods import PENDING, RUNNING, Pod, first_label, moment
from pipelines.sources.kubernetes_series import Facts

_SLACK = timedelta(seconds=2)
_EARLY, _FAR = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


@dataclass
class Owner:
    """What kube-state-metrics says of one `Job` object; a condition counts only where its value is 1."""

    created: datetime | None = None
    completed: datetime | None = None
    is_complete: bool = False
    is_failed: bool = False
    is_known: bool = False
    reasons: set[str] = field(default_factory=set)
    deadline_s: float | None = None


def owners_of(facts: Facts) -> dict[tuple[str, str], Owner]:
    """`Job` objects by namespace and name."""
    owners: dict[tuple[str, str], Owner] = defaultdict(Owner)

    def owner(labels: dict[str, str]) -> Owner:
        return owners[labels.get("namespace", ""), labels.get("job_name") or labels.get("job", "")]

    for labels, value in facts.series("kube_job_created"):
        found = owner(labels)
        found.created = max(filter(None, (found.created, moment(value))), default=None)
    for labels, value in facts.series("kube_job_status_completion_time"):
        owner(labels).completed = moment(value)
    for labels, value in facts.series("kube_job_spec_active_deadline_seconds"):
        owner(labels).deadline_s = value if 0 < value < 1e10 else None
    for labels, value in facts.series("kube_job_complete"):
        found = owner(labels)
        found.is_known = True
        found.is_complete |= labels.get("condition") == "true" and value == 1
    for labels, value in facts.series("kube_job_failed"):
        found = owner(labels)
        found.is_known = True
        found.is_failed |= labels.get("condition") == "true" and value == 1
    for labels, value in facts.series("kube_job_status_failed"):
        if value >= 1 and labels.get("reason"):
            owner(labels).reasons.add(labels["reason"])
    return dict(owners)


class Memory:
    """When each job was first seen to be made and to start: its first pods are gone long before its last."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], tuple[datetime, datetime | None]] = {}

    def recall(self, key: tuple[Any, ...], made: datetime, start: datetime | None) -> tuple[datetime, datetime | None]:
        """The earliest of what is told now and was told before."""
        known = self._first.get(key)
        if known is not None:
            made = min(made, known[0])
            start = min(filter(None, (start, known[1])), default=None)
        self._first[key] = made, start
        return made, start

    def prune(self, keys: set[tuple[Any, ...]]) -> None:
        """Forget all but these when there are many."""
        if len(self._first) > 100_000:
            self._first = {key: value for key, value in self._first.items() if key in keys}


def jobs_of(pods: Iterable[Pod], facts: Facts, cluster: str, at: datetime, memory: Memory) -> list[dict[str, Any]]:
    """Rows of jobs.

    Args:
        pods: Pods of a span.
        facts: Series of the metrics of jobs.
        cluster: Name of the cluster.
        at: End of the span, UTC.
        memory: Kept from call to call.

    Returns:
        JOB_COLUMNS and JOB_EXTRAS of each, by name.
    """
    owners = owners_of(facts)
    groups: dict[tuple[Any, ...], list[Pod]] = defaultdict(list)
    for pod in pods:
        groups[_group(pod, owners)].append(pod)
    rows = [row for key, members in groups.items() if (row := _row(key, members, owners, cluster, at, memory))]
    memory.prune(set(groups))
    return rows


def job_ids(pods: Iterable[Pod], facts: Facts) -> dict[str, str]:
    """Pod → id of the job that it is a part of, as `jobs_of` gives it."""
    owners = owners_of(facts)
    return {pod.key: _job_id(_group(pod, owners)) for pod in pods}


def _job_id(group: tuple[Any, ...]) -> str:
    if group[0] == "pod":
        return group[1]
    return group[3] or f"{group[1]}/{group[2]}"


def _group(pod: Pod, owners: dict[tuple[str, str], Owner]) -> tuple[Any, ...]:
    if pod.owner is None:
        return ("pod", pod.key)
    kind, name = pod.owner
    owner = owners.get((pod.namespace, name)) if kind == "Job" else None
    # A pod that is older than its job is of an earlier job of that name.
    is_earlier = bool(owner and owner.created and pod.created and pod.created < owner.created - _SLACK)
    return (kind, pod.namespace, name, pod.owner_uid, is_earlier)


def _row(
    key: tuple[Any, ...],
    pods: list[Pod],
    owners: dict[tuple[str, str], Owner],
    cluster: str,
    at: datetime,
    memory: Memory,
) -> dict[str, Any] | None:
    pods = sorted(pods, key=lambda pod: (pod.created or at, pod.name, pod.key))
    gpus = _peak(pods, lambda pod: pod.gpus)
    if not gpus:
        return None
    first = pods[0]
    owner = owners.get((first.namespace, key[2])) if key[0] == "Job" and not key[4] else None
    state, cause = _state(pods, owner)
    is_over = state not in (PENDING, RUNNING)
    made = (owner.created if owner else None) or first.created or first.start or at
    start = min((pod.start for pod in pods if pod.ran and pod.start), default=None)
    if owner is None or owner.created is None:
        made, start = memory.recall(key, made, start)
    else:
        _, start = memory.recall((*key, made), made, start)
    ends = [pod.end for pod in pods if pod.end]
    end = (owner.completed if owner and owner.is_complete else None) or max(ends, default=at)
    live = [pod for pod in pods if pod.is_live] or pods
    nodes = sorted({pod.node for pod in live if pod.node and (pod.ran or is_over)})
    waits = next((pod for pod in pods if pod.is_live and pod.state == PENDING), None)
    cpus = _peak(pods, lambda pod: pod.requests.get("cpu", 0.0))
    memory_bytes = _peak(pods, lambda pod: pod.requests.get("memory", 0.0))
    name = f"{first.namespace}/{key[2] if key[0] != 'pod' else first.name}"
    reason = (waits.reason if waits else "BackOff") if state == PENDING else cause.reason if cause and is_over else None
    # A limit of the object itself; pods of services have none.
    limit = owner.deadline_s if owner else None
    return {
        "cluster": cluster,
        "job_id": _job_id(key),
        "user": first_label(first, "user"),
        "account": first.namespace or None,
        "queue": first_label(first, "queue") or first.labels.get("priority_class") or None,
        "name": name,
        "submit_time": made,
        "eligible_time": made,
        "start_time": start if state != PENDING else None,
        "end_time": end if is_over else None,
        "nodes": len(nodes) or round(_peak(pods, lambda pod: float(pod.gpus > 0))),
        "cpus": math.ceil(cpus) or None,
        "gpus": math.ceil(gpus - 1e-9),
        "memory_mib": round(memory_bytes / 2**20) or None,
        "time_limit_s": round(limit) if limit else None,
        "state": state,
        "node_list": ",".join(nodes) or None if state != PENDING else None,
        "reason": reason,
        "planned_start_time": None,
        "observed_at": at,
        "exit_code": cause.exit_text if cause else None,
        "restarts": sum(pod.restarts for pod in pods) + (0 if is_over else sum(not pod.is_live for pod in pods)),
    }


def _state(pods: list[Pod], owner: Owner | None) -> tuple[str, Pod | None]:
    """State of a job, and the pod that tells why."""
    failed = sorted((p for p in pods if p.phase == "Failed" and not p.is_live), key=lambda p: (p.end is None, p.end))
    cause = failed[0] if failed else next((pod for pod in pods if pod.exit_code is not None), None)
    if owner and owner.is_complete:
        return "COMPLETED", None
    if owner and owner.is_failed:
        if "DeadlineExceeded" in owner.reasons:
            return "TIMEOUT", cause
        return (failed[-1].state if failed else "FAILED"), (failed[-1] if failed else cause)
    states = [pod.state for pod in pods]
    if RUNNING in states:
        return RUNNING, cause
    if PENDING in states:
        return PENDING, cause
    if owner and owner.is_known and not all(pod.is_gone for pod in pods):
        return PENDING, cause  # the object is there and says neither: it will try again
    if failed:
        return failed[0].state, failed[0]
    if "COMPLETED" in states:
        return "COMPLETED", None
    return states[-1], cause


def _peak(pods: list[Pod], amount: Callable[[Pod], float]) -> float:
    """Most that pods asked for at one time: a retry takes the place of the pod before it."""
    events: list[tuple[datetime, int, float]] = []
    for pod in pods:
        begin = pod.created or pod.start or _EARLY
        end = _FAR if pod.is_live else max(pod.end or _FAR, begin + timedelta(microseconds=1))
        events += [(begin, 1, amount(pod)), (end, 0, -amount(pod))]
    most = total = 0.0
    for _, _, change in sorted(events):
        total += change
        most = max(most, total)
    return most

"""What speaks against making a lease: faults of the plan itself, and the present state of Slurm.

Pure: facts in, an objection in words out, None when there is none. Nothing is asked of Slurm here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from scheduler_hints.node_state import is_planned, node_condition
from scheduler_hints.schema import ReservationPlan
from scheduler_hints.slurm_commands import ArgumentError, Reservation, SlurmJob, check_names
from scheduler_hints.slurm_guard import Limits

MIN_LEASE = timedelta(seconds=60)  # Slurm keeps reservations by the minute


def fault(plan: ReservationPlan, cluster: str, limits: Limits, now: datetime) -> str | None:
    """What is wrong with the plan itself."""
    if plan.cluster != cluster:
        return f"the plan is for cluster {plan.cluster[:80]!r}, this agent serves {cluster!r}"
    try:
        check_names(plan.nodes, plan.user, plan.account or "", plan.job_id)
    except ArgumentError as error:
        return str(error)
    if not plan.nodes or len(set(plan.nodes)) != len(plan.nodes):
        return "the plan names no node, or one twice"
    if plan.start.tzinfo is None or plan.end.tzinfo is None:
        return "the plan's times have no time zone"
    length = plan.end - max(plan.start, now)
    if length < MIN_LEASE:
        return "the plan ends within a minute"
    if length.total_seconds() > limits.max_lease_s:
        return f"the plan holds nodes for more than {limits.max_lease_s:.0f} s"
    if (plan.start - now).total_seconds() > limits.max_ahead_s:
        return f"the plan begins more than {limits.max_ahead_s:.0f} s ahead"
    return None


def reservation_conflict(name: str, plan: ReservationPlan, others: Iterable[Reservation], now: datetime) -> str | None:
    """A reservation of that name, or one that has a node of the plan meanwhile."""
    nodes = set(plan.nodes)
    for found in others:
        if found.name == name:
            return f"there is a reservation {name} already"
        shared = sorted(found.nodes & nodes)
        if shared and found.end > now and found.start < plan.end:
            return f"{', '.join(shared)} is in reservation {found.name}"
    return None


def node_objection(
    plan: ReservationPlan, states: Mapping[str, str], held: Collection[str], max_nodes_ratio: float
) -> str | None:
    """Nodes that are unknown or not idle, or more than leases may hold; `held` are nodes of other leases."""
    nodes = set(plan.nodes)
    unknown = sorted(nodes - states.keys())
    if unknown:
        return f"Slurm knows no node {', '.join(unknown)}"
    busy = [f"{node} is {states[node]}" for node in sorted(nodes) if node_condition(states[node]) != "idle"]
    if busy:
        return ", ".join(busy)
    count = len(nodes | set(held))
    if count > max_nodes_ratio * len(states):
        return f"{count} of {len(states)} nodes would be held (slurm_agent.max_nodes_ratio = {max_nodes_ratio:g})"
    return None


def job_objection(plan: ReservationPlan, states: Mapping[str, str], job: SlurmJob | None) -> str | None:
    """The job is not what the plan says, waits no more, or the nodes are promised to another."""
    if job is None:
        return f"Slurm knows no job {plan.job_id}"
    if plan.user and job.user != plan.user:
        return f"job {plan.job_id} is of user {job.user}, the plan says {plan.user}"
    if not plan.user and job.account != plan.account:
        return f"job {plan.job_id} is of account {job.account}, the plan says {plan.account}"
    if job.state != "PENDING":
        return f"job {plan.job_id} is {job.state.lower()}: only a waiting job gets a lease"
    if job.reservation:
        return f"job {plan.job_id} names reservation {job.reservation} itself"
    promised = sorted(node for node in plan.nodes if is_planned(states[node]) and node not in job.planned_nodes)
    return f"{', '.join(promised)} is planned for another job" if promised else None

"""Reservation plans: which healthy idle nodes to hold for which waiting job because trouble is foreseen elsewhere.

Here belongs the choice of job and nodes out of hints that stand; not the hints, not the windows, and not the making of
a lease (`slurm_agent.py`). Pure. Without a hint there is no plan.

A plan is for one job that is about to start: the scheduler might put it on the node in trouble, or others might take
the healthy ones first. It holds as many nodes as the job needs, in one pod, where that delays nobody: only nodes whose
window lasts as long as the hold, or ends by the start of that very job. A job whose own node is about to fail gets as
many spares as it will lose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b

import polars as pl

from features.vocabulary import JOB_COLUMNS
from scheduler_hints.job_ends import forecast_rows
from scheduler_hints.node_state import node_condition
from scheduler_hints.plan_needs import LEAD_S, Need, failing_nodes, requeues, starts, troubles_of, usual_wait_s
from scheduler_hints.schema import Bottleneck, JobForecast, NodeRisk, ReservationPlan, Spare, Window
from scheduler_hints.windows import bounding_job


class PlanError(ValueError):
    """Plans cannot be made from these arguments; the message names the offender and what is valid."""


def reservation_plans(
    bottlenecks: Sequence[Bottleneck],
    windows: Sequence[Window],
    jobs: pl.DataFrame,
    nodes: pl.DataFrame,
    now: datetime,
    lease_s: float,
    *,
    cluster: str | None = None,
    min_probability: float = 0.5,
    by_class: Mapping[str, float] | None = None,
    node_risks: Sequence[NodeRisk] = (),
    forecasts: pl.DataFrame | Iterable[JobForecast] = (),
    previous: Sequence[ReservationPlan] = (),
    max_plans: int = 3,
) -> list[ReservationPlan]:
    """Plan what to hold.

    Args:
        bottlenecks: Hints that stand; those of GPUs, links, nodes, racks and pods count from `min_probability` on.
        windows: Backfill windows of the same moment: where nodes are free and for how long.
        jobs: JOB_COLUMNS of the cluster.
        nodes: Rows of core_nodes.
        now: The moment, UTC.
        lease_s: Length of a hold, s.
        cluster: The cluster; default: that of the nodes.
        min_probability: Probability from which a hint counts.
        by_class: The same of classes that have one of their own.
        node_risks: A node with `p_1h` ≥ `min_probability` is about to fail: its job gets spares, and it is none itself.
        forecasts: Job forecasts; the median of `wait` says when a job starts that has neither begin time nor plan.
        previous: What was planned at the last tick. A plan whose job still waits, whose reason still stands and whose
            nodes are still good stays as it is, although its nodes are reserved by now and in no window.
        max_plans: At most so many.

    Returns:
        Plans by priority of their jobs. Ids stay with the job.

    Raises:
        PlanError: A column is missing or a number is out of range.
    """
    _check(jobs, nodes, now, lease_s)
    if nodes.is_empty():
        return []
    name = cluster or nodes["cluster"][0]
    facts = {row["node"]: row for row in nodes.iter_rows(named=True)}
    troubles = troubles_of(bottlenecks, facts, min_probability, by_class)
    failing = failing_nodes(node_risks, min_probability)
    if not troubles and not failing:
        return []
    bad = {node for trouble in troubles for node in trouble.nodes} | failing.keys()
    own = {node for plan in previous for node in plan.nodes}
    ranks = {risk.node: risk for risk in node_risks}
    rows = forecast_rows(forecasts)
    wait_s = usual_wait_s(rows, now, lease_s)
    needs = requeues(jobs, failing, facts, wait_s, lease_s)
    needs += starts(jobs, facts, own, troubles, rows, now, wait_s, lease_s)
    needs = [need for need in needs if need.worth.is_worth_it]
    plans: list[ReservationPlan] = []
    taken: set[str] = set()
    kept = {plan.id: plan for plan in previous}
    for need in needs:
        old = kept.get(_plan_id(name, need))
        if old and _still_good(old, need, facts, bad, now):
            plans.append(_plan(name, need, old.nodes, old.start, old.end, facts, ranks))
            taken.update(old.nodes)
    held = {plan.id for plan in plans}
    open_now = [(window, bounding_job(window)) for window in windows if window.start <= now]
    in_pod = Counter(facts[node]["pod"] or "" for window, _ in open_now for node in window.nodes if node in facts)
    most = max(in_pod.values(), default=0)
    for need in needs:
        if len(plans) >= max_plans:
            break
        if need.nodes > most or _plan_id(name, need) in held:
            continue
        start = now + timedelta(seconds=max(0.0, need.start_s - LEAD_S))
        end = start + timedelta(seconds=lease_s)
        spares = _spares(need, open_now, facts, bad | taken, end, ranks)
        if spares:
            plans.append(_plan(name, need, spares, start, end, facts, ranks))
            taken.update(spares)
    order = {_plan_id(name, need): place for place, need in enumerate(needs)}
    return sorted(plans, key=lambda plan: order[plan.id])[:max_plans]


def _check(jobs: pl.DataFrame, nodes: pl.DataFrame, now: datetime, lease_s: float) -> None:
    wanted = ("cluster", "node", "rack", "pod", "gpus", "state")
    for what, frame, columns in (("jobs", jobs, JOB_COLUMNS), ("nodes", nodes, wanted)):
        missing = [column for column in columns if column not in frame.columns]
        if missing:
            raise PlanError(f"{what} lacks columns {', '.join(missing)}; it has {', '.join(frame.columns)}")
    if now.tzinfo is None:
        raise PlanError(f"now = {now}: a time with a time zone is needed")
    if not lease_s > 0:
        raise PlanError(f"lease_s = {lease_s}: more than 0 seconds are needed")


def _plan_id(cluster: str, need: Need) -> str:
    key = "\x1f".join((cluster, need.job_id, "requeue" if need.is_requeue else "start"))
    return f"p-{blake2b(key.encode(), digest_size=8).hexdigest()}"


def _still_good(plan: ReservationPlan, need: Need, facts: dict[str, dict], bad: set[str], now: datetime) -> bool:
    return (
        plan.end > now
        and plan.user == need.user
        and len(plan.nodes) == need.nodes
        and all(
            node in facts and node not in bad and node_condition(facts[node]["state"]) in ("idle", "reserved")
            for node in plan.nodes
        )
    )


def _spares(
    need: Need,
    windows: Iterable[tuple[Window, str | None]],
    facts: dict[str, dict],
    unfit: set[str],
    end: datetime,
    ranks: dict[str, NodeRisk],
) -> list[str]:
    """Nodes for the hold, all in one pod, the best spares first; empty when no pod has enough of them."""
    by_pod: dict[str, list[tuple[bool, float, int, str]]] = {}
    for place, (window, bounding) in enumerate(windows):
        is_own = not need.is_requeue and bounding == need.job_id
        if not (window.end is None or window.end >= end or is_own):
            continue
        for node in window.nodes:
            if node in facts and node not in unfit and node_condition(facts[node]["state"]) == "idle":
                by_pod.setdefault(facts[node]["pod"] or "", []).append((not is_own, _rank(node, ranks), place, node))
    enough = [pod for pod, found in by_pod.items() if len(found) >= need.nodes]
    if not enough:
        return []
    # The pod of the trouble first, then nodes that wait for this job anyway, then the pod with the least to spare.
    best = min(enough, key=lambda pod: (pod not in need.pods, min(by_pod[pod])[0], len(by_pod[pod]), pod))
    return [node for *_, node in sorted(by_pod[best], key=lambda found: found[:3])[: need.nodes]]


def _rank(node: str, ranks: dict[str, NodeRisk]) -> float:
    """Place among spares; a node without one comes last."""
    rank = ranks[node].spare_rank if node in ranks else None
    return float("inf") if rank is None else float(rank)


def _plan(
    cluster: str,
    need: Need,
    nodes: Sequence[str],
    start: datetime,
    end: datetime,
    facts: dict[str, dict],
    ranks: dict[str, NodeRisk],
) -> ReservationPlan:
    gpus = sum(facts[node]["gpus"] or 0 for node in nodes)
    names = f"{', '.join(nodes[:8])}{' …' if len(nodes) > 8 else ''}"
    if need.is_requeue:
        benefit = f"job {need.job_id} finds {names} ready when it is requeued, and need not queue again"
    else:
        away = ", away from the trouble," if need.pods else ""
        benefit = f"job {need.job_id} starts on {names}{away} and nobody takes these nodes before it"
    return ReservationPlan(
        id=_plan_id(cluster, need),
        cluster=cluster,
        job_id=need.job_id,
        user=need.user,
        account=need.account,
        nodes=list(nodes),
        start=start,
        end=end,
        because=list(need.because),
        benefit=benefit,
        cost_if_wrong_gpu_s=gpus * (end - start).total_seconds(),
        action="migrate" if need.is_requeue else "reserve",
        probability=need.worth.probability,
        saved_gpu_hours=need.worth.saved_gpu_hours,
        benefit_gpu_hours=need.worth.benefit_gpu_hours,
        cost_gpu_hours=need.worth.cost_gpu_hours,
        spares=[
            Spare(node, ranks[node].spare_rank if node in ranks else None, ranks[node].p_24h if node in ranks else None)
            for node in nodes
        ],
    )

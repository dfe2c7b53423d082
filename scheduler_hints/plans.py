"""Reservation plans: which healthy idle nodes to hold for which waiting job because trouble is foreseen elsewhere.

Here belongs the choice of job and nodes out of hints that stand; not the hints, not the windows, and not the making of
a lease (`slurm_agent.py`). Pure. Without a hint there is no plan.

A plan is for one job that is about to start: the scheduler might put it on the node in trouble, or others might take
the healthy ones first. It holds as many nodes as the job needs, in one pod, where that delays nobody: only nodes whose
window lasts as long as the hold, or ends by the start of that very job. A job whose own node is about to fail gets as
many spares as it will lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import blake2b

import polars as pl

from features.vocabulary import JOB_COLUMNS
from scheduler_hints.claims import seconds_until, waiting_jobs
from scheduler_hints.job_ends import forecast_rows
from scheduler_hints.node_state import node_condition
from scheduler_hints.schema import Bottleneck, JobForecast, NodeRisk, ReservationPlan, Window
from scheduler_hints.windows import bounding_job

_LEAD_S = 60.0  # a hold begins this long before the job is expected, or now
# Memory runs out by the job's own doing: other nodes do not help it.
_WORDS = {
    "thermal_throttle": "thermal throttling", "power_throttle": "power throttling",
    "nvlink_saturation": "NVLink saturation", "straggler": "a slow rank", "fabric_congestion": "fabric congestion",
}  # fmt: skip
_NODE_CLASSES = frozenset(_WORDS)


class PlanError(ValueError):
    """Plans cannot be made from these arguments; the message names the offender and what is valid."""


@dataclass(frozen=True, slots=True)
class _Need:
    """Nodes wanted for a job, from a moment on."""

    job_id: str
    user: str
    account: str | None
    nodes: int
    start_s: float
    is_requeue: bool
    because: tuple[str, ...]
    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Trouble:
    """A hint about nodes: their names, pods, and the reason in words."""

    nodes: frozenset[str]
    pods: frozenset[str]
    because: str


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
    troubles = _troubles(bottlenecks, facts, min_probability)
    failing = _failing(node_risks, min_probability)
    if not troubles and not failing:
        return []
    bad = {node for trouble in troubles for node in trouble.nodes} | failing.keys()
    own = {node for plan in previous for node in plan.nodes}
    needs = _requeues(jobs, failing, facts) + _starts(jobs, facts, own, troubles, forecasts, now, lease_s)
    plans: list[ReservationPlan] = []
    taken: set[str] = set()
    kept = {plan.id: plan for plan in previous}
    for need in needs:
        old = kept.get(_plan_id(name, need))
        if old and _still_good(old, need, facts, bad, now):
            plans.append(_plan(name, need, old.nodes, old.start, old.end, facts))
            taken.update(old.nodes)
    held = {plan.id for plan in plans}
    for need in needs:
        if len(plans) >= max_plans or _plan_id(name, need) in held:
            continue
        start = now + timedelta(seconds=max(0.0, need.start_s - _LEAD_S))
        end = start + timedelta(seconds=lease_s)
        spares = _spares(need, windows, facts, bad | taken, now, end)
        if spares:
            plans.append(_plan(name, need, spares, start, end, facts))
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


def _troubles(hints: Iterable[Bottleneck], facts: dict[str, dict], min_probability: float) -> list[_Trouble]:
    found = []
    for hint in hints:
        if hint.bottleneck_class not in _NODE_CLASSES or not (hint.is_active or hint.probability >= min_probability):
            continue
        if hint.scope in ("rack", "pod"):
            key, value = hint.scope, hint.rack if hint.scope == "rack" else hint.pod
            names = {node for node, fact in facts.items() if value is not None and fact[key] == value}
            where = f"{hint.scope} {value}"
        elif hint.node is None:
            names, where = {node for node in hint.nodes if node in facts}, hint.scope
        else:
            names, where = {node for node in (hint.node,) if node in facts}, f"node {hint.node}"
        if not names:
            continue
        what = _WORDS[hint.bottleneck_class]
        chance = "now" if hint.is_active else f"within {hint.horizon_s} s with probability {hint.probability:.2f}"
        pods = frozenset(facts[node]["pod"] or "" for node in names)
        found.append(_Trouble(frozenset(names), pods, f"{what} on {where} {chance} (hint {hint.id})"))
    return found


def _failing(risks: Iterable[NodeRisk], min_probability: float) -> dict[str, str]:
    return {
        risk.node: f"fault of {risk.node} within 1 h with probability {risk.p_1h:.2f} (node risk)"
        for risk in risks
        if risk.p_1h >= min_probability
    }


def _requeues(jobs: pl.DataFrame, failing: dict[str, str], facts: dict[str, dict]) -> list[_Need]:
    """Spares for running jobs that are about to lose nodes."""
    if not failing:
        return []
    needs = []
    running = jobs.filter(pl.col("state") == "RUNNING", pl.col("node_list").is_not_null(), pl.col("user").is_not_null())
    for row in running.sort("start_time", "job_id", nulls_last=True).iter_rows(named=True):
        lost = sorted({node.strip() for node in row["node_list"].split(",")} & failing.keys())
        if lost and _is_whole(row["gpus"], row["node_list"].count(",") + 1, facts):
            pods = tuple(dict.fromkeys(facts[node]["pod"] or "" for node in lost if node in facts))
            because = tuple(failing[node] for node in lost)
            needs.append(_Need(row["job_id"], row["user"], row["account"], len(lost), 0.0, True, because, pods))
    return needs


def _starts(
    jobs: pl.DataFrame,
    facts: dict[str, dict],
    own: set[str],
    troubles: Sequence[_Trouble],
    forecasts: pl.DataFrame | Iterable[JobForecast],
    now: datetime,
    lease_s: float,
) -> list[_Need]:
    """Waiting whole-node jobs that are expected to start within a lease's length, in order of the queue."""
    if not troubles:
        return []
    rows = forecast_rows(forecasts)
    waits = {
        job: left
        for job, left in rows.filter(
            pl.col("forecast") == "wait", pl.col("valid_until").is_null() | (pl.col("valid_until") > now)
        )
        .sort("generated_at")
        .select("job_id", seconds_until(pl.col("generated_at"), now) + pl.col("q50_s"))
        .iter_rows()
        if left is not None
    }
    conditions = {node: node_condition(fact["state"]) for node, fact in facts.items()}
    # Nodes that are reserved because of an earlier plan are there for its job as much as idle ones.
    idle = sum(found == "idle" or (found == "reserved" and node in own) for node, found in conditions.items())
    queue = waiting_jobs(jobs, rows, now, _usual_gpus(facts))
    because = tuple(trouble.because for trouble in troubles)
    pods = tuple(sorted({pod for trouble in troubles for pod in trouble.pods}))
    needs = []
    for row in queue.filter(~pl.col("is_ruled_out"), pl.col("user").is_not_null()).iter_rows(named=True):
        start_s = max(row["ready_s"] or 0.0, 0.0)
        if row["planned_s"] is not None and row["planned_s"] > 0:
            start_s = max(start_s, row["planned_s"])
        elif row["job_id"] in waits:
            start_s = max(start_s, waits[row["job_id"]])
        elif row["need"] > idle and start_s == 0:
            continue  # it waits for nodes, and nobody knows until when
        if start_s <= lease_s and _is_whole(row["gpus"], row["need"], facts):
            needs.append(_Need(row["job_id"], row["user"], row["account"], row["need"], start_s, False, because, pods))
    return needs


def _usual_gpus(facts: dict[str, dict]) -> int:
    counts = sorted(fact["gpus"] for fact in facts.values() if fact["gpus"])
    return counts[len(counts) // 2] if counts else 1


def _is_whole(gpus: int | None, nodes: int, facts: dict[str, dict]) -> bool:
    """The job takes whole nodes: leases are of whole nodes, and a small job would waste them."""
    return (gpus or 0) >= nodes * _usual_gpus(facts)


def _plan_id(cluster: str, need: _Need) -> str:
    key = "\x1f".join((cluster, need.job_id, "requeue" if need.is_requeue else "start"))
    return f"p-{blake2b(key.encode(), digest_size=8).hexdigest()}"


def _still_good(plan: ReservationPlan, need: _Need, facts: dict[str, dict], bad: set[str], now: datetime) -> bool:
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
    need: _Need, windows: Iterable[Window], facts: dict[str, dict], unfit: set[str], now: datetime, end: datetime
) -> list[str]:
    """Nodes for the hold, all in one pod; empty when no pod has enough of them."""
    by_pod: dict[str, list[tuple[bool, int, str]]] = {}
    for place, window in enumerate(windows):
        is_own = not need.is_requeue and bounding_job(window) == need.job_id
        if window.start > now or not (window.end is None or window.end >= end or is_own):
            continue
        for node in window.nodes:
            if node in facts and node not in unfit and node_condition(facts[node]["state"]) == "idle":
                by_pod.setdefault(facts[node]["pod"] or "", []).append((not is_own, place, node))
    enough = [pod for pod, found in by_pod.items() if len(found) >= need.nodes]
    if not enough:
        return []
    # The pod of the trouble first, then nodes that wait for this job anyway, then the pod with the least to spare.
    best = min(enough, key=lambda pod: (pod not in need.pods, min(by_pod[pod])[0], len(by_pod[pod]), pod))
    return [node for _, _, node in sorted(by_pod[best], key=lambda found: found[:2])[: need.nodes]]


def _plan(
    cluster: str, need: _Need, nodes: Sequence[str], start: datetime, end: datetime, facts: dict[str, dict]
) -> ReservationPlan:
    gpus = sum(facts[node]["gpus"] or 0 for node in nodes)
    names = f"{', '.join(nodes[:8])}{' …' if len(nodes) > 8 else ''}"
    if need.is_requeue:
        benefit = f"job {need.job_id} finds {names} ready when it is requeued, and need not queue again"
    else:
        benefit = f"job {need.job_id} starts on {names}, away from the trouble, and nobody takes these nodes before it"
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
    )

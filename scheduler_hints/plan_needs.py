"""Who needs nodes held, and why: waiting jobs near trouble that is foreseen, running jobs on nodes about to fail.

Here belongs reading hints, risks and the queue; not which nodes are held (`plans.py`) nor what that is worth
(`plan_worth.py`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import polars as pl

from scheduler_hints.claims import seconds_until, waiting_jobs
from scheduler_hints.node_state import node_condition
from scheduler_hints.plan_worth import Worth, hit, slowed_gpu_hours, worth_of_requeue, worth_of_start
from scheduler_hints.schema import Bottleneck, NodeRisk

# Memory runs out by the job's own doing: other nodes do not help it.
NODE_WORDS = {
    "thermal_throttle": "thermal throttling", "power_throttle": "power throttling",
    "nvlink_saturation": "NVLink saturation", "straggler": "a slow rank", "fabric_congestion": "fabric congestion",
}  # fmt: skip
LEAD_S = 60.0  # a hold begins this long before the job is expected, or now


@dataclass(frozen=True, slots=True)
class Need:
    """Nodes wanted for a job, from a moment on."""

    job_id: str
    user: str
    account: str | None
    nodes: int
    start_s: float
    is_requeue: bool
    because: tuple[str, ...]
    pods: tuple[str, ...]
    worth: Worth


@dataclass(frozen=True, slots=True)
class Trouble:
    """A hint about nodes or a queue: class, probability, names and pods of nodes, the queue, the reason in words."""

    name: str
    probability: float
    nodes: frozenset[str]
    pods: frozenset[str]
    queue: str | None
    because: str


def troubles_of(
    hints: Iterable[Bottleneck],
    facts: dict[str, dict],
    min_probability: float,
    by_class: Mapping[str, float] | None = None,
) -> list[Trouble]:
    """Hints that count: of classes that other nodes help against, and of queues about to run short.

    Args:
        hints: Hints that stand.
        facts: Rows of core_nodes by node.
        min_probability: From which probability on a hint counts.
        by_class: The same of classes that have one of their own.
    """
    found = []
    for hint in hints:
        least = (by_class or {}).get(hint.bottleneck_class, min_probability)
        if hint.bottleneck_class == "shortage":
            if hint.unit and not hint.is_active and hint.probability >= least:
                chance = f"within {hint.horizon_s} s with probability {hint.probability:.2f}"
                because = f"queue {hint.unit} runs short of GPUs {chance} (hint {hint.id})"
                of_queue = ("shortage", hint.probability, frozenset(), frozenset(), hint.unit, because)
                found.append(Trouble(*of_queue))
            continue
        if hint.bottleneck_class not in NODE_WORDS or not (hint.is_active or hint.probability >= least):
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
        what = NODE_WORDS[hint.bottleneck_class]
        chance = "now" if hint.is_active else f"within {hint.horizon_s} s with probability {hint.probability:.2f}"
        pods = frozenset(facts[node]["pod"] or "" for node in names)
        because = f"{what} on {where} {chance} (hint {hint.id})"
        p = 1.0 if hint.is_active else hint.probability
        found.append(Trouble(hint.bottleneck_class, p, frozenset(names), pods, None, because))
    return found


def failing_nodes(risks: Iterable[NodeRisk], min_probability: float) -> dict[str, NodeRisk]:
    """Nodes that are about to fail."""
    return {risk.node: risk for risk in risks if risk.p_1h >= min_probability}


def requeues(
    jobs: pl.DataFrame, failing: dict[str, NodeRisk], facts: dict[str, dict], wait_s: float, lease_s: float
) -> list[Need]:
    """Spares for running jobs that are about to lose nodes.

    Args:
        jobs: JOB_COLUMNS.
        failing: As of `failing_nodes`.
        facts: Rows of core_nodes by name.
        wait_s: What a job waits here for its nodes, s.
        lease_s: Length of a hold, s.
    """
    if not failing:
        return []
    needs = []
    running = jobs.filter(pl.col("state") == "RUNNING", pl.col("node_list").is_not_null(), pl.col("user").is_not_null())
    usual = usual_gpus(facts)
    for row in running.sort("start_time", "job_id", nulls_last=True).iter_rows(named=True):
        lost = sorted({node.strip() for node in row["node_list"].split(",")} & failing.keys())
        if lost and _is_whole(row["gpus"], row["node_list"].count(",") + 1, usual):
            pods = tuple(dict.fromkeys(facts[node]["pod"] or "" for node in lost if node in facts))
            risks = [failing[node].p_1h for node in lost]
            because = tuple(
                f"fault of {node} within 1 h with probability {p:.2f} (node risk)"
                for node, p in zip(lost, risks, strict=True)
            )
            worth = worth_of_requeue(risks, row["gpus"], wait_s, len(lost) * usual, lease_s)
            needs.append(Need(row["job_id"], row["user"], row["account"], len(lost), 0.0, True, because, pods, worth))
    return needs


def usual_wait_s(forecasts: pl.DataFrame, now: datetime, otherwise_s: float) -> float:
    """Median over waiting jobs of the wait foreseen, from when it was said on, s."""
    waits = forecasts.filter(
        pl.col("forecast") == "wait", pl.col("valid_until").is_null() | (pl.col("valid_until") > now)
    )
    middle = waits["q50_s"].median() if waits.height else None
    return float(middle) if isinstance(middle, int | float) else otherwise_s


def starts(
    jobs: pl.DataFrame,
    facts: dict[str, dict],
    own: set[str],
    troubles: Sequence[Trouble],
    rows: pl.DataFrame,
    now: datetime,
    wait_s: float,
    lease_s: float,
) -> list[Need]:
    """Waiting whole-node jobs that are expected to start within a lease's length, in order of the queue.

    Args:
        jobs: JOB_COLUMNS.
        facts: Rows of core_nodes by name.
        own: Nodes of standing plans.
        troubles: As of `troubles_of`.
        rows: Job forecasts.
        now: The moment, UTC.
        wait_s: What a job waits here for its nodes, s.
        lease_s: Length of a hold, s.
    """
    if not troubles:
        return []
    fresh = rows.filter(pl.col("valid_until").is_null() | (pl.col("valid_until") > now)).sort("generated_at")
    waits = {
        job: left
        for job, left in fresh.filter(pl.col("forecast") == "wait")
        .select("job_id", seconds_until(pl.col("generated_at"), now) + pl.col("q50_s"))
        .iter_rows()
        if left is not None
    }
    runtimes = dict(fresh.filter(pl.col("forecast") == "runtime").select("job_id", "q50_s").iter_rows())
    queues = dict(jobs.select("job_id", "queue").iter_rows())
    conditions = {node: node_condition(fact["state"]) for node, fact in facts.items()}
    # Nodes that are reserved because of an earlier plan are there for its job as much as idle ones.
    idle = {node for node, found in conditions.items() if found == "idle" or (found == "reserved" and node in own)}
    ill = {node for trouble in troubles for node in trouble.nodes if conditions[node] in ("idle", "busy")}
    usual = usual_gpus(facts)
    needs = []
    of_nodes = [trouble for trouble in troubles if trouble.queue is None]
    of_queues: dict[str | None, list[Trouble]] = {}
    for trouble in troubles:
        if trouble.queue is not None:
            of_queues.setdefault(trouble.queue, []).append(trouble)
    near = [(trouble.name, trouble.probability, len(trouble.nodes & ill)) for trouble in of_nodes]
    because = tuple(trouble.because for trouble in of_nodes)
    pods = tuple(sorted({pod for trouble in of_nodes for pod in trouble.pods}))
    hits: dict[int, dict[str, float]] = {}  # by nodes of a job
    queue = waiting_jobs(jobs, rows, now, usual)
    for row in queue.filter(~pl.col("is_ruled_out"), pl.col("user").is_not_null()).iter_rows(named=True):
        start_s = max(row["ready_s"] or 0.0, 0.0)
        if row["planned_s"] is not None and row["planned_s"] > 0:
            start_s = max(start_s, row["planned_s"])
        elif row["job_id"] in waits:
            start_s = max(start_s, waits[row["job_id"]])
        elif row["need"] > len(idle) and start_s == 0:
            continue  # it waits for nodes, and nobody knows until when
        mine = of_queues.get(queues.get(row["job_id"]), [])
        if not (of_nodes or mine) or start_s > lease_s or not _is_whole(row["gpus"], row["need"], usual):
            continue
        if row["need"] not in hits:
            hits[row["need"]] = _hits(near, len(idle | ill), row["need"])
        runtime_s = runtimes.get(row["job_id"]) or row["limit_s"]
        chances = [
            (p, slowed_gpu_hours(name, row["gpus"], runtime_s)) for name, p in hits[row["need"]].items() if p > 0
        ]
        chances += [(trouble.probability, row["gpus"] * wait_s / 3_600) for trouble in mine]
        worth = worth_of_start(chances, row["need"] * usual, min(start_s, LEAD_S), lease_s)
        why = (*because, *(trouble.because for trouble in mine))
        needs.append(Need(row["job_id"], row["user"], row["account"], row["need"], start_s, False, why, pods, worth))
    return needs


def _hits(near: Sequence[tuple[str, float, int]], pool: int, need: int) -> dict[str, float]:
    """By class, P(a trouble of it comes and hits a job of so many nodes); troubles are taken as independent."""
    well: dict[str, float] = {}
    for name, probability, nodes in near:
        well[name] = well.get(name, 1.0) * (1 - probability * hit(pool, nodes, need))
    return {name: 1 - p for name, p in well.items()}


def usual_gpus(facts: dict[str, dict]) -> int:
    counts = sorted(fact["gpus"] for fact in facts.values() if fact["gpus"])
    return counts[len(counts) // 2] if counts else 1


def _is_whole(gpus: int | None, nodes: int, usual: int) -> bool:
    """The job takes whole nodes: leases are of whole nodes, and a small job would waste them."""
    return (gpus or 0) >= nodes * usual

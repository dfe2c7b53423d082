"""Is the fleet good: states of GPU time, the one number made of them, its parts, breakdowns and losses.

Pure functions of Polars frames. Here belongs what a state means and how states add up; reading the store and wording
for people do not (`dashboards/`).

GPU time falls into states, each GPU-second into exactly one:

    good          doing work at full speed
    throttled     doing work, slowed by heat or by the power brake
    unproductive  allocated to a job that does no work on it
    unknown       allocated, and no activity metric says what it does
    idle          in service and given to nobody
    unreported    in the inventory and in service, but no sample came
    out           on a node that is down, drained or in maintenance, and doing nothing for a job

Fleet goodness = good ÷ all = available × allocated × productive × unthrottled. The power cap alone is no throttling: a
healthy job at full speed sits at its cap all day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import polars as pl

STATES = ("good", "throttled", "unproductive", "unknown", "idle", "unreported", "out")

# A sample counts as work when the engine ran for a quarter of it AND, where known, tensor cores or memory show that
# something was computed: a rank that spins in a hung collective keeps the engine at 1.0 with both near zero.
BUSY_ENGINE_RATIO = 0.25
BUSY_TENSOR_RATIO = 0.01
BUSY_DRAM_RATIO = 0.05

# A GPU is called idle in its job when at least this share of its samples shows no work.
IDLE_SHARE = 0.9

_OUT_OF_SERVICE = r"down|drain|fail|maint|respond|noresp|power|reboot|\*|~"

GPU_WINDOW = {
    "cluster": pl.String,
    "node": pl.String,
    "gpu_uuid": pl.String,
    "gpu_index": pl.Int32,
    "job_id": pl.String,
    "newest": pl.Datetime("us", "UTC"),
    "samples": pl.Int64,
    "good": pl.Int64,
    "throttled": pl.Int64,
    "unproductive": pl.Int64,
    "unknown": pl.Int64,
    "free": pl.Int64,
    "orphan": pl.Int64,
}
"""One GPU over a window of samples: `good` … `free` count samples and add up to `samples`; `orphan` counts those of
`good` and `throttled` that belong to no known job; `job_id` is the newest known one."""

NODE_COLUMNS = ("cluster", "node", "rack", "pod", "gpu_model", "gpus", "state", "reason")


@dataclass(frozen=True, slots=True)
class Goodness:
    """The one number and its parts.

    Attributes:
        gpus: GPUs of the inventory.
        counts: Mean GPUs in each state.
        available: Share of GPUs in service that report.
        allocated: Share of the available that are given to a job (or work without one).
        productive: Share of the allocated, as far as known, that do work; None when nothing known is allocated.
        unthrottled: Share of the working that run at full speed; None when none works.
        value: Product of the four; None when there are no GPUs or nothing is known of the allocated ones.
        low: What it is if every GPU whose state is not known does nothing.
        high: What it is if every GPU whose state is not known does good work.
    """

    gpus: float
    counts: Mapping[str, float]
    available: float | None
    allocated: float | None
    productive: float | None
    unthrottled: float | None
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Loss:
    """One reason why the fleet is not better.

    Attributes:
        kind: unproductive, out, unreported, unknown, throttled, idle; or orphan, which is work for no known job and
            no loss of goodness.
        cluster: Cluster it is in.
        gpus: Mean GPUs it costs.
        since: It has lasted at least since then; None when not known.
        is_since_bound: `since` is only as far as was looked back, it may have begun earlier.
        job_id: Job it belongs to, for unproductive.
        user: Owner of that job.
        job_gpus: GPUs of that job that were seen.
        nodes: Nodes where it is, in order.
        place: Rack, for throttled.
        state: State and reason in the scheduler's words, for out.
        waiting_jobs: Jobs that wait, for idle.
        waiting_gpus: GPUs those jobs ask for.
        free_nodes: Nodes that are wholly free, for idle.
    """

    kind: str
    cluster: str
    gpus: float
    since: datetime | None = None
    is_since_bound: bool = False
    job_id: str | None = None
    user: str | None = None
    job_gpus: int = 0
    nodes: tuple[str, ...] = field(default=())
    place: str | None = None
    state: str | None = None
    waiting_jobs: int = 0
    waiting_gpus: int = 0
    free_nodes: int = 0


def is_out_of_service() -> pl.Expr:
    """True for a node whose `state` says that it takes no new work; false when the state is not known."""
    return pl.col("state").str.to_lowercase().str.contains(_OUT_OF_SERVICE).fill_null(False)


def natural_key(name: str | None) -> tuple:
    """Sort key that puts n2 before n10 and a missing name last."""
    if name is None:
        return (1,)
    parts: list[tuple] = []
    digits = text = ""
    for char in name:
        if char.isascii() and char.isdigit():
            if text:
                parts.append((1, text))
                text = ""
            digits += char
        else:
            if digits:
                parts.append((0, int(digits), digits))
                digits = ""
            text += char
    if digits:
        parts.append((0, int(digits), digits))
    if text:
        parts.append((1, text))
    return (0, *parts)


def attribute_jobs(window: pl.DataFrame, nodes: pl.DataFrame, running: pl.DataFrame) -> pl.DataFrame:
    """Give GPUs without a job label the job that has their whole node.

    Exporters know a GPU's job only where the scheduler tells them. Where they do not, a running job that asked for
    every GPU of its nodes is the only possible owner; jobs on parts of nodes stay unattributed.

    Args:
        window: Frame of `GPU_WINDOW`.
        nodes: Inventory, `NODE_COLUMNS`.
        running: Running jobs: cluster, job_id, nodes, gpus, node_list.

    Returns:
        The window with `job_id` filled and samples moved from `free` to `unproductive` and out of `orphan`.
    """
    if window.is_empty() or running.is_empty() or nodes.is_empty():
        return window
    owners = (
        running.filter(pl.col("node_list").is_not_null() & (pl.col("gpus") > 0))
        .select("cluster", pl.col("job_id").alias("owner"), "gpus", pl.col("node_list").str.split(",").alias("node"))
        .with_columns((pl.col("gpus") / pl.col("node").list.len()).alias("per_node"))
        .explode("node", empty_as_null=True, keep_nulls=True)
        .join(nodes.select("cluster", "node", pl.col("gpus").alias("has")), on=["cluster", "node"])
        .filter(pl.col("per_node") >= pl.col("has"))
        .unique(["cluster", "node"], keep="none")
        .select("cluster", "node", "owner")
    )
    found = pl.col("job_id").is_null() & pl.col("owner").is_not_null()
    return (
        window.join(owners, on=["cluster", "node"], how="left", maintain_order="left")
        .with_columns(
            pl.when(found).then("owner").otherwise("job_id").alias("job_id"),
            pl.when(found)
            .then(pl.col("unproductive") + pl.col("free"))
            .otherwise("unproductive")
            .alias("unproductive"),
            pl.when(found).then(0).otherwise("free").cast(pl.Int64).alias("free"),
            pl.when(found).then(0).otherwise("orphan").cast(pl.Int64).alias("orphan"),
        )
        .drop("owner")
    )


def node_states(window: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """Mean GPUs of each state on each node.

    Args:
        window: Frame of `GPU_WINDOW`; each GPU counts once, whatever its number of samples.
        nodes: Inventory, `NODE_COLUMNS`; a node that only the samples know is added with the GPUs seen.

    Returns:
        One row per node: `NODE_COLUMNS`, `free_gpus` (GPUs without any work or job), and a Float64 column per state;
        the states of a row add up to its `gpus`.
    """
    share = [(pl.col(name) / pl.col("samples")).sum().alias(name) for name in ("good", "throttled", "unproductive")]
    seen = (
        window.filter(pl.col("samples") > 0)
        .group_by("cluster", "node")
        .agg(
            *share,
            (pl.col("unknown") / pl.col("samples")).sum().alias("unknown"),
            (pl.col("free") / pl.col("samples")).sum().alias("free"),
            (pl.col("free") == pl.col("samples")).sum().cast(pl.Int64).alias("free_gpus"),
            pl.len().cast(pl.Int64).alias("seen"),
        )
    )
    counted = ("good", "throttled", "unproductive", "unknown", "free", "seen", "free_gpus")
    joined = nodes.select(NODE_COLUMNS).join(seen, on=["cluster", "node"], how="full", coalesce=True)
    gpus = pl.max_horizontal(pl.col("gpus").cast(pl.Int64), "seen")
    return (
        joined.with_columns(pl.col(counted).fill_null(0))
        .with_columns(gpus.alias("gpus"), is_out_of_service().alias("is_out"))
        .with_columns((pl.col("gpus") - pl.col("seen")).cast(pl.Float64).alias("missing"))
        .select(
            *NODE_COLUMNS,
            "free_gpus",
            "good",
            "throttled",
            "unproductive",
            "unknown",
            pl.when("is_out").then(0.0).otherwise("free").alias("idle"),
            pl.when("is_out").then(0.0).otherwise("missing").alias("unreported"),
            pl.when("is_out").then(pl.col("free") + pl.col("missing")).otherwise(0.0).alias("out"),
        )
    )


def goodness(counts: Mapping[str, float]) -> Goodness:
    """The one number from mean GPUs per state.

    Args:
        counts: State to GPUs; a missing state counts 0.

    Returns:
        Value and parts, each 0–1 or None where it cannot be told.
    """
    have = {state: float(counts.get(state, 0.0)) for state in STATES}
    total = sum(have.values())
    working = have["good"] + have["throttled"]
    known = working + have["unproductive"]
    allocated = known + have["unknown"]
    present = allocated + have["idle"]

    def ratio(part: float, whole: float) -> float | None:
        return part / whole if whole > 0 else None

    parts = (ratio(present, total), ratio(allocated, present), ratio(working, known), ratio(have["good"], working))
    value: float | None = None
    if total > 0:
        if have["good"] > 0:
            value = have["good"] / known * allocated / total
        elif known > 0 or allocated == 0:
            value = 0.0
    dark = have["unknown"] + have["unreported"]
    return Goodness(
        gpus=total,
        counts=have,
        available=parts[0],
        allocated=parts[1],
        productive=parts[2],
        unthrottled=parts[3],
        value=value,
        low=ratio(have["good"], total),
        high=ratio(have["good"] + dark, total),
    )


def breakdown(states: pl.DataFrame, by: str) -> pl.DataFrame:
    """States summed by a column of the inventory, worst first.

    Args:
        states: Result of `node_states`.
        by: One of cluster, pod, rack, gpu_model, node.

    Returns:
        Columns cluster (unless by cluster), the group, nodes, gpus, one per state, `goodness` (0–1 or null).

    Raises:
        ValueError: `by` is none of them.
    """
    groups = ("cluster", "pod", "rack", "gpu_model", "node")
    if by not in groups:
        raise ValueError(f"cannot group by {by!r}; choose one of: {', '.join(groups)}")
    keys = [by] if by == "cluster" else ["cluster", by]
    summed = states.group_by(keys).agg(pl.len().alias("nodes"), pl.col("gpus").sum(), pl.col(STATES).sum())
    values = [goodness(row).value for row in summed.select(STATES).iter_rows(named=True)]
    return (
        summed.with_columns(pl.Series("goodness", values, dtype=pl.Float64))
        .with_columns((pl.col("gpus") - pl.col("good")).alias("lost"))
        .sort("goodness", pl.col("lost").neg(), *keys, nulls_last=True)
        .drop("lost")
    )


def trend(tallies: pl.DataFrame, gpus: Mapping[str, float]) -> pl.DataFrame:
    """Goodness over time from mean GPUs per state and bin.

    What a node's state was in the past is not known here, so `out` and `unreported` are one: `absent`.

    Args:
        tallies: Columns bin (datetime), cluster, good, throttled, unproductive, unknown, idle: mean GPUs.
        gpus: Cluster to GPUs of its inventory today.

    Returns:
        One row per bin, oldest first: bin, the five states, absent, `goodness`, `gpus`. A bin in which a cluster sent
        nothing counts that cluster's GPUs as absent.
    """
    named = ("good", "throttled", "unproductive", "unknown", "idle")
    total = float(sum(gpus.values()))
    summed = tallies.group_by("bin").agg(pl.col(named).sum()).sort("bin")
    seen = pl.sum_horizontal(named)
    whole = pl.max_horizontal(seen, pl.lit(total))
    framed = summed.with_columns((whole - seen).alias("absent"), whole.alias("gpus"))
    values = [
        goodness({**row, "unreported": row["absent"]}).value
        for row in framed.select(*named, "absent").iter_rows(named=True)
    ]
    return framed.with_columns(pl.Series("goodness", values, dtype=pl.Float64))


def losses(
    window: pl.DataFrame,
    states: pl.DataFrame,
    *,
    running: pl.DataFrame,
    waiting: Mapping[str, tuple[int, int]],
    last_active: pl.DataFrame,
    looked_back_to: datetime,
    at_least_gpus: float = 0.5,
) -> list[Loss]:
    """The biggest reasons why the fleet is not better, largest first.

    Args:
        window: Frame of `GPU_WINDOW`.
        states: Result of `node_states` on it.
        running: Running jobs: cluster, job_id, user, start_time.
        waiting: Cluster to (pending jobs, GPUs they ask for).
        last_active: When a GPU last did work: cluster, gpu_uuid, last_active; no row or null: not since
            `looked_back_to`.
        looked_back_to: How far `last_active` looked.
        at_least_gpus: Smaller losses are left out.

    Returns:
        Losses of at least that many mean GPUs.
    """
    found = [
        *_unproductive(window, running, last_active, looked_back_to),
        *_out_of_service(states),
        *_by_place(states, "throttled", "rack"),
        *_by_place(states, "unreported", None),
        *_by_place(states, "unknown", None),
        *_idle(states, waiting),
        *_orphans(window),
    ]
    return sorted((loss for loss in found if loss.gpus >= at_least_gpus), key=lambda loss: (-loss.gpus, loss.kind))


def _ordered(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names), key=natural_key))


def _unproductive(
    window: pl.DataFrame, running: pl.DataFrame, last_active: pl.DataFrame, looked_back_to: datetime
) -> list[Loss]:
    # Once by the GPUs that do nothing at all in their job: these have a beginning. What a job loses in dips of GPUs
    # that do work is in the number, but no single reason to be named.
    is_idle = pl.col("unproductive") >= IDLE_SHARE * pl.col("samples")
    jobs = running.select("cluster", "job_id", "user", "start_time").unique(["cluster", "job_id"], keep="last")
    grouped = (
        window.filter(pl.col("job_id").is_not_null())
        .join(last_active.select("cluster", "gpu_uuid", "last_active"), on=["cluster", "gpu_uuid"], how="left")
        .group_by("cluster", "job_id")
        .agg(
            (pl.col("unproductive") / pl.col("samples")).filter(is_idle).sum().alias("lost"),
            pl.len().alias("job_gpus"),
            pl.col("node").filter(is_idle).alias("node"),
            pl.col("last_active").filter(is_idle).max().alias("last_active"),
        )
        .filter(pl.col("lost") > 0)
        .join(jobs, on=["cluster", "job_id"], how="left")
    )
    found = []
    for row in grouped.iter_rows(named=True):
        begins = [moment for moment in (row["last_active"], row["start_time"]) if moment is not None]
        since = max([*begins, looked_back_to])
        found.append(
            Loss(
                kind="unproductive",
                cluster=row["cluster"],
                gpus=row["lost"],
                since=since,
                is_since_bound=since == looked_back_to,
                job_id=row["job_id"],
                user=row["user"],
                job_gpus=row["job_gpus"],
                nodes=_ordered(row["node"]),
            )
        )
    return found


def _out_of_service(states: pl.DataFrame) -> list[Loss]:
    grouped = (
        states.filter(pl.col("out") > 0)
        .group_by("cluster", "state", "reason")
        .agg(pl.col("out").sum(), pl.col("node"))
    )  # fmt: skip
    return [
        Loss(
            kind="out",
            cluster=row["cluster"],
            gpus=row["out"],
            nodes=_ordered(row["node"]),
            state=": ".join(part for part in (row["state"], row["reason"]) if part),
        )
        for row in grouped.iter_rows(named=True)
    ]


def _by_place(states: pl.DataFrame, state: str, place: str | None) -> list[Loss]:
    keys = ["cluster", *([place] if place else [])]
    grouped = states.filter(pl.col(state) > 0).group_by(keys).agg(pl.col(state).sum().alias("lost"), pl.col("node"))
    return [
        Loss(
            kind=state,
            cluster=row["cluster"],
            gpus=row["lost"],
            nodes=_ordered(row["node"]),
            place=row[place] if place else None,
        )
        for row in grouped.iter_rows(named=True)
    ]


def _idle(states: pl.DataFrame, waiting: Mapping[str, tuple[int, int]]) -> list[Loss]:
    whole = (pl.col("idle") > 0) & (pl.col("free_gpus") == pl.col("gpus"))
    grouped = (
        states.group_by("cluster")
        .agg(pl.col("idle").sum(), pl.col("node").filter(pl.col("idle") > 0), whole.sum().alias("free_nodes"))
        .filter(pl.col("idle") > 0)
    )
    found = []
    for row in grouped.iter_rows(named=True):
        jobs, gpus = waiting.get(row["cluster"], (0, 0))
        found.append(
            Loss(
                kind="idle",
                cluster=row["cluster"],
                gpus=row["idle"],
                nodes=_ordered(row["node"]),
                waiting_jobs=jobs,
                waiting_gpus=gpus,
                free_nodes=row["free_nodes"],
            )
        )
    return found


def _orphans(window: pl.DataFrame) -> list[Loss]:
    grouped = (
        window.filter(pl.col("orphan") > 0)
        .group_by("cluster")
        .agg((pl.col("orphan") / pl.col("samples")).sum().alias("gpus"), pl.col("node"))
    )
    return [
        Loss(kind="orphan", cluster=row["cluster"], gpus=row["gpus"], nodes=_ordered(row["node"]))
        for row in grouped.iter_rows(named=True)
    ]

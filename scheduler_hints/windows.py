"""Backfill windows: sets of nodes that stay free from a start to an end with a stated confidence.

Here belongs the making of windows out of nodes, the queue and the ends of running jobs; who claims nodes stands in
`claims.py`, when jobs end in `job_ends.py`. Pure: frames in, windows out.

What the confidence promises: with at least that probability, no waiting job that cannot start now could start on the
window's nodes before the window's end, and a window that lies ahead is free at its start. It assumes that forecasts are
calibrated; it holds for jobs that end each by its own law and for jobs of one user and name that end together, not for
other ways of ending together. It does not speak of what nobody can read from the queue: jobs not yet submitted, jobs a
rule holds back, nodes that fail or are drained, an operator's reservation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from hashlib import blake2b

import numpy as np
import polars as pl

from features.vocabulary import JOB_COLUMNS, QUANTILE_COLUMNS
from scheduler_hints.claims import NEVER_S, Claim, Crowd, claims, waiting_jobs
from scheduler_hints.job_ends import JobEnds, forecast_rows, job_ends
from scheduler_hints.node_state import node_condition
from scheduler_hints.schema import JobForecast, Scope, Window

SAMPLES = 512
_NODE_COLUMNS = ("cluster", "node", "rack", "pod", "gpus", "state")
_FORECAST_COLUMNS = ("job_id", "forecast", "generated_at", "valid_until", *QUANTILE_COLUMNS)
_BOUNDED = re.compile(r"^job (\S+) is expected to start on ")


class WindowError(ValueError):
    """Windows cannot be made from these arguments; the message names the offender and what is valid."""


def backfill_windows(
    jobs: pl.DataFrame,
    nodes: pl.DataFrame,
    forecasts: pl.DataFrame | Iterable[JobForecast],
    now: datetime,
    confidence: float,
    guard_s: float,
    *,
    cluster: str | None = None,
    max_windows: int = 500,
    max_fits: int = 50,
    horizon_s: float = 86_400,
) -> list[Window]:
    """Cut backfill windows of whole nodes for one cluster.

    Idle nodes are grouped by pod (by rack where there is no pod): one window for each group and end, from now until a
    waiting job could claim them. Nodes whose jobs end before anybody claims them make windows that lie ahead, one for
    each set of jobs and group. A node is in one window at most. Reserved, drained, down and unknown nodes are in none.

    Args:
        jobs: JOB_COLUMNS; rows RUNNING and PENDING are read. A running job without `node_list` frees nothing.
        nodes: Rows of core_nodes.
        forecasts: Rows of out_job_forecasts, or published forecasts; a job without one is bounded by its time limit
            (`job_ends`).
        now: The moment, UTC.
        confidence: Least probability of the promise, 0–1.
        guard_s: Kept free at the end when a job is fitted; shorter windows are not given out, s.
        cluster: The cluster; default: that of the rows.
        max_windows: At most so many: those free now first, then by start.
        max_fits: At most so many fitting jobs for each window, in order of the queue.
        horizon_s: Windows start within this time, s.

    Returns:
        Windows in that order; ids stay while group, origin and claiming job stay.

    Raises:
        WindowError: A column is missing, rows are of several clusters, or a number is out of range.
    """
    forecasts = forecast_rows(forecasts)
    name = _check(jobs, nodes, forecasts, now, confidence, guard_s, cluster)
    if nodes.is_empty():
        return []
    places = _places(nodes)
    running = jobs.filter(pl.col("state") == "RUNNING").unique("job_id", keep="last", maintain_order=True)
    ends = job_ends(running, forecasts, now)
    held = _held_nodes(running, places)
    idle = places.filter(pl.col("condition") == "idle", ~pl.col("node").is_in(held["node"].implode()))
    usual = places["gpus"].drop_nulls().median()
    queue = waiting_jobs(jobs, forecasts, now, int(usual) if isinstance(usual, int | float) and usual >= 1 else 1)
    freed_by = _freed_by(held, ends)
    wanted = claims(queue, idle.height, _freed_at_limit(ends, freed_by))
    contested = [claim for claim in wanted if claim.shortfall > 0]
    crowd = Crowd(ends, freed_by, SAMPLES)

    cuts: list[_Cut] = []
    end_s, claim = crowd.earliest_s(contested, 1 - confidence)
    for group, names, until_s, taker in _share_out(idle, wanted, end_s, claim):
        cuts.append(_Cut(group, "idle", names, 0.0, until_s, taker))
    cuts.sort(key=lambda cut: (-len(cut.nodes), cut.group))
    end_s, claim = crowd.earliest_s(contested, (1 - confidence) / 2)
    ahead = _ahead(held, ends, places, (1 - confidence) / 2)
    cuts += [_Cut(group, origin, names, start_s, end_s, claim) for start_s, group, origin, names in ahead]
    cuts = [cut for cut in cuts if cut.start_s <= horizon_s and cut.end_s - cut.start_s > guard_s][:max_windows]
    fits = _fits(queue, places, cuts, guard_s, max_fits)
    facts = {row["node"]: row for row in places.iter_rows(named=True)}
    return [
        _window(cut, fitting, name, now, confidence, [facts[name] for name in cut.nodes])
        for cut, fitting in zip(cuts, fits, strict=True)
    ]


def bounding_job(window: Window) -> str | None:
    """The job whose expected start ends the window; None when nothing bounds it."""
    found = _BOUNDED.match(window.bounded_by or "")
    return found[1] if found else None


class _Cut:
    """A window in the making: seconds from now, nodes sorted."""

    __slots__ = ("claim", "end_s", "group", "nodes", "origin", "start_s")

    def __init__(
        self, group: str, origin: str, nodes: list[str], start_s: float, end_s: float, claim: Claim | None
    ) -> None:
        self.group, self.origin, self.nodes = group, origin, nodes
        self.start_s, self.end_s, self.claim = start_s, end_s, claim


def _check(
    jobs: pl.DataFrame,
    nodes: pl.DataFrame,
    forecasts: pl.DataFrame,
    now: datetime,
    confidence: float,
    guard_s: float,
    cluster: str | None,
) -> str:
    for what, frame, columns in (
        ("jobs", jobs, JOB_COLUMNS),
        ("nodes", nodes, _NODE_COLUMNS),
        ("forecasts", forecasts, _FORECAST_COLUMNS),
    ):
        missing = [name for name in columns if name not in frame.columns]
        if missing:
            raise WindowError(f"{what} lacks columns {', '.join(missing)}; it has {', '.join(frame.columns)}")
    found = {name for frame in (jobs, nodes) for name in frame["cluster"].drop_nulls().unique()}
    names = sorted((found | {cluster or ""}) - {""})
    if len(names) > 1:
        raise WindowError(f"windows are made for one cluster at a time; the rows are of {', '.join(names)}")
    if now.tzinfo is None:
        raise WindowError(f"now = {now}: a time with a time zone is needed")
    if not 0 <= confidence <= 1:
        raise WindowError(f"confidence = {confidence}: a probability from 0 to 1 is needed")
    if not guard_s >= 0:
        raise WindowError(f"guard_s = {guard_s}: 0 or more seconds are needed")
    return names[0] if names else ""


def _places(nodes: pl.DataFrame) -> pl.DataFrame:
    """Nodes with their condition and group (pod, else rack), in natural order."""
    known = nodes["state"].unique().to_list()
    return (
        nodes.unique("node", keep="last", maintain_order=True)
        .with_columns(
            pl.col("state").replace_strict(known, [node_condition(state) for state in known]).alias("condition"),
            pl.coalesce("pod", "rack", pl.lit("")).alias("group"),
            pl.col("node").str.replace_all(r"(\d+)", "00000000$1").str.replace_all(r"0*(\d{9})", "$1").alias("order"),
        )
        .sort("group", "rack", "order", "node", nulls_last=True)
    )


def _held_nodes(running: pl.DataFrame, places: pl.DataFrame) -> pl.DataFrame:
    """Rows (row of the job in `running`, node) for nodes that come back into service when their jobs end."""
    return (
        running.with_row_index("job")
        .select("job", pl.col("node_list").str.split(",").alias("node"))
        .explode("node", empty_as_null=True, keep_nulls=True)
        .with_columns(pl.col("node").str.strip_chars())
        .drop_nulls("node")
        .unique(maintain_order=True)
        .join(places.select("node", "condition"), on="node", how="inner", maintain_order="left")
        .filter(pl.col("condition").is_in(["idle", "busy"]))
        .select("job", "node")
    )


def _freed_by(held: pl.DataFrame, ends: JobEnds) -> np.ndarray:
    """How many nodes each job's end frees. A node with several jobs counts for the one that ends last by its median.

    The node is free no earlier than any of its jobs ends, so counting it for one of them only makes claims earlier.
    """
    medians = pl.DataFrame({"job": np.arange(len(ends), dtype=np.uint32), "median": ends.quantile(0.5)})
    last = held.join(medians, on="job", how="left").sort("median", "job").unique("node", keep="last")
    return np.bincount(last["job"].to_numpy(), minlength=len(ends)).astype(float)


def _freed_at_limit(ends: JobEnds, freed_by: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from now, rising, and nodes free in addition by then when every job runs to its limit."""
    limits = np.where(ends.has_limit, ends.knots[:, -1], np.inf) if len(ends) else np.zeros(0)
    order = np.argsort(limits, kind="stable")
    return np.maximum(limits[order], 0.0), np.cumsum(freed_by[order])


def _share_out(
    idle: pl.DataFrame, wanted: list[Claim], end_s: float, claim: Claim | None
) -> Iterable[tuple[str, list[str], float, Claim | None]]:
    """Idle nodes by group and end. A claim that fits takes whole groups where it can, so that others stay whole.

    Which nodes the scheduler will choose is not known; any choice leaves the job the number of nodes that it needs.
    """
    left: dict[str, list[str]] = {}
    for group, node in idle.select("group", "node").iter_rows():
        left.setdefault(group, []).append(node)
    for taker in sorted((c for c in wanted if c.shortfall == 0), key=lambda c: (c.by_s, c.job_id)):
        need = taker.nodes
        while need and left and taker.by_s < end_s:
            enough = [name for name, names in left.items() if len(names) >= need]
            if enough:
                group = min(enough, key=lambda name: (len(left[name]), name))
            else:
                group = max(left, key=lambda name: (len(left[name]), name))
            taken, left[group] = left[group][:need], left[group][need:]
            if not left[group]:
                del left[group]
            need -= len(taken)
            yield group, taken, taker.by_s, taker
    for group, names in left.items():
        yield group, names, end_s, claim


def _ahead(
    held: pl.DataFrame, ends: JobEnds, places: pl.DataFrame, risk: float
) -> list[tuple[float, str, str, list[str]]]:
    """Nodes that are free by a moment with probability 1 − risk: (seconds from now, group, origin, nodes)."""
    if held.is_empty():
        return []
    shares = held.group_by("node", maintain_order=True).agg("job", pl.len().alias("jobs"))
    starts: dict[int, np.ndarray] = {
        count: ends.quantile(1 - risk / count) for count in shares["jobs"].unique().to_list()
    }
    order = places.select("node", "group").with_row_index("place")
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for node, group, of_node in shares.join(order, on="node").sort("place").select("node", "group", "job").iter_rows():
        found.setdefault((group, tuple(sorted(of_node))), []).append(node)
    rows = []
    for (group, of_nodes), names in found.items():
        start_s = float(max(starts[len(of_nodes)][job] for job in of_nodes))
        if start_s < NEVER_S:
            rows.append((start_s, group, "+".join(ends.job_ids[job] for job in of_nodes), names))
    return sorted(rows)


def _fits(
    queue: pl.DataFrame, places: pl.DataFrame, cuts: list[_Cut], guard_s: float, max_fits: int
) -> list[list[str]]:
    gpus = dict(places.select("node", pl.col("gpus").fill_null(0)).iter_rows())
    able = queue.filter(~pl.col("is_ruled_out"))
    need, wants = able["need"].to_numpy(), able["gpus"].to_numpy()
    ready = able["ready_s"].fill_null(0.0).to_numpy()
    lasts = able["p80_s"].fill_null(np.inf).to_numpy()
    ids = able["job_id"].to_list()
    found = []
    for cut in cuts:
        length_s = cut.end_s - cut.start_s if cut.end_s < NEVER_S else np.inf
        fitting = (need <= len(cut.nodes)) & (wants <= sum(gpus[node] for node in cut.nodes))
        fitting &= (lasts + guard_s <= length_s) & (ready <= cut.start_s)
        found.append([ids[row] for row in np.flatnonzero(fitting)[:max_fits]])
    return found


def _window(cut: _Cut, fits: list[str], cluster: str, now: datetime, confidence: float, facts: list[dict]) -> Window:
    racks, pods = {fact["rack"] for fact in facts}, {fact["pod"] for fact in facts}
    rack = next(iter(racks)) if len(racks) == 1 else None
    scope: Scope = "node" if len(facts) == 1 else "rack" if rack is not None else "pod"
    # Whole seconds: starts up, ends down.
    start = now if cut.start_s == 0 else now + timedelta(seconds=float(np.ceil(cut.start_s)))
    end = now + timedelta(seconds=float(np.floor(cut.end_s))) if cut.end_s < NEVER_S else None
    claimant = cut.claim.job_id if cut.claim else ""
    key = "\x1f".join((cluster, cut.group, cut.origin, claimant))
    return Window(
        id=f"w-{blake2b(key.encode(), digest_size=8).hexdigest()}",
        cluster=cluster,
        nodes=list(cut.nodes),
        gpus=int(sum(fact["gpus"] or 0 for fact in facts)),
        start=start,
        end=end,
        duration_s=(end - start).total_seconds() if end else None,
        confidence=confidence,
        scope=scope,
        rack=rack,
        pod=next(iter(pods)) if len(pods) == 1 else None,
        bounded_by=cut.claim.text if cut.claim else None,
        fits_jobs=fits,
    )

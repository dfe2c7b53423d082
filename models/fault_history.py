"""What past faults of nodes say at a moment: counts, time since, and how restless the fleet is.

Here belong facts that features and baselines of node failure are made of; nothing later than the asked moment enters,
and the end of a fault counts from the moment it ended. The forecaster stands in `models/node_failure.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HOUR_S, DAY_S = 3600.0, 86_400.0
RECENCY_S = (0.5 * DAY_S, 3 * DAY_S, 14 * DAY_S)  # how fast a past fault is forgotten
FLEET_S = 14 * DAY_S
# Faults per node and second before any has been seen: 6.50 and 2.34 per 1,000 node-days on two clusters of 24,000
# A100 (Meta, Revisiting Reliability in Large-Scale ML Research Clusters), between the two.
PRIOR_RATE = 4.0 / 1000 / DAY_S
PRIOR_FAULTS = 1.0
SHAPE_BOUNDS = (0.2, 20.0)
FEATURES = ("log_own_rate", "recent_12h", "recent_3d", "recent_14d", "log_fleet_trend", "has_no_fault")


class FaultHistory:
    """Faults of a fixed set of nodes.

    Args:
        faults: Rows with `node` and `start_time` (UTC), and `end_time` and `kind` where known. Faults of one node that
            overlap count once, from the first start to the last end.
        nodes: Every node there is, also those that never faulted; nodes that only faults name are added.
        since: Start of the record, seconds since 1970; default: the first fault.

    Attributes:
        nodes: Names, by code.
        node: Code of each fault, ascending; `start` and `end` in seconds (end infinite while it lasts), ascending
            within a node; `kind` its kind.
    """

    def __init__(self, faults: pl.DataFrame, nodes: Sequence[str], since: float | None = None) -> None:
        frame = _merged(faults)
        self.nodes = sorted(set(nodes) | set(frame["node"].to_list()))
        codes = {name: i for i, name in enumerate(self.nodes)}
        self.node = np.array([codes[name] for name in frame["node"].to_list()], dtype=np.int64)
        self.start = frame["start_s"].to_numpy().astype(np.float64)
        self.end = frame["end_s"].to_numpy().astype(np.float64)
        self.kind = frame["kind"].to_list()
        order = np.lexsort((self.start, self.node))
        self.node, self.start, self.end = self.node[order], self.start[order], self.end[order]
        self.kind = [self.kind[i] for i in order]
        self.since = since if since is not None else (float(self.start.min()) if len(self.start) else 0.0)
        self._first = np.searchsorted(self.node, np.arange(len(self.nodes) + 1))
        self._span = (max(float(self.start.max(initial=0.0)) - self.since, 0.0) + DAY_S) * 4
        self._start_key = self.node * self._span + np.maximum(self.start - self.since, 0)
        length = np.where(np.isfinite(self.end), self.end - self.start, 0.0)
        self._down = np.concatenate(([0.0], np.cumsum(length)))
        self._all_starts = np.sort(self.start)
        # Decayed sums of ends, just after the end of each fault: sum over earlier ends of exp(−gap ÷ τ).
        self._decayed = np.zeros((len(RECENCY_S), len(self.node)))
        for j, tau in enumerate(RECENCY_S):
            total = 0.0
            for i in range(len(self.node)):
                is_first = i == self._first[self.node[i]]
                gap = np.inf if is_first else self.end[i] - self.end[i - 1]
                total = 1.0 + (0.0 if not np.isfinite(gap) else total * float(np.exp(-gap / tau)))
                self._decayed[j, i] = total

    def before(self, node: Ints, at_s: Floats) -> Ints:
        """Index just past the last fault that had begun at a moment, per row."""
        key = node * self._span + np.clip(np.asarray(at_s) - self.since, -1.0, self._span / 2)
        return np.maximum(np.searchsorted(self._start_key, key, side="right"), self._first[node])

    def is_down(self, node: Ints, at_s: Floats) -> NDArray[np.bool_]:
        """Whether a fault of the node lasts at a moment."""
        past = self.before(node, at_s)
        has = past > self._first[node]
        return has & (self.end[np.maximum(past - 1, 0)] > at_s) if len(self.end) else has

    def count(self, node: Ints, at_s: Floats, within_s: float = np.inf) -> Ints:
        """Faults that began in the span before a moment."""
        begin = np.asarray(at_s) - within_s
        return self.before(node, at_s) - self.before(node, np.maximum(begin, self.since - 1.0))

    def next_start_s(self, node: Ints, at_s: Floats) -> Floats:
        """Seconds until the node's next fault begins, infinite when none is recorded."""
        past = self.before(node, at_s)
        inside = past < self._first[node + 1]
        return np.where(inside, self.start[np.minimum(past, max(len(self.start) - 1, 0))] - at_s, np.inf)

    def exposure_s(self, node: Ints, at_s: Floats) -> Floats:
        """Seconds the node has been in service since the record began."""
        past, first = self.before(node, at_s), self._first[node]
        down = self._down[past] - self._down[first]
        if len(self.end):
            last = np.maximum(past - 1, 0)
            open_s = np.where(np.isfinite(self.end[last]), self.end[last], at_s)
            over = np.where((past > first) & (open_s > at_s), open_s - at_s, 0.0)
            lasting = (past > first) & ~np.isfinite(self.end[last])
            down = down - over + np.where(lasting, at_s - self.start[last], 0.0)
        return np.maximum(np.asarray(at_s) - self.since - down, 0.0)

    def fleet_rate(self, at_s: Floats, within_s: float = np.inf) -> Floats:
        """Faults per node and second over a span before a moment, pulled towards the prior."""
        at_s = np.asarray(at_s, dtype=np.float64)
        span = np.minimum(np.maximum(at_s - self.since, 0.0), within_s)
        n = np.searchsorted(self._all_starts, at_s, side="right") - np.searchsorted(
            self._all_starts, at_s - span, side="left"
        )
        return (n + PRIOR_FAULTS) / (span * len(self.nodes) + PRIOR_FAULTS / PRIOR_RATE)

    def shape(self, at_s: float) -> float:
        """Shape of the gamma law over nodes' own rates, by moments: small when few nodes have most faults."""
        everyone = np.arange(len(self.nodes))
        at = np.full(len(everyone), at_s)
        n = self.count(everyone, at).astype(np.float64)
        exposure = self.exposure_s(everyone, at)
        expected = n.sum() / max(exposure.sum(), 1.0) * exposure
        excess = float(((n - expected) ** 2 - expected).sum())
        if excess <= 0:
            return SHAPE_BOUNDS[1]
        return float(np.clip((expected**2).sum() / excess, *SHAPE_BOUNDS))

    def own_rate(self, node: Ints, at_s: Floats, shape: float) -> Floats:
        """Gamma–Poisson estimate of the node's own rate, faults per second."""
        fleet = self.fleet_rate(at_s)
        return (shape + self.count(node, at_s)) / (shape / fleet + self.exposure_s(node, at_s))

    def matrix(self, node: Ints, at_s: Floats, shape: float) -> Floats:
        """Features of nodes at moments, shape (rows, len(FEATURES))."""
        at_s = np.asarray(at_s, dtype=np.float64)
        out = np.zeros((len(node), len(FEATURES)))
        out[:, 0] = np.log(self.own_rate(node, at_s, shape) * DAY_S)
        past, first = self.before(node, at_s), self._first[node]
        if len(self.end):
            # Only ends that have come count: step back over a fault that lasts.
            last = past - 1
            last = np.where((last >= first) & (self.end[np.maximum(last, 0)] > at_s), last - 1, last)
            has = last >= first
            safe = np.maximum(last, 0)
            gap = np.where(has & np.isfinite(self.end[safe]), at_s - self.end[safe], np.inf)
            for j, tau in enumerate(RECENCY_S):
                out[:, 1 + j] = np.where(has, np.log1p(self._decayed[j, safe] * np.exp(-np.maximum(gap, 0) / tau)), 0.0)
        out[:, 4] = np.log(self.fleet_rate(at_s, FLEET_S) / self.fleet_rate(at_s))
        out[:, 5] = past == first
        return out


def _merged(faults: pl.DataFrame) -> pl.DataFrame:
    """One row per span in which a node was in fault: node, start_s, end_s, kind."""
    empty = {"node": pl.String, "start_s": pl.Float64, "end_s": pl.Float64, "kind": pl.String}
    if not faults.height:
        return pl.DataFrame(schema=empty)
    end = pl.col("end_time") if "end_time" in faults.columns else pl.lit(None, dtype=pl.Datetime("us", "UTC"))
    kind = pl.col("kind") if "kind" in faults.columns else pl.lit(None, dtype=pl.String)
    rows = faults.drop_nulls(["node", "start_time"]).select(
        "node",
        (pl.col("start_time").dt.epoch("us") / 1e6).alias("start_s"),
        (end.dt.epoch("us") / 1e6).fill_null(np.inf).alias("end_s"),
        kind.fill_null("").alias("kind"),
    )
    rows = rows.with_columns(pl.max_horizontal("start_s", "end_s").alias("end_s")).sort("node", "start_s")
    reach = pl.col("end_s").cum_max().shift(1).over("node")
    rows = rows.with_columns(((pl.col("start_s") > reach).fill_null(True)).cum_sum().over("node").alias("_span"))
    return (
        rows.group_by("node", "_span", maintain_order=True)
        .agg(pl.col("start_s").min(), pl.col("end_s").max(), pl.col("kind").first())
        .select(list(empty))
    )

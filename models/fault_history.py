"""What past faults of nodes say at a moment: counts, time since, and how restless the fleet is.

Here belong facts that features and baselines of node failure are made of; nothing later than the asked moment enters,
and the end of a fault counts from the moment it ended. The forecaster stands in `models/node_failure.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.hardware_signs import SIGNS
from models.marks import Marks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HOUR_S, DAY_S = 3600.0, 86_400.0
RETURN_TAUS_S = (2 * HOUR_S, 12 * HOUR_S, 3 * DAY_S, 14 * DAY_S, 60 * DAY_S)  # how fast a past fault is forgotten
SIGN_TAUS_S = (6 * HOUR_S, 3 * DAY_S)
GPUS_PER_NODE = 8  # where the inventory does not say
# Faults per node and second before any has been seen: 6.50 and 2.34 per 1,000 node-days on two clusters of 24,000
# A100 (Meta, Revisiting Reliability in Large-Scale ML Research Clusters), between the two.
PRIOR_RATE = 4.0 / 1000 / DAY_S
PRIOR_FAULTS = 1.0
SHAPE_BOUNDS = (0.2, 20.0)


class FaultHistory:
    """Faults of a fixed set of nodes.

    Args:
        faults: Rows with `node` and `start_time` (UTC), and `end_time` and `kind` where known. Faults of one node that
            overlap count once, from the first start to the last end.
        nodes: Every node there is, also those that never faulted; nodes that only faults name are added.
        since: Start of the record, seconds since 1970; default: the first fault.
        signs: Rows of `features.hardware_signs.sign_events`; those of other nodes are passed over.
        gpus: Boards of each node by UUID, also those without fault or sign.
        sizes: GPUs of each node; others have `GPUS_PER_NODE`.

    Attributes:
        nodes: Names, by code.
        node: Code of each fault, ascending; `start` and `end` in seconds (end infinite while it lasts), ascending
            within a node; `kind` its kind, `gpu` the code of its GPU, −1 for a fault of the node.
        gpus: (code of the node, UUID) by code of the GPU; `gpu_node` the first alone; `gpus_per_node` by node.
        returns: Marks of nodes: ends of faults. `gpu_returns` of GPUs, `named_returns` of nodes, where a GPU had the
            fault. `signs`, `gpu_signs`, `named_signs`: the same by sign. `fleet`: starts of all faults, one unit.
    """

    FLEET_TAUS_S = (30 * DAY_S,)

    def __init__(
        self,
        faults: pl.DataFrame,
        nodes: Sequence[str],
        since: float | None = None,
        *,
        signs: pl.DataFrame | None = None,
        gpus: Mapping[str, Sequence[str]] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
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
        self._mark(frame["gpu"].gather(order).to_list() if len(order) else [], signs, gpus or {}, sizes or {})

    def _mark(
        self, fault_gpu: list[str], signs: pl.DataFrame | None, gpus: Mapping[str, Sequence[str]],
        sizes: Mapping[str, int],
    ) -> None:  # fmt: skip
        codes = {name: i for i, name in enumerate(self.nodes)}
        told = signs.filter(pl.col("node").is_in(self.nodes)) if signs is not None else None
        pairs = {(codes[node], gpu) for node, names in gpus.items() if node in codes for gpu in names}
        pairs |= {(int(node), gpu) for node, gpu in zip(self.node, fault_gpu, strict=True) if gpu}
        if told is not None:
            pairs |= {(codes[node], gpu) for node, gpu in told.select("node", "gpu_uuid").unique().iter_rows() if gpu}
        self.gpus = sorted(pairs)
        self.gpu_node = np.array([node for node, _ in self.gpus], dtype=np.int64)
        code_of = {pair: i for i, pair in enumerate(self.gpus)}
        self.gpu = np.array(
            [code_of.get((int(node), gpu), -1) for node, gpu in zip(self.node, fault_gpu, strict=True)], dtype=np.int64
        )
        self.gpus_per_node = np.array([max(int(sizes.get(name) or GPUS_PER_NODE), 1) for name in self.nodes])
        units, boards = len(self.nodes), len(self.gpus)
        ended = np.isfinite(self.end)
        named = ended & (self.gpu >= 0)
        self.returns = Marks(self.node[ended], self.end[ended], units, RETURN_TAUS_S)
        self.named_returns = Marks(self.node[named], self.end[named], units, RETURN_TAUS_S)
        self.gpu_returns = Marks(self.gpu[named], self.end[named], boards, RETURN_TAUS_S)
        self.fleet = Marks(np.zeros(len(self.start), np.int64), self.start, 1, self.FLEET_TAUS_S)
        self.signs: dict[str, Marks] = {}
        self.named_signs: dict[str, Marks] = {}
        self.gpu_signs: dict[str, Marks] = {}
        for sign in SIGNS:
            of = told.filter(pl.col("sign") == sign) if told is not None else None
            nodes = np.array([codes[name] for name in of["node"]] if of is not None else [], dtype=np.int64)
            at = np.array(of["ts"].dt.epoch("us").to_numpy() / 1e6 if of is not None else [], dtype=np.float64)
            names = of["gpu_uuid"].to_list() if of is not None else []
            gpu = np.array([code_of.get((int(n), g), -1) for n, g in zip(nodes, names, strict=True)], dtype=np.int64)
            has = gpu >= 0
            self.signs[sign] = Marks(nodes, at, units, SIGN_TAUS_S)
            self.named_signs[sign] = Marks(nodes[has], at[has], units, SIGN_TAUS_S)
            self.gpu_signs[sign] = Marks(gpu[has], at[has], boards, SIGN_TAUS_S)

    def in_service(self, from_s: float, until_s: float) -> tuple[Ints, Floats, Floats]:
        """Spans in which nodes could fault, between two moments: node, begin and end, seconds."""
        first = self._first[:-1]
        has = first < self._first[1:]
        begin = np.concatenate((np.full(len(self.nodes), self.since), self.end))
        safe = np.minimum(first, max(len(self.start) - 1, 0))
        opened = np.where(has, self.start[safe], np.inf) if len(self.start) else np.full(len(self.nodes), np.inf)
        following = np.append(self.start[1:], np.inf)
        goes_on = np.append(self.node[1:] == self.node[:-1], False) if len(self.node) else np.zeros(0, bool)
        end = np.concatenate((opened, np.where(goes_on, following[: len(self.node)], np.inf)))
        node = np.concatenate((np.arange(len(self.nodes)), self.node))
        begin, end = np.maximum(begin, from_s), np.minimum(end, until_s)
        keep = begin < end
        return node[keep], begin[keep], end[keep]

    def before(self, node: Ints, at_s: Floats) -> Ints:
        """Index just past the last fault that had begun at a moment, per row."""
        key = node * self._span + np.clip(np.asarray(at_s) - self.since, -1.0, self._span / 2)
        return np.maximum(np.searchsorted(self._start_key, key, side="right"), self._first[node])

    def before_span(self, node: int, begin_s: float, end_s: float) -> tuple[int, int]:
        """Indices [first, last) of the faults of one node that began in (begin, end]."""
        code = np.array([node])
        return int(self.before(code, np.array([begin_s]))[0]), int(self.before(code, np.array([end_s]))[0])

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


def _merged(faults: pl.DataFrame) -> pl.DataFrame:
    """One row per span in which a node was in fault: node, start_s, end_s, kind."""
    empty = {"node": pl.String, "start_s": pl.Float64, "end_s": pl.Float64, "kind": pl.String, "gpu": pl.String}
    if not faults.height:
        return pl.DataFrame(schema=empty)
    end = pl.col("end_time") if "end_time" in faults.columns else pl.lit(None, dtype=pl.Datetime("us", "UTC"))
    kind = pl.col("kind") if "kind" in faults.columns else pl.lit(None, dtype=pl.String)
    gpu = pl.col("gpu_uuid") if "gpu_uuid" in faults.columns else pl.lit(None, dtype=pl.String)
    rows = faults.drop_nulls(["node", "start_time"]).select(
        "node",
        (pl.col("start_time").dt.epoch("us") / 1e6).alias("start_s"),
        (end.dt.epoch("us") / 1e6).fill_null(np.inf).alias("end_s"),
        kind.fill_null("").alias("kind"),
        gpu.fill_null("").alias("gpu"),
    )
    rows = rows.with_columns(pl.max_horizontal("start_s", "end_s").alias("end_s")).sort("node", "start_s")
    reach = pl.col("end_s").cum_max().shift(1).over("node")
    rows = rows.with_columns(((pl.col("start_s") > reach).fill_null(True)).cum_sum().over("node").alias("_span"))
    return (
        rows.group_by("node", "_span", maintain_order=True)
        .agg(pl.col("start_s").min(), pl.col("end_s").max(), pl.col("kind", "gpu").first())
        .select(list(empty))
    )

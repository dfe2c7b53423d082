"""Hints as Prometheus lines: which hints become gauges, with which labels, and which go first when there are too many.

No label names a job or a hint: they come and go, and each would leave a series behind. The rest of `/metrics` is
`metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from scheduler_hints.schema import Bottleneck, NodeRisk, Window

MAX_GAUGES = 5_000

FAMILIES: dict[str, str] = {
    "weatherglass_bottleneck_active": "1 for each bottleneck whose condition is set now.",
    "weatherglass_bottleneck_probability": "Probability that a bottleneck begins within horizon_s.",
    "weatherglass_backfill_windows": "Backfill windows that are published.",
    "weatherglass_backfill_window_gpus": "GPUs of the largest published backfill window.",
    "weatherglass_node_fault_probability": "Probability of a hardware fault of a node within the horizon.",
}
_ORDER = {name: rank for rank, name in enumerate(FAMILIES)}


class Gauge(NamedTuple):
    """One line; sorts before those that matter less."""

    rank: int
    urgency: float
    line: str


def escape(value: str) -> str:
    """A label value as the text format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _gauge(family: str, labels: dict[str, str | None], value: float, urgency: float) -> Gauge:
    text = ",".join(f'{name}="{escape(label)}"' for name, label in labels.items() if label is not None)
    return Gauge(_ORDER[family], -urgency, f"{family}{{{text}}} {value:.6g}\n")


def _bottlenecks(cluster: str, items: Iterable[Bottleneck]) -> Iterable[Gauge]:
    for item in items:
        labels = {
            "cluster": cluster, "bottleneck_class": item.bottleneck_class, "scope": item.scope, "node": item.node,
            "gpu_uuid": item.gpu_uuid, "rack": item.rack, "pod": item.pod, "severity": item.severity,
            "unit": item.unit,  # of links and queues, which no other label tells apart
        }  # fmt: skip
        if item.is_active:
            yield _gauge("weatherglass_bottleneck_active", labels, 1, item.probability)
        else:
            labels["horizon_s"] = str(item.horizon_s)
            yield _gauge("weatherglass_bottleneck_probability", labels, item.probability, item.probability)


def _windows(cluster: str, items: Iterable[Window]) -> Iterable[Gauge]:
    largest: dict[str, int] = {}
    counts: dict[str, int] = {}
    for item in items:
        counts[item.scope] = counts.get(item.scope, 0) + 1
        largest[item.scope] = max(largest.get(item.scope, 0), item.gpus)
    for scope, count in counts.items():
        yield _gauge("weatherglass_backfill_windows", {"cluster": cluster, "scope": scope}, count, count)
        yield _gauge("weatherglass_backfill_window_gpus", {"cluster": cluster, "scope": scope}, largest[scope], 0)


def _node_risks(cluster: str, items: Iterable[NodeRisk]) -> Iterable[Gauge]:
    for item in items:
        for horizon, value in (("1h", item.p_1h), ("24h", item.p_24h), ("7d", item.p_7d)):
            labels: dict[str, str | None] = {"cluster": cluster, "node": item.node, "horizon": horizon}
            yield _gauge("weatherglass_node_fault_probability", labels, value, item.p_24h)


class Gauges(NamedTuple):
    """Gauges of one shard, the most important first, and how many there would be without a limit."""

    lines: tuple[Gauge, ...]
    total: int


NO_GAUGES = Gauges((), 0)


def gauges_of(kind: str, cluster: str, items: Sequence[Any]) -> Gauges:
    """The gauges of one shard; only the most urgent `MAX_GAUGES` are made, none of a silenced hint.

    Duplicate series (two hints that differ in nothing but their jobs) are shown once, the most urgent one.
    """
    if kind == "bottlenecks":
        items = [item for item in items if item.silenced_by is None]
        chosen = _most(items, MAX_GAUGES, lambda item: (item.is_active, item.probability))
        return _ordered(_bottlenecks(cluster, chosen), len(items) - len(chosen))
    if kind == "node-risks":
        chosen = _most(items, MAX_GAUGES // 3 + 1, lambda item: item.p_24h)
        return _ordered(_node_risks(cluster, chosen), 3 * (len(items) - len(chosen)))
    if kind == "backfill-windows":
        return _ordered(_windows(cluster, items), 0)
    return NO_GAUGES


def _most(items: Sequence[Any], limit: int, urgency: Callable[[Any], Any]) -> Sequence[Any]:
    return items if len(items) <= limit else sorted(items, key=urgency, reverse=True)[:limit]


def _ordered(found: Iterable[Gauge], left_out: int) -> Gauges:
    series: dict[str, Gauge] = {}
    for gauge in sorted(found):
        series.setdefault(gauge.line.rpartition(" ")[0], gauge)
    return Gauges(tuple(series.values()), len(series) + left_out)


def render(shards: Iterable[Gauges], limit: int = MAX_GAUGES) -> tuple[str, int]:
    """The text of all gauges, at most `limit` of them.

    Returns:
        The text in exposition format, and how many were left out.
    """
    shards = list(shards)
    found = sorted(gauge for shard in shards for gauge in shard.lines)[:limit]
    lines: list[str] = []
    names = list(FAMILIES)
    rank = -1
    for gauge in found:
        if gauge.rank != rank:
            rank = gauge.rank
            lines.append(f"# HELP {names[rank]} {FAMILIES[names[rank]]}\n# TYPE {names[rank]} gauge\n")
        lines.append(gauge.line)
    return "".join(lines), sum(shard.total for shard in shards) - len(found)

"""Which hints a query selects: one function per kind, pure, over decoded items. Parsing stands in `queries.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scheduler_hints.schema import Bottleneck, DemandForecast, JobForecast, NodeRisk, Window
from scheduler_hints.shards import Row

_RISKS = {"1h": "p_1h", "24h": "p_24h", "7d": "p_7d"}


def _bottleneck(values: dict[str, Any]) -> Callable[[Bottleneck], bool]:
    wanted_class, scope = values.get("class"), values.get("scope")
    node, job = values.get("node"), values.get("job")
    horizon_s, least = values.get("horizon_s"), values.get("min_probability")
    for_people = values.get("audience") == "people"

    def passes(item: Bottleneck) -> bool:
        if item.silenced_by is not None and not for_people:
            return False
        if wanted_class is not None and item.bottleneck_class != wanted_class:
            return False
        if scope is not None and item.scope != scope:
            return False
        if node is not None and item.node != node and node not in item.nodes:
            return False
        if job is not None and job not in item.job_ids:
            return False
        if item.is_active:
            return True
        if not (item.is_actionable or for_people):
            return False
        if horizon_s is not None and least is not None:
            return item.probabilities.get(str(horizon_s), 0.0) >= least
        if horizon_s is not None:
            return item.horizon_s <= horizon_s
        return least is None or item.probability >= least

    return passes


def _window(values: dict[str, Any]) -> Callable[[Window], bool]:
    gpus, nodes = values.get("gpus", 0), values.get("nodes", 0)
    duration_s, confidence = values.get("duration_s", 0.0), values.get("min_confidence", 0.0)
    scope, job = values.get("scope"), values.get("fits_job")

    def passes(item: Window) -> bool:
        return (
            item.gpus >= gpus
            and len(item.nodes) >= nodes
            and (item.duration_s is None or item.duration_s >= duration_s)
            and item.confidence >= confidence
            and (scope is None or item.scope == scope)
            and (job is None or job in item.fits_jobs)
        )

    return passes


def _risk_of(values: dict[str, Any]) -> Callable[[NodeRisk], float]:
    horizon = values.get("horizon")
    if horizon is None:
        return lambda item: max(item.p_1h, item.p_24h, item.p_7d)
    name = _RISKS[horizon]
    return lambda item: getattr(item, name)


def _node_risk(values: dict[str, Any]) -> Callable[[NodeRisk], bool]:
    risk, least = _risk_of(values), values.get("min_probability", 0.0)
    return lambda item: risk(item) >= least


def _job(values: dict[str, Any]) -> Callable[[JobForecast], bool]:
    state = values.get("state")
    return lambda item: state is None or item.state.upper() == state


def _demand(values: dict[str, Any]) -> Callable[[DemandForecast], bool]:
    queue, quantity, horizon_h = values.get("queue"), values.get("quantity"), values.get("horizon_h")

    def passes(item: DemandForecast) -> bool:
        if queue is not None and item.queue != (None if queue == "*" else queue):
            return False
        return quantity in (None, item.quantity) and horizon_h in (None, item.horizon_h)

    return passes


def _everything(values: dict[str, Any]) -> Callable[[Any], bool]:
    del values
    return lambda _: True


_FILTERS: dict[str, Callable[[dict[str, Any]], Callable[[Any], bool]]] = {
    "bottlenecks": _bottleneck,
    "backfill-windows": _window,
    "node-risks": _node_risk,
    "jobs": _job,
    "reservation-plans": _everything,
    "demand": _demand,
}


def select(kind: str, values: dict[str, Any], rows: Sequence[Row]) -> Sequence[Row]:
    """The rows that a query selects, in the order in which they are answered.

    Args:
        kind: Kind of hint.
        values: Checked parameters; `cluster` has already been applied.
        rows: Rows to choose from.
    """
    if not values.keys() - {"cluster"} and kind != "bottlenecks":
        return rows
    passes = _FILTERS[kind](values)
    chosen = [row for row in rows if passes(row.item)]
    if kind == "node-risks" and "horizon" in values:
        risk = _risk_of(values)
        chosen.sort(key=lambda row: risk(row.item), reverse=True)
    return chosen

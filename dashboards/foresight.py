"""Bottlenecks and node risks as pages use them: filtered, ordered by urgency, summed by class, node and rack.

Pure functions of what the hints API gave. No text for people and no drawing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import polars as pl

from dashboards.hints_reading import moment
from features.fleet import is_out_of_service

HORIZONS_S = (30, 60, 90, 120)

NODE_VALUES = {
    "cluster": pl.String,
    "node": pl.String,
    "rack": pl.String,
    "pod": pl.String,
    "is_out": pl.Boolean,
    "value": pl.Float64,
    "foreseen": pl.Int64,
    "active": pl.Int64,
    "what": pl.String,
}
"""One node of the heat map: `value` 0–1 (null: not known), hints foreseen and active on it, and what the worst is."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Bottlenecks that pass the filters: those to come by urgency, and those already there."""

    coming: Sequence[Mapping[str, Any]]
    active: Sequence[Mapping[str, Any]]


def probability(item: Mapping[str, Any], horizon_s: int) -> float | None:
    """P(onset within `horizon_s`), 0–1; None where the forecast does not say."""
    said = {**(item.get("too_short") or {}), **(item.get("probabilities") or {})}
    value = said.get(str(horizon_s))
    if value is None and item.get("horizon_s") == horizon_s:
        value = item.get("probability")
    return float(value) if isinstance(value, int | float) else None


def nodes_of(item: Mapping[str, Any]) -> list[str]:
    """Nodes that a hint touches: its own, or those of a rack, pod or job."""
    return [str(node) for node in item.get("nodes") or ()] or ([str(item["node"])] if item.get("node") else [])


def highest(item: Mapping[str, Any]) -> float:
    """The largest probability of the item at any horizon, 0–1."""
    known = [probability(item, horizon) for horizon in HORIZONS_S]
    return max((value for value in known if value is not None), default=float(item.get("probability") or 0.0))


def select(
    items: Iterable[Mapping[str, Any]],
    *,
    bottleneck_class: str | None = None,
    horizon_s: int = HORIZONS_S[-1],
    min_probability: float = 0.0,
    node: str | None = None,
    rack: str | None = None,
) -> Foreseen:
    """Filter bottlenecks and order them by urgency.

    Args:
        items: Bottlenecks of the hints API.
        bottleneck_class: Only this class.
        horizon_s: Probabilities are compared at this horizon, s.
        min_probability: Smallest probability at that horizon, 0–1; does not touch active conditions.
        node: Only this node.
        rack: Only this rack.

    Returns:
        To come: soonest expected onset first, then the shortest horizon that passed the publication threshold, then
        the more probable. Active: by class, then node.
    """
    coming, active = [], []
    for item in items:
        if bottleneck_class and item.get("bottleneck_class") != bottleneck_class:
            continue
        if (node and node not in nodes_of(item)) or (rack and item.get("rack") != rack):
            continue
        if item.get("is_active"):
            active.append(item)
        elif (probability(item, horizon_s) or 0.0) >= min_probability:
            coming.append(item)
    coming.sort(key=_urgency)
    active.sort(key=lambda item: (str(item.get("bottleneck_class")), str(item.get("node")), str(item.get("id"))))
    return Foreseen(coming, active)


def _urgency(item: Mapping[str, Any]) -> tuple:
    onset = moment(item.get("expected_onset"))
    return (
        onset is None,
        onset.timestamp() if onset else 0.0,
        item.get("horizon_s") or HORIZONS_S[-1],
        -highest(item),
        str(item.get("id")),
    )


def first_onset(items: Sequence[Mapping[str, Any]]) -> datetime | None:
    """The soonest expected onset of all."""
    onsets = [onset for item in items if (onset := moment(item.get("expected_onset"))) is not None]
    return min(onsets, default=None)


def by_class(foreseen: Foreseen) -> list[tuple[str, int, int, float | None]]:
    """Class, hints to come, active conditions, largest probability of those to come; most urgent class first."""
    classes = {str(item.get("bottleneck_class")) for item in (*foreseen.coming, *foreseen.active)}
    rows = []
    for name in classes:
        coming = [highest(item) for item in foreseen.coming if item.get("bottleneck_class") == name]
        active = sum(item.get("bottleneck_class") == name for item in foreseen.active)
        rows.append((name, len(coming), active, max(coming, default=None)))
    return sorted(rows, key=lambda row: (-(row[3] or 0.0), -row[1], row[0]))


def bottleneck_values(nodes: pl.DataFrame, foreseen: Foreseen, horizon_s: int) -> pl.DataFrame:
    """Largest probability of any bottleneck on each node.

    Args:
        nodes: Inventory: cluster, node, rack, pod, state.
        foreseen: Result of `select`.
        horizon_s: Horizon of the probabilities, s.

    Returns:
        Frame of `NODE_VALUES`; `value` is 0 where nothing is foreseen and null on nodes that are out of service. A
        node that is only named by a hint is added.
    """
    best: dict[tuple[str, str], tuple[float, str]] = {}
    coming: dict[tuple[str, str], int] = {}
    active: dict[tuple[str, str], int] = {}
    places: dict[tuple[str, str], tuple[str | None, str | None]] = {}
    for item in (*foreseen.coming, *foreseen.active):
        value = probability(item, horizon_s) or 0.0
        for node in nodes_of(item):
            key = (str(item.get("cluster")), node)
            places.setdefault(key, (item.get("rack"), item.get("pod")))
            if item.get("is_active"):
                active[key] = active.get(key, 0) + 1
                continue
            coming[key] = coming.get(key, 0) + 1
            if value >= best.get(key, (-1.0, ""))[0]:
                best[key] = (value, str(item.get("bottleneck_class")))
    hints = pl.DataFrame(
        [
            (*key, *places[key], best.get(key, (0.0, ""))[0], coming.get(key, 0), active.get(key, 0),
             best.get(key, (0.0, None))[1])
            for key in places
        ],
        schema={
            "cluster": pl.String, "node": pl.String, "rack_named": pl.String, "pod_named": pl.String,
            "value": pl.Float64, "foreseen": pl.Int64, "active": pl.Int64, "what": pl.String,
        },
        orient="row",
    )  # fmt: skip
    return (
        _places(nodes)
        .join(hints, on=["cluster", "node"], how="full", coalesce=True)
        .with_columns(
            pl.coalesce("rack", "rack_named").alias("rack"),
            pl.coalesce("pod", "pod_named").alias("pod"),
            pl.col("is_out").fill_null(False),
            pl.col("foreseen", "active").fill_null(0),
        )
        .with_columns(
            pl.when(pl.col("is_out") & (pl.col("foreseen") == 0))
            .then(None)
            .otherwise(pl.col("value").fill_null(0.0))
            .alias("value")
        )
        .select(tuple(NODE_VALUES))
    )


def risk_values(nodes: pl.DataFrame, risks: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Probability of a fault within 24 hours on each node; null where none was forecast.

    Args:
        nodes: Inventory: cluster, node, rack, pod, state.
        risks: Node risks of the hints API.

    Returns:
        Frame of `NODE_VALUES`.
    """
    known = pl.DataFrame(
        [
            (str(risk.get("cluster")), str(risk.get("node")), risk.get("p_24h"), "; ".join(risk.get("reasons") or ()))
            for risk in risks
        ],
        schema={"cluster": pl.String, "node": pl.String, "value": pl.Float64, "what": pl.String},
        orient="row",
    )
    zero = pl.lit(0, dtype=pl.Int64)
    return (
        _places(nodes)
        .join(known, on=["cluster", "node"], how="full", coalesce=True)
        .with_columns(pl.col("is_out").fill_null(False), zero.alias("foreseen"), zero.alias("active"))
        .select(tuple(NODE_VALUES))
    )


def _places(nodes: pl.DataFrame) -> pl.DataFrame:
    return nodes.select("cluster", "node", "rack", "pod", is_out_of_service().alias("is_out")).unique(
        ["cluster", "node"], maintain_order=True
    )


def by_rack(values: pl.DataFrame) -> pl.DataFrame:
    """Nodes of the heat map summed by rack: the largest value, its node, and how many are foreseen, active, out.

    Args:
        values: Frame of `NODE_VALUES`.

    Returns:
        Columns cluster, pod, rack, nodes, out, value, worst, foreseen, active, what.
    """
    return (
        values.sort("value", nulls_last=True, descending=True)
        .group_by("cluster", "pod", "rack", maintain_order=True)
        .agg(
            pl.len().alias("nodes"),
            pl.col("is_out").sum().alias("out"),
            pl.col("value").max(),
            pl.col("node").first().alias("worst"),
            pl.col("foreseen", "active").sum(),
            pl.col("what").first(),
        )
    )

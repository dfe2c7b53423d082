"""*What is about to go wrong?*: skeleton and callbacks. Its pieces stand in `bottlenecks_parts.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import dash
import polars as pl
from dash import Input, Output, State, html, no_update

from dashboards import foresight, rack_map
from dashboards.bottlenecks_cells import PATH
from dashboards.bottlenecks_filters import filter_choices, horizon, read_filters
from dashboards.bottlenecks_notices import alerts, expiring, unknown
from dashboards.bottlenecks_parts import (
    active_table,
    as_of,
    class_table,
    foreseen_table,
    horizon_note,
    nothing_foreseen,
    stale_notice,
    summary,
)
from dashboards.components import attributes, choices, csv_link, place, section
from dashboards.filters import Filters
from dashboards.foresight import Foreseen
from dashboards.hints_reading import HintList
from dashboards.level_fan import HEIGHT, fan
from dashboards.level_parts import course_head, told_hint
from dashboards.page import (
    Context,
    Page,
    cluster_options,
    figure_label,
    fingerprint,
    graph,
    graph_style,
    refreshed,
)
from dashboards.reading import Reading, attempt
from dashboards.risk_table import risk_table
from dashboards.theme import theme as theme_of
from dashboards.trust import trust_part

_KEPT_S = 1.0
_EMPTY_NODES = pl.DataFrame(
    schema={"cluster": pl.String, "node": pl.String, "rack": pl.String, "pod": pl.String, "state": pl.String}
)


def select(hints: HintList, asked: Filters, *, any_class: bool = False) -> Foreseen:
    """Bottlenecks that pass the filters of the address; `any_class` leaves out the one by class."""
    return foresight.select(
        hints.items,
        bottleneck_class=None if any_class else asked.get("class"),
        horizon_s=horizon(asked),
        min_probability=asked.number("min_probability", 0.0),
        node=asked.get("node"),
        rack=asked.get("rack"),
    )


def read_list(context: Context, kind: str, asked: Filters) -> HintList:
    """A list of the hints API, at most `_KEPT_S` old and never expired."""
    cluster, now = asked.get("cluster"), context.clock()
    more = {"audience": "people"} if kind == "bottlenecks" else {}
    kept = context.cache.get((kind, cluster), _KEPT_S, lambda: context.hints.list(kind, cluster, now, **more))
    if kept.expires_at is not None and kept.expires_at <= now:
        return context.hints.list(kind, cluster, now, **more)
    return kept


def prefetch(context: Context, search: str) -> None:
    """Start to read the inventory while the browser still loads scripts; hints are read when they are shown."""
    context.cache.warm(*context.inventory_key(read_filters(context, search)))


# --- layout -------------------------------------------------------------------------------------------------------


def layout() -> list[Any]:
    """Skeleton of the page."""
    return [
        html.Div(id="bottlenecks-head", className="page-head"),
        html.Div(id="bottlenecks-filters", className="filters"),
        html.Div(id="bottlenecks-alerts", className="alerts"),
        html.Section(
            [
                html.Div(id="bottlenecks-summary", className="summary", **attributes(aria_live="polite")),
                html.P(id="bottlenecks-horizon", className="note"),
                place("bottlenecks-list", 160),
                html.Div(id="bottlenecks-csv", className="foot"),
            ],
            className="card",
            **attributes(aria_label="Foreseen bottlenecks"),
        ),
        section("Course of the level", html.Div(
            [place("bottlenecks-course", 40), graph("bottlenecks-fan", HEIGHT)]
        ), id="bottlenecks-level"),
        html.Div(
            [
                section("Active now", place("bottlenecks-active", 120), id="bottlenecks-active-now"),
                section("By class", place("bottlenecks-classes", 120), id="bottlenecks-by-class"),
            ],
            className="grid three",
        ),
        section("Can these be trusted?", place("bottlenecks-trust", 120), id="bottlenecks-trusted"),
        section("Racks and nodes", graph("bottlenecks-map", 240), id="bottlenecks-floor",
                aside=html.Div(id="bottlenecks-colour")),
        section("Nodes at risk of a fault", place("bottlenecks-risks", 160), id="bottlenecks-at-risk",
                aside=html.Div(id="bottlenecks-risks-csv")),
    ]  # fmt: skip


# --- callbacks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Read:
    """Everything that one answer of the page is made of."""

    asked: Filters
    hints: HintList
    risks: HintList
    nodes: Reading[pl.DataFrame]
    status: Mapping[str, Any] | None
    now: datetime
    several: bool


def register(app: dash.Dash, context: Context) -> None:
    """Add the page's callbacks."""

    @app.callback(
        Output("bottlenecks-parts", "data"),
        Output("bottlenecks-map", "figure"),
        Output("bottlenecks-map", "style"),
        Output("bottlenecks-fan", "figure"),
        Output("bottlenecks-fan", "style"),
        Input("pulse-bottlenecks", "data"),
        State("bottlenecks-parts-seen", "data"),
        prevent_initial_call=True,
    )
    def show(pulse: dict[str, Any], seen: str | None) -> tuple[Any, ...]:
        return _show(context, pulse, seen)


def _show(context: Context, pulse: dict[str, Any], seen: str | None) -> tuple[Any, ...]:
    asked = read_filters(context, pulse.get("search"))
    hints = read_list(context, "bottlenecks", asked)
    risks = read_list(context, "node-risks", asked)
    nodes = context.inventory(asked)
    status = context.cache.get("status", 2.0, lambda: attempt("the hints API", context.hints.status)).value
    now = context.clock()
    read = _Read(asked, hints, risks, nodes, status, now, len(context.chosen(asked)) > 1)
    name = fingerprint(
        pulse.get("search"), pulse.get("theme"), hints.freshness, hints.version, hints.generated_at, hints.message,
        hints.stale_clusters, risks.freshness, risks.version, nodes.error,
        None if nodes.value is None else nodes.value.height,
        # A notice of staleness tells ages in words, so it is made anew each time.
        None if hints.is_valid else now,
    )  # fmt: skip
    if name == seen:
        return refreshed(now), no_update, no_update, no_update, no_update
    foreseen = select(hints, asked)
    figure = _map(read, foreseen, pulse.get("theme"))
    told = told_hint(foreseen, asked) if hints.is_valid else None
    course = fan(None if told is None else told["levels"], theme_of(pulse.get("theme")))
    parts = {
        **_parts(context, read, foreseen),
        "bottlenecks-course": expiring(course_head(told), hints) if hints.is_valid else unknown(),
        "bottlenecks-map-label": figure_label(figure),
        "bottlenecks-fan-label": figure_label(course),
    }
    return refreshed(now, parts, name), figure, graph_style(figure), course, graph_style(course)


def _parts(context: Context, read: _Read, foreseen: Foreseen) -> dict[str, Any]:
    asked, hints, now = read.asked, read.hints, read.now
    uuids = sorted({str(i["gpu_uuid"]) for i in (*foreseen.coming, *foreseen.active) if i.get("gpu_uuid")})
    indices = _indices(context, uuids, now)
    if not hints.is_valid:
        listed: Any = stale_notice(hints, read.status, now)
    elif foreseen.coming:
        listed = foreseen_table(foreseen, hints, indices, asked, now, several=read.several)
    else:
        hidden = sum(not item.get("is_active") for item in hints.items)
        listed = nothing_foreseen(hints, read.status, asked, hidden, now)
    colour = asked.get("colour") or "bottleneck"
    colours = [("Bottleneck", "bottleneck"), ("Fault within 24 h", "risk")]
    classes: Any = unknown()
    active: Any = unknown()
    exports: dict[str, Any] = {"bottlenecks-csv": None, "bottlenecks-risks-csv": None}
    if hints.is_valid:
        classes = expiring(class_table(select(hints, asked, any_class=True), asked), hints)
        active = expiring(active_table(foreseen, indices, asked, several=read.several), hints)
        search = asked.search(colour=None, rows=None, hint=None)
        exports["bottlenecks-csv"] = csv_link(f"/export/bottlenecks.csv{search}", "bottlenecks")
    if read.risks.is_valid:
        search = asked.search(**dict.fromkeys(_NOT_RISK))
        exports["bottlenecks-risks-csv"] = csv_link(f"/export/node-risks.csv{search}", "node risks")
    return {
        "bottlenecks-head": [
            html.H1(PAGE.question),
            as_of(hints, now),
            choices("Cluster", cluster_options(context, asked), path=PATH),
        ],
        "bottlenecks-filters": filter_choices(asked),
        "bottlenecks-alerts": alerts(read.asked, read.hints, read.nodes),
        "bottlenecks-summary": summary(foreseen, hints, now),
        "bottlenecks-horizon": horizon_note(hints),
        "bottlenecks-list": expiring(listed, hints),
        "bottlenecks-colour": choices(
            "Colour", [(text, asked.search(colour=key), key == colour) for text, key in colours], path=PATH
        ),
        "bottlenecks-classes": classes,
        "bottlenecks-active": active,
        "bottlenecks-trust": trust_part(context, read.asked, read.now, several=read.several),
        "bottlenecks-risks": risk_table(read.risks, asked, now, several=read.several),
        **exports,
    }


_NOT_RISK = ("class", "min_probability", "horizon_s", "colour", "rack", "rows", "hint")


def _indices(context: Context, uuids: list[str], now: datetime) -> Mapping[str, int]:
    if not uuids:
        return {}
    found = context.cache.get(
        ("indices", *uuids), 60.0, lambda: attempt("the store", lambda: context.fleet.gpu_indices(uuids, now))
    )
    return found.value or {}


def _map(read: _Read, foreseen: Foreseen, theme: str | None) -> Any:
    nodes = read.nodes.value if read.nodes.value is not None else _EMPTY_NODES
    asked = read.asked
    if asked.get("colour") == "risk":
        values = foresight.risk_values(nodes, read.risks.items if read.risks.is_valid else ())
        top = max(0.05, float(values["value"].max() or 0.0))  # ty: ignore[invalid-argument-type]
        title = "P(fault within 24 h)"
    else:
        values = foresight.bottleneck_values(nodes, foreseen, horizon(asked))
        top, title = 1.0, f"P(onset within {horizon(asked)} s)"
        if not read.hints.is_valid:
            values = values.with_columns(pl.lit(None, dtype=pl.Float64).alias("value"))
    return rack_map.heat_map(values, foresight.by_rack(values), theme_of(theme), title=title, top=top)


PAGE = Page("bottlenecks", PATH, "What is about to go wrong?", layout, register, ("bottlenecks-parts",), prefetch)

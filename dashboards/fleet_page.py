"""*Is my fleet good?*: one number, then why. Components and callbacks; what is read stands in `fleet_reading.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import dash
from dash import Input, Output, State, html, no_update

from dashboards import demand_panel, figures, filters, words
from dashboards.components import (
    age,
    attributes,
    choices,
    csv_link,
    notice,
    place,
    section,
)
from dashboards.filters import Filters, one_of
from dashboards.fleet_parts import (
    GROUPS,
    LATE_S,
    OLD_S,
    answer,
    delta_text,
    expected_waits,
    group_table,
    kinds_of,
    legend,
    loss_list,
    queue_table,
    source_table,
)
from dashboards.fleet_reading import BIN_S, FleetNow, FleetTrend
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
from dashboards.theme import theme as theme_of
from features import fleet

PATH = "/"
_KEPT_S, _TREND_KEPT_S, _STALE_S = 8.0, 20.0, 60.0


def read_filters(context: Context, search: str | None) -> Filters:
    """Filters of the page's address."""
    return filters.read(
        search,
        {
            **context.cluster_check(),
            "hours": one_of([str(hours) for hours in BIN_S]),
            "by": one_of(list(GROUPS)),
            "queue": filters.name,
        },
    )


def grouping(context: Context, asked: Filters) -> str:
    """Column that the breakdown goes by: what the address says, else racks."""
    return asked.get("by") or ("rack" if len(context.chosen(asked)) == 1 else "cluster")


def _now_key(context: Context, asked: Filters) -> tuple[Any, float, Callable[[], Reading[FleetNow]]]:
    clusters = context.chosen(asked)
    return (
        ("fleet", *clusters),
        context.kept_s(_KEPT_S),
        lambda: attempt("the store", lambda: context.fleet.now(clusters, context.clock())),
    )


def _trend_key(context: Context, asked: Filters) -> tuple[Any, float, Callable[[], Reading[FleetTrend]]]:
    clusters, hours = context.chosen(asked), int(asked.get("hours") or 6)
    return (
        ("trend", hours, *clusters),
        context.kept_s(_TREND_KEPT_S),
        lambda: attempt("the store", lambda: context.fleet.trend(clusters, hours, context.clock())),
    )


def read_now(context: Context, asked: Filters) -> Reading[FleetNow]:
    """The fleet now: read at most `_KEPT_S` ago, or once more while it is being read anew."""
    return context.cache.get(*_now_key(context, asked), stale_s=context.kept_s(_STALE_S))


def read_trend(context: Context, asked: Filters) -> Reading[FleetTrend]:
    """The last hours, likewise."""
    return context.cache.get(*_trend_key(context, asked), stale_s=context.kept_s(_STALE_S))


def prefetch(context: Context, search: str) -> None:
    """Start to read while the browser still loads scripts, so that the first answer is ready when it asks."""
    context.cache.warm(*_now_key(context, read_filters(context, search)))


# --- layout -------------------------------------------------------------------------------------------------------


def layout() -> list[Any]:
    """Skeleton of the page."""
    return [
        html.Div(id="fleet-head", className="page-head"),
        html.Div(id="fleet-alerts", className="alerts"),
        html.Div(
            [
                html.Section(place("fleet-answer", 210), className="card answer", **attributes(aria_label="Answer")),
                section(
                    "Where the GPUs are", graph("fleet-cascade", 210), id="fleet-cascade-section",
                    aside=html.Span(id="fleet-window", className="muted"),
                ),
            ],
            className="grid two",
        ),
        html.Div(
            [
                section("Over time", [html.P(id="fleet-delta", className="note"), graph("fleet-trend", 270)],
                        id="fleet-over-time", aside=html.Div(id="fleet-hours"), grow="wide"),
                section("Biggest losses", place("fleet-losses", 270), id="fleet-biggest"),
            ],
            className="grid three",
        ),
        section(
            "Demand ahead",
            [html.P(id="fleet-demand-about", className="note"), graph("fleet-demand", demand_panel.HEIGHT_PX),
             place("fleet-demand-queues", 90)],
            id="fleet-demand-section", aside=html.Div(id="fleet-demand-of"),
        ),
        section("Breakdown", place("fleet-groups", 240), id="fleet-breakdown", aside=html.Div(id="fleet-by")),
        html.Div(
            [
                section("Queue", place("fleet-queues", 120), id="fleet-queue"),
                section("Freshness", place("fleet-sources", 120), id="fleet-freshness"),
            ],
            className="grid two",
        ),
    ]  # fmt: skip


# --- pieces -------------------------------------------------------------------------------------------------------


def head(context: Context, asked: Filters, newest: datetime | None, now: datetime) -> list[Any]:
    """Question, age of the data, cluster selector."""
    return [
        html.H1(PAGE.question),
        html.Div(
            [
                html.Span("Newest sample ", className="muted"),
                html.Span(
                    age(newest, now), className="pill", **attributes(data_late_s=str(LATE_S), data_old_s=str(OLD_S))
                ),
            ],
            className="asof",
        ),
        choices("Cluster", cluster_options(context, asked), path=PATH),
    ]


def alerts(asked: Filters, reading: Reading[FleetNow], now: datetime) -> list[Any]:
    """What keeps the page from being taken at face value."""
    found: list[Any] = [notice("warn", "Part of the address was not used", line) for line in asked.problems]
    if reading.error is not None:
        found.append(
            notice(
                "bad",
                "The store cannot be read",
                reading.error,
                "Numbers below, if any, are the last ones read. The page tries again at each refresh.",
            )
        )
        return found
    data = reading.value
    if data is None:
        return found
    late = {name: now - newest for name, newest in data.newest.items() if (now - newest).total_seconds() > LATE_S}
    for name, lag in sorted(late.items(), key=lambda pair: -pair[1]):
        found.append(
            notice(
                "warn",
                f"Samples of {name} stopped {words.duration(lag.total_seconds())} ago",
                f"Its GPUs are shown as they were until {words.stamp(data.newest[name])}, not as they are now.",
            )
        )
    if data.silent and data.newest:
        found.append(
            notice(
                "warn",
                f"No samples of {words.names(list(data.silent))} in the last 14 days",
                "Its GPUs count as not reporting.",
            )
        )
    return found


# --- callbacks ----------------------------------------------------------------------------------------------------


def register(app: dash.Dash, context: Context) -> None:
    """Add the page's callbacks."""

    @app.callback(
        Output("fleet-parts", "data"),
        Output("fleet-cascade", "figure"),
        Output("fleet-cascade", "style"),
        Input("pulse-fleet", "data"),
        State("fleet-parts-seen", "data"),
        prevent_initial_call=True,
    )
    def show(pulse: dict[str, Any], seen: dict[str, Any] | None) -> tuple[Any, ...]:
        return _show(context, pulse, seen or {})

    @app.callback(
        Output("fleet-trend-parts", "data"),
        Output("fleet-trend", "figure"),
        Input("pulse-fleet", "data"),
        State("fleet-trend-parts-seen", "data"),
        prevent_initial_call=True,
    )
    def show_trend(pulse: dict[str, Any], seen: str | None) -> tuple[Any, ...]:
        return _show_trend(context, pulse, seen)

    @app.callback(
        Output("fleet-demand-parts", "data"),
        Output("fleet-demand", "figure"),
        Output("fleet-demand", "style"),
        Input("pulse-fleet", "data"),
        State("fleet-demand-parts-seen", "data"),
        prevent_initial_call=True,
    )
    def show_demand(pulse: dict[str, Any], seen: str | None) -> tuple[Any, ...]:
        return _show_demand(context, pulse, seen)


def _show(context: Context, pulse: dict[str, Any], seen: dict[str, Any]) -> tuple[Any, ...]:
    asked = read_filters(context, pulse.get("search"))
    now = context.clock()
    reading = read_now(context, asked)
    data = reading.value
    if data is None:
        return _show_error(context, asked, reading, pulse, seen, now)
    status = context.cache.get("status", 2.0, lambda: attempt("the hints API", context.hints.status))
    cluster = asked.get("cluster")
    jobs = context.cache.get(
        ("jobs", cluster), 2.0, lambda: context.hints.list("jobs", cluster, context.clock(), state="PENDING")
    )
    notices = alerts(asked, reading, now)
    states = [(name, kind, is_fresh) for name, kind, is_fresh, _ in kinds_of(status)]
    name = fingerprint(
        pulse.get("search"), pulse.get("theme"), data.newest, data.jobs_at, data.goodness, states, len(notices),
        int(now.timestamp()) // 60,
    )  # fmt: skip
    if name == seen.get("name"):
        return refreshed(now), no_update, no_update
    figure = figures.cascade(data.goodness, theme_of(pulse.get("theme")))
    parts = {
        "fleet-head": head(context, asked, min(data.newest.values(), default=None), now),
        "fleet-alerts": notices,
        "fleet-cascade-label": figure_label(figure),
        **_parts(context, asked, data, status, expected_waits(jobs.items), now),
    }
    return refreshed(now, parts, {"name": name, "has_data": True}), figure, graph_style(figure)


def _show_error(
    context: Context, asked: Filters, reading: Reading[FleetNow], pulse: dict[str, Any], seen: dict[str, Any],
    now: datetime,
) -> tuple[Any, ...]:  # fmt: skip
    name = fingerprint(reading.error, pulse.get("search"), pulse.get("theme"))
    if name == seen.get("name"):
        return refreshed(now), no_update, no_update
    has_data = bool(seen.get("has_data"))
    parts: dict[str, Any] = {"fleet-alerts": alerts(asked, reading, now)}
    if has_data:  # what a reader has on the screen stays there, under the notice that says it is old
        return refreshed(now, parts, {"name": name, "has_data": True}), no_update, no_update
    figure = figures.cascade(fleet.goodness({}), theme_of(pulse.get("theme")))
    blank = html.P("Not known while the store cannot be read.", className="muted")
    places = ("fleet-answer", "fleet-losses", "fleet-groups", "fleet-queues", "fleet-sources")
    parts |= {"fleet-head": head(context, asked, None, now), **dict.fromkeys(places, blank)}
    return refreshed(now, parts, {"name": name, "has_data": False}), figure, graph_style(figure)


def _parts(
    context: Context,
    asked: Filters,
    data: FleetNow,
    status: Reading[Mapping[str, Any]],
    waits: dict[tuple[str, str], float],
    now: datetime,
) -> dict[str, Any]:
    several = len(context.chosen(asked)) > 1
    by = grouping(context, asked)
    end = max(data.newest.values(), default=None)
    by_choices = [(text, asked.search(by=key), key == by) for key, text in GROUPS.items()]
    return {
        "fleet-answer": answer(data),
        "fleet-window": f"mean over {words.duration(data.window_s)} to {words.clock(end)}" if end else "",
        "fleet-losses": loss_list(data, now, several=several),
        "fleet-groups": [group_table(fleet.breakdown(data.states, by), by, several=several), legend()],
        "fleet-by": [
            choices("By", by_choices, path=PATH),
            csv_link(f"/export/fleet.csv{asked.search(by=by, hours=None)}", "the breakdown"),
        ],
        "fleet-queues": queue_table(data, waits, now, several=several),
        "fleet-sources": source_table(data, status, now, several=several),
    }


def _show_trend(context: Context, pulse: dict[str, Any], seen: str | None) -> tuple[Any, ...]:
    asked = read_filters(context, pulse.get("search"))
    now = context.clock()
    hours = int(asked.get("hours") or 6)
    read_now(context, asked)  # the number comes first: both queries at once would share the cores
    reading = read_trend(context, asked)
    data = reading.value
    frame = data.frame if data is not None else None
    name = fingerprint(
        pulse.get("search"), pulse.get("theme"), reading.error,
        None if frame is None or frame.is_empty() else (frame.height, frame["bin"][-1], frame["good"][-1]),
    )  # fmt: skip
    if name == seen or (data is None and seen):
        return refreshed(now), no_update
    hour_choices = [(f"{h} h", asked.search(hours=str(h)), h == hours) for h in BIN_S]
    parts: dict[str, Any] = {"fleet-hours": choices("Last", hour_choices, path=PATH)}
    if data is None:
        parts["fleet-delta"] = "Not known while the store cannot be read."
        return refreshed(now, parts), no_update
    figure = figures.trend(data.frame, theme_of(pulse.get("theme")), bin_s=data.bin_s, hours=hours)
    parts |= {"fleet-delta": delta_text(data), "fleet-trend-label": figure_label(figure)}
    return refreshed(now, parts, name), figure


def _show_demand(context: Context, pulse: dict[str, Any], seen: str | None) -> tuple[Any, ...]:
    asked = read_filters(context, pulse.get("search"))
    now, cluster = context.clock(), asked.get("cluster")
    data = read_now(context, asked).value
    hints = context.cache.get(
        ("demand", cluster), 8.0,
        lambda: context.hints.list("demand", cluster, context.clock(), quantity="in_demand"),
    )  # fmt: skip
    capacity = demand_panel.capacities(data) if data is not None else {}
    name = fingerprint(
        pulse.get("search"),
        pulse.get("theme"),
        hints.freshness,
        hints.generated_at,
        hints.message,
        sorted(capacity.items()),
    )
    if name == seen:
        return refreshed(now), no_update, no_update
    theme, several = theme_of(pulse.get("theme")), len(context.chosen(asked)) > 1
    found = demand_panel.demands(hints.items, capacity) if hints.is_valid else []
    shown = demand_panel.chosen(found, asked)
    if shown is None:
        told, figure = demand_panel.no_forecast(hints, theme)
        parts: dict[str, Any] = {"fleet-demand-about": "", "fleet-demand-of": "", "fleet-demand-queues": told}
    else:
        figure = demand_panel.demand_fan(shown, theme)
        parts = {
            "fleet-demand-about": demand_panel.about(shown, hints, now, several=several),
            "fleet-demand-of": demand_panel.queue_choices(found, shown, asked, path=PATH),
            "fleet-demand-queues": demand_panel.demand_table(found, several=several),
        }
    parts["fleet-demand-label"] = figure_label(figure)
    return refreshed(now, parts, name), figure, graph_style(figure)


PAGE = Page(
    "fleet",
    PATH,
    "Is my fleet good?",
    layout,
    register,
    ("fleet-parts", "fleet-trend-parts", "fleet-demand-parts"),
    prefetch,
)

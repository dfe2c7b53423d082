"""*Demand ahead*: GPUs that will run or wait, by queue, an hour to two weeks ahead, against what is in service.

The figure and the parts of one panel of the fleet page, from what the hints API says of demand: pure functions but for
the callback that joins them. How demand is forecast stands in `models/demand.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import plotly.graph_objects as go
from dash import html

from dashboards import words
from dashboards.components import Column, age, choices, model_line, notice, table
from dashboards.figures import base_figure, empty_figure
from dashboards.filters import Filters
from dashboards.fleet_reading import FleetNow
from dashboards.hints_reading import HintList, moment
from dashboards.theme import Theme

ALL = "all queues"
HEIGHT_PX = 300
_MARKS = {0: "now", 1: "1 h", 3: "3 h", 6: "6 h", 12: "12 h", 24: "1 d", 48: "2 d", 72: "3 d", 168: "1 wk", 336: "2 wk"}
_BANDS = (("q10", "q90", 0.20, "8 of 10 cases"), ("q25", "q75", 0.30, "half of the cases"))
_TABLE_H = (1, 24, 168, 336)
_CHOICES = 8  # queues offered beside all together
_FAR = 4.0  # capacity above so many times the demand is told, not drawn


@dataclass(frozen=True, slots=True)
class Demand:
    """Forecasts of units in demand of one queue of one cluster.

    Attributes:
        cluster: Name of the cluster.
        queue: Name of the queue; None: all together.
        rows: Items of the hints API, nearest hour first.
        capacity: Units in service in the whole cluster; None: not known, or counted in another unit.
        windows: Windows in which units can be lent out, by start: start, end, units, confidence.
    """

    cluster: str
    queue: str | None
    rows: Sequence[Mapping[str, Any]]
    capacity: float | None = None
    windows: Sequence[tuple[datetime, datetime, int, float]] = field(default=())

    @property
    def name(self) -> str:
        return self.queue or ALL

    @property
    def begin(self) -> datetime | None:
        """End of the last hour that the forecast knows."""
        target = moment(self.rows[0]["target_time"])
        return target - timedelta(hours=self.rows[0]["horizon_h"]) if target else None

    def at(self, horizon_h: int) -> Mapping[str, Any] | None:
        """Its forecast so many hours ahead."""
        return next((row for row in self.rows if row["horizon_h"] == horizon_h), None)

    def amount(self, value: float | None) -> str:
        """`12.3 GPUs`, in the unit that demand is counted in."""
        if self.rows[0]["unit"] == "gpus":
            return words.gpus(value)
        return (
            f"{words.number(value, 1 if value is not None and value < 100 else 0)} {self.rows[0]['unit'].upper()[:-1]}s"
        )


def demands(items: Sequence[Mapping[str, Any]], capacity: Mapping[str, float]) -> list[Demand]:
    """Forecasts by cluster and queue: all queues together first, then the queues that will ask for most.

    Args:
        items: Items of `/v1/demand`; those of other quantities than units in demand are passed over.
        capacity: Cluster → GPUs in service.
    """
    groups: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for item in items:
        if item.get("quantity") == "in_demand":
            groups.setdefault((item["cluster"], item.get("queue")), []).append(item)
    found = []
    for (cluster, queue), rows in groups.items():
        rows.sort(key=lambda row: row["horizon_h"])
        near = {
            (start, end, int(w["units"]), float(w["confidence"]))
            for row in rows
            for w in row.get("reclaimable") or ()
            if (start := moment(w["start"])) and (end := moment(w["end"]))
        }
        held = capacity.get(cluster) if rows[0]["unit"] == "gpus" else None
        found.append(Demand(cluster, queue, rows, held, sorted(near)))
    return sorted(found, key=lambda d: (d.cluster, d.queue is not None, -d.rows[0]["q50"], d.name))


def capacities(data: FleetNow) -> dict[str, float]:
    """Cluster → GPUs in service now: those of the inventory that are not down or drained."""
    by_cluster = data.states.group_by("cluster").agg(total="gpus", out="out")
    return {
        row["cluster"]: float(sum(row["total"]) - sum(row["out"])) for row in by_cluster.iter_rows(named=True)
    }  # fmt: skip


def chosen(found: Sequence[Demand], asked: Filters) -> Demand | None:
    """The demand that is drawn: of the queue that the address names, else of the first cluster's queues together."""
    queue = asked.get("queue")
    return next((d for d in found if d.queue == queue), found[0] if found else None)


def place_of(hours: float | np.ndarray) -> Any:
    """Place on the axis: the marks stand at even distances, hours between two of them in proportion."""
    return np.interp(hours, list(_MARKS), range(len(_MARKS)))


def demand_fan(demand: Demand, theme: Theme) -> go.Figure:
    """Quantiles of demand over the hours ahead, with last week's value, capacity and windows that can be lent out.

    Args:
        demand: Forecasts of one queue.
        theme: Colours.

    Returns:
        A fan that opens from the last known value at `now`.
    """
    rows, begin = demand.rows, demand.begin
    x = [0.0, *(float(place_of(row["horizon_h"])) for row in rows)]
    now = rows[0]["last_value"]
    when = ["last full hour", *(f"{moment(row['target_time']):%a %d %b %H:%M} UTC" for row in rows)]
    top = max(max(row["q90"], row["last_week_value"]) for row in rows)
    top = max(top, now, 1.0)
    figure = base_figure(
        theme,
        height=HEIGHT_PX,
        label=fan_label(demand),
        hovermode="x unified",
        showlegend=True,
        legend={
            "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12},
            "itemclick": False, "itemdoubleclick": False, "traceorder": "normal",
        },
    )  # fmt: skip
    unit = "GPUs" if rows[0]["unit"] == "gpus" else "CPUs"
    for low, high, opacity, name in _BANDS:
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        figure.add_scatter(x=x, y=[now, *(row[low] for row in rows)], showlegend=False, **edge)
        figure.add_scatter(
            x=x, y=[now, *(row[high] for row in rows)], fill="tonexty", fillcolor=_faded(theme.good, opacity),
            name=name, **edge,
        )  # fmt: skip
    figure.add_scatter(
        x=x, y=[now, *(row["q50"] for row in rows)], mode="lines+markers", name="median",
        line={"color": theme.good, "width": 2.5}, marker={"size": 6}, cliponaxis=False,
        customdata=[(when[0], now, now), *zip(when[1:], *([r[q] for r in rows] for q in ("q10", "q90")), strict=True)],
        hovertemplate=f"<b>%{{y:,.1f}} {unit}</b>, 80 % from %{{customdata[1]:,.1f}} to %{{customdata[2]:,.1f}}"
        "<br>%{customdata[0]}",
    )  # fmt: skip
    figure.add_scatter(
        x=x[1:], y=[row["last_week_value"] for row in rows], mode="markers", name="a week before each",
        cliponaxis=False, marker={"symbol": "diamond-open", "size": 9, "color": theme.ink, "line": {"width": 1.5}},
        hovertemplate=f"%{{y:,.1f}} {unit}",
    )  # fmt: skip
    if demand.capacity is not None and demand.capacity <= _FAR * top:
        top = max(top, demand.capacity)
        figure.add_scatter(
            x=[0, len(_MARKS) - 1], y=[demand.capacity] * 2, mode="lines", name="in service now",
            line={"color": theme.bad, "width": 1.5, "dash": "dash"}, hoverinfo="skip",
        )  # fmt: skip
    for start, end, units, _ in demand.windows:
        if begin is None:
            break
        left, right = (float(place_of((at - begin).total_seconds() / 3600)) for at in (start, end))
        figure.add_shape(
            type="rect", x0=left, x1=right, y0=0, y1=1, yref="paper", layer="below", line={"width": 0},
            fillcolor=_faded(theme.ok, 0.14),
        )  # fmt: skip
        if right - left > 0.3:
            figure.add_annotation(
                x=(left + right) / 2, y=0.01, yref="paper", yanchor="bottom", text=f"{units:,} free", showarrow=False,
                font={"size": 11, "color": theme.ok},
            )  # fmt: skip
    figure.update_xaxes(
        tickmode="array", tickvals=list(range(len(_MARKS))), ticktext=list(_MARKS.values()), showgrid=True,
        range=[-0.1, len(_MARKS) - 0.85],
    )  # fmt: skip
    figure.update_yaxes(
        range=[0, top * 1.06], nticks=6, title={"text": unit, "font": {"size": 11, "color": theme.muted}}
    )
    return figure


def fan_label(demand: Demand) -> str:
    """The fan in a sentence, for those who do not see it."""
    told = [
        f"in {_MARKS.get(row['horizon_h'], row['horizon_h'])} {demand.amount(row['q50'])}, "
        f"80 % from {words.number(row['q10'])} to {words.number(row['q90'])}"
        for horizon_h in _TABLE_H
        if (row := demand.at(horizon_h))
    ]
    held = f"; {demand.amount(demand.capacity)} are in service" if demand.capacity is not None else ""
    return (
        f"Demand ahead of {demand.name} in {demand.cluster}: {demand.amount(demand.rows[0]['last_value'])} now; "
        + "; ".join(told) + held
    )  # fmt: skip


def _faded(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def queue_choices(found: Sequence[Demand], shown: Demand, asked: Filters, *, path: str) -> Any:
    """Links to the queues of the cluster that is shown."""
    near = [d for d in found if d.cluster == shown.cluster]
    offered = near[: _CHOICES + 1]
    if shown not in offered:
        offered.append(shown)
    return choices("Of", [(d.name, asked.search(queue=d.queue), d is shown) for d in offered], path=path)


def about(demand: Demand, hints: HintList, now: datetime, *, several: bool) -> list[Any]:
    """When it was made, by what, and what stands against it."""
    held = "The capacity of the cluster is not known. " if demand.capacity is None else ""
    if demand.capacity is not None:
        day = demand.at(24) or demand.rows[-1]
        held = f"{demand.amount(demand.capacity)} of the cluster are in service"
        tight = next((row for row in demand.rows if row["q50"] > demand.capacity), None)
        if demand.rows[0]["last_value"] > demand.capacity:
            held += f"; {demand.amount(demand.rows[0]['last_value'])} are asked for already. "
        elif tight is not None:
            held += f"; more will be asked for in {_MARKS.get(tight['horizon_h'])}. "
        else:
            share = words.percent(day["q50"] / demand.capacity) if demand.capacity else words.NOTHING
            held += f"; {_MARKS.get(day['horizon_h'])} ahead the median asks for {share} of them. "
    where = f"{demand.cluster}: " if several else ""
    return [
        html.Span([f"{where}GPUs that run or wait, by the hour. " if demand.rows[0]["unit"] == "gpus" else where]),
        held,
        "Made ",
        age(hints.generated_at, now),
        ". ",
        model_line(sorted({str(row["model_version"]).partition("/")[0] for row in demand.rows})),
    ]


def demand_table(found: Sequence[Demand], *, several: bool) -> Any:
    """Demand of every queue at four horizons: median and the interval that holds in eight of ten cases."""
    columns = [
        Column("Queue"),
        *([Column("Cluster", is_wide_only=True)] if several else []),
        Column("Now", "number", "At the end of the last full hour"),
        *[Column(f"In {_MARKS[h]}", "number", "Median, and from where to where in 80 % of cases") for h in _TABLE_H],
        Column(
            "Can be lent out next", "number", "Units that hardly will be asked for, and how often such a promise held"
        ),
    ]
    rows = []
    for demand in found:
        cells: list[Any] = [demand.name, *([demand.cluster] if several else [])]
        cells.append(words.number(demand.rows[0]["last_value"]))
        for horizon_h in _TABLE_H:
            row = demand.at(horizon_h)
            span = f" ({words.number(row['q10'])}–{words.number(row['q90'])})" if row else ""
            cells.append([words.number(row["q50"]), html.Span(span, className="muted")] if row else words.NOTHING)
        cells.append(_window_text(demand))
        rows.append(cells)
    unit = "GPUs" if all(d.rows[0]["unit"] == "gpus" for d in found) else "units"
    return table(columns, rows, caption=f"{unit} in demand ahead, by queue", id="fleet-demand-table")


def _window_text(demand: Demand) -> Any:
    if not demand.windows:
        return words.NOTHING
    start, end, units, confidence = demand.windows[0]
    more = len(demand.windows) - 1
    text = f"{units:,} from {start:%a %H:%M} to {end:%a %H:%M} UTC"
    return [text, html.Span(f" held {words.percent(confidence)}{f', {more} more' if more else ''}", className="muted")]


def no_forecast(hints: HintList, theme: Theme) -> tuple[Any, go.Figure]:
    """What is shown while no forecast is valid: why, and an empty figure."""
    made = f"The last one seen here was made {words.stamp(hints.last_generated_at)}." if hints.last_generated_at else ""
    reason = words.sentence(hints.message) if hints.message else "It is made once an hour from a day of jobs on."
    told = notice("info", "No forecast of demand is valid now", reason, made)
    return told, empty_figure(theme, "No forecast of demand", HEIGHT_PX // 2)

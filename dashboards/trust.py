"""Can these hints be trusted? How those of the newest week did beside what came, by class.

Reading of `out_scores` and the table of it; figures are made each night by `pipelines/hint_outcomes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import polars as pl
from dash import html

from dashboards import words
from dashboards.components import Column, notice, table
from dashboards.filters import Filters
from dashboards.page import Context
from dashboards.reading import Query, Reading, attempt

TASK = "published_bottleneck"
_METRICS = ("precision", "recall", "lead_median_s", "held_out_precision", "censored_share")
_LOOK_BACK = timedelta(days=14)


def read_scores(query: Query, clusters: Sequence[str], now: datetime) -> pl.DataFrame:
    """Newest figures of each cluster: `cluster`, `ts`, `metric`, `value`, `low`, `high`, `count`."""
    return query(
        'SELECT "cluster", ts, metric, value, low, high, count FROM out_scores WHERE task = ? AND "cluster" = ANY(?) '
        'AND ts >= ? AND ts <= ? QUALIFY ts = max(ts) OVER (PARTITION BY "cluster")',
        [TASK, list(clusters), now - _LOOK_BACK, now],
    )


def trust_part(context: Context, asked: Filters, now: datetime, *, several: bool) -> Any:
    """The panel of the clusters that an address asks for, read once a minute."""
    chosen = context.chosen(asked)
    scores = context.cache.get(
        ("trust", *chosen), 60.0, lambda: attempt("the store", lambda: read_scores(context.fleet.query, chosen, now))
    )
    return trust_panel(scores, several=several)


def trust_panel(scores: Reading[pl.DataFrame], *, several: bool) -> Any:
    """The table, or why there is none.

    Args:
        scores: Newest rows of `out_scores` of each cluster.
        several: Several clusters are shown.
    """
    if scores.error is not None:
        return notice("warn", "The store cannot be read", scores.error)
    if scores.value is None or scores.value.is_empty():
        return html.P(
            "Nothing has been judged yet: each night the hints of the day before are joined to what came.",
            className="muted",
        )
    rows, keys = [], []
    until = scores.value["ts"].max()
    for (cluster,), part in scores.value.sort("cluster").group_by(["cluster"], maintain_order=True):
        found = {row["metric"]: row for row in part.iter_rows(named=True)}
        for class_ in _classes(found):
            end = f"_{class_}" if class_ else ""
            name = words.class_words(class_) if class_ else "All classes"
            keys.append(f"{cluster} {class_}")
            rows.append(
                [
                    html.Span([name, *([html.Span(f" {cluster}", className="sub")] if several else [])]),
                    *(_cell(found.get(metric + end), metric) for metric in _METRICS),
                ]
            )
    columns = [
        Column("Class"),
        Column("Came true", "number", "Of the hints that can be judged, with the 95 % interval"),
        Column("Foreseen", "number", "Of all labelled onsets, steps without any precursor included"),
        Column("Ahead", "number", "Median time from a hint's visibility to the onset"),
        Column("Held out", "number", "Came true of those about which nothing was done", is_wide_only=True),
        Column("Unknown", "number", "Acted on, silenced, out of service, or unseen", is_wide_only=True),
    ]
    made = table(columns, rows, caption="Hints of the newest week beside what came", id="trust-table", keys=keys)
    at = until if isinstance(until, datetime) else None
    return [made, html.P(f"Hints of the seven days to {words.stamp(at)}, scored each night.", className="note under")]


def _classes(found: Mapping[str, Any]) -> Sequence[str]:
    named = {name.split("_", 1)[1] for name in found if name.startswith(("precision_", "recall_"))}
    return ["", *sorted(named)]


def _cell(row: Mapping[str, Any] | None, metric: str) -> Any:
    if row is None:
        return words.NOTHING
    if metric == "lead_median_s":
        return f"{row['value']:.0f} s"
    told = words.percent(row["value"])
    ends = "" if row["low"] is None else f"95 %: {words.percent(row['low'])} to {words.percent(row['high'])}, "
    return html.Span(told, title=f"{ends}of {row['count']:,}")

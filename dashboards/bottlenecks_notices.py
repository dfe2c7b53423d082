"""Notices of the page of bottlenecks: what is not known, what was not used, what hides itself once it has expired."""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import html

from dashboards import words
from dashboards.components import attributes, milliseconds, notice
from dashboards.filters import Filters
from dashboards.hints_reading import HintList
from dashboards.reading import Reading


def alerts(asked: Filters, hints: HintList, nodes: Reading[pl.DataFrame]) -> list[Any]:
    """What a reader must know before the figures: unused filters, clusters without hints, a store that is away."""
    found: list[Any] = [notice("warn", "Part of the address was not used", line) for line in asked.problems]
    if hints.freshness == "partly":
        names = words.names(list(hints.stale_clusters))
        found.append(
            notice(
                "warn",
                f"No fresh hints of {names}",
                "Silence about them means nothing. The other clusters are shown as they are.",
            )
        )
    if nodes.error is not None:
        found.append(notice("warn", "The store cannot be read: the map shows only nodes that hints name", nodes.error))
    return found


def expiring(children: Any, hints: HintList) -> html.Div:
    """Content that the browser hides by itself once it has expired, whether or not the server still answers."""
    if hints.expires_at is None:
        return html.Div(children)
    return html.Div(
        [
            html.Div(children, className="while-valid"),
            html.Div(
                notice("bad", "Expired: nothing is shown as valid", "Waiting for newer hints."),
                className="when-expired",
            ),
        ],
        className="expiring",
        **attributes(data_expires=milliseconds(hints.expires_at)),
    )


def unknown() -> html.P:
    """In place of what only valid hints can tell."""
    return html.P("Not known without valid hints.", className="muted")

"""What a page is to the application, and what it may use. No page of its own here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dash import dcc, html

from dashboards.components import milliseconds
from dashboards.filters import Check, Filters, one_of
from dashboards.fleet_reading import FleetReader
from dashboards.hints_reading import HintsReader
from dashboards.markup import markup
from dashboards.reading import Cache, Reading, attempt

if TYPE_CHECKING:
    import dash
    import plotly.graph_objects as go
    import polars as pl


@dataclass(frozen=True, slots=True)
class Context:
    """What pages read from and are made with.

    Attributes:
        clusters: Names of the clusters, in order.
        refresh_s: Pages ask this often, s.
        hints: Hints API.
        fleet: Store.
        cache: Shared by all viewers.
        clock: Present time, UTC.
    """

    clusters: Sequence[str]
    refresh_s: float
    hints: HintsReader
    fleet: FleetReader
    cache: Cache
    clock: Callable[[], datetime]

    def kept_s(self, seconds: float) -> float:
        """How long a value is kept that is kept for `seconds` at the usual refresh of 5 s."""
        return seconds * min(1.0, self.refresh_s / 5.0)

    def chosen(self, filters: Filters) -> list[str]:
        """Clusters that an address asks for."""
        cluster = filters.get("cluster")
        return [cluster] if cluster else list(self.clusters)

    def cluster_check(self) -> dict[str, Check]:
        return {"cluster": one_of(tuple(self.clusters))}

    def inventory_key(self, filters: Filters) -> tuple[Any, float, Callable[[], Reading[pl.DataFrame]]]:
        """Arguments of the cache for `inventory`."""
        cluster = filters.get("cluster")
        return (
            ("inventory", cluster),
            30.0,
            lambda: attempt("the store", lambda: self.fleet.inventory(cluster)),
        )

    def inventory(self, filters: Filters) -> Reading[pl.DataFrame]:
        """Nodes of the chosen clusters; read every 30 s."""
        return self.cache.get(*self.inventory_key(filters), stale_s=600.0)


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Attributes:
        name: Prefix of its ids.
        path: Its path.
        question: What it answers; stands in the navigation.
        layout: Its skeleton, with places for what callbacks fill in.
        register: Adds its callbacks. They listen to `pulse-<name>`, whose data has `search` and `theme`, and which
            beats only while the page is shown; what changes goes into its `stores`.
        stores: Ids of the stores that take what `refreshed` makes; each has a `<store>-seen` beside it.
        prefetch: Starts to read what the page will need for an address, ahead of its first callback; returns at once.
    """

    name: str
    path: str
    question: str
    layout: Callable[[], Any]
    register: Callable[[dash.Dash, Context], None]
    stores: tuple[str, ...]
    prefetch: Callable[[Context, str], None]


def utc_now() -> datetime:
    return datetime.now(UTC)


def fingerprint(*parts: object) -> str:
    """A short name of what a page shows: equal names, nothing to send."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def refreshed(now: datetime, parts: Mapping[str, Any] | None = None, seen: Any = None) -> dict[str, Any]:
    """What a callback sends: the server's time, by which the browser counts ages, and the parts that have changed.

    Args:
        now: Present time, UTC.
        parts: Id of a place to its new content.
        seen: The browser gives this back as `<store>-seen` once it has shown the parts. An answer that was overtaken
            by the next is never confirmed, so what it held is sent again.
    """
    written = {name: markup(content) for name, content in (parts or {}).items()}
    return {"at": milliseconds(now), "parts": written, "seen": seen}


def graph(id: str, height_px: int) -> html.Figure:
    """A place for a figure, with its description for screen readers (`<id>-label`)."""
    return html.Figure(
        [
            dcc.Graph(
                id=id,
                figure={"data": [], "layout": {"height": height_px, "xaxis": {"visible": False},
                        "yaxis": {"visible": False}, "paper_bgcolor": "rgba(0,0,0,0)",
                        "plot_bgcolor": "rgba(0,0,0,0)"}},
                config={
                    "displaylogo": False,
                    "displayModeBar": False,
                    "responsive": True,
                    "doubleClick": "reset",
                    "showTips": False,
                    "plotlyServerURL": "",
                },
                responsive=True,
                style={"height": f"{height_px}px"},
            ),
            html.Figcaption(id=f"{id}-label", className="hidden-text"),
        ],
        className="figure",
    )  # fmt: skip


def cluster_options(context: Context, filters: Filters) -> list[tuple[str, str, bool]]:
    """Choices of the cluster selector."""
    chosen = filters.get("cluster")
    if len(context.clusters) == 1:
        return [(context.clusters[0], filters.search(), True)]
    options = [("All", filters.search(cluster=None), chosen is None)]
    return options + [(name, filters.search(cluster=name), chosen == name) for name in context.clusters]


def graph_style(figure: go.Figure) -> dict[str, str]:
    """Style that gives a graph the height its figure asks for."""
    return {"height": f"{figure.layout.height}px"}


def figure_label(figure: go.Figure) -> str:
    """The description that a figure carries."""
    return str((figure.layout.meta or {}).get("label", ""))

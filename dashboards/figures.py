"""Figures of the pages: frame or numbers in, Plotly figure out. The map of racks stands in `rack_map.py`.

Pure functions; colours come from `theme.py`, words from `words.py`. No reading and no components.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import polars as pl

from dashboards import words
from dashboards.theme import FONT, PATTERNS, Theme
from features.fleet import Goodness

_STACK = ("good", "throttled", "unproductive", "unknown", "idle", "absent")
_CASCADE = ("out", "unreported", "idle", "unproductive", "unknown", "throttled")


def base_figure(theme: Theme, *, height: int, label: str, **layout: Any) -> go.Figure:
    """An empty figure in the theme. `label` stands in `meta` for the page's aria-label."""
    axis = {
        "gridcolor": theme.grid, "zeroline": False, "linecolor": theme.line, "tickcolor": theme.line,
        "automargin": True, "fixedrange": True,
    }  # fmt: skip
    figure = go.Figure()
    figure.update_layout(
        template=go.layout.Template(),
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": theme.ink},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        hoverlabel={"bgcolor": theme.surface, "bordercolor": theme.line, "font": {"color": theme.ink, "family": FONT}},
        xaxis=axis,
        yaxis=axis,
        uirevision="kept",
        meta={"label": label},
        showlegend=False,
    )
    figure.update_layout(**layout)
    return figure


def empty_figure(theme: Theme, text: str, height: int) -> go.Figure:
    """A figure that says why there is nothing in it."""
    figure = base_figure(theme, height=height, label=text)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(
        text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 13, "color": theme.muted},
    )  # fmt: skip
    return figure


def _state_colour(state: str, theme: Theme) -> str:
    return theme.unreported if state == "absent" else getattr(theme, state)


def _marker(state: str, theme: Theme) -> dict[str, Any]:
    marker: dict[str, Any] = {"color": _state_colour(state, theme), "line": {"width": 0}}
    shape = PATTERNS.get("out" if state == "absent" else state)
    if shape:
        marker["pattern"] = {
            "shape": shape, "size": 5, "solidity": 0.35, "fillmode": "overlay", "fgcolor": theme.surface,
        }  # fmt: skip
    return marker


def cascade(goodness: Goodness, theme: Theme) -> go.Figure:
    """From all GPUs to the good ones: what each state takes away.

    Args:
        goodness: The one number and its counts.
        theme: Colours.

    Returns:
        A horizontal waterfall in GPUs: all, one bar per state that costs anything, good.
    """
    total = goodness.gpus
    if total <= 0:
        return empty_figure(theme, "No GPUs known", 180)
    rows: list[tuple[str, float, float, str]] = [("in the inventory", 0.0, total, "all")]
    left = total
    for state in _CASCADE:
        lost = goodness.counts.get(state, 0.0)
        if lost < 0.05:
            continue
        left -= lost
        rows.append((words.STATE_WORDS[state], left, lost, state))
    rows.append((words.STATE_WORDS["good"], 0.0, goodness.counts.get("good", 0.0), "good"))
    share = [words.percent(value / total if total else None, 1) for _, _, value, _ in rows]
    texts = [
        f"<b>{'−' if key not in ('all', 'good') else ''}{words.number(value, 1 if value < 100 else 0)}</b>  {part}"
        for (_, _, value, key), part in zip(rows, share, strict=True)
    ]
    figure = base_figure(
        theme,
        height=34 * len(rows) + 16,
        label="From all GPUs to those busy at full speed: "
        + "; ".join(f"{label} {words.gpus(value)}" for label, _, value, _ in rows),
        bargap=0.34,
        xaxis={"visible": False, "fixedrange": True, "range": [0, (total or 1) * 1.18]},
    )
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False, showline=False)
    for (label, base, value, key), text, part in zip(rows, texts, share, strict=True):
        marker = {"color": theme.line, "line": {"width": 0}} if key == "all" else _marker(key, theme)
        figure.add_bar(
            y=[label],
            x=[value],
            base=[base],
            orientation="h",
            marker=marker,
            text=[""],
            hovertemplate=f"{label}<br><b>{words.gpus(value)}</b>, {part} of all<extra></extra>",
        )
        figure.add_annotation(
            x=base + value, y=label, text=text, xanchor="left", xshift=6, showarrow=False,
            font={"size": 12, "color": theme.ink},
        )  # fmt: skip
    return figure


def trend(frame: pl.DataFrame, theme: Theme, *, bin_s: int, hours: int) -> go.Figure:
    """Share of GPU time in each state over the last hours; the top of the lowest band is fleet goodness.

    Args:
        frame: Result of `features.fleet.trend`.
        theme: Colours.
        bin_s: Length of a bin, s.
        hours: Hours shown; bins without data stay empty.

    Returns:
        Stacked bars, one per bin, in percent of all GPUs.
    """
    if frame.is_empty():
        return empty_figure(theme, "No samples in these hours", 270)
    figure = base_figure(
        theme,
        height=270,
        label=_trend_label(frame, hours),
        barmode="stack",
        bargap=0,
        hovermode="x unified",
        showlegend=True,
        legend={
            "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal", "font": {"size": 12},
            "itemclick": False, "itemdoubleclick": False,
        },
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
    )  # fmt: skip
    figure.update_yaxes(range=[0, 100], ticksuffix=" %", nticks=6, title=None)
    figure.update_xaxes(
        type="date", showgrid=False, title={"text": "UTC", "font": {"size": 11, "color": theme.muted}, "standoff": 4},
        hoverformat="%d %b %H:%M UTC", tickformat="%H:%M\n%d %b",
    )  # fmt: skip
    moments = frame["bin"].to_list()
    xs = [f"{moment:%Y-%m-%dT%H:%M:%S}" for moment in moments]
    for state in _STACK:
        shares = (frame[state] / frame["gpus"] * 100).fill_nan(None)
        if not (shares >= 0.05).any():
            continue
        figure.add_bar(
            x=xs,
            y=shares.round(2).to_list(),
            offset=0,
            width=bin_s * 1000,
            name=words.STATE_WORDS[state],
            marker=_marker(state, theme),
            customdata=frame[state].round(1).to_list(),
            hovertemplate="%{y:.1f} %  (%{customdata:,.1f} GPUs)",
        )
    end = moments[-1].timestamp() + bin_s
    figure.update_xaxes(range=[(end - hours * 3600) * 1000, end * 1000])
    return figure


def _trend_label(frame: pl.DataFrame, hours: int) -> str:
    known = frame.filter(pl.col("goodness").is_not_null()) if not frame.is_empty() else frame
    if known.is_empty():
        return f"Fleet goodness over the last {hours} hours: no data"
    low, high = known["goodness"].min(), known["goodness"].max()
    last = known["goodness"][-1]
    return (
        f"Fleet goodness over the last {hours} hours: now {words.percent(last)}, "
        f"lowest {words.percent(float(low))}, highest {words.percent(float(high))}"  # ty: ignore[invalid-argument-type]
    )

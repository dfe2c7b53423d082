"""The map of racks and nodes: where cells stand, and the heat map made of them.

Pure functions of frames; what a cell's value means is said by the caller. No reading and no components.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go
import polars as pl

from dashboards import words
from dashboards.figures import base_figure
from dashboards.theme import Theme, contrast
from features.fleet import natural_key

NODE_LEVEL_MAX = 2_500
"""Up to this many nodes the map has a cell per node; above, a cell per rack."""

_CELL_MIN_PX, _CELL_MAX_PX, _WIDTH_PX = 9.0, 40.0, 1280
_NAMED_FROM_PX = 28
"""Cells from this size on carry their name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where cells of labelled blocks stand on a grid.

    Attributes:
        cells: (row, column) of each cell, block after block.
        labels: (row, column, text) of each block's label, on the empty row above it.
        rows: Rows of the grid.
        columns: Columns of the grid.
    """

    cells: list[tuple[int, int]]
    labels: list[tuple[int, int, str]]
    rows: int
    columns: int


def floor_plan(blocks: Sequence[tuple[str, int]], aspect: float = 3.6) -> Plan:
    """Lay blocks of cells out in lines, as racks stand on a floor.

    Args:
        blocks: Label and number of cells of each block, in order.
        aspect: Wanted width ÷ height of the whole.

    Returns:
        All blocks are as wide as the widest, at most 16 cells, with a free column between and a free row above.
    """
    largest = max((count for _, count in blocks), default=0)
    if not largest:
        return Plan([], [], 0, 0)
    width = largest if largest <= 8 else min(16, math.ceil(largest / math.ceil(largest / 16)))
    height = math.ceil(largest / width)
    per_line = max(1, round(math.sqrt(len(blocks) * aspect * (height + 1) / (width + 1))))
    per_line = max(per_line, 32 // (width + 1))  # a small fleet fills the width before it grows in height
    per_line = min(per_line, len(blocks), max(1, 128 // (width + 1)))
    cells: list[tuple[int, int]] = []
    labels: list[tuple[int, int, str]] = []
    for index, (label, count) in enumerate(blocks):
        line, place = divmod(index, per_line)
        top, left = line * (height + 1), place * (width + 1)
        labels.append((top, left, label))
        cells += [(top + 1 + cell // width, left + cell % width) for cell in range(count)]
    lines = math.ceil(len(blocks) / per_line)
    return Plan(cells, labels, lines * (height + 1), per_line * (width + 1) - 1)


def heat_map(values: pl.DataFrame, racks: pl.DataFrame, theme: Theme, *, title: str, top: float = 1.0) -> go.Figure:
    """Racks and nodes coloured by a probability: a cell per node, or per rack in a large fleet.

    Args:
        values: One row per node, `foresight.NODE_VALUES`.
        racks: Its sums by rack, `foresight.by_rack`.
        theme: Colours.
        title: What the colour means, for the colour bar and hover text.
        top: Value of the strongest colour.

    Returns:
        A heat map whose points carry `customdata` (cluster, node or rack, "node" or "rack"). Crosses mark what is out
        of service, rings active conditions: neither is told by colour alone.
    """
    is_by_node = values.height <= NODE_LEVEL_MAX
    frame = values if is_by_node else racks.with_columns(pl.col("out").ge(pl.col("nodes")).alias("is_out"))
    inner, outer = ("node", "rack") if is_by_node else ("rack", "pod")
    order = sorted(
        frame.iter_rows(named=True),
        key=lambda row: (natural_key(row["cluster"]), *(natural_key(row[k]) for k in ("pod", "rack", inner))),
    )
    plan = floor_plan(_blocks(order, outer))
    size = max(_CELL_MIN_PX, min(_CELL_MAX_PX, _WIDTH_PX / max(plan.columns, 1)))
    figure = base_figure(
        theme,
        height=round(max(plan.rows, 3) * size + 60),
        label=_heat_label(frame, title, inner),
        margin={"l": 4, "r": 12, "t": 44, "b": 4},
    )
    is_small = plan.columns < 60
    figure.update_xaxes(
        visible=False, range=[-0.6, plan.columns - 0.4], fixedrange=is_small, constrain="domain",
        constraintoward="left",
    )  # fmt: skip
    figure.update_yaxes(
        visible=False, range=[plan.rows - 0.4, -0.6], fixedrange=is_small, scaleanchor="x", scaleratio=1,
        constrain="domain", constraintoward="top",
    )  # fmt: skip
    if not order:
        return figure
    _add_cells(figure, plan, order, theme, title=title, top=top, inner=inner)
    if size >= _NAMED_FROM_PX:
        _add_names(figure, plan, order, theme, top=top, inner=inner)

    def places(test: Callable[[dict[str, Any]], bool]) -> list[tuple[int, int]]:
        return [cell for cell, row in zip(plan.cells, order, strict=True) if test(row)]

    _add_marks(figure, "out of service", places(lambda row: row["is_out"]), "x-thin", theme.muted, size)
    unknown = places(lambda row: row["value"] is None and not row["is_out"])
    _add_marks(figure, "not known", unknown, "line-ne", theme.muted, size)
    _add_marks(figure, "condition active now", places(lambda row: row["active"] > 0), "circle-open", theme.ink, size)
    figure.update_layout(
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"size": 12}, "itemclick": False},
    )
    fits = size * (plan.columns / max(1, len({label[1] for label in plan.labels})))
    short = [(line, column, _shortened(text, fits)) for line, column, text in plan.labels]
    figure.add_scatter(  # one trace: annotations cost time by their square
        x=[column - 0.5 for _, column, _ in short],
        y=[float(line) for line, _, _ in short],
        text=[escape(text) for _, _, text in short],
        mode="text", textposition="middle right", hoverinfo="skip", showlegend=False, cliponaxis=False,
        textfont={"size": min(12, max(8, round(size * 0.85))), "color": theme.muted},
    )  # fmt: skip
    return figure


def _blocks(order: Sequence[dict[str, Any]], outer: str) -> list[tuple[str, int]]:
    """Label and number of cells of each rack or pod; the first one of a pod or cluster names that too."""
    several = len({row["cluster"] for row in order}) > 1
    blocks: list[tuple[str, int]] = []
    last: dict[str, Any] = {}
    for row in order:
        is_new_cluster = row["cluster"] != last.get("cluster", "")
        is_new_pod = is_new_cluster or row["pod"] != last["pod"]
        if is_new_pod or row[outer] != last[outer]:
            parts = [row["cluster"]] if several and is_new_cluster else []
            if outer != "pod" and is_new_pod and row["pod"] is not None:
                parts.append(row["pod"])
            blocks.append((" · ".join([*parts, row[outer] or f"no {outer}"]), 0))
        blocks[-1] = (blocks[-1][0], blocks[-1][1] + 1)
        last = row
    return blocks


def _add_cells(
    figure: go.Figure, plan: Plan, order: Sequence[dict[str, Any]], theme: Theme, *, title: str, top: float,
    inner: str,
) -> None:  # fmt: skip
    def grid(make: Callable[[dict[str, Any]], Any], fill: Any) -> list[list[Any]]:
        made = [[fill] * plan.columns for _ in range(plan.rows)]
        for (line, column), row in zip(plan.cells, order, strict=True):
            made[line][column] = make(row)
        return made

    describe = _node_text if inner == "node" else _rack_text
    cells = {
        "hovertext": grid(lambda row: describe(row, title), ""),
        "customdata": grid(lambda row: [row["cluster"], row[inner] or "", inner], None),
        "hovertemplate": "%{hovertext}<extra></extra>",
        "hoverongaps": False,
        "xgap": 1.5,
        "ygap": 1.5,
        "zmin": 0,
    }
    if any(row["value"] is None for row in order):  # there, but neither calm nor hot
        flat = [(0.0, theme.sunk), (1.0, theme.sunk)]
        unknown = grid(lambda row: 0.0 if row["value"] is None else None, None)
        figure.add_heatmap(z=unknown, zmax=1, colorscale=flat, showscale=False, **cells)
    scale = _scale(theme)
    figure.add_heatmap(
        z=grid(lambda row: row["value"], None), zmax=top, colorscale=scale, **cells,
        colorbar={
            "orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "ypad": 4, "len": 0.34,
            "lenmode": "fraction", "thickness": 8, "tickformat": ".0%", "outlinewidth": 0, "tickmode": "array",
            "tickvals": [top * step / 4 for step in range(5)], "tickfont": {"size": 11, "color": theme.muted},
            "title": {"text": title, "side": "top", "font": {"size": 12, "color": theme.ink}},
        },
    )  # fmt: skip


def _scale(theme: Theme) -> list[tuple[float, str]]:
    steps = len(theme.heat)
    scale = [(0.0, theme.calm), (1e-6, theme.heat[0])]
    return scale + [((index + 1) / steps, colour) for index, colour in enumerate(theme.heat)]


def _add_names(
    figure: go.Figure, plan: Plan, order: Sequence[dict[str, Any]], theme: Theme, *, top: float, inner: str
) -> None:
    """Names in the cells, each in whichever of the theme's two inks stands out more from its cell."""

    def ink(value: float) -> str:
        share = min(1.0, value / top) if top > 0 else 0.0
        nearest = min(_scale(theme), key=lambda stop: (abs(stop[0] - share), stop[0] > 0))
        return max((theme.ink, theme.surface), key=lambda colour: contrast(colour, nearest[1]))

    named = [
        (cell, row)
        for cell, row in zip(plan.cells, order, strict=True)
        if not row["active"] and not row["is_out"] and row["value"] is not None
    ]
    figure.add_scatter(
        x=[column for (_, column), _ in named], y=[line for (line, _), _ in named],
        text=[escape(row[inner] or "") for _, row in named], mode="text", hoverinfo="skip", showlegend=False,
        textfont={"size": 10, "color": [ink(row["value"]) for _, row in named]},
    )  # fmt: skip


def _shortened(text: str, width_px: float) -> str:
    """The label where it fits, else its last part, else nothing."""
    for shown in (text, text.rsplit(" · ", 1)[-1]):
        if len(shown) * 6.2 <= width_px:
            return shown
    return ""


def _add_marks(
    figure: go.Figure, name: str, places: Sequence[tuple[int, int]], symbol: str, colour: str, size: float
) -> None:
    if places:
        figure.add_scatter(
            x=[column for _, column in places], y=[line for line, _ in places], mode="markers", name=name,
            marker={"symbol": symbol, "size": size * 0.5, "color": colour, "line": {"width": 1.6, "color": colour}},
            hoverinfo="skip",
        )  # fmt: skip


def _node_text(row: dict[str, Any], title: str) -> str:
    lines = [f"<b>{escape(row['node'])}</b>  {escape(_where(row))}"]
    if row["is_out"]:
        lines.append("out of service")
    if row["value"] is not None:
        lines.append(f"{title}: <b>{words.percent(row['value'])}</b>")
    if row["what"]:
        lines.append(escape(words.class_words(row["what"]) if row["foreseen"] else row["what"]))
    if row["foreseen"] or row["active"]:
        lines.append(f"{row['foreseen']} foreseen, {row['active']} active")
    return "<br>".join(lines)


def _rack_text(row: dict[str, Any], title: str) -> str:
    lines = [f"<b>{escape(row['rack'] or 'no rack')}</b>  {escape(row['pod'] or '')}  {row['nodes']} nodes"]
    if row["value"] is not None:
        lines.append(f"{title}: <b>{words.percent(row['value'])}</b>" + (f" on {row['worst']}" if row["value"] else ""))
    if row["foreseen"] or row["active"]:
        lines.append(f"{row['foreseen']} foreseen, {row['active']} active")
    if row["out"]:
        lines.append(f"{row['out']} out of service")
    return "<br>".join(lines)


def _where(row: dict[str, Any]) -> str:
    return " · ".join(part for part in (row["rack"], row["pod"]) if part)


def _heat_label(frame: pl.DataFrame, title: str, inner: str) -> str:
    marked = frame.filter(pl.col("value") > 0).height
    active = frame.filter(pl.col("active") > 0).height
    out = frame.filter("is_out").height
    noun = f"{inner}s"
    return (
        f"Map of {frame.height:,} {noun}. {title} above zero on {marked:,}; condition active on {active:,}; "
        f"{out:,} out of service. The tables beside it hold the same facts."
    )

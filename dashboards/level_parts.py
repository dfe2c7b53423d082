"""Pieces of the bottlenecks page about the course of a level: which hint it is shown of, its line, and its link.

Facts in, components out; the figure stands in `level_fan.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import html

from dashboards.bottlenecks_cells import PATH
from dashboards.components import soft_link
from dashboards.filters import Filters
from dashboards.foresight import Foreseen
from dashboards.level_fan import course_words, quantity_words, source_words


def course_link(item: Mapping[str, Any], asked: Filters) -> list[Any]:
    """The course of a hint's level in words, which shows its fan; empty where there is none."""
    course = course_words(item.get("levels"))
    if not course:
        return []
    href = PATH + asked.search(hint=str(item.get("id")))
    return [html.Div(soft_link(course, href, title="Show its course"), className="sub course")]


def told_hint(foreseen: Foreseen, asked: Filters) -> Mapping[str, Any] | None:
    """The hint whose course is shown: the one of the address, else the most urgent one that has a course."""
    having = [item for item in (*foreseen.coming, *foreseen.active) if item.get("levels")]
    chosen = [item for item in having if str(item.get("id")) == asked.get("hint")]
    return next(iter([*chosen, *having]), None)


def course_head(item: Mapping[str, Any] | None) -> Any:
    """What the fan shows: quantity, GPU, the course in words, and who says so."""
    if item is None:
        return html.P("Nothing that is foreseen has a level that could be followed.", className="muted")
    course = item["levels"]
    where = " ".join(str(part) for part in (item.get("node"), course.get("gpu_uuid")) if part)
    return html.P(
        [
            html.Strong(quantity_words(course)), f" of {where}: {course_words(course)}. ",
            html.Span(source_words(course), className="muted"),
        ],
        className="note",
    )  # fmt: skip

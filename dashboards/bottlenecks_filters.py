"""Filters of *What is about to go wrong?*: what its address may say, and the links that change it.

Which hints pass stands in `foresight.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from dashboards import filters, words
from dashboards.bottlenecks_cells import PATH
from dashboards.components import choices, soft_link
from dashboards.filters import Filters, one_of
from dashboards.foresight import HORIZONS_S
from dashboards.page import Context

_PROBABILITIES = (("any", None), ("≥ 60 %", "0.6"), ("≥ 75 %", "0.75"), ("≥ 90 %", "0.9"))


def read_filters(context: Context, search: str | None) -> Filters:
    """Filters of the page's address."""
    return filters.read(
        search,
        {
            **context.cluster_check(),
            "class": one_of(list(words.CLASS_WORDS)),
            "min_probability": filters.probability,
            "horizon_s": one_of([str(horizon) for horizon in HORIZONS_S]),
            "node": filters.name,
            "rack": filters.name,
            "colour": one_of(["bottleneck", "risk"]),
            "rows": one_of(["all"]),
            "hint": filters.name,
        },
    )


def horizon(asked: Filters) -> int:
    """Horizon that the page is asked for, s."""
    return int(asked.get("horizon_s") or HORIZONS_S[-1])


def filter_choices(asked: Filters) -> list[Any]:
    """Links that set and take back the filters of the page."""
    chosen = asked.get("class")
    classes = [("All", asked.search(**{"class": None}), chosen is None)]
    classes += [(t, asked.search(**{"class": key}), key == chosen) for key, t in words.CLASS_WORDS.items()]
    at = horizon(asked)
    least = asked.get("min_probability")
    probabilities = [(t, asked.search(min_probability=v), v == least) for t, v in _PROBABILITIES]
    if least is not None and least not in [value for _, value in _PROBABILITIES]:
        probabilities.append((f"≥ {words.percent(float(least))}", asked.search(), True))
    return [
        choices("Class", classes, path=PATH),
        choices("Horizon", [(f"{h} s", asked.search(horizon_s=str(h)), h == at) for h in HORIZONS_S], path=PATH),
        choices("Probability", probabilities, path=PATH),
        *filters_used(asked),
    ]


def filters_used(asked: Filters) -> Sequence[Any]:
    """Node and rack filters, each with a link that removes it."""
    found = []
    for name in ("node", "rack"):
        value = asked.get(name)
        if value:
            found.append(
                html.Span(
                    [
                        f"{name}: {value} ",
                        soft_link(
                            "✕", PATH + asked.search(**{name: None}), class_="remove", title=f"Show every {name}"
                        ),
                    ],
                    className="chip",
                )
            )
    return found

"""The table of nodes at risk of a hardware fault.

Facts in, components out; bottlenecks stand in `bottlenecks_parts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dash import html

from dashboards import words
from dashboards.bottlenecks_cells import PATH, reasons_of
from dashboards.components import Column, age, badge, data_bar, model_badge, model_line, notice, soft_link, table
from dashboards.filters import Filters
from dashboards.hints_reading import HintList
from features.fleet import natural_key
from models.lemons import LEMON_SCORE

_RISKS = 12
_UUID = re.compile(r"GPU (GPU-[0-9a-f]{8})-[0-9a-f-]+")
_FULL_RISK = {"p_1h": 0.05, "p_24h": 0.2, "p_7d": 0.5}
"""Probability at which the bar of a node risk is full, unless a larger one is in its column."""


def risk_table(hints: HintList, asked: Filters, now: datetime, *, several: bool) -> Any:
    """Nodes that are the most likely to have a hardware fault."""
    if not hints.is_valid:
        return notice("warn", "No valid node risks", words.sentence(hints.message))
    node = asked.get("node")
    risks = [risk for risk in hints.items if not node or risk.get("node") == node]
    risks = sorted(risks, key=_urgency)
    if not risks:
        return html.P("No node risk is published.", className="muted")
    made_at = age(hints.generated_at, now)
    versions = [risk.get("model_version") for risk in risks]
    if not any(_stands_out(risk) for risk in risks) and len({risk.get("p_24h") for risk in risks}) == 1:
        lines = (
            f"{words.count(len(risks), 'node')}: {words.percent(risks[0].get('p_24h'), 1)} within 24 h and "
            f"{words.percent(risks[0].get('p_7d'), 1)} within 7 days for each. It is the long-run rate; nothing "
            "particular is known of any node yet.",
            html.Span(["Made ", made_at, ". ", model_line(versions)]),
        )
        return notice("info", "No node stands out", *lines)
    columns = [
        Column("Node"),
        *([Column("Cluster", is_wide_only=True)] if several else []),
        Column("≤ 1 h", "number", "Probability of a hardware fault within 1 hour"),
        Column("≤ 24 h", "number", "Probability of a hardware fault within 24 hours"),
        Column("≤ 7 d", "number", "Probability of a hardware fault within 7 days"),
        Column("Why", "bar"),
    ]
    rows = []
    tops = {key: max(full, *(float(risk.get(key) or 0.0) for risk in risks)) for key, full in _FULL_RISK.items()}
    several_models = len(set(versions)) > 1
    for risk in risks[:_RISKS]:
        marks = [model_badge(risk.get("model_version"))] if several_models else []
        if risk.get("is_climatology"):
            marks.append(badge("climatology", "rule", "The long-run rate only; nothing of this node is weighed in"))
        if float(risk.get("lemon_score") or 0.0) >= LEMON_SCORE:
            marks.append(badge("lemon", "rule", "Half or more of the signals of bad hardware in 28 days"))
        if worst := next(iter(risk.get("gpus") or ()), None):
            of_gpu = f"{words.percent(worst.get('p_24h'), 2)} within 24 h: {'; '.join(worst.get('reasons') or ())}"
            marks.append(badge(str(worst.get("gpu_uuid"))[:12], "", f"The likeliest of its GPUs, {of_gpu}"))
        name, told = str(risk.get("node")), reasons_of(risk)
        rows.append(
            [
                soft_link(name, PATH + asked.search(node=name), class_="where", title=f"Show only {name}"),
                *([str(risk.get("cluster"))] if several else []),
                *[data_bar(risk.get(key), words.percent(risk.get(key), 1), top) for key, top in tops.items()],
                html.Div([_UUID.sub(r"\1", told), " ", *marks], className="why", title=told),
            ]
        )
    made = table(columns, rows, caption="Nodes most at risk of a hardware fault", id="risk-table")
    note: list[Any] = ["Made ", made_at, ". ", model_line(versions)]
    if len(risks) > _RISKS:
        note.insert(0, f"The {_RISKS} most at risk of {len(risks):,}; the CSV has all. ")
    return [made, html.P(note, className="note under")]


def _stands_out(risk: Mapping[str, Any]) -> bool:
    """Something particular is known of a node, whether its probabilities weigh it or not."""
    is_rate = bool(risk.get("is_climatology"))
    return not is_rate or bool(risk.get("reasons") or risk.get("gpus") or risk.get("lemon_score"))


def _urgency(risk: Mapping[str, Any]) -> tuple[Any, ...]:
    """The most probable first; among equals those with the most signals of bad hardware, then the most reasons."""
    likely, lemon = float(risk.get("p_24h") or 0.0), float(risk.get("lemon_score") or 0.0)
    return -likely, -lemon, -len(risk.get("reasons") or ()), natural_key(str(risk.get("node")))

"""Cells of the tables of bottlenecks: what it is, where, of whom, why, and what to do.

Facts of one hint in, components out. Tables and sentences stand in `bottlenecks_parts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from dashboards import words
from dashboards.components import attributes, badge, model_badge, soft_link
from dashboards.filters import Filters

PATH = "/bottlenecks"
_UNITS = {"fabric_congestion": "port", "host_memory": "node", "shortage": "queue"}
_SEVERITIES = {
    "page": ("bad", "Needs a person now"),
    "ticket": ("warn", "Worth a look in working hours"),
}


def class_mark(name: str) -> html.Span:
    """A bottleneck class with its sign; colour and sign both tell it."""
    return html.Span(
        [html.Span(className=f"icon icon-{name}", **attributes(aria_hidden="true")), words.class_words(name)],
        className=f"class-mark class-{name}",
    )


def where(item: Mapping[str, Any], indices: Mapping[str, int], asked: Filters, *, several: bool) -> html.Div:
    """The place of a hint: what it is of, with a link where that can be asked for, and what lies around it."""
    node = item.get("node")
    first: list[Any] = []
    if node:
        href = PATH + asked.search(node=str(node))
        first.append(soft_link(str(node), href, class_="where", title=f"Show only {node}"))
    uuid = item.get("gpu_uuid")
    if uuid:
        index = indices.get(str(uuid))
        short = f"GPU {index}" if index is not None else f"GPU {str(uuid).removeprefix('GPU-')[:8]}"
        first.append(html.Span(f" {short}", title=str(uuid)))
    unit = item.get("unit")
    if node and unit:  # a link of the node
        first.append(html.Span(f" {str(unit).removeprefix(f'{node}/')}", title=str(unit)))
    if not first or item.get("scope") == "job":
        first = _wide(item, asked)
    members = int(item.get("members") or 1)
    if members > 1:
        nodes = len(item.get("nodes") or ())
        held = words.count(members, _UNITS.get(str(item.get("bottleneck_class")), "GPU"))
        first.append(html.Span(f" {held}" + (f" on {words.count(nodes, 'node')}" if nodes > 1 else "")))
    around = [
        part
        for part in (
            item.get("rack") if item.get("scope") != "rack" else None,
            item.get("pod") if item.get("scope") != "pod" else None,
            item.get("cluster") if several else None,
        )
        if part
    ]
    return html.Div([html.Div(first, className="line"), html.Div(" · ".join(map(str, around)), className="sub")])


def _wide(item: Mapping[str, Any], asked: Filters) -> list[Any]:
    """A rack, pod, job, queue or cluster by name."""
    scope = str(item.get("scope") or "")
    causes = item.get("causes") or ()
    name = item.get(scope) or item.get("unit") or next((c.get("id") for c in causes if c.get("kind") == scope), None)
    if scope == "rack" and name:
        href = PATH + asked.search(rack=str(name))
        return ["rack ", soft_link(str(name), href, class_="where", title=f"Show only rack {name}")]
    return [f"{scope} {name or ''}".strip()]


def jobs_of(item: Mapping[str, Any]) -> Any:
    """Jobs that a hint touches."""
    jobs = [str(job) for job in item.get("job_ids") or ()]
    return html.Span(words.names(jobs, 3), title=", ".join(jobs)) if jobs else html.Span("no job", className="muted")


def reasons_of(item: Mapping[str, Any]) -> str:
    """Why, in one line: what the samples say, then the likeliest cause and how many others there are."""
    told = [str(reason) for reason in item.get("reasons") or ()]
    causes = item.get("causes") or ()
    if causes and causes[0].get("evidence"):
        others = ", ".join(str(cause.get("kind")) for cause in causes[1:])
        told.append(f"likely {causes[0]['evidence']}" + (f" (or: {others})" if others else ""))
    return "; ".join(told)


def why(item: Mapping[str, Any], *, with_model: bool) -> html.Div:
    """The reasons, and where tables mix them, the model."""
    told: list[Any] = [reasons_of(item) or "no reason given"]
    if with_model:
        told += [" ", model_badge(item.get("model_version"))]
    return html.Div(told, className="why")


def suggested(item: Mapping[str, Any]) -> html.Span:
    """The action; what it means stands in its title."""
    advice = str(item.get("advice") or "")
    return html.Span(words.action_words(str(item.get("action") or "none")), **attributes(title=advice or None))


def what(item: Mapping[str, Any], below: Sequence[Any] = ()) -> html.Div:
    """The class and who has to know; on narrow screens, where reasons have no column, with them and `below` below."""
    told: list[Any] = [class_mark(str(item.get("bottleneck_class")))]
    severity = str(item.get("severity") or "info")
    if severity in _SEVERITIES:
        tone, text = _SEVERITIES[severity]
        told += [" ", badge(severity, tone, text)]
    if item.get("silenced_by"):
        told.append(html.Span(" silenced", className="muted", title=f"no scheduler is told: {item['silenced_by']}"))
    if item.get("is_held_out"):
        told.append(html.Span(" held out", className="muted", title="nothing is done about it, to see if it comes"))
    return html.Div([html.Span(told), html.Div([reasons_of(item), *below], className="sub narrow-only")])

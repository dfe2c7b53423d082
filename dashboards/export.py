"""CSV of what the pages show, under the same filters: plain addresses that a browser, curl or a spreadsheet can read.

Units stand in the column names, times are ISO 8601 in UTC. What is shown and how stands in the pages.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flask

from dashboards import bottlenecks_page, fleet_page
from dashboards.foresight import HORIZONS_S, probability
from dashboards.hints_reading import HintList
from dashboards.page import Context
from features import fleet


def register(server: flask.Flask, context: Context) -> None:
    """Add the routes `/export/<name>.csv`."""

    @server.get("/export/bottlenecks.csv")
    def bottlenecks() -> flask.Response:
        asked = bottlenecks_page.read_filters(context, flask.request.query_string.decode("utf-8", "replace"))
        hints = bottlenecks_page.read_list(context, "bottlenecks", asked)
        refused = _refused(asked.problems, hints)
        if refused is not None:
            return refused
        foreseen = bottlenecks_page.select(hints, asked)
        columns = (
            "cluster", "bottleneck_class", "scope", "node", "gpu_uuid", "unit", "rack", "pod", "is_active",
            "expected_onset",
            "horizon_s", "probability", *(f"probability_{h}s" for h in HORIZONS_S), "action", "job_ids", "reasons",
            "model_version", "generated_at", "id", "since", "severity", "members", "nodes", "causes", "advice",
        )  # fmt: skip
        made = hints.generated_at.isoformat() if hints.generated_at else None
        rows = (
            {
                **item,
                **{f"probability_{h}s": probability(item, h) for h in HORIZONS_S},
                "job_ids": "; ".join(map(str, item.get("job_ids") or ())),
                "reasons": "; ".join(map(str, item.get("reasons") or ())),
                "nodes": "; ".join(map(str, item.get("nodes") or ())),
                "causes": "; ".join(str(cause.get("evidence")) for cause in item.get("causes") or ()),
                "generated_at": made,
            }
            for item in (*foreseen.coming, *foreseen.active)
        )
        return _csv("bottlenecks.csv", columns, rows)

    @server.get("/export/node-risks.csv")
    def node_risks() -> flask.Response:
        asked = bottlenecks_page.read_filters(context, flask.request.query_string.decode("utf-8", "replace"))
        hints = bottlenecks_page.read_list(context, "node-risks", asked)
        refused = _refused(asked.problems, hints)
        if refused is not None:
            return refused
        node = asked.get("node")
        columns = ("cluster", "node", "p_1h", "p_24h", "p_7d", "is_climatology", "lemon_score", "spare_rank", "reasons",
                   "model_version")  # fmt: skip
        rows = [
            {**risk, "reasons": "; ".join(map(str, risk.get("reasons") or ()))}
            for risk in hints.items
            if not node or risk.get("node") == node
        ]
        rows.sort(key=lambda risk: -float(risk.get("p_24h") or 0.0))
        return _csv("node-risks.csv", columns, rows)

    @server.get("/export/fleet.csv")
    def fleet_csv() -> flask.Response:
        asked = fleet_page.read_filters(context, flask.request.query_string.decode("utf-8", "replace"))
        if asked.problems:
            return _text(400, "\n".join(asked.problems))
        reading = fleet_page.read_now(context, asked)
        if reading.value is None:
            return _text(503, f"The store cannot be read: {reading.error}")
        by = fleet_page.grouping(context, asked)
        frame = fleet.breakdown(reading.value.states, by)
        renamed = {"gpus": "gpus", "goodness": "goodness_ratio", **{s: f"{s}_gpus" for s in fleet.STATES}}
        frame = frame.rename({name: new for name, new in renamed.items() if name in frame.columns})
        return _csv("fleet.csv", frame.columns, frame.iter_rows(named=True))


def _refused(problems: Sequence[str], hints: HintList) -> flask.Response | None:
    """An answer for filters that are wrong or hints that are not valid; None when all is well."""
    if problems:
        return _text(400, "\n".join(problems))
    if not hints.is_valid:
        return _text(503, f"No valid hints: {hints.message}")
    return None


def _text(status: int, text: str) -> flask.Response:
    return flask.Response(text + "\n", status=status, mimetype="text/plain")


def _csv(name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> flask.Response:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return flask.Response(
        text.getvalue(),
        mimetype="text/csv",
        headers={"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"},
    )


def _cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value

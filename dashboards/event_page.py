"""The page of a backtest of bottlenecks, levels or node faults: one HTML file that needs nothing else.

Here belong its tables and charts; not the figures (`models/event_report.py`) and not where the file goes
(`pipelines/event_backtesting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from dashboards.backtest_page import STYLE
from models.event_report import EventReport, short
from models.event_scores import horizon_name

_COLOURS = (
    "#0b6fb8",
    "#b8690b",
    "#5a6675",
    "#2f855a",
    "#9b2c6f",
    "#6b46c1",
    "#b7791f",
    "#2c7a7b",
    "#c53030",
    "#4a5568",
)
_LAYOUT = {"template": "plotly_white", "height": 440, "width": 760}


def event_page(report: EventReport, title: str) -> str:
    """The page.

    Args:
        report: Outcome of a backtest.
        title: What was backtested on, as the name of a file.
    """
    charts = []
    for figure in (_curves(report), _reliability(report), _benefit(report)):
        if figure is not None:
            charts.append(figure.to_html(full_html=False, include_plotlyjs=not charts, config={"displaylogo": False}))
    heading = f"{report.subject} on {title}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(heading)}</title><style>{STYLE}</style></head><body>
<h1>{escape(heading)}</h1>
<p>{escape(report.summary)}.</p>
{"".join(f"<p><strong>{escape(note)}</strong></p>" for note in report.notes)}
{_figures(report)}
{"".join(charts)}
{_operating(report)}
<p><small>A ratio is model ÷ baseline of average precisions; its interval is a 95 % block bootstrap over {report.unit} ×
day, not claimed under 30 blocks with an onset. A skill is 1 − model ÷ baseline.</small></p>
</body></html>
"""


def _figures(report: EventReport) -> str:
    plain = [s for s in report.scores if not s.metric.endswith("_ratio") and "_skill_" not in s.metric]
    names = list(dict.fromkeys(score.baseline for score in plain))
    found = {(score.metric, score.baseline): score for score in plain}
    rows = []
    for metric in dict.fromkeys(score.metric for score in plain):
        cells = [found.get((metric, name)) for name in names]
        rows.append([metric, *(short(None if cell is None else cell.interval.value) for cell in cells)])
    compared = [
        [score.metric, score.baseline, str(score.interval) if score.metric.endswith("_ratio") else
         short(score.interval.value)]
        for score in report.scores
        if score not in plain
    ]  # fmt: skip
    return _table("The model beside each baseline", ["", *(name or "model" for name in names)], rows) + _table(
        "The model against the best baseline", ["", "best baseline", "value"], compared
    )


def _operating(report: EventReport) -> str:
    if not report.operating:
        return ""
    keys = [
        "worth", "threshold", "forecaster", "alarms", "precision", "recall", "lead_s", "false_per_unit_day",
        "benefit_per_unit_day",
    ]  # fmt: skip
    words = [
        "an onset caught is worth … false alarms", "alarm at P ≥", "forecaster", "alarms", "precision", "recall",
        "lead, median s", f"false per {report.unit} and day", f"benefit per {report.unit} and day",
    ]  # fmt: skip
    rows = [
        [row[key] or "model" if key == "forecaster" else _number(row[key], key) for key in keys]
        for row in report.operating
        if row["alarms"] or row["forecaster"] == ""
    ]
    return _table(f"Alarms for {horizon_name(_last_horizon(report))}, lead times, cost and benefit", words, rows)


def _number(value: Any, key: str) -> str:
    return f"{value:,.0f}" if key in ("worth", "alarms") else short(float(value))


def _last_horizon(report: EventReport) -> float:
    return max((row["horizon_s"] for row in report.calibration), default=0.0)


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<th>{escape(str(word))}</th>" for word in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><tr>{cells}</tr>{body}</table>"


def _curves(report: EventReport) -> Any:
    if not report.curves:
        return None
    import plotly.graph_objects as go

    figure = go.Figure()
    horizon_s = max(float(row["horizon_s"]) for row in report.curves)
    mine = [row for row in report.curves if row["horizon_s"] == horizon_s]
    for i, name in enumerate(dict.fromkeys(row["forecaster"] for row in mine)):
        rows = [row for row in mine if row["forecaster"] == name]
        figure.add_scatter(
            x=[row["recall"] for row in rows], y=[row["precision"] for row in rows], mode="lines",
            name=str(name) or "model", line={"color": _COLOURS[i % len(_COLOURS)], "width": 3 if not name else 1.5},
        )  # fmt: skip
    figure.update_layout(
        title=f"Precision and recall, {horizon_name(horizon_s)}",
        xaxis_title="recall",
        yaxis_title="precision",
        **_LAYOUT,
    )
    figure.update_yaxes(type="log")
    return figure


def _reliability(report: EventReport) -> Any:
    rows = [row for row in report.calibration if "forecast" in row]
    if not rows:
        return None
    import plotly.graph_objects as go

    figure = go.Figure()
    top = max(max(row["forecast"], row["observed"]) for row in rows) or 1.0
    figure.add_scatter(
        x=[0, top], y=[0, top], mode="lines", name="as it should be", line={"dash": "dot", "color": "#999"}
    )
    for i, horizon_s in enumerate(dict.fromkeys(row["horizon_s"] for row in rows)):
        mine = [row for row in rows if row["horizon_s"] == horizon_s]
        figure.add_scatter(
            x=[row["forecast"] for row in mine], y=[row["observed"] for row in mine], mode="lines+markers",
            name=horizon_name(horizon_s), line={"color": _COLOURS[i]},
            text=[f"{row['count']:,.0f} rows" for row in mine],
        )  # fmt: skip
    figure.update_layout(title="Reliability", xaxis_title="said", yaxis_title="happened", **_LAYOUT)
    return figure


def _benefit(report: EventReport) -> Any:
    if not report.operating:
        return None
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, name in enumerate(dict.fromkeys(row["forecaster"] for row in report.operating)):
        mine = [row for row in report.operating if row["forecaster"] == name]
        figure.add_scatter(
            x=[row["worth"] for row in mine], y=[row["benefit_per_unit_day"] for row in mine], mode="lines+markers",
            name=str(name) or "model", line={"color": _COLOURS[i % len(_COLOURS)], "width": 3 if not name else 1.5},
        )  # fmt: skip
    figure.update_layout(
        title=f"Benefit of alarms per {report.unit} and day, in false alarms (never alarming: 0)",
        xaxis_title="false alarms that an onset caught in time is worth", yaxis_title="benefit", **_LAYOUT,
    )  # fmt: skip
    figure.update_xaxes(type="log")
    return figure

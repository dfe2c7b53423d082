"""The page of a backtest of bottlenecks, levels or node faults: one HTML file that needs nothing else.

Here belong its tables and charts; not the figures (`models/event_report.py`), not the words they share with the text
(`models/event_text.py`) and not where the file goes (`pipelines/event_backtesting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from dashboards.backtest_page import STYLE
from dashboards.words import sentence
from models.event_report import EventReport
from models.event_scores import horizon_name
from models.event_text import LEGEND, compared_table, glossary, main_table, short, span, title, verdicts
from models.event_words import baseline_label, horizon_words

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


_STYLE = (
    STYLE
    + """td{white-space:nowrap;font-variant-numeric:tabular-nums}th{vertical-align:bottom;max-width:9rem}
table{font-size:14px}th,td{padding:.25rem .5rem}.best td:nth-child(2){font-weight:600}
.words td{white-space:normal;text-align:left}.words th{text-align:left}.words td:first-child{min-width:16rem}
.verdict{font-size:1.1rem;margin:.2rem 0}"""
)


def event_page(report: EventReport, name: str) -> str:
    """The page.

    Args:
        report: Outcome of a backtest.
        name: What was backtested on, as the name of a file.
    """
    charts = []
    for figure in (_curves(report), _reliability(report), _benefit(report)):
        if figure is not None:
            charts.append(
                figure.to_html(
                    full_html=False, include_plotlyjs=not charts, config={"displaylogo": False},
                    div_id=f"chart-{len(charts)}",
                )
            )  # fmt: skip
    heading = f"{title(report)}, backtest on {name}"
    figures, stands = glossary(report)
    head = ["figure (name in report.json)", "unit", "what it says", "better"]
    compared = compared_table(report)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(heading)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(heading)}</h1>
<p>{escape(sentence(span(report)))}</p>
{"".join(f'<p class="verdict">{escape(line)}.</p>' for line in verdicts(report))}
{"".join(f"<p>{escape(note)}</p>" for note in report.notes)}
{_table("The model beside each baseline", *_split(main_table(report)), "best")}
{_table("The model against the best baseline", *_split(compared))}
{"".join(charts)}
{_operating(report)}
{_table("What the figures mean", head, figures, "words")}
{_table("What the model stands beside", ["baseline (name in report.json)", "what it says"], stands, "words")}
<p><small>{escape(LEGEND)}; {_fine_print(report)}</small></p>
</body></html>
"""


def _fine_print(report: EventReport) -> str:
    if report.kind == "level":
        return (
            "a ratio is model ÷ baseline of mean errors; its interval is a 95 % block bootstrap over GPU × day, not "
            "claimed under 30 blocks."
        )
    return (
        "a ratio is model ÷ baseline of average precisions; its interval is a 95 % block bootstrap over "
        f"{report.unit} × day, not claimed under 30 blocks with an onset."
    )


def _split(rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return rows[0], rows[1:]


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
        [baseline_label(str(row[key])) if key == "forecaster" else _number(row[key], key) for key in keys]
        for row in report.operating
        if row["alarms"] or row["forecaster"] == ""
    ]
    return _table(
        f"Alarms for {horizon_words(horizon_name(_last_horizon(report)))}, lead times, cost and benefit", words, rows
    )


def _number(value: Any, key: str) -> str:
    return f"{value:,.0f}" if key in ("worth", "alarms") else short(float(value))


def _last_horizon(report: EventReport) -> float:
    return max((row["horizon_s"] for row in report.calibration), default=0.0)


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    if not rows:
        return ""
    cells = "".join(f"<th>{escape(str(word))}</th>" for word in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{kind}"><caption>{escape(caption)}</caption><tr>{cells}</tr>{body}</table>'


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
            name=baseline_label(str(name)),
            line={"color": _COLOURS[i % len(_COLOURS)], "width": 3 if not name else 1.5},
        )  # fmt: skip
    figure.update_layout(
        title=f"Precision and recall, within {horizon_words(horizon_name(horizon_s))}",
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
    is_level = report.kind == "level"
    ahead = " ahead" if is_level else ""
    for i, horizon_s in enumerate(dict.fromkeys(row["horizon_s"] for row in rows)):
        mine = [row for row in rows if row["horizon_s"] == horizon_s]
        figure.add_scatter(
            x=[row["forecast"] for row in mine], y=[row["observed"] for row in mine], mode="lines+markers",
            name=f"{horizon_words(horizon_name(horizon_s))}{ahead}", line={"color": _COLOURS[i % len(_COLOURS)]},
            text=[f"{row['count']:,.0f} rows" for row in mine],
        )  # fmt: skip
    figure.update_layout(
        title="Reliability: what was said and how often it came",
        xaxis_title="quantile stated" if is_level else "stated probability",
        yaxis_title="share of outcomes at or under it" if is_level else "share that an onset followed",
        **_LAYOUT,
    )
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
            name=baseline_label(str(name)),
            line={"color": _COLOURS[i % len(_COLOURS)], "width": 3 if not name else 1.5},
        )  # fmt: skip
    figure.update_layout(
        title=f"Benefit of alarms per {report.unit} and day, in false alarms (never alarming: 0)",
        xaxis_title="false alarms that an onset caught in time is worth", yaxis_title="benefit", **_LAYOUT,
    )  # fmt: skip
    figure.update_xaxes(type="log")
    return figure

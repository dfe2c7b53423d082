"""The page of a backtest: one HTML file that needs nothing else, for whoever is to believe the figures.

Here belong its tables and charts; not the figures (`models/backtest_report.py`) and not where the file goes
(`pipelines/backtesting.py`).
"""

from __future__ import annotations

from html import escape
from typing import Any

from models.backtest_report import BacktestReport, Score

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1b2430}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}th,td{padding:.3rem .7rem;text-align:right}
th:first-child,td:first-child{text-align:left}tr:nth-child(even){background:#f2f5f8}caption{text-align:left;
font-weight:600}small{color:#5a6675}"""
_MODEL, _BASELINE = "#0b6fb8", "#b8690b"


def backtest_page(report: BacktestReport, title: str) -> str:
    """The page.

    Args:
        report: Outcome of a backtest.
        title: What was backtested on, as the name of a file.
    """
    figures = [_calibration(report), _weeks(report)]
    charts = []
    for figure in figures:
        if figure is not None:
            charts.append(
                figure.to_html(
                    full_html=False, include_plotlyjs=not charts, config={"displaylogo": False},
                    div_id=f"chart-{len(charts)}",  # a drawn one would make each page another
                )
            )  # fmt: skip
    heading = f"{report.task} on {title}"
    span = f"{report.start:%Y-%m-%d}–{report.end:%Y-%m-%d}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(heading)}</title><style>{STYLE}</style></head><body>
<h1>{escape(heading)}</h1>
<p>{report.jobs:,} jobs submitted {span}, {report.refits} fits on outcomes known by then, history visible from the
moment it ended. Best baseline: {escape(report.best_baseline)}.</p>
{"".join(f"<p><strong>{escape(note)}</strong></p>" for note in report.notes)}
{_table("The model beside each baseline", report.scores)}
{"".join(charts)}
{_table("Parts of the jobs", report.strata) if report.strata else ""}
<p><small>± is half of a 95 % interval of a block bootstrap over user × day; a ratio is model ÷ baseline of the mean
losses.</small></p>
</body></html>
"""


def _table(caption: str, scores: list[Score]) -> str:
    names = list(dict.fromkeys(score.baseline for score in scores))
    metrics = list(dict.fromkeys(score.metric for score in scores))
    found = {(score.metric, score.baseline): score for score in scores}
    head = "".join(f"<th>{escape(name or 'model')}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{escape(metric)}</td>{''.join(f'<td>{_cell(found.get((metric, name)))}</td>' for name in names)}</tr>"
        for metric in metrics
    )
    return f"<table><caption>{caption}</caption><tr><th></th>{head}</tr>{rows}</table>"


def _cell(score: Score | None) -> str:
    if score is None:
        return "–"
    value, low, high = score.interval.value, score.interval.low, score.interval.high
    form = "{:,.0f}" if abs(value) >= 100 else "{:.3f}"
    half = "" if low is None or high is None else f" ± {form.format((high - low) / 2)}"
    return f'<span title="{score.count:,} jobs">{form.format(value)}{half}</span>'


def _calibration(report: BacktestReport) -> Any:
    if not report.calibration:
        return None
    import plotly.graph_objects as go

    forecast = [row["forecast"] for row in report.calibration]
    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="as it should be", line={"dash": "dot", "color": "#999"})
    figure.add_scatter(
        x=forecast, y=[row["observed"] for row in report.calibration], mode="lines+markers", name="observed",
        line={"color": _MODEL}, text=[f"{row['count']:,.0f} jobs" for row in report.calibration],
    )  # fmt: skip
    figure.update_layout(
        title="Reliability", xaxis_title="said", yaxis_title="happened", width=520, height=460, template="plotly_white"
    )
    return figure


def _weeks(report: BacktestReport) -> Any:
    primary = next((name for name in ("male", "brier") if any(s.metric == name for s in report.scores)), None)
    rows = [score for score in report.strata if primary and score.metric.startswith(f"{primary}_week_")]
    if not rows:
        return None
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, colour in (("", _MODEL), (report.best_baseline, _BASELINE)):
        mine = [score for score in rows if score.baseline == name]
        low = [score.interval.value - (score.interval.low or score.interval.value) for score in mine]
        high = [(score.interval.high or score.interval.value) - score.interval.value for score in mine]
        figure.add_scatter(
            x=[score.metric.removeprefix(f"{primary}_week_") for score in mine], y=[s.interval.value for s in mine],
            error_y={"array": high, "arrayminus": low}, mode="lines+markers", name=name or "model",
            line={"color": colour}, text=[f"{score.count:,} jobs" for score in mine],
        )  # fmt: skip
    figure.update_layout(
        title=f"{primary} by week", xaxis_title="week from", yaxis_title=primary, height=420, template="plotly_white"
    )
    return figure

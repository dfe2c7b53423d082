"""The page of a backtest: one HTML file that needs nothing else, for whoever is to believe the figures.

Here belong its tables and charts; not the figures (`models/backtest_report.py`), not the words they share with the text
(`models/backtest_text.py`) and not where the file goes (`pipelines/backtesting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from dashboards.words import sentence
from models.backtest_parts import SIBLING_PART
from models.backtest_report import BacktestReport
from models.backtest_text import (
    LEGEND,
    WEAK,
    after_table,
    baseline_table,
    low_parts,
    main_table,
    parts_table,
    sentences,
    span,
    title,
    verdict,
)
from models.backtest_words import baseline_label, glossary, measure_of, time_words

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1b2430}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}th,td{padding:.3rem .7rem;text-align:right}
th:first-child,td:first-child{text-align:left}tr:nth-child(even){background:#f2f5f8}caption{text-align:left;
font-weight:600}small{color:#5a6675}"""
_MODEL, _BASELINE = "#0b6fb8", "#b8690b"
_OTHERS = ("#5a6675", "#2f855a", "#9b2c6f", "#6b46c1", "#b7791f", "#2c7a7b", "#c53030", "#4a5568", "#97266d")
_SHADES = ("#0b6fb8", "#3f9b8f", "#8a9a2f", "#c98a1b", "#b8690b", "#a3442a", "#7d2a52", "#54257d", "#2d2f6e")
# Words wrap, numbers do not; the first column of a table of words is as wide as its words.
_STYLE = (
    STYLE
    + """body{max-width:1560px}p{max-width:1000px}
td{white-space:nowrap;font-variant-numeric:tabular-nums}th{vertical-align:bottom;max-width:8rem}
table{font-size:14px}th,td{padding:.25rem .5rem}
.words td{white-space:normal;text-align:left}.words th{text-align:left}.words td:first-child{min-width:16rem}
.best td:nth-child(2){font-weight:600}summary{cursor:pointer;font-weight:600;margin:.6rem 0}
.verdict{font-size:1.15rem}.weak{border-left:4px solid #b8690b;padding-left:.8rem}"""
)


def backtest_page(report: BacktestReport, name: str) -> str:
    """The page.

    Args:
        report: Outcome of a backtest.
        name: What was backtested on, as the name of a file.
    """
    charts = []
    for figure in (_elapsed(report), _calibration(report), _weeks(report)):
        if figure is not None:
            charts.append(
                figure.to_html(
                    full_html=False, include_plotlyjs=not charts, config={"displaylogo": False},
                    div_id=f"chart-{len(charts)}",  # a drawn one would make each page another
                )
            )  # fmt: skip
    heading = f"{title(report)}, backtest on {name}"
    weak = [line for line in low_parts(report) if line.startswith(WEAK)]
    told = [f"<p{' class=weak' if line in weak else ''}>{escape(sentence(line))}</p>" for line in sentences(report)]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(heading)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(heading)}</h1>
<p>{escape(span(report))}. Each forecast knew only outcomes from before it: a job's history is visible from the moment
it ended.</p>
<p class="verdict">{escape(verdict(report))}.</p>
{"".join(told)}
{_after(report)}
{_table("The model beside each baseline", main_table(report), "best")}
{"".join(charts)}
{_parts(report)}
{_glossary(report)}
<p><small>{escape(LEGEND)}; no interval is given under 30 blocks. A ratio is that of the mean losses on the same
jobs.</small></p>
</body></html>
"""


def _after(report: BacktestReport) -> str:
    if not report.best_after:
        return ""
    return _table("By how long a job had run", after_table(report)) + _table(
        f"{_loss(report)} of each baseline by how long a job had run", baseline_table(report), "best"
    )


def _parts(report: BacktestReport) -> str:
    """Tables of the parts; by how long jobs had run they are folded away."""
    rows = parts_table(report, with_weeks=True)
    if len(rows) < 2:
        return ""
    tables = [_table("Parts of the jobs", rows)]
    for at_s in report.best_after:
        rows = parts_table(report, at_s, with_weeks=True)
        if len(rows) > 1:
            after = f"Parts of the jobs still running after {time_words(at_s)}"
            tables.append(f"<details><summary>{after}</summary>{_table('', rows)}</details>")
    return "".join(tables)


def _glossary(report: BacktestReport) -> str:
    """What every figure and baseline on the page means."""
    scores = [*report.scores, *report.strata]
    measures = dict.fromkeys((s.measure or s.metric).removesuffix("_ratio") for s in scores)
    baselines = dict.fromkeys(s.baseline for s in scores if s.part != SIBLING_PART or s.baseline == "siblings")
    figures, stands = glossary(measures, baselines)
    head, others = ["figure (name in report.json)", "unit", "what it says", "better"], ["baseline", "what it says"]
    return _table("What the figures mean", [head, *figures], "words") + _table(
        "What the model stands beside", [others, *stands], "words"
    )


def _table(caption: str, rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<table class="{kind}">{named}<tr>{head}</tr>{body}</table>'


def _elapsed(report: BacktestReport) -> Any:
    """The primary loss of model and baselines by how long jobs had run."""
    if not report.best_after:
        return None
    import plotly.graph_objects as go

    figure = go.Figure()
    names = list(dict.fromkeys(s.baseline for s in report.scores if s.measure == report.primary))
    for number, name in enumerate(names):
        mine = [s for at_s in report.best_after if (s := report.find(report.primary, name, at_s)) is not None]
        figure.add_scatter(
            x=[time_words(s.elapsed_s or 0) for s in mine], y=[s.interval.value for s in mine],
            mode="lines+markers", name=baseline_label(name), text=[f"{s.count:,} jobs" for s in mine],
            visible="legendonly" if name == "lindy" else True,  # so far off that the others would lie on one line
            line={"color": _OTHERS[(number - 1) % len(_OTHERS)] if name else _MODEL, "width": 1.5 if name else 4},
        )  # fmt: skip
    figure.update_layout(
        title=f"{_loss(report)} by how long a job had run (lower is better)",
        xaxis_title="after", yaxis_title=_axis(report), height=440, template="plotly_white",
    )  # fmt: skip
    return figure


def _calibration(report: BacktestReport) -> Any:
    if not report.calibration:
        return None
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="as it should be", line={"dash": "dot", "color": "#999"})
    looks = list(dict.fromkeys(row.get("elapsed_s") for row in report.calibration))
    shown = [at_s for at_s in looks if at_s is None or at_s in report.best_after]
    for number, at_s in enumerate(shown):
        rows = [row for row in report.calibration if row.get("elapsed_s") == at_s]
        figure.add_scatter(
            x=[row["forecast"] for row in rows], y=[row["observed"] for row in rows], mode="lines+markers",
            name="observed" if at_s is None else f"after {time_words(at_s)}",
            line={"color": _SHADES[number % len(_SHADES)]}, text=[f"{row['count']:,.0f} jobs" for row in rows],
        )  # fmt: skip
    is_odds = report.primary == "brier"
    figure.update_layout(
        title="Reliability: what was said and how often it came", width=640, height=480, template="plotly_white",
        xaxis_title="stated probability" if is_odds else "quantile stated",
        yaxis_title="share that ended badly" if is_odds else "share of outcomes at or under it",
    )  # fmt: skip
    return figure


def _weeks(report: BacktestReport) -> Any:
    rows = [
        s for s in report.strata if (s.measure, s.elapsed_s) == (report.primary, None) and s.part.startswith("week_")
    ]
    if not rows:
        return None
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, colour in (("", _MODEL), (report.best_baseline, _BASELINE)):
        mine = [score for score in rows if score.baseline == name]
        low = [score.interval.value - (score.interval.low or score.interval.value) for score in mine]
        high = [(score.interval.high or score.interval.value) - score.interval.value for score in mine]
        figure.add_scatter(
            x=[score.part.removeprefix("week_") for score in mine], y=[s.interval.value for s in mine],
            error_y={"array": high, "arrayminus": low}, mode="lines+markers", name=baseline_label(name),
            line={"color": colour}, text=[f"{score.count:,} jobs" for score in mine],
        )  # fmt: skip
    figure.update_layout(
        title=f"{_loss(report)} by week of submit (lower is better)", xaxis_title="week from",
        yaxis_title=_axis(report), height=420, template="plotly_white",
    )  # fmt: skip
    figure.update_xaxes(type="category")
    return figure


def _loss(report: BacktestReport) -> str:
    """The loss that decides, as a title begins."""
    label = measure_of(report.primary).label
    return label[:1].upper() + label[1:]


def _axis(report: BacktestReport) -> str:
    measure = measure_of(report.primary)
    return f"{measure.label} ({measure.unit})"

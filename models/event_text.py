"""A backtest's report of events or levels as text: what was judged, what decides, then every figure in words.

Here belong the lines that the command prints and the tables that its page shares; not the words for single figures
(`models/event_words.py`) and not the page (`dashboards/event_page.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from models.backtest_report import Score
from models.backtest_words import arrow
from models.event_report import EventReport
from models.event_words import (
    BASELINES,
    MEASURES,
    Figure,
    baseline_label,
    figure_of,
    horizon_words,
    measure_of,
    scale_of,
    shown_unit,
    subject_words,
)

_IN_TEXT = ("mae_gpus", "stays_rate", "offered", "offered_of_idle", "breached", "base_rate",
            "rows_with_onset", "average_precision", "auc", "brier", "mae", "coverage_80pct",
            "top_5pct_share_of_faults")  # fmt: skip
_AT_WORK = "GPUs at work"
LEGEND = "↓ lower is better, ↑ higher, → what it should be"


def title(report: EventReport) -> str:
    """What was forecast, in words and with its unit."""
    unit = shown_unit(report.subject)[0]
    return subject_words(report.subject) + (f", {unit}" if unit else "")


def span(report: EventReport) -> str:
    """How much was judged, of which time, and until when was learned."""
    onsets = "" if report.onsets is None else f" with {report.onsets:,} onsets"
    learned = "learned on the way" if report.kind in ("faults", "idle") else "nothing was learned"
    if report.train_end is not None:
        learned = f"learned until {report.train_end:%Y-%m-%d %H:%M}"
    units = f"{report.units:,} {report.unit}{'' if report.units == 1 else 's'}"
    return (
        f"{report.rows:,} forecasts of {units}{onsets}, {report.start:%Y-%m-%d %H:%M}–{report.end:%Y-%m-%d %H:%M} UTC, "
        f"{learned}"
    )


def verdicts(report: EventReport) -> list[str]:
    """The model against the best baseline, a sentence for each horizon (of GPUs at work, where there are others)."""
    ratios = [(score, figure_of(score.metric)) for score in report.scores if score.metric.endswith("_ratio")]
    if any(figure.is_moving for _, figure in ratios):
        ratios = [pair for pair in ratios if pair[1].is_moving]
    out = []
    for score, figure in ratios:
        word = "not clearly other than"
        low, high = score.interval.low, score.interval.high
        better_above = measure_of(figure.stem).better == "higher"
        if low is not None and high is not None and (high < 1 or low > 1):
            word = "better than" if (low > 1) == better_above else "worse than"
        elif low is None:
            times = f"{score.interval.value:.2f} × that of the best baseline ({_best(score)})"
            out.append(f"{_label(figure, report, bare=True)}: {times}, on too little for an interval")
            continue
        said = f"{word} the best baseline ({_best(score)}), {score.interval} times as large"
        out.append(f"{_label(figure, report, bare=True)}: {said}")
    return out


def main_table(report: EventReport, stems: Iterable[str] | None = None) -> list[list[str]]:
    """Head and rows: each figure of the model and of each baseline; `stems`: of these figures alone."""
    shown = [(s, figure_of(s.metric)) for s in report.scores if not _is_compared(s)]
    if stems is not None:
        wanted = tuple(stems)
        shown = [(s, figure) for s, figure in shown if figure.stem in wanted]
    names = list(dict.fromkeys(["", *(s.baseline for s, _ in shown)]))
    found = {(s.metric, s.baseline): s for s, _ in shown}
    order = {stem: k for k, stem in enumerate(dict.fromkeys(figure.stem for _, figure in shown))}
    figures = dict.fromkeys((s.metric, figure) for s, figure in shown)
    rows = [["", *(baseline_label(name) for name in names)]]
    # All horizons of a figure stand together, those of GPUs at work behind.
    for metric, figure in sorted(figures, key=lambda pair: (order[pair[1].stem], pair[1].is_moving)):
        scale = scale_of(figure.stem, report.subject)
        values = [None if (c := found.get((metric, name))) is None else c.interval.value * scale for name in names]
        rows.append([_label(figure, report), *(_cell(value, figure) for value in values)])
    return rows


def compared_table(report: EventReport) -> list[list[str]]:
    """Head and rows: the model against the best baseline."""
    rows = [["", "best baseline", "value"]]
    for score in report.scores:
        if _is_compared(score):
            figure = figure_of(score.metric)
            value = str(score.interval) if figure.is_ratio else short(score.interval.value)
            rows.append([_label(figure, report), _best(score), value])
    return rows


def glossary(report: EventReport) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of two tables: name, unit, meaning and better of each figure; name and meaning of each baseline."""
    stems = dict.fromkeys(figure_of(score.metric).stem for score in report.scores)
    figures = []
    for stem in stems:
        measure = measure_of(stem, report.subject)
        figures.append([f"{measure.label} ({stem})", measure.unit, measure.meaning, measure.better])
    names = dict.fromkeys(score.baseline for score in report.scores if score.baseline)
    return figures, [[f"{baseline_label(n)} ({n})", BASELINES[n][1] if n in BASELINES else ""] for n in names]


def report_text(report: EventReport) -> str:
    """The report as a table for people."""
    lines = [f"{title(report)}: {span(report)}", "", *_grid(main_table(report, _IN_TEXT)), ""]
    compared = compared_table(report)
    if len(compared) > 1:
        lines += [f"{label}: {value}, to {best}" for label, best, value in compared[1:]]
    return "\n".join([*lines, *report.notes, LEGEND])


def short(value: float | None) -> str:
    """A figure in a few characters."""
    if value is None or not np.isfinite(value):
        return "–"
    if abs(value) >= 1e6:
        return f"{value:.4g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 0.01 or value == 0:
        return f"{value:.4f}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value:.3g}"


def _cell(value: float | None, figure: Figure) -> str:
    return f"{value:,.0f}" if figure.stem == "rows_with_onset" and value is not None else short(value)


def _label(figure: Figure, report: EventReport, *, bare: bool = False) -> str:
    measure = measure_of(figure.stem, report.subject)
    if figure.stem not in MEASURES:
        return measure.label
    ahead = "" if not figure.horizon else ("" if report.kind == "level" else "within ") + horizon_words(figure.horizon)
    parts = [measure.label, ahead + (" ahead" if report.kind == "level" and ahead else "")]
    text = ", ".join(part for part in (*parts, _AT_WORK if figure.is_moving else "") if part)
    if bare:
        return text[:1].upper() + text[1:]
    if figure.is_ratio:
        return f"{text}: model ÷ baseline {arrow(measure)}".rstrip()
    return f"{text} {arrow(measure)}".rstrip()


def _best(score: Score) -> str:
    return baseline_label(score.baseline)


def _is_compared(score: Score) -> bool:
    return score.metric.endswith("_ratio") or "_skill_" in score.metric


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]

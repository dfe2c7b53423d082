"""A backtest's report as text: what decides first, then every figure, the parts of the jobs and what is weak.

Here belong the lines that the command prints and the sentences that its page shares; not the words for single figures
(`models/backtest_words.py`) and not the page (`dashboards/backtest_page.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from models.backtest_parts import SIBLING_PART
from models.backtest_report import NO_BAD_END, BacktestReport, Score
from models.backtest_words import arrow, baseline_label, head_of, measure_of, part_words, time_words

LOW_COVERAGE = 0.70
WEAK = "WEAK"
LOW_ROWS = 300  # parts this large should be covered so often
TITLES = {
    "runtime": "Runtime at submit", "remaining": "Time left of running jobs", "wait": "Wait until the start",
    "job_failure": "Bad ends",
}  # fmt: skip
PART_MEASURES = ("coverage_80", "within_2x", "within_25pct", "mode_within_25pct", "within_60s", "pinball")
AFTER_MEASURES = ("within_25pct", "within_2x", "mae_s", "coverage_80", "q90_over_q10", "pinball_10_50_90")
LEGEND = "↓ lower is better, ↑ higher, → what it should be; ± is half a 95 % interval (blocks of user × day)"


def report_text(report: BacktestReport) -> str:
    """The report as tables for people."""
    lines = [f"{title(report)}: {span(report)}", verdict(report)]
    if report.best_after:
        lines += ["", "by how long a job had run:", *_grid(after_table(report))]
        lines += ["", f"{measure_of(report.primary).label} of each baseline:", *_grid(baseline_table(report))]
    lines += ["", *_grid(main_table(report))]
    parts = parts_table(report)
    if len(parts) > 1:
        more = ", all looks together; by how long they had run and by week in the page" if report.best_after else ""
        lines += ["", f"parts of the jobs{more}:", *_grid(parts)]
    lines += ["", *sentences(report), LEGEND]
    return "\n".join(lines)


def title(report: BacktestReport) -> str:
    return TITLES.get(report.task, report.task)


def span(report: BacktestReport) -> str:
    """How many jobs of which days, how often was fitted, and how often looked at jobs while they ran."""
    looks = f", {report.predictions.height:,} looks at them while they ran" if report.task == "remaining" else ""
    return f"{report.jobs:,} jobs submitted {report.start:%Y-%m-%d}–{report.end:%Y-%m-%d}, {report.refits} fits{looks}"


def verdict(report: BacktestReport) -> str:
    """The model against its best baseline, in a sentence."""
    ratio = report.find(f"{report.primary}_ratio", report.best_baseline)
    if ratio is None or NO_BAD_END in report.notes:
        return "Nothing could be judged"
    low, high = ratio.interval.low, ratio.interval.high
    word = "not clearly other than"
    if low is not None and high is not None and (high < 1 or low > 1):
        word = "better than" if high < 1 else "worse than"
    loss, best = measure_of(report.primary).label, baseline_label(report.best_baseline)
    return f"The model is {word} the best baseline ({best}): {loss} {ratio.interval} times as large"


def sentences(report: BacktestReport) -> list[str]:
    """What is weak, what cannot be better, and what a reader must know."""
    return [*low_parts(report), *_siblings(report), *report.notes]


def low_parts(report: BacktestReport) -> list[str]:
    """Parts of `LOW_ROWS` jobs or more whose 80 % interval holds fewer than `LOW_COVERAGE`, worst first."""
    large = [
        s for s in report.strata if (s.measure, s.baseline) == ("coverage_80", "") and s.part and s.count >= LOW_ROWS
    ]
    if not large:
        return []
    low = sorted((s for s in large if s.interval.value < LOW_COVERAGE), key=lambda s: s.interval.value)
    if not low:
        parts = "the one part" if len(large) == 1 else f"each of {len(large)} parts"
        return [f"the 80 % interval holds at least .70 in {parts} of {LOW_ROWS} jobs or more"]
    named = [f"{', '.join([part_words(s.part), *_after(s)])} {s.interval.value:.3f} of {s.count:,}" for s in low]
    chosen = " (parts by how long jobs ran are chosen by the outcome: the longest lie above their intervals)"
    why = chosen if any(s.part.startswith("ran_") for s in low) else ""
    return [
        f"{WEAK}: the 80 % interval holds under .70 in {len(low)} parts of {LOW_ROWS} or more: {'; '.join(named)}{why}"
    ]


def _siblings(report: BacktestReport) -> list[str]:
    told, model = (report.find("male", name, part=SIBLING_PART) for name in ("siblings", ""))
    if told is None or model is None:
        return []
    other = report.find("male", report.best_baseline, part=SIBLING_PART)
    beside = "" if other is None else f", {baseline_label(report.best_baseline)} {other.interval.value:.3f}"
    share = f"{told.count:,} jobs ({told.count / report.jobs:.0%})"
    return [
        f"floor: {share} have two or more identical ones submitted within a minute; told how those ran, which nobody "
        f"knows at submit, the log error would still be {short(told)}; there the model has {short(model)}{beside}"
    ]


def main_table(report: BacktestReport) -> list[list[str]]:
    """Head and rows: each figure of the model and of each baseline, on all that was judged."""
    scores = [s for s in report.scores if not (report.best_after and s.elapsed_s is not None)]
    names = list(dict.fromkeys(["", *(s.baseline for s in scores)]))
    rows = [["all looks together" if report.best_after else "", *(baseline_label(name) for name in names)]]
    found = {(s.metric, s.baseline): s for s in scores}
    ordered = dict.fromkeys(s.metric for s in sorted(scores, key=lambda s: (s.elapsed_s or 0, _is_ratio(s))))
    for metric in ordered:
        one = next(s for s in scores if s.metric == metric)
        rows.append([label_of(one), *(short(found.get((metric, name))) for name in names)])
    return rows


def after_table(report: BacktestReport) -> list[list[str]]:
    """Head and rows: by how long jobs had run, the model beside the best baseline of then."""
    primary = report.primary
    shown = [m for m in AFTER_MEASURES if any(s.measure == m for s in report.scores)]
    head = ["after", "jobs", head_of(primary), "best baseline", "its log error", "model ÷ it"]
    rows = [[*head, *(head_of(m) for m in shown)]]
    for at_s, best in report.best_after.items():
        own = report.find(primary, "", at_s)
        ratio = report.find(f"{primary}_ratio", best, at_s)
        cells = [time_words(at_s), f"{own.count:,}" if own else "–", short(own), baseline_label(best)]
        cells += [short(report.find(primary, best, at_s)), "–" if ratio is None else _bounds(ratio)]
        rows.append([*cells, *(short(report.find(m, "", at_s)) for m in shown)])
    return rows


def baseline_table(report: BacktestReport) -> list[list[str]]:
    """Head and rows: the primary loss of every baseline by how long jobs had run."""
    names = list(dict.fromkeys(s.baseline for s in report.scores if s.measure == report.primary))
    rows = [["after", *(baseline_label(name) for name in names)]]
    for at_s in report.best_after:
        found = [report.find(report.primary, name, at_s) for name in names]
        rows.append([time_words(at_s), *("–" if s is None else f"{s.interval.value:.3f}" for s in found)])
    return rows


def parts_table(report: BacktestReport, elapsed_s: float | None = None, *, with_weeks: bool = False) -> list[list[str]]:
    """Head and rows: the primary loss of model and best baseline in each part, and what else is told of the model."""
    mine = [s for s in report.strata if s.elapsed_s == elapsed_s and s.part != SIBLING_PART]
    shown = [m for m in PART_MEASURES if any(s.measure == m for s in mine)]
    best = report.best_baseline if elapsed_s is None else report.best_after[elapsed_s]
    what = "looks" if report.best_after and elapsed_s is None else "jobs"
    head = ["", what, head_of(report.primary), baseline_label(best), "model ÷ it"]
    rows = [[*head, *(head_of(m) for m in shown)]]
    for part in dict.fromkeys(s.part for s in mine):
        own = report.find(report.primary, "", elapsed_s, part)
        if own is None or (part.startswith("week_") and not with_weeks):
            continue
        ratio = report.find(f"{report.primary}_ratio", best, elapsed_s, part)
        cells = [
            part_words(part),
            f"{own.count:,}",
            short(own),
            short(report.find(report.primary, best, elapsed_s, part)),
        ]
        cells.append("–" if ratio is None else _bounds(ratio))
        rows.append([*cells, *(short(report.find(m, "", elapsed_s, part)) for m in shown)])
    return rows


def label_of(score: Score) -> str:
    """A figure's name in words, with the way that is better."""
    if _is_ratio(score):
        base = measure_of(score.measure.removesuffix("_ratio")).label
        label, way = f"{base}: model ÷ baseline", "↓"
    else:
        measure = measure_of(score.measure or score.metric)
        label, way = measure.label, arrow(measure)
    return f"{', '.join([label, *_after(score)])} {way}".rstrip()


def short(score: Score | None) -> str:
    """A figure in a few characters, with half of its interval."""
    if score is None:
        return "–"
    value, low, high = score.interval.value, score.interval.low, score.interval.high
    form = "{:,.0f}" if abs(value) >= 100 else "{:.1f}" if abs(value) >= 10 else "{:.3f}"
    return form.format(value) + ("" if low is None or high is None else "±" + form.format((high - low) / 2))


def _after(score: Score) -> list[str]:
    return [] if score.elapsed_s is None else [f"after {time_words(score.elapsed_s)}"]


def _bounds(score: Score) -> str:
    value, low, high = score.interval.value, score.interval.low, score.interval.high
    return f"{value:.3f}" + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


def _is_ratio(score: Score) -> bool:
    return score.metric.endswith("_ratio")


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under each other, the first column to the left."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]

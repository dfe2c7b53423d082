"""Figures, baselines and parts of a backtest in words: what a reader needs to know to believe or doubt a number.

Here belong names and meanings; not the figures themselves (`models/backtest_report.py`) and no page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Measure:
    """What a figure is.

    Attributes:
        label: Name in a table.
        unit: Of its values.
        meaning: What it says, in one sentence.
        better: `lower`, `higher`, or what it should be.
        head: Name where there is little room; empty: the label.
    """

    label: str
    unit: str
    meaning: str
    better: str
    head: str = ""


_ODDS = "squared error of the stated probability, mean; 0.25 is a coin's"
MEASURES: dict[str, Measure] = {
    "male": Measure(
        "log error of the median",
        "ln",
        "mean |ln(forecast ÷ actual)| (MALE): 0.69 is a factor of 2, 1.10 of 3",
        "lower",
        "log error",
    ),
    "within_25pct": Measure(
        "median within 25 %", "share", "of forecasts, off by a quarter of the actual at most", "higher", "within 25 %"
    ),
    "within_2x": Measure(
        "median within a factor of 2",
        "share",
        "of forecasts, between half and double the actual",
        "higher",
        "within 2×",
    ),
    "mae_s": Measure(
        "error of the median, s", "s", "mean |forecast − actual|; the longest jobs make most of it", "lower", "error, s"
    ),
    "coverage_80": Measure(
        "inside the 10–90 % interval",
        "share",
        "of outcomes inside the interval meant to hold 80 % of them",
        "0.80",
        "inside 80 %",
    ),
    "covered_share_80": Measure(
        "inside 10–90 %, ties shared",
        "share",
        "of outcomes inside it; one that equals its ends counts by the share the quantiles give it",
        "0.80",
    ),
    "pinball": Measure(
        "log pinball, all quantiles",
        "ln",
        "how well the quantiles 5–95 % fit, in ln(seconds); counts width and misses",
        "lower",
        "pinball",
    ),
    "pinball_10_50_90": Measure(
        "log pinball at 10, 50, 90 %",
        "ln",
        "the same of three quantiles, which the empirical baselines have too",
        "lower",
        "pinball 10, 50, 90 %",
    ),
    "q90_over_q10": Measure(
        "90 % ÷ 10 % quantile, median",
        "ratio",
        "width of the interval: its upper end over its lower",
        "lower at 0.80 inside",
        "90 % ÷ 10 %",
    ),
    "mode_within_25pct": Measure(
        "likeliest within 25 %",
        "share",
        "the same as of the median, for the point made for it (mode_s)",
        "higher",
        "likeliest within 25 %",
    ),
    "remaining_male": Measure(
        "log error of time left", "ln", "log error of the median time left, of jobs still running by then", "lower"
    ),
    "within_60s": Measure(
        "likeliest within a minute",
        "share",
        "of waits, at most 60 s off the point made for it (mode_s)",
        "higher",
        "likeliest within 1 min",
    ),
    "mae_log1p": Measure(
        "error of ln(1 + wait)", "ln", "mean, of the median wait; a wait of 0 s counts as such", "lower"
    ),
    "below_q95": Measure("under the 95 % bound", "share", "of waits that ended by the 95 % quantile", "0.95"),
    "brier_60s": Measure("P(start within 1 min), Brier", "prob²", _ODDS, "lower"),
    "brier_600s": Measure("P(start within 10 min), Brier", "prob²", _ODDS, "lower"),
    "brier_3600s": Measure("P(start within 1 h), Brier", "prob²", _ODDS, "lower"),
    "churn_move_s": Measure(
        "start moves by, s", "s", "median move of a waiting job's forecast start in ten minutes", "lower"
    ),
    "churn_over_10min": Measure("moves over 10 min", "share", "of those moves", "lower"),
    "churn_drift_s": Measure("drift of the start, s", "s", "median of those moves with their sign; + is later", "0"),
    "brier": Measure("P(bad end), Brier", "prob²", _ODDS, "lower", "Brier"),
    "brier_timeout": Measure("P(timeout), Brier", "prob²", _ODDS, "lower"),
    "brier_node_failure": Measure("P(node failure), Brier", "prob²", _ODDS, "lower"),
    "brier_out_of_memory": Measure("P(out of memory), Brier", "prob²", _ODDS, "lower"),
    "brier_fail": Measure("P(bad end) while running, Brier", "prob²", _ODDS, "lower"),
    "auroc": Measure(
        "ranking (AUROC)",
        "share",
        "of pairs of a job with and one without the event (bad end; wait over 1 min) ranked rightly",
        "higher",
    ),
    "auroc_fail": Measure(
        "ranking while running (AUROC)",
        "share",
        "of pairs of a job with and one without the event (bad end; wait over 1 min) ranked rightly",
        "higher",
    ),
    "auroc_new_users": Measure(
        "ranking, users never seen", "share", "AUROC among jobs of users without history", "higher"
    ),
    "ece": Measure("calibration error (ECE)", "prob", "mean |stated − observed| over ten bins of probability", "lower"),
    "ece_floor": Measure(
        "ECE of odds that hold exactly",
        "prob",
        "what chance alone would show on these jobs: an ECE no larger is no fault",
        "–",
    ),
}

# name: (label in a table, what it says)
_RUNTIME = {
    "limit": ("time limit", "the limit asked for"),
    "last2_user": ("last 2, user", "mean of the user's last two runs"),
    "last2_key": ("last 2, key", "mean of the last two runs of the key (user, size, limit)"),
    "median_user": ("median, user", "median of the user's last 20 runs"),
    "median_key": ("median, key", "median of the key's last 20 runs"),
    "quantiles_key": (
        "quantiles, key",
        "10, 50 and 90 % of the key's last 20 runs, else the user's, else all",
    ),
}
BASELINES: dict[str, tuple[str, str]] = {
    **_RUNTIME,
    "submit_forecast": ("at submit", "the runtime forecast of the submit, raised by Tsafrir's ladder when it runs out"),
    "tsafrir": ("Tsafrir", "mean of the user's last two runs, raised by 1, 5, 15, 30 min, 1 h … when it runs out"),
    "lindy": ("Lindy", "as much again as has elapsed, up to the limit"),
    "conditional_user": ("survivors, user", "what those of the user's newest 100 runs had left that lasted as long"),
    "conditional_key": ("survivors, key", "the same of the key's runs, else the user's"),
    "zero": ("no wait", "starts at once"),
    "last": ("last wait", "the newest wait of any job"),
    "same_size_last": ("same size", "the newest wait of a job of the same size"),
    "recent_waits": ("recent waits", "quantiles of the newest waits of like jobs"),
    "rolling_rate": ("user × spec", "share of bad ends among the newest jobs of the same user and request"),
    "user_rate": ("user's rate", "share of bad ends among the user's newest jobs"),
    "survivor_rate": ("survivors", "share of bad ends among jobs of the key that had run as long"),
    "siblings": ("told siblings", "told the median of identical jobs submitted within a minute"),
}

PARTS = {
    "key": "key seen before",
    "user": "only the user seen before",
    "new": "user never seen before",
    "gpu": "jobs with GPUs",
    "size_1": "1 wide (GPUs, else CPUs, else nodes)",
    "size_2_8": "2–8 wide",
    "size_9_64": "9–64 wide",
    "size_over_64": "over 64 wide",
    "limit_upto_1h": "limit up to 1 h",
    "limit_1h_12h": "limit of 1–12 h",
    "limit_over_12h": "limit over 12 h",
    "limit_none": "no limit",
    "ran_under_10m": "ran under 10 min",
    "ran_10m_1h": "ran 10 min to 1 h",
    "ran_1h_12h": "ran 1–12 h",
    "ran_over_12h": "ran over 12 h",
    "siblings": "with identical jobs within a minute",
}


def measure_of(name: str) -> Measure:
    """A figure in words; one taken after so many seconds says so, an unknown one goes by its own name."""
    if name in MEASURES:
        return MEASURES[name]
    stem, _, after = name.rpartition("_")
    if stem in MEASURES and after.endswith("s") and after[:-1].isdigit():
        known = MEASURES[stem]
        return replace(known, label=f"{known.label}, after {time_words(float(after[:-1]))}")
    return Measure(name.replace("_", " "), "", "", "–")


def baseline_label(name: str) -> str:
    """Head of a column: `model` for the model itself, an unknown baseline by its own name."""
    return BASELINES[name][0] if name in BASELINES else name.replace("_", " ") or "model"


def part_words(name: str) -> str:
    """A part of the jobs in words."""
    return f"week of {name.removeprefix('week_')}" if name.startswith("week_") else PARTS.get(name, name)


def time_words(seconds: float) -> str:
    """60 → `1 min`, 7200 → `2 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3_600 else f"{seconds / 3_600:.0f} h"


def head_of(name: str) -> str:
    """Head of a column: as short as can be, with the way that is better."""
    measure = measure_of(name)
    return f"{measure.head or measure.label} {arrow(measure)}".rstrip()


def arrow(measure: Measure) -> str:
    """Which way is better: ↓, ↑ or the value it should have."""
    return {"lower": "↓", "higher": "↑", "–": "", "lower at 0.80 inside": "↓"}.get(
        measure.better, f"→ {measure.better}"
    )


def glossary(measures: Iterable[str], baselines: Iterable[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the two tables of a report: name, label, unit, meaning and better of each figure, and each baseline's.

    Args:
        measures: Names of the figures shown, in order.
        baselines: Names of the baselines shown.
    """
    figures = [
        [f"{m.label} ({name})", m.unit, m.meaning, m.better] for name, m in ((n, measure_of(n)) for n in measures)
    ]
    stands = [[f"{baseline_label(n)} ({n})", BASELINES[n][1] if n in BASELINES else ""] for n in baselines if n]
    return figures, stands

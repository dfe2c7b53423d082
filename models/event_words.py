"""Figures, baselines and quantities of backtests of events and levels in words, each with its unit and its meaning.

Here belong names and meanings; not the figures (`models/event_scores.py`, `models/level_backtest.py`), not their tables
(`models/event_text.py`) and no page. Words for backtests of jobs stand in `models/backtest_words.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from features.vocabulary import COLUMNS
from models.backtest_words import Measure

GOOD_COVERAGE = "0.80"
MEASURES: dict[str, Measure] = {
    "average_precision": Measure(
        "average precision", "share", "area under precision over recall; a forecast that knows nothing has the base "
        "rate", "higher",
    ),
    "auc": Measure(
        "ranking (AUC)", "share", "of pairs of a row ahead of an onset and one that is not, ranked rightly", "higher"
    ),
    "brier": Measure("squared error of P (Brier)", "prob²", "mean (said − happened)²", "lower"),
    "brier_skill": Measure(
        "skill: 1 − Brier ÷ the baseline's", "share", "0: no better than the baseline, 1: always right", "higher"
    ),
    "log_loss": Measure("log loss of P", "ln", "mean −ln(probability given to what came)", "lower"),
    "mean_p": Measure("mean P said", "share", "should be the share of rows that an onset followed", "–"),
    "base_rate": Measure("rows that an onset followed", "share", "how often it came within the horizon", "–"),
    "rows_with_onset": Measure("rows that an onset followed, number", "rows", "several rows lie ahead of one onset",
                               "–"),
    "mae": Measure("error of the point", "", "mean |forecast − what came|", "lower"),
    "rmse": Measure("error of the point, large ones counting more", "", "√ mean (forecast − what came)²", "lower"),
    "pinball": Measure("pinball at 10, 50, 90 %", "", "how well the quantiles fit: width and misses", "lower"),
    "coverage_80pct": Measure(
        "inside the 10–90 % interval", "share", "of outcomes inside the interval meant to hold 80 % of them",
        GOOD_COVERAGE,
    ),
    "mae_gpus": Measure("error of the fewest idle, GPUs", "GPUs", "mean |median − what came|", "lower"),
    "stays_rate": Measure("8 GPUs stayed idle", "share", "of windows that began with 8 or more", "–"),
    "offered": Measure("windows offered", "share", "of those that began with 8 or more, at equal weight", "higher"),
    "offered_of_idle": Measure("idle GPU-minutes offered", "share", "windows weighed by their idle GPUs", "higher"),
    "breached": Measure("offered windows that broke", "share", "in which fewer than 8 were idle at a minute", "lower"),
    "top_5pct_share_of_faults": Measure(
        "faults on the 5 % of nodes said to be worst", "share", "of the faults of the weeks that followed", "higher"
    ),
}  # fmt: skip
_IN_UNIT_OF_QUANTITY = ("mae", "rmse", "pinball")

# name: (head of a column, what it says)
BASELINES: dict[str, tuple[str, str]] = {
    "persistence": ("stays as it is", "nothing changes: the newest value, or the state of now"),
    "least_5min": ("least of 5 min", "the fewest idle in the last 5 minutes"),
    "least_15min": ("least of 15 min", "the fewest idle in the last 15 minutes"),
    "least_60min": ("least of 60 min", "the fewest idle in the last hour"),
    "idle_only": ("idle alone", "how many are idle now, read through isotonic regression of the past"),
    "recent_mean": ("recent mean", "mean of the newest samples"),
    "ewma": ("EWMA", "mean of the past, weighed down with age"),
    "predict_linear": ("straight line", "a line through the newest minutes, carried on, as PromQL's predict_linear"),
    "level_threshold": ("level", "how near to the limit it stands"),
    "recent_rate": ("recent rate", "how often it came lately"),
    "climatology": ("base rate", "how often it comes at all"),
    "recent_onset_rate": ("recent onsets", "how often it came lately, weighed down with age"),
    "since_last_short": ("since last short", "how long ago the queue was last short"),
    "since_last_onset": ("since last onset", "how long ago it last came"),
    "repeat_offender": ("repeat offender", "rate of nodes with as many faults in the last 30 days"),
    "own_rate": ("own rate", "gamma–Poisson: the node's own faults so far, drawn towards the fleet's rate"),
    "ceiling": ("in hindsight", "best choice among nodes that had faulted before, knowing what came"),
    "ewma_z_score": ("EWMA z-score", "how far a rank stands from its own past"),
    "last_step_over_gang": ("last step ÷ gang", "the newest step against the gang's median"),
    "slow_share_so_far": ("slow so far", "share of the rank's steps that were slow"),
}

# Units of the registry that people read in others: (unit, factor).
_SHOWN = {"bytes": ("GB", 1e-9), "bytes/s": ("GB/s", 1e-9), "Hz": ("MHz", 1e-6), "J": ("kJ", 1e-3)}
_SUBJECTS = {
    "thermal_throttle": "thermal throttle", "nvlink_saturation": "NVLink saturation",
    "memory_exhaustion": "device memory running out", "power_throttle": "power throttle",
    "fabric_congestion": "congested fabric", "host_memory": "host memory running out", "straggler": "slow ranks",
    "shortage": "queue runs short", "node faults": "node faults",
}  # fmt: skip
_NAME = re.compile(r"(?P<stem>[a-z0-9_]+?)_(?P<horizon>\d+(?:s|min|h|d))(?P<moving>_moving)?(?P<ratio>_ratio)?")
_HORIZON = re.compile(r"(\d+)(s|min|h|d)")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure's name taken apart.

    Attributes:
        stem: Of `MEASURES`, or the whole name where that is not known.
        horizon: As `60s`; empty where there is none.
        is_moving: Of GPUs at work alone.
        is_ratio: The model's ÷ the baseline's.
    """

    stem: str
    horizon: str
    is_moving: bool
    is_ratio: bool


def figure_of(metric: str) -> Figure:
    """A figure by its name in `report.json`, as `mae_60s_moving_ratio`."""
    found = _NAME.fullmatch(metric)
    if found is None:
        return Figure(metric, "", False, False)
    return Figure(found["stem"], found["horizon"], bool(found["moving"]), bool(found["ratio"]))


def measure_of(stem: str, subject: str = "") -> Measure:
    """What a figure is; one that goes by the quantity has its unit, an unknown one goes by its own name."""
    known = MEASURES.get(stem)
    if known is None:
        return Measure(stem.replace("_", " "), "", "", "–")
    if stem in _IN_UNIT_OF_QUANTITY:
        unit = shown_unit(subject)[0]
        return Measure(f"{known.label}, {unit}" if unit else known.label, unit, known.meaning, known.better)
    return known


def horizon_words(horizon: str) -> str:
    """`60s` → `60 s`."""
    found = _HORIZON.fullmatch(horizon)
    return horizon if found is None else f"{found[1]} {found[2]}"


def shown_unit(subject: str) -> tuple[str, float]:
    """Unit that people read a quantity in, and what its values are to be multiplied by; `("", 1)` of no quantity."""
    if subject not in COLUMNS:
        return "", 1.0
    unit = COLUMNS[subject].unit
    return _SHOWN.get(unit, (unit, 1.0))


def scale_of(stem: str, subject: str) -> float:
    """What values of a figure are multiplied by to be shown."""
    return shown_unit(subject)[1] if stem in _IN_UNIT_OF_QUANTITY else 1.0


def subject_words(subject: str) -> str:
    """A class or quantity in words: `Core temperature`, `Thermal throttle`."""
    text = COLUMNS[subject].description if subject in COLUMNS else _SUBJECTS.get(subject, subject.replace("_", " "))
    return text[:1].upper() + text[1:]


def baseline_label(name: str) -> str:
    """Head of a column: `model` for the model itself, an unknown baseline by its own name."""
    return BASELINES[name][0] if name in BASELINES else name.replace("_", " ") or "model"

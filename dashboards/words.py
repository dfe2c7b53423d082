"""Numbers, durations and times in words: each with its unit, rounded to what a reader can use.

Here belongs text alone; no components and no figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

NOTHING = "–"

STATE_WORDS = {
    "good": "busy at full speed",
    "throttled": "busy but throttled",
    "unproductive": "allocated, not busy",
    "unknown": "allocated, activity unknown",
    "idle": "free",
    "unreported": "not reporting",
    "out": "down or drained",
    "absent": "down, drained or not reporting",
}

CLASS_WORDS = {
    "thermal_throttle": "Thermal throttle",
    "power_throttle": "Power throttle",
    "nvlink_saturation": "NVLink saturation",
    "memory_exhaustion": "Memory exhaustion",
    "straggler": "Straggler",
    "host_memory": "Host memory",
    "fabric_congestion": "Fabric congestion",
    "shortage": "Shortage of GPUs",
}

ACTION_WORDS = {
    "reserve": "Reserve spare nodes",
    "retry_elsewhere": "Retry elsewhere",
    "throttle": "Throttle the job",
    "drain_after_job": "Drain after the job",
    "none": "None",
}


def percent(value: float | None, digits: int = 0) -> str:
    """0.613 → `61 %`. Values that would round to 0 or 100 without being it keep a `<` or `>`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    step = 10.0**-digits
    shown = value * 100
    if 0 < shown < step / 2:
        return f"<{step:.{digits}f} %"
    if 100 - step / 2 < shown < 100:
        return f">{100 - step:.{digits}f} %"
    return f"{shown:.{digits}f} %"


def points(value: float) -> str:
    """Difference of two shares: 0.021 → `+2.1 points`."""
    return f"{value * 100:+.1f} points".replace("-", "−")


def number(value: float | None, digits: int = 0) -> str:
    """12345.6 → `12,346`; a whole number never shows decimals."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if digits and abs(value - round(value)) < 0.5 * 10.0**-digits:
        digits = 0
    return f"{value:,.{digits}f}"


def gpus(value: float | None) -> str:
    """12.34 → `12.3 GPUs`, 1 → `1 GPU`."""
    text = number(value, 1 if value is not None and value < 100 else 0)
    return f"{text} {'GPU' if text == '1' else 'GPUs'}"


def count(value: int, noun: str, plural: str | None = None) -> str:
    """3, job → `3 jobs`."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def duration(seconds: float | None) -> str:
    """Two units at most: 45 → `45 s`, 754 → `12 min 34 s`, 7300 → `2 h 1 min`, 200000 → `2 d 7 h`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"
    if whole < 86_400:
        hours, rest = divmod(whole // 60, 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, rest = divmod(whole // 3600, 24)
    return f"{days} d {rest} h" if rest else f"{days} d"


def clock(moment: datetime | None) -> str:
    """Time of day with its zone: `14:03:05 UTC`."""
    return NOTHING if moment is None else f"{moment:%H:%M:%S} UTC"


def stamp(moment: datetime | None) -> str:
    """Date and time with zone: `2026-11-30 14:03:05 UTC`."""
    return NOTHING if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def names(values: Sequence[str], at_most: int = 4) -> str:
    """`n1, n2, n3 and 5 more`."""
    shown = ", ".join(values[:at_most])
    more = len(values) - at_most
    return f"{shown} and {more:,} more" if more > 0 else shown


def sentence(text: str) -> str:
    """A message as a sentence: a capital first and a full stop last; an address keeps its spelling."""
    if not text:
        return ""
    first = text.split(maxsplit=1)[0]
    start = text if "/" in first or ":" in first else text[:1].upper() + text[1:]
    return start if start[-1] in ".!?…" else f"{start}."


def class_words(name: str) -> str:
    """A bottleneck class in words; an unknown one by its own name."""
    return CLASS_WORDS.get(name, name.replace("_", " ").capitalize())


def action_words(name: str) -> str:
    return ACTION_WORDS.get(name, name.replace("_", " ").capitalize())


def is_baseline(model_version: str | None) -> bool:
    """The forecast comes from a rule, not from a trained model."""
    return bool(model_version) and str(model_version).startswith("baseline")

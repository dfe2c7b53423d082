"""How messages are worded: numbers with their nouns, a cluster's name once, reasons of cleaning in words.

Only words; nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Sequence

from features.cleaning import REASONS

# What a reason counts, where it is not values.
_ROWS = {"no_key", "bad_time", "clock_skew", "duplicate", "several_jobs", "late_reading", "gap"}
_OF_JOBS = {
    "no_submit_time": "no submission time; left out",
    "pending_with_start": "pending, yet with a start time; without it now",
    "live_with_end": "not ended, yet with an end time; without it now",
    "end_before_start": "an end before the start; without an end now",
    "end_before_submit": "an end before the submission; without an end now",
}


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 sample`, `2,000 samples`, `3 boxes` where the plural is given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def lacking(columns: Sequence[str]) -> str:
    """Columns that are not there: `1 column missing: node`."""
    return f"{counted(len(columns), 'column')} missing: {', '.join(columns)}"


def without_name(name: str, text: str) -> str:
    """A message without the cluster's name before it, for a line that begins with that name."""
    while text.startswith(f"{name}: "):
        text = text.removeprefix(f"{name}: ")
    return text


def with_name(name: str, text: str) -> str:
    """A message with the cluster's name before it, once."""
    return f"{name}: {without_name(name, text)}"


def reason_in_words(reason: str) -> str:
    """A reason of cleaning or of jobs, as a clause: `exactly 0 where 0 cannot be, as a memory at 0 °C`."""
    text = REASONS.get(reason) or _OF_JOBS.get(reason) or reason.replace("_", " ")
    first = text.split(" ", 1)[0]
    is_name = first[1:] != first[1:].lower()  # NaN, MIG
    return (text if is_name else text[:1].lower() + text[1:]).rstrip(".")


def finding(reason: str, count: int) -> str:
    """One finding: `3 values: physically impossible, as 345 °C or a negative rate`."""
    if reason == "no_samples":
        noun = "window"
    elif reason == "partial":
        noun = "warning"
    else:
        noun = "row" if reason in _ROWS else "job" if reason in _OF_JOBS else "value"
    return f"{counted(count, noun)}: {reason_in_words(reason)}"

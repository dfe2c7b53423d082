"""Contributions to a runtime's median in operators' words: how far it is from usual, and which facts made it so.

Every fact is read off the features the forecast was made from, so that no reason says more than the forecaster knew.
Here belong the words alone; not the arithmetic (`models/contributions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.jobs import FEATURES, RECENT
from models.contributions import GROUPS, Contributions

MOST_REASONS = 4  # the comparison with what is usual, and the groups that move it most
MOST_CHARACTERS = 160  # of one reason
_USER_CHARACTERS = 32
_LEAST = float(np.log(1.1))  # a factor nearer to 1 is not told
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_KEPT = 8_192  # texts: jobs of an array ask for the same
_UNITS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"))

_AT = {name: k for k, name in enumerate(FEATURES)}


class _Columns(dict[str, list[float]]):
    """Columns of a matrix as lists, made when first asked for: a reason needs few of them."""

    def __init__(self, X: NDArray[Any]) -> None:
        super().__init__()
        self._X = X

    def __missing__(self, name: str) -> list[float]:
        self[name] = values = self._X[:, _AT[name]].astype(np.float64).tolist()
        return values


class Facts:
    """Features of one job by name."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: _Columns, row: int) -> None:
        self._columns, self._row = columns, row

    def __getitem__(self, name: str) -> float:
        return self._columns[name][self._row]


def in_words(contributions: Contributions, X: NDArray[Any], users: Sequence[str | None]) -> list[tuple[str, ...]]:
    """Reasons of each job's runtime, at most `MOST_REASONS` of at most `MOST_CHARACTERS`; no semicolon in any.

    Args:
        contributions: Of n jobs.
        X: Features the forecast was made from, shape (n, len(FEATURES)).
        users: Who submitted each.
    """
    order = np.argsort(-np.abs(contributions.parts), axis=1, kind="stable")[:, : MOST_REASONS - 1].tolist()
    parts, usual_s = contributions.parts.tolist(), np.exp(contributions.usual_log).tolist()
    moved = contributions.parts.sum(axis=1).tolist()
    columns, plain = _Columns(np.asarray(X)), {user: _plain(user) for user in set(users)}
    out = []
    for i, groups in enumerate(order):
        facts, user, mine = Facts(columns, i), plain[users[i]], parts[i]
        if math.isnan(facts["all_median"]):  # what is usual here is not known, and so is what differs from it
            out.append(("no run has ended here yet",))
            continue
        told = [_headline(moved[i], usual_s[i])]
        for group in groups:
            if abs(mine[group]) >= _LEAST:
                told.append(f"×{_number(math.exp(mine[group]))}: {_FACTS[GROUPS[group]](facts, user)}")
        out.append(tuple(text[:MOST_CHARACTERS] for text in told))
    return out


def duration_words(seconds: float) -> str:
    """A duration in its largest fitting unit: `45 s`, `3 min`, `2.5 h`, `3.2 days`."""
    for size, unit in _UNITS:
        if seconds >= 1.5 * size or (unit != "days" and seconds >= size):
            return f"{_number(seconds / size)} {unit}"
    return f"{seconds:.0f} s"


def _headline(moved_log: float, usual_s: float) -> str:
    factor = _number(math.exp(abs(moved_log)))
    if abs(moved_log) < _LEAST:
        return f"about as long as usual here ({duration_words(usual_s)})"
    return f"about {factor}× {'longer' if moved_log > 0 else 'shorter'} than usual here ({duration_words(usual_s)})"


def _number(value: float) -> str:
    """Two digits that count, and no zeros after the point: `0.42`, `2.1`, `3`, `120`."""
    digits = 0 if value >= 9.95 else 1 if value >= 0.995 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def _plain(user: str | None) -> str:
    kept = "".join(c if c.isprintable() and c != ";" else "?" for c in user or "")
    kept = kept[:_USER_CHARACTERS] or "this user"
    return f"user {kept}" if kept.isdigit() else kept


def _is_known(value: float) -> bool:
    return value == value


def _count(value_log1p: float) -> int:
    return round(math.expm1(value_log1p)) if _is_known(value_log1p) else 0


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def _newest(facts: Facts, group: str, whose: str) -> str:
    """Of a group's newest runs: how many, their median, and the newest where it differs."""
    return _newest_words(facts[f"{group}_count"], facts[f"{group}_last1"], facts[f"{group}_median"], whose)


@lru_cache(_KEPT)
def _newest_words(count_log1p: float, last_log: float, median_log: float, whose: str) -> str:
    seen = min(_count(count_log1p), RECENT)
    last = math.exp(last_log)
    if seen == 1:
        return f"the last run {whose} took {duration_words(last)}"
    text = f"the last {seen} runs {whose} took {duration_words(math.exp(median_log))}"
    if abs(median_log - last_log) >= _LEAST:
        text += f", the newest {duration_words(last)}"
    return text


def _request(facts: Facts, _: str) -> str:
    return _request_words(facts["asked_gpus"], facts["asked_cpus"], facts["asked_nodes"], facts["asked_limit"])


@lru_cache(_KEPT)
def _request_words(gpus_log1p: float, cpus_log1p: float, nodes_log1p: float, limit_log: float) -> str:
    gpus, nodes = _count(gpus_log1p), _count(nodes_log1p)
    sizes = [(gpus, "GPU") if gpus else (_count(cpus_log1p), "CPU"), (nodes, "node")]
    asked = [_counted(number, noun) for number, noun in sizes if number]
    limit = f"up to {duration_words(math.exp(limit_log))}" if _is_known(limit_log) else "no limit"
    return f"asks for {' on '.join(asked) or 'no known size'}, {limit}"


def _same(facts: Facts, user: str) -> str:
    if _count(facts["family_count"]):
        return _newest(facts, "family", f"of this name by {user}")
    if _count(facts["key_count"]):
        return _newest(facts, "key", f"of this size and limit by {user}")
    return f"no run of this size and limit by {user} has ended yet"


def _user(facts: Facts, user: str) -> str:
    return _newest(facts, "user", f"by {user}") if _count(facts["user_count"]) else f"no run by {user} has ended yet"


def _alike(facts: Facts, user: str) -> str:
    if not _is_known(facts["kernel_q45"]):
        return f"no run by {user} has ended that it could be compared with"
    low, high = (duration_words(math.exp(facts[f"kernel_q{level}"])) for level in ("25", "75"))
    middle = duration_words(math.exp((facts["kernel_q45"] + facts["kernel_q55"]) / 2))
    spread = "" if low == high else f", half of them between {low} and {high}"
    return f"the runs by {user} most like it took {middle}{spread}"


def _siblings(facts: Facts, user: str) -> str:
    for group, which in (("key", " of this size and limit"), ("user", "")):
        running = facts[f"started_{group}_running"]
        if running > 0:
            longest = duration_words(math.exp(facts[f"started_{group}_elapsed_high"]))
            has = "has run" if running == 1 else "have run, the longest"
            return f"{_counted(round(running), 'job')}{which} by {user} {has} for {longest} and not ended"
    return f"no other job by {user} is running"


def _array(facts: Facts, _: str) -> str:
    running = facts["array_running"]
    running = round(running) if _is_known(running) else 0
    going = ""
    if running:
        longest = duration_words(math.exp(facts["array_elapsed_high"]))
        going = f"{_counted(running, 'task')} of its array {'has' if running == 1 else 'have'} run for up to {longest}"
    if not _count(facts["array_count"]):
        return f"{going}, none has ended" if going else "a task of an array of which none has ended yet"
    return _newest(facts, "array", "of its array") + (f", {going}" if going else "")


def _kind(facts: Facts, user: str) -> str:
    if _count(facts["kind_count"]):
        return _newest(facts, "kind", f"of this size on such nodes by {user}")
    return f"no run of this size on such nodes by {user} has ended yet"


def _account(facts: Facts, user: str) -> str:
    if _is_known(facts["own_account_median"]):
        newest, median = (duration_words(math.exp(facts[f"own_account_{name}"])) for name in ("last1", "median"))
        return f"runs by {user} for this account took {median}, the newest {newest}"
    if _is_known(facts["account_median"]):
        return f"runs for this account took {duration_words(math.exp(facts['account_median']))}"
    return "no run for this account has ended yet"


def _others(facts: Facts, _: str) -> str:
    for group, whose in (("shape", "of this size and limit by anyone"), ("queue", "in this queue")):
        if _count(facts[f"{group}_count"]):
            return _newest(facts, group, whose)
    return _newest(facts, "all", "by anyone") if _count(facts["all_count"]) else "no run has ended here yet"


def _chain(facts: Facts, user: str) -> str:
    if facts["chain_bad_run"] > 0:
        ended = round(facts["chain_bad_run"])
        return f"the last {'run' if ended == 1 else f'{ended} runs'} by {user} ended badly"
    submits, seen = _count(facts["chain_submits_1h"]), min(_count(facts["user_count"]), RECENT)
    if submits:
        return f"{user} submitted {_counted(submits, 'job')} in the hour before"
    bad = round(facts["user_bad"] * seen) if _is_known(facts["user_bad"]) else 0
    return f"{bad} of the last {seen} runs by {user} ended badly, and none was submitted in the hour before"


def _calendar(facts: Facts, _: str) -> str:
    minutes = round(facts["asked_hour"] * 60) % 1440
    return f"submitted on {_DAYS[int(facts['asked_weekday']) % 7]} at {minutes // 60:02d}:{minutes % 60:02d} UTC"


def _middle(_: Facts, __: str) -> str:
    return "what may come of it is spread widely, which shifts the middle"


def _correction(_: Facts, __: str) -> str:
    return "correction learnt from how forecasts of ended jobs were off"


_FACTS: dict[str, Callable[[Facts, str], str]] = {
    "request": _request, "same": _same, "user": _user, "alike": _alike, "siblings": _siblings, "array": _array,
    "kind": _kind, "account": _account, "others": _others, "chain": _chain, "calendar": _calendar,
    "middle": _middle, "correction": _correction,
}  # fmt: skip

"""Summaries of the newest past runtimes of each job asked about, NaN where there are none.

Here belong quantiles and means of the rows of small matrices, and what is read of a group's newest ended and started
jobs; not which jobs those are (`features/job_index.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEWEST_RUNS = ("last", "before", "median", "mean", "spread", "low", "high", "bad", "same")
STARTED_RUNS = ("q25", "q50", "q75", "running", "elapsed_low", "elapsed_high")
_SAME = 0.05  # runtimes nearer than this, in ln, are the same
_ROUNDING = 1e-12


def row_quantile(values: Floats, q: float) -> Floats:
    """Quantile of each row's filled entries (linear between neighbours), NaN for an empty row; shape (n, k) → (n,)."""
    return row_quantiles(values, (q,))[0]


def row_quantiles(values: Floats, qs: Sequence[float]) -> list[Floats]:
    """`row_quantile` at several levels, each of shape (n,)."""
    ordered = np.sort(values, axis=1)  # NaN goes last
    filled = np.sum(~np.isnan(ordered), axis=1)
    rows, last = np.arange(len(values)), np.maximum(filled - 1, 0)
    found = []
    for q in qs:
        position = q * last
        low = np.floor(position).astype(np.int64)
        lower, upper = ordered[rows, low], ordered[rows, np.minimum(low + 1, last)]
        found.append(lower + (position - low) * (upper - lower))
    return found


def row_mean(values: Floats) -> Floats:
    """Mean of each row's filled entries, NaN for an empty row."""
    is_filled = ~np.isnan(values)
    total = np.sum(is_filled, axis=1)
    mass = np.sum(np.where(is_filled, values, 0.0), axis=1)
    return np.divide(mass, total, out=np.full(len(values), np.nan), where=total > 0)


def newest_runs(
    rows: Ints, first: Ints, last: Ints, log_runtime: Floats, is_bad: Bools, looked_at: int
) -> tuple[Floats, Ints]:
    """How long the newest ended jobs of a group ran.

    Args:
        rows: Rows of the history, group by group in order of their ends.
        first: Where each question's group begins in them, shape (n,).
        last: One past its newest job that had ended, shape (n,).
        log_runtime: ln(seconds) of the history's rows.
        is_bad: Bad end of the history's rows.
        looked_at: How many of the newest are looked at.

    Returns:
        Columns `NEWEST_RUNS`, shape (n, 9), in ln(seconds): the newest and the one before, median, mean, standard
        deviation, 10th and 90th percent, share of bad ends, share of those as long as the newest; and the row of the
        newest, shape (n,), 0 where there is none.
    """
    out, newest = np.full((len(first), len(NEWEST_RUNS)), np.nan), np.zeros(len(first), dtype=np.int64)
    _newest_runs(rows, first, last, log_runtime, is_bad, looked_at, newest, out)
    return out, newest


def started_runs(
    rows: Ints, first: Ints, last: Ints, own: Ints, moments: Ints, start: Ints, end: Ints, looked_at: int
) -> Floats:
    """How long the newest started jobs of a group run, those that still do counted as censored.

    Args:
        rows: Rows of the history, group by group in order of their starts.
        first: Where each question's group begins in them, shape (n,).
        last: One past its newest job that had started, shape (n,).
        own: Row of the job asked about, which does not count; shape (n,).
        moments: Moment of each question, µs, shape (n,).
        start: Starts of the history's rows, µs.
        end: Their ends.
        looked_at: How many of the newest are looked at.

    Returns:
        Columns `STARTED_RUNS`, shape (n, 6): Kaplan–Meier quantiles in ln(seconds), how many run, and the shortest and
        longest that those have.
    """
    elapsed_s = np.full((len(first), looked_at), np.nan)
    has_ended = np.zeros(elapsed_s.shape, dtype=np.bool_)
    _elapsed(rows, first, last, own, moments, start, end, elapsed_s, has_ended)
    out = np.full((len(first), len(STARTED_RUNS)), np.nan)
    _survival(np.log(elapsed_s), has_ended, np.array([0.25, 0.5, 0.75]), out)
    return out


@compiled
def _added(values: Floats) -> float:
    """Their sum, as NumPy adds the entries of a row of 8 to 128."""
    a, b, c, d, e, f, g, h = values[:8]
    whole = len(values) - len(values) % 8
    for k in range(8, whole, 8):
        a += values[k]
        b += values[k + 1]
        c += values[k + 2]
        d += values[k + 3]
        e += values[k + 4]
        f += values[k + 5]
        g += values[k + 6]
        h += values[k + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for k in range(whole, len(values)):
        total += values[k]
    return total


@compiled
def _at(ordered: Floats, count: int, q: float) -> float:
    """Quantile of the first `count` values, which rise."""
    position = q * (count - 1)
    low = int(np.floor(position))
    return ordered[low] + (position - low) * (ordered[min(low + 1, count - 1)] - ordered[low])


@compiled
def _newest_runs(
    rows: Ints, first: Ints, last: Ints, log_runtime: Floats, is_bad: Bools, looked_at: int, newest: Ints, out: Floats
) -> None:
    values, ordered = np.zeros(max(looked_at, 8)), np.empty(looked_at)
    for i in range(len(first)):
        count = min(looked_at, last[i] - first[i])
        if count <= 0:
            continue
        newest[i] = rows[last[i] - 1]
        bad, same = 0, 0
        for k in range(count):
            row = rows[last[i] - 1 - k]
            value = log_runtime[row]
            values[k] = value
            bad += is_bad[row]
            same += abs(value - values[0]) < _SAME
            place = k
            while place > 0 and ordered[place - 1] > value:
                ordered[place] = ordered[place - 1]
                place -= 1
            ordered[place] = value
        values[count:] = 0.0
        out[i, 0] = values[0]
        if count > 1:
            out[i, 1] = values[1]
        mean = _added(values) / count
        for k in range(count):
            values[k] = (values[k] - mean) * (values[k] - mean)
        out[i, 2], out[i, 3], out[i, 4] = _at(ordered, count, 0.5), mean, np.sqrt(_added(values) / count)
        out[i, 5], out[i, 6] = _at(ordered, count, 0.1), _at(ordered, count, 0.9)
        out[i, 7], out[i, 8] = bad / count, same / count


@compiled
def _elapsed(
    rows: Ints, first: Ints, last: Ints, own: Ints, moments: Ints, start: Ints, end: Ints, elapsed_s: Floats,
    has_ended: Bools,
) -> None:  # fmt: skip
    for i in range(len(first)):
        for k in range(min(elapsed_s.shape[1], last[i] - first[i])):
            row = rows[last[i] - 1 - k]
            if row != own[i]:
                has_ended[i, k] = end[row] < moments[i]
                elapsed_s[i, k] = max((min(end[row], moments[i]) - start[row]) / 1e6, 1.0)


@compiled
def _survival(logs: Floats, has_ended: Bools, levels: Floats, out: Floats) -> None:
    """The first duration at which survival has fallen to 1 − level; the longest where it never does."""
    ordered, ended = np.empty(logs.shape[1]), np.empty(logs.shape[1], np.bool_)
    for i in range(len(logs)):
        count, running = 0, 0
        low, high = np.inf, -np.inf
        for k in range(logs.shape[1]):
            value, is_end = logs[i, k], has_ended[i, k]
            if np.isnan(value):
                continue
            if not is_end:
                running += 1
                low, high = min(low, value), max(high, value)
            place = count  # an end at the same duration as one that still runs comes first
            while place > 0 and (
                ordered[place - 1] > value or (ordered[place - 1] == value and is_end and not ended[place - 1])
            ):
                ordered[place], ended[place] = ordered[place - 1], ended[place - 1]
                place -= 1
            ordered[place], ended[place] = value, is_end
            count += 1
        out[i, 3] = running
        if running:
            out[i, 4], out[i, 5] = low, high
        if not count:
            continue
        survival, level = 1.0, 0
        for at in range(count):
            if ended[at]:
                survival *= 1.0 - 1.0 / (count - at)
            while level < len(levels) and survival <= 1.0 - levels[level] + _ROUNDING:
                out[i, level] = ordered[at]
                level += 1
        out[i, level : len(levels)] = ordered[count - 1]

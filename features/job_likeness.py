"""The user's own past jobs weighed by how like they are to the one asked about: a kernel over requests and situations.

Two jobs are alike when they ask for the same, when what the user and the key had last seen end ran as long, and when
they lie close in the user's own sequence and in time. Here belong the distance and the weighted summaries; not the
features that carry them (`features/jobs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEIGHBOURS = 128  # of the user's newest ended jobs
GAP_WEIGHTS = np.array([3.0, 1.0, 0.5, 0.3, 0.3])  # limit, width, memory, last runtime of user and of key; all in ln
LABEL_WEIGHTS = np.array([1.5, 0.5])  # another name family, another queue
_MOST = 3.0  # a gap counts no further, and counts so much where one of the two is unknown
_PLACE, _TIME = 0.2 / 16, 0.3  # per place in the user's sequence, per unit of ln(1 + seconds between the submits)


@dataclass(frozen=True, slots=True)
class Likeness:
    """What likeness is judged by, one row per job.

    Attributes:
        gaps: Quantities as logarithms in the order of `GAP_WEIGHTS`, NaN is unknown, shape (n, 5).
        labels: Hashes in the order of `LABEL_WEIGHTS`, shape (n, 2).
        submit: Submit time, µs, shape (n,).
    """

    gaps: Floats
    labels: NDArray[np.uint64]
    submit: Ints


def like_jobs(
    asked: Likeness, past: Likeness, newest: Ints, first: Ints, last: Ints, log_runtime: Floats, is_bad: Bools,
    levels: tuple[float, ...],
) -> Floats:  # fmt: skip
    """Weighted summaries of the runtimes of like jobs.

    Args:
        asked: The jobs asked about, n rows.
        past: All rows of the history.
        newest: History rows sorted by user and end.
        first: Where each asked job's user begins in `newest`, shape (n,).
        last: One past the user's newest ended job, shape (n,).
        log_runtime: ln(seconds) of the history's rows.
        is_bad: Bad end of the history's rows.
        levels: Levels of the quantiles, rising.

    Returns:
        Columns: one per level, mean, distance of the most alike, share of bad ends, ln of the weights' sum; NaN where
        the user has no ended job. Shape (n, len(levels) + 4).
    """
    out = np.full((len(first), len(levels) + 4), np.nan)
    _weigh(
        np.lexsort((last, first)), asked.gaps, asked.labels, asked.submit, past.gaps, past.labels, past.submit, newest,
        first, last, log_runtime, is_bad, np.asarray(levels), GAP_WEIGHTS, LABEL_WEIGHTS, out,
    )  # fmt: skip
    return out


def survivors_left(
    asked: Likeness, past: Likeness, newest: Ints, first: Ints, last: Ints, runtime_s: Floats, elapsed_s: Floats,
    levels: tuple[float, ...], looked_at: int,
) -> Floats:  # fmt: skip
    """What like jobs still had to run that lasted as long as the ones asked about have.

    Args:
        asked: The jobs asked about, n rows.
        past: All rows of the history.
        newest: History rows sorted by user and end.
        first: Where each asked job's user begins in `newest`, shape (n,).
        last: One past the user's newest ended job, shape (n,).
        runtime_s: Seconds of the history's rows.
        elapsed_s: How long each asked job has run, shape (n,).
        levels: Levels of the quantiles, rising.
        looked_at: How many of the user's newest ended jobs are looked at.

    Returns:
        ln(seconds), at least 0, one column per level; NaN where none of the user's jobs ran longer. Shape
        (n, len(levels)).
    """
    out = np.full((len(first), len(levels)), np.nan)
    _weigh_survivors(
        np.lexsort((last, first)), asked.gaps, asked.labels, asked.submit, elapsed_s, past.gaps, past.labels,
        past.submit, newest, first, last, runtime_s, np.asarray(levels), GAP_WEIGHTS, LABEL_WEIGHTS, looked_at, out,
    )  # fmt: skip
    return out


@compiled
def _distance(
    k: int, i: int, row: int, gaps: Floats, labels: NDArray[np.uint64], submit: Ints, past_gaps: Floats,
    past_labels: NDArray[np.uint64], past_submit: Ints, gap_weights: Floats, label_weights: Floats,
) -> float:  # fmt: skip
    """How unlike row `row` of the history, `k` places back, is to job `i`."""
    distance = _PLACE * k + _TIME * np.log1p(max(submit[i] - past_submit[row], 0) / 1e6)
    for c in range(len(gap_weights)):
        gap = abs(past_gaps[row, c] - gaps[i, c])
        if np.isnan(gap):
            both = np.isnan(past_gaps[row, c]) and np.isnan(gaps[i, c])
            gap = 0.0 if both else _MOST
        distance += gap_weights[c] * min(gap, _MOST)
    for c in range(len(label_weights)):
        if past_labels[row, c] != labels[i, c]:
            distance += label_weights[c]
    return distance


@compiled
def _slide(places: Ints, count: int, begin: int, end: int, came: int, newest: Ints, values: Floats) -> None:
    """Have `places` hold the entries [begin, end) in order of their values; those from `came` on are not in it yet.

    Args:
        places: Entries in order, `count` of them; what is before `begin` goes.
        count: How many there are.
        begin: First entry that stays or comes.
        end: One past the last.
        came: First that comes.
        newest: Row of each entry.
        values: Value of each row.
    """
    kept = 0
    for k in range(count):
        if places[k] >= begin:
            places[kept] = places[k]
            kept += 1
    for place in range(came, end):
        value, at = values[newest[place]], kept
        while at > 0 and values[newest[places[at - 1]]] > value:
            places[at] = places[at - 1]
            at -= 1
        places[at] = place
        kept += 1


@compiled
def _weigh_survivors(
    order: Ints, gaps: Floats, labels: NDArray[np.uint64], submit: Ints, elapsed_s: Floats, past_gaps: Floats,
    past_labels: NDArray[np.uint64], past_submit: Ints, newest: Ints, first: Ints, last: Ints, runtime_s: Floats,
    levels: Floats, gap_weights: Floats, label_weights: Floats, looked_at: int, out: Floats,
) -> None:  # fmt: skip
    weights, places = np.empty(looked_at), np.empty(looked_at + 1, np.int64)
    group, until, count = -1, 0, 0
    for i in order:  # those of one user follow each other, and what they look at
        begin = max(first[i], last[i] - looked_at)
        if first[i] != group:
            group, until, count = first[i], begin, 0
        _slide(places, count, begin, last[i], max(until, begin), newest, runtime_s)
        until, count = last[i], last[i] - begin
        nearest = np.inf
        for k in range(count):
            row = newest[last[i] - 1 - k]
            if not runtime_s[row] - elapsed_s[i] > 1e-6:
                continue
            weights[k] = _distance(
                k, i, row, gaps, labels, submit, past_gaps, past_labels, past_submit, gap_weights, label_weights
            )
            nearest = min(nearest, weights[k])
        total = 0.0
        for k in range(count):
            if runtime_s[newest[last[i] - 1 - k]] - elapsed_s[i] > 1e-6:
                weights[k] = np.exp(nearest - weights[k])
                total += weights[k]
        mass, level = 0.0, 0
        for k in range(count):
            left = runtime_s[newest[places[k]]] - elapsed_s[i]
            if not left > 1e-6:
                continue
            mass += weights[last[i] - 1 - places[k]]
            while level < len(levels) and mass >= levels[level] * total - 1e-12:
                out[i, level] = np.log(max(left, 1.0))
                level += 1


@compiled
def _weigh(
    order: Ints, gaps: Floats, labels: NDArray[np.uint64], submit: Ints, past_gaps: Floats,
    past_labels: NDArray[np.uint64], past_submit: Ints, newest: Ints, first: Ints, last: Ints, log_runtime: Floats,
    is_bad: Bools, levels: Floats, gap_weights: Floats, label_weights: Floats, out: Floats,
) -> None:  # fmt: skip
    weights, places = np.empty(NEIGHBOURS), np.empty(NEIGHBOURS + 1, np.int64)
    group, until, count = -1, 0, 0
    for i in order:  # those of one user follow each other, and what they look at
        begin = max(first[i], last[i] - NEIGHBOURS)
        if first[i] != group:
            group, until, count = first[i], begin, 0
        _slide(places, count, begin, last[i], max(until, begin), newest, log_runtime)
        until, count = last[i], last[i] - begin
        if count <= 0:
            continue
        nearest = np.inf
        for k in range(count):
            row = newest[last[i] - 1 - k]
            weights[k] = _distance(
                k, i, row, gaps, labels, submit, past_gaps, past_labels, past_submit, gap_weights, label_weights
            )
            nearest = min(nearest, weights[k])
        total, mean, bad = 0.0, 0.0, 0.0
        for k in range(count):
            row = newest[last[i] - 1 - k]
            weights[k] = np.exp(nearest - weights[k])
            total += weights[k]
            mean += weights[k] * log_runtime[row]
            bad += weights[k] * is_bad[row]
        mass, level = 0.0, 0
        for k in range(count):
            mass += weights[last[i] - 1 - places[k]]
            while level < len(levels) and mass >= levels[level] * total - 1e-12:
                out[i, level] = log_runtime[newest[places[k]]]
                level += 1
        of = len(levels)
        out[i, of], out[i, of + 1], out[i, of + 2], out[i, of + 3] = mean / total, nearest, bad / total, np.log(total)

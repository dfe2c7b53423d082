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
        asked.gaps, asked.labels, asked.submit, past.gaps, past.labels, past.submit, newest, first, last, log_runtime,
        is_bad, np.asarray(levels), GAP_WEIGHTS, LABEL_WEIGHTS, out,
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
        asked.gaps, asked.labels, asked.submit, elapsed_s, past.gaps, past.labels, past.submit, newest, first, last,
        runtime_s, np.asarray(levels), GAP_WEIGHTS, LABEL_WEIGHTS, looked_at, out,
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
def _quantiles(
    i: int, found: int, total: float, weights: Floats, values: Floats, levels: Floats, out: Floats
) -> None:  # fmt: skip
    """Put the weighted quantiles of the first `found` values into row `i` of `out`."""
    mass, level = 0.0, 0
    for k in np.argsort(values[:found]):
        mass += weights[k]
        while level < len(levels) and mass >= levels[level] * total - 1e-12:
            out[i, level] = values[k]
            level += 1


@compiled
def _weigh_survivors(
    gaps: Floats, labels: NDArray[np.uint64], submit: Ints, elapsed_s: Floats, past_gaps: Floats,
    past_labels: NDArray[np.uint64], past_submit: Ints, newest: Ints, first: Ints, last: Ints, runtime_s: Floats,
    levels: Floats, gap_weights: Floats, label_weights: Floats, looked_at: int, out: Floats,
) -> None:  # fmt: skip
    weights, values = np.empty(looked_at), np.empty(looked_at)
    for i in range(len(first)):
        found, nearest = 0, np.inf
        for k in range(min(looked_at, last[i] - first[i])):
            row = newest[last[i] - 1 - k]
            left = runtime_s[row] - elapsed_s[i]
            if not left > 1e-6:
                continue
            distance = _distance(
                k, i, row, gaps, labels, submit, past_gaps, past_labels, past_submit, gap_weights, label_weights
            )
            weights[found], values[found] = distance, np.log(max(left, 1.0))
            nearest = min(nearest, distance)
            found += 1
        total = 0.0
        for k in range(found):
            weights[k] = np.exp(nearest - weights[k])
            total += weights[k]
        _quantiles(i, found, total, weights, values, levels, out)


@compiled
def _weigh(
    gaps: Floats, labels: NDArray[np.uint64], submit: Ints, past_gaps: Floats, past_labels: NDArray[np.uint64],
    past_submit: Ints, newest: Ints, first: Ints, last: Ints, log_runtime: Floats, is_bad: Bools, levels: Floats,
    gap_weights: Floats, label_weights: Floats, out: Floats,
) -> None:  # fmt: skip
    weights, values = np.empty(NEIGHBOURS), np.empty(NEIGHBOURS)
    count = len(levels)
    for i in range(len(first)):
        found = min(NEIGHBOURS, last[i] - first[i])
        if found <= 0:
            continue
        nearest = np.inf
        for k in range(found):
            row = newest[last[i] - 1 - k]
            distance = _distance(
                k, i, row, gaps, labels, submit, past_gaps, past_labels, past_submit, gap_weights, label_weights
            )
            weights[k], values[k] = distance, log_runtime[row]
            nearest = min(nearest, distance)
        total, mean, bad = 0.0, 0.0, 0.0
        for k in range(found):
            weight = np.exp(nearest - weights[k])
            weights[k] = weight
            total += weight
            mean += weight * values[k]
            bad += weight * is_bad[newest[last[i] - 1 - k]]
        _quantiles(i, found, total, weights, values, levels, out)
        out[i, count], out[i, count + 1] = mean / total, nearest
        out[i, count + 2], out[i, count + 3] = bad / total, np.log(total)

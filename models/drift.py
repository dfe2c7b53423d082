"""Shift of what jobs ask for: the population stability index of the newest week against the weeks before it.

PSI = Σ (p − q)·ln(p ÷ q) over bins of one input. A week of a cluster is a few users' bursts, so that the index of a
quiet week is far from zero; it is therefore shown beside those of the weeks before, each against all the others. Here
belong the index and its inputs; not what is to be thought of it (`models/outcome_verdicts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INPUTS = ("limit", "size", "queue", "key_seen")
MIN_JOBS = 200  # of a week, and of all weeks before it together
MIN_WEEKS = 4  # fewer weeks before it say nothing of how far weeks differ
MAX_WEEKS = 17
WEEK_US = 7 * 86_400_000_000
_PARTS = 10  # parts of numbers, by their quantiles
_QUEUES = 20  # the largest; the others are one
_WARM_UP = 0.25  # share of the oldest jobs by which no key can have been seen


@dataclass(frozen=True, slots=True)
class Shift:
    """Index of one input.

    Attributes:
        name: One of `INPUTS`.
        value: Of the newest week against those before it.
        usual: Highest of the weeks before it, each against the others; None with fewer than `MIN_WEEKS`.
        jobs: Jobs of the newest week.
        reference_jobs: Jobs of the weeks before it.
    """

    name: str
    value: float
    usual: float | None
    jobs: int
    reference_jobs: int


def psi(counts: Floats | Ints, reference: Floats | Ints) -> float:
    """Population stability index of two counts over the same bins; half a row is added to each bin.

    Args:
        counts: Rows by bin, shape (bins,).
        reference: Rows by bin of what it is held against.

    Raises:
        ValueError: The shapes differ.
    """
    if np.shape(counts) != np.shape(reference):
        raise ValueError(f"{np.shape(counts)} bins against {np.shape(reference)}: they must be the same")
    p, q = (np.asarray(x, dtype=np.float64) + 0.5 for x in (counts, reference))
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum((p - q) * np.log(p / q)))


def input_shifts(history: JobHistory, begin: int, until: int) -> list[Shift]:
    """Shift of each input of the jobs submitted in [begin, until), µs UTC, against up to 17 weeks before.

    Args:
        history: Jobs of one cluster; what came after `until` changes nothing.
        begin: Start of the newest week.
        until: Its end.

    Returns:
        One shift for each input that has enough jobs on both sides; none at all for a small or a young cluster.
    """
    submit = history.table.submit
    rows = np.flatnonzero(submit < until)
    week = (begin - 1 - submit[rows]) // WEEK_US  # −1: the newest; 0: the one before it
    week[submit[rows] >= begin] = -1
    rows, week = rows[week < MAX_WEEKS], week[week < MAX_WEEKS]
    is_seen = _is_key_seen(history, rows)
    found = []
    for name in INPUTS:
        kept = np.ones(len(rows), dtype=bool)
        if name == "key_seen":
            warm_us = np.quantile(submit[rows], _WARM_UP) if len(rows) else 0
            kept = (submit[rows] >= warm_us) | (week < 0)
        here = week[kept]
        newest = here < 0
        if min(newest.sum(), (~newest).sum()) < MIN_JOBS:
            continue
        bins = is_seen[kept].astype(np.int64) if name == "key_seen" else _bins(history, name, rows[kept], newest)
        found.append(_shift(name, bins, here))
    return found


def _shift(name: str, bins: Ints, week: Ints) -> Shift:
    count = int(bins.max()) + 1
    weeks = np.unique(week[week >= 0])
    table = {int(w): np.bincount(bins[week == w], minlength=count) for w in (-1, *weeks)}
    reference = np.sum([table[int(w)] for w in weeks], axis=0)
    full = [table[int(w)] for w in weeks if table[int(w)].sum() >= MIN_JOBS]
    usual = [psi(part, reference - part) for part in full if reference.sum() - part.sum() >= MIN_JOBS]
    return Shift(
        name, psi(table[-1], reference), max(usual) if len(usual) >= MIN_WEEKS else None, int(table[-1].sum()),
        int(reference.sum()),
    )  # fmt: skip


def _is_key_seen(history: JobHistory, rows: Ints) -> NDArray[np.bool_]:
    """Whether a job of the same user, size and limit had ended when the row was submitted."""
    if not len(rows):
        return np.zeros(0, dtype=bool)
    groups, moments = history.group("key")[rows], history.table.submit[rows]
    return history.newest("key", "run", groups, moments, 1).is_filled[:, 0]


def _bins(history: JobHistory, name: str, rows: Ints, newest: NDArray[np.bool_]) -> Ints:
    """Bin of each row; what is not known is a bin of its own. Edges are those of the weeks before."""
    table = history.table
    if name == "queue":
        queues = table.frame["queue"][rows].fill_null("").to_numpy()
        names, counts = np.unique(queues[~newest].astype(str), return_counts=True)
        largest = names[np.argsort(-counts, kind="stable")][:_QUEUES]
        at = {queue: k + 1 for k, queue in enumerate(largest)}
        return np.array([at.get(queue, 0) for queue in queues], dtype=np.int64)
    values = {"limit": table.limit_s, "size": table.width}[name][rows]
    known = values[~newest & np.isfinite(values)]
    if not len(known):
        return np.where(np.isfinite(values), 1, 0)
    edges = np.unique(np.quantile(known, np.arange(1, _PARTS) / _PARTS))
    # A value that many jobs share is a bin: below it, at it, above it.
    return np.where(
        np.isfinite(values),
        1 + np.searchsorted(edges, values, side="left") + np.searchsorted(edges, values, side="right"),
        0,
    )

"""Summaries of small matrices of past runtimes: one row per job asked about, newest entry first, NaN where empty.

Here belong row-wise medians, weighted quantiles and Kaplan–Meier quantiles; not the lookups that fill the matrices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def row_quantile(values: Floats, q: float) -> Floats:
    """Quantile of each row's filled entries (linear between neighbours), NaN for an empty row; shape (n, k) → (n,)."""
    ordered = np.sort(values, axis=1)  # NaN goes last
    filled = np.sum(~np.isnan(ordered), axis=1)
    position = q * np.maximum(filled - 1, 0)
    low = np.floor(position).astype(np.int64)
    high = np.minimum(low + 1, np.maximum(filled - 1, 0))
    rows = np.arange(len(values))
    lower, upper = ordered[rows, low], ordered[rows, high]
    return lower + (position - low) * (upper - lower)


def row_mean(values: Floats, weights: Floats | None = None) -> Floats:
    """(Weighted) mean of each row's filled entries, NaN for an empty row."""
    is_filled = ~np.isnan(values)
    shares = is_filled if weights is None else np.where(is_filled, weights, 0.0)
    total = np.sum(shares, axis=1)
    mass = np.sum(np.where(is_filled, values, 0.0) * shares, axis=1)
    return np.divide(mass, total, out=np.full(len(values), np.nan), where=total > 0)


def row_spread(values: Floats) -> Floats:
    """Standard deviation of each row's filled entries, NaN for an empty row."""
    mean = row_mean(values)
    return np.sqrt(row_mean((values - mean[:, None]) ** 2))


def weighted_quantiles(values: Floats, weights: Floats, qs: tuple[float, ...]) -> list[Floats]:
    """Weighted quantiles of each row: the smallest entry whose cumulated weight reaches q; NaN for an empty row."""
    is_filled = ~np.isnan(values)
    order = np.argsort(values, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    mass: Floats = np.cumsum(np.take_along_axis(np.where(is_filled, weights, 0.0), order, axis=1), axis=1)
    total: Floats = mass[:, -1]
    rows = np.arange(len(values))
    found = []
    for q in qs:
        at = np.argmax(mass >= (total * q)[:, None] - 1e-12, axis=1)
        found.append(np.where(total > 0, ordered[rows, at], np.nan))
    return found


def survival_quantiles(times: Floats, is_event: Bools, qs: tuple[float, ...]) -> list[Floats]:
    """Kaplan–Meier quantiles of each row.

    Args:
        times: Duration seen so far, NaN where empty, shape (n, k).
        is_event: It ended at that duration; false: it was still running (censored).
        qs: Levels.

    Returns:
        Per level the first duration at which survival falls to 1 − q; the longest duration where it never does; NaN
        for an empty row. Each of shape (n,).
    """
    # An event at the same duration as a censoring comes first.
    order = np.lexsort((~is_event, times), axis=1)
    ordered = np.take_along_axis(times, order, axis=1)
    events = np.take_along_axis(is_event, order, axis=1) & ~np.isnan(ordered)
    filled = np.sum(~np.isnan(ordered), axis=1)
    at_risk = np.maximum(filled[:, None] - np.arange(times.shape[1]), 1)
    survival = np.cumprod(np.where(events, 1.0 - 1.0 / at_risk, 1.0), axis=1)
    rows = np.arange(len(times))
    last = np.maximum(filled - 1, 0)
    found = []
    for q in qs:
        hit = survival <= 1.0 - q + 1e-12
        at = np.where(hit.any(axis=1), np.argmax(hit, axis=1), last)
        found.append(ordered[rows, np.minimum(at, last)])
    return found

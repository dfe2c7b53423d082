"""Predictive distributions as quantile curves: one row per job, one column per level, values ln(seconds).

Here belong making curves from samples, reading levels and probabilities off them, and conditioning on time already
spent; not where samples come from. Curves never fall along a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.compiled import compiled, in_threads
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES

Floats = NDArray[np.float64]

LEVELS: Floats = np.array([0.01, 0.025, *np.arange(0.05, 0.96, 0.05).round(2), 0.975, 0.99])
MEDIAN = int(np.flatnonzero(LEVELS == 0.5)[0])
_ROWS = 1_000  # rows sorted at a time: bounds memory
DOUBLING = float(np.log(2.0))
CENTRE_GAINS = (0.15, 0.3)


@dataclass(frozen=True, slots=True)
class Pooled:
    """A mixture summarised row by row; all ln(seconds), NaN where a row has no sample of any weight.

    Attributes:
        curves: Quantiles, shape (n, len(LEVELS)).
        modes: The point that most weight lies within 25 % of, shape (n,).
        centres: For each of `CENTRE_GAINS` the point of least expected |ln error| less gain × weight within a factor of
            two, shape (n, len(CENTRE_GAINS)).
    """

    curves: Floats
    modes: Floats
    centres: Floats


def pool(parts: Sequence[NDArray[Any]], weights: Sequence[Floats]) -> Floats:
    """Curves of a mixture of samples.

    Args:
        parts: Samples of each component, ln(seconds), each of shape (n, k); NaN is no sample.
        weights: Weight of each component per row, each of shape (n,).

    Returns:
        Curves of shape (n, len(LEVELS)); NaN where a row has no sample of any weight.
    """
    return pool_points(parts, weights, np.full(len(parts[0]), np.inf), gains=()).curves


def pool_points(
    parts: Sequence[NDArray[Any]], weights: Sequence[Floats], top: Floats,
    mode_weights: Sequence[Floats] | None = None, gains: Sequence[float] = CENTRE_GAINS,
) -> Pooled:  # fmt: skip
    """Curves of a mixture, and points of it for different uses.

    Args:
        parts: As in `pool`.
        weights: As in `pool`.
        top: ln of the longest possible, shape (n,); samples beyond count as it.
        mode_weights: Weights for the modes, where they differ.
        gains: Of the centres; none spares the time of finding them.
    """
    n = len(parts[0])
    component = np.repeat(np.arange(len(parts)), [part.shape[1] for part in parts])
    out = Pooled(np.full((n, len(LEVELS)), np.nan), np.full(n, np.nan), np.full((n, len(gains)), np.nan))
    shares = []
    for chosen in (weights, weights if mode_weights is None else mode_weights):
        counts = [np.maximum((~np.isnan(part)).sum(axis=1), 1) for part in parts]
        shares.append(np.stack([w / k for w, k in zip(chosen, counts, strict=True)], axis=1).astype(np.float64))

    def work(share: slice) -> None:
        for first in range(share.start, share.stop, _ROWS):
            rows = slice(first, min(first + _ROWS, share.stop))
            # Samples are kept in single precision; sorting them needs no more.
            values = np.concatenate([part[rows] for part in parts], axis=1).astype(np.float32, copy=False)
            _summarise(
                values.view(np.uint32), values, top[rows], component, shares[0][rows], shares[1][rows], LEVELS,
                np.asarray(gains, dtype=np.float64), out.curves[rows], out.modes[rows], out.centres[rows],
            )  # fmt: skip

    in_threads(work, n)
    return out


@compiled
def _sort(bits: NDArray[np.uint32], keys: Any, order: Any, counts: NDArray[np.int32]) -> int:
    """Write the order of single-precision values, told by their bits, to `order[0]`; NaN goes last. Stable."""
    width = len(bits)
    counts[:] = 0
    for k in range(width):
        key = bits[k] ^ (np.uint32(0xFFFFFFFF) if bits[k] >> np.uint32(31) else np.uint32(0x80000000))
        if (bits[k] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):  # NaN, whatever its sign
            key = np.uint32(0xFFFFFFFF)
        keys[0, k], order[0, k] = key, k
        for digit in range(4):
            counts[digit, (key >> np.uint32(8 * digit)) & np.uint32(255)] += 1
    here = 0
    for digit in range(4):
        at = 0
        for d in range(256):
            counts[digit, d], at = at, at + counts[digit, d]
        for k in range(width):
            d = (keys[here, k] >> np.uint32(8 * digit)) & np.uint32(255)
            place = counts[digit, d]
            counts[digit, d] = place + 1
            keys[1 - here, place], order[1 - here, place] = keys[here, k], order[here, k]
        here = 1 - here
    return here


@compiled
def _summarise(
    bits: NDArray[np.uint32], values: NDArray[np.float32], top: Floats, component: NDArray[np.int64], share: Floats,
    mode_share: Floats, levels: Floats, gains: Floats, curves: Floats, modes: Floats, centres: Floats,
) -> None:  # fmt: skip
    """Quantiles (the smallest sample at which the weight reaches the level), the fullest window, the centres."""
    n, width = values.shape
    below, above = -np.log(0.75), np.log(1.25)  # ln(forecast ÷ actual) may lie between −below and above
    ordered, weight, mode_weight = np.empty(width), np.empty(width), np.empty(width)
    keys, orders = np.empty((2, width), np.uint32), np.empty((2, width), np.int32)
    counts = np.empty((4, 256), np.int32)
    for i in range(n):
        order = orders[_sort(bits[i], keys, orders, counts)]
        count = width
        while count > 0 and np.isnan(values[i, order[count - 1]]):
            count -= 1
        total, moment = 0.0, 0.0
        for k in range(count):
            ordered[k] = min(np.float64(values[i, order[k]]), top[i])
            weight[k] = share[i, component[order[k]]]
            mode_weight[k] = mode_share[i, component[order[k]]]
            total += weight[k]
            moment += weight[k] * ordered[k]
        if total <= 0:
            continue
        mass, level = 0.0, 0
        for k in range(count):
            mass += weight[k]
            while level < len(levels) and mass >= levels[level] * total - 1e-12:
                curves[i, level] = ordered[k]
                level += 1
        best, inside, last = -1.0, 0.0, 0
        for k in range(count):
            while last < count and ordered[last] <= ordered[k] + below + above + 1e-9:
                inside += mode_weight[last]
                last += 1
            if inside > best + 1e-12:
                best = inside
                # From x, actual may lie in [x − ln 1.25, x − ln 0.75]: the middle of the points that reach both ends.
                modes[i] = ((ordered[last - 1] - below) + (ordered[k] + above)) / 2
            inside -= mode_weight[k]
        for g in range(len(gains)):
            least, mass, mass_moment, inside, first, last = np.inf, 0.0, 0.0, 0.0, 0, 0
            for k in range(count):
                x = ordered[k]
                while last < count and ordered[last] <= x + DOUBLING + 1e-9:
                    inside += weight[last]
                    last += 1
                while ordered[first] < x - DOUBLING - 1e-9:
                    inside -= weight[first]
                    first += 1
                mass += weight[k]
                mass_moment += weight[k] * x
                error = (x * mass - mass_moment) + (moment - mass_moment - x * (total - mass))
                loss = error - gains[g] * inside
                if loss < least - 1e-12:
                    least = loss
                    centres[i, g] = x


def read_levels(curves: Floats, levels: Sequence[float] | Floats) -> Floats:
    """Curves at other levels (linear between, flat beyond), shape (n, len(levels))."""
    position = np.interp(np.asarray(levels, dtype=np.float64), LEVELS, np.arange(len(LEVELS)))
    low = np.floor(position).astype(np.int64)
    high = np.minimum(low + 1, len(LEVELS) - 1)
    return curves[:, low] + (position - low) * (curves[:, high] - curves[:, low])


def level_of(curves: Floats, values: Floats) -> Floats:
    """Level at which each row's curve passes a value: P(duration ≤ value), in [0, 1], shape (n,).

    On a flat stretch the middle of it. Below the first level half of it is left, above the last likewise.
    """
    out = np.empty(len(curves))
    _level_of(np.asarray(curves, dtype=np.float64), np.asarray(values, dtype=np.float64), LEVELS, out)
    return out


@compiled
def _level_of(curves: Floats, values: Floats, levels: Floats, out: Floats) -> None:
    last = len(levels) - 1
    for i in range(len(curves)):
        below, upto = 0, 0
        for k in range(len(levels)):
            below += curves[i, k] < values[i] - 1e-9
            upto += curves[i, k] <= values[i] + 1e-9
        if below == len(levels):
            out[i] = (1 + levels[last]) / 2
        elif upto == 0:
            out[i] = levels[0] / 2
        elif upto > below:
            out[i] = (levels[below] + levels[upto - 1]) / 2
        else:
            left, right = max(below - 1, 0), below
            width = curves[i, right] - curves[i, left]
            share = (values[i] - curves[i, left]) / width if width > 0 else 0.0
            out[i] = levels[left] + min(max(share, 0.0), 1.0) * (levels[right] - levels[left])


def cap(curves: Floats, limit_s: Floats) -> Floats:
    """Curves no longer than the limit (NaN: none) and no shorter than one second."""
    top = np.where(np.isnan(limit_s), np.inf, np.log(np.maximum(limit_s, 1.0)))
    return np.minimum(np.maximum(curves, 0.0), top[:, None])


def read_seconds(curves: Floats, levels: Sequence[float], limit_s: Floats) -> Floats:
    """Curves at levels in seconds, shape (n, len(levels)); what equals the limit (NaN: none) but for rounding is it."""
    seconds = np.exp(read_levels(curves, levels))
    limit_s = limit_s[:, None]
    return np.where(np.abs(seconds - limit_s) <= 1e-9 * limit_s, limit_s, seconds)


def centred(curves: Floats, middle: Floats) -> Floats:
    """Curves whose median is moved to `middle`, shape (n,); the rest makes way."""
    out = curves.copy()
    out[:, MEDIAN] = middle
    out[:, :MEDIAN] = np.minimum(out[:, :MEDIAN], middle[:, None])
    out[:, MEDIAN + 1 :] = np.maximum(out[:, MEDIAN + 1 :], middle[:, None])
    return out


def rising(curves: Floats) -> Floats:
    """Curves that never fall along a row."""
    return np.maximum.accumulate(curves, axis=1)


def remaining_s(curves: Floats, elapsed_s: Floats, limit_s: Floats, levels: Sequence[float] = QUANTILES) -> Floats:
    """Quantiles of the time left, given that it has lasted for `elapsed_s` already.

    The curve is cut at the elapsed time and what lies beyond is spread over the levels. Beyond the curve's last level
    the tail reaches to the limit, or doubles where there is none; once the whole curve is past, the time left is
    spread evenly in logarithm between now and the limit, or up to a fourfold of what has elapsed.

    Args:
        curves: Shape (n, len(LEVELS)).
        elapsed_s: Shape (n,), ≥ 0.
        limit_s: Shape (n,), NaN: none.
        levels: Levels asked for.

    Returns:
        Seconds, shape (n, len(levels)); never falling along a row, within [0, limit − elapsed] where that is positive.
    """
    spent = np.log(np.maximum(elapsed_s, 1.0))
    top = np.where(np.isnan(limit_s), curves[:, -1] + DOUBLING, np.log(np.maximum(limit_s, 1.0)))
    grid = np.concatenate([LEVELS, [1.0]])
    full = rising(np.concatenate([curves, np.maximum(top, curves[:, -1])[:, None]], axis=1))
    passed = level_of(curves, spent)
    passed = np.where(elapsed_s <= 0, 0.0, passed)
    rows = np.arange(len(curves))
    out = np.empty((len(curves), len(levels)))
    for column, level in enumerate(levels):
        position = np.interp(passed + level * (1 - passed), grid, np.arange(len(grid)))
        low = np.floor(position).astype(np.int64)
        high = np.minimum(low + 1, len(grid) - 1)
        out[:, column] = full[rows, low] + (position - low) * (full[rows, high] - full[rows, low])
    is_past = spent >= curves[:, -1] - 1e-9
    far = np.where(np.isnan(limit_s) | (limit_s <= elapsed_s), spent + 2 * DOUBLING, top)
    out = np.where(is_past[:, None], spent[:, None] + np.asarray(levels) * (far - spent)[:, None], out)
    left = np.maximum(np.exp(out) - np.where(elapsed_s <= 0, 0.0, elapsed_s)[:, None], 0.0)
    most = np.where(np.isnan(limit_s) | (limit_s <= elapsed_s), np.inf, limit_s - elapsed_s)
    return rising(np.minimum(left, most[:, None]))


def quantile_frame(seconds: Floats) -> pl.DataFrame:
    """Seconds at the registry's levels, shape (n, len(QUANTILES)), as the columns of forecasts; NaN becomes null."""
    return pl.from_numpy(np.ascontiguousarray(seconds), schema=list(QUANTILE_COLUMNS)).fill_nan(None)

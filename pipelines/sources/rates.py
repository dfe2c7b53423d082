"""Counters that feed a rate become differences over time before samples are laid into frames.

NVLink and PCIe bytes that only count up have no other reading. Counters that are stored as they are (energy, errors,
network ports) are not touched. No I/O.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Exporters refresh less often than they are scraped: an unchanged counter is no evidence of silence before this.
_IDLE_MS = 60_000
# After a longer gap there is no rate: it would average over what nobody saw.
_GAP_MS = 300_000
_SENTINEL_FROM = 9.2e18


class Counter(NamedTuple):
    """What is remembered of a counter: its value, since when it has it, when it was last seen (ms), its rate then."""

    value: float
    changed_ms: int
    seen_ms: int
    rate: float | None = None


def differentiate(
    ts_ms: list[int], values: list[float], before: Counter | None
) -> tuple[list[float | None], Counter | None]:
    """Rates of one counter.

    Args:
        ts_ms: Times of its samples, ascending.
        values: Its values.
        before: What was remembered of it; ignored when it is newer than the first sample or long past.

    Returns:
        For each sample the growth a second since the value changed before; None at the first, after a reset or a gap,
        where nothing changed yet, and where the value is none. And what to remember.
    """
    state = before
    if state is not None and ts_ms and not 0 <= ts_ms[0] - state.seen_ms <= _GAP_MS:
        state = None
    rates: list[float | None] = []
    for at, value in zip(ts_ms, values, strict=True):
        rate = None
        if state is not None and at == state.seen_ms and value == state.value:  # read once more
            rate = state.rate
        elif math.isfinite(value) and 0 <= value < _SENTINEL_FROM:
            if state is None or at - state.seen_ms > _GAP_MS or value < state.value:
                state = Counter(value, at, at)
            elif value > state.value:
                rate = (value - state.value) * 1000 / max(at - state.changed_ms, 1)
                state = Counter(value, at, at, rate)
            else:
                rate = 0.0 if at - state.changed_ms >= _IDLE_MS else None
                state = state._replace(seen_ms=at, rate=rate)
        rates.append(rate)
    return rates, state


def rates_of(
    is_counter: np.ndarray, keys: list[tuple[int, int]], counts: np.ndarray, ts_ms: np.ndarray, values: np.ndarray,
    remembered: dict[tuple[int, int], Counter],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Values with the counters among the series replaced by rates.

    Args:
        is_counter: Of each series, whether it is to be differentiated.
        keys: What a series is remembered by.
        counts: Number of samples of each series.
        ts_ms: Time of each sample, ms, series after series.
        values: Value of each sample.
        remembered: Counters of earlier reads; updated.

    Returns:
        The values, and which samples are left: those of counters that have no rate yet are not.
    """
    kept, values = np.ones(len(values), bool), values.copy()
    ends = np.cumsum(counts)
    for i in np.flatnonzero(is_counter):
        part = slice(int(ends[i] - counts[i]), int(ends[i]))
        before = remembered.get(keys[i])
        rates, state = differentiate(ts_ms[part].tolist(), values[part].tolist(), before)
        kept[part] = [rate is not None for rate in rates]
        values[part] = [math.nan if rate is None else rate for rate in rates]
        if state is not None and (before is None or state.seen_ms > before.seen_ms):
            remembered[keys[i]] = state
    return values, kept

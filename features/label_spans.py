"""Spans in which a condition was set, of anything that is sampled: onset, hold, clear, and what cannot be known.

Here belongs the bookkeeping that all bottleneck classes share; when a sample is set stands with each rule.

A sample speaks for the interval before it: exporters report rates as means since their last sample. An onset is a
change from clear to set that holds for max(10 s, two fresh samples); a condition that returns within 10 s never went.
What was set when first seen, or vanished before it had held, is kept as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

HOLD_S = 10.0
FRESH_SAMPLES = 2
GAP_INTERVALS = 3.0  # a silence longer than this many intervals (and MIN_GAP_S) hides what happened in it
MIN_GAP_S = 60.0

SET, CLEAR, UNKNOWN = np.int8(1), np.int8(0), np.int8(-1)


class Sampled(Protocol):
    """Times of samples, sorted by what they are of: all that spans and gaps are told by.

    Attributes:
        gpu: Code of what each sample is of, ascending; ts: seconds; interval_s: median time between samples of one.
    """

    gpu: NDArray[np.int64]
    ts: NDArray[np.float64]
    interval_s: float


@dataclass(slots=True)
class Series:
    """Samples of things that are no GPUs, sorted by thing and time.

    Attributes:
        names: Thing of each code, as `scope_id` has it.
        nodes: Its node, None where it has none.
        jobs: Job of each sample, None where none is known; shape (samples,).
        gpu: Code of each sample's thing, ascending (the name that `runs` knows); ts: seconds, ascending within one.
        interval_s: Median time between samples of one.
        cluster: Name of the cluster, empty when the rows do not say.
    """

    names: list[str]
    nodes: list[str | None]
    jobs: list[str | None]
    gpu: NDArray[np.int64]
    ts: NDArray[np.float64]
    interval_s: float
    cluster: str = ""

    @classmethod
    def of(cls, frame: pl.DataFrame, interval_s: float = 60.0) -> Series:
        """Samples of a frame that is sorted by `scope_id` and `ts`.

        Args:
            frame: `scope_id`, `ts` (UTC), and `node`, `job_id`, `cluster` where they are known.
            interval_s: Where no thing has two samples.
        """
        ids = frame["scope_id"]
        begins = (ids != ids.shift(1)).fill_null(True) if frame.height else pl.Series([], dtype=pl.Boolean)
        first = frame.filter(begins)
        gpu = begins.cast(pl.Int64).cum_sum().to_numpy() - 1
        ts = frame["ts"].dt.epoch("us").to_numpy() / 1e6
        gaps = np.diff(ts)[np.diff(gpu) == 0]
        nodes: Sequence[str | None] = first["node"].to_list() if "node" in frame.columns else [None] * first.height
        jobs: Sequence[str | None] = frame["job_id"].to_list() if "job_id" in frame.columns else [None] * frame.height
        return cls(
            first["scope_id"].to_list(), list(nodes), list(jobs), gpu, ts,
            float(np.median(gaps)) if len(gaps) else interval_s,
            str(frame["cluster"][0] or "") if "cluster" in frame.columns and frame.height else "",
        )  # fmt: skip


def gap_s(history: Sampled) -> float:
    """Silence after which the state of a GPU counts as unknown, seconds."""
    return max(MIN_GAP_S, GAP_INTERVALS * history.interval_s)


@dataclass(frozen=True, slots=True)
class Runs:
    """Spans in which a condition was set, one entry per span.

    Attributes:
        gpu: GPU code.
        first, last: Rows of the first and last set sample.
        end: Row of the first sample after the span, -1 where the series ends or falls silent.
        is_known: The onset was seen: a clear sample came just before, and the span held or ended in sight.
        has_held: The span held long enough to be an onset.
    """

    gpu: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    end: NDArray[np.int64]
    is_known: NDArray[np.bool_]
    has_held: NDArray[np.bool_]


def runs(history: Sampled, state: NDArray[np.int8]) -> Runs:
    """Spans of `SET`, with those that return within `HOLD_S` joined."""
    ts, gpu = history.ts, history.gpu
    n = len(ts)
    joined = np.zeros(max(n - 1, 0), dtype=bool)
    if n > 1:
        joined = (np.diff(gpu) == 0) & (np.diff(ts) <= gap_s(history))
    state = _bridge(ts, joined, state)
    is_set = state == SET
    continues = np.concatenate(([False], joined & is_set[:-1]))
    first = np.flatnonzero(is_set & ~continues)
    goes_on = np.concatenate((joined & is_set[1:], [False]))
    last = np.flatnonzero(is_set & ~goes_on)
    before_clear = np.zeros(len(first), dtype=bool)
    has_before = first > 0
    before = np.maximum(first - 1, 0)
    before_clear[has_before] = (joined[before[has_before]]) & (state[before[has_before]] == CLEAR)
    end = np.full(len(last), -1)
    has_after = last < n - 1
    after = np.minimum(last + 1, max(n - 1, 0))
    seen_after = np.zeros(len(last), dtype=bool)
    seen_after[has_after] = joined[last[has_after]] & (state[after[has_after]] == CLEAR)
    end[seen_after] = after[seen_after]
    # Scrapes faster than the exporter repeat a sample; only one per interval is fresh.
    fresh = np.floor((ts[last] - ts[first]) / max(0.5 * history.interval_s, 1e-3)).astype(np.int64) + 1
    fresh = np.minimum(fresh, last - first + 1)
    has_held = (fresh >= FRESH_SAMPLES) & (ts[last] - ts[first] >= HOLD_S - 1e-6)
    return Runs(gpu[first], first, last, end, before_clear & (has_held | seen_after), has_held)


def _bridge(ts: NDArray[np.float64], joined: NDArray[np.bool_], state: NDArray[np.int8]) -> NDArray[np.int8]:
    """Clear samples between two set ones less than HOLD_S apart count as set."""
    state = state.copy()
    is_set = state == SET
    index = np.arange(len(ts))
    previous = np.maximum.accumulate(np.where(is_set, index, -1))
    following = np.minimum.accumulate(np.where(is_set, index, len(ts))[::-1])[::-1]
    inside = (state == CLEAR) & (previous >= 0) & (following < len(ts))
    rows = np.flatnonzero(inside)
    if len(rows):
        breaks = np.concatenate(([0], np.cumsum(~joined)))
        p, f = previous[rows], following[rows]
        unknown = np.concatenate(([0], np.cumsum(state == UNKNOWN)))
        short = (ts[f] - ts[p + 1] < HOLD_S) & (breaks[p] == breaks[f]) & (unknown[f] == unknown[p])
        state[rows[short]] = SET
    return state


def excluded_rows(
    excluded: pl.DataFrame | None,
    bottleneck_class: str,
    names: Sequence[str | None],
    node: NDArray[np.int64],
    ts: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Samples about which nothing may be concluded: their node was drained, silenced or acted on.

    Args:
        excluded: Spans `node` (null: all), `start`, `end` (UTC, may be null) and, where there, `bottleneck_class`
            (null: all).
        bottleneck_class: The class that is asked about.
        names: Node of each code.
        node: Node code of each sample, -1 for none.
        ts: Times, seconds.
    """
    out = np.zeros(len(ts), dtype=bool)
    if excluded is None or not excluded.height:
        return out
    if "bottleneck_class" in excluded.columns:
        one = pl.col("bottleneck_class")
        excluded = excluded.filter(one.is_null() | (one == bottleneck_class))
    codes = {name: code for code, name in enumerate(names)}
    for name, start, end in excluded.select("node", "start", "end").iter_rows():
        if name is not None and name not in codes:
            continue
        until = np.inf if end is None else end.timestamp()
        inside = (ts >= start.timestamp()) & (ts < until)
        out |= inside if name is None else inside & (node == codes[name])
    return out


def own_usual(group: NDArray[np.int64], values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Median of `values` within each group, back on its rows; NaN where there is none."""
    frame = pl.DataFrame({"group": group, "value": values}).with_columns(pl.col("value").fill_nan(None))
    median = frame.select(pl.col("value").median().over("group")).to_series()
    return median.cast(pl.Float64).fill_null(np.nan).to_numpy()

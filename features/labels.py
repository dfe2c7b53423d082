"""When a bottleneck really happened: onsets and their ends by a written rule, from recorded samples.

Here belong the rules and the bookkeeping of what is unknown; the distances they rest on stand in
`features/conditions.py`. Labels may look at all of a job, forecasts never see them before they happened.

| class | set when |
|---|---|
| `thermal_throttle` | a thermal slowdown reason is active, or the margin to slowdown is ≤ 0 °C (only where the exporter gives neither: core temperature ≥ the model's slowdown temperature) |
| `nvlink_saturation` | sent or received over NVLink ≥ 90 % of what the model achieves, or under 70 % of gang peers at the same time while those talk no more than usual; and, where steps are known, step time > 1.15 × the job's own. Without steps the second half also needs the GPU to stand under 70 % of its own usual share of its peers, for ranks of a pipeline differ by nature |
| `memory_exhaustion` | total − reserved − used < 1 GiB after growth beyond the job's own plateau by 2 % of the device; or the job failed while its memory was growing so |

A sample speaks for the interval before it: exporters report rates as means since their last sample. An onset is a
change from clear to set that holds for max(10 s, two fresh samples); a condition that returns within 10 s never went,
and links that rest during a checkpoint clear only when the job's steps are fast again.
"""  # noqa: E501 - a table cell is one line

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.conditions import CLASSES, INDEX
from features.history import SampleHistory
from features.thresholds import ThresholdBook
from features.vocabulary import conform, schema

HOLD_S = 10.0
FRESH_SAMPLES = 2
GAP_INTERVALS = 3.0  # a silence longer than this many intervals (and MIN_GAP_S) hides what happened in it
MIN_GAP_S = 60.0
MIN_PEERS = 2
GROWN_GIB = 1.0  # over the plateau when a job failed
CALM_RATIO = 1.15
IDLE_FILL_RATIO = 0.05  # peers that hardly talk say nothing about each other
FAILED_STATES = ("FAILED", "OUT_OF_MEMORY")  # the latter says host memory, but the device was filling up
TABLE = "feat_labels"

SET, CLEAR, UNKNOWN = np.int8(1), np.int8(0), np.int8(-1)


class Sampled(Protocol):
    """Times of samples, sorted by what they are of: all that spans and gaps are told by.

    Attributes:
        gpu: Code of what each sample is of, ascending; ts: seconds; interval_s: median time between samples of one.
    """

    gpu: NDArray[np.int64]
    ts: NDArray[np.float64]
    interval_s: float


def gap_s(history: Sampled) -> float:
    """Silence after which the state of a GPU counts as unknown, seconds."""
    return max(MIN_GAP_S, GAP_INTERVALS * history.interval_s)


def states(
    history: SampleHistory,
    bottleneck_class: str,
    book: ThresholdBook,
    excluded: pl.DataFrame | None = None,
) -> NDArray[np.int8]:
    """Whether the condition of a class was set at every sample: `SET`, `CLEAR` or `UNKNOWN`.

    Args:
        history: The samples.
        bottleneck_class: The class.
        book: Limits of the nodes.
        excluded: Spans `node`, `start`, `end` (UTC, end may be null) in which a node was drained, silenced or acted on.

    Returns:
        Shape (samples,).
    """
    distance = history.distance(bottleneck_class)
    with np.errstate(invalid="ignore"):
        state = np.where(np.isnan(distance), UNKNOWN, (distance <= 0).astype(np.int8))
    if bottleneck_class == "nvlink_saturation":
        state = _through_pauses(history, book, state)
        state[_slower_than_peers(history, book) & (state == CLEAR)] = SET
    if excluded is not None and excluded.height:
        for node, start, end in excluded.select("node", "start", "end").iter_rows():
            if node in history.node_names:
                code = history.node_names.index(node)
                until = np.inf if end is None else end.timestamp()
                inside = (history.node == code) & (history.ts >= start.timestamp()) & (history.ts < until)
                state[inside] = UNKNOWN
    return state


def _through_pauses(history: SampleHistory, book: ThresholdBook, state: NDArray[np.int8]) -> NDArray[np.int8]:
    """Links that rest while the job writes a checkpoint have not cleared: the step time says when they have."""
    steps = history.values[INDEX["step_ratio"]]
    with np.errstate(invalid="ignore"):
        slow = (steps > book.arrays(history.node_names)["step_slow_ratio"][history.node]) & (state != UNKNOWN)
    n = len(state)
    if n < 2:
        return state
    joined = (np.diff(history.gpu) == 0) & (np.diff(history.ts) <= gap_s(history)) & slow[1:] & slow[:-1]
    begins = np.concatenate(([True], ~joined))
    index = np.arange(n)
    block = np.maximum.accumulate(np.where(begins, index, 0))
    last_set = np.maximum.accumulate(np.where(state == SET, index, -1))
    return np.where(slow & (last_set >= block), SET, state)


def _slower_than_peers(history: SampleHistory, book: ThresholdBook) -> NDArray[np.bool_]:
    """NVLink rate under 70 % of the gang's, with slow steps (or, without steps, under 70 % of the usual share)."""
    fill = history.values[INDEX["nvlink_fill_ratio"]]
    out = np.zeros(len(fill), dtype=bool)
    has = ~np.isnan(fill) & (history.job >= 0)
    if not has.any():
        return out
    # Samples of one job within one interval are taken as simultaneous.
    bins = np.floor(history.ts[has] / max(history.interval_s, 1.0)).astype(np.int64)
    group = history.job[has] * (bins.max() + 1 - bins.min()) + (bins - bins.min())
    _, code = np.unique(group, return_inverse=True)
    own = fill[has].astype(np.float64)
    n = np.bincount(code)[code] - 1
    mean = (np.bincount(code, weights=own)[code] - own) / np.maximum(n, 1)
    talks = (n >= MIN_PEERS) & (mean >= IDLE_FILL_RATIO)
    share = np.where(talks, own / np.maximum(mean, 1e-9), np.nan)
    limits = book.arrays(history.node_names)
    node = history.node[has]
    steps = history.values[INDEX["step_ratio"]][has]
    of_job = history.gpu[has] * (history.job.max() + 1) + history.job[has]
    usual = _usual(of_job, share)
    # Peers that talk more than they are used to are the ones in trouble: the others only wait for them.
    calm = mean <= CALM_RATIO * _usual(of_job, np.where(talks, mean, np.nan))
    with np.errstate(invalid="ignore"):
        low = share < limits["peer_slow_ratio"][node]
        by_steps = steps > limits["step_slow_ratio"][node]
        by_habit = share < limits["peer_slow_ratio"][node] * usual
    out[has] = low & calm & np.where(np.isnan(steps), by_habit, by_steps)
    return out


def _usual(group: NDArray[np.int64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of `share` within each group, back on its rows; NaN where there is none."""
    frame = pl.DataFrame({"group": group, "share": share}).with_columns(pl.col("share").fill_nan(None))
    return (
        frame.select(pl.col("share").median().over("group")).to_series().cast(pl.Float64).fill_null(np.nan).to_numpy()
    )


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


def label_bottlenecks(
    samples: pl.DataFrame | SampleHistory,
    jobs: pl.DataFrame | None,
    thresholds: ThresholdBook,
    *,
    excluded: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Onsets of every class in recorded samples.

    A class whose columns are absent or null has no rows: its state is unknown, never clear. Spans that were set when
    first seen, or that vanish from sight before they have held, are kept as censored rows.

    Args:
        samples: Rows of `core_gpu_samples`, any subset of its quantities; or their history.
        jobs: Rows of `core_jobs`, to tell jobs that failed; None: not known.
        thresholds: Limits of the nodes.
        excluded: Spans `node`, `start`, `end` in which nothing may be concluded: drained, silenced or acted on.

    Returns:
        Rows of `feat_labels`, by onset time.
    """
    history = samples if isinstance(samples, SampleHistory) else SampleHistory(samples, thresholds)
    parts = [pl.DataFrame(schema=schema(TABLE))]
    for name in CLASSES:
        state = states(history, name, thresholds, excluded)
        found = runs(history, state)
        keep = found.has_held | ~found.is_known
        rows, end = found.first[keep], found.end[keep]
        frame = _frame(history, name, rows, history.ts[rows], np.where(end >= 0, history.ts[end], np.nan))
        parts.append(frame.with_columns(pl.Series("is_censored", ~(found.is_known & found.has_held)[keep])))
        if name == "memory_exhaustion" and jobs is not None:
            last, onset_s = failed_while_growing(history, state, found, jobs)
            frame = _frame(history, name, last, onset_s, np.full(len(last), np.nan))
            parts.append(frame.with_columns(pl.lit(False).alias("is_censored")))
    labels = pl.concat([conform(part, TABLE) for part in parts])
    return labels.unique(["gpu_uuid", "bottleneck_class", "onset_time"], keep="first").sort("onset_time", "gpu_uuid")


def _frame(
    history: SampleHistory,
    name: str,
    rows: NDArray[np.int64],
    onset_s: NDArray[np.float64],
    clear_s: NDArray[np.float64],
) -> pl.DataFrame:
    job_names = np.array([*history.job_ids, None], dtype=object)

    def times(seconds: NDArray[np.float64]) -> pl.Series:
        micros = pl.Series(seconds).fill_nan(None) * 1e6
        return micros.round().cast(pl.Int64).cast(pl.Datetime("us", "UTC"))

    return pl.DataFrame(
        {
            "cluster": pl.Series([history.cluster] * len(rows), dtype=pl.String),
            "node": pl.Series([history.node_names[i] for i in history.node[rows]], dtype=pl.String),
            "gpu_uuid": pl.Series([history.uuids[i] for i in history.gpu[rows]], dtype=pl.String),
            "job_id": pl.Series(job_names[history.job[rows]].tolist(), dtype=pl.String),
            "bottleneck_class": pl.Series([name] * len(rows), dtype=pl.String),
            "onset_time": times(onset_s),
            "clear_time": times(clear_s),
        }
    )


def failed_while_growing(
    history: SampleHistory, state: NDArray[np.int8], found: Runs, jobs: pl.DataFrame
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Jobs that failed while their memory was on its way over the limit, before that could be seen to hold.

    Args:
        history: The samples.
        state: States of `memory_exhaustion`.
        found: Its spans.
        jobs: Rows of `core_jobs`.

    Returns:
        Row of the last sample of the job on the GPU, and the time of the onset in seconds: that sample's where it was
        set already, else the job's end.
    """
    none = np.zeros(0, dtype=np.int64), np.zeros(0)
    n = len(history.ts)
    if not {"job_id", "state", "end_time"} <= set(jobs.columns) or not history.job_ids or n < 2:
        return none
    failed = jobs.filter(pl.col("state").is_in(FAILED_STATES) & pl.col("end_time").is_not_null())
    ended = {job: end.timestamp() for job, end in failed.select("job_id", "end_time").iter_rows()}
    at = np.array([ended.get(job, np.nan) for job in history.job_ids])
    changes = np.concatenate(((np.diff(history.gpu) != 0) | (np.diff(history.job) != 0), [True]))
    last = np.flatnonzero(changes & (history.job >= 0))
    last = last[last > 0]
    end_s = at[history.job[last]]
    distance = history.distance("memory_exhaustion")
    over = history.values[INDEX["over_plateau_gib"]]
    with np.errstate(invalid="ignore", divide="ignore"):
        pace = (distance[last - 1] - distance[last]) / (history.ts[last] - history.ts[last - 1])
        near_end = (end_s >= history.ts[last]) & (end_s - history.ts[last] <= 2 * history.interval_s)
        same = (history.gpu[last] == history.gpu[last - 1]) & (history.job[last] == history.job[last - 1])
        # Jobs die when an allocation fails, which may be one interval's growth ahead of what samples saw.
        reached = distance[last] <= pace * (end_s - history.ts[last] + history.interval_s)
        growing = (pace > 0) & (over[last] >= GROWN_GIB)
    held = np.zeros(n + 1, dtype=np.int64)
    np.add.at(held, found.first[found.has_held], 1)
    np.add.at(held, found.last[found.has_held] + 1, -1)
    in_span = np.cumsum(held)[:-1] > 0
    rows = last[near_end & same & reached & growing & (state[last] != UNKNOWN) & ~in_span[last]]
    return rows, np.where(state[rows] == SET, history.ts[rows], at[history.job[rows]])

"""When links hold a job back beyond what their own level says: pauses of a job, and GPUs that fall behind their peers.

Here belongs what `nvlink_saturation` needs besides its distance to the limit; spans stand in `features/label_spans.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.conditions import INDEX
from features.history import SampleHistory
from features.label_spans import SET, UNKNOWN, gap_s, own_usual
from features.thresholds import ThresholdBook

MIN_PEERS = 2
CALM_RATIO = 1.15
IDLE_FILL_RATIO = 0.05  # peers that hardly talk say nothing about each other


def through_pauses(history: SampleHistory, book: ThresholdBook, state: NDArray[np.int8]) -> NDArray[np.int8]:
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


def slower_than_peers(history: SampleHistory, book: ThresholdBook) -> NDArray[np.bool_]:
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
    usual = own_usual(of_job, share)
    # Peers that talk more than they are used to are the ones in trouble: the others only wait for them.
    calm = mean <= CALM_RATIO * own_usual(of_job, np.where(talks, mean, np.nan))
    with np.errstate(invalid="ignore"):
        low = share < limits["peer_slow_ratio"][node]
        by_steps = steps > limits["step_slow_ratio"][node]
        by_habit = share < limits["peer_slow_ratio"][node] * usual
    out[has] = low & calm & np.where(np.isnan(steps), by_habit, by_steps)
    return out

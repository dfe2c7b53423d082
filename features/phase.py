"""The beat of a job as its GPU shows it: how long a step or a pause takes to come again, and where in it the GPU is.

Here belongs the estimate of period and phase from activity; other windows stand in `features/windows.py`. Training
alternates between work and waiting: steps, checkpoints, evaluations. A period is only told where activity rises
through its own mean at least three times at like intervals, so that a single dip is none; a beat faster than twice the
cells of `features/ring.py`, or than twice the sampling, cannot be seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

PHASE = ("period_s", "phase_ratio", "activity_dip")
NEAR_PAST_S = 90.0
MIN_RISES = 3
MIN_SWING = 0.05  # spread of activity under which there is no beat
MAX_UNEVEN = 0.3  # spread of the intervals between rises, of their mean


def phase_features(activity: Floats, t: Floats, mask: Flags, is_even: Flags) -> Floats:
    """Period, phase and dip of windows.

    Args:
        activity: Activity ratio, shape (rows, slots), oldest first.
        t: Time of each sample before the row's moment, ≤ 0, seconds.
        mask: Samples that count.
        is_even: Samples that stand for equal times over the whole window.

    Returns:
        Shape (rows, len(PHASE)): seconds from one rise to the next; share of a period since the last rise, in [0, 1);
        newest activity under the highest of the window. NaN where not known.
    """
    out = np.full((len(t), len(PHASE)), np.nan, dtype=np.float32)
    if not mask.any():
        return out
    near, whole = _beat(activity, t, mask & (t >= -NEAR_PAST_S)), _beat(activity, t, mask & is_even)
    period, last = (np.where(np.isnan(near[0]), b, a) for a, b in zip(near, whole, strict=True))
    with np.errstate(invalid="ignore"):
        out[:, 0] = period
        out[:, 1] = np.mod(-last / period, 1.0)
    some = mask.any(axis=1)
    newest = activity.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    high = np.where(mask, activity, -np.inf).max(axis=1)
    out[some, 2] = (high - activity[np.arange(len(t)), newest])[some]
    return out


def _beat(activity: Floats, t: Floats, mask: Flags) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Period and time of the last rise through the mean, per row, NaN where there is no beat."""
    n = mask.sum(axis=1)
    safe = np.maximum(n, 1)
    mean = np.where(mask, activity, 0).sum(axis=1) / safe
    above = np.where(mask, activity - mean[:, None], 0).astype(np.float64)
    swings = np.sqrt((above**2).sum(axis=1) / safe) >= MIN_SWING
    period, latest = np.full(len(t), np.nan), np.full(len(t), np.nan)
    rows = np.flatnonzero(swings & (n >= 2 * MIN_RISES))
    if not len(rows):
        return period, latest
    above, t, mask = above[rows], t[rows].astype(np.float64), mask[rows]
    # The sample before each: the newest earlier one that counts.
    slot = np.where(mask, np.arange(mask.shape[1]), -1)
    before = np.concatenate((np.full((len(rows), 1), -1), np.maximum.accumulate(slot, axis=1)[:, :-1]), axis=1)
    has, at = mask & (before >= 0), np.maximum(before, 0)
    x0, t0 = np.take_along_axis(above, at, axis=1), np.take_along_axis(t, at, axis=1)
    rises = has & (x0 < 0) & (above >= 0)
    share = np.where(rises, -x0 / np.where(rises, above - x0, 1), 0)
    when = np.where(rises, t0 + share * np.where(rises, t - t0, 0), np.nan)
    count = rises.sum(axis=1)
    first = np.where(rises, when, np.inf).min(axis=1)
    last = np.where(rises, when, -np.inf).max(axis=1)
    # Spread of the intervals: rises against an even beat between the first and the last.
    order = np.cumsum(rises, axis=1) - 1
    enough = count >= MIN_RISES
    steps = np.maximum(count - 1, 1)
    mean_s = np.where(enough, last - first, np.nan) / steps
    ideal = np.where(enough, first, 0)[:, None] + order * np.where(enough, mean_s, 0)[:, None]
    off = np.where(rises & enough[:, None], when - ideal, 0)
    uneven = np.sqrt((off**2).sum(axis=1) / np.maximum(count, 1))
    beats = enough & (uneven <= MAX_UNEVEN * np.where(enough, mean_s, np.inf))
    period[rows[beats]], latest[rows[beats]] = mean_s[beats], last[beats]
    return period, latest

"""How long jobs have just waited, by group: the newest that started, and the newest that was submitted before.

Here belong the columns and the curve made of waits of the past; not the state of the queue (`features/job_queue.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory
from features.job_recency import row_mean, row_quantile, row_quantiles

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RECENT_WAITS = 32
RECENT_LEVELS = tuple((2 * k + 1) / 20 for k in range(10))
WAIT_GROUPS = ("all", "queue", "user", "size", "shape")
DENSE_GROUPS = ("all", "user", "key", "shape")  # of these also how many did not wait at all, and how long the others
_ONE_S = 1.0  # up to a second is no wait

RECENT_FEATURES: tuple[str, ...] = (
    *(f"{group}_{name}" for group in WAIT_GROUPS for name in ("last", "median", "high", "within_60s", "last_age")),
    *(f"{group}_{name}" for group in DENSE_GROUPS for name in (
        "none_4", "none_16", "some_low", "some_median", "before_wait", "before_waits", "before_age")),
    *(f"recent_q{round(100 * level):02d}" for level in RECENT_LEVELS),
)  # fmt: skip


def recent_columns(
    history: JobHistory, hashes: dict[str, NDArray[np.uint64]], moments: Ints, own: Ints
) -> dict[str, Floats]:
    """Columns `RECENT_FEATURES`, each of shape (n,); waits and ages are ln(seconds).

    Args:
        history: Jobs of the cluster.
        hashes: Group hash of each job asked about, for every group of `WAIT_GROUPS` and `DENSE_GROUPS`.
        moments: When each is asked about.
        own: Row of each in the history, −1 where it is not in it; no job sees itself.
    """
    past = history.table
    columns: dict[str, Floats] = {}
    recent = np.full((len(moments), len(RECENT_LEVELS)), np.nan)
    for group in dict.fromkeys(WAIT_GROUPS + DENSE_GROUPS):
        slots = history.newest(group, "start", hashes[group], moments, RECENT_WAITS)
        filled = slots.is_filled & (slots.rows != own[:, None])
        logs = np.where(filled, np.log(np.maximum(past.wait_s[slots.rows], _ONE_S)), np.nan)
        if group in WAIT_GROUPS:
            started = past.start[slots.rows[:, 0]]
            columns |= {
                f"{group}_last": logs[:, 0],
                f"{group}_median": row_quantile(logs, 0.5),
                f"{group}_high": row_quantile(logs, 0.9),
                f"{group}_within_60s": row_mean(np.where(np.isnan(logs), np.nan, logs <= np.log(60.0))),
                f"{group}_last_age": np.where(filled[:, 0], np.log1p(np.maximum(moments - started, 0) / 1e6), np.nan),
            }
        if group in DENSE_GROUPS:
            none = np.where(np.isnan(logs), np.nan, logs <= 0.0)
            some = np.where(logs > 0.0, logs, np.nan)
            columns |= {
                f"{group}_none_4": row_mean(none[:, :4]), f"{group}_none_16": row_mean(none[:, :16]),
                f"{group}_some_low": row_quantile(some, 0.1), f"{group}_some_median": row_quantile(some, 0.5),
            }  # fmt: skip
            columns |= _before(history, group, hashes[group], moments, own)
        if group in ("all", "queue", "shape"):  # the narrowest with at least eight entries stays
            enough = filled.sum(axis=1) >= 8
            quantiles = np.stack(row_quantiles(logs, RECENT_LEVELS), axis=1)
            recent = np.where(enough[:, None] | np.isnan(recent), quantiles, recent)
    return columns | {f"recent_q{round(100 * level):02d}": recent[:, k] for k, level in enumerate(RECENT_LEVELS)}


def _before(history: JobHistory, group: str, hashes: NDArray[np.uint64], moments: Ints, own: Ints) -> dict[str, Floats]:
    """The newest submitted of the group: what it waited or has waited, whether it still does, since when."""
    past = history.table
    slots = history.newest(group, "submit", hashes, moments, 2)
    second = slots.rows[:, 0] == own
    rows = np.where(second, slots.rows[:, 1], slots.rows[:, 0])
    there = np.where(second, slots.is_filled[:, 1], slots.is_filled[:, 0])
    started, gone = past.start[rows] <= moments, past.end[rows] <= moments
    until = np.where(started, past.start[rows], np.where(gone, past.end[rows], moments))
    waited = np.log1p(np.maximum(until - past.submit[rows], 0) / 1e6)
    age = np.log1p(np.maximum(moments - past.submit[rows], 0) / 1e6)
    values = {"before_wait": waited, "before_waits": (~started & ~gone) * 1.0, "before_age": age}
    return {f"{group}_{name}": np.where(there, value, np.nan) for name, value in values.items()}

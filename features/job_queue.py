"""State of the queue at a moment, as numbers: the features of the wait forecaster.

What waits, what runs and until when by its limit or by keyed recency, and what is free. Limits and forecasts stand for
ends that have not happened. Here belong features of the queue; not what it would do by its rules
(`features/queue_plan.py`), how long others have just waited (`features/recent_waits.py`) or the job's own past
(`features/jobs.py`).
"""

from __future__ import annotations

from datetime import datetime

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.jobs import moments_of
from features.queue_plan import PLAN_FEATURES, plan_columns
from features.queue_state import QueueState, since_2000
from features.recent_waits import DENSE_GROUPS, RECENT_FEATURES, WAIT_GROUPS, recent_columns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SHARED_GROUPS = ("all", "queue", "user")
_CHUNK = 50_000

WAIT_FEATURES: tuple[str, ...] = (
    "elapsed", "limit", "width", "nodes", "gpus", "memory", "hour", "weekday",
    *(f"{group}_{name}" for group in _SHARED_GROUPS for name in ("pending", "running")),
    *(f"{group}_{name}" for group in ("all", "queue") for name in (
        "pending_width", "pending_work", "running_width", "running_left", "started_1h", "submitted_1h")),
    "free", "free_ratio", "fits", "width_share", "shadow_limit", "shadow_keyed", "drain",
    *PLAN_FEATURES, *RECENT_FEATURES,
)  # fmt: skip


def wait_features(
    jobs: pl.DataFrame | JobTable, history: pl.DataFrame | JobHistory, at: datetime | int | Ints | None = None
) -> pl.DataFrame:
    """Features of waiting jobs as known at a moment.

    Args:
        jobs: Jobs asked about.
        history: Jobs of the same cluster in their newest known state, the pending and running ones included; rows
            from after the moment change nothing.
        at: The moment: one for all, one per job (µs), or None for each job's own submit time.

    Returns:
        One row per job in order, columns `WAIT_FEATURES`, Float32; durations are ln(seconds). Unknown is NaN.
    """
    table = jobs if isinstance(jobs, JobTable) else JobTable(jobs)
    matrix = wait_matrix(table, JobHistory.of(history), moments_of(table, at))
    return pl.from_numpy(matrix, schema=dict.fromkeys(WAIT_FEATURES, pl.Float32))


def wait_matrix(table: JobTable, history: JobHistory, moments: Ints) -> NDArray[np.float32]:
    """`wait_features` as a matrix of shape (n, len(WAIT_FEATURES))."""
    matrix = np.empty((table.count, len(WAIT_FEATURES)), dtype=np.float32)
    state = QueueState.of(history)
    own = history.own_rows(table)
    shadows = state.shadows(table.width, moments, own) | plan_columns(state, table, moments, own)
    for first in range(0, table.count, _CHUNK):
        part = slice(first, first + _CHUNK)
        columns = _columns(table, state, moments[part], own[part], part)
        columns |= {name: values[part] for name, values in shadows.items()}
        matrix[part] = np.stack([columns[name] for name in WAIT_FEATURES], axis=1)
    return matrix


def _columns(table: JobTable, state: QueueState, moments: Ints, own: Ints, part: slice) -> dict[str, Floats]:
    history, past = state.history, state.history.table
    width = table.width[part]
    is_own = own >= 0
    at = np.maximum(own, 0)
    own_runs = is_own & (past.start[at] <= moments) & (past.end[at] > moments)
    own_started = is_own & (past.start[at] <= moments)
    own_waits = is_own & (past.submit[at] <= moments) & (past.start[at] > moments)
    past_start = past.start[at]
    now_s = since_2000(moments)
    day_s = (moments // 1_000_000) % 86_400
    columns: dict[str, Floats] = {
        "elapsed": np.log1p(np.maximum(moments - table.submit[part], 0) / 1e6),
        "limit": np.log(table.limit_s[part]), "width": np.log(width), "nodes": np.log1p(table.nodes[part]),
        "gpus": np.log1p(table.gpus[part]), "memory": np.log1p(table.memory_mib[part]), "hour": day_s / 3600,
        "weekday": (moments // 86_400_000_000 + 3) % 7 * 1.0,
    }  # fmt: skip
    hour_ago = moments - 3_600_000_000
    hashes = {group: table.group(group)[part] for group in dict.fromkeys(WAIT_GROUPS + DENSE_GROUPS)}
    for group in _SHARED_GROUPS:
        codes = hashes[group]

        def total(event: str, weight: str = "one", when: Ints = moments, group=group, codes=codes) -> Floats:
            return state.total(group, event, weight, codes, when)

        pending = total("submit") - total("start") - total("cancel") - own_waits
        running = total("start") - total("end") - own_runs
        columns[f"{group}_pending"], columns[f"{group}_running"] = np.log1p(pending.clip(0)), np.log1p(running.clip(0))
        if group == "user":
            continue
        own_width, own_work = own_waits * width, own_waits * (state.work[at])
        pending_width = total("submit", "width") - total("start", "width") - total("cancel", "width") - own_width
        pending_work = total("submit", "work") - total("start", "work") - total("cancel", "work") - own_work
        running_width = total("start", "width") - total("end", "width") - own_runs * width
        own_end = own_runs * (state.limit_end[at])
        left = total("start", "limit_end") - total("end", "limit_end") - own_end - running_width * now_s
        started_1h = total("start") - total("start", when=hour_ago) - (own_started & (past_start > hour_ago))
        submitted_1h = total("submit") - total("submit", when=hour_ago) - (is_own & (table.submit[part] > hour_ago))
        columns |= {
            f"{group}_pending_width": np.log1p(pending_width.clip(0)),
            f"{group}_pending_work": np.log1p(pending_work.clip(0)),
            f"{group}_running_width": np.log1p(running_width.clip(0)),
            f"{group}_running_left": np.log1p(left.clip(0)),
            f"{group}_started_1h": np.log1p(started_1h.clip(0)),
            f"{group}_submitted_1h": np.log1p(submitted_1h.clip(0)),
        }
        if group == "all":
            capacity = state.capacity(moments)
            free = capacity - running_width
            columns |= {
                "free": np.log1p(free.clip(0)), "free_ratio": free / np.maximum(width, 1),
                "fits": (free >= width) * 1.0, "width_share": width / np.maximum(capacity, 1),
                "drain": np.log1p((pending_work + left.clip(0)).clip(0) / np.maximum(capacity, 1)),
            }  # fmt: skip
    return columns | recent_columns(history, hashes, moments, own)

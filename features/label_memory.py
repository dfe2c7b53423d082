"""Jobs that ran out of device memory between two samples: the end of the job tells what levels could not.

Here belongs what `memory_exhaustion` needs besides its distance to the limit; spans stand in `features/label_spans.py`.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.conditions import INDEX
from features.history import SampleHistory
from features.label_spans import SET, UNKNOWN, Runs

GROWN_GIB = 1.0  # over the plateau when a job failed
FAILED_STATES = ("FAILED", "OUT_OF_MEMORY")  # the latter says host memory, but the device was filling up


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

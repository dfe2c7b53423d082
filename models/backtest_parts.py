"""Parts of the jobs that a backtest tells apart, and the spread of jobs that nothing tells apart.

Here belong who is in which part and what the siblings of a job say; not the figures of the parts
(`models/backtest_figures.py`) and not their names in words (`models/backtest_words.py`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_recency import row_quantile
from models.recency import STRATA

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SIBLINGS_S = 60.0  # submitted within this of each other
MIN_SIBLINGS = 2
_NEAREST = 50  # siblings on either side that are looked at
_DAY_US = 86_400_000_000
_HOUR_S = 3_600.0
_SIZES = ((0.0, 1.0, "size_1"), (1.0, 8.0, "size_2_8"), (8.0, 64.0, "size_9_64"), (64.0, np.inf, "size_over_64"))
_LIMITS = (
    (0.0, _HOUR_S, "limit_upto_1h"), (_HOUR_S, 12 * _HOUR_S, "limit_1h_12h"), (12 * _HOUR_S, np.inf, "limit_over_12h")
)  # fmt: skip
_LENGTHS = (
    (0.0, 600.0, "ran_under_10m"), (600.0, _HOUR_S, "ran_10m_1h"), (_HOUR_S, 12 * _HOUR_S, "ran_1h_12h"),
    (12 * _HOUR_S, np.inf, "ran_over_12h"),
)  # fmt: skip
SIBLING_PART = "siblings"


def parts_of(history: JobHistory, rows: Ints, *, outcome: str, by_length: bool) -> dict[str, Bools]:
    """Who is in which part: by what is known of key and user, by GPUs, size, limit, length and week of submit.

    Args:
        history: Jobs of the cluster.
        rows: Rows of it, shape (n,).
        outcome: Event that made earlier jobs known, `run` or `start`.
        by_length: Parts by how long the jobs ran, too: chosen by the outcome, so that hard jobs are among themselves.

    Returns:
        Name to shape (n,); the first are `STRATA`, the others may be empty.
    """
    table = history.table
    known = recency_of(history, rows, outcome)
    parts = {label: known == k for k, label in enumerate(STRATA)}
    parts["gpu"] = table.gpus[rows] > 0
    width, limit_s = table.width[rows], table.limit_s[rows]
    parts |= {name: (width > low) & (width <= high) for low, high, name in _SIZES}
    parts |= {name: (limit_s > low) & (limit_s <= high) for low, high, name in _LIMITS}
    parts["limit_none"] = np.isnan(limit_s)
    if by_length:
        run_s = table.runtime_s[rows]
        parts |= {name: (run_s >= low) & (run_s < high) for low, high, name in _LENGTHS}
    week = (table.submit[rows] // _DAY_US + 3) // 7  # from Monday
    for number in np.unique(week).tolist():
        monday = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=number * 7 - 3)
        parts[f"week_{monday:%Y-%m-%d}"] = week == number
    return parts


def recency_of(history: JobHistory, rows: Ints, outcome: str) -> Ints:
    """Index into `STRATA` of each row: whether an earlier job of its key, or of its user alone, was known at submit."""
    submit = history.table.submit[rows]
    key, user = (
        history.newest(group, outcome, history.group(group)[rows], submit, 1).count > 0 for group in ("key", "user")
    )
    return np.where(key, 0, np.where(user, 1, 2))


def sibling_medians_s(table: JobTable, rows: Ints) -> Floats:
    """Median runtime of the other jobs that nothing known at submit tells from each job; seconds, shape (n,).

    Siblings are of the same user, name, queue, request and limit and were submitted within `SIBLINGS_S`; each job's
    nearest hundred count. NaN where there are fewer than `MIN_SIBLINGS`. Nobody knows this at the submit: what error
    is left with it is in the jobs, not in the forecast.
    """
    same = ["user", "account", "queue", "name", "nodes", "cpus", "gpus", "memory_mib", "time_limit_s"]
    number = table.frame[rows].select(pl.struct(same).rank("dense")).to_series().to_numpy()
    submit, run_s = table.submit[rows], table.runtime_s[rows]
    order = np.lexsort((submit, number))
    number, submit, run_s = number[order], submit[order], run_s[order]
    near = np.full((len(rows), 2 * _NEAREST), np.nan)
    for step in range(1, min(_NEAREST, len(rows) - 1) + 1):
        is_sibling = (number[step:] == number[:-step]) & (submit[step:] - submit[:-step] <= SIBLINGS_S * 1e6)
        if not is_sibling.any():
            break
        near[step:, 2 * step - 2] = np.where(is_sibling, run_s[:-step], np.nan)
        near[:-step, 2 * step - 1] = np.where(is_sibling, run_s[step:], np.nan)
    has = (~np.isnan(near)).sum(axis=1) >= MIN_SIBLINGS
    found = np.full(len(rows), np.nan)
    found[order[has]] = row_quantile(near[has], 0.5)
    return found

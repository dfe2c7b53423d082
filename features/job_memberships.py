"""What a job belongs to beside its user, as numbers: an account, an array, a kind of node or GPU.

Few clusters tell all of these. A job that has none, or whose account is named as its user, has NaN throughout, and what
says nothing is left out of a fit (`models/forest.py`). Siblings that still run count with their elapsed time alone; of
nodes and GPUs only what was asked for counts, never what was given. Here belong these features; not those that every
job has (`features/jobs.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled
from features.job_history import JobHistory, JobTable
from features.job_started import SURVIVAL, started_columns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]

LOOKED_AT = 20  # newest ended jobs of a group
_RECENT = ("last1", "last2", "median", "count", "age", "bad")
_GROUPS = ("account", "own_account", "kind", "array")
MEMBER_FEATURES: tuple[str, ...] = (
    *(f"{group}_{name}" for group in _GROUPS for name in _RECENT),
    *(f"array_{name}" for name in SURVIVAL), "array_task",
)  # fmt: skip


def member_groups(table: JobTable) -> tuple[str, ...]:
    """Groups that some of the jobs belong to."""
    return tuple(group for group in _GROUPS if _members(table, group).any())


def prepare(history: JobHistory, groups: tuple[str, ...]) -> None:
    """Make what lookups in these groups need, which threads then share."""
    for group in groups:
        history.index(group, "run")
    if "array" in groups:
        history.index("array", "start")


def member_columns(
    table: JobTable, part: slice, history: JobHistory, groups: dict[str, Hashes], moments: Ints, own: Ints
) -> dict[str, Floats]:
    """Columns `MEMBER_FEATURES` of some jobs, each of shape (n,); durations are ln(seconds).

    Args:
        table: Jobs asked about.
        part: Those of them that are meant, n rows.
        history: Jobs of the cluster.
        groups: Hashes of these rows by group, of `member_groups`.
        moments: The moment of each, µs.
        own: Row of each in the history, −1 where it is not in it.
    """
    out = dict.fromkeys(MEMBER_FEATURES, np.full(len(moments), np.nan))
    out["array_task"] = np.log1p(table.array_task[part])
    for group in _GROUPS:
        which = np.flatnonzero(_members(table, group)[part])
        if not len(which):
            continue
        hashes, then = groups[group][which], moments[which]
        found = dict(zip(_RECENT, _ended(history, group, hashes, then), strict=True))
        if group == "array":
            found |= started_columns(history, group, hashes, then, own[which])
        for name, values in found.items():
            column = np.full(len(moments), np.nan)
            column[which] = values
            out[f"{group}_{name}"] = column
    return out


def _members(table: JobTable, group: str) -> Bools:
    return {"kind": table.has_kind, "array": table.has_array}.get(group, table.has_account)


def _ended(history: JobHistory, group: str, hashes: Hashes, moments: Ints) -> Floats:
    """Rows `_RECENT` of each group's newest ended jobs, shape (6, n)."""
    index = history.index(group, "run")
    first, last = index.before(hashes, moments)
    out = np.full((len(_RECENT), len(moments)), np.nan)
    table = history.table
    _newest(index.rows, first, last, history.log_runtime, table.end, table.is_bad, moments, out)
    return out


@compiled
def _newest(
    laid: Ints, first: Ints, last: Ints, log_runtime: Floats, end: Ints, is_bad: Bools, moments: Ints, out: Floats
) -> None:
    for i in range(len(first)):
        found = min(LOOKED_AT, last[i] - first[i])
        out[3, i] = np.log1p(last[i] - first[i])
        if found <= 0:
            continue
        values, bad = np.empty(found), 0.0
        for k in range(found):
            row = laid[last[i] - 1 - k]
            values[k] = log_runtime[row]
            bad += is_bad[row]
        out[0, i] = values[0]
        out[1, i] = np.log((np.exp(values[0]) + np.exp(values[min(1, found - 1)])) / 2)
        values.sort()
        out[2, i] = (values[(found - 1) // 2] + values[found // 2]) / 2
        out[4, i] = np.log1p((moments[i] - end[laid[last[i] - 1]]) / 1e6)
        out[5, i] = bad / found

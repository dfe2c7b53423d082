"""What a job belongs to beside its user, as numbers: an account, an array, a kind of node or GPU.

Few clusters tell all of these. A job that has none, or whose account is named as its user, has NaN throughout, and what
says nothing is left out of a fit (`models/forest.py`). Siblings that still run count with their elapsed time alone; of
nodes and GPUs only what was asked for counts, never what was given. Here belong these features; not those that every
job has (`features/jobs.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_recency import NEWEST_RUNS, STARTED_RUNS, newest_runs, started_runs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]

LOOKED_AT = 20  # newest ended, and newest started, jobs of a group
# Few of each: the more there are of one sort, the fewer turns the others get in a forest.
_RECENT: dict[str, tuple[str, ...]] = {
    "account": ("median", "count"), "own_account": ("last1", "median"), "kind": ("last1", "median", "count"),
    "array": ("last1", "median", "count"),
}  # fmt: skip
MEMBER_FEATURES: tuple[str, ...] = (
    *(f"{group}_{name}" for group, names in _RECENT.items() for name in names),
    *(f"array_{name}" for name in STARTED_RUNS), "array_task",
)  # fmt: skip


def member_groups(table: JobTable) -> tuple[str, ...]:
    """Groups that some of the jobs belong to."""
    return tuple(group for group in _RECENT if _members(table, group).any())


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
    for group in _RECENT:
        which = np.flatnonzero(_members(table, group)[part])
        if not len(which):
            continue
        hashes, then = groups[group][which], moments[which]
        found = _ended(history, group, hashes, then)
        if group == "array":
            found |= dict(zip(STARTED_RUNS, _siblings(history, hashes, then, own[which]), strict=True))
        for name, values in found.items():
            column = np.full(len(moments), np.nan)
            column[which] = values
            out[f"{group}_{name}"] = column
    return out


def _members(table: JobTable, group: str) -> Bools:
    return {"kind": table.has_kind, "array": table.has_array}.get(group, table.has_account)


def _ended(history: JobHistory, group: str, hashes: Hashes, moments: Ints) -> dict[str, Floats]:
    """Columns of `_RECENT` of each group's newest ended jobs, each of shape (n,)."""
    index, table = history.index(group, "run"), history.table
    first, last = index.before(hashes, moments)
    runs, _ = newest_runs(index.rows, first, last, history.log_runtime, table.is_bad, LOOKED_AT)
    of = dict(zip(NEWEST_RUNS, runs.T, strict=True))
    told = {"last1": of["last"], "median": of["median"], "count": np.log1p(last - first)}
    return {name: told[name] for name in _RECENT[group]}


def _siblings(history: JobHistory, hashes: Hashes, moments: Ints, own: Ints) -> Floats:
    """`STARTED_RUNS` of the array's newest started tasks, shape (6, n)."""
    index, table = history.index("array", "start"), history.table
    first, last = index.before(hashes, moments)
    return started_runs(index.rows, first, last, own, moments, table.start, table.end, LOOKED_AT).T

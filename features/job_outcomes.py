"""How the newest jobs of a group ended, as numbers: what the failure forecaster reads beside `features/jobs.py`.

Rates of bad ends that forget at several speeds, runs of the same outcome, how long ago, which kinds of bad end, and how
many siblings run or wait. Jobs that ended in the tick they started count here, as many failures do so. Here belong
features of outcomes; not those of durations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.jobs import FEATURES, feature_matrix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("timeout", ("TIMEOUT", "DEADLINE")),
    ("node_failure", ("NODE_FAIL", "BOOT_FAIL")),
    ("out_of_memory", ("OUT_OF_MEMORY",)),
)
OUTCOME_GROUPS = ("all", "queue", "shape", "user", "user_limit", "key", "family", "spec")
NEWEST = 40  # ends looked back on
HALF_LIVES = (1.0, 3.0, 10.0, 30.0)  # in ends of the group
FADES_S = (3_600.0, 86_400.0)
_PER_GROUP = (
    *(f"bad_{life:g}" for life in HALF_LIVES), *(f"bad_{fade:.0f}s" for fade in FADES_S),
    *(f"mass_{fade:.0f}s" for fade in FADES_S), "ends", "last_bad", "same_run", "end_age", "timeouts",
    "out_of_memories", "cancelled", "runs_now", "waits_now",
)  # fmt: skip
OUTCOMES: tuple[str, ...] = tuple(f"{group}_{name}" for group in OUTCOME_GROUPS for name in _PER_GROUP)
FAILURE_FEATURES: tuple[str, ...] = (*FEATURES, *(f"ended_{name}" for name in OUTCOMES))
_CHUNK = 50_000


def failure_matrix(table: JobTable, history: JobHistory, moments: Ints, known: Matrix | None = None) -> Matrix:
    """Features of the failure forecaster.

    Args:
        table: Jobs asked about.
        history: Jobs of the same cluster; what happened at or after a job's moment changes nothing for it.
        moments: The moment of each job, µs.
        known: `feature_matrix` of the same jobs and moments, when it is at hand.

    Returns:
        Shape (n, len(FAILURE_FEATURES)); unknown is NaN.
    """
    known = feature_matrix(table, history, moments) if known is None else known
    return np.concatenate([known, outcome_matrix(table, history, moments)], axis=1)


def outcome_matrix(table: JobTable, history: JobHistory, moments: Ints) -> Matrix:
    """Columns `OUTCOMES`, shape (n, len(OUTCOMES))."""
    matrix = np.empty((table.count, len(OUTCOMES)), dtype=np.float32)
    kinds = {name: history.table.is_state(held) for name, held in (*KINDS, ("cancelled", ("CANCELLED",)))}
    own = history.own_rows(table)
    is_one_moment = table.count > 0 and bool((moments == moments[0]).all())
    for number, group in enumerate(OUTCOME_GROUPS):
        codes = table.group(group)
        columns = slice(number * len(_PER_GROUP), (number + 1) * len(_PER_GROUP))
        for first in range(0, table.count, _CHUNK):
            part = slice(first, first + _CHUNK)
            if is_one_moment:  # live: jobs of a group share what is known of its ends
                _, first_of, same = np.unique(codes[part], return_index=True, return_inverse=True)
                ends = _of_ends(history, kinds, group, codes[part][first_of], moments[part][first_of])
                found = {name: values[same] for name, values in ends.items()}
            else:
                found = _of_ends(history, kinds, group, codes[part], moments[part])
            found |= _of_now(history, group, codes[part], moments[part], own[part])
            matrix[part, columns] = np.stack([found[name] for name in _PER_GROUP], axis=1)
    return matrix


def _of_ends(
    history: JobHistory, kinds: dict[str, NDArray[np.bool_]], group: str, codes: NDArray[np.uint64], moments: Ints
) -> dict[str, Floats]:
    """How the newest jobs of each group ended."""
    past = history.table
    slots = history.newest(group, "end", codes, moments, NEWEST)
    filled, is_any = slots.is_filled.astype(np.float64), slots.is_filled[:, 0]
    bad = filled * past.is_bad[slots.rows]
    age_s = np.where(slots.is_filled, np.maximum(moments[:, None] - past.end[slots.rows], 0) / 1e6, 0.0)
    found: dict[str, Floats] = {}
    for life in HALF_LIVES:
        weights = 0.5 ** (np.arange(NEWEST) / life)
        found[f"bad_{life:g}"] = _ratio(bad @ weights, filled @ weights)
    for fade in FADES_S:
        faded = filled * np.exp(-age_s / fade)
        mass = faded.sum(axis=1)
        found[f"bad_{fade:.0f}s"] = _ratio((bad * faded).sum(axis=1), np.where(mass > 1e-6, mass, 0.0))
        found[f"mass_{fade:.0f}s"] = np.log1p(mass)
    rows = filled.sum(axis=1)
    is_same = (bad == bad[:, :1]) & slots.is_filled
    found["ends"] = np.log1p(slots.count)
    found["last_bad"] = np.where(is_any, bad[:, 0], np.nan)
    found["same_run"] = np.where(is_same.all(axis=1), NEWEST, np.argmin(is_same, axis=1)) * 1.0
    found["end_age"] = np.where(is_any, np.log1p(age_s[:, 0]), np.nan)
    for name, kind in (("timeouts", "timeout"), ("out_of_memories", "out_of_memory"), ("cancelled", "cancelled")):
        found[name] = _ratio((filled * kinds[kind][slots.rows]).sum(axis=1), rows)
    return found


def _of_now(history: JobHistory, group: str, codes: NDArray[np.uint64], moments: Ints, own: Ints) -> dict[str, Floats]:
    """How many siblings of each job run and wait, itself left out."""
    past = history.table
    submitted, started, ended, cancelled = (
        history.count(group, event, codes, moments - 1) for event in ("submit", "start", "end", "cancel")
    )
    at = np.maximum(own, 0)
    own_submitted = (own >= 0) & (past.submit[at] < moments)
    own_started = (own >= 0) & (past.start[at] < moments)
    waiting = submitted - started - cancelled - (own_submitted & ~own_started)
    return {
        "runs_now": np.log1p(np.maximum(started - ended - own_started, 0)),
        "waits_now": np.log1p(np.maximum(waiting, 0)),
    }


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)

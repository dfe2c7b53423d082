"""Taking newer jobs into a prepared history: what it costs grows with the jobs that come, not with the history.

Afterwards every lookup answers as that of a history made anew of all jobs. Here belongs this alone; not the lookups
(`features/job_history.py`) and not the structures that grow (`features/job_index.py`, `features/job_table.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory, event_times
from features.job_likeness import Likeness
from features.job_table import JobTable, grown

Ints = NDArray[np.int64]

_FACTS = ("submit", "start", "end", "width", "limit_s")  # entries and the sums over them hang on these


def take_in(history: JobHistory, newer: JobTable) -> None:
    """Write the newer jobs over those that are known, by id and submit time, and behind the others.

    Args:
        history: The history; no lookup may go on meanwhile.
        newer: Jobs, each once.
    """
    table = history.table
    at = history.own_rows(newer)
    is_new = at < 0
    at[is_new] = table.count + np.arange(is_new.sum())
    known = np.flatnonzero(~is_new)
    was = {name: getattr(table, name)[at[known]].copy() for name in _FACTS}
    is_same = np.ones(len(known), dtype=bool)
    for name in _FACTS:
        before, now = was[name], getattr(newer, name)[known]
        is_same &= (before == now) | ((before != before) & (now != now))
    old_number, new_number = {}, {}
    for group, (numbers, number) in history.numbers.items():
        old_number[group], new_number[group] = number[at[known]].copy(), numbers.add(newer.group(group))
        history.numbers[group] = numbers, grown(history.room, ("number", group), number, at, new_number[group])
    table.put(at, newer)
    if "log_runtime" in history.__dict__:
        logs = np.log(newer.runtime_s)
        history.__dict__["log_runtime"] = grown(history.room, "log_runtime", history.log_runtime, at, logs)
    identities, rows = history.rows_by_identity
    found = identities.add(newer.identity[is_new])
    history.__dict__["rows_by_identity"] = identities, grown(history.room, "identity", rows, found, at[is_new])
    history.orders.clear()

    moved: dict[str, tuple[Ints, Ints]] = {}  # user, key → groups and times of the ends that came or went
    for (group, event), index in history.indexes.items():
        old_time, had = event_times(event, was["submit"], was["start"], was["end"])
        new_time, has = event_times(event, newer.submit, newer.start, newer.end)
        stays = is_same & had & has[known] & (old_number[group] == new_number[group][known])
        goes, comes = had & ~stays, has.copy()
        comes[known[stays]] = False
        removed = old_number[group][goes], old_time[goes], at[known][goes]
        added = new_number[group][comes], new_time[comes], at[comes]
        index.change(removed, added)
        if event == "run" and group in ("user", "key"):
            moved[group] = np.concatenate([removed[0], added[0]]), np.concatenate([removed[1], added[1]])
    if "likeness" in history.__dict__:
        _renew_likeness(history, newer, at, moved)
    if history.queue_state is not None:
        history.queue_state.update(at, was["start"], was["end"])


def _renew_likeness(history: JobHistory, newer: JobTable, at: Ints, moved: dict[str, tuple[Ints, Ints]]) -> None:
    """Of the newer jobs, and of those that were submitted after an end of their user or key that came or went."""
    rows = [at]
    for group, (groups, times) in moved.items():
        rows.append(history.index(group, "submit").later(groups, times))
    present, affected = history.likeness, np.unique(np.concatenate(rows))
    labels = np.stack([newer.group("family"), newer.group("queue")], axis=1)
    history.__dict__["likeness"] = Likeness(
        grown(history.room, "gaps", present.gaps, affected, history.gaps(affected)),
        grown(history.room, "labels", present.labels, at, labels),
        history.table.submit,
    )

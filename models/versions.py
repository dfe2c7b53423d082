"""Versions of the code of each forecaster, by which a training tells a refit from a change.

A refit needs only not to be worse than the champion; a change has to win (`models/promotion.py`). Names of features and
sizes of forests are in a task's `configuration()`. The named numbers of its modules (shares, priors, horizons) are
added by themselves; what the code makes of them cannot be, and has a version.

Here belong those numbers and what is made of them; not the configurations themselves (`models/tasks.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

# Raise a version by one in the change that lets the same jobs, seed and numbers give other forecasts: another loss or
# rule, another meaning of a feature. Not for what leaves them as they were: speed, words, files laid out anew.
# `tests/test_versions.py` holds forecasts of a fixed history: where it fails, either the change was not meant to move
# forecasts, or the version has to be raised and the record made anew: `python -m tests.test_versions`.
VERSIONS = {"runtime": 1, "wait": 2, "job_failure": 1, "node_failure": 2, "bottleneck": 1, "level": 1}

# Modules whose numbers make the forecasts of a task; those it is read from (`configuration()`) need not stand here.
_FORESTS = ("models.forest", "models.trees", "models.curves", "models.calibration")
_OF_JOBS = (
    "features.jobs", "features.job_memberships", "features.job_likeness", "features.job_recency", "features.job_table",
)  # fmt: skip
MODULES = {
    "runtime": (
        "models.runtime", "models.runtime_experts", "models.runtime_choice", "models.mixture", "models.recency",
        "models.time_left", "models.grace", *_FORESTS, *_OF_JOBS, "features.job_survivors",
    ),
    "wait": (
        "models.wait", "models.wait_leaves", "models.wait_odds", "models.wait_points", "models.boosting", *_FORESTS,
        "features.job_table", "features.job_queue", "features.recent_waits", "features.queue_plan",
        "features.queue_state",
    ),
    "job_failure": (
        "models.failure", "models.failure_kinds", "models.failure_running", "models.boosting", "models.calibration",
        *_OF_JOBS, "features.job_outcomes",
    ),
    "node_failure": ("models.node_failure", "models.recurrence", "models.fault_history", "features.hardware_signs"),
    "bottleneck": ("models.bottleneck", "models.onsets"),
    "level": ("models.level_course", "models.level_rows", "features.level_windows", "features.heat", "models.forest",
              "models.trees"),
}  # fmt: skip
_OF_SPEED = ("_CHUNK", "_ROWS", "_AT_ONCE", "_SPARE", "_KNOWN", "_KEPT")  # worked on at a time, or kept ready


def full_configuration(task: str, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A task's configuration with the numbers and the version of its code, as JSON gives it back.

    Raises:
        KeyError: There is no such task; the message lists those there are.
    """
    if task not in VERSIONS:
        raise KeyError(f"no version of {task!r}; there are: {', '.join(VERSIONS)}")
    return json.loads(json.dumps({**configuration, "numbers": _numbers(task), "version": VERSIONS[task]}))


def _numbers(task: str) -> dict[str, Any]:
    """Constants of the task's modules, those they take from others included."""
    found = {}
    for module in MODULES[task]:
        for name, value in vars(importlib.import_module(module)).items():
            if name.isupper() and name not in _OF_SPEED and (told := _told(value)) is not None:
                found[f"{module.rsplit('.', 1)[-1]}.{name}"] = told
    return found


def _told(value: Any) -> Any:
    """A constant as JSON holds it: a number, several, or named ones; None where it is something else."""
    if isinstance(value, np.ndarray):  # rounded, as processors differ in the last bits of a logarithm
        return np.round(value, 9).tolist() if value.dtype.kind in "fiu" else None
    if isinstance(value, Mapping):
        is_plain = all(isinstance(item, str | int | float) for item in value.values())
        return dict(value) if is_plain and any(_is_number(item) for item in value.values()) else None
    return value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_number(item) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def configuration_id(task: str, configuration: Mapping[str, Any]) -> str:
    """A short hash of a configuration and the version of its code: equal for a refit, different for a change."""
    text = json.dumps(full_configuration(task, configuration), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def what_changed(task: str, card: Mapping[str, Any], configuration: Mapping[str, Any]) -> str:
    """What tells a version of the registry from the present configuration, in words; empty where nothing does.

    Args:
        task: Forecasting task.
        card: The version's card; one of a release that kept no configuration is said to be of such a release.
        configuration: The task's configuration now.
    """
    if card.get("configuration") == configuration_id(task, configuration):
        return ""
    before, now = card.get("configuration_parts"), full_configuration(task, configuration)
    if not isinstance(before, Mapping):
        return "it is of a release that did not keep what it was made by"
    changes = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list):
            signed = [f"+{item}" for item in new if item not in old] + [f"−{item}" for item in old if item not in new]
            changes.append(f"{name} {_some(signed) or 'in another order'}")
        elif isinstance(old, dict) and isinstance(new, dict):
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            changes.append(f"{name} {_some([f'{key} {old.get(key)} → {new.get(key)}' for key in keys])}")
        else:
            changes.append(f"{name} {old} → {new}")
    return "; ".join(changes)


def _some(words: list[str]) -> str:
    return ", ".join(words[:6]) + (" …" if len(words) > 6 else "")

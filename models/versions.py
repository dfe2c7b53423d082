"""Versions of the code of each forecaster, by which a training tells a refit from a change.

A refit needs only not to be worse than the champion; a change has to win (`models/promotion.py`). Names of features and
sizes of forests are in a task's `configuration()`; what the code makes of them is not, and is named here.

Here belong those numbers and what is made of them; not the configurations themselves (`models/tasks.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Raise a number by one in the change that lets the same jobs, seed and configuration give other forecasts: another
# loss, weight, share, prior or rule, another meaning of a feature. Not for what leaves them as they were: speed, words,
# files laid out anew. `tests/test_versions.py` holds forecasts of a fixed history: where it fails, either the change
# was not meant to move forecasts, or the number has to be raised and the record made anew:
# `python -m tests.test_versions`.
VERSIONS = {"runtime": 1, "wait": 1, "job_failure": 1, "node_failure": 1, "bottleneck": 1}


def full_configuration(task: str, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A task's configuration with the version of its code.

    Raises:
        KeyError: There is no such task; the message lists those there are.
    """
    if task not in VERSIONS:
        raise KeyError(f"no version of {task!r}; there are: {', '.join(VERSIONS)}")
    return {**configuration, "version": VERSIONS[task]}


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
            changes.append(f"{name} {', '.join(signed[:6]) or 'in another order'}{' …' if len(signed) > 6 else ''}")
        else:
            changes.append(f"{name} {old} → {new}")
    return "; ".join(changes)

"""One-shot commands of the command line: what they print and which functions they call. No logic of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipelines.compose import CommandError, clusters_of, one_cluster
from pipelines.settings import Settings

TASKS = ("runtime", "wait", "job_failure", "node_failure", "bottleneck")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration(text: str) -> timedelta:
    """A length of time as `90s`, `30m`, `6h` or `30d`.

    Raises:
        CommandError: It is not of that form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not found:
        raise CommandError(f"{text!r} is not a length of time; write it as 90s, 30m, 6h or 30d")
    return timedelta(seconds=float(found[1]) * _UNITS_S[found[2]])


def make_token(settings: Settings, name: str, role: str, clusters: Iterable[str]) -> None:
    """Make an API token and print it once."""
    from scheduler_hints.tokens import create_token

    if not settings.api.tokens_file:
        raise CommandError("api.tokens_file is empty: set it to the file that tokens are kept in, hashed")
    for cluster in clusters:
        settings.cluster(cluster)
    path = Path(settings.api.tokens_file)
    print(create_token(path, name, role, tuple(clusters) or None))


def _registry(settings: Settings, cluster: str) -> Any:
    from models.registry import Registry

    return Registry(settings.registry / cluster)


def _check_task(task: str) -> None:
    if task not in TASKS:
        raise CommandError(f"no task {task!r}; tasks: {', '.join(TASKS)}")


def list_models(settings: Settings, cluster: str | None) -> None:
    """Print every version of every task, the champion marked."""
    for name in clusters_of(settings, cluster):
        registry = _registry(settings, name)
        for task in TASKS:
            cards = registry.versions(task)
            champion = registry.champion(task)
            print(f"{name} {task}: {'baseline in charge' if champion is None else champion}")
            for card in cards:
                mark = "*" if card["version"] == champion else " "
                print(f"  {mark} {card['version']}  {card.get('summary', '')}".rstrip())


def show_model(settings: Settings, cluster: str | None, task: str, version: str | None) -> None:
    """Print the card of a version, or of the champion, as JSON."""
    _check_task(task)
    name = one_cluster(settings, cluster)
    registry = _registry(settings, name)
    if version is None and registry.champion(task) is None:
        raise CommandError(f"{name} has no champion for {task}: its baseline is in charge")
    print(json.dumps(registry.load(task, version).card, indent=2, default=str))


def promote_model(settings: Settings, cluster: str | None, task: str, version: str, reason: str) -> None:
    """Make a version the champion; the nowcast and the next publication take it over by themselves."""
    _check_task(task)
    name = one_cluster(settings, cluster)
    _registry(settings, name).promote(task, version, reason)
    print(f"{name} {task}: champion is now {version}")


def rollback_model(settings: Settings, cluster: str | None, task: str, reason: str) -> None:
    """Make the previous champion the champion again."""
    _check_task(task)
    name = one_cluster(settings, cluster)
    print(f"{name} {task}: champion is now {_registry(settings, name).rollback(task, reason)}")

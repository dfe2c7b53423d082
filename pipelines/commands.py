"""One-shot commands of the command line: what they print and which functions they call. No logic of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipelines.compose import CommandError, clusters_of, one_cluster, open_store
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


def ingest_once(settings: Settings, cluster: str | None, since: str | None) -> None:
    """Read what is new, or again from `since` ago on, and say what was read.

    Raises:
        CommandError: A source could not be read; what could be is in the store.
    """
    from pipelines.steps import ingest_cluster

    now = datetime.now(UTC)
    start = None if since is None else now - duration(since)
    errors = []
    with open_store(settings) as store:
        for name in clusters_of(settings, cluster):
            report = ingest_cluster(store, settings, name, now, start)
            telemetry, jobs = report.telemetry, report.jobs
            mark = "nothing yet" if telemetry.mark is None else f"{telemetry.mark:%Y-%m-%d %H:%M:%S} UTC"
            print(
                f"{name}: {telemetry.windows} windows, {telemetry.core_rows:,} samples, {jobs.core_rows:,} changed "
                f"jobs; all before {mark} is in the store"
            )
            for reason, count in sorted(telemetry.findings.items()):
                print(f"  {count:,} values {reason}")
            for warning in telemetry.warnings:
                print(f"  partial: {warning}")
            errors += report.errors
    _fail(errors)


def publish_once(settings: Settings, cluster: str | None) -> None:
    """Forecast all jobs and nodes, publish, and load the journal of hints.

    Raises:
        CommandError: Something could not be published; the rest was.
    """
    from pipelines.steps import publish_cluster

    errors = []
    with open_store(settings) as store:
        for name in clusters_of(settings, cluster):
            jobs, nodes, hints = publish_cluster(store, settings, name, datetime.now(UTC))
            risks = "risks still hold" if nodes.nodes is None else f"{nodes.nodes or 0} nodes"
            print(f"{name}: {jobs.jobs or 0} jobs, {risks}, {hints.hints} journal rows loaded")
            for task, version in sorted({**(jobs.model_versions or {}), **(nodes.model_versions or {})}.items()):
                print(f"  {task}: {version}")
            errors += [found.error for found in (jobs, nodes, hints) if found.error]
    _fail(errors)


def retrain_once(settings: Settings, cluster: str | None, tasks: Iterable[str]) -> None:
    """Train, compare, promote; say for each task what came of it.

    Raises:
        CommandError: A training failed; champions stay in charge.
    """
    from pipelines.steps import retrain_of

    chosen = tuple(tasks) or TASKS
    for task in chosen:
        _check_task(task)
    errors = []
    with open_store(settings) as store:
        for name in clusters_of(settings, cluster):
            for task in chosen:
                report = retrain_of(store, settings, name, task, datetime.now(UTC))
                fate = "promoted" if report.promoted else "not promoted"
                print(
                    f"{name} {task}: {report.version or 'no model'}, {fate}: {report.error or report.reason}",
                    flush=True,
                )
                errors += [f"{name} {task}: {report.error}"] if report.error else []
    _fail(errors)


def maintain_once(settings: Settings) -> None:
    """Compact, expire, apply retention; say what was done.

    Raises:
        CommandError: A step failed; the others were done.
    """
    from pipelines.maintain import clean_up, compact_store

    now = datetime.now(UTC)
    errors = []
    with open_store(settings) as store:
        for report in (compact_store(store, now), clean_up(store, settings, now)):
            for step, done in report.done.items():
                print(f"{step}: {done}")
            errors += [f"{step}: {error}" for step, error in report.failed.items()]
    _fail(errors)


def load_demo_history(settings: Settings) -> None:
    """Put the simulator's past into the store, as ingest would have."""
    from pipelines.demo import load_history

    with open_store(settings) as store:
        for name in clusters_of(settings, None):
            rows = load_history(store, settings, name, settings.state / "sim", datetime.now(UTC))
            print(f"{name}: {rows:,} samples of the simulated past are in the store")


def _fail(errors: list[str]) -> None:
    if errors:
        raise CommandError("\n".join(dict.fromkeys(errors)))

"""One-shot commands of the command line: what they print and which functions they call. No logic of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipelines.compose import CommandError, clusters_of, open_store
from pipelines.settings import Settings
from pipelines.words import counted, with_name, without_name

TASKS = ("runtime", "wait", "job_failure", "node_failure", "bottleneck", "level")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 3650 * 86_400.0


def duration(text: str) -> timedelta:
    """A length of time as `90s`, `30m`, `6h` or `30d`.

    Raises:
        CommandError: It is not of that form, zero, or longer than ten years.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not found:
        raise CommandError(f"{text!r} is not a length of time; write it as 90s, 30m, 6h or 30d")
    length_s = float(found[1]) * _UNITS_S[found[2]]
    if not 0 < length_s <= _LONGEST_S:
        raise CommandError(f"{text!r} is out of range; more than 0s, {_LONGEST_S / 86_400:.0f}d at most")
    return timedelta(seconds=length_s)


def check_settings(settings: Settings) -> None:
    """Say that settings are right, of which clusters, and what in them is hardly meant.

    Raises:
        SettingsError: There is no cluster in them.
    """
    from pipelines.settings_checks import remarks

    names = clusters_of(settings, None)
    print(f"settings are right; cluster{'' if len(names) == 1 else 's'}: {', '.join(names)}")
    for remark in remarks(settings):
        print(f"  look at {remark}")


def make_token(settings: Settings, name: str, role: str, clusters: Iterable[str]) -> None:
    """Make an API token and print it once."""
    from scheduler_hints.tokens import create_token

    path = _tokens_file(settings)
    for cluster in clusters:
        settings.cluster(cluster)
    print(create_token(path, name, role, tuple(clusters) or None))


def list_tokens(settings: Settings) -> None:
    """Print name, role, clusters and date of every token."""
    from scheduler_hints.tokens import read_tokens

    path = _tokens_file(settings)
    try:
        tokens = read_tokens(path)
    except FileNotFoundError:
        tokens = []
    if not tokens:
        print(f"no tokens in {path}; make one with `weatherglass token create NAME`")
    width = max((len(token.name) for token in tokens), default=0)
    for token in tokens:
        clusters = "all clusters" if token.clusters is None else ", ".join(token.clusters)
        print(f"{token.name:<{width}}  {token.role:<5}  made {token.created_at:%Y-%m-%d %H:%M} UTC  {clusters}")


def remove_token(settings: Settings, name: str) -> None:
    """Revoke a token: a running API refuses it within a second."""
    from scheduler_hints.tokens import revoke_token

    path = _tokens_file(settings)
    revoke_token(path, name)
    print(f"{name}: revoked; the hints API refuses it from now on")


def _tokens_file(settings: Settings) -> Path:
    if not settings.api.tokens_file:
        raise CommandError(
            'api.tokens_file is empty: set it under [api], as tokens_file = "tokens.json": they are kept there, hashed'
        )
    return Path(settings.api.tokens_file)


def ingest_once(settings: Settings, cluster: str | None, since: timedelta | None) -> None:
    """Read what is new, or again from `since` ago on, and say what was read.

    How far it is shows on standard error. Interrupted, the same `since` goes on where it was.

    Raises:
        CommandError: A source could not be read; what could be is in the store.
    """
    print("opening the store …", file=sys.stderr, flush=True)  # what is imported below takes seconds
    from pipelines.backfill import backfill_mark, resume_from
    from pipelines.progress import Progress
    from pipelines.steps import ingest_cluster
    from pipelines.summary import in_sentences

    now = datetime.now(UTC)
    start = None if since is None else now - since
    backfill = "" if since is None else backfill_mark(since)
    errors = []
    names = clusters_of(settings, cluster)
    with open_store(settings) as store:
        for name in names:
            if start is not None and (at := resume_from(store.mark(name, backfill), start)) != start:
                print(f"{name}: goes on at {at:%Y-%m-%d %H:%M} UTC, where it was interrupted", flush=True)
            with Progress(name, "rows") as progress:
                report = ingest_cluster(
                    store, settings, name, now, start, backfill=backfill, progress=progress, stage=progress.stage
                )
            for sentence in in_sentences(report):
                print(sentence, flush=True)
            errors += [with_name(name, error) for error in report.errors]
    _fail(errors)


def publish_once(settings: Settings, cluster: str | None) -> None:
    """Forecast all jobs, nodes and the demand, publish, and load the journal of hints.

    Raises:
        CommandError: Something could not be published; the rest was.
    """
    from pipelines.steps import publish_cluster, publish_demand_of

    errors = []
    names = clusters_of(settings, cluster)
    with open_store(settings) as store:
        for name in names:
            jobs, nodes, hints = publish_cluster(store, settings, name, datetime.now(UTC))
            print(f"{name}: {published_in_words(jobs, nodes, hints)}")
            for task, version in sorted({**(jobs.model_versions or {}), **(nodes.model_versions or {})}.items()):
                print(f"  {task}: {version}")
            demand = publish_demand_of(store, settings, name, datetime.now(UTC))
            if demand.rows is not None:
                print(
                    f"  {counted(demand.rows, 'forecast')} of demand, {counted(demand.windows, 'reclaimable window')}"
                )
            errors += [with_name(name, found.error) for found in (jobs, nodes, hints, demand) if found.error]
    _fail(errors)


def published_in_words(jobs: Any, nodes: Any, hints: Any) -> str:
    """What one publication did; nothing to forecast and nothing published are told apart.

    Args:
        jobs: `Published` of the job forecasts.
        nodes: `Published` of the node risks; None for its nodes means that those published last still hold.
        hints: `Published` of the journal.
    """
    if jobs.error:
        of_jobs = "job forecasts not published"
    else:
        of_jobs = f"forecasts of {counted(jobs.jobs, 'job')}" if jobs.jobs else "no job is pending or running"
    if nodes.error:
        of_nodes = "node risks not published"
    elif nodes.nodes is None:
        of_nodes = "node risks published last still hold"
    else:
        of_nodes = f"risks of {counted(nodes.nodes, 'node')}" if nodes.nodes else "no node is known yet"
    rows = "journal not loaded" if hints.error else f"{counted(hints.hints, 'row')} of the journal loaded"
    return f"{of_jobs}; {of_nodes}; {rows}"


def retrain_once(settings: Settings, cluster: str | None, tasks: Iterable[str]) -> None:
    """Train, compare, promote; say for each task what came of it.

    Raises:
        CommandError: A training failed; champions stay in charge.
    """
    from pipelines.steps import retrain_of

    chosen = tuple(tasks) or TASKS
    errors = []
    names = clusters_of(settings, cluster)
    with open_store(settings, must_exist=True) as store:
        for name in names:
            for task in chosen:
                report = retrain_of(store, settings, name, task, datetime.now(UTC))
                error = without_name(name, report.error or "")
                fate = "promoted" if report.promoted else "not promoted"
                print(
                    f"{name} {task}: {report.version or 'no model'}, {fate}: {error or report.reason}",
                    flush=True,
                )
                errors += [f"{name} {task}: {error}"] if error else []
    _fail(errors)


def maintain_once(settings: Settings) -> None:
    """Compact, expire, apply retention; say what was done.

    Raises:
        CommandError: A step failed; the others were done.
    """
    from pipelines.maintain import clean_up, compact_store

    now = datetime.now(UTC)
    errors = []
    with open_store(settings, must_exist=True) as store:
        for report in (compact_store(store, settings, now), clean_up(store, settings, now)):
            for step, done in report.done.items():
                print(f"{step}: {done}")
            errors += [f"{step}: {error}" for step, error in report.failed.items()]
    _fail(errors)


def load_demo_history(settings: Settings) -> None:
    """Put the simulator's past into the store, as ingest would have."""
    from pipelines.demo import load_history

    names = clusters_of(settings, None)
    with open_store(settings) as store:
        for name in names:
            rows = load_history(store, settings, name, settings.state / "sim", datetime.now(UTC))
            print(f"{name}: the simulated past is in the store, {counted(rows, 'sample')}")


def _fail(errors: list[str]) -> None:
    if errors:
        raise CommandError("\n".join(dict.fromkeys(errors)))

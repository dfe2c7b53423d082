"""Reading of files that people have: the task of one import, its error, and the readers by kind.

A reader stands in a module of its own. It goes through the files in pieces of bounded size and yields frames by table
of the registry, as received; it counts in the report what it passes over or cannot use, and never stops at a bad line.
Cleaning, order and delivery stand in `pipelines/importing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl

from features.metrics import DEFAULT, MetricTable
from pipelines.imports.report import Report

KINDS = ("sacct", "swf", "exposition", "prometheus-json", "jobs", "telemetry")

# Frames by table, in columns of the registry: raw_jobs, raw_gpu_samples, core_node_samples, …
Piece = dict[str, pl.DataFrame]


class ImportingError(Exception):
    """A file cannot be imported at all. The message names it and says what to do."""


class OptionError(ImportingError):
    """An option that the kind does not use. The message names it and the kinds that do."""


# Option of the command → kinds that use it.
OPTIONS = {
    "at": ("exposition",), "node": ("exposition", "prometheus-json"),
    "tz": ("sacct", "exposition", "jobs", "telemetry"),
}  # fmt: skip


def check_options(kind: str, *, at: bool, node: bool, zone: bool) -> None:
    """See that the kind uses the options that were given.

    Raises:
        OptionError: It does not.
    """
    for name, is_given in {"at": at, "node": node, "tz": zone}.items():
        if is_given and kind not in OPTIONS[name]:
            users = OPTIONS[name]
            listed = users[0] if len(users) == 1 else f"{', '.join(users[:-1])} and {users[-1]}"
            raise OptionError(f"--{name} means nothing for {kind}; it is for {listed}. Leave it out")


@dataclass(frozen=True)
class Task:
    """One import.

    Attributes:
        kind: One of KINDS.
        files: What is read, in order.
        cluster: Name that all rows get.
        now: Present time, UTC; nothing may lie further ahead than a day.
        report: What was read is counted here.
        at: Time of a scrape whose file name and lines tell none.
        zone: Time zone of times that are written without one.
        node: Node of exporter pages whose labels do not name it.
        vocabulary: Metrics of exporters, a user's own mappings among them.
        progress: Called with the bytes of the files that were read since the last call.
    """

    kind: str
    files: tuple[Path, ...]
    cluster: str
    now: datetime
    report: Report
    at: datetime | None = None
    zone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    node: str = ""
    vocabulary: MetricTable = DEFAULT
    progress: Callable[[int], None] = lambda _: None


def reader_of(kind: str) -> Callable[[Task], Iterator[Piece]]:
    """The reader of a kind.

    Raises:
        ImportingError: There is no such kind; the message lists those there are.
    """
    if kind == "sacct":
        from pipelines.imports.sacct import read_sacct as read
    elif kind == "swf":
        from pipelines.imports.swf import read_swf_lines as read
    elif kind == "exposition":
        from pipelines.imports.exposition import read_exposition as read
    elif kind == "prometheus-json":
        from pipelines.imports.prometheus_json import read_answers as read
    elif kind == "jobs":
        from pipelines.imports.jobs import read_jobs as read
    elif kind == "telemetry":
        from pipelines.imports.telemetry import read_telemetry as read
    else:
        raise ImportingError(f"no kind {kind!r}; kinds: {', '.join(KINDS)}")
    return read

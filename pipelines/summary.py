"""What one ingest of one cluster did, in the sentences that the command line prints.

Words alone: nothing is read or written here. How single numbers and reasons are worded stands in `words.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from pipelines.ingest import Ingested
from pipelines.steps import ClusterIngested
from pipelines.words import counted, finding, without_name


def in_sentences(report: ClusterIngested) -> Iterator[str]:
    """The cluster's own line, then one line for each thing that an operator should know, indented.

    Args:
        report: What was done.
    """
    name, telemetry, jobs = report.cluster, report.telemetry, report.jobs
    samples = telemetry.rows.get("core_gpu_samples", 0)
    what = (
        counted(telemetry.windows, "window"), counted(samples, "sample"), counted(jobs.core_rows, "changed job")
    )  # fmt: skip
    yield f"{name}: {', '.join(what)}; {_how_far(telemetry)}"
    findings = {**telemetry.findings, **jobs.findings}
    findings.pop("partial", None)  # what was partial is quoted below
    if findings.get("no_samples") == telemetry.windows:
        del findings["no_samples"]  # the first line says it
    for reason, count in sorted(findings.items()):
        yield f"  {finding(reason, count)}"
    for note in jobs.notes:
        yield f"  {without_name(name, note)}"
    told = report.scheduler.warnings if report.scheduler is not None else []
    told = [*told, *(report.progress.warnings if report.progress is not None else [])]
    for warning in dict.fromkeys([*telemetry.warnings, *jobs.warnings, *told]):
        yield f"  partial: {without_name(name, warning)}"


def _how_far(telemetry: Ingested) -> str:
    """Up to when samples are in the store, and why no further."""
    mark = telemetry.mark
    if telemetry.error and not telemetry.windows:
        kept = "" if mark is None else f", all before {_moment(mark)} are in the store"
        return f"no samples were read{kept}; the next ingest goes on there"
    if mark is None:
        return "no samples were read"
    if telemetry.waits_for:
        why = telemetry.waits_for
    elif telemetry.next_end is None or telemetry.next_at is None:
        why = ""
    else:
        why = f"the next window ends at {telemetry.next_end:%H:%M:%S} and is read from {telemetry.next_at:%H:%M:%S} on"
    if telemetry.begin is not None and telemetry.findings.get("no_samples") == telemetry.windows:
        until = f"nothing was found between {_moment(telemetry.begin, zone='')} and {_moment(mark)}"
        return f"{until}{'; ' if why else ''}{why}"
    until = f"all samples before {_moment(mark)} are in the store"
    return until if telemetry.windows and not telemetry.waits_for else f"{until}; {why}" if why else until


def _moment(at: datetime, zone: str = " UTC") -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}{zone}"

"""Jobs of Standard Workload Format files, in batches of lines. The format stands in `pipelines/sources/swf.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import polars as pl

from pipelines.imports import Piece, Task
from pipelines.imports.job_bounds import UNKNOWN_STATE, bounded_jobs, written_at
from pipelines.imports.lines import batches
from pipelines.imports.report import report_places
from pipelines.sources.swf import PART, parse_swf, start_time

_CANNOT = "not a number, or cannot be true"
# Registry column → places of the fields that tell it, the first on a line being 0.
_FIELDS = {
    "cpus": (7, 4), "memory_mib": (9, 6), "time_limit_s": (8,), "user": (11,), "account": (12,), "name": (13,),
    "queue": (14,),
}  # fmt: skip
_WAIT, _RUN, _STATUS = 2, 3, 10


def read_swf_lines(task: Task) -> Iterator[Piece]:
    """Jobs of each file.

    Yields:
        `raw_jobs`.
    """
    report = task.report
    for path in task.files:
        written = written_at(path, task.now)
        origin: int | None = None
        for batch in batches(path, report, task.progress):
            for line in batch if origin is None else []:
                if line.text.startswith(";") and (found := start_time(line.text)) is not None:
                    origin = found
                    break
            numbered = [(line.number, line.text) for line in batch if not line.text.lstrip().startswith(";")]
            jobs, unused, _ = parse_swf(numbered, task.cluster, origin or 0, written)
            report.read += len(numbered)
            for number, why, text in unused:
                (report.skip if why == PART else report.drop)(why, place=number, example=text)
            gone = {number for number, _, _ in unused}
            used = [(number, text.split()) for number, text in numbered if number not in gone]
            _count_nulls(jobs, used, task)
            yield {"raw_jobs": bounded_jobs(jobs, pl.Series([number for number, _ in used], dtype=pl.Int64), task)}
        if origin is None and report.read:
            report.note(f"{path.name} has no UnixStartTime: its times count from 1970")


def _count_nulls(jobs: pl.DataFrame, used: list[tuple[int, list[str]]], task: Task) -> None:
    """Count values that were told and not read; −1 tells nothing."""
    lost: dict[str, list[tuple[int, str]]] = {}

    def count(column: str, number: int, text: str) -> None:
        lost.setdefault(column, []).append((number, text))

    for column, places in _FIELDS.items():
        for i in jobs[column].is_null().arg_true() if jobs[column].null_count() else ():
            number, fields = used[i]
            told = next((fields[place] for place in places if _tells(fields[place])), None)
            if told is not None:
                count(column, number, told)
    for column in ("start_time", "end_time"):
        for i in jobs[column].is_null().arg_true() if jobs[column].null_count() else ():
            number, fields = used[i]
            wait, run = fields[_WAIT], fields[_RUN]
            own = wait if column == "start_time" else run
            # A job that never ran has waited all the same.
            if not _is_number(own) or (_tells(wait) and _tells(run)):
                count(column, number, own)
    for i in (jobs["state"] == "UNKNOWN").arg_true():
        number, fields = used[i]
        if _tells(fields[_STATUS]):
            count("state", number, fields[_STATUS])
    for column, found in lost.items():
        numbers, texts = zip(*found, strict=True)
        report_places(task.report, column, UNKNOWN_STATE if column == "state" else _CANNOT, numbers, texts)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _tells(text: str) -> bool:
    return not _is_number(text) or float(text) >= 0

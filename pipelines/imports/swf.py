"""Jobs of Standard Workload Format files, in batches of lines. The format stands in `pipelines/sources/swf.py`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from pipelines.imports import Piece, Task
from pipelines.imports.lines import batches
from pipelines.sources.swf import PART, parse_swf, start_time


def read_swf_lines(task: Task) -> Iterator[Piece]:
    """Jobs of each file.

    Yields:
        `raw_jobs`.
    """
    report = task.report
    for path in task.files:
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        origin: int | None = None
        for batch in batches(path, report, task.progress):
            for line in batch if origin is None else []:
                if line.text.startswith(";") and (found := start_time(line.text)) is not None:
                    origin = found
                    break
            numbered = [(line.number, line.text) for line in batch if not line.text.lstrip().startswith(";")]
            jobs, unused, nulled = parse_swf(numbered, task.cluster, origin or 0, written)
            report.read += len(numbered)
            for number, why, text in unused:
                (report.skip if why == PART else report.drop)(why, place=number, example=text)
            for column, count in nulled.items():
                report.null(column, "not a number or cannot be true", count)
            yield {"raw_jobs": jobs}
        if origin is None:
            report.note(f"{path.name} has no UnixStartTime: its times count from 1970")

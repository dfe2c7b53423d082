"""Scrapes that were saved: pages of exporters, one or many, and OpenMetrics with timestamps.

The time of a line is its own, else that of its file: given by the caller or told by the file's name. How lines are read
stands in `pipelines/sources/exposition.py`, metrics in `features/metrics.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from pathlib import Path

import numpy as np

from pipelines.imports import ImportingError, Piece, Task
from pipelines.imports.lines import BROKEN, Line, batches, open_file
from pipelines.imports.series import frames_of, in_milliseconds
from pipelines.sources.exposition import ExpositionError, Page, parse_page
from pipelines.sources.wide import UP, Index, Samples

_LOOKED_AT = 4096
_BATCH = 16 << 20  # one scrape, mostly: what a page says of itself stands together then
_NAME_TIME = re.compile(
    r"(?<!\d)(\d{4})-?(\d\d)-?(\d\d)[T_ -]?(\d\d)[:_.-]?(\d\d)[:_.-]?(\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?(?!\d)"
)
_NAME_EPOCH = re.compile(r"(?<!\d)(\d{10})(\d{3})?(?!\d)")
_NAME = re.compile(r"\s*([a-zA-Z_:][\w:]*)", re.ASCII)
# Of metrics that nobody reads labels are not looked into: some exporters do not escape them.
_SAMPLE = re.compile(
    r"\s*(?:[a-zA-Z_:][\w:]*(?:\s*\{.*\}\s*|\s+)|\{.*\}\s*)[+-]?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf(?:inity)?)"
    r"(?:\s+[+-]?[\d.]+(?:e[+-]?\d+)?)?(?:\s+#.*)?\s*",
    re.IGNORECASE | re.ASCII,
)
_UNUSED = "lines of metrics that are not used, or that name no GPU and no node"
_JSON = re.compile(rb"\s*(?:\[|\{\s*(?:\}|\"(?:[^\"\\]|\\.)*\"\s*:))")
_IS_JSON = "this is JSON; a saved answer of Prometheus is read by prometheus-json"
_NO_TIME = "no time: name the file by its time, as 2026-11-30T12:00:00Z.prom, or give --at"


def time_of_name(name: str, zone: tzinfo = UTC) -> datetime | None:
    """The time that a file's name tells: ISO 8601 with or without separators, or seconds or milliseconds since 1970."""
    if found := _NAME_TIME.search(name):
        year, month, day, hour, minute, second, fraction, offset = found.groups()
        text = f"{year}-{month}-{day}T{hour}:{minute}:{second}.{(fraction or '0').ljust(6, '0')}{offset or ''}"
        try:
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=zone)).astimezone(UTC)
        except (ValueError, OverflowError):
            return None
    if found := _NAME_EPOCH.search(name):
        return datetime.fromtimestamp(int(found[1]) + int(found[2] or 0) / 1000, UTC)
    return None


def read_exposition(task: Task) -> Iterator[Piece]:
    """Samples of each file.

    Yields:
        `raw_gpu_samples`, `core_node_samples` and what else the metrics feed.

    Raises:
        ImportingError: It is no text, or the only file is JSON.
    """
    index = Index(task.vocabulary)
    timed = [(time_of_name(path.name, task.zone), path) for path in task.files]
    # By time: counters are differentiated from scrape to scrape. Without one, by name.
    timed.sort(key=lambda item: (item[0] is None, item[0] or task.now, item[1].name))
    for told, path in timed:
        moment = told or task.at
        if _is_json(path):
            if len(task.files) == 1:
                raise ImportingError(f"{path}: {_IS_JSON}")
            task.report.drop(_IS_JSON, example=path.name)
            continue
        for batch in batches(path, task.report, task.progress, _BATCH):
            lines = [line for line in batch if not _breaks_off(line, task) and _is_of_use(line, index, task)]
            page = _parse(lines, index, task, path)
            yield from _frames(page, index, moment, task)


def _breaks_off(line: Line, task: Task) -> bool:
    if line.is_whole or line.text.startswith("#"):
        return False
    task.report.read += 1
    task.report.drop("the file breaks off in it", place=line.number, example=line.text)
    return True


def _is_of_use(line: Line, index: Index, task: Task) -> bool:
    """Whether the parser is to see a line; samples of metrics we do not know, and what is no sample, are counted."""
    text = line.text
    if text.startswith("#") or ((name := _NAME.match(text)) and (name[1] in index.table.variants or name[1] == UP)):
        return True
    task.report.read += 1
    if _SAMPLE.fullmatch(text):
        task.report.skip(_UNUSED, 1, line.number, text)
    else:
        task.report.drop("not a sample", place=line.number, example=text)
    return False


def _is_json(path: Path) -> bool:
    opened, raw = open_file(path)
    with raw, opened:
        try:
            return _JSON.match(opened.peek(_LOOKED_AT)) is not None
        except BROKEN:
            return False  # the reader meets it again, and counts it


def _parse(lines: list[Line], index: Index, task: Task, path: Path) -> Page:
    """Samples of the lines; those that are none are found by halving, so that the others cost nothing more."""
    data = sum(not line.text.startswith("#") for line in lines)
    page = Page([], [], [], [])
    bad = 0
    waiting = [lines] if lines else []
    while waiting:
        part = waiting.pop()
        try:
            found = parse_page("".join(f"{line.text}\n" for line in part), index, task.node, path.parent)
        except ExpositionError as error:
            if len(part) == 1:
                bad += 1
                task.report.drop(_reason(error), place=part[0].number, example=part[0].text)
            else:
                middle = len(part) // 2
                waiting += [part[middle:], part[:middle]]
            continue
        page.names.extend(found.names)
        page.entities.extend(found.entities)
        page.ts_ms.extend(found.ts_ms)
        page.values.extend(found.values)
    task.report.read += data
    unused = data - bad - len(page.names)
    if unused > 0:
        task.report.skip(_UNUSED, unused)
    return page


def _reason(error: ExpositionError) -> str:
    return str(error).partition(":")[0]


def _frames(page: Page, index: Index, moment: datetime | None, task: Task) -> Iterator[Piece]:
    if not page.names:
        return
    name, entity = np.array(page.names, np.int64), np.array(page.entities, np.int64)
    own = np.array([ts is not None for ts in page.ts_ms])
    ts = in_milliseconds(np.array([0 if ts is None else ts for ts in page.ts_ms], np.int64))
    if moment is not None:
        ts = np.where(own, ts, round(moment.timestamp() * 1000))
    elif not own.all():
        task.report.drop(_NO_TIME, int((~own).sum()))
        name, entity, ts = name[own], entity[own], ts[own]
    values = np.array(page.values, np.float64)
    values = values if moment is not None else values[own]
    if len(ts):
        yield frames_of(Samples(name, entity, np.ones(len(ts), np.int64), ts, values), index, task)

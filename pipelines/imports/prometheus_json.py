"""Saved answers of Prometheus: /api/v1/query_range and /api/v1/query, a matrix or a vector, plain or gzip.

An answer is one JSON value, so its text is held as a whole: its size is limited. How the values of a matrix are read in
bounded memory stands in `ranges.py`.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from pipelines.imports import Piece, Task
from pipelines.imports.lines import BREAKS_OFF, check_text, open_file
from pipelines.imports.ranges import UNREADABLE, Range, read_ranges, slices
from pipelines.imports.series import frames_of
from pipelines.sources.promql_matrix import ANSWER, parse_labels, spoil_half_pairs
from pipelines.sources.wide import UP, Index, Samples

MAX_BYTES = 256 << 20  # of one answer, unpacked
_SERIES = 20_000  # that are made into frames at once
_BLANKS = 64  # bytes of a list that may hold nothing but blanks


class _Instant(msgspec.Struct):
    metric: msgspec.Raw
    value: tuple[float, str] | None = None


class _Range(msgspec.Struct):
    metric: msgspec.Raw
    values: msgspec.Raw = msgspec.Raw(b"")  # absent for native histograms


_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_RANGE = msgspec.json.Decoder(_Range)
_INSTANT = msgspec.json.Decoder(_Instant)
_NO_SAMPLES = "series without float samples, as native histograms"
_NOTHING = (
    "a good answer that holds no series: the server has none of what was asked for at that time; see the names in the "
    "query, and its time"
)


def read_answers(task: Task) -> Iterator[Piece]:
    """Samples of each file.

    Yields:
        `raw_gpu_samples`, `core_node_samples` and what else the metrics feed.
    """
    task.report.what = "series"
    index = Index(task.vocabulary)
    scrape_jobs: set[str] = set()
    for path in task.files:
        items, is_vector = _items(path, task)
        read = 0
        while items:
            some, items = items[:_SERIES], items[_SERIES:]
            task.report.read += len(some)
            samples = (_vector if is_vector else _matrix)(some, read, index, scrape_jobs, task)
            read += len(some)
            del some  # with the last of them goes the text of the answer
            for part in slices(samples) if len(samples.ts_ms) else ():
                yield frames_of(part, index, task)


def _body(path: Path, task: Task) -> bytes | None:
    opened, raw = open_file(path)
    try:
        with raw, opened:
            check_text(path, opened)
            # At once: parts of it that are joined would be held twice.
            is_larger = opened is raw and path.stat().st_size > MAX_BYTES
            body = b"" if is_larger else opened.read(MAX_BYTES + 1)
            task.progress(raw.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        task.report.drop(BREAKS_OFF, example=f"{path.name}: {error}")
        return None
    if is_larger or len(body) > MAX_BYTES:
        _too_large(path, task)
        return None
    if not body or body.isspace():
        task.report.drop("a file that is empty: what asked for it failed", example=path.name)
        return None
    return body.removeprefix(codecs.BOM_UTF8)


def _too_large(path: Path, task: Task) -> None:
    reason = f"an answer of more than {MAX_BYTES >> 20} MiB: ask for a shorter range or for fewer series"
    task.report.drop(reason, example=path.name)


def _items(path: Path, task: Task) -> tuple[list[msgspec.Raw], bool]:
    """The series of an answer, each still text; and whether it is a vector."""
    report = task.report
    body = _body(path, task)
    if body is None:
        return [], False
    try:
        answer = ANSWER.decode(spoil_half_pairs(body) if b"\\u" in body else body)
        if answer.status != "success" or answer.data is None:
            report.drop("an answer that is an error", example=f"{path.name}: {answer.error or answer.status}")
            return [], False
        for text in [*(answer.warnings or []), *(answer.infos or [])]:
            report.note(f"the server warned: {text[:200]}")
        if answer.data.resultType not in ("matrix", "vector"):
            kind = answer.data.resultType
            report.drop("an answer that is neither matrix nor vector", example=f"{path.name}: {kind}")
            return [], False
        items = _ITEMS.decode(answer.data.result)
    except UNREADABLE as error:
        report.drop("no JSON answer of Prometheus", example=f"{path.name}: {error}")
        return [], False
    if not items:
        report.note(f"{path.name}: {_NOTHING}")
    return items, answer.data.resultType == "vector"


def _matrix(items: list[msgspec.Raw], first: int, index: Index, scrape_jobs: set[str], task: Task) -> Samples:
    """Samples of the series that are of use; the values of the others are not looked at."""
    labels: list[bytes] = []
    ranges: list[Range] = []
    for place, item in enumerate(items, first + 1):
        try:
            one = _RANGE.decode(item)
        except UNREADABLE as error:
            _refuse(item, place, error, task)
            continue
        values = memoryview(one.values)
        if not values or (len(values) < _BLANKS and not bytes(values).strip(b"[] \r\n\t")):
            task.report.skip(_NO_SAMPLES, 1, place)
        elif values[:1] != b"[":
            _refuse(item, place, ValueError("its values are no list"), task)
        else:
            labels.append(bytes(one.metric))
            ranges.append(Range(place, values))
    name, entity, kept = _resolve(labels, [one.place for one in ranges], index, scrape_jobs, task)
    flat = read_ranges([one for one, is_kept in zip(ranges, kept, strict=True) if is_kept], task.report)
    some = flat.counts > 0
    return Samples(name[kept][some], entity[kept][some], flat.counts[some], flat.ts_ms, flat.values)


def _vector(items: list[msgspec.Raw], first: int, index: Index, scrape_jobs: set[str], task: Task) -> Samples:
    labels, ts_ms, values, places = [], [], [], []
    for place, item in enumerate(items, first + 1):
        try:
            one = _INSTANT.decode(item)
            if one.value is None:
                task.report.skip(_NO_SAMPLES, 1, place)
                continue
            ts_s, value = one.value[0], float(one.value[1])
            ts_ms.append(round(min(max(ts_s, -9e12), 9e12) * 1000))
        except UNREADABLE as error:
            _refuse(item, place, error, task)
            continue
        labels.append(bytes(one.metric))
        values.append(value)
        places.append(place)
    name, entity, kept = _resolve(labels, places, index, scrape_jobs, task)
    ts = np.array(ts_ms, np.int64)[kept]
    return Samples(name[kept], entity[kept], np.ones(len(ts), np.int64), ts, np.array(values, np.float64)[kept])


def _refuse(item: msgspec.Raw, place: int, error: Exception, task: Task) -> None:
    shown = bytes(item)[:80].decode("utf-8", "replace")
    task.report.drop(f"no series: {str(error).partition(' - at')[0]}"[:80], 1, place, shown)


def _resolve(
    labels: list[bytes], places: list[int], index: Index, scrape_jobs: set[str], task: Task
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Name and entity of each series, and which are of use."""
    ids: list[tuple[int, int] | None] = []
    ups: list[tuple[int, dict[str, str]]] = []
    for i, raw in enumerate(labels):
        ids.append(None)
        try:
            told = parse_labels(raw)
        except ValueError as error:
            task.report.drop("labels that cannot be read", 1, places[i], str(error))
            continue
        job = told.get("job", "")
        if told.get("__name__") == UP:
            ups.append((i, told))
            continue
        ids[i] = index.add(raw, told.get("__name__", ""), told, task.node, job)
        if ids[i] is None:
            task.report.skip("series of metrics that are not used, or that name no GPU and no node", 1, places[i])
        else:
            scrape_jobs.add(job)
    for i, told in ups:
        # What else the server scrapes is not of this cluster's nodes.
        if told.get("job", "") in scrape_jobs:
            ids[i] = index.add(("up", labels[i]), UP, told, task.node, told.get("job", ""))
        if ids[i] is None:
            task.report.skip("up of targets that bring no metric that is used", 1, places[i])
    kept = np.array([found is not None for found in ids], bool)
    name = np.array([found[0] if found else 0 for found in ids], np.int64)
    entity = np.array([found[1] if found else 0 for found in ids], np.int64)
    return name, entity, kept

"""Saved answers of Prometheus: /api/v1/query_range and /api/v1/query, a matrix or a vector, plain or gzip.

An answer is one JSON value, so it is held as a whole: its size is limited. How a matrix is decoded stands in
`pipelines/sources/promql.py`.
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
from pipelines.imports.series import frames_of
from pipelines.sources.promql_matrix import ANSWER, Matrix, decode_matrix, parse_labels, spoil_half_pairs
from pipelines.sources.wide import UP, Index, Samples

MAX_BYTES = 256 << 20  # of one answer, unpacked
_CHUNK = 1 << 20
_SERIES = 20_000  # that are made into frames at once


class _Instant(msgspec.Struct):
    metric: msgspec.Raw
    value: tuple[float, str] | None = None


_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_INSTANT = msgspec.json.Decoder(_Instant)
_NO_SAMPLES = "series without float samples, as native histograms"
_UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)


def read_answers(task: Task) -> Iterator[Piece]:
    """Samples of each file.

    Yields:
        `raw_gpu_samples`, `core_node_samples` and what else the metrics feed.
    """
    task.report.what = "series"
    index = Index(task.vocabulary)
    scrape_jobs: set[str] = set()
    for path in task.files:
        body = _body(path, task)
        items, is_vector = ([], False) if body is None else _items(path, body, task)
        del body
        for i in range(0, len(items), _SERIES):
            yield from _frames(items[i : i + _SERIES], i, is_vector, index, scrape_jobs, task)


def _body(path: Path, task: Task) -> bytes | None:
    opened, raw = open_file(path)
    parts, size = [], 0
    try:
        with raw, opened:
            check_text(path, opened)
            if opened is raw and path.stat().st_size > MAX_BYTES:
                _too_large(path, task)
                return None
            while data := opened.read(_CHUNK):
                parts.append(data)
                size += len(data)
                if size > MAX_BYTES:
                    _too_large(path, task)
                    return None
            task.progress(raw.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        task.report.drop(BREAKS_OFF, example=f"{path.name}: {error}")
        return None
    return b"".join(parts).removeprefix(codecs.BOM_UTF8)


def _too_large(path: Path, task: Task) -> None:
    reason = f"an answer of more than {MAX_BYTES >> 20} MiB: ask for a shorter range or for fewer series"
    task.report.drop(reason, example=path.name)


def _items(path: Path, body: bytes, task: Task) -> tuple[list[msgspec.Raw], bool]:
    """The series of an answer, each still text; and whether it is a vector."""
    report = task.report
    try:
        answer = ANSWER.decode(spoil_half_pairs(body))
        if answer.status != "success" or answer.data is None:
            report.drop("an answer that is an error", example=f"{path.name}: {answer.error or answer.status}")
            return [], False
        for text in [*(answer.warnings or []), *(answer.infos or [])]:
            report.note(f"the server warned: {text[:200]}")
        if answer.data.resultType not in ("matrix", "vector"):
            kind = answer.data.resultType
            report.drop("an answer that is neither matrix nor vector", example=f"{path.name}: {kind}")
            return [], False
        return _ITEMS.decode(answer.data.result), answer.data.resultType == "vector"
    except _UNREADABLE as error:
        report.drop("no JSON answer of Prometheus", example=f"{path.name}: {error}")
        return [], False


def _decoded(items: list[msgspec.Raw], first: int, is_vector: bool, task: Task) -> tuple[list[Matrix], list[int]]:
    """All series at once where they can be read, else one by one; and the place of each in the answer."""
    if is_vector:
        return _vector(items, first, task)
    try:
        whole = decode_matrix(b"[" + b",".join(bytes(item) for item in items) + b"]")
        if len(whole.labels) == len(items):
            return [whole], list(range(first + 1, first + 1 + len(items)))
    except _UNREADABLE:
        pass
    found, places = [], []
    for i, item in enumerate(items):
        try:
            one = decode_matrix(b"[" + bytes(item) + b"]")
        except _UNREADABLE as error:
            _refuse(item, first + i + 1, error, task)
            continue
        if one.labels:
            found.append(one)
            places.append(first + i + 1)
        else:
            task.report.skip(_NO_SAMPLES, 1, first + i + 1)
    return found, places


def _vector(items: list[msgspec.Raw], first: int, task: Task) -> tuple[list[Matrix], list[int]]:
    labels, ts_ms, values, places = [], [], [], []
    for i, item in enumerate(items):
        try:
            one = _INSTANT.decode(item)
            if one.value is None:
                task.report.skip(_NO_SAMPLES, 1, first + i + 1)
                continue
            ts_s, value = one.value[0], float(one.value[1])
            ts_ms.append(round(min(max(ts_s, -9e12), 9e12) * 1000))
        except _UNREADABLE as error:
            _refuse(item, first + i + 1, error, task)
            continue
        labels.append(bytes(one.metric))
        values.append(value)
        places.append(first + i + 1)
    return [
        Matrix(labels, np.ones(len(labels), np.int64), np.array(ts_ms, np.int64), np.array(values, np.float64))
    ], places


def _refuse(item: msgspec.Raw, place: int, error: Exception, task: Task) -> None:
    shown = bytes(item)[:80].decode("utf-8", "replace")
    task.report.drop(f"no series: {str(error).partition(' - at')[0]}"[:80], 1, place, shown)


def _frames(
    items: list[msgspec.Raw], first: int, is_vector: bool, index: Index, scrape_jobs: set[str], task: Task
) -> Iterator[Piece]:
    task.report.read += len(items)
    parts, places = _decoded(items, first, is_vector, task)
    if not parts:
        return
    labels = [raw for part in parts for raw in part.labels]
    counts = np.concatenate([part.counts for part in parts])
    ts = np.concatenate([part.ts_ms for part in parts])
    values = np.concatenate([part.values for part in parts])
    name, entity, kept = _resolve(labels, places, index, scrape_jobs, task)
    each = np.repeat(kept, counts)
    if each.any():
        yield frames_of(Samples(name[kept], entity[kept], counts[kept], ts[each], values[each]), index, task)


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

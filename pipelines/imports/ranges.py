"""Samples of a saved matrix: each series read in pieces of bounded size, and all of them given on in slices of time.

One value that cannot be read costs its pair, not its series. What the series are of is the reader's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipelines.imports.report import Report
from pipelines.sources.promql_matrix import decode_matrix
from pipelines.sources.wide import Samples

UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
_PIECE = 4 << 20  # bytes of JSON that are decoded at once
_SLICE = 500_000  # samples that are laid into rows at once
_MINUTE_MS = 60_000
_BAD_PAIR = "values that are no pair of a time and a number"

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_PAIR = msgspec.json.Decoder(tuple[float, float | str])


class Range(NamedTuple):
    """A series whose values are still text.

    Attributes:
        place: Its number in the answer, from 1.
        values: JSON of its list of pairs.
    """

    place: int
    values: memoryview


class Flat(NamedTuple):
    """Samples of some series.

    Attributes:
        counts: Number of samples of each.
        ts_ms: Times, ms since the epoch, series after series.
        values: Values.
    """

    counts: np.ndarray
    ts_ms: np.ndarray
    values: np.ndarray


def read_ranges(ranges: Sequence[Range], report: Report) -> Flat:
    """Samples of series, in their order.

    Args:
        ranges: The series.
        report: Pairs that cannot be read are counted here as dropped.
    """
    parts: list[Flat] = []
    small: list[Range] = []
    held = 0
    for one in ranges:
        if held + len(one.values) > _PIECE and small:
            parts.append(_several(small, report))
            small, held = [], 0
        if len(one.values) > _PIECE:
            parts.append(_large(one, report))
        else:
            small.append(one)
            held += len(one.values)
    if small:
        parts.append(_several(small, report))
    return _joined(parts)


def slices(samples: Samples) -> Iterator[Samples]:
    """Samples in slices of time of bounded size, one after the other; a minute is never cut in two.

    Args:
        samples: Of any series, each with one sample at least.
    """
    ts = samples.ts_ms
    if len(ts) <= _SLICE:
        yield samples
        return
    some = np.sort(ts[:: max(len(ts) // 100_000, 1)])
    wanted = np.linspace(0, len(some) - 1, -(-len(ts) // _SLICE) + 1)[1:-1].astype(np.int64)
    edges = np.unique(some[wanted] // _MINUTE_MS * _MINUTE_MS)
    starts = np.cumsum(samples.counts) - samples.counts
    lowest, highest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    for low, high in zip([lowest, *edges], [*edges, highest], strict=True):
        here = (ts >= low) & (ts < high)
        counts = np.add.reduceat(here, starts, dtype=np.int64)
        some_here = counts > 0
        if some_here.any():
            yield Samples(
                samples.name[some_here], samples.entity[some_here], counts[some_here], ts[here], samples.values[here]
            )


def _several(ranges: list[Range], report: Report) -> Flat:
    """Whole series, at once where all of them can be read, else one by one."""
    texts = [bytes(one.values) for one in ranges]
    try:
        return _decoded(texts)
    except UNREADABLE:
        return _joined([_each(text, one.place, report) for text, one in zip(texts, ranges, strict=True)])


def _large(one: Range, report: Report) -> Flat:
    """A series, piece by piece."""
    found = _joined([_each(text, one.place, report) for text in _pieces(one.values)])
    return found._replace(counts=np.array([len(found.ts_ms)], np.int64))


def _pieces(values: memoryview) -> Iterator[bytes]:
    """Lists of some pairs each, that together are the pairs of the list."""
    at, size = 1, _PIECE
    end = len(values) - 1
    while at < end:
        text = bytes(values[at : min(at + size, end)])
        cut = _last_cut(text) if at + size < end else len(text)
        if not cut:
            size *= 2
            continue
        size = _PIECE
        at += cut
        yield b"[" + (text[:cut].rstrip().removesuffix(b",")) + b"]"


def _last_cut(text: bytes) -> int:
    """Where the last pair of a text begins; 0: nowhere."""
    at = len(text)
    while (at := text.rfind(b"[", 0, at)) > 0:
        before = text[max(at - 64, 0) : at].rstrip()
        if before.endswith(b",") and before[:-1].rstrip().endswith(b"]"):
            return at
    return 0


def _each(text: bytes, place: int, report: Report) -> Flat:
    """The pairs of one list, without those that cannot be read."""
    try:
        return _decoded([text])
    except UNREADABLE:
        pass
    ts: list[float] = []
    values: list[float] = []
    lost, example = 0, b""
    for pair in _ITEMS.decode(text):
        try:
            at, value = _PAIR.decode(pair)
            number = float(value)
        except UNREADABLE:
            lost += 1
            example = example or bytes(pair)
            continue
        ts.append(at)
        values.append(number)
    if lost:
        report.drop(_BAD_PAIR, lost, place, example[:200].decode("utf-8", "replace"))
    return Flat(np.array([len(ts)], np.int64), _milliseconds(ts), np.array(values, np.float64))


def _decoded(texts: list[bytes]) -> Flat:
    found = decode_matrix(b"[" + b",".join([b'{"metric":{},"values":' + text + b"}" for text in texts]) + b"]")
    # A comma in each pair and one between two: else some are no pairs.
    commas = sum(text.count(b",") for text in texts)
    if len(found.counts) != len(texts) or commas != 2 * len(found.ts_ms) - len(texts):
        raise ValueError("values and pairs do not add up")
    return Flat(found.counts, found.ts_ms, found.values)


def _joined(parts: list[Flat]) -> Flat:
    """One of several. The list is emptied, so that no two copies of all samples are held."""
    if len(parts) == 1:
        return parts.pop()
    counts = [part.counts for part in parts]
    ts, values = [part.ts_ms for part in parts], [part.values for part in parts]
    parts.clear()
    joined_ts = np.concatenate(ts) if ts else np.empty(0, np.int64)
    del ts
    joined = np.concatenate(values) if values else np.empty(0, np.float64)
    return Flat(np.concatenate(counts) if counts else np.empty(0, np.int64), joined_ts, joined)


def _milliseconds(seconds: list[float]) -> np.ndarray:
    # Times that no integer holds stay absurd, and are left out as such.
    return np.rint(np.clip(np.array(seconds, np.float64), -9e15, 9e15) * 1000).astype(np.int64)

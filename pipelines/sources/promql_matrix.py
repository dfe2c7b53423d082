"""Answers to range selectors as arrays: series labels stay raw bytes, samples of all series are parsed in one go.

Only the JSON of the Prometheus API is read here; how it is fetched stands in `promql_session.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl


class Data(msgspec.Struct):
    """What a query gave, not decoded yet."""

    resultType: str  # noqa: N815
    result: msgspec.Raw


class Answer(msgspec.Struct):
    """Any answer of the API."""

    status: str
    data: Data | None = None
    errorType: str = ""  # noqa: N815
    error: str = ""
    warnings: list[str] | None = None
    infos: list[str] | None = None


ANSWER = msgspec.json.Decoder(Answer)


class Matrix(NamedTuple):
    """Answer to a range selector.

    Attributes:
        labels: Labels of each series, as JSON bytes.
        counts: Number of samples of each series.
        ts_ms: Times of the samples, ms since the epoch, series after series.
        values: Values of the samples.
    """

    labels: list[bytes]
    counts: np.ndarray
    ts_ms: np.ndarray
    values: np.ndarray


class _Series(msgspec.Struct):
    metric: msgspec.Raw
    values: msgspec.Raw = msgspec.Raw(b"")  # absent for native histograms


_MATRIX = msgspec.json.Decoder(list[_Series])
_LABELS = msgspec.json.Decoder(dict[str, str])
_PAIRS = msgspec.json.Decoder(list[tuple[float, str]])
_LINES = bytes.maketrans(b"]", b"\n")
_SAMPLE = {"": pl.String, "ts": pl.Float64, "value": pl.Float64}
# An escaped backslash and a whole pair are passed over; what is left is half a pair.
_SURROGATE = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def decode_matrix(raw: bytes | msgspec.Raw) -> Matrix:
    """A matrix result as arrays.

    Raises:
        ValueError: It is none.
    """
    series = [s for s in _MATRIX.decode(raw) if len(memoryview(s.values)) > 2]
    labels = [bytes(s.metric) for s in series]
    texts = [bytes(s.values) for s in series]
    counts = np.fromiter((text.count(b"[") - 1 for text in texts), np.int64, len(texts))
    # [[t,"v"],[t,"v"]] of all series end to end becomes lines of ,t,v: brackets that close end lines.
    lines = b"," + b"],[".join([text[2:-2] for text in texts]).translate(_LINES, b'["')
    del texts
    try:
        frame = pl.read_csv(io.BytesIO(lines), has_header=False, schema=_SAMPLE, columns=[1, 2], null_values=[])
        if len(frame) != counts.sum() or frame["ts"].null_count() or frame["value"].null_count():
            raise ValueError("samples and series do not add up")
    except (pl.exceptions.PolarsError, ValueError):
        return _decode_slowly(series, labels)
    return Matrix(labels, counts, _milliseconds(frame["ts"].to_numpy()), frame["value"].to_numpy())


def _decode_slowly(series: list[_Series], labels: list[bytes]) -> Matrix:
    """For servers that put blanks into their JSON."""
    pairs = [_PAIRS.decode(s.values) for s in series]
    ts = np.array([ts for rows in pairs for ts, _ in rows], np.float64)
    values = np.array([float(text) for rows in pairs for _, text in rows], np.float64)
    return Matrix(labels, np.array([len(rows) for rows in pairs], np.int64), _milliseconds(ts), values)


def _milliseconds(seconds: np.ndarray) -> np.ndarray:
    # Times that no integer holds stay absurd, for the source to leave them out.
    return np.rint(np.clip(np.nan_to_num(seconds, nan=-9e15), -9e15, 9e15) * 1000).astype(np.int64)


def spoil_half_pairs(body: bytes) -> bytes:
    """JSON whose halves of surrogate pairs are made bytes of no text.

    A JSON decoder refuses a whole answer for one of them; as such a byte it costs only the series whose labels hold it.
    """
    return _SURROGATE.sub(lambda found: b"\xff" if found[1] else found[0], body)


def join(matrices: Sequence[Matrix]) -> Matrix:
    """Series of several answers one after another."""
    if len(matrices) == 1:
        return matrices[0]
    return Matrix(
        [labels for matrix in matrices for labels in matrix.labels],
        np.concatenate([matrix.counts for matrix in matrices]),
        np.concatenate([matrix.ts_ms for matrix in matrices]),
        np.concatenate([matrix.values for matrix in matrices]),
    )


def parse_labels(raw: bytes) -> dict[str, str]:
    """Labels of a series of a `Matrix`.

    Raises:
        ValueError: They are no object of texts.
    """
    try:
        return _LABELS.decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error

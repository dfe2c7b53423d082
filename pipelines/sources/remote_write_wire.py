"""The wire of Prometheus remote-write 1.0: snappy around protobuf, taken apart into series and samples.

Only bytes and numbers here: nothing is resolved, kept or stored. The protobuf library hands out each series as bytes;
with a single sample, which is nearly always, these end in one of two fixed forms, so that what stands before is the key
of the series and the ends of all series are read at once by NumPy. Whatever has another form goes through the library.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, NamedTuple

import cramjam
import numpy as np
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError

# Value that ends a series: one of the many NaNs.
STALE_BITS = np.uint64(0x7FF0000000000002)
# Sample of 16 bytes: its tag and size, a double, a time of six varint bytes (years 1971 to 2109). A value of zero is
# left out by protobuf's rules, and seven bytes remain.
FULL, SHORT = 18, 9
NAME_TAG = b"\x0a\x08__name__\x12"
_TIME_SHIFTS = np.int64(1) << (7 * np.arange(6, dtype=np.int64))


class WireError(Exception):
    """A body is no remote-write request. The message says at which step it failed."""


class TooLargeError(WireError):
    """A body would be larger than allowed once it is decompressed."""


def _messages() -> tuple[Any, Any, Any, Any]:
    """Classes of the messages: request, series, label, and labels of a series as a map, which has the same wire form.

    Fields and numbers are those of Prometheus's `types.proto`.
    """
    made: Any = importlib.import_module("google.protobuf.descriptor_pb2")  # its classes are made at import
    kinds = made.FieldDescriptorProto
    file = made.FileDescriptorProto(name="weatherglass_remote_write.proto", package="wg", syntax="proto3")
    fields = {
        "Request": (("timeseries", 1, kinds.TYPE_BYTES, True),),
        "Series": (("labels", 1, kinds.TYPE_BYTES, True), ("samples", 2, kinds.TYPE_MESSAGE, True)),
        "Sample": (("value", 1, kinds.TYPE_DOUBLE, False), ("timestamp", 2, kinds.TYPE_INT64, False)),
        "Label": (("name", 1, kinds.TYPE_BYTES, False), ("value", 2, kinds.TYPE_BYTES, False)),
    }
    for name, members in fields.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in members:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            type_name = ".wg.Sample" if kind == kinds.TYPE_MESSAGE else None
            message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)
    labels = file.message_type.add(name="Labels")
    entry = labels.nested_type.add(name="LabelsEntry")
    entry.options.map_entry = True
    for name, number in (("key", 1), ("value", 2)):
        entry.field.add(name=name, number=number, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    labels.field.add(
        name="labels", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED, type_name=".wg.Labels.LabelsEntry"
    )
    pool = descriptor_pool.DescriptorPool()  # ty: ignore[possibly-missing-implicit-call]
    pool.Add(file)
    get = message_factory.GetMessageClass
    request, series, label, labels = (
        get(pool.FindMessageTypeByName(f"wg.{name}")) for name in ("Request", "Series", "Label", "Labels")
    )
    return request, series, label, labels


_Request, _Series, _Label, _Labels = _messages()


def decompress(body: bytes, most_bytes: int) -> bytes:
    """Raw snappy block undone; the size it declares is looked at before anything is made.

    Raises:
        TooLargeError: It declares more than `most_bytes`.
        WireError: It is no snappy block.
    """
    try:
        size = cramjam.snappy.decompress_raw_len(body)
        if size > most_bytes:
            raise TooLargeError(f"the body is {size} bytes decompressed; at most {most_bytes} are taken")
        return bytes(cramjam.snappy.decompress_raw(body))
    except cramjam.DecompressionError as error:
        raise WireError(f"the body is no snappy block: {error}") from None


def split(message: bytes) -> list[bytes]:
    """Each series of a request, as bytes.

    Raises:
        WireError: It is no protobuf message.
    """
    try:
        return list(_Request.FromString(message).timeseries)
    except DecodeError as error:
        raise WireError(f"the body is no remote-write request: {error}") from None


class Tails(NamedTuple):
    """Ends of series in one fixed form.

    Attributes:
        is_form: Whether the series ends in that form, provided that all before it is labels.
        ts_ms: Time of its sample, ms since the epoch; of no meaning where it has not the form.
        values: Value of its sample.
    """

    is_form: np.ndarray
    ts_ms: np.ndarray
    values: np.ndarray


def tails(series: list[bytes], size: int) -> Tails:
    """The samples at the ends of series, read as if all had the form of that size.

    Args:
        series: Each at least `size` bytes long.
        size: `FULL` or `SHORT`.
    """
    ends = np.frombuffer(b"".join([one[-size:] for one in series]), np.uint8).reshape(-1, size)
    time = ends[:, -6:]
    is_form = (ends[:, 0] == 0x12) & (ends[:, 1] == size - 2) & (ends[:, -7] == 0x10)
    is_form &= (time[:, :5] >= 0x80).all(axis=1) & (time[:, 5] < 0x80)
    ts_ms = (time & 0x7F).astype(np.int64) @ _TIME_SHIFTS
    if size == SHORT:
        return Tails(is_form, ts_ms, np.zeros(len(series)))
    is_form &= ends[:, 2] == 0x09
    return Tails(is_form, ts_ms, ends[:, 3:11].copy().view("<f8")[:, 0])


def metric_name(series: bytes) -> bytes | None:
    """Name of the metric without taking the series apart; None when it is not found in a simple way."""
    at = series.find(NAME_TAG)
    if at < 0:
        return None
    at += len(NAME_TAG)
    size = series[at] if at < len(series) else 0x80
    return series[at + 1 : at + 1 + size] if size < 0x80 else None


def without_name(labels: bytes, name: bytes) -> bytes:
    """Labels as bytes, the metric's name cut out: equal for the metrics of one GPU on one target."""
    whole = NAME_TAG + bytes([len(name)]) + name
    return labels.replace(bytes([0x0A, len(whole)]) + whole, b"", 1) if len(whole) < 0x80 else labels


def parse_series(series: bytes) -> tuple[bytes, list[tuple[int, float]]]:
    """A series of whatever form.

    Returns:
        Its labels as bytes in one spelling, and its samples: time in ms since the epoch, value.

    Raises:
        WireError: It is no series.
    """
    try:
        message = _Series.FromString(series)
    except DecodeError as error:
        raise WireError(f"a series is no protobuf message: {error}") from None
    samples = [(sample.timestamp, sample.value) for sample in message.samples]
    return _Series(labels=message.labels).SerializeToString(), samples


def parse_labels(labels: bytes) -> dict[str, str]:
    """Labels by name.

    Raises:
        WireError: They are none.
    """
    with contextlib.suppress(DecodeError):  # texts that are none, or a series that is none: see below
        return dict(_Labels.FromString(labels).labels)
    try:
        pairs = [_Label.FromString(one) for one in _Series.FromString(labels).labels]
        return {pair.name.decode(): pair.value.decode("utf-8", "replace") for pair in pairs}
    except (DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"labels cannot be read: {error}") from None

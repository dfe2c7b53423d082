"""Append-only log of samples: a file for each minute of sample time, and the labels of series in files of their own.

What `append` has returned from is on the disk and survives a kill and a power cut. A file is a row of records, each
with a check sum; a record torn by a crash is passed over. One process appends, any number read at the same time. Old
minutes go by `Spool.prune`, which calls `prune_series` for the labels.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

_MINUTE = "samples-%Y%m%dT%H%MZ.log"
_SERIES = re.compile(r"series-(\d{1,15})\.log")
_MAGIC = b"wgs1"
_HEAD = struct.Struct("<4sIIQ")  # magic, size and check sum of what follows, epoch
_OPEN_FILES = 16
_AHEAD = timedelta(days=1)  # a sample's time lies at most this far ahead of its arrival


class Chunk(NamedTuple):
    """Samples of one record.

    Attributes:
        epoch: Whose series numbers these are.
        series: Number of the series of each sample.
        ts_ms: Time of each sample, ms since the epoch.
        values: Value of each sample.
    """

    epoch: int
    series: np.ndarray
    ts_ms: np.ndarray
    values: np.ndarray


class SampleLog:
    """The log of one cluster.

    Args:
        folder: Where the files are; made at the first `append`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: OrderedDict[Path, int] = OrderedDict()

    def append(self, chunk: Chunk, new: Sequence[tuple[int, bytes]] = ()) -> None:
        """Write samples, and the labels of series that were not written before; back when all is on the disk.

        Args:
            chunk: The samples.
            new: Number and labels of series.

        Raises:
            OSError: It cannot be written. Some of the samples may have been; appending them again does no harm.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if new:
            labels = pl.DataFrame(
                {"series": [number for number, _ in new], "labels": [text for _, text in new]},
                schema={"series": pl.UInt32, "labels": pl.Binary},
            )
            self._write(self.folder / f"series-{chunk.epoch}.log", chunk.epoch, labels)
        minutes = chunk.ts_ms // 60_000
        if not len(minutes):
            return
        for minute in (minutes[:1] if (minutes == minutes[0]).all() else np.unique(minutes)).tolist():
            inside = minutes == minute
            rows = pl.DataFrame(
                {
                    "series": chunk.series[inside].astype(np.uint32),
                    "ts": chunk.ts_ms[inside],
                    "value": chunk.values[inside],
                }
            )
            self._write(self._path(minute), chunk.epoch, rows)

    def _path(self, minute: int) -> Path:
        return self.folder / datetime.fromtimestamp(minute * 60, UTC).strftime(_MINUTE)

    def _write(self, path: Path, epoch: int, frame: pl.DataFrame) -> None:
        out = io.BytesIO()
        frame.write_ipc_stream(out, compression="lz4")
        payload = out.getbuffer()
        record = _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload), epoch) + payload
        file = self._open(path)
        size = os.fstat(file).st_size
        try:
            view = memoryview(record)
            while view:
                view = view[os.write(file, view) :]
            os.fsync(file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            self._close(path)
            raise

    def _open(self, path: Path) -> int:
        file = self._files.get(path)
        if file is not None and os.fstat(file).st_nlink:  # else it was pruned meanwhile
            self._files.move_to_end(path)
            return file
        self._close(path)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        self._files[path] = file
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        while len(self._files) > _OPEN_FILES:
            self._close(next(iter(self._files)))
        return file

    def _close(self, path: Path) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """Close the files; appending opens them again."""
        for path in list(self._files):
            self._close(path)

    def minute(self, minute: int) -> tuple[list[Chunk], list[str]]:
        """Samples of a minute of sample time, in the order they arrived; and what could not be read.

        Args:
            minute: Minutes since the epoch.
        """
        path = self._path(minute)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return [], []
        except OSError as error:
            return [], [f"{path.name} cannot be read and is passed over: {error}"]
        chunks, damaged = [], 0
        for epoch, frame, _, skipped in _records(data, 0):
            damaged += skipped
            if frame is not None:
                chunks.append(Chunk(epoch, *(frame[name].to_numpy() for name in ("series", "ts", "value"))))
        warnings = [f"{damaged} bytes of {path.name} are damaged and are passed over"] if damaged else []
        return chunks, warnings

    def epochs(self) -> list[int]:
        """Epochs whose series are on the disk, oldest first."""
        found = (_SERIES.fullmatch(path.name) for path in self.folder.glob("series-*.log"))
        return sorted(int(match[1]) for match in found if match)

    def series(self, epoch: int, offset: int = 0) -> tuple[list[tuple[int, bytes]], int]:
        """Number and labels of the series of an epoch, in pairs; otherwise as `series_columns`."""
        numbers, labels, until = self.series_columns(epoch, offset)
        return list(zip(numbers.tolist(), labels, strict=True)), until

    def series_columns(self, epoch: int, offset: int = 0) -> tuple[np.ndarray, list[bytes], int]:
        """Numbers and labels of the series of an epoch.

        Args:
            epoch: Which.
            offset: Where the last reading ended.

        Returns:
            The series written since, and where this reading ended.
        """
        try:
            with (self.folder / f"series-{epoch}.log").open("rb") as file:
                file.seek(offset)
                data = file.read()
        except OSError:
            return np.empty(0, np.int64), [], offset
        numbers: list[np.ndarray] = [np.empty(0, np.int64)]
        labels: list[bytes] = []
        until = 0
        for _, frame, end, _ in _records(data, 0):
            if frame is not None:
                numbers.append(frame["series"].to_numpy().astype(np.int64))
                labels += frame["labels"].to_list()
                until = end
        return np.concatenate(numbers), labels, offset + until


def _records(data: bytes, at: int) -> Iterator[tuple[int, pl.DataFrame | None, int, int]]:
    """Epoch, frame, end and damaged bytes before it, of each record. What is torn at the end is still being written."""
    skipped = 0
    while at + _HEAD.size <= len(data):
        magic, size, check, epoch = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + size
        frame = None
        if magic == _MAGIC and end <= len(data):
            payload = memoryview(data)[at + _HEAD.size : end]
            if zlib.crc32(payload) == check:
                with contextlib.suppress(pl.exceptions.PolarsError):
                    frame = pl.read_ipc_stream(io.BytesIO(payload))
        if frame is not None:
            yield epoch, frame, end, skipped
            at, skipped = end, 0
            continue
        following = data.find(_MAGIC, at + 1)
        if following < 0:
            return
        skipped += following - at
        at = following


def prune_series(folder: Path, oldest_minute: datetime) -> int:
    """Remove labels of epochs that no sample is left of; how many files.

    Args:
        folder: Of the log.
        oldest_minute: Of the sample files that are left; the present when there are none.
    """
    log = SampleLog(folder)
    epochs, removed = log.epochs(), 0
    for epoch, following in itertools.pairwise(epochs):
        # Nothing was written under an epoch after the next one began.
        if datetime.fromtimestamp(following / 1000, UTC) + _AHEAD < oldest_minute:
            (folder / f"series-{epoch}.log").unlink(missing_ok=True)
            removed += 1
    return removed

"""Lines of a text file, plain or gzip, in batches: memory stays bounded whatever the file holds.

A line that is longer than a limit is never held: it is counted as bad and passed over as it streams by.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

from pipelines.imports.report import Report

LONGEST = 1 << 20  # bytes of one line
_BATCH = 8 << 20  # bytes of one batch
_MOST = 100_000  # lines of one batch
_CHUNK = 1 << 18
TOO_LONG = f"longer than {LONGEST >> 20} MiB"


class Line(NamedTuple):
    """A line: its number from 1, its text without the end of line, and whether it had one."""

    number: int
    text: str
    is_whole: bool


def open_file(path: Path) -> tuple[BufferedIOBase, BufferedIOBase]:
    """The bytes of a file, unpacked when it is gzip; and the file itself, whose position tells the progress.

    Raises:
        OSError: It cannot be opened.
    """
    raw = path.open("rb")
    try:
        magic = raw.read(2)
        raw.seek(0)
    except OSError:
        raw.close()
        raise
    return (gzip.GzipFile(fileobj=raw, mode="rb"), raw) if magic == b"\x1f\x8b" else (raw, raw)


def batches(path: Path, report: Report, progress: Callable[[int], None], size: int = _BATCH) -> Iterator[list[Line]]:
    """Batches of lines, blank ones left out. Bytes that are no UTF-8 become replacement characters.

    Args:
        path: The file.
        report: Lines that are too long, and a file that breaks off, are counted here.
        progress: Called with the bytes read since the last call.
        size: Bytes of a batch, about.

    Raises:
        OSError: The file cannot be read.
    """
    opened, raw = open_file(path)
    with raw, opened:
        batch: list[Line] = []
        held = seen = number = 0
        while True:
            try:
                data = opened.readline(LONGEST + 1)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                report.drop(f"the file breaks off: {error}", place=number + 1)
                break
            if not data:
                break
            number += 1
            if len(data) > LONGEST and not data.endswith(b"\n"):
                report.read += 1
                report.drop(TOO_LONG, place=number, example=data[:60].decode("utf-8", "replace"))
                if not _pass(opened):
                    break
                continue
            text = data.decode("utf-8", "replace")
            is_whole = text.endswith("\n")
            text = text.rstrip("\r\n")
            if text and not text.isspace():
                batch.append(Line(number, text, is_whole))
                held += len(data)
            if held >= size or len(batch) >= _MOST:
                at = raw.tell()
                progress(at - seen)
                seen = at
                yield batch
                batch, held = [], 0
        progress(raw.tell() - seen)
        if batch:
            yield batch


def _pass(opened: BufferedIOBase) -> bool:
    """Read on to the end of the line; whether there is more behind it."""
    try:
        while data := opened.readline(_CHUNK):
            if data.endswith(b"\n"):
                return True
    except (EOFError, zlib.error, gzip.BadGzipFile):
        pass
    return False

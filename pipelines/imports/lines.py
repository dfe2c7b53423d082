"""Lines of a text file, plain or gzip, in batches: memory stays bounded whatever the file holds.

A line that is longer than a limit is never held: it is counted as bad and passed over as it streams by.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pipelines.imports import ImportingError
from pipelines.imports.report import Report, many

LONGEST = 1 << 20  # bytes of one line
_BATCH = 8 << 20  # bytes of one batch
_MOST = 100_000  # lines of one batch
_CHUNK = 1 << 18
BROKEN = (EOFError, zlib.error, gzip.BadGzipFile)  # of gzip files that were cut off or damaged
HEADER_AGAIN = "headers that come again, as in files that were put together"
BREAKS_OFF = "the file is cut off or damaged from here on"
# First bytes of files that are no text, and what to do about them.
_UTF16 = "UTF-16 text; make it UTF-8, as with iconv -f UTF-16 -t UTF-8"
_NO_TEXT = {
    b"\xff\xfe": _UTF16, b"\xfe\xff": _UTF16,
    b"PAR1": "a Parquet file; only jobs and telemetry read one, and not packed",
    b"BZh": "packed with bzip2; unpack it first", b"\xfd7zXZ": "packed with xz; unpack it first",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it first", b"PK\x03\x04": "a zip file; unpack it first",
    b"SQLite format 3": "a SQLite database, no text",
}  # fmt: skip
_LOOKED_AT = 4096
_BOM = b"\xef\xbb\xbf"
TOO_LONG = f"longer than {LONGEST >> 20} MiB"


class Line(NamedTuple):
    """A line: its number from 1, its text without the end of line, and whether it had one."""

    number: int
    text: str
    is_whole: bool


def open_file(path: Path) -> tuple[io.BufferedReader | gzip.GzipFile, io.BufferedReader]:
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


def check_text(path: Path, opened: io.BufferedReader | gzip.GzipFile) -> None:
    """See that a file is text, before a line of it is read.

    Raises:
        ImportingError: It is not; the message says what it is and what to do.
    """
    try:
        first = opened.peek(_LOOKED_AT)[:_LOOKED_AT]
    except BROKEN:
        return  # the reader meets it again, and counts it
    for magic, what in _NO_TEXT.items():
        if first.startswith(magic):
            raise ImportingError(f"{path}: {what}")
    if first and not first.strip(b"\0"):
        raise ImportingError(f"{path}: no text file: it holds zero bytes")
    even, odd = first[::2], first[1::2]
    for zeros, letters in ((even, odd), (odd, even)):
        if len(zeros) > 1 and not zeros.strip(b"\0") and b"\0" not in letters:
            raise ImportingError(f"{path}: {_UTF16}")


def batches(path: Path, report: Report, progress: Callable[[int], None], size: int = _BATCH) -> Iterator[list[Line]]:
    """Batches of lines, blank ones left out. Bytes that are no UTF-8 become replacement characters.

    Args:
        path: The file.
        report: Lines that are too long, and a file that breaks off, are counted here.
        progress: Called with the bytes read since the last call.
        size: Bytes of a batch, about.

    Raises:
        ImportingError: It is no text.
        OSError: The file cannot be read.
    """
    opened, raw = open_file(path)
    with raw, opened:
        check_text(path, opened)
        batch: list[Line] = []
        held = seen = number = replaced = 0
        while True:
            try:
                data = opened.readline(LONGEST + 1)
            except BROKEN as error:
                report.drop(BREAKS_OFF, place=number + 1, example=str(error))
                break
            if not data:
                break
            number += 1
            if number == 1:
                data = data.removeprefix(_BOM)
            if len(data) > LONGEST and not data.endswith(b"\n"):
                report.read += 1
                report.drop(TOO_LONG, place=number, example=data[:60].decode("utf-8", "replace"))
                if not _pass(opened):
                    break
                continue
            text = data.decode("utf-8", "replace")
            replaced += "\ufffd" in text and b"\xef\xbf\xbd" not in data
            is_whole = text.endswith("\n")
            text = text.rstrip("\r\n")
            if number == 1 and "\r" in text.strip("\r"):
                raise ImportingError(f"{path}: its lines end with a carriage return alone; run mac2unix on it first")
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
        if replaced:
            report.note(f"{many(replaced, 'line')} of {path.name} held bytes that are no UTF-8; they became �")
        if batch:
            yield batch


def _pass(opened: io.BufferedReader | gzip.GzipFile) -> bool:
    """Read on to the end of the line; whether there is more behind it."""
    try:
        while data := opened.readline(_CHUNK):
            if data.endswith(b"\n"):
                return True
    except BROKEN:
        pass
    return False

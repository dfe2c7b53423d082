"""Progress that applications send of their jobs: what may be sent, and the journal that keeps it until it is stored.

Files `published/<cluster>/progress/*.jsonl`, one line a request. A request is answered when its line is on the disk.
`taken` hands whole files to the reader (`pipelines/job_progress.py`), who removes them once their rows are in the
store: a process that is killed at any point loses nothing, and what is stored twice is the same row. No store here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
from filelock import FileLock, Timeout

from features.vocabulary import COLUMNS, PHASES, PROGRESS_QUANTITIES
from models.registry import sync_folder
from scheduler_hints.errors import BadRequestError, UnavailableError, decode_body
from scheduler_hints.journal import is_torn

MAX_ROWS = 1_000
MAX_JOURNAL_BYTES = 64 * 2**20
AHEAD = timedelta(minutes=5)  # clocks of nodes differ
_FIRST_YEAR = 2000
_OPEN = "open.jsonl"
_LOCK_TIMEOUT_S = 5.0
# No control characters: a catalogue in PostgreSQL takes no NUL, and one such row would hold up all that wait with it.
_PLAIN = r"^[^\x00-\x1f\x7f]+(?![\s\S])"
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=_PLAIN)]


def _bounds(column: str) -> dict[str, Any]:
    about = COLUMNS[column]
    return {"ge": about.low, "le": about.high}


class ProgressRow(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """How far a job is at one time. One of `PROGRESS_QUANTITIES` must be there.

    `ts` defaults to when the API took the row; `rank` is for applications of which each process reports for itself.
    """

    job_id: _Name
    ts: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    rank: Annotated[int, msgspec.Meta(**_bounds("rank"))] | None = None
    step: Annotated[int, msgspec.Meta(**_bounds("step"))] | None = None
    step_time_s: Annotated[float, msgspec.Meta(**_bounds("step_time_s"))] | None = None
    communication_time_s: Annotated[float, msgspec.Meta(**_bounds("communication_time_s"))] | None = None
    loss: float | None = None
    phase: str | None = None
    max_steps: Annotated[int, msgspec.Meta(**_bounds("max_steps"))] | None = None


class ProgressRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Progress of jobs of one cluster, 1 to 1,000 rows."""

    cluster: _Name
    rows: Annotated[list[ProgressRow], msgspec.Meta(min_length=1, max_length=MAX_ROWS)]


class ProgressKept(msgspec.Struct, frozen=True):
    """How many rows were taken; they are in the store after the next ingest."""

    kept: int
    cluster: str
    received_at: datetime


_request_decoder = msgspec.json.Decoder(ProgressRequest)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[ProgressRow])


def decode_progress(body: bytes, now: datetime) -> ProgressRequest:
    """Decode a body.

    Args:
        body: JSON.
        now: UTC; rows may lie `AHEAD` of it.

    Raises:
        BadRequestError: It is not JSON, or a value is none of those that can be.
        InvalidBodyError: It has the wrong shape; the message names the field.
    """
    request = decode_body(_request_decoder, body, {"request": ProgressRequest, "row": ProgressRow}, " (NaN is none)")
    last = now + AHEAD
    for number, row in enumerate(request.rows):
        name = f"rows[{number}]"
        if row.phase is not None and row.phase not in PHASES:
            raise _bad(f"{name}.phase", row.phase[:64], ", ".join(PHASES), list(PHASES))
        if row.ts is not None and not (row.ts.year >= _FIRST_YEAR and row.ts <= last):
            raise _bad(
                f"{name}.ts", row.ts.isoformat(), f"{_FIRST_YEAR} to {last:%Y-%m-%d %H:%M} UTC, five minutes ahead"
            )
        if row.step is not None and row.max_steps is not None and row.max_steps < row.step:
            raise _bad(f"{name}.max_steps", str(row.max_steps), f"at least step, {row.step}")
        waited = row.communication_time_s
        if waited is not None and row.step_time_s is not None and waited > row.step_time_s:
            raise _bad(f"{name}.communication_time_s", str(waited), f"at most step_time_s, {row.step_time_s}")
        if all(getattr(row, column) is None for column in PROGRESS_QUANTITIES):
            said = f"at least one of {', '.join(PROGRESS_QUANTITIES)}"
            raise _bad(name, "nothing", said, list(PROGRESS_QUANTITIES))
    return request


def _bad(name: str, value: str, words: str, valid: Any = None) -> BadRequestError:
    detail = {"parameter": name, "value": value, "valid": words if valid is None else valid}
    return BadRequestError("bad_value", f"{name}={value!r} cannot be; valid: {words}", detail)


def progress_folder(published: Path, cluster: str) -> Path:
    """Folder of a cluster's journal of progress under the published folder."""
    return published / cluster / "progress"


def keep_progress(published: Path, cluster: str, rows: list[ProgressRow], now: datetime) -> ProgressKept:
    """Write rows to the journal, and wait until the disk has them.

    Args:
        published: The published folder.
        cluster: Name of the cluster, one that is configured.
        rows: Checked.
        now: Time of rows that have none, UTC.

    Raises:
        UnavailableError: The journal is full, since nothing has taken from it for long, or the disk refused; no row
            counts as taken then.
    """
    timed = [row if row.ts is not None else msgspec.structs.replace(row, ts=now) for row in rows]
    line = _encoder.encode(timed) + b"\n"
    folder = progress_folder(published, cluster)
    try:
        is_new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder), (folder / _OPEN).open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size + len(line) > MAX_JOURNAL_BYTES:
                words = f"{size} bytes of progress wait for an ingest, at most {MAX_JOURNAL_BYTES}: does one run?"
                raise UnavailableError("journal_full", words)
            _append(file, size, (b"\n" if is_torn(file) else b"") + line)
            if size == 0:  # the file's name must outlive a loss of power too
                sync_folder(folder)
                if is_new:
                    sync_folder(folder.parent)
    except Timeout:
        raise UnavailableError("journal_busy", "the journal of progress is being written; try again") from None
    except OSError as error:
        words = f"the journal of progress cannot be written: {error.strerror or error}"
        raise UnavailableError("journal_unwritable", words) from None
    return ProgressKept(len(rows), cluster, now)


def _append(file: Any, size: int, data: bytes) -> None:
    try:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            file.truncate(size)
        raise


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", timeout=_LOCK_TIMEOUT_S)


def taken(published: Path, cluster: str) -> list[Path]:
    """Files of the journal that no request writes to any more, oldest first; the reader removes them.

    Those that an earlier reader left come alone, so that the journal of a store that cannot be written stays bounded.

    Raises:
        OSError: The folder cannot be used; `Timeout` when a request holds it for long.
    """
    folder = progress_folder(published, cluster)
    if not folder.is_dir():
        return []
    left = sorted(path for path in folder.glob("*.jsonl") if path.name != _OPEN)
    if left or not (folder / _OPEN).exists():
        return left
    with _lock(folder):
        path = folder / f"{time.time_ns():020d}.jsonl"
        (folder / _OPEN).rename(path)
    return [path]


def read_progress(path: Path) -> Iterator[ProgressRow]:
    """Rows of one file in order; lines that a crash cut off are passed over, no request was told that they are kept.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                rows = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            for row in rows:
                if row.ts is not None:
                    yield msgspec.structs.replace(row, ts=row.ts.astimezone(UTC))

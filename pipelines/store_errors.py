"""Everything that can go wrong with the store, as types, and how DuckDB's words become them.

StoreError
├── StoreBusy         another writer holds the lock, or a commit conflicted until the retries ran out
├── StoreFull         the disk is full; committed rows stay readable and writing resumes once there is room
├── StoreUnwritable   the catalogue or the data folder cannot be created, read or written
├── StoreMissing      Parquet files are there, but their catalogue is gone
│   └── StoreNotMade  there is no store yet, and none was to be made
├── StoreDamaged      a Parquet file that the catalogue names is missing or damaged
├── StoreVersionError the store was written by a later version of Weatherglass or of DuckLake
├── StoreInputError   a frame, a table name or a time handed to the store is wrong
├── StoreQueryError   a query names an unknown table or column, or is not one SELECT
└── SnapshotGone      the pinned snapshot has expired, or its files have been removed

Messages name the file or URL and say what to do. No I/O here but a look at the free space.
"""

# ruff: noqa: N818 (StoreBusy and StoreFull say what is the case; "Error" adds nothing)

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import duckdb


class StoreError(Exception):
    """Base of all errors of the store."""


class StoreBusy(StoreError):
    """Another writer was in the way for longer than the time-out."""


class StoreFull(StoreError):
    """No space is left for catalogue or data."""


class StoreUnwritable(StoreError):
    """The catalogue or the data folder cannot be created, read or written."""


class StoreMissing(StoreError):
    """There is no store at the URL yet, or its catalogue is gone while its Parquet files are there."""


class StoreNotMade(StoreMissing):
    """There is no store at the URL yet, and who asked for it only reads."""


class StoreDamaged(StoreError):
    """A Parquet file of the store is missing or damaged."""


class StoreVersionError(StoreError):
    """The store is of a version that this program does not know."""


class StoreInputError(StoreError):
    """What was handed to the store is wrong: the message names it and the valid choices."""


class StoreQueryError(StoreError):
    """A query is wrong: the message names the table or column."""


class SnapshotGone(StoreError):
    """The snapshot that was asked for is no longer (or not yet) there."""


_FULL = ("no space left on device", "database or disk is full", "disk is full", "disk quota exceeded")
_UNWRITABLE = (
    "permission denied",
    "unable to open database",
    "readonly database",
    "read-only file system",
    "file is not a database",
    "could not create directory",
    "cannot create directory",
    "failed to create directory",
    "could not connect",
    "unable to connect",
    "connection refused",
    "database disk image is malformed",
    "disk i/o error",
)
_DISK_ERROR = "disk i/o error"  # SQLite says so of a full disk too, where its shared memory cannot grow
_MIN_FREE_BYTES = 2**20
_DAMAGED = (
    "no magic bytes found",
    "too small to be a parquet file",
    "tprotocolexception",
    "ttransportexception",
    "could not read enough bytes",
    "failed to decompress",
    "decompression failure",
    "footer length error",
    "invalid parquet",
)
_CONFLICT = ("database is locked", "conflict", "could not serialize", "deadlock detected")
_WRONG_QUERY = (duckdb.CatalogException, duckdb.BinderException, duckdb.ParserException, duckdb.ConversionException)


def is_conflict(error: BaseException) -> bool:
    """Whether the transaction may succeed when it is run again from its start."""
    text = str(error).lower()
    if not isinstance(error, duckdb.Error) or isinstance(error, _WRONG_QUERY):
        return False
    return any(word in text for word in _CONFLICT) or is_expired_under_reader(error)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: DuckDB gives it another name when it meets a running query."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def interruptible(connection: duckdb.DuckDBPyConnection | None = None) -> Generator[None, None, None]:
    """DuckDB tells of Ctrl-C as a RuntimeError; from here on it is the KeyboardInterrupt that it was.

    Its query runs on until it is told to end: all else asked of the connection, closing it too, would wait for that.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_interrupt(error):
            raise
        if connection is not None:
            connection.interrupt()
        raise KeyboardInterrupt from error


def is_stale_file(error: BaseException) -> bool:
    """Whether a reader met a file that maintenance has removed under it; a new read finds the new files."""
    text = str(error)
    return isinstance(error, duckdb.Error) and ("Cannot open file" in text or "No such file or directory" in text)


def is_damaged_file(error: BaseException) -> bool:
    """Whether a Parquet file could be opened but does not hold what it should."""
    text = str(error).lower()
    return isinstance(error, duckdb.Error) and any(word in text for word in _DAMAGED)


def file_of(error: BaseException) -> str | None:
    """The Parquet file that an error of DuckDB names; None: it names none."""
    found = re.search(r"""["']([^"']+\.parquet)["']""", str(error))
    return found[1] if found else None


def damaged(file: str, reason: str) -> StoreDamaged:
    """The error for a file that the catalogue names and that cannot be read."""
    return StoreDamaged(
        f"{file}: is missing or damaged: restore it from a backup, or, if there is none, move catalogue and data "
        f"folder away and let ingest fill a new store; `weatherglass doctor` lists such files ({reason})"
    )


def is_expired_under_reader(error: BaseException) -> bool:
    """Whether the newest snapshot was replaced and expired between two looks at the catalogue."""
    return isinstance(error, duckdb.Error) and "No snapshot found in DuckLake" in str(error)


def without_passwords(text: str) -> str:
    """The text with passwords of connection strings and URLs blotted out."""
    text = re.sub(r"(password\s*=\s*)('[^']*'|[^\s\"']+)", r"\1***", text, flags=re.IGNORECASE)
    return re.sub(r"(://[^:/@\s]+):[^@\s]*@", r"\1:***@", text)


def translate(error: BaseException, url: str, data_path: str) -> StoreError:
    """The typed error that stands for one of DuckDB's.

    Args:
        error: What DuckDB raised.
        url: Catalogue, for the message (without passwords).
        data_path: Data folder, for the message.
    """
    text = without_passwords(str(error).strip())
    low = text.lower()
    if any(word in low for word in _FULL) or (_DISK_ERROR in low and _has_no_room(url, data_path)):
        return StoreFull(
            f"{data_path}: no space left; free some (or lower retention in [store]); rows written before are intact "
            f"and readable, writing resumes by itself ({_first(text)})"
        )
    if "catalog version mismatch" in low:
        return StoreVersionError(f"{url}: {_first(text)}; use the Weatherglass that wrote it, or a later one")
    if "no snapshot found" in low:
        return SnapshotGone(f"{url}: {_first(text)}: it has expired ([store] snapshot_days) or never existed")
    if any(word in low for word in _UNWRITABLE):
        return StoreUnwritable(
            f"{url} (data in {data_path}): cannot be opened or written: {_first(text)}; check that the path exists, "
            "belongs to this user and is on a writable file system"
        )
    if is_damaged_file(error):
        return damaged(file_of(error) or f"a Parquet file in {data_path}", _first(text))
    if is_conflict(error):
        return StoreBusy(f"{url}: other writers were faster each time: {_first(text)}; try again")
    if is_stale_file(error):
        return SnapshotGone(f"{data_path}: a file of this snapshot has been removed by maintenance; read again")
    if isinstance(error, _WRONG_QUERY):
        return StoreQueryError(f"query: {text}")
    return StoreError(f"{url}: {text}")


def _has_no_room(url: str, data_path: str) -> bool:
    """Whether the file system of a SQLite catalogue or of the data folder is full."""
    kind, _, address = url.partition(":")
    folders = [Path(address).parent] if kind == "sqlite" else []
    folders += [Path(data_path)] if "://" not in data_path else []
    for folder in folders:
        try:
            found = os.statvfs(folder)
        except OSError:
            continue
        if found.f_bavail * found.f_frsize < _MIN_FREE_BYTES or (found.f_files and not found.f_favail):
            return True
    return False


def _first(text: str) -> str:
    return text.splitlines()[0] if text else "no reason given"

"""Everything that can go wrong with the store, as types, and how DuckDB's words become them.

StoreError
├── StoreBusy         another writer holds the lock, or a commit conflicted until the retries ran out
├── StoreFull         the disk is full; committed rows stay readable and writing resumes once there is room
├── StoreUnwritable   the catalogue or the data folder cannot be created, read or written
├── StoreMissing      a read-only open found no store there yet
├── StoreVersionError the store was written by a later version of Weatherglass or of DuckLake
├── StoreInputError   a frame, a table name or a time handed to the store is wrong
├── StoreQueryError   a query names an unknown table or column, or is not one SELECT
└── SnapshotGone      the pinned snapshot has expired, or its files have been removed

Messages name the file or URL and say what to do. No I/O here.
"""

# ruff: noqa: N818 (StoreBusy and StoreFull say what is the case; "Error" adds nothing)

from __future__ import annotations

import re

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
    """There is no store at the URL yet."""


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
_CONFLICT = ("database is locked", "conflict", "could not serialize", "deadlock detected")
_WRONG_QUERY = (duckdb.CatalogException, duckdb.BinderException, duckdb.ParserException, duckdb.ConversionException)


def is_conflict(error: BaseException) -> bool:
    """Whether the transaction may succeed when it is run again from its start."""
    text = str(error).lower()
    if not isinstance(error, duckdb.Error) or isinstance(error, _WRONG_QUERY):
        return False
    return any(word in text for word in _CONFLICT) or is_expired_under_reader(error)


def is_stale_file(error: BaseException) -> bool:
    """Whether a reader met a file that maintenance has removed under it; a new read finds the new files."""
    text = str(error)
    return isinstance(error, duckdb.Error) and ("Cannot open file" in text or "No such file or directory" in text)


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
    if any(word in low for word in _FULL):
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
    if is_conflict(error):
        return StoreBusy(f"{url}: other writers were faster each time: {_first(text)}; try again")
    if is_stale_file(error):
        return SnapshotGone(f"{data_path}: a file of this snapshot has been removed by maintenance; read again")
    if isinstance(error, _WRONG_QUERY):
        return StoreQueryError(f"query: {text}")
    return StoreError(f"{url}: {text}")


def _first(text: str) -> str:
    return text.splitlines()[0] if text else "no reason given"

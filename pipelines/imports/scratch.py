"""Folders that an import works in, beside its output: made, locked while their import lives, and removed.

An import that was killed leaves its folder behind. The next one removes it: a folder whose lock nobody holds belongs to
no living import, on this machine or in another container. What stands in a folder is its maker's business.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import duckdb
import polars as pl
from filelock import FileLock, Timeout

from pipelines.imports import ImportingError

PREFIX = ".import-"
_LOCK = "lock"


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Generator[Path]:
    """A folder of its own in `parent`, locked as long as the context lasts; then it goes with all that is in it.

    Raises:
        ImportingError: `parent` cannot be written.
    """
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder, lock = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release(force=True)


def _make(parent: Path) -> tuple[Path, FileLock | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = FileLock(folder / _LOCK, blocking=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except (Timeout, FileNotFoundError):
            continue  # one that clears leftovers was quicker than the lock: it takes the empty folder
        except (NotImplementedError, OSError):
            return folder, None  # a file system without locks; nobody clears there either
        if folder.is_dir() and (folder / _LOCK).exists():
            return folder, lock
        lock.release(force=True)


def clear_leftovers(parent: Path) -> int:
    """Remove the folders of imports that are dead; those of living ones, and what cannot be judged, stay.

    Returns:
        How many were removed.
    """
    return sum(_is_removed(folder) for folder in _folders(parent))


def _folders(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from [path for path in parent.iterdir() if path.name.startswith(PREFIX) and path.is_dir()]


def _is_removed(folder: Path) -> bool:
    if folder.is_symlink():
        return False
    lock = FileLock(folder / _LOCK, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except (Timeout, NotImplementedError, OSError):
        return False  # it lives, it is another user's, or nothing can be locked there
    try:
        shutil.rmtree(folder)
    except OSError:
        return False
    finally:
        lock.release(force=True)
    return True


@contextlib.contextmanager
def writing(folder: Path) -> Generator[None]:
    """Faults of writing into a folder, whoever reports them, in one plain sentence.

    Raises:
        ImportingError: The disk is full, or the folder cannot be written.
    """
    try:
        yield
    except (OSError, duckdb.IOException, pl.exceptions.PolarsError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if "No space left" in text or "Disk quota" in text:
            text = "the disk is full; what was begun there is removed. Free some space, or write elsewhere with --out"
        raise ImportingError(f"{folder}: {text.splitlines()[0] if text else type(error).__name__}") from None

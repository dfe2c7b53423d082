"""The lock that lets one process at a time write to a store: a file beside a SQLite catalogue, else the server's.

Beside the lock file stands `<catalogue>.lock.holder`, which names who holds it, for messages alone: the lock itself is
the kernel's, and is free the moment its holder ends, however it ends.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import filelock
import psutil

from pipelines.server_lock import ServerLock
from pipelines.store_errors import StoreBusy, StoreError, StoreUnwritable


class WriterLock:
    """Writers of one store, one at a time, over threads and processes. Not reentrant."""

    def __init__(self, path: Path | None, timeout_s: float, server: ServerLock | None = None) -> None:
        """Args: path of the lock file, None when there is none; time-out, s; lock of the catalogue's server."""
        self.path = path
        self._server = server
        self.timeout_s = timeout_s
        self._threads = threading.Lock()
        self._owner: int | None = None
        # Without `fallback_to_soft=False` a file system without locks would get a lock that outlives its holder.
        self._file = filelock.FileLock(path, thread_local=False, fallback_to_soft=False) if path else None

    @contextmanager
    def hold(self, purpose: str) -> Generator[None, None, None]:
        """Hold the lock.

        Raises:
            StoreBusy: Another writer kept it for longer than the time-out; the message names it.
        """
        if self._owner == threading.get_ident():
            raise StoreError(f"{self.path}: a write was begun inside a write of the same thread; use the outer Writer")
        if not self._threads.acquire(timeout=self.timeout_s):
            raise StoreBusy(f"{self.path or 'store'}: another thread of this process has been writing for "
                            f"{self.timeout_s:g} s")  # fmt: skip
        try:
            self._owner = threading.get_ident()
            if self._server is not None:
                yield from self._held_on_server(self._server)
                return
            if self._file is None or self.path is None:
                yield
                return
            try:
                self._file.acquire(timeout=self.timeout_s)
            except filelock.Timeout:
                raise StoreBusy(
                    f"{self.path}: the writer lock was not free within {self.timeout_s:g} s; held by {self.holder()}; "
                    "wait for it, or raise [store] lock_timeout_s"
                ) from None
            except OSError as error:
                raise StoreUnwritable(
                    f"{self.path}: the writer lock cannot be taken: {error.strerror}; the folder must be writable and "
                    "on a file system with locks"
                ) from None
            try:
                self._sign(purpose)
                yield
            finally:
                self._file.release()
        finally:
            self._owner = None
            self._threads.release()

    def _held_on_server(self, server: ServerLock) -> Generator[None, None, None]:
        if not server.acquire(self.timeout_s):
            raise StoreBusy(
                f"store: the writer lock of the PostgreSQL catalogue was not free within {self.timeout_s:g} s; see "
                "pg_locks (locktype advisory) for its holder; wait for it, or raise [store] lock_timeout_s"
            )
        try:
            yield
        finally:
            server.release()

    def close(self) -> None:
        """Give up the connection to the server, if there is one."""
        if self._server is not None:
            self._server.close()

    def holder(self) -> str:
        """Who holds the lock (or held it last), in words."""
        if self.path is None:
            return "nobody"
        try:
            note = json.loads(self._note.read_text())
            words = f"process {note['pid']} ({note['purpose']}, since {note['since']})"
        except (OSError, ValueError, KeyError):
            return "an unnamed process"
        return words if psutil.pid_exists(note["pid"]) else f"{words}, which has ended"

    def is_free(self) -> bool:
        """Whether a writer could start at this moment."""
        if self._file is None:
            return not self._threads.locked()
        if not self._threads.acquire(blocking=False):
            return False
        try:
            self._file.acquire(timeout=0)
        except filelock.Timeout:
            return False
        else:
            self._file.release()
            return True
        finally:
            self._threads.release()

    @property
    def _note(self) -> Path:
        return Path(f"{self.path}.holder")

    def _sign(self, purpose: str) -> None:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):  # on a full disk the lock must still work
            self._note.write_text(json.dumps({"pid": os.getpid(), "purpose": purpose, "since": since}))

"""The writer lock of a store whose catalogue is a PostgreSQL: an advisory lock of the server.

The catalogue settles conflicts by itself, but not fairly: the slower of two writers could be beaten at every attempt.
The lock belongs to a transaction on a connection of its own, so that it ends with its holder, however that ends.
"""

from __future__ import annotations

import random
import time

import duckdb

from pipelines.catalogue import Location, extension_path, quoted_text
from pipelines.store_errors import translate

# Advisory locks are of one database, and that holds one store.
_TRY = "SELECT * FROM postgres_query('locks', 'SELECT pg_try_advisory_xact_lock(2003137908)')"
_POLL_S = 0.03


class ServerLock:
    """One writer at a time over all machines.

    Args:
        location: A store of kind `postgres`.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._connection: duckdb.DuckDBPyConnection | None = None

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock; False when it was not free in time.

        Raises:
            StoreError: The server does not answer.
        """
        deadline = time.monotonic() + timeout_s
        try:
            connection = self._connection or self._connect()
            connection.execute("BEGIN")
            while not connection.execute(_TRY).fetchall()[0][0]:
                if time.monotonic() >= deadline:
                    connection.execute("ROLLBACK")
                    return False
                time.sleep(_POLL_S * (0.5 + random.random()))
        except duckdb.Error as error:
            self.close()
            raise translate(error, self._location.label, self._location.data_path) from error
        except BaseException:  # an interrupt must not leave the lock held
            self.close()
            raise
        return True

    def release(self) -> None:
        """Give it back."""
        try:
            if self._connection is not None:
                self._connection.execute("ROLLBACK")
        except duckdb.Error:
            self.close()  # the server has taken it back, with the connection

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(
            config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
        )
        self._connection = connection
        connection.execute(f"LOAD {quoted_text(str(extension_path('postgres_scanner')))}")
        connection.execute(f"ATTACH {quoted_text(self._location.address)} AS locks (TYPE postgres)")
        return connection

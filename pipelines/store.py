"""The store: every table of Weatherglass, in snapshots, behind one class.

DuckLake on DuckDB: rows are Parquet files, a small database keeps the catalogue. The URL decides which database; only
this class and `pipelines/catalogue.py` know the difference. Readers never block and are never blocked; writers come one
at a time (a lock where the catalogue is a file, conflicts and retries where it is a server).

Not here: what the rows mean (`features/`), when they are written (`pipelines/ingest.py` and its siblings).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import duckdb
import polars as pl

from features.vocabulary import TABLES
from pipelines import housekeeping
from pipelines.catalogue import (
    LAKE,
    MARKS,
    Location,
    attach_sql,
    check_not_lost,
    check_version,
    connect,
    not_made,
    parse_location,
    prepare,
    quoted,
    schema_changes,
    set_options,
)
from pipelines.housekeeping import Check
from pipelines.merges import merged_since, newest_snapshot
from pipelines.server_lock import ServerLock
from pipelines.store_errors import (
    SnapshotGone,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreInputError,
    StoreMissing,
    StoreNotMade,
    StoreQueryError,
    StoreUnwritable,
    StoreVersionError,
    damaged,
    file_of,
    interruptible,
    is_conflict,
    is_expired_under_reader,
    is_stale_file,
    translate,
)
from pipelines.writer import MissingMark, Parameters, Writer, read_mark
from pipelines.writer_lock import WriterLock

__all__ = [
    "Check", "Reader", "SnapshotGone", "Store", "StoreBusy", "StoreDamaged", "StoreError", "StoreFull",
    "StoreInputError", "StoreMissing", "StoreNotMade", "StoreQueryError", "StoreUnwritable", "StoreVersionError",
    "Writer", "check_store",
]  # fmt: skip

T = TypeVar("T")
_ATTEMPTS = 12


class Reader:
    """Queries that all see the same snapshot."""

    def __init__(self, store: Store, cursor: duckdb.DuckDBPyConnection) -> None:
        self._store = store
        self._cursor = cursor

    def query(self, sql: str, parameters: Parameters = ()) -> pl.DataFrame:
        """Rows of one SELECT at the reader's snapshot.

        Raises:
            StoreQueryError: Not one SELECT, or an unknown table or column.
            SnapshotGone: Maintenance removed a file of this snapshot meanwhile; open a new reader.
            StoreDamaged: A Parquet file is missing or damaged.
        """
        try:
            return self._store.select(self._cursor, sql, parameters)
        except duckdb.Error as error:
            raise self._store.error(error) from error


class Store:
    """Tables of the registry at one URL. Use `Store.open`; one instance serves all threads of a process."""

    def __init__(
        self, location: Location, *, memory_limit_mib: int, threads: int, lock_timeout_s: float, read_only: bool
    ) -> None:
        self.location = location
        self.read_only = read_only
        self._limits = {"memory_limit_mib": memory_limit_mib, "threads": threads}
        server = ServerLock(location) if location.kind == "postgres" else None
        self._lock = WriterLock(location.lock_path, lock_timeout_s, server)
        with interruptible():
            self._connection = self._open()

    @classmethod
    def open(
        cls,
        url: str,
        data_path: str,
        *,
        memory_limit_mib: int = 1500,
        threads: int = 2,
        lock_timeout_s: float = 120,
        read_only: bool = False,
    ) -> Self:
        """Open a store; unless `read_only`, create it and bring its tables to the registry.

        Args:
            url: Catalogue: `sqlite:PATH` or `postgres:DSN`.
            data_path: Folder or `s3://` prefix of the Parquet files.
            memory_limit_mib: Memory limit of DuckDB, MiB.
            threads: DuckDB threads.
            lock_timeout_s: How long a writer waits for the writer lock, s.
            read_only: Refuse writes; the store must exist.

        Raises:
            StoreNotMade: `read_only`, and there is no store yet.
            StoreMissing: Parquet files are there without their catalogue.
            StoreUnwritable: Catalogue or data folder cannot be created or opened.
            StoreVersionError: A later version of Weatherglass wrote it.
            StoreBusy: It has to be created or extended, and another writer holds the lock.
        """
        return cls(
            parse_location(url, data_path),
            memory_limit_mib=memory_limit_mib,
            threads=threads,
            lock_timeout_s=lock_timeout_s,
            read_only=read_only,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release DuckDB; further use is an error."""
        self._connection.close()
        self._lock.close()
        housekeeping.remove_spill(self.location)

    def query(self, sql: str, params: Parameters = (), *, snapshot: int | None = None) -> pl.DataFrame:
        """Rows of one SELECT; tables go by their bare names.

        Args:
            sql: One SELECT; values belong into `params` (`?` or `$name`).
            params: Values of the placeholders.
            snapshot: Read as of this snapshot; None: the newest.

        Raises:
            StoreQueryError: Not one SELECT, or an unknown table or column.
            SnapshotGone: The snapshot has expired.
            StoreDamaged: A Parquet file is missing or damaged.
        """
        return self._read(lambda cursor: self.select(cursor, sql, params), snapshot)

    @contextmanager
    def reader(self) -> Generator[Reader, None, None]:
        """Several queries at one snapshot, the newest at this moment."""
        with self._cursor() as cursor:
            self._read(lambda _: _pin(cursor))
            try:
                yield Reader(self, cursor)
            finally:
                with suppress(duckdb.Error):
                    cursor.execute("ROLLBACK")

    def transact(self, fn: Callable[[Writer], T], *, purpose: str = "writing") -> T:
        """Run `fn` in one transaction: all of its changes are committed together, or none.

        Args:
            fn: Called with a `Writer`. It is called again from its start when a commit conflicts, so it must have no
                effect outside of the store.
            purpose: Shown to others who wait for the lock.

        Returns:
            What `fn` returned.

        Raises:
            StoreBusy: The lock was not free in time, or each attempt conflicted.
            StoreFull: The disk is full; nothing was changed, and partial files are removed.
            StoreInputError: What `fn` handed over is wrong.
        """
        if self.read_only:
            raise StoreError(f"{self.location.label}: opened read-only; writes are refused")
        with self._lock.hold(purpose):
            return self._attempt(fn)

    def mark(self, cluster: str, source: str) -> datetime | None:
        """High-water mark of a source: all before it is in the store; None: never read."""
        return self._read(lambda cursor: read_mark(cursor, cluster, source))

    def snapshot(self) -> int:
        """Number of the newest snapshot."""
        return self._read(current_snapshot)

    def table_hash(self, table: str, *, exclude: tuple[str, ...] = ()) -> str:
        """A hash of a table's rows that does not depend on their order: equal tables, equal hashes.

        Args:
            table: Registry table.
            exclude: Columns to leave out.

        Returns:
            Row count and hash as text.
        """
        if table not in TABLES:
            raise StoreInputError(f"no table {table!r} in the registry; tables: {', '.join(sorted(TABLES))}")
        columns = ", ".join(quoted(column) for column in TABLES[table].columns if column not in exclude)
        found = self.query(
            f"SELECT count(*) AS n, sum(h::HUGEINT)::VARCHAR AS s, bit_xor(h)::VARCHAR AS x "
            f"FROM (SELECT hash({columns}) AS h FROM {quoted(table)})"
        ).row(0)
        return ":".join(str(part) for part in found)

    def compact(self, now: datetime) -> dict[str, int]:
        """Merge small files into large ones, table by table, in groups that fit in memory. Contents stay equal.

        Args:
            now: Present time, UTC.

        Returns:
            `files_before`, `files_after`, `bytes_after`, `groups`.
        """
        return housekeeping.compact(self, now)

    def expire(self, now: datetime, snapshot_days: float) -> dict[str, int]:
        """Forget old snapshots and remove files that nothing refers to any more.

        Args:
            now: Present time, UTC.
            snapshot_days: Snapshots are kept this long.

        Returns:
            `snapshots`, `old_files` and `orphans` removed, and `orphans_kept`: unreferenced files that are most of all
            files, which speaks for a catalogue that was lost; they stay.
        """
        return housekeeping.expire(self, now, snapshot_days)

    def retain(self, now: datetime, days: Mapping[str, float]) -> dict[str, int]:
        """Delete rows that are older than their table's retention.

        Args:
            now: Present time, UTC.
            days: Retention setting name → days, as in `[store]`.

        Returns:
            Table → rows deleted, for tables that lost any.

        Raises:
            StoreInputError: A table's retention setting is not among `days`.
        """
        return housekeeping.retain(self, now, days)

    def check(self) -> list[Check]:
        """Health of the store, for `weatherglass doctor`."""
        return housekeeping.check(self)

    # --- what housekeeping needs --------------------------------------------------------------------------

    @property
    def lock(self) -> WriterLock:
        return self._lock

    def select(self, cursor: duckdb.DuckDBPyConnection, sql: str, parameters: Parameters) -> pl.DataFrame:
        """One SELECT of a reader; asked again when the files of its tables were merged under it."""
        if self.location.kind != "sqlite":
            return select(cursor, sql, parameters)
        with closing(self._connection.cursor()) as watch:
            for _ in range(_ATTEMPTS):
                before = newest_snapshot(watch)
                rows = select(cursor, sql, parameters)
                if not merged_since(watch, before, sql):
                    return rows
        raise StoreBusy(f"{self.location.label}: files were merged under each of {_ATTEMPTS} reads; try again")

    def error(self, error: BaseException) -> StoreError:
        """The typed form of an error of DuckDB."""
        if is_stale_file(error) and (file := file_of(error)) is not None and self._refers_to(file):
            return damaged(file, str(error).splitlines()[0])
        return translate(error, self.location.label, self.location.data_path)

    def _refers_to(self, file: str) -> bool:
        """Whether the newest snapshot still wants a file: then it was not maintenance that removed it."""
        try:
            with self._cursor() as cursor:
                return any(found.path == file for found in housekeeping.catalogue_files(cursor))
        except duckdb.Error:
            return False

    def maintenance(self, statement: str, parameters: Parameters = (), *, purpose: str) -> list[tuple[Any, ...]]:
        """One statement of housekeeping under the writer lock, retried on conflict."""
        with self._lock.hold(purpose):
            for attempt in range(_ATTEMPTS):
                try:
                    with self._cursor() as cursor:
                        return cursor.execute(statement, parameters or None).fetchall()
                except duckdb.Error as error:
                    if not is_conflict(error) or attempt == _ATTEMPTS - 1:
                        raise self.error(error) from error
                    time.sleep(min(2.0, 0.05 * 2**attempt))
        raise AssertionError("unreachable")

    # --- inside -------------------------------------------------------------------------------------------

    def _read(self, fn: Callable[[duckdb.DuckDBPyConnection], T], snapshot: int | None = None) -> T:
        """Call `fn` with a cursor; once more when maintenance changed the newest snapshot's files in between."""
        for is_last in (False, True):
            try:
                with self._cursor(snapshot) as cursor:
                    return fn(cursor)
            except duckdb.Error as error:
                passing = is_stale_file(error) or (snapshot is None and is_expired_under_reader(error))
                if is_last or not passing:
                    raise self.error(error) from error
        raise AssertionError("unreachable")

    def _open(self) -> duckdb.DuckDBPyConnection:
        location = self.location
        if location.kind == "sqlite":
            check_not_lost(location)
            if self.read_only and not Path(location.address).exists():
                raise not_made(location)
            if not self.read_only:
                _make_folder(Path(location.address).parent)
        if location.is_local and not self.read_only:
            _make_folder(Path(location.data_path))
        if self.read_only:
            connection = connect(location, **self._limits, read_only=True)
            try:
                if check_version(connection, location) is None:
                    raise not_made(location)
            except BaseException:
                connection.close()
                raise
            return connection
        if location.kind == "sqlite" and not Path(location.address).exists():
            with self._lock.hold("creating the store"):  # two processes must not both make the catalogue
                connection = self._connect_for_writing()
        else:
            connection = self._connect_for_writing()
        try:
            check_version(connection, location)
            check_not_lost(location, connection)
            if schema_changes(connection, location):
                with self._lock.hold("creating tables"):
                    self._create_tables(connection)
        except duckdb.Error as error:
            connection.close()
            raise self.error(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect_for_writing(self) -> duckdb.DuckDBPyConnection:
        for attempt in range(_ATTEMPTS):
            try:
                return connect(self.location, **self._limits, read_only=False)
            except StoreError as error:
                # Two processes made the catalogue on a server at once: the second finds it made.
                if "already exists" not in str(error) or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(0.1)
        raise AssertionError("unreachable")

    def _create_tables(self, connection: duckdb.DuckDBPyConnection) -> None:
        for attempt in range(_ATTEMPTS):
            cursor = connection.cursor()
            try:
                prepare(cursor)
                set_options(cursor)
                cursor.execute("BEGIN")
                for statement in schema_changes(cursor, self.location):  # again: another process may have been first
                    cursor.execute(statement)
                cursor.execute("COMMIT")
            except duckdb.Error as error:
                with suppress(duckdb.Error):
                    cursor.execute("ROLLBACK")
                if not (is_conflict(error) or "already exists" in str(error)) or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(min(2.0, 0.05 * 2**attempt))
            else:
                return
            finally:
                cursor.close()

    def _attempt(self, fn: Callable[[Writer], T]) -> T:
        began_s = time.time()
        for attempt in range(_ATTEMPTS):
            try:
                with self._cursor() as cursor:
                    folder = Path(self.location.data_path).absolute() if self.location.is_local else None
                    return _commit(cursor, fn, guarded=self._lock.path is not None, folder=folder)
            except MissingMark as missing:
                self._create_mark(missing.cluster, missing.source)
            except duckdb.Error as error:
                if is_conflict(error) and attempt < _ATTEMPTS - 1:
                    time.sleep(min(2.0, 0.02 * 2**attempt))
                    continue
                typed = self.error(error)
                if isinstance(typed, StoreFull):
                    # Committed snapshots are intact; what the failed attempt wrote is of use to nobody.
                    with suppress(duckdb.Error, OSError):
                        housekeeping.remove_partials(self, since_s=began_s)
                if isinstance(error, duckdb.FatalException):
                    self._connection.close()
                    self._connection = connect(self.location, **self._limits, read_only=False)
                raise typed from error
        raise StoreBusy(f"{self.location.label}: {_ATTEMPTS} attempts, and none could be committed; try again")

    def _create_mark(self, cluster: str, source: str) -> None:
        with self._translated(), self._cursor() as cursor:
            cursor.execute(f"INSERT INTO {MARKS} VALUES (?, ?, NULL, 0)", [cluster, source])

    @contextmanager
    def _cursor(self, snapshot: int | None = None) -> Generator[duckdb.DuckDBPyConnection, None, None]:
        cursor = self._connection.cursor()
        alias = f"{LAKE}_at_{id(cursor)}"
        try:
            prepare(cursor)
            if snapshot is not None:
                cursor.execute(attach_sql(self.location, alias, read_only=True, version=snapshot))
                cursor.execute(f"USE {alias}")
            with interruptible(cursor):
                yield cursor
        finally:
            if snapshot is not None:
                with suppress(duckdb.Error):
                    prepare(cursor)
                    cursor.execute(f"DETACH {alias}")
            cursor.close()

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except duckdb.Error as error:
            raise self.error(error) from error


def select(cursor: duckdb.DuckDBPyConnection, sql: str, parameters: Parameters) -> pl.DataFrame:
    """Run one SELECT.

    Raises:
        StoreQueryError: It is not one SELECT, or a column is an interval.
        duckdb.Error: Whatever DuckDB says.
    """
    statements = cursor.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise StoreQueryError(f"query: exactly one SELECT is allowed, got: {sql.strip()[:200]!r}")
    relation = cursor.sql(sql, params=parameters or None)
    spans = [name for name, kind in zip(relation.columns, relation.types, strict=True) if str(kind) == "INTERVAL"]
    if spans:  # Polars has no type for months and would end in a panic
        raise StoreQueryError(f"query: {', '.join(spans)}: intervals cannot be returned; ask for epoch(…) in seconds")
    return pl.DataFrame(relation)


def current_snapshot(cursor: duckdb.DuckDBPyConnection) -> int:
    """Number of the snapshot that the cursor sees."""
    return cursor.execute(f"FROM ducklake_current_snapshot('{LAKE}')").fetchall()[0][0]


def _pin(cursor: duckdb.DuckDBPyConnection) -> None:
    """Begin a transaction that stays at today's snapshot: DuckLake settles it at the first look at the catalogue."""
    with suppress(duckdb.Error):
        cursor.execute("ROLLBACK")
    cursor.execute("BEGIN")
    current_snapshot(cursor)


def check_store(url: str, data_path: str, **options: Any) -> list[Check]:
    """Health of the store at a URL, whether it can be opened or not.

    Args:
        url: As for `Store.open`.
        data_path: As for `Store.open`.
        options: As for `Store.open`.
    """
    try:
        with Store.open(url, data_path, **options) as store:
            return store.check()
    except StoreError as error:
        return [Check("store", False, str(error))]


def _commit(cursor: duckdb.DuckDBPyConnection, fn: Callable[[Writer], T], *, guarded: bool, folder: Path | None) -> T:
    writer = Writer(cursor, guarded=guarded, folder=folder)
    is_committing = False
    cursor.execute("BEGIN")
    try:
        with interruptible(cursor):
            result = fn(writer)
            is_committing = True
            cursor.execute("COMMIT")
    except BaseException as error:
        with suppress(duckdb.Error):
            cursor.execute("ROLLBACK")
        if not is_committing or is_conflict(error):  # else it may be committed although its answer was lost
            writer.discard()
        raise
    return result


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnwritable(
            f"{folder}: cannot be created: {error.strerror}; set [store] or state_dir to a folder this user may write"
        ) from None

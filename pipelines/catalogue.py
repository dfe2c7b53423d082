"""The catalogue: which database a URL means, how DuckDB attaches it, and the tables of the registry in it.

Here belong connections, extensions, DDL and the schema version. Not rows: those are read and written by
`pipelines/store.py`. Extensions are loaded by path from the wheels they came in; nothing is ever downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import duckdb
import polars as pl

from features.vocabulary import COLUMNS, TABLES, Table
from pipelines.store_errors import (
    StoreError,
    StoreInputError,
    StoreMissing,
    StoreNotMade,
    StoreUnwritable,
    StoreVersionError,
    translate,
    without_passwords,
)

LAKE = "wg"  # the name under which every connection attaches the lake
# What rows written before a column was there hold in it: parts of a key must not stay null.
_FILLS = {("feat_labels", "scope"): "'gpu'", ("feat_labels", "scope_id"): "gpu_uuid"}
SCHEMA_VERSION = 1  # rises when an older program could no longer write the store correctly
MARKS = "meta_marks"
META = "meta_store"

_TYPES: dict[object, str] = {
    pl.String: "VARCHAR",
    pl.Boolean: "BOOLEAN",
    pl.Float32: "FLOAT",
    pl.Float64: "DOUBLE",
    pl.Int32: "INTEGER",
    pl.Int64: "BIGINT",
    pl.Datetime: "TIMESTAMP WITH TIME ZONE",
}
_OPTIONS = {
    "parquet_version": "2",
    "parquet_compression": "zstd",
    "target_file_size": "128MB",
    "data_inlining_row_limit": "0",
}


@dataclass(frozen=True, slots=True)
class Location:
    """Where a store is.

    Attributes:
        kind: `sqlite` or `postgres`.
        address: Path of the SQLite file (absolute), or the PostgreSQL connection string.
        data_path: Folder (absolute) or `s3://` prefix of the Parquet files, with a slash at its end.
    """

    kind: str
    address: str
    data_path: str

    @property
    def label(self) -> str:
        """The URL as messages may show it: without a password."""
        return without_passwords(f"{self.kind}:{self.address}")

    @property
    def is_local(self) -> bool:
        """Whether the Parquet files are on this machine's file system."""
        return "://" not in self.data_path

    @property
    def lock_path(self) -> Path | None:
        """The inter-process writer lock; None where the catalogue itself settles conflicts."""
        return Path(self.address + ".lock") if self.kind == "sqlite" else None

    @property
    def spill_root(self) -> Path:
        """Folder for what does not fit in memory; each process has its own below it."""
        if self.kind == "sqlite":
            return Path(self.address).parent / "spill"
        return Path(tempfile.gettempdir()) / f"weatherglass-spill-{os.getuid()}"


def parse_location(url: str, data_path: str) -> Location:
    """Read a store URL.

    Raises:
        StoreInputError: The URL is of no known kind; the message lists the kinds.
    """
    kind, _, address = url.partition(":")
    if kind not in ("sqlite", "postgres") or not address:
        raise StoreInputError(f"store url {url!r}: it must be sqlite:PATH or postgres:DSN")
    if kind == "sqlite":
        address = str(Path(address).absolute())
    if "://" not in data_path:
        data_path = str(Path(data_path).absolute())
    return Location(kind, address, data_path.rstrip("/") + "/")


def connect(location: Location, *, memory_limit_mib: int, threads: int, read_only: bool) -> duckdb.DuckDBPyConnection:
    """A DuckDB instance with the lake attached as `wg`.

    Raises:
        StoreError: The catalogue cannot be opened; the message says why and what to do.
    """
    with contextlib.suppress(OSError):  # DuckDB makes its own folder in it, but not the one above
        location.spill_root.mkdir(parents=True, exist_ok=True)
    connection = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "memory_limit": f"{memory_limit_mib}MiB",
            "threads": str(threads),
            "temp_directory": str(location.spill_root / str(os.getpid())),
        },
    )
    try:
        for name in ("sqlite_scanner" if location.kind == "sqlite" else "postgres_scanner", "ducklake"):
            connection.execute(f"LOAD {quoted_text(str(extension_path(name)))}")
        if not location.is_local:
            connection.execute(f"LOAD {quoted_text(str(extension_path('httpfs')))}")
        connection.execute(attach_sql(location, LAKE, read_only=read_only, override=_has_moved(location)))
        prepare(connection)
    except duckdb.Error as error:
        connection.close()
        raise _opening_error(error, location) from error
    except StoreError:
        connection.close()
        raise
    return connection


def prepare(connection: duckdb.DuckDBPyConnection) -> None:
    """Settings that each connection and cursor needs: bare table names and UTC."""
    connection.execute("SET TimeZone='UTC'")
    connection.execute(f"USE {LAKE}")


def attach_sql(
    location: Location, alias: str, *, read_only: bool, override: bool = False, version: int | None = None
) -> str:
    """The ATTACH statement of a location; `version` pins a snapshot."""
    # Small inserts must not go into the catalogue: there they escape compaction and conflict detection.
    options = [f"DATA_PATH {quoted_text(location.data_path)}", "DATA_INLINING_ROW_LIMIT 0"]
    if location.kind == "sqlite":
        # A reader may meet a checkpoint for a moment: wait instead of failing.
        options += ["META_BUSY_TIMEOUT 30000"] + ([] if read_only else ["META_JOURNAL_MODE 'WAL'"])
    if override:
        options.append("OVERRIDE_DATA_PATH true")
    if version is not None:
        options = [f"SNAPSHOT_VERSION {int(version)}", "READ_ONLY"]
    elif read_only:
        options.append("READ_ONLY")
    address = quoted_text(f"ducklake:{location.kind}:{location.address}")
    return f"ATTACH {address} AS {quoted(alias)} ({', '.join(options)})"


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def quoted_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def extension_path(name: str) -> Path:
    """File of a DuckDB extension inside its wheel.

    Raises:
        StoreError: The wheel is not installed.
    """
    package = f"duckdb-extension-{name.replace('_', '-')}"
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        raise StoreError(f"{package} is not installed; install the locked requirements") from None
    for file in files:
        if file.name == f"{name}.duckdb_extension":
            return Path(str(file.locate()))
    raise StoreError(f"{package} holds no {name}.duckdb_extension; reinstall it")


def stored_tables(connection: duckdb.DuckDBPyConnection) -> dict[str, dict[str, str]]:
    """Tables of the lake: name → column → DuckDB type."""
    rows = connection.execute(
        "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE database_name = ? ORDER BY column_index",
        [LAKE],
    ).fetchall()
    tables: dict[str, dict[str, str]] = {}
    for table, column, kind in rows:
        tables.setdefault(table, {})[column] = kind
    return tables


def check_version(connection: duckdb.DuckDBPyConnection, location: Location) -> int | None:
    """Schema version of the store; None when it has never been written.

    Raises:
        StoreVersionError: It was written by a later version of Weatherglass.
    """
    if META not in stored_tables(connection):
        return None
    rows = connection.execute(f"SELECT value FROM {META} WHERE key = 'schema_version'").fetchall()
    if not rows:
        return None
    version = int(rows[0][0])
    if version > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{location.label}: schema version {version}, this program knows versions up to {SCHEMA_VERSION}; "
            "upgrade Weatherglass"
        )
    return version


def schema_changes(connection: duckdb.DuckDBPyConnection, location: Location) -> list[str]:
    """The statements that bring the lake to the registry; empty when it is there already.

    Only additions are made, and rows that are there get the value that a new part of their key has for them. A column
    whose type differs is an error, since values might be lost.

    Raises:
        StoreVersionError: A stored column has another type than the registry.
    """
    stored = stored_tables(connection)
    statements: list[str] = []
    fills: list[str] = []
    if META not in stored:
        statements += [f"CREATE TABLE {META} (key VARCHAR, value VARCHAR)"]
        statements += [f"INSERT INTO {META} VALUES ('schema_version', '{SCHEMA_VERSION}')"]
    if MARKS not in stored:
        statements.append(
            f"CREATE TABLE {MARKS} "
            '("cluster" VARCHAR, source VARCHAR, high_water TIMESTAMP WITH TIME ZONE, revision BIGINT)'
        )
    for table in TABLES.values():
        if table.name not in stored:
            statements += create_sql(table)
            continue
        for column in table.columns:
            kind, there = sql_type(column), stored[table.name].get(column)
            if there is None:
                statements.append(f"ALTER TABLE {quoted(table.name)} ADD COLUMN {quoted(column)} {kind}")
                if (table.name, column) in _FILLS:
                    fills.append(f"UPDATE {quoted(table.name)} SET {quoted(column)} = {_FILLS[table.name, column]}")
            elif there != kind:
                raise StoreVersionError(
                    f"{location.label}: {table.name}.{column} is stored as {there}, this version wants {kind}; "
                    "export the table and load it into a new store"
                )
    return statements + fills


def check_not_lost(location: Location, connection: duckdb.DuckDBPyConnection | None = None) -> None:
    """See that no catalogue is made anew over the Parquet files of one that is gone: they would become left-overs.

    Args:
        location: The store.
        connection: With the lake attached; None: before the SQLite catalogue is opened.

    Raises:
        StoreMissing: There are Parquet files, and the catalogue is missing or knows no tables.
    """

    def is_blank() -> bool:
        return _is_blank(location) if connection is None else META not in stored_tables(connection)

    # The second look is for another process that makes the store now: its tables are there before its rows.
    if location.is_local and is_blank() and (count := lost_files(location)) and is_blank():
        raise StoreMissing(
            f"{location.data_path} holds {count} Parquet files but its catalogue {location.label} is missing or empty: "
            "restore the catalogue from a backup, or move the folder away and let ingest fill a new store"
        )


def lost_files(location: Location) -> int:
    """Parquet files in a local data folder, but those of the table that is made first: a kill may leave them."""
    folder = Path(location.data_path)
    return sum(META not in file.relative_to(folder).parts for file in folder.rglob("*.parquet"))


def _is_blank(location: Location) -> bool:
    """Whether the SQLite catalogue is missing, empty or without any table."""
    path = Path(location.address)
    if location.kind != "sqlite":
        return False
    if not path.exists():
        return True
    import sqlite3

    try:
        database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)
        try:
            return database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
        finally:
            database.close()
    except sqlite3.Error:
        return False  # not a catalogue: ATTACH says so in its own words


def set_options(connection: duckdb.DuckDBPyConnection) -> None:
    """Lay down how files are written. Before any table, and outside of a transaction: they hold from then on."""
    for name, value in _OPTIONS.items():
        connection.execute(f"CALL {LAKE}.set_option({quoted_text(name)}, {quoted_text(value)})")


def create_sql(table: Table) -> list[str]:
    """DDL of one table: columns, partitions by cluster and day of its time column, order inside a file."""
    name, time = quoted(table.name), quoted(table.time)
    columns = ", ".join(f"{quoted(column)} {sql_type(column)}" for column in table.columns)
    statements = [
        f"CREATE TABLE {name} ({columns})",
        # day() is the day of the month, so that all three are needed.
        f'ALTER TABLE {name} SET PARTITIONED BY ("cluster", year({time}), month({time}), day({time}))',
    ]
    if table.sort:
        statements.append(f"ALTER TABLE {name} SET SORTED BY ({', '.join(quoted(column) for column in table.sort)})")
    return statements


def sql_type(column: str) -> str:
    """DuckDB type of a registry column."""
    dtype = COLUMNS[column].dtype
    return _TYPES[dtype if isinstance(dtype, type) else type(dtype)]


def _has_moved(location: Location) -> bool:
    """Whether the data folder was moved together with its SQLite catalogue since the store was made."""
    path = Path(location.address)
    if location.kind != "sqlite" or not location.is_local or not path.exists() or not Path(location.data_path).exists():
        return False
    import sqlite3

    try:
        database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)
        try:
            row = database.execute("SELECT value FROM ducklake_metadata WHERE key = 'data_path'").fetchone()
        finally:
            database.close()
    except sqlite3.Error:
        return False  # not a catalogue (yet): ATTACH says so in its own words
    return row is not None and row[0] != location.data_path and not Path(row[0]).exists()


def not_made(location: Location) -> StoreNotMade:
    """The error for who only reads and finds no store: what is missing, and where one that there was may be."""
    where = "state_dir or [store] url points elsewhere, or its folder is gone"
    if location.kind != "sqlite":
        where = "[store] url names another database"
    return StoreNotMade(f"{location.label}: no store there yet; the first ingest makes it. If there was one: {where}")


def _opening_error(error: duckdb.Error, location: Location) -> StoreError:
    text = str(error)
    if "creating a new DuckLake is explicitly disabled" in text:
        return not_made(location)
    if "does not match existing data path" in text:
        return StoreUnwritable(
            f"{location.label}: its Parquet files are elsewhere: {without_passwords(text.splitlines()[0])}; "
            "set [store] data_path to that folder, or move the folder and try again"
        )
    return translate(error, location.label, location.data_path)

"""One write transaction: what a caller may do between its begin and its commit.

Here belong the statements that change rows, and the form rows are stored in. Locks, commits and retries stand in
`pipelines/store.py`. A `Writer` lives only inside `Store.transact`.

How values are stored: a column with a `resolution` is rounded to the nearest multiple of it; null stays null, and NaN
and infinities become null (a missing value is missing, never zero). Rows without cluster or time are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from features.vocabulary import COLUMNS, TABLES, Table, conform
from pipelines import row_files
from pipelines.catalogue import LAKE, MARKS, quoted, quoted_text
from pipelines.store_errors import StoreInputError, is_interrupt

Parameters = Sequence[Any] | Mapping[str, Any]
_ROWS = "_weatherglass_rows"


class MissingMark(Exception):  # noqa: N818 (a signal to `Store.transact`, never seen outside)
    """The high-water row has to be created in a transaction of its own first, as other writers may be active."""

    def __init__(self, cluster: str, source: str) -> None:
        super().__init__(f"{cluster}/{source}")
        self.cluster = cluster
        self.source = source


class Writer:
    """Changes rows inside one transaction; everything is committed together or not at all."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, *, guarded: bool, folder: Path | None = None) -> None:
        """Changes go through `connection`, whose transaction is open.

        Args:
            connection: With an open transaction.
            guarded: Whether no other writer can be active.
            folder: The store's data folder when it lies on this host.
        """
        self._folder = folder
        self._connection = connection
        self._guarded = guarded
        self._touched: set[tuple[str, str]] = set()
        self._files: list[Path] = []

    def append(self, table: str, frame: pl.DataFrame) -> int:
        """Insert rows.

        Args:
            table: Registry table.
            frame: Any of its columns, its key columns at least; absent ones become null.

        Returns:
            Rows inserted.

        Raises:
            StoreInputError: Unknown table or column, or a row without cluster or time.
        """
        return self._insert(table, stored_form(frame, table))

    def upsert(self, table: str, frame: pl.DataFrame) -> int:
        """Insert rows, replacing those with the same registry key (null equals null); of equal keys the last wins.

        Returns:
            Rows inserted.

        Raises:
            StoreInputError: Unknown table or column, or a row without cluster or time.
        """
        about = _table(table)
        rows = _last_by_key(stored_form(frame, table), about)
        if rows.is_empty():
            return 0
        for cluster in rows["cluster"].unique():
            self._touch(cluster)
        same = " AND ".join(f"old.{quoted(column)} IS NOT DISTINCT FROM new.{quoted(column)}" for column in about.key)
        bounds, parameters = "", []
        if about.time in about.key:  # lets DuckLake leave out files of other days
            bounds = f"old.{quoted(about.time)} BETWEEN ? AND ? AND "
            parameters = [rows[about.time].min(), rows[about.time].max()]
        with _registered(self._connection, rows.select(about.key)):
            self._connection.execute(
                f"DELETE FROM {quoted(table)} AS old USING {_ROWS} AS new WHERE {bounds}{same}", parameters
            )
        return self._insert(table, rows)

    def replace_window(self, table: str, cluster: str, start: datetime, end: datetime, frame: pl.DataFrame) -> int:
        """Make the rows of one cluster in [start, end), by the table's time column, exactly those of the frame.

        Args:
            table: Registry table.
            cluster: Whose rows.
            start: Start of the window, included, tz-aware.
            end: End of the window, excluded, tz-aware.
            frame: The rows; `cluster` may be absent. Of equal registry keys the last wins.

        Returns:
            Rows inserted.

        Raises:
            StoreInputError: Rows outside the window or of another cluster, unknown names, naive times.
        """
        about = _table(table)
        for name, value in (("start", start), ("end", end)):
            if value.tzinfo is None:
                raise StoreInputError(f"{table}: window {name} {value} has no time zone; pass UTC")
        if "cluster" not in frame.columns:
            frame = frame.with_columns(pl.lit(cluster).alias("cluster"))
        rows = stored_form(frame, table)
        time = pl.col(about.time)
        outside = rows.filter((time < start) | (time >= end) | (pl.col("cluster") != cluster))
        if not outside.is_empty():
            raise StoreInputError(
                f"{table}: {outside.height} rows are outside cluster {cluster!r}, {start.isoformat()} to "
                f"{end.isoformat()}; the first: {outside['cluster'][0]!r}, {outside[about.time][0].isoformat()}"
            )
        self._touch(cluster)
        self._connection.execute(
            f"DELETE FROM {quoted(table)} "
            f'WHERE "cluster" = ? AND {quoted(about.time)} >= ? AND {quoted(about.time)} < ?',
            [cluster, start, end],
        )
        return self._insert(table, _last_by_key(rows, about))

    def set_mark(self, cluster: str, source: str, at: datetime) -> None:
        """Move the high-water mark of a source: everything before `at` is in the store."""
        if at.tzinfo is None:
            raise StoreInputError(f"mark of {cluster}/{source}: {at} has no time zone; pass UTC")
        self._update_mark(cluster, source, "high_water = ?, ", [at])

    def discard(self) -> None:
        """Remove the files of a transaction that is known not to be committed."""
        for path in self._files:
            path.unlink(missing_ok=True)

    def mark(self, cluster: str, source: str) -> datetime | None:
        """The high-water mark; None when the source has never been read."""
        return read_mark(self._connection, cluster, source)

    def query(self, sql: str, parameters: Parameters = ()) -> pl.DataFrame:
        """Rows as this transaction sees them, its own changes included."""
        return pl.DataFrame(self._connection.sql(sql, params=parameters or None))

    def _touch(self, cluster: str) -> None:
        """Make two transactions that write one cluster conflict, where no lock keeps them apart.

        Two writers that replace the same empty window do not conflict by themselves: both would commit.
        """
        if not self._guarded and (cluster, "") not in self._touched:
            self._update_mark(cluster, "", "", [])

    def _update_mark(self, cluster: str, source: str, assignments: str, values: list[datetime]) -> None:
        found = self._connection.execute(
            f'UPDATE {MARKS} SET {assignments}revision = revision + 1 WHERE "cluster" = ? AND source = ?',
            [*values, cluster, source],
        ).fetchall()
        if not found or not found[0][0]:
            if not self._guarded:  # two that insert it at once would not conflict
                raise MissingMark(cluster, source)
            at = values[0] if values else None
            self._connection.execute(f"INSERT INTO {MARKS} VALUES (?, ?, ?, 1)", [cluster, source, at])
        self._touched.add((cluster, source))

    def _insert(self, table: str, rows: pl.DataFrame) -> int:
        if self._folder is not None and row_files.fits(rows):
            files = row_files.write_files(self._folder, _table(table), rows)
            self._files += files
            for path in files:
                self._connection.execute(
                    f"CALL ducklake_add_data_files({quoted_text(LAKE)}, {quoted_text(table)}, {quoted_text(str(path))})"
                )
        elif not rows.is_empty():
            with _registered(self._connection, rows):
                self._connection.execute(f"INSERT INTO {quoted(table)} BY NAME SELECT * FROM {_ROWS}")
        return rows.height


def stored_form(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    """The rows as they are stored: all columns of the table, rounded, NaN and infinities as null.

    Raises:
        StoreInputError: Unknown table or column, a dtype that cannot be cast, or a row without cluster or time.
    """
    about = _table(table)
    try:
        rows = conform(frame, table)
    except (KeyError, ValueError) as error:
        raise StoreInputError(str(error.args[0])) from None
    except pl.exceptions.PolarsError as error:
        raise StoreInputError(f"{table}: {error}") from None
    for column in ("cluster", about.time):
        if missing := rows[column].null_count():
            raise StoreInputError(f"{table}: {missing} of {rows.height} rows have no {column}")
    return rows.with_columns(_rounded(name) for name, dtype in rows.schema.items() if dtype.is_float())


def read_mark(connection: duckdb.DuckDBPyConnection, cluster: str, source: str) -> datetime | None:
    """The high-water mark as the connection sees it."""
    found = pl.DataFrame(
        connection.sql(
            f'SELECT max(high_water) AS at FROM {MARKS} WHERE "cluster" = ? AND source = ?', params=[cluster, source]
        )
    )
    return found["at"][0]


def _rounded(name: str) -> pl.Expr:
    column = COLUMNS[name]
    value = pl.col(name).cast(pl.Float64)
    value = pl.when(value.is_finite()).then(value)
    if column.resolution >= 1:
        value = (value / column.resolution).round() * column.resolution
    elif column.resolution > 0:
        # Dividing by the steps in one gives the float nearest to the decimal: 0.3, not 0.30000000000000004.
        steps = round(1 / column.resolution)
        value = (value * steps).round() / steps
    value = pl.when(value == 0).then(0.0).otherwise(value)  # no negative zero
    return value.cast(column.dtype).alias(name)


def _last_by_key(rows: pl.DataFrame, table: Table) -> pl.DataFrame:
    return rows.unique(subset=list(table.key), keep="last", maintain_order=True)


def _table(name: str) -> Table:
    if name not in TABLES:
        raise StoreInputError(f"no table {name!r} in the registry; tables: {', '.join(sorted(TABLES))}")
    return TABLES[name]


class _Stream:
    """Shows DuckDB the Arrow stream of a Polars frame and nothing else (it would ask for pyarrow otherwise)."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._frame.__arrow_c_stream__(requested_schema)


class _registered:  # noqa: N801 (a context manager, used like a function)
    def __init__(self, connection: duckdb.DuckDBPyConnection, rows: pl.DataFrame) -> None:
        self._connection = connection
        self._rows = rows

    def __enter__(self) -> None:
        self._connection.register(_ROWS, _Stream(self._rows))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if is_interrupt(error):
            self._connection.interrupt()  # else its query would be waited for
        self._connection.unregister(_ROWS)

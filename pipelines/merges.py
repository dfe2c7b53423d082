"""Whether files were merged under a query, which must then be asked again.

DuckDB reads a SQLite catalogue through several connections, so one query can see the list of a table's files as it was
before a merge and their statistics as they are after it: it then finds no rows, or some, and no error. Merging is the
only change that takes entries of living rows away; inserts and deletes are kept apart by snapshot numbers. A PostgreSQL
catalogue is read at one moment and needs none of this.
"""

from __future__ import annotations

import re

import duckdb

from pipelines.catalogue import LAKE

_CATALOGUE = f"__ducklake_metadata_{LAKE}"
_MERGES = re.compile(r"(?:merge_adjacent|rewrite_delete):(\d+)")


def newest_snapshot(cursor: duckdb.DuckDBPyConnection) -> int:
    """Number of the newest snapshot now, whatever the cursor's own transaction sees. The cursor is in none."""
    found = cursor.execute(f"SELECT max(snapshot_id) FROM {_CATALOGUE}.ducklake_snapshot").fetchall()[0][0]
    return -1 if found is None else found


def merged_since(cursor: duckdb.DuckDBPyConnection, snapshot: int, sql: str) -> bool:
    """Whether files of a table that a query names were merged after a snapshot.

    Args:
        cursor: Not in a transaction.
        snapshot: As `newest_snapshot` gave it before the query.
        sql: The query.
    """
    if newest_snapshot(cursor) == snapshot:
        return False
    changes = cursor.execute(
        f"SELECT changes_made FROM {_CATALOGUE}.ducklake_snapshot_changes WHERE snapshot_id > ?", [snapshot]
    ).fetchall()
    merged = {int(number) for (text,) in changes for number in _MERGES.findall(text or "")}
    if not merged:
        return False
    tables = cursor.execute(f"SELECT table_id, table_name FROM {_CATALOGUE}.ducklake_table").fetchall()
    return any(number in merged and name in sql for number, name in tables)

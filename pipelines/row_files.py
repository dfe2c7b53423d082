"""Rows of one insert as Parquet files of the store, written beside DuckDB: several times as fast as its own INSERT.

DuckLake is told of the finished files within the transaction; until it commits they are files that nobody knows, and
without a commit they go the way of other orphans. Only for a data folder on this host. Statements stand in
`pipelines/writer.py`.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

import duckdb
import polars as pl

from features.vocabulary import Table

# Fewer rows gain nothing.
LEAST_ROWS = 2_000
_PLAIN = (pl.String, pl.Boolean, pl.Int32, pl.Int64, pl.Float32, pl.Float64, pl.Datetime)
_CLUSTER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


def fits(rows: pl.DataFrame) -> bool:
    """Whether rows can be stored this way: enough of them, of plain types, with names that a path may hold."""
    if rows.height < LEAST_ROWS or not all(isinstance(dtype, _PLAIN) for dtype in rows.dtypes):
        return False
    return all(_CLUSTER.fullmatch(name) for name in rows["cluster"].unique())


def write_files(folder: Path, table: Table, rows: pl.DataFrame) -> list[Path]:
    """Write rows as the table's partitions want them: a file for each cluster and day, in the table's order.

    Args:
        folder: The store's data folder.
        table: Whose rows they are.
        rows: In the form they are stored in.

    Returns:
        The files, safe on the disk.

    Raises:
        duckdb.IOException: One could not be written; none is left.
    """
    rows = (rows.sort(table.sort) if table.sort else rows).with_columns(pl.col(table.time).dt.date().alias("_day"))
    parts = rows.partition_by(["cluster", "_day"], as_dict=True, maintain_order=True)
    files: list[Path] = []
    try:
        for (cluster, day), part in parts.items():
            date = f"year={day.year}/month={day.month}/day={day.day}"
            home = folder / "main" / table.name / f"cluster={cluster}" / date
            home.mkdir(parents=True, exist_ok=True)
            files.append(home / f"ducklake-{uuid.uuid4()}.parquet")
            with files[-1].open("wb") as file:
                part.drop("_day").write_parquet(file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
    except (OSError, pl.exceptions.PolarsError) as error:
        for path in files:
            path.unlink(missing_ok=True)
        raise duckdb.IOException(str(error)) from error
    return files

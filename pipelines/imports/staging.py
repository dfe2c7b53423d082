"""A resting place for what readers yield: parts on disk, given back in order of time, in slices of bounded size.

Files come in any order (series after series, node after node), and one row of a GPU may be spread over a whole file.
DuckDB sorts the parts with a bounded memory, spilling to the same folder. Nothing here knows what the rows mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import polars as pl

from features.vocabulary import TABLES, conform
from pipelines.imports.scratch import writing

ORDER = "_order"
_SLICE_ROWS = 200_000
_MEMORY = "512MB"


class Staging:
    """Rows by table, on disk.

    Args:
        folder: An empty folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts: dict[str, list[str]] = {}
        self._rows = 0
        self._sorted: dict[str, Path] = {}
        self._db = open_database(folder)

    def add(self, piece: dict[str, pl.DataFrame]) -> None:
        """Put the frames of a piece down; they may lack columns of their tables.

        Raises:
            ValueError: A frame has columns that its table has not, or lacks its key.
            ImportingError: The disk is full.
        """
        for table, frame in piece.items():
            if frame.is_empty():
                continue
            parts = self._parts.setdefault(table, [])
            path = self.folder / f"{table}-{len(parts):06d}.parquet"
            order = pl.int_range(self._rows, self._rows + len(frame), dtype=pl.Int64).alias(ORDER)
            rows = conform(frame, table).with_columns(order)
            with writing(self.folder.parent):
                rows.write_parquet(path, compression="lz4")
            self._rows += len(frame)
            parts.append(str(path))

    @property
    def tables(self) -> list[str]:
        """Tables that have rows."""
        return list(self._parts)

    def slices(self, table: str) -> Iterator[pl.DataFrame]:
        """All rows of a table in order of its time, as they came where that is equal; no minute is cut in two."""
        path = self._in_order(table)
        time = TABLES[table].time
        scan = pl.scan_parquet(path)
        total = scan.select(pl.len()).collect().item()
        rest: pl.DataFrame | None = None
        for at in range(0, total, _SLICE_ROWS):
            frame = scan.slice(at, _SLICE_ROWS).collect()
            frame = frame if rest is None else pl.concat([rest, frame])
            if at + _SLICE_ROWS >= total:
                yield frame
                return
            minute = frame[time][-1].replace(second=0, microsecond=0)
            cut = int((frame[time] < minute).sum())
            rest = frame[cut:]
            if cut:
                yield frame[:cut]

    def close(self) -> None:
        """Let go of the files; the folder is the caller's to remove."""
        self._db.close()

    def _in_order(self, table: str) -> Path:
        if table not in self._sorted:
            path = self.folder / f"{table}.parquet"
            with writing(self.folder.parent):
                self._db.execute(
                    f"COPY (SELECT * FROM read_parquet({_listed(self._parts[table])}) "
                    f'ORDER BY "{TABLES[table].time}", {ORDER}) TO {_quoted(str(path))} (FORMAT parquet)'
                )
            for part in self._parts[table]:
                Path(part).unlink()
            self._parts[table] = [str(path)]
            self._sorted[table] = path
        return self._sorted[table]


def open_database(folder: Path) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory, a bounded one: what does not fit goes to `folder`."""
    database = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": _MEMORY,
            "temp_directory": str(folder / "spill"),
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "threads": 2,
        },
    )
    database.execute("SET TimeZone='UTC'")
    database.execute("SET enable_progress_bar=false")  # stdout is the report's
    return database


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _listed(paths: list[str]) -> str:
    return "[" + ", ".join(map(_quoted, paths)) + "]"

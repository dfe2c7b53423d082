"""A resting place for what readers yield: parts on disk, given back in order of time, in slices of bounded size.

Files come in any order (series after series, node after node), and one row of a GPU may be spread over a whole file.
DuckDB sorts the parts with a bounded memory, spilling to the same folder. Nothing here knows what the rows mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import duckdb
import polars as pl

from features.vocabulary import TABLES, conform

ORDER = "_order"
_SLICE_ROWS = 200_000
_MEMORY = "512MB"


class Silences(NamedTuple):
    """Gaps between samples of one entity that are far longer than its interval.

    Attributes:
        interval_s: Usual time between samples, s.
        limit_s: A gap longer than this is a silence, s.
        count: Silences.
        entities: Entities that had one.
        longest_s: The longest, s.
        entity: Whose it was.
        start: When it began.
    """

    interval_s: float
    limit_s: float
    count: int
    entities: int
    longest_s: float
    entity: str
    start: datetime | None


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
        self._db = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": _MEMORY,
                "temp_directory": str(folder / "spill"),
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "threads": 2,
            },
        )
        self._db.execute("SET TimeZone='UTC'")
        self._db.execute("SET enable_progress_bar=false")  # stdout is the report's

    def add(self, piece: dict[str, pl.DataFrame]) -> None:
        """Put the frames of a piece down; they may lack columns of their tables.

        Raises:
            ValueError: A frame has columns that its table has not, or lacks its key.
            OSError: The disk is full.
        """
        for table, frame in piece.items():
            if frame.is_empty():
                continue
            parts = self._parts.setdefault(table, [])
            path = self.folder / f"{table}-{len(parts):06d}.parquet"
            order = pl.int_range(self._rows, self._rows + len(frame), dtype=pl.Int64).alias(ORDER)
            conform(frame, table).with_columns(order).write_parquet(path, compression="lz4")
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

    def distinct(self, table: str, column: str) -> int:
        """How many different values a column has."""
        found = self._db.execute(
            f'SELECT count(DISTINCT "{column}") FROM read_parquet(?)', [self._parts[table]]
        ).fetchone()
        return int(found[0]) if found else 0

    def silences(self, table: str, keys: tuple[str, ...], factor: float = 10.0) -> Silences | None:
        """Gaps of entities that are longer than `factor` times the usual interval; None: no entity has two samples.

        Args:
            table: Its name.
            keys: Columns that name an entity; the last names it in words.
            factor: How many usual intervals are a silence.
        """
        entity, time = ", ".join(f'"{key}"' for key in keys), f'"{TABLES[table].time}"'
        self._db.execute(
            "CREATE OR REPLACE TEMP VIEW gaps AS "
            f"SELECT *, us - lag(us) OVER (PARTITION BY {entity} ORDER BY us) AS gap "
            f"FROM (SELECT DISTINCT {entity}, epoch_us({time}) AS us FROM read_parquet({_listed(self._parts[table])}))"
        )
        usual = self._db.execute("SELECT approx_quantile(gap, 0.5) FROM gaps WHERE gap IS NOT NULL").fetchone()
        if usual is None or usual[0] is None:
            return None
        limit = factor * float(usual[0])
        found = self._db.execute(
            f'SELECT count(*), count(DISTINCT ({entity})), max(gap), arg_max("{keys[-1]}", gap), '
            "arg_max(us - gap, gap) FROM gaps WHERE gap > ?",
            [limit],
        ).fetchone()
        if not found or not found[0]:
            return Silences(float(usual[0]) / 1e6, limit / 1e6, 0, 0, 0.0, "", None)
        begin = datetime.fromisoformat("1970-01-01T00:00:00+00:00") + timedelta(microseconds=int(found[4]))
        return Silences(
            float(usual[0]) / 1e6, limit / 1e6, int(found[0]), int(found[1]), found[2] / 1e6, str(found[3]), begin
        )

    def close(self) -> None:
        """Let go of the files; the folder is the caller's to remove."""
        self._db.close()

    def _in_order(self, table: str) -> Path:
        if table not in self._sorted:
            path = self.folder / f"{table}.parquet"
            self._db.execute(
                f"COPY (SELECT * FROM read_parquet({_listed(self._parts[table])}) "
                f'ORDER BY "{TABLES[table].time}", {ORDER}) TO {_quoted(str(path))} (FORMAT parquet)'
            )
            for part in self._parts[table]:
                Path(part).unlink()
            self._parts[table] = [str(path)]
            self._sorted[table] = path
        return self._sorted[table]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _listed(paths: list[str]) -> str:
    return "[" + ", ".join(map(_quoted, paths)) + "]"

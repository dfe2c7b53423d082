"""Spool of scraped samples: Arrow IPC files, one for each minute and kind, written whole and moved into place.

Exporters keep no history, so what was scraped for the tick is kept here until it is ingested. One process appends; any
number read at the same time and see either the old file or the new one. A file that cannot be read (a power cut) is
named in the warnings and passed over.
"""

from __future__ import annotations

import contextlib
import io
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from pipelines.sources.sample_log import prune_series

_NAME = "%Y%m%dT%H%MZ"
# A sample may carry a time of its own that is a little off the minute in which it was read.
_SLACK = timedelta(minutes=5)


def _read(path: Path) -> pl.DataFrame:
    # Through one open file: Polars opens a path more than once, and would meet halves of two files when it is replaced.
    return pl.read_ipc(io.BytesIO(path.read_bytes()))


class Spool:
    """Samples by minute of reading.

    Args:
        folder: Where the files are; made when it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._minute: datetime | None = None
        self._held: dict[str, pl.DataFrame] = {}

    def append(self, kind: str, frame: pl.DataFrame, at: datetime) -> None:
        """Add rows to the file of a minute.

        Args:
            kind: `gpu` or `node`.
            frame: The rows, with a column `ts`.
            at: When they were read.

        Raises:
            OSError: The file cannot be written; the old one is untouched.
        """
        minute = at.astimezone(UTC).replace(second=0, microsecond=0)
        if minute != self._minute:
            self._minute, self._held = minute, {}
        path = self.folder / f"{kind}-{minute.strftime(_NAME)}.arrow"
        held = self._held.get(kind)
        if held is None and path.exists():  # another run of this process began the minute
            with contextlib.suppress(pl.exceptions.PolarsError, OSError):
                held = _read(path)
        whole = frame if held is None else pl.concat([held, frame], how="diagonal")
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with partial.open("wb") as out:
                whole.write_ipc(out, compression="lz4")
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._held[kind] = whole

    def read(self, kind: str, start: datetime, end: datetime) -> tuple[pl.DataFrame | None, list[str]]:
        """Rows with start ≤ ts < end, None when there are none; and the files that could not be read."""
        frames, warnings = [], []
        for path, minute in self._files(kind):
            if start - _SLACK - timedelta(minutes=1) <= minute < end + _SLACK:
                try:
                    frame = _read(path)
                except FileNotFoundError:
                    continue  # pruned since it was listed
                except (pl.exceptions.PolarsError, OSError) as error:
                    warnings.append(f"{path.name} cannot be read and is passed over: {error}")
                    continue
                frames.append(frame.filter(pl.col("ts").is_between(start, end, closed="left")))
        rows = pl.concat(frames, how="diagonal") if frames else None
        return rows, warnings

    def prune(self, before: datetime) -> int:
        """Remove files whose minute ended before that time, and partial files of processes that are gone; how many.

        Files of the sample log in the same folder go by the same rule.
        """
        removed, kept = 0, []
        for path in self.folder.glob("*-*T*Z.*"):
            with contextlib.suppress(ValueError):
                minute = datetime.strptime(path.stem.rpartition("-")[2], _NAME).replace(tzinfo=UTC)
                if minute + timedelta(minutes=1) <= before:
                    path.unlink(missing_ok=True)
                    removed += 1
                elif path.suffix == ".log":
                    kept.append(minute)
        removed += prune_series(self.folder, min(kept, default=before))
        for path in self.folder.glob("*.partial"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before.timestamp():
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed

    def _files(self, kind: str) -> list[tuple[Path, datetime]]:
        files = []
        for path in sorted(self.folder.glob(f"{kind}-*.arrow")):
            with contextlib.suppress(ValueError):
                minute = datetime.strptime(path.stem.removeprefix(f"{kind}-"), _NAME)  # noqa: DTZ007
                files.append((path, minute.replace(tzinfo=UTC)))
        return files

"""Reading a long past again so that an interruption costs nothing: under which mark it is kept, where it goes on.

`weatherglass ingest --since 30d` moves a mark of its own with every window, in the window's transaction. Given again
after Ctrl-C, a kill or an outage, the same command goes on from that mark; once it is through, the mark says so and the
next one begins anew. A past of many windows is read several of them at a time, since each costs the store some tenths
of a second whatever it holds. Pure: who reads and writes marks stands in `ingest.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

# Where the mark of a backfill is put when it is through: older than any past that can be asked for.
FINISHED = datetime(1970, 1, 1, tzinfo=UTC)
# Rows that are read and written at a time: about a gigabyte while they are under way.
_ROWS_AT_ONCE = 150_000
_LONGEST = timedelta(hours=1)


def backfill_mark(length: timedelta) -> str:
    """Name of the mark under which a backfill of that length goes on: `30d` and `720h` are the same one.

    Args:
        length: How far back it reads, as `--since` says it.
    """
    return f"backfill:{round(length.total_seconds())}s"


def resume_from(mark: datetime | None, since: datetime) -> datetime:
    """Where a backfill begins.

    Args:
        mark: Its mark: everything from its own beginning to there was read; None: there has been none.
        since: Where it would begin if there had been none.

    Returns:
        The mark when it lies inside, as left by an interrupted backfill; else `since`.
    """
    return since if mark is None or mark <= since else mark


def windows_at_once(rows: int, windows: int, window_s: float) -> int:
    """How many windows of a long past to read and write as one.

    Args:
        rows: Samples that the last ones brought.
        windows: How many windows these were.
        window_s: Length of a window, s.

    Returns:
        At least 1; at most four times as many as the last ones, for a past may begin before its cluster did, and no
        more than fill an hour.
    """
    by_rows = _ROWS_AT_ONCE * windows // max(rows, 1)
    return max(1, min(by_rows, 4 * windows, int(_LONGEST.total_seconds() // window_s)))

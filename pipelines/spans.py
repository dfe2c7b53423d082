"""Spans of time that are due: windows of ingest, and what is derived from samples after them.

Pure arithmetic on marks; nothing is read or written here but marks through the store that is handed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from pipelines.settings import IngestSettings
from pipelines.store import Store

TELEMETRY_MARK = "telemetry"
# Marks of what is made from core samples; re-reading old samples sets them back, so that all of it is made anew.
DERIVED_MARKS = (
    "core_gpu_minutes", "core_gpu_hours", "core_gpu_signs", "core_faults", "feat_labels", "core_slots", "core_gpu_jobs",
)  # fmt: skip
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def due_windows(
    mark: datetime | None, now: datetime, settings: IngestSettings, watermark_lag_s: float = 0.0
) -> tuple[datetime, list[tuple[datetime, datetime]]]:
    """Windows to read: contiguous from the mark, whole ones on the grid of `window_s` only.

    Args:
        mark: High-water mark; None: the first run.
        now: Present time, UTC.
        settings: Length, lag, first history, and how many windows one run reads at most.
        watermark_lag_s: How late the source's samples may be, seconds.

    Returns:
        Where reading starts (the mark, or the start of history), and the windows, oldest first.
    """
    step = timedelta(seconds=settings.window_s)
    lag = timedelta(seconds=max(settings.lag_s, watermark_lag_s))
    newest_end = floor_time(now - lag, step)
    start = floor_time(newest_end - timedelta(seconds=settings.initial_history_s), step) if mark is None else mark
    windows, at = [], start
    while at < newest_end and len(windows) < settings.max_windows_per_run:
        end = floor_time(at, step) + step  # a mark off the grid (a changed setting) is brought back onto it
        windows.append((at, end))
        at = end
    return start, windows


def floor_time(moment: datetime, step: timedelta) -> datetime:
    """The latest multiple of `step` since the epoch that is not after `moment`."""
    return moment - (moment - _EPOCH) % step


def split(begin: datetime, end: datetime, step: timedelta) -> Iterator[tuple[datetime, datetime]]:
    """[begin, end) in pieces that end on multiples of `step`."""
    while begin < end:
        until = min(floor_time(begin, step) + step, end)
        yield begin, until
        begin = until


def settled_until(store: Store, cluster: str, settings: IngestSettings) -> datetime | None:
    """Samples before this are not read again by ingest; None: there are none yet."""
    mark = store.mark(cluster, TELEMETRY_MARK)
    return None if mark is None else mark - timedelta(seconds=settings.overlap_s)


def derived_span(
    store: Store, cluster: str, settings: IngestSettings, name: str, source: str, step: timedelta
) -> tuple[datetime, datetime] | None:
    """What is due of a table that is made of samples and of another derived table; None: nothing is.

    Args:
        store: The store.
        cluster: Name of the cluster.
        settings: Of ingest.
        name: The table, whose mark it goes on from.
        source: The other derived table, which must be there too.
        step: Grid on which the first span begins.
    """
    settled, made = settled_until(store, cluster, settings), store.mark(cluster, source)
    end = min(settled, made) if settled and made else None
    begin = None if end is None else derived_from(store, cluster, name, step, end)
    return None if end is None or begin is None else (begin, end)


def derived_from(store: Store, cluster: str, name: str, step: timedelta, before: datetime) -> datetime | None:
    """Where deriving goes on: its mark, else the first core sample there is; None: there is none before `before`."""
    mark = store.mark(cluster, name)
    if mark is not None:
        return mark
    first = store.query('SELECT min(ts) AS ts FROM core_gpu_samples WHERE "cluster" = ? AND ts < ?', [cluster, before])
    return None if first["ts"][0] is None else floor_time(first["ts"][0], step)

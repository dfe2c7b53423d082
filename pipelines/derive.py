"""Minutes and hours of GPU samples: means of quantities, any of flags, the highest of counters.

They are made from settled core samples, each span in one transaction with its mark. Faults and labels, which are made
from the same samples, stand in `pipelines/faults.py` and `pipelines/labels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl

from features.vocabulary import COLUMNS, GPU_QUANTITIES
from pipelines.settings import IngestSettings
from pipelines.spans import derived_from, floor_time, settled_until, split
from pipelines.store import Store, Writer

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
_PIECE = timedelta(minutes=10)


@dataclass
class Derived:
    """What was made: rows written, and until when; `until` is None when there were no samples yet."""

    rows: int = 0
    until: datetime | None = None


def derive_minutes(store: Store, cluster: str, settings: IngestSettings) -> Derived:
    """Bring `core_gpu_minutes` up to the newest settled minute."""
    return _derive(store, cluster, settings, "core_gpu_samples", "core_gpu_minutes", MINUTE, _PIECE)


def derive_hours(store: Store, cluster: str, settings: IngestSettings) -> Derived:
    """Bring `core_gpu_hours` up to the newest hour that is whole in `core_gpu_minutes`."""
    return _derive(store, cluster, settings, "core_gpu_minutes", "core_gpu_hours", HOUR, HOUR)


def _derive(
    store: Store, cluster: str, settings: IngestSettings, origin: str, table: str, step: timedelta, piece: timedelta
) -> Derived:
    settled = settled_until(store, cluster, settings)
    if settled is None:
        return Derived()
    if origin != "core_gpu_samples":
        made = store.mark(cluster, origin)
        settled = min(settled, made) if made else settled
    end = floor_time(settled, step)
    begin = derived_from(store, cluster, table, step, end)
    report = Derived(0, begin)
    if begin is None:
        return report
    begin = floor_time(begin, step)
    while begin < end:
        first, last = next(split(begin, end, piece))

        def work(writer: Writer, first: datetime = first, last: datetime = last) -> int:
            rows = _make(writer, cluster, origin, table, step, first, last)
            writer.set_mark(cluster, table, last)
            return rows

        made = store.transact(work, purpose=f"making {table}")
        report.rows += made
        report.until = begin = last
        if not made and last < end:  # imported history may lie years before the present
            following = _next_sample(store, cluster, origin, last, end)
            begin = end if following is None else floor_time(following, step)
            store.transact(lambda w, until=begin: w.set_mark(cluster, table, until), purpose=f"making {table}")
            report.until = begin
    return report


def remake(store: Store, cluster: str, first: datetime, last: datetime) -> int:
    """Make minutes and hours anew where samples were imported, whatever the marks say.

    Args:
        store: The store.
        cluster: Name of the cluster.
        first: Time of the first sample.
        last: Time of the last sample.

    Returns:
        Rows made.
    """
    rows = 0
    for origin, table, step, piece in (
        ("core_gpu_samples", "core_gpu_minutes", MINUTE, _PIECE),
        ("core_gpu_minutes", "core_gpu_hours", HOUR, HOUR),
    ):
        at, end = floor_time(first, step), floor_time(last, step) + step
        while (following := _next_sample(store, cluster, origin, at, end)) is not None:
            begin = floor_time(following, step)
            until = min(floor_time(begin, piece) + piece, end)
            rows += store.transact(
                lambda w, args=(origin, table, step, begin, until): _make(w, cluster, *args),
                purpose=f"making {table}",
            )
            at = until
    return rows


def _make(
    writer: Writer, cluster: str, origin: str, table: str, step: timedelta, first: datetime, last: datetime
) -> int:
    frame = writer.query(_sql(origin), [step, cluster, first, last])
    return writer.replace_window(table, cluster, first, last, frame.rename({"bucket": "ts"}))


def _next_sample(store: Store, cluster: str, table: str, begin: datetime, end: datetime) -> datetime | None:
    found = store.query(
        f'SELECT min(ts) AS ts FROM {table} WHERE "cluster" = ? AND ts >= ? AND ts < ?', [cluster, begin, end]
    )
    return found["ts"][0]


def _sql(origin: str) -> str:
    """The aggregation; its parameters: step, cluster, begin, end."""
    quantities = ", ".join(f'{_aggregate(name)} AS "{name}"' for name in GPU_QUANTITIES)
    return (
        f"SELECT time_bucket(?::INTERVAL, ts) AS bucket, node, gpu_uuid, last(gpu_index ORDER BY ts) AS gpu_index, "
        f"last(job_id ORDER BY ts) AS job_id, {quantities} FROM {origin} "
        f'WHERE "cluster" = ? AND ts >= ? AND ts < ? GROUP BY bucket, node, gpu_uuid'
    )


def _aggregate(name: str) -> str:
    if COLUMNS[name].dtype == pl.Boolean:
        return f'bool_or("{name}")'
    if name.endswith("_total") or name == "xid_last":
        return f'max("{name}")'
    return f'avg("{name}")'

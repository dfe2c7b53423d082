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
    for first, last in split(begin, end, piece):

        def work(writer: Writer, first: datetime = first, last: datetime = last) -> int:
            frame = writer.query(_sql(origin), [step, cluster, first, last])
            rows = writer.replace_window(table, cluster, first, last, frame.rename({"bucket": "ts"}))
            writer.set_mark(cluster, table, last)
            return rows

        report.rows += store.transact(work, purpose=f"making {table}")
        report.until = last
    return report


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

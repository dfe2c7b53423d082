"""Which board sat in which slot, in the store: followed out of settled samples, span by span, with a mark.

How intervals are made stands in `features/slots.py`; who held a GPU in `pipelines/gpu_jobs.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from features.slots import slot_history
from pipelines.derive import Derived
from pipelines.settings import IngestSettings
from pipelines.spans import derived_from, settled_until, split
from pipelines.store import Store, Writer

TABLE = "core_slots"
_STEP = timedelta(minutes=1)
_PIECE = timedelta(hours=6)


def derive_slots(store: Store, cluster: str, settings: IngestSettings) -> Derived:
    """Bring `core_slots` up to the newest settled sample."""
    settled = settled_until(store, cluster, settings)
    begin = None if settled is None else derived_from(store, cluster, TABLE, _STEP, settled)
    report = Derived(0, begin)
    if settled is None or begin is None:
        return report
    for first, last in split(begin, settled, _PIECE):

        def work(writer: Writer, first: datetime = first, last: datetime = last) -> int:
            # Of each board only when it came to another place: nothing else can begin an interval.
            seen = writer.query(
                'SELECT ts, "cluster", node, gpu_uuid, gpu_index FROM core_gpu_samples '
                'WHERE "cluster" = ? AND ts >= ? AND ts < ? AND gpu_index IS NOT NULL '
                "QUALIFY (node, gpu_index) IS DISTINCT FROM "
                "lag((node, gpu_index)) OVER (PARTITION BY gpu_uuid ORDER BY ts)",
                [cluster, first, last],
            )
            known = writer.query(
                f'SELECT * FROM {TABLE} WHERE "cluster" = ? AND (end_time IS NULL OR end_time >= ?)', [cluster, first]
            )
            writer.set_mark(cluster, TABLE, last)
            return writer.upsert(TABLE, slot_history(seen, known))

        report.rows += store.transact(work, purpose=f"deriving {TABLE}")
        report.until = last
    return report

"""Boards and slots in the store: what labels tell of boards, and which board sat where, span by span, with a mark.

How intervals are made stands in `features/slots.py`; who held a GPU in `pipelines/gpu_jobs.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.slots import slot_history
from features.vocabulary import BOARD_FACTS
from pipelines.derive import Derived
from pipelines.settings import IngestSettings
from pipelines.spans import derived_from, settled_until, split
from pipelines.store import Store, Writer

TABLE = "core_slots"
_STEP = timedelta(minutes=1)
_PIECE = timedelta(hours=6)


def write_boards(writer: Writer, cluster: str, boards: pl.DataFrame) -> int:
    """Keep what labels tell of boards, where it is not what was last known of them.

    Args:
        writer: The open transaction.
        cluster: Name of the cluster.
        boards: Rows of `core_boards`.

    Returns:
        Rows written.
    """
    if boards.is_empty():
        return 0
    known = writer.query(
        'SELECT * FROM core_boards WHERE "cluster" = ? '
        "QUALIFY row_number() OVER (PARTITION BY node, gpu_uuid ORDER BY ts DESC) = 1",
        [cluster],
    )
    facts = ["node", "gpu_uuid", *BOARD_FACTS]
    latest = known.select("node", "gpu_uuid", pl.col("ts").alias("known_ts"))
    new = (
        boards.join(known.select(facts), on=facts, how="anti", nulls_equal=True)
        .join(latest, on=["node", "gpu_uuid"], how="left")
        .filter(pl.col("known_ts").is_null() | (pl.col("ts") > pl.col("known_ts")))
    )
    return writer.append("core_boards", new.drop("known_ts"))


def _places(writer: Writer, cluster: str, first: datetime, last: datetime) -> pl.DataFrame:
    """Samples in which a board came to another place, and moments at which its labels changed, with what they told."""
    # Nothing else can begin an interval.
    moved = writer.query(
        'SELECT ts, "cluster", node, gpu_uuid, gpu_index FROM core_gpu_samples '
        'WHERE "cluster" = ? AND ts >= ? AND ts < ? AND gpu_index IS NOT NULL '
        "QUALIFY (node, gpu_index) IS DISTINCT FROM lag((node, gpu_index)) OVER (PARTITION BY gpu_uuid ORDER BY ts)",
        [cluster, first, last],
    )
    boards = writer.query('SELECT * FROM core_boards WHERE "cluster" = ? AND ts < ? ORDER BY ts', [cluster, last])
    if boards.is_empty():
        return moved
    board = ["cluster", "node", "gpu_uuid"]
    told = moved.sort("ts").join_asof(boards, on="ts", by=board, check_sortedness=False)
    changed = boards.filter(pl.col("ts") >= first).join(
        moved.group_by(board).agg(pl.col("gpu_index").sort_by("ts").last()), on=board, how="left"
    )
    return pl.concat([told, changed.select(told.columns)])


def derive_slots(store: Store, cluster: str, settings: IngestSettings) -> Derived:
    """Bring `core_slots` up to the newest settled sample."""
    settled = settled_until(store, cluster, settings)
    begin = None if settled is None else derived_from(store, cluster, TABLE, _STEP, settled)
    report = Derived(0, begin)
    if settled is None or begin is None:
        return report
    for first, last in split(begin, settled, _PIECE):

        def work(writer: Writer, first: datetime = first, last: datetime = last) -> int:
            known = writer.query(
                f'SELECT * FROM {TABLE} WHERE "cluster" = ? AND (end_time IS NULL OR end_time >= ?)', [cluster, first]
            )
            writer.set_mark(cluster, TABLE, last)
            return writer.upsert(TABLE, slot_history(_places(writer, cluster, first, last), known))

        report.rows += store.transact(work, purpose=f"deriving {TABLE}")
        report.until = last
    return report

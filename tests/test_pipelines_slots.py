"""Slots in the store: followed out of samples span by span, and the same when samples are read again."""

import polars as pl

from pipelines.settings import IngestSettings
from pipelines.slots import derive_slots
from pipelines.spans import TELEMETRY_MARK
from pipelines.store import Store
from tests.pipelines_world import START, samples, seconds

SETTINGS = IngestSettings(overlap_s=0)


def test_boards_that_change_places_and_come_back(tmp_path):
    """Two boards of a node swap their indices for a minute; a third is replaced."""
    minute = ((pl.col("ts") - START).dt.total_seconds() // 60).alias("minute")
    frame = samples(START, START + seconds(300)).with_columns(minute, pl.lit("a").alias("cluster"))
    is_swapped = (pl.col("node") == "n1") & (pl.col("minute") == 2)
    is_replaced = (pl.col("gpu_uuid") == "GPU-10") & (pl.col("minute") >= 3)
    frame = frame.with_columns(
        pl.when(is_swapped).then(1 - pl.col("gpu_index")).otherwise("gpu_index").alias("gpu_index"),
        pl.when(is_replaced).then(pl.lit("GPU-new")).otherwise("gpu_uuid").alias("gpu_uuid"),
    ).drop("minute")
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        store.transact(lambda w: w.append("core_gpu_samples", frame))
        store.transact(lambda w: w.set_mark("a", TELEMETRY_MARK, START + seconds(300)))
        assert derive_slots(store, "a", SETTINGS).until == START + seconds(300)
        query = "SELECT node, slot, gpu_uuid, start_time, end_time FROM core_slots ORDER BY ALL"
        rows = [
            (node, slot, gpu, (start - START).total_seconds(), end and (end - START).total_seconds())
            for node, slot, gpu, start, end in store.query(query).rows()
        ]
        assert rows == [
            ("n1", "0", "GPU-00", 0, 120), ("n1", "0", "GPU-00", 180, None), ("n1", "0", "GPU-01", 120, 180),
            ("n1", "1", "GPU-00", 120, 180), ("n1", "1", "GPU-01", 0, 120), ("n1", "1", "GPU-01", 180, None),
            ("n2", "0", "GPU-10", 0, 180), ("n2", "0", "GPU-new", 180, None), ("n2", "1", "GPU-11", 0, None),
        ]  # fmt: skip
        store.transact(lambda w: w.set_mark("a", "core_slots", START))
        assert derive_slots(store, "a", SETTINGS).rows == 0

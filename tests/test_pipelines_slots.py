"""Slots in the store: followed out of samples span by span, and the same when samples are read again."""

import polars as pl

from features.vocabulary import conform
from pipelines.settings import IngestSettings
from pipelines.signs import read_signs_of
from pipelines.slots import derive_slots, write_boards
from pipelines.sources.exposition import parse_page
from pipelines.sources.series import Index
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


PAGE = (
    'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-00",pci_bus_id="00000000:8D:00.0",modelName="NVIDIA H100 80GB HBM3",'
    'Hostname="n1",DCGM_FI_DRIVER_VERSION="{driver}"}} 40\n'
)


def told(driver, at_s):
    """What the labels of one scrape tell."""
    index = Index()
    parse_page(PAGE.format(driver=driver), index, "n1")
    return index.boards(samples(START + seconds(at_s), START + seconds(at_s + 15)).with_columns(cluster=pl.lit("a")))


def test_labels_tell_slot_model_and_driver_and_are_kept_when_they_change(tmp_path):
    frame = samples(START, START + seconds(300)).with_columns(pl.lit("a").alias("cluster"))
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        store.transact(lambda w: w.append("core_gpu_samples", frame))
        store.transact(lambda w: w.set_mark("a", TELEMETRY_MARK, START + seconds(300)))
        written = [
            store.transact(lambda w, driver=driver, at_s=at_s: write_boards(w, "a", told(driver, at_s)))
            for driver, at_s in (("550.54", 0), ("550.54", 60), ("570.10", 120), ("570.10", 180))
        ]
        assert written == [1, 0, 1, 0]
        derive_slots(store, "a", SETTINGS)
        rows = store.query("SELECT * FROM core_slots WHERE gpu_uuid = 'GPU-00' ORDER BY start_time")
    assert rows["slot"].to_list() == ["00000000:8D:00.0"] * 2
    assert rows["driver_version"].to_list() == ["550.54", "570.10"]
    assert rows["gpu_model"].to_list() == ["NVIDIA H100 80GB HBM3"] * 2
    assert rows["gpu_index"].to_list() == [0, 0]
    assert rows["end_time"].to_list() == [START + seconds(120), None]


def test_signs_of_a_node_are_those_of_the_boards_it_has(tmp_path):
    told = pl.DataFrame(
        {
            "ts": [START + seconds(3600 * h) for h in (0, 1)] * 2, "cluster": ["a"] * 4, "node": ["n1"] * 4,
            "gpu_uuid": ["old"] * 2 + ["stays"] * 2, "sign": ["ecc"] * 4, "amount": [9.0, 1.0, 2.0, 1.0],
        }
    )  # fmt: skip
    slots = pl.DataFrame(
        [
            ("0", "old", "570", 0, 7200), ("0", "new", "570", 7200, None), ("1", "stays", "570", 0, 7200),
            ("1", "stays", "580", 7200, None),
        ],
        schema=["slot", "gpu_uuid", "driver_version", "start", "end"], orient="row",
    ).select(
        "slot", "gpu_uuid", "driver_version", pl.lit("a").alias("cluster"), pl.lit("n1").alias("node"),
        *((START + pl.duration(seconds=name)).alias(f"{name}_time") for name in ("start", "end")),
    )  # fmt: skip
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        signs = conform(told, "core_gpu_signs")
        store.transact(lambda w: w.append("core_gpu_signs", signs))
        store.transact(lambda w: w.append("core_slots", slots))
        found = read_signs_of(store, "a", START, START + seconds(10_800))
    assert found.select("gpu_uuid", "amount").rows() == [("stays", 2.0), ("stays", 1.0)]

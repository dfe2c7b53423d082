"""Values that froze are told over the edges of windows, by what the store holds of the minutes before."""

from datetime import timedelta

import polars as pl
import pytest

from features.vocabulary import conform
from pipelines.derive import derive_minutes
from pipelines.ingest import ingest_telemetry
from pipelines.sources import Fetched
from tests.pipelines_world import START, Recorded, ingest_settings, seconds
from tests.store_child import open_store

SETTINGS = ingest_settings()
FREEZES = seconds(820), seconds(820 + 900)


class Freezing(Recorded):
    """GPU-00 works and is frozen between two moments; scrapes come every `step_s` and a little late."""

    def __init__(self, step_s):
        super().__init__()
        self.step_s = step_s

    def fetch(self, start, end):
        found = super().fetch(start, end)
        gpu = found.gpu.filter((pl.col("ts") - START).dt.total_seconds() % self.step_s == 0)
        at = pl.col("ts") - START
        since = (
            pl.when(at.is_between(*FREEZES) & (pl.col("gpu_uuid") == "GPU-00")).then(pl.lit(FREEZES[0])).otherwise(at)
        )
        number = since.dt.total_seconds()
        late = pl.duration(milliseconds=(at.dt.total_seconds() // self.step_s) % 3 * 10)
        gpu = gpu.with_columns(
            gpu_power_w=(300.0 + number % 97).cast(pl.Float32), gpu_temp_c=(50.0 + number % 7).cast(pl.Float32),
            sm_active_ratio=pl.lit(0.8, pl.Float32), energy_total_j=1e6 + 300.0 * number, ts=pl.col("ts") + late,
        )  # fmt: skip
        inside = gpu.filter((pl.col("ts") >= start) & (pl.col("ts") < end))
        health = conform(inside.select("ts", "cluster", "node", "gpu_uuid", "energy_total_j"), "core_gpu_health")
        return Fetched(inside.drop("energy_total_j"), found.node, health=health)


@pytest.mark.parametrize("step_s", [15, 60])
def test_a_freeze_that_begins_and_ends_inside_windows_leaves_nothing(tmp_path, step_s):
    source = Freezing(step_s)
    at = pl.col("ts") - START
    frozen = at.is_between(FREEZES[0] + seconds(step_s), FREEZES[1]) & (pl.col("gpu_uuid") == "GPU-00")
    with open_store(tmp_path) as store:
        ingest_telemetry(store, source, "alpha", SETTINGS, START + seconds(20))
        for end in range(300, 2101, 300):
            ingest_telemetry(store, source, "alpha", SETTINGS, START + seconds(end + 20))
            derive_minutes(store, "alpha", SETTINGS)
        rows = store.query("SELECT * FROM core_gpu_samples")
        minutes = store.query("SELECT * FROM core_gpu_minutes")
        health = store.query("SELECT ts, gpu_uuid, energy_total_j FROM core_gpu_health")
        told = store.query(
            "SELECT sum(count) AS n FROM core_data_quality WHERE reason = 'frozen' AND column_name = 'ts'"
        )
        reread = ingest_telemetry(store, source, "alpha", SETTINGS, START + seconds(2120), since=START)
        again = store.query("SELECT * FROM core_gpu_samples")
    assert reread.error is None
    assert again.sort("gpu_uuid", "ts").equals(rows.sort("gpu_uuid", "ts"))
    assert rows.filter(frozen)["gpu_power_w"].count() == 0
    assert rows.filter(frozen).height == told["n"][0] - 1  # the last true value rests before the frozen ones
    assert rows.filter(~frozen)["gpu_power_w"].null_count() <= 1
    whole = at.is_between(FREEZES[0] + seconds(60), FREEZES[1] - seconds(60)) & (pl.col("gpu_uuid") == "GPU-00")
    assert minutes.filter(whole)["gpu_power_w"].count() == 0
    # A counter's first minutes stay: it stood there, and nothing grew.
    kept = health.filter(whole)["energy_total_j"]
    assert kept.count() <= 5
    assert len(kept) >= 12
    later = at.is_between(FREEZES[1] + seconds(60), timedelta(days=1))
    assert health.filter(later)["energy_total_j"].null_count() == 0

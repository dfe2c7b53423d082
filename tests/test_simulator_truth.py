"""Ground truth against what exporters show, judged by the product's own label rules and by plain conditions."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import polars as pl
import pytest

from features.labels import label_bottlenecks
from features.thresholds import ThresholdBook
from features.vocabulary import conform, schema
from pipelines.sources.sacct import parse_sacct
from simulator.cluster import SimulatedCluster
from simulator.history import write_history

START = datetime(2026, 11, 4, tzinfo=UTC)
BOOK = ThresholdBook(default_model="NVIDIA H100 80GB HBM3")
TICK_S = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six hours of ten troubled nodes, a day and a half of jobs behind them."""
    out = tmp_path_factory.mktemp("history")
    world = SimulatedCluster(10, 4, START - timedelta(hours=36), TICK_S, fault_scale=60)
    world.advance_jobs(START)
    write_history(world, out, START + timedelta(hours=6))
    return out


@pytest.fixture(scope="module")
def telemetry(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "telemetry.parquet")


@pytest.fixture(scope="module")
def truth(folder: Path) -> pl.DataFrame:
    rows = [msgspec.json.decode(line) for line in (folder / "truth.jsonl").read_bytes().splitlines()]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    times = [pl.col(c).str.to_datetime(time_zone="UTC", time_unit="us") for c in ("ramp_start", "onset", "clear")]
    return frame.with_columns(times)


def test_history_is_in_the_columns_of_the_registry(folder: Path, telemetry: pl.DataFrame) -> None:
    assert telemetry.schema == schema("raw_gpu_samples")
    assert dict(pl.read_parquet(folder / "node.parquet").schema) == dict(schema("core_node_samples"))
    conform(pl.read_parquet(folder / "jobs.parquet"), "raw_jobs")
    conform(pl.read_parquet(folder / "faults.parquet"), "core_faults")
    steps = telemetry.sort("gpu_uuid", "ts")["ts"].diff().dt.total_seconds()
    assert (steps == TICK_S).mean() > 0.99  # type: ignore[operator]
    assert telemetry.select("gpu_uuid", "ts").is_unique().all()
    assert telemetry["ts"].min() == START + timedelta(seconds=TICK_S)
    assert telemetry["ts"].max() == START + timedelta(hours=6)
    node = pl.read_parquet(folder / "node.parquet")
    assert node.height == 10 * 6 * 360
    down = node.filter(~pl.col("is_up"))
    assert down["inlet_temp_c"].null_count() == down.height
    # Each quantity within the range the registry gives it.
    from features.vocabulary import COLUMNS, GPU_QUANTITIES

    for name in GPU_QUANTITIES:
        low, high = COLUMNS[name].low, COLUMNS[name].high
        values = telemetry[name].drop_nulls()
        assert len(values) > 0, name
        if low is not None and high is not None:
            assert values.is_between(low, high).all(), name


def test_jobs_on_gpus_are_the_jobs_of_the_scheduler(folder: Path, telemetry: pl.DataFrame) -> None:
    jobs = pl.read_parquet(folder / "jobs.parquet")
    seen = telemetry.filter(pl.col("job_id").is_not_null()).join(jobs, on="job_id", suffix="_job")
    assert seen.height == telemetry["job_id"].count()
    end = pl.col("end_time").fill_null(START + timedelta(days=9))
    slack = timedelta(seconds=5)  # physics looks at jobs every five seconds
    assert seen.filter((pl.col("ts") < pl.col("start_time")) | (pl.col("ts") > end + slack)).is_empty()
    assert seen.filter(~pl.col("node_list").str.split(",").list.contains(pl.col("node"))).is_empty()
    each = seen.group_by("job_id", "ts").agg(pl.len(), pl.first("gpus"))
    assert (each["len"] <= each["gpus"]).all()
    assert (each["len"] == each["gpus"]).mean() > 0.95  # type: ignore[operator]


def test_what_is_true_shows_in_the_samples(telemetry: pl.DataFrame, truth: pl.DataFrame) -> None:
    come = truth.filter(pl.col("onset").is_not_null())
    assert set(come["class"]) == {"thermal_throttle", "nvlink_saturation", "memory_exhaustion"}
    assert 0.2 < come.unique("event")["is_step"].mean() < 0.65  # type: ignore[operator]
    joined = telemetry.join(come, on="gpu_uuid", suffix="_truth").with_columns(
        after=(pl.col("ts") - pl.col("onset")).dt.total_milliseconds() / 1e3,
        left=(pl.col("clear") - pl.col("ts")).dt.total_milliseconds() / 1e3,
        free=pl.col("fb_total_bytes") - pl.col("fb_reserved_bytes") - pl.col("fb_used_bytes"),
        fill=pl.col("nvlink_tx_bytes_per_s") / (0.83 * 450e9),
    )
    set_now = joined.filter(pl.col("after") >= TICK_S, (pl.col("left") >= TICK_S) | pl.col("left").is_null())
    heat = set_now.filter(pl.col("class") == "thermal_throttle")
    assert heat.height > 20
    assert heat["is_thermal_slowdown"].mean() > 0.97  # type: ignore[operator]
    full = set_now.filter(pl.col("class") == "nvlink_saturation", pl.col("mode") == "collective")
    assert (full["fill"] > 0.9).mean() > 0.85  # type: ignore[operator]  # checkpoints pause it
    dry = set_now.filter(pl.col("class") == "memory_exhaustion")
    assert (dry["free"] < 2**30).all()
    # Ramps are seen coming, steps are not.
    before = joined.filter(pl.col("after").is_between(-35, -15))
    ramps = before.filter(~pl.col("is_step"), pl.col("ts") > pl.col("ramp_start"))
    assert ramps.filter(pl.col("class") == "thermal_throttle")["gpu_temp_margin_c"].median() < 14  # type: ignore[operator]
    quiet = before.filter(pl.col("is_step"), pl.col("mode") == "voltage_regulator")
    assert (quiet["gpu_temp_margin_c"] > 10).mean() > 0.9  # type: ignore[operator]


def test_labels_and_ground_truth_are_the_same_events(
    folder: Path, telemetry: pl.DataFrame, truth: pl.DataFrame
) -> None:
    labels = label_bottlenecks(telemetry, pl.read_parquet(folder / "jobs.parquet"), BOOK)
    come = truth.filter(pl.col("onset").is_not_null()).with_columns(
        pl.col("clear").fill_null(START + timedelta(hours=6)), bottleneck_class=pl.col("class")
    )
    met = labels.join(come, on=["gpu_uuid", "bottleneck_class"], suffix="_truth")
    slack = timedelta(seconds=2 * TICK_S)
    inside = met.filter(
        pl.col("onset_time") >= pl.col("onset") - slack, pl.col("onset_time") <= pl.col("clear") + slack
    )
    strays = labels.join(inside, on=["gpu_uuid", "bottleneck_class", "onset_time"], how="anti")
    # A GPU that heat or lame links hold down lags behind its gang as well: the truth names the cause alone.
    slowed = (
        strays.filter(pl.col("bottleneck_class") == "straggler")
        .join(come, on="gpu_uuid")
        .filter(pl.col("onset_time").is_between(pl.col("onset"), pl.col("clear") + slack))
    )
    strays = strays.join(slowed, on=["gpu_uuid", "bottleneck_class", "onset_time"], how="anti")
    assert strays.is_empty(), strays
    found = inside["id"].n_unique()
    # A few leaks kill their job before a second sample could show them.
    assert found >= 0.85 * come.height, f"{found} of {come.height}"
    # A ramp of half an hour stays within the noise of its limit for a share of its length.
    ramp_s = (pl.col("onset") - pl.col("ramp_start")).dt.total_seconds()
    prompt = inside.filter((pl.col("onset_time") - pl.col("onset")).dt.total_seconds() <= 2.5 * TICK_S + 0.05 * ramp_s)
    assert prompt["id"].n_unique() >= 0.9 * found


def test_a_healthy_cluster_at_full_speed_sets_no_label(tmp_path: Path) -> None:
    """A week's working days and nights, in pieces: an hour and a half of each of seven days."""
    for day in range(7):
        world = SimulatedCluster(6, 20 + day, START + timedelta(days=day - 1), 15, fault_scale=0)
        world.advance_jobs(START + timedelta(days=day, hours=3 * day))
        write_history(world, tmp_path, world.now + timedelta(hours=1.5))
        samples = pl.read_parquet(tmp_path / "telemetry.parquet")
        assert samples["job_id"].count() > 0.2 * samples.height
        labels = label_bottlenecks(samples, pl.read_parquet(tmp_path / "jobs.parquet"), BOOK)
        assert labels.is_empty(), labels
        assert world.truth == []
        assert not samples["is_thermal_slowdown"].any()
        assert (samples["gpu_temp_margin_c"].min() or 0) > 2  # type: ignore[operator]


def test_lookalikes_set_no_label(folder: Path, telemetry: pl.DataFrame) -> None:
    rows = [msgspec.json.decode(line) for line in (folder / "lookalikes.jsonl").read_bytes().splitlines()]
    assert {row["class"] for row in rows} == {"thermal_throttle", "nvlink_saturation", "memory_exhaustion"}
    assert all(row["onset"] is None for row in rows)


def test_sacct_text_says_what_the_jobs_file_says(folder: Path) -> None:
    jobs = pl.read_parquet(folder / "jobs.parquet").sort("job_id")
    read, warnings = parse_sacct((folder / "sacct.txt").read_text(), "sim", START)
    assert warnings == []
    same = ["job_id", "user", "account", "queue", "gpus", "nodes", "time_limit_s", "state", "node_list"]
    assert read.sort("job_id").select(same).equals(jobs.select(same))
    assert (read.sort("job_id")["start_time"] - jobs["start_time"]).dt.total_seconds().fill_null(0).abs().max() == 0
    inventory = pl.read_csv(folder / "inventory.csv")
    assert inventory.columns[:5] == ["node", "rack", "pod", "gpu_model", "gpus"]
    assert inventory["rack"].n_unique() == 3

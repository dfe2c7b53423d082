"""Forecasters of nodes, ports and queues: learned, handed over by themselves, and made again from what was kept."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.history import SampleHistory
from features.thresholds import ThresholdBook
from features.unit_history import UnitHistory
from models.bottleneck import HazardForecaster
from models.onsets import course, sample_rows
from models.registry import Registry
from models.training_hardware import train_bottleneck, train_bottleneck_again
from models.trend import HORIZONS_S, TrendForecaster
from models.unit_training import known_occupancy, unit_histories

START = datetime(2026, 11, 4, tzinfo=UTC)
BOOK = ThresholdBook(default_model="NVIDIA H100 80GB HBM3")
HOURS, NODES = 8, 20


def leaking_nodes(seed: int = 2) -> pl.DataFrame:
    """Nodes whose host memory leaks again and again: one time in three to the end, else to well above it."""
    rng = np.random.default_rng(seed)
    seconds = np.arange(0, HOURS * 3600, 15.0)
    ts = pl.Series(seconds * 1e6).cast(pl.Int64).cast(pl.Duration("us")) + pl.lit(START)
    parts = []
    for node in range(NODES):
        free = 0.6 + rng.normal(0, 0.004, len(seconds))
        start = rng.uniform(600, 3_000)
        while start < seconds[-1]:
            pace, floor = rng.uniform(0.0015, 0.005), rng.choice([0.15, 0.15, 0.005])
            hold = start + (0.6 - floor) / pace + rng.uniform(60, 200)
            fallen = np.clip((seconds - start) * pace, 0, 0.6 - floor) * (seconds >= start) * (seconds < hold)
            free = free - fallen
            start = hold + rng.uniform(900, 3_000)
        available = np.clip(free, 0, 1) * 1e12
        rows = pl.DataFrame({"node": f"n{node}", "host_mem_available_bytes": available, "host_mem_total_bytes": 1e12})
        parts.append(rows.with_columns(pl.select(ts=ts).to_series()))
    return pl.concat(parts)


@pytest.fixture(scope="module")
def nodes() -> pl.DataFrame:
    return leaking_nodes()


@pytest.fixture(scope="module")
def samples() -> pl.DataFrame:
    """One idle GPU: bottlenecks are trained from samples, and there is nothing to learn from these."""
    ts = [START + timedelta(seconds=60 * i) for i in range(HOURS * 60)]
    return pl.DataFrame({"ts": ts, "node": "n0", "gpu_uuid": "GPU-0", "gpu_temp_c": 40.0})


def test_a_class_of_nodes_is_learned_handed_over_and_made_again(nodes, samples, tmp_path):
    moment = START + timedelta(hours=HOURS)
    inventory = pl.DataFrame({"node": ["n0"], "gpu_model": ["NVIDIA H100 80GB HBM3"]})
    later = nodes.filter(pl.col("ts") > moment - timedelta(hours=1)).with_columns(
        pl.col("ts") + timedelta(hours=1), pl.lit(0.0).alias("host_mem_available_bytes")
    )
    reports = {}
    for name, rows in (("a", nodes), ("b", pl.concat([nodes, later]))):
        reports[name] = train_bottleneck(
            samples, None, inventory, Registry(tmp_path / name), moment, cluster="c", seed=3, node_samples=rows
        )
    report = reports["a"]
    assert report.promoted, report.reason
    assert report.facts["classes"] == ["host_memory"]
    loaded = Registry(tmp_path / "a").load("bottleneck", report.version)
    assert loaded.files == Registry(tmp_path / "b").load("bottleneck", reports["b"].version).files  # never ahead
    assert train_bottleneck_again(Registry(tmp_path / "a"), report.version).to_files() == dict(loaded.files)
    metrics = {metric for metric in report.scores["metric"].to_list() if metric.startswith("host_memory.")}
    assert {"host_memory.brier_skill_120s", "host_memory.recall_120s", "host_memory.lead_s"} <= metrics
    skill = report.scores.filter(pl.col("metric") == "host_memory.brier_skill_120s")["value"][0]
    assert 0.05 < skill < 0.95
    assert loaded.card["onsets"]["host_memory"] > 20


def test_classes_that_were_not_learned_stay_with_the_trend(nodes):
    history = UnitHistory("host_memory", nodes.filter(pl.col("node").is_in(["n0", "n1"])), BOOK)
    of = course(history, "host_memory", BOOK)
    rows = sample_rows(history, of, history.ts.min(), history.ts.max(), seed=1, max_quiet=500)
    nothing = HazardForecaster({}, {}, "v1")
    p = nothing.forecast(rows.block)
    np.testing.assert_array_equal(p, TrendForecaster().forecast(rows.block))
    assert (np.diff(p, axis=1) >= 0).all()
    assert nothing.version_of("host_memory") == TrendForecaster.version
    came, known = rows.outcome(HORIZONS_S[-1])
    assert p[known & (came > 0), -1].mean() > 1.5 * p[known & (came == 0), -1].mean()


def test_drained_nodes_are_censored(nodes):
    history = UnitHistory("host_memory", nodes.filter(pl.col("node") == "n0"), BOOK)
    assert len(course(history, "host_memory", BOOK).onset_row)
    away = pl.DataFrame({"node": ["n0"], "start": [START], "end": [START + timedelta(hours=HOURS)]})
    of = course(history, "host_memory", BOOK, away)
    assert not len(of.onset_row)
    assert (of.state == -1).all()


def jobs() -> pl.DataFrame:
    hour = timedelta(hours=1)
    return pl.DataFrame(
        {
            "job_id": ["1", "2", "3"],
            "queue": ["q", "q", "q"],
            "gpus": [8, 16, 8],
            "submit_time": [START, START + hour, START + 3 * hour],
            "start_time": [START, START + 2 * hour, START + 3 * hour],
            "end_time": [START + 2 * hour, START + 5 * hour, None], "eligible_time": [None, None, None],
        },
        schema_overrides={"eligible_time": pl.Datetime("us", "UTC")},
    )  # fmt: skip


def test_queues_are_rebuilt_by_what_was_known():
    known = known_occupancy(jobs(), 16, START + timedelta(hours=1, minutes=30))
    assert known["ts"].min() == START
    last = known.sort("ts").tail(1).row(0, named=True)
    assert (last["pending_gpu_num"], last["running_gpu_num"], last["idle_gpu_num"]) == (16, 8, 8)
    whole = known_occupancy(jobs(), 16, START + timedelta(hours=4)).filter(pl.col("ts") < known["ts"].max())
    assert whole.equals(known.filter(pl.col("ts") < known["ts"].max()))
    assert known_occupancy(jobs(), 16, START - timedelta(hours=1)).is_empty()


def test_only_what_is_known_has_a_history(nodes, samples):
    gpus = SampleHistory(samples, BOOK)
    at = START + timedelta(hours=HOURS)
    assert unit_histories(gpus, BOOK, at) == {}
    silent = nodes.with_columns(pl.lit(None, dtype=pl.Float64).alias(name) for name in nodes.columns if "mem" in name)
    assert unit_histories(gpus, BOOK, at, node_samples=silent, port_samples=silent.select("ts", "node")) == {}
    inventory = pl.DataFrame({"node": ["n0"], "gpus": [16]})
    found = unit_histories(gpus, BOOK, at, node_samples=nodes[:100], jobs=jobs(), nodes=inventory)
    assert sorted(found) == ["host_memory", "shortage"]
    assert (found["shortage"].state == 1).sum() > 50


def test_the_trend_knows_a_leak_from_a_job_that_begins():
    ts = [START + timedelta(seconds=15 * i) for i in range(60)]
    at_s = np.array([ts[-1].timestamp() + 1.0])
    leak = np.where(np.arange(60) < 40, 0.6, 0.6 - (np.arange(60) - 40) * 0.028)
    begun = np.where(np.arange(60) < 57, 0.95, 0.45)  # a job has filled half of the host within a sample
    said = {}
    for name, free in (("leak", leak), ("begun", begun)):
        rows = pl.DataFrame({"ts": ts, "node": name, "host_mem_available_bytes": free, "host_mem_total_bytes": 1.0})
        history = UnitHistory("host_memory", rows, BOOK)
        said[name] = TrendForecaster().forecast(history.features(np.zeros(1, np.int64), at_s, "host_memory"))[0, -1]
    assert said["leak"] > 0.5
    assert said["begun"] <= 0.05

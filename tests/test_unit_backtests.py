"""Backtests of nodes that run out of memory and of ports that congest: forecast on any file, or told what it lacks."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from models import unit_onset_backtest
from models.onset_backtest import OnsetBacktestError
from models.unit_onset_backtest import backtest_units
from weatherglass import cli

START = datetime(2026, 11, 4, tzinfo=UTC)
HOURS, UNITS, EVERY_S = 6, 8, 15.0


def ramps(seed: int, *, ends: tuple[float, ...]) -> tuple[pl.Series, list[np.ndarray]]:
    """Times, and how far each thing is on its way: ramps of minutes up to one of the ends, which is held and left."""
    rng = np.random.default_rng(seed)
    seconds = np.arange(0, HOURS * 3600, EVERY_S)
    ts = pl.Series("ts", [START + timedelta(seconds=s) for s in seconds.tolist()])
    way = []
    for _ in range(UNITS):
        mine, start = np.zeros(len(seconds)), rng.uniform(600, 3_000)
        while start < seconds[-1]:
            pace, end = rng.uniform(1 / 400, 1 / 150), rng.choice(ends)
            hold = start + end / pace + rng.uniform(60, 200)
            mine += np.clip((seconds - start) * pace, 0, end) * (seconds >= start) * (seconds < hold)
            start = hold + rng.uniform(900, 3_000)
        way.append(mine + rng.normal(0, 0.01, len(seconds)))
    return ts, way


@pytest.fixture(scope="module")
def nodes() -> pl.DataFrame:
    ts, way = ramps(2, ends=(0.75, 0.75, 1.0))
    return pl.concat(
        pl.DataFrame(
            {"ts": ts, "cluster": "c", "node": f"n{i}", "host_mem_total_bytes": 1e12,
             "host_mem_available_bytes": np.clip(0.6 - 0.6 * mine, 0, 1) * 1e12}
        )
        for i, mine in enumerate(way)
    )  # fmt: skip


@pytest.fixture(scope="module")
def ports() -> pl.DataFrame:
    ts, way = ramps(3, ends=(0.6, 0.6, 1.2))
    return pl.concat(
        pl.DataFrame(
            {"ts": ts, "cluster": "c", "node": f"n{i // 2}", "device": f"Ethernet1/{i % 2}", "port": 1,
             "tx_bytes_per_s": 20e9, "ecn_marked_per_s": np.maximum(100 + 1_000 * mine, 0)}
        )
        for i, mine in enumerate(way)
    )  # fmt: skip


def test_nodes_that_leak_are_foreseen(nodes):
    report = backtest_units(nodes, "host_memory")
    rows = report.predictions
    assert rows.columns == ["ts", "cluster", "node", "gpu_uuid", "horizon_s", "p_onset"]
    assert set(rows["node"]) <= set(nodes["node"])
    assert sorted(rows["horizon_s"].unique()) == [30.0, 60.0, 90.0, 120.0]
    assert rows["ts"].min() >= report.start == START + timedelta(hours=0.7 * HOURS, seconds=-0.7 * EVERY_S)
    assert report.train_end is not None
    assert report.start - report.train_end >= timedelta(seconds=120 + 600)
    assert (report.unit, report.units) == ("node", UNITS)
    assert report.onsets > 5
    assert report.value("average_precision_120s") > 2 * report.value("base_rate_120s")
    assert report.value("brier_60s") < 0.8 * report.value("brier_60s", "recent_rate")
    assert {"trend", "persistence", "recent_rate", "predict_linear", "level_threshold"} <= {
        score.baseline for score in report.scores
    }
    shuffled = nodes.sample(fraction=1.0, shuffle=True, seed=1)
    assert backtest_units(shuffled, "host_memory").predictions.equals(rows)


def test_what_teaches_ends_before_the_gap(nodes, monkeypatch):
    seen = []
    real = unit_onset_backtest.backtest_course
    monkeypatch.setattr(
        unit_onset_backtest, "backtest_course", lambda *of, **more: (seen.append(of), real(*of, **more))[1]
    )
    report = backtest_units(nodes.filter(pl.col("node") < "n6"), "host_memory")
    ((judging, learning),) = seen
    assert report.train_end is not None
    until = report.train_end.timestamp()
    assert until - 2 * EVERY_S < learning[0].ts.max() < until < judging[0].ts.max()


def test_ports_that_mark_more_and_more_are_foreseen(ports):
    report = backtest_units(ports, "fabric_congestion")
    rows = report.predictions
    assert rows.columns == ["ts", "cluster", "node", "gpu_uuid", "horizon_s", "p_onset", "device", "port"]
    pairs = set(ports.select("node", "device").unique().iter_rows())
    assert set(rows.select("node", "device").iter_rows()) <= pairs
    assert rows["port"].unique().to_list() == ["1"]
    assert report.unit == "port"
    assert report.onsets > 5
    assert report.value("average_precision_120s") > 2 * report.value("base_rate_120s")
    assert report.value("brier_60s") < 0.8 * report.value("brier_60s", "recent_rate")
    assert any("signs alone count" in note for note in report.notes)
    # A port of its own in each node needs no name.
    alone = ports.filter(pl.col("device") == "Ethernet1/0").drop("device", "port")
    assert backtest_units(alone, "fabric_congestion").predictions["device"].is_null().all()


@pytest.mark.parametrize("column", ["ts", "node", "host_mem_available_bytes", "host_mem_total_bytes"])
def test_nodes_say_what_a_file_lacks(nodes, column):
    with pytest.raises(OnsetBacktestError, match=rf"(need|lacks) {column}\b"):
        backtest_units(nodes.drop(column), "host_memory")
    empty = nodes.with_columns(pl.lit(None).alias(column))
    with pytest.raises(OnsetBacktestError, match=rf"(need|lacks) {column}\b"):
        backtest_units(empty, "host_memory")


@pytest.mark.parametrize("column", ["ts", "node", "device"])
def test_ports_say_what_a_file_lacks(ports, column):
    with pytest.raises(OnsetBacktestError, match=rf"(need|lacks) {column}\b"):
        backtest_units(ports.drop(column), "fabric_congestion")


def test_a_file_that_tells_of_no_congestion_says_what_would(ports):
    silent = ports.drop("ecn_marked_per_s")
    with pytest.raises(OnsetBacktestError, match="this file lacks speed_bytes_per_s, it has: ts, cluster, node"):
        backtest_units(silent, "fabric_congestion")
    with pytest.raises(OnsetBacktestError, match=r"told by ecn_marked_per_s, or cnp_per_s, .* lacks them all"):
        backtest_units(silent.drop("tx_bytes_per_s"), "fabric_congestion")
    with pytest.raises(OnsetBacktestError, match="0 onsets of fabric_congestion to learn from"):
        backtest_units(silent.with_columns(pl.lit(0.0).alias("cnp_per_s")), "fabric_congestion")
    with pytest.raises(OnsetBacktestError, match="ts is String, not a time"):
        backtest_units(ports.with_columns(pl.lit("soon").alias("ts")), "fabric_congestion")
    with pytest.raises(OnsetBacktestError, match="no class 'shortage' of nodes or ports; classes: host_memory, fabric"):
        backtest_units(ports, "shortage")


def test_a_run_over_a_csv_of_nodes_writes_three_files(nodes, tmp_path):
    nodes.write_csv(tmp_path / "nodes.csv")
    options = ["backtest", "bottleneck", "--telemetry", str(tmp_path / "nodes.csv"), "--class", "host_memory"]
    said = CliRunner().invoke(cli, [*options, "--out", str(tmp_path / "o")])
    assert said.exit_code == 0, said.output
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"predictions.parquet", "report.json", "report.html"}
    assert "Host memory running out" in (tmp_path / "o" / "report.html").read_text()
    said = CliRunner().invoke(cli, [*options, "--gpu-model", "X", "--out", str(tmp_path / "o")])
    assert "--gpu-model does not go with backtest bottleneck --class host_memory" in said.output.replace("\n", " ")

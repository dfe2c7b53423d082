"""Idle forecasts: nothing later is known, quantiles and probabilities agree, and the backtest is told at the CLI."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

import weatherglass
from features.idle import IdleHistory
from models import idle
from models.idle import QUANTILES, IdleForecaster, IdleModelError, levels_of
from pipelines.compose import CommandError
from pipelines.idle import print_idle
from pipelines.settings import parse_settings
from tests.pipelines_world import START as WORLD_START
from tests.pipelines_world import job, jobs_frame
from tests.store_child import open_store
from tests.windows_frames import node_frame

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTES = 4 * 1_440


def occupancy(rows: dict[str, list[int | None]], size: int = 32) -> pl.DataFrame:
    parts = [
        pl.DataFrame(
            {
                "ts": [START + timedelta(minutes=i) for i in range(len(values))], "queue": queue, "cluster": "c",
                "idle_gpu_num": values, "running_gpu_num": [None if v is None else size - v for v in values],
                "pending_gpu_num": 0,
            }
        )
        for queue, values in rows.items()
    ]  # fmt: skip
    return pl.concat(parts)


@pytest.fixture(scope="module")
def record() -> pl.DataFrame:
    """A queue whose nodes are taken each hour for 20 minutes, one taken at random, and one that is never touched."""
    rng = np.random.default_rng(1)
    hourly = [4 if m % 60 < 20 else 24 for m in range(MINUTES)]
    busy, out = 0, []
    for _ in range(MINUTES):
        busy = 24 if rng.random() < 0.008 else 0 if rng.random() < 0.02 else busy
        out.append(32 - busy)
    return occupancy({"hourly": hourly, "random": out, "still": [16] * MINUTES})


@pytest.fixture(scope="module")
def fitted(record, module_monkeypatch) -> tuple[IdleHistory, IdleForecaster]:
    module_monkeypatch.setattr(idle, "ROUNDS", 200)
    history = IdleHistory(record)
    return history, IdleForecaster.fit(history, 3 * 1_440)


@pytest.fixture(scope="module")
def module_monkeypatch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_the_least_of_a_window_excludes_now_and_is_unknown_over_a_silence():
    values: list[int | None] = [5, 9, 8, 7, 9, 9, *[None] * 9, 3, 3, 3]
    history = IdleHistory(occupancy({"q": values}))
    least = history.least(2)[0]
    assert least[:4].tolist() == [8.0, 7.0, 7.0, 9.0]
    assert np.isnan(least[5:13]).all(), "a count that is null for minutes is not known"
    assert least[14] == 3.0
    assert np.isnan(least[-2:]).all(), "the window is not over"


def test_features_know_nothing_later_than_their_moment(record):
    at = 2 * 1_440 + 33
    cut = record.filter(pl.col("ts") <= START + timedelta(minutes=at))
    rows = (np.array([0, 1, 2]), np.array([at] * 3), np.array([4, 8, 16]))
    whole, early = (IdleHistory(frame).matrix(*rows, 30) for frame in (record, cut))
    np.testing.assert_array_equal(whole, early)


def test_a_fit_looks_at_no_outcome_after_its_moment(record, fitted):
    _, model = fitted
    other = record.with_columns(
        pl.when(pl.col("ts") > START + timedelta(days=3)).then(0).otherwise("idle_gpu_num").alias("idle_gpu_num")
    )
    again = IdleForecaster.fit(IdleHistory(other), 3 * 1_440)
    assert [tree.model_to_string() for tree in again.boosters] == [tree.model_to_string() for tree in model.boosters]


def test_probability_and_quantiles_tell_apart_who_is_about_to_lose_nodes(fitted):
    history, model = fitted
    at = 3 * 1_440 + np.array([25, 50])  # of the hour: 30 minutes reach the taking at 60 from the second alone
    stays = model.stays(history, np.zeros(2, dtype=int), at, np.full(2, 8))
    assert stays[0, 0] > 0.9 > 0.1 > stays[1, 0]
    assert (stays[:, 1] <= stays[:, 0]).all()
    quantiles = model.quantiles(history, np.array([0, 0, 2]), np.append(at, at[0]))
    assert quantiles[0, 0, QUANTILES.index(0.5)] == 24
    assert quantiles[1, 0, QUANTILES.index(0.5)] == 4
    assert (np.diff(quantiles, axis=-1) >= 0).all()
    assert (np.diff(quantiles, axis=1) <= 0).all()
    assert quantiles[2, 0, QUANTILES.index(0.1)] == 16
    assert model.stays(history, np.array([0]), np.array([3 * 1_440 + 5]), np.array([8])).tolist() == [[0.0, 0.0]]


def test_too_little_to_learn_from_is_said(record):
    with pytest.raises(IdleModelError, match="give a longer record"):
        IdleForecaster.fit(IdleHistory(record.filter(pl.col("queue") == "still")), 2_000)


def test_levels_are_those_that_are_idle():
    row, level = levels_of(np.array([0.0, 3.0, np.nan, 20.0]))
    assert level[row == 1].tolist() == [1, 2, 3]
    assert set(row.tolist()) == {1, 3}
    assert {8, 20, 19, 5} <= set(level[row == 3].tolist())


def test_the_command_writes_figures_beside_rules_of_thumb(record, tmp_path, monkeypatch):
    monkeypatch.setattr(idle, "ROUNDS", 30)
    path = tmp_path / "queues.parquet"
    record.write_parquet(path)
    done = CliRunner().invoke(
        weatherglass.cli,
        ["backtest", "idle", "--occupancy", str(path), "--out", str(tmp_path / "out"), "--refit-days", "2"],
    )
    assert done.exit_code == 0, done.output
    assert "offered windows that broke" in done.output
    rows = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    assert rows["q05"].le(rows["q95"]).all()
    assert rows["p_8_stay"].is_between(0, 1).all()
    assert (tmp_path / "out" / "report.html").read_text().count("least of 15 min") >= 1
    wrong = CliRunner().invoke(weatherglass.cli, ["backtest", "idle", "--occupancy", str(path), "--nodes", "3",
                                                  "--out", str(tmp_path / "no")])  # fmt: skip
    assert wrong.exit_code == 2
    assert "--nodes does not go with backtest idle" in wrong.output


def test_a_cluster_is_forecast_from_its_jobs_and_told_in_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(idle, "ROUNDS", 100)
    settings = parse_settings({"state_dir": str(tmp_path / "state"), "clusters": {"alpha": {}}}, {})
    rng = np.random.default_rng(2)
    # Every hour 24 of 32 GPUs are taken for 20 minutes; a small job comes and goes at random.
    rows = [job(f"h{i}", 3600 * i - 60, 3600 * i, 3600 * i + 1200, gpus=24) for i in range(24 * 5)]
    rows += [job(f"s{i}", t, t, t + 600, gpus=1) for i, t in enumerate(rng.integers(0, 5 * 86_400, 100).tolist())]
    nodes = node_frame(["idle"] * 4).with_columns(pl.lit(WORLD_START).alias("observed_at"))
    with open_store(settings.state / "store") as store:
        store.transact(lambda w: w.upsert("core_jobs", jobs_frame(rows)), purpose="test")
        store.transact(lambda w: w.upsert("core_nodes", nodes), purpose="test")
    now = WORLD_START + timedelta(days=4, minutes=23)  # the next taking is 37 minutes away
    print_idle(settings, "alpha", 8, now, as_json=True)
    near, far = json.loads(capsys.readouterr().out)["alpha"]
    assert near["idle_gpus"] >= 30
    assert near["p_stay"] > 0.8
    # 8 of 32 are left when 24 are taken: 8 stay unless a small job is there too.
    assert far["q50"] <= 8 < near["q50"]
    print_idle(settings, "alpha", 16, now, as_json=False)
    said = capsys.readouterr().out
    assert "GPUs are idle now" in said
    assert "16 stay idle with probability 0." in said
    with pytest.raises(
        CommandError, match=r"alpha: idle GPUs are not forecast: jobs of 1.\d days are known, 2 are needed"
    ):
        print_idle(settings, "alpha", 8, WORLD_START + timedelta(days=1, hours=6), as_json=False)

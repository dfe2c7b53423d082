"""What makes live forecasts fast changes no number: compiled loops against plain ones, one thread against two."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features import compiled
from features.job_history import JobHistory
from features.vocabulary import QUANTILE_COLUMNS
from models.curves import CENTRE_GAINS, LEVELS, MEDIAN, level_of, pool_points
from models.failure import FailureForecaster
from models.forest import Forest, ForestSize
from models.live import Champions, forecast_jobs, forecast_runtimes
from models.registry import Registry
from models.runtime import RuntimeForecaster
from models.wait import WaitForecaster

START = datetime(2026, 3, 1, tzinfo=UTC)
SMALL = ForestSize(trees=12, min_leaf=5, rows_per_tree=400)


def _samples(seed=0, rows=300):
    """Two components in single precision with many equal values and empty slots, and their weights."""
    pick = np.random.default_rng(seed)
    values = pick.normal(7, 2, (rows, 60)).astype(np.float32)
    values[:, ::3] = np.round(values[:, ::3])
    past = np.round(pick.normal(7, 1, (rows, 5)), 1).astype(np.float32)
    past[pick.random(past.shape) < 0.4] = np.nan
    past[::7] = -np.float32(np.nan)  # its sign is no number either
    past[1::11] *= -1
    return [values, past], [pick.random(rows), pick.random(rows)]


def test_pooled_curves_are_those_of_sorting_each_row():
    parts, weights = _samples()
    top = np.where(np.arange(300) % 3 == 0, 8.0, np.inf)
    made = pool_points(parts, weights, top)
    for i in range(300):
        values = np.concatenate([part[i] for part in parts]).astype(np.float64)
        counts = [max(1, int((~np.isnan(part[i])).sum())) for part in parts]
        share = np.concatenate([np.full(60, weights[0][i] / counts[0]), np.full(5, weights[1][i] / counts[1])])
        share, values = share[~np.isnan(values)], np.minimum(values[~np.isnan(values)], top[i])
        order = np.argsort(values, kind="stable")
        mass = np.cumsum(share[order])
        wanted = [values[order][np.argmax(mass >= level * mass[-1] - 1e-12)] for level in LEVELS]
        assert made.curves[i].tolist() == wanted
        errors = (np.abs(values[:, None] - values) * share).sum(axis=1)
        near = ((np.abs(values[:, None] - values) <= np.log(2.0) + 1e-9) * share).sum(axis=1)
        for k, gain in enumerate(CENTRE_GAINS):
            loss = errors - gain * near
            assert loss[values == made.centres[i, k]].min() == pytest.approx(loss.min(), abs=1e-9)


def test_centres_that_nobody_asks_for_leave_the_rest_as_it_is():
    parts, weights = _samples(1)
    whole, bare = (pool_points(parts, weights, np.full(300, np.inf), gains=gains) for gains in (CENTRE_GAINS, ()))
    assert bare.centres.shape == (300, 0)
    np.testing.assert_array_equal(whole.curves, bare.curves)
    np.testing.assert_array_equal(whole.modes, bare.modes)


def test_levels_are_those_of_whole_arrays():
    pick = np.random.default_rng(2)
    curves = np.sort(np.round(pick.normal(5, 2, (2_000, len(LEVELS))), 1), axis=1)
    values = np.round(pick.normal(5, 3, 2_000), 1)
    values[:50] = curves[:50, MEDIAN] + 5e-10
    below = np.sum(curves < values[:, None] - 1e-9, axis=1)
    upto = np.sum(curves <= values[:, None] + 1e-9, axis=1)
    rows, last = np.arange(2_000), len(LEVELS) - 1
    left, right = np.clip(below - 1, 0, last), np.clip(below, 0, last)
    width = curves[rows, right] - curves[rows, left]
    share = np.divide(values - curves[rows, left], width, out=np.zeros(2_000), where=width > 0)
    level = LEVELS[left] + np.clip(share, 0, 1) * (LEVELS[right] - LEVELS[left])
    level = np.where(upto > below, (LEVELS[right] + LEVELS[np.clip(upto - 1, 0, last)]) / 2, level)
    level = np.where(upto == 0, LEVELS[0] / 2, level)
    level = np.where(below == len(LEVELS), (1 + LEVELS[-1]) / 2, level)
    np.testing.assert_array_equal(level_of(curves, values), level)


def test_leaves_and_paths_are_those_of_walking_each_tree():
    pick = np.random.default_rng(3)
    X = pick.normal(0, 1, (700, 4)).astype(np.float32)
    forest = Forest.fit(X, X[:, 0] + pick.normal(0, 0.1, 700), SMALL, seed=1, threads=1)
    drawn, _, parts = forest.explained(X, np.array([0, 1, 0, 1]), 2)
    again, _, same = forest.explained(X, np.array([0, 1, 0, 1]), 2)  # ranks are kept from the first
    leaves = forest.leaves(X)
    for i in range(0, 700, 70):
        for k, root in enumerate(forest.roots):
            node = root
            while forest.feature[node] >= 0:
                goes_left = X[i, forest.feature[node]] <= forest.threshold[node]
                node = node + 1 if goes_left else root + forest.right[node]
            assert leaves[i, k] == forest.right[node]
    np.testing.assert_array_equal(drawn, forest.samples[leaves].reshape(700, -1))
    np.testing.assert_array_equal(drawn, again)
    np.testing.assert_array_equal(parts, same)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Models of every task, and 1,200 live jobs beside the history they were trained on."""
    count = 3_000
    pick = np.random.default_rng(4)
    submit = np.sort(pick.integers(0, 6 * 86_400, count))
    typical = np.exp(pick.normal(7, 1.2, 12))
    user = pick.integers(0, 12, count)
    start = submit + pick.integers(0, 900, count) * pick.integers(0, 2, count)
    end = start + np.maximum(typical[user] * np.exp(pick.normal(0, 0.4, count)), 1).astype(np.int64)
    at = START + timedelta(seconds=int(submit[1_800]))
    moments = {"submit_time": submit, "start_time": start, "end_time": end}
    jobs = pl.DataFrame({
        "job_id": np.arange(count).astype(str), "user": [f"u{k}" for k in user], "queue": "main", "nodes": 1, "gpus": 8,
        "name": [f"train-{k % 3}" for k in range(count)], "time_limit_s": 86_400,
        "state": pick.choice(["COMPLETED", "FAILED", "TIMEOUT"], count, p=[0.7, 0.2, 0.1]),
        **{name: [START + timedelta(seconds=int(s)) for s in values] for name, values in moments.items()},
    })  # fmt: skip
    waits = pl.int_range(pl.len()) >= 1_800  # the rest was submitted at once, and a third of it has started
    runs = waits & (pl.int_range(pl.len()) % 3 == 0)
    known = jobs.with_columns(
        submit_time=pl.when(waits).then(pl.lit(at - timedelta(seconds=900))).otherwise("submit_time"),
        start_time=pl.when(runs).then(pl.lit(at - timedelta(seconds=600))).when(~waits).then("start_time"),
        end_time=pl.when(~waits & (pl.col("end_time") < at)).then("end_time"),
    ).with_columns(
        state=pl.when(pl.col("end_time").is_not_null()).then("state")
        .when(pl.col("start_time").is_not_null()).then(pl.lit("RUNNING")).otherwise(pl.lit("PENDING"))
    )  # fmt: skip
    registry = Registry(tmp_path_factory.mktemp("registry"))
    for task, model in (
        ("runtime", RuntimeForecaster.fit(known, at, size=SMALL)),
        ("wait", WaitForecaster.fit(known, at, size=SMALL)),
        ("job_failure", FailureForecaster.fit(known, at, rounds=8)),
    ):
        registry.promote(task, registry.save(task, model.to_files(), {"trained_at": at}), "for the test")
    return registry, known, at


def test_threads_change_no_row(world, monkeypatch):
    registry, known, at = world
    history = JobHistory(known)
    two = forecast_jobs(Champions(registry), known, history, at)
    monkeypatch.setattr(compiled, "THREADS", 1)
    one = forecast_jobs(Champions(registry), known, history, at)
    assert two.height > 1_800
    assert set(two["forecast"].unique()) == {"runtime", "remaining", "wait"}
    assert two.filter(pl.col("forecast") != "wait")["reasons"].null_count() == 0
    assert two.equals(one)


def test_a_history_kept_up_to_date_forecasts_as_one_made_anew(world):
    registry, known, at = world
    champions = Champions(registry)
    cut = known.height - 300
    before = known[:cut].with_columns(
        start_time=pl.when(pl.col("state") != "RUNNING").then("start_time"),
        state=pl.col("state").replace("RUNNING", "PENDING"),
    )
    history = JobHistory(before)
    forecast_jobs(champions, before, history, at)
    held = champions.get("runtime")[1]
    history.update(known.filter((pl.col("state") == "RUNNING") | (pl.int_range(pl.len()) >= cut)))
    kept = forecast_jobs(champions, known, history, at)
    assert champions.get("runtime")[1] is held, "models stay in memory"
    assert kept.equals(forecast_jobs(Champions(registry), known, JobHistory(known), at))
    assert not kept.equals(forecast_jobs(champions, before, JobHistory(before), at))


def test_a_job_that_runs_by_a_clock_ahead_of_ours_has_a_time_left(world):
    registry, known, at = world
    running = known.filter(pl.col("state") == "RUNNING").head(3)
    odd = running.with_columns(
        start_time=pl.Series([at + timedelta(seconds=240), None, at], dtype=running.schema["start_time"])
    )
    others = known.filter(~pl.col("job_id").is_in(running["job_id"].to_list()))
    history = JobHistory(pl.concat([others, odd]))
    rows = forecast_jobs(Champions(registry), odd, history, at)
    assert rows["forecast"].to_list() == ["remaining"] * 3
    assert rows.select(QUANTILE_COLUMNS).null_count().sum_horizontal().item() == 0


def test_no_baseline_passes_a_limit_by_rounding(world):
    _, known, at = world
    pending = known.filter(pl.col("state") == "PENDING").with_columns(time_limit_s=3_600)
    rows = forecast_jobs(None, pending, JobHistory(known), at)
    runtimes = rows.filter(pl.col("forecast") == "runtime")
    assert runtimes["model_version"].str.starts_with("baseline:").all()
    assert runtimes["q95_s"].max() == 3_600
    said = forecast_runtimes(None, pending, JobHistory(known), at)[1]
    assert said["q95_s"].max() == 3_600

"""The wait forecaster: from the state of the queue, beside zero, last and same-sized last wait."""

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.job_queue import WAIT_FEATURES, wait_features
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES
from models.curves import LEVELS, MEDIAN
from models.forest import ForestSize
from models.scoring import brier, log_error
from models.wait import (
    BASELINES,
    SOON_COLUMNS,
    SOON_S,
    WaitForecaster,
    baseline_s,
    matrix_of_waits,
    recent_curves,
)  # fmt: skip
from models.wait_leaves import Drawn
from models.wait_looks import LOOKS_S, look_losses
from models.wait_odds import NEAR, StartOdds, odds_upto, with_waiting

SMALL = ForestSize(trees=16)


@pytest.fixture(scope="module")
def kth(traces):
    return pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").sort("submit_time", "job_id")[2_000:7_000]


@pytest.fixture(scope="module")
def fitted(kth):
    at = kth["submit_time"][4_000]
    return WaitForecaster.fit(kth, at, size=SMALL), kth.filter(pl.col("submit_time") > at)


@pytest.mark.traces
def test_beats_its_baselines_at_submit(fitted, kth):
    forecaster, later = fitted
    frame = forecaster.forecast(later, kth)
    actual = JobTable(later).wait_s
    X = wait_features(later, kth).to_numpy()
    model = log_error(frame["q50_s"].to_numpy(), actual).mean()
    for name in BASELINES:
        assert model < log_error(baseline_s(name, X), actual).mean(), name
    for seconds, column in zip(SOON_S, SOON_COLUMNS, strict=True):
        started = actual <= seconds
        climate = started.mean() * (1 - started.mean())
        assert brier(frame[column].to_numpy(), started).mean() < climate


@pytest.mark.traces
def test_quantiles_and_odds_rise(fitted, kth):
    forecaster, later = fitted
    frame = forecaster.forecast(later, kth)
    quantiles, odds = frame.select(QUANTILE_COLUMNS).to_numpy(), frame.select(SOON_COLUMNS).to_numpy()
    assert (np.diff(quantiles, axis=1) >= 0).all()
    assert (quantiles >= 0).all()
    assert (np.diff(odds, axis=1) >= 0).all()
    assert ((odds >= 0) & (odds <= 1)).all()


@pytest.mark.traces
@pytest.mark.parametrize("look_s", [0, 60, 600, 3_600])
def test_odds_and_quantiles_are_of_one_distribution(fitted, kth, look_s):
    forecaster, _ = fitted
    history = JobHistory(kth)
    rows = np.flatnonzero((history.table.wait_s > look_s) | (look_s == 0))[-600:]
    moments = history.table.submit[rows] + look_s * 1_000_000
    for told in (forecaster, WaitForecaster.recent()):
        X = matrix_of_waits(history, rows, moments)
        frame, curves = told.frame(X), told.curves(X)
        for seconds, column in zip(SOON_S, SOON_COLUMNS, strict=True):
            odds = frame[column].to_numpy()
            for level, name in zip(QUANTILES, QUANTILE_COLUMNS, strict=True):
                within = frame[name].to_numpy() <= seconds * (1 + NEAR)
                assert (within == (odds >= level - 1e-9)).all(), (column, name)
            assert ((curves <= np.log(seconds) + NEAR) == (odds[:, None] >= LEVELS - 1e-9)).all()


@pytest.mark.traces
def test_the_longer_it_waits_the_longer_it_is_thought_to_wait(fitted, kth):
    forecaster, later = fitted
    long = later.filter((pl.col("start_time") - pl.col("submit_time")) > timedelta(hours=6))[:60]
    history = JobHistory(kth)
    submit = forecaster.forecast(long, history)["q50_s"].to_numpy()
    later_on = [
        forecaster.forecast(job, history, job["submit_time"][0] + timedelta(hours=2))["q50_s"][0]
        for job in long[:20].iter_slices(1)
    ]
    assert np.median(later_on) > np.median(submit[:20])


@pytest.mark.traces
def test_same_seed_same_files_and_back(fitted, kth):
    forecaster, later = fitted
    at = kth["submit_time"][4_000]
    assert WaitForecaster.fit(kth, at, size=SMALL, threads=2).to_files() == forecaster.to_files()
    assert WaitForecaster.from_files(forecaster.to_files()).forecast(later, kth).equals(forecaster.forecast(later, kth))


@pytest.mark.traces
def test_a_model_of_the_release_before_still_speaks(fitted, kth):
    forecaster, later = fitted
    files = dict(forecaster.to_files())
    del files["wait_odds.txt"]
    described = json.loads(files["wait.json"])
    del described["boosted_classes"], described["trust"]
    files["wait.json"] = json.dumps(described).encode()
    older = WaitForecaster.from_files(files)
    assert older.trees is not None
    assert older.trees.boosted is None
    frame = older.forecast(later[:200], kth)
    assert frame.null_count().sum_horizontal()[0] == 0
    assert not frame.equals(forecaster.forecast(later[:200], kth))


@pytest.mark.traces
def test_looks_in_the_middle_of_waits_are_judged(fitted, kth):
    forecaster, _ = fitted
    history = JobHistory(kth)
    rows = np.arange(4_000, 5_000)
    waits = history.table.wait_s[rows]
    model, last = look_losses(forecaster, history, rows), look_losses("last", history, rows)
    for look_s in LOOKS_S:
        for seconds in SOON_S:
            name = f"brier_{seconds}s_{look_s}s"
            assert (np.isnan(model[name]) == (waits <= look_s)).all()
            assert np.nanmean(model[name]) < np.nanmean(last[name]), name
        name = f"below_q95_{look_s}s"
        assert np.nanmean(model[name]) > 0.85
        assert name not in last
        assert np.nanmean(model[f"mae_log1p_{look_s}s"]) < np.nanmean(last[f"mae_log1p_{look_s}s"])


def test_the_odds_of_a_curve_count_all_that_waited_just_so_long():
    flat = np.where(LEVELS <= 0.5, np.log(60.0), np.log(600.0))
    odds = odds_upto(np.stack([flat, np.zeros(len(LEVELS)), np.full(len(LEVELS), 9.0)]), np.log([60.0, 600.0]))
    assert odds[0].tolist() == pytest.approx([0.5, 0.995])
    assert odds[1].tolist() == pytest.approx([0.995, 0.995])
    assert odds[2].tolist() == pytest.approx([0.005, 0.005])


def test_jobs_that_still_wait_are_thought_to_wait_on():
    curves = np.tile(LEVELS * 10, (3, 1))
    found = with_waiting(
        np.array([0.1, 0.2, 0.9]), np.array([0.15, 0.5, 0.95]), curves, np.array([1.5, 5.0, 20.0]),
        np.random.default_rng(1),
    )  # fmt: skip
    assert found[0] in (pytest.approx(2.0), pytest.approx(9.0))
    assert found[1] == pytest.approx(9.0)  # of those that started only one waited to a higher level
    assert found[2] == 20.0  # beyond its curve, what it has waited


def test_of_jobs_that_still_wait_as_many_count_as_of_those_that_started():
    pick = np.random.default_rng(3)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = []
    for number in range(1_500):
        submit = start + timedelta(minutes=10 * number)
        begin = submit + timedelta(seconds=float(pick.exponential(1_500 if number % 4 else 400_000)))
        rows.append((str(number), f"u{number % 5}", 4, submit, begin, begin + timedelta(minutes=5)))
    names = ["job_id", "user", "cpus", "submit_time", "start_time", "end_time"]
    jobs, now = pl.DataFrame(rows, schema=names, orient="row"), start + timedelta(minutes=15_000)
    shares = []
    for most in (60_000, 400):
        facts = WaitForecaster.fit(jobs, now, size=ForestSize(trees=3), max_labels=most).facts
        assert facts["waiting_rows"] > 10
        shares.append(facts["waiting_rows"] / facts["holdout_rows"])
    assert shares[1] == pytest.approx(shares[0], rel=0.15)


def test_boosted_odds_learn_who_starts_when_and_weigh_what_leaves_hold():
    generator = np.random.default_rng(1)
    X = generator.random((2_000, 3)).astype(np.float32)
    waits = np.log(np.where(X[:, 0] < 0.5, 30.0, 2_000.0))
    boosted = StartOdds.fit(X, waits, np.zeros(2_000), seed=1)
    shares = boosted.shares(np.array([[0.1, 0.5, 0.5], [0.9, 0.5, 0.5]], dtype=np.float32))
    assert shares.sum(axis=1) == pytest.approx(1.0)
    assert shares[0, 1] > 0.8
    assert shares[1, 9] > 0.8
    outcomes = np.tile(np.log([30.0, 30.0, 2_000.0]), (2, 1)).astype(np.float32)
    drawn = Drawn(outcomes, np.ones_like(outcomes), np.zeros_like(outcomes))
    assert drawn.curves()[:, MEDIAN] == pytest.approx(np.log([30.0, 30.0]))
    assert drawn.weighed(shares, 1.0).curves()[:, MEDIAN] == pytest.approx(np.log([30.0, 2_000.0]))
    alone = StartOdds.fit(X[:100], np.zeros(100), np.zeros(100), seed=1)
    assert alone.shares(X[:2])[:, 0].tolist() == [1.0, 1.0]


@pytest.mark.traces
def test_before_any_model_the_newest_waits_speak(kth):
    frame = WaitForecaster.recent().forecast(kth[3_000:3_200], kth)
    assert frame.null_count().sum_horizontal()[0] == 0
    assert (np.diff(frame.select(QUANTILE_COLUMNS).to_numpy(), axis=1) >= 0).all()
    first = WaitForecaster.recent().forecast(kth[:1], kth.clear())
    assert first["q50_s"][0] == 0


def test_recent_waits_become_a_curve_and_baselines_lose_what_was_waited():
    X = np.full((2, len(WAIT_FEATURES)), np.nan, dtype=np.float32)
    for k in range(10):
        X[:, WAIT_FEATURES.index(f"recent_q{5 + 10 * k:02d}")] = np.log(100.0 * (k + 1))
    X[:, WAIT_FEATURES.index("elapsed")] = np.log1p([0, 600])
    X[:, WAIT_FEATURES.index("all_last")] = np.log(1000)
    X[:, WAIT_FEATURES.index("size_last")] = np.log(300)
    curves = np.exp(recent_curves(X))
    assert curves[0, len(curves[0]) // 2] == pytest.approx(550, rel=0.02)
    assert curves[1, len(curves[1]) // 2] == pytest.approx(200, rel=0.3)
    np.testing.assert_allclose(baseline_s("last", X), [1000, 400], rtol=1e-4)
    np.testing.assert_allclose(baseline_s("same_size_last", X), [300, 0], rtol=1e-4)
    assert baseline_s("zero", X).tolist() == [0, 0]
    with pytest.raises(ValueError, match="no baseline 'slurm'; baselines: zero"):
        baseline_s("slurm", X)

"""The wait forecaster: from the state of the queue, beside zero, last and same-sized last wait."""

from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.job_queue import WAIT_FEATURES, wait_features
from features.vocabulary import QUANTILE_COLUMNS
from models.forest import ForestSize
from models.scoring import brier, log_error
from models.wait import BASELINES, SOON_COLUMNS, SOON_S, WaitForecaster, baseline_s, recent_curves

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

"""The failure forecaster: calibrated probabilities, better than the rolling rate, and modest where it is not."""

import numpy as np
import polars as pl
import pytest

from features.job_history import JobTable
from features.jobs import FEATURES, job_features
from models.calibration import reliability
from models.failure import FailureForecaster, labelled, rolling_rate
from models.scoring import auroc, brier

ROUNDS = 60


@pytest.fixture(scope="module")
def atlas(traces):
    return pl.read_parquet(traces / "jobs" / "llnl-atlas-2006.parquet").sort("submit_time", "job_id")[20_000:26_000]


@pytest.fixture(scope="module")
def fitted(atlas):
    at = atlas["submit_time"][4_500]
    later = atlas.filter(pl.col("submit_time") > at)
    return FailureForecaster.fit(atlas, at, rounds=ROUNDS), later, at


@pytest.mark.traces
def test_beats_the_rolling_rate_and_is_calibrated(fitted, atlas):
    forecaster, later, _ = fitted
    assert forecaster.facts["expert"] == "model"
    p = forecaster.forecast(later, atlas)["p_fail"].to_numpy()
    bad = JobTable(later).is_bad
    rate = rolling_rate(job_features(later, atlas).to_numpy())
    assert brier(p, bad).mean() < brier(rate, bad).mean()
    assert auroc(p, bad) > auroc(rate, bad)
    assert ((p > 0) & (p < 1)).all()
    assert abs(p.mean() - bad.mean()) < 0.08
    assert sum(row["count"] for row in reliability(p, bad)) == later.height


@pytest.mark.traces
def test_same_seed_same_model_and_files_bring_it_back(fitted, atlas):
    forecaster, later, at = fitted
    one, two = (FailureForecaster.fit(atlas, at, rounds=10, threads=threads) for threads in (1, 2))
    mine, theirs = (f.forecast(later, atlas)["p_fail"].to_numpy() for f in (one, two))
    np.testing.assert_allclose(theirs, mine, atol=1e-9)
    back = FailureForecaster.from_files(forecaster.to_files())
    assert back.forecast(later, atlas).equals(forecaster.forecast(later, atlas))


def test_rolling_rate_by_hand():
    X = np.full((3, len(FEATURES)), np.nan, dtype=np.float32)
    for group, count in (("all", 100), ("user", 100), ("key", 3)):
        X[0, FEATURES.index(f"{group}_count")] = np.log1p(count)
        X[0, FEATURES.index(f"{group}_bad")] = {"all": 0.5, "user": 0.1, "key": 1.0}[group]
    everyone = (20 * 0.5 + 4 * 0.3) / 24
    user = (20 * 0.1 + 4 * everyone) / 24
    assert rolling_rate(X)[0] == pytest.approx((3 * 1.0 + 4 * user) / 7, rel=1e-5)
    assert rolling_rate(X, narrowest="user")[0] == pytest.approx(user, rel=1e-5)
    assert rolling_rate(X)[1] == pytest.approx(0.3)


@pytest.mark.traces
def test_where_nothing_can_be_learnt_the_rate_speaks(atlas):
    generator = np.random.default_rng(0)
    random = atlas.with_columns(
        state=pl.Series(generator.choice(["COMPLETED", "FAILED"], atlas.height, p=[0.97, 0.03]))
    )
    at = atlas["submit_time"][3_000]
    forecaster = FailureForecaster.fit(random, at, rounds=ROUNDS)
    later = random.filter(pl.col("submit_time") > at)
    p = forecaster.forecast(later, random)["p_fail"].to_numpy()
    assert brier(p, JobTable(later).is_bad).mean() < 0.03 * 0.97 * 1.15


@pytest.mark.traces
def test_jobs_of_one_fate_alone_leave_the_rate_in_charge(atlas):
    forecaster = FailureForecaster.fit(atlas.with_columns(state=pl.lit("COMPLETED")), atlas["submit_time"][3_000])
    assert not forecaster.booster_texts
    assert forecaster.forecast(atlas[3_500:3_600], atlas)["p_fail"].max() < 0.1


def test_cancelled_is_not_failed_and_running_is_not_labelled(traces):
    jobs = pl.read_parquet(traces / "jobs" / "cedar-2021.parquet")
    table = JobTable(jobs)
    states = jobs["state"].to_numpy()
    assert not table.is_bad[states == "CANCELLED"].any()
    assert table.is_bad[np.isin(states, ["FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"])].all()
    running = jobs.with_columns(state=pl.lit("RUNNING"))
    assert not labelled(JobTable(running)).any()

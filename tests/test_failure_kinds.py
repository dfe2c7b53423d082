"""Kinds of bad ends: parts of P(bad end), learnt from bad ends and from the newest of the same key."""

from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.job_outcomes import FAILURE_FEATURES, KINDS, OUTCOMES, failure_matrix, outcome_matrix
from models.failure import FailureForecaster
from models.failure_kinds import KIND_COLUMNS, OTHER, KindShares, kind_of, mixed_shares, rolling_shares
from models.ranking import auroc_interval, ece, ece_floor

TIMEOUT = KIND_COLUMNS.index("p_timeout")


@pytest.fixture(scope="module")
def cedar(traces):
    return pl.read_parquet(traces / "jobs" / "cedar-2021.parquet").sort("submit_time", "job_id")[40_000:46_000]


@pytest.mark.traces
def test_kinds_are_parts_of_the_whole_and_survive_files(cedar):
    at = cedar["submit_time"][4_500]
    forecaster = FailureForecaster.fit(cedar, at, rounds=15)
    later = cedar.filter(pl.col("submit_time") > at)
    found = forecaster.forecast(later, cedar)
    assert found.columns == ["p_fail", *KIND_COLUMNS]
    kinds = found.select(KIND_COLUMNS).to_numpy()
    assert (kinds >= 0).all()
    assert (kinds.sum(axis=1) <= found["p_fail"].to_numpy() + 1e-9).all()
    assert FailureForecaster.from_files(forecaster.to_files()).forecast(later, cedar).equals(found)


@pytest.mark.traces
def test_outcomes_see_nothing_from_the_moment_on(cedar):
    table = JobTable(cedar)
    rows = np.random.default_rng(3).choice(np.arange(2_000, 6_000), 60, replace=False)
    moment = int(table.submit[rows].max())
    jobs = JobTable(cedar[rows])
    before = outcome_matrix(jobs, JobHistory(cedar), np.full(60, moment))
    cut = pl.lit(moment).cast(pl.Datetime("us", "UTC"))
    late = (pl.col("end_time") >= cut) | (pl.col("submit_time") >= cut)
    scrambled = cedar.with_columns(
        end_time=pl.when(late).then(pl.col("end_time") + timedelta(days=3)).otherwise("end_time"),
        start_time=pl.when(pl.col("start_time") >= cut)
        .then(pl.col("start_time") + timedelta(days=2))
        .otherwise("start_time"),
        state=pl.when(late).then(pl.lit("NODE_FAIL")).otherwise("state"),
    )
    np.testing.assert_array_equal(outcome_matrix(jobs, JobHistory(scrambled), np.full(60, moment)), before)


def _jobs(states: list[str], minutes: int = 10) -> pl.DataFrame:
    start = pl.datetime(2026, 1, 1, time_zone="UTC")
    return pl.DataFrame({"state": states}).select(
        job_id=pl.int_range(pl.len()).cast(pl.String), user=pl.lit("u"),
        submit_time=start + pl.duration(minutes=pl.int_range(pl.len()) * minutes),
        start_time=start + pl.duration(minutes=pl.int_range(pl.len()) * minutes + 1),
        end_time=start + pl.duration(minutes=pl.int_range(pl.len()) * minutes + 1),
        time_limit_s=pl.lit(600), state="state",
    )  # fmt: skip


def test_outcomes_by_hand_ends_of_zero_time_among_them():
    jobs = _jobs(["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "FAILED"])
    found = dict(zip(OUTCOMES, outcome_matrix(JobTable(jobs), JobHistory(jobs), JobTable(jobs).submit).T, strict=True))
    assert np.isnan(found["key_bad_1"][0])
    assert found["key_last_bad"][1:].tolist() == [0, 1, 1, 0]
    assert found["key_bad_1"][3] == pytest.approx((1 + 0.5) / 1.75)
    assert found["key_same_run"][1:].tolist() == [1, 1, 2, 1]
    assert found["key_timeouts"][4] == found["key_cancelled"][4] == pytest.approx(0.25)
    assert np.expm1(found["key_ends"]).round().tolist() == [0, 1, 2, 3, 4]
    assert not found["key_runs_now"].any()
    assert not found["key_waits_now"].any()
    rolling = rolling_shares(failure_matrix(JobTable(jobs), JobHistory(jobs), JobTable(jobs).submit))
    assert rolling[4, TIMEOUT] > rolling[2, TIMEOUT] == 0


def test_states_become_kinds():
    table = JobTable(_jobs(["TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "FAILED", "DEADLINE", "COMPLETED"]))
    assert kind_of(table).tolist() == [0, 1, 2, OTHER, 0, OTHER]


def test_shares_are_learnt_where_kinds_differ_and_kept_where_they_are_rare():
    generator = np.random.default_rng(0)
    X = generator.random((800, len(FAILURE_FEATURES))).astype(np.float32)
    kinds = np.where(X[:, 0] > 0.5, 0, OTHER)
    kinds[:3] = 1  # too rare to learn
    X[:, 1:] = 0
    X[:, 1:80] = X[:, :1]
    shares = KindShares.fit(X, kinds, seed=1, threads=1)
    assert shares.learnt == (0, OTHER)
    told = shares.of(X)
    np.testing.assert_allclose(told.sum(axis=1), 1.0)
    assert told[X[:, 0] > 0.6, 0].mean() > 0.8 > 0.2 > told[X[:, 0] < 0.4, 0].mean()
    assert told[:, 1].max() == told[:, 1].min() < 0.01
    alone = KindShares.fit(X, np.full(800, OTHER), seed=1, threads=1)
    assert alone.booster_text is None
    assert (alone.of(X)[:, OTHER] > 0.99).all()
    assert KindShares.fit(X[:0], kinds[:0], seed=1, threads=1).of(X[:2]).sum() == pytest.approx(2)


def test_mixed_shares_lean_on_the_newest_bad_ends_half_and_half():
    X = np.full((2, len(FAILURE_FEATURES)), np.nan, dtype=np.float32)
    for group in ("all", "key"):
        for name, value in (("ends", np.log1p(40)), ("bad_30", 0.5), ("timeouts", 0.5), ("out_of_memories", 0.0)):
            X[0, FAILURE_FEATURES.index(f"ended_{group}_{name}")] = value
    kinds = KindShares(np.array([0.2, 0.1, 0.3, 0.4]), (), None)
    newest = rolling_shares(X)
    mixed = mixed_shares(kinds, X)
    assert newest[0, TIMEOUT] > 0.8
    assert mixed[0, TIMEOUT] == pytest.approx((newest[0, TIMEOUT] + 0.2) / 2)
    assert mixed[0].tolist()[1:] == pytest.approx([0.1, 0.15])  # node failures are not among the newest ends' features
    assert mixed[1].tolist() == pytest.approx([0.1, 0.1, 0.15])
    crowded = mixed_shares(KindShares(np.array([0.5, 0.2, 0.9, 0.0]), (), None), X)
    assert crowded.sum(axis=1).max() <= 1 + 1e-12


def test_auroc_interval_and_ece():
    generator = np.random.default_rng(1)
    p = generator.random(2_000)
    happened = generator.random(2_000) < p
    blocks = np.repeat(np.arange(100), 20)
    area = auroc_interval(p, happened, blocks, draws=200)
    assert area is not None
    assert area.low is not None
    assert area.high is not None
    assert area.low < area.value < area.high
    assert 0.8 < area.low < area.high < 0.87
    assert ece(p, happened) < 0.04
    assert ece(np.full(2_000, 0.9), happened) == pytest.approx(0.9 - happened.mean(), abs=1e-3)
    assert auroc_interval(p, np.zeros(2_000), blocks) is None
    alone = auroc_interval(p, happened, np.zeros(2_000))
    assert alone is not None
    assert alone.low is None


def test_ece_floor_is_what_true_odds_show_when_outcomes_of_a_block_go_together():
    generator = np.random.default_rng(2)
    blocks = np.repeat(np.arange(60), 50)
    p = np.repeat(generator.uniform(0.05, 0.6, 60), 50)
    alone = generator.random(3_000) < p
    together = np.repeat(generator.random(60), 50) < p
    apart, whole = (ece_floor(p, happened, blocks, draws=100) for happened in (alone, together))
    assert apart.value < 0.03
    assert apart.low is not None
    assert apart.high is not None
    assert whole.low is not None
    assert whole.high is not None
    assert apart.low <= ece(p, alone) <= apart.high
    assert whole.value > 3 * apart.value
    assert whole.low <= ece(p, together) <= whole.high
    false = ece_floor(p + 0.35, alone, np.arange(3_000), draws=100)
    assert ece(p + 0.35, alone) > 5 * false.value  # odds that do not hold lie far outside


def test_kinds_cover_the_registry():
    assert [name for name, _ in KINDS] == ["timeout", "node_failure", "out_of_memory"]

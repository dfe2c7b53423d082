"""Odds of jobs that have run for a while: quick failures behind them, the limit before them, never the future."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.job_outcomes import FAILURE_FEATURES, KINDS
from models.failure import FailureForecaster
from models.failure_kinds import KIND_NAMES, OTHER
from models.failure_running import LANDMARKS_S, RunningOdds, survivor_rates

START = datetime(2026, 3, 1, tzinfo=UTC)
TIMEOUT = KIND_NAMES.index("timeout")


def _jobs(rows):
    """One user's jobs of one key, one an hour; rows of (seconds run, state)."""
    times = {"submit_time": [START + timedelta(hours=k) for k in range(len(rows))]}
    times["start_time"] = times["submit_time"]
    times["end_time"] = [t + timedelta(seconds=run) for t, (run, _) in zip(times["start_time"], rows, strict=True)]
    return pl.DataFrame(
        times | {"job_id": [str(k) for k in range(len(rows))], "user": ["u"] * len(rows), "nodes": [1] * len(rows),
                 "time_limit_s": [3_000] * len(rows), "state": [state for _, state in rows]},
        schema_overrides={name: pl.Datetime("us", "UTC") for name in times},
    )  # fmt: skip


def _rates(jobs, at, elapsed_s):
    table = JobTable(jobs[-1:])
    moments = np.array([int(at.timestamp() * 1e6)])
    return survivor_rates(table, JobHistory(jobs), np.array([0]), moments, np.array([float(elapsed_s)]))[0]


def test_rates_count_only_those_that_came_as_far():
    rows = [(30, "FAILED")] * 6 + [(2_000, "COMPLETED")] * 5 + [(3_000, "TIMEOUT")] + [(100, "COMPLETED")]
    jobs = _jobs(rows)
    at = jobs["submit_time"][-1]
    rate = 0.3
    for _ in range(3):  # all, user and key hold the same twelve
        rate = (7 + 4 * rate) / (12 + 4)
    early = _rates(jobs, at, 10)
    assert early[0] == pytest.approx(rate)
    late = _rates(jobs, at, 60)
    assert late[0] < 0.25 < early[0]
    assert late[1 + TIMEOUT] > early[1 + TIMEOUT]
    last = _rates(jobs, at, 2_500)  # one alone came as far
    assert last[1 + TIMEOUT] > late[1 + TIMEOUT]
    assert last[1:].sum() <= last[0]
    assert len(last) == 1 + len(KINDS)


def test_rates_see_nothing_from_the_moment_on():
    rows = [(600, "COMPLETED")] * 8 + [(600, "FAILED")] * 8
    jobs = _jobs(rows)
    at = jobs["submit_time"][8]
    known = _jobs(rows[:8] + [(999, "TIMEOUT")] * 8)
    np.testing.assert_array_equal(_rates(jobs, at, 60), _rates(known, at, 60))
    assert _rates(jobs, jobs["submit_time"][15], 60)[0] > _rates(jobs, at, 60)[0]


@pytest.fixture(scope="module")
def learnt():
    """Half of the jobs of a key that fails fail within two minutes; a tenth of all run into the limit."""
    generator = np.random.default_rng(4)
    n = 2_000
    X = np.zeros((n, 8), dtype=np.float32)
    risky = generator.random(n) < 0.5
    X[:, :3] = risky[:, None]
    ends = np.where(risky & (generator.random(n) < 0.5), OTHER, -1)
    ends[generator.random(n) < 0.1] = TIMEOUT
    run_s = np.where(ends == OTHER, generator.uniform(61, 120, n), generator.uniform(600, 20_000, n))
    run_s[ends == TIMEOUT] = 30_000
    odds = RunningOdds.fit(
        X, ends, run_s, np.full(n, 30_000.0), np.arange(n) // 20, seed=1, threads=1, rounds=30, max_rows=5_000
    )
    return odds, X[[np.argmin(risky), np.argmax(risky)]]


def _told(odds, X, elapsed_s, rates=None):
    n = len(X)
    rates = np.tile([0.3, 0.05, 0.001, 0.01], (n, 1)) if rates is None else rates
    return odds.odds(X, rates, np.full(n, float(elapsed_s)), np.full(n, 30_000.0))


def test_quick_failures_are_behind_and_the_limit_comes_nearer(learnt):
    odds, X = learnt
    assert odds.booster_texts
    first, later, last = (_told(odds, X, elapsed) for elapsed in (60, 600, 14_400))
    assert first[1, 0] > first[0, 0] + 0.05  # the risky key, while its failures are still to come
    assert later[1, 0] < first[1, 0] - 0.05
    assert (last[:, 1 + TIMEOUT] > 1.3 * later[:, 1 + TIMEOUT]).all()
    for found in (first, later, last):
        assert ((found >= 0) & (found <= 1)).all()
        assert (found[:, 1:].sum(axis=1) <= found[:, 0] + 1e-9).all()


def test_past_the_limit_little_but_a_timeout_is_left(learnt):
    odds, X = learnt
    over = _told(odds, X, 30_001)
    assert over[:, 1 + TIMEOUT].min() > 0.9
    assert (over[:, 0] >= over[:, 1:].sum(axis=1) - 1e-12).all()
    never = _told(RunningOdds(), X, 30_001, np.tile([0.2, 0.0, 0.0, 0.0], (2, 1)))
    assert never[:, 1 + TIMEOUT].tolist() == [0, 0]  # where no timeout was ever recorded
    assert never[:, 0].tolist() == pytest.approx([0.2, 0.2])


def test_without_trees_the_rate_of_those_that_came_as_far_speaks():
    X = np.zeros((3, len(FAILURE_FEATURES)), dtype=np.float32)
    rates = np.tile([0.3, 0.1, 0.0, 0.05], (3, 1))
    np.testing.assert_array_equal(_told(RunningOdds(), X, 600, rates), rates)
    few = RunningOdds.fit(
        X, np.array([-1, 3, -1]), np.full(3, 700.0), np.full(3, np.nan), np.arange(3), seed=1, threads=1, rounds=5,
        max_rows=100,
    )  # fmt: skip
    assert not few.booster_texts
    assert LANDMARKS_S[0] == 60


@pytest.mark.traces
def test_files_bring_the_running_odds_back_and_older_files_go_without(traces):
    jobs = pl.read_parquet(traces / "jobs" / "cedar-2021.parquet").sort("submit_time", "job_id")[40_000:46_000]
    fitted = FailureForecaster.fit(jobs, jobs["submit_time"][4_500], rounds=5)
    files = fitted.to_files()
    back = FailureForecaster.from_files(files)
    assert back.running.booster_texts == fitted.running.booster_texts != ()
    np.testing.assert_array_equal(back.running.kinds.shares, fitted.running.kinds.shares)
    old = {name: data for name, data in files.items() if "running" not in name}
    old["job_failure.json"] = old["job_failure.json"].replace(b'"running"', b'"unread"')
    assert FailureForecaster.from_files(old).running.booster_texts == ()

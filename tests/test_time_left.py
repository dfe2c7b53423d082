"""Time left of running jobs: what like jobs had left after as long a run, and that the landmark's history is seen."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.job_survivors import LOOKED_AT, survivors
from features.jobs import feature_matrix
from models.curves import LEVELS, remaining_s
from models.forest import ForestSize
from models.landmarks import ELAPSED_S, Landmark
from models.time_left import LIKE_SHARE, LandmarkForests, remaining_frame, time_left_s

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def job(number, submit_s, run_s, *, user="ada", ended=True):
    start = NOON + timedelta(seconds=submit_s)
    return {
        "job_id": str(number), "user": user, "cpus": 4, "time_limit_s": 7_200, "submit_time": start,
        "start_time": start, "end_time": start + timedelta(seconds=run_s) if ended else None,
    }  # fmt: skip


def frame(*jobs):
    times = {name: pl.Datetime("us", "UTC") for name in ("submit_time", "start_time", "end_time")}
    return pl.DataFrame(list(jobs)).cast(times)


def asked_at(jobs, number, elapsed_s):
    history = JobHistory(jobs)
    table = JobTable(jobs.filter(pl.col("job_id") == str(number)))
    moments = table.start + np.int64(elapsed_s * 1e6)
    return history, table, moments, feature_matrix(table, history, moments)


def left_of(jobs, number, elapsed_s):
    history, table, moments, X = asked_at(jobs, number, elapsed_s)
    return np.exp(survivors(table, history, moments, np.array([float(elapsed_s)]), X))[0]


def test_like_jobs_count_with_what_they_had_left_after_as_long_a_run():
    past = [job(k, 10 * k, run_s) for k, run_s in enumerate((100, 400, 1_000, 100))]
    jobs = frame(*past, job(9, 5_000, 3_000), job(10, 20, 900, user="bob"))
    assert set(left_of(jobs, 9, 60).round(3)) == {40.0, 340.0, 940.0}
    assert set(left_of(jobs, 9, 300).round(3)) == {100.0, 700.0}
    assert np.isnan(left_of(jobs, 9, 1_000)).all()  # nobody ran longer
    assert np.isnan(left_of(jobs, 10, 60)).all()  # bob has no past


def test_jobs_that_end_after_the_submit_count_from_then_on_and_no_sooner():
    jobs = frame(job(1, 0, 500), job(2, 0, 900), job(3, 100, 2_000))
    assert np.isnan(left_of(jobs, 3, 60)).all()
    assert set(left_of(jobs, 3, 410).round(3)) == {90.0}
    assert set(left_of(jobs, 3, 450).round(3)) == {50.0}
    at = Landmark.of(JobHistory(jobs), np.array([0, 1, 2]), 600.0)
    assert at.lasts.tolist() == [False, True, True]
    at_submit = feature_matrix(JobTable(jobs[2]), JobHistory(jobs), JobTable(jobs[2]).submit)
    assert not np.array_equal(at.X[1:], at_submit, equal_nan=True)


def test_only_so_many_of_the_newest_are_looked_at():
    past = [job(k, k, 5_000 if k == 0 else 100) for k in range(LOOKED_AT + 1)]
    late = frame(*past, job("x", 6_000, 3_000))
    assert set(left_of(late, "x", 60).round(3)) >= {40.0}
    assert not np.isnan(left_of(late, "x", 200)).any()  # the one of 5,000 s ended last, so it is among the newest
    swapped = frame(job("o", -9_000, 5_000), *past[1:], job("x", 6_000, 3_000))
    assert np.isnan(left_of(swapped, "x", 200)).all()


def test_like_jobs_move_the_distribution_by_their_share_and_never_past_the_limit():
    curves = np.log(np.linspace(1_000, 3_000, len(LEVELS)))[None, :].repeat(4, axis=0)
    like = np.log(np.array([[50.0] * 10, [np.nan] * 10, [1e6] * 10, [50.0] * 10]))
    elapsed_s, limit_s = np.array([600.0, 600.0, 600.0, 0.0]), np.array([np.nan, 4_000.0, 4_000.0, np.nan])
    left = time_left_s(curves, like, [], elapsed_s, limit_s, (LIKE_SHARE / 2, 0.5, 0.95))
    alone = remaining_s(curves, elapsed_s, limit_s, (LIKE_SHARE / 2, 0.5, 0.95))
    assert left[0, 0] == pytest.approx(50.0)
    assert left[0, 1] < alone[0, 1]
    np.testing.assert_allclose(left[[1, 3]], alone[[1, 3]])  # no like jobs; not begun
    assert left[2, 2] == pytest.approx(3_400.0)
    assert (np.diff(left, axis=1) >= 0).all()


@pytest.fixture(scope="module")
def forests():
    """Jobs of two kinds: short ones of 120 s, and those that, once past them, last for 4,000 s."""
    jobs = frame(*(job(k, 100 * k, 120 if k % 3 else 4_000, user=f"u{k % 5}") for k in range(900)))
    history = JobHistory(jobs)
    return history, LandmarkForests.fit(history, np.arange(900), size=ForestSize(30), seed=1, threads=1)


def test_forests_know_that_what_has_lasted_is_of_the_long_kind(forests):
    history, grown = forests
    at = Landmark.of(history, np.arange(300, 900), 200.0)
    like = np.full((at.table.count, 10), np.nan)
    curves = np.log(np.linspace(110, 500, len(LEVELS)))[None, :].repeat(at.table.count, axis=0)
    elapsed_s = np.full(at.table.count, 200.0)
    drawn = grown.samples(at.X, like, at.table, elapsed_s)
    assert np.median(np.exp(drawn[0])) == pytest.approx(3_800.0)
    left = time_left_s(curves, like, drawn, elapsed_s, at.table.limit_s, (0.5, 0.8))
    alone = remaining_s(curves, elapsed_s, at.table.limit_s, (0.5, 0.8))
    assert (left[:, 1] > 3_700.0).all()
    assert (alone[:, 1] < 500.0).all()


def test_forests_keep_their_bits_through_files_and_say_none_past_a_limit(forests):
    history, grown = forests
    again = LandmarkForests.from_arrays(grown.to_arrays("left_"), "left_")
    at = Landmark.of(history, np.arange(600, 900), 600.0)
    like, elapsed_s = np.full((at.table.count, 10), np.nan), np.full(at.table.count, 600.0)
    for one, two in zip(*(f.samples(at.X, like, at.table, elapsed_s) for f in (grown, again)), strict=True):
        np.testing.assert_array_equal(one, two)
    past = grown.samples(at.X, like, at.table, np.full(at.table.count, 7_300.0))
    assert np.isnan(past[1]).all()
    assert not np.isnan(past[0]).any()
    assert LandmarkForests.from_arrays({}, "left_") is None
    assert LandmarkForests.fit(history, np.arange(20), size=ForestSize(5), seed=1, threads=1) is None


def test_a_frame_of_running_and_waiting_jobs_has_nulls_for_those_that_wait():
    jobs = frame(*(job(k, 10 * k, 700) for k in range(5)), job(7, 2_000, 0, ended=False), job(8, 9_000, 0, ended=False))
    table, history = JobTable(jobs[-2:]), JobHistory(jobs)
    moment = int((NOON + timedelta(seconds=2_100)).timestamp() * 1e6)
    X = feature_matrix(table, history, np.full(2, moment))
    curves = np.log(np.linspace(1_000, 3_000, len(LEVELS)))[None, :].repeat(2, axis=0)
    found = remaining_frame(curves, X, table, history, moment, None)
    assert found["q50_s"].is_null().to_list() == [False, True]
    assert found["q05_s"][0] == pytest.approx(600.0)
    assert max(ELAPSED_S) == 3_600.0


def test_a_median_near_what_a_past_runtime_or_the_limit_leaves_is_that():
    curves = np.log(np.linspace(1_000, 3_000, len(LEVELS)))[None, :].repeat(3, axis=0)
    like, elapsed_s = np.full((3, 10), np.nan), np.full(3, 600.0)
    drawn = [np.log(np.linspace(400, 2_400, 40))[None, :].repeat(3, axis=0).astype(np.float32)]
    limit_s = np.array([np.nan, np.nan, 2_010.0 + 600])
    plain = time_left_s(curves, like, drawn, elapsed_s, np.full(3, np.nan), (0.25, 0.5, 0.75))
    assert plain[0, 1] == pytest.approx(1_400.0, rel=0.02)
    repeats = np.log(np.array([[2_050.0, 9_000.0], [3_000.0, np.nan], [np.nan, np.nan]]))
    left = time_left_s(curves, like, drawn, elapsed_s, limit_s, (0.25, 0.5, 0.75), repeats=repeats)
    assert left[0, 1] == pytest.approx(1_450.0)
    np.testing.assert_allclose(left[1], plain[1])  # 2,400 s is not near
    near = time_left_s(curves, like, drawn, elapsed_s, plain[:, 1] + 601, (0.25, 0.5, 0.75))
    np.testing.assert_allclose(near[:, 1], plain[:, 1] + 1)
    assert (np.diff(left, axis=1) >= 0).all()

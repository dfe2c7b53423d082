"""How far runs go past their limit: learnt from released jobs, spread over the levels that reach it, and no lower."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.jobs import feature_matrix
from models.calibration import Conformal
from models.curves import LEVELS, MEDIAN, cap, pool
from models.forest import ForestSize
from models.grace import MIN_ROWS, NEWEST, Grace
from models.runtime import RuntimeForecaster
from models.time_left import time_left_s

MINUTE = Grace(np.arange(1.0, 60.0))
GRID = np.round(LEVELS, 3)


def test_newest_jobs_that_reached_their_limit_tell_it_and_few_tell_nothing():
    count = NEWEST + 100
    limit_s = np.full(count, 3_600.0)
    runtime_s = limit_s + np.where(np.arange(count) < 100, 5_000.0, 30.0)
    found = Grace.fit(runtime_s, limit_s, np.arange(count))
    assert found.overruns_s.tolist() == [30.0] * NEWEST
    assert Grace.fit(runtime_s[::-1], limit_s, np.arange(count)).overruns_s.max() == 5_000.0
    few = np.where(np.arange(count) < MIN_ROWS - 1, runtime_s, 100.0)
    assert not Grace.fit(few, limit_s, np.arange(count)).is_known
    assert not Grace.fit(runtime_s, np.full(count, np.nan), np.arange(count)).is_known


def test_levels_above_the_median_that_reach_the_limit_go_past_it_as_runs_did():
    """60 of 100 runs are killed within a minute of the limit of an hour; the others end before."""
    samples = np.log(np.concatenate([np.linspace(600, 1_200, 400), np.full(600, 3_600.0)]))[None, :]
    curves = pool([samples.repeat(2, axis=0)], [np.ones(2)])
    limit_s = np.array([3_600.0, np.nan])
    seconds = np.exp(MINUTE.past_limit(curves, limit_s))
    assert (np.diff(seconds, axis=1) >= -1e-9).all()
    np.testing.assert_allclose(seconds[1], np.exp(curves[1]))
    assert seconds[0, MEDIAN] == pytest.approx(3_600.0)
    np.testing.assert_allclose(seconds[0, :MEDIAN], np.exp(curves[0, :MEDIAN]), rtol=1e-6)
    over = seconds[0, MEDIAN + 1 :] - 3_600.0
    np.testing.assert_allclose(over, 60 * (LEVELS[MEDIAN + 1 :] - 0.4) / 0.6, atol=4.0)
    whole = np.exp(MINUTE.past_limit(curves, limit_s, first=0))[0]
    assert whole[MEDIAN] == pytest.approx(3_610.0, abs=4.0)
    np.testing.assert_array_equal(Grace.none().past_limit(curves, limit_s), cap(curves, limit_s))
    never = Grace(np.zeros(50)).past_limit(curves, limit_s)
    assert np.exp(never[0]).max() == pytest.approx(3_600.0)


def test_past_the_limit_the_overruns_that_were_longer_are_left():
    left = MINUTE.left_s(np.array([0.0, 30.0, 90.0]), (0.05, 0.5, 0.95))
    assert left[0] == pytest.approx([3.5, 30.0, 56.5], abs=1.0)
    assert left[1] == pytest.approx([1.5, 15.0, 28.0], abs=1.0)
    assert left[2, 1] == pytest.approx(90.0)  # outlasted all: as long again
    assert (np.diff(left, axis=1) > 0).all()


def test_time_left_ends_with_the_grace_and_is_all_that_is_left_of_a_limit_that_has_passed():
    curves = np.log(np.linspace(3_000, 90_000, len(LEVELS)))[None, :].repeat(4, axis=0)
    like, elapsed_s = np.full((4, 10), np.nan), np.array([600.0, 3_595.0, 3_610.0, 0.0])
    limit_s = np.full(4, 3_600.0)
    left = time_left_s(curves, like, [], elapsed_s, limit_s, (0.05, 0.5, 0.95), MINUTE)
    assert (np.diff(left, axis=1) >= 0).all()
    assert 3_000.0 < left[0, 1] <= 3_060.0
    assert left[1] == pytest.approx([8.0, 35.0, 62.0], abs=4.0)
    assert left[2] == pytest.approx([2.5, 25.0, 47.5], abs=1.0)
    np.testing.assert_allclose(left[3], np.exp(curves[3, np.searchsorted(GRID, (0.05, 0.5, 0.95))]))
    unknown = time_left_s(curves, like, [], elapsed_s, limit_s, (0.05, 0.5, 0.95))
    assert (unknown[:2, 2] <= limit_s[:2] - elapsed_s[:2] + 1e-6).all()
    assert unknown[2, 1] > 3_600.0  # nothing is known of limits that have passed


def killed(count=3_000, *, wait_s=60):
    """Users 0–4 run into their limit and are killed up to a minute later; the others end far before it."""
    generator = np.random.default_rng(0)
    rows, now = [], datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(count):
        now += timedelta(seconds=float(generator.exponential(600)))
        user, limit_s = int(generator.integers(10)), int(generator.choice([3_600, 7_200, 14_400]))
        run_s = limit_s + int(generator.integers(wait_s)) if user < 5 else round(np.exp(generator.normal(5, 0.5)))
        rows.append({
            "job_id": str(number), "user": f"u{user}", "cpus": 8, "time_limit_s": limit_s, "submit_time": now,
            "start_time": now, "end_time": now + timedelta(seconds=run_s),
        })  # fmt: skip
    return pl.DataFrame(rows)


@pytest.fixture(scope="module")
def jobs():
    return killed()


@pytest.fixture(scope="module")
def forecaster(jobs):
    return RuntimeForecaster.fit(jobs, jobs["submit_time"][2_000], size=ForestSize(20))


def test_a_kill_wait_is_inside_the_interval_and_never_in_the_median(forecaster, jobs):
    later = jobs[2_050:]
    frame, table = forecaster.forecast(later, jobs), JobTable(later)
    over, limit_s = table.runtime_s >= table.limit_s, table.limit_s
    assert (frame["q50_s"].to_numpy() <= limit_s).all()
    assert (frame["q50_s"].to_numpy()[over] == limit_s[over]).mean() > 0.9
    q95 = frame["q95_s"].to_numpy()
    assert (q95 <= limit_s + 60).all()
    held = {name: (table.runtime_s <= frame[name].to_numpy() + 0.5)[over].mean() for name in ("q80_s", "q90_s")}
    assert held["q80_s"] == pytest.approx(0.8, abs=0.08)
    assert held["q90_s"] == pytest.approx(0.9, abs=0.08)


def test_the_grace_is_kept_with_the_model_and_older_models_have_none(forecaster, jobs):
    files = forecaster.to_files()
    again = RuntimeForecaster.from_files(files)
    np.testing.assert_array_equal(again.grace.overruns_s, forecaster.grace.overruns_s)
    assert 55 <= again.grace.overruns_s.max() < 60

    from models.arrays import pack_arrays, unpack_arrays

    arrays = dict(unpack_arrays(files["runtime.npz"]))
    del arrays["grace"]
    older = RuntimeForecaster.from_files({**files, "runtime.npz": pack_arrays(arrays)})
    assert not older.grace.is_known
    table, history = JobTable(jobs[2_050:2_150]), JobHistory(jobs)
    X = feature_matrix(table, history, table.submit)
    assert (older.quantiles(X, table.limit_s).to_numpy() <= table.limit_s[:, None]).all()
    np.testing.assert_array_equal(
        again.quantiles(X, table.limit_s).to_numpy(), forecaster.quantiles(X, table.limit_s).to_numpy()
    )


def test_a_running_job_past_its_limit_is_about_to_be_killed(forecaster, jobs):
    start = jobs["submit_time"].max() + timedelta(days=1)
    asked = jobs[2_050:2_060].with_columns(
        start_time=pl.lit(start), end_time=pl.lit(None, jobs.schema["end_time"]), time_limit_s=pl.lit(3_600, pl.Int64)
    )
    left = forecaster.remaining(asked, JobHistory(jobs), start + timedelta(seconds=3_620)).to_numpy()
    assert (left[:, -1] < 40).all()
    assert (left > 0).all()


def test_outcomes_on_the_ends_of_an_interval_count_as_inside_with_a_tick():
    """Runs repeat a few lengths: an interval that holds its ends need not reach past the one at 10 %."""
    generator = np.random.default_rng(0)
    first, place = generator.uniform(0, 0.1, (4_000, 1)), generator.random((4_000, 1))
    apart = generator.uniform(0.1, 0.8, (4_000, 1))

    def lumps(level):
        return np.log(100.0) + apart * np.floor((level - first) / 0.1 + 1)

    curves, actual = lumps(LEVELS[None, :]), lumps(place)[:, 0]
    inside = {}
    for tick_s in (0.0, 0.5):
        fixed = np.exp(Conformal.fit(curves, actual, tick_s=tick_s).apply(curves))
        low, high = (fixed[:, np.searchsorted(GRID, level)] for level in (0.1, 0.9))
        inside[tick_s] = ((np.exp(actual) >= low - 0.5) & (np.exp(actual) <= high + 0.5)).mean()
    assert inside[0.0] > 0.84
    assert inside[0.5] == pytest.approx(0.8, abs=0.03)


def test_a_short_limit_is_passed_by_no_more_than_its_share_and_a_kill_takes_as_long_whatever_the_limit():
    limit_s = np.full(40, 36_000.0)
    runtime_s = limit_s + np.where(np.arange(40) % 4 == 0, 18_000.0, 30.0)  # one in four was let run on by half
    grace = Grace.fit(runtime_s, limit_s, np.arange(40))
    reaches = np.full((3, len(LEVELS)), np.log(1e6))
    limits = np.array([600.0, 36_000.0, 360_000.0])
    over_s = np.exp(grace.past_limit(reaches, limits)) - limits[:, None]
    assert over_s[:, -1] == pytest.approx([300.0, 18_000.0, 18_000.0])
    at_half = MEDIAN + 1
    assert over_s[:, at_half] == pytest.approx([30.0] * 3)
    seconds_alone = Grace(grace.overruns_s).past_limit(reaches, limits)
    assert np.exp(seconds_alone[0, -1]) == pytest.approx(18_600.0), "models kept before shares were"

"""Job features against numbers counted by hand and by brute force, and the same live as in a backtest."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobsError, JobTable
from features.job_queue import WAIT_FEATURES, wait_features
from features.job_recency import row_quantile, survival_quantiles, weighted_quantiles
from features.jobs import FEATURES, job_features, microseconds
from models.training import as_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def _job(job_id, submit_s, start_s=None, end_s=None, **fields):
    moments = {"submit_time": submit_s, "start_time": start_s, "end_time": end_s}
    times = {name: None if s is None else NOON + timedelta(seconds=s) for name, s in moments.items()}
    default = {"user": "ann", "queue": "gpu", "name": "train-1", "nodes": 1, "cpus": 8, "gpus": 8, "time_limit_s": 3600}
    return {"job_id": str(job_id), "state": "COMPLETED", **default, **times, **fields}


def _frame(*jobs):
    times = dict.fromkeys(("submit_time", "start_time", "end_time"), pl.Datetime("us", "UTC"))
    return pl.DataFrame(list(jobs), schema_overrides=times, infer_schema_length=None)


def _one(frame, name, job_id, at=None):
    features = job_features(frame.filter(pl.col("job_id") == str(job_id)), frame, at)
    return features[name][0]


def test_history_counts_only_from_the_moment_it_ended():
    jobs = _frame(_job(1, 0, 0, 100), _job(2, 50), _job(3, 100), _job(4, 101))
    assert np.isnan(_one(jobs, "user_last1", 2))
    assert np.isnan(_one(jobs, "user_last1", 3)), "an end at the very moment is not before it"
    assert _one(jobs, "user_last1", 4) == pytest.approx(np.log(100))
    assert _one(jobs, "user_last1", 2, NOON + timedelta(seconds=500)) == pytest.approx(np.log(100))


def test_groups_tell_users_sizes_limits_and_name_families_apart():
    jobs = _frame(
        _job(1, 0, 0, 10), _job(2, 1, 1, 21, gpus=4), _job(3, 2, 2, 42, name="eval-7"), _job(4, 3, 3, 83, user="bob"),
        _job(5, 1000, name="train-99"),
    )  # fmt: skip
    assert np.exp(_one(jobs, "user_last1", 5)) == pytest.approx(40)
    assert np.exp(_one(jobs, "family_last1", 5)) == pytest.approx(20)
    assert np.exp(_one(jobs, "key_last1", 5)) == pytest.approx(40)
    assert np.exp(_one(jobs, "key_last2", 5)) == pytest.approx(25)
    assert np.exp(_one(jobs, "spec_last1", 5)) == pytest.approx(10)
    assert np.exp(_one(jobs, "all_last1", 5)) == pytest.approx(80)
    assert np.expm1(_one(jobs, "user_count", 5)) == pytest.approx(3)


def test_a_running_sibling_counts_with_its_elapsed_time_alone():
    jobs = _frame(_job(1, 0, 0, 100), _job(2, 0, 0, 5000), _job(3, 600))
    assert _one(jobs, "started_user_running", 3) == 1
    assert np.exp(_one(jobs, "started_user_elapsed_high", 3)) == pytest.approx(600)
    # 100 ended, 600 still runs: survival falls to a half at 100 and never lower.
    assert np.exp(_one(jobs, "started_user_q50", 3)) == pytest.approx(100)
    assert np.exp(_one(jobs, "started_user_q75", 3)) == pytest.approx(600)


def test_a_running_job_is_not_its_own_sibling():
    jobs = _frame(_job(1, 0, 0, None, state="RUNNING"))
    at = NOON + timedelta(seconds=600)
    assert _one(jobs, "started_user_running", 1, at) == 0
    assert np.isnan(_one(jobs, "started_user_q50", 1, at))


def test_unknown_is_nan_and_an_empty_history_is_fine():
    job = _frame(_job(1, 0, time_limit_s=None, gpus=None, name=None))
    features = job_features(job, job.clear())
    assert features.columns == list(FEATURES)
    assert np.isnan(features["asked_limit"][0])
    assert np.isnan(features["kernel_distance"][0])
    assert np.isnan(wait_features(job, job.clear())["all_last"][0])
    assert job_features(job.clear(), job).height == 0
    assert wait_features(job.clear(), job).height == 0


def test_wrong_frames_are_refused_by_name():
    with pytest.raises(JobsError, match="no column 'submit_time'"):
        JobHistory(pl.DataFrame({"job_id": ["1"]}))
    with pytest.raises(JobsError, match="1 of 2 jobs have no job_id"):
        JobTable(_frame(_job(1, 0), _job(2, 0)).with_columns(job_id=pl.Series([None, "2"])))
    with pytest.raises(ValueError, match="no time zone"):
        job_features(_frame(_job(1, 0)), _frame(_job(1, 0)), datetime(2026, 1, 1))  # noqa: DTZ001


def test_an_end_before_its_start_is_unknown_not_negative():
    table = JobTable(_frame(_job(1, 0, 100, 50)))
    assert np.isnan(table.runtime_s[0])


def test_row_statistics_equal_numpy_and_the_textbook():
    values = np.array([[3.0, 1.0, np.nan, 2.0], [np.nan] * 4, [5.0, np.nan, np.nan, np.nan]])
    assert row_quantile(values, 0.5).tolist()[::2] == [2.0, 5.0]
    assert np.isnan(row_quantile(values, 0.5)[1])
    (heavy,) = weighted_quantiles(values, np.array([[0.1, 0.8, 9.0, 0.1]] * 3), (0.5,))
    assert heavy[0] == 1.0
    assert np.isnan(heavy[1])
    # Durations 1, 2+, 3, 4+ (+ is censored): survival 3/4 after 1, 3/8 after 3.
    times = np.array([[4.0, 1.0, 3.0, 2.0]])
    events = np.array([[False, True, True, False]])
    q25, q50, q75 = survival_quantiles(times, events, (0.25, 0.5, 0.75))
    assert (q25[0], q50[0], q75[0]) == (1.0, 3.0, 4.0)


def test_queue_state_by_hand():
    jobs = _frame(
        _job(1, 0, 0, 1000), _job(2, 10, 20, 500, gpus=16), _job(3, 100, 600, 700), _job(4, 110), _job(5, 200),
        _job(6, 150, None, 180, state="CANCELLED"),
    )  # fmt: skip
    at = NOON + timedelta(seconds=300)
    row = dict(zip(WAIT_FEATURES, wait_features(jobs.filter(pl.col("job_id") == "5"), jobs, at).row(0), strict=True))
    assert np.expm1(row["all_pending"]) == pytest.approx(2, abs=1e-4)  # 3 and 4; itself and the cancelled one are not
    assert np.expm1(row["all_running"]) == pytest.approx(2, abs=1e-4)
    assert np.expm1(row["all_running_width"]) == pytest.approx(24, abs=1e-3)
    assert np.expm1(row["all_running_left"]) == pytest.approx(8 * 3300 + 16 * 3320, rel=1e-5)
    assert np.expm1(row["elapsed"]) == pytest.approx(100, rel=1e-4)
    assert row["fits"] == 0
    assert np.expm1(row["shadow_limit"]) == pytest.approx(3300, rel=1e-4)
    assert np.exp(row["all_last"]) == pytest.approx(10, rel=1e-4)


@pytest.fixture(scope="module")
def kth(traces):
    return pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").sort("submit_time", "job_id")[:3_000]


@pytest.mark.traces
def test_features_equal_brute_force_on_a_recorded_trace(kth):
    features = job_features(kth, kth)
    waits = wait_features(kth, kth)
    jobs = kth.to_dicts()
    for k in np.random.default_rng(1).choice(np.arange(500, len(jobs)), 40, replace=False).tolist():
        job, at = jobs[k], jobs[k]["submit_time"]
        others = [other for other in jobs if other is not job]
        ran = sorted(
            (o for o in others if o["end_time"] < at and o["end_time"] > o["start_time"] and o["user"] == job["user"]),
            key=lambda o: (o["end_time"], jobs.index(o)),
        )
        runs = [(o["end_time"] - o["start_time"]).total_seconds() for o in ran]
        key = [
            seconds
            for seconds, o in zip(runs, ran, strict=True)
            if (o["cpus"], o["time_limit_s"]) == (job["cpus"], job["time_limit_s"])
        ]
        assert np.expm1(features["user_count"][k]) == pytest.approx(len(runs), rel=1e-4)
        if runs:
            assert np.exp(features["user_last2"][k]) == pytest.approx(np.mean(runs[-2:]), rel=1e-4)
        if key:
            assert np.exp(features["key_last1"][k]) == pytest.approx(key[-1], rel=1e-4)
            assert features["key_median"][k] == pytest.approx(np.median(np.log(key[-20:])), rel=1e-4, abs=1e-4)
        pending = sum(o["submit_time"] <= at < o["start_time"] for o in others)
        running = [o for o in others if o["start_time"] <= at < o["end_time"]]
        assert np.expm1(waits["all_pending"][k]) == pytest.approx(pending, rel=1e-3)
        assert np.expm1(waits["all_running_width"][k]) == pytest.approx(sum(o["cpus"] for o in running), rel=1e-3)


@pytest.mark.traces
def test_live_and_backtest_see_the_same_bits(kth):
    """A job alone, with the history cut off at its submit, against the same job in one pass over the whole trace."""
    backtest = job_features(kth, kth), wait_features(kth, kth)
    for k in np.random.default_rng(2).choice(np.arange(200, kth.height), 12, replace=False).tolist():
        at = kth["submit_time"][k]
        known = as_of(kth, at)
        job = kth[k].with_columns(
            start_time=pl.lit(None, kth.schema["start_time"]), end_time=pl.lit(None, kth.schema["end_time"])
        )
        for made, whole in zip((job_features(job, known, at), wait_features(job, known, at)), backtest, strict=True):
            odd = [c for c in made.columns if made[c].to_numpy().tobytes() != whole[c][k : k + 1].to_numpy().tobytes()]
            assert not odd, f"job {k}: {odd}"
    assert microseconds(at) == kth["submit_time"].to_physical()[k]

"""Job features against numbers counted by hand and by brute force, and the same live as in a backtest."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import NEVER, JobHistory, JobsError, JobTable
from features.job_likeness import GAP_WEIGHTS, LABEL_WEIGHTS, NEIGHBOURS, Likeness, like_jobs, survivors_left
from features.job_queue import WAIT_FEATURES, wait_features
from features.job_recency import NEWEST_RUNS, newest_runs, row_quantile, started_runs
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
    logs, bad = np.random.default_rng(1).normal(7, 2, 60).round(1), np.arange(60) % 3 == 0
    last = np.arange(61)
    found, newest = newest_runs(np.arange(60), np.zeros(61, np.int64), last, logs, bad, 20)
    assert np.isnan(found[0]).all()
    assert newest.tolist() == [0, *range(60)]
    for k in range(1, 61):
        seen = logs[max(0, k - 20) : k][::-1]
        before = seen[1] if k > 1 else np.nan
        low, median, high = np.quantile(seen, (0.1, 0.5, 0.9))
        same = (abs(seen - seen[0]) < 0.05).mean()
        ended = bad[max(0, k - 20) : k].mean()
        wanted = (seen[0], before, median, seen.mean(), seen.std(), low, high, ended, same)
        np.testing.assert_allclose(found[k], wanted, rtol=1e-12, err_msg=str(NEWEST_RUNS))


def test_started_runs_are_the_textbooks_kaplan_meier():
    # Durations 1, 2+, 3, 4+ s (+ still runs): survival 3/4 after 1, 3/8 after 3. The fifth is the job asked about.
    start = np.array([6, 9, 7, 8, 2]) * 1_000_000
    end = np.array([NEVER, 10_000_000, 10_000_000, NEVER, NEVER])
    asked = [np.array([value]) for value in (0, 5, 4, 10_000_001)]
    rows = np.array([4, 0, 2, 3, 1])
    found = started_runs(rows, *asked, start, end, 24)[0]
    np.testing.assert_allclose(np.exp(found[[0, 1, 2, 4, 5]]), [1, 3, 4, 2, 4], rtol=1e-5)
    assert found[3] == 2
    none = started_runs(rows, *(np.array([value]) for value in (0, 1, 4, 10_000_001)), start, end, 24)[0]
    assert none[3] == 0
    assert np.isnan(np.delete(none, 3)).all()


def test_like_jobs_are_those_of_weighing_each_job_alone():
    pick = np.random.default_rng(2)
    user = np.repeat([0, 300], [300, 20])  # where each user's jobs begin in order of their ends
    gaps = np.where(pick.random((320, 5)) < 0.1, np.nan, pick.normal(5, 1, (320, 5)))
    likeness = Likeness(gaps, pick.integers(0, 3, (320, 2)).astype(np.uint64), np.arange(320) * 60_000_000)
    logs, bad, rows = pick.normal(7, 2, 320).round(1), pick.random(320) < 0.3, pick.permutation(320)
    asked = pick.permutation(320)[:60]
    first, last = user[asked], pick.integers(user[asked], np.where(user[asked], 321, 301))
    of = Likeness(likeness.gaps[asked], likeness.labels[asked], likeness.submit[asked] + 20_000_000_000)
    found = like_jobs(of, likeness, rows, first, last, logs, bad, (0.25, 0.5, 0.9))
    elapsed_s = pick.uniform(1, 3_000, 60)
    left = survivors_left(of, likeness, rows, first, last, np.exp(logs), elapsed_s, (0.25, 0.5, 0.9), 256)
    for i in range(60):
        for most, made in ((NEIGHBOURS, found), (256, left)):
            near = rows[max(first[i], last[i] - most) : last[i]][::-1]
            gap = np.abs(likeness.gaps[near] - of.gaps[i])
            both = np.isnan(likeness.gaps[near]) & np.isnan(of.gaps[i])
            distance = np.where(np.isnan(gap), np.where(both, 0.0, 3.0), np.minimum(gap, 3.0)) @ GAP_WEIGHTS
            distance += (likeness.labels[near] != of.labels[i]) @ LABEL_WEIGHTS + 0.2 / 16 * np.arange(len(near))
            distance += 0.3 * np.log1p(np.maximum(of.submit[i] - likeness.submit[near], 0) / 1e6)
            values = logs[near]
            if made is left:
                ahead = np.exp(values) - elapsed_s[i]
                near, distance = near[ahead > 1e-6], distance[ahead > 1e-6]
                values = np.log(np.maximum(ahead[ahead > 1e-6], 1.0))
            if not len(near):
                assert np.isnan(made[i]).all()
                continue
            weights = np.exp(distance.min() - distance)
            order = np.argsort(values, kind="stable")
            mass = np.cumsum(weights[order])
            wanted = [values[order][np.argmax(mass >= q * mass[-1] - 1e-12)] for q in (0.25, 0.5, 0.9)]
            if made is found:
                mean, ended = (np.average(part, weights=weights) for part in (values, bad[near]))
                wanted += [mean, distance.min(), ended, np.log(weights.sum())]
            np.testing.assert_allclose(made[i], wanted, rtol=1e-9, atol=1e-12)


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


@pytest.mark.parametrize("limit_s", [2**63 - 1, 10**13])
def test_work_of_jobs_with_limits_beyond_all_reason_stays_a_whole_number(limit_s):
    jobs = _frame(
        _job(1, 0, 0, time_limit_s=limit_s, gpus=10**6), _job(2, 100, time_limit_s=limit_s), _job(3, 110), _job(4, 200),
    )  # fmt: skip
    at = NOON + timedelta(seconds=300)
    row = dict(zip(WAIT_FEATURES, wait_features(jobs.filter(pl.col("job_id") == "4"), jobs, at).row(0), strict=True))
    assert np.expm1(row["all_running_left"]) == pytest.approx(1e6 * (1e9 - 300), rel=1e-4)
    assert np.expm1(row["all_pending_work"]) == pytest.approx(8 * 1e9 + 8 * 3600, rel=1e-4)
    assert np.expm1(row["user_pending"]) == pytest.approx(2, abs=1e-4)


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

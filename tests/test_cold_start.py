"""A young history: who speaks while little has ended, and limits longer than any that ended jobs had."""

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.jobs import FEATURES, feature_matrix
from models.contributions import of_recency
from models.curves import LEVELS, MEDIAN
from models.forest import ForestSize
from models.recency import BASELINES, MIDDLE, MIDDLE_OF, STRATA, KeyedRecency, baseline_log, spoken_log
from models.runtime import RuntimeForecaster
from models.runtime_choice import choose_expert, is_young

START = datetime(2026, 3, 2, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def frame(runs, span, now, *, limit_s=86_400, users=4):
    """Jobs that start evenly over a span and run for these times in turn; those still running then have no end."""
    rows = []
    count = int(span / (HOUR / 4))
    for k in range(count):
        at = START + k * span / count
        end = at + runs[k % len(runs)]
        rows.append((str(k), f"u{k % users}", 8, limit_s, at, at, end if end < now else None))
    names = ["job_id", "user", "gpus", "time_limit_s", "submit_time", "start_time", "end_time"]
    return pl.DataFrame(rows, schema=names, orient="row").with_columns(state=pl.lit("COMPLETED"))


def us(moment):
    return int(moment.timestamp() * 1e6)


@pytest.mark.parametrize(
    ("runs", "days", "expected"),
    [
        ([HOUR / 2], 2, False),  # all jobs are short: two days say it all
        ([HOUR / 2] * 4 + [20 * HOUR], 2, True),  # one in five runs for most of what has been seen
        ([HOUR / 2] * 4 + [20 * HOUR], 6, False),
        ([HOUR / 2] * 9 + [200 * HOUR], 4, True),  # none of the long ones has ended: they are running, not absent
        ([HOUR / 2] * 40 + [200 * HOUR], 4, False),  # so few are long that they are not what is usual
    ],
)
def test_a_history_is_young_until_it_spans_long_jobs_some_times_over(runs, days, expected):
    now = START + days * DAY
    jobs = frame(runs, days * DAY, now)
    assert is_young(JobTable(jobs), us(now)) is expected
    stray = jobs[:1].with_columns(
        job_id=pl.lit("old"), **{name: pl.col(name) - 400 * DAY for name in ("submit_time", "start_time", "end_time")}
    )
    assert is_young(JobTable(pl.concat([stray, jobs])), us(now)) is expected, "a stray job makes no history old"


def test_what_comes_after_the_moment_does_not_make_a_history_older():
    runs, now = [HOUR / 2] * 4 + [20 * HOUR], START + 2 * DAY
    later = frame(runs, 9 * DAY, START + 30 * DAY)
    scrambled = later.with_columns(
        end_time=pl.when(pl.col("end_time") >= now).then(pl.col("start_time") + 90 * DAY).otherwise("end_time")
    )
    for jobs in (later, scrambled):
        assert is_young(JobTable(jobs), us(now))
        assert not is_young(JobTable(later), us(START + 8 * DAY))
    assert is_young(JobTable(later), us(START)), "nothing has ended"


def columns(count, **values):
    X = np.full((count, len(FEATURES)), np.nan, dtype=np.float32)
    for name, value in values.items():
        X[:, FEATURES.index(name)] = value
    return X


def test_the_model_must_not_lose_to_any_baseline_and_waits_while_the_history_is_young():
    generator = np.random.default_rng(3)
    y = generator.normal(6, 1, 300)
    X = columns(300, key_count=1.0, user_count=1.0, key_last2=y + 0.6, key_median=y + 0.2, user_median=y + 0.9)
    X[:, FEATURES.index("user_last2")] = y + 0.9
    recency = KeyedRecency("last2_key", np.zeros((len(STRATA), len(LEVELS))), {})
    for error, speaks in ((0.1, False), (0.4, True)):  # better than who would speak, worse than the key's median
        curves = np.tile((y + error)[:, None], (1, len(LEVELS)))
        is_recency, named = choose_expert(curves, recency, X, y)
        assert is_recency.tolist() == [speaks] * 3
        assert named["key"] == ("last2_key" if speaks else "model")
        assert choose_expert(curves, recency, X, y, is_young=True)[0].all()


def test_who_speaks_is_chosen_on_all_that_ended_and_spread_by_the_newest():
    generator = np.random.default_rng(4)
    y = generator.normal(6, 1, 1_000)
    newest = np.arange(900, 1_000)
    median = y + 0.3 + np.where(np.arange(1_000) < 900, generator.normal(0, 0.2, 1_000), 0.0)
    X = columns(1_000, user_last2=y + 2, key_last2=y + 1, user_median=y + 1.5, key_median=median)
    X[newest, FEATURES.index("key_last2")] = y[newest] + generator.normal(0, 0.1, 100)
    recency = KeyedRecency.fit(X, y, newest)
    assert recency.name == "median_key"
    assert set(recency.losses) == {*BASELINES, MIDDLE}
    assert KeyedRecency.fit(X[newest], y[newest]).name == "last2_key"
    assert (recency.offsets[:, -1] == 0).all(), "the newest all lay below it"
    for few in (None, newest[:5]):
        assert (KeyedRecency.fit(X, y, few).offsets[:, -1] > 0).all(), "of the others some lay above"


def test_the_middle_speaks_where_nothing_tells_them_apart_or_all_contradict_each_other():
    y = np.random.default_rng(5).normal(6, 1, 400)
    tied = columns(400, asked_limit=9.0)
    assert KeyedRecency.fit(tied, y).name == MIDDLE
    assert KeyedRecency.fit(tied[:0], y[:0]).name == MIDDLE
    gaps = {"user_last2": -1.0, "key_last2": 0.4, "key_median": -0.4, "user_median": 1.0}
    torn = columns(400, **{name: y + gap for name, gap in gaps.items()})
    recency = KeyedRecency.fit(torn, y)
    assert recency.name == MIDDLE
    np.testing.assert_allclose(recency.curves(torn)[:, MEDIAN], y, atol=1e-5)
    parts = of_recency(recency, torn)
    np.testing.assert_allclose(parts.median_log, recency.curves(torn)[:, MEDIAN], atol=1e-5)
    points = np.stack([baseline_log(name, torn) for name in MIDDLE_OF])
    np.testing.assert_array_equal(spoken_log(MIDDLE, torn), np.median(points, axis=0))
    again = KeyedRecency.from_json(json.loads(json.dumps(recency.to_json())))
    np.testing.assert_array_equal(again.curves(torn), recency.curves(torn))
    with pytest.raises(ValueError, match="no baseline 'best'"):
        spoken_log("best", torn)


def test_two_days_of_short_jobs_leave_the_word_to_keyed_recency():
    """Long jobs have hardly begun to end: their users' limits are all that is known of them."""
    runs = [HOUR / 4, HOUR / 3, HOUR / 2, 30 * HOUR]
    for days, young in ((2, True), (9, False)):
        now = START + days * DAY
        forecaster = RuntimeForecaster.fit(frame(runs, days * DAY, now), now, size=ForestSize(8))
        assert forecaster.facts["is_young"] is young
        if young:
            assert forecaster.is_recency.all()


@pytest.fixture(scope="module")
def limited():
    """Jobs that use a third of limits from one hour to two days."""
    generator = np.random.default_rng(6)
    rows = []
    for k in range(900):
        hours = (1, 4, 12, 48)[k % 4]
        at = START + k * HOUR / 2
        end = at + hours * HOUR * float(np.clip(generator.normal(1 / 3, 0.05), 0.1, 0.9))
        rows.append((str(k), f"u{k % 7}", 1, hours * 3_600, at, at, end))
    names = ["job_id", "user", "gpus", "time_limit_s", "submit_time", "start_time", "end_time"]
    jobs = pl.DataFrame(rows, schema=names, orient="row").with_columns(state=pl.lit("COMPLETED"))
    now = START + 470 * HOUR
    return jobs, now, RuntimeForecaster.fit(jobs, now, size=ForestSize(20))


def test_a_limit_above_any_seen_scales_as_the_highest_seen(limited):
    jobs, now, forecaster = limited
    assert not forecaster.is_recency.any()
    asked = jobs[-1:].with_columns(
        job_id=pl.lit("new"), user=pl.lit("nobody"), submit_time=pl.lit(now), time_limit_s=pl.lit(365 * 86_400),
        start_time=pl.lit(None, jobs.schema["start_time"]), end_time=pl.lit(None, jobs.schema["end_time"]),
    )  # fmt: skip
    highest = asked.with_columns(time_limit_s=pl.lit(48 * 3_600))
    far, near = (forecaster.forecast(job, jobs, now) for job in (asked, highest))
    assert far["q50_s"][0] == pytest.approx(near["q50_s"][0], rel=0.2)
    assert far["q95_s"][0] <= 2 * 86_400
    X = feature_matrix(JobTable(asked), JobHistory(jobs), np.array([us(now)]))
    limit_s = np.array([365 * 86_400.0])
    curves, told = forecaster.explained(X, limit_s)
    np.testing.assert_allclose(told.median_log, curves[:, MEDIAN], atol=1e-6)
    running = asked.with_columns(start_time=pl.lit(now - 2 * HOUR), submit_time=pl.lit(now - 2 * HOUR))
    assert forecaster.landmarks.ratio is not None
    drawn = forecaster.landmarks.samples(X, np.full((1, 10), np.nan), JobTable(running), np.array([7_200.0]))
    assert np.exp(drawn[1].max()) <= 2 * 86_400


def test_files_keep_the_highest_limit_and_older_ones_still_load(limited):
    jobs, now, forecaster = limited
    files = forecaster.to_files()
    again = RuntimeForecaster.from_files(files)
    assert again.experts.highest_limit_log == pytest.approx(np.log(48 * 3_600))
    assert again.landmarks.farthest_log == forecaster.landmarks.farthest_log < np.log(48 * 3_600)
    described = json.loads(files["runtime.json"])
    del described["highest_limit_log"]
    older = RuntimeForecaster.from_files({**files, "runtime.json": json.dumps(described).encode()})
    assert older.experts.highest_limit_log == np.inf
    known = jobs[:40]
    assert older.forecast(known, jobs, now).equals(forecaster.forecast(known, jobs, now))

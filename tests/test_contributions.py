"""What makes a runtime's median: parts that sum to it exactly, laid to the right facts, in words that say only them."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.jobs import FEATURES, feature_matrix
from features.vocabulary import QUANTILES
from models.contribution_words import MOST_CHARACTERS, MOST_REASONS, duration_words, in_words
from models.contributions import FEATURE_GROUP, GROUPS, Contributions, group_of, of_recency
from models.curves import MEDIAN
from models.forest import NEAR, Forest, ForestSize
from models.live import forecast_jobs
from models.recency import STRATA, KeyedRecency
from models.runtime import RuntimeForecaster

START = datetime(2026, 3, 2, 9, tzinfo=UTC)
SMALL = ForestSize(trees=16)


@pytest.fixture(scope="module")
def kth(traces):
    return pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").sort("submit_time", "job_id")[2_000:6_000]


@pytest.fixture(scope="module")
def forecaster(kth):
    return RuntimeForecaster.fit(kth, kth["submit_time"][3_200], size=SMALL)


@pytest.fixture(scope="module")
def asked(kth):
    later = kth.filter(pl.col("submit_time") > kth["submit_time"][3_200])
    table = JobTable(later)
    return later, feature_matrix(table, JobHistory(kth), table.submit), table.limit_s


@pytest.mark.traces
def test_parts_sum_to_the_published_median(forecaster, asked, kth):
    later, X, limit_s = asked
    median_s = forecaster.forecast(later, kth).to_numpy()[:, QUANTILES.index(0.5)]
    told = forecaster.contributions(X, limit_s)
    assert told.parts.shape == (len(later), len(GROUPS))
    np.testing.assert_allclose(told.usual_log + told.parts.sum(axis=1), np.log(median_s), atol=1e-6)
    np.testing.assert_array_equal(forecaster.explained(X, limit_s)[0], forecaster.curves(X, limit_s))
    ended = JobHistory(kth).log_runtime[(kth["end_time"] < kth["submit_time"][3_200]).to_numpy()]
    assert np.unique(told.usual_log).tolist() == [pytest.approx(np.nanmedian(ended), abs=0.02)]


@pytest.mark.traces
@pytest.mark.parametrize(
    "change",
    [
        {"is_recency": np.ones(len(STRATA), dtype=bool)},
        {"is_recency": np.array([True, False, False])},
        {"is_snapped": False, "centre": -1},
        {"is_snapped": True, "centre": 0},
        {"usual_log": None},
    ],
)
def test_parts_sum_whoever_speaks(forecaster, asked, change):
    _, X, limit_s = asked
    limit_s = np.where(np.arange(len(X)) % 5 == 0, np.nan, limit_s)
    curves, told = replace(forecaster, **change).explained(X, limit_s)
    np.testing.assert_allclose(told.median_log, curves[:, MEDIAN], atol=1e-6)


@pytest.mark.traces
def test_what_is_left_over_is_small_beside_what_is_laid_to_facts(forecaster, asked):
    """The words would tell little if most of the way from usual were the pooling's and the correction's."""
    _, X, limit_s = asked
    size = np.abs(forecaster.contributions(X, limit_s).parts).mean(axis=0)
    left = size[GROUPS.index("middle")] + size[GROUPS.index("correction")]
    assert left < 0.1 * size.sum()


@pytest.mark.traces
def test_what_is_told_agrees_with_shapley_values_of_the_whole_forecaster(forecaster, asked, kth):
    """Groups join one by one, in drawn orders, from past jobs' features to the job's own: far too slow to serve."""
    _, X, limit_s = asked
    X, limit_s = X[::8], limit_s[::8]
    past = JobTable(kth.filter(pl.col("submit_time") < kth["submit_time"][3_000]).sample(24, seed=2))
    references = feature_matrix(past, JobHistory(kth), past.submit)
    generator, groups = np.random.default_rng(0), len(GROUPS) - 2
    values = np.zeros((len(X), groups))
    for k in range(past.count):
        mixed, limit = np.repeat(references[[k]], len(X), axis=0), np.full(len(X), past.limit_s[k])
        before = forecaster.curves(mixed, limit)[:, MEDIAN]
        for group in generator.permutation(groups):
            columns = group == FEATURE_GROUP
            mixed[:, columns] = X[:, columns]
            limit = limit_s if GROUPS[group] == "request" else limit
            after = forecaster.curves(mixed, limit)[:, MEDIAN]
            values[:, group] += (after - before) / past.count
            before = after
    parts = forecaster.contributions(X, limit_s).parts[:, :groups]
    told = np.argsort(-np.abs(parts), axis=1)[:, :3]
    mine, theirs = np.take_along_axis(parts, told, axis=1), np.take_along_axis(values, told, axis=1)
    is_told = np.abs(mine) > np.log(1.1)
    assert (np.sign(mine) == np.sign(theirs))[is_told].mean() > 0.85
    assert np.corrcoef(parts.ravel(), values.ravel())[0, 1] > 0.8


@pytest.mark.traces
def test_files_bring_the_same_contributions_back_and_older_files_still_explain(forecaster, asked):
    _, X, limit_s = asked
    again = RuntimeForecaster.from_files(forecaster.to_files())
    np.testing.assert_array_equal(again.contributions(X, limit_s).parts, forecaster.contributions(X, limit_s).parts)
    arrays = forecaster.experts.ratio.to_arrays()
    del arrays["leaf_rows"]
    older = replace(forecaster, experts=replace(forecaster.experts, ratio=Forest.from_arrays(arrays)))
    curves, told = older.explained(X, limit_s)
    np.testing.assert_allclose(told.median_log, curves[:, MEDIAN], atol=1e-6)


@pytest.mark.traces
def test_no_jobs_have_no_contributions(forecaster):
    curves, told = forecaster.explained(np.empty((0, len(FEATURES)), dtype=np.float32), np.empty(0))
    assert (len(curves), told.parts.shape, in_words(told, np.empty((0, len(FEATURES))), [])) == (
        0,
        (0, len(GROUPS)),
        [],
    )


def test_a_forest_lays_the_move_to_the_feature_that_makes_it():
    generator = np.random.default_rng(4)
    X = generator.normal(size=(3_000, 3)).astype(np.float32)
    y = 2.0 * X[:, 0] - 0.5 * X[:, 1] + 0.05 * generator.normal(size=3_000)
    forest = Forest.fit(X, y, ForestSize(trees=30, feature_share=1.0), seed=3, threads=1)
    samples, base, parts = forest.explained(X, np.array([0, 1, 2]), 3)
    np.testing.assert_array_equal(samples, forest.draw(X))
    assert base == pytest.approx(np.median(y), abs=0.03)
    assert np.corrcoef(parts[:, 0], X[:, 0])[0, 1] > 0.95
    assert np.corrcoef(parts[:, 1], -X[:, 1])[0, 1] > 0.8
    assert np.abs(parts[:, 2]).mean() < 0.05 * np.abs(parts[:, 0]).mean()
    assert np.abs(base + parts.sum(axis=1) - np.median(samples, axis=1)).mean() < 0.02


def test_a_forests_parts_follow_the_paths():
    """Against the same walk in plain Python, on ranks made by sorting."""
    generator = np.random.default_rng(8)
    X = generator.normal(size=(400, 4)).astype(np.float32)
    y = X[:, 0] + X[:, 1] ** 2 + 0.1 * generator.normal(size=400)
    forest = Forest.fit(X, y, ForestSize(trees=3, feature_share=0.5), seed=3, threads=1)
    _, base, parts = forest.explained(X[:20], np.array([0, 1, 0, 1]), 2)
    assert forest.leaf_rows.sum() == 3 * 400
    kept, weight = forest.samples.astype(np.float64), np.repeat(forest.leaf_rows[:, None], 4, axis=1)
    order = np.argsort(kept, axis=None)
    mass = np.cumsum(weight.ravel()[order])
    ranks = np.empty(kept.size)
    ranks[order] = (mass - weight.ravel()[order] / 2) / mass[-1]
    ranks = ranks.reshape(kept.shape).mean(axis=1)

    def mean(root, node):
        if forest.feature[node] < 0:
            return ranks[forest.right[node]], forest.leaf_rows[forest.right[node]]
        (a, m), (b, n) = mean(root, node + 1), mean(root, root + forest.right[node])
        return (a * m + b * n) / (m + n), m + n

    moved = np.zeros((20, 2))
    for row in range(20):
        for root in forest.roots:
            node = root
            while forest.feature[node] >= 0:
                column = forest.feature[node]
                child = node + 1 if X[row, column] <= forest.threshold[node] else root + forest.right[node]
                moved[row, column % 2] += mean(root, child)[0] - mean(root, node)[0]
                node = child
    moved /= 3
    far = np.abs(moved.sum(axis=1)) > 5 * NEAR
    shares = parts[far] / parts[far].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, moved[far] / moved[far].sum(axis=1, keepdims=True), atol=0.02)
    reached = base + parts.sum(axis=1) - np.median(forest.draw(X[:20]), axis=1)
    assert np.abs(reached).mean() < 0.05


def test_every_feature_has_a_group():
    assert {GROUPS[k] for k in FEATURE_GROUP} == set(GROUPS) - {"middle", "correction"}
    assert [group_of(name) for name in ("asked_limit", "asked_hour", "key_last1", "user_bad", "kernel_q45")] == [
        "request", "calendar", "same", "chain", "alike",
    ]  # fmt: skip


def _jobs():
    """Twenty short jobs of bob, five of ada of two hours each, a running one of hers, and one she submits now."""
    rows = []
    for k in range(20):
        at = START + timedelta(minutes=20 * k)
        rows.append(("bob", f"test-{k}", 1, 3600, at, at, at + timedelta(minutes=10), "COMPLETED"))
    for k in range(5):
        at = START + timedelta(hours=3 * k)
        rows.append(("ada", f"train-{k}", 8, 14_400, at, at, at + timedelta(hours=2), "COMPLETED"))
    now = START + timedelta(hours=20)
    rows.append(("ada", "train-7", 8, 14_400, now - timedelta(hours=1), now - timedelta(hours=1), None, "RUNNING"))
    rows.append(("ada", "train-8", 8, 14_400, now - timedelta(minutes=1), None, None, "PENDING"))
    names = ["user", "name", "gpus", "time_limit_s", "submit_time", "start_time", "end_time", "state"]
    frame = pl.DataFrame(rows, schema=names, orient="row")
    return frame.with_columns(job_id=pl.int_range(pl.len()).cast(pl.String), queue=pl.lit("main")), now


def test_reasons_of_live_jobs_name_the_runs_that_speak():
    jobs, now = _jobs()
    rows = forecast_jobs(None, jobs, jobs, now)
    assert rows.filter(pl.col("forecast") == "wait")["reasons"].null_count() == 1
    told = rows.filter(pl.col("forecast") != "wait")
    assert told.height == 2
    for text in told["reasons"]:
        first, second = text.split("; ")
        assert first == "about 12× longer than usual here (10 min)"
        assert second == "×12: the last 5 runs of this name by ada took 2 h"


def test_each_group_says_what_was_known():
    jobs, now = _jobs()
    table = JobTable(jobs[-1:])
    X = feature_matrix(table, JobHistory(jobs), np.array([int(now.timestamp() * 1e6)]))

    def said(group, factor=2.0, features=X, user="ada"):
        parts = np.zeros((1, len(GROUPS)))
        parts[0, GROUPS.index(group)] = np.log(factor)
        return in_words(Contributions(np.log([600.0]), parts), features, [user])[0]

    assert said("request")[1] == "×2: asks for 8 GPUs, up to 4 h"
    assert said("user", 0.5) == ("about 2× shorter than usual here (10 min)", "×0.5: the last 5 runs by ada took 2 h")
    assert said("alike")[1] == "×2: the runs by ada most like it took 2 h"
    assert said("siblings")[1] == "×2: 1 job of this size and limit by ada has run for 1 h and not ended"
    assert said("others")[1] == "×2: the last 5 runs of this size and limit by anyone took 2 h"
    assert said("chain")[1] == "×2: ada submitted 1 job in the hour before"
    assert said("calendar")[1] == "×2: submitted on Tuesday at 04:59 UTC"
    assert said("request", 1.05) == ("about as long as usual here (10 min)",)
    unknown = np.full((1, len(FEATURES)), np.nan)
    unknown[0, [FEATURES.index(name) for name in ("chain_bad_run", "asked_hour", "asked_weekday")]] = 0.0
    assert said("request", 3.0, unknown, None) == ("no run has ended here yet",)
    unknown[0, FEATURES.index("all_median")] = np.log(600.0)
    for group in GROUPS:
        [_, text] = said(group, 3.0, unknown, None)
        assert "nan" not in text
    assert said("same", 3.0, unknown, None)[1] == "×3: no run of this size and limit by this user has ended yet"
    assert said("user", user="7")[1].endswith("by user 7 took 2 h")


def test_reasons_are_few_short_and_hold_no_separator():
    generator = np.random.default_rng(2)
    jobs, now = _jobs()
    table = JobTable(jobs)
    X = feature_matrix(table, JobHistory(jobs), np.full(len(jobs), int(now.timestamp() * 1e6)))
    told = Contributions(np.full(len(jobs), 8.0), generator.normal(size=(len(jobs), len(GROUPS))) * 3)
    for reasons in in_words(told, X, ["a;b\n" * 80] * len(jobs)):
        assert 1 <= len(reasons) <= MOST_REASONS
        assert all(len(text) <= MOST_CHARACTERS and ";" not in text and "\n" not in text for text in reasons)


def test_recency_lays_the_limit_to_the_request():
    jobs, now = _jobs()
    short = jobs[-1:].with_columns(time_limit_s=pl.lit(1800))
    X = feature_matrix(JobTable(short), JobHistory(jobs), np.array([int(now.timestamp() * 1e6)]))
    recency = KeyedRecency.fit(X[:0], np.empty(0))
    told = of_recency(recency, X)
    np.testing.assert_allclose(told.median_log, recency.curves(X)[:, MEDIAN], atol=1e-6)
    factors = dict(zip(GROUPS, np.exp(told.parts[0]), strict=True))
    assert factors["user"] == pytest.approx(12)  # of that limit she has run nothing yet
    assert factors["request"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(45, "45 s"), (60, "1 min"), (200, "3.3 min"), (5400, "1.5 h"), (7200, "2 h"), (100_000, "28 h"),
     (280_000, "3.2 days")],
)  # fmt: skip
def test_durations_in_words(seconds, words):
    assert duration_words(seconds) == words

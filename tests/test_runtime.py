"""The runtime forecaster: curves that never cross, limits kept, the same from the same seed, modest where it loses."""

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.jobs import FEATURES
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES
from models.arrays import ArraysError, pack_arrays, unpack_arrays
from models.calibration import Conformal, Isotonic, effective_count
from models.curves import (
    CENTRE_GAINS,
    LEVELS,
    MEDIAN,
    cap,
    centred,
    level_of,
    pool,
    pool_points,
    read_levels,
    remaining_s,
)
from models.forest import Forest, ForestSize
from models.mixture import choose_mix, past_samples, pooled
from models.recency import BASELINES, KeyedRecency, baseline_log
from models.runtime import RuntimeForecaster, TooFewJobsError
from models.runtime_choice import choose_centre, choose_expert
from models.scoring import auroc, is_within, is_within_factor, log_error, log_pinball

SMALL = ForestSize(trees=16)
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def kth(traces):
    return pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").sort("submit_time", "job_id")[2_000:6_000]


@pytest.fixture(scope="module")
def at(kth):
    return kth["submit_time"][3_200]


@pytest.fixture(scope="module")
def forecaster(kth, at):
    return RuntimeForecaster.fit(kth, at, size=SMALL)


@pytest.fixture(scope="module")
def later(kth, at):
    return kth.filter(pl.col("submit_time") > at)


@pytest.mark.traces
def test_quantiles_never_cross_and_pass_the_limit_by_the_grace_at_most(forecaster, later, kth):
    frame = forecaster.forecast(later, kth)
    assert frame.columns == list(QUANTILE_COLUMNS)
    values = frame.to_numpy()
    assert np.isfinite(values).all()
    assert (np.diff(values, axis=1) >= 0).all()
    assert (values >= 1).all()
    limit_s, middle = later["time_limit_s"].to_numpy()[:, None], QUANTILES.index(0.5)
    assert (values[:, : middle + 1] <= limit_s).all()
    assert (values <= limit_s + forecaster.grace.overruns_s.max() + 1e-3).all()
    assert (values > limit_s).any()


@pytest.mark.traces
def test_beats_the_best_keyed_baseline_and_covers(forecaster, later, kth):
    quantiles = forecaster.forecast(later, kth).to_numpy()
    actual = JobTable(later).runtime_s
    X = np.asarray(forecaster_features(later, kth))
    best = min(log_error(np.exp(baseline_log(name, X)), actual).mean() for name in BASELINES)
    assert log_error(quantiles[:, QUANTILES.index(0.5)], actual).mean() < 0.95 * best
    inside = (actual >= quantiles[:, 1] - 0.5) & (actual <= quantiles[:, 6] + 0.5)
    assert 0.70 <= inside.mean() <= 0.90


def forecaster_features(jobs, history):
    from features.jobs import job_features

    return job_features(jobs, history).to_numpy()


@pytest.mark.traces
def test_same_seed_same_forecast_whatever_the_threads(forecaster, later, kth, at):
    again = RuntimeForecaster.fit(kth, at, size=SMALL, threads=2)
    assert again.to_files() == forecaster.to_files()
    other = RuntimeForecaster.fit(kth, at, size=SMALL, seed=2)
    assert not other.forecast(later, kth).equals(forecaster.forecast(later, kth))


@pytest.mark.traces
def test_files_bring_the_same_forecaster_back(forecaster, later, kth):
    files = forecaster.to_files()
    assert set(files) == {"runtime.json", "runtime.npz"}
    assert RuntimeForecaster.from_files(files).forecast(later, kth).equals(forecaster.forecast(later, kth))
    described = json.loads(files["runtime.json"])
    described["features"][0] = "phase_of_the_moon"
    with pytest.raises(ValueError, match="phase_of_the_moon"):
        RuntimeForecaster.from_files({**files, "runtime.json": json.dumps(described).encode()})


@pytest.mark.traces
def test_a_job_without_limit_or_history_still_gets_a_forecast(forecaster, later, kth):
    stranger = later[:1].with_columns(user=pl.lit("nobody"), time_limit_s=pl.lit(None, pl.Int64))
    values = forecaster.forecast(stranger, kth).to_numpy()
    assert np.isfinite(values).all()
    assert (np.diff(values) >= 0).all()


def test_too_few_jobs_are_refused_with_both_numbers():
    job = {"job_id": "1", "submit_time": datetime(2026, 1, 1, tzinfo=UTC)}
    with pytest.raises(TooFewJobsError, match="0 jobs had ended, 50 are needed"):
        RuntimeForecaster.fit(pl.DataFrame([job]), job["submit_time"] + DAY)


@pytest.mark.traces
def test_remaining_shrinks_with_the_limit_and_equals_the_runtime_at_the_start(forecaster, later, kth):
    jobs = later[:50]
    start = jobs["submit_time"].max() + DAY
    running = jobs.with_columns(start_time=pl.lit(start), end_time=pl.lit(None, jobs.schema["end_time"]))
    history = JobHistory(kth)
    at_start = forecaster.remaining(running, history, start).to_numpy()
    whole = forecaster.forecast(running, history, start).to_numpy()
    np.testing.assert_allclose(at_start, whole, rtol=1e-6)
    limit = jobs["time_limit_s"].to_numpy()[:, None]
    for elapsed_s in (60, 600, 3_600, 40_000):
        left = forecaster.remaining(running, history, start + timedelta(seconds=elapsed_s)).to_numpy()
        assert (np.diff(left, axis=1) >= 0).all()
        assert (left >= 0).all()
        most = forecaster.grace.overruns_s.max()
        known = elapsed_s < limit[:, 0] + most
        assert (left[known] <= np.maximum(limit[known] - elapsed_s, 0) + most + 1e-3).all()
    waiting = running.with_columns(start_time=pl.lit(None, jobs.schema["start_time"]))
    assert forecaster.remaining(waiting, history, start)["q50_s"].null_count() == 50


def test_remaining_is_the_conditional_distribution():
    """Exponential runtimes forget: what is left is distributed as the whole."""
    levels = np.asarray(LEVELS)
    curve = np.log(np.maximum(-10_000 * np.log(1 - levels), 1))[None, :]
    for elapsed_s in (0.0, 1_000.0, 5_000.0):
        left = remaining_s(curve, np.array([elapsed_s]), np.array([np.nan]), (0.25, 0.5, 0.75))
        np.testing.assert_allclose(left[0], -10_000 * np.log([0.75, 0.5, 0.25]), rtol=0.15)
    past = remaining_s(curve, np.array([900_000.0]), np.array([1_000_000.0]))[0]
    assert (np.diff(past) > 0).all()
    assert past[-1] <= 100_000
    assert (remaining_s(curve, np.array([900_000.0]), np.array([500_000.0]))[0] > 0).all(), (
        "over its limit, still running"
    )


def test_curves_read_back_the_levels_they_were_made_of():
    samples = np.log(np.arange(1, 1001, dtype=np.float64))[None, :]
    curves = pool([samples], [np.ones(1)])
    assert np.exp(curves[0, MEDIAN]) == pytest.approx(500, abs=2)
    assert level_of(curves, np.log([300.0]))[0] == pytest.approx(0.3, abs=0.01)
    assert read_levels(curves, [0.8])[0, 0] == pytest.approx(np.log(800), abs=0.01)
    assert np.exp(cap(curves, np.array([400.0]))).max() == pytest.approx(400)
    mixed = pool([samples, np.full((1, 3), np.nan)], [np.array([0.5]), np.array([0.5])])
    np.testing.assert_array_equal(mixed, curves)
    assert np.isnan(pool([np.full((1, 2), np.nan)], [np.ones(1)])).all()


def test_forest_is_as_good_as_scikit_learns_and_keeps_what_it_saw():
    from sklearn.ensemble import ExtraTreesRegressor

    generator = np.random.default_rng(0)
    X = generator.normal(size=(6_000, 6)).astype(np.float32)
    y = X[:, 0] * 3 + np.abs(X[:, 1]) + generator.normal(size=6_000)
    size = ForestSize(trees=20, min_leaf=5, feature_share=0.5)
    forest = Forest.fit(X[:4_000], y[:4_000], size, seed=5, threads=1)
    theirs = ExtraTreesRegressor(20, min_samples_leaf=5, max_features=0.5, random_state=5).fit(X[:4_000], y[:4_000])
    drawn = forest.draw(X[4_000:])
    assert drawn.shape == (2_000, 80)
    assert np.isin(drawn, y[:4_000].astype(np.float32)).all()
    error = np.sqrt(np.mean((drawn.mean(axis=1) - y[4_000:]) ** 2))
    assert error < 1.05 * np.sqrt(np.mean((theirs.predict(X[4_000:]) - y[4_000:]) ** 2))
    inside = np.mean((y[4_000:] > np.quantile(drawn, 0.1, axis=1)) & (y[4_000:] < np.quantile(drawn, 0.9, axis=1)))
    assert 0.75 < inside < 0.9
    copy = Forest.from_arrays(unpack_arrays(pack_arrays(forest.to_arrays("f_"))), "f_")
    np.testing.assert_array_equal(copy.draw(X), forest.draw(X))


def test_trees_lie_in_preorder_and_no_leaf_is_too_small():
    generator = np.random.default_rng(1)
    X = generator.normal(size=(3_000, 4)).astype(np.float32)
    X[:, 3] = 1.0  # splits nothing
    X[::7, 2] = np.nan
    y = generator.normal(size=3_000)
    forest = Forest.fit(
        X, y, ForestSize(trees=3, min_leaf=7, feature_share=0.25, rows_per_tree=2_500), seed=2, threads=2
    )
    filled = np.where(np.isnan(X), np.float32(-9), X)
    leaves = forest.leaves(X)
    for tree, root in enumerate(forest.roots):
        for row in range(0, 3_000, 97):
            node = root
            while forest.feature[node] >= 0:
                goes_left = filled[row, forest.feature[node]] <= forest.threshold[node]
                node = node + 1 if goes_left else root + forest.right[node]
            assert leaves[row, tree] == forest.right[node]
    assert np.unique(leaves, return_counts=True)[1].min() >= 4  # of the 2,500 drawn at least 7, of all 3,000 about 8
    assert not (forest.feature == 3).any()
    flat = Forest.fit(X, np.ones(3_000), ForestSize(trees=2), seed=1, threads=1)
    assert (flat.draw(X[:5]) == 1).all()
    with pytest.raises(ValueError, match="0 rows of features and 0 targets"):
        Forest.fit(X[:0], y[:0], ForestSize(), seed=1, threads=1)


def test_the_mode_is_the_point_that_most_weight_lies_within_a_quarter_of():
    generator = np.random.default_rng(3)
    samples = np.log(
        np.concatenate([generator.uniform(95, 105, (4, 60)), generator.uniform(1_000, 90_000, (4, 80))], 1)
    )
    made = pool_points([samples], [np.ones(4)], np.full(4, np.inf))
    curves, modes = made.curves, made.modes
    assert np.exp(curves[:, MEDIAN]).min() > 500
    assert ((np.exp(modes) > 90) & (np.exp(modes) < 112)).all()
    far = np.log(np.full((4, 1), 50_000.0))
    moved = pool_points(
        [samples, far], [np.ones(4), np.zeros(4)], np.full(4, np.inf), [np.ones(4), np.full(4, 9.0)]
    ).modes
    assert (np.exp(moved) > 30_000).all()
    actual = np.exp(samples[0])
    best = max(np.mean(is_within(np.full(140, x), actual, 0.25)) for x in np.exp(np.linspace(4, 12, 4_000)))
    assert np.mean(is_within(np.full(140, np.exp(modes[0])), actual, 0.25)) >= best - 1e-9


def test_the_centre_gives_up_little_error_for_more_within_a_factor_of_two():
    samples = np.log(np.r_[np.full(49, 100.0), 260.0, np.geomspace(300, 90_000, 50)])[None, :]
    made = pool_points([samples], [np.ones(1)], np.full(1, np.inf))

    def error(x):
        return np.abs(samples[0] - x).mean()

    def within(x):
        return (np.abs(samples[0] - x) <= np.log(2) + 1e-9).mean()

    assert np.exp(made.curves[0, MEDIAN]) == pytest.approx(260)
    for gain, centre in zip(CENTRE_GAINS, made.centres[0], strict=True):
        best = min(error(x) - gain * within(x) for x in samples[0])
        assert error(centre) - gain * within(centre) == pytest.approx(best)
        assert within(centre) > within(made.curves[0, MEDIAN]) + 0.2
        assert error(centre) < 1.03 * error(made.curves[0, MEDIAN])
    moved = centred(made.curves, made.centres[:, 0])
    assert (np.diff(moved, axis=1) >= 0).all()
    assert choose_centre(made, np.log([100.0])) == len(CENTRE_GAINS) - 1
    assert choose_centre(made, np.log([260.0])) == -1


def test_a_correction_learnt_from_one_burst_is_shrunk():
    generator = np.random.default_rng(0)
    centre = generator.normal(5, 1, 2_000)
    actual = centre + generator.normal(0, 1.0, 2_000)
    from statistics import NormalDist

    narrow = centre[:, None] + 0.4 * np.array([NormalDist().inv_cdf(float(level)) for level in LEVELS])
    whole = Conformal.fit(narrow, actual).apply(narrow)
    many = Conformal.fit(narrow, actual, np.arange(2_000)).apply(narrow)
    burst = Conformal.fit(narrow, actual, np.zeros(2_000)).apply(narrow)
    width = [(curves[:, -1] - curves[:, 0]).mean() for curves in (narrow, burst, many, whole)]
    assert width[0] < width[1] < 1.15 * width[0] < width[2] < width[3]
    assert effective_count(np.repeat([1, 2], 50)) == 2


def test_weights_follow_the_outcomes_only_as_far_as_they_tell():
    generator = np.random.default_rng(0)
    n = 600
    X = np.full((n, len(FEATURES)), np.nan, dtype=np.float32)
    y = generator.normal(6, 1, n)
    good, bad = (y[:, None] + generator.normal(shift, 0.1, (n, 9)) for shift in (0, 2))
    samples = [bad, good, *past_samples(X)]
    limit_s = np.full(n, np.nan)
    sure, losses = choose_mix(samples, X, y, limit_s, np.arange(n))
    unsure, _ = choose_mix(samples, X, y, limit_s, np.zeros(n))
    assert sure.ratio > 0.99
    assert losses["chosen"] < losses["default"]
    assert 0.5 < unsure.ratio < sure.ratio
    assert pooled(samples, X, sure, limit_s).curves.shape == (n, len(LEVELS))


def test_jobs_that_run_into_their_limit_are_forecast_there():
    """Users 0–3 always run into the limit, half of user 4's do; the others end far before it."""
    generator = np.random.default_rng(0)
    rows, now = [], datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(3_000):
        now += timedelta(seconds=float(generator.exponential(600)))
        user = int(generator.integers(10))
        limit_s = int(generator.choice([3_600, 7_200, 14_400]))
        hits = user < 4 or (user == 4 and generator.random() < 0.5)
        run_s = limit_s if hits else float(np.exp(generator.normal(5, 0.5)))
        rows.append({
            "job_id": str(number), "user": f"u{user}", "cpus": 8, "time_limit_s": limit_s, "submit_time": now,
            "start_time": now, "end_time": now + timedelta(seconds=run_s), "state": "TIMEOUT" if hits else "COMPLETED",
        })  # fmt: skip
    jobs = pl.DataFrame(rows)
    forecaster = RuntimeForecaster.fit(jobs, jobs["submit_time"][2_600], size=SMALL)
    later = jobs[2_650:]
    frame = forecaster.forecast(later, jobs)
    number, limit = later["user"].str.slice(1).cast(int).to_numpy(), later["time_limit_s"].to_numpy()
    share = frame["q50_s"].to_numpy() / limit
    assert np.quantile(share[number < 4], 0.1) > 0.95
    assert np.median(frame["q90_s"].to_numpy()[number == 4] / limit[number == 4]) == pytest.approx(1)
    assert np.median(frame["q10_s"].to_numpy()[number == 4]) < 400
    assert np.quantile(share[number > 4], 0.9) < 0.3


def test_arrays_refuse_objects_and_rubbish():
    with pytest.raises(ArraysError, match="'x' holds Python objects"):
        pack_arrays({"x": np.array([{}])})
    packed = pack_arrays({"x": np.arange(3)})
    assert packed == pack_arrays({"x": np.arange(3)})
    for rubbish in (b"", b"PK", packed[: len(packed) // 2]):
        with pytest.raises(ArraysError):
            unpack_arrays(rubbish)
    with pytest.raises(ArraysError, match="lacks y; it has x"):
        unpack_arrays(packed, "y")


def test_conformal_repairs_curves_that_are_too_narrow_and_leaves_the_median():
    generator = np.random.default_rng(0)
    centre = generator.normal(5, 1, 4_000)
    actual = centre + generator.normal(0, 1.0, 4_000)
    from statistics import NormalDist

    narrow = centre[:, None] + 0.4 * np.array([NormalDist().inv_cdf(float(level)) for level in LEVELS])
    conformal = Conformal.fit(narrow[:2_000], actual[:2_000])
    fixed = conformal.apply(narrow[2_000:])
    assert (np.diff(fixed, axis=1) >= 0).all()
    np.testing.assert_array_equal(fixed[:, MEDIAN], narrow[2_000:, MEDIAN])
    for level in (0.1, 0.25, 0.75, 0.9, 0.95):
        share = (actual[2_000:] <= read_levels(fixed, [level])[:, 0]).mean()
        assert share == pytest.approx(level, abs=0.03)
    raw = (actual[2_000:] <= read_levels(narrow[2_000:], [0.9])[:, 0]).mean()
    assert raw < 0.75
    few = Conformal.fit(narrow[:10], actual[:10])
    np.testing.assert_allclose(few.apply(narrow[:5]), narrow[:5])


def test_isotonic_map_rises_and_calibrates():
    generator = np.random.default_rng(0)
    raw = generator.random(5_000)
    happened = generator.random(5_000) < raw**2
    fitted = Isotonic.fit(raw, happened)
    assert (np.diff(fitted.calibrated) >= 0).all()
    assert np.abs(fitted.apply(np.array([0.3, 0.6, 0.9])) - np.array([0.09, 0.36, 0.81])).max() < 0.05
    assert 0 < fitted.apply(np.array([0.0]))[0] < fitted.apply(np.array([1.0]))[0] < 1
    assert Isotonic.fit(raw[:5], happened[:5]).apply(np.array([0.4]))[0] == 0.4


def test_keyed_recency_speaks_where_it_did_better():
    """A worthless model loses the choice, by stratum where there are enough jobs."""
    X = np.full((400, len(FEATURES)), np.nan, dtype=np.float32)
    y = np.random.default_rng(0).normal(6, 1, 400)
    X[:, FEATURES.index("key_last2")] = y + 0.1
    X[:, FEATURES.index("key_count")] = np.where(np.arange(400) < 200, 1.0, 0.0)
    X[:, FEATURES.index("user_count")] = 1.0
    X[200:, FEATURES.index("user_last2")] = y[200:] + 3
    X[200:, FEATURES.index("key_last2")] = np.nan
    recency = KeyedRecency("last2_key", np.zeros((3, len(LEVELS))), {})
    curves = np.tile((y + 1)[:, None], (1, len(LEVELS)))
    is_recency, named = choose_expert(curves, recency, X, y)
    assert is_recency.tolist()[:2] == [True, False]
    assert named["key"] == "last2_key"
    assert named["user"] == "model"


def test_scores_against_hand_and_scikit_learn():
    from sklearn.metrics import roc_auc_score

    forecast, actual = np.array([100.0, 10.0, 0.2]), np.array([125.0, 100.0, 0.5])
    np.testing.assert_allclose(log_error(forecast, actual), [np.log(1.25), np.log(10), 0.0])
    assert is_within(forecast, actual, 0.25).tolist() == [True, False, False]
    assert is_within_factor(forecast, actual, 2.0).tolist() == [True, False, True]
    pinball = log_pinball(np.exp(np.array([[1.0, 3.0]])), np.exp(np.array([2.0])), (0.1, 0.9))
    assert pinball[0] == pytest.approx((0.1 * 1 + 0.1 * 1) / 2)
    generator = np.random.default_rng(0)
    score, happened = generator.integers(0, 5, 200) / 4, generator.random(200) < 0.3
    assert auroc(score, happened) == pytest.approx(roc_auc_score(happened, score))
    assert auroc(score, np.zeros(200)) is None

"""Bottleneck forecasters: rows and outcomes, the hazard, its baselines, its scores, and training without leaks."""

from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from features.conditions import CLASSES
from features.history import SampleHistory
from features.unit_conditions import UNIT_CLASSES
from features.unit_windows import UNIT_FEATURES
from features.windows import FEATURE_INDEX, FEATURES, FeatureBlock
from models.bottleneck import USED, HazardForecaster, ModelFileError
from models.naive_onsets import NAMES, NaiveOnsets
from models.onset_scores import alarms, all_rows, average_precision, brier, skill
from models.onsets import HORIZONS_S, Rows, course, sample_rows, screen_recall
from models.registry import Registry
from models.training_hardware import train_bottleneck, train_bottleneck_again
from models.trend import TrendForecaster, normal_cdf
from tests.gpu_samples import BOOK, H100, at, frame, gang, set_temp

THERMAL = "thermal_throttle"


def courses_of_heat(hours=10, gpus=32, seed=1):
    """Arrays in which GPUs warm up again and again: one time in three to the limit and over it, else to just below."""
    rng = np.random.default_rng(seed)
    arrays = gang(
        seconds=int(hours * 3600), gpus=gpus, seed=seed, job=None
    )  # GPUs that have nothing to do with another
    ts = arrays["ts"]
    for gpu in range(gpus):
        temp = 72 + rng.normal(0, 0.8, len(ts))
        start = rng.uniform(600, 3000)
        while start < ts[-1]:
            pace, top = rng.uniform(0.03, 0.12), rng.choice([84.0, 84.0, 90.0])
            hold = start + (top - 72) / pace + rng.uniform(120, 400)
            up = np.clip((ts - start) * pace, 0, top - 72)
            temp += np.where(ts < hold, up, np.maximum(up - (ts - hold) * 0.2, 0)) * (ts >= start) * (ts < hold + 200)
            start = hold + rng.uniform(900, 4000)
        set_temp(arrays, gpu, np.floor(temp))
    return arrays


@pytest.fixture(scope="module")
def heat():
    return SampleHistory(frame(courses_of_heat()), BOOK)


@pytest.fixture(scope="module")
def heat_course(heat):
    return course(heat, THERMAL, BOOK)


@pytest.fixture(scope="module")
def model(heat, heat_course):
    begin = heat.ts.min()
    train = sample_rows(heat, heat_course, begin, begin + 7 * 3600, seed=1, max_quiet=4000)
    return train, HazardForecaster.fit({THERMAL: train}, seed=1, threads=1, rounds=60)


@pytest.fixture(scope="module")
def judged(heat, heat_course):
    begin, end = heat.ts.min() + 7.2 * 3600, heat.ts.max()
    return all_rows(heat, heat_course, begin, end), begin, end


# --- rows and outcomes ------------------------------------------------------------------------------------


def test_outcomes_by_brute_force(heat, heat_course):
    rows = sample_rows(heat, heat_course, heat.ts.min(), heat.ts.max(), seed=3, max_quiet=300, max_ahead=300)
    onset = {gpu: heat.ts[[r for r in heat_course.onset_row if heat.gpu[r] == gpu]] for gpu in range(len(heat.uuids))}
    end = {gpu: heat.ts[heat.gpu == gpu].max() for gpu in onset}
    assert len(rows) > 400
    for i in range(len(rows)):
        gpu, moment = rows.block.gpus[i], rows.block.at_s[i]
        later = onset[gpu][onset[gpu] > moment - 15]
        want = later[0] - moment if len(later) else np.inf
        assert rows.onset_in_s[i] == pytest.approx(want)
        assert rows.known_s[i] == pytest.approx(end[gpu] - moment, abs=8)
        row = heat.last_at(np.array([gpu]), np.array([moment]))[0]
        assert heat_course.state[row] == 0  # at risk: not in the condition
        assert 0 <= moment - heat.ts[row] < 15


def test_weights_stand_for_all_rows(heat, heat_course):
    begin, end = heat.ts.min(), heat.ts.max()
    everything = all_rows(heat, heat_course, begin, end)
    assert set(everything.weight) == {1.0}
    some = sample_rows(heat, heat_course, begin, end, seed=5, max_quiet=1500)
    assert len(some) < len(everything) / 2
    assert some.weight.sum() == pytest.approx(len(everything), rel=0.05)
    came, _ = everything.outcome(120)
    came_some, _ = some.outcome(120)
    assert came_some.sum() == pytest.approx(came.sum(), rel=0.1)  # rows ahead of an onset are all kept


def test_person_periods_stop_at_the_onset_and_at_what_is_unknown():
    block = FeatureBlock(THERMAL, np.arange(3), np.zeros(3), np.zeros((3, len(FEATURES)), np.float32))
    rows = Rows(
        block,
        np.zeros(3, np.int64),
        np.zeros(3, np.int64),
        np.array([70.0, np.inf, np.inf]),
        np.array([1e9, 1e9, 65.0]),
        np.ones(3),
    )
    row, interval, came = rows.person_periods()
    got = sorted(zip(row.tolist(), interval.tolist(), came.tolist(), strict=True))
    assert got == [
        (0, 0, 0.0), (0, 1, 0.0), (0, 2, 1.0),  # the onset in (60, 90], and nothing after it
        (1, 0, 0.0), (1, 1, 0.0), (1, 2, 0.0), (1, 3, 0.0),
        (2, 0, 0.0), (2, 1, 0.0),  # lost from sight after 65 s
    ]  # fmt: skip
    assert rows.outcome(90)[1].tolist() == [True, True, False]


def test_unknown_and_drained_samples_are_censored():
    arrays = gang(seconds=1800)
    set_temp(arrays, 0, np.where(arrays["ts"] >= 1500, 88.0, 81.0))
    samples = frame(arrays)
    whole = SampleHistory(samples, BOOK)
    drained = pl.DataFrame(
        {"node": ["n0"], "start": [at(1200)], "end": [None]}, schema_overrides={"end": pl.Datetime("us", "UTC")}
    )
    seen = all_rows(whole, course(whole, THERMAL, BOOK), whole.ts.min(), whole.ts.max())
    assert np.isfinite(seen.onset_in_s).any()
    hidden = all_rows(whole, course(whole, THERMAL, BOOK, drained), whole.ts.min(), whole.ts.max())
    assert np.isinf(hidden.onset_in_s).all()
    assert (hidden.block.at_s + hidden.known_s <= at(1200).timestamp() + 15).all()


def test_screen_recall_counts_onsets_that_were_near_before(heat, heat_course):
    seen, total = screen_recall(heat, heat_course, heat.ts.min(), heat.ts.max())
    assert total == len(heat_course.onset_row) > 50
    assert seen == total


# --- forecasts --------------------------------------------------------------------------------------------


def test_the_hazard_beats_every_baseline_on_later_time(heat, heat_course, model, judged):
    train, forecaster = model
    rows, begin, end = judged
    naive = NaiveOnsets(train)
    given = {name: brier(rows, naive.forecast(name, rows.block)) for name in NAMES}
    given["trend"] = brier(rows, TrendForecaster().forecast(rows.block))
    best, gain = skill(brier(rows, forecaster.forecast(rows.block)), given)
    assert best in given
    assert (gain > 0.1).all()
    found = alarms(heat, heat_course, rows, forecaster.forecast(rows.block), begin, end)
    assert found.onsets > 15
    assert found.precision > 0.4  # two of three courses stop short of the limit
    assert found.recall > 0.6
    assert found.lead_s > 20


def test_probabilities_never_fall_with_the_horizon_and_are_calibrated(model, judged):
    _, forecaster = model
    rows, _, _ = judged
    p = forecaster.forecast(rows.block)
    assert (np.diff(p, axis=1) >= 0).all()
    assert ((p > 0) & (p < 1)).all()
    came, known = rows.outcome(120)
    for low, high in ((0.0, 0.2), (0.2, 0.7), (0.7, 1.0)):
        inside = known & (p[:, -1] >= low) & (p[:, -1] < high)
        assert inside.sum() > 20
        assert came[inside].mean() == pytest.approx(p[inside, -1].mean(), abs=0.15)


def test_a_class_that_was_not_learned_is_forecast_by_the_trend(model):
    _, forecaster = model
    block = FeatureBlock("memory_exhaustion", np.arange(4), np.zeros(4), np.ones((4, len(FEATURES)), np.float32))
    np.testing.assert_array_equal(forecaster.forecast(block), TrendForecaster().forecast(block))
    empty = FeatureBlock(THERMAL, np.arange(0), np.zeros(0), np.zeros((0, len(FEATURES)), np.float32))
    assert forecaster.forecast(empty).shape == (0, 4)


def test_files_carry_the_model_and_wrong_ones_are_refused(model, judged):
    _, forecaster = model
    rows, _, _ = judged
    files = forecaster.to_files()
    again = HazardForecaster.from_files(files, "v")
    assert again.version == "v"
    np.testing.assert_array_equal(again.forecast(rows.block), forecaster.forecast(rows.block))
    with pytest.raises(ModelFileError, match=r"hazard\.json is missing"):
        HazardForecaster.from_files({})
    with pytest.raises(ModelFileError, match=r"thermal_throttle\.txt"):
        HazardForecaster.from_files({"hazard.json": files["hazard.json"]})
    with pytest.raises(ModelFileError, match="other features"):
        HazardForecaster.from_files({"hazard.json": b'{"format": 1, "features": []}'})
    shorter = files["hazard.json"].replace(b'"format": 4', b'"format": 3')  # windows that say nothing of motion
    with pytest.raises(ModelFileError, match="format 3; train again"):
        HazardForecaster.from_files({**files, "hazard.json": shorter})
    with pytest.raises(ModelFileError, match=r"thermal_throttle\.txt"):
        HazardForecaster.from_files({**files, "thermal_throttle.txt": b"tree\n"})


def test_models_use_only_features_that_exist():
    assert set(USED) == {*CLASSES, *UNIT_CLASSES}
    for bottleneck_class, names in USED.items():
        assert set(names) <= set(UNIT_FEATURES.get(bottleneck_class, FEATURES))
        assert len(names) == len(set(names))


def block(name=THERMAL, **columns):
    n = len(next(iter(columns.values())))
    matrix = np.full((n, len(FEATURES)), np.nan, dtype=np.float32)
    for column, values in columns.items():
        matrix[:, FEATURE_INDEX[column]] = values
    return FeatureBlock(name, np.arange(n), np.zeros(n), matrix)


def test_the_trend_knows_a_ramp_from_a_start_and_a_return():
    steady = {"last": [4.0], "slope_short": [-0.2], "residual_short": [0.5], "data_age_s": [2.0], "job_age_s": [3600.0]}
    p = TrendForecaster().forecast(block(**steady, new_low=[-8.0]))[0]
    assert p[-1] > 0.7
    assert (np.diff(p) >= 0).all()
    for change in (
        {"new_low": [-0.5]},
        {"new_low": [-8.0], "job_age_s": [60.0]},
        {"new_low": [-8.0], "slope_short": [0.1]},
    ):
        assert TrendForecaster().forecast(block(**{**steady, **change}))[0, -1] <= 0.05
    full = {"last": [0.5], "slope_short": [-0.05], "new_low": [-3.0], "data_age_s": [2.0], "job_age_s": [3600.0]}
    grown = TrendForecaster().forecast(block("memory_exhaustion", **full, over_plateau_gib_last=[6.0]))
    cache = TrendForecaster().forecast(block("memory_exhaustion", **full, over_plateau_gib_last=[0.0]))
    assert grown[0, -1] > 0.5 > cache[0, -1]
    # A job that has just filled up to its plateau grew as fast as one that leaks, but hardly beyond it.
    filling = full | {"last": [7.9], "slope_short": [-0.114], "job_age_s": [240.0]}
    filled = TrendForecaster().forecast(block("memory_exhaustion", **filling, over_plateau_gib_last=[0.3]))
    leaking = TrendForecaster().forecast(block("memory_exhaustion", **filling, over_plateau_gib_last=[6.0]))
    assert filled[0, -1] < 0.01
    assert leaking[0, -1] > 0.4
    links = {"last": [0.1], "slope_short": [-0.005], "new_low": [-0.4], "data_age_s": [2.0], "job_age_s": [3600.0]}
    slowing = TrendForecaster().forecast(block("nvlink_saturation", **links, step_ratio_last=[1.1]))
    at_pace = TrendForecaster().forecast(block("nvlink_saturation", **links, step_ratio_last=[1.0]))
    assert slowing[0, -1] > 0.5 > at_pace[0, -1]
    with pytest.raises(ValueError, match="thermal_throttle"):
        TrendForecaster().forecast(block("heat", last=[1.0]))
    assert TrendForecaster().forecast(block(last=[np.nan])).max() < 0.01


def test_normal_cdf_against_the_error_function():
    from math import erf, sqrt

    z = np.linspace(-5, 5, 101)
    want = [0.5 * (1 + erf(v / sqrt(2))) for v in z]
    np.testing.assert_allclose(normal_cdf(z), want, atol=1e-6)


# --- scores -----------------------------------------------------------------------------------------------


def test_average_precision_against_sklearn(judged):
    from sklearn.metrics import average_precision_score

    rows, _, _ = judged
    rng = np.random.default_rng(0)
    p = np.tile(np.round(rng.random(len(rows)), 2)[:, None], (1, 4))  # with ties
    came, known = rows.outcome(120)
    want = average_precision_score(came[known], p[known, -1])
    assert average_precision(rows, p) == pytest.approx(want)


def test_alarms_by_hand():
    arrays = gang(seconds=3600, gpus=2)
    set_temp(arrays, 0, np.where((arrays["ts"] >= 1800) & (arrays["ts"] < 2400), 88.0, 82.0))
    set_temp(arrays, 1, np.full(len(arrays["ts"]), 82.0))
    history = SampleHistory(frame(arrays), BOOK)
    of = course(history, THERMAL, BOOK)
    begin, end = history.ts.min(), history.ts.max()
    rows = all_rows(history, of, begin, end)
    second = rows.block.at_s - begin

    def count(raised):
        p = np.tile(np.where(raised, 0.9, 0.1)[:, None], (1, len(HORIZONS_S)))
        return alarms(history, of, rows, p, begin, end, is_forecastable=np.ones(len(of.onset_row), dtype=bool))

    first = rows.block.gpus == 0
    good = count(first & (second > 1700) & (second < 1800))
    assert (good.raised, good.right, good.events, good.caught) == (1, 1, 1, 1)
    assert 70 < good.lead_s <= 100
    assert good.forecastable_recall == good.recall == good.precision == 1
    wrong = count(~first & (second > 1700) & (second < 1800))
    assert (wrong.raised, wrong.right, wrong.caught) == (1, 0, 0)
    early = count(first & (second > 1000) & (second < 1100))
    assert (early.raised, early.right, early.caught) == (1, 0, 0)
    two = count(first & (((second > 900) & (second < 960)) | ((second > 1740) & (second < 1800))))
    assert (two.raised, two.right, two.precision) == (2, 1, 0.5)


def test_what_befalls_a_gang_is_one_event_and_weighs_as_one():
    arrays = gang(seconds=3600, gpus=16)
    for name in ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"):
        ramp = np.clip((arrays["ts"] - 1500) / 300, 0, 1) * (arrays["ts"] < 2400)
        arrays[name] = (0.62 + 0.33 * ramp[:, None] + np.zeros(16)) * 450e9 * 0.83
    arrays["step_time_s"] = 1 + 0.3 * ramp[:, None] + np.zeros(16)
    history = SampleHistory(frame(arrays), BOOK)
    of = course(history, "nvlink_saturation", BOOK)
    begin, end = history.ts.min(), history.ts.max()
    rows = all_rows(history, of, begin, end)
    assert len(of.onset_row) == 16
    assert set(rows.weight) == {1 / 16}
    close = (rows.onset_in_s <= 60) & (rows.block.gpus < 12)
    p = np.tile(np.where(close, 0.9, 0.1)[:, None], (1, len(HORIZONS_S)))
    found = alarms(history, of, rows, p, begin, end)
    assert (found.raised, found.right, found.events, found.caught) == (1, 1, 1, 1)
    assert (found.onsets, found.onsets_caught) == (16, 12)
    few = np.tile(np.where(close & (rows.block.gpus < 4), 0.9, 0.1)[:, None], (1, len(HORIZONS_S)))
    assert alarms(history, of, rows, few, begin, end).caught == 0  # less than half of the gang was warned


# --- training ---------------------------------------------------------------------------------------------


def inventory():
    return pl.DataFrame({"node": [f"n{i}" for i in range(40)], "gpu_model": [H100] * 40})


def test_forecasts_do_not_see_later_samples(model):
    """Every sample after a moment is scrambled; features and forecasts made for it stay identical."""
    _, forecaster = model
    samples = frame(courses_of_heat(hours=2, seed=4))
    moment = at(5400)
    later = pl.col("ts") > moment
    scrambled = samples.with_columns(
        *(pl.when(later).then(pl.col(c).shuffle(seed=1) * 0.5).otherwise(c).alias(c)
          for c in ("gpu_temp_c", "gpu_temp_margin_c", "fb_used_bytes", "nvlink_tx_bytes_per_s", "step_time_s")),
        pl.when(later).then(pl.lit("other")).otherwise("job_id").alias("job_id"),
        pl.when(later).then(~pl.col("is_thermal_slowdown")).otherwise("is_thermal_slowdown").alias("is_thermal_slowdown"),
    )  # fmt: skip
    blocks = []
    for rows in (samples, scrambled, samples.filter(~later)):
        history = SampleHistory(rows, BOOK)
        gpus = np.arange(len(history.uuids))
        blocks.append(history.features(gpus, np.full(len(gpus), moment.timestamp()), THERMAL))
    for other in blocks[1:]:
        np.testing.assert_array_equal(other.matrix, blocks[0].matrix)
        np.testing.assert_array_equal(forecaster.forecast(other), forecaster.forecast(blocks[0]))


def test_training_keeps_a_version_that_can_be_made_again_and_never_looks_ahead(tmp_path):
    samples = frame(courses_of_heat(hours=9, gpus=40, seed=2), node_of=1)  # 40 nodes: enough independent looks
    moment = samples["ts"].max()
    ahead = samples.filter(pl.col("ts") > moment - timedelta(hours=1)).with_columns(
        pl.col("ts") + timedelta(hours=1), (pl.col("gpu_temp_margin_c") - 20).alias("gpu_temp_margin_c")
    )
    reports = []
    for name, rows in (("a", samples), ("b", pl.concat([samples, ahead]))):
        registry = Registry(tmp_path / name)
        reports.append(train_bottleneck(rows, None, inventory(), registry, moment, cluster="c", seed=3))
    report, other = reports
    assert report.version is not None
    assert report.promoted
    assert Registry(tmp_path / "a").champion("bottleneck") == report.version
    assert report.facts["classes"] == [THERMAL]
    loaded = Registry(tmp_path / "a").load("bottleneck", report.version)
    again = Registry(tmp_path / "b").load("bottleneck", other.version)
    assert loaded.files == again.files  # what came after the moment changed nothing
    made = train_bottleneck_again(Registry(tmp_path / "a"), report.version)
    assert made.to_files() == dict(loaded.files)
    assert loaded.card["onsets"][THERMAL] > 30
    assert {"brier_120s", "recall_120s", "precision_120s", "lead_s", "screen_recall", "brier_skill_30s"} <= {
        metric.split(".")[1] for metric in report.scores["metric"].to_list() if metric.startswith(THERMAL)
    }
    assert set(report.scores["baseline"]) >= {"", "trend", *NAMES}
    # The same night again: the champion has seen the newest samples, nothing is promoted on them.
    repeat = train_bottleneck(samples, None, inventory(), Registry(tmp_path / "a"), moment, cluster="c", seed=4)
    assert not repeat.promoted
    assert "has seen the newest samples" in repeat.reason


def test_too_little_to_learn_from_leaves_the_trend(tmp_path):
    registry = Registry(tmp_path)
    quiet = train_bottleneck(frame(gang(seconds=9000)), None, inventory(), registry, at(9000))
    assert (quiet.version, quiet.promoted) == (None, False)
    assert "trend stays" in quiet.reason
    short = train_bottleneck(frame(gang(seconds=600)), None, inventory(), registry, at(600))
    assert "span" in short.reason
    none = train_bottleneck(frame(gang(seconds=600)), None, inventory(), registry, at(-1))
    assert "no samples" in none.reason
    assert registry.champion("bottleneck") is None

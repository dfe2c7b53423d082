"""Courses of levels: heat by physics, windows live as over history, quantiles, training, and hints with them."""

import json

import msgspec
import numpy as np
import polars as pl
import pytest

from features.conditions import INDEX
from features.heat import heat_of
from features.history import SampleHistory
from features.level_windows import HORIZONS_S, LEVELS, OF_CLASS, level_block
from features.telemetry import RingWindow
from models import level_course, training_levels
from models.forest import ForestSize
from models.level_course import LevelCourseError, LevelCourses, Standing
from models.level_rows import course_rows, rows_at
from models.registry import Registry
from models.training_levels import coverage, losses, train_level, train_level_again
from tests.gpu_samples import BOOK, GIB, at, frame, gang, set_temp
from tests.test_nowcast import World, hot, inventory

TEMP = "gpu_temp_c"
LAG_S, RISE, AIR = 30.0, 0.06, 28.0


@pytest.fixture(autouse=True, scope="module")
def small_forests():
    """A quarter of the trees: what is tested is not how well they do on a large cluster."""
    size, level_course.SIZE = level_course.SIZE, ForestSize(12, 12, 0.5, 4_000)
    yield
    level_course.SIZE = size


def working(hours=5.0, gpus=12, seed=1, interval_s=15.0, high=640.0, missing=0.0):
    """GPUs whose power steps between work and checkpoints that last a minute; heat follows through its lag."""
    rng = np.random.default_rng(seed)
    arrays = gang(seconds=int(hours * 3600), gpus=gpus, seed=seed, interval_s=interval_s, job=None)
    ts = arrays["ts"]
    for gpu in range(gpus):
        into = (ts + rng.uniform(0, 300)) % rng.uniform(280, 330)
        power = np.where(into < 60, 0.3 * high, high) + rng.normal(0, 2, len(ts))
        flow, temp = power[0], np.empty(len(ts))
        for i in range(len(ts)):
            flow += (power[i] - flow) * -np.expm1(-interval_s / LAG_S)
            temp[i] = AIR + RISE * 640 / high * flow
        arrays["gpu_power_w"][:, gpu] = power
        arrays["sm_active_ratio"][:, gpu] = np.where(into < 60, 0.1, 0.95)
        set_temp(arrays, gpu, np.round(temp))
    samples = frame(arrays, node_of=4)
    return samples.filter(pl.Series(rng.random(samples.height) >= missing))


@pytest.fixture(scope="module")
def train():
    return SampleHistory(working(missing=0.2), BOOK)


@pytest.fixture(scope="module")
def model(train):
    rows = {name: course_rows(train, name, -np.inf, np.inf, count=3_000) for name in (TEMP, "gpu_power_w")}
    return LevelCourses.fit(rows)


@pytest.fixture(scope="module")
def test_rows():
    """Another seed, another GPU of half the power, other sampling."""
    other = SampleHistory(working(hours=2, seed=7, interval_s=10.0, high=320.0, missing=0.2), BOOK)
    return course_rows(other, TEMP, -np.inf, np.inf, count=1_500, seed=3, screened_share=0.0)


# --- physics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inlet", [None, 24.0])
def test_heat_finds_rise_lag_and_air(inlet):
    t = np.arange(-600.0, 1.0, 5.0)
    power = np.where((t > -400) & (t < -200), 200.0, 600.0)
    flow, temp = power[0], []
    for watt in power:
        flow += (watt - flow) * -np.expm1(-5.0 / 25.0)
        temp.append(30.0 + 0.06 * flow)
    power = np.where(np.random.default_rng(1).random(len(t)) < 0.2, np.nan, power)  # missing ones are not zeros
    power[-1] = 600.0
    air = np.full((1, len(t)), np.nan if inlet is None else inlet)
    heat = heat_of(np.round(temp)[None], power[None], air, t[None])
    assert heat.rise_k_per_w[0] == pytest.approx(0.06, rel=0.1)
    assert heat.air_c[0] == pytest.approx(30.0, abs=2.5)
    assert heat.lag_s[0] == 25.0
    assert heat.ahead(np.array([200.0]), np.array([600.0]))[0] == pytest.approx(42.0, abs=1.5)
    first = heat.ahead(np.array([200.0]), np.array([25.0]))[0]  # 63 % of the way after one lag
    assert first == pytest.approx(66 - 0.63 * 24, abs=1.5)


def test_heat_of_a_steady_gpu_rests_on_what_is_usual_and_of_none_on_nothing():
    t = np.arange(-600.0, 1.0, 15.0)[None]
    steady = heat_of(np.full(t.shape, 60.0), np.full(t.shape, 600.0), np.full(t.shape, np.nan), t)
    assert steady.ahead(np.array([600.0]), np.array([60.0]))[0] == pytest.approx(60.0, abs=0.1)
    assert 0.03 < steady.rise_k_per_w[0] < 0.12
    none = heat_of(np.full(t.shape, 60.0), np.full(t.shape, np.nan), np.full(t.shape, np.nan), t)
    assert np.isnan(none.ahead(np.array([600.0]), np.array([60.0]))[0])


# --- windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", list(LEVELS))
def test_live_and_history_say_the_same_of_a_level(quantity):
    samples = working(hours=0.4, gpus=4, missing=0.2)
    ring = RingWindow(BOOK)
    for (_,), part in samples.sort("ts").group_by(["ts"], maintain_order=True):
        ring.observe(part)
    history = SampleHistory(samples, BOOK)
    gpus = np.arange(4)
    moment = np.full(4, float(history.ts.max()) + 4.0)
    last = history.last_at(history.gpu_codes(pl.Series(ring.uuids)), moment)
    live = level_block(quantity, ring.windows(gpus), moment)
    past = rows_at(history, quantity, last, moment).block
    assert live.names == past.names
    np.testing.assert_allclose(live.matrix, past.matrix, rtol=1e-4, atol=2e-4)  # rings keep steps
    for name in live.naive:
        np.testing.assert_allclose(live.naive[name], past.naive[name], rtol=1e-3)


def test_nothing_later_enters_a_row_and_outcomes_are_the_nearest_samples():
    samples = working(hours=0.6, gpus=2, missing=0.2)
    whole = SampleHistory(samples, BOOK)
    cut = at(0.4 * 3600)
    part = SampleHistory(samples.filter(pl.col("ts") < cut), BOOK)
    rows = np.flatnonzero((part.ts > part.ts.min() + 400) & (part.gpu == 0))[-5:]
    moments = part.ts[rows]
    for quantity in LEVELS:
        mine, other = (rows_at(h, quantity, rows, moments) for h in (part, whole))
        np.testing.assert_array_equal(mine.block.matrix, other.block.matrix)
    one = whole.gpu == 0
    for k, horizon_s in enumerate(HORIZONS_S):
        for i in range(5):
            gap = np.abs(whole.ts[one] - moments[i] - horizon_s)
            want = whole.values[INDEX[TEMP]][one][gap.argmin()] if gap.min() <= max(7.5, 0.1 * horizon_s) else np.nan
            np.testing.assert_equal(rows_at(whole, TEMP, rows, moments).came[i, k], want)
    assert np.isnan(rows_at(part, TEMP, rows[-1:], moments[-1:]).came).all()
    with pytest.raises(ValueError, match="no level 'heat'; levels: gpu_temp_c"):
        level_block("heat", whole.windows(np.array([0]), np.array([5])), np.zeros(1))


def test_absent_columns_are_not_zeros():
    bare = working(hours=0.4, gpus=2).select("ts", "node", "gpu_uuid", TEMP)
    history = SampleHistory(bare, BOOK)
    rows = np.flatnonzero(history.ts > history.ts.min() + 600)
    block = rows_at(history, TEMP, rows, history.ts[rows]).block
    for name in ("power", "power_low_share", "heat_stays", "activity_dip"):
        assert np.isnan(block.matrix[:, block.names.index(name)]).all(), name
    assert np.isfinite(Standing().forecast(block)).all()
    empty = rows_at(history, "gpu_power_w", rows[:3], history.ts[rows[:3]]).block
    assert np.isnan(Standing().forecast(empty)).all()


# --- forecasts --------------------------------------------------------------------------------------------


def test_another_gpu_at_another_sampling_is_forecast_better_than_any_rule_does(model, test_rows):
    told = model.forecast(test_rows.block)
    assert (np.diff(told, axis=2) >= 0).all()
    own = np.nanmean(losses(test_rows, told[:, :, 1]))
    for name, points in test_rows.block.naive.items():
        assert own < 0.8 * np.nanmean(losses(test_rows, points)), name
    assert 0.7 <= coverage(test_rows, told, 1) <= 0.92


def test_a_quantity_that_was_not_learned_stays_within_what_it_moved_by(model, train):
    block = course_rows(train, "nvlink_fill_ratio", -np.inf, np.inf, count=300).block
    told = model.forecast(block)
    np.testing.assert_array_equal(told, Standing().forecast(block))
    np.testing.assert_array_equal(told[:, 0, 1], block.last)
    assert model.version_of("nvlink_fill_ratio") == "baseline:persistence"
    assert (told[:, :, 0] < told[:, :, 2]).all()


def test_files_give_the_same_model_and_damaged_ones_are_refused(model, test_rows):
    files = model.to_files()
    read = LevelCourses.from_files(files, "v1")
    np.testing.assert_array_equal(read.forecast(test_rows.block), model.forecast(test_rows.block))
    assert read.version_of(TEMP) == "v1"
    with pytest.raises(LevelCourseError, match=r"levels\.npz is missing"):
        LevelCourses.from_files({"levels.json": files["levels.json"]})
    with pytest.raises(LevelCourseError, match="damaged"):
        LevelCourses.from_files({**files, "levels.npz": b"PK"})
    card = json.loads(files["levels.json"])
    with pytest.raises(LevelCourseError, match="of format 99; train again"):
        LevelCourses.from_files({**files, "levels.json": json.dumps(card | {"format": 99}).encode()})
    read.names[TEMP] = ("x",)
    with pytest.raises(LevelCourseError, match="made for other features of gpu_temp_c; train again"):
        read.forecast(test_rows.block)


# --- training ---------------------------------------------------------------------------------------------


def test_training_hands_over_what_beats_persistence_and_ewma_and_can_be_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(training_levels, "TRAIN_ROWS", 2_500)
    monkeypatch.setattr(training_levels, "TEST_ROWS", 1_200)
    samples = working(hours=2.2, gpus=30, interval_s=20.0).sort("gpu_uuid", "ts")
    steps = pl.Series("step", np.random.default_rng(3).normal(0, 4e9, samples.height))
    walk = (2e11 + pl.col("step").cum_sum().over("gpu_uuid")).alias("nvlink_tx_bytes_per_s")
    samples = samples.with_columns(steps).with_columns(walk).with_columns(nvlink_rx_bytes_per_s="nvlink_tx_bytes_per_s")
    moment = samples["ts"].max()
    late = samples.with_columns(pl.col("ts") + (moment - samples["ts"].min()), pl.lit(20.0).alias(TEMP))
    reports = []
    for name, rows in (("a", samples), ("b", pl.concat([samples, late.filter(pl.col("ts") > moment)]))):
        reports.append(train_level(rows, inventory(), Registry(tmp_path / name), moment, cluster="c"))
    report, other = reports
    registry = Registry(tmp_path / "a")
    assert report.promoted, report.reason
    assert registry.champion("level") == report.version
    assert TEMP in report.facts["quantities"]
    assert "nvlink_fill_ratio" not in report.facts["quantities"]  # a random walk: nothing is better than it stands
    assert "nvlink_fill_ratio: baseline persistence stays" in report.reason
    files = dict(registry.load("level", report.version).files)
    assert files == dict(Registry(tmp_path / "b").load("level", other.version).files)  # what came later changed nothing
    assert train_level_again(registry, report.version).to_files() == files
    assert {f"{TEMP}.mae", f"{TEMP}.coverage_80", f"{TEMP}.loss_ratio"} <= set(report.scores["metric"])
    assert set(report.scores["baseline"]) == {"", "persistence", "ewma", "best"}


def test_too_little_leaves_persistence(tmp_path):
    registry = Registry(tmp_path)
    short = train_level(frame(gang(seconds=600)), inventory(), registry, at(600))
    none = train_level(frame(gang(seconds=600)), inventory(), registry, at(-1))
    assert "samples span 0.2 h" in short.reason
    assert none.reason == "persistence stays: no samples"
    assert registry.champion("level") is None


# --- hints ------------------------------------------------------------------------------------------------


def told(world):
    (hint,) = world.hints()
    return hint.levels


def run_until_hint(world, until=1200):
    for second in range(900, until, 15):
        world.tick(second)
        if world.hints():
            return second
    pytest.fail("no hint came")


def test_a_hint_tells_the_course_of_its_level(tmp_path):
    world = World(tmp_path, hot([3]))
    second = run_until_hint(world)
    course = told(world)
    assert (course.gpu_uuid, course.quantity, course.unit) == ("GPU-0003", TEMP, "°C")
    assert course.now == round(87 + (second - 1200) * 0.1)
    assert course.limit == 87.0
    assert list(course.q50) == [str(h) for h in HORIZONS_S]
    assert all(course.q10[h] <= course.q50[h] <= course.q90[h] for h in course.q50)
    assert course.model_version == "baseline:persistence"
    assert course.q90["120"] - course.q90["30"] > 3  # what it moved by lately
    assert "levels" in world.nowcast.timings_s
    assert "levels" not in world.nowcast.problems


def test_the_limit_is_where_slowdown_began_while_it_holds_below_that(tmp_path):
    arrays = hot([3], seconds=2400)
    ts = arrays["ts"]
    slowed = ts > 1200  # clocks go down, the GPU cools to 84 °C, and the slowdown stays active
    for name, value in (("gpu_temp_c", 84.0), ("gpu_temp_margin_c", 3.0), ("is_thermal_slowdown", True)):
        arrays[name][slowed, 3] = value
    world = World(tmp_path, arrays)
    for second in range(900, 1500, 15):
        world.tick(second)
    course = told(world)
    assert (course.now, course.limit) == (84.0, 87.0)
    for second in range(1500, 2100, 15):
        world.tick(second)
    assert told(world).now == 84.0
    assert told(world).limit is None  # nothing in the window tells it any more


def test_the_champion_tells_it_and_a_broken_one_does_not_keep_hints_back(tmp_path, model):
    registry = Registry(tmp_path / "r")
    card = {"trained_at": at(0), "features": [], "configuration": "x", "metrics": [], "seed": 1}
    version = registry.save("level", model.to_files(), card)
    registry.promote("level", version, "for the test")
    world = World(tmp_path / "s", hot([3]), registry=registry)
    run_until_hint(world)
    assert told(world).model_version == version
    world.nowcast.levels.forecaster.names[TEMP] = ("x",)
    world.tick(1190)
    assert told(world).model_version == "baseline:persistence"
    assert "made for other features" in world.nowcast.problems["levels"]


def test_a_cluster_without_the_quantity_gets_hints_without_levels(tmp_path):
    arrays = hot([3])
    arrays["gpu_temp_c"][:] = np.nan  # a margin alone tells the class
    world = World(tmp_path, arrays)
    run_until_hint(world)
    assert told(world) is None
    assert "levels" not in world.nowcast.problems


def test_free_memory_is_told_with_its_floor(tmp_path):
    arrays = gang()
    ts = arrays["ts"]
    arrays["fb_used_bytes"][:] = 60 * GIB
    arrays["fb_used_bytes"][:, 2] = (60 + np.clip((ts - 600) / 35, 0, 19.2)) * GIB
    world = World(tmp_path, arrays)
    run_until_hint(world, until=1600)
    course = told(world)
    assert (course.quantity, course.unit, course.limit) == ("fb_free_gib", "GiB", 1.0)
    used = arrays["fb_used_bytes"][ts <= world.fed, 2][-1] / GIB
    assert course.now == pytest.approx(80 - 0.5 - used, abs=0.02)
    assert min(course.q10.values()) >= 0


def test_every_class_with_a_level_has_one_and_old_hints_are_read():
    assert set(OF_CLASS.values()) <= set(LEVELS)
    from scheduler_hints.schema import Bottleneck
    from tests.hints_support import bottleneck

    kept = msgspec.to_builtins(bottleneck())
    kept.pop("levels")
    assert msgspec.convert(json.loads(msgspec.json.encode(kept)), Bottleneck).levels is None

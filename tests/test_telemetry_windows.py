"""Windows: live rings and history give the same numbers, and those numbers are right."""

from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from features.conditions import CLASSES, INDEX, JobState
from features.history import SampleHistory, history_features
from features.telemetry import RingWindow
from features.thresholds import GIB, ThresholdBook
from features.windows import AROUND, FEATURE_INDEX, screen, time_to_limit_s, window_features
from tests.gpu_samples import ACHIEVABLE, BOOK, H100, START, at, frame, gang


def irregular(seed=1, gpus=16, ticks=90):
    """Frames as a source would give them: uneven spacing, lost samples, jobs that change, leaks and slow steps."""
    rng = np.random.default_rng(seed)
    clock, frames = 0.0, []
    for k in range(ticks):
        clock += float(rng.choice([5, 6, 15, 40]))
        n = np.arange(gpus)
        leak = max(0, k - 60) * 1.4
        rows = pl.DataFrame(
            {
                "ts": [at(clock + 0.01 * i) for i in n],
                "node": [f"n{i // 8}" for i in n],
                "gpu_uuid": [f"g{i}" for i in n],
                "job_id": [None if i % 5 == 0 else ("a" if k < 40 else "b") for i in n],
                "gpu_temp_c": 60 + rng.normal(0, 3, gpus) + k * 0.3,
                "gpu_temp_margin_c": np.where(n % 3 == 0, np.nan, 27 - k * 0.3),
                "mem_temp_c": 70 + rng.normal(0, 2, gpus),
                "fb_used_bytes": (50 + rng.normal(0, 0.05, gpus) + leak) * GIB,
                "fb_total_bytes": np.full(gpus, 80 * GIB),
                "nvlink_tx_bytes_per_s": rng.random(gpus) * ACHIEVABLE,
                "sm_active_ratio": rng.random(gpus),
                "step_time_s": 1 + rng.random(gpus) * 0.1 + (k > 70) * 0.5,
            }
        ).with_columns(pl.col("gpu_temp_margin_c").fill_nan(None))
        node = pl.DataFrame({"ts": [at(clock)] * 2, "node": ["n0", "n1"], "inlet_temp_c": [22.0 + k / 10, 25.0]})
        frames.append((clock, rows.filter(pl.Series(rng.random(gpus) < 0.9)), node))
    return frames


def test_ring_and_history_give_the_same_numbers():
    frames = irregular()
    samples, nodes = pl.concat([f for _, f, _ in frames]), pl.concat([n for _, _, n in frames])
    ring = RingWindow(BOOK)
    compared = 0
    for clock, rows, node in frames:
        ring.observe(rows, node)
        if clock < 600 or ring.count < 16:
            continue
        now = START + timedelta(seconds=clock + 2.5)
        wanted = pl.DataFrame({"gpu_uuid": ring.uuids, "at": [now] * 16})
        for name in CLASSES:
            live = ring.features(np.arange(16), name, now.timestamp()).matrix
            past = history_features(samples, at=wanted, bottleneck_class=name, book=BOOK, nodes=nodes).matrix
            np.testing.assert_allclose(live, past, rtol=2e-4, atol=2e-4)
            compared += np.isfinite(past).sum()
    assert compared > 50_000
    assert np.isfinite(past[:, FEATURE_INDEX["inlet_temp_c_last"]]).all()


def test_screens_agree_too():
    frames = irregular(seed=4)
    samples = pl.concat([f for _, f, _ in frames])
    history = SampleHistory(samples, BOOK)
    ring = RingWindow(BOOK)
    for clock, rows, _ in frames:
        ring.observe(rows)
        if ring.count < 16:
            continue
        now = START.timestamp() + clock + 1
        for name in CLASSES:
            live = {ring.uuids[i] for i in ring.screened(name, now)}
            last = history.last_at(np.arange(16), np.full(16, now))
            fresh = (last >= 0) & (now - history.ts[last] <= ring.stale_s)
            past = {history.uuids[i] for i in np.flatnonzero(fresh & history.screened(name)[last])}
            assert live == past


def features_by_hand(name, ages, x):
    """Brute force for one GPU: ages in seconds (oldest first), values of the distance."""
    keep = [(a, v) for a, v in zip(ages, x, strict=True) if not np.isnan(v) and 0 <= a <= 600]
    short = [(a, v) for a, v in keep if a <= 90]
    out = {"last": keep[-1][1], "mean": np.mean([v for _, v in keep]), "spread": np.std([v for _, v in keep])}
    out["slope_short"] = np.polyfit([-a for a, _ in short], [v for _, v in short], 1)[0]
    out["slope_all"] = np.polyfit([-a for a, _ in keep], [v for _, v in keep], 1)[0]
    out["time_to_limit_short_s"] = min(out["last"] / -out["slope_short"], 3600) if out["slope_short"] < 0 else 3600
    out["near_ratio"] = np.mean([v <= 6 for _, v in keep])
    out["data_age_s"] = keep[-1][0]
    out["samples"] = sum(0 <= a <= 600 for a in ages)
    return out


def test_features_against_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(50):
        slots = 40
        ages = np.sort(rng.uniform(0, 700, slots))[::-1].astype(np.float32)
        x = (15 - np.linspace(0, rng.uniform(0, 12), slots) + rng.normal(0, 1, slots)).astype(np.float32)
        x[rng.random(slots) < 0.15] = np.nan
        x[-4:] = [9, 8, 7, 6.5]
        ages[-4:] = [40, 25, 12, 3]
        values = np.full((len(INDEX), 1, slots), np.nan, dtype=np.float32)
        values[INDEX["thermal_distance_c"], 0] = x
        got = window_features(
            "thermal_throttle", values, ages[None], np.ones((1, slots), dtype=bool), np.array([np.nan]),
            np.zeros((1, len(AROUND)), dtype=np.float32),
        )[0]  # fmt: skip
        for name, want in features_by_hand("thermal_throttle", ages, x).items():
            assert got[FEATURE_INDEX[name]] == pytest.approx(want, rel=2e-3, abs=2e-3), name


def test_real_time_counts_and_not_rows():
    """The same course sampled three times as densely has the same slope and time to the limit."""
    arrays = gang(seconds=600, gpus=1)
    got = []
    for interval in (5.0, 15.0):
        ts = np.arange(0, 600, interval)
        rows = pl.DataFrame(
            {"ts": [at(t) for t in ts], "node": "n0", "gpu_uuid": "g", "gpu_temp_margin_c": 30 - ts / 60}
        )
        ring = RingWindow(BOOK)
        ring.observe(rows)
        got.append(ring.features(np.array([0]), "thermal_throttle", at(600).timestamp()))
    for block in got:
        assert block.column("slope_short")[0] == pytest.approx(-1 / 60, rel=1e-3)
        assert block.column("time_to_limit_short_s")[0] == pytest.approx(block.column("last")[0] * 60, rel=1e-3)
    assert arrays["ts"][-1] < 600


def test_samples_of_the_future_and_repeats_are_dropped():
    ring = RingWindow(BOOK)
    rows = frame(gang(seconds=120))
    assert ring.observe(rows) == rows.height
    assert ring.observe(rows) == 0
    assert ring.observe(rows.with_columns(pl.col("ts") - timedelta(seconds=900))) == 0  # older than any window
    assert (ring.count, ring.late) == (8, 0)
    assert not ring.is_fresh(at(-600).timestamp()).any()  # a clock ten minutes ahead is wrong, not fresh
    assert ring.is_fresh(at(120).timestamp()).all()
    assert not ring.is_fresh(at(300).timestamp()).any()
    with pytest.raises(ValueError, match="gpu_uuid"):
        ring.observe(rows.drop("gpu_uuid"))


def test_rings_wrap_and_grow():
    ring = RingWindow(BOOK)
    arrays = gang(seconds=15 * 50, gpus=4)
    ring.observe(frame(arrays))
    block = ring.features(np.arange(4), "thermal_throttle", at(750).timestamp())
    assert (block.column("samples") == 40).all()
    np.testing.assert_allclose(block.column("last"), arrays["gpu_temp_margin_c"][-1], rtol=1e-5)
    more = gang(seconds=30, gpus=2_000)
    ring.observe(frame(more, first_gpu=100))
    assert ring.count == 2_004
    assert ring.job_id(0) == "7"
    kept = ring.features(np.arange(4), "thermal_throttle", at(750).timestamp())
    np.testing.assert_allclose(kept.column("mean"), block.column("mean"), rtol=1e-5)


def test_inventory_can_come_later_and_jobs_from_the_scheduler():
    ring = RingWindow(ThresholdBook())
    rows = frame(gang(seconds=60), drop=("gpu_temp_margin_c", "is_thermal_slowdown")).drop("job_id")
    ring.observe(rows, job_by_node={"n0": "42"})
    assert np.isnan(ring.distance("thermal_throttle")).all()  # the model, and with it its limit, is not known
    assert ring.job_id(3) == "42"
    ring.set_book(ThresholdBook({"n0": H100}))
    ring.observe(rows.with_columns(pl.col("ts") + timedelta(seconds=60)))
    assert (ring.distance("thermal_throttle") > 0).all()


def test_the_plateau_is_the_first_level_held_and_belongs_to_the_job():
    state = JobState(1)
    gpu, total = np.array([0]), np.array([80 * GIB], dtype=np.float32)
    over = []

    def step(t, gib, job=1, activity=0.9):
        value = np.array([gib * GIB], dtype=np.float32)
        act = np.array([activity], dtype=np.float32)
        nan = np.array([np.nan], dtype=np.float32)
        result, _, since = state.update(gpu, np.array([float(t)]), np.array([job]), value, total, act, nan)
        over.append(result[0] / GIB)
        return since[0]

    for t in range(0, 60, 15):
        step(t, t)  # loading
    for t in range(60, 240, 15):
        step(t, 60, activity=0.0)  # loaded, not yet working: no plateau of its own
    assert np.isnan(over[-1])
    for t in range(240, 1200, 15):
        step(t, 70 + min(t - 240, 600) / 600)  # the allocator's cache still fills
    assert over[-1] == pytest.approx(0, abs=0.3)
    for t in range(1200, 3600, 15):
        step(t, 71 + (t - 1200) / 600)  # a slow leak does not carry the plateau along
    assert over[-1] == pytest.approx(4, abs=0.4)
    assert step(3600, 70, job=2) == 3600
    assert np.isnan(over[-1])


def test_the_jobs_own_step_time_is_not_moved_by_a_slow_spell():
    state = JobState(1)
    nan = np.array([np.nan], dtype=np.float32)

    def ratio(t, seconds):
        step = np.array([seconds], dtype=np.float32)
        return state.update(np.array([0]), np.array([float(t)]), np.array([1]), nan, nan, nan, step)[1][0]

    values = [ratio(k, 2.0) for k in range(200)]
    assert np.isnan(values[0])
    assert values[-1] == pytest.approx(1.0)
    slow = [ratio(200 + k, 2.6) for k in range(40)]
    assert slow[0] == pytest.approx(1.3, rel=1e-3)
    assert slow[-1] > 1.24


def test_screen_and_time_to_limit():
    one = np.ones(4)
    near = np.array([5.0, 20.0, 20.0, np.nan], dtype=np.float32)
    before = np.array([5.0, 20.0, 26.0, 1.0], dtype=np.float32)
    nan = np.full(4, np.nan, dtype=np.float32)
    assert screen("thermal_throttle", near, before, one * 60, nan, nan).tolist() == [True, False, True, False]
    full = np.array([0.5, 0.5], dtype=np.float32)
    over = np.array([0.0, 2.0], dtype=np.float32)
    assert screen("memory_exhaustion", full, full, one[:2], over, nan[:2]).tolist() == [False, True]
    last, slope = np.array([10, 10, -1], dtype=np.float32), np.array([-0.1, 0.1, -1], dtype=np.float32)
    assert time_to_limit_s(last, slope).tolist() == [100, 3600, 0]


def test_history_refuses_what_it_does_not_know():
    rows = frame(gang(seconds=60))
    wanted = pl.DataFrame({"gpu_uuid": ["GPU-0000"], "at": [at(45)]})
    with pytest.raises(ValueError, match="thermal_throttle"):
        history_features(rows, at=wanted, bottleneck_class="thermal", book=BOOK)
    with pytest.raises(ValueError, match="GPU-9"):
        history_features(
            rows, at=wanted.with_columns(pl.lit("GPU-9").alias("gpu_uuid")),
            bottleneck_class="thermal_throttle", book=BOOK,
        )  # fmt: skip
    early = history_features(
        rows, at=wanted.with_columns(pl.lit(at(-5)).alias("at")), bottleneck_class="thermal_throttle", book=BOOK
    )
    assert np.isnan(early.column("last")).all()


def readings(seconds, uuid="g", node="n0", temp=60.0, **more):
    """Samples of one GPU."""
    return pl.DataFrame({"ts": [at(t) for t in seconds], "node": node, "gpu_uuid": uuid, "gpu_temp_c": temp, **more})


def now_s(second):
    return at(second).timestamp()


def test_a_sample_from_the_future_blinds_no_gpu():
    ring = RingWindow(BOOK)
    assert ring.observe(readings([0]), now_s=now_s(1)) == 1
    nodes = pl.DataFrame({"ts": [at(15), at(86_400)], "node": "n0", "inlet_temp_c": [22.0, 99.0]})
    assert ring.observe(readings([86_415]), nodes, now_s=now_s(16)) == 0
    assert ring.ahead == 1
    assert ring.observe(readings([4]), now_s=now_s(0)) == 1  # a clock that runs ahead a little is not wrong
    assert ring.observe(readings([30]), now_s=now_s(31)) == 1
    assert ring.ahead == 0
    assert ring.is_fresh(now_s(31)).tolist() == [True]
    block = ring.features(np.array([0]), "thermal_throttle", now_s(31))
    assert block.column("inlet_temp_c_last")[0] == 22
    assert ring.observe(readings([86_400], uuid="other"), now_s=now_s(31)) == 0
    assert ring.count == 1


def test_what_is_there_from_the_future_does_not_count_once_the_clock_is_set_back():
    ring = RingWindow(BOOK)
    ring.observe(readings(range(3_600, 3_720, 15), temp=50.0))  # history, read while the clock was an hour ahead
    assert ring.observe(readings([30]), now_s=now_s(31)) == 1
    block = ring.features(np.array([0]), "thermal_throttle", now_s(31))
    assert block.column("samples")[0] == 1
    assert block.column("gpu_temp_c_last")[0] == 60
    assert ring.since[0] == now_s(30)


def test_a_gpu_that_moves_to_another_node_begins_anew_there():
    ring = RingWindow(ThresholdBook({"n0": H100, "n1": "Tesla V100-SXM2-32GB"}))
    moving = [f"g{i}" for i in range(3)]

    def told(second, node):
        return pl.concat([readings([second], uuid, node) for uuid in moving])

    for second in range(0, 60, 15):
        ring.observe(told(second, "n0"), now_s=now_s(second))
    before = ring.distance("thermal_throttle").copy()
    # The old series lingers beside the new one, as it does where a source looks back.
    ring.observe(pl.concat([told(45, "n0"), told(60, "n1")]), now_s=now_s(60))
    ring.observe(pl.concat([told(45, "n0"), told(75, "n1")]), now_s=now_s(75))
    assert ring.nodes == ["n1"] * 3
    assert [ring.node_names[code] for code in ring.node[: ring.count]] == ["n1"] * 3
    assert (ring.node_size("n0"), ring.node_size("n1")) == (0, 3)
    fresh = RingWindow(ring.book)
    fresh.observe(told(75, "n1"))
    np.testing.assert_array_equal(ring.distance("thermal_throttle"), fresh.distance("thermal_throttle"))
    assert not np.array_equal(before, ring.distance("thermal_throttle"))
    assert ring.features(np.arange(3), "thermal_throttle", now_s(75)).column("samples").tolist() == [2, 2, 2]


def test_gpus_that_are_gone_give_their_places_up_and_the_others_stay_as_they_were():
    rows, late = frame(gang(seconds=600, gpus=16)), frame(gang(seconds=615, gpus=16)).filter(pl.col("ts") > at(599))
    stay = pl.col("gpu_uuid").is_in([f"GPU-{i:04d}" for i in (1, 3, 4, 10, 15)])
    ring, alone = RingWindow(BOOK), RingWindow(BOOK)
    ring.observe(readings([0], uuid="gone", node="n9", job_id="old"))
    ring.observe(rows)
    alone.observe(rows.filter(stay))
    assert ring.forget(now_s(600)) == 0
    assert ring.forget(now_s(3_601)) == 1  # the first alone has been silent for an hour
    assert (ring.count, ring.node_size("n9"), ring.job_ids) == (16, 0, ["7"])
    ring.observe(rows.filter(stay).with_columns(pl.col("ts") + timedelta(seconds=3_600)))
    alone.observe(rows.filter(stay).with_columns(pl.col("ts") + timedelta(seconds=3_600)))
    assert ring.forget(now_s(4_190)) == 11
    assert ring.uuids == alone.uuids
    assert ring.nodes == alone.nodes
    for window in (ring, alone):
        window.observe(late.with_columns(pl.col("ts") + timedelta(seconds=3_600)))  # they come back, and so do others
    assert ring.count == alone.count == 16
    assert sorted(ring.node_size(f"n{i}") for i in range(2)) == [8, 8]
    for name in CLASSES:
        blocks = [window.features(np.arange(16), name, now_s(4_201)).matrix for window in (ring, alone)]
        np.testing.assert_array_equal(*blocks)
    assert [ring.job_id(i) for i in range(16)] == [alone.job_id(i) for i in range(16)]


def test_names_that_keep_changing_do_not_make_the_rings_grow():
    ring = RingWindow(BOOK)
    for hour in range(12):
        rows = pl.concat([readings([hour * 3_700], uuid=f"{hour}-{i}", node=f"h{hour}") for i in range(200)])
        ring.observe(rows, now_s=now_s(hour * 3_700))
        ring.forget(now_s(hour * 3_700))
    assert ring.count == 200
    assert len(ring.last_ts) == 1_024
    assert ring.node_names == ["h11"]

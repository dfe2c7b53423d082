"""Windows by real time: ten minutes at any sampling, the same numbers live and over history, late samples in place."""

from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from features.conditions import CLASSES, INDEX, QUANTITIES
from features.history import SampleHistory, history_features
from features.phase import PHASE, phase_features
from features.ring import FAR_CELLS, NEAR_CELLS, SLOTS, Ring
from features.telemetry import RingWindow
from features.thresholds import GIB
from features.windows import FEATURE_INDEX
from tests.gpu_samples import ACHIEVABLE, BOOK, START, at

GPUS = 8
RACKS = {"n0": "r0", "n1": "r0"}
END_S = 1_000.0
SAMPLINGS = (
    "1",
    "5",
    "15",
    "30",
    "15 jittered",
    "irregular",
    "5 without a fifth",
    "15 without a fifth",
    "1 with silences",
)
# A residual of a straight line is a difference of large numbers.
ROUNDED = [FEATURE_INDEX["residual_short"]]
OF_THE_JOB = [FEATURE_INDEX[name] for name in FEATURE_INDEX if name.startswith(("step_ratio", "over_plateau"))]


def moments(sampling: str, rng: np.random.Generator) -> np.ndarray:
    """Times of one GPU's samples, seconds after the start."""
    words = sampling.split()
    if words[0] == "irregular":
        return np.cumsum(rng.choice([0.3, 2, 7, 15, 41], 400))
    ts = np.arange(rng.random() * float(words[0]), END_S, float(words[0]))
    if "jittered" in words:
        ts = ts + rng.normal(0, 0.8, len(ts))
    if "fifth" in words:
        ts = ts[rng.random(len(ts)) < 0.8]
    if "silences" in words:
        ts = ts[(ts % 400 < 150) | (ts % 400 > 230)]
    return np.unique(np.round(ts[(ts >= 0) & (ts < END_S)], 3))


def samples(sampling: str, seed: int = 3) -> pl.DataFrame:
    """All that GPUs of two nodes report: heat, a leak, slowing steps, a change of job, values that are absent."""
    rng, more = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    parts = []
    for gpu in range(GPUS):
        ts = moments(sampling, rng)
        n = len(ts)
        lost = rng.random(n) < 0.1
        margin = 25 - 0.022 * ts + rng.normal(0, 1, n)
        parts.append(
            pl.DataFrame(
                {
                    "ts": [at(t) for t in ts], "node": f"n{gpu // 4}", "gpu_uuid": f"g{gpu}",
                    "job_id": np.where(ts < 500, "a", "b"),
                    "gpu_temp_c": 60 + 0.012 * ts + rng.normal(0, 1, n),
                    "gpu_temp_margin_c": np.where(lost, np.nan, margin),
                    "fb_used_bytes": (50 + np.maximum(0, ts - 760) * 0.05) * GIB, "fb_total_bytes": 80 * GIB,
                    "nvlink_tx_bytes_per_s": (0.5 + 0.3 * rng.random(n)) * ACHIEVABLE,
                    "sm_active_ratio": 0.7 + 0.25 * np.sin(2 * np.pi * ts / 64) + rng.normal(0, 0.02, n),
                    "step_time_s": 1 + rng.random(n) * 0.1 + (ts > 900) * 0.4,
                    # A rank that lags more and more, and for a while none of the second node says what it needs.
                    "own_step_time_s": np.where(
                        (gpu >= 4) & (np.abs(ts - 600) < 60), np.nan,
                        1 + more.random(n) * 0.05 + (gpu == 2) * np.maximum(0, ts - 400) * 0.001,
                    ),
                    "is_power_brake": (gpu == 1) & (ts > 900), "is_power_capped": more.random(n) < 0.8,
                    "sm_clock_hz": (1.7 - (gpu == 3) * np.maximum(0, ts - 500) * 0.0012) * 1e9 + more.normal(0, 3e7, n),
                    "gpu_power_w": 690 - (gpu == 3) * np.maximum(0, ts - 500) * 0.5, "power_limit_w": 700.0,
                }
            ).with_columns(pl.col("gpu_temp_margin_c", "own_step_time_s").fill_nan(None))
        )  # fmt: skip
    return pl.concat(parts).sort("ts", "gpu_uuid")


def compare(ring: RingWindow, seen: pl.DataFrame, now_s: float, but: list[int], classes=CLASSES) -> int:
    """Features of all GPUs live and over what has been seen; how many numbers were compared."""
    now = START + timedelta(seconds=now_s)
    wanted = pl.DataFrame({"gpu_uuid": ring.uuids, "at": [now] * ring.count})
    compared = 0
    for name in classes:
        live = ring.features(np.arange(ring.count), name, now.timestamp()).matrix
        past = history_features(seen, at=wanted, bottleneck_class=name, book=BOOK, racks=RACKS).matrix
        use = np.setdiff1d(np.arange(live.shape[1]), but)
        tight = np.setdiff1d(use, ROUNDED)
        np.testing.assert_allclose(live[:, tight], past[:, tight], rtol=5e-4, atol=2e-4)
        np.testing.assert_allclose(live[:, ROUNDED], past[:, ROUNDED], rtol=5e-3, atol=2e-3)
        compared += int(np.isfinite(past[:, use]).sum())
    return compared


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_live_and_history_agree_at_every_sampling(sampling):
    rows = samples(sampling)
    seconds = (rows["ts"] - START).dt.total_microseconds().to_numpy() / 1e6
    ring = RingWindow(BOOK)
    ring.set_racks(RACKS)
    compared = taken = 0
    was_set = set()
    for moment in (300.0, 701.5, 999.0):
        ring.observe(rows.filter((seconds > taken) & (seconds <= moment)))
        taken = moment
        seen = rows.filter(seconds <= moment)
        compared += compare(ring, seen, moment, [])
        history = SampleHistory(seen, BOOK)
        last = history.last_at(np.arange(GPUS), np.full(GPUS, at(moment).timestamp()))
        for name in CLASSES:
            live = {ring.uuids[i] for i in ring.screened(name, at(moment).timestamp())}
            fresh = at(moment).timestamp() - history.ts[last] <= ring.stale_s
            assert live == {history.uuids[i] for i in np.flatnonzero(fresh & history.screened(name)[last])}
            distance = history.distance(name)
            with np.errstate(invalid="ignore"):
                was_set |= {(name, history.uuids[i]) for i in np.unique(history.gpu[distance <= 0])}
                both = (distance[last] <= 0) & (distance[last - 1] <= 0)
            assert [ring.uuids[i] for i in np.flatnonzero(ring.is_set(name))] == sorted(
                (history.uuids[i] for i in np.flatnonzero(both)), key=ring.uuids.index
            )
    assert compared > 2_000
    assert was_set >= {("power_throttle", "g1"), ("power_throttle", "g3"), ("straggler", "g2")}


@pytest.mark.parametrize("sampling", ["1", "15", "irregular"])
def test_late_samples_go_to_their_places(sampling):
    """A third of the samples come a minute late and out of order, and the newest of each GPU comes in time."""
    rows = samples(sampling)
    rng = np.random.default_rng(5)
    seconds = (rows["ts"] - START).dt.total_microseconds().to_numpy() / 1e6
    arrives = seconds + np.where(rng.random(len(seconds)) < 0.3, rng.uniform(0, 60, len(seconds)), 0)
    arrives[(seconds < 30) | (np.abs(seconds - 500) < 90)] = seconds[(seconds < 30) | (np.abs(seconds - 500) < 90)]
    ring = RingWindow(BOOK)
    ring.set_racks(RACKS)
    begin, late = 0.0, 0
    for moment in np.arange(10, 1_001, 10.0):
        ring.observe(rows.filter((arrives >= begin) & (arrives < moment)).sample(fraction=1, shuffle=True, seed=1))
        begin, late = moment, late + ring.late
    # What leans on the running state of the job, or on its gang at the time, follows the order of arrival.
    alone = [name for name in CLASSES if name not in ("power_throttle", "straggler")]
    assert compare(ring, rows.filter(arrives < begin), begin, OF_THE_JOB, alone) > 500
    assert late > 0.02 * len(rows)


@pytest.mark.parametrize("sampling", ["1", "5", "15", "30"])
def test_a_window_spans_ten_minutes_at_every_sampling(sampling):
    ring = RingWindow(BOOK)
    ring.observe(samples(sampling).with_columns(gpu_temp_margin_c=pl.lit(30.0)))
    held = ring.samples().group_by("gpu_uuid").agg((pl.col("ts").max() - pl.col("ts").min()).alias("span"), pl.len())
    assert held["span"].min() >= timedelta(seconds=600 - max(12, float(sampling)))
    assert held["len"].max() <= SLOTS
    newest = ring.samples().filter(pl.col("ts") > at(END_S - 80)).group_by("gpu_uuid").len()["len"]
    assert newest.min() >= 80 / max(4.0, float(sampling)) - 2


def test_the_same_hour_gives_like_numbers_at_every_sampling():
    """Means, shares and trends are of time: not of how often it was looked at."""
    got = {}
    for step in (1, 5, 15, 30):
        ts = np.arange(0, 1_200, step)
        margin = 25 - 0.02 * np.maximum(0, ts - 700)
        rows = pl.DataFrame({"ts": [at(t) for t in ts], "node": "n0", "gpu_uuid": "g", "gpu_temp_margin_c": margin})
        ring = RingWindow(BOOK)
        ring.observe(rows)
        got[step] = ring.features(np.array([0]), "thermal_throttle", at(1_200).timestamp())
    for name in ("slope_short", "slope_mid", "slope_all", "mean", "spread"):
        values = [block.column(name)[0] for block in got.values()]
        np.testing.assert_allclose(values, values[2], rtol=0.06, err_msg=name)


def test_cells_keep_the_same_whatever_the_order():
    rng = np.random.default_rng(2)
    ts = np.sort(1.7e9 + rng.uniform(0, 590, 300))
    values = rng.random((300, len(QUANTITIES))).astype(np.float32)
    rings = []
    for order in (np.arange(300), rng.permutation(300), np.arange(300)[::-1]):
        ring = Ring(has_util=False)
        ring.grow(1)
        for k in order:
            ring.put(np.array([0]), ts[k : k + 1], values[k][:, None], np.zeros(1, np.float32))
        rings.append(ring.gather(np.array([0]), ts[-1:]))
    for other in rings[1:]:
        for one, two in zip(rings[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
    kept = rings[0].ts[0][~np.isnan(rings[0].ts[0])]
    assert (np.diff(kept) > 0).all()
    assert len(kept) <= NEAR_CELLS + FAR_CELLS
    assert rings[0].is_even.sum() == len(np.unique(ts // 12))


def test_late_samples_of_another_node_or_a_refuted_course_are_left_out():
    ring = RingWindow(BOOK)
    rows = pl.DataFrame({"ts": [at(0), at(60)], "node": ["n0", "n1"], "gpu_uuid": "g", "gpu_temp_margin_c": 20.0})
    ring.observe(rows)
    late = rows.head(1).with_columns(ts=pl.lit(at(30)))
    assert ring.observe(late) == 0
    assert ring.observe(late.with_columns(node=pl.lit("n1"))) == 1
    assert ring.late == 1
    assert ring.observe(late.with_columns(node=pl.lit("n1"))) == 0


def test_the_condition_before_the_newest_may_come_late():
    ring = RingWindow(BOOK)
    told = {"node": "n0", "gpu_uuid": "g"}
    ring.observe(pl.DataFrame({"ts": [at(0), at(30)], **told, "gpu_temp_margin_c": [20.0, -1.0]}))
    assert not ring.is_set("thermal_throttle")[0]
    ring.observe(pl.DataFrame({"ts": [at(15)], **told, "gpu_temp_margin_c": [-2.0]}))
    assert ring.is_set("thermal_throttle")[0]
    assert ring.distance("thermal_throttle")[0] == -1


def test_period_and_phase():
    ts = np.arange(-596.0, 0.5, 4.0)
    t = np.tile(ts.astype(np.float32), (4, 1))
    rng = np.random.default_rng(0)
    activity = np.stack(
        [
            0.6 + 0.3 * np.sin(2 * np.pi * (ts - 10) / 40),
            np.where((ts + 600) % 150 < 30, 0.1, 0.9),
            0.9 + rng.normal(0, 0.01, len(ts)),
            np.where(np.abs(ts + 300) < 30, 0.1, 0.9),
        ]
    ).astype(np.float32)
    mask = rng.random(t.shape) < 0.8
    mask[:, -1] = True
    even = np.zeros_like(mask)
    for cell in range(0, len(ts), 3):
        for row in range(4):
            even[row, cell + np.flatnonzero(mask[row, cell : cell + 3])[-1:]] = True
    period, phase, dip = phase_features(activity, t, mask, even).T
    assert period[:2] == pytest.approx([40, 150], rel=0.05)
    assert phase[0] == pytest.approx(0.75, abs=0.06)  # the last rise was 30 s ago
    assert phase[1] == pytest.approx((150 - 30 - 0) / 150, abs=0.1)
    assert np.isnan(period[2:]).all()  # steady work and a single pause have no period
    assert dip[2] < 0.05
    assert phase_features(activity, t, mask & False, even).shape == (4, len(PHASE))


def test_neighbours_of_node_and_rack():
    rows = pl.DataFrame(
        {
            "ts": [at(0)] * 4, "node": ["n0", "n0", "n1", "n2"], "gpu_uuid": ["a", "b", "c", "d"],
            "gpu_temp_c": [60.0, 70, 80, 90], "gpu_temp_margin_c": [27.0, 17, 5, -3],
        }
    )  # fmt: skip
    ring = RingWindow(BOOK)
    ring.observe(rows)
    block = ring.features(np.arange(4), "thermal_throttle", at(1).timestamp())
    assert np.isnan(block.column("rack_peers_difference")).all()  # no rack is known
    ring.set_racks(RACKS)
    block = ring.features(np.arange(4), "thermal_throttle", at(1).timestamp())
    np.testing.assert_allclose(block.column("node_neighbours_temp_c"), [70, 60, np.nan, np.nan])
    np.testing.assert_allclose(block.column("rack_neighbours_temp_c"), [75, 70, 65, np.nan])
    np.testing.assert_allclose(block.column("rack_peers_difference"), [16, 1, -17, np.nan])
    np.testing.assert_allclose(block.column("rack_peers_near_ratio"), [0.5, 0.5, 0, np.nan])


def test_ports_of_the_node():
    gpu = pl.DataFrame(
        {
            "ts": [at(t) for t in (0, 0, 60, 60)],
            "node": ["n0", "n1"] * 2,
            "gpu_uuid": ["a", "b"] * 2,
            "gpu_temp_c": 60.0,
        }
    )
    port = pl.DataFrame(
        {
            "ts": [at(t) for t in (0, 30, 30, 30)], "node": ["n0", "n0", "n0", "n1"], "port": [1, 1, 2, 1],
            "tx_bytes_per_s": [1e9, 10e9, 40e9, None], "rx_bytes_per_s": [1e9, 20e9, 1e9, 5e9],
            "speed_bytes_per_s": [50e9, 50e9, 50e9, 0.0], "ecn_marked_per_s": [None, 100.0, None, None],
            "cnp_per_s": [0.0, 5.0, 7.0, None],
        }
    )  # fmt: skip
    ring = RingWindow(BOOK)
    wants = {20: [(1 / 50, 0), (np.nan, np.nan)], 61: [(0.8, 112), (np.nan, np.nan)], 90: [(np.nan, np.nan)] * 2}
    for moment, want in wants.items():
        now = at(moment)
        ring.observe(gpu.filter(pl.col("ts") <= now), port=port, now_s=now.timestamp() - 5)
        live = ring.features(np.arange(2), "thermal_throttle", now.timestamp())
        asked = pl.DataFrame({"gpu_uuid": ["a", "b"], "at": [now] * 2})
        past = history_features(gpu, at=asked, bottleneck_class="thermal_throttle", book=BOOK, ports=port)
        for block in (live, past):
            got = np.stack([block.column("port_load_ratio"), block.column("port_marks_per_s")], axis=1)
            np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=str(moment))
    assert ring.observe(gpu, port=port.select("ts", "node")) == 0  # absent columns say nothing


def test_memory_is_bounded_by_gpus_alone():
    sizes = []
    for sampling in ("1", "30"):
        ring = RingWindow(BOOK)
        ring.observe(samples(sampling))
        sizes.append(ring.nbytes())
    assert sizes[0] == sizes[1]
    assert sizes[0] / len(ring.last_ts) < 3_800
    assert len(INDEX) == len(QUANTITIES)


def test_utilisation_stands_in_for_a_quantity_that_is_kept_in_steps_and_touches_no_other():
    ring = Ring(has_util=True, quantities=3, coarse={1: 1 / 16384, 2: 1 / 128})
    ring.grow(2)
    gpu = np.array([0, 1])
    values = np.array([[5.0, 0.0], [0.0, 0.5], [61.0, 62.0]], dtype=np.float32)
    for second in (0.0, 12.0, 24.0):
        ring.put(gpu, np.full(2, 1e9 + second), values, np.array([0.75, 0.25], dtype=np.float32))
    ring.use_util(gpu, np.full(2, 1e9 + 5.0), np.full(2, 1e9 + 30.0), 1)
    got, ts, _ = ring.gather(gpu, np.full(2, 1e9 + 24.0))
    is_there = ~np.isnan(ts[0])
    assert got[0, 0, is_there].tolist() == [5.0] * 3
    assert got[0, 1, is_there].tolist() == [0.0] * 3  # a 0 of another quantity stays
    assert got[1, 0, is_there].tolist() == [0.0, 0.75, 0.75]
    assert got[1, 1, is_there].tolist() == [0.5] * 3
    assert got[2, 0, is_there].tolist() == [61.0] * 3

"""Windows of nodes, ports and queues: live and over history the same numbers; distances and labels agree."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.history import SampleHistory
from features.label_spans import CLEAR, SET, UNKNOWN
from features.occupancy import queue_occupancy
from features.queue_memory import MEMORY, QueueMemory
from features.shortage import QueueHistory
from features.thresholds import ThresholdBook
from features.unit_conditions import UNIT_CLASSES, fabric_distance, host_distance, queue_distance
from features.unit_history import UnitHistory
from features.unit_ring import UnitRing
from features.unit_windows import UNIT_FEATURES, UNIT_INDEX, unit_screen

START = datetime(2026, 11, 4, tzinfo=UTC)
BOOK = ThresholdBook(default_model="NVIDIA H100 80GB HBM3")


def moments(rng: np.random.Generator, count: int) -> list[datetime]:
    """Irregular times, of samples every 5 s or so with gaps."""
    seconds = np.cumsum(rng.choice([2, 5, 5, 5, 9, 40], count))
    return [START + timedelta(seconds=float(value)) for value in seconds]


def node_rows(seed: int = 3, nodes: int = 3, count: int = 200) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    parts = []
    for node in range(nodes):
        free = np.clip(0.5 + np.cumsum(rng.normal(0, 0.02, count)), 0, 1)
        free[120:140] = rng.uniform(0.001, 0.01, len(free[120:140]))
        parts.append(
            pl.DataFrame(
                {
                    "ts": moments(rng, count), "node": f"n{node}", "host_mem_available_bytes": free * 1e12,
                    "host_mem_total_bytes": 1e12, "oom_kills_total": np.cumsum(rng.random(count) < 0.02).astype(float),
                }
            )
        )  # fmt: skip
    return pl.concat(parts)


def port_rows(seed: int = 4, ports: int = 4, count: int = 200) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    parts = []
    for port in range(ports):
        marks = rng.gamma(2, 150, count) * np.where((np.arange(count) // 25) % 4 == 3, 12, 1)
        parts.append(
            pl.DataFrame(
                {
                    "ts": moments(rng, count), "node": f"n{port // 2}", "device": f"mlx5_{port % 2}", "port": "1",
                    "tx_bytes_per_s": rng.uniform(10e9, 49e9, count), "speed_bytes_per_s": 50e9,
                    "ecn_marked_per_s": marks, "retransmits_per_s": rng.poisson(1.0, count).astype(float),
                }
            )
        )  # fmt: skip
    return pl.concat(parts)


def queue_rows(seed: int = 5, count: int = 240) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    ts = [START + timedelta(seconds=15 * i) for i in range(count)]
    parts = []
    for name in ("batch", "debug"):
        running = np.clip(100 + np.cumsum(rng.integers(-6, 7, count)), 0, 128)
        pending = np.where(rng.random(count) < 0.3, rng.integers(0, 40, count), 0)
        parts.append(
            pl.DataFrame(
                {"ts": ts, "queue": name, "pending_gpu_num": pending, "running_gpu_num": running,
                 "idle_gpu_num": 128 - running}
            )
        )  # fmt: skip
    return pl.concat(parts)


def newest(rows: pl.DataFrame) -> datetime:
    return rows["ts"].sort()[-1]


ROWS = {"host_memory": node_rows, "fabric_congestion": port_rows, "shortage": queue_rows}


@pytest.mark.parametrize("name", UNIT_CLASSES)
def test_ring_and_history_give_the_same_numbers(name):
    rows = ROWS[name]()
    history = UnitHistory(name, rows, BOOK)
    ring = UnitRing(name, BOOK, stale_s=100)
    trends = 0
    for looked, ts in enumerate(rows["ts"].unique().sort()):
        ring.observe(rows.filter(pl.col("ts") == ts))
        now_s = ts.timestamp() + 0.5
        code = np.array([history.uuids.index(unit) for unit in ring.names])
        last = history.last_at(code, np.full(len(code), now_s))
        fresh = ring.is_fresh(now_s)
        picked = np.zeros(ring.count, dtype=bool)
        picked[ring.screened(now_s)] = True
        assert (picked == (history.screened(name)[last] & fresh)).all()
        if looked % 7 == 0:
            units = np.arange(ring.count)
            live = ring.features(units, now_s)
            past = history.features(code, np.full(len(code), now_s), name)
            assert live.index is past.index is UNIT_INDEX[name]
            np.testing.assert_allclose(live.matrix, past.matrix, rtol=2e-3, atol=2e-4, equal_nan=True)
            trends += int(np.isfinite(live.column("slope_mid")).sum())
    assert trends > 30


@pytest.mark.parametrize("name", UNIT_CLASSES)
def test_a_label_is_set_where_the_distance_is_at_most_nothing(name):
    history = UnitHistory(name, ROWS[name](), BOOK)
    by_distance = np.where(np.isnan(history.values[0]), UNKNOWN, np.where(history.values[0] <= 0, SET, CLEAR))
    # What a thing is used to is known to a label from all of the record, to a window only from what was.
    assert (by_distance == history.state).mean() > (0.9 if name == "fabric_congestion" else 0.999)
    assert (history.state == SET).any()
    assert (history.state == CLEAR).any()


def test_distances_have_the_side_of_their_rule():
    floor = np.full(6, 0.02)
    free = np.array([0.01, 0.01, 0.5, np.nan, np.nan, 0.5])
    usual = np.array([0.5, 0.011, 0.5, 0.5, 0.5, 0.5])
    kills = np.array([np.nan, np.nan, 0, 0, np.nan, 1])
    d = host_distance(free, usual, kills, floor)
    assert (d[[0, 5]] <= 0).all()
    assert (d[[1, 2, 3]] > 0).all()  # a node that is always full is no trouble
    assert np.isnan(d[4])
    d = queue_distance(np.array([5.0, 4, 0, -1]), np.array([4.0, 4, 3, 3]))
    assert d[0] <= 0 < d[1]
    assert d[2] == 3
    assert np.isnan(d[3])
    limits = BOOK.arrays(["n"] * 5)
    none = np.full((3, 5), np.nan)
    rates = np.concatenate((np.array([[5000.0, 5000, 5000, 100, np.nan]]), none))
    usual = np.concatenate((np.array([[10.0, 10, 4000, 10, np.nan]]), none))
    steps = np.array([np.nan, 1.1, 1.3, 1.3, 1.3])
    d, signs = fabric_distance(np.full(5, np.nan), rates, usual, limits, steps)
    assert d[0] <= 0  # without steps signs are enough
    assert (d[1:4] > 0).all()  # steps that are not slow, a port that is used to it, few signs
    assert np.isnan(d[4])
    assert signs[0] == pytest.approx(5.0)


def test_a_port_is_set_where_signs_and_steps_are_slow():
    ts = [START + timedelta(seconds=15 * i) for i in range(80)]
    slow = np.where((np.arange(80) >= 50) & (np.arange(80) < 60), 1.4, 1.0)
    gpu = pl.DataFrame(
        {"ts": ts, "node": "n1", "gpu_uuid": "GPU-1", "job_id": "7", "step_time_s": slow * 2.0}
    )  # fmt: skip
    marks = np.where((np.arange(80) >= 40) & (np.arange(80) < 70), 9_000.0, 200.0)
    port = pl.DataFrame({"ts": ts, "node": "n1", "device": "mlx5_0", "port": "1", "ecn_marked_per_s": marks})
    history = UnitHistory("fabric_congestion", port, BOOK, SampleHistory(gpu, BOOK))
    assert np.flatnonzero(history.state == SET).tolist() == list(range(50, 60))
    assert np.flatnonzero(history.values[0] <= 0).tolist() == list(range(50, 60))
    assert history.job_ids == ["7"]


def test_late_future_and_repeated_samples():
    rows = node_rows(nodes=1, count=30)
    ring = UnitRing("host_memory", BOOK)
    now_s = newest(rows).timestamp()
    assert ring.observe(rows[:20], now_s=now_s) == 20
    assert ring.observe(rows[:20], now_s=now_s) == 0
    assert ring.observe(rows[25:], now_s=rows["ts"][27].timestamp() - 4) == 3  # two lie too far ahead
    assert ring.observe(rows[20:25], now_s=now_s) > 0  # to their places
    assert ring.latest[1, 0] == pytest.approx(rows["host_mem_available_bytes"][27] / 1e12, rel=1e-6)
    assert ring.observe(rows[:0]) == 0
    with pytest.raises(ValueError, match="lack ts or node"):
        ring.observe(rows.drop("node"))


def test_what_is_gone_gives_its_place_up():
    rows = queue_rows()
    ring = UnitRing("shortage", BOOK)
    last = newest(rows)
    ring.observe(rows.filter((pl.col("queue") == "debug") | (pl.col("ts") < last - timedelta(minutes=30))))
    before = ring.features(np.array([ring.names.index("debug")]), last.timestamp()).matrix
    assert ring.forget(last.timestamp(), after_s=600) == 1
    assert ring.names == ["debug"]
    np.testing.assert_array_equal(ring.features(np.array([0]), last.timestamp()).matrix, before)
    ring.observe(rows)
    assert ring.names == ["debug", "batch"]
    assert ring.nbytes() > 0


def test_memory_of_queues_is_what_the_record_says():
    """Where the record has a sample a minute, the running state gives what `QueueHistory` has over all of it."""
    rng = np.random.default_rng(9)
    count = 800
    running = np.clip(100 + np.cumsum(rng.integers(-6, 7, count)), 0, 128)
    rows = pl.DataFrame(
        {"ts": [START + timedelta(minutes=i) for i in range(count)], "queue": "q", "running_gpu_num": running,
         "pending_gpu_num": np.where(rng.random(count) < 0.2, rng.integers(0, 40, count), 0),
         "idle_gpu_num": 128 - running}
    )  # fmt: skip
    ours, theirs = UnitHistory("shortage", rows, BOOK), QueueHistory(rows)
    block = ours.features(ours.gpu, ours.ts, "shortage")
    for name in (
        "shortening_20m", "shortening_240m", "short_decayed_720m", "waits_decayed_10m", "arrivals_decayed_10m",
        "since_short_min", "since_waits_min", "since_starts_min", "held_decayed_720m",
    ):  # fmt: skip
        np.testing.assert_allclose(block.column(name), theirs.features[name], rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(block.column("queue_margin"), theirs.features["margin"])


def test_memory_of_queues_outlives_a_restart():
    rows = queue_rows()
    ring = UnitRing("shortage", BOOK)
    ring.observe(rows)
    memory = ring.memory
    again = QueueMemory.from_lists(len(memory.ts), memory.to_lists())
    queue, now = np.arange(2), np.full(2, newest(rows).timestamp())
    none = np.zeros(2)
    np.testing.assert_array_equal(again.features(queue, now, none, none), memory.features(queue, now, none, none))
    with pytest.raises(ValueError, match="came has shape"):
        QueueMemory.from_lists(len(memory.ts), memory.to_lists() | {"came": []})


def test_a_queue_looked_at_more_often_is_remembered_alike():
    rows = queue_rows().filter(pl.col("queue") == "batch")
    every = rows.filter(pl.int_range(pl.len()) % 2 == 0)  # 30 s, the first of every cell
    often, seldom = UnitHistory("shortage", rows, BOOK), UnitHistory("shortage", every, BOOK)
    at = seldom.ts
    columns = [UNIT_INDEX["shortage"][name] for name in MEMORY]
    code = np.zeros(len(at), dtype=np.int64)
    np.testing.assert_allclose(
        often.features(code, at, "shortage").matrix[:, columns],
        seldom.features(code, at, "shortage").matrix[:, columns],
    )


def test_occupancy_of_jobs_feeds_the_window():
    none = [None, None]
    jobs = pl.DataFrame(
        {
            "job_id": ["1", "2"], "queue": ["q", "q"], "gpus": [8, 16], "end_time": none, "eligible_time": none,
            "submit_time": [START, START + timedelta(minutes=5)], "start_time": [START, None], "reason": none,
        },
        schema_overrides=dict.fromkeys(("eligible_time", "start_time", "end_time"), pl.Datetime("us", "UTC")),
    )  # fmt: skip
    rows = queue_occupancy(jobs, 16, START, START + timedelta(minutes=10))
    history = UnitHistory("shortage", rows, BOOK)
    assert (history.state == SET).sum() == 10
    assert history.values[0].min() == -8


def test_the_screen_looks_at_what_is_near_or_falls_fast():
    distance = np.array([0.9, 0.9, 0.05, np.nan], dtype=np.float32)
    earlier = np.array([0.9, 1.2, 0.05, 0.1], dtype=np.float32)
    picked = unit_screen("host_memory", distance, earlier, np.full(4, 60.0))
    assert picked.tolist() == [False, True, True, False]


def test_a_history_is_of_one_class():
    history = UnitHistory("host_memory", node_rows(count=5), BOOK)
    with pytest.raises(ValueError, match="host_memory, not of 'shortage'"):
        history.screened("shortage")
    with pytest.raises(ValueError, match="lack node"):
        UnitHistory("host_memory", node_rows(count=5).drop("node"), BOOK)
    assert len(UNIT_FEATURES["shortage"]) == len(set(UNIT_FEATURES["shortage"]))

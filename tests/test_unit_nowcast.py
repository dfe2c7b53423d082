"""Nodes, links and queues through the live loop: hints ahead of the onset, by scope, with jobs, reasons and actions."""

from types import SimpleNamespace

import msgspec
import numpy as np
import polars as pl
import pytest

from features.history import SampleHistory
from features.thresholds import ThresholdBook
from features.unit_history import UnitHistory
from features.vocabulary import JOB_COLUMNS, conform, schema
from models.bottleneck import HazardForecaster
from models.trend import TREND_VERSION
from scheduler_hints.filters import select
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.nowcast_memory import QUEUES
from scheduler_hints.schema import Bottleneck
from scheduler_hints.snapshot import Publisher, read_snapshot, snapshot_path
from tests.gpu_samples import at, frame, gang
from tests.test_nowcast import CONFIG, inventory

BOOK = ThresholdBook(default_model="NVIDIA H100 80GB HBM3")
ONSET_S = 900


def node_samples(second: int) -> pl.DataFrame:
    """Two nodes; host memory of n1 leaks until nothing is left at `ONSET_S`."""
    free = [0.6, float(np.clip((ONSET_S - second) * 0.002 + 0.02, 0.0, 0.6))]
    return pl.DataFrame(
        {"ts": [at(second)] * 2, "cluster": "c", "node": ["n0", "n1"], "host_mem_total_bytes": 1e12,
         "host_mem_available_bytes": [value * 1e12 for value in free]}
    )  # fmt: skip


def port_counters(second: int, slow_from: int = 700) -> pl.DataFrame:
    """Counters of two ports a node; from a moment on the first port of n0 marks more and more packets."""
    more = max(second - slow_from, 0)
    marks = [100.0 * second + 40.0 * more**2, 100.0 * second, 100.0 * second, 100.0 * second]
    return pl.DataFrame(
        {"ts": [at(second)] * 4, "cluster": "c", "node": ["n0", "n0", "n1", "n1"], "port": "1",
         "device": ["mlx5_0", "mlx5_1"] * 2, "tx_bytes_total": 20e9 * second, "rx_bytes_total": 20e9 * second,
         "ecn_marked_total": marks, "speed_bytes_per_s": 50e9}
    )  # fmt: skip


def jobs(second: int) -> pl.DataFrame:
    """A job on n1, and from 800 s on three that wait for more GPUs than are idle."""
    rows = [("7", "RUNNING", 8, 0, 0, "n1")] + [(f"w{i}", "PENDING", 16, 800 + i, None, None) for i in range(3)]
    rows = [row for row in rows if row[3] <= second]
    table = pl.DataFrame(
        {
            "cluster": "c", "job_id": [row[0] for row in rows], "state": [row[1] for row in rows], "queue": "batch",
            "gpus": [row[2] for row in rows], "submit_time": [at(row[3]) for row in rows], "nodes": 1,
            "start_time": [None if row[4] is None else at(row[4]) for row in rows],
            "node_list": [row[5] for row in rows], "user": "ada", "account": "a",
        }
    )  # fmt: skip
    types = {name: schema("core_jobs")[name] for name in JOB_COLUMNS}
    absent = [pl.lit(None, dtype=dtype).alias(name) for name, dtype in types.items() if name not in table.columns]
    return table.with_columns(absent).select(pl.col(name).cast(dtype) for name, dtype in types.items())


class Live:
    def __init__(self, root) -> None:
        self.root = root
        self.nowcast = Nowcast("c", Publisher(root, "c"), CONFIG)
        self.gpus = frame(gang(seconds=1_100, gpus=16, job=None)).drop("step_time_s", strict=False)

    def tick(self, second: int, *, ports: bool = True) -> dict:
        self.nowcast.observe_jobs(jobs(second), inventory(), (), at(second))
        gpu = self.gpus.filter(pl.col("ts") == at(second))
        port = port_counters(second) if ports else None
        self.nowcast.observe(gpu, node_samples(second), at(second), port=port)
        return self.nowcast.tick(at(second + 1))

    def hints(self) -> list[Bottleneck]:
        items = read_snapshot(snapshot_path(self.root, "c", "bottlenecks")).items
        return [msgspec.json.decode(item, type=Bottleneck) for item in items]


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    live = Live(tmp_path_factory.mktemp("units"))
    seen: dict[str, list[tuple[int, Bottleneck]]] = {}
    status = {}
    for second in range(300, 1_000, 15):
        status = live.tick(second)
        for hint in live.hints():
            seen.setdefault(hint.bottleneck_class, []).append((second, hint))
    return live, seen, status


def test_host_memory_is_told_ahead_with_its_node_and_job(lived):
    _, seen, _ = lived
    course = seen["host_memory"]
    first_s, first = course[0]
    assert 30 <= ONSET_S - first_s <= 130
    assert {hint.id for _, hint in course} == {first.id}
    assert (first.scope, first.node, first.rack, first.job_ids) == ("node", "n1", "r1", ["7"])
    assert (first.action, first.model_version) == ("retry_elsewhere", TREND_VERSION)
    assert "of host memory available" in first.reasons[-1]
    assert not first.is_active
    assert course[-1][1].is_active


def test_a_congested_port_is_a_link(lived):
    _, seen, _ = lived
    links = [(second, hint) for second, hint in seen["fabric_congestion"] if hint.scope == "link"]
    assert links
    hint = links[-1][1]
    assert (hint.unit, hint.node) == ("n0/mlx5_0/1", "n0")
    assert "congestion signs at" in hint.reasons[-1]
    assert hint.is_active


def test_a_queue_that_is_short_names_the_jobs_that_wait(lived):
    live, seen, _ = lived
    _, hint = seen["shortage"][-1]
    assert (hint.scope, hint.unit, hint.node) == ("queue", "batch", None)
    assert hint.job_ids == ["w0", "w1", "w2"]
    assert hint.is_active
    assert "48 GPUs wanted by waiting jobs, 24 idle" in hint.reasons[-1]
    assert live.nowcast.units.waiting["batch"] == ["w0", "w1", "w2"]


def test_hints_are_asked_for_by_scope(lived):
    live, _, status = lived
    rows = [SimpleNamespace(item=hint) for hint in live.hints()]
    assert {row.item.scope for row in rows} == {"node", "link", "queue"}
    for scope, name in (("node", "host_memory"), ("link", "fabric_congestion"), ("queue", "shortage")):
        assert [row.item.bottleneck_class for row in select("bottlenecks", {"scope": scope}, rows)] == [name]
    assert status["units"] == {"node": 2, "port": 4, "queue": 1}
    assert {"host_memory", "fabric_congestion", "shortage"} <= set(status["screened"])
    assert status["model_versions"]["shortage"] == TREND_VERSION
    assert not status["problems"], status["problems"]


def test_live_windows_are_those_of_history(lived):
    live, _, _ = lived
    seconds = range(300, 1_000, 15)
    nodes = pl.concat(node_samples(second) for second in seconds)
    history = UnitHistory("host_memory", nodes, BOOK)
    ring, now_s = live.nowcast.units.rings["host_memory"], at(991).timestamp()
    code = np.array([history.uuids.index(name) for name in ring.names])
    np.testing.assert_allclose(
        ring.features(np.arange(ring.count), now_s).matrix,
        history.features(code, np.full(len(code), now_s), "host_memory").matrix, rtol=2e-3, atol=2e-4,
    )  # fmt: skip


def test_steps_of_the_job_reach_the_ports_of_its_node(tmp_path):
    live = Live(tmp_path)
    samples = frame(gang(seconds=700, gpus=8)).with_columns(
        pl.when(pl.col("ts") >= at(600)).then(2.8).otherwise(2.0).alias("step_time_s").cast(pl.Float32)
    )
    for second in range(300, 660, 15):
        gpu = samples.filter(pl.col("ts") == at(second))
        live.nowcast.observe(gpu, None, at(second), port=port_counters(second))
    ring = live.nowcast.units.rings["fabric_congestion"]
    steps = dict(zip(ring.names, ring.latest[3, : ring.count].tolist(), strict=True))
    assert steps["n0/mlx5_0/1"] == pytest.approx(1.4, abs=0.05)
    assert np.isnan(steps["n1/mlx5_0/1"])
    gpus = SampleHistory(samples.filter(pl.col("ts") >= at(300)), BOOK)
    history = UnitHistory("fabric_congestion", port_rates(range(300, 660, 15)), BOOK, gpus)
    last = history.values[3][history.starts[1:] - 1]
    assert last[history.uuids.index("n0/mlx5_0/1")] == pytest.approx(steps["n0/mlx5_0/1"], rel=1e-5)


def port_rates(seconds: range) -> pl.DataFrame:
    from features.cleaning import clean_port_samples

    return clean_port_samples(pl.concat(port_counters(second) for second in seconds))[0]


def test_what_queues_were_like_outlives_a_restart(tmp_path):
    live = Live(tmp_path)
    for second in range(780, 990, 15):
        live.tick(second, ports=False)
    assert (tmp_path / "c" / QUEUES).exists()
    live.nowcast.memory.keep(float("inf"))
    again = Live(tmp_path)
    again.tick(990, ports=False)
    ring = again.nowcast.units.rings["shortage"]
    block = ring.features(np.array([ring.names.index("batch")]), at(991).timestamp())
    assert block.column("remembered_min")[0] == pytest.approx((990 - 780) / 60)
    assert block.column("held_decayed_60m")[0] > 0
    (tmp_path / "c" / QUEUES).write_text('{"queues": ["x"], "memory": {"ts": [1]}}')
    assert "is passed over" in Live(tmp_path).nowcast.problems["queues"]


def test_what_is_remembered_waits_for_sources_that_are_slow_after_a_restart(tmp_path):
    live = Live(tmp_path)
    for second in range(780, 990, 15):
        live.tick(second, ports=False)
    live.nowcast.memory.keep(float("inf"))
    again = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    assert again.memory.recall_jobs() == 16
    for second in range(990, 1_080, 15):  # no word of the scheduler yet, and half the exporters do not answer
        some = live.gpus.filter((pl.col("ts") == at(second)) & (pl.col("node") == "n0"))
        again.observe(some, None, at(second))
        again.tick(at(second + 1))
    assert again.window.count == 16
    assert again.units.rings["shortage"].names == ["batch"]
    again.observe_jobs(jobs(1_080), inventory(), (), at(1_080))
    ring = again.units.rings["shortage"]
    assert ring.features(np.array([0]), at(1_081).timestamp()).column("remembered_min")[0] == pytest.approx(5)
    again.observe(some.with_columns(pl.lit(at(1_700)).alias("ts")), None, at(1_700))
    again.tick(at(1_701))
    assert again.window.count == 8  # by then they had time enough
    assert ring.names == ["batch"]
    ring.forget(at(1_080).timestamp() + 86_401, 86_400)
    assert ring.count == 0


def test_a_clock_that_ran_ahead_and_is_set_back_blinds_nothing(tmp_path):
    live = Live(tmp_path)
    for second in range(600, 700, 15):
        live.tick(second)
    ahead = 7_200
    for second in (705, 720):  # all that is asked is timed by the clock of this machine
        live.nowcast.observe_jobs(jobs(second), inventory(), (), at(second + ahead))
        told = [
            rows.with_columns(ts=pl.lit(at(second + ahead))) for rows in (node_samples(second), port_counters(second))
        ]
        gpu = live.gpus.filter(pl.col("ts") == at(second)).with_columns(ts=pl.lit(at(second + ahead)))
        live.nowcast.observe(gpu, told[0], at(second + ahead), port=told[1])
        live.nowcast.tick(at(second + ahead + 1))
    for second in range(735, 960, 15):
        live.tick(second)
    rings = live.nowcast.units.rings
    for ring in rings.values():
        assert ring.last_ts[: ring.count].tolist() == [at(945).timestamp()] * ring.count
    memory = rings["shortage"].memory
    assert memory.ts[0] == at(930).timestamp()  # one sample of every 30 s
    assert memory.first_s[0] == at(600).timestamp()
    ratios = rings["fabric_congestion"].latest[0, :4]
    assert not np.isnan(ratios).any()
    assert {hint.bottleneck_class for hint in live.hints()} == {"host_memory", "fabric_congestion", "shortage"}
    ports = live.nowcast.window._ports
    assert {told[0] for told in ports.values()} == {at(945)}


def test_nodes_out_of_service_and_stale_samples_are_not_told_of(tmp_path):
    live = Live(tmp_path)
    for second in range(600, 960, 15):
        live.tick(second)
    live.nowcast.inventory.excluded.add("n1")
    scores = {one.bottleneck_class: one for one in live.nowcast.units.score(at(946).timestamp(), forecast, {"n1"})}
    assert "n1" not in scores["host_memory"].names
    later = at(946).timestamp() + 600
    assert all(len(one.names) == 0 for one in live.nowcast.units.score(later, forecast, set()))
    live.nowcast.units.forget(later + 86_400 + 3_600)
    assert [ring.count for ring in live.nowcast.units.rings.values()] == [0, 0, 0]


def forecast(block):
    return HazardForecaster({}, {}).forecast(block), "v1"


def test_without_an_inventory_of_gpus_nothing_is_said_of_queues(tmp_path):
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    unknown = conform(inventory().drop("gpus"), "core_nodes")
    nowcast.observe_jobs(jobs(900), unknown, (), at(900))
    assert nowcast.units.rings["shortage"].count == 0
    nowcast.observe_jobs(jobs(900), inventory(), (), at(915))
    nowcast.observe_jobs(jobs(900).clear(), inventory(), (), at(930))
    ring = nowcast.units.rings["shortage"]
    assert ring.latest[:, 0].tolist() == [32, 0, 32, 0]  # a queue that is gone asks for nothing
    assert ring.last_ts[0] == at(930).timestamp()

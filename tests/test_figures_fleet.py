"""What the one number is made of: `features/fleet.py`, and the SQL of `fleet_reading.py` against plain Python."""

from __future__ import annotations

import math
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import duckdb
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.fleet_reading import FleetReader
from features import fleet
from features.vocabulary import TABLES, conform
from tests import dashboard_world as world

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


@pytest.fixture
def database(tmp_path):
    """A query function over plain DuckDB tables; `.put(table=frame)` replaces all of them."""
    connection = duckdb.connect()

    def query(sql, params):
        return pl.DataFrame(connection.cursor().sql(sql, params=list(params) or None))

    def put(**tables):
        for name, table in TABLES.items():
            empty = pl.DataFrame(schema=dict.fromkeys(table.key, pl.Null))
            path = tmp_path / f"{name}.parquet"  # DuckDB reads Polars frames only with pyarrow
            tables.get(name, conform(empty, name)).write_parquet(path)
            connection.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM read_parquet(?)", [str(path)])

    query.put = put
    yield query
    connection.close()


def random_samples(seed: int, *, count: int = 400) -> pl.DataFrame:
    """Samples with every combination of missing and present activity, flags and jobs."""
    random = np.random.default_rng(seed)

    def ratio(values):
        return [None if random.random() < 0.25 else float(random.choice(values)) for _ in range(count)]

    node = random.integers(1, 9, count)
    index = random.integers(0, 4, count)
    return conform(
        pl.DataFrame(
            {
                "ts": [NOW - timedelta(seconds=int(s)) for s in random.integers(0, 420, count)],
                "cluster": ["sim"] * count,
                "node": [f"n{n}" for n in node],
                "gpu_uuid": [f"GPU-{n}-{i}" for n, i in zip(node, index, strict=True)],
                "gpu_index": index,
                "job_id": [None if random.random() < 0.4 else str(100 + n % 3) for n in node],
                "engine_active_ratio": ratio([0.0, 0.2, 0.25, 0.9]),
                "sm_active_ratio": ratio([0.0, 0.9]),
                "gpu_util_ratio": ratio([0.0, 1.0]),
                "tensor_active_ratio": ratio([0.0, 0.005, 0.01, 0.4]),
                "dram_active_ratio": ratio([0.0, 0.04, 0.05, 0.5]),
                "is_thermal_slowdown": [random.choice([None, True, False]) for _ in range(count)],
                "is_power_brake": [random.choice([None, True, False]) for _ in range(count)],
                "is_power_capped": [True] * count,
            },
            strict=False,
        ).unique(["ts", "gpu_uuid"], keep="first", maintain_order=True),
        "core_gpu_samples",
    )


def judge(row: dict) -> str:
    """State of one sample, written out by hand."""
    engine = next(
        (row[n] for n in ("engine_active_ratio", "sm_active_ratio", "gpu_util_ratio") if row[n] is not None), None
    )
    tensor, dram = row["tensor_active_ratio"], row["dram_active_ratio"]
    computed = None
    if tensor is not None or dram is not None:
        computed = (tensor or 0) >= np.float32(0.01) or (dram or 0) >= np.float32(0.05)
    if engine is None and computed is None:
        active = None
    else:
        active = (engine is None or engine >= 0.25) and (computed is None or computed)
    slow = bool(row["is_thermal_slowdown"]) or bool(row["is_power_brake"])
    if active:
        return "throttled" if slow else "good"
    if row["job_id"] is None:
        return "free"
    return "unknown" if active is None else "unproductive"


@pytest.mark.parametrize("seed", range(4))
def test_window_counts_equal_a_count_by_hand(database, seed):
    samples = random_samples(seed)
    nodes = world.nodes_frame(8, NOW)
    database.put(core_gpu_samples=samples, core_nodes=nodes.with_columns(pl.lit(4).cast(pl.Int32).alias("gpus")))
    newest = samples["ts"].max()
    per_gpu: dict = defaultdict(lambda: defaultdict(int))
    for row in samples.filter(pl.col("ts") > newest - timedelta(seconds=300)).iter_rows(named=True):
        per_gpu[row["node"], row["gpu_uuid"]][judge(row)] += 1
    expected: dict = defaultdict(float)
    seen: dict = defaultdict(int)
    for (node, _), counts in per_gpu.items():
        seen[node] += 1
        for state, number in counts.items():
            is_out = node == "n5"
            name = ("out" if is_out else "idle") if state == "free" else state
            expected[name] += number / sum(counts.values())
    for node in nodes["node"]:
        expected["out" if node == "n5" else "unreported"] += 4 - seen[node]

    found = FleetReader(database).now(["sim"], NOW + timedelta(seconds=30))

    assert found.goodness.counts == pytest.approx({state: expected[state] for state in fleet.STATES}, abs=1e-9)
    assert sum(found.goodness.counts.values()) == pytest.approx(32)
    assert found.states.select(pl.sum_horizontal(fleet.STATES)).to_series().to_list() == pytest.approx([4.0] * 8)


def test_states_of_a_known_fleet(database):
    nodes = world.nodes_frame(32, NOW)
    jobs = world.jobs_frame(NOW, 32)
    times = [NOW - timedelta(seconds=15 * i) for i in range(20)]
    database.put(core_gpu_samples=world.samples_frame(nodes, jobs, times), core_nodes=nodes, core_jobs=jobs)

    found = FleetReader(database).now(["sim"], NOW)

    counts = found.goodness.counts
    assert counts["out"] == 8, "n5 is drained and free"
    assert counts["unreported"] == 8, "n7 is in service and silent"
    assert counts["idle"] == 64, "the last eight nodes have no job"
    assert counts["unproductive"] > 16
    assert counts["throttled"] == pytest.approx(3, abs=0.7)
    kinds = [loss.kind for loss in found.losses]
    assert kinds[:2] == ["idle", "unproductive"]
    assert set(kinds) == {"idle", "unproductive", "out", "unreported", "throttled"}
    idle, wasted = found.losses[:2]
    assert (idle.waiting_jobs, idle.waiting_gpus, idle.free_nodes) == (3, 208, 8)
    assert (wasted.job_id, wasted.user, wasted.gpus, wasted.job_gpus) == ("4712", "grace", 16, 64)
    assert wasted.nodes == ("n9", "n10")


def test_idle_time_counts_from_the_last_work(database):
    nodes = world.nodes_frame(2, NOW)
    jobs = conform(
        pl.DataFrame(
            {
                "cluster": ["sim"], "job_id": ["7"], "user": ["ada"], "submit_time": [NOW - timedelta(hours=5)],
                "start_time": [NOW - timedelta(hours=4)], "state": ["RUNNING"], "gpus": [16], "nodes": [2],
                "node_list": ["n1,n2"],
            }
        ),
        "core_jobs",
    )  # fmt: skip

    def rows(times, engine):
        return conform(
            pl.DataFrame(
                [
                    {
                        "ts": ts, "cluster": "sim", "node": "n1", "gpu_uuid": f"g{i}", "gpu_index": i, "job_id": "7",
                        "engine_active_ratio": engine,
                    }
                    for ts in times
                    for i in range(8)
                ]
            ),
            "core_gpu_samples",
        )  # fmt: skip

    worked = [NOW - timedelta(minutes=m) for m in (50, 49, 48, 35)]
    idled = [NOW - timedelta(minutes=m) for m in (34, 20, 10)]
    samples = rows([NOW - timedelta(seconds=s) for s in (0, 60, 120)], 0.0)
    database.put(
        core_gpu_samples=samples, core_gpu_minutes=pl.concat([rows(worked, 0.9), rows(idled, 0.01)]),
        core_nodes=nodes, core_jobs=jobs,
    )  # fmt: skip

    losses = FleetReader(database).now(["sim"], NOW).losses

    wasted = next(loss for loss in losses if loss.kind == "unproductive")
    assert wasted.gpus == 8
    assert wasted.since == NOW - timedelta(minutes=35)
    assert not wasted.is_since_bound


def test_a_job_without_labels_is_found_by_its_whole_nodes(database):
    nodes = world.nodes_frame(4, NOW)
    jobs = world.jobs_frame(NOW, 4).filter(pl.col("state") == "RUNNING")
    samples = world.samples_frame(nodes, jobs, [NOW]).with_columns(pl.lit(None, dtype=pl.String).alias("job_id"))
    idle = samples.with_columns(pl.lit(0.0, dtype=pl.Float32).alias(n) for n in ("engine_active_ratio",))
    database.put(core_gpu_samples=idle, core_nodes=nodes, core_jobs=jobs)

    counts = FleetReader(database).now(["sim"], NOW).goodness.counts

    assert counts["unproductive"] == 24, "n1 to n3 belong to the job"
    assert counts["idle"] == 8

    part = jobs.with_columns((pl.col("gpus") - 1).alias("gpus"))
    database.put(core_gpu_samples=idle, core_nodes=nodes, core_jobs=part)
    counts = FleetReader(database).now(["sim"], NOW).goodness.counts
    assert counts["unproductive"] == 0, "a job on parts of nodes owns no particular GPU"
    assert counts["idle"] == 32


def test_a_spinning_gpu_does_no_work(database):
    nodes = world.nodes_frame(1, NOW)
    jobs = world.jobs_frame(NOW, 1)
    base = world.samples_frame(nodes, world.jobs_frame(NOW, 2), [NOW])
    hung = base.with_columns(
        pl.lit("4711").alias("job_id"),
        pl.lit(1.0, dtype=pl.Float32).alias("engine_active_ratio"),
        pl.lit(0.0, dtype=pl.Float32).alias("tensor_active_ratio"),
        pl.lit(0.01, dtype=pl.Float32).alias("dram_active_ratio"),
    )
    database.put(core_gpu_samples=hung, core_nodes=nodes, core_jobs=jobs)
    assert FleetReader(database).now(["sim"], NOW).goodness.counts["unproductive"] == 8


@pytest.mark.parametrize("seed", [1, 2])
def test_trend_equals_a_count_by_hand(database, seed):
    random = np.random.default_rng(seed)
    nodes = world.nodes_frame(4, NOW)
    jobs = world.jobs_frame(NOW, 4)
    minutes = [NOW - timedelta(minutes=int(m)) for m in range(8, 60) if random.random() < 0.8]
    table = world.samples_frame(nodes, jobs, minutes, seed)
    database.put(core_gpu_minutes=table, core_gpu_samples=table.filter(pl.col("ts") == max(minutes)), core_nodes=nodes)

    found = FleetReader(database).trend(["sim"], 6, NOW).frame

    by_bin: dict = defaultdict(lambda: defaultdict(int))
    times: dict = defaultdict(set)
    for row in table.iter_rows(named=True):
        start = int(row["ts"].timestamp()) // 300 * 300
        times[start].add(row["ts"])
        by_bin[start][judge(row)] += 1
    assert [int(moment.timestamp()) for moment in found["bin"]] == sorted(by_bin)
    for row in found.iter_rows(named=True):
        start = int(row["bin"].timestamp())
        for state, name in (("good", "good"), ("throttled", "throttled"), ("unproductive",) * 2, ("free", "idle")):
            assert row[name] == pytest.approx(by_bin[start][state] / len(times[start]))
        assert row["gpus"] == 32
        assert row["goodness"] == pytest.approx(row["good"] / 32)


def test_trend_reads_closed_bins_once_and_new_ones_again(database):
    nodes, jobs = world.nodes_frame(2, NOW), world.jobs_frame(NOW, 2)
    early = world.samples_frame(nodes, jobs, [NOW - timedelta(minutes=m) for m in range(1, 50)])
    database.put(
        core_gpu_minutes=early, core_gpu_samples=early.filter(pl.col("ts") == early["ts"].max()), core_nodes=nodes
    )
    reader = FleetReader(database)
    first = reader.trend(["sim"], 1, NOW).frame
    later = NOW + timedelta(minutes=3)
    more = world.samples_frame(nodes, jobs, [NOW, NOW + timedelta(minutes=1), NOW + timedelta(minutes=2)])
    database.put(
        core_gpu_minutes=pl.concat([early, more]), core_gpu_samples=more.filter(pl.col("ts") == more["ts"].max()),
        core_nodes=nodes,
    )  # fmt: skip

    second = reader.trend(["sim"], 1, later).frame

    assert second.height == first.height + 3
    assert second.equals(FleetReader(database).trend(["sim"], 1, later).frame), "as a reader that starts anew"


def test_samples_stand_in_for_minutes_that_are_not_made_yet(database):
    nodes, jobs = world.nodes_frame(2, NOW), world.jobs_frame(NOW, 2)
    samples = world.samples_frame(nodes, jobs, [NOW - timedelta(seconds=20 * i) for i in range(1, 61)])
    database.put(core_gpu_samples=samples, core_nodes=nodes)
    found = FleetReader(database).trend(["sim"], 1, NOW).frame
    assert found.height == 20
    assert found["gpus"].to_list() == [16.0] * 20
    assert (found["good"] > 0).all()


def test_an_empty_store_has_no_number(database):
    database.put()
    found = FleetReader(database).now(["sim"], NOW)
    assert found.goodness.value is None
    assert found.silent == ["sim"]
    assert list(found.losses) == []
    assert FleetReader(database).trend(["sim"], 6, NOW).frame.is_empty()


# --- the number itself --------------------------------------------------------------------------------------------

counts = st.dictionaries(st.sampled_from(fleet.STATES), st.floats(0, 1e5, allow_subnormal=False))


@given(counts)
def test_the_number_is_the_product_of_its_parts(have):
    good = fleet.goodness(have)
    parts = [good.available, good.allocated, good.productive, good.unthrottled]
    if good.value is not None:
        assert 0 <= good.value <= 1 + 1e-9
        assert good.low <= good.value + 1e-9
        assert good.value <= good.high + 1e-9
        if None not in parts:
            assert good.value == pytest.approx(math.prod(parts), abs=1e-9)
    for part in parts:
        assert part is None or 0 <= part <= 1 + 1e-9


def test_what_is_not_known_is_not_zero():
    assert fleet.goodness({}).value is None
    assert fleet.goodness({"unknown": 8, "idle": 8}).value is None, "all that is allocated is dark"
    assert fleet.goodness({"idle": 8}).value == 0
    dark = fleet.goodness({"good": 6, "unknown": 2})
    assert (dark.low, dark.value, dark.high) == (0.75, 1.0, 1.0)


@pytest.mark.parametrize(
    ("state", "is_out"),
    [
        ("idle", False), ("mixed", False), ("ALLOCATED", False), ("completing", False), (None, False),
        ("down", True), ("drained", True), ("mixed+drain", True), ("DRAINING", True), ("idle*", True), ("maint", True),
        ("not_responding", True), ("failing", True), ("powered_down", True), ("reboot", True),
    ],
)  # fmt: skip
def test_node_states(state, is_out):
    frame = pl.DataFrame({"state": [state]}, schema={"state": pl.String})
    assert frame.select(fleet.is_out_of_service().alias("x"))["x"][0] is is_out


def test_a_draining_node_that_works_counts_as_working():
    nodes = world.nodes_frame(5, NOW).filter(pl.col("node") == "n5")
    window = pl.DataFrame(
        [("sim", "n5", f"g{i}", i, "1", NOW, 4, 4 if i < 6 else 0, 0, 0, 0, 0 if i < 6 else 4, 0) for i in range(8)],
        schema=fleet.GPU_WINDOW,
        orient="row",
    )
    row = fleet.node_states(window, nodes).row(0, named=True)
    assert (row["good"], row["out"], row["idle"], row["unreported"]) == (6.0, 2.0, 0.0, 0.0)


def test_breakdown_adds_up_and_refuses_other_columns():
    nodes = world.nodes_frame(32, NOW)
    states = fleet.node_states(pl.DataFrame(schema=fleet.GPU_WINDOW), nodes)
    by_pod = fleet.breakdown(states, "pod")
    assert by_pod["gpus"].sum() == 256
    assert set(by_pod["pod"]) == {"p1", "p2"}
    with pytest.raises(ValueError, match=r"'colour'.*cluster, pod, rack, gpu_model, node"):
        fleet.breakdown(states, "colour")


def test_names_sort_as_people_count():
    names = ["n10", "n2", "n1", None, "r1-n3", "r1-n12"]
    assert sorted(names, key=fleet.natural_key) == ["n1", "n2", "n10", "r1-n3", "r1-n12", None]

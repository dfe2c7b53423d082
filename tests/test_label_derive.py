"""Labels in the store: every scope, exclusions, a store of before scopes, and shortages that last."""

from datetime import timedelta

import polars as pl
import pytest

from features.vocabulary import conform
from pipelines.exclusions import read_exclusions
from pipelines.job_history import ingest_jobs
from pipelines.labels import derive_labels
from pipelines.sources import LiveJobs
from pipelines.spans import TELEMETRY_MARK
from tests.pipelines_world import GPUS, START, Queue, ingest_settings, job, samples, seconds
from tests.store_child import open_store

SETTINGS = ingest_settings()
END_S = 3600
HOT = (1500, 2100)


def at(value):
    return START + seconds(value)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path) as opened:
        yield opened


def fill(store, queue, until_s=END_S):
    """An hour in which a GPU brakes, a host and a port run into trouble, and a rank lags, all at HOT."""
    hot = (pl.col("ts") >= at(HOT[0])) & (pl.col("ts") < at(HOT[1]))
    gpu = samples(START, at(until_s)).with_columns(
        pl.lit("alpha").alias("cluster"), (hot & (pl.col("gpu_uuid") == "GPU-10")).alias("is_power_brake")
    )
    node = gpu.select("ts", "cluster", "node").unique().with_columns(
        pl.when(hot & (pl.col("node") == "n1")).then(1e9).otherwise(6e11).alias("host_mem_available_bytes"),
        pl.lit(1e12).alias("host_mem_total_bytes"),
    )  # fmt: skip
    port = node.select("ts", "cluster", "node").with_columns(
        pl.when(hot & (pl.col("node") == "n1")).then(5e4).otherwise(10.0).alias("ecn_marked_per_s"),
        device=pl.lit("mlx5_0"), port=pl.lit("1"),
    )  # fmt: skip
    told = gpu.filter(pl.col("gpu_uuid") == "GPU-00").select("ts", "cluster")
    progress = pl.concat(
        told.with_columns(
            pl.lit("7").alias("job_id"), pl.lit(rank).alias("rank"),
            pl.when(hot & pl.lit(rank == 1)).then(3.0).otherwise(2.0).alias("step_time_s"),
            pl.col("ts").alias("observed_at"), source=pl.lit("test"),
        )
        for rank in range(4)
    )  # fmt: skip

    def write(writer):
        for table, frame in (
            ("core_gpu_samples", gpu), ("core_node_samples", node), ("core_port_samples", port),
            ("core_job_progress", progress),
        ):  # fmt: skip
            writer.upsert(table, conform(frame, table))
        writer.set_mark("alpha", TELEMETRY_MARK, at(until_s))

    store.transact(write, purpose="test")
    ingest_jobs(store, queue, "alpha", at(until_s), first_history_s=END_S)


def short(end_s=3000):
    """One job has all GPUs, another waits for them until the first has ended."""
    return Queue(
        job("1", 0, 0, end_s, "COMPLETED", ("n1", "n2"), 2 * GPUS),
        job("2", 1200, end_s, None, "RUNNING", ("n1", "n2"), 2 * GPUS),
    )


def shown(store):
    return store.query(
        "SELECT bottleneck_class, scope, scope_id, onset_time, clear_time FROM feat_labels WHERE NOT is_censored "
        "ORDER BY bottleneck_class"
    ).rows()


def test_labels_of_every_scope_are_kept(store):
    fill(store, short())
    derive_labels(store, "alpha", SETTINGS)
    onset, clear = at(HOT[0]), at(HOT[1])
    assert shown(store) == [
        ("fabric_congestion", "port", "n1/mlx5_0/1", onset, clear),
        ("host_memory", "node", "n1", onset, clear),
        ("power_throttle", "gpu", "GPU-10", onset, clear),
        ("shortage", "queue", "batch", at(1200), at(3000)),
        ("straggler", "rank", "7/1", at(HOT[0] + 30), clear),
    ]
    assert store.query("SELECT DISTINCT cluster FROM feat_labels")["cluster"].to_list() == ["alpha"]


def test_a_shortage_that_outlasts_a_run_is_closed_later(store):
    queue = Queue(
        job("1", 0, 0, None, "RUNNING", ("n1", "n2"), 2 * GPUS),
        job("2", 600, None, None, "PENDING", (), 2 * GPUS),
    )
    fill(store, queue, 2000)
    derive_labels(store, "alpha", SETTINGS)
    assert [row for row in shown(store) if row[0] == "shortage"] == [("shortage", "queue", "batch", at(600), None)]
    queue.rows = [
        job("1", 0, 0, 3000, "COMPLETED", ("n1", "n2"), 2 * GPUS, seen_s=3001),
        job("2", 600, 3000, None, "RUNNING", ("n1", "n2"), 2 * GPUS, seen_s=3001),
    ]
    fill(store, queue, 4500)
    derive_labels(store, "alpha", SETTINGS)
    assert [row for row in shown(store) if row[0] == "shortage"] == [("shortage", "queue", "batch", at(600), at(3000))]


def test_maintenance_actions_and_drained_nodes_hide_labels(store):
    fill(store, Queue())
    store.transact(
        lambda w: w.upsert("core_reservations", conform(pl.DataFrame({
            "observed_at": [START], "cluster": ["alpha"], "name": ["m"], "kind": ["maintenance"],
            "start_time": [at(1400)], "end_time": [at(1600)], "node_list": ["n1"],
        }), "core_reservations")),
        purpose="test",
    )  # fmt: skip
    store.transact(
        lambda w: w.upsert("out_actions", conform(pl.DataFrame({
            "ts": [at(1400), at(1400)], "cluster": ["alpha"] * 2, "actor": ["agent"] * 2, "action": ["drain", "advise"],
            "node": ["n2", "n1"], "job_id": ["7", "7"], "is_applied": [True, False],
        }), "out_actions")),
        purpose="test",
    )  # fmt: skip
    found = read_exclusions(store, "alpha", START, at(END_S), drained_since=START)
    assert sorted(found.rows()) == [
        ("n1", None, at(1400), at(1600)), ("n2", None, at(1400), at(1400) + timedelta(minutes=15)),
    ]  # fmt: skip
    derive_labels(store, "alpha", SETTINGS)
    # What was set when the maintenance ended is unknown; ranks belong to no node here.
    assert [row[0] for row in shown(store)] == ["straggler"]
    live = Queue().live()
    drained = live.nodes.with_columns(pl.lit("IDLE+DRAIN").alias("state"))
    queue = Queue()
    queue.live = lambda: LiveJobs(live.jobs, drained)
    ingest_jobs(store, queue, "alpha", at(END_S + 7200))
    late = read_exclusions(store, "alpha", at(2000), at(END_S), drained_since=at(2000))
    assert sorted(late["node"].to_list()) == ["n1", "n2", "n2"]


def test_labels_of_before_scopes_become_labels_of_gpus(tmp_path):
    with open_store(tmp_path) as store:
        for column in ("scope", "scope_id"):
            store.maintenance(f"ALTER TABLE feat_labels DROP COLUMN {column}", purpose="test")
        store.maintenance(
            "INSERT INTO feat_labels (cluster, node, gpu_uuid, bottleneck_class, onset_time, is_censored) "
            "VALUES ('alpha', 'n1', 'GPU-01', 'thermal_throttle', '2026-05-04 08:00:00+00', false)",
            purpose="test",
        )
    with open_store(tmp_path) as store:
        assert shown(store) == [("thermal_throttle", "gpu", "GPU-01", START, None)]
        again = store.query("SELECT * FROM feat_labels").with_columns(clear_time=pl.lit(at(60)))
        store.transact(lambda w: w.upsert("feat_labels", conform(again, "feat_labels")), purpose="test")
        assert shown(store) == [("thermal_throttle", "gpu", "GPU-01", START, at(60))]

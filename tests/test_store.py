"""The store on real files: windows, upserts, marks, snapshots, forms of values, errors."""

import os
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.vocabulary import TABLES, schema
from pipelines.store import (
    SnapshotGone,
    Store,
    StoreBusy,
    StoreError,
    StoreInputError,
    StoreMissing,
    StoreQueryError,
    StoreUnwritable,
    StoreVersionError,
    check_store,
)
from tests.store_child import START, WINDOW, open_store, window, write_window

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One store for tests that keep to clusters of their own."""
    with open_store(tmp_path_factory.mktemp("store")) as store:
        yield store


def nodes(*rows, cluster="a"):
    """Rows of core_node_samples from (node, seconds after START, power)."""
    return pl.DataFrame(
        {
            "ts": [START + timedelta(seconds=s) for _, s, _ in rows],
            "cluster": [cluster] * len(rows),
            "node": [n for n, _, _ in rows],
            "node_power_w": [p for _, _, p in rows],
        },
        schema_overrides={"ts": pl.Datetime("us", "UTC"), "node_power_w": pl.Float32},
    )


def test_every_registry_table_exists_with_its_types(shared):
    for name in TABLES:
        assert dict(shared.query(f"SELECT * FROM {name}").schema) == schema(name)


def test_window_twice_is_window_once(shared):
    write_window(shared, 0, "twice")
    once = shared.query("SELECT * FROM core_gpu_samples WHERE cluster = ? ORDER BY gpu_uuid, ts", ["twice"])
    write_window(shared, 0, "twice")
    again = shared.query("SELECT * FROM core_gpu_samples WHERE cluster = ? ORDER BY gpu_uuid, ts", ["twice"])
    assert once.height == window(0, "twice")[2].height
    assert once.equals(again)


def test_window_replaces_only_its_own_rows(shared):
    cluster = "own"
    shared.transact(
        lambda w: w.append("core_node_samples", nodes(("n1", 0, 1), ("n1", 60, 2), ("n1", 120, 3), cluster=cluster))
    )
    shared.transact(lambda w: w.append("core_node_samples", nodes(("n1", 60, 9), cluster="other")))
    at = START + timedelta(seconds=60)
    shared.transact(
        lambda w: w.replace_window(
            "core_node_samples", cluster, at, at + timedelta(seconds=60), nodes(("n2", 61, 7)).drop("cluster")
        )
    )
    found = shared.query("SELECT node, node_power_w FROM core_node_samples WHERE cluster = ? ORDER BY ts", [cluster])
    assert found.rows() == [("n1", 1.0), ("n2", 7.0), ("n1", 3.0)]
    assert shared.query("SELECT node_power_w FROM core_node_samples WHERE cluster = 'other'").rows() == [(9.0,)]


def test_mark_and_rows_are_committed_together_or_not_at_all(shared):
    def work(writer):
        writer.append("core_node_samples", nodes(("n1", 0, 1), cluster="both"))
        writer.set_mark("both", "s", START + WINDOW)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        shared.transact(work)
    assert shared.mark("both", "s") is None
    assert shared.query("SELECT 1 FROM core_node_samples WHERE cluster = 'both'").is_empty()


def test_mark_moves_and_is_per_cluster_and_source(shared):
    shared.transact(lambda w: w.set_mark("m", "s", START))
    shared.transact(lambda w: w.set_mark("m", "s", START + DAY))
    assert shared.mark("m", "s") == START + DAY
    assert shared.mark("m", "s").tzinfo is not None
    assert shared.mark("m", "other") is None
    assert shared.mark("n", "s") is None


def test_upsert_replaces_by_key_and_null_equals_null(shared):
    fault = pl.DataFrame({"cluster": ["u"], "node": ["n1"], "kind": ["node"], "start_time": [START]})
    fault = fault.with_columns(pl.lit(None, dtype=pl.String).alias("gpu_uuid"))
    shared.transact(lambda w: w.upsert("core_faults", fault))
    shared.transact(lambda w: w.upsert("core_faults", fault.with_columns(end_time=pl.lit(START + DAY))))
    found = shared.query("SELECT gpu_uuid, end_time FROM core_faults WHERE cluster = 'u'")
    assert found.rows() == [(None, START + DAY)]


def test_of_equal_keys_in_one_frame_the_last_wins(shared):
    shared.transact(lambda w: w.upsert("core_node_samples", nodes(("n1", 0, 1), ("n1", 0, 2), cluster="last")))
    assert shared.query("SELECT node_power_w FROM core_node_samples WHERE cluster = 'last'").rows() == [(2.0,)]


def test_values_are_stored_in_steps_of_their_resolution(shared):
    frame = nodes(
        *((f"n{i}", 0, p) for i, p in enumerate([301.4, -0.2, None, float("nan"), float("inf")])), cluster="r"
    )
    shared.transact(lambda w: w.append("core_node_samples", frame))
    found = shared.query("SELECT node_power_w FROM core_node_samples WHERE cluster = 'r' ORDER BY node")["node_power_w"]
    assert found.to_list() == [301.0, 0.0, None, None, None]
    assert str(found[1]) == "0.0"
    gpu = pl.DataFrame({"ts": [START], "cluster": ["r"], "node": ["n"], "gpu_uuid": ["g"]}).with_columns(
        sm_active_ratio=pl.lit(0.30049), fb_used_bytes=pl.lit(3.0 * 2**20 + 7), nvlink_tx_bytes_per_s=pl.lit(1.26e9)
    )
    shared.transact(lambda w: w.append("core_gpu_samples", gpu))
    found = shared.query(
        "SELECT sm_active_ratio AS a, fb_used_bytes AS b, nvlink_tx_bytes_per_s AS c FROM core_gpu_samples "
        "WHERE cluster = 'r'"
    )
    expected = pl.DataFrame({"a": [0.3], "b": [3.0 * 2**20], "c": [1.3e9]}, schema=dict.fromkeys("abc", pl.Float32))
    assert found.equals(expected)


def test_a_snapshot_answers_as_it_was(shared):
    shared.transact(lambda w: w.append("core_node_samples", nodes(("n1", 0, 1), cluster="snap")))
    pinned = shared.snapshot()
    sql = "SELECT node_power_w FROM core_node_samples WHERE cluster = ?"
    shared.transact(lambda w: w.upsert("core_node_samples", nodes(("n1", 0, 2), cluster="snap")))
    assert shared.query(sql, ["snap"], snapshot=pinned).rows() == [(1.0,)]
    assert shared.query(sql, ["snap"]).rows() == [(2.0,)]
    with pytest.raises(SnapshotGone, match="No snapshot found at version 999999"):
        shared.query(sql, ["snap"], snapshot=999_999)


def test_a_reader_stays_at_one_snapshot(shared):
    sql = "SELECT count(*) AS n FROM core_node_samples WHERE cluster = 'reader'"
    with shared.reader() as reader:
        before = reader.query(sql)["n"][0]
        shared.transact(lambda w: w.append("core_node_samples", nodes(("n1", 0, 1), cluster="reader")))
        assert reader.query(sql)["n"][0] == before == 0
    assert shared.query(sql)["n"][0] == 1


def test_a_writer_sees_its_own_rows_and_named_parameters_work(shared):
    def work(writer):
        writer.append("core_node_samples", nodes(("n1", 0, 1), cluster="mine"))
        return writer.query("SELECT count(*) AS n FROM core_node_samples WHERE cluster = $name", {"name": "mine"})["n"][
            0
        ]

    assert shared.transact(work) == 1


def test_hash_ignores_order_and_sees_values(tmp_path):
    rows = [("n1", 0, 1.0), ("n2", 0, 2.0), ("n1", 15, 3.0)]
    hashes = []
    with open_store(tmp_path) as store:
        for chosen in (rows, rows[::-1], [*rows[:2], ("n1", 15, 4.0)], [*rows, rows[0]]):
            store.transact(lambda w: w.replace_window("core_node_samples", "a", START, START + DAY, nodes()))
            for row in chosen:
                store.transact(lambda w, row=row: w.append("core_node_samples", nodes(row)))
            hashes.append(store.table_hash("core_node_samples"))
            assert store.table_hash("core_node_samples", exclude=("node_power_w",)) != hashes[-1]
    assert hashes[0] == hashes[1]
    assert len({hashes[0], hashes[2], hashes[3]}) == 3


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kathmandu"])
def test_times_do_not_depend_on_the_machines_time_zone(tmp_path, monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        # New York loses the hour from 07:00 UTC on 2026-03-08; its midnight is not that of UTC.
        times = [datetime(2026, 3, 8, h, m, tzinfo=UTC) for h in (0, 6, 7, 23) for m in (0, 59)]
        frame = pl.DataFrame({"ts": times, "node": [f"n{i}" for i in range(8)]}).with_columns(cluster=pl.lit("tz"))
        with open_store(tmp_path) as store:
            day = datetime(2026, 3, 8, tzinfo=UTC)
            for _ in range(2):
                store.transact(lambda w: w.replace_window("core_node_samples", "tz", day, day + DAY, frame))
            found = store.query("SELECT ts FROM core_node_samples ORDER BY ts")["ts"].to_list()
        assert found == times
        folders = {
            str(file.parent.relative_to(tmp_path / "data")) for file in tmp_path.rglob("core_node_samples/**/*.parquet")
        }
        assert folders == {"main/core_node_samples/cluster=tz/year=2026/month=3/day=8"}
    finally:
        monkeypatch.undo()
        time.tzset()


operations = st.lists(
    st.tuples(
        st.sampled_from(["window", "upsert"]),
        st.integers(0, 3),
        st.integers(1, 3),
        st.lists(st.tuples(st.sampled_from(["n1", "n2"]), st.integers(0, 5), st.integers(0, 9)), max_size=6),
    ),
    max_size=5,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations)
def test_windows_and_upserts_are_a_dictionary(shared, steps):
    cluster = f"model{time.monotonic_ns()}"
    model = {}
    for kind, low, length, drawn in steps:
        if kind == "window":
            start, end = START + timedelta(minutes=low), START + timedelta(minutes=low + length)
            rows = [(node, 60 * (low + minute % length), value) for node, minute, value in drawn]
            model = {key: value for key, value in model.items() if not low * 60 <= key[1] < (low + length) * 60}
            shared.transact(
                lambda w, s=start, e=end, r=rows: w.replace_window(
                    "core_node_samples", cluster, s, e, nodes(*r, cluster=cluster)
                )
            )
        else:
            rows = [(node, 60 * minute, value) for node, minute, value in drawn]
            shared.transact(lambda w, r=rows: w.upsert("core_node_samples", nodes(*r, cluster=cluster)))
        model |= {(node, second): float(value) for node, second, value in rows}
    found = shared.query("SELECT node, ts, node_power_w FROM core_node_samples WHERE cluster = ?", [cluster])
    rows = [((node, round((ts - START).total_seconds())), value) for node, ts, value in found.rows()]
    assert len(rows) == len(model)
    assert dict(rows) == model


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame, words",
    [
        (nodes(("n1", 0, 1)).rename({"node_power_w": "power"}), "columns not in core_node_samples: power; it has: ts,"),
        (nodes(("n1", 0, 1)).drop("node"), "keyed by cluster, node, ts; missing: node"),
        (nodes(("n1", 0, 1)).with_columns(ts=pl.lit(None, dtype=pl.Datetime("us", "UTC"))), "1 of 1 rows have no ts"),
        (nodes(("n1", 0, 1)).with_columns(node_power_w=pl.lit("hot")), "core_node_samples: conversion from"),
    ],
)
def test_a_wrong_frame_is_refused_with_names(shared, frame, words):
    with pytest.raises(StoreInputError, match=words):
        shared.transact(lambda w: w.append("core_node_samples", frame))


def test_rows_outside_their_window_are_refused(shared):
    with pytest.raises(StoreInputError, match="1 rows are outside cluster 'a', 2026-03-01T00:00:00"):
        shared.transact(
            lambda w: w.replace_window(
                "core_node_samples", "a", START, START + WINDOW, nodes(("n1", 0, 1), ("n1", 300, 1))
            )
        )
    with pytest.raises(StoreInputError, match="has no time zone"):
        shared.transact(
            lambda w: w.replace_window("core_node_samples", "a", START.replace(tzinfo=None), START, nodes())
        )


@pytest.mark.parametrize(
    "sql, words",
    [
        ("SELECT * FROM core_gpu_sample", 'Did you mean "core_gpu_samples"'),
        ("SELECT gpu_temp FROM core_gpu_samples", '"gpu_temp" not found'),
        ("SELECT 1; SELECT 2", "exactly one SELECT"),
        ("DELETE FROM core_gpu_samples", "exactly one SELECT"),
        ("SELEC 1", "syntax error"),
        ("SELECT max(ts) - min(ts) AS span FROM core_gpu_samples", "span: intervals cannot be returned"),
    ],
)
def test_a_wrong_query_names_what_is_wrong(shared, sql, words):
    with pytest.raises(StoreQueryError, match=words):
        shared.query(sql)


def test_unknown_tables_are_named_with_the_valid_ones(shared):
    with pytest.raises(StoreInputError, match=r"no table 'core_gpus'.*core_gpu_samples"):
        shared.transact(lambda w: w.append("core_gpus", nodes()))
    with pytest.raises(StoreInputError, match="no table 'core_gpus'"):
        shared.table_hash("core_gpus")


def test_a_write_inside_a_write_is_refused_at_once(shared):
    with pytest.raises(StoreError, match="inside a write of the same thread"):
        shared.transact(lambda w: shared.transact(lambda w2: None))


@pytest.mark.parametrize("url", ["mysql:x", "sqlite:", "catalogue.sqlite"])
def test_an_unknown_url_is_refused(tmp_path, url):
    with pytest.raises(StoreInputError, match="sqlite:PATH or postgres:DSN"):
        Store.open(url, str(tmp_path))


def test_read_only_reads_and_refuses_to_write(tmp_path):
    with pytest.raises(StoreMissing, match="no store there yet"):
        open_store(tmp_path, read_only=True)
    with open_store(tmp_path) as store:
        write_window(store, 0, "a")
        hashed = store.table_hash("core_gpu_samples")
    with open_store(tmp_path, read_only=True) as store:
        assert store.table_hash("core_gpu_samples") == hashed
        with pytest.raises(StoreError, match="opened read-only"):
            store.transact(lambda w: None)


def test_a_busy_lock_names_its_holder(tmp_path):
    with open_store(tmp_path) as holder, open_store(tmp_path, lock_timeout_s=0.2) as other:

        def work(writer):
            assert "held by process" in next(c.message for c in other.check() if c.name == "store lock")
            with pytest.raises(StoreBusy, match=rf"held by process {os.getpid()} \(a long write, since "):
                other.transact(lambda w: None)

        holder.transact(work, purpose="a long write")
        other.transact(lambda w: w.set_mark("a", "s", START))
        assert holder.mark("a", "s") == START


def test_a_store_of_a_later_version_is_refused(tmp_path):
    open_store(tmp_path).close()
    with open_store(tmp_path) as store:
        store.maintenance("UPDATE meta_store SET value = '999' WHERE key = 'schema_version'", purpose="test")
    for read_only in (False, True):
        with pytest.raises(StoreVersionError, match=r"schema version 999.*upgrade Weatherglass"):
            open_store(tmp_path, read_only=read_only)


def test_a_lake_of_a_later_format_is_refused(tmp_path):
    open_store(tmp_path).close()
    catalogue = sqlite3.connect(tmp_path / "catalogue.sqlite")
    with catalogue:
        catalogue.execute("UPDATE ducklake_metadata SET value = '9.9' WHERE key = 'version'")
    catalogue.close()
    with pytest.raises(StoreVersionError, match=r"catalog version is 9\.9"):
        open_store(tmp_path)


def test_a_column_that_is_new_in_the_registry_is_added(tmp_path):
    with open_store(tmp_path) as store:
        write_window(store, 0, "a")
        store.maintenance("ALTER TABLE core_node_samples DROP COLUMN inlet_temp_c", purpose="test")
        store.maintenance("DROP TABLE core_faults", purpose="test")
    with open_store(tmp_path) as store:
        assert store.query("SELECT count(*) AS n, count(inlet_temp_c) AS i FROM core_node_samples").row(0)[1] == 0
        assert store.query("SELECT * FROM core_faults").is_empty()
        write_window(store, 1, "a")


def test_a_file_that_is_no_catalogue_is_named(tmp_path):
    (tmp_path / "catalogue.sqlite").write_bytes(b"not a database " * 500)
    with pytest.raises(StoreUnwritable, match=r"catalogue\.sqlite.*not a database"):
        open_store(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StoreUnwritable, match=r"taken.*cannot be created"):
        open_store(tmp_path / "taken" / "store")
    checks = check_store(f"sqlite:{tmp_path}/taken/c.sqlite", str(tmp_path / "data"))
    assert [(c.name, c.ok) for c in checks] == [("store", False)]


def test_data_elsewhere_is_refused_but_a_moved_folder_opens(tmp_path):
    with open_store(tmp_path / "here") as store:
        write_window(store, 0, "a")
        hashed = store.table_hash("core_gpu_samples")
    with pytest.raises(StoreUnwritable, match="Parquet files are elsewhere"):
        Store.open(f"sqlite:{tmp_path}/here/catalogue.sqlite", str(tmp_path / "other"))
    (tmp_path / "here").rename(tmp_path / "there")
    with open_store(tmp_path / "there") as store:
        assert store.table_hash("core_gpu_samples") == hashed
        write_window(store, 1, "a")
        assert store.query("SELECT count(*) AS n FROM core_gpu_samples")["n"][0] == 2 * window(0, "a")[2].height


def test_check_speaks_of_catalogue_schema_folder_disk_and_lock(shared):
    checks = shared.check()
    assert [c.name for c in checks] == [
        "store catalogue",
        "store schema",
        "store files",
        "store data",
        "store disk",
        "store lock",
    ]
    assert all(c.ok for c in checks)


def test_catalogue_is_in_wal_mode_and_nothing_is_inlined(shared):
    catalogue = sqlite3.connect(shared.location.address)
    assert catalogue.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    inlined = catalogue.execute(
        "SELECT count(*) FROM sqlite_master WHERE name GLOB 'ducklake_inlined_data_[0-9]*'"
    ).fetchone()
    catalogue.close()
    assert inlined == (0,)
    assert list(Path(shared.location.data_path).rglob("*.parquet"))

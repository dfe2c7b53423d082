"""Compaction, expiry and retention: fewer files and old rows gone, and the rest exactly as before."""

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from features.vocabulary import TABLES
from pipelines.store import SnapshotGone, StoreInputError
from tests.store_child import ROWS, START, open_store, window, write_window

DAYS = {table.retention: 30.0 for table in TABLES.values()}


def files(folder, table="core_gpu_samples"):
    return list(Path(folder).rglob(f"{table}/**/*.parquet"))


def live_files(store, table="core_gpu_samples"):
    return store.query(f"SELECT file_count AS n FROM ducklake_table_info('wg') WHERE table_name = '{table}'")["n"][0]


def test_compaction_merges_files_and_keeps_contents_and_snapshots(tmp_path):
    with open_store(tmp_path) as store:
        for index in range(8):
            write_window(store, index, "a")
        write_window(store, 0, "b")
        pinned, hashed = store.snapshot(), store.table_hash("core_gpu_samples")
        assert live_files(store) == 9
        report = store.compact(datetime.now(UTC))
        assert live_files(store) == 2  # one for each cluster and day
        assert report["files_after"] < report["files_before"]
        assert store.table_hash("core_gpu_samples") == hashed
        old = store.query("SELECT count(*) AS n FROM core_gpu_samples", snapshot=pinned)
        assert old["n"][0] == 9 * window(0, "a")[2].height
        ordered = store.query("SELECT gpu_uuid, ts FROM core_gpu_samples WHERE cluster = 'a'")
        assert ordered.equals(ordered.sort("gpu_uuid", "ts"))
        assert store.mark("a", "test") == window(7, "a")[1]
        write_window(store, 3, "a")  # a window inside a merged file is still replaced exactly
        assert store.table_hash("core_gpu_samples") == hashed


def test_many_replaced_rows_are_written_out_of_the_files(tmp_path):
    job = pl.DataFrame({"cluster": "a", "job_id": [str(i) for i in range(50)], "submit_time": [START] * 50})
    with open_store(tmp_path) as store:
        for state in ("PENDING", "RUNNING", "COMPLETED"):
            store.transact(lambda w, s=state: w.upsert("core_jobs", job.with_columns(state=pl.lit(s))))
        hashed = store.table_hash("core_jobs")
        store.compact(datetime.now(UTC))
        assert live_files(store, "core_jobs") == 1
        assert store.table_hash("core_jobs") == hashed
        assert store.query("SELECT DISTINCT state FROM core_jobs").rows() == [("COMPLETED",)]


def test_expiry_frees_old_snapshots_and_keeps_new_files_for_an_hour(tmp_path):
    with open_store(tmp_path) as store:
        for index in range(6):
            write_window(store, index, "a")
        first, hashed = store.snapshot(), store.table_hash("core_gpu_samples")
        store.compact(datetime.now(UTC))
        now = datetime.now(UTC)
        assert store.expire(now, 7) == {"snapshots": 0, "old_files": 0, "orphans": 0, "orphans_kept": 0}
        assert store.query("SELECT 1 FROM core_gpu_samples LIMIT 1", snapshot=first).height == 1
        assert store.expire(now + timedelta(hours=1), 7)["old_files"] == 0  # replaced less than an hour ago
        assert len(files(tmp_path)) == 7
        assert store.expire(now + timedelta(days=2), 1)["snapshots"] > 5  # all but the newest
        with pytest.raises(SnapshotGone, match="expired"):
            store.query("SELECT 1 FROM core_gpu_samples", snapshot=first)
        assert len(files(tmp_path)) == 1
        assert store.table_hash("core_gpu_samples") == hashed


def test_orphans_go_after_a_day_and_not_before(tmp_path):
    with open_store(tmp_path) as store:
        write_window(store, 0, "a")
        [kept] = files(tmp_path)
        young, old = kept.with_name("young.parquet"), kept.with_name("old.parquet")
        for file in (young, old):
            file.write_bytes(kept.read_bytes())
        yesterday = time.time() - 86_400 - 60
        os.utime(old, (yesterday, yesterday))
        os.utime(kept, (yesterday, yesterday))
        assert store.expire(datetime.now(UTC), 7)["orphans"] == 1
        assert sorted(files(tmp_path)) == sorted([kept, young])


def test_orphans_that_are_most_of_all_files_are_kept_and_named(tmp_path, caplog):
    yesterday = time.time() - 86_400 - 60
    with open_store(tmp_path) as store:
        write_window(store, 0, "a")
        [live] = files(tmp_path)
        strangers = [live.with_name(f"stranger-{i}.parquet") for i in range(11)]
        for file in strangers:
            file.write_bytes(live.read_bytes())
            os.utime(file, (yesterday, yesterday))
        report = store.expire(datetime.now(UTC), 7)
        assert (report["orphans"], report["orphans_kept"]) == (0, 11)
        assert all(file.exists() for file in strangers)
        assert "11 files are not in the catalogue" in caplog.text
        strangers[0].unlink()  # a handful is removed whatever its share
        report = store.expire(datetime.now(UTC), 7)
        assert (report["orphans"], report["orphans_kept"]) == (10, 0)
        assert files(tmp_path) == [live]


def test_retention_deletes_whole_old_days_of_each_table_by_its_setting(tmp_path):
    now = START + timedelta(days=40, hours=5)
    times = [START, now - timedelta(days=30, hours=6), now - timedelta(days=30), now - timedelta(days=2), now]
    frame = pl.DataFrame({"ts": times, "node": ["n1"] * 5}).with_columns(cluster=pl.lit("a"))
    gpus = frame.with_columns(gpu_uuid=pl.lit("g"))
    with open_store(tmp_path) as store:
        store.transact(lambda w: [w.append("core_node_samples", frame), w.append("raw_gpu_samples", gpus)])
        assert store.retain(now, DAYS | {"raw_days": 1.0}) == {"core_node_samples": 2, "raw_gpu_samples": 4}
        assert store.query("SELECT ts FROM core_node_samples ORDER BY ts")["ts"].to_list() == times[2:]
        assert store.query("SELECT ts FROM raw_gpu_samples")["ts"].to_list() == times[4:]
        assert store.retain(now, DAYS | {"raw_days": 1.0}) == {}
        with pytest.raises(StoreInputError, match="no retention given for: raw_days; given: hints_days, history_days"):
            store.retain(now, {name: days for name, days in DAYS.items() if name != "raw_days"})


def test_readers_and_writers_go_on_while_files_are_merged_and_removed(tmp_path):
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        for index in range(10):
            write_window(store, index, "a")
        stop, failures, reads = threading.Event(), [], []

        def read():
            try:
                while not stop.is_set():
                    reads.append(other.query("SELECT count(*) AS n FROM core_gpu_samples WHERE cluster = 'a'")["n"][0])
            except BaseException as error:
                failures.append(error)

        def write():
            try:
                for index in range(6):
                    write_window(other, index, "b")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            store.compact(datetime.now(UTC))
            store.expire(datetime.now(UTC) + timedelta(days=2), 30)  # as if a day passed: replaced files go at once
        threads[1].join()
        stop.set()
        threads[0].join()
        assert not failures
        assert set(reads) == {10 * window(0, "a")[2].height}
        assert store.query("SELECT count(*) AS n FROM core_gpu_samples WHERE cluster = 'b'")["n"][0] == 6 * ROWS


def test_spill_folders_of_ended_processes_are_removed(tmp_path):
    with open_store(tmp_path) as store:
        dead = tmp_path / "spill" / "999999999"
        dead.mkdir(parents=True)
        (dead / "duckdb_temp_storage-0.tmp").write_bytes(b"x")
        store.expire(datetime.now(UTC), 7)
        assert not dead.exists()


def test_what_does_not_fit_in_memory_is_spilled_and_cleared_away(tmp_path):
    sql = "SELECT count(DISTINCT s) AS n FROM (SELECT repeat('x', 100) || range::VARCHAR AS s FROM range(1500000))"
    with open_store(tmp_path, memory_limit_mib=128, threads=1) as store:
        assert store.query(sql)["n"][0] == 1_500_000
        assert (tmp_path / "spill" / str(os.getpid())).exists()
    assert not list((tmp_path / "spill").iterdir())

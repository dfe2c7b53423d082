"""The store when things go wrong around it: killed writers, two at once, readers meanwhile, a full disk."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest

from pipelines import store_errors
from pipelines.catalogue import connect, parse_location
from pipelines.store import SnapshotGone, StoreDamaged, StoreFull, StoreMissing, StoreUnwritable
from tests.store_child import ROWS, WINDOWS, next_index, open_store, run, window, write_window
from tests.store_services import small_disk

__all__ = ["small_disk"]  # a fixture
TABLES = ("core_gpu_samples", "core_node_samples")


def start_child(folder, cluster):
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.store_child", str(folder), cluster],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    return child


def hashes(store):
    return [store.table_hash(table) for table in TABLES]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Hashes of the tables after a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, "a")
    with open_store(folder) as store:
        return hashes(store)


def test_a_writer_killed_anywhere_loses_and_doubles_nothing(tmp_path, undisturbed):
    chance, progress = random.Random(4), []
    for wait_for in (1, 0, 1, 2, 0):
        child = start_child(tmp_path, "a")
        for _ in range(wait_for):
            child.stdout.readline()
        time.sleep(chance.uniform(0, 0.12))  # somewhere inside the next window
        child.kill()
        child.wait()
        child.stdout.close()
        with open_store(tmp_path, lock_timeout_s=5) as store:  # the lock of the dead is free
            index = next_index(store, "a")
            rows = store.query("SELECT count(*) AS n, max(ts) AS last FROM core_gpu_samples").row(0)
            assert rows[0] == index * ROWS
            if index:
                assert window(index - 1, "a")[0] <= rows[1] < window(index - 1, "a")[1]
            progress.append(index)
    assert progress == sorted(progress)
    assert progress[0] in range(1, WINDOWS), "the first child was not killed in the middle"
    run(tmp_path, "a")
    with open_store(tmp_path) as store:
        assert hashes(store) == undisturbed
        store.compact(datetime.now(UTC))
        assert hashes(store) == undisturbed


def test_two_processes_write_at_once_while_one_reads(tmp_path, undisturbed):
    open_store(tmp_path).close()
    children = [start_child(tmp_path, cluster) for cluster in ("a", "a", "b")]
    seen, reads, failures = [], threading.Event(), []

    def read():
        try:
            with open_store(tmp_path, read_only=True) as reader:
                while not reads.is_set():
                    counts = reader.query("SELECT count(*) AS n FROM core_gpu_samples WHERE cluster = 'b'")["n"][0]
                    with reader.reader() as pinned:
                        rows = pinned.query("SELECT count(*) AS n FROM core_gpu_samples")["n"][0]
                        nodes = pinned.query("SELECT count(DISTINCT ts) AS n FROM core_node_samples")["n"][0]
                        same = pinned.query("SELECT count(DISTINCT ts) AS n FROM core_gpu_samples")["n"][0]
                    seen.append((counts % ROWS, rows % ROWS, nodes - same))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for child in children:
            assert child.wait(60) == 0
            assert child.stdout.read().endswith("done\n")
            child.stdout.close()
    finally:
        reads.set()
        thread.join()
    assert not failures
    assert len(seen) >= 3  # it did read while both wrote, however busy the machine
    assert set(seen) == {(0, 0, 0)}  # whole windows only, the two tables always together
    with open_store(tmp_path) as store:
        assert store.query("SELECT cluster, count(*) AS n FROM core_gpu_samples GROUP BY 1 ORDER BY 1").rows() == [
            ("a", WINDOWS * ROWS),
            ("b", WINDOWS * ROWS),
        ]
        store.transact(lambda w: [w.replace_window(t, "b", *_span(), _nothing(w, t)) for t in TABLES])
        assert hashes(store) == undisturbed


def _span():
    return window(0, "b")[0], window(WINDOWS, "b")[1]


def _nothing(writer, table):
    return writer.query(f"SELECT * FROM {table} LIMIT 0")


def test_a_full_disk_keeps_what_was_written_and_writing_resumes(small_disk, tmp_path):
    filler = small_disk / "filler"
    with open_store(small_disk) as store:
        for index in range(3):
            write_window(store, index, "a")
        kept = hashes(store)
        files = parquet(small_disk)
        room = shutil.disk_usage(small_disk).free
        filler.write_bytes(bytes(room - 3 * 2**18))  # room to begin, not to end
        big = noise()
        for _ in range(2):
            with pytest.raises(StoreFull, match=r"no space left; free some .* rows written before are intact"):
                store.transact(lambda w: w.append("core_gpu_samples", big))
            assert hashes(store) == kept
        assert parquet(small_disk) == files  # nothing partial is left to fill the disk further
        filler.unlink()
        for index in range(2, 5):
            write_window(store, index, "a")
        after = hashes(store)
    with open_store(tmp_path / "other") as other:
        for index in range(5):
            write_window(other, index, "a")
        assert hashes(other) == after


def parquet(folder):
    return sorted(str(file) for file in folder.rglob("*.parquet"))


def test_a_full_disk_that_sqlite_calls_an_io_error_is_called_full(small_disk):
    error = duckdb.Error("Failed to commit: disk I/O error")
    url, data = f"sqlite:{small_disk / 'catalogue.sqlite'}", str(small_disk)
    assert isinstance(store_errors.translate(error, url, data), StoreUnwritable)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**19))
    assert isinstance(store_errors.translate(error, url, data), StoreFull)
    assert isinstance(store_errors.translate(error, url, "s3://bucket/data/"), StoreFull)
    assert isinstance(store_errors.translate(error, "postgres:dbname=x", "s3://bucket/data/"), StoreUnwritable)


LOSSES = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "without tables": lambda file: (file.unlink(), empty_database(file)),
}


def empty_database(file):
    database = sqlite3.connect(file)
    database.execute("PRAGMA journal_mode = WAL")
    database.close()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("read_only", [False, True])
def test_parquet_files_without_their_catalogue_are_not_taken_for_a_new_store(tmp_path, loss, read_only):
    with open_store(tmp_path) as store:
        write_window(store, 0, "a")
        kept = hashes(store)
    catalogue = tmp_path / "catalogue.sqlite"
    backup = catalogue.read_bytes()
    LOSSES[loss](catalogue)
    for _ in range(2):  # the first attempt must not make what the second finds
        words = (
            r"/data/ holds \d+ Parquet files but its catalogue sqlite:.*/catalogue.sqlite is missing or empty: restore"
        )
        with pytest.raises(StoreMissing, match=words):
            open_store(tmp_path, read_only=read_only)
    catalogue.write_bytes(backup)
    with open_store(tmp_path) as store:
        assert hashes(store) == kept


def test_a_new_catalogue_over_old_files_is_refused_too(tmp_path):
    with open_store(tmp_path) as store:
        write_window(store, 0, "a")
    (tmp_path / "data").rename(tmp_path / "aside")
    (tmp_path / "catalogue.sqlite").unlink()
    attached(tmp_path).close()  # what a kill leaves between the catalogue and its tables
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    (tmp_path / "aside").rename(tmp_path / "data")
    with pytest.raises(StoreMissing, match="missing or empty"):
        open_store(tmp_path)


def attached(folder):
    location = parse_location(f"sqlite:{folder / 'catalogue.sqlite'}", str(folder / "data"))
    return connect(location, memory_limit_mib=256, threads=1, read_only=False)


@pytest.mark.parametrize("has_first_file", [False, True])
def test_a_store_whose_making_was_killed_before_its_tables_is_made(tmp_path, has_first_file):
    attached(tmp_path).close()
    if has_first_file:  # the first table's only row is written before its commit
        file = tmp_path / "data" / "main" / "meta_store" / "ducklake-1.parquet"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"PAR1")
    with open_store(tmp_path) as store:
        write_window(store, 0, "a")
        assert store.query("SELECT count(*) AS n FROM core_gpu_samples")["n"][0] == ROWS


DAMAGES = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_missing_or_damaged_file_is_named_by_reads_writes_and_the_check(tmp_path, damage):
    with open_store(tmp_path) as store:
        write_window(store, 0, "a")
        assert {check.name: check.ok for check in store.check()}["store files"]
        [file] = (tmp_path / "data").rglob("core_gpu_samples/**/*.parquet")
        DAMAGES[damage](file)
        words = f"^{file}: is missing or damaged: restore it from a backup"
        with pytest.raises(StoreDamaged, match=words):
            store.query("SELECT max(ts) FROM core_gpu_samples WHERE gpu_uuid > ''")
        with store.reader() as reader, pytest.raises(StoreDamaged, match=words):
            reader.query("SELECT sum(hash(s)) FROM core_gpu_samples s")
        with pytest.raises(StoreDamaged, match=words):
            write_window(store, 0, "a")
        [check] = [check for check in store.check() if check.name == "store files"]
        assert not check.ok
        assert str(file) in check.message
        assert "1 of " in check.message


def test_a_file_that_the_catalogue_no_longer_names_was_removed_by_maintenance(tmp_path):
    with open_store(tmp_path) as store:
        error = duckdb.IOException(f'IO Error: Cannot open file "{tmp_path}/data/x.parquet": No such file or directory')
        assert isinstance(store.error(error), SnapshotGone)


def noise(rows=200_000):
    """Rows that compress badly: several megabytes."""
    chance = np.random.default_rng(1)
    return pl.DataFrame({
        "gpu_uuid": np.arange(rows).astype(str),
        "nvlink_tx_bytes_per_s": chance.random(rows) * 4e12,
        "sm_active_ratio": chance.random(rows),
        "dram_active_ratio": chance.random(rows),
    }).with_columns(ts=pl.lit(window(50, "a")[0]), cluster=pl.lit("a"), node=pl.lit("n"))  # fmt: skip


INTERRUPTED = """
import os, signal, sys, threading
from pipelines.store import Store
store = Store.open(sys.argv[1], sys.argv[2])
endless = "SELECT sum(range) AS n FROM range(10000000000000)"
done = threading.Event()


def press():  # more than once: DuckDB swallows one that meets it while it plans
    while not done.wait(1.0):
        os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=press, daemon=True).start()
try:
    if sys.argv[3] == "read":
        store.query(endless)
    else:
        store.transact(lambda writer: writer.query(endless))
except KeyboardInterrupt:
    done.set()
    assert store.query("SELECT 1 AS one")["one"][0] == 1
    store.transact(lambda writer: None)
    print("interrupted")
"""


@pytest.mark.parametrize("how", ["read", "write"])
def test_ctrl_c_is_an_interrupt_and_not_a_failed_query(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, f"sqlite:{tmp_path}/c.sqlite", str(tmp_path / "data"), how],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)

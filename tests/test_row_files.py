"""Rows that go into the store as files written beside DuckDB: the same rows in the same places, none if rolled back."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pytest

from features.vocabulary import TABLES
from pipelines import row_files
from pipelines.store import Store
from pipelines.writer import stored_form

START = datetime(2026, 10, 31, 23, tzinfo=UTC)
TABLE = "core_gpu_samples"


def samples(gpus: int = 40, steps: int = 100) -> pl.DataFrame:
    """Two hours that cross midnight and the month; not in the order of the store."""
    return pl.DataFrame(
        {
            "ts": [START + timedelta(seconds=72 * k) for k in range(steps) for _ in range(gpus)],
            "cluster": ["a-1"] * gpus * steps,
            "node": [f"n{g % gpus // 8}" for g in range(gpus * steps)],
            "gpu_uuid": [f"GPU-{g % gpus:03d}" for g in range(gpus * steps)],
            "gpu_temp_c": [float(k % 90) if k % 7 else None for k in range(gpus * steps)],
            "is_thermal_slowdown": [k % 11 == 0 for k in range(gpus * steps)],
        }
    )


def opened(folder: Path) -> Store:
    return Store.open(f"sqlite:{folder}/catalogue.sqlite", str(folder / "data"))


def files(folder: Path) -> list[Path]:
    return sorted((folder / "data").rglob(f"{TABLE}/**/*.parquet"))


def test_rows_are_those_that_an_insert_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = samples()
    with opened(tmp_path / "files") as store:
        store.transact(lambda w: w.append(TABLE, frame))
        assert len(files(tmp_path / "files")) == 2  # a day each
        written = store.query(f"SELECT * FROM {TABLE} ORDER BY ts, gpu_uuid")
        hashed = store.table_hash(TABLE)
        first = [path.read_bytes()[:4] for path in files(tmp_path / "files")]
        assert first == [b"PAR1"] * 2
    monkeypatch.setattr(row_files, "LEAST_ROWS", 10**9)
    with opened(tmp_path / "insert") as store:
        store.transact(lambda w: w.append(TABLE, frame))
        assert store.query(f"SELECT * FROM {TABLE} ORDER BY ts, gpu_uuid").equals(written)
        assert store.table_hash(TABLE) == hashed


def test_within_a_transaction_rows_are_seen_replaced_and_rolled_back(tmp_path: Path) -> None:
    frame = samples()
    end = START + timedelta(hours=2)
    with opened(tmp_path) as store:

        def twice(writer) -> int:
            writer.append(TABLE, frame)
            assert writer.query(f"SELECT count(*) AS n FROM {TABLE}")["n"][0] == frame.height
            return writer.replace_window(TABLE, "a-1", START, end, frame.head(3000))

        assert store.transact(twice) == 3000
        before = store.table_hash(TABLE)
        store.transact(lambda w: w.upsert(TABLE, frame.head(2500).with_columns(gpu_temp_c=pl.lit(1.0))))
        assert store.query(f"SELECT count(*) AS n FROM {TABLE} WHERE gpu_temp_c = 1.0")["n"][0] >= 2500
        assert store.query(f"SELECT count(*) AS n FROM {TABLE}")["n"][0] == 3000
        changed = store.table_hash(TABLE)
        assert changed != before

        def fails(writer) -> None:
            writer.append(TABLE, frame)
            raise RuntimeError("no")

        with pytest.raises(RuntimeError):
            store.transact(fails)
        assert store.table_hash(TABLE) == changed
        store.compact(datetime.now(UTC))
        assert store.table_hash(TABLE) == changed
        store.expire(datetime.now(UTC) + timedelta(days=30), 7)
        assert store.table_hash(TABLE) == changed


def test_a_store_that_is_moved_takes_its_files_along(tmp_path: Path) -> None:
    with opened(tmp_path / "old") as store:
        store.transact(lambda w: w.append(TABLE, samples()))
        before = store.table_hash(TABLE)
    shutil.move(tmp_path / "old", tmp_path / "new")
    with opened(tmp_path / "new") as store:
        assert store.table_hash(TABLE) == before


def test_names_that_no_path_should_hold_are_inserted(tmp_path: Path) -> None:
    rows = stored_form(samples(), TABLE)
    assert row_files.fits(rows)
    for name in ("a/b", "..", "a=b", "a b", ""):
        assert not row_files.fits(rows.with_columns(cluster=pl.lit(name)))
    assert not row_files.fits(rows.head(10))
    with opened(tmp_path) as store:
        odd = samples().with_columns(cluster=pl.lit("a b"))
        store.transact(lambda w: w.append(TABLE, odd))
        assert store.query(f"SELECT count(*) AS n FROM {TABLE}")["n"][0] == odd.height


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    rows = stored_form(samples(), TABLE)
    blocked = tmp_path / "main" / TABLE / "cluster=a-1" / "year=2026" / "month=11"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    with pytest.raises(duckdb.IOException):
        row_files.write_files(tmp_path, TABLES[TABLE], rows)
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_transaction_that_fails_or_lost_to_another_leaves_no_files(tmp_path: Path) -> None:
    frame = samples()
    with opened(tmp_path) as store:

        def fails(writer) -> None:
            writer.append(TABLE, frame)
            assert len(files(tmp_path)) == 2
            raise RuntimeError("no")

        with pytest.raises(RuntimeError):
            store.transact(fails)
        assert files(tmp_path) == []
        attempts = []

        def loses_once(writer) -> None:
            writer.append(TABLE, frame)
            attempts.append(len(files(tmp_path)))
            if len(attempts) == 1:
                raise duckdb.TransactionException("Transaction conflict: another one was first")

        store.transact(loses_once)
        assert attempts == [2, 2]
        assert store.query(f"SELECT count(*) AS n FROM {TABLE}")["n"][0] == frame.height


def test_files_are_merged_by_compaction(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for hour in range(4):
            later = samples(steps=60).with_columns(pl.col("ts") + timedelta(days=1, hours=2 * hour))
            store.transact(lambda w, rows=later: w.append(TABLE, rows))
        before = store.table_hash(TABLE)
        merged = store.compact(datetime.now(UTC))
        assert merged["groups"] == 1
        assert merged["files_before"] - merged["files_after"] == 3
        assert store.table_hash(TABLE) == before


def test_the_first_window_of_a_cluster_is_written_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        calls = []

        def first(writer) -> None:
            calls.append(1)
            writer.append(TABLE, samples())
            writer.set_mark("a-1", "prometheus", START)

        store.transact(first)
        assert calls == [1]
        assert store.mark("a-1", "prometheus") == START

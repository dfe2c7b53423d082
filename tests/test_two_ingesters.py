"""Two ingesters of one cluster at once leave the same store as one: on SQLite and PostgreSQL, on empty windows too."""

import sys
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest

from pipelines.compose import open_store
from pipelines.ingest import ingest_telemetry
from pipelines.settings import IngestSettings, load_settings, parse_settings
from pipelines.spans import TELEMETRY_MARK
from tests import services
from tests.pipelines_world import START, Recorded, samples, seconds
from tests.store_services import postgres

__all__ = ["postgres"]  # a fixture
ROOT = Path(__file__).parent.parent
TABLES = ("raw_gpu_samples", "core_gpu_samples", "core_node_samples")
SETTINGS = IngestSettings(window_s=300, overlap_s=60, lag_s=0, initial_history_s=0)
# Twenty minutes with samples, ten without, ten with: windows on both sides of a silence.
END = START + timedelta(minutes=40)


def recording(folder):
    silent = pl.col("ts").is_between(START + timedelta(minutes=20), START + timedelta(minutes=30), closed="left")
    path = folder / "telemetry.parquet"
    samples(START, END).filter(~silent).write_parquet(path)
    return path


def settings_of(folder, name, trace, store=""):
    path = folder / f"{name}.toml"
    path.write_text(f"""\
state_dir = "{folder / name}"
[store]
{store}
[ingest]
max_windows_per_run = 8
[clusters.a]
telemetry = "trace"
telemetry_path = "{trace}"
jobs = "none"
""")
    settings = load_settings(path, {})
    with open_store(settings) as opened:
        opened.transact(lambda w: w.set_mark("a", TELEMETRY_MARK, START))
    return path, settings


def ingest(path, folder, name):
    argv = [sys.executable, str(ROOT / "weatherglass.py"), "ingest"]
    return services.Process(argv, folder / f"{name}.log", env={"WEATHERGLASS_CONFIG": str(path)}, cwd=ROOT)


def rows(settings):
    with open_store(settings) as store:
        assert store.mark("a", TELEMETRY_MARK) >= END
        hashes = {table: store.table_hash(table) for table in TABLES}
        # The second process may have read windows after the recording's end.
        quality = store.query("SELECT * FROM core_data_quality WHERE window_start < ? ORDER BY ALL", [END])
        return {**hashes, "quality": quality.rows()}


def race(folder, trace, store=""):
    """Two processes at once, until everything that was recorded is read; then what the store holds."""
    path, settings = settings_of(folder, "two", trace, store)
    processes = [ingest(path, folder, f"two-{number}") for number in range(2)]
    for process in processes:
        process.wait_until(lambda process=process: not process.is_running(), 120, "ingest ends")
        assert process.stop() == 0, process.tail()
    return rows(settings)


def single(folder, trace):
    path, settings = settings_of(folder, "one", trace)
    process = ingest(path, folder, "one")
    process.wait_until(lambda: not process.is_running(), 120, "ingest ends")
    assert process.stop() == 0, process.tail()
    return rows(settings)


@pytest.mark.timeout(300)
def test_two_processes_at_once_leave_what_one_leaves(tmp_path):
    trace = recording(tmp_path)
    expected = single(tmp_path, trace)
    assert expected["raw_gpu_samples"].startswith("480:")
    assert race(tmp_path, trace) == expected


@pytest.mark.timeout(300)
def test_two_processes_at_once_on_postgresql(tmp_path, postgres):
    trace = recording(tmp_path)
    expected = single(tmp_path, trace)
    url = f'url = "postgres:{postgres}"\ndata_path = "{tmp_path}/data"'
    assert race(tmp_path, trace, url) == expected


def test_the_slower_of_two_takes_nothing_from_the_store(tmp_path):
    """It read less of a window that the other had committed meanwhile: rows are added, none is replaced."""
    settings = parse_settings({"state_dir": str(tmp_path), "clusters": {"alpha": {}}}, {})
    now = START + seconds(300)

    class Beaten(Recorded):
        def fetch(self, start, end):
            fetched = super().fetch(start, end)
            with open_store(settings) as other:  # the other ingester is quicker, and reads all
                assert ingest_telemetry(other, Recorded(), "alpha", SETTINGS, now).windows == 1
            return fetched

    late = Beaten()
    late.edit = lambda frame: frame.filter(pl.col("node") == "n1")
    with open_store(settings) as store:
        store.transact(lambda w: w.set_mark("alpha", TELEMETRY_MARK, START))
        assert ingest_telemetry(store, late, "alpha", SETTINGS, now).error is None
        assert store.mark("alpha", TELEMETRY_MARK) == now
        counts = store.query("SELECT node, count(*) AS n FROM core_gpu_samples GROUP BY node ORDER BY node")
    assert counts.rows() == [("n1", 40), ("n2", 40)]

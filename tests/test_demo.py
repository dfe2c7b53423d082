"""The demo's simulated past: all of it reaches the store, and live samples follow from its end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
from click.testing import CliRunner

from pipelines.commands import open_store
from pipelines.demo import load_history
from pipelines.preflight import DEMO, demo_settings
from pipelines.spans import TELEMETRY_MARK
from simulator.__main__ import main as simulator_main


def test_the_whole_simulated_past_is_loaded(tmp_path: Path) -> None:
    settings, _ = demo_settings({"WEATHERGLASS_STATE_DIR": str(tmp_path)})
    end = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=4)
    made = CliRunner().invoke(
        simulator_main,
        ["history", "--nodes", "2", "--hours", "2.5", "--jobs-days", "1", "--cluster", DEMO, "--tick-s", "15",
         "--until", f"{end:%Y-%m-%dT%H:%M:%S}", "--out", str(tmp_path / "sim")],
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    past = pl.scan_parquet(tmp_path / "sim" / "telemetry.parquet").filter(pl.col("ts") < end).collect()
    faults = tmp_path / "sim" / "faults.parquet"
    fault = {
        "cluster": DEMO, "node": "n1", "kind": "node_down",
        "start_time": end - timedelta(days=3), "end_time": end - timedelta(days=3, hours=-1),
    }  # fmt: skip
    pl.DataFrame([fault], schema=pl.read_parquet_schema(faults)).write_parquet(faults)
    with open_store(settings) as store:
        loaded = load_history(store, settings, DEMO, tmp_path / "sim", end + timedelta(minutes=1))
        kept = store.query("SELECT count(*) AS n, max(ts) AS newest FROM core_gpu_samples").row(0)
        assert store.mark(DEMO, TELEMETRY_MARK) >= end
        told = store.query("SELECT node, reasons FROM out_node_risks ORDER BY node")
    assert "1 fault in 28 d" in told["reasons"][0]  # the first risks that are published know of past faults
    assert not told["reasons"][1]
    assert loaded == kept[0] == past.height >= 2 * 8 * 600 - 16
    assert kept[1] == past["ts"].max()

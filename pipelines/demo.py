"""The simulated past: puts the simulator's files into the store, as ingest would have put what it had scraped.

Part of `weatherglass run` without a settings file. Live samples follow by the ordinary way, from the mark left here.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import polars as pl

from features.vocabulary import TABLES
from pipelines.ingest import Window, write_window
from pipelines.settings import Settings
from pipelines.sources import Fetched, gpu_frame, node_frame
from pipelines.spans import TELEMETRY_MARK, floor_time, split
from pipelines.steps import ingest_cluster, ingest_jobs_of, publish_cluster, publish_demand_of
from pipelines.store import Store

_PIECE = timedelta(hours=1)


def load_history(store: Store, settings: Settings, cluster: str, folder: Path, now: datetime) -> int:
    """Load jobs and faults and forecast from them, then load telemetry and derive what is derived from it.

    Args:
        store: The store.
        settings: All settings.
        cluster: Name of the cluster.
        folder: The simulator's folder: `telemetry.parquet`, `node.parquet`; `ports.parquet`, `ranks.parquet` if there.
        now: Present time, UTC.

    Returns:
        GPU samples loaded.

    Raises:
        FileNotFoundError: The simulator has not written its past.
        StoreError: The store cannot be written.
    """
    # Jobs and faults first: forecasts of jobs, windows and nodes need nothing else.
    ingest_jobs_of(store, settings, cluster, now)
    _load_faults(store, cluster, folder)
    publish_cluster(store, settings, cluster, now)
    publish_demand_of(store, settings, cluster, now)
    for name, table in (("ports", "core_port_samples"), ("ranks", "core_job_progress")):
        _load_rows(store, cluster, folder / f"{name}.parquet", table)
    gpu = pl.read_parquet(folder / "telemetry.parquet").sort("ts")
    node = pl.read_parquet(folder / "node.parquet").sort("ts")
    rows = 0
    if not gpu.is_empty():
        step = timedelta(seconds=settings.ingest.window_s)
        begin, end = floor_time(gpu["ts"][0], _PIECE), floor_time(gpu["ts"][-1], step)
        for first, last in split(begin, end, _PIECE):
            inside = (pl.col("ts") >= first) & (pl.col("ts") < last)
            fetched = Fetched(gpu_frame(gpu.filter(inside)), node_frame(node.filter(inside)))
            window = Window(cluster, first, first, last, fetched, now)
            counts = store.transact(lambda w, window=window: write_window(w, window, TELEMETRY_MARK, mark=window.end))
            rows += counts["rows"].get("core_gpu_samples", 0)
    ingest_cluster(store, settings, cluster, now)
    return rows


def _load_rows(store: Store, cluster: str, path: Path, table: str) -> None:
    """Rows of a table, an hour at a time; none where the simulator that made the folder was an older one."""
    if not path.exists():
        return
    rows = pl.read_parquet(path).with_columns(pl.lit(cluster).alias("cluster"))
    for part in rows.with_columns(_hour=pl.col("ts").dt.truncate("1h")).partition_by("_hour", include_key=False):
        store.transact(lambda w, part=part: w.append(table, part))


def _load_faults(store: Store, cluster: str, folder: Path) -> None:
    """Node faults from before the first sample; later ones are found in the samples."""
    first = pl.scan_parquet(folder / "telemetry.parquet").select(pl.col("ts").min()).collect().item()
    faults = pl.read_parquet(folder / "faults.parquet").with_columns(pl.lit(cluster).alias("cluster"))
    earlier = faults.filter(pl.col("start_time") < first) if first is not None else faults
    known = [name for name in TABLES["core_faults"].columns if name in earlier.columns]
    store.transact(lambda w: w.upsert("core_faults", earlier.select(known)))

"""The store measured: bytes per cell, insert rate, read latency, time and memory of compaction.

Telemetry is synthetic, of the kind sensors give: each node runs a job with a level of its own, quantities follow it as
first-order autoregressions with noise, temperatures lag behind power, idle GPUs sit still, configuration columns are
constant. One hour at 15 s is written in 5-minute windows and then compacted, as `ingest` and `maintain` do.

Run: `python -m benchmarks.store [GPUS]`.
"""

import resource
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

from features.vocabulary import GPU_QUANTITIES, TABLES, schema
from pipelines.store import Store

START = datetime(2026, 11, 2, tzinfo=UTC)
STEP_S = 15
WINDOW_S = 300
MINUTES = 60


def autoregression(rng, steps, gpus, pull):
    """First-order autoregressions of unit variance: float array of steps × gpus."""
    values = np.empty((steps, gpus), dtype=np.float32)
    values[0] = rng.standard_normal(gpus)
    for step in range(1, steps):
        values[step] = values[step - 1] * pull + rng.standard_normal(gpus) * np.sqrt(1 - pull**2)
    return values


def telemetry(gpus, minutes=MINUTES, seed=1):
    """One frame of `core_gpu_samples` columns, sorted by time, for `gpus` GPUs."""
    rng = np.random.default_rng(seed)
    steps = minutes * 60 // STEP_S
    node = np.arange(gpus) // 8
    nodes = node.max() + 1
    is_busy = (rng.random(nodes) < 0.8)[node]
    level = np.clip(rng.beta(6, 3, nodes), 0.2, 0.98)[node] * is_busy

    def wobble(scale, pull=0.8):
        return autoregression(rng, steps, gpus, pull) * scale * is_busy

    sm = np.clip(level + wobble(0.04), 0, 1)
    power = 70 + 620 * sm + wobble(6)
    temperature = 30 + power * 0.055 + autoregression(rng, steps, gpus, 0.97) * 0.7
    links = 1.2e11 * level + np.abs(wobble(1.5e10, 0.5))
    memory = (rng.uniform(30, 78, nodes)[node] * is_busy) * 2**30 + wobble(2e8, 0.95)
    constant = np.ones((steps, gpus), dtype=np.float32)
    columns = {
        "gpu_util_ratio": np.where(is_busy, np.clip(0.97 + wobble(0.02), 0, 1), 0),
        "engine_active_ratio": np.clip(level * 1.05 + wobble(0.03), 0, 1),
        "sm_active_ratio": sm,
        "tensor_active_ratio": np.clip(level * 0.5 + wobble(0.05, 0.5), 0, 1),
        "dram_active_ratio": np.clip(level * 0.4 + wobble(0.03), 0, 1),
        "fb_used_bytes": memory + 6e8,
        "fb_reserved_bytes": constant * 7e8,
        "fb_total_bytes": constant * 85.5e9,
        "gpu_power_w": power,
        "power_limit_w": constant * 700,
        "gpu_temp_c": temperature,
        "mem_temp_c": temperature + 6,
        "sm_clock_hz": 1.98e9 - np.where(sm > 0.8, 6e7, 0) - np.abs(wobble(1.5e7)).round(-7),
        "mem_clock_hz": constant * 2.619e9,
        "nvlink_tx_bytes_per_s": links,
        "nvlink_rx_bytes_per_s": links * (1 + wobble(0.02)),
        "pcie_tx_bytes_per_s": 2e9 * level + np.abs(wobble(2e8)),
        "pcie_rx_bytes_per_s": 1e9 * level + np.abs(wobble(1e8)),
        "xid_last": constant * 0,
        "ecc_uncorrected_total": constant * 0,
        "remapped_rows_total": constant * (rng.random(gpus) < 0.02),
        "nvlink_error_total": constant * 0,
    }
    frame = pl.DataFrame(
        {name: np.ascontiguousarray(values, dtype=np.float32).ravel() for name, values in columns.items()}
    )
    ids = np.array([f"GPU-{rng.bytes(4).hex()}-{rng.bytes(2).hex()}-{rng.bytes(6).hex()}" for _ in range(gpus)])
    at = [START + timedelta(seconds=STEP_S * step) for step in range(steps)]
    keys = pl.DataFrame({
        "ts": pl.Series(at, dtype=pl.Datetime("us", "UTC")).gather(np.repeat(np.arange(steps), gpus)),
        "node": pl.Series([f"n{n + 1}" for n in range(nodes)]).gather(np.tile(node, steps)),
        "gpu_uuid": pl.Series(ids).gather(np.tile(np.arange(gpus), steps)),
        "gpu_index": pl.Series(np.tile(np.arange(gpus, dtype=np.int32) % 8, steps)),
        "job_id": pl.Series([str(1000 + n) for n in range(nodes)]).gather(np.tile(node, steps)),
        "is_thermal_slowdown": np.zeros(steps * gpus, dtype=bool),
        "is_power_brake": np.zeros(steps * gpus, dtype=bool),
        "is_power_capped": (sm > 0.93).ravel(),
    })  # fmt: skip
    return pl.concat([keys, frame], how="horizontal").with_columns(pl.lit("bench").alias("cluster"))


def main(gpus: int = 2000) -> list[dict]:
    frame = telemetry(gpus)
    numeric = [
        name for name in GPU_QUANTITIES if schema("core_gpu_samples")[name] != pl.Boolean and name in frame.columns
    ]
    cells = sum(frame[name].len() - frame[name].null_count() for name in numeric)
    rows = []

    def row(name, value, unit, goal=None, met=None):
        rows.append({"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "met": met})

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with Store.open(f"sqlite:{folder}/catalogue.sqlite", str(data)) as store:
            windows = [START + timedelta(seconds=s) for s in range(0, MINUTES * 60, WINDOW_S)]
            parts = []
            for at in windows:
                end = at + timedelta(seconds=WINDOW_S)
                parts.append((at, end, frame.filter((pl.col("ts") >= at) & (pl.col("ts") < end))))
            began = time.perf_counter()
            for at, end, part in parts:
                store.transact(lambda w, at=at, end=end, part=part: write(w, at, end, part))
            insert_s = time.perf_counter() - began
            uncompacted = data_bytes(data)
            reads = [timed(store, one_gpu(frame)) for _ in range(5)]
            before = store.table_hash("core_gpu_samples")
            began = time.perf_counter()
            store.compact(datetime.now(UTC))
            compact_s = time.perf_counter() - began
            assert store.table_hash("core_gpu_samples") == before
            store.expire(datetime.now(UTC) + timedelta(days=30), 7)  # so that only live files are counted
            compacted = data_bytes(data)
            reads_after = [timed(store, one_gpu(frame)) for _ in range(5)]
            newest = [timed(store, newest_minutes()) for _ in range(5)]
    row("cells per row, numeric and not null", cells / frame.height, "cells")
    row("bytes per cell, compacted, keys included", compacted / cells, "bytes", "≤ 0.6", compacted / cells <= 0.6)
    row("bytes per cell, uncompacted (5-minute files)", uncompacted / cells, "bytes")
    row("bytes per row, compacted", compacted / frame.height, "bytes")
    row("insert, 5-minute windows, replace + mark", frame.height / insert_s, "rows/s")
    row("insert, 5-minute windows, replace + mark", cells / insert_s, "samples/s")
    row("compaction of the hour", compact_s, "s")
    row("read one GPU's hour, 12 files", sorted(reads)[2] * 1000, "ms")
    row("read one GPU's hour, compacted", sorted(reads_after)[2] * 1000, "ms")
    row("mean power of 10 minutes, all GPUs, compacted", sorted(newest)[2] * 1000, "ms")
    row("peak resident memory of the whole run", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MiB")
    return rows


def write(writer, start, end, frame):
    writer.replace_window("core_gpu_samples", "bench", start, end, frame)
    writer.set_mark("bench", "telemetry", end)


def one_gpu(frame):
    return "SELECT ts, gpu_temp_c FROM core_gpu_samples WHERE gpu_uuid = ? AND ts >= ?", [frame["gpu_uuid"][7], START]


def newest_minutes():
    since = START + timedelta(minutes=MINUTES - 10)
    return "SELECT gpu_uuid, avg(gpu_power_w) AS w FROM core_gpu_samples WHERE ts >= ? GROUP BY gpu_uuid", [since]


def timed(store, query):
    began = time.perf_counter()
    assert store.query(*query).height > 0
    return time.perf_counter() - began


def data_bytes(folder):
    assert "core_gpu_samples" in TABLES
    return sum(file.stat().st_size for file in folder.rglob("core_gpu_samples/**/*.parquet"))


if __name__ == "__main__":
    for line in main(*(int(arg) for arg in sys.argv[1:])):
        print(f"{line['name']:<50} {line['value']:>14,} {line['unit']:<10} {line['goal'] or '':<8} {line['met']}")

"""Reading a real Prometheus into the store, measured beside prometheus-api-client's own frames and pandas.

A Prometheus holds half an hour of GPUs with 12 metrics each, loaded by promtool. Ours: the source, `ingest_telemetry`
and the store as they run in production (5-minute windows with an overlap of a minute, rows as received and cleaned
ones), and once more in longer ones, of an hour where there is that much, as a long past is read. The peer:
`custom_query` and `MetricRangeDataFrame` for each metric and window, one pivot in pandas, cleaned by nothing, into the
same kind of store; it writes one table, ours two. Each runs in a child process: so each has its own peak of memory, and
pandas, which slows DuckDB down where it can be imported, never meets ours.

The peer wants the `bench` extra; BENCH_PATH may name a folder that holds it (`pip install --target`).
Run: `python -m benchmarks.ingest [GPUS [MINUTES]]`; `2000 125` for windows of an hour (3 GB in the temporary folder).
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

START = datetime(2026, 11, 2, tzinfo=UTC)
STEP_S = 15
WINDOW_S = 300
# Metric of the exporter, column, scale, and how its values look.
METRICS = (
    ("DCGM_FI_DEV_GPU_TEMP", "gpu_temp_c", 1, "whole"),
    ("DCGM_FI_DEV_MEMORY_TEMP", "mem_temp_c", 1, "whole"),
    ("DCGM_FI_DEV_GPU_UTIL", "gpu_util_ratio", 0.01, "whole"),
    ("DCGM_FI_DEV_FB_USED", "fb_used_bytes", 2**20, "mib"),
    ("DCGM_FI_DEV_SM_CLOCK", "sm_clock_hz", 1e6, "clock"),
    ("DCGM_FI_DEV_POWER_USAGE", "gpu_power_w", 1, "milli"),
    ("DCGM_FI_DEV_XID_ERRORS", "xid_last", 1, "zero"),
    ("DCGM_FI_PROF_SM_ACTIVE", "sm_active_ratio", 1, "ratio"),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "tensor_active_ratio", 1, "ratio"),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "dram_active_ratio", 1, "ratio"),
    ("DCGM_FI_PROF_NVLINK_TX_BYTES", "nvlink_tx_bytes_per_s", 1, "bytes"),
    ("DCGM_FI_PROF_NVLINK_RX_BYTES", "nvlink_rx_bytes_per_s", 1, "bytes"),
)


def history(path, gpus, steps):
    """Write OpenMetrics text: each node was scraped at a moment of its own, all metrics of a node at once."""
    import numpy as np

    rng = np.random.default_rng(1)
    kinds = {
        "whole": lambda: rng.integers(30, 80, steps).astype(str),
        "mib": lambda: rng.integers(30_000, 80_000, steps).astype(str),
        "clock": lambda: (1980 - 15 * rng.integers(0, 3, steps)).astype(str),
        "milli": lambda: np.char.mod("%.3f", rng.uniform(80, 700, steps)),
        "zero": lambda: np.full(steps, "0"),
        "ratio": lambda: np.char.mod("%.6f", rng.uniform(0, 1, steps)),
        "bytes": lambda: rng.integers(10**9, 4 * 10**11, steps).astype(str),
    }
    begin = START.timestamp()
    with path.open("w") as file:
        for name, _, _, kind in METRICS:
            file.write(f"# TYPE {name} gauge\n")
            for gpu in range(gpus):
                node = gpu // 8
                labels = (
                    f'{name}{{gpu="{gpu % 8}",UUID="GPU-{gpu:08x}-1c2d-4e5f-8a9b-{gpu:012x}",device="nvidia{gpu % 8}",'
                    f'modelName="NVIDIA H100 80GB HBM3",Hostname="node{node:05d}",DCGM_FI_DRIVER_VERSION="570.124.06",'
                    f'instance="10.{node >> 8}.{node & 255}.7:9400",job="dcgm"}} '
                )
                first = begin + node % 150 / 10 + 0.003
                file.write("".join(f"{labels}{v} {first + k * STEP_S:.3f}\n" for k, v in enumerate(kinds[kind]())))
        file.write("# EOF\n")


def _usage():
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def _peak_mib():
    # Not ru_maxrss: a child inherits its parent's.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def piece_s(minutes):
    """Length of the pieces that a long past is read in: an hour as `ingest --since` does, less where there is less."""
    return 3600 if minutes >= 60 else 1200 if minutes >= 20 else WINDOW_S * 2


def longer(url, minutes, folder):
    """As `ours` in longer windows, without the stages."""
    return ours(url, minutes, folder, piece_s(minutes))


def ours(url, minutes, folder, window_s=WINDOW_S):
    """Read everything through our source and ingest; returns figures."""
    import polars as pl

    from benchmarks.store import data_bytes
    from features.cleaning import clean_gpu_samples
    from pipelines.ingest import ingest_telemetry
    from pipelines.settings import Cluster, IngestSettings
    from pipelines.sources import build_telemetry
    from pipelines.store import Store

    end = START + timedelta(minutes=minutes)
    settings = IngestSettings(window_s=window_s, initial_history_s=minutes * 60, max_windows_per_run=10_000)
    out = {}
    with Store.open(f"sqlite:{folder}/ours.sqlite", f"{folder}/ours") as store:
        source = build_telemetry("bench", Cluster(prometheus_url=url), Path(folder))
        wall, cpu = time.perf_counter(), _usage()
        report = ingest_telemetry(store, source, "bench", settings, end + timedelta(seconds=30))
        out["wall_s"], out["cpu_s"] = time.perf_counter() - wall, _usage() - cpu
        assert report.error is None, report.error
        out["peak_mib"] = _peak_mib()
        out["rows"] = store.query("SELECT count(*) AS n FROM core_gpu_samples")["n"][0]
        columns = ", ".join(f"count({column}) AS {column}" for _, column, _, _ in METRICS)
        out["samples"] = sum(store.query(f"SELECT {columns} FROM core_gpu_samples").row(0))
        store.compact(datetime.now(UTC))
        store.expire(datetime.now(UTC) + timedelta(days=30), 7)  # so that only live files are counted
        out["core_bytes"] = data_bytes(Path(folder) / "ours")
        source.close()
    if window_s != WINDOW_S:
        return out
    # The stages, one after another, on a source that is as new as the first one was.
    source = build_telemetry("bench", Cluster(prometheus_url=url), Path(folder))
    stages = {"query, receive, decode": 0.0, "rows": 0.0, "clean": 0.0}
    inner = source._reader.read

    def timed(first, last):
        pieces = inner(first, last)
        while True:
            began = _usage()
            piece = next(pieces, None)
            stages["query, receive, decode"] += _usage() - began
            if piece is None:
                return
            yield piece

    source._reader.read = timed
    for at in range(0, minutes * 60, WINDOW_S):
        begin, until = START + timedelta(seconds=at - settings.overlap_s), START + timedelta(seconds=at + WINDOW_S)
        before, decoded = _usage(), stages["query, receive, decode"]
        frame = source.fetch(begin, until).gpu
        stages["rows"] += _usage() - before - (stages["query, receive, decode"] - decoded)
        before = _usage()
        clean_gpu_samples(frame.with_columns(pl.lit("bench").alias("cluster")), until)
        stages["clean"] += _usage() - before
    source.close()
    stages["store"] = out["cpu_s"] - sum(stages.values())
    read = out["samples"] * (1 + settings.overlap_s / WINDOW_S)
    reading_s = stages["query, receive, decode"] + stages["rows"]
    return out | {"stages": stages, "read_per_core_s": read / reading_s}


def peer(url, minutes, folder):
    """Read the same through MetricRangeDataFrame and pandas; returns figures."""
    import pandas as pd
    import polars as pl
    from prometheus_api_client import PrometheusConnect
    from prometheus_api_client.metric_range_df import MetricRangeDataFrame

    from pipelines.store import Store

    keys = ["timestamp", "Hostname", "UUID", "gpu"]
    client = PrometheusConnect(url, timeout=120)
    samples = 0
    reading_s = 0.0
    with Store.open(f"sqlite:{folder}/peer.sqlite", f"{folder}/peer") as store:
        wall, cpu = time.perf_counter(), _usage()
        for at in range(0, minutes * 60, WINDOW_S):
            begin, end = START + timedelta(seconds=at), START + timedelta(seconds=at + WINDOW_S)
            before, parts = _usage(), []
            for name, _, _, _ in METRICS:
                answer = client.custom_query(f"{name}[{WINDOW_S}s]", params={"time": f"{end.timestamp():.3f}"})
                part = MetricRangeDataFrame(answer).reset_index()
                parts.append(part[[*keys, "__name__", "value"]])
            table = pd.concat(parts)
            samples += len(table)
            wide = table.pivot_table(index=keys, columns="__name__", values="value", aggfunc="max").reset_index()
            frame = pl.DataFrame(
                {
                    "ts": pl.Series(wide["timestamp"].to_numpy("datetime64[us]")).dt.replace_time_zone("UTC"),
                    "cluster": ["bench"] * len(wide),
                    "node": wide["Hostname"].to_list(),
                    "gpu_uuid": wide["UUID"].to_list(),
                    "gpu_index": wide["gpu"].astype(int).to_numpy(),
                    **{column: wide[name].to_numpy() * scale for name, column, scale, _ in METRICS},
                }
            ).filter((pl.col("ts") >= begin) & (pl.col("ts") < end))
            reading_s += _usage() - before

            def write(writer, begin=begin, end=end, frame=frame):
                writer.replace_window("core_gpu_samples", "bench", begin, end, frame)
                writer.set_mark("bench", "telemetry", end)

            store.transact(write)
        wall, cpu = time.perf_counter() - wall, _usage() - cpu
    per_s = samples / reading_s
    return {"wall_s": wall, "cpu_s": cpu, "samples": samples, "peak_mib": _peak_mib(), "read_per_core_s": per_s}


def _child(part, url, minutes, folder, path=""):
    """Run a part in a process of its own; its last line is what it found."""
    env = dict(os.environ)
    if path:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, env.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "benchmarks.ingest", "--part", part, url, str(minutes), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{part}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(gpus=2000, minutes=30):
    from tests.services import Prometheus

    rows = []

    def row(name, value, unit, goal=None, met=None):
        rows.append({"name": name, "value": round(float(value), 4), "unit": unit, "goal": goal, "met": met})

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "history.om"
        history(text, gpus, minutes * 60 // STEP_S)
        server = Prometheus(Path(folder) / "prometheus", history=text)
        try:
            us = _child("ours", server.url, minutes, folder)
            again = Path(folder) / "longer"
            again.mkdir()
            long = _child("longer", server.url, minutes, again)
            path = os.environ.get("BENCH_PATH", "")
            part = min(minutes, max(5, 10 * 2000 // gpus))  # the peer's speed does not depend on how long it goes on
            try:
                other = _child("peer", server.url, part, folder, path)
            except RuntimeError as error:
                if "No module named 'pandas'" not in str(error) and "Pandas is required" not in str(error):
                    raise
                other = None
        finally:
            server.stop()
    samples, wall = us["samples"], us["wall_s"]
    expected = gpus * len(METRICS) * (minutes * 60 // STEP_S)
    row(f"samples stored, {gpus:,} GPUs × {len(METRICS)} metrics × {minutes} min", samples, f"of {expected:,}")
    row("ours, stored samples for each s of a core", samples / us["cpu_s"], "samples/s", "≥ 1,000,000",
        samples / us["cpu_s"] >= 1e6)  # fmt: skip
    row("ours, stored samples for each s of the clock", samples / wall, "samples/s")
    per_s = long["samples"] / long["cpu_s"]
    longer_name = f"  in windows of {piece_s(minutes) // 60} minutes"
    row(longer_name, per_s, "samples/s", "≥ 1,000,000", per_s >= 1e6)
    row(f"{longer_name}, by the clock", long["samples"] / long["wall_s"], "samples/s")
    row("  reading alone: query to rows", us["read_per_core_s"], "samples/s")
    for stage, cpu_s in us["stages"].items():
        row(f"  {stage}", cpu_s / us["cpu_s"] * 100, "% of its time")
    if other is None:
        row("peer not measured: needs the bench extra (BENCH_PATH)", 0, "")
    else:
        theirs = other["samples"] / other["wall_s"]
        row("MetricRangeDataFrame + pandas, for each s of the clock", theirs, "samples/s")
        row("ours : peer, by the clock", samples / wall / theirs, "×", "≥ 8", samples / wall / theirs >= 8)
        row("ours : peer, by time of a core", samples / us["cpu_s"] / (other["samples"] / other["cpu_s"]), "×")
        row(longer_name, per_s / (other["samples"] / other["cpu_s"]), "×")
        row(f"{longer_name}, by the clock", long["samples"] / long["wall_s"] / theirs, "×")
        row("  reading alone", us["read_per_core_s"] / other["read_per_core_s"], "×")
        row("peer's peak memory", other["peak_mib"], "MiB")
    row("peak memory", us["peak_mib"], "MiB")
    row(longer_name, long["peak_mib"], "MiB")
    row("bytes for each stored sample, cleaned rows, compacted", us["core_bytes"] / samples, "bytes")
    day = 10_000 * len(METRICS) * 86_400 / STEP_S
    row("catch-up of a day of 10,000 GPUs, extrapolated by the clock", day / (samples / wall) / 60, "min")
    row(longer_name, day / (long["samples"] / long["wall_s"]) / 60, "min")
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        run = {"ours": ours, "longer": longer, "peer": peer}[sys.argv[2]]
        print(json.dumps(run(sys.argv[3], int(sys.argv[4]), sys.argv[5])))
    else:
        for line in main(*(int(arg) for arg in sys.argv[1:])):
            print(f"{line['name']:<70} {line['value']:>14,} {line['unit']:<16} {line['goal'] or '':<12} {line['met']}")

"""How fast the simulator writes history, and what it costs to be scraped by a real Prometheus at 1,000 nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

LIVE_NODES = 1000
LIVE_TICK_S = 15
WATCH_S = 60


def _history(nodes: int, hours: float, tick_s: float, jobs_days: float) -> tuple[float, float, int, float]:
    """Seconds with the jobs before it, CPU seconds, samples, and bytes per sample."""
    from simulator.cluster import SimulatedCluster
    from simulator.history import write_history

    out = Path(tempfile.mkdtemp(prefix="weatherglass-bench-"))
    try:
        began, used = time.perf_counter(), time.process_time()
        start = datetime(2026, 11, 2, tzinfo=UTC)
        cluster = SimulatedCluster(nodes, 7, start - timedelta(days=jobs_days), tick_s, fault_scale=20)
        cluster.advance_jobs(start)
        rows = write_history(cluster, out, start + timedelta(hours=hours))
        spent, used = time.perf_counter() - began, time.process_time() - used
        return spent, used, rows, (out / "telemetry.parquet").stat().st_size / rows
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def _wait(check, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            if check():
                return True
        time.sleep(0.25)
    return False


def _stop(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _live(prometheus: str) -> dict[str, float]:
    """CPU seconds per second of the exporters of 1,000 nodes while Prometheus scrapes them all."""
    folder = Path(tempfile.mkdtemp(prefix="weatherglass-bench-"))
    port, db_port = _free_port(), _free_port()
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {LIVE_TICK_S}s, scrape_timeout: 10s}}\n"
        f"scrape_configs:\n- job_name: gpu\n  http_sd_configs: [{{url: 'http://127.0.0.1:{port}/sd'}}]\n"
    )
    children: list[subprocess.Popen] = []

    def start(*argv: str) -> subprocess.Popen:
        log = (folder / f"{len(children)}.log").open("wb")
        child = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        children.append(child)
        return child

    try:
        simulator = start(
            sys.executable, "-m", "simulator", "serve", "--nodes", str(LIVE_NODES), "--port", str(port), "--tick-s",
            str(LIVE_TICK_S), "--history-hours", "0", "--jobs-days", "0.5", "--out", str(folder / "sim"),
        )  # fmt: skip
        if not _wait(lambda: _get(f"http://127.0.0.1:{port}/healthz"), 180):
            raise RuntimeError((folder / "0.log").read_text()[-2000:])
        start(
            prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
            f"--web.listen-address=127.0.0.1:{db_port}", "--log.level=warn",
        )  # fmt: skip

        def up() -> float:
            url = f"http://127.0.0.1:{db_port}/api/v1/query?query=sum(up)"
            result = json.loads(_get(url))["data"]["result"]
            return float(result[0]["value"][1]) if result else 0.0

        _wait(lambda: up() >= 0.95 * LIVE_NODES, 120)
        time.sleep(LIVE_TICK_S)
        process = psutil.Process(simulator.pid)
        before, began = process.cpu_times(), time.monotonic()
        busy = json.loads(_get(f"http://127.0.0.1:{port}/healthz"))
        time.sleep(WATCH_S)
        after, spent = process.cpu_times(), time.monotonic() - began
        later = json.loads(_get(f"http://127.0.0.1:{port}/healthz"))
        cpu = after.user + after.system - before.user - before.system
        query = f"http://127.0.0.1:{db_port}/api/v1/query?query="
        series = json.loads(_get(query + "count(DCGM_FI_DEV_GPU_TEMP)"))["data"]["result"][0]["value"][1]
        p95 = json.loads(_get(query + "quantile(0.95,scrape_duration_seconds)"))["data"]["result"][0]["value"][1]
        return {
            "cpu": cpu / spent,
            "tick": (later["busy_s"] - busy["busy_s"]) / max(1, later["ticks"] - busy["ticks"]),
            "up": up(),
            "down": later["nodes_down"],
            "gpus": float(series),
            "p95": float(p95),
            "rss": process.memory_info().rss / 2**20,
        }
    finally:
        for child in reversed(children):
            _stop(child)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> list[dict]:
    rows: list[dict] = []

    def add(name: str, value: float, unit: str, goal: str = "", met: bool | None = None) -> None:
        rows.append({"name": name, "value": value, "unit": unit, "goal": goal, "met": met})

    spent, used, samples, size = _history(32, 6, 5, 21)
    add("history, 32 nodes, 6 h at 5 s, 21 days of jobs", spent, "s", "<= 15 s", spent <= 15)
    add("  CPU", used, "s")
    add("  GPU samples per second", samples / spent, "samples/s")
    add("  bytes per sample (27 quantities)", size, "bytes")
    spent, used, samples, _ = _history(64, 14 * 24, 60, 0)
    add("history, 64 nodes, 2 weeks at 60 s", spent, "s", "<= 300 s", spent <= 300)
    add("  CPU", used, "s")
    add("  GPU samples per second", samples / spent, "samples/s")
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        add("exporters, 1,000 nodes (Debian package prometheus is not installed)", float("nan"), "")
        return rows
    live = _live(prometheus)
    add("exporters, 1,000 nodes at 15 s: CPU", live["cpu"], "cores", "<= 0.4", live["cpu"] <= 0.4)
    add("  one tick of 8,000 GPUs", live["tick"], "s")
    add("  targets up in Prometheus (of those not down)", live["up"], "targets", f">= {LIVE_NODES - live['down']:g}",
        live["up"] >= LIVE_NODES - live["down"])  # fmt: skip
    add("  scrape duration, 95th percentile", live["p95"], "s")
    add("  memory", live["rss"], "MiB")
    return rows

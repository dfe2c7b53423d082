"""What a nowcast by alert rules costs: 48 queries of `predict_linear` in a real Prometheus, on `fleet.py`.

12 quantities × 4 horizons, each with a threshold (a straight line through ten minutes rises late: limits are set so
that it finds some), over the newest ten minutes, two queries at a time as a rule group on two cores would. The same
series as the nowcast's rings hold: 40 samples of each quantity of each GPU, sent by remote-write and held in
Prometheus's memory. `python -m benchmarks.promql_peer --gpus 10000` prints JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cramjam
import numpy as np

from benchmarks.fleet import INTERVAL_S, PAGE, SLOTS, Fleet
from benchmarks.protobuf import field, varint

HORIZONS_S = (30, 60, 90, 120)
SERIES = 1_000  # a request
# A limit each, on the side that few GPUs reach.
LIMITS = {
    "gpu_temp_c": "> 82", "gpu_temp_margin_c": "< 5", "mem_temp_c": "> 90", "gpu_power_w": "> 740",
    "sm_clock_hz": "< 1000", "sm_active_ratio": "< 0.2", "fb_used_bytes": "> 77000", "fb_reserved_bytes": "> 2000",
    "fb_free_bytes": "< 4096", "nvlink_tx_bytes_per_s": "> 3.1e11", "nvlink_rx_bytes_per_s": "> 3.1e11",
    "step_time_s": "> 1.12",
}  # fmt: skip


def _samples(values: np.ndarray, times_ms: list[int]) -> np.ndarray:
    """Samples of some series as they stand in a request: bytes, shape (series, slots × 19)."""
    stamps = [varint(ms) for ms in times_ms]
    width = len(stamps[0])
    assert {len(stamp) for stamp in stamps} == {width}
    out = np.empty((*values.shape, 2 + 9 + 1 + width), dtype=np.uint8)
    out[..., 0], out[..., 1] = 0x12, 10 + width
    out[..., 2], out[..., 11] = 0x09, 0x10
    out[..., 3:11] = values.astype("<f8")[..., None].view(np.uint8).reshape(*values.shape, 8)
    out[..., 12:] = np.array([list(stamp) for stamp in stamps], dtype=np.uint8)
    return out.reshape(len(values), -1)


def _fill(url: str, fleet: Fleet, at_s: float) -> None:
    """Send all samples of the fleet, the newest at a moment."""
    times_ms = [round((at_s - INTERVAL_S * back) * 1000) for back in range(SLOTS - 1, -1, -1)]
    ticks = [fleet.columns(tick + 5) for tick in range(SLOTS)]
    uuids = fleet.keys[1].to_list()
    head = {
        "Content-Type": "application/x-protobuf", "Content-Encoding": "snappy",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    }  # fmt: skip
    for name, column, scale in PAGE:
        if column not in LIMITS:
            continue
        if column == "fb_free_bytes":
            slots = [t["fb_total_bytes"] - t["fb_used_bytes"] - t["fb_reserved_bytes"] for t in ticks]
        else:
            slots = [t[column] for t in ticks]
        values = np.stack(slots, axis=1) * scale
        for first in range(0, fleet.gpus, SERIES):
            part = _samples(values[first : first + SERIES], times_ms)
            body = []
            for gpu, samples in enumerate(part, first):
                labels = (("UUID", uuids[gpu]), ("__name__", name), ("gpu", str(gpu % 8)), ("node", f"n{gpu // 8 + 1}"))
                told = b"".join(field(0x0A, field(0x0A, k.encode()) + field(0x12, v.encode())) for k, v in labels)
                body.append(field(0x0A, told + samples.tobytes()))
            packed = bytes(cramjam.snappy.compress_raw(b"".join(body)))
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/api/v1/write", packed, head), timeout=120
            ) as answer:
                assert answer.status in (200, 204), answer.status


def _ask(url: str, query: str, at_s: float) -> int:
    asked = urllib.parse.urlencode({"query": query, "time": f"{at_s:.3f}", "timeout": "600s"})
    with urllib.request.urlopen(f"{url}/api/v1/query?{asked}", timeout=600) as answer:
        return len(json.loads(answer.read())["data"]["result"])


def measure(gpus: int, rounds: int = 3) -> dict[str, float] | None:
    """Seconds of all queries, median of some rounds, and how many series they gave; None without a Prometheus."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        return None
    from tests.services import Prometheus

    with tempfile.TemporaryDirectory() as name:
        flags = ("--web.enable-remote-write-receiver", "--query.max-samples=200000000", "--query.timeout=10m")
        server = Prometheus(Path(name), flags=flags)
        try:
            at_s = time.time() - 5
            began = time.perf_counter()
            _fill(server.url, Fleet(gpus), at_s)
            filled = time.perf_counter() - began
            queries = [
                f"predict_linear({metric}[10m], {horizon_s}) {LIMITS[column]}"
                for metric, column, _ in PAGE
                if column in LIMITS
                for horizon_s in HORIZONS_S
            ]
            held = _ask(server.url, 'count({__name__=~".+",UUID=~".+"})', at_s)
            assert held == 1
            laps, found = [], 0
            for _ in range(rounds):
                began = time.perf_counter()
                with ThreadPoolExecutor(2) as pool:
                    found = sum(pool.map(lambda query: _ask(server.url, query, at_s), queries))
                laps.append(time.perf_counter() - began)
            return {"seconds": float(np.median(laps)), "found": found, "filled": filled, "queries": len(queries)}
        finally:
            server.stop()


def main() -> list[dict[str, Any]]:
    """Rows of the benchmark, at 10,000 GPUs; the ratio to the nowcast stands in `benchmarks nowcast`."""
    found = measure(10_000)
    if found is None:
        return [{"name": "no prometheus here", "value": 0, "unit": "", "goal": "", "met": None}]
    return [{"name": "10,000 GPUs: 48 queries of predict_linear, two at a time", "value": found["seconds"], "unit": "s",
             "goal": "", "met": None}]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=10_000)
    print(json.dumps(measure(parser.parse_args().gpus)))

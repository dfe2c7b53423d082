"""Remote-write: a tick of 12 quantities received, decoded and kept, at 1,000, 10,000 and 100,000 GPUs.

Bodies are made here as Prometheus spells them, with the labels of dcgm-exporter, and sent over loopback by a process of
its own on several connections, as the shards of a Prometheus do. Each size runs in a process of its own, so that its
peak memory is its own. The same tick is also read by instant queries from a real Prometheus, where one is installed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cramjam
import numpy as np

from benchmarks.protobuf import field, varint

SIZES = (1_000, 10_000, 100_000)
TICKS = 3
INTERVAL_MS = 15_000
SENT = 2_000  # samples a request, Prometheus's default since 2.5x; 500 before
CONNECTIONS = 4
ZEROS = {"DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_ROW_REMAP_FAILURE"}
NAMES = (
    "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_NVLINK_TX_BYTES",
    "DCGM_FI_PROF_NVLINK_RX_BYTES",
)  # fmt: skip


def labels_of(gpu: int, name: str) -> dict[str, str]:
    """Labels as dcgm-exporter on Kubernetes gives them, and those of the scrape."""
    node = f"gpu-node-{gpu // 8:05d}"
    return {
        "DCGM_FI_DRIVER_VERSION": "550.144.03",
        "Hostname": node,
        "UUID": f"GPU-{gpu:08x}-6d3c-22ed-0ec8-{gpu:012x}",
        "__name__": name,
        "container": "trainer",
        "device": f"nvidia{gpu % 8}",
        "gpu": str(gpu % 8),
        "instance": f"{node}:9400",
        "job": "dcgm-exporter",
        "modelName": "NVIDIA H100 80GB HBM3",
        "namespace": "team-a",
        "pci_bus_id": f"00000000:{gpu % 8:02X}:00.0",
        "pod": f"train-{gpu // 64}-worker-{gpu // 8 % 8}",
    }


def _label_bytes(gpus: int) -> Iterator[tuple[str, bytes]]:
    for gpu in range(gpus):
        for name in NAMES:
            labels = labels_of(gpu, name).items()
            yield name, b"".join(field(0x0A, field(0x0A, k.encode()) + field(0x12, v.encode())) for k, v in labels)


def bodies(series: list[tuple[str, bytes]], ts_ms: int, seed: int) -> list[bytes]:
    """The requests of one tick."""
    values = np.random.default_rng(seed).uniform(1, 100, len(series)).round(1).tolist()
    time_bytes = b"\x10" + varint(ts_ms)
    made = []
    for at in range(0, len(series), SENT):
        part = []
        for (name, labels), value in zip(series[at : at + SENT], values[at : at + SENT], strict=True):
            number = b"" if name in ZEROS else b"\x09" + struct.pack("<d", value)
            part.append(field(0x0A, labels + field(0x12, number + time_bytes)))
        made.append(bytes(cramjam.snappy.compress_raw(b"".join(part))))
    return made


def send(port: int, folder: Path) -> None:
    """Sender of one tick, a process of its own: every file of the folder, on a few connections."""
    files = sorted(folder.iterdir())
    contents = [path.read_bytes() for path in files]
    failed: list[int] = []

    def work(part: list[bytes]) -> None:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        head = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
        for body in part:
            link.request("POST", "/api/v1/write", body, head)
            answer = link.getresponse()
            answer.read()
            if answer.status != 204:
                failed.append(answer.status)

    began = time.perf_counter()
    threads = [threading.Thread(target=work, args=(contents[i::CONNECTIONS],)) for i in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seconds": time.perf_counter() - began, "failed": failed}))


def measure(gpus: int) -> dict[str, float]:
    """One size, in this process: seconds of each stage, and peak memory."""
    from pipelines.sources.remote_write import RemoteWriteSource
    from pipelines.sources.remote_write_series import Series
    from pipelines.sources.remote_write_wire import decompress, split

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _child("--make", str(folder), "--gpus", str(gpus))
        found = _received(RemoteWriteSource("bench", folder / "spool", port=0), folder, gpus)
        ticks = [[path.read_bytes() for path in sorted((folder / str(k)).iterdir())] for k in (0, 1)]
    found["bytes_per_sample"] = sum(map(len, ticks[0])) / (gpus * len(NAMES))
    # The stages each for itself, without the network: the second tick meets known series only.
    known = Series()
    for label, tick in (("first", ticks[0]), ("known", ticks[1])):
        laps = np.zeros(3)
        for body in tick:
            a = time.process_time()
            message = decompress(body, 1 << 28)
            b = time.process_time()
            entries = split(message)
            c = time.process_time()
            known.take(entries)
            laps += (b - a, c - b, time.process_time() - c)
        if label == "first":
            found["resolve_first"] = laps[2]
        else:
            found["snappy"], found["protobuf"], found["decode"] = laps.tolist()
    return found


def make(folder: Path, gpus: int) -> None:
    """The requests of every tick as files, made in a process of its own: their memory is not the receiver's."""
    series = list(_label_bytes(gpus))
    start_ms = round(time.time() * 1000) - (TICKS + 1) * INTERVAL_MS
    for k in range(TICKS + 1):
        (folder / str(k)).mkdir()
        for i, body in enumerate(bodies(series, start_ms + k * INTERVAL_MS, k)):
            (folder / str(k) / f"{i:05d}").write_bytes(body)


def _child(*arguments: str) -> str:
    argv = [sys.executable, "-m", "benchmarks.remote_write", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def _received(source: Any, folder: Path, gpus: int) -> dict[str, float]:
    from datetime import UTC, datetime, timedelta

    found: dict[str, float] = {}
    port = source.listen()
    walls, works, frames = [], [], []
    for k in range(TICKS + 1):
        before = time.process_time()
        sent = json.loads(_child("--send", str(folder / str(k)), "--port", str(port)))
        assert not sent["failed"], sent["failed"][:3]
        works.append(time.process_time() - before)
        walls.append(sent["seconds"])
        began = time.perf_counter()
        latest = source.latest()
        frames.append(time.perf_counter() - began)
        assert latest.gpu.height == gpus, latest.gpu.height
    found["received_first"], found["received"] = walls[0], float(np.median(walls[1:]))
    found["received_cpu"], found["to_frames"] = float(np.median(works[1:])), float(np.median(frames[1:]))
    # Linux gives KiB.
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    logs = sum(path.stat().st_size for path in source.folder.glob("samples-*"))
    found["log_bytes_per_sample"] = logs / ((TICKS + 1) * gpus * len(NAMES))
    source.close()
    now = datetime.now(UTC)
    for label in ("fetch_first", "fetch"):
        began = time.perf_counter()
        rows = source.fetch(now - timedelta(minutes=10), now).gpu.height
        found[label] = time.perf_counter() - began
        assert rows == gpus * (TICKS + 1), rows
    return found


def by_query(gpus: int) -> float | None:
    """Seconds of reading the same tick from a real Prometheus by queries; None without one."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        return None
    from pipelines.sources.prometheus import PrometheusSource
    from tests.services import Prometheus

    with tempfile.TemporaryDirectory() as name:
        rng, lines = np.random.default_rng(1), []
        at = time.time() - 20
        for metric in NAMES:
            lines.append(f"# TYPE {metric} gauge")
            for gpu, value in enumerate(rng.uniform(1, 100, gpus).round(1).tolist()):
                labels = ",".join(f'{k}="{v}"' for k, v in labels_of(gpu, metric).items() if k != "__name__")
                lines += [f"{metric}{{{labels}}} {value} {at + k * 15:.3f}" for k in (-1, 0)]
        server = Prometheus(Path(name), history="\n".join(lines) + "\n")
        try:
            source = PrometheusSource(
                "bench", server.url, timeout_s=120, exporter_interval_s=300
            )  # loading takes a while
            laps = []
            for _ in range(3):  # the first learns the series
                began = time.perf_counter()
                height = source.latest().gpu.height
                laps.append(time.perf_counter() - began)
                assert height == gpus, height
            source.close()
            return float(np.median(laps[1:]))
        finally:
            server.stop()


def main() -> list[dict[str, Any]]:
    """Every size; rows for `python -m benchmarks`."""
    rows: list[dict[str, Any]] = []

    def row(name: str, value: float, unit: str, goal: str = "", met: bool | None = None) -> None:
        rows.append({"name": name, "value": value, "unit": unit, "goal": goal, "met": met})

    for gpus in SIZES:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.remote_write", "--gpus", str(gpus)],
            capture_output=True, text=True, env={**os.environ, "POLARS_MAX_THREADS": "1"}, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found = json.loads(done.stdout)
        size = f"{gpus:,} GPUs:"
        largest = gpus == SIZES[-1]
        decoded = found["received_cpu"]
        row(
            f"{size} receive, decode, to disk: processor",
            decoded,
            "s a tick",
            "≤ 3" if largest else "",
            decoded <= 3 if largest else None,
        )
        row(f"{size} the same, sent until acknowledged", found["received"], "s a tick")
        row(f"{size}   of it snappy", found["snappy"], "s")
        row(f"{size}   of it protobuf", found["protobuf"], "s")
        row(f"{size}   of it known series and samples", found["decode"], "s")
        row(f"{size} first tick: resolve the labels", found["resolve_first"], "s")
        row(f"{size} frames of the newest samples", found["to_frames"], "s a tick")
        row(f"{size} fetch of {TICKS + 1} ticks from the log", found["fetch"], "s")
        row(f"{size} the same in a new process", found["fetch_first"], "s")
        row(f"{size} sent", found["bytes_per_sample"], "B/sample")
        row(f"{size} log", found["log_bytes_per_sample"], "B/sample")
        row(f"{size} peak memory", found["peak_bytes"] / 2**20, "MiB")
        if gpus <= 10_000 and (queried := by_query(gpus)) is not None:
            row(f"{size} the same tick by a query", queried, "s a tick")
            ours = found["received_cpu"] + found["to_frames"]
            row(f"{size} query / (receive + frames)", queried / ours, "×", "> 1", queried > ours)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--send", type=Path)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.send:
        send(options.port, options.send)
    elif options.make:
        make(options.make, options.gpus)
    else:
        print(json.dumps(measure(options.gpus)))

"""Hints API against a bare ASGI function that returns the same bytes on the same server.

Two questions: how many hot reads a second (wrk, as fast as it goes), and how long one takes at a scheduler's pace (300
a second on 4 connections, counted from when each was due, while snapshots are being replaced and a core is busy).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
CLUSTER = "alpha"
ROUNDS = 5
WRK_S = 2
PACE_PER_S = 300
CONNECTIONS = 4
PACED_S = 10.0
PUBLISH_EVERY_S = 5.0
SELDOM = 4


def publish(root: Path, seed: int = 1) -> None:
    """200 bottlenecks and 500 windows, and with every fourth seed 700 node risks and 5,000 jobs."""
    from scheduler_hints.schema import Bottleneck, JobForecast, NodeRisk, Quantiles, Window
    from scheduler_hints.snapshot import Publisher

    rng = random.Random(seed)
    now = datetime.now(UTC)
    runtime = Quantiles(*(300.0 * k + rng.random() for k in range(1, 9)))
    bottlenecks = [
        Bottleneck(
            f"b{i}", CLUSTER, "thermal_throttle", "gpu", f"n{i % 90}", f"GPU-{i:08x}", "r1", "p1", 60, 0.7,
            {"30": 0.1, "60": 0.7, "90": 0.8, "120": round(rng.uniform(0.8, 1), 3)}, now, False, [str(i)], "reserve",
            ["margin to slowdown falls by 4 °C a minute"], "bottleneck-1",
        )
        for i in range(200)
    ]  # fmt: skip
    windows = [
        Window(
            f"w{i}", CLUSTER, [f"n{i}", f"n{i + 1}"], 8 * (1 + i % 4), now, now + timedelta(hours=1 + i % 5),
            3600.0 * (1 + i % 5), round(rng.uniform(0.8, 1), 3), "rack", "r1", "p1", str(i), [str(i), str(i + 1)],
        )
        for i in range(500)
    ]  # fmt: skip
    risks = [NodeRisk(CLUSTER, f"n{i}", 0.001, 0.01, 0.05, False, [], "node-1") for i in range(700)]
    jobs = [
        JobForecast(
            CLUSTER, str(i), "RUNNING" if i % 2 else "PENDING", f"u{i % 50}", "train", 2, 16, now, now, 86_400,
            [f"n{i % 1000}", f"n{i % 1000 + 1}"], runtime, runtime, None, 0.1, None, None, None, None, "runtime-1", now,
        )
        for i in range(5_000)
    ]  # fmt: skip
    publisher = Publisher(root, CLUSTER)
    every_tick: list[tuple[Any, Any]] = [("bottlenecks", bottlenecks), ("backfill-windows", windows)]
    seldom: list[tuple[Any, Any]] = [("node-risks", risks), ("jobs", jobs)]
    for kind, items in every_tick + (seldom if seed % SELDOM == 1 else []):
        publisher.publish(
            kind, items, ttl_s=600, data_age_s=rng.uniform(1, 3), model_versions={"runtime": "runtime-1"},
            actionable_horizon_s=60.0,
        )  # fmt: skip


def ask(connection: socket.socket, path: str, etag: str = "") -> tuple[int, dict[str, str], bytes]:
    """One GET on an open connection: status, headers, body."""
    condition = f"If-None-Match: {etag}\r\n" if etag else ""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{condition}\r\n".encode())
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        part = connection.recv(1 << 20)
        if not part:
            raise ConnectionError("closed by the server")
        data += part
    lines = data[:end].decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    body = bytearray(data[end + 4 :])
    length = int(headers.get("content-length", "0"))
    while len(body) < length:
        body += connection.recv(1 << 20)
    return int(lines[0].split()[1]), headers, bytes(body)


@dataclass(frozen=True)
class Running:
    """A server process and where it listens."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU time it has used: what a request costs, however busy the machine is."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system


@contextmanager
def server(*arguments: str) -> Generator[Running]:
    """A server process."""
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                raise RuntimeError(f"{arguments[0]} did not start: {line!r}")
            yield Running(int(line.rsplit(":", 1)[1]), process.pid)
        finally:
            process.terminate()
            process.wait(10)


def hints_server(root: Path) -> Any:
    return server("scheduler_hints.server", "--published", str(root), "--cluster", CLUSTER, "--port", "0")


def bare_server(answers: Path) -> Any:
    return server("benchmarks.api", "bare", str(answers))


def serve_bare(answers: Path) -> None:
    """The peer: an ASGI function that looks nothing up but which of the recorded answers was asked for."""
    from scheduler_hints.server import serve

    table = json.loads(answers.read_text())
    ready = {
        key: (
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in headers],
            },
            {"type": "http.response.body", "body": body.encode(), "more_body": False},
        )
        for key, (status, headers, body) in table.items()
    }
    only = next(iter(ready.values())) if len(ready) == 1 else None

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        start, body = only or ready[f"{scope['path']}?{scope['query_string'].decode()}"]
        await send(start)
        await send(body)

    serve(lambda: bare, "127.0.0.1", 0, on_listening=lambda port: print(f"listening on 127.0.0.1:{port}", flush=True))


def record(port: int, requests: Sequence[tuple[str, str]], path: Path) -> None:
    """Write what the API answers, for the bare function to say again."""
    drop = {"server", "date", "connection"}
    table: dict[str, Any] = {}
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for target, etag in requests:
            status, headers, body = ask(connection, target, etag)
            kept = [(name, value) for name, value in headers.items() if name not in drop]
            table[target if "?" in target else target + "?"] = (status, kept, body.decode())
    path.write_text(json.dumps(table))


def wrk(running: Running, target: str, etag: str) -> tuple[float, float]:
    """Requests per second on 8 connections, and CPU time of the server per request, µs."""
    header = ["-H", f"If-None-Match: {etag}"] if etag else []
    command = ["wrk", "-t1", "-c8", f"-d{WRK_S}s", *header, f"http://127.0.0.1:{running.port}{target}"]
    before_s = running.cpu_s()
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx or 3xx" in text or "Socket errors" in text:
        raise RuntimeError(f"wrk saw errors on {target}:\n{text}")
    cpu_s = running.cpu_s() - before_s
    rate, count = re.search(r"Requests/sec:\s+([\d.]+)", text), re.search(r"(\d+) requests in", text)
    assert rate is not None, text
    assert count is not None, text
    return float(rate.group(1)), 1e6 * cpu_s / int(count.group(1))


def pace(port: int, requests: Sequence[tuple[str, str]], seconds: float) -> list[float]:
    """Send requests at an even pace on a few connections.

    Returns:
        Seconds from when each request was due until its last byte; a late start counts as waiting.
    """
    found: list[list[float]] = [[] for _ in range(CONNECTIONS)]
    began = time.perf_counter() + 0.1
    step_s = CONNECTIONS / PACE_PER_S

    def run(number: int) -> None:
        rng = random.Random(number)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            due = began + number / PACE_PER_S
            while due < began + seconds:
                time.sleep(max(0.0, due - time.perf_counter()))
                target, etag = rng.choice(requests)
                status, _, _ = ask(connection, target, etag)
                if status not in (200, 304):
                    raise RuntimeError(f"{target}: {status}")
                found[number].append(time.perf_counter() - due)
                due += step_s

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(latency for latencies in found for latency in latencies)


@contextmanager
def neighbour(root: Path) -> Generator[None]:
    """A process that publishes as a nowcast does and keeps a core busy for a fifth of the time.

    Bottlenecks and windows come anew every tick; jobs and node risks every fourth (in real life: every few minutes).
    """
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.api", "neighbour", str(root)], cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def run_neighbour(root: Path) -> None:
    seed = 1
    while True:
        seed += 1
        began = time.monotonic()
        while time.monotonic() < began + PUBLISH_EVERY_S / 5:
            sum(range(10_000))
        publish(root, seed)
        time.sleep(max(0.0, began + PUBLISH_EVERY_S - time.monotonic()))


def mix(etags: dict[str, str]) -> list[tuple[str, str]]:
    """A scheduler's day: lists, unchanged lists, window queries, random jobs, a quarter each."""
    rng = random.Random(3)
    lists = ["/v1/bottlenecks", "/v1/bottlenecks?min_probability=0.6&horizon_s=60", "/v1/node-risks?horizon=24h"]
    windows = [f"/v1/backfill-windows?gpus={8 * g}&duration_s={3600 * h}" for g in (1, 2, 3, 4) for h in (1, 2, 3, 4)]
    jobs = [f"/v1/jobs/{CLUSTER}/{rng.randrange(5_000)}" for _ in range(400)]
    requests: list[tuple[str, str]] = []
    for number in range(400):
        unchanged = "/v1/backfill-windows"
        requests += [
            (lists[number % len(lists)], ""),
            (unchanged, etags[unchanged]),
            (windows[number % len(windows)], ""),
            (jobs[number], ""),
        ]
    return requests


def _quantile(values: Sequence[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))]


def throughput(root: Path, folder: Path) -> list[dict[str, Any]]:
    """Ratio of requests per second, interleaved, for each kind of hot read."""
    cases = {
        "list of 200 bottlenecks": "/v1/bottlenecks",
        "window query": "/v1/backfill-windows?gpus=16&duration_s=7200",
        "one job": f"/v1/jobs/{CLUSTER}/4711",
        "304": "/v1/bottlenecks",
    }
    rows: list[dict[str, Any]] = []
    with hints_server(root) as running:
        for name, target in cases.items():
            with socket.create_connection(("127.0.0.1", running.port)) as connection:
                _, headers, body = ask(connection, target)
            etag = headers["etag"] if name == "304" else ""
            answers = folder / "one.json"
            record(running.port, [(target, etag)], answers)
            ours, bare = [], []
            with bare_server(answers) as peer:
                for number in range(ROUNDS):
                    turns = [(running, ours), (peer, bare)]
                    for who, found in turns if number % 2 == 0 else turns[::-1]:
                        found.append(wrk(who, target, etag))
            share = statistics.median(a[0] / b[0] for a, b in zip(ours, bare, strict=True))
            cost = statistics.median(a[1] for a in ours) / statistics.median(b[1] for b in bare)
            size = f"{len(body) / 1024:.1f} KiB" if not etag else "no body"
            rows += [
                _row(f"{name} ({size})", statistics.median(a[0] for a in ours), "requests/s"),
                _row(f"{name}, bare", statistics.median(b[0] for b in bare), "requests/s"),
                _row(f"{name}, share of bare", 100 * share, "%", ">= 60 %", share >= 0.6),
                _row(f"{name}, CPU of a request ÷ bare", cost, "x"),
            ]
    return rows


def _row(name: str, value: float, unit: str, goal: str = "", met: bool | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": met}


def latency(root: Path, folder: Path) -> list[dict[str, Any]]:
    """Quantiles at an even pace while snapshots are replaced, interleaved with the bare function."""
    with hints_server(root) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            etags = {"/v1/backfill-windows": ask(connection, "/v1/backfill-windows")[1]["etag"]}
        requests = mix(etags)
        answers = folder / "mix.json"
        record(running.port, requests, answers)
        ours: list[list[float]] = []
        bare: list[list[float]] = []
        with bare_server(answers) as peer, neighbour(root):
            for _ in range(3):
                ours.append(pace(running.port, requests, PACED_S))
                bare.append(pace(peer.port, requests, PACED_S))
    found = {
        f"paced mix{name}, {label}": 1000 * statistics.median(_quantile(run, q) for run in runs)
        for name, runs in (("", ours), (", bare", bare))
        for label, q in (("p50", 0.5), ("p99", 0.99))
    }
    goal_ms = max(2.0, 1.5 * found["paced mix, bare, p99"])
    rows = [_row(name, value, "ms") for name, value in found.items()]
    rows[1] |= {"goal": f"<= max(2, 1.5 × bare) = {goal_ms:.2f} ms", "met": rows[1]["value"] <= goal_ms}
    return rows


def main() -> list[dict[str, Any]]:
    """Rows for `python -m benchmarks api`."""
    if shutil.which("wrk") is None:
        raise SystemExit("the API benchmark needs wrk: apt-get install wrk")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = folder / "published"
        publish(root)
        return throughput(root, folder) + latency(root, folder)


if __name__ == "__main__":
    os.chdir(ROOT)
    match sys.argv[1:]:
        case ["bare", path]:
            serve_bare(Path(path))
        case ["neighbour", path]:
            run_neighbour(Path(path))
        case _:
            for row in main():
                print(row)

"""A thousand polls that wait: what they cost the hints API in memory, and how soon a change has answered them all.

A real server process; clients are sockets of this one. `python -m benchmarks.long_polls` prints the rows.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.api import CLUSTER, ask, hints_server
from scheduler_hints.schema import NodeRisk
from scheduler_hints.snapshot import Publisher

POLLS, SETTLE_S = 1_000, 5.0
MEMORY_GOAL_MB = 200.0


async def poll(port: int, etag: str) -> bytes:
    """The first line of the answer to one waiting poll."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET /v1/node-risks?wait=60 HTTP/1.1\r\nhost: x\r\nif-none-match: {etag}\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()
    line = await reader.readline()
    writer.close()
    return line


async def crowd(running: Any, publisher: Publisher, etag: str) -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    process = psutil.Process(running.pid)
    before = process.memory_info().rss
    polls = [asyncio.create_task(poll(running.port, etag)) for _ in range(POLLS)]
    await asyncio.sleep(SETTLE_S)
    waiting, grown = sum(not one.done() for one in polls), (process.memory_info().rss - before) / 1e6
    began = time.perf_counter()
    publish(publisher, 0.2)
    lines = await asyncio.gather(*polls)
    took = time.perf_counter() - began
    answered = sum(b" 200 " in line for line in lines)
    return [
        {"name": "polls that wait", "value": waiting, "unit": "", "goal": f"= {POLLS}", "met": waiting == POLLS},
        {"name": "memory for them", "value": grown, "unit": "MB", "goal": f"< {MEMORY_GOAL_MB:g}", "met": grown < 200},
        {"name": "a change has answered all", "value": took, "unit": "s", "goal": "", "met": None},
        {"name": "answers with news", "value": answered, "unit": "", "goal": f"= {POLLS}", "met": answered == POLLS},
    ]


def publish(publisher: Publisher, p_24h: float) -> None:
    risk = NodeRisk(CLUSTER, "n1", 0.01, p_24h, 0.3, False, [], "m")
    publisher.publish("node-risks", [risk], ttl_s=600, data_age_s=1, model_versions={})


def main() -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    with tempfile.TemporaryDirectory() as root:
        publisher = Publisher(Path(root), CLUSTER)
        publish(publisher, 0.1)
        with hints_server(Path(root)) as running, socket.create_connection(("127.0.0.1", running.port)) as connection:
            etag = ask(connection, "/v1/node-risks")[1]["etag"]
            return asyncio.run(crowd(running, publisher, etag))


if __name__ == "__main__":
    for row in main():
        mark = {True: "met", False: "NOT met", None: ""}[row["met"]]
        print(f"{row['name']:<30} {row['value']:>8.2f} {row['unit']:<3} {row['goal']:<8} {mark}".rstrip())

"""What the Kubernetes extender takes for a pod with 12,500 candidate nodes, from the request to the answer.

In process, without a network: the ASGI application is called as a server calls it. A tenth of the nodes is in trouble.
Beside it the same bytes decoded and encoded as plain JSON: what no extender can do without.
`python -m benchmarks.extender` prints the rows.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler_hints.api import create_app
from scheduler_hints.schema import Bottleneck, NodeRisk
from scheduler_hints.snapshot import Publisher

NODES, ROUNDS, GOAL_MS = 12_500, 50, 50.0


def main() -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    names = [f"node-{i:05}.cluster.example.org" for i in range(NODES)]
    body = json.dumps({"Pod": {"metadata": {"name": "p"}}, "Nodes": None, "NodeNames": names}).encode()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        publisher = Publisher(Path(root), "alpha")
        hints = [
            Bottleneck(
                f"b{i}", "alpha", "thermal_throttle", "node", name, None, None, None, 60, 0.9, {"60": 0.9}, None, False,
                [], "reserve", [], "m",
            )
            for i, name in enumerate(names[::10])
        ]  # fmt: skip
        risks = [NodeRisk("alpha", name, 0.001, 0.01, 0.1, True, [], "m") for name in names]
        for kind, items in (("bottlenecks", hints), ("node-risks", risks)):
            publish: Any = publisher.publish
            publish(kind, items, ttl_s=600, data_age_s=1, model_versions={})
        app = create_app(Path(root), ["alpha"])
        app.startup()
        plain = _median_ms(lambda: json.dumps(json.loads(body)))
        for verb in ("filter", "prioritize"):
            took = _median_ms(lambda verb=verb: asyncio.run(_ask(app, verb, body)))
            rows.append({"name": verb, "value": took, "unit": "ms", "goal": f"<= {GOAL_MS:g}", "met": took <= GOAL_MS})
            rows.append(
                {"name": f"{verb} over plain JSON", "value": took / plain, "unit": "x", "goal": "", "met": None}
            )
        app.shutdown()
    return rows


def _median_ms(call: Callable[[], Any]) -> float:
    call()
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1000


async def _ask(app: Any, verb: str, body: bytes) -> None:
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(sent, {"type": "http.disconnect"})

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": f"/k8s/{verb}", "raw_path": f"/k8s/{verb}".encode(), "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("localhost", 80), "query_string": b"", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)


if __name__ == "__main__":
    for row in main():
        mark = {True: "met", False: "NOT met", None: ""}[row["met"]]
        print(f"{row['name']:<30} {row['value']:>8.2f} {row['unit']:<3} {row['goal']:<8} {mark}".rstrip())

"""The simulated cluster over HTTP: exporters' pages, service discovery, and a control endpoint for tests and demos.

One process, one event loop: the clock task of `server.py` advances the cluster to the wall clock each tick, requests
read what it left. Pages are bytes made in `exposition.py`. Nothing here is protected: it listens on loopback unless
told otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from simulator.cluster import SimulatedCluster
from simulator.exposition import CONTENT_TYPE, Exposition
from simulator.hardware import SimulatorError
from simulator.sacct import SacctText

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
BODY_MAX_BYTES = 65_536
PATHS = (
    "/metrics/<node>", "/sd", "/truth", "/healthz", "/jobs", "POST /control/inject", "POST /control/jobs",
    "POST /control/jobs/end",
)  # fmt: skip
_JSON = [(b"content-type", b"application/json")]
_TEXT = [(b"content-type", CONTENT_TYPE.encode())]
_encode = msgspec.json.Encoder().encode


class Injection(msgspec.Struct, forbid_unknown_fields=True, rename={"class_": "class"}):
    """Body of POST /control/inject."""

    class_: str
    node: str = ""
    gpu_index: int = 0
    onset_in_s: float = 90.0
    is_step: bool = False
    mode: str | None = None


class Placement(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /control/jobs: a job that an outside scheduler placed."""

    job_id: str
    user: str
    node_list: list[str] | str
    gpus_per_node: int = 8
    time_limit_s: float | None = None
    runtime_s: float | None = None
    account: str = "default"
    queue: str = "batch"
    name: str = "job"
    kind: str = "train"
    profile: dict[str, Any] | None = None


class Ending(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /control/jobs/end."""

    job_id: str
    state: str = "COMPLETED"


def write_replacing(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old bytes or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


class Exporter:
    """ASGI application over one cluster.

    Args:
        cluster: Advanced by `tick`, or by whoever owns it.
        address: `host:port` under which scrapers reach it, for service discovery.
        out: Folder whose `sacct.txt`, `truth.jsonl`, `faults.parquet` and `inventory.csv` are kept current; None: none.
    """

    def __init__(self, cluster: SimulatedCluster, address: str, out: Path | None = None) -> None:
        self.cluster, self.address, self.out = cluster, address, out
        self.exposition = Exposition(cluster)
        self.sacct = SacctText(cluster)
        self.ticks = 0
        self.busy_s = 0.0
        self._sd = self._targets()
        self._written = (-1, -1, -1)

    # --- clock ---------------------------------------------------------------------------------------------
    def tick(self, to: datetime) -> None:
        """Advance the cluster to `to` and bring the files up to date."""
        begun = time.perf_counter()
        self.cluster.advance(to)
        self.exposition.refresh()
        self.write_files()
        self.ticks += 1
        self.busy_s += time.perf_counter() - begun

    def write_files(self) -> None:
        """Replace the files that changed."""
        if self.out is None:
            return
        write_replacing(self.out / "sacct.txt", self.sacct.text())
        state = (
            self.cluster.events.book.changes + self.cluster.strains.book.changes,
            len(self.cluster.faults),
            self.cluster.node_changes,
        )
        if state[0] != self._written[0]:
            write_replacing(self.out / "truth.jsonl", jsonl(self.cluster.truth))
            write_replacing(self.out / "lookalikes.jsonl", jsonl(self.cluster.lookalikes))
        if state[1] != self._written[1]:
            self.cluster.faults_frame().write_parquet(self.out / ".faults.parquet.tmp")
            (self.out / ".faults.parquet.tmp").replace(self.out / "faults.parquet")
        if state[2] != self._written[2]:
            write_replacing(self.out / "inventory.csv", self.cluster.inventory_csv().encode())
        self._written = state

    # --- HTTP ----------------------------------------------------------------------------------------------
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path.startswith("/metrics/") and method == "GET":
            await self._metrics(path[9:], send)
            return
        try:
            await self._route(method, path, receive, send)
        except SimulatorError as error:
            await _refuse(send, 409, "refused", str(error))

    async def _metrics(self, name: str, send: Send) -> None:
        node = self.cluster.topology.node_numbers.get(name)
        if node is None:
            await _refuse(send, 404, "no_such_node", f"no node {name!r}")
            return
        page = self.exposition.page(node)
        if page is None:
            await _answer(send, 503, _TEXT, b"node is down\n")
        else:
            await _answer(send, 200, _TEXT, page)

    async def _route(self, method: str, path: str, receive: Receive, send: Send) -> None:
        cluster = self.cluster
        if method == "GET" and path == "/sd":
            await _answer(send, 200, _JSON, self._sd)
        elif method == "GET" and path == "/truth":
            await _answer(send, 200, _JSON, _encode({"items": cluster.truth, "lookalikes": cluster.lookalikes}))
        elif method == "GET" and path == "/healthz":
            state = {
                "status": "ok", "now": cluster.now, "tick_s": cluster.tick_s, "nodes": cluster.topology.nodes,
                "ticks": self.ticks, "busy_s": round(self.busy_s, 3), "running": len(cluster.running()),
                "pending": len(cluster.pending()), "nodes_down": cluster.node_state.count("down"),
            }  # fmt: skip
            await _answer(send, 200, _JSON, _encode(state))
        elif method == "GET" and path == "/jobs":
            rows = cluster.jobs_frame(cluster.jobs.values()).to_dicts()
            await _answer(send, 200, _JSON, _encode({"items": rows}))
        elif method == "POST" and path == "/control/inject":
            body = await _body(receive, send, Injection)
            if body is not None:
                row = cluster.inject(body.class_, body.node, body.gpu_index, body.onset_in_s, body.is_step, body.mode)
                await _answer(send, 200, _JSON, _encode(row))
        elif method == "POST" and path == "/control/jobs":
            body = await _body(receive, send, Placement)
            if body is not None:
                await _answer(send, 200, _JSON, _encode(cluster.place_job(**msgspec.structs.asdict(body))))
        elif method == "POST" and path == "/control/jobs/end":
            body = await _body(receive, send, Ending)
            if body is not None:
                await _answer(send, 200, _JSON, _encode(cluster.end_job(body.job_id, body.state)))
        else:
            await _refuse(send, 404, "no_such_path", f"no {method} {path}; there are: {', '.join(PATHS)}")

    def _targets(self) -> bytes:
        topology = self.cluster.topology
        groups = [
            {
                "targets": [self.address],
                "labels": {
                    "__metrics_path__": f"/metrics/{name}", "node": name, "rack": topology.rack_name(i),
                    "pod": topology.pod_name(i),
                },
            }
            for i, name in enumerate(topology.node_names)
        ]  # fmt: skip
        return _encode(groups)


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    """Rows as JSON lines, times in ISO 8601 UTC."""
    return b"".join(_encode(row) + b"\n" for row in rows)


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: Send, status: int, code: str, message: str) -> None:
    body = _encode({"error": {"code": code, "message": message, "detail": None}})
    await _answer(send, status, _JSON, body)


async def _body(receive: Receive, send: Send, shape: type[Any]) -> Any:
    """The decoded body, or None when it was refused already."""
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if len(data) > BODY_MAX_BYTES:
            await _refuse(send, 413, "too_large", f"body is larger than {BODY_MAX_BYTES} bytes")
            return None
        if not message.get("more_body"):
            break
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.MsgspecError as error:
        fields = ", ".join(field.encode_name for field in msgspec.structs.fields(shape))
        await _refuse(send, 422, "bad_body", f"{error}; fields: {fields}")
        return None

"""A stand-in for the part of a Kubernetes API server that the agent talks to: nodes, over HTTP, with its rules.

No API server is to be had from Debian or PyPI. Kept from the real one: pages with `continue`; strategic merge patches
(maps merge, null removes, and the taints of a node are an atomic list that is replaced); a `resourceVersion` that rises
with each change, and `409` for a patch of another version; `Status` objects for errors.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml


class ApiServer:
    """Nodes by name, and the patches that were taken.

    Attributes:
        nodes: Objects as the API has them.
        patches: Name and body of each patch that was carried out.
        fails: Status with which everything is answered; 0: it works.
        before_patch: Called with a name before a patch is looked at.
    """

    def __init__(self, names: list[str]) -> None:
        self.nodes: dict[str, dict[str, Any]] = {
            name: {
                "metadata": {
                    "name": name, "resourceVersion": "1", "labels": {"topology.kubernetes.io/rack": f"r{name[1]}"},
                },
                "spec": {}, "status": {},
            }
            for name in names
        }  # fmt: skip
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.fails = 0
        self.before_patch: Any = lambda name: None
        self.url = ""

    def annotations(self, name: str) -> dict[str, str]:
        return self.nodes[name]["metadata"].get("annotations", {})

    def taints(self, name: str) -> list[dict[str, Any]]:
        return self.nodes[name]["spec"].get("taints", [])

    def change(self, name: str, patch: dict[str, Any]) -> None:
        """What anybody else writes to a node."""
        node = self.nodes[name] = _merged(self.nodes[name], patch)
        node["metadata"]["resourceVersion"] = str(int(node["metadata"]["resourceVersion"]) + 1)

    def patch(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.before_patch(name)
        if name not in self.nodes:
            return 404, _status(404, "NotFound")
        wanted = body.get("metadata", {}).pop("resourceVersion", None)
        if wanted is not None and wanted != self.nodes[name]["metadata"]["resourceVersion"]:
            return 409, _status(409, "Conflict")
        self.change(name, body)
        self.patches.append((name, body))
        return 200, {"apiVersion": "v1", "kind": "Node"} | self.nodes[name]

    def page(self, query: dict[str, list[str]]) -> dict[str, Any]:
        begin, limit = int(query.get("continue", ["0"])[0]), int(query.get("limit", ["0"])[0]) or len(self.nodes)
        items = list(self.nodes.values())[begin : begin + limit]
        more = str(begin + limit) if begin + limit < len(self.nodes) else ""
        return {"apiVersion": "v1", "kind": "NodeList", "metadata": {"continue": more}, "items": items}


def _merged(target: Any, patch: Any) -> Any:
    """Maps merge, null removes, all else is replaced."""
    if not isinstance(patch, dict):
        return patch
    out = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = _merged(out.get(name), value)
    return out


def _status(code: int, reason: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason}


@contextmanager
def api_server(names: list[str], folder: Path) -> Iterator[tuple[ApiServer, Path]]:
    """A server on loopback, and a kubeconfig that leads to it."""
    api = ApiServer(names)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            if api.fails:
                self.reply(api.fails, _status(api.fails, "InternalError"))
            elif parts.path == "/api/v1/nodes":
                self.reply(200, api.page(parse_qs(parts.query)))
            else:
                self.reply(404, _status(404, "NotFound"))

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.headers["content-type"] != "application/strategic-merge-patch+json":
                self.reply(415, _status(415, "UnsupportedMediaType"))
            elif api.fails:
                self.reply(api.fails, _status(api.fails, "InternalError"))
            else:
                self.reply(*api.patch(self.path.rpartition("/")[2], body))

        def reply(self, code: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}"
    config = folder / "kubeconfig"
    config.write_text(
        yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": api.url}}], "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        })
    )  # fmt: skip
    try:
        yield api, config
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

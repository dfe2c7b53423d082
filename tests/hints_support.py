"""Helpers of the hints tests: made-up hints, an in-process ASGI client, a server process, a small schema checker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from scheduler_hints.forecasts import Forecast
from scheduler_hints.schema import (
    Bottleneck,
    DemandForecast,
    JobForecast,
    NodeRisk,
    Quantiles,
    Reclaimable,
    ReservationPlan,
    Window,
)
from scheduler_hints.snapshot import Publisher

ROOT = Path(__file__).parent.parent
AT = datetime(2026, 3, 14, 3, 12, tzinfo=UTC)
QUANTILES = Quantiles(60, 120, 300, 600, 1200, 1500, 2400, 3600)


def bottleneck(name: str = "b1", **changes: Any) -> Bottleneck:
    fields: dict[str, Any] = {
        "id": name, "cluster": "alpha", "bottleneck_class": "thermal_throttle", "scope": "gpu", "node": "n1",
        "gpu_uuid": f"GPU-{name}", "rack": "r1", "pod": "p1", "horizon_s": 60, "probability": 0.7,
        "probabilities": {"30": 0.2, "60": 0.7, "90": 0.8, "120": 0.9}, "expected_onset": AT, "is_active": False,
        "job_ids": ["4711"], "action": "reserve", "reasons": ["hot"], "model_version": "m1",
    }  # fmt: skip
    return Bottleneck(**(fields | changes))


def window(name: str = "w1", **changes: Any) -> Window:
    fields: dict[str, Any] = {
        "id": name, "cluster": "alpha", "nodes": ["n1", "n2"], "gpus": 16, "start": AT,
        "end": AT + timedelta(hours=1), "duration_s": 3600.0, "confidence": 0.9, "scope": "rack", "rack": "r1",
        "pod": "p1", "bounded_by": None, "fits_jobs": ["5000"],
    }  # fmt: skip
    return Window(**(fields | changes))


def risk(node: str = "n1", **changes: Any) -> NodeRisk:
    fields: dict[str, Any] = {
        "cluster": "alpha", "node": node, "p_1h": 0.01, "p_24h": 0.05, "p_7d": 0.2, "is_climatology": False,
        "reasons": [], "model_version": "m1",
    }  # fmt: skip
    return NodeRisk(**(fields | changes))


def job(job_id: str = "4711", **changes: Any) -> JobForecast:
    fields: dict[str, Any] = {
        "cluster": "alpha", "job_id": job_id, "state": "PENDING", "user": "ada", "queue": "train", "nodes": 2,
        "gpus": 16, "submit_time": AT, "start_time": None, "time_limit_s": 3600, "node_list": [],
        "runtime": QUANTILES, "remaining": None, "wait": QUANTILES, "p_fail": 0.1, "p_start_60s": 0.1,
        "p_start_600s": 0.5, "p_start_3600s": 0.9, "reason": "Resources", "model_version": "m1",
        "generated_at": datetime.now(UTC),
    }  # fmt: skip
    return JobForecast(**(fields | changes))


def forecast_of(jobs: list[dict[str, Any]], runtimes: list[Quantiles] | None = None, **changes: Any) -> Forecast:
    """What a forecaster says of jobs."""
    fields: dict[str, Any] = {
        "runtimes": runtimes or [QUANTILES for _ in jobs], "modes_s": [590.0 for _ in jobs],
        "model_version": "runtime-1", "ended_jobs": 500, "history_days": 120.0, "data_age_s": 12.5, "ttl_s": 600.0,
    }  # fmt: skip
    return Forecast(**(fields | changes))


def plan(name: str = "p1", **changes: Any) -> ReservationPlan:
    fields: dict[str, Any] = {
        "id": name, "cluster": "alpha", "job_id": "4711", "user": "ada", "account": None, "nodes": ["n3"], "start": AT,
        "end": AT + timedelta(minutes=15), "because": ["n1 is hot"], "benefit": "starts on a cool node",
        "cost_if_wrong_gpu_s": 7200.0,
    }  # fmt: skip
    return ReservationPlan(**(fields | changes))


def demand(queue: str | None = "train", **changes: Any) -> DemandForecast:
    fields: dict[str, Any] = {
        "cluster": "alpha", "queue": queue, "quantity": "in_demand", "unit": "gpus", "horizon_h": 24,
        "target_time": AT, "q05": 1.0, "q10": 2.0, "q25": 3.0, "q50": 4.0, "q75": 5.0, "q80": 6.0, "q90": 7.0,
        "q95": 8.0, "last_value": 4.0, "last_week_value": 3.0,
        "reclaimable": [Reclaimable(AT, AT + timedelta(hours=5), 8, 0.9)], "model_version": "m1",
        "generated_at": datetime.now(UTC),
    }  # fmt: skip
    return DemandForecast(**(fields | changes))


def publish(root: Path, cluster: str = "alpha", *, ttl_s: float = 60.0, **kinds: Any) -> Publisher:
    """Publish the kinds given (underscores for hyphens); each of them has one hint by default."""
    publisher = Publisher(root, cluster)
    whole = {
        "bottlenecks": [bottleneck(cluster=cluster)], "backfill_windows": [window(cluster=cluster)],
        "node_risks": [risk(cluster=cluster)], "jobs": [job(cluster=cluster)],
        "reservation_plans": [plan(cluster=cluster)], "demand": [demand(cluster=cluster)],
    }  # fmt: skip
    for kind, items in (kinds or whole).items():
        again(publisher, kind, items, ttl_s=ttl_s)
    return publisher


def again(publisher: Publisher, kind: str, items: Any, *, ttl_s: float = 60.0) -> Any:
    name: Any = kind.replace("_", "-")
    return publisher.publish(
        name, items, ttl_s=ttl_s, data_age_s=2.5, model_versions={"bottleneck": "m1"}, actionable_horizon_s=60.0
    )


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    app: Any,
    path: str,
    query: str | bytes = b"",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | list[bytes] = b"",
) -> Reply:
    """One request to an ASGI application, without a server."""
    chunks = [body] if isinstance(body, bytes) else list(body)
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "client": ("127.0.0.1", 1), "server": ("test", 80),
        "query_string": query.encode() if isinstance(query, str) else query,
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(dict(message))

    asyncio.run(app(scope, receive, send))
    start = sent[0]
    return Reply(
        start["status"],
        {name.decode(): value.decode() for name, value in start["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )


@contextmanager
def running_server(*arguments: str, environ: dict[str, str] | None = None) -> Generator[tuple[str, subprocess.Popen]]:
    """A real server process on a free port: its URL, and the process."""
    command = [sys.executable, "-W", "error", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | (environ or {})
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or []))
        reader.start()
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on "), "".join(errors)
            yield f"http://127.0.0.1:{line.strip().rsplit(':', 1)[1]}", process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(20)
            reader.join()
            process.errors = "".join(errors)  # type: ignore[attr-defined]  # ty: ignore[unresolved-attribute]


def hints_server(root: Path, *clusters: str, more: tuple[str, ...] = ()) -> Any:
    names = [part for cluster in clusters for part in ("--cluster", cluster)]
    return running_server("-m", "scheduler_hints.server", "--published", str(root), "--port", "0", *names, *more)


def wait_for(condition: Any, timeout_s: float = 10.0) -> Any:
    """The first true value of a condition."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            if found := condition():
                return found
        except httpx.HTTPError:
            pass
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


def check_schema(value: Any, schema: Any, components: dict[str, Any], where: str = "$") -> None:
    """Assert that a JSON value fits a schema: the part of JSON Schema that msgspec writes."""
    if "$ref" in schema:
        check_schema(value, components[schema["$ref"].rsplit("/", 1)[1]], components, where)
        return
    if "anyOf" in schema:
        failures = []
        for option in schema["anyOf"]:
            try:
                check_schema(value, option, components, where)
                return
            except AssertionError as error:
                failures.append(str(error))
        raise AssertionError("; ".join(failures))
    if "enum" in schema:
        assert value in schema["enum"], f"{where}: {value!r} is not one of {schema['enum']}"
    kind = schema.get("type")
    types: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None),
    }  # fmt: skip
    if kind is not None:
        assert isinstance(value, types[kind]), f"{where}: {value!r} is no {kind}"
        assert kind == "boolean" or not isinstance(value, bool), f"{where}: {value!r} is no {kind}"
    if schema.get("format") == "date-time":
        assert datetime.fromisoformat(value).tzinfo is not None, f"{where}: {value!r} has no time zone"
    if isinstance(value, dict):
        missing = set(schema.get("required", [])) - set(value)
        assert not missing, f"{where}: lacks {missing}"
        properties = schema.get("properties")
        for name, member in value.items():
            if properties is not None:
                assert name in properties, f"{where}: {name} is not in the document"
                check_schema(member, properties[name], components, f"{where}.{name}")
            elif isinstance(schema.get("additionalProperties"), dict):
                check_schema(member, schema["additionalProperties"], components, f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for number, member in enumerate(value):
            check_schema(member, schema["items"], components, f"{where}[{number}]")

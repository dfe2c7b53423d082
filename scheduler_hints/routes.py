"""Routes of the hints API that are not polled hot: status, forecasts and estimates on request, health, metrics.

Hot reads stand in `dispatch.py`; they are declared here only so that another method on them is a 405.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from scheduler_hints.dispatch import LISTS, Gate, internal_error
from scheduler_hints.errors import (
    ApiError,
    BodyTimeoutError,
    BodyTooLargeError,
    UnavailableError,
    UnsupportedMediaError,
    encode_error,
)
from scheduler_hints.extender import ExtenderConfig
from scheduler_hints.extender_routes import ExtenderRoutes
from scheduler_hints.feedback import FeedbackRoutes
from scheduler_hints.forecasts import Forecaster, Forecasts, answer_forecast, decode_request
from scheduler_hints.memory_estimates import answer_memory, decode_memory_request
from scheduler_hints.metrics import CONTENT_TYPE, Metrics
from scheduler_hints.placement_routes import PlacementRoutes
from scheduler_hints.preemptions import PreemptionRoutes
from scheduler_hints.progress import decode_progress, keep_progress
from scheduler_hints.queries import parse_query
from scheduler_hints.schema import KINDS
from scheduler_hints.senders import sent
from scheduler_hints.silence_routes import SilenceRoutes
from scheduler_hints.status import Alive, Ready, status_of

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 2 * 2**20
BODY_TIMEOUT_S = 10.0

_encode = msgspec.json.Encoder().encode


class _Json(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else _encode(content)
        super().__init__(body, status_code, {"cache-control": "no-store"} | (headers or {}))


class Routes:
    """The endpoints, with what they need."""

    def __init__(
        self,
        gate: Gate,
        metrics: Metrics,
        document: Callable[[], bytes],
        forecast_runtimes: Forecaster | None,
        readiness: Callable[[], str | None] | None,
        extender: ExtenderConfig | None = None,
    ) -> None:
        self.gate = gate
        self.extender = extender
        self.store = gate.store
        self.metrics = metrics
        self.document = document
        self.forecasts = Forecasts(forecast_runtimes)
        self.readiness = readiness

    def application(self) -> Starlette:
        """The Starlette application of these routes."""
        get = ["GET"]
        hot = [Route(path, self.unreachable, methods=get) for path in LISTS]
        application = Starlette(
            routes=[
                *hot,
                Route("/v1/jobs/{cluster}/{job_id:path}", self.unreachable, methods=get),
                Route("/v1/status", self.status, methods=get),
                Route("/v1/runtime-forecasts", self.runtime_forecasts, methods=["POST"]),
                Route("/v1/memory-estimates", self.memory_estimates, methods=["POST"]),
                Route("/v1/progress", self.progress, methods=["POST"]),
                *SilenceRoutes(self.gate, _body, _Json).routes(),
                *FeedbackRoutes(self.gate, _body, _Json).routes(),
                *PlacementRoutes(self.gate, _body, _Json).routes(),
                *PreemptionRoutes(self.gate, _Json).routes(),
                *ExtenderRoutes(self.gate, _body, self.extender).routes(),
                Route("/healthz", self.healthz, methods=get),
                Route("/readyz", self.readyz, methods=get),
                Route("/metrics", self.prometheus, methods=get),
                Route("/openapi.json", self.openapi, methods=get),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
                Exception: _broken,
            },
        )
        application.router.redirect_slashes = False  # a path that is not in the document is a 404
        return application

    def _admit(self, request: Request) -> tuple[Any, tuple[str, ...]]:
        parse_query(request.scope["query_string"], ())
        header = request.headers.get("authorization")
        return self.gate.admit(None if header is None else header.encode("latin-1"))

    async def unreachable(self, request: Request) -> Response:
        raise AssertionError(f"{request.scope['path']} is answered by the dispatcher")

    async def status(self, request: Request) -> Response:
        _, visible = self._admit(request)
        found = status_of(self.store.state, visible, KINDS, self.store.clock(), datetime.now(UTC))
        return _Json(found)

    async def healthz(self, request: Request) -> Response:
        del request
        return _Json(Alive("ok"))

    async def readyz(self, request: Request) -> Response:
        """Ready when at least one shard is fresh. Names no cluster: it asks for no token."""
        del request
        state, now_s = self.store.state, self.store.clock()
        found = Counter(state.condition(cluster, kind, now_s) for cluster in self.store.clusters for kind in KINDS)
        found.pop("impossible", None)
        fresh = found.pop("fresh", 0)
        stale: dict[str, int] = dict(found)
        problem = self.readiness() if self.readiness is not None else None
        if fresh and problem is None:
            return _Json(Ready("ready", fresh, stale))
        counts = ", ".join(f"{count} {word}" for word, count in stale.items()) or "no cluster is configured"
        words = problem or f"no shard is fresh ({counts}): is the nowcast running? /v1/status tells more"
        raise UnavailableError("not_ready", words, {"fresh_shards": fresh, "stale_shards": stale})

    async def prometheus(self, request: Request) -> Response:
        _, visible = self._admit(request)
        text = await run_in_threadpool(self.metrics.render, visible)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        parse_query(request.scope["query_string"], ())
        return _Json(await run_in_threadpool(self.document))

    async def runtime_forecasts(self, request: Request) -> Response:
        principal, visible = self._admit(request)
        asked = decode_request(await _body(request))
        cluster = self.gate.one(principal, visible, asked.cluster)
        now = datetime.now(UTC)
        jobs = [msgspec.structs.asdict(job) for job in asked.jobs]
        for job in jobs:
            job["submit_time"] = job["submit_time"] or now
        found = await self.forecasts.run(cluster, jobs)
        return _Json(answer_forecast(asked, cluster, found, now))

    async def memory_estimates(self, request: Request) -> Response:
        self._admit(request)
        return _Json(answer_memory(decode_memory_request(await _body(request))))

    async def progress(self, request: Request) -> Response:
        principal, visible, body = await sent(self.gate, _body, request, "place")
        now = datetime.now(UTC)
        asked = decode_progress(body, now)
        cluster = self.gate.one(principal, visible, asked.cluster)
        return _Json(await run_in_threadpool(keep_progress, self.store.published, cluster, asked.rows, now))


async def _body(request: Request, most: int = MAX_BODY_BYTES) -> bytes:
    """The body, bounded in size and time."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaError("unsupported_media_type", f"Content-Type {kind!r}; send application/json")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise BodyTimeoutError("body_timeout", f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    return b"".join(parts)


def _too_large(most: int) -> BodyTooLargeError:
    return BodyTooLargeError("body_too_large", f"the body has more than {most} bytes")


async def _api_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    return _Json(error.encode(), error.status, error.headers)


_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if "Allow" in headers:  # Starlette keeps them in a set
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    code = _CODES.get(error.status_code, "http_error")
    path: str = request.scope["path"]  # request.url would fail on a query that is not UTF-8
    if error.status_code == 404:
        message = f"no path {path[:200]!r}; /openapi.json lists those there are"
    elif error.status_code == 405:
        message = f"{request.method} is not for {path}; allowed: {headers.get('Allow', 'nothing')}"
    else:
        message = error.detail
    return _Json(encode_error(code, message), error.status_code, headers)


async def _gone(request: Request, error: Exception) -> Response:
    """The client has hung up; nobody reads this."""
    del error
    log.debug("client of %s has gone", request.scope["path"])
    return _Json(encode_error("client_gone", "the client closed the connection"), 499)


async def _broken(request: Request, error: Exception) -> Response:
    del request
    return _Json(internal_error(error), 500)

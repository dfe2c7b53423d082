"""Routes of the hints API that are not polled hot: status, runtime forecasts, health, metrics, the API's own document.

Hot reads stand in `dispatch.py`; they are declared here only so that another method on them is a 405.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from scheduler_hints.answers import RuntimeForecast, RuntimeForecasts
from scheduler_hints.dispatch import LISTS, Gate, internal_error
from scheduler_hints.errors import (
    ApiError,
    BadRequestError,
    BodyTimeoutError,
    BodyTooLargeError,
    ForecastUnavailableError,
    InvalidBodyError,
    UnavailableError,
    UnsupportedMediaError,
    encode_error,
)
from scheduler_hints.metrics import CONTENT_TYPE, Metrics
from scheduler_hints.queries import parse_query
from scheduler_hints.schema import KINDS, Quantiles
from scheduler_hints.status import Alive, Ready, status_of

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 2 * 2**20
MAX_JOBS = 1_000
BODY_TIMEOUT_S = 10.0
FORECAST_TIMEOUT_S = 30.0
_MAX_PENDING_FORECASTS = 8

Forecaster = Callable[[str, list[dict[str, Any]]], list[Quantiles]]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class JobRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is known of a job before it is submitted; leave out what is not. `submit_time` defaults to now."""

    job_id: _Text | None = None
    user: _Text | None = None
    account: _Text | None = None
    queue: _Text | None = None
    name: _Text | None = None
    nodes: _Count | None = None
    cpus: _Count | None = None
    gpus: _Count | None = None
    memory_mib: Annotated[int, msgspec.Meta(ge=0, le=10**12)] | None = None
    time_limit_s: Annotated[int, msgspec.Meta(ge=0, le=10**9)] | None = None
    submit_time: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class ForecastRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Jobs of one cluster that are to be forecast, 1 to 1,000."""

    cluster: _Text
    jobs: Annotated[list[JobRequest], msgspec.Meta(min_length=1, max_length=MAX_JOBS)]


_request_decoder = msgspec.json.Decoder(ForecastRequest)
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
    ) -> None:
        self.gate = gate
        self.store = gate.store
        self.metrics = metrics
        self.document = document
        self.forecast_runtimes = forecast_runtimes
        self.readiness = readiness
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="forecast")
        self._pending = 0

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

    def close(self) -> None:
        """Start no more forecasts."""
        self._pool.shutdown(wait=False, cancel_futures=True)

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
        fresh = found.pop("fresh", 0)
        stale: dict[str, int] = dict(found)
        problem = self.readiness() if self.readiness is not None else None
        if fresh and problem is None:
            return _Json(Ready("ready", fresh, stale))
        words = problem or (
            f"no fresh shard of {len(self.store.clusters)} clusters × {len(KINDS)} kinds "
            f"({', '.join(f'{count} {word}' for word, count in stale.items()) or 'no cluster is configured'}): "
            "is the nowcast running? /v1/status tells more"
        )
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
        asked = _decode_request(await _body(request))
        cluster = self.gate.one(principal, visible, asked.cluster)
        if self.forecast_runtimes is None:
            raise UnavailableError("no_forecaster", "this API was started without a runtime forecaster")
        now = datetime.now(UTC)
        jobs = [msgspec.structs.asdict(job) for job in asked.jobs]
        for job in jobs:
            job["submit_time"] = job["submit_time"] or now
        found = await self._forecast(self.forecast_runtimes, cluster, jobs)
        items = [RuntimeForecast(job.job_id, runtime) for job, runtime in zip(asked.jobs, found, strict=True)]
        return _Json(RuntimeForecasts(items, cluster, now))

    async def _forecast(self, forecast: Forecaster, cluster: str, jobs: list[dict[str, Any]]) -> list[Quantiles]:
        """Run the forecaster on a thread: few at a time, and not for ever."""
        if self._pending >= _MAX_PENDING_FORECASTS:
            raise UnavailableError("busy", f"{self._pending} forecasts are being made already; come back in a moment")
        self._pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, forecast, cluster, jobs)
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(future), FORECAST_TIMEOUT_S)
        except ForecastUnavailableError as error:
            raise UnavailableError("no_forecast", str(error)) from None
        except TimeoutError:
            if future.done():
                raise
            raise UnavailableError("timeout", f"the forecaster took longer than {FORECAST_TIMEOUT_S:.0f} s") from None

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._pending -= 1
        if not future.cancelled():
            future.exception()  # mark it as seen: the request may have given up on it


async def _body(request: Request) -> bytes:
    """The body, bounded in size and time."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaError("unsupported_media_type", f"Content-Type {kind!r}; send application/json")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                parts.append(part)
    except TimeoutError:
        raise BodyTimeoutError("body_timeout", f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    return b"".join(parts)


def _too_large() -> BodyTooLargeError:
    return BodyTooLargeError("body_too_large", f"the body has more than {MAX_BODY_BYTES} bytes")


def _decode_request(body: bytes) -> ForecastRequest:
    try:
        return _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        fields = list(JobRequest.__struct_fields__)
        raise InvalidBodyError("invalid_body", f"{error}", {"request": ["cluster", "jobs"], "job": fields}) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError("bad_json", f"the body is not JSON: {error}") from None


async def _api_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    return _Json(error.encode(), error.status, error.headers)


_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
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

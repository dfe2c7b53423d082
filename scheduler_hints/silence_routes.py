"""Routes of operators' silences: `POST`, `GET` and `DELETE /v1/silences`. What a silence is stands in `silences.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from scheduler_hints.dispatch import Gate
from scheduler_hints.errors import UnavailableError
from scheduler_hints.queries import CLUSTER, Parameter, parse_query
from scheduler_hints.senders import name_of, sent
from scheduler_hints.silences import SilenceList, add_silence, decode_silence, end_silence, read_silences

PARAMETERS = (
    CLUSTER,
    Parameter("active", "string", "`true`: only those that hold now.", "true", ("true", "false")),
)
Body = Callable[[Request], Awaitable[bytes]]


class SilenceRoutes:
    """The endpoints; changes need the role `admin`.

    Args:
        gate: Who may ask.
        body: Reads a bounded body.
        answer: Makes a response of a struct.
    """

    def __init__(self, gate: Gate, body: Body, answer: Callable[[Any], Response]) -> None:
        self._gate, self._body, self._answer = gate, body, answer

    def routes(self) -> list[Route]:
        return [
            Route("/v1/silences", self.made_or_listed, methods=["GET", "POST"]),
            Route("/v1/silences/{cluster}/{id}", self.end, methods=["DELETE"]),
        ]

    def _admit(self, request: Request) -> tuple[Any, tuple[str, ...]]:
        header = request.headers.get("authorization")
        return self._gate.admit(None if header is None else header.encode("latin-1"))

    async def made_or_listed(self, request: Request) -> Response:
        """One route, so that another method is told of both."""
        return await (self.make(request) if request.method == "POST" else self.listed(request))

    async def make(self, request: Request) -> Response:
        principal, visible, body = await sent(self._gate, self._body, request, "admin")
        now = datetime.now(UTC)
        asked = decode_silence(body, now)
        cluster = self._gate.one(principal, visible, asked.cluster)
        who = name_of(principal, asked.who)
        asked = msgspec.structs.replace(asked, cluster=cluster)
        published = self._gate.store.published
        return self._answer(await run_in_threadpool(add_silence, published, asked, who, now))

    async def listed(self, request: Request) -> Response:
        principal, visible = self._admit(request)
        values = parse_query(request.scope["query_string"], PARAMETERS)
        wanted = values.get("cluster")
        clusters = visible if wanted is None else (self._gate.one(principal, visible, str(wanted)),)
        now, published = datetime.now(UTC), self._gate.store.published

        def read() -> SilenceList:
            try:
                found = [silence for cluster in clusters for silence in read_silences(published, cluster)]
            except (OSError, msgspec.DecodeError) as error:
                raise UnavailableError("silences_unreadable", f"silences cannot be read: {error}") from None
            if values.get("active") == "true":
                found = [silence for silence in found if silence.is_active(now)]
            return SilenceList(sorted(found, key=lambda silence: silence.created_at, reverse=True))

        return self._answer(await run_in_threadpool(read))

    async def end(self, request: Request) -> Response:
        principal, visible = self._admit(request)
        principal.require("admin")
        parse_query(request.scope["query_string"], ())
        cluster = self._gate.one(principal, visible, request.path_params["cluster"], is_path=True)
        published, id_ = self._gate.store.published, request.path_params["id"]
        return self._answer(await run_in_threadpool(end_silence, published, cluster, id_, datetime.now(UTC)))

"""The route by which a scheduler says what it has just placed; what becomes of it stands in `placements.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from scheduler_hints.dispatch import Gate
from scheduler_hints.errors import UnsupportedMediaError
from scheduler_hints.placements import PlacementsKept, decode_placements, keep_placements
from scheduler_hints.queries import parse_query


class PlacementRoutes:
    """`POST /v1/placements`.

    Args:
        gate: Who asks and what is served.
        body: Reads a body.
        answer: Makes an answer of an object.
    """

    def __init__(
        self, gate: Gate, body: Callable[[Request], Awaitable[bytes]], answer: Callable[[Any], Response]
    ) -> None:
        self._gate, self._body, self._answer = gate, body, answer

    def routes(self) -> list[Route]:
        return [Route("/v1/placements", self.place, methods=["POST"])]

    async def place(self, request: Request) -> Response:
        parse_query(request.scope["query_string"], ())
        header = request.headers.get("authorization")
        principal, visible = self._gate.admit(None if header is None else header.encode("latin-1"))
        principal.require("place")
        if "content-type" not in request.headers:
            raise UnsupportedMediaError("unsupported_media_type", "no Content-Type; send application/json")
        asked = decode_placements(await self._body(request))
        self._gate.one(principal, visible, asked.cluster)
        store = self._gate.store

        def keep() -> PlacementsKept:
            kept = keep_placements(store.published, asked, store.clock(), datetime.now(UTC))
            store.refresh()  # whoever asks next must see it
            return kept

        return self._answer(await run_in_threadpool(keep))

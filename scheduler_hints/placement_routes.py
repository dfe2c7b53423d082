"""The route by which a scheduler says what it has just placed; what becomes of it stands in `placements.py`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from scheduler_hints.dispatch import Gate
from scheduler_hints.placements import PlacementsKept, decode_placements, keep_placements
from scheduler_hints.senders import ReadBody, sent


class PlacementRoutes:
    """`POST /v1/placements`.

    Args:
        gate: Who asks and what is served.
        body: Reads a body.
        answer: Makes an answer of an object.
    """

    def __init__(self, gate: Gate, body: ReadBody, answer: Callable[[Any], Response]) -> None:
        self._gate, self._body, self._answer = gate, body, answer

    def routes(self) -> list[Route]:
        return [Route("/v1/placements", self.place, methods=["POST"])]

    async def place(self, request: Request) -> Response:
        principal, visible, body = await sent(self._gate, self._body, request, "place")
        asked = decode_placements(body)
        self._gate.one(principal, visible, asked.cluster)
        store = self._gate.store

        def keep() -> PlacementsKept:
            kept = keep_placements(store.published, asked, store.clock(), datetime.now(UTC))
            store.refresh()  # whoever asks next must see it
            return kept

        return self._answer(await run_in_threadpool(keep))

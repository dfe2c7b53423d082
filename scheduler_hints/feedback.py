"""What people and schedulers say of a hint afterwards, recorded beside what agents did.

It is a row of `out_actions` with the action `feedback`: who said it, of which hint, and the verdict. Here belong its
shape, its keeping and its route; the record itself stands in `slurm_audit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from scheduler_hints.dispatch import Gate
from scheduler_hints.errors import UnavailableError, decode_body
from scheduler_hints.senders import ReadBody, name_of, sent
from scheduler_hints.slurm_audit import action_rows, actions_path, jsonl_audit

ACTION = "feedback"
Verdict = Literal["right", "wrong", "useful", "useless"]
# No control characters, as of silences.
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+(?![\s\S])")]


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What came of a hint: it was `right` or `wrong`; or, whatever came, `useful` or `useless`.

    `who` is taken from the token where one is needed.
    """

    cluster: _Text
    hint_id: _Text
    verdict: Verdict
    note: _Text | None = None
    node: _Text | None = None
    job_id: _Text | None = None
    who: _Text | None = None


class FeedbackKept(msgspec.Struct, frozen=True):
    """It is recorded, under this name and time."""

    cluster: str
    hint_id: str
    verdict: Verdict
    who: str
    received_at: datetime


_request = msgspec.json.Decoder(FeedbackRequest)


def decode_feedback(body: bytes) -> FeedbackRequest:
    """Decode and check a body.

    Raises:
        BadRequestError: It is not JSON.
        InvalidBodyError: It has the wrong shape; the message names the field.
    """
    return decode_body(_request, body, {"feedback": FeedbackRequest})


def keep_feedback(published: Path, asked: FeedbackRequest, who: str, now: datetime) -> FeedbackKept:
    """Record it, and wait until the disk has it.

    Raises:
        UnavailableError: The disk refused; it does not count as kept then.
    """
    (row,) = action_rows(
        now, asked.cluster, ACTION, is_applied=False, reason=asked.note or "", hint_id=asked.hint_id,
        job_id=asked.job_id or "", nodes=[asked.node] if asked.node else [], actor=who, verdict=asked.verdict,
    )  # fmt: skip
    try:
        jsonl_audit(actions_path(published.parent, asked.cluster))(row)
    except OSError as error:
        raise UnavailableError("feedback_unwritable", f"feedback cannot be kept: {error.strerror or error}") from None
    return FeedbackKept(asked.cluster, asked.hint_id, asked.verdict, who, now)


class FeedbackRoutes:
    """`POST /v1/feedback`.

    Args:
        gate: Who asks and what is served.
        body: Reads a body.
        answer: Makes an answer of an object.
    """

    def __init__(self, gate: Gate, body: ReadBody, answer: Callable[[Any], Response]) -> None:
        self._gate, self._body, self._answer = gate, body, answer

    def routes(self) -> list[Route]:
        return [Route("/v1/feedback", self.say, methods=["POST"])]

    async def say(self, request: Request) -> Response:
        principal, visible, body = await sent(self._gate, self._body, request, "place")
        asked = decode_feedback(body)
        self._gate.one(principal, visible, asked.cluster)
        who = name_of(principal, asked.who)
        now = datetime.now(UTC)
        return self._answer(await run_in_threadpool(keep_feedback, self._gate.store.published, asked, who, now))

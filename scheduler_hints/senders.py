"""What every route that takes something asks first: who sends it, whether they may, and that it is declared as JSON.

Here belongs that order of questions and under whose name a thing is kept; what is sent stands with each route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request

from scheduler_hints.dispatch import Gate
from scheduler_hints.errors import BadRequestError, UnsupportedMediaError
from scheduler_hints.queries import parse_query
from scheduler_hints.tokens import ANYONE, Principal, Role

ReadBody = Callable[[Request], Awaitable[bytes]]


async def sent(
    gate: Gate, read_body: ReadBody, request: Request, role: Role
) -> tuple[Principal, tuple[str, ...], bytes]:
    """Who sends a body, the clusters that they may see, and the body.

    Args:
        gate: Who asks and what is served.
        read_body: Reads a body, bounded.
        request: The request; it takes no query.
        role: What it needs.

    Raises:
        ApiError: A parameter was given, the token is unknown or has another role, or the body is none or not JSON.
    """
    parse_query(request.scope["query_string"], ())
    header = request.headers.get("authorization")
    principal, visible = gate.admit(None if header is None else header.encode("latin-1"))
    principal.require(role)
    # A page in someone's browser can send a body without this header, or as text, to wherever that browser reaches.
    if "content-type" not in request.headers:
        raise UnsupportedMediaError("unsupported_media_type", "no Content-Type; send application/json")
    return principal, visible, await read_body(request)


def name_of(principal: Principal, who: str | None) -> str:
    """Under whose name something is kept: the token's where one is needed, else the one given.

    Raises:
        BadRequestError: Another name than the token's is given.
    """
    if principal is ANYONE:
        return who or "anyone"
    if who not in (None, principal.name):
        raise BadRequestError("bad_value", f"who={who!r}: the token is of {principal.name!r}")
    return principal.name

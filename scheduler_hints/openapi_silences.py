"""Paths of operators' silences in the OpenAPI document; the routes are in `silence_routes.py`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from scheduler_hints.errors import BadRequestError, ForbiddenError, NotFoundError, UnauthorizedError, UnavailableError
from scheduler_hints.openapi_parts import BODY_ERRORS, errors_of, json_of, parameter_of
from scheduler_hints.queries import Parameter
from scheduler_hints.silence_routes import PARAMETERS
from scheduler_hints.silences import Silence


def silence_paths(of: dict[str, Any], at: datetime) -> dict[str, Any]:
    """Paths by name.

    Args:
        of: Schema of each type by its name in the document.
        at: A time, for examples.
    """
    asked = {"cluster": "alpha", "node": "n1", "duration_s": 7200, "reason": "fans are being replaced"}
    kept = Silence("si-0f", "alpha", "n1", None, None, at, at, asked["reason"], "ada", at)
    one = {"200": {"description": "As it is kept", "content": json_of(of["silence"], kept)}}
    in_path = [
        parameter_of(Parameter("cluster", "string", "Name of the cluster.", "alpha"), "path"),
        parameter_of(Parameter("id", "string", "Id of the silence.", "si-0f"), "path"),
    ]
    return {
        "/v1/silences": {
            "get": {
                "summary": "Silences that are kept, the newest first",
                "parameters": [parameter_of(one) for one in PARAMETERS],
                "responses": {"200": {"description": "All", "content": json_of(of["silences"], {"items": [kept]})}}
                | errors_of(BadRequestError, UnauthorizedError, ForbiddenError, UnavailableError),
            },
            "post": {
                "summary": "Silences bottlenecks of a node, class or scope until a time; wants a token of role admin",
                "requestBody": {"required": True, "content": json_of(of["silence_request"], asked)},
                "responses": one | errors_of(*BODY_ERRORS, UnavailableError),
            },
        },
        "/v1/silences/{cluster}/{id}": {
            "delete": {
                "summary": "Takes a silence back: it ends now; wants a token of role admin",
                "parameters": in_path,
                "responses": one
                | errors_of(BadRequestError, UnauthorizedError, ForbiddenError, NotFoundError, UnavailableError),
            }
        },
    }

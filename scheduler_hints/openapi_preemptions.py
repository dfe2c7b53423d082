"""The path of preemptions in the OpenAPI document; the route is in `preemptions.py`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from scheduler_hints.errors import (
    BadRequestError,
    ForbiddenError,
    QueryTooLongError,
    UnauthorizedError,
    UnavailableError,
)
from scheduler_hints.openapi_parts import errors_of, json_of, parameter_of
from scheduler_hints.preemptions import PARAMETERS, ClusterPreemption, PreemptionAnswer, VictimJob


def preemption_paths(of: dict[str, Any], at: datetime) -> dict[str, Any]:
    """Paths by name.

    Args:
        of: Schema of each type by its name in the document.
        at: A time, for the example.
    """
    victim = VictimJob("4711", "ada", "preemptible", 64, "checkpoint", 60.0, 3.2, True)
    choice = ClusterPreemption("alpha", 64, 300.0, [victim], 64, 0, 60.0, 3.2, 3.2, True, 60.0, at)
    example = PreemptionAnswer([choice], [], 22.4)
    return {
        "/v1/preemptions": {
            "get": {
                "summary": "Which running jobs to stop so that GPUs are free in time, and what that loses",
                "parameters": [parameter_of(one) for one in PARAMETERS],
                "responses": {
                    "200": {"description": "A choice for each cluster", "content": json_of(of["preemption"], example)}
                }
                | errors_of(BadRequestError, UnauthorizedError, ForbiddenError, QueryTooLongError, UnavailableError),
            }
        }
    }

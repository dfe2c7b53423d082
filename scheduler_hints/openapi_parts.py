"""Parts of the OpenAPI document that several of its paths share: contents, parameters, errors.

The paths stand in `openapi.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, get_args

import msgspec

from scheduler_hints.errors import (
    ApiError,
    BadRequestError,
    BodyTimeoutError,
    BodyTooLargeError,
    ForbiddenError,
    InvalidBodyError,
    UnauthorizedError,
    UnsupportedMediaError,
)
from scheduler_hints.queries import Parameter

BODY_ERRORS: tuple[type[ApiError], ...] = (
    BadRequestError, UnauthorizedError, ForbiddenError, BodyTimeoutError, BodyTooLargeError, UnsupportedMediaError,
    InvalidBodyError,
)  # fmt: skip
_REF = {"$ref": "#/components/schemas/ErrorBody"}


def json_of(schema: dict[str, Any], example: Any = None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": schema}
    if example is not None:
        content["example"] = msgspec.to_builtins(example, str_keys=True)
    return {"application/json": content}


def parameter_of(parameter: Parameter, where: str = "query") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind}
    example: Any = parameter.example
    if parameter.kind != "string":
        example = float(example) if parameter.kind == "number" else int(example)
        schema |= {"minimum": parameter.low, "maximum": parameter.high}
    else:
        schema |= {"minLength": 1, "maxLength": 256}
    if parameter.choices:
        schema = {
            "type": parameter.kind,
            "enum": [int(c) for c in parameter.choices] if parameter.kind == "integer" else list(parameter.choices),
        }
    return {
        "name": parameter.name, "in": where, "required": where == "path", "description": parameter.description,
        "schema": schema, "example": example,
    }  # fmt: skip


def errors_of(*kinds: type[ApiError]) -> dict[str, Any]:
    return {
        str(kind.status): {"description": (kind.__doc__ or kind.__name__).split("\n")[0], "content": json_of(_REF)}
        for kind in kinds
    }


def component(shape: Any) -> str:
    """The name msgspec gives a type in the document."""
    inner = "".join(f"_{one.__name__}_" for one in get_args(shape))
    return getattr(shape, "__origin__", shape).__name__ + inner


def mark_times(components: dict[str, Any], shapes: Iterable[Any]) -> None:
    """Say which strings are times: msgspec does so only for fields that insist on a time zone."""
    for shape in shapes:
        properties = components[component(shape)]["properties"]
        for field in msgspec.structs.fields(shape):
            if field.type is datetime or datetime in get_args(field.type):
                for option in properties[field.name].get("anyOf", [properties[field.name]]):
                    if option["type"] == "string":
                        option["format"] = "date-time"

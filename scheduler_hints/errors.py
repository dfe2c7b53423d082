"""Errors of the hints API and the one JSON shape in which clients see them. No routes and no checks here.

ApiError
├── BadRequestError         400
├── UnauthorizedError       401
├── ForbiddenError          403
├── NotFoundError           404
├── BodyTimeoutError        408
├── BodyTooLargeError       413
├── QueryTooLongError       414
├── UnsupportedMediaError   415
├── InvalidBodyError        422
└── UnavailableError        503
ForecastUnavailableError    raised by an injected forecaster; becomes a 503
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from scheduler_hints.schema import ErrorBody, ErrorDetail

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        code: Short name of the error for programs.
        message: One sentence for people: what was wrong, with its value, and what would be right.
        detail: Facts for programs, or None.
        headers: Further headers of the answer.
    """

    status: ClassVar[int] = 500
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, code: str, message: str, detail: dict | list | str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail

    def encode(self) -> bytes:
        return encode_error(self.code, self.message, self.detail)


class BadRequestError(ApiError):
    """A parameter is unknown, repeated or wrong, or the body is not JSON."""

    status = 400


class UnauthorizedError(ApiError):
    """No token, or none that is known."""

    status = 401
    headers: ClassVar[dict[str, str]] = {"www-authenticate": 'Bearer realm="weatherglass"'}


class ForbiddenError(ApiError):
    """The token may not do this, or may not see this cluster."""

    status = 403


class NotFoundError(ApiError):
    """No such path, cluster or job."""

    status = 404


class BodyTimeoutError(ApiError):
    """The body did not arrive in time."""

    status = 408
    headers: ClassVar[dict[str, str]] = {"connection": "close"}


class BodyTooLargeError(ApiError):
    """The body is too large."""

    status = 413
    headers: ClassVar[dict[str, str]] = {"connection": "close"}


class QueryTooLongError(ApiError):
    """The query string is too long."""

    status = 414


class UnsupportedMediaError(ApiError):
    """The body is not declared as JSON."""

    status = 415


class InvalidBodyError(ApiError):
    """JSON of the wrong shape; the message names the field."""

    status = 422


def invalid_body(error: msgspec.ValidationError, shapes: Mapping[str, type[msgspec.Struct]]) -> InvalidBodyError:
    """The error for a body of the wrong shape: what is wrong and where; of an unknown field the nearest and the valid.

    Args:
        error: What msgspec said.
        shapes: What each part of the body is called, and its type: the part that others are in first.
    """
    text = str(error)
    valid = {name: list(shape.__struct_fields__) for name, shape in shapes.items()}
    unknown = re.match(r"Object contains unknown field `(.*?)`( - at `(.*)`)?$", text)
    if unknown is not None:
        fields = list(valid.values())[-1 if unknown[3] else 0]
        near = difflib.get_close_matches(unknown[1], fields, n=1)
        near = near or [field for field in fields if unknown[1] in field.split("_")][:1]
        hint = f"; did you mean `{near[0]}`?" if near else ""
        text = f"unknown field `{unknown[1][:64]}`{unknown[2] or ''}{hint}; valid: {', '.join(fields)}"
    return InvalidBodyError("invalid_body", text, valid)


def decode_body(
    decoder: msgspec.json.Decoder[T], body: bytes, shapes: Mapping[str, type[msgspec.Struct]], note: str = ""
) -> T:
    """Decode a JSON body.

    Args:
        decoder: Of its type.
        body: As it came.
        shapes: As of `invalid_body`.
        note: What else to know where it is no JSON at all.

    Raises:
        BadRequestError: It is not JSON.
        InvalidBodyError: It has the wrong shape; the message names the field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_body(error, shapes) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError("bad_json", f"the body is not JSON{note}: {error}") from None


class UnavailableError(ApiError):
    """Nothing fresh, or no forecaster; Retry-After says when to come back."""

    status = 503
    headers: ClassVar[dict[str, str]] = {"retry-after": "5"}


class ForecastUnavailableError(Exception):
    """Raised by an injected forecaster that has no model for a cluster yet; the message says why."""


def encode_error(code: str, message: str, detail: Any = None) -> bytes:
    """The JSON of an error: `{"error": {"code", "message", "detail"}}`."""
    return _encoder.encode(ErrorBody(ErrorDetail(code, message, detail)))

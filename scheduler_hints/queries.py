"""Query strings of the hints API: which parameters a route takes, and how a raw query becomes checked values.

The tables here are also what the OpenAPI document is made from. What a parameter selects stands in `filters.py`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import unquote_to_bytes

from scheduler_hints.errors import BadRequestError, QueryTooLongError
from scheduler_hints.schema import DEMAND_HORIZONS_H, HORIZONS_S, BottleneckClass, DemandQuantity, Scope

MAX_QUERY_BYTES = 2048
MAX_VALUE_CHARS = 256
STATES = (
    "PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "COMPLETING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT",
    "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "RESIZING", "UNKNOWN",
)  # fmt: skip
_INTEGER = re.compile(r"[0-9]{1,12}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One query parameter.

    Attributes:
        name: Its name in the query string.
        kind: Type of its value.
        description: What it selects.
        example: A valid value, for the documentation.
        choices: The values that are valid, when they can be listed.
        low: Smallest valid number.
        high: Largest valid number.
    """

    name: str
    kind: Literal["string", "integer", "number"]
    description: str
    example: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 1e9

    def parse(self, text: str) -> str | int | float:
        """The value of a decoded text.

        Raises:
            BadRequestError: It is none; the message names it and what is valid.
        """
        if not text:
            raise self._wrong(text, "is empty; leave the parameter out instead")
        if self.choices:
            found = text.upper() if self.choices is STATES else text
            if found not in self.choices:
                raise self._wrong(text, "is not one of the valid values")
            return int(found) if self.kind == "integer" else found
        if self.kind == "string":
            if len(text) > MAX_VALUE_CHARS:
                raise self._wrong(text[:40] + "…", f"is longer than {MAX_VALUE_CHARS} characters")
            if not text.isprintable():
                raise self._wrong(text, "has control characters")
            return text
        pattern = _INTEGER if self.kind == "integer" else _NUMBER
        if not pattern.fullmatch(text):
            raise self._wrong(text[:40], f"is not {'an integer' if self.kind == 'integer' else 'a number'}")
        number = int(text) if self.kind == "integer" else float(text)
        if not (math.isfinite(number) and self.low <= number <= self.high):
            raise self._wrong(text[:40], "is out of range")
        return number

    def _wrong(self, text: str, what: str) -> BadRequestError:
        if self.choices:
            valid: Any = list(self.choices)
            near = difflib.get_close_matches(text, self.choices, n=1)
            words = f"valid: {', '.join(self.choices)}"
        else:
            valid, near = self._valid_words(), []
            words = f"valid: {valid}"
        detail = {"parameter": self.name, "value": text, "valid": valid, "nearest": near[0] if near else None}
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return BadRequestError("bad_value", f"{self.name}={text!r} {what}; {words}{hint}", detail)

    def _valid_words(self) -> str:
        if self.kind == "string":
            return f"1 to {MAX_VALUE_CHARS} printable characters"
        return f"{'an integer' if self.kind == 'integer' else 'a number'} from {self.low:g} to {self.high:g}"


_P = Parameter
WAIT = _P(
    "wait", "number", "With `If-None-Match`: hold the answer until something has changed, at most so long, s.", "0",
    low=0, high=60,
)  # fmt: skip
CLUSTER = _P("cluster", "string", "Only this cluster; all that the token may see when left out.", "alpha")
_MIN_PROBABILITY = "min_probability"

PARAMETERS: dict[str, tuple[Parameter, ...]] = {
    "bottlenecks": (
        CLUSTER,
        _P("class", "string", "Only this class of bottleneck.", "thermal_throttle", get_args(BottleneckClass)),
        _P("scope", "string", "Only this scope.", "gpu", get_args(Scope)),
        _P(
            "horizon_s", "integer",
            "Only what is foreseen to begin within this many seconds, or has begun.", "60",
            tuple(str(horizon) for horizon in HORIZONS_S),
        ),
        _P(
            _MIN_PROBABILITY, "number",
            "Only from this probability on: of an onset within `horizon_s` where that is given, else of the item's own "
            "horizon. What has begun always passes.", "0.5", low=0, high=1,
        ),
        _P("node", "string", "Only of this node.", "n1"),
        _P("job", "string", "Only what touches this job.", "4711"),
        _P(
            "audience", "string",
            "`people`: also what is silenced, and what is foreseen while `actionable_horizon_s` is beyond every "
            "horizon. A scheduler is not offered either.", "scheduler", ("scheduler", "people"),
        ),
    ),
    "backfill-windows": (
        CLUSTER,
        _P("gpus", "integer", "Only windows of at least this many GPUs.", "16", low=1),
        _P("nodes", "integer", "Only windows of at least this many nodes.", "2", low=1),
        _P("duration_s", "number", "Only windows that last at least this long, s; endless ones pass.", "3600", low=0),
        _P("min_confidence", "number", "Only windows of at least this confidence.", "0.9", low=0, high=1),
        _P("scope", "string", "Only windows whose nodes share this scope.", "rack", get_args(Scope)),
        _P("fits_job", "string", "Only windows that this pending job fits.", "4711"),
    ),
    "node-risks": (
        CLUSTER,
        _P(
            "horizon", "string",
            "Which probability counts; items come highest first by it. Without it: the highest of the three, in the "
            "order in which they were published.", "24h", ("1h", "24h", "7d"),
        ),
        _P(_MIN_PROBABILITY, "number", "Only nodes at risk with at least this probability.", "0.05", low=0, high=1),
    ),
    "jobs": (
        CLUSTER,
        _P("state", "string", "Only jobs in this state.", "PENDING", STATES),
    ),
    "reservation-plans": (CLUSTER,),
    "demand": (
        CLUSTER,
        _P("queue", "string", "Only this queue; `*`: only all queues together.", "train"),
        _P("quantity", "string", "Only this quantity.", "in_demand", get_args(DemandQuantity)),
        _P(
            "horizon_h", "integer", "Only the forecast so many hours ahead.", "24",
            tuple(str(horizon) for horizon in DEMAND_HORIZONS_H),
        ),
    ),
}  # fmt: skip

PARAMETERS = {kind: (*parameters, WAIT) for kind, parameters in PARAMETERS.items()}

Values = dict[str, str | int | float]


def _decode(text: bytes) -> str:
    """One name or value; strictly UTF-8."""
    try:
        return unquote_to_bytes(text.replace(b"+", b" ")).decode("utf-8", "strict")
    except UnicodeDecodeError:
        raise BadRequestError("bad_encoding", "the query string is not valid UTF-8 after percent-decoding") from None


def parse_query(raw: bytes, parameters: Sequence[Parameter]) -> Values:
    """Check a raw query string.

    Args:
        raw: The query string as it came, without `?`.
        parameters: What the route takes.

    Returns:
        Values by parameter name, in the order of the names.

    Raises:
        BadRequestError: A parameter is unknown, given twice or wrong; the message names it and what is valid.
        QueryTooLongError: The query string is longer than `MAX_QUERY_BYTES`.
    """
    if len(raw) > MAX_QUERY_BYTES:
        raise QueryTooLongError("query_too_long", f"the query string has {len(raw)} bytes; at most {MAX_QUERY_BYTES}")
    known = {parameter.name: parameter for parameter in parameters}
    values: Values = {}
    for part in raw.split(b"&") if raw else ():
        if not part:
            continue
        name_bytes, _, value_bytes = part.partition(b"=")
        name = _decode(name_bytes)
        parameter = known.get(name)
        if parameter is None:
            raise _unknown(name, list(known))
        if name in values:
            raise BadRequestError("duplicate_parameter", f"{name} is given twice; give it once", {"parameter": name})
        values[name] = parameter.parse(_decode(value_bytes))
    return dict(sorted(values.items()))


def _unknown(name: str, valid: list[str]) -> BadRequestError:
    shown = name if len(name) <= 40 else name[:40] + "…"
    near = difflib.get_close_matches(name[:64], valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    words = ", ".join(valid) or "this path takes none"
    detail = {"parameter": shown, "valid": valid, "nearest": near[0] if near else None}
    return BadRequestError("unknown_parameter", f"no parameter {shown!r}{hint}; valid: {words}", detail)

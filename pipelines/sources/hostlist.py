"""Slurm's way of writing many host names in few characters: `n[1-3,07],login`."""

from __future__ import annotations

import re
from functools import lru_cache

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_ABSENT = {"", "(null)", "none assigned", "none", "n/a", "unknown"}
_MOST = 1_000_000


class HostlistError(ValueError):
    """A host list that cannot be read. The message holds it."""


def split_hostlist(text: str) -> list[str]:
    """Parts between the commas that stand outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


@lru_cache(maxsize=65_536)
def expand_hostlist(text: str) -> tuple[str, ...]:
    """Host names in the order they are written; none for `None assigned`, `(null)` and the like.

    Raises:
        HostlistError: Brackets or ranges are broken, or there are more than a million names.
    """
    if text.strip().lower() in _ABSENT:
        return ()
    names: list[str] = []
    for part in split_hostlist(text):
        names += _expand(part, text)
        if len(names) > _MOST:
            raise HostlistError(f"more than {_MOST} hosts in {text[:100]!r}")
    return tuple(names)


def _expand(part: str, whole: str) -> list[str]:
    match = _BRACKET.search(part)
    if match is None:
        if "[" in part or "]" in part:
            raise HostlistError(f"brackets do not match in {whole[:100]!r}")
        return [part]
    if "]" in part[: match.start()] or "[" in part[: match.start()]:
        raise HostlistError(f"brackets do not match in {whole[:100]!r}")
    heads = [part[: match.start()] + number for number in _numbers(match.group(1), whole)]
    tails = _expand(part[match.end() :], whole) if match.end() < len(part) else [""]
    if len(heads) * len(tails) > _MOST:
        raise HostlistError(f"more than {_MOST} hosts in {whole[:100]!r}")
    return [head + tail for head in heads for tail in tails]


def _numbers(body: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for piece in body.split(","):
        low, dash, high = piece.partition("-")
        if not dash:
            numbers.append(low)
            continue
        if not (low.isdecimal() and high.isdecimal() and 0 <= int(high) - int(low) < _MOST):
            raise HostlistError(f"no range: {piece!r} in {whole[:100]!r}")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers

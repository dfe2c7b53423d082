"""Slurm's way of writing many host names in few characters: `n[1-3,07],login`."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_ABSENT = {"", "(null)", "none assigned", "none", "n/a", "unknown"}
_MOST = 1_000_000
_LONGEST = 255  # characters of a host name
_DIGITS = 20


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
        HostlistError: Brackets or ranges are broken, there are more than a million names, or one is longer than 255
            characters.
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
    texts, choices, at, count = [], [], 0, 1
    for match in _BRACKET.finditer(part):
        texts.append(part[at : match.start()])
        choices.append(_numbers(match.group(1), whole))
        at = match.end()
        count *= len(choices[-1])
        if count > _MOST:
            raise HostlistError(f"more than {_MOST} hosts in {whole[:100]!r}")
    texts.append(part[at:])
    if any("[" in text or "]" in text for text in texts):
        raise HostlistError(f"brackets do not match in {whole[:100]!r}")
    if sum(map(len, texts)) + sum(max(map(len, numbers)) for numbers in choices) > _LONGEST:
        raise HostlistError(f"a name of more than {_LONGEST} characters in {whole[:100]!r}")
    columns = [column for pair in zip(texts, choices, strict=False) for column in ([pair[0]], pair[1])]
    return ["".join(name) for name in itertools.product(*columns, [texts[-1]])]


def _numbers(body: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for piece in body.split(","):
        low, dash, high = piece.partition("-")
        if not dash and low and len(low) <= _LONGEST:
            numbers.append(low)
            continue
        is_range = low.isdecimal() and high.isdecimal() and len(low) <= _DIGITS and len(high) <= _DIGITS
        if not is_range or not 0 <= int(high) - int(low) < _MOST - len(numbers):
            raise HostlistError(f"no range: {piece[:100]!r} in {whole[:100]!r}")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers

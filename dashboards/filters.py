"""Filters of the pages as they stand in the address: read, checked, written back.

The address is the only place where a filter lives, so that a link shares what its sender saw and the browser's back
button works. Nothing here fetches or draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode


@dataclass(frozen=True, slots=True)
class Filters:
    """What an address asks for.

    Attributes:
        values: Parameter to value, as text; only those that are valid and set.
        problems: One sentence for each parameter that was refused.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def get(self, name: str) -> str | None:
        return self.values.get(name)

    def number(self, name: str, default: float) -> float:
        """Value of a numeric parameter."""
        text = self.values.get(name)
        return default if text is None else float(text)

    def search(self, **changes: str | None) -> str:
        """Query string with some parameters changed; None removes one. Empty when nothing is set."""
        kept = {**self.values, **changes}
        text = urlencode({name: value for name, value in kept.items() if value is not None})
        return f"?{text}" if text else ""


Check = Callable[[str], str | None]
"""Takes a value and returns what is wrong with it, or None."""


def one_of(choices: Sequence[str]) -> Check:
    """The value is one of these."""

    def check(value: str) -> str | None:
        return None if value in choices else f"choose one of: {', '.join(choices)}"

    return check


def probability(value: str) -> str | None:
    """The value is a number from 0 to 1."""
    try:
        good = 0 <= float(value) <= 1
    except ValueError:
        good = False
    return None if good else "give a number from 0 to 1"


def name(value: str) -> str | None:
    """The value can be a name of a node or rack."""
    return None if 0 < len(value) <= 253 and value.isprintable() else "give a name of at most 253 characters"


def read(search: str | None, checks: Mapping[str, Check]) -> Filters:
    """Read the filters of an address.

    Args:
        search: Query string with or without its `?`.
        checks: Parameter to its check; other parameters are refused.

    Returns:
        Valid values, and a sentence for each value that is not.
    """
    values: dict[str, str] = {}
    problems: list[str] = []
    try:
        pairs = parse_qsl((search or "").removeprefix("?"), max_num_fields=50)
    except ValueError:
        return Filters(problems=("The address has too many parameters; none was used.",))
    for key, value in pairs:
        if key not in checks:
            problems.append(f"“{key[:40]}” is no filter of this page; it has: {', '.join(checks)}.")
        elif wrong := checks[key](value):
            problems.append(f"{key} = “{value[:40]}” was left out: {wrong}.")
        else:
            values[key] = value
    return Filters(values, tuple(problems))

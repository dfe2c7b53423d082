"""The data-quality report of an import: what was read, kept, made null, passed over and dropped, and why.

Counting and wording only; what is counted is decided by the readers and by `pipelines/importing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from features.cleaning_findings import REASONS

_PLACES = 5
_REASONS = 12
_EXAMPLE = 100
_ONE = {"lines": "line", "rows": "row", "series": "series"}


@dataclass
class Tally:
    """How often something happened, where first, and one example of it."""

    count: int = 0
    places: list[int] = field(default_factory=list)
    example: str = ""


@dataclass
class Report:
    """What one import found.

    Attributes:
        source: Name of the file or folder.
        kind: Kind of the import.
        cluster: Name of the cluster.
        what: What is counted as read: lines, rows or series.
        read: How many of them held data.
        kept: Rows by table that were delivered.
        nulled: (column, reason) → values that became null.
        passed: Reason → things that were read rightly and are of no use here, as steps of jobs.
        dropped: Reason → things that could not be used.
        filled: Table → column → values that are there.
        seen: Noun → how many different ones, as job, GPU, node.
        first: Earliest time kept.
        last: Latest time kept.
        notes: Further sentences.
        written: Where the rows went.
    """

    source: str
    kind: str
    cluster: str
    what: str = "lines"
    read: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    nulled: dict[tuple[str, str], Tally] = field(default_factory=dict)
    passed: dict[str, Tally] = field(default_factory=dict)
    dropped: dict[str, Tally] = field(default_factory=dict)
    filled: dict[str, dict[str, int]] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    first: datetime | None = None
    last: datetime | None = None
    notes: list[str] = field(default_factory=list)
    written: str = ""

    @property
    def rows(self) -> int:
        """Rows delivered, of all tables."""
        return sum(self.kept.values())

    def drop(self, reason: str, count: int = 1, place: int | None = None, example: object = "") -> None:
        """Count something that cannot be used; `place` is its line or row."""
        _add(self.dropped.setdefault(reason, Tally()), count, place, example)

    def skip(self, reason: str, count: int = 1, place: int | None = None, example: object = "") -> None:
        """Count something that is right but of no use here."""
        _add(self.passed.setdefault(reason, Tally()), count, place, example)

    def null(self, column: str, reason: str, count: int = 1, place: int | None = None, example: object = "") -> None:
        """Count values that became null."""
        _add(self.nulled.setdefault((column, reason), Tally()), count, place, example)

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    def text(self) -> str:
        """The report as lines to print."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        unit = self.what
        yield f"{self.source}: {self.kind} of cluster {self.cluster}"
        yield _row("read", many(self.read, _ONE[unit]))
        kept = ", ".join(f"{many(count, 'row')} of {table}" for table, count in self.kept.items() if count)
        yield _row("kept", kept or "nothing")
        if self.first is not None and self.last is not None:
            spent = length((self.last - self.first).total_seconds())
            yield _row("span", f"{self.first:%Y-%m-%d %H:%M:%S} to {self.last:%Y-%m-%d %H:%M:%S} UTC ({spent})")
        if any(self.seen.values()):
            yield _row("seen", ", ".join(many(count, noun) for noun, count in self.seen.items() if count))
        for table, columns in self.filled.items():
            some = {name: count for name, count in columns.items() if 0 < count < self.kept[table]}
            if some:
                shares = ", ".join(f"{name} in {_share(count, self.kept[table])}" for name, count in some.items())
                yield _row("not in all", shares)
        for (column, reason), tally in sorted(self.nulled.items()):
            yield _row("nulled", f"{many(tally.count, 'value')} of {column}: {words(reason)}{_where(tally, unit)}")
        yield from _tallies("passed over", self.passed, unit)
        yield from _tallies("dropped", self.dropped, unit)
        for text in self.notes:
            yield _row("note", text)
        if self.written:
            yield _row("written", self.written)


def report_places(report: Report, column: str, reason: str, places: Iterable[int], values: Iterable[object]) -> None:
    """Count values that became null, with the places of the first of them and the first as example."""
    for at, (place, value) in enumerate(zip(places, values, strict=True)):
        report.null(column, reason, 1, place, "" if at else str(value))


def _tallies(name: str, tallies: dict[str, Tally], unit: str) -> Iterator[str]:
    ordered = sorted(tallies.items(), key=lambda item: -item[1].count)
    for reason, tally in ordered[:_REASONS]:
        yield _row(name, f"{tally.count:,}: {reason}{_where(tally, unit)}")
    others = ordered[_REASONS:]
    if others:
        yield _row(name, f"{sum(tally.count for _, tally in others):,}: {len(others):,} others")


def many(count: int, noun: str) -> str:
    """A count and its noun in the right form, as `1 job` or `2,000 jobs`."""
    return f"{count:,} {noun if count == 1 or noun == _ONE['series'] else noun + 's'}"


def length(seconds: float) -> str:
    """A length of time in its two largest units, as `19 h 23 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    sizes = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    at = next(i for i, (size, _) in enumerate(sizes) if seconds >= size)
    (large, unit), (small, below) = sizes[at], sizes[at + 1]
    whole, rest = divmod(round(seconds / small) * small, large)
    return f"{whole} {unit}" + (f" {rest // small} {below}" if rest else "")


def words(reason: str) -> str:
    """A reason of cleaning in a few words; other reasons are words already."""
    if reason not in REASONS:
        return reason
    said = re.split(r"[,:;.]", REASONS[reason], maxsplit=1)[0]
    return said[0].lower() + said[1:] if said.split()[0][1:].islower() else said


def _share(count: int, of: int) -> str:
    """In percent; what is not all is never shown as all, nor something as nothing."""
    return f"{min(max(100 * count / of, 0.1), 99.9):.1f} %"


def _add(tally: Tally, count: int, place: int | None, example: object) -> None:
    tally.count += count
    if place is not None and len(tally.places) < _PLACES:
        tally.places.append(place)
    if not tally.example and example not in ("", None):
        shown = example if isinstance(example, str) else repr(example)
        # One line, no control characters: what is shown came from a file that may be anything.
        shown = "".join(char if char.isprintable() else "?" for char in shown[: _EXAMPLE + 1])
        tally.example = shown if len(shown) <= _EXAMPLE else shown[:_EXAMPLE] + "…"


def _where(tally: Tally, unit: str) -> str:
    noun = _ONE[unit]
    if not tally.places:
        places = ""
    else:
        more = ", …" if tally.count > len(tally.places) else ""
        plural = noun if len(tally.places) == 1 or noun == "series" else f"{noun}s"
        places = f" ({plural} {', '.join(map(str, tally.places))}{more})"
    return places + (f", as {tally.example}" if tally.example else "")


def _row(name: str, text: str) -> str:
    return f"  {name:<12}{text}"

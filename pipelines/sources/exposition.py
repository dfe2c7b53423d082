"""Reads the text that exporters expose: sample lines of known metrics, each series resolved once.

The text is the Prometheus exposition format 0.0.4 (and what OpenMetrics shares with it). A line's series — its name and
labels, up to the last brace — is looked up whole in a cache; its labels are parsed only when it is new. That makes a
page of a thousand lines cost well under a millisecond at the second reading. Fetching the text stands in `scrape.py`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pipelines.sources.wide import Index

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_SERIES = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*\s*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?')
_ESCAPE = re.compile(r"\\(.)")
_UNESCAPED = {"n": "\n"}
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class ExpositionError(ValueError):
    """The text is not of the exposition format. The message holds the line."""


class Page(NamedTuple):
    """Samples of one page, in the order of its lines.

    Attributes:
        names: Name id of each sample.
        entities: Entity id of each sample.
        ts_ms: Its own time, ms since the epoch; None when the line gave none.
        values: Its value.
    """

    names: list[int]
    entities: list[int]
    ts_ms: list[int | None]
    values: list[float]


def parse_series(text: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a series as a line begins with it.

    Raises:
        ExpositionError: It is none.
    """
    name, brace, rest = text.partition("{")
    name = name.strip()
    if not _NAME.fullmatch(name) or (brace and not rest.rstrip().endswith("}")):
        raise ExpositionError(f"not a series: {text[:200]!r}")
    labels: dict[str, str] = {}
    body, at = rest.rstrip()[:-1], 0
    while at < len(body) and body[at:].strip(" \t,"):
        match = _LABEL.match(body, at)
        if match is None:
            raise ExpositionError(f"not labels: {text[:200]!r}")
        value = match.group(2)
        labels[match.group(1)] = _ESCAPE.sub(lambda m: _UNESCAPED.get(m[1], m[1]), value) if "\\" in value else value
        at = match.end()
    return name, labels


def parse_page(text: str, index: Index, node: str, target: object = None) -> Page:
    """Samples of the metrics we know.

    Args:
        text: The page.
        index: Cache of series, shared by all pages and kept over reads.
        node: Name of the node when the target tells it; empty: the labels tell it.
        target: What distinguishes pages whose lines look alike when `node` is empty.

    Raises:
        ExpositionError: A line is no sample; nothing of the page is to be used then.
    """
    if text and not text.endswith("\n"):
        raise ExpositionError(f"it breaks off: {text[-100:]!r}")
    page = Page([], [], [], [])
    prefix = node or target
    for line in text.split("\n"):
        if not line or line[0] == "#" or line.isspace():
            continue
        cut = line.rfind("}") + 1
        if cut == 0:
            cut = line.find(" ") if " " in line else len(line)
        elif " # {" in line:  # an exemplar of OpenMetrics has a brace of its own behind the value
            match = _SERIES.match(line)
            cut = match.end() if match else cut
        key = (prefix, line[:cut])
        try:
            ids = index.get(key)
        except KeyError:
            name, labels = _series_of(line[:cut], index)
            ids = index.add(key, name, labels, node)
        if ids is None:
            continue
        fields = line[cut:].split(" #", 1)[0].split()
        try:
            value = float(fields[0])
            ts = None if len(fields) < 2 else _milliseconds(fields[1])
        except (IndexError, ValueError, OverflowError):
            raise ExpositionError(f"not a sample: {line[:200]!r}") from None
        page.names.append(ids[0])
        page.entities.append(ids[1])
        page.ts_ms.append(ts)
        page.values.append(value)
    return page


def _series_of(text: str, index: Index) -> tuple[str, dict[str, str]]:
    """As `parse_series`, but odd labels of a metric that nobody reads are no reason to refuse the page.

    Slurm's own metrics do not escape label values.
    """
    try:
        return parse_series(text)
    except ExpositionError:
        name, brace, _ = text.partition("{")
        if not brace or not _NAME.fullmatch(name.strip()) or name.strip() in index.table.variants:
            raise
        return name.strip(), {}


def _milliseconds(text: str) -> int:
    # Whole milliseconds in the Prometheus format, seconds with a fraction in OpenMetrics.
    ms = round(float(text) * 1000) if "." in text else int(text)
    if not -(2**63) <= ms < 2**63:
        raise OverflowError
    return ms

"""Building blocks of pages: sections, tables, notices, choices, bars. Each is plain, semantic HTML.

Functions that return Dash components and know nothing of what they show. Times that pass (ages, countdowns) are written
once here and kept running in the browser by `assets/weatherglass.js`, from the attributes set here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from dash import html

from dashboards import words

Tone = Literal["info", "warn", "bad", "ok"]
_TONE_MARKS = {"info": "i", "warn": "!", "bad": "✕", "ok": "✓"}


def attributes(**values: Any) -> dict[str, Any]:
    """Attributes of an element as Dash wants them: `data_until` is `data-until`; those that are None are left out."""
    return {name.rstrip("_").replace("_", "-"): value for name, value in values.items() if value is not None}


def milliseconds(moment: datetime) -> str:
    """Milliseconds since the epoch, as attributes carry a time."""
    return str(round(moment.timestamp() * 1000))


def age(moment: datetime | None, now: datetime, *, suffix: str = " ago") -> Any:
    """How long ago a moment was, kept running: `12 s ago`."""
    if moment is None:
        return words.NOTHING
    text = words.duration((now - moment).total_seconds()) + suffix
    return html.Time(
        text,
        dateTime=moment.isoformat(),
        title=words.stamp(moment),
        className="num",
        **attributes(data_age_of=milliseconds(moment), data_suffix=suffix),
    )


def countdown(moment: datetime | None, now: datetime) -> Any:
    """How long until a moment, kept running: `in 34 s`, `now`, `due 3 s ago`."""
    if moment is None:
        return html.Span("not told", className="muted")
    left_s = (moment - now).total_seconds()
    text = "now"
    if abs(left_s) >= 0.5:
        text = f"in {words.duration(left_s)}" if left_s > 0 else f"due {words.duration(-left_s)} ago"
    return html.Time(
        text,
        dateTime=moment.isoformat(),
        title=words.stamp(moment),
        className="countdown num",
        **attributes(data_until=milliseconds(moment)),
    )


def section(
    title: str, children: Any, *, id: str | None = None, aside: Any = None, note: Any = None, grow: str = ""
) -> html.Section:
    """A titled part of a page."""
    heading = f"{id or title.lower().replace(' ', '-')}-title"
    head = [html.H2(title, id=heading)]
    if aside is not None:
        head.append(html.Div(aside, className="aside"))
    body = [html.Header(head, className="section-head")]
    if note is not None:
        body.append(html.P(note, className="note"))
    return html.Section(
        [*body, *(children if isinstance(children, list) else [children])],
        className=f"card {grow}".strip(),
        **attributes(aria_labelledby=heading),
    )


def notice(tone: Tone, title: str, *lines: Any, id: str | None = None) -> html.Div:
    """A message in a box; bad ones are announced at once, others politely."""
    return html.Div(
        [
            html.Span(_TONE_MARKS[tone], className="mark", **attributes(aria_hidden="true")),
            html.Div([html.Strong(title), *[html.P(line) for line in lines if line]]),
        ],
        className=f"notice {tone}",
        role="alert" if tone == "bad" else "status",
        **attributes(id=id),
    )


def place(id: str, height_px: int = 120) -> html.Div:
    """Where a refreshed part of a page goes; shimmers as long as it is empty."""
    return html.Div(id=id, className="place", style={"--height": f"{height_px}px"}, **attributes(aria_busy="true"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading, with the unit.
        kind: text, number (aligned right), or bar (takes the width that is left).
        hint: Shown on hover over the heading.
        is_wide_only: Left out on narrow screens.
    """

    title: str
    kind: Literal["text", "number", "bar"] = "text"
    hint: str = ""
    is_wide_only: bool = False


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], *, caption: str, id: str, keys: Sequence[str] = ()
) -> html.Div:
    """A real table whose first cell of a row is its heading; scrolls by keyboard when it is too wide.

    Args:
        columns: Headings.
        rows: Cells of each row, text or components, as many as columns.
        caption: What the table holds, for screen readers.
        id: Id of the table.
        keys: One name per row, so that a row keeps its place in the browser while others come and go.
    """

    def classes(column: Column) -> str:
        return " ".join(filter(None, (column.kind, "wide-only" if column.is_wide_only else "")))

    body = []
    for index, cells in enumerate(rows):
        made = []
        for column, cell in zip(columns, cells, strict=True):
            if made:
                made.append(html.Td(cell, className=classes(column)))
            else:
                made.append(html.Th(cell, scope="row", className=classes(column)))
        body.append(html.Tr(made, **attributes(key=keys[index] if keys else None)))
    head = html.Tr(
        [
            html.Th(column.title, scope="col", className=classes(column), **attributes(title=column.hint or None))
            for column in columns
        ]
    )  # fmt: skip
    return html.Div(
        html.Table([html.Caption(caption, className="hidden-text"), html.Thead(head), html.Tbody(body)], id=id),
        className="table-scroll",
        tabIndex="0",
        role="region",
        **attributes(aria_label=caption),
    )


def soft_link(text: Any, href: str, *, class_: str = "", is_current: bool = False, title: str = "") -> html.A:
    """A link inside the application: followed without loading the page anew, and without scrolling."""
    return html.A(
        text,
        href=href,
        className=class_,
        **attributes(data_soft="", aria_current="true" if is_current else None, title=title or None),
    )


def choices(label: str, options: Sequence[tuple[str, str, bool]], *, path: str) -> html.Div:
    """Links of which one is chosen; each is an address that can be shared.

    Args:
        label: What is chosen.
        options: Text, query string, whether it is the chosen one.
        path: Path of the page.
    """
    links = [
        soft_link(text, path + search, class_="choice", is_current=is_chosen) for text, search, is_chosen in options
    ]
    return html.Div(
        [html.Span(label, className="choice-label"), html.Div(links, className="choice-links")],
        className="choices",
        role="group",
        **attributes(aria_label=label),
    )


def csv_link(href: str, what: str) -> html.A:
    """Download of a table as CSV."""
    return html.A("CSV", href=href, download="", className="csv", title=f"Download {what} as CSV")


def badge(text: str, tone: str = "", title: str = "") -> html.Span:
    """A small label."""
    return html.Span(text, className=f"badge {tone}".strip(), **attributes(title=title or None))


def model_line(versions: Iterable[str | None]) -> html.Span:
    """Which models the forecasts of a table come from, and whether they are models at all."""
    distinct = sorted({str(version) for version in versions if version})
    rules = [version for version in distinct if words.is_baseline(version)]
    told = " A baseline is a rule, not yet a trained model: its probabilities are rough." if rules else ""
    return html.Span(["Forecast by ", *[model_badge(version) for version in distinct], told] if distinct else "")


def model_badge(version: str | None) -> html.Span:
    """Which model made a forecast; a rule is marked as not being a trained model."""
    if words.is_baseline(version):
        name = str(version).partition(":")[2] or str(version)
        return badge(f"baseline: {name}", "rule", "A rule, not a trained model: treat its probabilities as rough")
    return badge(f"model {version}" if version else "model not told", "", "Version of the trained model")


def data_bar(value: float | None, text: str | None = None, top: float = 1.0) -> html.Div:
    """A probability as a number over a bar; the bar is full at `top`."""
    if value is None:
        return html.Div(words.NOTHING, className="data-bar")
    share = min(1.0, value / top) if top > 0 else 0.0
    level = min(4, max(0, int(share * 5)))
    return html.Div(
        [
            html.Span(text or words.percent(value), className="num"),
            html.Span(
                html.Span(className=f"fill heat-{level}", style={"width": f"{max(2.0, share * 100):.0f}%"}),
                className="track",
                **attributes(aria_hidden="true"),
            ),
        ],
        className="data-bar",
    )


def stacked_bar(parts: Sequence[tuple[str, float]], total: float) -> html.Div:
    """Shares of GPU states as one bar. The numbers stand in the cells beside it, so it is hidden from screen readers.

    Args:
        parts: State and GPUs, in order.
        total: GPUs in all.
    """
    title = ", ".join(f"{words.STATE_WORDS[state]} {words.gpus(value)}" for state, value in parts if value >= 0.05)
    return html.Div(
        [
            html.Span(className=f"part state-{state}", style={"width": f"{value / total * 100:.2f}%"})
            for state, value in parts
            if total > 0 and value / total > 0.0005
        ],
        className="stacked",
        title=title,
        **attributes(aria_hidden="true"),
    )

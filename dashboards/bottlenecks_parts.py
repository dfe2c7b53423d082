"""Pieces of *What is about to go wrong?*: summary, tables of bottlenecks, what was checked.

Facts in, components out; nothing is read here and no callback is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from dash import html

from dashboards import words
from dashboards.bottlenecks_cells import PATH, class_mark, jobs_of, reasons_of, suggested, what, where, why
from dashboards.components import (
    Column,
    age,
    attributes,
    countdown,
    data_bar,
    milliseconds,
    model_badge,
    model_line,
    notice,
    soft_link,
    table,
)
from dashboards.filters import Filters
from dashboards.foresight import HORIZONS_S, Foreseen, by_class, first_onset, probability
from dashboards.hints_reading import HintList, moment
from dashboards.level_parts import course_link

_ROWS = 12
_ROWS_AT_MOST = 500


def as_of(hints: HintList, now: datetime) -> Any:
    """When the hints were made and for how long they may be believed."""
    if not hints.is_valid:
        return html.Div(html.Span("no valid hints", className="pill bad"), className="asof")
    newest = None
    if hints.data_age_s is not None:
        newest = now - timedelta(seconds=hints.data_age_s)
    return html.Div(
        [
            html.Span("Hints made ", className="muted"),
            html.Span(age(hints.generated_at, now), className="pill"),
            html.Span(" from samples ", className="muted"),
            html.Span(age(newest, now, suffix=" old"), className="pill"),
            html.Span(" valid for ", className="muted"),
            html.Span(_valid_for(hints.expires_at, now), className="pill"),
        ],
        className="asof",
    )


def _valid_for(expires_at: datetime | None, now: datetime) -> Any:
    if expires_at is None:
        return words.NOTHING
    return html.Time(
        words.duration((expires_at - now).total_seconds()),
        dateTime=expires_at.isoformat(),
        className="num",
        **attributes(data_left=milliseconds(expires_at)),
    )


def stale_notice(hints: HintList, status: Mapping[str, Any] | None, now: datetime) -> Any:
    """Why nothing is shown as valid."""
    if hints.freshness == "down":
        known = ""
        if hints.last_expired_at is not None:
            word = "expired" if hints.last_expired_at <= now else "expire"
            distance = words.duration(abs((now - hints.last_expired_at).total_seconds()))
            when = f"{distance} ago" if word == "expired" else f"in {distance}"
            known = f"The last hints seen here were made at {words.clock(hints.last_generated_at)} and {word} {when}."
        return notice(
            "bad", "No answer from the hints API that could be shown", words.sentence(hints.message), known,
            "Nothing is shown as valid. Schedulers go on as without hints. The page tries again at each refresh.",
        )  # fmt: skip
    ages = [
        (facts["age_s"], facts["age_s"] - facts["ttl_s"])
        for found in ((status or {}).get("clusters") or {}).values()
        if (facts := (found.get("kinds") or {}).get("bottlenecks") or {}).get("age_s") is not None
        and facts.get("ttl_s") is not None
    ]
    title = "Hints have expired: nothing is shown as valid"
    if ages:
        made_s, expired_s = min(ages)
        title = (
            f"Hints are {words.duration(made_s)} old, expired {words.duration(expired_s)} ago: "
            "nothing is shown as valid"
        )
    elif hints.last_generated_at is not None and hints.last_expired_at is not None:
        title = (
            f"Hints are {words.duration((now - hints.last_generated_at).total_seconds())} old, expired "
            f"{words.duration((now - hints.last_expired_at).total_seconds())} ago: nothing is shown as valid"
        )
    return notice(
        "bad", title, words.sentence(hints.message),
        "Schedulers go on as without hints. Look at the nowcast process and its source of samples.",
    )  # fmt: skip


def summary(foreseen: Foreseen, hints: HintList, now: datetime) -> Any:
    """What is to come in one sentence."""
    if not hints.is_valid:
        return html.P("No statement can be made at present.", className="lead")
    coming, active = len(foreseen.coming), len(foreseen.active)
    told = html.Strong(words.count(coming, "bottleneck") if coming else "No bottleneck")
    parts: list[Any] = [told, f" foreseen within {HORIZONS_S[-1]} s"]
    first = first_onset(foreseen.coming)
    if first is not None:
        parts += [", the first ", html.Strong(countdown(first, now))]
    parts += [
        "; ",
        html.Strong(words.count(active, "condition") if active else "no condition"),
        " active now.",
    ]
    return html.P(parts, className="lead")


def horizon_note(hints: HintList) -> Any:
    """From which horizon on a scheduler can still act."""
    actionable = hints.actionable_horizon_s
    if not hints.is_valid:
        return ""
    if actionable is None:
        return "How soon a scheduler can act is not known yet: the nowcast has not measured it."
    offered = [h for h in HORIZONS_S if h >= actionable]
    reach = f"{words.number(actionable)} s"
    if not offered:
        return (
            f"Sample age, tick and the scheduler's own period add up to {reach}: no horizon up to {HORIZONS_S[-1]} s "
            "leaves a scheduler time to act. Everything below is shown for people only."
        )
    if len(offered) == len(HORIZONS_S):
        return f"A scheduler needs {reach} to act (sample age + tick + its own period): every horizon is offered to it."
    return (
        f"A scheduler needs {reach} to act (sample age + tick + its own period): horizons of {offered[0]} s and more "
        "are offered to it, shorter ones are shown here only."
    )


def foreseen_table(
    foreseen: Foreseen, hints: HintList, indices: Mapping[str, int], asked: Filters, now: datetime, *, several: bool
) -> Any:
    """Bottlenecks to come, the most urgent first."""
    actionable = hints.actionable_horizon_s
    columns = [
        Column("Onset", hint="Expected onset; it counts down"),
        Column("What"),
        Column("Where"),
        Column("Jobs"),
        *[
            Column(
                f"≤ {h} s",
                "number",
                f"Probability that it begins within {h} s"
                + ("; too soon for a scheduler to act" if actionable is not None and h < actionable else ""),
            )
            for h in HORIZONS_S
        ],
        Column("Suggested"),
        Column("Why", is_wide_only=True),
    ]
    is_long = asked.get("rows") == "all"
    shown = foreseen.coming[: _ROWS_AT_MOST if is_long else _ROWS]
    versions = [item.get("model_version") for item in foreseen.coming]
    several_models = len(set(versions)) > 1
    rows = [
        [
            countdown(moment(item.get("expected_onset")), now),
            what(item, course_link(item, asked)),
            where(item, indices, asked, several=several),
            jobs_of(item),
            *[data_bar(probability(item, h)) for h in HORIZONS_S],
            suggested(item),
            html.Div([why(item, with_model=several_models), *course_link(item, asked)]),
        ]
        for item in shown
    ]
    made = table(
        columns, rows, caption="Bottlenecks to come, the most urgent first, with the probability that each begins "
        "within 30, 60, 90 and 120 seconds", id="bottlenecks-table", keys=[str(item.get("id")) for item in shown],
    )  # fmt: skip
    note: list[Any] = [model_line(versions)]
    if len(foreseen.coming) > len(shown):
        note = [f"The {len(shown)} most urgent of {len(foreseen.coming):,}. ", *note]
    if len(foreseen.coming) > _ROWS:
        text = f"Show the first {_ROWS}" if is_long else f"Show {min(len(foreseen.coming), _ROWS_AT_MOST):,}"
        link = soft_link(text, PATH + asked.search(rows=None if is_long else "all"), class_="more")
        note = [*note[:-1], link, " ", note[-1]]
    return [made, html.P(note, className="note under")]


def nothing_foreseen(
    hints: HintList, status: Mapping[str, Any] | None, asked: Filters, hidden: int, now: datetime
) -> Any:
    """The calm state: says what was looked at and when, so that silence can be told from blindness."""
    if hidden:
        reset = asked.search(**{"class": None, "min_probability": None, "node": None, "rack": None})
        return notice(
            "info", "Nothing matches these filters",
            html.Span([
                f"{words.count(hidden, 'bottleneck')} foreseen outside of them. ",
                soft_link("Show all", PATH + reset),
            ]),
        )  # fmt: skip
    chosen = asked.get("cluster")
    lines = []
    for cluster, found in ((status or {}).get("clusters") or {}).items():
        nowcast = found.get("nowcast") or {}
        if (chosen and cluster != chosen) or not nowcast:
            continue
        fresh, all_, tick = nowcast.get("fresh_gpus"), nowcast.get("gpus"), moment(nowcast.get("last_tick"))
        classes = nowcast.get("screened") or {}
        left_out = nowcast.get("excluded_nodes") or 0
        lines.append(
            html.Span(
                [
                    f"{cluster}: {words.number(fresh)} of {words.gpus(all_)} had fresh samples and were checked ",
                    age(tick, now),
                    f" for {', '.join(words.class_words(name) for name in classes) or 'every class'}"
                    f" at {', '.join(map(str, HORIZONS_S))} s"
                    + (f"; {words.count(left_out, 'node')} out of service left out." if left_out else "."),
                ]
            )
        )
    if not lines:
        lines.append(html.Span(["Checked ", age(hints.generated_at, now), f" at {', '.join(map(str, HORIZONS_S))} s."]))
    models = sorted(set(hints.model_versions.values()))
    by = html.Span(["By ", *[part for version in models for part in (model_badge(version), " ")]]) if models else ""
    return notice("ok", "Nothing foreseen", *lines, by, id="nothing-foreseen")


def active_table(
    foreseen: Foreseen, indices: Mapping[str, int], asked: Filters, *, several: bool
) -> Any:  # fmt: skip
    """Conditions that are already there: facts, no forecasts."""
    if not foreseen.active:
        return html.P("No condition is active.", className="muted")
    columns = [
        Column("What"),
        Column("Where"),
        Column("Jobs"),
        Column("Suggested"),
        Column("Evidence", is_wide_only=True),
    ]
    shown = foreseen.active[:_ROWS]
    rows = [
        [
            what(item, course_link(item, asked)),
            where(item, indices, asked, several=several),
            jobs_of(item),
            suggested(item),
            html.Div([reasons_of(item) or words.NOTHING, *course_link(item, asked)]),
        ]
        for item in shown
    ]
    made = table(
        columns, rows, caption="Conditions that are active now", id="active-table",
        keys=[str(item.get("id")) for item in shown],
    )  # fmt: skip
    if len(foreseen.active) > _ROWS:
        rest = f"The first {_ROWS} of {len(foreseen.active):,}; the CSV has all."
        return [made, html.P(rest, className="note under")]
    return made


def class_table(foreseen: Foreseen, asked: Filters) -> Any:
    """How many per class."""
    known = {}
    known.update(dict.fromkeys(words.CLASS_WORDS, (0, 0, None)))
    for name, coming, active, top in by_class(foreseen):
        known[name] = (coming, active, top)
    rows = [
        [
            soft_link(class_mark(name), PATH + asked.search(**{"class": name}), class_="where"),
            words.number(coming),
            words.number(active),
            data_bar(top) if top is not None else words.NOTHING,
        ]
        for name, (coming, active, top) in known.items()
    ]
    columns = [
        Column("Class"),
        Column("Foreseen", "number"),
        Column("Active", "number"),
        Column("Most probable", "number", "Largest probability at any horizon"),
    ]
    return table(columns, rows, caption="Bottlenecks by class", id="class-table")

"""Pieces of *Is my fleet good?*: the answer, the losses in words, and its tables.

Facts in, components out; nothing is read here and no callback is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import polars as pl
from dash import html

from dashboards import words
from dashboards.components import Column, age, attributes, notice, stacked_bar, table
from dashboards.fleet_reading import FleetNow, FleetTrend
from dashboards.reading import Reading
from features import fleet

GROUPS = {"rack": "Rack", "pod": "Pod", "gpu_model": "GPU model", "cluster": "Cluster"}
_ROWS = 24
_LOSSES = 8
_KINDS_SHOWN = ("bottlenecks", "node-risks", "jobs")
LATE_S, OLD_S = 900, 3600
"""Samples reach the store every few minutes: older than the first is late, than the second old."""

# Marks on the scale of the one number: half is what a fleet without forecasts commonly reaches, 70 % a well-run one.
MARKS = ((0.5, "common"), (0.7, "well run"))


def answer(data: FleetNow) -> Any:
    """The one number, how sure it is, and the four factors it is the product of."""
    good = data.goodness
    if not data.newest:
        return notice(
            "info",
            "Nothing measured yet",
            "The store has no GPU samples. The first appear a few minutes after ingest starts.",
        )
    certain = good.counts["unknown"] + good.counts["unreported"]
    spread = ""
    if good.low is not None and good.high is not None and good.high - good.low >= 0.0005:
        spread = (
            f"{words.percent(good.low, 1)} to {words.percent(good.high, 1)}: what {words.gpus(certain)} do is not known"
        )
    return [
        html.Div(
            [
                html.P(
                    [html.Span(words.percent(good.value, 1), className="big num", id="fleet-goodness")],
                    className="figure-line",
                ),
                html.Div(
                    [
                        html.P("of all GPU time does work at full speed", className="lead"),
                        html.P(
                            f"{words.number(good.counts['good'], 1)} of {words.gpus(good.gpus)}"
                            if good.value is not None
                            else "No activity metric is known for the allocated GPUs.",
                            className="muted",
                        ),
                        html.P(spread, className="muted") if spread else None,
                    ]
                ),
            ],
            className="headline",
        ),
        _scale(good.value, good.low, good.high),
        _factors(good),
    ]


def _scale(value: float | None, low: float | None, high: float | None) -> html.Div:
    marks = [
        html.Span(
            html.Span(f"{share * 100:.0f} % {text}", className="mark-text"),
            className="mark-line",
            style={"left": f"{share * 100:.0f}%"},
        )
        for share, text in MARKS
    ]
    spread = None
    if low is not None and high is not None and high > low:
        spread = html.Span(
            className="spread", style={"left": f"{low * 100:.1f}%", "width": f"{(high - low) * 100:.1f}%"}
        )
    return html.Div(
        [html.Span(className="level", style={"width": f"{(value or 0) * 100:.1f}%"}), spread, *marks],
        className="scale",
        **attributes(aria_hidden="true"),
    )


def _factors(good: fleet.Goodness) -> html.Dl:
    parts = (
        ("available", good.available, "in service and reporting, of all GPUs"),
        ("allocated", good.allocated, "given to a job, of the available"),
        ("productive", good.productive, "doing work, of the allocated whose activity is known"),
        ("unthrottled", good.unthrottled, "at full speed, of those doing work"),
    )
    known = [value for _, value, _ in parts if value is not None]
    worst = min(known, default=None)
    cells: list[Any] = []
    for index, (name, value, hint) in enumerate(parts):
        if index:
            cells.append(html.Span("×", className="times", **attributes(aria_hidden="true")))
        is_worst = value is not None and value == worst and value < 0.995
        cells.append(
            html.Div(
                [
                    html.Dt(name),
                    html.Dd(words.percent(value, 1), className="num"),
                    html.Dd(hint, className="hint"),
                    html.Dd("costs the most", className="most") if is_worst else None,
                ],
                className="factor worst" if is_worst else "factor",
            )
        )
    return html.Dl(cells, className="factors")


def loss_text(loss: fleet.Loss, now: datetime, *, several: bool) -> tuple[str, str]:
    """A loss in words: what, and where or why."""
    amount = words.gpus(loss.gpus)
    where = f"{loss.cluster}: " if several else ""
    nodes = words.names(loss.nodes)
    if loss.kind == "unproductive":
        owner = f" ({loss.user})" if loss.user else ""
        lasting = ""
        cost = ""
        if loss.since is not None:
            seconds = (now - loss.since).total_seconds()
            lasting = f" for {words.duration(seconds)}"
            if loss.is_since_bound:
                lasting = f" for over {words.duration(seconds // 3600 * 3600 or seconds)}"
            cost = f"; {words.number(loss.gpus * seconds / 3600, 1)} GPU-hours so far"
        whole = (
            "the whole job does nothing"
            if loss.gpus >= loss.job_gpus - 0.5
            else f"of the job's {words.gpus(loss.job_gpus)}"
        )
        return f"{amount} allocated but idle{lasting} in job {loss.job_id}{owner}", f"{where}{nodes}; {whole}{cost}"
    if loss.kind == "out":
        return f"{amount} down or drained", f"{where}{nodes}" + (f" — {loss.state}" if loss.state else "")
    if loss.kind == "unreported":
        return f"{amount} send no samples", f"{where}{nodes}; in service as far as the scheduler says"
    if loss.kind == "unknown":
        return f"{amount} allocated with activity unknown", f"{where}{nodes}; their exporters give no activity metric"
    if loss.kind == "throttled":
        place_ = f" in rack {loss.place}" if loss.place else ""
        return f"{amount} slowed by heat or power brake{place_}", f"{where}{nodes}"
    if loss.kind == "idle":
        free = f"{words.count(loss.free_nodes, 'node')} wholly free"
        if loss.waiting_jobs:
            asks = f"{words.count(loss.waiting_jobs, 'job')} wait{'s' if loss.waiting_jobs == 1 else ''}"
            return f"{amount} free while {asks} for {words.gpus(loss.waiting_gpus)}", f"{where}{free}"
        return f"{amount} free", f"{where}{free}; no job waits"
    return f"{amount} work for no known job", f"{where}{nodes}"


_LOSS_STATE = {"orphan": "good"}


def loss_list(data: FleetNow, now: datetime, *, several: bool) -> Any:
    """The biggest losses, each with its size as a bar."""
    shown = [loss for loss in data.losses if loss.kind != "orphan"][:_LOSSES]
    others = [loss for loss in data.losses if loss.kind == "orphan"]
    notes = []
    if others:
        total = sum(loss.gpus for loss in others)
        notes.append(
            html.P(
                f"{words.gpus(total)} work for no known job: no label and no whole-node job names an owner. "
                "They count as allocated.",
                className="note",
            )
        )
    if not shown:
        text = "No loss of half a GPU or more." if data.newest else "Nothing measured yet."
        return [notice("ok" if data.newest else "info", text), *notes]
    largest = max(loss.gpus for loss in shown)
    items = []
    for loss in shown:
        what, why = loss_text(loss, now, several=several)
        items.append(
            html.Li(
                [
                    html.Span(what, className="what"),
                    html.Span(
                        html.Span(
                            className=f"part state-{_LOSS_STATE.get(loss.kind, loss.kind)}",
                            style={"width": f"{loss.gpus / largest * 100:.1f}%"},
                        ),
                        className="meter",
                        **attributes(aria_hidden="true"),
                    ),
                    html.Span(why, className="why muted"),
                ]
            )
        )
    return [html.Ol(items, className="losses"), *notes]


_GROUP_STATES = ("good", "throttled", "unproductive", "unknown", "idle", "unreported", "out")
_SHORT = {
    "throttled": "Throttled",
    "unproductive": "Not busy",
    "unknown": "Unknown",
    "idle": "Free",
    "unreported": "No data",
    "out": "Down",
}


def group_table(frame: pl.DataFrame, by: str, *, several: bool) -> Any:
    """The breakdown as a table, worst first."""
    if frame.is_empty():
        return notice("info", "No nodes in the inventory yet", "It comes from the scheduler or an inventory file.")
    used = [state for state in _GROUP_STATES[1:] if frame[state].sum() >= 0.05]
    columns = [
        Column(GROUPS[by]),
        *([Column("Cluster", is_wide_only=True)] if several and by != "cluster" else []),
        Column("Nodes", "number", is_wide_only=True),
        Column("GPUs", "number"),
        Column("Good", "number", "Share of its GPU time that does work at full speed"),
        Column("Shares", "bar", "Good, throttled, not busy, unknown, free, no data, down"),
        *[Column(_SHORT[state], "number", f"Mean GPUs {words.STATE_WORDS[state]}", True) for state in used],
    ]
    rows = []
    for row in frame.head(_ROWS).iter_rows(named=True):
        rows.append(
            [
                row[by] or "not told",
                *([row["cluster"]] if several and by != "cluster" else []),
                words.number(row["nodes"]),
                words.number(row["gpus"]),
                html.Strong(words.percent(row["goodness"]), className="num"),
                stacked_bar([(state, row[state]) for state in _GROUP_STATES], row["gpus"]),
                *[words.number(row[state], 1) if row[state] >= 0.05 else "·" for state in used],
            ]
        )
    more = frame.height - _ROWS
    noun = GROUPS[by].lower() if by != "gpu_model" else "GPU model"
    made = table(columns, rows, caption=f"GPUs by {noun}, worst first; counts are mean GPUs", id="fleet-group-table")
    if more > 0:
        return [made, html.P(f"The {_ROWS} worst of {frame.height:,}; the CSV has all.", className="note")]
    return made


def legend() -> html.Ul:
    return html.Ul(
        [
            html.Li(
                [
                    html.Span(className=f"swatch state-{state}", **attributes(aria_hidden="true")),
                    words.STATE_WORDS[state],
                ]
            )
            for state in _GROUP_STATES
        ],
        className="legend",
    )


def queue_table(data: FleetNow, waits: dict[tuple[str, str], float], now: datetime, *, several: bool) -> Any:
    """Running and waiting by queue."""
    if data.queues.is_empty():
        return notice("info", "No job runs or waits", _read_at("Jobs", data.jobs_at, now))
    columns = [
        Column("Queue"),
        *([Column("Cluster", is_wide_only=True)] if several else []),
        Column("Running jobs", "number"),
        Column("GPUs", "number", "GPUs of the running jobs"),
        Column("Waiting jobs", "number"),
        Column("GPUs asked", "number", "GPUs that the waiting jobs ask for"),
        Column("Longest wait", "number"),
        Column("Expected wait", "number", "Median over the waiting jobs of their median forecast, from now"),
    ]
    rows = []
    for row in data.queues.head(_ROWS).iter_rows(named=True):
        expected = waits.get((row["cluster"], row["queue"]))
        rows.append(
            [
                row["queue"] or "not told",
                *([row["cluster"]] if several else []),
                words.number(row["running_jobs"]),
                words.number(row["running_gpus"]),
                words.number(row["waiting_jobs"]),
                words.number(row["waiting_gpus"]),
                age(row["oldest"], now, suffix="") if row["oldest"] else words.NOTHING,
                f"≈ {words.duration(expected)}" if expected is not None and row["waiting_jobs"] else words.NOTHING,
            ]
        )
    return table(columns, rows, caption="Running and waiting jobs by queue", id="fleet-queue-table")


def _read_at(what: str, times: Any, now: datetime) -> str:
    if not times:
        return f"{what} have not been read yet."
    return f"{what} were read {words.duration((now - max(times.values())).total_seconds())} ago."


def source_table(data: FleetNow, hints: Reading[Mapping[str, Any]], now: datetime, *, several: bool) -> Any:
    """How old each source is, and whether that is as it should be."""
    rows: list[list[Any]] = []

    def add(what: str, cluster: str, at: datetime | None, late_s: float, old_s: float) -> None:
        if at is None:
            state = html.Span("none yet", className="state bad")
        else:
            seconds = (now - at).total_seconds()
            tone, text = ("ok", "fresh") if seconds <= late_s else ("warn", "late")
            if seconds > old_s:
                tone, text = "bad", "old"
            state = html.Span(text, className=f"state {tone}")
        rows.append([what, *([cluster] if several else []), age(at, now), state])

    for cluster in sorted({*data.newest, *data.silent}):
        add("GPU samples in the store", cluster, data.newest.get(cluster), LATE_S, OLD_S)
        add("Jobs", cluster, data.jobs_at.get(cluster), LATE_S, OLD_S)
        add("Inventory", cluster, data.nodes_at.get(cluster), 86_400, 7 * 86_400)
    if hints.value is None:
        rows.append(
            ["Hints API", *([""] if several else []), words.NOTHING, html.Span("not answering", className="state bad")]
        )
    else:
        for cluster, kind, is_fresh, facts in kinds_of(hints):
            if cluster not in {*data.newest, *data.silent} or kind not in _KINDS_SHOWN:
                continue
            seconds = facts.get("age_s")
            text = "fresh" if is_fresh else "expired" if seconds is not None else "none yet"
            rows.append(
                [
                    f"Hints: {kind}",
                    *([cluster] if several else []),
                    age(now - timedelta(seconds=seconds), now) if seconds is not None else words.NOTHING,
                    html.Span(text, className=f"state {'ok' if is_fresh else 'bad'}", title=facts.get("reason") or ""),
                ]
            )
    columns = [Column("Source"), *([Column("Cluster")] if several else []), Column("Newest", "number"), Column("State")]
    return table(columns, rows, caption="Age of the newest row of each source", id="fleet-source-table")


def expected_waits(jobs: Sequence[Any]) -> dict[tuple[str, str], float]:
    """Median over waiting jobs of the median wait forecast, s, by cluster and queue."""
    known = [
        (str(job.get("cluster")), str(job.get("queue") or ""), float(job["wait"]["q50_s"]))
        for job in jobs
        if isinstance(job.get("wait"), dict) and job["wait"].get("q50_s") is not None
    ]
    frame = pl.DataFrame(known, schema={"cluster": pl.String, "queue": pl.String, "q50_s": pl.Float64}, orient="row")
    medians = frame.group_by("cluster", "queue").agg(pl.col("q50_s").median())
    return {(row[0], row[1]): row[2] for row in medians.iter_rows()}


def delta_text(trend: FleetTrend) -> str:
    """How the last half hour stands against the half hour an hour before."""
    known = trend.frame.filter(pl.col("goodness").is_not_null())
    if known.is_empty():
        return ""
    end = known["bin"][-1] + timedelta(seconds=trend.bin_s)
    half, hour = timedelta(minutes=30), timedelta(hours=1)
    last = known.filter(pl.col("bin") >= end - half)["goodness"].mean()
    before = known.filter((pl.col("bin") >= end - hour - half) & (pl.col("bin") < end - hour))["goodness"].mean()
    if not isinstance(last, float) or not isinstance(before, float):
        return ""
    change = last - before
    arrow = "▲" if change >= 0.0005 else "▼" if change <= -0.0005 else "="
    return (
        f"{arrow} {words.points(change)}: {words.percent(last, 1)} over the last half hour, "
        f"{words.percent(before, 1)} an hour before"
    )


def kinds_of(status: Reading[Mapping[str, Any]]) -> list[tuple[str, str, bool, dict[str, Any]]]:
    """Cluster, kind, whether it is fresh, and the facts, of the hints API's status."""
    return [
        (cluster, kind, bool(facts.get("is_fresh")), facts)
        for cluster, found in ((status.value or {}).get("clusters") or {}).items()
        for kind, facts in (found.get("kinds") or {}).items()
    ]

"""Ingest of samples: which windows are due, and what one window writes, all of it in one transaction.

The high-water mark of a cluster moves with the rows, so that a crash, a kill or an outage of the source costs nothing
but time: the next run starts from the mark. Each window is read a little earlier than it begins, for samples that came
late. Jobs and nodes: `pipelines/job_history.py`; what is derived from samples: `pipelines/derive.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

import polars as pl

from features.cleaning import (
    clean_gpu_samples,
    clean_health_samples,
    clean_link_samples,
    clean_node_samples,
    clean_port_samples,
)
from features.cleaning_counters import health_minutes
from features.cleaning_findings import quality
from features.vocabulary import TABLES, conform
from pipelines.backfill import FINISHED, resume_from, windows_at_once
from pipelines.job_history import attribute_whole_nodes, running_jobs
from pipelines.settings import IngestSettings
from pipelines.slots import write_boards
from pipelines.sources import Fetched, SourceError, TelemetrySource
from pipelines.spans import TELEMETRY_MARK, due_windows, floor_time
from pipelines.store import Store, Writer
from pipelines.window_history import earlier_health, earlier_samples, remake_from, revise_frozen
from pipelines.words import with_name

log = logging.getLogger(__name__)

# Windows without a row of these are written nevertheless: that there is nothing is known then.
_ALWAYS = ("raw_gpu_samples", "core_gpu_samples", "core_node_samples")

_QUALITY = {
    "window_start": pl.Datetime("us", "UTC"), "window_end": pl.Datetime("us", "UTC"), "cluster": pl.String,
    "source": pl.String, "table_name": pl.String, "column_name": pl.String, "reason": pl.String, "count": pl.Int64,
    "example": pl.String,
}  # fmt: skip


@dataclass
class Ingested:
    """What one run of ingest did for one cluster.

    Attributes:
        windows: Windows that were committed.
        rows: Rows written, by table.
        findings: Values that were impossible, by reason.
        warnings: What sources said of partial answers.
        mark: Everything before this is in the store; None: nothing has been read yet.
        lag_s: Present time minus mark, seconds.
        begin: Where the first window began that was committed; None: there was none.
        next_end: Where the window ends that is due next.
        next_at: When it can be read.
        waits_for: What its source waits for before that, in words; empty: nothing beyond its usual lag.
        error: Why it stopped before the newest window; None: it did not.
    """

    cluster: str
    windows: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    findings: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    mark: datetime | None = None
    lag_s: float | None = None
    begin: datetime | None = None
    next_end: datetime | None = None
    next_at: datetime | None = None
    waits_for: str = ""
    error: str | None = None


def ingest_telemetry(
    store: Store,
    source: TelemetrySource,
    cluster: str,
    settings: IngestSettings,
    now: datetime,
    *,
    since: datetime | None = None,
    backfill: str = "",
    progress: Callable[[int, int, int], None] | None = None,
) -> Ingested:
    """Read all windows that are due for one cluster; the next one is fetched while one is written.

    Args:
        store: The store.
        source: Where samples come from.
        cluster: Name of the cluster.
        settings: How windows are cut.
        now: Present time, UTC.
        since: Read again from here on, whatever was read before.
        backfill: Name of the mark under which reading again goes on where it was interrupted; empty: from `since`.
        progress: Called after each window: windows done, windows due in all, rows written by the last one.

    Returns:
        What was done. An outage of the source is not raised: it stands in `error`, and the mark stays.

    Raises:
        StoreError: The store cannot be written.
    """
    report = Ingested(cluster)
    mark = store.mark(cluster, TELEMETRY_MARK)
    if since is not None and backfill:
        since = resume_from(store.mark(cluster, backfill), since)
    start, windows = due_windows(since if since is not None else mark, now, settings, source.watermark_lag_s)
    if mark is None and not windows:
        store.transact(lambda w: w.set_mark(cluster, TELEMETRY_MARK, start))
    if since is not None:  # more than one run's worth may be due
        while more := due_windows(windows[-1][1], now, settings, source.watermark_lag_s)[1] if windows else []:
            windows += more
    plan = _Plan(windows, mark, settings, is_backfill=since is not None)
    for span, fetched in _fetched(source, plan):
        if isinstance(fetched, SourceError):
            report.error = str(fetched)
            log.debug("%s: nothing is lost, the mark stays where it is", with_name(cluster, report.error))
            break
        window = Window(cluster, span.read_from, span.begin, span.end, fetched, now)
        is_again = mark is not None and span.end <= mark
        written = _ingest_window(store, window, None if is_again else span.end, report, backfill)
        report.windows += span.windows
        report.begin = report.begin or span.begin
        plan.learn(written, span.windows)
        if progress is not None:
            progress(report.windows, len(windows), written)
    else:
        if since is not None and backfill:
            store.transact(lambda w: w.set_mark(cluster, backfill, FINISHED))
    report.mark = store.mark(cluster, TELEMETRY_MARK)
    report.lag_s = (now - report.mark).total_seconds() if report.mark else None
    if report.mark is not None:
        step = timedelta(seconds=settings.window_s)
        report.next_end = floor_time(report.mark, step) + step
        report.next_at = report.next_end + timedelta(seconds=max(settings.lag_s, source.watermark_lag_s))
        report.waits_for = getattr(source, "waits_for", "")
    return report


class _Span(NamedTuple):
    """[begin, end) to read from `read_from` on, as one, and how many windows it is."""

    read_from: datetime
    begin: datetime
    end: datetime
    windows: int


class _Plan:
    """Spans to read, in order; when a long past is read again, several windows as one where they hold little."""

    def __init__(
        self,
        windows: list[tuple[datetime, datetime]],
        mark: datetime | None,
        settings: IngestSettings,
        *,
        is_backfill: bool,
    ) -> None:
        self._windows, self._mark, self._settings = windows, mark, settings
        self._is_backfill = is_backfill
        self._at_once, self._next = 1, 0

    def take(self) -> _Span | None:
        """The next span; None: there is none. What was read before and what is new are never one."""
        if self._next == len(self._windows):
            return None
        first = self._next
        self._next += 1
        while self._next < min(first + self._at_once, len(self._windows)):
            if self._windows[self._next][0] == self._mark:
                break
            self._next += 1
        begin, end = self._windows[first][0], self._windows[self._next - 1][1]
        return _Span(begin - timedelta(seconds=self._settings.overlap_s), begin, end, self._next - first)

    def learn(self, rows: int, windows: int) -> None:
        """How many rows so many windows brought."""
        if self._is_backfill:
            self._at_once = windows_at_once(rows, windows, self._settings.window_s)


def _fetched(source: TelemetrySource, plan: _Plan) -> Iterator[tuple[_Span, Fetched | SourceError]]:
    """What the source gives for each span, in order, one span ahead of what is asked for; ends after an error."""

    def fetch(span: _Span) -> Fetched | SourceError:
        try:
            return source.fetch(span.read_from, span.end)
        except SourceError as error:
            return error

    with ThreadPoolExecutor(1, "fetch") as pool:
        span = plan.take()
        ahead = None if span is None else pool.submit(fetch, span)
        while span is not None and ahead is not None:
            found, this = ahead.result(), span
            span = None if isinstance(found, SourceError) else plan.take()
            ahead = None if span is None else pool.submit(fetch, span)
            yield this, found


def _ingest_window(store: Store, window: Window, mark: datetime | None, report: Ingested, backfill: str) -> int:
    def work(writer: Writer) -> dict:
        if backfill:
            writer.set_mark(window.cluster, backfill, window.end)
        return write_window(writer, window, TELEMETRY_MARK, mark=mark)

    counts = store.transact(work, purpose="ingest")
    for table, count in counts["rows"].items():
        report.rows[table] = report.rows.get(table, 0) + count
    for reason, count in counts["findings"].items():
        report.findings[reason] = report.findings.get(reason, 0) + count
    report.warnings += [text for text in window.fetched.warnings if text not in report.warnings]
    return sum(counts["rows"].values())


@dataclass(frozen=True)
class Window:
    """One window as fetched: [begin, end), read from `read_from` on."""

    cluster: str
    read_from: datetime
    begin: datetime
    end: datetime
    fetched: Fetched
    now: datetime


def write_window(writer: Writer, window: Window, source: str, *, mark: datetime | None) -> dict:
    """Write one window: raw and cleaned samples of every kind, findings, and the mark. Again gives the same rows.

    Inside [begin, end) rows are replaced, unless the source has forgotten some since they were read, or another ingest
    has written the window meanwhile: then rows are only added, as they are in the overlap before it. Nothing that was
    once read is lost that way.

    Args:
        writer: The open transaction.
        window: What was fetched.
        source: Name under which findings and the mark are kept.
        mark: New high-water mark; None: it stays, and what is derived is derived again from `begin`.

    Returns:
        `rows`: table → rows written; `findings`: reason → count.
    """
    cluster, known = window.cluster, writer.mark(window.cluster, source)
    is_beaten = mark is not None and known is not None and known >= mark
    keeps_mark = mark is None or is_beaten
    frozen: list[pl.DataFrame] = []
    parts, findings = _cleaned(writer, window, frozen)
    counts: dict[str, int] = {}
    for table, frame in parts.items():
        for begin, end, is_overlap in ((window.read_from, window.begin, True), (window.begin, window.end, False)):
            part = _between(frame, begin, end)
            if part.is_empty() and (is_overlap or not keeps_mark) and table not in _ALWAYS:
                continue  # ahead of the mark there is nothing to replace
            if is_overlap or keeps_mark:
                written = _put(writer, table, cluster, begin, end, part, is_overlap or is_beaten)
            else:
                written = writer.replace_window(table, cluster, begin, end, part)
            counts[table] = counts.get(table, 0) + written
    if not is_beaten:
        wrong = revise_frozen(writer, cluster, frozen, window.begin)
        findings[0] = (findings[0][0], quality([findings[0][1], wrong]))
    counts["core_boards"] = write_boards(writer, cluster, _of_cluster(window.fetched.boards, cluster))
    wrongs = _quality_rows(window, source, findings, is_empty=all(frame.is_empty() for frame in parts.values()))
    if not is_beaten and (mark is not None or not wrongs.is_empty()):
        writer.replace_window("core_data_quality", cluster, window.begin, window.end, wrongs)
    if mark is not None and not is_beaten:
        writer.set_mark(cluster, source, mark)
    elif not is_beaten or any(counts.values()):
        remake_from(writer, cluster, window.begin)
    by_reason = wrongs.group_by("reason").agg(pl.col("count").sum())
    return {"rows": counts, "findings": dict(by_reason.iter_rows())}


def _cleaned(
    writer: Writer, window: Window, frozen: list[pl.DataFrame]
) -> tuple[dict[str, pl.DataFrame], list[tuple[str, pl.DataFrame]]]:
    """Rows of each table from `read_from` on, and what was wrong inside the window; `frozen` takes keys before it."""
    jobs = running_jobs(writer, window.cluster, window.read_from, window.end)
    raw, node, health, link, port, queue = (
        _of_cluster(frame, window.cluster)
        for frame in (
            window.fetched.gpu, window.fetched.node, window.fetched.health, window.fetched.link, window.fetched.port,
            window.fetched.queue,
        )
    )  # fmt: skip
    before = _between(raw, window.read_from, window.begin)
    inside = _between(raw, window.begin, window.end)
    early, _ = clean_gpu_samples(before, window.now)
    samples, wrong = clean_gpu_samples(
        inside,
        window.now,
        history=before if before.height else None,
        earlier=earlier_samples(writer, window.read_from),
        revised=frozen,
    )
    parts = {
        "raw_gpu_samples": raw,
        "core_gpu_samples": attribute_whole_nodes(pl.concat([early, samples]), jobs),
    }
    findings = [("core_gpu_samples", wrong)]
    for table, frame, clean in (
        ("core_node_samples", node, clean_node_samples),
        ("core_gpu_health", health, clean_health_samples),
        ("core_link_samples", link, clean_link_samples),
    ):
        before = _between(frame, window.read_from, window.begin)
        early, _ = clean(before, window.now)
        if table == "core_gpu_health":
            clean = partial(clean_health_samples, history=before, earlier=earlier_health(writer, window.read_from))
        samples, wrong = clean(_between(frame, window.begin, window.end), window.now)
        parts[table] = pl.concat([early, samples])
        findings.append((table, wrong))
    # A rate needs the counter before it: ports are judged with the overlap.
    parts["core_port_samples"], wrong = clean_port_samples(_between(port, window.read_from, window.end), window.now)
    findings.append(("core_port_samples", wrong))
    parts["core_gpu_health"] = health_minutes(parts["core_gpu_health"])
    return parts | {"raw_port_samples": port, "core_queue_samples": queue}, findings


def _put(
    writer: Writer, table: str, cluster: str, begin: datetime, end: datetime, frame: pl.DataFrame, only_add: bool
) -> int:
    about = TABLES[table]
    keys = [name for name in about.key if name != "cluster"]
    frame = conform(frame, table)
    known = writer.query(
        f'SELECT {", ".join(keys)} FROM {table} WHERE "cluster" = ? AND ts >= ? AND ts < ?', [cluster, begin, end]
    )
    if not only_add and frame.select(keys).n_unique() >= known.height:
        return writer.replace_window(table, cluster, begin, end, frame)
    late = frame.join(known, on=keys, how="anti", nulls_equal=True)
    return writer.append(table, late.unique(subset=keys, keep="last", maintain_order=True))


def _of_cluster(frame: pl.DataFrame, cluster: str) -> pl.DataFrame:
    return frame.with_columns(pl.lit(cluster).alias("cluster"))


def _between(frame: pl.DataFrame, begin: datetime, end: datetime) -> pl.DataFrame:
    return frame.filter((pl.col("ts") >= begin) & (pl.col("ts") < end))


def _quality_rows(
    window: Window, source: str, findings: list[tuple[str, pl.DataFrame]], *, is_empty: bool
) -> pl.DataFrame:
    def row(table: str, column: str, reason: str, count: int, example: str | None) -> tuple:
        return window.begin, window.end, window.cluster, source, table, column, reason, count, example

    rows = [row(table, *found) for table, frame in findings for found in frame.iter_rows()]
    warnings = window.fetched.warnings
    if warnings:
        rows.append(row("raw_gpu_samples", "", "partial", len(warnings), warnings[0]))
    if is_empty:
        rows.append(row("raw_gpu_samples", "", "no_samples", 1, None))
    return pl.DataFrame(rows, schema=_QUALITY, orient="row")

"""Jobs and nodes in the store: reading them in, making their states consistent, and giving their history out.

A job is keyed by cluster, id and submit time; the newest state wins. Jobs that the queue forgot are looked up again in
the accounting. No forecasts here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

import polars as pl

from features.vocabulary import JOB_EXTRAS, conform, schema
from pipelines.sources import FIRST_JOBS_DAYS, JobSource, SourceError
from pipelines.sources.inventory import complete_places, exporter_words
from pipelines.sources.job_states import changed_states
from pipelines.store import Store, Writer

MARK = "jobs"
LIVE_STATES = ("PENDING", "RUNNING", "SUSPENDED")
_OVERLAP = timedelta(minutes=10)
_NODES_KEPT = timedelta(hours=1)
_CHUNK = timedelta(days=1)
_STATES_LOOKED_BACK = timedelta(days=2)  # a state that lasts longer is written again
_KEY = ["cluster", "job_id", "submit_time"]


class Readable(Protocol):
    """A store, a reader or a writer."""

    def query(self, sql: str, parameters: list, /) -> pl.DataFrame: ...


@dataclass
class JobsIngested:
    """What one run did for the jobs and nodes of one cluster; attributes as of `ingest.Ingested`.

    `notes` say what an operator may wonder about although nothing is wrong.
    """

    cluster: str
    raw_rows: int = 0
    core_rows: int = 0
    node_rows: int = 0
    state_rows: int = 0
    warnings: list[str] = field(default_factory=list)
    vanished: int = 0
    findings: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mark: datetime | None = None
    lag_s: float | None = None
    error: str | None = None


def ingest_jobs(
    store: Store,
    source: JobSource,
    cluster: str,
    now: datetime,
    *,
    first_history_s: float = 0.0,
    since: datetime | None = None,
) -> JobsIngested:
    """Bring jobs and nodes of one cluster up to date.

    Args:
        store: The store.
        source: Where jobs come from.
        cluster: Name of the cluster.
        now: Present time, UTC.
        first_history_s: How far back a first run reads, seconds; 30 days at least.
        since: Read again from here on.

    Returns:
        What was done; an outage of the source stands in `error`, and the mark stays.

    Raises:
        StoreError: The store cannot be written.
    """
    report = JobsIngested(cluster)
    mark = store.mark(cluster, MARK)
    first = since or now - timedelta(seconds=max(first_history_s, FIRST_JOBS_DAYS * 86_400))
    start = first if since or not mark else mark - _OVERLAP
    try:
        while start < now:
            end = min(start + _CHUNK, now)
            _ingest_span(store, source, cluster, start, end, report, is_last=end >= now)
            start = end
        live = source.live()
        _ingest_nodes(store, live.nodes, cluster, now, report)
        _ingest_states(store, live.states, cluster, now, report)
        report.warnings += live.warnings
        said = getattr(source, "nothing_since", None)
        if said is not None and (note := said(first)) is not None:
            report.notes.append(note)
    except SourceError as error:
        report.error = str(error)
    report.mark = store.mark(cluster, MARK)
    report.lag_s = (now - report.mark).total_seconds() if report.mark else None
    return report


def _ingest_span(
    store: Store,
    source: JobSource,
    cluster: str,
    start: datetime,
    end: datetime,
    report: JobsIngested,
    *,
    is_last: bool,
) -> None:
    found = source.fetch_jobs(start, end).with_columns(pl.lit(cluster).alias("cluster"))
    if is_last:
        gone = _vanished(store, cluster, found, end)
        if not gone.is_empty():
            report.vanished += gone.height
            found = pl.concat([found, _resolved(source, cluster, gone, end)], how="vertical_relaxed")
    core, findings = consistent_jobs(found)

    def work(writer: Writer) -> tuple[int, int]:
        raw_rows = upsert_changed(writer, "raw_jobs", found.filter(pl.col("submit_time").is_not_null()))
        core_rows = upsert_changed(writer, "core_jobs", core)
        known = writer.mark(cluster, MARK)
        writer.set_mark(cluster, MARK, max(end, known) if known else end)
        return raw_rows, core_rows

    raw_rows, core_rows = store.transact(work, purpose="ingest of jobs")
    report.raw_rows += raw_rows
    report.core_rows += core_rows
    for reason, count in findings.items():
        report.findings[reason] = report.findings.get(reason, 0) + count


def _vanished(store: Store, cluster: str, found: pl.DataFrame, end: datetime) -> pl.DataFrame:
    """Jobs that are live in the store and that the source no longer speaks of."""
    live = read_live(store, cluster).filter(pl.col("submit_time") < end)
    return live.join(found.select(_KEY), on=_KEY, how="anti")


def _resolved(source: JobSource, cluster: str, gone: pl.DataFrame, end: datetime) -> pl.DataFrame:
    """The last word of the accounting on jobs that left the queue; UNKNOWN where it has none."""
    first = gone["submit_time"].min()
    assert isinstance(first, datetime)
    known = source.fetch_jobs(first, end).with_columns(pl.lit(cluster).alias("cluster"))
    ended = known.join(gone.select(_KEY), on=_KEY, how="semi")
    lost = gone.join(ended.select(_KEY), on=_KEY, how="anti").with_columns(
        pl.lit("UNKNOWN").alias("state"),
        pl.lit("gone from the queue without a record").alias("reason"),
        pl.lit(end).alias("observed_at"),
    )
    return pl.concat([ended, lost], how="vertical_relaxed")


def upsert_changed(writer: Writer, table: str, jobs: pl.DataFrame) -> int:
    """Upsert the jobs that say something new: a later state than the stored one, and another one."""
    jobs = conform(jobs, table).sort("observed_at", nulls_last=False).unique(_KEY, keep="last", maintain_order=True)
    if jobs.is_empty():
        return 0
    known = writer.query(
        f'SELECT * FROM {table} WHERE "cluster" = ? AND submit_time BETWEEN ? AND ?',
        [jobs["cluster"][0], jobs["submit_time"].min(), jobs["submit_time"].max()],
    )
    # A later reading may know less: what only some answers tell stays as it was told.
    jobs = jobs.join(known.select(*_KEY, *JOB_EXTRAS), on=_KEY, how="left", suffix="_known", maintain_order="left")
    jobs = jobs.with_columns(pl.coalesce(name, f"{name}_known").alias(name) for name in JOB_EXTRAS)
    jobs = jobs.drop(f"{name}_known" for name in JOB_EXTRAS)
    older = known.select(*_KEY, pl.col("observed_at").alias("known_at"))
    fresh = (
        jobs.join(older, on=_KEY, how="left", maintain_order="left")
        .filter(pl.col("known_at").is_null() | (pl.col("observed_at") >= pl.col("known_at")))
        .drop("known_at")
    )
    told = [name for name in schema(table) if name != "observed_at"]
    return writer.upsert(table, fresh.join(known.select(told), on=told, how="anti", nulls_equal=True))


def consistent_jobs(jobs: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """Jobs whose states and times agree.

    A pending job has neither start nor end, a running one no end; an end before the start, or an ended job that never
    started but has a start after its end, loses the impossible time. Jobs without a submit time are dropped.

    Returns:
        The jobs, and what was wrong: reason → count.
    """
    state = pl.col("state")
    rules = {
        "pending_with_start": (state == "PENDING") & pl.col("start_time").is_not_null(),
        "live_with_end": state.is_in(LIVE_STATES) & pl.col("end_time").is_not_null(),
        "end_before_start": pl.col("end_time") < pl.col("start_time"),
        "end_before_submit": pl.col("start_time").is_null() & (pl.col("end_time") < pl.col("submit_time")),
    }
    findings = {"no_submit_time": jobs["submit_time"].null_count()}
    jobs = jobs.filter(pl.col("submit_time").is_not_null())
    counts = jobs.select(rule.fill_null(False).sum().alias(name) for name, rule in rules.items())
    findings |= {name: int(counts[name][0] or 0) for name in rules}
    wrong_end = (rules["live_with_end"] | rules["end_before_start"] | rules["end_before_submit"]).fill_null(False)
    core = jobs.with_columns(
        pl.when(rules["pending_with_start"].fill_null(False)).then(None).otherwise("start_time").alias("start_time"),
        pl.when(wrong_end).then(None).otherwise("end_time").alias("end_time"),
        pl.when(state == "PENDING").then(None).otherwise("node_list").alias("node_list"),
    )
    return core, {name: count for name, count in findings.items() if count}


def _ingest_nodes(store: Store, nodes: pl.DataFrame, cluster: str, now: datetime, report: JobsIngested) -> None:
    """Nodes that changed, or whose row is an hour old: writing all of them each time would only make files.

    Models and drivers that the scheduler does not tell are those of the boards that exporters name.
    """
    boards = store.query('SELECT * FROM core_slots WHERE "cluster" = ? AND end_time IS NULL', [cluster])
    nodes = complete_places(nodes, exporter_words(boards))
    slots = store.query('SELECT * FROM core_slots WHERE "cluster" = ? AND end_time IS NULL', [cluster])
    nodes = complete_places(nodes, exporter_words(slots).drop("gpus")).select(nodes.columns)
    nodes = conform(
        nodes.with_columns(pl.lit(cluster).alias("cluster"), pl.lit(now).alias("observed_at")), "core_nodes"
    )
    nodes = nodes.unique("node", keep="last", maintain_order=True)
    known = read_nodes(store, cluster).filter(pl.col("observed_at") > now - _NODES_KEPT)
    told = [name for name in schema("core_nodes") if name != "observed_at"]
    new = nodes.join(known.select(told), on=told, how="anti", nulls_equal=True)
    if not new.is_empty():
        report.node_rows += store.transact(lambda w: w.upsert("core_nodes", new), purpose="ingest of nodes")


def _ingest_states(store: Store, states: pl.DataFrame, cluster: str, now: datetime, report: JobsIngested) -> None:
    """States, reasons and planned starts that differ from the last ones stored."""
    if states.is_empty():
        return

    def work(writer: Writer) -> int:
        known = writer.query(
            'SELECT * FROM core_job_states WHERE "cluster" = ? AND observed_at >= ? '
            "AND job_id IN (SELECT unnest(?::VARCHAR[]))",
            [cluster, now - _STATES_LOOKED_BACK, states["job_id"].to_list()],
        )
        seen = conform(states.with_columns(pl.lit(cluster).alias("cluster")), "core_job_states")
        return writer.append("core_job_states", changed_states(known, seen))

    report.state_rows += store.transact(work, purpose="ingest of job states")


def read_nodes(store: Readable, cluster: str) -> pl.DataFrame:
    """Rows of `core_nodes` of one cluster."""
    return store.query('SELECT * FROM core_nodes WHERE "cluster" = ? ORDER BY node', [cluster])


def read_jobs(store: Readable, cluster: str, since: datetime) -> pl.DataFrame:
    """Jobs that were submitted, ran or ended since a moment, in JOB_COLUMNS, by submit time."""
    return store.query(
        'SELECT * FROM core_jobs WHERE "cluster" = ? AND (submit_time >= ? OR end_time >= ? OR '
        "(end_time IS NULL AND state IN ('PENDING', 'RUNNING', 'SUSPENDED'))) ORDER BY submit_time, job_id",
        [cluster, since, since],
    )


def read_jobs_written_since(store: Readable, cluster: str, snapshot: int) -> pl.DataFrame:
    """Jobs whose rows were written after a snapshot, new or known, in JOB_COLUMNS, by submit time.

    Whatever their times are, and whether or not any tells when they were heard of. Where maintenance wrote a file anew,
    unchanged ones are among them.
    """
    return store.query(
        'SELECT * FROM core_jobs WHERE "cluster" = ? AND snapshot_id > ? ORDER BY submit_time, job_id',
        [cluster, snapshot],
    )


def read_live(store: Readable, cluster: str) -> pl.DataFrame:
    """Jobs that pend or run, as the store last heard."""
    return store.query(
        "SELECT * FROM core_jobs WHERE \"cluster\" = ? AND state IN ('PENDING', 'RUNNING', 'SUSPENDED') "
        "ORDER BY submit_time, job_id",
        [cluster],
    )


def running_jobs(store: Readable, cluster: str, begin: datetime, end: datetime) -> pl.DataFrame:
    """Jobs that held nodes at some time in [begin, end): `job_id`, `start_time`, `end_time`, `nodes`, `gpus`,
    `node_list`.
    """  # noqa: D205 (one sentence)
    return store.query(
        'SELECT job_id, start_time, end_time, nodes, gpus, node_list FROM core_jobs WHERE "cluster" = ? '
        "AND node_list IS NOT NULL AND start_time < ? AND (end_time IS NULL AND state IN ('RUNNING', 'SUSPENDED') "
        "OR end_time > ?)",
        [cluster, end, begin],
    )


def attribute_whole_nodes(samples: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Fill `job_id` where the exporter did not know it and one job had all GPUs of the node at that time.

    Args:
        samples: Rows of `core_gpu_samples`.
        jobs: As given by `running_jobs`.

    Returns:
        The samples in the same order. Under jobs on parts of a node the nulls stay: any GPU may be whose.
    """
    if samples.is_empty() or jobs.is_empty() or not samples["job_id"].null_count():
        return samples
    fitted = samples.group_by("node").agg(pl.col("gpu_uuid").n_unique().alias("fitted"))
    spans = (
        jobs.select(
            pl.col("job_id").alias("owner"),
            "start_time",
            "end_time",
            (pl.col("gpus") / pl.col("nodes")).alias("per_node"),
            pl.col("node_list").str.split(",").alias("node"),
        )
        .explode("node")
        .join(fitted, on="node")
        .with_columns((pl.col("per_node") >= pl.col("fitted")).fill_null(False).alias("has_all"))
    )
    times = samples.filter(pl.col("job_id").is_null()).select("node", "ts").unique()
    started = pl.col("ts") >= pl.col("start_time")
    ended = pl.col("end_time").is_not_null() & (pl.col("ts") >= pl.col("end_time"))
    owners = (
        times.join(spans, on="node")
        .filter(started & ~ended)
        .group_by("node", "ts")
        .agg(pl.col("owner").first(), pl.col("has_all").first(), pl.len().alias("jobs"))
        .filter((pl.col("jobs") == 1) & pl.col("has_all"))
        .drop("jobs", "has_all")
    )
    return (
        samples.join(owners, on=["node", "ts"], how="left", maintain_order="left")
        .with_columns(pl.coalesce("job_id", "owner").alias("job_id"))
        .drop("owner")
    )

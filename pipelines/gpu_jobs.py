"""Which job held which GPU, in the store: from labels of samples, and from a scheduler's word of this moment.

`derive_gpu_jobs` follows the samples, span by span, with a mark; `ingest_held` takes what Slurm or Kubernetes say now.
Both merge into `core_gpu_jobs` and write only rows that changed. How intervals are merged: `features/gpu_jobs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

import polars as pl

from features.gpu_jobs import COLUMNS, empty_evidence, held_evidence, merge, sightings
from features.vocabulary import conform, schema
from pipelines.derive import Derived
from pipelines.settings import IngestSettings
from pipelines.sources import SourceError
from pipelines.sources.slurm_gpus import held_gpus
from pipelines.sources.slurm_policy import Runs
from pipelines.spans import derived_from, settled_until, split
from pipelines.store import Store, Writer

TABLE = "core_gpu_jobs"
GAP_S = 300.0  # a label that is away no longer than this did not leave its GPU
_STEP_S = 15.0
_BUCKET = timedelta(minutes=1)
_PIECE = timedelta(hours=1)
_BOARDS = timedelta(minutes=15)
_GPU = ["node", "gpu_uuid"]
_KEY = [*_GPU, "job_id", "start_time"]
_BY_SAMPLES = ("exporter", "samples", "exporter+samples")
_LIVE = ("PENDING", "RUNNING", "SUSPENDED")


@dataclass
class GpuJobsIngested:
    """What one reading of a scheduler's GPUs changed.

    Attributes:
        cluster: Whose GPUs.
        rows: Intervals that are new, changed or gone.
        unplaced: GPUs that jobs hold and at whose index no board is known.
        warnings: What could not be read.
        error: Why nothing was read; None when it was.
    """

    cluster: str
    rows: int = 0
    unplaced: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


def derive_gpu_jobs(store: Store, cluster: str, settings: IngestSettings) -> Derived:
    """Bring the intervals up to the newest settled sample, by the labels that exporters gave to their series."""
    settled = settled_until(store, cluster, settings)
    if settled is None:
        return Derived()
    begin = derived_from(store, cluster, TABLE, _BUCKET, settled)
    report = Derived(0, begin)
    if begin is None:
        return report
    for first, last in split(begin, settled, _PIECE):

        def work(writer: Writer, first: datetime = first, last: datetime = last) -> int:
            rows = _follow(writer, cluster, first, last)
            writer.set_mark(cluster, TABLE, last)
            return rows

        report.rows += store.transact(work, purpose=f"deriving {TABLE}")
        report.until = last
    return report


def ingest_slurm_gpus(store: Store, commands: Runs, cluster: str, now: datetime) -> GpuJobsIngested:
    """Take in which GPUs the running jobs of a Slurm hold; one call.

    Args:
        store: The store.
        commands: Slurm's client commands.
        cluster: Name of the cluster.
        now: Present time, UTC.

    Raises:
        StoreError: The store cannot be written.
    """
    try:
        held, warnings = held_gpus(commands, cluster)
    except SourceError as error:
        return GpuJobsIngested(cluster, error=str(error))
    report = ingest_held(store, held, cluster, now, source="slurm")
    report.warnings += warnings
    return report


class HoldsPods(Protocol):
    """A source that knows which pod holds which GPU, as `kubernetes.KubernetesSource`."""

    def held_gpus(self) -> tuple[pl.DataFrame, list[str]]: ...


def ingest_pod_gpus(store: Store, source: HoldsPods, cluster: str, now: datetime) -> GpuJobsIngested:
    """Take in which GPUs the pods of a Kubernetes hold; three queries.

    Args:
        store: The store.
        source: The cluster's jobs.
        cluster: Name of the cluster.
        now: Present time, UTC.

    Raises:
        StoreError: The store cannot be written.
    """
    try:
        held, warnings = source.held_gpus()
    except SourceError as error:
        return GpuJobsIngested(cluster, error=str(error))
    report = ingest_held(store, held, cluster, now, source="pod")
    report.warnings += warnings
    return report


def ingest_held(store: Store, held: pl.DataFrame, cluster: str, now: datetime, *, source: str) -> GpuJobsIngested:
    """Take in who holds which GPU at this moment, by a scheduler's word.

    Jobs that held a GPU by the same source before and do not now have left it: at their end where it is known, else
    now.

    Args:
        store: The store.
        held: `node`, `job_id`, `start_time`, `gpu_index` or `gpu_uuid`, `is_shared`; all that jobs hold, whole.
        cluster: Name of the cluster.
        now: Present time, UTC.
        source: `slurm` or `pod`.

    Raises:
        StoreError: The store cannot be written.
    """
    report = GpuJobsIngested(cluster)

    def work(writer: Writer) -> tuple[int, int]:
        evidence, unplaced = held_evidence(held, _boards(writer, cluster, now), source)
        open_rows = _stored(writer, cluster, now)
        mine = open_rows.filter(pl.col("end_time").is_null() & pl.col("source").str.split("+").list.contains(source))
        fresh = evidence.join(mine, on=_KEY, how="anti")
        left = mine.join(evidence, on=[*_GPU, "job_id"], how="anti")
        touched = pl.concat([fresh.select(_GPU), left.select(_GPU)]).unique()
        if touched.is_empty():
            return 0, unplaced
        since = fresh["start_time"].min() or now
        assert isinstance(since, datetime)
        stored = _stored(writer, cluster, since).join(touched, on=_GPU, how="semi")
        # A job that is here with other boards than before was placed wrongly then; one that is gone left by now.
        is_here = pl.col("job_id").is_in(evidence["job_id"].implode())
        is_left = pl.struct(_KEY).is_in(left.select(pl.struct(_KEY)).to_series().implode())
        kept = stored.filter(~(is_left & is_here & (pl.col("source") == source))).with_columns(
            pl.when(is_left).then(pl.lit(now)).otherwise("end_time").alias("end_time")
        )
        rows = merge(pl.concat([kept, fresh]), _attempts(writer, cluster, [kept, fresh]))
        return _write(writer, cluster, stored, rows), unplaced

    report.rows, report.unplaced = store.transact(work, purpose="ingest of GPUs of jobs")
    return report


def _follow(writer: Writer, cluster: str, first: datetime, last: datetime) -> int:
    # The gap before the span is looked at again: a name that was last seen there may still be open.
    gap, step = timedelta(seconds=GAP_S), timedelta(seconds=_STEP_S)
    begin = first - gap
    seen = _seen(writer, cluster, begin, last)
    stored = _stored(writer, cluster, begin - gap)
    # What samples said of the time since then is said anew.
    by_samples = pl.col("source").is_in(_BY_SAMPLES)
    known = stored.filter(~(by_samples & (pl.col("start_time") >= begin))).with_columns(
        pl.when(by_samples)
        .then(pl.min_horizontal("end_time", pl.lit(begin + step)))
        .otherwise("end_time")
        .alias("end_time")
    )
    new = [
        sightings(part, gap_s=GAP_S, until=last, step_s=_STEP_S, source=source)
        for source in ("exporter", "samples")
        if not (part := seen.filter(pl.col("source") == source).drop("source")).is_empty()
    ]
    evidence = pl.concat([known, *new]) if new else known
    return _write(writer, cluster, stored, merge(evidence, _attempts(writer, cluster, [evidence]), gap_s=GAP_S))


def _seen(writer: Writer, cluster: str, first: datetime, last: datetime) -> pl.DataFrame:
    """First and last sighting of each job on each GPU in each minute.

    A name that an exporter gave and that the cleaned sample does not bear is one of several on that GPU.
    """
    query = (
        'SELECT node, gpu_uuid, max(gpu_index) AS gpu_index, job_id, time_bucket(?, ts) AS bucket, min(ts) AS ts, '
        'max(ts) AS last_ts FROM {table} WHERE "cluster" = ? AND ts >= ? AND ts < ? '
        "GROUP BY node, gpu_uuid, job_id, bucket"
    )  # fmt: skip
    values = [_BUCKET, cluster, first, last]
    raw = writer.query(query.format(table="raw_gpu_samples"), values).filter(pl.col("job_id").is_not_null())
    core = writer.query(query.format(table="core_gpu_samples"), values)
    named = core.filter(pl.col("job_id").is_not_null())
    at = [*_GPU, "bucket"]
    looked = core.select(at).unique().with_columns(pl.lit(True).alias("_looked"))
    borne = named.select(*at, "job_id").with_columns(pl.lit(True).alias("_borne"))
    labels = raw.join(looked, on=at, how="left").join(borne, on=[*at, "job_id"], how="left")
    labels = labels.with_columns(
        (pl.col("_looked").fill_null(False) & pl.col("_borne").is_null()).alias("is_shared"),
        pl.lit("exporter").alias("source"),
    )
    others = named.join(raw, on=[*at, "job_id"], how="anti").with_columns(
        pl.lit(False).alias("is_shared"), pl.lit("samples").alias("source")
    )
    columns = [*_GPU, "gpu_index", "job_id", "ts", "last_ts", "is_shared", "source"]
    return pl.concat([labels.select(columns), others.select(columns)])


def _boards(writer: Writer, cluster: str, now: datetime) -> pl.DataFrame:
    """The board at each index of each node, by the newest samples, else by the open slots."""
    newest = writer.query(
        'SELECT node, gpu_index, gpu_uuid, max(ts) AS ts FROM core_gpu_samples WHERE "cluster" = ? AND ts > ? '
        "AND gpu_index IS NOT NULL GROUP BY node, gpu_index, gpu_uuid",
        [cluster, now - _BOARDS],
    )
    # After a reboot boards stand at other indices: of each board and of each index the newest word counts.
    newest = newest.sort("ts").unique([*_GPU], keep="last", maintain_order=True)
    newest = newest.unique(["node", "gpu_index"], keep="last", maintain_order=True)
    slots = writer.query(
        'SELECT node, gpu_index, gpu_uuid FROM core_slots WHERE "cluster" = ? AND end_time IS NULL '
        "AND gpu_index IS NOT NULL",
        [cluster],
    )
    return pl.concat([newest.drop("ts"), slots.join(newest, on="node", how="anti")])


def _stored(writer: Writer, cluster: str, since: datetime) -> pl.DataFrame:
    """Intervals that last, or ended after a moment."""
    rows = writer.query(
        f'SELECT * FROM {TABLE} WHERE "cluster" = ? AND (end_time IS NULL OR end_time >= ?)', [cluster, since]
    )
    return conform(rows, TABLE).select(COLUMNS)


def _attempts(writer: Writer, cluster: str, parts: list[pl.DataFrame]) -> pl.DataFrame:
    """When the jobs of the evidence ran, as far as the scheduler told."""
    ids = sorted({job for part in parts for job in part["job_id"].unique()})
    if not ids:
        return empty_evidence().select("job_id", "start_time", "end_time")
    jobs = writer.query(
        'SELECT job_id, start_time, end_time, state, observed_at FROM core_jobs WHERE "cluster" = ? '
        "AND start_time IS NOT NULL AND job_id IN (SELECT unnest(?::VARCHAR[]))",
        [cluster, ids],
    )
    lost = pl.col("end_time").is_null() & ~pl.col("state").is_in(_LIVE)  # gone without a record
    return jobs.with_columns(pl.when(lost).then("observed_at").otherwise("end_time").alias("end_time")).select(
        "job_id", "start_time", "end_time"
    )


def _write(writer: Writer, cluster: str, stored: pl.DataFrame, rows: pl.DataFrame) -> int:
    """Make the stored rows those of the merge; what is equal stays untouched."""
    changed = rows.join(stored, on=list(COLUMNS), how="anti", nulls_equal=True)
    gone = stored.join(rows, on=_KEY, how="anti")
    named = conform(changed.with_columns(pl.lit(cluster).alias("cluster")), TABLE)
    if gone.is_empty():
        return writer.upsert(TABLE, named)
    starts = gone["start_time"].unique().sort()
    moment = timedelta(microseconds=1)
    spans = [(at, at + moment) for at in starts]
    if len(spans) > 50:  # one wide window is quicker than many narrow ones
        spans = [(starts[0], starts[-1] + moment)]
    writer.upsert(TABLE, named)
    for begin, end in spans:
        there = writer.query(
            f'SELECT * FROM {TABLE} WHERE "cluster" = ? AND start_time >= ? AND start_time < ?', [cluster, begin, end]
        )
        left = there.join(gone, on=_KEY, how="anti")
        writer.replace_window(TABLE, cluster, begin, end, left.select(list(schema(TABLE))))
    return named.height + gone.height

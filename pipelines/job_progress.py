"""How far jobs are, in their own words, brought into `core_job_progress`: what was sent to the API, what is a metric.

Both may be read twice: rows with the same job, rank and time replace each other. What may be sent stands in
`scheduler_hints/progress.py`, what a metric means in `pipelines/sources/progress_series.py`.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl
from filelock import Timeout

from features.vocabulary import TIME, schema
from pipelines.sources import SourceError
from pipelines.store import Store, Writer
from scheduler_hints.progress import read_progress, taken

if TYPE_CHECKING:
    from features.metrics import MetricTable
    from pipelines.settings import Settings
    from pipelines.sources.kubernetes_series import Asks

_SOURCE = "api"
_MARK = "progress"
_SPAN = timedelta(hours=6)  # after an outage no more is read again
_OVERLAP = timedelta(minutes=2)  # what reaches a Prometheus late


@dataclass
class ProgressIngested:
    """What was brought in of one cluster; rows that were written."""

    cluster: str
    sent_rows: int = 0
    metric_rows: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


def load_sent_progress(store: Store, published: Path, cluster: str, now: datetime | None = None) -> int:
    """Bring what applications sent into the store; files are removed once their rows are in.

    Args:
        store: The store.
        published: The published folder.
        cluster: Name of the cluster.
        now: Present time, UTC: from when on the store knows the rows. None: it is not kept.

    Returns:
        Rows written.

    Raises:
        SourceError: The journal cannot be read.
        StoreError: The store cannot be written; the journal stays.
    """
    rows = 0
    try:
        for path in taken(published, cluster):
            told = [
                msgspec.structs.asdict(row) | {"cluster": cluster, "source": _SOURCE, "observed_at": now}
                for row in read_progress(path)
            ]
            frame = pl.DataFrame(told, schema=schema("core_job_progress"))
            if not frame.is_empty():
                rows += store.transact(lambda w, f=frame: w.upsert("core_job_progress", f), purpose="keeping progress")
            path.unlink(missing_ok=True)
    except (OSError, Timeout) as error:
        raise SourceError(f"{cluster}: the journal of progress cannot be read: {error}") from error
    return rows


def ingest_progress_series(
    store: Store, api: Asks, cluster: str, now: datetime, *, matcher: str = "", table: MetricTable | None = None
) -> tuple[int, list[str]]:
    """Bring what applications export into the store, since the last time; at first, and after an outage, of six hours.

    Args:
        store: The store.
        api: The cluster's Prometheus.
        cluster: Name of the cluster.
        now: Present time, UTC.
        matcher: Label matchers of the cluster.
        table: The vocabulary; None: without mappings of its own.

    Returns:
        Rows written, and warnings.

    Raises:
        SourceError: No whole answer came; the mark stays.
        StoreError: The store cannot be written.
    """
    from features.metrics import DEFAULT
    from pipelines.sources.progress_series import read_progress_series

    mark = store.mark(cluster, _MARK)
    start = now - _SPAN if mark is None else max(mark - _OVERLAP, now - _SPAN)
    frame, warnings = read_progress_series(api, cluster, start, now, matcher=matcher, table=table or DEFAULT)
    frame = frame.with_columns(pl.lit(now).cast(TIME).alias("observed_at"))

    def work(writer: Writer) -> int:
        writer.set_mark(cluster, _MARK, now)
        return writer.upsert("core_job_progress", frame)

    return store.transact(work, purpose="ingest of progress"), warnings


def ingest_progress(store: Store, settings: Settings, cluster: str, now: datetime) -> ProgressIngested:
    """All progress of one cluster; an outage of its Prometheus does not keep what was sent waiting.

    Raises:
        StoreError: The store cannot be written.
    """
    report, about = ProgressIngested(cluster), settings.cluster(cluster)
    try:
        report.sent_rows = load_sent_progress(store, settings.published, cluster, now)
    except SourceError as error:
        report.error = str(error)
    if about.telemetry != "prometheus":
        return report
    from features.metrics import MetricError
    from pipelines.sources.promql import PromQL
    from pipelines.sources.promql_access import access_of

    try:
        with closing(PromQL(cluster, about.prometheus_url, about.prometheus_timeout_s, access_of(about))) as api:
            report.metric_rows, report.warnings = ingest_progress_series(
                store, api, cluster, now, matcher=about.prometheus_matcher, table=about.metric_table()
            )
    except (SourceError, MetricError) as error:
        report.error = report.error or str(error)
    return report

"""What a scheduler tells besides its jobs, in the store: its policy, its queues, and who holds which GPU.

Jobs, their states and nodes stand in `pipelines/job_history.py`; each kind of answer has its own module beside this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from pipelines.gpu_jobs import ingest_pod_gpus, ingest_slurm_gpus
from pipelines.policy import ingest_policy
from pipelines.sources import JobSource, SourceError
from pipelines.store import Store, Writer

if TYPE_CHECKING:
    import polars as pl

    from pipelines.sources.kubernetes import KubernetesSource
    from pipelines.sources.kubernetes_series import Asks
    from pipelines.sources.slurm import SlurmSource

_POLICY, _QUEUES = "policy", "queues"  # marks
_POLICY_PERIOD = timedelta(minutes=10)
_QUEUES_SPAN = timedelta(hours=6)


@dataclass
class SchedulerIngested:
    """What a scheduler told of one cluster; rows that were written."""

    cluster: str
    reservation_rows: int = 0
    policy_rows: int = 0
    priority_rows: int = 0
    gpu_job_rows: int = 0
    queue_rows: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


def ingest_scheduler(
    store: Store, source: JobSource, cluster: str, matcher: str, now: datetime, api: Asks | None = None
) -> SchedulerIngested:
    """Take in what the scheduler of one cluster tells now; nothing where it is none of Slurm and Kubernetes.

    Args:
        store: The store.
        source: The cluster's jobs.
        cluster: Name of the cluster.
        matcher: Label matchers of the cluster's Prometheus, for queues.
        now: Present time, UTC.
        api: The Prometheus that exporters of Slurm are in; None: there is none.

    Returns:
        What was done; an outage stands in `error`.

    Raises:
        StoreError: The store cannot be written.
    """
    from pipelines.sources.kubernetes import KubernetesSource
    from pipelines.sources.slurm import SlurmSource
    from pipelines.sources.slurm_queues import slurm_queue_samples

    report = SchedulerIngested(cluster)
    if isinstance(source, SlurmSource):
        _slurm(store, source, cluster, now, report)
        if api is not None:
            _queues(store, api, cluster, matcher, now, report, slurm_queue_samples)
    elif isinstance(source, KubernetesSource):
        _kubernetes(store, source, cluster, matcher, now, report)
    return report


def _slurm(store: Store, source: SlurmSource, cluster: str, now: datetime, report: SchedulerIngested) -> None:
    mark = store.mark(cluster, _POLICY)
    if mark is None or now - mark >= _POLICY_PERIOD:
        policy = ingest_policy(store, source.commands, cluster, now)
        report.reservation_rows, report.policy_rows = policy.reservation_rows, policy.policy_rows
        report.priority_rows = policy.priority_rows
        report.warnings += policy.warnings
        report.error = policy.error
        if policy.error is None:
            store.transact(lambda w: w.set_mark(cluster, _POLICY, now), purpose="ingest of policy")
    gpus = ingest_slurm_gpus(store, source.commands, cluster, now)
    report.gpu_job_rows = gpus.rows
    report.warnings += gpus.warnings
    report.error = report.error or gpus.error


def _kubernetes(
    store: Store, source: KubernetesSource, cluster: str, matcher: str, now: datetime, report: SchedulerIngested
) -> None:
    from pipelines.sources.kubernetes_queues import queue_samples

    gpus = ingest_pod_gpus(store, source, cluster, now)
    report.gpu_job_rows = gpus.rows
    report.warnings += gpus.warnings
    report.error = gpus.error
    _queues(store, source.api, cluster, matcher, now, report, queue_samples)


def _queues(
    store: Store,
    api: Asks,
    cluster: str,
    matcher: str,
    now: datetime,
    report: SchedulerIngested,
    read: Callable[..., pl.DataFrame],
) -> None:
    """What exporters say of queues since the last time; of an outage the last hours."""
    mark = store.mark(cluster, _QUEUES)
    start = now - _QUEUES_SPAN if mark is None else max(mark, now - _QUEUES_SPAN)
    try:
        queues = read(api, cluster, start, now, matcher=matcher)
    except SourceError as error:
        report.error = report.error or str(error)
        return

    def work(writer: Writer) -> int:
        writer.set_mark(cluster, _QUEUES, now)
        return writer.upsert("core_queue_samples", queues)

    report.queue_rows = store.transact(work, purpose="ingest of queues")

"""What Volcano and Kueue say of their queues, as rows of `core_queue_samples`.

Metric names become short ones with their unit; of a resource the name follows a colon, as `allocated:nvidia_com_gpu`.
Of a job, namespace, result or stage likewise. Counters stay counters; of histograms sum and count are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

import polars as pl

from pipelines.sources.kubernetes_series import Asks, plain_labels, selecting
from pipelines.sources.queue_series import QueueSeries, read_queue_series

_WHAT = ("allocated", "request", "deserved", "capacity")
# Metric → (short name, scale). `{}` is filled by the resource.
VOLCANO: dict[str, tuple[str, float]] = {
    **{f"volcano_queue_{what}_milli_cpu": (f"{what}:cpu", 1e-3) for what in _WHAT},
    **{f"volcano_queue_{what}_memory_bytes": (f"{what}:memory_bytes", 1.0) for what in _WHAT},
    # Scalar resources are counted in thousandths, as CPUs are; but not pods.
    **{f"volcano_queue_{what}_scalar_resources": (f"{what}:{{}}", 1e-3) for what in _WHAT},
    "volcano_queue_share": ("share", 1.0), "volcano_queue_weight": ("weight", 1.0),
    "volcano_queue_overused": ("is_overused", 1.0),
    "volcano_queue_pod_group_inqueue_count": ("inqueue_jobs", 1.0),
    "volcano_queue_pod_group_pending_count": ("pending_jobs", 1.0),
    "volcano_queue_pod_group_running_count": ("running_jobs", 1.0),
    "volcano_queue_pod_group_unknown_count": ("unknown_jobs", 1.0),
    "volcano_unschedule_job_count": ("unscheduled_jobs", 1.0),
    "volcano_pod_preemption_victims": ("preemption_victims", 1.0),
    "volcano_total_preemption_attempts": ("preemption_attempts_total", 1.0),
    "volcano_schedule_attempts_total": ("schedule_attempts_total:{}", 1.0),
    "volcano_unschedule_task_count": ("unscheduled_tasks:{}", 1.0),
    "volcano_job_share": ("job_share:{}", 1.0), "volcano_job_retry_counts": ("job_retries_total:{}", 1.0),
    "volcano_namespace_share": ("namespace_share:{}", 1.0),
    "volcano_e2e_job_scheduling_duration": ("job_scheduling_s:{}", 1e-3),
    **{
        f"volcano_{what}_scheduling_latency_milliseconds_{end}": (f"{what}_scheduling{unit}:{{}}", scale)
        for what in ("e2e", "e2e_job", "task")
        for end, unit, scale in (("sum", "_s_total", 1e-3), ("count", "_total", 1.0))
    },
}  # fmt: skip
KUEUE: dict[str, tuple[str, float]] = {
    "kueue_pending_workloads": ("pending_jobs:{}", 1.0), "kueue_admitted_active_workloads": ("running_jobs", 1.0),
    "kueue_reserving_active_workloads": ("reserving_jobs", 1.0),
    "kueue_admitted_workloads_total": ("admitted_jobs_total", 1.0),
    "kueue_evicted_workloads_total": ("evicted_jobs_total:{}", 1.0),
    "kueue_preempted_workloads_total": ("preempted_jobs_total:{}", 1.0),
    "kueue_cluster_queue_resource_usage": ("allocated:{}", 1.0),
    "kueue_cluster_queue_resource_reservation": ("reserved:{}", 1.0),
    "kueue_cluster_queue_nominal_quota": ("quota:{}", 1.0),
    "kueue_cluster_queue_borrowing_limit": ("borrowing_limit:{}", 1.0),
    "kueue_cluster_queue_lending_limit": ("lending_limit:{}", 1.0),
    "kueue_cluster_queue_weighted_share": ("share", 1.0),
}  # fmt: skip
_ALL = VOLCANO | KUEUE
_QUEUE_LABELS = ("cluster_queue", "queue_name", "queue", "preempting_cluster_queue")
_ODD = re.compile(r"[^A-Za-z0-9]+")  # as kube-state-metrics writes names of resources
_SUFFIXES = ("resource", "status", "reason", "result", "namespace_name", "stage")
_JOB = (("job_ns", "job_namespace"), ("job_id", "job_name"))


def queue_samples(
    api: Asks, cluster: str, start: datetime, end: datetime, *, matcher: str = "", step_s: int = 60
) -> pl.DataFrame:
    """Samples of queues with start ≤ ts < end; one query.

    Args:
        api: The Prometheus.
        cluster: Name of the cluster.
        start: Start of the span, UTC.
        end: End of the span, UTC.
        matcher: Further label matchers, as of the setting; empty: none.
        step_s: Seconds between samples.

    Returns:
        Rows of `core_queue_samples`; none where neither scheduler is there.

    Raises:
        SourceError: No whole answer came.
    """
    selector = selecting(f'__name__=~"{"|".join(_ALL)}"', matcher)
    return read_queue_series(api, cluster, start, end, selector, lambda series: list(map(_identity, series)), step_s)


def _identity(labels: Mapping[str, str]) -> QueueSeries | None:
    """Source, queue, metric and scale of a series; None when it was not asked for."""
    name = labels.get("__name__", "")
    if name not in _ALL:
        return None
    metric, scale = _ALL[name]
    plain = plain_labels(labels)
    queue = next((plain[label] for label in _QUEUE_LABELS if plain.get(label)), "")
    told = next((plain[label] for label in _SUFFIXES if plain.get(label)), "")
    flavor = f"@{plain['flavor']}" if plain.get("flavor") and ":" in metric else ""
    job = "/".join(plain[found] for names in _JOB if (found := next((n for n in names if plain.get(n)), None)))
    told = _ODD.sub("_", told) or job
    metric = metric.format(told) if told else metric.removesuffix(":{}")
    scale = 1.0 if told == "pods" else scale
    return QueueSeries("volcano" if name in VOLCANO else "kueue", queue, metric + flavor, scale)

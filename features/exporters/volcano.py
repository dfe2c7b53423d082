"""Batch schedulers of Kubernetes: Volcano and Kueue. Rows only; those with the column `value` become queue samples."""

from __future__ import annotations

from typing import Any

from features.exporters.metric import Metric, Rows, family

_volcano = family("Volcano", "volcano_", entity="queue")
_kueue = family("Kueue", "kueue_", entity="queue")
_MILLI = 1e-3


def _aside(rows: Rows, names: str, meaning: str, scale: float = 1.0, **more: Any) -> list[Metric]:
    return rows(names, "", scale, meaning=meaning, **more)


def _means(rows: Rows, names: str, meaning: str, scale: float = 1.0, **more: Any) -> list[Metric]:
    return rows(names, "value", scale, meaning=meaning, **more)


ROWS: tuple[Metric, ...] = (
    *_aside(_volcano, " ".join(f"{name}_scheduling_latency_milliseconds_bucket" for name in ("e2e", "e2e_job", "task")),
            "histogram of how long scheduling took, s (exposed in ms)", _MILLI, kind="counter"),
    *_means(_volcano, " ".join(f"{name}_scheduling_latency_milliseconds_sum" for name in ("e2e", "e2e_job", "task")),
            "how long scheduling took in all, s (exposed in ms)", _MILLI, kind="counter"),
    *_means(_volcano, " ".join(f"{name}_scheduling_latency_milliseconds_count" for name in ("e2e", "e2e_job", "task")),
            "how many were scheduled", kind="counter"),
    *_aside(_volcano, "plugin_scheduling_latency_* action_scheduling_latency_*",
            "histogram of one plugin or action of the scheduler, as exposed", kind="counter"),
    *_means(_volcano, "e2e_job_scheduling_duration", "how long scheduling of a job took, s (exposed in ms)", _MILLI),
    *_means(_volcano, "schedule_attempts_total", "attempts, by result", kind="counter"),
    *_means(_volcano, "pod_preemption_victims", "pods that the last preemption chose"),
    *_means(_volcano, "total_preemption_attempts", "preemptions tried", kind="counter"),
    *_means(_volcano, "unschedule_task_count unschedule_job_count", "what could not be scheduled"),
    *_means(_volcano, "job_share queue_share namespace_share", "share of the dominant resource"),
    *_means(_volcano, "job_retry_counts", "retries of a job", kind="counter"),
    *_means(_volcano, "queue_allocated_milli_cpu queue_request_milli_cpu queue_deserved_milli_cpu "
            "queue_capacity_milli_cpu",
            "CPUs of a queue (exposed in thousandths)", _MILLI),
    *_means(_volcano, "queue_allocated_memory_bytes queue_request_memory_bytes queue_deserved_memory_bytes "
            "queue_capacity_memory_bytes",
            "memory of a queue, bytes"),
    *_means(_volcano, "queue_allocated_scalar_resources queue_request_scalar_resources "
            "queue_deserved_scalar_resources queue_capacity_scalar_resources",
            "GPUs and the like of a queue (exposed in thousandths, but for pods)", _MILLI),
    *_means(_volcano, "queue_weight queue_overused", "weight of a queue; 1: it uses more than it deserves"),
    *_means(_volcano, "queue_pod_group_inqueue_count queue_pod_group_pending_count queue_pod_group_running_count "
            "queue_pod_group_unknown_count", "pod groups of a queue in a state"),
    *_means(_kueue, "pending_workloads", "workloads that wait, by status"),
    *_aside(_kueue, "local_queue_pending_workloads", "the same of a namespace's own queue"),
    *_means(_kueue, "reserving_active_workloads admitted_active_workloads", "workloads that hold quota, or run"),
    *_means(_kueue, "admitted_workloads_total evicted_workloads_total preempted_workloads_total",
            "workloads since the controller started", kind="counter"),
    *_aside(_kueue, "quota_reserved_workloads_total", "workloads since the controller started", kind="counter"),
    *_aside(_kueue, "admission_wait_time_seconds_bucket admission_wait_time_seconds_sum "
            "quota_reserved_wait_time_seconds_bucket quota_reserved_wait_time_seconds_sum", "histogram of waits, s",
            kind="counter"),
    *_aside(_kueue, "cluster_queue_status", "1 in the series of the status that the queue has"),
    *_means(_kueue, "cluster_queue_resource_usage cluster_queue_resource_reservation cluster_queue_nominal_quota "
            "cluster_queue_borrowing_limit cluster_queue_lending_limit cluster_queue_weighted_share",
            "use, quota and limits of a queue, by flavor and resource"),
)  # fmt: skip

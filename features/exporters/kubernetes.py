"""kube-state-metrics: pods, jobs and nodes of Kubernetes, for the reader of Kubernetes; nothing here feeds frames.

Rows only. Pods and jobs are keyed by `uid`: their names come again.
"""

from __future__ import annotations

from features.exporters.metric import Metric, family

_ksm = family("kube-state-metrics", "kube_", entity="kubernetes")


def _means(names: str, meaning: str, **more: object) -> list[Metric]:
    return _ksm(names, "", meaning=meaning, **more)


ROWS: tuple[Metric, ...] = (
    *_means("pod_info", "node, uid, owner and priority class of a pod; node empty: not scheduled", kind="info"),
    *_means("pod_owner", "owner of a pod", kind="info"),
    *_means("pod_labels", "labels of a pod, sanitised", kind="info"),
    *_means("pod_status_phase", "1 in the series of the phase that the pod is in"),
    *_means("pod_status_reason", "1 in the series of the reason, as Evicted or NodeLost; a missing series is not a no"),
    *_means("pod_container_resource_requests", "what a container asks for, by resource (nvidia_com_gpu, amd_com_gpu); "
            "counts only while the pod runs"),
    *_means("pod_container_status_last_terminated_reason pod_container_status_last_terminated_exitcode "
            "pod_container_status_last_terminated_timestamp", "how a container last ended; each restart overwrites it"),
    *_means("pod_container_status_restarts_total", "restarts of a container", kind="counter"),
    *_means("pod_created pod_start_time pod_completion_time pod_deletion_timestamp", "s since 1970"),
    *_means("pod_status_scheduled_time", "s since 1970"),
    *_means("job_status_start_time job_status_completion_time", "s since 1970; no completion time when it failed"),
    *_means("job_status_active job_status_succeeded job_status_failed", "pods of a job in that state"),
    *_means("job_complete job_failed", "three series by condition: only the value 1 of condition=\"true\" says so"),
    *_means("node_info", "kubelet, kernel and provider of a node", kind="info"),
    *_means("node_labels", "labels of a node, sanitised", kind="info"),
    *_means("node_status_capacity node_status_allocatable", "by resource; may not fall when a GPU dies"),
    *_means("node_status_condition", "by condition and status, 1 in one of three"),
    *_means("node_spec_unschedulable", "1: cordoned"),
    *_means("node_spec_taint", "a taint in labels", kind="info"),
)  # fmt: skip

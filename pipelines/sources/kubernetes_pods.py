"""Pods out of kube-state-metrics series: whose they are, what they ask for, in which state they are and why.

A pod is known by its uid. Its phase only moves forward, so of several phases that two instances of kube-state-metrics
give at once the furthest counts. Nothing here asks anyone; grouping pods into jobs stands in `kubernetes.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pipelines.sources.kubernetes_series import Facts, pod_key

PENDING, RUNNING = "PENDING", "RUNNING"
_RANK = {"Unknown": 0, "Pending": 1, "Running": 2, "Succeeded": 3, "Failed": 4}
_GPUS = {"nvidia_com_gpu", "nvidia_com_gpu_shared", "amd_com_gpu", "gpu_intel_com_i915", "gpu_intel_com_xe"}
_MIG = re.compile(r"nvidia_com_mig_(\d+)g_")
_MIG_SLICES = 7
# Reason of a pod → state of its job. What the cluster did to it is not the program's failure.
_REASONS = {
    "Evicted": "PREEMPTED", "Preempting": "PREEMPTED", "Preempted": "PREEMPTED", "NodeLost": "NODE_FAIL",
    "NodeShutdown": "NODE_FAIL", "Shutdown": "NODE_FAIL", "Terminated": "NODE_FAIL", "NodeAffinity": "BOOT_FAIL",
    "UnexpectedAdmissionError": "BOOT_FAIL", "DeadlineExceeded": "TIMEOUT", "OOMKilled": "OUT_OF_MEMORY",
    "StartError": "BOOT_FAIL", "ContainerCannotRun": "BOOT_FAIL",
}  # fmt: skip
# Labels of pods that name the job they are a part of, best first; and the kinds of owners that are jobs.
_JOB_LABELS = (
    "label_jobset_sigs_k8s_io_jobset_name", "label_training_kubeflow_org_job_name", "label_volcano_sh_job_name",
    "label_scheduling_k8s_io_group_name", "label_pod_group_scheduling_sigs_k8s_io", "label_ray_io_cluster",
    "label_leaderworkerset_sigs_k8s_io_name", "label_batch_kubernetes_io_job_name", "label_job_name",
)  # fmt: skip
_UID_LABELS = ("label_batch_kubernetes_io_controller_uid", "label_controller_uid")
_QUEUE_LABELS = ("label_kueue_x_k8s_io_queue_name", "label_volcano_sh_queue_name", "label_runai_queue")
_USER_LABELS = ("label_user", "label_owner", "label_username")
_SERVICES = {"", "<none>", "ReplicaSet", "StatefulSet", "DaemonSet", "Node", "ReplicationController"}
_FIRST, _LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
_MOST = 2.0**62


@dataclass
class Pod:
    """One pod.

    Attributes:
        key: Its uid, else namespace/name.
        labels: Of `kube_pod_info` and `kube_pod_labels`.
        owner: Kind and name of the job it is a part of; None when it stands alone.
        phase: The furthest phase seen.
        is_gone: It vanished without having ended by itself.
        end: When it ended; None while it lasts.
    """

    key: str
    labels: dict[str, str] = field(default_factory=dict)
    owner: tuple[str, str] | None = None
    owner_uid: str = ""
    phase: str = ""
    requests: dict[str, float] = field(default_factory=dict)
    created: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    ran: bool = False
    is_gone: bool = False
    reasons: set[str] = field(default_factory=set)
    last_reasons: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    is_unschedulable: bool = False
    exit_code: int | None = None
    terminated: datetime | None = None
    restarts: int = 0

    @property
    def namespace(self) -> str:
        return self.labels.get("namespace", "")

    @property
    def name(self) -> str:
        return self.labels.get("pod", "")

    @property
    def node(self) -> str:
        """Where it is; empty while it is not scheduled."""
        return self.labels.get("node", "")

    @property
    def is_live(self) -> bool:
        """It waits or runs: only then it uses what it asks for."""
        return not self.is_gone and self.phase in ("Pending", "Running", "Unknown", "")

    @property
    def gpus(self) -> float:
        """GPUs it asks for; MIG instances count by their slices, seven of which are a GPU."""
        whole = sum(count for name, count in self.requests.items() if name in _GPUS)
        slices = sum(int(m[1]) * count for name, count in self.requests.items() if (m := _MIG.match(name)))
        return whole + slices / _MIG_SLICES

    @property
    def state(self) -> str:
        """State as of jobs."""
        if self.is_live:
            return RUNNING if self.phase in ("Running", "Unknown") and self.ran else PENDING
        if self.phase == "Succeeded":
            return "COMPLETED"
        told = [_REASONS[reason] for reason in self._told]
        return told[0] if told else "FAILED" if self.phase == "Failed" else "CANCELLED"

    @property
    def _told(self) -> list[str]:
        """Reasons of its end. That of a container's earlier end counts only where nothing else is said."""
        reasons = self.reasons & _REASONS.keys()
        if not reasons and self.phase == "Failed":
            reasons = self.last_reasons & _REASONS.keys()
        return sorted(reasons)

    @property
    def reason(self) -> str | None:
        """Why it waits, or ended otherwise than by itself."""
        if not self.is_live:
            return ", ".join(self._told) or None
        if self.state != PENDING:
            return None
        if self.is_unschedulable:
            return "Unschedulable"
        return ", ".join(sorted(self.waiting)) or ("Scheduling" if not self.node else "Starting")

    @property
    def exit_text(self) -> str | None:
        """Exit code and signal, as `1:0` or, for what a signal ended, `0:9`."""
        if self.exit_code is None:
            return None
        return f"0:{self.exit_code - 128}" if 128 < self.exit_code < 160 else f"{self.exit_code}:0"


def pods_of(facts: Facts, step: timedelta) -> dict[str, Pod]:
    """Pods of a span, by key.

    Args:
        facts: Series of the metrics of pods.
        step: Resolution of the times of phases; what was not seen in the last two steps is gone.
    """
    pods: dict[str, Pod] = {}

    def pod(labels: Mapping[str, str]) -> Pod:
        key = pod_key(labels)
        return pods.setdefault(key, Pod(key))

    for labels, _ in facts.series("kube_pod_info"):
        found = pod(labels)
        # Before and after it is scheduled it has another label: an empty one tells nothing.
        found.labels |= {name: value for name, value in labels.items() if value or name not in found.labels}
    for labels, _ in facts.series("kube_pod_labels"):
        found = pod(labels)
        found.labels = labels | found.labels
    for labels, value in facts.series("kube_pod_owner"):
        if value == 1 and labels.get("owner_is_controller", "true") != "false":
            found = pod(labels)
            owner = {"created_by_kind": labels.get("owner_kind", ""), "created_by_name": labels.get("owner_name", "")}
            found.labels = owner | {name: text for name, text in found.labels.items() if text not in ("", "<none>")}
            found.labels.setdefault("namespace", labels.get("namespace", ""))
            found.labels.setdefault("pod", labels.get("pod", ""))
    for metric, attribute in (("kube_pod_created", "created"), ("kube_pod_start_time", "start"),
                              ("kube_pod_completion_time", "end")):  # fmt: skip
        for labels, value in facts.series(metric):
            setattr(pod(labels), attribute, moment(value))
    _requests(facts, pods, pod)
    _reasons(facts, pod)
    for key, seen in facts.phases.items():
        found = pods.setdefault(key, Pod(key))
        furthest = max(seen, key=lambda one: _RANK.get(one.phase, 0))
        found.phase = furthest.phase
        last = max(one.last for one in seen)
        found.ran = any(one.phase == "Running" for one in seen) or found.phase == "Succeeded" or (
            found.phase == "Failed" and (found.terminated is not None or found.exit_code is not None)
        )  # fmt: skip
        if _RANK.get(found.phase, 0) >= _RANK["Succeeded"]:
            found.end = found.end or found.terminated or min(one.first for one in seen if one.phase == found.phase)
        elif facts.newest is not None and last < facts.newest - 2 * step:
            found.is_gone, found.end = True, last
        else:
            found.end = None
    for found in pods.values():
        found.owner, found.owner_uid = _owner(found)
    return {key: found for key, found in pods.items() if found.phase and found.name}


def moment(value: float) -> datetime | None:
    """A time of kube-state-metrics, seconds since the epoch; None for 0 and what cannot be."""
    try:
        at = datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return at if _FIRST <= at <= _LAST else None


def _requests(facts: Facts, pods: dict[str, Pod], pod: Callable[[Mapping[str, str]], Pod]) -> None:
    # A pod's series is another one before and after it is scheduled: a container asks once.
    asked: dict[tuple[str, str, str], float] = {}
    for labels, value in facts.series("kube_pod_container_resource_requests"):
        found, resource = pod(labels), labels.get("resource", "")
        if 0 <= value < _MOST and resource:
            key = (found.key, resource, labels.get("container", ""))
            asked[key] = max(value, asked.get(key, 0.0))
        if labels.get("node"):
            found.labels.setdefault("node", labels["node"])
            found.labels["node"] = found.labels["node"] or labels["node"]
    for (key, resource, _), value in asked.items():
        requests = pods[key].requests
        requests[resource] = requests.get(resource, 0.0) + value


def _reasons(facts: Facts, pod: Callable[[Mapping[str, str]], Pod]) -> None:
    """Only a value of 1 says yes; a series that is not there says nothing."""
    for metric in ("kube_pod_status_reason", "kube_pod_container_status_terminated_reason"):
        for labels, value in facts.series(metric):
            if value == 1 and labels.get("reason"):
                pod(labels).reasons.add(labels["reason"])
    for labels, value in facts.series("kube_pod_container_status_last_terminated_reason"):
        if value == 1 and labels.get("reason"):
            pod(labels).last_reasons.add(labels["reason"])
    for labels, value in facts.series("kube_pod_container_status_waiting_reason"):
        if value == 1 and labels.get("reason"):
            pod(labels).waiting.add(labels["reason"])
    for labels, value in facts.series("kube_pod_status_unschedulable"):
        if value == 1:
            pod(labels).is_unschedulable = True
    for labels, value in facts.series("kube_pod_container_status_last_terminated_exitcode"):
        found = pod(labels)
        if 0 <= value <= 255:
            found.exit_code = max(found.exit_code or 0, int(value))
    for labels, value in facts.series("kube_pod_container_status_last_terminated_timestamp"):
        found, at = pod(labels), moment(value)
        found.terminated = max(filter(None, (found.terminated, at)), default=None)
    for labels, value in facts.series("kube_pod_container_status_restarts_total"):
        found = pod(labels)
        if 0 <= value < 1_000_000:
            found.restarts = max(found.restarts, math.floor(value))


def _owner(pod: Pod) -> tuple[tuple[str, str] | None, str]:
    kind, name = pod.labels.get("created_by_kind", ""), pod.labels.get("created_by_name", "")
    uid = next((pod.labels[label] for label in _UID_LABELS if pod.labels.get(label)), "")
    for label in _JOB_LABELS:
        if told := pod.labels.get(label):
            is_job = label in _JOB_LABELS[-2:]
            return ("Job" if is_job or kind in _SERVICES else kind, told), uid if is_job or kind == "Job" else ""
    return (None, "") if kind in _SERVICES or not name else ((kind, name), uid)


def first_label(pod: Pod, what: str) -> str | None:
    """The queue or the user that a pod's labels name."""
    names = _QUEUE_LABELS if what == "queue" else _USER_LABELS
    return next((pod.labels[name] for name in names if pod.labels.get(name)), None)

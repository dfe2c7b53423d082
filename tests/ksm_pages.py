"""Series of kube-state-metrics as tests want them: as a page to scrape, or as a recorded past."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

Series = tuple[str, dict[str, str], float]
PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")


def seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def pod(
    name: str,
    uid: str,
    *,
    namespace: str = "ml",
    node: str = "n1",
    phase: str = "Running",
    requests: Mapping[str, float] | None = None,
    owner: tuple[str, str] = ("<none>", "<none>"),
    created: datetime | None = None,
    start: datetime | None = None,
    completed: datetime | None = None,
    labels: Mapping[str, str] | None = None,
    reason: str = "",
    terminated: str = "",
    last: tuple[str, int, datetime] | None = None,
    waiting: str = "",
    restarts: int = 0,
    unschedulable: bool = False,
    priority: str = "",
) -> list[Series]:
    """All series of one pod at one time."""
    key = {"namespace": namespace, "pod": name, "uid": uid}
    container = key | {"container": "main"}
    told: list[Series] = [
        ("kube_pod_info", key | {"node": node, "host_ip": "10.0.0.1", "created_by_kind": owner[0],
                                 "created_by_name": owner[1], "priority_class": priority}, 1),
        ("kube_pod_owner", key | {"owner_kind": owner[0], "owner_name": owner[1],
                                  "owner_is_controller": "true" if owner[0] != "<none>" else "<none>"}, 1),
        *(("kube_pod_status_phase", key | {"phase": one}, float(one == phase)) for one in PHASES),
        *(("kube_pod_container_resource_requests",
           container | {"node": node, "resource": resource,
                        "unit": {"cpu": "core", "memory": "byte"}.get(resource, "integer")}, value)
          for resource, value in (requests or {"nvidia_com_gpu": 8, "cpu": 16, "memory": 64 * 2**30}).items()),
        ("kube_pod_container_status_restarts_total", container, restarts),
    ]  # fmt: skip
    for metric, at in (("created", created), ("start_time", start), ("completion_time", completed)):
        if at is not None:
            told.append((f"kube_pod_{metric}", key, at.timestamp()))
    if labels:
        told.append(("kube_pod_labels", key | dict(labels), 1))
    for one in ("Evicted", "NodeLost", "Shutdown", "NodeAffinity", "UnexpectedAdmissionError"):
        if reason:  # older ones give the series only while one is true, newer ones always
            told.append(("kube_pod_status_reason", key | {"reason": one}, float(one == reason)))
    if terminated:
        told.append(("kube_pod_container_status_terminated_reason", container | {"reason": terminated}, 1))
    if last:
        told += [
            ("kube_pod_container_status_last_terminated_reason", container | {"reason": last[0]}, 1),
            ("kube_pod_container_status_last_terminated_exitcode", container, last[1]),
            ("kube_pod_container_status_last_terminated_timestamp", container, last[2].timestamp()),
        ]
    if waiting:
        told.append(("kube_pod_container_status_waiting_reason", container | {"reason": waiting}, 1))
    if unschedulable:
        told.append(("kube_pod_status_unschedulable", key, 1))
    return told


def job(
    name: str,
    *,
    namespace: str = "ml",
    created: datetime,
    complete: bool = False,
    failed: bool = False,
    reason: str = "",
    completed: datetime | None = None,
    deadline_s: float | None = None,
) -> list[Series]:
    """All series of one `Job` object at one time: each condition is three series, one of which is 1."""
    key = {"namespace": namespace, "job_name": name}
    told: list[Series] = [("kube_job_created", key, created.timestamp())]
    for metric, is_true in (("kube_job_complete", complete), ("kube_job_failed", failed)):
        for condition in ("true", "false", "unknown"):
            told.append(
                (
                    metric,
                    key | {"condition": condition},
                    float((condition == "true") == is_true and condition != "unknown"),
                )
            )
    for one in ("BackoffLimitExceeded", "DeadlineExceeded", "Evicted"):
        told.append(("kube_job_status_failed", key | {"reason": one}, float(one == reason)))
    if completed:
        told.append(("kube_job_status_completion_time", key, completed.timestamp()))
    if deadline_s:
        told.append(("kube_job_spec_active_deadline_seconds", key, deadline_s))
    return told


def node(
    name: str,
    *,
    gpus: int = 8,
    allocatable: int | None = None,
    ready: str = "true",
    cordoned: bool = False,
    taints: Iterable[tuple[str, str]] = (),
    resource: str = "nvidia_com_gpu",
    labels: Mapping[str, str] | None = None,
    pressure: str = "",
) -> list[Series]:
    """All series of one node at one time."""
    key = {"node": name}
    told: list[Series] = [
        ("kube_node_info", key | {"kernel_version": "6.8"}, 1),
        ("kube_node_spec_unschedulable", key, float(cordoned)),
        ("kube_node_status_capacity", key | {"resource": "cpu", "unit": "core"}, 96),
    ]
    if gpus:
        told.append(("kube_node_status_capacity", key | {"resource": resource, "unit": "integer"}, gpus))
        usable = gpus if allocatable is None else allocatable
        told.append(("kube_node_status_allocatable", key | {"resource": resource, "unit": "integer"}, usable))
    for condition, true in (("Ready", ready), ("MemoryPressure", str(pressure == "MemoryPressure").lower())):
        for status in ("true", "false", "unknown"):
            told.append(
                ("kube_node_status_condition", key | {"condition": condition, "status": status}, float(status == true))
            )
    told += [
        ("kube_node_spec_taint", key | {"key": taint, "value": "", "effect": effect}, 1) for taint, effect in taints
    ]
    if labels:
        told.append(("kube_node_labels", key | dict(labels), 1))
    return told


def page(*series: Iterable[Series], **more: str) -> str:
    """A page that an exporter would give; `more` are labels of every series."""
    return "".join(f"{_name(metric, labels | more)} {value}\n" for part in series for metric, labels, value in part)


def history(*spans: tuple[datetime, datetime, Iterable[Series]], step_s: int = 15, **more: str) -> str:
    """A recorded past: (from, to, series) each, a sample every `step_s`, as OpenMetrics."""
    lines: list[str] = []
    for start, end, series in spans:
        for metric, labels, value in series:
            name = _name(metric, labels | more)
            at = int(start.timestamp())
            while at < end.timestamp():
                lines.append(f"{name} {value} {at}")
                at += step_s
    return "\n".join(lines) + "\n# EOF\n"


def _name(metric: str, labels: Mapping[str, str]) -> str:
    told = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{metric}{{{told}}}"

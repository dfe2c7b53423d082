"""Nodes of a Kubernetes cluster out of kube-state-metrics series: state, GPUs, model, place.

States are in the words of the product, flags after a plus: a node that is not ready is DOWN, one that is cordoned or
tainted for drain has `+DRAIN`; else it is IDLE, MIXED or ALLOCATED by what running pods ask for. Pods that wait for a
node, and those that ended, use nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import polars as pl

from pipelines.sources.inventory import INVENTORY_SCHEMA, complete_places
from pipelines.sources.kubernetes_pods import Pod
from pipelines.sources.kubernetes_series import Facts
from pipelines.sources.places import label_places

_GPUS = ("nvidia_com_gpu", "amd_com_gpu", "gpu_intel_com_i915", "gpu_intel_com_xe")
_DOWN = {"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", "node.kubernetes.io/out-of-service"}
_DRAIN = {"node.kubernetes.io/unschedulable", "ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"}
_PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
_MOST_GPUS = 1024


def nodes_of(facts: Facts, pods: Iterable[Pod]) -> pl.DataFrame:
    """Nodes with their states.

    Args:
        facts: Series of the metrics of nodes.
        pods: Pods of the same moment.

    Returns:
        Columns of `INVENTORY_SCHEMA`, by name; nodes without GPUs too.
    """
    names = {labels.get("node", "") for labels, _ in facts.series("kube_node_info")}
    capacity = _gpus(facts, "kube_node_status_capacity")
    allocatable = _gpus(facts, "kube_node_status_allocatable")
    conditions: dict[str, dict[str, str]] = defaultdict(dict)
    for labels, value in facts.series("kube_node_status_condition"):
        if value == 1:
            conditions[labels.get("node", "")][labels.get("condition", "")] = labels.get("status", "")
    cordoned = {labels.get("node", "") for labels, value in facts.series("kube_node_spec_unschedulable") if value == 1}
    taints: dict[str, set[str]] = defaultdict(set)
    for labels, value in facts.series("kube_node_spec_taint"):
        if value == 1 and labels.get("effect") in ("NoSchedule", "NoExecute"):
            taints[labels.get("node", "")].add(labels.get("key", ""))
    used: dict[str, float] = defaultdict(float)
    for pod in pods:
        if pod.is_live and pod.node:
            used[pod.node] += pod.gpus
    rows = []
    for node in sorted((names | capacity.keys() | conditions.keys()) - {""}):
        reasons = [f"{key} taint" for key in sorted(taints[node] & (_DOWN | _DRAIN))]
        reasons += [name for name in _PRESSURES if conditions[node].get(name) == "true"]
        total, usable = capacity.get(node), allocatable.get(node)
        if total and usable is not None and usable < total:
            reasons.append(f"{usable:g} of {total:g} GPUs can be allocated")
        ready = conditions[node].get("Ready", "")
        if ready in ("false", "unknown") or taints[node] & _DOWN:
            state = "DOWN" if ready == "false" else "DOWN+NOT_RESPONDING"
            reasons.insert(0, "node is not ready")
        elif not total or not used[node]:
            state = "ALLOCATED" if used[node] else "IDLE"
        else:
            state = "ALLOCATED" if used[node] >= (usable or total) else "MIXED"
        if node in cordoned or taints[node] & _DRAIN:
            state += "+DRAIN"
            reasons.insert(0, "cordoned")
        whole = int(total) if total is not None and total <= _MOST_GPUS else None
        rows.append({"node": node, "gpus": whole, "state": state, "reason": "; ".join(reasons) or None})
    frame = pl.DataFrame(rows, schema={name: INVENTORY_SCHEMA[name] for name in ("node", "gpus", "state", "reason")})
    places = label_places(labels for labels, _ in facts.series("kube_node_labels"))
    told = complete_places(frame, places)
    return told.select(
        (pl.col(name) if name in told.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in INVENTORY_SCHEMA.items()
    )


def _gpus(facts: Facts, metric: str) -> dict[str, float]:
    """GPUs of each node, by any vendor; a node that names none of their resources is left out."""
    found: dict[tuple[str, str], float] = {}
    for labels, value in facts.series(metric):
        if labels.get("resource") in _GPUS and value >= 0:
            key = (labels.get("node", ""), labels["resource"])
            found[key] = max(value, found.get(key, 0.0))
    nodes: dict[str, float] = defaultdict(float)
    for (node, _), value in found.items():
        nodes[node] += value
    return dict(nodes)

"""Where nodes stand, as Slurm's topology and Kubernetes' node labels tell: rack, pod, NVLink domain; model, driver.

Text or labels in, `node` and columns of the inventory out; who wins where several tell stands in `inventory.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import polars as pl

from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.inventory import INVENTORY_SCHEMA

_RECORD = re.compile(r"^\s*(?=(?:SwitchName|BlockName)=)", re.MULTILINE)
# Labels of a Kubernetes node, as kube-state-metrics writes them, best first.
_K8S_LABELS: dict[str, tuple[str, ...]] = {
    "rack": (
        "label_topology_kubernetes_io_rack", "label_topology_rack", "label_rack",
        "label_network_topology_nvidia_com_leaf", "label_cloud_google_com_gce_topology_subblock",
        "label_topology_k8s_aws_network_node_layer_3",
    ),
    "pod": (
        "label_topology_kubernetes_io_block", "label_network_topology_nvidia_com_spine",
        "label_cloud_google_com_gce_topology_block", "label_topology_k8s_aws_network_node_layer_2",
        "label_topology_kubernetes_io_zone", "label_failure_domain_beta_kubernetes_io_zone",
    ),
    "nvlink_domain": ("label_nvidia_com_gpu_clique", "label_network_topology_nvidia_com_accelerator"),
    "gpu_model": (
        "label_nvidia_com_gpu_product", "label_amd_com_gpu_product_name", "label_beta_amd_com_gpu_product_name",
    ),
    "gpus": ("label_nvidia_com_gpu_count",),
    "driver_version": ("label_nvidia_com_cuda_driver_version_full", "label_amd_com_gpu_driver_version"),
}  # fmt: skip
_CUDA_DRIVER = tuple(f"label_nvidia_com_cuda_driver_{part}" for part in ("major", "minor", "rev"))
_MOST_GPUS = 1024


def topology_places(text: str) -> pl.DataFrame:
    """Rack, pod and NVLink domain of each node from `scontrol show topology`, on one line a record or on several.

    In a tree a rack is the lowest switch over the node and its pod the next one above. A block is an NVLink domain:
    the smallest that holds the node, its pod the next larger one, where blocks are aggregated.

    Args:
        text: Output of the command, of tree or block topology or both.

    Returns:
        `node`, `rack`, `pod`, `nvlink_domain`; null where there is none.
    """
    levels: dict[int, dict[str, str]] = {}
    blocks: dict[str, list[tuple[int, str]]] = {}
    for record in _RECORD.split(text):
        fields: dict[str, str] = {}
        for part in record.split():
            key, equals, value = part.partition("=")
            if equals:
                fields.setdefault(key, value)
        try:
            nodes = expand_hostlist(fields.get("Nodes", ""))
        except HostlistError:
            continue
        if "SwitchName" in fields and fields.get("Level", "0").isdigit():
            levels.setdefault(int(fields.get("Level", "0")), {}).update(dict.fromkeys(nodes, fields["SwitchName"]))
        elif "BlockName" in fields:
            for node in nodes:
                blocks.setdefault(node, []).append((len(nodes), fields["BlockName"]))
    rows = []
    for node in dict.fromkeys([*(node for level in levels.values() for node in level), *blocks]):
        above = [levels[level][node] for level in sorted(levels) if node in levels[level]]
        held = [name for _, name in sorted(blocks.get(node, []))]
        rack = above[0] if above else None
        pod = above[1] if len(above) > 1 else held[1] if len(held) > 1 and not above else None
        rows.append((node, rack or (held[0] if held else None), pod, held[0] if held else None))
    return pl.DataFrame(
        rows, schema=["node", "rack", "pod", "nvlink_domain"], orient="row", infer_schema_length=None
    ).cast(pl.String)


def label_places(nodes: Iterable[Mapping[str, str]]) -> pl.DataFrame:
    """Places, models and drivers from the labels of Kubernetes nodes.

    Args:
        nodes: Labels of each series of `kube_node_labels`.

    Returns:
        `node` and the columns that labels can tell, one row a node; null where they say nothing.
    """
    rows: dict[str, dict[str, str | int | None]] = {}
    for labels in nodes:
        if not (node := labels.get("node")):
            continue
        row = rows.setdefault(node, {"node": node} | dict.fromkeys(_K8S_LABELS))
        for column, names in _K8S_LABELS.items():
            row[column] = row[column] or next((labels[name] for name in names if labels.get(name)), None)
        parts = [labels.get(name, "") for name in _CUDA_DRIVER]
        if row["driver_version"] is None and parts[0]:
            row["driver_version"] = ".".join(part for part in parts if part)
    for row in rows.values():
        gpus = str(row["gpus"] or "")
        row["gpus"] = int(gpus) if gpus.isascii() and gpus.isdigit() and int(gpus[:9]) <= _MOST_GPUS else None
    schema = {name: INVENTORY_SCHEMA[name] for name in ("node", *_K8S_LABELS)}
    return pl.DataFrame(list(rows.values()), schema=schema)

"""Whose series it is: node, GPU, MIG instance, link or port, from the labels that exporters and Prometheus give.

Labels of workloads (pod, namespace, container), of versions (driver, VBIOS) and of replicas never take part, so that
one thing is one key however its labels come and go. What a metric feeds stands in `features/metrics.py`.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from features.exporters.metric import SWITCH_LABEL, Metric
from features.exporters.nvidia_smi import SMI

# In order of trust. `node` is set on purpose by whoever wrote the scrape configuration.
NODE_LABELS = ("node", "Hostname", "hostname", "kubernetes_node", "nodename", "host", "instance")
UUID_LABELS = ("UUID", "uuid", "gpu_uuid", "serial_number")
INDEX_LABELS = ("gpu", "gpu_id", "index", "card", "minor_number", "ordinal")
LINK_LABELS = ("nvlink", "link_index", "link")
DEVICE_LABELS = ("device", "interface")
XID_LABELS = ("xid", "code")
PORT_LABELS = ("port", "local_port")
JOB_LABELS = ("hpc_job", "job_id", "slurm_job_id", "slurm_jobid", "jobid")
# Series of a link, a switch or a CPU are not series of a GPU, though they carry its label.
_OTHER_ENTITIES = frozenset(("nvlink", SWITCH_LABEL, "cpu", "cpucore", "peer_gpu"))
_EXPORTED = "exported_"
_FABRIC_NAME = "local_name"  # of a port as the subnet manager describes it: `n1 mlx5_0`
_BARE_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_INDEX = re.compile(r"[0-9]{1,5}")  # longer ones are serial numbers or nonsense, no positions
_LINK = re.compile(r"[A-Za-z]*([0-9]{1,3})")
_MAX_LINK = 255
_SELF = frozenset(("localhost", "127.0.0.1", "::1", "0.0.0.0", "::"))
# Pods that a DaemonSet or a Deployment makes end in five letters that are no vowels, or digits but 0, 1 and 3.
_POD_NAME = re.compile(r"(?:exporter|dcgm)[a-z0-9-]*-[bcdf-hj-np-tv-z2456789]{5}$")
_CONTAINER = re.compile(r"(?=.*[0-9])[0-9a-f]{12}(?:[0-9a-f]{52})?")
_WHOLE_GPU = ("", "spx")  # compute partition types of AMD that leave a GPU in one piece
_pattern = functools.cache(re.compile)


class Identity(NamedTuple):
    """Whose series it is; what is not of its kind, or no label tells, is empty.

    Attributes:
        node: Name of the node.
        gpu_uuid: UUID of the GPU, `<node>:<index>` when it has no usable one.
        gpu_index: Its index at that time.
        job_id: Job on it.
        mig_instance: Id of the MIG instance or partition; empty for a whole GPU.
        mig_profile: Its profile, as `1g.10gb`.
        link: Number of the NVLink.
        device: Network device; `nvswitch0` and so on for a switch of NVLinks.
        port: Port of the network device, or number of the link of the switch.
        xid: XID code of which a count speaks; None also where it speaks of none.
    """

    node: str
    gpu_uuid: str
    gpu_index: int | None
    job_id: str
    mig_instance: str = ""
    mig_profile: str = ""
    link: int | None = None
    device: str = ""
    port: str = ""
    xid: int | None = None


# What labels tell of a board, in the order of `vocabulary.BOARD_FACTS`: slot, model, driver, VBIOS, serial number.
BOARD_LABELS = (
    ("pci_bus_id",), ("modelName", "model_name", "card_model", "card_series", "name"),
    ("DCGM_FI_DRIVER_VERSION", "DCGM_FI_SYSTEM_DRIVER_VERSION", "driver_version"),
    ("DCGM_FI_DEV_VBIOS_VERSION", "vbios_version"), ("DCGM_FI_DEV_SERIAL", "serial_number", "serial"),
)  # fmt: skip


def board_facts(labels: Mapping[str, str]) -> tuple[str | None, ...]:
    """What the labels of a GPU's series tell of its board, as `BOARD_LABELS`; null where they do not."""
    if driver := labels.get("driver_ver"):  # Omnistat's spelling; elsewhere `type` may be anything
        told = {"model_name": labels.get("type", ""), "vbios_version": labels.get("vbios", "")}
        labels = told | {"driver_version": driver} | dict(labels)
    return tuple(_first(labels, names) or None for names in BOARD_LABELS)


@functools.cache
def _renamed(name: str) -> str:
    return _EXPORTED + name


def _label(labels: Mapping[str, str], name: str) -> str:
    """A label as the exporter gave it: when Prometheus has one of that name of its own, it renames the exporter's."""
    return labels.get(_renamed(name)) or labels.get(name, "")


def _first(labels: Mapping[str, str], names: Iterable[str]) -> str:
    for name in names:  # plain loops here and below: each label set of a large cluster passes through them
        if text := labels.get(_renamed(name)) or labels.get(name):
            return text
    return ""


def node_name(labels: Mapping[str, str]) -> str:
    """Name of the node from the labels of a series or target; empty when none tells it.

    Ports and domains are cut (`n1.example.org:9400` is `n1`), addresses stay. A name that is that of the exporter's own
    pod is passed over; the id of its container and `localhost` are too, where another label has better.
    """
    weak = ""
    for label in NODE_LABELS:
        for text in (labels.get(_renamed(label)), labels.get(label)):
            if text:
                host, trust = host_of(text)
                if trust > 0:
                    return host
                if trust == 0:
                    weak = weak or host
    return weak


@functools.lru_cache(maxsize=65_536)
def host_of(text: str) -> tuple[str, int]:
    """Host in the text of a label, and how far it can be the name of a node.

    Returns:
        Host as `short_host`; 1: a name or address, 0: the id of a container or the exporter's word for itself, -1: the
        name of an exporter's pod, or no name.
    """
    host = short_host(text)
    if text.startswith("<<<") or _POD_NAME.search(host):
        return host, -1
    return host, 0 if host in _SELF or _CONTAINER.fullmatch(host) else 1


@functools.lru_cache(maxsize=65_536)  # a node's name comes with each series of it
def short_host(text: str) -> str:
    """A host name without port and domain; an address without port."""
    host = text
    if text.startswith("["):
        host = text[1:].split("]", 1)[0]
    elif text.count(":") == 1:
        host = text.split(":", 1)[0]
    return host if is_address(host) else host.split(".", 1)[0]


def is_address(host: str) -> bool:
    """It is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def identify(metric: Metric, labels: Mapping[str, str], node: str = "", lane: int | None = None) -> Identity | None:
    """Whose series it is.

    Args:
        metric: Row of the series' name.
        labels: Its labels.
        node: Name of the node when the caller knows it better than the labels.
        lane: Number of the NVLink when the series' name tells it.

    Returns:
        The identity; None when the series is not of the metric's kind of entity, does not match its `where`, or no
        label tells the node, link or port. Health, codes and links belong to the whole GPU: they have no job and
        instance. A fact of a job speaks of one GPU, or, with an empty UUID, of all of the node.
    """
    if metric.where and any(not _pattern(pattern).search(_label(labels, label)) for label, pattern in metric.where):
        return None
    fabric = labels.get(_FABRIC_NAME, "").split() if metric.entity == "port" else []
    node = (short_host(fabric[0]) if fabric else "") or node or node_name(labels)
    if not node:
        return None
    if metric.entity == "node":
        return Identity(node, "", None, "")
    if metric.entity == "port" and _label(labels, SWITCH_LABEL):
        lane = _link(labels)
        return None if lane is None else Identity(node, "", None, "", device=_switch(labels), port=str(lane))
    if metric.entity == "port":
        device = " ".join(fabric[1:]) or labels.get("local_guid", "") if fabric else _first(labels, DEVICE_LABELS)
        device, _, port = device.partition(":")
        port = _first(labels, PORT_LABELS) or port or "1"
        return Identity(node, "", None, "", device=device, port=port) if device else None
    if metric.entity == "link":
        lane = _link(labels) if lane is None else lane
        gpu = None if lane is None else _gpu(metric, labels, node)
        return None if gpu is None else Identity(node, gpu[0], None, "", link=lane)
    if metric.entity == "job":
        return Identity(node, *(_gpu(metric, labels, node) or ("", None)), _first(labels, JOB_LABELS))
    is_other = not _OTHER_ENTITIES.isdisjoint(labels) and any(labels.get(label) for label in _OTHER_ENTITIES)
    gpu = None if is_other else _gpu(metric, labels, node)
    if gpu is None:
        return None
    if metric.entity == "health":
        return Identity(node, gpu[0], None, "")
    if metric.entity == "xid":
        code = _first(labels, XID_LABELS)
        return Identity(node, gpu[0], None, "", xid=int(code) if _INDEX.fullmatch(code) else None)
    return Identity(node, *gpu, job_of(labels), *_instance(labels))


def _link(labels: Mapping[str, str]) -> int | None:
    match = _LINK.fullmatch(_first(labels, LINK_LABELS))
    return int(match[1]) if match and int(match[1]) <= _MAX_LINK else None


def _switch(labels: Mapping[str, str]) -> str:
    name = _label(labels, SWITCH_LABEL)
    return f"{SWITCH_LABEL}{name}" if _INDEX.fullmatch(name) else name


def _gpu(metric: Metric, labels: Mapping[str, str], node: str) -> tuple[str, int | None] | None:
    index, uuid = None, ""
    for name in INDEX_LABELS:
        if (text := _label(labels, name)) and _INDEX.fullmatch(text):
            index = int(text)
            break
    for name in UUID_LABELS:
        if (text := _label(labels, name)) and _is_id(text):
            uuid = text
            break
    if metric.name.startswith(SMI) and _BARE_UUID.fullmatch(uuid):
        uuid = f"GPU-{uuid}"  # nvidia_gpu_exporter strips the prefix that everyone else keeps
    if not uuid:
        return None if index is None else (f"{node}:{index}", index)
    return uuid, index


def _is_id(text: str) -> bool:
    return bool(text) and not text.startswith("<<<") and bool(text.strip("0-xN/A"))


def pod_of(labels: Mapping[str, str]) -> tuple[str, str, str]:
    """Namespace, name and uid of the pod in the labels; empty where they tell none.

    It is the pod that has the GPU, where the exporter maps them, else the exporter's own.
    """
    prefix = _EXPORTED if labels.get("exported_pod") else ""
    return (
        labels.get(prefix + "namespace", "") or labels.get("namespace", ""), labels.get(prefix + "pod", ""),
        _label(labels, "pod_uid"),
    )  # fmt: skip


def job_of(labels: Mapping[str, str]) -> str:
    """Id of the job that labels name; empty when none does."""
    job = _first(labels, JOB_LABELS)
    # `exported_job` is a job label that the exporter gave and Prometheus renamed; plain `job` is the scrape job. Beside
    # `exported_instance` it is the scrape job of another Prometheus.
    return job or ("" if labels.get("exported_instance") else labels.get("exported_job", ""))


def _instance(labels: Mapping[str, str]) -> tuple[str, str]:
    if instance := _label(labels, "GPU_I_ID"):
        return instance, _label(labels, "GPU_I_PROFILE")
    partition, kind = labels.get("gpu_partition_id", ""), labels.get("gpu_compute_partition_type", "").lower()
    return (partition, kind) if _INDEX.fullmatch(partition) and kind not in _WHOLE_GPU else ("", "")

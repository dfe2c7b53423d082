"""Prometheus text as exporters write it: dcgm-exporter per GPU; `host_pages.py` has what belongs to the node.

Names, types, labels and units are those of the real exporters, their oddities included (a rate declared counter,
MiB, MHz, percent). One template of bytes per node holds everything but the numbers and is rebuilt only when the jobs
on the node change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator import frames
from simulator.hardware import GPUS_PER_NODE, MIB
from simulator.host_pages import host_lines, rank_lines

if TYPE_CHECKING:
    from simulator.cluster import SimulatedCluster

DRIVER_VERSION = "550.144.03"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of dcgm-exporter: how it is declared and how it is made from a registry column.

    Attributes:
        column: Column of the sample.
        per_unit: The exporter's value = column × this.
        is_int: Printed without decimals; floats carry six, as dcgm-exporter prints them.
    """

    name: str
    type: str
    help: str
    column: str
    per_unit: float = 1.0
    is_int: bool = True


# The order and the help texts follow dcgm-exporter's default counters, then those that sites commonly add.
FAMILIES: tuple[Family, ...] = (
    Family("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).", "sm_clock_hz", 1e-6),
    Family("DCGM_FI_DEV_MEM_CLOCK", "gauge", "Memory clock frequency (in MHz).", "mem_clock_hz", 1e-6),
    Family("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Memory temperature (in C).", "mem_temp_c"),
    Family("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).", "gpu_temp_c"),
    Family("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).", "gpu_power_w", 1.0, False),
    Family(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Total energy consumption since boot (in mJ).", "energy_mj"
    ),
    Family("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %).", "gpu_util_ratio", 100.0),
    Family("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered.", "xid_last"),
    Family("DCGM_FI_DEV_FB_FREE", "gauge", "Framebuffer memory free (in MiB).", "fb_free_bytes", 1 / MIB),
    Family("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB).", "fb_used_bytes", 1 / MIB),
    Family("DCGM_FI_DEV_FB_RESERVED", "gauge", "Framebuffer memory reserved (in MiB).", "fb_reserved_bytes", 1 / MIB),
    Family(
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter", "Total number of NVLink bandwidth counters for all lanes.",
        "nvlink_both_bytes_per_s", 1 / 1_024_000,
    ),
    Family(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter",
        "Number of remapped rows for uncorrectable errors", "remapped_rows_total",
    ),
    Family(
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the graphics engine is active.",
        "engine_active_ratio", 1.0, False,
    ),
    Family(
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "Ratio of cycles the tensor (HMMA) pipe is active.",
        "tensor_active_ratio", 1.0, False,
    ),
    Family(
        "DCGM_FI_PROF_DRAM_ACTIVE", "gauge",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        "dram_active_ratio", 1.0, False,
    ),
    Family(
        "DCGM_FI_PROF_PCIE_TX_BYTES", "gauge",
        "The rate of data transmitted over the PCIe bus - including both protocol headers and data payloads - in bytes "
        "per second.", "pcie_tx_bytes_per_s",
    ),
    Family(
        "DCGM_FI_PROF_PCIE_RX_BYTES", "gauge",
        "The rate of data received over the PCIe bus - including both protocol headers and data payloads - in bytes "
        "per second.", "pcie_rx_bytes_per_s",
    ),
    Family(
        "DCGM_FI_PROF_SM_ACTIVE", "gauge", "The ratio of cycles an SM has at least 1 warp assigned.",
        "sm_active_ratio", 1.0, False,
    ),
    Family(
        "DCGM_FI_PROF_NVLINK_TX_BYTES", "gauge",
        "The rate of data transmitted over NVLink, not including protocol headers, in bytes per second.",
        "nvlink_tx_bytes_per_s",
    ),
    Family(
        "DCGM_FI_PROF_NVLINK_RX_BYTES", "gauge",
        "The rate of data received over NVLink, not including protocol headers, in bytes per second.",
        "nvlink_rx_bytes_per_s",
    ),
    Family(
        "DCGM_FI_DEV_GPU_TEMP_LIMIT", "gauge", "Thermal margin to the nearest slowdown threshold (in C).",
        "gpu_temp_margin_c",
    ),
    Family(
        "DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "gauge", "Effective power limit the driver enforces (in W).",
        "power_limit_w", 1.0, False,
    ),
    Family(
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "gauge", "Current clock event reasons (bitmask).", "throttle_bits"
    ),
    Family(
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", "Total number of double-bit volatile ECC errors.",
        "ecc_uncorrected_total",
    ),
    Family(
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "counter", "Total number of NVLink retries.",
        "nvlink_error_total",
    ),
)  # fmt: skip

STEP_TIMES = (
    ("weatherglass_step_time_seconds", "step_time_s", "Duration of the last training step, as the job reports it."),
    (
        "weatherglass_own_step_time_seconds",
        "own_step_time_s",
        "Time that this rank itself needed for it, without its wait for the others.",
    ),
)


class Exposition:
    """Text pages of the nodes of one cluster.

    A page is made when it is first asked for within a tick and kept for the rest of it.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        topology = cluster.topology
        self._labels = [
            f'gpu="{gpu % GPUS_PER_NODE}",UUID="{topology.uuids[gpu]}",pci_bus_id="{topology.pci_bus_ids[gpu]}",'
            f'device="nvidia{gpu % GPUS_PER_NODE}",modelName="{topology.model.name}",'
            f'Hostname="{topology.node_names[gpu // GPUS_PER_NODE]}"'
            for gpu in range(topology.gpus)
        ]
        self._templates: list[tuple[bytes, bytes] | None] = [None] * topology.nodes
        self._pages: list[bytes | None] = [None] * topology.nodes
        self._taken: frames.Sample | None = None
        self._values = np.zeros((topology.nodes, len(FAMILIES) * GPUS_PER_NODE))

    def refresh(self) -> None:
        """Take the newest sample; pages of the last one are dropped."""
        taken = frames.newest(self.cluster)
        if taken is self._taken:
            return
        self._taken = taken
        self._pages = [None] * len(self._pages)
        columns = dict(taken.gpu)
        columns["fb_free_bytes"] = columns["fb_total_bytes"] - columns["fb_used_bytes"] - columns["fb_reserved_bytes"]
        columns["nvlink_both_bytes_per_s"] = columns["nvlink_tx_bytes_per_s"] + columns["nvlink_rx_bytes_per_s"]
        for i, family in enumerate(FAMILIES):
            values = columns[family.column].reshape(-1, GPUS_PER_NODE) * family.per_unit
            if family.is_int:
                values = np.rint(values)
            self._values[:, i * GPUS_PER_NODE : (i + 1) * GPUS_PER_NODE] = values

    def page(self, node: int) -> bytes | None:
        """The exporter's answer for a node; None when the node is down."""
        self.refresh()
        taken = self._taken
        assert taken is not None
        if not taken.is_up[node]:
            return None
        page = self._pages[node]
        if page is None:
            page = self._pages[node] = self._fill(node, taken)
        return page

    def _fill(self, node: int, taken: frames.Sample) -> bytes:
        g = slice(node * GPUS_PER_NODE, (node + 1) * GPUS_PER_NODE)
        mark = taken.job_ids[g].tobytes() + taken.is_seen[g].tobytes()
        kept = self._templates[node]
        if kept is None or kept[0] != mark:
            kept = self._templates[node] = (mark, self._template(node, taken))
        values = self._values[node]
        if not taken.is_seen[g].all():
            values = values.reshape(len(FAMILIES), GPUS_PER_NODE)[:, taken.is_seen[g]].ravel()
        text = kept[1] % tuple(values.tolist())
        tail = []
        steps = taken.gpu["step_time_s"][g]
        if not np.isnan(steps).all():
            jobs = [self.cluster.jobs.get(int(code)) for code in taken.job_ids[g]]
            names = ["" if job is None else _escape(job.job_id) for job in jobs]
            host, uuids = self.cluster.topology.node_names[node], self.cluster.topology.uuids[g]
            for metric, column, meaning in STEP_TIMES:
                told = taken.gpu[column][g]
                tail += [f"# HELP {metric} {meaning}", f"# TYPE {metric} gauge"]
                for k in np.flatnonzero(~np.isnan(told) & taken.is_seen[g]).tolist():
                    label = f',hpc_job="{names[k]}"' if names[k] else ""
                    tail.append(f'{metric}{{gpu="{k}",UUID="{uuids[k]}",Hostname="{host}"{label}}} {told[k]:.3f}')
            physics = self.cluster.physics
            tail += rank_lines(node, taken, physics.steps, names, physics.rank)
        tail += host_lines(node, taken)
        return text + ("\n".join(tail) + "\n").encode()

    def _template(self, node: int, taken: frames.Sample) -> bytes:
        names = frames.job_names(self.cluster)
        labels = []
        for k in range(GPUS_PER_NODE):
            gpu = node * GPUS_PER_NODE + k
            if not taken.is_seen[gpu]:
                continue
            job = names.get(int(taken.job_ids[gpu]))
            text = f'{self._labels[gpu]},DCGM_FI_DRIVER_VERSION="{DRIVER_VERSION}"'
            labels.append(text + (f',hpc_job="{_escape(job)}"' if job is not None else ""))
        lines = []
        for family in FAMILIES:
            lines.append(f"# HELP {family.name} {family.help}".replace("%", "%%"))
            lines.append(f"# TYPE {family.name} {family.type}")
            number = "%d" if family.is_int else "%.6f"
            lines += [f"{family.name}{{{label.replace('%', '%%')}}} {number}" for label in labels]
        return ("\n".join(lines) + "\n").encode()


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

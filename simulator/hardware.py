"""What the simulated machines are made of: GPU models and the layout of nodes, racks and pods.

Constants of the hardware and names of its parts belong here, with where the figures come from. Nothing here changes
with time: temperatures and traffic live in `physics.py`, faults in `faults.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

GPUS_PER_NODE = 8
MIB = 2**20
GIB = 2**30
NVLINK_ACHIEVABLE_RATIO = 0.83  # 376-380 of 450 GB/s seen by NCCL on H100
PCI_BUS_IDS = ("18", "2A", "3A", "5D", "9A", "AB", "BA", "DB")


class SimulatorError(ValueError):
    """Something was asked of the simulator that it cannot do; the message names it and the valid choices."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """Figures of one GPU model.

    Attributes:
        name: Model name as exporters give it.
        memory_total_mib: Device memory in all, MiB.
        memory_reserved_mib: Held back by the driver, MiB.
        power_limit_w: Default enforced limit, W.
        power_idle_w: Drawn without any work, W.
        temp_limit_c: Core temperature at which the margin to slowdown is zero, °C.
        resistance_k_per_w: Thermal resistance from core to the air at the GPU, K/W.
        sm_clock_mhz: Highest clock of the multiprocessors, MHz.
        sm_clock_idle_mhz: The same without work, MHz.
        mem_clock_mhz: Memory clock, MHz.
        nvlink_bytes_per_s: NVLink capacity of one direction over all links, bytes/s.
        pcie_bytes_per_s: PCIe capacity of one direction, bytes/s.
    """

    name: str
    memory_total_mib: int
    memory_reserved_mib: int
    power_limit_w: float
    power_idle_w: float
    temp_limit_c: float
    resistance_k_per_w: float
    sm_clock_mhz: float
    sm_clock_idle_mhz: float
    mem_clock_mhz: float
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float

    @property
    def nvlink_achievable_bytes_per_s(self) -> float:
        """What collectives reach on one direction, bytes/s."""
        return NVLINK_ACHIEVABLE_RATIO * self.nvlink_bytes_per_s


# NVLink and temperature limits: vendor tables and `nvidia-smi -q` captures (an H100 at 41 °C shows a margin of 46).
# Resistances are chosen so that a full-speed GPU in 25 °C air settles 15-25 K below its limit, as such machines do.
GPU_MODELS: dict[str, GpuModel] = {
    model.name: model
    for model in (
        GpuModel("NVIDIA A100-SXM4-80GB", 81920, 729, 400, 55, 85, 0.092, 1410, 210, 1593, 300e9, 32e9),
        GpuModel("NVIDIA H100 80GB HBM3", 81559, 551, 700, 70, 87, 0.058, 1980, 345, 2619, 450e9, 64e9),
        GpuModel("NVIDIA H200", 143771, 608, 700, 75, 87, 0.058, 1980, 345, 3201, 450e9, 64e9),
        GpuModel("NVIDIA B200", 183359, 724, 1000, 140, 87, 0.039, 1965, 120, 3996, 900e9, 64e9),
    )
}


def gpu_model(name: str) -> GpuModel:
    """The named model.

    Raises:
        SimulatorError: It is not known; the message lists those that are.
    """
    if name not in GPU_MODELS:
        raise SimulatorError(f"no GPU model {name!r}; models: {', '.join(GPU_MODELS)}")
    return GPU_MODELS[name]


@dataclass(slots=True)
class Topology:
    """Names and places of nodes and GPUs. GPU k of node i has the flat number 8·i + k everywhere in the simulator.

    Attributes:
        node_names: One per node.
        rack_of: Rack number of each node.
        pod_of: Pod number of each node.
        uuids: GPU UUIDs, flat.
        pci_bus_ids: GPU PCI addresses, flat.
    """

    cluster: str
    model: GpuModel
    node_names: list[str]
    rack_of: np.ndarray
    pod_of: np.ndarray
    uuids: list[str]
    pci_bus_ids: list[str]
    node_numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def build(
        cls, nodes: int, seed: int, model: GpuModel, cluster: str, nodes_per_rack: int, racks_per_pod: int
    ) -> Topology:
        """Lay out a cluster. Raises SimulatorError when a size is below one."""
        for name, value in (("nodes", nodes), ("nodes_per_rack", nodes_per_rack), ("racks_per_pod", racks_per_pod)):
            if value < 1:
                raise SimulatorError(f"{name} = {value}: must be 1 or more")
        names = [f"n{i + 1}" for i in range(nodes)]
        racks = np.arange(nodes) // nodes_per_rack
        uuids = [_uuid(seed, cluster, i) for i in range(nodes * GPUS_PER_NODE)]
        buses = [f"00000000:{bus}:00.0" for bus in PCI_BUS_IDS] * nodes
        numbers = {name: i for i, name in enumerate(names)}
        return cls(cluster, model, names, racks, racks // racks_per_pod, uuids, buses, numbers)

    @property
    def nodes(self) -> int:
        return len(self.node_names)

    @property
    def gpus(self) -> int:
        return len(self.uuids)

    def rack_name(self, node: int) -> str:
        return f"r{self.rack_of[node] + 1}"

    def pod_name(self, node: int) -> str:
        return f"p{self.pod_of[node] + 1}"

    def node_number(self, name: str) -> int:
        """Number of a node. Raises SimulatorError for a name that is not in the cluster."""
        if name not in self.node_numbers:
            last = self.node_names[-1]
            raise SimulatorError(f"no node {name!r}; nodes: {self.node_names[0]} … {last}")
        return self.node_numbers[name]


def _uuid(seed: int, cluster: str, gpu: int) -> str:
    digest = hashlib.sha256(f"{seed}/{cluster}/{gpu}".encode()).hexdigest()
    return f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"

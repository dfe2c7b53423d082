"""What is exposed of a node beside its GPUs: node_exporter, ipmi_exporter, and what training jobs tell of themselves.

Names, types and labels are those of the real exporters; the text of GPUs is in `exposition.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from simulator.frames import Sample
from simulator.hardware import GPUS_PER_NODE


class Family(NamedTuple):
    """One metric: name, declared type, help, and the column it is made of."""

    name: str
    type: str
    help: str
    column: str


_IB = "node_infiniband_"
PORTS = (
    Family(f"{_IB}port_data_transmitted_bytes_total", "counter", "Number of data octets transmitted on all links",
           "tx_bytes_total"),
    Family(f"{_IB}port_data_received_bytes_total", "counter", "Number of data octets received on all links",
           "rx_bytes_total"),
    Family(f"{_IB}port_transmit_wait_total", "counter",
           "Number of ticks during which the port had data to transmit but no data was sent during the entire tick",
           "transmit_wait_total"),
    Family(f"{_IB}np_ecn_marked_roce_packets_received_total", "counter",
           "Number of RoCEv2 packets received by the notification point which were marked for experiencing congestion",
           "ecn_marked_total"),
    Family(f"{_IB}np_cnp_packets_sent_total", "counter",
           "Number of CNP packets sent by the notification point when it noticed congestion", "cnp_total"),
    Family(f"{_IB}packet_sequence_errors_total", "counter", "Number of received NAK sequence error packets",
           "retransmits_total"),
)  # fmt: skip
_STATE = (
    Family(f"{_IB}rate_bytes_per_second", "gauge", "Maximum signal transfer rate", "speed_bytes_per_s"),
    Family(f"{_IB}state_id", "gauge",
           "State of the InfiniBand port (0: no change, 1: down, 2: init, 3: armed, 4: active, 5: act defer)", ""),
)  # fmt: skip
_MEMORY = (
    Family("node_memory_MemAvailable_bytes", "gauge", "Memory information field MemAvailable_bytes.",
           "host_mem_available_bytes"),
    Family("node_memory_MemTotal_bytes", "gauge", "Memory information field MemTotal_bytes.", "host_mem_total_bytes"),
)  # fmt: skip
STEP, STEP_TIME = "training_step", "training_step_time_seconds"


def host_lines(node: int, taken: Sample) -> Iterator[str]:
    """Sensors, host memory and the port of a node.

    Args:
        node: Its number.
        taken: The sample.
    """
    yield from _head("ipmi_temperature_celsius", "gauge", "Temperature reading in degree Celsius.")
    yield f'ipmi_temperature_celsius{{id="18",name="Inlet Temp"}} {taken.node["inlet_temp_c"][node]:g}'
    yield from _head("ipmi_dcmi_power_consumption_current_watts", "gauge", "Current power consumption in Watts.")
    yield f"ipmi_dcmi_power_consumption_current_watts {taken.node['node_power_w'][node]:.0f}"
    for family in _MEMORY:
        yield from _head(family.name, family.type, family.help)
        yield f"{family.name} {taken.node[family.column][node]:.0f}"
    yield from _head("node_vmstat_oom_kill", "untyped", "/proc/vmstat information field oom_kill.")
    yield "node_vmstat_oom_kill 0"
    labels = '{device="mlx5_0",port="1"}'
    for family in PORTS:
        yield from _head(family.name, family.type, family.help)
        yield f"{family.name}{labels} {taken.counted[family.column][node]:.0f}"
    for family in _STATE:
        yield from _head(family.name, family.type, family.help)
        yield f"{family.name}{labels} {taken.port[family.column][node] if family.column else 4:.0f}"


def rank_lines(node: int, taken: Sample, steps: np.ndarray, names: list[str], ranks: np.ndarray) -> Iterator[str]:
    """Steps done and the own time of the last one, of each rank on a node whose job tells of it.

    Args:
        node: Its number.
        taken: The sample.
        steps: Steps done, over GPUs.
        names: Escaped id of the job on each GPU of the node.
        ranks: Rank of each GPU in its job, over GPUs.
    """
    g = slice(node * GPUS_PER_NODE, (node + 1) * GPUS_PER_NODE)
    telling = np.flatnonzero(~np.isnan(taken.own_step_s[g]) & taken.is_seen[g]).tolist()
    if not telling:
        return
    labels = {k: f'{{job_id="{names[k]}",rank="{ranks[g.start + k]}"}}' for k in telling}
    yield from _head(STEP, "gauge", "Training steps that are done.")
    yield from (f"{STEP}{labels[k]} {int(steps[g.start + k])}" for k in telling)
    yield from _head(STEP_TIME, "gauge", "Duration of the last step of this rank, without its wait for the others.")
    yield from (f"{STEP_TIME}{labels[k]} {taken.own_step_s[g.start + k]:.4f}" for k in telling)


def _head(name: str, type_: str, help_: str) -> Iterator[str]:
    yield f"# HELP {name} {help_}"
    yield f"# TYPE {name} {type_}"

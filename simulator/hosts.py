"""What hosts and their ports show beside the GPUs: traffic and trouble of one port a node, memory of the host.

Follows from the jobs that run and the strains that act; nothing is kept here but what ports have counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from simulator.hardware import GIB, GPUS_PER_NODE
from simulator.physics import Physics
from simulator.strains import HOST_FLOOR_RATIO, Strain
from simulator.streams import Stream, generator

PORT_BYTES_PER_S = 50e9  # NDR, one port a node
HOST_BYTES = 2048 * GIB
HOST_BUSY_RATIO, HOST_IDLE_RATIO = 0.45, 0.05  # host memory of a full node, and of one without jobs
MARKS_PER_S, NOTICES_PER_S, WAITS_PER_S = 400.0, 300.0, 2e5  # of a port at its usual load


def port_rates(physics: Physics, active: Iterable[Strain], when: float, noise: np.ndarray) -> dict[str, np.ndarray]:
    """Rates of the one port of each node, in columns of `core_port_samples`.

    Ports carry the traffic of jobs on several nodes: 45-70 % of the speed while they train.

    Args:
        physics: The jobs and their nodes.
        active: Strains that act.
        when: Seconds since the epoch.
        noise: A standard normal number a node.
    """
    n = physics.topology.nodes
    load = np.zeros(n)
    for id_, members in physics.members.items():
        first, last = physics.node_of[members[0]], physics.node_of[members[-1]]
        if first == last:  # GPUs of a job are in order
            continue
        nodes = np.unique(physics.node_of[members])
        if physics.step0[members[0]] > 0:
            load[nodes] = 0.45 + 0.25 * (id_ * 0.618 % 1)
    sway = 1 + 0.05 * noise
    marks, waits, lost = load * MARKS_PER_S * sway, load * WAITS_PER_S * sway, np.zeros(n)
    for strain in active:
        level = strain.level(when)
        if strain.class_ != "fabric_congestion" or level <= 0:
            continue
        k = strain.nodes
        if strain.mode == "incast":
            load[k] = np.minimum(load[k] + 0.2 * level, 0.96)
            marks[k] *= 1 + 60 * level
            waits[k] *= 1 + 40 * level
        else:
            lost[k] += 200 * level
    rate = load * PORT_BYTES_PER_S * (1 + 0.01 * noise)
    return {
        "tx_bytes_per_s": rate, "rx_bytes_per_s": rate * 0.99, "speed_bytes_per_s": np.full(n, PORT_BYTES_PER_S),
        "transmit_wait_per_s": waits, "ecn_marked_per_s": marks, "cnp_per_s": marks * NOTICES_PER_S / MARKS_PER_S,
        "retransmits_per_s": lost,
    }  # fmt: skip


def host_available_bytes(physics: Physics, active: Iterable[Strain], when: float) -> np.ndarray:
    """Host memory that is available on each node, bytes."""
    busy = physics.busy.reshape(-1, GPUS_PER_NODE).mean(axis=1)
    used = HOST_IDLE_RATIO + HOST_BUSY_RATIO * busy
    for strain in active:
        if strain.class_ == "host_memory":
            # Level 1 leaves HOST_FLOOR_RATIO.
            k, level = strain.nodes, strain.level(when)
            room = 1 - HOST_FLOOR_RATIO * 0.999 - used[k]
            used[k] = np.minimum(used[k] + room * level, 0.997)
    return (1 - used) * HOST_BYTES


class PortCounters:
    """What the port of each node has counted since its driver was loaded, at rates that hold until the next look.

    Args:
        nodes: How many there are.
        seed: Seed of what they had counted before.
        start: Seconds since the epoch from which on they count.
    """

    # Column of `raw_port_samples` → of the rates.
    COUNTED: Mapping[str, str] = {
        "tx_bytes_total": "tx_bytes_per_s", "rx_bytes_total": "rx_bytes_per_s",
        "transmit_wait_total": "transmit_wait_per_s", "ecn_marked_total": "ecn_marked_per_s",
        "cnp_total": "cnp_per_s", "retransmits_total": "retransmits_per_s",
    }  # fmt: skip

    def __init__(self, nodes: int, seed: int, start: float) -> None:
        rng = generator(seed, Stream.PORTS)
        self._totals = {name: np.floor(10 ** rng.uniform(4, 9, nodes)) for name in self.COUNTED}
        self._at = start

    def read(self, when: float, rates: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Counts at `when`, whole numbers.

        Args:
            when: Seconds since the epoch.
            rates: As of `port_rates`; taken to have held since the last look.
        """
        span, self._at = max(when - self._at, 0.0), when
        for name, rate in self.COUNTED.items():
            self._totals[name] += np.maximum(rates[rate], 0.0) * span
        return {name: np.floor(total) for name, total in self._totals.items()}

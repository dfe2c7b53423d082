"""Hardware that breaks: when each node faults, of what, with which warnings, and how long the repair takes.

Pure draws from the seed: fault k of node i depends on nothing else. What a fault does to jobs and exporters is up to
`cluster.py`; bottlenecks that pass by themselves are in `events.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from simulator.hardware import GPUS_PER_NODE
from simulator.streams import Stream, generator

# 349 faults in 400 nodes × 209 days of an LLM cluster (InfiniteHBD 2024): 4.2 per 1,000 node-days; Meta's research
# clusters report 2.3 and 6.5.
FAULTS_PER_NODE_DAY = 4.2e-3
# Counts per node there: variance 2.0 at mean 0.87, as a gamma frailty of this shape gives.
FRAILTY_SHAPE = 0.66
LEMON_RATIO = 0.02  # Meta: 1.2 % of nodes; Lablup: 3 of 63 nodes made half of the exclusions
LEMON_FACTOR = 15.0
# Repair: quartiles 2.8, 32 and 111 hours in the same recording: restarts and part swaps mixed.
REBOOT_RATIO = 0.4
REBOOT_MEDIAN_S, REBOOT_SIGMA = 1.5 * 3600, 1.0
SWAP_MEDIAN_S, SWAP_SIGMA = 60 * 3600, 0.9
P_PRECURSOR = 0.3  # 2 of 10 XID failures were seen beforehand (Lablup); memory faults more often
# Kind of fault: (name, XID or None, weight, warns with). GPU and memory lead, as in the Llama-3 interruptions.
KINDS: tuple[tuple[str, int | None, float, str], ...] = (
    ("gpu_fallen_off_bus", 79, 0.25, ""),
    ("gpu_double_bit_ecc", 48, 0.16, "ecc"),
    ("gpu_uncontained_memory", 95, 0.08, "ecc"),
    ("gpu_row_remap_failed", 64, 0.03, "ecc"),
    ("nvlink", 74, 0.10, "nvlink"),
    ("gpu_firmware_timeout", 119, 0.10, ""),
    ("node_power", None, 0.08, ""),
    ("node_crash", None, 0.12, ""),
    ("network", None, 0.08, ""),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One coming fault of one node. Times are seconds since the epoch.

    Attributes:
        gpu: Flat number of the GPU at fault; -1 for a fault of the node.
        unreachable_at: When the node's exporter stops answering.
        warnings: (time, "ecc" or "nvlink", how many errors) before the fault.
    """

    number: int
    node: int
    gpu: int
    kind: str
    xid: int | None
    at: float
    unreachable_at: float
    repaired_at: float
    warnings: tuple[tuple[float, str, int], ...]


class Hazards:
    """How likely each node is to fault, and its faults one after another.

    Attributes:
        per_second: Hazard of each node, 1/s; its mean over many nodes is the base rate × `scale`.
        is_lemon: Nodes much worse than the rest.
    """

    def __init__(self, nodes: int, seed: int, scale: float) -> None:
        """`scale` multiplies the rate and divides repair times, so that availability stays as it is in life."""
        self.seed = seed
        self.repair_scale = max(scale, 1.0)
        rng = generator(seed, Stream.NODE_FAULT, 0xFFFFFFFF)
        frailty = rng.gamma(FRAILTY_SHAPE, 1 / FRAILTY_SHAPE, nodes)
        self.is_lemon = rng.random(nodes) < LEMON_RATIO
        if nodes >= 16 and not self.is_lemon.any():
            self.is_lemon[int(rng.integers(nodes))] = True
        mean = 1 + LEMON_RATIO * (LEMON_FACTOR - 1)
        factor = np.where(self.is_lemon, LEMON_FACTOR, frailty) / mean
        self.per_second = FAULTS_PER_NODE_DAY * scale / 86_400 * factor

    def next(self, node: int, number: int, after: float) -> Fault | None:
        """Fault `number` of a node, at the earliest `after`; None when it never faults."""
        hazard = float(self.per_second[node])
        if hazard <= 0:
            return None
        rng = generator(self.seed, Stream.NODE_FAULT, node, number)
        at = after + float(rng.exponential(1 / hazard))
        weights = np.array([kind[2] for kind in KINDS])
        name, xid, _, warns = KINDS[int(rng.choice(len(KINDS), p=weights / weights.sum()))]
        # A lemon breaks at the same GPU again and again.
        worst = int(generator(self.seed, Stream.NODE_FAULT, node, 0xFFFFFF).integers(GPUS_PER_NODE))
        local = worst if self.is_lemon[node] and rng.random() < 0.7 else int(rng.integers(GPUS_PER_NODE))
        gpu = node * GPUS_PER_NODE + local if xid is not None else -1
        if rng.random() < REBOOT_RATIO:
            repair = float(rng.lognormal(math.log(REBOOT_MEDIAN_S), REBOOT_SIGMA))
        else:
            repair = float(rng.lognormal(math.log(SWAP_MEDIAN_S), SWAP_SIGMA))
        warnings: list[tuple[float, str, int]] = []
        if warns and rng.random() < P_PRECURSOR * (2 if warns == "ecc" else 1):
            lead = float(rng.lognormal(math.log(4 * 3600), 1.2))
            for _ in range(int(rng.integers(1, 6))):
                count = int(rng.integers(1, 3)) if warns == "ecc" else int(rng.integers(5, 400))
                warnings.append((at - lead * float(rng.uniform(0.02, 1)), warns, count))
        silent_s = float(rng.uniform(20, 180)) if xid is not None else 0.0
        repaired = at + max(600.0, repair / self.repair_scale) + silent_s
        return Fault(
            number, node, gpu, name, xid, math.floor(at), math.floor(at + silent_s), math.floor(repaired),
            tuple(sorted(w for w in warnings if w[0] > after)),
        )  # fmt: skip

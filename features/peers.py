"""How a GPU stands against the others of its job, its node and its rack at one moment.

Here belongs what is told from the newest samples of many GPUs; the course of one stands in `features/windows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Below this distance a sample counts as near its limit, in the unit of the class's distance.
NEAR = {
    "thermal_throttle": 6.0, "power_throttle": 0.1, "nvlink_saturation": 0.15, "memory_exhaustion": 6.0,
    "straggler": 0.15,
}  # fmt: skip
PEERS = (
    "job_peers_difference", "node_peers_difference", "node_peers_near_ratio", "rack_peers_difference",
    "rack_peers_near_ratio", "node_neighbours_temp_c", "rack_neighbours_temp_c",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The newest of every GPU at one moment, each of shape (gpus,).

    Attributes:
        distance: To the limit of the class.
        temp_c: Core temperature.
        is_fresh: Which GPUs are fresh enough to count.
        job: Job codes, -1 for none.
        node: Node codes ≥ 0.
        rack: Rack codes, -1 where not known.
    """

    distance: Floats
    temp_c: Floats
    is_fresh: NDArray[np.bool_]
    job: Ints
    node: Ints
    rack: Ints


def peer_features(bottleneck_class: str, of: Neighbours, rows: Ints) -> Floats:
    """How some GPUs stand against their peers.

    Args:
        bottleneck_class: The class.
        of: All GPUs.
        rows: GPUs to give features for.

    Returns:
        Shape (len(rows), len(PEERS)); NaN where there are no peers.
    """
    out = np.full((len(rows), len(PEERS)), np.nan, dtype=np.float32)
    counts = of.is_fresh & ~np.isnan(of.distance)
    near = np.where(counts, of.distance <= NEAR[bottleneck_class], 0).astype(np.float64)
    for column, codes in ((0, of.job), (1, of.node), (3, of.rack)):
        mean = _others(of.distance, counts, codes, rows)
        out[:, column] = np.where(counts[rows], of.distance[rows] - mean, np.nan)
    for column, codes in ((2, of.node), (4, of.rack)):
        out[:, column] = _others(near, counts, codes, rows)
    measured = of.is_fresh & ~np.isnan(of.temp_c)
    for column, codes in ((5, of.node), (6, of.rack)):
        out[:, column] = _others(of.temp_c, measured, codes, rows)
    return out


def _others(values: NDArray, counts: NDArray[np.bool_], codes: Ints, rows: Ints) -> NDArray[np.float64]:
    """Mean over the others of each row's group, NaN without others or group."""
    weight, value = counts.astype(np.float64), np.where(counts, values, 0).astype(np.float64)
    shifted = codes + 1
    group = shifted[rows]
    n = np.bincount(shifted, weights=weight)[group] - weight[rows]
    total = np.bincount(shifted, weights=value)[group] - value[rows]
    return np.where((n >= 1) & (group > 0), total / np.maximum(n, 1), np.nan)

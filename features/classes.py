"""Names of the bottleneck classes that are forecast, for all that lists them. Imports nothing heavy.

What each means stands in `features/labels.py`; how near a GPU is to it in `features/conditions.py`, how near a node, a
port or a queue is in `features/unit_conditions.py`.
"""

from __future__ import annotations

from typing import Literal, get_args

GpuClass = Literal["thermal_throttle", "power_throttle", "nvlink_saturation", "memory_exhaustion", "straggler"]
UnitClass = Literal["host_memory", "fabric_congestion", "shortage"]
HintClass = Literal[GpuClass, UnitClass]
GPU_CLASSES: tuple[GpuClass, ...] = get_args(GpuClass)
CLASSES: tuple[str, ...] = GPU_CLASSES
HINT_CLASSES: tuple[HintClass, ...] = (*GPU_CLASSES, *get_args(UnitClass))

"""Names of the bottleneck classes of single GPUs, for all that lists them. Imports nothing heavy.

What each means stands in `features/labels.py`, how near a GPU is to it in `features/conditions.py`.
"""

from __future__ import annotations

from typing import Literal, get_args

GpuClass = Literal["thermal_throttle", "power_throttle", "nvlink_saturation", "memory_exhaustion", "straggler"]
GPU_CLASSES: tuple[GpuClass, ...] = get_args(GpuClass)
CLASSES: tuple[str, ...] = GPU_CLASSES

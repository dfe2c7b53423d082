"""Why a GPU, node, link or queue is foreseen to be in trouble, in words and figures, and when.

Here belongs what a row of features says; what several units have in common stands in `cause_words.py`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from features.straggler import SLOW_RATIO
from features.windows import FeatureBlock
from scheduler_hints.schema import HORIZONS_S


def expected_onset_s(p: NDArray[np.float64]) -> float:
    """Seconds to the onset, given that it comes within the last horizon, from P by horizon."""
    # In plain numbers: there are thousands of hints a tick, and four horizons are too few for arrays to pay.
    mass = [later - sooner for sooner, later in pairwise((0.0, *p.tolist()))]
    total = sum(mass)
    if total <= 0:
        return float(HORIZONS_S[-1])
    middles = [(sooner + later) / 2 for sooner, later in pairwise((0, *HORIZONS_S))]
    return round(sum(part * middle for part, middle in zip(mass, middles, strict=True)) / total, 1)


def reason(block: FeatureBlock, row: int, *, is_active: bool) -> str:
    """Why, in words and figures."""
    value = {
        name: float(block.column(name)[row])
        for name in ("last", "slope_short", "gpu_temp_c_last", "nvlink_fill_ratio_last", "step_ratio_last",
                     "over_plateau_gib_last", "inlet_temp_c_last", "gpu_power_w_last", "sm_clock_hz_last")
    }  # fmt: skip
    known = {name: not math.isnan(number) for name, number in value.items()}
    per_min = value["slope_short"] * 60
    if block.bottleneck_class == "thermal_throttle":
        text = "at the slowdown limit" if is_active else f"{value['last']:.1f} °C below the slowdown limit"
        text += f" at {value['gpu_temp_c_last']:.0f} °C" if known["gpu_temp_c_last"] else ""
        text += f", {-per_min:+z.1f} °C/min" if known["slope_short"] else ""
        return text + (f", inlet air {value['inlet_temp_c_last']:.0f} °C" if known["inlet_temp_c_last"] else "")
    if block.bottleneck_class == "nvlink_saturation":
        text = f"NVLink at {value['nvlink_fill_ratio_last']:.0%} of the achievable rate"
        text += f", {-per_min:+z.0%}/min" if known["slope_short"] else ""
        return text + (
            f", steps take {value['step_ratio_last']:.2f} × the job's own" if known["step_ratio_last"] else ""
        )
    if block.bottleneck_class == "power_throttle":
        text = "held back by power" if is_active else f"{value['last']:.0%} of its usual clock above being held back"
        text += f", {value['sm_clock_hz_last'] / 1e9:.2f} GHz" if known["sm_clock_hz_last"] else ""
        text += f" at {value['gpu_power_w_last']:.0f} W" if known["gpu_power_w_last"] else ""
        return text + (f", {per_min:+z.0%}/min" if known["slope_short"] else "")
    if block.bottleneck_class == "straggler":
        text = f"steps take {SLOW_RATIO - value['last']:.2f} × the gang's"
        return text + (f", {-per_min:+z.2f}/min" if known["slope_short"] else "")
    free = value["last"] + 1  # the limit is 1 GiB of free memory
    text = f"{max(free, 0):.1f} GiB of device memory free"
    text += (
        f", {value['over_plateau_gib_last']:.1f} GiB over the job's plateau" if known["over_plateau_gib_last"] else ""
    )
    return text + (f", {-per_min:+z.2f} GiB/min" if known["slope_short"] else "")


def unit_reason(block: FeatureBlock, row: int, *, is_active: bool) -> str:
    """Why a node, link or queue, in words and figures."""

    def value(name: str) -> float | None:
        number = float(block.column(name)[row])
        return None if np.isnan(number) else number

    pace = value("slope_short")
    if block.bottleneck_class == "host_memory":
        free = value("host_free_ratio_last")
        text = "the kernel killed for memory" if free is None else f"{free:.1%} of host memory available"
        return text + (f", {pace * 60:+z.1%} of it a minute" if pace is not None and not is_active else "")
    if block.bottleneck_class == "fabric_congestion":
        load, signs = value("port_load_ratio_last"), value("port_signs_ratio_last")
        steps = value("port_step_ratio_last")
        parts = [
            f"port at {load:.0%} of its speed" if load is not None else "",
            f"congestion signs at {signs:.1f} × their limit" if signs is not None else "",
            f"steps take {steps:.2f} × the job's own" if steps is not None else "",
        ]
        return ", ".join(part for part in parts if part)
    pending, idle = value("pending_gpu_num_last"), value("idle_gpu_num_last")
    wanted = "an unknown number of" if pending is None else f"{pending:.0f}"
    text = f"{wanted} GPUs wanted by waiting jobs" + ("" if idle is None else f", {idle:.0f} idle")
    ago = value("since_short_min")
    return text + (f", last short {ago:.0f} min ago" if not is_active and ago is not None and ago < 1_440 else "")

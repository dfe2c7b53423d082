"""What the bottleneck forecaster learns of nodes, ports and queues, beside the course of their distance.

Here belong choices of features and of parameters by class; the learner stands in `models/bottleneck.py`, the windows in
`features/unit_windows.py`. Queues go by their long memory and by trees of three leaves, as `models/shortage.py` found
on recorded occupancy: a few hundred onsets are all that weeks of a cluster hold.
"""

from __future__ import annotations

from typing import Any

from features.queue_memory import MEMORY

UNIT_USED = {
    "host_memory": ("host_free_ratio_change", "host_free_ratio_slope"),
    "fabric_congestion": (
        "port_load_ratio_last", "port_load_ratio_change", "port_signs_ratio_last", "port_signs_ratio_change",
        "port_signs_ratio_slope", "port_step_ratio_last", "port_step_ratio_change", "port_step_ratio_slope",
    ),
    "shortage": (
        *(name for name in MEMORY if name != "remembered_min"), "pending_gpu_num_last", "idle_gpu_num_change",
        "running_gpu_num_last",
    ),
}  # fmt: skip
UNIT_MONOTONE = {"port_step_ratio_last": 1, "port_signs_ratio_last": 1}
UNIT_PARAMETERS: dict[str, dict[str, Any]] = {
    "shortage": {
        "num_leaves": 3, "learning_rate": 0.05, "min_data_in_leaf": 200, "lambda_l2": 20.0, "feature_fraction": 0.3,
        "bagging_fraction": 0.7, "max_bin": 63,
    },
}  # fmt: skip

"""Limits per GPU model: where a GPU slows down, and what its links really carry.

Here belong numbers with their sources and the look-up by model name. How near a sample is to a limit stands in
`features/conditions.py`; overrides come from the configuration through `ThresholdBook`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

GIB = float(2**30)
# Share of the nominal NVLink rate that a collective reaches: 376-380 of 450 GB/s and 749 of 900 GB/s per H100
# (github.com/NVIDIA/nccl, issue 1264).
ACHIEVABLE_RATIO = 0.83


class ThresholdError(ValueError):
    """An override names a limit that does not exist or gives it an impossible value."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of one GPU model; NaN where the limit is not known, so that its class gets no label.

    Attributes:
        slowdown_temp_c: Core temperature at which clocks are cut, °C; used only where the exporter gives neither a
            margin nor a slowdown flag.
        nvlink_one_way_bytes_per_s: Rate that all NVLinks of a GPU together achieve in one direction, bytes/s.
        memory_floor_bytes: Free device memory under which memory counts as exhausted, bytes.
        nvlink_full_ratio: Share of the achievable rate from which the links count as saturated.
        step_slow_ratio: Step time against the job's own from which a step counts as slowed.
        peer_slow_ratio: NVLink rate against gang peers under which a GPU counts as slowed.
        plateau_growth_ratio: Growth over the job's own memory plateau that counts, as a share of device memory.
        clock_low_ratio: Clock against the job's own median under which a power-capped GPU counts as held back. No
            figure is published: the hardware brake halves clocks at least (NVML, `HwSlowdown`), phases of a healthy
            capped job move them by some 10 %; this stands between.
        port_full_ratio: Share of a port's speed from which it counts as full.
        port_burst_ratio: Rate of congestion signs against the port's own median from which it counts. An assumption.
        port_ecn_per_s, port_cnp_per_s: Marked packets and notifications a second from which a port may count. No
            figure is published; RoCE with ECN marks some packets at full speed. An assumption.
        port_retransmits_per_s: Retransmissions a second from which a port may count: healthy lossless fabrics have
            next to none. An assumption.
        port_wait_ticks_per_s: Ticks of transmit-wait a second from which a port may count; the length of a tick
            differs from device to device. An assumption.
        host_memory_floor_ratio: Share of host memory under which what is available counts as exhausted, if it fell by
            as much. An assumption: earlyoom acts at 10 %, the kubelet at 100 MiB.
    """

    slowdown_temp_c: float = math.nan
    nvlink_one_way_bytes_per_s: float = math.nan
    memory_floor_bytes: float = GIB
    nvlink_full_ratio: float = 0.90
    step_slow_ratio: float = 1.15
    peer_slow_ratio: float = 0.70
    plateau_growth_ratio: float = 0.02
    clock_low_ratio: float = 0.80
    port_full_ratio: float = 0.90
    port_burst_ratio: float = 3.0
    port_ecn_per_s: float = 1_000.0
    port_cnp_per_s: float = 1_000.0
    port_retransmits_per_s: float = 10.0
    port_wait_ticks_per_s: float = 1e6
    host_memory_floor_ratio: float = 0.02


def _nvlink(both_ways_gb_per_s: float) -> float:
    return both_ways_gb_per_s / 2 * 1e9 * ACHIEVABLE_RATIO


# The first pattern found in the model name wins: longer, rarer names stand first. Slowdown temperatures are those of
# `nvidia-smi -q` (GPU Slowdown Temp); newer drivers print margins instead, which need no number here. NVLink figures
# are nominal, both directions: NVLink 2 300, NVLink 3 600, NVLink 4 900, NVLink 5 1800 GB/s per GPU; boards sold
# with reduced links have less.
MODELS: tuple[tuple[str, Thresholds], ...] = (
    ("A800", Thresholds(89.0, _nvlink(400))),  # nvidia-smi: shutdown 92, slowdown 89, max operating 85
    ("A100", Thresholds(89.0, _nvlink(600))),  # as A800
    ("H800", Thresholds(89.0, _nvlink(400))),
    ("H100 PCIE", Thresholds(89.0, _nvlink(600))),  # NVLink bridges, 600 GB/s
    ("H100 NVL", Thresholds(89.0, _nvlink(600))),
    ("GH200", Thresholds(89.0, _nvlink(900))),
    ("H100", Thresholds(89.0, _nvlink(900))),  # nvidia-smi, older drivers: shutdown 92, slowdown 89, max operating 87
    ("H200", Thresholds(89.0, _nvlink(900))),
    ("GB200", Thresholds(87.0, _nvlink(1800))),  # about 87 by github.com/leptonai/gpud
    ("GB300", Thresholds(87.0, _nvlink(1800))),
    ("B200", Thresholds(87.0, _nvlink(1800))),
    ("B300", Thresholds(87.0, _nvlink(1800))),
    ("V100", Thresholds(87.0, _nvlink(300))),  # nvidia-smi: shutdown 90, slowdown 87, max operating 83
    ("RTX 4080", Thresholds(96.0)),  # nvidia-smi: shutdown 101, slowdown 96; no NVLink
    ("RTX 2080", Thresholds(97.0)),  # nvidia-smi: shutdown 100, slowdown 97; NVLink bridge not rated here
)
_NAMES = tuple(field.name for field in fields(Thresholds))


def thresholds_for(gpu_model: str | None) -> Thresholds:
    """Limits of a model by its exporter's name; limits that are not known are NaN.

    Args:
        gpu_model: Name such as `NVIDIA H100 80GB HBM3`; None when unknown.
    """
    name = (gpu_model or "").upper().replace("-", " ").replace("_", " ")
    for pattern, limits in MODELS:
        if pattern in name:
            return limits
    return Thresholds()


class ThresholdBook:
    """Limits of every node of a cluster.

    Args:
        model_by_node: Node name to GPU model name.
        default_model: Model of nodes that are not listed; None: unknown.
        overrides: Part of a model name (`*`: any, and nodes of no known model) to limits that replace the built-in
            ones, from the configuration.

    Raises:
        ThresholdError: An override is not a limit, or not a positive number.
    """

    def __init__(
        self,
        model_by_node: Mapping[str, str | None] | None = None,
        *,
        default_model: str | None = None,
        overrides: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self.model_by_node = dict(model_by_node or {})
        self.default_model = default_model
        self._overrides = {key: dict(value) for key, value in (overrides or {}).items()}
        for model, limits in self._overrides.items():
            if not model:
                raise ThresholdError("thresholds of '': give a part of a model's name, as 'H100', or '*' for any")
            for name, value in limits.items():
                if name not in _NAMES:
                    near = difflib.get_close_matches(name, _NAMES, n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise ThresholdError(
                        f"thresholds of {model!r}: no limit {name!r}; limits: {', '.join(_NAMES)}{hint}"
                    )
                if not value > 0:
                    raise ThresholdError(f"thresholds of {model!r}: {name} = {value!r}: must be above 0")

    @classmethod
    def from_nodes(cls, nodes: pl.DataFrame | None, **kwargs: object) -> ThresholdBook:
        """From `core_nodes` rows; without a `gpu_model` column every model is the default."""
        models: dict[str, str | None] = {}
        if nodes is not None and {"node", "gpu_model"} <= set(nodes.columns):
            models = dict(nodes.select("node", "gpu_model").iter_rows())
            known = sorted({model for model in models.values() if model})
            if len(known) == 1:  # a cluster of one model: nodes the inventory has not yet are of it too
                kwargs.setdefault("default_model", known[0])
        return cls(models, **kwargs)  # ty: ignore[invalid-argument-type]

    def of_model(self, gpu_model: str | None) -> Thresholds:
        """Limits of a model with overrides applied."""
        limits = thresholds_for(gpu_model)
        for pattern, values in self._overrides.items():
            if pattern == "*" or (gpu_model and pattern.upper() in gpu_model.upper()):
                limits = replace(limits, **values)
        return limits

    def of_node(self, node: str) -> Thresholds:
        """Limits of the GPUs of a node."""
        return self.of_model(self.model_by_node.get(node) or self.default_model)

    def arrays(self, nodes: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Limits of many nodes.

        Returns:
            Name of the limit to an array of shape (len(nodes),).
        """
        cache: dict[str | None, tuple[float, ...]] = {}
        rows = []
        for node in nodes:
            model = self.model_by_node.get(node) or self.default_model
            if model not in cache:
                limits = self.of_model(model)
                cache[model] = tuple(getattr(limits, name) for name in _NAMES)
            rows.append(cache[model])
        table = np.asarray(rows, dtype=np.float32).reshape(len(rows), len(_NAMES))
        return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(_NAMES)}

"""How often disturbances happen: base rates of every class by preset, and what they rest on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.hardware import SimulatorError

# Llama 3 (Grattafiori 2024, table 5): 419 unexpected interruptions of 16,384 GPUs in 54 days, by cause.
_LLAMA_GPU_HOURS = 16_384 * 54 * 24.0
_LLAMA_ALL, _LLAMA_GPU, _LLAMA_NETWORK, _LLAMA_HEAT, _LLAMA_POWER = 419, 148, 35, 6, 3
# Meta's research clusters (Kokolis 2025): 0.1 % of 4 M jobs ended OUT_OF_MEMORY in 150 M GPU-hours.
_META_OUT_OF_MEMORY = 4_000 / 150e6


@dataclass(frozen=True, slots=True)
class Rates:
    """Base rates. No published rate of these onsets is known; these are assumptions, to be scaled by `fault_scale`.

    Attributes:
        thermal, nvlink, memory: Candidates per GPU-hour; one that meets an idle GPU comes to nothing. An NVLink
            onset sets every GPU of its job on the node.
        lookalike_ratio: Harmless ramps per onset.
        step_ratio: Share of onsets that are steps without any precursor.
        hot_aisle: Events per rack-hour.
        power, straggler, fabric, host_memory: As `thermal`, of the classes of `strains.py`; 0 leaves a class out.
        has_shortage: Queues that run short are written to the ground truth.
        node_fault_ratio: Multiplies the rate of node faults; 0: nodes never break.
    """

    thermal: float = 0.4e-3
    nvlink: float = 0.3e-3
    memory: float = 0.5e-3
    lookalike_ratio: float = 1.0
    step_ratio: float = 0.4
    hot_aisle: float = 0.02e-3
    power: float = 0.0
    straggler: float = 0.0
    fabric: float = 0.0
    host_memory: float = 0.0
    has_shortage: bool = False
    node_fault_ratio: float = 1.0

    @classmethod
    def of_every_class(cls) -> Rates:
        """Rates at which every class happens."""
        return cls(power=0.2e-3, straggler=0.3e-3, fabric=0.2e-3, host_memory=0.1e-3, has_shortage=True)

    @classmethod
    def published(cls) -> Rates:
        """No class more often than a published rate of what it may end in; each source beside its number.

        No one has published how often the conditions themselves begin. What stopped a large training run is a floor of
        how often its cause was there; where nobody tells of the cause, all stops together are taken.
        """
        return cls(
            thermal=_LLAMA_HEAT / _LLAMA_GPU_HOURS,  # "GPU thermal interface and sensor"
            nvlink=_LLAMA_GPU / _LLAMA_GPU_HOURS,  # "faulty GPU", failures of NVLink among them
            memory=_LLAMA_ALL / _LLAMA_GPU_HOURS,  # all causes together
            hot_aisle=0.0,  # nobody tells of any
            power=_LLAMA_POWER / _LLAMA_GPU_HOURS,  # "power supply"
            straggler=_LLAMA_ALL / _LLAMA_GPU_HOURS,  # all causes together
            fabric=_LLAMA_NETWORK / _LLAMA_GPU_HOURS,  # "network switch and cable"
            host_memory=_META_OUT_OF_MEMORY,  # state OUT_OF_MEMORY of Slurm: the host's memory
            has_shortage=True,
            node_fault_ratio=1.0,  # 4.2 per 1,000 node-days (InfiniteHBD 2024); Meta: 6.5 and 2.3
        )

    @classmethod
    def none(cls) -> Rates:
        """Nothing happens: no disturbance, no look-alike, no node fault. Queues run short all the same."""
        return cls(thermal=0.0, nvlink=0.0, memory=0.0, hot_aisle=0.0, has_shortage=True, node_fault_ratio=0.0)

    @classmethod
    def preset(cls, name: str) -> Rates:
        """Rates by name of a preset.

        Raises:
            SimulatorError: There is none of that name; the message lists those there are.
        """
        if name not in PRESETS:
            raise SimulatorError(f"no rates {name!r}; presets: {', '.join(PRESETS)}")
        return PRESETS[name]()

    @property
    def of_strains(self) -> dict[str, float]:
        """Rates of the classes of `strains.py`, by class."""
        return {
            "power_throttle": self.power, "straggler": self.straggler, "fabric_congestion": self.fabric,
            "host_memory": self.host_memory,
        }  # fmt: skip

    def of(self, class_: str) -> float:
        return {"thermal_throttle": self.thermal, "nvlink_saturation": self.nvlink}.get(class_, self.memory)


PRESETS: dict[str, Callable[[], Rates]] = {
    "default": Rates,
    "every-class": Rates.of_every_class,
    "published": Rates.published,
    "none": Rates.none,
}

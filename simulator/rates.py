"""How often disturbances happen: base rates of every class, and what they rest on."""

from __future__ import annotations

from dataclasses import dataclass


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

    @classmethod
    def of_every_class(cls) -> Rates:
        """Rates at which every class happens."""
        return cls(power=0.2e-3, straggler=0.3e-3, fabric=0.2e-3, host_memory=0.1e-3, has_shortage=True)

    @property
    def of_strains(self) -> dict[str, float]:
        """Rates of the classes of `strains.py`, by class."""
        return {
            "power_throttle": self.power, "straggler": self.straggler, "fabric_congestion": self.fabric,
            "host_memory": self.host_memory,
        }  # fmt: skip

    def of(self, class_: str) -> float:
        return {"thermal_throttle": self.thermal, "nvlink_saturation": self.nvlink}.get(class_, self.memory)

"""What a nowcast goes by: periods, lives of hints, thresholds. Numbers only; the settings fill them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MARGIN_S = 5.0  # how much later than its interval a sample may come and still be in time


@dataclass(frozen=True, slots=True)
class NowcastConfig:
    """What the nowcast goes by; times in seconds. Defaults are those of the settings."""

    tick_s: float = 15.0
    exporter_interval_s: float = 15.0
    publish_probability: float = 0.5
    publish_by_class: Mapping[str, float] = field(default_factory=dict)
    bottleneck_ttl_ticks: float = 2.0
    window_ttl_ticks: float = 3.0
    consumer_period_s: float = 30.0
    window_confidence: float = 0.9
    window_guard_s: float = 60.0
    plan_lease_s: float = 900.0
    jobs_period_s: float = 15.0
    holdout_ratio: float = 0.05

    @property
    def stale_s(self) -> float:
        """Age at which a sample stops counting: two exporter intervals and a margin."""
        return 2 * self.exporter_interval_s + MARGIN_S

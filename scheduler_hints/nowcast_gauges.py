"""What nowcasts say of themselves as Prometheus metrics: timings by stage, the present tick, ages, counts.

Here belongs the reading of status files for `/metrics`; the files come from `scheduler_hints/nowcast_status.py`. A
status file of another version, or one that cannot be read, gives the metrics that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class _Status(msgspec.Struct, frozen=True):
    timings_s: dict[str, float] = {}
    tick_s: float | None = None
    wished_tick_s: float | None = None
    busy_ratio: float | None = None
    actionable_horizon_s: float | None = None
    sample_age_p50_s: float | None = None
    sample_age_p95_s: float | None = None
    fresh_gpus: int | None = None
    stale_gpus: int | None = None
    ring_bytes: int | None = None
    ticks: int | None = None
    missed_ticks_total: int | None = None
    widened_total: int | None = None
    samples_total: int | None = None
    samples_ahead_total: int | None = None
    received: dict[str, int] = {}
    screened: dict[str, int] = {}


_decode = msgspec.json.Decoder(_Status).decode

_GAUGES = (
    ("tick_seconds", "Time from one tick to the next at present.", "tick_s"),
    ("wished_tick_seconds", "Time from one tick to the next while there is time for it (setting tick_s).",
     "wished_tick_s"),
    ("busy_ratio", "Share of the present tick that the work of the last one took.", "busy_ratio"),
    ("actionable_horizon_seconds", "Shortest time ahead that a scheduler can act on.", "actionable_horizon_s"),
    ("ring_bytes", "Memory of the windows.", "ring_bytes"),
)  # fmt: skip
_COUNTERS = (
    ("ticks", "Ticks since the start.", "ticks"),
    ("missed_ticks", "Ticks left out because the one before took too long.", "missed_ticks_total"),
    ("widened", "How often the tick was made wider because its work took too much of it.", "widened_total"),
    ("samples", "Samples of GPUs taken in.", "samples_total"),
    ("samples_ahead", "Samples dropped because they lay in the future.", "samples_ahead_total"),
)


def nowcast_gauges(said: Mapping[str, msgspec.Raw], clusters: Sequence[str]) -> Iterable[Metric]:
    """Families of metrics of some clusters' nowcasts.

    Args:
        said: Status file of each cluster's nowcast, as JSON.
        clusters: Clusters to tell of.
    """
    found: dict[str, _Status] = {}
    for cluster in clusters:
        try:
            found[cluster] = _decode(said[cluster])
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    for name, text, field in _GAUGES:
        yield _filled(GaugeMetricFamily(f"weatherglass_nowcast_{name}", text, labels=["cluster"]), found, field)
    for name, text, field in _COUNTERS:
        yield _filled(CounterMetricFamily(f"weatherglass_nowcast_{name}", text, labels=["cluster"]), found, field)
    stages = GaugeMetricFamily(
        "weatherglass_nowcast_stage_seconds", "Time of each stage of the last tick.", labels=["cluster", "stage"]
    )
    ages = GaugeMetricFamily(
        "weatherglass_nowcast_sample_age_seconds", "Age of the newest samples of fresh GPUs at the last tick.",
        labels=["cluster", "quantile"],
    )  # fmt: skip
    gpus = GaugeMetricFamily("weatherglass_nowcast_gpus", "GPUs by state.", labels=["cluster", "state"])
    looked = GaugeMetricFamily(
        "weatherglass_nowcast_screened", "GPUs looked at closely at the last tick.",
        labels=["cluster", "bottleneck_class"],
    )  # fmt: skip
    received = CounterMetricFamily(
        "weatherglass_nowcast_received",
        "What the receiver of samples counted since the start: requests, those put off for want of room (their senders "
        "send them again), those refused, samples by what became of them.",
        labels=["cluster", "what"],
    )
    for cluster, status in found.items():
        for stage, seconds in status.timings_s.items():
            stages.add_metric([cluster, stage], seconds)
        for quantile, age_s in (("0.5", status.sample_age_p50_s), ("0.95", status.sample_age_p95_s)):
            if age_s is not None:
                ages.add_metric([cluster, quantile], age_s)
        for state, count in (("fresh", status.fresh_gpus), ("stale", status.stale_gpus)):
            if count is not None:
                gpus.add_metric([cluster, state], count)
        for name, count in status.screened.items():
            looked.add_metric([cluster, name], count)
        for what, count in status.received.items():
            received.add_metric([cluster, what], count)
    yield from (stages, ages, gpus, looked, received)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, found: Mapping[str, _Status], field: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for cluster, status in found.items():
        value = getattr(status, field)
        if value is not None:
            family.add_metric([cluster], value)
    return family

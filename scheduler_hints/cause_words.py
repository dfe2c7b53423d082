"""What a cause is called, and what speaks for it, in words.

Here belongs text alone; which cause it is stands in `causes.py`, what to do about it in `advice.py`.
"""

from __future__ import annotations

WHAT: dict[str, dict[str, str]] = {
    "thermal_throttle": {
        "gpu": "cooling of this GPU alone", "node": "fans or air path of node {id}",
        "rack": "hot aisle or supply air of rack {id}", "pod": "cooling of pod {id}",
        "cluster": "cooling of the whole cluster", "job": "load of job {id} itself",
    },
    "power_throttle": {
        "gpu": "power limit of this GPU alone", "node": "power supply or cap of node {id}",
        "rack": "power feed of rack {id}", "pod": "power feed of pod {id}",
        "cluster": "power of the whole cluster", "job": "load of job {id} itself",
    },
    "nvlink_saturation": {
        "gpu": "links of this GPU alone", "node": "NVLink switch or lanes of node {id}",
        "job": "collectives of job {id} itself",
    },
    "memory_exhaustion": {
        "gpu": "process on this GPU alone", "node": "whatever runs on node {id}",
        "job": "growth of job {id} itself",
    },
    "straggler": {
        "gpu": "this rank's GPU alone", "node": "node {id}", "rack": "rack {id}", "job": "uneven work of job {id}",
    },
    "fabric_congestion": {
        "link": "this port or its cable alone", "node": "ports of node {id}", "rack": "leaf switch of rack {id}",
        "pod": "switches of pod {id}", "cluster": "core of the fabric", "job": "traffic of job {id} itself",
    },
    "host_memory": {"node": "processes on node {id}", "job": "host memory of job {id}"},
    "shortage": {"queue": "more asked for than is free in queue {id}"},
}  # fmt: skip
UNITS = {"gpu": "GPUs at work", "link": "nodes", "node": "nodes", "queue": "queues"}


def what(bottleneck_class: str, kind: str, key: str) -> str:
    """A cause by name."""
    text = WHAT.get(bottleneck_class, {}).get(kind)
    return f"{kind} {key}".strip() if text is None else text.format(id=key)


def evidence(
    bottleneck_class: str, unit: str, kind: str, key: str, hit: int, size: int, elsewhere: int, air_k: float | None
) -> str:
    """What speaks for a cause and against it.

    Args:
        bottleneck_class: The class.
        unit: What its alarms are about.
        kind: What the cause is.
        key: Its name.
        hit: Alarms there.
        size: Units there that could be alarms.
        elsewhere: Alarms of the class in other places.
        air_k: How much warmer its air is than elsewhere, K; None: not known.
    """
    parts = []
    if kind != unit:
        parts.append(f"{hit:,} of {size:,} {UNITS[unit]} there")
    if unit != "queue":
        parts.append(f"{elsewhere:,} elsewhere" if elsewhere else "none elsewhere")
    if air_k is not None:
        parts.append(f"its air is {abs(air_k):.0f} °C {'warmer' if air_k >= 0 else 'cooler'} than elsewhere")
    return ": ".join(part for part in (what(bottleneck_class, kind, key), ", ".join(parts)) if part)

"""What a doctor says of the metrics that a source gives: which classes of bottleneck they suffice for, and what lacks.

Nothing is asked here; how a source finds out which metrics there are stands with the source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from features import metrics
from pipelines.sources import Fetched, Finding
from pipelines.words import counted

# What a class of bottleneck cannot be foreseen without: one of these ways, the first being the one that is advised.
_WANTED: dict[str, tuple[tuple[str, ...], ...]] = {
    "thermal_throttle": (("gpu_temp_c", "is_thermal_slowdown"), ("gpu_temp_margin_c",)),
    "power_throttle": (("is_power_capped", "sm_clock_hz"),),
    "nvlink_saturation": (("nvlink_tx_bytes_per_s",),),
    "memory_exhaustion": (("fb_used_bytes",),),
    "host_memory": (("host_mem_available_bytes", "host_mem_total_bytes"), ("oom_kills_total",)),
    "fabric_congestion": (
        ("transmit_wait_total",), ("ecn_marked_total",), ("cnp_total",), ("retransmits_total",),
        ("tx_bytes_total", "speed_bytes_per_s"), ("rx_bytes_total", "speed_bytes_per_s"),
    ),
    "straggler": (("own_step_time_s",), ("step_time_s",)),
}  # fmt: skip
_PARTS = {"nvlink_tx_bytes_per_s": "link_tx_bytes_per_s"}  # of single links: summed up where nothing else tells
_ENTITIES = ("gpu", "link", "node", "port")
_EXAMPLES = 2
_MOST = 4


def metrics_findings(counts: dict[str, int], table: metrics.MetricTable) -> Iterable[Finding]:
    """How many metrics of GPUs there are, and what lacks.

    Args:
        counts: Series of each metric name.
        table: The vocabulary.
    """
    known = set(table.names["gpu"])
    gpu = {name: count for name, count in counts.items() if name in known}
    if not gpu:
        yield (
            "metrics",
            False,
            "no GPU metric: is an exporter (dcgm-exporter, …) scraped? is prometheus_matcher right?",
        )
        return
    rows = [row for name in counts for row in table.by_name.get(name, ())]
    columns = {row.column for row in rows if row.is_fed and row.entity in _ENTITIES}
    yield ("metrics", True, f"{counted(len(gpu), 'GPU metric')}, {counted(max(gpu.values()), 'GPU')}")
    exporters = {row.exporter for row in rows if row.entity in _ENTITIES}
    yield from metric_gaps(columns, exporters, table)


def told_columns(fetched: Fetched) -> set[str]:
    """Columns of GPUs, links, nodes and ports in which a source has told anything."""
    frames = (fetched.gpu, fetched.link, fetched.node, fetched.port)
    return {name for frame in frames for name in frame.columns if frame[name].null_count() < len(frame)}


def metric_gaps(
    columns: Collection[str], exporters: Collection[str] = (), table: metrics.MetricTable = metrics.DEFAULT
) -> Iterable[Finding]:
    """For each bottleneck class whether its quantities are there, and which metrics would bring them.

    Shortage is not among them: it is foreseen from the queue, which a scheduler tells.

    Args:
        columns: Columns that are fed.
        exporters: Exporters that are there; none: they are not known, and each that tells the column is named.
        table: The vocabulary.

    Yields:
        Name of the class, True or None (a warning: all other classes go on without it), and what is missing.
    """
    for name, ways in _WANTED.items():
        lacking = min((_lacking(way, columns) for way in ways), key=len)
        if lacking:
            lacking = _lacking(ways[0], columns)
        text = "; ".join(f"{column} is missing: {_advice(column, exporters, table)}" for column in lacking)
        yield (name, None if lacking else True, f"not foreseen: {text}" if lacking else "its quantities are there")


def _lacking(way: tuple[str, ...], columns: Collection[str]) -> list[str]:
    return [column for column in way if column not in columns and _PARTS.get(column) not in columns]


def _advice(column: str, exporters: Collection[str], table: metrics.MetricTable) -> str:
    homes = (column, _PARTS.get(column))
    first: dict[str, str] = {}
    for row in table.metrics:
        if row.is_fed and row.column in homes:
            first.setdefault(row.exporter, row.name)
    told = {exporter: metric for exporter, metric in first.items() if exporter in exporters or not exporters}
    if told:
        some = [f"{metric} in {exporter}" for exporter, metric in told.items()]
        more = f" or {len(some) - _MOST} others" if len(some) > _MOST else ""
        return "enable " + " or ".join(some[:_MOST]) + more
    others = [f"{metric} of {exporter}" for exporter, metric in first.items()][:_EXAMPLES]
    return f"{' and '.join(sorted(exporters))} cannot tell it; {' or '.join(others)} can"

"""What a doctor says of the metrics that a source gives: which classes of bottleneck they suffice for, and what lacks.

Nothing is asked here; how a source finds out which metrics there are stands with the source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from features import metrics
from pipelines.sources import Finding
from pipelines.words import counted

# What a class of bottleneck cannot be foreseen without.
_WANTED = {
    "thermal_throttle": ("gpu_temp_c", "is_thermal_slowdown"),
    "power_throttle": ("is_power_capped", "sm_clock_hz"),
    "nvlink_saturation": ("nvlink_tx_bytes_per_s",),
    "memory_exhaustion": ("fb_used_bytes",),
}
_PARTS = {"nvlink_tx_bytes_per_s": "link_tx_bytes_per_s"}  # of single links: summed up where nothing else tells
_EXAMPLES = 2


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
    columns = {row.column for row in rows if row.entity in ("gpu", "link")}
    yield ("metrics", True, f"{counted(len(gpu), 'GPU metric')}, {counted(max(gpu.values()), 'GPU')}")
    exporters = {row.exporter for name in gpu for row in table.by_name[name]}
    yield from metric_gaps(columns, exporters, table)


def metric_gaps(
    columns: Collection[str], exporters: Collection[str] = (), table: metrics.MetricTable = metrics.DEFAULT
) -> Iterable[Finding]:
    """For each bottleneck class whether its quantities are there, and which metrics would bring them.

    Args:
        columns: Columns that are fed.
        exporters: Exporters that are there; none: they are not known, and each that tells the column is named.
        table: The vocabulary.
    """
    for name, wanted in _WANTED.items():
        lacking = [column for column in wanted if column not in columns and _PARTS.get(column) not in columns]
        text = "; ".join(f"{column} is missing: {_advice(column, exporters, table)}" for column in lacking)
        yield (name, not lacking, text or "its quantities are there")


def _advice(column: str, exporters: Collection[str], table: metrics.MetricTable) -> str:
    homes = (column, _PARTS.get(column))
    first: dict[str, str] = {}
    for row in table.metrics:
        if row.is_fed and row.column in homes:
            first.setdefault(row.exporter, row.name)
    told = {exporter: metric for exporter, metric in first.items() if exporter in exporters or not exporters}
    if told:
        return "enable " + " or ".join(f"{metric} in {exporter}" for exporter, metric in told.items())
    others = [f"{metric} of {exporter}" for exporter, metric in first.items()][:_EXAMPLES]
    return f"{' and '.join(sorted(exporters))} cannot tell it; {' or '.join(others)} can"

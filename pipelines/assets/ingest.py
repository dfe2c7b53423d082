"""Assets raw and core: jobs, nodes and samples as received and cleaned, and the findings about their quality.

One form for all: a step of `pipelines/steps.py` for each cluster, one asset for each table that it writes, and a check
that every cluster answered.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import dagster as dg

from pipelines.asset_metadata import figures, rows, table_spec
from pipelines.assets.outcome import ANSWERS, answers
from pipelines.resources import Weatherglass
from pipelines.settings import Settings
from pipelines.steps import ingest_jobs_of, ingest_progress_of, ingest_scheduler_of, ingest_telemetry_of
from pipelines.store import Store

# A window may wait for the one before it; after this long without samples something is wrong.
FRESH_S = 1800.0
_RETRY = dg.RetryPolicy(max_retries=2, delay=5, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS)


def _ingest(
    name: str,
    description: str,
    specs: list[dg.AssetSpec],
    step: Callable[[Store, Settings, str, datetime], Any],
    counts: Mapping[str, Callable[[Any], int]],
    *,
    checked: str,
    promise: str,
    shown: Iterable[str],
    extra: Mapping[str, Iterable[str]] | None = None,
) -> dg.AssetsDefinition:
    """The assets of one step.

    Args:
        name: Of the operation.
        description: What it does.
        specs: One asset a table.
        step: Does it for one cluster; its report has `cluster` and `error`.
        counts: Table → rows that a report has of it.
        checked: Table that the check stands with.
        promise: What the check says when it passes.
        shown: Attributes of reports shown with every table.
        extra: Table → attributes shown with it alone.
    """

    @dg.multi_asset(
        name=name,
        description=description,
        specs=specs,
        check_specs=[dg.AssetCheckSpec(ANSWERS, asset=checked, description=promise)],
        retry_policy=_RETRY,
    )
    def ingest(
        context: dg.AssetExecutionContext, weatherglass: Weatherglass
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        now, store = weatherglass.now(), weatherglass.store()
        reports = [step(store, weatherglass.settings, cluster, now) for cluster in weatherglass.clusters]
        shared = figures(reports, shown)
        for table, count in counts.items():
            own = figures(reports, (extra or {}).get(table, ()))
            metadata = {**rows(sum(count(report) for report in reports)), **shared, **own}
            yield dg.MaterializeResult(asset_key=table, metadata=metadata)
        yield answers(context, checked, reports)

    return ingest


ingest_jobs = _ingest(
    "ingest_jobs",
    "Jobs and nodes of every cluster in their newest known state.",
    [
        table_spec("raw_jobs", "raw", fresh_s=FRESH_S),
        table_spec("core_jobs", "core", deps=["raw_jobs"], fresh_s=FRESH_S),
        table_spec("core_nodes", "core", fresh_s=FRESH_S),
        table_spec("core_job_states", "core", deps=["raw_jobs"]),
    ],
    ingest_jobs_of,
    {
        "raw_jobs": lambda report: report.raw_rows,
        "core_jobs": lambda report: report.core_rows,
        "core_nodes": lambda report: report.node_rows,
        "core_job_states": lambda report: report.state_rows,
    },
    checked="raw_jobs",
    promise="Every scheduler answered.",
    shown=["lag_s", "mark", "error"],
    extra={"core_jobs": ["vanished", "findings", "warnings"]},
)

ingest_scheduler = _ingest(
    "ingest_scheduler",
    "Reservations, limits and parts of priorities of every scheduler, and which GPUs its running jobs hold.",
    [
        table_spec("core_reservations", "core", deps=["core_nodes"], fresh_s=FRESH_S),
        table_spec("core_policies", "core", fresh_s=FRESH_S),
        table_spec("core_job_priorities", "core"),
    ],
    ingest_scheduler_of,
    {
        "core_reservations": lambda report: report.reservation_rows,
        "core_policies": lambda report: report.policy_rows,
        "core_job_priorities": lambda report: report.priority_rows,
    },
    checked="core_policies",
    promise="Every scheduler told its policy.",
    shown=["gpu_job_rows", "queue_rows", "warnings", "error"],
)

ingest_progress = _ingest(
    "ingest_progress",
    "How far jobs are, in their own words: what was sent to the hints API, and metrics of applications.",
    [table_spec("core_job_progress", "core")],
    ingest_progress_of,
    {"core_job_progress": lambda report: report.sent_rows + report.metric_rows},
    checked="core_job_progress",
    promise="Every journal and every Prometheus of progress could be read.",
    shown=["sent_rows", "metric_rows", "warnings", "error"],
)

_SAMPLES = [
    table_spec("raw_gpu_samples", "raw", fresh_s=FRESH_S),
    table_spec("core_gpu_samples", "core", deps=["raw_gpu_samples", "core_jobs"], fresh_s=FRESH_S),
    table_spec("core_node_samples", "core", fresh_s=FRESH_S),
    table_spec("core_gpu_health", "core"),
    table_spec("core_link_samples", "core"),
    table_spec("raw_port_samples", "raw"),
    table_spec("core_port_samples", "core", deps=["raw_port_samples"]),
    table_spec("core_queue_samples", "core"),
    table_spec("core_boards", "core"),
]


def _written(table: str) -> Callable[[Any], int]:
    return lambda report: report.rows.get(table, 0)


ingest_samples = _ingest(
    "ingest_samples",
    "Windows of samples that are due, each committed with its findings and its high-water mark.",
    [*_SAMPLES, table_spec("core_data_quality", "core", deps=["raw_gpu_samples"], fresh_s=FRESH_S)],
    ingest_telemetry_of,
    {
        **{table: _written(table) for spec in _SAMPLES for table in spec.key.path},
        "core_data_quality": lambda report: sum(report.findings.values()),
    },
    checked="raw_gpu_samples",
    promise="Every source of samples answered.",
    shown=["windows", "lag_s", "mark", "error"],
    extra={"core_data_quality": ["findings", "warnings"]},
)

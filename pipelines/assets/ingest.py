"""Assets raw and core: jobs, nodes and samples as received and cleaned, and the findings about their quality."""

from collections.abc import Iterator

import dagster as dg

from pipelines.asset_metadata import figures, rows, table_spec
from pipelines.assets.outcome import ANSWERS, answers
from pipelines.resources import Weatherglass
from pipelines.steps import ingest_jobs_of, ingest_scheduler_of, ingest_telemetry_of

# A window may wait for the one before it; after this long without samples something is wrong.
FRESH_S = 1800.0
SAMPLE_TABLES = (
    "raw_gpu_samples", "core_gpu_samples", "core_node_samples", "core_gpu_health", "core_link_samples",
    "raw_port_samples", "core_port_samples", "core_queue_samples", "core_boards",
)  # fmt: skip
_RETRY = dg.RetryPolicy(max_retries=2, delay=5, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS)


@dg.multi_asset(
    specs=[
        table_spec("raw_jobs", "raw", fresh_s=FRESH_S),
        table_spec("core_jobs", "core", deps=["raw_jobs"], fresh_s=FRESH_S),
        table_spec("core_nodes", "core", fresh_s=FRESH_S),
        table_spec("core_job_states", "core", deps=["raw_jobs"]),
    ],
    check_specs=[dg.AssetCheckSpec(ANSWERS, asset="raw_jobs", description="Every scheduler answered.")],
    retry_policy=_RETRY,
)
def ingest_jobs(
    context: dg.AssetExecutionContext, weatherglass: Weatherglass
) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
    """Jobs and nodes of every cluster in their newest known state."""
    now = weatherglass.now()
    store = weatherglass.store()
    reports = [ingest_jobs_of(store, weatherglass.settings, cluster, now) for cluster in weatherglass.clusters]
    shared = figures(reports, ["lag_s", "mark", "error"])
    written = {
        "raw_jobs": "raw_rows", "core_jobs": "core_rows", "core_nodes": "node_rows", "core_job_states": "state_rows",
    }  # fmt: skip
    for name, count in written.items():
        metadata = {**rows(sum(getattr(report, count) for report in reports)), **shared}
        if name == "core_jobs":
            metadata |= figures(reports, ["vanished", "findings", "warnings"])
        yield dg.MaterializeResult(asset_key=name, metadata=metadata)
    yield answers(context, "raw_jobs", reports)


@dg.multi_asset(
    specs=[
        table_spec("core_reservations", "core", deps=["core_nodes"], fresh_s=FRESH_S),
        table_spec("core_policies", "core", fresh_s=FRESH_S),
    ],
    check_specs=[dg.AssetCheckSpec(ANSWERS, asset="core_policies", description="Every scheduler told its policy.")],
    retry_policy=_RETRY,
)
def ingest_scheduler(
    context: dg.AssetExecutionContext, weatherglass: Weatherglass
) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
    """Reservations and limits of every scheduler, and which GPUs its running jobs hold."""
    now = weatherglass.now()
    store = weatherglass.store()
    reports = [ingest_scheduler_of(store, weatherglass.settings, cluster, now) for cluster in weatherglass.clusters]
    shared = figures(reports, ["gpu_job_rows", "queue_rows", "warnings", "error"])
    for name, count in (("core_reservations", "reservation_rows"), ("core_policies", "policy_rows")):
        metadata = {**rows(sum(getattr(report, count) for report in reports)), **shared}
        yield dg.MaterializeResult(asset_key=name, metadata=metadata)
    yield answers(context, "core_policies", reports)


@dg.multi_asset(
    specs=[
        table_spec("raw_gpu_samples", "raw", fresh_s=FRESH_S),
        table_spec("core_gpu_samples", "core", deps=["raw_gpu_samples", "core_jobs"], fresh_s=FRESH_S),
        table_spec("core_node_samples", "core", fresh_s=FRESH_S),
        table_spec("core_data_quality", "core", deps=["raw_gpu_samples"], fresh_s=FRESH_S),
        table_spec("core_gpu_health", "core"),
        table_spec("core_link_samples", "core"),
        table_spec("raw_port_samples", "raw"),
        table_spec("core_port_samples", "core", deps=["raw_port_samples"]),
        table_spec("core_queue_samples", "core"),
        table_spec("core_boards", "core"),
    ],
    check_specs=[dg.AssetCheckSpec(ANSWERS, asset="raw_gpu_samples", description="Every source of samples answered.")],
    retry_policy=_RETRY,
)
def ingest_samples(
    context: dg.AssetExecutionContext, weatherglass: Weatherglass
) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
    """Windows of samples that are due, each committed with its findings and its high-water mark."""
    now = weatherglass.now()
    store = weatherglass.store()
    reports = [ingest_telemetry_of(store, weatherglass.settings, cluster, now) for cluster in weatherglass.clusters]
    shared = figures(reports, ["windows", "lag_s", "mark", "error"])
    counts = {table: sum(report.rows.get(table, 0) for report in reports) for table in SAMPLE_TABLES}
    counts["core_data_quality"] = sum(sum(report.findings.values()) for report in reports)
    for name, count in counts.items():
        extra = figures(reports, ["findings", "warnings"]) if name == "core_data_quality" else {}
        yield dg.MaterializeResult(asset_key=name, metadata={**rows(count), **shared, **extra})
    yield answers(context, "raw_gpu_samples", reports)

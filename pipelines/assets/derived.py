"""Assets that are made from core samples: minutes, hours, faults, labels."""

from collections.abc import Iterator

import dagster as dg

from pipelines.asset_metadata import figures, rows, table_spec
from pipelines.assets.outcome import ANSWERS, answers
from pipelines.resources import Weatherglass
from pipelines.steps import derive_of

_HOUR_S = 3600.0


def _derived(table: str, group: str, deps: list[str], fresh_s: float) -> dg.AssetsDefinition:
    @dg.multi_asset(
        name=f"derive_{table}",
        specs=[table_spec(table, group, deps=deps, fresh_s=fresh_s)],
        check_specs=[dg.AssetCheckSpec(ANSWERS, asset=table, description="It could be made for every cluster.")],
    )
    def derive(
        context: dg.AssetExecutionContext, weatherglass: Weatherglass
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        store = weatherglass.store()
        reports = [derive_of(store, weatherglass.settings, cluster, table) for cluster in weatherglass.clusters]
        metadata = {**rows(sum(report.rows for report in reports)), **figures(reports, ["until", "error"])}
        yield dg.MaterializeResult(asset_key=table, metadata=metadata)
        yield answers(context, table, reports)

    return derive


DERIVED = [
    _derived("core_gpu_minutes", "core", ["core_gpu_samples"], _HOUR_S),
    _derived("core_gpu_hours", "core", ["core_gpu_minutes"], 3 * _HOUR_S),
    _derived("core_gpu_signs", "core", ["core_gpu_minutes", "core_nodes"], _HOUR_S),
    _derived(
        "core_faults",
        "core",
        ["core_gpu_samples", "core_gpu_minutes", "core_node_samples", "core_jobs", "core_nodes"],
        _HOUR_S,
    ),
    _derived("core_slots", "core", ["core_gpu_samples", "core_boards"], _HOUR_S),
    _derived("core_gpu_jobs", "core", ["raw_gpu_samples", "core_gpu_samples", "core_jobs", "core_slots"], _HOUR_S),
    _derived("feat_labels", "feat", ["core_gpu_samples", "core_jobs", "core_nodes", "core_job_progress"], 2 * _HOUR_S),
]

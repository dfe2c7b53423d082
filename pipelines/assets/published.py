"""Assets out: what is published and kept (job forecasts, node risks, hints), and the nowcast, which runs outside.

The nowcast reports itself each minute (`pipelines/dagster_home.py`); Dagster shows its health and lineage.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import dagster as dg

from pipelines.asset_metadata import OWNERS, figures, rows, table_spec
from pipelines.assets.outcome import ANSWERS, answers
from pipelines.dagster_home import NOWCAST_ASSET
from pipelines.publish import Published
from pipelines.resources import Weatherglass
from pipelines.steps import load_hints_of, publish_jobs_of, publish_nodes_of

NOWCAST = dg.AssetSpec(
    NOWCAST_ASSET,
    deps=["model_bottleneck", "model_level", "out_job_forecasts"],
    description="Bottlenecks, windows and plans, published every tick by a process of its own; it reports each minute.",
    group_name="nowcast",
    owners=OWNERS,
    tags={"layer": "out"},
    kinds={"python"},
    freshness_policy=dg.FreshnessPolicy.time_window(fail_window=timedelta(minutes=5), warn_window=timedelta(minutes=2)),
)


def _published(
    table: str, deps: list[str], fresh_s: float, count: str, step: Callable[..., Published], also: dict[str, str]
) -> dg.AssetsDefinition:
    """An asset of a table, and of others that the same step writes: `also` has their names and what counts them."""
    counts = {table: count, **also}

    @dg.multi_asset(
        name=f"publish_{table}",
        specs=[table_spec(name, "out", deps=deps, fresh_s=fresh_s, kinds=("ducklake", "json")) for name in counts],
        check_specs=[dg.AssetCheckSpec(ANSWERS, asset=table, description="It could be published for every cluster.")],
    )
    def publish(
        context: dg.AssetExecutionContext, weatherglass: Weatherglass
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        now = weatherglass.now()
        store = weatherglass.store()
        reports = [step(store, weatherglass.settings, cluster, now) for cluster in weatherglass.clusters]
        shared = figures(reports, ["data_age_s", "model_versions", "error"])
        for name, counted in counts.items():
            metadata: dict[str, Any] = rows(sum(getattr(report, counted) or 0 for report in reports))
            yield dg.MaterializeResult(asset_key=name, metadata=metadata | shared)
        yield answers(context, table, reports)

    return publish


PUBLISHED = [
    _published(
        "out_job_forecasts",
        ["core_jobs", "model_runtime", "model_wait", "model_job_failure"],
        1800.0,
        "jobs",
        publish_jobs_of,
        {},
    ),
    _published(
        "out_node_risks",
        ["core_faults", "core_gpu_signs", "core_nodes", "model_node_failure"],
        7200.0,
        "nodes",
        publish_nodes_of,
        {"out_gpu_risks": "gpus"},
    ),
    _published("out_hints", [NOWCAST_ASSET], 7200.0, "hints", load_hints_of, {}),
]

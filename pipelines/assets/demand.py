"""Asset of the demand forecasts: made once for each full hour, published, kept, and checked.

The steps are in `pipelines/demand.py`.
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from pipelines.asset_metadata import figures, rows, table_spec
from pipelines.assets.outcome import ANSWERS, answers
from pipelines.resources import Weatherglass
from pipelines.steps import publish_demand_of

TABLE = "out_demand"


@dg.multi_asset(
    name=f"publish_{TABLE}",
    specs=[table_spec(TABLE, "out", deps=["core_jobs"], fresh_s=7200.0, kinds=("ducklake", "json"))],
    check_specs=[dg.AssetCheckSpec(ANSWERS, asset=TABLE, description="It could be published for every cluster.")],
)
def publish_out_demand(
    context: dg.AssetExecutionContext, weatherglass: Weatherglass
) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
    """Demand of every cluster by queue, an hour to two weeks ahead."""
    now, store = weatherglass.now(), weatherglass.store()
    reports = [publish_demand_of(store, weatherglass.settings, cluster, now) for cluster in weatherglass.clusters]
    metadata: dict[str, Any] = rows(sum(report.rows or 0 for report in reports))
    metadata |= figures(reports, ["windows", "data_age_s", "model_versions", "error"])
    yield dg.MaterializeResult(asset_key=TABLE, metadata=metadata)
    yield answers(context, TABLE, reports)

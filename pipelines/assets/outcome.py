"""How an asset says that some cluster went wrong: one check, of the same name everywhere."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from pipelines.words import without_name

ANSWERS = "went_well"


def answers(context: dg.AssetExecutionContext, asset: str, reports: Sequence[Any]) -> dg.AssetCheckResult:
    """Fails when a report carries an error. Not blocking: the other clusters go on.

    Args:
        context: Of the asset, for its log.
        asset: Key of the asset.
        reports: One report a cluster, each with `cluster` and `error`.
    """
    failed = {report.cluster: without_name(report.cluster, report.error) for report in reports if report.error}
    for cluster, error in failed.items():
        context.log.error(f"{cluster}: {error}")
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=ANSWERS,
        passed=not failed,
        severity=dg.AssetCheckSeverity.ERROR,
        metadata={"clusters": len(reports), "errors": dg.MetadataValue.json(failed)},
        description="; ".join(f"{cluster}: {error}" for cluster, error in failed.items()) or "all clusters went well",
    )

"""How an asset says that some cluster went wrong, or that nothing could be said of it: checks of the same shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from pipelines.words import without_name

ANSWERS = "went_well"
Words = Mapping[str, str]  # cluster → why


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


def judged(asset: str, name: str, failed: Words, unjudged: Words, fine: Words) -> dg.AssetCheckResult:
    """A check of figures: red where one failed, yellow where there was too little to judge by, green else.

    Dagster knows no third outcome, and a check that did not look must not be green: it does not pass, as a warning.

    Args:
        asset: Key of the asset.
        name: Of the check.
        failed: Clusters that did not pass.
        unjudged: Those of which nothing can be said.
        fine: Those that passed.
    """
    told = [f"{cluster}: {words}" for cluster, words in failed.items()]
    told += [f"{cluster}: could not judge: {words}" for cluster, words in unjudged.items()]
    fine_words = [f"{cluster}: {words}" for cluster, words in fine.items()]
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=name,
        passed=not failed and not unjudged and bool(fine),
        severity=dg.AssetCheckSeverity.ERROR if failed else dg.AssetCheckSeverity.WARN,
        metadata={
            "passed": len(fine), "failed": len(failed), "could_not_judge": len(unjudged),
            "clusters": dg.MetadataValue.json({**failed, **unjudged, **fine}),
        },
        description="; ".join(told or fine_words) or "could not judge: no cluster",
    )  # fmt: skip

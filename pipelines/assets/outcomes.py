"""Asset of the outcomes of published forecasts, joined and scored every night, with the checks that raise an alert.

The checks do not hold anything back: what is published stays published, and a person decides. The steps are in
`pipelines/outcomes.py`.
"""

from collections.abc import Iterator, Sequence

import dagster as dg

from models.outcome_verdicts import FATES
from pipelines.asset_metadata import figures, rows, table_spec
from pipelines.assets.outcome import ANSWERS, answers, judged
from pipelines.outcomes import CHECKS, OutcomesReport, verdict_of
from pipelines.resources import Weatherglass
from pipelines.steps import score_outcomes_of

TABLE, HINTS = "out_outcomes", "out_hint_outcomes"
_PROMISES = {
    "runtime_calibrated": "The 10–90 % interval of published runtimes held about as often as it says (80 %, ±10 %).",
    "runtime_beats_baseline": "Published runtimes were not worse than the best baseline known at the same moment.",
    "wait_calibrated": "The 10–90 % interval of published waits held about as often as it says (80 %, ±10 %).",
    "hints_precise": "Bottleneck hints of the newest week came true about as often as those of the weeks before.",
    "inputs_stable": "Jobs of the newest week ask for what those of the weeks before asked for, as far as weeks do.",
}


@dg.multi_asset(
    name=f"join_{TABLE}",
    specs=[
        table_spec(TABLE, "trained", deps=["out_job_forecasts", "out_demand", "core_jobs"], fresh_s=2 * 86_400.0),
        table_spec(HINTS, "trained", deps=["out_hints", "feat_labels"], fresh_s=2 * 86_400.0),
    ],
    check_specs=[
        dg.AssetCheckSpec(ANSWERS, asset=TABLE, description="Outcomes could be scored for every cluster."),
        *(dg.AssetCheckSpec(name, asset=TABLE, description=_PROMISES[name]) for name in CHECKS),
    ],
)
def out_outcomes(
    context: dg.AssetExecutionContext, weatherglass: Weatherglass
) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
    """Published forecasts of the last seven full days beside what came."""
    now, store = weatherglass.now(), weatherglass.store()
    reports = [score_outcomes_of(store, weatherglass.settings, cluster, now) for cluster in weatherglass.clusters]
    metadata = {
        **rows(sum(report.rows for report in reports)),
        **figures(reports, ["jobs", "scores", "judged", "covered", "kinds", "starts", "demand", "hints", "error"]),
    }
    yield dg.MaterializeResult(asset_key=TABLE, metadata=metadata)
    yield dg.MaterializeResult(asset_key=HINTS)
    yield answers(context, TABLE, reports)
    for name in CHECKS:
        yield told(context, name, reports)


def told(context: dg.AssetExecutionContext, name: str, reports: Sequence[OutcomesReport]) -> dg.AssetCheckResult:
    """One verdict over all clusters, each in its own words."""
    found = {report.cluster: verdict_of(report, name) for report in reports}
    failed, unjudged, fine = (
        {cluster: verdict.words for cluster, verdict in found.items() if verdict.fate == fate} for fate in FATES
    )
    for cluster, words in failed.items():
        context.log.warning(f"{cluster}: {name}: {words}")
    return judged(TABLE, name, failed, unjudged, fine)

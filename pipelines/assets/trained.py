"""Assets trained: one model a task, every night, for every cluster; and the scores that the night gave."""

from collections.abc import Iterator

import dagster as dg

from models.registry import RegistryError
from pipelines.asset_metadata import OWNERS, figures, rows, table_spec
from pipelines.assets.outcome import ANSWERS, answers, judged
from pipelines.model_report import card_in_words
from pipelines.resources import Weatherglass
from pipelines.retrain import TASKS, Retrained
from pipelines.steps import retrain_of

JUDGED = "could_be_judged"
_DEPS = {
    "runtime": ["core_jobs"],
    "wait": ["core_jobs"],
    "job_failure": ["core_jobs"],
    "node_failure": ["core_faults", "core_nodes"],
    "bottleneck": ["core_gpu_samples", "feat_labels", "core_jobs", "core_nodes"],
    "level": ["core_gpu_samples", "core_nodes"],
}


def _model(task: str) -> dg.AssetsDefinition:
    key = f"model_{task}"

    @dg.multi_asset(
        name=f"train_{task}",
        specs=[
            dg.AssetSpec(
                key,
                deps=_DEPS[task],
                description=f"Model of {task}: trained, judged against champion and baselines, promoted if it won.",
                group_name="trained",
                owners=OWNERS,
                tags={"layer": "trained"},
                kinds={"lightgbm"},
            )
        ],
        check_specs=[
            dg.AssetCheckSpec(ANSWERS, asset=key, description="It could be trained for every cluster."),
            dg.AssetCheckSpec(JUDGED, asset=key, description="There was enough to tell it from the one in charge."),
        ],
        pool="training",  # one fit at a time: the nowcast needs the other core
    )
    def train(
        context: dg.AssetExecutionContext, weatherglass: Weatherglass
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        now = weatherglass.now()
        store = weatherglass.store()
        reports = [retrain_of(store, weatherglass.settings, cluster, task, now) for cluster in weatherglass.clusters]
        for report in reports:
            context.log.info(f"{report.cluster}: {task}: promoted={report.promoted}: {report.reason}")
        metadata = {
            "promoted": sum(report.promoted for report in reports),
            **figures(reports, ["version", "reason", "scores", "snapshot_id", "error"]),
            **_cards(weatherglass, task, reports),
        }
        yield dg.MaterializeResult(asset_key=key, metadata=metadata)
        yield answers(context, key, reports)
        unjudged = {r.cluster: r.error or r.reason for r in reports if not r.is_judged}
        yield judged(key, JUDGED, {}, unjudged, {r.cluster: r.reason for r in reports if r.is_judged})

    return train


def _cards(weatherglass: Weatherglass, task: str, reports: list[Retrained]) -> dict[str, dg.MetadataValue]:
    """The cards of the night's versions, as `weatherglass models show` prints them."""
    shown = []
    for report in reports:
        if report.version is None:
            continue
        try:
            lines = card_in_words(weatherglass.settings, report.cluster, task, report.version)
        except RegistryError as error:
            lines = [str(error)]
        shown.append("\n".join([f"**{report.cluster} {report.version}**", "", "```", *lines, "```"]))
    return {"card": dg.MetadataValue.md("\n\n".join(shown))} if shown else {}


MODELS = [_model(task) for task in TASKS]


@dg.multi_asset(specs=[table_spec("out_scores", "trained", deps=[f"model_{task}" for task in TASKS])])
def out_scores(weatherglass: Weatherglass) -> Iterator[dg.MaterializeResult]:
    """Scores of the last night beside those of the baselines."""
    store = weatherglass.store()
    newest = store.query(
        'SELECT "cluster", task, metric, baseline, value FROM out_scores '
        'QUALIFY ts = max(ts) OVER (PARTITION BY "cluster", task) ORDER BY ALL'
    )
    total = store.query("SELECT count(*) AS n FROM out_scores")["n"][0]
    table = "\n".join(
        f"| {c} | {t} | {m} | {b or 'model'} | {v:.4g} |" for c, t, m, b, v in newest.iter_rows() if v is not None
    )
    heading = "| cluster | task | metric | of | value |\n|---|---|---|---|---|\n"
    yield dg.MaterializeResult(
        asset_key="out_scores", metadata={**rows(total), "newest": dg.MetadataValue.md(heading + table)}
    )

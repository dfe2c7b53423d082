"""Dagster jobs by cadence: ingest, publish, retrain, maintain. When they run stands in `pipelines/schedules.py`."""

import dagster as dg

from pipelines.maintain import Maintained, clean_up, compact_store
from pipelines.resources import Weatherglass

# Whoever is killed with a run in hand leaves it "started": after this long Dagster gives it up by itself.
_MAX_RUNTIME = "dagster/max_runtime"

ingest = dg.define_asset_job(
    "ingest",
    selection=dg.AssetSelection.groups("raw", "core", "feat"),
    description="Jobs and samples that are due, and what is made from them. One run serves all clusters.",
    tags={_MAX_RUNTIME: "3600"},
)
publish = dg.define_asset_job(
    "publish",
    selection=dg.AssetSelection.groups("out"),
    description="Forecasts of every known job and node, published and kept; what the nowcast said, kept.",
    tags={_MAX_RUNTIME: "1800"},
)
retrain = dg.define_asset_job(
    "retrain",
    selection=dg.AssetSelection.groups("trained"),
    description="Every model of every cluster: trained, judged, promoted if it earned it.",
    tags={_MAX_RUNTIME: "21600"},
)


class CleanUp(dg.Config):
    """Whether the daily part is done as well."""

    daily: bool = True


def _said(context: dg.OpExecutionContext, report: Maintained) -> None:
    for name, done in report.done.items():
        context.log.info(f"{name}: {done}")
    if report.failed:
        raise dg.Failure(
            "; ".join(f"{name}: {error}" for name, error in report.failed.items()),
            metadata=dict(report.failed.items()),
            allow_retries=False,
        )


@dg.op(out=dg.Out(dg.Nothing))
def compact(context: dg.OpExecutionContext, weatherglass: Weatherglass) -> None:
    """Small files of the store become large ones."""
    store = weatherglass.store()
    _said(context, compact_store(store, weatherglass.settings, weatherglass.now()))


@dg.op(ins={"after": dg.In(dg.Nothing)}, out=dg.Out(dg.Nothing))
def tidy(context: dg.OpExecutionContext, weatherglass: Weatherglass, config: CleanUp) -> None:
    """Retention, expired snapshots, unreferenced files, old models and old runs."""
    if not config.daily:
        context.log.info("not due: once a day")
        return
    store = weatherglass.store()
    _said(context, clean_up(store, weatherglass.settings, weatherglass.now(), context.instance))


@dg.job(description="The store is compacted; once a day what is too old goes.", tags={_MAX_RUNTIME: "7200"})
def maintain() -> None:
    tidy(compact())


JOBS = [ingest, publish, retrain, maintain]

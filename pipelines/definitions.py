"""The Dagster code location: `dagster-webserver -m pipelines.definitions`.

Here everything is put together and nothing is done. Tests build it with settings of their own.
"""

import dagster as dg

from pipelines.assets.demand import publish_out_demand
from pipelines.assets.derived import DERIVED
from pipelines.assets.ingest import ingest_jobs, ingest_progress, ingest_samples, ingest_scheduler
from pipelines.assets.outcomes import out_outcomes
from pipelines.assets.published import NOWCAST, PUBLISHED
from pipelines.assets.trained import MODELS, out_scores
from pipelines.checks import CHECKS
from pipelines.jobs import JOBS
from pipelines.resources import Weatherglass
from pipelines.schedules import build_schedules
from pipelines.settings import load_settings


def build_definitions(config_path: str = "") -> dg.Definitions:
    """All assets, checks, jobs and schedules.

    Args:
        config_path: Settings file; empty: `WEATHERGLASS_CONFIG`, else `weatherglass.toml`.

    Raises:
        SettingsError: A setting is wrong; Dagster shows the message in place of the code location.
    """
    settings = load_settings(config_path or None)
    return dg.Definitions(
        assets=[
            ingest_jobs,
            ingest_progress,
            ingest_samples,
            ingest_scheduler,
            *DERIVED,
            *MODELS,
            out_scores,
            out_outcomes,
            *PUBLISHED,
            publish_out_demand,
            NOWCAST,
        ],
        asset_checks=CHECKS,
        jobs=JOBS,
        schedules=build_schedules(settings.training.hour_utc),
        resources={"weatherglass": Weatherglass(config_path=config_path)},
        # A process for each step costs 4-5 s before its first line of work; the store has one writer anyway.
        executor=dg.in_process_executor,
    )


defs = build_definitions()

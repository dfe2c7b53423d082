"""When jobs run, in UTC, and the rule that a job never runs twice at once.

All schedules are on from the start. What the jobs do stands in `pipelines/jobs.py`.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

from pipelines import jobs
from pipelines.resources import WORKER_TAG, is_worker_gone

_UNDER_WAY = [
    DagsterRunStatus.QUEUED, DagsterRunStatus.NOT_STARTED, DagsterRunStatus.STARTING, DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]  # fmt: skip


def under_way(instance: DagsterInstance, job_name: str) -> str | None:
    """Id of a run of the job that is queued or works; runs whose process was killed are put to rest first.

    Without that a killed run would keep its job from ever running again.
    """
    for record in instance.get_run_records(RunsFilter(job_name=job_name, statuses=_UNDER_WAY)):
        run = record.dagster_run
        if run.status == DagsterRunStatus.STARTED and is_worker_gone(run.tags.get(WORKER_TAG)):
            instance.report_run_failed(run, "The process that worked on this run has ended without a word.")
            continue
        return run.run_id
    return None


def _schedule(
    job: Any,  # a job, or an asset job that is not resolved yet: Dagster exports no name for that type
    cron: str,
    config: Callable[[datetime], dict] = lambda _: {},
) -> dg.ScheduleDefinition:
    @dg.schedule(
        job=job,
        cron_schedule=cron,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        name=f"{job.name}_schedule",
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        busy = under_way(context.instance, job.name)
        if busy:
            return dg.SkipReason(f"{job.name} is still running: {busy}")
        return dg.RunRequest(run_config=config(context.scheduled_execution_time.astimezone(UTC)))

    return schedule


def build_schedules(hour_utc: int) -> list[dg.ScheduleDefinition]:
    """All schedules.

    Args:
        hour_utc: Hour of the nightly retraining; the daily part of maintenance comes in the hour after it.
    """
    daily_hour = (hour_utc + 1) % 24

    def maintenance(at: datetime) -> dict:
        return {"ops": {"tidy": {"config": {"daily": at.hour == daily_hour}}}}

    return [
        _schedule(jobs.ingest, "*/5 * * * *"),
        _schedule(jobs.publish, "2-59/5 * * * *"),  # after the ingest that it rests on
        _schedule(jobs.retrain, f"10 {hour_utc} * * *"),
        _schedule(jobs.maintain, "35 * * * *", maintenance),
    ]

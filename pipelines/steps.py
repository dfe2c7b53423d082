"""One step of one cluster, with its sources built and its troubles caught: what assets and the command line both call.

A cluster that is down must not stand in another's way: whatever goes wrong with one ends up in its report's `error`.
Only trouble with the store itself is raised, for it is everyone's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from pipelines.demand import DemandPublished, publish_demand
from pipelines.derive import Derived, derive_hours, derive_minutes
from pipelines.faults import derive_faults
from pipelines.gpu_jobs import derive_gpu_jobs
from pipelines.ingest import Ingested, ingest_telemetry
from pipelines.job_history import JobsIngested, ingest_jobs
from pipelines.job_progress import ProgressIngested, ingest_progress
from pipelines.kept_actions import keep_actions
from pipelines.kept_silences import keep_silences
from pipelines.labels import derive_labels
from pipelines.outcomes import OutcomesReport, publish_outcomes, score_outcomes
from pipelines.publish import Published, load_journal, publish_jobs, publish_node_risks
from pipelines.retrain import Retrained, retrain_task
from pipelines.scheduler import SchedulerIngested, ingest_scheduler
from pipelines.settings import Settings
from pipelines.signs import derive_signs
from pipelines.slots import derive_slots
from pipelines.sources import JobSource, SourceError, build_jobs, build_telemetry
from pipelines.store import Store, StoreError

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class DerivedReport:
    """What was derived for one cluster into one table."""

    cluster: str
    table: str
    rows: int = 0
    until: datetime | None = None
    error: str | None = None


@dataclass
class ClusterIngested:
    """A whole ingest of one cluster."""

    cluster: str
    jobs: JobsIngested
    telemetry: Ingested
    derived: list[DerivedReport] = field(default_factory=list)
    scheduler: SchedulerIngested | None = None
    progress: ProgressIngested | None = None

    @property
    def errors(self) -> list[str]:
        """What went wrong, if anything."""
        found = [self.jobs.error, self.telemetry.error, *(report.error for report in self.derived)]
        if self.scheduler is not None:
            found.append(self.scheduler.error)
        if self.progress is not None and self.progress.error not in found:  # its Prometheus is that of the samples
            found.append(self.progress.error)
        return [error for error in found if error]


DERIVE: dict[str, Callable[..., Derived]] = {
    "core_gpu_minutes": derive_minutes,
    "core_gpu_hours": derive_hours,
    "core_gpu_signs": derive_signs,
    "core_faults": derive_faults,
    "feat_labels": derive_labels,
    "core_slots": derive_slots,
    "core_gpu_jobs": derive_gpu_jobs,
}


@contextmanager
def _jobs_of(settings: Settings, cluster: str, lent: JobSource | None = None) -> Generator[JobSource]:
    """The lent source of jobs, or one that is built for the block and closed after it."""
    if lent is not None:
        yield lent
        return
    with closing(build_jobs(cluster, settings.cluster(cluster), settings.state)) as source:
        yield source


def ingest_jobs_of(
    store: Store,
    settings: Settings,
    cluster: str,
    now: datetime,
    since: datetime | None = None,
    *,
    source: JobSource | None = None,
) -> JobsIngested:
    """Jobs and nodes of one cluster up to now; from `source`, which stays open, or from one of its own."""
    try:
        with _jobs_of(settings, cluster, source) as jobs:
            first_s = settings.ingest.initial_history_s
            return ingest_jobs(store, jobs, cluster, now, first_history_s=first_s, since=since)
    except SourceError as error:
        return JobsIngested(cluster, error=str(error))


def ingest_scheduler_of(
    store: Store, settings: Settings, cluster: str, now: datetime, *, source: JobSource | None = None
) -> SchedulerIngested:
    """Reservations, limits, priorities, queues, and the GPUs that jobs hold; `source` as of `ingest_jobs_of`."""
    try:
        about = settings.cluster(cluster)
        with ExitStack() as stack:
            jobs = stack.enter_context(_jobs_of(settings, cluster, source))
            api = None
            if about.telemetry == "prometheus" and about.jobs == "slurm":
                from pipelines.sources.promql import PromQL
                from pipelines.sources.promql_access import access_of

                api = PromQL(cluster, about.prometheus_url, about.prometheus_timeout_s, access_of(about))
                stack.enter_context(closing(api))
            return ingest_scheduler(store, jobs, cluster, about.prometheus_matcher, now, api)
    except SourceError as error:
        return SchedulerIngested(cluster, error=str(error))


def ingest_progress_of(store: Store, settings: Settings, cluster: str, now: datetime) -> ProgressIngested:
    """How far jobs of one cluster are, as they sent it or export it."""
    work = lambda: ingest_progress(store, settings, cluster, now)  # noqa: E731 (named for the call below)
    found, error = _guarded(cluster, "reading progress of jobs", work)
    return found or ProgressIngested(cluster, error=error)


def ingest_telemetry_of(
    store: Store,
    settings: Settings,
    cluster: str,
    now: datetime,
    since: datetime | None = None,
    *,
    backfill: str = "",
    progress: Callable[[int, int, int], None] | None = None,
) -> Ingested:
    """All windows of samples that are due for one cluster; arguments as of `ingest.ingest_telemetry`."""
    try:
        with closing(build_telemetry(cluster, settings.cluster(cluster), settings.state)) as source:
            return ingest_telemetry(
                store, source, cluster, settings.ingest, now, since=since, backfill=backfill, progress=progress
            )
    except SourceError as error:
        return Ingested(cluster, error=str(error))


def derive_of(store: Store, settings: Settings, cluster: str, table: str) -> DerivedReport:
    """One derived table of one cluster."""
    report = DerivedReport(cluster, table)
    if table == "feat_labels":  # what is silenced or acted upon is censored
        for doing, keep in (
            ("keeping silences", lambda: keep_silences(store, settings.published, cluster)),
            ("keeping actions", lambda: keep_actions(store, settings.state, cluster)),
        ):
            _, report.error = _guarded(cluster, doing, keep)
            if report.error:
                return report
    made, report.error = _guarded(cluster, table, lambda: DERIVE[table](store, cluster, settings.derivation))
    if made is not None:
        report.rows, report.until = made.rows, made.until
    return report


def ingest_cluster(
    store: Store,
    settings: Settings,
    cluster: str,
    now: datetime,
    since: datetime | None = None,
    *,
    backfill: str = "",
    progress: Callable[[int, int, int], None] | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> ClusterIngested:
    """Everything that ingest does for one cluster, in order.

    Args:
        store: The store.
        settings: All settings.
        cluster: Name of the cluster.
        now: Present time, UTC.
        since: Read again from here on; None: from the marks.
        backfill: Mark under which reading again goes on where it was interrupted; empty: from `since`.
        progress: Told after each window of samples, as of `ingest.ingest_telemetry`.
        stage: Told in words what is begun.

    Raises:
        StoreError: The store cannot be written.
    """
    with ExitStack() as stack:
        try:
            source = stack.enter_context(_jobs_of(settings, cluster))
        except SourceError:
            source = None  # each step tries again, and says so in its report
        stage("reading jobs and nodes")
        jobs = ingest_jobs_of(store, settings, cluster, now, since, source=source)
        stage("reading samples")
        samples = ingest_telemetry_of(store, settings, cluster, now, since, backfill=backfill, progress=progress)
        report = ClusterIngested(cluster, jobs, samples)
        read = ingest_progress_of(store, settings, cluster, now)  # before labels: those of ranks are made of it
        stage("deriving minutes, hours, faults, labels, slots and the GPUs of jobs")
        report.derived = [derive_of(store, settings, cluster, table) for table in DERIVE]
        stage("reading reservations, limits, priorities and queues")
        report.scheduler = ingest_scheduler_of(store, settings, cluster, now, source=source)
        report.progress = read
    return report


def publish_jobs_of(store: Store, settings: Settings, cluster: str, now: datetime) -> Published:
    """Job forecasts of one cluster."""

    def work() -> Published:
        with _jobs_of(settings, cluster) as source:
            return publish_jobs(store, source, settings, cluster, now)

    found, error = _guarded(cluster, "publishing job forecasts", work)
    return found or Published(cluster, error=error)


def publish_nodes_of(store: Store, settings: Settings, cluster: str, now: datetime) -> Published:
    """Node risks of one cluster."""
    work = lambda: publish_node_risks(store, settings, cluster, now)  # noqa: E731 (named for the call below)
    found, error = _guarded(cluster, "publishing node risks", work)
    return found or Published(cluster, error=error)


def publish_demand_of(store: Store, settings: Settings, cluster: str, now: datetime) -> DemandPublished:
    """Demand forecasts of one cluster, where those of this hour are not made yet."""
    work = lambda: publish_demand(store, settings, cluster, now)  # noqa: E731 (named for the call below)
    found, error = _guarded(cluster, "publishing demand forecasts", work)
    return found or DemandPublished(cluster, error=error)


def load_hints_of(store: Store, settings: Settings, cluster: str, now: datetime) -> Published:
    """What the nowcast of one cluster published, into the store."""
    rows, error = _guarded(cluster, "loading the journal", lambda: load_journal(store, settings, cluster, now))
    return Published(cluster, hints=rows or 0, error=error)


def publish_cluster(store: Store, settings: Settings, cluster: str, now: datetime) -> list[Published]:
    """Everything that publish does for one cluster: jobs, node risks, hints."""
    return [step(store, settings, cluster, now) for step in (publish_jobs_of, publish_nodes_of, load_hints_of)]


def retrain_of(store: Store, settings: Settings, cluster: str, task: str, now: datetime) -> Retrained:
    """Train one task of one cluster."""
    found, error = _guarded(cluster, f"training {task}", lambda: retrain_task(store, settings, cluster, task, now))
    return found or Retrained(cluster, task, error=error)


def score_outcomes_of(
    store: Store, settings: Settings, cluster: str, now: datetime, *, is_so_far: bool = False
) -> OutcomesReport:
    """Published forecasts of one cluster beside what came; of the days that end now nothing is kept."""

    def work() -> OutcomesReport:
        report = score_outcomes(store, cluster, now, seed=settings.training.seed, is_so_far=is_so_far)
        if not is_so_far:
            publish_outcomes(settings.published, report)
        return report

    found, error = _guarded(cluster, "scoring outcomes", work)
    return found or OutcomesReport(cluster, error=error)


def _guarded(cluster: str, what: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or what went wrong; trouble with the store is raised."""
    try:
        return work(), None
    except StoreError:
        raise
    except SourceError as error:
        return None, str(error)
    except Exception as error:
        log.exception("%s: %s failed", cluster, what)
        return None, f"{type(error).__name__}: {error}"

"""Where samples and jobs come from: the interfaces of sources, their error, and the builders by kind.

Each kind stands in a module of its own. A source reads from outside and returns registry columns as received; it
neither cleans (`features/cleaning.py`) nor stores. Kinds are imported when they are built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import polars as pl

from features.vocabulary import GPU_KEYS, schema

if TYPE_CHECKING:
    from features.metrics import MetricTable
    from pipelines.settings import Cluster
    from pipelines.sources.kubernetes_names import PodNames

# What `check` gives for each thing looked at: its name, whether it is well (None: it works, and something about it is
# worth a look), and what was seen or what to do.
Finding = tuple[str, bool | None, str]

# A first ingest reads the jobs of this long at least: runtime forecasts live on them.
FIRST_JOBS_DAYS = 30.0


class SourceError(Exception):
    """A source could not be read. The message names the source, its address and what to do."""


def gpu_frame(frame: pl.DataFrame | None = None) -> pl.DataFrame:
    """A frame of GPU samples: keys always there, dtypes of the registry. Without an argument an empty one."""
    types = schema("raw_gpu_samples")
    if frame is None:
        return pl.DataFrame(schema={name: types[name] for name in GPU_KEYS})
    missing = [pl.lit(None, dtype=types[name]).alias(name) for name in GPU_KEYS if name not in frame.columns]
    frame = frame.with_columns(missing)
    return frame.select(pl.col(name).cast(types[name]) for name in types if name in frame.columns)


def empty_frame(table: str) -> pl.DataFrame:
    """No rows of a table."""
    return pl.DataFrame(schema=schema(table))


def node_frame(frame: pl.DataFrame | None = None) -> pl.DataFrame:
    """A frame of node samples, all columns of `core_node_samples`. Without an argument an empty one."""
    types = schema("core_node_samples")
    if frame is None:
        return pl.DataFrame(schema=types)
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in types.items()
    )


@dataclass(frozen=True)
class Fetched:
    """Samples as received.

    Attributes:
        gpu: Keys and some quantities of `raw_gpu_samples`; a GPU and time may come twice.
        node: Columns of `core_node_samples`.
        health: Columns of `core_gpu_health`, one row a GPU and time.
        link: Columns of `core_link_samples`.
        port: Columns of `raw_port_samples`: counters.
        queue: Columns of `core_queue_samples`.
        boards: Columns of `core_boards`: what labels tell of the GPUs in `gpu`; the source may leave out what it has
            told before.
        warnings: What was partial or odd, in words; nothing in here means that the answer is whole.
    """

    gpu: pl.DataFrame = field(default_factory=gpu_frame)
    node: pl.DataFrame = field(default_factory=node_frame)
    warnings: list[str] = field(default_factory=list)
    health: pl.DataFrame = field(default_factory=lambda: empty_frame("core_gpu_health"))
    link: pl.DataFrame = field(default_factory=lambda: empty_frame("core_link_samples"))
    port: pl.DataFrame = field(default_factory=lambda: empty_frame("raw_port_samples"))
    queue: pl.DataFrame = field(default_factory=lambda: empty_frame("core_queue_samples"))
    boards: pl.DataFrame = field(default_factory=lambda: empty_frame("core_boards"))


@dataclass(frozen=True)
class LiveJobs:
    """The scheduler's state of this moment.

    Attributes:
        jobs: JOB_COLUMNS, and JOB_EXTRAS where they are told; pending and running jobs.
        nodes: Columns of `core_nodes`.
        states: Columns of `core_job_states`: the jobs whose state, reason, priority or planned start changed since the
            source was last asked; at its first answer all.
        warnings: What was partial or odd, in words.
    """

    jobs: pl.DataFrame
    nodes: pl.DataFrame
    states: pl.DataFrame = field(default_factory=lambda: empty_frame("core_job_states"))
    warnings: list[str] = field(default_factory=list)


class TelemetrySource(Protocol):
    """Samples of GPUs and nodes."""

    name: str

    @property
    def watermark_lag_s(self) -> float:
        """Samples of a moment may come in this much later, s."""
        ...

    def fetch(self, start: datetime, end: datetime) -> Fetched:
        """Samples with start ≤ ts < end.

        Raises:
            SourceError: The source did not answer, or not whole; nothing is returned then.
        """
        ...

    def latest(self) -> Fetched:
        """The newest sample of each GPU and node, `ts` being when it was taken.

        Raises:
            SourceError: As for `fetch`.
        """
        ...

    def check(self) -> list[Finding]:
        """What an operator should know before trusting the source; never raises."""
        ...

    def close(self) -> None: ...


class JobSource(Protocol):
    """Jobs and nodes of a scheduler; closed by whoever built it, as by `with contextlib.closing(build_jobs(…))`."""

    name: str

    def fetch_jobs(self, start: datetime, end: datetime) -> pl.DataFrame:
        """JOB_COLUMNS of every job that was submitted, ran or ended in [start, end), in its newest known state.

        Raises:
            SourceError: The source did not answer.
        """
        ...

    def live(self) -> LiveJobs:
        """Pending and running jobs, and the nodes, as of now.

        Raises:
            SourceError: The source did not answer.
        """
        ...

    def check(self) -> list[Finding]:
        """What an operator should know before trusting the source; never raises."""
        ...

    def close(self) -> None:
        """Give up connections; again does nothing. Nothing is asked of the source afterwards."""
        ...


def build_telemetry(name: str, cluster: Cluster, state: Path) -> TelemetrySource:
    """The source of samples that a cluster's settings ask for.

    Args:
        name: Name of the cluster.
        cluster: Its settings.
        state: State folder.

    Raises:
        SourceError: A setting that the kind needs is empty.
    """
    if cluster.telemetry == "prometheus":
        from pipelines.sources.prometheus import PrometheusSource
        from pipelines.sources.promql_access import access_of

        return PrometheusSource(
            name,
            cluster.prometheus_url,
            matcher=cluster.prometheus_matcher,
            timeout_s=cluster.prometheus_timeout_s,
            exporter_interval_s=cluster.exporter_interval_s,
            access=access_of(cluster),
            table=_vocabulary(name, cluster),
            parallel=cluster.prometheus_parallel,
            has_pods=cluster.jobs == "kubernetes",
            replica_labels=cluster.replica_labels,
        )
    if cluster.telemetry == "scrape":
        from pipelines.sources.scrape import ScrapeSource

        return ScrapeSource(
            name,
            cluster.scrape_targets,
            state / "spool" / name,
            timeout_s=cluster.scrape_timeout_s,
            tick_s=cluster.tick_s,
            table=_vocabulary(name, cluster),
            pods=_pods(name, cluster) if cluster.jobs == "kubernetes" else None,
        )
    if cluster.telemetry == "remote-write":
        from pipelines.sources.remote_write import RemoteWriteSource

        return RemoteWriteSource(
            name,
            state / "spool" / name,
            host=cluster.remote_write_host,
            port=cluster.remote_write_port,
            token_file=cluster.remote_write_token_file,
            cert_file=cluster.remote_write_cert_file,
            key_file=cluster.remote_write_key_file,
            max_body_mib=cluster.remote_write_max_body_mib,
            exporter_interval_s=cluster.exporter_interval_s,
            tick_s=cluster.tick_s,
            table=_vocabulary(name, cluster),
            pods=(lambda: _pods(name, cluster)) if cluster.jobs == "kubernetes" else None,
            replica_labels=cluster.replica_labels,
        )
    from pipelines.sources.trace import TelemetryTrace

    return TelemetryTrace(name, _needed(name, "telemetry_path", cluster.telemetry_path))


def build_jobs(name: str, cluster: Cluster, state: Path) -> JobSource:
    """The source of jobs and nodes that a cluster's settings ask for.

    Args:
        name: Name of the cluster.
        cluster: Its settings.
        state: State folder.

    Raises:
        SourceError: A setting that the kind needs is empty, or the inventory cannot be read.
    """
    if cluster.jobs == "slurm":
        from pipelines.sources.slurm import build_slurm

        return build_slurm(name, cluster, state)
    if cluster.jobs == "kubernetes":
        from pipelines.sources.kubernetes import KubernetesSource
        from pipelines.sources.promql_access import access_of

        return KubernetesSource(
            name,
            cluster.prometheus_url,
            matcher=cluster.prometheus_matcher,
            timeout_s=cluster.prometheus_timeout_s,
            access=access_of(cluster),
            inventory=cluster.inventory,
        )
    if cluster.jobs == "sacct-file":
        from pipelines.sources.sacct_file import SacctFile

        return SacctFile(name, _needed(name, "jobs_path", cluster.jobs_path), cluster.inventory)
    if cluster.jobs == "trace":
        from pipelines.sources.trace import JobsTrace

        return JobsTrace(name, _needed(name, "jobs_path", cluster.jobs_path), cluster.inventory)
    from pipelines.sources.inventory import NoJobs

    return NoJobs(name, cluster.inventory)


def _pods(name: str, cluster: Cluster) -> PodNames:
    from pipelines.sources.kubernetes_names import PodNames
    from pipelines.sources.promql import PromQL
    from pipelines.sources.promql_access import access_of

    api = PromQL(name, cluster.prometheus_url, cluster.prometheus_timeout_s, access_of(cluster))
    return PodNames(api, cluster.prometheus_matcher)


def _vocabulary(name: str, cluster: Cluster) -> MetricTable:
    from features.metrics import MetricError

    try:
        return cluster.metric_table()
    except MetricError as error:
        raise SourceError(f"{name}: clusters.{name}.metrics: {error}") from None


def _needed(name: str, setting: str, value: str) -> str:
    if not value:
        raise SourceError(f"{name}: set clusters.{name}.{setting}; this kind of source reads that file")
    return value

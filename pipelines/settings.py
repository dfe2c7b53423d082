"""Settings: one file, `weatherglass.toml`, checked whole before anything starts.

Each setting stands here once with its default, unit and meaning; `weatherglass.example.toml` is written from these
classes and a test keeps the two equal. Environment variables override: `WEATHERGLASS_API__PORT=8080` is `[api] port`.
Nothing here opens a connection.
"""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from pipelines.settings_checks import contradictions
from pipelines.settings_files import broken_files, port_conflicts
from pipelines.settings_hardware import HardwareSettings
from pipelines.settings_reading import (
    ENV_OTHER,
    ENV_PREFIX,
    Section,
    SettingsError,
    explain,
    message,
    overlay,
    toml_fault,
)

if TYPE_CHECKING:
    from features.metrics import MetricTable

__all__ = [
    "ENV_OTHER", "ENV_PREFIX", "Cluster", "IngestSettings", "Settings", "SettingsError", "load_settings",
    "parse_settings",
]  # fmt: skip


Seconds = Annotated[float, Field(gt=0)]
Days = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Probability = Annotated[float, Field(ge=0, le=1)]


class MetricSettings(Section):
    """What a metric of an exporter feeds; what is not given stays as it is, or as it is for a new metric."""

    column: str | None = Field(None, description="Registry column, as gpu_temp_c; empty: the metric is not read.")
    scale: float | None = Field(None, description="Value times this is in the column's unit.")
    rank: int | None = Field(None, ge=0, description="Of several metrics of a column the lowest that has a value wins.")
    mask: int | None = Field(None, ge=0, description="Bits of the value of which any makes the flag true.")
    equals: float | None = Field(None, description="Value that makes the flag true.")
    part: str | None = Field(None, description="The column is the sum of its parts; this is one of them.")
    where: dict[str, str] | None = Field(None, description="Labels that must match: regular expression by label.")
    entity: str | None = Field(None, description="What a series speaks of: gpu, health, xid, link, port or node.")
    kind: str | None = Field(None, description="How the value is meant: gauge, counter, rate_typed_counter, …")


class Cluster(Section):
    """One cluster: where its samples and its jobs come from."""

    telemetry: Literal["scrape", "prometheus", "remote-write", "trace"] = Field(
        "prometheus", description="Source of samples."
    )
    jobs: Literal["slurm", "kubernetes", "sacct-file", "trace", "none"] = Field(
        "slurm", description="Source of jobs and nodes; kubernetes: kube-state-metrics in the Prometheus below."
    )
    prometheus_url: str = Field("http://127.0.0.1:9090", description="Base URL of Prometheus or VictoriaMetrics.")
    prometheus_matcher: str = Field("", description='Label matchers added to every query, as `cluster="a"`.')
    prometheus_timeout_s: Seconds = Field(30, description="Time-out of one query, retries included, s.")
    prometheus_parallel: int = Field(2, ge=1, le=16, description="Queries at a time when a range is read in pieces.")
    prometheus_username: str = Field("", description="User of basic authentication; empty: none.")
    prometheus_password_file: str = Field("", description="File that holds the password of that user.")
    prometheus_token_file: str = Field("", description="File that holds a bearer token; read again at every query.")
    prometheus_ca_file: str = Field("", description="PEM of the authorities to trust; empty: those of this host.")
    prometheus_cert_file: str = Field("", description="PEM of our own certificate; empty: none.")
    prometheus_key_file: str = Field("", description="PEM of its key; empty: it stands in prometheus_cert_file.")
    prometheus_headers: dict[str, str] = Field(
        {}, repr=False, description='Headers of every query, as { X-Scope-OrgID = "a" }; for Mimir, Thanos, Cortex.'
    )
    replica_labels: tuple[str, ...] = Field(
        ("replica", "prometheus_replica", "__replica__"),
        description="Labels that tell apart Prometheus servers that scrape the same exporters: one of them is used.",
    )
    scrape_targets: tuple[str, ...] = Field(
        (), description="URLs of exporters' /metrics, or one `http_sd` URL prefixed `sd+`."
    )
    scrape_timeout_s: Seconds = Field(10, description="Time-out of one scrape, s.")
    remote_write_host: str = Field("127.0.0.1", description="Address on which Prometheus's remote-write is received.")
    remote_write_port: Port = Field(8704, description="Port of that receiver, one of its own for each cluster.")
    remote_write_token_file: str = Field(
        "", description="File that holds the bearer token of senders; needed on any address but loopback."
    )
    remote_write_cert_file: str = Field(
        "", description="PEM of the receiver's certificate: senders use https then; empty: http."
    )
    remote_write_key_file: str = Field("", description="PEM of its key; empty: it stands in remote_write_cert_file.")
    remote_write_max_body_mib: float = Field(
        32, gt=0, le=1024, description="Largest request of remote-write, decompressed, MiB."
    )
    telemetry_path: str = Field("", description="Canonical telemetry Parquet: the trace, or a past to warm up with.")
    jobs_path: str = Field("", description="sacct text, canonical Parquet, SWF, or Slurm's job completion file.")
    slurm_conf: str = Field("", description="SLURM_CONF for the Slurm commands; empty: their own default.")
    slurm_bin: str = Field("", description="Folder of sacct, squeue, scontrol; empty: found on PATH.")
    slurm_timeout_s: Seconds = Field(30, description="Time-out of one Slurm command, s.")
    slurm_rpcs_per_minute: float = Field(
        6, gt=0, description="Requests a minute to slurmctld, of readers and agent of this cluster together."
    )
    slurm_rest_url: str = Field(
        "", description="slurmrestd, read instead of the commands: http://HOST:PORT or unix:/PATH; empty: the commands."
    )
    slurm_rest_user: str = Field("", description="User whom slurmrestd's token is for; empty: the one of the process.")
    slurm_rest_token_file: str = Field(
        "", description="File with a token of `scontrol token`, read at each request; empty: none (over a socket)."
    )
    slurm_ctld_log: str = Field("", description="slurmctld's log: who preempted whom; empty: that stays unknown.")
    inventory: str = Field("", description="CSV with node, rack, pod, power_domain, …; empty: from the scheduler.")
    tick_s: Seconds = Field(15, description="Seconds between nowcast ticks.")
    exporter_interval_s: Seconds = Field(15, description="Interval at which exporters take samples, s.")
    jobs_period_s: Seconds = Field(30, description="Seconds between questions to the scheduler about live jobs.")
    inference_queues: tuple[str, ...] = Field(
        (), description="Queues of inference services: troughs are looked for even where the day does not show them."
    )
    reclaim_min_units: int = Field(
        8, ge=1, description="A reclaimable window leaves this much free at least, GPUs (CPUs where there are none)."
    )
    metrics: dict[str, MetricSettings] = Field(
        {},
        description='Own mappings of metrics, as { acme_celsius = { column = "gpu_temp_c" } }; see docs/metrics.md.',
    )

    def metric_table(self) -> MetricTable:
        """The vocabulary with this cluster's own mappings.

        Raises:
            MetricError: One of them makes no sense.
        """
        from features.metrics import DEFAULT

        own = {name: fields.model_dump(exclude_none=True) for name, fields in self.metrics.items()}
        return DEFAULT.overridden(own) if own else DEFAULT


class StoreSettings(Section):
    """Where tables live and for how long."""

    url: str = Field("sqlite:{state_dir}/store/catalogue.sqlite", description="Catalogue: sqlite:PATH or postgres:DSN.")
    data_path: str = Field("{state_dir}/store/data", description="Folder or s3:// prefix of the Parquet files.")
    memory_limit_mib: int = Field(1500, ge=128, description="Memory limit of DuckDB, MiB.")
    threads: int = Field(2, ge=1, description="DuckDB threads.")
    lock_timeout_s: Seconds = Field(120, description="How long a writer waits for the writer lock, s.")
    snapshot_days: Days = Field(7, description="Snapshots are kept this long, days.")
    raw_days: Days = Field(2, description="Samples as received are kept this long, days.")
    samples_days: Days = Field(14, description="Samples are kept this long, days.")
    minutes_days: Days = Field(90, description="1-minute aggregates are kept this long, days.")
    hours_days: Days = Field(730, description="1-hour aggregates are kept this long, days.")
    hints_days: Days = Field(
        90, ge=90, description="Hints, forecasts and actions are kept this long, days; 90 at least."
    )
    history_days: Days = Field(1825, description="Jobs, faults, labels and scores are kept this long, days.")


class IngestSettings(Section):
    """How windows are read."""

    window_s: Seconds = Field(300, description="Length of an ingest window, s.")
    overlap_s: float = Field(60, ge=0, description="Each window is read again by this much, for late samples, s.")
    lag_s: float = Field(20, ge=0, description="A window is read only when it ended this long ago, s.")
    initial_history_s: float = Field(3600, ge=0, description="First run: how far back to read, s.")
    max_windows_per_run: int = Field(48, ge=1, description="Windows one run catches up at most.")
    xids_fatal_too: tuple[int, ...] = Field(
        (), description="XID codes that are hardware faults beyond the catalogue's, as 63; see also [hardware] xid."
    )
    xids_not_fatal: tuple[int, ...] = Field((), description="XID codes that are none, whatever the catalogue says.")
    limits: dict[str, dict[str, float]] = Field(
        {},
        description='Limits of bottlenecks by part of the GPU model\'s name, as { "H100" = { slowdown_temp_c = 90 } }; '
        '"*": any. Units and defaults: docs/labels.md.',
    )

    @field_validator("limits")
    @classmethod
    def _limits(cls, limits: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        if limits:
            from features.thresholds import ThresholdBook

            ThresholdBook(overrides=limits)
        return limits


class HintsSettings(Section):
    """What is published and how long it may be believed."""

    publish_probability: Probability = Field(0.5, description="Bottlenecks from this probability on are published.")
    publish_by_class: dict[str, Probability] = Field(
        {}, description="Classes with a probability of their own, as { thermal_throttle = 0.7 }."
    )
    bottleneck_ttl_ticks: float = Field(2, gt=0, description="Time to live of a bottleneck, ticks.")
    window_ttl_ticks: float = Field(3, gt=0, description="Time to live of a backfill window, ticks.")
    job_ttl_s: Seconds = Field(600, description="Time to live of a job forecast, s.")
    node_risk_ttl_s: Seconds = Field(3600, description="Time to live of a node risk, s.")
    demand_ttl_s: Seconds = Field(7200, description="Time to live of a demand forecast, made each hour, s.")
    consumer_period_s: float = Field(30, ge=0, description="Period at which the scheduler acts, s.")
    holdout_ratio: Probability = Field(
        0.05, description="Share of bottlenecks, drawn by id, that no plan is made for, so that skill stays measurable."
    )
    window_confidence: Probability = Field(0.9, description="Confidence at which windows are cut.")
    window_guard_s: float = Field(60, ge=0, description="Kept free at the end of a window when a job is fitted, s.")
    plan_lease_s: Seconds = Field(900, description="Length of a planned reservation, s.")
    checkpoint_s: Seconds = Field(60, description="Time that writing a checkpoint is taken to stop a job, s.")
    restart_s: float = Field(300, ge=0, description="Time from a failure until a job works again, s.")

    @field_validator("publish_by_class")
    @classmethod
    def _classes(cls, asked: dict[str, float]) -> dict[str, float]:
        if asked:
            from typing import get_args

            from scheduler_hints.schema import BottleneckClass

            known = get_args(BottleneckClass)
            unknown = [name for name in asked if name not in known]
            if unknown:
                raise ValueError(f"no bottleneck class {unknown[0]!r}; classes: {', '.join(known)}")
        return asked


class ApiSettings(Section):
    """The hints API."""

    host: str = Field("127.0.0.1", description="Address to listen on; anything but loopback needs tokens.")
    port: Port = Field(8700, description="Port of the hints API.")
    tokens_file: str = Field("", description="JSON of hashed tokens, made by `weatherglass token create`; empty: none.")
    insecure: bool = Field(False, description="Listen on other addresses without tokens.")


class DashboardSettings(Section):
    """The dashboards."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8701, description="Port of the dashboards.")
    refresh_s: Seconds = Field(5, description="Pages refresh this often, s.")


class DagsterSettings(Section):
    """Dagster's web server."""

    enabled: bool = Field(True, description="Start Dagster with `weatherglass run`.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8702, description="Port of Dagster's web server.")
    keep_runs_days: Days = Field(7, description="Runs and their event logs are kept this long, days.")


class TrainingSettings(Section):
    """Nightly retraining."""

    hour_utc: int = Field(2, ge=0, le=23, description="Hour of the nightly retraining, UTC.")
    seed: int = Field(1, description="Seed of every random choice in training.")
    threads: int = Field(1, ge=1, description="Threads of a fit; 1 leaves a core to the nowcast.")
    min_jobs: int = Field(200, ge=10, description="Fewer ended jobs than this: baselines stay in charge.")
    telemetry_hours: Seconds = Field(48, description="Hours of samples that bottleneck models learn from.")


class KubernetesSettings(Section):
    """What kube-scheduler is told, and what the agent writes to nodes."""

    filter_probability: Probability = Field(
        0.8, description="The extender refuses a node on which trouble, or a fault within 1 h, is at least so likely."
    )
    filter_max_ratio: Probability = Field(
        0.25, description="At most this share of the candidates of a pod is refused, the likeliest first; never all."
    )
    cluster: str = Field("", description="Cluster that the agent serves; empty: the only one.")
    mode: Literal["advise", "annotate", "taint"] = Field(
        "advise", description="advise: log what would be done; annotate nodes; taint: annotate, and taint as well."
    )
    kubeconfig: str = Field("", description="File of the agent's access; empty: that of the pod it runs in.")
    period_s: Seconds = Field(15, description="Period of the agent, s.")
    rack_label: str = Field("topology.kubernetes.io/rack", description="Label of nodes that names their rack.")
    taint_effect: Literal["PreferNoSchedule", "NoSchedule"] = Field(
        "PreferNoSchedule", description="What a taint does to pods that do not tolerate it; NoExecute is never used."
    )
    taint_probability: Probability = Field(
        0.8, description="A node on which trouble, or a fault within 1 h, is at least so likely is tainted."
    )
    max_nodes_ratio: Probability = Field(0.05, description="At most this share of all nodes is tainted, one a rack.")
    annotate_probability: Probability = Field(
        0.1, description="Nodes on which trouble, or a fault within 24 h, is at least so likely are annotated."
    )


class AgentSettings(Section):
    """The Slurm agent."""

    mode: Literal["advise", "reserve"] = Field("advise", description="advise: say it; reserve: do it.")
    cluster: str = Field("", description="Cluster whose hints it follows; empty: the only one.")
    period_s: Seconds = Field(10, description="Seconds between polls.")
    max_leases: int = Field(1, ge=0, description="Leases at a time.")
    max_nodes_ratio: Probability = Field(0.25, description="Share of nodes that leases may hold.")
    rpcs_per_minute: float = Field(
        3,
        gt=0,
        description="Requests a minute to slurmctld of the agent's own, of the slurm_rpcs_per_minute of its cluster.",
    )
    breaker_failures: int = Field(3, ge=1, description="Failed or wrong leases in a row that open the breaker.")
    breaker_open_s: Seconds = Field(1800, description="How long the breaker stays open, s.")


class SimulatorSettings(Section):
    """The simulated cluster of `weatherglass run` without a configuration, and of `weatherglass simulate`."""

    nodes: int = Field(32, ge=1, le=20_000, description="Nodes of 8 GPUs.")
    seed: int = Field(7, description="Seed of jobs, physics and faults.")
    port: Port = Field(8703, description="Port of the simulated exporters.")
    tick_s: Seconds = Field(5, description="Exporters take a sample this often, s.")
    history_hours: float = Field(6, ge=0, description="Hours of telemetry that lie behind the start.")
    jobs_days: float = Field(21, ge=0, description="Days of job history that lie behind the start.")
    fault_scale: float = Field(30.0, ge=0, description="Onsets and faults, times as often as in life.")
    rates: Literal["default", "every-class", "published", "none"] = Field(
        "every-class", description="Base rates of onsets: which classes happen (docs/simulator.md)."
    )


class Settings(Section):
    """All of `weatherglass.toml`."""

    state_dir: str = Field("var", description="Folder of everything Weatherglass writes.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Lowest level logged.")
    clusters: dict[str, Cluster] = Field(default_factory=dict, description="Clusters by name.")
    store: StoreSettings = Field(default_factory=StoreSettings)
    ingest: IngestSettings = Field(default_factory=IngestSettings)
    hardware: HardwareSettings = Field(default_factory=HardwareSettings)
    hints: HintsSettings = Field(default_factory=HintsSettings)
    api: ApiSettings = Field(default_factory=ApiSettings)
    dashboards: DashboardSettings = Field(default_factory=DashboardSettings)
    dagster: DagsterSettings = Field(default_factory=DagsterSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    slurm_agent: AgentSettings = Field(default_factory=AgentSettings)
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)
    simulator: SimulatorSettings = Field(default_factory=SimulatorSettings)

    @field_validator("clusters")
    @classmethod
    def _names(cls, clusters: dict[str, Cluster]) -> dict[str, Cluster]:
        for name in clusters:
            if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
                raise ValueError(f"cluster name {name!r}: letters, digits, '-', '_' and '.' only, not first '.'")
        return clusters

    @model_validator(mode="after")
    def _agent_cluster(self) -> Settings:
        for section, name in (("slurm_agent", self.slurm_agent.cluster), ("kubernetes", self.kubernetes.cluster)):
            if name and name not in self.clusters:
                raise ValueError(f"{section}.cluster = {name!r}: no such cluster; clusters: {_names(self.clusters)}")
        return self

    @property
    def state(self) -> Path:
        return Path(self.state_dir)

    @property
    def published(self) -> Path:
        return self.state / "published"

    @property
    def registry(self) -> Path:
        return self.state / "registry"

    @property
    def derivation(self) -> IngestSettings:
        """`ingest` with the XID codes that `hardware.xid` calls fatal, or not."""
        also = {*self.ingest.xids_fatal_too, *self.hardware.is_fatal(True)}
        never = {*self.ingest.xids_not_fatal, *self.hardware.is_fatal(False)}
        return self.ingest.model_copy(
            update={"xids_fatal_too": tuple(sorted(also)), "xids_not_fatal": tuple(sorted(never))}
        )

    @property
    def store_url(self) -> str:
        return self.store.url.replace("{state_dir}", self.state_dir)

    @property
    def store_data_path(self) -> str:
        return self.store.data_path.replace("{state_dir}", self.state_dir)

    def cluster(self, name: str) -> Cluster:
        """The named cluster.

        Raises:
            SettingsError: There is none of that name; the message lists those there are.
        """
        if name not in self.clusters:
            raise SettingsError(f"no cluster {name!r} in the configuration; clusters: {_names(self.clusters)}")
        return self.clusters[name]


def _names(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def parse_settings(
    data: dict[str, Any], environ: Mapping[str, str], origin: str = "settings", *, with_files: bool = False
) -> Settings:
    """Check a configuration.

    Args:
        data: Parsed TOML.
        environ: Environment; `WEATHERGLASS_SECTION__NAME` overrides a setting.
        origin: Name of the file, for messages.
        with_files: Look also at the files that it names and at the ports of one host. A cluster whose files are away
            must not keep the others from starting, so only `weatherglass config check` asks for it.

    Returns:
        The settings.

    Raises:
        SettingsError: Names every wrong setting with its value and the valid choices.
    """
    data = copy.deepcopy(data)
    variables = overlay(Settings, data, environ)
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        raise SettingsError(message(explain(Settings, error), origin, variables)) from None
    if wrong := message(contradictions(settings), origin, variables):
        raise SettingsError(wrong)
    if with_files and (wrong := message([*broken_files(settings), *port_conflicts(settings)], origin, variables)):
        raise SettingsError(wrong)
    return settings


def load_settings(
    path: str | Path | None = None, environ: Mapping[str, str] | None = None, *, with_files: bool = False
) -> Settings:
    """Read the configuration file: `path`, else `WEATHERGLASS_CONFIG`, else `weatherglass.toml` if it is there.

    Args:
        path: The file.
        environ: Environment; None: that of the process.
        with_files: As of `parse_settings`.

    Raises:
        SettingsError: The file cannot be read or a setting is wrong.
    """
    environ = os.environ if environ is None else environ
    chosen = path or environ.get("WEATHERGLASS_CONFIG") or ""
    file = Path(chosen or "weatherglass.toml")
    if not chosen and not file.exists():
        return parse_settings({}, environ, "environment", with_files=with_files)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{file}: no such file; copy weatherglass.example.toml and edit it") from None
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not valid TOML: {toml_fault(error)}") from None
    return parse_settings(data, environ, str(file), with_files=with_files)

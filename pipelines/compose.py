"""Puts the long-running processes together from settings: which source, registry and publisher go into which.

One function a process. What a process does stands in its own module; one-shot commands: `pipelines/commands.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipelines.settings import Cluster, Settings, SettingsError
from pipelines.words import counted

log = logging.getLogger(__name__)

_WARM_S = 600.0
_REPORT_EVERY_S = 60.0
_WARM_UP_AFTER_S = 20.0  # the API answers first


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why and what to do."""


def open_store(settings: Settings, *, read_only: bool = False, must_exist: bool = False) -> Any:
    """The store of the settings.

    Args:
        settings: All settings.
        read_only: For those who only read: nothing is made, nothing can be written.
        must_exist: For writers who have nothing to do on an empty store. Otherwise it is made when it is not there.

    Raises:
        StoreMissing: It is not there, and was not to be made.
        StoreError: It cannot be opened.
    """
    from pipelines.store import Store

    if must_exist and not read_only:  # a writer's attempt would make it, on a server too
        open_store(settings, read_only=True).close()
    store = settings.store
    return Store.open(
        settings.store_url,
        settings.store_data_path,
        memory_limit_mib=store.memory_limit_mib,
        threads=store.threads,
        lock_timeout_s=store.lock_timeout_s,
        read_only=read_only,
    )


def clusters_of(settings: Settings, name: str | None) -> list[str]:
    """The named cluster, or all.

    Raises:
        SettingsError: There is none of that name, or none at all.
    """
    if name:
        settings.cluster(name)
        return [name]
    if not settings.clusters:
        demo = Path("var/demo/weatherglass.toml")
        hint = f"; the demo's settings: --config {demo}" if demo.exists() else ""
        raise SettingsError(
            f"no cluster in the settings; add a [clusters.NAME] block (see weatherglass.example.toml){hint}"
        )
    return sorted(settings.clusters)


def one_cluster(settings: Settings, name: str | None) -> str:
    """The named cluster, or the only one.

    Raises:
        SettingsError: There is none of that name, or several to choose from.
    """
    names = clusters_of(settings, name)
    if len(names) > 1:
        raise SettingsError(f"there are several clusters; choose one with --cluster: {', '.join(names)}")
    return names[0]


def _stop_event() -> threading.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def run_nowcast(settings: Settings, cluster: str | None) -> None:
    """Run the nowcast of one cluster until SIGTERM."""
    from features.cleaning import believable_gpu_samples
    from models.registry import Registry
    from pipelines.sources import build_jobs, build_telemetry
    from scheduler_hints.nowcast import Nowcast
    from scheduler_hints.nowcast_config import NowcastConfig
    from scheduler_hints.nowcast_loop import run
    from scheduler_hints.snapshot import Publisher

    name = one_cluster(settings, cluster)
    chosen, hints = settings.clusters[name], settings.hints
    config = NowcastConfig(
        tick_s=chosen.tick_s,
        exporter_interval_s=chosen.exporter_interval_s,
        publish_probability=hints.publish_probability,
        publish_by_class=hints.publish_by_class,
        bottleneck_ttl_ticks=hints.bottleneck_ttl_ticks,
        window_ttl_ticks=hints.window_ttl_ticks,
        consumer_period_s=hints.consumer_period_s,
        holdout_ratio=hints.holdout_ratio,
        window_confidence=hints.window_confidence,
        window_guard_s=hints.window_guard_s,
        plan_lease_s=hints.plan_lease_s,
        jobs_period_s=chosen.jobs_period_s,
    )
    telemetry = build_telemetry(name, chosen, settings.state)
    jobs = None if chosen.jobs == "none" else build_jobs(name, chosen, settings.state)
    nowcast = Nowcast(
        name,
        Publisher(settings.published, name),
        config,
        registry=Registry(settings.registry / name),
        overrides=settings.ingest.limits,
    )
    stop = _stop_event()

    def clean(frame: Any) -> Any:
        return believable_gpu_samples(frame, datetime.now(UTC))  # their courses are judged by the nowcast itself

    try:
        nowcast.memory.recall_jobs()
        past = _past(telemetry, chosen, name, datetime.now(UTC))
        warmed = counted(nowcast.warm(clean(past.gpu), past.node, port=past.port), "sample")
        log.info("warmed with %s of the last %.0f s", warmed, _WARM_S)
    except Exception as error:  # without a past the windows fill within minutes
        log.warning("no past to warm up with: %s", error)
    log.info("nowcast of %s: every %g s", name, chosen.tick_s)
    with closing(telemetry), closing(jobs) if jobs is not None else nullcontext():
        run(
            nowcast,
            telemetry,
            jobs,
            chosen.tick_s,
            stop,
            job_forecasts=lambda: published_items(settings.published, name, "jobs"),
            node_risks=lambda: published_items(settings.published, name, "node-risks"),
            clean=clean,
            on_tick=_reporter(settings, name),
        )


def _past(telemetry: Any, cluster: Cluster, name: str, now: datetime) -> Any:
    """The last ten minutes: from the source, or, where it has none, from the file at `telemetry_path`."""
    past = telemetry.fetch(now - timedelta(seconds=_WARM_S), now)
    if past.gpu.is_empty() and cluster.telemetry != "trace" and cluster.telemetry_path:
        from pipelines.sources.trace import TelemetryTrace

        return TelemetryTrace(name, cluster.telemetry_path).fetch(now - timedelta(seconds=_WARM_S), now)
    return past


def published_items(published: Path, cluster: str, kind: str) -> list[Any]:
    """Hints of one kind that are published and still valid, in their shape; an empty list when there are none."""
    import msgspec

    from scheduler_hints.schema import SHAPES
    from scheduler_hints.snapshot import SnapshotError, expires_in_s, read_snapshot, snapshot_path

    try:
        snapshot = read_snapshot(snapshot_path(published, cluster, kind))
    except (OSError, SnapshotError):
        return []
    if expires_in_s(snapshot) <= 0:
        return []
    return [msgspec.json.decode(item, type=SHAPES[kind]) for item in snapshot.items]


def _reporter(settings: Settings, cluster: str) -> Callable[[dict[str, Any]], None]:
    """Tells Dagster once a minute how the nowcast does; Dagster being away is no matter."""
    from pipelines.dagster_home import report_nowcast

    due = time.monotonic() + _REPORT_EVERY_S / 2
    busy = threading.Lock()

    def send(status: dict[str, Any]) -> None:
        try:
            report_nowcast(settings, cluster, status)
        finally:
            busy.release()

    def on_tick(status: dict[str, Any]) -> None:
        nonlocal due
        if not settings.dagster.enabled or time.monotonic() < due or not busy.acquire(blocking=False):
            return
        due = time.monotonic() + _REPORT_EVERY_S
        threading.Thread(target=send, args=(status,), daemon=True).start()

    return on_tick


def run_api(settings: Settings, insecure: bool) -> None:
    """Serve the hints API until SIGTERM.

    Raises:
        BindError: It would be open to others without tokens.
    """
    from pipelines.adapters import RuntimeForecasts
    from scheduler_hints.api import create_app
    from scheduler_hints.extender import ExtenderConfig
    from scheduler_hints.server import serve
    from scheduler_hints.tokens import TokenStore, check_bind

    api = settings.api
    tokens = TokenStore(Path(api.tokens_file)) if api.tokens_file else None
    check_bind(api.host, tokens, insecure or api.insecure)
    forecaster = RuntimeForecasts(settings)
    names = clusters_of(settings, None)
    without_scheduler = [name for name in names if settings.clusters[name].jobs == "none"]
    warm_up = threading.Timer(_WARM_UP_AFTER_S, forecaster.prepare, [[n for n in names if n not in without_scheduler]])
    warm_up.daemon = True
    warm_up.start()
    serve(
        lambda: create_app(
            settings.published,
            names,
            without_scheduler=without_scheduler,
            tokens=tokens,
            forecast_runtimes=forecaster,
            extender=ExtenderConfig(settings.kubernetes.filter_probability, settings.kubernetes.filter_max_ratio),
        ),
        api.host,
        api.port,
    )


def run_dashboards(settings: Settings) -> None:
    """Serve the dashboards until SIGTERM. The worker makes its application from the same settings file."""
    from granian import Granian
    from granian.constants import Interfaces
    from granian.log import LogLevels

    clusters_of(settings, None)
    Granian(
        "pipelines.compose:dashboards_application",
        factory=True,
        address=settings.dashboards.host,
        port=settings.dashboards.port,
        interface=Interfaces.WSGI,
        workers=1,
        blocking_threads=4,
        websockets=False,
        log_level=LogLevels.warning,
        respawn_failed_workers=True,
        workers_kill_timeout=5,
    ).serve()


def dashboards_application() -> Any:
    """The dashboards as a WSGI application, on the settings of the environment."""
    from dashboards.app import create_app
    from pipelines.adapters import HintsOverHttp, StoreReader
    from pipelines.settings import load_settings

    settings = load_settings()
    app = create_app(
        HintsOverHttp(settings),
        StoreReader(settings),
        clusters=clusters_of(settings, None),
        refresh_s=settings.dashboards.refresh_s,
    )
    return app.server


def run_slurm_agent(settings: Settings, mode: str | None, once: bool) -> None:
    """Follow the hints of one Slurm cluster until SIGTERM."""
    from scheduler_hints.slurm_agent import run

    agent = build_agent(settings, mode)
    if (missing := _without_slurm(settings)) is not None:
        log.warning("%s: the agent can only say what the plans are, nothing is asked about nodes and jobs", missing)
    if once:
        agent.step()
        print(f"{agent.cluster}: {agent.in_words()}")
        agent.close()
        return
    run(agent, settings.slurm_agent.period_s, _stop_event())


def run_kubernetes_agent(settings: Settings, mode: str | None, once: bool) -> None:
    """Follow the hints on one Kubernetes cluster until SIGTERM."""
    from scheduler_hints.kubernetes_agent import run

    agent = build_kubernetes_agent(settings, mode)
    if once:
        agent.step()
        print(f"{agent.cluster}: {agent.in_words()}")
        return
    run(agent, settings.kubernetes.period_s, _stop_event())


def build_kubernetes_agent(settings: Settings, mode: Any = None) -> Any:
    """The Kubernetes agent of the settings.

    Raises:
        SettingsError: No cluster is chosen.
        CommandError: There is no access to the cluster.
    """
    from pipelines.adapters import api_url
    from scheduler_hints.client import HintsClient
    from scheduler_hints.kubernetes_agent import KubernetesAgent, Marks, fetch_from
    from scheduler_hints.kubernetes_nodes import KubernetesError, KubernetesNodes
    from scheduler_hints.slurm_audit import Ledger, actions_path, jsonl_audit

    wanted = settings.kubernetes
    name = one_cluster(settings, wanted.cluster or None)
    try:
        nodes = KubernetesNodes(wanted.kubeconfig, wanted.rack_label)
    except KubernetesError as error:
        raise CommandError(str(error)) from error
    client = HintsClient(api_url(settings), token=os.environ.get("WEATHERGLASS_TOKEN"))
    audit = jsonl_audit(actions_path(settings.state, name))
    return KubernetesAgent(
        name,
        fetch_from(client, name),
        nodes,
        Ledger(name, audit, lambda: datetime.now(UTC), "kubernetes-agent"),
        mode=mode or wanted.mode,
        marks=Marks(wanted.annotate_probability, wanted.taint_probability, wanted.taint_effect, wanted.max_nodes_ratio),
    )


def release_marks(settings: Settings) -> None:
    """Take the agent's annotations and taints off every node.

    Raises:
        CommandError: The cluster cannot be asked.
    """
    from scheduler_hints.kubernetes_nodes import KubernetesError

    try:
        count = build_kubernetes_agent(settings).release()
    except KubernetesError as error:
        raise CommandError(str(error)) from error
    print(f"marks of {count} nodes were taken off" if count else "no node has a mark")


def release_leases(settings: Settings) -> None:
    """Remove every lease of the agent; those in which jobs run stay and end by themselves, and are named.

    Raises:
        CommandError: The cluster has no Slurm.
    """
    if (missing := _without_slurm(settings)) is not None:
        raise CommandError(f"{missing}: there are no leases to release")
    kept = build_agent(settings, "reserve").release_all()
    for name in kept:
        print(f"{name} stays: jobs run in it; it ends by itself")
    if not kept:
        print("no lease is left")


def _without_slurm(settings: Settings) -> str | None:
    """That the agent's cluster has no Slurm, in words; None: it has."""
    name = one_cluster(settings, settings.slurm_agent.cluster or None)
    jobs = settings.clusters[name].jobs
    return None if jobs == "slurm" else f"cluster {name} has no Slurm (jobs = {jobs!r})"


def build_agent(settings: Settings, mode: Any = None) -> Any:
    """The Slurm agent of the settings.

    Raises:
        SettingsError: No cluster is chosen, or it is not a Slurm cluster and the mode is `reserve`.
    """
    from pipelines.adapters import api_url
    from pipelines.sources.slurm import slurm_budget
    from pipelines.sources.slurm_share import AgentShare
    from scheduler_hints.client import HintsClient
    from scheduler_hints.plan_feed import fetch_from
    from scheduler_hints.slurm_agent import SlurmAgent
    from scheduler_hints.slurm_audit import actions_path, jsonl_audit
    from scheduler_hints.slurm_commands import SlurmCommands
    from scheduler_hints.slurm_guard import Limits

    wanted = settings.slurm_agent
    name = one_cluster(settings, wanted.cluster or None)
    cluster = settings.clusters[name]
    commands = None
    if cluster.jobs == "slurm":
        # The readers' ledger: what the agent asks and does counts there.
        budget = AgentShare(slurm_budget(name, cluster, settings.state), wanted.rpcs_per_minute)
        commands = SlurmCommands(cluster.slurm_bin, cluster.slurm_conf, cluster.slurm_timeout_s, budget)
    client = HintsClient(api_url(settings), token=os.environ.get("WEATHERGLASS_TOKEN"))
    return SlurmAgent(
        name,
        fetch_from(client, name),
        commands,
        mode=mode or wanted.mode,
        audit=jsonl_audit(actions_path(settings.state, name)),
        limits=Limits(wanted.max_leases, wanted.max_nodes_ratio, max_lease_s=max(3600.0, settings.hints.plan_lease_s)),
        breaker_failures=wanted.breaker_failures,
        breaker_open_s=wanted.breaker_open_s,
    )

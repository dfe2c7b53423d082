"""The hints API put together: one call gives the ASGI application. Its parts stand in the modules it imports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from scheduler_hints.dispatch import Dispatcher, Gate
from scheduler_hints.extender import ExtenderConfig
from scheduler_hints.forecasts import Forecaster
from scheduler_hints.metrics import Metrics
from scheduler_hints.openapi import document
from scheduler_hints.reloader import ShardStore
from scheduler_hints.routes import Routes
from scheduler_hints.tokens import TokenStore

__all__ = ["create_app"]


def create_app(
    published: Path,
    clusters: Sequence[str],
    *,
    without_scheduler: Collection[str] = (),
    tokens: TokenStore | None = None,
    forecast_runtimes: Forecaster | None = None,
    readiness: Callable[[], str | None] | None = None,
    store: ShardStore | None = None,
    extender: ExtenderConfig | None = None,
) -> Dispatcher:
    """The hints API as an ASGI application.

    It reads nothing before its lifespan starts (or `startup()` is called). All that it writes is silences
    (`silences.py`) and the progress of jobs that is sent to it (`progress.py`).

    Args:
        published: Folder of snapshots, `<cluster>/<kind>.json`.
        clusters: Clusters that are served.
        without_scheduler: Those of them for which no scheduler is configured: what only one gives is not awaited.
        tokens: Who may ask; None: anyone who can reach it (see `tokens.check_bind`).
        forecast_runtimes: Called on a thread with a cluster and jobs (the fields of `forecasts.JobRequest`, with
            `submit_time` filled in); gives a `forecasts.Forecast` of them. It raises `errors.ForecastUnavailableError`
            when it cannot.
        readiness: Why the process is not ready beyond what its shards say, or None.
        store: Another store of shards, for tests.
        extender: When the Kubernetes extender refuses a node.
    """
    store = store or ShardStore(published, clusters, without_scheduler=without_scheduler)
    if tokens is not None:
        store.also(tokens.refresh)
    gate = Gate(store, tokens)
    metrics = Metrics(store)
    routes = Routes(gate, metrics, document, forecast_runtimes, readiness, extender)
    return Dispatcher(store, gate, metrics, routes.application())

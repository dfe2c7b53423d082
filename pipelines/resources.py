"""What Dagster runs work with: settings and the store, which is opened once a run.

The resource also writes down which process works on a run, so that a run whose process was killed can be told from one
that works.
"""

import os
import socket
from datetime import UTC, datetime

import dagster as dg
import psutil
from pydantic import PrivateAttr

from pipelines.settings import Settings, load_settings
from pipelines.store import Store

WORKER_TAG = "weatherglass/worker"


class Weatherglass(dg.ConfigurableResource):
    """Settings by `WEATHERGLASS_CONFIG` (or `config_path`), and the store they name."""

    config_path: str = ""
    _settings: Settings | None = PrivateAttr(default=None)
    _store: Store | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        if context.run is not None and context.instance is not None:
            context.instance.add_run_tags(context.run.run_id, {WORKER_TAG: worker_name()})

    @property
    def settings(self) -> Settings:
        """The settings, read once."""
        if self._settings is None:
            self._settings = load_settings(self.config_path or None)
        return self._settings

    @property
    def clusters(self) -> list[str]:
        """Names of all clusters; one run serves them all."""
        return sorted(self.settings.clusters)

    def now(self) -> datetime:
        """Present time: read here, at the edge, and handed to everything below."""
        return datetime.now(UTC)

    def store(self) -> Store:
        """The store of the settings, opened at its first use in a run and closed at its end; made when missing."""
        if self._store is None:
            chosen = self.settings.store
            self._store = Store.open(
                self.settings.store_url,
                self.settings.store_data_path,
                memory_limit_mib=chosen.memory_limit_mib,
                threads=chosen.threads,
                lock_timeout_s=chosen.lock_timeout_s,
            )
        return self._store

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002
        if self._store is not None:
            self._store.close()
            self._store = None


def worker_name() -> str:
    """Host, process and its start: a process id alone is used again after a restart of the machine."""
    return f"{socket.gethostname()} {os.getpid()} {psutil.Process().create_time():.2f}"


def is_worker_gone(name: str | None) -> bool:
    """Whether the process that worked on a run has ended; of another host's process nothing is known."""
    host, _, rest = (name or "").partition(" ")
    if host != socket.gethostname() or not rest:
        return False
    pid, _, started = rest.partition(" ")
    try:
        process = psutil.Process(int(pid))
        return abs(process.create_time() - float(started)) > 1.0 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False

"""Fixtures that several test files share: real services, recorded traces, free ports; and the rule on skips.

A test that cannot run on this machine is skipped by the name of what is missing. With CI=true every skip, whatever its
reason, is turned into a failure here, so that a run in CI is whole or red.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import services, workers

_ROOT = Path(__file__).resolve().parent.parent

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts what runs behind it so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _traces_folder() -> Path:
    return Path(os.environ.get("WEATHERGLASS_TRACES") or _ROOT.parent / "shared" / "traces")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("services"):
        services.require(*marker.args)
    if item.get_closest_marker("traces"):
        _require_traces()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers.order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return workers.count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.make_scheduler(config, log)


def _require_traces() -> Path:
    folder = _traces_folder()
    if not (folder / "jobs").is_dir():
        pytest.skip("needs the recorded traces: set WEATHERGLASS_TRACES to their folder")
    return folder


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    outcome = yield
    _refuse_skip(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    outcome = yield
    _refuse_skip(outcome.get_result())


def _refuse_skip(report: Any) -> None:
    if report.skipped and services.in_ci() and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"CI runs every test; this one was skipped: {reason}"


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that gives a free loopback port at each call."""
    return services.free_port


@pytest.fixture(scope="session")
def traces() -> Path:
    """Folder of the recorded traces: WEATHERGLASS_TRACES, else `../shared/traces` beside the repository."""
    return _require_traces()


@pytest.fixture
def pages() -> Iterator[services.Pages]:
    """An HTTP server whose pages the test sets."""
    with services.Pages() as server:
        yield server


@pytest.fixture
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., services.Prometheus]]:
    """Starts real Prometheus servers; arguments as of `services.Prometheus` without the folder."""
    services.require("prometheus", "promtool")
    started: list[services.Prometheus] = []

    def start(*args: Any, **kwargs: Any) -> services.Prometheus:
        server = services.Prometheus(tmp_path_factory.mktemp("prometheus"), *args, **kwargs)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def slurm() -> Iterator[services.Slurm]:
    """A real Slurm of four nodes with accounting, one for the whole run; call `reset()` before relying on its state."""
    services.require(*services.SLURM_PROGRAMS)
    folder = Path(tempfile.mkdtemp(prefix="wg-slurm-"))  # sockets want a short path
    try:
        cluster = services.Slurm(folder)
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A selenium driver of a real headless Chromium, one for the whole run."""
    driver = services.start_chromium(tmp_path_factory.mktemp("chromium") / "profile")
    try:
        yield driver
    finally:
        driver.quit()

"""`weatherglass doctor`: looks at everything Weatherglass depends on and says what to do about what is wrong.

It reads and probes; the only thing it writes is a file that it removes again in the state folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.settings import Settings

_MIN_FREE_BYTES = 5 * 2**30


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: What was looked at.
        is_ok: Whether it is as it should be.
        message: What was seen; for a fault also what to do.
    """

    name: str
    is_ok: bool
    message: str


def check_state(settings: Settings) -> Iterator[Finding]:
    state = settings.state
    try:
        state.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=state):
            pass
        yield Finding("state folder", True, f"{state} is writable")
    except OSError as error:
        yield Finding("state folder", False, f"{state}: {error.strerror}; create it for this user or set state_dir")
        return
    free = shutil.disk_usage(state).free
    text = f"{free / 2**30:.1f} GiB free on {state}"
    if free < _MIN_FREE_BYTES:
        text += f"; at least {_MIN_FREE_BYTES / 2**30:.0f} GiB are needed: free some or move state_dir"
    yield Finding("free disk", free >= _MIN_FREE_BYTES, text)


def check_store(settings: Settings) -> Iterator[Finding]:
    from pipelines.compose import open_store

    store = open_store(settings)
    try:
        for name, is_ok, message in store.check():
            yield Finding(f"store: {name}", is_ok, message)
    finally:
        store.close()


def check_source(settings: Settings, cluster: str, what: str) -> Iterator[Finding]:
    from pipelines.sources import build_jobs, build_telemetry

    build = build_telemetry if what == "telemetry" else build_jobs
    source = build(cluster, settings.clusters[cluster], settings.state)
    for name, is_ok, message in source.check():
        yield Finding(f"{cluster} {what}: {name}", is_ok, message)


def check_ports(settings: Settings) -> Iterator[Finding]:
    """A port must be free, or already served by Weatherglass."""
    for setting, host, port, path in (
        ("api.port", settings.api.host, settings.api.port, "/healthz"),
        ("dashboards.port", settings.dashboards.host, settings.dashboards.port, "/"),
    ):
        import httpx

        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                yield Finding(setting, True, f"{host}:{port} is free")
                continue
            except OSError as error:
                reason = error.strerror
        try:
            running = httpx.get(f"http://{host}:{port}{path}", timeout=2).status_code == 200
        except httpx.HTTPError:
            running = False
        if running:
            yield Finding(setting, True, f"{host}:{port} answers; it is running")
        else:
            yield Finding(setting, False, f"{host}:{port}: {reason}, and what listens there is not ours; set {setting}")


def check_tokens(settings: Settings) -> Iterator[Finding]:
    if not settings.api.tokens_file:
        loopback = settings.api.host in {"127.0.0.1", "::1", "localhost"}
        yield Finding(
            "tokens",
            loopback or settings.api.insecure,
            "none; the API listens on loopback only"
            if loopback
            else f"none, but api.host = {settings.api.host!r}: make some with `weatherglass token NAME` and set "
            "api.tokens_file, or set api.insecure = true",
        )
        return
    path = Path(settings.api.tokens_file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        yield Finding("tokens", False, f"{path}: {error.strerror}; make it with `weatherglass token NAME`")
        return
    is_private = not mode & 0o077
    fix = "" if is_private else f"; others can read it: chmod 600 {path}"
    yield Finding("tokens", is_private, f"{path} has mode {mode:04o}{fix}")


def check_registry(settings: Settings) -> Iterator[Finding]:
    from models.registry import Registry, RegistryError

    for name in settings.clusters:
        registry = Registry(settings.registry / name)
        for task in ("runtime", "wait", "job_failure", "node_failure", "bottleneck"):
            try:
                version = registry.champion(task)
                if version is None:
                    yield Finding(f"{name} model: {task}", True, "none yet; the baseline is in charge")
                else:
                    registry.load(task)
                    yield Finding(f"{name} model: {task}", True, version)
            except RegistryError as error:
                advice = f"weatherglass models rollback {task} --cluster {name}"
                yield Finding(f"{name} model: {task}", False, f"{error}; try: {advice}")


def findings(settings: Settings) -> Iterator[Finding]:
    """Everything there is to look at, in order; a check that breaks is itself a finding."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("state folder", lambda: check_state(settings)),
        ("store", lambda: check_store(settings)),
    ]
    for cluster in settings.clusters:
        for what in ("telemetry", "jobs"):
            checks.append(
                (f"{cluster} {what}", lambda cluster=cluster, what=what: check_source(settings, cluster, what))
            )
    checks += [
        ("models", lambda: check_registry(settings)),
        ("ports", lambda: check_ports(settings)),
        ("tokens", lambda: check_tokens(settings)),
    ]
    if not settings.clusters:
        yield Finding("clusters", False, "none in the settings; add a [clusters.NAME] block")
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(name, False, f"{type(error).__name__}: {error}")


def examine(settings: Settings) -> int:
    """Print every finding.

    Returns:
        How many things are wrong.
    """
    colour = os.isatty(1) and "NO_COLOR" not in os.environ
    failed = 0
    for finding in findings(settings):
        failed += not finding.is_ok
        word = "ok  " if finding.is_ok else "FAIL"
        if colour:
            word = f"\033[{32 if finding.is_ok else 31}m{word}\033[0m"
        print(f"{word}  {finding.name:<28}  {finding.message}", flush=True)
    print("\nAll is well." if not failed else f"\n{failed} to mend.")
    return failed

"""Before anything starts: settings of the demo, the claim on the state folder, free ports.

Checks and preparations only; processes are started by `pipelines/supervisor.py`.
"""

from __future__ import annotations

import shutil
import socket
import tomllib
from collections.abc import Iterable
from pathlib import Path

import filelock

from pipelines.settings import ENV_PREFIX, Settings, parse_settings
from pipelines.settings_files import Listener

DEMO = "demo"
_MARKER = ".weatherglass-demo"


class StartError(Exception):
    """Weatherglass cannot start; the message says why and what to do."""


def demo_settings(environ: dict[str, str]) -> tuple[Settings, str]:
    """Settings of the simulated cluster, and the same as TOML text for the children."""
    base = parse_settings({}, {k: v for k, v in environ.items() if k != f"{ENV_PREFIX}STATE_DIR"})
    state = Path(environ.get(f"{ENV_PREFIX}STATE_DIR", "var/demo")).absolute()
    simulator = base.simulator
    text = f"""\
state_dir = "{state}"
[clusters.{DEMO}]
telemetry = "scrape"
jobs = "sacct-file"
scrape_targets = ["sd+http://127.0.0.1:{simulator.port}/sd"]
jobs_path = "{state}/sim/sacct.txt"
telemetry_path = "{state}/sim/telemetry.parquet"
inventory = "{state}/sim/inventory.csv"
tick_s = {simulator.tick_s}
exporter_interval_s = {simulator.tick_s}
[ingest]
window_s = 60
lag_s = 10
initial_history_s = 0
"""
    others = {k: v for k, v in environ.items() if k != f"{ENV_PREFIX}STATE_DIR"}
    return parse_settings(tomllib.loads(text), others, "demo"), text


def fresh_demo_state(state: Path) -> None:
    """Remove an old demo's state and make a new folder; anything else that lies there is never touched.

    Raises:
        StartError: Something lies there that no demo made.
    """
    if state.exists() and any(state.iterdir()):
        if not (state / _MARKER).exists():
            raise StartError(
                f"{state} is not empty and was not made by the demo; set {ENV_PREFIX}STATE_DIR to another folder"
            )
        shutil.rmtree(state)
    state.mkdir(parents=True, exist_ok=True)
    (state / _MARKER).write_text("Made by `weatherglass run` without a settings file; removed at its next start.\n")


def claim(state: Path) -> filelock.FileLock:
    """Claim a state folder until this process ends: two runs on one folder would publish over each other.

    Raises:
        StartError: Another run has it, or it cannot be made.
    """
    folder = state.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder.parent / f".{folder.name}.run.lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise StartError(
            f"another Weatherglass runs on {state}; stop it, or give this one its own {ENV_PREFIX}STATE_DIR and ports"
        ) from None
    except OSError as error:
        raise StartError(
            f"state_dir = {str(state)!r}: {error.strerror}; create it for this user or set state_dir"
        ) from None
    return lock


def check_ports(ports: dict[str, tuple[str, int]], later: Iterable[Listener] = ()) -> None:
    """Find out whether every port is free, and no two are the same.

    Args:
        ports: Setting → (host, port).
        later: Places that are opened later and tried again until they are free: they need not be free now.

    Raises:
        StartError: Names each one that is not.
    """
    taken = []
    known: list[Listener] = []
    for one in (*(Listener(tuple(setting.split(".")), *place) for setting, place in ports.items()), *later):
        if other := next((other for other in known if one.meets(other)), None):
            taken.append(f"{one.setting} = {one.port}: {other.setting} has it already; choose another")
        known.append(one)
    if taken:
        raise StartError("\n".join(taken))
    for setting, (host, port) in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                variable = f"{ENV_PREFIX}{setting.upper().replace('.', '__')}"
                taken.append(
                    f"{setting} = {port}: {host}:{port}: {error.strerror}; choose another with {variable}=PORT"
                )
    if taken:
        raise StartError("\n".join(taken))

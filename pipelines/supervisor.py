"""`weatherglass run`: which processes make up a running Weatherglass, in which order, and what the operator is told.

API, nowcast and dashboards come first, so that hints are there within a minute; Dagster comes up behind them. Without a
settings file a simulated cluster stands in. How processes are watched is `pipelines/processes.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipelines.processes import Child, Processes
from pipelines.settings import ENV_PREFIX, Settings, SettingsError, load_settings, parse_settings

ROOT = Path(__file__).parent.parent
DEMO = "demo"
_MARKER = ".weatherglass-demo"


class StartError(Exception):
    """Weatherglass cannot start; the message says why and what to do."""


def _say(text: str = "") -> None:
    print(text, flush=True)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "weatherglass.py"), *arguments]


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
inventory = "{state}/sim/inventory.csv"
tick_s = {simulator.tick_s}
exporter_interval_s = {simulator.tick_s}
[ingest]
window_s = 60
lag_s = 10
initial_history_s = 0
"""
    import tomllib

    others = {k: v for k, v in environ.items() if k != f"{ENV_PREFIX}STATE_DIR"}
    return parse_settings(tomllib.loads(text), others, "demo"), text


def _fresh_demo_state(state: Path) -> None:
    """An old demo's state is removed; anything else that lies there is never touched."""
    if state.exists() and any(state.iterdir()):
        if not (state / _MARKER).exists():
            raise StartError(
                f"{state} is not empty and was not made by the demo; set {ENV_PREFIX}STATE_DIR to another folder"
            )
        shutil.rmtree(state)
    state.mkdir(parents=True, exist_ok=True)
    (state / _MARKER).write_text("Made by `weatherglass run` without a settings file; removed at its next start.\n")


def _check_ports(ports: dict[str, tuple[str, int]]) -> None:
    for setting, (host, port) in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                variable = f"{ENV_PREFIX}{setting.upper().replace('.', '__')}"
                raise StartError(
                    f"{setting} = {port}: cannot listen on {host}:{port} ({error.strerror}); is another Weatherglass "
                    f"running? choose another with {variable}=PORT"
                ) from None


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


class _Run:
    """One run of everything: starts, tells, watches, stops."""

    def __init__(self, settings: Settings, *, is_demo: bool, dagster: bool) -> None:
        self.settings = settings
        self.is_demo = is_demo
        self.dagster = dagster and settings.dagster.enabled
        self.processes = Processes(settings.state / "logs")
        self.stopping = False
        self.began = time.monotonic()

    def tell(self, name: str, text: str) -> None:
        _say(f"  [{time.monotonic() - self.began:5.1f} s] {name:<12} {text}")

    def request_stop(self, *_: object) -> None:
        self.stopping = True

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.stopping and time.monotonic() < deadline:
            if condition():
                return True
            self.pause()
        return False

    def pause(self) -> None:
        for event in self.processes.watch():
            self.tell("supervisor", event)
        time.sleep(0.2)

    def task(self, name: str, argv: list[str], timeout_s: float) -> bool:
        """Run a task to its end while everything else is watched; False when it failed or was stopped."""
        child = self.processes.start(Child(name, argv, is_service=False))
        process = child.process
        assert process is not None
        self.wait_until(lambda: process.poll() is not None, timeout_s)
        return process.poll() == 0

    def service(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> None:
        self.processes.start(Child(name, argv, env or {}))

    # --- order of start -------------------------------------------------------------------------------------
    def start_simulator(self) -> None:
        simulator = self.settings.simulator
        self.service(
            "simulator",
            [
                sys.executable, "-m", "simulator", "serve", "--nodes", str(simulator.nodes), "--seed",
                str(simulator.seed), "--port", str(simulator.port), "--tick-s", str(simulator.tick_s),
                "--history-hours", str(simulator.history_hours), "--jobs-days", str(simulator.jobs_days),
                "--fault-scale", str(simulator.fault_scale), "--out", str(self.settings.state / "sim"),
            ],
        )  # fmt: skip

    def start_first(self) -> None:
        api, pages = self.settings.api, self.settings.dashboards
        self.service("api", _command("api"))
        self.service("dashboards", _command("dashboards"))
        if self.is_demo:
            self.start_simulator()
            url = f"http://127.0.0.1:{self.settings.simulator.port}/healthz"
            if self.wait_until(lambda: _answers(url), 120):
                self.tell("simulator", f"exporters at http://127.0.0.1:{self.settings.simulator.port}/metrics/n1")
            elif not self.stopping:
                self.tell("simulator", f"not up after 120 s; see {self.processes.log_path('simulator')}")
        for name in self.settings.clusters:
            self.service(f"nowcast-{name}", _command("nowcast", "--cluster", name))
        if self.wait_until(lambda: _answers(f"http://{api.host}:{api.port}/readyz"), 90):
            self.tell("hints API", f"live hints at http://{api.host}:{api.port}/v1/bottlenecks")
        elif not self.stopping:
            self.tell("hints API", f"no fresh hint yet; see {self.processes.log_path('api')} and nowcast logs there")
        if self.wait_until(lambda: _answers(f"http://{pages.host}:{pages.port}/"), 60):
            self.tell("dashboards", f"http://{pages.host}:{pages.port}/")

    def start_behind(self) -> None:
        if self.is_demo and not self.stopping and self.task("history", _command("demo-history"), 300):
            self.tell("history", "the simulated past is in the store")
        if not self.is_demo and not self.stopping and self.task("ingest", _command("ingest"), 900):
            self.tell("ingest", "samples and jobs are in the store")
        if not self.stopping and self.task("publish", _command("publish"), 300):
            self.tell("publish", "forecasts of jobs and nodes are published")
        if self.dagster and not self.stopping:
            self.start_dagster()
        if self.is_demo and not self.stopping and self.task("retrain", _command("retrain"), 900):
            self.tell("retrain", "first models trained; those that beat their baselines are in charge")
            if not self.stopping:
                self.task("publish", _command("publish"), 300)

    def start_dagster(self) -> None:
        from pipelines.dagster_home import dagster_environment

        dagster = self.settings.dagster
        env = dagster_environment(self.settings)
        bin_dir = Path(sys.executable).parent
        module = ["-m", "pipelines.definitions"]
        # Its databases first: daemon and web server, started at once on an empty folder, would spoil them.
        if not self.task("dagster-setup", [sys.executable, "-m", "pipelines.dagster_instance"], 120):
            return
        self.service("dagster-daemon", [str(bin_dir / "dagster-daemon"), "run", *module], env)
        self.service(
            "dagster-webserver",
            [str(bin_dir / "dagster-webserver"), "-h", dagster.host, "-p", str(dagster.port), *module],
            env,
        )
        url = f"http://{dagster.host}:{dagster.port}"
        if self.wait_until(lambda: _answers(f"{url}/server_info"), 120):
            self.tell("dagster", url)

    def banner(self) -> None:
        _say()
        if self.is_demo:
            simulator = self.settings.simulator
            _say(
                f'No settings file: simulating cluster "{DEMO}", {simulator.nodes} nodes, {8 * simulator.nodes} GPUs, '
                f"{simulator.jobs_days:g} days of jobs behind it."
            )
            _say(
                f"  Bottlenecks and faults happen {simulator.fault_scale:g} times as often as in life."
            )
            _say("  For your own cluster: weatherglass config example > weatherglass.toml, edit, WEATHERGLASS_CONFIG=…")
        else:
            _say(f"Clusters: {', '.join(sorted(self.settings.clusters))}")
        _say()

    def invitation(self) -> None:
        pages = f"http://{self.settings.dashboards.host}:{self.settings.dashboards.port}"
        api = f"http://{self.settings.api.host}:{self.settings.api.port}"
        _say()
        _say("Look at:")
        _say(f"  {pages}/                 Is my fleet good?")
        _say(f"  {pages}/bottlenecks      What is about to go wrong?")
        _say(f"  {api}/v1/status          freshness of every cluster and forecast")
        _say(f"  {api}/v1/backfill-windows?nodes=2&duration_s=3600")
        if self.dagster:
            _say(f"  http://{self.settings.dagster.host}:{self.settings.dagster.port}/    Dagster: assets, runs")
        _say(f"Logs: {self.processes.logs}   Stop: Ctrl-C")
        _say()

    def stop(self) -> None:
        _say("\nStopping …")
        stubborn = self.processes.stop()
        if stubborn:
            _say(f"  killed after 10 s: {', '.join(stubborn)}")
        _say("Stopped.")


def run_everything(*, dagster: bool = True) -> int:
    """Start everything, keep it running until SIGINT or SIGTERM, stop it.

    Returns:
        0 after a clean stop.

    Raises:
        SettingsError: A setting is wrong.
        StartError: A port is taken or the state folder cannot be used.
    """
    environ = dict(os.environ)
    is_demo = not environ.get("WEATHERGLASS_CONFIG") and not Path("weatherglass.toml").exists()
    if is_demo:
        settings, text = demo_settings(environ)
    else:
        settings, text = load_settings(), ""
        if not settings.clusters:
            raise SettingsError(
                "no cluster in the settings; add a [clusters.NAME] block (see weatherglass.example.toml)"
            )
    ports = {
        "api.port": (settings.api.host, settings.api.port),
        "dashboards.port": (settings.dashboards.host, settings.dashboards.port),
    }
    if dagster and settings.dagster.enabled:
        ports["dagster.port"] = (settings.dagster.host, settings.dagster.port)
    if is_demo:
        ports["simulator.port"] = ("127.0.0.1", settings.simulator.port)
    _check_ports(ports)
    if is_demo:
        _fresh_demo_state(settings.state)
        config = settings.state / "weatherglass.toml"
        config.write_text(text)
        os.environ["WEATHERGLASS_CONFIG"] = str(config)
        os.environ.pop(f"{ENV_PREFIX}STATE_DIR", None)
    run = _Run(settings, is_demo=is_demo, dagster=dagster)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, run.request_stop)
    try:
        run.banner()
        run.start_first()
        if not run.stopping:
            run.invitation()
        run.start_behind()
        while not run.stopping:
            run.pause()
    finally:
        run.stop()
    return 0

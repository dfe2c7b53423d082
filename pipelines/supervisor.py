"""`weatherglass run`: which processes make up a running Weatherglass, in which order, and what the operator is told.

API, nowcast and dashboards come first, so that hints are there within a minute; Dagster comes up behind them. Without a
settings file a simulated cluster stands in. How processes are watched is `pipelines/processes.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.preflight import DEMO, check_ports, claim, demo_settings, fresh_demo_state
from pipelines.processes import Child, Processes
from pipelines.settings import ENV_PREFIX, Settings, SettingsError, load_settings
from pipelines.settings_files import listeners

if TYPE_CHECKING:
    from pipelines.sources.remote_write_address import Address

ROOT = Path(__file__).parent.parent


def _say(text: str = "") -> None:
    print(text, flush=True)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "weatherglass.py"), *arguments]


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

    def task(self, name: str, argv: list[str], timeout_s: float, env: dict[str, str] | None = None) -> bool:
        """Run a task to its end while everything else is watched; False when it failed or was stopped."""
        child = self.processes.start(Child(name, argv, env or {}, is_service=False))
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
                "--fault-scale", str(simulator.fault_scale), "--rates", simulator.rates,
                "--out", str(self.settings.state / "sim"),
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
        self.tell_of_receivers()
        if self.wait_until(lambda: _answers(f"http://{pages.host}:{pages.port}/"), 60):
            self.tell("dashboards", f"http://{pages.host}:{pages.port}/")
        if self.wait_until(lambda: _answers(f"http://{api.host}:{api.port}/healthz"), 30):
            self.tell("hints API", f"http://{api.host}:{api.port}/v1/status")
        if self.wait_until(lambda: _answers(f"http://{api.host}:{api.port}/readyz"), 30):
            self.tell("nowcast", "hints are live")
        elif not self.stopping:
            for name in self.settings.clusters:
                self.tell("nowcast", f"{name}: no fresh hint yet; {self.problems(name)}")

    def problems(self, cluster: str) -> str:
        """What the nowcast of a cluster says keeps it from publishing, in words."""
        import json

        try:
            status = json.loads((self.settings.published / cluster / "nowcast-status.json").read_bytes())
        except (OSError, ValueError):
            return f"see {self.processes.log_path(f'nowcast-{cluster}')}"
        said = (str(text).removeprefix(f"{cluster}: ") for text in status.get("problems", {}).values())
        return "; ".join(dict.fromkeys(said)) or "it is starting"

    def tell_of_receivers(self) -> None:
        """Where Prometheus may send to, or why not: a nowcast without its receiver goes on, and tries again."""
        from pipelines.sources.remote_write_address import address_of
        from pipelines.sources.remote_write_check import receiver_state
        from pipelines.sources.remote_write_keeper import read_receiver

        began_ms = 1000 * time.time()

        def is_known(address: Address, folder: Path) -> bool:
            said = read_receiver(folder)
            has_failed = said is not None and said.problem is not None and said.at_ms >= began_ms
            return has_failed or receiver_state(address, folder)[0]

        for name, cluster in self.settings.clusters.items():
            if cluster.telemetry != "remote-write" or self.stopping:
                continue
            address, folder = address_of(name, cluster), self.settings.state / "spool" / name
            self.wait_until(lambda a=address, f=folder: is_known(a, f), 30)
            if not self.stopping:
                self.tell("receiver", f"{name}: {receiver_state(address, folder)[1]}")

    def start_behind(self) -> None:
        if self.is_demo and not self.stopping and self.task("history", _command("demo-history"), 300):
            self.tell("history", "the simulated past is in the store")
        if not self.is_demo and not self.stopping and self.task("ingest", _command("ingest"), 900):
            for line in cluster_lines(self.processes.log_path("ingest").read_text(errors="replace"), self.settings):
                self.tell("ingest", line)
        if not self.stopping and self.task("publish", _command("publish"), 300):
            self.tell("publish", "forecasts of jobs and nodes are published")
        if self.dagster and not self.stopping:
            self.start_dagster()
        if self.is_demo and not self.stopping and self.train_first():
            self.tell("retrain", "first models trained; those that beat their baselines are in charge")
            if not self.stopping:
                self.task("publish", _command("publish"), 300)

    def train_first(self) -> bool:
        """The nightly job once by hand, so that its assets and checks are there to see; False when it failed."""
        if not self.dagster:
            return self.task("retrain", _command("retrain"), 900)
        from pipelines.dagster_home import dagster_environment

        job = [sys.executable, "-m", "dagster", "job", "execute", "-m", "pipelines.definitions", "-j", "retrain"]
        return self.task("retrain", job, 900, dagster_environment(self.settings))

    def show_an_onset(self) -> None:
        """In the demo something is made to happen soon, so that there is a hint to see: a GPU that warms up."""
        import httpx

        base = f"http://127.0.0.1:{self.settings.simulator.port}"
        try:
            jobs = httpx.get(f"{base}/jobs", timeout=5).json()["items"]
            busy = [job for job in jobs if job["state"] == "RUNNING" and (job["gpus"] or 0) >= 8]
            for job in sorted(busy, key=lambda job: job["start_time"])[:5]:
                node = job["node_list"].split(",")[0]
                body = {"class": "thermal_throttle", "node": node, "gpu_index": 3, "onset_in_s": 150, "is_step": False}
                if httpx.post(f"{base}/control/inject", json=body, timeout=5).status_code == 200:
                    self.tell(
                        "simulator", f"cooling of a GPU of {node} begins to fail; it will throttle in about 150 s"
                    )
                    return
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.tell("simulator", f"no onset could be made to happen: {error}")

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
            _say(f"  Bottlenecks and faults happen {simulator.fault_scale:g} times as often as in life.")
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
        _say(f"  {api}/v1/bottlenecks            hints as a scheduler reads them")
        if self.dagster:
            _say(f"  http://{self.settings.dagster.host}:{self.settings.dagster.port}/    Dagster: assets, runs")
        if self.is_demo:
            _say(f"Commands here: weatherglass --config {self.settings.state / 'weatherglass.toml'} models list")
        _say(f"Logs: {self.processes.logs}   Stop: Ctrl-C")
        _say()

    def stop(self) -> None:
        _say("\nStopping …")
        stubborn = self.processes.stop()
        if stubborn:
            _say(f"  killed after 10 s: {', '.join(stubborn)}")
        _say("Stopped.")


def cluster_lines(log: str, settings: Settings) -> list[str]:
    """What a log says last of each cluster, in lines that begin with its name."""
    lines = log.splitlines()
    found = (next((line for line in reversed(lines) if line.startswith(f"{name}: ")), "") for name in settings.clusters)
    return [line for line in found if line]


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
    lock = claim(settings.state)
    check_ports(ports, [one for one in listeners(settings) if one.location[0] == "clusters"])
    if is_demo:
        fresh_demo_state(settings.state)
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
        if is_demo and not run.stopping:
            run.show_an_onset()
        run.start_behind()
        while not run.stopping:
            run.pause()
    finally:
        run.stop()
        lock.release()
    return 0

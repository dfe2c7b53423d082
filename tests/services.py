"""Real servers for tests: Prometheus, Slurm with accounting, Chromium, each under its own temporary folder.

Here belongs what starts, awaits and stops a service; fixtures stand in `conftest.py`, tests elsewhere. A service
listens on loopback alone, on a free port. Every child gets its own session and is ended by its id: TERM, then KILL.
A missing program skips the test by the name of its Debian package (`require`); with CI=true it fails instead.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import http.server
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests import workers

T = TypeVar("T")

# Program → Debian package; those of docs/test-deps.txt.
PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "victoria-metrics": "victoria-metrics",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "squeue": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "sacct": "slurm-wlm",
    "sacctmgr": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "slurmrestd": "slurmrestd",
    "munged": "munge",
    "faketime": "faketime",
    "openssl": "openssl",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "cc": "gcc",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "initdb": "postgresql",
    "postgres": "postgresql",
    "psql": "postgresql",
    "wrk": "wrk",
}
# Debian keeps servers off the PATH of ordinary users.
_FOLDERS = ("/usr/sbin", "/sbin", *sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True))
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sacct", "slurmdbd", "mariadbd", "mariadb-install-db")
CHROMIUM_PROGRAMS = ("chromium", "chromedriver")
# Without the last five, Chromium looks for hosts of the outside world at every start.
CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-quic",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
)  # fmt: skip


class ServiceError(Exception):
    """A service did not start or did not answer in time. The message holds the end of its log."""


def in_ci() -> bool:
    """CI=true (or 1): nothing may be skipped."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


@functools.cache
def find(program: str) -> str | None:
    """Path of a program on PATH or in the folders where Debian keeps servers; None when it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS])
    return shutil.which(program, path=path)


def require(*programs: str) -> dict[str, str]:
    """Paths of the programs a test needs; skips the test, naming the missing packages, when one is not there.

    Raises:
        KeyError: A program has no package in `PACKAGES`.
    """
    found = {name: find(name) for name in programs}
    missing = sorted({PACKAGES[name] for name, path in found.items() if path is None})
    if missing:
        pytest.skip(f"needs Debian package {', '.join(missing)} (docs/test-deps.txt)")
    return {name: path for name, path in found.items() if path is not None}


@functools.cache
def _ports() -> Iterator[int]:
    # Below those that the kernel gives to outgoing connections, which would take a port between its being given and its
    # being used. The order is drawn apart from `random`, which hypothesis seeds.
    share = list(workers.share_of(range(12_000, 32_000)))
    secrets.SystemRandom().shuffle(share)
    return itertools.cycle(share)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on at this moment and no other worker is given."""
    for port in itertools.islice(_ports(), 20_000):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServiceError("no free port")


def wait_until(check: Callable[[], T], timeout_s: float = 15, period_s: float = 0.05, what: str = "") -> T:
    """Call `check` until it returns something true.

    Raises:
        ServiceError: It did not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise ServiceError(f"not within {timeout_s:g} s: {what or check}; last answer {value!r}")
        time.sleep(period_s)


class Process:
    """A child in its own session, its output in a file.

    Args:
        argv: Program and arguments.
        log: File that takes standard output and error.
        env: Added to this process's environment.
    """

    def __init__(
        self, argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.argv = [str(part) for part in argv]
        self.log = log
        with log.open("ab") as out:
            self._child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_running(self) -> bool:
        return self._child.poll() is None

    def tail(self, size: int = 3000) -> str:
        """End of the log."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def wait_until(self, check: Callable[[], Any], timeout_s: float = 20, what: str = "") -> Any:
        """Like `wait_until`, and gives up at once when the child ends.

        Raises:
            ServiceError: With the end of the log.
        """
        name = Path(self.argv[0]).name

        def alive() -> Any:
            value = check()
            if not value and not self.is_running():
                raise ServiceError(f"{name} ended with {self._child.returncode}:\n{self.tail()}")
            return value

        try:
            return wait_until(alive, timeout_s, what=what or name)
        except ServiceError as error:
            raise ServiceError(f"{error}\n{name} said:\n{self.tail()}") from None

    def kill(self) -> None:
        """KILL the group at once, as a crash would."""
        self._signal(signal.SIGKILL)
        self._child.wait(10)

    def stop(self, timeout_s: float = 10) -> int:
        """TERM the group, KILL what is left after `timeout_s`; returns the exit code."""
        if self.is_running():
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)
        self._signal(signal.SIGKILL)
        return self._child.wait(10)

    def _signal(self, number: int) -> None:
        # The group keeps its id while any member lives, even after its leader was reaped.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


def http_get(url: str, data: bytes | None = None, timeout_s: float = 10) -> bytes:
    """Body of an answer; GET, or POST when there is `data`."""
    with urllib.request.urlopen(url, data=data, timeout=timeout_s) as answer:
        return answer.read()


def answers(url: str) -> bool:
    """The URL answers with 2xx."""
    try:
        http_get(url, timeout_s=2)
    except (OSError, urllib.error.URLError):
        return False
    return True


# --- HTTP pages ----------------------------------------------------------------------------------------------------


class Pages:
    """A real HTTP server on loopback whose pages a test sets: exporters, service discovery, broken proxies.

    `pages[path]` is the body (text, bytes or a callable that gives it), or a tuple (status, content type, body).
    `delay_s` is waited before each answer, `cut` bytes are missing at the end of each body although its length says
    otherwise. `requests` lists (method, path, body) of what was asked, `headers` the headers that came with it. A
    fourth member of the tuple is a mapping of further headers of the answer.
    """

    def __init__(self) -> None:
        self.pages: dict[str, Any] = {}
        self.delay_s = 0.0
        self.cut = 0
        self.requests: list[tuple[str, str, bytes]] = []
        self.headers: list[dict[str, str]] = []
        pages = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                path = self.path.split("?")[0]
                pages.headers.append(dict(self.headers))
                pages.requests.append((self.command, self.path, self.rfile.read(length)))
                time.sleep(pages.delay_s)
                page = pages.pages.get(path, (404, "text/plain", "no such page\n"))
                page = page() if callable(page) else page
                status, content_type, body, *more = page if isinstance(page, tuple) else (200, "text/plain", page)
                body = body() if callable(body) else body
                body = body.encode() if isinstance(body, str) else body
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body[: len(body) - pages.cut])
                if pages.cut:
                    self.close_connection = True

            do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                """No noise."""

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that went away is no error of the server."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# --- Prometheus ---------------------------------------------------------------------------------------------------


def scrape_config(
    job: str,
    targets: Sequence[str] = (),
    *,
    sd_url: str = "",
    interval_s: float = 1,
    metrics_path: str = "/metrics",
    labels: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One entry of `scrape_configs`: static targets or an http_sd URL.

    Args:
        job: Name of the scrape job.
        targets: `host:port` each.
        sd_url: http_sd address that lists targets.
        interval_s: Scrape interval, s.
        metrics_path: Path on the targets.
        labels: Labels of the static targets.
        **more: Further keys as Prometheus spells them, as `honor_labels=True`.
    """
    milliseconds = round(interval_s * 1000)
    entry: dict[str, Any] = {
        "job_name": job,
        "scrape_interval": f"{milliseconds}ms",
        "scrape_timeout": f"{milliseconds}ms",
        "metrics_path": metrics_path,
        **more,
    }
    if targets:
        entry["static_configs"] = [{"targets": list(targets), "labels": dict(labels or {})}]
    if sd_url:
        entry["http_sd_configs"] = [{"url": sd_url, "refresh_interval": "1s"}]
    return entry


class Prometheus:
    """A real Prometheus on a free loopback port, with its own data folder.

    Args:
        folder: Where configuration, data and log go.
        scrapes: Entries made by `scrape_config`.
        history: OpenMetrics text with timestamps in seconds, loaded before the start; `# EOF` is added if missing.
        rule_files: Paths of rule files.
        remote_write: Entries of `remote_write`, as Prometheus spells them.
        flags: Further command line flags.
    """

    def __init__(
        self,
        folder: Path,
        scrapes: Iterable[Mapping[str, Any]] = (),
        *,
        history: str | bytes | Path | None = None,
        rule_files: Sequence[str | Path] = (),
        remote_write: Sequence[Mapping[str, Any]] = (),
        flags: Sequence[str] = (),
    ) -> None:
        programs = require("prometheus", "promtool")
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.data = folder / "data"
        if history is not None:
            self._load(programs["promtool"], history)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [dict(entry) for entry in scrapes],
            "rule_files": [str(path) for path in rule_files],
            "remote_write": [dict(entry) for entry in remote_write],
        }
        self.config = folder / "prometheus.yml"
        self.config.write_text(json.dumps(config, indent=1))  # JSON is YAML
        self._argv = [
            programs["prometheus"],
            f"--config.file={self.config}",
            f"--storage.tsdb.path={self.data}",
            "--storage.tsdb.retention.time=100y",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--web.enable-lifecycle",
            "--web.enable-admin-api",
            "--log.level=warn",
            *flags,
        ]
        self.process: Process | None = None
        self.start()

    def _load(self, promtool: str, history: str | bytes | Path) -> None:
        if isinstance(history, Path):
            history = history.read_bytes()
        text = history.encode() if isinstance(history, str) else history
        if not text.rstrip().endswith(b"# EOF"):
            text = text.rstrip(b"\n") + b"\n# EOF\n"
        source = self.folder / "history.om"
        source.write_bytes(text)
        done = subprocess.run(
            [promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(source), str(self.data)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise ServiceError(f"promtool refused the history: {done.stderr.strip()}")

    def start(self) -> None:
        """Start (again) on the same port and data; returns when it is ready."""
        if self.process is not None and self.process.is_running():
            return
        self.process = Process(self._argv, self.folder / "prometheus.log")
        self.process.wait_until(lambda: answers(f"{self.url}/-/ready"), 30, what="prometheus ready")

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def api(self, path: str, **params: str) -> Any:
        """`data` of an answer of `/api/v1/<path>`."""
        query = urllib.parse.urlencode(params)
        return json.loads(http_get(f"{self.url}/api/v1/{path}?{query}"))["data"]

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Result of an instant query."""
        return self.api("query", query=expression, **({} if at is None else {"time": f"{at:.3f}"}))["result"]

    def wait_for(self, expression: str, at_least: int = 1, timeout_s: float = 20) -> list[dict[str, Any]]:
        """Wait until an instant query gives at least that many series; returns them."""

        def enough() -> list[dict[str, Any]]:
            rows = self.query(expression)
            return rows if len(rows) >= at_least else []

        return wait_until(enough, timeout_s, 0.1, what=f"{at_least} series of {expression}")


# --- Slurm --------------------------------------------------------------------------------------------------------


class Slurm:
    """A real Slurm on one host: munged, slurmdbd on MariaDB, slurmctld and one slurmd per node.

    Nodes are n1…nN of 8 GPUs, 16 CPUs and 64,000 MB each in partition `batch`; racks of two in the topology.

    Args:
        folder: State folder; keep its path short, sockets live in it.
        nodes: Number of nodes.
        accounting: With slurmdbd, so that sacct answers; else only the job completion file is written.
        parameters: Further lines of slurm.conf, overriding those of the same name.
        preemption: Partition `urgent` of the same nodes goes before `batch`, whose jobs are requeued for it, and
            before `cheap`, whose jobs are cancelled for it.
        rest: With slurmrestd: `rest_url` takes the token in `rest_token_file`, `rest_socket` is for root.
        cpus: CPUs of a node.
        clock: Environment of Slurm's own daemons, as that of a `FastClock`; munge and the database keep real time.
    """

    cluster = "alpha"

    def __init__(
        self,
        folder: Path,
        nodes: int = 4,
        *,
        accounting: bool = True,
        parameters: Mapping[str, str] | None = None,
        preemption: bool = False,
        rest: bool = False,
        cpus: int = 16,
        clock: Mapping[str, str] | None = None,
    ) -> None:
        programs = ("munged", "slurmctld", "slurmd", "sbatch", "sacct")
        self._programs = require(*(SLURM_PROGRAMS if accounting else programs), *(["slurmrestd"] if rest else []))
        self.folder, self.accounting, self.preemption, self.rest = folder, accounting, preemption, rest
        self._cpus, self._clock = cpus, dict(clock or {})
        self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
        self.conf = folder / "slurm.conf"
        self.jobcomp = folder / "jobcomp.txt"
        self.log = folder / "slurmctld.log"
        self.rest_socket = folder / "rest" / "sock"
        self._jwt_key = folder / "jwt.key"
        self.env = {"SLURM_CONF": str(self.conf), "TZ": "UTC"}
        self._processes: list[Process] = []
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start(dict(parameters or {}))
        except BaseException:
            self.stop()
            raise

    def _spawn(self, name: str, *argv: str | Path, env: Mapping[str, str] | None = None) -> Process:
        clock = self._clock if name in ("slurmctld", "slurmd", "slurmdbd") else {}
        process = Process(
            [self._programs[name], *argv], self.folder / f"{name}.log", {**self.env, **clock, **(env or {})}
        )
        self._processes.append(process)
        return process

    def _start(self, parameters: dict[str, str]) -> None:
        self._configure(parameters)
        database = self._start_database() if self.accounting else None
        self._start_munge()
        if database is not None:
            self._start_dbd(database)
        ctld = self._spawn("slurmctld", "-D")
        ctld.wait_until(lambda: "UP" in self.run("scontrol", "ping", check=False), 30, "slurmctld up")
        for node in self.nodes:
            self._spawn("slurmd", "-N", node, "-D")
        if self.rest:
            self._start_rest()
        self._processes[-1].wait_until(self._all_idle, 30, "all nodes idle")

    def _start_rest(self) -> None:
        self.rest_token_file = self.folder / "token"
        token = self.run("scontrol", "token", "lifespan=3600").strip().removeprefix("SLURM_JWT=")
        self.rest_token_file.write_text(token)
        port = free_port()
        self.rest_url = f"http://127.0.0.1:{port}"
        self.rest_socket.parent.mkdir()
        self.rest_socket.parent.chmod(0o777)
        # It refuses to work as root. One takes tokens, the other lets in its own user and root over a socket: with
        # SLURM_JWT in its environment it speaks by tokens alone.
        user = ("-u", "nobody") if os.getuid() == 0 else ()
        token = {"SLURM_JWT": "daemon"}
        rest = self._spawn("slurmrestd", *user, "-a", "rest_auth/jwt", f"127.0.0.1:{port}", env=token)
        self._spawn("slurmrestd", *user, "-a", "rest_auth/local", f"unix:{self.rest_socket}")
        rest.wait_until(lambda: _listens(port) and self.rest_socket.exists(), 30, "slurmrestd listening")

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-hN", "-p", "batch", "-o", "%T", check=False).split()
        return len(states) == len(self.nodes) and all(state == "idle" for state in states)

    def _configure(self, parameters: dict[str, str]) -> None:
        user, folder = getpass.getuser(), self.folder
        self._dbd_port, ctld_port = free_port(), free_port()
        for i in range(8):
            (folder / f"gpu{i}").touch()
        for name in ("state", "spool"):
            (folder / name).mkdir(exist_ok=True)
        settings = {
            "ClusterName": self.cluster,
            "SlurmctldHost": "localhost",
            "SlurmctldPort": ctld_port,
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder}/munge.sock",
            "CryptoType": "crypto/munge",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "bf_interval=2,bf_window=10080,bf_resolution=60,batch_sched_delay=0",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": 2,
            "MpiDefault": "none",
            "SwitchType": "switch/none",
            "TopologyPlugin": "topology/tree",
            "GresTypes": "gpu",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool" / "%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd-%n.pid",
            "SlurmdLogFile": folder / "slurmd-%n.log",
            "SlurmctldLogFile": folder / "slurmctld.log",
            "JobCompType": "jobcomp/filetxt",
            "JobCompLoc": self.jobcomp,
            "KillWait": 2,
            "MinJobAge": 300,
            "PriorityType": "priority/basic",
        }
        if self.accounting:
            settings |= {
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageHost": "localhost",
                "AccountingStoragePort": self._dbd_port,
                "AccountingStoragePass": f"{folder}/munge.sock",  # with munge this is the socket's path
                "AccountingStorageTRES": "gres/gpu",
                "JobAcctGatherType": "jobacct_gather/none",
            }
        if self.rest:
            self._jwt_key.write_bytes(secrets.token_bytes(32))
            self._jwt_key.chmod(0o600)
            settings |= {"AuthAltTypes": "auth/jwt", "AuthAltParameters": f"jwt_key={self._jwt_key}"}
        if self.preemption:
            settings |= {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
        settings |= parameters
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [
            f"NodeName={node} NodeHostname=localhost Port={free_port()} CPUs={self._cpus} RealMemory=64000 Gres=gpu:8"
            for node in self.nodes
        ]
        partition = f"Nodes={','.join(self.nodes)} MaxTime=7-0 State=UP"
        lines.append(f"PartitionName=batch Default=YES {partition}")
        if self.preemption:
            lines.append(f"PartitionName=cheap PreemptMode=CANCEL {partition}")
            lines.append(f"PartitionName=urgent PriorityTier=10 PreemptMode=OFF {partition}")
        self.conf.write_text("\n".join(lines) + "\n")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        racks = [self.nodes[i : i + 2] for i in range(0, len(self.nodes), 2)]
        topology = [f"SwitchName=r{i} Nodes={','.join(rack)}" for i, rack in enumerate(racks, 1)]
        topology.append(f"SwitchName=p1 Switches={','.join(f'r{i}' for i in range(1, len(racks) + 1))}")
        (folder / "topology.conf").write_text("\n".join(topology) + "\n")

    def _start_munge(self) -> None:
        # Its own key, socket and seed: the machine's munged, if there is one, is left alone.
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)
        files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        flags = [f"--{flag}={self.folder}/munge.{suffix}" for flag, suffix in files.items()]
        munged = self._spawn("munged", "--foreground", "--force", "--num-threads=2", *flags)
        munged.wait_until((self.folder / "munge.sock").exists, 10, "munge socket")

    def _start_database(self) -> tuple[Process, int]:
        folder, port = self.folder, free_port()
        user = f"--user={getpass.getuser()}"
        fast = ("--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M")
        made = subprocess.run(
            [self._programs["mariadb-install-db"], "--no-defaults", f"--datadir={folder}/mysql", user,
             "--skip-test-db", "--skip-name-resolve", "--auth-root-authentication-method=normal", *fast],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if made.returncode:
            raise ServiceError(f"mariadb-install-db: {made.stderr[-2000:]}{made.stdout[-2000:]}")
        init = folder / "init.sql"
        self._password = secrets.token_hex(8)
        init.write_text(
            f"CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{self._password}';\n"
            "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\n"
        )
        init.chmod(0o600)
        server = self._spawn(
            "mariadbd", "--no-defaults", f"--datadir={folder}/mysql", user, f"--socket={folder}/mysql.sock",
            f"--port={port}", "--bind-address=127.0.0.1", "--skip-name-resolve", f"--pid-file={folder}/mysql.pid",
            f"--init-file={init}", "--skip-log-bin", "--innodb-lock-wait-timeout=50", *fast,
        )  # fmt: skip
        return server, port

    def _start_dbd(self, database: tuple[Process, int]) -> None:
        server, port = database
        server.wait_until(lambda: _listens(port), 30, "mariadb listening")
        conf = self.folder / "slurmdbd.conf"
        conf.touch(0o600)
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={self.folder}/munge.sock\nDbdHost=localhost\n"
            f"DbdPort={self._dbd_port}\nSlurmUser={getpass.getuser()}\nStorageType=accounting_storage/mysql\n"
            f"StorageHost=127.0.0.1\nStoragePort={port}\nStorageUser=slurm\nStoragePass={self._password}\n"
            f"StorageLoc=slurm_acct_db\nLogFile={self.folder}/slurmdbd.log\nPidFile={self.folder}/slurmdbd.pid\n"
            "CommitDelay=0\n"
            + (f"AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={self._jwt_key}\n" if self.rest else "")
        )
        dbd = self._spawn("slurmdbd", "-D")
        dbd.wait_until(lambda: _listens(self._dbd_port), 30, "slurmdbd listening")
        self.run("sacctmgr", "-i", "add", "cluster", self.cluster)

    def run(self, *argv: str, check: bool = True, timeout_s: float = 30, env: Mapping[str, str] | None = None) -> str:
        """Standard output of a Slurm command.

        Raises:
            ServiceError: It failed and `check` is set; the message holds what it said.
        """
        program = self._programs.get(argv[0]) or find(argv[0]) or argv[0]
        done = subprocess.run(
            [program, *argv[1:]],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **self.env, **(env or {})},
            cwd=self.folder,
        )
        if check and done.returncode:
            raise ServiceError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}{done.stdout.strip()}")
        return done.stdout

    def submit(self, *options: str, script: str = "sleep 60") -> int:
        """Submit a batch job.

        Args:
            *options: Options of sbatch, as `--nodes=2`, `--gres=gpu:8`, `--time=10`.
            script: Body of the job.

        Returns:
            Id of the job.
        """
        out = self.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}")
        return int(out.strip().split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        text = self.run("scontrol", "-o", "show", "job", str(job_id))
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def wait_state(self, job_id: int | str, *states: str, timeout_s: float = 30) -> dict[str, str]:
        """Wait until the job is in one of the states; returns its fields."""

        def there() -> dict[str, str]:
            fields = self.job(job_id)
            return fields if fields.get("JobState") in states else {}

        return wait_until(there, timeout_s, 0.1, what=f"job {job_id} in {' or '.join(states)}")

    def wait_accounted(self, job_id: int | str, state: str, timeout_s: float = 20) -> None:
        """Wait until sacct gives that state of the job: records reach the database a moment after the event."""
        sacct = ("sacct", "-X", "-n", "-P", "-j", str(job_id), "-o", "State")
        wait_until(lambda: state in self.run(*sacct), timeout_s, 0.1, what=f"sacct: job {job_id} {state}")

    def reset(self, timeout_s: float = 30) -> None:
        """Cancel every job, delete every reservation, resume every node; returns when all nodes are idle."""
        self.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser(), check=False)
        self.run("scancel", "--user", getpass.getuser(), check=False)
        for line in self.run("scontrol", "-o", "show", "reservation", check=False).splitlines():
            if line.startswith("ReservationName="):
                name = line.split()[0].split("=", 1)[1]
                wait_until(lambda name=name: self._delete_reservation(name), timeout_s, 0.2, f"reservation {name} gone")
        if not self._all_idle():
            self.run("scontrol", "update", f"nodename={','.join(self.nodes)}", "state=resume", check=False)
        wait_until(self._all_idle, timeout_s, 0.1, what="all nodes idle")

    def _delete_reservation(self, name: str) -> bool:
        self.run("scontrol", "delete", f"reservationname={name}", check=False)
        return f"ReservationName={name} " not in self.run("scontrol", "-o", "show", "reservation", check=False)

    def stop(self) -> None:
        """Stop every daemon and whatever jobs left running."""
        if len(self._processes) > 1:
            with contextlib.suppress(ServiceError, subprocess.TimeoutExpired):
                self.run("scancel", "--user", getpass.getuser(), check=False, timeout_s=5)
        for process in reversed(self._processes):
            process.stop(5)
        self._processes.clear()
        # Step daemons leave their parent's session; they are known by the configuration they were started with.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.conf) and process.pid != os.getpid():
                    process.kill()


class FastClock:
    """A clock that runs faster than the machine's, for processes that are started with its environment.

    Args:
        start: What it shows when it is made, UTC.
        speed: Its seconds in one real second.

    Attributes:
        env: What processes need in their environment; all that have it read the same clock.
    """

    def __init__(self, start: datetime, speed: float) -> None:
        programs = require("faketime")
        self.speed = speed
        spec = f"@{start.astimezone(UTC):%Y-%m-%d %H:%M:%S} x{speed:g}"
        # The program holds the common start of the clock in shared memory, and frees it when `cat` has ended.
        self._holder = subprocess.Popen(
            [programs["faketime"], "-m", "-f", spec, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env={**os.environ, "TZ": "UTC", "FAKETIME_DONT_RESET": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            self.env = wait_until(self._environment, 10, what="the fast clock")
            shown = {**os.environ, **self.env}
            looks = []
            for _ in range(5):  # the look with the least in between is the truest
                before = time.time()
                text = subprocess.run(["date", "+%s.%N"], capture_output=True, text=True, check=True, env=shown).stdout
                looks.append((time.time() - before, before, float(text)))
            gap_s, before, self._shown_s = min(looks)
            self._real_s = before + gap_s / 2
        except BaseException:
            self.stop()
            raise

    def _environment(self) -> dict[str, str]:
        for child in psutil.Process(self._holder.pid).children():
            with contextlib.suppress(psutil.Error):
                told = child.environ()
                if child.name() == "cat" and "LD_PRELOAD" in told:
                    return {name: told[name] for name in told if name.startswith("FAKETIME") or name == "LD_PRELOAD"}
        return {}

    def at(self, moment: datetime) -> datetime:
        """What it shows at a real moment; whole microseconds, UTC."""
        return datetime.fromtimestamp(self._shown_s + (moment.timestamp() - self._real_s) * self.speed, UTC)

    def now(self) -> datetime:
        """What it shows."""
        return self.at(datetime.now(UTC))

    def stop(self) -> None:
        """End it; processes that still have its environment must have ended before."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(10)


def _listens(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def utc_text(moment: datetime) -> str:
    """A time as Slurm's options take it under TZ=UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S")


# --- Chromium -----------------------------------------------------------------------------------------------------


def start_chromium(folder: Path, *flags: str) -> Any:
    """A selenium driver of a headless Chromium with an empty profile in `folder`; the caller calls `quit()`."""
    programs = require(*CHROMIUM_PROGRAMS)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for flag in (*CHROMIUM_FLAGS, f"--user-data-dir={folder}", "--window-size=1400,1000", *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(programs["chromedriver"], log_output=str(folder.parent / f"{folder.name}-driver.log"))
    return webdriver.Chrome(options=options, service=service)

"""The whole loop on real parts: simulator → Prometheus → nowcast → API → page and Slurm lease.

Exporters are simulated (there is no GPU here); Prometheus, Slurm and Chromium are the real programs. One scenario runs
once; each test looks at one promise.
"""

import contextlib
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from tests import services

ROOT = Path(__file__).parent.parent
TICK_S = 5
LEASE_S = 120
PLANNED_BEGIN_S = 100

pytestmark = [
    pytest.mark.services("prometheus", "promtool", *services.SLURM_PROGRAMS, "chromium", "chromedriver"),
    pytest.mark.timeout(600),
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "weatherglass.py"), *arguments]


def reservations(slurm) -> list[dict[str, str]]:
    text = slurm.run("scontrol", "-o", "show", "reservation", check=False)
    lines = [line for line in text.splitlines() if line.startswith("ReservationName=")]
    return [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]


class Scenario:
    """What happened: filled in while it runs, read by the tests."""

    def __init__(self, folder: Path, slurm, chromium) -> None:
        self.folder, self.slurm, self.chromium = folder, slurm, chromium
        self.stack = contextlib.ExitStack()
        self.api = f"http://127.0.0.1:{services.free_port()}"
        self.pages = f"http://127.0.0.1:{services.free_port()}"
        self.simulator = f"http://127.0.0.1:{services.free_port()}"
        self.first_seen: dict[str, dict] = {}
        self.expired_served: list[dict] = []
        self.truth: dict[str, dict] = {}
        self.lease: dict[str, str] = {}
        self.metrics = ""
        self.page = ""

    def process(self, name: str, argv: list[str], **env: str) -> services.Process:
        started = services.Process(argv, self.folder / f"{name}.log", env=env, cwd=ROOT)
        self.stack.callback(started.stop)
        return started

    def start(self) -> None:
        self.running = {node: self.run_job(node) for node in ("n1", "n2")}
        placed = [text for node, job in self.running.items() for text in ("--job", f"{job}:{node}")]
        port = self.simulator.rsplit(":", 1)[1]
        argv = [sys.executable, "-m", "tests.simulated_past", "--port", port, "--tick-s", str(TICK_S), *placed]
        simulator = self.process("simulator", [*argv, "--out", str(self.folder / "sim")])
        simulator.wait_until(lambda: services.answers(f"{self.simulator}/healthz"), 120, "simulator")
        self.prometheus = services.Prometheus(
            self.folder / "prometheus",
            [services.scrape_config("gpu", sd_url=f"{self.simulator}/sd", interval_s=TICK_S, honor_labels=True)],
            history=self.folder / "sim" / "past.om",
        )
        self.stack.callback(self.prometheus.stop)
        config = self.folder / "weatherglass.toml"
        config.write_text(f"""\
state_dir = "{self.folder}/state"
[clusters.e2e]
telemetry = "prometheus"
prometheus_url = "{self.prometheus.url}"
jobs = "slurm"
slurm_conf = "{self.slurm.conf}"
inventory = "{self.folder}/sim/inventory.csv"
tick_s = {TICK_S}
exporter_interval_s = {TICK_S}
jobs_period_s = 5
slurm_rpcs_per_minute = 120
[hints]
plan_lease_s = {LEASE_S}
consumer_period_s = 5
[slurm_agent]
period_s = 2
rpcs_per_minute = 60
[api]
port = {self.api.rsplit(":", 1)[1]}
[dashboards]
port = {self.pages.rsplit(":", 1)[1]}
refresh_s = 2
[dagster]
enabled = false
""")
        self.env = {"WEATHERGLASS_CONFIG": str(config)}
        run = self.process("run", command("run"), **self.env)
        run.wait_until(lambda: services.answers(f"{self.api}/readyz"), 180, "fresh hints")
        self.process("agent", command("slurm-agent", "--mode", "reserve"), **self.env)

    def run_job(self, node: str) -> int:
        """A training job of eight GPUs on one node."""
        job = self.slurm.submit("--nodes=1", "--exclusive", "--gres=gpu:8", f"--nodelist={node}", "--time=60",
                                script="sleep 3000")  # fmt: skip
        self.slurm.wait_state(job, "RUNNING")
        return job

    def inject(self, kind: str, node: str, onset_in_s: float) -> None:
        body = {"class": kind, "node": node, "gpu_index": 3, "onset_in_s": onset_in_s, "is_step": False}
        httpx.post(f"{self.simulator}/control/inject", json=body).raise_for_status()

    def look(self) -> None:
        """One poll of everything a scheduler and an SRE would see."""
        now = datetime.now(UTC)
        answer = httpx.get(f"{self.api}/v1/bottlenecks", timeout=30)
        if answer.status_code == 200:
            body = answer.json()
            if body["expires_in_s"] <= 0:
                self.expired_served.append(body)
            for item in body["items"]:
                key = (item["bottleneck_class"], item["node"])
                if not item["is_active"] and key not in self.first_seen:
                    self.first_seen[key] = {"at": now, **item}
                    self.metrics = httpx.get(f"{self.api}/metrics").text
        for found in reservations(self.slurm):
            if found["ReservationName"].startswith("wg_") and not self.lease:
                self.lease = {**found, "seen_at": now.isoformat()}

    def play(self) -> None:
        time.sleep(10)
        self.planned = self.slurm.submit(
            "--nodes=1", "--exclusive", "--gres=gpu:8", "--time=30", f"--begin=now+{PLANNED_BEGIN_S}",
            script=f"sleep {LEASE_S}",
        )  # fmt: skip
        self.inject("thermal_throttle", "n1", 90)
        self.inject("nvlink_saturation", "n2", 100)
        began = time.monotonic()
        while time.monotonic() - began < 150:
            self.look()
            if len(self.first_seen) >= 2 and not self.page:
                self.chromium.get(f"{self.pages}/bottlenecks")
                services.wait_until(lambda: "n2" in self.body(), 60, 0.3, "the hint on the page")
                self.page = self.body()
            time.sleep(0.5)
        rows = httpx.get(f"{self.simulator}/truth").json()["items"]
        self.truth = {(row["class"], row["node"]): row for row in rows}

    def body(self) -> str:
        return self.chromium.find_element("tag name", "body").text


@pytest.fixture(scope="module")
def scenario(slurm, chromium):
    folder = Path(tempfile.mkdtemp(prefix="wg-e2e-"))
    slurm.reset()
    played = Scenario(folder, slurm, chromium)
    with played.stack:
        played.start()
        played.play()
        yield played
    slurm.reset()


@pytest.mark.parametrize(("kind", "node"), [("thermal_throttle", "n1"), ("nvlink_saturation", "n2")])
def test_an_injected_onset_is_published_before_it_happens(scenario, kind, node):
    onset = datetime.fromisoformat(scenario.truth[kind, node]["onset"])
    hint = scenario.first_seen[kind, node]
    lead_s = (onset - hint["at"]).total_seconds()
    assert lead_s > 0, f"{kind}: first visible {-lead_s:.0f} s after its onset"
    assert str(scenario.running[node]) in hint["job_ids"]


def test_nothing_else_is_foreseen(scenario):
    # A GPU that heat holds down lags behind its gang: that is foreseen once its clocks fall, and not before.
    hot, lag = scenario.first_seen["thermal_throttle", "n1"], scenario.first_seen.get(("straggler", "n1"))
    assert set(scenario.first_seen) - {("straggler", "n1")} <= {("thermal_throttle", "n1"), ("nvlink_saturation", "n2")}
    assert lag is None or lag["at"] > hot["at"]


def test_no_expired_hint_is_served(scenario):
    assert scenario.expired_served == []


def test_the_hint_is_on_the_page(scenario):
    assert "n1" in scenario.page
    assert "n2" in scenario.page


def test_the_hint_is_a_gauge(scenario):
    assert "weatherglass_" in scenario.metrics
    assert 'class="' in scenario.metrics


def test_a_lease_is_made_for_the_planned_job(scenario):
    assert scenario.lease, "no reservation wg_… was seen"
    assert scenario.lease["Users"] == "root"
    assert scenario.lease["Nodes"] in {"n3", "n4"}
    flags = set(scenario.lease["Flags"].split(","))
    assert {"FLEX", "MAGNETIC", "NO_HOLD_JOBS_AFTER_END"} <= flags


def test_the_unmodified_job_starts_in_its_lease_and_outlives_it(scenario):
    job = scenario.slurm.wait_state(scenario.planned, "RUNNING", "COMPLETED", timeout_s=120)
    assert job["NodeList"] == scenario.lease["Nodes"]
    assert job["StartTime"] <= scenario.lease["EndTime"]
    ended = scenario.slurm.wait_state(scenario.planned, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout_s=200)
    assert ended["JobState"] == "COMPLETED"
    assert ended["EndTime"] > scenario.lease["EndTime"]


def test_the_agent_wrote_down_what_it_did(scenario):
    lines = (scenario.folder / "state" / "actions" / "e2e.jsonl").read_text().splitlines()
    applied = [row for row in map(json.loads, lines) if row["is_applied"]]
    assert any(str(scenario.planned) == row["job_id"] for row in applied)

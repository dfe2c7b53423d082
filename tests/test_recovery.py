"""After kill -9, an outage and a full disk the tables equal those of an undisturbed run; no expired hint is served.

Samples come from a real Prometheus that holds twelve minutes of a simulated cluster and goes on scraping it.
"""

import contextlib
import functools
import os
import random
import signal
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest

from pipelines.compose import open_store
from pipelines.job_history import MARK
from pipelines.settings import load_settings
from pipelines.spans import TELEMETRY_MARK, floor_time
from pipelines.steps import ingest_cluster
from pipelines.store import StoreError
from tests import services
from tests.store_services import small_disk  # noqa: F401  (a fixture)

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.services("prometheus", "promtool"), pytest.mark.timeout(600)]

# Rows of these say when they were read, which differs from run to run.
READ_AT = {"raw_jobs": ("observed_at",), "core_jobs": ("observed_at",), "core_nodes": ("observed_at",)}
TABLES = (
    "raw_gpu_samples", "core_gpu_samples", "core_node_samples", "core_gpu_minutes", "core_gpu_hours",
    "core_data_quality", "core_faults", "feat_labels", *READ_AT,
)  # fmt: skip


class World:
    """A simulated cluster under a real Prometheus, and settings that point at it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.stack = folder, stack
        port = services.free_port()
        argv = [sys.executable, "-m", "tests.simulated_past", "--port", str(port), "--tick-s", "5",
                "--job", "1:n1", "--job", "2:n2", "--out", str(folder / "sim")]  # fmt: skip
        simulator = services.Process(argv, folder / "simulator.log", cwd=ROOT)
        stack.callback(simulator.stop)
        url = f"http://127.0.0.1:{port}"
        simulator.wait_until(lambda: services.answers(f"{url}/healthz"), 60, "simulator")
        self.prometheus = services.Prometheus(
            folder / "prometheus",
            [services.scrape_config("gpu", sd_url=f"{url}/sd", interval_s=5, honor_labels=True)],
            history=folder / "sim" / "past.om",
        )
        stack.callback(self.prometheus.stop)
        self.now = floor_time(datetime.now(UTC), timedelta(minutes=1)) - timedelta(minutes=1)
        self.begin = self.now - timedelta(minutes=10)

    def settings(self, name: str, state: Path | None = None, extra: str = ""):
        """Settings with a state folder of their own; the mark stands at the beginning of the recorded past."""
        path = self.folder / f"{name}.toml"
        path.write_text(f"""\
state_dir = "{state or self.folder / name}"
[clusters.c]
telemetry = "prometheus"
prometheus_url = "{self.prometheus.url}"
jobs = "sacct-file"
jobs_path = "{self.folder}/sim/sacct.txt"
inventory = "{self.folder}/sim/inventory.csv"
tick_s = 2
exporter_interval_s = 5
jobs_period_s = 5
[ingest]
window_s = 60
overlap_s = 20
lag_s = 5
{extra}""")
        settings = load_settings(path, {})
        with open_store(settings) as store:
            store.transact(lambda w: w.set_mark("c", TELEMETRY_MARK, self.begin))
            # A first run of jobs reads thirty days in as many transactions, long before the cluster began.
            store.transact(lambda w: w.set_mark("c", MARK, self.begin - timedelta(days=1)))
        return path, settings

    def hashes(self, settings, now: datetime) -> dict[str, str]:
        """Hash of every table, order-free, when everything before `now` has been read."""
        with open_store(settings) as store:
            for _ in range(3):
                report = ingest_cluster(store, settings, "c", now)
                assert report.errors == []
            assert store.query("SELECT count(*) AS n FROM core_gpu_samples")["n"][0] > 0
            return {table: store.table_hash(table, exclude=READ_AT.get(table, ())) for table in TABLES}

    @functools.cache  # noqa: B019  (a world lives as long as this file's tests)
    def undisturbed(self, now: datetime) -> dict[str, str]:
        """What one run that nothing disturbs leaves; the recorded past does not change."""
        return self.hashes(self.settings(f"undisturbed-{now:%H%M%S}")[1], now)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("recovery"), stack)


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "weatherglass.py"), *arguments]


def test_ingest_killed_in_the_middle_of_windows(world):
    path, settings = world.settings("killed")
    rng = random.Random(5)
    kills = 0
    store_files = settings.state / "store" / "data"
    for _ in range(6):
        child = services.Process(command("ingest"), world.folder / "ingest.log", env={"WEATHERGLASS_CONFIG": str(path)})
        before = set(store_files.rglob("*.parquet"))
        # As soon as the run has begun to write: the middle of a window is where it hurts.
        with contextlib.suppress(services.ServiceError, TimeoutError):
            child.wait_until(lambda before=before: set(store_files.rglob("*.parquet")) - before, 20, "a first file")
            time.sleep(rng.uniform(0, 0.4))
        kills += child.is_running()
        child.kill()
    assert kills >= 3, "the kills came too late to mean anything"
    assert world.hashes(settings, world.now) == world.undisturbed(world.now)


def test_prometheus_down_for_ten_minutes(world):
    _, settings = world.settings("outage")
    with open_store(settings) as store:
        first = world.begin + timedelta(minutes=1, seconds=5)
        assert ingest_cluster(store, settings, "c", first).errors == []
        mark = store.mark("c", TELEMETRY_MARK)
        world.prometheus.stop()
        try:
            for minute in range(1, 11):
                report = ingest_cluster(store, settings, "c", first + timedelta(minutes=minute))
                assert world.prometheus.url in report.telemetry.error
                assert store.mark("c", TELEMETRY_MARK) == mark
        finally:
            world.prometheus.start()  # the other tests read it too
    assert world.hashes(settings, world.now) == world.undisturbed(world.now)


def test_full_disk(world, small_disk):  # noqa: F811
    _, settings = world.settings("full", small_disk / "state")
    filler = small_disk / "filler"
    with open_store(settings) as store:
        assert ingest_cluster(store, settings, "c", world.begin + timedelta(minutes=2, seconds=5)).errors == []
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 65_536)
        with pytest.raises(StoreError, match=r"(?i)no space|disk"):
            ingest_cluster(store, settings, "c", world.now)
        filler.unlink()
    assert world.hashes(settings, world.now) == world.undisturbed(world.now)


class Poller(threading.Thread):
    """Asks the API all the time, as a scheduler would, and keeps what it must never see."""

    def __init__(self, api: str) -> None:
        super().__init__(daemon=True)
        self.api, self.stop = api, threading.Event()
        self.answers, self.refused, self.wrong = 0, 0, []

    def run(self) -> None:
        with httpx.Client(timeout=5) as client:
            while not self.stop.wait(0.05):
                asked = datetime.now(UTC)
                try:
                    answer = client.get(f"{self.api}/v1/bottlenecks")
                except httpx.HTTPError:
                    self.refused += 1
                    continue
                self.answers += 1
                body = answer.json()
                if answer.status_code == 503:
                    continue
                made = datetime.fromisoformat(body["generated_at"])
                age_s = (asked - made).total_seconds()  # how long it lay here is not the server's
                if answer.status_code != 200 or body["expires_in_s"] <= 0 or age_s > 2 * 2:
                    self.wrong.append((answer.status_code, age_s, body.get("expires_in_s")))


def test_every_process_comes_back_and_no_expired_hint_is_served(world):
    api, pages, dagster = (services.free_port() for _ in range(3))
    path, settings = world.settings(
        "running", extra=f"[api]\nport = {api}\n[dashboards]\nport = {pages}\n[dagster]\nport = {dagster}\n"
    )
    url = f"http://127.0.0.1:{api}"
    run = services.Process(command("run"), world.folder / "run.log", env={"WEATHERGLASS_CONFIG": str(path)})
    world.stack.callback(run.stop, 30)
    run.wait_until(lambda: services.answers(f"{url}/readyz"), 150, "fresh hints")
    run.wait_until(lambda: services.answers(f"http://127.0.0.1:{dagster}/server_info"), 180, "Dagster")
    poller = Poller(url)
    poller.start()

    def child(word: str) -> psutil.Process:
        for process in psutil.Process(run.pid).children():
            with contextlib.suppress(psutil.Error):
                if word in process.cmdline() or any(part.endswith(word) for part in process.cmdline()):
                    return process
        raise AssertionError(f"no child {word}")

    for word in ("nowcast", "api", "dashboards", "dagster-daemon", "dagster-webserver"):
        victim = child(word)
        os.kill(victim.pid, signal.SIGKILL)

        def is_back(word=word, victim=victim):
            with contextlib.suppress(AssertionError):
                return child(word).pid != victim.pid
            return False

        run.wait_until(is_back, 90, f"{word} back")
    run.wait_until(lambda: services.answers(f"{url}/readyz"), 150, "fresh hints again")
    run.wait_until(lambda: services.answers(f"http://127.0.0.1:{pages}/"), 150, "pages again")
    run.wait_until(lambda: services.answers(f"http://127.0.0.1:{dagster}/server_info"), 180, "Dagster again")
    poller.stop.set()
    poller.join(10)
    assert run.stop(30) == 0
    assert poller.answers > 100
    assert poller.wrong == []
    now = datetime.now(UTC)  # not an earlier time: the run may just have read the newest minute
    assert world.hashes(settings, now) == world.undisturbed(now)

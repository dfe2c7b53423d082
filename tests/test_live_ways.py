"""What reaches the live loop by each way, under pressure, and after a process was killed with no word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from features.telemetry import RingWindow
from features.windows import FEATURE_INDEX
from pipelines.sources import Fetched
from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.remote_write import RemoteWriteSource
from pipelines.sources.remote_write_server import Receiver, listen
from pipelines.sources.scrape import ScrapeSource
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.nowcast_memory import JOBS, QUEUES
from scheduler_hints.snapshot import Publisher
from tests.gpu_samples import BOOK, at, frame, gang
from tests.services import Pages, Prometheus, scrape_config
from tests.test_remote_write import good_body, post, sending_to


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.stop()


def exporter() -> str:
    """A node of two GPUs: what DCGM, a job, IPMI, node_exporter and its ports say, on one page."""
    moved = int(time.time() * 1e9)
    port = 'device="mlx5_0",port="1",node="n1"'
    lines = [
        'ipmi_temperature_celsius{id="1",name="Inlet Temp",node="n1"} 24.5',
        'node_memory_MemAvailable_bytes{node="n1"} 1e11', 'node_memory_MemTotal_bytes{node="n1"} 4e11',
        f"node_infiniband_port_data_transmitted_bytes_total{{{port}}} {moved}",
        f"node_infiniband_np_ecn_marked_roce_packets_received_total{{{port}}} {moved // 10**8}",
        f"node_infiniband_rate_bytes_per_second{{{port}}} 5e10",
    ]  # fmt: skip
    for gpu in (0, 1):
        labels = f'gpu="{gpu}",UUID="GPU-n1-{gpu}",Hostname="n1",node="n1"'
        lines += [f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} 61", f"weatherglass_step_time_seconds{{{labels}}} 1.25"]
    return "\n".join(lines) + "\n"


def holds(found: Fetched) -> bool:
    """Everything that the live loop reads of the page is there."""
    if found.gpu.height != 2 or not found.node.height or not found.port.height:
        return False
    assert found.gpu["gpu_temp_c"].to_list() == [61, 61]
    assert found.gpu["step_time_s"].to_list() == [1.25, 1.25]
    (node,) = found.node.filter(pl.col("inlet_temp_c").is_not_null()).to_dicts()
    assert (node["node"], node["inlet_temp_c"]) == ("n1", 24.5)
    assert node["host_mem_available_bytes"] == pytest.approx(1e11)
    newest = found.port.sort("ts").row(-1, named=True)
    assert (newest["node"], newest["device"], newest["speed_bytes_per_s"]) == ("n1", "mlx5_0", 5e10)
    assert newest["tx_bytes_total"] > 1e18
    assert newest["ecn_marked_total"] > 1e10
    return True


@pytest.mark.services("prometheus")
def test_nodes_ports_and_steps_come_all_three_ways(tmp_path: Path, pages: Pages) -> None:
    pages.pages["/metrics"] = exporter
    scraped = ScrapeSource("a", [f"{pages.url}/metrics"], tmp_path / "scrape")
    written = RemoteWriteSource("a", tmp_path / "written", port=0, exporter_interval_s=1, tick_s=1)
    server = Prometheus(
        tmp_path / "prometheus",
        [scrape_config("node", [pages.address], interval_s=0.5)],
        remote_write=sending_to(written.listen()),
    )
    asked = PrometheusSource("a", server.url, exporter_interval_s=1)
    try:
        server.start()
        assert holds(scraped.latest())
        for source in (written, asked):
            until = time.monotonic() + 20
            while not holds(source.latest()):
                assert time.monotonic() < until, source
                time.sleep(0.1)
    finally:
        for source in (scraped, written, asked):
            source.close()
        server.stop()


def test_under_pressure_requests_are_put_off_counted_and_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sources.remote_write_server._TURN_S", 0.2)
    body, put_off, held = good_body(), [], []
    answers: list[Future[tuple[int, str]]] = []

    def submit(sender: str, given: bytes) -> Future[tuple[int, str]]:
        answers.append(Future())
        held.append(given)
        return answers[-1]

    receiver = Receiver(
        listen("127.0.0.1", 0), submit, most_bytes=len(body), put_off=lambda: put_off.append(time.monotonic())
    )
    try:
        with ThreadPoolExecutor(6) as pool:
            waiting = [pool.submit(post, receiver.port, body) for _ in range(6)]
            until = time.monotonic() + 10
            while len(put_off) < 4 and time.monotonic() < until:
                time.sleep(0.02)
            assert len(held) == 2  # no more bodies are held than there is room for
            assert len(put_off) == 4
            for answer in answers:
                answer.set_result((204, ""))
            found = [one.result(10) for one in waiting]
        assert sorted(status for status, _ in found) == [204, 204, 503, 503, 503, 503]
        assert {headers["Retry-After"] for status, headers in found if status == 503} == {"5"}
        with ThreadPoolExecutor(1) as pool:  # what was put off is sent again, and taken
            again = pool.submit(post, receiver.port, body)
            while len(answers) < 3:
                time.sleep(0.01)
            answers[-1].set_result((204, ""))
            assert again.result(10)[0] == 204
    finally:
        receiver.close()


def test_what_was_put_off_is_in_the_counts_and_said_once(tmp_path: Path) -> None:
    source = RemoteWriteSource("a", tmp_path / "spool", port=0)
    assert source.received == {}
    try:
        source.listen()
        source.latest()
        source._keeper.intake().put_off()
        assert "1 request put off since the last look" in " ".join(source.latest().warnings)
        assert source.received["put_off"] == 1
        assert not any("put off" in text for text in source.latest().warnings)
    finally:
        source.close()


CHILD = """
import sys, time
from datetime import timedelta
from pathlib import Path
import numpy as np, polars as pl
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.snapshot import Publisher
from tests.gpu_samples import at, frame
from tests.test_nowcast import CONFIG, hot, inventory, no_jobs

root, from_s, until_s, warm = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "warm"
samples = frame(hot([3, 5]))
nowcast = Nowcast("c", Publisher(root, "c"), CONFIG)
nowcast.observe_jobs(no_jobs(), inventory(), (), at(from_s))
if warm:
    assert nowcast.memory.recall_jobs() == 8
    nowcast.warm(samples.filter((pl.col("ts") > at(from_s - 615)) & (pl.col("ts") <= at(from_s - 15))))
for second in range(from_s, until_s, 15):
    nowcast.observe(samples.filter(pl.col("ts") == at(second)), None, at(second))
    nowcast.tick(at(second + 1))
    block = nowcast.window.features(np.arange(8), "thermal_throttle", at(second + 1).timestamp())
    np.save(root / f"features-{second}.npy", block.matrix)
    print(second, flush=True)
time.sleep(60)
"""


def run_until(root: Path, from_s: int, until_s: int, how: str) -> dict[str, str]:
    """Run a nowcast of its own process, kill it after its last tick; ids of its hints by place."""
    root.mkdir(exist_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), str(from_s), str(until_s), how],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip
    assert child.stdout is not None
    timer = threading.Timer(60, child.kill)
    timer.start()
    try:
        for line in child.stdout:
            if int(line) == until_s - 15:
                break
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        child.stdout.close()
        timer.cancel()
    said = json.loads((root / "c" / "bottlenecks.json").read_bytes())
    return {f"{item['scope']} {item['node']} {item['gpu_uuid']}": item["id"] for item in said["items"]}


def test_killed_without_a_word_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed at 1,170 s with hints out: from the first tick after the restart all is as if it had never been gone."""
    whole = run_until(tmp_path / "whole", 300, 1215, "cold")
    before = run_until(tmp_path / "cut", 300, 1185, "cold")
    assert before
    after = run_until(tmp_path / "cut", 1185, 1215, "warm")
    assert after == before  # ids last
    assert set(after) == set(whole)
    for second in (1185, 1200):
        one, other = (np.load(tmp_path / name / f"features-{second}.npy") for name in ("whole", "cut"))
        for name, column in FEATURE_INDEX.items():
            np.testing.assert_allclose(other[:, column], one[:, column], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("content", [b"", b"PAR1 not really", b"{}"])
def test_a_damaged_memory_keeps_nothing_from_starting(tmp_path: Path, content: bytes) -> None:
    nowcast = Nowcast("c", Publisher(tmp_path, "c"))
    assert nowcast.memory.recall_jobs() == 0  # there is none
    (tmp_path / "c").mkdir(exist_ok=True)
    (tmp_path / "c" / JOBS).write_bytes(content)
    assert nowcast.memory.recall_jobs() == 0
    pl.DataFrame({"gpu_uuid": ["a"], "node": ["n"], "job_id": ["1"]}).write_parquet(tmp_path / "c" / JOBS)
    assert nowcast.memory.recall_jobs() == 0  # of another version


def test_a_memory_of_other_kinds_of_values_harms_no_tick(tmp_path: Path) -> None:
    samples = frame(gang(seconds=600))
    ring = RingWindow(BOOK)
    ring.observe(samples)
    told = ring.remembered()
    numbered = told.with_columns(gpu_uuid=pl.int_range(pl.len()), job_id=pl.lit(3))
    for changed, count in (
        (numbered, 8),
        (told.with_columns(since=pl.lit("x")), 0),
        (told.with_columns(steps=pl.lit([1.0])), 0),
        (told.with_columns(steps=pl.lit(None)), 0),
    ):
        nowcast = Nowcast("c", Publisher(tmp_path, "c"))
        (tmp_path / "c").mkdir(exist_ok=True)
        changed.write_parquet(tmp_path / "c" / JOBS)
        assert nowcast.memory.recall_jobs() == count
        assert nowcast.window.count == count
        nowcast.observe(samples.filter(pl.col("ts") == at(585)), None, at(585))
        nowcast.tick(at(586))
        assert nowcast.window.remembered().height == 8 + count


@pytest.mark.parametrize("content", ["[" * 5_000, '{"queues": ["a"], "memory": {"first_s": [1' + "0" * 400 + "]}}"])
def test_a_memory_of_queues_that_no_reader_takes_is_passed_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / QUEUES).write_text(content)
    assert "is passed over" in Nowcast("c", Publisher(tmp_path, "c")).problems["queues"]


def test_what_is_remembered_is_of_the_job_that_still_runs() -> None:
    samples = frame(gang(seconds=600))
    ring = RingWindow(BOOK)
    ring.observe(samples)
    told = ring.remembered()
    assert told["job_id"].to_list() == ["7"] * 8
    assert told["plateau"].is_not_nan().all()
    for job, is_same in (("7", True), ("8", False), (None, False)):
        again = RingWindow(BOOK)
        assert again.recall(told) == 8
        newest = frame(gang(seconds=900, job=job)).filter(pl.col("ts") == at(885))
        again.observe(newest)
        over = again.samples()["over_plateau_gib"]
        assert over.is_not_null().all() == is_same
        assert (again.since[0] == at(0).timestamp()) == is_same
        assert again.count == 8
    gone = RingWindow(BOOK)
    gone.recall(told)
    gone.observe(newest.head(1))
    assert gone.forget(at(900).timestamp()) == 7  # who never came back gives the place up
    assert gone.uuids == ["GPU-0000"]


def test_names_of_jobs_that_have_ended_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("features.places._MANY_JOBS", 10)
    ring = RingWindow(BOOK)
    samples = frame(gang(seconds=600))
    for tick in range(40):
        ring.observe(samples.filter(pl.col("ts") == at(15 * tick)).with_columns(job_id=pl.lit(f"j{tick // 2}")))
    before = ring.features(np.arange(8), "thermal_throttle", at(600).timestamp()).matrix
    assert len(ring.job_ids) == 20
    assert ring.forget(at(600).timestamp()) == 0
    assert ring.job_ids == ["j19"]
    assert [ring.job_id(gpu) for gpu in range(8)] == ["j19"] * 8
    np.testing.assert_array_equal(ring.features(np.arange(8), "thermal_throttle", at(600).timestamp()).matrix, before)

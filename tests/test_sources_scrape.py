"""The scrape source on real HTTP pages: parser against prometheus_client's, spool, dead and slow targets."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from features.metrics import GPU_NAMES
from pipelines.settings import Cluster
from pipelines.sources import SourceError, build_telemetry, scrape
from pipelines.sources.exposition import ExpositionError, parse_page, parse_series
from pipelines.sources.scrape import ScrapeSource
from pipelines.sources.spool import Spool
from pipelines.sources.wide import Index, Samples
from simulator.cluster import SimulatedCluster
from simulator.exposition import Exposition
from tests.services import Pages, free_port

T0 = datetime(2026, 11, 1, 12, 0, 30, 250_000, tzinfo=UTC)


def page(node: str, temp: float = 61, gpus: int = 2, host: bool = True) -> str:
    lines = ["# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).", "# TYPE DCGM_FI_DEV_GPU_TEMP gauge"]
    where = f',Hostname="{node}"' if host else ""
    for name, value in (("DCGM_FI_DEV_GPU_TEMP", temp), ("DCGM_FI_DEV_FB_USED", 1024), ("DCGM_FI_DEV_ENC_UTIL", 0)):
        lines += [f'{name}{{gpu="{g}",UUID="GPU-{node}-{g}"{where},hpc_job="5"}} {value}' for g in range(gpus)]
    lines += ['ipmi_temperature_celsius{id="1",name="Inlet Temp"} 24.5', "process_open_fds 7"]
    return "\n".join(lines) + "\n"


class Clock:
    def __init__(self) -> None:
        self.now = T0

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ScrapeSource]]:
    made = []

    def start(*targets: str, timeout_s: float = 1, clock: Callable[[], datetime] | None = None) -> ScrapeSource:
        source = ScrapeSource("a", targets, tmp_path / "spool", timeout_s=timeout_s, clock=clock or Clock())
        made.append(source)
        return source

    yield start
    for source in made:
        source.close()


def test_targets_of_service_discovery(pages: Pages, make: Callable[..., ScrapeSource]) -> None:
    for node in ("n1", "n2", "n3"):
        pages.pages[f"/metrics/{node}"] = page(node, host=False)  # the target's labels tell the node
    groups = [
        {"targets": [pages.address], "labels": {"__metrics_path__": f"/metrics/{n}", "node": n}}
        for n in ("n1", "n2", "n3")
    ]
    pages.pages["/sd"] = (200, "application/json", json.dumps(groups))
    source = make(f"sd+{pages.url}/sd")
    fetched = source.latest()
    assert fetched.warnings == []
    assert fetched.gpu.select(
        "ts", "cluster", "node", "gpu_uuid", "gpu_index", "job_id", "gpu_temp_c", "fb_used_bytes"
    ).sort("gpu_uuid").rows() == [
        (T0, "a", f"n{n}", f"GPU-n{n}-{g}", g, "5", 61, 2**30) for n in (1, 2, 3) for g in (0, 1)
    ]
    found = fetched.node.sort("node").select("ts", "cluster", "node", "inlet_temp_c", "is_up")
    assert found.rows() == [(T0, "a", f"n{n}", 24.5, True) for n in (1, 2, 3)]
    pages.pages["/metrics/n1"] = page("n1", temp=70, host=False)
    assert source.latest().gpu.filter(pl.col("node") == "n1")["gpu_temp_c"].to_list() == [70, 70]


def test_one_dead_target_hurts_nobody_else(pages: Pages, make: Callable[..., ScrapeSource]) -> None:
    slow = Pages()
    slow.pages["/metrics"] = page("n4")
    slow.delay_s = 1.5
    pages.pages |= {
        "/n1": page("n1"), "/n2": (500, "text/plain", "boom"), "/n3": page("n3")[:-20],
        "/n5": (200, "text/html", "<html>\n"),
    }  # fmt: skip
    dead = f"http://localhost:{free_port()}/metrics"
    source = make(
        f"{pages.url}/n1", f"{pages.url}/n2", f"{pages.url}/n3", f"{slow.url}/metrics", f"{pages.url}/n5", dead
    )
    started = time.monotonic()
    fetched = source.latest()
    assert time.monotonic() - started < 3
    assert fetched.gpu["node"].to_list() == ["n1", "n1"]
    assert [text.split(": ", 1)[1].split(" ")[0] for text in fetched.warnings] == [
        f"{pages.url}/n2", f"{pages.url}/n3", f"{slow.url}/metrics", f"{pages.url}/n5", dead,
    ]  # fmt: skip
    for text, said in zip(
        fetched.warnings, ["HTTP 500", "breaks off", "within 1 s", "no metrics page", "refused"], strict=True
    ):
        assert said in text
    up = dict(fetched.node.select("node", "is_up").rows())
    assert up == {"n1": True, "127.0.0.1": False, "localhost": False}
    slow.stop()


def test_a_node_that_was_seen_keeps_its_name_when_it_dies(pages: Pages, make: Callable[..., ScrapeSource]) -> None:
    pages.pages["/m"] = page("n7")
    source = make(f"{pages.url}/m")
    assert source.latest().node.select("node", "is_up").rows() == [("n7", True)]
    del pages.pages["/m"]
    fetched = source.latest()
    assert fetched.gpu.is_empty()
    assert fetched.node.select("node", "is_up").rows() == [("n7", False)]


def test_discovery_that_fails(pages: Pages, make: Callable[..., ScrapeSource]) -> None:
    nobody = make(f"sd+http://127.0.0.1:{free_port()}/sd")
    with pytest.raises(SourceError, match=r"service discovery.*refused"):
        nobody.latest()
    pages.pages["/sd"] = "[]"
    with pytest.raises(SourceError, match="lists no targets"):
        make(f"sd+{pages.url}/sd").latest()
    for body in ("{}", '{"a": 1}', "[1]", '[{"labels": {}}]', "half ["):
        pages.pages["/sd"] = body
        with pytest.raises(SourceError, match=r"no http_sd list|lists no targets"):
            make(f"sd+{pages.url}/sd").latest()
    pages.pages["/n1"] = page("n1")
    pages.pages["/sd"] = json.dumps([{"targets": [pages.address], "labels": {"__metrics_path__": "/n1"}}])
    source = make(f"sd+{pages.url}/sd")
    assert source.latest().gpu["node"].to_list() == ["n1", "n1"]
    source._sd_read_s = -math.inf
    pages.pages["/sd"] = (503, "text/plain", "")
    fetched = source.latest()
    assert fetched.gpu["node"].to_list() == ["n1", "n1"]
    assert "HTTP 503; the targets it gave before are read" in fetched.warnings[0]


def test_targets_must_be_urls(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"clusters\.a\.scrape_targets"):
        build_telemetry("a", Cluster(telemetry="scrape"), tmp_path)
    with pytest.raises(SourceError, match="'n1:9400' is no http"):
        build_telemetry("a", Cluster(telemetry="scrape", scrape_targets=("n1:9400",)), tmp_path)


def test_spool_answers_what_was_scraped(pages: Pages, make: Callable[..., ScrapeSource]) -> None:
    clock = Clock()
    source = make(f"{pages.url}/m", clock=clock)
    taken = []
    for k in range(30):
        clock.now = T0 + timedelta(seconds=5 * k)
        pages.pages["/m"] = page("n1", temp=40 + k)
        taken.append((clock.now, 40 + k))
        source.latest()
    whole = source.fetch(T0, T0 + timedelta(hours=1))
    assert whole.warnings == []
    rows = whole.gpu.filter(pl.col("gpu_index") == 0).sort("ts")
    assert rows.select("ts", "gpu_temp_c").rows() == taken
    assert len(whole.node) == 30
    assert whole.health.height == len(whole.gpu)
    assert whole.health["encoder_util_ratio"].to_list() == [0.0] * 60
    # half-open windows
    first = source.fetch(T0, T0 + timedelta(seconds=25)).gpu
    assert first["gpu_temp_c"].max() == 44
    assert len(first) == 10
    # another process (or this one after a restart) goes on in the same minute
    again = make(f"{pages.url}/m", clock=clock)
    again.latest()
    assert len(again.fetch(T0, T0 + timedelta(hours=1)).gpu) == 62
    names = sorted(path.name for path in again.spool.folder.iterdir())
    assert names == [
        f"{kind}-20261101T{minute}Z.arrow" for kind in ("gpu", "health", "node") for minute in ("1200", "1201", "1202")
    ]
    assert again.prune(datetime(2026, 11, 1, 12, 2, tzinfo=UTC)) == 6
    assert again.fetch(T0, T0 + timedelta(hours=1)).gpu["ts"].min() >= datetime(2026, 11, 1, 12, 2, tzinfo=UTC)


def test_spool_passes_over_a_broken_file_and_says_so(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    frame = pl.DataFrame({"ts": [T0], "x": [1.0]}, schema={"ts": pl.Datetime("us", "UTC"), "x": pl.Float64})
    spool.append("gpu", frame, T0)
    (tmp_path / "gpu-20261101T1201Z.arrow").write_bytes(b"")
    (tmp_path / "gpu-20261101T1201Z.123.partial").write_bytes(b"half")
    rows, warnings = spool.read("gpu", T0, T0 + timedelta(minutes=5))
    assert rows is not None
    assert rows["x"].to_list() == [1]
    assert len(warnings) == 1
    assert "gpu-20261101T1201Z.arrow cannot be read" in warnings[0]
    os.utime(tmp_path / "gpu-20261101T1201Z.123.partial", (0, 0))
    assert spool.prune(T0 + timedelta(minutes=10)) == 3
    assert list(tmp_path.iterdir()) == []


def test_spool_is_readable_while_it_is_written(tmp_path: Path) -> None:
    spool, reader = Spool(tmp_path), Spool(tmp_path)
    rows = pl.DataFrame({"ts": [T0] * 500, "x": [1.0] * 500}, schema={"ts": pl.Datetime("us", "UTC"), "x": pl.Float64})
    done = threading.Event()

    def write() -> None:
        for _ in range(60):
            spool.append("gpu", rows, T0)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        frame, warnings = reader.read("gpu", T0, T0 + timedelta(seconds=1))
        assert warnings == []
        seen.append(0 if frame is None else len(frame))
    writer.join()
    frame, _ = reader.read("gpu", T0, T0 + timedelta(seconds=1))
    assert frame is not None
    assert len(frame) == 30_000
    assert seen == sorted(seen)
    assert all(count % 500 == 0 for count in seen)


def test_a_spool_that_cannot_be_written_does_not_stop_the_tick(pages: Pages, tmp_path: Path) -> None:
    pages.pages["/m"] = page("n1")
    blocker = tmp_path / "spool"
    blocker.write_text("a file where a folder should be")
    source = ScrapeSource("a", [f"{pages.url}/m"], blocker)
    fetched = source.latest()
    assert len(fetched.gpu) == 2
    assert "cannot be written" in fetched.warnings[0]
    assert {name: ok for name, ok, _ in source.check()}["spool"] is False
    source.close()


def test_check(pages: Pages, make: Callable[..., ScrapeSource]) -> None:
    pages.pages["/m"] = page("n1")
    found = {name: (ok, text) for name, ok, text in make(f"{pages.url}/m").check()}
    assert found["reachable"] == (True, "1 of 1 target answer")
    assert found["metrics"] == (True, "2 GPUs")
    assert found["memory_exhaustion"][0]
    assert not found["thermal_throttle"][0]
    pages.pages["/m"] = "process_open_fds 7\n"
    found = {name: (ok, text) for name, ok, text in make(f"{pages.url}/m").check()}
    assert found["metrics"][0] is False
    assert "GPU exporters?" in found["metrics"][1]


def test_a_few_targets_that_are_down_are_worth_a_look_and_many_are_a_fault(
    pages: Pages, make: Callable[..., ScrapeSource]
) -> None:
    urls = [f"{pages.url}/{i}" for i in range(8)]
    for i in range(8):
        pages.pages[f"/{i}"] = page(f"n{i}")
    pages.pages["/7"] = (503, "text/plain", "down")

    def reachable() -> tuple[bool | None, str]:
        return next((ok, text) for name, ok, text in make(*urls).check() if name == "reachable")

    is_well, text = reachable()
    assert is_well is None
    assert text.startswith("7 of 8 targets answer; ")
    assert "HTTP 503" in text
    assert text.endswith("take those that are gone for good out of scrape_targets")
    for i in range(5):
        pages.pages[f"/{i}"] = (503, "text/plain", "down")
    is_well, text = reachable()
    assert is_well is False
    assert text.startswith("2 of 8 targets answer; ")
    assert text.endswith("; and 3 more; are the exporters running, and are scrape_targets right?")


def test_pages_of_the_simulator_give_its_own_samples(pages: Pages, make: Callable[..., ScrapeSource]) -> None:
    cluster = SimulatedCluster(nodes=3, start=T0 - timedelta(hours=3))
    cluster.advance(T0)
    exposition = Exposition(cluster)
    for i, node in enumerate(cluster.topology.node_names):
        body = exposition.page(i)
        assert body is not None
        pages.pages[f"/metrics/{node}"] = body
    groups = [
        {"targets": [pages.address], "labels": {"__metrics_path__": f"/metrics/{node}", "node": node}}
        for node in cluster.topology.node_names
    ]
    pages.pages["/sd"] = json.dumps(groups)
    fetched = make(f"sd+{pages.url}/sd").latest()
    assert fetched.warnings == []
    truth = cluster.gpu_frame().sort("gpu_uuid").drop("ts", "cluster")
    got = fetched.gpu.sort("gpu_uuid").select(truth.columns)
    # What an exporter rounds away: MiB, MHz, whole degrees, percents, six decimals.
    coarse = {
        "gpu_util_ratio": 0.006, "fb_used_bytes": 2**20, "fb_reserved_bytes": 2**20, "fb_total_bytes": 2**21,
        "sm_clock_hz": 1e6, "mem_clock_hz": 1e6, "gpu_temp_c": 0.51, "mem_temp_c": 0.51, "gpu_temp_margin_c": 0.51,
    }  # fmt: skip
    assert got["job_id"].to_list() == truth["job_id"].to_list()
    for name in truth.columns:
        if got[name].dtype.is_float():
            assert got[name].is_null().to_list() == truth[name].is_null().to_list(), name
            off = (got[name] - truth[name]).abs().max() or 0.0
            scale = truth[name].abs().max() or 0.0
            assert float(off) <= coarse.get(name, 1e-3 + 1e-6 * float(scale)), name  # ty: ignore[invalid-argument-type]
        else:
            assert got[name].to_list() == truth[name].to_list(), name
    node = cluster.node_frame().sort("node")
    assert fetched.node.sort("node")["inlet_temp_c"].to_list() == pytest.approx(
        node["inlet_temp_c"].to_list(), abs=0.01
    )
    assert fetched.node.sort("node")["node_power_w"].to_list() == pytest.approx(node["node_power_w"].to_list(), abs=1)


# --- what one target may not do to the others -----------------------------------------------------------------------

GPU_LINE = 'DCGM_FI_DEV_GPU_TEMP{gpu="7",UUID="GPU-odd",Hostname="n9"} 61'


@pytest.mark.parametrize(
    "ms", ["9223372036854775807", "-9223372036854775808", "0", "1762000000", "9000000000000000", "1793700000000.5e3"]
)
def test_samples_of_an_impossible_time_are_left_out(pages: Pages, make: Callable[..., ScrapeSource], ms: str) -> None:
    pages.pages |= {"/n1": page("n1"), "/n9": f"{GPU_LINE} {ms}\n" + page("n9", gpus=1)}
    fetched = make(f"{pages.url}/n1", f"{pages.url}/n9").latest()
    assert sorted(fetched.gpu["gpu_uuid"]) == ["GPU-n1-0", "GPU-n1-1", "GPU-n9-0"]
    assert len(fetched.warnings) == 1
    assert "1 samples have an impossible time" in fetched.warnings[0]
    assert "GPU-odd on n9" in fetched.warnings[0]
    assert fetched.node["is_up"].to_list() == [True, True]


@pytest.mark.parametrize("ms", [round(T0.timestamp() * 1000) + 86_000_000, 946_684_800_000])
def test_samples_of_a_possible_time_stay(pages: Pages, make: Callable[..., ScrapeSource], ms: int) -> None:
    pages.pages["/n9"] = f"{GPU_LINE} {ms}\n"
    fetched = make(f"{pages.url}/n9").latest()
    assert fetched.warnings == []
    assert fetched.gpu["ts"].to_list() == [datetime.fromtimestamp(ms / 1000, UTC)]


@pytest.mark.parametrize("line", [f"{GPU_LINE} 99999999999999999999999", f"{GPU_LINE} 1.e999", f"{GPU_LINE} nan.0"])
def test_an_odd_line_is_trouble_of_its_page(pages: Pages, make: Callable[..., ScrapeSource], line: str) -> None:
    pages.pages |= {"/n1": page("n1"), "/n9": page("n9") + line + "\n"}
    fetched = make(f"{pages.url}/n1", f"{pages.url}/n9").latest()
    assert set(fetched.gpu["node"]) == {"n1"}
    assert len(fetched.warnings) == 1
    assert f"{pages.url}/n9" in fetched.warnings[0]
    assert sorted(fetched.node["is_up"]) == [False, True]


def test_an_index_that_is_none_is_null(pages: Pages, make: Callable[..., ScrapeSource]) -> None:
    pages.pages["/n9"] = GPU_LINE.replace('gpu="7"', 'gpu="99999999999999"') + "\n"
    fetched = make(f"{pages.url}/n9").latest()
    assert fetched.gpu.select("gpu_uuid", "gpu_index").rows() == [("GPU-odd", None)]


def test_any_failure_over_a_page_is_trouble_of_its_target(
    pages: Pages, make: Callable[..., ScrapeSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.pages |= {"/n1": page("n1"), "/n9": page("n9")}
    source = make(f"{pages.url}/n1", f"{pages.url}/n9", "http://127.0.0.1:99999/m", "http://a b\x00/")
    frames = scrape.to_frames

    def fail(samples: Samples, index: Index, cluster: str) -> object:
        if any(index.entities[i].node == "n9" for i in samples.entity):
            raise OverflowError("a kind of nonsense not thought of")
        return frames(samples, index, cluster)

    monkeypatch.setattr(scrape, "to_frames", fail)
    fetched = source.latest()
    assert set(fetched.gpu["node"]) == {"n1"}
    assert len(fetched.warnings) == 3
    assert "/n9 holds samples that cannot be used" in fetched.warnings[0]
    assert {node: up for node, up in fetched.node.select("node", "is_up").rows() if up} == {"n1": True}


def test_pages_have_a_limit(pages: Pages, make: Callable[..., ScrapeSource], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sources.pages.MAX_PAGE_BYTES", 1 << 20)
    pages.pages |= {"/n1": page("n1"), "/n9": "# " + "x" * (2 << 20) + "\n"}
    with bomb(gzip.compress(b"#" * (64 << 20))) as url:
        fetched = make(f"{pages.url}/n1", f"{pages.url}/n9", url, timeout_s=10).latest()
    assert set(fetched.gpu["node"]) == {"n1"}
    assert [text.partition(" is larger than 1 MiB")[1] for text in fetched.warnings] == [" is larger than 1 MiB"] * 2
    pages.pages["/sd"] = "[" + " " * (2 << 20) + "]"
    with pytest.raises(SourceError, match="larger than 1 MiB"):
        make(f"sd+{pages.url}/sd", timeout_s=10).latest()


@contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Generator[tuple[str, list[float]]]:
    """A server that speaks no good HTTP: its URL, and when it was connected to."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    asked: list[float] = []

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            answer(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            asked.append(time.monotonic())
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/m", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@contextmanager
def bomb(body: bytes) -> Generator[str]:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)

    with raw_server(answer) as (url, _):
        yield url


def drip(head: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(head)
        for _ in range(600):
            time.sleep(0.05)
            connection.sendall(b"x")

    return answer


def silence(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


@pytest.mark.parametrize(
    "answer",
    [silence, drip(b"HTTP/1.1 200 OK\r\nX-Slow: "), drip(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")],
    ids=["silent", "header", "body"],
)
def test_slow_exporters_delay_nobody(pages: Pages, tmp_path: Path, answer: Callable[[socket.socket], None]) -> None:
    pages.pages["/n1"] = page("n1")
    with raw_server(answer) as (url, asked):
        slow = [f"{url}{i}" for i in range(40)]
        source = ScrapeSource("a", [*slow, f"{pages.url}/n1"], tmp_path, timeout_s=10, tick_s=3, clock=Clock())
        took_s = []
        for k in (1, 2, 3):
            started = time.monotonic()
            fetched = source.latest()
            took_s.append(time.monotonic() - started)
            assert set(fetched.gpu["node"]) == {"n1"}
            assert len(fetched.warnings) == 40
            assert dict(fetched.node.select("node", "is_up").rows()) == {"127.0.0.1": False, "n1": True}
            assert len(asked) <= 40 * k
        assert min(took_s) < 2, took_s  # 0.4 of the tick and some; a busy machine may add more now and then,
        assert max(took_s) < 8, took_s  # but never are the 10 s of the targets waited for
        limit_s = time.monotonic() + 5
        while any(not request.future.done() for request in source._pages._hanging.values()):
            assert time.monotonic() < limit_s, "what was cut off still holds its thread"
            time.sleep(0.02)
        source.close()


def test_a_target_that_hangs_is_not_asked_again(pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sources.pages.WORKERS", 2)
    monkeypatch.setattr("pipelines.sources.pages._Request.cut_off", lambda _: None)  # as when no socket is there yet
    pages.pages["/n1"] = page("n1")
    with raw_server(silence) as (url, asked):
        source = ScrapeSource("a", [f"{url}1", f"{url}2", f"{pages.url}/n1"], tmp_path, timeout_s=5, tick_s=1)
        first = source.latest()
        assert "too many others were slow" in first.warnings[2]
        second = source.latest()
        assert set(second.gpu["node"]) == {"n1"}
        assert ["still hangs" in text for text in second.warnings] == [True, True]
        assert len(asked) == 2
        source.close()


def test_a_list_of_targets_that_hangs_leaves_those_it_gave(pages: Pages, tmp_path: Path) -> None:
    pages.pages["/n1"] = page("n1")
    groups = json.dumps([{"targets": [pages.address], "labels": {"__metrics_path__": "/n1"}}])
    pages.pages["/sd"] = groups
    source = ScrapeSource("a", [f"sd+{pages.url}/sd"], tmp_path, timeout_s=5, tick_s=2)
    assert len(source.latest().gpu) == 2

    def late() -> str:
        time.sleep(2)
        return groups

    pages.pages["/sd"] = late
    source._sd_read_s = -math.inf
    fetched = source.latest()
    assert len(fetched.gpu) == 2
    assert "the targets it gave before are read" in fetched.warnings[0]
    source.close()


# --- the parser ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="n1"} 61', 61),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0", UUID="GPU-1", Hostname="n1",}   61.5  ', 61.5),
        ('DCGM_FI_DEV_GPU_TEMP {gpu="0",UUID="GPU-1",Hostname="n1"} 6.1e1', 61),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="n1"} +Inf', math.inf),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="n1",err_msg="a } b { c # {"} 61', 61),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="n1",err_msg="say \\"no\\", \\\\ or\\nnot"} 61', 61),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="n1"} 9223372036854775794', 9223372036854775794.0),
    ],
)  # fmt: skip
def test_lines(line: str, value: float) -> None:
    for _ in range(2):  # the second time from the cache
        index = Index()
        got = [parse_page(f"# TYPE x gauge\n\n{line}\n", index, "n1") for _ in range(2)]
        assert [p.values for p in got] == [[value], [value]]
        assert index.entities[got[0].entities[0]][:3] == ("n1", "GPU-1", 0)


def test_times_of_lines() -> None:
    series = 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"}'
    index = Index()
    assert parse_page(f"{series} 61 1793534400123\n", index, "n1").ts_ms == [1793534400123]
    assert parse_page(f"{series} 61 1793534400.123\n", index, "n1").ts_ms == [1793534400123]
    assert parse_page(f"{series} 61\n", index, "n1").ts_ms == [None]
    assert parse_page(f'{series} 61 # {{trace_id="x"}} 0.5\n', index, "n1").values == [61]


@pytest.mark.parametrize(
    "text",
    [
        "<html>\n",
        'DCGM_FI_DEV_GPU_TEMP{gpu="0} 61\n',
        'DCGM_FI_DEV_GPU_TEMP{gpu=0,UUID="GPU-1"} 61\n',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} sixty\n',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"}\n',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} 6',
    ],
)
def test_what_is_no_page_is_refused_whole(text: str) -> None:
    with pytest.raises(ExpositionError):
        parse_page('DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-2"} 61\n' + text, Index(), "n1")


LABEL_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(GPU_NAMES[:6]), st.integers(0, 3), LABEL_TEXT, st.floats()),
        max_size=12,
        unique_by=lambda row: row[:3],
    )
)
def test_parser_equals_prometheus_clients(rows: list[tuple[str, int, str, float]]) -> None:
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for name, number, odd, value in rows:
        if name not in gauges:
            gauges[name] = Gauge(name, 'help {with} "all"', ["gpu", "UUID", "odd"], registry=registry)
        gauges[name].labels(gpu=str(number), UUID=f"GPU-{number}", odd=odd).set(value)
    text = generate_latest(registry).decode()
    expected = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    index = Index()
    for _ in range(2):
        got = parse_page(text, index, "n1")
        assert len(got.values) == len(expected)
        for value, sample in zip(got.values, expected, strict=True):
            assert value == sample.value or (math.isnan(value) and math.isnan(sample.value))
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert [parse_series(line[: line.rfind("}") + 1]) for line in lines] == [(s.name, s.labels) for s in expected]

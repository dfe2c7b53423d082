"""Known ways in which Prometheus servers and their client library mislead, each with the right reading.

On a real Prometheus and a real VictoriaMetrics wherever one can show it (VictoriaMetrics leaves the left side of a
range open, as Prometheus 3 does); a page that a test sets stands for what only a proxy or another server would send.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import socket
import socketserver
import threading
import time
import urllib.error
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from features.cleaning import clean_gpu_samples
from pipelines.ingest import ingest_telemetry
from pipelines.settings import IngestSettings
from pipelines.sources import SourceError
from pipelines.sources.prometheus import PrometheusSource
from pipelines.store import Store
from tests.metric_services import VictoriaMetrics
from tests.services import Pages, Prometheus

pytestmark = pytest.mark.services("prometheus", "promtool", "victoria-metrics")

STEP_S = 15
DAY = datetime(2026, 11, 1, tzinfo=UTC)
END = DAY + timedelta(days=1)
TEMP, POWER, XID = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_XID_ERRORS"
ECC = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
QUERY = "/api/v1/query"


def at(k: float, offset_s: float = 0.123) -> datetime:
    return DAY + timedelta(seconds=k * STEP_S, milliseconds=round(offset_s * 1000))


class History:
    """Samples for both servers: OpenMetrics with seconds, exposition with milliseconds."""

    def __init__(self) -> None:
        self.series: dict[str, dict[str, list[tuple[str, int]]]] = {}

    def add(self, name: str, labels: str, moment: datetime, value: object) -> None:
        ts_ms = round(moment.timestamp() * 1000)
        self.series.setdefault(name, {}).setdefault(labels, []).append((str(value), ts_ms))

    def openmetrics(self) -> str:
        lines = []
        for name, of_labels in self.series.items():
            lines.append(f"# TYPE {name} gauge")
            lines += [
                f"{name}{{{labels}}} {value} {ts / 1000:.3f}"
                for labels, rows in of_labels.items()
                for value, ts in rows
            ]
        return "\n".join(lines) + "\n# EOF\n"

    def exposition(self) -> str:
        return "".join(
            f"{name}{{{labels}}} {value} {ts}\n"
            for name, of_labels in self.series.items()
            for labels, rows in of_labels.items()
            for value, ts in rows
        )


def of(node: int, gpu: int, **more: str) -> str:
    pairs = {
        "gpu": str(gpu),
        "UUID": f"GPU-{node}-{gpu}",
        "Hostname": f"n{node}",
        "job": "dcgm",
        "cluster": "a",
        **more,
    }
    return ",".join(f'{name}="{value}"' for name, value in pairs.items())


def recorded_day() -> History:
    """A day of two nodes of two GPUs: gaps, a GPU that dies, pod labels, odd values, times between seconds."""
    day, rng = History(), random.Random(1)
    for k in range(24 * 240):
        for node in (1, 2):
            if node == 2 and 3000 <= k < 3400:  # the node is down
                continue
            for gpu in (0, 1):
                if (node, gpu) == (1, 1) and k > 4000:  # fell off the bus
                    continue
                moment = at(k, 0.123 + node)
                labels = of(node, gpu, **({"pod": f"p{k // 1000}", "namespace": "x"} if gpu == 0 else {}))
                # Where whole numbers stand: VictoriaMetrics keeps one exponent for a block of values, so that a number
                # so large costs its neighbours their decimals.
                day.add(TEMP, labels, moment, "9223372036854775794" if k == 79 else 40 + rng.randrange(40))
                power = {77: "+Inf", 78: "NaN"}.get(k, f"{300 + 100 * rng.random():.3f}")
                day.add(POWER, labels, moment, power)
                if k % 4 == node:
                    day.add(XID, labels, moment, rng.choice([0, 31, 79]))
            day.add("up", f'instance="n{node}:9400",job="dcgm",cluster="a"', at(k, 0.123 + node), 1)
    return day


@pytest.fixture(scope="module")
def day() -> History:
    return recorded_day()


@pytest.fixture(scope="module")
def prom(day: History, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path_factory.mktemp("day"), history=day.openmetrics())
    yield server
    server.stop()


@pytest.fixture(scope="module")
def victoria(day: History, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VictoriaMetrics]:
    server = VictoriaMetrics(tmp_path_factory.mktemp("victoria"), ("-dedup.minScrapeInterval=1ms",))
    server.load(day.exposition())
    yield server
    server.stop()


@pytest.fixture(params=["prom", "victoria"])
def either(request: pytest.FixtureRequest) -> str:
    """URL of each of the two servers that hold the recorded day."""
    return request.getfixturevalue(request.param).url


@pytest.fixture
def open_source() -> Iterator[Callable[..., PrometheusSource]]:
    opened: list[PrometheusSource] = []

    def start(url: str, **more: Any) -> PrometheusSource:
        opened.append(PrometheusSource("a", url, **more))
        return opened[-1]

    yield start
    for source in opened:
        source.close()


def rows(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort("node", "gpu_uuid", "ts") if "gpu_uuid" in frame.columns else frame.sort("node", "ts")


# --- the same day in both -----------------------------------------------------------------------------------------


def test_both_servers_give_the_same_rows(
    prom: Prometheus, victoria: VictoriaMetrics, open_source: Callable[..., PrometheusSource], day: History
) -> None:
    ours, theirs = (open_source(url).fetch(DAY, END) for url in (prom.url, victoria.url))
    assert ours.warnings == theirs.warnings == []
    assert len(ours.gpu) == sum(len(samples) for samples in day.series[TEMP].values())
    # VictoriaMetrics keeps no NaN, so that it is no value there and one that is not a number here; cleaned, both are
    # null.
    raw, other = (rows(fetched.gpu.with_columns(pl.col("gpu_power_w").fill_nan(None))) for fetched in (ours, theirs))
    assert raw.equals(other.select(raw.columns))
    assert rows(ours.node).equals(rows(theirs.node))
    now = END + timedelta(hours=1)
    core, other_core = (rows(clean_gpu_samples(fetched.gpu, now)[0]) for fetched in (ours, theirs))
    assert core.equals(other_core.select(core.columns))
    # In windows as ingest reads them, three at a time: the same again.
    source = open_source(victoria.url, parallel=3)
    hours = [source.fetch(DAY + timedelta(hours=h), DAY + timedelta(hours=h + 1)).gpu for h in range(24)]
    assert rows(pl.concat(hours, how="diagonal")).equals(rows(theirs.gpu))


# --- server and HTTP API ------------------------------------------------------------------------------------------


def test_29_more_than_11000_points(prometheus: Callable[..., Prometheus], open_source: Callable) -> None:
    history = History()
    for k in range(12_001):
        history.add(TEMP, of(1, 0), DAY + timedelta(seconds=k), k % 90)
    server = prometheus(history=history.openmetrics())
    with pytest.raises(urllib.error.HTTPError):
        server.api("query_range", query=TEMP, start=f"{DAY.timestamp()}", end=f"{DAY.timestamp() + 12_000}", step="1")
    assert len(open_source(server.url).fetch(DAY, END).gpu) == 12_001


def test_30_windows_that_meet_on_a_sample(either: str, open_source: Callable) -> None:
    source = open_source(either)
    edges = [at(k, 1.123) for k in (0, 4, 8, 12)]  # node 1 was scraped at each of these moments
    parts = [source.fetch(a, b).gpu.filter(pl.col("node") == "n1") for a, b in itertools.pairwise(edges)]
    times = pl.concat(parts).filter(pl.col("gpu_index") == 0)["ts"].to_list()
    assert times == [at(k, 1.123) for k in range(12)]


def test_31_dead_series_are_not_repeated(prom: Prometheus, either: str, open_source: Callable) -> None:
    died = at(4000, 1.123)
    window = {"start": f"{died.timestamp() + 15:.3f}", "end": f"{died.timestamp() + 240:.3f}", "step": "15"}
    repeated = prom.api("query_range", query=f'{TEMP}{{UUID="GPU-1-1"}}', **window)["result"]
    assert len(repeated[0]["values"]) == 16  # what a range query makes of it
    frame = open_source(either).fetch(died - timedelta(seconds=30), died + timedelta(seconds=300)).gpu
    assert frame.filter(pl.col("gpu_uuid") == "GPU-1-1")["ts"].max() == died


def test_32_values_that_are_no_numbers_become_null_never_zero(either: str, open_source: Callable) -> None:
    frame = open_source(either).fetch(at(76), at(82)).gpu.filter(pl.col("gpu_uuid") == "GPU-1-0")
    core = clean_gpu_samples(frame, END)[0].sort("ts")
    assert [power is None for power in core["gpu_power_w"]] == [False, True, True, False, False, False]
    assert [temp is None for temp in core["gpu_temp_c"]] == [False, False, False, True, False, False]


def test_33_warnings_of_an_answer_mean_partial_data(pages: Pages, open_source: Callable, tmp_path: Path) -> None:
    body = {"status": "success", "warnings": ["store 2 is down"], "data": {"resultType": "matrix", "result": []}}
    pages.pages[QUERY] = (200, "application/json", json.dumps(body))
    with Store.open(f"sqlite:{tmp_path}/c.sqlite", str(tmp_path / "data")) as store:
        settings = IngestSettings(initial_history_s=600)
        report = ingest_telemetry(store, open_source(pages.url), "a", settings, END)
        assert report.warnings == ["store 2 is down"]
        quality = store.query("SELECT reason, example FROM core_data_quality")
        assert ("partial", "store 2 is down") in quality.rows()


def test_34_the_first_increment_of_a_new_series_is_kept(
    prometheus: Callable[..., Prometheus], open_source: Callable
) -> None:
    history = History()
    for k in range(10):
        history.add(TEMP, of(1, 0), at(k), 50)
        if k >= 5:  # a counter that is there from its first event on
            history.add(ECC, of(1, 0), at(k), 3)
    server = prometheus(history=history.openmetrics())
    assert float(server.query(f"increase({ECC}[5m])", at(9).timestamp() + 1)[0]["value"][1]) == 0
    counted = open_source(server.url).fetch(at(0, 0), at(10)).gpu.sort("ts")["ecc_uncorrected_total"].to_list()
    assert counted == [None] * 5 + [3] * 5


def test_35_replicas_make_one_row(prometheus: Callable[..., Prometheus], open_source: Callable) -> None:
    history = History()
    for k in range(4):
        for replica, value in (("a", 50), ("b", 51)):
            history.add(TEMP, of(1, 0, prometheus_replica=replica, replica=replica), at(k), value)
    source = open_source(prometheus(history=history.openmetrics()).url)
    assert source.fetch(at(0), at(4)).gpu["gpu_temp_c"].to_list() in ([50] * 4, [51] * 4)  # of one of them


def test_35_late_samples_are_added_by_the_overlap(tmp_path: Path, open_source: Callable) -> None:
    server = VictoriaMetrics(tmp_path / "vm")
    try:
        with Store.open(f"sqlite:{tmp_path}/c.sqlite", str(tmp_path / "data")) as store:
            settings = IngestSettings(window_s=300, overlap_s=60, lag_s=0, initial_history_s=300)
            first, late, last = DAY + timedelta(seconds=10), DAY + timedelta(seconds=270), DAY + timedelta(seconds=310)
            source = open_source(server.url)

            def load(moment: datetime, value: float) -> None:
                server.load(f"{TEMP}{{{of(1, 0)}}} {value} {round(moment.timestamp() * 1000)}\n")

            load(first, 50)
            ingest_telemetry(store, source, "a", settings, DAY + timedelta(seconds=330))
            load(last, 52)
            load(late, 51)  # out of order, into a window that was read
            ingest_telemetry(store, source, "a", settings, DAY + timedelta(seconds=630))
            read = store.query("SELECT ts, gpu_temp_c FROM core_gpu_samples ORDER BY ts").rows()
            assert read == [(first, 50), (late, 51), (last, 52)]
    finally:
        server.stop()


def test_36_no_query_is_longer_than_a_day_and_times_keep_milliseconds(pages: Pages, open_source: Callable) -> None:
    pages.pages[QUERY] = (200, "application/json", '{"status":"success","data":{"resultType":"matrix","result":[]}}')
    start = DAY - timedelta(days=60) + timedelta(milliseconds=123)
    open_source(pages.url).fetch(start, DAY + timedelta(milliseconds=456))
    forms = [urllib.parse.parse_qs(body.decode()) for _, _, body in pages.requests]
    spans = [int(re.search(r"\[(\d+)ms\]", form["query"][0])[1]) for form in forms]  # ty: ignore[not-subscriptable]
    assert max(spans) <= 86_401_000
    assert max(float(form["time"][0]) for form in forms) == DAY.timestamp() + 0.456
    assert all(re.fullmatch(r"\d+\.\d{3}", form["time"][0]) for form in forms)


def test_what_is_older_than_the_server_keeps(tmp_path: Path, open_source: Callable) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    server = VictoriaMetrics(tmp_path / "vm", ("-denyQueriesOutsideRetention", "-retentionPeriod=1d"))
    try:
        server.load(f"{TEMP}{{{of(1, 0)}}} 50 {round((now - timedelta(hours=2)).timestamp() * 1000)}\n")
        source = open_source(server.url)
        old = source.fetch(now - timedelta(days=3), now - timedelta(days=3, minutes=-5))
        assert old.gpu.is_empty()
        assert len(old.warnings) >= 1
        assert "keeps nothing so old" in old.warnings[0]
        assert len(source.fetch(now - timedelta(hours=3), now).gpu) == 1
    finally:
        server.stop()


# --- limits -------------------------------------------------------------------------------------------------------


def wide_history(metrics: int = 8, gpus: int = 20) -> History:
    names = [TEMP, POWER, XID, ECC, "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_SM_CLOCK",
             "DCGM_FI_DEV_MEM_CLOCK"][:metrics]  # fmt: skip
    history = History()
    for k in range(8):
        for name in names:
            for gpu in range(gpus):
                history.add(name, of(gpu // 8, gpu % 8), at(k), k)
    return history


def test_one_interval_that_is_refused_is_asked_by_names(
    prometheus: Callable[..., Prometheus], open_source: Callable
) -> None:
    # 160 samples each 15 s, 50 at a time: no range is short enough for all names at once.
    history = wide_history()
    server = prometheus(history=history.openmetrics(), flags=("--query.max-samples=50",))
    whole = open_source(prometheus(history=history.openmetrics()).url).fetch(at(0), at(8)).gpu
    source = open_source(server.url)
    assert rows(source.fetch(at(0), at(8)).gpu).select(whole.columns).equals(rows(whole))
    assert len(whole) == 160
    hopeless = open_source(prometheus(history=history.openmetrics(), flags=("--query.max-samples=10",)).url)
    with pytest.raises(SourceError, match=r"a: Prometheus at .* refused the query: .*too many samples"):
        hopeless.fetch(at(0), at(8))


@pytest.mark.parametrize("flag", ["-search.maxExportSeries=45", "-search.maxSamplesPerQuery=200",
                                  "-search.maxQueryLen=600"])  # fmt: skip
def test_limits_of_victoria_metrics_are_kept(tmp_path: Path, open_source: Callable, flag: str) -> None:
    history = wide_history()
    server = VictoriaMetrics(tmp_path / "vm", (flag,))
    try:
        server.load(history.exposition())
        frame = open_source(server.url).fetch(at(0), at(8)).gpu
        assert len(frame) == 160
        assert frame["mem_clock_hz"].null_count() == frame["gpu_temp_c"].null_count() == 0
    finally:
        server.stop()


def test_no_query_is_longer_than_victoria_metrics_takes(tmp_path: Path, open_source: Callable) -> None:
    # It logs every query that is too long, whole: none may reach it, from the readers or from the doctor.
    server = VictoriaMetrics(tmp_path / "vm")
    history, recent = wide_history(), datetime.now(UTC) - timedelta(seconds=3)
    for name in (TEMP, "weatherglass_step_time_seconds"):  # from both ends of the table
        history.add(name, of(1, 0), recent, 40)
    try:
        server.load(history.exposition())
        source = open_source(server.url)
        checked = {name: (is_ok, text) for name, is_ok, text in source.check()}
        assert checked["reachable"] == (True, f"{server.url} answers")
        assert checked["metrics"] == (True, "2 GPU metrics, 1 GPU")
        assert checked["clock"][0], checked["clock"]
        assert len(source.fetch(at(0), at(8)).gpu) == 160
        source.latest()
        assert "too long query" not in server.process.tail(1_000_000)
    finally:
        server.stop()


def test_a_doctor_splits_a_query_that_is_refused_as_too_long(tmp_path: Path, open_source: Callable) -> None:
    server = VictoriaMetrics(tmp_path / "vm", ("-search.maxQueryLen=600",))
    try:
        server.load(wide_history().exposition())
        source = open_source(server.url)
        assert ("reachable", True, f"{server.url} answers") in source.check()
        refusals = server.process.tail(1_000_000).count("too long query")
        source.fetch(at(0), at(8))  # what the doctor learned holds for what comes after it
        assert server.process.tail(1_000_000).count("too long query") == refusals
    finally:
        server.stop()


def test_an_answer_that_breaks_off_at_a_limit_is_no_answer(tmp_path: Path, open_source: Callable) -> None:
    # The server says 200 and sends a beginning; why it stopped stands behind it. Its blocks hold more than two samples.
    server = VictoriaMetrics(tmp_path / "vm", ("-search.maxSamplesPerSeries=2",))
    try:
        server.load(wide_history().exposition())
        with pytest.raises(SourceError, match=r"broke off its answer: .*more than 2 samples per series"):
            open_source(server.url).fetch(at(0), at(8))
    finally:
        server.stop()


def test_queries_in_parallel_give_the_same_frame_and_no_more_than_allowed(
    prom: Prometheus, open_source: Callable
) -> None:
    frames = []
    for parallel in (1, 4, 4):
        source = open_source(prom.url, parallel=parallel)
        source._reader._ceiling_ms = 600_000  # pieces of ten minutes
        frames.append(source.fetch(DAY, DAY + timedelta(hours=6)).gpu)
    assert frames[1].equals(frames[2])  # the order of rows, too
    assert rows(frames[0]).equals(rows(frames[1]))


def test_no_more_queries_than_allowed_run_at_a_time(pages: Pages, open_source: Callable) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def page() -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return '{"status":"success","data":{"resultType":"matrix","result":[]}}'

    pages.pages[QUERY] = (200, "application/json", page)
    open_source(pages.url, parallel=3).fetch(DAY - timedelta(days=20), DAY)
    assert most == 3


# --- answers that want patience -----------------------------------------------------------------------------------

OK = '{"status":"success","data":{"resultType":"matrix","result":[]}}'


def answers(pages: Pages, *turns: tuple) -> None:
    left = list(turns)
    pages.pages[QUERY] = lambda: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_post_that_was_turned_away_is_sent_again(pages: Pages, open_source: Callable, status: int) -> None:
    answers(pages, (status, "text/html", "<html>busy"), (status, "text/plain", ""), (200, "application/json", OK))
    source = open_source(pages.url, timeout_s=10)
    assert source.latest().gpu.is_empty()
    assert [(method, path) for method, path, _ in pages.requests] == [("POST", QUERY)] * 3


def test_retry_after_is_honoured_within_the_time_out(pages: Pages, open_source: Callable) -> None:
    answers(pages, (503, "text/plain", "", {"Retry-After": "1"}), (200, "application/json", OK))
    began = time.monotonic()
    open_source(pages.url, timeout_s=10).latest()
    assert time.monotonic() - began >= 1
    pages.requests.clear()
    answers(pages, (429, "text/plain", "slow down", {"Retry-After": "3600"}))
    with pytest.raises(SourceError, match=r"HTTP 429.*prometheus_parallel"):
        open_source(pages.url, timeout_s=10).latest()
    assert len(pages.requests) == 1
    assert time.monotonic() - began < 15


def test_retries_end(pages: Pages, open_source: Callable) -> None:
    answers(pages, (503, "text/plain", "down"))
    began = time.monotonic()
    with pytest.raises(SourceError, match=r"failed \(HTTP 503\): down"):
        open_source(pages.url, timeout_s=20).latest()
    assert len(pages.requests) == 4
    assert time.monotonic() - began < 15
    # A query that was too slow is not asked again as it was: the server may be at its limit.
    pages.requests.clear()
    pages.delay_s = 1.2
    with pytest.raises(SourceError, match="did not answer within 1 s"):
        open_source(pages.url, timeout_s=1).latest()
    assert len(pages.requests) == 1


def test_a_query_that_the_server_gave_up_is_made_smaller(pages: Pages, open_source: Callable) -> None:
    asked: Counter[bool] = Counter()

    def page() -> tuple:
        span = int(re.search(rb"%5B(\d+)ms%5D", pages.requests[-1][2])[1])  # ty: ignore[not-subscriptable]
        asked[span > 20_000] += 1
        if span > 20_000:
            error = {"status": "error", "errorType": "timeout", "error": "query timed out in expression evaluation"}
            return 503, "application/json", json.dumps(error)
        return 200, "application/json", OK

    pages.pages[QUERY] = page
    open_source(pages.url, parallel=1).fetch(DAY, DAY + timedelta(minutes=5))
    assert asked[True] < 5
    assert asked[False] >= 15


def test_connections_that_are_reset_are_made_again(open_source: Callable) -> None:
    body = OK.encode()
    count = 0

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            nonlocal count
            count += 1
            self.request.recv(65_536)
            if count < 3:  # linger 0: closing sends a reset
                self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                return
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self.wfile.write(head.encode() + body)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        assert open_source(f"http://127.0.0.1:{server.server_address[1]}", timeout_s=10).latest().gpu.is_empty()
        server.shutdown()
        thread.join()
    assert count == 3


# --- traps of the client library ----------------------------------------------------------------------------------


def test_windows_that_are_empty_or_backwards_end_at_once(prom: Prometheus, open_source: Callable) -> None:
    source = open_source(prom.url)
    for start, end in ((at(5), at(5)), (at(9), at(5)), (at(5), at(5) + timedelta(microseconds=300))):
        assert source.fetch(start, end).gpu.filter(pl.col("ts") >= end).is_empty()
    with pytest.raises(ValueError, match="has no time zone"):
        source.fetch(at(0).replace(tzinfo=None), at(1))


def test_local_time_of_this_host_changes_nothing(
    prom: Prometheus, open_source: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_source(prom.url).fetch(at(0), at(20)).gpu
    try:
        monkeypatch.setenv("TZ", "America/New_York")
        time.tzset()
        assert open_source(prom.url).fetch(at(0), at(20)).gpu.equals(before)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_every_query_says_its_own_time(pages: Pages, open_source: Callable) -> None:
    pages.pages[QUERY] = (200, "application/json", OK)
    source = open_source(pages.url)
    for day in (DAY, END):
        source.fetch(day, day + timedelta(seconds=20))
    times = [urllib.parse.parse_qs(body.decode())["time"][0] for _, _, body in pages.requests]
    assert list(dict.fromkeys(times)) == [f"{(day + timedelta(seconds=20)).timestamp():.3f}" for day in (DAY, END)]


def test_labels_called_value_and_timestamp_sentinels_and_odd_matchers(
    prometheus: Callable[..., Prometheus], open_source: Callable
) -> None:
    history = History()
    labels = of(1, 0, value="3", timestamp="4", cluster="it's")
    history.add(TEMP, labels, at(0), 61)
    history.add(POWER, labels, at(0), "9223372036854775794")
    source = open_source(prometheus(history=history.openmetrics()).url, matcher='cluster="it\'s"')
    frame = source.fetch(at(-1), at(1)).gpu
    assert frame.select("ts", "gpu_temp_c").rows() == [(at(0), 61)]  # to the millisecond
    assert frame["gpu_power_w"][0] == float(2**63)
    assert clean_gpu_samples(frame, END)[0]["gpu_power_w"].to_list() == [None]


def test_native_histograms_beside_samples(pages: Pages, open_source: Callable) -> None:
    metric = {"__name__": TEMP, "UUID": "GPU-1", "gpu": "0", "Hostname": "n1", "job": "dcgm"}
    result = [
        {"metric": {**metric, "UUID": "GPU-2"}, "histograms": [[DAY.timestamp(), {"count": "1", "sum": "2"}]]},
        {"metric": metric, "values": [[DAY.timestamp(), "61"]]},
        {"metric": {**metric, "UUID": "GPU-3"}, "values": []},
    ]
    body = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    pages.pages[QUERY] = (200, "application/json", json.dumps(body))
    frame = open_source(pages.url).fetch(DAY, DAY + timedelta(seconds=10)).gpu
    assert frame.select("gpu_uuid", "gpu_temp_c").rows() == [("GPU-1", 61)]


def test_nothing_but_the_api_is_asked_of_a_server_behind_a_prefix(pages: Pages, open_source: Callable) -> None:
    pages.pages[f"/prometheus{QUERY}"] = (200, "application/json", OK)
    pages.pages["/"] = (302, "text/html", "log in")
    source = open_source(f"{pages.url}/prometheus/")
    source.latest()
    source.check()
    assert {path for _, path, _ in pages.requests} == {f"/prometheus{QUERY}"}


def test_scalars_and_one_value_that_is_no_number(prom: Prometheus, open_source: Callable) -> None:
    api = open_source(prom.url)._api
    assert math.isclose(api.scalar("time()"), time.time(), abs_tol=5)
    assert math.isnan(api.scalar("0/0"))

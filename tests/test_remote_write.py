"""Remote-write: the wire against a plain encoder, hostile bodies, the log, and a real Prometheus that sends."""

from __future__ import annotations

import http.client
import math
import os
import re
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cramjam
import numpy as np
import polars as pl
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from features.metrics import BY_NAME
from pipelines.ingest import ingest_telemetry
from pipelines.settings import IngestSettings, SettingsError, parse_settings
from pipelines.sources import SourceError, build_telemetry
from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.remote_write import RemoteWriteSource
from pipelines.sources.remote_write_intake import Intake
from pipelines.sources.remote_write_newest import Newest
from pipelines.sources.remote_write_progress import IntakeState, Progress, read_state, write_state
from pipelines.sources.remote_write_series import Series
from pipelines.sources.remote_write_wire import parse_labels
from pipelines.sources.sample_log import Chunk, SampleLog
from pipelines.sources.series import Index
from pipelines.sources.spool import Spool
from pipelines.store import Store
from scheduler_hints.api import create_app
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.nowcast_config import NowcastConfig
from scheduler_hints.nowcast_loop import run
from scheduler_hints.snapshot import Publisher
from tests.metric_services import make_authority, make_certificate
from tests.services import Pages, Process, Prometheus, free_port, scrape_config, wait_until

NAMES = ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_PROF_SM_ACTIVE")
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
MIB = 1 << 20
Sample = tuple[float, int]


# --- a plain encoder, independent of the reader ---------------------------------------------------------------


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def series_bytes(labels: dict[str, str], samples: Sequence[Sample]) -> bytes:
    """One series as Prometheus spells it: labels by name, a zero value left out."""
    out = b"".join(
        field(1, field(1, name.encode()) + (field(2, value.encode()) if value else b""))
        for name, value in sorted(labels.items())
    )
    for value, ts in samples:
        bits = struct.pack("<d", value)
        out += field(2, (b"\x09" + bits if bits != bytes(8) else b"") + (b"\x10" + varint(ts) if ts else b""))
    return out


def request(*series: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(b"".join(field(1, one) for one in series)))


def gpu_labels(name: str, gpu: int = 0, node: str = "n1", **more: str) -> dict[str, str]:
    return {
        "__name__": name, "Hostname": node, "UUID": f"GPU-{node}-{gpu}", "gpu": str(gpu), "job": "dcgm",
        "instance": f"{node}:9400", "modelName": "NVIDIA H100 80GB HBM3", **more,
    }  # fmt: skip


def now_ms() -> int:
    return round(time.time() * 1000)


@pytest.fixture
def intake(tmp_path: Path) -> Iterator[Intake]:
    one = Intake("a", tmp_path / "spool", 4 * MIB, timedelta(days=2))
    yield one
    one.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[RemoteWriteSource]:
    one = RemoteWriteSource("a", tmp_path / "spool", port=0, exporter_interval_s=1, tick_s=1, max_body_mib=4)
    one.listen()
    yield one
    one.close()


def logged(folder: Path) -> dict[tuple[str, ...], list[float]]:
    """Every value in the log by labels and time, as often as it is there."""
    log, found = SampleLog(folder), {}
    labels = {epoch: dict(log.series(epoch)[0]) for epoch in log.epochs()}
    for path in folder.glob("samples-*.log"):
        minute = datetime.strptime(path.stem, "samples-%Y%m%dT%H%MZ").replace(tzinfo=UTC)
        chunks, warnings = log.minute(int(minute.timestamp()) // 60)
        assert not warnings
        for chunk in chunks:
            for number, ts, value in zip(*(column.tolist() for column in chunk[1:]), strict=True):
                key = (*(f"{k}={v}" for k, v in sorted(parse_labels(labels[chunk.epoch][number]).items())), str(ts))
                found.setdefault(key, []).append(value)
    return found


# --- the wire -------------------------------------------------------------------------------------------------

times = st.integers(min_value=1, max_value=2**50) | st.integers(1_600_000_000_000, 1_900_000_000_000)
values = st.floats(allow_nan=False) | st.just(0.0) | st.just(-0.0)
label_maps = st.builds(
    lambda name, gpu, more: gpu_labels(name, gpu, **more),
    st.sampled_from([*NAMES, "go_goroutines", "DCGM_NOT_KNOWN"]),
    st.integers(0, 3),
    st.dictionaries(st.sampled_from(["pod", "z", "A"]), st.text(max_size=200), max_size=3),
)
one_series = st.tuples(label_maps, st.lists(st.tuples(values, times), max_size=3))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(one_series, max_size=6), min_size=1, max_size=4))
def test_reader_gives_what_a_plain_encoder_wrote(requests: list[list[tuple[dict[str, str], list[Sample]]]]) -> None:
    series = Series()
    labels: dict[int, dict[str, str]] = {}
    for sent in requests * 2:  # the second time every series is known
        wanted = [
            (sorted(one.items()), ts, struct.pack("<d", value))
            for one, samples in sent
            for value, ts in samples
            if one["__name__"] in BY_NAME
        ]
        number, ts_ms, value, useless = series.take([series_bytes(one, samples) for one, samples in sent])
        labels |= {n: parse_labels(text) for n, text in series.take_new()}
        rows = zip(number.tolist(), ts_ms.tolist(), value.tolist(), strict=True)
        got = [(sorted(labels[n].items()), ts, struct.pack("<d", v)) for n, ts, v in rows]
        assert sorted(got) == sorted(wanted)
        assert useless == sum(1 for one, samples in sent if one["__name__"] not in BY_NAME or not samples)


def test_every_known_metric_is_resolved_as_by_its_labels_alone() -> None:
    shared, plain = Series(), Index()
    ids = {
        "uuid": "1f2e3d4c-93c1-4a5e-b0de-000000000001",
        "gpu_uuid": "GPU-9",
        "gpu_id": "3",
        "name": "Inlet Temp",
        "id": "1",
    }
    for more in (ids, {"nvlink": "4", "device": "mlx5_0", "port": "1"}, {"GPU_I_ID": "2", "GPU_I_PROFILE": "1g.10gb"}):
        for name in plain.table.variants:
            labels = gpu_labels(name) | more
            number, *_ = shared.take([series_bytes(labels, [(1.0, now_ms())])])
            resolved = plain.add(None, name, labels, group="dcgm")
            if resolved is None:
                assert not len(number), name
                continue
            assert shared.name[number[0]] == resolved[0], name
            assert shared.index.entities[shared.entity[number[0]]] == plain.entities[resolved[1]], name


def test_series_of_one_gpu_keep_their_own_metric_and_values(intake: Intake) -> None:
    ts = now_ms()
    sent = [
        series_bytes(gpu_labels(name, gpu), [(10.0 * i + gpu, ts)]) for i, name in enumerate(NAMES) for gpu in (0, 1)
    ]
    assert intake.take([("x", request(*sent))]) == [(204, "")]
    source = RemoteWriteSource("a", intake._folder, port=0)
    got = source.fetch(datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ts - 1), datetime.now(UTC)).gpu
    rows = got.sort("gpu_uuid").to_dicts()
    assert [row["gpu_uuid"] for row in rows] == ["GPU-n1-0", "GPU-n1-1"]
    assert [row["gpu_temp_c"] for row in rows] == [0.0, 1.0]
    assert [row["gpu_power_w"] for row in rows] == [10.0, 11.0]
    assert [row["xid_last"] for row in rows] == [20, 21]
    assert [row["sm_active_ratio"] for row in rows] == [30.0, 31.0]
    assert {row["ts"].timestamp() * 1000 for row in rows} == {ts}


@pytest.mark.parametrize("count", [1, 3])
def test_late_duplicate_and_disordered_samples_are_laid_into_their_place(intake: Intake, count: int) -> None:
    base = now_ms() - 60_000
    labels = gpu_labels(NAMES[0])
    for body in (
        request(series_bytes(labels, [(5.0, base + 5000)])),
        request(series_bytes(labels, [(1.0, base + 1000)])),  # late
        request(series_bytes(labels, [(5.0, base + 5000)])),  # sent again
        request(series_bytes(labels, [(4.0, base + 4000), (3.0, base + 3000)])),  # not in order
    ):
        assert intake.take([("x", body)] * count) == [(204, "")] * count
    intake._written_s = -1e9
    source = RemoteWriteSource("a", intake._folder, port=0)
    begin = datetime.fromtimestamp(base / 1000, UTC)
    gpu = source.fetch(begin, begin + timedelta(minutes=1)).gpu.sort("ts")
    assert gpu["gpu_temp_c"].to_list() == [1.0, 3.0, 4.0, 5.0]
    assert source.fetch(begin + timedelta(seconds=3), begin + timedelta(seconds=5)).gpu.height == 2  # start in, end out
    newest = intake.newest.samples(intake.series, now_ms(), 15_000)
    assert (newest.ts_ms.tolist(), newest.values.tolist()) == ([base + 5000], [5.0])


def test_a_stale_marker_ends_a_series_until_it_comes_again(intake: Intake) -> None:
    ts, labels = now_ms() - 3000, gpu_labels(NAMES[0])

    def newest() -> list[float]:
        return intake.newest.samples(intake.series, now_ms(), 15_000).values.tolist()

    intake.take([("x", request(series_bytes(labels, [(50.0, ts)])))])
    assert newest() == [50.0]
    intake.take([("x", request(series_bytes(labels, [(STALE, ts + 1000)])))])
    assert newest() == []
    assert intake.state.counts["ended"] == 1
    intake.take([("x", request(series_bytes(labels, [(math.nan, ts + 2000)])))])
    assert math.isnan(newest()[0])  # a plain NaN is a value as received
    assert sorted(map(len, logged(intake._folder).values())) == [1, 1]  # the marker is not in the log


def test_rows_of_a_tick_are_whole_though_a_scrape_comes_in_parts(intake: Intake) -> None:
    ts = now_ms() - 20_000

    def send(names: Sequence[str], at: int, value: float) -> None:
        intake.take([("x", request(*(series_bytes(gpu_labels(name), [(value, at)]) for name in names)))])

    def given() -> tuple[set[int], list[float]]:
        samples = intake.newest.samples(intake.series, now_ms(), 15_000)
        return set(samples.ts_ms.tolist()), samples.values.tolist()

    send(NAMES, ts, 1.0)
    send(NAMES[:2], ts + 15_000, 2.0)
    assert given() == ({ts}, [1.0] * 4)
    send(NAMES[2:], ts + 15_000, 2.0)
    assert given() == ({ts + 15_000}, [2.0] * 4)
    send(NAMES[:1], ts + 60_000, 3.0)  # the others have not come for three intervals: it does not wait for them
    assert given() == ({ts + 60_000}, [3.0])


@pytest.mark.parametrize("ts", [0, 1, -5, 946_684_799_999, 2**62])
def test_impossible_and_old_times_are_left_out_and_counted(intake: Intake, ts: int) -> None:
    old = now_ms() - 3 * 86_400_000
    good = series_bytes(gpu_labels(NAMES[0], 1), [(1.0, now_ms())])
    odd = [series_bytes(gpu_labels(NAMES[0]), [(1.0, at)]) for at in (ts, old)]
    assert intake.take([("x", request(*odd, good))]) == [(204, "")]
    assert (intake.state.counts["absurd_time"], intake.state.counts["too_old"]) == (1, 1)
    assert len(logged(intake._folder)) == 1


def test_series_of_no_use_are_counted_and_not_kept(intake: Intake) -> None:
    ts = now_ms()
    sent = [series_bytes({"__name__": f"go_{i}", "job": "x"}, [(1.0, ts)]) for i in range(50)]
    switch = series_bytes({"__name__": NAMES[0], "nvswitch": "nvswitch0", "job": "dcgm"}, [(1.0, ts)])
    intake.take([("x", request(*sent, switch, series_bytes(gpu_labels(NAMES[0]), [(1.0, ts)])))])
    assert (intake.state.counts["useless"], intake.state.counts["samples"], len(intake.series)) == (51, 1, 1)


# --- hostile bodies -------------------------------------------------------------------------------------------


def _statuses(intake: Intake, *bodies: bytes) -> list[int]:
    return [status for status, _ in intake.take([("x", body) for body in bodies])]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400), st.binary(max_size=400), st.integers(0, 400))
def test_no_body_breaks_the_intake(intake: Intake, junk: bytes, message: bytes, cut: int) -> None:
    good = request(series_bytes(gpu_labels(NAMES[0]), [(1.0, now_ms())]))
    wrapped = bytes(cramjam.snappy.compress_raw(message))
    inside = request(message, series_bytes(gpu_labels(NAMES[1]), [(1.0, now_ms())]), message)
    answers = _statuses(intake, junk, wrapped, inside, good[:cut], good)
    assert set(answers) <= {204, 400, 413}
    assert answers[-1] == 204


def test_bombs_are_refused_before_they_are_made(intake: Intake) -> None:
    before = psutil.Process().memory_info().rss
    declared = [varint(4 * MIB + 1), varint(1 << 31), varint((1 << 32) - 1)]
    assert _statuses(intake, *(size + b"\0" * 10 for size in declared)) == [413] * 3
    assert _statuses(intake, varint(1 << 40) + b"\0") == [400]  # no size of snappy
    assert _statuses(intake, varint(4 * MIB) + b"\0") == [400]  # declares more than it holds
    assert psutil.Process().memory_info().rss - before < 64 * MIB


def test_millions_of_tiny_series_and_huge_labels_stay_bounded(intake: Intake) -> None:
    before = psutil.Process().memory_info().rss
    empty = bytes(cramjam.snappy.compress_raw(b"\x0a\x00" * (2 * MIB)))
    name = series_bytes({"__name__": NAMES[0], "Hostname": "n" * MIB, "gpu": "0"}, [(1.0, now_ms())])
    began = time.monotonic()
    assert _statuses(intake, empty, request(name)) == [204, 204]
    assert time.monotonic() - began < 5
    assert psutil.Process().memory_info().rss - before < 200 * MIB
    assert intake.state.counts["useless"] >= 2 * MIB


# --- over HTTP ------------------------------------------------------------------------------------------------


def post(port: int, body: bytes, path: str = "/api/v1/write", method: str = "POST", **headers: str) -> tuple[int, Any]:
    base = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{port}{path}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, {**base, **named}, method=method), timeout=10
        ) as got:
            return got.status, got.headers
    except urllib.error.HTTPError as error:
        with error:
            error.read()
            return error.code, error.headers


def good_body(value: float = 1.0) -> bytes:
    return request(series_bytes(gpu_labels(NAMES[0]), [(value, now_ms())]))


@pytest.mark.parametrize(
    ("status", "body", "how"),
    [
        (204, good_body(), {"X_Prometheus_Remote_Write_Version": "0.1.0"}),
        (204, good_body(), {"Content_Type": "application/x-protobuf;proto=prometheus.WriteRequest"}),
        (415, good_body(), {"X_Prometheus_Remote_Write_Version": "2.0.0"}),
        (415, good_body(), {"Content_Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request"}),
        (415, good_body(), {"Content_Type": "text/plain"}),
        (415, good_body(), {"Content_Encoding": "zstd"}),
        (400, b"no snappy", {}),
        (400, bytes(cramjam.snappy.compress_raw(b"\xff" * 9)), {}),
        (400, b"", {}),
        (413, b"x" * (4 * MIB + 1), {}),
        (413, varint(4 * MIB + 1), {}),
        (404, good_body(), {"path": "/write"}),
        (405, good_body(), {"method": "PUT"}),
    ],
)
def test_each_request_has_its_status(source: RemoteWriteSource, status: int, body: bytes, how: dict[str, str]) -> None:
    assert post(source.port, body, **how)[0] == status
    assert len(logged(source.folder)) == (status == 204)


def test_who_has_no_token_is_turned_away(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    source = RemoteWriteSource("a", tmp_path / "spool", host="0.0.0.0", port=0, token_file=str(token))
    try:
        port = source.listen()
        assert post(port, good_body())[0] == 401
        assert post(port, good_body(), Authorization="Bearer wrong")[0] == 401
        assert post(port, good_body(), Authorization="Basic s3cret")[0] == 401
        assert post(port, good_body(), Authorization="Bearer s3cret")[0] == 204
    finally:
        source.close()


def test_open_to_others_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"clusters\.a\.remote_write_token_file"):
        RemoteWriteSource("a", tmp_path, host="0.0.0.0", port=0).latest()
    empty = tmp_path / "token"
    empty.write_text(" \n")
    with pytest.raises(SourceError, match="is empty"):
        RemoteWriteSource("a", tmp_path, port=0, token_file=str(empty)).latest()
    data = {"clusters": {"a": {"telemetry": "remote-write", "remote_write_host": "0.0.0.0"}}}
    with pytest.raises(SettingsError, match=r"clusters\.a\.remote_write_token_file"):
        parse_settings(data, {})
    data["clusters"]["a"]["remote_write_host"] = "::1"
    cluster = parse_settings(data, {}).clusters["a"]
    assert isinstance(build_telemetry("a", cluster, tmp_path), RemoteWriteSource)


def test_a_busy_port_is_named_and_freed_by_close(source: RemoteWriteSource, tmp_path: Path) -> None:
    other = RemoteWriteSource("b", tmp_path / "other", port=source.port)
    with pytest.raises(SourceError, match=rf"127\.0\.0\.1:{source.port}.*remote_write_port"):
        other.latest()
    source.close()
    other.latest()
    other.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("remote-write")]


def test_a_full_disk_is_a_503_until_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.write_bytes(b"")  # no folder can be made here
    source = RemoteWriteSource("a", folder, port=0)
    try:
        port = source.listen()
        status, headers = post(port, good_body(7.0))
        assert (status, headers["Retry-After"]) == (503, "5")
        assert post(port, b"junk")[0] == 400  # no use in sending that again
        folder.unlink()
        assert post(port, good_body(8.0))[0] == 204
        assert list(logged(folder).values()) == [[8.0]]
    finally:
        source.close()


def test_a_connection_cut_in_the_middle_leaves_nothing_behind(source: RemoteWriteSource) -> None:
    body = request(*(series_bytes(gpu_labels(NAMES[0], gpu), [(float(gpu), now_ms())]) for gpu in range(3000)))
    head = f"POST /api/v1/write HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    for share in (0.0, 0.5, 0.99):
        with socket.create_connection(("127.0.0.1", source.port)) as client:
            client.sendall(head.encode() + b"\r\n" + body[: int(share * len(body))])
    with socket.create_connection(("127.0.0.1", source.port)) as client:
        client.sendall(b"POST /api/v1/write HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc")
    assert post(source.port, good_body())[0] == 204
    assert len(logged(source.folder)) == 1
    assert post(source.port, body)[0] == 204
    assert len(logged(source.folder)) == 3001


def test_many_senders_at_once_are_all_answered_and_kept(source: RemoteWriteSource) -> None:
    statuses: list[int] = []

    def send(node: int) -> None:
        for k in range(20):
            labels = gpu_labels(NAMES[0], 0, f"n{node}")
            statuses.append(post(source.port, request(series_bytes(labels, [(1.0, 1000 * k + now_ms() - 60_000)])))[0])

    threads = [threading.Thread(target=send, args=(node,)) for node in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [204] * 160
    assert len(logged(source.folder)) == 160
    assert source.latest().gpu["node"].n_unique() == 8


# --- the log --------------------------------------------------------------------------------------------------


def chunk(ts_ms: list[int], epoch: int = 1) -> Chunk:
    return Chunk(epoch, np.arange(len(ts_ms)), np.array(ts_ms), np.arange(len(ts_ms), dtype=float))


def test_a_record_torn_by_a_crash_hides_no_other(tmp_path: Path) -> None:
    log, minute = SampleLog(tmp_path), 29_000_000
    log.append(chunk([minute * 60_000]))
    path = next(tmp_path.glob("samples-*"))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert [len(c.series) for c in log.minute(minute)[0]] == [1]  # still being written: no warning
        assert log.minute(minute)[1] == []
    SampleLog(tmp_path).append(chunk([minute * 60_000 + 1, minute * 60_000 + 2]))
    chunks, warnings = log.minute(minute)
    assert [len(c.series) for c in chunks] == [1, 2]
    assert "damaged" in warnings[0]
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(bytes(flipped) + whole)
    assert [len(c.series) for c in log.minute(minute)[0]] == [1]


def test_the_log_is_by_sample_time_and_pruned_with_its_series(tmp_path: Path) -> None:
    log, now = SampleLog(tmp_path), datetime(2026, 3, 10, tzinfo=UTC)
    first, second = (round((now - timedelta(days=d)).timestamp() * 1000) for d in (6, 3))
    log.append(chunk([first, first + 60_000], first), [(0, b"a"), (1, b"b")])
    log.append(chunk([second + 1, second + 120_000], second), [(0, b"c")])
    assert len(list(tmp_path.glob("samples-*"))) == 4
    assert log.epochs() == [first, second]
    rows, offset = log.series(first)
    assert rows == [(0, b"a"), (1, b"b")]
    log.append(chunk([], first), [(2, b"d")])
    assert log.series(first, offset)[0] == [(2, b"d")]
    spool = Spool(tmp_path)
    assert spool.prune(now - timedelta(days=5)) == 2
    assert (len(list(tmp_path.glob("samples-*"))), log.epochs()) == (2, [first, second])
    log.append(chunk([second + 1], second))  # its file is still there
    assert spool.prune(now) == 3  # the minutes, and the labels that nothing refers to any more
    assert log.epochs() == [second]
    log.append(chunk([second + 1], second))  # its file is gone and is made again
    assert len(log.minute(second // 60_000)[0]) == 1
    log.close()


# --- how far it has come --------------------------------------------------------------------------------------


class Two:
    """Two senders, s and t, of one series each."""

    def __init__(self) -> None:
        self.state, self.series, self.newest = IntakeState(), Series(), Newest()
        self.progress = Progress(self.state, 0)

    def send(self, sender: str, now: int, at: int, labels: dict[str, str]) -> None:
        number, ts, value, _ = self.series.take([series_bytes(labels, [(1.0, at)])])
        self.newest.put(number, ts, value, self.progress.hear(sender, now), now)
        self.progress.update(self.newest, self.series, now)


def test_ingest_waits_for_the_sender_that_is_behind() -> None:
    two, base, minute = Two(), 1_780_000_000_000, 60_000
    two.send("s", base, base, gpu_labels(NAMES[0], node="n1"))
    two.send("t", base, base - 5, gpu_labels(NAMES[0], node="n2"))
    assert two.state.complete_ms == base - 5
    for k in range(1, 11):  # t is cut off
        two.send("s", base + k * minute, base + k * minute, gpu_labels(NAMES[0], node="n1"))
    assert two.state.complete_ms == base - 5
    two.send("t", base + 11 * minute, base + minute, gpu_labels(NAMES[0], node="n2"))  # and catches up
    assert two.state.complete_ms == base + minute
    for k in (60, 120, 132):
        two.send("s", base + k * minute, base + k * minute, gpu_labels(NAMES[0], node="n1"))
    assert two.state.complete_ms == base + 132 * minute  # gone for longer than a sender keeps things
    assert set(two.state.senders) == {"s"}


def test_a_sender_whose_series_another_brings_is_not_waited_for() -> None:
    two, base, minute = Two(), 1_780_000_000_000, 60_000
    two.send("s", base, base, gpu_labels(NAMES[0], prometheus_replica="0"))
    two.send("t", base, base, gpu_labels(NAMES[0], prometheus_replica="1"))
    two.send("t", base + minute, base + minute, gpu_labels(NAMES[0], prometheus_replica="1"))
    assert two.state.complete_ms == base
    two.send("t", base + 3 * minute, base + 3 * minute, gpu_labels(NAMES[0], prometheus_replica="1"))
    assert two.state.complete_ms == base + 3 * minute


def test_lag_is_what_the_state_file_says(source: RemoteWriteSource) -> None:
    assert source.watermark_lag_s == 1  # nothing has ever arrived: nothing to wait for
    ts = now_ms() - 100_000
    post(source.port, request(series_bytes(gpu_labels(NAMES[0]), [(1.0, ts)])))
    wait_until(lambda: read_state(source.folder), 5)
    other = RemoteWriteSource("a", source.folder, port=source.port, tick_s=1)  # as another process sees it
    assert 99 < other.watermark_lag_s < 110
    findings = {name: (ok, text) for name, ok, text in other.check()}
    assert findings["reachable"][0]
    assert "1 sender (127.0.0.1)" in findings["reachable"][1]
    assert "everything has arrived up to 2 min ago" in findings["fresh"][1]
    assert findings["receiver"] == (
        True,
        f"listens on http://127.0.0.1:{source.port}/api/v1/write, process {os.getpid()}",
    )


def test_doctor_is_told_how_to_send(tmp_path: Path) -> None:
    port = free_port()
    source = RemoteWriteSource("a", tmp_path, host="0.0.0.0", port=port)
    findings = source.check()
    assert [(name, ok) for name, ok, _ in findings] == [("token", False), ("receiver", False), ("reachable", False)]
    assert f"nothing listens on 0.0.0.0:{port}: start the nowcast (`weatherglass run`, or" in findings[1][2]
    assert f"url: http://THIS_HOST:{port}/api/v1/write" in findings[2][2]


# --- the receiver is kept up ----------------------------------------------------------------------------------


def by_name(source: RemoteWriteSource) -> dict[str, tuple[bool, str]]:
    return {name: (ok, text) for name, ok, text in source.check()}


def test_a_taken_port_is_tried_again_and_said_until_it_is_free(tmp_path: Path) -> None:
    with Pages() as stranger:
        source = RemoteWriteSource("a", tmp_path, port=stranger.port, exporter_interval_s=1, tick_s=1)
        for _ in range(2):
            with pytest.raises(SourceError) as caught:
                source.latest()
        text = str(caught.value)
        assert re.match(r"a: no samples are received since 2\d{3}-\d\d-\d\d \d\d:\d\d UTC: cannot listen on ", text)
        assert text.split(" UTC: ")[1] == (
            f"cannot listen on 127.0.0.1:{stranger.port}: Address already in use: stop what listens there, or set "
            "clusters.a.remote_write_port; tried again every 1 s, and senders keep what they could not send for about "
            "two hours"
        )
        assert source.receiver_problem == text.removeprefix("a: ")
        other = RemoteWriteSource("a", tmp_path, port=stranger.port)  # as doctor sees it
        is_ok, said = by_name(other)["receiver"]
        assert not is_ok
        assert f"127.0.0.1:{stranger.port} is in use, and what listens there is not the receiver of a" in said
        assert "clusters.a.remote_write_port" in said
        assert by_name(other)["reachable"][1].startswith("nothing has arrived yet: mend the receiver, then put")
    try:
        source.latest()
        assert source.receiver_problem is None
        assert post(source.port, good_body())[0] == 204
        assert by_name(other)["receiver"][0]
    finally:
        source.close()
    assert "nothing listens on" in by_name(other)["receiver"][1]


def test_a_nowcast_without_its_receiver_says_so_everywhere_until_it_is_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger, stop = Pages(), threading.Event()
    source = RemoteWriteSource("a", tmp_path / "spool", port=stranger.port, exporter_interval_s=1, tick_s=0.2)
    nowcast = Nowcast("a", Publisher(tmp_path / "published", "a"), NowcastConfig(tick_s=0.2, exporter_interval_s=1))
    statuses: list[dict[str, Any]] = []
    loop = threading.Thread(target=run, args=(nowcast, source, None, 0.2, stop), kwargs={"on_tick": statuses.append})
    api = create_app(tmp_path / "published", ["a"])

    def gauges() -> str:
        api.store.refresh()
        return api.metrics.render(["a"]).decode()

    try:
        loop.start()
        wait_until(lambda: statuses and "receiver" in statuses[-1]["problems"], 10)
        said = statuses[-1]["problems"]["receiver"]
        assert f"cannot listen on 127.0.0.1:{stranger.port}: Address already in use" in said
        assert statuses[-1]["problems"]["telemetry-source"] == f"a: {said}"
        assert f"source a failed, going on without it: {said}" in caplog.text
        assert 'weatherglass_nowcast_problem{cluster="a",part="receiver"} 1.0' in gauges()
        stranger.stop()
        wait_until(lambda: "receiver" not in statuses[-1]["problems"], 10)
        assert post(source.port, good_body())[0] == 204
        wait_until(lambda: statuses[-1]["gpus"] == 1, 10)
        assert 'part="receiver"' not in gauges()
    finally:
        stop.set()
        loop.join(10)
        source.close()
        stranger.stop()


def test_two_receivers_on_one_port_are_told_apart(source: RemoteWriteSource, tmp_path: Path) -> None:
    other = RemoteWriteSource("b", tmp_path / "b", port=source.port)
    assert "what listens there is not the receiver of b" in by_name(other)["receiver"][1]
    same = RemoteWriteSource("a", source.folder, port=source.port)
    with pytest.raises(SourceError, match="Address already in use"):
        same.latest()
    assert by_name(same)["receiver"][0]  # a second nowcast of a cluster does not speak for the first


def test_a_receiver_that_ended_is_started_again(source: RemoteWriteSource, caplog: pytest.LogCaptureFixture) -> None:
    post(source.port, good_body(1.0))
    keeper = source._keeper
    assert keeper._receiver is not None
    ended = keeper._receiver
    assert ended._loop is not None
    ended._loop.call_soon_threadsafe(ended._loop.stop)
    wait_until(lambda: not ended.is_running(), 10)
    port = source.port
    source.latest()
    assert "the receiver of remote-write has ended; it is started again" in caplog.text
    assert (source.port, source.receiver_problem) == (port, None)
    assert post(port, good_body(2.0))[0] == 204
    assert keeper._intake is not None
    keeper._intake.close()  # as if its thread had died
    source.latest()
    assert post(port, good_body(3.0))[0] == 204
    assert len(logged(source.folder)) == 3


def test_a_silent_receiver_is_not_said_to_have_everything(source: RemoteWriteSource) -> None:
    post(source.port, good_body())
    source.close()
    state, long_ago = read_state(source.folder), now_ms() - 25 * 60_000
    assert state is not None
    for sender in state.senders.values():
        sender.heard_ms = sender.complete_ms = long_ago
    state.complete_ms = long_ago
    write_state(source.folder, state)
    found = by_name(source)
    assert [name for name, (ok, _) in found.items() if not ok] == ["receiver", "reachable", "fresh"]
    assert "heard 25 min ago: mend the receiver first" in found["reachable"][1]
    assert re.match(r"complete only up to .* UTC, 25 min ago: what came since waits at the senders", found["fresh"][1])
    assert "everything" not in str(found)
    assert re.fullmatch(
        rf"what was received is whole up to \d\d:\d\d:\d\d only: does the nowcast run, and does Prometheus send to "
        rf"127.0.0.1:{source.port}\?", source.waits_for
    )  # fmt: skip
    state.complete_ms = now_ms()
    write_state(source.folder, state)
    assert source.waits_for == ""


def test_a_renewed_token_is_taken_up_and_a_broken_one_is_not(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    source = RemoteWriteSource("a", tmp_path / "spool", port=0, token_file=str(token))
    try:
        port = source.listen()
        assert post(port, good_body(), Authorization="Bearer first")[0] == 204
        token.write_text("second\n")
        source.latest()
        assert post(port, good_body(), Authorization="Bearer first")[0] == 401
        assert post(port, good_body(), Authorization="Bearer second")[0] == 204
        assert source.latest().gpu.height == 1  # what came before is still there
        token.write_text("")
        assert "is empty: it must hold the token alone" in " ".join(source.latest().warnings)
        assert "the receiver goes on with what stood there before" in str(source.receiver_problem)
        assert post(port, good_body(), Authorization="Bearer second")[0] == 204
        token.write_text("third\n")
        assert source.latest().warnings == []
        assert post(port, good_body(), Authorization="Bearer third")[0] == 204
    finally:
        source.close()


# --- a real Prometheus as sender ------------------------------------------------------------------------------

QUICK = {"batch_send_deadline": "100ms", "min_backoff": "20ms", "max_backoff": "200ms", "max_samples_per_send": 50}


class Exporters:
    """Two exporters of two GPUs each, whose values change at every scrape."""

    def __init__(self, pages: Pages) -> None:
        self.pages, self.scrapes = pages, 0
        self.nodes = ["n1", "n2"]
        for node in self.nodes:
            pages.pages[f"/{node}"] = lambda node=node: self.page(node)

    def page(self, node: str) -> str:
        self.scrapes += 1
        lines = ["go_goroutines 7"]
        for gpu in (0, 1):
            labels = (
                f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",Hostname="{node}",modelName="H100",pod="p{self.scrapes // 20}"'
            )
            for k, name in enumerate(NAMES):
                value = 0 if name == "DCGM_FI_DEV_XID_ERRORS" else 40 + (self.scrapes * 7 + k + gpu) % 50
                lines.append(f"{name}{{{labels}}} {value}")
        return "\n".join(lines) + "\n"

    def scrapes_of(self, interval_s: float = 0.2) -> list[dict[str, Any]]:
        return [
            scrape_config(f"dcgm-{node}", [self.pages.address], interval_s=interval_s, metrics_path=f"/{node}")
            for node in self.nodes
        ]


def sending_to(port: int) -> list[dict[str, Any]]:
    return [{"url": f"http://127.0.0.1:{port}/api/v1/write", "queue_config": QUICK}]


def raw_of(server: Prometheus, begin_ms: int, end_ms: int) -> dict[tuple[str, ...], float]:
    """Raw samples of metrics of use by labels and time, as the server's own API gives them."""
    matcher = "|".join((*NAMES, "up"))
    seconds = (end_ms - begin_ms) / 1000 + 1
    found = {}
    for row in server.query(f'{{__name__=~"{matcher}"}}[{round(seconds * 1000)}ms]', at=end_ms / 1000):
        labels = tuple(f"{k}={v}" for k, v in sorted(row["metric"].items()))
        for at, value in row["values"]:
            if begin_ms <= round(at * 1000) < end_ms:
                found[(*labels, str(round(at * 1000)))] = float(value)
    return found


def ordered(frame: pl.DataFrame) -> pl.DataFrame:
    keys = [name for name in ("ts", "node", "gpu_uuid") if name in frame.columns]
    return frame.select(sorted(frame.columns)).sort(keys)


def same_rows(source: RemoteWriteSource, server: Prometheus, begin_ms: int, end_ms: int) -> int:
    """Both readings of the same span are equal; how many GPU rows they have."""
    other = PrometheusSource("a", server.url, exporter_interval_s=1)
    try:
        begin, end = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (begin_ms, end_ms))
        ours, theirs = source.fetch(begin, end), other.fetch(begin, end)
    finally:
        other.close()
    assert_frame_equal(ordered(ours.gpu), ordered(theirs.gpu))
    assert_frame_equal(ordered(ours.node), ordered(theirs.node))
    return ours.gpu.height


@pytest.mark.services("prometheus")
def test_ticks_and_log_hold_what_prometheus_holds(
    source: RemoteWriteSource, prometheus: Callable[..., Prometheus], pages: Pages
) -> None:
    exporters = Exporters(pages)
    begin_ms = now_ms()
    server = prometheus(exporters.scrapes_of(), remote_write=sending_to(source.port))
    wait_until(lambda: source.latest().gpu.height == 4, 10)
    ticks = []
    for _ in range(6):
        since = source.latest().gpu["ts"].min()
        wait_until(lambda since=since: source.latest().gpu["ts"].min() > since, 10, what="a newer tick")
        ticks.append(source.latest())
    wait_until(lambda: len(raw_of(server, begin_ms, now_ms())) > 60 * len(NAMES), 60, what="60 samples of each name")
    pages.pages["/n2"] = (500, "text/plain", "down")
    wait_until(lambda: source.latest().gpu["node"].unique().to_list() == ["n1"], 5, what="n2 has ended")
    down = source.latest().node.filter(pl.col("node") == "n2")
    assert down["is_up"].to_list() == [False]
    end_ms = now_ms()
    wait_until(lambda: time.time() - source.watermark_lag_s > end_ms / 1000, 5)
    stored = logged(source.folder)
    inside = {key: got for key, got in stored.items() if int(key[-1]) < end_ms}
    assert {key: got[0] for key, got in inside.items()} == raw_of(server, begin_ms, end_ms)
    assert same_rows(source, server, begin_ms, end_ms) > 40
    held = source.fetch(datetime.fromtimestamp(begin_ms / 1000, UTC), datetime.now(UTC)).gpu
    for tick in ticks:  # each row of a tick is a whole row that was scraped
        assert tick.warnings == []
        assert tick.gpu.height == 4
        assert tick.gpu.join(held, on=tick.gpu.columns, how="anti", nulls_equal=True).is_empty()
    assert pl.concat([tick.gpu for tick in ticks]).select("ts", "gpu_uuid").n_unique() > 12
    assert [ok for name, ok, _ in source.check() if name in ("reachable", "fresh", "metrics")] == [True] * 3


@pytest.mark.services("prometheus", "openssl")
def test_a_real_prometheus_sends_over_tls_and_a_renewed_certificate_is_taken_up(
    tmp_path: Path, prometheus: Callable[..., Prometheus], pages: Pages
) -> None:
    for name in ("ours", "new"):
        make_authority(tmp_path, name)
    authority, token = tmp_path / "trusted.pem", tmp_path / "token"
    token.write_text("s3cret\n")
    authority.write_text((tmp_path / "ours.pem").read_text())
    pem, key = make_certificate(tmp_path, "ours", "server", "IP:127.0.0.1")
    source = RemoteWriteSource(
        "a", tmp_path / "spool", port=0, token_file=str(token), cert_file=str(pem), key_file=str(key),
        exporter_interval_s=1, tick_s=1,
    )  # fmt: skip
    try:
        port = source.listen()
        other = RemoteWriteSource(
            "a", source.folder, port=port, token_file=str(token), cert_file=str(pem), key_file=str(key),
            exporter_interval_s=1,
        )  # fmt: skip
        assert "url: https://127.0.0.1" in by_name(other)["reachable"][1]
        assert "tls_config: {ca_file: " in by_name(other)["reachable"][1]
        sending = {
            "url": f"https://127.0.0.1:{port}/api/v1/write", "queue_config": QUICK,
            "tls_config": {"ca_file": str(authority)}, "authorization": {"credentials_file": str(token)},
        }  # fmt: skip
        begin_ms = now_ms()
        server = prometheus(Exporters(pages).scrapes_of(), remote_write=[sending])
        wait_until(lambda: source.latest().gpu.height == 4, 20, what="samples over TLS")
        end_ms = now_ms()
        wait_until(lambda: time.time() - source.watermark_lag_s > end_ms / 1000, 10)
        assert same_rows(source, server, begin_ms, end_ms) >= 4
        receiver = by_name(other)["receiver"]
        assert receiver == (True, f"listens on https://127.0.0.1:{port}/api/v1/write, process {os.getpid()}")
        with pytest.raises((urllib.error.URLError, http.client.HTTPException)):  # plain http gets nothing
            post(port, good_body())
        pem.write_text("half a file")  # while it is being renewed
        source.latest()
        assert "remote_write_cert_file" in str(source.receiver_problem)
        make_certificate(tmp_path, "new", "server", "IP:127.0.0.1")
        authority.write_text((tmp_path / "new.pem").read_text())
        source.latest()
        assert source.receiver_problem is None
        context = ssl.create_default_context(cafile=str(tmp_path / "new.pem"))
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as checked,
        ):
            assert checked.version() in ("TLSv1.2", "TLSv1.3")
        assert source._keeper._intake is not None
        counts = source._keeper._intake.state.counts
        before = counts["samples"]
        wait_until(lambda: counts["samples"] > before, 20, what="samples again: it reads its authorities anew")
        server.stop()  # before the receiver: it sends what it has left
    finally:
        source.close()


@pytest.mark.services("prometheus")
def test_nothing_is_lost_or_doubled_when_either_end_is_killed(
    tmp_path: Path, prometheus: Callable[..., Prometheus], pages: Pages
) -> None:
    folder, port = tmp_path / "spool", free_port()
    argv = [sys.executable, "-m", "tests.remote_write_child", str(folder), str(port)]
    reader = RemoteWriteSource("a", folder, port=0, exporter_interval_s=1, tick_s=0.5)
    store = Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data"))
    ingest = IngestSettings(window_s=2, overlap_s=1, lag_s=0.5, initial_history_s=60, max_windows_per_run=100)

    def ingested() -> datetime:
        report = ingest_telemetry(store, reader, "a", ingest, datetime.now(UTC))
        assert report.error is None
        assert report.mark is not None
        return report.mark

    def caught_up(since_ms: int) -> None:
        wait_until(lambda: ((read_state(folder) or IntakeState()).complete_ms or 0) >= since_ms, 20, what="caught up")

    begin_ms = now_ms()
    child = Process(argv, tmp_path / "child.log")
    try:
        child.wait_until(lambda: "listening" in child.tail())
        server = prometheus(Exporters(pages).scrapes_of(), remote_write=sending_to(port))
        caught_up(now_ms())
        ingested()
        child.kill()
        killed = datetime.now(UTC)
        time.sleep(2)
        assert ingested() < killed  # nothing comes: it waits, and does not take the gap for the truth
        child = Process(argv, tmp_path / "child.log")
        caught_up(now_ms())
        stopping_ms = now_ms()
        server.stop()
        server.start()
        started_ms = now_ms()
        # As many as the bounds below ask for, however slowly this machine scrapes.
        enough = 220 * len(NAMES)
        wait_until(lambda: len(raw_of(server, begin_ms, now_ms())) > enough, 120, what="220 samples of each name")
        caught_up(now_ms())
        mark = ingested()
        end_ms = round(mark.timestamp() * 1000)
        stored = {key: got for key, got in logged(folder).items() if begin_ms <= int(key[-1]) < end_ms}
        wanted = raw_of(server, begin_ms, end_ms)
        # A scrape that the stop breaks off is written down as `up` 0 by a Prometheus that sends nothing any more.
        broken_off = [
            key for key, value in wanted.items()
            if key not in stored and "__name__=up" in key and value == 0
            and stopping_ms - 2_000 <= int(key[-1]) <= started_ms
        ]  # fmt: skip
        assert len(broken_off) <= 2, "one a target at most"
        assert {key: got[0] for key, got in stored.items()} == {k: v for k, v in wanted.items() if k not in broken_off}
        assert all(len(set(got)) == 1 for got in stored.values())
        rows = same_rows(reader, server, begin_ms, end_ms)
        kept = store.query(
            "SELECT ts, gpu_uuid, gpu_temp_c FROM raw_gpu_samples WHERE ts >= ? AND ts < ? ORDER BY ts, gpu_uuid",
            [datetime.fromtimestamp(begin_ms / 1000, UTC), mark],
        )
        theirs = reader.fetch(datetime.fromtimestamp(begin_ms / 1000, UTC), mark).gpu.select(kept.columns)
        assert kept.height == rows > 100
        assert_frame_equal(kept, theirs.sort("ts", "gpu_uuid"), check_dtypes=False)
        server.stop()  # before the receiver: it sends what it has left
    finally:
        child.kill()
        store.close()

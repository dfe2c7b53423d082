"""The Prometheus source on a real Prometheus: values, units and times as scraped; failures said, nothing by halves."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features import metrics
from features.vocabulary import schema
from pipelines.settings import Cluster
from pipelines.sources import SourceError, build_telemetry
from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.promql_matrix import decode_matrix
from tests.services import Pages, Prometheus, free_port, http_get, scrape_config, wait_until

STEP_S = 15
SAMPLES = 40
T0 = math.floor(time.time() / 60) * 60 - 7200 + 0.123  # scrapes fall between whole seconds


def at(k: float) -> datetime:
    return datetime.fromtimestamp(round(T0 * 1000) / 1000 + k * STEP_S, UTC)


def labels(node: int, gpu: int, **more: str) -> str:
    pairs = {
        "gpu": str(gpu), "UUID": f"GPU-{node}-{gpu}", "device": f"nvidia{gpu}", "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": f"n{node}", "DCGM_FI_DRIVER_VERSION": "570.1", "instance": f"10.0.0.{node}:9400", "job": "dcgm",
        "cluster": "a", **more,
    }  # fmt: skip
    return ",".join(f'{name}="{value}"' for name, value in pairs.items())


def history() -> str:
    """Two nodes of two GPUs; what is odd about real data, each once."""
    series: dict[str, list[str]] = {}

    def add(name: str, labels: str, k: float, value: object) -> None:
        series.setdefault(name, []).append(f"{name}{{{labels}}} {value} {T0 + k * STEP_S:.3f}")

    for node in (1, 2):
        for gpu in (0, 1):
            for k in range(SAMPLES):
                job = {"hpc_job": "77" if k < 20 else "78"} if node == 1 else {}
                ls = labels(node, gpu, **job)
                add("DCGM_FI_DEV_GPU_TEMP", ls, k, 40 + k + gpu)
                add("DCGM_FI_DEV_FB_USED", ls, k, 1000 * k)
                add("DCGM_FI_DEV_FB_FREE", ls, k, 80_000 - 1000 * k)
                add("DCGM_FI_DEV_SM_CLOCK", ls, k, 1980)
                add("DCGM_FI_PROF_SM_ACTIVE", ls, k, 0.123456)
                if (node, gpu) != (2, 1):  # profiling metrics are absent on some models
                    add("DCGM_FI_PROF_NVLINK_TX_BYTES", ls, k, 4.5e11 - k)
                add("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", ls, k, 0x20 if k == 5 else 1)
                power = {3: "NaN", 4: "+Inf", 6: "9223372036854775794"}.get(k, 600.25) if (node, gpu) == (1, 0) else 500
                add("DCGM_FI_DEV_POWER_USAGE", ls, k, power)
                if gpu == 0 and node == 2 and k >= 10:  # the same GPU with pod labels, from some moment on
                    add("DCGM_FI_DEV_POWER_USAGE", labels(node, gpu, pod="p-1", namespace="x"), k, 510)
        for k in range(SAMPLES):
            where = f'instance="n{node}:9290",job="ipmi",cluster="a"'
            add("ipmi_temperature_celsius", f'{where},id="1",name="Inlet Temp"', k + 0.3, 24.5)
            add("ipmi_temperature_celsius", f'{where},id="2",name="CPU1 Temp"', k + 0.3, 70)
            add("up", f'instance="10.0.0.{node}:9400",job="dcgm",cluster="a"', k, 0 if (node, k) == (2, 7) else 1)
            add("up", f'instance="other{node}:9100",job="node",cluster="a"', k, 1)
    for k in range(5):  # another cluster on the same server
        add("DCGM_FI_DEV_GPU_TEMP", labels(9, 0, cluster="b"), k, 99)
    blocks = [f"# TYPE {name} gauge\n" + "\n".join(lines) for name, lines in series.items()]
    return "\n".join(blocks) + "\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path_factory.mktemp("recorded"), history=history(), flags=("--query.max-samples=700",))
    yield server
    server.stop()


@pytest.fixture
def source(recorded: Prometheus) -> Iterator[PrometheusSource]:
    cluster = Cluster(prometheus_url=recorded.url, prometheus_matcher='cluster="a"', exporter_interval_s=STEP_S)
    source = build_telemetry("a", cluster, recorded.folder)
    assert isinstance(source, PrometheusSource)
    yield source
    source.close()


def gpu(frame: pl.DataFrame, node: int, gpu: int) -> pl.DataFrame:
    return frame.filter((pl.col("node") == f"n{node}") & (pl.col("gpu_index") == gpu)).sort("ts")


def test_values_units_and_times_are_those_that_were_scraped(source: PrometheusSource) -> None:
    fetched = source.fetch(at(0), at(SAMPLES))
    assert fetched.warnings == []
    types = schema("raw_gpu_samples")
    assert all(types[name] == dtype for name, dtype in fetched.gpu.schema.items())
    assert set(fetched.gpu["cluster"]) == {"a"}
    assert set(fetched.gpu["gpu_uuid"]) == {f"GPU-{n}-{g}" for n in (1, 2) for g in (0, 1)}
    assert len(fetched.gpu) == 4 * SAMPLES + 0  # one row a GPU and scrape
    for node in (1, 2):
        for index in (0, 1):
            rows = gpu(fetched.gpu, node, index)
            assert rows["ts"].to_list() == [at(k) for k in range(SAMPLES)]
            assert rows["gpu_temp_c"].to_list() == [40 + k + index for k in range(SAMPLES)]
            assert rows["fb_used_bytes"].to_list() == pytest.approx([1000 * k * 2**20 for k in range(SAMPLES)])
            assert rows["fb_total_bytes"].to_list() == pytest.approx([80_000 * 2**20] * SAMPLES)
            assert set(rows["sm_clock_hz"]) == {1.98e9}
            assert rows["sm_active_ratio"].to_list() == pytest.approx([0.123456] * SAMPLES)
            assert [k for k, hot in enumerate(rows["is_thermal_slowdown"]) if hot] == [5]
    assert gpu(fetched.gpu, 1, 0)["nvlink_tx_bytes_per_s"].to_list() == pytest.approx(
        [4.5e11 - k for k in range(SAMPLES)]
    )
    assert gpu(fetched.gpu, 2, 1)["nvlink_tx_bytes_per_s"].null_count() == SAMPLES


def test_bad_values_come_through_as_received(source: PrometheusSource) -> None:
    power = gpu(source.fetch(at(0), at(SAMPLES)).gpu, 1, 0)["gpu_power_w"].to_list()
    assert math.isnan(power[3])
    assert power[4] == math.inf
    assert power[6] > 9.2e18
    assert [p for k, p in enumerate(power) if k not in (3, 4, 6)] == [600.25] * (SAMPLES - 3)


def test_job_changes_and_pod_labels_make_no_second_gpu(source: PrometheusSource) -> None:
    frame = source.fetch(at(0), at(SAMPLES)).gpu
    assert gpu(frame, 1, 0)["job_id"].to_list() == ["77"] * 20 + ["78"] * 20
    assert gpu(frame, 2, 0)["job_id"].null_count() == SAMPLES
    assert gpu(frame, 2, 0)["gpu_power_w"].to_list() == [500] * 10 + [510] * 30


def test_node_sensors_and_up(source: PrometheusSource) -> None:
    node = source.fetch(at(0), at(SAMPLES)).node
    inlet = node.filter(pl.col("inlet_temp_c").is_not_null())
    assert set(inlet["inlet_temp_c"]) == {24.5}
    assert inlet.filter(pl.col("node") == "n1")["ts"].to_list() == [at(k + 0.3) for k in range(SAMPLES)]
    up = node.filter(pl.col("is_up").is_not_null())
    assert set(up["node"]) == {"n1", "n2"}  # by the instance that brings the GPUs; other scrape jobs are no nodes
    assert up.filter(~pl.col("is_up")).select("node", "ts").rows() == [("n2", at(7))]


def test_windows_lose_nothing_and_double_nothing(source: PrometheusSource) -> None:
    whole = source.fetch(at(0), at(SAMPLES)).gpu.sort("gpu_uuid", "ts")
    edges = [
        at(0),
        at(3),
        at(3.5),
        at(17) + timedelta(milliseconds=1),
        at(17) + timedelta(microseconds=1500),
        at(SAMPLES),
    ]
    parts = [source.fetch(a, b).gpu for a, b in itertools.pairwise(edges)]
    joined = pl.concat([part for part in parts if len(part)], how="diagonal").sort("gpu_uuid", "ts")
    assert joined.select(whole.columns).equals(whole)
    assert source.fetch(at(3), at(3) + timedelta(microseconds=1)).gpu["ts"].unique().to_list() == [at(3)]
    assert source.fetch(at(3) - timedelta(seconds=1), at(3)).gpu.is_empty()
    assert source.fetch(at(5), at(5)).gpu.is_empty()


def test_a_query_that_is_too_large_is_asked_in_parts(recorded: Prometheus, source: PrometheusSource) -> None:
    # The server refuses more than 700 samples; this window holds twice as many.
    source._reader._range_ms = 3_600_000
    frame = source.fetch(at(0), at(SAMPLES)).gpu
    assert len(frame) == 4 * SAMPLES
    assert source._reader._range_ms < 320_000


def test_matcher_keeps_clusters_apart(recorded: Prometheus) -> None:
    source = PrometheusSource("b", recorded.url, matcher='cluster="b"')
    frame = source.fetch(at(0), at(SAMPLES)).gpu
    assert frame.select("cluster", "node", "gpu_temp_c").unique().rows() == [("b", "n9", 99)]
    source.close()
    broken = PrometheusSource("b", recorded.url, matcher='cluster="b')
    with pytest.raises(SourceError, match=r"refused the query.*parse error"):
        broken.fetch(at(0), at(1))
    broken.close()


def test_nothing_in_a_window_is_an_empty_frame(source: PrometheusSource) -> None:
    fetched = source.fetch(at(-100), at(-90))
    assert fetched.gpu.is_empty()
    assert fetched.node.is_empty()
    assert fetched.gpu.columns[:4] == ["ts", "cluster", "node", "gpu_uuid"]
    assert source.latest().gpu.is_empty()  # two hours old: dead series are not repeated


# --- live scrapes -------------------------------------------------------------------------------------------------


def exporter_page(node: str, temp: float, gpus: int = 2) -> str:
    lines = []
    for name, value in (("DCGM_FI_DEV_GPU_TEMP", temp), ("DCGM_FI_DEV_FB_USED", 512), ("DCGM_FI_DEV_XID_ERRORS", 31)):
        lines.append(f"# HELP {name} x\n# TYPE {name} gauge")
        lines += [
            f'{name}{{gpu="{g}",UUID="GPU-{node}-{g}",Hostname="{node}",hpc_job="5"}} {value}' for g in range(gpus)
        ]
    return "\n".join(lines) + "\n"


def test_latest_is_what_was_scraped_when_it_was_scraped(prometheus: Callable[..., Prometheus], pages: Pages) -> None:
    steps = Pages()
    for node in ("n1", "n2"):
        pages.pages[f"/metrics/{node}"] = lambda node=node: exporter_page(node, 61.0)
    groups = [
        {"targets": [pages.address], "labels": {"__metrics_path__": f"/metrics/{n}", "node": n}} for n in ("n1", "n2")
    ]
    pages.pages["/sd"] = (200, "application/json", json.dumps(groups))
    steps.pages["/metrics"] = 'weatherglass_step_time_seconds{gpu="0",UUID="GPU-n1-0",node="n1",hpc_job="5"} 1.25\n'
    server = prometheus(
        [
            scrape_config("sim", sd_url=f"{pages.url}/sd", interval_s=1),
            scrape_config("steps", [steps.address], interval_s=1),
        ]
    )
    server.wait_for("DCGM_FI_DEV_XID_ERRORS", 4)
    server.wait_for("weatherglass_step_time_seconds")
    source = PrometheusSource("a", server.url, exporter_interval_s=1)

    def stamps() -> dict[str, float]:
        rows = server.query("timestamp(DCGM_FI_DEV_GPU_TEMP)")
        return {row["metric"]["UUID"]: float(row["value"][1]) for row in rows}

    before = stamps()
    fetched = source.latest()
    after = stamps()
    assert fetched.gpu.sort("gpu_uuid")["gpu_uuid"].to_list() == ["GPU-n1-0", "GPU-n1-1", "GPU-n2-0", "GPU-n2-1"]
    for row in fetched.gpu.iter_rows(named=True):
        assert (row["node"], row["job_id"], row["xid_last"]) == (row["gpu_uuid"][4:6], "5", 31)
        assert (row["gpu_temp_c"], row["fb_used_bytes"]) == (61, 512 * 2**20)
        if row["gpu_uuid"] != "GPU-n1-0":
            assert before[row["gpu_uuid"]] - 0.001 <= row["ts"].timestamp() <= after[row["gpu_uuid"]] + 0.001
    assert fetched.gpu.sort("gpu_uuid")["step_time_s"].to_list() == [1.25, None, None, None]
    assert fetched.node.select("node", "is_up").sort("node").rows() == [("n1", True), ("n2", True)]
    assert {name: ok for name, ok, _ in source.check()} == {
        "reachable": True, "clock": True, "metrics": True, "thermal_throttle": None, "power_throttle": None,
        "nvlink_saturation": None, "memory_exhaustion": True, "host_memory": None, "fabric_congestion": None,
        "straggler": True, "fresh": True,
    }  # fmt: skip
    text = {name: message for name, _, message in source.check()}
    assert "DCGM_FI_DEV_CLOCKS_EVENT_REASONS" in text["thermal_throttle"]

    # A GPU falls off the bus, a node dies: they are not repeated, the others go on.
    pages.pages["/metrics/n1"] = lambda: exporter_page("n1", 62.0, gpus=1)
    del pages.pages["/metrics/n2"]

    def gone() -> bool:
        return source.latest().gpu["gpu_uuid"].to_list() == ["GPU-n1-0"]

    wait_until(gone, 10, 0.2, "dead series leave")
    fetched = source.latest()
    assert fetched.gpu["gpu_temp_c"].to_list() == [62]
    # Both nodes stand behind one instance; the labels of service discovery tell them apart.
    assert fetched.node.select("node", "is_up").sort("node").rows() == [("n1", True), ("n2", False)]

    # The server dies and comes back: an error meanwhile, then the same history.
    end = datetime.now(UTC)
    kept = source.fetch(end - timedelta(seconds=60), end).gpu
    server.kill()
    with pytest.raises(
        SourceError, match=rf"127\.0\.0\.1:{server.port} cannot be reached: Connection refused.*running"
    ):
        source.latest()
    server.start()
    assert source.fetch(end - timedelta(seconds=60), end).gpu.equals(kept)
    source.close()
    steps.stop()


# --- answers that no working Prometheus gives ------------------------------------------------------------------------

QUERY = "/api/v1/query"
OK = {"status": "success", "data": {"resultType": "matrix", "result": []}}
SERIES = {
    "metric": {"__name__": "DCGM_FI_DEV_GPU_TEMP", "UUID": "GPU-1", "gpu": "0", "Hostname": "n1"},
    "values": [[T0, "61"]],
}


@pytest.fixture
def broken(pages: Pages) -> Iterator[PrometheusSource]:
    source = PrometheusSource("a", pages.url.replace("http://", "http://me:secret@"), timeout_s=1)
    yield source
    source.close()


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ((401, "text/plain", "Unauthorized"), "HTTP 401.*user 'me' with the password in prometheus_url"),
        ((403, "text/html", "<html>"), "HTTP 403.*user 'me'"),
        ((404, "text/plain", "not found"), "no Prometheus API.*before /api/v1"),
        ((302, "text/html", ""), "redirects.*login"),
        ((200, "text/html", "<html>Please log in</html>"), "HTML, not JSON.*proxy or login"),
        ((500, "text/plain", "boom"), "HTTP 500.*boom"),
        ((422, "application/json", '{"status":"error","errorType":"execution","error":"bad thing"}'), "bad thing"),
        ((200, "application/json", '{"status":"success","data":{"resultType":"matrix","resu'), "no whole JSON"),
        ((200, "application/json", ""), "no whole JSON"),
        ((200, "application/json", "[]"), "no whole JSON"),
        ((200, "application/json", '{"status":"success"}'), "refused"),
        ((200, "application/json", json.dumps(OK).replace("[]", '[{"metric":{},"values":[[1]]}]')), "cannot be read"),
        ((200, "application/json", '{"status":"success","data":{"resultType":"vector","result":[]}}'), "no matrix"),
    ],
)  # fmt: skip
def test_bad_answers_are_explained(pages: Pages, broken: PrometheusSource, page: Any, message: str) -> None:
    pages.pages[QUERY] = page
    with pytest.raises(SourceError, match=message) as caught:
        broken.fetch(at(0), at(2))
    assert pages.address in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(SourceError):
        broken.latest()
    assert next(ok for _, ok, _ in broken.check()) is False


def test_half_an_answer_gives_nothing(pages: Pages, broken: PrometheusSource) -> None:
    body = {"status": "success", "data": {"resultType": "matrix", "result": [SERIES] * 50}}
    pages.pages[QUERY] = (200, "application/json", json.dumps(body))
    pages.cut = 100
    with pytest.raises(SourceError, match="broke off in the middle"):
        broken.fetch(at(0), at(2))
    pages.cut = 0
    assert len(broken.fetch(at(0), at(2)).gpu) == 1


def test_second_part_failing_gives_nothing(pages: Pages, broken: PrometheusSource) -> None:
    answers = iter([json.dumps({"status": "success", "data": {"resultType": "matrix", "result": [SERIES]}}), "garbage"])
    pages.pages[QUERY] = (200, "application/json", lambda: next(answers))
    with pytest.raises(SourceError):
        broken.fetch(at(0), at(10))


def test_slow_answer_times_out(pages: Pages, broken: PrometheusSource) -> None:
    pages.pages[QUERY] = json.dumps(OK)
    pages.delay_s = 1.5
    started = time.monotonic()
    with pytest.raises(SourceError, match=r"within 1 s.*prometheus_timeout_s"):
        broken.latest()
    assert time.monotonic() - started < 6


def test_nobody_listens() -> None:
    source = PrometheusSource("a", f"http://127.0.0.1:{free_port()}", timeout_s=1)
    with pytest.raises(SourceError, match="Connection refused"):
        source.latest()
    source.close()


def test_warnings_of_the_server_are_kept_and_the_query_is_in_the_body(pages: Pages, broken: PrometheusSource) -> None:
    body = {**OK, "warnings": ["store gateway 2 is down"], "infos": ["a note"]}
    pages.pages[QUERY] = (200, "application/json", json.dumps(body))
    assert broken.latest().warnings == ["store gateway 2 is down", "a note"]
    pages.pages[QUERY] = (200, "application/json", json.dumps(OK))
    assert broken.latest().warnings == []
    method, path, sent = pages.requests[0]
    assert (method, path) == ("POST", QUERY)
    assert sent.startswith(b"timeout=1s&query=%7B__name__%3D~%22")
    assert len(sent) > 2000


NUMBER = st.one_of(st.floats(), st.integers(-(2**60), 2**60).map(float))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 4_000_000_000_000), NUMBER), min_size=1, max_size=5), min_size=0, max_size=6
    ),
    st.booleans(),
)
def test_bulk_decoder_equals_json(series: list[list[tuple[int, float]]], spaced: bool) -> None:
    def text(value: float) -> str:
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN" if math.isnan(value) else repr(value))

    rows = [
        {"metric": {"__name__": "x", "a": '],["\\'}, "values": [[ts / 1000, text(value)] for ts, value in samples]}
        for samples in series
    ]
    matrix = decode_matrix(json.dumps(rows, separators=None if spaced else (",", ":")).encode())
    assert matrix.counts.tolist() == [len(samples) for samples in series]
    assert matrix.ts_ms.tolist() == [ts for samples in series for ts, _ in samples]
    expected = np.array([value for samples in series for _, value in samples])
    assert np.array_equal(matrix.values, expected, equal_nan=True)
    assert [json.loads(raw) for raw in matrix.labels] == [row["metric"] for row in rows]


def test_helper_really_reaches_prometheus(recorded: Prometheus) -> None:
    assert b"Prometheus" in http_get(f"{recorded.url}/-/ready")


# --- odd series ---------------------------------------------------------------------------------------------------


def answer_of(*series: bytes) -> tuple[int, str, bytes]:
    return 200, "application/json", (
        b'{"status":"success","data":{"resultType":"matrix","result":[' + b",".join(series) + b"]}}"
    )  # fmt: skip


def series_of(metric: bytes, ts: object) -> bytes:
    return b'{"metric":' + metric + f',"values":[[{ts},"61"]]}}'.encode()


# So few names that one query asks for all: a page gives the same answer to each.
FEW = metrics.MetricTable(row for row in metrics.DEFAULT.metrics if row.name == "DCGM_FI_DEV_GPU_TEMP")
GOOD = b'{"__name__":"DCGM_FI_DEV_GPU_TEMP","gpu":"0","UUID":"GPU-1","Hostname":"n1","job":"dcgm"}'


@pytest.mark.parametrize(
    "metric",
    [
        b"null", b"[]", b"7", b'"up"', GOOD.replace(b'"0"', b"0"), GOOD.replace(b"n1", b"n\xff"),
        GOOD.replace(b"n1", b"n\\ud800"), GOOD.replace(b"n1", b"\\udc00\\ud800"),
        GOOD.replace(b'"n1"', b"null"), GOOD.replace(b'"n1"', b'{"a":[1]}'),
    ],
)  # fmt: skip
def test_series_with_odd_labels_are_left_out(pages: Pages, metric: bytes) -> None:
    now = time.time()
    pages.pages["/api/v1/query"] = answer_of(series_of(metric, now), series_of(GOOD, now))
    source = PrometheusSource("a", pages.url, table=FEW)
    moment = datetime.fromtimestamp(now, UTC)
    for _ in range(2):
        for fetched in (
            source.latest(), source.fetch(moment - timedelta(seconds=5), moment + timedelta(seconds=5))
        ):  # fmt: skip
            assert fetched.gpu["gpu_uuid"].to_list() == ["GPU-1"]
            assert len(fetched.warnings) == 1
            assert "1 series left out, whose labels cannot be read" in fetched.warnings[0]
    assert source.check()
    source.close()


@pytest.mark.parametrize("ts", ["9e15", "-9e15", "1e300", "-1e300", "0", "9223372036854775807", str(2**32)])
def test_samples_of_impossible_times_are_left_out(pages: Pages, ts: str) -> None:
    now = time.time()
    odd = GOOD.replace(b"GPU-1", b"GPU-odd")
    pages.pages["/api/v1/query"] = answer_of(series_of(odd, ts), series_of(GOOD, now))
    source = PrometheusSource("a", pages.url, table=FEW)
    fetched = source.latest()
    assert fetched.gpu["gpu_uuid"].to_list() == ["GPU-1"]
    assert len(fetched.warnings) == 1
    assert "GPU-odd on n1" in fetched.warnings[0]
    source.close()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000, b'{"status":"success","data":{"resultType":"matrix","result":' + b"[" * 200_000,
        answer_of(b"7")[2], answer_of(b'{"metric":{},"values":{"a":1}}')[2],
        answer_of(b'{"metric":{},"values":[[1e999,"x"]]}')[2],
        b'{"status":"success","data":{"resultType":"vector","result":null}}',
        b'{"status":"success","data":{"resultType":"\xff","result":[]}}',
    ],
)  # fmt: skip
def test_answers_that_cannot_be_read_are_source_errors(pages: Pages, body: bytes) -> None:
    pages.pages["/api/v1/query"] = (200, "application/json", body)
    source = PrometheusSource("a", pages.url)
    with pytest.raises(SourceError, match=r"^a: "):
        source.latest()
    assert source.check()[0][1] is False
    source.close()


def test_answers_have_a_limit(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sources.promql_session._MAX_ANSWER_BYTES", 1 << 20)
    pages.pages["/api/v1/query"] = answer_of(b" " * (3 << 20))
    source = PrometheusSource("a", pages.url)
    with pytest.raises(SourceError, match="sent more than 1 MiB: narrow prometheus_matcher"):
        source.latest()
    source.close()

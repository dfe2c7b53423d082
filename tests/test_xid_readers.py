"""XID counts by code through every reader, from what exporters expose to events and faults of each code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from features.cleaning import clean_gpu_samples, clean_health_samples
from features.xid_events import xid_events_of
from pipelines.derive import derive_minutes
from pipelines.faults import derive_faults, read_xids
from pipelines.importing import import_files
from pipelines.imports.targets import StoreTarget
from pipelines.ingest import ingest_telemetry
from pipelines.settings import IngestSettings
from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.remote_write import RemoteWriteSource
from pipelines.sources.remote_write_intake import Intake
from pipelines.sources.scrape import ScrapeSource
from tests.services import Pages, Prometheus
from tests.store_child import open_store
from tests.test_remote_write import request, series_bytes

Text = list[tuple[str, dict[str, str], float]]
WINDOW = "DCGM_EXP_XID_ERRORS_COUNT"
STEPS = 8
SHORT = ("GPU-" + pl.col("gpu_uuid").str.tail(1)).alias("gpu_uuid")
EXPECTED = [("GPU-1", 79), ("GPU-2", 79), ("GPU-3", 13), ("GPU-4", 79)]


def labels(number: int, **more: str) -> dict[str, str]:
    where = {"instance": "n1:9400", "job": "dcgm", "Hostname": "n1"}
    return where | {"gpu": str(number - 1), "UUID": f"GPU-{number}"} | more


def smi(**more: str) -> dict[str, str]:
    return {"uuid": "00000000-0000-0000-0000-000000000004", "instance": "n1:9835", "job": "smi", "node": "n1"} | more


def exposed(step: int, at: datetime) -> Text:
    """What exporters say at a step. From the fourth on: three GPUs of which one has no gauge, one of another exporter.

    The gauge of GPU-1 stands at 31 and of GPU-3 at 79, of long ago; what comes is 79, 79 and 13.
    """
    came = 1.0 if step >= STEPS // 2 else 0.0
    text: Text = [("DCGM_FI_DEV_GPU_TEMP", labels(number), 50.0 + step % 3) for number in (1, 2, 3)]
    text += [("DCGM_FI_DEV_XID_ERRORS", labels(1), 31.0), ("DCGM_FI_DEV_XID_ERRORS", labels(3), 79.0)]
    text += [(WINDOW, labels(1, xid="31", window_size_in_ms="300000"), 3.0)]
    codes = {1: "79", 2: "79", 3: "13"}
    for number, code in codes.items():
        if came or number != 2:
            text.append((WINDOW, labels(number, xid=code, window_size_in_ms="300000"), came))
        else:  # as dcgm-exporter says that there was none
            text.append((WINDOW, labels(number, window_size_in_ms="300000"), 0.0))
    text += [
        ("nvidia_smi_temperature_gpu", smi(), 50.0 + step % 3),
        ("nvidia_smi_pcie_link_width_current", smi(), 16.0),
    ]
    text.append(("nvidia_smi_gpu_info", smi(name="NVIDIA L4", index="3", pci_bus_id="00000000:8D:00.0"), 1.0))
    if came:  # the series begins with its first event
        text.append(("nvidia_smi_xid_errors_total", smi(xid="79"), 1.0))
        text.append(("nvidia_smi_xid_last_timestamp_seconds", smi(xid="79"), at.timestamp() - 1))
    return text


def line(name: str, by_name: dict[str, str], value: float, ts: float | None = None) -> str:
    inside = ",".join(f'{label}="{text}"' for label, text in by_name.items())
    return f"{name}{{{inside}}} {value}" + ("" if ts is None else f" {ts:.3f}")


def _by_series(text: str) -> tuple[str, str]:
    """As promtool wants lines: series after series, each in the order of its times."""
    return text.partition("}")[0], text.rpartition(" ")[2]


def open_metrics(moments: list[datetime]) -> str:
    """All steps as OpenMetrics with times, a metric at a time."""
    rows: dict[str, list[str]] = {}
    for step, at in enumerate(moments):
        for name, by_name, value in exposed(step, at):
            rows.setdefault(name, []).append(line(name, by_name, value, at.timestamp()))
    return "".join(
        f"# TYPE {name} unknown\n" + "\n".join(sorted(lines, key=_by_series)) + "\n" for name, lines in rows.items()
    )


@pytest.fixture
def moments() -> list[datetime]:
    """A step a minute, the last one just now."""
    now = datetime.fromtimestamp(int(time.time()), UTC)
    return [now - timedelta(minutes=STEPS - 1 - step) for step in range(STEPS)]


Read = tuple[pl.DataFrame, pl.DataFrame]


def from_prometheus(folder: Path, moments: list[datetime]) -> Iterator[Read]:
    server = Prometheus(folder / "prometheus", history=open_metrics(moments))
    source = PrometheusSource("a", server.url)
    try:
        fetched = source.fetch(moments[0], moments[-1] + timedelta(seconds=1))
        yield fetched.gpu, fetched.health
        newest = source.latest()
        told = dict(newest.health.select("gpu_uuid", "xid_counts").iter_rows())
        assert told == {
            "GPU-1": "31=3 79=1", "GPU-2": "79=1", "GPU-3": "13=1", f"GPU-{smi()['uuid']}": "79=1+",
        }  # fmt: skip
        four = newest.gpu.filter(pl.col("gpu_uuid").str.ends_with("4"))
        assert four.select("gpu_index", "xid_last").rows() == [(3, 79)]
    finally:
        source.close()
        server.stop()


def from_scrape(folder: Path, moments: list[datetime]) -> Iterator[Read]:
    pages, clock = Pages(), iter(moments)
    now = [moments[0]]
    source = ScrapeSource("a", [f"{pages.url}/metrics"], folder / "spool", timeout_s=5, clock=lambda: now[0])
    try:
        for step, at in enumerate(clock):
            now[0] = at
            pages.pages["/metrics"] = "".join(line(*one) + "\n" for one in exposed(step, at))
            assert source.latest().warnings == []
        fetched = source.fetch(moments[0], moments[-1] + timedelta(seconds=1))
        yield fetched.gpu, fetched.health
    finally:
        source.close()
        pages.stop()


def from_remote_write(folder: Path, moments: list[datetime]) -> Iterator[Read]:
    intake = Intake("a", folder / "spool", 1 << 22, timedelta(days=2))
    try:
        for step, at in enumerate(moments):
            ts_ms = round(at.timestamp() * 1000)
            body = request(*(series_bytes({"__name__": n, **ls}, [(v, ts_ms)]) for n, ls, v in exposed(step, at)))
            assert intake.take([("x", body)]) == [(204, "")]
    finally:
        intake.close()
    source = RemoteWriteSource("a", folder / "spool", port=0)
    try:
        fetched = source.fetch(moments[0], moments[-1] + timedelta(seconds=1))
        yield fetched.gpu, fetched.health
    finally:
        source.close()


@pytest.mark.services("prometheus", "promtool")
@pytest.mark.parametrize("reader", [from_prometheus, from_scrape, from_remote_write])
def test_counts_of_codes_come_through_every_reader(
    reader: Callable[[Path, list[datetime]], Iterator[Read]], tmp_path: Path, moments: list[datetime]
) -> None:
    for raw, raw_health in reader(tmp_path, moments):
        gpu, health = clean_gpu_samples(raw)[0], clean_health_samples(raw_health)[0]
        found = xid_events_of(gpu, health)
        assert found.select(SHORT, "xid").sort("gpu_uuid").rows() == EXPECTED
        assert all(abs(ts - moments[STEPS // 2]) <= timedelta(seconds=1) for ts in found["ts"])
        # Without the gauge it is the same.
        assert xid_events_of(health).select(SHORT, "xid").sort("gpu_uuid").rows() == EXPECTED
        four = gpu.filter(pl.col("gpu_uuid").str.ends_with("4"))
        assert set(four["gpu_index"]) == {3}


@pytest.mark.parametrize("kind", ["exposition", "prometheus-json"])
def test_counts_of_codes_come_through_imports(kind: str, tmp_path: Path, moments: list[datetime]) -> None:
    path = tmp_path / "file"
    if kind == "exposition":
        path.write_text("\n".join(text for text in open_metrics(moments).split("\n") if text[:1] != "#"))
    else:
        series: dict[str, dict] = {}
        for step, at in enumerate(moments):
            for name, by_name, value in exposed(step, at):
                one = series.setdefault(line(name, by_name, 0), {"metric": {"__name__": name, **by_name}, "values": []})
                one["values"].append([at.timestamp(), str(value)])
        data = {"resultType": "matrix", "result": list(series.values())}
        path.write_text(json.dumps({"status": "success", "data": data}))
    with open_store(tmp_path / "state") as store:
        import_files(kind, path, "a", StoreTarget(store, "a", path.name), tmp_path, now=datetime.now(UTC))
        begin, end = moments[0] - timedelta(minutes=2), moments[-1] + timedelta(minutes=2)
        found = store.transact(lambda writer: read_xids(writer, "a", begin, end))
    assert found.select(SHORT, "xid").sort("gpu_uuid").rows() == [pair for pair in EXPECTED if pair[1] == 79]


@pytest.mark.services("prometheus", "promtool")
def test_a_stuck_code_makes_no_fault_and_keeps_none_open(tmp_path: Path) -> None:
    """Three nodes: 79 beside a gauge at 31, 79 without a gauge, 13 beside a gauge that has stood at 79 for days.

    On the first one another GPU's gauge has stood at 79 for days, too.
    """
    now = datetime.fromtimestamp(int(time.time()) // 300 * 300, UTC)
    rows: dict[str, list[str]] = {}
    for step in range(100):
        at = now - timedelta(seconds=1500 - 15 * step)
        came = 1.0 if 40 <= step < 60 else 0.0
        for number, code, stuck in ((1, "79", 31), (2, "79", None), (3, "13", 79), (4, None, 79)):
            where = {"gpu": "0", "UUID": f"GPU-{number}", "Hostname": f"n{number % 3 or 3}", "job": "x"}
            told = [("DCGM_FI_DEV_GPU_TEMP", where, 50.0 + step % 5)]
            told += [] if code is None else [(WINDOW, where | {"xid": code}, came)]
            told += [] if stuck is None else [("DCGM_FI_DEV_XID_ERRORS", where, float(stuck))]
            told += [(WINDOW, where | {"xid": "31"}, 3.0)] if number == 1 else []
            for one in told:
                rows.setdefault(one[0], []).append(line(*one, at.timestamp()))
    history = "".join(f"# TYPE {n} unknown\n" + "\n".join(sorted(ls, key=_by_series)) + "\n" for n, ls in rows.items())
    server = Prometheus(tmp_path / "prometheus", history=history)
    source = PrometheusSource("a", server.url)
    ingest = IngestSettings()
    try:
        with open_store(tmp_path / "state") as store:
            since = now - timedelta(seconds=1500)
            ingest_telemetry(store, source, "a", ingest, datetime.now(UTC), since=since)
            derive_minutes(store, "a", ingest)
            derive_faults(store, "a", ingest)
            faults = store.query("SELECT node, xid, start_time, end_time FROM core_faults ORDER BY node")
    finally:
        source.close()
        server.stop()
    assert faults.select("node", "xid").rows() == [("n1", 79), ("n2", 79)]
    event = now - timedelta(seconds=900)
    assert all(abs(ts - event) <= timedelta(minutes=1) for ts in faults["start_time"])
    # The window lets go of the event after five minutes; the GPU reports all the time.
    assert all(timedelta(minutes=4) <= ts - event <= timedelta(minutes=6) for ts in faults["end_time"])

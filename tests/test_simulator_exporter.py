"""Exporter pages against the conventions of the real exporters, and the simulator's HTTP service as a process."""

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from features.classes import HINT_CLASSES
from pipelines.sources.sacct import parse_sacct
from simulator.__main__ import main as command_line
from simulator.cluster import SimulatedCluster
from simulator.exporter import Exporter
from simulator.exposition import FAMILIES, Exposition
from simulator.frames import newest
from tests import services

ROOT = Path(__file__).parent.parent
START = datetime(2026, 11, 4, 9, tzinfo=UTC)
GPU_LABELS = {"gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION"}
# Exporter's unit → registry's, written out here a second time on purpose.
UNITS = {
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_hz", 1e6),
    "DCGM_FI_DEV_MEM_CLOCK": ("mem_clock_hz", 1e6),
    "DCGM_FI_DEV_GPU_TEMP": ("gpu_temp_c", 1),
    "DCGM_FI_DEV_MEMORY_TEMP": ("mem_temp_c", 1),
    "DCGM_FI_DEV_POWER_USAGE": ("gpu_power_w", 1),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_util_ratio", 0.01),
    "DCGM_FI_DEV_XID_ERRORS": ("xid_last", 1),
    "DCGM_FI_DEV_FB_USED": ("fb_used_bytes", 2**20),
    "DCGM_FI_DEV_FB_RESERVED": ("fb_reserved_bytes", 2**20),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("remapped_rows_total", 1),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("engine_active_ratio", 1),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active_ratio", 1),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_active_ratio", 1),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active_ratio", 1),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_tx_bytes_per_s", 1),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_rx_bytes_per_s", 1),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("nvlink_tx_bytes_per_s", 1),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("nvlink_rx_bytes_per_s", 1),
    "DCGM_FI_DEV_GPU_TEMP_LIMIT": ("gpu_temp_margin_c", 1),
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": ("power_limit_w", 1),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected_total", 1),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("nvlink_error_total", 1),
}


@pytest.fixture(scope="module")
def world() -> SimulatedCluster:
    made = SimulatedCluster(2, 4, START, 5, fault_scale=0, own_jobs=False)
    made.place_job("77", "ada", "n1", gpus_per_node=4)
    made.place_job("78", "bob", "n1", gpus_per_node=2, kind="serve")
    made.advance(START + timedelta(minutes=10))
    return made


def families(page: bytes | None) -> dict:
    assert page is not None
    return {family.name: family for family in text_string_to_metric_families(page.decode())}


def test_page_parses_and_has_the_names_types_and_labels_of_dcgm_exporter(world: SimulatedCluster) -> None:
    found = families(Exposition(world).page(0))
    for family in FAMILIES:
        read = found[family.name.removesuffix("_total")]
        assert read.type == family.type, family.name
        assert read.documentation == family.help
        assert len(read.samples) == 8
        for gpu, sample in enumerate(read.samples):
            labels = dict(sample.labels)
            assert labels.pop("hpc_job", None) == ("77" if gpu < 4 else "78" if gpu < 6 else None)
            assert set(labels) == GPU_LABELS
            assert (labels["gpu"], labels["device"]) == (str(gpu), f"nvidia{gpu}")
            assert labels["Hostname"] == "n1"
            assert labels["UUID"] == world.topology.uuids[gpu]
    assert found["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"].type == "counter"  # as declared; it is a rate all the same
    assert found["DCGM_FI_PROF_NVLINK_TX_BYTES"].type == "gauge"
    assert "DCGM_FI_DEV_FB_USED" in found
    inlet = found["ipmi_temperature_celsius"].samples[0]
    assert inlet.labels["name"] == "Inlet Temp"
    assert inlet.value == pytest.approx(world.node_frame()["inlet_temp_c"][0])
    power = found["ipmi_dcmi_power_consumption_current_watts"].samples[0]
    assert power.value == pytest.approx(world.node_frame()["node_power_w"][0])


def test_units_are_those_of_the_exporter(world: SimulatedCluster) -> None:
    found = families(Exposition(world).page(0))
    frame = world.gpu_frame().filter(node="n1").sort("gpu_index")
    for name, (column, scale) in UNITS.items():
        values = [sample.value * scale for sample in found[name.removesuffix("_total")].samples]
        assert values == pytest.approx(frame[column].cast(float).to_list(), rel=1e-5, abs=1e-6), name
    model = world.topology.model
    free, used, held = (
        [s.value for s in found[f"DCGM_FI_DEV_FB_{part}"].samples] for part in ("FREE", "USED", "RESERVED")
    )
    assert [sum(parts) for parts in zip(free, used, held, strict=True)] == [model.memory_total_mib] * 8
    both = found["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"].samples[0].value * 1_024_000
    tx, rx = frame["nvlink_tx_bytes_per_s"][0], frame["nvlink_rx_bytes_per_s"][0]
    assert both == pytest.approx(tx + rx, rel=1e-4)
    bits = [int(s.value) for s in found["DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"].samples]
    assert bits[7] & 0x1  # idle
    assert not any(b & (0x8 | 0x20 | 0x40 | 0x80) for b in bits)
    energy = found["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"].samples[0].value
    world_later = newest(world).gpu["energy_mj"][0]
    assert energy == pytest.approx(world_later)
    steps = found["weatherglass_step_time_seconds"].samples
    assert [s.labels["gpu"] for s in steps] == ["0", "1", "2", "3"]  # serving has no steps
    assert [s.labels["hpc_job"] for s in steps] == ["77"] * 4


def test_slowdown_shows_in_the_bit_mask() -> None:
    made = SimulatedCluster(1, 4, START, 5, fault_scale=0, own_jobs=False)
    made.place_job("1", "ada", "n1")
    made.advance(START + timedelta(minutes=5))
    made.inject("thermal_throttle", "n1", 2, 60)
    made.inject("thermal_throttle", "n1", 4, 10, mode="voltage_regulator")
    made.advance(START + timedelta(minutes=6, seconds=50))
    bits = [int(s.value) for s in families(Exposition(made).page(0))["DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"].samples]
    assert bits[2] & 0x20
    assert bits[4] & 0x48 == 0x48
    assert not bits[0] & 0x68


def test_pages_change_with_jobs_and_a_silent_node_has_none(world: SimulatedCluster) -> None:
    made = SimulatedCluster(2, 4, START, 5, fault_scale=0, own_jobs=False)
    pages = Exposition(made)
    made.step()
    assert b"hpc_job" not in (pages.page(0) or b"")
    made.place_job('7"8', "ada", "n1", gpus_per_node=1)
    made.step()
    assert b'hpc_job="7\\"8"' in (pages.page(0) or b"")
    made.end_job('7"8')
    made.step()
    assert b"hpc_job" not in (pages.page(0) or b"")
    made.physics.is_reachable[1] = False
    made.step()
    assert pages.page(1) is None
    made.physics.is_lost[3] = True
    made.step()
    read = families(pages.page(0))
    assert [s.labels["gpu"] for s in read["DCGM_FI_DEV_GPU_TEMP"].samples] == ["0", "1", "2", "4", "5", "6", "7"]


def ask(exporter: Exporter, *requests: tuple) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(exporter)
        async with httpx.AsyncClient(transport=transport, base_url="http://simulator") as client:
            return [await client.request(method, path, content=body) for method, path, body in requests]

    return asyncio.run(run())


def test_wrong_requests_are_refused_in_one_shape() -> None:
    made = SimulatedCluster(1, 4, START, 5, fault_scale=0, own_jobs=False)
    made.step()
    requests = (
        ("GET", "/metrics/n9", None),
        ("GET", "/nothing", None),
        ("POST", "/control/inject", b"{"),
        ("POST", "/control/inject", b'{"class": "thermal_throttle", "node": "n1", "color": 1}'),
        ("POST", "/control/inject", b'{"class": "thermal_throttle", "node": "n1"}'),
        ("POST", "/control/inject", b'{"class": "thermal", "node": "n1"}'),
        ("POST", "/control/jobs", json.dumps({"job_id": "1", "user": "a", "node_list": "n1", "kind": "x"}).encode()),
        ("POST", "/control/jobs/end", b'{"job_id": "1"}'),
        ("POST", "/control/jobs", b"x" * 70_000),
    )
    answers = ask(Exporter(made, "127.0.0.1:1"), *requests)
    assert [answer.status_code for answer in answers] == [404, 404, 422, 422, 409, 409, 409, 409, 413]
    for answer in answers:
        assert set(answer.json()["error"]) == {"code", "message", "detail"}
    assert "fields: class, node, gpu_index" in answers[3].json()["error"]["message"]
    assert "/control/inject" in answers[1].json()["error"]["message"]
    for name in HINT_CLASSES:  # whatever can be injected is named
        assert name in answers[5].json()["error"]["message"]


def test_files_are_kept_current(tmp_path: Path) -> None:
    made = SimulatedCluster(2, 4, START, 5, fault_scale=0, own_jobs=False)
    exporter = Exporter(made, "127.0.0.1:1", tmp_path)
    exporter.tick(START + timedelta(seconds=5))
    first = (tmp_path / "sacct.txt").read_text()
    assert parse_sacct(first, "sim", START)[0].is_empty()
    made.place_job("5", "ada", "n1,n2", time_limit_s=7200)
    exporter.tick(START + timedelta(minutes=5))
    jobs, warnings = parse_sacct((tmp_path / "sacct.txt").read_text(), "sim", START)
    assert warnings == []
    assert jobs.select("job_id", "state", "gpus", "node_list", "time_limit_s").row(0) == (
        "5", "RUNNING", 16, "n1,n2", 7200,
    )  # fmt: skip
    made.inject("memory_exhaustion", "n1", 0, 30)
    exporter.tick(START + timedelta(minutes=8))
    assert parse_sacct((tmp_path / "sacct.txt").read_text(), "sim", START)[0]["state"][0] == "OUT_OF_MEMORY"
    row = json.loads((tmp_path / "truth.jsonl").read_text())
    assert row["onset"].endswith("Z")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "faults.parquet", "inventory.csv", "lookalikes.jsonl", "sacct.txt", "truth.jsonl",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, services.Process]]:
    """A served cluster of four nodes with a little history, its jobs placed from outside."""
    folder = tmp_path_factory.mktemp("simulator")
    port = services.free_port()
    process = services.Process(
        [
            sys.executable, "-m", "simulator", "serve", "--nodes", "4", "--port", str(port), "--tick-s", "1",
            "--history-hours", "0.2", "--out", str(folder / "sim"), "--cluster", "toy", "--external-jobs",
        ],
        folder / "simulator.log", cwd=ROOT,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        process.wait_until(lambda: services.answers(f"{url}/healthz"), 60, "simulator")
        yield url, folder, process
    finally:
        process.stop()


def test_service_is_ready_with_history_and_goes_on_in_real_time(service: tuple[str, Path, services.Process]) -> None:
    url, folder, _ = service
    services.wait_until(lambda: "simulator ready: 4 nodes, 32 GPUs" in (folder / "simulator.log").read_text())
    groups = httpx.get(f"{url}/sd").json()
    assert [group["labels"]["node"] for group in groups] == ["n1", "n2", "n3", "n4"]
    assert all(url.endswith(group["targets"][0]) for group in groups)
    first = httpx.get(f"{url}/healthz").json()
    assert first["tick_s"] == 1
    moved = services.wait_until(
        lambda: (now := httpx.get(f"{url}/healthz").json())["ticks"] >= first["ticks"] + 2 and now, 15
    )
    age = (datetime.now(UTC) - datetime.fromisoformat(moved["now"])).total_seconds()
    assert -1 < age < 5
    for group in groups:
        answer = httpx.get(url + group["labels"]["__metrics_path__"])
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "DCGM_FI_DEV_GPU_TEMP" in families(answer.content)
    import polars as pl

    telemetry = pl.scan_parquet(folder / "sim" / "telemetry.parquet").select("ts", "cluster").collect()
    assert telemetry["cluster"].unique().to_list() == ["toy"]
    gap = datetime.fromisoformat(first["now"]) - (telemetry["ts"].max() or START)  # type: ignore[operator]
    assert gap < timedelta(seconds=10)  # the history leads up to what is served


def test_service_takes_control_and_stops_cleanly(service: tuple[str, Path, services.Process]) -> None:
    url, folder, process = service
    placed = httpx.post(f"{url}/control/jobs", json={"job_id": "31", "user": "ada", "node_list": "n2,n3"})
    assert (placed.status_code, placed.json()["gpus"]) == (200, 16)
    again = httpx.post(f"{url}/control/jobs", json={"job_id": "32", "user": "ada", "node_list": ["n3"]})
    assert (again.status_code, "0 free GPUs" in again.text) == (409, True)
    assert [job["job_id"] for job in httpx.get(f"{url}/jobs").json()["items"]] == ["31"]
    body = {"class": "memory_exhaustion", "node": "n3", "gpu_index": 5, "onset_in_s": 2}
    row = httpx.post(f"{url}/control/inject", json=body).json()
    assert (row["node"], row["gpu_index"], row["onset"], row["job_id"]) == ("n3", 5, None, "31")

    def happened() -> bool:
        rows = httpx.get(f"{url}/truth").json()["items"]
        return any(found["id"] == row["id"] and found["onset"] for found in rows)

    services.wait_until(happened, 20, 0.2, "onset of the leak")
    assert row["id"] in (folder / "sim" / "truth.jsonl").read_text()
    assert httpx.post(f"{url}/control/jobs/end", json={"job_id": "31"}).json()["state"] == "COMPLETED"
    assert process.stop(15) == 0


def test_command_line_explains_itself_and_names_what_is_wrong(tmp_path: Path) -> None:
    run = CliRunner().invoke
    for arguments in (["--help"], ["serve", "--help"], ["history", "--help"]):
        assert run(command_line, arguments).exit_code == 0
    assert "Example: weatherglass simulate serve" in run(command_line, ["serve", "--help"]).output
    bad = run(command_line, ["history", "--gpu-model", "abacus", "--out", str(tmp_path)])
    assert bad.exit_code == 1
    assert "no GPU model 'abacus'; models: NVIDIA A100" in bad.output
    assert run(command_line, ["history", "--nodes", "0"]).exit_code == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = run(command_line, ["serve", "--port", port, "--out", str(tmp_path)])
    assert refused.exit_code == 1
    assert f"127.0.0.1:{port} cannot be listened on: Address already in use" in refused.output
    good = run(
        command_line,
        ["history", "--nodes", "2", "--hours", "0.1", "--jobs-days", "0.5", "--tick-s", "30", "--until",
         "2026-11-04T10:00:00", "--out", str(tmp_path / "h")],
    )  # fmt: skip
    assert good.exit_code == 0, good.output
    assert good.output.startswith("192 samples of 16 GPUs")

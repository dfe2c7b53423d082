"""Host memory and counters of ports reach the live windows by every way that samples come."""

from datetime import UTC, datetime, timedelta

import pytest

from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.remote_write import RemoteWriteSource
from pipelines.sources.scrape import ScrapeSource
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.nowcast_config import NowcastConfig
from scheduler_hints.snapshot import Publisher
from tests.services import Pages
from tests.test_remote_write import gpu_labels, now_ms, post, request, series_bytes

NODE = {"node_memory_MemAvailable_bytes": 3e11, "node_memory_MemTotal_bytes": 1e12, "node_vmstat_oom_kill": 2.0}
PORT = {"node_infiniband_port_data_transmitted_bytes_total": 7e12, "node_infiniband_rate_bytes_per_second": 5e10}


def check(first, second, root) -> None:
    """Both readings of a source go through the nowcast into the windows of nodes and ports."""
    assert first.node["host_mem_available_bytes"].drop_nulls().to_list() == pytest.approx([3e11])
    assert first.port["tx_bytes_total"].drop_nulls().to_list() == [7e12]
    nowcast = Nowcast("a", Publisher(root, "a"), NowcastConfig())
    for fetched in (first, second):
        nowcast.observe(fetched.gpu, fetched.node, datetime.now(UTC) + timedelta(days=1), port=fetched.port)
    hosts, ports = nowcast.units.rings["host_memory"], nowcast.units.rings["fabric_congestion"]
    assert (hosts.names, ports.names) == (["n1"], ["n1/mlx5_0/1"])
    assert hosts.latest[1, 0] == pytest.approx(0.3)
    assert ports.latest[1, 0] == pytest.approx(0.5, rel=0.05)  # 25 of 50 GB/s


def test_by_scrape(tmp_path):
    def page(counted: float) -> str:
        port = {**PORT, "node_infiniband_port_data_transmitted_bytes_total": PORT[next(iter(PORT))] + counted}
        lines = ['DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="n1"} 60']
        lines += [f'{name}{{node="n1"}} {value:.17g}' for name, value in NODE.items()]
        lines += [f'{name}{{node="n1",device="mlx5_0",port="1"}} {value:.17g}' for name, value in port.items()]
        return "\n".join(lines) + "\n"

    clock = [datetime(2026, 11, 1, tzinfo=UTC)]
    pages = Pages()
    try:
        pages.pages["/a"] = page(0)
        source = ScrapeSource("a", [f"{pages.url}/a"], tmp_path / "spool", timeout_s=5, clock=lambda: clock[0])
        first = source.latest()
        pages.pages["/a"] = page(25e9 * 15)
        clock[0] += timedelta(seconds=15)
        check(first, source.latest(), tmp_path)
        source.close()
    finally:
        pages.stop()


def test_by_remote_write(tmp_path):
    source = RemoteWriteSource("a", tmp_path / "spool", port=0, exporter_interval_s=15, tick_s=1)
    source.listen()
    try:
        now, found = now_ms() - 20_000, []
        for step in range(2):
            ts = now + 15_000 * step
            host = {"instance": "n1:9100", "job": "node"}
            sent = [series_bytes(gpu_labels("DCGM_FI_DEV_GPU_TEMP"), [(60.0, ts)])]
            sent += [series_bytes({"__name__": name, **host}, [(value, ts)]) for name, value in NODE.items()]
            for number, (name, value) in enumerate(PORT.items()):
                more = 25e9 * 15 * step if number == 0 else 0.0
                labels = {"__name__": name, **host, "device": "mlx5_0", "port": "1"}
                sent.append(series_bytes(labels, [(value + more, ts)]))
            assert post(source.port, request(*sent))[0] == 204
            found.append(source.latest())
        check(*found, tmp_path)
    finally:
        source.close()


def test_queries_ask_for_them():
    source = PrometheusSource("a", "http://127.0.0.1:9")
    try:
        asked = str(source._quick._groups)
        assert [name for name in (*NODE, *PORT) if name not in asked] == []
    finally:
        source.close()

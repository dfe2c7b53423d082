"""Series of exporters laid side by side: whose rows they are, and what becomes of links, ports, health and counters."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from features import metrics
from features.vocabulary import schema
from pipelines.sources.exposition import parse_page
from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.rates import Counter, differentiate
from pipelines.sources.wide import Frames, Index, Samples, to_frames
from tests.services import Prometheus

START_MS = 1_767_225_600_000  # 2026-01-01
GPU = 'gpu="0",UUID="GPU-1",Hostname="n1"'
_FABRIC = 'local_port="1",job="ib",instance="ibhost:9683"'


def frames(*pages: str, index: Index | None = None, step_s: float = 15, first: int = 0, node: str = "") -> Frames:
    """Pages that were read one step apart."""
    index = index or Index()
    names, entities, times, values = [], [], [], []
    for number, text in enumerate(pages, first):
        page = parse_page("\n".join(line.strip() for line in text.strip().splitlines()) + "\n", index, node)
        names += page.names
        entities += page.entities
        values += page.values
        times += [round(START_MS + 1000 * step_s * number)] * len(page.names)
    # Samples of one series stand together, as a query gives them.
    order = np.lexsort((times, entities, names))
    keys = np.array(list(zip(names, entities, strict=True)), np.int64).reshape(-1, 2)[order]
    series, counts = np.unique(keys, axis=0, return_counts=True)
    flat = Samples(
        series[:, 0], series[:, 1], counts, np.array(times, np.int64)[order], np.array(values, np.float64)[order]
    )
    return to_frames(flat, index, "a")


def test_mig_instances_are_rows_of_their_own() -> None:
    found = frames(f"""
        DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{GPU},GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"}} 0.5
        DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{GPU},GPU_I_PROFILE="2g.20gb",GPU_I_ID="3"}} 0.25
        DCGM_FI_DEV_POWER_USAGE{{{GPU},GPU_I_PROFILE="2g.20gb",GPU_I_ID="3"}} 300
        DCGM_FI_DEV_POWER_USAGE{{{GPU}}} 301
        DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{GPU},GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"}} 5000
        DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{GPU},GPU_I_PROFILE="2g.20gb",GPU_I_ID="3"}} 5000
    """)
    rows = found.gpu.sort("mig_instance", nulls_last=True).select(
        "mig_instance", "mig_profile", "engine_active_ratio", "gpu_power_w"
    )
    assert rows.rows() == [("3", "2g.20gb", 0.25, 300), ("7", "1g.10gb", 0.5, None), (None, None, None, 301)]
    # Energy is of the whole GPU, and is said once for each instance.
    assert found.health.select("gpu_uuid", "energy_total_j").rows() == [("GPU-1", 5)]


def test_labels_of_pods_and_versions_split_nothing() -> None:
    found = frames(
        f'DCGM_FI_DEV_GPU_TEMP{{{GPU},pod="train-0",namespace="ml"}} 61',
        f"""
        DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 62
        DCGM_FI_DEV_GPU_TEMP{{{GPU},pod="train-0",namespace="ml",prometheus_replica="b"}} 62
        """,
        f'DCGM_FI_DEV_GPU_TEMP{{{GPU},DCGM_FI_DRIVER_VERSION="580.1",exported_pod="train-1"}} 63',
    )
    assert found.gpu["gpu_temp_c"].to_list() == [61, 62, 63]
    assert found.gpu["gpu_uuid"].unique().to_list() == ["GPU-1"]


def test_health_links_ports_and_nodes_go_to_frames_of_their_own() -> None:
    found = frames(
        f"""
        DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 61
        DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{GPU}}} 4
        DCGM_FI_DEV_ROW_REMAP_FAILURE{{{GPU}}} 1
        DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L2{{{GPU}}} 9
        node_infiniband_port_data_received_bytes_total{{device="mlx5_0",port="1"}} 1.8527668e+07
        node_infiniband_port_transmit_wait_total{{device="mlx5_0",port="1"}} 4.294967295e+09
        node_infiniband_state_id{{device="mlx5_0",port="1"}} 4
        ipmi_temperature_celsius{{id="18",name="Inlet Temp"}} 24
        kube_pod_info{{pod="p",node="n1"}} 1
        """,
        node="n1",
    )
    assert found.gpu.select("gpu_temp_c").rows() == [(61,)]
    assert dict(found.health.schema) == schema("core_gpu_health")
    assert found.health.select("pcie_replay_total", "is_remap_failed", "is_remap_pending").rows() == [(4, True, None)]
    assert found.link.select("gpu_uuid", "link", "link_error_total").rows() == [("GPU-1", 2, 9)]
    columns = ("node", "device", "port", "rx_bytes_total", "transmit_wait_total", "is_link_up", "tx_bytes_total")
    assert found.port.select(columns).rows() == [("n1", "mlx5_0", "1", 18527668, 4294967295, True, None)]
    assert found.node.select("node", "inlet_temp_c").rows() == [("n1", 24)]


def test_lanes_are_links_and_sum_up_to_the_gpu() -> None:
    found = frames(
        "\n".join(
            [f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 61"]
            + [f"DCGM_FI_DEV_NVLINK_TX_BANDWIDTH_L{lane}{{{GPU}}} 1000" for lane in range(18)]
            + [f'DCGM_FI_PROF_NVLINK_RX_BYTES_PER_LINK{{gpu_uuid="GPU-1",hostname="n1",nvlink="{lane}"}} 2e9'
               for lane in range(18)]
        )
    )  # fmt: skip
    assert found.link["link"].to_list() == list(range(18))
    assert found.link["link_tx_bytes_per_s"].to_list() == [1_024_000_000.0] * 18
    assert found.gpu["nvlink_tx_bytes_per_s"].to_list() == pytest.approx([18 * 1_024_000_000])
    assert found.gpu["nvlink_rx_bytes_per_s"].to_list() == pytest.approx([18 * 2e9])


def test_errors_and_states_of_links() -> None:
    found = frames(f"""
        DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 61
        DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L0{{{GPU}}} 3
        DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_L0_TOTAL{{{GPU}}} 4
        DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L1{{{GPU}}} 5
        DCGM_FI_DEV_NVLINK_GET_STATE{{{GPU},nvlink="0"}} 1
        DCGM_FI_DEV_NVLINK_GET_STATE{{{GPU},nvlink="1"}} 0
    """)
    assert found.link.sort("link").select("link_error_total", "is_link_up").rows() == [(7, True), (5, False)]
    assert found.gpu["nvlink_error_total"].to_list() == [12]


def test_a_total_goes_before_the_sum_of_lanes() -> None:
    found = frames(f"""
        DCGM_FI_PROF_NVLINK_TX_BYTES{{{GPU}}} 4e11
        DCGM_FI_PROF_NVLINK_L0_TX_BYTES{{{GPU}}} 1e9
        DCGM_FI_PROF_NVLINK_L0_RX_BYTES{{{GPU}}} 1e9
    """)
    assert found.gpu.select("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s").rows() == [
        (pytest.approx(4e11), pytest.approx(1e9))
    ]


def test_three_disguises_of_nvlink_bandwidth() -> None:
    # A rate in "MB/s" that is typed counter: the numbers go up and down and are taken as they are.
    found = frames(*(f"DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{GPU}}} {v}" for v in (16721, 24531, 24493, 12129)))
    expected = [v * 512_000 for v in (16721, 24531, 24493, 12129)]
    assert found.gpu["nvlink_tx_bytes_per_s"].to_list() == pytest.approx(expected)
    # "Bytes" that are bytes a second.
    found = frames(*(f"DCGM_FI_PROF_NVLINK_TX_BYTES{{{GPU}}} {v}" for v in (3e11, 2e11)))
    assert found.gpu["nvlink_tx_bytes_per_s"].to_list() == pytest.approx([3e11, 2e11])
    # True counters of bytes, of the GPU and of a link.
    found = frames(*(
        f"""
        DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 61
        DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES{{{GPU}}} {5e12 + 15 * 3e11 * i}
        DCGM_FI_DEV_NVLINK_TX_BYTES_TOTAL{{gpu_uuid="GPU-1",hostname="n1",nvlink="3"}} {15 * 2e10 * i}
        """ for i in range(3)
    ))  # fmt: skip
    assert found.gpu["nvlink_tx_bytes_per_s"].to_list() == [None, pytest.approx(3e11), pytest.approx(3e11)]
    assert found.link["link_tx_bytes_per_s"].to_list() == pytest.approx([2e10, 2e10])
    # AMD counts KB of each link.
    found = frames(*(
        f"""
        gpu_gfx_activity{{gpu_uuid="u1",gpu_id="0",hostname="n1"}} 90
        gpu_xgmi_link_tx{{gpu_uuid="u1",gpu_id="0",hostname="n1",link_index="0"}} {1e6 * i}
        gpu_xgmi_link_tx{{gpu_uuid="u1",gpu_id="0",hostname="n1",link_index="1"}} {2e6 * i}
        """ for i in range(2)
    ))  # fmt: skip
    assert found.gpu["nvlink_tx_bytes_per_s"].to_list() == [None, pytest.approx(3e6 * 1024 / 15)]


def test_counters_are_remembered_from_read_to_read() -> None:
    index = Index()
    page = f"DCGM_FI_PROF_PCIE_TX_BYTES_TOTAL{{{GPU}}} "
    assert frames(page + "1e9", index=index).gpu.is_empty()
    second = frames(page + "4e9", index=index, first=1)
    assert second.gpu["pcie_tx_bytes_per_s"].to_list() == pytest.approx([2e8])
    # The same sample read once more, as the newest of every tick until the next comes, has the same rate.
    again = frames(page + "4e9", index=index, first=1)
    assert again.gpu["pcie_tx_bytes_per_s"].to_list() == pytest.approx([2e8])
    # An older window that is read once more leaves what is remembered as it is.
    frames(page + "1e9", index=index)
    third = frames(page + "7e9", index=index, first=2)
    assert third.gpu["pcie_tx_bytes_per_s"].to_list() == pytest.approx([2e8])


@pytest.mark.parametrize(
    ("values", "step_s", "rates"),
    [
        ([0, 10, 30], 10, [None, 1, 2]),
        ([50, 10, 20], 10, [None, None, 1]),  # reset
        ([0, 0, 60, 60, 90], 15, [None, None, 2, None, 1]),  # refreshed every other scrape
        ([5, 5, 5, 5, 5, 5], 20, [None, None, None, 0, 0, 0]),  # silent
        ([0, 100], 400, [None, None]),  # a gap
        ([0, 9223372036854775794, 20, float("nan"), 40], 10, [None, None, 1, None, 1]),
    ],
)  # fmt: skip
def test_rates_of_a_counter(values: list[float], step_s: int, rates: list[float | None]) -> None:
    times = [START_MS + 1000 * step_s * i for i in range(len(values))]
    assert differentiate(times, [float(v) for v in values], None)[0] == rates


def test_a_counter_that_was_seen_later_is_not_looked_back_on() -> None:
    later = Counter(100.0, START_MS + 60_000, START_MS + 60_000)
    assert differentiate([START_MS], [500.0], later)[0] == [None]


@given(
    st.lists(st.tuples(st.integers(0, 400_000), st.floats()), max_size=40),
    st.none() | st.builds(Counter, st.floats(0, 1e15), st.integers(0, 10**6), st.integers(0, 10**6)),
)
def test_rates_are_never_negative_or_endless(samples: list[tuple[int, float]], before: Counter | None) -> None:
    times = np.cumsum([step for step, _ in samples]).tolist() if samples else []
    rates, _ = differentiate(times, [value for _, value in samples], before)
    assert len(rates) == len(samples)
    assert all(rate is None or (rate >= 0 and np.isfinite(rate)) for rate in rates)


def test_clocks_of_one_name_are_told_apart_by_their_label() -> None:
    amd = 'gpu_uuid="u1",gpu_id="0",hostname="n1"'
    found = frames(f"""
        gpu_clock{{{amd},clock_type="GPU_CLOCK_TYPE_SYSTEM",clock_index="0"}} 2100
        gpu_clock{{{amd},clock_type="GPU_CLOCK_TYPE_SYSTEM",clock_index="1"}} 2099
        gpu_clock{{{amd},clock_type="GPU_CLOCK_TYPE_MEMORY",clock_index="0"}} 1300
        gpu_clock{{{amd},clock_type="GPU_CLOCK_TYPE_VIDEO",clock_index="0"}} 33
        gpu_junction_temperature{{{amd}}} 65535
        gpu_edge_temperature{{{amd}}} 48
    """)
    # A temperature that is "not available" (all ones) makes way for the other.
    assert found.gpu.select("sm_clock_hz", "mem_clock_hz", "gpu_temp_c").rows() == [(2.1e9, 1.3e9, 48)]


def test_a_table_of_the_user_is_what_an_index_reads_by() -> None:
    table = metrics.DEFAULT.overridden({"acme_temp": {"column": "gpu_temp_c"}, "DCGM_FI_DEV_GPU_TEMP": {"column": ""}})
    text = f"acme_temp{{{GPU}}} 50\nDCGM_FI_DEV_GPU_TEMP{{{GPU}}} 61"
    assert frames(text, index=Index(table)).gpu["gpu_temp_c"].to_list() == [50]
    assert frames(text).gpu["gpu_temp_c"].to_list() == [61]


def test_no_samples_are_empty_frames_with_their_columns() -> None:
    found = frames("")
    for frame, table in (
        (found.health, "core_gpu_health"),
        (found.link, "core_link_samples"),
        (found.port, "raw_port_samples"),
        (found.node, "core_node_samples"),
    ):
        assert frame.is_empty()
        assert dict(frame.schema) == schema(table)


def test_every_known_name_makes_a_row_of_its_entity() -> None:
    labels = {
        "gpu": f"{{{GPU}}}", "health": f"{{{GPU}}}", "xid": f'{{{GPU},xid="79"}}', "job": f'{{{GPU},jobid="7"}}',
        "link": '{gpu_uuid="GPU-1",hostname="n1",nvlink="0",link_index="0"}',
        "port": '{device="m",port="1",interface="m:1",device_class="infiniband",instance="n1"}', "node": '{node="n1"}',
    }  # fmt: skip
    index = Index()
    for entity, names in metrics.DEFAULT.names.items():
        for name in names:
            rows = [row for row in metrics.BY_NAME[name] if row.entity == entity]
            if any(row.where for row in rows):
                continue
            page = parse_page(f"{name}{labels[entity]} 1\n", index, "")
            assert index.names.variants[page.names[0]].entity == entity, name


def test_times_of_rows_are_utc() -> None:
    found = frames(f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 61")
    assert found.gpu["ts"].to_list() == [datetime(2026, 1, 1, tzinfo=UTC)]
    assert isinstance(found.gpu, pl.DataFrame)


@pytest.mark.services("prometheus", "promtool")
def test_everything_comes_out_of_a_real_prometheus(tmp_path: Path) -> None:
    at = [START_MS // 1000 + 15 * i for i in range(4)]
    gpu = f'{GPU},job="dcgm",instance="n1:9400"'
    mig = f'{gpu},GPU_I_ID="2",GPU_I_PROFILE="1g.10gb"'
    net = 'device="mlx5_0",port="1",job="node",instance="n1:9100"'
    series = {
        f"DCGM_FI_DEV_GPU_TEMP{{{gpu}}}": [60, 61, 62, 63],
        f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{mig}}}": [0.5, 0.5, 0.5, 0.5],
        f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{gpu}}}": [1000, 2000, 3000, 4000],
        f"DCGM_FI_DEV_NVLINK_TX_BANDWIDTH_L0{{{gpu}}}": [100, 200, 300, 400],
        f"DCGM_FI_DEV_NVLINK_TX_BANDWIDTH_L17{{{gpu}}}": [100, 200, 300, 400],
        f"DCGM_FI_PROF_PCIE_RX_BYTES_TOTAL{{{gpu}}}": [0, 3e9, 6e9, 9e9],
        f"node_infiniband_port_data_received_bytes_total{{{net}}}": [1, 2, 3, 4],
        f'infiniband_portxmitdata_total{{component="ca",local_name="n1 mlx5_0",{_FABRIC}}}': [
            1,
            2,
            3,
            4,
        ],
        f"acme_inlet{{{net}}}": [240, 241, 242, 243],
    }
    text = "".join(
        f"# TYPE {name.partition('{')[0]} unknown\n"
        + "".join(f"{name} {value} {moment}\n" for value, moment in zip(values, at, strict=True))
        for name, values in series.items()
    )
    table = metrics.DEFAULT.overridden({"acme_inlet": {"column": "inlet_temp_c", "scale": 0.1}})
    server = Prometheus(tmp_path, history=text)
    source = PrometheusSource("a", server.url, table=table)
    try:
        whole = source.fetch(*(datetime.fromtimestamp(moment, UTC) for moment in (at[0], at[3] + 1)))
        later = source.fetch(*(datetime.fromtimestamp(moment, UTC) for moment in (at[2], at[3] + 1)))
    finally:
        source.close()
        server.stop()
    assert whole.warnings == []
    gpus = whole.gpu.filter(pl.col("mig_instance").is_null()).sort("ts")
    assert gpus["gpu_temp_c"].to_list() == [60, 61, 62, 63]
    assert gpus["nvlink_tx_bytes_per_s"].to_list() == pytest.approx([2 * v * 1_024_000 for v in (100, 200, 300, 400)])
    assert gpus["pcie_rx_bytes_per_s"].to_list() == [None, *[pytest.approx(2e8)] * 3]
    # A part that is read once more, as every window's overlap is, has the same rates, and nothing from before it.
    again = later.gpu.filter(pl.col("mig_instance").is_null()).sort("ts")
    assert again.select("gpu_temp_c", "pcie_rx_bytes_per_s").rows() == [
        (62, pytest.approx(2e8)),
        (63, pytest.approx(2e8)),
    ]
    assert later.port.height == later.health.height == later.node.height == 2
    assert whole.gpu.filter(mig_instance="2")["mig_profile"].to_list() == ["1g.10gb"] * 4
    assert whole.health["energy_total_j"].sort().to_list() == [1, 2, 3, 4]
    assert set(whole.link["link"]) == {0, 17}
    port = whole.port.sort("ts").select("node", "device", "port", "rx_bytes_total", "tx_bytes_total")
    assert port.rows() == [("n1", "mlx5_0", "1", v, 4 * v) for v in (1, 2, 3, 4)]
    assert whole.node.sort("ts")["inlet_temp_c"].to_list() == pytest.approx([24, 24.1, 24.2, 24.3])

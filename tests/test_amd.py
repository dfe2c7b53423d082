"""AMD's exporters: what they tell reaches the columns that NVIDIA's feed, and what is not there reaches none."""

from __future__ import annotations

import pytest

from features import metrics
from features.classes import HINT_CLASSES
from features.identity import board_facts
from pipelines.sources.metric_findings import metrics_findings
from tests.test_cases_gpu import Read, over_time, read

_GPU = 'gpu_id="0",serial_number="692251001124",hostname="n1"'
_CARD = 'card="0",instance="n1:8001"'


def exporter(**values: float) -> Read:
    """A page of device-metrics-exporter, with its optional prefix for every other metric."""
    lines = [f"{'amd_' if i % 2 else ''}{name}{{{_GPU}}} {value}" for i, (name, value) in enumerate(values.items())]
    return read("\n".join(lines))


def omnistat(**values: float) -> Read:
    return read("\n".join(f"rocm_{name}{{{_CARD}}} {value}" for name, value in values.items()))


@pytest.mark.parametrize(
    ("metric", "value", "column", "expected"),
    [
        ("gpu_violation_socket_thermal_residency_percentage", 12, "is_thermal_slowdown", True),
        ("gpu_violation_processor_hot_residency_percentage", 0, "is_thermal_slowdown", False),
        ("gpu_violation_hbm_thermal_residency_percentage", 4294967295, "is_thermal_slowdown", None),
        ("gpu_violation_vr_thermal_residency_percentage", 65535, "is_thermal_slowdown", None),
        ("gpu_violation_gfx_clock_below_host_limit_thermal_percentage", 1, "is_thermal_slowdown", True),
        ("gpu_violation_ppt_residency_percentage", 40, "is_power_capped", True),
        ("gpu_violation_ppt_residency_percentage", 18446744073709551615, "is_power_capped", None),
        ("gpu_violation_gfx_clock_below_host_limit_power_percentage", 0, "is_power_capped", False),
        ("gpu_ecc_uncorrect_umc", 3, "ecc_uncorrected_total", 3),
        ("gpu_ecc_uncorrect_bif", 3, "ecc_uncorrected_total", 3),
        ("gpu_ecc_uncorrect_xgmi_wafl", 3, "nvlink_error_total", 3),
        ("gpu_ecc_correct_xgmi_wafl", 7, "nvlink_error_total", 7),
        ("gpu_prof_sm_active", 50, "sm_active_ratio", 0.5),
        ("gpu_prof_tensor_active_percent", 25, "tensor_active_ratio", 0.25),
        ("gpu_prof_gui_util_percent", 75, "engine_active_ratio", 0.75),
    ],
)
def test_device_metrics_exporter(metric: str, value: float, column: str, expected: object) -> None:
    got = exporter(gpu_junction_temperature=60, **{metric: value}).row()
    assert (got["gpu_temp_c"], got[column]) == (60, expected)


def test_one_limit_of_several_is_enough_and_one_that_is_not_there_takes_nothing_away() -> None:
    got = exporter(
        gpu_violation_processor_hot_residency_percentage=0, gpu_violation_socket_thermal_residency_percentage=9,
        gpu_violation_vr_thermal_residency_percentage=4294967295, gpu_violation_ppt_residency_percentage=0,
    ).row()  # fmt: skip
    assert (got["is_thermal_slowdown"], got["is_power_capped"], got["is_power_brake"]) == (True, False, None)


def test_errors_of_blocks_count_where_there_is_no_total() -> None:
    got = exporter(gpu_ecc_uncorrect_umc=3, gpu_ecc_uncorrect_vcn=1, gpu_ecc_correct_umc=5, gpu_ecc_correct_gfx=2)
    assert got.row()["ecc_uncorrected_total"] == 4
    assert got.health["ecc_corrected_total"].to_list() == [7]
    got = exporter(gpu_ecc_uncorrect_umc=3, gpu_ecc_uncorrect_total=9, gpu_ecc_correct_total=8, gpu_ecc_correct_umc=1)
    assert got.row()["ecc_uncorrected_total"] == 9
    assert got.health["ecc_corrected_total"].to_list() == [8]
    spoilt = exporter(gpu_ecc_uncorrect_umc=3, gpu_ecc_uncorrect_vcn=2147483634)
    assert spoilt.row()["ecc_uncorrected_total"] is None


def test_traffic_over_pcie_from_bytes_else_from_the_bandwidth() -> None:
    text = over_time(_GPU, pcie_tx=[0, 15e9, 30e9], pcie_bandwidth=[16_000] * 3, gpu_power_usage=[500] * 3)
    assert read(text).gpu["pcie_tx_bytes_per_s"].to_list() == [1e9, 1e9, 1e9]
    assert read(text).gpu["pcie_rx_bytes_per_s"].to_list() == [1e9] * 3
    slow = over_time(_GPU, pcie_tx=[0, 15e8, 30e8], gpu_power_usage=[500] * 3)
    assert read(slow).gpu["pcie_tx_bytes_per_s"].to_list() == [None, 1e8, 1e8]


def test_omnistat_memory_and_links() -> None:
    got = omnistat(
        vram_total_bytes=200e9, vram_used_percentage=25, ras_vcn_uncorrectable_count=3, ras_umc_uncorrectable_count=1,
        ras_xgmi_wafl_uncorrectable_count=2, ras_xgmi_wafl_correctable_count=40, ras_gfx_correctable_count=6,
        average_decoder_utilization_percentage=50,
    )  # fmt: skip
    row = got.row()
    assert row["fb_used_bytes"] == pytest.approx(50e9)
    assert row["fb_total_bytes"] == pytest.approx(200e9)
    assert (row["ecc_uncorrected_total"], row["nvlink_error_total"]) == (6, 42)
    assert got.health.select("ecc_corrected_total", "decoder_util_ratio").rows() == [(6, 0.5)]
    assert omnistat(vram_total_bytes=200e9, vram_used_percentage=-5).row()["fb_used_bytes"] is None
    assert omnistat(vram_used_percentage=25, utilization_percentage=5).row()["fb_used_bytes"] is None


def test_omnistat_tells_the_board() -> None:
    labels = {"card": "0", "driver_ver": "6.10.5", "vbios": "113-D67301-063", "type": "AMD Instinct MI250X",
              "serial": "692"}  # fmt: skip
    assert board_facts(labels) == (None, "AMD Instinct MI250X", "6.10.5", "113-D67301-063", "692")
    assert board_facts({"card": "0", "type": "production"})[1] is None


def part(number: int, kind: str, util: float, used: float = 0) -> str:
    labels = f'{_GPU},gpu_partition_id="{number}",gpu_compute_partition_type="{kind}"'
    return f"gpu_gfx_activity{{{labels}}} {util}\ngpu_used_vram{{{labels}}} {used}\n"


def test_a_partition_that_is_missing_leaves_the_whole_unknown() -> None:
    both = read(part(0, "dpx", 90, 1000) + part(1, "dpx", 10, 500)).row()
    assert (both["gpu_util_ratio"], both["fb_used_bytes"]) == (pytest.approx(0.5), pytest.approx(1500 * 2**20))
    got = read(part(0, "dpx", 90, 1000))
    assert (got.row()["gpu_util_ratio"], got.row()["fb_used_bytes"]) == (None, None)
    assert got.findings["gpu_util_ratio", "partition_missing"] == 1
    # Of cpx there are as many as dies: 6 at least, 8 where a number says so.
    six = "".join(part(i, "cpx", 60) for i in range(6))
    assert read(six).row()["gpu_util_ratio"] == pytest.approx(0.6)
    assert read(six + part(7, "cpx", 60)).row()["gpu_util_ratio"] is None
    assert read(six + part(6, "cpx", 60) + part(7, "cpx", 60)).row()["gpu_util_ratio"] == pytest.approx(0.6)
    # What the whole GPU tells by itself stays.
    whole = f"gpu_used_vram{{{_GPU}}} 4000\n"
    assert read(part(0, "qpx", 90, 1000) + whole).row()["fb_used_bytes"] == pytest.approx(4000 * 2**20)


def said(*names: str) -> dict[str, str]:
    found = metrics_findings(dict.fromkeys(names, 8), metrics.DEFAULT)
    return {name: text for name, is_well, text in found if not is_well}


def test_advice_names_metrics_of_the_exporter_that_is_there() -> None:
    smi = said("nvidia_smi_utilization_gpu_ratio", "nvidia_smi_temperature_gpu")
    assert "DCGM" not in smi["memory_exhaustion"] + smi["thermal_throttle"]
    assert smi["memory_exhaustion"] == (
        "not foreseen: fb_used_bytes is missing: enable nvidia_smi_memory_used_bytes in nvidia_gpu_exporter"
    )
    assert "nvidia_gpu_exporter cannot tell it; DCGM_FI_" in smi["nvlink_saturation"]
    amd = said("gpu_gfx_activity", "gpu_xgmi_link_tx", "gpu_junction_temperature")
    others = {"host_memory", "fabric_congestion", "straggler"}
    assert amd.keys() == {"thermal_throttle", "power_throttle", "memory_exhaustion"} | others, "links are summed up"
    assert "enable gpu_used_vram in device-metrics-exporter" in amd["memory_exhaustion"]
    assert "gpu_violation_" in amd["thermal_throttle"]
    both = said("gpu_gfx_activity", "DCGM_FI_DEV_GPU_UTIL")["memory_exhaustion"]
    assert "DCGM_FI_DEV_FB_USED in dcgm-exporter or gpu_used_vram in device-metrics-exporter" in both
    assert said("up") == {"metrics": said("up")["metrics"]}


def test_every_class_says_what_it_lacks_and_one_way_to_it_suffices() -> None:
    bare = said("DCGM_FI_DEV_GPU_UTIL")
    assert bare.keys() == set(HINT_CLASSES) - {"shortage"}, "shortage is foreseen from the queue"
    assert "DCGM_FI_DEV_GPU_UTIL" not in "".join(bare.values())
    assert "node_memory_MemAvailable_bytes of node_exporter can" in bare["host_memory"]
    assert "weatherglass_own_step_time_seconds of weatherglass can" in bare["straggler"]
    found = list(metrics_findings(dict.fromkeys(["DCGM_FI_DEV_GPU_UTIL"], 8), metrics.DEFAULT))
    assert {is_well for name, is_well, _ in found if name in HINT_CLASSES} == {None}, "warnings: the rest works"
    gpu = "DCGM_FI_DEV_GPU_UTIL"
    assert "fabric_congestion" not in said(gpu, "node_infiniband_np_cnp_packets_sent_total")
    assert "fabric_congestion" in said(gpu, "node_infiniband_port_data_transmitted_bytes_total"), "no speed, no load"
    assert "host_memory" not in said(gpu, "node_vmstat_oom_kill")
    assert "straggler" not in said(gpu, "weatherglass_step_time_seconds")

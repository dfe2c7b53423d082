"""Exporter names, scales, bit masks and labels → registry columns."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from features import metrics
from features.exporters.metric import ENTITIES, KINDS
from features.metric_listing import select
from features.vocabulary import COLUMNS, schema
from pipelines.commands import CommandError
from pipelines.settings import Cluster, SettingsError, parse_settings
from pipelines.sources import build_telemetry
from weatherglass import cli


def columns_of(entity: str = "gpu", **values: float | None) -> dict[str, object]:
    frame = pl.DataFrame({name: [value] for name, value in values.items()}, schema=dict.fromkeys(values, pl.Float64))
    return metrics.to_columns(frame, entity).row(0, named=True)  # ty: ignore[invalid-argument-type]


def test_every_metric_feeds_a_column_of_its_table() -> None:
    for metric in metrics.METRICS:
        if metric.column and metric.entity == "queue":
            assert metric.column in schema("core_queue_samples"), metric
        elif metric.column:
            assert metric.column in metrics.ENTITY_COLUMNS[metric.entity], metric
            assert metric.column.startswith("_") or metric.column in COLUMNS
        else:
            assert metric.meaning, metric
        assert metric.entity in ENTITIES
        assert metric.kind in KINDS
        assert metric.exporter, metric
        assert "*" not in metric.name or not metric.is_fed, metric
    fed = {metric.column for metric in metrics.METRICS} | {"is_up"}
    for entity, columns in metrics.ENTITY_COLUMNS.items():
        assert set(columns) <= fed, (entity, set(columns) - fed)


def test_flags_and_parts_are_used_where_they_mean_something() -> None:
    for metric in metrics.METRICS:
        if metric.mask or metric.equals is not None:
            assert metrics.is_flag(metric.column), metric
    for by_label in metrics.DEFAULT.by_label.values():
        for label, variant in by_label.items():
            columns = [row.column for row in variant.rows]
            assert len(columns) == len(set(columns)), label


def test_one_series_is_of_one_entity() -> None:
    pairs = [(m.exporter, m.name, m.column, m.where, m.entity) for m in metrics.METRICS]
    assert len(pairs) == len(set(pairs))
    for name, (_, variants) in metrics.DEFAULT.variants.items():
        kinds = {(v.entity, v.rows[0].where) for v in variants}
        assert len(kinds) == len(variants), name
        # Without labels to tell them apart only a link, which must have its number, may share a name with a GPU.
        plain = {v.entity for v in variants if not v.rows[0].where}
        assert len(plain) < 2 or plain == {"gpu", "link"}, name


@pytest.mark.parametrize(
    ("name", "value", "column", "expected"),
    [
        ("DCGM_FI_DEV_GPU_UTIL", 87, "gpu_util_ratio", 0.87),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", 87, "gpu_util_ratio", 0.87),  # renamed, still in percent
        ("dcgm_gpu_utilization", 87, "gpu_util_ratio", 0.87),
        ("nvidia_smi_utilization_gpu_ratio", 0.87, "gpu_util_ratio", 0.87),
        ("nvidia_gpu_duty_cycle", 87, "gpu_util_ratio", 0.87),
        ("gpu_gfx_activity", 87, "gpu_util_ratio", 0.87),
        ("amd_gpu_gfx_activity", 87, "gpu_util_ratio", 0.87),
        ("DCGM_FI_PROF_SM_UTIL_RATIO", 0.5, "sm_active_ratio", 0.5),
        ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", 0.5, "tensor_active_ratio", 0.5),
        ("DCGM_FI_DEV_FB_USED", 81920, "fb_used_bytes", 85899345920),
        ("dcgm_fb_used", 81920, "fb_used_bytes", 85899345920),
        ("DCGM_FI_DEV_SM_CLOCK", 1980, "sm_clock_hz", 1.98e9),
        ("DCGM_FI_DEV_BOARD_POWER_WATTS", 691.5, "gpu_power_w", 691.5),
        ("nvidia_gpu_power_usage_milliwatts", 691500, "gpu_power_w", 691.5),
        ("DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS", 700, "power_limit_w", 700),
        ("DCGM_FI_DEV_GPU_TEMP_LIMIT", 46, "gpu_temp_margin_c", 46),
        ("DCGM_FI_DEV_GPU_TEMP_MARGIN_CELSIUS", -3, "gpu_temp_margin_c", -3),
        ("DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", 70, "mem_temp_c", 70),
        ("DCGM_FI_PROF_NVLINK_TX_BYTES", 4e11, "nvlink_tx_bytes_per_s", 4e11),
        ("DCGM_FI_PROF_PCIE_RX_BYTES", 5e10, "pcie_rx_bytes_per_s", 5e10),
        ("DCGM_FI_DEV_XID_ERROR", 79, "xid_last", 79),
        ("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", 3, "remapped_rows_total", 3),
        ("weatherglass_step_time_seconds", 1.25, "step_time_s", 1.25),
    ],
)  # fmt: skip
def test_units_of_old_new_and_foreign_names(name: str, value: float, column: str, expected: float) -> None:
    assert columns_of(**{name: value})[column] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("entity", "name", "value", "column", "expected"),
    [
        ("health", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 126272101025, "energy_total_j", 126272101.025),
        ("health", "gpu_energy_consumed", 5e6, "energy_total_j", 5),
        ("health", "amd_gpu_energy_consumed", 5e6, "energy_total_j", 5),
        ("health", "nvidia_smi_energy_joules_total", 5, "energy_total_j", 5),
        ("health", "rocm_energy_joules", 5, "energy_total_j", 5),
        # the help text once said microseconds
        ("health", "DCGM_FI_DEV_THERMAL_VIOLATION", 3e9, "thermal_violation_s_total", 3),
        ("health", "DCGM_FI_DEV_POWER_VIOLATION", 3e9, "power_violation_s_total", 3),
        ("health", "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS", 3e9, "power_violation_s_total", 3),
        ("health", "DCGM_FI_DEV_MEM_COPY_UTIL", 40, "mem_copy_util_ratio", 0.4),
        ("health", "DCGM_FI_PROF_PIPE_FP16_ACTIVE", 0.25, "fp16_active_ratio", 0.25),
        ("health", "DCGM_FI_PROF_FP16_UTIL_RATIO", 0.25, "fp16_active_ratio", 0.25),
        ("health", "DCGM_FI_DEV_PCIE_REPLAY_TOTAL", 7, "pcie_replay_total", 7),
        ("health", "DCGM_FI_DEV_ROW_REMAP_FAILED", 1, "is_remap_failed", True),
        ("health", "DCGM_FI_DEV_ROW_REMAP_FAILURE", 0, "is_remap_failed", False),
        ("health", "DCGM_FI_DEV_ROW_REMAP_FAILURE", 9223372036854775794, "is_remap_failed", None),
        ("xid", "DCGM_EXP_XID_ERRORS_COUNT", 2, "xid_events", 2),
        ("xid", "nvidia_smi_xid_errors_total", 2, "_xid_total", 2),
        ("gpu", "nvidia_smi_clocks_event_reasons_hw_slowdown", 1, "is_power_brake", True),
        ("gpu", "nvidia_smi_clocks_throttle_reasons_hw_slowdown", 0, "is_power_brake", False),
        ("health", "dcgm_row_remap_failure", 1, "is_remap_failed", True),
        ("gpu", "rocm_ras_vcn_uncorrectable_count", 3, "ecc_uncorrected_total", 3),
        ("health", "nvidia_smi_gpu_recovery_action", 2, "recovery_action", 2),
        ("gpu", "pcie_bandwidth", 16_000, "pcie_tx_bytes_per_s", 1e9),
        ("gpu", "gpu_clock", 2100, "sm_clock_hz", 2.1e9),
        ("gpu", "gpu_edge_temperature", 61, "gpu_temp_c", 61),
        ("gpu", "nvidia_smi_clocks_event_reasons_hw_thermal_slowdown", 1, "is_thermal_slowdown", True),
        ("gpu", "nvidia_smi_clocks_event_reasons_sw_power_cap", 0, "is_power_capped", False),
        ("gpu", "DCGM_FI_DEV_NVLINK_TX_THROUGHPUT_TOTAL", 400_000, "nvlink_tx_bytes_per_s", 409.6e9),
        ("link", "DCGM_FI_PROF_NVLINK_L#_TX_BYTES", 2.5e10, "link_tx_bytes_per_s", 2.5e10),
        ("link", "DCGM_FI_DEV_NVLINK_BANDWIDTH_L#", 50_000, "link_rx_bytes_per_s", 25.6e9),
        ("port", "infiniband_portxmitdata_total", 1000, "tx_bytes_total", 4000),
        ("port", "node_infiniband_port_data_transmitted_bytes_total", 1000, "tx_bytes_total", 1000),
        ("port", "node_infiniband_state_id", 4, "is_link_up", True),
        ("port", "node_infiniband_state_id", 1, "is_link_up", False),
        ("port", "node_infiniband_physical_state_id", 5, "is_link_up", True),
        ("port", "node_infiniband_rate_bytes_per_second", 5e10, "speed_bytes_per_s", 5e10),
        ("node", "idrac_power_control_consumed_watts", 6100, "node_power_w", 6100),
    ],
)  # fmt: skip
def test_units_of_health_links_and_ports(
    entity: str, name: str, value: float, column: str, expected: float | bool | None
) -> None:
    got = columns_of(entity, **{name: value})[column]
    assert got == (expected if isinstance(expected, bool | None) else pytest.approx(expected, rel=1e-6))


def test_parts_of_ports_and_pages_are_summed() -> None:
    row = columns_of(
        "port",
        node_infiniband_symbol_error_total=3.0,
        node_infiniband_port_errors_received_total=2.0,
        node_infiniband_port_discards_received_total=None,
        node_infiniband_np_cnp_packets_sent_total=10.0,
        node_infiniband_rp_cnp_packets_handled_total=5.0,
        node_infiniband_packet_sequence_errors_total=None,
    )
    assert (row["port_errors_total"], row["cnp_total"], row["retransmits_total"]) == (5, 15, None)
    pages = {"DCGM_FI_DEV_RETIRED_SBE": 2.0, "DCGM_FI_DEV_PAGE_RETIRED_SBE_TOTAL": 2.0, "DCGM_FI_DEV_RETIRED_DBE": 1.0}
    assert columns_of("health", **pages)["retired_pages_total"] == 3
    ras = {"rocm_ras_umc_uncorrectable_count": 1.0, "rocm_ras_gfx_uncorrectable_count": 2.0}
    assert columns_of(**ras)["ecc_uncorrected_total"] == 3


def test_a_whole_counter_goes_before_the_sum_of_its_reasons() -> None:
    reasons = {
        "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS": 1e9,
        "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": 2e9,
    }
    assert columns_of("health", **reasons)["thermal_violation_s_total"] == 3
    assert columns_of("health", DCGM_FI_DEV_THERMAL_VIOLATION=5e9, **reasons)["thermal_violation_s_total"] == 5


def test_slinky_names_lie_about_units() -> None:
    rows = {m.name: m for m in metrics.METRICS if "Slinky" in m.exporter}
    assert 515_000 * rows["slurm_node_memory_bytes"].scale == 515_000 * 2**20
    assert 250_000 * rows["slurm_scheduler_cycle_last_seconds"].scale == pytest.approx(0.25)


def test_node_metrics() -> None:
    row = columns_of("node", ipmi_temperature_celsius=24.5, ipmi_dcmi_power_consumption_current_watts=6200.0)
    assert row == {"inlet_temp_c": 24.5, "node_power_w": 6200.0}


@pytest.mark.parametrize(
    ("bits", "thermal", "brake", "capped"),
    [
        (0, False, False, False),
        (0x1, False, False, False),  # idle
        (0x4, False, False, True),
        (0x8, False, True, False),  # a hardware slowdown without heat is one for power
        (0x8 | 0x20, True, True, False),  # and heat that software sees does not explain it
        (0x8 | 0x40 | 0x80, True, True, False),
        (0x20, True, False, False),
        (0x48, True, False, False),
        (0x80, False, True, False),
        (0x4 | 0x20 | 0x80, True, True, True),
        (9223372036854775794, None, None, None),  # every bit of the sentinel would read as a throttle
        (2147483632, None, None, None),
        (float("nan"), None, None, None),
        (-1, None, None, None),
    ],
)  # fmt: skip
def test_throttle_bits(bits: float, thermal: bool | None, brake: bool | None, capped: bool | None) -> None:
    for name in ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"):
        row = columns_of(**{name: float(bits)})
        assert (row["is_thermal_slowdown"], row["is_power_brake"], row["is_power_capped"]) == (thermal, brake, capped)


def test_nvlink_total_is_a_fallback_of_both_directions() -> None:
    total = {"DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 879_000.0}
    row = columns_of(**total)
    assert row["nvlink_tx_bytes_per_s"] == row["nvlink_rx_bytes_per_s"] == pytest.approx(879_000 * 1_024_000 / 2)
    row = columns_of(**total, DCGM_FI_PROF_NVLINK_TX_BYTES=4.0e11)
    assert row["nvlink_tx_bytes_per_s"] == pytest.approx(4.0e11)
    assert row["nvlink_rx_bytes_per_s"] == pytest.approx(879_000 * 512_000)


def test_rank_passes_over_what_is_not_there() -> None:
    row = columns_of(DCGM_FI_DEV_POWER_USAGE=2.0**47, DCGM_FI_DEV_POWER_USAGE_INSTANT=400.0)
    assert row["gpu_power_w"] == 400
    row = columns_of(DCGM_FI_DEV_POWER_USAGE=2.0**47, DCGM_FI_DEV_POWER_USAGE_INSTANT=None)
    assert row["gpu_power_w"] == 2.0**47  # as received: cleaning counts it
    for garbage in (644245923.0, 0.0, -1.0, float("nan"), float("inf"), 4294967295.0):
        row = columns_of(DCGM_FI_DEV_POWER_USAGE=garbage, DCGM_FI_DEV_POWER_USAGE_INSTANT=300.0)
        assert row["gpu_power_w"] == 300, garbage
    row = columns_of(DCGM_FI_DEV_POWER_USAGE=644245923.0, DCGM_FI_DEV_POWER_USAGE_INSTANT=82505.0)
    assert row["gpu_power_w"] == pytest.approx(644245923)
    assert columns_of(gpu_junction_temperature=345.0, gpu_edge_temperature=61.0)["gpu_temp_c"] == 61


def test_nvlink_errors_are_summed_over_kinds_not_over_spellings() -> None:
    row = columns_of(
        DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL=3.0,
        DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL=3.0,
        DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL=2.0,
        DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL=None,
    )
    assert row["nvlink_error_total"] == 5
    assert columns_of(DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL=None)["nvlink_error_total"] is None


def test_a_sum_that_lacks_a_part_is_none() -> None:
    rest = {"DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 3.0}
    for garbage in (9223372036854775794.0, 2147483634.0):
        row = columns_of(**rest, DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL=garbage)
        assert row["nvlink_error_total"] == pytest.approx(garbage)  # as received: cleaning counts it
    row = columns_of("health", DCGM_FI_DEV_RETIRED_SBE=2147483634.0, DCGM_FI_DEV_RETIRED_DBE=1.0)
    assert row["retired_pages_total"] == 2147483634
    # Another spelling of the part has it, and a sum of another rank is whole.
    spellings = {"DCGM_FI_DEV_RETIRED_SBE": 2147483634.0, "DCGM_FI_DEV_PAGE_RETIRED_SBE_TOTAL": 2.0}
    assert columns_of("health", **spellings, DCGM_FI_DEV_RETIRED_DBE=1.0)["retired_pages_total"] == 3
    name = "DCGM_FI_DEV_CLOCKS_EVENT_REASON_{}_THERM_SLOWDOWN_NS".format
    parts = {name("SW"): 1e9, name("HW"): 9223372036854775794.0}
    assert columns_of("health", **parts, DCGM_FI_DEV_THERMAL_VIOLATION=5e9)["thermal_violation_s_total"] == 5


@pytest.mark.parametrize(
    ("entity", "values", "unknown"),
    [
        ("health", {"DCGM_FI_DEV_ROW_REMAP_FAILURE": 2147483634.0}, "is_remap_failed"),
        ("health", {"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1.0}, None),
        ("health", {"DCGM_FI_DEV_ROW_REMAP_FAILURE": None}, None),
        ("health", {"DCGM_FI_DEV_ROW_REMAP_FAILURE": 2147483634.0, "nvidia_smi_remapped_rows_failure": 0.0}, None),
        ("gpu", {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 9223372036854775794.0},
         "is_thermal_slowdown,is_power_brake,is_power_capped"),
        ("gpu", {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": -1.0}, "is_thermal_slowdown,is_power_brake,is_power_capped"),
        ("gpu", {"nvidia_smi_clocks_event_reasons_sw_power_cap": float("nan")}, "is_power_capped"),
        ("gpu", {"nvidia_smi_clocks_event_reasons_hw_slowdown": 2147483634.0}, "is_power_brake"),
        ("gpu", {"nvidia_smi_clocks_event_reasons_hw_slowdown": 2147483634.0,
                 "nvidia_smi_clocks_event_reasons_hw_power_brake_slowdown": 0.0}, None),
        ("link", {"DCGM_FI_DEV_NVLINK_GET_STATE": 2147483634.0}, "is_link_up"),
    ],
)  # fmt: skip
def test_flags_that_are_not_there_are_named(entity: str, values: dict[str, float | None], unknown: str | None) -> None:
    row = columns_of(entity, **values)
    assert row.get("unknown_flags") == unknown
    for name in (unknown or "").split(","):
        assert row.get(name) is None


def test_total_memory_is_used_free_and_reserved() -> None:
    row = columns_of(DCGM_FI_DEV_FB_USED=70_000.0, DCGM_FI_DEV_FB_FREE=10_000.0, DCGM_FI_DEV_FB_RESERVED=1_559.0)
    assert row["fb_total_bytes"] == pytest.approx(81_559 * 2**20)
    assert "_fb_free_bytes" not in row
    for garbage in (2147483634.0, 9223372036854775794.0, 2.0**47, 0.0, float("nan")):
        whole = {"DCGM_FI_DEV_FB_USED": 70_000.0, "DCGM_FI_DEV_FB_FREE": 10_000.0}
        row = columns_of(**whole, DCGM_FI_DEV_FB_TOTAL=garbage, DCGM_FI_DEV_FB_RESERVED=1_559.0)
        assert row["fb_total_bytes"] == pytest.approx(81_559 * 2**20), garbage
        row = columns_of(**whole, DCGM_FI_DEV_FB_RESERVED=garbage)
        assert row["fb_total_bytes"] == pytest.approx(80_000 * 2**20), garbage
    row = columns_of(DCGM_FI_DEV_FB_USED=2147483634.0, DCGM_FI_DEV_FB_FREE=10_000.0)
    assert row["fb_total_bytes"] is None
    row = columns_of(DCGM_FI_DEV_FB_USED=None, DCGM_FI_DEV_FB_FREE=10_000.0, DCGM_FI_DEV_FB_TOTAL=2147483634.0)
    assert row["fb_total_bytes"] == pytest.approx(2147483634 * 2**20)  # as received: cleaning counts it
    row = columns_of(DCGM_FI_DEV_FB_USED=70_000.0, DCGM_FI_DEV_FB_FREE=10_000.0)
    assert row["fb_total_bytes"] == pytest.approx(80_000 * 2**20)
    row = columns_of(DCGM_FI_DEV_FB_USED=70_000.0, DCGM_FI_DEV_FB_FREE=None)
    assert row["fb_total_bytes"] is None


def test_xid_sentinels_fit_their_column() -> None:
    assert columns_of(DCGM_FI_DEV_XID_ERRORS=9223372036854776000.0)["xid_last"] == 2147483632
    assert columns_of(DCGM_FI_DEV_XID_ERRORS=float("nan"))["xid_last"] is None


DCGM = metrics.BY_NAME["DCGM_FI_DEV_GPU_TEMP"][0]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"UUID": "GPU-1", "gpu": "3", "Hostname": "n1", "hpc_job": "77"}, ("n1", "GPU-1", 3, "77")),
        ({"UUID": "GPU-1", "gpu": "3", "hostname": "n1.example.org"}, ("n1", "GPU-1", 3, "")),
        ({"uuid": "GPU-1", "gpu": "3", "instance": "n1:9400"}, ("n1", "GPU-1", 3, "")),
        ({"gpu_uuid": "GPU-1", "gpu": "3", "instance": "10.0.0.7:9400"}, ("10.0.0.7", "GPU-1", 3, "")),
        ({"gpu_uuid": "GPU-1", "instance": "[fd00::7]:9400"}, ("fd00::7", "GPU-1", None, "")),
        ({"UUID": "GPU-1", "node": "n9", "Hostname": "n1"}, ("n9", "GPU-1", None, "")),
        # the exporter's own pod is no node
        ({"UUID": "GPU-1", "Hostname": "nvidia-dcgm-exporter-cwbcm", "instance": "n4:9400"}, ("n4", "GPU-1", None, "")),
        ({"UUID": "GPU-1", "Hostname": "n1", "job": "dcgm", "exported_job": "5"}, ("n1", "GPU-1", None, "5")),
        # unusable ids: all zeros in virtual machines, blank strings of old exporters
        ({"gpu_uuid": "00000000-0000-0000-0000-000000000000", "gpu_id": "2", "hostname": "n1"}, ("n1", "n1:2", 2, "")),
        ({"UUID": "<<<NOT_SUPPORTED>>>", "gpu": "2", "Hostname": "n1"}, ("n1", "n1:2", 2, "")),
        # not a GPU's own series
        ({"UUID": "GPU-1", "gpu": "0", "Hostname": "n1", "nvlink": "4"}, None),
        ({"Hostname": "n1"}, None),
        ({"UUID": "GPU-1"}, None),
    ],
)  # fmt: skip
def test_labels_name_the_gpu(labels: dict[str, str], expected: tuple[str, str, int | None, str] | None) -> None:
    found = metrics.identify(DCGM, labels)
    assert (found and found[:4]) == expected


def test_mig_instances_and_partitions() -> None:
    labels = {"UUID": "GPU-1", "gpu": "0", "Hostname": "n1"}
    found = metrics.identify(DCGM, labels | {"GPU_I_ID": "3", "GPU_I_PROFILE": "1g.10gb"})
    assert found is not None
    assert (found.gpu_uuid, found.mig_instance, found.mig_profile) == ("GPU-1", "3", "1g.10gb")
    amd = metrics.BY_NAME["gpu_gfx_activity"][0]
    labels = {"gpu_uuid": "a1", "gpu_id": "9", "hostname": "n1"}
    for kind, partition, expected in (
        ("cpx", "3", ("3", "cpx")),
        ("spx", "0", ("", "")),
        ("cpx", "4294967295", ("", "")),  # not there
    ):
        found = metrics.identify(amd, labels | {"gpu_partition_id": partition, "gpu_compute_partition_type": kind})
        assert found is not None
        assert (found.mig_instance, found.mig_profile) == expected


def test_health_and_links_have_neither_job_nor_instance() -> None:
    labels = {"UUID": "GPU-1", "gpu": "0", "Hostname": "n1", "hpc_job": "7", "GPU_I_ID": "3"}
    energy = metrics.BY_NAME["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"][0]
    assert metrics.identify(energy, labels) == metrics.Identity("n1", "GPU-1", None, "")
    lane = metrics.BY_NAME["DCGM_FI_DEV_NVLINK_TX_BANDWIDTH_L17"][0]
    assert metrics.identify(lane, labels, lane=17) == metrics.Identity("n1", "GPU-1", None, "", link=17)


@pytest.mark.parametrize(
    ("labels", "link"),
    [
        ({"nvlink": "4", "gpu": "0", "gpu_uuid": "GPU-1", "hostname": "n1", "nvswitch": ""}, 4),
        ({"nvlink": "L11", "gpu": "0", "gpu_uuid": "GPU-1", "hostname": "n1"}, 11),
        ({"nvlink": "4", "nvswitch": "2", "hostname": "n1"}, None),  # a port of a switch
        ({"gpu": "0", "gpu_uuid": "GPU-1", "hostname": "n1"}, None),
        ({"nvlink": "999", "gpu": "0", "gpu_uuid": "GPU-1", "hostname": "n1"}, None),
    ],
)
def test_a_link_is_told_by_its_label(labels: dict[str, str], link: int | None) -> None:
    row = next(m for m in metrics.BY_NAME["DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES"] if m.entity == "link")
    found = metrics.identify(row, labels)
    assert (found and found.link) == link


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("node_infiniband_state_id", {"device": "mlx5_0", "port": "1", "instance": "n1:9100"}, ("n1", "mlx5_0", "1")),
        ("omnistat_network_tx_bytes", {"interface": "mlx5_0:2", "device_class": "infiniband", "instance": "n1:8001"},
         ("n1", "mlx5_0", "2")),
        ("omnistat_network_tx_bytes", {"interface": "cxi0", "device_class": "cxi", "instance": "n1:8001"},
         ("n1", "cxi0", "1")),
        ("omnistat_network_tx_bytes", {"interface": "eth0", "device_class": "net", "instance": "n1:8001"}, None),
        # asked of the subnet manager: the exporter's own host is not the port's
        ("infiniband_portxmitdata_total", {"component": "ca", "local_name": "n7 mlx5_2", "local_port": "1",
         "instance": "ibhost:9683"}, ("n7", "mlx5_2", "1")),
        ("infiniband_portxmitdata_total", {"component": "switch", "local_name": "leaf3", "local_port": "17",
         "instance": "ibhost:9683"}, None),
    ],
)  # fmt: skip
def test_ports(name: str, labels: dict[str, str], expected: tuple[str, str, str] | None) -> None:
    found = metrics.identify(metrics.BY_NAME[name][0], labels)
    assert (found and (found.node, found.device, found.port)) == expected


def test_labels_that_prometheus_renamed_are_the_exporters() -> None:
    labels = {"UUID": "GPU-1", "gpu": "3", "node": "monitoring-1", "exported_node": "n1", "exported_gpu": "5"}
    found = metrics.identify(DCGM, labels)
    assert found is not None
    assert (found.node, found.gpu_index) == ("n1", 5)
    # read from another Prometheus: its scrape job is no job
    labels = {"UUID": "GPU-1", "instance": "prom:9090", "exported_instance": "n1:9400", "exported_job": "dcgm"}
    assert metrics.identify(DCGM, labels) == metrics.Identity("n1", "GPU-1", None, "")


def test_driver_version_and_pod_labels_do_not_change_the_identity() -> None:
    labels = {"UUID": "GPU-1", "gpu": "0", "Hostname": "n1"}
    noisy = labels | {"DCGM_FI_DRIVER_VERSION": "570.1", "pod": "a", "namespace": "b", "prometheus_replica": "r1"}
    assert metrics.identify(DCGM, labels) == metrics.identify(DCGM, noisy)


def test_uuid_prefix_that_one_exporter_strips() -> None:
    metric = metrics.BY_NAME["nvidia_smi_power_draw_watts"][0]
    bare = "df6e7a7c-7314-46f8-abc4-b88b36dcf3aa"
    identity = metrics.identify(metric, {"uuid": bare, "instance": "n1:9835"})
    assert identity is not None
    assert identity.gpu_uuid == f"GPU-{bare}"


def test_inlet_sensor_is_found_by_its_name() -> None:
    metric = metrics.BY_NAME["ipmi_temperature_celsius"][0]
    for name in ("Inlet Temp", "System Board Inlet Temp", "Ambient", "AIR INTAKE"):
        assert metrics.identify(metric, {"name": name, "instance": "n1:9290"}) == metrics.Identity("n1", "", None, "")
    assert metrics.identify(metric, {"name": "CPU1 Temp", "instance": "n1:9290"}) is None


def test_air_of_the_room_is_not_that_of_the_inlet() -> None:
    inlet, hall = metrics.BY_NAME["ipmi_temperature_celsius"]
    assert (inlet.column, hall.column) == ("inlet_temp_c", "hall_temp_c")
    for name in ("Room Ambient", "HALL_TEMP", "Cold Aisle Temp", "CRAC 2 Intake"):
        labels = {"name": name, "instance": "n1:9290"}
        assert metrics.identify(inlet, labels) is None, name
        assert metrics.identify(hall, labels) == metrics.Identity("n1", "", None, "")
    for name in ("Inlet Temp", "Challenger Ambient"):
        assert metrics.identify(hall, {"name": name, "instance": "n1:9290"}) is None


@pytest.mark.parametrize(
    ("text", "index"),
    [("0", 0), ("99999", 99_999), ("100000", None), ("99999999999999", None), ("-1", None), ("٣", None)],
)
def test_only_a_short_number_is_an_index(text: str, index: int | None) -> None:
    metric = metrics.BY_NAME["DCGM_FI_DEV_GPU_TEMP"][0]
    found = metrics.identify(metric, {"gpu": text, "UUID": "GPU-1", "Hostname": "n1"})
    assert found is not None
    assert found.gpu_index == index


def test_a_users_mapping_takes_the_place_of_ours() -> None:
    table = metrics.DEFAULT.overridden(
        {
            "acme_gpu_celsius": {"column": "gpu_temp_c", "rank": 3},
            "DCGM_FI_DEV_GPU_UTIL_RATIO": {"scale": 1.0},
            "DCGM_FI_DEV_POWER_USAGE": {"column": ""},
            "acme_link_#_tx": {"column": "link_tx_bytes_per_s", "kind": "rate_typed_counter"},
            "acme_up": {"column": "is_link_up", "entity": "port", "where": {"state": "active"}},
        }
    )
    frame = pl.DataFrame({"acme_gpu_celsius": [61.0], "DCGM_FI_DEV_GPU_UTIL_RATIO": [0.5]})
    row = metrics.to_columns(frame, "gpu", table).row(0, named=True)
    assert row == {"gpu_temp_c": 61.0, "gpu_util_ratio": 0.5}
    assert "DCGM_FI_DEV_POWER_USAGE" not in table.by_name
    assert "DCGM_FI_DEV_POWER_USAGE" in metrics.BY_NAME  # the default is as it was
    assert table.variants["acme_link_7_tx"][0] == 7
    assert table.by_name["acme_up"][0].where == (("state", "active"),)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("acme", {"column": "gpu_temperature"}, ("acme", "gpu_temperature", "gpu_temp_c")),
        ("acme", {"scale": 2.0}, ("acme", "column is missing")),
        ("acme", {"column": "is_link_up"}, ("entity", "link", "port")),
        ("acme", {"column": "gpu_temp_c", "entity": "node"}, ("entity", "node", "gpu")),
        ("acme", {"column": "gpu_temp_c", "entity": "cpu"}, ("entity", "cpu", "health")),
        ("acme", {"column": "gpu_temp_c", "kind": "summary"}, ("kind", "summary", "bitmask")),
        ("acme", {"column": "gpu_temp_c", "scale": 0.0}, ("scale", "0.0")),
        ("acme", {"column": "gpu_temp_c", "mask": 4}, ("mask", "gpu_temp_c")),
        ("acme", {"column": "gpu_temp_c", "where": {"name": "("}}, ("where.name", "'('")),
        ("acme metric", {"column": "gpu_temp_c"}, ("acme metric",)),
    ],
)
def test_a_wrong_mapping_is_refused_in_words(name: str, fields: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(metrics.MetricError) as caught:
        metrics.DEFAULT.overridden({name: fields})
    for word in words:
        assert word in str(caught.value)


def test_the_pattern_of_names_matches_what_is_read() -> None:
    pattern = re.compile(metrics.DEFAULT.pattern("gpu", "link"))
    assert pattern.fullmatch("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_L17_TOTAL")
    assert pattern.fullmatch("DCGM_FI_DEV_GPU_TEMP")
    assert not pattern.fullmatch("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
    assert all(re.fullmatch(metrics.DEFAULT.pattern(), name) for name in metrics.BY_NAME)


def test_mappings_of_the_configuration_reach_the_source(tmp_path: Path) -> None:
    text = """
        [clusters.a]
        telemetry = "scrape"
        scrape_targets = ["http://127.0.0.1:1/metrics"]
        [clusters.a.metrics."acme_gpu_celsius"]
        column = "gpu_temp_c"
        where = { sensor = "core" }
        [clusters.a.metrics."DCGM_FI_DEV_GPU_UTIL_RATIO"]
        scale = 1.0
    """
    settings = parse_settings(tomllib.loads(text), {})
    table = settings.cluster("a").metric_table()
    assert table.by_name["acme_gpu_celsius"][0].where == (("sensor", "core"),)
    assert table.by_name["DCGM_FI_DEV_GPU_UTIL_RATIO"][0].scale == 1
    assert Cluster().metric_table() is metrics.DEFAULT
    source = build_telemetry("a", settings.cluster("a"), tmp_path)
    source.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('column = "gpu_temperature"', ("clusters.a.metrics", "acme", "gpu_temperature", "gpu_temp_c")),
        ('colunm = "gpu_temp_c"', ("clusters.a.metrics.acme.colunm", "did you mean 'column'")),
        ('column = "gpu_temp_c"\nrank = -1', ("clusters.a.metrics.acme.rank", "-1")),
    ],
)
def test_a_wrong_mapping_of_the_configuration_names_its_place(line: str, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(tomllib.loads(f"[clusters.a]\n[clusters.a.metrics.acme]\n{line}"), {})
    for word in words:
        assert word in str(caught.value)


def test_the_page_of_metrics_is_what_the_command_prints() -> None:
    page = Path(__file__).parent.parent / "docs" / "metrics.md"
    done = CliRunner().invoke(cli, ["metrics", "--markdown"])
    assert done.exit_code == 0
    assert page.read_text(encoding="utf-8") == done.output, "weatherglass metrics --markdown > docs/metrics.md"
    for metric in metrics.METRICS:
        assert f"`{metric.name}`" in done.output


def test_metrics_are_listed_by_name_column_and_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = CliRunner().invoke(cli, ["metrics", "throttle"]).output.splitlines()
    assert lines
    assert all("throttle" in line.lower() for line in lines)
    lines = CliRunner().invoke(cli, ["metrics", "--column", "inlet_temp_c"]).output.splitlines()
    assert [line.split()[0] for line in lines] == ["ipmi_temperature_celsius", "idrac_sensors_temperature"]
    config = tmp_path / "w.toml"
    config.write_text('[clusters.a.metrics.acme]\ncolumn = "inlet_temp_c"\nscale = 0.1\n')
    monkeypatch.setenv("WEATHERGLASS_CONFIG", str(config))
    out = CliRunner().invoke(cli, ["metrics", "acme", "--cluster", "a"]).output
    assert out.split() == ["acme", "node.inlet_temp_c", "×0.1", "gauge"]
    with pytest.raises(CommandError, match="no column 'gpu_temperature'"):
        CliRunner().invoke(cli, ["metrics", "--column", "gpu_temperature"], catch_exceptions=False)


# What the documentation and sources of each exporter say that it exposes, by what a reading of it must be.
EXPOSED = {
    "dcgm": (
        "SM_CLOCK MEM_CLOCK MEMORY_TEMP GPU_TEMP POWER_USAGE TOTAL_ENERGY_CONSUMPTION PCIE_REPLAY_COUNTER GPU_UTIL "
        "MEM_COPY_UTIL ENC_UTIL DEC_UTIL XID_ERRORS FB_FREE FB_USED FB_RESERVED NVLINK_BANDWIDTH_TOTAL "
        "UNCORRECTABLE_REMAPPED_ROWS CORRECTABLE_REMAPPED_ROWS ROW_REMAP_FAILURE POWER_VIOLATION THERMAL_VIOLATION "
        "SYNC_BOOST_VIOLATION BOARD_LIMIT_VIOLATION LOW_UTIL_VIOLATION RELIABILITY_VIOLATION ECC_SBE_VOL_TOTAL "
        "ECC_DBE_VOL_TOTAL ECC_SBE_AGG_TOTAL ECC_DBE_AGG_TOTAL RETIRED_SBE RETIRED_DBE RETIRED_PENDING "
        "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL NVLINK_CRC_DATA_ERROR_COUNT_TOTAL NVLINK_REPLAY_ERROR_COUNT_TOTAL "
        "NVLINK_RECOVERY_ERROR_COUNT_TOTAL NVLINK_BANDWIDTH_L0 NVLINK_CRC_FLIT_ERROR_COUNT_L5 "
        "NVLINK_REPLAY_ERROR_L17_TOTAL CLOCKS_EVENT_REASONS CLOCK_THROTTLE_REASONS GPU_TEMP_LIMIT POWER_USAGE_INSTANT "
        "PCIE_LINK_GEN PCIE_LINK_WIDTH FB_TOTAL ROW_REMAP_PENDING NVLINK_TX_BANDWIDTH_L17 NVLINK_RX_BANDWIDTH_TOTAL "
        "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS NVLINK_COUNT_TX_BYTES NVLINK_COUNT_RX_ERRORS GET_GPU_RECOVERY_ACTION "
        "GPU_TEMP_CELSIUS MEMORY_TEMP_CELSIUS GPU_TEMP_MARGIN_CELSIUS BOARD_POWER_WATTS BOARD_POWER_RAW_WATTS "
        "BOARD_POWER_LIMIT_ENFORCED_WATTS GPU_UTIL_RATIO XID_ERROR PCIE_REPLAY_TOTAL PAGE_RETIRED_SBE_TOTAL "
        "NVSWITCH_LINK_THROUGHPUT_TX NVSWITCH_LINK_THROUGHPUT_RX NVSWITCH_LINK_FLIT_ERRORS NVSWITCH_LINK_CRC_ERRORS "
        "NVSWITCH_LINK_REPLAY_ERROR_TOTAL NVSWITCH_LINK_RECOVERY_ERRORS NVSWITCH_LINK_STATUS "
        "ROW_REMAP_UNCORRECTABLE_TOTAL ROW_REMAP_FAILED NVLINK_THROUGHPUT_TOTAL NVLINK_CRC_DATA_ERROR_TOTAL"
    ),
    "dcgm, explained only": (
        "VGPU_LICENSE_STATUS FB_USED_PERCENT FB_USED_RATIO SLOWDOWN_TEMP SHUTDOWN_TEMP GPU_TEMP_SLOWDOWN_CELSIUS "
        "MEM_MAX_OP_TEMP GPU_MAX_OP_TEMP FABRIC_HEALTH_MASK PCIE_MAX_LINK_GEN BANKS_REMAP_ROWS_AVAIL_MAX "
        "NVSWITCH_TEMPERATURE_CURRENT NVSWITCH_TEMP_CELSIUS NVSWITCH_TEMPERATURE_LIMIT_SHUTDOWN NVSWITCH_THROUGHPUT_TX "
        "NVSWITCH_THROUGHPUT_RX NVSWITCH_FATAL_ERRORS NVSWITCH_LINK_FATAL_ERRORS NVSWITCH_LINK_NON_FATAL_ERRORS "
        "NVSWITCH_LINK_ECC_ERRORS NVSWITCH_LINK_ECC_ERROR_L7_TOTAL NVSWITCH_LINK_CRC_ERRORS_LANE0 NVSWITCH_PHYS_ID "
        "NVSWITCH_LINK_LATENCY_LOW_VC0 NVSWITCH_POWER_VDD_WATTS NVSWITCH_CURRENT_IDDQ_DVDD NVSWITCH_LINK_ID "
        "NVLINK_COUNT_TX_PACKETS NVLINK_COUNT_SYMBOL_BER NVLINK_COUNT_SYMBOL_BER_FLOAT BRAND SERIAL VBIOS_VERSION "
        "INFOROM_IMAGE_VER ECC_INFOROM_VER POWER_INFOROM_VER OEM_INFOROM_VER"
    ),
    "fed": (
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE DCGM_FI_PROF_DRAM_ACTIVE "
        "DCGM_FI_PROF_PCIE_TX_BYTES DCGM_FI_PROF_PCIE_RX_BYTES DCGM_FI_PROF_SM_ACTIVE DCGM_FI_PROF_SM_OCCUPANCY "
        "DCGM_FI_PROF_PIPE_FP64_ACTIVE DCGM_FI_PROF_PIPE_FP32_ACTIVE DCGM_FI_PROF_PIPE_FP16_ACTIVE "
        "DCGM_FI_PROF_NVLINK_TX_BYTES DCGM_FI_PROF_NVLINK_RX_BYTES DCGM_FI_PROF_NVLINK_L17_RX_BYTES "
        "DCGM_FI_PROF_PCIE_TX_BYTES_TOTAL DCGM_EXP_XID_ERRORS_COUNT dcgm_gpu_temp dcgm_power_usage dcgm_xid_errors "
        "nvidia_smi_utilization_gpu_ratio nvidia_smi_memory_used_bytes nvidia_smi_power_draw_watts "
        "nvidia_smi_temperature_gpu nvidia_smi_temperature_gpu_tlimit nvidia_smi_clocks_current_sm_clock_hz "
        "nvidia_smi_clocks_event_reasons_active nvidia_smi_clocks_event_reasons_hw_thermal_slowdown "
        "nvidia_smi_clocks_event_reasons_counters_sw_power_cap_seconds nvidia_smi_pcie_link_gen_current "
        "nvidia_smi_ecc_errors_corrected_volatile_total nvidia_smi_ecc_errors_uncorrected_aggregate_total "
        "nvidia_smi_remapped_rows_pending nvidia_smi_remapped_rows_failure nvidia_smi_gpu_recovery_action "
        "nvidia_smi_gpu_info nvidia_smi_xid_errors_total nvidia_smi_xid_last_timestamp_seconds "
        "nvidia_smi_clocks_event_reasons_hw_slowdown rocm_ras_vcn_uncorrectable_count rocm_ras_mpio_correctable_count "
        "gpu_ecc_correct_sdma amd_gpu_ecc_uncorrect_umc pcie_rx gpu_violation_ppt_residency_percentage "
        "rocm_version_info nvidia_gpu_jobId rmsjob_info dcgm_row_remap_failure dcgm_correctable_remapped_rows "
        "dcgm_uncorrectable_remapped_rows "
        "nvidia_smi_energy_joules_total nvidia_smi_pcie_throughput_tx_bytes_per_second "
        "gpu_gfx_activity amd_gpu_umc_activity gpu_junction_temperature amd_gpu_edge_temperature gpu_package_power "
        "gpu_average_package_power gpu_power_usage gpu_energy_consumed gpu_used_vram gpu_total_vram pcie_bandwidth "
        "pcie_replay_count gpu_clock gpu_ecc_correct_total gpu_ecc_uncorrect_total gpu_xgmi_link_rx "
        "amd_gpu_xgmi_link_tx rocm_utilization_percentage rocm_average_socket_power_watts rocm_energy_joules "
        "rocm_temperature_celsius "
        "rocm_temperature_memory_celsius rocm_sclk_clock_mhz rocm_xgmi_total_read_kilobytes "
        "rocm_ras_umc_uncorrectable_count omnistat_network_tx_bytes "
        "node_infiniband_port_data_received_bytes_total node_infiniband_port_transmit_wait_total "
        "node_infiniband_symbol_error_total node_infiniband_link_downed_total "
        "node_infiniband_link_error_recovery_total "
        "node_infiniband_local_link_integrity_errors_total node_infiniband_port_errors_received_total "
        "node_infiniband_state_id node_infiniband_physical_state_id node_infiniband_rate_bytes_per_second "
        "node_infiniband_np_cnp_packets_sent_total node_infiniband_np_ecn_marked_roce_packets_received_total "
        "node_infiniband_rp_cnp_packets_handled_total node_infiniband_out_of_sequence_packets_received_total "
        "node_infiniband_packet_sequence_errors_total node_infiniband_out_of_buffer_drops_total "
        "node_infiniband_local_ack_timeout_errors_total node_infiniband_rnr_nak_retry_packets_received_total "
        "node_infiniband_roce_adp_retransmits_total node_infiniband_rx_icrc_encapsulated_errors_total "
        "infiniband_portrcvdata_total nvidia_gpu_duty_cycle nvidia_gpu_power_usage_milliwatts "
        "nvidia_gpu_memory_used_bytes nvidia_gpu_temperature_celsius ipmi_temperature_celsius ipmi_power_watts "
        "ipmi_dcmi_power_consumption_current_watts idrac_sensors_temperature idrac_power_control_consumed_watts"
    ),
    "explained only": (
        "DCGM_FI_DRIVER_VERSION DCGM_EXP_CLOCK_EVENTS_COUNT DCGM_EXP_GPU_HEALTH_STATUS DCGM_EXP_P2P_STATUS "
        "DCGM_FI_PROF_C2C_TX_ALL_BYTES nvidia_smi_fabric_state nvidia_smi_mig_count "
        "nvidia_smi_last_collect_success nvidia_smi_pstate "
        "gpu_xgmi_nbr_0_tx_thrput gpu_violation_current gpu_health gpu_afid_errors pcie_speed "
        "nvidia_gpu_jobUid cgroup_memory_rss_bytes node_infiniband_info node_infiniband_vl15_dropped_total "
        "ipmi_temperature_state ipmi_fan_speed_rpm ipmi_up idrac_sensors_fan_speed idrac_power_supply_input_watts "
        "idrac_system_health idrac_events_log_entry kube_pod_info kube_pod_status_phase kube_pod_status_reason "
        "kube_pod_container_resource_requests kube_pod_container_status_last_terminated_reason kube_pod_created "
        "kube_pod_container_status_restarts_total kube_pod_owner kube_job_status_start_time kube_job_failed "
        "kube_node_status_allocatable kube_node_status_condition kube_node_spec_unschedulable kube_node_spec_taint "
        "volcano_e2e_job_scheduling_duration volcano_schedule_attempts_total volcano_pod_preemption_victims "
        "volcano_unschedule_task_count volcano_job_share volcano_queue_allocated_milli_cpu volcano_queue_share "
        "volcano_queue_deserved_scalar_resources kueue_pending_workloads kueue_cluster_queue_resource_usage "
        "slurm_account_jobs_pending slurm_cpus_alloc slurm_gpus_alloc slurm_node_cpu_alloc slurm_nodes_idle "
        "slurm_queue_pending slurm_job_alloc_cpus slurm_user_state_total slurm_pending_reason_total "
        "slurm_jobs_pending_total slurm_node_memory_bytes slurm_scheduler_cycle_last_seconds slurm_jobs_pending "
        "slurm_nodes_powering_up slurm_node_gpus_alloc slurm_bf_cycle_last slurm_partition_gpus "
        "DCGM_FI_NVML_VERSION nvidia_smi_clocks_event_reasons_gpu_idle nvidia_smi_clocks_event_reasons_sync_boost "
        "nvidia_smi_clocks_event_reasons_counters_hw_power_braking_seconds gpu_ecc_deferred_umc "
        "amd_gpu_ecc_deferred_gfx node_infiniband_legacy_packets_received_total "
        "node_infiniband_legacy_packets_transmitted_total node_infiniband_legacy_multicast_packets_received_total "
        "node_infiniband_roce_slow_restart_total node_infiniband_roce_slow_restart_cnps_total "
        "volcano_e2e_scheduling_latency_milliseconds_count volcano_e2e_job_scheduling_latency_milliseconds_count "
        "volcano_task_scheduling_latency_milliseconds_bucket volcano_queue_capacity_milli_cpu "
        "slurm_scheduler_backfill_depth_mean slurm_scheduler_backfilled_jobs_since_start_total"
    ),
}


@pytest.mark.parametrize("group", EXPOSED)
def test_what_exporters_expose_is_known(group: str) -> None:
    for short in EXPOSED[group].split():
        name = f"DCGM_FI_DEV_{short}" if group.startswith("dcgm") else short
        is_fed = "only" not in group
        assert (name in metrics.BY_NAME) == is_fed, name
        assert select(metrics.DEFAULT, name), name

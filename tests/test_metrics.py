"""Exporter names, scales, bit masks and labels → registry columns."""

from __future__ import annotations

import polars as pl
import pytest

from features import metrics
from features.vocabulary import COLUMNS, GPU_QUANTITIES, NODE_QUANTITIES


def columns_of(entity: str = "gpu", **values: float | None) -> dict[str, object]:
    frame = pl.DataFrame({name: [value] for name, value in values.items()}, schema=dict.fromkeys(values, pl.Float64))
    return metrics.to_columns(frame, entity).row(0, named=True)  # ty: ignore[invalid-argument-type]


def test_every_metric_feeds_a_column_of_its_table() -> None:
    for metric in metrics.METRICS:
        if not metric.column.startswith("_"):
            assert metric.column in COLUMNS
            assert metric.column in (GPU_QUANTITIES if metric.entity == "gpu" else NODE_QUANTITIES), metric
    fed = {metric.column for metric in metrics.METRICS} | {"is_up"}
    assert set(GPU_QUANTITIES) | set(NODE_QUANTITIES) <= fed


def test_names_are_unique_per_column_and_of_one_entity() -> None:
    pairs = [(m.name, m.column, m.where) for m in metrics.METRICS]
    assert len(pairs) == len(set(pairs))
    for rows in metrics.BY_NAME.values():
        assert len({m.entity for m in rows}) == 1


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


def test_node_metrics() -> None:
    row = columns_of("node", ipmi_temperature_celsius=24.5, ipmi_dcmi_power_consumption_current_watts=6200.0)
    assert row == {"inlet_temp_c": 24.5, "node_power_w": 6200.0}


@pytest.mark.parametrize(
    ("bits", "thermal", "brake", "capped"),
    [
        (0, False, False, False),
        (0x1, False, False, False),  # idle
        (0x4, False, False, True),
        (0x8, False, False, False),  # hardware slowdown alone says neither heat nor brake
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


def test_nvlink_errors_are_summed_over_kinds_not_over_spellings() -> None:
    row = columns_of(
        DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL=3.0,
        DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL=3.0,
        DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL=2.0,
        DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL=9223372036854775794.0,
    )
    assert row["nvlink_error_total"] == 5
    assert columns_of(DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL=None)["nvlink_error_total"] is None


def test_total_memory_is_used_free_and_reserved() -> None:
    row = columns_of(DCGM_FI_DEV_FB_USED=70_000.0, DCGM_FI_DEV_FB_FREE=10_000.0, DCGM_FI_DEV_FB_RESERVED=1_559.0)
    assert row["fb_total_bytes"] == pytest.approx(81_559 * 2**20)
    assert "_fb_free_bytes" not in row
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


@pytest.mark.parametrize(
    ("text", "index"),
    [("0", 0), ("99999", 99_999), ("100000", None), ("99999999999999", None), ("-1", None), ("٣", None)],
)
def test_only_a_short_number_is_an_index(text: str, index: int | None) -> None:
    metric = metrics.BY_NAME["DCGM_FI_DEV_GPU_TEMP"][0]
    found = metrics.identify(metric, {"gpu": text, "UUID": "GPU-1", "Hostname": "n1"})
    assert found is not None
    assert found.gpu_index == index

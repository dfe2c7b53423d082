"""nvidia_gpu_exporter (SI units; UUIDs without their prefix) and jobstats' nvidia_gpu_prometheus_exporter.

Rows only.
"""

from __future__ import annotations

from typing import Any

from features.exporters.metric import (
    BOARD,
    HW_HOT,
    HW_SLOW,
    JOB_NUMBER,
    SLOW_MEANING,
    Metric,
    clock_reasons,
    family,
)

SMI = "nvidia_smi_"
_smi = family("nvidia_gpu_exporter", SMI)
_health = family("nvidia_gpu_exporter", SMI, entity="health")
_xid = family("nvidia_gpu_exporter", SMI, entity="xid")
_jobstats = family("jobstats", "nvidia_gpu_")
_COUNT: dict[str, Any] = {"kind": "counter"}


def _flag(reason: str, column: str, **more: Any) -> list[Metric]:
    names = f"clocks_event_reasons_{reason} clocks_throttle_reasons_{reason}"
    return _smi(names, column, rank=1, **more)


def _held(reason: str, column: str, **more: Any) -> list[Metric]:
    return _health(f"clocks_event_reasons_counters_{reason}_seconds", column, **_COUNT, **more)


ROWS: tuple[Metric, ...] = (
    *_smi("utilization_gpu_ratio", "gpu_util_ratio"),
    *_smi("memory_used_bytes", "fb_used_bytes"),
    *_smi("memory_reserved_bytes", "fb_reserved_bytes"),
    *_smi("memory_free_bytes", "_fb_free_bytes"),
    *_smi("memory_total_bytes", "fb_total_bytes"),
    *_smi("power_draw_watts", "gpu_power_w"),
    *_smi("power_draw_average_watts", "gpu_power_w", rank=1),
    *_smi("power_draw_instant_watts", "gpu_power_w", rank=2),
    *_smi("enforced_power_limit_watts", "power_limit_w"),
    *_smi("power_limit_watts", "power_limit_w", rank=1),
    *_smi("temperature_gpu", "gpu_temp_c"),
    *_smi("temperature_memory", "mem_temp_c"),
    *_smi("temperature_gpu_tlimit", "gpu_temp_margin_c", meaning="distance to the nearest slowdown"),
    *_smi("clocks_current_sm_clock_hz", "sm_clock_hz"),
    *_smi("clocks_current_memory_clock_hz", "mem_clock_hz"),
    *_smi("pcie_throughput_tx_bytes_per_second", "pcie_tx_bytes_per_s"),
    *_smi("pcie_throughput_rx_bytes_per_second", "pcie_rx_bytes_per_s"),
    *clock_reasons(_smi, "clocks_event_reasons_active clocks_throttle_reasons_active"),
    *_flag("hw_thermal_slowdown", "is_thermal_slowdown", part="hw"),
    *_flag("sw_thermal_slowdown", "is_thermal_slowdown", part="sw"),
    *_flag("hw_power_brake_slowdown", "is_power_brake"),
    *_flag("sw_power_cap", "is_power_capped"),
    *_flag("hw_slowdown", HW_SLOW, meaning=SLOW_MEANING),
    *_flag("hw_thermal_slowdown", HW_HOT, meaning=SLOW_MEANING),
    *_smi("gpu_info", BOARD, kind="info", meaning="name, index, PCI bus id, serial and driver of a GPU in labels"),
    *_smi("ecc_errors_uncorrected_volatile_total", "ecc_uncorrected_total", **_COUNT),
    *_smi("remapped_rows_uncorrectable", "remapped_rows_total", **_COUNT),
    *_health("energy_joules_total", "energy_total_j", **_COUNT),
    *_health("utilization_memory_ratio", "mem_copy_util_ratio"),
    *_health("utilization_encoder_ratio", "encoder_util_ratio"),
    *_health("utilization_decoder_ratio", "decoder_util_ratio"),
    *_health("pcie_link_gen_current pcie_link_gen_gpucurrent", "pcie_link_gen"),
    *_health("pcie_link_width_current", "pcie_link_width"),
    *_health("pcie_replay_counter", "pcie_replay_total", **_COUNT),
    *_health("ecc_errors_corrected_volatile_total", "ecc_corrected_total", **_COUNT),
    *_health("ecc_errors_uncorrected_aggregate_total", "ecc_uncorrected_aggregate_total", **_COUNT),
    *_health("ecc_errors_corrected_aggregate_total", "ecc_corrected_aggregate_total", **_COUNT),
    *_health("remapped_rows_correctable", "remapped_rows_correctable_total", **_COUNT),
    *_health("remapped_rows_failure", "is_remap_failed"),
    *_health("remapped_rows_pending", "is_remap_pending"),
    *_health("retired_pages_single_bit_ecc_count", "retired_pages_total", part="sbe", **_COUNT),
    *_health("retired_pages_double_bit_count", "retired_pages_total", part="dbe", **_COUNT),
    *_held("sw_power_cap", "power_violation_s_total"),
    *_held("sync_boost", "sync_boost_violation_s_total"),
    *_held("sw_thermal_slowdown", "thermal_violation_s_total", part="sw"),
    *_held("hw_thermal_slowdown", "thermal_violation_s_total", part="hw"),
    *_health("gpu_recovery_action", "recovery_action"),
    *_xid("xid_errors_total", "_xid_total", **_COUNT, meaning="by xid, since the exporter began; there once it came"),
    *_xid("xid_last_timestamp_seconds", "_xid_time", meaning="by xid, s since 1970: the newest is xid_last"),
    *_health("clocks_event_reasons_gpu_idle clocks_throttle_reasons_gpu_idle clocks_event_reasons_sync_boost "
             "clocks_throttle_reasons_sync_boost clocks_event_reasons_applications_clocks_setting "
             "clocks_throttle_reasons_applications_clocks_setting clocks_event_reasons_supported "
             "clocks_throttle_reasons_supported", "", meaning="other reasons for clocks below their highest"),
    *_health("clocks_event_reasons_counters_hw_power_braking_seconds "
             "clocks_event_reasons_counters_hw_power_brake_seconds "
             "clocks_event_reasons_counters_hw_power_brake_slowdown_seconds "
             "clocks_event_reasons_counters_hw_slowdown_seconds", "", kind="counter",
             meaning="time held back by the external power brake or by hardware, s"),
    *_health("fabric_state", "", meaning="NVLink fabric: 0 not supported, 1 not started, 2 in progress, 3 done"),
    *_health("pstate", "", meaning="performance state, 0 highest"),
    *_health("mig_*", "", meaning="MIG instances"),
    *_health("last_collect_success command_exit_code", "", meaning="health of the exporter itself"),
    *_health("failed_scrapes_total", "", kind="counter", meaning="health of the exporter itself"),
    # --- jobstats ---------------------------------------------------------------------------------------------
    *_jobstats("duty_cycle", "gpu_util_ratio", 0.01),
    *_jobstats("memory_used_bytes", "fb_used_bytes"),
    *_jobstats("memory_total_bytes", "fb_total_bytes"),
    *_jobstats("power_usage_milliwatts", "gpu_power_w", 1e-3),
    *_jobstats("temperature_celsius", "gpu_temp_c"),
    *_jobstats("jobId", JOB_NUMBER, entity="job", kind="info", meaning="the value is the id of the job on the GPU"),
    *_jobstats("jobUid", "", entity="job", kind="info", meaning="the value is the id of the job's user"),
    *family("jobstats", entity="job")("cgroup_*", "", meaning="memory and CPU of a job on a node, by jobid"),
)  # fmt: skip

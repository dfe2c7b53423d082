"""AMD: device-metrics-exporter (with and without its optional prefix) and Omnistat. Rows only.

Every metric of theirs is declared a gauge, accumulators too. MI3xx has a junction temperature, MI2xx an edge one. None
of them tells a power limit, degrees left until a slowdown, or an external power brake.
"""

from __future__ import annotations

from typing import Any

from features.exporters.metric import BOARD, FB_SHARE, JOB_HERE, MIB, Metric, family

_plain = family("device-metrics-exporter")
_prefixed = family("device-metrics-exporter", "amd_")
_omnistat = family("omnistat", "rocm_")
_job = family("omnistat", entity="job")
_KIB = 1024.0
_SUM: dict[str, Any] = {"kind": "counter_typed_gauge"}
# Counters of errors by the part of the chip they were in.
_BLOCKS = (
    "umc", "sdma", "gfx", "mmhub", "athub", "pcie_bif", "hdp", "xgmi_wafl", "df", "smn", "sem", "mp0", "mp1", "fuse",
    "vcn", "jpeg", "mpio", "mca", "ih",
)  # fmt: skip
_LINKS = "xgmi_wafl"
_HOT = ("processor_hot_residency", "socket_thermal_residency", "vr_thermal_residency", "hbm_thermal_residency",
        "gfx_clock_below_host_limit_thermal")  # fmt: skip
_CAPPED = ("ppt_residency", "gfx_clock_below_host_limit_power")


def _amd(names: str, column: str, scale: float = 1.0, **more: Any) -> list[Metric]:
    return [*_plain(names, column, scale, **more), *_prefixed(names, column, scale, **more)]


def _ras(kind: str, column: str, entity: str) -> list[Metric]:
    return [
        row
        for block in _BLOCKS
        if block != _LINKS or kind == "uncorrectable"
        for row in _omnistat(f"ras_{block}_{kind}_count", column, part=block, entity=entity, **_SUM)
    ]


def _blocks(kind: str, column: str, entity: str) -> list[Metric]:
    """Counters of single blocks, for where the total is not enabled."""
    told = [block.removeprefix("pcie_") for block in _BLOCKS if block != _LINKS or kind == "uncorrect"]
    return [
        row for one in told for row in _amd(f"gpu_ecc_{kind}_{one}", column, part=one, rank=1, entity=entity, **_SUM)
    ]


def _flag(column: str, kinds: tuple[str, ...]) -> list[Metric]:
    """A share of time in which a limit held clocks down: any of it counts."""
    names = " ".join(f"gpu_violation_{kind}_percentage" for kind in kinds)
    return [row for name in names.split() for row in _amd(name, column, part=name, meaning="true above 0 %")]


ROWS: tuple[Metric, ...] = (
    *_amd("gpu_gfx_activity", "gpu_util_ratio", 0.01),
    *_amd("gpu_umc_activity", "dram_active_ratio", 0.01),
    *_amd("gpu_used_vram", "fb_used_bytes", MIB),
    *_amd("gpu_free_vram", "_fb_free_bytes", MIB),
    *_amd("gpu_total_vram", "fb_total_bytes", MIB),
    *_amd("gpu_package_power", "gpu_power_w", meaning="0 on partitions but the first"),
    *_amd("gpu_average_package_power", "gpu_power_w", rank=1),
    *_amd("gpu_power_usage", "gpu_power_w", rank=2),
    *_amd("gpu_junction_temperature", "gpu_temp_c"),
    *_amd("gpu_edge_temperature", "gpu_temp_c", rank=1),
    *_amd("gpu_memory_temperature", "mem_temp_c"),
    *_amd("gpu_clock", "sm_clock_hz", 1e6, where=(("clock_type", "(?i)system"),)),
    *_amd("gpu_clock", "mem_clock_hz", 1e6, where=(("clock_type", "(?i)memory"),)),
    *_amd("gpu_ecc_uncorrect_total", "ecc_uncorrected_total", **_SUM),
    *_amd("pcie_tx", "pcie_tx_bytes_per_s", **_SUM),
    *_amd("pcie_rx", "pcie_rx_bytes_per_s", **_SUM),
    *_amd("pcie_bandwidth", "pcie_tx_bytes_per_s", 1e6 / 8 / 2, rank=1, meaning="Mb/s, both directions: half each"),
    *_amd("pcie_bandwidth", "pcie_rx_bytes_per_s", 1e6 / 8 / 2, rank=1, meaning="Mb/s, both directions: half each"),
    *_amd("gpu_prof_gui_util_percent", "engine_active_ratio", 0.01),
    *_amd("gpu_prof_sm_active", "sm_active_ratio", 0.01),
    *_amd("gpu_prof_tensor_active_percent", "tensor_active_ratio", 0.01),
    *_blocks("uncorrect", "ecc_uncorrected_total", "gpu"),
    *_amd(f"gpu_ecc_correct_{_LINKS}", "nvlink_error_total", part="corrected", **_SUM),
    *_amd(f"gpu_ecc_uncorrect_{_LINKS}", "nvlink_error_total", part="uncorrected", **_SUM),
    *_flag("is_thermal_slowdown", _HOT),
    *_flag("is_power_capped", _CAPPED),
    *_blocks("correct", "ecc_corrected_total", "health"),
    *_amd("gpu_energy_consumed", "energy_total_j", 1e-6, entity="health", **_SUM),
    *_amd("pcie_replay_count", "pcie_replay_total", entity="health", **_SUM),
    *_amd("gpu_ecc_correct_total", "ecc_corrected_total", entity="health", **_SUM),
    *_amd("gpu_xgmi_link_tx", "link_tx_bytes_per_s", _KIB, entity="link", meaning="KB since it began", **_SUM),
    *_amd("gpu_xgmi_link_rx", "link_rx_bytes_per_s", _KIB, entity="link", meaning="KB since it began", **_SUM),
    *_amd("gpu_xgmi_nbr_*_tx_thrput", "", 32.0, entity="link", meaning="bytes/s to one neighbour (beats of 32 bytes)"),
    *_amd("gpu_ecc_deferred_total", "", entity="health", meaning="deferred ECC errors", **_SUM),
    *_amd("gpu_ecc_deferred_*", "", entity="health", meaning="deferred ECC errors of one block", **_SUM),
    *_amd("pcie_speed", "", entity="health", meaning="GT/s of a lane"),
    *_amd("pcie_bidirectional_bandwidth", "", entity="health", meaning="accumulated, both directions"),
    *_amd("gpu_violation_*", "", entity="health", meaning="residency of clock limits, counted; the shares are read",
          **_SUM),
    *_amd("gpu_health", "", entity="health", meaning="1: healthy"),
    *_amd("gpu_afid_errors", "", entity="health", kind="last_code", meaning="AMD field identifier of the last error"),
    # --- Omnistat ---------------------------------------------------------------------------------------------
    *_omnistat("utilization_percentage", "gpu_util_ratio", 0.01),
    *_omnistat("average_socket_power_watts", "gpu_power_w"),
    *_omnistat("temperature_celsius", "gpu_temp_c", where=(("location", "(?i)junction|hotspot|^$"),)),
    *_omnistat("temperature_celsius", "gpu_temp_c", rank=1, where=(("location", "(?i)edge"),)),
    *_omnistat("temperature_celsius", "mem_temp_c", rank=1, where=(("location", "(?i)hbm|mem"),)),
    *_omnistat("temperature_memory_celsius", "mem_temp_c"),
    *_omnistat("sclk_clock_mhz", "sm_clock_hz", 1e6),
    *_omnistat("mclk_clock_mhz", "mem_clock_hz", 1e6),
    *_omnistat("xgmi_total_write_kilobytes", "nvlink_tx_bytes_per_s", _KIB, rank=1, **_SUM),
    *_omnistat("xgmi_total_read_kilobytes", "nvlink_rx_bytes_per_s", _KIB, rank=1, **_SUM),
    *_ras("uncorrectable", "ecc_uncorrected_total", "gpu"),
    *_ras("correctable", "ecc_corrected_total", "health"),
    *_omnistat("energy_joules", "energy_total_j", entity="health", **_SUM),
    *_omnistat("ras_*_deferred_count", "", entity="health", meaning="deferred errors of a block", **_SUM),
    *_omnistat("vram_total_bytes", "fb_total_bytes"),
    *_omnistat("vram_used_percentage", FB_SHARE, 0.01, meaning="of all memory: bytes where that is told"),
    *_omnistat(f"ras_{_LINKS}_correctable_count", "nvlink_error_total", part="corrected", **_SUM),
    *_omnistat(f"ras_{_LINKS}_uncorrectable_count", "nvlink_error_total", part="uncorrected", **_SUM),
    *_omnistat("average_decoder_utilization_percentage", "decoder_util_ratio", 0.01, entity="health"),
    *_omnistat("version_info", BOARD, kind="info", meaning="type, driver, VBIOS and serial number of a board"),
    *_job("rmsjob_info", JOB_HERE, kind="info", meaning="the only job of a node has its GPUs; jobid empty when idle"),
)  # fmt: skip

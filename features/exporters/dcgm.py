"""dcgm-exporter: present names, those of DCGM 4.6 (the old ones stay aliases there) and the 1.x namespace. Rows only.

Sources: DCGM's list of fields, dcgm-exporter's counter files with their commented lines.
"""

from __future__ import annotations

from typing import Any

from features.exporters.metric import MIB, SWITCH_LABEL, Metric, clock_reasons, family

_all = family("dcgm-exporter")


def _rows(names: str, column: str, scale: float = 1.0, **more: Any) -> list[Metric]:
    """`X` is DCGM_FI_DEV_X, `+X` is DCGM_FI_PROF_X; names of the 1.x namespace and whole ones stay."""
    full = [
        n if n.startswith(("dcgm_", "DCGM_")) else f"DCGM_FI_PROF_{n[1:]}" if n[0] == "+" else f"DCGM_FI_DEV_{n}"
        for n in names.split()
    ]
    return _all(" ".join(full), column, scale, **more)


def _health(names: str, column: str, scale: float = 1.0, **more: Any) -> list[Metric]:
    return _rows(names, column, scale, entity="health", **more)


def _link(names: str, column: str, scale: float = 1.0, **more: Any) -> list[Metric]:
    return _rows(names, column, scale, entity="link", **more)


def _both_ways(names: str, tx: str, rx: str, scale: float, **more: Any) -> list[Metric]:
    # Both directions in one: halved, since collectives send what they receive.
    meaning = "both directions in one number: half is taken for each"
    return [
        *_rows(names, tx, scale / 2, meaning=meaning, **more),
        *_rows(names, rx, scale / 2, meaning=meaning, **more),
    ]


def _switch(names: str, column: str, scale: float = 1.0, **more: Any) -> list[Metric]:
    full = " ".join(f"NVSWITCH_LINK_{name}" for name in names.split())
    return _rows(full, column, scale, **{"entity": "port", "kind": "counter", "where": _SWITCH} | more)


def _port(names: str, **more: Any) -> list[Metric]:
    full = " ".join(name if name.startswith("DCGM_") else f"NVSWITCH_{name}" for name in names.split())
    return _rows(full, "", entity="port", **more)


_RATE: dict[str, Any] = {"kind": "rate_typed_counter"}
_COUNT: dict[str, Any] = {"kind": "counter"}
_NS: dict[str, Any] = {"kind": "counter", "meaning": "nanoseconds, whatever the help text says"}
# "MB/s" of the NVLink bandwidth fields: KiB a second divided by 1000.
_MB = 1_024_000
_MIBIT = 2.0**20 / 8  # what the library behind switches up to the third generation counts
_NSCQ = "Mibit, as NSCQ counts; where DCGM reads NVSDM it may stand still"
_SWITCH = ((SWITCH_LABEL, "."),)
_SWITCH_ERRORS = {"flit": "FLIT", "crc": "CRC", "replay": "REPLAY", "recovery": "RECOVERY"}
_ERRORS = {
    "flit": "CRC_FLIT_ERROR", "data": "CRC_DATA_ERROR", "replay": "REPLAY_ERROR", "recovery": "RECOVERY_ERROR",
}  # fmt: skip
_OLD_ERRORS = {"flit": "flit_crc", "data": "data_crc", "replay": "replay", "recovery": "recovery"}

ROWS: tuple[Metric, ...] = (
    # --- GPU samples ------------------------------------------------------------------------------------------
    *_rows("GPU_UTIL GPU_UTIL_RATIO dcgm_gpu_utilization", "gpu_util_ratio", 0.01,
           meaning="0–100 under the 4.6 name too; 0 or absent on MIG"),
    *_rows("+GR_ENGINE_ACTIVE +GR_ENGINE_UTIL_RATIO dcgm_fi_prof_gr_engine_active", "engine_active_ratio"),
    *_rows("+SM_ACTIVE +SM_UTIL_RATIO dcgm_fi_prof_sm_active", "sm_active_ratio"),
    *_rows("+PIPE_TENSOR_ACTIVE +TENSOR_UTIL_RATIO dcgm_fi_prof_pipe_tensor_active", "tensor_active_ratio"),
    *_rows("+DRAM_ACTIVE +DRAM_UTIL_RATIO dcgm_fi_prof_dram_active", "dram_active_ratio"),
    *_rows("FB_USED dcgm_fb_used", "fb_used_bytes", MIB),
    *_rows("FB_RESERVED", "fb_reserved_bytes", MIB),
    *_rows("FB_FREE dcgm_fb_free", "_fb_free_bytes", MIB, meaning="the total is made of it when no total is exposed"),
    *_rows("FB_TOTAL", "fb_total_bytes", MIB),
    *_rows("POWER_USAGE BOARD_POWER_WATTS dcgm_power_usage", "gpu_power_w"),
    *_rows("POWER_USAGE_INSTANT BOARD_POWER_RAW_WATTS", "gpu_power_w", rank=1),
    *_rows("ENFORCED_POWER_LIMIT BOARD_POWER_LIMIT_ENFORCED_WATTS", "power_limit_w"),
    *_rows("POWER_MGMT_LIMIT BOARD_POWER_LIMIT_REQUESTED_WATTS", "power_limit_w", rank=1),
    *_rows("GPU_TEMP GPU_TEMP_CELSIUS dcgm_gpu_temp", "gpu_temp_c"),
    *_rows("MEMORY_TEMP MEMORY_TEMP_CELSIUS dcgm_memory_temp", "mem_temp_c"),
    *_rows("GPU_TEMP_LIMIT GPU_TEMP_MARGIN_CELSIUS", "gpu_temp_margin_c",
           meaning="called a limit, is the distance to the nearest slowdown"),
    *_rows("SM_CLOCK dcgm_sm_clock", "sm_clock_hz", 1e6),
    *_rows("MEM_CLOCK dcgm_memory_clock", "mem_clock_hz", 1e6),
    # NVLink bandwidth comes in three disguises: PROF "bytes" that are rates, "MB/s" typed counter, true byte counters.
    *_rows("+NVLINK_TX_BYTES", "nvlink_tx_bytes_per_s", **_RATE),
    *_rows("+NVLINK_RX_BYTES", "nvlink_rx_bytes_per_s", **_RATE),
    *_rows("NVLINK_TX_BANDWIDTH_TOTAL NVLINK_TX_THROUGHPUT_TOTAL", "nvlink_tx_bytes_per_s", _MB, rank=1, **_RATE),
    *_rows("NVLINK_RX_BANDWIDTH_TOTAL NVLINK_RX_THROUGHPUT_TOTAL", "nvlink_rx_bytes_per_s", _MB, rank=1, **_RATE),
    *_both_ways("NVLINK_BANDWIDTH_TOTAL NVLINK_THROUGHPUT_TOTAL dcgm_nvlink_bandwidth_total",
                "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s", _MB, rank=2, **_RATE),
    *_rows("NVLINK_COUNT_TX_BYTES NVLINK_TX_BYTES_TOTAL", "nvlink_tx_bytes_per_s", rank=3, **_COUNT),
    *_rows("NVLINK_COUNT_RX_BYTES NVLINK_RX_BYTES_TOTAL", "nvlink_rx_bytes_per_s", rank=3, **_COUNT),
    *_rows("+PCIE_TX_BYTES dcgm_fi_prof_pcie_tx_bytes", "pcie_tx_bytes_per_s", **_RATE),
    *_rows("+PCIE_RX_BYTES dcgm_fi_prof_pcie_rx_bytes", "pcie_rx_bytes_per_s", **_RATE),
    *_rows("+PCIE_TX_BYTES_TOTAL", "pcie_tx_bytes_per_s", rank=1, **_COUNT),
    *_rows("+PCIE_RX_BYTES_TOTAL", "pcie_rx_bytes_per_s", rank=1, **_COUNT),
    *clock_reasons(_rows, "CLOCKS_EVENT_REASONS CLOCK_THROTTLE_REASONS"),
    *_rows("XID_ERRORS XID_ERROR dcgm_xid_errors", "xid_last", kind="last_code"),
    *_rows("ECC_DBE_VOL_TOTAL dcgm_ecc_dbe_volatile_total", "ecc_uncorrected_total", **_COUNT),
    *_rows("UNCORRECTABLE_REMAPPED_ROWS ROW_REMAP_UNCORRECTABLE_TOTAL dcgm_uncorrectable_remapped_rows",
           "remapped_rows_total", **_COUNT),
    *(
        row
        for part, name in _ERRORS.items()
        for row in _rows(
            f"NVLINK_{name}_COUNT_TOTAL NVLINK_{name}_TOTAL dcgm_nvlink_{_OLD_ERRORS[part]}_error_count_total",
            "nvlink_error_total", part=part, **_COUNT,
        )
    ),
    *_rows("NVLINK_COUNT_RX_ERRORS NVLINK_RX_ERROR_TOTAL", "nvlink_error_total", part="rx", **_COUNT),
    # --- GPU health -------------------------------------------------------------------------------------------
    *_health("TOTAL_ENERGY_CONSUMPTION dcgm_total_energy_consumption", "energy_total_j", 1e-3, kind="counter",
             meaning="since the driver was loaded; the same on each MIG instance"),
    *_health("MEM_COPY_UTIL dcgm_mem_copy_utilization", "mem_copy_util_ratio", 0.01),
    *_health("ENC_UTIL dcgm_enc_utilization", "encoder_util_ratio", 0.01),
    *_health("DEC_UTIL dcgm_dec_utilization", "decoder_util_ratio", 0.01),
    *_health("+SM_OCCUPANCY +SM_OCCUPANCY_RATIO dcgm_fi_prof_sm_occupancy", "sm_occupancy_ratio"),
    *_health("+PIPE_FP64_ACTIVE +FP64_UTIL_RATIO dcgm_fi_prof_pipe_fp64_active", "fp64_active_ratio"),
    *_health("+PIPE_FP32_ACTIVE +FP32_UTIL_RATIO dcgm_fi_prof_pipe_fp32_active", "fp32_active_ratio"),
    *_health("+PIPE_FP16_ACTIVE +FP16_UTIL_RATIO dcgm_fi_prof_pipe_fp16_active", "fp16_active_ratio"),
    *_health("PCIE_REPLAY_COUNTER PCIE_REPLAY_TOTAL dcgm_pcie_replay_counter", "pcie_replay_total", **_COUNT),
    *_health("PCIE_LINK_GEN", "pcie_link_gen"),
    *_health("PCIE_LINK_WIDTH", "pcie_link_width"),
    *_health("ECC_SBE_VOL_TOTAL dcgm_ecc_sbe_volatile_total", "ecc_corrected_total", **_COUNT),
    *_health("ECC_DBE_AGG_TOTAL dcgm_ecc_dbe_aggregate_total", "ecc_uncorrected_aggregate_total", **_COUNT),
    *_health("ECC_SBE_AGG_TOTAL dcgm_ecc_sbe_aggregate_total", "ecc_corrected_aggregate_total", **_COUNT),
    *_health("CORRECTABLE_REMAPPED_ROWS ROW_REMAP_CORRECTABLE_TOTAL dcgm_correctable_remapped_rows",
             "remapped_rows_correctable_total", **_COUNT),
    *_health("RETIRED_SBE PAGE_RETIRED_SBE_TOTAL dcgm_retired_pages_sbe", "retired_pages_total", part="sbe", **_COUNT),
    *_health("RETIRED_DBE PAGE_RETIRED_DBE_TOTAL dcgm_retired_pages_dbe", "retired_pages_total", part="dbe", **_COUNT),
    *_health("ROW_REMAP_FAILURE ROW_REMAP_FAILED dcgm_row_remap_failure", "is_remap_failed"),
    *_health("ROW_REMAP_PENDING", "is_remap_pending", part="row"),
    *_health("RETIRED_PENDING PAGE_RETIRED_PENDING dcgm_retired_pages_pending", "is_remap_pending", part="page"),
    *_health("POWER_VIOLATION dcgm_power_violation", "power_violation_s_total", 1e-9, **_NS),
    *_health("THERMAL_VIOLATION dcgm_thermal_violation", "thermal_violation_s_total", 1e-9, **_NS),
    *_health("RELIABILITY_VIOLATION dcgm_reliability_violation", "reliability_violation_s_total", 1e-9, **_NS),
    *_health("BOARD_LIMIT_VIOLATION dcgm_board_limit_violation", "board_limit_violation_s_total", 1e-9, **_NS),
    *_health("SYNC_BOOST_VIOLATION dcgm_sync_boost_violation", "sync_boost_violation_s_total", 1e-9, **_NS),
    *_health("LOW_UTIL_VIOLATION dcgm_low_util_violation", "low_util_violation_s_total", 1e-9, **_NS),
    *_health("CLOCKS_EVENT_REASON_SW_POWER_CAP_NS", "power_violation_s_total", 1e-9, rank=1, **_COUNT),
    *_health("CLOCKS_EVENT_REASON_SYNC_BOOST_NS CLOCKS_EVENT_REASON_SYNC_BOOST_COUNT_NS",
             "sync_boost_violation_s_total", 1e-9, rank=1, **_COUNT),
    *_health("CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS", "thermal_violation_s_total", 1e-9, rank=1, part="sw",
             **_COUNT),
    *_health("CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS", "thermal_violation_s_total", 1e-9, rank=1, part="hw",
             **_COUNT),
    *_rows("DCGM_EXP_XID_ERRORS_COUNT", "xid_events", entity="xid", kind="window_count",
           meaning="by xid; one series of 0 without a code when there was none"),
    *_health("GET_GPU_RECOVERY_ACTION GPU_RECOVERY_ACTION", "recovery_action"),
    # --- NVLinks one by one: `#` in the name, or a label `nvlink` ------------------------------------------------
    *_link("+NVLINK_L#_TX_BYTES +NVLINK_TX_BYTES_PER_LINK", "link_tx_bytes_per_s", **_RATE),
    *_link("+NVLINK_L#_RX_BYTES +NVLINK_RX_BYTES_PER_LINK", "link_rx_bytes_per_s", **_RATE),
    *_link("NVLINK_TX_BANDWIDTH_L# NVLINK_TX_THROUGHPUT_L# NVLINK_TX_THROUGHPUT_PER_LINK", "link_tx_bytes_per_s",
           _MB, rank=1, **_RATE),
    *_link("NVLINK_RX_BANDWIDTH_L# NVLINK_RX_THROUGHPUT_L# NVLINK_RX_THROUGHPUT_PER_LINK", "link_rx_bytes_per_s",
           _MB, rank=1, **_RATE),
    *_both_ways("NVLINK_BANDWIDTH_L# NVLINK_THROUGHPUT_L# NVLINK_THROUGHPUT_PER_LINK", "link_tx_bytes_per_s",
                "link_rx_bytes_per_s", _MB, rank=2, entity="link", **_RATE),
    *_link("NVLINK_COUNT_TX_BYTES NVLINK_TX_BYTES_TOTAL", "link_tx_bytes_per_s", rank=3, **_COUNT),
    *_link("NVLINK_COUNT_RX_BYTES NVLINK_RX_BYTES_TOTAL", "link_rx_bytes_per_s", rank=3, **_COUNT),
    *(
        row
        for part, name in _ERRORS.items()
        for row in _link(f"NVLINK_{name}_COUNT_L# NVLINK_{name}_L#_TOTAL NVLINK_{name}_PER_LINK_TOTAL",
                         "link_error_total", part=part, **_COUNT)
    ),
    *_link("NVLINK_COUNT_RX_ERRORS NVLINK_RX_ERROR_TOTAL", "link_error_total", part="rx", **_COUNT),
    *_link("NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS NVLINK_RECOVERY_FAILED_TOTAL", "link_error_total", part="failed",
           **_COUNT),
    *_link("NVLINK_GET_STATE", "is_link_up", meaning="0 inactive, 1 active, 2 asleep"),
    # --- switches of NVLinks: a port for each link; the exporter's label `nvlink` is its number -----------------
    *_switch("THROUGHPUT_TX", "tx_bytes_total", _MIBIT, meaning=_NSCQ),
    *_switch("THROUGHPUT_RX", "rx_bytes_total", _MIBIT, meaning=_NSCQ),
    *(
        row
        for part, name in _SWITCH_ERRORS.items()
        for row in _switch(f"{name}_ERRORS {name}_ERROR_TOTAL", "port_errors_total", part=part)
    ),
    *_switch("STATUS", "is_link_up", kind="gauge", equals=2,
             meaning="−1 unknown, 0 off, 1 safe, 2 active, 3 error, 4 inactive"),
    # --- known, and kept in no frame ----------------------------------------------------------------------------
    *_health("NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS NVLINK_RECOVERY_SUCCESSFUL_TOTAL", "", kind="counter",
             meaning="recoveries of a link that succeeded"),
    *_health("NVLINK_COUNT_TX_PACKETS NVLINK_TX_PACKET_TOTAL NVLINK_COUNT_RX_PACKETS NVLINK_RX_PACKET_TOTAL", "",
             kind="counter", meaning="packets of a link"),
    *_health("NVLINK_COUNT_SYMBOL_BER_FLOAT NVLINK_SYMBOL_BER_RATIO", "",
             meaning="bit error ratio; small ones are printed as 0.000000"),
    *_health("NVLINK_COUNT_SYMBOL_BER", "", kind="bitmask", meaning="bit error ratio, packed: mantissa and exponent"),
    *_health("FB_USED_PERCENT FB_USED_RATIO", "", meaning="0–1 despite the name: used / (total − reserved)"),
    *_health("MEM_MAX_OP_TEMP MEMORY_MAX_OP_TEMP_CELSIUS GPU_MAX_OP_TEMP GPU_MAX_OP_TEMP_CELSIUS SLOWDOWN_TEMP "
             "GPU_TEMP_SLOWDOWN_CELSIUS SHUTDOWN_TEMP GPU_TEMP_SHUTDOWN_CELSIUS", "",
             meaning="a limit of the model, °C; from H100 on a margin (−8…0)"),
    *_health("POWER_MGMT_LIMIT_MIN POWER_MGMT_LIMIT_MAX POWER_MGMT_LIMIT_DEF BOARD_POWER_LIMIT_MIN_WATTS "
             "BOARD_POWER_LIMIT_MAX_WATTS BOARD_POWER_LIMIT_DEFAULT_WATTS", "", meaning="power limits of the model, W"),
    *_health("PCIE_MAX_LINK_GEN PCIE_MAX_LINK_WIDTH", "", meaning="what the PCIe link can be"),
    *_health("FABRIC_HEALTH_MASK", "", kind="bitmask", meaning="state of the NVLink fabric, packed"),
    *_health("BANKS_REMAP_ROWS_AVAIL_* BANK_REMAP_AVAIL_*", "", meaning="memory banks by rows left to remap"),
    *_health("+C2C_TX_ALL_BYTES +C2C_TX_DATA_BYTES +C2C_RX_ALL_BYTES +C2C_RX_DATA_BYTES", "",
             kind="rate_typed_counter", meaning="between CPU and GPU of one module, bytes/s"),
    *_port("THROUGHPUT_TX THROUGHPUT_RX", kind="counter", meaning="Mibit of a whole switch: the sum of its links"),
    *_port("FATAL_ERRORS NON_FATAL_ERRORS LINK_FATAL_ERRORS LINK_NON_FATAL_ERRORS DCGM_FI_DEV_SXID_FATAL_ERROR "
           "DCGM_FI_DEV_SXID_NON_FATAL_ERROR", kind="last_code", meaning="the SXid of a switch that was seen last"),
    *_port("LINK_ECC_ERRORS LINK_ECC_ERROR_TOTAL LINK_ECC_ERRORS_LANE* LINK_ECC_ERROR_L*", kind="counter",
           meaning="ECC events of a link, or of one lane of it; those that were corrected are among them"),
    *_port("LINK_CRC_ERRORS_LANE* LINK_CRC_ERROR_L*", kind="counter", meaning="part of the link's CRC errors"),
    *_port("TEMPERATURE_CURRENT TEMP_CELSIUS", meaning="of a switch, °C: no column is of a switch as a whole"),
    *_port("TEMPERATURE_LIMIT_* TEMP_SLOWDOWN_CELSIUS TEMP_SHUTDOWN_CELSIUS", meaning="a limit of a switch, °C"),
    *_port("VOLTAGE_MVOLT CURRENT_IDDQ* POWER_*", meaning="power supply of a switch: mV, mA, W"),
    *_port("LINK_LATENCY_* LATENCY_*", kind="counter", meaning="packets of a link by latency and virtual channel"),
    *_port("RESET_REQUIRED", meaning="1: the switch waits for a reset"),
    *_port("PHYS_ID PHYSICAL_ID LINK_ID LINK_TYPE PCIE_* LINK_REMOTE_* LINK_DEVICE_* DEVICE_UUID UUID", kind="info",
           meaning="what a switch is, and what is at the other end of a link"),
    *_health("VGPU_LICENSE_STATUS", "", meaning="1: licensed"),
    *_health("DCGM_EXP_CLOCK_EVENTS_COUNT", "", kind="window_count", meaning="events of a window, by clock_event"),
    *_health("DCGM_EXP_GPU_HEALTH_STATUS DCGM_EXP_P2P_STATUS", "", meaning="a state, though declared a counter"),
    *_health("DCGM_FI_DRIVER_VERSION DCGM_FI_SYSTEM_DRIVER_VERSION VBIOS_VERSION SERIAL", "", kind="info",
             meaning="a label of every series, never part of a key; kept with the board"),
    *_health("DCGM_FI_NVML_VERSION DCGM_FI_SYSTEM_NVML_VERSION DCGM_FI_CUDA_DRIVER_VERSION BRAND NAME "
             "INFOROM_IMAGE_VER ECC_INFOROM_VER POWER_INFOROM_VER OEM_INFOROM_VER INFOROM_CONFIG_CHECK "
             "INFOROM_CONFIG_VALID", "", kind="info", meaning="a label of every series, never part of a key"),
)  # fmt: skip

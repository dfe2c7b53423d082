"""Exporters' metric names: which registry column each feeds, with scale and decoding, and which labels name a GPU.

One row a metric. Another exporter is more rows here and nothing anywhere else. Sources hand over wide frames whose
columns are exporter names; `to_columns` turns them into registry columns. No I/O, no cleaning: values that were
received stay as they were (times the scale), so that `features/cleaning.py` can count what is wrong with them.
Where the names, units and traps come from: DCGM's field list with its 4.6 renaming (old spellings stay aliases),
dcgm-exporter's counter files, the 1.x namespace, nvidia_gpu_exporter, AMD's device-metrics-exporter, ipmi_exporter.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import polars as pl

from features.vocabulary import COLUMNS

Entity = Literal["gpu", "node"]

MIB = 2.0**20
# "Not there" values of NVIDIA's libraries: INT32 blank…not permitted, the same as 64-bit and as floating point.
INT32_SENTINELS = tuple(float(0x7FFFFFF0 + i) for i in range(4))
FP64_SENTINELS = tuple(2.0**47 + i for i in range(4))
# The 64-bit ones (0x7ffffffffffffff0…) lose their last digits on the way through a double: compare by size.
INT64_SENTINEL_FROM = 9.2e18
# All ones of 16, 32 and 64 bits: AMD's spelling of "not available"; only where they are out of range anyway.
UINT_MAX = (65535.0, 4294967295.0)

# Bits of the clock event reasons.
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of one exporter.

    Attributes:
        name: As exposed.
        column: Registry column it feeds, or a helper of `to_columns` (first letter `_`).
        scale: Value × scale is in the registry's unit.
        rank: Of several metrics of a column on one GPU the lowest rank that has a value wins.
        mask: Not 0: the value is a bit mask, the column is true when any of these bits is set.
        part: Columns with parts are sums: one addend for each part, spellings of a part replace each other.
        where: Labels that must match: (label, regular expression) each.
        entity: What a series of it speaks of.
    """

    name: str
    column: str
    scale: float = 1.0
    rank: int = 0
    mask: int = 0
    part: str = ""
    where: tuple[tuple[str, str], ...] = ()
    entity: Entity = "gpu"


def _spellings(names: str, column: str, scale: float = 1.0, **more: object) -> list[Metric]:
    return [Metric(name, column, scale, **more) for name in names.split()]  # ty: ignore[invalid-argument-type]


_DEV = "DCGM_FI_DEV_"
_PROF = "DCGM_FI_PROF_"


def _dcgm(names: str, column: str, scale: float = 1.0, **more: object) -> list[Metric]:
    """Metrics of dcgm-exporter; a name that starts in small letters is of the 1.x namespace."""
    full = [n if n.startswith("dcgm_") else _PROF + n[1:] if n.startswith("+") else _DEV + n for n in names.split()]
    return _spellings(" ".join(full), column, scale, **more)


def _reasons(names: str) -> list[Metric]:
    # 0x8 (hardware slowdown) alone says neither heat nor brake: 0x40 or 0x80 come with it and say which.
    return [
        *_spellings(names, "is_thermal_slowdown", mask=SW_THERMAL | HW_THERMAL),
        *_spellings(names, "is_power_brake", mask=HW_POWER_BRAKE),
        *_spellings(names, "is_power_capped", mask=SW_POWER_CAP),
    ]


_SMI = "nvidia_smi_"
_INLET = (("name", r"(?i)inlet|ambient|intake"),)

METRICS: tuple[Metric, ...] = (
    # --- NVIDIA: dcgm-exporter; each row: present name, 4.6 name, 1.x name -----------------------------------
    # GPU_UTIL_RATIO is the new name of a value that still runs 0–100.
    *_dcgm("GPU_UTIL GPU_UTIL_RATIO dcgm_gpu_utilization", "gpu_util_ratio", 0.01),
    *_dcgm("+GR_ENGINE_ACTIVE +GR_ENGINE_UTIL_RATIO dcgm_fi_prof_gr_engine_active", "engine_active_ratio"),
    *_dcgm("+SM_ACTIVE +SM_UTIL_RATIO dcgm_fi_prof_sm_active", "sm_active_ratio"),
    *_dcgm("+PIPE_TENSOR_ACTIVE +TENSOR_UTIL_RATIO dcgm_fi_prof_pipe_tensor_active", "tensor_active_ratio"),
    *_dcgm("+DRAM_ACTIVE +DRAM_UTIL_RATIO dcgm_fi_prof_dram_active", "dram_active_ratio"),
    *_dcgm("FB_USED dcgm_fb_used", "fb_used_bytes", MIB),
    *_dcgm("FB_RESERVED", "fb_reserved_bytes", MIB),
    *_dcgm("FB_FREE dcgm_fb_free", "_fb_free_bytes", MIB),
    *_dcgm("FB_TOTAL", "fb_total_bytes", MIB),
    *_dcgm("POWER_USAGE BOARD_POWER_WATTS dcgm_power_usage", "gpu_power_w"),
    *_dcgm("POWER_USAGE_INSTANT BOARD_POWER_RAW_WATTS", "gpu_power_w", rank=1),
    *_dcgm("ENFORCED_POWER_LIMIT BOARD_POWER_LIMIT_ENFORCED_WATTS", "power_limit_w"),
    *_dcgm("POWER_MGMT_LIMIT BOARD_POWER_LIMIT_REQUESTED_WATTS", "power_limit_w", rank=1),
    *_dcgm("GPU_TEMP GPU_TEMP_CELSIUS dcgm_gpu_temp", "gpu_temp_c"),
    *_dcgm("MEMORY_TEMP MEMORY_TEMP_CELSIUS dcgm_memory_temp", "mem_temp_c"),
    # Called a limit, is the distance to the nearest slowdown.
    *_dcgm("GPU_TEMP_LIMIT GPU_TEMP_MARGIN_CELSIUS", "gpu_temp_margin_c"),
    *_dcgm("SM_CLOCK dcgm_sm_clock", "sm_clock_hz", 1e6),
    *_dcgm("MEM_CLOCK dcgm_memory_clock", "mem_clock_hz", 1e6),
    # The PROF "bytes" are rates in bytes/s, whatever type the exporter declares.
    *_dcgm("+NVLINK_TX_BYTES", "nvlink_tx_bytes_per_s"),
    *_dcgm("+NVLINK_RX_BYTES", "nvlink_rx_bytes_per_s"),
    *_dcgm("NVLINK_TX_BANDWIDTH_TOTAL NVLINK_TX_THROUGHPUT_TOTAL", "nvlink_tx_bytes_per_s", 1_024_000, rank=1),
    *_dcgm("NVLINK_RX_BANDWIDTH_TOTAL NVLINK_RX_THROUGHPUT_TOTAL", "nvlink_rx_bytes_per_s", 1_024_000, rank=1),
    # Both directions in one, "MB/s" of 1,024,000 bytes: halved, since collectives send what they receive.
    *_dcgm("NVLINK_BANDWIDTH_TOTAL NVLINK_THROUGHPUT_TOTAL dcgm_nvlink_bandwidth_total", "nvlink_tx_bytes_per_s",
           512_000, rank=2),
    *_dcgm("NVLINK_BANDWIDTH_TOTAL NVLINK_THROUGHPUT_TOTAL dcgm_nvlink_bandwidth_total", "nvlink_rx_bytes_per_s",
           512_000, rank=2),
    *_dcgm("+PCIE_TX_BYTES dcgm_fi_prof_pcie_tx_bytes", "pcie_tx_bytes_per_s"),
    *_dcgm("+PCIE_RX_BYTES dcgm_fi_prof_pcie_rx_bytes", "pcie_rx_bytes_per_s"),
    *_reasons("DCGM_FI_DEV_CLOCKS_EVENT_REASONS DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"),
    *_dcgm("XID_ERRORS XID_ERROR dcgm_xid_errors", "xid_last"),
    *_dcgm("ECC_DBE_VOL_TOTAL dcgm_ecc_dbe_volatile_total", "ecc_uncorrected_total"),
    *_dcgm("UNCORRECTABLE_REMAPPED_ROWS ROW_REMAP_UNCORRECTABLE_TOTAL", "remapped_rows_total"),
    *_dcgm("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL NVLINK_CRC_FLIT_ERROR_TOTAL dcgm_nvlink_flit_crc_error_count_total",
           "nvlink_error_total", part="flit"),
    *_dcgm("NVLINK_CRC_DATA_ERROR_COUNT_TOTAL NVLINK_CRC_DATA_ERROR_TOTAL dcgm_nvlink_data_crc_error_count_total",
           "nvlink_error_total", part="data"),
    *_dcgm("NVLINK_REPLAY_ERROR_COUNT_TOTAL NVLINK_REPLAY_ERROR_TOTAL dcgm_nvlink_replay_error_count_total",
           "nvlink_error_total", part="replay"),
    *_dcgm("NVLINK_RECOVERY_ERROR_COUNT_TOTAL NVLINK_RECOVERY_ERROR_TOTAL dcgm_nvlink_recovery_error_count_total",
           "nvlink_error_total", part="recovery"),
    # --- the job's own word ----------------------------------------------------------------------------------
    Metric("weatherglass_step_time_seconds", "step_time_s"),
    # --- NVIDIA: nvidia_gpu_exporter (already in SI units) ---------------------------------------------------
    Metric(_SMI + "utilization_gpu_ratio", "gpu_util_ratio"),
    Metric(_SMI + "memory_used_bytes", "fb_used_bytes"),
    Metric(_SMI + "memory_reserved_bytes", "fb_reserved_bytes"),
    Metric(_SMI + "memory_free_bytes", "_fb_free_bytes"),
    Metric(_SMI + "memory_total_bytes", "fb_total_bytes"),
    Metric(_SMI + "power_draw_watts", "gpu_power_w"),
    Metric(_SMI + "power_draw_average_watts", "gpu_power_w", rank=1),
    Metric(_SMI + "enforced_power_limit_watts", "power_limit_w"),
    Metric(_SMI + "temperature_gpu", "gpu_temp_c"),
    Metric(_SMI + "temperature_memory", "mem_temp_c"),
    Metric(_SMI + "temperature_gpu_tlimit", "gpu_temp_margin_c"),
    Metric(_SMI + "clocks_current_sm_clock_hz", "sm_clock_hz"),
    Metric(_SMI + "clocks_current_memory_clock_hz", "mem_clock_hz"),
    Metric(_SMI + "pcie_throughput_tx_bytes_per_second", "pcie_tx_bytes_per_s"),
    Metric(_SMI + "pcie_throughput_rx_bytes_per_second", "pcie_rx_bytes_per_s"),
    *_reasons(f"{_SMI}clocks_event_reasons_active {_SMI}clocks_throttle_reasons_active"),
    Metric(_SMI + "ecc_errors_uncorrected_volatile_total", "ecc_uncorrected_total"),
    Metric(_SMI + "remapped_rows_uncorrectable", "remapped_rows_total"),
    # --- NVIDIA: jobstats' nvidia_gpu_prometheus_exporter ----------------------------------------------------
    Metric("nvidia_gpu_duty_cycle", "gpu_util_ratio", 0.01),
    Metric("nvidia_gpu_memory_used_bytes", "fb_used_bytes"),
    Metric("nvidia_gpu_memory_total_bytes", "fb_total_bytes"),
    Metric("nvidia_gpu_power_usage_milliwatts", "gpu_power_w", 1e-3),
    Metric("nvidia_gpu_temperature_celsius", "gpu_temp_c"),
    # --- AMD: device-metrics-exporter, with and without its optional prefix; MI3xx has junction, MI2xx edge ----
    *(
        Metric(prefix + name, column, scale, rank, where=where)
        for prefix in ("", "amd_")
        for name, column, scale, rank, where in (
            ("gpu_gfx_activity", "gpu_util_ratio", 0.01, 0, ()),
            ("gpu_umc_activity", "dram_active_ratio", 0.01, 0, ()),
            ("gpu_used_vram", "fb_used_bytes", MIB, 0, ()),
            ("gpu_free_vram", "_fb_free_bytes", MIB, 0, ()),
            ("gpu_total_vram", "fb_total_bytes", MIB, 0, ()),
            ("gpu_package_power", "gpu_power_w", 1.0, 0, ()),
            ("gpu_average_package_power", "gpu_power_w", 1.0, 1, ()),
            ("gpu_power_usage", "gpu_power_w", 1.0, 2, ()),
            ("gpu_junction_temperature", "gpu_temp_c", 1.0, 0, ()),
            ("gpu_edge_temperature", "gpu_temp_c", 1.0, 1, ()),
            ("gpu_memory_temperature", "mem_temp_c", 1.0, 0, ()),
            ("gpu_clock", "sm_clock_hz", 1e6, 0, (("clock_type", "(?i)system"),)),
            ("gpu_ecc_uncorrect_total", "ecc_uncorrected_total", 1.0, 0, ()),
        )
    ),
    # --- AMD: Omnistat ----------------------------------------------------------------------------------------
    Metric("rocm_utilization_percentage", "gpu_util_ratio", 0.01),
    Metric("rocm_average_socket_power_watts", "gpu_power_w"),
    Metric("rocm_temperature_celsius", "gpu_temp_c"),
    Metric("rocm_temperature_memory_celsius", "mem_temp_c"),
    Metric("rocm_sclk_clock_mhz", "sm_clock_hz", 1e6),
    # --- nodes: ipmi_exporter, idrac_exporter; sensor names are the vendor's ----------------------------------
    Metric("ipmi_temperature_celsius", "inlet_temp_c", where=_INLET, entity="node"),
    Metric("idrac_sensors_temperature", "inlet_temp_c", rank=1, where=_INLET, entity="node"),
    Metric("ipmi_dcmi_power_consumption_current_watts", "node_power_w", entity="node"),
    Metric("idrac_power_control_consumed_watts", "node_power_w", rank=1, entity="node"),
    Metric("ipmi_dcmi_power_consumption_watts", "node_power_w", rank=2, entity="node"),
)  # fmt: skip

BY_NAME: dict[str, tuple[Metric, ...]] = {
    name: tuple(m for m in METRICS if m.name == name) for name in dict.fromkeys(m.name for m in METRICS)
}
GPU_NAMES = tuple(name for name, rows in BY_NAME.items() if rows[0].entity == "gpu")
NODE_NAMES = tuple(name for name, rows in BY_NAME.items() if rows[0].entity == "node")

# In order of trust. `node` is set on purpose by whoever wrote the scrape configuration.
NODE_LABELS = ("node", "Hostname", "hostname", "kubernetes_node", "nodename", "host", "instance")
UUID_LABELS = ("UUID", "uuid", "gpu_uuid", "serial_number")
INDEX_LABELS = ("gpu", "gpu_id", "index", "card", "minor_number", "ordinal")
# `exported_job` is a job label that the exporter gave and Prometheus renamed; plain `job` is the scrape job.
JOB_LABELS = ("hpc_job", "job_id", "slurm_job_id", "slurm_jobid", "jobid", "exported_job")
# Series of a link, a switch or a CPU are not series of a GPU, though they carry its label.
_OTHER_ENTITIES = ("nvlink", "nvswitch", "cpu", "cpucore", "peer_gpu")
_BARE_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_INDEX = re.compile(r"[0-9]{1,5}")  # longer ones are serial numbers or nonsense, no positions
_POD_NAME = re.compile(r"exporter-[a-z0-9]{4,10}$")
_PATTERNS = {pattern: re.compile(pattern) for m in METRICS for _, pattern in m.where}


class Identity(NamedTuple):
    """Whose series it is. For a node `gpu_uuid` is empty. What no label tells is empty."""

    node: str
    gpu_uuid: str
    gpu_index: int | None
    job_id: str
    mig_instance: str = ""
    mig_profile: str = ""


def node_name(labels: Mapping[str, str]) -> str:
    """Name of the node from the labels of a series or target; empty when none tells it.

    Ports and domains are cut (`n1.example.org:9400` is `n1`), addresses stay. A `Hostname` that is the name of the
    exporter's own pod is passed over.
    """
    for label in NODE_LABELS:
        text = labels.get(label, "")
        if text and not text.startswith("<<<") and not _POD_NAME.search(text):
            return short_host(text)
    return ""


def short_host(text: str) -> str:
    """A host name without port and domain; an address without port."""
    host = text
    if text.startswith("["):
        host = text[1:].split("]", 1)[0]
    elif text.count(":") == 1:
        host = text.split(":", 1)[0]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.split(".", 1)[0]
    return host


def identify(metric: Metric, labels: Mapping[str, str], node: str = "") -> Identity | None:
    """Whose series it is.

    Args:
        metric: Row of the series' name.
        labels: Its labels.
        node: Name of the node when the caller knows it better than the labels.

    Returns:
        The identity; None when the series is not of the metric's kind of entity, does not match its `where`, or no
        label tells the node. A GPU without a usable UUID is named `<node>:<index>`.
    """
    if any(not _PATTERNS[pattern].search(labels.get(label, "")) for label, pattern in metric.where):
        return None
    node = node or node_name(labels)
    if not node:
        return None
    if metric.entity == "node":
        return Identity(node, "", None, "")
    if any(labels.get(label) for label in _OTHER_ENTITIES):
        return None
    index = next((int(labels[name]) for name in INDEX_LABELS if _INDEX.fullmatch(labels.get(name, ""))), None)
    uuid = next((labels[name] for name in UUID_LABELS if _is_id(labels.get(name, ""))), "")
    if metric.name.startswith(_SMI) and _BARE_UUID.fullmatch(uuid):
        uuid = f"GPU-{uuid}"  # nvidia_gpu_exporter strips the prefix that everyone else keeps
    if not uuid:
        if index is None:
            return None
        uuid = f"{node}:{index}"
    job = next((labels[name] for name in JOB_LABELS if labels.get(name)), "")
    return Identity(node, uuid, index, job, labels.get("GPU_I_ID", ""), labels.get("GPU_I_PROFILE", ""))


def _is_id(text: str) -> bool:
    return bool(text) and not text.startswith("<<<") and bool(text.strip("0-xN/A"))


def is_sentinel(value: pl.Expr) -> pl.Expr:
    """True where a value, as exposed and before any scale, is one of NVIDIA's "not there" numbers."""
    return (value >= INT64_SENTINEL_FROM) | value.is_in(list(INT32_SENTINELS + FP64_SENTINELS))


def _usable(name: str) -> pl.Expr:
    value = pl.col(name)
    return pl.when(value.is_finite() & ~is_sentinel(value)).then(value)


def _flag(metric: Metric) -> pl.Expr:
    value = _usable(metric.name)
    bits = pl.when(value.is_between(0, 2**53)).then(value).cast(pl.Int64)
    return (bits & metric.mask) != 0


def _quantity(metrics: list[Metric]) -> pl.Expr:
    """Value of a column from the rows that feed it and are present."""
    if metrics[0].mask:
        return pl.coalesce([_flag(m) for m in metrics])
    if metrics[0].part:
        parts = dict.fromkeys(m.part for m in metrics)
        addends = [pl.coalesce([_usable(m.name) * m.scale for m in metrics if m.part == part]) for part in parts]
        return pl.when(pl.any_horizontal([a.is_not_null() for a in addends])).then(pl.sum_horizontal(addends))
    ranked = sorted(metrics, key=lambda m: m.rank)
    if len(ranked) == 1:
        return pl.col(ranked[0].name) * ranked[0].scale
    # The first that has a usable value; when none has, whatever was received, for cleaning to count.
    usable = [_usable(m.name) * m.scale for m in ranked]
    return pl.coalesce([*usable, *(pl.col(m.name) * m.scale for m in ranked)])


def to_columns(frame: pl.DataFrame, entity: Entity) -> pl.DataFrame:
    """Registry columns from exporter columns.

    Args:
        frame: Key columns as they are to stay, and one Float64 column for each exporter metric, null where a GPU or
            node did not expose it.
        entity: Rows are GPUs or nodes.

    Returns:
        The key columns and every registry column that some metric fed, in the registry's units. Sentinels and
        impossible values are still there, scaled; only bit masks and sums take null instead. A 64-bit sentinel of
        `xid_last` becomes the 32-bit one.
    """
    by_column: dict[str, list[Metric]] = {}
    for metric in METRICS:
        if metric.entity == entity and metric.name in frame.columns:
            by_column.setdefault(metric.column, []).append(metric)
    keys = [name for name in frame.columns if name not in BY_NAME]
    wide = frame.select(*keys, *(_quantity(rows).alias(column) for column, rows in by_column.items()))
    if "fb_used_bytes" in wide.columns and "_fb_free_bytes" in wide.columns:
        # Drivers before 510 count what they hold back as used and expose no reserved figure.
        reserved = pl.col("fb_reserved_bytes").fill_null(0) if "fb_reserved_bytes" in wide.columns else pl.lit(0.0)
        total = pl.col("fb_used_bytes") + pl.col("_fb_free_bytes") + reserved
        given = [pl.col("fb_total_bytes")] if "fb_total_bytes" in wide.columns else []
        wide = wide.with_columns(pl.coalesce([*given, total]).alias("fb_total_bytes"))
    wide = wide.drop([name for name in wide.columns if name.startswith("_")])
    return wide.with_columns(_typed(name) for name in wide.columns if name in by_column or name == "fb_total_bytes")


def _typed(name: str) -> pl.Expr:
    dtype, value = COLUMNS[name].dtype, pl.col(name)
    if dtype == pl.Int32:
        value = (
            pl.when(value.abs() < INT32_SENTINELS[0])
            .then(value.round())
            .otherwise(pl.when(value.is_not_null() & value.is_not_nan()).then(INT32_SENTINELS[0]))
        )
    return value.cast(dtype).alias(name)

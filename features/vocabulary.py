"""The registry of columns and tables: each quantity once, with dtype, unit, range and meaning.

DDL, range checks, Dagster column schemas, documentation and axis titles are made from it. Here belong names and
facts about quantities; not the exporters' spellings of them (`features/metrics.py`), and no code that reads data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

TIME = pl.Datetime("us", "UTC")
STR = pl.String
BOOL = pl.Boolean
F32 = pl.Float32
F64 = pl.Float64
I32 = pl.Int32
I64 = pl.Int64


@dataclass(frozen=True, slots=True)
class Column:
    """One quantity.

    Attributes:
        name: Column name, with its unit as suffix where it has one.
        dtype: Polars dtype; the DuckDB type follows from it.
        description: What it is, in words an operator knows.
        unit: Unit of the values, empty for names and flags.
        low: Smallest value that is physically possible, None when unbounded.
        high: Largest value that is physically possible, None when unbounded.
        resolution: Values are rounded to this step before they are stored (0: as they are).
    """

    name: str
    dtype: pl.DataType | type[pl.DataType]
    description: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    resolution: float = 0.0


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the store.

    Attributes:
        name: `raw_`, `core_`, `feat_` or `out_` and a noun.
        description: What a row is.
        columns: Names of registry columns, in order.
        key: Columns that name a row; an upsert replaces rows with the same key.
        time: The column that windows, partitions and retention go by.
        sort: Order of rows inside a file.
        retention: Name of the retention setting that governs the table.
    """

    name: str
    description: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    time: str
    sort: tuple[str, ...] = field(default=())
    retention: str = "history_days"


_c = Column

_COLUMNS: tuple[Column, ...] = (
    # --- keys ---------------------------------------------------------------------------------------------
    _c("ts", TIME, "Time of the sample at its exporter, UTC"),
    _c("cluster", STR, "Name of the cluster, as in the configuration"),
    _c("node", STR, "Host name of the node"),
    _c("gpu_uuid", STR, "UUID of the GPU; keys a GPU, since indices move between boots"),
    _c("gpu_index", I32, "Index of the GPU on its node at that time", "", 0, 127),
    _c("gpu_model", STR, "Model name of the GPU as its exporter gives it"),
    _c("rack", STR, "Rack of the node"),
    _c("pod", STR, "Pod: the group of racks that share a network leaf"),
    _c("job_id", STR, "Id of the job, as its scheduler prints it"),
    # --- GPU quantities -----------------------------------------------------------------------------------
    _c("gpu_util_ratio", F32, "Share of time any kernel ran (coarse)", "ratio", 0, 1, 0.01),
    _c("engine_active_ratio", F32, "Share of time the graphics engine was active", "ratio", 0, 1, 0.001),
    _c("sm_active_ratio", F32, "Share of time streaming multiprocessors were active", "ratio", 0, 1, 0.001),
    _c("tensor_active_ratio", F32, "Share of time the tensor pipe was active", "ratio", 0, 1, 0.001),
    _c("dram_active_ratio", F32, "Share of time device memory was active", "ratio", 0, 1, 0.001),
    _c("fb_used_bytes", F32, "Device memory in use", "bytes", 0, 2**43, 2**20),
    _c("fb_reserved_bytes", F32, "Device memory held back by the driver", "bytes", 0, 2**40, 2**20),
    _c("fb_total_bytes", F32, "Device memory in all: used + free + reserved", "bytes", 0, 2**43, 2**20),
    _c("gpu_power_w", F32, "Board power", "W", 0, 3000, 0.5),
    _c("power_limit_w", F32, "Enforced power limit", "W", 0, 3000, 1.0),
    _c("gpu_temp_c", F32, "Core temperature", "°C", -10, 125, 1.0),
    _c("mem_temp_c", F32, "Memory temperature", "°C", -10, 125, 1.0),
    _c("gpu_temp_margin_c", F32, "Degrees left until the nearest slowdown", "°C", -60, 125, 1.0),
    _c("sm_clock_hz", F32, "Clock of the streaming multiprocessors", "Hz", 0, 6e9, 1e6),
    _c("mem_clock_hz", F32, "Memory clock", "Hz", 0, 2e10, 1e6),
    _c("nvlink_tx_bytes_per_s", F32, "Sent over all NVLinks of the GPU", "bytes/s", 0, 4e12, 1e8),
    _c("nvlink_rx_bytes_per_s", F32, "Received over all NVLinks of the GPU", "bytes/s", 0, 4e12, 1e8),
    _c("pcie_tx_bytes_per_s", F32, "Sent over PCIe, device to host", "bytes/s", 0, 3e11, 1e7),
    _c("pcie_rx_bytes_per_s", F32, "Received over PCIe, host to device", "bytes/s", 0, 3e11, 1e7),
    _c("is_thermal_slowdown", BOOL, "A thermal slowdown reason is active"),
    _c("is_power_brake", BOOL, "The external power brake is active"),
    _c("is_power_capped", BOOL, "Clocks are held down by the power cap"),
    _c("xid_last", I32, "Last XID code the driver reported (a category, not a count)", "", 0, 10_000),
    _c("ecc_uncorrected_total", F32, "Uncorrected ECC errors since driver load", "errors", 0, 1e9),
    _c("remapped_rows_total", F32, "Memory rows remapped after uncorrectable errors", "rows", 0, 1e6),
    _c("nvlink_error_total", F32, "NVLink replay, recovery and CRC errors", "errors", 0, 1e12),
    _c("step_time_s", F32, "Duration of the job's last training step, as the job reports it", "s", 0, 86_400, 0.001),
    # --- node quantities ----------------------------------------------------------------------------------
    _c("inlet_temp_c", F32, "Temperature of the air at the node's inlet", "°C", -10, 80, 0.5),
    _c("node_power_w", F32, "Power of the whole node", "W", 0, 60_000, 1.0),
    _c("is_up", BOOL, "The node answered its last scrape"),
    # --- jobs ---------------------------------------------------------------------------------------------
    _c("user", STR, "Owner of the job"),
    _c("account", STR, "Account the job is charged to"),
    _c("queue", STR, "Partition or queue"),
    _c("name", STR, "Job name"),
    _c("submit_time", TIME, "When the job was submitted"),
    _c("eligible_time", TIME, "When the job could first have started"),
    _c("start_time", TIME, "When the job started; null if it never did"),
    _c("end_time", TIME, "When the job ended; null while it runs"),
    _c("nodes", I32, "Nodes asked for", "nodes", 0, 1_000_000),
    _c("cpus", I32, "CPUs asked for", "CPUs", 0, 2_000_000_000),
    _c("gpus", I32, "GPUs asked for", "GPUs", 0, 10_000_000),
    _c("memory_mib", I64, "Host memory asked for", "MiB", 0, None),
    _c("time_limit_s", I64, "Time limit asked for; null when unlimited", "s", 0, None),
    _c("state", STR, "Job state: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, …"),
    _c("node_list", STR, "Nodes of the job, comma separated and expanded; null before it starts"),
    _c("reason", STR, "Why the job is pending, in the scheduler's words"),
    _c("planned_start_time", TIME, "The scheduler's own planned start of a pending job"),
    _c("observed_at", TIME, "When this state of the row was read"),
    # --- faults, labels -----------------------------------------------------------------------------------
    _c("bottleneck_class", STR, "Bottleneck class: thermal_throttle, nvlink_saturation, memory_exhaustion, …"),
    _c("onset_time", TIME, "When the condition went from clear to set"),
    _c("clear_time", TIME, "When it went back; null while it lasts"),
    _c("is_censored", BOOL, "The label is unknown: acted on, drained, silenced or unobserved"),
    _c("kind", STR, "Which kind of thing the row speaks of"),
    _c("xid", I32, "XID code of the fault, when it has one", "", 0, 10_000),
    # --- data quality -------------------------------------------------------------------------------------
    _c("window_start", TIME, "Start of the window, included"),
    _c("window_end", TIME, "End of the window, excluded"),
    _c("source", STR, "Source the rows came from"),
    _c("table_name", STR, "Table the finding is about"),
    _c("column_name", STR, "Column the finding is about"),
    _c("count", I64, "How many", "", 0, None),
    _c("example", STR, "One series where it was seen"),
    # --- forecasts and hints ------------------------------------------------------------------------------
    _c("generated_at", TIME, "When the forecast was made"),
    _c("valid_until", TIME, "When the forecast stops being valid"),
    _c("data_age_s", F64, "Age of the newest input when the forecast was made", "s", 0, None),
    _c("model_version", STR, "Version of the model in the registry, or the name of the baseline"),
    _c("forecast", STR, "What is forecast: runtime, remaining, wait"),
    _c("q05_s", F64, "5 % quantile", "s", 0, None),
    _c("q10_s", F64, "10 % quantile", "s", 0, None),
    _c("q25_s", F64, "25 % quantile", "s", 0, None),
    _c("q50_s", F64, "Median", "s", 0, None),
    _c("q75_s", F64, "75 % quantile", "s", 0, None),
    _c("q80_s", F64, "80 % quantile", "s", 0, None),
    _c("q90_s", F64, "90 % quantile", "s", 0, None),
    _c("q95_s", F64, "95 % quantile", "s", 0, None),
    _c("p_fail", F64, "Probability that the job ends badly", "ratio", 0, 1),
    _c("p_start_60s", F64, "Probability that the job starts within 1 minute", "ratio", 0, 1),
    _c("p_start_600s", F64, "Probability that the job starts within 10 minutes", "ratio", 0, 1),
    _c("p_start_3600s", F64, "Probability that the job starts within 1 hour", "ratio", 0, 1),
    _c("p_1h", F64, "Probability of a fault within 1 hour", "ratio", 0, 1),
    _c("p_24h", F64, "Probability of a fault within 24 hours", "ratio", 0, 1),
    _c("p_7d", F64, "Probability of a fault within 7 days", "ratio", 0, 1),
    _c("reasons", STR, "Reasons in words, separated by semicolons"),
    _c("hint_id", STR, "Id of the hint: stable while the same thing is foreseen"),
    _c("version", I64, "Version of the snapshot the hint was in", "", 0, None),
    _c("scope", STR, "gpu, link, node, rack, pod or queue"),
    _c("horizon_s", I32, "How far ahead", "s", 0, 86_400),
    _c("probability", F64, "Calibrated probability", "ratio", 0, 1),
    _c("expected_onset", TIME, "When the onset is expected"),
    _c("action", STR, "Suggested or taken action"),
    _c("detail", STR, "Further facts, as JSON"),
    _c("task", STR, "Forecasting task: runtime, job_failure, node_failure, wait, bottleneck"),
    _c("metric", STR, "Name of a score"),
    _c("baseline", STR, "Name of the baseline the score stands beside; empty for the model"),
    _c("value", F64, "Value of the score"),
    _c("low", F64, "Lower end of the 95 % interval of the score"),
    _c("high", F64, "Upper end of the 95 % interval of the score"),
    _c("actor", STR, "Who acted"),
    _c("is_applied", BOOL, "The action was carried out, not only advised"),
)

COLUMNS: dict[str, Column] = {column.name: column for column in _COLUMNS}

GPU_KEYS = ("ts", "cluster", "node", "gpu_uuid", "gpu_index", "job_id")
GPU_QUANTITIES = (
    "gpu_util_ratio", "engine_active_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio",
    "fb_used_bytes", "fb_reserved_bytes", "fb_total_bytes", "gpu_power_w", "power_limit_w", "gpu_temp_c",
    "mem_temp_c", "gpu_temp_margin_c", "sm_clock_hz", "mem_clock_hz", "nvlink_tx_bytes_per_s",
    "nvlink_rx_bytes_per_s", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "is_thermal_slowdown",
    "is_power_brake", "is_power_capped", "xid_last", "ecc_uncorrected_total", "remapped_rows_total",
    "nvlink_error_total", "step_time_s",
)  # fmt: skip
NODE_QUANTITIES = ("inlet_temp_c", "node_power_w", "is_up")
JOB_COLUMNS = (
    "cluster", "job_id", "user", "account", "queue", "name", "submit_time", "eligible_time", "start_time",
    "end_time", "nodes", "cpus", "gpus", "memory_mib", "time_limit_s", "state", "node_list", "reason",
    "planned_start_time", "observed_at",
)  # fmt: skip
QUANTILES = (0.05, 0.10, 0.25, 0.50, 0.75, 0.80, 0.90, 0.95)
QUANTILE_COLUMNS = tuple(f"q{round(q * 100):02d}_s" for q in QUANTILES)

_FORECAST = ("generated_at", "valid_until", "data_age_s", "model_version")

_TABLES: tuple[Table, ...] = (
    Table(
        "raw_gpu_samples", "A GPU at one time, as its exporter gave it, before any cleaning",
        GPU_KEYS + GPU_QUANTITIES, ("cluster", "node", "gpu_uuid", "ts"), "ts", ("gpu_uuid", "ts"), "raw_days",
    ),
    Table(
        "core_gpu_samples", "A GPU at one time: cleaned, keyed, deduplicated",
        GPU_KEYS + GPU_QUANTITIES, ("cluster", "node", "gpu_uuid", "ts"), "ts", ("gpu_uuid", "ts"), "samples_days",
    ),
    Table(
        "core_node_samples", "A node at one time",
        ("ts", "cluster", "node", *NODE_QUANTITIES), ("cluster", "node", "ts"), "ts", ("node", "ts"), "samples_days",
    ),
    Table(
        "core_gpu_minutes", "A GPU over one minute: means of the quantities, any of the flags",
        GPU_KEYS + GPU_QUANTITIES, ("cluster", "node", "gpu_uuid", "ts"), "ts", ("gpu_uuid", "ts"), "minutes_days",
    ),
    Table(
        "core_gpu_hours", "A GPU over one hour: means of the quantities, any of the flags",
        GPU_KEYS + GPU_QUANTITIES, ("cluster", "node", "gpu_uuid", "ts"), "ts", ("gpu_uuid", "ts"), "hours_days",
    ),
    Table(
        "raw_jobs", "A job as its source last gave it",
        JOB_COLUMNS, ("cluster", "job_id", "submit_time"), "submit_time", ("submit_time",), "history_days",
    ),
    Table(
        "core_jobs", "A job in its newest known state, states and times made consistent",
        JOB_COLUMNS, ("cluster", "job_id", "submit_time"), "submit_time", ("submit_time",), "history_days",
    ),
    Table(
        "core_nodes", "A node of the inventory",
        ("observed_at", "cluster", "node", "rack", "pod", "gpu_model", "gpus", "state", "reason"),
        ("cluster", "node"), "observed_at", ("node",), "history_days",
    ),
    Table(
        "core_faults", "A hardware fault of a node or GPU",
        ("cluster", "node", "gpu_uuid", "kind", "xid", "start_time", "end_time"),
        ("cluster", "node", "gpu_uuid", "kind", "start_time"), "start_time", ("node", "start_time"), "history_days",
    ),
    Table(
        "core_data_quality", "How many values of a window were impossible, missing or duplicate, and why",
        ("window_start", "window_end", "cluster", "source", "table_name", "column_name", "reason", "count", "example"),
        ("window_start", "cluster", "source", "table_name", "column_name", "reason"), "window_start",
        ("window_start",), "history_days",
    ),
    Table(
        "feat_labels", "A bottleneck that happened: its onset and end by the label rule",
        ("cluster", "node", "gpu_uuid", "job_id", "bottleneck_class", "onset_time", "clear_time", "is_censored"),
        ("cluster", "gpu_uuid", "bottleneck_class", "onset_time"), "onset_time", ("onset_time",), "history_days",
    ),
    Table(
        "out_job_forecasts", "A forecast made for one job",
        (*_FORECAST, "cluster", "job_id", "submit_time", "state", "forecast", *QUANTILE_COLUMNS, "p_fail",
         "p_start_60s", "p_start_600s", "p_start_3600s"),
        ("cluster", "job_id", "forecast", "generated_at"), "generated_at", ("job_id", "generated_at"), "hints_days",
    ),
    Table(
        "out_node_risks", "A forecast of faults for one node",
        (*_FORECAST, "cluster", "node", "p_1h", "p_24h", "p_7d", "reasons"),
        ("cluster", "node", "generated_at"), "generated_at", ("node", "generated_at"), "hints_days",
    ),
    Table(
        "out_hints", "A hint as it was published: bottleneck, window or plan",
        (*_FORECAST, "cluster", "kind", "hint_id", "version", "bottleneck_class", "scope", "node", "gpu_uuid",
         "job_id", "horizon_s", "probability", "expected_onset", "action", "detail"),
        ("cluster", "kind", "hint_id", "version", "horizon_s"), "generated_at", ("generated_at",), "hints_days",
    ),
    Table(
        "out_actions", "What an agent did or would have done on a scheduler",
        ("ts", "cluster", "actor", "action", "hint_id", "node", "job_id", "is_applied", "reason", "detail"),
        ("cluster", "ts", "actor", "action", "node", "job_id"), "ts", ("ts",), "hints_days",
    ),
    Table(
        "out_scores", "How a model and its baselines did on outcomes that are known by now",
        ("ts", "cluster", "task", "model_version", "baseline", "metric", "value", "low", "high", "count"),
        ("ts", "cluster", "task", "model_version", "baseline", "metric"), "ts", ("ts",), "history_days",
    ),
)  # fmt: skip

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}


def schema(table: str) -> dict[str, pl.DataType | type[pl.DataType]]:
    """Polars schema of a table.

    Args:
        table: Name of a registry table.

    Returns:
        Column name to dtype, in order.

    Raises:
        KeyError: The table is not in the registry; the message lists those that are.
    """
    if table not in TABLES:
        raise KeyError(f"no table {table!r} in the registry; tables: {', '.join(sorted(TABLES))}")
    return {name: COLUMNS[name].dtype for name in TABLES[table].columns}


def conform(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    """Bring a frame into a table's columns, order and dtypes; absent columns become null.

    Args:
        frame: Any subset of the table's columns, in any order.
        table: Name of a registry table.

    Returns:
        A frame with exactly the table's columns.

    Raises:
        KeyError: The table is unknown.
        ValueError: The frame has columns that the table has not, or lacks key columns; the message names them.
    """
    wanted = schema(table)
    extra = [name for name in frame.columns if name not in wanted]
    if extra:
        raise ValueError(f"columns not in {table}: {', '.join(extra)}; it has: {', '.join(wanted)}")
    missing = [name for name in TABLES[table].key if name not in frame.columns]
    if missing:
        raise ValueError(f"{table} is keyed by {', '.join(TABLES[table].key)}; missing: {', '.join(missing)}")
    return frame.select(
        pl.col(name).cast(dtype) if name in frame.columns else pl.lit(None, dtype=dtype).alias(name)
        for name, dtype in wanted.items()
    )

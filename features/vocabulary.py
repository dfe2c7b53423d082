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
        optional: Columns of the key that a frame may lack; they are null then.
    """

    name: str
    description: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    time: str
    sort: tuple[str, ...] = field(default=())
    retention: str = "history_days"
    optional: tuple[str, ...] = ()


_c = Column
PHASES = ("startup", "train", "evaluation", "checkpoint")  # of `phase`

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
    _c("mig_instance", STR, "Id of the MIG instance on its GPU; null for a whole GPU"),
    _c("mig_profile", STR, "Profile of the MIG instance, as 1g.10gb"),
    _c("unknown_flags", STR, "Columns of the flags whose value was a number for 'not there'"),
    _c("device", STR, "Network device, as mlx5_0"),
    _c("port", STR, "Port of the network device"),
    _c("link", I32, "Number of the NVLink on its GPU", "", 0, 255),
    _c("slot", STR, "Where a board sits: its PCI bus id, else its index"),
    _c("power_domain", STR, "Power domain of the node: what one breaker or feed carries"),
    _c("nvlink_domain", STR, "NVLink domain of the node: the nodes that one NVLink fabric joins"),
    _c("driver_version", STR, "Version of the GPU driver"),
    _c("vbios_version", STR, "Version of the GPU's VBIOS"),
    _c("serial_number", STR, "Serial number of the board"),
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
    _c("is_power_brake", BOOL, "The external power brake, or another hardware slowdown that is not thermal, is active"),
    _c("is_power_capped", BOOL, "Clocks are held down by the power cap"),
    _c("xid_last", I32, "Last XID code the driver reported (a category, not a count)", "", 0, 10_000),
    _c("ecc_uncorrected_total", F32, "Uncorrected ECC errors since driver load", "errors", 0, 1e9),
    _c("remapped_rows_total", F32, "Memory rows remapped after uncorrectable errors", "rows", 0, 1e6),
    _c("nvlink_error_total", F32, "NVLink replay, recovery and CRC errors", "errors", 0, 1e12),
    _c("step_time_s", F32, "Duration of the job's last training step, as the job reports it", "s", 1e-6, 86_400, 0.001),
    _c("communication_time_s", F32, "Part of the job's last step that waited for communication", "s", 0, 86_400, 0.001),
    _c(
        "own_step_time_s",
        F32,
        "Time that the rank on this GPU itself needed for the job's last step, without the wait for its gang",
        "s",
        1e-6,
        86_400,
        0.001,
    ),
    # --- GPU health: counters and states that change seldom -----------------------------------------------
    _c("energy_total_j", F64, "Energy used since the driver was loaded", "J", 0, 1e15),
    _c(
        "mem_copy_util_ratio",
        F32,
        "Share of time device memory was read or written (not its fill)",
        "ratio",
        0,
        1,
        0.01,
    ),
    _c("encoder_util_ratio", F32, "Utilisation of the video encoder", "ratio", 0, 1, 0.01),
    _c("decoder_util_ratio", F32, "Utilisation of the video decoder", "ratio", 0, 1, 0.01),
    _c("sm_occupancy_ratio", F32, "Resident warps as share of the possible", "ratio", 0, 1, 0.001),
    _c("fp64_active_ratio", F32, "Share of time the FP64 pipe was active", "ratio", 0, 1, 0.001),
    _c("fp32_active_ratio", F32, "Share of time the FP32 pipe was active", "ratio", 0, 1, 0.001),
    _c("fp16_active_ratio", F32, "Share of time the FP16 pipe was active", "ratio", 0, 1, 0.001),
    _c("pcie_replay_total", F64, "PCIe retries", "retries", 0, 1e12),
    _c("pcie_link_gen", I32, "Generation of the PCIe link now (lower at idle)", "", 0, 10),
    _c("pcie_link_width", I32, "Lanes of the PCIe link now", "lanes", 0, 32),
    _c("ecc_corrected_total", F64, "Corrected ECC errors since driver load", "errors", 0, 1e12),
    _c("ecc_uncorrected_aggregate_total", F64, "Uncorrected ECC errors over the board's life", "errors", 0, 1e9),
    _c("ecc_corrected_aggregate_total", F64, "Corrected ECC errors over the board's life", "errors", 0, 1e15),
    _c("remapped_rows_correctable_total", F64, "Memory rows remapped after correctable errors", "rows", 0, 1e6),
    _c("retired_pages_total", F64, "Memory pages retired", "pages", 0, 1e6),
    _c("is_remap_failed", BOOL, "A row could not be remapped: the board wants replacing"),
    _c("is_remap_pending", BOOL, "A row is remapped at the next reset"),
    _c("power_violation_s_total", F64, "Time held back by the power limit since driver load", "s", 0, 1e10),
    _c("thermal_violation_s_total", F64, "Time held back by heat since driver load", "s", 0, 1e10),
    _c("reliability_violation_s_total", F64, "Time held back by reliability limits since driver load", "s", 0, 1e10),
    _c("board_limit_violation_s_total", F64, "Time held back by the board's limit since driver load", "s", 0, 1e10),
    _c("sync_boost_violation_s_total", F64, "Time held back by sync boost since driver load", "s", 0, 1e10),
    _c("low_util_violation_s_total", F64, "Time clocks were low for lack of work since driver load", "s", 0, 1e10),
    _c("xid_events", F64, "XID errors counted by the exporter: of a rolling window, else ever", "events", 0, 1e6),
    _c("xid_counts", STR, "The same by code, as `31=3 79=1`; behind counts since the exporter began stands a +"),
    _c(
        "recovery_action",
        I32,
        "What the driver asks for: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset",
        "",
        0,
        10,
    ),
    # --- NVLinks one by one -------------------------------------------------------------------------------
    _c("link_tx_bytes_per_s", F32, "Sent over one NVLink", "bytes/s", 0, 4e11, 1e7),
    _c("link_rx_bytes_per_s", F32, "Received over one NVLink", "bytes/s", 0, 4e11, 1e7),
    _c("link_error_total", F64, "Errors of one NVLink", "errors", 0, 1e12),
    _c("is_link_up", BOOL, "The link or port is up"),
    # --- network ports: counters as received, then rates --------------------------------------------------
    _c("tx_bytes_total", F64, "Sent since the counter began", "bytes", 0, None),
    _c("rx_bytes_total", F64, "Received since the counter began", "bytes", 0, None),
    _c("transmit_wait_total", F64, "Ticks a packet waited for credits", "ticks", 0, None),
    _c("ecn_marked_total", F64, "Packets received with an ECN mark", "packets", 0, None),
    _c("cnp_total", F64, "Congestion notification packets sent or handled", "packets", 0, None),
    _c("retransmits_total", F64, "Retransmissions, time-outs and packets out of sequence", "packets", 0, None),
    _c("port_errors_total", F64, "Symbol, integrity, receive and discard errors", "errors", 0, None),
    _c("link_downed_total", F64, "How often the link went down", "", 0, None),
    _c("tx_bytes_per_s", F32, "Sent over the port", "bytes/s", 0, 1e12, 1e6),
    _c("rx_bytes_per_s", F32, "Received over the port", "bytes/s", 0, 1e12, 1e6),
    _c("speed_bytes_per_s", F64, "Speed of the port, one direction", "bytes/s", 0, 1e12),
    _c("transmit_wait_per_s", F32, "Ticks a packet waited for credits", "ticks/s", 0, 1e10, 1.0),
    _c("ecn_marked_per_s", F32, "Packets received with an ECN mark", "packets/s", 0, 1e10, 0.1),
    _c("cnp_per_s", F32, "Congestion notification packets", "packets/s", 0, 1e10, 0.1),
    _c("retransmits_per_s", F32, "Retransmissions, time-outs and packets out of sequence", "packets/s", 0, 1e10, 0.1),
    _c("port_errors_per_s", F32, "Symbol, integrity, receive and discard errors", "errors/s", 0, 1e10, 0.01),
    # --- node quantities ----------------------------------------------------------------------------------
    _c("inlet_temp_c", F32, "Temperature of the air at the node's inlet", "°C", -10, 80, 0.5),
    _c("hall_temp_c", F32, "Temperature of the room's air, as a sensor named for it tells", "°C", -10, 80, 0.5),
    _c("node_power_w", F32, "Power of the whole node", "W", 0, 60_000, 1.0),
    _c(
        "host_mem_available_bytes",
        F32,
        "Host memory that work may still have without swapping",
        "bytes",
        0,
        2**46,
        2**20,
    ),
    _c("host_mem_total_bytes", F32, "Host memory in all", "bytes", 0, 2**46, 2**20),
    _c("oom_kills_total", F64, "Processes that the kernel killed for want of memory since it started", "", 0, 1e9),
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
    _c("memory_mib", I64, "Host memory asked for", "MiB", 0, 2**44),  # bytes fit into 64 bits
    _c("time_limit_s", I64, "Time limit asked for; null when unlimited", "s", 0, 3_155_760_000),  # a century
    _c("state", STR, "Job state: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, …"),
    _c("node_list", STR, "Nodes of the job, comma separated and expanded; null before it starts"),
    _c("reason", STR, "Why the job is pending, in the scheduler's words"),
    _c("planned_start_time", TIME, "The scheduler's own planned start of a pending job"),
    _c("observed_at", TIME, "When this state of the row was read"),
    _c("exit_code", STR, "Exit code and signal, as 0:9"),
    _c("restarts", I32, "How often the job had been requeued before this attempt", "", 0, 1_000_000),
    _c("array_job_id", STR, "Id of the array or heterogeneous job that the job is a part of"),
    _c("array_task", I32, "Index of the job among the tasks of its array; null for one job", "", 0, 2_000_000_000),
    _c("array_tasks", I32, "Tasks that a pending row of an array stands for; null for one job", "", 0, 10_000_000),
    _c("gpu_type", STR, "Kind of GPU asked for, as the scheduler names it; null where any will do"),
    _c("node_features", STR, "Features asked of the nodes, as the scheduler writes them; null where any will do"),
    _c("preempted_by", STR, "Job that took its place; null where nothing tells it"),
    _c("elapsed_s", I64, "Time it ran, without suspensions; null until it ended", "s", 0, 3_155_760_000),
    _c("steps", I32, "Steps that were started within it, batch script not counted", "steps", 0, 2_000_000_000),
    _c("last_step_state", STR, "State of the step that ended last; of the batch script where there is no other"),
    _c("last_step_exit_code", STR, "Exit code and signal of that step, as 0:9"),
    _c("max_rss_bytes", I64, "Most resident memory of any task of its steps", "bytes", 0, 2**53),
    _c("priority", F64, "Priority of a pending job, the scheduler's own scale"),
    _c("priority_age", F64, "Part of the priority that waiting has earned"),
    _c("priority_fairshare", F64, "Part of the priority for what user and account have used less than their share"),
    _c("priority_job_size", F64, "Part of the priority for the size of the job"),
    _c("priority_partition", F64, "Part of the priority that the partition gives"),
    _c("priority_qos", F64, "Part of the priority that the QOS gives"),
    _c("priority_tres", F64, "Part of the priority for CPUs, memory, GPUs and other resources asked for, together"),
    _c("priority_association", F64, "Part of the priority that the association gives"),
    _c("priority_site", F64, "Part of the priority that the site's own plugin or an administrator gives"),
    _c("priority_nice", F64, "What is taken from the priority at the user's or an administrator's word"),
    _c("is_shared", BOOL, "Several jobs share the GPU on purpose"),
    _c("users", STR, "Users it is for, comma separated"),
    _c("accounts", STR, "Accounts it is for, comma separated"),
    _c("flags", STR, "The scheduler's flags, comma separated"),
    # --- faults, labels -----------------------------------------------------------------------------------
    _c("bottleneck_class", STR, "Bottleneck class: thermal_throttle, nvlink_saturation, memory_exhaustion, …"),
    _c("onset_time", TIME, "When the condition went from clear to set"),
    _c("clear_time", TIME, "When it went back; null while it lasts"),
    _c("is_censored", BOOL, "The label is unknown: acted on, drained, silenced or unobserved"),
    _c("kind", STR, "Which kind of thing the row speaks of"),
    _c("xid", I32, "XID code of the fault, when it has one", "", 0, 10_000),
    _c("sign", STR, "Sign of a coming fault: ecc, remap, nvlink, xid, hot or silent"),
    _c("amount", F64, "How much of the sign: errors or rows that were added, else 1", "", 0, 1e12),
    _c("lemon_score", F64, "Share of the signals of bad hardware that the node has shown in 28 days", "ratio", 0, 1),
    _c("spare_rank", I32, "Place among the cluster's nodes as a spare, the least likely to fault first", "", 1, None),
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
    _c("forecast", STR, "What is forecast: runtime, remaining, wait; of outcomes also failure"),
    _c("q05_s", F64, "5 % quantile", "s", 0, None),
    _c("q10_s", F64, "10 % quantile", "s", 0, None),
    _c("q25_s", F64, "25 % quantile", "s", 0, None),
    _c("q50_s", F64, "Median", "s", 0, None),
    _c("mode_s", F64, "Most likely: the runtime that most probability lies within 25 % of", "s", 0, None),
    _c("q75_s", F64, "75 % quantile", "s", 0, None),
    _c("q80_s", F64, "80 % quantile", "s", 0, None),
    _c("q90_s", F64, "90 % quantile", "s", 0, None),
    _c("q95_s", F64, "95 % quantile", "s", 0, None),
    _c("quantity", STR, "What of demand is forecast: arrivals, asked_hours, in_demand"),
    _c("unit", STR, "What it is counted in: jobs, gpus, cpus"),
    _c("horizon_h", I32, "How far ahead, from the last full hour", "h", 1, 8_760),
    _c("target_time", TIME, "End of the hour that is forecast"),
    _c("q05", F64, "5 % quantile of the quantity", "", 0, None),
    _c("q10", F64, "10 % quantile of the quantity", "", 0, None),
    _c("q25", F64, "25 % quantile of the quantity", "", 0, None),
    _c("q50", F64, "Point forecast of the quantity", "", 0, None),
    _c("q75", F64, "75 % quantile of the quantity", "", 0, None),
    _c("q80", F64, "80 % quantile of the quantity", "", 0, None),
    _c("q90", F64, "90 % quantile of the quantity", "", 0, None),
    _c("q95", F64, "95 % quantile of the quantity", "", 0, None),
    _c("last_value", F64, "The quantity in the last full hour", "", 0, None),
    _c("last_week_value", F64, "The quantity at the same hour of the newest week known", "", 0, None),
    _c("p_fail", F64, "Probability that the job ends badly", "ratio", 0, 1),
    _c("p_timeout", F64, "Probability that it ends at its time limit; part of p_fail", "ratio", 0, 1),
    _c("p_node_failure", F64, "Probability that a node failure ends it; part of p_fail", "ratio", 0, 1),
    _c("p_out_of_memory", F64, "Probability that it runs out of memory; part of p_fail", "ratio", 0, 1),
    _c("lost_gpu_hours", F64, "Expected to be lost to any bad end without checkpoints", "GPU-hours", 0),
    _c("lost_gpu_hours_hardware", F64, "Of these, expected to be lost to node failures", "GPU-hours", 0),
    _c(
        "lost_gpu_hours_checkpointed",
        F64,
        "Expected to be lost to node failures with checkpoints each checkpoint_interval_s, and their own time",
        "GPU-hours",
        0,
    ),
    _c("checkpoint_interval_s", F64, "Work between two checkpoints, from failures of jobs of its size", "s", 0, None),
    _c("p_start_60s", F64, "Probability that the job starts within 1 minute", "ratio", 0, 1),
    _c("p_start_600s", F64, "Probability that the job starts within 10 minutes", "ratio", 0, 1),
    _c("p_start_3600s", F64, "Probability that the job starts within 1 hour", "ratio", 0, 1),
    _c("p_1h", F64, "Probability of a fault within 1 hour", "ratio", 0, 1),
    _c("p_24h", F64, "Probability of a fault within 24 hours", "ratio", 0, 1),
    _c("p_7d", F64, "Probability of a fault within 7 days", "ratio", 0, 1),
    _c("reasons", STR, "Reasons in words, separated by semicolons"),
    _c("hint_id", STR, "Id of the hint: stable while the same thing is foreseen"),
    _c("version", I64, "Version of the snapshot the hint was in", "", 0, None),
    _c("scope", STR, "What it befalls: gpu, link, port, rank, node, rack, pod or queue"),
    _c("silence_id", STR, "Id of the silence"),
    _c("is_held_out", BOOL, "Nothing was done about it, so that it could be seen whether it comes true"),
    _c("verdict", STR, "What became of a hint: true, false or censored"),
    _c("lead_s", F64, "Time from a hint's visibility to the onset", "s", 0, 86_400),
    _c("claimed_until", TIME, "When a hint said at the latest that it would have begun, UTC"),
    _c("scope_id", STR, "Which one: UUID, node, node/device/port, job/rank, or the queue"),
    _c("horizon_s", I32, "How far ahead", "s", 0, 86_400),
    _c("probability", F64, "Calibrated probability", "ratio", 0, 1),
    _c("expected_onset", TIME, "When the onset is expected"),
    _c("action", STR, "Suggested or taken action"),
    _c("detail", STR, "Further facts, as JSON"),
    _c(
        "task",
        STR,
        "Forecasting task: runtime, job_failure, node_failure, wait, bottleneck, level; published_…: as published; "
        "inputs",
    ),
    _c("released_at", TIME, "When the outcome was known: the start of the job for its wait, else its end"),
    _c(
        "landmark_s",
        I32,
        "Judged at this time of the wait or run, by the first forecast after it; 0: the first of all",
        "s",
        0,
        None,
    ),
    _c("actual_s", F64, "What came: runtime; of wait and remaining what was left when the forecast was made", "s", 0),
    _c("baseline_s", F64, "What the baseline would have said at that moment", "s", 0, None),
    _c("baseline_p_fail", F64, "Probability of a bad end that the baseline would have said", "ratio", 0, 1),
    _c("planned_s", F64, "What was left until the start that the scheduler had planned when it was made", "s", 0, None),
    _c("metric", STR, "Name of a score"),
    _c("baseline", STR, "Name of the baseline the score stands beside; empty for the model"),
    _c("value", F64, "Value of the score"),
    _c("low", F64, "Lower end of the 95 % interval of the score"),
    _c("high", F64, "Upper end of the 95 % interval of the score"),
    _c("rank", I32, "Process of a job, as its application numbers them; null: the job as a whole", "", 0, 10_000_000),
    _c("step", I64, "Training steps that are done, as the job reports it", "steps", 0, 2**53),
    _c("max_steps", I64, "Training steps after which the job will be done, as it reports it", "steps", 1, 2**53),
    _c("loss", F64, "Loss of training, as the job reports it"),
    _c("phase", STR, f"What the job is at, as it reports it: {', '.join(PHASES)}"),
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
    "nvlink_error_total", "step_time_s", "own_step_time_s",
)  # fmt: skip
NODE_QUANTITIES = (
    "inlet_temp_c", "hall_temp_c", "node_power_w", "is_up", "host_mem_available_bytes", "host_mem_total_bytes",
    "oom_kills_total",
)  # fmt: skip
JOB_COLUMNS = (
    "cluster", "job_id", "user", "account", "queue", "name", "submit_time", "eligible_time", "start_time",
    "end_time", "nodes", "cpus", "gpus", "memory_mib", "time_limit_s", "state", "node_list", "reason",
    "planned_start_time", "observed_at",
)  # fmt: skip
# What only some schedulers tell of a job; frames of jobs may lack these.
JOB_EXTRAS = (
    "exit_code", "restarts", "array_job_id", "array_tasks", "preempted_by", "elapsed_s", "steps", "last_step_state",
    "last_step_exit_code", "max_rss_bytes", "array_task", "gpu_type", "node_features",
)  # fmt: skip
# Counters and states of a GPU that change seldom: kept once a minute, apart from the samples.
GPU_HEALTH = (
    "energy_total_j", "mem_copy_util_ratio", "encoder_util_ratio", "decoder_util_ratio", "sm_occupancy_ratio",
    "fp64_active_ratio", "fp32_active_ratio", "fp16_active_ratio", "pcie_replay_total", "pcie_link_gen",
    "pcie_link_width", "ecc_corrected_total", "ecc_uncorrected_aggregate_total", "ecc_corrected_aggregate_total",
    "remapped_rows_correctable_total", "retired_pages_total", "is_remap_failed", "is_remap_pending",
    "power_violation_s_total", "thermal_violation_s_total", "reliability_violation_s_total",
    "board_limit_violation_s_total", "sync_boost_violation_s_total", "low_util_violation_s_total", "xid_events",
    "xid_counts", "recovery_action", "unknown_flags",
)  # fmt: skip
BOARD_FACTS = ("slot", "gpu_model", "driver_version", "vbios_version", "serial_number")
LINK_KEYS = ("ts", "cluster", "node", "gpu_uuid", "link")
LINK_QUANTITIES = ("link_tx_bytes_per_s", "link_rx_bytes_per_s", "link_error_total", "is_link_up", "unknown_flags")
PORT_KEYS = ("ts", "cluster", "node", "device", "port")
# Counter of a port → the rate made of it.
PORT_RATES = {
    "tx_bytes_total": "tx_bytes_per_s", "rx_bytes_total": "rx_bytes_per_s",
    "transmit_wait_total": "transmit_wait_per_s", "ecn_marked_total": "ecn_marked_per_s", "cnp_total": "cnp_per_s",
    "retransmits_total": "retransmits_per_s", "port_errors_total": "port_errors_per_s",
}  # fmt: skip
PORT_STATES = ("speed_bytes_per_s", "link_downed_total", "is_link_up")
PROGRESS_QUANTITIES = (
    "step",
    "step_time_s",
    "communication_time_s",
    "loss",
    "phase",
    "max_steps",
)  # a row of a job's progress has one of them at least
QUANTILES = (0.05, 0.10, 0.25, 0.50, 0.75, 0.80, 0.90, 0.95)
QUANTILE_COLUMNS = tuple(f"q{round(q * 100):02d}_s" for q in QUANTILES)
DEMAND_QUANTILE_COLUMNS = tuple(f"q{round(q * 100):02d}" for q in QUANTILES)

_FORECAST = ("generated_at", "valid_until", "data_age_s", "model_version")

_TABLES: tuple[Table, ...] = (
    Table(
        "raw_gpu_samples", "A GPU at one time, as its exporter gave it, before any cleaning",
        (*GPU_KEYS, "mig_instance", "mig_profile", *GPU_QUANTITIES, "unknown_flags"),
        ("cluster", "node", "gpu_uuid", "mig_instance", "job_id", "ts"), "ts", ("gpu_uuid", "ts"), "raw_days",
        ("mig_instance", "job_id"),
    ),
    Table(
        "core_gpu_samples", "A GPU at one time: cleaned, keyed, deduplicated",
        GPU_KEYS + GPU_QUANTITIES, ("cluster", "node", "gpu_uuid", "ts"), "ts", ("gpu_uuid", "ts"), "samples_days",
    ),
    Table(
        "core_gpu_health", "Counters and states of a GPU that change seldom: its last values of a minute",
        ("ts", "cluster", "node", "gpu_uuid", *GPU_HEALTH), ("cluster", "node", "gpu_uuid", "ts"), "ts",
        ("gpu_uuid", "ts"), "minutes_days",
    ),
    Table(
        "core_link_samples", "One NVLink at one time",
        LINK_KEYS + LINK_QUANTITIES, ("cluster", "node", "gpu_uuid", "link", "ts"), "ts", ("gpu_uuid", "link", "ts"),
        "samples_days",
    ),
    Table(
        "raw_port_samples", "A network port at one time: its counters as received",
        (*PORT_KEYS, *PORT_RATES, *PORT_STATES, "unknown_flags"), ("cluster", "node", "device", "port", "ts"), "ts",
        ("node", "device", "port", "ts"), "raw_days",
    ),
    Table(
        "core_port_samples", "A network port at one time: rates over the interval that ends then",
        (*PORT_KEYS, *PORT_RATES.values(), *PORT_STATES), ("cluster", "node", "device", "port", "ts"), "ts",
        ("node", "device", "port", "ts"), "samples_days",
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
        JOB_COLUMNS + JOB_EXTRAS, ("cluster", "job_id", "submit_time"), "submit_time", ("submit_time",), "history_days",
    ),
    Table(
        "core_jobs", "A job in its newest known state, states and times made consistent",
        JOB_COLUMNS + JOB_EXTRAS, ("cluster", "job_id", "submit_time"), "submit_time", ("submit_time",), "history_days",
    ),
    Table(
        "core_nodes", "A node of the inventory",
        ("observed_at", "cluster", "node", "rack", "pod", "power_domain", "nvlink_domain", "gpu_model", "gpus",
         "driver_version", "state", "reason"),
        ("cluster", "node"), "observed_at", ("node",), "history_days",
    ),
    Table(
        "core_boards", "Slot, model and versions of a GPU, as its exporter's labels tell, whenever one of them changed",
        ("ts", "cluster", "node", "gpu_uuid", "slot", "gpu_model", "driver_version", "vbios_version", "serial_number"),
        ("cluster", "node", "gpu_uuid", "ts"), "ts", ("node", "gpu_uuid", "ts"), "history_days",
    ),
    Table(
        "core_slots", "Which board sat in which slot of a node, and when",
        ("cluster", "node", "slot", "gpu_uuid", "gpu_index", "gpu_model", "driver_version", "vbios_version",
         "serial_number", "start_time", "end_time"),
        ("cluster", "node", "slot", "gpu_uuid", "start_time"), "start_time", ("node", "start_time"), "history_days",
    ),
    Table(
        "core_gpu_jobs", "Which job held which GPU, and when",
        ("cluster", "node", "gpu_uuid", "gpu_index", "job_id", "start_time", "end_time", "source", "is_shared"),
        ("cluster", "node", "gpu_uuid", "job_id", "start_time"), "start_time", ("node", "start_time"), "history_days",
    ),
    Table(
        "core_job_states", "State, reason and planned start of a job whenever one of them changed",
        ("observed_at", "cluster", "job_id", "state", "reason", "planned_start_time", "priority"),
        ("cluster", "job_id", "observed_at"), "observed_at", ("job_id", "observed_at"), "history_days",
    ),
    Table(
        "core_job_priorities", "Parts of a pending job's priority whenever one of them moved",
        ("observed_at", "cluster", "job_id", "priority", "priority_age", "priority_fairshare", "priority_job_size",
         "priority_partition", "priority_qos", "priority_tres", "priority_association", "priority_site",
         "priority_nice"),
        ("cluster", "job_id", "observed_at"), "observed_at", ("job_id", "observed_at"), "history_days",
    ),
    Table(
        "core_reservations", "A reservation or a maintenance of the scheduler",
        ("observed_at", "cluster", "name", "kind", "start_time", "end_time", "node_list", "users", "accounts", "flags"),
        ("cluster", "name", "start_time"), "start_time", ("start_time",), "history_days",
    ),
    Table(
        "core_policies", "A limit or setting of a partition, QOS or association whenever it changed",
        ("observed_at", "cluster", "kind", "name", "metric", "value", "detail"),
        ("cluster", "kind", "name", "metric", "observed_at"), "observed_at", ("kind", "name"), "history_days",
    ),
    Table(
        "core_queue_samples", "What an exporter says of a queue at one time",
        ("ts", "cluster", "source", "queue", "metric", "value"), ("cluster", "source", "queue", "metric", "ts"), "ts",
        ("queue", "metric", "ts"), "samples_days",
    ),
    Table(
        "core_job_progress", "How far a job is at one time, in its own words",
        ("ts", "cluster", "job_id", "rank", *PROGRESS_QUANTITIES, "source", "observed_at"),
        ("cluster", "job_id", "rank", "ts"), "ts",
        ("job_id", "ts"), "minutes_days", ("rank",),
    ),
    Table(
        "core_faults", "A hardware fault of a node or GPU",
        ("cluster", "node", "gpu_uuid", "kind", "xid", "start_time", "end_time"),
        ("cluster", "node", "gpu_uuid", "kind", "start_time"), "start_time", ("node", "start_time"), "history_days",
    ),
    Table(
        "core_gpu_signs", "A sign that a GPU is about to fail, at the moment it was known",
        ("ts", "cluster", "node", "gpu_uuid", "sign", "amount", "xid"),
        ("cluster", "node", "gpu_uuid", "sign", "xid", "ts"), "ts", ("node", "gpu_uuid", "ts"), "history_days",
        ("xid",),
    ),
    Table(
        "core_data_quality", "How many values of a window were impossible, missing or duplicate, and why",
        ("window_start", "window_end", "cluster", "source", "table_name", "column_name", "reason", "count", "example"),
        ("window_start", "cluster", "source", "table_name", "column_name", "reason"), "window_start",
        ("window_start",), "history_days",
    ),
    Table(
        "core_silences", "An operator's silence: hints that were not to be acted on for a while",
        ("observed_at", "cluster", "silence_id", "node", "bottleneck_class", "scope", "start_time", "end_time",
         "reason", "actor"),
        ("cluster", "silence_id", "start_time"), "start_time", ("start_time",), "history_days",
    ),
    Table(
        "feat_labels", "A bottleneck that happened: its onset and end by the label rule",
        ("cluster", "scope", "scope_id", "node", "gpu_uuid", "job_id", "bottleneck_class", "onset_time", "clear_time",
         "is_censored"),
        ("cluster", "scope", "scope_id", "bottleneck_class", "onset_time"), "onset_time", ("onset_time",),
        "history_days",
    ),
    Table(
        "out_job_forecasts", "A forecast made for one job",
        (*_FORECAST, "cluster", "job_id", "submit_time", "state", "forecast", *QUANTILE_COLUMNS, "mode_s", "p_fail",
         "p_start_60s", "p_start_600s", "p_start_3600s", "p_timeout", "p_node_failure", "p_out_of_memory",
         "lost_gpu_hours", "lost_gpu_hours_hardware", "lost_gpu_hours_checkpointed", "checkpoint_interval_s",
         "reasons", "planned_start_time"),
        ("cluster", "job_id", "forecast", "generated_at"), "generated_at", ("job_id", "generated_at"), "hints_days",
    ),
    Table(
        "out_node_risks", "A forecast of faults for one node",
        (*_FORECAST, "cluster", "node", "p_1h", "p_24h", "p_7d", "reasons", "lemon_score", "spare_rank"),
        ("cluster", "node", "generated_at"), "generated_at", ("node", "generated_at"), "hints_days",
    ),
    Table(
        "out_gpu_risks", "A forecast of faults for one GPU that has signs or faults of its own",
        (*_FORECAST, "cluster", "node", "gpu_uuid", "p_1h", "p_24h", "p_7d", "reasons"),
        ("cluster", "node", "gpu_uuid", "generated_at"), "generated_at", ("node", "generated_at"), "hints_days",
    ),
    Table(
        "out_demand", "Demand that is foreseen for a queue, or for all queues together, at one hour ahead",
        (*_FORECAST, "cluster", "queue", "quantity", "unit", "horizon_h", "target_time", *DEMAND_QUANTILE_COLUMNS,
         "last_value", "last_week_value"),
        ("cluster", "queue", "quantity", "horizon_h", "generated_at"), "generated_at", ("queue", "generated_at"),
        "hints_days", ("queue",),
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
        "out_outcomes", "A published job forecast beside what came",
        ("released_at", "cluster", "job_id", "submit_time", "forecast", "landmark_s", "generated_at", "model_version",
         "state", *QUANTILE_COLUMNS, "p_fail", "p_start_60s", "p_start_600s", "p_start_3600s", "actual_s", "baseline",
         "baseline_s", "baseline_p_fail", "planned_s"),
        ("cluster", "job_id", "submit_time", "forecast", "landmark_s"), "released_at", ("released_at", "job_id"),
        "hints_days",
    ),
    Table(
        "out_hint_outcomes", "A published bottleneck hint beside what came",
        ("generated_at", "cluster", "hint_id", "bottleneck_class", "scope", "node", "gpu_uuid", "horizon_s",
         "probability", "model_version", "is_held_out", "verdict", "reason", "onset_time", "lead_s", "claimed_until"),
        ("cluster", "hint_id", "generated_at"), "generated_at", ("generated_at",), "hints_days",
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
    about = TABLES[table]
    missing = [name for name in about.key if name not in frame.columns and name not in about.optional]
    if missing:
        raise ValueError(f"{table} is keyed by {', '.join(TABLES[table].key)}; missing: {', '.join(missing)}")
    return frame.select(
        pl.col(name).cast(dtype) if name in frame.columns else pl.lit(None, dtype=dtype).alias(name)
        for name, dtype in wanted.items()
    )

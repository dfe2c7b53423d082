"""Slurm: the exporters of vpenso, rivosinc and Slinky, and Slurm's own metrics.

Rows only. Those with the column `value` become `core_queue_samples`. All of them are gauges, whatever their names end
in. The same name may stand for another unit at another exporter.
"""

from __future__ import annotations

from typing import Any

from features.exporters.metric import MIB, Metric, Rows, family

_vpenso = family("prometheus-slurm-exporter (vpenso)", "slurm_", entity="queue")
_rivos = family("prometheus-slurm-exporter (rivosinc)", "slurm_", entity="queue")
_slinky = family("slurm-exporter (Slinky)", "slurm_", entity="queue")
_own = family("Slurm itself", "slurm_", entity="queue")
_MICRO = 1e-6


def _aside(rows: Rows, names: str, meaning: str, scale: float = 1.0) -> list[Metric]:
    """Not kept: of nodes and jobs Slurm is asked itself; calls; and what is not to be believed."""
    return rows(names, "", scale, meaning=meaning)


def _means(rows: Rows, names: str, meaning: str, scale: float = 1.0, **more: Any) -> list[Metric]:
    return rows(names, "value", scale, meaning=meaning, **more)


ROWS: tuple[Metric, ...] = (
    *_means(_vpenso, "account_jobs_pending account_jobs_running account_jobs_suspended user_jobs_pending "
            "user_jobs_running user_jobs_suspended", "jobs of an account or user; a pending array counts as one"),
    *_means(_vpenso, "account_cpus_running user_cpus_running", "CPUs in use by an account or user"),
    *_means(_vpenso, "cpus_alloc cpus_idle cpus_other cpus_total", "CPUs"),
    *_aside(_vpenso, "gpus_alloc gpus_idle gpus_total gpus_utilization",
            "GPUs, only with -gpus-acct; 0 where GPUs have a type: do not believe it"),
    *_aside(_vpenso, "node_cpu_* node_mem_*", "CPUs and memory of a node; status is a label, so series come and go"),
    *_means(_vpenso, "nodes_*", "nodes in a state"),
    *_means(_vpenso, "partition_*", "CPUs and jobs of a partition"),
    *_means(_vpenso, "queue_*", "jobs in a state"),
    *_means(_vpenso, "scheduler_last_cycle scheduler_mean_cycle scheduler_backfill_last_cycle "
            "scheduler_backfill_mean_cycle", "length of a cycle, s (exposed in µs)", _MICRO),
    *_means(_vpenso, "scheduler_threads scheduler_queue_size scheduler_dbd_queue_size", "the scheduler's own queues"),
    *_means(_vpenso, "scheduler_backfill_depth_mean scheduler_cycle_per_minute scheduler_backfilled_*_total",
            "jobs and cycles of the schedulers"),
    *_aside(_vpenso, "rpc_stats* user_rpc_stats*", "calls that slurmctld served, by type or user"),
    *_aside(_rivos, "job_alloc_cpus job_alloc_mem", "what a job holds, by jobid"),
    *_means(_rivos, "user_state_total partition_job_state_total account_job_state_total", "jobs in a state"),
    *_means(_rivos, "node_count_per_state", "nodes in a state"),
    *_means(_rivos, "cpus_* mem_real mem_free mem_alloc partition_*", "CPUs and memory; no GPUs"),
    *_means(_rivos, "pending_reason_total", "pending jobs, by reason"),
    *_aside(_rivos, "rpc_*", "calls that slurmctld served"),
    *_aside(_rivos, "*_scrape_duration", "s that a collector took (exposed in ms)", 1e-3),
    *_means(_slinky, "jobs_*_total partition_jobs_*_total account_jobs_*_total user_jobs_*_total", "jobs in a state"),
    *_means(_slinky, "nodes_*_total", "nodes in a state"),
    *_aside(_slinky, "node_cpus_total node_cpus_effective_total node_cpus_alloc_total node_cpus_idle_total",
            "CPUs of a node"),
    *_aside(_slinky, "node_memory_bytes node_memory_effective_bytes node_memory_alloc_bytes node_memory_free_bytes",
            "bytes (exposed in MB, whatever the name says)", MIB),
    *_means(_slinky, "partition_memory_*bytes", "bytes (exposed in MB, whatever the name says)", MIB),
    *_means(_slinky, "scheduler_cycle_last_seconds scheduler_cycle_max_seconds scheduler_cycle_mean_seconds "
            "scheduler_cycle_sum_seconds_total bfscheduler_cycle_seconds bfscheduler_cycle_max_seconds "
            "bfscheduler_cycle_mean_seconds bfscheduler_cycle_sum_seconds",
            "s (exposed in µs, whatever the name says)", _MICRO),
    *_means(_slinky, "scheduler_*_total bfscheduler_*_total", "counts of the scheduler and of backfill"),
    *_means(_own, "jobs jobs_running jobs_pending jobs_failed jobs_node_failed jobs_outofmemory jobs_preempted "
            "jobs_timeout jobs_requeued jobs_hold jobs_*", "jobs in a state"),
    *_means(_own, "jobs_memory_alloc", "bytes"),
    *_aside(_own, "user_jobs_memory_alloc account_jobs_memory_alloc", "bytes modulo 4 GiB: do not believe it"),
    *_means(_own, "partition_cpus_alloc *_cpus_alloc", "CPUs; wrap at 65,536"),
    *_aside(_own, "node_cpus node_cpus_alloc", "CPUs; wrap at 65,536"),
    *_aside(_own, "node_memory_bytes node_memory_free_bytes node_memory_alloc_bytes", "bytes"),
    *_means(_own, "jobs_gpus_alloc partition_gpus partition_gpus_alloc", "GPUs; from release 26.05 on"),
    *_aside(_own, "node_gpus node_gpus_alloc", "GPUs; from release 26.05 on"),
    *_means(_own, "nodes_idle nodes_alloc nodes_mixed nodes_drain nodes_down nodes_noresp nodes_*", "nodes in a state"),
    *_aside(_own, "nodes_powering_up", "is the number of nodes powering down: do not believe it"),
    *_means(_own, "partition_* user_* account_*", "jobs and nodes of a partition, user or account"),
    *_means(_own, "bf_* sched_*", "backfill and main scheduler"),
)  # fmt: skip

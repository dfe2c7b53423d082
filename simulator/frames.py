"""What exporters and the scheduler's commands would show of a simulated cluster, as arrays and frames.

Readings are rounded as the real exporters round them (whole degrees, MiB, MHz), so files, frames and HTTP agree. No
state is kept here beyond the newest sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from features.vocabulary import JOB_COLUMNS, TIME, conform, schema
from simulator.hardware import GPUS_PER_NODE, MIB
from simulator.hosts import HOST_BYTES, host_available_bytes, port_rates
from simulator.jobs import Job
from simulator.physics import BRAKE_CLOCK, POWER_EXPONENT
from simulator.streams import Stream, generator
from simulator.truth import iso

if TYPE_CHECKING:
    from simulator.cluster import SimulatedCluster
    from simulator.job_course import JobCourse

IDLE, POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_BRAKE = 0x1, 0x4, 0x8, 0x20, 0x40, 0x80
FLAGS = ("is_thermal_slowdown", "is_power_brake", "is_power_capped")
_RATIOS = ("gpu_util_ratio", "engine_active_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")


@dataclass(slots=True)
class Sample:
    """One sample of every GPU and node.

    Attributes:
        ts_s: When it was taken, seconds since the epoch.
        gpu: Registry column → array over GPUs (registry units), and `throttle_bits`, `energy_mj`, `nvlink_mib`.
        is_seen: GPUs whose exporter shows them.
        job_ids: Internal id of the job on each GPU, -1 without one.
        node: `inlet_temp_c`, `node_power_w` and host memory over nodes.
        is_up: Nodes that answer.
        port: Rates of the port of each node, columns of `core_port_samples`.
        counted: What the ports have counted, columns of `raw_port_samples`.
        own_step_s: Step time of each rank without the wait for its gang, s; NaN where a job makes or tells of none.
    """

    ts_s: float
    gpu: dict[str, np.ndarray]
    is_seen: np.ndarray
    job_ids: np.ndarray
    node: dict[str, np.ndarray]
    is_up: np.ndarray
    port: dict[str, np.ndarray]
    counted: dict[str, np.ndarray]
    own_step_s: np.ndarray


def sample(cluster: SimulatedCluster) -> Sample:
    """Take a sample of everything: means over the last tick, levels of its last second."""
    physics, model, now = cluster.physics, cluster.topology.model, cluster.time
    n = cluster.topology.gpus
    noise = generator(cluster.seed, Stream.NOISE, int(now * 10)).standard_normal((4, n), np.float32)
    span = max(physics.sum_s, 1e-9)
    mean = {name: total / span for name, total in physics.sums.items()}
    last = physics.shares(now - 1.0, now, np.maximum(physics.steps - 1.0 / physics.step, 0.0))
    demand = physics.demand(physics.activity(last, now))
    cap = np.minimum(1.0, (model.power_limit_w - model.power_idle_w) / np.maximum(demand - model.power_idle_w, 1.0))
    is_braked = physics.is_strained & (physics.power_clock <= BRAKE_CLOCK)
    is_capped = (demand > model.power_limit_w) | ((physics.power_clock < 1) & ~is_braked)
    power = np.minimum(demand, model.power_limit_w) * (1 + 0.004 * noise[0])
    is_idle = (last.warmup + last.train + last.evaluation) < 0.01
    clock = model.sm_clock_mhz * np.minimum(physics.clock, cap ** (1 / POWER_EXPONENT))
    clock = np.where(is_idle & (physics.busy == 0), model.sm_clock_idle_mhz, clock)
    hot = physics.temp >= model.temp_limit_c + 2.0
    is_soft = (physics.thermal_clock < 1) | (physics.temp >= model.temp_limit_c)
    is_hard = hot | physics.is_hard_slowdown
    bits = is_idle * IDLE + is_capped * POWER_CAP + (is_soft & ~physics.is_hard_slowdown) * SW_THERMAL
    bits = (bits + is_hard * (HW_SLOWDOWN | HW_THERMAL)).astype(np.int64) | (is_braked * (HW_SLOWDOWN | HW_BRAKE))

    work = mean["compute"] + mean["exposed"]
    wobble = 1 + 0.01 * noise[1]
    engine = np.clip(work * 0.985 + mean["evaluation"] * 0.9 + mean["warmup"] * 0.3 + mean["pause"] * 0.03, 0, 1)
    compute = mean["compute"] + 0.8 * mean["evaluation"]
    tx = mean["nvlink"] * (1 + 0.003 * noise[2])
    step = np.where(
        physics.reports & (physics.steps >= 1) & (now - physics.start > physics.warmup_s),
        np.round(physics.step * (1 + 0.008 * noise[3]), 3), np.nan,
    )  # fmt: skip
    temp = np.floor(physics.temp)
    used_mib = np.floor(physics.memory_used(now) / MIB)
    gpu = {
        "gpu_util_ratio": np.round(np.clip(engine * (1.02 + 0.01 * wobble), 0, 1), 2) * (engine > 0),
        "engine_active_ratio": np.round(engine, 6),
        "sm_active_ratio": np.round(np.clip((compute * physics.sm + 0.2 * mean["exposed"]) * wobble, 0, 1), 6),
        "tensor_active_ratio": np.round(np.clip(compute * physics.tensor * physics.clock * wobble, 0, 1), 6),
        "dram_active_ratio": np.round(np.clip((compute * physics.dram + 0.1 * mean["exposed"]) * wobble, 0, 1), 6),
        "fb_used_bytes": used_mib * MIB,
        "fb_reserved_bytes": np.full(n, float(model.memory_reserved_mib * MIB)),
        "fb_total_bytes": np.full(n, float(model.memory_total_mib * MIB)),
        "gpu_power_w": np.round(power, 3),
        "power_limit_w": np.full(n, model.power_limit_w),
        "gpu_temp_c": temp,
        "mem_temp_c": np.floor(physics.mem_temp),
        "gpu_temp_margin_c": model.temp_limit_c - temp,
        "sm_clock_hz": np.round(clock / 15) * 15e6,
        "mem_clock_hz": np.full(n, model.mem_clock_mhz * 1e6),
        "nvlink_tx_bytes_per_s": np.floor(tx),
        "nvlink_rx_bytes_per_s": np.floor(tx * (1 - 0.002 * np.abs(noise[1]))),
        "pcie_tx_bytes_per_s": np.floor((0.08 * work + 0.1 * mean["pause"]) * model.pcie_bytes_per_s * wobble),
        "pcie_rx_bytes_per_s": np.floor((0.02 * work + 0.15 * mean["warmup"]) * model.pcie_bytes_per_s * wobble),
        "is_thermal_slowdown": (bits & (SW_THERMAL | HW_THERMAL)) != 0,
        "is_power_brake": is_braked,
        "is_power_capped": is_capped,
        "xid_last": physics.xid.copy(),
        "ecc_uncorrected_total": physics.ecc.copy(),
        "remapped_rows_total": physics.remapped.copy(),
        "nvlink_error_total": physics.nvlink_errors.copy(),
        "step_time_s": step,
        "own_step_time_s": _own_steps(cluster),
        "throttle_bits": bits,
        "energy_mj": np.floor(physics.energy_mj),
    }
    is_up = physics.is_reachable.copy()
    inlet = np.round(physics.inlet * 2) / 2
    node_power = np.round(physics.node_power(power))
    ports = port_rates(
        physics, cluster.strains.active, now,
        generator(cluster.seed, Stream.NOISE, int(now * 10), 1).standard_normal(cluster.topology.nodes),
    )  # fmt: skip
    node = {
        "inlet_temp_c": inlet, "node_power_w": node_power,
        "host_mem_available_bytes": host_available_bytes(physics, cluster.strains.active, now),
        "host_mem_total_bytes": np.full(len(inlet), float(HOST_BYTES)),
    }  # fmt: skip
    return Sample(
        now, gpu, is_up[physics.node_of] & ~physics.is_lost, physics.job_code.copy(), node, is_up,
        ports, cluster.counters.read(now, ports), gpu["own_step_time_s"],
    )  # fmt: skip


def _own_steps(cluster: SimulatedCluster) -> np.ndarray:
    physics, now = cluster.physics, cluster.time
    own = physics.own_step_s()
    noise = generator(cluster.seed, Stream.NOISE, int(now * 10), 2).standard_normal(len(own))
    makes = physics.reports & (physics.steps >= 1) & (now - physics.start > physics.warmup_s)
    return np.where(makes, own * (1 + 0.01 * noise), np.nan)


def newest(cluster: SimulatedCluster) -> Sample:
    """The sample of the present tick, taken once."""
    if cluster.newest is None or cluster.newest.ts_s != cluster.time:
        cluster.newest = sample(cluster)
    return cluster.newest


def job_names(cluster: SimulatedCluster) -> dict[int, str]:
    """Printed id of each running job by its internal one."""
    return {id_: job.job_id for id_, job in cluster.jobs.items()}


def gpu_frame(cluster: SimulatedCluster) -> pl.DataFrame:
    """Newest sample of each GPU that answers, as `raw_gpu_samples`."""
    taken = newest(cluster)
    seen = np.flatnonzero(taken.is_seen)
    names = job_names(cluster)
    topology = cluster.topology
    wanted = schema("raw_gpu_samples")
    columns: dict[str, Any] = {
        "ts": pl.Series([iso(taken.ts_s)], dtype=TIME).new_from_index(0, len(seen)),
        "cluster": pl.Series([cluster.name]).new_from_index(0, len(seen)),
        "node": [topology.node_names[i // GPUS_PER_NODE] for i in seen],
        "gpu_uuid": [topology.uuids[i] for i in seen],
        "gpu_index": seen % GPUS_PER_NODE,
        "job_id": pl.Series([names.get(int(i)) for i in taken.job_ids[seen]], dtype=pl.String),
    }
    columns |= {name: values[seen] for name, values in taken.gpu.items() if name in wanted}
    frame = pl.DataFrame(columns).with_columns(pl.col("step_time_s", "own_step_time_s").fill_nan(None))
    return conform(frame, "raw_gpu_samples")


def node_frame(cluster: SimulatedCluster) -> pl.DataFrame:
    """Newest sample of each node, as `core_node_samples`; a node that does not answer has no readings."""
    taken = newest(cluster)
    n = cluster.topology.nodes
    frame = pl.DataFrame(
        {
            "ts": pl.Series([iso(taken.ts_s)], dtype=TIME).new_from_index(0, n),
            "cluster": pl.Series([cluster.name]).new_from_index(0, n),
            "node": cluster.topology.node_names,
            "is_up": taken.is_up,
            **{name: np.where(taken.is_up, values, np.nan) for name, values in taken.node.items()},
        }
    ).with_columns(pl.col(*taken.node).fill_nan(None))
    return conform(frame, "core_node_samples")


def port_frame(cluster: SimulatedCluster) -> pl.DataFrame:
    """Newest rates of the port of each node that answers, as `core_port_samples`."""
    topology, taken = cluster.topology, newest(cluster)
    up = np.flatnonzero(taken.is_up)
    frame = pl.DataFrame(
        {
            "ts": pl.Series([iso(taken.ts_s)], dtype=TIME).new_from_index(0, len(up)),
            "node": [topology.node_names[i] for i in up],
            **{name: values[up] for name, values in taken.port.items()},
        }
    ).with_columns(cluster=pl.lit(cluster.name), device=pl.lit("mlx5_0"), port=pl.lit("1"), is_link_up=pl.lit(True))
    return conform(frame, "core_port_samples")


def rank_frame(cluster: SimulatedCluster) -> pl.DataFrame:
    """Step time of each rank without the wait for its gang, of jobs that report steps and make them now."""
    physics, taken = cluster.physics, newest(cluster)
    now = taken.ts_s
    rows: list[tuple[str, int, int, float]] = []
    for id_, members in physics.members.items():
        values = taken.own_step_s[members]
        if not np.isnan(values).any():
            name = cluster.jobs[id_].job_id
            rows += [(name, rank, int(physics.steps[members[0]]), float(value)) for rank, value in enumerate(values)]
    frame = pl.DataFrame(
        rows, orient="row",
        schema={"job_id": pl.String, "rank": pl.Int32, "step": pl.Int64, "step_time_s": pl.Float32},
    ).with_columns(
        ts=pl.lit(iso(now)).cast(TIME), observed_at=pl.lit(iso(now)).cast(TIME), cluster=pl.lit(cluster.name),
        source=pl.lit("simulator"),
    )  # fmt: skip
    return conform(frame, "core_job_progress")


def job_row(cluster: JobCourse, job: Job) -> dict[str, Any]:
    """One job in the canonical columns."""
    names = cluster.topology.node_names
    return {
        "cluster": cluster.name,
        "job_id": job.job_id,
        "user": job.user,
        "account": job.account,
        "queue": job.queue,
        "name": job.name,
        "submit_time": iso(job.submit),
        "eligible_time": iso(job.eligible),
        "start_time": iso(job.start),
        "end_time": iso(job.end),
        "nodes": job.nodes,
        "cpus": job.cpus,
        "gpus": job.gpus,
        "memory_mib": job.memory_mib,
        "time_limit_s": None if job.limit_s is None else int(job.limit_s),
        "state": job.state,
        "node_list": ",".join(names[i] for i in job.nodes_held) or None,
        "reason": job.reason if job.state == "PENDING" else None,
        "planned_start_time": iso(job.planned_start) if job.state == "PENDING" else None,
        "observed_at": iso(cluster.time),
    }


def jobs_frame(cluster: SimulatedCluster, jobs: Iterable[Job] | None = None) -> pl.DataFrame:
    """Jobs in the canonical columns, in order of submission."""
    cluster.scheduler.plan(cluster.time)
    chosen = [*cluster.ended, *cluster.jobs.values()] if jobs is None else list(jobs)
    chosen.sort(key=lambda job: (job.submit, job.id))
    rows = [job_row(cluster, job) for job in chosen]
    wanted = schema("raw_jobs")
    columns = {name: [row[name] for row in rows] for name in JOB_COLUMNS}
    return pl.DataFrame(columns, schema={name: wanted[name] for name in JOB_COLUMNS})


def faults_frame(cluster: SimulatedCluster) -> pl.DataFrame:
    """Hardware faults so far, as `core_faults`; the end of one that lasts is null."""
    wanted = schema("core_faults")
    now = cluster.now
    rows = [row if row["end_time"] <= now else {**row, "end_time": None} for row in cluster.faults]
    return pl.DataFrame({name: [row[name] for row in rows] for name in wanted}, schema=wanted)

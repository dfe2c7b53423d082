"""A made-up fleet for benchmarks of the nowcast: its samples, its jobs, its nodes, and what exporters would say of it.

Here belongs what is measured with, not what is measured.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl

SLOTS = 40
INTERVAL_S = 15.0
TICKS = 5
MODEL = "NVIDIA H100 80GB HBM3"
GIB = 2.0**30
ACHIEVABLE = 450e9 * 0.83


class Fleet:
    """Made-up samples of a fleet whose troubled GPUs come near their limits during the last ticks."""

    def __init__(self, gpus: int, share: float = 0.01, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.gpus, self.rng = gpus, rng
        self.start = datetime.now(UTC) - timedelta(seconds=INTERVAL_S * (SLOTS + TICKS))
        self.nodes = [f"n{i + 1}" for i in range(-(-gpus // 8))]
        ids = np.arange(gpus)
        self.keys = [
            pl.Series("node", [self.nodes[i // 8] for i in ids]),
            pl.Series("gpu_uuid", [f"GPU-{i:08x}-93c1-4a5e-b0de-{i:012x}" for i in ids]),
            pl.Series("gpu_index", (ids % 8).astype(np.int32)),
            pl.Series("job_id", [str(1000 + i // 64) for i in ids]),
        ]
        self.temp, self.fill = rng.normal(66, 3, gpus), rng.uniform(0.1, 0.6, gpus)
        self.memory = rng.uniform(40, 74, gpus)
        bad = rng.choice(gpus, max(5, int(share * gpus)), replace=False)
        self.hot, self.linked, self.leaking, self.held, self.lagging = np.array_split(bad, 5)

    def troubled(self, classes: Collection[str]) -> int:
        """GPUs that come near a limit of one of these classes."""
        groups = {
            "thermal_throttle": self.hot, "nvlink_saturation": self.linked, "memory_exhaustion": self.leaking,
            "power_throttle": self.held, "straggler": self.lagging,
        }  # fmt: skip
        return sum(len(gpus) for name, gpus in groups.items() if name in classes)

    def at(self, tick: int) -> datetime:
        return self.start + timedelta(seconds=INTERVAL_S * tick)

    def columns(self, tick: int) -> dict[str, np.ndarray]:
        """Quantities of one tick in exporter resolution."""
        rng, n = self.rng, self.gpus
        temp = self.temp + rng.normal(0, 0.6, n)
        fill = self.fill + rng.normal(0, 0.02, n)
        memory = self.memory.copy()
        course = max(0.0, (tick - (SLOTS - 14)) / 18)  # onset a little after the last tick
        temp[self.hot] = 66 + 21 * course
        fill[self.linked] = 0.45 + 0.45 * course
        memory[self.leaking] = 60 + 18.4 * course
        step = np.ones(n)
        step[self.linked] = 1 + 0.15 * course
        clock = np.full(n, 1.755e9)
        clock[self.held] *= 1 - 0.19 * course
        own = 0.9 + rng.normal(0, 0.005, n)
        own[self.lagging] *= 1 + 0.29 * course
        temp = np.floor(temp)
        return {
            "gpu_temp_c": temp,
            "gpu_temp_margin_c": 87 - temp,
            "mem_temp_c": temp + 8,
            "gpu_power_w": np.round(temp * 9, 1),
            "power_limit_w": np.full(n, 700.0),
            "is_power_capped": np.ones(n),
            "sm_clock_hz": np.round(clock / 15e6) * 15e6,
            "sm_active_ratio": np.clip(0.8 + rng.normal(0, 0.03, n), 0, 1),
            "fb_used_bytes": np.floor(memory * 1024) * 2.0**20,
            "fb_reserved_bytes": np.full(n, 0.5 * GIB),
            "fb_total_bytes": np.full(n, 80 * GIB),
            "nvlink_tx_bytes_per_s": fill * ACHIEVABLE,
            "nvlink_rx_bytes_per_s": fill * ACHIEVABLE * 0.99,
            "step_time_s": np.round(step * (1 + rng.normal(0, 0.005, n)), 3),
            "own_step_time_s": np.round(own, 3),
        }

    def frame(self, tick: int) -> pl.DataFrame:
        ts = pl.Series("ts", [self.at(tick)], dtype=pl.Datetime("us", "UTC")).new_from_index(0, self.gpus)
        return pl.DataFrame([ts, *self.keys]).with_columns(
            pl.Series(name, values, dtype=pl.Float32) for name, values in self.columns(tick).items()
        )

    def inventory(self) -> pl.DataFrame:
        n = len(self.nodes)
        return pl.DataFrame(
            {
                "observed_at": [self.start] * n, "cluster": ["bench"] * n, "node": self.nodes,
                "rack": [f"r{i // 8}" for i in range(n)], "pod": [f"p{i // 64}" for i in range(n)],
                "gpu_model": [MODEL] * n, "gpus": [8] * n, "state": ["IDLE"] * n, "reason": [None] * n,
            },
            schema_overrides={"reason": pl.String, "gpus": pl.Int32},
        )  # fmt: skip

    def jobs(self, at: datetime) -> pl.DataFrame:
        """A job on every eight nodes but those of each tenth rack, and one waiting for each fifty nodes."""
        from features.vocabulary import JOB_COLUMNS, schema

        types = schema("core_jobs")
        groups = [self.nodes[i : i + 8] for i in range(0, len(self.nodes), 8)]
        running = [(i, names) for i, names in enumerate(groups) if i % 10]
        rows: dict[str, list[Any]] = {name: [] for name in JOB_COLUMNS}
        waiting = len(self.nodes) // 50
        for i in range(len(running) + waiting):
            is_running = i < len(running)
            names = running[i][1] if is_running else self.nodes[:8]
            known = {
                "cluster": "bench", "job_id": str(1000 + i), "user": f"u{i % 40}", "account": "a", "queue": "q",
                "name": f"j{i % 90}", "submit_time": at - timedelta(hours=5), "eligible_time": at - timedelta(hours=5),
                "start_time": at - timedelta(hours=3) if is_running else None, "nodes": len(names), "cpus": 64,
                "gpus": 8 * len(names), "time_limit_s": 3600 * (4 + i % 20), "observed_at": at,
                "state": "RUNNING" if is_running else "PENDING", "node_list": ",".join(names) if is_running else None,
                "reason": None if is_running else "Resources",
            }  # fmt: skip
            for name in JOB_COLUMNS:
                rows[name].append(known.get(name))
        return pl.DataFrame(rows, schema={name: types[name] for name in JOB_COLUMNS})


PAGE = (
    ("DCGM_FI_DEV_GPU_TEMP", "gpu_temp_c", 1.0), ("DCGM_FI_DEV_GPU_TEMP_LIMIT", "gpu_temp_margin_c", 1.0),
    ("DCGM_FI_DEV_MEMORY_TEMP", "mem_temp_c", 1.0), ("DCGM_FI_DEV_POWER_USAGE", "gpu_power_w", 1.0),
    ("DCGM_FI_DEV_SM_CLOCK", "sm_clock_hz", 1e-6), ("DCGM_FI_PROF_SM_ACTIVE", "sm_active_ratio", 1.0),
    ("DCGM_FI_DEV_FB_USED", "fb_used_bytes", 2.0**-20), ("DCGM_FI_DEV_FB_RESERVED", "fb_reserved_bytes", 2.0**-20),
    ("DCGM_FI_DEV_FB_FREE", "fb_free_bytes", 2.0**-20), ("DCGM_FI_PROF_NVLINK_TX_BYTES", "nvlink_tx_bytes_per_s", 1.0),
    ("DCGM_FI_PROF_NVLINK_RX_BYTES", "nvlink_rx_bytes_per_s", 1.0),
    ("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "power_limit_w", 1.0),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "is_power_capped", 4.0),
    ("weatherglass_step_time_seconds", "step_time_s", 1.0),
    ("weatherglass_own_step_time_seconds", "own_step_time_s", 1.0),
)  # fmt: skip


def pages(fleet: Fleet, tick: int) -> list[str]:
    """Exporters' text of one tick, one page per node."""
    columns = fleet.columns(tick)
    columns["fb_free_bytes"] = columns["fb_total_bytes"] - columns["fb_used_bytes"] - columns["fb_reserved_bytes"]
    texts = {name: [f"{value:.6g}" for value in columns[column] * scale] for name, column, scale in PAGE}
    uuids = fleet.keys[1].to_list()
    out = []
    for number, node in enumerate(fleet.nodes):
        gpus = range(number * 8, min(number * 8 + 8, fleet.gpus))
        lines = [
            f'{name}{{gpu="{gpu % 8}",UUID="{uuids[gpu]}",device="nvidia{gpu % 8}",modelName="{MODEL}",'
            f'Hostname="{node}",hpc_job="{1000 + gpu // 64}"}} {values[gpu]}'
            for name, values in texts.items()
            for gpu in gpus
        ]
        out.append("\n".join(lines) + "\n")
    return out


class Decoder:
    """Text of exporters to a frame, by the parser of the scrape source, without its sockets."""

    def __init__(self) -> None:
        from pipelines.sources.wide import Index

        self.index = Index()

    def frame(self, texts: list[str], nodes: list[str], at: datetime) -> pl.DataFrame:
        from pipelines.sources.exposition import parse_page
        from pipelines.sources.wide import Samples, to_frames

        names: list[int] = []
        entities: list[int] = []
        values: list[float] = []
        for text, node in zip(texts, nodes, strict=True):
            page = parse_page(text, self.index, node)
            names += page.names
            entities += page.entities
            values += page.values
        n = len(names)
        now_ms = np.full(n, round(at.timestamp() * 1000), np.int64)
        flat = Samples(np.array(names), np.array(entities), np.ones(n, np.int64), now_ms, np.array(values))
        return to_frames(flat, self.index, "bench")[0]

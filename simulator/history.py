"""Weeks of a simulated cluster as files: telemetry of GPUs, nodes, ports and ranks, jobs, faults, ground truth.

Telemetry streams through a buffer of arrays into Parquet parts that are joined at the end, so memory stays bounded
whatever the length. Nothing here knows about HTTP or about the physics.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from features.vocabulary import COLUMNS, GPU_QUANTITIES, TIME, conform, schema
from simulator import frames
from simulator.cluster import SimulatedCluster
from simulator.exporter import jsonl, write_replacing
from simulator.hardware import GPUS_PER_NODE
from simulator.sacct import SacctText

PART_ROWS = 400_000
RANKS_EVERY_S = 15.0  # ranks tell of their steps at most this often
# Kind of a part → name of its file, and the table whose columns it has.
FILES = {
    "gpu": ("telemetry", "raw_gpu_samples"),
    "node": ("node", "core_node_samples"),
    "port": ("ports", "core_port_samples"),
    "rank": ("ranks", "core_job_progress"),
}
NODES = ("inlet_temp_c", "node_power_w", "host_mem_available_bytes", "host_mem_total_bytes")
_ROUNDED = [
    name for name in GPU_QUANTITIES if COLUMNS[name].resolution > 0 and COLUMNS[name].dtype == pl.Float32
]  # fmt: skip


class Recorder:
    """Takes each tick's sample of a cluster and writes it out in parts.

    Rows of a part are GPU by GPU in order of time, values rounded to the registry's resolution. A GPU or node that
    did not answer has no row (a node: `is_up` false).
    """

    def __init__(self, cluster: SimulatedCluster, out: Path) -> None:
        self.cluster, self.out = cluster, out
        self.parts = out / ".parts"
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir(parents=True)
        self.room = max(1, PART_ROWS // cluster.topology.gpus)
        n = cluster.topology.gpus
        self._ts = np.zeros(self.room)
        self._values = {name: np.zeros((n, self.room), _numpy_dtype(name)) for name in GPU_QUANTITIES}
        self._seen = np.zeros((n, self.room), bool)
        self._jobs = np.zeros((n, self.room), np.int64)
        self._up = np.zeros((cluster.topology.nodes, self.room), bool)
        self._node = {name: np.zeros((cluster.topology.nodes, self.room)) for name in NODES}
        self._ports: list[pl.DataFrame] = []
        self._ranks: list[pl.DataFrame] = []
        self._ranks_at = -math.inf
        self._job_names: dict[int, str] = {}
        self._count = 0
        self._part = 0
        self.rows = 0

    def take(self) -> None:
        """Record the cluster's newest sample."""
        taken = frames.newest(self.cluster)
        i = self._count
        self._ts[i] = taken.ts_s
        for name, array in self._values.items():
            array[:, i] = taken.gpu[name]
        self._seen[:, i] = taken.is_seen
        self._jobs[:, i] = taken.job_ids
        self._up[:, i] = taken.is_up
        for name, array in self._node.items():
            array[:, i] = taken.node[name]
        self._ports.append(frames.port_frame(self.cluster))
        if taken.ts_s - self._ranks_at >= RANKS_EVERY_S - 1e-6:
            self._ranks.append(frames.rank_frame(self.cluster))
            self._ranks_at = taken.ts_s
        self._count += 1
        if self._count == self.room:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as one part of each file."""
        if self._count == 0:
            return
        k, topology = self._count, self.cluster.topology
        n = topology.gpus
        for job in [*self.cluster.ended[-50_000:], *self.cluster.jobs.values()]:
            self._job_names.setdefault(job.id, job.job_id)
        ts = pl.Series("ts", (self._ts[:k] * 1e6).astype(np.int64)).cast(TIME)
        seen = self._seen[:, :k].ravel()
        gpu = np.repeat(np.arange(n), k)[seen]
        tick = np.tile(np.arange(k), n)[seen]
        nodes = pl.Series(topology.node_names, dtype=pl.String)
        codes = self._jobs[:, :k].ravel()[seen]
        known, index = np.unique(codes, return_inverse=True)
        names = pl.Series([self._job_names.get(int(code)) for code in known], dtype=pl.String)
        columns: dict[str, Any] = {
            "ts": ts.gather(tick),
            "cluster": pl.Series([self.cluster.name]).new_from_index(0, len(gpu)),
            "node": nodes.gather(gpu // GPUS_PER_NODE),
            "gpu_uuid": pl.Series(topology.uuids).gather(gpu),
            "gpu_index": pl.Series(gpu % GPUS_PER_NODE, dtype=pl.Int32),
            "job_id": names.gather(index),
        }
        for name, array in self._values.items():
            flat = array[:, :k].ravel()[seen]
            if name in _ROUNDED:
                step = COLUMNS[name].resolution
                flat = np.round(flat / step) * step
            columns[name] = pl.Series(flat, dtype=COLUMNS[name].dtype)
        steps = pl.col("step_time_s", "own_step_time_s").fill_nan(None)
        frame = conform(pl.DataFrame(columns).with_columns(steps), "raw_gpu_samples")
        self._write("gpu", frame)
        self.rows += frame.height
        up = self._up[:, :k].ravel()
        m = topology.nodes
        node_rows = pl.DataFrame(
            {
                "ts": ts.gather(np.tile(np.arange(k), m)),
                "cluster": pl.Series([self.cluster.name]).new_from_index(0, m * k),
                "node": nodes.gather(np.repeat(np.arange(m), k)),
                **{
                    name: pl.Series(np.where(up, array[:, :k].ravel(), np.nan), dtype=pl.Float32, nan_to_null=True)
                    for name, array in self._node.items()
                },
                "is_up": up,
            }
        )
        self._write("node", conform(node_rows, "core_node_samples"))
        self._write("port", pl.concat(self._ports).sort("node", "ts"))
        if self._ranks:
            self._write("rank", pl.concat(self._ranks).sort("job_id", "rank", "ts"))
        self._ports, self._ranks = [], []
        self._part += 1
        self._count = 0

    def _write(self, kind: str, frame: pl.DataFrame) -> None:
        path = self.parts / f"{kind}-{self._part:05d}.parquet"
        frame.write_parquet(path, compression="zstd", compression_level=1)

    def close(self) -> None:
        """Join the parts into the file of each kind."""
        self.flush()
        for prefix, (name, table) in FILES.items():
            target = self.out / f"{name}.parquet"
            parts = sorted(self.parts.glob(f"{prefix}-*.parquet"))
            if len(parts) == 1:
                parts[0].replace(target)
            elif parts:
                pl.scan_parquet(parts).sink_parquet(self.out / f".{name}.tmp", compression="zstd", compression_level=1)
                (self.out / f".{name}.tmp").replace(target)
            else:
                pl.DataFrame(schema=schema(table)).write_parquet(target)
        shutil.rmtree(self.parts, ignore_errors=True)


def _numpy_dtype(name: str) -> type:
    dtype = COLUMNS[name].dtype
    return bool if dtype == pl.Boolean else np.int32 if dtype == pl.Int32 else np.float32


def write_history(
    cluster: SimulatedCluster,
    out: Path,
    until: datetime,
    *,
    clock: Callable[[], datetime] | None = None,
) -> int:
    """Advance a cluster to `until`, tick by tick, and write all that happened into a folder.

    Files: `telemetry.parquet` (`raw_gpu_samples`), `node.parquet` (`core_node_samples`), `ports.parquet`
    (`core_port_samples`), `ranks.parquet` (`core_job_progress`), `jobs.parquet` (canonical jobs), `sacct.txt`,
    `faults.parquet` (`core_faults`), `inventory.csv`, `truth.jsonl`, `lookalikes.jsonl`.

    Args:
        cluster: Stands at the start of the telemetry; jobs that ended before are written too.
        out: Folder, made when missing; files of these names are replaced.
        until: End of the telemetry, UTC.
        clock: Gives the present; the telemetry then goes on until it has caught up with it.

    Returns:
        Rows of telemetry.
    """
    out.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(cluster, out)
    target = until.timestamp()
    while True:
        while cluster.time + cluster.tick_s <= target + 1e-6:
            cluster.step()
            recorder.take()
        if clock is None or clock().timestamp() - cluster.time < cluster.tick_s:
            break
        target = clock().timestamp()
    recorder.close()
    cluster.jobs_frame().write_parquet(out / "jobs.parquet")
    cluster.faults_frame().write_parquet(out / "faults.parquet")
    write_replacing(out / "inventory.csv", cluster.inventory_csv().encode())
    write_replacing(out / "sacct.txt", SacctText(cluster).text())
    write_replacing(out / "truth.jsonl", jsonl(cluster.truth))
    write_replacing(out / "lookalikes.jsonl", jsonl(cluster.lookalikes))
    return recorder.rows


def aligned(when: datetime, tick_s: float) -> datetime:
    """The last multiple of the tick at or before `when`, UTC."""
    return datetime.fromtimestamp(int(when.timestamp() / tick_s) * tick_s, UTC)

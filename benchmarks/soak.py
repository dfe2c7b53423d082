"""Ten hours of a nowcast at 10,000 GPUs, ticks back to back: memory, missed ticks, journal.

Frames are made up: jobs end and begin, nodes are taken out and others come, a rack falls silent now and then, some
samples come a minute late, a few GPUs are always on their way to a limit. Ports and node sensors come too. Time is that
of the samples, the work of each tick is by the real clock. The journal is emptied as the `publish` run does it: files
of past hours go. `python -m benchmarks.soak --hours 10 --gpus 10000` prints the rows.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil

from benchmarks.fleet import ACHIEVABLE, GIB, MODEL

GPUS = 10_000
HOURS = 10.0
TICK_S = 15.0
WARM_H = 1.0  # rings are full after ten minutes, allocators settle a little later
GROWTH_MIB_PER_H = 1.0  # of memory after that: 1 % of what it takes in ten hours
PER_NODE, PER_JOB, PER_RACK = 8, 64, 64  # GPUs
JOB_ENDS = 1 / 240  # of a job at a tick: they last an hour
NODE_SWAPS = 0.02  # of a tick: a node goes and another comes
GAP_TICKS = 40  # every so often a rack is silent for twelve ticks
LATE_RATIO = 0.01


class Churn:
    """A fleet whose jobs, nodes and troubles change from tick to tick.

    Args:
        gpus: GPUs there are at any time, a multiple of those of a job.
        seed: Of the random numbers.
    """

    def __init__(self, gpus: int, seed: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.gpus = gpus - gpus % PER_JOB
        self.start = datetime(2026, 1, 5, tzinfo=UTC)
        self.node_of = [f"n{i}" for i in range(self.gpus // PER_NODE)]
        self.uuid_of = [f"GPU-{i:08x}-93c1-4a5e-b0de-{i:012x}" for i in range(self.gpus)]
        self.named = self.gpus  # numbers given to boards so far
        self.job_of = np.arange(self.gpus // PER_JOB)
        self.jobs = len(self.job_of)
        self.temp = self.rng.normal(66, 3, self.gpus)
        self.memory = self.rng.uniform(40, 74, self.gpus)
        self.trouble = np.zeros(self.gpus, dtype=np.int8)  # 0: none, 1: warming up, 2: links fill, 3: memory grows
        self.since = np.zeros(self.gpus)
        self.late: list[pl.DataFrame] = []
        self.swaps = 0

    def at(self, tick: int) -> datetime:
        return self.start + timedelta(seconds=TICK_S * tick)

    def step(self, tick: int) -> None:
        """Let a tick's worth of things happen."""
        rng = self.rng
        ended = np.flatnonzero(rng.random(len(self.job_of)) < JOB_ENDS)
        for job in ended:
            self.job_of[job], self.jobs = self.jobs, self.jobs + 1
            mine = slice(job * PER_JOB, (job + 1) * PER_JOB)
            self.memory[mine] = rng.uniform(40, 74)
            self.trouble[mine] = 0
        if rng.random() < NODE_SWAPS * len(self.node_of) / 1250:
            node = int(rng.integers(len(self.node_of)))
            self.node_of[node] = f"n{len(self.node_of) + self.swaps}"
            self.swaps += 1
            for gpu in range(node * PER_NODE, (node + 1) * PER_NODE):
                self.uuid_of[gpu] = f"GPU-{self.named:08x}-93c1-4a5e-b0de-{self.named:012x}"
                self.named += 1
        begins = rng.choice(self.gpus, max(1, self.gpus // 2000), replace=False)
        self.trouble[begins], self.since[begins] = rng.integers(1, 4, len(begins)), tick
        over = tick - self.since > 40
        self.trouble[over] = 0

    def frames(self, tick: int) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Samples of GPUs, nodes and ports of one tick, what comes late among them."""
        rng, n = self.rng, self.gpus
        course = np.clip((tick - self.since) / 30, 0, 1.1)
        temp = np.floor(np.where(self.trouble == 1, 66 + 22 * course, self.temp + rng.normal(0, 0.6, n)))
        fill = np.where(self.trouble == 2, 0.45 + 0.5 * course, 0.4 + rng.normal(0, 0.02, n))
        memory = np.where(self.trouble == 3, np.minimum(self.memory + 36 * course, 79.4), self.memory)
        values = {
            "gpu_temp_c": temp, "gpu_temp_margin_c": 87 - temp, "mem_temp_c": temp + 8,
            "gpu_power_w": np.round(temp * 9 + rng.normal(0, 2, n), 1), "sm_clock_hz": np.full(n, 1.98e9),
            "sm_active_ratio": np.clip(0.8 + rng.normal(0, 0.03, n), 0, 1),
            "fb_used_bytes": np.floor(memory * 1024) * 2.0**20, "fb_reserved_bytes": np.full(n, 0.5 * GIB),
            "fb_total_bytes": np.full(n, 80 * GIB), "nvlink_tx_bytes_per_s": fill * ACHIEVABLE,
            "nvlink_rx_bytes_per_s": fill * ACHIEVABLE * 0.99,
            "step_time_s": np.round(1 + rng.normal(0, 0.005, n), 3),
        }  # fmt: skip
        ts = pl.Series("ts", [self.at(tick)], dtype=pl.Datetime("us", "UTC"))
        gpu = pl.DataFrame(
            [
                ts.new_from_index(0, n), pl.Series("node", np.repeat(self.node_of, PER_NODE).tolist()),
                pl.Series("gpu_uuid", self.uuid_of), pl.Series("gpu_index", (np.arange(n) % 8).astype(np.int32)),
                pl.Series("job_id", np.repeat(self.job_of, PER_JOB).astype(str).tolist()),
                *(pl.Series(name, column, dtype=pl.Float32) for name, column in values.items()),
            ]
        )  # fmt: skip
        if tick % GAP_TICKS < 12:  # a rack says nothing
            first = (tick // GAP_TICKS * PER_RACK) % n
            gpu = pl.concat([gpu[:first], gpu[first + PER_RACK :]])
        is_late = pl.Series(rng.random(gpu.height) < LATE_RATIO)
        self.late.append(gpu.filter(is_late))
        gpu = gpu.filter(~is_late)
        if len(self.late) > 4:
            gpu = pl.concat([gpu, self.late.pop(0)])
        nodes = len(self.node_of)
        node = pl.DataFrame(
            {"ts": ts.new_from_index(0, nodes), "cluster": "soak", "node": self.node_of,
             "inlet_temp_c": pl.Series(24 + rng.normal(0, 0.3, nodes), dtype=pl.Float32)}
        )  # fmt: skip
        moved = np.float64(tick) * TICK_S * 20e9
        port = pl.DataFrame(
            {"ts": ts.new_from_index(0, nodes), "cluster": "soak", "node": self.node_of, "device": "mlx5_0",
             "port": "1", "tx_bytes_total": np.full(nodes, moved), "rx_bytes_total": np.full(nodes, moved),
             "speed_bytes_per_s": 50e9}
        )  # fmt: skip
        return gpu, node, port

    def inventory(self, tick: int) -> pl.DataFrame:
        n = len(self.node_of)
        return pl.DataFrame(
            {
                "observed_at": [self.at(tick)] * n, "cluster": ["soak"] * n, "node": self.node_of,
                "rack": [f"r{i // 8}" for i in range(n)], "pod": [f"p{i // 64}" for i in range(n)],
                "gpu_model": [MODEL] * n, "gpus": [8] * n, "state": ["IDLE"] * n, "reason": [None] * n,
            },
            schema_overrides={"reason": pl.String, "gpus": pl.Int32},
        )  # fmt: skip

    def running(self, tick: int) -> pl.DataFrame:
        """The jobs that run."""
        from features.vocabulary import conform

        at, n = self.at(tick), len(self.job_of)
        per = PER_JOB // PER_NODE
        return conform(
            pl.DataFrame(
                {
                    "cluster": ["soak"] * n, "job_id": [str(job) for job in self.job_of], "user": "u", "queue": "q",
                    "state": "RUNNING", "submit_time": at - timedelta(hours=5), "start_time": at - timedelta(hours=1),
                    "nodes": per, "gpus": PER_JOB, "time_limit_s": 7200, "observed_at": at,
                    "node_list": [",".join(self.node_of[i * per : (i + 1) * per]) for i in range(n)],
                }
            ),
            "core_jobs",
        )  # fmt: skip


def measure(gpus: int, hours: float) -> dict[str, float]:
    """What a soak shows, in this process."""
    from benchmarks.nowcast import learned
    from features.vocabulary import JOB_COLUMNS
    from scheduler_hints.journal import FORMAT, journal_files
    from scheduler_hints.nowcast import Nowcast
    from scheduler_hints.nowcast_config import NowcastConfig
    from scheduler_hints.snapshot import Publisher, read_snapshot, snapshot_path

    fleet, process = Churn(gpus), psutil.Process()
    ticks = round(hours * 3600 / TICK_S)
    sizes: list[tuple[float, float]] = []
    busy: list[float] = []
    places: list[int] = []
    journal = hints = unpublished = problems = version = 0
    moment = fleet.at(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        nowcast = Nowcast(
            "soak", Publisher(root, "soak", clock=lambda: moment), NowcastConfig(tick_s=TICK_S),
            registry=learned(root / "registry"), clock=time.process_time,
        )  # fmt: skip
        for tick in range(ticks):
            fleet.step(tick)
            gpu, node, port = fleet.frames(tick)
            at = fleet.at(tick)
            moment = at + timedelta(seconds=1)
            began = time.perf_counter()
            if tick % 4 == 0:
                jobs = fleet.running(tick).select(JOB_COLUMNS)
                nowcast.observe_jobs(jobs, fleet.inventory(tick), (), at)
            nowcast.observe(gpu, node, at, port=port)
            status = nowcast.tick(moment)
            busy.append(time.perf_counter() - began)
            hints += status["bottlenecks"]
            newest = read_snapshot(snapshot_path(root, "soak", "bottlenecks")).version
            unpublished += newest != version + 1 and tick > 0
            version = newest
            problems += bool(status["problems"])
            places.append(nowcast.window.count)
            if tick % 240 == 239:  # the publish run has loaded what is there; files of past hours go
                for path in journal_files(root, "soak"):
                    journal = max(journal, path.stat().st_size)
                    if path.stem < f"{moment:{FORMAT}}":
                        path.unlink()
            if tick % 20 == 19:
                gc.collect()
                sizes.append((tick * TICK_S / 3600, process.memory_info().rss / 2**20))
        files = len(journal_files(root, "soak"))
    hour, mib = np.array(sizes).T
    settled = hour >= min(WARM_H, hours / 3)
    slope = float(np.polyfit(hour[settled], mib[settled], 1)[0]) if settled.sum() > 2 else float("nan")
    return {
        "ticks": ticks, "missed": status["missed_ticks_total"], "widened": status["widened_total"],
        "unpublished": unpublished, "problems": problems, "hints": hints / ticks, "late": len(fleet.late),
        "busy median": float(np.median(busy)), "busy p99": float(np.quantile(busy, 0.99)), "busy max": max(busy),
        "first": float(np.median(mib[settled][:5])), "last": float(np.median(mib[settled][-5:])), "slope": slope,
        "boards": fleet.named, "places": max(places), "journal MiB": journal / 2**20, "journal files": files,
    }  # fmt: skip


def main(gpus: int = GPUS, hours: float = HOURS) -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    found = measure(gpus, hours)

    def row(name: str, value: float, unit: str = "", goal: str = "", is_met: bool | None = None) -> dict[str, Any]:
        return {"name": f"{gpus:,} GPUs, {hours:g} h: {name}", "value": value, "unit": unit, "goal": goal,
                "met": is_met}  # fmt: skip

    growth, missed = found["slope"], found["missed"] + found["unpublished"]
    return [
        row("ticks", found["ticks"]),
        row("ticks missed or not published", missed, "", "0", missed == 0),
        row("tick made wider", found["widened"], "", "0", found["widened"] == 0),
        row("ticks with a problem in the status", found["problems"], "", "0", found["problems"] == 0),
        row("hints at a tick, mean", found["hints"]),
        row("work of a tick, median", found["busy median"], "s"),
        row("work of a tick, p99", found["busy p99"], "s"),
        row("work of a tick, longest", found["busy max"], "s"),
        row("memory after warming up", found["first"], "MiB"),
        row("memory at the end", found["last"], "MiB"),
        row("growth of memory", growth, "MiB/h", f"≤ {GROWTH_MIB_PER_H:g} MiB/h", growth <= GROWTH_MIB_PER_H),
        row("boards that came and went", found["boards"]),
        row("places held at most", found["places"], "", "≤ 1.2 × GPUs", found["places"] <= 1.2 * gpus),
        row("journal, largest file", found["journal MiB"], "MiB"),
        row("journal, files at the end", found["journal files"], "", "≤ 2", found["journal files"] <= 2),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=GPUS)
    parser.add_argument("--hours", type=float, default=HOURS)
    chosen = parser.parse_args()
    for one in main(chosen.gpus, chosen.hours):
        met = {None: "", True: "met", False: "NOT MET"}[one["met"]]
        print(f"{one['name']:<60} {one['value']:>10.3f} {one['unit']:<5} {one['goal']:<14} {met}")

"""What nodes, ports and queues cost at a tick: 12,500 nodes and 100,000 ports beside 100,000 GPUs.

One port in a hundred marks more and more packets and one node in a hundred leaks; no steps are known, so that signs
alone count. `python -m benchmarks.units` prints processor time by stage and the memory of the windows; the whole cycle
of GPUs stands in `benchmarks/nowcast.py`.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl

from features.port_course import PortRates
from features.telemetry import RingWindow
from features.thresholds import ThresholdBook
from models.trend import TrendForecaster
from scheduler_hints.unit_nowcast import UnitNowcast

START = datetime(2026, 3, 2, tzinfo=UTC)
INTERVAL_S = 15.0
PORTS_PER_NODE = 8
TROUBLE_RATIO = 0.01
MODEL = "NVIDIA H100 80GB HBM3"
STAGES = ("rates of ports", "samples taken in", "scores")


class Fabric:
    """Made-up nodes and counters of their ports."""

    def __init__(self, nodes: int, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        ports = nodes * PORTS_PER_NODE
        names = np.array([f"n{i:05d}" for i in range(nodes)])
        self.nodes = pl.DataFrame({"node": names, "cluster": "c"})
        self.keys = pl.DataFrame(
            {
                "node": np.repeat(names, PORTS_PER_NODE), "port": "1", "cluster": "c",
                "device": [f"mlx5_{i % PORTS_PER_NODE}" for i in range(ports)],
            }
        )  # fmt: skip
        self.bytes, self.marks = rng.uniform(0, 1e14, ports), rng.uniform(0, 1e8, ports)
        self.marking = rng.random(ports) < TROUBLE_RATIO
        self.leaking = rng.random(nodes) < TROUBLE_RATIO

    def port(self, tick: int) -> pl.DataFrame:
        now = START + timedelta(seconds=INTERVAL_S * tick)
        more = np.where(self.marking, max(tick - 20, 0) * 600.0, 0.0)
        self.bytes += 20e9 * INTERVAL_S
        self.marks += (200.0 + more) * INTERVAL_S
        return self.keys.with_columns(
            pl.lit(now).alias("ts"), pl.Series("tx_bytes_total", self.bytes), pl.Series("rx_bytes_total", self.bytes),
            pl.Series("ecn_marked_total", self.marks), pl.Series("cnp_total", self.marks * 0.7),
            pl.Series("transmit_wait_total", self.marks * 500), pl.lit(0.0).alias("retransmits_total"),
            pl.lit(50e9).alias("speed_bytes_per_s"),
        )  # fmt: skip

    def node(self, tick: int) -> pl.DataFrame:
        free = np.where(self.leaking, max(0.6 - max(tick - 20, 0) * 0.04, 0.0), 0.6)
        return self.nodes.with_columns(
            pl.lit(START + timedelta(seconds=INTERVAL_S * tick)).alias("ts"),
            pl.Series("host_mem_available_bytes", free * 2e12), pl.lit(2e12).alias("host_mem_total_bytes"),
        )  # fmt: skip


def main(nodes: int = 12_500, ticks: int = 34) -> list[dict[str, Any]]:
    """Rows of the benchmark: medians over the last ticks, in which things are in trouble."""
    book = ThresholdBook(default_model=MODEL)
    fabric, rates, gpus = Fabric(nodes), PortRates(), RingWindow(book)
    units, trend = UnitNowcast(book, 45.0, 45.0), TrendForecaster()
    taken: list[tuple[float, ...]] = []
    looked = 0
    for tick in range(ticks):
        now_s = (START + timedelta(seconds=INTERVAL_S * tick)).timestamp()
        counters, node = fabric.port(tick), fabric.node(tick)
        marks = [time.process_time()]
        port = rates.take(counters)
        marks.append(time.process_time())
        units.observe(node, port, gpus, now_s)
        marks.append(time.process_time())
        scores = units.score(now_s, lambda block: (trend.forecast(block), trend.version), set())
        marks.append(time.process_time())
        taken.append(tuple(np.diff(marks)))
        looked = sum(len(scored.names) for scored in scores)
    stages = np.median(np.array(taken[-10:]), axis=0)
    what = f"{nodes:,} nodes, {nodes * PORTS_PER_NODE:,} ports"
    rows: list[dict[str, Any]] = [
        {"name": f"{what}: {stage}", "value": float(seconds), "unit": "s"}
        for stage, seconds in zip(STAGES, stages, strict=True)
    ]
    rows.append({"name": "looked at closely", "value": float(looked), "unit": ""})
    rows.append({"name": "memory of the windows", "value": units.nbytes() / 2**20, "unit": "MiB"})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=12_500)
    for row in main(parser.parse_args().nodes):
        print(f"{row['name']:<60} {row['value']:>10.3f} {row['unit']}")

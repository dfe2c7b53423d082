"""A simulated cluster whose jobs have been running for a while: `python -m tests.simulated_past` (see `--help`).

It writes that past as OpenMetrics text, as a Prometheus that scraped it would hold it, then serves the same cluster in
real time. Jobs are placed from outside, as a real Slurm placed them.
"""

import argparse
import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

from simulator.cluster import SimulatedCluster
from simulator.exporter import Exporter
from simulator.history import aligned
from simulator.server import serve


def past_lines(exporter: Exporter, seconds: float, tick_s: float) -> bytes:
    """Every page of every tick, samples with their times; `# EOF` last."""
    cluster, lines = exporter.cluster, []
    end = cluster.now + timedelta(seconds=seconds)
    while cluster.now < end:
        cluster.advance(cluster.now + timedelta(seconds=tick_s))
        exporter.exposition.refresh()
        stamp = f" {cluster.now.timestamp():.3f}".encode()
        for node in range(cluster.topology.nodes):
            page = exporter.exposition.page(node) or b""
            lines += [line + stamp for line in page.splitlines() if b"UUID=" in line]
    return b"\n".join([*lines, b"# EOF", b""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tick-s", type=float, default=2)
    parser.add_argument("--past-s", type=float, default=720)
    parser.add_argument("--job", action="append", default=[], help="ID:NODE, running since the past began")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()

    start = aligned(datetime.now(UTC), chosen.tick_s) - timedelta(seconds=chosen.past_s)
    cluster = SimulatedCluster(chosen.nodes, chosen.seed, start, chosen.tick_s, fault_scale=0, own_jobs=False)
    for text in chosen.job:
        job_id, node = text.split(":")
        cluster.place_job(job_id, "root", node)
    exporter = Exporter(cluster, f"127.0.0.1:{chosen.port}", chosen.out)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "past.om").write_bytes(past_lines(exporter, chosen.past_s, chosen.tick_s))
    exporter.write_files()
    asyncio.run(serve(exporter, "127.0.0.1", chosen.port, lambda: print("ready", flush=True)))


if __name__ == "__main__":
    main()

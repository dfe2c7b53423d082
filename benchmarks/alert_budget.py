"""How many hints and pages a simulated cluster gets, after merging, at base rates and without any fault.

Frames of the simulator go through the real nowcast, tick by tick, with the built-in trend and with a model that was
trained on another cluster; what is counted is what is published. Base rates are the simulator's assumptions
(docs/simulator.md). `python -m benchmarks.alert_budget --nodes 128 --hours 24`; `--rates none` leaves out every fault;
`--model FOLDER` keeps the trained model there, or takes the one that is there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from features.conditions import CLASSES
from models.bottleneck import HazardForecaster
from models.trend import BottleneckForecaster, TrendForecaster
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.nowcast_config import NowcastConfig
from scheduler_hints.schema import Bottleneck
from scheduler_hints.snapshot import Publisher, read_snapshot, snapshot_path

START = datetime(2026, 3, 4, 8, tzinfo=UTC)  # a Wednesday morning: the busiest hours come first
LEAD_D = 5  # days of jobs before it, so that the cluster is as full as it gets
MODEL = "NVIDIA H100 80GB HBM3"
CLUSTER = "sim"
HINTS_GOAL, PAGES_GOAL = 6.0, 1.0  # per 10,000 GPUs and hour; per 10,000 GPUs and day
BACK_S = 600.0  # a hint that comes back to the same place this soon under another id flaps
NEAR_S = 150.0  # a hint is right when a condition sets this soon after it was raised, or is set then


@dataclass(slots=True)
class Count:
    """What one nowcast published.

    Attributes:
        first: Each id as it was first published.
        last: Each id as it was last published, and when.
        pages: Ids that ever paged.
        flaps: Hints that came back to a place within `BACK_S` under another id, or went and came under the same.
    """

    first: dict[str, Bottleneck] = field(default_factory=dict)
    last: dict[str, tuple[Bottleneck, datetime]] = field(default_factory=dict)
    pages: set[str] = field(default_factory=set)
    flaps: int = 0
    _there: set[str] = field(default_factory=set)
    _ended: dict[tuple, datetime] = field(default_factory=dict)

    def see(self, hints: list[Bottleneck], now: datetime) -> None:
        """Take in what is published at a tick."""
        ids = {hint.id for hint in hints}
        for gone in self._there - ids:
            self._ended[_where(self.last[gone][0])] = now
        for hint in hints:
            if hint.id not in self._there:
                ended = self._ended.get(_where(hint))
                self.flaps += hint.id in self.first or (ended is not None and (now - ended).total_seconds() < BACK_S)
            self.first.setdefault(hint.id, hint)
            self.last[hint.id] = (hint, now)
            if hint.severity == "page":
                self.pages.add(hint.id)
        self._there = ids


def _where(hint: Bottleneck) -> tuple:
    return hint.bottleneck_class, hint.scope, hint.gpu_uuid or hint.node or hint.rack or hint.pod or tuple(hint.job_ids)


def play(
    nodes: int,
    hours: float,
    seed: int,
    forecasters: Mapping[str, BottleneckForecaster],
    *,
    tick_s: float = 15.0,
    rates: str = "default",
    scale: float = 1.0,
    root: Path,
) -> tuple[dict[str, Count], list[dict[str, Any]], float, float]:
    """Run a cluster and the nowcasts that watch it.

    Args:
        nodes: Nodes of 8 GPUs.
        hours: How long, after `LEAD_D` days of jobs without telemetry.
        seed: Seed of the cluster.
        forecasters: Name to forecaster; each has a nowcast of its own.
        tick_s: Exporters and ticks, s.
        rates: Name of the base rates, of `simulator.rates.PRESETS`; none: without disturbances and hardware faults.
        scale: Multiplies the base rates.
        root: Where snapshots are published.

    Returns:
        Counts by name, ground truth, GPU-hours, share of the GPUs that had a job.
    """
    from simulator.cluster import SimulatedCluster
    from simulator.rates import PRESETS

    cluster = SimulatedCluster(
        nodes=nodes, seed=seed, start=START - timedelta(days=LEAD_D), tick_s=tick_s, gpu_model=MODEL, cluster=CLUSTER,
        fault_scale=0.0 if rates == "none" else scale, rates=PRESETS[rates](),
    )  # fmt: skip
    cluster.advance_jobs(START)
    names = cluster.topology.node_names
    racks = pl.DataFrame({
        "node": names, "rack": [f"r{i}" for i in cluster.topology.rack_of],
        "pod": [f"p{i}" for i in cluster.topology.pod_of], "gpu_model": [MODEL] * nodes, "gpus": [8] * nodes,
    })  # fmt: skip
    config = NowcastConfig(tick_s=tick_s, exporter_interval_s=tick_s)
    watching: dict[str, tuple[Nowcast, Count]] = {}
    for name, forecaster in forecasters.items():
        folder = root / name
        nowcast = Nowcast(CLUSTER, Publisher(folder, CLUSTER), config)
        nowcast.champion.forecaster = forecaster
        watching[name] = (nowcast, Count())
    busy, ticks = 0.0, 0
    for tick in range(int(hours * 3600 / tick_s)):
        cluster.step()
        gpu, node, now = cluster.gpu_frame(), cluster.node_frame(), cluster.now + timedelta(seconds=1)
        for name, (nowcast, count) in watching.items():
            if tick % 4 == 0:
                jobs = cluster.jobs_frame(job for job in cluster.jobs.values() if job.state == "RUNNING")
                nowcast.observe_jobs(jobs, racks, (), cluster.now)
            nowcast.observe(gpu, node, now)
            nowcast.tick(now)
            count.see(_published(root / name), now)
        busy += float(gpu["job_id"].is_not_null().sum()) / (8 * nodes)
        ticks += 1
    return {name: count for name, (_, count) in watching.items()}, cluster.truth, nodes * 8 * hours, busy / ticks


def _published(root: Path) -> list[Bottleneck]:
    snapshot = read_snapshot(snapshot_path(root, CLUSTER, "bottlenecks"))
    return [msgspec.json.decode(item, type=Bottleneck) for item in snapshot.items]


def right(count: Count, truth: list[dict[str, Any]]) -> set[str]:
    """Ids of hints that a condition of their class, on one of their nodes, came true for."""
    found = set()
    for name, hint in count.first.items():
        assert hint.since is not None
        begin, end = hint.since - timedelta(seconds=NEAR_S), count.last[name][1] + timedelta(seconds=NEAR_S)
        nodes = {*hint.nodes, *count.last[name][0].nodes}
        for row in truth:
            if row["class"] != hint.bottleneck_class or row["onset"] is None or row["node"] not in nodes:
                continue
            if row["onset"] <= end and (row["clear"] is None or row["clear"] >= begin):
                found.add(name)
                break
    return found


def events(truth: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """What befell GPUs of the cluster: class and event of conditions that came true."""
    return {(row["class"], row["event"]) for row in truth if row["onset"] is not None and row["class"] in CLASSES}


def caught(count: Count, truth: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Events that some hint told of."""
    found = set()
    for row in truth:
        if row["onset"] is None or row["class"] not in CLASSES or (row["class"], row["event"]) in found:
            continue
        for name, (last, seen) in count.last.items():
            first = count.first[name]
            assert first.since is not None
            is_there = row["node"] in last.nodes or row["node"] in first.nodes
            if first.bottleneck_class == row["class"] and is_there:
                late = row["clear"] or seen
                if first.since <= late + timedelta(seconds=60) and seen >= row["onset"] - timedelta(seconds=NEAR_S):
                    found.add((row["class"], row["event"]))
                    break
    return found


def trained(folder: Path | None, cache: Path | None = None) -> HazardForecaster:
    """The model of `benchmarks.bottleneck`, learned on the clusters of `training.json`; kept in `folder` if given."""
    from benchmarks.bottleneck import fit

    if folder is not None and folder.is_dir() and any(folder.iterdir()):
        return HazardForecaster.from_files({path.name: path.read_bytes() for path in folder.iterdir()}, "trained")
    model, _, _ = fit(cache, threads=1)
    model.version = "trained"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in model.to_files().items():
            (folder / name).write_bytes(content)
    return model


def report(
    name: str, count: Count, truth: list[dict[str, Any]], gpu_hours: float, *, is_fault_free: bool
) -> Iterator[dict[str, Any]]:
    """Rows of one forecaster."""
    ten_thousand_hours = gpu_hours / 10_000
    hints, pages = len(count.first) / ten_thousand_hours, len(count.pages) / (ten_thousand_hours / 24)
    goal = (0.0, 0.0) if is_fault_free else (HINTS_GOAL, PAGES_GOAL)
    yield _row(f"{name}: hints per 10,000 GPUs and hour", hints, "", goal[0])
    yield _row(f"{name}: pages per 10,000 GPUs and day", pages, "", goal[1])
    yield _row(f"{name}: hints in all", len(count.first), "")
    yield _row(f"{name}: pages in all", len(count.pages), "")
    yield _row(f"{name}: flaps", count.flaps, "", 0.0)
    came = events(truth)
    if came:
        yield _row(f"{name}: hints that came true", len(right(count, truth)) / max(len(count.first), 1), "")
        yield _row(f"{name}: events told of", len(caught(count, truth)) / len(came), "")
    for (kind, scope), number in sorted(
        Counter((hint.bottleneck_class, hint.scope) for hint, _ in count.last.values()).items()
    ):
        yield _row(f"{name}: {kind}, {scope}", number, "")


def main(
    nodes: int = 32,
    hours: float = 6.0,
    seed: int = 21,
    *,
    rates: str = "default",
    scale: float = 1.0,
    model: Path | None = None,
    cache: Path | None = None,
    has_model: bool = True,
) -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    forecasters: dict[str, BottleneckForecaster] = {"trend": TrendForecaster()}
    if has_model:
        forecasters["model"] = trained(model, cache)
    with tempfile.TemporaryDirectory() as root:
        counts, truth, gpu_hours, busy = play(
            nodes, hours, seed, forecasters, rates=rates, scale=scale, root=Path(root)
        )  # fmt: skip
    rows = [
        _row("GPU-hours watched", gpu_hours, ""),
        _row("share of GPUs with a job", busy, ""),
        _row("events per 10,000 GPUs and hour", len(events(truth)) / (gpu_hours / 10_000), ""),
    ]
    for name, count in counts.items():
        rows += report(name, count, truth, gpu_hours, is_fault_free=rates == "none")
    return rows


def _row(name: str, value: float, unit: str, goal: float | None = None) -> dict[str, Any]:
    return {
        "name": name, "value": value, "unit": unit, "goal": "" if goal is None else f"<= {goal:g}",
        "met": None if goal is None else value <= goal,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the base rates")
    parser.add_argument("--rates", choices=("default", "every-class", "published", "none"), default="default")
    parser.add_argument("--no-model", action="store_true")
    parser.add_argument("--model", type=Path, help="folder of the trained model; made where it is missing")
    parser.add_argument("--cache", type=Path, help="folder of simulated clusters to train on")
    asked = parser.parse_args()
    for row in main(
        asked.nodes, asked.hours, asked.seed, rates=asked.rates, scale=asked.scale, model=asked.model,
        cache=asked.cache, has_model=not asked.no_model,
    ):  # fmt: skip
        mark = {True: "met", False: "NOT met", None: ""}[row["met"]]
        print(f"{row['name']:<60} {row['value']:>10.3f} {row['unit']:<3} {row['goal']:<8} {mark}".rstrip(), flush=True)

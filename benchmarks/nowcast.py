"""The nowcast's tick at 1,000, 10,000 and 100,000 GPUs: 15 quantities × 40 samples, all classes × 4 horizons.

One GPU in a thousand, a hundred or ten is in trouble: warming up, filling its links, leaking memory, losing power or
lagging behind. Each case runs in a process of its own, so that its peak memory is its own; exporters' text is made and
decoded in another, since who receives by remote-write has none. Beside them: the same by 48 queries of a real
Prometheus (`promql_peer.py`), where one is installed. `python -m benchmarks.nowcast` prints a table.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet import SLOTS, TICKS, Decoder, Fleet, pages

SIZES = (1_000, 10_000, 100_000)
SHARES = (0.001, 0.01, 0.1)  # of GPUs in trouble
HINTED = 0.9  # of GPUs in trouble that there must be hints of, or what was measured was not the work


def learned(folder: Path) -> Any:
    """A registry whose champion is a model of full size: as many trees as a real one, of made-up rows.

    An onset is as good as certain at a limit and as good as impossible far from it, so that GPUs in trouble are well
    over what it takes to publish, whatever else the trees find in rows of chance.
    """
    from features.conditions import CLASSES
    from features.peers import NEAR
    from features.windows import FEATURES, FeatureBlock
    from models.bottleneck import HazardForecaster
    from models.onsets import Rows
    from models.registry import Registry

    rng = np.random.default_rng(1)
    rows = {}
    for name in CLASSES:
        matrix = rng.normal(5, 4, (6_000, len(FEATURES))).astype(np.float32)
        near = NEAR[name]
        matrix[:, 0] = rng.uniform(-near, 3 * near, 6_000)
        chance = 1 / (1 + np.exp((matrix[:, 0] - near / 2) / (near / 10)))
        onset = np.where(rng.random(6_000) < chance, rng.uniform(1, 119, 6_000), np.inf)
        block = FeatureBlock(name, np.arange(6_000), np.zeros(6_000), matrix)
        rows[name] = Rows(
            block, np.zeros(6_000, np.int64), np.zeros(6_000, np.int64), onset, np.full(6_000, 1e6), np.ones(6_000)
        )
    registry = Registry(folder)
    version = registry.save("bottleneck", HazardForecaster.fit(rows).to_files(), {})
    registry.promote("bottleneck", version, "benchmark")
    return registry


def measure(gpus: int, share: float, *, has_text: bool) -> dict[str, float]:
    """Seconds and bytes of one case, in this process.

    Args:
        gpus: GPUs there are.
        share: Of them that are in trouble.
        has_text: Whether samples come as exporters' text, which is decoded, as by scrapes.
    """
    from features.conditions import CLASSES
    from scheduler_hints.nowcast import Nowcast
    from scheduler_hints.nowcast_config import NowcastConfig
    from scheduler_hints.snapshot import Publisher

    fleet, decoder = Fleet(gpus, share), Decoder()
    with tempfile.TemporaryDirectory() as folder:
        nowcast = Nowcast(
            "bench", Publisher(Path(folder), "bench"), NowcastConfig(), registry=learned(Path(folder) / "r")
        )
        nowcast.observe_jobs(fleet.jobs(fleet.start), fleet.inventory(), (), fleet.start)
        for tick in range(SLOTS):
            nowcast.observe(fleet.frame(tick))
        nowcast.tick(fleet.at(SLOTS - 1) + timedelta(seconds=2))  # the first loads the model
        laps: dict[str, list[float]] = {}
        for tick in range(SLOTS, SLOTS + TICKS):
            if has_text:
                texts = pages(fleet, tick)
                began = time.perf_counter()
                frame = decoder.frame(texts, fleet.nodes, fleet.at(tick))
                laps.setdefault("decode", []).append(time.perf_counter() - began)
                del texts
            else:
                frame = fleet.frame(tick)
            assert frame.height == gpus
            jobs, inventory = fleet.jobs(fleet.at(tick)), fleet.inventory()
            ready, worked = time.perf_counter(), time.process_time()
            nowcast.observe_jobs(jobs, inventory, (), fleet.at(tick))
            nowcast.observe(frame)
            status = nowcast.tick(fleet.at(tick) + timedelta(seconds=2))
            laps.setdefault("cycle", []).append(time.perf_counter() - ready)
            laps.setdefault("processor", []).append(time.process_time() - worked)
            for stage, value in status["timings_s"].items():
                laps.setdefault(f"stage {stage}", []).append(value)
        out = {name: float(np.median(values)) for name, values in laps.items()}
        if has_text:
            # The first page of each node is parsed label by label; what counts each tick is the second and later ones.
            out["decode first"] = laps["decode"][0]
        out["screened"] = float(sum(status["screened"].values()))
        out["troubled"] = float(fleet.troubled(CLASSES))
        out["bottlenecks"] = float(status["bottlenecks"])
        out["ring_mib"] = status["ring_bytes"] / 2**20
        out["problems"] = float(len(status["problems"]))
        print(*status["problems"].items(), sep="\n", file=sys.stderr)
    out["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return out


def _child(module: str, *arguments: str) -> Any:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _case(gpus: int, share: float, *, has_text: bool) -> dict[str, float]:
    return _child("nowcast", "--gpus", str(gpus), "--share", str(share), *(["--text"] if has_text else []))


def main(*, sizes: tuple[int, ...] = SIZES, peer_sizes: tuple[int, ...] = (10_000,)) -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    found: dict[tuple[int, float], dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for gpus in sizes:
        for share in SHARES:
            found[gpus, share] = figures = _case(gpus, share, has_text=False)
            name, is_full = f"{gpus:,} GPUs, {share:.1%} in trouble", gpus == SIZES[-1]
            cycle, memory, hints = figures["cycle"], figures["memory_mib"], figures["bottlenecks"]
            met = hints >= HINTED * figures["troubled"] if share < SHARES[-1] else None  # more of them share a node
            rows += [
                _row(f"{name}: samples in memory to published", cycle, "s", "≤ 2 s" * is_full, cycle <= 2, is_full),
                _row(f"{name}: peak memory", memory, "MiB", "≤ 2,048 MiB" * is_full, memory <= 2048, is_full),
                _row(f"{name}: GPU × class looked at closely", figures["screened"], ""),
                _row(
                    f"{name}: hints", hints, "", "" if met is None else f"≥ {HINTED:.0%} of those in trouble",
                    met, met is not None,
                ),
            ]  # fmt: skip
        middle = found[gpus, SHARES[1]]
        rows += [
            _row(f"{gpus:,} GPUs: of it, {stage.removeprefix('stage ')}", value, "s")
            for stage, value in middle.items()
            if stage.startswith("stage ") and stage not in ("stage tick", "stage reload")
        ]
        rows.append(_row(f"{gpus:,} GPUs: windows in memory", middle["ring_mib"], "MiB"))
        text = _case(gpus, SHARES[1], has_text=True)
        rows += [
            _row(f"{gpus:,} GPUs: decode of exporters' text (scrape)", text["decode"], "s"),
            _row(f"{gpus:,} GPUs: the same, first time", text["decode first"], "s"),
            _row(f"{gpus:,} GPUs: peak memory, text and its series in it too", text["memory_mib"], "MiB"),
        ]
        if gpus in peer_sizes:
            rows += _beside_promql(gpus, middle["cycle"], text["decode"])
    for share in SHARES:
        small, large = found[sizes[-2], share]["cycle"], found[sizes[-1], share]["cycle"]
        ratio = large / small / (sizes[-1] / sizes[-2])
        rows.append(
            _row(f"cost per GPU, {sizes[-1]:,} against {sizes[-2]:,}, {share:.1%} in trouble", ratio, "×",
                 "≤ 1.2 (linear)", ratio <= 1.2, True)
        )  # fmt: skip
    return rows


def _beside_promql(gpus: int, cycle: float, decode: float) -> list[dict[str, Any]]:
    peer = _child("promql_peer", "--gpus", str(gpus))
    if peer is None:
        return []
    ratio = peer["seconds"] / cycle
    return [
        _row(f"{gpus:,} GPUs: 48 queries of predict_linear in Prometheus", peer["seconds"], "s"),
        _row(f"{gpus:,} GPUs: they ÷ the tick", ratio, "×", "≥ 5 ×", ratio >= 5, True),
        _row(f"{gpus:,} GPUs: they ÷ the tick with decoding", peer["seconds"] / (cycle + decode), "×"),
    ]


def _row(
    name: str, value: float, unit: str, goal: str = "", is_met: bool | None = None, has_goal: bool = False
) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": is_met if has_goal else None}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, help="measure this size in this process and print JSON")
    parser.add_argument("--share", type=float, default=SHARES[1], help="GPUs in trouble, of all")
    parser.add_argument("--text", action="store_true", help="samples come as exporters' text")
    chosen = parser.parse_args()
    if chosen.gpus:
        print(json.dumps(measure(chosen.gpus, chosen.share, has_text=chosen.text)))
    else:
        for row in main():
            print(f"{row['name']:<66} {row['value']:>10.3f} {row['unit']:<4} {row['goal']}")

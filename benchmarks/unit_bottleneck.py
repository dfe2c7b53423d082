"""How well host memory and fabric congestion are forecast on simulated clusters that no model was trained or chosen on.

As `benchmarks/bottleneck.py` does for classes of GPUs: learned on pooled clusters, judged on those of
`unit_acceptance.json`, which have other seeds and GPU models; a fifth of the samples missing, two onsets in five steps
without a precursor. Steps of jobs are not told, so that signs alone count as congestion. Rates are high, so that a day
of a small cluster has enough onsets; precision at base rates would be lower. `python -m benchmarks.unit_bottleneck`
takes some ten minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from benchmarks.bottleneck_rows import Asked, onsets_of, pooled
from benchmarks.bottleneck_scores import count
from benchmarks.scenarios import committed
from features.thresholds import ThresholdBook
from features.unit_history import UnitHistory
from models.bottleneck import HazardForecaster
from models.naive_onsets import NAMES, NaiveOnsets
from models.onset_scores import brier, skill
from models.onsets import course, tick_rows
from models.trend import HORIZONS_S, TrendForecaster
from simulator.cluster import SimulatedCluster
from simulator.events import Rates

START = datetime(2026, 3, 2, tzinfo=UTC)
CLASSES = ("host_memory", "fabric_congestion")
RATES = {"thermal": 0.0, "nvlink": 0.0, "memory": 0.0, "hot_aisle": 0.0, "fabric": 0.03, "host_memory": 0.03}
NODES, HOURS, MISSING = 32, 12.0, 0.2
TRAINING = [(311, 5.0), (312, 5.0), (313, 15.0), (314, 15.0), (315, 15.0), (316, 30.0), (317, 30.0)]
ACCEPTANCE = Path(__file__).with_name("unit_acceptance.json")
ACCEPTANCE_SHA256 = "3be06215a63b857e5950a02b027d39913a903faa232888624a4ed8aab0877559"
THRESHOLDS = (0.5, 0.7)
TRAINED_ON = "NVIDIA H100 80GB HBM3"


class Scenario(msgspec.Struct, frozen=True):
    """One simulated cluster that is judged on."""

    seed: int
    gpu_model: str
    sampling_s: float
    hours: float


def acceptance(path: Path = ACCEPTANCE) -> list[Scenario]:
    """The clusters that are judged on.

    Raises:
        ScenarioError: The file is not the committed one.
    """
    return msgspec.json.decode(committed(path, ACCEPTANCE_SHA256), type=list[Scenario])


def asked(seed: int, sampling_s: float, gpu_model: str = TRAINED_ON, hours: float = HOURS) -> dict[str, Asked]:
    """Rows and onsets of both classes on one cluster."""
    cluster = SimulatedCluster(
        nodes=NODES, seed=seed, start=START - timedelta(days=1), tick_s=sampling_s, rates=Rates(**RATES),
        gpu_model=gpu_model,
    )  # fmt: skip
    cluster.advance_jobs(START)
    taken: dict[str, list[pl.DataFrame]] = {name: [] for name in CLASSES}
    for _ in range(int(hours * 3600 / sampling_s)):
        cluster.step()
        taken["host_memory"].append(cluster.node_frame())
        taken["fabric_congestion"].append(cluster.port_frame())
    rng = np.random.default_rng(seed)
    truth = pl.DataFrame(cluster.truth, infer_schema_length=None)
    out = {}
    for name, frames in taken.items():
        samples = pl.concat(frames)
        samples = samples.filter(pl.Series(rng.random(samples.height) >= MISSING))
        history = UnitHistory(name, samples, ThresholdBook())
        history.stale_s = 2 * sampling_s + 5.0  # as of the nowcast
        of = course(history, name, ThresholdBook())
        rows = tick_rows(
            history, of, float(history.ts.min()), float(history.ts.max()), tick_s=max(sampling_s, 5.0), seed=seed
        )
        out[name] = Asked(rows, onsets_of(history, of, truth, column="node", slack_s=90.0), len(history.ts))
    return out


def main() -> Iterator[str]:
    """Lines of the benchmark."""
    parts = [asked(seed, sampling_s) for seed, sampling_s in TRAINING]
    train = {name: pooled([part[name].rows for part in parts]) for name in CLASSES}
    model = HazardForecaster.fit(train, seed=1, threads=1)
    judged = acceptance()
    for sampling_s in sorted({one.sampling_s for one in judged}):
        clusters = [
            asked(one.seed, sampling_s, one.gpu_model, one.hours) for one in judged if one.sampling_s == sampling_s
        ]
        for name in CLASSES:
            yield from _class(
                f"{name}, {sampling_s:g} s", [part[name] for part in clusters], model, NaiveOnsets(train[name])
            )


def _class(title: str, clusters: list[Asked], model: HazardForecaster, naive: NaiveOnsets) -> Iterator[str]:
    given: dict[str, list[Any]] = {"model": [model.forecast(of.rows.block) for of in clusters]}
    given["trend"] = [TrendForecaster().forecast(of.rows.block) for of in clusters]
    given |= {rule: [naive.forecast(rule, of.rows.block) for of in clusters] for rule in NAMES}
    rows = pooled([of.rows for of in clusters])
    scores = {who: brier(rows, np.concatenate(some)) for who, some in given.items()}
    best, gains = skill(scores["model"], {who: value for who, value in scores.items() if who != "model"})
    told = " / ".join(f"{gain:.2f}" for gain in gains)
    yield f"{title}: Brier skill at {' / '.join(map(str, HORIZONS_S))} s over {best}: {told}"
    for who in ("model", "trend"):
        for threshold in THRESHOLDS if who == "model" else (0.5,):
            n = reduce(add, (count(of, p, threshold) for of, p in zip(clusters, given[who], strict=True)))
            ramps = int(n.is_ramp.sum())
            yield (
                f"{title}: {who} at P ≥ {threshold}: precision {n.precision:.2f} of {n.claims}, recall "
                f"{n.recall(n.is_ramp):.2f} of {ramps} with a precursor, {n.recall():.2f} of {len(n.lead_s)}, "
                f"lead {n.lead:.0f} s"
            )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for line in main():
        print(line, flush=True)

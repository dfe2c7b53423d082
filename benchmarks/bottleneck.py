"""How well bottleneck onsets are forecast: learned on one simulated cluster, judged on another of a different seed.

Labels come from the rules of `features/labels.py` on what the exporters showed; the simulator's ground truth serves
only to tell onsets with a precursor (forecastable) from steps. What befalls a gang at once is one event. Base rates are
raised by `--scale`, so that a day holds enough onsets. `python -m benchmarks.bottleneck` prints figures beside every
baseline; it takes some minutes.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl

from features.conditions import CLASSES, INPUTS
from features.history import SampleHistory
from features.thresholds import ThresholdBook
from models.bottleneck import HazardForecaster
from models.naive_onsets import NAMES, NaiveOnsets
from models.onset_scores import alarms, all_rows, average_precision, brier, skill
from models.onsets import Course, course, sample_rows, screen_recall
from models.trend import HORIZONS_S, TrendForecaster

START = datetime(2026, 3, 2, tzinfo=UTC)
MODEL = "NVIDIA H100 80GB HBM3"
BOOK = ThresholdBook(default_model=MODEL)


def simulate(
    seed: int, nodes: int, hours: float, tick_s: float, scale: float
) -> tuple[SampleHistory, pl.DataFrame, pl.DataFrame]:
    """Samples as recorded, jobs, and the ground truth of one cluster."""
    from simulator.cluster import SimulatedCluster
    from simulator.events import Rates

    cluster = SimulatedCluster(
        nodes=nodes, seed=seed, start=START - timedelta(days=2), tick_s=tick_s, fault_scale=scale, gpu_model=MODEL,
        rates=Rates.of_every_class(),
    )  # fmt: skip
    cluster.advance_jobs(START)
    keep = ["ts", "cluster", "node", "gpu_uuid", "job_id", *(name for name in INPUTS if name != "inlet_temp_c")]
    gpu, node = [], []
    for _ in range(int(hours * 3600 / tick_s)):
        cluster.step()
        gpu.append(cluster.gpu_frame().select(keep))
        node.append(cluster.node_frame().select("ts", "node", "inlet_temp_c"))
    truth = pl.DataFrame(cluster.truth, infer_schema_length=None)
    history = SampleHistory(pl.concat(gpu), BOOK, node_samples=pl.concat(node))
    return history, cluster.jobs_frame(), truth


def forecastable(history: SampleHistory, of: Course, truth: pl.DataFrame) -> np.ndarray:
    """Which labelled onsets were ramps by the ground truth."""
    ramps = truth.filter((pl.col("class") == of.bottleneck_class) & pl.col("onset").is_not_null() & ~pl.col("is_step"))
    times: dict[str, list[float]] = {}
    for uuid, onset in ramps.select("gpu_uuid", pl.col("onset").dt.epoch("us") / 1e6).iter_rows():
        times.setdefault(uuid, []).append(onset)
    return np.array(
        [
            any(abs(history.ts[row] - onset) <= 60 for onset in times.get(history.uuids[history.gpu[row]], ()))
            for row in of.onset_row
        ],
        dtype=bool,
    )


def main(
    train_seed: int = 11,
    test_seed: int = 13,
    nodes: int = 64,
    hours: float = 24,
    tick_s: float = 15,
    scale: float = 20,
    threads: int = 2,
) -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    history, jobs, _ = simulate(train_seed, nodes, hours, tick_s, scale)
    begin, end = float(history.ts.min()), float(history.ts.max())
    courses = {name: course(history, name, BOOK, None, jobs) for name in CLASSES}
    train = {name: sample_rows(history, courses[name], begin, end, seed=1) for name in CLASSES}
    began = time.perf_counter()
    model = HazardForecaster.fit(train, seed=1, threads=threads)
    rows = [_row("fit of all classes", time.perf_counter() - began, "s")]
    naive = {name: NaiveOnsets(train[name]) for name in CLASSES}
    del history, courses
    history, jobs, truth = simulate(test_seed, nodes, hours, tick_s, scale)
    begin, end = float(history.ts.min()), float(history.ts.max())
    for name in CLASSES:
        of = course(history, name, BOOK, None, jobs)
        asked = all_rows(history, of, begin, end)
        can = forecastable(history, of, truth)
        given = {"model": model.forecast(asked.block), "trend": TrendForecaster().forecast(asked.block)}
        given |= {rule: naive[name].forecast(rule, asked.block) for rule in NAMES}
        scores = {who: brier(asked, p) for who, p in given.items()}
        best, gains = skill(scores["model"], {who: value for who, value in scores.items() if who != "model"})
        seen, total = screen_recall(history, of, begin, end)
        rows += [
            _row(f"{name}: onsets, GPU by GPU", total, ""),
            _row(f"{name}: screen, share of GPU-ticks looked at", len(asked) / len(history.ts), ""),
            _row(f"{name}: screen, recall of onsets", seen / max(total, 1), ""),
            *(
                _row(f"{name}: Brier skill {h} s, best baseline {best}", float(gain), "", "> 0", bool(gain > 0))
                for h, gain in zip(HORIZONS_S, gains, strict=True)
            ),
        ]
        for who, p in given.items():
            found = alarms(history, of, asked, p, begin, end, is_forecastable=can)
            rows += [
                _row(f"{name}: {who}: Brier 120 s × 1,000", 1000 * float(scores[who][-1]), ""),
                _row(f"{name}: {who}: average precision 120 s", average_precision(asked, p), ""),
                _row(f"{name}: {who}: precision of {found.raised} alarms", found.precision, ""),
                _row(f"{name}: {who}: recall of all {found.events} events", found.recall, ""),
                _row(
                    f"{name}: {who}: recall of {found.forecastable} events with a precursor",
                    found.forecastable_recall,
                    "",
                ),
                _row(f"{name}: {who}: recall GPU by GPU", found.onsets_caught / max(found.onsets, 1), ""),
                _row(f"{name}: {who}: lead, median", found.lead_s, "s"),
            ]
    return rows


def _row(name: str, value: float, unit: str, goal: str = "", is_met: bool | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": is_met}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option, kind, default in (
        ("train-seed", int, 11), ("test-seed", int, 13), ("nodes", int, 64), ("hours", float, 24.0),
        ("tick-s", float, 15.0), ("scale", float, 20.0), ("threads", int, 2),
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=kind, default=default)
    for row in main(**{name.replace("-", "_"): value for name, value in vars(parser.parse_args()).items()}):
        print(f"{row['name']:<75} {row['value']:>10.3f} {row['unit']:<3} {row['goal']}")

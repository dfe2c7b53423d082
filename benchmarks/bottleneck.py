"""How well bottleneck onsets are forecast on simulated clusters that no model was trained or chosen on.

Learned on the pooled clusters of `training.json`, judged on those of `acceptance.json`: other seeds, other GPU models,
samples every 1 to 30 s, a fifth of them missing, 40 % of onsets without any precursor. Labels come from the rules of
`features/labels.py` on what the exporters showed; the simulator's ground truth tells ramps from steps and when an onset
truly came. Beside the model: the built-in trend, the naive rules, and a forecaster who knows the simulator
(`benchmarks/bottleneck_bound.py`). `python -m benchmarks.bottleneck --cache DIR` keeps simulated clusters and rows; it
takes half an hour without them, minutes with them.
"""

from __future__ import annotations

import argparse
import time
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.bottleneck_bound import bounds
from benchmarks.bottleneck_rows import Asked, asked, pooled
from benchmarks.bottleneck_scores import Count, count
from benchmarks.scenarios import ACCEPTANCE, Scenario, acceptance
from models.bottleneck import HazardForecaster
from models.naive_onsets import NAMES, NaiveOnsets
from models.onset_scores import brier, skill
from models.onsets import Rows
from models.trend import HORIZONS_S, TrendForecaster

CLASSES = ("thermal_throttle", "power_throttle", "nvlink_saturation", "memory_exhaustion", "straggler")
TRAINING = ACCEPTANCE.with_name("training.json")
# Rows ahead of an onset and others that are kept to learn from, by tick: as many looks for any sampling.
SHARES = {5.0: (0.5, 0.12), 15.0: (1.0, 0.35), 30.0: (1.0, 0.7)}
THRESHOLDS = (0.4, 0.5, 0.6, 0.7)
SKILL_GOAL, PRECISION_GOAL, RECALL_GOAL = 0.15, 0.80, 0.85
LEAD_GOAL_S = {1.0: 45.0, 5.0: 45.0, 15.0: 30.0, 30.0: 30.0}
LENGTHS_S = (0.0, 180.0, 600.0, np.inf)


def training(path: Path = TRAINING) -> list[Scenario]:
    """Clusters to learn on."""
    return msgspec.json.decode(path.read_bytes(), type=list[Scenario])


def fit(cache: Path | None, threads: int) -> tuple[HazardForecaster, dict[str, Rows], float]:
    """The forecaster of all classes, the rows it learned from, and seconds of CPU the fit took."""
    parts: dict[str, list[Rows]] = {name: [] for name in CLASSES}
    for scenario in training():
        for name, of in asked(scenario, CLASSES, cache, SHARES[max(scenario.sampling_s, 5.0)]).items():
            parts[name].append(of.rows)
    rows = {name: pooled(some) for name, some in parts.items()}
    began = time.process_time()
    model = HazardForecaster.fit(rows, seed=1, threads=threads)
    return model, rows, time.process_time() - began


def main(cache: Path | None = None, threads: int = 1, samplings: tuple[float, ...] = ()) -> list[dict[str, Any]]:
    """Rows of the benchmark.

    Args:
        cache: Folder where simulated clusters and rows are kept; None: all is made anew.
        threads: Threads of the fit.
        samplings: Of the acceptance scenarios, those with these; empty: all.
    """
    model, train, seconds = fit(cache, threads)
    out = [_row("fit of all classes, CPU", seconds, "s", "≤ 120", seconds <= 120)]
    naive = {name: NaiveOnsets(train[name]) for name in CLASSES}
    judged: dict[float, list[dict[str, Asked]]] = {}
    for scenario in acceptance():
        if not samplings or scenario.sampling_s in samplings:
            judged.setdefault(scenario.sampling_s, []).append(asked(scenario, CLASSES, cache))
    for sampling_s, clusters in judged.items():
        for threshold, precision, recall, lead in bounds(sampling_s, THRESHOLDS):
            out += [
                _row(f"{sampling_s:g} s: bound at P ≥ {threshold}: precision", precision, ""),
                _row(f"{sampling_s:g} s: bound at P ≥ {threshold}: recall of those with a precursor", recall, ""),
                _row(f"{sampling_s:g} s: bound at P ≥ {threshold}: lead, median", lead, "s"),
            ]
        for name in CLASSES:
            out += _class(f"{name}, {sampling_s:g} s", sampling_s, [of[name] for of in clusters], model, naive[name])
    return out


def _class(
    title: str, sampling_s: float, clusters: list[Asked], model: HazardForecaster, naive: NaiveOnsets
) -> list[dict[str, Any]]:
    given = {"model": [model.forecast(of.rows.block) for of in clusters]}
    given["trend"] = [TrendForecaster().forecast(of.rows.block) for of in clusters]
    given |= {rule: [naive.forecast(rule, of.rows.block) for of in clusters] for rule in NAMES}
    rows = pooled([of.rows for of in clusters])
    scores = {who: brier(rows, np.concatenate(some)) for who, some in given.items()}
    best, gains = skill(scores["model"], {who: value for who, value in scores.items() if who != "model"})
    claimed = [h for h in HORIZONS_S if sampling_s < 30 or h >= 90]
    out = [
        _row(f"{title}: screen, share of samples looked at", len(rows) / max(sum(of.samples for of in clusters), 1), "")
    ]
    for h, gain in zip(HORIZONS_S, gains, strict=True):
        goal = (f"≥ {SKILL_GOAL}", bool(gain >= SKILL_GOAL)) if h in claimed else ("", None)
        out.append(_row(f"{title}: Brier skill {h} s, best baseline {best}", float(gain), "", *goal))
    for who in ("model", "trend", "predict_linear"):
        for threshold in THRESHOLDS if who == "model" else (0.5,):
            n = _count(clusters, given[who], threshold)
            goals = who == "model" and threshold == 0.5
            out += _counts(f"{title}: {who} at P ≥ {threshold}", n, LEAD_GOAL_S[sampling_s] if goals else None)
            if goals:
                out += _by_length(title, n)
    return out


def _count(clusters: list[Asked], given: list[Any], threshold: float) -> Count:
    return reduce(add, (count(of, p, threshold) for of, p in zip(clusters, given, strict=True)))


def _counts(title: str, n: Count, lead_goal_s: float | None) -> list[dict[str, Any]]:
    recall, ramps = n.recall(n.is_ramp), int(n.is_ramp.sum())
    precise, caught, early = ("", None), ("", None), ("", None)
    if lead_goal_s is not None:
        precise = (f"≥ {PRECISION_GOAL}", n.precision >= PRECISION_GOAL)
        caught = (f"≥ {RECALL_GOAL}", recall >= RECALL_GOAL)
        early = (f"≥ {lead_goal_s:g}", n.lead >= lead_goal_s)
    return [
        _row(f"{title}: precision of {n.claims} claims", n.precision, "", *precise),
        _row(f"{title}: recall of {ramps} events with a precursor", recall, "", *caught),
        _row(f"{title}: recall of all {len(n.lead_s)} events", n.recall(), ""),
        _row(f"{title}: lead, median", n.lead, "s", *early),
    ]


def _by_length(title: str, n: Count) -> list[dict[str, Any]]:
    out = []
    for low, high in pairwise(LENGTHS_S):
        of = n.is_ramp & (n.length_s >= low) & (n.length_s < high)
        lead = n.lead_s[of & ~np.isnan(n.lead_s)]
        out += [
            _row(f"{title}: ramps of {low:g} to {high:g} s: recall of {int(of.sum())}", n.recall(of), ""),
            _row(
                f"{title}: ramps of {low:g} to {high:g} s: lead", float(np.median(lead)) if len(lead) else np.nan, "s"
            ),
        ]
    return out


def _row(name: str, value: float, unit: str, goal: str = "", is_met: bool | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": is_met}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sampling-s", type=float, nargs="*", default=[])
    options = parser.parse_args()
    for row in main(options.cache, options.threads, tuple(options.sampling_s)):
        met = "" if row["met"] is None else "met" if row["met"] else "missed"
        print(f"{row['name']:<92} {row['value']:>8.3f} {row['unit']:<2} {row['goal']:<7} {met}")

"""On which the forecasts of a replay were chosen: two traces that are not judged on, at three loads each.

llnl-atlas-2006 with its submissions drawn together until it is busy, and the GPU jobs of cedar-2021 on three sizes of
cluster. For each, by number of newest runs and quantile, over four shaken inputs: the share of the way from
EASY with limits to clairvoyance, the share of jobs that start after their first promise, and the longest wait over that
of EASY-SJBF with limits. Chosen is what closes most of
the gap, less what its longest wait is over 1.1, among those of which at most 0.7 % start late.
`python -m benchmarks.replay_choice` takes some five minutes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from models.replay.policies import FORECAST, Rule, run
from models.replay.scores import Scores, score
from models.replay.shaking import shaken
from models.replay.workload import Workload, workload_of

NEWEST, QUANTILES = (10, 20, 40, 60, 100), (0.1, 0.3, 0.5, 0.6, 0.7, 0.8)
DRAWS, SEED = 2, 9
MOST_LATE, LONGEST_WAIT = 0.007, 1.1


def workloads(traces: Path) -> Iterator[tuple[str, Workload, int]]:
    """Name, jobs and processors."""
    atlas = workload_of(pl.read_parquet(traces / "jobs" / "llnl-atlas-2006.parquet"), 9_216, "cpus")
    for share in (0.80, 0.84, 0.88):
        yield f"atlas, time × {share}", replace(atlas, submit=(atlas.submit * share).astype(np.int64)), 9_216
    cedar = pl.read_parquet(traces / "jobs" / "cedar-2021.parquet").filter(pl.col("gpus") > 0)
    work = workload_of(cedar, 100_000, "gpus")
    busy = float((work.procs * work.run).sum() / work.submit.max())
    for size in (1.15, 1.3, 1.5):
        yield f"cedar, {size} × its load", work, int(busy * size)


def figures(work: Workload, total: int) -> np.ndarray:
    """Gap closed, late share and longest wait, medians over shaken inputs; shape (3, newest, quantiles)."""
    copies = [copy for _, copy in shaken(work, DRAWS, SEED)]

    def scores(rule: Rule) -> list[Scores]:
        return [score(copy, run(copy, total, rule), total) for copy in copies]

    easy, limits, true = scores(Rule("easy")), scores(Rule("easy-sjbf")), scores(Rule("easy-sjbf", "true"))
    out = np.zeros((3, len(NEWEST), len(QUANTILES)))
    for i, j in np.ndindex(out.shape[1:]):
        rule = replace(FORECAST, newest=NEWEST[i], quantile=QUANTILES[j])
        rows = [
            ((e.avebsld - m.avebsld) / (e.avebsld - t.avebsld), m.late_share, m.wait_max_s / s.wait_max_s)
            for m, e, s, t in zip(scores(rule), easy, limits, true, strict=True)
        ]
        out[:, i, j] = np.median(rows, axis=0)
    return out


def show(values: np.ndarray) -> None:
    """Print one table."""
    named = pl.DataFrame(values.round(4), schema=[f"q{q}" for q in QUANTILES])
    print(named.with_columns(newest=pl.Series(NEWEST)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("WEATHERGLASS_TRACES", "../shared/traces")))
    found = []
    for name, jobs, processors in workloads(parser.parse_args().traces):
        found.append(figures(jobs, processors))
        print(f"{name}: gap closed on {processors:,} processors", flush=True)
        show(found[-1][0])
    every = np.array(found)
    for what, values in zip(("gap closed", "late share", "longest wait"), every.mean(axis=0), strict=True):
        print(f"mean: {what}")
        show(values)
    mean = every.mean(axis=0)
    worth = np.where(mean[1] <= MOST_LATE, mean[0] - np.maximum(mean[2] - LONGEST_WAIT, 0), -np.inf)
    i, j = np.unravel_index(worth.argmax(), worth.shape)
    print(f"chosen: newest {NEWEST[i]}, quantile {QUANTILES[j]}")

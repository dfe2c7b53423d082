"""What forecasts of runtimes are worth to a scheduler, in replays of kth-sp2-1996, and how long a replay takes.

Published figures first; then `models.replay.policies.FORECAST`, which was chosen on other traces
(`benchmarks/replay_choice.py`), over its neighbourhood and over shaken inputs, beside limits, twice the limits and
clairvoyance; then what an unpatched Slurm makes of it. `python -m benchmarks.replay` takes half a minute.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from models.replay.policies import EASY_PLUS_PLUS, FORECAST, Rule, rule_of, run
from models.replay.scores import Scores, interval, score
from models.replay.shaking import shaken
from models.replay.workload import Workload, workload_of

TOTAL = 100
PUBLISHED = {
    "EASY": (Rule("easy"), 92.58), "EASY-SJBF": (Rule("easy-sjbf"), 69.41),
    "clairvoyant": (Rule("easy-sjbf", "true"), 49.85), "EASY++": (EASY_PLUS_PLUS, 63.50),
    "2 × limits": (Rule("easy-sjbf", scale=2.0), 58.91),
}  # fmt: skip
NEIGHBOURS = [
    replace(FORECAST, newest=newest, quantile=round(FORECAST.quantile + shift, 2))
    for newest in sorted({max(int(FORECAST.newest * by), 3) for by in (0.5, 0.65, 0.8, 1.0, 1.25, 1.5, 2.0)})
    for shift in (-0.1, -0.05, 0.0, 0.05, 0.1)
]


def kth(traces: Path) -> Workload:
    """The jobs, as published figures have them."""
    return workload_of(pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet"), TOTAL, "cpus")


def _scores(work: Workload, rule: Rule) -> Scores:
    return score(work, run(work, TOTAL, rule), TOTAL)


def main(traces: Path, draws: int = 20) -> Iterator[tuple[str, str, str]]:
    """Rows: what, measured, goal."""
    work = kth(traces)
    found: dict[str, Scores] = {}
    for name, (rule, published) in PUBLISHED.items():
        found[name] = _scores(work, rule)
        off = found[name].avebsld / published - 1
        yield name, f"{found[name].avebsld:.3f} ({off:+.2%})", f"{published} ± 0.5 %"
    repeated = workload_of(pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").head(30_000), TOTAL, "cpus")
    began = time.perf_counter()
    run(repeated, TOTAL, FORECAST)
    yield f"one replay of {len(repeated):,} jobs, compiled", f"{time.perf_counter() - began:.3f} s", "≤ 1 s"
    worst, best = found["EASY"].avebsld, found["clairvoyant"].avebsld
    goal = worst - 0.9 * (worst - best)

    def gap(value: float) -> str:
        return f"{value:.2f} ({(worst - value) / (worst - best):.1%} of the gap)"

    mine = _scores(work, FORECAST)
    yield "forecasts, as chosen", gap(mine.avebsld), f"≤ {goal:.2f}"
    near = np.array([_scores(work, rule).avebsld for rule in NEIGHBOURS])
    yield (
        f"forecasts, median of {len(near)} neighbours",
        f"{gap(float(np.median(near)))}, {near.min():.2f} to {near.max():.2f}",
        f"≤ {goal:.2f}",
    )
    rules = {"easy": Rule("easy"), "limits": Rule("easy-sjbf"), "2 × limits": Rule("easy-sjbf", scale=2.0),
             "EASY++": EASY_PLUS_PLUS, "forecasts": FORECAST, "true": Rule("easy-sjbf", "true")}  # fmt: skip
    moved: dict[str, dict[str, list[Scores]]] = {name: {"submits": [], "dropped": []} for name in rules}
    for kind, copy in shaken(work, draws):
        for name, rule in rules.items():
            moved[name][kind].append(_scores(copy, rule))
    for kind in ("submits", "dropped"):
        of = {name: np.array([one.avebsld for one in moved[name][kind]]) for name in rules}
        share = interval((of["easy"] - of["forecasts"]) / (of["easy"] - of["true"]))
        yield (
            f"gap closed, {draws} × {kind}",
            f"{share[0]:.1%} [{share[1]:.1%}, {share[2]:.1%}]",
            "≥ 90 % in the median",
        )
        for other in ("limits", "2 × limits", "EASY++", "true"):
            ratio = interval(of["forecasts"] / of[other])
            wanted = "all under 1" if other == "2 × limits" else ""
            yield f"forecasts over {other}, {kind}", f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]", wanted
        late = interval(np.array([one.late_share for one in moved["forecasts"][kind]]))
        yield f"started after the first promise, {kind}", f"{late[0]:.2%} [{late[1]:.2%}, {late[2]:.2%}]", "≤ 0.7 %"
    yield "started after the first promise, as recorded", f"{mine.late_share:.2%}", "≤ 0.7 %"
    longest = mine.wait_max_s / found["EASY-SJBF"].wait_max_s
    yield "longest wait over EASY-SJBF's with limits", f"{longest:.2f}", "≤ 1.1"
    slurm, helped = _scores(work, Rule("slurm-actuable")), _scores(work, rule_of("slurm-actuable", "forecast"))
    slowdowns = f"{slurm.avebsld:.1f} → {helped.avebsld:.1f}"
    yield "slurm-actuable: limits → forecasts (time-min), mean slowdown", slowdowns, ""
    yield "slurm-actuable: mean wait h", f"{slurm.wait_mean_s / 3600:.2f} → {helped.wait_mean_s / 3600:.2f}", ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("WEATHERGLASS_TRACES", "../shared/traces")))
    parser.add_argument("--draws", type=int, default=20)
    asked = parser.parse_args()
    for name, value, wanted in main(asked.traces, asked.draws):
        print(f"{name:<62} {value:<44} {wanted}".rstrip(), flush=True)

"""Accuracy of the job forecasters on the recorded traces, beside their baselines.

`python -m benchmarks.accuracy [--traces FOLDER] [--task runtime|wait|job_failure] [--threads N] [trace …]`; some
minutes per trace. The trace names are files of `jobs/`; by default kth-sp2-1996, llnl-atlas-2006 and cedar-2021.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import polars as pl

from models.backtest import backtest
from models.tasks import TASKS

TRACES = ("kth-sp2-1996", "llnl-atlas-2006", "cedar-2021")
GOAL_MALE = {"kth-sp2-1996": 0.995, "llnl-atlas-2006": 1.093, "cedar-2021": 1.375}


def main() -> None:
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=list(TRACES))
    parser.add_argument("--folder", default=os.environ.get("WEATHERGLASS_TRACES") or here.parent / "shared" / "traces")
    parser.add_argument("--task", action="append", choices=list(TASKS), help="may be given again; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for trace in arguments.traces:
        jobs = pl.read_parquet(Path(arguments.folder) / "jobs" / f"{trace}.parquet")
        for task in arguments.task or list(TASKS):
            if task == "wait" and trace == "llnl-atlas-2006":
                print(f"\n{trace} · wait: not recorded in this trace")
                continue
            began = time.perf_counter()
            report = backtest(task, jobs, seed=arguments.seed, threads=arguments.threads)
            print(f"\n{trace} · {report.text()}")
            print(
                "calibration: "
                + ", ".join(f"{row['forecast']:.2f}→{row['observed']:.2f}" for row in report.calibration)
            )
            if task == "runtime" and trace in GOAL_MALE:
                male = report.value("male")
                met = "met" if male <= GOAL_MALE[trace] else "not met"
                print(f"goal MALE ≤ {GOAL_MALE[trace]}: {met} ({male:.3f})")
            print(f"took {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

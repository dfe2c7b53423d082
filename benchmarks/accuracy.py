"""Accuracy of the job forecasters on the recorded traces, beside their baselines.

`python -m benchmarks.accuracy [--traces FOLDER] [--task runtime|wait|job_failure] [--threads N] [trace …]`; some
minutes per trace. The trace names are files of `jobs/`; by default kth-sp2-1996, llnl-atlas-2006 and cedar-2021.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import polars as pl

from features.job_history import NEVER, JobHistory
from features.jobs import microseconds
from models.backtest import backtest
from models.backtest_report import BacktestReport
from models.tasks import TASKS
from models.wait import WaitForecaster
from models.wait_points import CHURN_STEP_S, MOVED_S, recorded_publications, start_churn

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
            if task == "wait":
                print(churn_text(jobs, report, arguments.seed, arguments.threads))
            print(f"took {time.perf_counter() - began:.0f} s", flush=True)


def churn_text(jobs: pl.DataFrame, report: BacktestReport, seed: int, threads: int) -> str:
    """How far forecast starts of waiting jobs of the test move from one publication to the next, in words."""
    history = JobHistory(jobs.sort("submit_time", "job_id", maintain_order=True))
    rows = np.flatnonzero((history.table.submit >= microseconds(report.start)) & (history.table.start != NEVER))
    fitted = WaitForecaster.fit(history, report.start, seed=seed, threads=threads)
    lines = []
    for name, forecaster in (("model", fitted), ("recent_waits", WaitForecaster.recent())):
        found = start_churn(recorded_publications(forecaster, history, rows, seed=seed))
        lines.append(
            f"churn of {name}: {found.height} jobs every {CHURN_STEP_S // 60} min, median move "
            f"{found['move_s'].median():.0f} s, moves over {MOVED_S / 60:.0f} min {found['moved_share'].mean():.3f}, "
            f"drift {found['drift_s'].median():+.0f} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

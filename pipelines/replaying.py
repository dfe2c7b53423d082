"""`weatherglass replay`: recorded jobs under a scheduling policy, beside others; no settings needed.

Here belong reading the file and writing what comes out; not the replay (`models/replay`) and not the page
(`dashboards/replay_page.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from models.backtest import BacktestError
from models.replay.policies import rule_of
from models.replay.report import ReplayReport, compare
from models.replay.workload import UNIT_WORDS, ReplayError, workload_of
from pipelines.backtesting import PAGE, REPORT, make_folder, read_jobs_file, write_together
from pipelines.progress import Progress

SCHEDULE = "schedule.parquet"


def run_replay(
    path: Path, total: int, policy: str, runtimes: str, out: Path, *, unit: str | None = None, draws: int = 10
) -> ReplayReport:
    """Replay a file, write the three files of the outcome to a folder, and print the figures.

    Args:
        path: Canonical jobs, Parquet or CSV.
        total: Processors of the cluster.
        policy: One of `models.replay.policies.POLICIES`.
        runtimes: One of `limit`, `forecast`, `true`.
        out: Folder, made if needed; earlier outcomes in it are replaced.
        unit: What a processor is: `gpus`, `nodes` or `cpus`; None: what the jobs tell.
        draws: Shaken inputs of each of two kinds.

    Raises:
        ReplayError: The file or an option cannot be used.
    """
    from dashboards.replay_page import replay_page

    rule = rule_of(policy, runtimes)
    try:
        jobs = read_jobs_file(path)
        make_folder(out)
    except BacktestError as error:
        raise ReplayError(str(error)) from error
    workload = workload_of(jobs, total, unit)
    with Progress("replay", "replays") as progress:
        progress.stage(f"{len(workload):,} jobs on {total:,} {UNIT_WORDS[workload.unit]}")
        report = compare(
            workload, total, rule, f"{policy}, {runtimes}", draws=draws, progress=lambda done, of: progress(done, of, 1)
        )
    try:
        write_together(
            out,
            {
                SCHEDULE: report.rows().write_parquet,
                PAGE: lambda part: part.write_text(replay_page(report, path.stem), encoding="utf-8"),
                REPORT: lambda part: part.write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8"),
            },
        )
    except BacktestError as error:
        raise ReplayError(str(error)) from error
    print(report.text())
    print(f"schedule, figures and page in {out}: {SCHEDULE}, {REPORT}, {PAGE}")
    return report

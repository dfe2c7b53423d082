"""Time left of jobs that report their progress, against history alone and the limit, on simulated jobs only.

No recorded trace that is known has reports of progress, so the jobs are those of the simulator's users
(`simulator/workload.py`: runtimes of a key scatter log-normally, 22 % are cancelled, 16 % fail) with the course of
`simulator/job_reports.py`: warm-up 40 to 240 s, steps of 0.3 to 12 s, checkpoints each 10 to 60 minutes, evaluation
each 20 to 90, 10 % slowed by 1.1 to 1.8 for a part, 5 % begun again from a checkpoint, 15 % of the keys stop early;
a report a minute. The figures say what reports are worth where applications are like that, no more. Walk-forward: the
newest 30 % by submit are judged, everything is fitted anew each week on what was released by then. Starts are submits.

`python -m benchmarks.progress [--gpus N] [--days N] [--seed N]`; a minute or two on one core.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory
from features.job_progress import progress_at
from features.jobs import microseconds
from features.vocabulary import QUANTILES
from models.curves import remaining_s
from models.judging import blocks_of
from models.landmarks import ELAPSED_S
from models.progress_evidence import EVIDENCE_JOBS, Evidence, estimate
from models.promotion import Interval, block_bootstrap
from models.recency import baseline_log
from models.reported_progress import combined, plan_quantiles
from models.runtime import RuntimeForecaster, matrix_of_rows
from models.scoring import is_covered, is_within_factor, log_error, log_pinball
from simulator.job_reports import job_reports
from simulator.jobs import Job
from simulator.workload import Population

Floats = NDArray[np.float64]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_DAY = 20_000
TEST_SHARE = 0.3
REFIT = timedelta(days=7)
_MIDDLE, _LOW, _HIGH = (QUANTILES.index(level) for level in (0.5, 0.1, 0.9))


def simulated(gpus: int, days: int, seed: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Canonical jobs that all ended, and what they reported."""
    population = Population(seed, gpus, 0.8)
    made: list[Job] = []
    for day in range(FIRST_DAY, FIRST_DAY + days):
        for job in population.submissions(day):
            job.id, job.start = len(made) + 1, job.submit
            run_s = min(job.runtime_s, job.limit_s or np.inf)
            job.end, job.state = job.start + run_s, "TIMEOUT" if run_s < job.runtime_s else job.outcome
            made.append(job)
    at = {name: [EPOCH + timedelta(seconds=getattr(job, name)) for job in made] for name in ("submit", "start", "end")}
    told = ("job_id", "user", "account", "queue", "name", "nodes", "gpus", "cpus", "memory_mib", "state")
    jobs = pl.DataFrame(
        {name: [getattr(job, name) for job in made] for name in told}
        | {f"{name}_time": times for name, times in at.items()}
        | {"time_limit_s": [int(job.limit_s or 0) or None for job in made]}
    )
    return jobs.sort("submit_time", maintain_order=True), job_reports(population, made, EPOCH, seed)


@dataclass(frozen=True, slots=True)
class Week:
    """What was fitted for one week, and the rows of the history that it speaks for."""

    forecaster: RuntimeForecaster
    evidence: Evidence
    rows: NDArray[np.int64]


def weeks_of(history: JobHistory, reports: pl.DataFrame, seed: int) -> list[Week]:
    """Fits on what was released, one for each week of the test span."""
    frame = history.table.frame
    submit = history.table.submit
    first = submit[int(len(submit) * (1 - TEST_SHARE))]
    out = []
    while first <= submit[-1]:
        last = first + int(REFIT.total_seconds() * 1e6)
        moment = EPOCH + timedelta(microseconds=int(first))
        ended = frame.filter((pl.col("end_time") < moment) & pl.col("job_id").is_in(reports["job_id"].implode()))
        ended = ended.sort("end_time").tail(EVIDENCE_JOBS)
        told = reports.filter(pl.col("job_id").is_in(ended["job_id"].implode()))
        forecaster = RuntimeForecaster.fit(history, microseconds(moment), seed=seed)
        rows = np.flatnonzero((submit >= first) & (submit < last) & history.table.has_run)
        out.append(Week(forecaster, Evidence.of(ended, told, moment), rows))
        first = last
    return out


def judged(history: JobHistory, weeks: list[Week], reports: pl.DataFrame, elapsed_s: float) -> dict[str, Any]:
    """Forecasts of what is left after a time of running, for each test job that lasts longer."""
    parts: list[dict[str, Any]] = []
    table = history.table
    for week in weeks:
        rows = week.rows[table.runtime_s[week.rows] > elapsed_s]
        X = matrix_of_rows(history, rows)
        limit_s, spent = table.limit_s[rows], np.full(len(rows), elapsed_s)
        history_s = remaining_s(week.forecaster.curves(X, limit_s), spent, limit_s)
        frame = table.frame[rows]
        asked = frame.select("job_id", "start_time", moment=pl.col("start_time") + timedelta(seconds=elapsed_s))
        facts = progress_at(asked, reports)
        expected_s = estimate(facts, week.evidence)
        known = ~np.isnan(expected_s)
        share = (facts["step"] / facts["max_steps"]).fill_null(0.0).to_numpy()
        p = week.evidence.p_reached(frame, share)
        plan_s = plan_quantiles(facts, expected_s, week.evidence)
        left_s = np.where(np.isnan(limit_s), np.inf, limit_s - elapsed_s)
        mixed = history_s.copy()
        mixed[known] = combined(history_s[known], plan_s[known], p[known], left_s[known])
        point = np.exp(baseline_log("last2_key", X))
        parts.append({
            "actual": table.runtime_s[rows] - elapsed_s, "known": known, "progress": mixed, "history": history_s,
            "plan": np.where(known, expected_s, np.nan), "limit": np.exp(baseline_log("limit", X)) - elapsed_s,
            "last2_key": np.fmin(np.where(point > elapsed_s, point, 2 * elapsed_s), limit_s) - elapsed_s,
            "blocks": blocks_of(table, rows),
        })  # fmt: skip
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def mean_of(values: Floats, blocks: NDArray[Any]) -> Interval:
    """Mean with its block-bootstrap interval."""
    return block_bootstrap([values, np.ones(len(values))], blocks, lambda total, count: total / count)


def print_scores(found: dict[str, Any], elapsed_s: float) -> None:
    """All forecasts beside each other: all jobs, those with an estimate from reports, and how far they differ."""
    for words, use in (("all jobs", np.ones(len(found["known"]), bool)), ("with reports", found["known"])):
        print(f"\n{elapsed_s:,.0f} s · {words} · {int(use.sum()):,} jobs")
        if not use.any():
            continue
        actual, blocks = found["actual"][use], found["blocks"][use]
        print(f"  {'':<18} {'MALE of the median':<24} {'≤ 2×':>6} {'ln-pinball':>11} {'80 % covers':>12}")
        for name in ("progress", "history", "plan", "last2_key", "limit"):
            values = found[name][use]
            if name == "plan" and words == "all jobs":
                continue
            point = values if values.ndim == 1 else values[:, _MIDDLE]
            losses = log_error(point, actual)
            line = f"  {name:<18} {mean_of(losses, blocks)!s:<24} {is_within_factor(point, actual, 2.0).mean():>6.3f}"
            if values.ndim == 2:
                covered = is_covered(values[:, _LOW], values[:, _HIGH], actual).mean()
                line += f" {log_pinball(values, actual).mean():>11.4f} {covered:>12.3f}"
            print(line)
        gain = [log_error(found[name][use][:, _MIDDLE], actual) for name in ("progress", "history")]
        print(f"  {'progress − history':<18} {mean_of(gain[0] - gain[1], blocks)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=256)
    parser.add_argument("--days", type=int, default=45)
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    began = time.perf_counter()
    jobs, reports = simulated(arguments.gpus, arguments.days, arguments.seed)
    reporting = reports["job_id"].n_unique()
    print(f"simulated only: {jobs.height:,} jobs, {reporting:,} of them report, {reports.height:,} reports")
    history = JobHistory.of(jobs)
    weeks = weeks_of(history, reports, arguments.seed)
    for week in weeks:
        seen, rows = week.evidence, week.forecaster.facts["rows"]
        print(
            f"fitted: {rows:,} runtimes; {seen.reached} of {seen.ended} reporting jobs reached their last step, "
            f"pauses {seen.overhead_ratio:.1%} of steps, {seen.tail_s:.0f} s after the last step, spreads from "
            f"{seen.jobs} jobs"
        )
    for elapsed_s in ELAPSED_S:
        print_scores(judged(history, weeks, reports, elapsed_s), elapsed_s)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

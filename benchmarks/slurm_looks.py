"""Looks at the waiting jobs of a replay: what the scheduler had planned, what forecasters say, and what came.

Here belong the moments, the history that forecasters know at them, and their points; the replay stands in
`benchmarks/fast_slurm.py`, the figures in `benchmarks/slurm_start.py`.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.fast_slurm import Replayed
from features.job_history import JobHistory, JobTable
from features.job_queue import wait_matrix
from features.jobs import microseconds
from models.outcomes import FIRST, LANDMARKS_S
from models.runtime import TooFewJobsError
from models.start_plans import PLAN, plans_at
from models.wait import BASELINES, WaitForecaster, baseline_s
from models.wait_points import CHURN_STEP_S, CHURN_STEPS

PAST = timedelta(days=90)  # of recorded jobs before the piece that the forecaster knows
_REFIT = timedelta(hours=12)
_KEY = ["job_id", "submit_time"]
OWN, OWN_ALONE = "forecaster", "forecaster_replay_alone"
NAMES = (PLAN, OWN, OWN_ALONE, "recent_waits", *BASELINES)


def looks_of(played: Replayed, jobs: pl.DataFrame) -> pl.DataFrame:
    """Moments at which jobs are judged: first seen pending, then first after each landmark of waiting.

    Args:
        played: The replay.
        jobs: What was replayed, as of `fast_slurm.piece`.

    Returns:
        `job_id`, `user`, `submit_time`, `at`, `landmark_s`, `actual_s`; jobs that filled the machine at the start and
        those that never started left out.
    """
    polls = np.array([microseconds(at) for at in played.looks])
    ends = (*LANDMARKS_S[1:], 2 * LANDMARKS_S[-1])
    spans = [(FIRST, 0, np.inf), *zip(LANDMARKS_S, LANDMARKS_S, ends, strict=True)]
    rows = []
    for job in started(played, jobs).iter_rows(named=True):
        submit, begun = microseconds(job["submit_time"]), microseconds(job["start_time"])
        for landmark, least, most in spans:
            at = int(np.searchsorted(polls, submit + least * 1_000_000))
            if at < len(polls) and polls[at] < begun and polls[at] - submit < most * 1e6:
                left_s = (begun - polls[at]) / 1e6
                rows.append((job["job_id"], job["user"], job["submit_time"], played.looks[at], landmark, left_s))
    names = ["job_id", "user", "submit_time", "at", "landmark_s", "actual_s"]
    return pl.DataFrame(rows, schema=names, orient="row").sort("landmark_s", "at", "job_id")


def churn_looks(played: Replayed, jobs: pl.DataFrame) -> pl.DataFrame:
    """Moments every ten minutes of each job's wait; columns as of `looks_of`."""
    scored = started(played, jobs)
    steps = [timedelta(seconds=CHURN_STEP_S * k + 60) for k in range(CHURN_STEPS)]
    columns = ("job_id", "user", "submit_time", "start_time")
    looks = pl.concat([scored.select(*columns, at=pl.col("submit_time") + step) for step in steps])
    left_s = (pl.col("start_time") - pl.col("at")).dt.total_microseconds() / 1e6
    found = looks.with_columns(actual_s=left_s, landmark_s=pl.lit(FIRST)).filter(pl.col("actual_s") > 0)
    return found.drop("start_time").sort("at", "job_id")


def started(played: Replayed, jobs: pl.DataFrame) -> pl.DataFrame:
    """The replayed jobs that started, but for those that filled the machine at the start."""
    new = jobs.filter(~pl.col("is_warm")).select("trace_id")
    return played.jobs.join(new, on="trace_id").filter(pl.col("start_time").is_not_null())


def with_points(
    looks: pl.DataFrame, played: Replayed, history: pl.DataFrame, start: datetime, seed: int
) -> pl.DataFrame:
    """The looks with a column for each of `NAMES`: seconds until the start, NaN where nothing is said.

    Beside them `q10_s`, `q90_s` and `likeliest_s` of the forecaster.
    """
    own = history.filter(pl.col("is_replayed"))
    told = _forecasts(history, looks, start, seed)
    alone = _forecasts(own, looks, start, seed)
    _, X = _asked(own, looks)
    points = {
        PLAN: plans_at(played.states, looks), OWN: told["q50_s"], OWN_ALONE: alone["q50_s"],
        "recent_waits": WaitForecaster.recent().frame(X)["q50_s"],
        **{name: baseline_s(name, X) for name in BASELINES},
    }  # fmt: skip
    columns = [pl.Series(name, values, dtype=pl.Float64) for name, values in points.items()]
    return looks.with_columns(*columns).hstack(told.select("q10_s", "q90_s", "likeliest_s"))


def joined_history(trace: pl.DataFrame, played: Replayed, jobs: pl.DataFrame, start: datetime) -> pl.DataFrame:
    """Recorded jobs of the time before, and the replayed ones; `is_replayed` tells them apart.

    Of recorded jobs that still ran or waited at `start`, what came later is what came in the replay; their stand-ins
    there are left out.
    """
    columns = [name for name in trace.columns if name in played.jobs.columns]
    told = played.jobs.join(jobs.select("trace_id", "is_warm"), on="trace_id")
    late = told.filter("is_warm").select(
        "trace_id", replayed_start="start_time", replayed_end="end_time", replayed_state="state"
    )
    before = trace.filter((pl.col("submit_time") < start) & (pl.col("submit_time") >= start - PAST))
    before = before.join(late, left_on="job_id", right_on="trace_id", how="left").with_columns(
        pl.when(pl.col("end_time") <= start).then("end_time").otherwise("replayed_end").alias("end_time"),
        pl.when(pl.col("start_time") < start).then("start_time").otherwise("replayed_start").alias("start_time"),
        pl.when(pl.col("end_time") <= start).then("state").otherwise("replayed_state").alias("state"),
    )
    recorded = before.select(*columns, is_replayed=pl.lit(False)).with_columns(
        pl.concat_str(pl.lit("recorded-"), "job_id").alias("job_id")
    )
    replayed = told.filter(~pl.col("is_warm")).select(*columns, is_replayed=pl.lit(True))
    joined = pl.concat([recorded, replayed], how="vertical_relaxed")
    return joined.with_columns(pl.lit("alpha").alias("cluster")).sort("submit_time", "job_id")


def _asked(history: pl.DataFrame, looks: pl.DataFrame) -> tuple[JobHistory, NDArray[np.float32]]:
    """The history prepared, and features of the jobs at the moments of the looks."""
    prepared = JobHistory(history)
    facts = history.unique(_KEY, keep="last")
    table = JobTable(looks.select(_KEY).join(facts, on=_KEY, how="left", maintain_order="left"))
    return prepared, wait_matrix(table, prepared, looks["at"].dt.epoch("us").to_numpy())


def _forecasts(history: pl.DataFrame, looks: pl.DataFrame, start: datetime, seed: int) -> pl.DataFrame:
    """What the wait forecaster says at each look, refit every twelve hours on the jobs that had started by then."""
    prepared, X = _asked(history, looks)
    at = looks["at"].dt.epoch("us").to_numpy()
    parts, rows, moment = [], [], start
    while sum(map(len, rows)) < looks.height:
        until = moment + _REFIT
        here = np.flatnonzero((at >= microseconds(moment)) & (at < microseconds(until)))
        if len(here):
            try:
                forecaster = WaitForecaster.fit(prepared, moment, seed=seed, threads=os.cpu_count() or 1)
            except TooFewJobsError:
                forecaster = WaitForecaster.recent()
            parts.append(forecaster.frame(X[here]))
            rows.append(here)
        moment = until
    return pl.concat(parts)[np.argsort(np.concatenate(rows))]

"""What simulated training jobs would report of themselves: steps done and to do, durations of steps, phases.

A job warms up, then makes steps; checkpoints and evaluation stop it in their cycles, as in `workload.draw_profile`. On
top of that, with stated odds, steps are slow for a part of the run, the application begins again from its last
checkpoint, and completed jobs stop before their last step. Jobs that fail or are cancelled have a plan as long as their
key's runs. Here belongs this course of a job alone; nothing is exported.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

import numpy as np
import polars as pl

from features.vocabulary import conform
from simulator.jobs import Job, Profile
from simulator.workload import Population, draw_profile

P_SLOW, SLOW_FACTORS = 0.10, (1.1, 1.8)  # steps are slower by such a factor for a part of the run
P_RESTART = 0.05  # it begins again from its last checkpoint
P_EARLY_KEY, EARLY_SHARES = 0.15, (0.3, 1.0)  # keys whose completed jobs stop after such a share of their steps
P_LOST = 0.02  # reports that never come
REPORT_S, LAG_S = 60.0, 5.0
TAIL_S = (10.0, 60.0)  # after the last step, on top of a last checkpoint
NOISE = 0.02  # of a reported duration, ln
_MOST_CELLS = 20_000


def job_reports(population: Population, jobs: Iterable[Job], start: datetime, seed: int) -> pl.DataFrame:
    """Reports of jobs that have run.

    Args:
        population: Who submitted them.
        jobs: Jobs with `start` and `end`, seconds from `start`; only training jobs whose habit reports have any.
        start: Time that seconds count from, UTC.
        seed: Seed of all that differs from run to run.

    Returns:
        Rows of `core_job_progress`; `observed_at` lies `LAG_S` after `ts`.
    """
    parts = []
    for job in jobs:
        kind, gpus, habit, own = job.habit
        if job.start is None or job.end is None or kind != "train":
            continue
        profile = draw_profile(kind, gpus, habit, own)
        if profile.reports_steps and job.end > job.start:
            parts.append(_of_job(population, job, profile, np.random.default_rng([seed, job.id])))
    frame = pl.concat([part for part in parts if part is not None])
    at = pl.lit(start) + pl.duration(microseconds=(pl.col("at_s") * 1e6).cast(pl.Int64))
    frame = frame.with_columns(ts=at, observed_at=at + timedelta(seconds=LAG_S), cluster=pl.lit("sim"))
    return conform(frame.drop("at_s").with_columns(source=pl.lit("simulator")), "core_job_progress")


def _of_job(population: Population, job: Job, profile: Profile, rng: np.random.Generator) -> pl.DataFrame | None:
    assert job.start is not None
    assert job.end is not None
    run_s = job.end - job.start
    cell_s = max(1.0, run_s / _MOST_CELLS)
    clock = np.arange(0.0, run_s, cell_s)
    restart_s = float(rng.uniform(0.2, 0.8)) * run_s if rng.random() < P_RESTART else np.inf
    since = np.where(clock >= restart_s, clock - restart_s, clock)  # of the application's own clock
    is_startup = since < profile.warmup_s
    trained = np.maximum(since - profile.warmup_s, 0.0)
    is_checkpoint = (trained + profile.phase * profile.pause_every_s) % profile.pause_every_s < profile.pause_s
    is_evaluation = (trained + profile.phase * profile.eval_every_s) % profile.eval_every_s < profile.eval_s
    slow = np.ones(len(clock))
    if rng.random() < P_SLOW:
        first, last = np.sort(rng.uniform(0.0, 1.2, 2)) * run_s
        slow[(clock >= first) & (clock < last)] = rng.uniform(*SLOW_FACTORS)
    is_training = ~(is_startup | is_checkpoint | is_evaluation)
    done = np.cumsum(np.where(is_training, cell_s / (profile.step_s * slow), 0.0))
    if np.isfinite(restart_s):
        done = _begun_again(done, clock, is_checkpoint, restart_s)
    is_plan = job.outcome == "COMPLETED" and job.state != "TIMEOUT"
    tail_s = profile.pause_s + float(rng.uniform(*TAIL_S))
    steps = max(1, int(np.interp(run_s - tail_s, clock, done))) if is_plan else 0
    max_steps = steps
    if is_plan:
        done = np.minimum(done, steps)
        if np.random.default_rng([job.habit[2], 7]).random() < P_EARLY_KEY:
            max_steps = int(steps / rng.uniform(*EARLY_SHARES))
    else:
        key = population.key_of(job)
        planned_s = max(run_s * 1.02, key.median_s * float(rng.lognormal(0, key.sigma)))
        max_steps = max(1, int(done[-1]), int(max(planned_s - profile.warmup_s, 1.0) / (1.05 * profile.step_s)))
    at = np.arange(float(rng.uniform(1, REPORT_S)), run_s, REPORT_S)
    at = at[rng.random(len(at)) >= P_LOST]
    if not len(at):
        return None
    cell = np.minimum((at / cell_s).astype(np.int64), len(clock) - 1)
    count = np.floor(done[cell]).astype(np.int64)
    phase = np.select(
        [is_startup[cell], is_checkpoint[cell], is_evaluation[cell]], ["startup", "checkpoint", "evaluation"], "train"
    )
    waits = max(profile.exposed_ratio * profile.link_s, profile.link_s - profile.compute_s) / profile.step_s
    said = np.where(count > 0, profile.step_s * slow[cell] * rng.lognormal(0, NOISE, len(at)), np.nan)
    return pl.DataFrame({
        "job_id": [job.job_id] * len(at), "at_s": job.start + at, "step": count, "max_steps": max_steps,
        "step_time_s": said, "communication_time_s": said * min(waits, 1.0), "phase": phase,
    }).with_columns(pl.col("step_time_s", "communication_time_s").fill_nan(None))  # fmt: skip


def _begun_again(done: np.ndarray, clock: np.ndarray, is_checkpoint: np.ndarray, restart_s: float) -> np.ndarray:
    """The counter of a job whose application begins again at a time from what its last checkpoint holds."""
    at = min(int(np.searchsorted(clock, restart_s)), len(done) - 1)
    written = np.flatnonzero(is_checkpoint[:at])
    kept = done[written[-1]] if len(written) else 0.0
    return np.where(np.arange(len(done)) >= at, done - (done[at] - kept), done)

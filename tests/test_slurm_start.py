"""Planned starts of a real Slurm whose clock runs fast: read by the Slurm source, kept over time, and scored."""

import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.fast_slurm import fast_slurm, piece, replay
from benchmarks.slurm_looks import NAMES, joined_history, looks_of, started, with_points
from benchmarks.slurm_start import print_scores, words_of
from features.vocabulary import schema
from models.start_plans import PLAN, plans_at, start_losses

START = datetime(2026, 5, 4, 8, 0, tzinfo=UTC)
SPEED = 600.0
RUN_S, LIMIT_S = 1800, 8 * 3600
NODES, CPUS = 2, 4


def job(job_id, submit_s, start_s, end_s, cpus=NODES * CPUS):
    at = [START + timedelta(seconds=s) for s in (submit_s, start_s, end_s)]
    return {
        "cluster": "recorded", "job_id": job_id, "user": "ada", "queue": "batch", "name": "train", "submit_time": at[0],
        "start_time": at[1], "end_time": at[2], "cpus": cpus, "gpus": 0, "time_limit_s": LIMIT_S, "state": "COMPLETED",
    }  # fmt: skip


TRACE = pl.DataFrame(
    [
        *(job(f"past{n}", -90_000 - 600 * n, -90_000 - 300 * n, -89_900 - 300 * n, 1) for n in range(5)),
        job("running", -7200, -7200, RUN_S),  # fills the machine at the start
        job("b", 1, RUN_S, 2 * RUN_S),
        job("c", 2, 2 * RUN_S, 3 * RUN_S),
        job("tomorrow", 90_000, 90_000, 90_100),
    ],
    schema={name: dtype for name, dtype in schema("core_jobs").items() if name in (
        "cluster", "job_id", "user", "account", "queue", "name", "submit_time", "start_time", "end_time", "nodes",
        "cpus", "gpus", "memory_mib", "time_limit_s", "state")},
)  # fmt: skip


def test_a_piece_holds_what_ran_and_what_comes():
    jobs = piece(TRACE, START, 12.0, 10)
    assert jobs.select("trace_id", "is_warm", "run_s", "limit_s", "at").rows() == [
        ("running", True, RUN_S, LIMIT_S - 7200, START),
        ("b", False, RUN_S, LIMIT_S, START + timedelta(seconds=1)),
        ("c", False, RUN_S, LIMIT_S, START + timedelta(seconds=2)),
    ]


@pytest.mark.services("faketime", "slurmctld", "slurmd", "sbatch", "sacct", "munged")
def test_planned_starts_of_a_real_slurm_are_read_and_scored(capsys):
    """Slurm plans by limits, which are sixteen times the runtimes here: its starts must come out late, by hours."""
    jobs = piece(TRACE, START, 12.0, 10)
    folder = Path(tempfile.mkdtemp(prefix="wg-slurm-"))  # sockets want a short path
    try:
        with fast_slurm(folder, START, SPEED, nodes=NODES, cpus=CPUS, accounting=False) as (slurm, clock):
            played = replay(slurm, clock, jobs, START + timedelta(hours=10), poll_s=0.2)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    begun = started(played, jobs)
    assert begun["trace_id"].to_list() == ["b", "c"]
    assert set(played.jobs["state"]) == {"COMPLETED"}
    assert (begun["time_limit_s"] == LIMIT_S).all()
    # Every poll of every wait: before its start each had a plan, and no plan could foresee that others end early.
    at = pl.DataFrame({"at": played.looks}, schema={"at": pl.Datetime("us", "UTC")})
    polls = begun.join(at, how="cross").filter(pl.col("at").is_between("submit_time", "start_time", closed="none"))
    plan_s = plans_at(played.states, polls)
    actual_s = (polls["start_time"] - polls["at"]).dt.total_seconds().to_numpy()
    planned = polls.with_columns(pl.Series("plan_s", plan_s)).filter(pl.col("plan_s").is_not_nan())
    assert set(planned["trace_id"]) == {"b", "c"}
    losses = start_losses(plan_s, actual_s)
    assert np.nanmean(losses["late"]) > 0.9
    assert np.nanmedian(plan_s - actual_s) > 2 * 3600
    first_plan = planned.filter(trace_id="b").sort("at").row(0, named=True)
    ends = played.jobs.filter(trace_id="running").row(0, named=True)["start_time"] + timedelta(seconds=LIMIT_S - 7200)
    assert abs((first_plan["at"] - ends).total_seconds() + first_plan["plan_s"]) < 300  # when the limit frees the nodes

    looks = looks_of(played, jobs)
    assert set(looks["landmark_s"]) >= {0, 600}
    history = joined_history(TRACE, played, jobs, START)
    assert history["job_id"].is_unique().all()
    scored = with_points(looks, played, history, START, 1)
    assert scored.select(pl.col(NAMES[1:]).is_not_nan().all()).row(0) == (True,) * (len(NAMES) - 1)
    print_scores(scored.with_columns(piece=pl.lit(1)))
    said = capsys.readouterr().out
    assert f"planned {PLAN}" in said
    assert "2 jobs, 1 more filled the machine at the start; 2 started" in words_of(played, jobs, looks)

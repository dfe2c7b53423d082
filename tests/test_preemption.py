"""Preemption: the least loss by brute force, gangs whole, priority and class kept, and how soon GPUs are free."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.job_progress import progress_at
from models.preemption import Candidate, PreemptionError, plan_preemption, time_to_free_s
from scheduler_hints.api import create_app
from scheduler_hints.reloader import ShardStore
from scheduler_hints.schema import JobProgress
from tests.hints_support import ask, job, publish

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        job_id=st.just(""),
        gpus=st.sampled_from([1, 2, 4, 8, 8, 16, 24]),
        elapsed_s=st.integers(0, 90_000),
        since_checkpoint_s=st.none() | st.integers(0, 7_200),
        checkpoint_s=st.none() | st.integers(10, 900),
        ends_within_s=st.none() | st.integers(0, 2_000),
        restart_s=st.sampled_from([0, 120]),
        priority=st.none() | st.integers(0, 9),
        is_preemptible=st.booleans(),
    ),
    max_size=8,
).map(lambda jobs: [_named(job, f"j{i}") for i, job in enumerate(jobs)])


def _named(job: Candidate, name: str) -> Candidate:
    fields = {key: getattr(job, key) for key in Candidate.__slots__}
    return Candidate(**(fields | {"job_id": name}))


def least_loss(job: Candidate, within_s: float, below: float | None) -> float:
    """By the words of the contract, apart from the code under test."""
    found = [0.0] if job.ends_within_s is not None and job.ends_within_s <= within_s else []
    if job.is_preemptible and (below is None or (job.priority is not None and job.priority < below)):
        work = job.elapsed_s if job.since_checkpoint_s is None else min(job.since_checkpoint_s, job.elapsed_s)
        found.append((work + job.restart_s) * job.gpus / 3600)
        if job.checkpoint_s is not None and job.checkpoint_s <= within_s:
            found.append((job.checkpoint_s + job.restart_s) * job.gpus / 3600)
    return min(found, default=math.inf)


def brute_force(jobs: list[Candidate], gpus: int, within_s: float, below: float | None) -> float:
    losses = [(job.gpus, least_loss(job, within_s, below)) for job in jobs]
    able = [pair for pair in losses if pair[1] < math.inf]
    sets = (some for size in range(len(able) + 1) for some in combinations(able, size))
    return min((sum(loss for _, loss in some) for some in sets if sum(g for g, _ in some) >= gpus), default=math.inf)


@settings(max_examples=150, deadline=None)
@given(CANDIDATES, st.integers(1, 60), st.sampled_from([0, 60, 600]), st.none() | st.integers(1, 9))
def test_no_choice_loses_less(jobs, gpus, within_s, below):
    best = brute_force(jobs, gpus, within_s, below)
    for cells in (10**7, 0):
        plan = plan_preemption(jobs, gpus, within_s, below_priority=below, exact_cells=cells)
        of = {job.job_id: job for job in jobs}
        assert all(way.gpus == of[way.job_id].gpus for way in plan.leaving), "gangs go whole"
        assert all(way.free_in_s <= within_s for way in plan.leaving)
        assert all(
            way.way == "ends" or (of[way.job_id].is_preemptible and (below is None or of[way.job_id].priority < below))
            for way in plan.leaving
        )
        assert plan.freed_gpus == sum(way.gpus for way in plan.leaving)
        if best == math.inf:
            assert plan.short_gpus == gpus - plan.freed_gpus > 0
            continue
        assert plan.short_gpus == 0
        assert plan.least_gpu_hours <= best + 1e-6
        if plan.is_exact:
            assert plan.lost_gpu_hours == pytest.approx(best, abs=1e-5)
        else:
            assert plan.lost_gpu_hours <= 2 * best + 1e-6
            assert all(plan.freed_gpus - way.gpus < gpus for way in plan.leaving), "whoever is not needed stays"


@settings(max_examples=60, deadline=None)
@given(CANDIDATES, st.integers(1, 60))
def test_time_to_free_is_the_soonest_that_loses_no_work(jobs, gpus):
    def freed(by_s: float) -> int:
        total = 0
        for one in jobs:
            times = [one.ends_within_s, one.checkpoint_s if one.is_preemptible else None]
            total += one.gpus if any(value is not None and value <= by_s for value in times) else 0
        return total

    found = time_to_free_s(jobs, gpus)
    moments = {value for one in jobs for value in (one.ends_within_s, one.checkpoint_s) if value is not None}
    assert found == min((moment for moment in moments if freed(moment) >= gpus), default=None)


def test_who_saves_in_time_loses_a_checkpoint_and_who_cannot_loses_all_since_the_last():
    saver = Candidate("saver", 8, elapsed_s=36_000, since_checkpoint_s=3_600, checkpoint_s=90)
    fresh = Candidate("fresh", 8, elapsed_s=36_000, since_checkpoint_s=45)
    ending = Candidate("ending", 8, elapsed_s=36_000, ends_within_s=500, is_preemptible=False)
    assert [way.job_id for way in plan_preemption([saver, fresh, ending], 8, 60).leaving] == ["fresh"]
    in_time = plan_preemption([saver, fresh, ending], 16, 120)
    assert {(way.job_id, way.way) for way in in_time.leaving} == {("fresh", "stop"), ("saver", "checkpoint")}
    assert in_time.lost_gpu_hours == pytest.approx(8 * (45 + 90) / 3600)
    assert plan_preemption([saver, fresh, ending], 8, 600).leaving[0].way == "ends"
    assert time_to_free_s([saver, fresh, ending], 16) == 500
    assert time_to_free_s([saver, fresh, ending], 17) is None


def test_many_jobs_are_chosen_near_the_least():
    jobs = [Candidate(str(i), 8 * (1 + i % 5), 90_000, since_checkpoint_s=(i * 7919) % 3_600) for i in range(2_000)]
    exact, fast = (plan_preemption(jobs, 4_096, 0, exact_cells=cells) for cells in (10**7, 0))
    assert exact.is_exact
    assert not fast.is_exact
    assert fast.least_gpu_hours <= exact.lost_gpu_hours <= fast.lost_gpu_hours <= 1.01 * exact.lost_gpu_hours


def test_wrong_numbers_are_named():
    job = Candidate("1", 8, 60)
    with pytest.raises(PreemptionError, match="gpus=0"):
        plan_preemption([job], 0, 60)
    with pytest.raises(PreemptionError, match="within_s=-1"):
        plan_preemption([job], 1, -1)
    with pytest.raises(PreemptionError, match="twice"):
        plan_preemption([job, job], 1, 60)
    with pytest.raises(PreemptionError, match="job 2"):
        plan_preemption([Candidate("2", 0, 60)], 1, 60)


def test_the_api_names_jobs_and_what_is_lost(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    told = JobProgress(10, 100, 1.0, "train", now, now - timedelta(seconds=600))
    hours = timedelta(hours=5)
    publish(
        tmp_path,
        jobs=[
            job("saver", state="RUNNING", gpus=8, start_time=now - hours, queue="low", remaining=None, progress=told),
            job("fresh", state="RUNNING", gpus=8, start_time=now - timedelta(seconds=90), queue="low", remaining=None),
            job("kept", state="RUNNING", gpus=64, start_time=now, queue="high", remaining=None),
            job("waits", state="PENDING", gpus=64),
        ],
    )
    store = ShardStore(tmp_path, ("alpha",))
    app = create_app(tmp_path, (), store=store)
    store.refresh()
    answer = ask(app, "/v1/preemptions", "gpus=16&queue=low&checkpoint_s=60").json()
    (found,) = answer["items"]
    assert [(one["job_id"], one["way"], one["is_loss_known"]) for one in found["leaving"]] == [
        ("saver", "checkpoint", True),
        ("fresh", "stop", False),
    ]
    assert found["lost_gpu_hours"] == pytest.approx(8 * (60 + 90) / 3600, rel=0.05)
    assert found["is_exact"]
    assert found["graceful_in_s"] is None
    assert 0 < answer["expires_in_s"] <= 60
    assert ask(app, "/v1/preemptions", "gpus=80&queue=low").json()["items"][0]["short_gpus"] == 64
    for query, words in (("gpus=0", "from 1 to"), ("gpus=8&node=a", "no parameter 'node'")):
        refused = ask(app, "/v1/preemptions", query)
        assert refused.status == 400
        assert words in refused.json()["error"]["message"]


def test_a_reported_checkpoint_is_the_newest_known_by_the_moment() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    at = [start + timedelta(minutes=minute) for minute in range(6)]
    reports = pl.DataFrame(
        {
            "job_id": "1", "ts": at, "rank": 0, "step": list(range(6)), "max_steps": 9, "step_time_s": 1.0,
            "phase": ["train", "checkpoint", "train", "checkpoint", "train", "checkpoint"], "observed_at": at,
        }
    )  # fmt: skip
    asked = pl.DataFrame({"job_id": ["1"], "start_time": [start], "moment": [start + timedelta(minutes=4, seconds=30)]})
    assert progress_at(asked, reports)["checkpoint_at"].to_list() == [at[3]]

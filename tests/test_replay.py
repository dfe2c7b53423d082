"""Replays of recorded jobs: published figures of kth-sp2-1996, rules against slow ones, no look ahead, files, words."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from features.job_history import JobHistory
from features.jobs import job_features
from models.recency import baseline_log
from models.replay.policies import EASY_PLUS_PLUS, FORECAST, Rule, rule_of, run
from models.replay.report import BESIDE, compare
from models.replay.scores import Scores, score
from models.replay.shaking import shaken
from models.replay.workload import ReplayError, Workload, workload_of
from weatherglass import cli

T0 = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def kth(traces: Path) -> Workload:
    return workload_of(pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet"), 100, "cpus")


@pytest.mark.parametrize(
    ("rule", "published"),
    [
        (Rule("easy"), 92.577),
        (Rule("easy-sjbf"), 69.405),
        (Rule("easy-sjbf", "true"), 49.848),
        (EASY_PLUS_PLUS, 63.501),
        (Rule("easy-sjbf", scale=2.0), 58.913),
    ],
    ids=["EASY", "EASY-SJBF", "clairvoyant", "EASY++", "2 × limits"],
)
def test_published_figures_come_out(kth: Workload, rule: Rule, published: float) -> None:
    assert len(kth) == 28_481
    assert score(kth, run(kth, 100, rule), 100).avebsld == pytest.approx(published, rel=0.0005)


def jobs(rows: list[tuple[int, int, int, int]]) -> Workload:
    """Submission, processors, runtime, limit of each."""
    frame = pl.DataFrame({
        "job_id": [str(i) for i in range(len(rows))],
        "submit_time": [T0 + timedelta(seconds=row[0]) for row in rows],
        "start_time": [T0] * len(rows), "end_time": [T0 + timedelta(seconds=row[2]) for row in rows],
        "cpus": [row[1] for row in rows], "time_limit_s": [row[3] for row in rows], "user": ["a"] * len(rows),
    })  # fmt: skip
    return workload_of(frame, 10)


def test_each_policy_starts_what_it_should() -> None:
    work = jobs([(0, 6, 100, 100), (1, 8, 50, 50), (2, 4, 90, 90), (3, 4, 20, 200), (4, 4, 30, 30)])
    starts = {name: run(work, 10, Rule(name)).start.tolist() for name in ("fcfs", "easy", "easy-sjbf", "conservative")}
    assert starts["fcfs"] == [0, 100, 150, 150, 170]
    assert starts["easy"] == [0, 100, 2, 150, 150], "the third fits before the head's start"
    assert starts["easy-sjbf"] == starts["easy"], "it is there first"
    slurm = run(work, 10, Rule("slurm-actuable")).start.tolist()
    assert slurm == [0, 120, 30, 170, 170], "to the minute the head is planned at 150 s, so the third goes before it"
    late = jobs([(0, 6, 100, 100), (1, 8, 50, 50), (1, 4, 90, 90), (1, 4, 30, 30)])
    assert run(late, 10, Rule("easy")).start.tolist() == [0, 100, 1, 150]
    assert run(late, 10, Rule("easy-sjbf")).promise.tolist() == [-1, 100, -1, 150]


def slow_easy(work: Workload, total: int, *, is_shortest_first: bool) -> list[int]:
    """EASY with limits, as it is told in words."""
    n = len(work)
    start: dict[int, int] = {}
    queue: list[int] = []
    ends: list[tuple[int, int, int]] = []

    def look(now: int) -> None:
        def free() -> int:
            return total - sum(int(work.procs[j]) for _, _, j in ends)

        def begin(job: int) -> None:
            start[job] = now
            ends.append((now + int(work.run[job]), len(start), job))
            queue.remove(job)

        while queue and work.procs[queue[0]] <= free():
            begin(queue[0])
        if not queue:
            return
        plan, left, shadow = sorted((start[j] + int(work.limit[j]), j) for *_, j in ends), free(), now
        for at, j in plan:
            if left >= work.procs[queue[0]] and at > shadow:
                break
            left, shadow = left + int(work.procs[j]), at
        extra = left - int(work.procs[queue[0]])
        behind = sorted(queue[1:], key=lambda j: work.limit[j]) if is_shortest_first else queue[1:]
        for j in behind:
            before = now + work.limit[j] <= shadow
            if work.procs[j] <= free() and (before or work.procs[j] <= extra):
                begin(j)
                extra -= 0 if before else int(work.procs[j])

    following = 0
    while following < n or ends:
        first = min(ends) if ends else None
        if following < n and (first is None or work.submit[following] <= first[0]):
            queue.append(following)
            following += 1
            look(int(work.submit[following - 1]))
        else:
            assert first is not None
            ends.remove(first)
            look(first[0])
    return [start[j] for j in range(n)]


@pytest.mark.parametrize("seed", range(6))
def test_easy_is_that_of_the_words(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(150):
        limit = int(rng.choice([30, 60, 120, 300]))
        rows.append((i * 20 + int(rng.integers(40)), int(rng.integers(1, 9)), int(rng.integers(1, limit + 1)), limit))
    work = jobs(rows)
    for policy, is_shortest_first in (("easy", False), ("easy-sjbf", True)):
        assert run(work, 10, Rule(policy)).start.tolist() == slow_easy(work, 10, is_shortest_first=is_shortest_first)


@pytest.mark.parametrize("rule", [*BESIDE.values(), EASY_PLUS_PLUS, Rule("conservative", "true")])
def test_no_schedule_uses_more_than_there_is_or_starts_early(kth: Workload, rule: Rule) -> None:
    work = kth.take(np.arange(3_000))
    start = run(work, 100, rule).start
    assert (start >= work.submit).all()
    at = np.concatenate([start, start + work.run])
    change = np.concatenate([work.procs, -work.procs])
    assert np.cumsum(change[np.lexsort((change, at))]).max() <= 100


def test_a_forecast_knows_only_what_has_ended(kth: Workload) -> None:
    work = kth.take(np.arange(4_000))
    whole = run(work, 100, FORECAST)
    cut = 2_500
    part = run(work.take(np.arange(cut)), 100, FORECAST)
    assert (whole.expected[:cut] == part.expected).all(), "nothing of later jobs enters"
    other = replace(work, run=np.where(np.arange(len(work)) >= cut, 1, work.run))
    assert (run(other, 100, FORECAST).expected[:cut] == whole.expected[:cut]).all()


def test_forecasts_are_those_of_keyed_recency(traces: Path) -> None:
    """With processors for all, jobs start as they come: then the library's own baseline says the same."""
    recorded = pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").head(3_000)
    work = workload_of(recorded, 10_000, "cpus")
    got = run(work, 10_000, replace(FORECAST, newest=20, quantile=0.5)).expected
    by_id = recorded.with_columns(
        pl.col("submit_time").alias("start_time"),
        (pl.col("submit_time") + pl.min_horizontal(
            pl.col("end_time") - pl.col("start_time"), pl.duration(seconds="time_limit_s"))).alias("end_time"),
    ).filter(pl.col("end_time") > pl.col("start_time"))  # fmt: skip
    features = job_features(by_id, JobHistory(by_id), by_id["submit_time"])
    want = np.exp(baseline_log("median_key", features.to_numpy()))
    known = ~np.isclose(want, work.limit)
    assert known.mean() > 0.5
    assert np.isclose(got, want, rtol=1e-3)[known].mean() > 0.99


def test_shaken_inputs_are_the_same_for_everyone_and_still_jobs(kth: Workload) -> None:
    work = kth.take(np.arange(500))
    copies = list(shaken(work, 3, seed=4))
    assert [name for name, _ in copies] == ["submits"] * 3 + ["dropped"] * 3
    for name, copy in copies:
        assert (np.diff(copy.submit) >= 0).all()
        assert (len(copy) == 500) == (name == "submits")
        assert sorted(copy.job_id) == sorted(set(copy.job_id))
    again = list(shaken(work, 3, seed=4))
    assert all((a.submit == b.submit).all() for (_, a), (_, b) in zip(copies, again, strict=True))


def test_scores_equal_the_words() -> None:
    work = jobs([(0, 10, 100, 100), (0, 10, 5, 10)])
    got = score(work, run(work, 10, Rule("fcfs")), 10)
    assert got == Scores(
        avebsld=(1 + 105 / 10) / 2, wait_mean_s=50, wait_median_s=50, wait_p99_s=99.0, wait_max_s=100,
        jct_mean_s=102.5, utilisation=1.0, late_share=0.0,
    )  # fmt: skip


def test_what_cannot_be_replayed_is_named() -> None:
    whole = jobs([(0, 1, 5, 10)])
    frame = pl.DataFrame(
        {"submit_time": [T0], "start_time": [T0], "end_time": [T0 + timedelta(seconds=5)], "cpus": [12]}
    )
    assert len(whole) == 1
    for change, words in (
        ({"total": 10}, r"--nodes 10: 1 jobs ask for more cpus, the widest for 12"),
        ({"unit": "gpus"}, r"--unit gpus: the jobs have cpus"),
        ({"jobs": frame.drop("end_time")}, r"the jobs lack end_time; a replay needs submit_time"),
        ({"jobs": frame.with_columns(cpus=pl.lit(None, pl.Int64))}, r"no job is left: 1 jobs without cpus"),
    ):
        with pytest.raises(ReplayError, match=words):
            workload_of(**({"jobs": frame, "total": 100} | change))  # ty: ignore[invalid-argument-type]
    with pytest.raises(ReplayError, match="no policy 'best'; there are: fcfs, easy"):
        rule_of("best", "limit")
    unlimited = workload_of(frame, 12)
    assert (unlimited.limit.tolist(), unlimited.dropped) == (
        [5],
        ("1 jobs without limit: given 5 s, the longest that one ran",),
    )


def test_the_command_writes_a_schedule_figures_and_a_page(traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "jobs.parquet"
    pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").head(1_500).write_parquet(path)
    out = tmp_path / "out"
    asked = ["--jobs", str(path), "--nodes", "100", "--policy", "easy-sjbf", "--runtimes", "forecast", "--draws", "2"]
    done = CliRunner().invoke(cli, ["replay", *asked, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = pl.read_parquet(out / "schedule.parquet")
    facts = json.loads((out / "report.json").read_text())
    assert (
        rows.height
        == facts["jobs"]
        == 1_500 - sum(int(text.split()[0]) for text in facts["left_out"] if "left out" in text)
    )
    assert (rows["start_time"] >= rows["submit_time"]).all()
    assert next(iter(facts["outcomes"])) == "slurm-actuable, limits"
    assert facts["asked"] == "easy-sjbf, forecasts"
    page = (out / "report.html").read_text()
    assert "http" not in page.replace("charset", "")
    assert "slurm-actuable, limits" in page
    assert "mean bounded slowdown" in done.output
    wrong = CliRunner().invoke(cli, ["replay", "--jobs", str(path), "--nodes", "10", "--out", str(out)])
    assert wrong.exit_code == 2
    assert "jobs ask for more nodes" in wrong.output or "jobs ask for more cpus" in wrong.output


def test_a_rule_beside_the_usual_ones_comes_after_what_slurm_can(kth: Workload) -> None:
    work = kth.take(np.arange(400))
    report = compare(work, 100, Rule("conservative"), "conservative, limit", draws=0)
    assert list(report.outcomes)[:3] == ["slurm-actuable, limits", "slurm-actuable, forecasts", "conservative, limit"]
    assert report.ratio is None
    usual = compare(work, 100, Rule("easy"), "easy, limit", draws=1)
    assert (usual.asked, usual.ratio, list(usual.outcomes)) == ("easy, limits", None, list(BESIDE))

"""Jobs, scheduling, faults and rates of the simulated cluster; everything follows from the seed."""

import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from simulator.cluster import SimulatedCluster
from simulator.faults import FAULTS_PER_NODE_DAY, Hazards
from simulator.hardware import SimulatorError
from simulator.rates import Rates
from simulator.sacct import SacctText, compress_hostlist
from simulator.workload import LIMITS_S, P_CANCEL, P_FAIL, Population

START = datetime(2026, 11, 2, tzinfo=UTC)  # a Monday
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def fortnight() -> SimulatedCluster:
    """Sixteen nodes after two weeks of jobs, node faults many times as often as in life."""
    world = SimulatedCluster(16, 5, START, 5, fault_scale=60)
    world.advance_jobs(START + 14 * DAY + timedelta(hours=13))
    return world


@pytest.fixture(scope="module")
def jobs(fortnight: SimulatedCluster) -> pl.DataFrame:
    return fortnight.jobs_frame()


def test_no_gpu_is_ever_booked_twice(fortnight: SimulatedCluster) -> None:
    spans: dict[int, list[tuple[float, float, str]]] = {}
    ran = [job for job in [*fortnight.ended, *fortnight.running()] if job.start is not None]
    assert len(ran) > 1000
    for job in ran:
        assert job.start is not None
        assert len(job.gpus_held) == job.gpus
        assert len(set(job.gpus_held)) == job.gpus
        assert {gpu // 8 for gpu in job.gpus_held} == set(job.nodes_held)
        for gpu in job.gpus_held:
            spans.setdefault(gpu, []).append((job.start, job.end or math.inf, job.job_id))
    for gpu, found in spans.items():
        for (_, end, first), (begin, _, second) in pairwise(sorted(found)):
            assert end <= begin, f"GPU {gpu}: {first} and {second}"


def test_nothing_runs_on_a_node_that_is_down(fortnight: SimulatedCluster, jobs: pl.DataFrame) -> None:
    faults = fortnight.faults_frame()
    assert faults.height > 5
    running = jobs.filter(pl.col("start_time").is_not_null()).with_columns(pl.col("node_list").str.split(","))
    on_nodes = running.explode("node_list").with_columns(pl.col("end_time").fill_null(fortnight.now))
    met = faults.join(on_nodes, left_on="node", right_on="node_list").with_columns(
        pl.col("end_time").fill_null(fortnight.now)
    )
    overlap = met.filter(
        (pl.col("start_time_right") < pl.col("end_time")) & (pl.col("end_time_right") > pl.col("start_time"))
    )
    # What ran when the node broke ended with it, then.
    assert overlap.is_empty()
    killed = met.filter(pl.col("end_time_right") == pl.col("start_time"))
    assert killed.height > 0
    assert set(killed["state"]) == {"NODE_FAIL"}


def test_states_and_times_of_jobs_agree(jobs: pl.DataFrame) -> None:
    assert jobs["job_id"].is_unique().all()
    ended = jobs.filter(pl.col("end_time").is_not_null() & pl.col("start_time").is_not_null())
    runtime = (ended["end_time"] - ended["start_time"]).dt.total_seconds()
    assert (ended["start_time"] >= ended["eligible_time"]).all()
    assert (ended["eligible_time"] >= ended["submit_time"]).all()
    assert (runtime <= ended["time_limit_s"]).all()
    timeouts = ended.filter(state="TIMEOUT")
    assert timeouts.height > 5
    assert ((timeouts["end_time"] - timeouts["start_time"]).dt.total_seconds() == timeouts["time_limit_s"]).all()
    assert set(jobs["time_limit_s"]) <= {int(limit) for limit in LIMITS_S} | {14_400, 28_800}
    whole = jobs.filter(pl.col("gpus") >= 8)
    assert (whole["gpus"] == 8 * whole["nodes"]).all()
    pending = jobs.filter(state="PENDING")
    assert pending["start_time"].null_count() == pending.height
    held = jobs.filter(state="RUNNING")
    assert (held["node_list"].str.split(",").list.len() == held["nodes"]).all()


def test_pending_jobs_say_why_and_when() -> None:
    world = SimulatedCluster(4, 5, START, 5, fault_scale=0, load=4)
    world.advance_jobs(START + timedelta(hours=15))
    pending = world.jobs_frame(world.pending())
    assert pending.height > 3
    reasons = set(pending["reason"])
    assert "Resources" in reasons
    assert reasons <= {"Resources", "Priority", "Dependency", "QOSMaxGRESPerUser"}
    planned = pending.filter(pl.col("planned_start_time").is_not_null())
    assert planned.height > 3
    assert (planned["planned_start_time"] > world.now).all()
    # Nobody is planned before the nodes under it can be free.
    ends = [job.limit_end for job in world.running()]
    assert (planned["planned_start_time"].min() or START).timestamp() >= min(ends)


def test_small_jobs_go_ahead_of_a_blocked_one_without_delaying_it() -> None:
    world = SimulatedCluster(2, 5, START, 5, fault_scale=0, own_jobs=False)
    base = {"user": "a", "account": "x", "queue": "batch", "name": "j", "submit": world.time}
    from simulator.jobs import Job

    def submit(number: int, nodes: int, per_node: int, limit_s: float) -> Job:
        job = Job(id=number, nodes=nodes, per_node=per_node, limit_s=limit_s, runtime_s=limit_s, eligible=world.time,
                  **base)  # fmt: skip
        world.jobs[number] = job
        world.scheduler.submit(job)
        return job

    first = submit(1, 1, 8, 1000)
    head = submit(2, 2, 8, 1000)
    short, long, late = submit(3, 1, 4, 900), submit(4, 1, 4, 2000), submit(5, 1, 4, 990)
    world.scheduler.user_gpus_max = 100
    world.step()
    assert [job.state for job in (first, head, short, long, late)] == [
        "RUNNING", "PENDING", "RUNNING", "PENDING", "RUNNING",
    ]  # fmt: skip
    assert head.reason == "Resources"
    world.advance(START + timedelta(seconds=1010))
    assert head.start == START.timestamp() + 1000


def test_habits_repeat_and_people_sleep(jobs: pl.DataFrame) -> None:
    keys = jobs.group_by("user", "gpus", "time_limit_s").len()
    assert keys.filter(pl.col("len") >= 5)["len"].sum() > 0.8 * jobs.height
    runtime = (jobs["end_time"] - jobs["start_time"]).dt.total_seconds()
    done = jobs.with_columns(run=runtime).filter(state="COMPLETED", queue="batch")
    spread = done.group_by("user", "gpus", "time_limit_s", pl.col("name").str.replace(r"-r\d+$", "")).agg(
        pl.col("run").log().std(), pl.len()
    )
    within = spread.filter(pl.col("len") >= 10)["run"].median()
    assert within is not None
    assert within < 0.6 * float(done["run"].log().std() or 0)  # a key tells more than the crowd
    hours = jobs["submit_time"].dt.hour()
    assert hours.is_between(11, 17).sum() > 1.5 * hours.is_in([23, 0, 1, 2, 3, 4, 5]).sum()
    asked = done["time_limit_s"] / done["run"]
    assert (asked.median() or 0) > 1.5


def test_population_offers_the_load_it_is_asked_for() -> None:
    users = Population(3, 256, 0.9)
    submitted = [job for day in range(20_000, 20_028) for job in users.submissions(day)]
    work = sum(job.gpus * min(job.runtime_s, job.limit_s or math.inf) for job in submitted)
    assert 0.6 < work / (256 * 28 * 86_400) < 1.2  # few big jobs carry much of it
    share = {state: np.mean([job.outcome == state for job in submitted]) for state in ("FAILED", "CANCELLED")}
    assert abs(share["FAILED"] - P_FAIL) < 0.12
    assert abs(share["CANCELLED"] - P_CANCEL) < 0.12
    assert users.submissions(20_000)[0].submit == Population(3, 256, 0.9).submissions(20_000)[0].submit


def test_same_seed_same_world_whatever_the_tick() -> None:
    end = START + timedelta(hours=9)

    def run(seed: int, tick_s: float) -> SimulatedCluster:
        world = SimulatedCluster(6, seed, START - DAY, tick_s, fault_scale=150)
        world.advance_jobs(end - timedelta(minutes=20))
        world.advance(end)
        return world

    one, same, coarse, other = run(9, 5), run(9, 5), run(9, 60), run(10, 5)
    assert_frame_equal(one.gpu_frame(), same.gpu_frame())
    assert_frame_equal(one.jobs_frame(), same.jobs_frame())
    assert one.truth == same.truth
    assert_frame_equal(one.jobs_frame(), coarse.jobs_frame())
    assert_frame_equal(one.faults_frame(), coarse.faults_frame())
    # The same instant reads the same but for means over ticks of different length.
    assert one.gpu_frame()["fb_used_bytes"].equals(coarse.gpu_frame()["fb_used_bytes"])
    assert not one.jobs_frame().equals(other.jobs_frame())
    assert one.topology.uuids != other.topology.uuids


def test_node_faults_come_at_the_stated_rate_and_lemons_stand_out() -> None:
    nodes, days = 3000, 365
    hazards = Hazards(nodes, 1, 1.0)
    expected = FAULTS_PER_NODE_DAY * nodes * days
    assert hazards.per_second.sum() * 86_400 * days == pytest.approx(expected, rel=0.12)
    counts = np.zeros(nodes)
    for node in range(0, nodes, 6):
        at, number = 0.0, 0
        while (fault := hazards.next(node, number, at)) is not None and fault.at < days * 86_400:
            assert fault.unreachable_at >= fault.at
            assert fault.repaired_at > fault.unreachable_at
            assert all(at < w[0] < fault.at + 1 for w in fault.warnings)
            counts[node] += 1
            at, number = fault.at, number + 1
    drawn = counts[::6]
    mean = float(hazards.per_second[::6].sum()) * 86_400 * days
    assert abs(drawn.sum() - mean) < 4 * math.sqrt(mean)
    lemons = hazards.is_lemon[::6]
    assert drawn[lemons].mean() > 5 * drawn[~lemons].mean()
    scaled = Hazards(nodes, 1, 10.0)
    assert scaled.per_second == pytest.approx(10 * hazards.per_second)


def test_onsets_come_at_the_stated_rates() -> None:
    rates = Rates(thermal=0.05, nvlink=0.01, memory=0.02, lookalike_ratio=0.5)
    world = SimulatedCluster(32, 2, START, 30, fault_scale=1e-6, own_jobs=False)
    world.rates, world.fault_scale = rates, 1.0
    for i in range(32):
        world.place_job(f"a{i}", "ada", f"n{i + 1}", profile={"pause_s": 0, "eval_s": 0, "burst_s": 0})
    world.advance(START + timedelta(hours=1))  # the first hour's candidates were drawn at the tiny scale
    known = len(world.truth)
    hours = 3
    busy = 0.0
    for _ in range(hours * 12):
        for i in range(32):  # a leak ends a job: its node gets the next one
            if not any(job.nodes_held == (i,) for job in world.running()):
                world.place_job(f"b{i}-{world.time}", "ada", f"n{i + 1}")
        world.advance(world.now + timedelta(minutes=5))
        busy += float(world.physics.busy.sum()) / 12
    rows = [row for row in world.truth[known:] if row["onset"]]
    for class_, rate in (("thermal_throttle", 0.05), ("memory_exhaustion", 0.02), ("nvlink_saturation", 0.01)):
        events = {row["event"]: row["is_step"] for row in rows if row["class"] == class_}
        expected = rate * busy
        # Ramps near the end are still to come and a job too young or ending meanwhile takes none.
        low, high = 0.45 * expected - 3 * math.sqrt(expected), expected + 3 * math.sqrt(expected)
        assert max(low, 1) <= len(events) <= high, f"{class_}: {len(events)} of {expected:.0f}"
    steps = [row["is_step"] for row in {row["event"]: row for row in rows}.values()]
    assert 0.25 < np.mean(steps) < 0.6
    assert len(world.lookalikes) > 5
    assert all(row["onset"] is None for row in world.lookalikes)


def test_a_recorded_trace_is_replayed(tmp_path: Path) -> None:
    begin = datetime(2021, 5, 1, tzinfo=UTC)
    rows = {
        "cluster": ["t"] * 4, "job_id": ["1", "2", "3", "4"], "user": ["a", "b", None, "d"],
        "submit_time": [begin + timedelta(minutes=m) for m in (0, 5, 6, 7)],
        "start_time": [begin + timedelta(minutes=m) for m in (1, 6, 7, 8)],
        "end_time": [begin + timedelta(minutes=m) for m in (31, 66, 12, 68)],
        "gpus": [4, 16, 0, 400], "time_limit_s": [3600, 7200, 60, 60], "state": ["COMPLETED", "FAILED", None, None],
    }  # fmt: skip
    path = tmp_path / "jobs.parquet"
    pl.DataFrame(rows).write_parquet(path)
    world = SimulatedCluster(4, 1, START, 5, job_trace=path, fault_scale=0)
    world.advance_jobs(START + timedelta(hours=2))
    done = world.jobs_frame()
    assert done["gpus"].to_list() == [4, 16]
    assert (done["submit_time"][0], done["submit_time"][1]) == (START, START + timedelta(minutes=5))
    assert (done["end_time"] - done["start_time"]).dt.total_minutes().to_list() == [30, 60]
    assert done["state"].to_list() == ["COMPLETED", "FAILED"]
    with pytest.raises(SimulatorError, match="no ended GPU job"):
        SimulatedCluster(4, 1, START, 5, job_trace=_only(path, tmp_path, 0))
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(SimulatorError, match=r"bad\.parquet"):
        SimulatedCluster(4, 1, START, 5, job_trace=tmp_path / "bad.parquet")


def _only(path: Path, folder: Path, gpus: int) -> Path:
    kept = folder / "only.parquet"
    pl.read_parquet(path).filter(gpus=gpus).write_parquet(kept)
    return kept


def test_externally_placed_jobs_hold_their_gpus_until_they_are_ended() -> None:
    world = SimulatedCluster(2, 1, START, 5, fault_scale=0, own_jobs=False)
    placed = world.place_job("900", "ada", "n1,n2", gpus_per_node=8, name="x")
    assert (placed["state"], placed["node_list"], placed["gpus"]) == ("RUNNING", "n1,n2", 16)
    world.advance(START + timedelta(minutes=5))
    assert set(world.gpu_frame()["job_id"]) == {"900"}
    for arguments, words in (
        (("901", "ada", "n1"), "free GPUs"),
        (("900", "ada", "n1"), "known already"),
        (("902", "ada", "n7"), "no node"),
        (("903", "ada", ""), "empty"),
    ):
        with pytest.raises(SimulatorError, match=words):
            world.place_job(*arguments)
    with pytest.raises(SimulatorError, match="states: COMPLETED"):
        world.end_job("900", "DONE")
    assert world.end_job("900", "FAILED")["state"] == "FAILED"
    world.advance(START + timedelta(minutes=6))
    assert world.gpu_frame()["job_id"].null_count() == 16
    with pytest.raises(SimulatorError, match="fields: compute_s"):
        world.place_job("904", "ada", "n1", profile={"colour": 1})
    world.place_job("905", "ada", "n1", gpus_per_node=2, time_limit_s=60)
    world.advance(START + timedelta(minutes=8))
    assert world.ended[-1].state == "TIMEOUT"


def test_a_gpu_that_falls_off_the_bus_vanishes_before_its_node(fortnight: SimulatedCluster) -> None:
    world = fortnight
    lost = next(row for row in world.faults if row["xid"] == 79)
    assert lost["gpu_uuid"].startswith("GPU-")
    assert all(row["gpu_uuid"] == "" for row in world.faults if row["xid"] is None)
    fresh = SimulatedCluster(1, 1, START, 5, fault_scale=0, own_jobs=False)
    from simulator.faults import Fault

    at = fresh.time + 10
    fresh._push(at, 2, Fault(0, 0, 3, "gpu_fallen_off_bus", 79, at, at + 30, at + 600, ()))
    fresh.place_job("1", "ada", "n1")
    fresh.advance(START + timedelta(seconds=20))
    assert sorted(fresh.gpu_frame()["gpu_index"]) == [0, 1, 2, 4, 5, 6, 7]
    assert fresh.ended[-1].state == "NODE_FAIL"
    assert "DOWN,gpu_fallen_off_bus" in fresh.inventory_csv()
    fresh.advance(START + timedelta(seconds=60))
    assert fresh.gpu_frame().is_empty()
    assert not fresh.node_frame()["is_up"][0]
    assert fresh.node_frame()["inlet_temp_c"][0] is None
    fresh.advance(START + timedelta(seconds=700))
    assert fresh.gpu_frame().height == 8
    assert fresh.gpu_frame()["xid_last"].sum() == 0


def test_sacct_text_keeps_the_newest_jobs(fortnight: SimulatedCluster) -> None:
    lines = SacctText(fortnight, rows_max=100).text().decode().splitlines()
    ended = [row.split("|")[1] for row in lines[1:] if "|RUNNING|" not in row and "|PENDING|" not in row]
    assert 90 <= len(ended) <= 100
    assert ended == [job.job_id for job in fortnight.ended[-len(ended) :]]
    assert len(lines) == 1 + len(ended) + len(fortnight.jobs)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), "None assigned"), ((0,), "n1"), ((0, 1, 2, 4), "n[1-3,5]"), ((9, 0), "n[1,10]"), ((3, 4), "n[4-5]")],
)
def test_node_lists_are_compressed_as_slurm_does(numbers: tuple[int, ...], text: str) -> None:
    assert compress_hostlist(numbers) == text


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [("nodes", 0, "nodes = 0"), ("tick_s", 0, "tick_s"), ("fault_scale", -1, "fault_scale"), ("gpu_model", "x", "H100"),
     ("start", datetime(2026, 1, 1), "time zone")],  # noqa: DTZ001
)  # fmt: skip
def test_wrong_arguments_are_named(argument: str, value: object, words: str) -> None:
    with pytest.raises(SimulatorError, match=words):
        SimulatedCluster(**{"start": START, argument: value})

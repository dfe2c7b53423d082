"""The Slurm source on a real Slurm: jobs, nodes, windows, lives of jobs, REST, budget; without accounting; failures."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from features.vocabulary import conform, schema
from pipelines.settings import Cluster
from pipelines.sources import SourceError, build_jobs
from pipelines.sources.slurm import Commands, SlurmSource
from pipelines.sources.slurm_budget import Budget
from pipelines.sources.slurm_share import AgentShare
from pipelines.sources.slurmrestd import RestReader
from scheduler_hints.plan_feed import PlansAnswer
from scheduler_hints.schema import ReservationPlan
from scheduler_hints.slurm_agent import SlurmAgent
from scheduler_hints.slurm_commands import SlurmCommands
from scheduler_hints.slurm_guard import Limits
from tests import services
from tests.services import Slurm, utc_text, wait_until

NAME = "a|b ünï\nsecond line"


FREELY = 60_000.0  # requests a minute: nothing waits, and answers are shared for a millisecond alone


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A Slurm with preemption and slurmrestd, one for the tests of this file."""
    services.require(*services.SLURM_PROGRAMS, "slurmrestd")
    folder = Path(tempfile.mkdtemp(prefix="wg-slurm-"))
    try:
        cluster = Slurm(folder, preemption=True, rest=True)
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build(slurm: Slurm, **more: Any) -> SlurmSource:
    chosen: dict[str, Any] = {"slurm_conf": str(slurm.conf), "slurm_rpcs_per_minute": FREELY, **more}
    cluster = Cluster(jobs="slurm", **chosen)
    source = build_jobs("alpha", cluster, slurm.folder)
    assert isinstance(source, SlurmSource)
    return source


class Scene:
    """Jobs in every state that can be had at once."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        slurm.reset()
        self.began = datetime.now(UTC).replace(microsecond=0)
        self.done = slurm.submit("--gres=gpu:2", "--time=5", "--mem=1000", f"--job-name={NAME}", script="true")
        self.failed = slurm.submit("--gres=gpu:1", "--time=5", script="exit 3")
        slurm.wait_state(self.done, "COMPLETED")
        slurm.wait_state(self.failed, "FAILED")
        slurm.run("scontrol", "update", "nodename=n4", "state=drain", "reason=bad fan  in row 3")
        self.running = slurm.submit("-N2", "--gres=gpu:8", "--exclusive", "--time=1-00:00:00", script="sleep 300")
        slurm.wait_state(self.running, "RUNNING")
        self.waiting = slurm.submit("-N3", "--gres=gpu:8", "--exclusive", "--time=10", script="sleep 300")
        self.array = slurm.submit("-N3", "--gres=gpu:4", "--exclusive", "--array=1-5%2", "--time=5", script="sleep 1")
        self.later = slurm.submit("--begin=now+1hour", "--gres=gpu:1", "--time=5", script="true")
        self.cancelled = slurm.submit("-N4", "--exclusive", "--time=5", script="true")
        slurm.run("scancel", str(self.cancelled))
        slurm.wait_accounted(self.done, "COMPLETED")
        slurm.wait_accounted(self.failed, "FAILED")
        slurm.wait_accounted(self.running, "RUNNING")
        slurm.wait_accounted(self.cancelled, "CANCELLED")
        wait_until(lambda: slurm.job(self.waiting).get("StartTime", "Unknown") != "Unknown", 20, 0.2, "planned start")
        self.ended = datetime.now(UTC) + timedelta(seconds=1)


@pytest.fixture(scope="module")
def scene(slurm: Slurm) -> Iterator[Scene]:
    yield Scene(slurm)
    slurm.reset()


def by_id(jobs: pl.DataFrame) -> dict[str, dict[str, Any]]:
    assert jobs["job_id"].is_unique().all()
    return {row["job_id"]: row for row in jobs.iter_rows(named=True)}


def test_history_is_what_slurm_recorded(scene: Scene) -> None:
    source = build(scene.slurm)
    jobs = source.fetch_jobs(scene.began, scene.ended)
    assert source.commands.calls == 4  # sacct's version and its fields, sacct, squeue
    assert source.warnings == []
    assert conform(jobs, "raw_jobs").equals(jobs)
    rows = by_id(jobs)
    done = rows[str(scene.done)]
    assert (done["state"], done["gpus"], done["nodes"], done["cpus"], done["memory_mib"]) == (
        "COMPLETED",
        2,
        1,
        1,
        1000,
    )
    assert (done["time_limit_s"], done["queue"], done["account"], done["name"]) == (300, "batch", "root", NAME)
    fields = scene.slurm.job(scene.done)
    for column, field in [("submit_time", "SubmitTime"), ("start_time", "StartTime"), ("end_time", "EndTime")]:
        assert done[column] == datetime.fromisoformat(fields[field]).replace(tzinfo=UTC)  # scontrol runs with TZ=UTC
    assert done["node_list"] == fields["NodeList"]
    assert rows[str(scene.failed)]["state"] == "FAILED"
    running = rows[str(scene.running)]
    assert (running["state"], running["end_time"], running["nodes"], running["gpus"]) == ("RUNNING", None, 2, 16)
    assert len(str(running["node_list"]).split(",")) == 2
    assert running["time_limit_s"] == 86_400
    cancelled = rows[str(scene.cancelled)]
    assert (cancelled["state"], cancelled["start_time"], cancelled["node_list"]) == ("CANCELLED", None, None)
    waiting = rows[str(scene.waiting)]
    assert (waiting["state"], waiting["start_time"], waiting["gpus"]) == ("PENDING", None, 24)
    assert waiting["planned_start_time"] is not None
    array = rows[str(scene.array)]
    assert (array["state"], array["array_job_id"], array["array_tasks"]) == ("PENDING", str(scene.array), 5)
    assert (done["exit_code"], rows[str(scene.failed)]["exit_code"], running["exit_code"]) == ("0:0", "3:0", None)
    # the database does not show jobs that are not yet eligible; the queue does
    assert rows[str(scene.later)]["reason"] == "BeginTime"


def test_windows(scene: Scene) -> None:
    source = build(scene.slurm)
    assert str(scene.done) not in by_id(source.fetch_jobs(scene.ended, scene.ended + timedelta(hours=1)))
    assert str(scene.running) in by_id(source.fetch_jobs(scene.ended, scene.ended + timedelta(hours=1)))
    before = by_id(source.fetch_jobs(scene.began - timedelta(days=20), scene.began - timedelta(seconds=1)))
    ours = (scene.done, scene.failed, scene.running, scene.waiting, scene.array, scene.later, scene.cancelled)
    assert not before.keys() & {str(job) for job in ours}  # jobs of other tests on this Slurm may be there
    assert len(source.fetch_jobs(scene.began - timedelta(days=20), scene.ended)) >= 7


def test_live_state(scene: Scene) -> None:
    source = build(scene.slurm)
    live = source.live()
    assert source.commands.calls == 3  # the third for the topology
    source.live()
    assert source.commands.calls == 5
    assert live.jobs.schema == schema("raw_jobs")
    rows = by_id(live.jobs)
    assert set(rows) == {str(i) for i in (scene.running, scene.waiting, scene.array, scene.later)}
    waiting = rows[str(scene.waiting)]
    assert waiting["reason"] in ("Resources", "Priority")
    planned = waiting["planned_start_time"]
    assert isinstance(planned, datetime)
    assert planned > datetime.now(UTC)
    assert (rows[str(scene.running)]["planned_start_time"], rows[str(scene.running)]["reason"]) == (None, None)
    assert conform(live.nodes, "core_nodes").equals(live.nodes)
    nodes = {row["node"]: row for row in live.nodes.iter_rows(named=True)}
    assert {name: (row["rack"], row["pod"], row["gpus"]) for name, row in nodes.items()} == {
        "n1": ("r1", "p1", 8), "n2": ("r1", "p1", 8), "n3": ("r2", "p1", 8), "n4": ("r2", "p1", 8),
    }  # fmt: skip
    assert "DRAIN" in nodes["n4"]["state"]
    assert nodes["n4"]["reason"] == "bad fan  in row 3"
    held = str(rows[str(scene.running)]["node_list"]).split(",")
    assert all(nodes[name]["state"].startswith("ALLOCATED") for name in held)


def test_states_are_told_when_they_change(scene: Scene) -> None:
    source = build(scene.slurm)
    first = source.live()
    assert first.states.schema == schema("core_job_states")
    assert sorted(first.states["job_id"]) == sorted(first.jobs["job_id"])
    told = {row["job_id"]: row for row in first.states.iter_rows(named=True)}
    assert told[str(scene.running)]["priority"] is None
    assert told[str(scene.waiting)]["priority"] == float(scene.slurm.job(scene.waiting)["Priority"])
    assert source.live().states.is_empty()
    scene.slurm.run("scontrol", "hold", str(scene.later))
    changed = source.live().states
    assert changed.select("job_id", "state", "reason", "priority").rows() == [
        (str(scene.later), "PENDING", "JobHeldAdmin", 0.0)
    ]
    scene.slurm.run("scontrol", "release", str(scene.later))


def test_inventory_completes_what_slurm_does_not_know(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "inventory.csv"
    path.write_text("node,rack,gpu_model\nn[1-4],row7,NVIDIA H100\n")
    nodes = build(scene.slurm, inventory=str(path)).live().nodes
    assert nodes.select("node", "rack", "pod", "gpu_model", "gpus").rows() == [
        (f"n{i}", "row7", "p1", "NVIDIA H100", 8) for i in range(1, 5)
    ]


def test_check(scene: Scene) -> None:
    found = {name: (ok, text) for name, ok, text in build(scene.slurm).check()}
    assert all(ok for ok, _ in found.values()), found
    assert found["reachable"][1] == "Slurm 22.05.8, 4 nodes"
    assert found["gpus"][1] == "32 GPUs"
    assert set(found) == {"reachable", "clock", "gpus", "accounting", "tres"}


def _same_at_last(first: Callable[[], pl.DataFrame], second: Callable[[], pl.DataFrame]) -> None:
    """Two readings one after the other give the same; the scheduler may change a reason between them."""
    # slurmdb of v0.0.38 gives success for a step that failed.
    drop = ("observed_at", "last_step_exit_code")
    for attempt in range(8):
        one, other = (reading().drop(drop, strict=False) for reading in (first, second))
        if one.equals(other):
            return
        time.sleep(0.5 * attempt)
    assert_frame_equal(one, other)


def test_rest_gives_what_the_commands_give(scene: Scene) -> None:
    slurm = scene.slurm
    user: dict[str, Any] = {"slurm_rest_user": "root", "slurm_rest_token_file": str(slurm.rest_token_file)}
    for way in ({"slurm_rest_url": slurm.rest_url, **user}, {"slurm_rest_url": f"unix:{slurm.rest_socket}"}):
        source, commands = build(slurm, **way), build(slurm)
        assert isinstance(source.reader, RestReader)
        assert source.reader.version() == (0, 0, 38)
        window = (scene.began, scene.ended)
        _same_at_last(
            lambda source=source, window=window: source.fetch_jobs(*window),
            lambda commands=commands, window=window: commands.fetch_jobs(*window),
        )
        # slurmdb of v0.0.38 gives success for a job that failed by itself, and no tasks: unknown once the queue forgot.
        both = [reader.history(*window).drop("observed_at") for reader in (source.reader, commands.reader)]
        assert by_id(both[0])[str(scene.failed)]["exit_code"] is None
        unknown = ("exit_code", "array_tasks", "last_step_exit_code")
        assert_frame_equal(both[0].drop(unknown), both[1].drop(unknown))
        assert source.warnings == []
        # Sources that have not been asked: `states` holds what changed since the last time.
        _same_at_last(lambda way=way: build(slurm, **way).live().states, lambda: build(slurm).live().states)
        told, asked = source.live(), commands.live()
        assert_frame_equal(told.jobs.drop("observed_at"), asked.jobs.drop("observed_at"))
        assert_frame_equal(told.states.drop("observed_at"), asked.states.drop("observed_at"))
        places = ("observed_at", "rack", "pod")  # no topology there
        assert_frame_equal(told.nodes.drop(places), asked.nodes.drop(places))
        found = {name: (ok, text) for name, ok, text in source.check()}
        assert all(ok for ok, _ in found.values()), found
        assert found["reachable"][1] == "slurmrestd v0.0.38, 4 nodes"
        assert source.commands.calls == 0
    with pytest.raises(SourceError, match=r"refused user 'nobody' \(401\).*scontrol token"):
        build(slurm, slurm_rest_url=slurm.rest_url, slurm_rest_user="nobody").live()


def test_lives_of_jobs_are_what_was_done(slurm: Slurm) -> None:
    slurm.reset()
    began = datetime.now(UTC).replace(microsecond=0)
    timed = slurm.submit("-w", "n1", "--gres=gpu:1", "--time=5", script="exec sleep 300")
    slurm.wait_state(timed, "RUNNING")
    # slurmctld looks at limits twice a minute; nothing waits for that but the last lines here.
    slurm.run("scontrol", "update", f"jobid={timed}", "endtime=now+2")
    done = slurm.submit("-w", "n1", "--gres=gpu:2", "--time=5", script="true")
    failed = slurm.submit("-w", "n1", "--time=5", script="exit 7")
    killed = slurm.submit("-w", "n1", "--time=5", script="kill -9 $$")
    array = slurm.submit("-w", "n1", "--array=1-3", "--time=5", script="exit $((SLURM_ARRAY_TASK_ID - 1))")
    again = slurm.submit("-w", "n2", "--time=5", script='[ -n "$SLURM_RESTART_COUNT" ] || exec sleep 300')
    victim = slurm.submit(
        "-w", "n3", "--exclusive", "--time=5", script='[ -n "$SLURM_RESTART_COUNT" ] || exec sleep 300'
    )
    cheap = slurm.submit("-w", "n4", "--exclusive", "-p", "cheap", "--time=5", script="exec sleep 300")
    for job in (again, victim, cheap):
        slurm.wait_state(job, "RUNNING")
    time.sleep(1.1)  # so that no attempt ends within the second in which it was submitted
    waiting = slurm.submit("-w", "n4", "--exclusive", "-p", "cheap", "--time=5", script="true")
    slurm.run("scancel", str(waiting))
    slurm.run("scontrol", "requeue", str(again))
    first = slurm.submit("-w", "n3", "--exclusive", "-p", "urgent", "--time=5", script="true")
    second = slurm.submit("-w", "n4", "--exclusive", "-p", "urgent", "--time=5", script="exec sleep 300")
    slurm.wait_state(first, "COMPLETED")
    slurm.wait_state(second, "RUNNING")
    slurm.run("scancel", str(second))
    for job in (again, victim):
        wait_until(lambda job=job: _has_run_again(slurm, job), 30, 0.5, f"second attempt of job {job}")
    slurm.wait_state(timed, "TIMEOUT", timeout_s=45)
    for job, state in ((timed, "TIMEOUT"), (again, "COMPLETED"), (victim, "COMPLETED"), (second, "CANCELLED")):
        slurm.wait_accounted(job, state)

    log = {"slurm_ctld_log": str(slurm.log)}
    token = {"slurm_rest_user": "root", "slurm_rest_token_file": str(slurm.rest_token_file)}
    commands = build(slurm, **log)
    jobs = commands.fetch_jobs(began, datetime.now(UTC))
    assert commands.warnings == []
    shown = ("job_id", "state", "exit_code", "restarts", "array_job_id", "preempted_by")
    lives = jobs.filter(pl.col("job_id").cast(pl.Int64) >= timed).with_columns(pl.col("job_id").cast(pl.Int64))
    ids = {int(row["JobIDRaw"]) for row in _tasks(slurm, array)}
    tasks = sorted(ids)
    assert len(tasks) == 3
    expected = [
        (timed, "TIMEOUT", "0:15", 0, None, None),
        (done, "COMPLETED", "0:0", 0, None, None),
        (failed, "FAILED", "7:0", 0, None, None),
        (killed, "FAILED", "0:9", 0, None, None),
        (again, "REQUEUED", "0:0", 0, None, None),
        (again, "COMPLETED", "0:0", 1, None, None),
        (victim, "PREEMPTED", "0:0", 0, None, str(first)),
        (victim, "COMPLETED", "0:0", 1, None, None),
        (cheap, "PREEMPTED", "0:15", 0, None, str(second)),
        (waiting, "CANCELLED", "0:0", 0, None, None),
        (first, "COMPLETED", "0:0", 0, None, None),
        (second, "CANCELLED", "0:15", 0, None, None),
    ]
    by_task = {int(row["JobIDRaw"]): int(row["JobID"].split("_")[1]) for row in _tasks(slurm, array)}
    for task, number in by_task.items():
        state = "COMPLETED" if number == 1 else "FAILED"
        expected.append((task, state, f"{number - 1}:0", 0, str(array), None))
    assert sorted(lives.select(shown).rows(), key=str) == sorted(expected, key=str)
    ran = lives.filter(pl.col("start_time").is_not_null())
    assert (ran["end_time"] >= ran["start_time"]).all()
    assert lives.filter(pl.col("start_time").is_null())["job_id"].to_list() == [waiting]
    # No two attempts at one time, each submitted when the one before ended.
    for job in (again, victim):
        one, two = lives.filter(pl.col("job_id") == job).sort("start_time").iter_rows(named=True)
        assert abs((two["submit_time"] - one["end_time"]).total_seconds()) <= 2
        assert two["start_time"] >= one["end_time"]
    rest = build(slurm, slurm_rest_url=slurm.rest_url, **token, **log)
    _same_at_last(
        lambda: rest.fetch_jobs(began, datetime.now(UTC)), lambda: commands.fetch_jobs(began, datetime.now(UTC))
    )
    assert {name: text for name, _, text in commands.check()}["preemptions"].startswith("2 in ")
    # Without the log, nothing tells who took the place.
    assert build(slurm).fetch_jobs(began, datetime.now(UTC))["preempted_by"].null_count() == len(jobs)


def test_suspended_and_resized_jobs(slurm: Slurm) -> None:
    slurm.reset()
    began = datetime.now(UTC).replace(microsecond=0)
    held = slurm.submit("-w", "n3", "--gres=gpu:1", "--time=5", script="sleep 3; exit 3")
    sized = slurm.submit("-N2", "-w", "n[1-2]", "--gres=gpu:1", "--time=5", script="sleep 6")
    for job in (held, sized):
        slurm.wait_state(job, "RUNNING")
    time.sleep(1.1)
    slurm.run("scontrol", "suspend", str(held))
    slurm.run("scontrol", "update", f"jobid={sized}", "numnodes=1")
    token = {"slurm_rest_user": "root", "slurm_rest_token_file": str(slurm.rest_token_file)}
    sources = [build(slurm), build(slurm, slurm_rest_url=slurm.rest_url, **token)]

    def parts(jobs: pl.DataFrame) -> list[dict[str, Any]]:
        return jobs.filter(pl.col("job_id") == str(sized)).sort("submit_time").to_dicts()

    def shows_both() -> bool:
        return [part["state"] for part in parts(sources[0].fetch_jobs(began, datetime.now(UTC)))] == [
            "RESIZING",
            "RUNNING",
        ]

    wait_until(shows_both, 20, 0.5, "the parts of the resized job")
    time.sleep(2)
    slurm.run("scontrol", "resume", str(held))
    for job, state in ((held, "FAILED"), (sized, "COMPLETED")):
        slurm.wait_state(job, state)
        slurm.wait_accounted(job, state)
    printed = slurm.run("sacct", "-n", "-X", "-D", "-P", "-j", f"{held},{sized}", "-o", "JobIDRaw,State,ElapsedRaw")
    elapsed = {tuple(line.split("|")[:2]): int(line.split("|")[2]) for line in printed.split()}
    for source in sources:
        jobs = source.fetch_jobs(began, datetime.now(UTC))
        (row,) = jobs.filter(pl.col("job_id") == str(held)).to_dicts()
        assert row["elapsed_s"] == elapsed[str(held), "FAILED"]
        assert (row["end_time"] - row["start_time"]).total_seconds() >= row["elapsed_s"] + 2
        one, two = parts(jobs)
        shown = ("state", "nodes", "gpus", "node_list", "restarts", "preempted_by")
        assert [one[name] for name in shown] == ["RESIZING", 2, 2, "n1,n2", 0, None]
        assert [two[name] for name in shown] == ["COMPLETED", 1, 1, "n1", 0, None]
        assert one["end_time"] == two["start_time"] == two["submit_time"]
        assert one["start_time"] >= one["submit_time"]
        assert one["elapsed_s"] == elapsed[str(sized), "RESIZING"]
        assert one["elapsed_s"] + two["elapsed_s"] == elapsed[str(sized), "COMPLETED"]
        # What a later window shows is the same row.
        (later,) = parts(source.fetch_jobs(one["end_time"] + timedelta(seconds=2), datetime.now(UTC)))
        assert {name: later[name] for name in shown} == {name: two[name] for name in shown}


_OUT_OF_MEMORY = """
import ctypes, sys
slurm = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
slurm.slurm_init(None)
sys.exit(slurm.slurm_complete_job(int(sys.argv[2]), 253))
"""


def test_heterogeneous_jobs_steps_and_out_of_memory(slurm: Slurm) -> None:
    slurm.reset()
    began = datetime.now(UTC).replace(microsecond=0)
    parts = slurm.folder / "parts.sh"
    parts.write_text(
        "#!/bin/sh\n#SBATCH -w n1 --gres=gpu:1 --time=5 --output=/dev/null\n#SBATCH hetjob\n"
        "#SBATCH -w n2 --gres=gpu:2 --time=6\nsrun --het-group=0,1 true\nexit 4\n"
    )
    leader = int(slurm.run("sbatch", "--parsable", str(parts)).strip())
    steps = slurm.submit("-w", "n3", "--time=5", script="srun true; srun false; srun sh -c 'exit 9'; true")
    waits = slurm.folder / "waits.sh"
    waits.write_text(
        "#!/bin/sh\n#SBATCH -w n1 --begin=now+1hour --gres=gpu:1 --time=5\n#SBATCH hetjob\n"
        "#SBATCH -w n2 --begin=now+1hour --gres=gpu:4 --time=5\ntrue\n"
    )
    later = int(slurm.run("sbatch", "--parsable", str(waits)).strip())
    full = slurm.submit("-w", "n4", "--time=5", "--mem=100", script="exec sleep 300")
    slurm.wait_state(full, "RUNNING")
    # What a node with cgroups says when the kernel has killed a job; without them slurmctld is told so directly.
    (library,) = Path("/usr/lib").glob("*/slurm-wlm/libslurmfull.so")
    env = {**os.environ, **slurm.env}
    told = subprocess.run([sys.executable, "-c", _OUT_OF_MEMORY, library, str(full)], env=env, timeout=30, check=False)
    assert told.returncode == 0
    for job, state in ((leader, "FAILED"), (steps, "COMPLETED"), (full, "OUT_OF_MEMORY")):
        slurm.wait_state(job, state)
        slurm.wait_accounted(job, state)
    assert len(slurm.run("sacct", "-n", "-P", "-j", str(steps), "-o", "JobID").split()) == 5, "job, batch, three steps"

    source = build(slurm)

    def read() -> dict[int, dict[str, Any]]:
        rows = by_id(source.fetch_jobs(began, datetime.now(UTC)))
        return {int(key): row for key, row in rows.items() if int(key) >= leader}

    # The database shows what it holds of a span of time some seconds after it shows it of a job.
    wait_until(lambda: {read()[job]["steps"] for job in (steps, full)} == {3, 0}, 20, 0.5, "steps")
    rows = read()
    assert source.warnings == []
    shown = ("state", "exit_code", "array_job_id", "gpus", "node_list", "time_limit_s")
    assert {job: tuple(row[name] for name in shown) for job, row in rows.items()} == {
        # Each part of a heterogeneous job is a job of its own, known by the leader's id.
        leader: ("FAILED", "4:0", str(leader), 1, "n1", 300),
        leader + 1: ("FAILED", "4:0", str(leader), 2, "n2", 360),
        # Steps are no jobs, and one that fails does not make its job fail.
        steps: ("COMPLETED", "0:0", None, 0, "n3", 300),
        later: ("PENDING", None, str(later), 1, None, 300),
        later + 1: ("PENDING", None, str(later), 4, None, 300),
        full: ("OUT_OF_MEMORY", "0:125", None, 0, "n4", 300),
    }
    assert (rows[steps]["last_step_state"], rows[steps]["last_step_exit_code"]) == ("FAILED", "9:0")
    live = {row["job_id"]: row["array_job_id"] for row in source.live().jobs.iter_rows(named=True)}
    assert live == {str(later): str(later), str(later + 1): str(later)}
    token = {"slurm_rest_user": "root", "slurm_rest_token_file": str(slurm.rest_token_file)}
    rest = build(slurm, slurm_rest_url=slurm.rest_url, **token)
    _same_at_last(
        lambda: rest.fetch_jobs(began, datetime.now(UTC)), lambda: source.fetch_jobs(began, datetime.now(UTC))
    )
    slurm.run("scancel", str(later))


def _has_run_again(slurm: Slurm, job: int) -> bool:
    fields = slurm.job(job)
    soon = utc_text(datetime.now(UTC) + timedelta(seconds=10))
    # Slurm would wait for two minutes; a second at least, or the node takes the credential for the revoked one.
    if fields["JobState"] == "PENDING" and fields.get("EligibleTime", "") > soon:
        slurm.run("scontrol", "update", f"jobid={job}", "starttime=now+2", check=False)
    return fields["JobState"] == "COMPLETED"


def _tasks(slurm: Slurm, array: int) -> list[dict[str, str]]:
    columns = ("JobIDRaw", "JobID")
    text = slurm.run("sacct", "-X", "-n", "-P", "-j", str(array), "-o", ",".join(columns))
    return [dict(zip(columns, line.split("|"), strict=True)) for line in text.splitlines()]


_ELSEWHERE = """
import sys
from pathlib import Path
from pipelines.settings import Cluster
from pipelines.sources import build_jobs
source = build_jobs("alpha", Cluster(jobs="slurm", slurm_conf=sys.argv[1]), Path(sys.argv[2]))
live = source.live()
print(source.commands.calls, len(live.nodes), live.jobs["observed_at"].max())
"""


def test_all_readers_together_stay_within_the_budget(slurm: Slurm, tmp_path: Path) -> None:
    slurm.reset()
    job = slurm.submit("--gres=gpu:1", "--time=5", script="sleep 300")
    slurm.wait_state(job, "RUNNING")
    cluster = Cluster(jobs="slurm", slurm_conf=str(slurm.conf), slurm_timeout_s=2)
    sources = [build_jobs("alpha", cluster, tmp_path) for _ in range(4)]
    now = datetime.now(UTC)
    slurm.run("sdiag", "--reset")
    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            lives = [pool.submit(source.live) for source in sources]
            histories = [pool.submit(source.fetch_jobs, now - timedelta(hours=1), now) for source in sources]
        assert {life.result().jobs["job_id"].to_list()[0] for life in lives} == {str(job)}
        assert all(len(history.result()) for history in histories)
    argv = [sys.executable, "-c", _ELSEWHERE, str(slurm.conf), str(tmp_path)]
    other = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.split()[:2] == ["0", "4"]  # another process: no command of its own, the same answer
    # 41 polls and 25 readings of the history made the requests of one poll: queue, nodes, topology.
    spent = _requests(slurm)
    assert spent == {"JOB_INFO": 1, "PARTITION_INFO": 2, "NODE_INFO": 1, "TOPO_INFO": 1}
    assert isinstance(sources[0], SlurmSource)
    with pytest.raises(SourceError, match=r"6 requests a minute are used up \(slurm_rpcs_per_minute\)"):
        sources[0].commands.run("sinfo")
    assert _requests(slurm) == spent
    slurm.run("scancel", str(job))


def _requests(slurm: Slurm) -> dict[str, int]:
    """Questions of clients that slurmctld has answered since its counters were reset, but for sdiag's own."""
    text = slurm.run("sdiag").split("by message type")[1].split("by user")[0]
    found = re.findall(r"REQUEST_(\w+_INFO|JOB_INFO_SINGLE|\w+_RESERVATION|PRIORITY_FACTORS)\s.*?count:(\d+)", text)
    return {name: int(count) for name, count in found if name != "STATS_INFO"}


def test_readers_and_agent_stay_within_one_budget(slurm: Slurm, tmp_path: Path) -> None:
    """The agent goes first and its releases wait for nothing; what slurmctld counts is what the ledger says."""
    slurm.reset()
    waiting = slurm.submit("-N1", "--exclusive", "--begin=now+1hour", "--time=5", script="true")
    skew_s = 0.0
    clock = lambda: time.time() + skew_s  # noqa: E731
    ledger = lambda: Budget("alpha", tmp_path, 6, 1, clock)  # noqa: E731
    reader = Commands("alpha", str(slurm.conf), budget=ledger())
    share = AgentShare(ledger(), 3, monotonic=lambda: time.monotonic() + skew_s)
    plans: list[ReservationPlan] = []
    rows: list[dict[str, Any]] = []
    agent = SlurmAgent(
        "alpha", lambda: PlansAnswer(list(plans), 3600.0), SlurmCommands(conf=str(slurm.conf), budget=share),
        mode="reserve", audit=rows.append, limits=Limits(max_nodes_ratio=1.0),
        clock=lambda: datetime.now(UTC) + timedelta(seconds=skew_s),
        monotonic=lambda: time.monotonic() + skew_s,
    )  # fmt: skip
    slurm.run("sdiag", "--reset")

    def counted() -> int:
        """What slurmctld counted since the last time; no minute may hold more than the budget."""
        found = sum(_requests(slurm).values())
        slurm.run("sdiag", "--reset")
        return found

    agent.step()
    assert counted() == 1, "which leases there are"
    for program in (("squeue", "--noheader"), ("scontrol", "show", "partition"), ("scontrol", "show", "node")):
        reader.run(*program)
    assert (counted(), ledger().used()) == (5, 6)
    now = datetime.now(UTC)
    plans.append(
        ReservationPlan(
            id=f"p-{waiting}", cluster="alpha", job_id=str(waiting), user=getpass.getuser(), account=None, nodes=["n4"],
            start=now, end=now + timedelta(minutes=15), because=["trouble is foreseen"], benefit="",
            cost_if_wrong_gpu_s=0.0,
        )
    )  # fmt: skip
    agent.step()
    assert [row["action"] for row in rows] == []
    slurm.run("sdiag", "--reset")
    skew_s = 61.0
    agent.step()  # books: it needs the whole minute
    with pytest.raises(SourceError, match="used up"):
        reader.run("sinfo")
    assert [(row["action"], row["is_applied"]) for row in rows] == [("reserve", True)]
    assert (counted(), ledger().used()) == (6, 6)
    plans.clear()
    agent.step()
    assert [row["action"] for row in rows] == ["reserve", "release"], "letting go waits for no budget"
    assert (counted(), ledger().used()) == (3, 9)
    assert "wg_" not in slurm.run("scontrol", "show", "reservation")
    slurm.run("sdiag", "--reset")
    with pytest.raises(SourceError, match="used up"):
        reader.run("sinfo")
    assert counted() == 0, "readers pay for it"
    skew_s = 122.0
    reader.run("sinfo")
    assert counted() == 2
    slurm.run("scancel", str(waiting))


def test_state_that_changed_is_seen(slurm: Slurm) -> None:
    slurm.reset()
    source = build(slurm)
    began = datetime.now(UTC)
    job = slurm.submit("--gres=gpu:1", "--time=5", script="sleep 300")
    slurm.wait_state(job, "RUNNING")
    slurm.run("scancel", str(job))
    slurm.wait_state(job, "CANCELLED")
    # The queue knows at once, the database a little later: neither ever says that it still runs.
    for _ in range(5):
        row = by_id(source.fetch_jobs(began - timedelta(seconds=5), datetime.now(UTC)))[str(job)]
        assert row["state"] == "CANCELLED"
        assert row["end_time"] is not None
        time.sleep(0.2)


def test_without_accounting() -> None:
    folder = Path(tempfile.mkdtemp(prefix="wg-slurm-"))
    slurm = Slurm(folder, nodes=1, accounting=False)
    try:
        began = datetime.now(UTC) - timedelta(seconds=2)
        job = slurm.submit("--gres=gpu:2", "--time=5", "--job-name=a b=c", script="true")
        slurm.wait_state(job, "COMPLETED")
        bare = build(slurm)
        row = by_id(bare.fetch_jobs(began, datetime.now(UTC)))[str(job)]
        assert (row["state"], row["gpus"], row["name"]) == ("COMPLETED", 2, "a b=c")
        assert "MinJobAge" in bare.warnings[0]
        wait_until(lambda: slurm.jobcomp.exists() and slurm.jobcomp.read_text(), 10, 0.1, "job completion file")
        source = build(slurm, jobs_path=str(slurm.jobcomp))
        assert by_id(source.fetch_jobs(began, datetime.now(UTC)))[str(job)]["state"] == "COMPLETED"
        assert source.warnings == []
        remembered = by_id(source._completed())[str(job)]
        told = ("state", "name", "submit_time", "end_time", "time_limit_s")
        assert [remembered[name] for name in told] == [row[name] for name in told]
        assert remembered["gpus"] is None  # not counted there; null, never 0
        assert {name: ok for name, ok, _ in source.check()}["accounting"]
        assert not {name: ok for name, ok, _ in bare.check()}["accounting"]
        assert len(source.live().nodes) == 1

        # The controller goes: an error that says so, within the time-out.
        next(p for p in slurm._processes if "slurmctld" in p.argv[0]).kill()
        source.commands.timeout_s = 2
        started = time.monotonic()
        with pytest.raises(SourceError, match=r"squeue (did not end within 2 s|failed)"):
            source.live()
        assert time.monotonic() - started < 5
        assert [(name, ok) for name, ok, _ in source.check()] == [("reachable", False)]
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)


def test_commands_that_are_not_there(tmp_path: Path) -> None:
    source = SlurmSource("alpha", Commands("alpha", folder=str(tmp_path)))
    with pytest.raises(SourceError, match=r"squeue is not in .*slurm_bin"):
        source.live()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo squeue: error: Invalid user >&2; exit 1", r"squeue failed \(exit 1\): squeue: error: Invalid user"),
        ("printf 'a\\037b\\036\\nc'", "fields of another number"),
        ("printf '1\\0371\\037root\\037'", "fields of another number"),
    ],
)
def test_answers_that_are_not_whole(tmp_path: Path, script: str, message: str) -> None:
    for name in ("squeue", "scontrol"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(SourceError, match=message):
        SlurmSource("alpha", Commands("alpha", folder=str(tmp_path))).live()

"""The Slurm agent on a real Slurm: leases made, renewed, used, outlived, removed, taken up, and never of others."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from scheduler_hints.plan_feed import PlansAnswer
from scheduler_hints.schema import ReservationPlan
from scheduler_hints.slurm_agent import SlurmAgent
from scheduler_hints.slurm_audit import jsonl_audit
from scheduler_hints.slurm_commands import (
    ArgumentError,
    Budget,
    NoSuchReservation,
    ReservationInUse,
    SlurmCommands,
    SlurmError,
    SlurmTimeout,
)
from scheduler_hints.slurm_guard import Limits
from tests.services import Slurm, wait_until

pytestmark = pytest.mark.services("slurmctld", "slurmd", "sbatch", "munged")
ME = getpass.getuser()
WHOLE = ("--nodes=1", "--exclusive", "--gres=gpu:8", "--time=30")
LATER = "--begin=now+3600"


class World:
    """A real Slurm, an agent of it, and the plans it is told."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        self.rows: list[dict[str, Any]] = []
        self.plans: list[ReservationPlan] = []
        self.expires_in_s = 3600.0
        self.skew_s = 0.0

    def commands(self, **more: Any) -> SlurmCommands:
        return SlurmCommands(conf=str(self.slurm.conf), **({"budget": Budget(100_000)} | more))

    def fetch(self) -> PlansAnswer:
        return PlansAnswer(list(self.plans), self.expires_in_s)

    def agent(self, mode: Any = "reserve", commands: SlurmCommands | None = None, **more: Any) -> SlurmAgent:
        """An agent whose own clock runs `skew_s` ahead, so that its periods pass without waiting."""
        limits = Limits(**({"max_leases": 2, "max_nodes_ratio": 1.0} | more.pop("limits", {})))
        return SlurmAgent(
            "alpha",
            self.fetch,
            commands or self.commands(),
            mode=mode,
            audit=self.rows.append,
            limits=limits,
            clock=lambda: datetime.now(UTC) + timedelta(seconds=self.skew_s),
            monotonic=lambda: time.monotonic() + self.skew_s,
            **more,
        )

    def plan(self, job_id: int, *nodes: str, **more: Any) -> ReservationPlan:
        now = datetime.now(UTC)
        values: dict[str, Any] = {
            "id": f"p-{job_id}",
            "cluster": "alpha",
            "job_id": str(job_id),
            "user": ME,
            "account": None,
            "nodes": list(nodes),
            "start": now,
            "end": now + timedelta(seconds=900),
            "because": ["thermal throttling on node n1 (hint bn-1)"],
            "benefit": "",
            "cost_if_wrong_gpu_s": 0.0,
        }
        return ReservationPlan(**(values | more))

    def waiting(self, *options: str) -> int:
        return self.slurm.submit(*WHOLE, LATER, *options)

    def reservations(self) -> dict[str, dict[str, str]]:
        found = {}
        for line in self.slurm.run("scontrol", "-o", "show", "reservation").splitlines():
            fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
            if "ReservationName" in fields:
                found[fields["ReservationName"]] = fields
        return found

    def states(self) -> dict[str, str]:
        return dict(line.split("|") for line in self.slurm.run("sinfo", "-hN", "-o", "%N|%T").splitlines())

    @property
    def said(self) -> list[str]:
        return [row["action"] + "!" * row["is_applied"] for row in self.rows]


@pytest.fixture
def world(slurm: Slurm) -> Iterator[World]:
    slurm.reset()
    yield World(slurm)
    slurm.reset()


# --- the life of a lease ------------------------------------------------------------------------------------------


def test_planned_job_starts_in_its_lease_and_outlives_it_while_others_stay_out(world):
    """Renewed while its job waits, closed to others, used by the unmodified job, ended by itself, the job unharmed."""
    slurm = world.slurm
    job = slurm.submit(*WHOLE, "--begin=now+25", script="sleep 50")
    agent = world.agent(limits={"renew_after_s": 12})
    world.plans = [world.plan(job, "n3", end=datetime.now(UTC) + timedelta(seconds=65))]
    agent.step()
    (name,) = world.reservations()
    lease = world.reservations()[name]
    assert name == f"wg_p_{job}"
    assert lease["Nodes"] == "n3"
    assert lease["Users"] == ME
    assert set(lease["Flags"].split(",")) == {
        "FLEX", "MAGNETIC", "NO_HOLD_JOBS_AFTER_END", "PURGE_COMP=00:01:00", "SPEC_NODES",
    }  # fmt: skip
    assert lease["EndTime"] == world.plans[0].end.strftime("%Y-%m-%dT%H:%M:%S")
    assert world.said == ["reserve!"]

    stranger = int(
        slurm.run("sbatch", "--parsable", "--uid=nobody", "--chdir=/tmp", "--output=/dev/null", *WHOLE[1:], "--nodes=1",
                  "--nodelist=n3", "--wrap=sleep 60").split(";")[0]
    )  # fmt: skip
    while slurm.job(job)["JobState"] == "PENDING":
        agent.step()
        assert slurm.job(stranger)["JobState"] == "PENDING"
        time.sleep(2)
    slurm.run("scancel", str(stranger))
    assert "renew!" in world.said
    started = slurm.job(job)
    assert started["NodeList"] == "n3"
    assert started["JobState"] == "RUNNING"
    assert slurm.run("squeue", "-h", "-j", str(job), "-o", "%v").strip() == name

    world.plans = []  # it runs: its plan is gone
    agent.step()
    assert world.said[-1] == "used"
    assert name in world.reservations(), "a lease in use is left to end by itself"
    assert agent.breaker.in_a_row == 0
    wait_until(lambda: slurm.job(job)["JobState"] != "RUNNING", 90, 1, "the job's end")
    ended = slurm.job(job)
    assert ended["JobState"] == "COMPLETED"
    assert ended["EndTime"] > lease["EndTime"]
    agent.step()
    assert world.said[-1] == "ended"
    assert agent.leases == {}
    assert set(world.said) == {"reserve!", "renew!", "used", "ended"}


def test_lease_goes_when_its_hint_goes(world):
    agent = world.agent()
    world.plans = [world.plan(world.waiting(), "n1", "n2")]
    agent.step()
    (lease,) = world.reservations().values()
    assert lease["Nodes"] == "n[1-2]"
    assert [row["node"] for row in world.rows] == ["n1", "n2"]
    agent.step()
    assert world.said == ["reserve!"] * 2
    world.plans = []
    agent.step()
    assert world.reservations() == {}
    assert world.said == ["reserve!"] * 2 + ["release!"] * 2
    assert agent.breaker.in_a_row == 1, "its job still waits: the hint was wrong"


def test_advise_writes_nothing(world):
    agent = world.agent("advise")
    good = world.plan(world.waiting(), "n1")
    world.plans = [good, world.plan(world.waiting(), "n9")]
    agent.step()
    assert world.reservations() == {}
    assert world.said == ["reserve", "refuse"]
    assert "no node n9" in world.rows[1]["reason"]
    world.plans = []
    agent.step()
    assert world.said[2:] == ["release"]


def test_lease_moves_with_its_plan_and_ends_when_somebody_deletes_it(world):
    job = world.waiting()
    agent = world.agent()
    world.plans = [world.plan(job, "n1")]
    agent.step()
    world.plans = [world.plan(job, "n2")]
    agent.step()
    assert world.reservations()[f"wg_p_{job}"]["Nodes"] == "n1", "not at every tick"
    world.skew_s = 61
    agent.step()
    assert world.reservations()[f"wg_p_{job}"]["Nodes"] == "n2"
    assert world.said == ["reserve!", "release!", "reserve!"]
    assert agent.breaker.in_a_row == 0, "moving is no mistake"
    world.slurm.run("scontrol", "delete", f"reservationname=wg_p_{job}")
    world.skew_s = 61 + 45
    agent.step()
    agent.step()
    assert world.reservations() == {}
    assert world.said[3:] == ["lost"]
    world.plans = []
    agent.step()
    world.plans = [world.plan(job, "n2")]
    agent.step()
    assert len(world.reservations()) == 1, "a new plan is a new matter"


def test_another_job_of_the_same_user_in_the_lease_is_left_alone(world):
    agent = world.agent()
    world.plans = [world.plan(world.waiting(), "n4")]
    agent.step()
    other = world.slurm.submit(*WHOLE)
    assert world.slurm.wait_state(other, "RUNNING")["NodeList"] == "n4", "magnetic leases draw every job of the user"
    world.plans = []
    agent.step()
    assert world.said == ["reserve!", "used"]
    assert "another job" in world.rows[-1]["reason"]
    assert world.slurm.job(other)["JobState"] == "RUNNING"
    assert agent.release_all() == [next(iter(world.reservations()))]


# --- what stops it ------------------------------------------------------------------------------------------------


def test_no_write_without_a_fresh_hint(world):
    agent = world.agent()
    world.plans = [world.plan(world.waiting(), "n1")]
    world.expires_in_s = 0.0
    agent.step()
    assert world.reservations() == {}
    world.expires_in_s = 5.0
    agent.step()
    (lease,) = world.reservations().values()
    # The API is gone; an hour passes on the agent's clocks. Plans, renewals and ends do not matter any more.
    world.plans, world.expires_in_s = [], -1.0
    for world.skew_s in (6, 50, 3600):
        agent.step()
    assert list(world.reservations().values()) == [lease]
    assert world.said == ["no-hints", "hints-back", "reserve!", "no-hints"]


def test_hints_that_expire_in_the_middle_of_a_round_stop_it(world):
    commands = world.commands()
    ask = commands.job
    agent = world.agent(commands=commands)

    def slow(job_id: str) -> Any:
        world.skew_s += 100
        return ask(job_id)

    commands.job = slow
    world.plans, world.expires_in_s = [world.plan(world.waiting(), "n1")], 60.0
    agent.step()
    assert world.reservations() == {}
    assert world.said == ["no-hints"]


def test_reservations_of_others_are_never_touched(world):
    slurm = world.slurm
    end = (datetime.now(UTC) + timedelta(minutes=9)).strftime("%Y-%m-%dT%H:%M:%S")
    for name, node in (("maintenance", "n1"), ("wg_mine", "n2")):
        slurm.run("scontrol", "create", "reservation", f"reservationname={name}", "starttime=now", f"endtime={end}",
                  f"nodes={node}", f"users={ME}")  # fmt: skip
    agent = world.agent()
    job, job2, job3 = world.waiting(), world.waiting(), world.waiting()
    world.plans = [world.plan(job, "n1", "n3"), world.plan(job2, "n4", id="mine"), world.plan(job3, "n2")]
    agent.step()
    assert set(world.reservations()) == {"maintenance", "wg_mine"}
    reasons = {row["hint_id"]: row["reason"] for row in world.rows}
    assert reasons[f"p-{job}"] == "n1 is in reservation maintenance"
    assert reasons["mine"] == "there is a reservation wg_mine already"
    assert reasons[f"p-{job3}"] == "n2 is in reservation wg_mine"
    world.plans = []
    agent.step()
    assert agent.release_all() == []
    assert set(world.reservations()) == {"maintenance", "wg_mine"}


def test_only_idle_nodes_that_nobody_else_waits_for(world):
    slurm = world.slurm
    slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    running = slurm.submit(*WHOLE, "--nodelist=n2")
    slurm.wait_state(running, "RUNNING")
    promised = slurm.submit("--nodes=2", "--exclusive", "--gres=gpu:8", "--time=30", "--nodelist=n2,n3")
    wait_until(lambda: world.states()["n3"] == "planned", 20, 0.2, "n3 planned for the job that waits for n2")
    jobs = [world.waiting() for _ in range(3)]
    agent = world.agent()
    world.plans = [world.plan(job, node) for job, node in zip(jobs, ("n1", "n2", "n3"), strict=True)]
    agent.step()
    assert [row["reason"] for row in world.rows] == [
        "n1 is drained",
        "n2 is allocated",
        "n3 is planned for another job",
    ]
    assert world.reservations() == {}
    world.plans = [world.plan(promised, "n3")]
    agent.step()
    assert world.reservations()[f"wg_p_{promised}"]["Nodes"] == "n3", "planned for this very job"


def test_only_for_the_waiting_job_of_its_user(world):
    slurm = world.slurm
    running = slurm.submit(*WHOLE, "--nodelist=n1")
    slurm.wait_state(running, "RUNNING")
    hostile = world.waiting("--job-name=x|root|y users=nobody flags=MAINT,--help")
    agent = world.agent()
    world.plans = [
        world.plan(running, "n2"),
        world.plan(99_999_999, "n2"),
        world.plan(world.waiting(), "n2", user="nobody"),
        world.plan(hostile, "n2", id="p-a", user="nobody"),
        world.plan(hostile, "n2", id="p-b"),
    ]
    agent.step()
    reasons = [row["reason"] for row in world.rows]
    assert reasons[0] == f"job {running} is running: only a waiting job gets a lease"
    assert reasons[1] == "Slurm knows no job 99999999"
    assert reasons[2].endswith(f"is of user {ME}, the plan says nobody")
    assert reasons[3].endswith(f"is of user {ME}, the plan says nobody")
    assert [lease["Users"] for lease in world.reservations().values()] == [ME]
    assert set(world.reservations()) == {"wg_p_b"}


def test_limits_hold(world):
    agent = world.agent(limits={"max_leases": 2, "max_nodes_ratio": 0.5})
    jobs = [world.waiting() for _ in range(4)]
    world.plans = [
        world.plan(jobs[0], "n1", "n2", "n3"),
        world.plan(jobs[1], "n1"),
        world.plan(jobs[2], "n2"),
        world.plan(jobs[3], "n3"),
    ]
    agent.step()
    assert world.said == ["refuse"] * 3 + ["reserve!", "reserve!", "refuse"]
    assert "max_nodes_ratio = 0.5" in world.rows[0]["reason"]
    assert "max_leases = 2" in world.rows[-1]["reason"]
    assert len(world.reservations()) == 2


def test_wrong_leases_in_a_row_open_the_breaker(world):
    agent = world.agent(breaker_failures=2, breaker_open_s=600)
    for _ in range(2):
        world.plans = [world.plan(world.waiting(), "n1")]
        agent.step()
        world.plans = []
        agent.step()
    assert world.said == ["reserve!", "release!"] * 2 + ["breaker-open"]
    world.plans = [world.plan(world.waiting(), "n1")]
    agent.step()
    assert world.reservations() == {}
    assert world.rows[-1]["reason"] == "the circuit breaker is open"
    world.skew_s = 601
    agent.step()
    assert len(world.reservations()) == 1


def test_commands_stay_in_their_budget(world):
    """However much there is to do, and a sequence is carried out whole or not begun."""
    commands = world.commands(budget=Budget(6, monotonic=lambda: time.monotonic() + world.skew_s))
    asked: list[str] = []
    take = commands.budget.take

    def counted(cost: int = 1, *, must: bool = False) -> None:
        take(cost, must=must)
        asked.extend([""] * cost)

    commands.budget.take = counted
    agent = world.agent(commands=commands)
    jobs = [world.waiting() for _ in range(3)]
    for minute in range(4):
        world.plans = [world.plan(job, f"n{i + 1 + minute % 2}") for i, job in enumerate(jobs)]
        for _ in range(6):
            agent.step()
            world.skew_s += 10
    # What lets go of leases is not kept waiting: two leases, each with a look at its job.
    assert len(asked) <= 6 + 4 * 6 + 2 * 3
    assert len(asked) > 10
    assert "error" not in world.said


# --- restarts and outages -----------------------------------------------------------------------------------------

_CHILD = """
import json, sys, threading
from pathlib import Path
from scheduler_hints.plan_feed import PlansAnswer
from scheduler_hints.slurm_agent import SlurmAgent, run
from scheduler_hints.slurm_audit import jsonl_audit
from scheduler_hints.slurm_commands import Budget, SlurmCommands
import signal
conf, plans, out = sys.argv[1:]
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
agent = SlurmAgent("alpha", lambda: PlansAnswer(json.loads(Path(plans).read_text()), 30.0),
                   SlurmCommands(conf=conf, budget=Budget(10_000)), mode="reserve", audit=jsonl_audit(Path(out)))
run(agent, 0.2, stop)
"""


def test_killed_agent_is_replaced_by_one_that_takes_its_leases_up(world, tmp_path):
    import msgspec

    kept, stale = world.waiting(), world.waiting()
    plans, out = tmp_path / "plans.json", tmp_path / "alpha.jsonl"
    world.plans = [world.plan(kept, "n1"), world.plan(stale, "n2")]

    def start() -> subprocess.Popen[bytes]:
        plans.write_bytes(msgspec.json.encode(world.plans[:1]))
        argv = [sys.executable, "-c", _CHILD, str(world.slurm.conf), str(plans), str(out)]
        return subprocess.Popen(argv, cwd=Path(__file__).parent.parent)

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    child = start()
    try:
        wait_until(world.reservations, 20, 0.2, "the first lease")
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        world.agent().step()  # makes the second lease, which is stale when the next agent starts
        assert len(world.reservations()) == 2
        before = world.reservations()[f"wg_p_{kept}"]
        child = start()
        wait_until(lambda: len(world.reservations()) == 1, 20, 0.2, "the stale lease gone")
        assert world.reservations()[f"wg_p_{kept}"] == before
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.wait(10)
    actions = [(row["action"], row["node"]) for row in rows()]
    assert actions[0] == ("reserve", "n1")
    assert sorted(actions[1:3]) == [("adopt", "n1"), ("adopt", "n2")]
    assert actions[3:] == [("release", "n2"), ("stop", "")]
    assert world.reservations()[f"wg_p_{kept}"] == before, "a stopped agent leaves its leases to their end"


def test_release_removes_all_leases_that_nobody_uses(world):
    agent = world.agent()
    world.plans = [world.plan(world.waiting(), "n1"), world.plan(world.waiting(), "n2")]
    agent.step()
    assert len(world.reservations()) == 2
    fresh = world.agent("advise", world.commands(budget=Budget(1)))
    assert fresh.release_all() == []
    assert world.reservations() == {}
    assert world.said[2:] == ["release!"] * 2


def test_a_scheduler_that_hangs_is_no_fault_and_nothing_is_made_twice(world):
    """slurmctld stops in the middle of a create: the outcome is unknown, and found out when it answers again."""
    job = world.waiting()
    commands = world.commands(timeout_s=1.0)
    look = commands.job
    pid = int((world.slurm.folder / "slurmctld.pid").read_text())

    def freeze(job_id: str) -> Any:
        found = look(job_id)
        os.kill(pid, signal.SIGSTOP)
        return found

    commands.job = freeze
    agent = world.agent(commands=commands)
    world.plans = [world.plan(job, "n1")]
    try:
        agent.step()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert agent.leases == {}
    assert world.said == ["error"]
    assert "no answer within 1 s" in world.rows[0]["reason"]
    commands.job = look
    commands._timeout_s = 30
    wait_until(lambda: "UP" in world.slurm.run("scontrol", "ping", check=False), 30, 0.2, "slurmctld answers")
    world.skew_s = 61
    agent.step()
    agent.step()
    assert set(world.reservations()) == {f"wg_p_{job}"}
    assert set(agent.leases) == {f"wg_p_{job}"}


def test_slurm_that_cannot_be_asked_is_recorded_once(world, tmp_path):
    nowhere = world.commands(bin_dir=str(tmp_path))
    agent = world.agent(commands=nowhere)
    world.plans = [world.plan(world.waiting(), "n1")]
    agent.step()
    agent.step()
    assert world.said == ["error"]
    assert "slurm_bin" in world.rows[0]["reason"]


# --- commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(slurm: Slurm) -> SlurmCommands:
    slurm.reset()
    return SlurmCommands(conf=str(slurm.conf), budget=Budget(1000))


def _end(minutes: float = 5) -> datetime:
    return datetime.now(UTC) + timedelta(minutes=minutes)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.create_lease("wg_x", ["n1,n2"], None, _end(), ME),
        lambda c: c.create_lease("wg_x", ["n1"], None, _end(), "root,nobody"),
        lambda c: c.create_lease("wg_x", ["n1"], None, _end(), "-root"),
        lambda c: c.create_lease("wg_x", ["n1"], None, _end(), ""),
        lambda c: c.create_lease("other", ["n1"], None, _end(), ME),
        lambda c: c.create_lease("wg_x flags=MAINT", ["n1"], None, _end(), ME),
        lambda c: c.create_lease("wg_x", [], None, _end(), ME),
        lambda c: c.delete_lease("maintenance"),
        lambda c: c.job("--help"),
        lambda c: c.job("1,2"),
    ],
)
def test_names_are_checked_before_anything_is_run(slurm, commands, call: Callable[[SlurmCommands], Any]):
    before = commands.budget.left()
    with pytest.raises(ArgumentError):
        call(commands)
    assert commands.budget.left() >= before


def test_commands_say_what_slurm_said(slurm, commands, tmp_path):
    commands.create_lease("wg_a", ["n1", "n2", "n4"], None, _end(), ME)
    (found,) = commands.reservations()
    assert found.nodes == {"n1", "n2", "n4"}
    assert found.users == (ME,)
    assert found.is_lease
    assert abs((found.start - datetime.now(UTC)).total_seconds()) < 20, "times are UTC whatever TZ says"
    with pytest.raises(SlurmError, match="overlaps"):
        commands.create_lease("wg_b", ["n1"], None, _end(), ME)
    with pytest.raises(SlurmError, match="Invalid user"):
        commands.create_lease("wg_b", ["n3"], None, _end(), "no-such-user")
    assert commands.node_states().keys() == {"n1", "n2", "n3", "n4"}
    job = slurm.submit(*WHOLE, "--nodelist=n1")
    slurm.wait_state(job, "RUNNING")
    there = commands.job(str(job))
    assert there is not None
    assert (there.user, there.state, there.nodes, there.reservation) == (ME, "RUNNING", {"n1"}, "wg_a")
    with pytest.raises(ReservationInUse):
        commands.delete_lease("wg_a")
    slurm.run("scancel", str(job))
    wait_until(lambda: "COMPLETING" not in slurm.job(job)["JobState"], 20, 0.2)
    wait_until(lambda: _deleted(commands), 20, 0.5, "the lease deleted")
    with pytest.raises(NoSuchReservation):
        commands.delete_lease("wg_a")
    assert commands.job("99999999") is None
    with pytest.raises(SlurmTimeout):
        SlurmCommands(conf=str(slurm.conf), timeout_s=0.0001).node_states()
    assert commands._names("n[1-2,004],login-a") == {"n1", "n2", "n004", "login-a"}
    with pytest.raises(SlurmError, match="not a host list"):
        commands._names("$(id)")


def _deleted(commands: SlurmCommands) -> bool:
    try:
        commands.delete_lease("wg_a")
    except ReservationInUse:
        return False
    return True


def test_environment_of_the_caller_does_not_change_what_is_read(slurm, commands, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("SQUEUE_FORMAT", "%j")
    monkeypatch.setenv("SINFO_FORMAT", "%j")
    fresh = SlurmCommands(conf=str(slurm.conf), budget=Budget(1000))
    fresh.create_lease("wg_a", ["n1"], None, _end(), ME)
    (found,) = fresh.reservations()
    assert abs((found.end - _end()).total_seconds()) < 30
    assert len(fresh.node_states()) == 4
    jsonl_audit(tmp_path / "x")({"ok": True})
    fresh.delete_lease("wg_a")

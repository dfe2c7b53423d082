"""The Slurm agent without a Slurm: freshness of plans, faults of plans, names, the record, breaker and budget."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.vocabulary import TABLES
from pipelines.sources import SourceError
from pipelines.sources.slurm_budget import Budget as Requests
from pipelines.sources.slurm_budget import Price
from pipelines.sources.slurm_share import AgentShare
from scheduler_hints.client import Answer
from scheduler_hints.plan_feed import PlanFeed, PlansAnswer, fetch_from
from scheduler_hints.schema import ReservationPlan
from scheduler_hints.slurm_agent import AgentError, SlurmAgent, run
from scheduler_hints.slurm_audit import Ledger, action_rows, jsonl_audit
from scheduler_hints.slurm_checks import fault
from scheduler_hints.slurm_commands import ArgumentError, Budget, SlurmBudgetError, check_names, lease_name
from scheduler_hints.slurm_guard import Breaker, LimitError, Limits

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def plan(**more: Any) -> ReservationPlan:
    values: dict[str, Any] = {
        "id": "p-1",
        "cluster": "alpha",
        "job_id": "7",
        "user": "ada",
        "account": None,
        "nodes": ["n1"],
        "start": NOW,
        "end": NOW + timedelta(seconds=900),
        "because": ["a hint"],
        "benefit": "",
        "cost_if_wrong_gpu_s": 7200.0,
    }
    return ReservationPlan(**(values | more))


class Source:
    """Plans that a test sets; raises what a test wants raised."""

    def __init__(self, *items: Any, expires_in_s: Any = 30.0) -> None:
        self.items: Any = list(items)
        self.expires_in_s = expires_in_s
        self.error: Exception | None = None
        self.asked = 0

    def __call__(self) -> PlansAnswer:
        self.asked += 1
        if self.error:
            raise self.error
        return PlansAnswer(self.items, self.expires_in_s)


class Time:
    def __init__(self) -> None:
        self.s = 1000.0

    def monotonic(self) -> float:
        return self.s

    def wall(self) -> datetime:
        return NOW + timedelta(seconds=self.s - 1000)


def advisor(source: Source, rows: list[dict], time: Time, **more: Any) -> SlurmAgent:
    return SlurmAgent("alpha", source, None, audit=rows.append, clock=time.wall, monotonic=time.monotonic, **more)


def said(rows: list[dict]) -> list[tuple[str, bool]]:
    return [(row["action"], row["is_applied"]) for row in rows]


# --- freshness ----------------------------------------------------------------------------------------------------


def test_feed_keeps_the_last_good_answer_until_it_expires_and_not_longer():
    time, source = Time(), Source(plan())
    feed = PlanFeed(source, time.monotonic)
    assert not feed.is_fresh()
    assert feed.poll()
    source.error = OSError("refused")
    time.s += 29.9
    assert feed.poll()
    assert list(feed.plans) == ["p-1"]
    assert "refused" in feed.problem
    time.s += 0.2
    assert not feed.poll()


def test_expiry_counts_from_before_the_question():
    time = Time()

    def slow() -> PlansAnswer:
        time.s += 20
        return PlansAnswer([], 30.0)

    feed = PlanFeed(slow, time.monotonic)
    assert feed.poll()
    time.s += 10
    assert not feed.is_fresh()


@pytest.mark.parametrize("expires", [0, -1, math.nan, math.inf, 1e9, None, "soon", [3]])
def test_an_answer_without_a_believable_expiry_is_no_answer(expires):
    feed = PlanFeed(Source(plan(), expires_in_s=expires), Time().monotonic)
    assert not feed.poll()
    assert feed.plans == {}


def test_items_that_are_no_plans_are_left_out():
    good = msgspec.to_builtins(plan())
    wrong = [None, 7, "x", {}, good | {"nodes": "n1"}, good | {"end": "tomorrow"}, {**good, "user": ["root"]}]
    feed = PlanFeed(Source(*wrong, good, plan(id="p-2")), Time().monotonic)
    assert feed.poll()
    assert list(feed.plans) == ["p-1", "p-2"]
    assert len(feed.garbage) == len(wrong)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(items=json_values, expires=json_values)
def test_no_garbage_makes_an_agent_act(items, expires):
    rows: list[dict] = []
    source = Source(expires_in_s=expires)
    source.items = items
    agent = advisor(source, rows, Time())
    agent.step()
    assert agent.leases == {}
    assert not {row["action"] for row in rows} - {"no-hints", "refuse"}


def test_a_client_whose_cluster_is_stale_gives_nothing():
    class Answer:
        items = (plan(),)
        stale_shards = ("alpha",)
        problem = None

    class Client:
        def reservation_plans(self, **parameters: Any) -> Answer:
            assert parameters == {"cluster": "alpha"}
            return Answer()

        def expires_in_s(self, answer: Answer) -> float:
            return 30.0

    assert not PlanFeed(fetch_from(Client(), "alpha"), Time().monotonic).poll()
    Answer.stale_shards = ("beta",)
    assert PlanFeed(fetch_from(Client(), "alpha"), Time().monotonic).poll()


# --- advise without a scheduler -----------------------------------------------------------------------------------


def test_advise_says_once_what_it_would_do():
    time, rows, source = Time(), [], Source(plan(nodes=["n1", "n2"]))
    agent = advisor(source, rows, time)
    for _ in range(3):
        agent.step()
        time.s += 10
    assert said(rows) == [("reserve", False)] * 2
    assert [row["node"] for row in rows] == ["n1", "n2"]
    assert rows[0]["hint_id"] == "p-1"
    assert rows[0]["job_id"] == "7"
    assert rows[0]["reason"] == "a hint"
    source.items = []
    agent.step()
    agent.step()
    assert said(rows)[2:] == [("release", False)] * 2
    assert agent.leases == {}


def test_advise_ends_what_it_would_have_held():
    time, rows = Time(), []
    agent = advisor(Source(plan()), rows, time)
    agent.step()
    time.s += 901
    agent.step()
    assert said(rows) == [("reserve", False), ("ended", False), ("refuse", False)]
    assert rows[-1]["reason"] == "the plan ends within a minute"


def test_one_lease_at_a_time_by_default_and_refusals_are_said_once():
    time, rows = Time(), []
    agent = advisor(Source(plan(), plan(id="p-2", job_id="8", nodes=["n2"])), rows, time)
    agent.step()
    agent.step()
    assert said(rows) == [("reserve", False), ("refuse", False)]
    assert "max_leases" in rows[1]["reason"]
    assert rows[1]["hint_id"] == "p-2"


def test_outages_are_said_once_and_their_end_too():
    time, rows, source = Time(), [], Source()
    source.error = ConnectionError("no route")
    agent = advisor(source, rows, time)
    agent.step()
    agent.step()
    source.error = None
    agent.step()
    assert said(rows) == [("no-hints", False), ("hints-back", False)]
    assert "no route" in rows[0]["reason"]


def test_an_outage_is_said_in_the_words_of_the_client(caplog):
    rows: list[dict] = []

    class Client:
        answer = Answer(is_fresh=False, problem="http://127.0.0.1:8700/v1/reservation-plans: Connection refused")

        def reservation_plans(self, **_: Any) -> Answer:
            return self.answer

        def expires_in_s(self, answer: Answer) -> float:
            return answer.deadline_s

    agent = SlurmAgent("alpha", fetch_from(Client(), "alpha"), None, audit=rows.append)
    with caplog.at_level("INFO"):
        agent.step()
        assert rows[0]["reason"] == f"nothing is done until hints are fresh; {Client.answer.problem}"
        assert agent.in_words() == f"no fresh hints, nothing is done: {Client.answer.problem}"
        Client.answer = Answer(is_fresh=False)
        agent.step()
        assert rows[1]["reason"] == "nothing is done until hints are fresh; the answer had expired"
        agent.close()
    assert rows[-1]["reason"] == "stopped; no lease is left"
    assert "{}" not in caplog.text
    assert "Error" not in caplog.text


def test_a_round_can_be_told_in_words():
    source = Source()
    agent = advisor(source, [], Time())
    agent.step()
    assert agent.in_words() == "hints are fresh: 0 plans, 0 leases that would stand; nothing to do"
    source.items = [plan()]
    agent.step()
    assert agent.in_words() == "hints are fresh: 1 plan, 1 lease that would stand"


def test_run_stops_and_says_what_it_leaves():
    rows: list[dict] = []
    stop = threading.Event()
    source = Source(plan())
    agent = advisor(source, rows, Time())

    def last() -> PlansAnswer:
        stop.set()
        raise RuntimeError("the round fails, the loop does not")

    agent._feed._fetch = last
    run(agent, 0.01, stop)
    assert [row["action"] for row in rows] == ["no-hints", "stop"]


def test_agents_that_cannot_be_are_refused():
    with pytest.raises(AgentError, match="needs the Slurm commands"):
        SlurmAgent("alpha", Source(), None, mode="reserve", audit=print)
    with pytest.raises(AgentError, match="advise or reserve"):
        SlurmAgent("alpha", Source(), None, mode="drain", audit=print)  # ty: ignore[invalid-argument-type]
    with pytest.raises(LimitError, match="max_nodes_ratio"):
        Limits(max_nodes_ratio=1.5)
    with pytest.raises(LimitError, match="breaker_failures"):
        Breaker(0, 1, Time().monotonic)
    with pytest.raises(AgentError, match="no Slurm"):
        advisor(Source(), [], Time()).release_all()


# --- faults and names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"cluster": "beta"}, "beta"),
        ({"nodes": []}, "no node"),
        ({"nodes": ["n1", "n1"]}, "twice"),
        ({"nodes": ["n1,n2"]}, "n1,n2"),
        ({"nodes": ["n[1-4]"]}, "node name"),
        ({"nodes": ["ALL\n"]}, "node name"),
        ({"nodes": ["-n1"]}, "node name"),
        ({"nodes": ["n1 users=root"]}, "node name"),
        ({"user": "-ada"}, "user name"),
        ({"user": "ada,root"}, "user name"),
        ({"user": "ada flags=MAINT"}, "user name"),
        ({"user": ""}, "user name"),
        ({"user": "", "account": "-lab"}, "account"),
        ({"job_id": "7;scancel"}, "job id"),
        ({"job_id": "-7"}, "job id"),
        ({"job_id": "7,8"}, "job id"),
        ({"end": NOW + timedelta(seconds=59)}, "within a minute"),
        ({"start": NOW - timedelta(hours=9), "end": NOW}, "within a minute"),
        ({"end": NOW + timedelta(seconds=3601)}, "3600 s"),
        ({"start": NOW + timedelta(hours=2), "end": NOW + timedelta(hours=2.5)}, "ahead"),
        ({"end": (NOW + timedelta(seconds=900)).replace(tzinfo=None)}, "time zone"),
    ],
)
def test_plans_with_a_fault_are_refused(more, word):
    found = fault(plan(**more), "alpha", Limits(), NOW)
    assert found is not None
    assert word in found


@pytest.mark.parametrize("more", [{}, {"job_id": "12_7"}, {"job_id": "12+1"}, {"user": "", "account": "lab"}])
def test_plans_without_a_fault(more):
    assert fault(plan(**more), "alpha", Limits(), NOW) is None


@given(st.text(min_size=1, max_size=120))
def test_lease_names_are_names_and_keep_ids_apart(text):
    name = lease_name(text)
    assert name.startswith("wg_")
    assert name.replace("_", "").isalnum()
    assert name.isascii()
    assert len(name) <= 60
    assert name != lease_name(text + "-")


@given(st.text(max_size=40))
def test_whatever_passes_for_a_name_holds_nothing_that_scontrol_reads(text):
    try:
        check_names([text], text, text, "7")
    except ArgumentError:
        return
    assert not set(text) & set(" ,=\n\t[]:;'\"()/\\|&<>*?!")
    assert text[0].isalnum()


# --- the record ---------------------------------------------------------------------------------------------------


def test_rows_have_the_columns_of_out_actions_and_differ_by_node():
    rows = action_rows(NOW, "alpha", "reserve", is_applied=True, reason="r", nodes=["n2", "n1"], end=NOW)
    assert {tuple(row) for row in rows} == {TABLES["out_actions"].columns}
    assert [row["node"] for row in rows] == ["n1", "n2"]
    assert json.loads(rows[0]["detail"]) == {"end": "2026-11-30T12:00:00Z"}
    (row,) = action_rows(NOW, "alpha", "stop", is_applied=False, reason="r")
    assert row["node"] == ""


def test_lines_are_appended_whole_and_a_torn_one_spoils_no_other(tmp_path):
    path = tmp_path / "actions" / "alpha.jsonl"
    append = jsonl_audit(path)
    append({"ts": NOW, "reason": "line\nbreak"})
    with path.open("ab") as file:
        file.write(b'{"ts": "2026-')  # a crash
    append({"ts": NOW, "reason": "second"})
    first, torn, second = path.read_bytes().splitlines()
    assert json.loads(first) == {"ts": "2026-11-30T12:00:00Z", "reason": "line\nbreak"}
    assert torn == b'{"ts": "2026-'
    assert json.loads(second)["reason"] == "second"
    path.rename(tmp_path / "taken")
    append({"ts": NOW, "reason": "third"})
    assert len(path.read_bytes().splitlines()) == 1


def test_many_writers_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "alpha.jsonl"

    def write(number: int) -> None:
        append = jsonl_audit(path)
        for i in range(20):
            append({"n": number, "i": i, "x": "y" * 3000})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert sorted((row["n"], row["i"]) for row in rows) == [(n, i) for n in range(4) for i in range(20)]


def test_nothing_is_held_while_the_record_cannot_be_written_and_no_row_is_lost(tmp_path):
    folder = tmp_path / "actions"
    folder.write_text("in the way")  # the disk refuses
    time, source = Time(), Source(plan())
    rows_path = folder / "alpha.jsonl"
    agent = SlurmAgent("alpha", source, None, audit=jsonl_audit(rows_path), clock=time.wall, monotonic=time.monotonic)
    source.error = OSError("down")
    agent.step()
    source.error = None
    agent.step()
    assert agent.leases == {}
    folder.unlink()
    agent.step()
    actions = [json.loads(line)["action"] for line in rows_path.read_text().splitlines()]
    assert actions == ["no-hints", "hints-back", "refuse", "reserve"]


def test_ledger_repeats_only_what_is_new():
    rows: list[dict] = []
    ledger = Ledger("alpha", rows.append, lambda: NOW)
    for reason in ("a", "a", "b", "a"):
        ledger.say("key", "refuse", reason)
    assert [row["reason"] for row in rows] == ["a", "b", "a"]
    ledger.keep(())
    ledger.say("key", "refuse", "a")
    assert len(rows) == 4


# --- breaker and budget -------------------------------------------------------------------------------------------


def test_breaker_opens_after_a_run_and_tries_one_when_its_time_is_over():
    time = Time()
    breaker = Breaker(3, 600, time.monotonic)
    assert [breaker.failed(), breaker.failed()] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True]
    assert breaker.open_for_s() == 600
    assert not breaker.failed(), "it is open already"
    time.s += 601
    assert breaker.open_for_s() == 0
    assert breaker.failed(), "one more failure opens it again at once"
    time.s += 601
    breaker.succeeded()
    assert not breaker.failed()


def test_budget_is_a_rate_with_a_small_burst():
    time = Time()
    budget = Budget(6, monotonic=time.monotonic)
    run_s = []
    for _ in range(1200):  # ten minutes in half seconds
        try:
            budget.take()
            run_s.append(time.s)
        except SlurmBudgetError:
            pass
        time.s += 0.5
    assert run_s[5] == pytest.approx(1002.5)
    assert 60 <= len(run_s) <= 66
    slow = Budget(0.5, monotonic=time.monotonic)
    assert slow.left() == 6, "a sequence of commands must be possible at all"
    time.s -= 50
    assert slow.left() == 6
    slow.take(6)
    with pytest.raises(SlurmBudgetError):
        slow.take(2)
    for _ in range(20):
        slow.take(must=True)
    assert slow.left() == -6, "what must be done is done, and what follows waits for it, but not for ever"
    time.s += 12 * 120 + 120
    assert slow.left() == pytest.approx(6)


# --- the ledger shared with the readers ---------------------------------------------------------------------------


class Shared:
    """The ledger of a cluster, whose clock moves only when somebody waits."""

    def __init__(self, folder, per_minute=6.0, rate=3.0):
        self.s = 1_796_000_000.0
        self.folder, self.per_minute = folder, per_minute
        self.agent = AgentShare(self.ledger(), rate, monotonic=lambda: self.s)

    def ledger(self):
        return Requests("a", self.folder, self.per_minute, 30, lambda: self.s, self.sleep)

    def sleep(self, seconds):
        self.s += seconds

    def read(self, question, cost=2, share_s=10.0, stale_s=120.0):
        """When a reader was answered, in seconds from now, and by which answer."""
        began = self.s
        return self.ledger().ask(question, Price(cost, share_s, stale_s), lambda: b"new").at.timestamp() - began


def test_what_the_agent_spends_the_readers_have_not(tmp_path):
    world = Shared(tmp_path)
    world.agent.take(2)
    assert world.ledger().used() == 2
    assert world.read("queue", 4) == 0
    assert world.agent.left() == 0
    with pytest.raises(SlurmBudgetError, match="slurm_rpcs_per_minute"):
        world.agent.take(1)
    with pytest.raises(SourceError, match="requests a minute are used up"):
        world.read("nodes")
    # Its own rate holds too, whatever the readers leave.
    world.s += 61
    world.agent.take(6)
    world.s += 61
    assert world.agent.left() == pytest.approx(3.05)
    with pytest.raises(SlurmBudgetError, match=r"slurm_agent\.rpcs_per_minute"):
        world.agent.take(4)
    assert world.ledger().used() == 0, "what is refused does not count"


def test_letting_go_is_never_refused_and_readers_pay_for_it(tmp_path):
    world = Shared(tmp_path)
    for question in ("a", "b", "c"):
        world.read(question)
    for _ in range(3):
        world.agent.take(must=True)
    assert world.ledger().used() == 9
    world.s += 31
    assert world.read("a") == -31, "the older answer serves"
    world.s += 31
    assert world.read("a") == 0
    # An operator who removes leases by hand waits for nothing either.
    world.read("b", 4)
    world.agent.lift()
    assert world.agent.left() == float("inf")
    world.agent.take(5)
    assert world.ledger().used() == 11


def test_what_the_agent_books_is_kept_free_of_readers(tmp_path):
    world = Shared(tmp_path)
    assert world.read("a") == 0
    world.agent.book(6)
    with pytest.raises(SlurmBudgetError):
        world.agent.take(6)
    world.s += 11
    assert world.read("a") == -11, "what is booked is not for readers, who have an older answer"
    world.s += 25
    world.agent.book(6)
    world.s += 25
    assert world.agent.left() == 6
    world.agent.take(6)
    assert world.ledger().used() == 6
    # A booking that was used is over, and one of an agent that is gone ends by itself.
    world.s += 61
    assert world.read("b") == 0
    world.s += 120
    world.agent.book(6)
    began = world.s
    assert 25 <= world.read("c") <= 31
    assert world.s - began <= 31
    # With a lease that stands, a reader has what the lease does not need.
    world = Shared(tmp_path / "other")
    world.agent.book(3)
    assert world.read("a") == 0
    world.agent.take(2)
    assert world.read("b", 1) == 0
    world.agent.take(must=True)
    assert world.ledger().used() == 6


def test_no_agent_starves_the_readers(tmp_path):
    """One that wants more all the time has half of the requests, and the budget holds in every minute."""
    world = Shared(tmp_path, per_minute=6, rate=3)
    spent, read = [], []
    for _ in range(120):
        world.s += 10
        if world.agent.left() >= 6:
            world.agent.take(6)
            spent.append((world.s, 6))
        else:
            world.agent.book(6)
        with contextlib.suppress(SourceError):
            if world.read("queue", 2, 1, 600) >= 0:
                read.append((world.s, 2))
    assert len(spent) >= 7
    assert sum(cost for _, cost in read) >= 36
    for at, _ in (*spent, *read):
        assert sum(cost for other, cost in (*spent, *read) if at - 60 < other <= at) <= 6


def test_an_agent_without_a_ledger_keeps_its_own_rate(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    world = Shared(tmp_path / "file" / "folder")
    assert world.agent.left() == 6
    world.agent.take(6)
    world.agent.book(3)
    with pytest.raises(SlurmBudgetError):
        world.agent.take(1)
    world.agent.take(must=True)
    assert caplog.text.count("cannot be used") == 1


def test_lines_are_on_disk_with_safe_rights(tmp_path):
    path = tmp_path / "a" / "alpha.jsonl"
    jsonl_audit(path)({"ts": NOW})
    assert path.stat().st_mode & 0o777 == 0o640 & ~os.umask(os.umask(0))

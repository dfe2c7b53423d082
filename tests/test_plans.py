"""Reservation plans: which hint makes one, for whom, on what, and that it stays while its reason stands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import combinations
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_hints.plan_worth import hit
from scheduler_hints.plans import PlanError, reservation_plans
from scheduler_hints.schema import Bottleneck, JobForecast, NodeRisk, Quantiles, ReservationPlan
from scheduler_hints.windows import backfill_windows
from tests.windows_frames import NOW, after, forecast, forecast_frame, job_frame, node_frame, pending, running

LEASE_S = 900


def hint(node: str | None, **more: Any) -> Bottleneck:
    """A thermal onset on a GPU of a node within 60 s."""
    values: dict[str, Any] = {
        "id": f"bn-{node}",
        "cluster": "alpha",
        "bottleneck_class": "thermal_throttle",
        "scope": "gpu",
        "node": node,
        "gpu_uuid": "GPU-1",
        "rack": None,
        "pod": None,
        "horizon_s": 60,
        "probability": 0.8,
        "probabilities": {"30": 0.2, "60": 0.8, "90": 0.9, "120": 0.9},
        "expected_onset": after(50),
        "is_active": False,
        "job_ids": [],
        "action": "reserve",
        "reasons": [],
        "model_version": "m",
    }
    return Bottleneck(**(values | more))


def risk(node: str, p_1h: float) -> NodeRisk:
    return NodeRisk(
        cluster="alpha", node=node, p_1h=p_1h, p_24h=0.9, p_7d=0.9, is_climatology=False, reasons=[], model_version="m"
    )


def plans(
    hints: Sequence[Bottleneck], nodes: pl.DataFrame, jobs: pl.DataFrame, now: datetime = NOW, **more: Any
) -> list[ReservationPlan]:
    forecasts = more.pop("known", forecast_frame())
    windows = backfill_windows(jobs, nodes, forecasts, now, confidence=0.9, guard_s=0)
    return reservation_plans(hints, windows, jobs, nodes, now, LEASE_S, forecasts=forecasts, **more)


SOON = pending("7", 1, eligible_time=after(90), reason="BeginTime", user="ada", account="lab")


def test_a_hint_and_a_job_about_to_start_make_a_plan():
    nodes = node_frame(["alloc", "idle", "idle", "idle"])
    (plan,) = plans([hint("n1")], nodes, job_frame(running("1", ["n1"], time_limit_s=90_000), SOON))
    assert (plan.cluster, plan.job_id, plan.user, plan.account) == ("alpha", "7", "ada", "lab")
    assert len(plan.nodes) == 1
    assert plan.nodes[0] in {"n2", "n3", "n4"}
    assert plan.start == after(30)
    assert plan.end == after(30 + LEASE_S)
    assert plan.because == ["thermal throttling on node n1 within 60 s with probability 0.80 (hint bn-n1)"]
    assert plan.cost_if_wrong_gpu_s == 8 * LEASE_S
    assert "job 7" in plan.benefit
    assert plan.nodes[0] in plan.benefit


@pytest.mark.parametrize(
    "hints",
    [
        [],
        [hint("n1", probability=0.4)],
        [hint("n1", bottleneck_class="memory_exhaustion")],
        [hint("elsewhere")],
        [hint(None, scope="rack", rack="r9")],
    ],
)
def test_no_plan_without_a_hint_that_counts(hints):
    nodes = node_frame(["alloc", "idle", "idle", "idle"])
    assert plans(hints, nodes, job_frame(SOON)) == []


@pytest.mark.parametrize(
    "job",
    [
        SOON | {"eligible_time": after(LEASE_S + 1)},
        SOON | {"reason": "Dependency", "eligible_time": None},
        SOON | {"user": None},
        SOON | {"gpus": 1},  # a small job would hold a whole node
        SOON | {"nodes": 4, "gpus": 32},  # more than there are healthy ones
        SOON | {"state": "RUNNING", "node_list": "n2"},
        pending("7", 3, reason="Resources", user="ada"),  # waits for nodes, nobody knows until when
    ],
)
def test_no_plan_for_a_job_that_cannot_use_it(job):
    nodes = node_frame(["idle", "idle", "alloc", "alloc"])
    assert plans([hint("n1")], nodes, job_frame(running("1", ["n3", "n4"], time_limit_s=90_000), job)) == []


def test_spares_are_healthy_and_of_one_pod_the_pod_of_the_trouble_first():
    nodes = node_frame(["idle"] * 4 + ["idle"] * 4)
    two = SOON | {"nodes": 2, "gpus": 16}
    (plan,) = plans([hint("n5"), hint("n6", is_active=True, probability=0.1)], nodes, job_frame(two))
    assert plan.nodes == ["n7", "n8"]
    (plan,) = plans([hint("n5"), hint(None, scope="rack", rack="r4", pod="p2")], nodes, job_frame(two))
    assert set(plan.nodes) <= {"n1", "n2", "n3", "n4"}
    (plan,) = plans([hint("n5")], nodes, job_frame(two), node_risks=[risk("n7", 0.9)])
    assert "n7" not in plan.nodes
    assert len(plan.nodes) == 2


def test_a_hold_delays_no_other_job():
    nodes = node_frame(["alloc", "idle", "idle", "drain"])
    # Job 9 claims both idle nodes in 10 minutes, before the hold would end.
    big = pending("9", 2, eligible_time=after(600), reason="BeginTime", gpus=2)
    assert plans([hint("n1")], nodes, job_frame(big, pending("7", 1, user="ada"))) == []
    # Nodes that wait for this very job may be held for it.
    (plan,) = plans([hint("n1")], nodes, job_frame(SOON | {"nodes": 2, "gpus": 16}))
    assert plan.nodes == ["n2", "n3"]


def test_start_is_known_from_plan_or_wait_forecast_too():
    nodes = node_frame(["alloc", "idle", "idle", "idle"])
    planned = pending("7", 1, reason="Priority", user="ada", planned_start_time=after(300))
    (plan,) = plans([hint("n1")], nodes, job_frame(planned))
    assert plan.start == after(240)
    waits = forecast_frame(forecast("7", "wait", (1, 2, 3, 400, 500, 600, 700, 800), age_s=100))
    (plan,) = plans([hint("n1")], nodes, job_frame(pending("7", 1, user="ada")), known=waits)
    assert plan.start == after(240)
    (plan,) = plans([hint("n1")], nodes, job_frame(pending("7", 1, user="ada")))
    assert plan.start == NOW


def test_published_forecasts_serve_as_well_as_rows():
    quantiles = Quantiles(1, 2, 3, 400, 500, 600, 700, 800)
    runtime = Quantiles(*(36 * value for value in (1, 2, 3, 400, 500, 600, 700, 800)))
    published = JobForecast(
        cluster="alpha", job_id="7", state="PENDING", user="ada", queue=None, nodes=1, gpus=8,
        submit_time=after(-600), start_time=None, time_limit_s=None, node_list=[], runtime=runtime, remaining=None,
        wait=quantiles, p_fail=None, p_start_60s=None, p_start_600s=None, p_start_3600s=None, reason=None,
        model_version="m", generated_at=after(-100),
    )  # fmt: skip
    nodes = node_frame(["alloc", "idle", "idle", "idle"])
    jobs = job_frame(pending("7", 1, user="ada"))
    slow = hint(None, scope="rack", rack="r1", bottleneck_class="straggler", is_active=True)  # worth a hold
    (plan,) = plans([slow], nodes, jobs, known=[published])
    assert plan.start == after(240)
    windows = backfill_windows(jobs, nodes, [published], NOW, 0.9, 60.0, cluster="alpha")
    assert windows[0].fits_jobs == ["7"]


def test_a_plan_stays_while_its_reason_stands_although_its_nodes_are_reserved_by_now():
    free = node_frame(["alloc", "idle", "idle", "idle"])
    waiting = pending("7", 3, user="ada")
    (first,) = plans([hint("n1")], free, job_frame(waiting))
    held = node_frame(["alloc", "resv", "resv", "resv"])
    later = after(60)
    (second,) = plans([hint("n1", probability=0.9)], held, job_frame(waiting), later, previous=[first])
    assert (second.id, second.nodes, second.start, second.end) == (first.id, first.nodes, first.start, first.end)
    assert "0.90" in second.because[0]
    # Without its reason, its job, or its time it is gone.
    assert plans([], held, job_frame(waiting), later, previous=[first]) == []
    gone = job_frame(running("7", first.nodes))
    assert plans([hint("n1")], held, gone, later, previous=[first]) == []
    assert plans([hint("n1")], held, job_frame(waiting), first.end, previous=[first]) == []
    # Nodes that others reserved are no spares.
    assert plans([hint("n1")], held, job_frame(waiting), later) == []


def test_a_plan_moves_when_its_node_falls_ill():
    nodes = node_frame(["alloc", "idle", "idle", "idle"])
    (first,) = plans([hint("n1")], nodes, job_frame(SOON))
    ill = first.nodes[0]
    states = ["alloc", *("drain" if f"n{i}" == ill else "idle" for i in (2, 3, 4))]
    (second,) = plans([hint("n1")], node_frame(states), job_frame(SOON), previous=[first])
    assert second.id == first.id
    assert ill not in second.nodes
    (third,) = plans([hint("n1"), hint(ill)], nodes, job_frame(SOON), previous=[first])
    assert ill not in third.nodes


def test_few_plans_by_order_of_the_queue_and_no_node_twice():
    nodes = node_frame(["alloc"] + ["idle"] * 7)
    rows = [SOON | {"job_id": str(i), "eligible_time": after(90 + i)} for i in range(6)]
    found = plans([hint("n1")], nodes, job_frame(*rows), max_plans=3)
    assert [plan.job_id for plan in found] == ["0", "1", "2"]
    taken = [node for plan in found for node in plan.nodes]
    assert len(set(taken)) == 3


def test_a_running_job_gets_spares_for_nodes_about_to_fail():
    nodes = node_frame(["alloc", "alloc", "idle", "idle"])
    jobs = job_frame(running("1", ["n1", "n2"], user="ada"))
    (plan,) = plans([], nodes, jobs, node_risks=[risk("n2", 0.7)])
    assert plan.job_id == "1"
    assert plan.nodes == ["n3"]
    assert "requeued" in plan.benefit
    assert plans([], nodes, jobs, node_risks=[risk("n2", 0.3)]) == []


def test_a_class_that_is_published_from_less_on_makes_plans_from_there_on():
    nodes = node_frame(["alloc", "idle", "idle", "idle"])
    jobs = job_frame(running("1", ["n1"], time_limit_s=90_000), SOON)
    unlikely = [hint("n1", probability=0.4)]
    assert plans(unlikely, nodes, jobs) == []
    assert plans(unlikely, nodes, jobs, by_class={"power_throttle": 0.3}) == []
    assert len(plans(unlikely, nodes, jobs, by_class={"thermal_throttle": 0.3})) == 1
    assert plans([hint("n1", probability=0.8)], nodes, jobs, by_class={"thermal_throttle": 0.9}) == []


def test_chance_of_a_hit_is_that_of_drawing_nodes():
    for pool, ill, need in [(4, 1, 1), (6, 2, 3), (5, 0, 2), (3, 2, 2), (2, 2, 1)]:
        draws = list(combinations(range(pool), need))
        assert hit(pool, ill, need) == pytest.approx(sum(min(draw) < ill for draw in draws) / len(draws))


def test_a_plan_says_what_it_saves_and_costs_and_is_none_where_it_costs_more():
    nodes = node_frame(["idle"] * 4)
    slow = hint(None, scope="rack", rack="r1", bottleneck_class="straggler", probability=0.8)
    (plan,) = plans([slow], nodes, job_frame(SOON | {"time_limit_s": 1800}))
    # One node of four, two of them slow: 0.8 × ½; half an hour of 8 GPUs, slowed by 0.3.
    assert plan.probability == pytest.approx(0.4)
    assert plan.saved_gpu_hours == pytest.approx(8 * 0.3 * 0.5)
    assert plan.benefit_gpu_hours == pytest.approx(0.4 * 1.2)
    assert plan.cost_gpu_hours == pytest.approx(0.6 * 8 * (0.9 * 60 + 0.1 * LEASE_S) / 3600)
    assert plan.action == "reserve"
    assert plans([slow], nodes, job_frame(SOON | {"time_limit_s": 300})) == [], "too short to be worth it"
    (plan,) = plans([slow], nodes, job_frame(SOON))
    assert plan.benefit_gpu_hours is None, "nobody knows how long it runs"


def test_spares_are_taken_by_their_rank_and_said_with_it():
    nodes = node_frame(["alloc", "alloc", "idle", "idle"])
    jobs = job_frame(running("1", ["n1", "n2"], user="ada"))
    good = [
        msgspec.structs.replace(risk("n3", 0.1), spare_rank=9),
        msgspec.structs.replace(risk("n4", 0.0), spare_rank=1),
    ]
    (plan,) = plans([], nodes, jobs, node_risks=[risk("n2", 0.7), *good])
    assert plan.nodes == ["n4"]
    assert [(spare.node, spare.spare_rank) for spare in plan.spares] == [("n4", 1)]
    assert plan.action == "migrate"
    # The whole gang waits when a node fails: as long as a lease, where no wait is foreseen.
    assert plan.benefit_gpu_hours == pytest.approx(0.7 * 16 * LEASE_S / 3600)
    waits = forecast_frame(forecast("5", "wait", (1, 2, 3, 60, 70, 80, 90, 95)))
    assert plans([], nodes, jobs, node_risks=[risk("n2", 0.5)], known=waits) == [], "it waits a minute here"


def test_a_queue_about_to_run_short_makes_plans_for_its_own_jobs():
    nodes = node_frame(["idle"] * 4)
    short = hint(None, bottleneck_class="shortage", scope="queue", unit="train", gpu_uuid=None, horizon_s=300)
    two = SOON | {"job_id": "9", "nodes": 2, "gpus": 16, "queue": "train"}
    (plan,) = plans([short], nodes, job_frame(SOON | {"queue": "other"}, two))
    assert plan.job_id == "9"
    assert plan.because == ["queue train runs short of GPUs within 300 s with probability 0.80 (hint bn-None)"]
    assert "trouble" not in plan.benefit


def test_wrong_arguments_are_named():
    nodes, jobs = node_frame(["idle"]), job_frame()
    with pytest.raises(PlanError, match="nodes lacks columns pod"):
        reservation_plans([], [], jobs, nodes.drop("pod"), NOW, LEASE_S)
    with pytest.raises(PlanError, match="lease_s = 0"):
        reservation_plans([], [], jobs, nodes, NOW, 0)


@settings(max_examples=60, deadline=None)
@given(
    states=st.lists(st.sampled_from(["idle", "idle", "alloc", "drain", "resv"]), min_size=1, max_size=10),
    ill=st.lists(st.integers(1, 10), max_size=4),
    needs=st.lists(st.tuples(st.integers(1, 4), st.floats(-100, 2000)), max_size=5),
)
def test_what_holds_for_every_plan(states, ill, needs):
    nodes = node_frame(states)
    jobs = job_frame(
        *(
            pending(str(i), size, eligible_time=after(begin), reason="BeginTime", user="ada")
            for i, (size, begin) in enumerate(needs)
        )
    )
    hints = [hint(f"n{i}") for i in ill]
    found = plans(hints, nodes, jobs, max_plans=2)
    assert len(found) <= (2 if hints else 0)
    taken = [node for plan in found for node in plan.nodes]
    assert len(taken) == len(set(taken))
    good = {f"n{i + 1}" for i, state in enumerate(states) if state == "idle"} - {h.node for h in hints}
    assert set(taken) <= good
    for plan in found:
        assert NOW <= plan.start < plan.end
        assert len(plan.nodes) == needs[int(plan.job_id)][0]
        assert len(set(nodes.filter(pl.col("node").is_in(plan.nodes))["pod"])) == 1
        assert plan.because
    again = plans(hints, nodes, jobs, max_plans=2, previous=found)
    assert msgspec.json.encode(again) == msgspec.json.encode(found), "nothing moves while nothing changes"

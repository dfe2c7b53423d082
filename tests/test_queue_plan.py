"""What the queue would do by its rules, on clusters small enough to plan by hand; the newest outcomes in the leaves."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_queue import wait_features
from models.forest import Forest, ForestSize
from models.wait_leaves import KEPT, Drawn, Leaves

NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)
TIME = pl.Datetime("us", "UTC")


def _job(number, submit, start=None, end=None, *, nodes=4, limit=3_600):
    at = [None if seconds is None else NOON + timedelta(seconds=seconds) for seconds in (submit, start, end)]
    return {
        "job_id": str(number), "user": "u", "nodes": nodes, "time_limit_s": limit, "submit_time": at[0],
        "start_time": at[1], "end_time": at[2], "state": "COMPLETED" if end else "RUNNING" if start else "PENDING",
    }  # fmt: skip


def _asked(jobs, number, at_s):
    frame = pl.DataFrame(jobs).cast(dict.fromkeys(("submit_time", "start_time", "end_time"), TIME))
    asked = frame.filter(pl.col("job_id") == str(number))
    return wait_features(asked, frame, NOON + timedelta(seconds=at_s)).row(0, named=True)


# Sixteen nodes were seen in use; since then 12 run, the head of the queue wants 8 and is promised them at 7,200 s.
PAST = [_job(0, -9_000, -9_000, -8_000, nodes=16)]
BUSY = [*PAST, _job(1, 0, 0, nodes=4, limit=7_200), _job(2, 0, 0, nodes=8, limit=9_000)]
HEAD = _job(3, 50, nodes=8, limit=3_600)


@pytest.mark.parametrize(
    ("nodes", "limit", "starts"),
    [(4, 3_600, 1), (4, 9_000, 0), (8, 600, 0)],
    ids=["done before the promise", "would break the promise", "no room"],
)
def test_who_passes_the_head_of_the_queue(nodes, limit, starts):
    row = _asked([*BUSY, HEAD, _job(4, 100, nodes=nodes, limit=limit)], 4, 100)
    assert row["plan_now"] == starts
    assert row["plan_slack"] == 4 - nodes
    assert np.expm1(row["plan_head_wait"]) == pytest.approx(7_100, rel=1e-4)
    assert np.expm1(row["plan_head_width"]) == pytest.approx(8, rel=1e-4)
    assert np.expm1(row["plan_next_limit"]) == pytest.approx(7_100, rel=1e-4)


def test_the_plan_goes_on_from_end_to_end():
    jobs = [*BUSY, HEAD, _job(4, 100, nodes=16, limit=600)]
    assert np.expm1(_asked(jobs, 3, 100)["plan_wait"]) <= 7_100  # nobody is longer than its limit, most are shorter
    assert _asked(jobs, 4, 100)["plan_wait"] > _asked(jobs, 3, 100)["plan_wait"] > 0
    assert _asked([*PAST, _job(4, 100)], 4, 100)["plan_wait"] == 0
    assert np.isnan(_asked([*BUSY, _job(4, 100, nodes=32)], 4, 100)["plan_wait"])  # wider than anything that ever ran


def test_runs_of_no_time_and_cancelled_jobs_take_no_room():
    gone = [_job(8, 10, 20, 20, nodes=16), {**_job(9, 10, None, 30, nodes=16), "state": "CANCELLED"}]
    row = _asked([*PAST, *gone, _job(4, 100, nodes=16)], 4, 100)
    assert (row["plan_now"], row["plan_slack"], row["plan_wait"]) == (1, 0, 0)


def test_a_job_that_starts_at_once_is_asked_about_as_one_that_waits():
    waits = _asked([*BUSY, HEAD, _job(4, 100, nodes=4)], 4, 100)
    starts = _asked([*BUSY, HEAD, _job(4, 100, 100, 900, nodes=4)], 4, 100)
    assert {n: v for n, v in waits.items() if n.startswith("plan")} == {
        n: v for n, v in starts.items() if n.startswith("plan")
    }


def test_questions_of_one_moment_are_answered_as_each_alone():
    pick = np.random.default_rng(5)
    jobs = [*PAST]
    for number in range(1, 60):
        submit, wait, run = (int(part) for part in (pick.integers(0, 4_000), pick.integers(1, 900), 2_000))
        start = submit + wait if pick.random() < 0.6 else None
        end = start + run if start and pick.random() < 0.5 else None
        jobs.append(
            _job(number, submit, start, end, nodes=int(pick.integers(1, 9)), limit=int(pick.integers(1, 9_000)))
        )
    frame = pl.DataFrame(jobs).cast(dict.fromkeys(("submit_time", "start_time", "end_time"), TIME))
    asked = frame.filter(pl.col("submit_time") <= NOON + timedelta(seconds=3_000))
    together = wait_features(asked, frame, NOON + timedelta(seconds=3_000))
    alone = pl.concat([wait_features(asked[k], frame, NOON + timedelta(seconds=3_000)) for k in range(asked.height)])
    assert asked.height > 30
    assert together.equals(alone)
    assert together["plan_wait"].n_unique() >= 3
    assert together["shadow_limit"].n_unique() >= 3


def test_leaves_hold_the_newest_outcomes_and_old_ones_count_less():
    days = np.arange(40)
    start = (days * 86_400_000_000).astype(np.int64)
    X = np.zeros((40, 1), dtype=np.float32)
    forest = Forest.fit(X, np.ones(40), ForestSize(3, 5), seed=1, threads=1)
    drawn = Leaves.fit(forest, X, days.astype(np.float64), start, 40 * 86_400_000_000).draw(forest, X[:1])
    assert sorted(set(drawn.waits[0].tolist())) == list(range(40 - KEPT, 40))
    assert drawn.weights[0, 0] == pytest.approx(0.5 ** (1 / 30), rel=1e-3)
    assert drawn.curves()[0, 0] == 40 - KEPT


def test_starts_at_one_time_of_day_are_seen_in_the_clock():
    # Submitted through the day, all started at 18:00: each waited for another time; at 10:00 it is eight hours more.
    waits = np.arange(2, 10) * 3_600.0 + 600
    drawn = Drawn(
        *(np.tile(part, (1, 1)).astype(np.float32) for part in (np.log(waits), np.ones(8), np.full(8, 64_800)))
    )
    assert drawn.likeliest_s(np.array([36_000.0]))[0] == pytest.approx(28_800, abs=1)
    soon = Drawn(*(np.array([part], dtype=np.float32) for part in ([0, 0, np.log(90), np.nan, 9], [1] * 5, [0] * 5)))
    assert soon.likeliest_s()[0] == 60

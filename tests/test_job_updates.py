"""A history that takes in newer jobs says what one made anew of all jobs says, to the last bit."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import GROUPS, JobHistory, JobTable
from features.job_index import EventIndex, Numbers
from features.job_outcomes import failure_matrix
from features.job_queue import wait_matrix
from features.jobs import feature_matrix, microseconds

START = datetime(2026, 3, 1, tzinfo=UTC)
STATES = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY")


def _jobs(count=900, seed=0):
    """Jobs of a few users in whole ticks, so that many times are equal; with names, cancellations and no limits."""
    pick = np.random.default_rng(seed)
    submit = np.sort(pick.integers(0, 400, count)) * 600
    start = submit + pick.integers(0, 5, count) * 600
    end = start + pick.integers(0, 40, count) * 600
    frame = pl.DataFrame({
        "job_id": np.arange(count).astype(str), "user": pick.choice(list("abcdefgh"), count),
        "queue": pick.choice(["long", "short"], count), "account": pick.choice(["a", "x", "y"], count),
        "array_job_id": pl.Series(["1", "2", None])[pick.integers(0, 3, count)],
        "name": pl.Series(["train-1", "train-2", "eval", None])[pick.integers(0, 4, count)],
        "nodes": pick.choice([1, 2, 4], count), "cpus": 8, "gpus": pick.choice([0, 8], count),
        "memory_mib": 1024, "time_limit_s": pl.Series([3600, 86_400, None])[pick.integers(0, 3, count)],
        "submit_s": submit,
        "start_s": start, "end_s": end, "state": pick.choice(STATES, count),
    })  # fmt: skip
    cancelled = pl.col("state") == "CANCELLED"
    times = {
        f"{name}_time": START + pl.duration(seconds=pl.col(f"{name}_s")) for name in ("submit", "start", "end")
    }  # fmt: skip
    return (
        frame.with_columns(**times)
        .with_columns(pl.when(~cancelled).then("start_time").alias("start_time"))
        .cast(dict.fromkeys(times, pl.Datetime("us", "UTC")))
        .drop("submit_s", "start_s", "end_s")
    )


def _known(jobs, at):
    """The jobs as they were known at a moment."""
    started, ended = pl.col("start_time") <= at, pl.col("end_time") <= at
    return jobs.filter(pl.col("submit_time") <= at).with_columns(
        start_time=pl.when(started).then("start_time"), end_time=pl.when(ended).then("end_time"),
        state=pl.when(ended).then("state").when(started).then(pl.lit("RUNNING")).otherwise(pl.lit("PENDING")),
    )  # fmt: skip


def _in_place(before, after):
    """All of `before` in their order as `after` tells them, then what is new."""
    key = ["job_id", "submit_time"]
    kept = before.select(key).join(after, on=key, how="left", maintain_order="left")
    new = after.join(before, on=key, how="anti", maintain_order="left")
    return pl.concat([kept.select(after.columns), new])


def _said(history, asked, at):
    table, moments = JobTable(asked), np.full(asked.height, microseconds(at))
    known = feature_matrix(table, history, moments)
    return [known, failure_matrix(table, history, moments, known), wait_matrix(table, history, moments)]


def _same(one, two, asked, at):
    for mine, other in zip(_said(one, asked, at), _said(two, asked, at), strict=True):
        assert mine.tobytes() == other.tobytes()
    assert not np.isnan(_said(one, asked, at)[0]).all(axis=0).all()


def test_taking_in_what_changed_is_the_same_as_beginning_anew():
    jobs = _jobs()
    at = START + timedelta(hours=20)
    frame = _known(jobs, at)
    history = JobHistory(frame)
    rows = frame.height
    _said(history, frame.filter(pl.col("end_time").is_null()), at)  # every index is made
    for hours in (20.1, 21, 22, 22.1, 40, 66, 90):
        at = START + timedelta(hours=hours)
        now = _known(jobs, at)
        changed = now.join(frame, on=frame.columns, how="anti", nulls_equal=True, maintain_order="left")
        history.update(changed)
        frame = _in_place(frame, now)
        anew = JobHistory(frame)
        asked = frame.filter(pl.col("end_time").is_null())
        if asked.is_empty():
            asked = frame[-5:]
        _same(history, anew, asked, at)
        for name in ("submit", "start", "end", "width", "limit_s", "runtime_s", "wait_s", "has_run", "is_bad"):
            np.testing.assert_array_equal(getattr(history.table, name), getattr(anew.table, name))
        np.testing.assert_array_equal(history.log_runtime, anew.log_runtime)
        np.testing.assert_array_equal(history.likeness.gaps, anew.likeness.gaps)
        assert history.table.frame.equals(anew.table.frame)
    assert history.table.count == jobs.height > rows


@pytest.mark.parametrize("seed", [1, 2])
def test_corrections_of_the_past_are_taken_in_as_well(seed):
    """Limits, users and ends that turn out otherwise, ends that are taken back, and jobs heard of late."""
    jobs = _jobs(300, seed)
    at = START + timedelta(days=4)
    late = jobs.gather_every(7)
    frame = jobs.join(late, on="job_id", how="anti", maintain_order="left")
    history = JobHistory(frame)
    _said(history, frame[-20:], at)
    pick = np.random.default_rng(seed)
    for _ in range(4):
        some = frame[np.sort(pick.choice(frame.height, 25, replace=False))]
        is_third = pl.int_range(pl.len()) % 3 == 0
        some = some.with_columns(
            time_limit_s=pl.lit(int(pick.choice([3600, 7200]))), user=pl.lit(str(pick.choice(list("axyz")))),
            end_time=pl.when(is_third).then(None).otherwise(pl.col("end_time") + timedelta(hours=1)),
        )  # fmt: skip
        more, late = late[:8], late[8:]
        changed = pl.concat([some, more], how="vertical_relaxed")
        history.update(changed)
        key = ["job_id", "submit_time"]
        frame = _in_place(frame, pl.concat([frame.join(changed, on=key, how="anti", maintain_order="left"), changed]))
        _same(history, JobHistory(frame), frame[-40:], at)


def test_an_empty_history_takes_in_its_first_jobs():
    jobs = _jobs(50)
    history = JobHistory(jobs.clear())
    history.update(jobs.clear())
    history.update(jobs)
    _same(history, JobHistory(jobs), jobs[-5:], START + timedelta(days=4))


def test_an_index_finds_what_sorting_finds():
    pick = np.random.default_rng(3)
    hashes = pick.integers(0, 2**63, 5_000).astype(np.uint64)[pick.integers(0, 5_000, 20_000)]
    times = np.sort(pick.integers(0, 300, 20_000))
    numbers = Numbers()
    number = numbers.add(hashes)
    assert len(np.unique(hashes)) == numbers.count
    np.testing.assert_array_equal(numbers.find(hashes), number)
    assert numbers.find(np.array([5], dtype=np.uint64)).tolist() == [-1]
    index = EventIndex(numbers, number, times, np.arange(20_000))
    moments = pick.integers(0, 300, 200)
    for or_at in (False, True):
        first, last = index.before(hashes[:200], moments, or_at=or_at)
        for i in range(200):
            is_before = (times <= moments[i]) if or_at else (times < moments[i])
            assert index.rows[first[i] : last[i]].tolist() == np.flatnonzero(is_before & (hashes == hashes[i])).tolist()
    assert set(GROUPS) >= {"user", "key", "spec"}

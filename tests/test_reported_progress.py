"""Time left from reported progress: what reports tell at a moment, what ended jobs teach, and the mixture."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

from benchmarks.progress import simulated
from features.job_progress import progress_at
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES, conform
from models.curves import LEVELS
from models.progress_evidence import PRIOR_REACHED, Evidence, estimate
from models.reported_progress import combined, known_progress, plan_quantiles, with_progress

T0 = datetime(2026, 3, 14, 3, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def reports(rows: list[dict[str, Any]], job_id: str = "7") -> pl.DataFrame:
    """Rows of `core_job_progress`; `at` in seconds from T0."""
    told = [{"cluster": "a", "job_id": job_id, "ts": at(row["at"])} | row for row in rows]
    columns = ("cluster", "job_id", "ts", "rank", "step", "max_steps", "step_time_s", "phase", "observed_at")
    types = {"rank": pl.Int32, "phase": pl.String, "observed_at": pl.Datetime("us", "UTC")}
    frame = pl.DataFrame([{name: row.get(name) for name in columns} for row in told], infer_schema_length=None)
    return conform(frame.with_columns(pl.col(name).cast(kind) for name, kind in types.items()), "core_job_progress")


def steady(until_s: float, step_s: float = 2.0, every_s: float = 60.0, **more: Any) -> list[dict[str, Any]]:
    """A job that warms up for 100 s and then makes steps, of 1,000."""
    return [
        {"at": t, "step": int(max(t - 100, 0) / step_s), "max_steps": 1000, "step_time_s": step_s, "phase": "train"}
        | more
        for t in np.arange(every_s, until_s + 1, every_s)
    ]


def facts(rows: list[dict[str, Any]], moment_s: float, **more: Any) -> pl.DataFrame:
    asked = pl.DataFrame({"job_id": ["7"], "start_time": [T0], "moment": [at(moment_s)]} | more)
    return progress_at(asked, reports(rows))


def left_s(rows: list[dict[str, Any]], moment_s: float) -> float:
    return float(estimate(facts(rows, moment_s), Evidence(overhead_ratio=0.0, tail_s=0.0))[0])


def test_a_steady_job_ends_when_its_steps_are_done() -> None:
    found = facts(steady(1000), 1000).row(0, named=True)
    assert (found["step"], found["max_steps"], found["step_time_s"], found["phase"]) == (430, 1000, 2.0, "train")
    assert found["pace_s"] == pytest.approx(2.0, abs=0.01)
    assert found["reported_at"] == at(960)
    assert left_s(steady(1000), 1000) == pytest.approx(1100, rel=0.03)  # 100 + 2,000 less 1,000
    assert left_s(steady(2400), 2100) == pytest.approx(0, abs=40)


def test_pauses_that_were_seen_are_expected_again() -> None:
    # Of every 300 s the last 60 make no steps: 1,000 steps of 2 s take 2,500.
    def done(t: float) -> int:
        cycle, rest = divmod(max(t - 100, 0), 300)
        return int((cycle * 240 + min(rest, 240)) / 2)

    rows = [{"at": float(t), "step": done(t), "max_steps": 1000, "step_time_s": 2.0} for t in range(30, 1931, 30)]
    assert left_s(rows, 1930) == pytest.approx(2500 + 100 - 1930, rel=0.12)
    assert 0.1 < facts(rows, 1930)["overhead_ratio"][0] < 0.35


def test_a_slow_down_counts_from_now_on() -> None:
    rows = steady(1500)
    last = rows[-1]["step"]
    rows += [
        {"at": 1500.0 + 60 * k, "step": last + 15 * k, "max_steps": 1000, "step_time_s": 4.0} for k in range(1, 21)
    ]
    assert facts(rows, 2700)["slowdown_ratio"][0] == pytest.approx(2.0)
    assert left_s(rows, 2700) == pytest.approx(4.0 * (1000 - rows[-1]["step"]), rel=0.1)


def test_a_counter_that_falls_begins_again() -> None:
    rows = steady(960) + [row | {"at": row["at"] + 960, "step": row["step"] + 200} for row in steady(600)]
    found = facts(rows, 1560).row(0, named=True)
    assert found["restarts"] == 1
    assert found["step"] == 200 + 250
    assert found["pace_s"] == pytest.approx(2.0, rel=0.01)
    assert left_s(rows, 1560) == pytest.approx(1100, rel=0.03)


@pytest.mark.parametrize(
    ("rows", "moment_s"),
    [
        (steady(960, max_steps=None), 960.0),  # no number of steps in all
        (steady(960, max_steps=300), 960.0),  # past it
        ([{"at": 60.0, "phase": "startup", "max_steps": 1000}], 60.0),  # no step yet
        (steady(960), 960.0 + 1200),  # silent
        ([*steady(960), *({"at": t, "phase": "train"} for t in np.arange(1020.0, 4000, 60))], 4000.0),  # it hangs
        (steady(960), 30.0),  # nothing by then
    ],
)
def test_no_estimate_where_nothing_tells_an_end(rows: list[dict[str, Any]], moment_s: float) -> None:
    assert np.isnan(left_s(rows, moment_s))


def test_a_long_evaluation_is_no_silence() -> None:
    rows = [*steady(960), *({"at": t, "phase": "evaluation"} for t in np.arange(1020.0, 2300, 60))]
    assert left_s(rows, 2280) == pytest.approx(1140 - 60, rel=0.05)  # the time that stands still is not counted off


def test_what_was_reported_or_known_later_changes_nothing() -> None:
    rows = steady(960)
    later = [*rows, {"at": 1020.0, "step": 999, "max_steps": 5000, "phase": "checkpoint"}]
    late = [*rows, {"at": 950.0, "step": 999, "max_steps": 5000, "observed_at": at(2000)}]
    early = [{"at": -60.0, "step": 5, "max_steps": 7}, *rows]  # an earlier run of the same id
    expected = facts(rows, 1000)
    for other in (later, late, early):
        assert facts(other, 1000).equals(expected)
    known = facts(late, 1000, known_at=[at(3000)])
    assert known["max_steps"][0] == 1000, "the newest report speaks"
    assert known["gap_s"][0] <= 60


def test_of_many_processes_one_speaks() -> None:
    rows = steady(960)
    more = [row | {"rank": rank, "step": row["step"] + 7} for row in rows for rank in (1, 2)]
    assert facts([*rows, *more], 1000).equals(facts(rows, 1000))
    ranked = [row | {"rank": rank, "step": row["step"] - 7 * rank} for row in rows for rank in (0, 1)]
    assert facts(ranked, 1000)["step"][0] == 430


def ended(count: int, is_reached: Any) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Jobs of 1,000 steps of 2 s in a row; those that do not reach them end after 1,000 s."""
    jobs, told = [], []
    for k in range(count):
        begin, run_s = 5000.0 * k, 2130 if is_reached(k) else 1000
        jobs.append({
            "job_id": str(k), "user": "ada" if k % 2 else "bob", "name": f"run{k}", "state": "COMPLETED",
            "start_time": at(begin), "end_time": at(begin + run_s), "time_limit_s": 7200,
        })  # fmt: skip
        rows = [row | {"at": begin + row["at"]} for row in steady(min(run_s, 2100))]
        told.append(reports(rows, str(k)))
    return pl.DataFrame(jobs), pl.concat(told)


def test_ended_jobs_teach_how_often_plans_are_reached() -> None:
    jobs, told = ended(40, lambda k: k % 2 == 1)
    end = at(5000 * 40)
    seen = Evidence.of(jobs, told, end)
    assert (seen.ended, seen.reached, seen.groups["ada"], seen.groups["bob\trun#"]) == (40, 20, (20, 20), (0, 20))
    asked = pl.DataFrame({"user": ["ada", "bob", "new", None], "name": ["run1", "run2", "x", None]})
    p = seen.p_reached(asked, np.full(4, 0.1))
    assert p[0] > 0.9
    assert p[1] < 0.1
    assert 0.4 < p[2] == p[3] < 0.7
    assert (seen.p_reached(asked, np.full(4, 0.9)) > p).all(), "who came far, is more likely to arrive"
    assert 15 < seen.tail_s < 45
    half = Evidence.of(jobs, told, at(5000 * 20))
    assert half == Evidence.of(jobs.head(20), told.filter(pl.col("ts") < at(5000 * 20)), at(5000 * 20))
    assert half.ended == 20
    again = msgspec.json.decode(msgspec.json.encode(seen), type=Evidence)
    assert again == seen


def test_without_evidence_the_assumptions_speak() -> None:
    none = Evidence.of(*(frame.clear() for frame in ended(1, bool)), T0)
    assert none == Evidence()
    assert none.p_reached(pl.DataFrame({"user": ["ada"], "name": ["x"]}), np.zeros(1))[0] == pytest.approx(
        PRIOR_REACHED
    )
    found = facts(steady(1000), 1000)
    plan = plan_quantiles(found, estimate(found, none), none)
    assert (np.diff(plan) > 0).all()
    assert plan[0, LEVELS.searchsorted(0.5)] == pytest.approx(estimate(found, none)[0], rel=0.01)


def test_a_job_that_its_limit_ended_says_nothing_of_its_plan() -> None:
    jobs, told = ended(10, lambda k: k < 5)
    limited = jobs.with_columns(time_limit_s=pl.when(pl.col("job_id").cast(int) >= 5).then(1000).otherwise(7200))
    seen = Evidence.of(limited, told, at(1e6))
    assert (seen.ended, seen.reached) == (5, 5)


def test_the_mixture_never_crosses_nor_passes_the_limit_and_follows_what_is_sure() -> None:
    rng = np.random.default_rng(5)
    n = 200
    history = np.sort(rng.lognormal(8, 1.5, (n, len(QUANTILES))), axis=1)
    plan = np.sort(rng.lognormal(7, 1, (n, len(LEVELS))), axis=1)
    left = np.where(rng.random(n) < 0.5, np.inf, rng.lognormal(7, 1, n))
    for p in (0.0, 0.3, 1.0):
        found = combined(history, plan, np.full(n, p), left)
        assert (np.diff(found, axis=1) >= 0).all()
        assert (found <= left[:, None]).all()
        assert (found >= 0).all()
    sure = combined(history, plan, np.ones(n), np.full(n, np.inf))
    middle = QUANTILES.index(0.5)
    assert np.allclose(sure[:, middle], plan[:, LEVELS.searchsorted(0.5)], rtol=0.15)
    far = combined(history, plan * 1e6, np.zeros(n), np.full(n, np.inf))
    assert np.allclose(far[:, middle], history[:, middle], rtol=0.15)


def test_rows_of_a_reporting_job_say_so() -> None:
    quantiles = {name: [500.0 * (k + 1)] * 3 for k, name in enumerate(QUANTILE_COLUMNS)}
    rows = pl.DataFrame(
        {"job_id": ["7", "7", "8"], "forecast": ["runtime", "remaining", "remaining"], "model_version": "runtime-1",
         "reasons": ["", "usual here; x", ""]} | quantiles
    )  # fmt: skip
    jobs = pl.DataFrame({
        "job_id": ["7", "8"], "user": ["ada", None], "name": ["x", None], "start_time": [T0, T0],
        "time_limit_s": [1900, None],
    })  # fmt: skip
    told = reports(steady(1000))
    known = known_progress(jobs, told, at(1000))
    assert known["job_id"].to_list() == ["7"]
    found = with_progress(rows, jobs, known, Evidence(), at(1000))
    assert found.columns == rows.columns
    assert found[[0, 2]].equals(rows[[0, 2]])
    one = found.row(1, named=True)
    assert one["model_version"] == "runtime-1+progress"
    assert one["reasons"] == "reported progress: step 430 of 1,000 at 2 s; usual here; x"
    assert 500 < one["q50_s"] <= one["q95_s"] <= 900
    for nothing in (known_progress(jobs, told.clear(), at(1000)), known_progress(jobs, told, at(-5))):
        assert nothing.is_empty()
        assert with_progress(rows, jobs, nothing, Evidence(), at(1000)) is rows


def test_simulated_jobs_are_forecast_close_to_their_steps() -> None:
    jobs, told = simulated(32, 6, 5)
    cut = jobs["submit_time"][int(jobs.height * 0.6)]
    seen = Evidence.of(jobs, told, cut)
    assert seen.reached > 30
    test = jobs.filter(
        (pl.col("submit_time") >= cut) & (pl.col("end_time") > pl.col("start_time") + timedelta(hours=1))
    )
    asked = test.select("job_id", "start_time", moment=pl.col("start_time") + timedelta(hours=1))
    expected = estimate(progress_at(asked, told), seen)
    actual = (test["end_time"] - asked["moment"]).dt.total_seconds().to_numpy()
    off = np.abs(np.log(np.maximum(expected, 60) / np.maximum(actual, 60)))[
        (test["state"] == "COMPLETED").to_numpy() & ~np.isnan(expected)
    ]
    assert len(off) > 10
    assert np.median(off) < 0.12


def test_a_reporting_job_past_its_limit_is_killed_as_earlier_ones_were_whatever_its_plan() -> None:
    quantiles = {name: [float(k + 1)] for k, name in enumerate(QUANTILE_COLUMNS)}
    rows = pl.DataFrame({"job_id": "7", "forecast": "remaining", "model_version": "v", "reasons": ""} | quantiles)
    jobs = pl.DataFrame({"job_id": ["7"], "user": ["ada"], "name": ["x"], "start_time": [T0], "time_limit_s": [900]})
    known = known_progress(jobs, reports(steady(1000)), at(1000))
    found = with_progress(rows, jobs, known, Evidence(), at(1000)).row(0, named=True)
    assert found["model_version"] == "v+progress"
    assert found["q95_s"] <= quantiles["q95_s"][0]
    within = with_progress(rows, jobs.with_columns(time_limit_s=9_000), known, Evidence(), at(1000))
    assert within["q95_s"][0] > 100  # its steps take that long

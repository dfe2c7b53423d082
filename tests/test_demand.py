"""Demand: hourly counting as known at a moment, experts that see no future, quantiles, the choice, the walk."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.demand import hourly_demand
from features.vocabulary import QUANTILES
from models.demand import DemandError, choose, forecast, pinball
from models.demand_backtest import ratio, scores, walk
from models.demand_experts import BASELINES, EXPERTS, Levels, actuals, experts

T0 = datetime(2026, 3, 2, tzinfo=UTC)


def at(hours: float) -> datetime:
    return T0 + timedelta(hours=hours)


def jobs_frame(*rows: tuple[float, float | None, float | None, int | None]) -> pl.DataFrame:
    """Jobs of (submit, start, end in hours since T0, GPUs), each with a limit of two hours."""
    return pl.DataFrame(
        {
            "submit_time": [at(row[0]) for row in rows],
            "start_time": [None if row[1] is None else at(row[1]) for row in rows],
            "end_time": [None if row[2] is None else at(row[2]) for row in rows],
            "gpus": [row[3] for row in rows],
            "cpus": [1 for _ in rows],
            "time_limit_s": [7200 for _ in rows],
            "queue": ["a" if i % 2 == 0 else "b" for i in range(len(rows))],
            "state": ["COMPLETED" if row[2] is not None else "PENDING" for row in rows],
        },
        schema_overrides={
            **dict.fromkeys(("submit_time", "start_time", "end_time"), pl.Datetime("us", "UTC")),
            "gpus": pl.Int32,
        },
    )


def random_jobs(seed: int = 3, count: int = 600, hours: float = 500) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    submit = np.sort(rng.uniform(0, hours, count))
    start = submit + rng.exponential(2, count)
    return jobs_frame(
        *zip(submit, start, start + rng.exponential(8, count), rng.integers(1, 9, count).tolist(), strict=True)
    )


def weekly(weeks: int, seed: int = 1) -> np.ndarray:
    """A demand with a daily and a weekly shape and some noise."""
    rng = np.random.default_rng(seed)
    hour = np.arange(weeks * 168)
    shape = 60 + 30 * np.sin(2 * np.pi * hour / 24) + 20 * (hour % 168 < 120)
    return np.maximum(shape + rng.normal(0, 4, len(hour)), 0)


def test_jobs_are_counted_where_they_stand() -> None:
    counted = hourly_demand(jobs_frame((0.5, 1.5, 3.5, 4), (0.7, 2.0, 3.0, 2), (2.2, None, None, 8)), at(4))
    assert (counted.begin, counted.end, counted.unit) == (T0, at(4), "gpus")
    assert counted.arrivals.tolist() == [2, 0, 1, 0]
    assert counted.in_demand.tolist() == [6, 6, 12, 8]  # what ends at the full hour is over then
    assert counted.in_use.tolist() == [0, 6, 4, 0]
    assert counted.asked_hours is not None
    assert counted.asked_hours.tolist() == [12, 0, 16, 0]
    only = hourly_demand(jobs_frame((0.5, 1.5, 3.5, 4), (0.7, 2.0, 3.0, 2)), at(4), queue="b")
    assert only.in_demand.tolist() == [2, 2, 0, 0]


def test_what_makes_no_sense_is_counted_and_left_out() -> None:
    jobs = jobs_frame((0.5, 1.5, 0.2, 4), (0.7, None, None, 2), (1.0, 1.0, 2.0, None))
    jobs = jobs.with_columns(pl.Series("state", ["FAILED", "FAILED", "COMPLETED"]))
    counted = hourly_demand(jobs, at(3))
    assert (counted.undated, counted.unsized) == (2, 1)
    assert counted.arrivals.sum() == 1
    assert counted.in_demand.sum() == 0


def test_without_limits_hours_asked_for_are_unknown_and_without_gpus_cpus_count() -> None:
    jobs = jobs_frame((0.5, 1.5, 3.5, None)).with_columns(pl.lit(None, dtype=pl.Int64).alias("time_limit_s"))
    counted = hourly_demand(jobs, at(3))
    assert counted.asked_hours is None
    assert counted.unit == "cpus"
    with pytest.raises(ValueError, match="quantities: arrivals"):
        counted.values("queue")  # ty: ignore[invalid-argument-type]
    with pytest.raises(ValueError, match="no time zone"):
        hourly_demand(jobs, datetime(2026, 3, 2))  # noqa: DTZ001 (the point)


def test_an_earlier_moment_sees_the_head_of_a_later_one() -> None:
    jobs = random_jobs()
    whole = hourly_demand(jobs, at(600), unit="gpus")
    for hours in (37.4, 200.0, 411.9):
        then = hourly_demand(jobs, at(hours), unit="gpus")
        # Outcomes after the moment are scrambled: nothing changes.
        moved = jobs.with_columns(
            pl.when(pl.col("end_time") > at(hours)).then(None).otherwise("end_time").alias("end_time"),
            pl.when(pl.col("start_time") > at(hours)).then(None).otherwise("start_time").alias("start_time"),
            pl.when(pl.col("end_time") > at(hours)).then(pl.lit("RUNNING")).otherwise("state").alias("state"),
        ).filter(pl.col("submit_time") <= at(hours))
        again = hourly_demand(moved, at(hours), unit="gpus")
        for name in ("arrivals", "asked_hours", "in_use", "in_demand"):
            head = getattr(whole, name)[: then.hours]
            assert np.array_equal(getattr(then, name), head), name
            assert np.array_equal(getattr(again, name), head), name


def test_experts_see_no_future() -> None:
    values = weekly(5)
    later = values.copy()
    later[500:] = 1e6
    for horizon_h in (1, 24, 168, 336):
        clean, scrambled = experts(Levels(values), horizon_h), experts(Levels(later), horizon_h)
        assert np.array_equal(clean[:501], scrambled[:501], equal_nan=True)
        head = experts(Levels(values[:500]), horizon_h)
        assert np.allclose(head, clean[:501], equal_nan=True, atol=1e-9)


def test_experts_by_hand() -> None:
    values = np.arange(400.0)
    said = dict(zip(EXPERTS, experts(Levels(values), 24)[-1], strict=True))
    target = 400 - 1 + 24
    assert said["last_value"] == 399
    assert said["same_hour_last_week"] == target - 168
    assert said["same_slot_median"] == target - 252  # median of one and two weeks before; the third is not there
    assert said["same_hour_last_day"] == target - 24
    assert actuals(values, 24)[376] == 399
    assert np.isnan(actuals(values, 24)[377])
    with pytest.raises(ValueError, match="one hour at least"):
        experts(Levels(values), 0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_quantiles_never_cross_and_are_never_negative(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for values in (rng.poisson(0.3, 900), rng.pareto(1.1, 900) * 10, weekly(5, seed), np.zeros(400)):
        for found in forecast(np.asarray(values, dtype=float)):
            assert len(found.quantiles) == len(QUANTILES)
            assert np.all(np.diff(found.quantiles) >= 0)
            assert np.all(found.quantiles >= 0)


def test_a_choice_is_never_worse_than_the_best_baseline_where_it_was_made() -> None:
    rng = np.random.default_rng(5)
    for values in (weekly(8), np.cumsum(rng.normal(0, 1, 1300)) + 100, rng.poisson(4, 1300).astype(float)):
        for horizon_h in (1, 12, 168):
            said, came = experts(Levels(values), horizon_h)[24:], actuals(values, horizon_h)[24:]
            rows = np.isfinite(came)
            choice = choose(said[rows], came[rows])
            loss = np.abs(choice.point(said[rows]) - came[rows]).mean()
            base = min(np.abs(said[rows][:, EXPERTS.index(name)] - came[rows]).mean() for name in BASELINES)
            assert loss <= base * (1 + 1e-9)


def test_a_weekly_shape_is_foreseen_and_the_interval_holds() -> None:
    judged = walk(weekly(20), 24)
    assert judged is not None
    found = {score.who: score for score in scores([judged], draws=200)}
    model = next(score for who, score in found.items() if who not in BASELINES)
    assert model.mae.value < 0.9 * found["same_hour_last_week"].mae.value
    assert model.mae.value < 0.5 * found["last_value"].mae.value
    assert 0.72 <= model.coverage_80 <= 0.88
    assert model.mae.low is not None  # six weeks of days are blocks enough
    _, interval = ratio([judged], draws=200)
    assert interval.value <= 1.01


def test_the_walk_uses_nothing_it_could_not_know() -> None:
    values = weekly(10)
    later = values.copy()
    later[1500:] = rng_noise = np.random.default_rng(9).uniform(0, 500, len(values) - 1500)
    assert rng_noise.size
    clean, scrambled = walk(values, 24), walk(later, 24)
    assert clean is not None
    assert scrambled is not None
    begin = int(len(values) * 0.7)
    same = 1500 - begin  # origins that know only hours before 1500
    for name, said in clean.point.items():
        assert np.array_equal(said[:same], scrambled.point[name][:same]), name
        assert np.array_equal(clean.quantiles[name][:same], scrambled.quantiles[name][:same]), name


def test_little_history_says_its_spread_and_less_says_nothing() -> None:
    with pytest.raises(DemandError, match="23 h of history"):
        forecast(np.ones(23))
    short = {found.horizon_h: found for found in forecast(np.arange(60.0))}
    assert short[1].chosen != "spread"
    assert short[336].chosen == "spread"
    assert short[336].quantiles.tolist() == np.quantile(np.arange(60.0), QUANTILES).tolist()


def test_pinball_by_hand() -> None:
    flat = np.full((1, len(QUANTILES)), 10.0)
    levels = np.array(QUANTILES)
    assert pinball(flat, np.array([12.0]))[0] == pytest.approx(2 * levels.mean())

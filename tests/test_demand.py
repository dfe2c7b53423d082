"""Demand: hourly counting as known at a moment, experts that see no future, quantiles, the choice, the walk."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import polars as pl
import pytest

from features.demand import QUANTITIES, hourly_demand
from features.vocabulary import DEMAND_QUANTILE_COLUMNS, QUANTILES, conform, schema
from models.demand import HORIZONS_H, VERSION, DemandError, bands, forecast, hedge, ladder, pinball
from models.demand_backtest import ratio, scores, walk
from models.demand_experts import BASELINES, EXPERTS, Levels, actuals, experts
from models.demand_flow import FLOW_HORIZONS_H, Flow
from models.demand_live import forecast_demand
from models.demand_outcomes import WINDOW_COLUMNS, demand_words, judge_demand
from models.demand_windows import Ahead, look_ahead, reclaimable_windows, shows_trough
from pipelines.demand import demand_lines, kept_windows
from pipelines.settings import parse_settings
from pipelines.steps import publish_demand_of
from scheduler_hints.api import create_app
from scheduler_hints.schema import DEMAND_HORIZONS_H, DemandForecast, DemandQuantity
from scheduler_hints.snapshot import read_snapshot, snapshot_path
from tests.hints_support import ask, demand, publish
from tests.pipelines_world import START, job
from tests.pipelines_world import jobs_frame as core_jobs
from tests.store_child import open_store

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


def test_weights_find_the_best_expert_and_start_with_all() -> None:
    rng = np.random.default_rng(5)
    for values in (weekly(12), np.cumsum(rng.normal(0, 1, 2016)) + 100, rng.poisson(4, 2016).astype(float)):
        for rung in ladder(values, (1, 12, 168)):
            late = np.arange(1000, len(values) + 1 - rung.horizon_h)
            loss = np.abs(rung.hedged.point[late] - rung.came[late]).mean()
            base = np.abs(rung.said[late][:, : len(BASELINES)] - rung.came[late][:, None]).mean(axis=0).min()
            assert loss <= 1.08 * base
    weights = rung.hedged.weights
    assert np.allclose(weights.sum(axis=1), 1.0)
    assert weights[100].max() < 0.5  # nothing of a week ahead is released yet; shorter horizons hardly told


def test_one_block_of_evidence_moves_little_and_a_shorter_horizon_is_leaned_on() -> None:
    values = np.full(400, 50.0)
    values[:200:2] = 0.0  # the first days mislead
    said, came = experts(Levels(values), 168), actuals(values, 168)
    alone = hedge(said, came, 168)
    short = hedge(experts(Levels(values), 72), actuals(values, 72), 72)
    leaning = hedge(said, came, 168, short)
    assert np.all(alone.evidence[:169] == 0)
    assert np.allclose(leaning.evidence - alone.evidence, 0.4 * short.evidence)


def test_a_weekly_shape_is_foreseen_and_the_interval_holds() -> None:
    judged = walk(weekly(20), [24])[24]
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
    flow = {24: np.concatenate([[np.nan], values]) + 1}
    flow_later = {24: np.concatenate([[np.nan], later]) + 1}  # a flow at an origin knows what the series does there
    clean, scrambled = (walk(v, [6, 24], flows=f)[24] for v, f in ((values, flow), (later, flow_later)))
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


def test_quantiles_rest_on_errors_that_are_released() -> None:
    values = weekly(10)
    point, came = np.concatenate([[np.nan], values]), actuals(values, 24)
    later = came.copy()
    later[1200 - 24 + 1 :] = 9_999.0  # not known at origin 1200
    clean, scrambled = (bands(point, known, 24, np.arange(1177, 1201)) for known in (came, later))
    assert np.array_equal(clean, scrambled)
    wide, short = (bands(point[:n], came[:n], 24, np.array([n - 1]))[0] for n in (1500, 75))
    levels = np.array(QUANTILES)
    assert np.allclose(wide[levels == 0.5], point[1499])
    assert short[-1] - short[0] > 0


# --- what the jobs that stand tell ------------------------------------------------------------------------------------


def test_jobs_that_end_together_are_foreseen() -> None:
    rows = []
    for day in range(40):  # 8 GPUs for 5 h from 06:30 each day, and 2 that never end
        rows.append((24.0 * day + 6.5, 24.0 * day + 6.5, 24.0 * day + 11.4, 8))
    jobs = jobs_frame((0.0, 0.1, None, 2), *rows).with_columns(
        pl.lit("ada").alias("user"), pl.lit(36_000, dtype=pl.Int64).alias("time_limit_s")
    )
    counted = hourly_demand(jobs, at(960))
    flow = Flow(jobs, at(960), counted.begin, counted.hours, counted.unit, ["a"])
    said = flow.forecast(counted.in_demand)
    assert set(said) == set(FLOW_HORIZONS_H)
    origins = 24 * 35 + np.arange(24)
    assert np.isnan(said[1][: 24 * 7]).all()
    assert np.mean(said[1][origins] == counted.in_demand[origins]) >= 22 / 24
    last = np.abs(counted.in_demand[origins - 1] - counted.in_demand[origins]).mean()
    assert np.abs(said[1][origins] - counted.in_demand[origins]).mean() < last
    part = hourly_demand(jobs.filter(pl.col("queue") == "a"), at(960), queue="a", since=T0)
    assert np.nanmax(flow.forecast(part.in_demand, "a")[3]) <= 10


def test_what_jobs_tell_is_the_same_whatever_came_later() -> None:
    jobs = random_jobs(count=900, hours=700)
    whole = hourly_demand(jobs, at(700), unit="gpus")
    said = Flow(jobs, at(700), whole.begin, whole.hours, "gpus").forecast(whole.in_demand)
    for hours in (300, 555):
        then = hourly_demand(jobs, at(hours), unit="gpus")
        moved = jobs.with_columns(
            pl.when(pl.col("end_time") > at(hours)).then(at(690)).otherwise("end_time").alias("end_time"),
            pl.when(pl.col("start_time") > at(hours)).then(at(680)).otherwise("start_time").alias("start_time"),
        )
        for known in (jobs, moved):
            again = Flow(known, at(hours), then.begin, then.hours, "gpus").forecast(then.in_demand)
            for horizon_h, values in again.items():
                assert np.array_equal(values, said[horizon_h][: then.hours + 1], equal_nan=True)


# --- troughs ----------------------------------------------------------------------------------------------------------


def test_troughs_become_windows() -> None:
    q90 = np.array([30.0, 10, 12, 40, 39, 9, 9.5])
    excess = np.full((40, 7), -1.0)
    excess[:8, 0] = 0.5  # the hour that bounds the promise
    excess[8:12, 1] = 15  # this hour has 20 to spare
    excess[:4, 6] = 9
    ahead = Ahead(q90, excess)
    found = reclaimable_windows(ahead, T0, 40, min_units=8)
    assert [(w.start, w.end, w.units) for w in found] == [(T0, at(3), 10), (at(5), at(7), 30)]
    assert [w.confidence for w in found] == [0.8, 0.9]
    cut = reclaimable_windows(ahead, T0, 40, min_units=8, min_confidence=0.95)
    assert [(w.start, w.end) for w in cut] == [(at(2), at(3)), (at(5), at(6))]
    assert reclaimable_windows(ahead, T0, 9, min_units=1) == []


def test_nights_of_a_service_are_found_and_held_back_when_history_is_short() -> None:
    rng = np.random.default_rng(2)
    hour = np.arange(9 * 168)
    serving = np.where(hour % 24 < 8, 16.0, 64.0) + rng.integers(0, 3, len(hour))
    ahead = look_ahead(serving, 48)
    found = reclaimable_windows(ahead, T0 + timedelta(hours=len(hour)), serving[-672:].max(), min_units=40)
    assert [(w.start.hour, w.end.hour) for w in found] == [(0, 8), (0, 8)]  # 8 marks: ends of hours 0 to 7
    assert all(40 <= w.units <= 50 and w.confidence >= 0.5 for w in found)
    with pytest.raises(DemandError, match="to look 48 h ahead"):
        look_ahead(serving[:60], 48)


def test_a_trough_shows_only_where_the_day_explains_it() -> None:
    rng = np.random.default_rng(2)
    hour = np.arange(4 * 168)
    serving = np.where(hour % 24 < 8, 16.0, 64.0) + rng.integers(0, 3, len(hour))
    assert shows_trough(serving)
    assert not shows_trough(serving, min_units=60)
    assert not shows_trough(serving[:100])
    assert not shows_trough(rng.uniform(16, 64, len(hour)))
    assert not shows_trough(160 + serving)  # a fifth of it comes and goes
    assert not shows_trough(np.zeros(500))


def test_kept_windows_are_scored_by_what_came() -> None:
    nights = [job(n, 3600 * n, 3600 * n, 3600 * (n + 1), gpus=16 if n % 24 < 8 else 64) for n in range(24 * 7)]
    jobs = core_jobs(nights)
    until = START + timedelta(days=7)
    rows = [
        {"queue": "batch", "unit": "gpus", "start": START + timedelta(hours=24 * day + 1),
         "end": START + timedelta(hours=24 * day + last), "units": 40, "confidence": 0.9, "capacity": 64.0}
        for day in range(6) for last in range(2, 12)
    ]  # fmt: skip
    empty = pl.DataFrame(schema=schema("out_demand"))
    windows = pl.DataFrame(rows).select(WINDOW_COLUMNS)
    found = judge_demand(empty, jobs, START, until, windows=windows)
    kept, promised = (found.find(f"windows_{name}") for name in ("kept_share", "confidence"))
    assert kept is not None
    assert promised is not None
    assert promised.value == pytest.approx(0.9)
    assert kept.value == pytest.approx(0.6)  # those that end by 07:00: at 08:00 the day's work stands
    assert demand_words(found) == ["reclaimable windows: 60% stayed free, promised 90%"]
    short = judge_demand(empty, jobs, START, START + timedelta(days=2), windows=windows)
    assert short.find("windows_kept_share") is None


def test_single_queues_are_scored_in_a_pool() -> None:
    jobs = core_jobs([job(n, 3600 * n, 3600 * n, 3600 * (n + 1), gpus=4) for n in range(24 * 7)])
    until = START + timedelta(days=7)
    rows = [
        {
            "generated_at": START + timedelta(hours=h - 24), "cluster": "alpha", "queue": queue,
            "quantity": "in_demand", "unit": "gpus", "horizon_h": 24, "target_time": START + timedelta(hours=h),
            **dict.fromkeys(DEMAND_QUANTILE_COLUMNS, middle), "last_value": 6.0, "last_week_value": 9.0,
            "model_version": "demand-experts-2/pool",
        }
        for h in range(1, 60) for queue, middle in ((None, 4.0), ("batch", 5.0), ("none", 1.0))
    ]  # fmt: skip
    found = judge_demand(conform(pl.DataFrame(rows, infer_schema_length=None), "out_demand"), jobs, START, until)
    whole, pool = (found.find(f"{prefix}in_demand_mae_24h") for prefix in ("", "queues_"))
    assert whole is not None
    assert pool is not None
    assert whole.value == 0.0
    assert pool.value == pytest.approx(1.0)  # one of four where four came, and one where none did
    assert len(demand_words(found)) == 2
    assert "single queues: missed by 1.0 units" in demand_words(found)[1]


# --- a cluster --------------------------------------------------------------------------------------------------------


def test_a_cluster_is_forecast_by_queue() -> None:
    jobs = random_jobs()
    found = forecast_demand(jobs, at(480), inference_queues=["a", "nowhere"], horizons_h=(1, 24))
    assert found.rows["queue"].unique().sort(nulls_last=True).to_list() == ["a", "b", "nowhere", None]
    assert set(found.rows["quantity"]) == {"arrivals", "asked_hours", "in_demand"}
    assert found.rows.filter(pl.col("quantity") == "arrivals")["unit"].unique().to_list() == ["jobs"]
    assert found.rows["target_time"].unique().sort().to_list() == [at(481), at(504)]
    assert set(found.windows) == {"a", "nowhere"}
    early = forecast_demand(jobs.filter(pl.col("submit_time") < at(10)), at(10))
    assert early.rows.is_empty()
    assert "of history" in early.short["all queues"]
    assert forecast_demand(jobs.clear(), at(10)).rows.is_empty()


def test_published_once_an_hour_kept_and_printed(tmp_path: Path) -> None:
    settings = parse_settings(
        {"state_dir": str(tmp_path / "state"), "clusters": {"alpha": {"inference_queues": ["batch"]}}}, {}
    )
    rng = np.random.default_rng(4)
    rows = []
    for i in range(24 * 30):
        night = i % 24 < 8
        size = 16 if night else 64
        rows.append(job(i, 3600 * i - 60, 3600 * i - 30, 3600 * (i + 1) - 60, gpus=size + int(rng.integers(0, 2))))
    now = START + timedelta(hours=24 * 30, minutes=2)
    with open_store(settings.state / "store") as store:
        store.transact(lambda w: w.upsert("core_jobs", core_jobs(rows)), purpose="test")
        assert demand_lines(store, "alpha", now) == [
            "alpha: no forecast of demand yet; make one with `weatherglass publish`"
        ]
        report = publish_demand_of(store, settings, "alpha", now)
        assert (report.error, report.rows, report.model_versions) == (None, 2 * 3 * 9, {"demand": VERSION})
        assert report.windows > 0
        assert publish_demand_of(store, settings, "alpha", now + timedelta(minutes=5)).rows is None
        assert publish_demand_of(store, settings, "alpha", now + timedelta(hours=1)).rows == 2 * 3 * 9
        kept = store.query("SELECT count(DISTINCT generated_at) AS n, count(*) AS rows FROM out_demand")
        assert kept.row(0) == (2, 2 * 2 * 3 * 9)
        lines = demand_lines(store, "alpha", now + timedelta(hours=1))
        windows = kept_windows(store, "alpha", now, now + timedelta(days=1))
        assert set(windows["unit"]) == {"gpus"}
        assert windows["capacity"].min() > windows["units"].max()  # ty: ignore[unsupported-operator]
    assert lines[0].startswith("alpha: made 2026-06-03 09:02 UTC; forecast")
    assert "all queues, GPUs running or waiting" in lines
    assert any("free, confidence" in line for line in lines)
    snapshot = read_snapshot(snapshot_path(settings.published, "alpha", "demand"))
    items = [msgspec.json.decode(item, type=DemandForecast) for item in snapshot.items]
    near = next(i for i in items if (i.queue, i.quantity, i.horizon_h) == ("batch", "in_demand", 24))
    assert near.reclaimable
    assert all(w.units >= 8 and w.start < near.target_time for w in near.reclaimable)


def test_without_a_scheduler_nothing_is_published(tmp_path: Path) -> None:
    settings = parse_settings({"state_dir": str(tmp_path / "state"), "clusters": {"alpha": {"jobs": "none"}}}, {})
    with open_store(settings.state / "store") as store:
        report = publish_demand_of(store, settings, "alpha", START)
    assert (report.rows, report.error) == (0, None)
    assert not snapshot_path(settings.published, "alpha", "demand").exists()


def test_the_api_selects_demand(tmp_path: Path) -> None:
    publish(
        tmp_path, demand=[demand(None), demand("train"), demand("train", horizon_h=1), demand("b", quantity="arrivals")]
    )
    app = create_app(tmp_path, ["alpha"])
    app.store.refresh()

    def asked(query: str) -> list[tuple[str | None, int]]:
        return [(item["queue"], item["horizon_h"]) for item in ask(app, "/v1/demand", query).json()["items"]]

    assert asked("") == [(None, 24), ("train", 24), ("train", 1), ("b", 24)]
    assert asked("queue=*") == [(None, 24)]
    assert asked("queue=train&horizon_h=1") == [("train", 1)]
    assert asked("quantity=arrivals") == [("b", 24)]
    refused = ask(app, "/v1/demand", "horizon_h=2")
    assert (refused.status, refused.json()["error"]["detail"]["valid"][:2]) == (400, ["1", "3"])
    assert DEMAND_HORIZONS_H == HORIZONS_H
    assert get_args(DemandQuantity) == QUANTITIES

"""Figures of backtests counted again by hand: time left by landmark, its baselines, parts of the jobs, siblings."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from dashboards.backtest_page import backtest_page
from features.job_history import JobHistory
from features.jobs import feature_matrix
from features.vocabulary import QUANTILE_COLUMNS
from models import landmarks
from models.backtest import backtest
from models.backtest_parts import parts_of, recency_of, sibling_medians_s
from models.backtest_report import BacktestReport, figure
from models.backtest_text import low_parts, report_text
from models.backtest_words import BASELINES, MEASURES, PARTS, measure_of, part_words
from models.forest import ForestSize
from models.promotion import Interval, mean_interval
from models.recency import stratum
from models.remaining_task import RemainingTask
from models.tasks import FailureTask, RuntimeTask, make_task

SMALL = ForestSize(trees=12)
START = datetime(2026, 3, 2, tzinfo=UTC)


@pytest.fixture(scope="module")
def kth(traces):
    return pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").sort("submit_time", "job_id")[8_000:11_000]


@pytest.fixture(scope="module")
def remaining(kth):
    return backtest(RemainingTask(SMALL), kth, refit_days=30)


@pytest.mark.traces
def test_time_left_is_judged_by_landmark_as_its_predictions_say(kth, remaining):
    report = remaining
    ran = kth.select("job_id", "submit_time", run_s=(pl.col("end_time") - pl.col("start_time")).dt.total_seconds())
    said = report.predictions.join(ran, on=["job_id", "submit_time"], how="left")
    assert said.select("job_id", "submit_time", "elapsed_s").is_duplicated().sum() == 0
    assert (said["run_s"] > said["elapsed_s"]).all()
    assert {60.0, 600.0, 3_600.0, 7_200.0, 14_400.0} <= set(report.best_after) <= set(landmarks.DOUBLINGS_S)
    for at_s, best in report.best_after.items():
        mine = said.filter(elapsed_s=at_s)
        left, low, high = (mine[name].to_numpy() for name in ("run_s", "q10_s", "q90_s"))
        left = left - at_s
        found = {name: report.find(name, "", at_s) for name in ("male", "coverage_80", "within_2x", "mae_s", "pinball")}
        assert {score.count for score in found.values()} == {len(left)}
        error = np.abs(np.log(np.maximum(mine["point_s"].to_numpy(), 1.0) / left))
        assert found["male"].interval.value == pytest.approx(error.mean())
        inside = (left >= low - 0.5) & (left <= high + 0.5)
        assert found["coverage_80"].interval.value == pytest.approx(inside.mean())
        males = {n: report.find("male", n, at_s).interval.value for n in BASELINES if report.find("male", n, at_s)}
        assert min(males, key=lambda name: males[name]) == best
        assert {"limit", "submit_forecast", "tsafrir", "lindy", "conditional_user", "conditional_key"} <= set(males)
        ratio = report.find("male_ratio", best, at_s).interval.value
        assert ratio == pytest.approx(found["male"].interval.value / males[best])
        levels = [row["forecast"] for row in report.calibration if row["elapsed_s"] == at_s]
        assert levels == [0.05, 0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95]
    assert report.value("male_60s") < report.value("male_60s", "limit")
    whole = report.find("male").interval.value
    assert whole == pytest.approx(
        np.average([report.value(f"male_{a:.0f}s") for a in report.best_after],
                   weights=[report.find("male", "", a).count for a in report.best_after]), rel=0.05
    )  # fmt: skip
    seen = report.find("male", "", 600.0, "key").count
    assert 50 < seen < report.find("male", "", 600.0).count
    assert report.find("coverage_80", "", 600.0, "ran_1h_12h").count > 50
    told = report.to_json()
    assert told["best_baseline_after_s"]["60"] == report.best_after[60.0]
    assert {"male", "male_60s", "coverage_80_3600s"} <= {score["metric"] for score in told["scores"]}


@pytest.mark.traces
def test_page_and_text_use_words_and_explain_them(kth, remaining):
    failure = backtest(FailureTask(20), kth, refit_days=30, draws=10)
    for report in (remaining, failure):
        scores = [*report.scores, *report.strata]
        for score in scores:
            assert measure_of((score.measure or score.metric).removesuffix("_ratio")).meaning, score
            assert not score.baseline or score.baseline in BASELINES
            assert not score.part or part_words(score.part) != score.part
        page, text = backtest_page(report, "kth"), report_text(report)
        for name in {s.measure.removesuffix("_ratio") for s in scores} & set(MEASURES):
            assert f"({name})</td>" in page
        for raw in ("coverage_80", "brier_", "last2_key", "rolling_rate", "male"):
            assert raw not in text
    assert "after 10 min" in page
    assert "Parts of the jobs still running after 1 h" in backtest_page(remaining, "kth")
    assert "timeout" not in " ".join(failure.metrics())  # none of this record ended so
    assert "no job of the test is recorded to have ended by timeout, node failure, out of memory" in failure.text()


def _jobs(rows):
    """Jobs of (user, name, submit s, start s, run s), with a limit of an hour each."""
    at = [[START + timedelta(seconds=s) for s in (submit, start, start + run)] for _, _, submit, start, run in rows]
    frame = pl.DataFrame({
        "job_id": [str(i) for i in range(len(rows))], "user": [row[0] for row in rows], "name": [r[1] for r in rows],
        "cpus": [2] * len(rows), "time_limit_s": [3_600] * len(rows), "state": ["COMPLETED"] * len(rows),
        "submit_time": [a[0] for a in at], "start_time": [a[1] for a in at], "end_time": [a[2] for a in at],
    })  # fmt: skip
    return JobHistory(
        frame.with_columns(pl.col("submit_time", "start_time", "end_time").cast(pl.Datetime("us", "UTC")))
    )


def test_baselines_of_time_left_by_hand():
    runs = (100, 700, 900, 1_500, 2_000)
    history = _jobs([("u", "a", i, i, run) for i, run in enumerate(runs)] + [("u", "a", 5_000, 5_000, 1_000)])
    at = landmarks.Landmark.of(history, np.array([5]), 600.0)
    assert landmarks.lindy_left(at).tolist() == [600.0]
    # Runs that lasted 600 s had 100, 300, 900 and 1,400 s left then.
    assert landmarks.conditional_left(at, history, "user")[0].tolist() == pytest.approx([160.0, 600.0, 1_250.0])
    assert landmarks.conditional_left(at, history, "key")[0, 1] == 600.0
    corrected = [landmarks.corrected_left(np.array([point]), at)[0] for point in (900.0, 595.0, 200.0, 10.0)]
    # 595 + 1 min; 200 + 1 + 5 min have passed, + 15 min have not; the same from 10 s.
    assert corrected == [300.0, 55.0, 860.0, 670.0]
    at = landmarks.Landmark.of(history, np.array([4]), 1_900.0)
    assert landmarks.lindy_left(at).tolist() == [1_700.0]  # the limit comes first
    assert landmarks.conditional_left(at, history, "user").tolist() == [[1_700.0] * 3]  # none has ended by then


@pytest.mark.traces
def test_siblings_by_hand_and_parts_as_features_say(kth):
    rows = [("u", "a", s, 90, run) for s, run in ((0, 10), (50, 20), (60, 40), (111, 80), (400, 5), (430, 6))]
    history = _jobs([*rows, ("v", "a", 10, 90, 9), ("u", "b", 20, 90, 9)])
    told = sibling_medians_s(history.table, np.arange(8))
    # 0 has 50 and 60; 50 has 0 and 60; 60 has 0, 50 and 111; 111 has 60 alone within a minute (50 is 61 s before).
    assert told[:3].tolist() == [30.0, 25.0, 20.0]
    assert np.isnan(told[3:]).all()
    history = JobHistory(kth)
    every = np.arange(kth.height)
    X = feature_matrix(history.table, history, history.table.submit)
    assert (recency_of(history, every, "run") == stratum(X)).all()
    parts = parts_of(history, every, outcome="run", by_length=True)
    assert {name for name in parts if not name.startswith("week_")} | {"siblings"} == set(PARTS)
    for prefix in ("size_", "limit_", "ran_", "week_"):
        members = np.stack([here for name, here in parts.items() if name.startswith(prefix)])
        assert (members.sum(axis=0) == 1).all(), prefix


@pytest.mark.traces
def test_runtime_tells_widths_floors_and_whose_quantiles_stand_beside(kth):
    report = backtest(RuntimeTask(SMALL), kth, refit_days=30)
    widths = report.predictions.select(pl.col("q90_s") / pl.col("q10_s").clip(1.0)).to_series()
    assert report.value("q90_over_q10") == pytest.approx(widths.median())
    assert report.value("pinball_10_50_90") < report.value("pinball_10_50_90", "quantiles_key")
    with pytest.raises(KeyError):
        report.value("pinball_10_50_90", "median_key")
    floor, model = (report.find("male", name, part="siblings") for name in ("siblings", ""))
    assert floor.count == model.count > 0
    assert floor.interval.value < model.interval.value
    assert "have two or more identical ones submitted within a minute" in report.text()
    assert len(report.predictions.select(QUANTILE_COLUMNS).columns) == 8


def test_weak_parts_are_told():
    def covered(part, value, count, elapsed_s=None):
        return figure("coverage_80", "", Interval(value, None, None, 9), count, elapsed_s, part)

    strata = [
        covered("key", 0.81, 900), covered("limit_over_12h", 0.684, 1_234), covered("new", 0.2, 299),
        covered("week_2026-03-02", 0.634, 300, 600.0),
    ]  # fmt: skip
    report = BacktestReport("runtime", START, START, 900, 1, "limit", [], [], strata=strata)
    line = low_parts(report)[0]
    assert line == (
        "WEAK: the 80 % interval holds under .70 in 2 parts of 300 or more: week of 2026-03-02, after 10 min 0.634 "
        "of 300; limit over 12 h 0.684 of 1,234"
    )
    report = BacktestReport("runtime", START, START, 900, 1, "limit", [], [], strata=strata[:1])
    assert low_parts(report) == ["the 80 % interval holds at least .70 in the one part of 300 jobs or more"]
    small = BacktestReport("runtime", START, START, 900, 1, "limit", [], [], strata=[covered("new", 0.2, 299)])
    assert low_parts(small) == [], "of small parts nothing is said"


def test_cards_from_before_time_left_was_its_own_task_still_make_one():
    task = make_task("runtime", {"size": {"trees": 12, "min_leaf": 5}, "is_remaining": False})
    assert isinstance(task, RuntimeTask)
    assert task.size.trees == 12


def test_kept_weights_give_the_intervals_that_drawing_anew_gives(monkeypatch):
    generator = np.random.default_rng(3)
    losses, blocks = generator.random(4_000), generator.integers(0, 400, 4_000)
    kept = [mean_interval(losses, blocks, seed=seed) for seed in (1, 2, 1)]
    assert kept[0] == kept[2] != kept[1]
    monkeypatch.setattr("models.promotion._KEPT_WEIGHTS", 0)
    anew = mean_interval(losses, blocks, seed=1)
    assert (anew.low, anew.high) == pytest.approx((kept[0].low, kept[0].high), rel=1e-12)

"""Backtests: baselines that equal the published ones, a model that beats them, and reports that say what they are."""

from datetime import UTC, datetime

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory
from features.jobs import job_features
from features.vocabulary import TABLES
from models.backtest import BacktestError, backtest
from models.forest import ForestSize
from models.recency import baseline_log
from models.scoring import log_error
from models.tasks import FailureTask, RuntimeTask, WaitTask, make_task

SMALL = ForestSize(trees=12)
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def _trace(traces, name):
    return pl.read_parquet(traces / "jobs" / f"{name}.parquet").sort("submit_time", "job_id")


@pytest.mark.traces
@pytest.mark.parametrize(
    "name, test_jobs, published",
    [
        ("kth-sp2-1996", 8_460, {"limit": 1.512, "last2_key": 1.153}),
        ("llnl-atlas-2006", 10_871, {"limit": 3.346, "last2_key": 1.214}),
    ],
)
def test_baselines_equal_the_published_figures(traces, name, test_jobs, published):
    jobs = _trace(traces, name).filter(pl.col("end_time") > pl.col("start_time"))
    history = JobHistory(jobs)
    X = job_features(history.table, history).to_numpy()
    rows = np.arange(jobs.height)[int(0.01 * jobs.height) :]
    rows = rows[int(0.7 * len(rows)) :]
    assert len(rows) == test_jobs
    for baseline, male in published.items():
        loss = log_error(np.exp(baseline_log(baseline, X[rows])), history.table.runtime_s[rows]).mean()
        assert loss == pytest.approx(male, abs=0.003), baseline


@pytest.fixture(scope="module")
def kth(traces):
    return _trace(traces, "kth-sp2-1996")[8_000:14_000]


@pytest.fixture(scope="module")
def runtime_report(kth):
    return backtest(RuntimeTask(SMALL), kth, refit_days=5)


@pytest.mark.traces
def test_runtime_report_holds_model_baselines_and_intervals(runtime_report):
    report = runtime_report
    assert report.refits >= 2
    assert report.value("male") < 0.95 * report.value("male", report.best_baseline)
    ratio = next(s for s in report.scores if s.metric == "male_ratio" and s.baseline == report.best_baseline)
    assert ratio.interval.low < ratio.interval.value < ratio.interval.high < 1
    for metric in ("male", "within_25pct", "within_2x", "mae_s"):
        for baseline in ("", "limit", "last2_user", "last2_key", "median_user", "median_key"):
            assert np.isfinite(report.value(metric, baseline))
    assert 0.7 < report.value("coverage_80") < 0.9
    for elapsed in (60, 600, 3600):
        assert report.value(f"remaining_male_{elapsed}s") < report.value(f"remaining_male_{elapsed}s", "limit")
    assert {"male_key", "male_user", "pinball"} <= report.metrics()
    assert [row["forecast"] for row in report.calibration] == [0.05, 0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95]
    assert all(abs(row["observed"] - row["forecast"]) < 0.12 for row in report.calibration)
    with pytest.raises(KeyError, match="no 'rmse' of the model; metrics: coverage_80, mae_s"):
        report.value("rmse")


@pytest.mark.traces
def test_report_becomes_rows_and_text(runtime_report):
    rows = runtime_report.rows("kth", NOW, "20260301T000000Z-abc")
    assert tuple(rows.columns) == TABLES["out_scores"].columns
    assert not rows.select(TABLES["out_scores"].key).is_duplicated().any()
    assert rows["count"].min() > 0
    text = runtime_report.text()
    assert "last2_key" in text
    assert "male_ratio to last2_key" in text


@pytest.mark.traces
def test_wait_and_failure_reports(kth, traces):
    wait = backtest(WaitTask(SMALL), kth, refit_days=60)
    assert wait.value("male") < wait.value("male", "zero")
    assert wait.value("brier_600s") < wait.value("brier_600s", "zero")
    failure = backtest(FailureTask(60), _trace(traces, "llnl-atlas-2006")[20_000:24_000], refit_days=30)
    assert failure.value("brier") < failure.value("brier", "rolling_rate")
    assert failure.value("auroc") > 0.7


@pytest.mark.traces
def test_unrecorded_waits_are_called_so(traces):
    report = backtest(WaitTask(SMALL), _trace(traces, "llnl-atlas-2006")[:600], refit_days=90)
    assert "did not record waits" in report.text()


def test_too_little_is_refused_with_numbers(traces):
    jobs = _trace(traces, "kth-sp2-1996")
    with pytest.raises(BacktestError, match=r"60 jobs with a known outcome give a test of 18; 50 needed"):
        backtest("runtime", jobs[:60])
    with pytest.raises(ValueError, match="no job forecast 'walltime'; there are: runtime, wait, job_failure"):
        make_task("walltime")

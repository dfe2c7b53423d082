"""Backtests: baselines that equal the published ones, a model that beats them, and reports that say what they are."""

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from dashboards.backtest_page import backtest_page
from features.job_history import JobHistory
from features.job_table import JobsError
from features.jobs import job_features
from features.vocabulary import QUANTILE_COLUMNS, TABLES
from models.backtest import BacktestError, backtest, spans
from models.failure_kinds import KIND_COLUMNS
from models.forest import ForestSize
from models.recency import baseline_log
from models.remaining_task import RemainingTask
from models.scoring import log_error
from models.tasks import FailureTask, RuntimeTask, WaitTask, make_task
from pipelines.backtesting import read_jobs_file, run_backtest
from weatherglass import cli

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
    told = {s.metric for s in report.strata}
    assert {"male_key", "male_user", "coverage_80_limit_1h_12h", "pinball_ran_under_10m", "within_2x_size_2_8"} <= told
    assert [row["forecast"] for row in report.calibration] == [0.05, 0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95]
    assert all(abs(row["observed"] - row["forecast"]) < 0.12 for row in report.calibration)
    with pytest.raises(KeyError, match="no 'rmse' of the model; metrics: coverage_80, covered_share_80, mae_s"):
        report.value("rmse")


@pytest.mark.traces
def test_report_becomes_rows_and_text(runtime_report):
    rows = runtime_report.rows("kth", NOW, "20260301T000000Z-abc")
    assert tuple(rows.columns) == TABLES["out_scores"].columns
    assert not rows.select(TABLES["out_scores"].key).is_duplicated().any()
    assert rows["count"].min() > 0
    text = runtime_report.text()
    assert "last 2, key" in text
    assert "The model is better than the best baseline" in text
    assert "key seen before" in text


@pytest.mark.traces
def test_wait_and_failure_reports(kth, traces):
    wait = backtest(WaitTask(SMALL), kth, refit_days=60)
    assert wait.value("male") < wait.value("male", "zero")
    assert wait.value("brier_600s") < wait.value("brier_600s", "zero")
    assert 0 < wait.value("churn_over_10min") <= 1
    assert wait.value("churn_move_s", "recent_waits") > 0
    assert "drift of the start" in wait.text()
    assert wait.find("male_ratio", wait.best_baseline, part="user").interval.value < 1
    failure = backtest(FailureTask(60), _trace(traces, "llnl-atlas-2006")[20_000:24_000], refit_days=30)
    assert failure.value("brier") < failure.value("brier", "rolling_rate")
    assert failure.value("auroc") > 0.7
    assert failure.value("ece_floor") > 0
    for landmark in (60, 600):
        metric = f"brier_fail_{landmark}s"
        assert failure.value(metric) < 1.05 * failure.value(metric, "survivor_rate")
        assert failure.value(f"{metric}_ratio", "survivor_rate") == pytest.approx(
            failure.value(metric) / failure.value(metric, "survivor_rate")
        )
        count = next(s.count for s in failure.scores if (s.metric, s.baseline) == (metric, ""))
        later = failure.predictions[f"p_fail_{landmark}s"]
        assert 50 < count == later.count() < failure.jobs  # those that had ended are not asked


@pytest.mark.traces
def test_unrecorded_waits_are_called_so(traces):
    report = backtest(WaitTask(SMALL), _trace(traces, "llnl-atlas-2006")[:600], refit_days=90)
    assert "did not record waits" in report.text()


def test_states_in_any_case_are_bad_ends_and_others_are_told(tmp_path, capsys):
    path = tmp_path / "jobs.csv"
    states = ["failed", "Completed", "CANCELLED by 1000", "exploded", ""]
    rows = [f"{i},2026-01-01 0{i}:00:00,{state},x" for i, state in enumerate(states)]
    path.write_text("\n".join(["job_id,submit_time,state,walltime", *rows]))
    assert read_jobs_file(path)["state"].to_list() == ["FAILED", "COMPLETED", "CANCELLED", "exploded", None]
    told = capsys.readouterr().out
    assert "state of 1 job is none that is known ('exploded') and counts as no bad end; states: BOOT_FAIL" in told
    assert "columns that are not those of jobs are passed over: walltime" in told


def test_a_file_without_ends_is_told_which_columns_it_lacks():
    times = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=i) for i in range(300)]
    jobs = pl.DataFrame({"job_id": [str(i) for i in range(300)], "submit_time": times, "start": times})
    with pytest.raises(
        BacktestError, match="50 needed; the jobs have no column start_time, end_time, state, only: job_id"
    ):
        backtest("runtime", jobs)


def test_a_test_without_bad_ends_is_called_so():
    times = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=i) for i in range(300)]
    ends = [time + timedelta(minutes=30) for time in times]
    jobs = pl.DataFrame({
        "job_id": [str(i) for i in range(300)], "submit_time": times, "start_time": times, "end_time": ends,
        "state": "COMPLETED",
    })  # fmt: skip
    text = backtest(FailureTask(60), jobs).text()
    assert "no job of the test is recorded to have ended badly" in text
    assert "Nothing could be judged" in text
    assert "better than" not in text


def test_the_kinds_of_backtest_are_not_broken_by_the_line():
    assert "Usage: cli backtest [OPTIONS] KIND\n" in CliRunner().invoke(cli, ["backtest", "--help"]).output


def test_too_little_is_refused_with_numbers(traces):
    jobs = _trace(traces, "kth-sp2-1996")
    with pytest.raises(BacktestError, match=r"60 jobs with a known outcome give a test of 18; 50 needed"):
        backtest("runtime", jobs[:60])
    with pytest.raises(ValueError, match="no job forecast 'walltime'; there are: runtime, wait, job_failure"):
        make_task("walltime")


@pytest.mark.traces
@pytest.mark.parametrize("kind", ["runtime", "remaining", "failure"])
def test_the_command_writes_predictions_figures_and_a_page_of_its_own(kind, traces, tmp_path):
    jobs = tmp_path / "jobs.parquet"
    _trace(traces, "kth-sp2-1996")[2_000:3_600].write_parquet(jobs)
    arguments = ["backtest", kind, "--jobs", str(jobs), "--refit-days", "30", "--out"]
    done = CliRunner().invoke(cli, [*arguments, str(tmp_path / "one")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "predictions, figures and page" in done.output
    predictions = pl.read_parquet(tmp_path / "one" / "predictions.parquet")
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    page = (tmp_path / "one" / "report.html").read_text()
    assert report["task"] == kind
    assert {"male", "brier"} & {score["metric"] for score in report["scores"]}
    assert any("_week_" in score["metric"] for score in report["strata"])
    assert "Plotly.newPlot" in page
    assert "src=" not in page.split("<body>")[0]
    ids = set(pl.read_parquet(jobs)["job_id"].to_list())
    assert set(predictions["job_id"].to_list()) <= ids
    if kind == "failure":
        odds = ["p_fail", *KIND_COLUMNS]
        later = [f"{name}_{seconds}s" for seconds in (60, 600, 3600) for name in odds]
        assert predictions.columns == ["job_id", "submit_time", *odds, *later]
        parts = predictions.select(KIND_COLUMNS).sum_horizontal()
        assert (parts <= predictions["p_fail"] + 1e-9).all()
        assert predictions["p_fail"].is_between(0, 1).all()
    else:
        own = ["point_s", "mode_s"] if kind == "runtime" else ["elapsed_s", "point_s"]
        assert predictions.columns == ["job_id", "submit_time", *own, *QUANTILE_COLUMNS]
        assert (predictions["q05_s"] <= predictions["q95_s"]).all()
        assert predictions["point_s"].equals(predictions["q50_s"], check_names=False)
    if kind == "runtime":
        assert predictions.height == report["jobs"] == predictions["job_id"].n_unique()
        assert predictions["mode_s"].null_count() == 0
        CliRunner().invoke(cli, [*arguments, str(tmp_path / "two")], catch_exceptions=False)
        assert pl.read_parquet(tmp_path / "two" / "predictions.parquet").equals(predictions)
        other = CliRunner().invoke(cli, [*arguments, str(tmp_path / "three"), "--seed", "2"], catch_exceptions=False)
        assert other.exit_code == 0
        assert not pl.read_parquet(tmp_path / "three" / "predictions.parquet").equals(predictions)


def test_files_that_are_no_jobs_of_one_cluster_are_refused(tmp_path):
    rubbish = tmp_path / "jobs.parquet"
    rubbish.write_bytes(b"no parquet")
    with pytest.raises(BacktestError, match="cannot be read as a jobs file"):
        run_backtest("runtime", rubbish, tmp_path / "out")
    pl.DataFrame({"cluster": ["a", "b"], "job_id": ["1", "2"]}).write_parquet(rubbish)
    with pytest.raises(BacktestError, match=r"several clusters \(a, b\)"):
        run_backtest("runtime", rubbish, tmp_path / "out")
    with pytest.raises(BacktestError, match="no backtest 'walltime'; there are: runtime, remaining, wait, failure"):
        run_backtest("walltime", rubbish, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _spread(count, hours):
    """Jobs of one user, each alone on the machine, run and limit of ten and twenty minutes."""
    start = pl.Series([NOW]).cast(pl.Datetime("us", "UTC"))[0]
    submit = [start + timedelta(hours=hours * i) for i in range(count)]
    run = [timedelta(seconds=20 + i % 25) for i in range(count)]
    return pl.DataFrame({
        "job_id": [str(i) for i in range(count)], "user": ["u"] * count, "cpus": [1] * count,
        "time_limit_s": [1200] * count, "state": ["COMPLETED"] * count, "submit_time": submit, "start_time": submit,
        "end_time": [at + length for at, length in zip(submit, run, strict=True)],
    }).cast({name: pl.Datetime("us", "UTC") for name in ("submit_time", "start_time", "end_time")})  # fmt: skip


def _last_submitted(jobs, at_us):
    """The same jobs, the last of them an hour long and of another age."""
    is_last = pl.int_range(pl.len()) == jobs.height - 1
    at = pl.lit(at_us).cast(pl.Datetime("us", "UTC"))
    times = {"submit_time": at, "start_time": at, "end_time": at + timedelta(hours=1)}
    return jobs.with_columns(pl.when(is_last).then(time).otherwise(name).alias(name) for name, time in times.items())


def test_ages_without_a_job_are_passed_over():
    """One stray submit of another age costs no step for each span before it, and moves none of them."""
    assert list(spans(np.array([3, 8, 13, 35, 3 + 10**18]), 10)) == [
        (3, 13),
        (13, 23),
        (33, 43),
        (3 + 10**18, 13 + 10**18),
    ]
    assert list(spans(np.array([3, 3]), 10)) == [(3, 13)]
    report = backtest(
        FailureTask(3), _last_submitted(_spread(300, 1.0), 253_000_000_000_000_000), refit_days=0.1, draws=2
    )
    assert report.jobs == 90


def test_a_span_in_which_no_job_lasts_to_a_landmark():
    for task, predictions in ((RuntimeTask(SMALL), 119), (RemainingTask(SMALL), 0)):
        report = backtest(task, _spread(400, 2.0), refit_days=4, draws=2)
        assert (report.jobs, report.predictions.height) == (119, predictions)
    assert "there is no time left to judge" in report.text()
    assert "Nothing could be judged" in backtest_page(report, "jobs")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda jobs: jobs.drop("submit_time"), "no column 'submit_time'"),
        (lambda jobs: jobs.drop("job_id"), "no column 'job_id'"),
        (lambda jobs: jobs.with_columns(pl.col("end_time").dt.epoch("s")), "end_time holds Int64, not times"),
        (lambda jobs: jobs.with_columns(pl.col("start_time").cast(pl.String)), "start_time holds String, not times"),
        (lambda jobs: jobs.with_columns(time_limit_s=pl.lit("1-00:00:00")), "time_limit_s"),
        (lambda jobs: jobs.with_columns(nodes=pl.lit(2**40)), "nodes"),
        (lambda jobs: _last_submitted(jobs, 2**60), "submit_time of 1 of 300 jobs lies outside the years 1 to 9999"),
    ],
)
def test_a_wrong_jobs_file_is_refused_in_words(change, words, tmp_path):
    path = tmp_path / "jobs.parquet"
    change(_spread(300, 1.0)).write_parquet(path)
    for kind in ("runtime", "wait", "failure"):
        with pytest.raises((JobsError, BacktestError), match=words):
            run_backtest(kind, path, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_found_before_the_work(tmp_path, monkeypatch):
    path, there = tmp_path / "jobs.parquet", tmp_path / "file"
    _spread(300, 1.0).write_parquet(path)
    there.write_text("mine")
    monkeypatch.setattr("pipelines.backtesting.backtest", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(BacktestError, match=r"--out .*file/out cannot be written"):
        run_backtest("runtime", path, there / "out")
    with pytest.raises(BacktestError, match="--refit-days nan"):
        run_backtest("runtime", path, tmp_path / "out", refit_days=float("nan"))


def test_tables_as_people_keep_them(tmp_path, capsys):
    jobs = _spread(300, 1.0).with_columns(
        job_id=pl.when(pl.int_range(300) < 290).then("job_id").otherwise(pl.format("{}_3", "job_id")),
        end_time=pl.when(pl.int_range(300) < 299).then(pl.col("end_time").dt.strftime("%Y-%m-%dT%H:%M:%S+00:00"))
        .otherwise(pl.lit("Unknown")),
        time_limit_s=pl.when(pl.int_range(300) == 295).then(pl.lit("UNLIMITED"))
        .otherwise(pl.col("time_limit_s").cast(pl.String)),
    )  # fmt: skip
    path = tmp_path / "jobs.CSV"
    pl.concat([jobs, jobs.tail(100)]).write_csv(path)
    read = read_jobs_file(path)
    assert "100 rows are of jobs that come again" in capsys.readouterr().out
    assert read.height == 300
    assert read["job_id"].dtype == pl.String
    assert (read["end_time"].null_count(), read["time_limit_s"].null_count()) == (1, 1)
    assert JobHistory(read).table.has_run.sum() == 299
    path = tmp_path / "jobs.parquet"
    jobs.with_columns(cluster=pl.when(pl.int_range(300) < 5).then(pl.lit(None)).otherwise(pl.lit("c"))).write_parquet(
        path
    )
    with pytest.raises(BacktestError, match=r"several clusters \(c and 5 jobs of none\)"):
        read_jobs_file(path)


def test_the_same_seed_makes_the_same_page(tmp_path):
    report = backtest(RuntimeTask(SMALL), _spread(300, 1.0), refit_days=9, draws=2)
    assert backtest_page(report, "jobs") == backtest_page(report, "jobs")

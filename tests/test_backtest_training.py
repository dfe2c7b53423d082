"""Nightly training: what is earned is promoted, what is not is kept and says why, and all of it can be done again."""

import json
import logging
import re
from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory
from features.jobs import microseconds
from features.vocabulary import QUANTILE_COLUMNS, TABLES
from models.forest import ForestSize
from models.live import Champions, forecast_jobs, forecast_runtimes, merge_jobs
from models.registry import Registry
from models.tasks import FailureTask, RuntimeTask, WaitTask
from models.training import as_of, train, train_again, train_runtime
from models.versions import configuration_id

SMALL = ForestSize(trees=12)
TASK = RuntimeTask(SMALL)


@pytest.fixture(scope="module")
def kth(traces):
    return pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").sort("submit_time", "job_id")[8_000:14_000]


@pytest.fixture(scope="module")
def at(kth):
    return kth["submit_time"][5_500]


@pytest.fixture(scope="module")
def trained(kth, at, tmp_path_factory):
    """A registry with a promoted runtime model, and the report of its training."""
    registry = Registry(tmp_path_factory.mktemp("registry"))
    return registry, train(TASK, kth, registry, at, snapshot_id=17)


@pytest.mark.traces
def test_a_model_that_beats_the_best_baseline_is_promoted(trained):
    registry, report = trained
    assert report.promoted, report.reason
    assert registry.champion("runtime") == report.version
    assert "a changed configuration needs an interval below 1" in report.reason
    assert tuple(report.scores.columns) == TABLES["out_scores"].columns
    keyed = {"limit", "last2_user", "last2_key", "median_user", "median_key"}
    assert set(report.scores["baseline"]) == {"", "quantiles_key", *keyed}
    assert report.scores["cluster"].unique().to_list() == ["kth-sp2"]
    card = registry.load("runtime").card
    assert card["snapshot_id"] == 17
    assert card["metrics"]
    assert "jobs, male" in card["summary"]
    assert card["calibration"]
    assert card["span"][0] < card["span"][1]
    assert "training.parquet" in card["files"]


@pytest.mark.traces
def test_training_again_gives_the_same_forecasts(trained, kth, at):
    registry, report = trained
    again = train_again(registry, "runtime", report.version, threads=2)
    kept = TASK.from_files(registry.load("runtime").files)
    later = kth.filter(pl.col("submit_time") > at)[:200]
    mine, theirs = (f.forecast(later, kth).to_numpy() for f in (kept, again))
    np.testing.assert_allclose(theirs, mine, rtol=1e-9)


@pytest.mark.traces
def test_a_refit_takes_over_and_a_changed_configuration_must_win(trained, kth, at, tmp_path):
    registry, first = trained
    night = at + timedelta(days=1)
    refit = train(TASK, kth, registry, night)
    assert "champion 1" in refit.reason.replace(first.version, "1")
    assert set(refit.scores["model_version"]) == {first.version, refit.version}
    changed = RuntimeTask(ForestSize(trees=13))
    ids = [configuration_id(task.name, task.configuration()) for task in (changed, TASK)]
    assert ids[0] != ids[1]
    other = train(changed, kth, registry, night + timedelta(days=1))
    assert not other.promoted
    assert "the configuration changed (size trees 12 → 13)" in other.reason
    assert re.search(r"on \d+ user-days newer than it they cannot be told apart, 30 needed", other.reason)
    assert not other.is_judged
    assert set(other.scores["model_version"]) == {other.version}, "no figures of a champion on what it has learnt from"
    assert len(registry.versions("runtime")) == 3
    if refit.promoted:
        assert registry.rollback("runtime", "test") == first.version


@pytest.mark.traces
def test_too_few_jobs_leave_the_baseline_and_say_so(kth, tmp_path):
    registry = Registry(tmp_path)
    report = train_runtime(kth, registry, kth["submit_time"][150], min_jobs=200)
    assert (report.version, report.promoted) == (None, False)
    assert "baseline stays" in report.reason
    assert "200 are needed" in report.reason
    assert report.scores.is_empty()
    assert registry.versions("runtime") == []


@pytest.mark.traces
def test_a_model_that_has_not_earned_it_is_kept_but_not_promoted(kth, tmp_path):
    """Held-out jobs of one user on a few days are too few blocks for an interval."""
    one = kth.filter(pl.col("user") == kth["user"].mode()[0])[:400]
    registry = Registry(tmp_path)
    report = train(TASK, one, registry, one["end_time"].max() + timedelta(hours=1))
    assert not report.promoted
    assert "30 needed" in report.reason
    assert registry.champion("runtime") is None
    assert [card["version"] for card in registry.versions("runtime")] == [report.version]
    assert registry.versions("runtime")[0]["decision"] == report.reason


def test_jobs_of_two_clusters_are_refused(tmp_path, traces):
    jobs = pl.read_parquet(traces / "jobs" / "microsoft-itp-2021.parquet")
    with pytest.raises(ValueError, match="jobs of several clusters"):
        train_runtime(jobs, Registry(tmp_path), jobs["submit_time"].max())


def _live(kth, at):
    known = kth.filter(pl.col("submit_time") <= at)
    return as_of(known, at).with_columns(cluster=pl.lit("kth"), observed_at=pl.lit(at - timedelta(seconds=30)))


@pytest.mark.traces
def test_without_models_the_baselines_speak(kth, at):
    live = _live(kth, at)
    jobs = live.filter(pl.col("state").is_in(["PENDING", "RUNNING"]))
    rows = forecast_jobs(None, jobs, live, at, ttl_s=600)
    assert tuple(rows.columns) == TABLES["out_job_forecasts"].columns
    pending, running = (jobs.filter(pl.col("state") == state) for state in ("PENDING", "RUNNING"))
    assert pending.height > 3
    assert running.height > 2
    counts = dict(rows["forecast"].value_counts().iter_rows())
    assert counts == {"runtime": pending.height, "wait": pending.height, "remaining": running.height}
    assert set(rows["model_version"]) <= {
        "baseline:recent_waits",
        *(f"baseline:{n}" for n in ("middle", "last2_key", "median_key")),
    }
    assert (rows["valid_until"] - rows["generated_at"]).unique().to_list() == [timedelta(seconds=600)]
    assert rows["data_age_s"].unique().to_list() == [30.0]
    quantiles = rows.select(QUANTILE_COLUMNS).to_numpy()
    assert (np.diff(quantiles, axis=1) >= 0).all()
    wait = rows.filter(pl.col("forecast") == "wait")
    assert wait["p_start_3600s"].null_count() == 0
    assert rows.filter(pl.col("forecast") != "wait")["p_fail"].null_count() == 0
    assert forecast_jobs(None, jobs.clear(), live, at).is_empty()
    empty = forecast_jobs(None, pending, live.clear(), at)
    assert empty.height == 2 * pending.height
    assert empty["q50_s"].null_count() == 0


@pytest.mark.traces
def test_champions_speak_and_a_damaged_one_gives_way(kth, at, tmp_path, caplog):
    registry = Registry(tmp_path)
    history = JobHistory(kth)
    for task in (TASK, WaitTask(SMALL), FailureTask(20)):
        for moment in (at - timedelta(days=1), at):
            fitted = task.fit(history, microseconds(moment), None, seed=1, threads=1, max_labels=2_000)
            version = registry.save(task.name, fitted.to_files(), {"trained_at": moment})
            registry.promote(task.name, version, "for the test")
    live = _live(kth, at)
    jobs = live.filter(pl.col("state").is_in(["PENDING", "RUNNING"]))
    champions = Champions(registry)
    rows = forecast_jobs(champions, jobs, JobHistory(live), at)
    names = {name: registry.champion(name) for name in ("runtime", "wait")}
    versions = dict(rows.select("forecast", "model_version").unique().iter_rows())
    assert versions == {"runtime": names["runtime"], "remaining": names["runtime"], "wait": names["wait"]}
    assert rows.equals(forecast_jobs(registry, jobs, live, at)), "prepared and merged history say the same"
    version, quantiles = forecast_runtimes(
        champions, pl.DataFrame({"user": ["7"], "cpus": [4], "time_limit_s": [600]}), live, at
    )
    assert version == names["runtime"]
    assert quantiles["q50_s"][0] <= 600
    assert quantiles["q95_s"][0] <= 1_200, "a short limit is passed by no more than its share"

    path = tmp_path / "runtime" / names["runtime"] / "runtime.npz"
    path.write_bytes(path.read_bytes()[:-10])
    (tmp_path / "wait" / "champion.json").write_bytes(b"{")
    with caplog.at_level(logging.ERROR):
        after = forecast_jobs(Champions(registry), jobs, live, at)
    earlier = [item["version"] for item in registry.history("runtime") if item["version"] != names["runtime"]][-1]
    versions = dict(after.select("forecast", "model_version").unique().iter_rows())
    assert versions["runtime"] == earlier
    assert versions["wait"] == names["wait"]
    assert "runtime.npz" in caplog.text
    registry.rollback("runtime", "test")
    assert champions.get("runtime")[0] == earlier, "a new pointer is noticed"
    registry.withdraw("runtime", "test")
    assert forecast_jobs(champions, jobs, live, at)["model_version"].str.starts_with("baseline:").any()


@pytest.mark.traces
@pytest.mark.parametrize("task", [TASK, WaitTask(SMALL), FailureTask(20)], ids=["runtime", "wait", "job_failure"])
def test_a_champion_of_another_release_gives_way_wherever_it_is_read(task, kth, at, tmp_path, caplog):
    """Hashes are sound, but this release cannot read the files: whatever the parser makes of them."""
    fitted = task.fit(JobHistory(kth), microseconds(at), None, seed=1, threads=1, max_labels=2_000)
    files = fitted.to_files()
    card = next(name for name in files if name.endswith(".json"))
    facts = json.loads(files[card])
    broken = [{name: value for name, value in facts.items() if name != key} for key in facts]
    others = [{name: data for name, data in files.items() if name != gone} for gone in files]
    others += [files | {card: b"[]"}, files | {card: b"not json"}]
    if "features" in facts:  # fewer features than are computed now
        others.append(files | {card: json.dumps(facts | {"features": facts["features"][:-20]}).encode()})
    others += [files | {name: b"tree"} for name in files if name.endswith(".txt")]
    jobs = _live(kth, at)
    pending = jobs.filter(pl.col("state") == "PENDING").head(3)
    history = JobHistory(jobs)
    refused = 0
    for number, wrong in enumerate([*({**files, card: json.dumps(some).encode()} for some in broken), *others]):
        registry = Registry(tmp_path / str(number))
        sound = registry.save(task.name, files, {"trained_at": at - timedelta(days=1)})
        registry.promote(task.name, sound, "for the test")
        other = registry.save(task.name, wrong, {"trained_at": at})
        registry.promote(task.name, other, "for the test")
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            version, model = Champions(registry).get(task.name)
        assert model is not None
        if version == sound:
            refused += 1
            assert other in caplog.text
            assert "cannot be read by this release" in caplog.text
            assert registry.load(task.name, fallback=True, read=task.from_files).version == sound
        else:  # a key that a reader can do without
            forecast_jobs(Champions(registry), pending, history, at)
    assert refused > len(broken) / 2


def test_merging_takes_the_newer_state(kth, at):
    live = _live(kth, at)
    newer = live.filter(pl.col("state") == "RUNNING").with_columns(state=pl.lit("COMPLETED"))
    merged = merge_jobs(live, newer)
    assert merged.height == live.height
    assert merged.filter(pl.col("state") == "RUNNING").is_empty()

"""Accounts, arrays, kinds of nodes and families of names: by hand, live as in a backtest, and without the future."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.job_memberships import MEMBER_FEATURES
from features.job_names import families
from features.jobs import FEATURES, feature_matrix, job_features
from models.contribution_words import in_words
from models.contributions import GROUPS, Contributions
from models.forest import Forest, ForestSize
from models.training import as_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def _job(job_id, submit_s, start_s=None, end_s=None, **fields):
    moments = {"submit_time": submit_s, "start_time": start_s, "end_time": end_s}
    times = {name: None if s is None else NOON + timedelta(seconds=s) for name, s in moments.items()}
    default = {"user": "ann", "account": "phys", "nodes": 1, "gpus": 8, "time_limit_s": 3600, "state": "COMPLETED"}
    asked = {"array_job_id": None, "array_task": None, "gpu_type": None, "node_features": None, "node_list": None}
    return {"job_id": str(job_id), **default, **asked, **times, **fields}


def _frame(*jobs):
    times = dict.fromkeys(("submit_time", "start_time", "end_time"), pl.Datetime("us", "UTC"))
    texts = dict.fromkeys(("array_job_id", "gpu_type", "node_features", "node_list", "account", "user"), pl.String)
    return pl.DataFrame(list(jobs), schema_overrides={**times, **texts, "array_task": pl.Int32})


def _of(frame, job_id, at_s=None):
    at = None if at_s is None else NOON + timedelta(seconds=at_s)
    return job_features(frame.filter(pl.col("job_id") == str(job_id)), frame, at).row(0, named=True)


def test_an_account_is_all_its_users_and_one_of_ones_own_tells_nothing() -> None:
    jobs = _frame(
        _job(1, 0, 0, 10), _job(2, 1, 1, 21, user="bob", state="FAILED"), _job(3, 2, 2, 42, account="chem"),
        _job(4, 3, 3, 903), _job(5, 1000), _job(6, 1000, user="phys"), _job(7, 1000, account=None),
        _job(8, 1000, account="new"),
    )  # fmt: skip
    found = _of(jobs, 5)
    assert np.exp(found["account_median"]) == pytest.approx(20)
    assert np.expm1(found["account_count"]) == pytest.approx(3)
    assert np.exp([found["own_account_last1"], found["own_account_median"]]) == pytest.approx([900, 94.868], rel=1e-3)
    for alone in (6, 7):
        told = _of(jobs, alone)
        assert all(np.isnan(told[name]) for name in MEMBER_FEATURES), alone
    new = _of(jobs, 8)
    assert new["account_count"] == 0
    assert np.isnan(new["account_median"])


def test_siblings_of_an_array_count_once_they_ended_and_those_that_run_are_censored() -> None:
    of = {"array_job_id": "7"}
    jobs = _frame(
        _job(7, 0, 0, 100, array_task=0, **of), _job(8, 0, 0, 200, array_task=1, **of),
        _job(9, 0, 50, 9_000, array_task=2, **of), _job(10, 0, None, None, array_task=3, **of),
        _job("11_4", 0), _job("11_2", 0, 0, 30), _job(12, 0, 0, 60),
    )  # fmt: skip
    found = _of(jobs, 10, 250)
    assert np.exp([found["array_last1"], found["array_median"]]) == pytest.approx([200, np.sqrt(20_000)], rel=1e-5)
    assert np.expm1([found["array_count"], found["array_task"]]) == pytest.approx([2, 3], rel=1e-5)
    assert found["array_running"] == 1
    assert np.exp([found["array_elapsed_high"], found["array_q75"]]) == pytest.approx([200, 200])
    at_submit = _of(jobs, 10)
    assert at_submit["array_count"] == 0
    assert np.isnan(at_submit["array_last1"])
    printed = _of(jobs, "11_4", 250)  # the id alone tells the array, as where nothing but traces of ids is kept
    assert np.exp(printed["array_last1"]) == pytest.approx(30)
    assert np.expm1(printed["array_task"]) == pytest.approx(4, rel=1e-5)
    assert all(np.isnan(_of(jobs, 12)[f"array_{name}"]) for name in ("count", "running", "task"))
    own = _of(jobs, 9, 250)
    assert own["array_running"] == 0, "a running job is not its own sibling"


def test_the_kind_of_gpu_is_the_one_asked_for() -> None:
    jobs = _frame(
        _job(1, 0, 0, 10, gpu_type="a100"), _job(2, 1, 1, 21, gpu_type="h100"), _job(3, 2, 2, 42, gpus=4),
        _job(4, 1000, gpu_type="a100"), _job(5, 1000, gpu_type="h100", node_features="nvlink"), _job(6, 1000),
    )  # fmt: skip
    assert np.exp(_of(jobs, 4)["kind_last1"]) == pytest.approx(10)
    assert _of(jobs, 5)["kind_count"] == 0
    assert np.isnan(_of(jobs, 6)["kind_count"])
    given = jobs.with_columns(node_list=pl.lit("n1,n2"))
    assert job_features(given, given).equals(job_features(jobs, jobs)), "nodes that a job was given tell nothing"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("train-v3_lr0.1", "train"), ("Train_seed=7", "train"), ("train", "train"), ("exp12_bert", "exp#_bert"),
        ("run-3fa9c1d2-b0e1f2a3", "run"), ("eval_2024-05-17T12:30:05", "eval_#t#"), ("bert-base 1e-4", "bert-base"),
        ("9f3c2a1_eval", "#_eval"), ("0b5f6c1e-8f3a-4d2b-9c77-1a2b3c4d5e6f-prep", "#-prep"), ("Größe7", "größe#"),
        ("defaced", "defaced"), ("4711", "4711"), ("290d9b6f43193179d47f", "290d9b6f43193179d47f"),
        ("", ""), (None, None),
    ],
)  # fmt: skip
def test_families_of_names(name: str | None, family: str | None) -> None:
    assert families(pl.Series(["other-1", name], dtype=pl.String)).to_list() == ["other", family]


def _many(count=700, seed=3):
    pick = np.random.default_rng(seed)
    submit = np.sort(pick.integers(0, 40_000, count))
    start = submit + pick.integers(0, 2_000, count)
    run = pick.integers(0, 6_000, count)
    some = lambda values: [values[k] for k in pick.integers(0, len(values), count)]  # noqa: E731
    return _frame(*(
        _job(k, int(submit[k]), int(start[k]), int(start[k] + run[k]), user=user, account=account, gpu_type=kind,
             array_job_id=array, array_task=k % 50 if array else None)
        for k, (user, account, kind, array) in enumerate(zip(
            some(["ann", "bob", "phys"]), some(["phys", "chem", None]), some(["a100", "h100", None]),
            some([None, None, "1", "2", "3"]), strict=True,
        ))
    ))  # fmt: skip


def test_live_and_backtest_see_the_same_bits() -> None:
    """A job alone, with the history cut off at its submit, against one pass over everything."""
    jobs = _many()
    whole = job_features(jobs, jobs)
    assert [name for name in MEMBER_FEATURES if np.isnan(whole[name].to_numpy()).all()] == []
    assert len(FEATURES) == len(set(FEATURES))
    for k in np.random.default_rng(2).choice(np.arange(100, jobs.height), 25, replace=False).tolist():
        at = jobs["submit_time"][k]
        job = jobs[k].with_columns(start_time=pl.lit(None, jobs.schema["start_time"]))
        live = job_features(job.with_columns(end_time=pl.col("start_time")), as_of(jobs, at), at)
        assert live.to_numpy().tobytes() == whole[k : k + 1].to_numpy().tobytes(), k


def test_what_comes_after_the_moment_changes_nothing() -> None:
    jobs, pick = _many(), np.random.default_rng(8)
    at = jobs["submit_time"][400]
    later = pl.Series(pick.integers(1, 50_000, jobs.height))
    new_end = pl.lit(at) + pl.duration(seconds=later)
    other = jobs.with_columns(
        start_time=pl.when(pl.col("start_time") > at).then(new_end).otherwise("start_time"),
        end_time=pl.when(pl.col("end_time") > at).then(new_end).otherwise("end_time"),
        account=pl.when(pl.col("submit_time") > at).then(pl.lit("new")).otherwise("account"),
        array_job_id=pl.when(pl.col("submit_time") > at).then(pl.lit("1")).otherwise("array_job_id"),
    )
    asked = jobs.filter(pl.col("submit_time") <= at, pl.col("end_time") > at)
    one, two = (job_features(asked, history, at).select(MEMBER_FEATURES) for history in (jobs, other))
    assert one.to_numpy().tobytes() == two.to_numpy().tobytes()


def test_a_history_that_takes_jobs_in_is_as_one_made_anew() -> None:
    jobs = _many()
    at = jobs["submit_time"][350]
    history = JobHistory(as_of(jobs, at))
    feature_matrix(history.table, history, history.table.submit)
    history.update(jobs)
    table = JobTable(jobs)
    moments = np.full(table.count, int(table.submit.max()))
    anew = feature_matrix(table, JobHistory(jobs), moments)
    assert feature_matrix(table, history, moments).tobytes() == anew.tobytes()


def test_the_first_rows_may_belong_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = _many(300)
    whole = job_features(jobs, jobs)
    monkeypatch.setattr("features.jobs._CHUNK", 7)
    table = JobTable(jobs)
    parts = feature_matrix(table, JobHistory(jobs), table.submit, threads=2)
    assert parts.tobytes() == np.ascontiguousarray(whole.to_numpy()).tobytes()


def test_optional_columns_that_say_nothing_change_no_forest() -> None:
    pick = np.random.default_rng(1)
    X = pick.normal(size=(400, 6)).astype(np.float32)
    X[:, 5] = 2.0  # says nothing, and takes its turn
    y = X[:, 0] + X[:, 3]
    plain = Forest.fit(X, y, ForestSize(trees=5, feature_share=0.5), seed=1, threads=1)
    wide = np.concatenate([X[:, :4], np.full((400, 3), np.nan, dtype=np.float32), X[:, 4:]], axis=1)
    wide[:, 5] = 3.0
    padded = Forest.fit(wide, y, ForestSize(trees=5, feature_share=0.5), seed=1, threads=1, optional=slice(4, 7))
    assert padded.draw(wide).tobytes() == plain.draw(X).tobytes()
    asked = wide.copy()
    asked[:, 4:7] = pick.normal(size=(400, 3))  # never seen to matter
    assert padded.draw(asked).tobytes() == plain.draw(X).tobytes()
    wide[:, 6] = y  # says everything
    told = Forest.fit(wide, y, ForestSize(trees=5, feature_share=0.5), seed=1, threads=1, optional=slice(4, 7))
    assert 6 in told.feature
    assert not {4, 5} & set(told.feature.tolist())


@pytest.mark.parametrize(
    ("group", "facts", "text"),
    [
        ("account", {"own_account_last1": 60, "own_account_median": 120},
         "runs by ann for this account took 2 min, the newest 1 min"),
        ("account", {"account_count": 1, "account_median": 60}, "runs for this account took 1 min"),
        ("account", {}, "no run for this account has ended yet"),
        ("kind", {"kind_count": 1, "kind_last1": 7200, "kind_median": 7200},
         "the last run of this size on such nodes by ann took 2 h"),
        ("array", {"array_count": 3, "array_last1": 7200, "array_median": 7200},
         "the last 3 runs of its array took 2 h"),
        ("array", {"array_running": 2, "array_elapsed_high": 7200},
         "2 tasks of its array have run for up to 2 h, none has ended"),
        ("array", {}, "a task of an array of which none has ended yet"),
    ],
)  # fmt: skip
def test_words(group: str, facts: dict[str, float], text: str) -> None:
    X = np.full((1, len(FEATURES)), np.nan, dtype=np.float32)
    X[0, FEATURES.index("all_median")] = np.log(600)
    for name, value in facts.items():
        made = np.log1p(value) if name.endswith("count") else value if name.endswith("running") else np.log(value)
        X[0, FEATURES.index(name)] = made
    parts = np.zeros((1, len(GROUPS)))
    parts[0, GROUPS.index(group)] = np.log(2)
    told = in_words(Contributions(np.log(np.array([600.0])), parts), X, ["ann"])
    assert told == [("about 2× longer than usual here (10 min)", f"×2: {text}")]

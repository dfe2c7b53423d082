"""Versions of forecasters: code that moves forecasts of a fixed history needs a new one.

`python -m tests.test_versions` writes the record anew, after a version was raised (or before the first release of one).
"""

import importlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory
from features.vocabulary import QUANTILES
from models import wait_leaves
from models.fault_history import DAY_S, FaultHistory
from models.forest import ForestSize
from models.landmarks import Landmark
from models.node_failure import NodeFailureForecaster
from models.tasks import TASKS, FailureTask, RuntimeTask, WaitTask
from models.versions import VERSIONS, configuration_id, full_configuration, what_changed
from models.wait import SOON_COLUMNS

RECORD = Path(__file__).with_name("forecasts_of_versions.json")
START = datetime(2026, 1, 1, tzinfo=UTC)
SMALL = ForestSize(trees=6)
MOVED = 2e-3  # relative: libraries and processors differ by less, a rule that changed by more


def _jobs(count=900, seed=3):
    """Ten nodes in turn, five users with habits, some bad ends; the same numbers everywhere."""
    drawn = np.random.default_rng(seed)
    free_at, rows, now = np.zeros(10), [], 0.0
    for number in range(count):
        now += float(drawn.exponential(2_600))
        user, nodes = int(drawn.integers(5)), int(drawn.choice([1, 2, 4]))
        limit_s = int(drawn.choice([1800, 7200, 28800]))
        run_s = float(min(limit_s, np.ceil(limit_s * drawn.beta(1 + user, 4))))
        held = np.argsort(free_at)[:nodes]
        begin = float(np.ceil(max(now, free_at[held].max())))
        free_at[held] = begin + run_s
        rows.append({
            "cluster": "fixed", "job_id": str(number), "user": f"u{user}", "queue": "gpu",
            "name": f"run{user}-{number}",
            "nodes": nodes, "cpus": nodes * 64, "gpus": nodes * 8, "time_limit_s": limit_s,
            "state": "FAILED" if drawn.random() < 0.05 + 0.1 * user else "COMPLETED",
            "submit_time": START + timedelta(seconds=now), "start_time": START + timedelta(seconds=begin),
            "end_time": START + timedelta(seconds=begin + run_s),
        })  # fmt: skip
    times = dict.fromkeys(("submit_time", "start_time", "end_time"), pl.Datetime("us", "UTC"))
    return pl.DataFrame(rows).cast(times)


def _logs(values):
    return np.log(np.maximum(values, 1.0)).mean(axis=0)


def _figures():
    """Task → figures of its forecasts, each a mean over jobs (or nodes) that were asked about."""
    history = JobHistory(_jobs())
    table = history.table
    at, asked = int(table.submit[700]), np.arange(700, table.count)
    made = {"seed": 1, "threads": 1, "max_labels": 2_000}
    found = {}

    task = RuntimeTask(SMALL)
    model = task.fit(history, at, None, **made)
    X, limit_s = task.matrix(history, asked), table.limit_s[asked]
    mode = np.exp(model.distribution(X, limit_s)[1])
    there = Landmark.of(history, asked, 600.0)
    left = model.left_s(there.X, there.table, history, there.moments)
    found["runtime"] = [*_logs(model.quantiles(X, limit_s).to_numpy()), _logs(mode), *_logs(left)]

    task = WaitTask(SMALL)
    model = task.fit(history, at, None, **made)
    frame = model.frame(task.matrix(history, asked))
    waits = _logs(frame.select(f"q{round(100 * level):02d}_s" for level in QUANTILES).to_numpy())
    found["wait"] = [*waits, _logs(frame["likeliest_s"].to_numpy()), *(frame[name].mean() for name in SOON_COLUMNS)]

    task = FailureTask(20)
    odds = task.fit(history, at, None, **made).probability(task.matrix(history, asked))
    found["job_failure"] = [odds.mean(), odds.std(), (odds**2).mean()]

    drawn = np.random.default_rng(4)
    nodes = [f"n{i:02d}" for i in range(20)]
    faults = pl.DataFrame({
        "node": [nodes[int(20 * u * u)] for u in drawn.random(120)],
        "start_time": [START + timedelta(days=float(d)) for d in np.sort(drawn.uniform(0, 200, 120))],
        "kind": "xid", "xid": 79,
    }).with_columns(
        pl.col("start_time").cast(pl.Datetime("us", "UTC")), end_time=(pl.col("start_time") + pl.duration(hours=3))
        .cast(pl.Datetime("us", "UTC")), cluster=pl.lit("fixed"),
    )  # fmt: skip
    record = FaultHistory(faults, nodes)
    until = START.timestamp() + 210 * DAY_S
    risks = NodeFailureForecaster.fit(record, until, seed=1).forecast(record, np.arange(20), np.full(20, until))
    found["node_failure"] = [*np.log(risks).mean(axis=0), *np.log(risks).std(axis=0)]
    return {name: [round(float(value), 7) for value in values] for name, values in found.items()}


@pytest.fixture(scope="module")
def figures():
    return _figures()


@pytest.mark.parametrize("task", ["runtime", "wait", "job_failure", "node_failure"])
def test_forecasts_move_only_with_the_version(figures, task):
    record = json.loads(RECORD.read_text())[task]
    assert record["version"] == VERSIONS[task], (
        f"models/versions.py has version {VERSIONS[task]} of {task}, the record {record['version']}: "
        "`python -m tests.test_versions` writes it anew"
    )
    kept = np.asarray(record["figures"])
    assert len(kept) == len(figures[task])
    moved = np.abs(np.asarray(figures[task]) - kept) / np.maximum(np.abs(kept), 0.1)
    assert moved.max() < MOVED, (
        f"forecasts of {task} moved by up to {moved.max():.2%}. If that was meant, raise VERSIONS[{task!r}] in "
        "models/versions.py and run `python -m tests.test_versions`: by the number a training knows that it has to win"
    )


def test_every_task_has_a_version_and_configurations_name_what_differs():
    assert {*TASKS, "node_failure", "bottleneck", "level"} == set(VERSIONS)
    with pytest.raises(KeyError, match="there are: runtime"):
        full_configuration("weather", {})
    now = {"features": ["a", "b"], "size": {"trees": 3}, "folds": (0.5,)}
    card = {"configuration": configuration_id("wait", now), "configuration_parts": full_configuration("wait", now)}
    assert what_changed("wait", json.loads(json.dumps(card)), now) == ""
    older = json.loads(json.dumps(card))
    older["configuration_parts"] |= {"version": 0, "features": ["b", "c"]}
    older["configuration"] = "other"
    assert what_changed("wait", older, now) == f"features +a, −c; version 0 → {VERSIONS['wait']}"
    assert "of a release that did not keep" in what_changed("wait", {"configuration": "0123456789ab"}, now)


def test_a_share_changed_in_the_code_makes_another_configuration_and_is_named(monkeypatch):
    task = WaitTask()
    configuration = task.configuration()
    card = {
        "configuration": configuration_id("wait", configuration),
        "configuration_parts": full_configuration("wait", configuration),
    }
    trusted = wait_leaves.SOON_TRUST
    monkeypatch.setattr(wait_leaves, "SOON_TRUST", 0.5)
    assert what_changed("wait", card, configuration) == f"numbers wait_leaves.SOON_TRUST {trusted} → 0.5"


@pytest.mark.parametrize(
    ("task", "module", "name"),
    [
        ("runtime", "models.grace", "KILLED_S"), ("runtime", "models.trees", "JUDGES"),
        ("runtime", "features.job_recency", "_SAME"), ("runtime", "features.job_likeness", "GAP_WEIGHTS"),
        ("wait", "models.trees", "JUDGES"), ("wait", "models.wait_odds", "_PARAMETERS"),
        ("wait", "models.boosting", "_DEFAULTS"), ("job_failure", "models.boosting", "_ODDS"),
        ("job_failure", "features.jobs", "STARTED"), ("job_failure", "features.job_likeness", "NEIGHBOURS"),
        ("job_failure", "features.job_memberships", "LOOKED_AT"),
    ],
)  # fmt: skip
def test_whatever_number_a_forecast_is_made_by_makes_another_configuration(monkeypatch, task, module, name):
    before = configuration_id(task, {})
    value = getattr(importlib.import_module(module), name)
    is_named = isinstance(value, dict)
    halved = {key: v / 2 if isinstance(v, float) else v for key, v in value.items()} if is_named else value / 2
    monkeypatch.setattr(f"{module}.{name}", halved)
    assert configuration_id(task, {}) != before


def test_what_only_makes_it_faster_makes_no_other_configuration(monkeypatch):
    before = {task: configuration_id(task, {}) for task in VERSIONS}
    for name in (
        "models.trees._AT_ONCE",
        "features.queue_state._KNOWN",
        "features.jobs._CHUNK",
        "models.boosting._KEPT",
    ):
        monkeypatch.setattr(name, 3)
    assert {task: configuration_id(task, {}) for task in VERSIONS} == before


def test_a_version_alone_makes_another_configuration(monkeypatch):
    for task in (RuntimeTask(), WaitTask(), FailureTask()):
        before = configuration_id(task.name, task.configuration())
        monkeypatch.setitem(VERSIONS, task.name, VERSIONS[task.name] + 1)
        assert configuration_id(task.name, task.configuration()) != before


if __name__ == "__main__":
    RECORD.write_text(
        json.dumps({t: {"version": VERSIONS[t], "figures": v} for t, v in _figures().items()}, indent=1) + "\n"
    )
    print(f"{RECORD}: written")

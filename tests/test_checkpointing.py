"""Checkpoint intervals, expected losses and failure rates: against numerical minimisation, simulation and counting."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import chi2

from features.vocabulary import conform
from models.checkpointing import (
    CheckpointError,
    daly_interval_s,
    expected_loss,
    mttf_of_probability,
    overhead_ratio,
    runtimes_of,
    waste,
    young_interval_s,
)
from models.interruptions import CLASSES, Interruptions, measure, poisson_interval, prior, size_class
from pipelines.checkpoint_report import span
from pipelines.store import Store
from weatherglass import cli

NOW = datetime(2026, 3, 14, tzinfo=UTC)
DAY_S = 86_400.0


def wall_per_work(interval_s: float, checkpoint_s: float, mttf_s: float) -> float:
    """Time from one finished checkpoint to the next, per work, by solving E = p·(w + 0) + (1 − p)·(E[fail] + E)."""
    window = interval_s + checkpoint_s
    p = math.exp(-window / mttf_s)
    at_failure, _ = quad(lambda t: t * math.exp(-t / mttf_s) / mttf_s, 0, window)
    return (p * window + at_failure) / p / interval_s


@pytest.mark.parametrize(("checkpoint_s", "mttf_s"), [(30, 600), (60, 28_440), (60, 3e5), (600, 6480), (1200, 3600)])
def test_daly_is_at_the_minimum_that_a_search_finds(checkpoint_s: float, mttf_s: float) -> None:
    found = minimize_scalar(
        lambda log_tau: wall_per_work(math.exp(log_tau), checkpoint_s, mttf_s), bounds=(0, 14), method="bounded"
    )
    daly, young = daly_interval_s(checkpoint_s, mttf_s), young_interval_s(checkpoint_s, mttf_s)
    assert daly == pytest.approx(math.exp(found.x), rel=0.02)
    assert wall_per_work(daly, checkpoint_s, mttf_s) == pytest.approx(found.fun, rel=1e-4)
    assert wall_per_work(young, checkpoint_s, mttf_s) >= wall_per_work(daly, checkpoint_s, mttf_s) - 1e-9
    assert young == pytest.approx(math.sqrt(2 * checkpoint_s * mttf_s))
    assert overhead_ratio(daly, checkpoint_s, mttf_s) + 1 == pytest.approx(found.fun, rel=1e-4)


@pytest.mark.parametrize("checkpoint_s", [1.0, 60.0, 600.0])
@pytest.mark.parametrize("mttf_s", [3600.0, 1e5, 1e8])
@pytest.mark.parametrize("restart_s", [0.0, 300.0])
def test_nothing_wastes_less_than_the_advised_interval(checkpoint_s: float, mttf_s: float, restart_s: float) -> None:
    daly = daly_interval_s(checkpoint_s, mttf_s)
    least = waste(daly, checkpoint_s, mttf_s, restart_s).total
    for factor in (0.1, 0.5, 0.8, 1.25, 2.0, 10.0):
        other = waste(factor * daly, checkpoint_s, mttf_s, restart_s)
        assert other.total > least, factor
        assert (other.checkpoints < checkpoint_s / daly) == (factor > 1)
        assert (other.rework > waste(daly, checkpoint_s, mttf_s).rework) == (factor > 1), "rework alone misleads"


def test_checkpoints_that_cost_more_than_two_failures_come_once_a_failure() -> None:
    assert daly_interval_s(2000, 1000) == 1000
    assert daly_interval_s(1999, 1000) == pytest.approx(1000, rel=0.15)  # it joins on


def test_overhead_is_that_of_a_simulated_job() -> None:
    rng = np.random.default_rng(7)
    tau, cost, mttf, restart, windows = 900.0, 60.0, 3600.0, 120.0, 20_000
    redone = restarting = 0.0
    for _ in range(windows):
        while (fails := rng.exponential(mttf)) < tau + cost:
            redone += fails
            while (again := rng.exponential(mttf)) < restart:  # a restart may fail, too
                restarting += again
            restarting += restart
    found, work = waste(tau, cost, mttf, restart), windows * tau
    assert found.checkpoints == pytest.approx(cost / tau)
    assert found.rework == pytest.approx(redone / work, rel=0.03)
    assert found.restarts == pytest.approx(restarting / work, rel=0.03)
    assert found.total == pytest.approx(overhead_ratio(tau, cost, mttf, restart), rel=1e-9)
    assert waste(900, 60, 1e12, 300).total == pytest.approx(overhead_ratio(900, 60, 1e12, 300), rel=1e-5)
    assert overhead_ratio(1e9, 1, 1) == waste(1e9, 1, 1).total == math.inf


@pytest.mark.parametrize("interval_s", [None, 900.0, 5000.0])
def test_expected_loss_is_that_of_simulated_runs(interval_s: float | None) -> None:
    rng = np.random.default_rng(3)
    runtimes = np.array([600.0, 7200.0, 50_000.0])
    mttf, cost, restart, gpus, n = 20_000.0, 30.0, 300.0, 64, 400_000
    run, fails = rng.choice(runtimes, n), rng.exponential(mttf, n)
    hit = fails < run
    since = fails if interval_s is None else fails % (interval_s + cost)
    lost = np.where(hit, since + restart, 0.0).mean() * gpus / 3600
    found = expected_loss(runtimes, gpus, mttf, interval_s=interval_s, checkpoint_s=cost, restart_s=restart)
    assert found.lost_gpu_hours == pytest.approx(lost, rel=0.02)
    assert found.p_failure == pytest.approx(hit.mean(), rel=0.01)
    written = 0 if interval_s is None else np.floor(runtimes / (interval_s + cost)).mean() * cost * gpus / 3600
    assert found.checkpoint_gpu_hours == pytest.approx(written)


def test_loss_of_rare_failures_keeps_its_digits() -> None:
    found = expected_loss([3600.0], 8, 1e12)
    assert found.lost_gpu_hours == pytest.approx(8 / 3600 * 3600**2 / 2 / 1e12, rel=1e-6)


def test_a_probability_becomes_the_failure_time_that_gives_it() -> None:
    runtimes = runtimes_of([0.05, 0.5, 0.95], [60, 3600, 200_000])
    assert len(runtimes) == 400
    assert np.quantile(runtimes, 0.5) == pytest.approx(3600, rel=0.02)
    for p in (1e-6, 0.01, 0.3, 0.99):
        assert expected_loss(runtimes, 1, mttf_of_probability(p, runtimes)).p_failure == pytest.approx(p, rel=1e-6)
    assert mttf_of_probability(0.0, runtimes) == math.inf


def test_wrong_numbers_are_named() -> None:
    for call, word in (
        (lambda: young_interval_s(0, 1), "checkpoint_s=0"),
        (lambda: daly_interval_s(1, math.nan), "mttf_s"),
        (lambda: overhead_ratio(-1, 1, 1), "interval_s"),
        (lambda: overhead_ratio(1, 1, 1, -1), "restart_s"),
        (lambda: expected_loss([], 1, 1), "runtimes_s"),
        (lambda: expected_loss([1, -1], 1, 1), "runtimes_s"),
        (lambda: mttf_of_probability(1.0, [1]), "p_failure"),
        (lambda: runtimes_of([0.5, 0.2], [1, 2]), "levels must rise"),
        (lambda: runtimes_of([0.5], [1, 2]), "shape"),
    ):
        with pytest.raises(CheckpointError, match=word):
            call()


def test_poisson_intervals_are_garwoods() -> None:
    for count in (0, 1, 5, 100):
        low, high = poisson_interval(count)
        assert low == pytest.approx(chi2.ppf(0.025, 2 * count) / 2 if count else 0)
        assert high == pytest.approx(chi2.ppf(0.975, 2 * count + 2) / 2)
    assert poisson_interval(0)[1] == pytest.approx(3.6889, abs=1e-4)  # the textbook's figure


def a_job(nodes: tuple[str, ...], state: str, start_h: float, end_h: float | None, gpus: int = 8) -> dict[str, object]:
    return {
        "nodes": len(nodes), "gpus": gpus * len(nodes), "state": state, "node_list": ",".join(nodes) or None,
        "start_time": NOW - timedelta(hours=start_h),
        "end_time": None if end_h is None else NOW - timedelta(hours=end_h),
    }  # fmt: skip


def frame(*rows: dict[str, object]) -> pl.DataFrame:
    times = dict.fromkeys(("start_time", "end_time"), pl.Datetime("us", "UTC"))
    return pl.DataFrame(list(rows), schema_overrides=times)


def faults(*rows: tuple[str, datetime]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={"node": pl.String, "start_time": pl.Datetime("us", "UTC")}, orient="row")


def test_interruptions_are_counted_as_the_paper_attributes_them() -> None:
    end = NOW - timedelta(hours=24)
    jobs = frame(
        a_job(("n1",), "NODE_FAIL", 48, 24),
        a_job(("n2", "n3"), "FAILED", 48, 24),  # a fault of n3 nine minutes before
        a_job(("n4", "n5"), "FAILED", 48, 24),  # eleven minutes before
        a_job(("n6",), "FAILED", 48, 24),  # four minutes after
        a_job(("n7",), "FAILED", 48, 24),  # six minutes after
        a_job(("n8",), "COMPLETED", 48, 24),  # a fault in time, and it got through
        a_job(("n9",), "CANCELLED", 48, 24),
        a_job(("n10",), "RUNNING", 12, None),
        a_job(("n11",), "NODE_FAIL", 48, 24, gpus=0),  # no GPUs: not counted
        a_job((), "FAILED", 48, 24) | {"nodes": 1, "gpus": 8},
    )
    seen = faults(
        ("n3", end - timedelta(minutes=9)), ("n4", end - timedelta(minutes=11)), ("n6", end + timedelta(minutes=4)),
        ("n7", end + timedelta(minutes=6)), ("n8", end), ("n9", end), ("n2", end - timedelta(days=1)),
    )  # fmt: skip
    found = measure(jobs, seen, NOW)
    assert [rate.failures for rate in found.by_size] == [2, 1, 0, 0, 0]
    assert found.by_size[0].node_days == pytest.approx(1 + 1 + 1 + 1 + 1 + 0.5 + 1)
    assert found.by_size[1].node_days == pytest.approx(4)
    assert found.overall.failures == 3
    counted = found.overall.counted
    assert counted is not None
    assert counted[0] == pytest.approx(3 / 10.5)
    assert counted[1] < counted[0] < counted[2]


def test_jobs_without_nodes_or_gpus_are_counted_by_their_state() -> None:
    jobs = frame(a_job(("n1",), "NODE_FAIL", 48, 24), a_job(("n2",), "FAILED", 48, 24)).drop("node_list", "gpus")
    found = measure(jobs, faults(("n2", NOW - timedelta(hours=24))), NOW)
    assert (found.overall.failures, found.overall.node_days) == (1, pytest.approx(2))
    assert measure(jobs.clear(), faults(), NOW) == prior()


def test_rates_lean_on_the_published_ones_until_enough_was_seen() -> None:
    nothing = prior()
    assert nothing.overall.per_node_day * 1000 == pytest.approx(4.0)
    assert nothing.overall.counted is None
    value, low, high = nothing.mttf_s(128)
    assert low < value < high
    assert value == pytest.approx(DAY_S / (0.004 * 128))
    quiet = measure(frame(*[a_job(("n1",), "COMPLETED", 24 * 365, 0)] * 100), faults(), NOW)
    assert quiet.overall.per_node_day < 0.001 / 20  # 36,500 node-days without one: the prior no longer speaks
    busy = measure(frame(*[a_job(("n1",), "NODE_FAIL", 240, 0)] * 50), faults(), NOW)
    assert busy.overall.per_node_day == pytest.approx(0.1, rel=0.4)
    assert busy.of_nodes(200).per_node_day == pytest.approx(busy.overall.per_node_day)  # a size never seen


def test_measured_rates_are_those_that_made_the_failures_and_intervals_cover_them() -> None:
    rng, inside, true = np.random.default_rng(5), 0, 0.05
    for _ in range(60):
        length_h, runs = 24.0, 400
        hit = rng.random(runs) < 1 - math.exp(-true * 2)
        ends = np.where(hit, rng.uniform(0, length_h, runs), 0.0)
        rows = [
            a_job(("a", "b"), "NODE_FAIL" if bad else "COMPLETED", length_h, float(end))
            for bad, end in zip(hit, ends, strict=True)
        ]
        found: Interruptions = measure(frame(*rows), faults(), NOW)
        rate = found.by_size[1]
        inside += rate.low < true < rate.high
    assert inside >= 52  # 95 % of 60 are 57


def test_size_classes_have_no_gap() -> None:
    assert [size_class(n) for n in (1, 2, 8, 9, 32, 33, 128, 129, 10**7)] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(after[0] == before[1] + 1 for before, after in pairwise(CLASSES))
    with pytest.raises(ValueError, match="nodes=0"):
        size_class(0)


def test_lengths_read_well() -> None:
    assert [span(s) for s in (59, 600, 8000, 2 * DAY_S, math.inf)] == ["59 s", "10 min", "2.22 h", "2 d", "for ever"]
    assert [span(s) for s in (5400, 150 * 60 - 60, 9873 * DAY_S)] == ["90 min", "2.48 h", "9,873 d"]


def write_settings(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> str:
    path = folder / "w.toml"
    path.write_text(f'state_dir = "{folder}/state"\n{body}')
    monkeypatch.setenv("WEATHERGLASS_CONFIG", str(path))
    return str(path)


def test_the_command_without_clusters_speaks_from_published_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(tmp_path, "", monkeypatch)
    run = ["checkpoint-advice", "--gpus", "1024", "--checkpoint-s", "60", "--runtime", "7d"]
    done = CliRunner().invoke(cli, run)
    assert done.exit_code == 0, done.output
    assert "no cluster is configured" in done.output
    assert "6.50 and 2.34" in done.output
    assert "fail every 46.9 h" in done.output
    read = json.loads(CliRunner().invoke(cli, [*run, "--json"]).output)
    rules = {(row["rule"], row["interval_s"]): row for row in read["rules"]}
    assert min(rules.values(), key=lambda row: row["overhead_ratio"])["rule"] == "Daly"
    assert ("rule of thumb", 3600.0) in rules
    without = read["without_checkpoints"]
    assert without["lost_gpu_hours_of_run"] > without["lost_gpu_hours_at_first_failure"] > 10_000
    daly = rules["Daly", read["interval_s"]]
    assert {"Daly ÷ 2", "Daly × 2"} <= {rule for rule, _ in rules}
    for name in ("overhead_ratio", "lost_gpu_hours_per_day", "lost_gpu_hours_of_run"):
        assert all(row[name] >= daly[name] for row in rules.values()), name
    for row in rules.values():
        parts = sum(row[f"{part}_ratio"] for part in ("checkpoint", "rework", "restart"))
        assert row["overhead_ratio"] == pytest.approx(parts)
    assert row["lost_gpu_hours_of_run"] == pytest.approx(1024 * 7 * 24 * row["overhead_ratio"])


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "1e99", "x"])
@pytest.mark.parametrize("option", ["--gpus", "--checkpoint-s", "--restart-s", "--gpus-per-node", "--runtime"])
def test_the_command_refuses_numbers_that_cannot_be(option: str, wrong: str) -> None:
    whole = {"--gpus": "8", "--checkpoint-s": "60", option: wrong}
    done = CliRunner().invoke(cli, ["checkpoint-advice", *(word for pair in whole.items() for word in pair)])
    if (option, wrong) == ("--restart-s", "0"):  # it works again at once
        assert done.exit_code != 2
        return
    assert done.exit_code == 2, done.output
    assert f"'{option}'" in done.output


def test_the_command_counts_what_the_store_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_settings(tmp_path, "[clusters.alpha]\n\n[clusters.beta]\n", monkeypatch)
    begin = datetime.now(UTC) - timedelta(days=10)
    rows = [
        {
            "cluster": cluster, "job_id": str(i), "submit_time": begin, "start_time": begin,
            "end_time": begin + timedelta(days=1), "nodes": 4, "gpus": 16, "node_list": "n1,n2,n3,n4",
            "state": "NODE_FAIL" if i < 8 and cluster == "alpha" else "COMPLETED",
        }
        for cluster in ("alpha", "beta") for i in range(100)
    ]  # fmt: skip
    nodes = [{"cluster": "alpha", "node": f"n{i}", "gpus": 4, "observed_at": begin} for i in range(1, 5)]
    from pipelines.settings import load_settings

    settings = load_settings(config)
    with Store.open(settings.store_url, settings.store_data_path) as store:
        store.transact(lambda writer: writer.upsert("core_jobs", conform(pl.DataFrame(rows), "core_jobs")))
        store.transact(lambda writer: writer.upsert("core_nodes", conform(pl.DataFrame(nodes), "core_nodes")))
    run = ["checkpoint-advice", "--gpus", "16", "--checkpoint-s", "30"]
    done = CliRunner().invoke(cli, [*run, "--cluster", "alpha", "--json"])
    assert done.exit_code == 0, done.output
    read = json.loads(done.output)
    assert (read["cluster"], read["nodes"]) == ("alpha", 4)  # 4 GPUs a node, as the inventory says
    per_node_day = DAY_S / read["mttf_s"] / 4
    assert per_node_day == pytest.approx(8 / 400, rel=0.1)
    text = CliRunner().invoke(cli, [*run, "--cluster", "alpha"]).output
    assert "8 in        400.0 node-days: 20 per 1,000" in text
    several = CliRunner().invoke(cli, run)
    assert several.exception is not None
    assert "--cluster" in str(several.exception)

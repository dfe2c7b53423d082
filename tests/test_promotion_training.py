"""Promotion through whole trainings: idle clusters, what is held while running, a champion that changes meanwhile."""

from datetime import UTC, datetime, timedelta

import dagster as dg
import numpy as np
import polars as pl
import pytest

from models.forest import ForestSize
from models.registry import Registry
from models.tasks import FailureTask, RuntimeTask, WaitTask
from models.training import train
from pipelines.definitions import build_definitions
from tests.store_child import open_store

START = datetime(2026, 1, 5, tzinfo=UTC)
DAYS = 30


def _jobs(count=1_200, seed=2):
    """A nearly idle cluster: only the nightly burst of one queue waits, for a time that depends on its size."""
    drawn = np.random.default_rng(seed)
    rows = []
    for number, second in enumerate(np.sort(drawn.uniform(0, DAYS * 86_400, count))):
        hour = int(second % 86_400) // 3600
        user, cpus = int(drawn.integers(8)), int(drawn.choice([4, 16, 64]))
        limit_s = round(1_800 * 48 ** drawn.random())
        is_late = hour in (1, 2) and user < 6
        wait_s = round(60.0 * cpus * drawn.lognormal(0, 0.3)) if is_late else 0
        run_s = max(1, round(min(limit_s, 0.2 * limit_s * drawn.lognormal(0, 0.4))))
        submit = START + timedelta(seconds=round(float(second)))
        start = submit + timedelta(seconds=wait_s)
        rows.append({
            "cluster": "idle", "job_id": str(number), "user": f"u{user}", "queue": "batch", "name": "job",
            "nodes": 1, "cpus": cpus, "gpus": 0, "time_limit_s": limit_s, "submit_time": submit, "start_time": start,
            "end_time": start + timedelta(seconds=run_s), "state": "FAILED" if drawn.random() < 0.1 else "COMPLETED",
        })  # fmt: skip
    times = dict.fromkeys(("submit_time", "start_time", "end_time"), pl.Datetime("us", "UTC"))
    return pl.DataFrame(rows).cast(times)


@pytest.fixture(scope="module")
def jobs():
    return _jobs()


AT = START + timedelta(days=DAYS + 3)


def test_waits_of_an_idle_cluster_are_not_shut_out_by_their_coverage(jobs, tmp_path):
    registry = Registry(tmp_path)
    report = train(WaitTask(ForestSize(trees=12, min_leaf=10)), jobs, registry, AT)
    assert report.is_judged
    scores = dict(report.scores.filter(pl.col("baseline") == "").select("metric", "value").iter_rows())
    assert scores["coverage_80"] > 0.90, "nearly all waits are none at all"
    assert scores["covered_share_80"] == pytest.approx(0.80, abs=0.09)
    assert "out of guard" not in report.reason
    assert "odds of a start" in report.reason
    [held] = registry.versions("wait")[0]["held"]
    assert held["loss"] == "odds of a start"
    assert held["blocks"] >= 30


class _Overtaken(Registry):
    """Another training promotes its model after this one has judged and kept its own."""

    def save(self, task, files, card):
        other = super().save(task, files, {"trained_at": AT - timedelta(minutes=5)})
        self.promote(task, other, "first", at=AT)
        return super().save(task, files, card)


def test_a_training_that_was_overtaken_changes_nothing_and_says_so(jobs, tmp_path):
    task = RuntimeTask(ForestSize(trees=6))
    alone = train(task, jobs, Registry(tmp_path / "alone"), AT)
    assert alone.promoted, alone.reason
    assert "time left" in alone.reason
    registry = _Overtaken(tmp_path / "overtaken")
    late = train(task, jobs, registry, AT)
    assert not late.promoted
    [first] = [item["version"] for item in registry.history("runtime")]
    assert registry.champion("runtime") == first != late.version
    assert f"{first} has taken charge meanwhile" in late.reason
    assert "the baseline was judged against: nothing was changed; the next training is judged against it" in late.reason
    assert late.version in {card["version"] for card in registry.versions("runtime")}
    card = next(card for card in registry.versions("runtime") if card["version"] == late.version)
    assert card["judged_against"] is None
    figures = {item["metric"] for item in card["metrics"]}
    assert {"remaining_male_60s", "remaining_male_600s", "remaining_male_3600s"} <= figures
    assert [item["loss"] for item in card["held"]] == ["time left"]


def test_a_card_names_whom_it_was_judged_against_where_the_champion_is_damaged(jobs, tmp_path):
    registry, task = Registry(tmp_path), FailureTask(10)
    names = []
    for days in (3, 2):
        names.append(train(task, jobs, registry, AT - timedelta(days=days)).version)
        registry.promote("job_failure", names[-1], "for the test")
    for path in (tmp_path / "job_failure" / names[1]).glob("*.txt"):
        path.write_bytes(b"damaged")
    again = train(task, jobs, registry, AT)
    [card] = [card for card in registry.versions("job_failure") if card["version"] == again.version]
    assert card["judged_against"] == names[0]
    assert f"champion {names[0]}" in again.reason


def test_a_withdrawn_champion_is_no_rival(jobs, tmp_path):
    """After `withdraw` the baseline is in charge: the next training has to beat that."""
    registry = Registry(tmp_path)
    task = FailureTask(10)
    first = train(task, jobs, registry, AT - timedelta(days=1))
    registry.promote("job_failure", first.version, "for the test")
    registry.withdraw("job_failure", "worse since Monday")
    again = train(task, jobs, registry, AT)
    assert first.version not in again.reason
    assert "baseline" in again.reason


def test_dagster_shows_what_could_not_be_judged_in_yellow(tmp_path):
    """A cluster without any fault: nothing went wrong, and nothing is known of the challenger either."""
    config = tmp_path / "weatherglass.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\n[clusters.alpha]\n')
    open_store(tmp_path / "state" / "store").close()
    job = build_definitions(str(config)).resolve_implicit_global_asset_job_def()
    with dg.instance_for_test() as instance:
        result = job.execute_in_process(instance=instance, asset_selection=[dg.AssetKey("model_node_failure")])
    checks = {event.check_name: event for event in result.get_asset_check_evaluations()}
    assert set(checks) == {"went_well", "could_be_judged"}
    assert checks["went_well"].passed
    assert not checks["could_be_judged"].passed
    assert checks["could_be_judged"].severity == dg.AssetCheckSeverity.WARN
    assert checks["could_be_judged"].description.startswith("alpha: could not judge: climatology stays: ")

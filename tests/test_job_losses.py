"""Expected losses of forecast jobs against the rules for one job, and reported progress in what is published."""

from __future__ import annotations

from datetime import timedelta
from time import process_time
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

from features.vocabulary import QUANTILE_COLUMNS, conform
from models.checkpointing import daly_interval_s, expected_loss
from models.interruptions import measure, prior
from models.job_losses import LOSS_COLUMNS, failure_rates, with_losses
from pipelines import job_evidence as evidence_module
from pipelines.job_evidence import JobEvidence, enriched, job_evidence
from pipelines.job_history import ingest_jobs
from pipelines.job_progress import load_sent_progress
from pipelines.publish import publish_jobs
from pipelines.settings import parse_settings
from pipelines.store import Store
from scheduler_hints.api import create_app
from scheduler_hints.schema import JobForecast
from scheduler_hints.snapshot import read_snapshot, snapshot_path
from tests.hints_support import ask
from tests.pipelines_world import START, Queue, job, jobs_frame, seconds
from tests.store_child import open_store

SEEN = measure(
    pl.DataFrame({
        "nodes": [4, 4, 1], "gpus": [32, 32, 8], "state": ["NODE_FAIL", "COMPLETED", "COMPLETED"],
        "start_time": [START - timedelta(days=9)] * 3, "end_time": [START - timedelta(days=d) for d in (8, 2, 1)],
    }),
    pl.DataFrame(schema={"node": pl.String, "start_time": pl.Datetime("us", "UTC")}), START,
)  # fmt: skip
COSTS = {"checkpoint_s": 60.0, "restart_s": 300.0}


def rows_of(n: int, seed: int = 1, **more: Any) -> tuple[pl.DataFrame, pl.DataFrame]:
    rng = np.random.default_rng(seed)
    quantiles = pl.DataFrame(np.sort(rng.lognormal(9, 1.5, (n, 8)), axis=1), schema=list(QUANTILE_COLUMNS))
    ids = [str(k) for k in range(n)]
    facts = {
        "job_id": ids, "forecast": ["runtime", "remaining"] * (n // 2), "p_fail": rng.uniform(0.2, 0.5, n),
        "p_node_failure": 10 ** rng.uniform(-6, -0.8, n),
    }  # fmt: skip
    jobs = {"job_id": ids, "gpus": [32] * n, "nodes": [4] * n, "start_time": [START - timedelta(hours=2)] * n}
    return pl.DataFrame(facts | more).hstack(quantiles), pl.DataFrame(jobs)


def test_many_jobs_are_told_what_the_rules_say_of_one() -> None:
    rows, jobs = rows_of(60)
    found = with_losses(rows, jobs, SEEN, START, **COSTS)
    assert found.columns == [*rows.columns, *LOSS_COLUMNS]
    at = (np.arange(16) + 0.5) / 16
    for row in found.iter_rows(named=True):
        times = np.exp(np.interp(at, [float(c[1:3]) / 100 for c in QUANTILE_COLUMNS],
                                 np.log([row[c] for c in QUANTILE_COLUMNS])))  # fmt: skip
        [rate] = failure_rates(np.array([row["p_node_failure"]]), times[None])
        assert float(-np.expm1(-times * rate).mean()) == pytest.approx(row["p_node_failure"], rel=1e-6)
        interval_s = daly_interval_s(60, SEEN.mttf_s(4)[0])
        assert row["checkpoint_interval_s"] == pytest.approx(interval_s)
        without = expected_loss(times, 32, 1 / rate, restart_s=300)
        done_s = 7200 if row["forecast"] == "remaining" else 0  # what it has done so far is at stake
        assert row["lost_gpu_hours_hardware"] == pytest.approx(
            without.lost_gpu_hours + done_s * row["p_node_failure"] * 32 / 3600, rel=1e-5
        )
        kept = expected_loss(times, 32, 1 / rate, interval_s=interval_s, checkpoint_s=60, restart_s=300)
        assert row["lost_gpu_hours_checkpointed"] == pytest.approx(
            kept.lost_gpu_hours + kept.checkpoint_gpu_hours, rel=1e-5
        )
        assert row["lost_gpu_hours"] >= row["lost_gpu_hours_hardware"] > 0


def test_a_certain_run_that_is_sure_to_fail_loses_itself() -> None:
    rows, jobs = rows_of(2, p_fail=[1.0, 1.0], p_node_failure=[0.0, 0.0])
    rows = rows.with_columns(pl.lit(3600.0).alias(name) for name in QUANTILE_COLUMNS)
    found = with_losses(rows, jobs, SEEN, START, checkpoint_s=60, restart_s=0)
    assert found["lost_gpu_hours"].to_list() == pytest.approx([32.0, 3 * 32.0])
    assert found["lost_gpu_hours_hardware"].to_list() == [0.0, 0.0]


def test_what_is_unknown_is_null() -> None:
    rows, jobs = rows_of(4, p_node_failure=[None, 0.1, 0.1, 0.1])
    jobs = jobs.with_columns(gpus=pl.Series([32, 0, 32, None]), nodes=pl.Series([4, 4, None, 4]))
    found = with_losses(rows, jobs, SEEN, START, **COSTS)
    known = found.select(pl.col(LOSS_COLUMNS).is_not_null()).rows()
    assert known == [(False, False, False, True), (False,) * 4, (True, True, False, False), (False,) * 4]
    no_failure_yet = with_losses(rows, jobs, prior(), START, **COSTS)
    assert no_failure_yet["checkpoint_interval_s"].null_count() == 4
    assert no_failure_yet["lost_gpu_hours"].to_list() == found["lost_gpu_hours"].to_list()
    waits = rows.with_columns(forecast=pl.lit("wait"))
    assert with_losses(waits, jobs, SEEN, START, **COSTS).select(LOSS_COLUMNS).null_count().row(0) == (4,) * 4
    assert with_losses(rows.clear(), jobs, SEEN, START, **COSTS).is_empty()


def test_a_thousand_jobs_cost_milliseconds() -> None:
    rows, jobs = rows_of(1000)
    spent = []
    for _ in range(7):
        began = process_time()
        with_losses(rows, jobs, SEEN, START, **COSTS)
        spent.append(process_time() - began)
    assert min(spent) < 0.05, "of the processor; about 5 ms where nothing else runs"


# --- published ----------------------------------------------------------------------------------------------


def reports(job_id: str, since_s: float, until_s: float, first_step: int = 0) -> pl.DataFrame:
    """A step each 2 s, of 1,000, told each minute."""
    at = np.arange(since_s + 60, until_s + 1, 60)
    frame = pl.DataFrame({
        "job_id": [job_id] * len(at), "ts": [START + seconds(int(t)) for t in at], "cluster": "alpha",
        "step": (first_step + (at - since_s) / 2).astype(int), "max_steps": 1000, "step_time_s": 2.0, "source": "api",
        "phase": "train",
    })  # fmt: skip
    return conform(frame, "core_job_progress")


@pytest.fixture
def settings(tmp_path: Any) -> Any:
    return parse_settings({"state_dir": str(tmp_path / "state"), "clusters": {"alpha": {}}}, {})


@pytest.fixture
def store(settings: Any) -> Any:
    with open_store(settings.state / "store") as opened:
        yield opened


def test_published_jobs_carry_their_progress_and_losses(store: Store, settings: Any) -> None:
    ended = [job(str(k), -90_000 + 900 * k, -89_000 + 900 * k, -87_000 + 900 * k, user="u1") for k in range(60)]
    running = job("r", -700, -600, state="RUNNING", user="u1", seen_s=0)
    queue = Queue(*ended, running, job("p", -60, state="PENDING", nodes=(), user="u2", seen_s=0))
    ingest_jobs(store, queue, "alpha", START)
    app = create_app(settings.published, ["alpha"])
    rows = reports("r", -600, 0).select("job_id", "ts", "step", "max_steps", "step_time_s", "phase").to_dicts()
    body = msgspec.json.encode({"cluster": "alpha", "rows": rows})
    sent = ask(app, "/v1/progress", method="POST", body=body, headers={"content-type": "application/json"})
    assert sent.status == 200, sent.body
    load_sent_progress(store, settings.published, "alpha", START)
    publish_jobs(store, queue, settings, "alpha", START + seconds(5))
    snapshot = read_snapshot(snapshot_path(settings.published, "alpha", "jobs"))
    items = {item.job_id: item for item in (msgspec.json.decode(i, type=JobForecast) for i in snapshot.items)}
    one = items["r"]
    assert (one.progress.step, one.progress.max_steps, one.progress.step_time_s) == (300, 1000, 2.0)
    assert (one.progress.phase, one.progress.reported_at) == ("train", START)
    assert one.reasons[0] == "reported progress: step 300 of 1,000 at 2 s"
    assert one.model_version.endswith("+progress")
    assert not any("+" in version for version in snapshot.model_versions.values())
    assert one.remaining.q95_s < 3 * 1400
    assert items["p"].progress is None
    for item in items.values():
        gpus_known = bool(item.gpus)
        assert (item.lost_gpu_hours is not None) == gpus_known
        assert item.checkpoint_interval_s is None, "no failure was counted"
    kept = store.query("SELECT * FROM out_job_forecasts WHERE job_id = 'r'").row(0, named=True)
    assert kept["model_version"] == one.model_version
    assert kept["lost_gpu_hours"] == one.lost_gpu_hours


def test_evidence_is_kept_for_hours_and_counted_anew_when_it_cannot_be_read(
    store: Store, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [job(str(k), -9000, -8000 + k, -6000, nodes=("n1",)) for k in range(3)]
    ingest_jobs(store, Queue(*ended, job("f", -9000, -8000, -7000, state="NODE_FAIL")), "alpha", START)
    for k in range(3):
        store.transact(lambda w, k=k: w.upsert("core_job_progress", reports(str(k), -8000, -6000)))
    first = job_evidence(store, settings, "alpha", START)
    assert (first.progress.ended, first.progress.reached) == (3, 3)
    assert first.interruptions.overall.failures == 1
    path = settings.state / "evidence" / "alpha.json"
    assert msgspec.json.decode(path.read_bytes(), type=JobEvidence) == first
    with monkeypatch.context() as patch:
        patch.setattr(evidence_module, "progress_evidence", lambda *_: pytest.fail("it is kept"))
        assert job_evidence(store, settings, "alpha", START + timedelta(hours=5)) == first
    later = job_evidence(store, settings, "alpha", START + timedelta(hours=7))
    assert later.made_at == START + timedelta(hours=7)
    path.write_bytes(b"{")
    assert job_evidence(store, settings, "alpha", START) == first
    assert job_evidence(store, settings, "alpha", START - timedelta(hours=1)).made_at < START, "a clock set back"


def test_reports_of_later_change_no_forecast(store: Store, settings: Any) -> None:
    running = job("r", -700, -600, state="RUNNING", user="u1", seen_s=0)
    ingest_jobs(store, Queue(running), "alpha", START)
    store.transact(lambda w: w.upsert("core_job_progress", reports("r", -600, 0)))
    rows = pl.DataFrame({name: [900.0 * (k + 1)] for k, name in enumerate(QUANTILE_COLUMNS)}).with_columns(
        job_id=pl.lit("r"), forecast=pl.lit("remaining"), model_version=pl.lit("x"), reasons=pl.lit(""),
        p_fail=pl.lit(0.2), p_node_failure=pl.lit(0.01),
    )  # fmt: skip
    jobs = jobs_frame([running])
    before, told = enriched(store, settings, "alpha", rows, jobs, START)
    store.transact(lambda w: w.upsert("core_job_progress", reports("r", 0, 600, 5000)))
    after, told_after = enriched(store, settings, "alpha", rows, jobs, START)
    assert before.equals(after)
    assert told.equals(told_after)
    assert before["model_version"][0] == "x+progress"

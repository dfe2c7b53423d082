"""Publish and retrain: forecasts become snapshots and rows, the nowcast's journal becomes history, models are kept."""

import os
import random
import re
from datetime import UTC, datetime, timedelta

import msgspec
import polars as pl
import pytest

from features.vocabulary import QUANTILE_COLUMNS, conform, schema
from models.registry import Registry
from pipelines import adapters
from pipelines.job_history import ingest_jobs
from pipelines.publish import job_forecasts, load_journal, node_risks, publish_jobs, publish_node_risks
from pipelines.retrain import retrain_task, sampled_nodes
from pipelines.settings import parse_settings
from pipelines.steps import publish_jobs_of, retrain_of
from pipelines.store import StoreMissing
from scheduler_hints.errors import ForecastUnavailableError
from scheduler_hints.journal import Journal, journal_files
from scheduler_hints.schema import Bottleneck, JobForecast, NodeRisk, ReservationPlan, Window
from scheduler_hints.snapshot import Publisher, read_snapshot, snapshot_path
from tests.pipelines_world import START, Queue, job, jobs_frame, samples, seconds
from tests.store_child import open_store


@pytest.fixture
def settings(tmp_path):
    return parse_settings({"state_dir": str(tmp_path / "state"), "clusters": {"alpha": {}}}, {})


@pytest.fixture
def store(settings):
    with open_store(settings.state / "store") as opened:
        yield opened


def bottleneck(uuid, probability=0.7):
    return Bottleneck(
        id=f"b-{uuid}", cluster="alpha", bottleneck_class="thermal_throttle", scope="gpu", node="n1", gpu_uuid=uuid,
        rack="r1", pod="p1", horizon_s=60, probability=probability, probabilities={"60": probability},
        expected_onset=START + seconds(40), is_active=False, job_ids=["7"], action="none", reasons=["hot"],
        model_version="v1",
    )  # fmt: skip


def window():
    return Window(
        id="w1", cluster="alpha", nodes=["n1", "n2"], gpus=16, start=START, end=START + seconds(600), duration_s=600.0,
        confidence=0.9, scope="rack", rack="r1", pod="p1", bounded_by="9", fits_jobs=["3", "4"],
    )  # fmt: skip


def plan():
    return ReservationPlan(
        id="p1", cluster="alpha", job_id="3", user="ada", account=None, nodes=["n1"], start=START,
        end=START + seconds(900), because=["b-GPU-00"], benefit="starts on whole nodes", cost_if_wrong_gpu_s=10.0,
    )  # fmt: skip


def publish(settings, journal, kind, items, versions=None):
    publisher = Publisher(settings.published, "alpha")
    snapshot = publisher.publish(kind, items, ttl_s=30, data_age_s=1, model_versions=versions or {"bottleneck": "v1"})
    assert journal.append(snapshot)
    return snapshot


def test_what_the_nowcast_said_is_kept_and_loaded_once(store, settings):
    journal = Journal(settings.published, "alpha", min_interval_s=0)
    first = publish(settings, journal, "bottlenecks", [bottleneck("GPU-00"), bottleneck("GPU-01", 0.9)])
    publish(settings, journal, "backfill-windows", [window()])
    publish(settings, journal, "reservation-plans", [plan()])
    now = first.generated_at
    assert load_journal(store, settings, "alpha", now) == 4
    assert load_journal(store, settings, "alpha", now) == 0
    second = publish(settings, journal, "bottlenecks", [])
    assert load_journal(store, settings, "alpha", now) == 1
    rows = store.query("SELECT * FROM out_hints ORDER BY kind, version, hint_id")
    assert rows["kind"].to_list() == ["backfill-windows", *["bottlenecks"] * 3, "reservation-plans"]
    hint = rows.filter(pl.col("hint_id") == "b-GPU-01").row(0, named=True)
    assert (hint["probability"], hint["horizon_s"], hint["job_id"], hint["node"]) == (0.9, 60, "7", "n1")
    assert hint["expected_onset"] == START + seconds(40)
    assert hint["valid_until"] - hint["generated_at"] == timedelta(seconds=30)
    assert msgspec.json.decode(hint["detail"], type=Bottleneck) == bottleneck("GPU-01", 0.9)
    empty = rows.filter(pl.col("version") == second.version, pl.col("kind") == "bottlenecks").row(0, named=True)
    assert (empty["hint_id"], empty["detail"]) == ("", None)
    assert rows.filter(pl.col("kind") == "backfill-windows")["job_id"][0] == "3,4"


def test_journal_files_go_when_their_hour_is_over_and_settled(store, settings):
    journal = Journal(settings.published, "alpha", min_interval_s=0)
    snapshot = publish(settings, journal, "bottlenecks", [bottleneck("GPU-00")])
    [path] = journal_files(settings.published, "alpha")
    with path.open("ab") as file:
        file.write(b'{"cut off by a cra')
    later = snapshot.generated_at + timedelta(hours=2)
    os.utime(path, (later.timestamp(), later.timestamp()))  # written a moment ago: a line may be on its way
    load_journal(store, settings, "alpha", later)
    assert path.exists()
    os.utime(path, (snapshot.generated_at.timestamp(),) * 2)
    load_journal(store, settings, "alpha", later)
    assert not path.exists()
    assert store.query("SELECT count(*) AS n FROM out_hints")["n"][0] == 1


def test_what_is_no_hint_in_a_journal_is_passed_over_and_keeps_nothing_else_back(store, settings, caplog):
    journal = Journal(settings.published, "alpha", min_interval_s=0)
    snapshot = publish(settings, journal, "bottlenecks", [bottleneck("GPU-00")])
    [path] = journal_files(settings.published, "alpha")
    good = msgspec.json.decode(path.read_bytes())
    item = good["items"][0]
    wrong = [
        7,
        None,
        "x",
        [],
        {"job_ids": [1]},
        {"probability": "high"},
        {"expected_onset": "soon"},
        {"horizon_s": 1e9},
    ]
    lines = [
        {**good, "version": 10**6, "items": [*wrong, item | {"expected_onset": "9999-12-31T23:59:59-14:00"}]},
        {**good, "version": 2**63},
        {**good, "generated_at": "9999-12-31T23:59:59-14:00"},
        {**good, "generated_at": "2026-03-14T03:12:00"},
        {**good, "ttl_s": 1e300},
        [],
    ]
    earlier = path.with_name("2000-01-01T00.jsonl")
    earlier.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    path.write_bytes(msgspec.json.encode({**good, "version": 10**6 + 1}) + b"\n")
    assert load_journal(store, settings, "alpha", snapshot.generated_at) == 2
    assert caplog.text.count("passed over") == len(wrong) + 4
    rows = store.query("SELECT version, hint_id, expected_onset FROM out_hints ORDER BY version").rows()
    assert rows[0] == (10**6, "b-GPU-00", None)
    assert rows[1][:2] == (10**6 + 1, "b-GPU-00")


def forecast_row(job_id, forecast, low, **more):
    quantiles = {name: low + 10.0 * i for i, name in enumerate(QUANTILE_COLUMNS)}
    return {"job_id": job_id, "forecast": forecast, "model_version": "m1", "generated_at": START, **quantiles, **more}


def test_forecast_rows_become_the_published_shape():
    jobs = jobs_frame(
        [job(1, 0, 60, state="RUNNING"), job(2, 10, state="PENDING", nodes=()), job(3, 10, state="PENDING")]
    )
    rows = pl.DataFrame(
        [
            forecast_row("1", "runtime", 100.0, p_fail=0.2),
            forecast_row(
                "1", "remaining", 50.0, reasons="about 2× longer than usual here (1 min); ×2: asks for 1 node"
            ),
            forecast_row("2", "wait", 5.0, p_start_60s=0.4),
        ],
        schema_overrides={name: dtype for name, dtype in schema("out_job_forecasts").items() if name != "cluster"},
    )
    items = job_forecasts(jobs, rows)
    assert [item.job_id for item in items] == ["1", "2"]  # of the third nothing is known
    assert (items[0].runtime.q05_s, items[0].remaining.q95_s, items[0].wait) == (100.0, 120.0, None)
    assert (items[0].p_fail, items[0].node_list, items[0].start_time) == (0.2, ["n1"], START + seconds(60))
    assert items[0].reasons == ["about 2× longer than usual here (1 min)", "×2: asks for 1 node"]
    assert items[1].reasons == []
    assert (items[1].wait.q05_s, items[1].p_start_60s, items[1].runtime, items[1].node_list) == (5.0, 0.4, None, [])


def test_node_risks_become_the_published_shape():
    rows = pl.DataFrame(
        {
            "cluster": ["alpha"], "node": ["n1"], "p_1h": [0.1], "p_24h": [0.2], "p_7d": [0.3],
            "reasons": ["XID 48; ECC "], "model_version": ["climatology"],
        }
    )  # fmt: skip
    [risk] = node_risks(rows)
    assert (risk.p_24h, risk.reasons, risk.is_climatology) == (0.2, ["XID 48", "ECC"], True)


def test_gpus_that_are_as_likely_stand_by_their_faults() -> None:
    rate = {"node": "n1", "p_1h": 0.001, "p_24h": 0.01, "p_7d": 0.06, "model_version": "baseline:climatology"}
    rows = pl.DataFrame([{"cluster": "alpha", "reasons": "", **rate}])
    told = {
        "a": "1 fault in 28 d",
        "b": "2 faults in 28 d",
        "c": "remap pending",
        "d": "18 faults in 28 d; remap pending",
    }
    gpus = pl.DataFrame([{**rate, "gpu_uuid": uuid, "reasons": reasons} for uuid, reasons in told.items()])
    likelier = gpus.with_columns(p_24h=pl.when(gpu_uuid="c").then(0.02).otherwise("p_24h"))
    for of_gpus, order in ((gpus, "dbac"), (gpus.reverse(), "dbac"), (likelier, "cdba")):
        [risk] = node_risks(rows, of_gpus)
        assert "".join(gpu.gpu_uuid for gpu in risk.gpus) == order


def test_forecasts_on_request_keep_what_they_know_and_take_in_what_is_new(store, settings, monkeypatch):
    queue = Queue(*many_jobs(60, START + timedelta(hours=4)))
    ingest_jobs(store, queue, "alpha", START)
    monkeypatch.setattr(adapters, "_HISTORY_DAYS", 36_500.0)  # the jobs are older than any test
    forecasts = adapters.RuntimeForecasts(settings)
    asked = {"user": "newcomer", "nodes": 1, "gpus": 4, "time_limit_s": 7200, "submit_time": START + timedelta(days=1)}
    before = datetime.now(UTC)
    said = forecasts("alpha", [asked, {**asked, "gpu_type": "h100", "node_features": "nvme"}])
    first, second = said.runtimes
    assert first == second, "what is not submitted is no past of another"
    assert (said.model_version.split(":")[0], said.ended_jobs, said.ttl_s) == ("baseline", 60, 600)
    assert said.modes_s == [first.q50_s] * 2, "a baseline has one point"
    heard_at = max(START, *(row["observed_at"] for row in queue.rows))  # the last look, or the newest word
    assert before <= heard_at + timedelta(seconds=said.data_age_s) <= datetime.now(UTC)
    known = forecasts._known["alpha"]
    history, count = known.history, known.history.table.count
    assert count == 60
    queue.rows.append({**job("late", -900, -800, -500, user="newcomer", gpus=4, seen_s=3600), "time_limit_s": 7200})
    ingest_jobs(store, queue, "alpha", START + timedelta(hours=1))
    [after] = forecasts("alpha", [asked]).runtimes
    assert (after, known.history.table.count) == (first, count), "younger than two minutes"
    known.read_at -= 121
    [after] = forecasts("alpha", [asked]).runtimes
    assert known.history is history, "not made anew"
    assert known.history.table.count == 61
    assert after.q50_s == pytest.approx(300, rel=0.01)
    assert first.q50_s != pytest.approx(300, rel=0.2)
    # Rows that do not tell when they were heard of, as of a file: new ones with old dates, and what changed of them.
    silent = {**job("old", -90_000, -80_000, -79_500, user="stranger"), "observed_at": None, "time_limit_s": 7200}
    for row, seen in (({**silent, "end_time": None, "state": "RUNNING"}, 61), (silent, 62)):
        rows = conform(jobs_frame([row]), "core_jobs")
        store.transact(lambda writer, rows=rows: writer.upsert("core_jobs", rows))
        store.compact(datetime.now(UTC))
        known.read_at -= 121
        said = forecasts("alpha", [asked | {"user": "stranger"}])
        assert said.ended_jobs == seen
        assert known.history is history, "not made anew"
    assert said.runtimes[0].q50_s == pytest.approx(500, rel=0.01)


def test_a_cluster_without_any_ended_job_says_what_its_forecasts_rest_on(store, settings):
    queue = Queue(job("p", -60, state="PENDING", nodes=(), user="u2", seen_s=0))
    ingest_jobs(store, queue, "alpha", START)
    said = adapters.RuntimeForecasts(settings)("alpha", [{"time_limit_s": 7200, "submit_time": START}])
    assert (said.model_version, said.ended_jobs) == ("baseline:no_history", 0)
    assert said.runtimes[0].q50_s == pytest.approx(7200)
    assert (
        publish_jobs(store, queue, settings, "alpha", START + seconds(5)).model_versions["runtime"]
        == said.model_version
    )
    snapshot = read_snapshot(snapshot_path(settings.published, "alpha", "jobs"))
    [item] = [msgspec.json.decode(one, type=JobForecast) for one in snapshot.items]
    assert (item.model_version, item.reasons) == ("baseline:no_history", ["no run has ended here yet"])


def test_who_serves_opens_the_store_read_only_and_follows_it(tmp_path, settings):
    folder, moved = tmp_path / "state" / "store", tmp_path / "moved"
    reader, forecasts = adapters.StoreReader(settings), adapters.RuntimeForecasts(settings)
    asked = [{"user": "u1", "nodes": 1, "time_limit_s": 7200, "submit_time": START}]
    for _ in range(2):
        with pytest.raises(StoreMissing, match="no store there yet"):
            reader("SELECT 1 AS n")
        with pytest.raises(ForecastUnavailableError, match=f"sqlite:{folder}/catalogue.sqlite: no store there yet"):
            forecasts("alpha", asked)
        assert not folder.parent.exists()

    def made(count):
        with open_store(folder) as writer:
            rows = conform(jobs_frame(many_jobs(count, START)).with_columns(cluster=pl.lit("alpha")), "core_jobs")
            writer.transact(lambda w: w.upsert("core_jobs", rows))

    def count():
        return reader("SELECT count(*) AS n FROM core_jobs WHERE cluster = ?", ["alpha"])["n"][0]

    made(20)
    assert count() == 20
    assert reader._store.read_only
    made(30)
    assert count() == 50, "what another process wrote since"
    folder.rename(moved)
    with pytest.raises(StoreMissing, match="no store there yet"):
        count()
    with pytest.raises(ForecastUnavailableError, match="no store there yet"):
        forecasts("alpha", asked)
    assert not folder.exists()
    made(10)
    assert count() == 10, "of the new one at its place"


def test_what_was_made_up_to_warm_up_is_in_nobodys_forecast(store, settings, monkeypatch):
    ingest_jobs(store, Queue(*many_jobs(60, START + timedelta(hours=4))), "alpha", START)
    monkeypatch.setattr(adapters, "_HISTORY_DAYS", 36_500.0)
    cold, warm = adapters.RuntimeForecasts(settings), adapters.RuntimeForecasts(settings)
    warm.prepare(["alpha"])
    later = datetime.now(UTC) + timedelta(minutes=64)

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return later

    monkeypatch.setattr(adapters, "datetime", Later)
    asked = [{"user": "u1", "nodes": 1, "gpus": 4, "time_limit_s": 7200, "submit_time": later}]
    assert warm("alpha", asked) == cold("alpha", asked)


def test_every_live_job_is_forecast_published_and_kept(store, settings):
    queue = Queue(
        *many_jobs(60, START + timedelta(hours=4)), job("r", -600, -300, state="RUNNING", user="u1", seen_s=0)
    )
    queue.rows.append(job("p", -60, state="PENDING", nodes=(), user="u2", seen_s=0))
    ingest_jobs(store, queue, "alpha", START)
    report = publish_jobs(store, queue, settings, "alpha", START + seconds(5))
    assert (report.jobs, report.error, report.data_age_s) == (2, None, 5.0)
    assert set(report.model_versions) == {"runtime", "wait"}
    snapshot = read_snapshot(snapshot_path(settings.published, "alpha", "jobs"))
    items = {item.job_id: item for item in (msgspec.json.decode(i, type=JobForecast) for i in snapshot.items)}
    assert items["r"].remaining.q05_s <= items["r"].remaining.q50_s <= items["r"].remaining.q95_s <= 3600
    assert items["p"].runtime is not None
    assert items["p"].wait is not None
    assert (items["p"].mode_s, items["r"].mode_s) == (items["p"].runtime.q50_s, None)
    assert 0 <= items["p"].p_fail <= 1
    assert all(re.match(r"about .* usual here \(.+\)", item.reasons[0]) for item in items.values())
    rows = store.query(
        "SELECT job_id, forecast, epoch(valid_until - generated_at) AS ttl, model_version FROM out_job_forecasts"
    )
    assert sorted(rows.select("job_id", "forecast").rows()) == [("p", "runtime"), ("p", "wait"), ("r", "remaining")]
    assert set(rows["ttl"]) == {600.0}
    assert all(version.startswith("baseline:") for version in rows["model_version"])


def test_every_node_has_a_risk_that_is_made_anew_when_half_its_life_is_over(store, settings):
    ingest_jobs(store, Queue(), "alpha", START)
    fault = pl.DataFrame({"cluster": "alpha", "node": "n2", "gpu_uuid": "", "kind": "gpu_double_bit_ecc", "xid": [48]})
    fault = fault.with_columns(
        start_time=pl.lit(START - timedelta(hours=5)), end_time=pl.lit(START - timedelta(hours=4))
    )
    store.transact(lambda w: w.upsert("core_faults", fault))
    report = publish_node_risks(store, settings, "alpha", START + seconds(60))
    assert (report.nodes, report.error, report.model_versions) == (2, None, {"node_failure": "baseline:climatology"})
    snapshot = read_snapshot(snapshot_path(settings.published, "alpha", "node-risks"))
    risks = {risk.node: risk for risk in (msgspec.json.decode(i, type=NodeRisk) for i in snapshot.items)}
    assert set(risks) == {"n1", "n2"}
    assert all(0 < risk.p_1h < risk.p_24h < risk.p_7d < 1 for risk in risks.values())
    assert risks["n2"].is_climatology
    assert "gpu_double_bit_ecc" in risks["n2"].reasons[0]
    assert publish_node_risks(store, settings, "alpha", START + seconds(600)).nodes is None
    assert publish_node_risks(store, settings, "alpha", START + seconds(60 + 1800)).nodes == 2
    assert store.query("SELECT count(*) AS n, count(DISTINCT generated_at) AS t FROM out_node_risks").rows() == [(4, 2)]


def test_an_outage_of_the_scheduler_publishes_nothing(store, settings, tmp_path):
    data = {"jobs": "trace", "jobs_path": str(tmp_path / "absent.parquet")}
    lost = parse_settings({"state_dir": settings.state_dir, "clusters": {"alpha": data}}, {})
    report = publish_jobs_of(store, lost, "alpha", START)
    assert "absent.parquet" in report.error
    assert not (lost.published / "alpha" / "jobs.json").exists()


# --- retrain ----------------------------------------------------------------------------------------------


def many_jobs(count, before: datetime):
    chance = random.Random(3)
    rows = []
    for i in range(count):
        submit = round((before - START).total_seconds()) - 3600 * 4 - (count - i) * 900
        user, size = f"u{i % 6}", 1 + i % 2
        run = round((600 + 400 * (i % 6)) * chance.lognormvariate(0, 0.2))
        wait = round(chance.expovariate(1 / 120))
        state = "FAILED" if chance.random() < 0.1 + 0.1 * (i % 3) else "COMPLETED"
        ended = submit + wait + run
        rows.append(job(i, submit, submit + wait, ended, state, user=user, gpus=2 * size, seen_s=ended))
    return rows


def test_a_task_is_trained_on_one_snapshot_and_its_scores_are_kept(store, settings):
    now = START + timedelta(days=20)
    ingest_jobs(store, Queue(*many_jobs(300, now)), "alpha", now, first_history_s=20 * 86_400)
    assert store.query("SELECT count(*) AS n FROM core_jobs")["n"][0] == 300
    report = retrain_task(store, settings, "alpha", "job_failure", now)
    assert report.error is None
    assert report.version
    assert report.reason
    card = Registry(settings.registry / "alpha").load("job_failure", report.version).card
    assert card["snapshot_id"] == report.snapshot_id == store.snapshot() - 1  # the scores came after
    scores = store.query("SELECT task, baseline, metric, value FROM out_scores WHERE cluster = 'alpha'")
    assert scores.height == report.scores > 0
    assert set(scores["task"]) == {"job_failure"}
    assert (scores["baseline"] != "").any()
    assert Registry(settings.registry / "alpha").champion("job_failure") == (
        report.version if report.promoted else None
    )


def test_learning_draws_nodes_when_samples_are_too_many(store):
    frame = samples(START, START + seconds(60)).with_columns(cluster=pl.lit("alpha"))
    store.transact(lambda w: w.append("core_gpu_samples", frame))
    span = (START, START + seconds(60))
    with store.reader() as reader:
        assert sampled_nodes(reader, "alpha", *span, frame.height, 1) is None
        drawn = sampled_nodes(reader, "alpha", *span, frame.height // 2, 1)
        assert len(drawn) == 1
        assert drawn == sampled_nodes(reader, "alpha", *span, frame.height // 2, 1)


@pytest.mark.parametrize("task", ["bottleneck", "node_failure"])
def test_hardware_tasks_without_history_keep_their_baselines(store, settings, task):
    ingest_jobs(store, Queue(), "alpha", START)
    report = retrain_of(store, settings, "alpha", task, START)
    assert (report.error, report.version, report.promoted) == (None, None, False)
    assert "stays" in report.reason


def test_too_little_history_and_a_failing_task_are_said_and_hinder_nobody(store, settings, monkeypatch):
    report = retrain_of(store, settings, "alpha", "runtime", START)
    assert (report.version, report.promoted, report.error) == (None, False, None)
    assert "baseline stays" in report.reason
    monkeypatch.setattr("pipelines.retrain._TRAINERS", {"runtime": ("models.training", "no_such_function")})
    assert "no_such_function" in retrain_of(store, settings, "alpha", "runtime", START).error
    with pytest.raises(KeyError, match="no task 'weather'; tasks: runtime, wait"):
        retrain_task(store, settings, "alpha", "weather", START)

"""Dagster: the graph, runs of the jobs on real files, checks that hold back, schedules, pruning, the instance."""

import os
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import polars as pl
import pytest

from features.vocabulary import TABLES
from models.registry import Registry
from pipelines import jobs as dagster_jobs
from pipelines.assets import trained
from pipelines.catalogue import create_sql
from pipelines.checks import violations
from pipelines.dagster_home import ROOT, dagster_environment
from pipelines.dagster_instance import prepare
from pipelines.definitions import build_definitions
from pipelines.job_history import MARK
from pipelines.maintain import prune_runs, prune_spool, retention_days
from pipelines.resources import WORKER_TAG, is_worker_gone, worker_name
from pipelines.retrain import Retrained
from pipelines.schedules import under_way
from pipelines.settings import load_settings, parse_settings
from pipelines.sources.spool import Spool
from pipelines.spans import floor_time
from tests.pipelines_world import NODES, START, job, jobs_frame, samples, seconds
from tests.store_child import open_store


@pytest.fixture(scope="module")
def instance():
    with dg.instance_for_test() as opened:
        yield opened


@pytest.fixture
def world(tmp_path):
    """Settings of two clusters: `good` has recorded samples of the last twenty minutes and jobs, `lost` has neither."""
    now = datetime.now(UTC)
    shift = floor_time(now, timedelta(minutes=5)) - timedelta(minutes=20) - START
    recorded = samples(START, START + timedelta(minutes=20)).with_columns(
        pl.col("ts") + shift, gpu_temp_margin_c=pl.lit(30.0, dtype=pl.Float32), is_thermal_slowdown=pl.lit(False)
    )
    recorded.write_parquet(tmp_path / "telemetry.parquet")
    rows = jobs_frame([job(1, 0, 60, state="RUNNING"), job(2, 0, 0, 300), job(3, 60, state="PENDING", nodes=())])
    rows = rows.with_columns(pl.col("submit_time", "eligible_time", "start_time", "end_time") + shift)
    rows.write_parquet(tmp_path / "jobs.parquet")
    (tmp_path / "inventory.csv").write_text("node,rack,pod,gpu_model,gpus\nn[1-2],r1,p1,NVIDIA H100 80GB HBM3,2\n")
    config = tmp_path / "weatherglass.toml"
    blocks = "".join(
        f"""
[clusters.{name}]
telemetry = "trace"
telemetry_path = "{tmp_path}/{prefix}telemetry.parquet"
jobs = "trace"
jobs_path = "{tmp_path}/{prefix}jobs.parquet"
inventory = "{tmp_path}/inventory.csv"
"""
        for name, prefix in (("good", ""), ("lost", "absent/"))
    )
    config.write_text(
        f'state_dir = "{tmp_path}/state"\n[ingest]\nwindow_s = 300\nlag_s = 0\ninitial_history_s = 1200\n{blocks}'
    )
    with store_of(config) as store:  # a first run of jobs reads thirty days in as many transactions; two will do here
        store.transact(lambda w: w.set_mark("good", MARK, now - timedelta(days=2)))
    return config


def store_of(config, **options):
    settings = load_settings(config)
    return open_store(settings.state / "store", **options)


def execute(config, name, instance, **options):
    defs = build_definitions(str(config))
    return defs.resolve_job_def(name).execute_in_process(instance=instance, raise_on_error=False, **options)


def test_a_nights_card_stands_with_its_model(world, instance, monkeypatch):
    def retrain_of(store, settings, cluster, task, now):
        card = {"trained_at": now.isoformat(), "jobs": 300, "decision": "baseline stays", "metrics": []}
        registry = Registry(settings.registry / cluster)
        version = None if cluster == "lost" else registry.save(task, {"a.txt": b"a"}, card)
        return Retrained(cluster, task, version=version, reason="baseline stays")

    monkeypatch.setattr(trained, "retrain_of", retrain_of)
    run = execute(world, "retrain", instance, asset_selection=[dg.AssetKey("model_runtime")])
    shown = run.asset_materializations_for_node("train_runtime")[0].metadata["card"].value
    assert shown.startswith("**good ")
    assert "on 300 jobs of" in shown
    assert "decision: baseline stays" in shown
    assert "lost" not in shown


def test_the_graph_is_whole_and_every_table_is_an_asset():
    defs = build_definitions()
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert set(TABLES) - keys == {"out_actions", "core_silences"}  # written by the agent and by operators, not by a run
    groups = {key.to_user_string(): graph.get(key).group_name for key in graph.get_all_asset_keys()}
    deps = {
        key.to_user_string(): sorted(p.to_user_string() for p in graph.get(key).parent_keys)
        for key in graph.get_all_asset_keys()
    }
    for name in set(TABLES) & keys - {
        "out_scores",
        "out_outcomes",
        "out_hint_outcomes",
    }:  # made at night, in group trained
        assert groups[name] == name.split("_")[0], name
        columns = graph.get(dg.AssetKey(name)).metadata["dagster/column_schema"].columns
        assert [column.name for column in columns] == list(TABLES[name].columns)
    assert "[°C]" in next(
        c.description
        for c in graph.get(dg.AssetKey("core_gpu_samples")).metadata["dagster/column_schema"].columns
        if c.name == "gpu_temp_c"
    )
    assert deps["core_gpu_samples"] == ["core_jobs", "raw_gpu_samples"]
    assert deps["out_job_forecasts"] == ["core_jobs", "model_job_failure", "model_runtime", "model_wait"]
    assert deps["out_hints"] == ["nowcast"]
    assert deps["nowcast"] == ["model_bottleneck", "model_level", "out_job_forecasts"]
    assert not graph.get(dg.AssetKey("nowcast")).is_materializable
    assert all(graph.get(key).owners for key in graph.get_all_asset_keys())


def test_one_run_serves_all_clusters_and_a_lost_one_hinders_none(world, instance):
    result = execute(world, "ingest", instance)
    assert result.success
    checks = {(e.asset_key.to_user_string(), e.check_name): e for e in result.get_asset_check_evaluations()}
    assert not checks["raw_gpu_samples", "went_well"].passed
    assert "lost: " in checks["raw_gpu_samples", "went_well"].description
    assert "good: " not in checks["raw_gpu_samples", "went_well"].description
    assert checks["core_gpu_samples", "valid"].passed
    assert not checks["core_gpu_samples", "recent"].passed  # of the lost one there is nothing
    assert "lost: no samples" in checks["core_gpu_samples", "recent"].description
    made = {e.asset_key.to_user_string(): e.materialization.metadata for e in result.get_asset_materialization_events()}
    assert made["core_gpu_samples"]["dagster/row_count"].value == 20 * 4 * len(NODES) * 2
    assert made["core_jobs"]["dagster/row_count"].value == 3
    assert made["core_gpu_samples"]["lag_s"].value < 600
    with store_of(world) as store:
        counted = store.query(
            'SELECT "cluster", count(*) AS n, count(DISTINCT gpu_uuid) AS g, count(job_id) AS j '
            "FROM core_gpu_samples GROUP BY 1"
        )
        assert counted.select("cluster", "n", "g").rows() == [("good", 320, 4)]
        assert counted["j"][0] > 0
        assert store.query("SELECT count(*) AS n FROM core_gpu_minutes")["n"][0] > 60
        assert store.mark("lost", "telemetry") is None
        hashes = [store.table_hash(table) for table in ("core_gpu_samples", "core_jobs", "core_gpu_minutes")]
    again = execute(world, "ingest", instance)  # at once again: nothing is due, nothing changes
    assert again.success
    with store_of(world) as store:
        assert [store.table_hash(t) for t in ("core_gpu_samples", "core_jobs")] == hashes[:2]


def test_rows_that_break_a_rule_hold_back_what_is_made_from_them(world, instance):
    execute(world, "ingest", instance)
    now = datetime.now(UTC)
    doubled = pl.DataFrame({"ts": [now] * 2, "cluster": ["good"] * 2, "node": ["n1"] * 2, "gpu_uuid": ["GPU-00"] * 2})
    with store_of(world) as store:
        hot = doubled.with_columns(gpu_temp_c=pl.lit(400.0))
        store.transact(lambda w: w.append("core_gpu_samples", hot))
        found = violations(store, "core_gpu_samples", now - timedelta(hours=1))
    assert found == {"keys": 1, "ranges": {"gpu_temp_c": 2}}
    result = execute(world, "ingest", instance)
    assert not result.success
    made = {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}
    assert "core_gpu_samples" in made
    assert not made & {"core_gpu_minutes", "core_gpu_hours", "core_faults", "feat_labels"}
    failed = [e for e in result.get_asset_check_evaluations() if e.check_name == "valid" and not e.passed]
    assert [e.asset_key.to_user_string() for e in failed] == ["core_gpu_samples"]
    assert "1 key more than once; gpu_temp_c: 2 values outside of -10 to 125 °C" in failed[0].description


def test_a_column_of_another_type_is_found(tmp_path):
    with open_store(tmp_path) as store:
        assert violations(store, "core_jobs", START) == {}
        store.maintenance("DROP TABLE core_jobs", purpose="test")
        for statement in create_sql(TABLES["core_jobs"]):
            store.maintenance(statement.replace('"gpus" INTEGER', '"gpus" VARCHAR'), purpose="test")
        assert violations(store, "core_node_samples", START) == {}
        assert violations(store, "core_jobs", START) == {"types": ["gpus"]}


def test_maintain_compacts_retains_and_prunes(world, instance):
    execute(world, "ingest", instance)
    with store_of(world) as store:
        old = START - timedelta(days=400)
        frame = pl.DataFrame({"ts": [old], "cluster": ["good"], "node": ["n1"], "is_up": [True]})
        store.transact(lambda w: w.append("core_node_samples", frame))
        kept = store.query("SELECT count(*) AS n FROM core_node_samples WHERE ts > ?", [old])["n"][0]
        files = store.query("SELECT sum(file_count) AS n FROM ducklake_table_info('wg')")["n"][0]
    hourly = execute(world, "maintain", instance, run_config={"ops": {"tidy": {"config": {"daily": False}}}})
    assert hourly.success
    with store_of(world) as store:
        assert store.query("SELECT count(*) AS n FROM core_node_samples")["n"][0] == kept + 1
        assert store.query("SELECT sum(file_count) AS n FROM ducklake_table_info('wg')")["n"][0] < files / 2
    assert execute(world, "maintain", instance).success
    with store_of(world) as store:
        assert store.query("SELECT count(*) AS n FROM core_node_samples")["n"][0] == kept


def test_retention_names_every_tables_setting():
    days = retention_days(parse_settings({}, {}))
    assert {table.retention for table in TABLES.values()} <= set(days)
    assert "snapshot_days" not in days


def test_the_spool_keeps_what_is_not_in_the_store_yet(tmp_path):
    alpha = {"telemetry": "scrape", "scrape_targets": ["http://127.0.0.1:9400/metrics"]}
    settings = parse_settings({"state_dir": str(tmp_path / "state"), "clusters": {"alpha": alpha}}, {})
    folder = settings.state / "spool" / "alpha"
    spool = Spool(folder)
    now = START + timedelta(hours=6)
    for hour in range(6):
        at = START + timedelta(hours=hour)
        spool.append("gpu", samples(at, at + seconds(15)), at)
    with open_store(tmp_path) as store:
        assert prune_spool(store, settings, now) == 0  # nothing has been ingested
        store.transact(lambda w: w.set_mark("alpha", "telemetry", START + timedelta(hours=4)))
        assert prune_spool(store, settings, now) == 3
        rows, _ = spool.read("gpu", START, now)
        assert rows["ts"].min() == START + timedelta(hours=3)
        assert prune_spool(store, settings, now + timedelta(days=3)) == 3  # an outage of ingest must not fill the disk


# --- schedules and runs -----------------------------------------------------------------------------------


def tick(schedule, instance, at=START):
    defs = build_definitions()
    context = dg.build_schedule_context(
        instance=instance, scheduled_execution_time=at, repository_def=defs.get_repository_def()
    )
    return defs.resolve_schedule_def(schedule).evaluate_tick(context)


def test_schedules_are_on_and_in_utc():
    defs = build_definitions()
    crons = {}
    for schedule in defs.schedules:
        assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING
        assert schedule.execution_timezone == "UTC"
        crons[schedule.name] = schedule.cron_schedule
    assert crons == {
        "ingest_schedule": "*/5 * * * *",
        "publish_schedule": "2-59/5 * * * *",
        "retrain_schedule": "10 2 * * *",
        "maintain_schedule": "35 * * * *",
    }


def test_a_schedule_skips_while_its_job_runs_but_not_after_its_process_was_killed():
    with dg.instance_for_test() as instance:
        assert len(tick("ingest_schedule", instance).run_requests) == 1
        job_def = build_definitions().resolve_job_def("ingest")
        run = instance.create_run_for_job(job_def, status=dg.DagsterRunStatus.STARTED, tags={WORKER_TAG: worker_name()})
        data = tick("ingest_schedule", instance)
        assert data.skip_message == f"ingest is still running: {run.run_id}"
        assert not data.run_requests
        assert len(tick("publish_schedule", instance).run_requests) == 1
        child = subprocess.run(
            [sys.executable, "-c", "from pipelines.resources import worker_name; print(worker_name())"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        dead = child.stdout.strip()
        assert is_worker_gone(dead)
        assert not is_worker_gone(worker_name())
        assert not is_worker_gone("another-host 1 0.0")
        assert not is_worker_gone(None)
        instance.add_run_tags(run.run_id, {WORKER_TAG: dead})
        assert under_way(instance, "ingest") is None
        assert instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.FAILURE


@pytest.mark.parametrize("hour, daily", [(2, False), (3, True), (4, False)])
def test_the_daily_part_of_maintenance_comes_once_a_day(instance, hour, daily):
    [request] = tick("maintain_schedule", instance, datetime(2026, 5, 4, hour, 35, tzinfo=UTC)).run_requests
    assert request.run_config == {"ops": {"tidy": {"config": {"daily": daily}}}}


def test_old_runs_and_reports_are_pruned_and_young_ones_kept(tmp_path):
    @dg.op
    def nothing():
        return None

    @dg.job
    def small():
        nothing()

    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        old = small.execute_in_process(instance=instance)
        report = dg.AssetMaterialization("nowcast", metadata={"gpus": 8})
        instance.report_runless_asset_event(report)
        now = datetime.now(UTC)
        assert prune_runs(instance, now, keep_days=7) == 0
        assert len(list(tmp_path.rglob(f"{old.run_id}*.db"))) == 1
        later = now + timedelta(days=8)
        assert len(instance.fetch_materializations(dg.AssetKey("nowcast"), limit=5).records) == 1
        assert prune_runs(instance, later, keep_days=7) == 1
        assert instance.get_run_by_id(old.run_id) is None
        assert instance.get_run_records() == []
        assert list(tmp_path.rglob(f"{old.run_id}*")) == []
        assert instance.fetch_materializations(dg.AssetKey("nowcast"), limit=5).records == []


def test_the_instance_file_loads_and_writes_only_where_it_is_told(tmp_path, monkeypatch):
    settings = parse_settings({"state_dir": str(tmp_path / "var")}, {})
    for name, value in dagster_environment(settings).items():
        monkeypatch.setenv(name, value)
    before = {path.name for path in ROOT.iterdir()}
    with dg.DagsterInstance.get() as instance:
        assert not instance.telemetry_enabled
        assert instance.run_monitoring_enabled
        assert Path(instance.storage_directory()).is_relative_to(tmp_path)
        assert instance.get_run_records() == []
    assert {path.name for path in ROOT.iterdir()} - before <= {"__pycache__"}
    assert list((tmp_path / "var" / "dagster").iterdir())
    assert os.environ["DAGSTER_DISABLE_TELEMETRY"] == "1"


def test_every_job_has_a_limit_after_which_it_counts_as_dead():
    assert {job.name for job in dagster_jobs.JOBS} == {"ingest", "publish", "retrain", "maintain"}
    assert all(int(job.tags["dagster/max_runtime"]) > 0 for job in dagster_jobs.JOBS)


def test_databases_spoiled_by_two_starts_at_once_are_mended(tmp_path, monkeypatch):
    settings = parse_settings({"state_dir": str(tmp_path / "var")}, {})
    for name, value in dagster_environment(settings).items():
        monkeypatch.setenv(name, value)
    folder = prepare(settings, os.environ)
    schedules = folder / "schedules" / "schedules.db"
    before = heads(schedules)
    assert len(before) == 1
    with sqlite3.connect(schedules) as database:
        database.execute("INSERT INTO alembic_version VALUES ('5771160a95ad')")
    database.close()
    prepare(settings, os.environ)
    assert heads(schedules) == before


def heads(path):
    database = sqlite3.connect(path)
    found = database.execute("SELECT version_num FROM alembic_version").fetchall()
    database.close()
    return found

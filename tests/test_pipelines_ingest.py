"""Ingest: windows from the mark, outages, late and impossible samples, jobs that change and vanish, what is derived."""

from datetime import timedelta

import polars as pl
import pytest

from pipelines.derive import derive_hours, derive_minutes
from pipelines.faults import derive_faults
from pipelines.ingest import ingest_telemetry
from pipelines.job_history import (
    MARK,
    attribute_whole_nodes,
    consistent_jobs,
    ingest_jobs,
    read_jobs,
    read_live,
    upsert_changed,
)
from pipelines.labels import derive_labels, node_batches
from pipelines.sources import LiveJobs
from pipelines.spans import due_windows
from tests.pipelines_world import GPUS, NODES, START, STEP_S, Queue, Recorded, ingest_settings, job, jobs_frame, seconds
from tests.store_child import open_store

SETTINGS = ingest_settings()
WIDE = ingest_settings(window_s=600)  # fewer transactions where windows are not the question
PER_WINDOW = 300 // STEP_S * len(NODES) * GPUS
SAMPLE_TABLES = ("raw_gpu_samples", "core_gpu_samples", "core_node_samples", "core_data_quality")


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path) as opened:
        # A first run of jobs reads thirty days in as many transactions; two will do here.
        opened.transact(lambda w: w.set_mark("alpha", MARK, START - timedelta(days=2)))
        yield opened


def started(store, source, at=START):
    """A first run that lays down the mark at `at` and reads nothing."""
    ingest_telemetry(store, source, "alpha", SETTINGS, at + seconds(SETTINGS.lag_s))
    assert store.mark("alpha", "telemetry") == at


def run(store, source, after_s, settings=SETTINGS, **options):
    return ingest_telemetry(store, source, "alpha", settings, START + seconds(after_s), **options)


def count(store, table="core_gpu_samples", where="true"):
    return store.query(f"SELECT count(*) AS n FROM {table} WHERE {where}")["n"][0]


def test_windows_are_whole_contiguous_and_on_the_grid():
    start, windows = due_windows(START + seconds(100), START + seconds(950), SETTINGS)
    assert start == START + seconds(100)
    edges = [(round((a - START).total_seconds()), round((b - START).total_seconds())) for a, b in windows]
    assert edges == [(100, 300), (300, 600), (600, 900)]
    assert due_windows(START, START + seconds(319), SETTINGS)[1] == []
    assert len(due_windows(START, START + seconds(320), SETTINGS)[1]) == 1
    assert len(due_windows(START, START + seconds(320), SETTINGS, watermark_lag_s=60)[1]) == 0
    assert len(due_windows(START, START + seconds(90_000), SETTINGS)[1]) == 48
    first, windows = due_windows(None, START + seconds(950), ingest_settings(initial_history_s=600))
    assert (first, len(windows)) == (START + seconds(300), 2)


def test_an_outage_moves_no_mark_and_is_caught_up(store, tmp_path):
    source = Recorded()
    started(store, source)
    assert run(store, source, 620).windows == 2
    source.down = True
    report = run(store, source, 1220)
    assert "connection refused" in report.error
    assert report.windows == 0
    assert report.mark == START + seconds(600)
    assert report.lag_s == 620
    source.down = False
    assert run(store, source, 1820).windows == 4
    with open_store(tmp_path / "undisturbed") as other:
        started(other, Recorded())
        for after in range(320, 1821, 300):
            run(other, Recorded(), after)
        for table in SAMPLE_TABLES:
            assert store.table_hash(table) == other.table_hash(table), table
    assert count(store) == 6 * PER_WINDOW


def test_reading_again_changes_nothing_and_forgets_nothing(store):
    source = Recorded()
    started(store, source)
    run(store, source, 920)
    hashes = [store.table_hash(table) for table in SAMPLE_TABLES]
    assert run(store, source, 920, since=START).windows == 3
    assert [store.table_hash(table) for table in SAMPLE_TABLES] == hashes
    source.edit = lambda frame: frame.clear()  # the source has forgotten its past
    run(store, source, 920, since=START)
    assert store.table_hash("core_gpu_samples") == hashes[1]
    assert store.mark("alpha", "telemetry") == START + seconds(900)


def test_late_samples_come_in_through_the_overlap(store):
    source = Recorded()
    started(store, source)
    late = START + seconds(285)
    source.edit = lambda frame: frame.filter((pl.col("ts") != late) | (pl.col("node") != "n2"))
    run(store, source, 320)
    assert count(store) == PER_WINDOW - GPUS
    source.edit = lambda frame: frame
    run(store, source, 620)
    assert count(store) == 2 * PER_WINDOW
    assert count(store, "raw_gpu_samples") == 2 * PER_WINDOW
    assert source.asked[-1][0] == START + seconds(240)


def test_impossible_values_become_null_and_are_counted_and_warnings_kept(store):
    source = Recorded()
    started(store, source)
    source.warnings = ["store-gateway timed out: partial answer"]
    source.edit = lambda frame: pl.concat([frame, frame.head(3)]).with_columns(
        pl.when(pl.col("node") == "n1").then(pl.lit(999.0)).otherwise("gpu_temp_c").alias("gpu_temp_c")
    )
    report = run(store, source, 320)
    assert count(store, where="gpu_temp_c IS NULL") == PER_WINDOW // 2
    assert count(store, where="gpu_temp_c = 0") == 0
    found = store.query("SELECT column_name, reason, count FROM core_data_quality ORDER BY reason").rows()
    assert ("gpu_temp_c", "out_of_range", PER_WINDOW // 2 + 2) in found
    assert ("ts", "duplicate", 3) in found
    assert ("", "partial", 1) in found
    assert report.findings["out_of_range"] == PER_WINDOW // 2 + 2
    assert report.warnings == source.warnings


def test_a_silent_window_is_a_finding_and_moves_the_mark(store):
    source = Recorded()
    started(store, source)
    source.edit = lambda frame: frame.clear()
    assert run(store, source, 320).findings == {"no_samples": 1}
    assert store.mark("alpha", "telemetry") == START + seconds(300)


# --- jobs -------------------------------------------------------------------------------------------------


def test_a_job_is_kept_in_its_newest_state_once(store):
    queue = Queue(job(1, 0, state="PENDING", nodes=(), seen_s=10), job(2, 5, 20, state="RUNNING", seen_s=20))
    report = ingest_jobs(store, queue, "alpha", START + seconds(60))
    assert (report.core_rows, report.node_rows) == (2, 2)
    assert read_live(store, "alpha")["job_id"].to_list() == ["1", "2"]
    snapshot = store.table_hash("core_jobs")
    assert ingest_jobs(store, queue, "alpha", START + seconds(120)).core_rows == 0  # nothing new, nothing written
    assert store.table_hash("core_jobs") == snapshot
    queue.rows = [job(1, 0, 130, state="RUNNING", seen_s=130), job(2, 5, 20, 140, state="FAILED", seen_s=140)]
    assert ingest_jobs(store, queue, "alpha", START + seconds(180)).core_rows == 2
    found = read_jobs(store, "alpha", START).select("job_id", "state", "end_time").rows()
    assert found == [("1", "RUNNING", None), ("2", "FAILED", START + seconds(140))]
    queue.rows[1] = job(2, 5, 20, state="RUNNING", seen_s=90)  # an older word comes late
    ingest_jobs(store, queue, "alpha", START + seconds(240))
    assert read_jobs(store, "alpha", START)["state"].to_list() == ["RUNNING", "FAILED"]


def test_a_job_that_left_the_queue_is_looked_up_in_the_accounting(store):
    queue = Queue(job(1, 0, 10, state="RUNNING"), job(2, 0, 10, state="RUNNING"))
    ingest_jobs(store, queue, "alpha", START + seconds(60))
    # Long afterwards: job 1 ended before the overlap of this run, of job 2 there is no record at all.
    queue.rows = [job(1, 0, 10, 70, state="COMPLETED", seen_s=7200)]
    report = ingest_jobs(store, queue, "alpha", START + seconds(7200))
    assert report.vanished in (1, 2)
    states = dict(read_jobs(store, "alpha", START).select("job_id", "state").iter_rows())
    assert states == {"1": "COMPLETED", "2": "UNKNOWN"}
    assert read_live(store, "alpha").is_empty()


def test_an_outage_of_the_scheduler_moves_no_mark(store):
    queue = Queue(job(1, 0, 10, state="RUNNING"))
    ingest_jobs(store, queue, "alpha", START + seconds(60))
    queue.down = True
    report = ingest_jobs(store, queue, "alpha", START + seconds(600))
    assert "slurmctld" in report.error
    assert report.mark == START + seconds(60)
    assert read_live(store, "alpha").height == 1


def test_states_and_times_are_made_consistent_and_counted():
    core, findings = consistent_jobs(
        jobs_frame(
            [
                job(1, 0, 10, 5),
                job(2, 0, 10, state="PENDING"),
                job(3, 0, 10, 50, state="RUNNING"),
                {**job(4, 0), "submit_time": None},
                job(5, 0, 10, 60),
            ]
        )
    )
    assert core.select("job_id", "start_time", "end_time").rows() == [
        ("1", START + seconds(10), None),
        ("2", None, None),
        ("3", START + seconds(10), None),
        ("5", START + seconds(10), START + seconds(60)),
    ]
    assert findings == {"no_submit_time": 1, "pending_with_start": 1, "live_with_end": 1, "end_before_start": 1}


def test_samples_get_the_job_that_had_the_whole_node(store):
    whole, part = job(1, 0, 60, 180), job(2, 0, 0, 600, nodes=("n2",), gpus=1)
    ingest_jobs(store, Queue(whole, part), "alpha", START + seconds(700))
    source = Recorded()
    started(store, source)
    run(store, source, 320)
    found = store.query(
        "SELECT node, min(ts) AS a, max(ts) AS b FROM core_gpu_samples WHERE job_id IS NOT NULL GROUP BY node"
    )
    assert found.rows() == [("n1", START + seconds(60), START + seconds(165))]
    shared = pl.concat([jobs_frame([whole]), jobs_frame([job(3, 0, 60, 180)])])
    rows = store.query("SELECT * FROM core_gpu_samples").with_columns(pl.lit(None, dtype=pl.String).alias("job_id"))
    assert attribute_whole_nodes(rows, shared)["job_id"].null_count() == rows.height


# --- derived ----------------------------------------------------------------------------------------------


def test_minutes_and_hours_are_means_of_settled_samples(store):
    source = Recorded()
    started(store, source)
    run(store, source, 9020, ingest_settings(window_s=1800))
    made = derive_minutes(store, "alpha", SETTINGS)
    assert made.until == START + seconds(9000 - 60)
    assert made.rows == 149 * len(NODES) * GPUS
    raw = store.query("SELECT * FROM core_gpu_samples WHERE ts < ?", [made.until])
    expected = (
        raw.group_by(pl.col("ts").dt.truncate("1m"), "gpu_uuid")
        .agg(pl.col("gpu_power_w").cast(pl.Float64).mean().alias("mean"), pl.col("xid_last").max())
        .sort("ts", "gpu_uuid")
    )
    found = store.query("SELECT ts, gpu_uuid, gpu_power_w, xid_last FROM core_gpu_minutes ORDER BY ts, gpu_uuid")
    assert found.select("ts", "gpu_uuid", "xid_last").equals(expected.select("ts", "gpu_uuid", "xid_last"))
    assert (found["gpu_power_w"] - expected["mean"]).abs().max() <= 0.25  # half a step of its resolution
    assert derive_hours(store, "alpha", SETTINGS).rows == 2 * len(NODES) * GPUS
    assert derive_minutes(store, "alpha", SETTINGS).rows == 0
    hashes = store.table_hash("core_gpu_minutes"), store.table_hash("core_gpu_hours")
    run(
        store, source, 9020, ingest_settings(window_s=1800), since=START + seconds(3600)
    )  # reading again makes them again
    assert store.mark("alpha", "core_gpu_minutes") == START + seconds(3600)
    derive_minutes(store, "alpha", SETTINGS)
    derive_hours(store, "alpha", SETTINGS)
    assert (store.table_hash("core_gpu_minutes"), store.table_hash("core_gpu_hours")) == hashes


def faults_after(store, source, *afters):
    started(store, source)
    for after in afters:
        run(store, source, after, WIDE)
        derive_minutes(store, "alpha", SETTINGS)
        derive_faults(store, "alpha", SETTINGS)
    columns = "node, gpu_uuid, kind, xid, epoch(start_time) AS a, epoch(end_time) AS b"
    found = store.query(f"SELECT {columns} FROM core_faults ORDER BY start_time")
    zero = START.timestamp()
    return [(*row[:4], row[4] - zero, None if row[5] is None else row[5] - zero) for row in found.iter_rows()]


@pytest.mark.parametrize("afters", [(620, 1220, 1820, 2420), (2420,)])
def test_a_fatal_xid_is_one_fault_with_an_end(store, afters):
    source = Recorded()

    def break_gpu(frame):
        broken = (pl.col("gpu_uuid") == "GPU-00") & pl.col("ts").is_between(START + seconds(400), START + seconds(700))
        noisy = (pl.col("gpu_uuid") == "GPU-10") & (pl.col("ts") > START + seconds(500))
        code = pl.when(broken).then(79).when(noisy).then(31).otherwise("xid_last").cast(pl.Int32)
        return frame.with_columns(code.alias("xid_last"))

    source.edit = break_gpu
    lost = job(1, 0, 10, 405, state="NODE_FAIL")
    ingest_jobs(store, Queue(lost), "alpha", START + seconds(500))
    assert faults_after(store, source, *afters) == [("n1", "GPU-00", "gpu_fallen_off_bus", 79, 405, 720)]


def test_a_node_that_could_not_boot_for_a_job_is_a_fault_and_a_container_that_could_not_start_is_none(store):
    at_s = (400, 500, 600, 700)
    states = ("BOOT_FAIL", "FAILED", "BOOT_FAIL", "BOOT_FAIL")
    jobs = [
        job(number, 0, 10, end_s, state=state, nodes=nodes)
        for number, (end_s, state, nodes) in enumerate(
            zip(at_s, states, (("n1",), ("n2",), ("n2",), ("n1", "n2")), strict=True), 1
        )
    ]
    jobs[2]["job_id"] = "ml/train"  # of Kubernetes
    ingest_jobs(store, Queue(*jobs), "alpha", START + seconds(800))
    found = faults_after(store, Recorded(), 2420)
    assert [row[:5] for row in found] == [("n1", "", "job_node_fail", None, 400)]


@pytest.mark.parametrize("afters", [(1220, 1820, 2420, 3020), (3020,)])
def test_silence_of_a_gpu_or_a_node_is_a_fault_and_of_everyone_is_not(store, afters):
    source = Recorded()
    ingest_jobs(store, Queue(), "alpha", START)

    def silence(frame):
        at = (pl.col("ts") - START).dt.total_seconds()
        gpu = (pl.col("gpu_uuid") == "GPU-01") & at.is_between(600, 1199)
        node = (pl.col("node") == "n2") & (at >= 1500)
        everyone = at.is_between(1260, 1439)  # an outage of the source
        short = (pl.col("gpu_uuid") == "GPU-10") & at.is_between(240, 419)
        return frame.filter(~(gpu | node | everyone | short))

    source.edit = silence
    assert faults_after(store, source, *afters) == [
        ("n1", "GPU-01", "gpu_lost", None, 600, 1200),
        ("n2", "", "node_down", None, 1500, None),
    ]


def test_a_node_out_of_service_that_falls_silent_has_no_fault(store):
    source, queue = Recorded(), Queue()
    live = queue.live()
    drained = live.nodes.with_columns(
        pl.when(pl.col("node") == "n2").then(pl.lit("IDLE+DRAIN")).otherwise("state").alias("state")
    )
    queue.live = lambda: LiveJobs(live.jobs, drained)
    ingest_jobs(store, queue, "alpha", START)
    source.edit = lambda frame: frame.filter((pl.col("node") != "n2") | (pl.col("ts") < START + seconds(600)))
    assert faults_after(store, source, 2420) == []


def test_labels_are_made_once_and_closed_later(store):
    source = Recorded()
    hot = pl.col("ts").is_between(START + seconds(1500), START + seconds(2700)) & (pl.col("gpu_uuid") == "GPU-01")
    source.edit = lambda frame: frame.with_columns(
        hot.alias("is_thermal_slowdown"), pl.when(hot).then(0.0).otherwise(30.0).alias("gpu_temp_margin_c")
    )
    started(store, source)
    seen = []
    for after in (2420, 3020, 4220):
        run(store, source, after, WIDE)
        derive_labels(store, "alpha", SETTINGS)
        found = store.query("SELECT gpu_uuid, onset_time, clear_time FROM feat_labels WHERE NOT is_censored").rows()
        seen.append(found)
    onset = START + seconds(1500)
    assert seen[0] == [("GPU-01", onset, None)]
    assert seen[-1] == [("GPU-01", onset, START + seconds(2715))]
    assert derive_labels(store, "alpha", SETTINGS).rows == 0


def test_large_clusters_are_labelled_in_batches_that_cut_no_job(store):
    source = Recorded()
    started(store, source)
    run(store, source, 320)
    span = (START, START + seconds(300))
    assert node_batches(store, "alpha", *span, 1000) == [None]
    assert node_batches(store, "alpha", *span, PER_WINDOW // 2) == [["n1"], ["n2"]]
    ingest_jobs(store, Queue(job(1, 0, 10, state="RUNNING", nodes=NODES, gpus=4)), "alpha", START + seconds(400))
    assert node_batches(store, "alpha", *span, PER_WINDOW // 2) == [["n1", "n2"]]
    assert node_batches(store, "alpha", START + seconds(900), START + seconds(950), 10) == []


def test_what_an_earlier_answer_told_of_a_job_is_not_forgotten(store):
    told = jobs_frame([job(7, 0, 10, 60)]).with_columns(exit_code=pl.lit("0:9"), preempted_by=pl.lit("8"))
    later = jobs_frame([job(7, 0, 10, 61, seen_s=90)])
    store.transact(lambda w: upsert_changed(w, "core_jobs", told))
    assert store.transact(lambda w: upsert_changed(w, "core_jobs", later)) == 1
    row = store.query("SELECT * FROM core_jobs").row(0, named=True)
    assert (row["end_time"], row["exit_code"], row["preempted_by"]) == (START + seconds(61), "0:9", "8")


def test_a_long_past_is_read_in_larger_pieces_and_leaves_the_same_samples(tmp_path):
    settings, now = ingest_settings(max_windows_per_run=100), START + seconds(4500)
    found = []
    for name in ("forward", "backfill"):
        source = Recorded()
        with open_store(tmp_path / name) as store:
            store.transact(lambda w: w.set_mark("alpha", "telemetry", START))
            since = {"since": START, "backfill": "backfill:4500s"} if name == "backfill" else {}
            calls = []
            report = ingest_telemetry(
                store, source, "alpha", settings, now, progress=lambda *told, calls=calls: calls.append(told), **since
            )
            found.append((report.windows, store.table_hash("core_gpu_samples"), store.table_hash("raw_gpu_samples")))
        assert calls[-1][:2] == (report.windows, report.windows)
        assert (len(source.asked) < report.windows / 2) == (name == "backfill")
    assert found[0] == found[1]

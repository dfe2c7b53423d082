"""GPU ↔ job intervals: properties of the merge, the sources one by one, a real Slurm, and the store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.gpu_jobs import SOURCES, empty_evidence, evidence_schema, held_evidence, merge, sightings
from features.vocabulary import conform
from pipelines.gpu_jobs import derive_gpu_jobs, ingest_held, ingest_slurm_gpus
from pipelines.ingest import ingest_telemetry
from pipelines.settings import IngestSettings
from pipelines.sources.exposition import parse_page
from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.slurm import Commands
from pipelines.sources.slurm_gpus import held_gpus, parse_held
from pipelines.sources.wide import Index, Samples, to_frames
from pipelines.spans import TELEMETRY_MARK
from pipelines.store import Store
from tests.services import SLURM_PROGRAMS, Prometheus, Slurm, wait_until

T0 = datetime(2026, 11, 30, tzinfo=UTC)
NO_JOBS = pl.DataFrame(schema={name: evidence_schema()[name] for name in ("job_id", "start_time", "end_time")})


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def claim(
    job: str, start: float, end: float | None, source: str = "exporter", *, shared: bool = False, gpu: str = "G0"
) -> tuple[object, ...]:
    return ("n1", gpu, 0, job, at(start), None if end is None else at(end), source, shared)


def evidence(*claims: tuple[object, ...]) -> pl.DataFrame:
    return pl.DataFrame(list(claims), schema=evidence_schema(), orient="row")


def attempts(*rows: tuple[str, float, float | None]) -> pl.DataFrame:
    told = [(job, at(start), None if end is None else at(end)) for job, start, end in rows]
    return pl.DataFrame(told, schema=NO_JOBS.schema, orient="row")


def spans(rows: pl.DataFrame) -> list[tuple[str, str, float, float | None]]:
    def seconds(moment: datetime | None) -> float | None:
        return None if moment is None else (moment - T0).total_seconds()

    told = rows.select("gpu_uuid", "job_id", "start_time", "end_time").rows()
    return [(gpu, job, seconds(start) or 0.0, seconds(end)) for gpu, job, start, end in told]


# --- properties ---------------------------------------------------------------------------------------------------

_CLAIM = st.builds(
    lambda gpu, job, start, length, source, shared: claim(
        f"j{job}", start, None if length is None else start + length, source, shared=shared, gpu=f"G{gpu}"
    ),
    st.integers(0, 2), st.integers(0, 3), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 30)),
    st.sampled_from([*SOURCES, "exporter+slurm"]), st.booleans(),
)  # fmt: skip
_ATTEMPT = st.builds(
    lambda job, start, length: (f"j{job}", float(start), None if length is None else float(start + length)),
    st.integers(0, 3), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 30)),
)  # fmt: skip
_END = 200


def covered(rows: pl.DataFrame, jobs: pl.DataFrame | None = None) -> set[tuple[str, int]]:
    """Seconds in which anything is said of a GPU; all times of these tests are whole seconds."""
    ran = {job: [] for job in jobs["job_id"]} if jobs is not None else {}
    if jobs is not None:
        for job, start, end in jobs.rows():
            ran[job].append((start, end or at(_END)))
    found = set()
    for gpu, job, start, end in rows.select("gpu_uuid", "job_id", "start_time", "end_time").rows():
        for from_, to in ran.get(job, [(at(0), at(_END))]):
            low, high = max(start, from_), min(end or at(_END), to)
            found |= {(gpu, s) for s in range(int((low - T0).total_seconds()), int((high - T0).total_seconds()))}
    return found


@settings(max_examples=120, deadline=None)
@given(st.lists(_CLAIM, max_size=12), st.lists(_ATTEMPT, max_size=4), st.sampled_from([0.0, 5.0]), st.randoms())
def test_no_overlap_no_time_lost_whatever_the_order(
    claims: list[tuple[object, ...]], runs: list[tuple[str, float, float | None]], gap_s: float, rng: random.Random
) -> None:
    jobs = attempts(*runs)
    told = evidence(*claims)
    rows = merge(told, jobs, gap_s=gap_s)
    shuffled = list(claims)
    rng.shuffle(shuffled)
    assert merge(evidence(*shuffled), jobs, gap_s=gap_s).equals(rows), "order of arrival"
    assert merge(evidence(*claims, *claims), jobs, gap_s=gap_s).equals(rows), "told twice"
    assert merge(rows, jobs, gap_s=gap_s).equals(rows), "merged again"
    if gap_s == 0:
        assert covered(rows) == covered(told, jobs), "time"
    else:
        assert covered(rows) >= covered(told, jobs)
    for _, of_gpu in rows.group_by("gpu_uuid"):
        table = of_gpu.sort("start_time").rows(named=True)
        for i, one in enumerate(table):
            assert one["end_time"] is None or one["start_time"] < one["end_time"]
            for other in table[i + 1 :]:
                if one["end_time"] is None or other["start_time"] < one["end_time"]:
                    assert one["is_shared"], (one, other)
                    assert other["is_shared"], (one, other)
                    assert one["job_id"] != other["job_id"]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 100), min_size=1), st.integers(0, 20), st.randoms())
def test_sightings_of_one_job(moments: set[int], gap: int, rng: random.Random) -> None:
    ordered = sorted(moments)
    rows = [{"ts": at(s), "node": "n1", "gpu_uuid": "G0", "gpu_index": 0, "job_id": "7"} for s in ordered]
    rng.shuffle(rows)
    runs = sightings(pl.DataFrame(rows), gap_s=gap, until=at(101), step_s=0)
    breaks = sum(later - earlier > gap for earlier, later in pairwise(ordered))
    assert runs.height == breaks + 1
    assert (runs["end_time"].null_count() == 1) == (101 - ordered[-1] <= gap)


# --- one by one ---------------------------------------------------------------------------------------------------


def test_a_label_that_comes_and_goes_does_not_cut_the_interval() -> None:
    """Label flapping: the job's name is away for some scrapes, as when the exporter's pod mapping restarts."""
    seen = pl.DataFrame(
        [{"ts": at(t), "node": "n1", "gpu_uuid": "G0", "gpu_index": 0, "job_id": "7" if t // 30 % 2 else None}
         for t in range(0, 600, 15)]
    )  # fmt: skip
    assert spans(sightings(seen, gap_s=60, step_s=15)) == [("G0", "7", 30, 600)]
    assert len(sightings(seen, gap_s=20, step_s=15)) == 10
    assert spans(sightings(seen, gap_s=60, until=at(600), step_s=15)) == [("G0", "7", 30, None)]
    assert sightings(seen.clear(), gap_s=60).equals(empty_evidence())


def test_copies_of_a_series_for_each_job_are_a_shared_gpu() -> None:
    seen = pl.DataFrame(
        [{"ts": at(t), "node": "n1", "gpu_uuid": gpu, "gpu_index": i, "job_id": job}
         for t in range(0, 60, 15) for i, gpu, jobs in ((0, "G0", "78"), (1, "G1", "9")) for job in jobs]
    )  # fmt: skip
    rows = merge(sightings(seen, gap_s=30, step_s=15), NO_JOBS)
    assert spans(rows) == [("G0", "7", 0, 60), ("G0", "8", 0, 60), ("G1", "9", 0, 60)]
    assert rows["is_shared"].to_list() == [True, True, False]


def test_an_interval_ends_with_its_job() -> None:
    told = evidence(claim("7", 0, None), claim("8", 95, None))
    assert spans(merge(told, attempts(("7", 0, 90), ("8", 95, None)))) == [("G0", "7", 0, 90), ("G0", "8", 95, None)]
    # A label of an epilog that failed lingers for hours: what ran before start or after end was not the job.
    assert spans(merge(evidence(claim("7", -50, 5000)), attempts(("7", 10, 90)))) == [("G0", "7", 10, 90)]
    # Two attempts of a requeued job are two intervals.
    assert spans(merge(evidence(claim("7", 0, 200)), attempts(("7", 0, 90), ("7", 120, 150)))) == [
        ("G0", "7", 0, 90), ("G0", "7", 120, 150),
    ]  # fmt: skip
    # A job that has not begun by the scheduler's word is not cut.
    pending = pl.DataFrame({"job_id": ["7"], "start_time": [None], "end_time": [None]}, schema=NO_JOBS.schema)
    assert spans(merge(evidence(claim("7", 0, 20)), pending)) == [("G0", "7", 0, 20)]


def test_the_better_source_counts_and_of_equal_ones_the_later_claim() -> None:
    rows = merge(evidence(claim("7", 0, 100, "slurm"), claim("8", 40, 60, "exporter")), NO_JOBS)
    assert spans(rows) == [("G0", "7", 0, 40), ("G0", "8", 40, 60), ("G0", "7", 60, 100)]
    rows = merge(evidence(claim("7", 0, 100), claim("8", 40, None)), NO_JOBS)
    assert spans(rows) == [("G0", "7", 0, 40), ("G0", "8", 40, None)]
    rows = merge(evidence(claim("7", 0, 60, "slurm"), claim("7", 50, 80, "exporter")), NO_JOBS)
    assert rows.select("source").to_series().to_list() == ["exporter+slurm"]
    assert spans(rows) == [("G0", "7", 0, 80)]
    with pytest.raises(ValueError, match=r"no source 'gossip'.*exporter, slurm, pod, samples"):
        merge(evidence(claim("7", 0, 1, "gossip")), NO_JOBS)


def test_indices_that_move_at_a_reboot() -> None:
    """After the boot index 0 is another board: the job of before keeps its board, that of after has the other."""
    seen = pl.DataFrame(
        [("G0", 0, "7", t) for t in range(0, 60, 15)] + [("G1", 0, "8", t) for t in range(90, 150, 15)],
        schema=["gpu_uuid", "gpu_index", "job_id", "t"], orient="row",
    ).with_columns(node=pl.lit("n1"), ts=pl.lit(T0) + pl.duration(seconds="t"))  # fmt: skip
    assert spans(merge(sightings(seen, gap_s=30, step_s=15), NO_JOBS)) == [("G0", "7", 0, 60), ("G1", "8", 90, 150)]
    held = pl.DataFrame({"node": ["n1", "n1"], "gpu_index": [0, 1], "job_id": ["8", "8"],
                         "start_time": [at(80)] * 2, "is_shared": [False] * 2})  # fmt: skip
    boards = pl.DataFrame({"node": ["n1"] * 3, "gpu_index": [0, 2, 2], "gpu_uuid": ["G1", "G7", "G8"]})
    found, lost = held_evidence(held, boards, "slurm")
    assert spans(found) == [("G1", "8", 80, None)]
    assert lost == 1


# --- Slurm --------------------------------------------------------------------------------------------------------

_HEAD = (
    "JobId={id} JobName={name} UserId=u(1) GroupId=u(1) JobState={state} Reason=None StartTime=1796024512 "
    "EndTime=1796025112 "
)
_TAIL = (
    "ReqNodeList=(null) NodeList={list} NumNodes=1 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* {nodes} "
    "MinCPUsNode=1 Features=(null) OverSubscribe=OK Contiguous=0 Command=(null) WorkDir=/ Comment={comment} Power=\n"
)


def record(id: int, nodes: str, *, name: str = "x", state: str = "RUNNING", comment: str = "") -> str:
    return (_HEAD + _TAIL).format(id=id, name=name, state=state, nodes=nodes, list="n1", comment=comment)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("JOB_GRES=gpu:3   Nodes=n1 CPU_IDs=0-1 Mem=0 GRES=gpu:3(IDX:0-1,5)", [("n1", 0), ("n1", 1), ("n1", 5)]),
        ("Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES_IDX=gpu(IDX:0)", [("n1", 0), ("n2", 0)]),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES= Nodes=n3 CPU_IDs=0 Mem=0 GRES=gpu:h100:1(IDX:2)", [("n3", 2)]),
        ("Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:tesla:1(IDX:3)", [("n1", 3), ("n2", 3)]),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:a:1(IDX:0),gpu:b:1(IDX:4),nic:1(IDX:6)", [("n1", 0), ("n1", 4)]),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:0(IDX:N/A)", []),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=", []),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:5-2)", []),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0-99999999999)", []),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:tesla:2(0/8,2/8)", [("n1", 1)]),
        ("", []),
    ],
)  # fmt: skip
def test_details_of_several_versions(nodes: str, expected: list[tuple[str, int]]) -> None:
    held, _ = parse_held(record(5, nodes))
    assert held.select("node", "gpu_index").rows() == expected
    assert set(held["is_shared"]) <= {"shard" in nodes}


def test_text_of_users_is_never_taken_for_slurms() -> None:
    ours = "JOB_GRES=gpu:1 Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)"
    fake = "Nodes=n4 CPU_IDs=0 Mem=0 GRES=gpu:8(IDX:0-7)"
    held, warnings = parse_held(record(5, ours, name=f"x {fake}", comment=fake))
    assert (held.select("node", "gpu_index").rows(), warnings) == ([("n1", 0)], [])
    for text in (
        record(5, ours, name=f"x CoreSpec=* {fake} MinCPUsNode=1"),
        record(5, ours, comment="a JobState=RUNNING"),
    ):
        held, warnings = parse_held(text + record(6, ours), "alpha")
        assert held["job_id"].to_list() == ["6"]
        assert warnings == ["alpha: job 5: text of its user looks like Slurm's own; its GPUs are left out"]
    # A name with a newline that begins a record of its own.
    held, warnings = parse_held(record(5, ours, name="x\nJobId=99 JobName=y") + record(6, ours))
    assert held["job_id"].to_list() == ["6"]
    assert len(warnings) == 2
    held, _ = parse_held(record(5, ours, name="x\n     Nodes=n4 y") + record(6, ours, state="COMPLETED"))
    assert held.select("job_id", "node").rows() == [("5", "n1")]


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=200), st.text(alphabet="JobId=Nodes= GRES(IDX:0-7),[]\n", max_size=200))
def test_any_text_is_survived(name: str, nodes: str) -> None:
    parse_held(record(5, nodes, name=name) + nodes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as opened:
        yield opened


def samples(
    nodes: int, start: datetime, seconds: int, jobs: dict[tuple[str, int], str | None] | None = None, step: int = 15
) -> pl.DataFrame:
    rows = [
        {"ts": start + timedelta(seconds=t), "cluster": "alpha", "node": f"n{n}", "gpu_uuid": f"GPU-{n}-{g}",
         "gpu_index": g, "job_id": (jobs or {}).get((f"n{n}", g)), "gpu_util_ratio": 0.5}
        for t in range(0, seconds, step) for n in range(1, nodes + 1) for g in range(8)
    ]  # fmt: skip
    types = {"gpu_index": pl.Int32, "ts": pl.Datetime("us", "UTC"), "job_id": pl.String}
    return pl.DataFrame(rows, schema_overrides=types)


def intervals(store: Store, job: str | int) -> list[dict[str, object]]:
    return store.query(
        "SELECT * FROM core_gpu_jobs WHERE job_id = ? ORDER BY node, gpu_index, start_time", [str(job)]
    ).to_dicts()


@pytest.mark.services(*SLURM_PROGRAMS)
def test_a_real_slurm_names_the_gpus_of_running_jobs(slurm: Slurm, store: Store) -> None:
    slurm.reset()
    commands = Commands("alpha", conf=str(slurm.conf))
    now = datetime.now(UTC)
    fresh = samples(4, now - timedelta(seconds=60), 60)
    store.transact(lambda w: w.append("core_gpu_samples", fresh.filter(pl.col("node") != "n4")))
    two = slurm.submit(
        "--gres=gpu:2", "--nodelist=n1", "--time=5", "--job-name=x Nodes=n4 CPU_IDs=0 GRES=gpu:8(IDX:0-7)"
    )
    wide = slurm.submit("-N2", "--gres=gpu:8", "--nodelist=n2,n4", "--time=5", "--exclusive")
    for job in (two, wide):
        slurm.wait_state(job, "RUNNING")
    held, warnings = held_gpus(commands, "alpha")
    assert warnings == []
    assert held.filter(pl.col("job_id") == str(two)).select("node", "gpu_index").rows() == [("n1", 0), ("n1", 1)]
    assert held.filter(pl.col("job_id") == str(wide)).height == 16
    report = ingest_slurm_gpus(store, commands, "alpha", datetime.now(UTC))
    assert (report.error, report.rows, report.unplaced) == (None, 10, 8), "no board of n4 is known yet"
    rows = intervals(store, two)
    assert [(r["gpu_uuid"], r["end_time"], r["source"], r["is_shared"]) for r in rows] == [
        ("GPU-1-0", None, "slurm", False), ("GPU-1-1", None, "slurm", False),
    ]  # fmt: skip
    assert rows[0]["start_time"] == datetime.fromisoformat(slurm.job(two)["StartTime"]).replace(tzinfo=UTC)
    assert ingest_slurm_gpus(store, commands, "alpha", datetime.now(UTC)).rows == 0, "nothing new, nothing written"
    slurm.run("scancel", str(two))
    wait_until(lambda: slurm.job(two)["JobState"] == "CANCELLED", 20, 0.1)
    wait_until(lambda: str(two) not in held_gpus(commands, "alpha")[0]["job_id"].to_list(), 20, 0.2)
    ended = datetime.now(UTC)
    assert ingest_slurm_gpus(store, commands, "alpha", ended).rows == 2
    assert {row["end_time"] for row in intervals(store, two)} == {ended}
    assert all(row["end_time"] is None for row in intervals(store, wide))
    broken = ingest_slurm_gpus(store, Commands("alpha", folder="/nowhere"), "alpha", ended)
    assert "scontrol is not in" in str(broken.error)
    slurm.reset()


def test_labels_of_samples_make_intervals_and_only_changes_are_written(store: Store) -> None:
    ingest = IngestSettings(overlap_s=0)
    whole = {("n1", g): "7" for g in range(8)}
    # 20 minutes of job 7 on n1, then job 8 on half of it; the cleaned sample of n2:0 names none of its two jobs.
    early = samples(2, T0, 1200, whole | {("n2", 0): "40"})
    late = samples(2, at(1200), 1200, {("n1", g): "8" for g in range(4)})
    shared = (pl.col("node") == "n2") & (pl.col("gpu_index") == 0)
    copies = early.filter(shared).with_columns(pl.lit("41").alias("job_id"))
    core = pl.concat([early, late])
    raw = pl.concat([core, copies])  # the exporter gave a copy of the series for each of two jobs
    core = core.with_columns(pl.when(~shared).then("job_id").alias("job_id"))
    core = core.with_columns(  # n1:5 was attributed, its exporter gave no label
        pl.when((pl.col("node") == "n1") & (pl.col("gpu_index") == 5) & (pl.col("ts") >= at(1200)))
        .then(pl.lit("9")).otherwise("job_id").alias("job_id")
    )  # fmt: skip

    def add(until: datetime) -> None:
        def work(writer: object) -> None:
            writer.append("raw_gpu_samples", raw.filter(pl.col("ts") < until))  # ty: ignore[unresolved-attribute]
            writer.append("core_gpu_samples", core.filter(pl.col("ts") < until))  # ty: ignore[unresolved-attribute]
            writer.set_mark("alpha", TELEMETRY_MARK, until)  # ty: ignore[unresolved-attribute]

        store.transact(work)

    assert derive_gpu_jobs(store, "alpha", ingest).until is None
    jobs = pl.DataFrame(
        [{"cluster": "alpha", "job_id": "7", "submit_time": T0, "start_time": T0, "end_time": at(1190),
          "state": "COMPLETED", "observed_at": at(2400)}]
    )  # fmt: skip
    store.transact(lambda w: w.append("core_jobs", conform(jobs, "core_jobs")))
    add(at(2400))
    for moment in (at(600), at(1200), at(1260)):  # as ingest goes on, window by window
        store.transact(lambda w, moment=moment: w.set_mark("alpha", TELEMETRY_MARK, moment))
        derive_gpu_jobs(store, "alpha", ingest)
    assert [(r["start_time"], r["end_time"]) for r in intervals(store, "7")] == [(T0, at(1190))] * 8
    assert [r["end_time"] for r in intervals(store, "8")] == [None] * 4
    assert [r["end_time"] for r in intervals(store, "40")] == [None], "within the gap"
    before = store.snapshot()
    store.transact(lambda w: w.set_mark("alpha", TELEMETRY_MARK, at(2400)))
    done = derive_gpu_jobs(store, "alpha", ingest)
    assert (done.rows, done.until) == (2, at(2400)), "the labels of n2:0 are away for longer than the gap by now"
    assert store.snapshot() > before
    for job in ("40", "41"):
        assert [(r["source"], r["is_shared"], r["end_time"]) for r in intervals(store, job)] == [
            ("exporter", True, at(1200))
        ]
    assert [r["gpu_index"] for r in intervals(store, "8")] == [0, 1, 2, 3]
    assert [(r["source"], r["start_time"]) for r in intervals(store, "9")] == [("samples", at(1200))]

    # All of it in one go gives the same table; so does going over it again.
    known = store.query("SELECT * FROM core_gpu_jobs ORDER BY ALL")
    store.transact(lambda w: w.set_mark("alpha", "core_gpu_jobs", T0))
    derive_gpu_jobs(store, "alpha", ingest)
    assert store.query("SELECT * FROM core_gpu_jobs ORDER BY ALL").equals(known)
    store.transact(lambda w: w.replace_window("core_gpu_jobs", "alpha", T0 - timedelta(days=9), at(9e6), known.clear()))
    store.transact(lambda w: w.set_mark("alpha", "core_gpu_jobs", T0))
    derive_gpu_jobs(store, "alpha", ingest)
    assert store.query("SELECT * FROM core_gpu_jobs ORDER BY ALL").equals(known)


def test_a_scheduler_that_corrects_itself(store: Store) -> None:
    def held(*rows: tuple[str, int, str, float]) -> pl.DataFrame:
        told = [(node, index, job, at(start), False) for node, index, job, start in rows]
        types = {"node": pl.String, "gpu_index": pl.Int32, "job_id": pl.String,
                 "start_time": pl.Datetime("us", "UTC"), "is_shared": pl.Boolean}  # fmt: skip
        return pl.DataFrame(told, schema=types, orient="row")

    def take(now: float, *rows: tuple[str, int, str, float]) -> int:
        return ingest_held(store, held(*rows), "alpha", at(now), source="slurm").rows

    store.transact(lambda w: w.append("core_gpu_samples", samples(1, at(0), 60)))
    assert take(60, ("n1", 0, "7", 10), ("n1", 1, "7", 10)) == 2
    # Index 1 turns out to be another one: the wrong row goes.
    assert take(90, ("n1", 0, "7", 10), ("n1", 2, "7", 10)) == 2
    assert [r["gpu_uuid"] for r in intervals(store, "7")] == ["GPU-1-0", "GPU-1-2"]
    # The job ended, the next one is there already, and the accounting knows when.
    row = {"cluster": "alpha", "job_id": "7", "submit_time": at(0), "start_time": at(10), "end_time": at(100),
           "state": "FAILED", "observed_at": at(110)}  # fmt: skip
    store.transact(lambda w: w.append("core_jobs", conform(pl.DataFrame([row]), "core_jobs")))
    assert take(120, ("n1", 0, "8", 101)) == 3
    assert {r["end_time"] for r in intervals(store, "7")} == {at(100)}
    assert spans(store.query("SELECT * FROM core_gpu_jobs WHERE gpu_uuid = 'GPU-1-0' ORDER BY start_time")) == [
        ("GPU-1-0", "7", 10, 100), ("GPU-1-0", "8", 101, None),
    ]  # fmt: skip
    # No scheduler's word for a while changes nothing of what samples tell.
    assert take(150) == 1
    assert [r["end_time"] for r in intervals(store, "8")] == [at(150)]


# --- exporters' series of jobs ------------------------------------------------------------------------------------


def page(text: str) -> pl.DataFrame:
    """GPU rows of a page whose lines are all of one time."""
    index = Index()
    read = parse_page(text.strip() + "\n", index, "")
    at_ms = round(T0.timestamp() * 1000)
    flat = Samples(
        np.array(read.names), np.array(read.entities), np.ones(len(read.names), np.int64),
        np.full(len(read.names), at_ms), np.array(read.values),
    )  # fmt: skip
    return to_frames(flat, index, "alpha").gpu.sort("gpu_uuid")


def test_jobstats_gives_the_job_of_a_gpu_as_a_value() -> None:
    lines = [
        f'nvidia_gpu_{name}{{minor_number="{i}",uuid="GPU-{i}",instance="n1:9445"}} {value}'
        for name, values in (("temperature_celsius", [60] * 6), ("jobId", [4711, 0, -1, 0.5, "NaN", 1e300]))
        for i, value in enumerate(values)
    ]
    got = page("\n".join(lines))
    assert got["job_id"].to_list() == ["4711", None, None, None, None, None]
    assert got.height == 6, "no rows of its own"
    named = page(lines[0].replace("instance", 'hpc_job="9",instance') + "\n" + lines[6])
    assert named["job_id"].to_list() == ["9"], "a sample's own label goes first"


def test_omnistat_gives_the_jobs_of_a_node_in_labels() -> None:
    def job(node: str, jobid: str, value: float = 1, **more: str) -> str:
        told = "".join(f',{name}="{text}"' for name, text in more.items())
        return f'rmsjob_info{{jobid="{jobid}",user="ann",nodes="2",instance="{node}:8001"{told}}} {value}'

    lines = [
        f'rocm_utilization_percentage{{card="{i}",instance="n{n}:8001"}} 60' for n in range(1, 7) for i in range(2)
    ]
    lines += [
        job("n1", "4711", jobstep="0"), job("n1", "4711", jobstep="1"),
        job("n2", ""),
        job("n3", "1"), job("n3", "2"),  # no one knows which of them has which GPU
        job("n4", "5", card="1"),
        job("n5", "6", value=0),
    ]  # fmt: skip
    got = page("\n".join(lines))
    jobs = dict(got.select("gpu_uuid", "job_id").rows())
    assert jobs == {
        "n1:0": "4711", "n1:1": "4711", "n2:0": None, "n2:1": None, "n3:0": None, "n3:1": None, "n4:0": None,
        "n4:1": "5", "n5:0": None, "n5:1": None, "n6:0": None, "n6:1": None,
    }  # fmt: skip
    assert page(lines[-1]).is_empty(), "a job without samples is no sample"


@pytest.mark.services("prometheus", "promtool")
def test_jobs_of_the_past_from_exporters_reach_the_store(tmp_path: Path, store: Store) -> None:
    """Both exporters as a Prometheus recorded them hours ago; the jobs are over."""
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=6)
    lines: dict[str, list[str]] = {}
    for i in range(160):  # 40 minutes
        ts = int(start.timestamp()) + 15 * i
        stats, omni = 'minor_number="0",uuid="GPU-1",instance="n1:9445"', 'instance="n2:8001"'
        job = 4711 if 20 <= i < 40 else 0
        of_node = "4712" if 30 <= i < 60 else ""
        for name, labels, value in (
            ("nvidia_gpu_temperature_celsius", stats, 60), ("nvidia_gpu_jobId", stats, job),
            ("rocm_utilization_percentage", f'card="0",{omni}', 50),
            ("rmsjob_info", f'jobid="{of_node}",user="ann",{omni}', 1),
        ):  # fmt: skip
            lines.setdefault(name, []).append(f"{name}{{{labels}}} {value} {ts}\n")
    server = Prometheus(tmp_path / "prometheus", history="".join(line for part in lines.values() for line in part))
    source = PrometheusSource("alpha", server.url)
    ingest = IngestSettings()
    try:
        report = ingest_telemetry(store, source, "alpha", ingest, start + timedelta(minutes=40), since=start)
    finally:
        source.close()
        server.stop()
    assert report.error is None
    derive_gpu_jobs(store, "alpha", ingest)
    rows = store.query("SELECT node, job_id, start_time, end_time, source FROM core_gpu_jobs ORDER BY node").rows()

    def moment(i: int) -> datetime:
        return start + timedelta(seconds=15 * i)

    assert rows == [
        ("n1", "4711", moment(20), moment(40), "exporter"), ("n2", "4712", moment(30), moment(60), "exporter"),
    ]  # fmt: skip

"""Import of files: what each kind gives, what the report says, and that nothing bad in a file costs anything good."""

from __future__ import annotations

import gzip
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from polars.testing import assert_frame_equal

from features.metrics import DEFAULT
from features.vocabulary import JOB_COLUMNS, TABLES, schema
from pipelines.importing import import_files
from pipelines.imports import ImportingError
from pipelines.imports.exposition import time_of_name
from pipelines.imports.report import Report
from pipelines.imports.targets import ParquetTarget, StoreTarget, check_output
from pipelines.sources.trace import JobsTrace, TelemetryTrace
from pipelines.store import Store
from weatherglass import cli

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
T0 = datetime(2026, 11, 30, 11, tzinfo=UTC)
EPOCH = round(T0.timestamp())
SACCT = "JobID|JobIDRaw|User|Submit|Start|End|State|NNodes|ReqTRES|NodeList|JobName"


def run(kind: str, path: Path, tmp_path: Path, **options: Any) -> tuple[Report, pl.DataFrame]:
    """Import into a Parquet file; the report and what the file holds."""
    out = tmp_path / "out" / "out.parquet"
    out.parent.mkdir(exist_ok=True)
    target = ParquetTarget(out)
    try:
        report = import_files(kind, path, "c", target, out.parent, now=NOW, **options)
    finally:
        target.close()
    left = {file.name for file in out.parent.iterdir() if file.name.startswith(".")}
    assert not left
    if not out.exists():
        return report, pl.DataFrame()
    frame = pl.read_parquet(out)
    assert frame.schema == schema(next(name for name in report.kept if report.kept[name]))
    return report, frame


def sacct_line(job: int, state: str = "COMPLETED", submit: object = EPOCH, **fields: object) -> str:
    values = {
        "JobID": job, "JobIDRaw": job, "User": "ada", "Submit": submit, "Start": EPOCH + 60, "End": EPOCH + 600,
        "State": state, "NNodes": 1, "ReqTRES": "cpu=8,gres/gpu=4", "NodeList": "n1", "JobName": "train", **fields,
    }  # fmt: skip
    return "|".join(str(values[name]) for name in SACCT.split("|"))


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end)
    return path


def dcgm(name: str, value: object, gpu: int = 0, ts: str = "") -> str:
    labels = f'gpu="{gpu}",UUID="GPU-{gpu}000",device="nvidia{gpu}",modelName="NVIDIA H100",Hostname="n1"'
    return f"DCGM_FI_DEV_{name}{{{labels}}} {value}{' ' if ts else ''}{ts}"


# --- sacct ------------------------------------------------------------------------------------------------


def test_sacct_bad_lines_cost_nothing_good(tmp_path: Path) -> None:
    path = write(
        tmp_path / "jobs.txt",
        SACCT,
        sacct_line(1),
        "what|is|this",
        sacct_line(2, "FAILED", Start="yesterday"),
        sacct_line(3, submit="never"),
        sacct_line(4).replace("train", "a|b"),
        "4.batch" + sacct_line(4)[1:].replace("|4|", "|4.batch|", 1),
        sacct_line(5, submit=EPOCH + 10 * 86_400),
        "x" * (2 << 20),
        sacct_line(1, "COMPLETED", End=EPOCH + 700),
        sacct_line(6, "TIMEOUT"),
    )
    report, jobs = run("sacct", path, tmp_path)
    assert jobs["job_id"].sort().to_list() == ["1", "2", "4", "6"]
    by_id = {row["job_id"]: row for row in jobs.iter_rows(named=True)}
    assert by_id["1"]["end_time"] == T0 + timedelta(seconds=700)
    assert by_id["4"]["name"] == "a|b"
    assert (by_id["6"]["gpus"], by_id["6"]["state"], by_id["2"]["start_time"]) == (4, "TIMEOUT", None)
    assert set(jobs["cluster"]) == {"c"}
    dropped = {reason: (tally.count, tally.places) for reason, tally in report.dropped.items()}
    assert dropped == {
        "fewer fields than the header's 11": (1, [3]),
        "no submission time that can be read, or no job id": (1, [5]),
        "submitted more than a day ahead of now": (1, [8]),
        "longer than 1 MiB": (1, [9]),
    }
    assert {reason: tally.count for reason, tally in report.passed.items()} == {
        "steps of jobs: their job tells of them": 1,
        "records that a later record of the same job replaces": 1,
    }
    (key, tally), *others = report.nulled.items()
    assert not others
    assert (key[0], tally.count, tally.places, tally.example) == ("start_time", 1, [4], "yesterday")
    assert report.read == 10
    text = report.text()
    assert "(line 3), as 3: what|is|this" in text
    assert "4 rows of core_jobs" in text


def test_sacct_in_batches_with_names_of_several_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.imports.lines._MOST", 3)
    lines = [SACCT, *(sacct_line(i, JobName=f"name\nof {i}") for i in range(20))]
    report, jobs = run("sacct", write(tmp_path / "jobs.txt", *lines, end=""), tmp_path)
    assert jobs.sort(pl.col("job_id").cast(pl.Int32))["name"].to_list() == [f"name\nof {i}" for i in range(20)]
    assert (report.read, report.dropped) == (40, {})
    assert [tally.count for tally in report.passed.values()] == [20]


def test_sacct_times_of_a_zone(tmp_path: Path) -> None:
    line = sacct_line(1, submit="2026-07-01T12:00:00", Start="2026-07-01T12:00:00", End="2026-07-01T13:00:00")
    _, jobs = run("sacct", write(tmp_path / "a.txt", SACCT, line), tmp_path, zone="Europe/Berlin")
    assert jobs["submit_time"].to_list() == [datetime(2026, 7, 1, 10, tzinfo=UTC)]
    assert jobs["end_time"].to_list() == [datetime(2026, 7, 1, 11, tzinfo=UTC)]
    _, jobs = run("sacct", write(tmp_path / "b.txt", SACCT, sacct_line(1)), tmp_path, zone="Europe/Berlin")
    assert jobs["submit_time"].to_list() == [T0]


@pytest.mark.parametrize(
    ("submit", "start", "end", "elapsed_s", "began", "ended"),
    [
        # Clocks show 02:00 to 03:00 twice: from 00:00 UTC on, and from 01:00 UTC on.
        ("01:00", "02:30", "02:15", 2700, "00:30", "01:15"),
        ("01:00", "02:10", "02:50", 6000, "00:10", "01:50"),
        ("01:00", "02:10", "02:50", 2400, "00:10", "00:50"),
        ("02:50", "02:10", "02:20", 600, "01:10", "01:20"),
        ("01:00", "02:30", "02:15", "", "00:30", "01:15"),
        ("01:00", "01:30", "03:30", 10800, "-00:30", "02:30"),
    ],
)
def test_sacct_times_that_clocks_show_twice(
    submit: str, start: str, end: str, elapsed_s: object, began: str, ended: str, tmp_path: Path
) -> None:
    def at(text: str) -> datetime:
        hours, minutes = map(int, text.lstrip("-").split(":"))
        span = timedelta(hours=hours, minutes=minutes)
        return datetime(2026, 10, 25, tzinfo=UTC) + (-span if text.startswith("-") else span)

    times = {"submit": submit, "Start": start, "End": end}
    line = sacct_line(1, **{name: f"2026-10-25T{time}:00" for name, time in times.items()})
    path = write(tmp_path / "a.txt", SACCT + "|ElapsedRaw", f"{line}|{elapsed_s}")
    report, jobs = run("sacct", path, tmp_path, zone="Europe/Berlin")
    (row,) = jobs.iter_rows(named=True)
    assert (row["start_time"], row["end_time"]) == (at(began), at(ended))
    assert row["elapsed_s"] == (elapsed_s or None)
    assert not report.nulled


def test_sacct_suspended_resized_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.imports.lines._MOST", 2)  # a job and its steps are read together all the same
    header = SACCT + "|ElapsedRaw|ExitCode|MaxRSS"
    step = sacct_line(1, "FAILED", NodeList="n1").replace("1|1|", "1.{0}|1.{0}|", 1)
    lines = [
        sacct_line(1, End=EPOCH + 36_060) + "|3600|0:0|",
        *(f"{step.format(i)}|5|{i}:0|{i}K" for i in range(5)),
        sacct_line(2, "RESIZING", NNodes=2) + "|540|0:0|",
        sacct_line(2, submit=EPOCH + 600, End=EPOCH + 900) + "|840|0:0|",
        sacct_line(3, ElapsedRaw="") + "|-5|0:0|",
    ]
    report, jobs = run("sacct", write(tmp_path / "a.txt", header, *lines), tmp_path)
    rows = jobs.sort("job_id", "submit_time").select("job_id", "state", "elapsed_s", "steps", "max_rss_bytes").rows()
    assert rows == [
        ("1", "COMPLETED", 3600, 5, 4096),
        ("2", "RESIZING", 540, None, None),
        ("2", "COMPLETED", 300, None, None),
        ("3", "COMPLETED", None, None, None),
    ]
    later = jobs.filter(pl.col("submit_time") == T0 + timedelta(seconds=600))
    assert later["start_time"].to_list() == [T0 + timedelta(seconds=600)]
    assert {key[0]: tally.count for key, tally in report.nulled.items()} == {"elapsed_s": 1}


def test_sacct_without_a_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportingError, match=r"jobs\.txt: line 1: no header of sacct"):
        run("sacct", write(tmp_path / "jobs.txt", sacct_line(1)), tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ImportingError, match=r"empty\.txt: the file is empty"):
        run("sacct", tmp_path / "empty.txt", tmp_path)


# --- swf --------------------------------------------------------------------------------------------------


def test_swf(tmp_path: Path) -> None:
    good = "3 120 5 600 8 -1 -1 16 3600 1024 1 7 2 4 1 -1 -1 -1"
    lines = [
        f"; UnixStartTime: {EPOCH}",
        good,
        "4 oops 5 600 8 -1 -1 16 3600 -1 1 7 2 4 1 -1 -1 -1",
        "5 130 5 600",
        "6 1e300 5 1e300 8 -1 -1 16 3600 -1 1 7 2 4 1 -1 -1 -1",
        "7 140 nan 600 1e300 -1 -1 1e300 inf 1e308 0 7 2 4 1 -1 -1 -1",
        "8 150 5 600 8 -1 -1 16 3600 -1 3 7 2 4 1 -1 -1 -1",
    ]
    path = tmp_path / "a.swf.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    report, jobs = run("swf", path, tmp_path)
    assert jobs["job_id"].to_list() == ["3", "7"]
    first, second = jobs.iter_rows(named=True)
    assert (first["submit_time"], first["start_time"]) == (T0 + timedelta(seconds=120), T0 + timedelta(seconds=125))
    assert (first["end_time"], first["cpus"], first["memory_mib"]) == (T0 + timedelta(seconds=725), 16, 16)
    assert (second["state"], second["cpus"], second["start_time"], second["time_limit_s"]) == (
        "FAILED",
        None,
        None,
        None,
    )
    assert {reason: tally.places for reason, tally in report.dropped.items()} == {
        "fewer than 18 numbers": [4],
        "job number or submission time is no number that can be true": [3, 5],
    }
    assert {reason: tally.places for reason, tally in report.passed.items()} == {
        "parts of jobs that were checkpointed": [7]
    }
    nulled = {column: (tally.count, tally.places, tally.example) for (column, _), tally in report.nulled.items()}
    assert nulled == {
        "start_time": (1, [6], "nan"),
        "end_time": (1, [6], "600"),
        "cpus": (1, [6], "1e300"),
        "memory_mib": (1, [6], "1e308"),
        "time_limit_s": (1, [6], "inf"),
    }
    columns = [name for name in JOB_COLUMNS if name != "observed_at"]
    assert_frame_equal(JobsTrace("c", str(path)).fetch_jobs(T0, NOW).select(columns), jobs.select(columns))


# --- exposition -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2026-11-30T12:00:00Z.prom", NOW),
        ("2026-11-30T12-00-00Z.prom", NOW),
        ("node7_20261130T120000.txt", NOW),
        ("2026-11-30T13:00:00+01:00.prom", NOW),
        ("1796040000.prom", NOW),
        ("n1-1796040000500.prom", NOW + timedelta(milliseconds=500)),
        ("metrics.prom", None),
        ("2026-13-41T99:00:00Z.prom", None),
        ("12345.prom", None),
    ],
)
def test_time_of_a_file_name(name: str, expected: datetime | None) -> None:
    assert time_of_name(name) == expected


def test_folder_of_scrapes(tmp_path: Path) -> None:
    folder = tmp_path / "scrapes"
    folder.mkdir()
    for i in range(3):
        moment = T0 + timedelta(seconds=15 * i)
        write(
            folder / f"{moment:%Y-%m-%dT%H:%M:%SZ}.prom",
            "# HELP DCGM_FI_DEV_GPU_TEMP temperature",
            "# TYPE DCGM_FI_DEV_GPU_TEMP gauge",
            *(dcgm("GPU_TEMP", 40 + i + gpu, gpu) for gpu in range(2)),
            dcgm("POWER_USAGE", 9.2e18),
            dcgm("POWER_USAGE", 300.0, 1),
            "DCGM_FI_DEV_GPU_TEMP{broken",
            "go_goroutines 7",
            "DCGM_FI_DEV_GPU_TEMP 12 13 14 what",
        )
    report, frame = run("exposition", folder, tmp_path)
    assert len(frame) == 6
    assert frame["gpu_temp_c"].to_list() == [40.0, 41.0, 41.0, 42.0, 42.0, 43.0]
    assert frame["ts"].unique().sort().to_list() == [T0 + timedelta(seconds=15 * i) for i in range(3)]
    assert frame["gpu_power_w"].to_list() == [None, 300.0] * 3
    assert sum(tally.count for tally in report.dropped.values()) >= 3
    assert 7 in report.dropped["not a series"].places
    assert sum(tally.count for (column, _), tally in report.nulled.items() if column == "gpu_power_w") == 3
    assert (report.seen["GPU"], report.seen["node"]) == (2, 1)
    assert any("every 15 s" in text for text in report.notes)


def test_metrics_of_the_user(tmp_path: Path) -> None:
    own = {"my_board_heat": {"column": "gpu_temp_c", "scale": 0.1}}
    path = write(tmp_path / f"{EPOCH}.prom", 'my_board_heat{UUID="GPU-1",Hostname="n1"} 420')
    assert run("exposition", path, tmp_path)[0].rows == 0
    _, frame = run("exposition", path, tmp_path, vocabulary=DEFAULT.overridden(own))
    assert frame.select("gpu_uuid", "gpu_temp_c").rows() == [("GPU-1", 42.0)]


def test_scrape_without_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "page.prom", dcgm("GPU_TEMP", 40))
    report, frame = run("exposition", path, tmp_path)
    assert (len(frame), report.rows) == (0, 0)
    assert "give --at" in report.text()
    _, frame = run("exposition", path, tmp_path, at=T0)
    assert frame["ts"].to_list() == [T0]


def test_openmetrics_with_timestamps(tmp_path: Path) -> None:
    names = ("GPU_TEMP", "POWER_USAGE", "FB_USED")
    lines = [dcgm(name, 50 + i, 0, f"{EPOCH + 15 * i}{'.250' if i == 3 else ''}") for name in names for i in range(5)]
    whole = write(tmp_path / "all.om", *lines, "# EOF")
    report, frame = run("exposition", whole, tmp_path)
    moments = [T0 + timedelta(seconds=15 * i, milliseconds=250 if i == 3 else 0) for i in range(5)]
    assert frame["ts"].to_list() == moments
    assert frame["gpu_temp_c"].to_list() == frame["gpu_power_w"].to_list() == [50.0 + i for i in range(5)]
    assert frame["fb_used_bytes"].to_list() == [(50 + i) * 2.0**20 for i in range(5)]
    assert report.dropped == {}
    milliseconds = write(tmp_path / "ms.prom", dcgm("GPU_TEMP", 50, 0, f"{EPOCH * 1000 + 250}"))
    _, frame = run("exposition", milliseconds, tmp_path)
    assert frame["ts"].to_list() == [T0 + timedelta(milliseconds=250)]


def test_rows_spread_over_batches_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.imports.lines._MOST", 7)
    monkeypatch.setattr("pipelines.imports.staging._SLICE_ROWS", 11)
    lines = [
        dcgm(name, 50 + i, gpu, f"{(EPOCH + 15 * i) * 1000}")
        for name in ("GPU_TEMP", "POWER_USAGE") for gpu in range(3) for i in range(10)
    ]  # fmt: skip
    report, frame = run("exposition", write(tmp_path / "all.prom", *lines), tmp_path)
    assert len(frame) == 30
    assert (
        frame["gpu_power_w"].to_list() == frame["gpu_temp_c"].to_list() == [50.0 + i for i in range(10) for _ in "abc"]
    )
    assert (report.dropped, report.nulled) == ({}, {})


def test_page_that_breaks_off(tmp_path: Path) -> None:
    path = write(tmp_path / f"{EPOCH}.prom", dcgm("GPU_TEMP", 40), dcgm("POWER_USAGE", 70), end="")
    report, frame = run("exposition", path, tmp_path)
    assert (frame["gpu_temp_c"].to_list(), frame["gpu_power_w"].to_list()) == ([40.0], [None])
    assert report.dropped["the file breaks off in it"].places == [2]


# --- Prometheus answers -----------------------------------------------------------------------------------


def series(name: str, gpu: int, **more: Any) -> dict[str, Any]:
    labels = {"__name__": f"DCGM_FI_DEV_{name}", "gpu": str(gpu), "UUID": f"GPU-{gpu}000", "Hostname": "n1", "job": "d"}
    return {"metric": labels, **more}


def answer(result: list[Any], kind: str = "matrix", **more: Any) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}, **more}).encode()


def test_prometheus_range_and_instant(tmp_path: Path) -> None:
    values = [[EPOCH + 15 * i, str(40 + i)] for i in range(4)]
    path = tmp_path / "range.json.gz"
    bad = [{"metric": {"__name__": "x"}, "values": "no"}, {"metric": 7, "values": values}, [1], None]
    result = [series("GPU_TEMP", 0, values=values), *bad, series("GPU_TEMP", 1, values=values[1:])]
    path.write_bytes(gzip.compress(answer(result, warnings=["half of it"])))
    report, frame = run("prometheus-json", path, tmp_path)
    assert len(frame) == 7
    assert frame.filter(pl.col("gpu_uuid") == "GPU-0000")["gpu_temp_c"].to_list() == [40.0, 41.0, 42.0, 43.0]
    assert report.read == 6
    assert sorted(place for tally in report.dropped.values() for place in tally.places) == [2, 3, 4, 5]
    assert "the server warned: half of it" in report.notes
    path = tmp_path / "now.json"
    up = {"metric": {"__name__": "up", "job": "d", "instance": "n1:9400", "node": "n1"}, "value": [EPOCH, "1"]}
    other = {"metric": {"__name__": "up", "job": "prometheus", "instance": "x:9090"}, "value": [EPOCH, "1"]}
    result = [up, other, series("GPU_TEMP", 0, value=[EPOCH + 0.5, "40"]), series("GPU_TEMP", 1, value=[EPOCH, 4])]
    path.write_bytes(answer(result, "vector"))
    report, frame = run("prometheus-json", path, tmp_path)
    assert frame.select("ts", "gpu_uuid", "gpu_temp_c").rows() == [(T0 + timedelta(seconds=0.5), "GPU-0000", 40.0)]
    assert [tally.places for tally in report.dropped.values()] == [[4]]
    nodes = pl.read_parquet(tmp_path / "out" / "out.core_node_samples.parquet")
    assert nodes.select("node", "ts", "is_up").rows() == [("n1", T0, True)]


@pytest.mark.parametrize(
    "body",
    [b" ", b"[]", b"nonsense", b'{"status":"success"}', b'{"status":"error","error":"too many samples"}',
     answer([], "scalar"), answer([])[:-10], b"\x1f\x8b broken"],
)  # fmt: skip
def test_answers_of_no_use(body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(body)
    report, frame = run("prometheus-json", path, tmp_path)
    assert (len(frame), report.rows) == (0, 0)
    assert report.dropped


# --- canonical files --------------------------------------------------------------------------------------

JOB_TRACES = {"cedar-2021": 125_116, "kth-sp2-1996": 28_489, "llnl-atlas-2006": 43_778, "microsoft-itp-2021": 69_351}


@pytest.mark.traces
@pytest.mark.parametrize("name", JOB_TRACES)
def test_recorded_jobs_come_back_equal(name: str, traces: Path, tmp_path: Path) -> None:
    path = traces / "jobs" / f"{name}.parquet"
    report, jobs = run("jobs", path, tmp_path)
    recorded = pl.read_parquet(path)
    assert report.read == len(jobs) == len(recorded) == JOB_TRACES[name]
    assert (report.dropped, report.nulled, report.passed) == ({}, {}, {})
    order = ["submit_time", "job_id"]
    columns = [column for column in recorded.columns if column != "cluster"]
    assert_frame_equal(jobs.select(columns).sort(order), recorded.select(columns).sort(order))
    assert set(jobs["cluster"]) == {"c"}
    if name == "microsoft-itp-2021":  # its quirks: ten clusters, no user, no state
        assert any("itp-01, itp-02" in text for text in report.notes)
        assert "users" not in report.text()
        assert set(jobs["state"]) == {"UNKNOWN"}
    if name == "llnl-atlas-2006":  # waits were not recorded
        assert (jobs["start_time"] == jobs["submit_time"]).all()


def test_jobs_from_csv(tmp_path: Path) -> None:
    path = write(
        tmp_path / "jobs.csv",
        "job_id,submit_time,start_time,end_time,gpus,state,name,colour",
        "1,2026-11-01T10:00:00Z,2026-11-01 10:05:00,2026-11-01T12:00:00+01:00,8,COMPLETED,train,red",
        '2,1793527200,1793527260000,,-3,RUNNING,"a, b\nc",red',
        "3,2026-11-01T10:00:00Z,soon,,2.0,blue,x,",
        "4,not a time,,,1,FAILED,x,",
        ",2026-11-01T10:00:00Z,,,1,FAILED,x,",
        "5,2026-11-01T10:00:00Z,,,1,FAILED",
        '6,2026-11-01T10:00:00Z,,,1.5,FAILED,"never closed,',
        "7,2026-11-01T10:00:00Z,2026-11-01T11:00:00Z,2026-11-01T10:30:00Z,1,FAILED,x,",
        "8,2027-11-01T10:00:00Z,,,1,FAILED,x,",
    )
    report, jobs = run("jobs", path, tmp_path)
    by_id = {row["job_id"]: row for row in jobs.iter_rows(named=True)}
    assert sorted(by_id) == ["1", "2", "3", "7"]
    submit = datetime(2026, 11, 1, 10, tzinfo=UTC)
    assert (by_id["1"]["submit_time"], by_id["1"]["start_time"]) == (submit, submit + timedelta(minutes=5))
    assert (by_id["1"]["end_time"], by_id["1"]["gpus"]) == (submit + timedelta(hours=1), 8)
    assert (by_id["2"]["submit_time"], by_id["2"]["gpus"], by_id["2"]["name"]) == (submit, None, "a, b\nc")
    assert by_id["2"]["start_time"] == submit + timedelta(minutes=1)
    assert (by_id["3"]["state"], by_id["3"]["start_time"], by_id["3"]["gpus"]) == ("UNKNOWN", None, 2)
    assert by_id["7"]["end_time"] is None
    assert {reason: tally.places for reason, tally in report.dropped.items()} == {
        "no submit_time that can be read": [6],
        "no job_id": [7],
        "not the 8 fields of the header": [8],
        "a quote is not closed": [9],
        "submitted more than a day ahead of now": [11],
    }
    assert {key for key, _ in report.nulled} == {"start_time", "gpus", "state", "end_time"}
    assert any("colour" in text for text in report.notes)


def test_tables_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 not really")
    for kind in ("jobs", "telemetry"):
        with pytest.raises(ImportingError, match=r"junk\.parquet: no Parquet file"):
            run(kind, tmp_path / "junk.parquet", tmp_path)
        with pytest.raises(ImportingError, match=r"columns? missing: .*; found: a, b"):
            run(kind, write(tmp_path / "x.csv", "a,b", "1,2"), tmp_path)
        with pytest.raises(ImportingError, match="more than one column is named a"):
            run(kind, write(tmp_path / "x.csv", "A,b,a", "1,2,3"), tmp_path)
        with pytest.raises(ImportingError, match="a folder"):
            run(kind, tmp_path, tmp_path)
    with pytest.raises(ImportingError, match="none of its columns is a quantity"):
        run("telemetry", write(tmp_path / "y.csv", "ts,node,gpu_uuid", "1,n,g"), tmp_path)


@pytest.mark.traces
def test_recorded_telemetry(traces: Path, tmp_path: Path) -> None:
    path = traces / "telemetry" / "amd-mi300x-2025.parquet"
    report, frame = run("telemetry", path, tmp_path)
    recorded = pl.read_parquet(path)
    assert report.read == len(frame) == len(recorded) == 18_320
    assert (report.seen, report.dropped, report.nulled) == ({"GPU": 8, "node": 1}, {}, {})
    names = [name for name in recorded.columns if name != "cluster"]
    order = ["ts", "gpu_uuid"]
    expected = recorded.select(pl.col(name).cast(frame.schema[name]) for name in names).sort(order)
    assert_frame_equal(frame.select(names).sort(order), expected)
    # Its README: 46 minutes, irregular 1 to 6 s, seven of the eight GPUs idle.
    assert report.first is not None
    assert report.last is not None
    assert round((report.last - report.first) / timedelta(minutes=1)) == 46
    assert any("every 1 s; no silence longer than 10 s" in text for text in report.notes)
    assert "gpu_util_ratio in 64.8 %" in report.text()
    busy = frame.group_by("gpu_uuid").agg(pl.col("gpu_util_ratio").mean()).filter(pl.col("gpu_util_ratio") > 0.01)
    assert busy["gpu_uuid"].to_list() == ["card0"]
    again = TelemetryTrace("c", str(tmp_path / "out" / "out.parquet")).latest().gpu
    assert len(again) == 8


def test_telemetry_of_gpus_and_nodes_from_csv(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "ts;node;gpu_uuid;gpu_temp_c;gpu_power_w;is_power_capped;inlet_temp_c",
        f"{EPOCH};n1;g0;50;300;true;25",
        f"{EPOCH};n1;g1;500;warm;0;25",
        f"{EPOCH};n1;;;;;26",
        f"{EPOCH + 15};n2;;;;;",
        f"{EPOCH + 86_400};n1;g0;50;300;1;",
        "0;n1;g0;50;300;1;",
    )
    report, frame = run("telemetry", path, tmp_path)
    assert frame.select("ts", "gpu_uuid", "gpu_temp_c", "gpu_power_w", "is_power_capped").rows() == [
        (T0, "g0", 50.0, 300.0, True), (T0, "g1", None, None, False),
    ]  # fmt: skip
    nodes = pl.read_parquet(tmp_path / "out" / "out.core_node_samples.parquet")
    assert nodes.select("ts", "node", "inlet_temp_c").rows() == [(T0, "n1", 25.0)]
    assert set(report.nulled) == {("gpu_temp_c", "out_of_range"), ("gpu_power_w", "cannot be read")}
    assert [tally.count for reason, tally in report.dropped.items() if "before 2000" in reason] == [2]


# --- the store --------------------------------------------------------------------------------------------


def _contents(store: Store) -> dict[str, pl.DataFrame]:
    tables = {name: store.query(f"SELECT * FROM {name}") for name in TABLES}
    return {name: frame.sort(TABLES[name].key) for name, frame in tables.items() if not frame.is_empty()}


def test_importing_twice_leaves_the_same_store(tmp_path: Path) -> None:
    jobs = write(
        tmp_path / "jobs.txt",
        SACCT,
        sacct_line(1, ReqTRES="gres/gpu=2"),
        sacct_line(2, "RUNNING", NodeList="n2"),
        "nonsense|",
    )
    pages = [dcgm("GPU_TEMP", 40 + i, gpu, str((EPOCH + 60 + 15 * i) * 1000)) for i in range(40) for gpu in range(2)]
    scrapes = write(tmp_path / "scrapes.prom", *pages, dcgm("GPU_TEMP", 999, 0, str(EPOCH * 1000)))
    with Store.open(f"sqlite:{tmp_path}/store.sqlite", str(tmp_path / "data")) as store:

        def load() -> None:
            for kind, path in (("sacct", jobs), ("exposition", scrapes)):
                report = import_files(kind, path, "c", StoreTarget(store, "c", path.name), tmp_path, now=NOW)
                assert report.written == "the store"

        load()
        once = _contents(store)
        load()
        twice = _contents(store)
        assert once.keys() == twice.keys() >= {
            "raw_jobs", "core_jobs", "raw_gpu_samples", "core_gpu_samples", "core_gpu_minutes", "core_gpu_hours",
            "core_data_quality",
        }  # fmt: skip
        for name, frame in once.items():
            assert_frame_equal(frame, twice[name])
        assert len(once["core_gpu_samples"]) == 81
        # The job that had both GPUs of its node gets their samples.
        owned = once["core_gpu_samples"].filter(pl.col("job_id") == "1")
        assert len(owned) == 2 * 36
        assert len(once["core_gpu_minutes"]) == 2 * 10 + 1
        assert set(once["core_data_quality"]["reason"]) == {
            "out_of_range",
            "a job that pends or runs has not ended",
            "dropped: fewer fields than the header's 11",
        }
        # A later state of a job replaces the earlier one, and samples of other GPUs stay.
        more = write(tmp_path / "more.prom", dcgm("GPU_TEMP", 60, 7, str((EPOCH + 60) * 1000)))
        import_files("exposition", more, "c", StoreTarget(store, "c", "more"), tmp_path, now=NOW)
        assert len(store.query("SELECT * FROM core_gpu_samples")) == 82


# --- the command ------------------------------------------------------------------------------------------


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = write(tmp_path / "jobs.txt", SACCT, sacct_line(1), "bad|line")
    runner = CliRunner()

    def call(*arguments: str) -> Any:
        return runner.invoke(cli, ["import", *arguments])

    done = call("sacct", "jobs.txt", "--cluster", "c", "--out", "out.parquet")
    assert done.exit_code == 0, done.output
    assert "1 row of core_jobs" in done.output
    assert "(line 3), as 2: bad|line" in done.output
    assert len(pl.read_parquet("out.parquet")) == 1
    before = (tmp_path / "out.parquet").read_bytes()
    write(tmp_path / "none.txt", SACCT, "bad|line")
    done = call("sacct", "none.txt", "--cluster", "c", "--out", "out.parquet")
    assert done.exit_code == 1
    assert "nothing" in done.output
    assert (tmp_path / "out.parquet").read_bytes() == before
    assert call("pdf", "jobs.txt", "--cluster", "c").exit_code == 2
    assert call("sacct", "jobs.txt").exit_code == 2
    assert call("sacct", "jobs.txt", "--cluster", "c", "--tz", "Mars/Base").exit_code == 2
    assert call("exposition", "jobs.txt", "--cluster", "c", "--at", "noon").exit_code == 2
    config = write(tmp_path / "w.toml", 'state_dir = "state"', "[clusters.c]", 'jobs = "none"')
    monkeypatch.setenv("WEATHERGLASS_CONFIG", str(config))
    for _ in range(2):
        done = call("sacct", str(good), "--cluster", "c")
        assert done.exit_code == 0, done.output
        assert "written     the store" in done.output
    assert "SettingsError" in repr(call("sacct", str(good), "--cluster", "other").exception)


def test_nothing_but_an_earlier_output_is_written_over(tmp_path: Path) -> None:
    source = tmp_path / "jobs.txt"
    source.write_text("JobID|State\n1|COMPLETED\n")
    (tmp_path / "notes.md").write_text("keep me")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "earlier.parquet").write_bytes(b"PAR1 of an earlier import")
    for name, said in (
        ("jobs.txt", "this file is what is read"),
        ("notes.md", "a file that is no Parquet"),
        ("fifo", "not a regular file"),
        ("", "must be a file"),
        ("away/jobs.parquet", "no folder"),
    ):
        with pytest.raises(ImportingError, match=said):
            check_output(tmp_path / name, [source])
    check_output(tmp_path / "earlier.parquet", [source])
    check_output(tmp_path / "new.parquet", [source])
    assert source.read_text().startswith("JobID")

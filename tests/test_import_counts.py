"""Import: what the report counts. Every value that becomes null and every row that goes is told, and none twice."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from features.vocabulary import COLUMNS, JOB_COLUMNS, JOB_EXTRAS
from pipelines.importing import import_files
from pipelines.imports import KINDS, ImportingError, OptionError
from pipelines.imports.report import Report, length, many, words
from pipelines.imports.targets import ParquetTarget

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
T0 = datetime(2026, 11, 30, 11, tzinfo=UTC)
EPOCH = round(T0.timestamp())
SENSORS = "node,timestamp,sensor,value,unit"


def run(kind: str, path: Path, tmp_path: Path, **options: Any) -> tuple[Report, pl.DataFrame]:
    out = tmp_path / "out" / "out.parquet"
    out.parent.mkdir(exist_ok=True)
    out.unlink(missing_ok=True)
    target = ParquetTarget(out)
    try:
        report = import_files(kind, path, "c", target, out.parent, now=NOW, **options)
    finally:
        target.close()
    return report, pl.read_parquet(out) if out.exists() else pl.DataFrame()


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def nulled(report: Report) -> dict[str, tuple[int, list[int]]]:
    return {column: (tally.count, tally.places) for (column, _), tally in report.nulled.items()}


# --- sensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "watts"),
    [
        (0.45, "kW", 450), (0.45, "Kilowatts", 450), (0.45, "KW", 450), (450_000, "mW", 450), (450_000, "mw", 450),
        (450_000, "milliwatts", 450), (0.00045, "MW", 450), (0.00045, "megawatts", 450), (4.5e8, "uW", 450),
        (4.5e8, "µW", 450), (450, " Watts ", 450), (450, "W", 450), (450, "", 450), (1535.5, "BTU/hr", 450),
        (450_000, "MW", None),  # shouted by a program that means milli: no node draws that, so nothing is believed
    ],
)  # fmt: skip
def test_power_in_any_unit(value: float, unit: str, watts: float | None, tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", SENSORS, f"n1,{EPOCH},Sys Power,{value},{unit}")
    report, nodes = run("telemetry", path, tmp_path)
    assert nodes["node_power_w"].to_list() == [watts if watts is None else pytest.approx(watts, abs=0.1)]
    assert (report.passed, report.dropped) == ({}, {})


@pytest.mark.parametrize(
    ("value", "unit", "celsius"),
    [
        (25, "degrees C", 25), (25, "Cel", 25), (25, "", 25), (77, "degrees F", 25), (77, "[degF]", 25),
        (298.15, "K", 25), (298.15, "degrees K", 25), (25_000, "millidegrees C", 25),
    ],
)  # fmt: skip
def test_inlet_in_any_unit(value: float, unit: str, celsius: float, tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", SENSORS, f"n1,{EPOCH},Inlet Temp,{value},{unit}")
    assert run("telemetry", path, tmp_path)[1]["inlet_temp_c"].to_list() == [celsius]


def test_a_unit_that_is_not_known_is_told_apart_from_a_sensor_that_is_not_used(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.csv", SENSORS,
        f"n1,{EPOCH},Sys Power,450,horses", f"n1,{EPOCH},Fan 1,900,RPM", f"n1,{EPOCH},Inlet Temp,25,Watts",
        f"n1,{EPOCH + 60},Sys Power,450,W",
    )  # fmt: skip
    report, nodes = run("telemetry", path, tmp_path)
    assert nodes["node_power_w"].to_list() == [450]
    assert {reason: (tally.count, tally.places) for reason, tally in report.dropped.items()} == {
        "sensor Sys Power in a unit that is not known: horses": (1, [2]),
        "sensor Inlet Temp in a unit that is not known: Watts": (1, [4]),
    }
    assert list(report.passed) == ["sensor Fan 1"]


def test_a_sensor_without_a_number_makes_way(tmp_path: Path) -> None:
    lines = [f"n1,{EPOCH},Pwr Consumption,nan,W", f"n1,{EPOCH},Sys Power,450,W", f"n1,{EPOCH},Inlet Temp,inf,C"]
    report, nodes = run("telemetry", write(tmp_path / "s.csv", SENSORS, *lines), tmp_path)
    assert nodes["node_power_w"].to_list() == [450]
    assert sum(tally.count for (_, reason), tally in report.nulled.items() if reason == "not_a_number") == 2


def test_power_of_a_node_that_is_off_is_told(tmp_path: Path) -> None:
    lines = [f"n{i},{EPOCH + 60 * k},Sys Power,{10 + 15 * i},W" for i in range(2) for k in range(2)]
    report, nodes = run("telemetry", write(tmp_path / "s.csv", SENSORS, *lines), tmp_path)
    assert sorted(nodes["node_power_w"].to_list()) == [10, 10, 25, 25]
    assert any(
        text.startswith("4 values of node_power_w on 2 nodes below 50 W (10 to 25 W): what a node draws that is switch")
        for text in report.notes
    )
    busy = [f"n1,{EPOCH},Sys Power,450,W"]
    report, _ = run("telemetry", write(tmp_path / "s.csv", SENSORS, *busy), tmp_path)
    assert not any("below 50 W" in text for text in report.notes)


# --- jobs -------------------------------------------------------------------------------------------------

NUMBERS = [name for name in (*JOB_COLUMNS, *JOB_EXTRAS) if COLUMNS[name].dtype.is_numeric()]


@pytest.mark.parametrize("name", NUMBERS)
def test_each_number_of_a_job_has_both_bounds(name: str, tmp_path: Path) -> None:
    column = COLUMNS[name]
    assert column.low == 0
    assert column.high is not None
    high = int(column.high)
    frame = pl.DataFrame({"job_id": ["1", "2", "3"], "submit_time": [T0] * 3, name: [-1, high, high + 1]})
    frame.write_parquet(tmp_path / "j.parquet")
    report, jobs = run("jobs", tmp_path / "j.parquet", tmp_path)
    assert jobs.sort("job_id")[name].to_list() == [None, high, None]
    assert nulled(report) == {name: (2, [1, 3])}


def test_time_limits_of_other_kinds_are_bounded_too(tmp_path: Path) -> None:
    header = "JobID|State|Submit|Timelimit|TimelimitRaw"
    lines = [
        f"1|COMPLETED|{EPOCH}|400000-00:00:00|",
        f"2|COMPLETED|{EPOCH}||4294967294",
        f"3|COMPLETED|{EPOCH}|1:00:00|",
    ]
    report, jobs = run("sacct", write(tmp_path / "a.txt", header, *lines), tmp_path)
    assert jobs.sort("job_id")["time_limit_s"].to_list() == [None, None, 3600]
    assert nulled(report) == {"time_limit_s": (2, [2, 3])}
    swf = "1 120 5 600 8 -1 -1 16 99999999999 1024 1 7 2 4 1 -1 -1 -1"
    report, jobs = run("swf", write(tmp_path / "a.swf", f"; UnixStartTime: {EPOCH}", swf), tmp_path)
    assert jobs["time_limit_s"].to_list() == [None]
    assert nulled(report) == {"time_limit_s": (1, [2])}


def test_a_file_cannot_be_observed_ahead_of_now(tmp_path: Path) -> None:
    frame = pl.DataFrame({"job_id": ["1"], "submit_time": [T0], "observed_at": [NOW + timedelta(days=400)]})
    frame.write_parquet(tmp_path / "j.parquet")
    report, jobs = run("jobs", tmp_path / "j.parquet", tmp_path)
    assert jobs["observed_at"][0] <= NOW
    assert nulled(report) == {"observed_at": (1, [1])}


def test_each_value_of_sacct_that_is_lost_is_counted(tmp_path: Path) -> None:
    header = "JobID|State|Submit|Start|End|NNodes|ReqCPUS|ReqTRES|ReqMem|Timelimit|NodeList|Restarts|ExitCode"
    good = f"COMPLETED|{EPOCH}|{EPOCH + 1}|{EPOCH + 2}|1|8|cpu=8,gres/gpu=4|4G|1:00:00|n1|0|0:0"
    broken = f"DANCING|{EPOCH}|soon|later|many|some|cpu=8,gres/gpu=lots|much|long|n[1|often|bad"
    lines = [
        f"1|{good}", f"2|{broken}",
        f"3|CANCELLED by 7|{EPOCH}|soon|{EPOCH + 2}|1|8|cpu=8||||0|0:0",
        f"4|CANCELLED by 7|{EPOCH}|{EPOCH + 2}|{EPOCH + 2}|1|8|cpu=8||||0|0:0",
        f"5|PENDING|{EPOCH}|{EPOCH + 9}|Unknown|1|8|cpu=8||||0|0:0",
        f"6|PENDING|{EPOCH}|whenever|Unknown|1|8|cpu=8||||0|0:0",
        f"7|RUNNING|{EPOCH}|{EPOCH + 2}|{EPOCH + 9}|1|8|cpu=8||UNLIMITED|n1|0|0:0",
        f"8|UNKNOWN|{EPOCH}|Unknown|Unknown|1|8|cpu=8|0|UNLIMITED|None assigned|0|0:0",
    ]  # fmt: skip
    report, jobs = run("sacct", write(tmp_path / "a.txt", header, *lines), tmp_path)
    found: dict[str, list[int]] = {}
    for (column, _), tally in report.nulled.items():
        found.setdefault(column, []).extend(tally.places)
    assert {column: sorted(places) for column, places in found.items()} == {
        "state": [3], "start_time": [3, 4, 5, 7], "end_time": [3, 8], "nodes": [3], "gpus": [3],
        "memory_mib": [3], "time_limit_s": [3], "node_list": [3], "restarts": [3], "exit_code": [3],
    }  # fmt: skip
    assert jobs.filter(pl.col("job_id") == "5")["planned_start_time"].to_list() == [T0 + timedelta(seconds=9)]
    text = report.text()
    assert "1 value of start_time: a job that was cancelled before it started has no start (line 5)" in text
    assert "3 values of start_time: cannot be read or cannot be true (lines 3, 4, 7), as soon" in text


def test_times_that_a_zone_skips_are_counted(tmp_path: Path) -> None:
    header = "JobID|State|Submit|Start|End"
    lines = [
        "1|COMPLETED|2026-03-29T01:00:00|2026-03-29T02:30:00|2026-03-29T03:30:00",
        "2|COMPLETED|2026-03-29T02:30:00|2026-03-29T03:30:00|2026-03-29T03:40:00",
    ]
    report, jobs = run("sacct", write(tmp_path / "a.txt", header, *lines), tmp_path, zone="Europe/Berlin")
    assert jobs.select("job_id", "start_time").rows() == [("1", None)]
    assert {column: count for column, (count, _) in nulled(report).items()} == {"start_time": 1}
    (reason,) = report.dropped
    assert reason == "the submission: no such time in Europe/Berlin"


def test_jobs_that_contradict_themselves_are_counted_once_each(tmp_path: Path) -> None:
    after = [T0 + timedelta(minutes=i) for i in range(4)]
    frame = pl.DataFrame(
        {
            "job_id": ["1", "2", "3", "4"],
            "submit_time": [after[1]] * 4,
            "start_time": [after[2], after[3], after[3], None],
            "end_time": [None, after[2], after[2], after[0]],
            "state": ["PENDING", "RUNNING", "COMPLETED", "CANCELLED"],
            "node_list": ["n1", "n1", "n1", None],
        }
    )
    frame.write_parquet(tmp_path / "j.parquet")
    report, jobs = run("jobs", tmp_path / "j.parquet", tmp_path)
    assert jobs["end_time"].null_count() == 4
    assert {key: tally.count for key, tally in report.nulled.items()} == {
        ("start_time", "a job that is pending has not started"): 1,
        ("node_list", "a job that is pending has no nodes"): 1,
        ("end_time", "a job that pends or runs has not ended"): 1,
        ("end_time", "before the start of the job"): 1,
        ("end_time", "before the submission of the job"): 1,
    }


def test_a_job_that_never_ran_in_swf_lost_nothing(tmp_path: Path) -> None:
    line = "1 120 500 -1 8 -1 -1 16 3600 1024 5 7 2 4 1 -1 -1 -1"
    strange = "2 120 5 600 8 -1 -1 16 3600 1024 9 who 2 4 1 -1 -1 -1"
    report, jobs = run("swf", write(tmp_path / "a.swf", f"; UnixStartTime: {EPOCH}", line, strange), tmp_path)
    assert jobs["start_time"].null_count() == 1
    assert nulled(report) == {"state": (1, [3]), "user": (1, [3])}


def test_times_that_no_calendar_has(tmp_path: Path) -> None:
    path = write(tmp_path / "j.csv", "job_id,submit_time,start_time", f"1,{EPOCH},-99999999999", "2,-99999999999,")
    report, jobs = run("jobs", path, tmp_path)
    assert jobs.select("job_id", "start_time").rows() == [("1", None)]
    assert nulled(report) == {"start_time": (1, [2])}
    assert {reason: tally.places for reason, tally in report.dropped.items()} == {
        "no submit_time that can be read": [3],
    }
    far = pl.Series([-(2**61), 2**61, round(T0.timestamp() * 1e6)]).cast(pl.Datetime("us", "UTC"))
    frame = pl.DataFrame({"ts": far, "node": ["n1"] * 3, "gpu_uuid": ["g"] * 3, "gpu_temp_c": [40.0] * 3})
    frame.write_parquet(tmp_path / "t.parquet")
    report, samples = run("telemetry", tmp_path / "t.parquet", tmp_path)
    assert samples["ts"].to_list() == [T0]
    assert {reason: tally.places for reason, tally in report.dropped.items()} == {"no ts that can be read": [1, 2]}


def test_a_parquet_file_that_is_damaged_is_refused_in_a_line(tmp_path: Path) -> None:
    frame = pl.DataFrame({"job_id": [str(i) for i in range(500)], "submit_time": [T0] * 500})
    frame.write_parquet(tmp_path / "j.parquet")
    good = (tmp_path / "j.parquet").read_bytes()
    for at in range(4, len(good), max(len(good) // 40, 1)):
        (tmp_path / "x.parquet").write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        try:
            run("jobs", tmp_path / "x.parquet", tmp_path)
        except ImportingError as error:
            assert "\n" not in str(error)  # noqa: PT017 (whether it is refused depends on the byte)


# --- samples ----------------------------------------------------------------------------------------------


def test_nan_is_counted_wherever_it_becomes_null(tmp_path: Path) -> None:
    own = 'gpu="0",UUID="GPU-0",Hostname="n1"'
    names = ("GPU_TEMP", "XID_ERRORS", "ROW_REMAP_FAILURE", "PCIE_LINK_GEN")
    lines = [f"DCGM_FI_DEV_{name}{{{own}}} NaN {EPOCH}000" for name in names]
    lines += [f"DCGM_FI_DEV_POWER_USAGE{{{own}}} 300 {EPOCH}000"]
    report, _ = run("exposition", write(tmp_path / "a.prom", *lines), tmp_path)
    counted = {column: tally.count for (column, reason), tally in report.nulled.items() if reason == "not_a_number"}
    assert counted == {"gpu_temp_c": 1, "xid_last": 1, "is_remap_failed": 1, "pcie_link_gen": 1}
    csv = write(tmp_path / "t.csv", "ts,node,gpu_uuid,gpu_temp_c,xid_last,gpu_power_w", f"{EPOCH},n1,g,nan,NaN,-inf")
    report, frame = run("telemetry", csv, tmp_path)
    assert frame.select("gpu_temp_c", "xid_last", "gpu_power_w").row(0) == (None, None, None)
    assert nulled(report) == {"gpu_temp_c": (1, [2]), "xid_last": (1, [2]), "gpu_power_w": (1, [2])}


def test_silences_and_counts_are_of_kept_rows(tmp_path: Path) -> None:
    lines = [f"{EPOCH + 15 * i},n1,g,40" for i in range(40)]
    wrong = [f"{EPOCH + 90_000},n1,g,40", "900000000,n1,g,40", "900000000,n9,other,40"]
    path = write(tmp_path / "t.csv", "ts,node,gpu_uuid,gpu_temp_c", *lines, *wrong)
    report, _ = run("telemetry", path, tmp_path)
    assert report.seen == {"GPU": 1, "node": 1}
    assert "one sample of a GPU every 15 s; no silence longer than 2 min 30 s" in report.notes
    assert not any("until the end" in text for text in report.notes)
    gone = [f"{EPOCH + 15 * i},n1,h,40" for i in range(3)]
    late = [f"{EPOCH + 15 * i},n1,g,40" for i in (60, 61)]
    report, _ = run(
        "telemetry", write(tmp_path / "t.csv", "ts,node,gpu_uuid,gpu_temp_c", *lines, *late, *gone), tmp_path
    )
    assert (
        "one sample of a GPU every 15 s; 1 silence longer than 2 min 30 s on 1 GPU, the longest 5 min 15 s on n1 g "
        "from 2026-11-30 11:09:45 UTC"
    ) in report.notes
    assert "1 GPU is silent until the end of the file, the first from 2026-11-30 11:00:30 UTC" in report.notes


def test_span_begins_at_the_first_sample(tmp_path: Path) -> None:
    own = 'gpu="0",UUID="GPU-0",Hostname="n1"'
    lines = [f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{own}}} 0 {EPOCH + at}000" for at in (37, 52, 95)]
    report, health = run("exposition", write(tmp_path / "a.prom", *lines), tmp_path)
    assert report.kept == {"core_gpu_health": 2}
    assert health["ts"].to_list() == [T0, T0 + timedelta(minutes=1)]
    assert (report.first, report.last) == (T0 + timedelta(seconds=37), T0 + timedelta(seconds=95))


def test_headers_in_the_middle_are_no_faults(tmp_path: Path) -> None:
    sacct = ["JobID|State|Submit", f"1|COMPLETED|{EPOCH}"]
    report, jobs = run("sacct", write(tmp_path / "a.txt", *sacct, sacct[0], f"2|COMPLETED|{EPOCH}"), tmp_path)
    assert (len(jobs), report.read, report.dropped) == (2, 3, {})
    assert [tally.places for tally in report.passed.values()] == [[3]]
    csv = ["job_id,submit_time", f"1,{EPOCH}"]
    report, jobs = run("jobs", write(tmp_path / "a.csv", *csv, csv[0], f"2,{EPOCH}"), tmp_path)
    assert (len(jobs), report.read, report.dropped) == (2, 3, {})
    assert [tally.places for tally in report.passed.values()] == [[3]]


def test_messages_of_slurm_are_no_names_and_the_sums_agree(tmp_path: Path) -> None:
    said = [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection",
        "sacct: Warning: jobs are missing",
    ]
    jobs = [f"{i}|COMPLETED|{EPOCH}|train" for i in range(3)]
    lines = ["JobID|State|Submit|JobName", jobs[0], said[0], jobs[1], "the second line", *said[1:], jobs[2], said[0]]
    report, frame = run("sacct", write(tmp_path / "a.txt", *lines), tmp_path)
    assert frame.sort("job_id")["name"].to_list() == ["train", "train\nthe second line", "train"]
    assert {reason: (tally.count, tally.places) for reason, tally in report.dropped.items()} == {
        "messages of Slurm, no records": (4, [3, 6, 7, 9])
    }
    counted = [*report.passed.values(), *report.dropped.values()]
    assert report.read == 8 == len(frame) + sum(tally.count for tally in counted)


def test_a_start_before_the_submission_is_none(tmp_path: Path) -> None:
    starts = [T0 - timedelta(days=30), T0 - timedelta(seconds=20), T0, None]
    frame = pl.DataFrame({"job_id": list("1234"), "submit_time": [T0] * 4, "start_time": starts})
    frame.write_parquet(tmp_path / "j.parquet")
    report, jobs = run("jobs", tmp_path / "j.parquet", tmp_path)
    assert jobs.sort("job_id")["start_time"].to_list() == [None, *starts[1:]]
    assert nulled(report) == {"start_time": (1, [1])}
    assert "1 value of start_time: before the submission of the job (row 1), as 2026-10-31 11:00:00" in report.text()


def test_lines_of_no_page_are_dropped_with_their_numbers(tmp_path: Path) -> None:
    bad = ["nonsense line here {{{", "hello", "<html>", 'a_metric{b="c"}', "7 8", "x{} soon", "a_metric 1 2 3"]
    good = [
        "a_metric 1", 'a_metric{b="c",} +Inf 1796036400000', '{"a.metric",b="c"} 1e-3', 'x{a="un"escaped}"} NaN',
        'h_bucket{le="1"} 3 # {trace="x"} 0.5 1796036400.5', "total 17 1796036400 # {} 1", "  spaced\t5", "# HELP me",
    ]  # fmt: skip
    path = write(tmp_path / "a.prom", *good, *bad, _GOOD["exposition"].strip())
    report, frame = run("exposition", path, tmp_path)
    assert len(frame) == 1
    (tally,) = report.dropped.values()
    assert (tally.count, tally.places, tally.example) == (7, [9, 10, 11, 12, 13], bad[0])
    assert report.read == 15
    assert [tally.count for tally in report.passed.values()] == [7]


def test_json_is_no_page(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    write(folder / "a.prom", _GOOD["exposition"].strip())
    for i, body in enumerate((_GOOD["prometheus-json"], "[1]", "{}", '{ "data" : 1}')):
        path = folder / f"{i}.json"
        path.write_text(body)
        with pytest.raises(ImportingError, match=r"this is JSON; a saved answer .* prometheus-json"):
            run("exposition", path, tmp_path)
    report, frame = run("exposition", folder, tmp_path)
    assert len(frame) == 1
    assert [(tally.count, tally.example) for tally in report.dropped.values()] == [(4, "0.json")]


# --- options, words, encodings ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_a_kind_does_not_use_are_refused(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", "x")
    for option, users, said in (
        ({"at": T0}, ("exposition",), "--at means nothing for .*; it is for exposition"),
        (
            {"node": "n1"},
            ("exposition", "prometheus-json"),
            "--node means .*; it is for exposition and prometheus-json",
        ),
        ({"zone": "Europe/Berlin"}, ("sacct", "exposition", "jobs", "telemetry"), "--tz means .*, jobs and telemetry"),
    ):
        if kind not in users:
            with pytest.raises(OptionError, match=said):
                run(kind, path, tmp_path, **option)
        else:
            path.write_text(_GOOD[kind])
            assert run(kind, path, tmp_path, **option)[0].rows == 1


def test_words() -> None:
    assert [length(s) for s in (0, 15, 59.9, 60, 90, 3600, 69_776, 86_400, 400_000)] == [
        "0 s", "15 s", "59.9 s", "1 min", "1 min 30 s", "1 h", "19 h 23 min", "1 d", "4 d 15 h",
    ]  # fmt: skip
    assert [many(0, "row"), many(1, "row"), many(2000, "row"), many(2, "series")] == [
        "0 rows", "1 row", "2,000 rows", "2 series",
    ]  # fmt: skip
    assert words("out_of_range") == "physically impossible"
    assert words("not_a_number") == "NaN or infinite"
    assert words("cannot be read") == "cannot be read"


_SWF = f"; UnixStartTime: {EPOCH}\n1 120 5 600 8 -1 -1 16 3600 1024 1 7 2 4 1 -1 -1 -1\n"
_GOOD = {
    "sacct": f"JobID|State|Submit\n1|COMPLETED|{EPOCH + 120}\n",
    "swf": _SWF,
    "exposition": f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-0",Hostname="n1"}} 40 {EPOCH + 120}000\n',
    "prometheus-json": '{"status":"success","data":{"resultType":"vector","result":[{"metric":{"__name__":'
    f'"DCGM_FI_DEV_GPU_TEMP","gpu":"0","UUID":"G","Hostname":"n1"}},"value":[{EPOCH + 120},"40"]}}]}}}}\n',
    "jobs": f"job_id,submit_time\n1,{EPOCH + 120}\n",
    "telemetry": f"ts,node,gpu_uuid,gpu_temp_c\n{EPOCH + 120},n1,g,40\n",
}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_every_kind(kind: str, tmp_path: Path) -> None:
    good = _GOOD[kind].encode()
    path = tmp_path / "a"
    for body in (good, gzip.compress(good), good.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + good):
        path.write_bytes(body)
        report, frame = run(kind, path, tmp_path)
        assert (len(frame), report.first, report.dropped) == (1, T0 + timedelta(seconds=120), {})
    refused = {
        b"": "the file is empty", good.decode().encode("utf-16"): "UTF-16 text; make it UTF-8",
        good.decode().encode("utf-16-be"): "UTF-16 text; make it UTF-8",
        bytes(5000): "it holds zero bytes", b"BZh9" + good: "packed with bzip2", b"\xfd7zXZ" + good: "packed with xz",
    }  # fmt: skip
    if kind not in ("jobs", "telemetry"):
        refused[b"PAR1" + good] = "a Parquet file"
    if kind != "prometheus-json":
        refused[good.replace(b"\n", b"\r") * 2] = "carriage return alone"
    for body, said in refused.items():
        path.write_bytes(body)
        with pytest.raises(ImportingError, match=said):
            run(kind, path, tmp_path)


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(_GOOD["telemetry"].encode().replace(b"n1", b"n\xff1"))
    report, frame = run("telemetry", path, tmp_path)
    assert frame["node"].to_list() == ["n�1"]
    assert "1 line of a.csv held bytes that are no UTF-8; they became �" in report.notes

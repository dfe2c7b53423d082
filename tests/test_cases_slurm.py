"""One test a known way in which what Slurm says of jobs is odd: cases 37 to 51, each from a minimal input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.job_history import JobTable
from features.vocabulary import schema
from pipelines.sources import SourceError
from pipelines.sources.job_fields import count_tasks
from pipelines.sources.job_states import changed_states, no_states
from pipelines.sources.sacct import SacctError, parse_sacct
from pipelines.sources.slurm import SlurmSource
from pipelines.sources.slurm_budget import Budget, Price
from pipelines.sources.slurm_commands import Commands
from pipelines.sources.slurm_log import PreemptionLog, parse_preemptions, with_preemptors
from pipelines.sources.slurm_overlay import laid_over
from pipelines.sources.slurmrestd import RestReader
from tests.services import Pages

AT = datetime(2026, 11, 2, tzinfo=UTC)
T0 = 1_793_534_400  # 2026-11-01 12:00 UTC
BASE = {"JobIDRaw": "7", "JobID": "7", "Submit": str(T0), "State": "COMPLETED"}


def text_of(*rows: dict[str, str], delimiter: str = "|", end: str = "") -> str:
    rows = tuple({**BASE, **row} for row in rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    return "".join(delimiter.join(line) + end + "\n" for line in lines)


def parse(*rows: dict[str, str], **more: Any) -> list[dict[str, Any]]:
    return parse_sacct(text_of(*rows), "a", AT, **more)[0].to_dicts()


def one(**fields: str) -> dict[str, Any]:
    (row,) = parse(fields)
    return row


def moment(offset_s: float) -> datetime:
    return datetime.fromtimestamp(T0, UTC) + timedelta(seconds=offset_s)


def fake(folder: Path, **scripts: str) -> Commands:
    """Commands that are shell scripts: what a Slurm says that is not at hand."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return Commands("a", folder=str(folder))


def test_case_37_words_for_times_that_are_not_known() -> None:
    running = one(State="RUNNING", Start=str(T0 + 5), End="Unknown")
    assert (running["start_time"], running["end_time"]) == (moment(5), None)
    cancelled = one(State="CANCELLED by 1000", Start="None", End="2026-11-01T12:01:00")
    assert (cancelled["start_time"], cancelled["end_time"]) == (None, moment(60))
    assert one(Eligible="Unknown")["eligible_time"] is None


def test_case_38_times_are_asked_for_as_epoch_and_in_utc(tmp_path: Path) -> None:
    # The autumn hour that comes twice in New York: as epoch the job lasts an hour and a half.
    first, last = 1_793_509_200, 1_793_514_600
    row = one(Start=str(first), End=str(last))
    assert (row["end_time"] - row["start_time"]).total_seconds() == last - first
    commands = fake(tmp_path, sacct='echo "$SLURM_TIME_FORMAT $TZ $*"')
    said = commands.run("sacct", "--starttime=2026-11-01T00:00:00")
    assert said == "%s UTC --starttime=2026-11-01T00:00:00\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("05:30", 330), ("00:05:30", 330), ("1-00:05:30", 86_730), ("2-12", 216_000), ("2-12:30", 217_800),
        ("90", 5400), ("INVALID", None), ("-01:00:00", None), ("05:30.123", None),
    ],
)  # fmt: skip
def test_case_39_spellings_of_durations(text: str, seconds: int | None) -> None:
    assert one(Timelimit=text)["time_limit_s"] == seconds


@pytest.mark.parametrize("text", ["UNLIMITED", "Partition_Limit", ""])
def test_case_40_limits_that_are_words(text: str) -> None:
    assert one(TimelimitRaw=text, Timelimit=text)["time_limit_s"] is None
    assert one(TimelimitRaw="60", Timelimit=text)["time_limit_s"] == 3600


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", "CANCELLED"), ("CANCELLED by 0", "CANCELLED"), ("CANCELLED+", "CANCELLED"),
        ("BOOT_FAIL", "BOOT_FAIL"), ("DEADLINE", "DEADLINE"), ("REVOKED", "REVOKED"), ("PREEMPTED", "PREEMPTED"),
        ("REQUEUED", "REQUEUED"), ("NODE_FAIL", "NODE_FAIL"), ("OUT_OF_MEMORY", "OUT_OF_MEMORY"),
        ("TIMEOUT", "TIMEOUT"), ("RUNNING", "RUNNING"), ("SUSPENDED", "SUSPENDED"), ("COMPLETING", "RUNNING"),
        ("LAUNCH_FAILED", "UNKNOWN"),
    ],
)  # fmt: skip
def test_case_41_states(text: str, state: str) -> None:
    end = {} if state in ("RUNNING", "SUSPENDED") else {"End": str(T0 + 9)}
    row = one(State=text, Start=str(T0 + 1), **end)
    assert row["state"] == state
    assert (row["end_time"] is None) == (not end)


def test_case_41_a_requeued_attempt_ended_a_requeued_job_waits() -> None:
    assert one(State="REQUEUED", Start=str(T0), End=str(T0 + 9))["state"] == "REQUEUED"
    assert one(State="REQUEUED", Start="Unknown", End="Unknown")["state"] == "PENDING"


def test_case_42_the_job_has_the_word_not_its_steps() -> None:
    (row,) = parse(
        {"ExitCode": "0:0", "State": "COMPLETED"},
        {"JobIDRaw": "7.batch", "JobID": "7.batch", "State": "FAILED", "ExitCode": "1:0"},
        {"JobIDRaw": "7.extern", "JobID": "7.extern", "State": "COMPLETED", "ExitCode": "0:0"},
        {"JobIDRaw": "7.0", "JobID": "7.0", "State": "CANCELLED", "ExitCode": "0:10"},
    )
    assert (row["job_id"], row["state"], row["exit_code"]) == ("7", "COMPLETED", "0:0")
    assert one(State="FAILED", ExitCode="0:9")["exit_code"] == "0:9"
    assert one(State="RUNNING", ExitCode="0:0")["exit_code"] is None  # nothing has ended yet


def test_case_42_what_steps_say_stands_beside_the_job() -> None:
    def step(name: str, **fields: str) -> dict[str, str]:
        return {"JobIDRaw": name, "JobID": name, "Start": str(T0), **fields}

    first, second, third = parse(
        {"Start": str(T0), "End": str(T0 + 60), "State": "REQUEUED"},
        step("7.batch", End=str(T0 + 60), State="CANCELLED", ExitCode="0:15", MaxRSS="4096"),
        {"Submit": str(T0 + 60), "Start": str(T0 + 70), "End": str(T0 + 900), "State": "COMPLETED"},
        step("7.batch", End=str(T0 + 900), State="COMPLETED", ExitCode="0:0", MaxRSS="2K"),
        step("7.extern", End=str(T0 + 901), State="COMPLETED", ExitCode="0:0"),
        step("7.0", End=str(T0 + 800), State="CANCELLED by 0", ExitCode="0:10", MaxRSS="1.5G"),
        step("7.1", End=str(T0 + 300), State="COMPLETED", ExitCode="0:0", MaxRSS="0.5G"),
        {"JobIDRaw": "8", "JobID": "8", "Submit": str(T0 + 70)},
        step("9.0", End=str(T0 + 300), State="FAILED", ExitCode="1:0", MaxRSS="nonsense"),
    )
    told = ("steps", "last_step_state", "last_step_exit_code", "max_rss_bytes")
    # The script counts only where nothing else was started; each attempt has its own steps.
    assert [first[name] for name in told] == [0, "CANCELLED", "0:15", 4096]
    assert [second[name] for name in told] == [2, "CANCELLED", "0:10", 1.5 * 2**30]
    assert [third[name] for name in told] == [None] * 4  # those of another job are not its own
    ended = step("7.1", State="FAILED", End=str(T0 + 9), ExitCode="1:0")
    (runs,) = parse({"State": "RUNNING"}, step("7.0", State="RUNNING", ExitCode="0:0"), ended)
    assert [runs[name] for name in told[:3]] == [2, "RUNNING", None]


def test_case_38_a_suspended_job_ran_for_as_long_as_slurm_counted() -> None:
    times = {"Start": str(T0), "End": str(T0 + 40)}
    assert one(**times, ElapsedRaw="15", Suspended="00:00:25")["elapsed_s"] == 15
    assert one(**times, Elapsed="00:00:15")["elapsed_s"] == 15
    assert one(**times, Suspended="00:00:25")["elapsed_s"] == 15
    assert one(**times, Suspended="1-00:00:25")["elapsed_s"] is None
    assert one(**times, ElapsedRaw="INVALID")["elapsed_s"] is None
    assert one(**times, State="RUNNING", ElapsedRaw="15")["elapsed_s"] is None  # it grows
    assert one(State="CANCELLED", Start="Unknown", End=str(T0), ElapsedRaw="0")["elapsed_s"] is None
    jobs = parse_sacct(text_of({**times, "ElapsedRaw": "15"}, {**times, "JobIDRaw": "8"}), "a", AT)[0]
    assert JobTable(jobs).runtime_s.tolist() == [15.0, 40.0]


_RESIZED = (
    {"Start": str(T0), "End": str(T0 + 60), "State": "RESIZING", "ElapsedRaw": "60", "NNodes": "2", "ReqCPUS": "2",
     "ReqTRES": "cpu=2,gres/gpu=2,node=2", "AllocTRES": "cpu=2,gres/gpu=2,node=2", "NodeList": "n[1-2]"},
    {"Submit": str(T0 + 60), "Start": str(T0), "End": str(T0 + 200), "ElapsedRaw": "200", "NNodes": "1", "ReqCPUS": "2",
     "ReqTRES": "cpu=2,gres/gpu=2,node=1", "AllocTRES": "cpu=1,gres/gpu=1,node=1", "NodeList": "n1"},
)  # fmt: skip
_PARTS = [
    ("RESIZING", moment(0), moment(0), moment(60), 60, 2, 2, 2, "n1,n2", 0),
    ("COMPLETED", moment(60), moment(60), moment(200), 140, 1, 1, 1, "n1", 0),
]
_SHOWN = (
    "state", "submit_time", "start_time", "end_time", "elapsed_s", "nodes", "cpus", "gpus", "node_list", "restarts",
)  # fmt: skip


def test_case_44_parts_of_a_job_that_changed_its_size_do_not_overlap() -> None:
    jobs = parse_sacct(text_of(*_RESIZED), "a", AT, since=moment(-9))[0]
    assert jobs.select(_SHOWN).rows() == _PARTS
    # A window after the change shows the later part alone, and the same.
    assert parse_sacct(text_of(_RESIZED[1]), "a", AT, since=moment(-9))[0].select(_SHOWN).rows() == _PARTS[1:]
    requeued = {"Submit": str(T0 + 200), "Start": str(T0 + 210)}
    again = parse_sacct(text_of(*_RESIZED, requeued), "a", AT, since=moment(-9))[0]
    assert again["restarts"].to_list() == [0, 0, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_case_44_the_queue_tells_of_the_whole_job_that_changed_its_size(first: int) -> None:
    known = parse_sacct(text_of(*_RESIZED), "a", AT, since=moment(-9))[0][first:]
    whole = {"Start": str(T0), "End": str(T0 + 200), "NNodes": "1", "NodeList": "n1"}
    queue = parse_sacct(text_of(whole), "a", AT + timedelta(seconds=1), since=moment(-9))[0]
    jobs = laid_over(known, queue)
    assert jobs.select(_SHOWN).rows() == _PARTS[first:]
    # The database does not know the part after the change yet.
    assert laid_over(known[: 1 - first], queue).height == 1
    if not first:
        assert laid_over(known[:1], queue).select(_SHOWN).rows() == _PARTS[:1]


def test_case_43_arrays_and_heterogeneous_jobs() -> None:
    rows = parse(
        {"JobIDRaw": "123", "JobID": "123_[1-10%2]", "State": "PENDING"},
        {"JobIDRaw": "127", "JobID": "123_4"},
        {"JobIDRaw": "200", "JobID": "200+0"},
        {"JobIDRaw": "201", "JobID": "200+1"},
        {"JobIDRaw": "300", "JobID": "300"},
    )
    told = [(row["job_id"], row["array_job_id"], row["array_tasks"]) for row in rows]
    assert sorted(told) == [
        ("123", "123", 10), ("127", "123", None), ("200", "200", None), ("201", "200", None), ("300", None, None),
    ]  # fmt: skip
    assert {row["job_id"]: row["array_task"] for row in rows if row["array_task"] is not None} == {"127": 4}
    # Without the raw id, the printed one stands; of a pending array without its list.
    text = f"JobID|Submit|State\n123_[5,7-9]|{T0}|PENDING\n123_4|{T0}|COMPLETED\n"
    frame = parse_sacct(text, "a", AT)[0]
    assert sorted(frame.select("job_id", "array_tasks").rows()) == [("123", 4), ("123_4", None)]


def test_the_kind_of_node_is_the_one_asked_for() -> None:
    rows = parse(
        {"JobIDRaw": "1", "ReqTRES": "cpu=4,gres/gpu:A100=4,gres/gpu=4", "Constraints": "nvlink&ib"},
        {"JobIDRaw": "2", "ReqTRES": "cpu=4,gres/gpu=4", "AllocTRES": "cpu=4,gres/gpu:a100=4", "Constraints": "(null)"},
        {"JobIDRaw": "3", "TresPerNode": "gres/gpu:h100:4"},
        {"JobIDRaw": "4", "TresPerNode": "gres:gpu:v100:2"},
        {"JobIDRaw": "5", "TresPerJob": "gres/gpu:1g.5gb:1"},
        {"JobIDRaw": "6", "TresPerNode": "gres/gpu:4"},
    )
    assert [(row["job_id"], row["gpu_type"], row["node_features"]) for row in rows] == [
        ("1", "a100", "nvlink&ib"), ("2", None, None), ("3", "h100", None), ("4", "v100", None), ("5", "1g.5gb", None),
        ("6", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "tasks"),
    [("1-10", 10), ("7", 1), ("1,3,7-9", 5), ("0-20:5", 5), ("1,3,...", None), ("9-1", None), ("", None), ("x", None)],
)
def test_case_43_lists_of_tasks(body: str, tasks: int | None) -> None:
    assert count_tasks(body) == tasks


@pytest.mark.parametrize(("version", "given"), [("22.05.8", False), ("23.02.0", True), ("25.11.1-1", True)])
def test_case_43_array_option_only_where_the_version_has_it(tmp_path: Path, version: str, given: bool) -> None:
    said = text_of({}, delimiter="\x1f", end="\x1f").replace("\x1f", "\\037").replace("\n", "\\n")
    script = f"""echo "$@" >>{tmp_path}/asked
case "$1" in
  --version) echo "slurm {version}";;
  --helpformat) echo "Reason  Reserved Restarts";;
  *) printf "{said}";;
esac"""
    source = SlurmSource("a", fake(tmp_path, sacct=script, squeue="true"))
    source.fetch_jobs(moment(-60), moment(60))
    asked = (tmp_path / "asked").read_text()
    assert ("--array" in asked.split()) == given
    assert "--duplicates" in asked.split()
    assert ("--format=Restarts," in asked) == given
    assert " -T" not in asked


def test_case_44_each_attempt_of_a_requeued_job_is_a_row() -> None:
    rows = parse(
        {"Start": str(T0 + 1), "End": str(T0 + 100), "State": "PREEMPTED"},
        {"Submit": str(T0 + 100), "Start": str(T0 + 220), "End": str(T0 + 300), "State": "NODE_FAIL"},
        {"Submit": str(T0 + 301), "Start": str(T0 + 420), "End": str(T0 + 500), "State": "REQUEUED"},
        {"Submit": str(T0 + 500), "Start": str(T0 + 620), "End": "Unknown", "State": "RUNNING"},
        since=moment(-1),
    )
    assert [(row["state"], row["restarts"]) for row in rows] == [
        ("PREEMPTED", 0), ("NODE_FAIL", 1), ("REQUEUED", 2), ("RUNNING", 3),
    ]  # fmt: skip
    # The same text, read from a moment after the first attempt: how often before is not known.
    assert parse({"Submit": str(T0)}, since=moment(1))[0]["restarts"] is None


def test_case_44_restarts_that_are_told_go_before_those_counted() -> None:
    rows = parse(
        {"Start": str(T0 + 1), "End": str(T0 + 100), "State": "PREEMPTED", "Restarts": "3"},
        {"Submit": str(T0 + 100), "Start": str(T0 + 220), "End": "Unknown", "State": "RUNNING", "Restarts": "4"},
        since=moment(-1),
    )
    assert [row["restarts"] for row in rows] == [3, 4]


def test_case_44_a_shared_older_answer_of_the_queue_takes_nothing_back() -> None:
    def seen(offset_s: float, *rows: dict[str, str]) -> pl.DataFrame:
        return parse_sacct(text_of(*rows), "a", moment(offset_s))[0]

    waits = {"State": "PENDING", "Start": "Unknown", "End": "Unknown", "Reason": "Resources"}
    runs = {"State": "RUNNING", "Start": str(T0 + 1), "End": "Unknown"}
    ended = {"State": "FAILED", "Start": str(T0 + 1), "End": str(T0 + 5)}
    for database, queue, state in (
        (seen(10, ended), seen(4, runs), "FAILED"),
        (seen(10, runs), seen(0, waits), "RUNNING"),
        (seen(10, waits), seen(10, runs), "RUNNING"),  # the database lags
        (seen(10, runs), seen(11, ended), "FAILED"),
        (seen(10, ended), seen(11, runs), "RUNNING"),
    ):
        assert laid_over(database, queue)["state"].to_list() == [state]


def test_case_45_recycled_ids_are_other_jobs(tmp_path: Path) -> None:
    old = {"Submit": "1483228800", "Start": "1483228801", "End": "1483229000", "User": "old"}
    rows = parse(old, {"Start": str(T0 + 1), "End": "Unknown", "State": "RUNNING", "User": "new"}, since=moment(-1))
    assert [(row["user"], row["state"], row["restarts"]) for row in rows] == [
        ("old", "COMPLETED", None), ("new", "RUNNING", 0),
    ]  # fmt: skip
    commands = fake(tmp_path, sacct=f'echo "$@" >>{tmp_path}/asked; echo "sacct: error: no" >&2; exit 1', squeue="true")
    with pytest.raises(SourceError, match="no"):
        SlurmSource("a", commands).fetch_jobs(moment(0), moment(60))
    assert "slurm" not in (tmp_path / "asked").read_text()


def _too_wide(folder: Path, longest_s: int) -> Commands:
    """A sacct whose database refuses ranges longer than that."""
    script = f"""
[ "$1" = --version ] && echo slurm-wlm 22.05.8 && exit
for word in "$@"; do case "$word" in
  --starttime=*) first=$(date -u -d "${{word#*=}}" +%s);;
  --endtime=*) last=$(date -u -d "${{word#*=}}" +%s);;
esac; done
echo $((last - first)) >>{folder}/asked
if [ $((last - first)) -gt {longest_s + 1} ]; then
  echo "sacct: error: slurmdbd: Too wide of a date range in query" >&2; exit 1
fi
printf 'JobIDRaw\\037JobID\\037Submit\\037State\\037\\n%s\\037%s\\037%s\\037COMPLETED\\037\\n' $first $first $first"""
    return fake(folder, sacct=script, squeue="true")


@pytest.mark.parametrize(("longest_s", "pieces"), [(86_400, 3), (43_200, 6)])
def test_case_46_ranges_are_split_where_the_database_refuses(tmp_path: Path, longest_s: int, pieces: int) -> None:
    source = SlurmSource("a", _too_wide(tmp_path, longest_s))
    jobs = source.fetch_jobs(moment(-3 * 86_400), moment(0))
    assert len(jobs) == pieces
    asked = [int(line) for line in (tmp_path / "asked").read_text().split()]
    source.fetch_jobs(moment(-3 * 86_400), moment(0))
    again = [int(line) for line in (tmp_path / "asked").read_text().split()][len(asked) :]
    assert len(again) == pieces  # what was refused once is not asked again


def test_case_46_a_range_that_is_never_narrow_enough_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="Too wide of a date range"):
        SlurmSource("a", _too_wide(tmp_path, 60)).fetch_jobs(moment(-86_400), moment(0))


def test_case_46_an_answer_that_the_database_broke_off_is_none(tmp_path: Path) -> None:
    commands = fake(tmp_path, sacct='echo "JobID|State"; echo "sacct: error: slurmdbd: Unknown error 1021" >&2')
    with pytest.raises(SourceError, match="Unknown error 1021"):
        commands.run("sacct")
    commands = fake(tmp_path, sacct='echo fine; echo "sacct: error: Could not load plugin" >&2')
    assert commands.run("sacct") == "fine\n"
    assert commands.warnings == ["a: sacct: error: Could not load plugin"]


def test_case_47_delimiters_and_newlines_in_names() -> None:
    name = "a|b\nsecond|line"
    for delimiter, end in (("\x1f", "\x1f"), ("|", "|")):
        text = text_of({"JobName": name}, {"JobIDRaw": "8", "JobName": "c"}, delimiter=delimiter, end=end)
        frame, warnings = parse_sacct(text, "a", AT)
        assert (frame["name"].to_list(), warnings) == ([name, "c"], [])
    # A name with the delimiter before other columns; a trailing delimiter of -p.
    text = f"JobName|JobID|Submit|State|\nx|y|9|{T0}|FAILED|\n"
    assert parse_sacct(text, "a", AT)[0].select("name", "job_id", "state").rows() == [("x|y", "9", "FAILED")]


def test_case_48_names_of_another_encoding(tmp_path: Path) -> None:
    commands = fake(tmp_path, sacct=f"printf 'JobID|Submit|State|JobName\\n1|{T0}|FAILED|caf\\351\\n'")
    frame, warnings = parse_sacct(commands.run("sacct"), "a", AT)
    assert (frame["name"].to_list(), warnings) == (["caf\ufffd"], [])


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("cpu=10,mem=100G,node=1,billing=10,gres/gpu=1,gres/gpu:a100=1", 1),  # one count in two spellings
        ("gres/gpu:a100=4,gres/gpu:h100=2", 6),
        ("gres/gpu=8", 8),
        ("gres/gpumem=80G,gres/gpuutil=50,cpu=1", 0),
        ("cpu=1,xgres/gpu=4", 0),
        ("", None),
    ],
)
def test_case_49_gpus_are_counted_once(tres: str, gpus: int | None) -> None:
    assert one(AllocTRES=tres)["gpus"] == gpus
    assert one(ReqTRES=tres, AllocTRES="gres/gpu=0")["gpus"] == (0 if gpus is None else gpus)


@pytest.mark.parametrize(
    ("memory", "mib"),
    [("4Gn", 8192), ("4Gc", 65_536), ("4G", 4096), ("5000Mc", 80_000), ("0n", None), ("?", None), ("4Q", 4)],
)
def test_case_50_units_of_memory(memory: str, mib: int | None) -> None:
    assert one(ReqMem=memory, NNodes="2", ReqCPUS="16")["memory_mib"] == mib


def test_case_51_raw_ids_are_not_needed_and_cut_columns_do_no_harm() -> None:
    text = f"JobID|Submit|State|Account\n1043074_91|{T0}|CANCELLED+|long_acco+\n"
    row = parse_sacct(text, "a", AT)[0].row(0, named=True)
    assert (row["job_id"], row["array_job_id"], row["state"]) == ("1043074_91", "1043074", "CANCELLED")
    # Suspended for another job: no record of its own, it runs on.
    assert one(State="SUSPENDED", Start=str(T0))["end_time"] is None
    # COMPLETING lags: the job holds its nodes until it is gone.
    assert one(State="COMPLETING", Start=str(T0), End=str(T0 + 9))["state"] == "RUNNING"


def test_fields_that_squeue_does_not_know_are_left_out(tmp_path: Path) -> None:
    script = f"""echo "$@" >>{tmp_path}/asked
for field in PriorityLong exit_code; do
  case "$*" in *$field*) echo "squeue: error: Invalid job format specification: $field" >&2; exit 1;; esac
done
echo "$@" | grep -o '[a-zA-Z-]*:.' | sed "s/^JobID:/8/; s/^SubmitTime:/{T0}/; s/^State:/PENDING/; s/^[a-zA-Z-]*://" \
  | tr -d '\n'
"""
    source = SlurmSource("a", fake(tmp_path, squeue=script, scontrol="true"))
    for _ in range(2):
        live = source.live()
        assert live.jobs.select("job_id", "submit_time", "state").rows() == [("8", moment(0), "PENDING")]
    assert live.states.is_empty()
    assert len((tmp_path / "asked").read_text().split("--all")) - 1 == 4  # refused twice, then known
    broken = fake(tmp_path, squeue='echo "squeue: error: Invalid job format specification: JobID" >&2; exit 1')
    with pytest.raises(SourceError, match="specification: JobID"):
        SlurmSource("a", broken).live()


# --- what belongs to these cases in other parts of the reader -------------------------------------------------------

LOG = """[2026-11-30T07:41:28.661+00:00] preempted JobId=16 has been requeued to reclaim resources for JobId=17
[2026-11-30T07:41:32.666+00:00] preempted JobId=5_1(18) has been killed to reclaim resources for JobId=6+0(19)
[2016-11-30T07:41:32+00:00] preempted job 20 has been killed to reclaim resources for job 21
[2026-11-30T07:41:40+00:00] debug:  preempted JobId=22 suspended by gang scheduler to reclaim resources for JobId=23
[2026-11-30T07:41:41+00:00] preempted JobId=24 kill failure No error
[soon] preempted JobId=25 has been killed to reclaim resources for JobId=26
[2026-11-30T07:41:42+00:00] sched: Allocate JobId=27 NodeList=preempted
"""


def test_preemptors_of_several_versions() -> None:
    found = parse_preemptions(LOG)
    assert found.select("job_id", "preempted_by").rows() == [("16", "17"), ("18", "19"), ("20", "21"), ("22", "23")]
    ended = [datetime(2026, 11, 30, 7, 41, 28, tzinfo=UTC), datetime(2026, 11, 30, 9, tzinfo=UTC)]
    rows = [
        {
            **BASE,
            "JobIDRaw": "16",
            "State": state,
            "Submit": str(T0 + i),
            "Start": str(T0),
            "End": f"{end.timestamp():.0f}",
        }
        for i, (state, end) in enumerate([("PREEMPTED", ended[0]), ("PREEMPTED", ended[1]), ("COMPLETED", ended[0])])
    ]
    jobs = parse_sacct(text_of(*rows), "a", ended[1])[0]
    assert with_preemptors(jobs, found)["preempted_by"].to_list() == ["17", None, None]


def test_log_is_read_on_where_it_ended_and_after_rotation(tmp_path: Path) -> None:
    path = tmp_path / "slurmctld.log"
    lines = LOG.splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:40])
    log = PreemptionLog("a", str(path))
    assert log.read()["job_id"].to_list() == ["16"]
    path.write_text("".join(lines[:2]))
    assert log.read()["job_id"].to_list() == ["16", "18"]
    path.rename(tmp_path / "slurmctld.log.1")
    path.write_text(lines[2])
    assert log.read()["job_id"].to_list() == ["16", "18", "20"]
    path.unlink()
    with pytest.raises(SourceError, match=r"slurm_ctld_log .*No such file"):
        log.read()


def states(*rows: tuple[str, str, str | None, float | None, datetime | None]) -> pl.DataFrame:
    named = [(AT, "a", *row[:3], row[4], row[3]) for row in rows]
    return pl.DataFrame(named, schema=schema("core_job_states"), orient="row")


def test_only_changes_of_states_are_told() -> None:
    first = states(
        ("1", "PENDING", "Priority", 5.0, moment(600)),
        ("2", "PENDING", None, None, None),
        ("3", "RUNNING", None, None, None),
    )  # fmt: skip
    assert changed_states(no_states(), first).equals(first)
    assert changed_states(first, first).is_empty()
    moved = states(
        ("1", "PENDING", "Priority", 5.0, moment(630)),
        ("2", "PENDING", None, None, moment(9)),
        ("3", "RUNNING", None, None, None),
    )  # fmt: skip
    assert changed_states(first, moved)["job_id"].to_list() == ["2"]
    later = states(("1", "PENDING", "Resources", 5.0, moment(600)), ("4", "PENDING", None, 1.0, None))
    assert changed_states(first, later)["job_id"].to_list() == ["1", "4"]


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = float(T0)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def budget(folder: Path, clock: Clock, per_minute: float = 6, timeout_s: float = 30) -> Budget:
    return Budget("a", folder, per_minute, timeout_s, clock, clock.sleep)


def test_young_answers_are_shared_old_ones_serve_when_the_budget_is_used_up(tmp_path: Path) -> None:
    clock, asked = Clock(), []

    def work() -> bytes:
        asked.append(clock.now)
        return f"answer {len(asked)}".encode()

    one_process, other = budget(tmp_path, clock), budget(tmp_path, clock)
    price = Price(3, share_s=10, stale_s=100)
    assert one_process.ask("queue", price, work).data == b"answer 1"
    clock.now += 9
    shared = other.ask("queue", price, work)
    assert (shared.data, shared.at) == (b"answer 1", datetime.fromtimestamp(T0, UTC))
    clock.now += 2
    assert other.ask("queue", price, work).data == b"answer 2"
    clock.now += 11
    assert one_process.ask("queue", price, work).data == b"answer 2"  # 6 requests within a minute: the older one
    assert one_process.used() == 6
    with pytest.raises(SourceError, match=r"6 requests a minute are used up \(slurm_rpcs_per_minute\).*no earlier"):
        one_process.ask("nodes", price, work)
    clock.now += 10  # the first ones leave the minute in 28 s: it waits for them
    assert one_process.ask("nodes", price, work).data == b"answer 3"
    assert clock.now == T0 + 60
    assert one_process.ask("history", Price(0), work).data == b"answer 4"  # no request to slurmctld


def test_failures_count_and_are_not_kept(tmp_path: Path) -> None:
    clock = Clock()

    def fails() -> bytes:
        raise SourceError("down")

    asker = budget(tmp_path, clock)
    for used in (2, 4):
        with pytest.raises(SourceError, match="down"):
            asker.ask("queue", Price(2, 10, 100), fails)
        assert asker.used() == used
    (tmp_path / "ledger.json").write_text("[[1, ")  # cut off
    assert asker.ask("queue", Price(2, 10, 100), lambda: b"up").data == b"up"
    assert (tmp_path / "ledger.json").stat().st_mode & 0o077 == 0
    clock.now -= 86_400  # set back: neither waits for the future nor gives an answer from it
    assert asker.ask("queue", Price(2, 10, 100), lambda: b"new").data == b"new"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("qns"), st.floats(0, 20), st.integers(1, 3)), max_size=40),
    st.sampled_from([1.0, 2.0, 6.0, 7.5]),
)
def test_no_minute_has_more_requests_than_the_budget(
    tmp_path_factory: pytest.TempPathFactory, polls: list[tuple[str, float, int]], per_minute: float
) -> None:
    clock, made = Clock(), []
    asker = budget(tmp_path_factory.mktemp("budget"), clock, per_minute, timeout_s=20)
    for question, passed_s, cost in polls:
        clock.now += passed_s

        def work(cost: int = cost) -> bytes:
            made.append((clock.now, cost))
            return b""

        with contextlib.suppress(SourceError):
            asker.ask(question, Price(cost, 2, 30), work)
    for at, _ in made:
        within = [cost for other, cost in made if at - 60 < other <= at]
        assert sum(within) <= per_minute or len(within) == 1


def _flags(number: int | None, *, infinite: bool = False) -> dict[str, Any]:
    return {"set": number is not None, "infinite": infinite, "number": number or 0}


FLAT = {
    "jobs": [{
        "job_id": 8, "array_job_id": 4, "array_task_id": 1, "array_task_string": "", "het_job_id": 0,
        "het_job_offset": 0, "user_name": "u", "account": "a", "partition": "batch", "submit_time": T0,
        "eligible_time": T0, "start_time": T0 + 5, "end_time": T0 + 65, "job_state": "FAILED", "exit_code": 768,
        "restart_cnt": 2, "node_count": 2, "cpus": 16, "tres_req_str": "cpu=16,node=2,gres/gpu=8",
        "tres_alloc_str": "", "time_limit": 5, "nodes": "n[1-2]", "state_reason": "NonZeroExitCode", "name": "x",
        "priority": 17,
    }, {
        "job_id": 9, "user_name": "u", "submit_time": T0, "start_time": T0 + 600, "end_time": 0,
        "job_state": "PENDING", "exit_code": 0, "time_limit": None, "state_reason": "Resources", "priority": 3,
        "array_job_id": 9, "array_task_id": None, "array_task_string": "1-10%2", "nodes": "", "cpus": 1,
    }],
    "nodes": [{"name": "n1", "state": "idle", "state_flags": ["DRAIN"], "gres": "gpu:h100:8", "tres": "",
               "reason": "bad fan"}],
}  # fmt: skip
NESTED = {
    "jobs": [{
        **FLAT["jobs"][0], "array_job_id": _flags(4), "array_task_id": _flags(1), "het_job_id": _flags(0),
        "het_job_offset": _flags(0), "submit_time": _flags(T0), "eligible_time": _flags(T0),
        "start_time": _flags(T0 + 5), "end_time": _flags(T0 + 65), "job_state": ["FAILED"],
        "exit_code": {"status": ["ERROR"], "return_code": _flags(3), "signal": {"id": _flags(None), "name": ""}},
        "node_count": _flags(2), "cpus": _flags(16), "time_limit": _flags(5), "priority": _flags(17),
    }, {
        **FLAT["jobs"][1], "submit_time": _flags(T0), "start_time": _flags(T0 + 600), "end_time": _flags(0),
        "job_state": ["PENDING", "REQUEUED"], "exit_code": {"status": ["SUCCESS"], "return_code": _flags(0)},
        "time_limit": _flags(None, infinite=True), "array_job_id": _flags(9), "array_task_id": _flags(None),
        "priority": _flags(3), "cpus": _flags(1),
    }],
    "nodes": [{"name": "n1", "state": ["IDLE", "DRAIN"], "gres": "gpu:h100:8", "tres": "", "reason": "bad fan"}],
}  # fmt: skip


def _serve(pages: Pages, versions: list[str], answers: dict[str, Any]) -> RestReader:
    import json

    paths = {f"/slurm/{version}/jobs": {} for version in versions}
    pages.pages["/openapi/v3"] = json.dumps({"paths": paths})
    for version in versions:
        for what in ("jobs", "nodes"):
            pages.pages[f"/slurm/{version}/{what}"] = json.dumps({what: answers[what], "errors": [], "warnings": []})
    return RestReader("a", pages.url, user="u")


def test_rest_answers_of_old_and_new_schemas_are_the_same(pages: Pages) -> None:
    frames = {}
    for version, answers in (("v0.0.38", FLAT), ("v0.0.43", NESTED)):
        reader = _serve(pages, ["v0.0.37", version], answers)
        assert reader.version() == tuple(int(part) for part in version[1:].split("."))
        frames[version] = reader.queue().drop("observed_at"), reader.nodes()
        assert reader.warnings == []
    flat, nested = frames.values()
    assert flat[0].equals(nested[0])
    assert flat[1].equals(nested[1])
    ended, waits = flat[0].sort("job_id").to_dicts()
    told = ("state", "exit_code", "restarts", "array_job_id", "gpus", "nodes", "time_limit_s", "node_list", "priority")
    assert [ended[name] for name in told] == ["FAILED", "3:0", 2, "4", 8, 2, 300, "n1,n2", 17.0]
    told = ("state", "planned_start_time", "time_limit_s", "reason", "array_tasks", "priority")
    assert [waits[name] for name in told] == ["PENDING", moment(600), None, "Resources", 10, 3.0]
    assert flat[1].select("node", "gpu_model", "gpus", "state", "reason").rows() == [
        ("n1", "h100", 8, "IDLE+DRAIN", "bad fan")
    ]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ((500, "text/plain", "boom"), "HTTP 500: 'boom'"),
        ((401, "text/plain", "Authentication failure"), r"refused user 'u' \(401\).*scontrol token"),
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ("{}", "an answer without jobs"),
        ('{"jobs": [], "errors": [{"error": "Query empty", "source": "start_time"}]}', "start_time Query empty"),
    ],
)
def test_rest_answers_that_are_not_whole(pages: Pages, page: Any, message: str) -> None:
    reader = _serve(pages, ["v0.0.40"], NESTED)
    pages.pages["/slurm/v0.0.40/jobs"] = page
    with pytest.raises(SourceError, match=message):
        reader.queue()


def test_rest_schemas_that_are_not_known(pages: Pages) -> None:
    reader = _serve(pages, ["v0.0.99"], NESTED)
    assert len(reader.queue()) == 2
    assert "v0.0.99 at least: not tried yet" in reader.warnings[0]
    with pytest.raises(SourceError, match=r"no /slurm/vX\.Y\.Z/jobs"):
        _serve(pages, [], NESTED).queue()
    with pytest.raises(SourceError, match="http://HOST:PORT or unix:/PATH"):
        RestReader("a", "slurm.example")
    with pytest.raises(SourceError, match="cannot be reached"):
        RestReader("a", "http://127.0.0.1:1").queue()
    with pytest.raises(SourceError, match="slurm_rest_token_file"):
        RestReader("a", pages.url, token_file="/nonexistent/token").queue()


FIELDS = (
    "JobIDRaw",
    "JobID",
    "Submit",
    "Start",
    "End",
    "State",
    "ExitCode",
    "ReqMem",
    "ReqTRES",
    "NodeList",
    "JobName",
)
_TEXT = st.text(alphabet="0123456789|\n\x1f\t-:_[]%+.,=abcKMGTUnknow\u00e9\x00", max_size=24)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(_TEXT, max_size=len(FIELDS) + 2), max_size=8), st.sampled_from(["|", "\x1f"]), st.booleans())
def test_no_text_of_sacct_stops_the_parser(rows: list[list[str]], delimiter: str, whole: bool) -> None:
    header = delimiter.join(FIELDS if whole else FIELDS[:6])
    text = "\n".join([header, *(delimiter.join(row) for row in rows)])
    try:
        frame, warnings = parse_sacct(text, "a", AT, since=AT)
    except SacctError:
        return
    assert frame.schema == schema("raw_jobs")
    assert all(isinstance(warning, str) for warning in warnings)
    assert frame.select(pl.struct("job_id", "submit_time").is_duplicated()).to_series().sum() == 0


@settings(max_examples=100, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["set", "number", "infinite", "job_id", "current", "task_id", "signal", "return_code", "count", "type", "name"]
    ), inner, max_size=4), max_leaves=12,
), st.sampled_from(sorted({*FLAT["jobs"][0], "array", "het", "time", "tres", "required", "state"})))  # fmt: skip
def test_no_value_of_slurmrestd_stops_the_reader(value: Any, field: str) -> None:
    from pipelines.sources.slurmrestd_fields import accounted_fields, node_fields, queued_fields

    readers: list[Callable[[dict[str, Any]], dict[str, str]]] = [accounted_fields, queued_fields, node_fields]
    for read in readers:
        told = read({**FLAT["jobs"][0], field: value})
        assert all(isinstance(text, str) for text in told.values())

"""sacct text, host lists, Standard Workload Format, inventories: what each spelling means."""

from __future__ import annotations

import gzip
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from features.vocabulary import TIME, conform, schema
from pipelines.settings import Cluster
from pipelines.sources import SourceError, build_jobs
from pipelines.sources.hostlist import HostlistError, expand_hostlist
from pipelines.sources.sacct import SacctError, parse_sacct, settle_attempts
from pipelines.sources.sacct_file import SacctFile
from pipelines.sources.slurm_text import parse_jobcomp, parse_nodes, parse_topology
from pipelines.sources.trace import JobsTrace
from simulator.cluster import SimulatedCluster
from simulator.sacct import SacctText

AT = datetime(2026, 11, 2, tzinfo=UTC)
BASE = {"JobIDRaw": "7", "JobID": "7", "Submit": "1793534400", "State": "COMPLETED"}


def parse(*rows: dict[str, str], delimiter: str = "|") -> pl.DataFrame:
    rows = tuple({**BASE, **row} for row in rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = "\n".join(
        delimiter.join(row.get(name, "") for name in columns) for row in [{name: name for name in columns}, *rows]
    )
    return parse_sacct(text + "\n", "a", AT)[0]


def one(**fields: str) -> dict[str, object]:
    frame = parse(fields)
    assert len(frame) == 1
    return frame.row(0, named=True)


def test_shape_and_key() -> None:
    frame = parse({})
    assert conform(frame, "raw_jobs").equals(frame)
    row = frame.row(0, named=True)
    assert (row["cluster"], row["job_id"], row["observed_at"]) == ("a", "7", AT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1793534400", datetime(2026, 11, 1, 12, tzinfo=UTC)),
        ("2026-11-01T12:00:00", datetime(2026, 11, 1, 12, tzinfo=UTC)),
        ("2026-11-01 12:00:00", datetime(2026, 11, 1, 12, tzinfo=UTC)),
        ("2026-11-01T12:00:00Z", datetime(2026, 11, 1, 12, tzinfo=UTC)),
        ("Unknown", None),
        ("None", None),
        ("", None),
        ("0", None),
    ],
)
def test_times(text: str, expected: datetime | None) -> None:
    assert one(Start=text)["start_time"] == expected


@pytest.mark.parametrize(
    ("raw", "text", "seconds"),
    [
        ("90", "", 5400),
        ("", "01:30:00", 5400),
        ("", "2-00:00:00", 172_800),
        ("", "1-06", 108_000),
        ("", "1-06:30", 109_800),
        ("", "45", 2700),
        ("", "05:30", 330),
        ("UNLIMITED", "UNLIMITED", None),
        ("Partition_Limit", "Partition_Limit", None),
        ("INVALID", "", None),
        ("", "", None),
    ],
)
def test_time_limits(raw: str, text: str, seconds: int | None) -> None:
    assert one(TimelimitRaw=raw, Timelimit=text)["time_limit_s"] == seconds


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 0", "CANCELLED"),
        ("CANCELLED by 380693", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY"),
        ("NODE_FAIL", "NODE_FAIL"),
        ("COMPLETING", "RUNNING"),
        ("CONFIGURING", "RUNNING"),
        ("REQUEUE_HOLD", "PENDING"),
        ("something new", "UNKNOWN"),
        ("", "UNKNOWN"),
    ],
)
def test_states(text: str, state: str) -> None:
    assert one(State=text)["state"] == state


@pytest.mark.parametrize(
    ("asked", "given_", "gpus"),
    [
        ("cpu=8,gres/gpu=8,node=1", "", 8),
        ("", "billing=1,gres/gpu:a100=8,gres/gpu=8", 8),  # one count in two spellings
        ("", "gres/gpu:a100=4,gres/gpu:h100=2", 6),  # only typed
        ("cpu=8,node=1", "cpu=8,gres/gpu=2,node=1", 2),
        ("cpu=8,node=1", "cpu=8,node=1", 0),
        ("gres/gpuutil=90,gres/gpumem=5G,cpu=1", "", 0),
        ("", "", None),
    ],
)
def test_gpus_of_tres(asked: str, given_: str, gpus: int | None) -> None:
    assert one(ReqTRES=asked, AllocTRES=given_)["gpus"] == gpus


@pytest.mark.parametrize(
    ("gres", "gpus"), [("gpu:4", 8), ("gpu:a100:4", 8), ("gres:gpu:2", 4), ("gpu", 2), ("craynetwork:1", None)]
)
def test_gpus_of_old_gres_columns_are_per_node(gres: str, gpus: int | None) -> None:
    assert one(AllocGRES=gres, NNodes="2")["gpus"] == gpus


@pytest.mark.parametrize(
    ("memory", "tres", "mib"),
    [
        ("4Gn", "", 8192),  # a node
        ("4Gc", "", 65_536),  # a CPU
        ("4G", "", 4096),  # the job
        ("5000Mc", "", 80_000),
        ("0n", "", None),
        ("512000K", "", 500),
        ("1.5T", "", 1_572_864),
        ("2147486648Mn", "", 48_000),  # 3000 M a CPU with the flag still set
        ("1Gn", "cpu=8,mem=62.50G,node=1", 64_000),  # what the database counted goes first
        ("", "", None),
    ],
)
def test_memory(memory: str, tres: str, mib: int | None) -> None:
    assert one(ReqMem=memory, ReqTRES=tres, NNodes="2", ReqCPUS="16")["memory_mib"] == mib


def test_steps_are_left_out_and_arrays_and_het_jobs_go_by_raw_id() -> None:
    frame = parse(
        {"JobIDRaw": "239023", "JobID": "239023"},
        {"JobIDRaw": "239023.0", "JobID": "239023.0", "State": "CANCELLED"},
        {"JobIDRaw": "239023.batch", "JobID": "239023.batch"},
        {"JobIDRaw": "127", "JobID": "123_4"},
        {"JobIDRaw": "124", "JobID": "123+1"},
        {"JobIDRaw": "123", "JobID": "123_[1-10%2]", "State": "PENDING"},
    )
    assert dict(frame.select("job_id", "state").iter_rows()) == {
        "239023": "COMPLETED", "127": "COMPLETED", "124": "COMPLETED", "123": "PENDING",
    }  # fmt: skip


def test_requeued_jobs_keep_a_row_for_each_attempt() -> None:
    frame = parse(
        {"Submit": "1000000000", "Start": "1000000010", "End": "1000000020", "State": "NODE_FAIL"},
        {"Submit": "1000000020", "Start": "1000000190", "End": "Unknown", "State": "RUNNING"},
        {"JobIDRaw": "8", "Submit": "1000000000", "Start": "Unknown", "State": "PENDING"},
    )
    assert frame.select("job_id", "state", "restarts").rows() == [
        ("7", "NODE_FAIL", None), ("8", "PENDING", None), ("7", "RUNNING", 1),
    ]  # fmt: skip


def test_attempts_of_one_submission_do_not_overwrite_each_other() -> None:
    attempts = (
        {"Submit": "1000000100", "Start": "1000000190", "End": "Unknown", "State": "RUNNING"},
        {"Submit": "1000000100", "Start": "1000000110", "End": "1000000120", "State": "PREEMPTED"},
        {"Submit": "1000000100", "Start": "1000000100", "End": "1000000105", "State": "REQUEUED"},
    )
    for rows in (attempts, attempts[::-1]):
        frame = parse(*rows).sort("start_time")
        assert frame["state"].to_list() == ["REQUEUED", "PREEMPTED", "RUNNING"]
        seconds = (frame["submit_time"].dt.timestamp("us") - 1_000_000_100_000_000).to_list()
        assert seconds == [1, 10_000_000, 0]  # the newest keeps the submission, the others are keyed by their start
    waiting = {"Submit": "1000000100", "Start": "Unknown", "End": "Unknown", "State": "PENDING"}
    assert parse(attempts[1], waiting)["state"].to_list() == ["PENDING", "PREEMPTED"]
    # Two readings of one attempt are one row, in whatever order they come.
    later = parse(attempts[0]).with_columns(pl.lit(AT + timedelta(seconds=1), dtype=TIME).alias("observed_at"))
    for frames in ([parse(waiting), later], [later, parse(waiting)]):
        assert settle_attempts(pl.concat(frames))["state"].to_list() == ["RUNNING"]


def test_pending_start_is_a_plan_and_running_end_a_limit() -> None:
    row = one(State="PENDING", Start="1793538000", Reason="Resources", NodeList="None assigned")
    assert row["start_time"] is None
    assert row["planned_start_time"] == datetime(2026, 11, 1, 13, tzinfo=UTC)
    assert (row["reason"], row["node_list"]) == ("Resources", None)
    assert one(State="PENDING", PlannedStart="1793538000")["planned_start_time"] == datetime(
        2026, 11, 1, 13, tzinfo=UTC
    )
    row = one(State="RUNNING", Start="1793534401", End="1793538000", Reason="None", NodeList="n[1-2]")
    assert (row["end_time"], row["reason"], row["node_list"]) == (None, None, "n1,n2")


def test_job_cancelled_before_it_started_never_ran() -> None:
    row = one(State="CANCELLED by 0", Start="1793534460", End="1793534460", NodeList="None assigned")
    assert row["start_time"] is None
    assert row["end_time"] is not None
    row = one(State="CANCELLED by 0", Start="1793534460", End="1793534470", NodeList="n1")
    assert row["start_time"] is not None


def test_delimiter_and_newline_inside_a_name() -> None:
    frame = parse({"NNodes": "1", "JobName": "a|b|c"}, {"JobIDRaw": "8", "JobName": "two\nlines"})
    assert frame["name"].to_list() == ["a|b|c", "two\nlines"]
    text = "JobName|JobID|Submit|State\nx|y|9|1793534400|FAILED\n"
    frame, warnings = parse_sacct(text, "a", AT)
    assert (frame["name"][0], frame["job_id"][0], warnings) == ("x|y", "9", [])


@pytest.mark.parametrize("delimiter", ["\x1f", "|", "^", ";"])
def test_delimiters_and_case_of_the_header(delimiter: str) -> None:
    text = delimiter.join(["jobid", "submit", "state"]) + "\n" + delimiter.join(["9", "1793534400", "FAILED"])
    assert parse_sacct(text, "a", AT)[0]["job_id"].to_list() == ["9"]


def test_parsable_with_a_delimiter_at_the_end_of_each_record() -> None:
    text = "JobID|Submit|State|JobName|\n9|1793534400|FAILED|a\nb|\n10|1793534400|FAILED|c|\n"
    frame, warnings = parse_sacct(text, "a", AT)
    assert dict(frame.select("job_id", "name").iter_rows()) == {"9": "a\nb", "10": "c"}
    assert warnings == []


def test_what_is_no_sacct_text_is_refused_and_broken_lines_are_counted() -> None:
    for text in ("", "\n", "sacct: error: Problem talking to the database\n", "JobID|State\n1|FAILED\n"):
        with pytest.raises(SacctError, match="JobID, State and Submit"):
            parse_sacct(text, "a", AT)
    frame, warnings = parse_sacct("JobID|Submit|State\n1|1793534400|FAILED\n2|17935\n3|Unknown|FAILED\n", "a", AT)
    assert frame["job_id"].to_list() == ["1"]
    assert len(warnings) == 2


def test_recorded_text_of_a_real_cluster(traces: Path) -> None:
    text = (traces / "sacct" / "xdmod-phillips-2016.txt").read_text()
    frame, warnings = parse_sacct(text, "phillips", AT)
    assert warnings == []
    assert len(frame) == len(text.splitlines()) - 1
    row = frame.filter(pl.col("job_id") == "165381").row(0, named=True)
    assert (row["state"], row["nodes"], row["cpus"], row["memory_mib"]) == ("TIMEOUT", 8, 64, 64_000)
    assert row["time_limit_s"] == 5 * 86_400
    assert row["node_list"].split(",")[:3] == ["cpn-f13-03-01", "cpn-f13-03-02", "cpn-f13-04-01"]
    assert frame.filter(pl.col("job_id") == "163485").row(0, named=True)["gpus"] == 2
    ran = frame.filter(pl.col("start_time").is_not_null())
    assert (ran["end_time"] >= ran["start_time"]).all()
    assert set(frame.filter(pl.col("start_time").is_null())["state"]) == {"CANCELLED"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1-2]x", ["a1x", "a2x"]),
        ("None assigned", []),
        ("(null)", []),
        ("", []),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert list(expand_hostlist(text)) == names


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n1]", "n[a-b]", "n[1-9999999]", "a[1-2000]b[1-2000]"])
def test_broken_host_lists(text: str) -> None:
    with pytest.raises(HostlistError):
        expand_hostlist(text)


@given(st.text(alphabet="n[]-,0123456789", max_size=30))
def test_host_lists_never_fail_otherwise(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except HostlistError:
        return
    assert all("[" not in name and "," not in name for name in names)


def test_nodes_and_topology_text() -> None:
    topology = parse_topology(
        "SwitchName=r1 Level=0 LinkSpeed=1 Nodes=n[1-2] \n"
        "SwitchName=r2 Level=0 LinkSpeed=1 Nodes=n3\n"
        "SwitchName=p1 Level=1 LinkSpeed=1 Nodes=n[1-3] Switches=r[1-2]\n"
        "SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-3] Switches=p1\n"
    )
    assert topology == {"n1": ("r1", "p1"), "n2": ("r1", "p1"), "n3": ("r2", "p1")}
    text = (
        "NodeName=n1 Arch=x86_64 Gres=gpu:h100:8(S:0-1) NodeAddr=n1 State=IDLE+DRAIN CfgTRES=cpu=16,gres/gpu=8"
        " Reason=bad thing  here [root@2026-11-30T02:34:11]\n"
        "NodeName=n2 Gres=gpu:8 State=DOWN*+DRAIN CfgTRES=cpu=16 Reason=Not responding [slurm@1796006046]\n"
        "NodeName=n3 Gres=(null) State=ALLOCATED CfgTRES=cpu=16,gres/gpu=4,gres/gpu:a100=4 AllocTRES=gres/gpu=4\n"
        "NodeName=n4 Gres=(null) State=MIXED+PLANNED CfgTRES=cpu=16 \n"
    )
    assert parse_nodes(text, topology).rows() == [
        ("n1", "r1", "p1", "h100", 8, "IDLE+DRAIN", "bad thing  here"),
        ("n2", "r1", "p1", None, 8, "DOWN+DRAIN+NOT_RESPONDING", "Not responding"),
        ("n3", "r2", "p1", "a100", 4, "ALLOCATED", None),
        ("n4", None, None, None, 0, "MIXED+PLANNED", None),
    ]
    assert parse_topology("BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\n") == {
        "n1": ("b1", ""),
        "n2": ("b1", ""),
    }
    assert parse_topology("No topology information available\n") == {}


def test_job_completion_file() -> None:
    text = (
        "JobId=1 UserId=root(0) GroupId=root(0) Name=a|b c JobState=COMPLETED Partition=batch TimeLimit=5 "
        "StartTime=2026-11-30T02:34:07 EndTime=2026-11-30T02:34:08 NodeList=n[1-2] NodeCnt=2 ProcCnt=1 WorkDir=/tmp "
        "ReservationName= Tres=cpu=1,mem=62.50G,node=1,billing=1,gres/gpu=2 Account=root QOS=normal WcKey= "
        "Cluster=alpha SubmitTime=2026-11-30T02:34:06 EligibleTime=unknown DerivedExitCode=0:0 ExitCode=0:0 \n"
        "half a line JobId=2 UserId=roo"
    )
    frame, warnings = parse_jobcomp(text, "a", AT + timedelta(days=30))
    assert warnings == []
    row = frame.row(0, named=True)
    assert len(frame) == 1
    assert (row["job_id"], row["name"], row["state"], row["gpus"], row["node_list"]) == (
        "1",
        "a|b c",
        "COMPLETED",
        2,
        "n1,n2",
    )
    assert row["time_limit_s"] == 300
    assert row["end_time"] - row["start_time"] == timedelta(seconds=1)
    assert row["eligible_time"] is None
    assert row["exit_code"] == "0:0"
    frame, warnings = parse_jobcomp(text + "\nJobId=3 UserId=root(0) Name=cut", "a", AT + timedelta(days=30))
    assert (len(frame), warnings) == (1, ["1 records of the job completion file cannot be read"])


SWF = """; Version: 2.2
; UnixStartTime: 1000000000
; MaxProcs: 128
  1  0  10  100  8 -1 -1  8  3600 -1  1  5  2 3 1 -1 -1 -1
  2  5  -1   -1 -1 -1 -1  4    -1 -1  5  6  2 3 1 -1 -1 -1
  3  9   1   50  2 -1 -1 -1   600 2048 0  6  2 3 2 -1 -1 -1
  4  9   1   50  2 -1 -1 -1   600 -1  2  6  2 3 2 -1 -1 -1
"""


@pytest.mark.parametrize("name", ["t.swf", "t.swf.gz"])
def test_standard_workload_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(SWF.encode()) if name.endswith("gz") else SWF.encode())
    origin = datetime.fromtimestamp(1_000_000_000, UTC)
    jobs = JobsTrace("kth", str(path)).fetch_jobs(origin, origin + timedelta(days=1))
    assert jobs["job_id"].to_list() == ["1", "2", "3"]  # 4 is a part of a checkpointed job
    assert jobs["state"].to_list() == ["COMPLETED", "CANCELLED", "FAILED"]
    first, second, third = jobs.iter_rows(named=True)
    assert first["start_time"] == origin + timedelta(seconds=10)
    assert first["end_time"] == origin + timedelta(seconds=110)
    assert (first["cpus"], first["time_limit_s"], first["user"], first["nodes"]) == (8, 3600, "5", None)
    assert (second["start_time"], second["time_limit_s"], second["memory_mib"]) == (None, None, None)
    assert (third["cpus"], third["memory_mib"]) == (2, 4)
    path.write_bytes(b"nothing here")
    with pytest.raises(SourceError, match=name):
        JobsTrace("kth", str(path)).fetch_jobs(origin, origin)


def test_canonical_jobs(traces: Path) -> None:
    source = JobsTrace("kth", str(traces / "jobs" / "kth-sp2-1996.parquet"))
    start = datetime(1996, 10, 1, tzinfo=UTC)
    jobs = source.fetch_jobs(start, start + timedelta(days=1))
    assert jobs.schema == schema("raw_jobs")
    assert 0 < len(jobs) < 1000
    assert set(jobs["cluster"]) == {"kth"}
    assert (jobs["submit_time"] < start + timedelta(days=1)).all()
    assert (jobs["end_time"] >= start).all()
    assert [(name, ok) for name, ok, _ in source.check() if ok is not True] == [("recent", None)]


def sacct_file(tmp_path: Path) -> SacctFile:
    (tmp_path / "sacct.txt").write_text(
        "JobID|User|Submit|Start|End|State|NNodes|ReqTRES|TimelimitRaw|NodeList|PlannedStart|Reason|JobName\n"
        "1|u|1793534400|1793534460|1793538000|COMPLETED|1|gres/gpu=8,node=1|60|n1|||old\n"
        "2|u|1793534400|1793534460|Unknown|RUNNING|2|gres/gpu=16,node=2|600|n[2-3]|||train\n"
        "3|v|1793541600|Unknown|Unknown|PENDING|4|gres/gpu=32,node=4|600|None assigned|1793545200|Resources|big\n"
    )
    (tmp_path / "inventory.csv").write_text("node,rack,pod,gpu_model,gpus\nn[1-4],r1,p1,H100,8\n")
    cluster = Cluster(
        jobs="sacct-file", jobs_path=str(tmp_path / "sacct.txt"), inventory=str(tmp_path / "inventory.csv")
    )
    source = build_jobs("a", cluster, tmp_path)
    assert isinstance(source, SacctFile)
    return source


def test_sacct_file_windows_and_live_state(tmp_path: Path) -> None:
    source = sacct_file(tmp_path)
    t0 = datetime.fromtimestamp(1_793_534_400, UTC)

    def ids(start_s: float, end_s: float) -> list[str]:
        jobs = source.fetch_jobs(t0 + timedelta(seconds=start_s), t0 + timedelta(seconds=end_s))
        return jobs["job_id"].to_list()

    assert ids(-100, 0) == []
    assert ids(0, 1) == ["1", "2"]
    assert ids(3600, 3700) == ["1", "2"]
    assert ids(3601, 7200) == ["2"]
    assert ids(3601, 7201) == ["2", "3"]
    live = source.live()
    assert live.jobs["job_id"].to_list() == ["2", "3"]
    assert live.jobs["planned_start_time"].to_list() == [None, datetime.fromtimestamp(1_793_545_200, UTC)]
    assert live.nodes.select("node", "rack", "gpus", "state").rows() == [
        ("n1", "r1", 8, "IDLE"), ("n2", "r1", 8, "ALLOCATED"), ("n3", "r1", 8, "ALLOCATED"), ("n4", "r1", 8, "IDLE"),
    ]  # fmt: skip
    assert conform(live.nodes, "core_nodes").equals(live.nodes)
    assert all(ok for _, ok, _ in source.check())


def test_sacct_file_is_read_again_when_it_changed(tmp_path: Path) -> None:
    source = sacct_file(tmp_path)
    assert len(source.live().jobs) == 2
    text = (tmp_path / "sacct.txt").read_text()
    new = tmp_path / "new.txt"
    new.write_text(
        text.replace("2|u|1793534400|1793534460|Unknown|RUNNING", "2|u|1793534400|1793534460|1793538001|FAILED")
    )
    new.replace(tmp_path / "sacct.txt")
    assert source.live().jobs["job_id"].to_list() == ["3"]
    (tmp_path / "sacct.txt").unlink()
    with pytest.raises(SourceError, match=r"sacct\.txt: No such file"):
        source.live()
    assert [ok for _, ok, _ in source.check()] == [False]


def test_settings_that_a_kind_needs(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"clusters\.a\.jobs_path"):
        build_jobs("a", Cluster(jobs="sacct-file"), tmp_path)
    nothing = build_jobs("a", Cluster(jobs="none"), tmp_path)
    assert nothing.live().jobs.schema == schema("raw_jobs")
    assert nothing.fetch_jobs(AT, AT).is_empty()


def test_sacct_file_that_grows_gives_what_a_fresh_reading_gives(tmp_path: Path) -> None:
    header = "JobID|Submit|Start|End|State|JobName\n"
    ended: list[str] = []
    path = tmp_path / "sacct.txt"
    source = SacctFile("a", str(path))
    for k in range(24):
        first = 1_793_534_400 + 1000 * k
        name = "two\nlines" if k % 7 == 0 else "x" * 20
        ended += [f"{150 * k + i}|{first + i}|{first + 100}|{first + 200}|FAILED|{name}" for i in range(150)]
        if k == 15:
            ended = ended[500:]  # something was purged: nothing of before may remain
        live = [
            f"{9000 + k}|{first}|{first + 1}|Unknown|RUNNING|live",
            f"{9001 + k}|{first}|Unknown|Unknown|PENDING|next",
        ]
        path.write_text(header + "\n".join([*ended, *live]) + "\n")
        os.utime(path, ns=(k + 1, k + 1))
        fresh = SacctFile("a", str(path))
        window = (datetime(2020, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC))
        got, expected = source.fetch_jobs(*window).drop("observed_at"), fresh.fetch_jobs(*window).drop("observed_at")
        assert got.sort("job_id").equals(expected.sort("job_id"))
        assert len(got) == len(ended) + 2
        assert source.warnings == []
    assert source._settled > 64_000


def test_sacct_text_of_the_simulator() -> None:
    now = datetime(2026, 11, 1, tzinfo=UTC)
    cluster = SimulatedCluster(nodes=8, start=now - timedelta(days=2))
    cluster.advance_jobs(now)
    frame, warnings = parse_sacct(SacctText(cluster).text().decode(), cluster.name, now)
    assert warnings == []
    truth = cluster.jobs_frame()
    times = [name for name, dtype in truth.schema.items() if isinstance(dtype, pl.Datetime)]
    columns = [name for name in truth.columns if name != "observed_at"]
    whole_seconds = [pl.col(name).dt.truncate("1s") for name in times if name != "observed_at"]
    expected = truth.select(columns).with_columns(whole_seconds).sort("job_id")
    assert {"PENDING", "RUNNING", "COMPLETED"} <= set(expected["state"])
    assert_frame_equal(frame.select(columns).sort("job_id"), expected)


def test_negative_counts_are_null() -> None:
    row = one(NNodes="-1", ReqCPUS="-4", TimelimitRaw="-60", ReqTRES="cpu=-1,gres/gpu=-2,node=-3")
    assert [row[name] for name in ("nodes", "cpus", "time_limit_s")] == [None] * 3
    assert row["gpus"] in (None, 0)
    assert one(TimelimitRaw="9223372036854775807")["time_limit_s"] is None
    assert one(NNodes="-1", ReqTRES="node=2")["nodes"] == 2


@pytest.mark.parametrize(
    "submit",
    ["1793750400", "9223372036854775807", "99999999999", "2026-11-03T00:00:01", "9999-12-31T00:00:00",
     "0001-01-01T00:00:00", "17"],
)  # fmt: skip
def test_jobs_submitted_at_impossible_times_are_left_out(submit: str) -> None:
    text = f"JobID|Submit|State|Start\n1|{submit}|PENDING|\n2|1793534400|PENDING|9999-12-31T00:00:00\n"
    frame, warnings = parse_sacct(text, "a", AT)
    assert frame.select("job_id", "planned_start_time").rows() == [("2", None)]
    assert len(warnings) == 1
    assert warnings[0].startswith("1 job ")
    assert "as 1" in warnings[0]


def test_a_job_a_little_ahead_stays() -> None:
    assert len(parse({"Submit": "2026-11-02T23:59:59"})) == 1

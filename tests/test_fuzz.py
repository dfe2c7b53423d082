"""Every parser against nonsense: it gives a result in the registry's form or its own error, quickly, and nothing else.

Inputs are right ones with a few things wrong, since pure noise does not come past the first check. A line that is bad
costs no good one. A line of 1 GB costs little memory.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.vocabulary import conform, schema
from pipelines.importing import import_files
from pipelines.imports import ImportingError, Task
from pipelines.imports.report import Report
from pipelines.imports.series import frames_of
from pipelines.settings import SettingsError, load_settings
from pipelines.sources import SourceError
from pipelines.sources.exposition import ExpositionError, parse_page, parse_series
from pipelines.sources.hostlist import HostlistError, expand_hostlist, split_hostlist
from pipelines.sources.inventory import INVENTORY_SCHEMA, NODES_SCHEMA, read_inventory
from pipelines.sources.promql_matrix import decode_matrix, parse_labels
from pipelines.sources.sacct import SacctError, jobs_frame, jobs_schema, parse_sacct
from pipelines.sources.slurm_limits import assoc_mgr, partitions, qos
from pipelines.sources.slurm_policy import parse_reservations, parse_sprio
from pipelines.sources.slurm_text import parse_jobcomp, parse_nodes, parse_topology
from pipelines.sources.swf import parse_swf
from pipelines.sources.wide import Index, Samples

ROOT = Path(__file__).parent.parent
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
EPOCH = 1_796_036_400
LIMIT_S = 1.0  # of processor time, for one input

fuzzed = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)

# What parsers stumble over: numbers that fit nothing, separators, quotes, brackets, other scripts, controls.
NASTY = (
    "", " ", "\n", "\r\n", "\t", "\x00", "\x1f", "|", ",", ";", '"', "'", "\\", "\\n", "{", "}", "[", "]", "=", "#",
    "-", "+", ".", ":", "/", "(", ")", "null", "None", "nan", "NaN", "+Inf", "-inf", "1e999", "-1", "0", "00", "1e308",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "99999999999999999999999999", "0x10", "1_000",
    "٣", "²", "é", "\u2028", "\ufeff", "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"), "💥",
    "2026-13-45T99:99:99", "0001-01-01T00:00:00", "9999-12-31T23:59:59", "Unknown", "(null)", "UNLIMITED", "INVALID",
    "[1-3", "n[1-999999999]", "n[[1-2]]", "n[3-1]", "1-2-3", "999999999-23:59:59", "4Gn", "5000Mc", "gres/gpu:a=b=9",
    " # {", "# EOF", "a" * 3000,
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, *right: str) -> str:
    """A right text with up to six pieces cut out, doubled, or replaced by something nasty."""
    text = draw(st.sampled_from(right))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(text)))
        length = draw(st.sampled_from([0, 1, 1, 2, 5, 20]))
        piece = draw(st.sampled_from(NASTY) | st.text(max_size=5) | st.just(text[start : start + 40]))
        text = text[:start] + piece + text[start + length :]
    return text


def numbers() -> st.SearchStrategy[float]:
    return st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -1.0, 1e308, 9.2e18, 2.0**63])


@contextlib.contextmanager
def quick() -> Generator[None]:
    """Fails when the block takes longer than the limit; other processes on the machine do not count."""
    began = time.process_time()
    yield
    took = time.process_time() - began
    assert took < LIMIT_S, f"took {took:.2f} s"


def of_registry(frame: pl.DataFrame, table: str) -> None:
    """Columns and dtypes are those of the table; times and numbers are such that a store takes them."""
    types = schema(table)
    assert {name: dtype for name, dtype in frame.schema.items() if types[name] != dtype} == {}
    whole = conform(frame, table)
    assert whole.rows() is not None  # every value can be made a Python object: no time beyond year 9999


def jobs_are_right(frame: pl.DataFrame) -> None:
    assert frame.schema == jobs_schema()
    of_registry(frame, "raw_jobs")
    assert not frame["job_id"].null_count()
    assert not frame["submit_time"].null_count()
    assert not frame.select("cluster", "job_id", "submit_time").is_duplicated().any()
    for name in ("nodes", "cpus", "gpus", "memory_mib", "time_limit_s"):
        assert (frame[name].drop_nulls() >= 0).all(), name


# --- exporters --------------------------------------------------------------------------------------------

PAGE = (
    "# HELP DCGM_FI_DEV_GPU_TEMP temperature\n# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n"
    'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1000",device="nvidia0",modelName="H100",Hostname="n1"} 40\n'
    'DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-2000",Hostname="n\\"1\\\\"} 79 1796036400000\n'
    'DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1000",GPU_I_ID="3",GPU_I_PROFILE="1g.10gb",Hostname="n1"} 5e3 # {a="b"} 1\n'
    'node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1",instance="n1:9100"} 1e12\n'
    'ipmi_temperature_celsius{id="1",name="Inlet Temp",instance="n1"} 25\n'
    'up{instance="n1:9400",job="dcgm"} 1\n'
)


def of_samples(samples: Samples, index: Index) -> None:
    task = Task("exposition", (), "c", NOW, Report("x", "exposition", "c"))
    for table, frame in frames_of(samples, index, task).items():
        of_registry(frame, table)


@fuzzed
@given(damaged(PAGE, PAGE.replace("1796036400000", "1796036400.5") + "# EOF\n"), st.sampled_from(["", "n1"]))
def test_exposition(text: str, node: str) -> None:
    index = Index()
    with quick():
        try:
            page = parse_page(text, index, node)
        except ExpositionError:
            return
        assert len(page.names) == len(page.entities) == len(page.ts_ms) == len(page.values)
        count = len(page.names)
        times = np.array([EPOCH * 1000 if ts is None else ts for ts in page.ts_ms], np.int64)
        flat = Samples(
            np.array(page.names, np.int64), np.array(page.entities, np.int64), np.ones(count, np.int64), times,
            np.array(page.values, np.float64),
        )  # fmt: skip
        of_samples(flat, index)


@fuzzed
@given(st.text(max_size=200) | damaged('a{b="c",d="e\\"f"}', "a_b:c{ }", 'x{y="' + "\\" * 200))
def test_series(text: str) -> None:
    with quick():
        try:
            name, labels = parse_series(text)
        except ExpositionError:
            return
        assert name
        assert all(isinstance(value, str) for value in labels.values())


MATRIX = json.dumps([
    {"metric": {"__name__": "DCGM_FI_DEV_GPU_TEMP", "UUID": "GPU-1", "Hostname": "n1"}, "values": [[EPOCH, "40"]]},
    {"metric": {"__name__": "up"}, "values": [[EPOCH, "1"], [EPOCH + 15.5, "NaN"], [EPOCH + 30, "+Inf"]]},
    {"metric": {}, "histograms": [[EPOCH, {"count": "1"}]]},
])  # fmt: skip


@fuzzed
@given(damaged(MATRIX, MATRIX.replace(" ", ""), "[]") | st.lists(numbers()).map(json.dumps))
def test_matrix(text: str) -> None:
    import msgspec

    with quick():
        try:
            matrix = decode_matrix(text.encode("utf-8", "replace"))
        except (ValueError, msgspec.DecodeError, OverflowError, RecursionError):
            return
        assert len(matrix.labels) == len(matrix.counts)
        assert matrix.counts.sum() == len(matrix.ts_ms) == len(matrix.values)
        for raw in matrix.labels:
            with contextlib.suppress(ValueError):
                assert isinstance(parse_labels(raw), dict)


# --- jobs -------------------------------------------------------------------------------------------------

SACCT = (
    "JobIDRaw|JobID|User|Account|Partition|Submit|Eligible|Start|End|State|NNodes|ReqCPUS|ReqMem|ReqTRES|AllocTRES|"
    "TimelimitRaw|Timelimit|NodeList|Reason|JobName\n"
    "7|7|ada|a|gpu|1796036400|1796036400|1796036460|1796037000|COMPLETED|2|16|4Gn|billing=8,cpu=16,gres/gpu=8,mem=64G,"
    "node=2|gres/gpu:a100=8|60|01:00:00|n[1-2]|None|train\n"
    "7.batch|7.batch|||||||||||||||||||\n"
    "8|8_1|bob|a|gpu|2026-11-30T11:00:00|Unknown|Unknown|Unknown|CANCELLED by 0|1|8|5000Mc|cpu=8|||UNLIMITED|"
    "None assigned|Priority|a|b\n"
)  # fmt: skip


@fuzzed
@given(damaged(SACCT, SACCT.replace("|\n", "\n"), SACCT.replace("|", "\x1f")))
def test_sacct(text: str) -> None:
    with quick():
        try:
            frame, warnings = parse_sacct(text, "c", NOW)
        except SacctError:
            return
        jobs_are_right(frame)
        assert all(isinstance(warning, str) for warning in warnings)


SQUEUE = ["JobIDRaw", "Submit", "Start", "State", "NNodes", "NCPUS", "TRES", "Timelimit", "NodeList", "Reason", "Name",
          "PlannedStart", "TresPerNode", "ReqMem"]  # fmt: skip
FIELD = st.sampled_from(NASTY) | st.sampled_from(
    ["7", "1796036400", "RUNNING", "PENDING", "gres:gpu:8", "cpu=8,gres/gpu=4", "n[1-4]", "4Gn", "1-00:00:00", "(null)"]
)


def test_sizes_and_counts_that_fit_no_number() -> None:
    for text in ("18446744073709551615", "1e400", "9" * 300, "9" * 300 + "Gn", "9" * 19 + "Pc", "-5"):
        fields = {"JobIDRaw": "7", "Submit": str(EPOCH), "State": "RUNNING"}
        fields |= dict.fromkeys(("NNodes", "NCPUS", "ReqMem", "Timelimit", "TimelimitRaw"), text)
        fields["TRES"] = f"cpu={text},mem={text},node={text},gres/gpu={text},gres/gpu:a={text}"
        frame, _ = jobs_frame(list(fields), [list(fields.values())], "c", NOW)
        jobs_are_right(frame)
        assert frame.select("nodes", "cpus", "gpus", "time_limit_s").row(0) == (None,) * 4, text


@fuzzed
@given(st.lists(st.lists(FIELD, min_size=len(SQUEUE), max_size=len(SQUEUE)), max_size=4))
def test_rows_of_squeue(rows: list[list[str]]) -> None:
    with quick():
        frame, _ = jobs_frame(SQUEUE, rows, "c", NOW)
        jobs_are_right(frame)


JOBCOMP = (
    "JobId=7 UserId=ada(1000) GroupId=ada(1000) Name=train JobState=COMPLETED Partition=gpu TimeLimit=60 "
    "StartTime=2026-11-30T11:01:00 EndTime=2026-11-30T11:30:00 NodeList=n[1-2] NodeCnt=2 ProcCnt=16 WorkDir=/x "
    "ReservationName= Tres=cpu=16,gres/gpu=8 Account=a QOS=normal WcKey= Cluster=c SubmitTime=2026-11-30T11:00:00 "
    "EligibleTime=2026-11-30T11:00:00 DerivedExitCode=0:0 ExitCode=0:0 \n"
)


@fuzzed
@given(damaged(JOBCOMP, JOBCOMP * 3, JOBCOMP.replace("Name=train", "Name=" + "Name=" * 50)))
def test_jobcomp(text: str) -> None:
    with quick():
        jobs_are_right(parse_jobcomp(text, "c", NOW)[0])


SWF = (
    "; UnixStartTime: 1796036400\n"
    "1 0 5 600 8 -1 -1 16 3600 1024 1 7 2 4 1 -1 -1 -1\n2 60 5 600 8 -1 -1 -1 3600 -1 5 7 2 4 1 -1 -1 -1\n"
)


@fuzzed
@given(
    damaged(SWF) | st.lists(st.sampled_from(NASTY) | numbers().map(repr), min_size=18, max_size=20).map(" ".join),
    st.sampled_from([0, EPOCH, 99_999_999_999]),
)
def test_swf(text: str, origin: int) -> None:
    with quick():
        found = parse_swf(enumerate(text.splitlines(), 1), "c", origin, NOW)
        of_registry(found.jobs, "raw_jobs")
        assert not found.jobs["submit_time"].null_count()
        for name in ("cpus", "memory_mib", "time_limit_s"):
            assert (found.jobs[name].drop_nulls() >= 0).all()


# --- Slurm's other texts ----------------------------------------------------------------------------------

NODES = (
    "NodeName=n1 Arch=x86_64 CPUAlloc=0 Gres=gpu:h100:8(S:0-1) State=IDLE+DRAIN CfgTRES=cpu=16,mem=64000M,gres/gpu=8 "
    "Reason=broken fan [root@2026-11-30T11:00:00]\nNodeName=n2 Gres=(null) State=DOWN* CfgTRES=cpu=16\n"
)
TOPOLOGY = (
    "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]\nSwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-4] "
    "Switches=leaf[1-2]\nBlockName=b1 BlockIndex=0 Nodes=n[1-18] BlockSize=18\n"
)
RESERVATIONS = (
    "ReservationName=maint StartTime=2026-11-30T12:00:00 EndTime=2026-11-30T14:00:00 Duration=02:00:00 Nodes=n[1-2] "
    "NodeCnt=2 Users=root Accounts=(null) Flags=MAINT,IGNORE_JOBS State=INACTIVE\n"
)
PARTITIONS = (
    "PartitionName=gpu AllowGroups=ALL MaxNodes=8 MaxTime=7-00:00:00 DefaultTime=NONE Nodes=n[1-4] PriorityTier=1 "
    "State=UP TotalCPUs=64 TRES=cpu=64,mem=250G,node=4,gres/gpu=32\n"
)
QOS = "QOS=normal(1)\n    UsageRaw=0.000000\n    Priority=10\n    GrpTRES=gres/gpu=32(8),cpu=N(0)\n    MaxWallPJ=60\n"
SPRIO = "7|1000|0.5\n8|nan|\n"


@fuzzed
@given(damaged(NODES), damaged(TOPOLOGY))
def test_nodes_and_topology(nodes: str, topology: str) -> None:
    with quick():
        places = parse_topology(topology)
        assert all(len(place) == 2 for place in places.values())
        frame = parse_nodes(nodes, places)
        assert set(frame.columns) <= set(NODES_SCHEMA)
        of_registry(frame.with_columns(observed_at=pl.lit(NOW), cluster=pl.lit("c")), "core_nodes")


@fuzzed
@given(damaged(RESERVATIONS, RESERVATIONS * 2), damaged(PARTITIONS), damaged(QOS, QOS * 2), damaged(SPRIO))
def test_policies(reservations: str, partition: str, limits: str, priorities: str) -> None:
    with quick():
        frame, _ = parse_reservations(reservations, "c", NOW)
        of_registry(frame, "core_reservations")
        for found in (*partitions(partition), *qos(limits)[0], *assoc_mgr(limits)):
            assert found.name is not None
        parse_sprio(priorities)


@fuzzed
@given(
    damaged("n[1-3,07],login", "a[01-10]b[1-2]", "(null)", "n" + "[1-9]" * 5) | st.text("n[]-,0123456789 ", max_size=40)
)
def test_hostlist(text: str) -> None:
    with quick():
        split_hostlist(text)
        try:
            names = expand_hostlist(text)
        except HostlistError:
            return
        assert len(names) <= 1_000_000
        assert all(names)


def test_hostlists_that_would_fill_the_memory() -> None:
    for text in (
        "n[1-1000000000]",
        "n[" + ",".join(["1-900000"] * 99) + "]",
        f"n[{'9' * 5000}-{'9' * 5000}]",
        f"n[{'0' * 4000}1-{'0' * 4000}999999]",
        "p" * 5000 + "[1-900000]",
        "[1-9]" * 60,
        ",".join(["n[1-900000]"] * 60),
        "[" * 5000,
        "n[1-2]" * 3000,
        "x[" + "1," * 99_999,
    ):
        with quick(), contextlib.suppress(HostlistError):
            assert len(expand_hostlist(text)) <= 1_000_000


# --- files ------------------------------------------------------------------------------------------------

INVENTORY = "node,rack,pod,gpu_model,gpus,state,reason\nn[1-2],r1,p1,H100,8,IDLE,\nn3,r2,p1,H100,,,\n"


@fuzzed
@given(damaged(INVENTORY))
def test_inventory(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inventory.csv"
        path.write_bytes(text.encode("utf-8", "replace"))
        with quick():
            try:
                frame = read_inventory(str(path))
            except SourceError:
                return
            assert frame.schema == INVENTORY_SCHEMA
            assert not frame["node"].is_duplicated().any()


TOML = (
    'state_dir = "var"\nlog_level = "INFO"\n[store]\nraw_days = 2\n[ingest]\nwindow_s = 300\n[clusters.prod]\n'
    'telemetry = "prometheus"\nprometheus_url = "http://127.0.0.1:9090"\njobs = "slurm"\ntick_s = 15\n'
)


@fuzzed
@given(damaged(TOML) | st.binary(max_size=60).map(lambda data: data.decode("latin-1")))
def test_settings(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.toml"
        path.write_bytes(text.encode("utf-8", "replace"))
        with quick():
            try:
                found = load_settings(path, {})
            except SettingsError:
                return
            assert isinstance(found.clusters, dict)


# --- the import as a whole --------------------------------------------------------------------------------


class Kept:
    """A target that keeps what it is given."""

    def __init__(self) -> None:
        self.frames: dict[str, list[pl.DataFrame]] = {}

    def write(self, raw_table: str, raw: pl.DataFrame, core_table: str, core: pl.DataFrame) -> None:
        of_registry(raw, raw_table)
        of_registry(core, core_table)
        self.frames.setdefault(core_table, []).append(core)

    def finish(self, report: Report) -> None:
        assert report.text()
        assert all(tally.count >= 0 for tally in (*report.dropped.values(), *report.nulled.values()))

    def keys(self, *names: str) -> set[tuple[Any, ...]]:
        return {row for frames in self.frames.values() for frame in frames for row in frame.select(names).rows()}


def imported(kind: str, data: bytes, name: str = "1796036400") -> Kept:
    """Import some bytes as a file.

    Raises:
        ImportingError: The file is refused as a whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        target = Kept()
        import_files(kind, path, "c", target, Path(folder), now=NOW)
        return target


JOBS_CSV = (
    'job_id,submit_time,start_time,end_time,gpus,state,name\n1,2026-11-30T10:00:00Z,1796036400,,8,RUNNING,"a, b"\n'
    '2,1796036400,,,,PENDING,"x\ny"\n'
)
TELEMETRY_CSV = (
    "ts,node,gpu_uuid,gpu_temp_c,is_power_capped\n1796036400,n1,g0,40,true\n2026-11-30 11:00:15,n1,g0,nan,0\n"
)
SENSORS_CSV = (
    "node,timestamp,sensor,value,unit,status\nn1,1796036400,Inlet Temp,25,degrees C,ok\n"
    "n1,1796036400,Sys Power,800,Watts,ok\n"
)
ANSWER = '{"status":"success","data":{"resultType":"matrix","result":' + MATRIX + "}}"
VECTOR = '{"status":"success","data":{"resultType":"vector","result":[{"metric":{"__name__":"up"},"value":[1,"1"]}]}}'
RIGHT = {
    "sacct": (SACCT,), "swf": (SWF,), "exposition": (PAGE,), "prometheus-json": (ANSWER, VECTOR), "jobs": (JOBS_CSV,),
    "telemetry": (TELEMETRY_CSV, SENSORS_CSV),
}  # fmt: skip


@pytest.mark.parametrize("kind", RIGHT)
def test_import_of_damaged_files(kind: str) -> None:
    @settings(fuzzed, max_examples=25)
    @given(damaged(*RIGHT[kind]), st.sampled_from(["plain", "gzip", "cut"]))
    def check(text: str, form: str) -> None:
        data = text.encode("utf-8", "replace")
        if form != "plain":
            data = gzip.compress(data)
        with quick(), contextlib.suppress(ImportingError):
            imported(kind, data[: len(data) // 2] if form == "cut" else data)

    check()


@pytest.mark.parametrize("kind", ["jobs", "telemetry"])
def test_import_of_tables_of_odd_types(kind: str) -> None:
    values = st.one_of(
        st.lists(numbers(), min_size=3, max_size=3),
        st.lists(st.sampled_from(NASTY), min_size=3, max_size=3),
        st.lists(st.booleans() | st.none(), min_size=3, max_size=3),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
        st.lists(st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)), min_size=3, max_size=3),  # noqa: DTZ001
        st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=3, max_size=3),
        st.lists(st.dates(), min_size=3, max_size=3),
    )
    names = ("job_id", "submit_time", "start_time", "gpus", "state", "name") if kind == "jobs" else (
        "ts", "node", "gpu_uuid", "gpu_temp_c", "xid_last", "is_power_capped", "inlet_temp_c"
    )  # fmt: skip

    @settings(fuzzed, max_examples=40)
    @given(st.fixed_dictionaries(dict.fromkeys(names, values)))
    def check(columns: dict[str, list[Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.parquet"
            pl.DataFrame(columns, strict=False).write_parquet(path)
            with quick():
                import_files(kind, path, "c", Kept(), Path(folder), now=NOW)

    check()


# Lines that are surely bad for a kind, and do not end what stands before them.
BAD: dict[str, st.SearchStrategy[str]] = {
    "sacct": st.sampled_from(["x|y", "||", "1|2|3|\x00", "|" * 10, "é|" * 5]),
    "swf": st.sampled_from(["x", "1 2 3", "x " * 18, "1e999 " * 18, "nan " * 18, "\x00" * 50]),
    "exposition": st.sampled_from(
        ["DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP{", '{a="b"} 1', "1abc 2", 'DCGM_FI_DEV_FB_USED{UUID="x} 3', "}{"]
    ),
    "jobs": st.sampled_from(
        ["x", '"', 'a,b,"', '","', 'a,"b\x00', ",,,,,,,,,,", '1,2,3,4,5,6,"never closed', '""",', "\x00"]
    ),
    "telemetry": st.sampled_from(["x", '"', 'a,b,c,"', ",,,,", "never,n1,g0,4,0", '1,n1,g0,4,"', "\x00,,,,"]),
}  # fmt: skip
GOOD: dict[str, tuple[str, Callable[[int], str], tuple[str, ...]]] = {
    "sacct": (SACCT.split("\n")[0], lambda i: SACCT.split("\n")[1].replace("7|7|", f"{i}|{i}|", 1), ("job_id",)),
    "swf": ("; UnixStartTime: 1796036400", lambda i: f"{i}{SWF.splitlines()[1][1:]}", ("job_id",)),
    "exposition": (
        "# TYPE DCGM_FI_DEV_GPU_TEMP gauge",
        lambda i: f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-{i}",Hostname="n1"}} 40',
        ("gpu_uuid", "gpu_temp_c"),
    ),
    "jobs": (JOBS_CSV.split("\n")[0], lambda i: f"{i},1796036400,1796036400,,8,RUNNING,n", ("job_id",)),
    "telemetry": (TELEMETRY_CSV.split("\n")[0], lambda i: f"{EPOCH + i},n1,g0,40,true", ("ts", "gpu_temp_c")),
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_bad_line_costs_no_good_one(kind: str) -> None:
    header, line, names = GOOD[kind]
    good = [line(i) for i in range(1, 9)]
    expected = imported(kind, "\n".join([header, *good, ""]).encode()).keys(*names)
    assert len(expected) == 8

    @settings(fuzzed, max_examples=25)
    @given(st.lists(st.tuples(st.integers(0, 8), BAD[kind]), min_size=1, max_size=5))
    def check(bad: list[tuple[int, str]]) -> None:
        lines = list(good)
        for at, text in sorted(bad, key=lambda item: -item[0]):
            lines.insert(at, text)
        found = imported(kind, "\n".join([header, *lines, ""]).encode())
        assert found.keys(*names) >= expected, lines

    check()


# --- memory -----------------------------------------------------------------------------------------------

_CHILD = """
import re, sys
from datetime import UTC, datetime
from pathlib import Path
from pipelines.importing import import_files
from pipelines.imports.targets import ParquetTarget
kind, path, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
target = ParquetTarget(out)
report = import_files(kind, path, "c", target, out.parent, now=datetime(2026, 11, 30, 12, tzinfo=UTC))
target.close()
status = Path("/proc/self/status").read_text()  # the kernel's other figure is inherited from the parent
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024
print(report.rows, peak, sum(tally.count for tally in report.dropped.values()))
"""


@pytest.mark.parametrize("kind", ["sacct", "exposition", "prometheus-json"])  # the others read lines as sacct does
def test_a_line_of_a_gigabyte(kind: str, tmp_path: Path) -> None:
    header, line, _ = GOOD.get(kind, ("", lambda _: "", ()))
    path = tmp_path / "1796036400.txt"
    with path.open("wb") as file:
        file.write(f"{header}\n{line(1)}\n".encode())
        file.seek(1 << 30, 1)  # a hole: it takes no room on the disk
        file.write(f"\n{line(2)}\n".encode())
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, kind, str(path), str(tmp_path / "out.parquet")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows, peak_mib, dropped = map(int, done.stdout.split())
    assert (rows, dropped) == ((0, 1) if kind == "prometheus-json" else (2, 1))
    assert peak_mib < 500, f"{peak_mib} MiB"

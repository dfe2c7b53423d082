"""Whatever servers and Slurm's commands answer: a result in the registry's form or the source's own error, quickly.

Answers of slurmrestd in both spellings, of a Prometheus, of kube-state-metrics through it, and the texts of sprio,
scontrol, squeue and slurmctld's log. Right answers with a few things wrong in them, over a real connection where there
is one. Files and exporters: `test_fuzz.py`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from features.vocabulary import schema
from pipelines.sources import SourceError, promql_session, slurmrestd
from pipelines.sources.inventory import NODES_SCHEMA
from pipelines.sources.job_states import job_priorities
from pipelines.sources.kubernetes import KubernetesSource
from pipelines.sources.kubernetes_queues import queue_samples
from pipelines.sources.places import topology_places
from pipelines.sources.promql import PromQL
from pipelines.sources.slurm_gpus import HELD_SCHEMA, parse_held
from pipelines.sources.slurm_limits import assoc_mgr, fields_of, partitions, qos
from pipelines.sources.slurm_log import parse_preemptions, with_preemptors
from pipelines.sources.slurm_policy import PRIORITY_SCHEMA, parse_sprio, read_policy
from pipelines.sources.slurm_reader import CommandReader
from pipelines.sources.slurmrestd import RestReader
from scheduler_hints.slurm_commands import SlurmCommands, SlurmError
from tests.services import Pages
from tests.test_cases_slurm import FLAT, NESTED
from tests.test_fuzz import EPOCH, NASTY, NOW, damaged, fuzzed, jobs_are_right, of_registry, quick

START = NOW - timedelta(hours=1)
# What is found here is read as it is: making it smaller would take as long as everything else.
fuzzed = settings(fuzzed, phases=(Phase.explicit, Phase.generate))
# What JSON may hold where something else is meant.
ODD = (
    None, True, False, 0, -1, 2**31, 2**63, 2**64, -(2**70), 1e308, -0.5, "", " ", "x", "\x00", "é", "null", [], {},
    [[]], [None], {"": None}, {"set": True}, {"set": True, "number": None}, {"infinite": True, "number": -1},
    {"set": True, "number": 1e300}, {"number": {"number": {"number": 7}}}, ["PENDING", "RUNNING"], [{"name": "x"}],
    "9" * 400,
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Pages]:
    with Pages() as pages:
        yield pages


@st.composite
def spoiled(draw: st.DrawFn, *right: Any) -> Any:
    """A right document in which up to four members are something else, gone, or there twice."""
    document = copy.deepcopy(draw(st.sampled_from(right)))
    for _ in range(draw(st.integers(0, 4))):
        at = document
        while isinstance(at, (dict, list)) and at:
            key = draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
            if isinstance(at[key], (dict, list)) and at[key] and draw(st.integers(0, 3)):
                at = at[key]
                continue
            change = draw(st.sampled_from(["odd", "nasty", "gone", "twice"]))
            if change == "gone":
                del at[key]
            elif change == "twice" and isinstance(at, list):
                at.append(copy.deepcopy(at[key]))
            else:
                at[key] = copy.deepcopy(draw(st.sampled_from(ODD if change == "odd" else NASTY)))
            break
    return document


@st.composite
def bodies(draw: st.DrawFn, *right: Any) -> bytes:
    """Such a document as it is sent, perhaps damaged or cut off; at times no JSON at all."""
    text = json.dumps(draw(spoiled(*right)))
    form = draw(st.sampled_from(["whole", "whole", "whole", "damaged", "cut", "other"]))
    if form == "damaged":
        text = draw(damaged(text))
    if form == "other":
        return draw(st.binary(max_size=50) | st.sampled_from([b"", b"<html>", b"[" * 2000, b"{", b"\xff\xfe{}"]))
    data = text.encode("utf-8", "replace")
    return data[: draw(st.integers(0, len(data)))] if form == "cut" else data


# --- slurmrestd -------------------------------------------------------------------------------------------

ACCOUNTED_FLAT = {"jobs": [{
    "job_id": 8, "array": {"job_id": 4, "task": None, "task_id": 1}, "het": {"job_id": None, "job_offset": None},
    "user": "u", "account": "a", "partition": "batch", "nodes": "n[1-2]", "name": "x", "allocation_nodes": 2,
    "time": {"submission": EPOCH, "eligible": EPOCH, "start": EPOCH, "end": EPOCH + 60, "limit": 5, "elapsed": 60},
    "state": {"current": "FAILED", "reason": "NonZeroExitCode"}, "required": {"CPUs": 16, "memory": 1000},
    "exit_code": {"status": "ERROR", "return_code": 3, "signal": {"signal_id": 9, "name": "KILL"}},
    "tres": {"requested": [{"type": "cpu", "name": None, "count": 16}, {"type": "gres", "name": "gpu", "count": 8}],
             "allocated": [{"type": "mem", "name": None, "count": 4000}]},
}]}  # fmt: skip


def _flagged(value: Any) -> Any:
    """The spelling of newer schemas: numbers with flags, states as lists."""
    if isinstance(value, dict):
        return {k: [v] if k in ("current", "status") else _flagged(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_flagged(one) for one in value]
    return {"set": True, "infinite": False, "number": value} if isinstance(value, int) else value


DOCUMENT = {
    "paths": {
        f"/{part}/v0.0.{version}/{what}": {"get": {"parameters": [{"name": "skip_steps", "in": "query"}]}}
        for version in (38, 41)
        for part, what in (("slurm", "jobs"), ("slurm", "nodes"), ("slurmdb", "jobs"))
    }
}
ALIVE = {"errors": [], "warnings": [{"description": "old", "source": "x"}]}
QUEUES = [{"jobs": found["jobs"], **ALIVE} for found in (FLAT, NESTED)]
NODES = [{"nodes": found["nodes"], **ALIVE} for found in (FLAT, NESTED)]
HISTORIES = [found | ALIVE for found in (ACCOUNTED_FLAT, {"jobs": _flagged(ACCOUNTED_FLAT["jobs"])})]


class Told(RestReader):
    """A reader that is told answers by path, without the connection."""

    def __init__(self, pages: dict[str, Any]) -> None:
        super().__init__("a", "http://127.0.0.1:1", user="u")
        self._pages = pages

    def _send(self, path: str, query: dict[str, str] | None) -> bytes:
        del query
        return self._pages[path]


def serve(server: Pages, document: bytes, queue: bytes, nodes: bytes, history: bytes) -> None:
    server.pages["/openapi/v3"] = document
    for version in ("v0.0.38", "v0.0.41"):
        server.pages[f"/slurm/{version}/jobs"] = queue
        server.pages[f"/slurm/{version}/nodes"] = nodes
        server.pages[f"/slurmdb/{version}/jobs"] = history


@settings(fuzzed, max_examples=60)
@given(bodies(*QUEUES), bodies(*NODES), bodies(*HISTORIES))
def test_answers_of_slurmrestd(server: Pages, queue: bytes, nodes: bytes, history: bytes) -> None:
    serve(server, json.dumps(DOCUMENT).encode(), queue, nodes, history)
    reader = Told(server.pages)
    with quick():
        with contextlib.suppress(SourceError):
            jobs = reader.queue()
            jobs_are_right(jobs.drop("priority"))
            assert jobs["priority"].dtype == pl.Float64
        with contextlib.suppress(SourceError):
            found = reader.nodes()
            assert found.schema == NODES_SCHEMA
            of_registry(found.with_columns(observed_at=pl.lit(NOW), cluster=pl.lit("c")), "core_nodes")
        with contextlib.suppress(SourceError):
            jobs_are_right(reader.history(START, NOW))
    assert all(isinstance(warning, str) for warning in reader.warnings)


@settings(fuzzed, max_examples=25)
@given(bodies(DOCUMENT))
def test_documents_of_slurmrestd(server: Pages, document: bytes) -> None:
    serve(server, document, *(json.dumps(right[0]).encode() for right in (QUEUES, NODES, HISTORIES)))
    with quick(), contextlib.suppress(SourceError):
        assert Told(server.pages).version() in ((0, 0, 38), (0, 0, 41))
        assert len(Told(server.pages).queue()) == 2


def test_right_answers_of_slurmrestd_are_read(server: Pages) -> None:
    for queue, nodes, history in zip(QUEUES, NODES, HISTORIES, strict=True):
        serve(server, *(json.dumps(right).encode() for right in (DOCUMENT, queue, nodes, history)))
        reader = RestReader("a", server.url, user="u", timeout_s=20)
        assert (len(reader.queue()), len(reader.nodes()), len(reader.history(START, NOW))) == (2, 1, 1)
        row = reader.history(START, NOW).row(0, named=True)
        told = ("state", "exit_code", "gpus", "cpus", "array_job_id", "time_limit_s", "node_list")
        assert [row[name] for name in told] == ["FAILED", "3:9", 8, 16, "4", 300, "n1,n2"]


# --- Prometheus -------------------------------------------------------------------------------------------

SERIES = [
    {"metric": {"__name__": "up", "instance": "n1"}, "values": [[EPOCH, "1"], [EPOCH + 15.5, "NaN"]]},
    {"metric": {}, "values": [[EPOCH, "+Inf"]], "histograms": [[EPOCH, {"count": "1"}]]},
]
MATRIX = {
    "status": "success", "data": {"resultType": "matrix", "result": SERIES}, "warnings": ["w"], "infos": ["i"],
}  # fmt: skip
VECTOR = {
    "status": "success",
    "data": {"resultType": "vector", "result": [{"metric": {"a": "b"}, "value": [EPOCH, "1"]}]},
}
SCALAR = {"status": "success", "data": {"resultType": "scalar", "result": [EPOCH, "1"]}}
REFUSAL = {"status": "error", "errorType": "execution", "error": "too many samples"}
STATUS = st.sampled_from([200, 200, 200, 200, 301, 400, 401, 404, 413, 422, 500])


@settings(fuzzed, max_examples=40)
@given(bodies(MATRIX, VECTOR, SCALAR, REFUSAL), STATUS, st.sampled_from([0] * 9 + [1]))
def test_answers_of_prometheus(server: Pages, body: bytes, status: int, cut: int) -> None:
    server.pages["/api/v1/query"] = (status, "application/json", body)
    server.cut = min(cut, len(body))
    api = PromQL("a", server.url, 0.4)  # no second attempt
    try:
        with quick():
            with contextlib.suppress(SourceError):
                found = api.matrix("up[1m]")
                assert len(found.labels) == len(found.counts)
                assert found.counts.sum() == len(found.ts_ms) == len(found.values)
            with contextlib.suppress(SourceError):
                for labels, value in api.vector("up"):
                    assert all(isinstance(text, str) for text in (*labels, *labels.values()))
                    assert isinstance(value, float)
            with contextlib.suppress(SourceError):
                assert isinstance(api.scalar("scalar(1)"), float)
            assert all(isinstance(note, str) for note in api.take_warnings())
    finally:
        server.cut = 0
        api.close()


class Endless:
    """A server that begins a right answer and never ends it; counts what was taken from it."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self.sent = 0
        self._head, self._piece = head, piece
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                with client, contextlib.suppress(OSError):
                    client.recv(65_536)
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
                    client.sendall(self._head)
                    while True:
                        client.sendall(self._piece)
                        self.sent += len(self._piece)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


def test_answers_without_an_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 4 * 2**20
    monkeypatch.setattr(promql_session, "_MAX_ANSWER_BYTES", most)
    monkeypatch.setattr(slurmrestd, "_MAX_ANSWER_BYTES", most)
    series = json.dumps(SERIES[0]).encode() + b","
    prometheus = Endless(b'{"status":"success","data":{"resultType":"matrix","result":[', series * 1000)
    rest = Endless(b'{"jobs":[', b"{}," * 20_000)
    api = PromQL("a", prometheus.url, 30)
    try:
        with pytest.raises(SourceError, match="more than 4 MiB"):
            api.matrix("up[1m]")
        with pytest.raises(SourceError, match="more than 4 MiB"):
            RestReader("a", rest.url, user="u").queue()
        assert max(prometheus.sent, rest.sent) < most + 32 * 2**20, "what the kernel keeps comes on top"
    finally:
        api.close()
        prometheus.close()
        rest.close()


# --- kube-state-metrics -----------------------------------------------------------------------------------


def _series(metric: str, value: str, **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": metric, **labels}, "values": [[EPOCH, value], [EPOCH + 1, value]]}


def _answer(*series: dict[str, Any]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "matrix", "result": list(series)}}


_POD = {"namespace": "ml", "pod": "a-0", "uid": "u1", "node": "n1"}
KSM = _answer(
    _series("kube_pod_info", "1", **_POD, created_by_kind="Job", created_by_name="a", host_ip="1.2.3.4"),
    _series("kube_pod_created", str(EPOCH - 600), **_POD),
    _series("kube_pod_start_time", str(EPOCH - 500), **_POD),
    _series("kube_pod_completion_time", str(EPOCH - 5), **_POD),
    _series("kube_pod_container_resource_requests", "8", **_POD, resource="nvidia_com_gpu", container="c"),
    _series("kube_pod_container_resource_requests", "1e12", **_POD, resource="memory", container="c", unit="byte"),
    _series("kube_pod_status_reason", "1", **_POD, reason="Evicted"),
    _series("kube_pod_container_status_last_terminated_exitcode", "137", **_POD, container="c"),
    _series("kube_job_created", str(EPOCH - 600), namespace="ml", job_name="a"),
    _series("kube_job_status_completion_time", str(EPOCH - 5), namespace="ml", job_name="a"),
    _series("kube_job_spec_completions", "2", namespace="ml", job_name="a"),
    _series("kube_node_info", "1", node="n1", provider_id="x"),
    _series("kube_node_status_allocatable", "8", node="n1", resource="nvidia_com_gpu", unit="integer"),
    _series("kube_node_status_condition", "1", node="n1", condition="Ready", status="false"),
    _series("kube_node_spec_unschedulable", "1", node="n1"),
    _series("volcano_queue_share", "0.5", queue_name="q"),
    _series("kueue_pending_workloads", "4", cluster_queue="cq", status="active"),
    _series("DCGM_FI_DEV_GPU_UTIL", "1", **_POD, UUID="GPU-1", gpu="0", Hostname="n1"),
)  # fmt: skip
SEEN = _answer(
    {"metric": {**_POD, "phase": "Running"}, "values": [[EPOCH, str(EPOCH - 60)], [EPOCH, str(EPOCH)]]},
    {"metric": {**_POD, "phase": "Pending"}, "values": [[EPOCH, str(EPOCH - 600)], [EPOCH, str(EPOCH - 70)]]},
)


@settings(fuzzed, max_examples=60)
@given(bodies(KSM), bodies(SEEN))
def test_series_of_kubernetes(server: Pages, facts: bytes, phases: bytes) -> None:
    def page() -> bytes:
        return phases if b"timestamp" in server.requests[-1][2] else facts

    server.pages["/api/v1/query"] = page
    source = KubernetesSource("c", server.url, timeout_s=0.4)
    at = datetime.fromtimestamp(EPOCH, UTC)
    try:
        with quick():
            with contextlib.suppress(SourceError):
                jobs = source.fetch_jobs(at - timedelta(hours=1), at)
                of_registry(jobs, "raw_jobs")
                assert not jobs["submit_time"].null_count()
            with contextlib.suppress(SourceError):
                live = source.live()
                of_registry(live.jobs, "raw_jobs")
                of_registry(live.nodes, "core_nodes")
                of_registry(live.states, "core_job_states")
            with contextlib.suppress(SourceError):
                of_registry(queue_samples(source.api, "c", at - timedelta(minutes=5), at), "core_queue_samples")
    finally:
        source.close()


# --- texts of Slurm ---------------------------------------------------------------------------------------

SPRIO = (
    "4|2271|100|0|1000|266|100|0|0|-300|cpu=6,gres/gpu=500\n5_[1-3]|1871|0|0|1000|266|100|0|0|0|\n",
    "          JOBID PARTITION     USER   PRIORITY       SITE        AGE      ASSOC  FAIRSHARE    JOBSIZE  PARTITION "
    "       QOS        NICE                 TRES\n              2 batch         root       1871          0          0 "
    "         0       1000        266        100          0           0   cpu=6,gres/gpu=500\n",
)
HELD = (
    "JobId=7 JobName=train a=b\n   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A\n   JobState=RUNNING Reason=None "
    "Dependency=(null)\n   StartTime=1796036400 EndTime=1796040000 Deadline=N/A\n   NodeList=n[1-2]\n"
    "     Nodes=n[1-2] CPU_IDs=0-7 Mem=1000 GRES=gpu:h100:8(IDX:0-3,5,7)\n   MinCPUsNode=1\n\n"
)
ASSOCIATIONS = (
    "Current Association Manager state\n\nAssociation Records\n\nClusterName=alpha Account=lab UserName=ada(1000) "
    "Partition= Priority=0 ID=4\n    SharesRaw/Norm/Level/Factor=1/0.50/2/0.80\n    GrpTRES=gres/gpu=12(3)\n"
    "    MaxJobs=3(1) MaxTRESPJ=cpu=4 MaxWallPJ=60\n\nQOS Records\n\nQOS=high(2)\n    GrpTRES=gres/gpu=16(0)\n"
)
TOPOLOGY = (
    "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]\nSwitchName=spine Level=1 Nodes=n[1-4] Switches=leaf[1-2]\n"
    "BlockName=b1 BlockIndex=0 Nodes=n[1-18] BlockSize=18\n"
)
LOG = (
    "[2026-11-30T11:00:00.000] preempted JobId=7 has been requeued to reclaim resources for JobId=9\n"
    "[2026-11-30T11:00:01.000] preempted JobId=8_1(10) has been killed to reclaim resources for JobId=12+0(12)\n"
)


@fuzzed
@given(damaged(*SPRIO), damaged(HELD, HELD * 2), damaged(LOG))
def test_texts_of_sprio_scontrol_and_log(priorities: str, jobs: str, log: str) -> None:
    with quick():
        told = parse_sprio(priorities)
        assert told.schema == PRIORITY_SCHEMA
        kept = job_priorities(told, "c", NOW)
        of_registry(kept, "core_job_priorities")
        assert kept["job_id"].is_unique().all()
        for name in (name for name in schema("core_job_priorities") if name.startswith("priority")):
            assert all(math.isfinite(value) for value in kept[name].drop_nulls()), name
        held, _ = parse_held(jobs, "c")
        assert held.schema == HELD_SCHEMA
        assert held.rows() is not None
        found = parse_preemptions(log)
        assert found.rows() is not None
        jobs_are_right(with_preemptors(pl.DataFrame(schema=schema("raw_jobs")), found))


@fuzzed
@given(damaged(ASSOCIATIONS, ASSOCIATIONS * 2), damaged(TOPOLOGY))
def test_texts_of_limits_and_places(limits: str, topology: str) -> None:
    with quick():
        for found in (*assoc_mgr(limits), *qos(limits)[0], *partitions(limits)):
            assert found.value is None or math.isfinite(found.value)
        assert fields_of(limits) is not None
        places = topology_places(topology)
        assert places["node"].is_unique().all()
        assert not places["node"].null_count()


class Says:
    """Commands that answer what a test says."""

    def __init__(self, text: Callable[[str, tuple[str, ...]], str]) -> None:
        self.warnings: list[str] = []
        self._text = text

    def run(self, program: str, *arguments: str) -> str:
        return self._text(program, arguments)

    def ask(self, program: str, *arguments: str) -> tuple[str, datetime]:
        return self._text(program, arguments), NOW

    def version(self) -> tuple[int, int]:
        return (22, 5)

    def has_field(self, name: str) -> bool:
        return False


_QUEUED = [
    "7", "7", "ada", "lab", "gpu", str(EPOCH), str(EPOCH), str(EPOCH), "N/A", "RUNNING", "0", "0", "42", "2", "16",
    "cpu=16,mem=64G,gres/gpu=8", "gres:gpu:4", "N/A", "(null)", "1-00:00:00", "n[1-2]", "None", "name with\nlines",
]  # fmt: skip
SQUEUE = "\x1f".join(_QUEUED) + "\x1e\n"


@fuzzed
@given(damaged(SQUEUE, SQUEUE + SQUEUE.replace("7", "8")), damaged(HELD), damaged(TOPOLOGY))
def test_texts_of_squeue(queue: str, nodes: str, topology: str) -> None:
    texts = {"squeue": queue, "node": nodes, "topology": topology}
    reader = CommandReader("c", Says(lambda program, given: texts.get(program) or texts[given[-1]]))  # ty: ignore[invalid-argument-type]
    with quick(), contextlib.suppress(SourceError):
        assert set(reader.nodes().columns) == {*NODES_SCHEMA, "nvlink_domain"}
        jobs = reader.queue()
        jobs_are_right(jobs.drop("priority"))


def test_a_right_answer_of_squeue_is_read() -> None:
    (row,) = CommandReader("c", Says(lambda *_: SQUEUE)).queue().to_dicts()  # ty: ignore[invalid-argument-type]
    told = ("job_id", "state", "gpus", "nodes", "time_limit_s", "node_list", "name", "priority")
    assert [row[name] for name in told] == ["7", "RUNNING", 8, 2, 86_400, "n1,n2", "name with\nlines", 42.0]


@fuzzed
@given(st.lists(damaged(*SPRIO, ASSOCIATIONS, TOPOLOGY, HELD), min_size=6, max_size=6))
def test_policy_from_any_texts(texts: list[str]) -> None:
    left = iter(texts)
    with quick():
        policy = read_policy(Says(lambda *_: next(left)), "c", NOW)
        of_registry(policy.policies, "core_policies")
        of_registry(policy.reservations, "core_reservations")


RESERVED = (
    "ReservationName=wg_p1 StartTime=2026-11-30T12:00:00 EndTime=2026-11-30T14:00:00 Duration=02:00:00 Nodes=n1,n2 "
    "NodeCnt=2 Flags=FLEX,MAGNETIC,NO_HOLD_JOBS_AFTER_END,PURGE_COMP=00:01:00 Users=ada Accounts=(null)\n"
)


@fuzzed
@given(damaged(RESERVED), damaged("n1|idle\nn2|mixed*\n"), damaged("7|ada|lab|PENDING|(null)|n1|(null)\n"))
def test_texts_for_the_agent(reservations: str, nodes: str, job: str) -> None:
    texts = {"scontrol": reservations, "sinfo": nodes, "squeue": job}
    commands = SlurmCommands()
    commands._run = lambda program, *given, **_: given[-1] if "hostnames" in given else texts[program]  # ty: ignore[invalid-assignment]
    with quick():
        with contextlib.suppress(SlurmError):
            for found in commands.reservations():
                assert found.start.tzinfo is not None
                assert found.is_lease in (True, False)
        assert all(commands.node_states().values()) or "|" in nodes
        with contextlib.suppress(SlurmError):
            one = commands.job("7")
            assert one is None or isinstance(one.state, str)

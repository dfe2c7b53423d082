"""Jobs, nodes, GPUs and queues of Kubernetes, through a real Prometheus that scraped or recorded kube-state-metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.vocabulary import JOB_COLUMNS, JOB_EXTRAS, conform, schema
from pipelines import steps
from pipelines.job_history import ingest_jobs
from pipelines.scheduler import ingest_scheduler
from pipelines.settings import Cluster, load_settings
from pipelines.sources import SourceError, build_jobs
from pipelines.sources.kubernetes import KubernetesSource
from pipelines.sources.kubernetes_jobs import Memory, jobs_of
from pipelines.sources.kubernetes_nodes import nodes_of
from pipelines.sources.kubernetes_pods import pods_of
from pipelines.sources.kubernetes_queues import queue_samples
from pipelines.sources.kubernetes_series import JOB_METRICS, NODE_METRICS, POD_METRICS, Facts
from pipelines.sources.promql import PromQL
from pipelines.store import Store
from tests import ksm_pages as ksm
from tests.services import Pages, Prometheus, scrape_config, wait_until

pytestmark = pytest.mark.services("prometheus", "promtool")
# Blocks of a recorded past end on even hours; all of this lies in one of them.
T0 = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=6)


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


def rows(jobs: pl.DataFrame) -> dict[str, dict[str, object]]:
    assert jobs["job_id"].is_unique().all()
    return {row["job_id"]: row for row in jobs.iter_rows(named=True)}


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """An hour of a cluster: jobs that finish, fail, are evicted, wait, and are made again under the same name."""
    gang = {
        "label_training_kubeflow_org_job_name": "llm",
        "label_kueue_x_k8s_io_queue_name": "gpus",
        "label_user": "ada",
    }
    workers = [
        ksm.pod(f"llm-worker-{i}", f"w{i}", node=f"n{i}", owner=("PyTorchJob", "llm"), created=at(1), start=at(2),
                labels=gang)
        for i in range(2)
    ]  # fmt: skip
    launcher = ksm.pod("llm-master-0", "w9", node="n5", owner=("PyTorchJob", "llm"), requests={"cpu": 1},
                       created=at(1), start=at(2), labels=gang)  # fmt: skip
    done = {"created": at(5), "start": at(6)}
    oom = {"created": at(5), "start": at(6), "owner": ("Job", "oom")}
    spans = [
        *((at(2), at(40), worker) for worker in workers),  # deleted at 40: cancelled
        (at(2), at(40), launcher),
        # A Job that completes, in a second try: the first pod failed.
        (at(5), at(60), ksm.pod("fine-a", "f1", owner=("Job", "fine"), phase="Failed", node="n3", **done,
                                last=("Error", 1, at(9)), terminated="Error")),
        (at(10), at(20), ksm.pod("fine-b", "f2", owner=("Job", "fine"), node="n3", created=at(10), start=at(11))),
        (at(20), at(60), ksm.pod("fine-b", "f2", owner=("Job", "fine"), node="n3", phase="Succeeded", created=at(10),
                                 start=at(11), completed=at(20))),
        (at(5), at(20), ksm.job("fine", created=at(5), deadline_s=7200)),
        (at(20), at(60), ksm.job("fine", created=at(5), complete=True, completed=at(20), deadline_s=7200)),
        # Out of memory, evicted, lost, over its deadline: each its own state. No completion time of failed Jobs.
        (at(6), at(12), ksm.pod("oom-a", "o1", **oom)),
        (at(12), at(60), ksm.pod("oom-a", "o1", phase="Failed", terminated="OOMKilled",
                                 last=("OOMKilled", 137, at(12)), **oom)),
        (at(5), at(13), ksm.job("oom", created=at(5))),
        (at(13), at(60), ksm.job("oom", created=at(5), failed=True, reason="BackoffLimitExceeded")),
        (at(6), at(15), ksm.pod("alone", "p1", created=at(5), start=at(6), requests={"amd_com_gpu": 4})),
        (at(15), at(60), ksm.pod("alone", "p1", created=at(5), start=at(6), requests={"amd_com_gpu": 4}, phase="Failed",
                                 reason="Evicted")),
        (at(6), at(30), ksm.pod("slow-a", "d1", owner=("Job", "slow"), **done)),
        (at(5), at(30), ksm.job("slow", created=at(5))),
        (at(30), at(60), ksm.job("slow", created=at(5), failed=True, reason="DeadlineExceeded")),
        # Killed from outside: exit 137 without OOM.
        (at(6), at(22), ksm.pod("killed", "k1", **done)),
        (at(22), at(60), ksm.pod("killed", "k1", phase="Failed", last=("Error", 137, at(22)), **done)),
    ]  # fmt: skip
    # It waits without a node, then for an image; a CPU pod is no job of a GPU cluster.
    spans += [
        (at(30), at(60), ksm.pod("wait", "q1", node="", phase="Pending", created=at(30), unschedulable=True,
                                 priority="high", requests={"nvidia_com_gpu": 2, "nvidia_com_mig_1g_10gb": 7})),
        (at(30), at(60), ksm.pod("pull", "q2", node="n4", phase="Pending", created=at(30), waiting="ImagePullBackOff")),
        (at(0), at(60), ksm.pod("coredns", "c1", requests={"cpu": 1}, created=at(0), start=at(0))),
    ]  # fmt: skip
    server = Prometheus(
        tmp_path_factory.mktemp("ksm"), history=ksm.history(*spans, instance="10.0.0.9:8080", job="ksm")
    )
    yield server
    server.stop()


@pytest.fixture
def source(past: Prometheus) -> Iterator[KubernetesSource]:
    opened = KubernetesSource("kube", past.url)
    yield opened
    opened.close()


def test_jobs_of_a_recorded_hour(source: KubernetesSource) -> None:
    jobs = source.fetch_jobs(at(0), at(55))
    assert jobs.columns == [*JOB_COLUMNS, *JOB_EXTRAS]
    assert conform(jobs, "raw_jobs").equals(jobs)
    found = rows(jobs)
    assert found.keys() == {"ml/llm", "ml/fine", "ml/oom", "p1", "ml/slow", "k1", "q1", "q2"}
    llm = found["ml/llm"]
    told = {
        "user": "ada", "account": "ml", "queue": "gpus", "name": "ml/llm", "nodes": 3, "cpus": 33, "gpus": 16,
        "memory_mib": 2 * 65_536,
    }  # fmt: skip
    assert llm | told == llm
    assert (llm["state"], llm["submit_time"], llm["start_time"]) == ("CANCELLED", at(1), at(2))
    assert abs(llm["end_time"] - at(40)) <= timedelta(minutes=1)
    assert llm["node_list"] == "n0,n1,n5"
    fine = found["ml/fine"]
    assert (fine["state"], fine["gpus"], fine["start_time"], fine["end_time"], fine["time_limit_s"]) == (
        "COMPLETED", 8, at(6), at(20), 7200,
    )  # fmt: skip
    oom = found["ml/oom"]
    assert (oom["state"], oom["exit_code"], oom["end_time"], oom["reason"]) == (
        "OUT_OF_MEMORY",
        "0:9",
        at(12),
        "OOMKilled",
    )
    alone = found["p1"]
    assert (alone["state"], alone["reason"], alone["gpus"], alone["name"]) == ("PREEMPTED", "Evicted", 4, "ml/alone")
    assert abs(alone["end_time"] - at(15)) <= timedelta(minutes=1)
    assert found["ml/slow"]["state"] == "TIMEOUT"
    assert (found["k1"]["state"], found["k1"]["exit_code"]) == ("FAILED", "0:9")
    wait = found["q1"]
    assert (wait["state"], wait["reason"], wait["gpus"], wait["start_time"], wait["node_list"], wait["queue"]) == (
        "PENDING", "Unschedulable", 3, None, None, "high",
    )  # fmt: skip
    assert (found["q2"]["state"], found["q2"]["reason"]) == ("PENDING", "ImagePullBackOff")


def test_a_job_is_given_as_it_was_at_the_end_of_the_window(source: KubernetesSource) -> None:
    early = rows(source.fetch_jobs(at(0), at(10)))
    assert early["ml/llm"]["state"] == "RUNNING"
    assert early["ml/llm"]["end_time"] is None
    assert early["ml/fine"]["state"] == "PENDING", "the first pod failed, the Job tries again"
    assert early["ml/fine"]["reason"] == "BackOff"
    later = rows(source.fetch_jobs(at(10), at(19)))
    assert (later["ml/fine"]["state"], later["ml/fine"]["restarts"]) == ("RUNNING", 1)
    assert later["ml/llm"]["submit_time"] == early["ml/llm"]["submit_time"]
    assert source.fetch_jobs(at(-60), at(-30)).is_empty()


def test_into_the_store(source: KubernetesSource, tmp_path: Path) -> None:
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        report = ingest_jobs(store, source, "kube", at(50), since=at(0))
        assert report.error is None
        known = store.query("SELECT job_id, state FROM core_jobs ORDER BY job_id")
        assert dict(known.rows())["ml/fine"] == "COMPLETED"
        assert known.height == 8


def test_an_ingest_builds_its_source_once_and_closes_it(
    past: Prometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both steps ask the same source, and its connections are closed, not left to the garbage collector."""
    opened: list[KubernetesSource] = []
    shut: list[str] = []

    def build(*about: Any) -> Any:
        built = build_jobs(*about)
        monkeypatch.setattr(built, "close", lambda close=built.close: (shut.append(built.name), close()))
        opened.append(built)
        return built

    monkeypatch.setattr(steps, "build_jobs", build)
    text = f"""
[clusters.kube]
telemetry = "prometheus"
jobs = "kubernetes"
prometheus_url = "{past.url}"
"""
    path = tmp_path / "weatherglass.toml"
    path.write_text(f'state_dir = "{tmp_path}/var"\n{text}')
    chosen = load_settings(path, {})
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        report = steps.ingest_cluster(store, chosen, "kube", at(50), since=at(40))
        assert (report.errors, len(opened), shut) == ([], 1, ["kube"])
        assert report.jobs.core_rows > 0
        assert report.scheduler is not None
        alone = steps.ingest_scheduler_of(store, chosen, "kube", at(51))
        assert (alone.error, len(opened), shut) == (None, 2, ["kube", "kube"])
        # A source that cannot be built is told by both steps, and the samples are read all the same.
        broken = chosen.model_copy(update={"clusters": {"kube": chosen.clusters["kube"].model_copy(
            update={"inventory": str(tmp_path / "gone.csv")})}})  # fmt: skip
        report = steps.ingest_cluster(store, broken, "kube", at(52))
        assert len([error for error in report.errors if "gone.csv" in error]) == 2
        assert report.telemetry.error is None


@pytest.mark.parametrize("kind", get_args(Cluster.model_fields["jobs"].annotation))
def test_every_kind_of_job_source_can_be_closed(kind: str, tmp_path: Path) -> None:
    chosen = Cluster(jobs=kind, jobs_path=str(tmp_path / "jobs.parquet"), prometheus_url="http://127.0.0.1:1")
    with contextlib.closing(build_jobs("a", chosen, tmp_path)) as source:
        assert source.name == "a"
    source.close()


# --- now ----------------------------------------------------------------------------------------------------------


def live_source(pages: Pages, prometheus: Callable[..., Prometheus], **more: object) -> KubernetesSource:
    server = prometheus([scrape_config("ksm", [pages.address], **more)])
    server.wait_for("kube_pod_status_phase or kube_node_info or exported_ready", 1)
    return KubernetesSource("kube", server.url)


def test_nodes_jobs_and_gpus_of_this_moment(
    pages: Pages, prometheus: Callable[..., Prometheus], tmp_path: Path
) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    since = now - timedelta(hours=1)
    half = {"nvidia_com_gpu": 4, "cpu": 8}
    pages.pages["/metrics"] = ksm.page(
        ksm.node("n1", labels={"label_nvidia_com_gpu_product": "NVIDIA-H100", "label_topology_kubernetes_io_zone": "z1",
                               "label_nvidia_com_gpu_clique": "abc.1"}),
        ksm.node("n2", allocatable=7),
        ksm.node("n3", cordoned=True, taints=[("node.kubernetes.io/unschedulable", "NoSchedule")]),
        ksm.node("n4", ready="unknown", taints=[("node.kubernetes.io/unreachable", "NoExecute")]),
        ksm.node("n5", ready="false"),
        ksm.node("n6", taints=[("nvidia.com/gpu", "NoSchedule")], pressure="MemoryPressure"),
        ksm.node("cpu1", gpus=0),
        ksm.node("amd1", resource="amd_com_gpu", gpus=4),
        ksm.pod("a-0", "a0", node="n1", created=since, start=since, owner=("Job", "a")),
        ksm.job("a", created=since),
        ksm.pod("b", "b0", node="n2", created=since, start=since, requests=half),
        ksm.pod("c", "c0", node="n3", created=since, start=since, requests=half),
        # These use nothing any more, or not yet.
        ksm.pod("old", "o0", node="n6", phase="Succeeded", created=since, start=since, completed=now),
        ksm.pod("bad", "o1", node="n6", phase="Failed", created=since, start=since),
        ksm.pod("hold", "o2", node="", phase="Pending", created=since),
        [("DCGM_FI_DEV_GPU_UTIL", {"gpu": str(g), "UUID": f"GPU-{g}", "Hostname": "n1", "pod": "a-0", "namespace": "ml",
                                   "container": "main"}, 90.0) for g in range(2)],
        [("DCGM_FI_DEV_GPU_UTIL", {"gpu": "0", "UUID": "GPU-9", "Hostname": "n2", "pod": pod, "namespace": "ml"}, 9.0)
         for pod in ("b", "gone")],
        [("DCGM_FI_DEV_GPU_UTIL", {"gpu": "1", "UUID": "GPU-8", "Hostname": "n2", "pod": "", "namespace": ""}, 0.0)],
    )  # fmt: skip
    source = live_source(pages, prometheus, honor_labels=True)
    live = wait_until(lambda: (found := source.live()).jobs.height == 4 and found, 15, 0.5, "phases seen")
    assert conform(live.states, "core_job_states").equals(live.states)
    assert ("o2", "PENDING", "Scheduling") in live.states.select("job_id", "state", "reason").rows()
    assert source.live().states.is_empty(), "nothing changed"
    assert conform(live.nodes, "core_nodes").equals(live.nodes)
    nodes = {row["node"]: row for row in live.nodes.iter_rows(named=True)}
    assert {name: (row["state"], row["gpus"]) for name, row in nodes.items()} == {
        "n1": ("ALLOCATED", 8), "n2": ("MIXED", 8), "n3": ("MIXED+DRAIN", 8), "n4": ("DOWN+NOT_RESPONDING", 8),
        "n5": ("DOWN", 8), "n6": ("IDLE", 8), "cpu1": ("IDLE", None), "amd1": ("IDLE", 4),
    }  # fmt: skip
    assert (nodes["n1"]["gpu_model"], nodes["n1"]["pod"], nodes["n1"]["nvlink_domain"]) == (
        "NVIDIA-H100",
        "z1",
        "abc.1",
    )
    assert nodes["n2"]["reason"] == "7 of 8 GPUs can be allocated"
    assert nodes["n6"]["reason"] == "MemoryPressure"
    assert "cordoned" in nodes["n3"]["reason"]
    assert {job: row["state"] for job, row in rows(live.jobs).items()} == {
        "ml/a": "RUNNING", "b0": "RUNNING", "c0": "RUNNING", "o2": "PENDING",
    }  # fmt: skip
    assert all(ok for _, ok, _ in source.check())
    held, warnings = source.held_gpus()
    assert held.select("node", "gpu_uuid", "gpu_index", "job_id", "is_shared").sort("gpu_uuid").rows() == [
        ("n1", "GPU-0", 0, "ml/a", False), ("n1", "GPU-1", 1, "ml/a", False), ("n2", "GPU-9", 0, "b0", False),
    ]  # fmt: skip
    assert warnings == ["1 pod of GPU series not known to run, as ml/gone"]
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        report = ingest_scheduler(store, source, "kube", "", now)
        assert (report.error, report.gpu_job_rows, report.warnings) == (None, 3, warnings)
        stored = store.query("SELECT job_id, start_time, end_time, source FROM core_gpu_jobs WHERE gpu_uuid = 'GPU-0'")
        assert stored.rows() == [("ml/a", since, None, "pod")]


def test_a_scrape_without_honor_labels_says_the_same(pages: Pages, prometheus: Callable[..., Prometheus]) -> None:
    """The workload's labels are then `exported_*`, and `pod`, `namespace`, `node` are those of kube-state-metrics."""
    since = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    pages.pages["/metrics"] = ksm.page(
        ksm.node("n1"),
        ksm.pod("a-0", "a0", created=since, start=since, owner=("Job", "a")),
        ksm.job("a", created=since),
    )
    own = {"namespace": "monitoring", "pod": "kube-state-metrics-5d4f", "node": "infra1", "container": "ksm"}
    server = prometheus([scrape_config("ksm", [pages.address], labels=own)])
    server.wait_for('kube_pod_status_phase{exported_pod="a-0"}', 1)
    source = KubernetesSource("kube", server.url)
    live = wait_until(lambda: (found := source.live()).jobs.height and found, 15, 0.5, "phases seen")
    (job,) = live.jobs.iter_rows(named=True)
    assert (job["job_id"], job["gpus"], job["node_list"], job["state"]) == ("ml/a", 8, "n1", "RUNNING")
    assert live.nodes.select("node", "state").rows() == [("n1", "ALLOCATED")]


def test_a_prometheus_without_kube_state_metrics_and_none_at_all(prometheus: Callable[..., Prometheus]) -> None:
    server = prometheus([])
    source = KubernetesSource("kube", server.url)
    assert source.fetch_jobs(at(0), at(10)).is_empty()
    assert source.live().nodes.is_empty()
    found = {name: (ok, text) for name, ok, text in source.check()}
    assert not found["kube-state-metrics"][0]
    assert "is kube-state-metrics scraped" in found["kube-state-metrics"][1]
    server.kill()
    with pytest.raises(SourceError, match="kube: Prometheus at"):
        source.live()
    assert [(name, ok) for name, ok, _ in source.check()] == [("reachable", False)]


def test_queues_of_volcano_and_kueue(prometheus: Callable[..., Prometheus]) -> None:
    def queue(metric: str, value: float, **labels: str) -> ksm.Series:
        return metric, labels, value

    series = [
        queue("volcano_queue_allocated_milli_cpu", 32_000, queue_name="train"),
        queue("volcano_queue_deserved_scalar_resources", 16_000, queue_name="train", resource="nvidia.com/gpu"),
        queue("volcano_queue_allocated_scalar_resources", 3, queue_name="train", resource="pods"),
        queue("volcano_queue_share", 0.5, queue_name="train"),
        queue("kueue_pending_workloads", 4, cluster_queue="cq", status="inadmissible"),
        queue("kueue_pending_workloads", 2, cluster_queue="cq", status="active"),
        queue("kueue_cluster_queue_resource_usage", 24, cluster_queue="cq", flavor="h100", resource="nvidia.com/gpu"),
        queue("kueue_cluster_queue_nominal_quota", float("inf"), cluster_queue="cq", flavor="h100", resource="cpu"),
        queue("kueue_preempted_workloads_total", 7, preempting_cluster_queue="cq", reason="InClusterQueue"),
        queue("volcano_unschedule_job_count", 3),
        queue("volcano_unschedule_task_count", 5, job_id="ml/llm"),
        queue("volcano_job_share", 0.25, job_ns="ml", job_id="llm"),
        queue("volcano_job_retry_counts", 2, job_id="llm"),
        queue("volcano_namespace_share", 0.75, namespace_name="ml"),
        queue("volcano_schedule_attempts_total", 8, result="unschedulable"),
        queue("volcano_e2e_scheduling_latency_milliseconds_sum", 1500),
        queue("volcano_e2e_scheduling_latency_milliseconds_count", 6),
        queue("volcano_e2e_scheduling_latency_milliseconds_bucket", 6, le="5"),
    ]
    twice = [(metric, labels | {"instance": "b"}, value - 1) for metric, labels, value in series[:1]]
    past = ksm.history((at(0), at(10), series), (at(5), at(8), twice))
    api = PromQL("kube", prometheus(history=past).url, 30)
    frame = queue_samples(api, "kube", at(2), at(9))
    assert conform(frame, "core_queue_samples").equals(frame)
    assert (frame["ts"].min(), frame["ts"].max()) == (at(2), at(8))
    found = {(row["source"], row["queue"], row["metric"]): row["value"] for row in frame.iter_rows(named=True)}
    assert found == {
        ("volcano", "train", "allocated:cpu"): 32, ("volcano", "train", "deserved:nvidia_com_gpu"): 16,
        ("volcano", "train", "allocated:pods"): 3, ("volcano", "train", "share"): 0.5,
        ("volcano", "", "unscheduled_jobs"): 3, ("volcano", "", "unscheduled_tasks:ml/llm"): 5,
        ("volcano", "", "job_share:ml/llm"): 0.25, ("volcano", "", "job_retries_total:llm"): 2,
        ("volcano", "", "namespace_share:ml"): 0.75, ("volcano", "", "schedule_attempts_total:unschedulable"): 8,
        ("volcano", "", "e2e_scheduling_s_total"): 1.5, ("volcano", "", "e2e_scheduling_total"): 6,
        ("kueue", "cq", "pending_jobs:inadmissible"): 4, ("kueue", "cq", "pending_jobs:active"): 2,
        ("kueue", "cq", "allocated:nvidia_com_gpu@h100"): 24,
        ("kueue", "cq", "preempted_jobs_total:InClusterQueue"): 7,
    }  # fmt: skip
    assert queue_samples(api, "kube", at(-60), at(-50)).is_empty()


def test_queues_reach_the_store_once(prometheus: Callable[..., Prometheus], tmp_path: Path) -> None:
    past = ksm.history((at(0), at(10), [("volcano_queue_share", {"queue_name": "train"}, 0.5)]))
    source = KubernetesSource("kube", prometheus(history=past).url)
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        written = [ingest_scheduler(store, source, "kube", "", at(minutes)).queue_rows for minutes in (6, 6, 9)]
        rows = store.query("SELECT ts, value FROM core_queue_samples ORDER BY ts")
    source.close()
    assert written[0] == 6
    assert written[1] <= 1
    assert rows["ts"].n_unique() == len(rows) == 9
    assert rows["value"].unique().to_list() == [0.5]


# --- whatever comes -----------------------------------------------------------------------------------------------

_METRICS = st.sampled_from([*POD_METRICS, *JOB_METRICS, *NODE_METRICS])
_LABELS = st.dictionaries(
    st.sampled_from(["namespace", "pod", "uid", "node", "resource", "reason", "phase", "container", "job_name",
                     "condition", "status", "key", "effect", "created_by_kind", "created_by_name", "owner_kind",
                     "exported_pod", "label_job_name", "label_nvidia_com_gpu_count"]),
    st.sampled_from(["", "a", "b", "Job", "true", "false", "Ready", "Evicted", "OOMKilled", "nvidia_com_gpu",
                     "NoExecute", "nvidia_com_mig_1g_10gb", "<none>", "ü|\n"]), max_size=8,
)  # fmt: skip
_VALUES = st.one_of(st.sampled_from([0.0, 1.0, 137.0, 1e18, -1.0, float("nan"), float("inf")]), st.floats(0, 4e9))
_SEEN = st.tuples(_LABELS, st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown", "odd"]),
                  st.integers(0, 50), st.integers(0, 50))  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(_METRICS, _LABELS, _VALUES), max_size=30), st.lists(_SEEN, max_size=8))
def test_any_series_make_jobs_that_hold_together(
    series: list[ksm.Series], seen: list[tuple[dict[str, str], str, int, int]]
) -> None:
    facts = Facts()
    for metric, labels, value in series:
        facts.add(metric, labels, value)
    for labels, phase, first, more in seen:
        facts.see(labels | {"phase": phase}, at(first), at(first + more))
    pods = pods_of(facts, timedelta(seconds=30))
    nodes = nodes_of(facts, pods.values())
    assert nodes["node"].is_unique().all()
    told = jobs_of(pods.values(), facts, "kube", at(100), Memory())
    jobs = conform(pl.DataFrame(told, schema=schema("raw_jobs"), orient="row"), "raw_jobs")
    live = jobs["state"].is_in(["PENDING", "RUNNING"])
    assert (jobs["end_time"].is_null() == live).all()
    assert (jobs["gpus"] > 0).all()
    assert jobs.filter(pl.col("state") == "PENDING")["start_time"].null_count() == (jobs["state"] == "PENDING").sum()

"""Nodes behind exporters' pods, and jobs of pods on GPUs: of the past too, through a real Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from features.vocabulary import schema
from pipelines.gpu_jobs import derive_gpu_jobs
from pipelines.ingest import ingest_telemetry
from pipelines.job_history import ingest_jobs
from pipelines.settings import Cluster, IngestSettings
from pipelines.sources import Fetched, SourceError, build_telemetry
from pipelines.sources.kubernetes import KubernetesSource
from pipelines.sources.kubernetes_names import PodNames
from pipelines.sources.kubernetes_series import Facts
from pipelines.sources.promql import OutsideRetentionError, PromQL
from pipelines.sources.remote_write import RemoteWriteSource
from pipelines.sources.scrape import ScrapeSource
from pipelines.store import Store
from tests import ksm_pages as ksm
from tests.services import Pages, Prometheus, free_port, scrape_config, wait_until

# All of the past lies in one block: they end on even hours.
T0 = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=6)
_EXPORTER = "nvidia-dcgm-exporter-cwbcm"


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


def gpu(uuid: str, index: int = 0, **labels: str) -> list[ksm.Series]:
    told = {"gpu": str(index), "UUID": uuid, "job": "dcgm"} | labels
    return [("DCGM_FI_DEV_GPU_TEMP", told, 60.0), ("DCGM_FI_DEV_POWER_USAGE", told, 500.0)]


def held(pod: str, namespace: str = "ml") -> dict[str, str]:
    return {"exported_pod": pod, "exported_namespace": namespace, "exported_container": "main"}


def placed(series: list[ksm.Series], **more: str) -> list[ksm.Series]:
    """With further labels of `kube_pod_info`."""
    return [(name, labels | (more if name == "kube_pod_info" else {}), value) for name, labels, value in series]


def on(node: str, name: str, uid: str, *, ip: str, host_ip: str) -> list[ksm.Series]:
    """An exporter's pod."""
    pod = ksm.pod(name, uid, namespace="gpu-operator", node=node, requests={"cpu": 1}, owner=("DaemonSet", "dcgm"),
                  created=at(0), start=at(0))  # fmt: skip
    return placed(pod, pod_ip=ip, host_ip=host_ip)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Half an hour: exporters that name themselves in several ways, pods that come, end, and come again by name."""

    def pod(name: str, uid: str, node: str, owner: tuple[str, str], since: float, **more: object) -> list[ksm.Series]:
        return ksm.pod(name, uid, node=node, owner=owner, created=at(since), start=at(since),
                       requests={"nvidia_com_gpu": 1}, **more)  # fmt: skip

    plain = {"Hostname": "gpu-9", "instance": "10.244.1.9:9400"}
    web = {"Hostname": "gpu-10", "instance": "10.244.1.10:9400"} | held("web-0")
    spans = [
        (at(0), at(30), on("gpu-7", _EXPORTER, "e7", ip="10.244.1.7", host_ip="192.168.0.7")),
        (at(0), at(30), on("gpu-8.example.org", "metrics-abcde", "e8", ip="10.244.1.8", host_ip="192.168.0.8")),
        (at(0), at(30), [("kube_node_info", {"node": f"gpu-{n}", "internal_ip": f"192.168.0.{n}"}, 1.0)
                         for n in (7, 9, 10, 11)]),
        # The exporter's own pod as host name; its own `pod` label is that of the scrape.
        (at(0), at(30), gpu("GPU-7", Hostname=_EXPORTER, instance="10.244.1.7:9400", pod=_EXPORTER,
                            namespace="gpu-operator", **held("train-0"))),
        # A container's id, and the address of the pod; the node of a domain; the address of a node.
        (at(0), at(30), gpu("GPU-8", Hostname="3f2a9c8b1d4e", instance="10.244.1.8:9400")),
        (at(0), at(30), gpu("GPU-8b", 1, Hostname="gpu-8", instance="10.244.7.7:9400")),
        (at(0), at(30), gpu("GPU-8c", 2, instance="metrics-abcde:metrics")),
        (at(0), at(30), gpu("GPU-11", instance="192.168.0.11:9400")),
        (at(0), at(30), pod("train-0", "t0", "gpu-7", ("Job", "train"), 0)),
        # It ends at 15, and holds one GPU of two; the exporter gives no pod before and after.
        (at(0), at(5), gpu("GPU-9", **plain)),
        (at(5), at(15), gpu("GPU-9", **plain, **held("short-0"))),
        (at(15), at(30), gpu("GPU-9", **plain)),
        (at(0), at(30), gpu("GPU-9b", 1, **plain)),
        (at(5), at(15), pod("short-0", "s0", "gpu-9", ("Job", "short"), 5)),
        (at(15), at(20), pod("short-0", "s0", "gpu-9", ("Job", "short"), 5, phase="Succeeded", completed=at(15))),
        # A name that comes again is another job; and a pod without GPUs is none.
        (at(0), at(30), gpu("GPU-10", **web)),
        (at(0), at(12), pod("web-0", "w1", "gpu-10", ("StatefulSet", "web"), 0)),
        (at(13), at(30), pod("web-0", "w2", "gpu-10", ("StatefulSet", "web"), 13)),
        # Two pods share a GPU, and each has copies of its series.
        *((at(0), at(30), gpu("GPU-10b", 1, Hostname="gpu-10", instance="10.244.1.10:9400", **held(name)))
          for name in ("half-0", "half-1")),
        *((at(0), at(30), pod(name, name, "gpu-10", ("Job", name), 0)) for name in ("half-0", "half-1")),
        (at(0), at(30), gpu("GPU-12", Hostname="gpu-12", instance="10.244.1.12:9400", **held("cpu-only"))),
        (at(0), at(30), ksm.pod("cpu-only", "c0", node="gpu-12", requests={"cpu": 1}, created=at(0), start=at(0))),
    ]  # fmt: skip
    server = Prometheus(tmp_path_factory.mktemp("names"), history=ksm.history(*spans))
    yield server
    server.stop()


def cluster(past: Prometheus) -> Cluster:
    return Cluster(telemetry="prometheus", jobs="kubernetes", prometheus_url=past.url)


def fetched(past: Prometheus, tmp_path: Path, start: datetime, end: datetime) -> Fetched:
    source = build_telemetry("k8s", cluster(past), tmp_path)
    try:
        return source.fetch(start, end)
    finally:
        source.close()


@pytest.mark.services("prometheus", "promtool")
def test_case_14_the_node_behind_a_pod_a_container_or_an_address(past: Prometheus, tmp_path: Path) -> None:
    got = fetched(past, tmp_path, at(1), at(2)).gpu
    nodes = dict(got.select("gpu_uuid", "node").unique().rows())
    assert nodes == {
        "GPU-7": "gpu-7", "GPU-8": "gpu-8.example.org", "GPU-8b": "gpu-8.example.org", "GPU-8c": "gpu-8.example.org",
        "GPU-11": "gpu-11", "GPU-9": "gpu-9", "GPU-9b": "gpu-9", "GPU-10": "gpu-10", "GPU-10b": "gpu-10",
        "GPU-12": "gpu-12",
    }  # fmt: skip


@pytest.mark.services("prometheus", "promtool")
def test_samples_name_the_job_of_the_pod_of_their_time(past: Prometheus, tmp_path: Path) -> None:
    got = fetched(past, tmp_path, at(0), at(25)).gpu
    jobs = {
        uuid: sorted(jobs, key=str)
        for uuid, jobs in got.group_by("gpu_uuid").agg(pl.col("job_id").unique()).rows()
    }  # fmt: skip
    assert jobs == {
        "GPU-7": ["ml/train"], "GPU-8": [None], "GPU-8b": [None], "GPU-8c": [None], "GPU-11": [None],
        "GPU-9": [None, "ml/short"], "GPU-9b": [None], "GPU-10": ["w1", "w2"], "GPU-10b": ["ml/half-0", "ml/half-1"],
        "GPU-12": [None],
    }  # fmt: skip
    web = got.filter(pl.col("gpu_uuid") == "GPU-10")
    assert web.filter(pl.col("job_id") == "w1")["ts"].max() < at(13) <= web.filter(job_id="w2")["ts"].min()
    short = got.filter(job_id="ml/short")["ts"]
    assert (short.min(), short.max()) == (at(5), at(15) - timedelta(seconds=15))


@pytest.mark.services("prometheus", "promtool")
def test_catch_up_keeps_which_pod_had_which_gpu(past: Prometheus, tmp_path: Path) -> None:
    """Everything ended before it was read: kube-state-metrics and exporters say nothing of it now."""
    settings = IngestSettings(initial_history_s=3600)
    jobs = KubernetesSource("k8s", past.url)
    source = build_telemetry("k8s", cluster(past), tmp_path)
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        assert ingest_jobs(store, jobs, "k8s", at(30), since=at(0)).error is None
        report = ingest_telemetry(store, source, "k8s", settings, at(30), since=at(0))
        assert report.error is None
        derive_gpu_jobs(store, "k8s", settings)
        rows = store.query(
            "SELECT node, gpu_uuid, job_id, start_time, end_time, is_shared FROM core_gpu_jobs ORDER BY ALL"
        )
        short = rows.filter(job_id="ml/short").rows()
        assert short == [("gpu-9", "GPU-9", "ml/short", at(5), at(15), False)]
        assert rows.filter(job_id="ml/train").select("node", "gpu_uuid").rows() == [("gpu-7", "GPU-7")]
        assert rows.filter(gpu_uuid="GPU-10b")["is_shared"].to_list() == [True, True]
        named = store.query("SELECT count(*) FROM core_gpu_samples WHERE job_id = 'ml/short' AND node = 'gpu-9'")
        assert named.item() >= 39
    jobs.close()
    source.close()


@pytest.mark.services("prometheus")
def test_pages_and_remote_write_tell_jobs_of_pods_too(tmp_path: Path) -> None:
    """What comes without a query of samples: the Prometheus is asked for its kube-state-metrics only."""
    page = {"gpu": "0", "UUID": "GPU-7", "Hostname": _EXPORTER}
    lines = [("DCGM_FI_DEV_GPU_TEMP", page | {"pod": "train-0", "namespace": "ml"}, 60.0),
             ("DCGM_FI_DEV_GPU_TEMP", page | {"gpu": "1", "UUID": "GPU-8"}, 61.0)]  # fmt: skip
    since = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    pods = ksm.pod("train-0", "t0", node="gpu-7", owner=("Job", "train"), created=since, start=since)
    with Pages() as pages:
        pages.pages["/dcgm"] = ksm.page(lines)
        pages.pages["/ksm"] = ksm.page(pods, on("gpu-7", _EXPORTER, "e7", ip="10.1.1.7", host_ip="1.1.1.7"))
        host = pages.url.removeprefix("http://")
        own = {"pod": _EXPORTER, "namespace": "gpu-operator"}
        port = free_port()
        server = Prometheus(
            tmp_path / "prometheus",
            [scrape_config("dcgm", [host], metrics_path="/dcgm", labels=own),
             scrape_config("ksm", [host], metrics_path="/ksm", honor_labels=True)],
            remote_write=[{"url": f"http://127.0.0.1:{port}/api/v1/write",
                           "queue_config": {"batch_send_deadline": "100ms", "min_backoff": "30ms"}}],
        )  # fmt: skip

        def names() -> PodNames:
            return PodNames(PromQL("k8s", server.url, 5), fresh_s=0)

        sent = RemoteWriteSource("k8s", tmp_path / "sent", port=port, exporter_interval_s=1, tick_s=1, pods=names)
        scraped = ScrapeSource("k8s", [f"{pages.url}/dcgm"], tmp_path / "scraped", tick_s=5, pods=names())
        expected = [("GPU-7", "gpu-7", "ml/train"), ("GPU-8", "gpu-7", None)]
        try:
            for source in (sent, scraped):
                begin = datetime.now(UTC)

                def told(source: RemoteWriteSource | ScrapeSource = source) -> list[tuple[str, str, str | None]]:
                    return source.latest().gpu.select("gpu_uuid", "node", "job_id").sort("gpu_uuid").rows()

                # Names are asked for each half a minute: what was not there at first is found at the next asking.
                wait_until(lambda told=told: told() == expected, 60, 0.2, what=str(told()))
                wait_until(
                    lambda source=source, begin=begin: expected[0] in set(
                        source.fetch(begin, datetime.now(UTC) + timedelta(seconds=1)).gpu
                        .select("gpu_uuid", "node", "job_id").rows()
                    ), 60, 0.2,
                )  # fmt: skip
            server.stop()
            assert any("pods of Kubernetes" in text for text in scraped.latest().warnings), (
                "pages are read all the same"
            )
            wait_until(
                lambda: scraped.latest().gpu["job_id"].to_list().count("ml/train") == 1, 30, 0.2,
                what="a page read by what was known before",
            )  # fmt: skip
            with pytest.raises(SourceError):
                scraped.fetch(begin, datetime.now(UTC))
        finally:
            sent.close()
            scraped.close()
            server.stop()


def facts(*series: ksm.Series, seen: datetime) -> Facts:
    found = Facts()
    for name, labels, value in series:
        if name == "kube_pod_status_phase":
            if value == 1:
                found.see(labels, seen, seen)
        else:
            found.add(name, labels, value)
    return found


class _Nothing:
    def matrix(self, query: str, at_ms: int | None = None) -> object:
        raise AssertionError(query)


def test_an_address_that_moves_to_another_node_is_resolved_anew() -> None:
    names = PodNames(_Nothing())  # ty: ignore[invalid-argument-type]
    labels = {"instance": "10.244.1.7:9400", "UUID": "GPU-1"}
    assert (names.node(labels), names.version) == ("", 0)
    names.learn(facts(*on("n1", "exp", "e1", ip="10.244.1.7", host_ip="1.1.1.1"), seen=at(1)), at(1), 30)
    assert (names.node(labels), names.version) == ("n1", 1)
    names.learn(facts(*on("n1", "exp", "e1", ip="10.244.1.7", host_ip="1.1.1.1"), seen=at(2)), at(2), 30)
    assert names.version == 1, "nothing new"
    names.learn(Facts(), at(3), 30)
    assert (names.node(labels), names.version) == ("n1", 1), "kube-state-metrics that is away takes nothing back"
    names.learn(facts(*on("n2", "exp2", "e2", ip="10.244.1.7", host_ip="1.1.1.2"), seen=at(4)), at(4), 30)
    assert (names.node(labels), names.version) == ("n2", 2)
    # What two nodes claim is no one's.
    both = [*on("n2", "exp2", "e2", ip="10.0.0.9", host_ip="x"), *on("n3", "exp3", "e3", ip="10.0.0.9", host_ip="x")]
    names.learn(facts(*both, seen=at(5)), at(5), 30)
    assert names.node({"instance": "10.0.0.9:1"}) == ""
    assert names.node({"Hostname": "exp3"}) == "n3"


def test_an_earlier_span_does_not_take_back_an_end() -> None:
    names = PodNames(_Nothing())  # ty: ignore[invalid-argument-type]
    pod = ksm.pod("a", "u1", node="n1", created=at(0), start=at(0))
    done = ksm.pod("a", "u1", node="n1", created=at(0), start=at(0), phase="Succeeded", completed=at(10))
    again = ksm.pod("a", "u2", node="n1", created=at(40), start=at(40))
    names.learn(facts(*done, *again, seen=at(50)), at(50), 30)
    names.learn(facts(*pod, seen=at(5)), at(5), 30)
    token = names.token({"pod": "a", "namespace": "ml"})
    frame = pl.DataFrame(
        {"ts": [at(1), at(10.5), at(20), at(41)], "cluster": "k", "node": "n1", "gpu_uuid": "G", "job_id": token},
        schema_overrides={"ts": schema("raw_gpu_samples")["ts"]},
    )
    assert names.with_jobs(frame)["job_id"].to_list() == ["u1", "u1", None, "u2"]
    assert names.token({"pod": "a", "namespace": "ml", "pod_uid": "u9"}) != token
    assert names.token({"pod": "a"}) == "", "without a namespace it is anyone's"


def test_what_the_server_keeps_no_more_is_passed_over() -> None:
    asked: list[int] = []

    class Forgetful:
        def matrix(self, query: str, at_ms: int | None = None) -> object:
            asked.append(at_ms or 0)
            raise OutsideRetentionError("out of bounds")

    PodNames(Forgetful()).read(at(0), at(30))  # ty: ignore[invalid-argument-type]
    assert len(asked) == 7, "halves down to ten minutes"

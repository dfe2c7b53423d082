"""What Kubernetes' series are known to get wrong: one minimal input each, read through a real Prometheus.

Numbers in the names are those of the list of known quirks of telemetry: 52 requests of pods that use nothing, 53 names
that come again, 54 conditions that are not true, 55 terminations that are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pipelines.sources.kubernetes import KubernetesSource
from pipelines.sources.kubernetes_nodes import nodes_of
from pipelines.sources.kubernetes_pods import pods_of
from pipelines.sources.kubernetes_series import NODE_METRICS, POD_METRICS, read_facts
from tests import ksm_pages as ksm
from tests.services import Prometheus

pytestmark = pytest.mark.services("prometheus", "promtool")
T0 = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=6)


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """All inputs in one Prometheus, each in a namespace of its own."""

    def started(minutes: float) -> dict[str, datetime]:
        return {"created": at(minutes), "start": at(minutes)}

    spans = [
        # 52: requests of pods that ended or have no node are exposed all the same.
        (at(0), at(20), ksm.pod("run", "u1", namespace="c52", node="n1", **started(0))),
        (at(0), at(20), ksm.pod("done", "u2", namespace="c52", node="n1", phase="Succeeded", completed=at(0),
                                **started(0))),
        (at(0), at(20), ksm.pod("bad", "u3", namespace="c52", node="n1", phase="Failed", **started(0))),
        (at(0), at(20), ksm.pod("hold", "u4", namespace="c52", node="", phase="Pending", created=at(0))),
        # 53: a StatefulSet's pod, and a Job, of the same name but another uid.
        (at(0), at(8), ksm.pod("web-0", "s1", namespace="c53", owner=("StatefulSet", "web"), node="n1", **started(0))),
        (at(9), at(20), ksm.pod("web-0", "s2", namespace="c53", owner=("StatefulSet", "web"), node="n2", **started(9))),
        (at(0), at(6), ksm.pod("nightly-x", "j1", namespace="c53", owner=("Job", "nightly"), **started(0))),
        (at(6), at(8), ksm.pod("nightly-x", "j1", namespace="c53", owner=("Job", "nightly"), phase="Succeeded",
                               completed=at(6), **started(0))),
        (at(0), at(6), ksm.job("nightly", namespace="c53", created=at(0))),
        (at(6), at(8), ksm.job("nightly", namespace="c53", created=at(0), complete=True, completed=at(6))),
        (at(10), at(20), ksm.pod("nightly-y", "j2", namespace="c53", owner=("Job", "nightly"), **started(10))),
        (at(10), at(20), ksm.job("nightly", namespace="c53", created=at(10))),
        # 54: kube_job_failed{condition="true"} 0 is no failure, a series of a reason with 0 is none either.
        (at(0), at(20), ksm.pod("fit-a", "t1", namespace="c54", owner=("Job", "fit"), **started(0))),
        (at(0), at(20), ksm.job("fit", namespace="c54", created=at(0))),
        (at(0), at(20), [("kube_pod_status_reason", {"namespace": "c54", "pod": "fit-a", "uid": "t1", "reason": why}, 0)
                         for why in ("Evicted", "NodeLost")]),
        # Whether a GPU is broken shows by what can be allocated, where the plugin tells at all.
        (at(0), at(20), ksm.node("n1") + ksm.node("n2", allocatable=6)),
        # 55: a crash loop overwrites its last termination; a failed Job has no completion time.
        (at(0), at(5), ksm.pod("loop", "l1", namespace="c55", waiting="CrashLoopBackOff", restarts=1,
                               last=("Error", 1, at(2)), **started(0))),
        (at(5), at(20), ksm.pod("loop", "l1", namespace="c55", waiting="CrashLoopBackOff", restarts=4,
                                last=("OOMKilled", 137, at(6)), **started(0))),
        (at(0), at(9), ksm.pod("die-a", "x1", namespace="c55", owner=("Job", "die"), **started(0))),
        (at(9), at(20), ksm.pod("die-a", "x1", namespace="c55", owner=("Job", "die"), phase="Failed",
                                last=("Error", 2, at(9)), **started(0))),
        (at(0), at(10), ksm.job("die", namespace="c55", created=at(0))),
        (at(10), at(20), ksm.job("die", namespace="c55", created=at(0), failed=True, reason="BackoffLimitExceeded")),
    ]  # fmt: skip
    # kube-state-metrics was restarted at 7: for some minutes two instances give the same series, the old one's frozen.
    old = [(at(0), at(12), ksm.pod("twice", "r1", namespace="restart", node="", phase="Pending", created=at(0)))]
    new = [(at(7), at(20), ksm.pod("twice", "r1", namespace="restart", node="n1", **started(8)))]
    text = "".join(
        ksm.history(*part, instance=instance, job="ksm").removesuffix("# EOF\n")
        for part, instance in (([*spans, *old], "a"), (new, "b"))
    )
    server = Prometheus(tmp_path_factory.mktemp("cases"), history=text)
    yield server
    server.stop()


def jobs(past: Prometheus, namespace: str, until: float = 20) -> list[dict[str, object]]:
    source = KubernetesSource("kube", past.url, matcher=f'namespace="{namespace}"')
    return source.fetch_jobs(at(0), at(until)).sort("job_id", "submit_time").to_dicts()


def test_case_52_requests_of_pods_that_do_not_run_use_nothing(past: Prometheus) -> None:
    found = {row["job_id"]: row for row in jobs(past, "c52")}
    assert {job: row["state"] for job, row in found.items()} == {
        "u1": "RUNNING", "u2": "COMPLETED", "u3": "FAILED", "u4": "PENDING",
    }  # fmt: skip
    assert sum(row["gpus"] for row in found.values() if row["state"] == "RUNNING") == 8, "of 32 that are requested"
    assert (found["u4"]["node_list"], found["u4"]["start_time"]) == (None, None), 'node="" is no node'
    source = KubernetesSource("kube", past.url)
    facts = read_facts(source.api, (*POD_METRICS, *NODE_METRICS), "", at(0), at(20), 30)
    of_case = [pod for pod in pods_of(facts, timedelta(seconds=30)).values() if pod.namespace == "c52"]
    nodes = {row["node"]: row["state"] for row in nodes_of(facts, of_case).iter_rows(named=True)}
    assert nodes == {"n1": "ALLOCATED", "n2": "IDLE"}


def test_case_53_a_name_that_comes_again_is_another_job(past: Prometheus) -> None:
    found = jobs(past, "c53")
    told = [(row["job_id"], row["name"], row["state"], row["submit_time"], row["node_list"]) for row in found]
    assert told == [
        ("c53/nightly", "c53/nightly", "COMPLETED", at(0), "n1"),
        ("c53/nightly", "c53/nightly", "RUNNING", at(10), "n1"),
        ("s1", "c53/web-0", "CANCELLED", at(0), "n1"),
        ("s2", "c53/web-0", "RUNNING", at(9), "n2"),
    ]  # fmt: skip
    assert abs(found[2]["end_time"] - at(8)) <= timedelta(minutes=1)
    assert found[0]["end_time"] == at(6)


def test_case_54_a_condition_that_is_0_is_not_true(past: Prometheus) -> None:
    (row,) = jobs(past, "c54")
    assert (row["state"], row["end_time"], row["reason"]) == ("RUNNING", None, None)


def test_case_54_gpus_that_cannot_be_allocated_are_told(past: Prometheus) -> None:
    source = KubernetesSource("kube", past.url)
    facts = read_facts(source.api, NODE_METRICS, "", at(0), at(20), 30, phases=False)
    nodes = {row["node"]: row for row in nodes_of(facts, []).iter_rows(named=True)}
    assert (nodes["n2"]["gpus"], nodes["n2"]["reason"]) == (8, "6 of 8 GPUs can be allocated")
    assert nodes["n1"]["reason"] is None


def test_case_55_a_crash_loop_keeps_its_gpus_and_counts_its_restarts(past: Prometheus) -> None:
    found = {row["job_id"]: row for row in jobs(past, "c55")}
    loop = found["l1"]
    assert (loop["state"], loop["restarts"], loop["exit_code"], loop["end_time"]) == ("RUNNING", 4, "0:9", None)
    early = {row["job_id"]: row for row in jobs(past, "c55", until=4)}["l1"]
    assert (early["restarts"], early["exit_code"]) == (1, "1:0")
    die = found["c55/die"]
    assert (die["state"], die["exit_code"], die["end_time"]) == ("FAILED", "2:0", at(9)), "without a completion time"


def test_two_instances_at_a_restart_of_kube_state_metrics(past: Prometheus) -> None:
    (row,) = jobs(past, "restart", until=11)
    assert (row["job_id"], row["state"], row["node_list"], row["gpus"]) == ("r1", "RUNNING", "n1", 8)
    (before,) = jobs(past, "restart", until=6)
    assert before["state"] == "PENDING"

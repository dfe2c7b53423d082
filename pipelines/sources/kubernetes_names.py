"""What stands behind the labels of a series in Kubernetes: the node under an exporter, the job of the pod on a GPU.

An exporter in a pod names itself after its pod or container, and Prometheus knows it by the pod's address; the node is
found by kube-state-metrics. A pod on a GPU is named in the exporter's labels; names come again, so which job a name
meant depends on the time of the sample. Lays nothing out: series stand in `series.py`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import polars as pl

from features.identity import NODE_LABELS, host_of, is_address, pod_of, short_host
from features.vocabulary import TIME
from pipelines.sources import SourceError
from pipelines.sources.kubernetes_jobs import job_ids
from pipelines.sources.kubernetes_pods import Pod, pods_of
from pipelines.sources.kubernetes_series import JOB_METRICS, POD_METRICS, Facts, read_facts
from pipelines.sources.promql import OutsideRetentionError, PromQL

_METRICS = (*POD_METRICS, *JOB_METRICS, "kube_node_info")
_POD = "pod://"  # begins what stands for a job until the time of the sample tells which it is
_STEP_S, _LIVE_STEP_S = 30, 3
_LIVE_SPAN = timedelta(minutes=3)
_PIECE, _SHORT = timedelta(hours=6), timedelta(minutes=10)
_EARLY = timedelta(seconds=5)  # clocks of nodes differ
_LATE = timedelta(seconds=2 * _STEP_S)  # a pod that vanished was last seen that long before its end
_FIRST = datetime(2000, 1, 1, tzinfo=UTC)
_MOST = 200_000


class _Holder(NamedTuple):
    """A pod with GPUs: its job, and from when to when it was there, as known at a time."""

    tokens: tuple[str, ...]
    job_id: str
    since: datetime
    until: datetime | None
    known_at: datetime


class PodNames:
    """Nodes and jobs behind the labels of a cluster's series. What was once learned is kept.

    Args:
        api: The Prometheus that scrapes kube-state-metrics.
        matcher: Label matchers added to every query; empty: none.
        fresh_s: How long what is known of the present will do, s.

    Attributes:
        version: Grows when a node that was given before is another one now: series must be resolved anew.
    """

    def __init__(self, api: PromQL, matcher: str = "", fresh_s: float = 30.0) -> None:
        self.version = 0
        self._api, self._matcher = api, matcher
        self._hosts: dict[str, str] = {}  # host, pod or address → node
        self._given: dict[str, str] = {}
        self._holders: dict[str, _Holder] = {}
        self._frame: pl.DataFrame | None = None
        self._fresh_s, self._read_at = fresh_s, -math.inf

    def read(self, start: datetime, end: datetime, step_s: int = _STEP_S) -> None:
        """Learn of the pods and nodes that were there in [start, end); two queries for each six hours.

        Raises:
            SourceError: No whole answer came.
        """
        while start < end:
            until = min(start + _PIECE, end)
            self._read(start, until, step_s)
            start = until

    def _read(self, start: datetime, end: datetime, step_s: int) -> None:
        try:
            facts = read_facts(self._api, _METRICS, self._matcher, start, end, step_s)
        except OutsideRetentionError:  # samples that old are not there either
            if end - start > _SHORT:
                middle = start + (end - start) / 2
                self._read(start, middle, step_s)
                self._read(middle, end, step_s)
            return
        self.learn(facts, end, step_s)

    def refresh(self, now: datetime) -> None:
        """Learn of the present, unless that was done a moment ago.

        Raises:
            SourceError: No whole answer came.
        """
        at = time.monotonic()
        if at - self._read_at >= self._fresh_s:
            self.read(now - _LIVE_SPAN, now, _LIVE_STEP_S)
            self._read_at = at

    def refreshed(self) -> list[str]:
        """`refresh` as of now; where no answer comes what is known stays, and the trouble is returned in words."""
        try:
            self.refresh(datetime.now(UTC))
        except SourceError as error:
            return [f"pods of Kubernetes: {error}"]
        return []

    def close(self) -> None:
        """Give up the connection."""
        self._api.close()

    def learn(self, facts: Facts, end: datetime, step_s: int) -> None:
        """Take in what kube-state-metrics said of a span that ended at `end`."""
        pods = pods_of(facts, timedelta(seconds=step_s))
        self._learn_hosts(facts, pods.values())
        jobs = job_ids(pods.values(), facts)
        if len(self._holders) > _MOST:
            self._holders.clear()
        for pod in pods.values():
            known = self._holders.get(pod.key)
            if pod.gpus and pod.node and (known is None or known.known_at <= end):
                self._holders[pod.key] = _Holder(
                    _tokens(pod), jobs[pod.key], pod.created or pod.start or _FIRST, pod.end, end
                )
                self._frame = None

    def node(self, labels: Mapping[str, str]) -> str:
        """The node that a series speaks of, by its name in Kubernetes; empty: the labels know no better than we."""
        for label in NODE_LABELS:
            for text in (labels.get("exported_" + label), labels.get(label)):
                if text and (found := self._host(text)):
                    return found
        return ""

    def token(self, labels: Mapping[str, str]) -> str:
        """What stands for the job of the pod in the labels, until `with_jobs` replaces it; empty without a pod."""
        namespace, name, uid = pod_of(labels)
        return f"{_POD}{uid}" if uid else f"{_POD}{namespace}/{name}" if name and namespace else ""

    def with_jobs(self, gpu: pl.DataFrame) -> pl.DataFrame:
        """Samples with the jobs of the pods that their labels named; null where such a pod held no GPU then.

        Args:
            gpu: Rows of `raw_gpu_samples`, as resolved with `token`.
        """
        is_token = pl.col("job_id").str.starts_with(_POD)
        if gpu.is_empty() or not gpu.select(is_token.any()).item():
            return gpu
        rows = gpu.with_row_index("_row")
        named = rows.filter(is_token).select(
            "_row", pl.col("job_id").alias("token"), (pl.col("ts") + _EARLY).alias("at")
        )
        found = named.sort("at").join_asof(
            self._holder_frame(), left_on="at", right_on="since", by="token", strategy="backward",
            check_sortedness=False,
        )  # fmt: skip
        there = pl.col("until").is_null() | (pl.col("at") - _EARLY <= pl.col("until") + _LATE)
        jobs = found.select("_row", pl.when(there).then("job").alias("_job"))
        return (
            rows.join(jobs, on="_row", how="left", maintain_order="left")
            .with_columns(pl.when(is_token).then("_job").otherwise("job_id").alias("job_id"))
            .drop("_row", "_job")
        )

    def _holder_frame(self) -> pl.DataFrame:
        if self._frame is None:
            rows = [(token, one.job_id, one.since, one.until) for one in self._holders.values() for token in one.tokens]
            types = {"token": pl.String, "job": pl.String, "since": TIME, "until": TIME}
            self._frame = pl.DataFrame(rows, schema=types, orient="row").sort("since")
        return self._frame

    def _learn_hosts(self, facts: Facts, pods: Iterable[Pod]) -> None:
        if len(self._hosts) > _MOST:
            self._hosts.clear()
        names, live, gone = (defaultdict[str, set[str]](set) for _ in range(3))
        for labels, _ in facts.series("kube_node_info"):
            if node := labels.get("node"):
                self._hosts[node] = node
                names[short_host(node)].add(node)
                live[labels.get("internal_ip", "")].add(node)
        for pod in pods:
            if pod.node:
                found = live if pod.is_live else gone
                names[short_host(pod.node)].add(pod.node)
                for text in (pod.name, pod.labels.get("pod_ip", ""), pod.labels.get("host_ip", "")):
                    found[text].add(pod.node)
        # Newer ones go over older ones; what two nodes claim is no one's.
        for told in (gone, live, names):
            self._hosts |= {host: next(iter(nodes)) if len(nodes) == 1 else "" for host, nodes in told.items() if host}
        if any(self._known(host) != node for host, node in list(self._given.items())):
            self._given.clear()
            self.version += 1

    def _known(self, name: str) -> str:
        return self._hosts.get(name, "")

    def _host(self, text: str) -> str:
        host, trust = host_of(text)
        whole = text.partition(":")[0] if text.count(":") == 1 else text
        for name in dict.fromkeys((whole, host)):
            if len(self._given) < _MOST:
                self._given[name] = self._known(name)
            if found := self._known(name):
                return found
        return host if trust > 0 and not is_address(host) else ""


def _tokens(pod: Pod) -> tuple[str, ...]:
    name = f"{pod.namespace}/{pod.name}"
    return tuple(_POD + text for text in dict.fromkeys((pod.key, name)))

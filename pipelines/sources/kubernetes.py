"""Jobs and nodes of a Kubernetes cluster, from the series of kube-state-metrics in its Prometheus.

Reads and puts together; what the series mean stands in `kubernetes_pods.py`, `kubernetes_jobs.py` and
`kubernetes_nodes.py`, how they are asked for in `kubernetes_series.py`. Queues: `kubernetes_queues.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import polars as pl

from features.identity import UUID_LABELS, node_name
from features.vocabulary import schema
from pipelines.sources import Finding, LiveJobs, SourceError
from pipelines.sources.inventory import complete, nodes_frame, read_inventory
from pipelines.sources.job_states import changed_states, job_states, no_states
from pipelines.sources.kubernetes_jobs import Memory, job_ids, jobs_of
from pipelines.sources.kubernetes_nodes import nodes_of
from pipelines.sources.kubernetes_pods import Pod, pods_of
from pipelines.sources.kubernetes_series import (
    JOB_METRICS,
    NODE_METRICS,
    POD_METRICS,
    Facts,
    plain_labels,
    read_facts,
    selecting,
)
from pipelines.sources.promql import PromQL
from pipelines.sources.promql_access import Access
from pipelines.sources.slurm_gpus import HELD_SCHEMA
from pipelines.words import counted

_STEP_S, _LIVE_STEP_S = 30, 3
_LIVE_SPAN = timedelta(minutes=3)
_PIECE = timedelta(hours=6)
# Any of these carries the pod that holds the GPU, where the exporter maps them.
_GPU_SERIES = "|".join(
    ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS",
     "gpu_gfx_activity", "amd_gpu_gfx_activity")
)  # fmt: skip


class KubernetesSource:
    """Jobs and nodes of one Kubernetes cluster.

    Args:
        name: Name of the cluster.
        url: Base URL of the Prometheus that scrapes kube-state-metrics.
        matcher: Label matchers added to every query; empty: none.
        timeout_s: Time-out of one query, s.
        access: Who we are and whom we trust.
        inventory: CSV of nodes that completes what Kubernetes says; empty: none.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        matcher: str = "",
        timeout_s: float = 30,
        access: Access | None = None,
        inventory: str = "",
    ) -> None:
        self.name = name
        self.api = PromQL(name, url, timeout_s, access)
        self.warnings: list[str] = []
        self._matcher = matcher
        self._inventory = read_inventory(inventory)
        self._memory = Memory()
        self._states = no_states()
        self._lock = threading.Lock()

    def fetch_jobs(self, start: datetime, end: datetime) -> pl.DataFrame:
        """JOB_COLUMNS and JOB_EXTRAS of jobs whose pods were there in [start, end).

        Two queries for each six hours. A job is given in its state at the end of the span.

        Raises:
            SourceError: No whole answer came.
        """
        rows: dict[tuple[object, object], dict[str, object]] = {}
        with self._lock:
            while start < end:
                until = min(start + _PIECE, end)
                for row in self._jobs(start, until):
                    rows[row["job_id"], row["submit_time"]] = row
                start = until
            self.warnings = self.api.take_warnings()
        return _frame(list(rows.values())).sort("submit_time", "job_id")

    def live(self) -> LiveJobs:
        """Pending and running jobs, what changed of their states, and the nodes; two queries.

        Raises:
            SourceError: No whole answer came.
        """
        at = datetime.now(UTC)
        with self._lock:
            metrics = (*POD_METRICS, *JOB_METRICS, *NODE_METRICS)
            facts = read_facts(self.api, metrics, self._matcher, at - _LIVE_SPAN, at, _LIVE_STEP_S)
            pods = pods_of(facts, timedelta(seconds=_LIVE_STEP_S))
            jobs = _frame(jobs_of(pods.values(), facts, self.name, at, self._memory))
            self.warnings = self.api.take_warnings()
        nodes = complete(nodes_of(facts, pods.values()), self._inventory).sort("node")
        jobs = jobs.filter(pl.col("state").is_in(["PENDING", "RUNNING"])).sort("submit_time", "job_id")
        states = job_states(jobs.with_columns(pl.lit(None, dtype=pl.Float64).alias("priority")))
        fresh, self._states = changed_states(self._states, states), states
        return LiveJobs(jobs, nodes_frame(nodes, self.name, at), fresh, list(self.warnings))

    def held_gpus(self) -> tuple[pl.DataFrame, list[str]]:
        """GPUs that pods hold at this moment, by the pod's name in the exporter's labels; three queries.

        Returns:
            `node`, `gpu_uuid`, `gpu_index`, `job_id`, `start_time`, `is_shared`; and what was left out. A GPU that
            several pods have is shared.

        Raises:
            SourceError: No whole answer came.
        """
        at = datetime.now(UTC)
        with self._lock:
            facts = read_facts(self.api, (*POD_METRICS, *JOB_METRICS), self._matcher, at - _LIVE_SPAN, at, _LIVE_STEP_S)
            pods = pods_of(facts, timedelta(seconds=_LIVE_STEP_S))
            series = self.api.vector(selecting(f'__name__=~"{_GPU_SERIES}"', self._matcher))
        return _held(series, pods, facts)

    def check(self) -> list[Finding]:
        """Reachable, kube-state-metrics, GPUs."""
        try:
            live = self.live()
        except SourceError as error:
            return [("reachable", False, str(error))]
        nodes, gpus = len(live.nodes), int(live.nodes["gpus"].sum() or 0)
        seen = f"{counted(nodes, 'node')}, {counted(len(live.jobs), 'waiting or running job')} with GPUs"
        advice = "no kube_node_info: is kube-state-metrics scraped, and is prometheus_matcher right?"
        return [
            ("reachable", True, self.api.url),
            ("kube-state-metrics", nodes > 0, seen if nodes else advice),
            (
                "gpus",
                gpus > 0,
                counted(gpus, "GPU") if gpus else "no node has a GPU resource: is a device plugin installed?",
            ),
        ]

    def close(self) -> None:
        """Give up the connection."""
        self.api.close()

    def _jobs(self, start: datetime, end: datetime) -> list[dict[str, object]]:
        facts = read_facts(self.api, (*POD_METRICS, *JOB_METRICS), self._matcher, start, end, _STEP_S)
        pods = pods_of(facts, timedelta(seconds=_STEP_S))
        return jobs_of(pods.values(), facts, self.name, end, self._memory)


def _frame(rows: list[dict[str, object]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=schema("raw_jobs"), orient="row")


def _held(
    series: list[tuple[Mapping[str, str], float]], pods: dict[str, Pod], facts: Facts
) -> tuple[pl.DataFrame, list[str]]:
    names = {(pod.namespace, pod.name): pod for pod in pods.values() if pod.is_live}
    jobs = job_ids(pods.values(), facts)
    rows, unknown = [], set()
    for labels, _ in series:
        plain = plain_labels(labels)
        uuid = next((plain[name] for name in UUID_LABELS if plain.get(name)), None)
        if not plain.get("pod") or uuid is None or not plain.get("namespace"):
            continue
        pod = pods.get(plain.get("pod_uid", "")) or names.get((plain["namespace"], plain["pod"]))
        if pod is None or not pod.is_live or not pod.gpus:
            if not _is_exporter(plain):
                unknown.add(f"{plain['namespace']}/{plain['pod']}")
            continue
        index = plain.get("gpu", plain.get("gpu_id", ""))
        rows.append(
            {
                "node": pod.node or node_name(labels),
                "gpu_uuid": uuid,
                "gpu_index": int(index) if index.isascii() and index.isdigit() and len(index) < 4 else None,
                "job_id": jobs[pod.key],
                "start_time": pod.start or pod.created,
                "is_shared": False,
            }
        )
    frame = pl.DataFrame(rows, schema=HELD_SCHEMA | {"gpu_uuid": pl.String}).unique(maintain_order=True)
    frame = frame.sort("start_time").unique(["node", "gpu_uuid", "job_id"], keep="first", maintain_order=True)
    shared = pl.col("job_id").n_unique().over("node", "gpu_uuid") > 1
    warnings = [f"{counted(len(unknown), 'pod')} of GPU series not known to run, as {min(unknown)}"] if unknown else []
    return frame.with_columns(shared.alias("is_shared")).drop_nulls(["node", "start_time"]), warnings


def _is_exporter(labels: Mapping[str, str]) -> bool:
    """The pod is the exporter's own: what a scrape says where the exporter names none."""
    return "exporter" in labels.get("pod", "")

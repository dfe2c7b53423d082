"""Reads kube-state-metrics series of one span out of a Prometheus: the last value of each, and when phases were seen.

Labels are brought into one form (`exported_*` of a scrape without honor_labels, the scraper's own labels dropped), and
series that two instances of kube-state-metrics give at once become one, by the larger value. What the series mean
stands in `kubernetes_pods.py` and `kubernetes_nodes.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import numpy as np

from pipelines.sources import SourceError
from pipelines.sources.promql import Matrix, parse_labels

POD_METRICS = (
    "kube_pod_info", "kube_pod_owner", "kube_pod_labels", "kube_pod_created", "kube_pod_start_time",
    "kube_pod_completion_time", "kube_pod_deletion_timestamp", "kube_pod_container_resource_requests",
    "kube_pod_status_reason", "kube_pod_status_unschedulable", "kube_pod_container_status_waiting_reason",
    "kube_pod_container_status_terminated_reason", "kube_pod_container_status_last_terminated_reason",
    "kube_pod_container_status_last_terminated_exitcode", "kube_pod_container_status_last_terminated_timestamp",
    "kube_pod_container_status_restarts_total",
)  # fmt: skip
JOB_METRICS = (
    "kube_job_created", "kube_job_complete", "kube_job_failed", "kube_job_status_failed",
    "kube_job_status_completion_time", "kube_job_spec_active_deadline_seconds",
)  # fmt: skip
NODE_METRICS = (
    "kube_node_info", "kube_node_labels", "kube_node_status_capacity", "kube_node_status_allocatable",
    "kube_node_status_condition", "kube_node_spec_unschedulable", "kube_node_spec_taint",
)  # fmt: skip
PHASES = "kube_pod_status_phase"
# Labels that a scrape adds; those of the target itself where a workload has the same ones.
_SCRAPER = {"instance", "job", "endpoint", "service", "replica", "prometheus", "prometheus_replica", "__name__"}
_EXPORTED = "exported_"
_LAST_S = 4e9  # times after 2096 are none

Labels = Mapping[str, str]


class Asks(Protocol):
    """A Prometheus, as `promql.PromQL`."""

    def matrix(self, query: str, at_ms: int | None = None) -> Matrix: ...


class Seen(NamedTuple):
    """A phase of a pod: when it was first and last seen in the span."""

    phase: str
    first: datetime
    last: datetime


class Facts:
    """Last values of series, by metric.

    Attributes:
        by_metric: Metric → labels (as a sorted tuple) → value.
        phases: Pod (its uid, else namespace/name) → phases seen.
        newest: When the newest sample of a phase was taken; None when there was none.
    """

    def __init__(self) -> None:
        self.by_metric: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
        self.phases: dict[str, list[Seen]] = defaultdict(list)
        self.newest: datetime | None = None

    def series(self, metric: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each series of a metric."""
        for labels, value in self.by_metric.get(metric, {}).items():
            yield dict(labels), value

    def add(self, metric: str, labels: Labels, value: float) -> None:
        """Take a series in; of the same one from two instances the larger value counts."""
        if not np.isfinite(value):
            return
        known = self.by_metric[metric]
        key = tuple(sorted(plain_labels(labels).items()))
        known[key] = max(value, known.get(key, value))

    def see(self, labels: Labels, first: datetime, last: datetime) -> None:
        """Take in when a phase of a pod was seen."""
        plain = plain_labels(labels)
        if phase := plain.get("phase"):
            self.phases[pod_key(plain)].append(Seen(phase, first, last))
            self.newest = max(self.newest or last, last)


def plain_labels(labels: Labels) -> dict[str, str]:
    """The workload's labels, without those that the scrape added."""
    exported = {name.removeprefix(_EXPORTED) for name in labels if name.startswith(_EXPORTED)}
    plain = {}
    for name, value in labels.items():
        base = name.removeprefix(_EXPORTED)
        if name.startswith(_EXPORTED):
            plain[base] = value
        elif name not in exported and name not in _SCRAPER:
            plain[name] = value
    return plain


def pod_key(labels: Labels) -> str:
    """The pod's uid, for names come again; older kube-state-metrics give none: namespace and name then."""
    return labels.get("uid") or f"{labels.get('namespace', '')}/{labels.get('pod', '')}"


def selecting(matchers: str, matcher: str) -> str:
    """A selector of label matchers and those of the setting, which may be empty."""
    return f"{{{matchers},{matcher}}}" if matcher.strip() else f"{{{matchers}}}"


def read_facts(
    api: Asks, metrics: Iterable[str], matcher: str, start: datetime, end: datetime, step_s: int, *, phases: bool = True
) -> Facts:
    """Facts of [start, end), two queries.

    Args:
        api: The Prometheus.
        metrics: Names of metrics.
        matcher: Further label matchers, as of the setting; empty: none.
        start: Start of the span, UTC.
        end: End of the span, UTC.
        step_s: Resolution of the times of phases, s.
        phases: Whether to ask for the phases of pods.

    Raises:
        SourceError: No whole answer came.
    """
    at_ms = (math.ceil(end.timestamp()) - 1) * 1000  # the end itself belongs to the next span
    span_s = max(int((end - start).total_seconds()), 1)
    facts = Facts()
    # A subquery of one point is an instant query at a moment of our choice.
    selector = selecting(f'__name__=~"{"|".join(metrics)}"', matcher)
    last = f"last_over_time({selector}[{span_s}s])[1s:1s]"
    for labels, _, value in _series(api.matrix(last, at_ms)):
        facts.add(labels.get("__name__", ""), labels, value)
    if phases:
        # The sample's own time: a series that ended is repeated for minutes by every query that is no range.
        one = f"{PHASES}{{{matcher}}}"
        seen = f"(timestamp({one}) and ({one} == 1))[{span_s}s:{step_s}s]"
        for labels, first_s, last_s in _series(api.matrix(seen, at_ms)):
            if all(0 < moment_s < _LAST_S for moment_s in (first_s, last_s)):  # else no time at all
                facts.see(labels, datetime.fromtimestamp(first_s, UTC), datetime.fromtimestamp(last_s, UTC))
    return facts


def labels_of(raw: bytes) -> dict[str, str]:
    """Labels of a series.

    Raises:
        SourceError: They are none.
    """
    try:
        return parse_labels(raw)
    except ValueError as error:
        raise SourceError(f"Prometheus gave a series whose labels cannot be read: {error}") from error


def _series(matrix: Matrix) -> Iterator[tuple[dict[str, str], float, float]]:
    """Labels, first and last value of each series."""
    ends = np.cumsum(matrix.counts)
    for raw, begin, end in zip(matrix.labels, ends - matrix.counts, ends, strict=True):
        if end > begin:
            yield labels_of(raw), float(matrix.values[begin]), float(matrix.values[end - 1])

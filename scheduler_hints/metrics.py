"""`/metrics` of the hints API: its own health, how fresh everything is, and the active hints as gauges.

Which hints become which gauges stands in `gauges.py`; here they are put beside the rest, for fresh shards only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler_hints.gauges import MAX_GAUGES, render
from scheduler_hints.nowcast_gauges import nowcast_gauges
from scheduler_hints.outcome_gauges import outcome_gauges
from scheduler_hints.reloader import ShardStore
from scheduler_hints.schema import KINDS
from scheduler_hints.shards import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHARD_LABELS = ["cluster", "kind"]


class Metrics:
    """Counters of this process, and the text of `/metrics`."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.truncated = 0
        self._requests: dict[tuple[str, int], int] = {}

    def count(self, route: str, status: int) -> None:
        """Count one answer."""
        key = (route, status)
        self._requests[key] = self._requests.get(key, 0) + 1

    def render(self, clusters: Sequence[str]) -> bytes:
        """The text of `/metrics` for whoever may see `clusters`."""
        state, now_s = self.store.state, self.store.clock()
        fresh = [state.fresh(cluster, kind, now_s) for kind in KINDS for cluster in clusters]
        hints, left_out = render([shard.gauges for shard in fresh if shard is not None], MAX_GAUGES)
        self.truncated += left_out
        registry = CollectorRegistry(auto_describe=False)
        registry.register(
            _Collector(
                [
                    *self._own(now_s),
                    *_freshness(state, clusters, now_s),
                    _nowcast_problems(state, clusters),
                    *nowcast_gauges(state.nowcast, clusters),
                    *outcome_gauges(state.outcomes, clusters),
                ]
            )
        )
        ProcessCollector(registry=registry)
        return generate_latest(registry) + hints.encode()

    def _own(self, now_s: float) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "weatherglass_api_requests", "Answers by route and status.", labels=["route", "status"]
        )
        for (route, status), count in sorted(self._requests.items()):
            requests.add_metric([route, str(status)], count)
        yield requests
        yield CounterMetricFamily(
            "weatherglass_api_snapshot_errors", "Snapshot files that could not be read.", value=self.store.read_errors
        )
        yield GaugeMetricFamily(
            "weatherglass_api_checked_age_seconds",
            "Time since the snapshot files were last looked at.",
            value=max(0.0, now_s - self.store.checked_s),
        )
        yield CounterMetricFamily(
            "weatherglass_hint_gauges_truncated",
            f"Hints left out of scrapes because there were more than {MAX_GAUGES}.",
            value=self.truncated,
        )


def _freshness(state: State, clusters: Sequence[str], now_s: float) -> Iterable[Metric]:
    def family(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"weatherglass_hints_{name}", text, labels=_SHARD_LABELS)

    fresh = family("fresh", "1 while hints of this kind may be believed.")
    expires = family("expires_in_seconds", "Time until they expire; negative since they have.")
    age = family("age_seconds", "Time since they were published.")
    data_age = family("data_age_seconds", "Time since their newest input was taken.")
    count = family("published", "How many are published.")
    invalid = family("invalid", "How many were left out because they do not have the shape of their kind.")
    for cluster in clusters:
        for kind in KINDS:
            labels = [cluster, kind]
            if state.condition(cluster, kind, now_s) == "impossible":
                continue  # an alert on what can never be fresh would never end
            shard = state.shards.get((cluster, kind))
            fresh.add_metric(labels, float(state.fresh(cluster, kind, now_s) is not None))
            if shard is None:
                continue
            age_s = max(0.0, now_s - shard.generated_s)
            expires.add_metric(labels, shard.deadline_s - now_s)
            age.add_metric(labels, age_s)
            data_age.add_metric(labels, age_s + shard.head.data_age_s)
            count.add_metric(labels, len(shard.rows))
            invalid.add_metric(labels, shard.invalid)
    return fresh, expires, age, data_age, count, invalid


def _nowcast_problems(state: State, clusters: Sequence[str]) -> Metric:
    """One gauge for each trouble that a nowcast tells of; what it is `/v1/status` says in words."""
    found = GaugeMetricFamily(
        "weatherglass_nowcast_problem", "1 while a nowcast tells of trouble with this part.", labels=["cluster", "part"]
    )
    for cluster in clusters:
        for part in state.nowcast_parts(cluster):
            found.add_metric([cluster, part], 1.0)
    return found


class _Collector:
    """Hands ready families to prometheus_client."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

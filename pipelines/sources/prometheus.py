"""Samples from Prometheus, VictoriaMetrics, Thanos or Mimir.

Raw samples are asked for (`{…}[range]` on `/query`), never `query_range`: its look-back repeats the last value of a
series that is dead. What becomes of the series stands here; how a window is cut into queries in `promql_range.py`, the
wire in `promql.py`, the table of names in `features/metrics.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl

from features import metrics
from pipelines.sources import Fetched, Finding, SourceError, empty_frame, gpu_frame, node_frame
from pipelines.sources.kubernetes_names import PodNames
from pipelines.sources.metric_findings import metrics_findings
from pipelines.sources.promql import Matrix, PromQL, parse_labels
from pipelines.sources.promql_access import Access
from pipelines.sources.promql_range import MARGIN_MS, RangeReader
from pipelines.sources.replicas import OneReplica, kept_samples
from pipelines.sources.series import REPLICA_LABELS
from pipelines.sources.wide import (
    LINK_TRAFFIC,
    UP,
    Frames,
    Index,
    Samples,
    drop_absurd_times,
    lacks_link_sums,
    to_frames,
)

_MAX_SKEW_S = 5.0


class PrometheusSource:
    """Samples of one cluster from a Prometheus.

    Args:
        name: Name of the cluster.
        url: Base URL of the server.
        matcher: Label matchers added to every query, as `cluster="a"`.
        timeout_s: Time-out of one query, s.
        exporter_interval_s: Interval at which exporters take samples, s; `latest` looks back two of them.
        access: Who we are and whom we trust.
        parallel: Queries at a time when a range is read in pieces.
        table: The vocabulary.
        has_pods: GPUs are held by pods of Kubernetes, whose kube-state-metrics is in the same server.
        replica_labels: Labels that tell apart servers that scrape the same exporters: one of them is read.
    """

    is_asked = True  # every answer of it costs questions

    def __init__(
        self,
        name: str,
        url: str,
        *,
        matcher: str = "",
        timeout_s: float = 30,
        exporter_interval_s: float = 15,
        access: Access | None = None,
        parallel: int = 2,
        table: metrics.MetricTable = metrics.DEFAULT,
        has_pods: bool = False,
        replica_labels: Sequence[str] = REPLICA_LABELS,
    ) -> None:
        self.name = name
        self.watermark_lag_s = exporter_interval_s
        self._interval_s = exporter_interval_s
        self._apis = [PromQL(name, url, timeout_s, access) for _ in range(parallel)]
        self._api = self._apis[0]
        self._table = table
        self._names: tuple[str, ...] = (*table.variants, UP)
        # The newest are asked for every few seconds: what a forecast looks at, not health, ports and single links; but
        # for links that only count (AMD), which nothing sums up. The traffic of other links is asked for where some GPU
        # has no sum; their errors are not: there are very many, and no forecast looks at them.
        sums = (n for n in table.names["link"] if any(r.kind == "counter_typed_gauge" for r in table.by_name[n]))
        kinds = ("gpu", "node", "job", "xid", "port")
        quick = dict.fromkeys((*(name for kind in kinds for name in table.names[kind]), *sums, UP))
        self._more = f",{matcher}" if matcher else ""
        self._reader = RangeReader(self._apis, self._names, matcher, exporter_interval_s * 1000)
        self._quick = RangeReader(self._apis, tuple(quick), matcher, exporter_interval_s * 1000)
        self._pods = PodNames(self._api, matcher) if has_pods else None
        self._index = Index(table, self._pods, replica_labels)
        # A range may lie in the past: what was chosen there is nothing to the newest samples.
        self._of_range, self._of_newest = (OneReplica(exporter_interval_s * 1000) for _ in range(2))
        self._version = 0
        others = (name for name in table.names["link"] if name not in quick)
        lanes = [name for name in others if any(row.column in LINK_TRAFFIC for row in table.by_name[name])]
        self._lanes = RangeReader(self._apis, tuple(lanes), matcher, exporter_interval_s * 1000) if lanes else None
        self._newest_series = 0
        self._scrape_jobs: set[str] = set()
        self._nodes: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()  # the session and the caches serve one read at a time

    def fetch(self, start: datetime, end: datetime) -> Fetched:
        """Samples with start ≤ ts < end, as received; several queries when there are many.

        Raises:
            SourceError: Some part did not come; nothing is returned then.
            ValueError: A moment has no time zone.
        """
        first, last = _milliseconds(start), _milliseconds(end)
        warnings: list[str] = []
        parts: list[Frames] = []
        with self._lock:
            self._take_warnings()
            # Counters that become rates need the sample before the first.
            lead = round(2000 * self._interval_s) if self._index.counters else 0
            if self._pods is not None:
                self._pods.read(start - timedelta(milliseconds=lead), end)
                self._resolve_anew()
            for matrix, at, until in self._reader.read(first - lead, last):
                self._index.prune(len(matrix.labels))
                samples, odd = self._resolve(matrix, self._of_range)
                parts.append(self._frames(_within(samples, at, until)))
                warnings += odd
            warnings += self._take_warnings()
        if lead:
            parts = [_since(part, start) for part in parts]
        gpus = [part.gpu for part in parts if len(part.gpu)]
        gpu = gpu_frame(pl.concat(gpus, how="diagonal")) if gpus else gpu_frame()
        return Fetched(
            gpu,
            pl.concat([node_frame(), *(part.node for part in parts)]),
            warnings,
            pl.concat([empty_frame("core_gpu_health"), *(part.health for part in parts)]),
            pl.concat([empty_frame("core_link_samples"), *(part.link for part in parts)]),
            pl.concat([empty_frame("raw_port_samples"), *(part.port for part in parts)]),
            boards=self._index.boards(gpu),
        )

    def latest(self) -> Fetched:
        """The newest sample of each GPU and node within two exporter intervals of the server's now.

        A GPU whose series ended is not repeated. Quantities of a GPU that come from several scrape jobs stand in one
        row, with the newest of their times. Of the health of GPUs only the counts of XID codes are asked for.

        Raises:
            SourceError: No whole answer came.
        """
        with self._lock:
            self._take_warnings()
            if self._pods is not None:
                self._pods.refresh(datetime.now(UTC))
                self._resolve_anew()
            span_ms = round(2000 * self._interval_s) + MARGIN_MS
            matrix = self._quick.newest(span_ms)
            self._index.prune(max(len(matrix.labels), self._newest_series))
            samples, warnings = self._resolve(matrix, self._of_newest)
            self._newest_series = len(matrix.labels)
            if self._lanes is not None and lacks_link_sums(samples, self._index):
                lanes = self._lanes.newest(span_ms)
                single, more = self._resolve(lanes, self._of_newest)
                samples, warnings = Samples(*map(np.concatenate, zip(samples, single, strict=True))), warnings + more
                self._newest_series += len(lanes.labels)
            frames = self._frames(samples)
            warnings += self._take_warnings()
        return Fetched(
            gpu_frame(_newest(frames.gpu, frames.gpu_group, ["cluster", "node", "gpu_uuid", "mig_instance"])),
            node_frame(_newest(frames.node, frames.node_group, ["cluster", "node"])),
            warnings,
            _newest(frames.health, pl.repeat("", len(frames.health), eager=True), ["cluster", "node", "gpu_uuid"]),
            port=frames.port,
        )

    def _frames(self, samples: Samples) -> Frames:
        frames = to_frames(samples, self._index, self.name)
        return frames if self._pods is None else frames._replace(gpu=self._pods.with_jobs(frames.gpu))

    def _resolve_anew(self) -> None:
        """Forget what was resolved, where nodes are known by now that were not, or stand behind other addresses."""
        if self._pods is not None and self._pods.version != self._version:
            self._version = self._pods.version
            self._index.forget()
            self._nodes.clear()

    def _take_warnings(self) -> list[str]:
        notes = [text for api in self._apis for text in api.take_warnings()]
        readers = [reader for reader in (self._reader, self._quick, self._lanes) if reader is not None]
        return list(dict.fromkeys([*notes, *(note for reader in readers for note in reader.take_notes())]))

    def _resolve(self, matrix: Matrix, chooser: OneReplica) -> tuple[Samples, list[str]]:
        """Series of use with the samples whose times can be true, of one replica each, and what was left out."""
        unread: list[str] = []
        series = len(matrix.labels)
        name, entity = np.zeros(series, np.int64), np.zeros(series, np.int64)
        kept = np.zeros(series, bool)
        ups: list[tuple[int, dict[str, str]]] = []
        for i, raw in enumerate(matrix.labels):
            try:
                ids = self._index.get(raw)
            except KeyError:
                try:
                    labels = parse_labels(raw)
                except ValueError as error:
                    unread.append(f"{raw[:120].decode('utf-8', 'replace')}: {error}")
                    continue
                if labels.get("__name__") == UP:
                    ups.append((i, labels))
                    continue
                ids = self._learn(raw, labels)
            if ids is not None:
                name[i], entity[i] = ids
                kept[i] = True
        for i, labels in ups:
            job = labels.get("job", "")
            # Only targets that are known to bring GPUs: what else the server scrapes is not of this cluster's nodes.
            if job in self._scrape_jobs:
                # Its own labels, as service discovery set them, tell the node better than what else the instance gave.
                target = {k: v for k, v in labels.items() if k != "instance"}
                own = (self._pods.node(target) if self._pods else "") or metrics.node_name(target)
                node = own or self._nodes.get((job, labels.get("instance", "")), "")
                ids = self._index.add(("up", matrix.labels[i]), UP, labels, node, job)
                if ids is not None:
                    name[i], entity[i] = ids
                    kept[i] = True
        each = np.repeat(kept, matrix.counts)
        samples = Samples(name[kept], entity[kept], matrix.counts[kept], matrix.ts_ms[each], matrix.values[each])
        samples, warnings = drop_absurd_times(samples, self._index, datetime.now(UTC))
        if self._index.has_replicas:
            number = self._index.replica_of
            told = [max(number(matrix.labels[i]), number((UP, matrix.labels[i]))) for i in np.flatnonzero(kept)]
            replica = np.array(told, np.int64)
            samples = kept_samples(samples, chooser.keep(samples, replica, self._index.generation))
        if unread:
            warnings.append(f"{len(unread)} series left out, whose labels cannot be read, as {unread[0]}")
        return samples, [f"{self.name}: {text}" for text in warnings]

    def _learn(self, raw: bytes, labels: dict[str, str]) -> tuple[int, int] | None:
        job = labels.get("job", "")
        ids = self._index.add(raw, labels.get("__name__", ""), labels, group=job)
        if ids is not None:
            entity = self._index.entities[ids[1]]
            if entity.gpu_uuid:
                self._scrape_jobs.add(job)
                target = (job, labels.get("instance", ""))
                if self._nodes.setdefault(target, entity.node) != entity.node:
                    self._nodes[target] = ""  # one instance speaks of several nodes
        return ids

    def check(self) -> list[Finding]:
        """Reachable, clocks, metrics found, age of the newest sample."""
        try:
            asked = datetime.now(UTC).timestamp()
            server = self._api.scalar("time()")
            answered = datetime.now(UTC).timestamp()
            counts = {
                labels.get("__name__", ""): int(value)
                for labels, value in self._reader.instant("count by (__name__) (%s)")
            }
            # One name at a time: `timestamp` drops the name, and series must stay distinct.
            most = max(counts, key=lambda name: counts[name], default=UP)
            newest = self._newest_s(f'{{__name__="{most}"{self._more}}}')
        except SourceError as error:
            return [("reachable", False, str(error))]
        findings: list[Finding] = [("reachable", True, f"{self._api.url} answers")]
        skew = max(asked - server, server - answered, 0.0)
        findings.append(
            ("clock", skew <= _MAX_SKEW_S, f"server and this host differ by {skew:.1f} s"
             + ("" if skew <= _MAX_SKEW_S else ": run NTP on both, sample ages are wrong by as much"))
        )  # fmt: skip
        findings += metrics_findings(counts, self._table)
        if newest is not None:
            age = server - newest
            limit = 3 * self._interval_s
            hint = (
                "" if age <= limit else f": over {limit:g} s; are the exporters scraped, is exporter_interval_s right?"
            )
            findings.append(("fresh", age <= limit, f"newest sample is {age:.0f} s old{hint}"))
        findings += [("warning", False, text) for text in self._take_warnings()]
        return findings

    def _newest_s(self, selector: str) -> float | None:
        """Time of the newest sample, s since the epoch.

        Raw samples are looked at first: an instant query of VictoriaMetrics looks half a minute into the past.
        """
        recent = self._api.matrix(f"{selector}[{round(3000 * self._interval_s)}ms]").ts_ms
        if len(recent):
            return int(recent.max()) / 1000
        found = self._api.vector(f"max(timestamp({selector}))")
        return found[0][1] if found else None

    def close(self) -> None:
        for api in self._apis:
            api.close()


def _within(samples: Samples, first: int, last: int) -> Samples:
    inside = (samples.ts_ms >= first) & (samples.ts_ms < last)
    if inside.all():
        return samples
    owner = np.repeat(np.arange(len(samples.counts)), samples.counts)
    counts = np.bincount(owner[inside], minlength=len(samples.counts))
    return Samples(samples.name, samples.entity, counts, samples.ts_ms[inside], samples.values[inside])


def _since(part: Frames, start: datetime) -> Frames:
    """Rows from a moment on; the scrape jobs of rows, which a range has no use for, are left as they are."""
    keys = ("gpu", "node", "health", "link", "port")
    return part._replace(**{key: getattr(part, key).filter(pl.col("ts") >= start) for key in keys})


def _newest(frame: pl.DataFrame, group: pl.Series, key: list[str]) -> pl.DataFrame:
    """The newest row of each key and scrape job, rows of several scrape jobs laid over each other."""
    if frame.is_empty():
        return frame
    rows = frame.with_columns(group.alias("_group"))
    rows = rows.filter(pl.col("ts") == pl.col("ts").max().over([*key, "_group"])).sort("ts")
    if not rows.select(pl.struct(key).is_duplicated().any()).item():
        return rows.drop("_group")
    return rows.group_by(key, maintain_order=True).agg(
        pl.col("ts").max(), pl.exclude([*key, "ts", "_group"]).drop_nulls().last()
    )


def _milliseconds(moment: datetime) -> int:
    """Least whole millisecond that is not before the moment."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone; pass UTC")
    return -(-round(moment.timestamp() * 1_000_000) // 1000)

"""From the sample log of remote-write back to wide frames, for ingest and for warming up, in whatever process.

Nothing is received or written here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl

from features.metrics import DEFAULT, MetricTable
from pipelines.sources import Fetched, empty_frame, gpu_frame, node_frame
from pipelines.sources.kubernetes_names import PodNames
from pipelines.sources.remote_write_bulk import BulkSeries
from pipelines.sources.remote_write_series import USELESS
from pipelines.sources.replicas import OneReplica, kept_samples
from pipelines.sources.sample_log import Chunk, SampleLog
from pipelines.sources.series import REPLICA_LABELS, Samples
from pipelines.sources.wide import Frames, to_frames

_NOTHING = Samples(*(np.empty(0, np.int64) for _ in range(4)), np.empty(0))


class LogReader:
    """Reads the log of one cluster and keeps the series it has met.

    Args:
        name: Name of the cluster.
        folder: Folder of the log.
        table: The vocabulary.
        pods: Tells nodes and jobs behind labels of pods; None: they are passed over.
        replica_labels: Labels that tell apart senders that scrape the same exporters: one of them is read.
        interval_s: Interval of scrapes, s.
    """

    def __init__(
        self, name: str, folder: Path, table: MetricTable = DEFAULT, pods: PodNames | None = None,
        replica_labels: Sequence[str] = REPLICA_LABELS, interval_s: float = 15,
    ) -> None:  # fmt: skip
        self._name, self._log = name, SampleLog(folder)
        self._pods, self._version = pods, 0
        self._table, self._replica_labels, self._interval_s = table, replica_labels, interval_s
        self._begin()
        self._lock = threading.Lock()

    def _begin(self) -> None:
        self._series = BulkSeries(self._table, self._pods, self._replica_labels)
        self._numbers: dict[int, np.ndarray] = {}  # epoch → our number of each of its series
        self._offsets: dict[int, int] = {}
        self._chooser = OneReplica(self._interval_s * 1000)

    def fetch(self, start: datetime, end: datetime) -> Fetched:
        """Samples with start ≤ ts < end. One that was sent twice is there once, as it was sent last.

        Raises:
            SourceError: The pods of that time could not be asked for.
        """
        first, last = _milliseconds(start), _milliseconds(end)
        parts: list[Frames] = []
        warnings: list[str] = []
        with self._lock:
            if self._pods is not None:
                self._pods.read(start, end)
            self._learn()
            for minute in range(first // 60_000, -(-last // 60_000)):
                chunks, odd = self._log.minute(minute)
                warnings += [f"{self._name}: {text}" for text in odd]
                samples = self._samples(chunks, first, last)
                if len(samples.ts_ms):
                    parts.append(to_frames(samples, self._series.index, self._name))
        gpus = [part.gpu for part in parts if len(part.gpu)]
        gpu = gpu_frame(pl.concat(gpus, how="diagonal")) if gpus else gpu_frame()
        gpu = gpu if self._pods is None else self._pods.with_jobs(gpu)
        return Fetched(
            gpu,
            pl.concat([node_frame(), *(part.node for part in parts)]),
            warnings,
            pl.concat([empty_frame("core_gpu_health"), *(part.health for part in parts)]),
            pl.concat([empty_frame("core_link_samples"), *(part.link for part in parts)]),
            pl.concat([empty_frame("raw_port_samples"), *(part.port for part in parts)]),
            boards=self._series.index.boards(gpu),
        )

    def _learn(self) -> None:
        epochs = self._log.epochs()
        version = self._pods.version if self._pods else 0
        # Pruned: their series may have ended. Or their nodes are others than were known.
        if any(epoch not in epochs for epoch in self._numbers) or version != self._version:
            self._begin()
            self._version = version
        for epoch in epochs:
            theirs, labels, self._offsets[epoch] = self._log.series_columns(epoch, self._offsets.get(epoch, 0))
            if not len(theirs):
                continue
            known = self._numbers.get(epoch, np.empty(0, np.int64))
            numbers = np.full(max(len(known), int(theirs.max()) + 1), USELESS, np.int64)
            numbers[: len(known)] = known
            numbers[theirs] = self._series.add_all(labels)
            self._numbers[epoch] = numbers
        self._series.settle()

    def _samples(self, chunks: list[Chunk], first: int, last: int) -> Samples:
        numbers, times, values = [], [], []
        for chunk in chunks:
            known = self._numbers.get(chunk.epoch, np.empty(0, np.int64))
            inside = (chunk.ts_ms >= first) & (chunk.ts_ms < last) & (chunk.series < len(known))
            number = known[chunk.series[inside]]
            numbers.append(number)
            times.append(chunk.ts_ms[inside])
            values.append(chunk.values[inside])
        if not numbers:
            return _NOTHING
        number, ts_ms, value = np.concatenate(numbers), np.concatenate(times), np.concatenate(values)
        name, entity = self._series.name, self._series.entity
        use = np.flatnonzero((number >= 0) & (entity[number] >= 0))
        number, ts_ms, value = number[use], ts_ms[use], value[use]
        if not len(number):
            return _NOTHING
        order = np.lexsort((ts_ms, number))  # stable: of one time the sample that came last is last
        number, ts_ms, value = number[order], ts_ms[order], value[order]
        keep = np.append((number[1:] != number[:-1]) | (ts_ms[1:] != ts_ms[:-1]), True)
        number, ts_ms, value = number[keep], ts_ms[keep], value[keep]
        starts = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
        series = number[starts]
        counts = np.diff(np.append(starts, len(number)))
        samples = Samples(name[series].astype(np.int64), entity[series].astype(np.int64), counts, ts_ms, value)
        if not self._series.index.has_replicas:
            return samples
        return kept_samples(samples, self._chooser.keep(samples, self._series.replica[series].astype(np.int64)))


def _milliseconds(moment: datetime) -> int:
    """Least whole millisecond that is not before the moment."""
    return -(-round(moment.timestamp() * 1_000_000) // 1000)

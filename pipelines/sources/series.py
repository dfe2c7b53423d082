"""Series and what they speak of: labels resolved once each, and the flat arrays in which their samples travel.

Used by every source that reads exporters. Laying samples side by side stands in `wide.py`. No I/O here.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

import numpy as np
import polars as pl

from features import metrics
from features.exporters.metric import BOARD, FED
from features.identity import board_facts
from features.vocabulary import BOARD_FACTS, conform
from pipelines.sources.rates import Counter

UP = "up"
# What tells Prometheus servers apart that scrape the same exporters.
REPLICA_LABELS = ("replica", "prometheus_replica", "__replica__")
_FIRST_MS = 946_684_800_000  # 2000-01-01
_AHEAD = timedelta(days=1)
_UP = metrics.Variant(UP, "node", (metrics.Metric(UP, "is_up", entity="node"),))


class Names:
    """Numbers of the variants of a vocabulary, those of one kind of entity beside each other."""

    def __init__(self, table: metrics.MetricTable) -> None:
        self.variants = [*(v for entity in FED for v in table.by_label[entity].values()), _UP]
        self.ids = {(v.entity, v.label): i for i, v in enumerate(self.variants)}
        self.kind = np.array([FED.index(v.entity) for v in self.variants])
        self.is_rate = np.array([any(row.is_differentiated for row in v.rows) for v in self.variants])
        self.is_board = np.array([all(row.column == BOARD for row in v.rows) for v in self.variants])


@functools.lru_cache(maxsize=32)
def _names(table: metrics.MetricTable) -> Names:
    return Names(table)


class Entity(NamedTuple):
    """What a series speaks of, and the scrape job that brought it: series of one scrape job share their times."""

    node: str
    gpu_uuid: str
    gpu_index: int | None
    job_id: str
    group: str
    mig_instance: str = ""
    mig_profile: str = ""
    link: int | None = None
    device: str = ""
    port: str = ""
    xid: int | None = None


class Workloads(Protocol):
    """Who knows what stands behind the labels of workloads, as `kubernetes_names.PodNames`."""

    def node(self, labels: Mapping[str, str]) -> str: ...

    def token(self, labels: Mapping[str, str]) -> str: ...


class Index:
    """Series by their labels, resolved once each.

    Kept over calls: labels repeat at every read. Entries that one read did not meet are dropped when they outnumber
    those it met.

    Args:
        table: The vocabulary; with a user's own mappings where there are some.
        workloads: Tells node and job behind labels of pods. With it the job of a GPU's series may be a token, for
            `workloads` to replace in the frames. None: labels of pods are passed over.
        replica_labels: Labels that tell apart servers that scrape the same exporters.

    Attributes:
        generation: Another number when entities are numbered anew.
        has_replicas: Several replicas were met.
    """

    def __init__(
        self, table: metrics.MetricTable = metrics.DEFAULT, workloads: Workloads | None = None,
        replica_labels: Sequence[str] = REPLICA_LABELS,
    ) -> None:  # fmt: skip
        self.table = table
        self._replica_labels = tuple(replica_labels)
        self._replicas: set[int] = set()
        self._replica_of: dict[object, int] = {}
        self.generation = 0
        self._workloads = workloads
        self.names = _names(table)
        self.entities: list[Entity] = []
        self.counters: dict[tuple[int, int], Counter] = {}
        self._boards: dict[tuple[str, str], tuple[str | None, ...]] = {}
        self._told: pl.DataFrame | None = None  # the same as a frame, until something is learned
        self._ids: dict[Entity, int] = {}
        self._known: dict[object, tuple[int, int] | None] = {}

    def get(self, key: object) -> tuple[int, int] | None:
        """(name id, entity id) of a known series; None when it is of no use to us. KeyError when it is not known."""
        return self._known[key]

    def add(
        self, key: object, name: str, labels: Mapping[str, str], node: str = "", group: str = ""
    ) -> tuple[int, int] | None:
        """Resolve a series and remember it under `key`.

        Args:
            key: What identifies the series in later reads.
            name: Metric name.
            labels: Its labels.
            node: Name of its node when known otherwise.
            group: Its scrape job.

        Returns:
            (name id, entity id), or None when the series is of no use to us.
        """
        resolved = None
        lane, variants = (None, (_UP,)) if name == UP else self.table.variants.get(name, (None, ()))
        if self._workloads is not None and variants:
            node = node or self._workloads.node(labels)
        for variant in variants:
            identity = metrics.identify(variant.rows[0], labels, node, lane)
            if self._workloads is not None and identity is not None and variant.entity == "gpu" and not identity.job_id:
                identity = identity._replace(job_id=self._workloads.token(labels))
            if identity is not None:
                # What is of the GPU as a whole, or of a port, is one row whoever brought it.
                origin = group if variant.entity in ("gpu", "node") else ""
                entity = Entity(*identity[:4], origin, *identity[4:])
                resolved = self.names.ids[variant.entity, variant.label], self._entity(entity)
                if variant.entity == "gpu" and any(facts := board_facts(labels)):
                    known = self._boards.get(identity[:2], facts)
                    self._boards[identity[:2]] = tuple(map(_either, facts, known))
                    self._told = None
                break
        if key is not None and resolved is not None and (number := self.replica(labels)) >= 0:
            self._replica_of[key] = number
        self._known[key] = resolved
        return resolved

    @property
    def has_replicas(self) -> bool:
        return len(self._replicas) > 1

    def replica(self, labels: Mapping[str, str]) -> int:
        """Number of the replica that labels tell, the same in every process; -1 when they tell none."""
        for label in self._replica_labels:
            if labels.get(label):
                told = "\0".join(labels.get(label, "") for label in self._replica_labels)
                number = zlib.crc32(told.encode("utf-8", "replace")) >> 1
                self._replicas.add(number)
                return number
        return -1

    def replica_of(self, key: object) -> int:
        """Number of the replica of a series that `add` has met; -1 when its labels tell none."""
        return self._replica_of.get(key, -1)

    def boards(self, gpu: pl.DataFrame) -> pl.DataFrame:
        """What labels tell of the boards in a frame.

        Args:
            gpu: Rows of `raw_gpu_samples`.

        Returns:
            Rows of `core_boards`, one a GPU of which something is known, at the time of its first row.
        """
        if self._told is None:
            names = ("node", "gpu_uuid", *BOARD_FACTS)
            columns = [*zip(*self._boards, strict=True), *zip(*self._boards.values(), strict=True)] or [()] * len(names)
            self._told = pl.DataFrame(pl.Series(name, one, pl.String) for name, one in zip(names, columns, strict=True))
        return boards_at(gpu, self._told)

    def whole(self, number: int) -> int:
        """Entity of the health of a GPU, by an entity of the GPU itself."""
        return self._entity(Entity(*self.entities[number][:2], None, "", ""))

    def _entity(self, entity: Entity) -> int:
        number = self._ids.get(entity)
        if number is None:
            number = self._ids[entity] = len(self.entities)
            self.entities.append(entity)
        return number

    def prune(self, met: int) -> None:
        """After a read that met `met` series: forget everything when most of what is known is gone."""
        if len(self._known) > 1000 and len(self._known) > 3 * met:
            self.forget()

    def forget(self) -> None:
        """Resolve all series anew when they are met again."""
        self.entities, self._ids, self._known, self.counters, self._boards = [], {}, {}, {}, {}
        self._told = None
        self._replica_of = {}
        self.generation += 1


def boards_at(gpu: pl.DataFrame, told: pl.DataFrame) -> pl.DataFrame:
    """Rows of `core_boards`: what is told of the boards in a frame, at the time of each one's first row.

    Args:
        gpu: Rows of `raw_gpu_samples`.
        told: `node`, `gpu_uuid` and `BOARD_FACTS`, a row a board.
    """
    first = gpu.group_by("cluster", "node", "gpu_uuid").agg(pl.col("ts").min())
    return conform(first.join(told, on=["node", "gpu_uuid"]), "core_boards").sort("node", "gpu_uuid")


def _either(new: str | None, known: str | None) -> str | None:
    return new or known


class Samples(NamedTuple):
    """Resolved series and their samples, in flat arrays.

    Attributes:
        name: Name id of each series.
        entity: Entity id of each series.
        counts: Number of samples of each series.
        ts_ms: Time of each sample, ms since the epoch, series after series.
        values: Value of each sample.
    """

    name: np.ndarray
    entity: np.ndarray
    counts: np.ndarray
    ts_ms: np.ndarray
    values: np.ndarray


def drop_absurd_times(samples: Samples, index: Index, now: datetime) -> tuple[Samples, list[str]]:
    """Samples whose time can be true: from 2000 to one day ahead of now. Others would not fit a time column.

    Args:
        samples: Of any metrics.
        index: The index that resolved them.
        now: UTC.

    Returns:
        The samples left (a series may be left with none), and a warning that counts the others and names one.
    """
    last = round((now + _AHEAD).timestamp() * 1000)
    inside = (samples.ts_ms >= _FIRST_MS) & (samples.ts_ms <= last)
    if inside.all():
        return samples, []
    owner = np.repeat(np.arange(len(samples.counts)), samples.counts)
    odd = int(np.argmin(inside))
    name, entity = index.names.variants[samples.name[owner[odd]]].label, index.entities[samples.entity[owner[odd]]]
    warning = (
        f"{len(inside) - int(inside.sum())} samples have an impossible time and are left out, "
        f"as {name} of {entity.gpu_uuid or entity.node} on {entity.node} at {int(samples.ts_ms[odd])} ms "
        "since 1970: is that exporter's clock right?"
    )
    counts = np.bincount(owner[inside], minlength=len(samples.counts))
    return Samples(samples.name, samples.entity, counts, samples.ts_ms[inside], samples.values[inside]), [warning]

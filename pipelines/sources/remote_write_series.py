"""Series that remote-write brings, each resolved once: its number, and which metric of which GPU, node or link it is.

A series is known by a 64-bit hash of its labels as sent (keyed anew in every process), not by the labels: a million
label sets would be half a gigabyte. Two of a million series share one with a chance of 3e-8. Nothing is read or stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from features import metrics
from features.exporters.nvidia_smi import SMI
from pipelines.sources.remote_write_wire import (
    FULL,
    SHORT,
    metric_name,
    parse_labels,
    parse_series,
    tails,
    without_name,
)
from pipelines.sources.series import REPLICA_LABELS, UP, Index, Workloads

USELESS = -2
_UNKNOWN = -1
_SAME_LABELS = 4096  # label sets without their names that are remembered while new series come


class _Labels(NamedTuple):
    """Labels that several metrics share: by name, the node and the replica they tell, the entity of each kind."""

    by_name: dict[str, str]
    node: str
    entities: dict[str, int]
    replica: int


def _plain_names(index: Index) -> dict[str, tuple[int, str]]:
    """Metrics whose entity depends on the labels alone: name id, and the kind within which the entity is the same."""
    plain = {}
    for name, (lane, variants) in index.table.variants.items():
        if lane is None and len(variants) == 1 and not variants[0].rows[0].where:
            only = variants[0]
            kind = f"{only.entity} {name.startswith(SMI)}"  # UUIDs of nvidia_gpu_exporter lack their prefix
            plain[name] = index.names.ids[only.entity, only.label], kind
    return plain


class Series:
    """Series by number.

    Args:
        table: The vocabulary.
        workloads: As of `Index`.
        replica_labels: As of `Index`.

    Attributes:
        index: Resolves labels; holds the entities.
        new: Number and labels of series that `take_new` has not given yet.
    """

    def __init__(
        self, table: metrics.MetricTable = metrics.DEFAULT, workloads: Workloads | None = None,
        replica_labels: Sequence[str] = REPLICA_LABELS,
    ) -> None:  # fmt: skip
        self.index = Index(table, workloads, replica_labels)
        self._workloads = workloads
        self.new: list[tuple[int, bytes]] = []
        self._numbers: dict[int, int] = {}
        self._name_ids, self._entity_ids = array("i"), array("i")  # -1 while they are not known
        self._replica_ids = array("i")
        self._arrays = np.empty((0, 3), np.int32)
        self._wanted: dict[bytes, str] = {name.encode(): name for name in (*table.variants, UP)}
        self._same: dict[bytes, _Labels] = {}
        self._plain = _plain_names(self.index)
        self._scrape_jobs: set[str] = set()
        self._nodes: dict[tuple[str, str], str] = {}
        self._ups: list[tuple[int, dict[str, str]]] = []

    def __len__(self) -> int:
        return len(self._name_ids)

    def _id_arrays(self) -> np.ndarray:
        known = len(self._arrays)
        if known < len(self):
            every = (self._name_ids, self._entity_ids, self._replica_ids)
            more = [np.array(ids[known:], np.int32) for ids in every]
            self._arrays = np.concatenate([self._arrays, np.stack(more, axis=1)])
        return self._arrays

    @property
    def name(self) -> np.ndarray:
        """Name id of each series, -1 while it is not known."""
        return self._id_arrays()[:, 0]

    @property
    def entity(self) -> np.ndarray:
        """Entity id of each series, -1 while it is not known."""
        return self._id_arrays()[:, 1]

    @property
    def replica(self) -> np.ndarray:
        """Number of the replica of each series, -1 where no label tells one."""
        return self._id_arrays()[:, 2]

    def take(self, entries: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Samples of series of use.

        Args:
            entries: Series of one request as bytes.

        Returns:
            Number of the series, time in ms and value of each sample, in the order sent for each series; and how many
            entries were of no use. Series met for the first time are added to `new`.

        Raises:
            WireError: An entry of a metric of use cannot be read. Nothing of the request may be taken then.
        """
        get = self._numbers.get
        sent = len(entries)
        if entries and len(min(entries, key=len)) < FULL:  # a name and a sample are longer
            entries = [one for one in entries if len(one) >= FULL]
        if not entries:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), sent
        # Built-ins over a list: a method or NumPy on each entry would cost several times as much.
        numbers = np.array([get(hash(one[:-FULL]), _UNKNOWN) for one in entries], np.int64)
        is_form, ts_ms, values = tails(entries, FULL)
        left = np.flatnonzero((numbers == _UNKNOWN) | ~is_form)
        if len(left):
            rest = [entries[i] for i in left.tolist()]
            is_form, short_ms, zeros = tails(rest, SHORT)
            found = np.array([get(hash(one[:-SHORT]), _UNKNOWN) for one in rest], np.int64)
            found[~is_form] = _UNKNOWN
            numbers[left], ts_ms[left], values[left] = found, short_ms, zeros
        odd: list[tuple[int, int, int, float]] = []
        taken = 0
        for i in np.flatnonzero(numbers == _UNKNOWN).tolist():
            number, samples = self._general(entries[i])
            numbers[i] = USELESS
            if number != USELESS:
                taken += 1
                odd += [(i, number, ts, value) for ts, value in samples]
        useful = numbers >= 0
        kept = int(useful.sum())
        if kept < len(entries):
            numbers, ts_ms, values = numbers[useful], ts_ms[useful], values[useful]
        if odd:
            at, number, time, value = (np.array(column) for column in zip(*odd, strict=True))
            order = np.argsort(np.concatenate([np.flatnonzero(useful), at]), kind="stable")
            numbers = np.concatenate([numbers, number])[order]
            ts_ms, values = np.concatenate([ts_ms, time])[order], np.concatenate([values, value])[order]
        return numbers, ts_ms, values, sent - kept - taken

    def _general(self, entry: bytes) -> tuple[int, list[tuple[int, float]]]:
        name = metric_name(entry)
        if name is not None and name not in self._wanted:
            return USELESS, []
        labels, samples = parse_series(entry)
        return (self.add(labels), samples) if samples else (USELESS, [])

    def add(self, labels: bytes) -> int:
        """Number of a series by its labels as bytes; `USELESS` when it is of no use.

        Raises:
            WireError: They cannot be read.
        """
        key = hash(labels)
        number = self._numbers.get(key)
        if number is None:
            number = self._learn(labels)
            self._numbers[key] = number
            if number != USELESS:
                self.new.append((number, labels))
        return number

    def _learn(self, labels: bytes) -> int:
        name = metric_name(labels)
        if name is None:
            rest = labels
            name = parse_labels(labels).get("__name__", "").encode()
        else:
            rest = without_name(labels, name)
        text = self._wanted.get(name)
        if text is None:
            return USELESS
        found = self._same.get(rest)
        if found is None:
            if len(self._same) >= _SAME_LABELS:
                self._same.clear()
            parsed = parse_labels(rest)
            parsed.pop("__name__", None)
            found = self._same[rest] = _Labels(parsed, self._node(parsed), {}, self.index.replica(parsed))
        by_name = found.by_name
        plain = self._plain.get(text)
        if plain is not None and plain[1] in found.entities:
            return self._next(plain[0], found.entities[plain[1]], found.replica)
        job = by_name.get("job", "")
        if text == UP:
            self._ups.append((len(self), by_name))
            return self._next(-1, -1, found.replica)
        ids = self._resolve(text, by_name, found.node, job)
        if ids is None:
            return USELESS
        if plain is not None:
            found.entities[plain[1]] = ids[1]
        return self._next(*ids, found.replica)

    def _node(self, labels: dict[str, str]) -> str:
        return (self._workloads.node(labels) if self._workloads else "") or metrics.node_name(labels)

    def _resolve(self, name: str, labels: dict[str, str], node: str, job: str) -> tuple[int, int] | None:
        ids = self.index.add(None, name, labels, node, job)
        if ids is None:
            return None
        entity = self.index.entities[ids[1]]
        if entity.gpu_uuid:
            self._scrape_jobs.add(job)
            target = (job, labels.get("instance", ""))
            if self._nodes.setdefault(target, entity.node) != entity.node:
                self._nodes[target] = ""  # one instance speaks of several nodes
        return ids

    def _next(self, name: int, entity: int, replica: int) -> int:
        self._name_ids.append(name)
        self._entity_ids.append(entity)
        self._replica_ids.append(replica)
        return len(self._name_ids) - 1

    def settle(self) -> None:
        """Resolve `up` series of scrape jobs that are known by now to bring GPUs, as the Prometheus reader does."""
        waiting = []
        for number, labels in self._ups:
            job = labels.get("job", "")
            if job not in self._scrape_jobs:
                waiting.append((number, labels))
                continue
            own = self._node({k: v for k, v in labels.items() if k != "instance"})
            node = own or self._nodes.get((job, labels.get("instance", "")), "")
            ids = self.index.add(None, UP, labels, node, job)
            if ids is not None:
                self._id_arrays()[number, :2] = ids
                self._name_ids[number], self._entity_ids[number] = ids
        self._ups = waiting

    def take_new(self) -> Iterator[tuple[int, bytes]]:
        """Number and labels of each series met since the last call."""
        new, self.new = self.new, []
        return iter(new)

"""From series to wide rows: one row a GPU (or node) and time, one column a quantity.

Used by every source that reads exporters. Samples of one scrape share their time stamp, so nearly always every metric
of a GPU has the same times and its values can be laid side by side without a join; where it has not, they are joined.
No I/O here; names and units stand in `features/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np
import polars as pl

from features import metrics
from features.vocabulary import TIME
from pipelines.sources import empty_frame, gpu_frame, node_frame

UP = "up"
_NAMES = (*metrics.GPU_NAMES, *metrics.NODE_NAMES, UP)
_NAME_IDS = {name: i for i, name in enumerate(_NAMES)}
_GPU_COUNT = len(metrics.GPU_NAMES)
_FIRST_MS = 946_684_800_000  # 2000-01-01
_AHEAD = timedelta(days=1)
_UP_METRIC = metrics.Metric(UP, "is_up", entity="node")


class Entity(NamedTuple):
    """What a series speaks of, and the scrape job that brought it: series of one scrape job share their times."""

    node: str
    gpu_uuid: str
    gpu_index: int | None
    job_id: str
    group: str
    mig_instance: str = ""
    mig_profile: str = ""


class Index:
    """Series by their labels, resolved once each.

    Kept over calls: labels repeat at every read. Entries that one read did not meet are dropped when they outnumber
    those it met.
    """

    def __init__(self) -> None:
        self.entities: list[Entity] = []
        self._ids: dict[Entity, int] = {}
        self._known: dict[object, tuple[int, int] | None] = {}
        self._met = 0

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
        if name in _NAME_IDS:
            rows = (_UP_METRIC,) if name == UP else metrics.BY_NAME[name]
            identity = next(filter(None, (metrics.identify(row, labels, node) for row in rows)), None)
            if identity is not None:
                whose, instance = identity[:4], identity[4:]
                resolved = _NAME_IDS[name], self._entity(Entity(*whose, group, *instance))
        self._known[key] = resolved
        return resolved

    def _entity(self, entity: Entity) -> int:
        number = self._ids.get(entity)
        if number is None:
            number = self._ids[entity] = len(self.entities)
            self.entities.append(entity)
        return number

    def prune(self, met: int) -> None:
        """After a read that met `met` series: forget everything when most of what is known is gone."""
        if len(self._known) > 1000 and len(self._known) > 3 * met:
            self.entities, self._ids, self._known = [], {}, {}


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
    name, entity = _NAMES[samples.name[owner[odd]]], index.entities[samples.entity[owner[odd]]]
    warning = (
        f"{len(inside) - int(inside.sum())} samples have an impossible time and are left out, "
        f"as {name} of {entity.gpu_uuid or entity.node} on {entity.node} at {int(samples.ts_ms[odd])} ms "
        "since 1970: is that exporter's clock right?"
    )
    counts = np.bincount(owner[inside], minlength=len(samples.counts))
    return Samples(samples.name, samples.entity, counts, samples.ts_ms[inside], samples.values[inside]), [warning]


class Frames(NamedTuple):
    """Wide frames of one read.

    Attributes:
        gpu: Subset of `raw_gpu_samples`.
        node: Columns of `core_node_samples`.
        gpu_group: Scrape job of each GPU row.
        node_group: Scrape job of each node row.
        health: Columns of `core_gpu_health`.
        link: Columns of `core_link_samples`.
        port: Columns of `raw_port_samples`.
    """

    gpu: pl.DataFrame
    node: pl.DataFrame
    gpu_group: pl.Series
    node_group: pl.Series
    health: pl.DataFrame
    link: pl.DataFrame
    port: pl.DataFrame


def to_frames(samples: Samples, index: Index, cluster: str) -> Frames:
    """Wide frames of GPUs, nodes, links and ports.

    Args:
        samples: Of any metrics; order within a series ascending in time.
        index: The index that resolved them.
        cluster: Name of the cluster, for the key.
    """
    is_gpu = samples.name < _GPU_COUNT
    gpu, gpu_group = _frame(_select(samples, is_gpu), index, cluster, "gpu")
    node, node_group = _frame(_select(samples, ~is_gpu), index, cluster, "node")
    return Frames(
        gpu,
        node,
        gpu_group,
        node_group,
        empty_frame("core_gpu_health"),
        empty_frame("core_link_samples"),
        empty_frame("raw_port_samples"),
    )


def _select(samples: Samples, series: np.ndarray) -> Samples:
    if series.all():
        return samples
    each = np.repeat(series, samples.counts)
    return Samples(
        samples.name[series], samples.entity[series], samples.counts[series], samples.ts_ms[each], samples.values[each]
    )


def _frame(samples: Samples, index: Index, cluster: str, entity: metrics.Entity) -> tuple[pl.DataFrame, pl.Series]:
    if not len(samples.ts_ms):
        frame = gpu_frame() if entity == "gpu" else node_frame()
        return frame, pl.Series("group", [], dtype=pl.String)
    wide = _widen(samples)
    used = wide["entity"].to_numpy()
    present, where = np.unique(used, return_inverse=True)
    rows = [index.entities[i] for i in present]
    known = pl.DataFrame(
        {
            "node": [row.node for row in rows],
            "gpu_uuid": [row.gpu_uuid for row in rows],
            "gpu_index": pl.Series([row.gpu_index for row in rows], dtype=pl.Int32),
            "job_id": [row.job_id or None for row in rows],
            "group": [row.group for row in rows],
            "mig_instance": [row.mig_instance or None for row in rows],
            "mig_profile": [row.mig_profile or None for row in rows],
        },
        schema_overrides=dict.fromkeys(("job_id", "mig_instance", "mig_profile"), pl.String),
    )[where]
    keys = ("node", "gpu_uuid", "gpu_index", "job_id") if entity == "gpu" else ("node",)
    frame = wide.drop("entity").with_columns(
        pl.col("ts").cast(pl.Datetime("ms", "UTC")).cast(TIME),
        pl.lit(cluster).alias("cluster"),
        *(known[name] for name in keys),
        *([known["mig_instance"], known["mig_profile"]] if entity == "gpu" else []),
    )
    if UP in frame.columns:
        frame = frame.with_columns((pl.col(UP) > 0).alias("is_up")).drop(UP)
    frame = metrics.to_columns(frame, entity)
    return (gpu_frame(frame) if entity == "gpu" else node_frame(frame)), known["group"]


def _widen(samples: Samples) -> pl.DataFrame:
    """One row an (entity, ts), one column a metric name; several series of a name and entity merge by the maximum."""
    order = np.lexsort((samples.entity, samples.name))
    counts = samples.counts[order]
    starts = (np.cumsum(samples.counts) - samples.counts)[order]
    take = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    ts, values = samples.ts_ms[take], samples.values[take]
    entity = np.repeat(samples.entity[order], counts)
    ids, first = np.unique(samples.name[order], return_index=True)
    bounds = [*(np.cumsum(counts) - counts)[first], len(ts)]
    slices = sorted(
        ((_NAMES[ids[k]], slice(bounds[k], bounds[k + 1])) for k in range(len(ids))),
        key=lambda item: item[1].start - item[1].stop,
    )
    base = slices[0][1]
    base_entity, base_ts = entity[base], ts[base]
    step = (np.diff(base_entity) == 0) & (np.diff(base_ts) <= 0)
    if (
        step.any()
    ):  # several series of one metric and entity: the quick way would set rows beside each other that differ
        base_entity, base_ts = np.empty(0, entity.dtype), np.empty(0, ts.dtype)
    columns: dict[str, np.ndarray] = {"entity": base_entity, "ts": base_ts}
    others: list[tuple[str, slice]] = []
    for name, part in slices:
        same = len(base_ts) == part.stop - part.start
        if same and np.array_equal(entity[part], base_entity) and np.array_equal(ts[part], base_ts):
            columns[name] = values[part]
        else:
            others.append((name, part))
    wide = pl.DataFrame(columns)
    for name, part in others:
        more = pl.DataFrame({"entity": entity[part], "ts": ts[part], name: values[part]})
        more = more.group_by("entity", "ts").agg(pl.col(name).max())
        wide = wide.join(more, on=["entity", "ts"], how="full", coalesce=True)
    return wide.sort("entity", "ts") if others else wide

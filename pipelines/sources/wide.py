"""From series to wide rows: one row a GPU (node, NVLink or port) and time, one column a quantity.

Used by every source that reads exporters. Samples of one scrape share their time stamp, so nearly always every metric
of a GPU has the same times and its values can be laid side by side without a join; where it has not, they are joined.
No I/O here; names and units stand in `features/metrics.py`, differences of counters in `rates.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from features import metrics, xid_counts
from features.exporters.metric import FED
from features.job_facts import with_job_facts
from features.vocabulary import TIME, conform
from pipelines.sources import empty_frame, gpu_frame, node_frame
from pipelines.sources.rates import rates_of
from pipelines.sources.series import UP, Entity, Index, Names, Samples, drop_absurd_times

__all__ = [
    "LINK_TRAFFIC", "UP", "Entity", "Frames", "Index", "Samples", "drop_absurd_times", "lacks_link_sums", "to_frames",
]  # fmt: skip

_KEYS: dict[metrics.Entity, tuple[str, ...]] = {
    "gpu": ("node", "gpu_uuid", "gpu_index", "job_id", "mig_instance", "mig_profile"),
    "health": ("node", "gpu_uuid"),
    "xid": ("node", "gpu_uuid", "xid"),
    "job": ("node", "gpu_uuid", "job_id"),
    "link": ("node", "gpu_uuid", "link"),
    "port": ("node", "device", "port"),
    "node": ("node",),
}
_TABLES = {"health": "core_gpu_health", "link": "core_link_samples", "port": "raw_port_samples"}
# Column of a GPU → column of its links.
_SUMS = {
    "nvlink_tx_bytes_per_s": "link_tx_bytes_per_s",
    "nvlink_rx_bytes_per_s": "link_rx_bytes_per_s",
    "nvlink_error_total": "link_error_total",
}
_UNKNOWN = "unknown_flags"
LINK_TRAFFIC = ("link_tx_bytes_per_s", "link_rx_bytes_per_s")
_KEY_TYPES: dict[str, type[pl.DataType]] = {"gpu_index": pl.Int32, "link": pl.Int32, "xid": pl.Int32}


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
    samples = _with_rates(samples, index)
    is_board = index.names.is_board[samples.name]
    places = _places(_select(samples, is_board), index) if is_board.any() else None
    samples = _select(samples, ~is_board) if is_board.any() else samples
    kinds = index.names.kind[samples.name]
    made: dict[metrics.Entity, tuple[pl.DataFrame, pl.Series]] = {
        entity: _frame(_select(samples, kinds == number), index, cluster, entity) for number, entity in enumerate(FED)
    }
    (gpu, gpu_group), link = made["gpu"], made["link"][0]
    gpu, health = _with_codes(_placed(gpu, places), made["health"][0], made["xid"][0])
    gpu = with_job_facts(gpu, made["job"][0])
    return Frames(
        gpu_frame(_with_links(gpu, link)), made["node"][0], gpu_group, made["node"][1], health, link, made["port"][0]
    )


def _places(samples: Samples, index: Index) -> pl.DataFrame:
    """Indices of GPUs of which other series than their samples tell: `node`, `gpu_uuid`, `ts`, `place`."""
    present, where = np.unique(np.repeat(samples.entity, samples.counts), return_inverse=True)
    owners = [index.entities[number] for number in present]
    told = pl.DataFrame(
        [(owner.node, owner.gpu_uuid, owner.gpu_index) for owner in owners],
        schema={"node": pl.String, "gpu_uuid": pl.String, "place": pl.Int32},
        orient="row",
    )[where]
    ts = pl.Series("ts", samples.ts_ms, dtype=pl.Int64).cast(pl.Datetime("ms", "UTC")).cast(TIME)
    told = told.with_columns(ts)
    return told.drop_nulls().unique(["node", "gpu_uuid", "ts"], keep="last")


def _placed(gpu: pl.DataFrame, places: pl.DataFrame | None) -> pl.DataFrame:
    """Samples with the index that the same scrape told: it changes when a node boots."""
    if places is None or gpu.is_empty():
        return gpu
    gpu = gpu.join(places, on=["node", "gpu_uuid", "ts"], how="left", maintain_order="left")
    return gpu.with_columns(pl.coalesce("gpu_index", "place").alias("gpu_index")).drop("place")


def _with_codes(gpu: pl.DataFrame, health: pl.DataFrame, codes: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Counts of XID codes with the health of their GPU; the code that came last with its samples."""
    if codes.is_empty():
        return gpu, health
    key, name = list(xid_counts.KEY), "xid_last"
    folded = xid_counts.folded(codes)
    told = folded.filter(pl.any_horizontal(pl.col("xid_events", "xid_counts").is_not_null())).drop(name)
    health = health.drop("xid_events", "xid_counts").join(told, on=key, how="full", coalesce=True)
    last = folded.filter(pl.col(name).is_not_null()).select(*key, pl.col(name).alias("_last"))
    if not last.is_empty() and not gpu.is_empty():
        given = [name] if name in gpu.columns else []
        gpu = gpu.join(last, on=key, how="left", maintain_order="left")
        gpu = gpu.with_columns(pl.coalesce([*given, "_last"]).alias(name)).drop("_last")
    return gpu, conform(health, "core_gpu_health")


def lacks_link_sums(samples: Samples, index: Index) -> bool:
    """Whether some GPU among the samples has no series of its whole NVLink traffic, in one direction or the other."""
    variants = index.names.variants
    gpus = np.unique(samples.entity[index.names.kind[samples.name] == FED.index("gpu")])
    for whole in (whole for whole, part in _SUMS.items() if part in LINK_TRAFFIC):
        names = [i for i, v in enumerate(variants) if v.entity == "gpu" and any(row.column == whole for row in v.rows)]
        if not np.isin(gpus, samples.entity[np.isin(samples.name, names)]).all():
            return True
    return False


def _with_rates(samples: Samples, index: Index) -> Samples:
    is_rate = index.names.is_rate[samples.name]
    if not is_rate.any():
        return samples
    keys = list(zip(samples.name.tolist(), samples.entity.tolist(), strict=True))
    values, kept = rates_of(is_rate, keys, samples.counts, samples.ts_ms, samples.values, index.counters)
    owner = np.repeat(np.arange(len(samples.counts)), samples.counts)
    counts = np.bincount(owner[kept], minlength=len(samples.counts))
    return Samples(samples.name, samples.entity, counts, samples.ts_ms[kept], values[kept])


def _with_links(gpu: pl.DataFrame, link: pl.DataFrame) -> pl.DataFrame:
    """Throughput and errors of a GPU from those of its links, where nothing gives the whole."""
    names = {whole: part for whole, part in _SUMS.items() if link[part].null_count() < len(link)}
    if gpu.is_empty() or not names:
        return gpu
    key = ("node", "gpu_uuid", "ts")
    sums = link.group_by(key).agg(
        pl.when(pl.col(part).count() > 0).then(pl.col(part).sum()).alias(f"_{whole}") for whole, part in names.items()
    )
    joined = gpu.join(sums, on=key, how="left", maintain_order="left")
    return joined.with_columns(
        pl.coalesce([*([whole] if whole in gpu.columns else []), f"_{whole}"]).alias(whole) for whole in names
    ).drop(f"_{whole}" for whole in names)


def _select(samples: Samples, series: np.ndarray) -> Samples:
    if series.all():
        return samples
    each = np.repeat(series, samples.counts)
    return Samples(
        samples.name[series], samples.entity[series], samples.counts[series], samples.ts_ms[each], samples.values[each]
    )


def _empty(entity: metrics.Entity) -> pl.DataFrame:
    if entity in ("xid", "job"):
        return pl.DataFrame()
    if entity in _TABLES:
        return empty_frame(_TABLES[entity])
    return gpu_frame() if entity == "gpu" else node_frame()


def _frame(samples: Samples, index: Index, cluster: str, entity: metrics.Entity) -> tuple[pl.DataFrame, pl.Series]:
    if not len(samples.ts_ms):
        return _empty(entity), pl.Series("group", [], dtype=pl.String)
    wide = _widen(samples, index.names)
    present, where = np.unique(wide["entity"].to_numpy(), return_inverse=True)
    rows = [index.entities[i] for i in present]
    known = pl.DataFrame(
        pl.Series(name, [getattr(row, name) for row in rows], dtype=_KEY_TYPES.get(name, pl.String))
        for name in (*_KEYS[entity], "group")
    )
    absent = [name for name in ("job_id", "mig_instance", "mig_profile") if name in known.columns]
    known = known.with_columns(pl.col(name).replace("", None) for name in absent)[where]
    frame = wide.drop("entity").with_columns(
        pl.col("ts").cast(pl.Datetime("ms", "UTC")).cast(TIME),
        pl.lit(cluster).alias("cluster"),
        *(known[name] for name in _KEYS[entity]),
    )
    if UP in frame.columns:
        frame = frame.with_columns((pl.col(UP) > 0).alias("is_up")).drop(UP)
    frame = metrics.to_columns(frame, entity, index.table)
    if entity == "gpu" and _UNKNOWN not in frame.columns:
        frame = frame.with_columns(pl.lit(None, dtype=pl.String).alias(_UNKNOWN))
    if entity in _TABLES:
        return conform(frame, _TABLES[entity]), known["group"]
    if entity in ("xid", "job"):
        return frame, known["group"]
    return (gpu_frame(frame) if entity == "gpu" else node_frame(frame)), known["group"]


def _widen(samples: Samples, names: Names) -> pl.DataFrame:
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
        ((names.variants[ids[k]].label, slice(bounds[k], bounds[k + 1])) for k in range(len(ids))),
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

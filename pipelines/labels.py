"""Labels in the store: runs the rules of `features/labels.py` over settled samples and keeps what they say.

A label needs a past (what the job was used to) and a future (whether the condition held), so each run reads more than
it writes. No rules here.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.conditions import INPUTS
from features.labels import label_bottlenecks
from features.thresholds import ThresholdBook
from features.vocabulary import GPU_KEYS, GPU_QUANTITIES
from pipelines.derive import Derived
from pipelines.job_history import read_jobs, read_nodes, running_jobs
from pipelines.settings import IngestSettings
from pipelines.spans import derived_from, floor_time, settled_until, split
from pipelines.store import Store, Writer

TABLE = "feat_labels"
_PAST = timedelta(minutes=30)  # what a job's own plateau and pace are taken from
_FUTURE = timedelta(minutes=2)  # until it is known whether a condition held
_OPEN = timedelta(hours=6)  # conditions that lasted at the end of a span are looked at again this long
_STEP = timedelta(minutes=5)
_PIECE = timedelta(hours=2)
MAX_SAMPLES = 3_000_000  # rows held at once: about 1 GB with what the rules make of them
_COLUMNS = tuple(name for name in INPUTS if name in GPU_QUANTITIES)


def derive_labels(
    store: Store, cluster: str, settings: IngestSettings, *, every: timedelta = timedelta(minutes=15)
) -> Derived:
    """Bring `feat_labels` up to the settled samples.

    Args:
        store: The store.
        cluster: Name of the cluster.
        settings: Of ingest.
        every: Nothing is done when less than this is new: each run reads half an hour of past as well.
    """
    settled = settled_until(store, cluster, settings)
    if settled is None:
        return Derived()
    end = floor_time(settled - _FUTURE, _STEP)
    begin = derived_from(store, cluster, TABLE, _STEP, end)
    report = Derived(0, begin)
    if begin is None or end - begin < every:
        return report
    book = ThresholdBook.from_nodes(read_nodes(store, cluster))
    for first, last in split(begin, end, _PIECE):
        since = _first_open(store, cluster, first)
        jobs = read_jobs(store, cluster, since - _PAST)
        parts = []
        for nodes in node_batches(store, cluster, since - _PAST, last + _FUTURE, MAX_SAMPLES):
            samples = _samples(store, cluster, since - _PAST, last + _FUTURE, nodes)
            parts.append(label_bottlenecks(samples, jobs, book))
            del samples
        labels = pl.concat(parts) if parts else None

        def work(
            writer: Writer, since: datetime = since, last: datetime = last, labels: pl.DataFrame | None = labels
        ) -> int:
            rows = 0
            if labels is not None:
                onset = pl.col("onset_time")
                inside = labels.filter((onset >= since) & (onset < last)).with_columns(pl.lit(cluster).alias("cluster"))
                rows = writer.replace_window(TABLE, cluster, since, last, inside)
            writer.set_mark(cluster, TABLE, last)
            return rows

        report.rows += store.transact(work, purpose="labels")
        report.until = last
    return report


def _first_open(store: Store, cluster: str, begin: datetime) -> datetime:
    """Onset of the oldest condition that still lasted when labels were last made."""
    found = store.query(
        f'SELECT min(onset_time) AS at FROM {TABLE} WHERE "cluster" = ? AND clear_time IS NULL AND NOT is_censored '
        "AND onset_time >= ? AND onset_time < ?",
        [cluster, begin - _OPEN, begin],
    )
    return min(found["at"][0] or begin, begin)


def node_batches(store: Store, cluster: str, begin: datetime, end: datetime, most: int) -> list[list[str] | None]:
    """Nodes whose samples are labelled together: all at once where they fit, else the nodes of shared jobs together.

    Peers are compared within a job, so no job may be cut in two; one that is larger than `most` rows stays whole.

    Args:
        store: The store.
        cluster: Name of the cluster.
        begin: Start of the samples.
        end: End of the samples.
        most: Rows held at once.

    Returns:
        Lists of nodes, or `[None]` for all of them; empty when there are no samples.
    """
    counts = dict(
        store.query(
            'SELECT node, count(*) AS n FROM core_gpu_samples WHERE "cluster" = ? AND ts >= ? AND ts < ? GROUP BY node',
            [cluster, begin, end],
        ).iter_rows()
    )
    if sum(counts.values()) <= most:
        return [None] if counts else []
    group = {node: node for node in counts}

    def root(node: str) -> str:
        while group[node] != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for nodes in running_jobs(store, cluster, begin, end)["node_list"]:
        known = [node for node in nodes.split(",") if node in group]
        for node in known[1:]:
            group[root(node)] = root(known[0])
    members: dict[str, list[str]] = {}
    for node in sorted(counts):
        members.setdefault(root(node), []).append(node)
    batches: list[list[str] | None] = []
    batch, rows = [], 0
    for together in members.values():
        size = sum(counts[node] for node in together)
        if batch and rows + size > most:
            batches.append(batch)
            batch, rows = [], 0
        batch, rows = batch + together, rows + size
    return [*batches, batch]


def _samples(store: Store, cluster: str, begin: datetime, end: datetime, nodes: list[str] | None) -> pl.DataFrame:
    names = ", ".join((*GPU_KEYS, *_COLUMNS))
    chosen = "" if nodes is None else " AND node = ANY(?)"
    return store.query(
        f'SELECT {names} FROM core_gpu_samples WHERE "cluster" = ? AND ts >= ? AND ts < ?{chosen}',
        [cluster, begin, end, *([] if nodes is None else [nodes])],
    )

"""Labels in the store: runs the rules of `features/labels.py` over settled samples and keeps what they say.

A label needs a past (what the job was used to) and a future (whether the condition held), so each run reads more than
it writes. No rules here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import polars as pl

from features.conditions import INPUTS
from features.label_fabric import LOADS, RATES
from features.label_hosts import COLUMNS as HOST_COLUMNS
from features.labels import label_bottlenecks, label_ranks, label_shortages
from features.occupancy import queue_occupancy, usable_gpus
from features.thresholds import ThresholdBook
from features.vocabulary import GPU_KEYS, GPU_QUANTITIES
from pipelines.derive import Derived
from pipelines.exclusions import read_exclusions
from pipelines.job_history import read_jobs, read_nodes, running_jobs
from pipelines.settings import IngestSettings
from pipelines.spans import derived_from, floor_time, settled_until, split
from pipelines.store import Store, Writer

TABLE = "feat_labels"
_PAST = timedelta(minutes=30)  # what a job's own plateau and pace are taken from
_FUTURE = timedelta(minutes=2)  # until it is known whether a condition held
_OPEN = timedelta(hours=6)  # conditions that lasted at the end of a span are looked at again this long
_OPEN_QUEUES = timedelta(days=7)  # the same of queues, which cost little
_STEP = timedelta(minutes=5)
_PIECE = timedelta(hours=2)
MAX_SAMPLES = 3_000_000  # rows held at once: about 1 GB with what the rules make of them
PORT_COLUMNS = (*LOADS, *RATES, "speed_bytes_per_s")
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
    inventory = read_nodes(store, cluster)
    book = ThresholdBook.from_nodes(inventory, overrides=settings.limits)
    for first, last in split(begin, end, _PIECE):
        since = _first_open(store, cluster, first)
        queues_since = _first_open(store, cluster, first, of_queues=True)
        past = min(since, queues_since) - _PAST
        jobs = read_jobs(store, cluster, past)
        excluded = read_exclusions(store, cluster, past, last + _FUTURE, drained_since=first)
        parts = []
        for nodes in node_batches(store, cluster, since - _PAST, last + _FUTURE, MAX_SAMPLES):
            span = (store, cluster, since - _PAST, last + _FUTURE, nodes)
            samples = _rows(*span, "core_gpu_samples", (*GPU_KEYS, *_COLUMNS))
            parts.append(
                label_bottlenecks(
                    samples, jobs, book, excluded=excluded,
                    node_samples=_rows(*span, "core_node_samples", ("ts", "cluster", "node", *HOST_COLUMNS)),
                    ports=_rows(*span, "core_port_samples", ("ts", "cluster", "node", "device", "port", *PORT_COLUMNS)),
                )
            )  # fmt: skip
            del samples
        progress = _rows(
            store, cluster, since - _PAST, last + _FUTURE, None, "core_job_progress",
            ("ts", "cluster", "job_id", "rank", "step", "step_time_s"), " AND rank IS NOT NULL",
        )  # fmt: skip
        parts.append(label_ranks(progress, excluded=excluded))
        labels = pl.concat(parts)
        queues = _shortages(jobs, inventory, queues_since, last, excluded)

        def work(
            writer: Writer,
            since: datetime = since,
            last: datetime = last,
            labels: pl.DataFrame = labels,
            queues: pl.DataFrame = queues,
        ) -> int:
            onset, whose = pl.col("onset_time"), pl.lit(cluster).alias("cluster")
            inside = pl.concat([labels, queues]).filter((onset >= since) & (onset < last)).with_columns(whose)
            earlier = queues.filter((onset < since) & ~pl.col("is_censored")).with_columns(whose)
            rows = writer.replace_window(TABLE, cluster, since, last, inside)
            if earlier.height:  # shortages outlast what samples are looked at again for
                rows += writer.upsert(TABLE, earlier)
            writer.set_mark(cluster, TABLE, last)
            return rows

        report.rows += store.transact(work, purpose="labels")
        report.until = last
    return report


def _shortages(
    jobs: pl.DataFrame, nodes: pl.DataFrame, begin: datetime, end: datetime, excluded: pl.DataFrame
) -> pl.DataFrame:
    """Labels of queues; none where no inventory counts GPUs."""
    total = usable_gpus(nodes)
    occupancy = queue_occupancy(jobs, total or 0, begin - _PAST, end + _FUTURE)
    return label_shortages(occupancy if total else occupancy.clear(), excluded=excluded)


def _first_open(store: Store, cluster: str, begin: datetime, *, of_queues: bool = False) -> datetime:
    """Onset of the oldest condition that still lasted when labels were last made."""
    found = store.query(
        f'SELECT min(onset_time) AS at FROM {TABLE} WHERE "cluster" = ? AND clear_time IS NULL AND NOT is_censored '
        "AND onset_time >= ? AND onset_time < ? AND (coalesce(scope, 'gpu') = 'queue') = ?",
        [cluster, begin - (_OPEN_QUEUES if of_queues else _OPEN), begin, of_queues],
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


def _rows(
    store: Store,
    cluster: str,
    begin: datetime,
    end: datetime,
    nodes: list[str] | None,
    table: str,
    columns: Sequence[str],
    where: str = "",
) -> pl.DataFrame:
    """Rows of a table within [begin, end), of some nodes or all."""
    chosen = where if nodes is None else f"{where} AND node = ANY(?)"
    return store.query(
        f'SELECT {", ".join(columns)} FROM {table} WHERE "cluster" = ? AND ts >= ? AND ts < ?{chosen}',
        [cluster, begin, end, *([] if nodes is None else [nodes])],
    )

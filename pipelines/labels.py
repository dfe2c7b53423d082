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
from pipelines.job_history import read_jobs, read_nodes
from pipelines.settings import IngestSettings
from pipelines.spans import derived_from, floor_time, settled_until, split
from pipelines.store import Store, Writer

TABLE = "feat_labels"
_PAST = timedelta(minutes=30)  # what a job's own plateau and pace are taken from
_FUTURE = timedelta(minutes=2)  # until it is known whether a condition held
_OPEN = timedelta(hours=6)  # conditions that lasted at the end of a span are looked at again this long
_STEP = timedelta(minutes=5)
_PIECE = timedelta(hours=2)
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
        samples = _samples(store, cluster, since - _PAST, last + _FUTURE)
        jobs = read_jobs(store, cluster, since - _PAST)
        labels = label_bottlenecks(samples, jobs, book) if not samples.is_empty() else None

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


def _samples(store: Store, cluster: str, begin: datetime, end: datetime) -> pl.DataFrame:
    names = ", ".join((*GPU_KEYS, *_COLUMNS))
    return store.query(
        f'SELECT {names} FROM core_gpu_samples WHERE "cluster" = ? AND ts >= ? AND ts < ?', [cluster, begin, end]
    )

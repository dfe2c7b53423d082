"""From staged rows to rows that may be delivered: one a key, in order of time, cleaned slice by slice.

What is judged by its past (values that froze, rates of counters) sees the end of the slice before. The judgements stand
in `features/cleaning*.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

import polars as pl

from features.cleaning import (
    QUALITY_SCHEMA,
    clean_gpu_samples,
    clean_health_samples,
    clean_link_samples,
    clean_node_samples,
    clean_port_samples,
)  # fmt: skip
from features.cleaning_counters import health_minutes
from features.vocabulary import TABLES, conform, schema
from pipelines.imports import Task
from pipelines.imports.job_bounds import NOT_ENDED
from pipelines.imports.report import Report
from pipelines.imports.staging import ORDER, Staging
from pipelines.job_history import LIVE_STATES, consistent_jobs

# What readers yield, and the cleaned table that is made of it.
CORE = {
    "raw_jobs": "core_jobs", "raw_gpu_samples": "core_gpu_samples", "core_node_samples": "core_node_samples",
    "core_gpu_health": "core_gpu_health", "core_link_samples": "core_link_samples",
    "raw_port_samples": "core_port_samples", "core_queue_samples": "core_queue_samples",
}  # fmt: skip
# Reasons of cleaning for which rows go, not values.
_DROPPING = {
    "no_key": "no node, GPU, link or port is named",
    "bad_time": "the time is missing, before 2000 or ahead of now",
    "duplicate": "further rows of one key and time; merged by the largest value",
}
_AHEAD = timedelta(minutes=5)
_HISTORY = timedelta(minutes=10)  # that cleaning looks back to


class Settled(NamedTuple):
    """A slice of a table.

    Attributes:
        raw: As received, a row a key.
        core: Cleaned.
        first: Time of the first sample or job that was kept; health rows bear the beginning of their minute instead.
        last: Of the last.
    """

    raw: pl.DataFrame
    core: pl.DataFrame
    first: datetime | None
    last: datetime | None


def settled(staging: Staging, table: str, task: Task) -> Iterator[Settled]:
    """Slices of a table, each later than the one before: as received, a row a key; and cleaned.

    Args:
        staging: Holds the rows.
        table: One of the keys of CORE.
        task: What was wrong is counted in its report.
    """
    clean = _Cleaner(table, task.now)
    for rows in staging.slices(table):
        if table == "raw_jobs":
            raw = _newest(rows, task.report)
            core, _ = consistent_jobs(raw)
            _count_lost(raw, core, task.report)
            yield Settled(raw, core, *_span(core, "submit_time"))
            continue
        raw = _joined(rows.drop(ORDER), TABLES[table].key)
        core, findings = clean(raw)
        for column, reason, count, example in findings.iter_rows():
            if reason in _DROPPING:
                task.report.drop(_DROPPING[reason], count, example=example)
            else:
                task.report.null(column, reason, count, example=example)
        once = raw.unique(TABLES[table].key, keep="last", maintain_order=True)
        span = _span(core, "ts")
        if table == "core_gpu_health":
            core = health_minutes(core)  # no slice cuts a minute
        yield Settled(once, core, *span)


def _span(rows: pl.DataFrame, time: str) -> tuple[datetime | None, datetime | None]:
    if rows.is_empty():
        return None, None
    first, last = rows[time].min(), rows[time].max()
    assert isinstance(first, datetime)
    assert isinstance(last, datetime)
    return first, last


def _count_lost(raw: pl.DataFrame, core: pl.DataFrame, report: Report) -> None:
    """Count what jobs lost because their state and times refute each other."""
    state, start, end = raw["state"], raw["start_time"], raw["end_time"]
    lost = {name: raw[name].is_not_null() & core[name].is_null() for name in ("start_time", "end_time", "node_list")}
    is_live, is_early = state.is_in(LIVE_STATES), (end < start).fill_null(False)
    for column, reason, bad in (
        ("start_time", "a job that is pending has not started", lost["start_time"]),
        ("end_time", NOT_ENDED, lost["end_time"] & is_live),
        ("end_time", "before the start of the job", lost["end_time"] & ~is_live & is_early),
        ("end_time", "before the submission of the job", lost["end_time"] & ~is_live & ~is_early),
        ("node_list", "a job that is pending has no nodes", lost["node_list"]),
    ):
        if bad.any():
            report.null(column, reason, int(bad.sum()), example=f"job {raw.filter(bad)['job_id'][0]}")


class _Cleaner:
    """Cleaning of one table, slice after slice."""

    def __init__(self, table: str, now: datetime) -> None:
        self.table = table
        self.now = now
        self._past: pl.DataFrame | None = None

    def __call__(self, raw: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Cleaned rows, and findings in QUALITY_SCHEMA."""
        ahead = raw.select((pl.col("ts") > self.now + _AHEAD).fill_null(False)).to_series()
        rows = raw.filter(~ahead)
        core, findings = self._clean(rows)
        if ahead.any():
            first = raw.filter(ahead).row(0, named=True)
            example = f"{first.get('node') or ''} at {first['ts']:%Y-%m-%d %H:%M:%S} UTC"
            row = ("ts", "bad_time", int(ahead.sum()), example)
            findings = pl.concat([findings, pl.DataFrame([row], schema=QUALITY_SCHEMA, orient="row")])
        return core, findings

    def _clean(self, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        if rows.is_empty():
            return pl.DataFrame(schema=schema(CORE[self.table])), pl.DataFrame(schema=QUALITY_SCHEMA)
        if self.table == "raw_gpu_samples":
            past = self._take(rows)
            return clean_gpu_samples(rows, history=past)
        if self.table == "core_node_samples":
            return clean_node_samples(rows)
        if self.table == "core_link_samples":
            return clean_link_samples(rows)
        if self.table == "raw_port_samples":
            past = self._take(rows)
            core, findings = clean_port_samples(rows if past is None else pl.concat([past, rows]))
            return core.filter(pl.col("ts") >= rows["ts"].min()), findings
        if self.table == "core_gpu_health":
            return clean_health_samples(rows)
        return conform(rows, CORE[self.table]), pl.DataFrame(schema=QUALITY_SCHEMA)

    def _take(self, rows: pl.DataFrame) -> pl.DataFrame | None:
        """The end of the slice before; that of this one is kept for the next."""
        past, self._past = self._past, rows.filter(pl.col("ts") >= pl.col("ts").max() - _HISTORY)
        return past


def _newest(rows: pl.DataFrame, report: Report) -> pl.DataFrame:
    """One row a job: the one that was observed last, else the last of the file."""
    ordered = rows.sort("observed_at", ORDER, nulls_last=False, maintain_order=True)
    jobs = ordered.unique(TABLES["raw_jobs"].key, keep="last", maintain_order=True).sort(ORDER).drop(ORDER)
    if len(jobs) < len(rows):
        report.skip("records that a later record of the same job replaces", len(rows) - len(jobs))
    return jobs


def _joined(rows: pl.DataFrame, key: tuple[str, ...]) -> pl.DataFrame:
    """Rows of one key that complete each other made one; those that contradict each other are left to cleaning."""
    keys = list(key)
    doubled = rows.select(pl.struct(keys).is_duplicated()).to_series()
    if not doubled.any():
        return rows
    others = [name for name in rows.columns if name not in keys]
    groups = rows.filter(doubled).group_by(keys, maintain_order=True)
    agree = groups.agg(
        pl.all_horizontal(pl.col(name).drop_nulls().n_unique() <= 1 for name in others).alias("_agree"),
        *(pl.col(name).drop_nulls().first() for name in others),
    )
    good = agree.filter("_agree").select(rows.columns)
    apart = rows.filter(doubled).join(
        agree.filter(~pl.col("_agree")).select(keys), on=keys, how="semi", nulls_equal=True
    )
    time = next(name for name in keys if rows[name].dtype.is_temporal())
    return pl.concat([rows.filter(~doubled), good, apart]).sort(time, maintain_order=True)

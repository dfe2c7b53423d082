"""Demand forecasts, once an hour: read jobs, forecast, publish for the API, keep in the store; and the printed table.

The numbers come from `models/demand_live.py`, which is fitted anew each time: there is no model to retrain.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from features.vocabulary import conform, schema
from pipelines.compose import clusters_of, open_store
from pipelines.job_history import read_jobs
from pipelines.settings import Settings
from pipelines.store import Reader, Store
from pipelines.words import counted
from scheduler_hints.schema import DemandForecast, Reclaimable
from scheduler_hints.snapshot import Publisher

if TYPE_CHECKING:
    from models.demand_windows import ReclaimableWindow

log = logging.getLogger(__name__)

KIND = "reclaimable-windows"  # of the rows of `out_hints` that windows are kept as
_TITLES = {"arrivals": "jobs submitted in an hour", "asked_hours": "{}-hours submitted in an hour",
           "in_demand": "{}s running or waiting"}  # fmt: skip


@dataclass
class DemandPublished:
    """What was published for one cluster.

    Attributes:
        rows: Forecasts, one for each queue, quantity and horizon; None: those published last still hold.
        windows: Reclaimable windows.
        model_versions: Task → version in charge.
        data_age_s: Age of the newest word of the scheduler in the store, seconds.
        error: Why nothing new was published; None: it was.
    """

    cluster: str
    rows: int | None = None
    windows: int = 0
    model_versions: dict[str, str] = field(default_factory=dict)
    data_age_s: float | None = None
    error: str | None = None


def publish_demand(store: Store, settings: Settings, cluster: str, now: datetime) -> DemandPublished:
    """Forecast demand of a cluster by queue, publish and keep it; once for each full hour.

    Args:
        store: The store, whose jobs are the history.
        settings: Folders, times to live, inference queues.
        cluster: Name of the cluster.
        now: Present time, UTC.

    Raises:
        StoreError: The store cannot be read or written.
        OSError: The snapshot could not be written; the one before stays.
    """
    report = DemandPublished(cluster)
    hour = now.replace(minute=0, second=0, microsecond=0)
    made = store.query(
        'SELECT max(generated_at) AS at FROM out_demand WHERE "cluster" = ? AND generated_at >= ?', [cluster, hour]
    )["at"][0]
    if made is not None and made <= now:
        return report
    from models.demand import VERSION
    from models.demand_live import HISTORY, forecast_demand

    about = settings.cluster(cluster)
    jobs = read_jobs(store, cluster, now - HISTORY)
    found = forecast_demand(
        jobs, now, inference_queues=about.inference_queues, min_units=about.reclaim_min_units
    )  # fmt: skip
    if about.jobs == "none" and found.rows.is_empty():
        report.rows = 0
        return report  # nothing that could ever be forecast: the API says that there is no scheduler
    for queue, reason in found.short.items():
        log.info("%s: no forecast of demand for %s: %s", cluster, queue, reason)
    seen = jobs["observed_at"].max()
    report.data_age_s = max(0.0, (now - seen).total_seconds()) if isinstance(seen, datetime) else 0.0
    ttl_s = settings.hints.demand_ttl_s
    stamps = {
        "cluster": cluster, "generated_at": now, "valid_until": now + timedelta(seconds=ttl_s),
        "data_age_s": report.data_age_s,
    }  # fmt: skip
    rows = conform(found.rows.with_columns(pl.lit(value).alias(name) for name, value in stamps.items()), "out_demand")
    report.model_versions = {"demand": VERSION} if rows.height else {}
    Publisher(settings.published, cluster).publish(
        "demand", demand_items(rows, found.windows), ttl_s=ttl_s, data_age_s=report.data_age_s,
        model_versions=report.model_versions,
    )  # fmt: skip
    windows = _window_rows(found.windows, stamps, VERSION, found.unit)
    if rows.height:
        store.transact(
            lambda w: w.upsert("out_demand", rows) + w.upsert("out_hints", windows), purpose="keeping demand forecasts"
        )
    report.rows, report.windows = rows.height, windows.height
    return report


def demand_items(rows: pl.DataFrame, windows: Mapping[str, Iterable[ReclaimableWindow]]) -> list[DemandForecast]:
    """The published shape of rows of `out_demand`, with the windows of inference queues beside their demand."""
    items = []
    for row in rows.drop("valid_until", "data_age_s").iter_rows(named=True):
        near = windows.get(row["queue"] or "", ()) if row["quantity"] == "in_demand" else ()
        inside = [Reclaimable(w.start, w.end, w.units, w.confidence) for w in near if w.start < row["target_time"]]
        items.append(DemandForecast(**row, reclaimable=inside))
    return items


def _window_rows(
    windows: Mapping[str, Iterable[ReclaimableWindow]], stamps: Mapping[str, object], version: str, unit: str
) -> pl.DataFrame:
    """Rows of `out_hints`, one for each window."""
    at = stamps["generated_at"]
    assert isinstance(at, datetime)
    rows = [
        {
            **stamps, "kind": KIND, "hint_id": f"{queue}:{w.start:%Y%m%dT%H}", "version": int(at.timestamp()),
            "model_version": version, "scope": "queue", "probability": w.confidence, "expected_onset": w.start,
            "horizon_s": None, "detail": msgspec.json.encode(
                {"queue": queue, "start": w.start, "end": w.end, "units": w.units, "confidence": w.confidence,
                 "capacity": w.capacity, "unit": unit}
            ).decode(),
        }
        for queue, found in windows.items() for w in found
    ]  # fmt: skip
    return conform(pl.DataFrame(rows), "out_hints") if rows else pl.DataFrame(schema=schema("out_hints"))


def kept_windows(reader: Reader, cluster: str, begin: datetime, until: datetime) -> pl.DataFrame:
    """Reclaimable windows of a span as they were published: `models.demand_outcomes.WINDOW_COLUMNS`.

    Args:
        reader: The store.
        cluster: Name of the cluster.
        begin: They start then or later, UTC.
        until: They were published before.
    """
    kept = reader.query(
        'SELECT detail FROM out_hints WHERE "cluster" = ? AND kind = ? AND expected_onset >= ? AND generated_at < ? '
        "ORDER BY generated_at, hint_id",
        [cluster, KIND, begin, until],
    )
    when = pl.Datetime("us", "UTC")
    types = {"queue": pl.String(), "unit": pl.String(), "start": when, "end": when, "units": pl.Int64(),
             "confidence": pl.Float64(), "capacity": pl.Float64()}  # fmt: skip
    rows = [
        {name: _moment(value) if name in ("start", "end") else value for name, value in found.items() if name in types}
        for found in map(msgspec.json.decode, kept["detail"])
    ]
    return pl.DataFrame(rows, schema=types)


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def print_demand(settings: Settings, cluster: str | None) -> None:
    """Print the newest demand forecasts of each cluster as plain tables, then its reclaimable windows."""
    names = clusters_of(settings, cluster)
    with open_store(settings, read_only=True) as store:
        for name in names:
            print("\n".join(demand_lines(store, name, datetime.now(UTC))))


def demand_lines(store: Store, cluster: str, now: datetime) -> list[str]:
    """The printed form of the newest forecasts of one cluster.

    Args:
        store: The store.
        cluster: Name of the cluster.
        now: Present time, UTC.
    """
    rows = store.query(
        'SELECT * FROM out_demand WHERE "cluster" = ? AND generated_at = (SELECT max(generated_at) FROM out_demand '
        'WHERE "cluster" = ?) ORDER BY queue NULLS FIRST, quantity, horizon_h',
        [cluster, cluster],
    )
    if rows.is_empty():
        return [f"{cluster}: no forecast of demand yet; make one with `weatherglass publish`"]
    made, until = rows["generated_at"][0], rows["valid_until"][0]
    late = "" if now < until else ", no longer valid: run `weatherglass publish`"
    lines = [f"{cluster}: made {made:%Y-%m-%d %H:%M} UTC{late}; forecast [10 % – 90 %], last hour, a week before"]
    for (queue, quantity), part in rows.group_by("queue", "quantity", maintain_order=True):
        unit = str(part["unit"][0]).removesuffix("s").upper()
        lines.append(f"{queue or 'all queues'}, {_TITLES[str(quantity)].format(unit)}")
        for row in part.iter_rows(named=True):
            low, middle, high = (f"{row[name]:,.1f}" for name in ("q10", "q50", "q90"))
            lines.append(
                f"  +{row['horizon_h']:>3} h  {row['target_time']:%a %d %b %H:%M}  {middle:>10} "
                f"[{low:>9} – {high:>9}]  {row['last_value']:>10,.1f}  {row['last_week_value']:>10,.1f}"
            )
    return lines + _window_lines(store, cluster, made)


def _window_lines(store: Store, cluster: str, made: datetime) -> list[str]:
    kept = store.query(
        'SELECT detail FROM out_hints WHERE "cluster" = ? AND kind = ? AND generated_at = ? ORDER BY expected_onset',
        [cluster, KIND, made],
    )
    if kept.is_empty():
        return []
    lines = [f"{counted(kept.height, 'reclaimable window')}"]
    for detail in kept["detail"]:
        found = msgspec.json.decode(detail)
        start, end = (datetime.fromisoformat(found[name]) for name in ("start", "end"))
        lines.append(
            f"  {found['queue']}: {start:%a %d %b %H:%M} to {end:%a %d %b %H:%M}, {found['units']} free, "
            f"confidence {found['confidence']:.2f}"
        )
    return lines

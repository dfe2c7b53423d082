"""Publish: forecasts of every known job and node become snapshot files and rows; what the nowcast said is kept too.

The numbers come from `models/live.py` and `models/node_risks.py`; snapshots are what the API serves.
Bottlenecks, windows and plans are published by the nowcast; here only its journal is brought into the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
import polars as pl

from features.vocabulary import QUANTILE_COLUMNS, schema
from models.registry import Registry
from pipelines.job_history import read_jobs, read_nodes
from pipelines.settings import Settings
from pipelines.signs import read_signs_of
from pipelines.sources import JobSource, SourceError
from pipelines.store import Store
from scheduler_hints.journal import FORMAT, journal_files, read_journal
from scheduler_hints.schema import GpuRisk, JobForecast, JobProgress, NodeRisk, Quantiles, Snapshot
from scheduler_hints.snapshot import Publisher

log = logging.getLogger(__name__)

HISTORY_DAYS = 120.0  # how far back forecasts look for earlier jobs of a user
FAULT_DAYS = 365.0
SIGN_DAYS = 28.0
_RISK_EVERY = 0.5  # node risks are made anew when half of their life is over
_JOURNAL_SETTLED_S = 300.0  # a line of the hour before may still be on its way
_YEARS = (2000, 2200)  # times outside are no times of hints
_MAX_TTL_S = 366 * 86_400.0
_SHAPES = ("runtime", "remaining", "wait")


@dataclass
class Published:
    """What was published for one cluster.

    Attributes:
        jobs: Jobs with a forecast.
        nodes: Nodes with a risk; None: those published last still hold.
        gpus: GPUs with a risk of their own.
        hints: Rows of `out_hints` loaded from the journal.
        model_versions: Task → version in charge.
        data_age_s: Age of the scheduler's word that forecasts rest on, seconds.
        error: Why nothing new was published; None: it was.
    """

    cluster: str
    jobs: int = 0
    nodes: int | None = None
    gpus: int = 0
    hints: int = 0
    model_versions: dict[str, str] = field(default_factory=dict)
    data_age_s: float | None = None
    error: str | None = None


def publish_jobs(store: Store, source: JobSource, settings: Settings, cluster: str, now: datetime) -> Published:
    """Forecast every pending and running job, publish and keep the forecasts.

    Args:
        store: The store: the history that forecasts learn from.
        source: The scheduler's present word.
        settings: Folders and times to live.
        cluster: Name of the cluster.
        now: Present time, UTC.

    Returns:
        What was published. An outage of the scheduler stands in `error`: the forecasts published before expire.

    Raises:
        StoreError: The store cannot be read or written.
        OSError: The snapshot could not be written; the one before stays.
    """
    from models.live import forecast_jobs
    from pipelines.job_evidence import enriched

    report = Published(cluster)
    try:
        live = source.live()
    except SourceError as error:
        report.error = str(error)
        return report
    jobs = live.jobs.with_columns(pl.lit(cluster).alias("cluster"))
    history = read_jobs(store, cluster, now - timedelta(days=HISTORY_DAYS))
    rows = forecast_jobs(Registry(settings.registry / cluster), jobs, history, now)
    rows, told = enriched(store, settings, cluster, rows, jobs, now)
    seen = jobs["observed_at"].max()
    report.data_age_s = max(0.0, (now - seen).total_seconds()) if isinstance(seen, datetime) else 0.0
    ttl_s = settings.hints.job_ttl_s
    rows = _stamped(_with_plans(rows, jobs), "out_job_forecasts", cluster, now, ttl_s, report.data_age_s)
    report.model_versions = _versions(rows)
    items = job_forecasts(jobs, rows, told)
    Publisher(settings.published, cluster).publish(
        "jobs", items, ttl_s=ttl_s, data_age_s=report.data_age_s, model_versions=report.model_versions
    )
    if not rows.is_empty():
        store.transact(lambda w: w.upsert("out_job_forecasts", rows), purpose="keeping job forecasts")
    report.jobs = len(items)
    return report


def job_forecasts(jobs: pl.DataFrame, rows: pl.DataFrame, told: pl.DataFrame | None = None) -> list[JobForecast]:
    """The published shape of forecast rows.

    Args:
        jobs: JOB_COLUMNS of the live jobs.
        rows: Rows of `out_job_forecasts`, up to one for each job and kind of forecast.
        told: What running jobs reported, as of `models.reported_progress.known_progress`.

    Returns:
        One `JobForecast` for each job that has any row, in the order of `jobs`.
    """
    by_job: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows.iter_rows(named=True):
        by_job.setdefault(row["job_id"], {})[row["forecast"]] = row
    progress = {row["job_id"]: row for row in told.iter_rows(named=True)} if told is not None else {}
    items = []
    for job in jobs.iter_rows(named=True):
        found = by_job.get(job["job_id"])
        if not found or job["submit_time"] is None:
            continue
        any_row = found.get("runtime") or next(iter(found.values()))
        shapes = {name: _quantiles(found.get(name)) for name in _SHAPES}
        items.append(
            JobForecast(
                cluster=job["cluster"],
                job_id=job["job_id"],
                state=job["state"],
                user=job["user"],
                queue=job["queue"],
                nodes=job["nodes"],
                gpus=job["gpus"],
                submit_time=job["submit_time"],
                start_time=job["start_time"],
                time_limit_s=job["time_limit_s"],
                node_list=job["node_list"].split(",") if job["node_list"] else [],
                runtime=shapes["runtime"],
                remaining=shapes["remaining"],
                wait=shapes["wait"],
                p_fail=_first(found, "p_fail"),
                p_start_60s=_first(found, "p_start_60s"),
                p_start_600s=_first(found, "p_start_600s"),
                p_start_3600s=_first(found, "p_start_3600s"),
                reason=job["reason"],
                model_version=any_row["model_version"],
                generated_at=any_row["generated_at"],
                p_timeout=_first(found, "p_timeout"),
                p_node_failure=_first(found, "p_node_failure"),
                p_out_of_memory=_first(found, "p_out_of_memory"),
                reasons=_reasons(_first(found, "reasons")),
                lost_gpu_hours=_first(found, "lost_gpu_hours"),
                lost_gpu_hours_hardware=_first(found, "lost_gpu_hours_hardware"),
                lost_gpu_hours_checkpointed=_first(found, "lost_gpu_hours_checkpointed"),
                checkpoint_interval_s=_first(found, "checkpoint_interval_s"),
                mode_s=_first(found, "mode_s"),
                progress=_progress(progress.get(job["job_id"])),
            )
        )
    return items


def _progress(told: Mapping[str, Any] | None) -> JobProgress | None:
    return None if told is None else JobProgress(*(told[name] for name in JobProgress.__struct_fields__))


def publish_node_risks(
    store: Store, settings: Settings, cluster: str, now: datetime, *, last: datetime | None = None
) -> Published:
    """Forecast the risk of every node, publish and keep it; risks that are young enough are left as they are.

    Args:
        store: The store.
        settings: Folders and times to live.
        cluster: Name of the cluster.
        now: Present time, UTC.
        last: When risks were last made; None: asked of the store.

    Raises:
        StoreError: The store cannot be read or written.
        OSError: The snapshot could not be written; the one before stays.
    """
    from models.node_risks import forecast_nodes

    report = Published(cluster)
    ttl_s = settings.hints.node_risk_ttl_s
    if last is None:
        found = store.query(
            'SELECT max(generated_at) AS at FROM out_node_risks WHERE "cluster" = ? AND generated_at > ?',
            [cluster, now - timedelta(seconds=ttl_s)],
        )
        last = found["at"][0]
    if last is not None and now - last < timedelta(seconds=ttl_s * _RISK_EVERY):
        return report
    nodes = read_nodes(store, cluster)
    faults = store.query(
        'SELECT * FROM core_faults WHERE "cluster" = ? AND start_time >= ? ORDER BY start_time',
        [cluster, now - timedelta(days=FAULT_DAYS)],
    )
    signs = read_signs_of(store, cluster, now - timedelta(days=SIGN_DAYS), now)
    risks = forecast_nodes(
        Registry(settings.registry / cluster), nodes, faults, signs, now, states=remap_states(store, cluster, now),
        table=settings.hardware.table(),
    )  # fmt: skip
    rows = risks.nodes
    seen = nodes["observed_at"].max()
    report.data_age_s = max(0.0, (now - seen).total_seconds()) if isinstance(seen, datetime) else 0.0
    rows = _stamped(rows, "out_node_risks", cluster, now, ttl_s, report.data_age_s)
    if not rows.is_empty():
        report.model_versions = {"node_failure": rows["model_version"][0]}
    gpus = _stamped(risks.gpus, "out_gpu_risks", cluster, now, ttl_s, report.data_age_s)
    items = node_risks(rows, gpus)
    Publisher(settings.published, cluster).publish(
        "node-risks", items, ttl_s=ttl_s, data_age_s=report.data_age_s, model_versions=report.model_versions
    )
    if not rows.is_empty():
        store.transact(
            lambda w: w.upsert("out_node_risks", rows) + w.upsert("out_gpu_risks", gpus), purpose="keeping node risks"
        )
    report.nodes, report.gpus = len(items), gpus.height
    return report


def remap_states(store: Store, cluster: str, now: datetime) -> pl.DataFrame:
    """GPUs that wait for a reset to remap a row, or could not remap one, by their newest minute of the last hour."""
    return store.query(
        "SELECT node, gpu_uuid, coalesce(is_remap_pending, false) AS is_remap_pending, "
        "coalesce(is_remap_failed, false) AS is_remap_failed FROM (SELECT node, gpu_uuid, "
        "arg_max(is_remap_pending, ts) AS is_remap_pending, arg_max(is_remap_failed, ts) AS is_remap_failed "
        'FROM core_gpu_health WHERE "cluster" = ? AND ts >= ? AND ts < ? GROUP BY node, gpu_uuid) '
        "WHERE is_remap_pending OR is_remap_failed ORDER BY node, gpu_uuid",
        [cluster, now - timedelta(hours=1), now],
    )


def node_risks(rows: pl.DataFrame, gpus: pl.DataFrame | None = None) -> list[NodeRisk]:
    """The published shape of rows of `out_node_risks`, with those of `out_gpu_risks`.

    GPUs of a node stand by their probability; among equals, as the long-run rate gives them, those with the most faults
    stand first.
    """
    of_nodes: dict[str, list[GpuRisk]] = {}
    faults = pl.col("reasons").str.extract(r"^(\d+) fault").cast(pl.Int64).fill_null(0)
    by = ["p_24h", faults, "gpu_uuid"]
    for row in gpus.sort(by, descending=[True, True, False]).iter_rows(named=True) if gpus is not None else ():
        risk = GpuRisk(row["gpu_uuid"], row["p_1h"], row["p_24h"], row["p_7d"], _reasons(row["reasons"]))
        of_nodes.setdefault(row["node"], []).append(risk)
    return [
        NodeRisk(
            cluster=row["cluster"],
            node=row["node"],
            p_1h=row["p_1h"],
            p_24h=row["p_24h"],
            p_7d=row["p_7d"],
            is_climatology="climatology" in row["model_version"],
            reasons=_reasons(row["reasons"]),
            model_version=row["model_version"],
            lemon_score=row.get("lemon_score"),
            spare_rank=row.get("spare_rank"),
            gpus=of_nodes.get(row["node"], []),
        )
        for row in rows.iter_rows(named=True)
    ]


# --- the journal ------------------------------------------------------------------------------------------


def load_journal(store: Store, settings: Settings, cluster: str, now: datetime) -> int:
    """Bring what the nowcast published into `out_hints`; files of past hours are removed once they are in.

    Loading a line twice changes nothing. The file of the present hour is read again at each run, from its new lines on.

    Returns:
        Rows written.

    Raises:
        StoreError: The store cannot be written; the journal stays.
    """
    rows = 0
    this_hour = f"{now:{FORMAT}}"
    for path in journal_files(settings.published, cluster):
        snapshots = [snapshot for snapshot in read_journal(path) if _is_sound(snapshot, path.name)]
        known = _known_versions(store, cluster, snapshots)
        new = [snapshot for snapshot in snapshots if snapshot.version > known.get(snapshot.kind, 0)]
        frame = hint_rows(cluster, new)
        if not frame.is_empty():
            rows += store.transact(lambda w, f=frame: w.upsert("out_hints", f), purpose="keeping hints")
        settled = path.stat().st_mtime < now.timestamp() - _JOURNAL_SETTLED_S
        if path.stem < this_hour and settled:
            path.unlink(missing_ok=True)
    return rows


def _is_sound(snapshot: Snapshot, file: str) -> bool:
    """Whether a snapshot can be kept at all; one that cannot is named in the log and passed over."""
    at, ttl_s = snapshot.generated_at, snapshot.ttl_s
    years = at.tzinfo is not None and _YEARS[0] <= at.year <= _YEARS[1]
    if years and 0 <= ttl_s <= _MAX_TTL_S and 0 <= snapshot.version < 2**63:
        return True
    log.warning(
        "journal %s: a snapshot of %s is passed over: version %d, generated_at %s, ttl_s %g are out of bounds",
        file, snapshot.kind, snapshot.version, at, ttl_s,
    )  # fmt: skip
    return False


def _known_versions(store: Store, cluster: str, snapshots: list[Snapshot]) -> dict[str, int]:
    """Newest version of each kind that is in the store, among those as young as the journal file."""
    if not snapshots:
        return {}
    since = min(snapshot.generated_at for snapshot in snapshots)
    found = store.query(
        'SELECT kind, max(version) AS version FROM out_hints WHERE "cluster" = ? AND generated_at >= ? GROUP BY kind',
        [cluster, since],
    )
    return dict(found.iter_rows())


def hint_rows(cluster: str, snapshots: Iterable[Snapshot]) -> pl.DataFrame:
    """Rows of `out_hints`: one for each hint of each snapshot, its whole JSON in `detail`.

    An empty snapshot says something too (there is nothing to foresee): it becomes one row without a `hint_id`.
    Items that are no hints are passed over with a warning; a snapshot of nothing else becomes no row.
    """
    rows = []
    for snapshot in snapshots:
        head = {
            "generated_at": snapshot.generated_at,
            "valid_until": snapshot.generated_at + timedelta(seconds=snapshot.ttl_s),
            "data_age_s": snapshot.data_age_s,
            "model_version": ",".join(sorted(set(snapshot.model_versions.values()))) or None,
            "cluster": cluster,
            "kind": snapshot.kind,
            "version": snapshot.version,
        }
        if not snapshot.items:
            rows.append({**head, "hint_id": ""})
        for item in snapshot.items:
            try:
                rows.append({**head, **_hint(_decode_item(item)), "detail": bytes(item).decode()})
            except msgspec.DecodeError as error:
                log.warning(
                    "journal: an item of %s version %d is passed over: %s", snapshot.kind, snapshot.version, error
                )
    return pl.DataFrame(rows, schema=schema("out_hints"))


class _Item(msgspec.Struct, frozen=True):
    """What of a hint of any kind has a column of its own."""

    id: str = ""
    bottleneck_class: str | None = None
    scope: str | None = None
    node: str | None = None
    nodes: list[str] | int | None = None
    gpu_uuid: str | None = None
    job_id: str | None = None
    job_ids: list[str] | None = None
    fits_jobs: list[str] | None = None
    horizon_s: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    probability: float | None = None
    confidence: float | None = None
    expected_onset: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    action: str | None = None


_decode_item = msgspec.json.Decoder(_Item).decode


def _hint(item: _Item) -> dict[str, Any]:
    jobs = item.job_ids or item.fits_jobs or ([item.job_id] if item.job_id else [])
    onset = item.expected_onset
    return {
        "hint_id": item.id,
        "bottleneck_class": item.bottleneck_class,
        "scope": item.scope,
        "node": item.node or (",".join(item.nodes) if isinstance(item.nodes, list) else None),
        "gpu_uuid": item.gpu_uuid,
        "job_id": ",".join(jobs) or None,
        "horizon_s": item.horizon_s,
        "probability": item.confidence if item.probability is None else item.probability,
        "expected_onset": onset if onset and _YEARS[0] <= onset.year <= _YEARS[1] else None,
        "action": item.action,
    }


# --- small parts ------------------------------------------------------------------------------------------


def _with_plans(rows: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Forecasts of waits with the start that the scheduler had planned by then: they are judged beside it."""
    key = ["job_id", "submit_time"]
    plans = jobs.filter(pl.col("planned_start_time").is_not_null()).unique(key, keep="last")
    return rows.drop("planned_start_time", strict=False).join(
        plans.select(*key, "planned_start_time", pl.lit("wait").alias("forecast")), on=[*key, "forecast"], how="left",
        maintain_order="left",
    )  # fmt: skip


def _stamped(
    rows: pl.DataFrame, table: str, cluster: str, now: datetime, ttl_s: float, data_age_s: float
) -> pl.DataFrame:
    """Rows in the table's columns, with when they were made and until when they hold."""
    types = schema(table)
    return rows.with_columns(
        pl.lit(cluster).alias("cluster"),
        pl.lit(now).alias("generated_at"),
        pl.lit(now + timedelta(seconds=ttl_s)).alias("valid_until"),
        pl.lit(data_age_s).alias("data_age_s"),
    ).select(
        (
            pl.col(name)
            if name in [*rows.columns, "cluster", "generated_at", "valid_until", "data_age_s"]
            else pl.lit(None)
        )
        .cast(dtype)
        .alias(name)
        for name, dtype in types.items()
    )


def _versions(rows: pl.DataFrame) -> dict[str, str]:
    """Task → version in charge; what is left of a runtime is forecast by the model of the whole."""
    from models.reported_progress import SUFFIX

    task = pl.col("forecast").replace("remaining", "runtime").alias("task")
    version = pl.col("model_version").str.strip_suffix(SUFFIX).first()
    return dict(rows.group_by(task).agg(version).sort("task").iter_rows())


def _quantiles(row: Mapping[str, Any] | None) -> Quantiles | None:
    if row is None or any(row[name] is None for name in QUANTILE_COLUMNS):
        return None
    return Quantiles(**{name: row[name] for name in QUANTILE_COLUMNS})


def _first(found: Mapping[str, Mapping[str, Any]], name: str) -> Any:
    return next((row[name] for row in found.values() if row.get(name) is not None), None)


def _reasons(text: str | None) -> list[str]:
    return [reason.strip() for reason in (text or "").split(";") if reason.strip()]

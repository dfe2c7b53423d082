"""What a cluster's ended jobs have taught about plans and failures, and its use on the forecasts of a moment.

The evidence is read from the store at most every `KEPT` and kept in `<state_dir>/evidence/<cluster>.json`:
nothing of it changes fast. Here belongs this reading and keeping; the rules stand in `models/progress_evidence.py`,
`models/reported_progress.py`, `models/interruptions.py` and `models/job_losses.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import polars as pl

from features.job_progress import LOOK_BACK
from models.interruptions import Interruptions, measure
from models.progress_evidence import EVIDENCE_JOBS, EVIDENCE_REPORTS, Evidence
from pipelines.settings import Settings
from pipelines.store import Store

log = logging.getLogger(__name__)

KEPT = timedelta(hours=6)
_REPORTS = (
    "SELECT job_id, ts, rank, step, max_steps, step_time_s, phase, observed_at FROM core_job_progress "
    'WHERE "cluster" = ? AND ts >= ? AND ts <= ? AND job_id IN (SELECT unnest(?::VARCHAR[]))'
)


@dataclass(frozen=True, slots=True)
class JobEvidence:
    """What was counted, and when.

    Attributes:
        made_at: Until when, UTC.
        progress: Of jobs that reported their progress.
        interruptions: Of jobs that hardware ended.
    """

    made_at: datetime
    progress: Evidence
    interruptions: Interruptions


def job_evidence(store: Store, settings: Settings, cluster: str, now: datetime) -> JobEvidence:
    """The evidence in use at a moment: what is kept, or anew where that is old or cannot be read.

    Raises:
        StoreError: The store cannot be read.
    """
    path = settings.state / "evidence" / f"{cluster}.json"
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=JobEvidence)
        if timedelta(0) <= now - kept.made_at < KEPT:
            return kept
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s: what was kept of ended jobs is not used: %s", path, error)
    found = JobEvidence(now, progress_evidence(store, cluster, now), measured_interruptions(store, cluster, now))
    _keep(path, found)
    return found


def _keep(path: Path, found: JobEvidence) -> None:
    """Write whole or not at all; without it the evidence is counted again the next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(found))
        part.replace(path)
    except OSError as error:
        log.warning("%s: what ended jobs have shown cannot be kept: %s", path, error)


def progress_evidence(store: Store, cluster: str, now: datetime) -> Evidence:
    """What the newest ended jobs with reports have shown.

    Raises:
        StoreError: The store cannot be read.
    """
    ended = store.query(
        'WITH told AS (SELECT job_id, count(*) AS reports FROM core_job_progress WHERE "cluster" = ? GROUP BY job_id), '
        'ended AS (SELECT job_id, "user", name, state, start_time, end_time, time_limit_s, sum(reports) OVER '
        "(ORDER BY end_time DESC, job_id ROWS UNBOUNDED PRECEDING) AS reports_in_all FROM core_jobs JOIN told "
        'USING (job_id) WHERE "cluster" = ? AND end_time < ? AND start_time < end_time) '
        "SELECT * EXCLUDE (reports_in_all) FROM ended WHERE reports_in_all <= ? ORDER BY end_time DESC LIMIT ?",
        [cluster, cluster, now, EVIDENCE_REPORTS, EVIDENCE_JOBS],
    )
    if ended.is_empty():
        return Evidence()
    told = store.query(_REPORTS, [cluster, ended["start_time"].min(), now, ended["job_id"].to_list()])
    return Evidence.of(ended, told, now)


def measured_interruptions(store: Store, cluster: str, now: datetime) -> Interruptions:
    """How often hardware interrupted a cluster's jobs.

    Raises:
        StoreError: The store cannot be read.
    """
    jobs = store.query(
        'SELECT nodes, gpus, state, node_list, start_time, end_time FROM core_jobs WHERE "cluster" = ? '
        "AND start_time IS NOT NULL AND (end_time IS NOT NULL OR state IN ('RUNNING', 'SUSPENDED'))",
        [cluster],
    )
    faults = store.query('SELECT node, start_time FROM core_faults WHERE "cluster" = ?', [cluster])
    return measure(jobs, faults, now)


def enriched(
    store: Store, settings: Settings, cluster: str, rows: pl.DataFrame, jobs: pl.DataFrame, now: datetime
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Forecasts with reported progress and expected losses in them.

    Args:
        store: The store.
        settings: Folders, and what a checkpoint and a restart are taken to cost.
        cluster: Name of the cluster.
        rows: Rows of `out_job_forecasts`.
        jobs: The live jobs.
        now: The moment of the forecasts, UTC.

    Returns:
        The rows in the same order, and what running jobs reported: `job_id` and facts.

    Raises:
        StoreError: The store cannot be read.
    """
    from models.job_losses import with_losses
    from models.reported_progress import known_progress, with_progress

    evidence = job_evidence(store, settings, cluster, now)
    running = jobs.filter((pl.col("state") == "RUNNING") & pl.col("start_time").is_not_null())
    told = store.query(_REPORTS, [cluster, now - LOOK_BACK, now, running["job_id"].to_list()])
    known = known_progress(running, told, now)
    rows = with_progress(rows, jobs, known, evidence.progress, now)
    hints = settings.hints
    losses = {"checkpoint_s": hints.checkpoint_s, "restart_s": hints.restart_s}
    return with_losses(rows, jobs, evidence.interruptions, now, **losses), known

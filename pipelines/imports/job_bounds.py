"""What a job's values can be, whichever kind of file told them: bounds of numbers and times, when a file was written.

Numbers go by the registry. Where states and times of a job refute each other is judged in `pipelines/job_history.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from features.vocabulary import COLUMNS, JOB_COLUMNS, JOB_EXTRAS
from pipelines.imports import Task
from pipelines.imports.report import report_places

FIRST_TIME, LAST_TIME = datetime(1990, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
UNKNOWN_STATE = "no state of a job, UNKNOWN is written"
NOT_ENDED = "a job that pends or runs has not ended"
_EARLY = "before the submission of the job"
_CLOCKS = timedelta(minutes=1)  # that those of two machines may be apart
_JOB = (*JOB_COLUMNS, *JOB_EXTRAS)
_NUMBERS = tuple(name for name in _JOB if COLUMNS[name].dtype.is_numeric())
_TIMES = ("eligible_time", "start_time", "end_time", "planned_start_time", "observed_at")


def written_at(path: Path, now: datetime) -> datetime:
    """When a file was written: its rows count as observed then, and never later than now, whatever clock wrote it."""
    return min(datetime.fromtimestamp(path.stat().st_mtime, UTC), now)


def bounded_jobs(jobs: pl.DataFrame, places: pl.Series, task: Task) -> pl.DataFrame:
    """Jobs without the numbers and times that cannot be true, as a start before the submission; each is counted.

    Args:
        jobs: Any columns of `raw_jobs`.
        places: Number of the line or row of each job.
        task: The import; nothing was observed later than its now.
    """
    for name in (*_NUMBERS, *_TIMES):
        if name not in jobs.columns or jobs[name].null_count() == len(jobs):
            continue
        if name in _NUMBERS:
            low, high = COLUMNS[name].low, COLUMNS[name].high
        else:
            low, high = FIRST_TIME, min(LAST_TIME, task.now) if name == "observed_at" else LAST_TIME
        bad = (jobs[name] < low) if low is not None else pl.Series([False] * len(jobs))
        bad = (bad | (jobs[name] > high) if high is not None else bad).fill_null(False)
        if bad.any():
            report_places(task.report, name, "out_of_range", places.filter(bad), jobs[name].filter(bad))
            jobs = jobs.with_columns(pl.when(~bad).then(pl.col(name)).alias(name))
    return _started_after_submission(jobs, places, task)


def _started_after_submission(jobs: pl.DataFrame, places: pl.Series, task: Task) -> pl.DataFrame:
    if "start_time" not in jobs.columns:
        return jobs
    early = pl.col("start_time") < pl.col("submit_time") - _CLOCKS
    bad = jobs.select(early.fill_null(False)).to_series()
    if not bad.any():
        return jobs
    shown = jobs["start_time"].filter(bad).dt.to_string("%Y-%m-%d %H:%M:%S")
    report_places(task.report, "start_time", _EARLY, places.filter(bad), shown)
    return jobs.with_columns(pl.when(~bad).then("start_time").alias("start_time"))

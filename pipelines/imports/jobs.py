"""Jobs of canonical files: Parquet or CSV in the columns of `core_jobs`, any that have `job_id` and `submit_time`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import polars as pl

from features.vocabulary import JOB_COLUMNS, JOB_EXTRAS, TIME, schema
from pipelines.imports import ImportingError, Piece, Task
from pipelines.imports.job_bounds import FIRST_TIME, UNKNOWN_STATE, bounded_jobs, written_at
from pipelines.imports.report import report_places
from pipelines.imports.tables import ROW, read_rows, typed, unknown_columns, without
from pipelines.sources.job_fields import STATES
from pipelines.words import lacking


def read_jobs(task: Task) -> Iterator[Piece]:
    """Jobs of each file.

    Yields:
        `raw_jobs`.

    Raises:
        ImportingError: A file is no table, or lacks `job_id` or `submit_time`.
    """
    table = schema("raw_jobs")
    types = {name: table[name] for name in (*JOB_COLUMNS, *JOB_EXTRAS)}
    names: set[str] = set()
    for path in task.files:
        written = written_at(path, task.now)
        for frame in read_rows(path, task, is_multiline=True):
            missing = [name for name in ("job_id", "submit_time") if name not in frame.columns]
            if missing:
                raise ImportingError(f"{path}: {lacking(missing)}; found: {_found(frame)}")
            unknown_columns(frame, tuple(types), task.report)
            jobs = typed(frame, types, task, ("job_id", "submit_time"))
            if "cluster" in jobs.columns:
                names.update(jobs["cluster"].drop_nulls().unique())
            yield {"raw_jobs": _usable(jobs, task, written)}
    others = sorted(names - {task.cluster})
    if others:
        shown = ", ".join(others[:10]) + (", …" if len(others) > 10 else "")
        task.report.note(f"cluster {shown} in the file: all of it is written as {task.cluster}")


def _found(frame: pl.DataFrame) -> str:
    names = [name for name in frame.columns if name != ROW]
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")


def _usable(jobs: pl.DataFrame, task: Task, written: datetime) -> pl.DataFrame:
    report = task.report

    def job_id(row: dict) -> object:
        return f"job {row['job_id']}"

    jobs = without(jobs, pl.col("job_id").is_null(), "no job_id", report, lambda row: f"submit {row['submit_time']}")
    jobs = without(jobs, pl.col("submit_time").is_null(), "no submit_time that can be read", report, job_id)
    ahead = pl.col("submit_time") > task.now + timedelta(days=1)
    jobs = without(jobs, ahead, "submitted more than a day ahead of now", report, job_id)
    jobs = without(jobs, pl.col("submit_time") < FIRST_TIME, "submitted before 1990", report, job_id)
    jobs = bounded_jobs(jobs, jobs[ROW], task)
    jobs = _with_state(jobs, task)
    observed = pl.lit(written, dtype=TIME)
    if "observed_at" in jobs.columns:
        observed = pl.col("observed_at").fill_null(observed)
    return jobs.with_columns(observed.alias("observed_at"), pl.lit(task.cluster).alias("cluster")).drop(ROW)


def _with_state(jobs: pl.DataFrame, task: Task) -> pl.DataFrame:
    if "state" not in jobs.columns:
        return jobs.with_columns(pl.lit("UNKNOWN").alias("state"))
    word = pl.col("state").str.extract(r"^([A-Za-z_]+)").str.to_uppercase()
    known = jobs.select(word.is_in(STATES).fill_null(False)).to_series()
    wrong = jobs.filter(~known & pl.col("state").is_not_null())
    if len(wrong):
        report_places(task.report, "state", UNKNOWN_STATE, wrong[ROW], wrong["state"])
    return jobs.with_columns(pl.when(known).then(word).otherwise(pl.lit("UNKNOWN")).alias("state"))

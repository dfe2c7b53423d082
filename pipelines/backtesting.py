"""`weatherglass backtest`: any canonical jobs file through the walk-forward protocol, no settings needed.

Here belong reading the file and writing what comes out; not the protocol (`models/backtest.py`) and not the page
(`dashboards/backtest_page.py`).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from features.vocabulary import JOB_COLUMNS, JOB_EXTRAS
from models.backtest import REFIT_DAYS, BacktestError, backtest
from models.backtest_report import BacktestReport
from models.judging import Walked
from models.remaining_task import RemainingTask
from models.tasks import make_task
from pipelines.progress import Progress
from pipelines.separators import separator_of_file
from pipelines.sources.job_fields import STATES
from pipelines.words import counted

KINDS = ("runtime", "remaining", "wait", "failure")
PREDICTIONS, REPORT, PAGE = "predictions.parquet", "report.json", "report.html"


def task_of(kind: str) -> Walked:
    """The task behind a word of the command line.

    Raises:
        BacktestError: There is none of that name; the message lists them.
    """
    if kind not in KINDS:
        raise BacktestError(f"no backtest {kind!r}; there are: {', '.join(KINDS)}")
    if kind == "remaining":
        return RemainingTask()
    return make_task("job_failure" if kind == "failure" else kind)


def read_jobs_file(path: Path) -> pl.DataFrame:
    """Canonical jobs of one cluster.

    Raises:
        BacktestError: The file cannot be read, holds no jobs, or those of more than one cluster.
    """
    try:
        is_csv = path.suffix.lower() == ".csv"
        if is_csv and (wrong := separator_of_file(path)):
            raise BacktestError(f"{path} cannot be read as a jobs file: {wrong}")
        jobs = _read_csv(path) if is_csv else pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise BacktestError(f"{path} cannot be read as a jobs file (Parquet or .csv): {reason}") from None
    if "cluster" in jobs.columns and jobs["cluster"].n_unique() > 1:
        names = sorted(jobs["cluster"].drop_nulls().unique().cast(pl.String))
        nameless = jobs["cluster"].null_count()
        said = ", ".join(names[:5]) + (f" and {nameless:,} jobs of none" if nameless else "")
        raise BacktestError(f"{path} holds jobs of several clusters ({said}): give one cluster's at a time")
    key = ["job_id", "submit_time"]
    if set(key) <= set(jobs.columns):
        once = jobs.unique(key, keep="last", maintain_order=True)
        if once.height < jobs.height:
            print(f"{jobs.height - once.height:,} rows are of jobs that come again: the last row of each counts")
        jobs = once
    passed = [name for name in jobs.columns if name not in (*JOB_COLUMNS, *JOB_EXTRAS)]
    if passed:
        print(f"columns that are not those of jobs are passed over: {', '.join(passed)}")
    return _with_states(jobs)


def _with_states(jobs: pl.DataFrame) -> pl.DataFrame:
    """States as the scheduler names them, whatever their case and what stands behind them (`CANCELLED by 0`)."""
    if "state" not in jobs.columns or jobs.schema["state"] == pl.Null:
        return jobs
    told = jobs["state"].cast(pl.String)
    word = told.str.extract(r"^\s*([A-Za-z_]+)").str.to_uppercase()
    is_state = word.is_in(STATES).fill_null(False)
    others = told.filter(~is_state & told.is_not_null())
    if len(others):
        named = ", ".join(repr(text) for text in others.unique(maintain_order=True)[:5])
        print(
            f"state of {counted(len(others), 'job')} is none that is known ({named}) and counts as no bad end; "
            f"states: {', '.join(STATES)}"
        )
    return jobs.with_columns(pl.when(is_state).then(word).otherwise(told).alias("state"))


def _read_csv(path: Path) -> pl.DataFrame:
    """A table of jobs as text: ids and names stay text, whatever the first rows look like."""
    texts = ("job_id", "user", "account", "queue", "name", "state", "cluster")
    head = pl.read_csv(path, n_rows=0)
    return pl.read_csv(
        path, try_parse_dates=True, infer_schema_length=None, null_values=["", "Unknown", "None", "UNLIMITED"],
        schema_overrides={name: pl.String for name in texts if name in head.columns},
    )  # fmt: skip


def run_backtest(
    kind: str, path: Path, out: Path, *, seed: int = 1, threads: int = 1, refit_days: float = REFIT_DAYS
) -> BacktestReport:
    """Backtest a file, write the three files of the outcome to a folder, and print the figures.

    Args:
        kind: One of `KINDS`.
        path: Canonical jobs, Parquet or CSV.
        out: Folder, made if needed; earlier outcomes in it are replaced.
        seed: Seed of every random choice: the same seed writes the same predictions.
        threads: Threads of a fit; they change nothing but the time.
        refit_days: Days between fits.

    Raises:
        BacktestError: The file cannot be used, or has too few jobs.
    """
    from dashboards.backtest_page import backtest_page

    if not math.isfinite(refit_days):
        raise BacktestError(f"--refit-days {refit_days:g}: give a number of days, as 7")
    task, jobs = task_of(kind), read_jobs_file(path)
    make_folder(out)  # before an hour of fits is made for nothing
    with Progress(f"backtest {kind}", "jobs", part="job") as progress:
        progress.stage(f"features of {jobs.height:,} jobs, then a fit for each {refit_days:g} days")
        judged = 0

        def show(done: int, total: int) -> None:
            nonlocal judged
            progress(done, total, done - judged)
            judged = done

        report = backtest(task, jobs, refit_days=refit_days, seed=seed, threads=threads, progress=show)
    facts = {**report.to_json(), "task": kind, "jobs_file": path.name, "seed": seed}
    write_together(
        out,
        {
            PREDICTIONS: report.predictions.write_parquet,
            PAGE: lambda part: part.write_text(backtest_page(report, path.stem), encoding="utf-8"),
            REPORT: lambda part: part.write_text(json.dumps(facts, indent=1), encoding="utf-8"),
        },
    )
    print(report.text())
    print(f"{report.predictions.height:,} predictions, figures and page in {out}: {PREDICTIONS}, {REPORT}, {PAGE}")
    return report


def make_folder(out: Path) -> None:
    """Make the folder of the outcome and see that it can be written.

    Raises:
        BacktestError: It cannot.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise BacktestError(f"--out {out} cannot be written: {error.strerror or error}") from None


def write_together(out: Path, files: dict[str, Callable[[Path], Any]]) -> None:
    """Write files of one outcome together: either all of them take the place of the earlier ones, or none does.

    Raises:
        BacktestError: The disk refused; earlier outcomes stand as they were.
    """
    parts = {name: out / f".{name}.part" for name in files}
    try:
        for name, write in files.items():
            write(parts[name])
    except OSError as error:
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise BacktestError(f"nothing was written to {out}: {error.strerror or error}") from None
    for name, part in parts.items():
        part.replace(out / name)

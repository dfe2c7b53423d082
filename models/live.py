"""Forecasts for the jobs of now: champions where there are any, baselines where there are none.

Here belongs putting the forecasters' answers into rows of `out_job_forecasts`; not the forecasters, and no reading of
jobs or writing of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_outcomes import failure_matrix
from features.job_queue import wait_matrix
from features.jobs import feature_matrix, microseconds
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES, conform
from models.contribution_words import in_words
from models.contributions import Contributions, of_recency
from models.curves import MEDIAN, cap, quantile_frame, read_seconds
from models.failure import FailureForecaster
from models.failure_kinds import KIND_COLUMNS
from models.failure_running import survivor_rates
from models.recency import KeyedRecency
from models.registry import Registry, RegistryError
from models.runtime import RuntimeForecaster, matrix_of_rows
from models.time_left import remaining_frame
from models.wait import SOON_COLUMNS, WaitForecaster

_log = logging.getLogger(__name__)

Matrix = NDArray[np.float32]
Floats = NDArray[np.float64]

SPREAD_ROWS = 1_000  # newest released jobs that a baseline's spread is learnt from
SPREAD_S = 600.0  # and how long that is kept
NO_HISTORY = "baseline:no_history"  # the version in charge while no job has ended: time limits, with a guessed spread
_TASKS: dict[str, Callable[[Any], Any]] = {
    "runtime": RuntimeForecaster.from_files,
    "wait": WaitForecaster.from_files,
    "job_failure": FailureForecaster.from_files,
}


class Champions:
    """The models in charge of one cluster, kept in memory until their registry names others.

    Args:
        registry: The cluster's registry; None when there is none yet.
    """

    def __init__(self, registry: Registry | None) -> None:
        self.registry = registry
        self._held: dict[str, tuple[str | None, str, Any]] = {}
        self._recency: tuple[int, KeyedRecency] | None = None

    def get(self, task: str) -> tuple[str, Any]:
        """Version and forecaster of a task's champion; `("", None)` where a baseline is in charge.

        A damaged champion gives way to the one before it, and without that to the baseline; both are logged.
        """
        if self.registry is None:
            return "", None
        try:
            pointed = self.registry.champion(task)
        except RegistryError:
            pointed = "?"
        if pointed is None:
            return "", None
        if task not in self._held or self._held[task][0] != pointed:
            self._held[task] = (pointed, *self._load(task))
        return self._held[task][1:]

    def _load(self, task: str) -> tuple[str, Any]:
        assert self.registry is not None
        try:
            loaded = self.registry.load(task, fallback=True, read=_TASKS[task])
            if loaded.fallback_reason:
                _log.error("%s: %s serves in place of the champion: %s", task, loaded.version, loaded.fallback_reason)
            return loaded.version, loaded.model
        except RegistryError as error:
            _log.error("%s: baseline serves, no champion can be used: %s", task, error)
            return "", None

    def recency(self, history: JobHistory, moment: int) -> KeyedRecency:
        """The keyed baseline in charge at a moment, with its spread."""
        if self._recency is None or not 0 <= moment - self._recency[0] <= SPREAD_S * 1e6:
            self._recency = (moment, recency_at(history, moment))
        return self._recency[1]


def recency_at(history: JobHistory, moment: int) -> KeyedRecency:
    """Keyed recency chosen and spread by the newest jobs that had ended before a moment (µs)."""
    table = history.table
    rows = np.flatnonzero(table.has_run & (table.end < moment))
    rows = rows[np.argsort(table.end[rows], kind="stable")][-SPREAD_ROWS:]
    return KeyedRecency.fit(matrix_of_rows(history, rows), history.log_runtime[rows])


def forecast_jobs(
    registry: Registry | Champions | None, jobs: pl.DataFrame, history: pl.DataFrame | JobHistory, at: datetime, *,
    ttl_s: float = 600.0, data_age_s: float | None = None,
) -> pl.DataFrame:  # fmt: skip
    """Forecast every pending and running job.

    Args:
        registry: The cluster's models; `Champions` keeps them in memory between calls.
        jobs: Canonical jobs; only `PENDING` and `RUNNING` ones are forecast.
        history: Jobs of the cluster. As a frame, `jobs` are put into it in their newer state; a prepared `JobHistory`
            must hold them already.
        at: The moment of the forecast.
        ttl_s: Seconds the forecasts are valid.
        data_age_s: Age of the newest input; by default from `observed_at` where there is one.

    Returns:
        Rows of `out_job_forecasts`: per pending job `runtime` (with the odds of bad ends) and `wait` (with the odds of
        a start), per running job `remaining` (with the odds of bad ends); `reasons` of the runtime with
        both. `model_version` is that of the quantiles, `baseline:<name>` where no model has earned its place,
        `NO_HISTORY` for runtimes while no job has ended.

    Raises:
        features.job_history.JobsError: A needed column is absent or null.
    """
    champions = registry if isinstance(registry, Champions) else Champions(registry)
    live = jobs.filter(pl.col("state").is_in(["PENDING", "RUNNING"]))
    if "start_time" in live.columns:  # by a clock that is ahead of ours, or not told: a job that runs has started
        begun = pl.min_horizontal("start_time", pl.lit(at).cast(live.schema["start_time"]))
        live = live.with_columns(start_time=pl.when(pl.col("state") == "RUNNING").then(begun).otherwise("start_time"))
    if isinstance(history, pl.DataFrame):
        history = JobHistory(merge_jobs(history, jobs))
    moment = microseconds(at)
    table = JobTable(live)
    X = feature_matrix(table, history, np.full(table.count, moment))
    runtime_version, curves, modes, made_of = _runtimes(champions, X, table, history, moment)
    told = in_words(made_of, X, live["user"].to_list() if "user" in live.columns else [None] * table.count)
    reasons = pl.DataFrame({"reasons": ["; ".join(some) for some in told]}, schema={"reasons": pl.String})
    failing: FailureForecaster | None = champions.get("job_failure")[1]
    odds = _failure_odds(failing or FailureForecaster.rate(), X, table, history, moment).hstack(reasons)
    is_running = live["state"] == "RUNNING"
    facts = live.select(
        pl.lit(None, dtype=pl.String).alias("cluster") if "cluster" not in live.columns else "cluster",
        "job_id", "submit_time", "state",
    )  # fmt: skip

    runtime = _rows(facts, _runtime_frame(curves, modes, table), "runtime", runtime_version, odds).filter(~is_running)
    model: RuntimeForecaster | None = champions.get("runtime")[1]
    known = (model.landmarks, model.grace) if model else (None, None)
    left = remaining_frame(curves, X, table, history, moment, *known)
    remaining = _rows(facts, left, "remaining", runtime_version, odds).filter(is_running)
    waiting = JobTable(live.filter(~is_running)) if is_running.any() else table
    wait_version, waits = champions.get("wait")
    X_waiting = wait_matrix(waiting, history, np.full(waiting.count, moment))
    found = (waits or WaitForecaster.recent()).frame(X_waiting, with_point=False)
    wait = _rows(
        facts.filter(~is_running), found.select(QUANTILE_COLUMNS), "wait", wait_version or "baseline:recent_waits", None
    ).hstack(found.select(SOON_COLUMNS))
    if data_age_s is None and "observed_at" in live.columns:
        newest = live["observed_at"].max()
        data_age_s = max(0.0, (at - newest).total_seconds()) if isinstance(newest, datetime) else None
    rows = pl.concat([runtime, remaining, wait], how="diagonal").with_columns(
        generated_at=pl.lit(at), valid_until=pl.lit(at + timedelta(seconds=ttl_s)),
        data_age_s=pl.lit(data_age_s, dtype=pl.Float64),
    )  # fmt: skip
    return conform(rows, "out_job_forecasts")


def forecast_runtimes(
    registry: Registry | Champions | None, jobs: pl.DataFrame, history: pl.DataFrame | JobHistory, at: datetime
) -> tuple[str, pl.DataFrame]:
    """Runtimes of jobs that are not submitted yet.

    Args:
        registry: The cluster's models.
        jobs: Jobs as they would be submitted; `job_id` and `submit_time` are filled in where absent.
        history: Jobs of the cluster.
        at: The moment of the forecast.

    Returns:
        Version in charge, and columns `QUANTILE_COLUMNS` and `mode_s` (where most probability lies within 25 %) in
        seconds, one row per job in order.
    """
    champions = registry if isinstance(registry, Champions) else Champions(registry)
    if "job_id" not in jobs.columns:
        jobs = jobs.with_columns(job_id=pl.format("?{}", pl.int_range(pl.len())))
    if "submit_time" not in jobs.columns:
        jobs = jobs.with_columns(submit_time=pl.lit(at))
    table, prepared, moment = JobTable(jobs), JobHistory.of(history), microseconds(at)
    X = feature_matrix(table, prepared, np.full(table.count, moment))
    version, model = champions.get("runtime")
    if model is None:
        model = champions.recency(prepared, moment)
        version, curves = _baseline_version(model, prepared, moment), cap(model.curves(X), table.limit_s)
        modes = curves[:, MEDIAN]
    else:
        curves, modes = model.distribution(X, table.limit_s)  # nobody asks why: the paths need not be followed
    return version, _runtime_frame(curves, modes, table)


def ended_jobs(history: JobHistory, moment: int) -> int:
    """Jobs that had run and ended before a moment (µs)."""
    return int(np.count_nonzero(history.table.has_run & (history.table.end < moment)))


def _baseline_version(keyed: KeyedRecency, history: JobHistory, moment: int) -> str:
    return f"baseline:{keyed.name}" if ended_jobs(history, moment) else NO_HISTORY


def _runtime_frame(curves: Floats, modes: Floats, table: JobTable) -> pl.DataFrame:
    """Quantiles and mode of runtimes, seconds; up to the median, and the mode, none above its job's limit."""
    seconds = read_seconds(curves, QUANTILES, table.limit_s)
    mode = pl.Series("mode_s", np.fmin(np.exp(modes), table.limit_s), nan_to_null=True)
    return quantile_frame(seconds).with_columns(mode)


def merge_jobs(history: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """History with these jobs in it; where both know a job, the state in `jobs` counts."""
    shared = [name for name in history.columns if name in jobs.columns]
    newer = jobs.select(shared)
    older = history.select(shared).join(newer.select("job_id", "submit_time"), on=["job_id", "submit_time"], how="anti")
    return pl.concat([older, newer.cast({name: older.schema[name] for name in shared})])


def _runtimes(
    champions: Champions, X: Matrix, table: JobTable, history: JobHistory, moment: int
) -> tuple[str, Floats, Floats, Contributions]:
    """Version in charge, its curves and modes, and what makes the medians."""
    version, model = champions.get("runtime")
    if model is not None:
        return version, *model.distribution_explained(X, table.limit_s)
    keyed = champions.recency(history, moment)
    curves = cap(keyed.curves(X), table.limit_s)  # its features are single precision: the limit is not
    version, middle = _baseline_version(keyed, history, moment), curves[:, MEDIAN]
    return version, curves, middle, of_recency(keyed, X).ending_at(middle)


def _failure_odds(
    failing: FailureForecaster, X: Matrix, table: JobTable, history: JobHistory, moment: int
) -> pl.DataFrame:
    """`p_fail` and its kinds; of a running job given how long it has run."""
    moments = np.full(table.count, moment)
    whole = failure_matrix(table, history, moments, X)
    elapsed_s = np.where(table.start < moment, np.maximum(moment - table.start, 0), 0) / 1e6
    runs = elapsed_s > 0
    odds = np.empty((table.count, 1 + len(KIND_COLUMNS)))
    odds[~runs] = failing.frame(whole[~runs]).to_numpy()
    if runs.any():
        rates = survivor_rates(table, history, np.flatnonzero(runs), moments[runs], elapsed_s[runs])
        odds[runs] = failing.running.odds(whole[runs], rates, elapsed_s[runs], table.limit_s[runs])
    return pl.from_numpy(odds, schema=["p_fail", *KIND_COLUMNS])


def _rows(
    facts: pl.DataFrame, quantiles: pl.DataFrame, forecast: str, version: str, odds: pl.DataFrame | None
) -> pl.DataFrame:
    rows = facts.hstack(quantiles).with_columns(forecast=pl.lit(forecast), model_version=pl.lit(version))
    return rows if odds is None else rows.hstack(odds)

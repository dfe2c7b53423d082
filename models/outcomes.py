"""Published forecasts beside what came: which publications are judged, and by which outcome.

A forecast counts as it was published and is never made again. Labels are those of the protocol (`models/tasks.py`): a
job that ended after it started, cancelled ones among them, has a runtime; a job that started has a wait. Here belongs
the join; not the losses (`models/outcome_scores.py`), not the shift of inputs (`models/drift.py`), no reading.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from features.job_history import NEVER, JobTable
from features.vocabulary import QUANTILE_COLUMNS, conform, schema
from models.tasks import make_task

LANDMARKS_S = (60, 600, 3600)  # of the wait or of the run; the first publication after each is judged
FIRST = 0  # landmark of the first publication of all
KINDS = ("runtime", "remaining", "wait", "failure")
_KEY = ["job_id", "submit_time"]
TASK_OF = {"runtime": "runtime", "remaining": "runtime", "wait": "wait", "failure": "job_failure"}


def join_outcomes(forecasts: pl.DataFrame, jobs: pl.DataFrame, begin: int, until: int) -> pl.DataFrame:
    """Publications beside the outcomes that were released in a span.

    Of each job the first publication of a kind is taken (landmark 0), and of `wait` and `remaining` the first after
    each of `LANDMARKS_S` of waiting or running, unless the next landmark (after the last: twice it) had come by then.
    Publications that the outcome had overtaken (the scheduler's word was old) are left out.

    Args:
        forecasts: Rows of `out_job_forecasts` of one cluster.
        jobs: Canonical jobs of that cluster in their newest state.
        begin: Start of the span, µs UTC, included.
        until: End of the span, µs UTC, excluded; nothing that was released later is looked at.

    Returns:
        Rows of `out_outcomes` without a baseline; `actual_s` counts from the publication for `wait` and `remaining`.

    Raises:
        features.job_history.JobsError: A needed column is absent or null.
    """
    said = forecasts.unique([*_KEY, "forecast", "generated_at"], keep="last").join(
        jobs.select(_KEY).unique(), on=_KEY, how="semi"
    )
    said = said.sort(*_KEY, "forecast", "generated_at")
    if said.is_empty():
        return pl.DataFrame(schema=schema("out_outcomes"))
    newest = jobs.unique(_KEY, keep="last", maintain_order=True)
    table = JobTable(said.select(_KEY).join(newest, on=_KEY, how="left", maintain_order="left"))
    made = said["generated_at"].dt.epoch("us").to_numpy()
    kind = said["forecast"].to_numpy()
    failed = said.filter(pl.col("forecast") == "runtime").height  # the odds of a bad end stand in rows of the runtime
    rows = np.concatenate([np.arange(said.height), np.flatnonzero(kind == "runtime")])
    kinds = np.concatenate([kind, np.full(failed, "failure", dtype=object)])
    start, end, made = table.start[rows], table.end[rows], made[rows]
    released = np.full(len(rows), NEVER)
    for name in KINDS:
        here = kinds == name
        released[here] = make_task(TASK_OF[name]).released(table)[rows][here]
    since = np.where(kinds == "remaining", start, table.submit[rows])
    elapsed_s = (made - since) / 1e6
    actual_s = np.where(
        kinds == "wait", (start - made) / 1e6, np.where(kinds == "remaining", (end - made) / 1e6, table.runtime_s[rows])
    )
    is_known = (released >= begin) & (released < until) & (made < released) & (elapsed_s >= 0)
    is_known &= (kinds != "failure") | said["p_fail"].is_not_null().to_numpy()[rows]
    has_quantiles = said.select(pl.all_horizontal(pl.col(QUANTILE_COLUMNS).is_not_null())).to_series().to_numpy()
    is_known &= (kinds == "failure") | has_quantiles[rows]
    found = said[rows].with_columns(
        pl.Series("forecast", kinds.astype(str)),
        pl.from_epoch(pl.Series("released_at", np.where(is_known, released, begin)), "us")
        .dt.replace_time_zone("UTC")
        .alias("released_at"),
        pl.Series("waited_s", elapsed_s),
        pl.Series("actual_s", np.where(kinds == "failure", np.nan, actual_s)).fill_nan(None),
        pl.Series("state", table.frame["state"][rows]),
        # A plan that had come due without a start counts as now.
        ((pl.col("planned_start_time") - pl.col("generated_at")).dt.total_microseconds() / 1e6)
        .clip(lower_bound=0.0)
        .alias("planned_s"),
    )
    found = found.filter(pl.Series(is_known))
    return conform(_landmarks(found).drop("waited_s").select(_columns()), "out_outcomes")


def _columns() -> list[str]:
    return [name for name in schema("out_outcomes") if name not in ("baseline", "baseline_s", "baseline_p_fail")]


def _landmarks(found: pl.DataFrame) -> pl.DataFrame:
    """The publications that are judged, each with its landmark."""
    by = [*_KEY, "forecast"]
    ordered = found.sort(*by, "generated_at")
    parts = [ordered.unique(by, keep="first", maintain_order=True).with_columns(landmark_s=pl.lit(FIRST))]
    later = ordered.filter(pl.col("forecast").is_in(["wait", "remaining"]))
    for at_s, next_s in zip(LANDMARKS_S, (*LANDMARKS_S[1:], 2 * LANDMARKS_S[-1]), strict=True):
        near = later.filter((pl.col("waited_s") >= at_s) & (pl.col("waited_s") < next_s))
        parts.append(near.unique(by, keep="first", maintain_order=True).with_columns(landmark_s=pl.lit(at_s)))
    return pl.concat(parts).with_columns(pl.col("landmark_s").cast(pl.Int32))

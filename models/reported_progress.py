"""Time left of jobs that report how far they are: by their steps, beside what earlier jobs of their kind took.

A job is foreseen to end when its steps are done (the plan), unless it ends otherwise before: it fails, is cancelled,
stops early. Here belongs the mixture of the two and its place among the forecasts of a moment; what plans are worth
stands in `progress_evidence.py`, the forecast from earlier jobs in `runtime.py`.
"""

from __future__ import annotations

from datetime import datetime

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_progress import FACTS, progress_at
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES, TIME
from models.curves import read_levels, rising
from models.progress_evidence import FLOOR_S, Evidence, estimate, stratum

Floats = NDArray[np.float64]

_SAMPLES = 64
SUFFIX = "+progress"  # of `model_version` where reports were used


def plan_quantiles(facts: pl.DataFrame, estimate_s: Floats, evidence: Evidence) -> Floats:
    """Quantiles at `LEVELS` of the time until the steps are done, s, shape (n, len(LEVELS)); NaN without estimate."""
    off = np.asarray(evidence.spreads)[stratum(facts, estimate_s)]
    return rising(np.maximum(np.exp(off) * (estimate_s[:, None] + FLOOR_S) - FLOOR_S, 0.0))


def combined(history_s: Floats, plan_s: Floats, p_reached: Floats, left_s: Floats) -> Floats:
    """Quantiles of the time left: the plan's, or with 1 − p whichever comes first of the plan and of the history.

    Args:
        history_s: From earlier jobs, at `QUANTILES`, shape (n, 8).
        plan_s: From reports, at `LEVELS`, shape (n, len(LEVELS)).
        p_reached: Probability that the plan is reached, shape (n,).
        left_s: Time until the limit, s, shape (n,); infinite without one.

    Returns:
        Seconds at `QUANTILES`, shape (n, 8): never crossing, never past the limit.
    """
    at = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    base = np.eye(len(QUANTILES))
    to_samples = np.stack([np.interp(at, QUANTILES, row) for row in base])
    history = np.expm1(np.log1p(np.maximum(history_s, 0.0)) @ to_samples)
    plan = np.maximum(read_levels(plan_s, at), 0.0)
    mixed = np.random.default_rng(1).permutation(_SAMPLES)  # the two are taken as independent
    other = np.minimum(history, plan[:, mixed])
    values = np.concatenate([plan, other], axis=1)
    p = p_reached[:, None]
    weights = np.concatenate([np.broadcast_to(p, plan.shape), np.broadcast_to(1 - p, plan.shape)], axis=1) / _SAMPLES
    order = np.argsort(values, axis=1, kind="stable")
    values, weights = np.take_along_axis(values, order, axis=1), np.take_along_axis(weights, order, axis=1)
    reached = np.cumsum(weights, axis=1)
    out = np.empty((len(values), len(QUANTILES)))
    rows = np.arange(len(values))
    for column, level in enumerate(QUANTILES):
        out[:, column] = values[rows, np.minimum((reached < level - 1e-9).sum(axis=1), values.shape[1] - 1)]
    return rising(np.minimum(out, left_s[:, None]))


def known_progress(jobs: pl.DataFrame, reports: pl.DataFrame, at: datetime) -> pl.DataFrame:
    """What running jobs have reported by a moment: `job_id` and the facts of `progress_at`, for those that did.

    Args:
        jobs: The live jobs: `job_id`, `start_time`; of one id the newest counts.
        reports: Rows of `core_job_progress` of these jobs; later ones than `at` change nothing.
        at: The moment, UTC.
    """
    running = jobs.filter(pl.col("start_time") <= at).sort("start_time").unique("job_id", keep="last")
    asked = running.select("job_id", "start_time", moment=pl.lit(at).cast(TIME))
    found = asked.select("job_id").hstack(progress_at(asked, reports))
    return found.filter(pl.col("reported_at").is_not_null())


def with_progress(
    rows: pl.DataFrame, jobs: pl.DataFrame, known: pl.DataFrame, evidence: Evidence, at: datetime
) -> pl.DataFrame:
    """Forecast rows in which what is left of reporting jobs follows their reports too.

    Args:
        rows: Rows of `out_job_forecasts`.
        jobs: The live jobs: `job_id`, `user`, `name`, `start_time`, `time_limit_s`.
        known: What they reported, of `known_progress`.
        evidence: What ended jobs have shown.
        at: The moment of the forecast, UTC.

    Returns:
        The rows in the same order. Where reports tell an end, `remaining` has new quantiles, `SUFFIX` at its
        `model_version`, and the report first among `reasons`.
    """
    if known.is_empty() or rows.is_empty():
        return rows
    numbered = rows.with_row_index("row")
    about = jobs.select("job_id", "user", "name", "start_time", "time_limit_s").unique("job_id", keep="last")
    asked = numbered.filter(pl.col("forecast") == "remaining").select("row", "job_id", *QUANTILE_COLUMNS)
    asked = asked.join(about, on="job_id", maintain_order="left").join(known, on="job_id", maintain_order="left")
    facts = asked.select(*FACTS)
    expected_s = estimate(facts, evidence)
    use = (
        ~np.isnan(expected_s)
        & ~asked.select(pl.any_horizontal(pl.col(QUANTILE_COLUMNS).is_null())).to_series().to_numpy()
    )
    if not use.any():
        return rows
    asked, facts, expected_s = asked.filter(pl.Series(use)), facts.filter(pl.Series(use)), expected_s[use]
    elapsed_s = ((pl.lit(at) - pl.col("start_time")).dt.total_microseconds() / 1e6).alias("elapsed_s")
    limits = asked.select(pl.col("time_limit_s").cast(pl.Float64), elapsed_s)
    left_s = (limits["time_limit_s"] - limits["elapsed_s"]).fill_null(np.inf).to_numpy()
    share = (facts["step"] / facts["max_steps"]).to_numpy()
    # Past its limit a job is about to be killed, as earlier ones tell: its plan ends it only where that comes first.
    p_reached = np.where(left_s > 0, evidence.p_reached(asked, share), 0.0)
    left_s = np.where(left_s > 0, left_s, np.inf)
    history_s = asked.select(QUANTILE_COLUMNS).to_numpy()
    found_s = combined(history_s, plan_quantiles(facts, expected_s, evidence), p_reached, left_s)
    told = pl.DataFrame(found_s, schema=[f"{name}_new" for name in QUANTILE_COLUMNS]).with_columns(
        asked["row"], pl.Series("told", [in_words(fact) for fact in facts.iter_rows(named=True)])
    )
    merged = numbered.join(told, on="row", how="left", maintain_order="left")
    is_new = pl.col("told").is_not_null()
    version = pl.when(is_new).then(pl.col("model_version") + SUFFIX).otherwise("model_version")
    reasons = pl.when(is_new).then(
        pl.concat_str("told", pl.col("reasons").replace("", None), separator="; ", ignore_nulls=True)
    )
    return merged.with_columns(
        *(pl.coalesce(f"{name}_new", name).alias(name) for name in QUANTILE_COLUMNS),
        version.alias("model_version"), reasons.otherwise("reasons").alias("reasons"),
    ).select(rows.columns)  # fmt: skip


def in_words(fact: dict[str, object]) -> str:
    """A report as a reason: `reported progress: step 4,200 of 10,000 at 1.3 s`."""
    return f"reported progress: step {fact['step']:,} of {fact['max_steps']:,} at {fact['step_time_s']:.3g} s"

"""GPU-hours that forecast jobs are expected to lose to bad ends, with and without checkpoints, for many at once.

The rules are those of `checkpointing.py`, here over arrays of jobs: failures of nodes come at the constant rate that
gives the forecast's own P(node failure) over its distribution of what is to come; the advised interval follows the mean
time to failure that was measured on jobs of that size (`interruptions.py`).
"""

from __future__ import annotations

from datetime import datetime

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.vocabulary import QUANTILE_COLUMNS, QUANTILES
from models.checkpointing import daly_interval_s
from models.interruptions import CLASSES, Interruptions

Floats = NDArray[np.float64]

LOSS_COLUMNS = ("lost_gpu_hours", "lost_gpu_hours_hardware", "lost_gpu_hours_checkpointed", "checkpoint_interval_s")
_SAMPLES = 16  # of a runtime distribution
_ROUNDS = 12  # of Newton's method, which comes closer from below each time
_MOST = 0.999  # probability of a failure; nearer to 1 the rate is not told by it
_FORECASTS = ("runtime", "remaining")


def with_losses(
    rows: pl.DataFrame, jobs: pl.DataFrame, rates: Interruptions, at: datetime, *, checkpoint_s: float, restart_s: float
) -> pl.DataFrame:
    """Forecast rows with `LOSS_COLUMNS`; they stand in rows of `runtime` and `remaining`, null where unknown.

    - `lost_gpu_hours`: expected to be lost to any bad end without checkpoints. Of a running job all that it has done so
      far is at stake. Bad ends other than node failures take the whole run.
    - `lost_gpu_hours_hardware`: the part of node failures.
    - `lost_gpu_hours_checkpointed`: the same with a checkpoint each `checkpoint_interval_s` from now on, of which the
      first has just been written; the time of the checkpoints is counted too.
    - `checkpoint_interval_s`: by Daly's rule from failures that were counted on jobs of that many nodes; null where
      none was seen on the cluster yet.

    Args:
        rows: Rows of `out_job_forecasts` with `p_fail` and `p_node_failure`.
        jobs: The live jobs: `job_id`, `gpus`, `nodes`, `start_time`; without GPUs nothing is told.
        rates: Failures that were counted.
        at: The moment of the forecast, UTC.
        checkpoint_s: Time that writing a checkpoint stops a job, s.
        restart_s: Time from a failure until a job works again, s.
    """
    about = jobs.select("job_id", "gpus", "nodes", "start_time").unique("job_id", keep="last")
    numbered = rows.with_row_index("row")
    use = numbered.filter(
        pl.col("forecast").is_in(_FORECASTS) & pl.all_horizontal(pl.col(QUANTILE_COLUMNS).is_not_null())
    )
    use = use.select("row", "job_id", "forecast", "p_fail", "p_node_failure", *QUANTILE_COLUMNS).join(
        about.filter(pl.col("gpus") > 0), on="job_id", maintain_order="left"
    )
    ran = (pl.lit(at) - pl.col("start_time")).dt.total_microseconds() / 1e6
    done_s = use.select(pl.when(pl.col("forecast") == "remaining").then(ran).fill_null(0.0).clip(lower_bound=0.0))
    times = _samples(use.select(QUANTILE_COLUMNS).to_numpy())
    columns = use.select(pl.col("gpus", "nodes", "p_fail", "p_node_failure").cast(pl.Float64).fill_null(np.nan))
    gpus, nodes, p_fail, p_node = (columns[name].to_numpy() for name in columns.columns)
    done = done_s.to_series().to_numpy()
    p_node = np.minimum(p_node, _MOST)
    rate = failure_rates(p_node, times)
    hardware = _lost_within(times, rate).mean(axis=1) + (done + restart_s) * p_node
    other = np.maximum(p_fail - p_node, 0.0) * (done + times.mean(axis=1) + restart_s)
    interval = intervals_s(nodes, rates, checkpoint_s)
    rework, written = _checkpointed(times, rate, interval + checkpoint_s)
    kept = (rework + written * checkpoint_s).mean(axis=1) + restart_s * p_node
    hours = gpus / 3600
    found = pl.DataFrame(
        dict(zip(LOSS_COLUMNS, ((hardware + other) * hours, hardware * hours, kept * hours, interval), strict=True))
    ).fill_nan(None)
    told = found.with_columns(use["row"])
    return numbered.drop(LOSS_COLUMNS, strict=False).join(told, on="row", how="left", maintain_order="left").drop("row")


def failure_rates(p_failure: Floats, times_s: Floats) -> Floats:
    """Rates at which failures come, 1/s, shape (n,), so that a job is hit with its probability before it ends.

    The mean of 1 − e^(−rate·T) over equally likely T rises ever more slowly with the rate, so Newton's steps from the
    left never pass the root.

    Args:
        p_failure: Probabilities below 1, shape (n,); NaN gives NaN.
        times_s: Equally likely times until the end, s, shape (n, k).
    """
    width = times_s.shape[1]
    rate = p_failure / np.maximum(times_s.mean(axis=1), 1e-9)
    for _ in range(_ROUNDS):
        left = np.exp(-rate[:, None] * times_s)
        more = (p_failure - 1 + left.mean(axis=1)) / np.maximum(np.einsum("ij,ij->i", times_s, left), 1e-300) * width
        rate = rate + more
        if not (more > 1e-9 * rate).any():
            break
    return rate


def intervals_s(nodes: Floats, rates: Interruptions, checkpoint_s: float) -> Floats:
    """Advised work between two checkpoints, s, shape (n,); NaN without nodes, or where no failure was seen yet."""
    out = np.full(len(nodes), np.nan)
    if not rates.overall.failures:
        return out
    for count in np.unique(nodes[(nodes >= 1) & (nodes <= CLASSES[-1][1])]):
        out[nodes == count] = daly_interval_s(checkpoint_s, rates.mttf_s(int(count))[0])
    return out


def _samples(quantiles_s: Floats) -> Floats:
    """Equally likely times, s, shape (n, `_SAMPLES`): straight in the logarithm between quantiles."""
    at = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    weights = np.stack([np.interp(at, QUANTILES, row) for row in np.eye(len(QUANTILES))])
    return np.exp(np.log(np.maximum(quantiles_s, 1.0)) @ weights)


def _lost_within(times_s: Floats, rate: Floats) -> Floats:
    """∫₀ᵗ u·λe^(−λu) du: work lost where a failure may come until t, s; shapes (n, k) and (n,)."""
    x = rate[:, None] * times_s
    exact = (-np.expm1(-x) - x * np.exp(-x)) / np.maximum(rate, 1e-300)[:, None]
    return np.where(x < 1e-4, times_s * (x / 2 - x**2 / 3), exact)  # two nearly equal numbers otherwise


def _checkpointed(times_s: Floats, rate: Floats, window_s: Floats) -> tuple[Floats, Floats]:
    """Work lost with a checkpoint after each window, s, and checkpoints written; shape (n, k), NaN without a window."""
    window = window_s[:, None]
    written = np.floor(times_s / window)
    rest = times_s - written * window
    reached = np.exp(-written * window * rate[:, None])
    passed = np.maximum(-np.expm1(-window * rate[:, None]), 1e-300)
    whole = _lost_within(window, rate) / passed
    return whole * (1 - reached) + reached * _lost_within(rest, rate), written

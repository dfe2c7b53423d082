"""When running jobs end: one distribution per job, its quantiles, and joint draws over all jobs.

Here belongs the reading of forecasts (quantiles) as distributions, conditional on a job still running; not who waits
for the nodes (`windows.py`), and no forecasting (`models/`).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import numpy as np
import polars as pl

from features.vocabulary import QUANTILE_COLUMNS, QUANTILES, conform, schema
from scheduler_hints.schema import JobForecast

# Runtime as a share of the time limit at the 5, 10, 25, 50, 75, 80, 90 and 95 % quantile: the median of three public
# traces with limits (cedar-2021, kth-sp2-1996, llnl-atlas-2006; 184,854 jobs). It stands in for a missing forecast.
LIMIT_SHARES = (0.0009, 0.0038, 0.0233, 0.159, 0.495, 0.649, 0.980, 0.999)
LEVELS = np.array([0.0, *QUANTILES, 1.0])
KILL_WAIT_S = 120.0  # past their limit, 99 % of the killed jobs of cedar-2021 had ended, all of llnl-atlas-2006's
_TAIL = 2.0  # without a limit, the last 5 % reach to twice the 95 % quantile; quantiles in there are not given out
_SEED = 0x5EED


class JobEnds:
    """Ends of running jobs, seconds from `now`.

    Attributes:
        job_ids: Jobs, one per row of `knots`.
        knots: Seconds from now at `LEVELS`, shape (jobs, 10), rising along a row; before now means already ruled out.
        has_limit: The job has a time limit, so that the last knot is known.
        is_assumed: No forecast: the distribution stands on the time limit alone.
    """

    def __init__(
        self, job_ids: list[str], groups: list[str], knots: np.ndarray, has_limit: np.ndarray, is_assumed: np.ndarray
    ) -> None:
        self.job_ids = job_ids
        self.knots = knots
        self.has_limit = has_limit
        self.is_assumed = is_assumed
        self._groups = groups
        self._passed = _level_at(knots, 0.0)
        # Past everything foreseen: such a job may end at any moment.
        self._overdue = (self._passed >= 1.0) | (~has_limit & (self._passed >= QUANTILES[-1]))

    def __len__(self) -> int:
        return len(self.job_ids)

    def quantile(self, level: np.ndarray | float) -> np.ndarray:
        """Seconds from now by which each job has ended with probability `level`, given that it runs now.

        Args:
            level: Probability, one for all jobs or one per job.

        Returns:
            Shape (jobs,); infinite where nothing is known that high up: overdue jobs, and above 95 % without a limit.
        """
        wanted = self._passed + np.broadcast_to(level, len(self)) * (1 - self._passed)
        found = _value_at(self.knots, wanted[:, None])[:, 0]
        unknown = self._overdue | (~self.has_limit & (wanted > QUANTILES[-1]))
        return np.where(unknown, np.inf, np.maximum(found, 0.0))

    def draws(self, samples: int, *, together: bool) -> np.ndarray:
        """Joint draws of the ends, the same at every call for the same jobs.

        Each job keeps its own random numbers whichever other jobs there are, so that what is made from them changes
        from one moment to the next only as far as the jobs do.

        Args:
            samples: Number of draws.
            together: Jobs of one user and name get the same random numbers (they end early or late together), instead
                of every job its own.

        Returns:
            Seconds from now, shape (jobs, samples), float32. Overdue jobs are drawn as ending now.
        """
        if not len(self):
            return np.zeros((0, samples), dtype=np.float32)
        keys = pl.Series(self._groups if together else self.job_ids, dtype=pl.String).hash(_SEED).to_numpy()
        passed = self._passed[:, None]
        wanted = passed + _uniforms(keys, samples) * (1 - passed)
        ends = np.zeros((len(self), samples), dtype=np.float32)
        for row in np.flatnonzero(~self._overdue):  # interp a row is 4 times as fast as gathering over all of them
            ends[row] = np.interp(wanted[row], LEVELS, self.knots[row])
        return np.maximum(ends, 0.0)


def forecast_rows(forecasts: pl.DataFrame | Iterable[JobForecast]) -> pl.DataFrame:
    """Job forecasts as rows of out_job_forecasts, from such rows or from published `JobForecast`s.

    A published forecast has no `valid_until` of its own: whoever read the snapshot has seen to that.
    """
    if isinstance(forecasts, pl.DataFrame):
        return forecasts
    types = schema("out_job_forecasts")
    rows = [
        (item.cluster, item.job_id, kind, item.generated_at, *(getattr(found, name) for name in QUANTILE_COLUMNS))
        for item in forecasts
        for kind in ("runtime", "remaining", "wait")
        if (found := getattr(item, kind)) is not None
    ]
    names = ("cluster", "job_id", "forecast", "generated_at", *QUANTILE_COLUMNS)
    frame = pl.DataFrame(rows, schema={name: types[name] for name in names}, orient="row")
    return conform(frame, "out_job_forecasts")


def job_ends(running: pl.DataFrame, forecasts: pl.DataFrame, now: datetime) -> JobEnds:
    """Read forecasts as distributions of the end of each running job.

    The newest valid `remaining` forecast counts from when it was made; else the newest valid `runtime` forecast counts
    from the start of the job; else the job's time limit with `LIMIT_SHARES`. A job without either may end at any
    moment. Between quantiles the distribution is linear; up to the median it ends at the time limit, above it no later
    than `KILL_WAIT_S` past it.

    Args:
        running: Rows of JOB_COLUMNS in state RUNNING.
        forecasts: Rows of out_job_forecasts; those past `valid_until` or made after `now` are not used.
        now: The moment, UTC.

    Returns:
        Ends in the order of `running`.
    """
    start = pl.coalesce("start_time", "observed_at", pl.lit(now).cast(pl.Datetime("us", "UTC")))
    jobs = running.select(
        "job_id",
        pl.concat_str([pl.col(name).fill_null("") for name in ("user", "name")], separator="\x1f").alias("group"),
        pl.min_horizontal((pl.lit(now) - start).dt.total_microseconds() / 1e6, pl.lit(1e9)).alias("elapsed_s"),
        pl.col("time_limit_s").cast(pl.Float64),
    )
    valid = forecasts.filter(
        pl.col("generated_at") <= now,
        pl.col("valid_until").is_null() | (pl.col("valid_until") > now),
        pl.all_horizontal(pl.col(QUANTILE_COLUMNS).is_not_null()),
    ).sort("generated_at")
    for kind in ("remaining", "runtime"):
        newest = (
            valid.filter(pl.col("forecast") == kind)
            .unique("job_id", keep="last", maintain_order=True)
            .select(
                "job_id",
                pl.concat_list(pl.col(QUANTILE_COLUMNS).cast(pl.Float64)).alias(f"{kind}_q"),
                ((pl.lit(now) - pl.col("generated_at")).dt.total_microseconds() / 1e6).alias(f"{kind}_age_s"),
            )
        )
        jobs = jobs.join(newest, on="job_id", how="left", maintain_order="left")
    count = jobs.height
    elapsed = np.maximum(jobs["elapsed_s"].to_numpy(), 0.0)
    limit = jobs["time_limit_s"].fill_null(np.nan).to_numpy()
    has_limit = ~np.isnan(limit)
    left = np.where(has_limit, np.maximum(limit - elapsed, 0.0), np.nan)
    quantiles = np.zeros((count, len(QUANTILES)))
    is_assumed = np.ones(count, dtype=bool)
    if count:
        quantiles[has_limit] = limit[has_limit, None] * np.array(LIMIT_SHARES) - elapsed[has_limit, None]
        for kind, passed in (("runtime", elapsed), ("remaining", jobs["remaining_age_s"].fill_null(0.0).to_numpy())):
            known = jobs[f"{kind}_q"].is_not_null().to_numpy()
            if known.any():
                rows = np.array(jobs[f"{kind}_q"].drop_nulls().to_list())
                quantiles[known] = rows - passed[known, None]
                is_assumed[known] = False
    quantiles = np.maximum.accumulate(quantiles, axis=1)
    most = left[:, None] + np.where(left[:, None] > 0, KILL_WAIT_S, 0.0) * (np.array(QUANTILES) > 0.5)
    quantiles = np.where(has_limit[:, None], np.minimum(quantiles, most), quantiles)
    # The distribution starts where the forecast was made: that far back it had not ended.
    origin = np.minimum(quantiles[:, :1], -_origin(jobs, elapsed, is_assumed)[:, None])
    top = np.where(has_limit, np.fmax(left, quantiles[:, -1]), np.maximum(quantiles[:, -1], 0) * _TAIL)
    knots = np.concatenate([origin, quantiles, top[:, None]], axis=1)
    return JobEnds(jobs["job_id"].to_list(), jobs["group"].to_list(), knots, has_limit, is_assumed)


def _origin(jobs: pl.DataFrame, elapsed: np.ndarray, is_assumed: np.ndarray) -> np.ndarray:
    """Seconds before now at which each distribution begins."""
    age = jobs["remaining_age_s"].fill_null(np.nan).to_numpy()
    return np.where(np.isnan(age) | is_assumed, elapsed, age)


def _level_at(knots: np.ndarray, at: float) -> np.ndarray:
    """P(end ≤ at) of each row."""
    if not len(knots):
        return np.zeros(0)
    right = np.clip((knots <= at).sum(axis=1), 1, knots.shape[1] - 1)
    rows = np.arange(len(knots))
    low, high = knots[rows, right - 1], knots[rows, right]
    width = high - low
    share = np.where(width > 0, (at - low) / np.where(width > 0, width, 1), 1.0)
    level = LEVELS[right - 1] + np.clip(share, 0, 1) * (LEVELS[right] - LEVELS[right - 1])
    return np.where(knots[:, 0] > at, 0.0, level)


def _value_at(knots: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Values of each row at levels of shape (rows, n)."""
    right = np.clip(np.searchsorted(LEVELS, levels, side="left"), 1, len(LEVELS) - 1)
    low = np.take_along_axis(knots, right - 1, axis=1)
    high = np.take_along_axis(knots, right, axis=1)
    share = (levels - LEVELS[right - 1]) / (LEVELS[right] - LEVELS[right - 1])
    return low + share * (high - low)


def _uniforms(keys: np.ndarray, samples: int) -> np.ndarray:
    """Numbers in (0, 1) of shape (keys, samples), a function of key and sample number alone (splitmix64)."""
    steps = np.arange(1, samples + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = keys.astype(np.uint64)[:, None] + steps
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

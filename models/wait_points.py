"""Points and steadiness of forecast starts: the likeliest minute, and how far a forecast start moves while a job waits.

The median of a wait is not the point that most often lies within a minute of the truth: that one sits where the
distribution is densest in seconds. Here belong such readings of wait curves; not the curves (`models/wait.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory
from models.curves import LEVELS, level_of

if TYPE_CHECKING:
    from models.wait import WaitForecaster

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WITHIN_S = 60.0
_GRID = 28  # steps of a third of the window
CHURN_STEP_S = 600  # between two looks at a waiting job, when churn is measured on recorded jobs
CHURN_STEPS = 12
CHURN_JOBS = 300
MOVED_S = 600.0  # a forecast start that moves by more is counted as moved


def likeliest_s(curves: Floats, within_s: float = WITHIN_S) -> Floats:
    """The point that most probability lies around, within so many seconds; shape (n,).

    Args:
        curves: ln(seconds), shape (n, len(LEVELS)); up to one second is no wait.
        within_s: Half the width of the window.
    """
    n = len(curves)
    ends = np.where(curves <= 1e-9, 0.0, np.exp(curves))
    best, point = np.full(n, -1.0), np.zeros(n)
    # A grid over what is soon, which begins where no wait is just inside, and wherever two levels lie close.
    grid = within_s * (np.arange(_GRID) / 3 + 1)
    candidates = [np.full(n, point) for point in grid.tolist()]
    candidates += [(ends[:, k] + ends[:, k + 1]) / 2 for k in range(len(LEVELS) - 1)]
    for candidate in candidates:
        held = _upto(curves, candidate + within_s) - np.where(
            candidate > within_s, _upto(curves, candidate - within_s), 0.0
        )
        is_better = held > best + 1e-9
        best, point = np.where(is_better, held, best), np.where(is_better, candidate, point)
    return np.maximum(point, 0.0)


def _upto(curves: Floats, seconds: Floats) -> Floats:
    return level_of(curves, np.log(np.maximum(seconds, 1.0)))


def start_churn(rows: pl.DataFrame) -> pl.DataFrame:
    """How far the forecast start of each waiting job moved from one publication to the next.

    Args:
        rows: Rows of `out_job_forecasts`; those of forecast `wait` are read: `job_id`, `submit_time`, `generated_at`,
            `q50_s`.

    Returns:
        One row per job with two publications or more: `job_id`, `submit_time`, `publications`, `move_s` (median of
        |move|), `moved_share` (share of moves over ten minutes), `drift_s` (median signed move; positive is later).
    """
    order = ["job_id", "submit_time"]
    start_s = pl.col("generated_at").dt.epoch("us") / 1e6 + pl.col("q50_s")
    moves = (
        rows.filter((pl.col("forecast") == "wait") & pl.col("q50_s").is_not_null())
        .sort(*order, "generated_at")
        .with_columns(move_s=start_s.diff().over(order))
    )
    return (
        moves.group_by(order, maintain_order=True)
        .agg(
            publications=pl.len(),
            move_s=pl.col("move_s").abs().median(),
            moved_share=(pl.col("move_s").abs() > MOVED_S).cast(pl.Float64).mean(),
            drift_s=pl.col("move_s").median(),
        )
        .filter(pl.col("publications") > 1)
    )


def recorded_publications(
    forecaster: WaitForecaster, history: JobHistory, rows: Ints, *, step_s: int = CHURN_STEP_S,
    steps: int = CHURN_STEPS, most: int = CHURN_JOBS, seed: int = 1,
) -> pl.DataFrame:  # fmt: skip
    """Forecasts of recorded jobs as they would have been published while they waited.

    Args:
        forecaster: The wait forecaster.
        history: Jobs of the cluster.
        rows: History rows of jobs that started; those that waited for two steps or more are looked at.
        step_s: Seconds between publications.
        steps: Publications of a job at most.
        most: Jobs at most, drawn at random.
        seed: Seed of the draw.

    Returns:
        What `start_churn` reads, one row per job and publication.
    """
    from models.wait import matrix_of_waits

    table = history.table
    long = rows[table.wait_s[rows] > 2 * step_s]
    if len(long) > most:
        long = np.sort(np.random.default_rng(seed).choice(long, most, replace=False))
    asked, moments = [], []
    for step in range(steps):
        waits = long[table.wait_s[long] > step * step_s]
        asked.append(waits)
        moments.append(table.submit[waits] + step * step_s * 1_000_000)
    asked, moments = np.concatenate(asked), np.concatenate(moments)
    found = forecaster.frame(matrix_of_waits(history, asked, moments))
    return table.frame[asked].select("job_id", "submit_time").with_columns(
        forecast=pl.lit("wait"), generated_at=pl.Series(moments).cast(pl.Datetime("us", "UTC")), q50_s=found["q50_s"]
    )  # fmt: skip

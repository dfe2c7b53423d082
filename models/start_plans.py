"""The scheduler's own planned starts of waiting jobs as forecasts: what it had planned at a moment, and how far off.

A scheduler has planned only those of the waiting jobs that its backfill has tried, so its figures hold for those
alone, and how many they are belongs beside them: metrics named `planned_…` are of the jobs that had a plan. Here belong
the plan at a moment, its losses, and how far forecast starts move; not reading or keeping.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from models.backtest_report import Score
from models.calibration import MIN_ROWS
from models.judging import Judged
from models.outcomes import FIRST, LANDMARKS_S
from models.promotion import DRAWS, Interval, mean_interval, ratio_interval
from models.scoring import log_error
from models.wait_points import WITHIN_S, start_churn

Floats = NDArray[np.float64]

PLAN = "scheduler_plan"  # its name among baselines


def plans_at(states: pl.DataFrame, asked: pl.DataFrame) -> Floats:
    """Seconds from a moment until the start that the scheduler had planned for a job by then.

    Args:
        states: Rows of `core_job_states` of one cluster.
        asked: `job_id`, `submit_time` and `at`, the moments (UTC); a job may be asked about at several.

    Returns:
        Shape (rows of `asked`,), in order. A plan that has come due without a start is 0; NaN where the newest word
        of that attempt by the moment has no plan, or there is none.
    """
    if asked.is_empty():
        return np.empty(0)
    told = states.filter(pl.col("state") == "PENDING").select("job_id", "observed_at", "planned_start_time")
    ordered = asked.select("job_id", "submit_time", "at").with_row_index("row").sort("at")
    found = ordered.join_asof(
        told.sort("observed_at"), left_on="at", right_on="observed_at", by="job_id", strategy="backward",
        check_sortedness=False,
    )  # fmt: skip
    # Attempts of a job share its id: what was said before this submission was said of another one.
    is_own = pl.col("observed_at") >= pl.col("submit_time")
    left_s = (pl.col("planned_start_time") - pl.col("at")).dt.total_microseconds() / 1e6
    return (
        found.select("row", plan_s=pl.when(is_own).then(left_s.clip(lower_bound=0.0)))
        .sort("row")["plan_s"]
        .cast(pl.Float64)
        .fill_null(np.nan)
        .to_numpy()
    )


def start_losses(point_s: Floats, actual_s: Floats) -> dict[str, Floats]:
    """Per-row losses of a forecast start, for means.

    Args:
        point_s: Seconds until the start, forecast; NaN where nothing was.
        actual_s: Seconds until the start, true.

    Returns:
        `male` (|ln| with a second as the least), `log1p` (|difference of ln(1 + s)|), `within_60s`, `mae_s`, and
        `late` and `early`: forecast over a minute after, or before, the true start. NaN where nothing was forecast.
    """
    gap = point_s - actual_s
    is_known = ~np.isnan(gap)

    def share(holds: NDArray[np.bool_]) -> Floats:
        return np.where(is_known, holds.astype(np.float64), np.nan)

    return {
        "male": log_error(point_s, actual_s),
        "log1p": np.abs(np.log1p(np.maximum(point_s, 0.0)) - np.log1p(np.maximum(actual_s, 0.0))),
        "within_60s": share(np.abs(gap) <= WITHIN_S),
        "mae_s": np.abs(gap),
        "late": share(gap > WITHIN_S),
        "early": share(gap < -WITHIN_S),
    }


def plan_scores(
    waits: pl.DataFrame, judged: Mapping[str, Judged], blocks: NDArray[np.uint64], *, draws: int = DRAWS, seed: int = 1
) -> list[Score]:
    """Figures of the scheduler's planned starts beside those of the published forecast and its baselines.

    Args:
        waits: Rows of `out_outcomes` of waits.
        judged: What was published (name empty) and its baselines on the same rows.
        blocks: Block of each row for the bootstrap.
        draws: Bootstrap draws.
        seed: Seed of the draws.

    Returns:
        `planned_share` of the jobs that had a plan, and where they are enough `planned_male`, … of all on those jobs.
        For later landmarks the names end in `_60s`, …, and only the errors of the median are there.
    """
    scores = []
    landmarks, planned_s = waits["landmark_s"].to_numpy(), waits["planned_s"].fill_null(np.nan).to_numpy()
    actual_s = waits["actual_s"].to_numpy()
    is_planned = ~np.isnan(planned_s)

    def score(metric: str, name: str, losses: Floats, rows: NDArray[np.bool_]) -> Score:
        interval = mean_interval(losses[rows], blocks[rows], draws=draws, seed=seed)
        return Score(metric, name, interval, int(rows.sum()))

    for landmark in (FIRST, *LANDMARKS_S):
        here = landmarks == landmark
        if here.sum() < MIN_ROWS:
            continue
        end = f"_{landmark}s" if landmark else ""
        scores.append(score(f"planned_share{end}", PLAN, is_planned.astype(np.float64), here))
        both = here & is_planned
        if both.sum() < MIN_ROWS:
            continue
        plan = start_losses(planned_s, actual_s)
        for name, metrics in {PLAN: plan, "": start_losses(waits["q50_s"].to_numpy(), actual_s)}.items():
            shown = metrics if landmark == FIRST else {"male": metrics["male"]}
            scores += [score(f"planned_{metric}{end}", name, losses, both) for metric, losses in shown.items()]
        scores += [
            score(f"planned_male{end}", name, other.metrics["male"], both) for name, other in judged.items() if name
        ]
        ratio = ratio_interval(
            judged[""].metrics["male"][both], plan["male"][both], blocks[both], draws=draws, seed=seed
        )  # fmt: skip
        scores.append(Score(f"planned_male_ratio{end}", PLAN, ratio, int(both.sum())))
    return scores


def churn_scores(waits: pl.DataFrame) -> list[Score]:
    """Churn of published starts: median move and drift, and the share of moves over ten minutes.

    Args:
        waits: As of `start_churn`, and `planned_start_time`.

    Returns:
        `churn_…` of all publications; `planned_churn_…` of the scheduler's plans and of the publications that had one.
    """
    planned = waits.filter(pl.col("planned_start_time").is_not_null())
    left_s = (pl.col("planned_start_time") - pl.col("generated_at")).dt.total_microseconds() / 1e6
    plans = planned.with_columns(left_s.clip(lower_bound=0.0).alias("q50_s"))
    scores = []
    for prefix, name, rows in (("", "", waits), ("planned_", "", planned), ("planned_", PLAN, plans)):
        found = start_churn(rows)
        if found.height < MIN_ROWS:
            continue
        figures = {
            "churn_move_s": found["move_s"].median(), "churn_moved_share": found["moved_share"].mean(),
            "churn_drift_s": found["drift_s"].median(),
        }  # fmt: skip
        scores += [
            Score(f"{prefix}{metric}", name, Interval(float(value), None, None, 0), found.height)
            for metric, value in figures.items()
            if isinstance(value, int | float)
        ]
    return scores

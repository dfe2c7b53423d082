"""Published demand forecasts beside the demand that came, and beside last value and last week as published with them.

Only forecasts for all queues together are scored. Here belong the join and the figures; no reading and no keeping.
"""

from __future__ import annotations

from datetime import datetime
from typing import cast

import numpy as np
import polars as pl

from features.demand import QUANTITIES, Quantity, Unit, hourly_demand
from features.vocabulary import DEMAND_QUANTILE_COLUMNS, QUANTILES
from models.backtest_report import Score
from models.calibration import MIN_ROWS
from models.outcome_scores import KindOutcome
from models.promotion import DRAWS, mean_interval, ratio_interval

BASELINES = {"last_value": "last_value", "same_hour_last_week": "last_week_value"}
_LOW, _MIDDLE, _HIGH = (DEMAND_QUANTILE_COLUMNS[QUANTILES.index(level)] for level in (0.1, 0.5, 0.9))


def judge_demand(
    rows: pl.DataFrame, jobs: pl.DataFrame, begin: datetime, until: datetime, *, draws: int = DRAWS, seed: int = 1
) -> KindOutcome:
    """Score forecasts whose hour has come.

    Args:
        rows: Rows of `out_demand` of one cluster.
        jobs: Canonical jobs of that cluster that were there at some time of the span.
        begin: Hours that end after this moment are judged, UTC.
        until: And at this moment or before.
        draws: Bootstrap draws; blocks are days.
        seed: Seed of the draws.

    Returns:
        `<quantity>_<metric>_<hours>h` for every horizon of at least `MIN_ROWS` hours: `mae` beside those of the
        baselines, `mae_ratio` to each, and `coverage_80`.
    """
    outcome = KindOutcome("demand")
    due = rows.filter(pl.col("queue").is_null() & (pl.col("target_time") > begin) & (pl.col("target_time") <= until))
    if due.is_empty() or jobs.is_empty():
        return outcome
    wins: list[tuple[float, str]] = []
    for (quantity, unit), part in due.sort("target_time", "generated_at").group_by(
        "quantity", "unit", maintain_order=True
    ):
        if quantity not in QUANTITIES:
            continue
        counted_in = None if quantity == "arrivals" else cast(Unit, unit)
        came = hourly_demand(jobs, until, since=begin, unit=counted_in)
        values = came.values(cast(Quantity, quantity))
        if values is None:
            continue
        hour = (part["target_time"] - came.begin).dt.total_hours().to_numpy() - 1
        inside = (hour >= 0) & (hour < len(values))
        actual = values[hour[inside]]
        wins += _horizons(outcome, str(quantity), part.filter(pl.Series(inside)), actual, draws, seed)
    if wins:
        names = [name for _, name in wins]
        outcome.best_baseline = max(BASELINES, key=names.count)
    outcome.versions = dict(due["model_version"].fill_null("unknown").value_counts(sort=True).iter_rows())
    return outcome


def _horizons(
    outcome: KindOutcome, quantity: str, part: pl.DataFrame, actual: np.ndarray, draws: int, seed: int
) -> list[tuple[float, str]]:
    """Adds the scores of one quantity; returns the lowest baseline of each horizon."""
    horizons = part["horizon_h"].to_numpy()
    lowest = []
    for horizon_h in np.unique(horizons):
        here = horizons == horizon_h
        if here.sum() < MIN_ROWS:
            continue
        rows, came = part.filter(pl.Series(here)), actual[here]
        days = rows["target_time"].dt.epoch("d").to_numpy()
        outcome.rows += rows.height
        own = np.abs(rows[_MIDDLE].to_numpy() - came)
        covered = ((rows[_LOW].to_numpy() <= came + 1e-9) & (came <= rows[_HIGH].to_numpy() + 1e-9)).astype(np.float64)

        def add(metric: str, baseline: str, values: np.ndarray, of=None, h=horizon_h, days=days) -> float:
            if of is None:
                interval = mean_interval(values, days, draws=draws, seed=seed)
            else:
                interval = ratio_interval(values, of, days, draws=draws, seed=seed)
            outcome.scores.append(Score(f"{quantity}_{metric}_{h}h", baseline, interval, len(values)))
            return interval.value

        add("mae", "", own)
        add("coverage_80", "", covered)
        found = []
        for name, column in BASELINES.items():
            errors = np.abs(rows[column].to_numpy() - came)
            known = np.isfinite(errors)
            if known.sum() < MIN_ROWS:
                continue
            found.append((add("mae", name, errors[known], days=days[known]), name))
            if errors[known].sum() > 0:
                add("mae_ratio", name, own[known], errors[known], days=days[known])
        if found:
            lowest.append(min(found))
    return lowest

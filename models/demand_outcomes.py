"""Published demand forecasts beside the demand that came, and beside last value and last week as published with them.

Forecasts of all queues together are scored by themselves, those of single queues in one pool, and windows in which
units could be lent out by whether the units stayed free. Here belong the join and the figures; no reading, no keeping.
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
WINDOW_COLUMNS = ("queue", "unit", "start", "end", "units", "confidence", "capacity")
_LOW, _MIDDLE, _HIGH = (DEMAND_QUANTILE_COLUMNS[QUANTILES.index(level)] for level in (0.1, 0.5, 0.9))


def judge_demand(
    rows: pl.DataFrame, jobs: pl.DataFrame, begin: datetime, until: datetime, *, windows: pl.DataFrame | None = None,
    draws: int = DRAWS, seed: int = 1,
) -> KindOutcome:  # fmt: skip
    """Score forecasts whose hour has come.

    Args:
        rows: Rows of `out_demand` of one cluster.
        jobs: Canonical jobs of that cluster that were there at some time of the span.
        begin: Hours that end after this moment are judged, UTC.
        until: And at this moment or before.
        windows: Published reclaimable windows: `WINDOW_COLUMNS`; None: there are none.
        draws: Bootstrap draws; blocks are days.
        seed: Seed of the draws.

    Returns:
        `<quantity>_<metric>_<hours>h` for every horizon of at least `MIN_ROWS` hours: `mae` beside those of the
        baselines, `mae_ratio` to each, and `coverage_80`; `queues_<quantity>_…` of single queues, in one pool; and of
        at least `MIN_ROWS` windows `windows_kept_share` beside the `windows_confidence` that they were promised with.
    """
    outcome = KindOutcome("demand")
    due = rows.filter((pl.col("target_time") > begin) & (pl.col("target_time") <= until))
    if jobs.is_empty() or (due.is_empty() and windows is None):
        return outcome
    wins: list[tuple[float, str]] = []
    due = due.filter(pl.col("quantity").is_in(QUANTITIES)).sort("target_time", "generated_at", "queue")
    pools: dict[str, list[tuple[pl.DataFrame, np.ndarray]]] = {}
    for (queue, quantity, unit), part in due.group_by("queue", "quantity", "unit", maintain_order=True):
        counted_in = None if quantity == "arrivals" else cast(Unit, unit)
        came = hourly_demand(jobs, until, queue=cast("str | None", queue), since=begin, unit=counted_in)
        values = came.values(cast(Quantity, quantity))
        if values is None:
            continue
        hour = (part["target_time"] - came.begin).dt.total_hours().to_numpy() - 1
        inside = (hour >= 0) & (hour < len(values))
        found = (part.filter(pl.Series(inside)), values[hour[inside]])
        if queue is None:
            wins += _horizons(outcome, str(quantity), *found, draws, seed)
        else:
            pools.setdefault(f"queues_{quantity}", []).append(found)
    for name, parts in pools.items():
        _horizons(outcome, name, pl.concat(p for p, _ in parts), np.concatenate([c for _, c in parts]), draws, seed)
    if windows is not None:
        _windows(outcome, windows, jobs, begin, until, draws, seed)
    if wins:
        names = [name for _, name in wins]
        outcome.best_baseline = max(BASELINES, key=names.count)
    outcome.versions = dict(due["model_version"].fill_null("unknown").value_counts(sort=True).iter_rows())
    return outcome


def _windows(
    outcome: KindOutcome, windows: pl.DataFrame, jobs: pl.DataFrame, begin: datetime, until: datetime, draws: int,
    seed: int,
) -> None:  # fmt: skip
    """Adds how often promised units stayed free in every hour of their window."""
    over = windows.filter((pl.col("start") >= begin) & (pl.col("end") <= until)).drop_nulls().sort("end", "start")
    if over.height < MIN_ROWS:
        return
    kept = np.zeros(over.height)
    for (queue, unit), part in over.with_row_index("row").group_by("queue", "unit", maintain_order=True):
        came = hourly_demand(jobs, until, queue=str(queue), since=begin, unit=cast(Unit, unit))
        for row, start, end, units, capacity in part.select("row", "start", "end", "units", "capacity").iter_rows():
            first, last = ((at - came.begin).total_seconds() / 3600 for at in (start, end))
            asked = came.in_demand[int(first) : int(last)]  # ends of the hours inside
            kept[row] = len(asked) > 0 and capacity - asked.max() >= units - 1e-9
    days = over["end"].dt.epoch("d").to_numpy()
    for metric, values in (("kept_share", kept), ("confidence", over["confidence"].to_numpy())):
        interval = mean_interval(values, days, draws=draws, seed=seed)
        outcome.scores.append(Score(f"windows_{metric}", "", interval, over.height))
    outcome.rows += over.height


def demand_words(outcome: KindOutcome) -> list[str]:
    """How published demand did, in words: a line for units in demand at a day ahead, one for windows."""
    lines = []
    for prefix, who in (("", "all queues"), ("queues_", "single queues")):
        mae, covered = (outcome.find(f"{prefix}in_demand_{metric}_24h") for metric in ("mae", "coverage_80"))
        if mae is None or covered is None:
            continue
        beside = [
            f"{name.replace('_', ' ')} {there.value:,.1f}"
            for name in BASELINES
            if (there := outcome.find(f"{prefix}in_demand_mae_24h", name)) is not None
        ]
        lines.append(
            f"demand a day ahead, {who}: missed by {mae.value:,.1f} units on average ({', '.join(beside)}); "
            f"the 80 % interval held {covered.value:.0%}"
        )
    kept, promised = (outcome.find(f"windows_{metric}") for metric in ("kept_share", "confidence"))
    if kept is not None and promised is not None:
        lines.append(f"reclaimable windows: {kept.value:.0%} stayed free, promised {promised.value:.0%}")
    return lines


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

"""Demand forecasts of a whole cluster at a moment: every queue, quantity and horizon, and the troughs of inference.

Here the series of `features/demand.py` meet the forecaster; reading jobs and publishing is for `pipelines/demand.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import polars as pl

from features.demand import HOUR, QUANTITIES, HourlyDemand, hourly_demand, unit_of
from features.vocabulary import DEMAND_QUANTILE_COLUMNS, schema
from models.demand import HORIZONS_H, VERSION, DemandError, forecast
from models.demand_experts import WEEK_H
from models.demand_windows import ReclaimableWindow, look_ahead, reclaimable_windows

HISTORY = timedelta(days=110)  # eight weeks of outcomes, two weeks ahead, four weeks of slots behind the first
MAX_QUEUES = 30  # the busiest; others are in the whole
LOOK_AHEAD_H = 72
_CAPACITY_H = 4 * WEEK_H
_START_LEVEL = 0.01  # a few jobs that have run for months are no reason to begin with them


@dataclass
class DemandNow:
    """What is foreseen for one cluster.

    Attributes:
        rows: Columns of `out_demand` but cluster and when it was made; `queue` is null for all queues together.
        windows: Reclaimable windows by inference queue.
        short: Queues with too little history for a forecast, with the reason.
    """

    rows: pl.DataFrame
    windows: dict[str, list[ReclaimableWindow]] = field(default_factory=dict)
    short: dict[str, str] = field(default_factory=dict)


def forecast_demand(
    jobs: pl.DataFrame, now: datetime, *, inference_queues: Iterable[str] = (), min_units: int = 1,
    horizons_h: Sequence[int] = HORIZONS_H,
) -> DemandNow:  # fmt: skip
    """Forecast demand of a cluster and of its busiest queues, fitted on the history itself.

    The capacity of an inference queue is the highest demand of its last four weeks: what it is kept ready for.

    Args:
        jobs: Canonical jobs of one cluster; older than `HISTORY` does not count.
        now: The moment, UTC.
        inference_queues: Queues that hold inference services.
        min_units: Units that a reclaimable window leaves free at least.
        horizons_h: Hours ahead, counted from the last full hour.
    """
    recent = jobs.filter(pl.col("submit_time") >= now - HISTORY)
    types = {name: dtype for name, dtype in schema("out_demand").items() if name in _MADE}
    if recent.is_empty():
        return DemandNow(pl.DataFrame(schema=types))
    since = recent["submit_time"].quantile(_START_LEVEL, "lower")
    assert isinstance(since, datetime)
    inference = [name for name in dict.fromkeys(inference_queues) if name]
    busiest = recent["queue"].drop_nulls().value_counts(sort=True)["queue"].head(MAX_QUEUES).to_list()
    found = DemandNow(pl.DataFrame(schema=types))
    unit = unit_of(jobs)
    by_queue = {name: part for (name,), part in jobs.partition_by("queue", as_dict=True).items()}
    rows: list[dict] = []
    for queue in [None, *dict.fromkeys([*sorted(busiest), *inference])]:
        part = jobs if queue is None else by_queue.get(queue, jobs.clear())
        counted = hourly_demand(part, now, queue=queue, since=since, unit=unit)
        try:
            rows += _rows(counted, horizons_h)
            if queue in inference:
                found.windows[str(queue)] = _windows(counted, min_units)
        except DemandError as error:
            found.short[queue or "all queues"] = str(error)
    found.rows = pl.DataFrame(rows, schema=types)
    return found


def _rows(counted: HourlyDemand, horizons_h: Sequence[int]) -> list[dict]:
    rows = []
    for quantity in QUANTITIES:
        values = counted.values(quantity)
        if values is None:
            continue
        for made in forecast(values, horizons_h):
            rows.append(
                {
                    "queue": counted.queue,
                    "quantity": quantity,
                    "unit": "jobs" if quantity == "arrivals" else counted.unit,
                    "horizon_h": made.horizon_h,
                    "target_time": counted.end + made.horizon_h * HOUR,
                    **dict(zip(DEMAND_QUANTILE_COLUMNS, made.quantiles.tolist(), strict=True)),
                    "last_value": made.baselines["last_value"],
                    "last_week_value": made.baselines["same_hour_last_week"],
                    "model_version": f"{VERSION}/{made.chosen}",
                }
            )
    return rows


def _windows(counted: HourlyDemand, min_units: int) -> list[ReclaimableWindow]:
    values = counted.in_demand
    capacity = float(values[-_CAPACITY_H:].max())
    return reclaimable_windows(look_ahead(values, LOOK_AHEAD_H), counted.end, capacity, min_units=min_units)


_MADE = (
    "queue", "quantity", "unit", "horizon_h", "target_time", *DEMAND_QUANTILE_COLUMNS, "last_value", "last_week_value",
    "model_version",
)  # fmt: skip

"""Demand forecasts of a whole cluster at a moment: every queue, quantity and horizon, and daily troughs.

Here the series of `features/demand.py` meet the forecaster; reading jobs and publishing is for `pipelines/demand.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import polars as pl

from features.demand import HOUR, QUANTITIES, HourlyDemand, Unit, hourly_demand, unit_of
from features.vocabulary import DEMAND_QUANTILE_COLUMNS, schema
from models.demand import HORIZONS_H, MIN_HOURS, VERSION, DemandError, forecast
from models.demand_experts import WEEK_H
from models.demand_flow import Flow
from models.demand_windows import ReclaimableWindow, look_ahead, reclaimable_windows, shows_trough

HISTORY = timedelta(days=110)  # eight weeks of outcomes, two weeks ahead, four weeks of slots behind the first
MAX_QUEUES = 30  # the busiest; others are in the whole
LOOK_AHEAD_H = 72
_CAPACITY_H = 4 * WEEK_H
_TROUGH = 0.5  # an hour belongs to a trough that leaves this share free of what the deepest hour ahead leaves free
_START_LEVEL = 0.01  # a few jobs that have run for months are no reason to begin with them


@dataclass
class DemandNow:
    """What is foreseen for one cluster.

    Attributes:
        rows: Columns of `out_demand` but cluster and when it was made; `queue` is null for all queues together.
        windows: Reclaimable windows by queue, of those that hold inference services or show a daily trough.
        unit: What demand is counted in.
        short: Queues with too little history for a forecast, with the reason.
    """

    rows: pl.DataFrame
    windows: dict[str, list[ReclaimableWindow]] = field(default_factory=dict)
    unit: Unit = "gpus"
    short: dict[str, str] = field(default_factory=dict)


def forecast_demand(
    jobs: pl.DataFrame, now: datetime, *, inference_queues: Iterable[str] = (), min_units: int = 1,
    horizons_h: Sequence[int] = HORIZONS_H,
) -> DemandNow:  # fmt: skip
    """Forecast demand of a cluster and of its busiest queues, fitted on the history itself.

    Reclaimable windows are looked for in the queues named, and in every queue that shows a daily trough. The capacity
    of a named queue is the highest demand of its last four weeks: what it is kept ready for. That of another is the
    most that it had in use, since what waits there is no capacity. Hours that leave free less than half of what the
    deepest one ahead does belong to no window.

    Args:
        jobs: Canonical jobs of one cluster; older than `HISTORY` does not count.
        now: The moment, UTC.
        inference_queues: Queues that hold inference services, whether or not they show a trough.
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
    unit = unit_of(jobs)
    found = DemandNow(pl.DataFrame(schema=types), unit=unit)
    by_queue = {name: part for (name,), part in jobs.partition_by("queue", as_dict=True).items()}
    rows: list[dict] = []
    queues = list(dict.fromkeys([*sorted(busiest), *inference]))
    whole = hourly_demand(jobs, now, since=since, unit=unit)
    flow = Flow(jobs, now, whole.begin, whole.hours, unit, queues) if whole.hours >= MIN_HOURS else None
    for queue in [None, *queues]:
        counted = whole
        if queue is not None:
            counted = hourly_demand(by_queue.get(queue, jobs.clear()), now, queue=queue, since=since, unit=unit)
        try:
            rows += _rows(counted, horizons_h, flow)
            if queue in inference or (queue is not None and shows_trough(counted.in_demand, min_units)):
                found.windows[queue] = _windows(counted, min_units, is_named=queue in inference)
        except DemandError as error:
            found.short[queue or "all queues"] = str(error)
    found.rows = pl.DataFrame(rows, schema=types)
    return found


def _rows(counted: HourlyDemand, horizons_h: Sequence[int], flow: Flow | None) -> list[dict]:
    rows = []
    for quantity in QUANTITIES:
        values = counted.values(quantity)
        if values is None:
            continue
        flows = flow.forecast(values, counted.queue) if flow is not None and quantity == "in_demand" else None
        for made in forecast(values, horizons_h, flows):
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


def _windows(counted: HourlyDemand, min_units: int, *, is_named: bool) -> list[ReclaimableWindow]:
    held = counted.in_demand if is_named else counted.in_use
    capacity = float(held[-_CAPACITY_H:].max())
    ahead = look_ahead(counted.in_demand, LOOK_AHEAD_H)
    deepest = capacity - float(ahead.q90.min())
    return reclaimable_windows(ahead, counted.end, capacity, min_units=max(min_units, int(_TROUGH * deepest)))


_MADE = (
    "queue", "quantity", "unit", "horizon_h", "target_time", *DEMAND_QUANTILE_COLUMNS, "last_value", "last_week_value",
    "model_version",
)  # fmt: skip

"""Demand forecasts on recorded traces, hours to two weeks ahead, beside their baselines.

Arrivals (jobs/h), hours asked for (unit-hours/h) and units in demand (running and pending, at the end of an hour);
walk-forward, weights at every hour from released ones, the newest 30 % of hours judged. `python -m benchmarks.demand
[--traces FOLDER] [trace …]`; each trace takes some seconds. Needs the recorded traces (WEATHERGLASS_TRACES).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.demand import QUANTITIES, hourly_demand
from models.demand import HORIZONS_H, VERSION
from models.demand_backtest import Judged, ratio, scores, walk
from models.demand_flow import Flow

TRACES = ("kth-sp2-1996", "llnl-atlas-2006", "cedar-2021", "microsoft-itp-2021", "helios-earth-2020")
WARMUP_SHARE = 0.01
Floats = NDArray[np.float64]


def series_of(folder: Path, trace: str, quantity: str) -> Iterator[tuple[str, datetime, Floats, dict[int, Floats]]]:
    """Series of a trace: name, start, hourly values, and what jobs say by horizon; the warm-up is cut off."""
    if trace.startswith("helios"):
        if quantity == "in_demand":
            yield from _occupancy(pl.read_parquet(folder / "occupancy" / f"{trace}.parquet"))
        return
    jobs = pl.read_parquet(folder / "jobs" / f"{trace}.parquet")
    for (cluster,), part in sorted(jobs.group_by("cluster")):
        until = part["submit_time"].max()
        assert isinstance(until, datetime)
        counted = hourly_demand(part, until)
        values = counted.values(quantity)  # ty: ignore[invalid-argument-type]
        if values is not None and counted.hours:
            skip = int(counted.hours * WARMUP_SHARE)
            flows: dict[int, Floats] = {}
            if quantity == "in_demand":
                made = Flow(part, until, counted.begin, counted.hours, counted.unit).forecast(values)
                flows = {horizon_h: said[skip:] for horizon_h, said in made.items()}
            yield f"{cluster}, {counted.unit}", counted.begin, values[skip:], flows


def _occupancy(rows: pl.DataFrame) -> Iterator[tuple[str, datetime, Floats, dict[int, Floats]]]:
    hourly = (
        rows.with_columns((pl.col("running_gpu_num") + pl.col("pending_gpu_num")).alias("gpus"))
        .sort("ts")
        .group_by_dynamic("ts", every="1h", group_by="queue")
        .agg(pl.col("gpus").last())
    )
    for (queue,), part in sorted(hourly.group_by("queue")):
        full = part.upsample("ts", every="1h").select("ts", pl.col("gpus").forward_fill())
        yield f"{queue}, gpus", full["ts"][0], full["gpus"].cast(pl.Float64).to_numpy(), {}


def main() -> None:
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=list(TRACES))
    parser.add_argument("--folder", default=os.environ.get("WEATHERGLASS_TRACES") or here.parent / "shared" / "traces")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for trace in arguments.traces:
        for quantity in QUANTITIES:
            began = time.perf_counter()
            series = list(series_of(Path(arguments.folder), trace, quantity))
            if not series:
                continue
            units = sorted({name.partition(", ")[2] for name, *_ in series})
            print(f"\n{trace} · {quantity} · {len(series)} series in {', '.join(units)}")
            print(f"{'hours':>6} {'rows':>7}  {'':<22} {'MAE':<32} {'sMAPE':>6} {'pinball':<30} {'80 %':>5}")
            judged = [
                walk(values, first_hour=int(begin.timestamp()) // 3600, flows=flows)
                for _, begin, values, flows in series
            ]
            for horizon_h in HORIZONS_H:
                parts = [found[horizon_h] for found in judged if horizon_h in found]
                if parts:
                    _print(parts, arguments.seed)
            print(f"took {time.perf_counter() - began:.1f} s", flush=True)


def _print(parts: list[Judged], seed: int) -> None:
    for score in scores(parts, seed=seed):
        who = "model" if score.who == VERSION else score.who
        print(
            f"{score.horizon_h:>6} {score.rows:>7}  {who:<22} {score.mae!s:<32} {score.smape:>6.3f} "
            f"{score.pinball!s:<30} {score.coverage_80:>5.3f}"
        )
    for loss in ("mae", "pinball"):
        best, found = ratio(parts, loss=loss, seed=seed)
        print(f"{'':>14}  {loss} ÷ {best}: {found}")
    chosen: dict[str, float] = {}
    for part in parts:
        for name, share in part.chosen.items():
            chosen[name] = chosen.get(name, 0.0) + share / len(parts)
    print(f"{'':>14}  mean weight: " + ", ".join(f"{name} {share:.2f}" for name, share in sorted(chosen.items())))


if __name__ == "__main__":
    main()

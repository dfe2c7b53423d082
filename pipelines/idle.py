"""What `weatherglass idle` reads and prints: how many GPUs of a cluster stay idle for the next 30 and 60 minutes.

Fitted anew from the jobs of the last weeks each time it is asked; there is no model to keep. The forecaster stands in
`models/idle.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import numpy as np
import polars as pl

from features.idle import IdleHistory
from features.occupancy import usable_gpus
from models.idle import GPUS, QUANTILES, IdleForecaster, IdleModelError
from models.unit_training import QUEUE_DAYS, known_occupancy
from pipelines.compose import CommandError, clusters_of, open_store
from pipelines.job_history import read_jobs, read_nodes
from pipelines.settings import Settings

LEAST_DAYS = 2.0  # of jobs, or there is nothing to learn from


def cluster_occupancy(jobs: pl.DataFrame, total_gpus: int, at: datetime) -> pl.DataFrame:
    """Idle, running and pending GPUs of a whole cluster over the last two weeks, as known at a moment.

    Args:
        jobs: `core_jobs` rows.
        total_gpus: GPUs in service now; they are taken to have been so all the time.
        at: The moment, UTC.

    Returns:
        `ts`, `queue` (empty: all of them), `idle_gpu_num`, `running_gpu_num`, `pending_gpu_num`.
    """
    found = known_occupancy(jobs, total_gpus, at)
    return (
        found.group_by("ts")
        .agg(
            pl.lit("").alias("queue"), pl.col("idle_gpu_num").first(), pl.col("running_gpu_num").sum(),
            pl.col("pending_gpu_num").sum(),
        )
        .sort("ts")
    )  # fmt: skip


def forecast_idle(
    occupancy: pl.DataFrame, gpus: int = GPUS, *, seed: int = 1, threads: int = 1
) -> list[dict[str, Any]]:
    """Forecasts at the newest moment, one for each length of window.

    Args:
        occupancy: As of `cluster_occupancy`.
        gpus: How many are asked about, 1 or more.
        seed: Seed of the fit.
        threads: Threads of the fit.

    Returns:
        `at_s`, `horizon_s`, `idle_gpus` (now), `q05` … `q95` (the fewest idle), `gpus`, `p_stay` (that many stay),
        `offer_from` (least `p_stay` at which a window may be offered; None: none may, or it is not known for so many).

    Raises:
        models.idle.IdleModelError: There is too little to learn from.
    """
    history = IdleHistory(occupancy)
    last = history.minutes - 1
    if last < LEAST_DAYS * 1_440:
        raise IdleModelError(f"jobs of {last / 1_440:.1f} days are known, {LEAST_DAYS:g} are needed")
    model = IdleForecaster.fit(history, last, seed=seed, threads=threads)
    queue, minute = np.zeros(1, dtype=np.int64), np.full(1, last)
    quantiles = model.quantiles(history, queue, minute, threads=threads)[0]
    stays = model.stays(history, queue, minute, np.full(1, gpus), threads=threads)[0]
    out = []
    for k, horizon in enumerate(model.horizons_min):
        least = float(model.offer_from[k])
        out.append(
            {
                "at_s": float(history.at_s(minute)[0]), "horizon_s": 60.0 * horizon,
                "idle_gpus": float(history.idle[0, last]),
                **{f"q{q * 100:02.0f}": float(quantiles[k, j]) for j, q in enumerate(QUANTILES)},
                "gpus": gpus, "p_stay": float(stays[k]),
                "offer_from": least if gpus == GPUS and np.isfinite(least) else None,
            }
        )  # fmt: skip
    return out


def print_idle(settings: Settings, cluster: str | None, gpus: int, now: datetime, *, as_json: bool) -> None:
    """Print the forecasts of each cluster.

    Raises:
        CommandError: A cluster has no GPUs in its inventory, or too few jobs are known.
        StoreError: There is no store yet, or it cannot be read.
    """
    found = {}
    with open_store(settings, read_only=True) as store:
        for name in clusters_of(settings, cluster):
            total = usable_gpus(read_nodes(store, name))
            if not total:
                raise CommandError(f"{name}: no node in service with GPUs is known; see `weatherglass doctor`")
            occupancy = cluster_occupancy(read_jobs(store, name, now - timedelta(days=QUEUE_DAYS)), total, now)
            try:
                if occupancy.is_empty():
                    raise IdleModelError("no job with GPUs is known")
                found[name] = forecast_idle(
                    occupancy, gpus, seed=settings.training.seed, threads=settings.training.threads
                )
            except IdleModelError as error:
                raise CommandError(f"{name}: idle GPUs are not forecast: {error}") from None
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print("\n".join(line for name, rows in found.items() for line in idle_lines(name, rows)))


def idle_lines(cluster: str, rows: list[dict[str, Any]]) -> list[str]:
    """The printed form of `forecast_idle`."""
    lines = [f"{cluster}: {rows[0]['idle_gpus']:,.0f} GPUs are idle now"]
    for row in rows:
        offer = row["offer_from"]
        word = ""
        if row["gpus"] == GPUS:
            may = offer is not None and row["p_stay"] >= offer
            word = f": {'may be offered' if may else 'not to be offered'}" + (f" (from {offer:.2f})" if offer else "")
        lines.append(
            f"  next {row['horizon_s'] / 60:.0f} min: fewest idle {row['q50']:,.0f} [{row['q10']:,.0f} – "
            f"{row['q90']:,.0f}]; {row['gpus']:,} stay idle with probability {row['p_stay']:.2f}{word}"
        )
    return lines

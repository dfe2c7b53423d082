"""Backtest of the bottleneck classes of nodes and ports on canonical telemetry: their own labels, models and baselines.

Here belongs what records of nodes and ports must have; the protocol stands in `models/hazard_backtest.py`, GPUs in
`models/gpu_onset_backtest.py`, queues in `models/onset_backtest.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import polars as pl

from features.label_fabric import PORT_KEYS, port_id
from features.thresholds import ThresholdBook
from features.unit_conditions import KINDS, LOADS, RATES
from features.unit_history import UnitHistory
from models.event_report import EventReport
from models.hazard_backtest import backtest_course, present, split_s
from models.onset_backtest import OnsetBacktestError, Step, unheard
from models.onsets import Rows, course

# Columns of which any one set tells of a class; the first is the usual one.
TELLING: dict[str, tuple[tuple[str, ...], ...]] = {
    "host_memory": (("host_mem_available_bytes", "host_mem_total_bytes"), ("oom_kills_total",)),
    "fabric_congestion": (*((name,) for name in RATES), *((name, "speed_bytes_per_s") for name in LOADS)),
}
_STEPS_UNKNOWN = (
    "Samples of ports tell no steps of jobs, so that signs alone count as congestion here; where steps are known, they "
    "have to be slow as well."
)


def backtest_units(
    samples: pl.DataFrame, bottleneck_class: str, *, seed: int = 1, threads: int = 1, step: Step = unheard
) -> EventReport:
    """Backtest a class of nodes or ports on canonical telemetry.

    What a thing is used to is, for the labels that teach, told from the time before the gap alone.

    Args:
        samples: For `host_memory` rows of `core_node_samples`, for `fabric_congestion` rows of `core_port_samples`; any
            subset of their columns that `TELLING` has.
        bottleneck_class: A key of `TELLING`.
        seed: Seed of every random choice.
        threads: Threads of a fit.
        step: Told what is begun.

    Raises:
        OnsetBacktestError: The class cannot be told from these columns, or has too few onsets.
    """
    if bottleneck_class not in TELLING:
        raise OnsetBacktestError(f"no class {bottleneck_class!r} of nodes or ports; classes: {', '.join(TELLING)}")
    rows = _usable(samples, bottleneck_class)
    book, scope = ThresholdBook(), KINDS[bottleneck_class].scope
    step(f"windows of {scope}s")
    history = UnitHistory(bottleneck_class, rows, book)
    train_end, _ = split_s(history)
    early = UnitHistory(bottleneck_class, rows.filter(pl.col("ts") < datetime.fromtimestamp(train_end, UTC)), book)
    keys = {name: rows[name] if name in rows.columns else None for name in PORT_KEYS}
    if scope == "port":
        ids, first = np.unique(rows.select(port_id(rows.columns))["scope_id"].to_numpy(), return_index=True)
        place = first[np.searchsorted(ids, np.array(history.uuids, dtype=object))]
    else:
        place = np.arange(len(history.uuids))
        keys = {"node": pl.Series(history.uuids, dtype=pl.String)}

    def names(of: Rows) -> dict[str, pl.Series]:
        unknown = pl.Series([None] * len(of), dtype=pl.String)
        return {
            name: unknown if values is None else values.gather(place[of.block.gpus]) for name, values in keys.items()
        }

    return backtest_course(
        (history, course(history, bottleneck_class, book)), (early, course(early, bottleneck_class, book)),
        unit=scope, names=names, notes=[_STEPS_UNKNOWN] if scope == "port" else [], seed=seed, threads=threads,
        step=step,
    )  # fmt: skip


def _usable(samples: pl.DataFrame, bottleneck_class: str) -> pl.DataFrame:
    """Rows with a time and a node, names as text.

    Raises:
        OnsetBacktestError: What tells of the class is absent; the message names it.
    """
    scope, have = KINDS[bottleneck_class].scope, present(samples)
    absent = [name for name in ("ts", "node") if name not in have]
    if absent:
        raise OnsetBacktestError(f"samples of {scope}s need {' and '.join(absent)}; this file has: {', '.join(have)}")
    if not isinstance(samples.schema["ts"], pl.Datetime):
        raise OnsetBacktestError(f"ts is {samples.schema['ts']}, not a time: give times in UTC")
    ways = TELLING[bottleneck_class]
    if not any(set(way) <= set(have) for way in ways):
        begun = [way for way in ways if set(way) & set(have)]
        lacks = sorted({name for way in begun for name in way} - set(have))
        raise OnsetBacktestError(
            f"{bottleneck_class} is told by {', or '.join(' and '.join(way) for way in ways)}; "
            + (f"this file lacks {', '.join(lacks)}" if begun else "this file lacks them all")
            + f", it has: {', '.join(have)}"
        )
    named = [name for name in PORT_KEYS if name in samples.columns]
    rows = samples.with_columns(pl.col(named).cast(pl.String)).drop_nulls(["ts", "node"])
    lacks = [name for name in PORT_KEYS if name not in have]
    if scope == "port" and lacks:
        keys = pl.struct("ts", *(name for name in PORT_KEYS if name in have))
        if rows.unique().height > rows.select(keys.n_unique()).item():
            raise OnsetBacktestError(
                f"several ports of a node at one time cannot be told apart: this file lacks {' and '.join(lacks)}"
            )
    return rows

"""What the bottleneck forecaster learns from of nodes, ports and queues: their records as histories.

Here belongs making histories of what the store holds, as it was known at a moment; rows stand in `models/onsets.py`,
the sequence of training in `models/training_hardware.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.history import SampleHistory
from features.occupancy import queue_occupancy, usable_gpus
from features.thresholds import ThresholdBook
from features.unit_conditions import KINDS
from features.unit_history import UnitHistory

MAX_PORT_SAMPLES = 3_000_000  # rows of ports held at once
QUEUE_DAYS = 14.0  # of jobs that queues are rebuilt from: they are few, and shortages rare
_TIMES = ("submit_time", "eligible_time", "start_time", "end_time")


def unit_histories(
    gpus: SampleHistory,
    book: ThresholdBook,
    at: datetime,
    *,
    node_samples: pl.DataFrame | None = None,
    port_samples: pl.DataFrame | None = None,
    jobs: pl.DataFrame | None = None,
    nodes: pl.DataFrame | None = None,
) -> dict[str, UnitHistory]:
    """Histories by class, of those classes that something is known of.

    Args:
        gpus: Samples of the GPUs, for the steps of the jobs behind each port.
        book: Limits of the nodes.
        at: The moment; rows that are later change nothing.
        node_samples: `core_node_samples` rows.
        port_samples: `core_port_samples` rows.
        jobs: `core_jobs` rows: queues are rebuilt from them.
        nodes: `core_nodes` rows, for the GPUs there are.
    """
    found: dict[str, UnitHistory] = {}
    for name, rows in (("host_memory", node_samples), ("fabric_congestion", port_samples)):
        if rows is None:
            continue
        told = [pl.col(column).is_not_null() for column in KINDS[name].inputs if column in rows.columns]
        rows = rows.filter((pl.col("ts") <= at) & pl.any_horizontal(told)) if told else rows.clear()
        if rows.height > 1:
            found[name] = UnitHistory(name, rows, book, gpus if name == "fabric_congestion" else None)
    total = None if nodes is None else usable_gpus(nodes)
    if total and jobs is not None and jobs.height:
        occupancy = known_occupancy(jobs, total, at)
        if occupancy.height:
            found["shortage"] = UnitHistory("shortage", occupancy, book)
    return found


def known_occupancy(jobs: pl.DataFrame, total_gpus: int, at: datetime) -> pl.DataFrame:
    """Occupancy of the queues over the last `QUEUE_DAYS`, by what was known of jobs at a moment.

    Args:
        jobs: `core_jobs` rows.
        total_gpus: GPUs in service.
        at: The moment, UTC.
    """
    past = [pl.when(pl.col(name) <= at).then(name).alias(name) for name in _TIMES if name in jobs.columns]
    known = jobs.filter(pl.col("submit_time") <= at).with_columns(past)
    if known.is_empty():
        return queue_occupancy(known, total_gpus, at, at)
    begin = max(at - timedelta(days=QUEUE_DAYS), known["submit_time"].sort()[0])
    return queue_occupancy(known, total_gpus, begin, at)

"""Nodes whose host memory runs out: available memory beside what the node is used to, and kills by the kernel.

Here belongs the rule of `host_memory`, whose scope is a node. It is not `memory_exhaustion`, which is the device's;
where no exporter tells of host memory, nothing is known.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.label_spans import CLEAR, SET, UNKNOWN, Series, own_usual
from features.thresholds import ThresholdBook
from features.unit_conditions import KINDS, host_distance

COLUMNS = KINDS["host_memory"].inputs


def host_states(node_samples: pl.DataFrame, book: ThresholdBook) -> tuple[Series, NDArray[np.int8]]:
    """State of `host_memory` at every sample of every node.

    Set: available memory under `host_memory_floor_ratio` of the whole after it fell by as much below the node's own
    median, or the kernel killed for memory since the sample before.

    Args:
        node_samples: Rows of `core_node_samples`.
        book: Limits of the nodes.

    Returns:
        The samples, and shape (samples,).
    """
    columns = [name for name in COLUMNS if name in node_samples.columns]
    keep = ["ts", "node", *(["cluster"] if "cluster" in node_samples.columns else [])]
    frame = (
        node_samples.drop_nulls(["ts", "node"])
        .select(*keep, *columns, pl.col("node").alias("scope_id"))
        .unique(["node", "ts"], keep="last")
        .sort("scope_id", "ts")
    )
    series = Series.of(frame)
    value = {
        name: frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
        if name in columns
        else np.full(frame.height, np.nan)
        for name in COLUMNS
    }
    floor = book.arrays([node or "" for node in series.nodes])["host_memory_floor_ratio"][series.gpu]
    kills = value["oom_kills_total"]
    new = np.full(len(kills), np.nan)
    if len(kills) > 1:
        new[1:] = np.where(np.diff(series.gpu) == 0, np.diff(kills), np.nan)
    total = value["host_mem_total_bytes"]
    with np.errstate(invalid="ignore", divide="ignore"):
        free = value["host_mem_available_bytes"] / np.where(total > 0, total, np.nan)
        distance = host_distance(free, own_usual(series.gpu, free), new, floor)
        return series, np.where(np.isnan(distance), UNKNOWN, np.where(distance <= 0, SET, CLEAR)).astype(np.int8)

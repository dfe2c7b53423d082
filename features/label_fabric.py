"""Ports of the network that hold a job back: marks, waits, retransmissions or load, and their effect on steps.

Here belongs the rule of `fabric_congestion`, whose scope is a port. Counters alone are no congestion: RoCE marks
packets while it runs at full speed, so that rates must stand above a floor and above what the port is used to, and,
where the steps of the node's job are known, these must be slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.conditions import INDEX
from features.history import SampleHistory
from features.label_spans import CLEAR, SET, UNKNOWN, Series, gap_s, own_usual
from features.thresholds import ThresholdBook
from features.unit_conditions import LOADS, RATES, fabric_distance, port_fill

PORT_KEYS = ("node", "device", "port")


def port_id(columns: Sequence[str]) -> pl.Expr:
    """Name of each row's port, as labels and windows have it: its keys that are among the columns, with `/` between."""
    keys = [pl.col(name).cast(pl.String).fill_null("") for name in PORT_KEYS if name in columns]
    return pl.concat_str(keys, separator="/").alias("scope_id")


def port_series(ports: pl.DataFrame) -> tuple[Series, pl.DataFrame]:
    """Samples of ports, sorted by port and time, with their rows.

    Args:
        ports: Rows of `core_port_samples`, any subset of its quantities.
    """
    frame = (
        ports.drop_nulls(["ts", "node"])
        .with_columns(port_id(ports.columns))
        .unique(["scope_id", "ts"], keep="last")
        .sort("scope_id", "ts")
    )
    return Series.of(frame), frame


def fabric_states(
    series: Series, frame: pl.DataFrame, book: ThresholdBook, history: SampleHistory | None
) -> tuple[NDArray[np.int8], Series]:
    """State of `fabric_congestion` at every sample of every port.

    Args:
        series: Samples of ports.
        frame: Their rows, in the same order.
        book: Limits of the nodes.
        history: Samples of the GPUs, for the steps of the job on each node; None: no steps are known.

    Returns:
        Shape (samples,), and the samples with the job that was on the node.
    """
    limits = {name: values[series.gpu] for name, values in book.arrays([node or "" for node in series.nodes]).items()}
    columns = {name: _column(frame, name) for name in (*LOADS, *RATES, "speed_bytes_per_s")}
    rates = np.stack([columns[name] for name in RATES])
    usual = np.stack([own_usual(series.gpu, rate) for rate in rates])
    ratio, jobs = node_steps(series, history)
    distance, _ = fabric_distance(port_fill(columns), rates, usual, limits, ratio)
    state = np.where(np.isnan(distance), UNKNOWN, np.where(distance <= 0, SET, CLEAR)).astype(np.int8)
    told = Series(series.names, series.nodes, jobs, series.gpu, series.ts, series.interval_s, series.cluster)
    return state, told


def _column(frame: pl.DataFrame, name: str) -> NDArray[np.float64]:
    if name not in frame.columns:
        return np.full(frame.height, np.nan)
    return frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy()


def node_steps(series: Series, history: SampleHistory | None) -> tuple[NDArray[np.float64], list[str | None]]:
    """Slowest step against its own, and job, of the GPUs on each sample's node as last sampled; NaN and None else."""
    n = len(series.ts)
    if history is None or not len(history.ts) or not n:
        return np.full(n, np.nan), [None] * n
    steps = pl.DataFrame(
        {
            "node": np.array(history.node_names, dtype=object)[history.node].tolist(), "ts": history.ts,
            "ratio": history.values[INDEX["step_ratio"]].astype(np.float64), "job": history.job,
        },
        schema_overrides={"node": pl.String},
    )  # fmt: skip
    by_node = (
        steps.with_columns(pl.col("ratio").fill_nan(None)).group_by("node", "ts").agg(pl.max("ratio"), pl.max("job"))
    )
    asked = pl.DataFrame(
        {"node": [series.nodes[code] for code in series.gpu], "ts": series.ts, "row": np.arange(n)},
        schema_overrides={"node": pl.String},
    )
    tolerance = max(gap_s(history), gap_s(series))
    found = asked.sort("ts").join_asof(
        by_node.sort("ts"), on="ts", by="node", strategy="backward", tolerance=tolerance, check_sortedness=False
    ).sort("row")  # fmt: skip
    jobs = [None if code is None or code < 0 else history.job_ids[code] for code in found["job"].to_list()]
    return found["ratio"].fill_null(np.nan).to_numpy(), jobs

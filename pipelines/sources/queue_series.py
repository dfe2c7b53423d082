"""Series of Prometheus that speak of queues, as rows of `core_queue_samples`; which series mean what stands elsewhere.

Series that two instances give at once become one, by the larger value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np
import polars as pl

from features.vocabulary import TIME, schema
from pipelines.sources import empty_frame
from pipelines.sources.kubernetes_series import Asks, labels_of


class QueueSeries(NamedTuple):
    """What a series is: whose, of which queue, what, and value × scale in the unit of the metric's name."""

    source: str
    queue: str
    metric: str
    scale: float


Identify = Callable[[Sequence[dict[str, str]]], list[QueueSeries | None]]


def read_queue_series(
    api: Asks, cluster: str, start: datetime, end: datetime, selector: str, identify: Identify, step_s: int
) -> pl.DataFrame:
    """Samples with start ≤ ts < end; one query.

    Args:
        api: The Prometheus.
        cluster: Name of the cluster.
        start: Start of the span, UTC.
        end: End of the span, UTC.
        selector: Which series, as `kubernetes_series.selecting` writes it.
        identify: What each series is, from the labels of all; None: not asked for.
        step_s: Seconds between samples.

    Returns:
        Rows of `core_queue_samples`.

    Raises:
        SourceError: No whole answer came.
    """
    span_s = max(int((end - start).total_seconds()), 1)
    matrix = api.matrix(f"{selector}[{span_s}s:{step_s}s]", int(end.timestamp()) * 1000)
    series = identify([labels_of(raw) for raw in matrix.labels])
    named = [(i, *known) for i, known in enumerate(series) if known is not None]
    if not named:
        return empty_frame("core_queue_samples")
    frame = pl.DataFrame(
        {
            "ts": pl.Series(matrix.ts_ms).cast(pl.Datetime("ms", "UTC")).cast(TIME),
            "series": np.repeat(np.arange(len(matrix.labels)), matrix.counts),
            "value": matrix.values,
        }
    )
    keys = pl.DataFrame(
        named,
        schema={"series": pl.Int64, "source": pl.String, "queue": pl.String, "metric": pl.String, "scale": pl.Float64},
        orient="row",
    )
    rows = (
        frame.join(keys, on="series")
        .filter((pl.col("ts") >= start) & (pl.col("ts") < end) & pl.col("value").is_finite())
        .group_by("ts", "source", "queue", "metric")
        .agg((pl.col("value") * pl.col("scale")).max())
        .with_columns(pl.lit(cluster).alias("cluster"))
        .sort("queue", "metric", "ts")
    )
    return rows.select(pl.col(name).cast(dtype) for name, dtype in schema("core_queue_samples").items())

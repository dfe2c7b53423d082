"""Series of Prometheus that tell how far jobs are, as rows of `core_job_progress`.

Which metrics these are stands in `features/exporters/applications.py` and a cluster's own mappings. Series that say the
same of a job and rank become one, by the larger value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

import numpy as np
import polars as pl

from features.exporters.metric import Metric
from features.identity import job_of
from features.metric_values import is_sentinel
from features.metrics import DEFAULT, MetricTable
from features.vocabulary import COLUMNS, PHASES, PROGRESS_QUANTITIES, TIME, conform
from pipelines.sources import empty_frame
from pipelines.sources.kubernetes_series import Asks, labels_of, selecting

SOURCE = "prometheus"
_STEP_S = 60


def read_progress_series(
    api: Asks, cluster: str, start: datetime, end: datetime, *, matcher: str = "", table: MetricTable = DEFAULT
) -> tuple[pl.DataFrame, list[str]]:
    """Progress with start ≤ ts < end, a row a minute; one query.

    Args:
        api: The Prometheus.
        cluster: Name of the cluster.
        start: Start of the span, UTC.
        end: End of the span, UTC.
        matcher: Further label matchers, as of the setting; empty: none.
        table: The vocabulary.

    Returns:
        Rows of `core_job_progress`, and what was left out, in words. Values that cannot be are null.

    Raises:
        SourceError: No whole answer came.
    """
    rows = [row for row in table.metrics if row.entity == "progress" and row.column]
    if not rows:
        return empty_frame("core_job_progress"), []
    names = "|".join(dict.fromkeys(row.name for row in rows))
    span_s = max(int((end - start).total_seconds()), 1)
    selector = selecting(f'__name__=~"{names}"', matcher)
    matrix = api.matrix(f"{selector}[{span_s}s:{_STEP_S}s]", int(end.timestamp()) * 1000)
    keys, warnings = _keys([labels_of(raw) for raw in matrix.labels], rows)
    if not keys:
        return empty_frame("core_job_progress"), warnings
    samples = pl.DataFrame(
        {
            "ts": pl.Series(matrix.ts_ms).cast(pl.Datetime("ms", "UTC")).cast(TIME),
            "series": np.repeat(np.arange(len(matrix.labels)), matrix.counts),
            "value": matrix.values,
        }
    ).filter((pl.col("ts") >= start) & (pl.col("ts") < end))
    types = {"series": pl.Int64, "job_id": pl.String, "rank": pl.Int64, "column": pl.String, "phase": pl.String}
    known = pl.DataFrame(keys, schema=types | {"scale": pl.Float64, "order": pl.Int64}, orient="row")
    told = samples.join(known, on="series")
    frame = told.group_by("job_id", "rank", "ts").agg(
        _phase().alias("phase"), *(_number(name).alias(name) for name in PROGRESS_QUANTITIES if name != "phase")
    )
    frame = frame.filter(pl.any_horizontal(pl.col(PROGRESS_QUANTITIES).is_not_null()))
    odd = told.filter((pl.col("column") != "phase") & ~_is_possible())["series"].n_unique()
    if odd:
        warnings.append(f"values of {odd} series of progress cannot be and are left out")
    frame = frame.with_columns(pl.lit(cluster).alias("cluster"), pl.lit(SOURCE).alias("source"))
    return conform(frame, "core_job_progress").sort("job_id", "rank", "ts"), warnings


def _is_possible() -> pl.Expr:
    value = pl.col("value") * pl.col("scale")
    fits = value.is_finite() & ~is_sentinel(pl.col("value"))
    for name in PROGRESS_QUANTITIES:
        low, high = COLUMNS[name].low, COLUMNS[name].high
        if low is not None and high is not None:
            fits &= (pl.col("column") != name) | value.is_between(low, high)
    return fits


def _number(column: str) -> pl.Expr:
    """Of the lowest rank of metrics that has a value that can be, the largest."""
    ours = (pl.col("column") == column) & _is_possible()
    value, order = (pl.col("value") * pl.col("scale")).filter(ours), pl.col("order").filter(ours)
    return value.filter(order == order.min()).max()


def _phase() -> pl.Expr:
    """The phase that is 1; where several are, no one knows which it is."""
    on = pl.col("phase").filter((pl.col("column") == "phase") & (pl.col("value") == 1)).unique()
    return pl.when(on.len() == 1).then(on.first())


def _keys(series: list[dict[str, str]], rows: list[Metric]) -> tuple[list[tuple[object, ...]], list[str]]:
    """Series, job, rank, column, phase, scale and rank of metric of each series that is of use; warnings of others."""
    keys: list[tuple[object, ...]] = []
    lost = {"job": 0, "rank": 0, "phase": 0}
    for number, labels in enumerate(series):
        row = next((row for row in rows if row.name == labels.get("__name__") and _matches(row, labels)), None)
        if row is None:
            continue
        job, rank = job_of(labels), _label(labels, "rank")
        phase = _label(labels, "phase") if row.column == "phase" else ""
        is_rank = not rank or (rank.isascii() and rank.isdecimal() and int(rank[:12]) <= (COLUMNS["rank"].high or 0))
        lost["job"] += not job
        lost["rank"] += not is_rank
        lost["phase"] += bool(phase) and phase not in PHASES
        if job and is_rank and (row.column != "phase" or phase in PHASES):
            keys.append((number, job, int(rank) if rank else None, row.column, phase or None, row.scale, row.rank))
    words = {
        "job": "have no label that names a job: job_id is one",
        "rank": "have a label `rank` that is no number",
        "phase": f"have another phase than {', '.join(PHASES)}",
    }
    warnings = [f"{count} series of progress {words[what]}; left out" for what, count in lost.items() if count]
    return keys, warnings


def _label(labels: Mapping[str, str], name: str) -> str:
    return labels.get(f"exported_{name}") or labels.get(name, "")


def _matches(row: Metric, labels: Mapping[str, str]) -> bool:
    return all(re.search(pattern, _label(labels, label)) for label, pattern in row.where)

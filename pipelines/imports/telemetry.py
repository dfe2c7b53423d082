"""Samples of canonical files: Parquet or CSV in the columns of `core_gpu_samples`, of `core_node_samples`, or of both.

A file of sensor readings, one a row, is handed to `sensors.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from features.vocabulary import GPU_QUANTITIES, NODE_QUANTITIES, schema
from pipelines.imports import ImportingError, Piece, Task
from pipelines.imports.sensors import is_sensors, sensor_samples
from pipelines.imports.tables import ROW, read_rows, typed, unknown_columns, without
from pipelines.words import lacking


def read_telemetry(task: Task) -> Iterator[Piece]:
    """Samples of each file.

    Yields:
        `raw_gpu_samples`, `core_node_samples`.

    Raises:
        ImportingError: A file is no table or lacks its key columns.
    """
    types = {**schema("raw_gpu_samples"), **schema("core_node_samples")}
    for path in task.files:
        for frame in read_rows(path, task):
            if is_sensors(frame.columns):
                yield sensor_samples(frame, task)
                continue
            missing = [name for name in ("ts", "node") if name not in frame.columns]
            if missing:
                found = ", ".join(name for name in frame.columns[:20] if name != ROW)
                raise ImportingError(
                    f"{path}: {lacking(missing)}; found: {found}. Wanted are ts, node, gpu_uuid "
                    "and quantities of core_gpu_samples, or node, timestamp, sensor, value and unit"
                )
            unknown_columns(frame, tuple(types), task.report)
            if not (set(GPU_QUANTITIES) | set(NODE_QUANTITIES)) & set(frame.columns):
                raise ImportingError(f"{path}: none of its columns is a quantity of core_gpu_samples")
            yield _samples(typed(frame, types, task, ("ts", "node")), task)


def _samples(rows: pl.DataFrame, task: Task) -> Piece:
    report = task.report

    def shown(row: dict) -> str:
        return f"{row['node']} {row.get('gpu_uuid') or ''} at {row['ts']}"

    rows = without(rows, pl.col("ts").is_null(), "no ts that can be read", report, shown)
    rows = without(rows, pl.col("node").is_null(), "no node", report, shown)
    has_gpus = "gpu_uuid" in rows.columns
    sensors = [name for name in NODE_QUANTITIES if name in rows.columns]
    if not sensors:
        rows = without(rows, pl.col("gpu_uuid").is_null() if has_gpus else pl.lit(True), "no gpu_uuid", report, shown)
    rows = rows.with_columns(pl.lit(task.cluster).alias("cluster")).drop(ROW)
    piece: Piece = {}
    if has_gpus:
        types = schema("raw_gpu_samples")
        piece["raw_gpu_samples"] = rows.filter(pl.col("gpu_uuid").is_not_null()).select(
            name for name in rows.columns if name in types
        )
    if sensors:
        told = rows.filter(pl.any_horizontal(pl.col(name).is_not_null() for name in sensors))
        piece["core_node_samples"] = told.group_by("ts", "cluster", "node", maintain_order=True).agg(
            pl.col(sensors).drop_nulls().first()
        )
    return piece

"""What the store holds of the minutes before a window: read to judge its samples, and put right by them.

A source is read a minute before each window; values that froze are told from five minutes and more. Those rows are in
the store already, and are read for the few GPUs alone whose values rest where the window begins.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.cleaning_findings import count
from features.cleaning_series import EARLIER, OF_THE_JOB, Earlier
from features.vocabulary import GPU_QUANTITIES
from pipelines.spans import DERIVED_MARKS, floor_time
from pipelines.store import Writer

_STEP = timedelta(minutes=5)


def earlier_samples(writer: Writer, before: datetime) -> Earlier:
    """Gives the rows of `raw_gpu_samples` that some GPUs have before a moment."""
    return lambda gpus: _rows(writer, "raw_gpu_samples", gpus, before)


def earlier_health(writer: Writer, before: datetime) -> Earlier:
    """Gives the rows of `core_gpu_health` that some GPUs have of whole minutes before a moment."""
    return lambda gpus: _rows(writer, "core_gpu_health", gpus, floor_time(before, timedelta(minutes=1)))


def _rows(writer: Writer, table: str, gpus: pl.DataFrame, before: datetime) -> pl.DataFrame:
    return writer.query(
        f'SELECT * FROM {table} WHERE "cluster" = ANY(?) AND ts >= ? AND ts < ? AND gpu_uuid = ANY(?)',
        [gpus["cluster"].unique().to_list(), before - EARLIER, before, gpus["gpu_uuid"].unique().to_list()],
    )


def revise_frozen(writer: Writer, cluster: str, keys: list[pl.DataFrame], before: datetime) -> pl.DataFrame:
    """Null the samples before a moment that are found frozen since, and have what was made of them made anew.

    Args:
        writer: The open transaction.
        cluster: Name of the cluster.
        keys: Frames of `cluster`, `node`, `gpu_uuid`, `ts`.
        before: Later ones are left out.

    Returns:
        The finding, with the number of rows that had values until now.
    """
    asked = pl.concat(keys).filter(pl.col("ts") < before).unique() if keys else pl.DataFrame()
    if asked.is_empty():
        return count(asked, "ts", "frozen")
    nulled = [name for name in GPU_QUANTITIES if name not in OF_THE_JOB]
    first = asked["ts"].min()
    known = writer.query(
        'SELECT * FROM core_gpu_samples WHERE "cluster" = ? AND ts >= ? AND ts < ? AND gpu_uuid = ANY(?)',
        [cluster, first, before, asked["gpu_uuid"].unique().to_list()],
    )
    wrong = known.join(asked, on=asked.columns, how="semi").filter(
        pl.any_horizontal(pl.col(name).is_not_null() for name in nulled)
    )
    if not wrong.is_empty():
        writer.upsert("core_gpu_samples", wrong.with_columns(pl.lit(None).alias(name) for name in nulled))
        remake_from(writer, cluster, floor_time(wrong["ts"].min(), _STEP))  # ty: ignore[invalid-argument-type]
    return count(wrong, "ts", "frozen")


def remake_from(writer: Writer, cluster: str, begin: datetime) -> None:
    """Set back the marks of what is made of samples, where they are further."""
    for name in DERIVED_MARKS:
        made = writer.mark(cluster, name)
        if made is not None and made > begin:
            writer.set_mark(cluster, name, begin)

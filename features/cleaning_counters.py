"""Counters: what they grew by from one sample to the next, and the last values of each minute.

A counter keeps its value as received; what it means is its growth. Resets, wraps, silences, swapped boards and changed
drivers are dealt with here; which counters there are stands in the registry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import polars as pl

from features import xid_counts
from features.cleaning_bounds import UINT32_MAX

_MINUTE = "1m"
# At this share of its size and beyond, a counter that falls close to 0 has wrapped; further down it was reset.
_NEAR_END = 0.95
_GPU = ("cluster", "node", "gpu_uuid")


def counter_deltas(
    frame: pl.DataFrame,
    columns: Sequence[str],
    *,
    keys: Sequence[str] = _GPU,
    break_on: Sequence[str] = (),
    max_gap: timedelta | None = None,
    wrap_at: Mapping[str, float] | None = None,
) -> pl.DataFrame:
    """What counters grew by since the sample before.

    Args:
        frame: `ts`, the keys, the columns and those to break on; one row a key and time.
        columns: Counters, in any unit.
        keys: What names one counter. To follow a slot through changes of its board, key by the slot and break on
            `gpu_uuid`.
        break_on: Columns whose change makes the growth unknown, as `driver_version`; a null is no change.
        max_gap: After a longer silence the growth is unknown; None: however long, it is the growth since.
        wrap_at: Size of counters that begin again at 0 when they are full, as `{"pcie_replay_total": 2**32}`.

    Returns:
        The frame sorted by key and time, with a column `<column>_increase` for each counter, never negative: the new
        value when it is smaller than the old (the counter was reset), null at the first sample, across a break or a
        gap, beside a null, and while a counter stands at its 32-bit end.

    Raises:
        ValueError: Columns are missing; the message names them.
    """
    missing = [name for name in ("ts", *keys, *columns, *break_on) if name not in frame.columns]
    if missing:
        raise ValueError(f"counters need {', '.join(missing)}; the frame has: {', '.join(frame.columns)}")
    rows = frame.sort(*keys, "ts")
    if rows.is_empty():
        return rows.with_columns(pl.lit(None, dtype=pl.Float64).alias(f"{name}_increase") for name in columns)
    goes_on = pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift()) for name in keys)
    goes_on &= pl.int_range(pl.len()) > 0
    if max_gap is not None:
        goes_on &= pl.col("ts") - pl.col("ts").shift() <= max_gap
    for name in break_on:
        known = pl.col(name).forward_fill().over(keys)
        goes_on &= (known == known.shift()) | known.shift().is_null()
    whole = rows.select(goes_on.fill_null(False)).to_series()
    return rows.with_columns(
        pl.when(whole).then(_increase(name, (wrap_at or {}).get(name))).alias(f"{name}_increase") for name in columns
    )


def _increase(name: str, size: float | None) -> pl.Expr:
    new = pl.col(name).cast(pl.Float64)
    new = pl.when(new.is_finite() & (new != UINT32_MAX)).then(new)
    old = new.shift()
    fallen = new
    if size is not None:
        wrapped = (old >= _NEAR_END * size) & (old < size) & (new <= (1 - _NEAR_END) * size)
        fallen = pl.when(wrapped).then(size - old + new).otherwise(new)
    return pl.when(new >= old).then(new - old).when(new < old).then(fallen)


def health_minutes(frame: pl.DataFrame) -> pl.DataFrame:
    """The last known values of each minute; of XID codes the largest counts.

    Args:
        frame: Rows of `core_gpu_health` (or another frame keyed by GPU and time), as often as they come.

    Returns:
        One row a GPU and minute in the same columns; `ts` is the beginning of the minute.
    """
    keys = [name for name in _GPU if name in frame.columns]
    minute = pl.col("ts").dt.truncate(_MINUTE)
    codes = [name for name in ("xid_counts",) if name in frame.columns]
    last = (
        frame.sort("ts")
        .group_by(*keys, minute, maintain_order=True)
        .agg(
            pl.exclude(*keys, "ts", *codes).drop_nulls().last(),
            *(xid_counts.gathered(name).alias(name) for name in codes),
        )
    )
    last = last.with_columns(xid_counts.merged(last[name]) for name in codes)
    return last.select(frame.columns).sort("gpu_uuid", "ts")

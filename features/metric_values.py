"""One registry column out of what exporters call it: scales, ranks, parts, bit masks, and values that are none.

Expressions over the columns of a wide frame only. Which metric feeds what stands in `features/metrics.py` and its
rows; bounds of cleaned values in `features/cleaning_bounds.py`.
"""

from __future__ import annotations

import polars as pl

from features.exporters.metric import FB_SHARE, HW_HOT, HW_SLOW, Metric
from features.vocabulary import COLUMNS

# "Not there" values of NVIDIA's libraries: INT32 blank…not permitted, the same as 64-bit and as floating point.
INT32_SENTINELS = tuple(float(0x7FFFFFF0 + i) for i in range(4))
FP64_SENTINELS = tuple(2.0**47 + i for i in range(4))
# The 64-bit ones (0x7ffffffffffffff0…) lose their last digits on the way through a double: compare by size.
INT64_SENTINEL_FROM = 9.2e18
# All ones of 16, 32 and 64 bits: AMD's spelling of "not available"; only where they are out of range anyway.
UINT_MAX = (65535.0, 4294967295.0)
# At exactly 0 these say "not measured": no memory runs at 0 °C, no powered board draws 0 W, no board has 0 bytes.
ZERO_IS_MISSING = (
    "mem_temp_c", "gpu_power_w", "power_limit_w", "sm_clock_hz", "mem_clock_hz", "fb_total_bytes",
)  # fmt: skip
# A ratio may pass 1 by rounding; further out it is another unit.
RATIO_SLACK = 0.02
_MASK_BITS = 2**53  # larger numbers are no masks: a double does not hold each of them

Source = tuple[str, Metric]  # column of a wide frame, and what it feeds


def is_sentinel(value: pl.Expr) -> pl.Expr:
    """True where a value, as exposed and before any scale, is one of NVIDIA's "not there" numbers."""
    return (value >= INT64_SENTINEL_FROM) | value.is_in(list(INT32_SENTINELS + FP64_SENTINELS))


def is_flag(column: str) -> bool:
    """Whether a column, or a helper of one, is true or false."""
    return column in (HW_SLOW, HW_HOT) or (column in COLUMNS and COLUMNS[column].dtype == pl.Boolean)


def _usable(name: str) -> pl.Expr:
    value = pl.col(name)
    return pl.when(value.is_finite() & ~is_sentinel(value)).then(value)


def _number(source: Source) -> pl.Expr:
    """A value in the column's unit; null where another metric of the column is to be asked instead."""
    name, metric = source
    value = _usable(name)
    if not metric.part:  # one of several spellings: all ones of another exporter make way
        value = pl.when(~value.is_in(list(UINT_MAX))).then(value)
    value = value * metric.scale
    column = COLUMNS.get(metric.column)
    if column is None:
        return value
    low, high = column.low, column.high
    if low is not None:
        value = pl.when(value >= low).then(value)
    if high is not None and not metric.part:
        value = pl.when(value <= high + (RATIO_SLACK if column.unit == "ratio" else 0.0)).then(value)
    return pl.when(value != 0).then(value) if metric.column in ZERO_IS_MISSING else value


def _flag(source: Source) -> pl.Expr:
    name, metric = source
    value = _usable(name)
    if metric.mask:
        bits = pl.when(value.is_between(0, _MASK_BITS)).then(value).cast(pl.Int64)
        return (bits & metric.mask) != 0
    if metric.equals is not None:
        # Numbers of states count from 0; one below says that the state is not known.
        return pl.when(value >= min(0.0, metric.equals)).then(value == metric.equals)
    return pl.when(~value.is_in(list(UINT_MAX))).then(value) > 0


def _parts(sources: list[Source]) -> list[list[Source]]:
    return [[s for s in sources if s[1].part == part] for part in dict.fromkeys(s[1].part for s in sources)]


def quantity(column: str, sources: list[Source]) -> pl.Expr:
    """Value of a column from what feeds it and is present.

    Args:
        column: Registry column or helper.
        sources: By rank.

    Returns:
        Of the lowest rank that has a believable value. Where none has, whatever was received: cleaning counts it. A sum
        of which a part was received that is no number is that part, for the same reason; flags are null then
        (`unknown`).
    """
    if is_flag(column):
        return pl.coalesce([_any(same) for same in _ranked(sources)])
    if len(sources) == 1 and not sources[0][1].part:
        return pl.col(sources[0][0]) * sources[0][1].scale
    spoilt: list[pl.Expr] = []
    values = [_sum(same, spoilt) for same in _ranked(sources)]
    raw = [pl.col(name) * metric.scale for name, metric in sources if not metric.part]
    return pl.coalesce([*values, *spoilt, *raw])


def _ranked(sources: list[Source]) -> list[list[Source]]:
    return [[s for s in sources if s[1].rank == rank] for rank in sorted({metric.rank for _, metric in sources})]


def _any(sources: list[Source]) -> pl.Expr:
    parts = [pl.coalesce([_flag(s) for s in part]) for part in _parts(sources)]
    if len(parts) == 1:
        return parts[0]
    there = pl.any_horizontal([part.is_not_null() for part in parts])
    return pl.when(there).then(pl.any_horizontal([part.fill_null(False) for part in parts]))


def _sum(sources: list[Source], spoilt: list[pl.Expr]) -> pl.Expr:
    """The sum of the parts, null when one was received that is no number; such parts go to `spoilt`."""
    if not any(metric.part for _, metric in sources):
        return pl.coalesce([_number(s) for s in sources])
    parts = _parts(sources)
    addends = [pl.coalesce([_number(s) for s in part]) for part in parts]
    bad = [
        pl.when(addend.is_null()).then(pl.coalesce([pl.col(name) * metric.scale for name, metric in part]))
        for addend, part in zip(addends, parts, strict=True)
    ]
    spoilt += bad
    there = pl.any_horizontal([addend.is_not_null() for addend in addends])
    whole = pl.all_horizontal([value.is_null() for value in bad])
    return pl.when(there & whole).then(pl.sum_horizontal(addends))


def unknown(wide: pl.DataFrame, frame: pl.DataFrame, by_column: dict[str, list[Source]]) -> pl.Series | None:
    """Flags that nothing tells though something was received: their columns, by commas.

    Args:
        wide: The columns as they were made.
        frame: What they were made of, row by row.
        by_column: What feeds each column.

    Returns:
        A text for each row, null where there are none; None when no row has any.
    """
    lost: list[pl.Series] = []
    for column in wide.columns:
        if not is_flag(column) or not wide[column].null_count():
            continue
        sources = by_column.get(column, []) + (by_column.get(HW_SLOW, []) if column == "is_power_brake" else [])
        if not sources:
            continue
        received = frame.select(pl.any_horizontal([pl.col(name).is_not_null() for name, _ in sources])).to_series()
        bad = (received & wide[column].is_null()).alias(column)
        if bad.any():
            lost.append(bad)
    if not lost:
        return None
    names = pl.concat_str([pl.when(bad).then(pl.lit(bad.name)) for bad in lost], separator=",", ignore_nulls=True)
    return pl.select(pl.when(names != "").then(names).alias("unknown_flags")).to_series()


def with_memory(wide: pl.DataFrame) -> pl.DataFrame:
    """Memory in all, where none is exposed that can be, from what is used, free and held back; used from its share."""
    if FB_SHARE in wide.columns and "fb_total_bytes" in wide.columns:
        share = pl.when(pl.col(FB_SHARE).is_between(0, 1)).then(FB_SHARE) * _believable("fb_total_bytes")
        given = ["fb_used_bytes"] if "fb_used_bytes" in wide.columns else []
        wide = wide.with_columns(pl.coalesce([*given, share]).alias("fb_used_bytes"))
    if "fb_used_bytes" not in wide.columns or "_fb_free_bytes" not in wide.columns:
        return wide
    # Drivers before 510 count what they hold back as used and expose no reserved figure, or a number for none.
    reserved = _believable("fb_reserved_bytes").fill_null(0) if "fb_reserved_bytes" in wide.columns else pl.lit(0.0)
    total = _believable("fb_used_bytes") + _believable("_fb_free_bytes", "fb_total_bytes") + reserved
    if "fb_total_bytes" not in wide.columns:
        return wide.with_columns(total.alias("fb_total_bytes"))
    return wide.with_columns(
        pl.coalesce(_believable("fb_total_bytes"), total, "fb_total_bytes").alias("fb_total_bytes")
    )


def _believable(name: str, like: str = "") -> pl.Expr:
    """Bytes that can be: a "not there" number may be scaled by then, and is beyond the bounds of memory."""
    column, value = COLUMNS[like or name], pl.col(name)
    value = pl.when(value.is_finite() & value.is_between(column.low, column.high)).then(value)
    sentinels = [number * scale for number in (*INT32_SENTINELS, *UINT_MAX) for scale in (1.0, 2.0**20)]
    value = pl.when(~value.is_in(sentinels)).then(value)
    return pl.when(value != 0).then(value) if name in ZERO_IS_MISSING else value


def with_power_brake(wide: pl.DataFrame) -> pl.DataFrame:
    """A hardware slowdown that is not thermal is one for power, whether the brake is told or not."""
    if HW_SLOW not in wide.columns:
        return wide
    hot = pl.col(HW_HOT).fill_null(False) if HW_HOT in wide.columns else pl.lit(False)
    slow = pl.col(HW_SLOW) & ~hot
    brake = pl.col("is_power_brake") if "is_power_brake" in wide.columns else pl.lit(None, dtype=pl.Boolean)
    return wide.with_columns(pl.when(slow).then(True).otherwise(pl.coalesce(brake, slow)).alias("is_power_brake"))

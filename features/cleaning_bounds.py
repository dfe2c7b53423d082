"""Bounds of single values: "not there" numbers, numbers that are none, physical limits, limits of the row's own.

Each value is judged by itself or beside the others of its row; what needs several samples stands in
`cleaning_series.py`. Bounds come from the registry, the spellings of "not there" from `features/metrics.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import polars as pl

from features import metrics
from features.cleaning_findings import count, without
from features.metric_values import RATIO_SLACK, ZERO_IS_MISSING
from features.vocabulary import COLUMNS, Column

# A board may pass its limit for a moment, not by this factor.
_POWER_OVER_LIMIT = 1.5
# All ones of 32 bits: in a counter its end, elsewhere AMD's "not available".
UINT32_MAX = 4294967295.0
# The 64-bit "not there" numbers and all ones, as they come through a double: exact even after a scale below 1.
_WIDE = (2.0**63, 2.0**64)
# Counts by another name than `…_total`; a "not there" number may lie inside the bounds of a count.
_OTHER_COUNTS = ("xid_last", "xid_events", "energy_total_j")


def is_count(column: Column) -> bool:
    """Whether a column counts things or adds up: a "not there" number may lie inside its bounds then."""
    return column.name.endswith("_total") or column.name in _OTHER_COUNTS


@functools.cache
def _scales(name: str) -> frozenset[float]:
    return frozenset({1.0, *(m.scale for m in metrics.METRICS if m.column == name)})


def _images(column: Column, values: Iterable[float]) -> list[float]:
    """What numbers look like in a column after each scale that feeds it, at the column's precision."""
    images = pl.Series([value * scale for value in values for scale in _scales(column.name)], dtype=pl.Float64)
    return _at_precision(images, column).unique().to_list()


def _at_precision(values: pl.Series, column: Column) -> pl.Series:
    return values if column.dtype == pl.Float64 else values.cast(pl.Float32).cast(pl.Float64)


def _verdicts(column: Column) -> Iterator[tuple[str, pl.Expr]]:
    """Reasons for which a value is impossible, the most telling first, each with its test."""
    value = pl.col(column.name).cast(pl.Float64)
    outside = pl.lit(False)
    if column.low is not None:
        outside |= value < column.low
    if column.high is not None:
        slack = RATIO_SLACK if column.unit == "ratio" else 0.0
        outside |= value > column.high + slack
    if column.dtype.is_float():
        yield "not_a_number", value.is_nan() | value.is_infinite()
    # In single precision 2147483632…35 are one number.
    exact = value if column.dtype == pl.Float64 else value.cast(pl.Float32).cast(pl.Float64)
    not_there = [*metrics.INT32_SENTINELS, *metrics.FP64_SENTINELS, *_WIDE]
    if is_count(column):
        reaches_end = column.high is None or column.high >= UINT32_MAX
        known = exact.is_in(_images(column, not_there if reaches_end else [*not_there, UINT32_MAX]))
        yield "sentinel", (value.abs() >= metrics.INT64_SENTINEL_FROM) | known
        if reaches_end:
            yield "saturated", exact.is_in(_images(column, [UINT32_MAX]))
    else:
        known = exact.is_in(_images(column, [*not_there, *metrics.UINT_MAX]))
        yield "sentinel", ((value.abs() >= metrics.INT64_SENTINEL_FROM) | known) & outside
    yield "out_of_range", outside
    if column.name in ZERO_IS_MISSING:
        yield "zero_is_missing", value == 0


def bounded(samples: pl.DataFrame, names: Iterable[str], findings: list[pl.DataFrame]) -> pl.DataFrame:
    """Impossible values of the named columns become null; ratios a little above 1 become 1.

    Args:
        samples: Rows of a registry table.
        names: Its quantities; flags and names among them are passed over.
        findings: Takes what was wrong.
    """
    types = (pl.Boolean, pl.String)
    names = [n for n in names if COLUMNS[n].dtype not in types and samples[n].null_count() < len(samples)]
    for name in names:
        column = COLUMNS[name]
        # One cheap pass finds the columns, nearly all of them, that have nothing wrong.
        verdicts = list(_verdicts(column))
        bad = samples.select(pl.any_horizontal(test for _, test in verdicts).fill_null(False)).to_series()
        if bad.any():
            wrong = samples.filter(bad)
            for reason, test in verdicts:
                findings.append(count(wrong.filter(test.fill_null(False)), name, reason))
                wrong = wrong.filter(~test.fill_null(False))
            samples = samples.with_columns(pl.when(~bad).then(pl.col(name)).alias(name))
        if column.unit == "ratio":
            samples = samples.with_columns(pl.col(name).clip(upper_bound=1.0))
    return samples


def consistent(samples: pl.DataFrame, findings: list[pl.DataFrame]) -> pl.DataFrame:
    """Values that others of their row refute become null: power far above its limit, memory above its total."""
    above_limit = pl.col("gpu_power_w") > _POWER_OVER_LIMIT * pl.col("power_limit_w")
    above_total = pl.col("fb_used_bytes") > 1.01 * pl.col("fb_total_bytes")
    for name, reason, test in (
        ("gpu_power_w", "above_limit", above_limit),
        ("fb_used_bytes", "above_total", above_total),
    ):
        samples = without(samples, samples.select(test).to_series(), name, reason, findings)
    return samples


def told_flags(samples: pl.DataFrame, findings: list[pl.DataFrame]) -> pl.DataFrame:
    """Flags that an exporter could not tell are null already (`unknown_flags` names them); they are counted here.

    Args:
        samples: Rows of a registry table that has `unknown_flags`.
        findings: Takes what was wrong.

    Returns:
        The samples with nothing in `unknown_flags`.
    """
    names = samples["unknown_flags"]
    if names.null_count() == len(names):
        return samples
    split = names.str.split(",")
    for name in sorted(set(split.drop_nulls().explode().to_list())):
        findings.append(count(samples.filter(split.list.contains(name).fill_null(False)), name, "sentinel"))
    return samples.with_columns(pl.lit(None, dtype=pl.String).alias("unknown_flags"))

"""Cleaning of samples: what cannot be true becomes null and is counted; it never becomes zero and never stops anything.

Pure functions from `raw_` frames to `core_` frames plus a count of what was wrong. Bounds come from the registry, the
spellings of "not there" from `features/metrics.py`; where values come from stands in the sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

import polars as pl

from features import metrics
from features.vocabulary import COLUMNS, GPU_KEYS, GPU_QUANTITIES, NODE_QUANTITIES, Column, conform

QUALITY_SCHEMA = {"column_name": pl.String, "reason": pl.String, "count": pl.Int64, "example": pl.String}

# A ratio may pass 1 by rounding; further out it is another unit.
_RATIO_SLACK = 0.02
# A board may pass its limit for a moment, not by this factor.
_POWER_OVER_LIMIT = 1.5
# At exactly 0 these say "not measured": no memory runs at 0 °C, no powered board draws 0 W, no board has 0 bytes.
_ZERO_IS_MISSING = ("mem_temp_c", "gpu_power_w", "power_limit_w", "sm_clock_hz", "mem_clock_hz", "fb_total_bytes")
# Counts in which a sentinel may lie inside the bounds; for other quantities it must lie outside to be called one.
_COUNTS = ("xid_last", "ecc_uncorrected_total", "remapped_rows_total", "nvlink_error_total")
_EPOCH = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
_MAX_AHEAD = timedelta(minutes=5)


def clean_gpu_samples(frame: pl.DataFrame, now: datetime | None = None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Samples that may be believed.

    Args:
        frame: Any subset of the columns of `raw_gpu_samples`, keys among them; one row per GPU and time, or more.
        now: When given, rows more than 5 minutes later than this are dropped.

    Returns:
        A frame in the columns of `core_gpu_samples`, one row a key, sorted by GPU and time; and what was wrong:
        `column_name`, `reason` (sentinel, not_a_number, out_of_range, zero_is_missing, above_limit, above_total,
        no_key, bad_time, duplicate), `count`, `example` (cluster/node/GPU where it was seen). Rows are dropped only
        for a missing key, an impossible time or as duplicates; duplicates are merged by the largest value.

    Raises:
        ValueError: A key column is missing or a column is not of the table.
    """
    samples = conform(frame, "raw_gpu_samples")
    findings: list[pl.DataFrame] = []
    samples = _keyed(samples, ("cluster", "node", "gpu_uuid"), now, findings)
    samples = _bounded(samples, GPU_QUANTITIES, findings)
    samples = _consistent(samples, findings)
    samples = _unique(samples, ("cluster", "node", "gpu_uuid", "ts"), findings)
    return samples.select(*GPU_KEYS, *GPU_QUANTITIES).sort("gpu_uuid", "ts"), _quality(findings)


def clean_node_samples(frame: pl.DataFrame, now: datetime | None = None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The same for node samples: `core_node_samples` columns in and out."""
    samples = conform(frame, "core_node_samples")
    findings: list[pl.DataFrame] = []
    samples = _keyed(samples, ("cluster", "node"), now, findings)
    samples = _bounded(samples, NODE_QUANTITIES, findings)
    samples = _unique(samples, ("cluster", "node", "ts"), findings)
    return samples.sort("node", "ts"), _quality(findings)


def _keyed(
    samples: pl.DataFrame, keys: tuple[str, ...], now: datetime | None, findings: list[pl.DataFrame]
) -> pl.DataFrame:
    has_key = pl.all_horizontal(pl.col(name).is_not_null() & (pl.col(name) != "") for name in keys)
    findings.append(_count(samples.filter(~has_key), keys[-1], "no_key"))
    samples = samples.filter(has_key)
    in_time = pl.col("ts").is_not_null() & (pl.col("ts") >= _EPOCH)
    if now is not None:
        in_time &= pl.col("ts") <= now + _MAX_AHEAD
    findings.append(_count(samples.filter(~in_time), "ts", "bad_time"))
    return samples.filter(in_time)


def _images(name: str) -> list[float]:
    """What a sentinel looks like in a column after each scale that feeds it, at the column's precision."""
    scales = {1.0, *(m.scale for m in metrics.METRICS if m.column == name)}
    values = [*metrics.INT32_SENTINELS, *metrics.FP64_SENTINELS]
    if name not in _COUNTS:
        values += metrics.UINT_MAX
    images = pl.Series([value * scale for value in values for scale in scales], dtype=pl.Float64)
    return images.cast(pl.Float32).cast(pl.Float64).unique().to_list()


def _verdicts(column: Column) -> Iterator[tuple[str, pl.Expr]]:
    """Reasons for which a value is impossible, the most telling first, each with its test."""
    name, value = column.name, pl.col(column.name).cast(pl.Float64)
    outside = pl.lit(False)
    if column.low is not None:
        outside |= value < column.low
    if column.high is not None:
        slack = _RATIO_SLACK if column.unit == "ratio" else 0.0
        outside |= value > column.high + slack
    if column.dtype.is_float():
        yield "not_a_number", value.is_nan() | value.is_infinite()
    single = value.cast(pl.Float32).cast(pl.Float64)  # 2147483632…35 are one number at this precision
    sentinel = (value.abs() >= metrics.INT64_SENTINEL_FROM) | single.is_in(_images(name))
    yield "sentinel", sentinel if name in _COUNTS else sentinel & outside
    yield "out_of_range", outside
    if name in _ZERO_IS_MISSING:
        yield "zero_is_missing", value == 0


def _bounded(samples: pl.DataFrame, names: Iterable[str], findings: list[pl.DataFrame]) -> pl.DataFrame:
    names = [name for name in names if COLUMNS[name].dtype != pl.Boolean and samples[name].null_count() < len(samples)]
    for name in names:
        column = COLUMNS[name]
        # One cheap pass finds the columns, nearly all of them, that have nothing wrong.
        verdicts = list(_verdicts(column))
        bad = samples.select(pl.any_horizontal(test for _, test in verdicts).fill_null(False)).to_series()
        if bad.any():
            wrong = samples.filter(bad)
            for reason, test in verdicts:
                findings.append(_count(wrong.filter(test.fill_null(False)), name, reason))
                wrong = wrong.filter(~test.fill_null(False))
            samples = samples.with_columns(pl.when(~bad).then(pl.col(name)).alias(name))
        if column.unit == "ratio":
            samples = samples.with_columns(pl.col(name).clip(upper_bound=1.0))
    return samples


def _consistent(samples: pl.DataFrame, findings: list[pl.DataFrame]) -> pl.DataFrame:
    above_limit = pl.col("gpu_power_w") > _POWER_OVER_LIMIT * pl.col("power_limit_w")
    above_total = pl.col("fb_used_bytes") > 1.01 * pl.col("fb_total_bytes")
    for name, reason, test in (
        ("gpu_power_w", "above_limit", above_limit),
        ("fb_used_bytes", "above_total", above_total),
    ):
        bad = samples.select(test.fill_null(False)).to_series()
        if bad.any():
            findings.append(_count(samples.filter(bad), name, reason))
            samples = samples.with_columns(pl.when(~bad).then(pl.col(name)).alias(name))
    return samples


def _unique(samples: pl.DataFrame, key: tuple[str, ...], findings: list[pl.DataFrame]) -> pl.DataFrame:
    doubled = samples.select(pl.struct(key).is_duplicated()).to_series()
    if not doubled.any():
        return samples
    some = samples.filter(doubled)
    merged = some.group_by(key, maintain_order=True).agg(pl.exclude(key).max())
    extra = len(some) - len(merged)
    findings.append(_count(some, "ts", "duplicate").with_columns(pl.lit(extra, dtype=pl.Int64).alias("count")))
    return pl.concat([samples.filter(~doubled), merged.select(samples.columns)])


def _count(wrong: pl.DataFrame, column: str, reason: str) -> pl.DataFrame:
    if wrong.is_empty():
        return pl.DataFrame(schema=QUALITY_SCHEMA)
    first = wrong.row(0, named=True)
    example = "/".join(str(first[name]) for name in ("cluster", "node", "gpu_uuid") if first.get(name))
    return pl.DataFrame([(column, reason, len(wrong), example)], schema=QUALITY_SCHEMA, orient="row")


def _quality(findings: list[pl.DataFrame]) -> pl.DataFrame:
    if not findings:
        return pl.DataFrame(schema=QUALITY_SCHEMA)
    return pl.concat(findings).sort("column_name", "reason")

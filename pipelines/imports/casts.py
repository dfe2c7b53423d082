"""Values of files as the registry's dtypes: times, numbers, flags and texts in any spelling. What cannot be is null."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import polars as pl

from features.vocabulary import TIME

# Whole numbers are times in seconds, milliseconds, microseconds or nanoseconds since 1970, by their size.
_UNITS_US = ((10**11, 1_000_000), (10**14, 1_000), (10**17, 1))
_YES, _NO = ("true", "t", "yes", "1", "1.0"), ("false", "f", "no", "0", "0.0")
_LARGEST = 2.0**63
# Years that a calendar has; 32-bit and 64-bit rubbish lies far outside of it.
_CALENDAR = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)


def cast_values(values: pl.Series, dtype: pl.DataType | type[pl.DataType], zone: ZoneInfo) -> pl.Series:
    """Values as a registry dtype; null where one cannot be cast.

    Args:
        values: Of any dtype.
        dtype: The one that is wanted.
        zone: Of times that are written without one.
    """
    if dtype == TIME:
        told = moments(values, zone)
        return told.set(~told.is_between(*_CALENDAR).fill_null(True), None)
    if dtype == pl.String:
        return _text(values)
    if dtype == pl.Boolean:
        return _flag(values)
    if values.dtype in (pl.Boolean, pl.String) or values.dtype.is_numeric():
        number = values.cast(pl.Float64, strict=False)
        if dtype.is_integer():
            if values.dtype.is_integer():
                return values.cast(dtype, strict=False)
            whole = number.is_finite() & (number == number.round()) & (number.abs() < _LARGEST)
            return number.set(~whole.fill_null(True), None).cast(pl.Int64, strict=False).cast(dtype, strict=False)
        return number.cast(dtype, strict=False)
    return pl.Series([None] * len(values), dtype=dtype)


def _text(values: pl.Series) -> pl.Series:
    if values.dtype.is_float():
        whole = values.is_finite() & (values == values.round()) & (values.abs() < 2.0**53)
        if whole.fill_null(True).all():
            values = values.cast(pl.Int64, strict=False)  # ids that went through a float column
    try:
        return values.cast(pl.String, strict=False)
    except pl.exceptions.PolarsError:  # lists and the like
        return pl.Series([None] * len(values), dtype=pl.String)


def _flag(values: pl.Series) -> pl.Series:
    if values.dtype == pl.Boolean:
        return values
    text = _text(values).str.to_lowercase()
    known = {**dict.fromkeys(_YES, True), **dict.fromkeys(_NO, False)}
    return text.replace_strict(list(known), list(known.values()), default=None, return_dtype=pl.Boolean)


def moments(values: pl.Series, zone: ZoneInfo) -> pl.Series:
    """Times in UTC: of any unit and zone, as ISO 8601 text, or as numbers since 1970.

    Args:
        values: Times, texts or numbers.
        zone: Of times that are written without one.
    """
    if isinstance(values.dtype, pl.Datetime):
        if values.dtype.time_zone is None:
            return _in_utc(values.cast(pl.Datetime("us"), strict=False), zone)
        return values.cast(pl.Datetime("us", values.dtype.time_zone), strict=False).dt.convert_time_zone("UTC")
    if values.dtype == pl.Date:
        return _in_utc(values.cast(pl.Datetime("us"), strict=False), zone)
    if values.dtype == pl.String:
        number = values.cast(pl.Float64, strict=False)
        text = values.str.replace(" ", "T").str.replace("Z$", "+00:00")
        with_zone = text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f%:z", time_unit="us", time_zone="UTC", strict=False)
        naive = text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False)
        frame = pl.DataFrame([_from_epoch(number).alias("a"), with_zone.alias("b"), _in_utc(naive, zone).alias("c")])
        return frame.select(pl.coalesce("a", "b", "c")).to_series()
    if values.dtype.is_integer():
        return _from_epoch(values.cast(pl.Int64, strict=False))
    if values.dtype.is_numeric():
        return _from_epoch(values.cast(pl.Float64, strict=False))
    return pl.Series([None] * len(values), dtype=TIME)


def _in_utc(naive: pl.Series, zone: ZoneInfo) -> pl.Series:
    return naive.dt.replace_time_zone(zone.key, ambiguous="earliest", non_existent="null").dt.convert_time_zone("UTC")


def _from_epoch(number: pl.Series) -> pl.Series:
    value = pl.col("n")
    us = pl.when(value.abs() < 9 * 10**18).then(value // 1000)  # nanoseconds; what is larger is no time
    for below, factor in reversed(_UNITS_US):
        us = pl.when(value.abs() < below).then(value * factor).otherwise(us)
    frame = pl.DataFrame([number.alias("n")])
    return frame.select(us.cast(pl.Int64, strict=False).cast(TIME)).to_series()

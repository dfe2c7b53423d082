"""Rows of samples: their keys, their times, and one row a key.

Here belongs what makes a row usable or one with another; values stand in `cleaning_bounds.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import polars as pl

from features import xid_counts
from features.cleaning_findings import count

_EPOCH = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
_MAX_AHEAD = timedelta(minutes=5)
# A clock that leads is seen by itself: samples of the future. One that lags is only seen beside others.
_LEADS = timedelta(seconds=30)
_SHIFTED = timedelta(seconds=60)
_OTHERS = 3


def keyed(
    samples: pl.DataFrame, keys: Sequence[str], now: datetime | None, findings: list[pl.DataFrame]
) -> pl.DataFrame:
    """Rows that have every key and a time that can be true.

    Args:
        samples: Rows of a registry table.
        keys: Key columns but the time.
        now: When given, rows more than 5 minutes later than this are dropped, and nodes whose clocks are off are
            counted.
        findings: Takes what was wrong.
    """
    has_key = pl.all_horizontal(
        pl.col(name).is_not_null() & (pl.col(name) != "" if samples.schema[name] == pl.String else pl.lit(True))
        for name in keys
    )
    kept = samples.select(has_key).to_series()
    if not kept.all():
        findings.append(count(samples.filter(~kept), keys[-1], "no_key"))
        samples = samples.filter(kept)
    in_time = pl.col("ts").is_not_null() & (pl.col("ts") >= _EPOCH)
    if now is not None:
        in_time &= pl.col("ts") <= now + _MAX_AHEAD
    kept = samples.select(in_time).to_series()
    if not kept.all():
        findings.append(count(samples.filter(~kept), "ts", "bad_time"))
        samples = samples.filter(kept)
    if now is not None and not samples.is_empty():
        findings += _skewed(samples, now)
    return samples


def _skewed(samples: pl.DataFrame, now: datetime) -> list[pl.DataFrame]:
    """A finding for nodes whose clocks are off. Rows stay: which of the two times is right cannot be told here."""
    nodes = samples.group_by("cluster", "node").agg(
        pl.col("ts").min().alias("first"), pl.col("ts").max().alias("last"), pl.len().alias("rows")
    )
    if nodes["last"].max() <= now + _LEADS and len(nodes) < _OTHERS:  # ty: ignore[unsupported-operator]
        return []
    leads = pl.col("last") > now + _LEADS
    # A clock that is shifted moves both ends of its node by the same. A node that came or went inside the window has an
    # end in common with the others; one that came after they went has no time in common with them and tells nothing.
    begins, ends = (pl.col(name).quantile(0.5, "lower") for name in ("first", "last"))
    first, last = pl.col("first") - begins, pl.col("last") - ends
    has_common = (pl.col("first") <= ends) & (pl.col("last") >= begins)
    shifted = ((first > _SHIFTED) & (last > _SHIFTED)) | ((first < -_SHIFTED) & (last < -_SHIFTED))
    shifted &= has_common & ((first - last).abs() <= _SHIFTED)
    if len(nodes) < _OTHERS:
        shifted = pl.lit(False)
    ahead = pl.when(leads).then(pl.col("last") - pl.lit(now)).otherwise(last)
    off = nodes.with_columns(ahead.dt.total_milliseconds().alias("ms")).filter(leads | shifted).sort("node")
    if off.is_empty():
        return []
    seconds = off["ms"][0] / 1000
    note = f" ({abs(seconds):.3g} s {'ahead' if seconds > 0 else 'behind'})"
    return [count(off, "ts", "clock_skew", rows=int(off["rows"].sum()), note=note)]


def unique(samples: pl.DataFrame, key: Sequence[str], findings: list[pl.DataFrame]) -> pl.DataFrame:
    """One row a key: duplicates merge by the largest value; the job is that of the rows which name one.

    Args:
        samples: Rows of a registry table.
        key: Key columns, the time among them.
        findings: Takes what was wrong.
    """
    doubled = samples.select(pl.struct(key).is_duplicated()).to_series()
    if not doubled.any():
        return samples
    some = samples.filter(doubled)
    merged = merge(some, key, findings)
    findings.append(count(some, "ts", "duplicate", rows=len(some) - len(merged)))
    return pl.concat([samples.filter(~doubled), merged.select(samples.columns)])


def merge(samples: pl.DataFrame, key: Sequence[str], findings: list[pl.DataFrame]) -> pl.DataFrame:
    """One row a key by the largest value of each column, the job apart: different jobs make none."""
    if "job_id" not in samples.columns:
        codes = [name for name in ("xid_counts",) if name in samples.columns]
        one = samples.group_by(key, maintain_order=True).agg(
            pl.exclude(*key, *codes).max(), *(xid_counts.gathered(name).alias(name) for name in codes)
        )
        return one.with_columns(xid_counts.merged(one[name]) for name in codes)
    job = pl.col("job_id").filter(pl.col("job_id") != "")
    merged = samples.group_by(key, maintain_order=True).agg(
        pl.exclude(*key, "job_id").max(), job.max(), job.n_unique().alias("_jobs")
    )
    shared = merged["_jobs"] > 1
    if shared.any():
        findings.append(count(merged.filter(shared), "job_id", "several_jobs"))
        merged = merged.with_columns(pl.when(~shared).then(pl.col("job_id")).alias("job_id"))
    return merged.drop("_jobs")

"""Counts of XID codes, one text a GPU and time: `31=3 79=1`, nothing in it where the exporter counted none.

A count of a rolling window falls by itself; one since the exporter began (a `+` behind it) does not. Here belongs how
counts by code are put together, written and read; what their course means stands in `xid_events.py`.
"""

from __future__ import annotations

import re

import polars as pl

KEY = ("cluster", "node", "gpu_uuid", "ts")
COUNTS = {"xid_events": pl.Float64, "xid_counts": pl.String, "xid_last": pl.Int32}
_MOST = 1e6  # of one code: more is no count
_BETWEEN = "|"
_TOKEN = re.compile(r"([0-9]{1,6})=([0-9]{1,8})(\+?)")


def folded(codes: pl.DataFrame) -> pl.DataFrame:
    """One row a GPU and time of the counts of its codes.

    Args:
        codes: `cluster`, `node`, `gpu_uuid`, `ts`, `xid` (null where a series bears no code) and any of `xid_events`
            (count of a window), `_xid_total` (count since the exporter began), `_xid_time` (when it came last, s since
            1970).

    Returns:
        The key and `COUNTS`. `xid_events` is the sum over the codes, or the value of one that is no count, for cleaning
        to judge. `xid_counts` is null where not all of the codes are known. `xid_last` is the code that came last, null
        when no time is told.
    """
    columns = [
        pl.col(name) if name in codes.columns else pl.lit(None, dtype=pl.Float64).alias(name)
        for name in ("xid_events", "_xid_total", "_xid_time")
    ]
    rows = codes.select(*KEY, "xid", *columns)
    counts = pl.concat(
        rows.select(*KEY, "xid", pl.col(name).alias("n"), pl.lit(mark).alias("mark")).filter(pl.col("n").is_not_null())
        for name, mark in (("xid_events", ""), ("_xid_total", "+"))
    )
    counts = counts.with_columns((pl.col("n").is_finite() & pl.col("n").is_between(0, _MOST)).alias("is_count"))
    bad, n = ~pl.col("is_count"), pl.col("n")
    told = ~bad.any() & ~(pl.col("xid").is_null() & (n > 0)).any()
    token = pl.format("{}={}{}", "xid", n.round().cast(pl.Int64, strict=False), "mark")
    some = pl.col("is_count") & (n.round() > 0) & pl.col("xid").is_not_null()
    texts = counts.group_by(KEY, maintain_order=True).agg(
        pl.when(bad.any()).then(n.filter(bad).first()).otherwise(n.sum()).alias("xid_events"),
        pl.when(told).then(token.filter(some).sort_by(pl.col("xid").filter(some)).str.join(" ")).alias("xid_counts"),
    )
    timed = rows.filter(pl.col("_xid_time").is_finite() & (pl.col("_xid_time") > 0) & pl.col("xid").is_not_null())
    last = timed.group_by(KEY).agg(pl.col("xid").sort_by("_xid_time").last().alias("xid_last"))
    both = texts.join(last, on=KEY, how="full", coalesce=True)
    return both.select(*KEY, *(pl.col(name).cast(dtype) for name, dtype in COUNTS.items()))


def read(text: str) -> dict[tuple[int, bool], int]:
    """Counts by code and by whether they are since the exporter began; what is no count is passed over."""
    return {(int(code), mark == "+"): int(n) for code, n, mark in _TOKEN.findall(text)}


def write(counts: dict[tuple[int, bool], int]) -> str:
    """The text of counts; those of 0 are left out."""
    return " ".join(f"{code}={n}{'+' if ever else ''}" for (code, ever), n in sorted(counts.items()) if n > 0)


def gathered(name: str = "xid_counts") -> pl.Expr:
    """Texts of a group in one, for `merged`: each once; null when the group has none."""
    return pl.when(pl.col(name).count() > 0).then(pl.col(name).drop_nulls().unique().sort().str.join(_BETWEEN))


def merged(texts: pl.Series) -> pl.Series:
    """Texts that were gathered, by the largest count of each code."""
    several = texts.filter(texts.str.contains(_BETWEEN, literal=True).fill_null(False)).unique()
    if several.is_empty():
        return texts
    whole = []
    for text in several.to_list():
        most: dict[tuple[int, bool], int] = {}
        for part in text.split(_BETWEEN):
            for key, n in read(part).items():
                most[key] = max(n, most.get(key, 0))
        whole.append(write(most))
    return texts.replace(several, pl.Series(whole, dtype=pl.String))

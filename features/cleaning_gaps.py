"""Gaps: samples that a series lacks among those that it has, by its own usual step.

Here belongs what is missing altogether; values that are there and not believed stand in the other modules. A series
that is new has no gap before it, and one that ended is counted missing at first alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from features.cleaning_findings import count

# So many steps from one sample to the next are a gap: half a step is the trembling of scrapes.
_LATE = 1.5
_SAMPLES = 4  # fewer do not tell a step
_ENDED_MS = 600_000  # a series that the others have left so far behind has no gap: it ended
# Several exporters of one GPU answer one after another: the usual step is among the longer ones.
_USUAL, _SHORT = 0.8, 0.1


def starts_of(rows: pl.DataFrame, keys: Sequence[str]) -> pl.Series:
    """First rows of series, of rows sorted by their keys."""
    first = pl.any_horizontal(pl.col(name) != pl.col(name).shift() for name in keys)
    return rows.select(first.fill_null(True)).to_series()


def count_gaps(rows: pl.DataFrame, keys: Sequence[str] | pl.Series, findings: list[pl.DataFrame]) -> None:
    """Count the samples that are missing between the rows of each series, and behind its last one.

    Args:
        rows: Sorted by the keys and time, one row a key and time; `_is_past`, where it is there, marks rows before the
            frame, whose own gaps were counted then.
        keys: What names a series, or which rows are the first of one.
        findings: Takes a row of reason `gap`.
    """
    if len(rows) < _SAMPLES:
        return
    is_past = rows["_is_past"] if "_is_past" in rows.columns else pl.repeat(False, len(rows), eager=True)
    ts = rows["ts"].dt.epoch("ms")
    starts = keys if isinstance(keys, pl.Series) else starts_of(rows, keys)
    ends = starts.shift(-1, fill_value=True)
    step = ts.diff().zip_with(~starts, pl.Series([None], dtype=pl.Int64))
    usual = step.quantile(_SHORT)
    if usual is None:
        return
    # What was late by the end of the frame before has been counted with it.
    counted_ms = ts.filter(is_past & (ends | ~is_past.shift(-1, fill_value=False))).quantile(0.5, "higher")
    reached = pl.DataFrame({"ts": ts, "before": ts.shift()})
    if counted_ms is not None:
        reached = reached.select(
            pl.when(counted_ms - pl.col(name) > _LATE * usual).then(int(counted_ms)).otherwise(name).alias(name)
            for name in ("ts", "before")
        )
    # The end that most series share: a clock that leads makes nobody late.
    end = ts.filter(ends).quantile(0.5, "higher")
    nothing = pl.Series([None], dtype=pl.Int64)
    between = (ts - reached["before"]).zip_with(~(starts | is_past), nothing)
    behind = (end - reached["ts"]).cast(pl.Int64)
    behind = behind.zip_with(ends & (behind <= _ENDED_MS), nothing)
    if not ((between > _LATE * usual) | (behind > _LATE * usual)).any():
        return
    series = starts.cum_sum()
    late = pl.DataFrame({"series": series, "between": between, "behind": behind}).with_row_index("_row")
    late = late.filter((pl.col("between") > _LATE * usual) | (pl.col("behind") > _LATE * usual))
    steps = pl.DataFrame({"series": series, "step": step}).filter(series.is_in(late["series"].unique().implode()))
    steps = steps.group_by("series").agg(pl.len().alias("n"), pl.col("step").quantile(_USUAL))
    late = late.join(steps.filter(pl.col("n") >= _SAMPLES), on="series", maintain_order="left")
    missing = pl.sum_horizontal(
        pl.when(pl.col(name) > _LATE * pl.col("step")).then((pl.col(name) / pl.col("step")).round() - less)
        for name, less in (("between", 1), ("behind", 0))
    )
    late = late.with_columns(missing.cast(pl.Int64).alias("missing")).filter(pl.col("missing") > 0)
    if not late.is_empty():
        findings.append(count(rows[late["_row"]], "ts", "gap", rows=int(late["missing"].sum())))

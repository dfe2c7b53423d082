"""Counters of network ports become rates over the time between two samples.

Here belongs what is peculiar to ports: counters that stop at their 32-bit end, rates that no port of that speed can
carry. Growth of counters in general stands in `cleaning_counters.py`.
"""

from __future__ import annotations

from datetime import timedelta

import polars as pl

from features.cleaning_bounds import bounded
from features.cleaning_counters import counter_deltas
from features.cleaning_findings import count, without
from features.cleaning_gaps import count_gaps
from features.vocabulary import PORT_KEYS, PORT_RATES, PORT_STATES

PORT = ("cluster", "node", "device", "port")
# A rate is a mean: over a longer silence it would hide whatever happened.
MAX_GAP = timedelta(minutes=15)
# Rounded scrape times let a rate pass the speed; four times too much is a counter of words read as bytes, or the like.
OVER_SPEED = 1.5
DATA_RATES = ("tx_bytes_per_s", "rx_bytes_per_s")
# A counter that begins anew begins near 0. One that falls by less than this share was read earlier than it is stamped.
DIP = 0.1


def port_rates(samples: pl.DataFrame, findings: list[pl.DataFrame], *, gaps: bool = False) -> pl.DataFrame:
    """Rates over the interval that ends at each sample.

    Args:
        samples: Rows of `raw_port_samples`, one a port and time, counters bounded.
        findings: Takes what was wrong.
        gaps: Whether samples that are missing are counted.

    Returns:
        Rows of `core_port_samples`, sorted by port and time. The first sample of a port has no rates, nor has one
        after a quarter of an hour of silence; after a reset the rate counts from 0. A sample that is behind the one
        before it, as of two Prometheus replicas whose clocks differ, has no rates, and the next is beside the one
        before.
    """
    samples = samples.sort(*PORT, "ts")
    if gaps:
        count_gaps(samples, PORT, findings)
    late = _late(samples)
    if late.any():
        findings.append(count(samples.filter(late), "ts", "late_reading"))
    rows = _rates(samples.filter(~late) if late.any() else samples)
    if late.any():
        rows = pl.concat([rows, samples.filter(late).select(*PORT_KEYS, *PORT_STATES)], how="diagonal")
        rows = rows.sort(*PORT, "ts")
    for name in DATA_RATES:
        over = (pl.col(name) > OVER_SPEED * pl.col("speed_bytes_per_s")) & (pl.col("speed_bytes_per_s") > 0)
        rows = without(rows, rows.select(over).to_series(), name, "above_speed", findings)
    return bounded(rows, PORT_RATES.values(), findings)


def _late(rows: pl.DataFrame) -> pl.Series:
    """Rows any counter of which is a little lower than it has been since it began."""
    goes_on = pl.all_horizontal(pl.col(name) == pl.col(name).shift() for name in PORT)
    falls = pl.any_horizontal(pl.col(name) < pl.col(name).shift() for name in PORT_RATES)
    if not rows.select((goes_on & falls).fill_null(False).any()).item():
        return pl.repeat(False, len(rows), eager=True)
    late = pl.repeat(False, len(rows), eager=True)
    for name in PORT_RATES:
        value, known = pl.col(name), rows.select("ts", *PORT, name).with_row_index("_row").drop_nulls(name)
        begins = ~goes_on | (value < (1 - DIP) * value.shift())
        known = known.with_columns(begins.fill_null(True).cum_sum().alias("_run"))
        low = known.filter(value < value.cum_max().over("_run"))["_row"]
        if len(low):
            late = late.scatter(low, True)
    return late


def _rates(samples: pl.DataFrame) -> pl.DataFrame:
    rows = counter_deltas(samples, list(PORT_RATES), keys=PORT, max_gap=MAX_GAP)
    seconds = (pl.col("ts") - pl.col("ts").shift()).dt.total_microseconds() / 1e6
    return rows.with_columns(
        (pl.col(f"{counter}_increase") / seconds).cast(pl.Float32).alias(rate) for counter, rate in PORT_RATES.items()
    ).select(*PORT_KEYS, *PORT_RATES.values(), *PORT_STATES)

"""Rates of network ports as samples come: each reading of counters against the one before it.

Here belongs what is remembered of ports between readings; rates stand in `features/cleaning_ports.py`, what they say
of a node in `features/ports.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.cleaning import clean_port_samples
from features.cleaning_ports import PORT
from features.vocabulary import conform

KEPT = timedelta(minutes=15)  # a counter that is older says nothing of the rate at present


class PortRates:
    """Turns counters into rates, a reading at a time. A source may tell the same reading twice."""

    def __init__(self) -> None:
        self._before: pl.DataFrame | None = None

    def take(self, counters: pl.DataFrame, now: datetime | None = None) -> pl.DataFrame:
        """Rates since the reading before.

        Args:
            counters: Rows of `raw_port_samples` columns, any number a port, in any order.
            now: The moment of the reading; samples later than it are left out. None: history.

        Returns:
            Rows of `core_port_samples` newer than what was known of their port; the first of a port has no rates.

        Raises:
            ValueError: A key column is missing or a column is not of the table.
        """
        rows = conform(counters, "raw_port_samples")
        if now is not None:
            rows = rows.filter(pl.col("ts") <= now)
        if not rows.height and self._before is None:
            return clean_port_samples(rows)[0]
        known = rows if self._before is None else pl.concat([self._before, rows])
        rates, _ = clean_port_samples(known)
        if self._before is not None:
            newest = self._before.select(*PORT, pl.col("ts").alias("_known"))
            rates = rates.join(newest, on=list(PORT), how="left", nulls_equal=True)
            rates = rates.filter((pl.col("ts") > pl.col("_known")).fill_null(True)).drop("_known")
        newest = known.sort("ts").unique(list(PORT), keep="last", maintain_order=True)
        last = newest["ts"].max()
        if isinstance(last, datetime):
            self._before = newest.filter(pl.col("ts") >= last - KEPT)
        return rates

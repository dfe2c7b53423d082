"""Rates of network ports as samples come: each reading of counters against the one before it.

Here belongs what is remembered of ports between readings, in arrays, for 100,000 ports are read every few seconds; the
rules stand in `features/cleaning_ports.py`, and a test holds that both give the same rates. What rates say of a node
stands in `features/ports.py`.
"""

from __future__ import annotations

from datetime import datetime

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.cleaning_bounds import bounded
from features.cleaning_ports import DATA_RATES, DIP, MAX_GAP, OVER_SPEED
from features.intake import AHEAD_S
from features.vocabulary import PORT_RATES, conform

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_KEYS = ("node", "device", "port")


class PortRates:
    """Turns counters into rates, a reading at a time. A source may tell the same reading twice."""

    def __init__(self) -> None:
        self._index: dict[tuple[str | None, ...], int] = {}
        self._seen: tuple[list[pl.Series], Ints] | None = None
        self._ts = np.zeros(0)
        self._counts = np.zeros((len(PORT_RATES), 0))

    def take(self, counters: pl.DataFrame, now: datetime | None = None) -> pl.DataFrame:
        """Rates since the reading before.

        Args:
            counters: Rows of `raw_port_samples` columns, any number a port, in any order.
            now: The moment of the reading; samples later than it are left out. None: history.

        Returns:
            Rows of `core_port_samples` newer than what was known of their port: no rates at the first of a port, after
            a quarter of an hour of silence, and where a counter is a little behind the sample before.

        Raises:
            ValueError: A key column is missing or a column is not of the table.
        """
        frame = conform(counters, "raw_port_samples").drop_nulls(["ts", "node"])
        if now is not None:
            frame = frame.filter(pl.col("ts") <= now)
            self._ts[self._ts > now.timestamp() + AHEAD_S] = np.nan  # the clock was set back
        if not frame.height:
            return conform(frame.select("ts", "cluster", *_KEYS), "core_port_samples")
        unit = self._units(frame)
        if len(np.unique(unit)) == len(unit):
            return self._rates(frame, unit)
        frame = frame.unique([*_KEYS, "ts"], keep="last").sort("ts")
        frame = frame.with_columns(pl.int_range(pl.len()).over(_KEYS).alias("_rank"))
        parts = frame.partition_by("_rank", maintain_order=True, include_key=False)
        return pl.concat(self._rates(part, self._units(part)) for part in parts)

    def _rates(self, frame: pl.DataFrame, unit: Ints) -> pl.DataFrame:
        ts = frame["ts"].dt.epoch("us").to_numpy() / 1e6
        newer = ~(ts <= self._ts[unit])
        if not newer.all():
            frame, unit, ts = frame.filter(newer), unit[newer], ts[newer]
        frame = bounded(frame, (*PORT_RATES, "speed_bytes_per_s"), [])
        counts = np.stack([frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in PORT_RATES])
        before, elapsed = self._counts[:, unit], ts - self._ts[unit]
        with np.errstate(invalid="ignore", divide="ignore"):
            is_late = ((counts < before) & (counts >= (1 - DIP) * before)).any(axis=0)
            grown = np.where(counts >= before, counts - before, counts)  # a counter that falls began anew
            rates = np.where(np.isnan(before), np.nan, grown) / elapsed
            rates[:, ~(elapsed <= MAX_GAP.total_seconds()) | is_late] = np.nan
            speed = frame["speed_bytes_per_s"].cast(pl.Float64).fill_null(np.nan).to_numpy()
            for i, name in enumerate(PORT_RATES.values()):
                if name in DATA_RATES:
                    rates[i, (rates[i] > OVER_SPEED * speed) & (speed > 0)] = np.nan
        kept = ~is_late  # the next is beside the one before
        self._ts[unit[kept]], self._counts[:, unit[kept]] = ts[kept], counts[:, kept]
        names = list(PORT_RATES.values())
        columns = [pl.Series(name, rate).fill_nan(None) for name, rate in zip(names, rates, strict=True)]
        out = conform(frame.drop(*PORT_RATES, "unknown_flags").with_columns(columns), "core_port_samples")
        return bounded(out, names, [])

    def _units(self, frame: pl.DataFrame) -> Ints:
        columns = [frame[name] for name in _KEYS]
        seen = self._seen
        if seen is not None and all(a.equals(b) for a, b in zip(seen[0], columns, strict=True)):
            return seen[1]
        names = list(zip(*(column.to_list() for column in columns), strict=True))
        for name in names:
            self._index.setdefault(name, len(self._index))
        room = len(self._index) - len(self._ts)
        if room > 0:
            self._ts = np.concatenate((self._ts, np.full(room, np.nan)))
            self._counts = np.concatenate((self._counts, np.full((len(PORT_RATES), room), np.nan)), axis=1)
        unit = np.fromiter((self._index[name] for name in names), dtype=np.int64, count=len(names))
        self._seen = (columns, unit)
        return unit

    def forget(self, before_s: float) -> None:
        """Give up ports that have not been read since a moment."""
        keep = np.flatnonzero(self._ts >= before_s)
        if len(keep) < len(self._ts):
            names = list(self._index)
            self._index = {names[old]: new for new, old in enumerate(keep.tolist())}
            self._ts, self._counts, self._seen = self._ts[keep], self._counts[:, keep], None

"""What the last minutes of one quantity of a GPU say about its level ahead, from irregular samples.

Here belong rows of past samples with their features and what came later; no model. Everything goes by real time: the
value at a moment is the newest sample at or before it, and what came at a horizon is the sample nearest to it within
half a usual gap or a tenth of the horizon. A row whose past or future is a silence is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WINDOWS_S = (15.0, 60.0, 180.0, 300.0)
LAGS_S = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
HALF_LIVES_S = (10.0, 60.0)
WINDOW_S = WINDOWS_S[-1]
# Other quantities of the same GPU that move before the one asked for: heat follows power, power follows load.
COMPANIONS = (
    "gpu_util_ratio", "sm_active_ratio", "tensor_active_ratio", "gpu_power_w", "gpu_temp_c", "fb_used_bytes",
    "nvlink_tx_bytes_per_s", "sm_clock_hz",
)  # fmt: skip
MIN_GAP_S = 15.0  # a past sample this far from where it is looked for still counts, however fast the usual sampling is
NEAR_SHARE = 0.1  # of the horizon: as far as what came may lie from it, or half a usual gap
STALE_GAPS = 3.0
MIN_SAMPLES = 20


class LevelError(ValueError):
    """A quantity cannot be followed; the message names it and the valid choices."""


@dataclass(frozen=True, slots=True)
class LevelRows:
    """Samples of one quantity with their past and their future.

    Attributes:
        names: Feature names, the columns of `matrix`.
        matrix: Shape (rows, features), NaN where not known.
        unit: Code of each row's GPU; `uuids` and `nodes` name it.
        at_s: Time of each row's newest sample, seconds.
        last: Its value.
        came: Value at each horizon, shape (rows, horizons), NaN where no sample lies near.
        interval_s: Usual gap between samples of a GPU.
        cluster: Name of the cluster, empty when the samples do not say.
    """

    names: tuple[str, ...]
    matrix: Floats
    unit: Ints
    at_s: Floats
    last: Floats
    came: Floats
    interval_s: float
    uuids: list[str]
    nodes: list[str]
    cluster: str

    def column(self, name: str) -> Floats:
        """One feature, shape (rows,)."""
        return self.matrix[:, self.names.index(name)]


def level_rows(samples: pl.DataFrame, quantity: str, horizons_s: Sequence[float]) -> LevelRows:
    """Rows of every sample of a quantity.

    Args:
        samples: Rows of `core_gpu_samples`, any subset of its columns.
        quantity: The column to follow.
        horizons_s: Rising, seconds.

    Raises:
        LevelError: The quantity is no numeric column of these samples, or there are too few samples.
    """
    keys = ("ts", "cluster", "node", "gpu_uuid", "gpu_index", "job_id")
    usable = [name for name, dtype in samples.schema.items() if dtype.is_numeric() and name not in keys]
    if quantity not in usable:
        raise LevelError(f"no quantity {quantity!r} in these samples; there are: {', '.join(usable) or 'none'}")
    of = next((name for name in ("gpu_uuid", "node") if name in samples.columns), None)
    if of is None or "ts" not in samples.columns:
        raise LevelError(f"samples need ts and gpu_uuid (or node); they have {', '.join(samples.columns)}")
    node = pl.col("node").cast(pl.String) if "node" in samples.columns else pl.lit(None, dtype=pl.String)
    frame = samples.drop_nulls(["ts", of]).with_columns(
        pl.col(of).cast(pl.String).alias("gpu_uuid"), node.alias("node")
    )
    present = frame.filter(pl.col(quantity).is_not_null())
    uuids = sorted(present["gpu_uuid"].unique().to_list())
    node_of = dict(present.group_by("gpu_uuid").agg(pl.col("node").last()).iter_rows())
    series = _Series.of(frame, quantity, uuids)
    if series is None:
        raise LevelError(f"{present.height} samples of {quantity} are too few to learn from: give a longer record")
    if horizons_s[0] < series.interval_s:
        raise LevelError(
            f"horizon {horizons_s[0]:g} s is shorter than the {series.interval_s:g} s between samples: give longer ones"
        )
    features = _features(series)
    for name in COMPANIONS:
        other = _Series.of(frame, name, uuids) if name in usable and name != quantity else None
        if other is not None:
            features |= _beside(series, other, name)
    came = np.column_stack([series.ahead(horizon_s) for horizon_s in horizons_s])
    cluster = str(samples["cluster"][0]) if "cluster" in samples.columns and samples.height else ""
    return LevelRows(
        tuple(features), np.column_stack(list(features.values())), series.unit, series.ts, series.x, came,
        series.interval_s, uuids, [node_of[name] for name in uuids], cluster,
    )  # fmt: skip


class _Series:
    """Samples of all GPUs in one array, searched by GPU and time."""

    def __init__(self, unit: Ints, ts: Floats, x: Floats, interval_s: float) -> None:
        self.unit, self.ts, self.x, self.interval_s = unit, ts, x, interval_s
        self.base = float(ts.min())
        self.span = (float(ts.max()) - self.base + 1) * 4
        self.key = unit * self.span + (ts - self.base) + self.span / 4
        self.first = np.searchsorted(unit, unit)
        self.tolerance_s = max(MIN_GAP_S, STALE_GAPS * interval_s)
        self.sum = np.concatenate(([0.0], np.cumsum(x)))
        self.square = np.concatenate(([0.0], np.cumsum(x * x)))

    @classmethod
    def of(cls, frame: pl.DataFrame, quantity: str, uuids: list[str]) -> _Series | None:
        """Samples of a quantity; None where there are too few to learn from."""
        codes = {name: i for i, name in enumerate(uuids)}
        rows = (
            frame.select("ts", "gpu_uuid", pl.col(quantity).cast(pl.Float64).alias("x"))
            .drop_nulls()
            .filter(pl.col("x").is_finite() & pl.col("gpu_uuid").is_in(uuids))
            .unique(["gpu_uuid", "ts"], keep="last")
            .sort("gpu_uuid", "ts")
        )
        unit = np.array([codes[name] for name in rows["gpu_uuid"].to_list()], dtype=np.int64)
        ts = rows["ts"].dt.epoch("us").to_numpy() / 1e6
        gaps = np.diff(ts)[np.diff(unit) == 0]
        if len(gaps) < MIN_SAMPLES:
            return None
        return cls(unit, ts, rows["x"].to_numpy(), float(np.median(gaps)))

    def row_of(self, unit: Ints, at_s: Floats) -> Ints:
        """Row of the newest sample of a GPU at or before a moment, -1 where there is none."""
        offset = np.clip(at_s - self.base, -self.span / 8, self.span / 2)
        row = np.searchsorted(self.key, unit * self.span + offset + self.span / 4, side="right") - 1
        return np.where((row >= 0) & (self.unit[np.maximum(row, 0)] == unit), row, -1)

    def row_at(self, at_s: Floats) -> Ints:
        """The same of each row's own GPU."""
        return self.row_of(self.unit, at_s)

    def at(self, at_s: Floats) -> Floats:
        """Value at a past moment, NaN where no sample is fresh enough."""
        row = self.row_at(at_s)
        fresh = (row >= 0) & (at_s - self.ts[row] <= self.tolerance_s)
        return np.where(fresh, self.x[row], np.nan)

    def ahead(self, horizon_s: float) -> Floats:
        """Value of the sample nearest to a horizon after each row, NaN where none lies near."""
        at_s = self.ts + horizon_s
        before = np.maximum(self.row_at(at_s), 0)
        after = np.minimum(before + 1, len(self.ts) - 1)
        gap_before = at_s - self.ts[before]
        gap_after = np.where(self.unit[after] == self.unit, self.ts[after] - at_s, np.inf)
        gap_after = np.where(after == before, np.inf, gap_after)
        row = np.where(gap_after < gap_before, after, before)
        gap = np.minimum(np.abs(gap_before), gap_after)
        # Ahead of the row's own sample, so that no row is its own future.
        ok = (gap <= max(0.5 * self.interval_s, NEAR_SHARE * horizon_s)) & (self.ts[row] > self.ts)
        return np.where(ok, self.x[row], np.nan)


def _features(series: _Series) -> dict[str, Floats]:
    x, ts = series.x, series.ts
    rows = np.arange(len(x))
    out: dict[str, Floats] = {"last": x}
    for lag_s in LAGS_S:
        out[f"change_{lag_s:.0f}s"] = x - series.at(ts - lag_s)
    for window_s in WINDOWS_S:
        begin = np.maximum(series.row_at(ts - window_s) + 1, series.first)
        n = rows - begin + 1
        mean = (series.sum[rows + 1] - series.sum[begin]) / n
        variance = (series.square[rows + 1] - series.square[begin]) / n - mean**2
        out[f"mean_{window_s:.0f}s"] = mean
        out[f"spread_{window_s:.0f}s"] = np.sqrt(np.maximum(variance, 0.0))
        # Where in its own range the value stands: a periodic load is told by it.
        low, high = _extremes(x, begin, rows)
        out[f"low_{window_s:.0f}s"], out[f"high_{window_s:.0f}s"] = low, high
        out[f"slope_{window_s:.0f}s"], out[f"line_{window_s:.0f}s"] = _line(x, ts, begin, rows)
    for half_life_s in HALF_LIVES_S:
        out[f"decayed_{half_life_s:.0f}s"] = _decayed(series, half_life_s)
    out["steady_s"] = _steady(series, out["spread_300s"])
    return out


def _beside(series: _Series, other: _Series, name: str) -> dict[str, Floats]:
    """How another quantity of the same GPU stands at each row, in its own spread: `beside_` features."""
    rows = np.arange(len(other.x))
    begin = np.maximum(other.row_at(other.ts - WINDOW_S) + 1, other.first)
    n = rows - begin + 1
    mean = (other.sum[rows + 1] - other.sum[begin]) / n
    spread = np.sqrt(np.maximum((other.square[rows + 1] - other.square[begin]) / n - mean**2, 0.0))
    unit = np.maximum(spread, 1e-3 * np.abs(mean) + 1e-9)
    level = (other.x - mean) / unit
    change = (other.x - other.at(other.ts - 30.0)) / unit
    row = other.row_of(series.unit, series.ts)
    fresh = (row >= 0) & (series.ts - other.ts[row] <= max(other.tolerance_s, WINDOWS_S[1]))
    pick = {"level": level, "change_30s": change}
    return {f"beside_{name}_{what}": np.where(fresh, value[row], np.nan) for what, value in pick.items()}


def _extremes(x: Floats, begin: Ints, end: Ints) -> tuple[Floats, Floats]:
    """Lowest and highest of x[begin..end] per row, by doubling spans."""
    low, high = np.empty(len(x)), np.empty(len(x))
    tables = [(x, x)]
    while 2 ** len(tables) <= int((end - begin).max(initial=0)) + 1:
        half = 2 ** (len(tables) - 1)
        a, b = tables[-1]
        shifted = np.minimum(np.arange(len(x)) + half, len(x) - 1)
        tables.append((np.minimum(a, a[shifted]), np.maximum(b, b[shifted])))
    level = np.floor(np.log2(end - begin + 1)).astype(np.int64)
    for k, (a, b) in enumerate(tables):
        mine = level == k
        other = end[mine] - 2**k + 1
        low[mine] = np.minimum(a[begin[mine]], a[other])
        high[mine] = np.maximum(b[begin[mine]], b[other])
    return low, high


def _line(x: Floats, ts: Floats, begin: Ints, end: Ints) -> tuple[Floats, Floats]:
    """Least squares over x[begin..end] per row: slope and value of the line now, NaN under 3 samples."""
    t = ts - ts.min()
    sums = [np.concatenate(([0.0], np.cumsum(v))) for v in (t, x, t * t, t * x)]
    st, sx, stt, stx = (s[end + 1] - s[begin] for s in sums)
    n = (end - begin + 1).astype(np.float64)
    spread = stt - st * st / n
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where((n >= 3) & (spread > 1e-6), (stx - st * sx / n) / spread, np.nan)
    return slope, sx / n + slope * (t - st / n)


def _decayed(series: _Series, half_life_s: float) -> Floats:
    """EWMA by real time; a GPU's first sample begins it anew."""
    out = np.empty(len(series.x))
    value = 0.0
    for i in range(len(out)):
        if i == series.first[i]:
            value = float(series.x[i])
        else:
            share = 1 - 0.5 ** ((series.ts[i] - series.ts[i - 1]) / half_life_s)
            value += share * (float(series.x[i]) - value)
        out[i] = value
    return out


def _steady(series: _Series, spread: Floats) -> Floats:
    """Seconds since the value last moved by more than half of its own recent spread."""
    out = np.zeros(len(series.x))
    since, level = 0.0, 0.0
    for i in range(len(out)):
        x, t = float(series.x[i]), float(series.ts[i])
        if i == series.first[i] or abs(x - level) > 0.5 * spread[i] + 1e-9:
            since, level = t, x
        out[i] = min(t - since, WINDOW_S)
    return out

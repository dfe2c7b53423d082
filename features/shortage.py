"""Queues that run short of GPUs: when their pending GPUs rise above their idle ones, and what is known before.

Here belong the label of `shortage` from recorded occupancy and its features at each sample; no model. A queue is short
while the GPUs its pending jobs ask for are more than its idle ones; an onset is a change from clear to short that holds
for max(10 s, two fresh samples). A silence hides what happened in it. Everything goes by real time, never by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.label_spans import CLEAR, HOLD_S, SET, UNKNOWN, gap_s, runs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEEDED = ("ts", "queue", "pending_gpu_num")
# Half-lives of means that forget: arrivals of GPUs, onsets that held, being short, having work that waits.
DECAYED_MIN = {"arrivals": (10,), "held": (60, 720, 4320), "short": (60, 720), "waits": (10, 60)}
# Jobs beside GPUs, where the record counts them: those without GPUs, those of 8 GPUs and more, and smaller ones. Starts
# and ends of either come before what their users ask for next.
JOB_COUNTS = {
    "other_jobs": ("running_job_num", "running_gpujob_num"), "other_pending": ("pending_job_num", "pending_gpujob_num"),
    "large_jobs": ("running_job_num_noless_8",), "large_pending": ("pending_job_num_noless_8",),
    "small_jobs": ("running_job_num_less_8",),
}  # fmt: skip
JOB_EVENTS = ("other_starts", "other_ends", "large_starts", "large_ends", "small_ends", "gpu_ends", "changes")
JOB_HALF_LIVES_MIN = (5, 30, 240)
JOB_SINCE = ("other_starts", "large_starts", "large_ends", "gpu_ends")
# Arrivals of so many GPUs at once, or more: how often lately one came that would make the queue short as it stands now.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
SIZE_HALF_LIVES_MIN = (20, 60, 240, 720, 2880, 8640)
FAR_MIN = 5_000.0  # what has not been seen is as good as this long ago
WINDOW_S = 3_600.0  # of the purge: most of what features say is newer, what is older changes slowly


class OccupancyError(ValueError):
    """Recorded occupancy cannot be used; the message names what is missing."""


class QueueHistory:
    """Recorded occupancy of queues, sorted by queue and time.

    Args:
        occupancy: Rows with `ts` (UTC), `queue`, `pending_gpu_num`, and `idle_gpu_num` or both `total_gpu_num` and
            `running_gpu_num`; `running_gpujob_num`, the columns of `JOB_COUNTS` and `cluster` are used where they are.

    Attributes:
        names: Queue of each code.
        gpu: Code of each sample's queue, ascending (the name that `features.label_spans.runs` knows).
        ts: Times, seconds, ascending within a queue.
        interval_s: Median time between samples of a queue.
        state: `SET`, `CLEAR` or `UNKNOWN` at each sample.
        onset_row, break_row: Rows of seen onsets, and last rows before something unknown; both ascending.
        features: Name to values of shape (samples,), NaN where not known.
        cluster: Name of the cluster, empty when the rows do not say.

    Raises:
        OccupancyError: A column is missing, or there are no rows.
    """

    def __init__(self, occupancy: pl.DataFrame) -> None:
        frame = prepared(occupancy)
        self.names = sorted(frame["queue"].unique().to_list())
        codes = {name: i for i, name in enumerate(self.names)}
        self.gpu = np.array([codes[name] for name in frame["queue"].to_list()], dtype=np.int64)
        self.ts = frame["ts"].dt.epoch("us").to_numpy() / 1e6
        same = np.diff(self.gpu) == 0
        gaps = np.diff(self.ts)[same]
        self.interval_s = float(np.median(gaps)) if len(gaps) else 60.0
        self.cluster = str(occupancy["cluster"][0]) if "cluster" in occupancy.columns and occupancy.height else ""
        short = frame["is_short"]
        self.state = np.where(
            short.is_null().to_numpy(), UNKNOWN, np.where(short.fill_null(False).to_numpy(), SET, CLEAR)
        ).astype(np.int8)
        found = runs(self, self.state)
        seen = found.is_known & found.has_held
        self.onset_row = np.sort(found.first[seen])
        n = len(self.ts)
        ends = np.ones(n, dtype=bool)
        ends[:-1] = ~same | (np.diff(self.ts) > gap_s(self)) | (self.state[1:] == UNKNOWN)
        ends[np.maximum(found.first[~found.is_known] - 1, 0)] = True
        self.break_row = np.flatnonzero(ends)
        self.features = _features(frame, self._known_at(found.first[seen], found.last[seen]))

    def _known_at(self, first: Ints, last: Ints) -> NDArray[np.bool_]:
        """Where an onset has just proved to hold: what may be known of it from then on."""
        out = np.zeros(len(self.ts), dtype=bool)
        for begin, end in zip(first.tolist(), last.tolist(), strict=True):
            held = begin + int(np.searchsorted(self.ts[begin : end + 1], self.ts[begin] + HOLD_S - 1e-6))
            out[min(max(held, begin + 1), end)] = True
        return out

    def outcome(self, rows: Ints, end_s: float) -> tuple[Floats, Floats]:
        """What followed rows.

        Args:
            rows: Rows of samples.
            end_s: No outcome after this moment is looked at.

        Returns:
            Seconds to the next onset of the queue (infinite when none was seen), and seconds for which the outcome is
            known. Each of shape (rows,).
        """
        brk = self.break_row[np.searchsorted(self.break_row, rows)]
        known = np.minimum(self.ts[brk] + 0.5 * self.interval_s, end_s) - self.ts[rows]
        onset_in = np.full(len(rows), np.inf)
        if len(self.onset_row):
            place = np.searchsorted(self.onset_row, rows, side="right")
            nxt = self.onset_row[np.minimum(place, len(self.onset_row) - 1)]
            has = (place < len(self.onset_row)) & (nxt <= brk) & (self.ts[nxt] <= end_s)
            onset_in = np.where(has, self.ts[nxt] - self.ts[rows], np.inf)
        return onset_in, known

    def matrix(self, names: Sequence[str], rows: Ints) -> NDArray[np.float32]:
        """Features of rows, shape (rows, names)."""
        return np.column_stack([self.features[name][rows] for name in names]).astype(np.float32)


def prepared(occupancy: pl.DataFrame) -> pl.DataFrame:
    """Sorted rows with the quantities that everything is made of; an impossible count is null.

    Raises:
        OccupancyError: A column is missing, or there are no rows.
    """
    missing = [name for name in NEEDED if name not in occupancy.columns]
    has_idle = "idle_gpu_num" in occupancy.columns
    if not has_idle:
        missing += [name for name in ("total_gpu_num", "running_gpu_num") if name not in occupancy.columns]
    if missing:
        raise OccupancyError(f"occupancy lacks {', '.join(missing)}; it has {', '.join(occupancy.columns)}")
    pick = {
        name: pl.col(name).cast(pl.Float64) if name in occupancy.columns else pl.lit(None, dtype=pl.Float64)
        for name in ("running_gpu_num", "running_gpujob_num", "pending_gpu_num")
    }
    idle = (
        pl.col("idle_gpu_num").cast(pl.Float64)
        if has_idle
        else pl.col("total_gpu_num").cast(pl.Float64) - pl.col("running_gpu_num").cast(pl.Float64)
    )
    frame = (
        occupancy.drop_nulls(["ts", "queue"])
        .select(
            pl.col("ts"), pl.col("queue").cast(pl.String), idle.alias("idle"),
            pick["pending_gpu_num"].alias("pending"), pick["running_gpu_num"].alias("running"),
            pick["running_gpujob_num"].alias("running_jobs"),
            *(_count(occupancy.columns, *names).alias(name) for name, names in JOB_COUNTS.items()),
        )
        .unique(["queue", "ts"], keep="last")
        .sort("queue", "ts")
    )  # fmt: skip
    if not frame.height:
        raise OccupancyError("occupancy holds no rows with a time and a queue")
    # Counts below zero are impossible: unknown, not clear.
    counts = ("idle", "pending", "running", "running_jobs", *JOB_COUNTS)
    frame = frame.with_columns(pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(name) for name in counts)
    return frame.with_columns(
        (pl.col("pending") > pl.col("idle")).alias("is_short"),
        (pl.col("idle") - pl.col("pending")).alias("margin"),
        (pl.col("ts").diff().over("queue").dt.total_microseconds() / 6e7).alias("elapsed_min"),
    )


def _count(columns: Sequence[str], whole: str, part: str = "") -> pl.Expr:
    """A count, less a part of it; null where the record has no such columns."""
    if whole not in columns or (part and part not in columns):
        return pl.lit(None, dtype=pl.Float64)
    count = pl.col(whole).cast(pl.Float64)
    return count - pl.col(part).cast(pl.Float64) if part else count


def _features(frame: pl.DataFrame, held: NDArray[np.bool_]) -> dict[str, Floats]:
    """Features at every sample, from it and those before."""
    c = pl.col
    step = c("elapsed_min").clip(1 / 60)

    def rise(name: str) -> pl.Expr:
        return (c(name).diff().over("queue").clip(0) / step).fill_null(0)

    frame = frame.with_columns(
        pl.Series("held", held).cast(pl.Float64),
        c("is_short").cast(pl.Float64).alias("short"),
        (c("pending") > 0).cast(pl.Float64).alias("waits"),
        (c("running").fill_null(0) + c("pending")).alias("asked"),
        rise("running").alias("starts"), rise("running_jobs").alias("job_starts"),
    )  # fmt: skip

    def change(name: str) -> pl.Expr:
        return c(name).diff().over("queue")

    frame = frame.with_columns(
        rise("asked").alias("arrivals"),
        change("other_jobs").clip(0).alias("other_starts"), (-change("other_jobs")).clip(0).alias("other_ends"),
        change("large_jobs").clip(0).alias("large_starts"), (-change("large_jobs")).clip(0).alias("large_ends"),
        (-change("small_jobs")).clip(0).alias("small_ends"), (-change("running")).clip(0).alias("gpu_ends"),
        (change("running") != 0).cast(pl.Float64).alias("changes"),
    )  # fmt: skip
    out: dict[str, pl.Expr] = {"margin": c("margin"), "running_jobs": c("running_jobs")}
    for minutes in (5, 30):
        out[f"margin_min_{minutes}m"] = c("margin").rolling_min_by("ts", f"{minutes}m").over("queue")
    before = c("margin").rolling_mean_by("ts", "15m", closed="left").over("queue")
    out["margin_change_15m"] = c("margin") - before
    out["job_starts_mean_30m"] = c("job_starts").rolling_mean_by("ts", "30m").over("queue")
    out["short_mean_120m"] = c("short").rolling_mean_by("ts", "120m").over("queue")
    out["largest_less_idle"] = c("arrivals").rolling_max_by("ts", "1440m").over("queue") - c("idle")
    for name, half_lives_min in DECAYED_MIN.items():
        for minutes in half_lives_min:
            value = c(name).fill_null(0).ewm_mean_by("ts", half_life=f"{minutes}m").over("queue")
            out[f"{name}_decayed_{minutes}m"] = value
    for name in JOB_EVENTS:
        for minutes in JOB_HALF_LIVES_MIN:
            value = c(name).ewm_mean_by("ts", half_life=f"{minutes}m").over("queue")
            out[f"{name}_decayed_{minutes}m"] = value
    out |= {name: c(name) for name in JOB_COUNTS}
    for name in ("short", "waits", "starts", "held", *JOB_SINCE):
        last = pl.when(c(name) > 0).then(c("ts")).forward_fill().over("queue")
        out[f"since_{name}_min"] = ((c("ts") - last).dt.total_microseconds() / 6e7).fill_null(FAR_MIN).clip(0, FAR_MIN)
    table = frame.select(value.cast(pl.Float64).fill_null(np.nan).alias(name) for name, value in out.items())
    return {name: table[name].to_numpy() for name in table.columns} | _shortening(frame)


def _shortening(frame: pl.DataFrame) -> dict[str, Floats]:
    """Decayed share of samples at which work arrived that would make the queue short as it stands now."""
    c = pl.col
    came = frame.with_columns(c("asked").diff().over("queue").fill_null(0).alias("_came")).with_columns(
        (c("_came") >= size).cast(pl.Float64).alias(f"_{size}") for size in SIZES
    )
    margin = np.nan_to_num(frame["margin"].to_numpy(), nan=float(SIZES[-1]))
    least = np.searchsorted(SIZES, margin + 1, side="left")
    column = np.minimum(least, len(SIZES) - 1)
    out = {}
    for minutes in SIZE_HALF_LIVES_MIN:
        shares = came.select(c(f"_{size}").ewm_mean_by("ts", half_life=f"{minutes}m").over("queue") for size in SIZES)
        picked = shares.to_numpy()[np.arange(came.height), column]
        out[f"shortening_{minutes}m"] = np.where(margin < 0, 1.0, np.where(least < len(SIZES), picked, 0.0))
    return out

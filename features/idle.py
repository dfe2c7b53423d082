"""What is known of idle GPUs of queues before a window begins: how often, and how lately, fewer than a level were idle.

Here belong the outcome of windows (the fewest GPUs idle in them) and features of a moment and a level; no model. A
level of n GPUs is broken when fewer than n are idle at any minute after now and within the window. Everything stands on
a grid of minutes; a silence of more than `CARRY_MIN` breaks it, and what happened in it is not known. Windows are
counted only once they have ended.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.compiled import compiled
from features.shortage import prepared

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CARRY_MIN = 5
FAR_MIN = 5_000.0
DAY_MIN = 1_440
MOST_LEVELS = 256  # of one queue; larger queues are counted in several GPUs at once
# Half-lives, minutes: of being under the level, of falling under it, of falls as large as the one needed, of windows
# that fell so far.
HALF_LIVES_MIN = (
    (10.0, 60.0, 240.0, 1_440.0), (60.0, 720.0, 4_320.0), (20.0, 120.0, 720.0, 2_880.0), (240.0, 1_440.0, 5_760.0),
)  # fmt: skip
_LEVEL = (
    "since_under_min", "since_fall_min",
    *(f"{name}_{h:g}m" for name, halves in zip(
        ("under", "crossed", "falls", "windows"), HALF_LIVES_MIN, strict=True) for h in halves),
    "windows_at_this_hour", "yesterday_fall_left", "yesterday_least_left",
)  # fmt: skip
_OF_BOTH = ("level", "fall", "fall_share", "level_share", "fall_less_last_rise", "fall_less_last_fall")


class IdleHistory:
    """Recorded occupancy of queues on a grid of minutes.

    Args:
        occupancy: As of `features.shortage.QueueHistory`.

    Attributes:
        names: Names of queues, sorted.
        begin_s: Time of the first minute, seconds since 1970.
        idle: GPUs idle, shape (queues, minutes), NaN where not known.
        size: GPUs of each queue, the most that were idle or running at once so far, same shape.
        cluster: Name of the cluster, empty when the rows do not say.
        columns: Names of features, in the order of `matrix`.

    Raises:
        features.shortage.OccupancyError: A column is missing, or there are no rows.
    """

    def __init__(self, occupancy: pl.DataFrame) -> None:
        frame = prepared(occupancy)
        self.cluster = str(occupancy["cluster"][0]) if "cluster" in occupancy.columns else ""
        self.names = sorted(frame["queue"].unique().to_list())
        grid = frame.select(pl.datetime_range(pl.col("ts").min(), pl.col("ts").max(), "1m").alias("ts"))
        of = {name: rows for (name,), rows in frame.partition_by("queue", as_dict=True).items()}
        kept = [
            grid.join_asof(of[name], on="ts", strategy="backward", tolerance=timedelta(minutes=CARRY_MIN))
            for name in self.names
        ]

        def course(column: str) -> Floats:
            return np.vstack([rows[column].cast(pl.Float64).fill_null(np.nan).to_numpy() for rows in kept])

        self.begin_s = float(grid["ts"].dt.epoch("us")[0]) / 1e6
        self.idle = course("idle")
        running = np.nan_to_num(course("running"))
        self.size = np.maximum(np.maximum.accumulate(np.nan_to_num(self.idle) + running, axis=1), 1.0)
        self._moment = _moments(self.idle, self.size, running, course("pending"), course("other_jobs"))
        angle = (self.begin_s / 60 + np.arange(len(grid))) * (2 * np.pi / DAY_MIN)
        for name, of_day in (("day_sine", np.sin(angle)), ("day_cosine", np.cos(angle))):
            self._moment[name] = np.broadcast_to(of_day, self.idle.shape)
        self.columns = [*_LEVEL, *_OF_BOTH, *self._moment]

    @property
    def minutes(self) -> int:
        return self.idle.shape[1]

    def at_s(self, minute: Ints) -> Floats:
        """Times of minutes, seconds since 1970."""
        return self.begin_s + minute.astype(np.float64) * 60

    def least(self, horizon_min: int) -> Floats:
        """The fewest idle GPUs at the minutes after each and within the horizon; NaN where one of them is not known.

        Args:
            horizon_min: Length of windows, minutes.

        Returns:
            Shape (queues, minutes).
        """
        out = np.full_like(self.idle, np.nan)
        if self.minutes > horizon_min:
            view = np.lib.stride_tricks.sliding_window_view(self.idle[:, 1:], horizon_min, axis=1)
            out[:, : view.shape[1]] = view.min(axis=-1)
        return out

    def recent_least(self, back_min: int) -> Floats:
        """The fewest idle GPUs of each minute and those before it, shape (queues, minutes)."""
        padded = np.pad(self.idle, ((0, 0), (back_min - 1, 0)), constant_values=np.inf)
        return np.lib.stride_tricks.sliding_window_view(padded, back_min, axis=1).min(axis=-1)

    def matrix(self, queue: Ints, minute: Ints, level: Ints, horizon_min: int) -> NDArray[np.float32]:
        """Features of moments and levels.

        Args:
            queue: Code of each row's queue, shape (rows,).
            minute: Minute of each row, at which the idle GPUs are known, shape (rows,).
            level: From 1 to the idle GPUs of then, shape (rows,).
            horizon_min: Length of the window, minutes.

        Returns:
            Shape (rows, columns).
        """
        out = np.empty((len(queue), len(self.columns)), dtype=np.float32)
        fell = np.clip(self.idle - self.least(horizon_min), 0, None)
        halves = [np.array(values) for values in HALF_LIVES_MIN]
        first_minute = int(self.begin_s // 60)
        for code in np.unique(queue):
            rows = np.flatnonzero(queue == code)
            rows = rows[np.argsort(minute[rows], kind="stable")]
            levels = int(self.size[code].max())
            step = max(1, -(-levels // MOST_LEVELS))
            made = np.empty((len(rows), len(_LEVEL)))
            _follow(
                self.idle[code], fell[code], -(-levels // step), step, minute[rows], level[rows], horizon_min,
                first_minute, *halves, made,
            )  # fmt: skip
            out[rows, : len(_LEVEL)] = made
        idle, size = self.idle[queue, minute], self.size[queue, minute]
        fall = idle - level + 1
        last_rise, last_fall = (self._moment[name][queue, minute] for name in ("last_rise", "last_fall"))
        both = (level, fall, fall / np.maximum(idle, 1), level / size, fall - last_rise, fall - last_fall)
        for k, values in enumerate((*both, *(course[queue, minute] for course in self._moment.values()))):
            out[:, len(_LEVEL) + k] = values
        return out


def _moments(idle: Floats, size: Floats, running: Floats, pending: Floats, other_jobs: Floats) -> dict[str, Floats]:
    """Features that no level has a part in, each of shape (queues, minutes)."""
    change = np.nan_to_num(np.diff(idle, axis=1, prepend=idle[:, :1]))
    rise, fall = np.clip(change, 0, None), np.clip(-change, 0, None)
    asked = np.nan_to_num(running + pending)
    arrived = np.clip(np.diff(asked, axis=1, prepend=asked[:, :1]), 0, None)
    other = np.nan_to_num(other_jobs)
    begun = np.clip(np.diff(other, axis=1, prepend=other[:, :1]), 0, None)
    changed = (change != 0).astype(np.float64)
    elsewhere_fall = np.broadcast_to(fall.sum(axis=0), idle.shape) - fall
    elsewhere_changed = np.broadcast_to(changed.sum(axis=0), idle.shape) - changed
    filled = np.nan_to_num(idle)
    out = {
        "idle": idle, "size": size, "idle_share": idle / size, "pending": pending, "idle_less_pending": idle - pending,
        "other_jobs": other_jobs,
    }  # fmt: skip
    for least in (1, 8):
        for name, course in (("rise", rise), ("fall", fall)):
            out[f"since_{name}_{least}"] = _since(course >= least)
    out |= {"last_rise": _last(rise), "last_fall": _last(fall), "since_other_begun": _since(begun > 0)}
    for name, course, halves in (
        ("rise", rise, (10, 60, 720, 2_880)), ("fall", fall, (10, 60, 720, 2_880)), ("changed", changed, (10, 60, 720)),
        ("other_begun", begun, (10, 60, 720)), ("arrived", arrived, (10, 60)),
        ("fall_elsewhere", elsewhere_fall, (20, 240)),
        ("changed_elsewhere", elsewhere_changed, (10, 60, 240)),
    ):  # fmt: skip
        for half in halves:
            out[f"{name}_{half}m"] = _decayed(course, 0.5 ** (1 / half))
    for back in (5, 15, 60, 240):
        padded = np.pad(filled, ((0, 0), (back - 1, 0)), mode="edge")
        out[f"above_least_{back}m"] = filled - np.lib.stride_tricks.sliding_window_view(padded, back, axis=1).min(-1)
    return out


@compiled
def _decayed(x: Floats, keep: float) -> Floats:
    out = np.empty_like(x)
    for q in range(x.shape[0]):
        total, weight = 0.0, 0.0
        for t in range(x.shape[1]):
            total, weight = total * keep + x[q, t], weight * keep + 1.0
            out[q, t] = total / weight
    return out


@compiled
def _since(came: NDArray[np.bool_]) -> Floats:
    out = np.empty(came.shape)
    for q in range(came.shape[0]):
        left = FAR_MIN
        for t in range(came.shape[1]):
            left = 0.0 if came[q, t] else min(left + 1.0, FAR_MIN)
            out[q, t] = left
    return out


@compiled
def _last(x: Floats) -> Floats:
    out = np.empty_like(x)
    for q in range(x.shape[0]):
        newest = 0.0
        for t in range(x.shape[1]):
            newest = x[q, t] if x[q, t] > 0 else newest
            out[q, t] = newest
    return out


@compiled
def _follow(
    idle: Floats, fell: Floats, levels: int, step: int, minute: Ints, level: Ints, horizon: int, first_minute: int,
    under_half: Floats, crossed_half: Floats, falls_half: Floats, windows_half: Floats, out: Floats,
) -> None:  # fmt: skip
    """Goes through the minutes of one queue and writes `_LEVEL` of the rows asked for, ascending in time.

    Levels count in steps of several GPUs where the queue is large. `fell` of minute t counts from t + horizon on.
    """
    nu, nc, nf, nw = len(under_half), len(crossed_half), len(falls_half), len(windows_half)
    keep_u, keep_c = 0.5 ** (1 / under_half), 0.5 ** (1 / crossed_half)
    keep_f, keep_w = 0.5 ** (1 / falls_half), 0.5 ** (1 / windows_half)
    under, crossed = np.zeros((nu, levels + 1)), np.zeros((nc, levels + 1))
    falls, windows = np.zeros((nf, levels + 1)), np.zeros((nw, levels + 1))
    weight_u, weight_c, weight_f, weight_w = np.zeros(nu), np.zeros(nc), np.zeros(nf), np.zeros(nw)
    last_under, last_fall = np.full(levels + 1, -FAR_MIN), np.full(levels + 1, -FAR_MIN)
    by_hour, weight_hour = np.zeros((24, levels + 1)), np.zeros(24)
    row, before = 0, -1.0
    for t in range(len(idle)):
        if not np.isnan(idle[t]):
            now = idle[t]
            was = now if before < 0 else before
            for k in range(nu):
                weight_u[k] = weight_u[k] * keep_u[k] + 1.0
            for k in range(nc):
                weight_c[k] = weight_c[k] * keep_c[k] + 1.0
            for k in range(nf):
                weight_f[k] = weight_f[k] * keep_f[k] + 1.0
            for n in range(1, levels + 1):
                gpus = n * step
                is_under = 1.0 if now < gpus else 0.0
                is_crossed = 1.0 if now < gpus and was >= gpus else 0.0
                is_fall = 1.0 if was - now >= gpus else 0.0
                for k in range(nu):
                    under[k, n] = under[k, n] * keep_u[k] + is_under
                for k in range(nc):
                    crossed[k, n] = crossed[k, n] * keep_c[k] + is_crossed
                for k in range(nf):
                    falls[k, n] = falls[k, n] * keep_f[k] + is_fall
                if is_under > 0:
                    last_under[n] = t
                if is_fall > 0:
                    last_fall[n] = t
            before = now
        ended = t - horizon
        if ended >= 0 and not np.isnan(fell[ended]):
            hour = ((first_minute + ended) // 60) % 24
            for k in range(nw):
                weight_w[k] = weight_w[k] * keep_w[k] + 1.0
            weight_hour[hour] = weight_hour[hour] * 0.995 + 1.0
            for n in range(1, levels + 1):
                has_fallen = 1.0 if fell[ended] >= n * step else 0.0
                by_hour[hour, n] = by_hour[hour, n] * 0.995 + has_fallen
                for k in range(nw):
                    windows[k, n] = windows[k, n] * keep_w[k] + has_fallen
        while row < len(minute) and minute[row] == t:
            # The level is rounded up and the fall down: both to the side of breaking.
            n = min(max((level[row] + step - 1) // step, 1), levels)
            m = min(max(int(idle[t] - level[row] + 1) // step, 1), levels)
            out[row, 0] = min(t - last_under[n], FAR_MIN)
            out[row, 1] = min(t - last_fall[m], FAR_MIN)
            c = 2
            for k in range(nu):
                out[row, c + k] = under[k, n] / max(weight_u[k], 1e-9)
            c += nu
            for k in range(nc):
                out[row, c + k] = crossed[k, n] / max(weight_c[k], 1e-9)
            c += nc
            for k in range(nf):
                out[row, c + k] = falls[k, m] / max(weight_f[k], 1e-9)
            c += nf
            for k in range(nw):
                out[row, c + k] = windows[k, m] / max(weight_w[k], 1e-9)
            c += nw
            hour = ((first_minute + t) // 60) % 24
            after = (hour + 1) % 24
            known = weight_hour[hour] + weight_hour[after]
            out[row, c] = (by_hour[hour, m] + by_hour[after, m] + 1e-3) / (known + 1.0)
            day = t - 1440
            if day >= 0 and day <= t - horizon and not np.isnan(fell[day]):
                out[row, c + 1] = fell[day] - (idle[t] - level[row] + 1)
                out[row, c + 2] = idle[day] - fell[day] - level[row]
            else:
                out[row, c + 1] = np.nan
                out[row, c + 2] = np.nan
            row += 1

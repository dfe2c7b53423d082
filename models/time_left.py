"""Time left of running jobs: a mixture of what is known of them at a moment of their run.

In it are the distribution of the whole runtime given what has elapsed, asked at the moment and not at the submit, as
others have ended since; what like jobs had left after as long a run; and two forests grown on jobs as they stood at
landmarks of their runs, which know what it means to have lasted. What reaches the limit ends as far past it as earlier
runs did (`models/grace.py`). Here belongs that mixture; not the curves of the runtime (`models/runtime.py`), the like
jobs (`features/job_survivors.py`) or how it is judged (`models/landmarks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_survivors import survivors
from features.jobs import OPTIONAL, feature_matrix
from features.vocabulary import QUANTILES
from models.curves import MEDIAN, cap, centred, pool, quantile_frame, read_seconds, remaining_s
from models.forest import Forest, ForestSize
from models.grace import Grace
from models.runtime_choice import REPEATED

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

LIKE_SHARE = 0.15  # weight of the like jobs where there are any
FOREST_SHARE = 0.4  # of what the like jobs leave, weight of the forests
FULL_S = 60.0  # time since the start up to which both grow: at the start the runtime forecast says it all
LANDMARKS_S = (60.0, 200.0, 600.0, 1_800.0, *(3_600.0 * 2**k for k in range(9)))  # trained on
ROWS_PER_TREE = 400  # pairs of job and landmark trained on at most, drawn at random, per tree of the runtime's
MIN_ROWS = 200
TREES = 0.4  # of the runtime's
SNAP = 0.1  # a median this near, in ln, to what a past runtime or the limit leaves is taken to be that
_CUTS = tuple(float(level) for level in (np.arange(50) + 0.5) / 50)  # levels at which the conditional curve is sampled


@dataclass(frozen=True, slots=True)
class LandmarkForests:
    """Forests of the time left, in logarithm.

    Attributes:
        run: Of ln(seconds left).
        ratio: Of ln(seconds left ÷ seconds to the limit), of jobs within their limit; None where none has one.
        farthest_log: Most ln(seconds to the limit) that `ratio` was grown on: farther limits scale as it does.
    """

    run: Forest
    ratio: Forest | None
    farthest_log: float = np.inf

    @classmethod
    def fit(
        cls, history: JobHistory, rows: Ints, *, size: ForestSize, seed: int, threads: int
    ) -> LandmarkForests | None:
        """Grow them on how jobs stood at `LANDMARKS_S`; None where fewer than `MIN_ROWS` pairs are there.

        Args:
            history: Jobs of the cluster.
            rows: Rows of it that had ended by the moment of training.
            size: Size of the runtime's forests.
            seed: Seed of every random choice.
            threads: Threads of the fit; they change nothing but the time.
        """
        table = history.table
        # A scheduler that leaves out suspensions counts less than the clock: both must have gone so far.
        ran_s = np.minimum(table.runtime_s[rows], (table.end[rows] - table.start[rows]) / 1e6)
        landmark, job = np.nonzero(ran_s > np.asarray(LANDMARKS_S)[:, None])
        if len(job) < MIN_ROWS:
            return None
        most = ROWS_PER_TREE * size.trees
        if len(job) > most:
            kept = np.sort(np.random.default_rng(seed).choice(len(job), most, replace=False))
            landmark, job = landmark[kept], job[kept]
        there, elapsed_s = JobTable(table.frame[rows[job]]), np.asarray(LANDMARKS_S)[landmark]
        moments = there.start + (elapsed_s * 1e6).astype(np.int64)
        base = feature_matrix(there, history, moments, threads)
        X = _with_elapsed(base, survivors(there, history, moments, elapsed_s, base), elapsed_s, there.limit_s)
        y = np.log(np.maximum(table.runtime_s[rows[job]] - elapsed_s, 1.0))
        trees = max(5, round(TREES * size.trees))
        size = ForestSize(trees, size.min_leaf, size.feature_share, size.rows_per_tree)
        grow = partial(Forest.fit, size=size, threads=threads, optional=OPTIONAL)
        run, ratio, farthest = grow(X, y, seed=seed), None, np.inf
        to_limit = _to_limit(elapsed_s, there)
        known = np.flatnonzero(~np.isnan(to_limit))
        if len(known) >= MIN_ROWS:
            relative = y[known] - to_limit[known]
            ratio = grow(X[known], relative, seed=seed + 1)
            farthest = float(to_limit[known].max())
        return cls(run, ratio, farthest)

    def samples(self, base: Matrix, like: Floats, table: JobTable, elapsed_s: Floats) -> list[NDArray[Any]]:
        """Samples of ln(seconds left) of the one and, NaN where there is no limit or it is past, of the other."""
        X = _with_elapsed(base, like, elapsed_s, table.limit_s)
        drawn = [self.run.draw(X)]
        if self.ratio is not None:
            scale = np.minimum(_to_limit(elapsed_s, table), self.farthest_log)
            drawn.append(self.ratio.draw(X) + scale[:, None].astype(np.float32))
        return drawn

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        kept = {f"{prefix}farthest_log": np.array(self.farthest_log)}
        kept |= self.ratio.to_arrays(f"{prefix}ratio_") if self.ratio else {}
        return self.run.to_arrays(f"{prefix}run_") | kept

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> LandmarkForests | None:
        """None where there are none: models kept before there were."""
        if f"{prefix}run_roots" not in arrays:
            return None
        ratio = Forest.from_arrays(arrays, f"{prefix}ratio_") if f"{prefix}ratio_roots" in arrays else None
        farthest = float(arrays.get(f"{prefix}farthest_log", np.inf))
        return cls(Forest.from_arrays(arrays, f"{prefix}run_"), ratio, farthest)


def time_left_s(
    curves: Floats, like: Floats, drawn: Sequence[NDArray[Any]], elapsed_s: Floats, limit_s: Floats,
    levels: Sequence[float] = QUANTILES, grace: Grace | None = None, repeats: Floats | None = None,
) -> Floats:  # fmt: skip
    """Quantiles of the time left.

    Args:
        curves: Of the whole runtime, ln(seconds), shape (n, len(LEVELS)).
        like: Time left of like jobs after as long a run, ln(seconds), NaN is none, shape (n, k).
        drawn: Samples of the forests, ln(seconds), as of `LandmarkForests.samples`; empty where there are none.
        elapsed_s: Shape (n,), ≥ 0.
        limit_s: Shape (n,), NaN: none.
        levels: Levels asked for.
        grace: How far runs go past their limit; None: not known.
        repeats: Runtimes that may come again, ln(seconds), NaN is none, shape (n, r); None: none are known.

    Returns:
        Seconds, shape (n, len(levels)); never falling along a row. Of a run that has begun, at most limit − elapsed and
        the grace where it is known, past the limit what is left of the grace alone; where it is not, within [0, limit −
        elapsed] where that is positive.
    """
    grace = grace or Grace.none()
    whole = limit_s[:, None] if repeats is None else np.column_stack([limit_s, np.exp(repeats)])
    out = _within_s(curves, like, drawn, elapsed_s, limit_s, levels, grace, whole)
    begun = elapsed_s > 0
    out[~begun] = read_seconds(curves[~begun], levels, limit_s[~begun])
    past = np.flatnonzero(begun & (elapsed_s >= limit_s)) if grace.is_known else np.empty(0, dtype=np.int64)
    if len(past):
        out[past] = grace.left_s(elapsed_s[past] - limit_s[past], levels)
    return out


def _within_s(
    curves: Floats, like: Floats, drawn: Sequence[NDArray[Any]], elapsed_s: Floats, limit_s: Floats,
    levels: Sequence[float], grace: Grace, whole_s: Floats,
) -> Floats:  # fmt: skip
    """`time_left_s` of runs that have begun and are not past their limit."""
    curves = cap(curves, limit_s)
    out = remaining_s(curves, elapsed_s, limit_s, levels)
    is_like = np.any(~np.isnan(like), axis=1)
    rows = np.flatnonzero((is_like | bool(drawn) | grace.is_known) & (elapsed_s > 0))
    if not len(rows):
        return out
    sampled = np.log(np.maximum(remaining_s(curves[rows], elapsed_s[rows], limit_s[rows], _CUTS), 1.0))
    grown = np.minimum(elapsed_s[rows] / FULL_S, 1.0)
    of_like = np.where(is_like[rows], LIKE_SHARE, 0.0) * grown
    of_forests = (FOREST_SHARE if drawn else 0.0) * grown * (1 - of_like)
    parts, shares = [sampled, like[rows]], [1 - of_like - of_forests, of_like]
    there = [~np.isnan(part[rows]).all(axis=1) for part in drawn]
    for part, is_there in zip(drawn, there, strict=True):
        parts.append(part[rows])
        shares.append(np.where(is_there, of_forests / np.maximum(np.sum(there, axis=0), 1), 0.0))
    ends = limit_s[rows] - elapsed_s[rows]
    ends = np.where(ends > 0, ends, np.nan)
    ended = grace.past_limit(pool(parts, shares), ends, first=0, whole_s=limit_s[rows])
    mixed = _snapped(ended, whole_s[rows] - elapsed_s[rows, None])
    out[rows] = read_seconds(mixed, levels, ends)
    return out


def _snapped(curves: Floats, left_s: Floats) -> Floats:
    """Curves whose median is moved onto the nearest of the times left, the limit's first, which moves none back to it.

    Times left are of shape (n, 1 + r); the nearest must lie within `SNAP`. The rest of the curve makes way.
    """
    gaps = np.log(np.where(left_s >= 1, left_s, np.nan)) - curves[:, [MEDIAN]]
    gaps = np.where(np.isnan(gaps), np.inf, gaps)
    gaps[gaps[:, 0] < 0, 0] = np.inf
    gap = gaps[np.arange(len(gaps)), np.argmin(np.abs(gaps), axis=1)]
    moved = curves[:, MEDIAN] + np.where(np.abs(gap) < SNAP, gap, 0.0)
    return centred(curves, np.minimum(moved, curves[:, -1]))


def remaining_frame(
    curves: Floats, X: Matrix, table: JobTable, history: JobHistory, moment: int, forests: LandmarkForests | None,
    grace: Grace | None = None,
) -> pl.DataFrame:  # fmt: skip
    """Quantiles of the time left at a moment.

    Args:
        curves: Of the whole runtime as foreseen at the moment, shape (n, len(LEVELS)).
        X: Features at the moment, shape (n, len(FEATURES)).
        table: The jobs, n rows.
        history: Jobs of the cluster.
        moment: µs UTC.
        forests: Those of the forecaster in charge.
        grace: Its own.

    Returns:
        Columns `QUANTILE_COLUMNS`, seconds; null for a job that has not started by then.
    """
    rows = np.flatnonzero(table.start <= moment)
    seconds = np.full((table.count, len(QUANTILES)), np.nan)
    if len(rows):
        running = table if len(rows) == table.count else JobTable(table.frame[rows])
        moments = np.full(len(rows), moment)
        seconds[rows] = left_s(curves[rows], X[rows], running, history, moments, forests, grace)
    return quantile_frame(seconds)


def left_s(
    curves: Floats, X: Matrix, table: JobTable, history: JobHistory, moments: Ints, forests: LandmarkForests | None,
    grace: Grace | None = None, levels: Sequence[float] = QUANTILES,
) -> Floats:  # fmt: skip
    """Quantiles of the time left of running jobs, each at its own moment (µs UTC); seconds, shape (n, len(levels))."""
    elapsed_s = (moments - table.start) / 1e6
    like = survivors(table, history, moments, elapsed_s, X)
    drawn = [] if forests is None else forests.samples(X, like, table, elapsed_s)
    return time_left_s(curves, like, drawn, elapsed_s, table.limit_s, levels, grace, X[:, REPEATED].astype(np.float64))


def _to_limit(elapsed_s: Floats, table: JobTable) -> Floats:
    """ln(seconds to the limit), NaN where there is none or it is past."""
    ahead = table.limit_s - elapsed_s
    return np.log(np.where(ahead > 0, np.maximum(ahead, 1.0), np.nan))


def _with_elapsed(base: Matrix, like: Floats, elapsed_s: Floats, limit_s: Floats) -> Matrix:
    """Features of the forests: those at the moment, what has elapsed, what is left to the limit, and the like jobs."""
    spent = np.log(np.maximum(elapsed_s, 1.0))
    ahead = np.log(np.maximum(limit_s - elapsed_s, 1.0))
    added = np.stack([spent, ahead, np.log(limit_s) - spent], axis=1)
    return np.concatenate([base, added.astype(np.float32), like.astype(np.float32)], axis=1)

"""How many GPUs of a queue stay idle through a window: P(at least n), for any n, and quantiles of the fewest.

One model per window length gives the chance that a level of n GPUs is broken, from features of the moment and of the
level; over levels it can only rise, so that the same trees answer "do 8 stay?" and "how many stay?". Trees are
calibrated on later time than they saw, and the least probability from which a window may be offered is set there too.
Here belong the forecaster and its rules of thumb; features and outcomes stand in `features/idle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.idle import IdleHistory

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HORIZONS_MIN = (30, 60)
GPUS = 8  # of the question that is judged: a whole node
QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
BREACH = {30: 0.02, 60: 0.04}  # share of windows offered that may be broken
BREACH_OTHERS = 0.04
# Chosen on the part before the test of a recorded cluster.
PARAMETERS: dict[str, Any] = {
    "objective": "binary", "num_leaves": 15, "learning_rate": 0.03, "min_data_in_leaf": 400, "lambda_l2": 20.0,
    "feature_fraction": 0.3, "bagging_fraction": 0.5, "bagging_freq": 1, "max_bin": 63, "verbose": -1,
    "deterministic": True, "force_row_wise": True,
}  # fmt: skip
ROUNDS = 300
EVERY_MIN = 5  # between rows that are learned from
MOST_ROWS = 200_000
WARM_MIN = 240  # before it nothing is known of the past
HELD_SHARE = 0.25  # of the time, the newest: calibration
MIN_BROKEN = 50  # rows of either outcome
RECENT_MIN = (15, 60, 240)  # the fewest idle in so long a time are levels that it falls to again
FALLS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 25, 32, 33, 40, 48, 56, 64, 80, 96, 128, 160, 256)
_EDGE = 1e-5


class IdleModelError(ValueError):
    """The forecaster cannot be fitted or asked; the message says what is missing."""


class IdleForecaster:
    """Chance that a level breaks, by length of window.

    Args:
        horizons_min: Rising, minutes.
        columns: Names of features in the order the trees know them.
        boosters: A LightGBM booster of each horizon.
        calibration: Slope and intercept on the logit, shape (horizons, 2).
        offer_from: Least P(`GPUS` stay) from which a window is offered, shape (horizons,); infinite: none is.
    """

    def __init__(
        self,
        horizons_min: Sequence[int],
        columns: Sequence[str],
        boosters: Sequence[Any],
        calibration: Floats,
        offer_from: Floats,
    ) -> None:
        self.horizons_min = tuple(horizons_min)
        self.columns = list(columns)
        self.boosters = list(boosters)
        self.calibration = calibration
        self.offer_from = offer_from

    @classmethod
    def fit(
        cls,
        history: IdleHistory,
        end_min: int,
        *,
        horizons_min: Sequence[int] = HORIZONS_MIN,
        seed: int = 1,
        threads: int = 1,
    ) -> IdleForecaster:
        """Learn from what was known at a moment.

        Args:
            history: Recorded occupancy.
            end_min: The moment, a minute of the history; no outcome after it is looked at.
            horizons_min: Rising, minutes.
            seed: Seed of sampling and trees.
            threads: Threads of a fit.

        Raises:
            IdleModelError: Too few windows broke or stayed.
        """
        boosters, calibration, offer_from = [], [], []
        for horizon in horizons_min:
            rows = _learned_rows(history, end_min - horizon, seed)
            came = history.least(horizon)[rows[0], rows[1]]
            rows = tuple(column[~np.isnan(came)] for column in rows)
            broken = (came[~np.isnan(came)] < rows[2]).astype(np.float64)
            if min(broken.sum(), (1 - broken).sum()) < MIN_BROKEN:
                raise IdleModelError(
                    f"{broken.sum():.0f} of {len(broken)} moments to learn from broke within {horizon} min, "
                    f"{MIN_BROKEN} of either outcome are needed: give a longer record"
                )
            X = history.matrix(*rows, horizon)
            cut = int(np.quantile(rows[1], 1 - HELD_SHARE))
            early, late = rows[1] < cut - horizon, rows[1] >= cut
            slope, least_p = np.array([1.0, 0.0]), np.inf
            if min(broken[early].sum(), broken[late].sum(), (1 - broken[early]).sum()) >= MIN_BROKEN:
                trees = _trees(X[early], broken[early], seed, threads)
                z = _logit(np.asarray(trees.predict(X[late], num_threads=threads)))
                slope = _straight(z, broken[late])
                asked = rows[2][late] == GPUS
                stays = 1 - _chance(z[asked], slope)
                least_p = _least_offered(stays, broken[late][asked] > 0, BREACH.get(horizon, BREACH_OTHERS))
            boosters.append(_trees(X, broken, seed, threads))
            calibration.append(slope)
            offer_from.append(least_p)
        return cls(horizons_min, history.columns, boosters, np.array(calibration), np.array(offer_from))

    def stays(self, history: IdleHistory, queue: Ints, minute: Ints, gpus: Ints, *, threads: int = 1) -> Floats:
        """P(at least so many GPUs stay idle for the whole window).

        Args:
            history: What is known up to the moments, at least.
            queue: Codes of queues, shape (rows,).
            minute: Minutes of the history, shape (rows,).
            gpus: How many, 1 or more, shape (rows,).
            threads: Threads of the trees.

        Returns:
            Shape (rows, horizons), never rising with the horizon; 0 where fewer are idle now, NaN where that is not
            known.

        Raises:
            IdleModelError: The history has other columns than the trees know.
        """
        if history.columns != self.columns:
            raise IdleModelError(f"the history has other columns than the trees know: {', '.join(self.columns)}")
        idle = history.idle[queue, minute]
        out = np.where(np.isnan(idle), np.nan, 0.0)[:, None].repeat(len(self.horizons_min), axis=1)
        asked = np.flatnonzero(idle >= gpus)
        for k, horizon in enumerate(self.horizons_min if len(asked) else ()):
            X = history.matrix(queue[asked], minute[asked], gpus[asked], horizon)
            z = _logit(np.asarray(self.boosters[k].predict(X, num_threads=threads)))
            out[asked, k] = 1 - _chance(z, self.calibration[k])
        return np.minimum.accumulate(out, axis=1)

    def quantiles(self, history: IdleHistory, queue: Ints, minute: Ints, *, threads: int = 1) -> Floats:
        """Quantiles of the fewest idle GPUs in the window.

        Args:
            history: As of `stays`, as are the others.
            queue: Shape (rows,).
            minute: Shape (rows,).
            threads: Threads of the trees.

        Returns:
            Shape (rows, horizons, len(QUANTILES)), whole GPUs, never falling along the last axis nor rising with the
            horizon; at most what is idle now, NaN where that is not known.
        """
        lows = [history.recent_least(back)[queue, minute] for back in RECENT_MIN]
        row, level = levels_of(history.idle[queue, minute], *lows)
        breaks = 1 - self.stays(history, queue[row], minute[row], level, threads=threads)
        out = np.where(np.isnan(history.idle[queue, minute]), np.nan, 0.0)
        out = out[:, None, None].repeat(len(self.horizons_min), axis=1).repeat(len(QUANTILES), axis=2)
        # Levels rise within a row, so does the chance that one breaks: the quantile is the highest that q leaves whole.
        first = np.flatnonzero(np.diff(row, prepend=-1))
        for begin, end in zip(first, np.append(first[1:], len(row)), strict=True):
            for k in range(len(self.horizons_min)):
                p = np.maximum.accumulate(breaks[begin:end, k])
                kept = np.searchsorted(p, QUANTILES, side="right")
                out[row[begin], k] = np.where(kept > 0, level[begin:end][np.maximum(kept - 1, 0)], 0)
        return np.minimum.accumulate(out, axis=1)


def levels_of(idle: Floats, *others: Floats) -> tuple[Ints, Ints]:
    """Levels asked about at moments: fewer than all idle ones by `FALLS`, `GPUS`, and others.

    Args:
        idle: GPUs idle, NaN where not known, shape (rows,).
        *others: Levels that are asked about as well where they are known and as many are idle, shape (rows,).

    Returns:
        Row and level, rows ascending, levels ascending within a row.
    """
    falls = np.array(FALLS)
    n = np.nan_to_num(idle).astype(np.int64)
    more = [np.nan_to_num(levels).astype(np.int64) for levels in (np.full(len(n), GPUS), *others)]
    table = np.column_stack([n[:, None] - falls + 1, *(np.where(n >= levels, levels, 0) for levels in more)])
    table.sort(axis=1)
    fresh = (table >= 1) & np.column_stack([np.ones(len(n), dtype=bool), np.diff(table, axis=1) > 0])
    row, column = np.nonzero(fresh)
    return row, table[row, column]


def _learned_rows(history: IdleHistory, end_min: int, seed: int) -> tuple[Ints, Ints, Ints]:
    """Queue, minute and level of rows to learn from: every idle GPU, `GPUS` of them, and levels drawn between."""
    rng = np.random.default_rng(seed)
    queues = len(history.names)
    every = max(EVERY_MIN, -(-queues * max(end_min, 1) * 4 // MOST_ROWS))
    parts = []
    for code in range(queues):
        minute = np.arange(min(WARM_MIN, max(end_min // 4, 0)) + code % every, max(end_min, 0), every)
        idle = history.idle[code, minute]
        minute, n = minute[idle >= 1], idle[idle >= 1].astype(np.int64)
        drawn = (n, np.where(n >= GPUS, GPUS, n), rng.integers(1, n + 1), np.maximum(1, n - rng.integers(0, 9, len(n))))
        pairs = np.unique(np.column_stack([np.tile(minute, 4), np.concatenate(drawn)]), axis=0)
        parts.append((np.full(len(pairs), code), pairs[:, 0], pairs[:, 1]))
    queue, minute, level = (np.concatenate(column) for column in zip(*parts, strict=True))
    return queue, minute, level


def _trees(X: NDArray[np.float32], broken: Floats, seed: int, threads: int) -> Any:
    import lightgbm as lgb

    return lgb.train({**PARAMETERS, "seed": seed, "num_threads": threads}, lgb.Dataset(X, label=broken), ROUNDS)


def _logit(p: Floats) -> Floats:
    p = np.clip(p, _EDGE, 1 - _EDGE)
    return np.log(p / (1 - p))


def _chance(z: Floats, slope: Floats) -> Floats:
    return np.clip(1 / (1 + np.exp(-(slope[0] * z + slope[1]))), _EDGE, 1 - _EDGE)


def _straight(z: Floats, broken: Floats) -> Floats:
    """Slope and intercept of a logistic regression on the logit."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=1.0).fit(z[:, None], broken)
    return np.array([np.clip(fitted.coef_[0, 0], 0.3, 1.5), fitted.intercept_[0]])


def _least_offered(stays: Floats, broken: NDArray[np.bool_], most: float) -> float:
    """Least probability at and above which no more than a share of windows broke; infinite where there is none."""
    order = np.argsort(-stays, kind="stable")
    share = np.cumsum(broken[order]) / np.arange(1, len(order) + 1)
    within = np.flatnonzero(share <= most)
    return float(stays[order][within[-1]]) if len(within) else float("inf")

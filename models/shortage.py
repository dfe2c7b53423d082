"""P(a queue runs short of GPUs within each horizon): a discrete-time hazard of small additive trees on occupancy.

One model gives the chance that the onset comes in an interval between two horizons, given that it has not come before;
the product over intervals can only make P rise with the horizon. A few hundred onsets are all that weeks of a cluster
hold, so trees have three leaves and several are averaged over seeds. Hazards are calibrated on later time than the
trees saw. Occupancy alone is no alarm: it does not show the job that is about to be submitted. Here belong the
forecaster and its baselines; label and features stand in `features/shortage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.shortage import JOB_COUNTS, JOB_EVENTS, JOB_HALF_LIVES_MIN, JOB_SINCE, QueueHistory
from models.score_calibration import probabilities

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HORIZONS_S = (120.0, 300.0)
PARAMETERS: dict[str, Any] = {
    "objective": "binary", "num_leaves": 3, "learning_rate": 0.05, "min_data_in_leaf": 400, "lambda_l2": 20.0,
    "feature_fraction": 0.3, "bagging_fraction": 0.7, "bagging_freq": 1, "max_bin": 63, "verbose": -1,
    "deterministic": True, "force_row_wise": True,
}  # fmt: skip
ROUNDS = 150
SEEDS = 5
QUIET_ROWS = 200_000  # person-periods without an onset kept at most, about; weighted up
FOLDS = (0.5, 0.75)  # of the span: where trees for calibration end
MIN_ONSETS = 20
LOW, HIGH = 1e-6, 0.995
_EDGE = 1e-6
# Chosen on the part before the test of a recorded cluster.
USED = (
    "shortening_20m", "shortening_60m", "shortening_240m", "shortening_720m", "shortening_2880m", "shortening_8640m",
    "since_short_min", "since_held_min", "since_waits_min", "since_starts_min", "short_decayed_60m",
    "short_decayed_720m", "held_decayed_60m", "held_decayed_720m", "held_decayed_4320m", "waits_decayed_10m",
    "waits_decayed_60m", "arrivals_decayed_10m", "running_jobs", "job_starts_mean_30m", "margin", "margin_min_5m",
    "margin_min_30m", "largest_less_idle", *JOB_COUNTS, *(f"since_{name}_min" for name in JOB_SINCE),
    *(f"{name}_decayed_{minutes}m" for name in JOB_EVENTS for minutes in JOB_HALF_LIVES_MIN),
)  # fmt: skip
# Baselines: what a rule ranks queues by, and whether more means sooner.
RULES = {
    "climatology": ("", 1), "level_threshold": ("margin", -1), "recent_mean": ("short_mean_120m", 1),
    "ewma": ("short_decayed_720m", 1), "recent_onset_rate": ("held_decayed_4320m", 1),
    "since_last_short": ("since_short_min", -1), "since_last_onset": ("since_held_min", -1),
}  # fmt: skip
BASELINES = ("persistence", "predict_linear", *RULES)


class ShortageModelError(ValueError):
    """The forecaster cannot be fitted; the message says what is missing."""


class ShortageForecaster:
    """Hazard by interval between horizons.

    Args:
        horizons_s: Rising, seconds.
        features: Names of `QueueHistory.features`, in the order the trees know them.
        boosters: LightGBM boosters, averaged.
        calibration: Slope, then one intercept per interval, on the logit of the hazard.
    """

    def __init__(
        self, horizons_s: Sequence[float], features: Sequence[str], boosters: Sequence[Any], calibration: Floats
    ) -> None:
        self.horizons_s = tuple(horizons_s)
        self.features = list(features)
        self.boosters = list(boosters)
        self.calibration = calibration

    @classmethod
    def fit(
        cls,
        history: QueueHistory,
        end_s: float,
        *,
        horizons_s: Sequence[float] = HORIZONS_S,
        seed: int = 1,
        threads: int = 1,
        seeds: int = SEEDS,
    ) -> ShortageForecaster:
        """Learn from what was known at a moment.

        Calibration goes forward in time: trees of the first part forecast the next, trees of both the one after.

        Args:
            history: Recorded occupancy.
            end_s: The moment; nothing after it is looked at.
            horizons_s: Rising, seconds.
            seed: Seed of sampling and trees.
            threads: Threads of a fit.
            seeds: Fits that are averaged.

        Raises:
            ShortageModelError: There are fewer than `MIN_ONSETS` onsets.
        """
        rows = clear_rows(history, -np.inf, end_s)
        onset_in, known = history.outcome(rows, end_s)
        onsets = int((history.ts[history.onset_row] < end_s).sum())
        if onsets < MIN_ONSETS:
            raise ShortageModelError(
                f"{onsets} onsets of shortage to learn from, {MIN_ONSETS} are needed: give a longer record"
            )
        names = [name for name in USED if not np.isnan(history.features[name]).all()]
        X = history.matrix(names, rows)
        row, interval, came = _person_periods(onset_in, known, horizons_s)
        rng = np.random.default_rng(seed)
        share = min(1.0, QUIET_ROWS / max(int((came == 0).sum()), 1))
        keep = (came > 0) | (rng.random(len(came)) < share)
        row, interval, came = row[keep], interval[keep], came[keep]
        weight = np.where(came > 0, 1.0, 1 / share)
        at = history.ts[rows][row]
        begin = at.min()
        held: list[tuple[Floats, Ints]] = []
        for first, last in ((FOLDS[0], FOLDS[1]), (FOLDS[1], 1.0)):
            cut, until = begin + first * (end_s - begin), begin + last * (end_s - begin)
            early, late = np.flatnonzero(at < cut - horizons_s[-1]), np.flatnonzero((at >= cut) & (at < until))
            if came[early].sum() < MIN_ONSETS or not came[late].any():
                continue
            trees = _trees(X, row[early], interval[early], came[early], weight[early], seed, threads, 2)
            held.append((_logit(_predict(trees, X[row[late]], interval[late], threads)), late))
        calibration = np.array([1.0, *(0.0 for _ in horizons_s)])
        if held:
            late = np.concatenate([rows for _, rows in held])
            calibration = _logistic(
                np.concatenate([z for z, _ in held]), interval[late], came[late], weight[late], len(horizons_s)
            )
        trees = _trees(X, row, interval, came, weight, seed, threads, seeds)
        return cls(horizons_s, names, trees, calibration)

    def forecast(self, history: QueueHistory, rows: Ints, *, threads: int = 1) -> Floats:
        """P(onset within each horizon), shape (rows, horizons), never falling with the horizon."""
        X = history.matrix(self.features, rows)
        clear = np.ones(len(rows))
        out = np.empty((len(rows), len(self.horizons_s)))
        for k in range(len(self.horizons_s)):
            z = _logit(_predict(self.boosters, X, np.full(len(rows), k), threads))
            z = self.calibration[0] * z + self.calibration[1 + k]
            clear = clear * (1 - 1 / (1 + np.exp(-z)))
            out[:, k] = 1 - clear
        return np.clip(out, LOW, HIGH)


def clear_rows(history: QueueHistory, start_s: float, end_s: float) -> Ints:
    """Rows of a span at which a queue was not short."""
    return np.flatnonzero((history.state == 0) & (history.ts >= start_s) & (history.ts < end_s))


def baseline(
    name: str, history: QueueHistory, train: Ints, train_end_s: float, rows: Ints, horizons_s: Sequence[float]
) -> tuple[Floats, Floats]:
    """Probabilities of a baseline and what it ranks by; how often a rule was right is learned on the training rows.

    Returns:
        Two arrays of shape (rows, horizons).

    Raises:
        ValueError: There is no such baseline.
    """
    if name not in BASELINES:
        raise ValueError(f"no baseline {name!r}; baselines: {', '.join(BASELINES)}")
    given, rank = np.zeros((len(rows), len(horizons_s))), np.zeros((len(rows), len(horizons_s)))
    if name == "persistence":
        return given, rank
    onset_in, known = history.outcome(train, train_end_s)
    for k, horizon_s in enumerate(horizons_s):
        came = onset_in <= horizon_s
        use = came | (known >= horizon_s)
        given[:, k] = probabilities(_rule(name, history, train[use], horizon_s), came[use], score := _rule(
            name, history, rows, horizon_s
        ))  # fmt: skip
        rank[:, k] = score
    return np.maximum.accumulate(given, axis=1), rank


def _rule(name: str, history: QueueHistory, rows: Ints, horizon_s: float) -> Floats:
    features = history.features
    if name == "predict_linear":
        # A straight line from the mean of the last 15 minutes to now, which lies half of that apart.
        pace = features["margin_change_15m"][rows] / 450.0
        return -np.nan_to_num(features["margin"][rows] + pace * horizon_s, nan=1e6)
    feature, sign = RULES[name]
    return np.zeros(len(rows)) if not feature else sign * np.nan_to_num(features[feature][rows])


def _person_periods(onset_in: Floats, known_s: Floats, horizons_s: Sequence[float]) -> tuple[Ints, Ints, Floats]:
    rows, intervals, outcome = [], [], []
    begin = 0.0
    for k, end in enumerate(horizons_s):
        at_risk = onset_in > begin
        came = at_risk & (onset_in <= end)
        picked = np.flatnonzero(came | (at_risk & (known_s >= end)))
        rows.append(picked)
        intervals.append(np.full(len(picked), k))
        outcome.append(came[picked].astype(np.float64))
        begin = end
    return np.concatenate(rows), np.concatenate(intervals), np.concatenate(outcome)


def _trees(
    X: NDArray[np.float32], row: Ints, interval: Ints, came: Floats, weight: Floats, seed: int, threads: int, seeds: int
) -> list[Any]:
    import lightgbm as lgb

    design = np.column_stack((X[row], interval.astype(np.float32)))
    out = []
    for i in range(seeds):
        parameters = {**PARAMETERS, "seed": 1000 * seed + i, "num_threads": threads}
        out.append(lgb.train(parameters, lgb.Dataset(design, label=came, weight=weight), num_boost_round=ROUNDS))
    return out


def _predict(boosters: Sequence[Any], X: NDArray[np.float32], interval: Ints, threads: int) -> Floats:
    design = np.column_stack((X, interval.astype(np.float32)))
    return np.mean([booster.predict(design, num_threads=threads) for booster in boosters], axis=0)


def _logit(p: Floats) -> Floats:
    p = np.clip(p, _EDGE, 1 - _EDGE)
    return np.log(p / (1 - p))


def _logistic(z: Floats, interval: Ints, came: Floats, weight: Floats, count: int) -> Floats:
    """Weighted logistic regression on the logit, one intercept per interval, pulled towards identity."""
    X = np.column_stack((z, *(interval == k for k in range(count)))).astype(np.float64)
    beta = np.array([1.0] + [0.0] * count)
    prior, pull = beta.copy(), np.array([4.0] + [2.0] * count)
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(X @ beta, -30, 30)))
        gradient = X.T @ (weight * (came - p)) - pull * (beta - prior)
        step = np.linalg.solve((X * (weight * p * (1 - p))[:, None]).T @ X + np.diag(pull), gradient)
        beta = beta + np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-8:
            break
    beta[0] = np.clip(beta[0], 0.3, 1.5)
    return beta

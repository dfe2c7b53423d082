"""Job failure: the probability that a job ends badly, and of which kind, from what is known at submit.

Badly: FAILED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY and the like; a cancelled job has not failed. Two sets of boosted
trees, one that weighs every job alike and one that weighs every user's day alike, blended with the rolling rate of the
same key as released jobs tell; or that rate alone. Here belong this forecaster and its baseline; not the features
(`features/job_outcomes.py`), the kinds of bad ends (`models/failure_kinds.py`) or the odds of jobs that have run for a
while (`models/failure_running.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory, JobTable
from features.job_outcomes import FAILURE_FEATURES, failure_matrix
from features.jobs import FEATURES, RECENT, microseconds, moments_of
from models.arrays import pack_arrays, unpack_arrays
from models.boosting import booster_of, grow_odds, mean_odds
from models.calibration import MIN_ROWS, Isotonic
from models.failure_kinds import KIND_COLUMNS, KindShares, kind_of, mixed_shares
from models.failure_running import RunningOdds
from models.runtime import HOLDOUT_SHARE, MAX_HOLDOUT, TooFewJobsError, check_features
from models.runtime_choice import day_blocks
from models.scoring import brier

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Matrix = NDArray[np.float32]

MAX_LABELS = 40_000
ROUNDS = 60
# Weight of the trees beside the rolling rate, in log odds. Never the whole: bursts that the trees misjudge cost less.
BLENDS = (0.0, 0.5, 0.8)
_PRIOR_ROWS = 4.0  # of the wider group, counted with the narrower one
_OVERALL_RATE = 0.3  # before anything is known
_RATE_GROUPS = ("all", "user", "key")
_EDGE = 0.002  # rates are kept this far off 0 and 1 before their log odds are taken
_MODEL_FILES = ("job_failure.txt", "job_failure_days.txt")
_KINDS_FILE = "job_failure_kinds.txt"


def rolling_rate(X: Matrix, narrowest: str = "key") -> Floats:
    """The baseline: share of bad ends among the newest 20 of the same user, size and limit, shape (n,).

    With few of them it leans on the user's own rate, and that on everyone's.
    """
    rate = np.full(len(X), _OVERALL_RATE)
    for group in _RATE_GROUPS[: _RATE_GROUPS.index(narrowest) + 1]:
        bad, count = (X[:, FEATURES.index(f"{group}_{name}")].astype(np.float64) for name in ("bad", "count"))
        rows = np.minimum(np.expm1(np.nan_to_num(count)), RECENT)
        hits = np.nan_to_num(bad) * rows
        rate = (hits + _PRIOR_ROWS * rate) / (rows + _PRIOR_ROWS)
    return rate


@dataclass(frozen=True, slots=True)
class FailureForecaster:
    """Forecasts bad ends of jobs of one cluster.

    Attributes:
        booster_texts: LightGBM models as text, whose odds are averaged; empty while the rolling rate speaks.
        blend: Weight of their log odds beside those of the rolling rate.
        map: Of the rolling rate to calibrated probability, where it speaks alone.
        kinds: Shares of the kinds of bad ends.
        running: Odds of jobs that have run for a while.
        facts: What the fit saw and chose, for the card.
    """

    booster_texts: tuple[str, ...]
    blend: float
    map: Isotonic
    kinds: KindShares
    running: RunningOdds
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def rate(cls) -> FailureForecaster:
        """The one in charge before any model: the rolling rate."""
        return cls((), 0.0, Isotonic.identity(), KindShares.unknown(), RunningOdds(), {"expert": "rolling_rate"})

    @classmethod
    def fit(
        cls, history: pl.DataFrame | JobHistory, at: datetime | int, *, features: Matrix | None = None, seed: int = 1,
        threads: int = 1, rounds: int = ROUNDS, max_labels: int = MAX_LABELS,
    ) -> FailureForecaster:  # fmt: skip
        """Train on the jobs that ended before a moment.

        Args:
            history: Canonical jobs; what happened after `at` changes nothing.
            at: The moment of training.
            features: `failure_matrix` of all rows of `history` at their submits, when it is at hand.
            seed: Seed of every random choice.
            threads: Threads of the fit.
            rounds: Boosting rounds.
            max_labels: Outcomes trained on at most, drawn at random.

        Raises:
            TooFewJobsError: Fewer than `MIN_ROWS` jobs had ended.
        """
        prepared = JobHistory.of(history)
        table = prepared.table
        rows = np.flatnonzero(labelled(table) & (table.end < microseconds(at)))
        if len(rows) < MIN_ROWS:
            raise TooFewJobsError(f"{len(rows)} jobs had ended, {MIN_ROWS} are needed")
        generator = np.random.default_rng(seed)
        rows = rows[np.lexsort((table.end[rows], table.submit[rows]))]
        if len(rows) > max_labels:
            rows = rows[np.sort(generator.choice(len(rows), max_labels, replace=False))]
        X = features[rows] if features is not None else _matrix_of_rows(prepared, rows)
        bad, blocks = table.is_bad[rows], day_blocks(prepared.group("user")[rows], table.submit[rows])
        first = int(len(rows) * (1 - HOLDOUT_SHARE))
        held = np.arange(first, len(rows))
        if len(held) > MAX_HOLDOUT:
            held = np.sort(generator.choice(held, MAX_HOLDOUT, replace=False))
        early = np.flatnonzero(table.end[rows] < table.submit[rows[first]])
        if len(early) < MIN_ROWS:
            early = np.arange(first)
        ends = np.where(bad, kind_of(table)[rows], -1)
        kinds = KindShares.fit(X[bad], ends[bad], seed=seed, threads=threads)
        running = RunningOdds.fit(
            X, ends, table.runtime_s[rows], table.limit_s[rows], blocks, seed=seed, threads=threads, rounds=rounds,
            max_rows=max_labels,
        )  # fmt: skip
        facts: dict[str, Any] = {
            "rows": len(rows), "holdout_rows": len(held), "seed": seed, "rounds": rounds,
            "base_rate": float(bad.mean()), "kind_shares": kinds.shares.round(5).tolist(),
        }  # fmt: skip
        rate = rolling_rate(X[held])
        losses = {0.0: float(brier(rate, bad[held]).mean())}
        if 0 < bad[early].sum() < len(early):
            trial = grow_odds(X[early], bad[early], blocks[early], rounds=rounds, seed=seed, threads=threads)
            told = np.mean([booster.predict(X[held], num_threads=threads) for booster in trial], axis=0)
            losses |= {w: float(brier(_blended(told, rate, w), bad[held]).mean()) for w in BLENDS}
        blend = min(losses, key=lambda weight: losses[weight])
        facts |= {"holdout_brier": {f"{w:g}": loss for w, loss in losses.items()}, "blend": blend}
        facts["expert"] = "model" if blend > 0 else "rolling_rate"
        if blend == 0:
            return cls((), 0.0, Isotonic.fit(rate, bad[held]), kinds, running, facts)
        boosters = grow_odds(X, bad, blocks, rounds=rounds, seed=seed, threads=threads)
        return cls(tuple(b.model_to_string() for b in boosters), blend, Isotonic.identity(), kinds, running, facts)

    def probability(self, X: Matrix) -> Floats:
        """P(bad end) from features of `failure_matrix`, shape (n,)."""
        if not len(X):
            return np.empty(0)
        rate = rolling_rate(X)
        if not self.booster_texts:
            return self.map.apply(rate)
        return _blended(mean_odds(self.booster_texts, X), rate, self.blend)

    def kind_probabilities(self, X: Matrix, p_fail: Floats | None = None) -> Floats:
        """P of each of `KIND_COLUMNS`, parts of P(bad end), shape (n, 3).

        Args:
            X: Features.
            p_fail: P(bad end) of the same rows, when it is at hand.
        """
        p_fail = self.probability(X) if p_fail is None else p_fail
        return p_fail[:, None] * mixed_shares(self.kinds, X)

    def frame(self, X: Matrix) -> pl.DataFrame:
        """Columns `p_fail` and `KIND_COLUMNS` from features that are at hand."""
        p_fail = self.probability(X)
        kinds = pl.from_numpy(self.kind_probabilities(X, p_fail), schema=list(KIND_COLUMNS))
        return pl.DataFrame({"p_fail": p_fail}).hstack(kinds)

    def forecast(
        self, jobs: pl.DataFrame, history: pl.DataFrame | JobHistory, at: datetime | None = None
    ) -> pl.DataFrame:
        """Odds of jobs at a moment (None: each job's submit time): `frame`, in the jobs' order."""
        table = JobTable(jobs)
        return self.frame(failure_matrix(table, JobHistory.of(history), moments_of(table, at)))

    def to_files(self) -> dict[str, bytes]:
        """The forecaster as files without code."""
        described = {
            "features": list(FAILURE_FEATURES), "facts": self.facts, "blend": self.blend,
            "kinds_learnt": list(self.kinds.learnt),
        }  # fmt: skip
        arrays = self.map.to_arrays("map_") | {"kind_shares": self.kinds.shares}
        running, running_arrays, described["running"] = self.running.to_files()
        arrays |= running_arrays
        files = {
            "job_failure.json": json.dumps(described, indent=1, sort_keys=True).encode(),
            "job_failure.npz": pack_arrays(arrays),
        }
        files |= {name: text.encode() for name, text in zip(_MODEL_FILES, self.booster_texts, strict=False)}
        return files | running | ({_KINDS_FILE: self.kinds.booster_text.encode()} if self.kinds.booster_text else {})

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> FailureForecaster:
        """The forecaster from its files.

        Raises:
            ValueError: It was trained on other features than this version computes.
            lightgbm.basic.LightGBMError: A text is no model.
        """
        described = json.loads(files["job_failure.json"])
        check_features(described["features"], FAILURE_FEATURES)
        for name in files:
            if name.endswith(".txt"):
                booster_of(files[name].decode())  # what cannot be parsed is found here, not at the first forecast
        texts = tuple(files[name].decode() for name in _MODEL_FILES if name in files)
        arrays = unpack_arrays(files["job_failure.npz"], "map_raw", "map_calibrated", "kind_shares")
        told = files[_KINDS_FILE].decode() if _KINDS_FILE in files else None
        kinds = KindShares(arrays["kind_shares"], tuple(described["kinds_learnt"]), told)
        running = RunningOdds()
        if "running" in described:
            running = RunningOdds.from_files(files, arrays, described["running"])
        return cls(texts, described["blend"], Isotonic.from_arrays(arrays, "map_"), kinds, running, described["facts"])


def labelled(table: JobTable) -> Bools:
    """Jobs whose end says how they went: they started, ended, and their state is known."""
    known = ~table.frame["state"].is_in(["UNKNOWN", "RUNNING", "PENDING"]).fill_null(True).to_numpy()
    return known & (table.start <= table.end) & (table.end < NEVER)


def _matrix_of_rows(history: JobHistory, rows: NDArray[np.int64]) -> Matrix:
    part = JobTable(history.table.frame[rows])
    return failure_matrix(part, history, part.submit)


def _blended(told: Floats, rate: Floats, weight: float) -> Floats:
    """Weighted mean of two probabilities in log odds."""
    if weight >= 1.0:
        return told
    if weight <= 0.0:
        return rate
    log_odds = weight * _log_odds(told) + (1 - weight) * _log_odds(rate)
    return 1.0 / (1.0 + np.exp(-log_odds))


def _log_odds(probability: Floats) -> Floats:
    inside = np.clip(probability, _EDGE, 1 - _EDGE)
    return np.log(inside / (1 - inside))

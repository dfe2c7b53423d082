"""Job failure: the probability that a job ends badly, from what is known at submit.

Badly: FAILED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY and the like; a cancelled job has not failed. Gradient-boosted trees,
calibrated on released jobs, or the rolling rate of the same key where that did better. Here belongs this forecaster and
its baseline; not the features (`features/jobs.py`).
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
from features.jobs import FEATURES, RECENT, feature_matrix, microseconds, moments_of
from models.arrays import pack_arrays, unpack_arrays
from models.calibration import MIN_ROWS, Isotonic
from models.runtime import HOLDOUT_SHARE, MAX_HOLDOUT, MAX_LABELS, TooFewJobsError, check_features, matrix_of_rows
from models.scoring import brier

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

_PRIOR_ROWS = 4.0  # of the wider group, counted with the narrower one
_OVERALL_RATE = 0.3  # before anything is known
_RATE_GROUPS = ("all", "user", "key")
ROUNDS = 200
_PARAMETERS: dict[str, Any] = {
    "objective": "binary", "learning_rate": 0.05, "num_leaves": 31, "min_data_in_leaf": 40, "feature_fraction": 0.3,
    "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 5.0, "max_bin": 127, "verbosity": -1,
    "deterministic": True, "force_row_wise": True,
}  # fmt: skip


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
        booster_text: LightGBM model as text, None while the rolling rate speaks.
        map: From raw to calibrated probability.
        facts: What the fit saw and chose, for the card.
    """

    booster_text: str | None
    map: Isotonic
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def rate(cls) -> FailureForecaster:
        """The one in charge before any model: the rolling rate."""
        return cls(None, Isotonic.identity(), {"expert": "rolling_rate"})

    @classmethod
    def fit(
        cls, history: pl.DataFrame | JobHistory, at: datetime | int, *, features: Matrix | None = None, seed: int = 1,
        threads: int = 1, rounds: int = ROUNDS, max_labels: int = MAX_LABELS,
    ) -> FailureForecaster:  # fmt: skip
        """Train on the jobs that ended before a moment.

        Args:
            history: Canonical jobs; what happened after `at` changes nothing.
            at: The moment of training.
            features: Feature matrix of all rows of `history` at their submits, when it is at hand.
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
        X = features[rows] if features is not None else matrix_of_rows(prepared, rows, threads)
        bad = table.is_bad[rows]
        first = int(len(rows) * (1 - HOLDOUT_SHARE))
        held = np.arange(first, len(rows))
        if len(held) > MAX_HOLDOUT:
            held = np.sort(generator.choice(held, MAX_HOLDOUT, replace=False))
        early = np.flatnonzero(table.end[rows] < table.submit[rows[first]])
        if len(early) < MIN_ROWS:
            early = np.arange(first)
        facts: dict[str, Any] = {
            "rows": len(rows), "holdout_rows": len(held), "seed": seed, "rounds": rounds,
            "base_rate": float(bad.mean()),
        }  # fmt: skip
        rate = rolling_rate(X[held])
        losses = {"rolling_rate": float(brier(rate, bad[held]).mean())}
        is_model = False
        mapped = Isotonic.identity()
        if 0 < bad[early].sum() < len(early):
            raw = _boost(X[early], bad[early], seed, threads, rounds).predict(X[held], num_threads=threads)
            # The map is learnt on one half and judged on the other, then learnt again on both.
            odd = np.arange(len(held)) % 2 == 1
            judged = Isotonic.fit(raw[odd], bad[held][odd]).apply(raw[~odd])
            losses["model"] = float(brier(judged, bad[held][~odd]).mean())
            losses["rolling_rate"] = float(brier(rate[~odd], bad[held][~odd]).mean())
            is_model = losses["model"] < losses["rolling_rate"]
            mapped = Isotonic.fit(raw, bad[held])
        facts |= {"holdout_brier": losses, "expert": "model" if is_model else "rolling_rate"}
        if not is_model:
            return cls(None, Isotonic.fit(rate, bad[held]), facts)
        booster = _boost(X, bad, seed, threads, rounds)
        return cls(booster.model_to_string(), mapped, facts)

    def probability(self, X: Matrix) -> Floats:
        """Calibrated P(bad end) from features, shape (n,)."""
        if not len(X):
            return np.empty(0)
        if self.booster_text is None:
            return self.map.apply(rolling_rate(X))
        return self.map.apply(_booster(self.booster_text).predict(X, num_threads=1))

    def forecast(
        self, jobs: pl.DataFrame, history: pl.DataFrame | JobHistory, at: datetime | None = None
    ) -> pl.DataFrame:
        """P(bad end) of jobs at a moment (None: each job's submit time): column `p_fail`, in the jobs' order."""
        table = JobTable(jobs)
        X = feature_matrix(table, JobHistory.of(history), moments_of(table, at))
        return pl.DataFrame({"p_fail": self.probability(X)})

    def to_files(self) -> dict[str, bytes]:
        """The forecaster as files without code."""
        described = {"features": list(FEATURES), "facts": self.facts}
        files = {
            "job_failure.json": json.dumps(described, indent=1, sort_keys=True).encode(),
            "job_failure.npz": pack_arrays(self.map.to_arrays("map_")),
        }
        return files | ({"job_failure.txt": self.booster_text.encode()} if self.booster_text else {})

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> FailureForecaster:
        """The forecaster from its files.

        Raises:
            ValueError: It was trained on other features than this version computes.
        """
        described = json.loads(files["job_failure.json"])
        check_features(described["features"], FEATURES)
        text = files["job_failure.txt"].decode() if "job_failure.txt" in files else None
        arrays = unpack_arrays(files["job_failure.npz"], "map_raw", "map_calibrated")
        return cls(text, Isotonic.from_arrays(arrays, "map_"), described["facts"])


def labelled(table: JobTable) -> NDArray[np.bool_]:
    """Jobs whose end says how they went: they started, ended, and their state is known."""
    known = ~table.frame["state"].is_in(["UNKNOWN", "RUNNING", "PENDING"]).fill_null(True).to_numpy()
    return known & (table.start <= table.end) & (table.end < NEVER)


def _boost(X: Matrix, bad: NDArray[np.bool_], seed: int, threads: int, rounds: int) -> Any:
    import lightgbm

    parameters = _PARAMETERS | {"seed": seed, "num_threads": threads}
    data = lightgbm.Dataset(
        X, label=bad.astype(np.float64), params={"max_bin": _PARAMETERS["max_bin"], "verbosity": -1}
    )
    return lightgbm.train(parameters, data, num_boost_round=rounds)


_boosters: dict[str, Any] = {}


def _booster(text: str) -> Any:
    """A parsed model, the newest few kept: parsing takes longer than a forecast."""
    if text not in _boosters:
        import lightgbm

        while len(_boosters) >= 4:
            _boosters.pop(next(iter(_boosters)))
        _boosters[text] = lightgbm.Booster(model_str=text)
    return _boosters[text]

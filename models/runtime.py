"""Runtime of a job: a predictive distribution at submit, and of the time left while it runs.

Two forests, one of ln(runtime) and one of ln(runtime ÷ limit), the user's own most alike jobs and those of the key are
pooled into one distribution; how much each weighs is learnt from released jobs, as is whether keyed recency should
speak instead. Here belongs this forecaster; not the features (`features/jobs.py`), the weights (`models/mixture.py`),
the baselines (`models/recency.py`) or who is champion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.jobs import FEATURES, feature_matrix, microseconds, moments_of
from features.vocabulary import QUANTILES
from models.arrays import pack_arrays, unpack_arrays
from models.calibration import MIN_ROWS, Conformal
from models.contributions import Contributions, Steps, of_mixture, of_recency
from models.curves import CENTRE_GAINS, MEDIAN, centred, quantile_frame, read_seconds
from models.forest import Forest, ForestSize
from models.grace import Grace
from models.mixture import Mix, choose_mix, pooled, weights
from models.recency import KeyedRecency, stratum
from models.runtime_choice import choose_centre, choose_expert, day_blocks, is_young, median_loss, snapped_curves
from models.runtime_experts import Experts
from models.time_left import LandmarkForests, left_s, remaining_frame

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

MAX_LABELS = 200_000
HOLDOUT_SHARE = 0.15  # newest released jobs that weights, choice of expert and calibration are learnt from
MAX_HOLDOUT = 5_000
TICK_S = 0.5  # clocks of schedulers count whole seconds


class TooFewJobsError(ValueError):
    """There are not enough released outcomes to train on; the message gives both numbers."""


@dataclass(frozen=True, slots=True)
class RuntimeForecaster:
    """Forecasts runtimes of one cluster.

    Attributes:
        experts: The forests.
        mix: Weights of the forests, the like jobs and those of the key.
        recency: Keyed recency, which speaks for the strata where it did better.
        is_recency: By stratum (`STRATA`): keyed recency speaks.
        conformal: Correction of the pooled curves.
        is_snapped: Medians near a past runtime of the key or user are moved onto it.
        centre: Index into `CENTRE_GAINS` of the points that stand for the medians; −1: the medians themselves.
        facts: What the fit saw and chose, for the card.
        usual_log: Median ln(runtime) of the jobs trained on, that contributions start from; None: not kept.
        landmarks: Forests of the time left while running; None: too few jobs ran so long, or not kept.
        grace: How far runs go past their limit.
    """

    experts: Experts
    mix: Mix
    recency: KeyedRecency
    is_recency: NDArray[np.bool_]
    conformal: Conformal
    is_snapped: bool = False
    centre: int = -1
    facts: dict[str, Any] = field(default_factory=dict)
    usual_log: float | None = None
    landmarks: LandmarkForests | None = None
    grace: Grace = field(default_factory=Grace.none)

    @classmethod
    def fit(
        cls, history: pl.DataFrame | JobHistory, at: datetime | int, *, features: Matrix | None = None,
        seed: int = 1, threads: int = 1, size: ForestSize | None = None, max_labels: int = MAX_LABELS,
    ) -> RuntimeForecaster:  # fmt: skip
        """Train on the jobs that ended before a moment.

        Args:
            history: Canonical jobs; what happened after `at` changes nothing.
            at: The moment of training; a datetime or microseconds UTC.
            features: Feature matrix of all rows of `history` at their submits, when it is at hand; else computed.
            seed: Seed of every random choice.
            threads: Threads of the fit; they change nothing but the time.
            size: Size of the forests.
            max_labels: Outcomes trained on at most, drawn at random.

        Raises:
            TooFewJobsError: Fewer than `MIN_ROWS` jobs had ended.
        """
        size = size or ForestSize()
        prepared = JobHistory.of(history)
        table = prepared.table
        moment = microseconds(at)
        rows = np.flatnonzero(table.has_run & (table.end < moment))
        if len(rows) < MIN_ROWS:
            raise TooFewJobsError(f"{len(rows)} jobs had ended, {MIN_ROWS} are needed")
        generator = np.random.default_rng(seed)
        rows = rows[np.lexsort((table.end[rows], table.submit[rows]))]
        if len(rows) > max_labels:
            rows = rows[np.sort(generator.choice(len(rows), max_labels, replace=False))]
        X = features[rows] if features is not None else matrix_of_rows(prepared, rows, threads)
        y, limit_log = prepared.log_runtime[rows], np.log(table.limit_s[rows])

        first = int(len(rows) * (1 - HOLDOUT_SHARE))
        cut = table.submit[rows[first]]
        held = np.arange(first, len(rows))
        if len(held) > MAX_HOLDOUT:
            held = np.sort(generator.choice(held, MAX_HOLDOUT, replace=False))
        early = np.flatnonzero(table.end[rows] < cut)
        recency = KeyedRecency.fit(X, y, held)
        half = ForestSize(max(10, size.trees // 2), size.min_leaf, size.feature_share, size.rows_per_tree)
        if len(early) < MIN_ROWS:
            early = np.arange(first)
        trial = Experts.fit(X[early], y[early], limit_log[early], half, seed=seed, threads=threads)
        samples = trial.samples(X[held], limit_log[held])
        blocks = day_blocks(prepared.group("user")[rows[held]], table.submit[rows[held]])
        mix, losses = choose_mix(samples, X[held], y[held], table.limit_s[rows[held]], blocks)
        made = pooled(samples, X[held], mix, table.limit_s[rows[held]])
        grace = Grace.fit(table.runtime_s[rows], table.limit_s[rows], table.end[rows])
        over = grace.past_limit(made.curves, table.limit_s[rows[held]])
        conformal = Conformal.fit(over, y[held], blocks, tick_s=TICK_S)
        centre = choose_centre(made, y[held])
        curves = made.curves if centre < 0 else centred(made.curves, made.centres[:, centre])
        snapped = snapped_curves(curves, X[held])
        is_snapped = bool(median_loss(snapped, y[held]) < median_loss(curves, y[held]))
        curves = snapped if is_snapped else curves
        young = is_young(table, moment)
        is_recency, choice = choose_expert(curves, recency, X[held], y[held], young)
        experts = Experts.fit(X, y, limit_log, size, seed=seed, threads=threads, ratio_weight=mix.ratio)
        facts = {
            "rows": len(rows), "holdout_rows": len(held), "seed": seed, "size": asdict(size), "mix": asdict(mix),
            "centre": centre, "is_snapped": is_snapped, "holdout_male": losses, "expert": choice,
            "recency": recency.name, "recency_male": dict(recency.losses), "is_young": young,
        }  # fmt: skip
        landmarks = LandmarkForests.fit(prepared, rows, size=size, seed=seed, threads=threads)
        usual_log = float(np.median(y))
        return cls(experts, mix, recency, is_recency, conformal, is_snapped, centre, facts, usual_log, landmarks, grace)

    def curves(self, X: Matrix, limit_s: Floats) -> Floats:
        """Quantile curves, ln(seconds), of shape (n, levels), from features and limits (NaN: none)."""
        return self.distribution(X, limit_s)[0]

    def distribution(self, X: Matrix, limit_s: Floats) -> tuple[Floats, Floats]:
        """The curves, and the points that most weight lies within 25 % of, ln(seconds), shape (n,)."""
        if not len(X):
            return np.empty((0, len(self.conformal.levels))), np.empty(0)
        steps = self._steps(self.experts.samples(X, np.log(limit_s)), X, limit_s)
        return steps.curves, np.where(steps.is_keyed, steps.curves[:, MEDIAN], steps.modes)

    def contributions(self, X: Matrix, limit_s: Floats) -> Contributions:
        """What makes each median, from features and limits (NaN: none)."""
        return self.explained(X, limit_s)[1]

    def explained(self, X: Matrix, limit_s: Floats) -> tuple[Floats, Contributions]:
        """`curves` and `contributions`, for little more than the cost of the curves."""
        curves, _, told = self.distribution_explained(X, limit_s)
        return curves, told

    def distribution_explained(self, X: Matrix, limit_s: Floats) -> tuple[Floats, Floats, Contributions]:
        """`distribution` and `contributions`, for little more than the cost of the curves."""
        usual = np.full(len(X), np.nan if self.usual_log is None else self.usual_log)
        if not len(X):
            return *self.distribution(X, limit_s), of_recency(self.recency, X, usual)
        samples, run, ratio = self.experts.explained(X, np.log(limit_s))
        steps = self._steps(samples, X, limit_s)
        made = of_mixture(samples, weights(X, self.mix, samples), (run, ratio), steps, X, limit_s, usual)
        keyed = of_recency(self.recency, X, usual)
        modes = np.where(steps.is_keyed, steps.curves[:, MEDIAN], steps.modes)
        return steps.curves, modes, made.where(~steps.is_keyed, keyed).ending_at(steps.curves[:, MEDIAN])

    def _steps(self, samples: list[NDArray[Any]], X: Matrix, limit_s: Floats) -> Steps:
        """The way from samples to the curves."""
        made = pooled(samples, X, self.mix, limit_s, CENTRE_GAINS if self.centre >= 0 else ())
        corrected = self.conformal.apply(self.grace.past_limit(made.curves, limit_s))
        corrected = corrected if self.centre < 0 else centred(corrected, made.centres[:, self.centre])
        snapped = snapped_curves(corrected, X) if self.is_snapped else corrected
        is_keyed = self.is_recency[stratum(X)]
        curves = self.grace.past_limit(np.where(is_keyed[:, None], self.recency.curves(X), snapped), limit_s)
        medians = (made.curves[:, MEDIAN], corrected[:, MEDIAN], snapped[:, MEDIAN])
        return Steps(*medians, is_keyed, curves, made.modes)

    def forecast(
        self, jobs: pl.DataFrame, history: pl.DataFrame | JobHistory, at: datetime | None = None
    ) -> pl.DataFrame:
        """Quantiles of runtime.

        Args:
            jobs: Jobs asked about, canonical columns.
            history: Jobs of the cluster as known now.
            at: The moment; None for each job's submit time.

        Returns:
            Columns `QUANTILE_COLUMNS`, seconds, one row per job in order; never crossing; up to the median never
            above the limit, the higher ones no further above it than `grace` knows.
        """
        table = JobTable(jobs)
        X = feature_matrix(table, JobHistory.of(history), moments_of(table, at))
        return self.quantiles(X, table.limit_s)

    def quantiles(self, X: Matrix, limit_s: Floats) -> pl.DataFrame:
        """`forecast` from features that are at hand."""
        return quantile_frame(read_seconds(self.curves(X, limit_s), QUANTILES, limit_s))

    def remaining(self, jobs: pl.DataFrame, history: pl.DataFrame | JobHistory, at: datetime) -> pl.DataFrame:
        """Quantiles of the time left of running jobs at a moment (`models/time_left.py`).

        Returns:
            Columns `QUANTILE_COLUMNS`, seconds; null for a job that has not started by then.
        """
        table, prepared = JobTable(jobs), JobHistory.of(history)
        X = feature_matrix(table, prepared, moments_of(table, at))
        curves = self.curves(X, table.limit_s)
        return remaining_frame(curves, X, table, prepared, microseconds(at), self.landmarks, self.grace)

    def left_s(
        self, X: Matrix, table: JobTable, history: JobHistory, moments: NDArray[np.int64],
        levels: Sequence[float] = QUANTILES,
    ) -> Floats:  # fmt: skip
        """Quantiles of the time left of running jobs, each at its own moment.

        Args:
            X: Features at the moments, shape (n, len(FEATURES)).
            table: The jobs, all of them running at their moment.
            history: Jobs of the cluster.
            moments: µs UTC, shape (n,).
            levels: Levels asked for.

        Returns:
            Seconds, shape (n, len(levels)).
        """
        curves = self.curves(X, table.limit_s)
        return left_s(curves, X, table, history, moments, self.landmarks, self.grace, levels)

    def to_files(self) -> dict[str, bytes]:
        """The forecaster as files without code."""
        arrays = self.conformal.to_arrays("conformal_")
        for name, forest in (("run", self.experts.run), ("ratio", self.experts.ratio)):
            arrays |= forest.to_arrays(f"{name}_") if forest else {}
        arrays |= self.landmarks.to_arrays("left_") if self.landmarks else {}
        arrays |= {"grace": self.grace.overruns_s, "grace_shares": self.grace.shares}
        described = {
            "features": list(FEATURES), "mix": asdict(self.mix), "is_recency": self.is_recency.tolist(),
            "is_snapped": self.is_snapped, "centre": self.centre,
            "usual_limit_log": _finite(self.experts.usual_limit_log),
            "highest_limit_log": _finite(self.experts.highest_limit_log),
            "recency": self.recency.to_json(), "facts": self.facts, "usual_log": self.usual_log,
        }  # fmt: skip
        return {
            "runtime.json": json.dumps(described, indent=1, sort_keys=True).encode(),
            "runtime.npz": pack_arrays(arrays),
        }

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> RuntimeForecaster:
        """The forecaster from its files.

        Raises:
            ValueError: It was trained on other features than this version computes.
        """
        described = json.loads(files["runtime.json"])
        check_features(described["features"], FEATURES)
        arrays = unpack_arrays(files["runtime.npz"], "conformal_levels")
        run = Forest.from_arrays(arrays, "run_") if "run_roots" in arrays else None
        ratio = Forest.from_arrays(arrays, "ratio_") if "ratio_roots" in arrays else None
        usual, highest = described["usual_limit_log"], described.get("highest_limit_log")  # None: not kept
        limits_log = np.nan if usual is None else usual, np.inf if highest is None else highest
        return cls(
            Experts(run, ratio, *limits_log), Mix(**described["mix"]),
            KeyedRecency.from_json(described["recency"]), np.asarray(described["is_recency"], dtype=bool),
            Conformal.from_arrays(arrays, "conformal_"), described["is_snapped"],
            described.get("centre", -1), described["facts"], described.get("usual_log"),
            LandmarkForests.from_arrays(arrays, "left_"),
            Grace(arrays.get("grace", np.empty(0)), arrays.get("grace_shares", np.empty(0))),
        )  # fmt: skip


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def check_features(saved: list[str], present: tuple[str, ...]) -> None:
    """Refuse a model whose features are not those computed here.

    Raises:
        ValueError: Names the first that differs.
    """
    if tuple(saved) != present:
        odd = sorted(set(saved) ^ set(present))
        raise ValueError(
            f"model was trained on other features ({', '.join(odd[:5]) or 'another order'}): train it again"
        )


def matrix_of_rows(history: JobHistory, rows: NDArray[np.int64], threads: int = 1) -> Matrix:
    """Features of rows of a history at their own submits."""
    table = JobTable(history.table.frame[rows])
    return feature_matrix(table, history, table.submit, threads)

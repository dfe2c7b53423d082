"""Queue wait: a predictive distribution of the time until a waiting job starts, and the odds of soon.

A forest of ln(wait) on the state of the queue, read from the newest outcomes in its leaves and corrected on released
jobs, or the newest waits of like jobs where those
did better. Waits are counted from the moment of the forecast, so training holds moments at submit and moments later in
the wait. Here belongs this forecaster and its baselines; not the features (`features/job_queue.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import NEVER, JobHistory, JobTable
from features.job_queue import WAIT_FEATURES, wait_matrix
from features.jobs import microseconds, moments_of
from features.recent_waits import RECENT_LEVELS
from features.vocabulary import QUANTILES
from models.arrays import pack_arrays, unpack_arrays
from models.calibration import MIN_ROWS, Conformal
from models.curves import LEVELS, level_of, quantile_frame, read_levels, remaining_s, rising
from models.forest import ForestSize
from models.runtime import HOLDOUT_SHARE, MAX_HOLDOUT, TooFewJobsError, check_features
from models.scoring import log_pinball
from models.wait_odds import odds_upto, with_waiting
from models.wait_points import WITHIN_S, likeliest_s
from models.wait_trees import WaitTrees

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

SOON_S = (60, 600, 3600)
SOON_COLUMNS = tuple(f"p_start_{seconds}s" for seconds in SOON_S)
BASELINES = ("zero", "last", "same_size_last")
MAX_LABELS = 60_000
_RECENT = [WAIT_FEATURES.index(f"recent_q{round(100 * level):02d}") for level in RECENT_LEVELS]
_LAST, _SAME_LAST = WAIT_FEATURES.index("all_last"), WAIT_FEATURES.index("size_last")
_ELAPSED, _HOUR = WAIT_FEATURES.index("elapsed"), WAIT_FEATURES.index("hour")
SIZE = ForestSize(trees=50, min_leaf=10)
SOON = np.log(np.array(SOON_S, dtype=np.float64))
TRUSTS = (0.0, 0.5, 1.0)  # how far boosted odds may move the forest's
_LANDMARK_FROM_S = 30.0  # jobs that waited longer are also asked about in the middle of their wait


def baseline_s(name: str, X: Matrix) -> Floats:
    """Point forecast of a baseline in seconds, shape (n,): no wait, the newest wait of any job, of a same-sized job.

    Raises:
        ValueError: There is no such baseline; the message lists them.
    """
    if name not in BASELINES:
        raise ValueError(f"no baseline {name!r}; baselines: {', '.join(BASELINES)}")
    last = np.nan_to_num(np.exp(X[:, _LAST].astype(np.float64)), nan=1.0)
    same = np.exp(X[:, _SAME_LAST].astype(np.float64))
    whole = {"zero": np.ones(len(X)), "last": last, "same_size_last": np.where(np.isnan(same), last, same)}[name]
    return np.where(whole <= 1.0, 0.0, np.maximum(whole - _elapsed_s(X), 0.0))


def recent_curves(X: Matrix) -> Floats:
    """Curves of the newest waits of like jobs, less what has been waited; ln(seconds), shape (n, len(LEVELS))."""
    values = np.nan_to_num(X[:, _RECENT].astype(np.float64), nan=0.0)
    position = np.interp(LEVELS, RECENT_LEVELS, np.arange(len(RECENT_LEVELS)))
    low = np.floor(position).astype(np.int64)
    high = np.minimum(low + 1, len(RECENT_LEVELS) - 1)
    whole = rising(values[:, low] + (position - low) * (values[:, high] - values[:, low]))
    elapsed = _elapsed_s(X)
    left = remaining_s(whole, elapsed, np.full(len(X), np.nan), LEVELS.tolist())
    return np.where((elapsed > 0)[:, None], np.log(np.maximum(left, 1.0)), whole)


@dataclass(frozen=True, slots=True)
class WaitForecaster:
    """Forecasts queue waits of one cluster.

    Attributes:
        trees: What tells a wait, None while the newest waits speak.
        conformal: Correction of the curves.
        facts: What the fit saw and chose, for the card.
        by_clock: The likeliest point takes long waits of like jobs for starts at the same time of day.
    """

    trees: WaitTrees | None
    conformal: Conformal
    facts: dict[str, Any] = field(default_factory=dict)
    by_clock: bool = False

    @classmethod
    def recent(cls) -> WaitForecaster:
        """The one in charge before any model: the newest waits of like jobs."""
        return cls(None, Conformal.identity(), {"expert": "recent_waits"})

    @classmethod
    def fit(
        cls, history: pl.DataFrame | JobHistory, at: datetime | int, *, features: Matrix | None = None, seed: int = 1,
        threads: int = 1, size: ForestSize | None = None, max_labels: int = MAX_LABELS,
    ) -> WaitForecaster:  # fmt: skip
        """Train on the jobs that started before a moment.

        Args:
            history: Canonical jobs; what happened after `at` changes nothing.
            at: The moment of training.
            features: `wait_matrix` of all rows of `history` at their submits, when it is at hand.
            seed: Seed of every random choice.
            threads: Threads of the fit; they change nothing but the time.
            size: Size of the forest.
            max_labels: Jobs trained on at most, drawn at random.

        Raises:
            TooFewJobsError: Fewer than `MIN_ROWS` jobs had started.
        """
        size = size or SIZE
        prepared = JobHistory.of(history)
        table = prepared.table
        moment = microseconds(at)
        rows = np.flatnonzero((table.start != NEVER) & (table.start < moment))
        if len(rows) < MIN_ROWS:
            raise TooFewJobsError(f"{len(rows)} jobs had started, {MIN_ROWS} are needed")
        generator = np.random.default_rng(seed)
        rows = rows[np.lexsort((table.start[rows], table.submit[rows]))]
        share = min(1.0, max_labels / len(rows))  # of the outcomes that is learnt from
        if len(rows) > max_labels:
            rows = rows[np.sort(generator.choice(len(rows), max_labels, replace=False))]
        submit, start = table.submit[rows], table.start[rows]
        wait_s = table.wait_s[rows]
        X = features[rows] if features is not None else matrix_of_waits(prepared, rows, submit)
        y = np.log(np.maximum(wait_s, 1.0))
        late = np.flatnonzero(wait_s > _LANDMARK_FROM_S)
        spread = np.exp(generator.random(len(late)) * np.log(np.maximum(wait_s[late], 1.0)))
        landmark = submit[late] + (spread * 1e6).astype(np.int64)
        late, landmark = late[landmark < start[late]], landmark[landmark < start[late]]
        X_late = matrix_of_waits(prepared, rows[late], landmark)
        y_late = np.log(np.maximum((start[late] - landmark) / 1e6, 1.0))

        first = int(len(rows) * (1 - HOLDOUT_SHARE))
        cut = submit[first]
        held = np.arange(first, len(rows))
        if len(held) > MAX_HOLDOUT:
            held = np.sort(generator.choice(held, MAX_HOLDOUT, replace=False))
        early = np.flatnonzero(start < cut)
        if len(early) < MIN_ROWS:
            early = np.arange(first)
        is_early = np.isin(late, early)
        half = ForestSize(max(10, size.trees // 2), size.min_leaf, size.feature_share, size.rows_per_tree)

        def grown(a: NDArray[np.int64], b: NDArray[np.int64], of: ForestSize, when: int) -> WaitTrees:
            """Trees on rows `a` at their submits and on rows `late[b]` in the middle of their waits."""
            matrix, waits = np.concatenate([X[a], X_late[b]]), np.concatenate([y[a], y_late[b]])
            started = np.concatenate([start[a], start[late[b]]])
            return WaitTrees.fit(matrix, waits, started, when, of, seed=seed, threads=threads)

        trial = grown(early, np.flatnonzero(is_early), half, int(cut))
        still = np.flatnonzero((table.submit >= cut) & (table.submit < moment))
        still = still[(table.start[still] >= moment) & (table.end[still] >= moment)]
        most = int(len(still) * share * len(held) / max(len(rows) - first, 1) + 0.5)
        still = np.sort(generator.choice(still, most, replace=False)) if most < len(still) else still
        waited_s = (moment - table.submit[still]) / 1e6
        X_still = features[still] if features is not None else matrix_of_waits(prepared, still, table.submit[still])
        X_held = np.concatenate([X[held], X_still])
        y_held = np.concatenate([y[held], np.log(np.maximum(waited_s, 1.0))])
        is_done = np.arange(len(y_held)) < len(held)
        waits_held = np.exp(y_held)

        def loss(curves: Floats) -> float:
            return float(log_pinball(np.exp(curves[is_done]), waits_held[is_done], LEVELS).mean())

        trials = dict(zip(TRUSTS, trial.draws(X_held, TRUSTS), strict=True))
        by_trust = {trust: loss(drawn.curves()) for trust, drawn in trials.items()}
        trust = min(by_trust, key=lambda trust: by_trust[trust])
        drawn, curves = trials[trust], trials[trust].curves()
        level = level_of(curves, y_held)
        y_full = y_held.copy()
        y_full[~is_done] = with_waiting(level[is_done], level[~is_done], curves[~is_done], y_held[~is_done], generator)
        conformal = Conformal.fit(curves, y_full)
        curves, recent = conformal.apply(curves), recent_curves(X_held)
        losses = {"model": loss(curves), "recent_waits": loss(recent)}
        is_model = losses["model"] < losses["recent_waits"]
        hits = {
            name: float((np.abs(points - waits_held) <= WITHIN_S + 0.5)[is_done].mean())
            for name, points in (("wait", drawn.likeliest_s()), ("clock", drawn.likeliest_s(_clock_s(X_held))))
        }
        facts = {
            "rows": len(rows), "landmarks": len(late), "holdout_rows": len(held), "waiting_rows": len(still),
            "seed": seed, "size": asdict(size), "holdout_pinball": losses, "holdout_within_60s": hits,
            "holdout_by_trust": {str(trust): value for trust, value in by_trust.items()},
            "expert": "model" if is_model else "recent_waits",
        }  # fmt: skip
        if not is_model:
            return cls(None, Conformal.identity(), facts)
        whole = grown(np.arange(len(rows)), np.arange(len(late)), size, moment)
        return cls(replace(whole, trust=trust), conformal, facts, hits["clock"] > hits["wait"])

    def curves(self, X: Matrix) -> Floats:
        """Quantile curves of the wait from now, ln(seconds), shape (n, len(LEVELS)); no wait is one second."""
        return self._told(X)[0]

    def _told(self, X: Matrix, *, with_point: bool = False) -> tuple[Floats, Floats]:
        """Curves, and the likeliest points where they are asked for."""
        if not len(X):
            return np.empty((0, len(LEVELS))), np.empty(0)
        if self.trees is None:
            curves = recent_curves(X)
            return curves, likeliest_s(curves) if with_point else np.empty(0)
        drawn = self.trees.draw(X)
        points = drawn.likeliest_s(_clock_s(X) if self.by_clock else None) if with_point else np.empty(0)
        return np.maximum(self.conformal.apply(drawn.curves()), 0.0), points

    def frame(self, X: Matrix, *, with_point: bool = True) -> pl.DataFrame:
        """Quantiles, odds and, unless told otherwise, the likeliest point (`likeliest_s`) from features at hand.

        Odds are read off the curves whose quantiles are told: the quantile of a level is within 60, 600 or 3,600 s just
        where the odds of a start by then reach the level.
        """
        curves, points = self._told(X, with_point=with_point)
        seconds = np.exp(read_levels(curves, QUANTILES))
        frame = quantile_frame(np.where(seconds <= 1.0 + 1e-9, 0.0, seconds))
        frame = frame.hstack(pl.from_numpy(odds_upto(curves, SOON), schema=list(SOON_COLUMNS)))
        return frame.with_columns(likeliest_s=points) if with_point else frame

    def forecast(
        self, jobs: pl.DataFrame, history: pl.DataFrame | JobHistory, at: datetime | None = None
    ) -> pl.DataFrame:
        """Wait from a moment until the start.

        Args:
            jobs: Waiting jobs, canonical columns.
            history: Jobs of the cluster as known now, pending and running ones included.
            at: The moment; None for each job's submit time.

        Returns:
            Columns `QUANTILE_COLUMNS` (seconds from the moment) and `p_start_60s`, `p_start_600s`, `p_start_3600s`
            and `likeliest_s`, the point that most probability lies around within a minute.
        """
        table = JobTable(jobs)
        return self.frame(wait_matrix(table, JobHistory.of(history), moments_of(table, at)))

    def to_files(self) -> dict[str, bytes]:
        """The forecaster as files without code."""
        arrays = self.conformal.to_arrays("conformal_")
        described: dict[str, Any] = {"features": list(WAIT_FEATURES), "facts": self.facts, "by_clock": self.by_clock}
        files = {}
        if self.trees is not None:
            arrays |= self.trees.to_arrays()
            if self.trees.boosted is not None:
                described |= {"boosted_classes": list(self.trees.boosted.classes), "trust": self.trees.trust}
                files = {"wait_odds.txt": self.trees.boosted.text.encode()}
        told = json.dumps(described, indent=1, sort_keys=True).encode()
        return files | {"wait.json": told, "wait.npz": pack_arrays(arrays)}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> WaitForecaster:
        """The forecaster from its files.

        Raises:
            ValueError: It was trained on other features than this version computes.
        """
        described = json.loads(files["wait.json"])
        check_features(described["features"], WAIT_FEATURES)
        arrays = unpack_arrays(files["wait.npz"], "conformal_levels")
        trees = WaitTrees.from_files(arrays, described, files) if "forest_roots" in arrays else None
        return cls(trees, Conformal.from_arrays(arrays, "conformal_"), described["facts"], described["by_clock"])


def matrix_of_waits(history: JobHistory, rows: NDArray[np.int64], moments: NDArray[np.int64]) -> Matrix:
    """Features of rows of a history at the given moments."""
    return wait_matrix(JobTable(history.table.frame[rows]), history, moments)


def _elapsed_s(X: Matrix) -> Floats:
    return np.expm1(X[:, _ELAPSED].astype(np.float64))


def _clock_s(X: Matrix) -> Floats:
    """Time of day of each moment, seconds."""
    return X[:, _HOUR].astype(np.float64) * 3600

"""Which bad end: P(timeout), P(node failure) and P(out of memory) as shares of P(bad end).

They can never exceed it together; what is left is a failure of the job's own. Here belong kinds of bad ends; not
P(bad end) itself (`models/failure.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobTable
from features.job_outcomes import FAILURE_FEATURES, KINDS, NEWEST
from models.boosting import booster_of, grow
from models.scoring import brier

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

KIND_NAMES = tuple(name for name, _ in KINDS)
KIND_COLUMNS = tuple(f"p_{name}" for name in KIND_NAMES)  # p_timeout, p_node_failure, p_out_of_memory
OTHER = len(KINDS)  # class of every other bad end
MIN_KIND_ROWS = 40  # a kind with fewer has the same share everywhere
KIND_ROUNDS = 40
_PARAMETERS: dict[str, Any] = {"num_leaves": 7, "min_data_in_leaf": 40, "lambda_l2": 20.0}
_PRIOR_ROWS = 4.0
_ROLLING = {KIND_NAMES.index("timeout"): "timeouts", KIND_NAMES.index("out_of_memory"): "out_of_memories"}
_ROLLING_WEIGHT = 0.5
_NEVER_SEEN = 1e-4  # share of a kind that never came; kept off zero


def kind_of(table: JobTable) -> NDArray[np.int64]:
    """Class of each row's state as a bad end: a position in `KINDS`, or `OTHER`; shape (n,)."""
    states = table.frame["state"]
    found = np.full(table.count, OTHER, dtype=np.int64)
    for number, (_, held) in enumerate(KINDS):
        found[states.is_in(held).fill_null(False).to_numpy()] = number
    return found


def rolling_shares(X: Matrix) -> Floats:
    """The baseline: shares among the newest bad ends of the same key, leaning on everyone's; shape (n, len(KINDS))."""
    found = np.zeros((len(X), len(KINDS)))
    for number, column in _ROLLING.items():
        share = np.zeros(len(X))
        for group in ("all", "key"):
            at = {
                name: X[:, FAILURE_FEATURES.index(f"ended_{group}_{name}")].astype(np.float64)
                for name in (column, "bad_30", "ends")
            }
            rows = np.minimum(np.expm1(np.nan_to_num(at["ends"])), NEWEST)
            bad, hits = np.nan_to_num(at["bad_30"]) * rows, np.nan_to_num(at[column]) * rows
            share = np.minimum((hits + _PRIOR_ROWS * share) / (np.maximum(bad, hits) + _PRIOR_ROWS), 1.0)
        found[:, number] = share
    return found


@dataclass(frozen=True, slots=True)
class KindShares:
    """Shares of the kinds among bad ends.

    Attributes:
        shares: Of each kind and of others over all jobs learnt from, shape (len(KINDS) + 1,), sums to one.
        learnt: Classes the booster tells apart, in its order; the rest keep their share.
        booster_text: LightGBM model as text, None where there is nothing to tell apart.
    """

    shares: Floats
    learnt: tuple[int, ...]
    booster_text: str | None

    @classmethod
    def unknown(cls) -> KindShares:
        """Before any bad end was seen: nearly all are others."""
        shares = np.full(len(KINDS) + 1, _NEVER_SEEN)
        shares[OTHER] = 1 - shares[:OTHER].sum()
        return cls(shares, (), None)

    @classmethod
    def fit(cls, X: Matrix, kinds: NDArray[np.int64], *, seed: int, threads: int) -> KindShares:
        """Learn from bad ends alone.

        Args:
            X: Features of jobs that ended badly, shape (n, f).
            kinds: `kind_of` them, shape (n,).
            seed: Seed of the fit.
            threads: Threads of the fit.
        """
        if not len(kinds):
            return cls.unknown()
        counts = np.bincount(kinds, minlength=len(KINDS) + 1).astype(np.float64)
        prior = cls.unknown().shares
        shares = (counts + _PRIOR_ROWS * prior) / (counts.sum() + _PRIOR_ROWS)
        learnt = tuple(np.flatnonzero(counts >= MIN_KIND_ROWS).tolist())
        if len(learnt) < 2:
            return cls(shares, (), None)
        rows = np.isin(kinds, learnt)
        parameters = _PARAMETERS | {"objective": "multiclass", "num_class": len(learnt)}
        labels = np.searchsorted(learnt, kinds[rows]).astype(np.float64)
        booster = grow(X[rows], labels, parameters, rounds=KIND_ROUNDS, seed=seed, threads=threads)
        return cls(shares, learnt, booster.model_to_string())

    def of(self, X: Matrix) -> Floats:
        """Shares of each row, shape (n, len(KINDS) + 1); rows sum to one."""
        found = np.tile(self.shares, (len(X), 1))
        if self.booster_text is not None and len(X):
            told = booster_of(self.booster_text).predict(X, num_threads=1)
            found[:, list(self.learnt)] = told * self.shares[list(self.learnt)].sum()
        return found


def mixed_shares(kinds: KindShares, X: Matrix) -> Floats:
    """Shares of each of `KINDS`, half as the trees say and half as the newest bad ends of the key do, shape (n, kinds).

    Of kinds whose newest ends are not among the features the trees alone speak; a row's sum is at most one.
    """
    told, newest = kinds.of(X)[:, : len(KINDS)], rolling_shares(X)
    for number in _ROLLING:
        told[:, number] = _ROLLING_WEIGHT * newest[:, number] + (1 - _ROLLING_WEIGHT) * told[:, number]
    return told / np.maximum(told.sum(axis=1, keepdims=True), 1.0)


def kind_losses(kinds: Floats, table: JobTable, rows: Ints) -> dict[str, Floats]:
    """Brier of each kind of bad end that the record holds at all, else NaN; kinds of shape (n, len(KIND_NAMES))."""
    ends = np.where(table.is_bad, kind_of(table), -1)
    losses = {}
    for number, name in enumerate(KIND_NAMES[: kinds.shape[1]]):
        is_recorded = bool(np.any(ends == number))
        loss = brier(kinds[:, number], ends[rows] == number)
        losses[f"brier_{name}"] = loss if is_recorded else np.full(len(rows), np.nan)
    return losses

"""Odds of bad ends of jobs that have run for a while, and the rates of those that came as far.

What has run for ten minutes is another case than at its submit: quick failures are behind it and the limit is nearer,
by how much differs from cluster to cluster. So trees of their own learn from released jobs as they stood after each of
`LANDMARKS_S`, and are averaged with how the newest jobs of the same key that came as far ended. Here belong these odds
and that rate, which is also the baseline; not how they are judged (`models/failure_landmarks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_outcomes import KINDS
from models.boosting import grow_odds, mean_odds
from models.calibration import MIN_ROWS
from models.failure_kinds import KIND_NAMES, KindShares

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

LANDMARKS_S = (60.0, 600.0, 3_600.0, 14_400.0, 57_600.0, 230_400.0)
TREE_SHARE = 0.6  # of the trees beside the rate of those that came as far
_OVERALL_RATE = 0.3  # of bad ends before anything is known
_PRIOR_ROWS = 4.0  # of the wider group, counted with the narrower one
_RATE_GROUPS = ("all", "user", "key")
_SURVIVORS = 20  # newest of a group that count
_LOOKED_AT = 100  # newest ends of a group among which they are looked for
_OUTLIVES_LIMIT = 1e-3  # share of other ends that come after the limit
_CHUNK = 4_000
_TIMEOUT = KIND_NAMES.index("timeout")
_FILES = ("job_failure_running.txt", "job_failure_running_days.txt")
_KINDS_FILE = "job_failure_running_kinds.txt"


def survivor_rates(table: JobTable, history: JobHistory, rows: Ints, moments: Ints, elapsed_s: Floats) -> Floats:
    """How the newest jobs of the same key that ran longer than `elapsed_s` ended, leaning on the user's and all.

    Args:
        table: Jobs, some of which are asked about.
        history: Jobs of the cluster; what ended at or after a job's moment changes nothing for it.
        rows: Rows of the table that are asked about, shape (n,).
        moments: The moment of each, µs, shape (n,).
        elapsed_s: Seconds each has run, shape (n,).

    Returns:
        Shares of bad ends and of each of `KINDS`, shape (n, 1 + len(KINDS)).
    """
    past = history.table
    is_kind = [past.is_state(held) for _, held in KINDS]
    rates = np.zeros((len(rows), 1 + len(KINDS)))
    rates[:, 0] = _OVERALL_RATE
    for group in _RATE_GROUPS:
        codes = table.group(group)[rows]
        for first in range(0, len(rows), _CHUNK):
            part = slice(first, first + _CHUNK)
            slots = history.newest(group, "run", codes[part], moments[part], _LOOKED_AT)
            came = slots.is_filled & (past.runtime_s[slots.rows] > elapsed_s[part, None])
            came &= np.cumsum(came, axis=1) <= _SURVIVORS
            who, slot = np.nonzero(came & past.is_bad[slots.rows])
            ended = slots.rows[who, slot]
            hits = (who, *(who[kind[ended]] for kind in is_kind))
            counted = np.stack([np.bincount(hit, minlength=len(came)) for hit in hits], axis=1)
            rates[part] = (counted + _PRIOR_ROWS * rates[part]) / (came.sum(axis=1)[:, None] + _PRIOR_ROWS)
    return rates


@dataclass(frozen=True, slots=True)
class RunningOdds:
    """Odds of running jobs; without trees the rates of those that came as far speak alone.

    Attributes:
        booster_texts: LightGBM models as text, whose odds are averaged.
        kinds: Shares of the kinds of bad ends among those that came as far.
    """

    booster_texts: tuple[str, ...] = ()
    kinds: KindShares = field(default_factory=KindShares.unknown)

    @classmethod
    def fit(
        cls, X: Matrix, ends: Ints, runtime_s: Floats, limit_s: Floats, blocks: NDArray[Any], *, seed: int,
        threads: int, rounds: int, max_rows: int,
    ) -> RunningOdds:  # fmt: skip
        """Learn from released jobs.

        Args:
            X: Features of `failure_matrix`, shape (n, f).
            ends: `kind_of` where the job ended badly, −1 elsewhere, shape (n,).
            runtime_s: Seconds it ran, shape (n,); NaN: unknown.
            limit_s: Time limits, shape (n,); NaN: none.
            blocks: Block of each row, shape (n,).
            seed: Seed of the fit.
            threads: Threads of the fit.
            rounds: Boosting rounds.
            max_rows: Pairs of job and landmark learnt from at most, drawn at random.
        """
        reached = [np.flatnonzero(runtime_s > landmark) for landmark in LANDMARKS_S]
        rows = np.concatenate(reached)
        elapsed_s = np.repeat(LANDMARKS_S, [len(some) for some in reached])
        if len(rows) > max_rows:
            drawn = np.sort(np.random.default_rng(seed).choice(len(rows), max_rows, replace=False))
            rows, elapsed_s = rows[drawn], elapsed_s[drawn]
        bad = ends[rows] >= 0
        if len(rows) < MIN_ROWS or bad.all() or not bad.any():
            return cls()
        seen = _with_elapsed(X[rows], elapsed_s, limit_s[rows])
        boosters = grow_odds(seen, bad, blocks[rows], rounds=rounds, seed=seed, threads=threads)
        kinds = KindShares.fit(seen[bad], ends[rows][bad], seed=seed, threads=threads)
        return cls(tuple(booster.model_to_string() for booster in boosters), kinds)

    def odds(self, X: Matrix, rates: Floats, elapsed_s: Floats, limit_s: Floats) -> Floats:
        """P(bad end) and of each of `KINDS`, parts of it, shape (n, 1 + len(KINDS)).

        Args:
            X: Features of `failure_matrix`.
            rates: `survivor_rates` of the same rows.
            elapsed_s: Seconds run.
            limit_s: Time limits; NaN: none.
        """
        found = rates.copy()
        if self.booster_texts and len(X):
            seen = _with_elapsed(X, elapsed_s, limit_s)
            p_fail = mean_odds(self.booster_texts, seen)[:, None]
            told = np.concatenate([p_fail, p_fail * self.kinds.of(seen)[:, : len(KINDS)]], axis=1)
            found = TREE_SHARE * told + (1 - TREE_SHARE) * rates
        over = elapsed_s >= limit_s  # every other end would have come earlier
        timeout = found[over, 1 + _TIMEOUT]
        sure = timeout / np.maximum(timeout + (1 - timeout) * _OUTLIVES_LIMIT, 1e-12)
        found[over] *= ((1 - sure) / np.maximum(1 - timeout, 1e-12))[:, None]
        found[over, 1 + _TIMEOUT] = sure
        found[over, 0] = np.maximum(found[over, 0], found[over, 1:].sum(axis=1))
        return found

    def to_files(self) -> tuple[dict[str, bytes], dict[str, NDArray[Any]], dict[str, Any]]:
        """Files without code, arrays and plain values."""
        files = {name: text.encode() for name, text in zip(_FILES, self.booster_texts, strict=False)}
        if self.kinds.booster_text:
            files[_KINDS_FILE] = self.kinds.booster_text.encode()
        return files, {"running_shares": self.kinds.shares}, {"kinds_learnt": list(self.kinds.learnt)}

    @classmethod
    def from_files(
        cls, files: Mapping[str, bytes], arrays: Mapping[str, NDArray[Any]], described: Mapping[str, Any]
    ) -> RunningOdds:
        """The odds from what `to_files` gave."""
        texts = tuple(files[name].decode() for name in _FILES if name in files)
        told = files[_KINDS_FILE].decode() if _KINDS_FILE in files else None
        return cls(texts, KindShares(arrays["running_shares"], tuple(described["kinds_learnt"]), told))


def _with_elapsed(X: Matrix, elapsed_s: Floats, limit_s: Floats) -> Matrix:
    """Features with ln of the seconds run and of the limit over them."""
    run = np.log(np.maximum(elapsed_s, 1.0))
    return np.concatenate([X, np.stack([run, np.log(limit_s) - run], axis=1).astype(np.float32)], axis=1)

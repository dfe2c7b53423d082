"""Looks at jobs in the middle of their waits: what is forecast then, and how it is judged.

A wait is forecast anew while a job waits, and its odds are read then more than at the submit. Jobs are looked at after
each of `LOOKS_S` of waiting, with what is known by then. Here belong these looks and their losses; not those at the
submit (`models/tasks.py`), and not how far a forecast moves from look to look (`models/wait_points.py`).
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory
from models.scoring import brier
from models.wait import SOON_COLUMNS, SOON_S, WaitForecaster, baseline_s, matrix_of_waits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

LOOKS_S = (60, 600, 3600)
MAX_ROWS = 2_000  # jobs looked at, drawn at random


class Look(NamedTuple):
    """Jobs that still wait after a time of waiting.

    Attributes:
        places: Which of the jobs asked about, shape (k,).
        X: Their features at the look, shape (k, f).
        left_s: How long they go on to wait, seconds, shape (k,).
    """

    places: Ints
    X: Matrix
    left_s: Floats


_kept: WeakKeyDictionary[JobHistory, tuple[bytes, dict[int, Look]]] = WeakKeyDictionary()  # the last asked about


def looks_at(history: JobHistory, rows: Ints) -> dict[int, Look]:
    """The looks at history rows of jobs that started, by `LOOKS_S`; kept for whoever asks about the same rows next."""
    found = _kept.get(history)
    if found is not None and found[0] == rows.tobytes():
        return found[1]
    waits = history.table.wait_s[rows]
    places = np.arange(len(rows))
    if len(rows) > MAX_ROWS:
        places = np.sort(np.random.default_rng(1).choice(len(rows), MAX_ROWS, replace=False))
    looks = {}
    for look_s in LOOKS_S:
        still = places[waits[places] > look_s]
        moments = history.table.submit[rows[still]] + look_s * 1_000_000
        looks[look_s] = Look(still, matrix_of_waits(history, rows[still], moments), waits[still] - look_s)
    _kept[history] = rows.tobytes(), looks
    return looks


def look_losses(told: WaitForecaster | str, history: JobHistory, rows: Ints) -> dict[str, Floats]:
    """Losses of a forecaster, or of the baseline of that name, at each look.

    `brier_600s_60s` is of the odds of a start within ten minutes, said after one minute of waiting.

    Args:
        told: The forecaster, or one of `models.wait.BASELINES`.
        history: Jobs of the cluster.
        rows: History rows of jobs that started, shape (n,).

    Returns:
        Name to values of shape (n,), NaN for jobs that were not looked at, as they had started by then: the error of
        ln(1 + s) of the median, whether the 95 % bound held (of a forecaster), and the Brier scores of the odds.
    """
    losses: dict[str, Floats] = {}
    for look_s, look in looks_at(history, rows).items():
        if isinstance(told, str):
            median = baseline_s(told, look.X)
            bound, odds = None, (median[:, None] <= np.array(SOON_S)).astype(np.float64)
        else:
            frame = told.frame(look.X, with_point=False)
            median, bound = frame["q50_s"].to_numpy(), frame["q95_s"].to_numpy()
            odds = frame.select(SOON_COLUMNS).to_numpy().astype(np.float64)
        values = {"mae_log1p": np.abs(np.log1p(median) - np.log1p(look.left_s))}
        if bound is not None:
            values["below_q95"] = (look.left_s <= bound + 0.5) * 1.0
        for k, seconds in enumerate(SOON_S):
            values[f"brier_{seconds}s"] = brier(odds[:, k], look.left_s <= seconds)
        for name, value in values.items():
            losses[f"{name}_{look_s}s"] = whole = np.full(len(rows), np.nan)
            whole[look.places] = value
    return losses

"""How good the odds of bad ends are once a job has run for a while, beside the rate among those that came as far.

Each landmark judges the jobs that ran longer, with what was known at their submit. Here
belong these columns and figures; not the odds (`models/failure_running.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory
from models.backtest_report import Score, figure
from models.failure_kinds import KIND_COLUMNS, KIND_NAMES, kind_of
from models.failure_running import RunningOdds, survivor_rates
from models.promotion import DRAWS, mean_interval, ratio_interval
from models.ranking import auroc_interval
from models.scoring import brier

Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

JUDGED_S = (60.0, 600.0, 3_600.0)
BASELINE = "survivor_rate"
_COLUMNS = ("p_fail", *KIND_COLUMNS)
_NAMES = ("fail", *KIND_NAMES)
MIN_HAPPENED = 20  # of a kind, without which it is not judged


def landmark_columns(running: RunningOdds, X: Matrix, history: JobHistory, rows: Ints) -> pl.DataFrame:
    """Odds after each of `JUDGED_S`, columns `p_fail_60s`, `p_timeout_60s`, …; null where the job had ended by then.

    Args:
        running: Odds of running jobs.
        X: Features of the rows at their submits.
        history: Jobs of the cluster.
        rows: Rows of the history that are asked about, shape (n,).
    """
    table = history.table
    columns = {}
    for landmark_s in JUDGED_S:
        there = table.runtime_s[rows] > landmark_s
        odds = np.full((len(rows), len(_COLUMNS)), np.nan)
        elapsed_s = np.full(int(there.sum()), landmark_s)
        rates = _rates(history, rows[there], landmark_s)
        odds[there] = running.odds(X[there], rates, elapsed_s, table.limit_s[rows[there]])
        columns |= {f"{name}_{landmark_s:.0f}s": odds[:, k] for k, name in enumerate(_COLUMNS)}
    return pl.DataFrame(columns).fill_nan(None)


def landmark_scores(
    predictions: pl.DataFrame, history: JobHistory, rows: Ints, blocks: NDArray[Any], *, draws: int = DRAWS,
    seed: int = 1,
) -> list[Score]:  # fmt: skip
    """Brier of each kind of bad end after each of `JUDGED_S`, AUROC of any, and the ratio to `BASELINE`.

    Args:
        predictions: `landmark_columns` of these rows, among others.
        history: Jobs of the cluster.
        rows: Rows of the history that were forecast, shape (n,).
        blocks: Block of each row.
        draws: Bootstrap draws.
        seed: Seed of the draws.
    """
    table = history.table
    scores = []
    for landmark_s in JUDGED_S:
        there = np.flatnonzero(table.runtime_s[rows] > landmark_s)
        if not len(there):
            continue
        asked, block = rows[there], blocks[there]
        rates = _rates(history, asked, landmark_s)
        ends = np.where(table.is_bad[asked], kind_of(table)[asked], -1)
        for number, name in enumerate(_NAMES):
            happened = ends >= 0 if number == 0 else ends == number - 1
            if happened.sum() < MIN_HAPPENED:
                continue
            said = predictions[f"{_COLUMNS[number]}_{landmark_s:.0f}s"].to_numpy()[there]
            losses, others = brier(said, happened), brier(rates[:, number], happened)
            for who, loss, odds in (("", losses, said), (BASELINE, others, rates[:, number])):
                interval = mean_interval(loss, block, draws=draws, seed=seed)
                scores.append(figure(f"brier_{name}", who, interval, len(there), landmark_s))
                area = auroc_interval(odds, happened, block, draws=draws, seed=seed) if number == 0 else None
                if area is not None:
                    scores.append(figure(f"auroc_{name}", who, area, len(there), landmark_s))
            ratio = ratio_interval(losses, others, block, draws=draws, seed=seed)
            scores.append(figure(f"brier_{name}_ratio", BASELINE, ratio, len(there), landmark_s))
    return scores


def _rates(history: JobHistory, rows: Ints, landmark_s: float) -> NDArray[np.float64]:
    table = history.table
    return survivor_rates(table, history, rows, table.submit[rows], np.full(len(rows), landmark_s))

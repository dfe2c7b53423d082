"""Backtest of idle forecasts on recorded occupancy: learn on the first 70 % of time, judge on the rest, fitting daily.

Judged are the fewest idle GPUs of each window (the median, beside rules of thumb on the same moments) and P(8 stay) at
moments at which 8 are idle, beside how many are idle, read through isotonic regression that is fitted as often. Here
belong the split and the figures; the forecaster stands in `models/idle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.idle import IdleHistory
from models.backtest_report import Score
from models.event_report import EventReport, moment
from models.event_scores import DAY_S, horizon_name
from models.idle import GPUS, HORIZONS_MIN, QUANTILES, IdleForecaster, IdleModelError
from models.onset_backtest import TRAIN_SHARE, OnsetBacktestError, Step, unheard
from models.promotion import Interval, block_bootstrap, ratio_interval
from models.score_calibration import probabilities

Floats = NDArray[np.float64]

REFIT_DAYS = 1.0
NAIVE_MIN = {"persistence": 1, "least_5min": 5, "least_15min": 15, "least_60min": 60}
IDLE_ONLY = "idle_only"
_MEDIAN, _LOW, _HIGH = (QUANTILES.index(q) for q in (0.5, 0.1, 0.9))


def backtest_idle(
    occupancy: pl.DataFrame,
    *,
    horizons_min: Sequence[int] = HORIZONS_MIN,
    refit_days: float | None = None,
    seed: int = 1,
    threads: int = 1,
    step: Step = unheard,
) -> EventReport:
    """Backtest idle forecasts.

    Args:
        occupancy: As of `features.shortage.QueueHistory`.
        horizons_min: Rising, minutes.
        refit_days: Days between fits in the test, each on what was known by then; None: one.
        seed: Seed of every random choice.
        threads: Threads of a fit.
        step: Told what is begun.

    Raises:
        OnsetBacktestError: There is too little on either side.
        features.shortage.OccupancyError: The rows cannot be used.
    """
    step("occupancy by the minute")
    history = IdleHistory(occupancy)
    cut = int(TRAIN_SHARE * history.minutes)
    queue, minute = np.nonzero(~np.isnan(history.idle))
    queue, minute = queue[minute >= cut], minute[minute >= cut]
    least = np.stack([history.least(h) for h in horizons_min], axis=-1)
    if not len(queue) or np.isnan(least[queue, minute]).all():
        raise OnsetBacktestError("the last 30 % of the record hold no whole window: give a longer record")
    shape = (len(queue), len(horizons_min))
    quantiles, stays, idle_only = np.empty((*shape, len(QUANTILES))), np.empty(shape), np.empty(shape)
    is_offered = np.zeros(shape, dtype=bool)
    firsts = np.arange(cut, history.minutes, max(int((refit_days or REFIT_DAYS) * 1_440), 1)).tolist()
    for i, first in enumerate(firsts):
        step(f"fit {i + 1} of {len(firsts)}")
        mine = np.flatnonzero((minute >= first) & (minute < (firsts[i + 1] if i + 1 < len(firsts) else np.inf)))
        try:
            model = IdleForecaster.fit(history, first, horizons_min=horizons_min, seed=seed, threads=threads)
        except IdleModelError as error:
            raise OnsetBacktestError(str(error)) from None
        quantiles[mine] = model.quantiles(history, queue[mine], minute[mine], threads=threads)
        eight = np.full(len(mine), GPUS)
        stays[mine] = model.stays(history, queue[mine], minute[mine], eight, threads=threads)
        is_offered[mine] = stays[mine] >= model.offer_from
        idle_only[mine] = _idle_only(history, least, first, horizons_min, history.idle[queue[mine], minute[mine]])
    step("scoring")
    judged = _Judged(history, queue, minute, least[queue, minute])
    scores: list[Score] = []
    calibration: list[dict[str, float]] = []
    for k, horizon in enumerate(horizons_min):
        judged.horizon(k, horizon, quantiles[:, k], stays[:, k], idle_only[:, k], is_offered[:, k], scores, seed)
        calibration += judged.reliability(k, horizon, stays[:, k])
    begin_s = float(history.at_s(np.array(cut)))
    end_s = float(history.at_s(np.array(history.minutes - 1)))
    return EventReport(
        kind="idle", subject="idle GPUs", unit="queue", start=moment(begin_s), end=moment(end_s),
        train_end=None, units=len(np.unique(queue)), rows=len(queue), onsets=None, scores=scores,
        calibration=calibration,
        notes=[
            f"{len(firsts)} fits, each on windows that had ended by then; the cut-off for offers is set by each fit.",
            f"Rankings, Brier scores and offers are of moments at which {GPUS} GPUs and more are idle.",
        ],
        predictions=_rows(judged, quantiles, stays, horizons_min),
    )  # fmt: skip


def _idle_only(history: IdleHistory, least: Floats, first: int, horizons_min: Sequence[int], idle: Floats) -> Floats:
    """P(8 stay) by how many are idle alone, of every moment whose window had ended by the fit."""
    out = np.zeros((len(idle), len(horizons_min)))
    for k, horizon in enumerate(horizons_min):
        until = max(first - horizon, 0)
        past, came = history.idle[:, :until].ravel(), least[:, :until, k].ravel()
        use = (past >= GPUS) & ~np.isnan(came)
        out[:, k] = probabilities(past[use], came[use] >= GPUS, np.nan_to_num(idle))
    return out


class _Judged:
    """Moments of the test and what came."""

    def __init__(self, history: IdleHistory, queue: Any, minute: Any, came: Floats) -> None:
        self.history, self.queue, self.minute, self.came = history, queue, minute, came
        self.idle = history.idle[queue, minute]
        self.at_s = history.at_s(minute)
        day = np.floor(self.at_s / DAY_S).astype(np.int64)
        self.block = queue * (int(day.max() - day.min()) + 1) + day - day.min()

    def horizon(
        self,
        k: int,
        horizon: int,
        quantiles: Floats,
        stays: Floats,
        idle_only: Floats,
        is_offered: NDArray[np.bool_],
        scores: list[Score],
        seed: int,
    ) -> None:
        """Add the figures of one length of windows."""
        from sklearn.metrics import roc_auc_score

        name, came = horizon_name(60.0 * horizon), self.came[:, k]
        ok = ~np.isnan(came)
        naive = {who: self.history.recent_least(back)[self.queue, self.minute] for who, back in NAIVE_MIN.items()}
        ok &= ~np.isnan(np.column_stack(list(naive.values()))).any(axis=1)
        errors = {"": np.abs(quantiles[ok, _MEDIAN] - came[ok])}
        errors |= {who: np.abs(least[ok] - came[ok]) for who, least in naive.items()}

        def score(metric: str, who: str, value: float, count: int) -> None:
            scores.append(Score(f"{metric}_{name}", who, Interval(float(value), None, None, 0), count))

        for who, error in errors.items():
            score("mae_gpus", who, error.mean(), int(ok.sum()))
        best = min(naive, key=lambda who: float(errors[who].mean()))
        ratio = ratio_interval(errors[""], errors[best], self.block[ok], seed=seed)
        scores.append(Score(f"mae_gpus_{name}_ratio", best, ratio, int(ok.sum())))
        inside = (came[ok] >= quantiles[ok, _LOW]) & (came[ok] <= quantiles[ok, _HIGH])
        score("coverage_80pct", "", inside.mean(), int(ok.sum()))
        asked = ~np.isnan(came) & (self.idle >= GPUS)
        count = int(asked.sum())
        if not count:
            return
        stayed = (came[asked] >= GPUS).astype(np.float64)
        score("stays_rate", "", stayed.mean(), count)
        if 0 < stayed.mean() < 1:
            for who, p in (("", stays), (IDLE_ONLY, self.idle)):
                score("auc", who, roc_auc_score(stayed, p[asked]), count)
        loss = {who: (p[asked] - stayed) ** 2 for who, p in (("", stays), (IDLE_ONLY, idle_only))}
        for who, values in loss.items():
            score("brier", who, values.mean(), count)
        skill = block_bootstrap(
            [loss[""], loss[IDLE_ONLY]], self.block[asked], lambda a, b: 1 - a / np.maximum(b, 1e-12), seed=seed
        )
        scores.append(Score(f"brier_skill_{name}", IDLE_ONLY, skill, count))
        given = is_offered[asked]
        score("offered", "", given.mean(), count)
        score("offered_of_idle", "", self.idle[asked][given].sum() / self.idle[asked].sum(), count)
        score("breached", "", 1 - stayed[given].mean() if given.any() else np.nan, int(given.sum()))

    def reliability(self, k: int, horizon: int, stays: Floats) -> list[dict[str, float]]:
        """What was said against what came, in tenths of the moments."""
        asked = np.flatnonzero(~np.isnan(self.came[:, k]) & (self.idle >= GPUS))
        order = asked[np.argsort(stays[asked], kind="stable")]
        return [
            {"horizon_s": 60.0 * horizon, "forecast": float(stays[part].mean()),
             "observed": float((self.came[part, k] >= GPUS).mean()), "count": len(part)}
            for part in np.array_split(order, 10) if len(part)
        ]  # fmt: skip


def _rows(judged: _Judged, quantiles: Floats, stays: Floats, horizons_min: Sequence[int]) -> pl.DataFrame:
    """Forecasts as rows: `ts`, `cluster`, `queue`, `horizon_s`, `idle_gpu_num`, `q05` … `q95`, `p_8_stay`."""
    names = np.array(judged.history.names, dtype=object)
    base = pl.DataFrame(
        {
            "ts": pl.Series(np.round(judged.at_s * 1e6).astype(np.int64)).cast(pl.Datetime("us", "UTC")),
            "cluster": pl.Series([judged.history.cluster or None] * len(judged.queue), dtype=pl.String),
            "queue": pl.Series(names[judged.queue].tolist(), dtype=pl.String),
            "idle_gpu_num": judged.idle,
        }
    )
    parts = [
        base.with_columns(
            pl.lit(60.0 * horizon).alias("horizon_s"),
            *(pl.Series(f"q{q * 100:02.0f}", quantiles[:, k, j]) for j, q in enumerate(QUANTILES)),
            pl.Series(f"p_{GPUS}_stay", stays[:, k]),
        )
        for k, horizon in enumerate(horizons_min)
    ]
    return pl.concat(parts).sort("ts", "queue", "horizon_s")

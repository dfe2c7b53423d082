"""Backtest of level forecasts on canonical telemetry: learn on the first 70 % of time, judge on the rest.

Between the two lies a gap of the longest horizon and the window. Here belong the split and the figures; rows stand in
`features/levels.py`, the forecaster in `models/level.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.levels import WINDOW_S, LevelRows, level_rows
from models.backtest_report import Score
from models.event_report import EventReport, moment
from models.event_scores import DAY_S, horizon_name
from models.event_words import baseline_label, horizon_words
from models.level import BASELINES, QUANTILES, LevelForecaster, LevelModelError, baseline
from models.onset_backtest import TRAIN_SHARE, Step, unheard
from models.promotion import Interval, ratio_interval

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOVING_SHARE = 0.05  # of its mean: a GPU whose level varies by more is at work


class LevelBacktestError(ValueError):
    """Telemetry cannot be backtested; the message says what is missing."""


def backtest_level(
    samples: pl.DataFrame,
    quantity: str,
    *,
    horizons_s: Sequence[float] = (30.0, 60.0, 120.0),
    seed: int = 1,
    threads: int = 1,
    step: Step = unheard,
) -> EventReport:
    """Backtest the level of a quantity.

    Args:
        samples: Rows of `core_gpu_samples`, any subset of its columns.
        quantity: The column to forecast.
        horizons_s: Rising, seconds.
        seed: Seed of every random choice.
        threads: Threads of a fit.
        step: Told what is begun.

    Raises:
        features.levels.LevelError: The quantity is not in the samples, or these are too few.
        LevelBacktestError: The record is too short for the split.
    """
    step("windows of GPUs")
    rows = level_rows(samples, quantity, horizons_s)
    begin, end = float(rows.at_s.min()), float(rows.at_s.max())
    cut = begin + TRAIN_SHARE * (end - begin)
    train_end = cut - horizons_s[0] - WINDOW_S
    train = [np.flatnonzero(rows.at_s < cut - horizon_s - WINDOW_S) for horizon_s in horizons_s]
    test = np.flatnonzero(rows.at_s >= cut)
    step("fitting")
    try:
        model = LevelForecaster.fit(rows, train, horizons_s, seed=seed, threads=threads)
    except LevelModelError as error:
        raise LevelBacktestError(str(error)) from None
    step("forecasting")
    point, bands = model.forecast(rows, test, horizons_s)
    given = {"": point}
    given |= {
        name: np.column_stack([baseline(name, rows, test, horizon_s) for horizon_s in horizons_s]) for name in BASELINES
    }
    step("scoring")
    scores, calibration = _scores(rows, test, given, bands, horizons_s, seed)
    notes = [
        f"Nothing within {WINDOW_S:.0f} s and the horizon before the test was learned from.",
        *(
            f"{horizon_words(horizon_name(h))} ahead: the point is {w:.0%} the forest's median, the rest is from "
            f"the baseline “{baseline_label(b)}”; chosen on the training time."
            for h, w, b in zip(horizons_s, model.weight, model.best, strict=True)
        ),
    ]
    moving = _moving(rows, test)
    if 0 < moving.sum() < len(moving):
        names = ", ".join(rows.uuids[i] for i in np.flatnonzero(moving)[:5])
        names += f" and {more} more" if (more := int(moving.sum()) - 5) > 0 else ""
        notes.append(
            f"{int(moving.sum())} of {len(np.unique(rows.unit[test]))} GPUs are at work ({names}): figures of these "
            "alone stand beside those of all."
        )
    if len(np.unique(_blocks(rows, test))) < 30:
        notes.append("Too few GPU-days for an interval: one record says what runs, not how well it holds elsewhere.")
    return EventReport(
        kind="level", subject=quantity, unit="GPU", start=moment(cut), end=moment(end), train_end=moment(train_end),
        units=len(np.unique(rows.unit[test])), rows=len(test), onsets=None, scores=scores, calibration=calibration,
        notes=notes, predictions=_rows(rows, test, point, bands, horizons_s),
    )  # fmt: skip


def _moving(rows: LevelRows, test: Ints) -> NDArray[np.bool_]:
    """Which GPUs vary in the test, by code."""
    out = np.zeros(len(rows.uuids), dtype=bool)
    for unit in np.unique(rows.unit[test]):
        x = rows.last[test[rows.unit[test] == unit]]
        out[unit] = np.std(x) > MOVING_SHARE * max(abs(float(np.mean(x))), 1e-9)
    return out


def _blocks(rows: LevelRows, test: Ints) -> Ints:
    day = np.floor(rows.at_s[test] / DAY_S).astype(np.int64)
    return rows.unit[test] * (int(day.max() - day.min()) + 1) + day - day.min()


def _scores(
    rows: LevelRows, test: Ints, given: dict[str, Floats], bands: Floats, horizons_s: Sequence[float], seed: int
) -> tuple[list[Score], list[dict[str, float]]]:
    scores: list[Score] = []
    calibration: list[dict[str, float]] = []
    moving = _moving(rows, test)
    parts = {"": np.ones(len(test), dtype=bool)}
    if 0 < moving.sum() < len(moving):
        parts["_moving"] = moving[rows.unit[test]]
    block = _blocks(rows, test)
    for k, horizon_s in enumerate(horizons_s):
        for suffix, mask in parts.items():
            name = f"{horizon_name(horizon_s)}{suffix}"
            ok = mask & ~np.isnan(rows.came[test, k])
            if not ok.any():
                continue
            came, count = rows.came[test[ok], k], int(ok.sum())
            errors = {who: np.abs(p[ok, k] - came) for who, p in given.items()}
            for who, error in errors.items():
                scores.append(_score(f"mae_{name}", who, error.mean(), count))
                scores.append(_score(f"rmse_{name}", who, np.sqrt(np.mean(error**2)), count))
            low, middle, high = bands[ok, k].T
            pinball = [
                np.mean(np.maximum(q * (came - v), (q - 1) * (came - v)))
                for q, v in zip(QUANTILES, (low, middle, high), strict=True)
            ]
            scores.append(_score(f"pinball_{name}", "", float(np.mean(pinball)), count))
            scores.append(_score(f"coverage_80pct_{name}", "", float(np.mean((came >= low) & (came <= high))), count))
            best = min(BASELINES, key=lambda who: float(errors[who].mean()))
            ratio = ratio_interval(errors[""], errors[best], block[ok], seed=seed)
            scores.append(Score(f"mae_{name}_ratio", best, ratio, count))
            if not suffix:
                calibration += [
                    {"horizon_s": horizon_s, "forecast": q, "observed": float(np.mean(came <= v)), "count": count}
                    for q, v in zip(QUANTILES, (low, middle, high), strict=True)
                ]
    return scores, calibration


def _score(metric: str, who: str, value: float, count: int) -> Score:
    return Score(metric, who, Interval(float(value), None, None, 0), count)


def _rows(rows: LevelRows, test: Ints, point: Floats, bands: Floats, horizons_s: Sequence[float]) -> pl.DataFrame:
    """Forecasts as rows: `ts`, `cluster`, `node`, `gpu_uuid`, `horizon_s`, `point`, `q10`, `q50`, `q90`."""
    uuids, nodes = np.array(rows.uuids, dtype=object), np.array(rows.nodes, dtype=object)
    unit = rows.unit[test]
    base = pl.DataFrame(
        {
            "ts": pl.Series(np.round(rows.at_s[test] * 1e6).astype(np.int64)).cast(pl.Datetime("us", "UTC")),
            "cluster": pl.Series([rows.cluster or None] * len(test), dtype=pl.String),
            "node": pl.Series(nodes[unit].tolist(), dtype=pl.String),
            "gpu_uuid": pl.Series(uuids[unit].tolist(), dtype=pl.String),
        }
    )
    parts = [
        base.with_columns(
            pl.lit(float(horizon_s)).alias("horizon_s"), pl.Series("point", point[:, k]),
            *(pl.Series(f"q{q * 100:.0f}", bands[:, k, j]) for j, q in enumerate(QUANTILES)),
        )
        for k, horizon_s in enumerate(horizons_s)
    ]  # fmt: skip
    return pl.concat(parts).sort("ts", "gpu_uuid", "horizon_s")

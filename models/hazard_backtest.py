"""The protocol of backtests by hazards, of whatever is sampled: GPUs, nodes or ports.

Learns on the first 70 % of time, judges on the rest, with a gap of the longest horizon and the window between. Here
belong the split and who is judged beside whom; rows stand in `models/onsets.py`, the forecaster in
`models/bottleneck.py`, figures in `models/event_scores.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from features.history import SampleHistory
from features.unit_history import UnitHistory
from models.bottleneck import HazardForecaster
from models.event_report import EventReport, report_of_events
from models.event_scores import MODEL, Judged
from models.naive_onsets import NAMES, NaiveOnsets
from models.onset_backtest import TRAIN_SHARE, OnsetBacktestError, Step, prediction_rows
from models.onset_scores import all_rows
from models.onsets import PURGE_S, Course, Rows, sample_rows, screen_recall
from models.trend import HORIZONS_S, TrendForecaster

MIN_TRAIN_ONSETS = 3

Followed = tuple[SampleHistory | UnitHistory, Course]


def split_s(history: SampleHistory | UnitHistory) -> tuple[float, float]:
    """Moments before which a record teaches, and from which on it judges, seconds since 1970."""
    begin, end = float(history.ts.min()), float(history.ts.max())
    cut = begin + TRAIN_SHARE * (end - begin)
    return cut - PURGE_S, cut


def backtest_course(
    judging: Followed,
    learning: Followed,
    *,
    unit: str,
    names: Callable[[Rows], dict[str, pl.Series]],
    notes: Sequence[str] = (),
    seed: int,
    threads: int,
    step: Step,
) -> EventReport:
    """Backtest a class that has been followed through a record.

    Args:
        judging: The whole record, with its course.
        learning: The record that teaches, with its course: the same, or what of it was known before the gap.
        unit: What each forecast is of, as `GPU`.
        names: Columns that name what rows are of, shape (rows,) each.
        notes: What a reader has to know beside the figures.
        seed: Seed of every random choice.
        threads: Threads of a fit.
        step: Told what is begun.

    Raises:
        OnsetBacktestError: There are too few onsets on either side.
    """
    history, of = judging
    subject = of.bottleneck_class
    train_end, cut = split_s(history)
    end = float(history.ts.max())
    onset_s = history.ts[of.onset_row]
    early = int((learning[0].ts[learning[1].onset_row] < train_end).sum())
    late = int((onset_s >= cut).sum())
    if early < MIN_TRAIN_ONSETS or not late:
        raise OnsetBacktestError(
            f"{early} onsets of {subject} to learn from and {late} to judge by, {MIN_TRAIN_ONSETS} and 1 are "
            "needed: give a longer record, or one in which it happens"
        )
    step("fitting")
    train = sample_rows(*learning, float(history.ts.min()), train_end, seed=seed)
    model = HazardForecaster.fit({subject: train}, seed=seed, threads=threads)
    naive = NaiveOnsets(train)
    step("forecasting")
    rows = all_rows(history, of, cut, end + 1)
    given = {MODEL: model.forecast(rows.block), "trend": TrendForecaster().forecast(rows.block)}
    given |= {name: naive.forecast(name, rows.block) for name in NAMES}
    pairs = [rows.outcome(horizon_s) for horizon_s in HORIZONS_S]
    onset = of.onset_row[onset_s >= cut]
    judged = Judged(
        tuple(float(h) for h in HORIZONS_S), rows.block.gpus, rows.block.at_s,
        np.column_stack([came > 0 for came, _ in pairs]), np.column_stack([known for _, known in pairs]),
        history.gpu[onset], history.ts[onset], given,
    )  # fmt: skip
    seen, total = screen_recall(history, of, cut, end + 1)
    told = [
        f"The screen showed the forecaster {seen} of {total} onsets; recall counts them all. Steps without a precursor "
        "cannot be foreseen by anyone.",
        *notes,
    ]
    if subject not in model.classes:
        told.append("Too few rows lie ahead of an onset to learn from: the built-in trend stands in for the model.")
    frame = prediction_rows(judged, history.cluster, **names(rows))
    return report_of_events(
        judged, kind="bottleneck", subject=subject, unit=unit, span_s=(cut, end), train_end_s=train_end, notes=told,
        predictions=frame, seed=seed,
    )  # fmt: skip


def present(frame: pl.DataFrame) -> list[str]:
    """Columns that say anything."""
    return [name for name in frame.columns if frame[name].null_count() < frame.height]

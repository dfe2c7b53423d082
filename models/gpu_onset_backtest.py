"""Backtest of the bottleneck classes of GPUs on canonical telemetry: the classes' own labels, models and baselines.

Learns on the first 70 % of time, judges on the rest, with a gap of the longest horizon and the window between. Here
belong the split and who is judged beside whom; rows stand in `models/onsets.py`, the forecaster in
`models/bottleneck.py`, figures in `models/event_scores.py`.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from features.conditions import CLASSES
from features.history import SampleHistory
from features.thresholds import ThresholdBook
from models.bottleneck import HazardForecaster
from models.event_report import EventReport, report_of_events
from models.event_scores import MODEL, Judged
from models.naive_onsets import NAMES, NaiveOnsets
from models.onset_backtest import TRAIN_SHARE, OnsetBacktestError, Step, prediction_rows, unheard
from models.onset_scores import all_rows
from models.onsets import PURGE_S, course, sample_rows, screen_recall
from models.trend import HORIZONS_S, TrendForecaster

MIN_TRAIN_ONSETS = 3


def backtest_telemetry(
    samples: pl.DataFrame,
    bottleneck_class: str,
    *,
    gpu_model: str | None = None,
    seed: int = 1,
    threads: int = 1,
    step: Step = unheard,
) -> EventReport:
    """Backtest a class of GPU bottlenecks on canonical telemetry.

    Args:
        samples: Rows of `core_gpu_samples`, any subset of its columns.
        bottleneck_class: One of `features.conditions.CLASSES`.
        gpu_model: Model whose limits hold for every node; None: limits that hold for any.
        seed: Seed of every random choice.
        threads: Threads of a fit.
        step: Told what is begun.

    Raises:
        OnsetBacktestError: The class cannot be told from these columns, or has too few onsets.
    """
    if bottleneck_class not in CLASSES:
        raise OnsetBacktestError(f"no class {bottleneck_class!r} of GPUs; classes: {', '.join(CLASSES)}")
    step("windows of GPUs")
    book = ThresholdBook(default_model=gpu_model or "")
    history = SampleHistory(samples, book)
    if not len(history.ts):
        raise OnsetBacktestError("the telemetry holds no rows with a time, a node and a GPU")
    of = course(history, bottleneck_class, book)
    if (of.state == -1).all():
        columns = ", ".join(name for name in samples.columns if samples[name].null_count() < samples.height)
        raise OnsetBacktestError(
            f"these columns do not tell when a GPU is in {bottleneck_class}: {columns}; "
            f"what each class needs stands in docs/nowcast.md"
        )
    begin, end = float(history.ts.min()), float(history.ts.max())
    cut = begin + TRAIN_SHARE * (end - begin)
    train_end = cut - PURGE_S
    onset_s = history.ts[of.onset_row]
    early, late = int((onset_s < train_end).sum()), int((onset_s >= cut).sum())
    if early < MIN_TRAIN_ONSETS or not late:
        raise OnsetBacktestError(
            f"{early} onsets of {bottleneck_class} to learn from and {late} to judge by, {MIN_TRAIN_ONSETS} and 1 are "
            "needed: give a longer record, or one in which it happens"
        )
    step("fitting")
    train = sample_rows(history, of, begin, train_end, seed=seed)
    model = HazardForecaster.fit({bottleneck_class: train}, seed=seed, threads=threads)
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
    notes = [
        f"The screen showed the forecaster {seen} of {total} onsets; recall counts them all. Steps without a precursor "
        "cannot be foreseen by anyone."
    ]
    if bottleneck_class not in model.classes:
        notes.append("Too few rows lie ahead of an onset to learn from: the built-in trend stands in for the model.")
    uuids, nodes = np.array(history.uuids, dtype=object), np.array(history.node_names, dtype=object)
    frame = prediction_rows(
        judged, history.cluster, node=pl.Series(nodes[rows.node].tolist(), dtype=pl.String),
        gpu_uuid=pl.Series(uuids[rows.block.gpus].tolist(), dtype=pl.String),
    )  # fmt: skip
    return report_of_events(
        judged, kind="bottleneck", subject=bottleneck_class, unit="GPU", span_s=(cut, end), train_end_s=train_end,
        notes=notes, predictions=frame, seed=seed,
    )  # fmt: skip

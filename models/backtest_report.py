"""Outcome of a backtest: figures of the model and of each baseline, what was forecast, and their forms for reading.

Here belong the figures and how they become rows, text and JSON; not how they come about (`models/backtest.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl

from features.vocabulary import conform
from models.promotion import Interval


@dataclass(frozen=True, slots=True)
class Score:
    """One figure of a report: a metric of the model (`baseline` empty) or of a baseline."""

    metric: str
    baseline: str
    interval: Interval
    count: int


@dataclass(frozen=True, slots=True)
class BacktestReport:
    """Outcome of a backtest.

    Attributes:
        task: Task that was backtested.
        start: First submit of the test.
        end: Last submit of the test.
        jobs: Jobs judged.
        refits: Fits made on the way.
        best_baseline: Baseline with the lowest primary loss.
        scores: All figures; `<metric>_ratio` is model ÷ baseline.
        calibration: Nominal level or probability, observed share, rows.
        notes: What a reader must know of these figures.
        strata: Figures of parts of the jobs, `<metric>_<stratum>`: by GPUs, by length, by week.
        predictions: What was forecast, one row per job judged (`job_id`, `submit_time`, …).
    """

    task: str
    start: datetime
    end: datetime
    jobs: int
    refits: int
    best_baseline: str
    scores: list[Score]
    calibration: list[dict[str, float]]
    notes: list[str] = field(default_factory=list)
    strata: list[Score] = field(default_factory=list)
    predictions: pl.DataFrame = field(default_factory=pl.DataFrame)

    def value(self, metric: str, baseline: str = "") -> float:
        """A figure by name.

        Raises:
            KeyError: There is none of that name.
        """
        for score in self.scores:
            if (score.metric, score.baseline) == (metric, baseline):
                return score.interval.value
        of = f"baseline {baseline!r}" if baseline else "the model"
        raise KeyError(f"no {metric!r} of {of}; metrics: {', '.join(sorted(self.metrics()))}")

    def metrics(self) -> set[str]:
        return {score.metric for score in self.scores}

    def rows(self, cluster: str, ts: datetime, model_version: str) -> pl.DataFrame:
        """The figures as rows of `out_scores`."""
        return score_rows(self.scores, cluster, ts, self.task, model_version)

    def text(self) -> str:
        """The report as a table for people."""
        names = ["", *dict.fromkeys(score.baseline for score in self.scores if score.baseline)]
        metrics = list(dict.fromkeys(score.metric for score in self.scores if not score.metric.endswith("_ratio")))
        found = {(score.metric, score.baseline): score.interval for score in self.scores}
        width = max(len(metric) for metric in metrics) + 2
        lines = [
            f"{self.task}: {self.jobs} jobs submitted {self.start:%Y-%m-%d}–{self.end:%Y-%m-%d}, {self.refits} fits",
            " " * width + "".join(f"{name or 'model':>16}" for name in names),
        ]
        for metric in metrics:
            cells = [found.get((metric, name)) for name in names]
            lines.append(f"{metric:<{width}}" + "".join(f"{_short(cell):>16}" for cell in cells))
        lines += [
            f"{score.metric} to {score.baseline}: {score.interval}"
            for score in self.scores
            if score.metric.endswith("_ratio")
        ]
        return "\n".join([*lines, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The report without its predictions, as plain values; a figure that is not finite is null."""
        return {
            "task": self.task, "start": self.start.isoformat(), "end": self.end.isoformat(), "jobs": self.jobs,
            "refits": self.refits, "best_baseline": self.best_baseline, "notes": self.notes,
            "scores": [_plain(score) for score in self.scores], "strata": [_plain(score) for score in self.strata],
            "calibration": self.calibration,
        }  # fmt: skip


def score_rows(scores: list[Score], cluster: str, ts: datetime, task: str, model_version: str) -> pl.DataFrame:
    """Figures as rows of `out_scores`; figures that are not finite are left out."""
    frame = pl.DataFrame(
        [
            {
                "ts": ts, "cluster": cluster, "task": task, "model_version": model_version, "baseline": score.baseline,
                "metric": score.metric, "value": score.interval.value, "low": score.interval.low,
                "high": score.interval.high, "count": score.count,
            }
            for score in scores
            if np.isfinite(score.interval.value)
        ],
        schema_overrides={"low": pl.Float64, "high": pl.Float64},
    )  # fmt: skip
    return conform(frame, "out_scores")


def _short(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    if interval.low is None or interval.high is None:
        return f"{interval.value:.3f}"
    half = (interval.high - interval.low) / 2
    return f"{interval.value:,.0f}±{half:,.0f}" if interval.value >= 100 else f"{interval.value:.3f}±{half:.3f}"


def _plain(score: Score) -> dict[str, Any]:
    interval = score.interval
    return {
        "metric": score.metric, "baseline": score.baseline, "value": _finite(interval.value),
        "low": _finite(interval.low), "high": _finite(interval.high), "count": score.count,
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None

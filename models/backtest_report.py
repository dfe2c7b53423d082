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
    """One figure of a report: a metric of the model (`baseline` empty) or of a baseline.

    Attributes:
        metric: Its whole name, as `male_60s_new`.
        baseline: Whose it is.
        interval: The figure.
        count: Rows it is of.
        measure: What is measured, as `male`; empty: `metric` says it.
        elapsed_s: The rows are of jobs that had run so long.
        part: The rows are of this part of the jobs; empty: of all.
    """

    metric: str
    baseline: str
    interval: Interval
    count: int
    measure: str = ""
    elapsed_s: float | None = None
    part: str = ""


def figure(
    measure: str, baseline: str, interval: Interval, count: int, elapsed_s: float | None = None, part: str = ""
) -> Score:
    """A figure under its whole name: `<measure>[_<elapsed>s][_<part>]`, `_ratio` last."""
    ratio = "_ratio" if measure.endswith("_ratio") else ""
    after = "" if elapsed_s is None else f"_{elapsed_s:.0f}s"
    name = measure.removesuffix("_ratio") + after + (f"_{part}" if part else "") + ratio
    return Score(name, baseline, interval, count, measure, elapsed_s, part)


NO_BAD_END = "no job of the test is recorded to have ended badly: the figures say nothing"


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
        calibration: Nominal level or probability, observed share, rows; `elapsed_s` where asked while running.
        notes: What a reader must know of these figures.
        strata: Figures of parts of the jobs (`models/backtest_parts.py`).
        predictions: What was forecast, one row per job judged (`job_id`, `submit_time`, …).
        primary: The loss that decides.
        best_after: Baseline with the lowest primary loss among jobs that had run so long, by seconds.
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
    primary: str = "male"
    best_after: dict[float, str] = field(default_factory=dict)

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

    def find(self, measure: str, baseline: str = "", elapsed_s: float | None = None, part: str = "") -> Score | None:
        """A figure by what it is of, None where there is none."""
        for score in self.strata if part else self.scores:
            if (score.measure, score.baseline, score.elapsed_s, score.part) == (measure, baseline, elapsed_s, part):
                return score
        return None

    def text(self) -> str:
        """The report as tables for people."""
        from models.backtest_text import report_text

        return report_text(self)

    def to_json(self) -> dict[str, Any]:
        """The report without its predictions, as plain values; a figure that is not finite is null."""
        return {
            "task": self.task, "start": self.start.isoformat(), "end": self.end.isoformat(), "jobs": self.jobs,
            "refits": self.refits, "best_baseline": self.best_baseline, "primary": self.primary,
            "best_baseline_after_s": {f"{at_s:.0f}": name for at_s, name in self.best_after.items()},
            "notes": self.notes,
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


def _plain(score: Score) -> dict[str, Any]:
    interval = score.interval
    return {
        "metric": score.metric, "measure": score.measure or score.metric, "elapsed_s": score.elapsed_s,
        "part": score.part, "baseline": score.baseline, "value": _finite(interval.value),
        "low": _finite(interval.low), "high": _finite(interval.high), "count": score.count,
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None

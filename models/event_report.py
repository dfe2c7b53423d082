"""Outcome of a backtest of events or levels: figures, curves and calibration, and their forms for reading.

Here belong what was found and its form as JSON; not its words (`models/event_text.py`), nor how figures come about
(`models/event_scores.py`, `models/event_alarms.py`, `models/level_backtest.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl

from models.backtest_report import Score
from models.event_alarms import operating_points
from models.event_scores import Judged, curves, event_scores, reliability


@dataclass(frozen=True, slots=True)
class EventReport:
    """Outcome of a backtest.

    Attributes:
        kind: `bottleneck`, `level` or `faults`.
        subject: Class or quantity that was forecast.
        unit: What each forecast is of, as `queue`.
        start, end: The test.
        train_end: End of what the forecasters learned from; None where nothing was learned.
        units: Units in the test.
        rows: Forecasts in the test.
        onsets: Onsets in the test; None of a level.
        scores: All figures, `<metric>_<horizon>`.
        calibration: What was said against what came.
        curves: Points of precision and recall.
        operating: Alarms by what an onset caught is worth.
        notes: What a reader must know of these figures.
        predictions: What was forecast.
    """

    kind: str
    subject: str
    unit: str
    start: datetime
    end: datetime
    train_end: datetime | None
    units: int
    rows: int
    onsets: int | None
    scores: list[Score]
    calibration: list[dict[str, float]] = field(default_factory=list)
    curves: list[dict[str, float | str]] = field(default_factory=list)
    operating: list[dict[str, float | str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    predictions: pl.DataFrame = field(default_factory=pl.DataFrame)

    def value(self, metric: str, baseline: str = "") -> float:
        """A figure by name.

        Raises:
            KeyError: There is none of that name.
        """
        for score in self.scores:
            if score.metric == metric and baseline in (score.baseline, "any"):
                return score.interval.value
        raise KeyError(f"no {metric!r}; metrics: {', '.join(dict.fromkeys(score.metric for score in self.scores))}")

    def text(self) -> str:
        """The report as a table for people."""
        from models.event_text import report_text

        return report_text(self)

    def to_json(self) -> dict[str, Any]:
        """The report without its predictions, as plain values; a figure that is not finite is null."""
        return {
            "kind": self.kind, "subject": self.subject, "unit": self.unit, "start": self.start.isoformat(),
            "end": self.end.isoformat(), "train_end": None if self.train_end is None else self.train_end.isoformat(),
            "units": self.units, "rows": self.rows, "onsets": self.onsets, "notes": self.notes,
            "scores": [
                {
                    "metric": s.metric, "forecaster": s.baseline or "model", "value": s.interval.value,
                    "low": s.interval.low, "high": s.interval.high, "count": s.count,
                }
                for s in self.scores
            ],
            "calibration": self.calibration, "precision_recall": self.curves, "cost_benefit": self.operating,
        }  # fmt: skip


def report_of_events(
    judged: Judged,
    *,
    kind: str,
    subject: str,
    unit: str,
    span_s: tuple[float, float],
    train_end_s: float | None,
    notes: list[str],
    predictions: pl.DataFrame,
    seed: int = 1,
) -> EventReport:
    """Score what was judged.

    Args:
        judged: Forecasts and outcomes of the test.
        kind: As of `EventReport`, as are the next two.
        subject: Class that was forecast.
        unit: What each forecast is of.
        span_s: Start and end of the test, seconds.
        train_end_s: End of what was learned from, seconds.
        notes: What a reader must know.
        predictions: What was forecast.
        seed: Seed of the bootstrap.
    """
    return EventReport(
        kind=kind, subject=subject, unit=unit, start=moment(span_s[0]), end=moment(span_s[1]),
        train_end=None if train_end_s is None else moment(train_end_s),
        units=len(np.unique(judged.unit)), rows=len(judged.unit), onsets=len(judged.onset_s),
        scores=event_scores(judged, seed=seed), calibration=reliability(judged), curves=curves(judged),
        operating=operating_points(judged), notes=notes, predictions=predictions,
    )  # fmt: skip


def moment(seconds: float) -> datetime:
    """Seconds since 1970 as a time in UTC."""
    from datetime import UTC

    return datetime.fromtimestamp(seconds, tz=UTC)


def finite(value: Any) -> Any:
    """The same with every number that is not finite replaced by None, all the way down."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value

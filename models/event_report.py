"""Outcome of a backtest of events or levels: figures, curves and calibration, and their forms for reading.

Here belong how figures become text and JSON, and which goals they are held against in words; not how they come about
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

_ALWAYS_SHOWN = ("base_rate", "rows_with_onset", "average_precision", "auc", "brier", "brier_skill", "mae", "coverage")


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

    @property
    def summary(self) -> str:
        """One line: what was judged, and on what."""
        what = "" if self.onsets is None else f", {self.onsets:,} onsets"
        learned = "nothing learned" if self.train_end is None else f"learned until {self.train_end:%Y-%m-%d %H:%M}"
        return (
            f"{self.kind} {self.subject}: {self.rows:,} rows of {self.units:,} {self.unit}s{what}, "
            f"{self.start:%Y-%m-%d %H:%M}–{self.end:%Y-%m-%d %H:%M} UTC, {learned}"
        )

    def text(self) -> str:
        """The report as a table for people."""
        shown = [s for s in self.scores if not s.metric.endswith("_ratio") and "_skill_" not in s.metric]
        names = list(dict.fromkeys(["", *(score.baseline for score in shown)]))
        metrics = [m for m in dict.fromkeys(score.metric for score in shown) if m.startswith(_ALWAYS_SHOWN)]
        found = {(score.metric, score.baseline): score.interval.value for score in shown}
        width = max((len(metric) for metric in metrics), default=0) + 2
        columns = [max(len(name or "model"), 10) + 2 for name in names]
        lines = [
            self.summary,
            " " * width + "".join(f"{name or 'model':>{w}}" for name, w in zip(names, columns, strict=True)),
        ]
        for metric in metrics:
            cells = [found.get((metric, name)) for name in names]
            lines.append(
                f"{metric:<{width}}" + "".join(f"{short(cell):>{w}}" for cell, w in zip(cells, columns, strict=True))
            )
        for score in self.scores:
            if score.metric.endswith("_ratio"):
                lines.append(f"{score.metric} to {score.baseline}: {score.interval}")
            elif "_skill_" in score.metric:
                lines.append(f"{score.metric} over {score.baseline}: {score.interval.value:.3f}")
        return "\n".join([*lines, *self.notes])

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


def short(value: float | None) -> str:
    """A figure in a few characters."""
    if value is None or not np.isfinite(value):
        return "–"
    if abs(value) >= 1e6:
        return f"{value:.4g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 0.01 or value == 0:
        return f"{value:.4f}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value:.3g}"

"""What trainings on samples and faults share: how many samples are held, and how scores become rows and cards.

Here belong these small pieces alone; the sequences stand in `models/training_hardware.py` and
`models/training_levels.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl

from features.vocabulary import conform, schema

MAX_SAMPLES = 8_000_000  # rows of samples held at once; beyond, whole nodes are drawn
Score = tuple[str, str, float, float | None, float | None, int]
"""Metric, baseline (empty for the challenger), value, low, high, rows."""


def some_nodes(samples: pl.DataFrame, max_samples: int, seed: int) -> pl.DataFrame:
    """All samples, or those of nodes drawn at random until the budget is met; jobs' peers on other nodes are lost."""
    if samples.height <= max_samples:
        return samples
    counts = samples.group_by("node").len().sort("node")
    order = np.random.default_rng(seed).permutation(counts.height)
    total = np.cumsum(counts["len"].to_numpy()[order])
    kept = counts["node"].gather(order[total <= max_samples])
    return samples.filter(pl.col("node").is_in(kept.implode()))


def metrics(scores: list[Score]) -> list[dict[str, Any]]:
    return [
        {"metric": m, "baseline": b, "value": v if np.isfinite(v) else None, "low": low, "high": high, "count": n}
        for m, b, v, low, high, n in scores
    ]


def score_rows(scores: list[Score], cluster: str, at: datetime, task: str, version: str) -> pl.DataFrame:
    rows = [
        {
            "ts": at, "cluster": cluster, "task": task, "model_version": version, "baseline": b, "metric": m,
            "value": v, "low": low, "high": high, "count": n,
        }
        for m, b, v, low, high, n in scores
        if np.isfinite(v)
    ]  # fmt: skip
    return conform(pl.DataFrame(rows, schema=schema("out_scores")), "out_scores")


def moment_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat()

"""Scores of stated odds as a whole: AUROC with its interval, over all jobs and over users never seen, and ECE.

They are no means of losses per row, so they stand apart from `models/scoring.py`. Here belong such figures and their
intervals; not what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.calibration import reliability
from models.judging import Judged
from models.promotion import CONFIDENCE, DRAWS, MIN_BLOCKS, Interval
from models.scoring import auroc

Floats = NDArray[np.float64]
MIN_OF_EACH = 10  # outcomes of either class, without which no AUROC is given


def ece(probability: Floats, happened: NDArray[Any], bins: int = 10) -> float:
    """Expected calibration error: |mean forecast − observed rate| over equal bins of probability, by their rows."""
    table = reliability(probability, happened, bins)
    gaps = [abs(row["forecast"] - row["observed"]) * row["count"] for row in table]
    return float(sum(gaps) / max(len(probability), 1))


def ece_floor(
    probability: Floats, happened: NDArray[Any], blocks: NDArray[Any], *, draws: int = 200, seed: int = 1
) -> Interval:
    """ECE that stated odds would show if each held exactly: mean, and where 95 % of draws lie.

    Outcomes of a block go together as much as they are seen to (the mean product of standardised residuals of two of
    one block): with the square root of that probability an outcome follows its block's own draw, else one of its own.
    An ECE inside this interval says nothing against the odds.
    """
    _, block = np.unique(blocks, return_inverse=True)
    spread = np.sqrt(probability * (1 - probability))
    residual = np.asarray(happened, dtype=np.float64) - probability
    pairs, together = (
        (np.bincount(block, part) ** 2 - np.bincount(block, part**2)).sum() for part in (spread, residual)
    )
    alike = float(np.clip(together / pairs, 0, 1)) if pairs > 0 else 0.0
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        own, common = generator.random(len(block)), generator.random(int(block.max()) + 1)[block]
        follows = generator.random(len(block)) < np.sqrt(alike)
        found.append(ece(probability, np.where(follows, common, own) < probability))
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.mean(found)), float(low), float(high), int(block.max()) + 1)


def auroc_interval(
    score: Floats, happened: NDArray[Any], blocks: NDArray[Any], *, draws: int = DRAWS, seed: int = 1
) -> Interval | None:
    """AUROC and its block-bootstrap interval; None without `MIN_OF_EACH` outcomes of both classes."""
    happened = np.asarray(happened, dtype=bool)
    if min(happened.sum(), (~happened).sum()) < MIN_OF_EACH:
        return None
    value = auroc(score, happened)
    assert value is not None
    names, block = np.unique(blocks, return_inverse=True)
    if len(names) < MIN_BLOCKS:
        return Interval(value, None, None, len(names))
    _, tie = np.unique(score, return_inverse=True)
    generator = np.random.default_rng(seed)
    areas = np.full(draws, np.nan)
    for draw in range(draws):
        weight = generator.multinomial(len(names), np.full(len(names), 1 / len(names)))[block].astype(np.float64)
        positive = np.bincount(tie, weight * happened)
        negative = np.bincount(tie, weight * ~happened)
        pairs = positive.sum() * negative.sum()
        if pairs > 0:
            areas[draw] = float((positive * (np.cumsum(negative) - negative / 2)).sum() / pairs)
    low, high = np.nanquantile(areas, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high), len(names))


def ranked(
    judged: Judged, bad: NDArray[np.bool_], blocks: NDArray[Any], *, draws: int = DRAWS, seed: int = 1
) -> Iterator[tuple[str, Interval, int]]:
    """Name, figure and rows of what the odds of a forecaster are worth; nothing where it states none."""
    if judged.score is None:
        return
    happened = bad if judged.happened is None else judged.happened
    area = auroc_interval(judged.score, happened, blocks, draws=draws, seed=seed)
    if area is not None:
        yield "auroc", area, len(happened)
    if judged.is_new is not None and judged.is_new.any():
        new = judged.is_new
        area = auroc_interval(judged.score[new], happened[new], blocks[new], draws=draws, seed=seed)
        if area is not None:
            yield "auroc_new_users", area, int(new.sum())
    if judged.score.min() >= 0 and judged.score.max() <= 1:
        yield "ece", Interval(ece(judged.score, happened), None, None, 0), len(happened)
        yield "ece_floor", ece_floor(judged.score, happened, blocks, seed=seed), len(happened)

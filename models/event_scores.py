"""How forecasts of events did: precision-recall, Brier skill, calibration, with intervals.

Here belong scores of probabilities that are given, for any unit (GPU, node, queue, rank); not the forecasters, no
decision, no alarms (`models/event_alarms.py`), and not how figures are shown (`models/event_text.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.backtest_report import Score
from models.promotion import CONFIDENCE, DRAWS, MIN_BLOCKS, Interval

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MODEL = ""  # name of the model among forecasters
DAY_S = 86_400.0
BINS = 10
CURVE_POINTS = 120
DRAW_BINS = 200  # of scores, in a bootstrap
DRAWS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Judged:
    """What forecasters said of units at moments, and what came.

    Attributes:
        horizons_s: Rising, seconds.
        unit: Code of each row's unit, shape (rows,).
        at_s: Moment of each row, seconds, shape (rows,).
        came: Whether an onset came within each horizon, shape (rows, horizons).
        known: Whether that is known, same shape.
        onset_unit, onset_s: Unit and moment of each onset of the test, shape (onsets,).
        given: Forecaster to probabilities, shape (rows, horizons); the model is `MODEL`.
        rank: Forecaster to what it ranks rows by, where that tells more apart than its probabilities.
    """

    horizons_s: tuple[float, ...]
    unit: Ints
    at_s: Floats
    came: Flags
    known: Flags
    onset_unit: Ints
    onset_s: Floats
    given: Mapping[str, Floats]
    rank: Mapping[str, Floats] = field(default_factory=dict)

    def ranking(self, name: str) -> Floats:
        """What a forecaster ranks rows by, shape (rows, horizons)."""
        return self.rank.get(name, self.given[name])

    @property
    def baselines(self) -> list[str]:
        return [name for name in self.given if name != MODEL]


def horizon_name(horizon_s: float) -> str:
    """A horizon as people write it: `90s`, `5min`, `1h`, `7d`."""
    for unit_s, word in ((DAY_S, "d"), (3600.0, "h"), (60.0, "min")):
        if horizon_s >= unit_s and horizon_s % unit_s == 0 and not (word == "min" and horizon_s < 180):
            return f"{horizon_s / unit_s:.0f}{word}"
    return f"{horizon_s:.0f}s"


class RankedRows:
    """Rows of one forecaster in the order of its scores, ties together, for areas under weights."""

    def __init__(self, came: Flags, score: Floats) -> None:
        self.order = np.argsort(-score, kind="stable")
        ranked = score[self.order]
        self.came = came[self.order].astype(np.float64)
        self.last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))

    def counts(self) -> tuple[Floats, Floats]:
        """Onsets and rows at or above each distinct score, each of shape (scores,)."""
        return np.cumsum(self.came)[self.last], (self.last + 1).astype(np.float64)

    def average_precision(self) -> float:
        """Area under the precision-recall curve, as steps; NaN without an onset."""
        hits, rows = self.counts()
        if not len(hits) or hits[-1] <= 0:
            return float("nan")
        return float(np.sum(np.diff(hits, prepend=0.0) * hits / rows) / hits[-1])

    def auc(self) -> float:
        """Chance that a row ahead of an onset is ranked over one that is not; NaN without either."""
        hits, rows = self.counts()
        if not len(hits) or hits[-1] <= 0 or rows[-1] <= hits[-1]:
            return float("nan")
        misses = rows - hits
        before = np.concatenate(([0.0], hits[:-1]))
        return float(np.sum(np.diff(misses, prepend=0.0) * (before + hits) / 2) / (hits[-1] * misses[-1]))


def blocks_of(judged: Judged) -> Ints:
    """Block of each row for the bootstrap: unit × day."""
    day = np.floor(judged.at_s / DAY_S).astype(np.int64)
    day -= day.min(initial=0)
    return judged.unit * (int(day.max(initial=0)) + 1) + day


def event_scores(judged: Judged, *, seed: int = 1, draws: int = DRAWS) -> list[Score]:
    """Every figure by horizon: of the model, of each baseline, and the model's ratio or skill to the best of them.

    Intervals are of a block bootstrap over unit × day; none is claimed under `MIN_BLOCKS` blocks with an onset in them.
    """
    out: list[Score] = []
    rng = np.random.default_rng(seed)
    for k, horizon_s in enumerate(judged.horizons_s):
        name, rows = horizon_name(horizon_s), judged.known[:, k]
        count = int(rows.sum())
        if not count:
            continue
        came = judged.came[rows, k]
        block = np.unique(blocks_of(judged)[rows], return_inverse=True)[1]
        out.append(_score(f"base_rate_{name}", MODEL, came.mean(), count))
        out.append(_score(f"rows_with_onset_{name}", MODEL, came.sum(), count))
        ranked = {who: RankedRows(came, judged.ranking(who)[rows, k]) for who in judged.given}
        areas = {who: r.average_precision() for who, r in ranked.items()}
        briers = {who: float(np.mean((p[rows, k] - came) ** 2)) for who, p in judged.given.items()}
        for who, r in ranked.items():
            out.append(_score(f"average_precision_{name}", who, areas[who], count))
            out.append(_score(f"auc_{name}", who, r.auc(), count))
            out.append(_score(f"brier_{name}", who, briers[who], count))
            p = np.clip(judged.given[who][rows, k], 1e-7, 1 - 1e-7)
            out.append(_score(f"log_loss_{name}", who, -np.mean(np.where(came, np.log(p), np.log1p(-p))), count))
            out.append(_score(f"mean_p_{name}", who, p.mean(), count))
        if not judged.baselines or not came.any():
            continue
        best = max(judged.baselines, key=lambda who: areas[who])
        interval = _ratio_interval(
            judged.ranking(MODEL)[rows, k], judged.ranking(best)[rows, k], areas[MODEL] / areas[best], block, came,
            rng, draws,
        )  # fmt: skip
        out.append(Score(f"average_precision_{name}_ratio", best, interval, count))
        best = min(judged.baselines, key=lambda who: briers[who])
        out.append(
            _score(
                f"brier_skill_{name}", best, 1 - briers[MODEL] / briers[best] if briers[best] else float("nan"), count
            )
        )
    return out


def _score(metric: str, who: str, value: float, count: int) -> Score:
    return Score(metric, who, Interval(float(value), None, None, 0), count)


def _ratio_interval(
    model: Floats, best: Floats, value: float, block: Ints, came: Flags, rng: np.random.Generator, draws: int
) -> Interval:
    """Interval of a ratio of average precisions; each draw takes scores in bins, the value does not."""
    with_onset = len(np.unique(block[came]))
    if with_onset < MIN_BLOCKS:
        return Interval(value, None, None, with_onset)
    blocks = int(block.max()) + 1
    parts = []
    for first in range(0, draws, DRAWS_AT_ONCE):
        size = min(DRAWS_AT_ONCE, draws - first)
        drawn = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=size).astype(np.float64)
        parts.append(_drawn_areas(model, block, came, drawn) / _drawn_areas(best, block, came, drawn))
    ratios = np.concatenate(parts)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(ratios * value / np.nanmedian(ratios), [tail, 1 - tail])
    return Interval(value, float(low), float(high), with_onset)


def _drawn_areas(score: Floats, block: Ints, came: Flags, drawn: Floats) -> Floats:
    """Average precision under each draw of blocks, scores put in `DRAW_BINS` bins of about as many onsets."""
    from scipy.sparse import csr_array

    edges = np.unique(np.quantile(score[came], np.linspace(0, 1, DRAW_BINS)))
    bins = len(edges) - np.searchsorted(edges, score, side="right")  # 0 is the top
    shape = (drawn.shape[1], len(edges) + 1)
    rows = csr_array((np.ones(len(score)), (block, bins)), shape=shape)
    hits = csr_array((np.ones(int(came.sum())), (block[came], bins[came])), shape=shape)
    # Sums of draws as (bins × blocks) @ (blocks × draws): the sparse side stands left.
    n, h = (part.T @ drawn.T for part in (rows, hits))
    above, caught = np.cumsum(n, axis=0), np.cumsum(h, axis=0)
    # Inside a bin onsets come evenly: half of it stands above.
    precision = (caught - h / 2) / np.maximum(above - n / 2, 1e-12)
    return (h * precision).sum(axis=0) / np.maximum(caught[-1], 1e-12)


def reliability(judged: Judged) -> list[dict[str, float]]:
    """What was said against what came, by horizon, in bins of about as many rows; the top one finer.

    Returns:
        Rows `horizon_s`, `forecast`, `observed`, `count`.
    """
    out = []
    for k, horizon_s in enumerate(judged.horizons_s):
        rows = judged.known[:, k]
        p, came = judged.given[MODEL][rows, k], judged.came[rows, k]
        if not len(p):
            continue
        share = np.concatenate((np.linspace(0, 0.9, BINS), [0.95, 0.98, 0.99, 0.995]))
        edges = np.unique(np.quantile(p, share))
        code = np.clip(np.searchsorted(edges, p, side="right") - 1, 0, len(edges) - 1)
        n = np.bincount(code, minlength=len(edges))
        said, happened = np.bincount(code, weights=p), np.bincount(code, weights=came)
        out += [
            {"horizon_s": horizon_s, "forecast": said[i] / n[i], "observed": happened[i] / n[i], "count": int(n[i])}
            for i in range(len(edges))
            if n[i]
        ]
    return out


def curves(judged: Judged) -> list[dict[str, float | str]]:
    """Precision and recall as the threshold falls: rows `horizon_s`, `forecaster`, `recall`, `precision`."""
    out: list[dict[str, float | str]] = []
    for k, horizon_s in enumerate(judged.horizons_s):
        rows = judged.known[:, k]
        if not judged.came[rows, k].any():
            continue
        for who in judged.given:
            hits, n = RankedRows(judged.came[rows, k], judged.ranking(who)[rows, k]).counts()
            recall = hits / hits[-1]
            picked = np.unique(np.searchsorted(recall, np.linspace(recall[0], 1, CURVE_POINTS)))
            out += [
                {
                    "horizon_s": horizon_s, "forecaster": who, "recall": float(recall[i]),
                    "precision": float(hits[i] / n[i]),
                }
                for i in picked
            ]  # fmt: skip
    return out

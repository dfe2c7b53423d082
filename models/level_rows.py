"""Windows of levels at past moments, and what came of them: the rows that courses of levels are learned from.

Here belong which moments are taken and their outcomes; features stand in `features/level_windows.py`, the forecaster in
`models/level_course.py`. What came at a horizon is the sample nearest to it within half a usual gap or a tenth of the
horizon; a row whose future is a silence has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.conditions import CLASSES, INDEX
from features.history import SampleHistory
from features.level_windows import HORIZONS_S, LEVELS, OF_CLASS, LevelBlock, level_block

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEAR_SHARE = 0.1  # of the horizon: as far as what came may lie from it, or half a usual gap
MIN_PAST_S = 300.0  # a GPU seen for less says little
MAX_LATE_S = 10.0  # moments lie up to so far behind the newest sample, as those of a tick do
SCREENED_SHARE = 0.5  # of the rows: GPUs that the nowcast would look at closely, where there are so many
_PIECE = 4_096


@dataclass(frozen=True, slots=True)
class CourseRows:
    """Windows of one quantity and what came of them.

    Attributes:
        block: Features.
        at_s: Moment of each row, seconds, shape (rows,).
        gpu: Code of each row's GPU, shape (rows,).
        came: Value at each horizon, shape (rows, len(HORIZONS_S)), NaN where not known.
    """

    block: LevelBlock
    at_s: Floats
    gpu: NDArray[np.int64]
    came: Floats

    def __len__(self) -> int:
        return len(self.at_s)

    def where(self, rows: NDArray) -> CourseRows:
        """Some of the rows."""
        return CourseRows(self.block.where(rows), self.at_s[rows], self.gpu[rows], self.came[rows])


def course_rows(
    history: SampleHistory,
    quantity: str,
    begin_s: float,
    end_s: float,
    *,
    count: int,
    seed: int = 1,
    screened_share: float = SCREENED_SHARE,
) -> CourseRows:
    """Rows drawn at random: some of them of GPUs that could be in trouble, the rest of any.

    Args:
        history: Recorded samples.
        quantity: One of `features.level_windows.LEVELS`.
        begin_s: No moment lies before.
        end_s: Nor at or after.
        count: Rows at most.
        seed: Seed of the choice.
        screened_share: Of the rows: GPUs that the nowcast would look at closely, where there are so many.
    """
    rng = np.random.default_rng(seed)
    x = history.values[INDEX[LEVELS[quantity].column]]
    first = history.ts[history.starts[:-1]][history.gpu] if len(history.ts) else history.ts
    usable = ~np.isnan(x) & (history.ts >= begin_s) & (history.ts < end_s) & (history.ts >= first + MIN_PAST_S)
    picked = np.zeros(len(x), dtype=bool)
    for name, level in OF_CLASS.items():
        if level == quantity and name in CLASSES:
            picked |= history.screened(name)
    near, any_row = np.flatnonzero(usable & picked), np.flatnonzero(usable)
    near = rng.choice(near, min(len(near), round(screened_share * count)), replace=False)
    rest = rng.choice(any_row, min(len(any_row), count - len(near)), replace=False)
    rows = np.unique(np.concatenate((near, rest))).astype(np.int64)
    at_s = history.ts[rows] + rng.uniform(0.0, min(MAX_LATE_S, history.interval_s), len(rows))
    # No later sample may have come by the moment.
    after = np.minimum(rows + 1, len(history.ts) - 1)
    of_same = (history.gpu[after] == history.gpu[rows]) & (after > rows)
    at_s = np.where(of_same & (history.ts[after] <= at_s), history.ts[rows], at_s)
    return rows_at(history, quantity, rows, at_s)


def rows_at(history: SampleHistory, quantity: str, rows: Ints, at_s: Floats) -> CourseRows:
    """Windows that end with given samples, at moments not before them, and what came.

    Args:
        history: Recorded samples.
        quantity: One of `features.level_windows.LEVELS`.
        rows: Rows of the newest samples, shape (rows,).
        at_s: Moments, seconds, shape (rows,).
    """
    blocks = []
    for first in range(0, max(len(rows), 1), _PIECE):
        piece = rows[first : first + _PIECE]
        blocks.append(level_block(quantity, history.windows(history.gpu[piece], piece), at_s[first : first + _PIECE]))
    x = history.values[INDEX[LEVELS[quantity].column]].astype(np.float64)
    gpu = history.gpu[rows]
    came = np.full((len(rows), len(HORIZONS_S)), np.nan)
    for k, horizon_s in enumerate(HORIZONS_S):
        near_s = max(0.5 * history.interval_s, NEAR_SHARE * horizon_s)
        before = history.last_at(gpu, at_s + horizon_s)
        after = np.minimum(before + 1, len(history.ts) - 1)
        gap_before = at_s + horizon_s - history.ts[before]
        gap_after = np.where(history.gpu[after] == gpu, history.ts[after] - at_s - horizon_s, np.inf)
        gap_after = np.where(gap_after > 0, gap_after, np.inf)
        nearest = np.where(gap_after < gap_before, after, before)
        ok = (np.minimum(gap_before, gap_after) <= near_s) & (nearest > rows)  # no row is its own future
        came[:, k] = np.where(ok, x[nearest], np.nan)
    return CourseRows(_joined(blocks), at_s, gpu, came)


def _joined(blocks: list[LevelBlock]) -> LevelBlock:
    first = blocks[0]
    return LevelBlock(
        first.quantity, first.names, np.concatenate([b.matrix for b in blocks]),
        np.concatenate([b.last for b in blocks]), np.concatenate([b.unit for b in blocks]),
        {name: np.concatenate([b.naive[name] for b in blocks]) for name in first.naive},
        np.concatenate([b.roughness for b in blocks]),
    )  # fmt: skip

"""Figures of a model beside its baselines: on all rows that were judged, after so long a run, and on parts of the jobs.

Here belong means, medians and ratios with their intervals; not the losses they are of (`models/tasks.py`), who is in
which part (`models/backtest_parts.py`), and not how the intervals are drawn (`models/promotion.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory
from models.backtest_parts import SIBLING_PART, parts_of, sibling_medians_s
from models.backtest_report import Score, figure
from models.calibration import MIN_ROWS
from models.judging import Judged, Walked
from models.promotion import DRAWS, Interval, mean_interval, ratio_interval
from models.ranking import ranked
from models.recency import STRATA
from models.scoring import log_error

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_OF_PARTS = (
    "male", "brier", "coverage_80", "within_2x", "within_25pct", "mode_within_25pct", "within_60s", "mae_s", "pinball",
    "pinball_10_50_90", "q90_over_q10",
)  # fmt: skip


def compare(
    task: Walked, model: Judged, baselines: dict[str, Judged], blocks: NDArray[Any], bad: NDArray[np.bool_], *,
    draws: int = DRAWS, seed: int = 1, elapsed_s: float | None = None, part: str = "",
) -> tuple[list[Score], str]:  # fmt: skip
    """Figures of a model and its baselines on the same rows, and the name of the best baseline by primary loss.

    Args:
        task: What was forecast.
        model: The model's losses.
        baselines: Those of each baseline; one without the primary loss has no part in being the best.
        blocks: Block of each row.
        bad: Whether each job ended badly.
        draws: Bootstrap draws.
        seed: Seed of the draws.
        elapsed_s: The rows are of jobs asked about so long after their start; None: at the submit.
        part: The rows are of this part of the jobs, whose odds are not ranked; empty: of all.
    """
    scores = []
    for name, judged in (("", model), *baselines.items()):
        for metric, values in judged.metrics.items():
            known = int((~np.isnan(values)).sum())
            if known and not (part and metric not in _OF_PARTS):
                interval = mean_interval(values, blocks, draws=draws, seed=seed)
                scores.append(figure(metric, name, interval, known, elapsed_s, part))
        for metric, values in judged.medians.items():
            scores.append(figure(metric, name, bare(np.median(values), len(values)), len(values), elapsed_s, part))
        for metric, interval, count in () if part else ranked(judged, bad, blocks, draws=draws, seed=seed):
            scores.append(figure(metric, name, interval, count, elapsed_s))
    losses = {
        name: judged.metrics[task.primary] for name, judged in baselines.items() if task.primary in judged.metrics
    }
    best = min(losses, key=lambda name: float(losses[name].mean()))
    for metric in (task.primary, "pinball_10_50_90"):
        for name, judged in baselines.items():
            if metric in judged.metrics and metric in model.metrics:
                ratio = ratio_interval(model.metrics[metric], judged.metrics[metric], blocks, draws=draws, seed=seed)
                scores.append(figure(f"{metric}_ratio", name, ratio, len(blocks), elapsed_s, part))
    return scores, best


@dataclass(frozen=True, slots=True)
class Figures:
    """What the figures of a walk are made of; all arrays of shape (n,), by rows of the history that were judged."""

    task: Walked
    history: JobHistory
    model: Judged
    baselines: dict[str, Judged]
    rows: Ints
    blocks: NDArray[Any]
    draws: int
    seed: int

    def compare(
        self, here: NDArray[np.bool_], *, elapsed_s: float | None = None, part: str = "", only: str = ""
    ) -> tuple[list[Score], str]:
        """`compare` on some of the rows; beside one baseline only, where it is named."""
        beside = {only: self.baselines[only]} if only else self.baselines
        return compare(
            self.task, self.model.of(here), {name: judged.of(here) for name, judged in beside.items()},
            self.blocks[here], self.history.table.is_bad[self.rows[here]], draws=self.draws, seed=self.seed,
            elapsed_s=elapsed_s, part=part,
        )  # fmt: skip

    def whole(self) -> tuple[list[Score], str]:
        return self.compare(np.ones(len(self.rows), dtype=bool))

    def after(self, elapsed_s: float) -> NDArray[np.bool_]:
        """Which rows are of jobs asked about so long after their start."""
        if self.model.elapsed_s is None:
            return np.zeros(len(self.rows), dtype=bool)
        return self.model.elapsed_s == elapsed_s

    def parts(self, best: str) -> tuple[list[Score], dict[float, str]]:
        """Figures of each part of `MIN_ROWS` jobs, and of each of `STRATA`, since cold starts are always shown.

        With the model stand its best baseline overall or, where jobs were asked about while they ran, the best after so
        long: also returned, for each time that `MIN_ROWS` jobs reached.
        """
        outcome = "start" if self.task.name == "wait" else "run"
        parts = parts_of(self.history, self.rows, outcome=outcome, by_length=self.task.name != "wait")
        looks: list[tuple[float | None, NDArray[np.bool_], str]] = [(None, np.ones(len(self.rows), dtype=bool), best)]
        best_after = {}
        for at_s in [] if self.model.elapsed_s is None else np.unique(self.model.elapsed_s).tolist():
            here = self.after(at_s)
            if here.sum() >= MIN_ROWS:
                losses = {n: j.metrics[self.task.primary][here].mean() for n, j in self.baselines.items()}
                best_after[at_s] = min(losses, key=lambda name: float(losses[name]))
                looks.append((at_s, here, best_after[at_s]))
        scores = []
        for at_s, there, beside in looks:
            for name, members in parts.items():
                here = there & members
                if here.sum() >= (1 if name in STRATA else MIN_ROWS):
                    scores += self.compare(here, elapsed_s=at_s, part=name, only=beside)[0]
        return scores, best_after

    def siblings(self, best: str) -> list[Score]:
        """The model where a job has siblings, beside what is left when one is told how these ran."""
        told = sibling_medians_s(self.history.table, self.rows)
        here = ~np.isnan(told)
        if not here.any():
            return []
        floor = log_error(told[here], self.history.table.runtime_s[self.rows[here]])
        interval = mean_interval(floor, self.blocks[here], draws=self.draws, seed=self.seed)
        return [
            *self.compare(here, part=SIBLING_PART, only=best)[0],
            figure("male", "siblings", interval, int(here.sum()), None, SIBLING_PART),
        ]


def bare(value: float | np.floating[Any], count: int) -> Interval:
    """A figure that has no interval."""
    return Interval(float(value), None, None, count)

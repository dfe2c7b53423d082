"""How bottleneck forecasts did: Brier scores, and alarms against onsets.

Here belong scores of probabilities that are given; not the forecasters, and no decision. Lead time counts from the tick
that raised the alarm, recall counts every onset, also those that the screen never showed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.history import SampleHistory
from features.unit_history import UnitHistory
from models.onsets import LAST_S, Course, Rows, sample_rows
from models.trend import HORIZONS_S

EPISODE_GAP_S = 60.0  # alarms of a GPU this close together are one


@dataclass(frozen=True, slots=True)
class Alarms:
    """Alarms of one forecaster against the onsets of one class, job by job: what befalls a gang at once is one event.

    Attributes:
        raised, right: Alarms, and those that an onset followed within the last horizon.
        events, caught: Events, and those with an alarm standing on at least half of their GPUs when they came.
        forecastable, forecastable_caught: The same over events that have a precursor; None where that is not known.
        onsets, onsets_caught: The same GPU by GPU.
        lead_s: Median lead time of the events caught, seconds; NaN when none was.
    """

    raised: int
    right: int
    events: int
    caught: int
    forecastable: int | None
    forecastable_caught: int | None
    onsets: int
    onsets_caught: int
    lead_s: float

    @property
    def precision(self) -> float:
        """Share of alarms that were right."""
        return self.right / self.raised if self.raised else float("nan")

    @property
    def recall(self) -> float:
        """Share of all events that were caught."""
        return self.caught / self.events if self.events else float("nan")

    @property
    def forecastable_recall(self) -> float:
        """Share of forecastable events that were caught."""
        if not self.forecastable or self.forecastable_caught is None:
            return float("nan")
        return self.forecastable_caught / self.forecastable


def all_rows(history: SampleHistory | UnitHistory, of: Course, start_s: float, end_s: float) -> Rows:
    """Every sample at which a forecaster would have been asked, each one row."""
    return sample_rows(history, of, start_s, end_s, seed=0, max_quiet=10**9, max_ahead=10**9)


def brier(rows: Rows, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weighted Brier score by horizon over rows whose outcome is known, shape (horizons,)."""
    out = np.full(len(HORIZONS_S), np.nan)
    for i, horizon_s in enumerate(HORIZONS_S):
        came, known = rows.outcome(horizon_s)
        if known.any():
            out[i] = np.average((probabilities[known, i] - came[known]) ** 2, weights=rows.weight[known])
    return out


def row_losses(rows: Rows, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weighted squared error over horizons whose outcome is known, shape (rows,): what promotion is judged on."""
    total = np.zeros(len(rows))
    for i, horizon_s in enumerate(HORIZONS_S):
        came, known = rows.outcome(horizon_s)
        total += np.where(known, (probabilities[:, i] - came) ** 2, 0.0)
    return total * rows.weight


def skill(model: NDArray[np.float64], naive: Mapping[str, NDArray[np.float64]]) -> tuple[str, NDArray[np.float64]]:
    """Best baseline by mean Brier score, and 1 − model ÷ that baseline by horizon."""
    best = min(naive, key=lambda name: float(np.nanmean(naive[name])))
    with np.errstate(divide="ignore", invalid="ignore"):
        return best, 1 - model / naive[best]


def average_precision(rows: Rows, probabilities: NDArray[np.float64], horizon_s: int = 120) -> float:
    """Weighted area under the precision-recall curve of one horizon."""
    i = HORIZONS_S.index(horizon_s)
    came, known = rows.outcome(horizon_s)
    order = np.argsort(-probabilities[known, i], kind="stable")
    hit = (came[known] * rows.weight[known])[order]
    weight = rows.weight[known][order]
    score = probabilities[known, i][order]
    if hit.sum() <= 0:
        return float("nan")
    last = np.append(score[1:] != score[:-1], True)  # ties stand or fall together
    tp, n = np.cumsum(hit)[last], np.cumsum(weight)[last]
    recall = np.concatenate(([0.0], tp / hit.sum()))
    return float(np.sum(np.diff(recall) * tp / n))


def alarms(
    history: SampleHistory | UnitHistory,
    of: Course,
    rows: Rows,
    probabilities: NDArray[np.float64],
    start_s: float,
    end_s: float,
    *,
    threshold: float = 0.5,
    is_forecastable: NDArray[np.bool_] | None = None,
) -> Alarms:
    """Count alarms against onsets.

    Args:
        history: The samples.
        of: The class followed through them.
        rows: As of `all_rows`.
        probabilities: Shape (rows, horizons).
        start_s: Start of the span, included.
        end_s: End of the span.
        threshold: Probability at the last horizon that raises an alarm.
        is_forecastable: Of each onset in `of.onset_row`.
    """
    raised = np.flatnonzero(probabilities[:, -1] >= threshold)
    raised = raised[np.lexsort((rows.block.at_s[raised], rows.block.gpus[raised]))]
    gpu, at = rows.block.gpus[raised], rows.block.at_s[raised]
    begins = np.ones(len(raised), dtype=bool)
    if len(raised) > 1:
        begins[1:] = (np.diff(gpu) != 0) | (np.diff(at) > EPISODE_GAP_S)
    episode = np.cumsum(begins) - 1
    first = at[begins]
    followed, unknown = np.zeros(len(first), dtype=bool), np.ones(len(first), dtype=bool)
    came, known = rows.outcome(LAST_S)
    np.logical_or.at(followed, episode, came[raised] > 0)
    np.logical_and.at(unknown, episode, ~known[raised])
    counted = followed | ~unknown
    group = _together(rows.job[raised][begins], gpu[begins], first)[counted]
    right = np.zeros(int(group.max(initial=-1)) + 1, dtype=bool)
    np.logical_or.at(right, group, followed[counted])

    inside = (history.ts[of.onset_row] >= start_s) & (history.ts[of.onset_row] < end_s)
    onset = of.onset_row[inside]
    lead = _lead_s(history, onset, gpu, at, first, episode)
    event = _together(history.job[onset], history.gpu[onset], history.ts[onset])
    events = int(event.max(initial=-1)) + 1
    share = np.bincount(event, weights=~np.isnan(lead), minlength=events) / np.maximum(np.bincount(event), 1)
    caught = share >= 0.5
    leads = [np.nanmedian(lead[event == i]) for i in np.flatnonzero(caught)]
    can = None
    if is_forecastable is not None:
        can = np.zeros(events, dtype=bool)
        np.logical_or.at(can, event, is_forecastable[inside])
    return Alarms(
        raised=len(right),
        right=int(right.sum()),
        events=events,
        caught=int(caught.sum()),
        forecastable=None if can is None else int(can.sum()),
        forecastable_caught=None if can is None else int((caught & can).sum()),
        onsets=len(onset),
        onsets_caught=int((~np.isnan(lead)).sum()),
        lead_s=float(np.median(leads)) if leads else float("nan"),
    )


def _together(job: NDArray[np.int64], gpu: NDArray[np.int64], at: NDArray[np.float64]) -> NDArray[np.int64]:
    """Number of the event each belongs to: of one job (or of one GPU without a job) within the last horizon."""
    key = np.where(job >= 0, job, -1 - gpu)
    order = np.lexsort((at, key))
    begins = np.ones(len(order), dtype=bool)
    if len(order) > 1:
        begins[1:] = (np.diff(key[order]) != 0) | (np.diff(at[order]) > LAST_S)
    out = np.empty(len(order), dtype=np.int64)
    out[order] = np.cumsum(begins) - 1
    return out


def _lead_s(
    history: SampleHistory | UnitHistory,
    onset: NDArray[np.int64],
    gpu: NDArray[np.int64],
    at: NDArray[np.float64],
    first: NDArray[np.float64],
    episode: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Seconds from the start of the alarm that stood at each onset, NaN where none did."""
    lead = np.full(len(onset), np.nan)
    if not len(at) or not len(onset):
        return lead
    base = history.ts.min()
    span = (history.ts.max() - base + 1) * 2
    place = np.searchsorted(gpu * span + (at - base), history.gpu[onset] * span + (history.ts[onset] - base)) - 1
    safe = np.maximum(place, 0)
    stands = (place >= 0) & (gpu[safe] == history.gpu[onset]) & (history.ts[onset] - at[safe] <= LAST_S)
    return np.where(stands, history.ts[onset] - first[episode[safe]], np.nan)

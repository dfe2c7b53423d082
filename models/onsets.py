"""Rows that bottleneck models learn from and are judged on: a GPU (node, port, queue) at a moment, and what followed.

Here belong the choice of rows, their weights, their outcome by interval and what is unknown about it; not the features
(`features/windows.py`), not the rules of labels (`features/labels.py`), and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.history import SampleHistory
from features.label_memory import failed_while_growing
from features.label_spans import CLEAR, SET, UNKNOWN, excluded_rows, gap_s, runs
from features.labels import states
from features.thresholds import ThresholdBook
from features.unit_history import UnitHistory
from features.windows import WINDOW_S, FeatureBlock
from models.trend import HORIZONS_S

STEP_S = 30.0  # length of one interval of the hazard
LAST_S = float(HORIZONS_S[-1])
TICK_DRIFT = 1.013  # ticks against samples: as a share of their period
PURGE_S = LAST_S + WINDOW_S  # between rows that teach and rows that judge: no sample serves both
# Links fill for a whole gang at once: one job counts as one, however many GPUs it has, or one large job would outweigh
# every other that a day has seen.
GANG_CLASSES = frozenset({"nvlink_saturation"})


@dataclass(frozen=True, slots=True)
class Course:
    """What is known of one class on every GPU.

    Attributes:
        bottleneck_class: The class.
        state: State at every sample of the history.
        is_screened: Samples at which the screen would have picked the GPU.
        onset_row: Rows of seen onsets, ascending.
        break_row: Last rows before something unknown, ascending: outcomes after them are censored.
    """

    bottleneck_class: str
    state: NDArray[np.int8]
    is_screened: NDArray[np.bool_]
    onset_row: NDArray[np.int64]
    break_row: NDArray[np.int64]


def course(
    history: SampleHistory | UnitHistory,
    bottleneck_class: str,
    book: ThresholdBook,
    excluded: pl.DataFrame | None = None,
    jobs: pl.DataFrame | None = None,
) -> Course:
    """Follow a class through a history; arguments as of `features.labels.label_bottlenecks`."""
    if isinstance(history, UnitHistory):
        state = history.state.copy()
        state[excluded_rows(excluded, bottleneck_class, history.node_names, history.node, history.ts)] = UNKNOWN
    else:
        state = states(history, bottleneck_class, book, excluded)
    found = runs(history, state)
    onset = found.first[found.is_known & found.has_held]
    n = len(state)
    ends = np.ones(n, dtype=bool)
    if n > 1:
        ends[:-1] = (np.diff(history.gpu) != 0) | (np.diff(history.ts) > gap_s(history)) | (state[1:] == UNKNOWN)
    if bottleneck_class == "memory_exhaustion" and isinstance(history, SampleHistory) and jobs is not None and n:
        last, onset_s = failed_while_growing(history, state, found, jobs)
        # The onset lies between two samples: it counts at the first sample after it, if there is one.
        row = np.where(history.ts[last] >= onset_s, last, np.minimum(last + 1, n - 1))
        onset = np.unique(np.concatenate((onset, row[history.gpu[row] == history.gpu[last]])))
    hidden = found.first[~found.is_known]
    ends[np.maximum(hidden - 1, 0)] = True
    return Course(bottleneck_class, state, history.screened(bottleneck_class), np.sort(onset), np.flatnonzero(ends))


@dataclass(frozen=True, slots=True)
class Rows:
    """GPUs at moments, with what followed.

    Attributes:
        block: Features.
        node: Node code of each row's GPU.
        job: Code of the job on it, -1 for none.
        onset_in_s: Seconds to the next onset, infinite when none was seen, shape (rows,).
        known_s: Seconds for which the outcome is known, shape (rows,).
        weight: How many rows of the whole each stands for; of a gang class, in shares of its job. Shape (rows,).
    """

    block: FeatureBlock
    node: NDArray[np.int64]
    job: NDArray[np.int64]
    onset_in_s: NDArray[np.float64]
    known_s: NDArray[np.float64]
    weight: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.weight)

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """Some of the rows."""
        of = self.block
        block = replace(of, gpus=of.gpus[mask], at_s=of.at_s[mask], matrix=of.matrix[mask])
        return Rows(
            block, self.node[mask], self.job[mask], self.onset_in_s[mask], self.known_s[mask], self.weight[mask]
        )

    def outcome(self, horizon_s: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Whether an onset came within a horizon, and whether that is known. Each of shape (rows,)."""
        came = self.onset_in_s <= horizon_s
        return came.astype(np.float64), came | (self.known_s >= horizon_s)

    def person_periods(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Rows × intervals that were entered at risk and whose outcome is known.

        Returns:
            Row numbers, interval numbers (0 is (0, 30] s), and whether the onset came in that interval.
        """
        rows, intervals, outcome = [], [], []
        for k in range(len(HORIZONS_S)):
            begin, end = k * STEP_S, (k + 1) * STEP_S
            at_risk = self.onset_in_s > begin
            came = at_risk & (self.onset_in_s <= end)
            known = came | (at_risk & (self.known_s >= end))
            picked = np.flatnonzero(known)
            rows.append(picked)
            intervals.append(np.full(len(picked), k))
            outcome.append(came[picked].astype(np.float64))
        return np.concatenate(rows), np.concatenate(intervals), np.concatenate(outcome)


def sample_rows(
    history: SampleHistory | UnitHistory,
    of: Course,
    start_s: float,
    end_s: float,
    *,
    seed: int,
    max_quiet: int = 15_000,
    max_ahead: int = 15_000,
) -> Rows:
    """Rows at which the class was clear and the screen had picked the GPU.

    Rows ahead of an onset are all kept (up to `max_ahead`), quiet ones are sampled and weighted up. Each row's moment
    lies somewhere between its sample and the next one, as ticks do.

    Args:
        history: The samples.
        of: The class followed through them.
        start_s: Start of the span, included, seconds.
        end_s: End of the span: no outcome after it is looked at.
        seed: Seed of the sampling.
        max_quiet: Quiet rows kept at most, about.
        max_ahead: Rows ahead of an onset kept at most, about.
    """
    rng = np.random.default_rng(seed)
    ts, n = history.ts, len(history.ts)
    candidates = np.flatnonzero((of.state == CLEAR) & of.is_screened & (ts >= start_s) & (ts < end_s))
    following = np.minimum(candidates + 1, max(n - 1, 0))
    same = (following > candidates) & (history.gpu[following] == history.gpu[candidates])
    spacing = np.where(same, np.minimum(ts[following] - ts[candidates], history.interval_s), history.interval_s)
    at = ts[candidates] + rng.random(len(candidates)) * spacing * 0.98
    onset_in, known = _outcome(history, of, candidates, at, end_s)
    ahead = onset_in <= LAST_S
    usable = ahead | (known >= STEP_S)
    share_ahead = min(1.0, max_ahead / max(int((ahead & usable).sum()), 1))
    share_quiet = min(1.0, max_quiet / max(int((~ahead & usable).sum()), 1))
    share = np.where(ahead, share_ahead, share_quiet)
    picked = np.flatnonzero(usable & (rng.random(len(candidates)) < share))
    gpu = history.gpu[candidates[picked]]
    return Rows(
        history.features(gpu, at[picked], of.bottleneck_class),
        history.node[candidates[picked]],
        history.job[candidates[picked]],
        onset_in[picked],
        known[picked],
        1 / share[picked] / _gang_size(history, of)[candidates[picked]],
    )


def tick_rows(
    history: SampleHistory,
    of: Course,
    start_s: float,
    end_s: float,
    *,
    tick_s: float,
    shares: tuple[float, float] = (1.0, 1.0),
    seed: int = 0,
) -> Rows:
    """Rows as a live forecaster is asked: at every tick, of what the newest sample of each GPU said then.

    Ticks are a little out of step with samples, as clocks are, so that samples of every age are asked about.

    Args:
        history: The samples.
        of: The class followed through them.
        start_s: Start of the span, included, seconds.
        end_s: End of the span: no outcome after it is looked at.
        tick_s: Time between ticks, seconds.
        shares: Of rows ahead of an onset, and of the others, that are kept; they are weighted up.
        seed: Seed of that choice.
    """
    moments = np.arange(start_s, end_s, tick_s * TICK_DRIFT)
    everyone = np.arange(len(history.uuids))
    rows, at = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    is_asked = (of.state == CLEAR) & of.is_screened
    for moment in moments:
        last = history.last_at(everyone, np.full(len(everyone), moment))
        last = last[last >= 0]
        last = last[is_asked[last] & (moment - history.ts[last] <= history.stale_s)]
        rows.append(last)
        at.append(np.full(len(last), moment))
    row, when = np.concatenate(rows), np.concatenate(at)
    onset_in, known = _outcome(history, of, row, when, end_s)
    ahead = onset_in <= LAST_S
    share = np.where(ahead, *shares)
    kept = (ahead | (known >= STEP_S)) & (onset_in > 0)
    kept &= np.random.default_rng(seed).random(len(row)) < share
    row, when, share = row[kept], when[kept], share[kept]
    return Rows(
        history.features(history.gpu[row], when, of.bottleneck_class), history.node[row], history.job[row],
        onset_in[kept], known[kept], 1 / share / _gang_size(history, of)[row],
    )  # fmt: skip


def _gang_size(history: SampleHistory | UnitHistory, of: Course) -> NDArray[np.int64]:
    """GPUs of each sample's job, 1 where the class does not befall gangs."""
    size = np.ones(len(history.ts), dtype=np.int64)
    if of.bottleneck_class in GANG_CLASSES and history.job_ids:
        of_job = np.unique(history.job * len(history.uuids) + history.gpu)
        counts = np.bincount(of_job[of_job >= 0] // len(history.uuids), minlength=len(history.job_ids))
        size = np.where(history.job >= 0, counts[history.job], 1)
    return np.maximum(size, 1)


def _outcome(
    history: SampleHistory | UnitHistory, of: Course, rows: NDArray[np.int64], at: NDArray[np.float64], end_s: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds to the next onset of each row's GPU, and seconds for which the outcome is known."""
    ts, gpu = history.ts, history.gpu
    brk = of.break_row[np.minimum(np.searchsorted(of.break_row, rows), max(len(of.break_row) - 1, 0))]
    known = np.minimum(ts[brk] + 0.5 * history.interval_s, end_s) - at
    onset_in = np.full(len(rows), np.inf)
    if len(of.onset_row):
        place = np.searchsorted(of.onset_row, rows, side="right")
        inside = place < len(of.onset_row)
        nxt = of.onset_row[np.minimum(place, len(of.onset_row) - 1)]
        same = inside & (gpu[nxt] == gpu[rows]) & (nxt <= brk) & (ts[nxt] <= end_s)
        onset_in = np.where(same, ts[nxt] - at, np.inf)
    return onset_in, known


def screen_recall(history: SampleHistory | UnitHistory, of: Course, start_s: float, end_s: float) -> tuple[int, int]:
    """How many onsets the screen would have shown to a forecaster within the last horizon before them.

    Returns:
        Onsets that were screened at some sample in the 120 s before them, and onsets in all.
    """
    onsets = of.onset_row[(history.ts[of.onset_row] >= start_s) & (history.ts[of.onset_row] < end_s)]
    picked = np.concatenate(([0], np.cumsum(of.is_screened & (of.state != SET))))
    seen = 0
    for row in onsets:
        first = np.searchsorted(history.ts[history.starts[history.gpu[row]] : row], history.ts[row] - LAST_S)
        seen += int(picked[row] - picked[history.starts[history.gpu[row]] + first] > 0)
    return seen, len(onsets)

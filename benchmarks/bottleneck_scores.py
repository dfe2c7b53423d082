"""Claims of alarms against onsets, job by job, with what a hint's way to its reader costs taken off the lead.

Here belongs the counting of `benchmarks/bottleneck.py`. An alarm claims an onset within the last horizon and stands
until that is over or the onset has come; one that goes on claims anew, so that standing all day earns nothing. What
befalls a gang at once is one: claims and onsets of a job within the last horizon count once, and are right or caught
if half of their GPUs are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.bottleneck_rows import Asked
from models.onsets import LAST_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
VISIBLE_S = 2.0  # from a tick to the answer of the API: the goal of DESIGN, p99


@dataclass(frozen=True, slots=True)
class Count:
    """Claims and events of one class on some clusters.

    Attributes:
        claims, right: Claims whose outcome is known, and those that came true.
        lead_s: Of each event, from the hint's visibility to the true onset, s; NaN: not caught.
        is_ramp: Which events had a precursor.
        length_s: Length of their ramps, s.
    """

    claims: int
    right: int
    lead_s: Floats
    is_ramp: NDArray[np.bool_]
    length_s: Floats

    def __add__(self, other: Count) -> Count:
        return Count(
            self.claims + other.claims, self.right + other.right, np.append(self.lead_s, other.lead_s),
            np.append(self.is_ramp, other.is_ramp), np.append(self.length_s, other.length_s),
        )  # fmt: skip

    @property
    def precision(self) -> float:
        """Share of claims that came true."""
        return self.right / self.claims if self.claims else float("nan")

    def recall(self, of: NDArray[np.bool_] | None = None) -> float:
        """Share of events that were caught: of all, or of some."""
        lead = self.lead_s if of is None else self.lead_s[of]
        return float((~np.isnan(lead)).mean()) if len(lead) else float("nan")

    @property
    def lead(self) -> float:
        """Median lead over the events with a precursor that were caught, s."""
        lead = self.lead_s[self.is_ramp & ~np.isnan(self.lead_s)]
        return float(np.median(lead)) if len(lead) else float("nan")


def count(asked: Asked, probabilities: Floats, threshold: float) -> Count:
    """Count the claims of a forecaster on one cluster.

    Args:
        asked: Rows and onsets.
        probabilities: Shape (rows, horizons).
        threshold: Probability of the last horizon from which an alarm stands.
    """
    rows, onsets = asked.rows, asked.onsets
    picked = np.flatnonzero(probabilities[:, -1] >= threshold)
    picked = picked[np.lexsort((rows.block.at_s[picked], rows.block.gpus[picked]))]
    _, known = rows.outcome(LAST_S)
    gpu_of, job_of = onsets["gpu"].to_numpy(), onsets["job"].to_numpy()
    label, true = onsets["label_s"].to_numpy(), onsets["true_s"].to_numpy()
    lead = np.full(len(label), np.nan)
    claims: list[tuple[int, int, float, bool]] = []
    for gpu in np.unique(rows.block.gpus[picked]):
        mine = picked[rows.block.gpus[picked] == gpu]
        at = rows.block.at_s[mine] + VISIBLE_S
        own = np.flatnonzero(gpu_of == gpu)
        own = own[np.argsort(label[own])]
        i = 0
        while i < len(at):
            place = int(np.searchsorted(label[own], at[i], side="right"))
            comes = place < len(own) and label[own[place]] - at[i] <= LAST_S
            if comes or known[mine[i]]:
                claims.append((int(gpu), int(rows.job[mine[i]]), float(at[i]), comes))
            if comes and true[own[place]] > at[i]:
                lead[own[place]] = true[own[place]] - at[i]
            until = label[own[place]] if comes else at[i] + LAST_S
            i = max(int(np.searchsorted(at, until, side="right")), i + 1)
    of = np.array(claims, dtype=np.float64).reshape(-1, 4)
    group = together(of[:, 1].astype(np.int64), of[:, 0].astype(np.int64), of[:, 2])
    right = _share(group, of[:, 3]) >= 0.5
    event = together(job_of, gpu_of, label)
    caught = _share(event, ~np.isnan(lead)) >= 0.5
    is_ramp = _share(event, onsets["is_ramp"].to_numpy()) > 0
    return Count(
        len(right), int(right.sum()), np.where(caught, _median(event, lead), np.nan), is_ramp,
        _median(event, onsets["length_s"].to_numpy()),
    )  # fmt: skip


def together(job: Ints, gpu: Ints, at: Floats) -> Ints:
    """Number of the event each belongs to: of one job (or of one GPU without a job) within the last horizon."""
    key = np.where(job >= 0, job, -1 - gpu)
    order = np.lexsort((at, key))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(key[order]) != 0) | (np.diff(at[order]) > LAST_S)
    out = np.empty(len(order), dtype=np.int64)
    out[order] = np.cumsum(begins) - 1
    return out


def _share(group: Ints, value: NDArray) -> Floats:
    size = np.bincount(group)
    return np.bincount(group, weights=value.astype(np.float64)) / np.maximum(size, 1)


def _median(group: Ints, value: Floats) -> Floats:
    out = np.full(int(group.max(initial=-1)) + 1, np.nan)
    for one in np.unique(group[~np.isnan(value)]):
        out[one] = np.nanmedian(value[group == one])
    return out

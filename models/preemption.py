"""Which jobs to stop so that N GPUs are free in time and the least work is lost, and how soon N can be free at no loss.

Here belong the ways in which a job leaves and the choice among jobs; not where jobs come from. Pure. A gang goes whole
or not at all. Choosing is the minimum knapsack cover: exact by dynamic programming over GPUs where that table is small
enough, else greedy by loss per GPU with the last job exchanged for a better one (at most twice the least loss:
Güntzer and Jungnickel 2000, "Approximate minimization algorithms for the 0/1 knapsack and subset-sum problem"). Every
answer carries the bound of the fractional problem, below which no choice can lose.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

Way = Literal["ends", "checkpoint", "stop"]

EXACT_CELLS = 20_000_000  # of the table, jobs × GPUs in steps
_TIE_GPU_HOURS = 1e-9  # a step of GPUs: of two that lose alike, the one that frees less


class PreemptionError(ValueError):
    """A wrong number; the message names it and what would be right."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running job.

    Attributes:
        job_id: Its id.
        gpus: All its GPUs, 1 or more.
        elapsed_s: Since its start, s.
        since_checkpoint_s: Work since its last checkpoint, s; None: none is known, all since its start counts.
        checkpoint_s: Time in which it writes a checkpoint when told to; None: it cannot.
        ends_within_s: Time in which it ends by itself, as surely as the caller wants it, s; None: not known.
        restart_s: Time that it takes to be where it was once it runs again, s.
        priority: The scheduler's own scale, more is more; None: not known.
        is_preemptible: It may be stopped at all.
    """

    job_id: str
    gpus: int
    elapsed_s: float
    since_checkpoint_s: float | None = None
    checkpoint_s: float | None = None
    ends_within_s: float | None = None
    restart_s: float = 0.0
    priority: float | None = None
    is_preemptible: bool = True


@dataclass(frozen=True, slots=True)
class Leaving:
    """How a job leaves.

    Attributes:
        job_id: Its id.
        gpus: GPUs that it frees.
        way: `ends`: by itself; `checkpoint`: it writes one, then stops; `stop`: now.
        free_in_s: When they are free, s from now.
        lost_gpu_hours: Work done and lost, with the time of the checkpoint and of its return.
    """

    job_id: str
    gpus: int
    way: Way
    free_in_s: float
    lost_gpu_hours: float


@dataclass(frozen=True, slots=True)
class Preemption:
    """What to stop.

    Attributes:
        leaving: Jobs, those that lose least per GPU first.
        freed_gpus: GPUs free by then.
        short_gpus: GPUs that lack although every job that may leave does; 0: none.
        free_in_s: When the last of them is free, s from now.
        lost_gpu_hours: Lost by all.
        least_gpu_hours: No choice can lose less; equal to `lost_gpu_hours` where the choice is exact and whole.
        is_exact: No other choice loses less.
    """

    leaving: tuple[Leaving, ...]
    freed_gpus: int
    short_gpus: int
    free_in_s: float
    lost_gpu_hours: float
    least_gpu_hours: float
    is_exact: bool


def plan_preemption(
    candidates: Iterable[Candidate], gpus: int, within_s: float, *, below_priority: float | None = None,
    exact_cells: int = EXACT_CELLS,
) -> Preemption:  # fmt: skip
    """Choose jobs whose GPUs are free in time.

    Args:
        candidates: Running jobs. Those that are not preemptible count where they end by themselves.
        gpus: GPUs wanted, 1 or more.
        within_s: They must be free by then, s from now.
        below_priority: Only jobs of a lower priority are stopped, none whose priority is not known; None: any.
        exact_cells: Largest table of the exact choice.

    Returns:
        The choice; where all together are too few, all of them, and how many GPUs lack.

    Raises:
        PreemptionError: A number is out of range, or an id comes twice.
    """
    known = _checked(candidates, gpus, within_s)
    offers = [best for job in known if (best := min(_ways(job, within_s, below_priority), key=_by_loss, default=None))]
    offers.sort(key=lambda way: (way.lost_gpu_hours / way.gpus, way.gpus, way.job_id))
    total = sum(way.gpus for way in offers)
    if total <= gpus:
        return _answer(offers, gpus, True, sum(way.lost_gpu_hours for way in offers))
    free = [way for way in offers if way.lost_gpu_hours == 0 and way.way == "ends"]
    if sum(way.gpus for way in free) >= gpus:  # who leaves anyway: the soonest
        return _answer(_soonest(free, gpus), gpus, True, 0.0)
    step = math.gcd(*(way.gpus for way in offers))
    need = -(-gpus // step)
    sizes = [way.gpus // step for way in offers]
    if len(offers) * (need + 1) <= exact_cells:
        chosen = _exact(sizes, [way.lost_gpu_hours for way in offers], need)
        picked = [offers[k] for k in chosen]
        return _answer(picked, gpus, True, sum(way.lost_gpu_hours for way in picked))
    return _answer(_greedy(offers, gpus), gpus, False, _fractional(offers, gpus))


def time_to_free_s(candidates: Iterable[Candidate], gpus: int, *, below_priority: float | None = None) -> float | None:
    """How soon so many GPUs can be free when every job that leaves ends by itself or writes a checkpoint first.

    Args:
        candidates: Running jobs.
        gpus: GPUs wanted, 1 or more.
        below_priority: As of `plan_preemption`.

    Returns:
        Seconds from now; None where they never are.

    Raises:
        PreemptionError: As of `plan_preemption`.
    """
    known = _checked(candidates, gpus, 0.0)
    graceful = []
    for job in known:
        ways = [way for way in _ways(job, math.inf, below_priority) if way.way != "stop"]
        if ways:
            graceful.append(min(ways, key=lambda way: way.free_in_s))
    if sum(way.gpus for way in graceful) < gpus:
        return None
    return max(way.free_in_s for way in _soonest(graceful, gpus))


def _checked(candidates: Iterable[Candidate], gpus: int, within_s: float) -> list[Candidate]:
    known = list(candidates)
    if gpus < 1:
        raise PreemptionError(f"gpus={gpus!r} is not valid; valid: 1 or more")
    if not within_s >= 0:
        raise PreemptionError(f"within_s={within_s!r} is not valid; valid: 0 or more")
    if len({job.job_id for job in known}) < len(known):
        raise PreemptionError("a job comes twice among the candidates; valid: each once, with all its GPUs")
    for job in known:
        times = (job.elapsed_s, job.since_checkpoint_s, job.checkpoint_s, job.ends_within_s, job.restart_s)
        if job.gpus < 1 or any(value is not None and not value >= 0 for value in times):
            raise PreemptionError(f"job {job.job_id}: valid: 1 GPU or more, and times of 0 s or more")
    return known


def _ways(job: Candidate, within_s: float, below_priority: float | None) -> list[Leaving]:
    """How a job may leave in time."""
    ways = []
    if job.ends_within_s is not None and job.ends_within_s <= within_s:
        ways.append(Leaving(job.job_id, job.gpus, "ends", job.ends_within_s, 0.0))
    is_lower = below_priority is None or (job.priority is not None and job.priority < below_priority)
    if not (job.is_preemptible and is_lower):
        return ways
    since_s = job.elapsed_s if job.since_checkpoint_s is None else min(job.since_checkpoint_s, job.elapsed_s)
    hours = job.gpus / 3600
    ways.append(Leaving(job.job_id, job.gpus, "stop", 0.0, (since_s + job.restart_s) * hours))
    if job.checkpoint_s is not None and job.checkpoint_s <= within_s:
        lost = (job.checkpoint_s + job.restart_s) * hours
        ways.append(Leaving(job.job_id, job.gpus, "checkpoint", job.checkpoint_s, lost))
    return ways


def _by_loss(way: Leaving) -> tuple[float, float]:
    return way.lost_gpu_hours, way.free_in_s


def _soonest(ways: Sequence[Leaving], gpus: int) -> list[Leaving]:
    """The first ones to be free that are enough."""
    order = sorted(ways, key=lambda way: (way.free_in_s, -way.gpus, way.job_id))
    return order[: bisect_left(list(accumulate(way.gpus for way in order)), gpus) + 1]


def _exact(sizes: Sequence[int], losses: Sequence[float], need: int) -> list[int]:
    """Indices of the set of least loss whose sizes add up to `need` or more: best[g] is the least loss that frees g."""
    best = np.full(need + 1, np.inf)
    best[0] = 0.0
    is_taken = np.zeros((len(sizes), need + 1), dtype=bool)
    before = np.arange(need + 1)
    for k, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
        with_it = best[np.maximum(before - size, 0)] + loss + _TIE_GPU_HOURS * size
        with_it[0] = np.inf
        is_taken[k] = with_it < best
        best = np.minimum(best, with_it)
    chosen, left = [], need
    for k in range(len(sizes) - 1, -1, -1):
        if left > 0 and is_taken[k, left]:
            chosen.append(k)
            left = max(left - sizes[k], 0)
    return chosen


def _greedy(offers: Sequence[Leaving], gpus: int) -> list[Leaving]:
    """Cheapest per GPU first, over every job that could close the gap; then whoever is not needed stays.

    Before each job that would close the gap, the set with that job as its last is a candidate; the best of them loses
    at most twice the least.
    """
    held, kept, freed = 0.0, [], 0
    best_loss, best_last, best_kept = math.inf, offers[0], 0
    for way in offers:
        if freed + way.gpus >= gpus:
            if held + way.lost_gpu_hours < best_loss:
                best_loss, best_last, best_kept = held + way.lost_gpu_hours, way, len(kept)
        else:
            kept.append(way)
            freed, held = freed + way.gpus, held + way.lost_gpu_hours
    picked = [*kept[:best_kept], best_last]
    spare = sum(way.gpus for way in picked) - gpus
    for way in sorted(picked, key=lambda way: -way.lost_gpu_hours):
        if way.gpus <= spare:
            picked.remove(way)
            spare -= way.gpus
    return picked


def _fractional(offers: Sequence[Leaving], gpus: int) -> float:
    """Loss of the cheapest GPUs, were jobs divisible: no whole choice loses less."""
    left, lost = gpus, 0.0
    for way in offers:
        taken = min(way.gpus, left)
        lost, left = lost + way.lost_gpu_hours * taken / way.gpus, left - taken
    return lost


def _answer(picked: Sequence[Leaving], gpus: int, is_exact: bool, least: float) -> Preemption:
    order = sorted(picked, key=lambda way: (way.lost_gpu_hours / way.gpus, way.job_id))
    freed = sum(way.gpus for way in order)
    return Preemption(
        tuple(order), freed, max(gpus - freed, 0), max((way.free_in_s for way in order), default=0.0),
        sum(way.lost_gpu_hours for way in order), least, is_exact,
    )  # fmt: skip

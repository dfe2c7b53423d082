"""What a hold is worth and what it costs when nothing comes of it, in GPU-hours, so that plans can be ranked and cut.

Here belongs the arithmetic and what it assumes; not who needs nodes (`plan_needs.py`) nor which (`plans.py`). Pure.

A hold for a job about to start saves what trouble would have slowed it by, had the scheduler put it there: any nodes
that are idle or in trouble, each as likely as another. A hold for a job about to lose nodes saves its wait in the
queue. A hold that was wrong leaves its nodes idle until the job starts, or for the whole lease where it does not come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Least that a job is slowed by for the class to be set at all (`features/labels.py`); of throttling a cautious guess.
SLOWED_BY = {
    "thermal_throttle": 0.10, "power_throttle": 0.10, "nvlink_saturation": 0.15, "fabric_congestion": 0.15,
    "straggler": 0.30,
}  # fmt: skip
TROUBLE_S = 3_600.0  # that a trouble is taken to last at most: by then it has passed or somebody has seen to it
NO_SHOW = 0.1  # share of planned jobs taken not to start within a lease


@dataclass(frozen=True, slots=True)
class Worth:
    """What a hold is worth.

    Attributes:
        probability: P(the trouble comes and would have hit the job).
        saved_gpu_hours: Saved if it does; None: nobody knows how long the job runs.
        idle_gpu_hours: Held and idle if it does not.
    """

    probability: float
    saved_gpu_hours: float | None
    idle_gpu_hours: float

    @property
    def benefit_gpu_hours(self) -> float | None:
        """Expected: saved × probability."""
        return None if self.saved_gpu_hours is None else self.saved_gpu_hours * self.probability

    @property
    def cost_gpu_hours(self) -> float:
        """Expected: idle × (1 − probability)."""
        return self.idle_gpu_hours * (1 - self.probability)

    @property
    def is_worth_it(self) -> bool:
        """The expected benefit is not known to be below the expected cost."""
        benefit = self.benefit_gpu_hours
        return benefit is None or benefit >= self.cost_gpu_hours


def hit(pool: int, troubled: int, need: int) -> float:
    """P(at least one of `need` nodes, drawn from `pool` without putting back, is one of `troubled`).

    1 − C(pool − troubled, need) ÷ C(pool, need), the hypergeometric distribution; by logarithms, as pools are large.
    """
    if troubled <= 0 or need <= 0:
        return 0.0
    healthy = pool - troubled
    if healthy < need:
        return 1.0
    ways = [math.lgamma(n + 1) - math.lgamma(n - need + 1) for n in (healthy, pool)]
    return -math.expm1(ways[0] - ways[1])


def slowed_gpu_hours(name: str, job_gpus: int, runtime_s: float | None) -> float | None:
    """GPU-hours that a trouble of a class costs a job; None where nobody knows how long the job runs.

    Args:
        name: One of `SLOWED_BY`.
        job_gpus: GPUs of the whole job: the slowest rank slows all.
        runtime_s: How long it runs, s.
    """
    return None if runtime_s is None else job_gpus * SLOWED_BY[name] * min(runtime_s, TROUBLE_S) / 3_600


def worth_of_start(
    chances: Iterable[tuple[float, float | None]], held_gpus: int, lead_s: float, lease_s: float
) -> Worth:
    """Of a hold for a job that is about to start.

    Args:
        chances: Of each trouble: P(it comes and hits the job), taken as independent, and GPU-hours saved if it does.
        held_gpus: GPUs of the nodes held.
        lead_s: From the begin of the hold to the job's expected start, s.
        lease_s: Length of the hold, s.
    """
    known = list(chances)
    p = 1 - math.prod(1 - chance for chance, _ in known)
    weight = sum(chance for chance, _ in known)
    saved = [chance * hours for chance, hours in known if hours is not None]
    mean = None if len(saved) < len(known) else sum(saved) / weight if weight else 0.0
    idle_s = (1 - NO_SHOW) * min(lead_s, lease_s) + NO_SHOW * lease_s
    return Worth(p, mean, held_gpus * idle_s / 3_600)


def worth_of_requeue(
    fault_probabilities: Iterable[float], job_gpus: int, wait_s: float, held_gpus: int, lease_s: float
) -> Worth:
    """Of a hold for a running job that is about to lose nodes.

    Args:
        fault_probabilities: Of each node that may fail.
        job_gpus: GPUs of the whole job: all of them wait when one node fails.
        wait_s: What a job waits here for its nodes, s.
        held_gpus: GPUs of the nodes held.
        lease_s: Length of the hold, s.
    """
    well = math.prod(1 - p for p in fault_probabilities)
    return Worth(1 - well, job_gpus * wait_s / 3_600, held_gpus * lease_s / 3_600)

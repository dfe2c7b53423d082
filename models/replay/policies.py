"""Scheduling policies by name, and what their planning believes of runtimes: one replay asked for in words.

Here belongs what a name means; the event loop stands in `engine.py`. `slurm-actuable` is what a Slurm does that nobody
has patched: jobs start in order of priority (submission) until one does not fit, and every 30 s backfill plans the
first 500 waiting jobs by their limits. Forecasts reach it in one way only, `time-min` (Slurm 25.05.4 and later with
`time_min_as_soft_limit`): a waiting job is planned by its forecast, running jobs by their limits. Leases and drains
move no job in a replay of processors that never fail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.replay import engine
from models.replay.workload import ReplayError, Workload

POLICIES: dict[str, int] = {
    "fcfs": engine.FCFS, "easy": engine.EASY, "easy-sjbf": engine.EASY_SJBF, "conservative": engine.CONSERVATIVE,
    "slurm-actuable": engine.SLURM,
}  # fmt: skip
RUNTIMES: dict[str, int] = {
    "limit": engine.BY_LIMIT, "forecast": engine.BY_KEY, "true": engine.BY_TRUTH, "last2": engine.BY_LAST_TWO,
}  # fmt: skip
INTERVAL_S, RESOLUTION_S, MOST_JOBS = 30, 60, 500  # bf_interval, bf_resolution, bf_max_job_test


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to schedule.

    Attributes:
        policy: One of `POLICIES`.
        runtimes: One of `RUNTIMES`. `forecast`: keyed recency of jobs that have ended in the replay, at submission: a
            quantile of the newest runs of the same user, size and limit, else of the user, else the limit. `last2`:
            mean of the user's last two, as EASY++ has it.
        scale: Expected runtimes are multiplied by it.
        newest: Of `forecast`: so many of the newest runs are looked at.
        quantile: Of `forecast`: which quantile of them.
        has_two: Two expectations for each job: while it runs its limit, while it waits the forecast; and while the
            first of the queue is past its promise, those that might overtake it count by their limits.
        in_steps: An expectation that has passed grows in steps (EASY++) instead of to the limit at once.
    """

    policy: str
    runtimes: str = "limit"
    scale: float = 1.0
    newest: int = 20
    quantile: float = 0.5
    has_two: bool = False
    in_steps: bool = False

    def __post_init__(self) -> None:
        for what, name, known in (("policy", self.policy, POLICIES), ("runtimes", self.runtimes, RUNTIMES)):
            if name not in known:
                raise ReplayError(f"no {what} {name!r}; there are: {', '.join(known)}")
        if not (self.scale > 0 and self.newest >= 1 and 0 <= self.quantile <= 1):
            raise ReplayError(f"scale {self.scale}, newest {self.newest}, quantile {self.quantile}: out of range")


# Chosen on llnl-atlas-2006 and cedar-2021 (`benchmarks/replay_choice.py`), not on kth-sp2-1996, which it is judged on.
FORECAST = Rule("easy-sjbf", "forecast", newest=100, quantile=0.8, has_two=True)
EASY_PLUS_PLUS = Rule("easy-sjbf", "last2", in_steps=True)


def rule_of(policy: str, runtimes: str) -> Rule:
    """The rule that a policy and a source of runtimes are asked for by.

    Raises:
        ReplayError: There is no such policy or source.
    """
    if runtimes == "forecast":
        return replace(FORECAST, policy=policy)
    return Rule(policy, runtimes)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Outcome of a replay; arrays of shape (jobs,).

    Attributes:
        start: Seconds since the first submission.
        promise: When the job, being first of the queue, was first to start by the limits of running jobs; −1: it was
            never first.
        expected: Runtime that was expected at submission, s.
    """

    start: NDArray[np.int64]
    promise: NDArray[np.int64]
    expected: NDArray[np.float64]


def run(workload: Workload, total: int, rule: Rule) -> Schedule:
    """Replay jobs under a rule.

    Args:
        workload: The jobs.
        total: Processors; no job asks for more.
        rule: How to schedule.
    """
    found = engine.replay(
        workload.submit, workload.procs, workload.run, workload.limit, workload.user,
        workload.key, total, POLICIES[rule.policy], RUNTIMES[rule.runtimes],
        engine.IN_STEPS if rule.in_steps else engine.TO_LIMIT, rule.has_two, rule.scale, rule.newest, rule.quantile,
        INTERVAL_S, RESOLUTION_S, MOST_JOBS,
    )  # fmt: skip
    return Schedule(*found)

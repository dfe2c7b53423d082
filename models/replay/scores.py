"""What a replayed schedule is worth: slowdown, waits, utilisation, and promises that were broken.

Here belong figures of one schedule and intervals over shaken ones; not the replay (`engine.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from models.replay.policies import Schedule
from models.replay.workload import Workload

TAU_S = 10.0


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of one schedule.

    Attributes:
        avebsld: Mean bounded slowdown, max((wait + run) / max(run, 10 s), 1).
        wait_mean_s, wait_median_s, wait_p99_s, wait_max_s: From submission to start.
        jct_mean_s: From submission to end.
        utilisation: Busy share of the processors, from the first submission to the last end.
        late_share: Share of jobs that started after the moment they were first promised as first of the queue, by the
            limits of running jobs.
    """

    avebsld: float
    wait_mean_s: float
    wait_median_s: float
    wait_p99_s: float
    wait_max_s: float
    jct_mean_s: float
    utilisation: float
    late_share: float


NAMES = tuple(one.name for one in fields(Scores))


def score(workload: Workload, schedule: Schedule, total: int) -> Scores:
    """Figures of a schedule of a workload on `total` processors."""
    wait = (schedule.start - workload.submit).astype(np.float64)
    jct = wait + workload.run
    span = float((schedule.start + workload.run).max())
    late = (schedule.promise >= 0) & (schedule.start > schedule.promise)
    return Scores(
        float(np.maximum(jct / np.maximum(workload.run, TAU_S), 1.0).mean()),
        float(wait.mean()),
        float(np.median(wait)),
        float(np.quantile(wait, 0.99)),
        float(wait.max()),
        float(jct.mean()),
        float((workload.procs * workload.run).sum() / (total * span)),
        float(late.mean()),
    )


def interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median, and the 2.5th and 97.5th percentile of what shaken inputs gave."""
    low, middle, high = np.quantile(values, [0.025, 0.5, 0.975])
    return float(middle), float(low), float(high)

"""GPUs held back by power: the external brake, or a power cap that takes clocks below what the job is used to.

Here belongs the rule of `power_throttle`. A healthy job at full speed is power-capped all day, so that the cap alone is
no label; and its clocks sway with its phases, so that only a fall well below its own median counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.conditions import INDEX
from features.history import SampleHistory
from features.label_spans import CLEAR, SET, UNKNOWN, own_usual
from features.thresholds import ThresholdBook

MIN_ACTIVITY = 0.05  # clocks of a GPU that does not work say nothing of what the job is used to


def power_states(history: SampleHistory, book: ThresholdBook) -> NDArray[np.int8]:
    """State of `power_throttle` at every sample.

    Set: the brake is on, or the GPU is capped with a clock under `clock_low_ratio` × its job's own median there. What
    no column tells is unknown: without a clock a capped GPU is.

    Args:
        history: The samples.
        book: Limits of the nodes.

    Returns:
        Shape (samples,).
    """
    brake, capped = history.flags["is_power_brake"], history.flags["is_power_capped"]
    clock = history.values[INDEX["sm_clock_hz"]].astype(np.float64)
    activity = history.values[INDEX["activity_ratio"]]
    held = history.job >= 0
    with np.errstate(invalid="ignore"):
        works = held & (clock > 0) & ~(activity < MIN_ACTIVITY)
    of_job = history.gpu * (history.job.max(initial=-1) + 2) + history.job + 1
    usual = own_usual(of_job, np.where(works, clock, np.nan))
    low_ratio = book.arrays(history.node_names)["clock_low_ratio"][history.node]
    with np.errstate(invalid="ignore"):
        low = np.where(np.isnan(clock) | np.isnan(usual), np.nan, clock < low_ratio * usual)
    state = np.full(len(clock), UNKNOWN)
    state[(brake == 0) | (capped == 0)] = CLEAR
    by_cap = (capped == 1) & held
    state[by_cap & np.isnan(low)] = UNKNOWN
    state[by_cap & (low == 0)] = CLEAR
    state[(capped == 1) & ~held] = CLEAR  # nothing runs that could be slowed
    state[by_cap & (low == 1)] = SET
    state[brake == 1] = SET
    return state

"""How a disturbance grows towards its limit: how long, how straight, whether it hesitates, where it stops.

Here belong the course of growth over time and its assumptions. Nothing is published on how such onsets grow, so they
are as wide as honest ignorance: what is growing, and what growth means for a GPU, stands in `events.py` and
`strains.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LENGTH_S = (60.0, 1800.0)  # log-uniform
BEND = (0.5, 2.0)  # log-uniform; below 1 it slows down towards the limit, above 1 it speeds up
PAUSE_RATIO = 1 / 3  # share of ramps that hesitate on the way
PAUSE_SHARE = (0.1, 0.4)  # of the length
STOP = (0.05, 1.0)  # where a look-alike stops, as a share of the way; uniform
OVERSHOOT_S = 240.0  # growth beyond the limit goes on for a share of the ramp, of no more than this


@dataclass(frozen=True, slots=True)
class Ramp:
    """A course of growth; level 1 is where the condition sets.

    Attributes:
        length_s: Time from the start to level 1.
        bend: Level is (share of the moving time gone)^bend.
        pause_at, pause_share: Where it stands still and for how long, as shares of the length.
        stop: Level at which it stops for good; infinite: goes on.
    """

    length_s: float
    bend: float = 1.0
    pause_at: float = 0.0
    pause_share: float = 0.0
    stop: float = math.inf

    def level(self, elapsed_s: float) -> float:
        """Level after a time; beyond 1 it goes on at its last pace."""
        x = elapsed_s / max(self.length_s, 1e-6)
        moved = x - min(max(x - self.pause_at, 0.0), self.pause_share)
        u = moved / (1 - self.pause_share)
        return min(max(u, 0.0) ** self.bend if u <= 1 else 1 + self.bend * (u - 1), self.stop)

    def reaches_s(self, level: float) -> float:
        """Time until a level of at most 1 is reached."""
        x = level ** (1 / self.bend) * (1 - self.pause_share)
        return self.length_s * (x + self.pause_share * (x > self.pause_at))

    @property
    def stops_s(self) -> float:
        """Time until it stops; its length where it goes on."""
        return self.reaches_s(min(self.stop, 1.0))

    def lagged(self, lag_s: float) -> float:
        """What a first-order lag makes of the course by its end: 1 for a ramp much longer than the lag."""
        at = (np.arange(2000) + 0.5) * (self.length_s / 2000)
        level = np.array([self.level(float(s)) for s in at])
        weight = np.exp(-(self.length_s - at) / lag_s) / lag_s
        return float((level * weight).sum() * (self.length_s / 2000))


def draw_ramp(
    rng: np.random.Generator, *, is_lookalike: bool = False, length_s: float | None = None, min_s: float = 0.0
) -> Ramp:
    """A ramp of any kind; one whose length is asked for is straight.

    Args:
        rng: Where it is drawn.
        is_lookalike: It stops on the way.
        length_s: Its length; drawn when None.
        min_s: A drawn one takes at least as long.
    """
    stop = float(rng.uniform(*STOP)) if is_lookalike else math.inf
    if length_s is not None:
        return Ramp(float(length_s), stop=stop)
    length = max(float(np.exp(rng.uniform(*np.log(LENGTH_S)))), min_s)
    bend = float(np.exp(rng.uniform(*np.log(BEND))))
    pause = float(rng.uniform(*PAUSE_SHARE)) if rng.random() < PAUSE_RATIO else 0.0
    at = float(rng.uniform(0.1, 1.0 - pause)) if pause else 0.0
    return Ramp(length, bend, at, pause, stop)

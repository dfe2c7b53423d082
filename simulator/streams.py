"""Random numbers that depend only on the seed, a purpose and an index, never on the order or the size of ticks.

Every random choice of the simulator takes its generator from here.
"""

from __future__ import annotations

import enum

import numpy as np


class Stream(enum.IntEnum):
    """What the numbers are for; each purpose has numbers of its own."""

    HARDWARE = 1
    USERS = 2
    DAY = 3
    CALIBRATION = 4
    JOB = 5
    NODE_FAULT = 6
    ONSETS = 7
    NOISE = 8
    EVENT = 9
    DRIFT = 10
    INJECTED = 11
    STRAINS = 12
    PORTS = 13


def generator(seed: int, stream: Stream, index: int = 0, sub: int = 0) -> np.random.Generator:
    """A generator of its own for (seed, stream, index, sub)."""
    key = np.array(
        [(seed & 0xFFFFFFFF) << 16 | int(stream), (index & 0xFFFFFFFFFF) << 24 | (sub & 0xFFFFFF)], np.uint64
    )
    return np.random.Generator(np.random.Philox(key=key))

"""Inputs that are almost the same: what a figure of a replay moves by when nothing that matters has changed.

A schedule is chaotic: a job a minute later changes all that follow. So a difference of two policies is one only where
it holds over shaken inputs, the same for both (Tsafrir, Feitelson, IPDPS 2006).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from models.replay.workload import Workload

SUBMIT_S, DROPPED = 60, 0.01


def shaken(workload: Workload, draws: int, seed: int = 1) -> Iterator[tuple[str, Workload]]:
    """`draws` copies with each submission moved by up to a minute, then `draws` with a hundredth of the jobs left out.

    Yields:
        `submits` or `dropped`, and the copy.
    """
    every = np.arange(len(workload))
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        moved = workload.submit + rng.integers(-SUBMIT_S, SUBMIT_S + 1, len(workload))
        yield "submits", workload.take(every, moved - min(int(moved.min()), 0))
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw, 1])
        yield "dropped", workload.take(every[rng.random(len(workload)) >= DROPPED])

"""What the last minutes of a node, a port or a queue say, as numbers: the kernel that live rings and history share.

Here belong the features of things that are no GPUs and the cheap screen in front of them; statistics of a course stand
in `features/windows.py`, quantities in `features/unit_conditions.py`, the long memory of queues in
`features/queue_memory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from features.queue_memory import MEMORY
from features.unit_conditions import KINDS, UNIT_CLASSES
from features.windows import (
    PRIMARY,
    SCREEN_S,
    SHORT_S,
    STATS,
    WINDOW_S,
    FeatureBlock,
    course_stats,
    newest_of,
    oldest_of,
    slope_of,
)

Floats = NDArray[np.float32]


class Look(NamedTuple):
    """How closely a class is looked at, in the unit of its distance.

    Attributes:
        screen: A thing this near is looked at, as is one that would be at its limit soon at its present pace; infinite:
            every one is.
        near: A sample this near counts as near its limit.
        tolerance: Changes smaller than this are noise.
    """

    screen: float
    near: float
    tolerance: float


LOOKS = {
    "host_memory": Look(0.10, 0.05, 0.005),
    "fabric_congestion": Look(0.25, 0.25, 0.10),
    "shortage": Look(np.inf, 8.0, 0.5),  # queues are few
}
# The pace of a minute is only trusted where it is more than noise.
_PACE_TOLERANCES = 2.0


def features_of(bottleneck_class: str) -> tuple[str, ...]:
    """Names of the features of a class, in order."""
    kind = KINDS[bottleneck_class]
    return (
        *PRIMARY, *(f"{name}_{stat}" for name in kind.quantities[1:] for stat in STATS), "data_age_s", "samples",
        *(MEMORY if bottleneck_class == "shortage" else ()),
    )  # fmt: skip


UNIT_FEATURES: Mapping[str, tuple[str, ...]] = {name: features_of(name) for name in UNIT_CLASSES}
UNIT_INDEX: Mapping[str, dict[str, int]] = {
    name: {feature: i for i, feature in enumerate(features)} for name, features in UNIT_FEATURES.items()
}


def unit_block(
    bottleneck_class: str, units: NDArray[np.int64], at_s: NDArray[np.float64], matrix: Floats
) -> FeatureBlock:
    """Features of things as forecasters take them."""
    return FeatureBlock(bottleneck_class, units, at_s, matrix, UNIT_INDEX[bottleneck_class])


def unit_features(
    bottleneck_class: str, values: Floats, ages: Floats, is_even: NDArray[np.bool_], memory: Floats | None = None
) -> Floats:
    """Features of gathered windows.

    Args:
        bottleneck_class: One of `UNIT_CLASSES`.
        values: Shape (quantities of the kind, rows, slots), oldest first, NaN where there is no sample.
        ages: Seconds between each sample and the row's moment, shape (rows, slots), NaN where there is no sample.
        is_even: Samples that stand for equal times, shape (rows, slots).
        memory: For queues: `MEMORY` at the newest sample, shape (rows, len(MEMORY)).

    Returns:
        Shape (rows, features), float32.
    """
    out = np.full((len(ages), len(UNIT_FEATURES[bottleneck_class])), np.nan, dtype=np.float32)
    look = LOOKS[bottleneck_class]
    with np.errstate(invalid="ignore"):
        alive = (ages >= 0) & (ages <= WINDOW_S)
    t = -ages
    course_stats(
        out, values[0], t, alive & ~np.isnan(values[0]), is_even, tolerance=look.tolerance, near=look.near
    )  # fmt: skip
    column = len(PRIMARY)
    for v in values[1:]:
        mask = alive & ~np.isnan(v)
        short = mask & (t >= -SHORT_S)
        last = newest_of(v, mask)
        out[:, column] = last
        out[:, column + 1] = last - oldest_of(v, short)
        out[:, column + 2] = slope_of(v, t, short)[0]
        column += len(STATS)
    out[:, column] = newest_of(ages, alive)
    out[:, column + 1] = alive.sum(axis=1)
    if memory is not None:
        out[:, column + 2 :] = memory
    return out


def unit_screen(
    bottleneck_class: str, distance: Floats, earlier: Floats, elapsed_s: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which things deserve a close look.

    Args:
        bottleneck_class: The class.
        distance: Newest distance, shape (things,).
        earlier: Distance about a minute before, NaN where there is none.
        elapsed_s: Seconds between the two.
    """
    look = LOOKS[bottleneck_class]
    with np.errstate(invalid="ignore", divide="ignore"):
        fell = earlier - distance
        soon = (fell > _PACE_TOLERANCES * look.tolerance) & (distance <= fell / elapsed_s * SCREEN_S)
        return ((distance <= look.screen) | soon) & ~np.isnan(distance)

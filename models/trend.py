"""The built-in bottleneck forecaster: a straight trend with its uncertainty, until a model has earned the place.

Here belongs the forecast that needs no training and the protocol that every bottleneck forecaster follows; learned
models stand in `models/bottleneck.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from features.windows import SCREEN_GROWTH_GIB, SHORT_S, FeatureBlock

HORIZONS_S = (30, 60, 90, 120)
TREND_VERSION = "baseline:trend"
FLOOR = 1e-4  # nothing is impossible
CEILING = 0.97  # and a straight line is never certain
DOUBTFUL = 0.05  # most that is said of a course that looks like a start or a return


@dataclass(frozen=True, slots=True)
class Course:
    """How a class moves, in the unit of its distance.

    Attributes:
        noise: Spread of one sample around its own course, at least.
        fade_s: A trend loses its force over this time: heat settles, collectives fill up to what they need.
        doubt: Spread of what a trend still brings, as a share of it.
        new_ground: Only a distance this far below everything before the last 90 s is a course of its own; anything
            else comes back from a checkpoint, an evaluation or a pause.
        job_age_s: Jobs younger than this are starting up; 0: of things that have no job of their own.
        jump: Samples that lie this far around their line have jumped: a job that begins fills memory at once and then
            no more.
    """

    noise: float
    fade_s: float
    doubt: float
    new_ground: float
    job_age_s: float
    jump: float = np.inf


# Chosen on simulated clusters of other seeds than those that scores are reported on.
COURSES = {
    "thermal_throttle": Course(noise=1.0, fade_s=45.0, doubt=0.5, new_ground=2.0, job_age_s=300.0),
    "power_throttle": Course(noise=0.02, fade_s=120.0, doubt=0.3, new_ground=0.03, job_age_s=180.0),
    "nvlink_saturation": Course(noise=0.04, fade_s=60.0, doubt=0.3, new_ground=0.10, job_age_s=300.0),
    "memory_exhaustion": Course(noise=0.3, fade_s=120.0, doubt=0.5, new_ground=1.0, job_age_s=180.0),
    "straggler": Course(noise=0.03, fade_s=120.0, doubt=0.3, new_ground=0.05, job_age_s=180.0),
    "host_memory": Course(noise=0.01, fade_s=120.0, doubt=0.5, new_ground=0.05, job_age_s=0.0, jump=0.02),
    "fabric_congestion": Course(noise=0.15, fade_s=90.0, doubt=0.4, new_ground=0.2, job_age_s=0.0, jump=0.05),
    # Work arrives at once: a trend of waiting work says little.
    "shortage": Course(noise=4.0, fade_s=60.0, doubt=1.0, new_ground=1.0, job_age_s=0.0),
}
# Memory runs out only where most of what came within SHORT_S lies above the job's plateau: a job that has just filled
# up to it has grown as fast, but not beyond it.
GROWN_RATIO = 0.5
STEP_SLOWING = 1.03  # where steps are known, links that fill without slowing them are at work, not in trouble


class BottleneckForecaster(Protocol):
    """Gives P(onset within each horizon) for GPUs that are not in the condition yet."""

    @property
    def version(self) -> str:
        """Name in the registry, or of the baseline."""
        ...

    def version_of(self, bottleneck_class: str) -> str:
        """Name of what forecasts this class: a model need not have learned every one."""
        ...

    def forecast(self, block: FeatureBlock) -> NDArray[np.float64]:
        """Probabilities, shape (rows, len(HORIZONS_S)); they never fall with the horizon."""
        ...


def normal_cdf(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Φ(z), to within 1e-4 (Abramowitz and Stegun 26.2.17), without a heavy library."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-z * z / 2) / np.sqrt(2 * np.pi) * poly
    return np.where(z >= 0, 1 - upper, upper)


class TrendForecaster:
    """Trend of the distance over the last 90 s, fading ahead, with the spread around it."""

    version = TREND_VERSION

    def version_of(self, bottleneck_class: str) -> str:  # noqa: ARG002
        """The trend forecasts every class."""
        return self.version

    def forecast(self, block: FeatureBlock) -> NDArray[np.float64]:
        """Probabilities, shape (rows, len(HORIZONS_S)).

        Raises:
            ValueError: The class of the block is unknown.
        """
        if block.bottleneck_class not in COURSES:
            raise ValueError(f"no bottleneck class {block.bottleneck_class!r}; classes: {', '.join(COURSES)}")
        course = COURSES[block.bottleneck_class]
        last = block.column("last").astype(np.float64)
        short, mid = block.column("slope_short"), block.column("slope_mid")
        slope = np.nan_to_num(np.where(np.isnan(short), mid, short)).astype(np.float64)
        residual = np.maximum(np.nan_to_num(block.column("residual_short")), course.noise).astype(np.float64)
        age = np.nan_to_num(block.column("data_age_s")).astype(np.float64)
        out = np.empty((len(last), len(HORIZONS_S)))
        for i, horizon_s in enumerate(HORIZONS_S):
            reach = course.fade_s * -np.expm1(-(age + horizon_s) / course.fade_s)
            # A slope over 90 s is known to about residual ÷ 45 s when it rests on a handful of samples.
            sigma = np.sqrt(residual**2 + (residual / 45 * reach) ** 2 + (course.doubt * slope * reach) ** 2)
            out[:, i] = normal_cdf(-(last + slope * reach) / sigma)
        out = np.where(self._is_doubtful(block, course, slope)[:, None], np.minimum(out, DOUBTFUL), out)
        if block.bottleneck_class == "memory_exhaustion":
            # Full but steady memory is a cache; it runs out only where it has left its plateau.
            over = block.column("over_plateau_gib_last")
            with np.errstate(invalid="ignore"):
                out[~(over >= np.maximum(SCREEN_GROWTH_GIB, -GROWN_RATIO * SHORT_S * slope))] = FLOOR
        out = np.where(np.isnan(last)[:, None], FLOOR, out)
        return np.clip(np.maximum.accumulate(out, axis=1), FLOOR, CEILING)

    @staticmethod
    def _is_doubtful(block: FeatureBlock, course: Course, slope: NDArray[np.float64]) -> NDArray[np.bool_]:
        with np.errstate(invalid="ignore"):
            doubtful = (slope >= 0) | ~(block.column("new_low") <= -course.new_ground)
            doubtful |= block.column("residual_short") > course.jump
            if course.job_age_s:
                doubtful |= block.column("job_age_s") < course.job_age_s
            if block.bottleneck_class == "nvlink_saturation":
                doubtful |= block.column("step_ratio_last") < STEP_SLOWING
        return doubtful

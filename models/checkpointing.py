"""How often a job should write checkpoints, and how many GPU-hours it is expected to lose to hardware failures.

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps". Failures come as a Poisson process. How often hardware
fails is measured in `interruptions.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_SAMPLES = 400  # of a runtime distribution


class CheckpointError(ValueError):
    """A wrong number; the message names it and what would be right."""


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{name}={value!r} is not valid; valid: a finite number above 0")


def _not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise CheckpointError(f"{name}={value!r} is not valid; valid: a finite number, 0 or more")


def young_interval_s(checkpoint_s: float, mttf_s: float) -> float:
    """Work between two checkpoints by Young's first-order rule, √(2·C·M), s.

    Args:
        checkpoint_s: Time that writing a checkpoint stops the job, C, s.
        mttf_s: Mean time to failure of the job, M, s.

    Raises:
        CheckpointError: A number is not above 0.
    """
    _positive(checkpoint_s=checkpoint_s, mttf_s=mttf_s)
    return math.sqrt(2 * checkpoint_s * mttf_s)


def daly_interval_s(checkpoint_s: float, mttf_s: float) -> float:
    """Work between two checkpoints by Daly's higher-order rule, s.

    √(2·C·M)·(1 + ⅓·√(C/2M) + ⅑·C/2M) − C where C < 2·M, else M (Daly 2006).

    Args:
        checkpoint_s: Time that writing a checkpoint stops the job, C, s.
        mttf_s: Mean time to failure of the job, M, s.

    Raises:
        CheckpointError: A number is not above 0.
    """
    _positive(checkpoint_s=checkpoint_s, mttf_s=mttf_s)
    if checkpoint_s >= 2 * mttf_s:
        return mttf_s
    ratio = checkpoint_s / (2 * mttf_s)
    return math.sqrt(2 * checkpoint_s * mttf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def overhead_ratio(interval_s: float, checkpoint_s: float, mttf_s: float, restart_s: float = 0.0) -> float:
    """Time lost to checkpoints, rework and restarts per time of work: wall ÷ work − 1.

    Wall ÷ work is M·e^(R/M)·(e^((τ+C)/M) − 1) ÷ τ (Daly 2006); infinite where a float cannot hold it.

    Args:
        interval_s: Work between two checkpoints, τ, s.
        checkpoint_s: Time of a checkpoint, C, s.
        mttf_s: Mean time to failure of the job, M, s.
        restart_s: Time from a failure until the job works again, R, s.

    Raises:
        CheckpointError: A number is out of range.
    """
    _positive(interval_s=interval_s, mttf_s=mttf_s)
    _not_negative(checkpoint_s=checkpoint_s, restart_s=restart_s)
    try:
        growth = math.exp(restart_s / mttf_s) * math.expm1((interval_s + checkpoint_s) / mttf_s)
    except OverflowError:
        return math.inf
    return mttf_s * growth / interval_s - 1


@dataclass(frozen=True, slots=True)
class Waste:
    """Where the time goes that a job with checkpoints takes beyond its work, each per time of work.

    Attributes:
        checkpoints: Writing checkpoints that are finished.
        rework: Work and begun checkpoints that a failure undoes.
        restarts: From failures until it works again, those that fail on the way too.
    """

    checkpoints: float
    rework: float
    restarts: float

    @property
    def total(self) -> float:
        """`overhead_ratio`."""
        return self.checkpoints + self.rework + self.restarts


def waste(interval_s: float, checkpoint_s: float, mttf_s: float, restart_s: float = 0.0) -> Waste:
    """`overhead_ratio` by its parts.

    From one finished checkpoint to the next a job takes E = M·e^(R/M)·(e^(w/M) − 1), w = τ + C. Failures come at rate
    1/M in all of it, and each is followed by M·(1 − e^(−R/M)) of restarting until that is done or fails itself: E·(1 −
    e^(−R/M)) in all. C is the checkpoint's; what is left, M·(e^(w/M) − 1) − w, is done twice.

    Args:
        interval_s: As of `overhead_ratio`, and so on.
        checkpoint_s: Time of a checkpoint, s.
        mttf_s: Mean time to failure of the job, s.
        restart_s: Time from a failure until the job works again, s.

    Raises:
        CheckpointError: A number is out of range.
    """
    whole = overhead_ratio(interval_s, checkpoint_s, mttf_s, restart_s)
    x = (interval_s + checkpoint_s) / mttf_s
    written = checkpoint_s / interval_s
    if not math.isfinite(whole):
        return Waste(written, math.inf, math.inf if restart_s else 0.0)
    redone = x * x / 2 + x**3 / 6 if x < 1e-4 else math.expm1(x) - x  # two nearly equal numbers otherwise
    restarts = -(1 + whole) * math.expm1(-restart_s / mttf_s)
    return Waste(written, mttf_s * redone / interval_s, restarts)


@dataclass(frozen=True, slots=True)
class Loss:
    """What one run of a job is expected to lose to hardware.

    Attributes:
        p_failure: Probability that it is hit before it ends.
        lost_gpu_hours: Work done and lost, and the restart, GPU-hours, expected.
        checkpoint_gpu_hours: Time of its checkpoints if it is not hit, GPU-hours, expected.
    """

    p_failure: float
    lost_gpu_hours: float
    checkpoint_gpu_hours: float


def expected_loss(
    runtimes_s: ArrayLike, gpus: int, mttf_s: float, *, interval_s: float | None = None, checkpoint_s: float = 0.0,
    restart_s: float = 0.0,
) -> Loss:  # fmt: skip
    """Expected loss of one run that ends at its first failure or when it is done.

    At a failure all since the last checkpoint is lost: with failures at rate 1/M, E[loss] = ∫₀ᵀ e^(−t/M)/M · (t mod w)
    dt over windows w = τ + C, averaged over the runtimes T; without checkpoints w is the whole run.

    Args:
        runtimes_s: Equally likely runtimes without a failure, s; see `runtimes_of`.
        gpus: GPUs of the job.
        mttf_s: Mean time to failure of the job, M, s; see `mttf_of_probability`.
        interval_s: Work between two checkpoints, τ, s; None: it writes none.
        checkpoint_s: Time of a checkpoint, C, s.
        restart_s: Time until it works again after a failure, s.

    Raises:
        CheckpointError: A number is out of range.
    """
    times = _runtimes(runtimes_s)
    _positive(mttf_s=mttf_s)
    _not_negative(checkpoint_s=checkpoint_s, restart_s=restart_s, gpus=gpus)
    if interval_s is not None:
        _positive(interval_s=interval_s)
    p = -np.expm1(-times / mttf_s)
    if interval_s is None:
        rework, written = _lost_within(times, mttf_s), np.zeros_like(times)
    else:
        window = interval_s + checkpoint_s
        written = np.floor(times / window)
        rest = times - written * window
        reached = np.exp(-written * window / mttf_s)
        whole = _lost_within(np.array(window), mttf_s) / -np.expm1(-window / mttf_s)
        rework = whole * (1 - reached) + reached * _lost_within(rest, mttf_s)
    lost_s = rework + restart_s * p
    return Loss(float(p.mean()), float(lost_s.mean()) * gpus / 3600, float(written.mean()) * checkpoint_s * gpus / 3600)


def _lost_within(time_s: Floats, mttf_s: float) -> Floats:
    """∫₀ᵗ u·e^(−u/M)/M du: work lost where a failure may come until t, s."""
    x = time_s / mttf_s
    exact = -np.expm1(-x) - x * np.exp(-x)
    return mttf_s * np.where(x < 1e-4, x**2 / 2 - x**3 / 3, exact)  # two nearly equal numbers otherwise


def mttf_of_probability(p_failure: float, runtimes_s: ArrayLike) -> float:
    """Mean time to failure of a job that is hit with a probability before it ends, s; infinite for 0.

    Args:
        p_failure: Probability of a hardware failure during the run, 0 to below 1.
        runtimes_s: Equally likely runtimes, s.

    Raises:
        CheckpointError: A number is out of range.
    """
    times = _runtimes(runtimes_s)
    if not 0 <= p_failure < 1:
        raise CheckpointError(f"p_failure={p_failure!r} is not valid; valid: 0 to below 1")
    if p_failure == 0:
        return math.inf
    from scipy.optimize import brentq

    def excess(log_rate: float) -> float:
        return float(-np.expm1(-times * math.exp(log_rate)).mean()) - p_failure

    mean = float(times.mean())
    low, high = math.log(p_failure / mean) - 1, math.log(60.0 / float(times.min()))
    return math.exp(-float(brentq(excess, low, max(high, low + 1))))


def runtimes_of(levels: ArrayLike, quantiles_s: ArrayLike) -> Floats:
    """Equally likely runtimes of a distribution told by quantiles, straight in the logarithm between, shape (400,).

    Args:
        levels: Levels, rising within (0, 1), shape (k,).
        quantiles_s: Quantiles, s, never falling, above 0, shape (k,).

    Raises:
        CheckpointError: They are not.
    """
    at, values = np.asarray(levels, dtype=np.float64), np.asarray(quantiles_s, dtype=np.float64)
    if at.shape != values.shape or at.ndim != 1 or not len(at):
        raise CheckpointError(f"levels of shape {at.shape} and quantiles of shape {values.shape}; valid: equal, (k,)")
    if np.any(np.diff(at) <= 0) or at[0] <= 0 or at[-1] >= 1 or np.any(np.diff(values) < 0) or not values[0] > 0:
        raise CheckpointError("levels must rise within (0, 1), quantiles never fall and be above 0")
    grid = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    return np.exp(np.interp(grid, at, np.log(values)))


def _runtimes(runtimes_s: ArrayLike) -> Floats:
    times = np.atleast_1d(np.asarray(runtimes_s, dtype=np.float64))
    if not times.size or not np.all(np.isfinite(times) & (times > 0)):
        raise CheckpointError("runtimes_s is not valid; valid: at least one, all finite and above 0")
    return times

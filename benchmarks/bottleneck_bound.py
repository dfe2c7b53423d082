"""What a forecaster could reach at best who knows the simulator's ramps, and sees a level without noise.

It knows the course of a ramp from two samples (length and bend), but neither whether it is a look-alike nor where that
will stop, nor whether the ramp will hesitate; what it says is the probability of an onset within the last horizon by
Bayes' rule. Steps are left out: nobody sees them coming. An optimist's bound: real quantities have noise and grain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.bottleneck_scores import VISIBLE_S
from models.onsets import LAST_S
from simulator.events import Rates
from simulator.ramps import PAUSE_RATIO, PAUSE_SHARE, STOP, Ramp, draw_ramp

MISSING_RATIO = 0.2
TICK_MIN_S = 5.0
_AFTER_S = 400.0
_MEAN_PAUSE = sum(PAUSE_SHARE) / 2


def probability(ramp: Ramp, sample_s: float, before_s: float, now_s: float, real_ratio: float) -> float:
    """P(onset within the last horizon), to one who has the samples of two moments of a ramp.

    Args:
        ramp: The course; its stop is not looked at but through the two levels.
        sample_s: Time of the newest sample since the ramp began.
        before_s: Time of the one before.
        now_s: The moment.
        real_ratio: Ramps that reach their limit, of all.
    """
    level = ramp.level(sample_s)
    if level <= STOP[0] or level >= 1 or level - ramp.level(before_s) < 1e-9:
        return 0.0
    goes_on = real_ratio / (real_ratio + (1 - real_ratio) * (1 - level) / (STOP[1] - STOP[0]))
    gone = level ** (1 / ramp.bend)
    left_s = ramp.length_s * (1 - ramp.pause_share) * (1 - gone)
    within_s = LAST_S - (now_s - sample_s)
    if left_s > within_s:
        return 0.0
    has_paused = ramp.pause_share > 0 and sample_s >= ramp.pause_at * ramp.length_s
    ahead = PAUSE_RATIO * (1 - gone)
    pauses = 0.0 if has_paused else ahead / (ahead + 1 - PAUSE_RATIO)
    longest = ramp.length_s * (1 - ramp.pause_share) / (1 - _MEAN_PAUSE)
    fits = np.clip(((within_s - left_s) / longest - PAUSE_SHARE[0]) / (PAUSE_SHARE[1] - PAUSE_SHARE[0]), 0, 1)
    return float(goes_on * (1 - pauses * (1 - fits)))


def bounds(
    sampling_s: float, thresholds: Sequence[float], *, ramps: int = 4000, seed: int = 1
) -> list[tuple[float, float, float, float]]:
    """Precision of claims, recall of ramps and median lead (s) by threshold, on ramps drawn as the simulator does.

    Args:
        sampling_s: Time between samples, s; a fifth are missing.
        thresholds: Probabilities from which an alarm stands.
        ramps: Ramps and look-alikes drawn.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng(seed)
    rates = Rates()
    real_ratio = (1 - rates.step_ratio) / (1 - rates.step_ratio + rates.lookalike_ratio)
    tick_s = max(sampling_s, TICK_MIN_S)
    claims, right = np.zeros(len(thresholds)), np.zeros(len(thresholds))
    leads: list[list[float]] = [[] for _ in thresholds]
    real = 0
    for _ in range(ramps):
        is_real = bool(rng.random() < real_ratio)
        real += is_real
        ramp = draw_ramp(rng, is_lookalike=not is_real)
        onset = ramp.length_s if is_real else np.inf
        until = (ramp.length_s if is_real else ramp.stops_s) + _AFTER_S
        sample = np.arange(rng.random() * sampling_s, until, sampling_s)
        sample = sample[rng.random(len(sample)) >= MISSING_RATIO]
        tick = np.arange(rng.random() * tick_s, min(until, onset - VISIBLE_S), tick_s)
        newest = np.searchsorted(sample, tick, side="right") - 1
        tick, newest = tick[newest >= 1], newest[newest >= 1]
        p = np.array(
            [
                probability(ramp, float(sample[k]), float(sample[k - 1]), float(at), real_ratio)
                for k, at in zip(newest.tolist(), tick.tolist(), strict=True)
            ]
        )
        for i, threshold in enumerate(thresholds):
            n, good, lead = _claims(tick[p >= threshold] + VISIBLE_S, onset)
            claims[i], right[i] = claims[i] + n, right[i] + good
            leads[i] += lead
    return [
        (t, float(right[i] / max(claims[i], 1)), len(leads[i]) / max(real, 1),
         float(np.median(leads[i])) if leads[i] else float("nan"))
        for i, t in enumerate(thresholds)
    ]  # fmt: skip


def _claims(at: np.ndarray, onset: float) -> tuple[int, int, list[float]]:
    claims = right = i = 0
    lead: list[float] = []
    while i < len(at):
        comes = 0 < onset - at[i] <= LAST_S
        claims, right = claims + 1, right + comes
        if comes:
            lead = [float(onset - at[i])]
        until = onset if comes else at[i] + LAST_S
        i = max(i + 1, int(np.searchsorted(at, until, side="right")))
    return claims, right, lead

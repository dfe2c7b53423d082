"""Heat of a GPU as physics has it: a lagged response of the first order to its power and to the air that cools it.

Here belongs the arithmetic on windows that are already gathered; no model and no reading. Temperature follows
`air + R × F`, where F is power seen through a lag of τ seconds; what it comes to is `air + R × power`. The rise per
watt R and the air are fitted to each window by itself, R drawn towards what GPUs of about that power have; τ is the
best of a few. Inlet air helps where it is measured and is not needed: the fitted air holds all that warms the GPU
besides its own power, its neighbours too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

LAGS_S = (12.0, 25.0, 40.0, 70.0)  # cold plates answer in ten seconds, air coolers in half a minute to one
USUAL_LAG = 1  # of `LAGS_S`, where a window does not say
# Full power warms a GPU by about so much over its air, whatever its model: cooling is built for it (a 700 W board at
# 60-65 °C in 25 °C air). Where a window shows power change, it tells by itself.
FULL_RISE_K = 38.0
LEAST_POWER_W = 200.0  # of full power, where a window has seen less
PULL_W2 = 60.0**2  # a window whose power varies by less than this says little of R
FADE_S = 240.0  # the air of that long ago says less of the air now
READING_K = 0.5  # what a reading in whole degrees is off by, at most


class Heat(NamedTuple):
    """What a window says of a GPU's heat.

    Attributes:
        air_c: What it would cool down to without power, °C, shape (rows,); NaN where nothing is known.
        rise_k_per_w: Rise per watt, shape (rows,).
        lag_s: Seconds of the lag, shape (rows,).
        flow_w: Power as the lag has let it through by now, shape (rows,).
        error_k: Root mean square of what the fit leaves, shape (rows,).
    """

    air_c: Floats
    rise_k_per_w: Floats
    lag_s: Floats
    flow_w: Floats
    error_k: Floats

    def ahead(self, power_w: Floats, seconds: Floats) -> Floats:
        """Temperature so many seconds after the newest sample if power then stays at a value, °C."""
        flow = power_w + (self.flow_w - power_w) * np.exp(-seconds / self.lag_s)
        return self.air_c + self.rise_k_per_w * flow


def heat_of(temp_c: NDArray, power_w: NDArray, inlet_c: NDArray, t: NDArray) -> Heat:
    """Fit windows.

    Args:
        temp_c: Temperatures, shape (rows, slots), oldest first, NaN where there is none.
        power_w: Power, likewise.
        inlet_c: Inlet air, likewise; all NaN where it is not measured.
        t: Time of each sample before the moment, ≤ 0, seconds, NaN where there is none.
    """
    temp, power, inlet = (np.asarray(x, dtype=np.float64) for x in (temp_c, power_w, inlet_c))
    t = np.asarray(t, dtype=np.float64)
    rows = len(t)
    has_power, both = ~np.isnan(power), ~np.isnan(power) & ~np.isnan(temp)
    # Air that is measured is taken off; where a sample lacks it, the window's mean stands in.
    seen = ~np.isnan(inlet)
    count = seen.sum(axis=1)
    mean_air = np.where(count > 0, np.where(seen, inlet, 0).sum(axis=1) / np.maximum(count, 1), 0.0)
    air = np.where(seen, inlet, mean_air[:, None])
    last_air = _newest(air, seen | (count == 0)[:, None])
    full = np.maximum(np.where(has_power, power, 0).max(axis=1, initial=0.0), LEAST_POWER_W)
    prior = FULL_RISE_K / full
    weight = np.where(both, np.exp(np.where(np.isnan(t), 0.0, t) / FADE_S), 0.0)
    total = np.maximum(weight.sum(axis=1), 1e-9)
    best = [np.full(rows, np.nan) for _ in range(5)]
    least = np.full(rows, np.inf)
    for k, lag_s in enumerate(LAGS_S):
        flow = _through(power, has_power, t, lag_s)
        x, y = np.where(both, flow, 0.0), np.where(both, temp - air, 0.0)
        mx, my = (weight * x).sum(axis=1) / total, (weight * y).sum(axis=1) / total
        dx, dy = np.where(both, x - mx[:, None], 0.0), np.where(both, y - my[:, None], 0.0)
        sxx, sxy = (weight * dx * dx).sum(axis=1) / total, (weight * dx * dy).sum(axis=1) / total
        rise = (sxy + PULL_W2 * prior) / (sxx + PULL_W2)
        rise = np.clip(rise, prior / 4, prior * 4)
        left = dy - rise[:, None] * dx
        error = np.sqrt((weight * left * left).sum(axis=1) / total)
        # A lag other than the usual must fit better by more than readings in whole degrees can tell.
        score = error + (0.0 if k == USUAL_LAG else 0.15 * READING_K)
        better = both.any(axis=1) & (score < least)
        least = np.where(better, score, least)
        found = (my - rise * mx + last_air, rise, np.full(rows, lag_s), flow[:, -1], error)
        for kept, new in zip(best, found, strict=True):
            kept[better] = new[better]
    return Heat(*best)


def _through(power: Floats, mask: Flags, t: Floats, lag_s: float) -> Floats:
    """Power seen through a lag at each sample; the first one is taken to have stood for long."""
    flow = np.full(len(t), np.nan)
    at = np.full(len(t), np.nan)
    out = np.empty_like(power)
    for slot in range(power.shape[1]):
        now = mask[:, slot]
        share = -np.expm1(-np.where(now, t[:, slot] - at, 0.0) / lag_s)
        step = np.where(np.isnan(flow), power[:, slot], flow + share * (power[:, slot] - flow))
        flow = np.where(now, step, flow)
        at = np.where(now, t[:, slot], at)
        out[:, slot] = flow
    return out


def _newest(x: Floats, mask: Flags) -> Floats:
    slot = x.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    return np.where(mask.any(axis=1), x[np.arange(len(x)), slot], np.nan)

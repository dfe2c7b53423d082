"""What a queue has been like for hours and days, kept up sample by sample: what windows of minutes cannot tell.

Here belong the features of `features/shortage.py` that forget slowly, as a running state: how often lately work came
that would make the queue short as it stands now, how long ago and how often it was short, had work that waited, or
started some. Live and over history it is the same update, so that the numbers agree.

Time goes by cells of 30 s: of each only the first sample is remembered, so that a queue that is looked at more often
is not remembered differently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.label_spans import HOLD_S
from features.shortage import DECAYED_MIN, FAR_MIN, SIZE_HALF_LIVES_MIN, SIZES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CELL_S = 30.0
SINCE = ("short", "held", "waits", "starts")
_DECAYED = tuple((name, minutes) for name, half_lives in DECAYED_MIN.items() for minutes in half_lives)
MEMORY = (
    *(f"shortening_{minutes}m" for minutes in SIZE_HALF_LIVES_MIN),
    *(f"{name}_decayed_{minutes}m" for name, minutes in _DECAYED),
    *(f"since_{name}_min" for name in SINCE),
    "largest_less_idle", "queue_margin", "remembered_min",
)  # fmt: skip
_HOURS = 24


class QueueMemory:
    """What is remembered of queues, by index."""

    _SCALARS = ("first_s", "ts", "asked", "running", "short_since", "is_held")

    def __init__(self, queues: int = 0) -> None:
        for name in self._SCALARS:
            setattr(self, name, np.full(queues, np.nan))
        self.first_s: Floats
        self.ts: Floats
        self.asked: Floats
        self.running: Floats
        self.short_since: Floats
        self.is_held: Floats
        self.came = np.full((queues, len(SIZE_HALF_LIVES_MIN), len(SIZES)), np.nan)
        self.decayed = np.full((queues, len(_DECAYED)), np.nan)
        self.last = np.full((queues, len(SINCE)), np.nan)
        self.hour = np.full((queues, _HOURS), np.nan)
        self.largest = np.full((queues, _HOURS), np.nan)

    def grow(self, queues: int) -> None:
        """Make room for more queues; those there keep their memory."""
        fresh = QueueMemory(queues)
        for name, old in vars(self).items():
            getattr(fresh, name)[: len(old)] = old
        vars(self).update(vars(fresh))

    def keep(self, queues: Ints) -> None:
        """Give up all but some queues."""
        for name, values in vars(self).items():
            setattr(self, name, values[queues])

    def set_back(self, latest_s: float) -> None:
        """Take what is from later than a moment for of that moment, as when the clock was wrong and has been set back.

        Args:
            latest_s: The moment, seconds.
        """
        for values in (self.first_s, self.short_since, self.last):
            values[values > latest_s] = latest_s
        self.ts[self.ts > latest_s] = latest_s - CELL_S

    def update(self, queue: Ints, ts: Floats, pending: Floats, idle: Floats, running: Floats) -> None:
        """Take one sample of each of some queues; one that is not of a later cell of time changes nothing.

        Args:
            queue: Indices, each once.
            ts: Times, seconds.
            pending: GPUs that pending jobs ask for, NaN where not known; such a sample changes nothing.
            idle: Idle GPUs.
            running: GPUs of running jobs; NaN counts as 0.
        """
        before = self.ts[queue]
        known = (pending >= 0) & (idle >= 0)
        use = known & ~(np.floor(ts / CELL_S) <= np.floor(before / CELL_S))
        if not use.any():
            return
        q, at, since = queue[use], ts[use], before[use]
        p, free, runs = pending[use], idle[use], np.nan_to_num(running[use])
        elapsed_min = np.where(np.isnan(since), np.nan, (at - since) / 60)
        step = np.maximum(elapsed_min, 1 / 60)
        came = np.nan_to_num(runs + p - self.asked[q])
        short, waits = (p > free).astype(np.float64), (p > 0).astype(np.float64)
        held = self._held(q, at, short)
        arrivals = np.nan_to_num(np.maximum(came, 0) / step)
        starts = np.nan_to_num(np.maximum(runs - self.running[q], 0) / step)
        signs = {"arrivals": arrivals, "held": held, "short": short, "waits": waits}
        values = np.stack([signs[name] for name, _ in _DECAYED], axis=1)
        self.decayed[q] = _forget(self.decayed[q], values, elapsed_min[:, None], [m for _, m in _DECAYED])
        sizes = (came[:, None] >= np.asarray(SIZES)).astype(np.float64)[:, None, :]
        half_lives = np.asarray(SIZE_HALF_LIVES_MIN, dtype=np.float64)[:, None]
        self.came[q] = _forget(self.came[q], sizes, elapsed_min[:, None, None], half_lives)
        happened = np.stack((short, held, waits, starts), axis=1) > 0
        self.last[q] = np.where(happened, at[:, None], self.last[q])
        number = np.floor(at / 3600)
        slot = number.astype(np.int64) % _HOURS
        is_new = self.hour[q, slot] != number
        self.largest[q, slot] = np.where(is_new, arrivals, np.fmax(self.largest[q, slot], arrivals))
        self.hour[q, slot] = number
        self.first_s[q] = np.where(np.isnan(self.first_s[q]), at, self.first_s[q])
        self.ts[q], self.asked[q], self.running[q] = at, runs + p, runs

    def _held(self, q: Ints, at: Floats, short: Floats) -> Floats:
        """Where an onset has just proved to hold."""
        since = np.where(short > 0, np.where(np.isnan(self.short_since[q]), at, self.short_since[q]), np.nan)
        holds = (short > 0) & (at - since >= HOLD_S - 1e-6) & (at > since)
        new = holds & ~(self.is_held[q] > 0)
        self.short_since[q], self.is_held[q] = since, holds
        return new.astype(np.float64)

    def features(self, queue: Ints, ts: Floats, pending: Floats, idle: Floats) -> NDArray[np.float32]:
        """`MEMORY` of some queues at a sample of each, shape (rows, len(MEMORY)); NaN before the first."""
        out = np.full((len(queue), len(MEMORY)), np.nan)
        margin = idle - pending
        sized = np.nan_to_num(margin, nan=float(SIZES[-1]))
        least = np.searchsorted(SIZES, sized + 1, side="left")
        shares = self.came[queue][np.arange(len(queue)), :, np.minimum(least, len(SIZES) - 1)]
        shares = np.where((least < len(SIZES))[:, None], shares, 0.0)
        n = len(SIZE_HALF_LIVES_MIN)
        out[:, :n] = np.where((sized < 0)[:, None], 1.0, shares)
        out[:, n : n + len(_DECAYED)] = self.decayed[queue]
        n += len(_DECAYED)
        ago = np.nan_to_num((ts[:, None] - self.last[queue]) / 60, nan=FAR_MIN)
        out[:, n : n + len(SINCE)] = np.clip(ago, 0, FAR_MIN)
        n += len(SINCE)
        hours = np.floor(ts / 3600)[:, None] - self.hour[queue]
        largest = np.where((hours >= 0) & (hours < _HOURS), self.largest[queue], -np.inf).max(axis=1, initial=-np.inf)
        out[:, n] = np.where(np.isfinite(largest), largest - idle, np.nan)
        out[:, n + 1] = margin
        out[:, n + 2] = np.minimum((ts - self.first_s[queue]) / 60, FAR_MIN)
        out[np.isnan(self.ts[queue])] = np.nan
        return out.astype(np.float32)

    # --- over a restart -------------------------------------------------------------------------------------

    def to_lists(self) -> dict[str, Any]:
        """All that is remembered, as JSON can hold it: null where not known."""
        return {name: _listed(values) for name, values in vars(self).items()}

    @classmethod
    def from_lists(cls, queues: int, lists: dict[str, Any]) -> QueueMemory:
        """What `to_lists` gave.

        Raises:
            ValueError: Something is missing or has another shape; the message names it.
        """
        out = cls(queues)
        for name, empty in vars(out).items():
            values = np.array(lists.get(name, ()), dtype=np.float64)
            if values.shape != empty.shape:
                raise ValueError(f"memory of queues: {name} has shape {values.shape}, {empty.shape} is needed")
            setattr(out, name, values)
        return out


def _forget(old: Floats, new: Floats, elapsed_min: Floats, half_lives_min: Any) -> Floats:
    """Means that forget with half-lives: the first value, then moved towards each by the time since the last."""
    weight = 1 - 2.0 ** (-elapsed_min / np.asarray(half_lives_min, dtype=np.float64))
    return np.where(np.isnan(old), new, old + weight * (new - old))


def _listed(values: Floats) -> Any:
    out = values.astype(object)
    out[np.isnan(values)] = None
    return out.tolist()

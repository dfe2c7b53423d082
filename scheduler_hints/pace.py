"""How often a nowcast ticks: as often as wished while there is time, less often before it would fall behind.

Here belongs the rule alone, without a clock: it is told how long the work of ticks took. Widening comes at once, by as
many steps as it takes; narrowing comes a step at a time and only when the work of several ticks in a row would have
left room at the narrower tick, so that a load near a step does not make it swing.
"""

from __future__ import annotations

from collections import deque

STEPS = (1.0, 4 / 3, 2.0, 3.0, 4.0)  # times the wished tick: 15, 20, 30, 45, 60 s
WIDEN_SHARE = 0.7  # work that takes this share of a tick or more makes the tick wider
NARROW_SHARE = 0.5  # and narrower only when it would take no more than this share of the narrower one
CALM_TICKS = 8  # ticks in a row whose work must have left that room


class Pace:
    """The present tick.

    Args:
        wished_s: Tick to hold while there is time, seconds.

    Attributes:
        widened_total: How often the tick was made wider.
        missed_total: Ticks that were left out because the one before took too long.
    """

    def __init__(self, wished_s: float) -> None:
        self.wished_s = wished_s
        self.widened_total = 0
        self.missed_total = 0
        self._step = 0
        self._busy: deque[float] = deque(maxlen=CALM_TICKS)

    @property
    def tick_s(self) -> float:
        """Seconds from one tick to the next at present."""
        return self.wished_s * STEPS[self._step]

    @property
    def stretch(self) -> float:
        """The present tick in wished ones, ≥ 1."""
        return STEPS[self._step]

    @property
    def busy_ratio(self) -> float | None:
        """Share of the present tick that the work of the last one took; None before the first."""
        return self._busy[-1] / self.tick_s if self._busy else None

    def foresee(self, busy_s: float) -> None:
        """Widen the tick if work that is not over yet will take too much of it; never narrows.

        Args:
            busy_s: Seconds that the work of this tick will have taken, at least.
        """
        if busy_s < WIDEN_SHARE * self.tick_s or self._step == len(STEPS) - 1:
            return
        while self._step < len(STEPS) - 1 and busy_s >= WIDEN_SHARE * self.tick_s:
            self._step += 1
        self.widened_total += 1
        self._busy.clear()

    def note(self, busy_s: float) -> None:
        """Take in how long the work of a tick took, seconds; waiting for a source is no work."""
        self.foresee(busy_s)
        self._busy.append(busy_s)
        if self._step and len(self._busy) == CALM_TICKS:
            narrower_s = self.wished_s * STEPS[self._step - 1]
            if max(self._busy) <= NARROW_SHARE * narrower_s:
                self._step -= 1
                self._busy.clear()
                self._busy.append(busy_s)

    def problem(self) -> str | None:
        """What is not as wished, in words; None when all is."""
        if not self._step:
            return None
        busy = self._busy[-1] if self._busy else 0.0
        said = f"ticks every {self.tick_s:g} s instead of {self.wished_s:g} s: the work of one takes {busy:.1f} s"
        if busy >= self.tick_s:
            return f"{said}, which is more than there is: give it more processors or fewer GPUs a shard"
        return said

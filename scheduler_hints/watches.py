"""Hysteresis: from when on a unit's probability is an alarm, and when it no longer is.

A unit becomes an alarm when its condition is set, when P is very high, or when P reaches the threshold and does so on
average over the last two looks; it stays one while P keeps a share of the threshold, and ends only after it has looked
clear for a while over more than one fresh sample. A look needs a new sample: the same one seen twice is one look. No
merging and no words here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler_hints.scored import Alarm, Place, Scored

CLEAR_S = 10.0  # an alarm has to look clear for this long
SET_CLEAR_S = 60.0  # and for this long where its condition was set: jobs pause for checkpoints
CLEAR_LOOKS = 2  # and at as many fresh samples
SURE = 0.8  # P that needs no second look
STALE_KEEP_S = 30.0  # an alarm without a fresh sample is kept for less than this after its last look

IsKnown = Callable[[str, str | None], bool]


@dataclass(frozen=True, slots=True)
class Threshold:
    """When a class is published.

    Attributes:
        publish: A unit becomes an alarm from this P on, at the newest look and on average over the last two.
        sure: P that needs no look before it.
        keep_ratio: An alarm stays one from this share of `publish` on.
    """

    publish: float = 0.5
    sure: float = SURE
    keep_ratio: float = 0.6

    @property
    def keep(self) -> float:
        """P from which an alarm stays one."""
        return self.keep_ratio * self.publish


@dataclass(slots=True, eq=False)
class _Watch:
    alarm: Alarm
    sampled_s: float
    last: float
    before: float = 0.0
    is_raised: bool = False
    clear_since_s: float | None = None
    clear_looks: int = 0


class Watches:
    """Units of one class that are alarms, or may become so at the next look.

    Args:
        threshold: When the class is published.
    """

    def __init__(self, threshold: Threshold) -> None:
        self.threshold = threshold
        self._watches: dict[str, _Watch] = {}

    def update(
        self,
        now_s: float,
        scored: Scored | None,
        place: Place,
        is_known: IsKnown | None = None,
        stale_keep_s: float = STALE_KEEP_S,
    ) -> list[Alarm]:
        """Take one look at every unit.

        Args:
            now_s: The moment, seconds since 1970.
            scored: Scores of the class; None: nothing was scored.
            place: Look-up of places and jobs.
            is_known: Tells by name and node whether a unit was an alarm before a restart; such a one needs no second
                look.
            stale_keep_s: How long an alarm outlives its last fresh look, s.

        Returns:
            All alarms, those that nothing new is known of included.
        """
        looked = self._look(now_s, scored, place, is_known) if scored is not None else {}
        for key in [key for key in self._watches if key not in looked]:
            self._miss(now_s, key, place, stale_keep_s)
        return [watch.alarm for watch in self._watches.values() if watch.is_raised]

    def _look(self, now_s: float, scored: Scored, place: Place, is_known: IsKnown | None) -> dict[str, None]:
        """Take in the rows that are probable enough, and those of units other than GPUs that are not."""
        highest, moments = scored.highest(), scored.moments_s(now_s)
        looked: dict[str, None] = {}
        keep = self.threshold.keep
        rows = np.flatnonzero(highest >= keep) if scored.unit == "gpu" else np.arange(len(highest))
        for row in rows.tolist():
            gpu = int(scored.block.gpus[row]) if scored.unit == "gpu" and scored.block is not None else -1
            key = place.uuid(gpu) if gpu >= 0 else scored.names[row]
            watch = self._watches.get(key)
            p, moment = float(highest[row]), float(moments[row])
            if p < keep:
                if watch is not None:
                    looked[key] = None
                    self._clear(now_s, key, watch, moment)
                continue
            node = _node(scored, row, gpu, key, place)
            if node is not None and place.is_excluded(node):
                continue
            known = watch is None and is_known is not None and is_known(key, node)
            looked[key] = None
            alarm = Alarm(key, node, _jobs(scored, row, gpu, node, place), scored, row, now_s, now_s)
            self._probable(key, watch, alarm, p, moment, known=known)
        return looked

    def _probable(self, key: str, watch: _Watch | None, alarm: Alarm, p: float, moment: float, *, known: bool) -> None:
        if watch is None:
            watch = self._watches[key] = _Watch(alarm, moment, last=p)
        else:
            alarm.since_s = watch.alarm.since_s if watch.is_raised else alarm.since_s
            is_new = moment > watch.sampled_s
            watch.alarm, watch.sampled_s = alarm, max(moment, watch.sampled_s)
            watch.clear_since_s, watch.clear_looks = None, 0
            if is_new:
                watch.before, watch.last = watch.last, p
        publish = self.threshold.publish
        is_told = p >= self.threshold.sure or (p >= publish and (watch.before + watch.last) / 2 >= publish)
        watch.is_raised = watch.is_raised or known or alarm.is_active or is_told

    def _miss(self, now_s: float, key: str, place: Place, stale_keep_s: float) -> None:
        """A unit that is not among the probable ones: clear when it has a fresh sample, else not looked at."""
        watch = self._watches[key]
        node = watch.alarm.node
        moment = place.sampled_s(key) if watch.alarm.unit == "gpu" else None
        if node is not None and place.is_excluded(node):
            del self._watches[key]
        elif moment is not None:
            self._clear(now_s, key, watch, moment)
        elif not watch.is_raised or now_s - watch.alarm.looked_s >= stale_keep_s:
            del self._watches[key]

    def _clear(self, now_s: float, key: str, watch: _Watch, moment: float) -> None:
        if not watch.is_raised:
            del self._watches[key]
            return
        if moment > watch.sampled_s:
            watch.sampled_s = moment
            watch.clear_looks += 1
            if watch.clear_since_s is None:
                watch.clear_since_s = moment
        since = watch.clear_since_s
        watch.alarm.looked_s = now_s
        for_s = SET_CLEAR_S if watch.alarm.is_active else CLEAR_S
        if since is not None and watch.clear_looks >= CLEAR_LOOKS and moment - since >= for_s:
            del self._watches[key]


def _node(scored: Scored, row: int, gpu: int, key: str, place: Place) -> str | None:
    if gpu >= 0:
        return place.node(gpu)
    if scored.unit == "node":
        return key
    return scored.nodes[row] if scored.nodes else None


def _jobs(scored: Scored, row: int, gpu: int, node: str | None, place: Place) -> tuple[str, ...]:
    if scored.jobs:
        return tuple(scored.jobs[row])
    if gpu >= 0:
        return tuple(place.jobs(gpu))
    return tuple(place.node_jobs(node)) if node is not None else ()

"""Two Prometheus servers that scrape the same exporters: of each thing the samples of one are kept.

Seen through a querier that does not remove duplicates, or when both send to us, every series is there once a replica,
seconds apart. Rows would be doubled, and differences of counters taken across clocks. Here is decided whose samples
are kept; nothing is read or resolved.
"""

from __future__ import annotations

import numpy as np

from pipelines.sources.series import Samples

_NEVER = -(1 << 62)
_NOBODY = -1


class OneReplica:
    """Chooses one replica for each entity and stays with it while it is fresh.

    The first choice is the one with the most samples, of those that have about as many the one with the lowest number:
    another process, or a window read again, chooses the same. Where it brings nothing for two intervals another one
    follows, and is stayed with in turn.

    Args:
        interval_ms: Interval of scrapes, ms; that of the samples counts where it is longer.
    """

    def __init__(self, interval_ms: float) -> None:
        self._interval_ms = interval_ms
        self._spacing_ms = 0.0
        self._generation = 0
        self.forget()

    def forget(self) -> None:
        """Numbers of entities mean other things from now on."""
        self._owner, self._last = np.empty(0, np.int64), np.empty(0, np.int64)

    def keep(self, samples: Samples, replica: np.ndarray, generation: int = 0) -> np.ndarray | None:
        """Which samples are kept.

        Args:
            samples: Of any metrics; times within a series ascend.
            replica: Number of the replica of each series, -1 where no label tells one: these are kept.
            generation: Another than before: numbers of entities mean other things.

        Returns:
            True for each sample that is kept; None: all are.
        """
        if generation != self._generation:
            self._generation = generation
            self.forget()
        tagged = np.flatnonzero((replica >= 0) & (samples.counts > 0))
        if not len(tagged):
            return None
        entity, told, counts = samples.entity[tagged], replica[tagged], samples.counts[tagged]
        ends = np.cumsum(samples.counts)[tagged]
        starts = ends - counts
        # The series with the most samples stands for all of its entity and replica: they share their scrapes.
        stride = int(told.max()) + 1
        groups, group = np.unique(entity * stride + told, return_inverse=True)
        order = np.lexsort((-counts, group))
        chosen = order[np.searchsorted(group[order], np.arange(len(groups)))]
        owned, by, many = entity[chosen], told[chosen], counts[chosen]
        first, newest = samples.ts_ms[starts[chosen]], samples.ts_ms[ends[chosen] - 1]
        self._grow(int(entity.max()) + 1)
        owner = self._owner[owned]
        if (many > 1).any():
            spacing = (newest - first)[many > 1] / (many[many > 1] - 1)
            self._spacing_ms = float(np.median(spacing))
        several = np.bincount(owned)[owned] > 1
        if not (several | ((owner != _NOBODY) & (owner != by))).any():
            self._owner[owned], self._last[owned] = by, newest
            return None
        size = int(owned.max()) + 1
        most, last = np.zeros(size, np.int64), np.full(size, _NEVER)
        np.maximum.at(most, owned, many)
        np.maximum.at(last, owned, newest)
        is_worse = (many < most[owned] - 1) | (newest < last[owned] - max(self._interval_ms, self._spacing_ms))
        best = np.lexsort((by, -many * is_worse, is_worse, owner != by, owned))
        begins = np.searchsorted(owned[best], owned[best])  # of its entity, in that order
        ranks = np.empty(len(groups), np.int64)
        ranks[best] = np.arange(len(best)) - begins
        return self._judge(samples, tagged, group, ranks, (owned, by, starts[chosen], many))

    def _judge(
        self, samples: Samples, tagged: np.ndarray, group: np.ndarray, ranks: np.ndarray,
        chosen: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    ) -> np.ndarray:  # fmt: skip
        owned, by, begin, many = chosen
        fresh = round(2 * max(self._interval_ms, self._spacing_ms))
        entity, rank = samples.entity[tagged], ranks[group]
        low = int(samples.ts_ms.min()) - 2 * fresh
        span = int(samples.ts_ms.max()) - low + 4 * fresh
        # A metric that only one replica has is no duplicate.
        names, which = np.unique(samples.name[tagged] * (int(entity.max()) + 1) + entity, return_inverse=True)
        least = np.full(len(names), np.iinfo(np.int64).max)
        np.minimum.at(least, which, rank)
        # What is known of those chosen before: their last samples.
        distinct = np.unique(owned)
        last = self._last[distinct]
        near = (self._owner[distinct] != _NOBODY) & (last >= low) & (last < low + span)
        known = np.sort(distinct[near] * span + (last[near] - low))
        kept = np.ones(len(samples.ts_ms), bool)
        ends = np.cumsum(samples.counts)
        changed = (self._owner[owned] != by) & (self._owner[owned] != _NOBODY)
        for level in range(int(ranks.max()) + 1):
            # The one that was chosen before is not judged by itself.
            series = tagged[(rank == level) & (changed[group] if level == 0 else rank > least[which])]
            at = _indices(ends[series] - samples.counts[series], samples.counts[series])
            moments = np.repeat(samples.entity[series], samples.counts[series]) * span + (samples.ts_ms[at] - low)
            kept[at] = ~_is_near(known, moments, fresh)
            at = _indices(begin[ranks == level], many[ranks == level])
            whose = np.repeat(np.flatnonzero(ranks == level), many[ranks == level])
            counted = ~_is_near(known, owned[whose] * span + (samples.ts_ms[at] - low), fresh)
            if level == 0:
                counted |= ~changed[whose]
            whose, at = whose[counted], at[counted]
            newer = self._is_newer(owned[whose], samples.ts_ms[at], level)
            self._owner[owned[whose[newer]]], self._last[owned[whose[newer]]] = (
                by[whose[newer]],
                samples.ts_ms[at[newer]],
            )
            known = np.sort(np.concatenate([known, owned[whose] * span + (samples.ts_ms[at] - low)]))
        return kept

    def _is_newer(self, owned: np.ndarray, ts_ms: np.ndarray, level: int) -> np.ndarray:
        # The best of a read is known from now on though it lies before what was: a window may be read again.
        return np.ones(len(owned), bool) if level == 0 else ts_ms > self._last[owned]

    def _grow(self, size: int) -> None:
        more = size - len(self._owner)
        if more > 0:
            more = max(more, len(self._owner) // 2)
            self._owner = np.concatenate([self._owner, np.full(more, _NOBODY, np.int64)])
            self._last = np.concatenate([self._last, np.full(more, _NEVER, np.int64)])


def kept_samples(samples: Samples, kept: np.ndarray | None) -> Samples:
    """Samples without those that are not kept; a series may be left with none."""
    if kept is None or kept.all():
        return samples
    owner = np.repeat(np.arange(len(samples.counts)), samples.counts)
    counts = np.bincount(owner[kept], minlength=len(samples.counts))
    return Samples(samples.name, samples.entity, counts, samples.ts_ms[kept], samples.values[kept])


def _indices(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Positions of the samples of series, one after another."""
    shift = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return shift + np.arange(len(shift))


def _is_near(known: np.ndarray, moments: np.ndarray, fresh: int) -> np.ndarray:
    """Whether a known moment lies less than `fresh` before, or half of that after."""
    if not len(known):
        return np.zeros(len(moments), bool)
    at = np.searchsorted(known, moments, "right")
    before = moments - known[np.maximum(at - 1, 0)]
    after = known[np.minimum(at, len(known) - 1)] - moments
    return ((at > 0) & (before < fresh)) | ((at < len(known)) & (after < fresh // 2))

"""One window of raw samples, read in pieces: split by time and by metric names, several at a time, in order.

How large a piece may be is learned from the server's answers and refusals. What is made of the samples stands in
`prometheus.py`.
"""

from __future__ import annotations

import itertools
import math
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from pipelines.sources.promql import Matrix, OutsideRetentionError, PromQL, TooManySamplesError, TooManySeriesError
from pipelines.sources.promql_matrix import join

# Samples under way at a time, all queries together: some 100 bytes each while they are decoded.
_SAMPLES_UNDER_WAY = 3_000_000
_FIRST_RANGE_MS = 30_000
# Some servers refuse long ranges whatever is in them; a day is long enough.
_LONGEST_RANGE_MS = 86_400_000
# Prometheus 2 closes a range on both sides, Prometheus 3 leaves its left side open: ask for more, cut afterwards.
MARGIN_MS = 1_000
# What a server keeps may end inside a piece: pieces down to this are tried before one counts as not kept.
_RETENTION_STEP_MS = 60_000
# VictoriaMetrics refuses queries above 16 KiB, and logs each of them whole; 64 bytes are left for what stands around
# the names.
_LONGEST_QUERY_BYTES = 16_384 - 64


class Piece(NamedTuple):
    """Samples of [at_ms, until_ms), and perhaps some beside it."""

    matrix: Matrix
    at_ms: int
    until_ms: int


class RangeReader:
    """Raw samples of given metrics.

    Args:
        apis: Connections to one server; as many queries run at a time.
        names: Metric names.
        matcher: Label matchers added to every query.
        interval_ms: Shortest range that is worth a query, ms: the exporters' interval.
    """

    def __init__(self, apis: Sequence[PromQL], names: Sequence[str], matcher: str, interval_ms: float) -> None:
        self._apis: queue.SimpleQueue[PromQL] = queue.SimpleQueue()
        for api in apis:
            self._apis.put(api)
        self._parallel = len(apis)
        self._groups = _groups(tuple(names), _LONGEST_QUERY_BYTES - len(matcher.encode()))
        self._matcher = matcher
        self._interval_ms = interval_ms
        self._range_ms: float = _FIRST_RANGE_MS
        self._ceiling_ms = math.inf
        self._notes: list[str] = []

    def read(self, first_ms: int, last_ms: int) -> Iterator[Piece]:
        """Pieces of [first_ms, last_ms), oldest first; while one is used the next ones are on their way.

        Raises:
            SourceError: Some part did not come.
        """
        pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="promql")
        under_way: deque[tuple[int, int, list[Future[Matrix]]]] = deque()
        at = first_ms
        try:
            while at < last_ms or under_way:
                while at < last_ms and len(under_way) < self._parallel:
                    until = min(last_ms, at + max(1, round(self._range_ms)))
                    under_way.append((at, until, [pool.submit(self._ask, names, at, until) for names in self._groups]))
                    at = until
                begin, until, futures = under_way.popleft()
                try:
                    matrix: Matrix | None = join([future.result() for future in futures])
                except (TooManySamplesError, TooManySeriesError, OutsideRetentionError) as error:
                    matrix = self._shrink(error, until - begin, futures)
                    if matrix is None:
                        _drop([futures, *(later for *_, later in under_way)])
                        under_way.clear()
                        at = begin
                        continue
                else:
                    self._adapt(len(matrix.ts_ms), until - begin)
                yield Piece(matrix, begin, until)
        finally:
            _drop([later for *_, later in under_way])
            pool.shutdown(wait=True, cancel_futures=True)

    def newest(self, span_ms: int) -> Matrix:
        """Samples of the last `span_ms` before the server's now.

        Raises:
            SourceError: Some part did not come.
        """
        while True:
            try:
                return join([self._ask(names, None, span_ms) for names in self._groups])
            except (TooManySamplesError, TooManySeriesError) as error:
                self._split(error, [])

    def instant(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """Series of an instant query over all names at the server's now.

        Args:
            query: With `%s` for the selector, as `count by (__name__) (%s)`; it must not join what is of several names.

        Raises:
            SourceError: Some part did not come.
        """
        while True:
            api = self._apis.get()
            try:
                return [row for names in self._groups for row in api.vector(query.replace("%s", self._selector(names)))]
            except (TooManySamplesError, TooManySeriesError) as error:
                self._split(error, [])
            finally:
                self._apis.put(api)

    def take_notes(self) -> list[str]:
        """What was left out since the last call."""
        notes, self._notes = list(dict.fromkeys(self._notes)), []
        return notes

    def _selector(self, names: tuple[str, ...]) -> str:
        matcher = f",{self._matcher}" if self._matcher else ""
        return f'{{__name__=~"{"|".join(names)}"{matcher}}}'

    def _ask(self, names: tuple[str, ...], at_ms: int | None, until_ms: int) -> Matrix:
        selector = self._selector(names)
        span_ms = until_ms if at_ms is None else until_ms - at_ms + MARGIN_MS
        api = self._apis.get()
        try:
            return api.matrix(f"{selector}[{span_ms}ms]", None if at_ms is None else until_ms)
        finally:
            self._apis.put(api)

    def _shrink(self, error: Exception, span_ms: int, futures: list[Future[Matrix]]) -> Matrix | None:
        """Make pieces smaller after a refusal; a matrix when there is nothing to be had at all."""
        if isinstance(error, OutsideRetentionError) and span_ms <= max(_RETENTION_STEP_MS, self._interval_ms):
            self._notes.append(str(error))
            return join([_nothing()])
        if isinstance(error, TooManySeriesError) or span_ms <= self._interval_ms:
            self._split(error, futures)
        else:
            self._range_ms = span_ms / 2
            if isinstance(error, TooManySamplesError):
                self._ceiling_ms = self._range_ms
        return None

    def _split(self, error: Exception, futures: list[Future[Matrix]]) -> None:
        """Ask for half as many metric names at a time, of the groups that were refused."""
        refused = {i for i, future in enumerate(futures) if future.done() and future.exception() is not None}
        groups: list[tuple[str, ...]] = []
        for i, names in enumerate(self._groups):
            half = len(names) // 2
            groups += [names[:half], names[half:]] if half and (i in refused or not futures) else [names]
        if len(groups) == len(self._groups):
            raise error
        self._groups = groups

    def _adapt(self, samples: int, span_ms: int) -> None:
        rate = max(samples, 1) / max(span_ms + MARGIN_MS, 1)
        # At most fourfold a step: a window may begin before the cluster did. What the server refused is come back to
        # slowly.
        self._ceiling_ms *= 1.02
        self._range_ms = min(
            _SAMPLES_UNDER_WAY / (self._parallel + 1) / rate,
            4 * max(self._range_ms, span_ms),
            self._ceiling_ms,
            _LONGEST_RANGE_MS,
        )


def _groups(names: tuple[str, ...], most_bytes: int) -> list[tuple[str, ...]]:
    """Names in as few groups of like size as make no query longer than that; a single name may be longer."""
    size = sum(len(name.encode()) + 1 for name in names)
    number = min(max(math.ceil(size / max(most_bytes, 1)), 1), max(len(names), 1))
    while True:
        cuts = [round(i * len(names) / number) for i in range(number + 1)]
        groups = [names[begin:end] for begin, end in itertools.pairwise(cuts)]
        longest = max(sum(len(name.encode()) + 1 for name in group) for group in groups)
        if longest <= most_bytes or number >= len(names):
            return groups
        number += 1


def _drop(pieces: list[list[Future[Matrix]]]) -> None:
    for futures in pieces:
        for future in futures:
            future.cancel()


def _nothing() -> Matrix:
    import numpy as np

    return Matrix([], np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))

"""Reading for pages: answers kept for a moment and shared by all viewers, failures turned into something to show.

A page never raises because a source is down: it gets a `Reading` that says so. Here belong the cache and the shape of
an answer; what is read stands in `fleet_reading.py` and `hints_reading.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import polars as pl

log = logging.getLogger(__name__)

T = TypeVar("T")

Hints = Callable[[str, dict], dict]
"""`hints(path, params)`: parsed JSON of the hints API; raises with `.code` and `.message`; on 503 the error's dict."""

Query = Callable[[str, Sequence], pl.DataFrame]
"""`query(sql, params)`: rows of the store; tables by bare name, parameters bound."""

_KEPT = 256


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What was read, or why not.

    Attributes:
        value: The answer; None when there is none.
        error: One sentence for people; None when all is well.
    """

    value: T | None = None
    error: str | None = None


class Cache:
    """Values kept for a few seconds; one thread makes a value while the others wait for it.

    Args:
        clock_s: Monotonic seconds.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._making: dict[Any, threading.Lock] = {}
        self._kept: OrderedDict[Any, tuple[float, Any]] = OrderedDict()

    def get(self, key: Any, ttl_s: float, make: Callable[[], T], *, stale_s: float = 0.0) -> T:
        """The value kept under `key`, made anew when it is older than `ttl_s`.

        Args:
            key: Name of the value.
            ttl_s: It is handed out as it is up to this age, s.
            make: Makes it.
            stale_s: Up to this age, s, it is handed out once more while a thread makes the next one: a page then
                never waits for a slow query. Not for hints, which expire; and a failure is never handed out again.
        """
        with self._lock:
            kept = self._kept.get(key)
            age_s = None if kept is None else self._clock_s() - kept[0]
        if kept is not None and age_s is not None:
            if age_s < ttl_s:
                return kept[1]
            has_failed = isinstance(kept[1], Reading) and kept[1].error is not None
            if age_s < stale_s and not has_failed:
                self.warm(key, ttl_s, make)
                return kept[1]
        return self._make(key, ttl_s, make)

    def warm(self, key: Any, ttl_s: float, make: Callable[[], Any]) -> None:
        """Have the value made by a thread, unless it is fresh or being made."""
        with self._lock:
            kept = self._kept.get(key)
            if key in self._making or (kept is not None and self._clock_s() - kept[0] < ttl_s):
                return
        threading.Thread(target=self._make, args=(key, ttl_s, make), name="reading", daemon=True).start()

    def _make(self, key: Any, ttl_s: float, make: Callable[[], T]) -> T:
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                kept = self._kept.get(key)
                if kept is not None and self._clock_s() - kept[0] < ttl_s:
                    return kept[1]
            try:
                value = make()
                with self._lock:
                    self._kept[key] = (self._clock_s(), value)
                    self._kept.move_to_end(key)
                    while len(self._kept) > _KEPT:
                        self._kept.popitem(last=False)
            finally:
                with self._lock:
                    self._making.pop(key, None)
            return value


def attempt(what: str, make: Callable[[], T]) -> Reading[T]:
    """Call `make`; a failure becomes a sentence that names what could not be read and why.

    Args:
        what: Name of the thing, as `the store`.
        make: Reads it.
    """
    try:
        return Reading(make())
    except Exception as error:
        log.warning("%s could not be read: %s", what, error, exc_info=log.isEnabledFor(logging.DEBUG))
        return Reading(error=reason(error))


def reason(error: BaseException) -> str:
    """First line of what an exception says, at most 300 characters; its type where it says nothing."""
    text = str(getattr(error, "message", "") or error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line if len(line) <= 300 else f"{line[:299]}…"

"""Polls that wait for a change: who waits, what wakes them, and that nobody waits for a client that has gone.

Here belongs the waiting; what a poll is answered with stands in `dispatch.py`. Snapshots are looked for on a thread; it
wakes the event loop once for all who wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from scheduler_hints.reloader import ShardStore

MAX_WAITING = 2_048
"""Polls beyond these are answered at once: half of the connections that the server takes, so that others find room."""


class LongPolls:
    """Those who wait for the next state of a store.

    Args:
        store: The store.
    """

    def __init__(self, store: ShardStore) -> None:
        self.waiting = 0
        self._is_over = False
        self._store = store
        self._seen = store.state.generation
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None
        store.also(self._look)

    def _look(self) -> None:
        """On the thread of the store: wake who waits, once for each new state."""
        generation = self._store.state.generation
        if generation == self._seen:
            return
        self._seen = generation
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def end(self) -> None:
        """Answer all who wait, and let nobody wait any more: the process is to stop. On the event loop."""
        self._is_over = True
        self._wake()

    async def wait(self, generation: int, most_s: float, receive: Callable[[], Awaitable[Any]]) -> bool:
        """Wait for a state other than one, at most so long.

        Args:
            generation: Of the state that the caller has seen.
            most_s: Longest wait, s.
            receive: Gives messages of the client; one that it has gone ends the wait.

        Returns:
            Whether to look again; false when the time is over, the client has gone or the process stops.
        """
        if self._is_over or most_s <= 0 or self.waiting >= MAX_WAITING:
            return False
        self._loop = asyncio.get_running_loop()
        if self._changed is None:
            self._changed = asyncio.Event()
        changed = asyncio.ensure_future(self._changed.wait())
        if self._store.state.generation != generation:  # it came while we made ready
            changed.cancel()
            return True
        gone = asyncio.ensure_future(_gone(receive))
        self.waiting += 1
        try:
            done, _ = await asyncio.wait({changed, gone}, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
            return changed in done
        finally:
            self.waiting -= 1
            changed.cancel()
            gone.cancel()


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

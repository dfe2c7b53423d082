"""Reads many pages over HTTP at once, with one deadline for all of them and a limit to the size of each.

What is late at the deadline is cut off: its connection is shut, so that a server that drips holds its thread no longer
than that. Threads are daemons, so none keeps the process from ending. Which pages are read stands in `scrape.py`, what
they say in `exposition.py`.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from datetime import datetime
from typing import Any, NamedTuple

import httpx

WORKERS = 64
MAX_PAGE_BYTES = 64 << 20  # after decompression


class Answer(NamedTuple):
    """What came of one page.

    Attributes:
        text: The page; None: it did not come.
        trouble: What went wrong, empty when nothing did.
        asked_ms: When it was asked for, ms since the epoch.
    """

    text: str | None
    trouble: str
    asked_ms: int


class _Request:
    """One page being read: its future, and the socket by which it can be cut off."""

    def __init__(self, url: str, headers: Mapping[str, str], deadline_s: float) -> None:
        self.url, self.headers, self.deadline_s = url, headers, deadline_s
        self.future: Future[Answer] = Future()
        self._socket: socket.socket | None = None
        self._is_cut = False
        self._lock = threading.Lock()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Learns of each new connection; the client keeps none open, so there is one for every request."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                if self._is_cut:
                    self._shut()

    def cut_off(self) -> None:
        with self._lock:
            self._is_cut = True
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class PageReader:
    """Reads pages at once from a bounded number of threads.

    Args:
        name: For the names of its threads.
        timeout_s: Longest wait for a connection and for any part of a page, s.
        clock: Gives the time, UTC.
    """

    def __init__(self, name: str, timeout_s: float, clock: Callable[[], datetime]) -> None:
        self._name, self._timeout_s, self._clock = name, timeout_s, clock
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(timeout=timeout_s, limits=limits, follow_redirects=True)
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._hanging: dict[str, _Request] = {}
        self._lock = threading.Lock()

    def read(self, urls: Iterable[str], within_s: float, headers: Mapping[str, str]) -> dict[str, Answer]:
        """Every page, or what went wrong with it, after at most that time.

        Args:
            urls: Pages; each is asked once.
            within_s: Deadline of the whole reading, s.
            headers: Of the requests.
        """
        deadline_s = time.monotonic() + within_s
        asked_ms = round(self._clock().timestamp() * 1000)
        answers: dict[str, Answer] = {}
        requests: list[_Request] = []
        with self._lock:
            self._hanging = {url: r for url, r in self._hanging.items() if not r.future.done()}
            for url in dict.fromkeys(urls):
                if url in self._hanging:
                    answers[url] = Answer(
                        None, f"{url} still hangs since an earlier reading and is not asked", asked_ms
                    )
                else:
                    requests.append(_Request(url, headers, deadline_s))
            # What hangs does not take the place of a thread, up to a bound.
            wanted = min(len(requests), WORKERS) + min(len(self._hanging), 3 * WORKERS)
            for _ in range(len(self._threads), wanted):
                thread = threading.Thread(target=self._work, name=f"scrape-{self._name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        for request in requests:
            self._requests.put(request)
        wait([request.future for request in requests], max(0.0, deadline_s - time.monotonic()))
        for request in requests:
            if request.future.done():
                answers[request.url] = request.future.result()
            elif request.future.cancel():
                late = f"{request.url} was not asked within {within_s:.3g} s: too many others were slow"
                answers[request.url] = Answer(None, late, asked_ms)
            else:
                request.cut_off()
                with self._lock:
                    self._hanging[request.url] = request
                late = f"{request.url} did not answer within {within_s:.3g} s"
                answers[request.url] = Answer(None, late, asked_ms)
        return answers

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            if request.future.set_running_or_notify_cancel():
                request.future.set_result(self._page(request))

    def _page(self, request: _Request) -> Answer:
        url = request.url
        asked_ms = round(self._clock().timestamp() * 1000)
        try:
            extensions = {"trace": request.trace}
            with self._http.stream("GET", url, headers=request.headers, extensions=extensions) as response:
                if response.status_code != 200:
                    return Answer(None, f"{url} answered HTTP {response.status_code}", asked_ms)
                parts, size = [], 0
                for part in response.iter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_PAGE_BYTES:
                        limit = f"{MAX_PAGE_BYTES / 2**20:g} MiB"
                        return Answer(None, f"{url} is larger than {limit} and was not read to its end", asked_ms)
                    if time.monotonic() > request.deadline_s:
                        return Answer(None, f"{url} did not end in time", asked_ms)
            return Answer(b"".join(parts).decode("utf-8", "replace"), "", asked_ms)
        except httpx.TimeoutException:
            return Answer(None, f"{url} did not answer within {self._timeout_s:g} s", asked_ms)
        except Exception as error:
            return Answer(None, f"{url} cannot be read: {str(error) or type(error).__name__}", asked_ms)

    def close(self) -> None:
        """Cut off what is still being read and end the threads."""
        with self._lock:
            for request in self._hanging.values():
                request.cut_off()
            for _ in self._threads:
                self._requests.put(None)
        until_s = time.monotonic() + 1
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._http.close()

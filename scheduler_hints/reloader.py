"""Keeps the hints API's shards up to date with the snapshot files, off the request path.

`ShardStore` looks at the files a few times per second on a thread of its own and swaps one immutable `State`; a request
takes `store.state` once and sees nothing change under it. Decoding stands in `shards.py`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from scheduler_hints import snapshot
from scheduler_hints.outcome_gauges import decode_word, outcomes_path
from scheduler_hints.placements import decode_in_flight, placements_path
from scheduler_hints.schema import KINDS
from scheduler_hints.shards import Key, Shard, State, load_shard

log = logging.getLogger(__name__)
T = TypeVar("T")

PERIOD_S = 0.2
MAX_STATUS_BYTES = 2**20
MAX_PLACEMENTS_BYTES = 16 * 2**20


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _raw_object(data: bytes) -> msgspec.Raw:
    """A JSON object as it is.

    Raises:
        msgspec.DecodeError: It is none.
    """
    msgspec.json.decode(data, type=dict[str, Any])
    return msgspec.Raw(data)


class ShardStore:
    """Keeps `state` up to date with the files under `published`.

    Args:
        published: Folder of snapshots, `<cluster>/<kind>.json`.
        clusters: Names of the clusters that are served.
        without_scheduler: Those of them for which no scheduler is configured.
        clock: CLOCK_BOOTTIME in seconds; the tests give another.
        wall: Now in UTC.
    """

    def __init__(
        self,
        published: Path,
        clusters: Sequence[str],
        *,
        without_scheduler: Collection[str] = (),
        clock: Callable[[], float] = snapshot.boottime_s,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.published = published
        self.clusters = tuple(dict.fromkeys(clusters))
        self.clock = clock
        self.state = State(without_scheduler=frozenset(without_scheduler))
        self.checked_s = clock()
        self.read_errors = 0
        self._wall = wall
        self._seen: dict[Path, tuple[int, ...]] = {}
        self._logged: dict[Key, str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._hooks: list[Callable[[], object]] = []

    def also(self, hook: Callable[[], object]) -> None:
        """Call `hook` at each look at the files, on the same thread."""
        self._hooks.append(hook)

    def refresh(self) -> bool:
        """Look at every file once and read those that have changed.

        Returns:
            Whether the state changed.
        """
        with self._lock:
            shards, problems = dict(self.state.shards), dict(self.state.problems)
            nowcast, outcomes = dict(self.state.nowcast), dict(self.state.outcomes)
            placements = dict(self.state.placements)
            is_changed = False
            for cluster in self.clusters:
                for kind in KINDS:
                    is_changed |= self._refresh_shard(cluster, kind, shards, problems)
                folder = self.published / cluster
                is_changed |= self._refresh_file(
                    cluster, "nowcast-status", folder / "nowcast-status.json", nowcast, _raw_object
                )
                is_changed |= self._refresh_file(
                    cluster, "outcomes", outcomes_path(self.published, cluster), outcomes, decode_word
                )
                is_changed |= self._refresh_file(
                    cluster,
                    "placements",
                    placements_path(self.published, cluster),
                    placements,
                    decode_in_flight,
                    MAX_PLACEMENTS_BYTES,
                )
            if is_changed:
                self.state = replace(
                    self.state,
                    shards=shards,
                    problems=problems,
                    nowcast=nowcast,
                    outcomes=outcomes,
                    placements=placements,
                    generation=self.state.generation + 1,
                )
            self.checked_s = self.clock()
            return is_changed

    def _changed(self, path: Path) -> tuple[bool, bytes | None]:
        """Whether a file is another than the one seen last, and its content; None when it is not there.

        Raises:
            SnapshotError: It cannot be read; the next look tries again.
        """
        try:
            before = self._seen.get(path)
            if _signature(path.stat()) == before:
                return False, None
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._seen[path] = _signature(status)
                if status.st_size > snapshot.MAX_BYTES:
                    raise snapshot.SnapshotError(f"{path}: {status.st_size} bytes; at most {snapshot.MAX_BYTES}")
                return True, file.read()
        except FileNotFoundError:
            return self._seen.pop(path, None) is not None, None
        except OSError as error:
            self._seen[path] = ()
            raise snapshot.SnapshotError(f"{path}: cannot be read: {error.strerror}") from error

    def _refresh_shard(self, cluster: str, kind: str, shards: dict[Key, Shard], problems: dict[Key, str]) -> bool:
        key = (cluster, kind)
        path = snapshot.snapshot_path(self.published, cluster, kind)
        try:
            is_changed, data = self._changed(path)
            if not is_changed:
                return False
            shard = None
            if data is not None:
                shard = load_shard(data, cluster, kind, path, self.clock(), self._wall())
        except snapshot.SnapshotError as error:
            self.read_errors += 1
            self._log_once(key, str(error))
            had = shards.pop(key, None) is not None
            is_news = problems.get(key) != str(error)
            problems[key] = str(error)
            return had or is_news
        shards.pop(key, None)
        problems.pop(key, None)
        self._logged.pop(key, None)
        if shard is not None:
            shards[key] = shard
            if shard.invalid:
                self._log_once(key, f"{path}: {shard.invalid} items left out: not of the shape of {kind}")
        return True

    def _log_once(self, key: Key, message: str) -> None:
        if self._logged.get(key) != message:
            self._logged[key] = message
            log.error("%s", message)

    def _refresh_file(
        self,
        cluster: str,
        what: str,
        path: Path,
        kept: dict[str, T],
        decode: Callable[[bytes], T],
        most: int = MAX_STATUS_BYTES,
    ) -> bool:
        """Read a file of a cluster beside its snapshots, where it has changed; one that is damaged is none.

        Args:
            cluster: Name of the cluster.
            what: What it is, for the log.
            path: The file.
            kept: What the last look found, by cluster; changed.
            decode: Its content.
            most: A longer one is none, bytes.

        Returns:
            Whether `kept` may have changed.
        """
        try:
            is_changed, data = self._changed(path)
        except snapshot.SnapshotError as error:
            self._log_once((cluster, what), str(error))
            return kept.pop(cluster, None) is not None
        if not is_changed:
            return False
        kept.pop(cluster, None)
        if data is not None and len(data) <= most:
            try:
                kept[cluster] = decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._log_once((cluster, what), f"{path}: cannot be read: {error}")
        return True

    def start(self, period_s: float = PERIOD_S) -> None:
        """Look now, and from now on every `period_s` on a thread."""
        self._look()
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(period_s,), name="shards", daemon=True)
            self._thread.start()

    def _run(self, period_s: float) -> None:
        while not self._stop.wait(period_s):
            self._look()

    def _look(self) -> None:
        """One look; whatever goes wrong in it, the next one comes."""
        for step in (self.refresh, *self._hooks):
            try:
                step()
            except Exception:
                self.read_errors += 1
                log.exception("looking for new snapshots failed; trying again")

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

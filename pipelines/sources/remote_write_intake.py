"""Intake of remote-write: requests are decoded, kept as newest samples and written to the log, and then answered.

One thread does all of it, a batch at a time: whatever came while the last batch was on its way to the disk is the next
one, so that one sync serves many requests. How far every sender has come stands in a small file beside the log, for the
processes that ingest and check.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import numpy as np

from features.metrics import DEFAULT, MetricTable
from pipelines.sources.kubernetes_names import PodNames
from pipelines.sources.remote_write_newest import Newest
from pipelines.sources.remote_write_progress import IntakeState, Progress, read_state, write_state
from pipelines.sources.remote_write_series import Series
from pipelines.sources.remote_write_wire import STALE_BITS, TooLargeError, WireError, decompress, split
from pipelines.sources.sample_log import Chunk, SampleLog
from pipelines.sources.series import REPLICA_LABELS

log = logging.getLogger(__name__)

FIRST_MS = 946_684_800_000  # 2000-01-01
AHEAD_MS = 86_400_000
_EPOCH_MS = 86_400_000  # series are learned anew this often, so that those that ended do not pile up
_LEAST_RENEWED = 100_000
_BATCH_BODIES = 100
_STATE_EVERY_S = 1.0

Answer = tuple[int, str]
OK: Answer = (204, "")


class Batch:
    """Bodies that are answered together.

    Attributes:
        parts: Sender, series numbers, times and values of each body that was decoded.
        answers: Answer to each body.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
        self.answers: list[Answer] = []


class Intake:
    """Takes requests in.

    Args:
        name: Name of the cluster, for the log.
        folder: Folder of the sample log.
        most_bytes: Largest body, decompressed.
        kept: Samples older than this are left out.
        table: The vocabulary.
        pods: Tells nodes and jobs behind labels of pods; None: they are passed over.
        clock: Gives the time, seconds since the epoch.
        replica_labels: Labels that tell apart senders that scrape the same exporters.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        most_bytes: int,
        kept: timedelta,
        table: MetricTable = DEFAULT,
        pods: PodNames | None = None,
        clock: Callable[[], float] = time.time,
        replica_labels: Sequence[str] = REPLICA_LABELS,
    ) -> None:
        self.name, self.most_bytes = name, most_bytes
        self.lock = threading.Lock()  # series and newest change under it
        self.state = read_state(folder) or IntakeState()
        self.state.counts = dict.fromkeys(
            ("requests", "put_off", "samples", "late", "ended", "useless", "absurd_time", "too_old", "refused"), 0
        )
        self._folder, self._kept_ms, self._clock = folder, int(kept.total_seconds() * 1000), clock
        self._log, self._table, self._replica_labels = SampleLog(folder), table, replica_labels
        self._started_ms = self._now_ms()
        self.progress = Progress(self.state, self._started_ms)
        self._written_s = -_STATE_EVERY_S
        self.epoch = max([self._started_ms - 1, *self._log.epochs()]) + 1
        self._pods, self._version = pods, pods.version if pods else 0
        self.series, self.newest = Series(self._table, pods, replica_labels), Newest()
        self._renew_from = _LEAST_RENEWED
        self._queue: queue.Queue[tuple[str, bytes, Future[Answer]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=f"remote-write-{name}", daemon=True)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    # --- the thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to take bodies that are submitted."""
        self._thread.start()

    def is_running(self) -> bool:
        """Bodies that are submitted are answered."""
        return self._thread.is_alive()

    def submit(self, sender: str, body: bytes) -> Future[Answer]:
        """Hand over a body; the answer comes when its samples are on the disk, or it is refused."""
        answer: Future[Answer] = Future()
        self._queue.put((sender, body, answer))
        return answer

    def put_off(self) -> None:
        """Count a request that was turned away for want of room; its sender sends it again."""
        self.state.counts["put_off"] += 1

    def close(self) -> None:
        """Take in what was submitted, then stop."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(10)
        self._log.close()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            items = [self._queue.get()]
            while items[-1] is not None and len(items) < _BATCH_BODIES:
                try:
                    items.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            is_last = items[-1] is None
            bodies = [item for item in items if item is not None]
            del items
            if bodies:
                answers = self.take([(sender, body) for sender, body, _ in bodies])
                for (_, _, future), answer in zip(bodies, answers, strict=True):
                    if future.set_running_or_notify_cancel():
                        future.set_result(answer)
            del bodies  # while it waits for the next, nothing is held

    # --- one batch ------------------------------------------------------------------------------------------

    def take(self, bodies: Sequence[tuple[str, bytes]]) -> list[Answer]:
        """Take bodies in, all of them with one sync; they are on the disk when this returns.

        Args:
            bodies: Address of the sender and body of each.

        Returns:
            The answer to each.
        """
        batch = Batch()
        self._renew()
        for sender, body in bodies:
            batch.answers.append(self._decode(sender, body, batch))
        try:
            return self._commit(batch)
        except Exception as error:  # senders try again
            log.exception("%s: %d requests could not be taken", self.name, len(bodies))
            return [(500, f"{type(error).__name__}: {error}")] * len(bodies)

    def _decode(self, sender: str, body: bytes, batch: Batch) -> Answer:
        counts = self.state.counts
        counts["requests"] += 1
        try:
            entries = split(decompress(body, self.most_bytes))
            with self.lock:
                number, ts_ms, values, useless = self.series.take(entries)
        except TooLargeError as error:
            counts["refused"] += 1
            return 413, str(error)
        except WireError as error:
            counts["refused"] += 1
            log.warning("%s: a request of %s is refused: %s", self.name, sender, error)
            return 400, str(error)
        except MemoryError:
            return 503, "no memory for this request at present"
        except Exception as error:  # one request must not stop the others
            log.exception("%s: a request of %s could not be taken", self.name, sender)
            return 500, f"{type(error).__name__}: {error}"
        counts["useless"] += useless
        now_ms = self._now_ms()
        is_absurd = (ts_ms < FIRST_MS) | (ts_ms > now_ms + AHEAD_MS)
        is_old = ~is_absurd & (ts_ms < now_ms - self._kept_ms)
        if (is_left_out := is_absurd | is_old).any():
            counts["absurd_time"] += int(is_absurd.sum())
            counts["too_old"] += int(is_old.sum())
            number, ts_ms, values = number[~is_left_out], ts_ms[~is_left_out], values[~is_left_out]
        batch.parts.append((sender, number, ts_ms, values))
        return OK

    def _renew(self) -> None:
        """Forget all series when their epoch is old, most of them have ended, or their nodes are others than known."""
        size = len(self.series)
        if self._pods is not None and self._pods.version != self._version:
            self._version = self._pods.version
            self._begin()
            return
        if self._now_ms() - self.epoch < _EPOCH_MS and size < self._renew_from:
            return
        if self._now_ms() - self.epoch < _EPOCH_MS and size < 4 * self.newest.alive():
            self._renew_from = size * 5 // 4  # counting costs: not at every request
            return
        self._begin()

    def _begin(self) -> None:
        with self.lock:
            self.series, self.newest = Series(self._table, self._pods, self._replica_labels), Newest()
            self._renew_from = _LEAST_RENEWED
            self.epoch = max(self._now_ms(), self.epoch + 1)

    def _commit(self, batch: Batch) -> list[Answer]:
        """Write a batch to the disk, then let it count."""
        new = list(self.series.take_new())
        try:
            self._append(batch, new)
        except OSError as error:
            self.series.new = new + self.series.new
            log.warning("%s: %s cannot be written: %s: senders will send again", self.name, self._folder, error)
            full = (503, f"the spool cannot be written: {error.strerror or error}")
            return [full if answer is OK else answer for answer in batch.answers]
        with self.lock:
            for sender, number, ts_ms, values in batch.parts:
                self._count(sender, number, ts_ms, values)
        if time.monotonic() - self._written_s >= _STATE_EVERY_S:
            self._write_state()
        return batch.answers

    def _append(self, batch: Batch, new: list[tuple[int, bytes]]) -> None:
        if not batch.parts and not new:
            return
        nothing = ("", np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        parts = batch.parts or [nothing]
        number, ts_ms, values = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
        keep = values.view(np.uint64) != STALE_BITS
        if not keep.all():
            number, ts_ms, values = number[keep], ts_ms[keep], values[keep]
        self._log.append(Chunk(self.epoch, number, ts_ms, values), new)

    def _count(self, address: str, number: np.ndarray, ts_ms: np.ndarray, values: np.ndarray) -> None:
        counts, now_ms = self.state.counts, self._now_ms()
        sender = self.progress.hear(address, now_ms)
        if not len(number):
            return
        ended = int((values.view(np.uint64) == STALE_BITS).sum())
        counts["ended"] += ended
        counts["samples"] += len(number) - ended
        self.state.newest_ms = max(self.state.newest_ms or 0, int(ts_ms.max()))
        counts["late"] += self.newest.put(number, ts_ms, values, sender, now_ms)

    def _write_state(self) -> None:
        self._written_s = time.monotonic()
        self.state.at_ms, self.state.series = self._now_ms(), len(self.series)
        self.progress.update(self.newest, self.series, self.state.at_ms)
        try:
            write_state(self._folder, self.state)
        except OSError as error:  # an old state makes ingest wait, no more
            log.warning("%s: the state in %s cannot be written: %s", self.name, self._folder, error)

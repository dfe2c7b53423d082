"""Samples that a Prometheus sends by itself (remote-write), so that a tick costs no query.

The process that ticks calls `latest`, which starts the receiver; what arrives is kept as newest samples and written to
the sample log before it is acknowledged. `fetch` reads that log in whatever process, and listens nowhere. The wire, the
series, the intake, the log, the HTTP receiver, its keeper and what `doctor` is told each have a module.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from features.metrics import DEFAULT, MetricTable
from pipelines.sources import Fetched, Finding, gpu_frame, node_frame
from pipelines.sources.kubernetes_names import PodNames
from pipelines.sources.remote_write_address import Address
from pipelines.sources.remote_write_intake import Intake
from pipelines.sources.remote_write_keeper import Keeper
from pipelines.sources.remote_write_log import LogReader
from pipelines.sources.remote_write_progress import read_state
from pipelines.sources.series import REPLICA_LABELS
from pipelines.sources.spool import Spool
from pipelines.sources.wide import to_frames
from pipelines.words import counted

_MIB = 1 << 20
_KEPT = timedelta(days=2)  # when nobody ingests: the disk must not fill
_PRUNE_S = 3600.0
_SILENT_S = 60.0


class RemoteWriteSource:
    """Samples of one cluster that are sent to us.

    Args:
        name: Name of the cluster.
        spool: Folder of the sample log.
        host: Address to listen on.
        port: Port; 0 takes a free one, which `port` then gives.
        token_file: File with the bearer token of senders; needed on any address but loopback.
        cert_file: PEM of the receiver's certificate; empty: plain http.
        key_file: PEM of its key; empty: it stands in `cert_file`.
        max_body_mib: Largest request, decompressed, MiB.
        exporter_interval_s: Interval of scrapes, s.
        tick_s: How often `latest` is called, s.
        table: The vocabulary.
        pods: Makes what tells nodes and jobs behind labels of pods; None: they are passed over.
        replica_labels: Labels that tell apart senders that scrape the same exporters: one of them is used.
    """

    def __init__(
        self,
        name: str,
        spool: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 8704,
        token_file: str = "",
        cert_file: str = "",
        key_file: str = "",
        max_body_mib: float = 32,
        exporter_interval_s: float = 15,
        tick_s: float = 15,
        table: MetricTable = DEFAULT,
        pods: Callable[[], PodNames] | None = None,
        replica_labels: Sequence[str] = REPLICA_LABELS,
    ) -> None:
        self.name, self.host, self.port = name, host, port
        self.folder = spool
        self._interval_s, self._tick_s = exporter_interval_s, tick_s
        self._table = table
        # One for what comes in and one for the log: they are asked at once.
        self._pods, logged = (pods(), pods()) if pods is not None else (None, None)
        self._logged = logged
        self._lock = threading.Lock()
        most_bytes = round(max_body_mib * _MIB)
        self._keeper = Keeper(
            Address(name, host, port, token_file, cert_file, key_file),
            spool,
            lambda: Intake(name, spool, most_bytes, _KEPT, table, self._pods, replica_labels=replica_labels),
            most_bytes=most_bytes,
            period_s=tick_s,
        )
        self._pruned_s = 0.0
        self._put_off = 0
        self._reader = LogReader(name, spool, table, logged, replica_labels, exporter_interval_s)

    @property
    def watermark_lag_s(self) -> float:
        """How far behind the present the senders are, s: ingest waits for what they will send again after an outage."""
        state = read_state(self.folder)
        if state is None or state.complete_ms is None:
            return self._tick_s
        return max(self._tick_s, time.time() - state.complete_ms / 1000)

    @property
    def waits_for(self) -> str:
        """Why ingest stays behind the present, in words; empty: it does not."""
        state = read_state(self.folder)
        complete_ms = None if state is None else state.complete_ms
        ask = f"does the nowcast run, and does Prometheus send to {self.host}:{self.port}?"
        if complete_ms is None:
            return f"nothing has been received yet: {ask}"
        if time.time() - complete_ms / 1000 <= 8 * max(self._interval_s, self._tick_s):
            return ""
        return (
            f"what was received is whole up to {datetime.fromtimestamp(complete_ms / 1000, UTC):%H:%M:%S} only: {ask}"
        )

    # --- what ticks -----------------------------------------------------------------------------------------

    def latest(self) -> Fetched:
        """The newest sample of each GPU and node that arrived; the first call starts the receiver.

        Raises:
            SourceError: It cannot listen, or the token cannot be read.
        """
        with self._lock:
            trouble = [] if self._pods is None else self._pods.refreshed()
            intake = self._listening()
        now_s = time.time()
        with intake.lock:
            series = intake.series
            series.settle()
            samples = intake.newest.samples(series, round(now_s * 1000), self._interval_s * 1000)
            counts, newest_ms = dict(intake.state.counts), intake.state.newest_ms
            heard_ms = max((sender.heard_ms for sender in intake.state.senders.values()), default=None)
        frames = to_frames(samples, series.index, self.name)
        if self._pods is not None:
            frames = frames._replace(gpu=self._pods.with_jobs(frames.gpu))
        self._prune()
        keys = ["cluster", "node", "gpu_uuid", "mig_instance"]
        return Fetched(
            gpu_frame(_laid_over(frames.gpu, frames.gpu_group, keys)),
            node_frame(_laid_over(frames.node, frames.node_group, keys[:2])),
            [*trouble, *(f"{self.name}: {text}" for text in self._warnings(counts, newest_ms, heard_ms, now_s))],
            frames.health,
            frames.link,
            frames.port,
        )

    def listen(self) -> int:
        """Start the receiver unless it runs already; the port it listens on.

        Raises:
            SourceError: As for `latest`.
        """
        with self._lock:
            self._listening()
        return self.port

    def _listening(self) -> Intake:
        was_listening = self._keeper.is_listening
        intake = self._keeper.intake()
        self.port = self._keeper.port
        if not was_listening:
            atexit.unregister(self.close)
            atexit.register(self.close)  # what was received is answered, however the process comes to its end
        return intake

    @property
    def receiver_problem(self) -> str | None:
        """Why no samples are received, or what of a renewed token or certificate could not be taken up, in words."""
        return self._keeper.problem

    @property
    def received(self) -> dict[str, int]:
        """Requests and samples since the start, by what became of them; empty before the first `latest`."""
        return self._keeper.counts

    def _warnings(
        self, counts: dict[str, int], newest_ms: int | None, heard_ms: int | None, now_s: float
    ) -> Iterator[str]:
        waited_s = now_s - max(self._keeper.started_s, (heard_ms or 0) / 1000)
        if self.receiver_problem:
            yield self.receiver_problem
        if waited_s > max(_SILENT_S, 4 * self._interval_s):
            where = f"{self.host}:{self.port}"
            yield f"nothing has arrived on {where} for {waited_s:.0f} s: does Prometheus's remote_write name it?"
        elif newest_ms is not None and now_s - newest_ms / 1000 > 8 * self._interval_s:
            age_s = now_s - newest_ms / 1000
            yield f"the newest sample is {age_s:.0f} s old: the sender catches up, or its clock is wrong"
        if counts["absurd_time"]:
            many = counted(counts["absurd_time"], "sample")
            yield f"{many} with an impossible time left out: is an exporter's clock wrong?"
        if counts["too_old"]:
            yield f"{counted(counts['too_old'], 'sample')} older than {_KEPT.days} days left out"
        if (put_off := counts["put_off"] - self._put_off) > 0:
            many = counted(put_off, "request")
            yield f"{many} put off since the last look: samples come faster than they are taken; senders send again"
        self._put_off = counts["put_off"]
        if counts["refused"]:
            many = counted(counts["refused"], "request")
            yield f"{many} could not be read: the log of the nowcast names the sender"

    def _prune(self) -> None:
        if time.monotonic() - self._pruned_s > _PRUNE_S:
            self._pruned_s = time.monotonic()
            Spool(self.folder).prune(datetime.now(UTC) - _KEPT)

    # --- history --------------------------------------------------------------------------------------------

    def fetch(self, start: datetime, end: datetime) -> Fetched:
        """What arrived with start ≤ ts < end, from the log. A sample that was sent twice is there once."""
        return self._reader.fetch(start, end)

    # --- for operators --------------------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        """Whether the receiver listens, whether something arrives, from whom, how late, and how to send."""
        from pipelines.sources.remote_write_check import findings

        return findings(self._keeper.address, self.folder, self._interval_s, self._table, self.fetch)

    def close(self) -> None:
        """Answer what has come, stop listening, close the log."""
        with self._lock:
            self._keeper.close()
            for pods in (self._pods, self._logged):
                if pods is not None:
                    pods.close()
            atexit.unregister(self.close)


def _laid_over(frame: pl.DataFrame, group: pl.Series, key: list[str]) -> pl.DataFrame:
    """One row a key: rows of several scrape jobs laid over each other, with the newest of their times."""
    if frame.is_empty() or not frame.select(pl.struct(key).is_duplicated().any()).item():
        return frame
    rows = frame.with_columns(group.alias("_group")).sort("ts", "_group")
    return rows.group_by(key, maintain_order=True).agg(
        pl.col("ts").max(), pl.exclude([*key, "ts", "_group"]).drop_nulls().last()
    )

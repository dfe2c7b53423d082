"""Samples that a Prometheus sends by itself (remote-write), so that a tick costs no query.

The process that ticks calls `latest`, which starts the receiver; what arrives is kept as newest samples and written to
the sample log before it is acknowledged. `fetch` reads that log in whatever process, and listens nowhere. The wire, the
series, the intake, the log and the HTTP receiver each have a module.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from features.metrics import DEFAULT, MetricTable
from pipelines.sources import Fetched, Finding, SourceError, gpu_frame, node_frame
from pipelines.sources.prometheus import metric_gaps
from pipelines.sources.remote_write_intake import Intake
from pipelines.sources.remote_write_log import LogReader
from pipelines.sources.remote_write_progress import IntakeState, read_state
from pipelines.sources.spool import Spool
from pipelines.sources.wide import to_frames
from scheduler_hints.tokens import is_loopback

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
        max_body_mib: Largest request, decompressed, MiB.
        exporter_interval_s: Interval of scrapes, s.
        tick_s: How often `latest` is called, s.
        table: The vocabulary.
    """

    def __init__(
        self,
        name: str,
        spool: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 8704,
        token_file: str = "",
        max_body_mib: float = 32,
        exporter_interval_s: float = 15,
        tick_s: float = 15,
        table: MetricTable = DEFAULT,
    ) -> None:
        self.name, self.host, self.port = name, host, port
        self.folder = spool
        self._token_file, self._most_bytes = token_file, round(max_body_mib * _MIB)
        self._interval_s, self._tick_s = exporter_interval_s, tick_s
        self._table = table
        self._lock = threading.Lock()
        self._intake: Intake | None = None
        self._receiver = None
        self._pruned_s = self._started_s = 0.0
        self._reader = LogReader(name, spool, table)

    @property
    def watermark_lag_s(self) -> float:
        """How far behind the present the senders are, s: ingest waits for what they will send again after an outage."""
        state = read_state(self.folder)
        if state is None or state.complete_ms is None:
            return self._tick_s
        return max(self._tick_s, time.time() - state.complete_ms / 1000)

    # --- what ticks -----------------------------------------------------------------------------------------

    def latest(self) -> Fetched:
        """The newest sample of each GPU and node that arrived; the first call starts the receiver.

        Raises:
            SourceError: It cannot listen, or the token cannot be read.
        """
        with self._lock:
            intake = self._listening()
        now_s = time.time()
        with intake.lock:
            series = intake.series
            series.settle()
            samples = intake.newest.samples(series, round(now_s * 1000), self._interval_s * 1000)
            counts, newest_ms = dict(intake.state.counts), intake.state.newest_ms
            heard_ms = max((sender.heard_ms for sender in intake.state.senders.values()), default=None)
        frames = to_frames(samples, series.index, self.name)
        self._prune()
        keys = ["cluster", "node", "gpu_uuid", "mig_instance"]
        return Fetched(
            gpu_frame(_laid_over(frames.gpu, frames.gpu_group, keys)),
            node_frame(_laid_over(frames.node, frames.node_group, keys[:2])),
            [f"{self.name}: {text}" for text in self._warnings(counts, newest_ms, heard_ms, now_s)],
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
        from pipelines.sources.remote_write_server import Receiver, ServerError

        if self._receiver is not None and not self._receiver.is_running():
            self._stop()
        if self._intake is None:
            token = read_token(self.name, self.host, self._token_file)
            intake = Intake(self.name, self.folder, self._most_bytes, _KEPT, self._table)
            try:
                self._receiver = Receiver(self.host, self.port, intake.submit, token=token, most_bytes=self._most_bytes)
            except ServerError as error:
                raise SourceError(
                    f"{self.name}: remote-write: {error}: set clusters.{self.name}.remote_write_port"
                ) from None
            intake.start()
            self.port, self._intake, self._started_s = self._receiver.port, intake, time.time()
            atexit.register(self.close)  # what was received is answered, however the process comes to its end
        return self._intake

    def _warnings(
        self, counts: dict[str, int], newest_ms: int | None, heard_ms: int | None, now_s: float
    ) -> Iterator[str]:
        waited_s = now_s - max(self._started_s, (heard_ms or 0) / 1000)
        if waited_s > max(_SILENT_S, 4 * self._interval_s):
            where = f"{self.host}:{self.port}"
            yield f"nothing has arrived on {where} for {waited_s:.0f} s: does Prometheus's remote_write name it?"
        elif newest_ms is not None and now_s - newest_ms / 1000 > 8 * self._interval_s:
            age_s = now_s - newest_ms / 1000
            yield f"the newest sample is {age_s:.0f} s old: the sender catches up, or its clock is wrong"
        if counts["absurd_time"]:
            yield f"{counts['absurd_time']} samples with an impossible time are left out: is an exporter's clock wrong?"
        if counts["too_old"]:
            yield f"{counts['too_old']} samples are over {_KEPT.days} days old and are left out"
        if counts["refused"]:
            yield f"{counts['refused']} requests could not be read and were refused; the log names their sender"

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
        """Whether something arrives, from whom, how late, and how to configure the sender."""
        findings: list[Finding] = []
        try:
            read_token(self.name, self.host, self._token_file)
        except SourceError as error:
            findings.append(("token", False, str(error)))
        state, now_s = read_state(self.folder), time.time()
        if state is None or not state.senders:
            text = "nothing has arrived yet: start the nowcast, and put this into prometheus.yml:\n"
            return [*findings, ("reachable", False, text + self.sender_config())]
        heard_s = now_s - max(sender.heard_ms for sender in state.senders.values()) / 1000
        is_heard = heard_s <= max(_SILENT_S, 4 * self._interval_s)
        senders = (
            f"{len(state.senders)} sender{'s' if len(state.senders) > 1 else ''} ({', '.join(list(state.senders)[:5])})"
        )
        hint = "" if is_heard else f": is the nowcast up, and does prometheus.yml hold this?\n{self.sender_config()}"
        findings.append(("reachable", is_heard, f"{senders}, {state.series} series, heard {heard_s:.0f} s ago{hint}"))
        findings += self._lag(state, now_s)
        for key, text in (
            ("absurd_time", "samples with an impossible time: check the exporters' clocks"),
            ("too_old", "samples too old to be kept"),
            ("refused", "requests that could not be read"),
        ):
            if state.counts.get(key):
                findings.append((key, False, f"{state.counts[key]} {text}"))
        return [*findings, *self._metrics()]

    def _lag(self, state: IntakeState, now_s: float) -> Iterator[Finding]:
        if state.complete_ms is None:
            return
        lag_s, limit_s = now_s - state.complete_ms / 1000, 4 * self._interval_s + _SILENT_S
        hint = (
            ""
            if lag_s <= limit_s
            else ": the sender catches up after an outage, or is too slow: raise max_samples_per_send and max_shards"
        )
        yield ("fresh", lag_s <= limit_s, f"everything has arrived up to {lag_s:.0f} s ago{hint}")

    def _metrics(self) -> Iterator[Finding]:
        now = datetime.now(UTC)
        gpu = self.fetch(now - timedelta(seconds=max(120.0, 4 * self._interval_s)), now + timedelta(seconds=5)).gpu
        columns = {name for name in gpu.columns if gpu[name].null_count() < len(gpu)}
        gpus = gpu["gpu_uuid"].n_unique() if len(gpu) else 0
        lacking = (
            ""
            if gpus
            else f": none of {len(self._table.by_name)} known metrics came lately; do write_relabel_configs drop them?"
        )
        yield ("metrics", gpus > 0, f"{gpus} GPUs{lacking}")
        if gpus:
            yield from metric_gaps(columns)

    def sender_config(self) -> str:
        """The block of prometheus.yml that sends to this receiver."""
        from pipelines.sources.remote_write_server import PATH

        host = "THIS_HOST" if self.host in ("0.0.0.0", "::") else f"[{self.host}]" if ":" in self.host else self.host
        token = "    authorization: {credentials_file: FILE_WITH_THE_SAME_TOKEN}\n" if self._token_file else ""
        return (
            "remote_write:\n"
            f"  - url: http://{host}:{self.port}{PATH}\n{token}"
            "    queue_config: {max_samples_per_send: 5000, capacity: 20000, batch_send_deadline: 2s}\n"
            "    # Only what is read here:\n"
            "    write_relabel_configs:\n"
            f"      - {{source_labels: [__name__], regex: '{_wanted_names(self._table)}', action: keep}}\n"
        )

    def _stop(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._intake is not None:
            self._intake.close()
        self._receiver = self._intake = None
        atexit.unregister(self.close)

    def close(self) -> None:
        """Answer what has come, stop listening, close the log."""
        with self._lock:
            self._stop()


def read_token(name: str, host: str, token_file: str) -> str:
    """The bearer token of senders; empty when none is asked for.

    Raises:
        SourceError: It cannot be read, is empty, or is needed and not given.
    """
    setting = f"clusters.{name}.remote_write_token_file"
    if not token_file:
        if not is_loopback(host):
            raise SourceError(f"{name}: set {setting}: who listens on {host} must ask senders for a token")
        return ""
    try:
        token = Path(token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name}: {setting} {token_file} cannot be read: {error}") from None
    if not token:
        raise SourceError(f"{name}: {setting} {token_file} is empty")
    return token


def _wanted_names(table: MetricTable) -> str:
    """Regular expression of the beginnings of all metrics that are read, and `up`."""
    beginnings = set()
    for name in table.variants:
        first, second = [*name.split("_"), ""][:2]
        beginnings.add(f"{first}_{second}" if first == "node" else first)
    return "|".join(["up", *(f"{one}_.*" for one in sorted(beginnings))])


def _laid_over(frame: pl.DataFrame, group: pl.Series, key: list[str]) -> pl.DataFrame:
    """One row a key: rows of several scrape jobs laid over each other, with the newest of their times."""
    if frame.is_empty() or not frame.select(pl.struct(key).is_duplicated().any()).item():
        return frame
    rows = frame.with_columns(group.alias("_group")).sort("ts", "_group")
    return rows.group_by(key, maintain_order=True).agg(
        pl.col("ts").max(), pl.exclude([*key, "ts", "_group"]).drop_nulls().last()
    )

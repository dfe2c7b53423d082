"""Samples straight from exporters' `/metrics`, for a small cluster without Prometheus and for the demo.

`latest` reads every target at once and keeps what it read in the spool, from which `fetch` answers: exporters have no
history. One dead, slow or odd target is a warning and a node that is not up; it holds nobody else up. Requests stand in
`pages.py`, parsing in `exposition.py`, files in `spool.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import polars as pl

from features.metrics import DEFAULT, MetricTable, node_name, short_host
from features.vocabulary import BOARD_FACTS, NODE_QUANTITIES, conform
from pipelines.sources import Fetched, Finding, SourceError, empty_frame, gpu_frame, node_frame
from pipelines.sources.exposition import ExpositionError, Page, parse_page
from pipelines.sources.kubernetes_names import PodNames
from pipelines.sources.metric_findings import metric_gaps, told_columns
from pipelines.sources.pages import Answer, PageReader
from pipelines.sources.series import boards_at
from pipelines.sources.spool import Spool
from pipelines.sources.wide import Frames, Index, Samples, drop_absurd_times, to_frames
from pipelines.words import counted, without_name

_OTHERS = {"health": "core_gpu_health", "link": "core_link_samples", "port": "raw_port_samples"}
_BOARDS = "boards"  # kind in the spool
_BOARDS_AGAIN = timedelta(minutes=2)  # what is told of boards stands in the spool once a minute, and when it changes
_SD_PREFIX = "sd+"
_SD_PERIOD_S = 30.0
_TICK_SHARE = 0.4  # of a tick that a reading may take; the rest is for what is made of it
_LEAST_READING_S = 0.25
_MAX_DEAD_RATIO = 0.25  # more targets than this are not down by themselves
_SPOOL_KEPT = timedelta(days=2)  # when nobody ingests: the disk must not fill
_ACCEPT_SD = {"Accept": "application/json"}
_ACCEPT = {"Accept": "text/plain;version=0.0.4;q=1,*/*;q=0.1"}


@dataclass(frozen=True, slots=True)
class Target:
    """One page to read; `node` is empty until labels or the page told it."""

    url: str
    node: str


class ScrapeSource:
    """Samples of one cluster from its exporters.

    Args:
        name: Name of the cluster.
        targets: URLs of pages, or one http_sd URL with `sd+` before it.
        spool: Folder of the spool.
        timeout_s: Time-out of one page, s.
        tick_s: How often `latest` is called, s. The whole reading takes at most 0.4 of it, and at most `timeout_s`.
        clock: Gives the time, UTC.
        table: The vocabulary.
        pods: Tells nodes and jobs behind labels of pods; None: they are passed over.
    """

    is_asked = True  # every answer of it costs questions

    def __init__(
        self,
        name: str,
        targets: Sequence[str],
        spool: Path,
        *,
        timeout_s: float = 10,
        tick_s: float = 15,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        table: MetricTable = DEFAULT,
        pods: PodNames | None = None,
    ) -> None:
        if not targets:
            raise SourceError(f"{name}: set clusters.{name}.scrape_targets: URLs of /metrics pages, or sd+URL")
        for url in targets:
            if not _is_http(url.removeprefix(_SD_PREFIX)):
                raise SourceError(f"{name}: scrape_targets: {url!r} is no http(s) URL")
        self.name = name
        self.watermark_lag_s = tick_s
        self.spool = Spool(spool)
        self._static = [Target(url, "") for url in targets if not url.startswith(_SD_PREFIX)]
        self._sd_urls = [url.removeprefix(_SD_PREFIX) for url in targets if url.startswith(_SD_PREFIX)]
        self._found: dict[str, list[Target]] = {}
        self._sd_read_s = -_SD_PERIOD_S
        self._learned: dict[str, str] = {}  # URL → node, as its page told
        self._pods, self._version = pods, 0
        self._index = Index(table, pods)
        self._clock = clock
        self._told: tuple[datetime, pl.DataFrame] | None = None  # minute and boards that the spool holds
        self._pruned = datetime.min.replace(tzinfo=UTC)
        self._pages = PageReader(name, timeout_s, clock)
        self._reading_s = min(timeout_s, max(_TICK_SHARE * tick_s, _LEAST_READING_S))
        self._lock = threading.Lock()  # the caches serve one reading at a time

    def fetch(self, start: datetime, end: datetime) -> Fetched:
        """What `latest` read in [start, end), from the spool."""
        if self._pods is not None:
            with self._lock:
                self._pods.read(start, end)
        gpu, warnings = self.spool.read("gpu", start, end)
        node, more = self.spool.read("node", start, end)
        warnings += more
        others: dict[str, pl.DataFrame] = {}
        for kind, table in _OTHERS.items():
            frame, more = self.spool.read(kind, start, end)
            others[kind] = empty_frame(table) if frame is None else conform(frame, table)
            warnings += more
        gpu = self._with_jobs(gpu_frame(gpu))
        told, more = self.spool.read(_BOARDS, start - _BOARDS_AGAIN, end)
        if told is not None and len(gpu):
            board = ["node", "gpu_uuid"]
            newest = told.sort("ts").unique(board, keep="last").select(*board, *BOARD_FACTS)
            others["boards"] = boards_at(gpu, newest)
        warnings = [f"{self.name}: {text}" for text in [*warnings, *more]]
        return Fetched(gpu, node_frame(node), warnings, **others)

    def latest(self) -> Fetched:
        """Read every target now and keep the samples in the spool.

        Raises:
            SourceError: No list of targets could be had.
        """
        with self._lock:
            return self._latest()

    def _latest(self) -> Fetched:
        until_s = time.monotonic() + self._reading_s
        targets, warnings = self._targets(until_s)
        if self._pods is not None:
            warnings += [f"{self.name}: {text}" for text in self._pods.refreshed()]
            if self._pods.version != self._version:
                self._version = self._pods.version
                self._index.forget()
                self._learned.clear()
        at = self._clock()
        fetched = self._read(targets, at, warnings, until_s)
        try:
            for kind in ("gpu", "node", *_OTHERS):
                frame: pl.DataFrame = getattr(fetched, kind)
                if len(frame):
                    self.spool.append(kind, frame, at)
            self._tell_boards(fetched.boards, at)
            if at - self._pruned > timedelta(hours=1):
                self.spool.prune(at - _SPOOL_KEPT)
                self._pruned = at
        except OSError as error:
            fetched.warnings.append(f"{self.name}: spool {self.spool.folder} cannot be written: {error}: free the disk")
        return replace(fetched, gpu=self._with_jobs(fetched.gpu))

    def _with_jobs(self, gpu: pl.DataFrame) -> pl.DataFrame:
        # The spool keeps which pod it was: by the time that it is read more is known of its job.
        return gpu if self._pods is None else self._pods.with_jobs(gpu)

    def _tell_boards(self, boards: pl.DataFrame, at: datetime) -> None:
        minute, facts = at.replace(second=0, microsecond=0), boards.drop("ts")
        if len(boards) and (self._told is None or self._told[0] != minute or not self._told[1].equals(facts)):
            self.spool.append(_BOARDS, boards, at)
            self._told = minute, facts

    def prune(self, before: datetime) -> int:
        """Remove spooled minutes that ended before that time; returns how many files."""
        return self.spool.prune(before)

    def _read(self, targets: list[Target], at: datetime, warnings: list[str], until_s: float) -> Fetched:
        self._index.prune(len(targets) * len(self._index.table.names["gpu"]) * 8)
        answers = self._pages.read([target.url for target in targets], until_s - time.monotonic(), _ACCEPT)
        pages: list[tuple[Target, Page, int]] = []
        troubles: dict[Target, str] = {}
        for target in targets:
            answer = answers[target.url]
            page, trouble = self._parse(target, answer)
            if page is not None:
                pages.append((target, page, answer.asked_ms))
            else:
                troubles[target] = trouble
        try:
            frames, odd = self._frames(pages, at)
        except (Exception, pl.exceptions.PanicException):
            pages = [page for page in pages if self._has_frames(page, at, troubles)]
            frames, odd = self._frames(pages, at)
        up: dict[str, bool] = {}
        for target in targets:
            node = target.node or self._learned.get(target.url, "") or _host(target.url)
            up[node] = up.get(node, False) or target not in troubles
            if target in troubles:
                warnings.append(f"{self.name}: {troubles[target]}")
        warnings += [f"{self.name}: {text}" for text in odd]
        node = _with_up(frames.node, up, at, self.name)
        boards = self._index.boards(frames.gpu)
        return Fetched(frames.gpu, node, warnings, frames.health, frames.link, frames.port, boards=boards)

    def _parse(self, target: Target, answer: Answer) -> tuple[Page | None, str]:
        if answer.text is None:
            return None, answer.trouble
        try:
            page = parse_page(answer.text, self._index, target.node, target.url)
        except ExpositionError as error:
            return None, f"{target.url} is no metrics page: {error}"
        except Exception as error:
            return None, f"{target.url} cannot be understood: {error!r}"
        if not target.node and page.entities:
            self._learned[target.url] = self._index.entities[page.entities[0]].node
        return page, ""

    def _frames(self, pages: Sequence[tuple[Target, Page, int]], at: datetime) -> tuple[Frames, list[str]]:
        names: list[int] = []
        entities: list[int] = []
        times: list[int] = []
        values: list[float] = []
        for _, page, asked_ms in pages:
            names += page.names
            entities += page.entities
            values += page.values
            times += [asked_ms if ts is None else ts for ts in page.ts_ms]
        flat = Samples(
            np.array(names, np.int64),
            np.array(entities, np.int64),
            np.ones(len(names), np.int64),
            np.array(times, np.int64),
            np.array(values, np.float64),
        )
        flat, odd = drop_absurd_times(flat, self._index, at)
        return to_frames(flat, self._index, self.name), odd

    def _has_frames(self, page: tuple[Target, Page, int], at: datetime, troubles: dict[Target, str]) -> bool:
        try:
            self._frames([page], at)
        except (Exception, pl.exceptions.PanicException) as error:
            troubles[page[0]] = f"{page[0].url} holds samples that cannot be used: {error!r}"
            return False
        return True

    def _targets(self, until_s: float) -> tuple[list[Target], list[str]]:
        warnings: list[str] = []
        now = time.monotonic()
        if self._sd_urls and now - self._sd_read_s >= _SD_PERIOD_S:
            # A list that is late leaves time to read the targets it gave before.
            known = all(url in self._found for url in self._sd_urls)
            answers = self._pages.read(self._sd_urls, (until_s - now) / (2 if known else 1), _ACCEPT_SD)
            for url in self._sd_urls:
                try:
                    self._found[url] = self._discovered(url, answers[url])
                except SourceError as error:
                    if url not in self._found:
                        raise
                    warnings.append(f"{error}; the targets it gave before are read")
                else:
                    self._sd_read_s = now
        targets = [*self._static, *(target for found in self._found.values() for target in found)]
        if not targets:
            raise SourceError(f"{self.name}: {', '.join(self._sd_urls)} lists no targets")
        return targets, warnings

    def _discovered(self, url: str, answer: Answer) -> list[Target]:
        where = f"{self.name}: service discovery"
        if answer.text is None:
            raise SourceError(f"{where} {answer.trouble}")
        try:
            groups: Any = msgspec.json.decode(answer.text)
            found = []
            for group in groups:
                labels = {str(k): str(v) for k, v in (group.get("labels") or {}).items()}
                scheme, path = labels.get("__scheme__", "http"), labels.get("__metrics_path__", "/metrics")
                node = node_name({k: v for k, v in labels.items() if k != "instance"})
                found += [Target(f"{scheme}://{host}{path}", node) for host in group["targets"]]
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise SourceError(f"{where} {url} is no http_sd list ([{{targets, labels}}]): {error!r}") from error
        return found

    def check(self) -> list[Finding]:
        """Targets that answer, and the quantities they give. Nothing goes into the spool."""
        with self._lock:
            until_s = time.monotonic() + self._reading_s
            try:
                targets, warnings = self._targets(until_s)
            except SourceError as error:
                return [("reachable", False, str(error))]
            fetched = self._read(targets, self._clock(), warnings, until_s)
        dead = len(fetched.warnings)
        said = [without_name(self.name, warning) for warning in fetched.warnings[:3]]
        texts = [f"{len(targets) - dead} of {counted(len(targets), 'target')} answer", *said]
        if dead > len(said):
            texts.append(f"and {dead - len(said)} more")
        # Of a large cluster some nodes are always down.
        is_well = None if 0 < dead <= _MAX_DEAD_RATIO * len(targets) else not dead
        if is_well is None:
            texts.append(
                "nodes that do not answer count as down: take those that are gone for good out of scrape_targets"
            )
        elif dead:
            texts.append("are the exporters running, and are scrape_targets right?")
        findings: list[Finding] = [("reachable", is_well, "; ".join(texts))]
        gpus = fetched.gpu["gpu_uuid"].n_unique()
        lacking = (
            ""
            if gpus
            else f": none of {len(self._index.table.by_name)} known metrics is on these pages; are they GPU exporters?"
        )
        findings.append(("metrics", gpus > 0, f"{counted(gpus, 'GPU')}{lacking}"))
        if gpus:
            findings += metric_gaps(told_columns(fetched))
        findings.append(self._spool_finding())
        return findings

    def _spool_finding(self) -> Finding:
        folder = self.spool.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            return ("spool", False, f"{folder} cannot be written: {error.strerror}: give this user the right to")
        return ("spool", True, f"{folder} can be written")

    def close(self) -> None:
        self._pages.close()
        if self._pods is not None:
            self._pods.close()


def _is_http(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https")
    except ValueError:
        return False


def _host(url: str) -> str:
    try:
        return short_host(urlsplit(url).netloc.rsplit("@", 1)[-1])
    except ValueError:
        return url


def _with_up(samples: pl.DataFrame, up: dict[str, bool], at: datetime, cluster: str) -> pl.DataFrame:
    """One row a node at the time of the reading, with what its own sensors gave then."""
    nodes = pl.DataFrame(
        {"node": list(up), "is_up": list(up.values())}, schema={"node": pl.String, "is_up": pl.Boolean}
    )
    sensors = samples.group_by("node").agg(pl.col(name for name in NODE_QUANTITIES if name != "is_up").max())
    rows = nodes.join(sensors, on="node", how="left").with_columns(ts=pl.lit(at), cluster=pl.lit(cluster))
    return node_frame(rows)
